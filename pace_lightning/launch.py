"""Starts the ranks of this machine, and ends them together.

A rank is this very command again, with the environment that Lightning reads. They live and end as
one: when one fails, the others get a while to end by themselves, with what they know about it, and
are killed then. So no failure of one leaves another waiting, whatever it waits for. Signals are
passed on; a launcher that is killed takes its ranks along.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

GRACE_SECONDS = 30.0
"""From the first failure, or from a signal, to SIGTERM for the ranks that still run."""
KILL_SECONDS = 10.0
"""From SIGTERM to SIGKILL."""
LAUNCHER = "PACE_LIGHTNING_LAUNCHER"
"""Environment variable of a rank: the process that started it."""

_PR_SET_PDEATHSIG = 1


class _Signaled(Exception):  # ends a wait
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def launch(
    num_ranks: int,
    emit: Callable[[str], None],
    *,
    command: Sequence[str] | None = None,
    grace_seconds: float = GRACE_SECONDS,
    kill_seconds: float = KILL_SECONDS,
) -> int:
    """Run the ranks to their end.

    Args:
        num_ranks: how many, at least 1.
        emit: prints a line.
        command: of each; None: that of this process.
        grace_seconds: how long the others have after the first failure.
        kill_seconds: and then, after SIGTERM.

    Returns:
        0 if all succeeded, else the code of the first that failed, as a shell gives it; 130 or 143
        if this process was sent SIGINT or SIGTERM.
    """
    command = command or [sys.executable, *sys.orig_argv[1:]]
    environment = {
        # of a job with one task; Lightning would ask SLURM which of its ranks each of ours is
        **{name: value for name, value in os.environ.items() if name != "SLURM_NTASKS"},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        LAUNCHER: str(os.getpid()),
    }
    handlers = {number: signal.signal(number, _raise) for number in (signal.SIGINT, signal.SIGTERM)}
    ranks: list[subprocess.Popen[bytes]] = []
    code = 0
    try:
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # a group of its own: Ctrl-C in a terminal reaches it once, through this process
            ranks.append(subprocess.Popen(command, env=environment | own, start_new_session=True))
        if (failed := _wait(ranks)) is None:
            return 0
        code = _shell_code(ranks[failed])
        emit(f"rank {failed} ended with code {code}; the other ranks end too")
    except _Signaled as error:
        code = 128 + error.number
        _tell(ranks, error.number)
    finally:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        _end(ranks, emit, grace_seconds, kill_seconds)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code


def follow_launcher(environment: Mapping[str, str]) -> None:
    """Called by each command: a rank that was launched here does not outlive its launcher."""
    launcher = environment.get(LAUNCHER)
    if launcher is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it ended before
        os._exit(1)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """The first rank that fails; None once all have succeeded."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [index for index, code in enumerate(codes) if code]
        if failed:
            return failed[0]
        if None not in codes:
            return None
        time.sleep(0.1)


def _end(
    ranks: Sequence[subprocess.Popen[bytes]],
    emit: Callable[[str], None],
    grace_seconds: float,
    kill_seconds: float,
) -> None:
    """Wait for those that still run; then ask them, then kill them."""
    for seconds, number in ((grace_seconds, signal.SIGTERM), (kill_seconds, signal.SIGKILL)):
        deadline = time.monotonic() + seconds
        while _running(ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left := _running(ranks):
            names = ", ".join(map(str, left))
            emit(f"rank {names} still runs after {seconds:g} s: {signal.Signals(number).name}")
            _tell(ranks, number)
    for rank in ranks:
        rank.wait()


def _running(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    return [index for index, rank in enumerate(ranks) if rank.poll() is None]


def _tell(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _shell_code(rank: subprocess.Popen[bytes]) -> int:
    """The exit code, with 128 + number for a signal."""
    code = rank.returncode
    return 128 - code if code < 0 else code


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _raise(number: int, frame: Any) -> None:
    raise _Signaled(number)
