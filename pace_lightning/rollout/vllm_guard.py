"""No process of vLLM outlives the trainer, however the trainer ends.

vLLM starts an engine process, and that one its workers. A worker notices the end of the engine
process, but nothing notices the end of a trainer that was killed. So each of these processes waits
for it: vLLM calls `install` in all of them, by the entry point ``vllm.general_plugins`` in
pyproject.toml. Standard library only.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

TRAINER_PID = "PACE_LIGHTNING_TRAINER_PID"
SCRATCH = "PACE_LIGHTNING_ENGINE_SCRATCH"
"""Directory that whoever notices the trainer's end removes."""

PLUGIN = "pace_lightning"
"""Name of the entry point."""

INHERITED_FROM_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)
"""What tells a process that it is a rank of the trainer's group; with these an engine may hang."""

INHERITED_PREFIXES = ("TORCHELASTIC_", "PL_", "GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")


@contextmanager
def engine_environment(settings: Mapping[str, str]) -> Iterator[None]:
    """While processes of the engine are started: ``settings``, and nothing of a launcher.

    A started process inherits ``os.environ``, and vLLM writes into it as well; all of it is put
    back afterwards.
    """
    tempfile.gettempdir()  # the trainer's own stays what it is
    before = dict(os.environ)
    for name in before:
        if name in INHERITED_FROM_LAUNCHERS or name.startswith(INHERITED_PREFIXES):
            del os.environ[name]
    os.environ.update(settings)
    os.environ[TRAINER_PID] = str(os.getpid())
    if "VLLM_PLUGINS" in before:
        os.environ["VLLM_PLUGINS"] = f"{before['VLLM_PLUGINS']},{PLUGIN}"
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def install() -> None:
    """End this process when the trainer ends, if there is one and it is another process."""
    trainer = os.environ.get(TRAINER_PID)
    if trainer is None or int(trainer) == os.getpid():
        return
    try:
        handle = os.pidfd_open(int(trainer))
    except ProcessLookupError:
        _end()
    else:
        threading.Thread(
            target=_outlive_not, args=(handle,), name="trainer-guard", daemon=True
        ).start()


def _outlive_not(handle: int) -> None:
    select.select([handle], [], [])  # a process handle is readable once the process has ended
    _end()


def _end() -> None:
    if scratch := os.environ.get(SCRATCH):
        shutil.rmtree(scratch, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)
