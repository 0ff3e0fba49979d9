"""The process in which a reward function runs, and the parent's handle on it.

    python -P scorer_process.py SETTINGS PARENT_PID REQUEST REPLY LIFELINE

The settings are JSON, see `ScorerSettings`; the pipes are file descriptors. Requests and replies
are JSON, each preceded by its length in 8 bytes, over pipes of their own: what the function prints
goes to stderr and disturbs nothing. The function is called in the main thread, so that it may use
signals.

It is imported from the declared paths, from ``PYTHONPATH`` and from installed packages, not from
the current directory. Of the environment it sees what is on a list, which holds no secret. Its
memory, and its CPU time for one group, are limited. All that is against accidents: it runs with the
rights of the user, in no sandbox.
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
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_HEADER_BYTES = 8
_MAX_ERROR_CHARACTERS = 20_000
_POLL_SECONDS = 0.2
_PASSED = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP"),
    *("PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"),
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    "CUDA_VISIBLE_DEVICES",
)
"""Environment variables that every scorer may see, beside those that start as below."""
_PASSED_PREFIXES = ("LC_", "PACE_LIGHTNING_")
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class ScorerSettings:
    """What a scorer process is and may do."""

    function: str
    """``module:function``."""
    paths: tuple[str, ...] = ()
    """Directories to import from, before all others."""
    environment: tuple[str, ...] = ()
    """Environment variables to pass on, beside the harmless ones."""
    memory_gib: float = 4.0
    """Of data: heap, stacks and private mappings."""
    cpu_seconds: float = 20.0
    """For one group, over all threads."""


class DeadlinePassed(Exception):
    """The process did not answer in time."""


class ProcessDied(Exception):
    """The process is gone."""


class ScorerProcess:
    """The parent's side: one scorer process and our ends of its pipes."""

    def __init__(self, settings: ScorerSettings) -> None:
        """Start it; it greets with a message when it has imported the function."""
        self.ready = False
        request, self._request = os.pipe()
        self._reply, reply = os.pipe()
        # never written to: its end tells the child that we are gone
        lifeline, self._lifeline = os.pipe()
        # -P: neither the current directory nor this file's can shadow a module
        command = [sys.executable, "-P", __file__, json.dumps(asdict(settings))]
        try:
            self._popen = subprocess.Popen(
                [*command, *map(str, (os.getpid(), request, reply, lifeline))],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
                pass_fds=(request, reply, lifeline),
                env=_environment(os.environ, settings.environment),
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
    settings = ScorerSettings(**json.loads(arguments[0]))
    parent, request_fd, reply_fd, lifeline_fd = (int(argument) for argument in arguments[1:])
    for fd in (request_fd, reply_fd, lifeline_fd):
        os.set_inheritable(
            fd, False
        )  # programs started by the function must not hold our pipes open
    os.dup2(2, 1)
    _die_with_parent(parent, lifeline_fd)
    _limit_memory(settings.memory_gib)
    _import_own_package()
    sys.path[:0] = settings.paths
    try:
        reward = load_function(settings.function)
    except _NotLoadable as error:
        _send(reply_fd, {"error": str(error)})
        return 1
    _send(reply_fd, {"ready": True})
    while (request := _receive(request_fd)) is not None:
        _limit_cpu(settings.cpu_seconds)
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
            "(looked in reward.paths, PYTHONPATH and the installed packages, not in the current "
            f"directory; name its directory in reward.paths):\n{traceback.format_exc()}"
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
    except BaseException as error:  # also SystemExit, and time-outs that are not Exceptions
        # what filled the memory may still be there
        spent = isinstance(error, MemoryError)
        return {"error": traceback.format_exc()[-_MAX_ERROR_CHARACTERS:], "spent": spent}
    finally:
        signal.alarm(0)  # an alarm left behind would kill the process during a later group


def _environment(inherited: Mapping[str, str], declared: Sequence[str]) -> dict[str, str]:
    """What the process may see of the parent's environment."""
    passed = {
        name: value
        for name, value in inherited.items()
        if name in _PASSED or name in declared or name.startswith(_PASSED_PREFIXES)
    }
    return {**passed, "OMP_NUM_THREADS": "1"}


def _import_own_package() -> None:
    """Import this package from where this file is, wherever else one is installed."""
    root = str(Path(__file__).resolve().parents[2])
    sys.path.insert(0, root)
    try:
        importlib.import_module("pace_lightning.tasks")
    finally:
        sys.path.remove(root)


def _limit_memory(gib: float) -> None:
    """Allocations beyond it raise MemoryError. Linux counts private mappings, too."""
    _lower_limit(resource.RLIMIT_CORE, 0)
    _lower_limit(resource.RLIMIT_DATA, int(gib * _GIB))


def _limit_cpu(seconds: float) -> None:
    """The kernel ends the process with SIGXCPU when all its threads have used so much more."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _lower_limit(resource.RLIMIT_CPU, math.ceil(usage.ru_utime + usage.ru_stime + seconds))


def _lower_limit(kind: int, value: int) -> None:
    """Set the soft limit; the hard one, which was there before us, stays."""
    _, hard = resource.getrlimit(kind)
    soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (soft, hard))


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
