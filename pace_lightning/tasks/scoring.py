"""Reward functions in worker processes that can be killed; an error is not a wrong answer.

A verifier may loop forever, crash its process, or rely on signals that only work in a main thread.
So each runs in the main thread of a process of its own (``scorer_process``), one group at a time.
When a group passes its deadline the process is killed, with every process that it started and that
stayed in its process group, and a fresh one takes its place. A group ends in rewards, in
``ScorerError`` or in ``ScorerTimeout``, never in rewards that were made up.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pace_lightning.tasks.scorer_process import (
    DeadlinePassed,
    ProcessDied,
    ScorerProcess,
    ScorerSettings,
)

logger = logging.getLogger(__name__)

Content = str | list[dict[str, str]]


class ScorerError(RuntimeError):
    """The reward function raised, returned something other than numbers, or its process died."""


class ScorerTimeout(RuntimeError):
    """The reward function passed its deadline and was killed."""


class ScorerClosed(RuntimeError):
    """The pool was closed before the group was scored."""


class TooManyScorerErrors(RuntimeError):
    """So many groups could not be scored that training would learn from a biased rest."""


class ScorerPool:
    """A reward function, served by worker processes.

    ``score`` may be called from any thread and waits; ``score_async`` waits without blocking the
    event loop. One lock guards which processes exist and which are idle; a process in use belongs
    to the thread that scores with it.
    """

    def __init__(
        self,
        function: str,
        *,
        num_workers: int = 1,
        timeout_seconds: float = 20.0,
        startup_timeout_seconds: float = 30.0,
        paths: Sequence[str] = (),
        environment: Sequence[str] = (),
        memory_gib: float = 4.0,
    ) -> None:
        """Describe the pool; ``start`` starts it.

        Args:
            function: ``module:function``, called as ``fn(prompts, completions, **columns) ->
                list[float]`` with keyword arguments; columns are lists with one entry per
                completion.
            num_workers: Processes, i.e. groups scored at once.
            timeout_seconds: For one group, from the moment a process begins to score it; also the
                CPU time that all its threads together may use.
            startup_timeout_seconds: For starting a process and importing the function.
            paths: Directories to import from, beside ``PYTHONPATH`` and installed packages.
            environment: Names of environment variables that the processes need; of the others
                they see only harmless ones.
            memory_gib: Of one process.
        """
        if not re.fullmatch(r"[\w.]+:\w+", function):
            raise ValueError(
                f"reward function {function!r}; needed 'module:function', e.g. "
                "'my_rewards:exact_match'"
            )
        if num_workers < 1 or min(timeout_seconds, startup_timeout_seconds, memory_gib) <= 0:
            raise ValueError(
                f"num_workers = {num_workers}, timeout_seconds = {timeout_seconds}, "
                f"startup_timeout_seconds = {startup_timeout_seconds}, memory_gib = {memory_gib}; "
                "needed at least 1 worker, positive times and memory"
            )
        if absent := [path for path in paths if not Path(path).is_dir()]:
            raise ValueError(
                f"reward.paths has {absent}, which are no directories here (looked from "
                f"{os.getcwd()!r}); correct or remove them"
            )
        if unset := [name for name in environment if name not in os.environ]:
            raise ValueError(
                f"reward.environment has {unset}, which are not set here; set or remove them"
            )
        self._function = function
        self._settings = ScorerSettings(
            function=function,
            paths=tuple(os.path.abspath(path) for path in paths),
            environment=tuple(environment),
            memory_gib=memory_gib,
            cpu_seconds=timeout_seconds,
        )
        self._num_workers = num_workers
        self._timeout = timeout_seconds
        self._startup_timeout = startup_timeout_seconds
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="scorer")
        self._changed = threading.Condition()
        self._processes: list[ScorerProcess] = []
        self._idle: list[ScorerProcess] = []
        self._started = False
        self._closed = False

    def start(self) -> None:
        """Start all processes and wait until each has imported the function.

        Raises:
            ScorerError: if the function cannot be imported or is not callable; shows why.
            ScorerTimeout: if importing takes longer than ``startup_timeout_seconds``.
        """
        with self._changed:
            if self._started or self._closed:
                raise RuntimeError(
                    f"the pool for {self._function!r} was started or closed before; make a new one"
                )
            self._started = True
        try:
            with self._changed:
                for _ in range(self._num_workers):
                    self._processes.append(ScorerProcess(self._settings))
                starting = list(self._processes)
            for process in starting:
                self._wait_ready(process)
        except BaseException as error:
            with self._changed:
                self._idle = list(self._processes)  # none is in use: close() may discard them
            self.close()
            if isinstance(error, ProcessDied):
                raise ScorerError(
                    f"the process of reward function {self._function!r} died while importing it "
                    "(crash, exit or out of memory?); import its module by hand to see why"
                ) from None
            raise
        with self._changed:
            self._idle = starting
            self._changed.notify_all()

    def score(
        self, prompt_content: Content, completions: list[str], columns: Mapping[str, Any]
    ) -> list[float]:
        """Rewards of the completions of one prompt; waits for a free process first.

        If the prompt is a list of messages, the function receives each completion as such a list,
        too.

        Args:
            prompt_content: As in the data set.
            completions: Response texts.
            columns: The other columns of the prompt's row.

        Raises:
            ScorerError: the function raised (with its traceback), returned something invalid, or
                its process died.
            ScorerTimeout: the deadline passed.
            ScorerClosed: the pool was closed meanwhile.
            ValueError: the group cannot be sent to another process.
        """
        request = _encode(prompt_content, completions, columns)
        process = self._acquire()
        try:
            self._wait_ready(process)
            reply = process.exchange(request, time.monotonic() + self._timeout)
        except DeadlinePassed:
            self._replace(process)
            raise ScorerTimeout(
                f"reward function {self._function!r} took longer than {self._timeout} s for one "
                f"group of {len(completions)} completions and was killed; raise the scoring "
                "time-out, or make the function give up"
            ) from None
        except ProcessDied:
            status = self._replace(process)
            self._check_open()
            raise ScorerError(
                f"the process of reward function {self._function!r} died {status} while it scored "
                f"{len(completions)} completions (crash, exit, out of memory, or more than "
                f"{self._timeout} s of CPU time?); a fresh one takes its place"
            ) from None
        except BaseException:  # the pipe may hold half a message
            self._replace(process)
            raise
        if reply.get("spent"):
            self._replace(process)
        else:
            self._release(process)
        if "error" in reply:
            raise ScorerError(f"reward function {self._function!r} failed:\n{reply['error']}")
        return [float(reward) for reward in reply["rewards"]]

    async def score_async(
        self, prompt_content: Content, completions: list[str], columns: Mapping[str, Any]
    ) -> list[float]:
        """``score`` on the pool's own threads, one per process; waiting there has no deadline."""
        self._check_open()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._executor, self.score, prompt_content, completions, columns
        )

    def close(self) -> None:
        """Kill all processes and end all threads, within 5 s; may be called again.

        Groups that have not been scored yet raise ``ScorerClosed``.
        """
        with self._changed:
            self._closed = True
            for process in self._processes:
                process.kill()
            for process in self._idle:
                process.discard()
                self._processes.remove(process)
            self._idle = []
            self._changed.notify_all()
            # those in use are discarded by the threads that use them, which see the end of the pipe
            if not self._changed.wait_for(lambda: not self._processes, timeout=3.0):
                logger.error(
                    "%d scorer threads did not notice the end of the pool", len(self._processes)
                )
        self._executor.shutdown(wait=not self._processes)

    def _check_open(self) -> None:
        if self._closed:
            raise ScorerClosed(f"the pool for reward function {self._function!r} is closed")

    def _acquire(self) -> ScorerProcess:
        with self._changed:
            if not self._started:
                raise RuntimeError(
                    f"the pool for reward function {self._function!r} has not been started; call "
                    "start()"
                )
            # bounded: each group ahead ends at its deadline
            self._changed.wait_for(lambda: self._closed or self._idle or not self._processes)
            self._check_open()
            if not self._idle:
                raise ScorerError(
                    f"no process is left for reward function {self._function!r}: none could be "
                    "started"
                )
            return self._idle.pop()

    def _wait_ready(self, process: ScorerProcess) -> None:
        if process.ready:
            return
        try:
            greeting = process.receive(time.monotonic() + self._startup_timeout)
        except DeadlinePassed:
            raise ScorerTimeout(
                f"reward function {self._function!r} was not imported within "
                f"{self._startup_timeout} s; make its module import faster, or raise "
                "reward.startup_timeout_seconds"
            ) from None
        if "error" in greeting:
            raise ScorerError(
                f"reward function {self._function!r} cannot be used: {greeting['error']}"
            )
        process.ready = True

    def _release(self, process: ScorerProcess) -> None:
        """Give a healthy process back."""
        with self._changed:
            if self._closed:
                process.discard()
                self._processes.remove(process)
            else:
                self._idle.append(process)
            self._changed.notify_all()

    def _replace(self, process: ScorerProcess) -> str:
        """Discard a process in use and start a fresh one, idle at once. Says how the old ended."""
        with self._changed:
            status = process.discard()
            self._processes.remove(process)
            try:
                if not self._closed:
                    fresh = ScorerProcess(self._settings)
                    self._processes.append(fresh)
                    self._idle.append(fresh)
            finally:
                self._changed.notify_all()
        return status


class ErrorBudget:
    """Ends the run when too many recent groups could not be scored. Used from one thread."""

    def __init__(self, max_share: float, window: int = 50, minimum: int = 8) -> None:
        """Judge the last ``window`` groups, once there are ``minimum`` of them.

        A single failure never ends the run, unless ``max_share`` is 0.
        """
        if not 0 <= max_share <= 1 or not 1 <= minimum <= window:
            raise ValueError(
                f"max_share = {max_share}, window = {window}, minimum = {minimum}; needed a share "
                "from 0 to 1 and 1 <= minimum <= window"
            )
        self._max_share = max_share
        self._minimum = minimum
        self._recent: deque[bool] = deque(maxlen=window)
        self._last_error = "none"

    def record(self, ok: bool, error: str | BaseException = "") -> None:
        """Note one group, scored or not.

        Raises:
            TooManyScorerErrors: if the share of failures is over the budget.
        """
        self._recent.append(ok)
        if not ok:
            self._last_error = str(error) or "not given"
        num_groups, num_failed = len(self._recent), self._recent.count(False)
        tolerated = max(self._max_share * num_groups, 1 if self._max_share else 0)
        if num_groups >= self._minimum and num_failed > tolerated:
            raise TooManyScorerErrors(
                f"{num_failed} of the last {num_groups} groups could not be scored, more than the "
                f"allowed share of {self._max_share}. Correct the reward function or the data, or "
                f"allow a larger share. Last error: {self._last_error}"
            )


def _encode(prompt_content: Content, completions: list[str], columns: Mapping[str, Any]) -> bytes:
    """The request as JSON; names the column that is to blame if that is impossible."""
    if not completions:
        raise ValueError("a group to be scored needs at least one completion, got none")
    for name, value in columns.items():
        if name in ("prompts", "completions"):
            raise ValueError(
                f"column {name!r} has the name of an argument of the reward function; rename it"
            )
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"column {name!r} ({type(value).__name__}) cannot be handed to the reward "
                f"function's process: {error}; drop it, or turn it into text, numbers, lists or "
                "mappings"
            ) from error
    if isinstance(prompt_content, str):
        shaped: list[Any] = list(completions)
    else:
        shaped = [[{"role": "assistant", "content": text}] for text in completions]
    return json.dumps(
        {"prompt": prompt_content, "completions": shaped, "columns": dict(columns)}
    ).encode()
