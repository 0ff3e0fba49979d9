"""The process in which a reward function runs, and the parent's handle on it.

    python -m pace_lightning.tasks.scorer_process FUNCTION PARENT_PID REQUEST REPLY LIFELINE

The function is given as ``module:function``, the pipes as file descriptors.
Requests and replies are JSON, each preceded by its length in 8 bytes, over pipes of their own: what
the function prints goes to stderr and disturbs nothing. The function is called in the main thread,
so that it may use signals.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import fcntl
import importlib
import json
import logging
import math
import os
import pkgutil
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger(__name__)

_HEADER_BYTES = 8
_MAX_ERROR_CHARACTERS = 20_000
_POLL_SECONDS = 0.2
_DISTRIBUTED = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_SCRUBBED = {*_DISTRIBUTED, "MASTER_ADDR", "MASTER_PORT"}


class DeadlinePassed(Exception):
    """The process did not answer in time."""


class ProcessDied(Exception):
    """The process is gone."""


class ScorerProcess:
    """The parent's side: one scorer process and our ends of its pipes."""

    def __init__(self, function: str) -> None:
        """Start it; it greets with a message when it has imported the function."""
        self.ready = False
        request, self._request = os.pipe()
        self._reply, reply = os.pipe()
        # never written to: its end tells the child that we are gone
        lifeline, self._lifeline = os.pipe()
        environment = {name: value for name, value in os.environ.items() if name not in _SCRUBBED}
        command = [sys.executable, "-m", "pace_lightning.tasks.scorer_process", function]
        try:
            self._popen = subprocess.Popen(
                [*command, *map(str, (os.getpid(), request, reply, lifeline))],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
                pass_fds=(request, reply, lifeline),
                env={**environment, "OMP_NUM_THREADS": "1"},
            )
        except BaseException:
            self._close_pipes()
            raise
        finally:
            for fd in (request, reply, lifeline):
                os.close(fd)
        os.set_blocking(self._request, False)
        os.set_blocking(self._reply, False)

    def exchange(self, request: bytes, deadline: float) -> dict[str, Any]:
        """Send a request and wait for the reply, both before ``deadline`` (``time.monotonic``)."""
        view = memoryview(len(request).to_bytes(_HEADER_BYTES, "big") + request)
        while view:
            self._wait(self._request, select.POLLOUT, deadline)
            try:
                view = view[os.write(self._request, view) :]
            except BrokenPipeError:
                raise ProcessDied from None
        return self.receive(deadline)

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next message."""
        size = int.from_bytes(self._read(_HEADER_BYTES, deadline), "big")
        message: dict[str, Any] = json.loads(self._read(size, deadline))
        return message

    def kill(self) -> None:
        """SIGKILL to the whole process group.

        Safe from any thread until ``discard``: the process is not reaped before.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def discard(self) -> str:
        """Kill, reap and close; only by the thread that uses it. Says how the process ended."""
        self.kill()
        try:
            code = self._popen.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            logger.error("scorer process %d does not end on SIGKILL", self._popen.pid)
            code = -signal.SIGKILL
        self._close_pipes()
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait(self._reply, select.POLLIN, deadline)
            chunk = os.read(self._reply, size - len(data))
            if not chunk:
                raise ProcessDied
            data += chunk
        return bytes(data)

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        """Until ``fd`` is usable or closed.

        The end of the pipe alone would not do: a fork of the child may keep it open.
        """
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        poller = select.poll()
        poller.register(fd, event)
        while not poller.poll(1000 * max(0.0, min(_POLL_SECONDS, deadline - time.monotonic()))):
            if os.waitid(os.P_PID, self._popen.pid, flags) is not None:
                raise ProcessDied
            if time.monotonic() >= deadline:
                raise DeadlinePassed

    def _close_pipes(self) -> None:
        for fd in (self._request, self._reply, self._lifeline):
            os.close(fd)


def main(arguments: Sequence[str]) -> int:
    """Say that the function is ready, or why not; then serve requests until the pipe is closed."""
    function = arguments[0]
    parent, request_fd, reply_fd, lifeline_fd = (int(argument) for argument in arguments[1:])
    for fd in (request_fd, reply_fd, lifeline_fd):
        os.set_inheritable(
            fd, False
        )  # programs started by the function must not hold our pipes open
    os.dup2(2, 1)
    _die_with_parent(parent, lifeline_fd)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        reward = load_function(function)
    except _NotLoadable as error:
        _send(reply_fd, {"error": str(error)})
        return 1
    _send(reply_fd, {"ready": True})
    while (request := _receive(request_fd)) is not None:
        _send(reply_fd, _judge(reward, request))
    return 0


def load_function(function: str) -> Callable[..., Any]:
    """Import ``module:function``; the error shows the import's traceback and near names."""
    module_name, _, name = function.partition(":")
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:
        near = ""
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and module_name.startswith(error.name)
        ):
            near = _near(error.name, _sibling_modules(error.name))
        raise _NotLoadable(
            f"cannot import module {module_name!r} of reward function {function!r}{near} "
            f"(searched from {os.getcwd()!r}):\n{traceback.format_exc()}"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        callables = [
            other
            for other, value in vars(module).items()
            if callable(value) and not other.startswith("_")
        ]
        state = (
            "has no" if found is None else f"holds a {type(found).__name__}, not a function, under"
        )
        raise _NotLoadable(
            f"module {module_name!r} {state} {name!r}{_near(name, callables)}; its callables: "
            f"{sorted(callables)}"
        )
    loaded: Callable[..., Any] = found
    return loaded


class _NotLoadable(Exception):
    """The function cannot be imported or called."""


def _judge(reward: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    """Call the function on one group and check what it returned."""
    completions = request["completions"]
    n = len(completions)
    columns = {
        name: [copy.deepcopy(value) for _ in range(n)] for name, value in request["columns"].items()
    }
    prompts = [copy.deepcopy(request["prompt"]) for _ in range(n)]
    try:
        returned = reward(prompts=prompts, completions=completions, **columns)
        return {"rewards": _numbers(returned, n)}
    except BaseException:  # also SystemExit, and time-outs that are not Exceptions
        return {"error": traceback.format_exc()[-_MAX_ERROR_CHARACTERS:]}
    finally:
        signal.alarm(0)  # an alarm left behind would kill the process during a later group


def _numbers(returned: Any, n: int) -> list[float]:
    if returned is None or isinstance(returned, str | bytes | dict):
        raise TypeError(
            f"the reward function returned {returned!r:.80}; needed a list of {n} numbers"
        )
    entries = list(returned)
    if len(entries) != n:
        raise ValueError(
            f"the reward function returned {len(entries)} rewards for {n} completions; needed one "
            "each"
        )
    numbers = []
    for index, entry in enumerate(entries):
        if entry is None or isinstance(entry, str | bytes):
            raise TypeError(f"the reward of completion {index} is {entry!r:.80}; needed a number")
        number = float(entry)
        if not math.isfinite(number):
            raise ValueError(
                f"the reward of completion {index} is {number}; needed a finite number"
            )
        numbers.append(number)
    return numbers


def _die_with_parent(parent: int, lifeline_fd: int) -> None:
    """Kill this process group when the parent is gone.

    The parent holds the other end of the lifeline and never writes to it. On Linux the kernel
    itself signals the group when that end closes, even while the function holds the interpreter
    lock. The thread covers other systems, and forks of the parent that keep the pipe open.
    """
    if sys.platform == "linux":
        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(
            lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC
        )

    def watch() -> None:
        poller = select.poll()
        poller.register(lifeline_fd, select.POLLIN)
        while os.getppid() == parent and not poller.poll(500):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def _send(fd: int, message: dict[str, Any]) -> None:
    payload = json.dumps(message).encode()
    view = memoryview(len(payload).to_bytes(_HEADER_BYTES, "big") + payload)
    while view:
        view = view[os.write(fd, view) :]


def _receive(fd: int) -> dict[str, Any] | None:
    """The next request; None when the parent has closed the pipe."""
    header = _read(fd, _HEADER_BYTES)
    payload = _read(fd, int.from_bytes(header, "big")) if header else b""
    return json.loads(payload) if payload else None


def _read(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(fd, min(size - len(data), 1 << 20))
        if not chunk:
            return b""
        data += chunk
    return bytes(data)


def _sibling_modules(module_name: str) -> list[str]:
    package_name, dot, _ = module_name.rpartition(".")
    path = sys.modules[package_name].__path__ if package_name in sys.modules else None
    return [f"{package_name}{dot}{module.name}" for module in pkgutil.iter_modules(path)]


def _near(word: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(word, known, n=3)
    return f"; did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
