from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from experiments import ROOT, until


@pytest.fixture(autouse=True)
def untouched_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands change global settings of their process; here they share one with other tests."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_num_threads(threads)
    torch.random.set_rng_state(state)


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    """Every thread that the test started has ended."""
    before = set(threading.enumerate())
    yield

    def left() -> list[str]:
        return [thread.name for thread in set(threading.enumerate()) - before]

    until(lambda: not left(), seconds=5, what=f"the end of threads {left()}")
