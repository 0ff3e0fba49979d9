"""A daemon thread with an event loop.

Started, called from other threads, and closed, each with a deadline. The mechanics under
`RolloutWorker`, kept apart so that each can be read alone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import wait as wait_for_futures
from typing import Any, TypeVar

from pace_lightning.rollout.groups import RolloutTimeoutError

log = logging.getLogger(__name__)
T = TypeVar("T")

_CLOSE_SECONDS = 20.0
_LOOK_SECONDS = 1.0
_LAG_LOOK_SECONDS = 0.2


class LoopThread:
    """One thread that runs ``_live`` in an event loop of its own.

    A subclass defines ``_live``, which sets ``_ready``, and sets ``_ending`` before it cleans up;
    ``_on_error``, which is told of the error that ended the thread before the clean-up; and
    ``describe`` for messages.

    Args:
        name: of the thread, for messages.
        excuse: whether something is going on that has a deadline of its own, so that the time for
            which it does does not count; any thread asks.
    """

    def __init__(self, name: str, excuse: Callable[[], bool] = lambda: False) -> None:
        self._name = name
        self._excuse = excuse
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._closed = False
        self._ending = False
        self._lag_seconds = 0.0

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def take_lag(self) -> float:
        """The longest time, in seconds, for which the loop ran nothing that was due; begins anew.

        Any thread. What blocks the loop makes deadlines, publications and tokens late by as much.
        """
        lag, self._lag_seconds = self._lag_seconds, 0.0
        return lag

    def describe(self) -> str:
        """One line for messages."""
        return f"{self._name} thread {'alive' if self.is_alive else 'dead'}"

    def close(self) -> None:
        """Stop the thread. Idempotent, bounded; never raises."""
        thread = self._thread
        if thread is None:
            return
        self._closed = True  # before looking for the loop: a thread that has none yet looks at this
        loop = self._loop
        if loop is not None and thread.is_alive():
            try:
                loop.call_soon_threadsafe(self._stop)
            except RuntimeError:
                log.debug("the %s loop was closed already", self._name)
        thread.join(_CLOSE_SECONDS)
        if thread.is_alive():
            log.warning(
                "the %s thread did not end within %s s: %s",
                self._name,
                _CLOSE_SECONDS,
                self.describe(),
            )

    def _start(self, timeout_seconds: float) -> bool:
        """Start the thread if it is new, wait for ``_ready``; False if that took too long."""
        if self._closed:
            raise RuntimeError(f"the {self._name} thread was closed; it cannot be started again")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        if not self._ready.wait(timeout_seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def _call(self, coroutine: Coroutine[Any, Any, T], *, timeout_seconds: float, what: str) -> T:
        """Run a coroutine in the loop, from another thread, and wait for it.

        Raises:
            RolloutTimeoutError: if it took longer than ``timeout_seconds``, what is excused not
                counted.
            BaseException: whatever it raised, or the error that ended the thread.
        """
        if self._error is not None or not self.is_alive or self._loop is None:
            coroutine.close()
            raise self._error or RuntimeError(f"the {self._name} thread is not running")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        now = time.monotonic()
        deadline = now + timeout_seconds
        remaining, excused = timeout_seconds, False
        while True:
            look = _LOOK_SECONDS if excused else min(_LOOK_SECONDS, max(0.0, remaining))
            if wait_for_futures([future], timeout=look).done:
                break
            if not self.is_alive:
                raise self._error or RuntimeError(f"the {self._name} thread ended")
            before, now = now, time.monotonic()
            was_excused, excused = excused, self._excuse()
            if was_excused or excused:
                deadline += now - before
            remaining = deadline - now
            if remaining < 0:
                future.cancel()
                raise RolloutTimeoutError(
                    f"{what} took longer than {timeout_seconds} s: {self.describe()}"
                )
        try:
            return future.result()
        except FutureCancelledError:
            raise self._error or RuntimeError(f"the {self._name} thread was closed") from None

    # --- everything below runs in the thread -----------------------------------------------------

    async def _live(self) -> None:
        """What the thread does."""
        raise NotImplementedError

    def _on_error(self, error: BaseException) -> None:
        """The thread ends with this error."""

    def _run(self) -> None:
        try:
            asyncio.run(self._enter())
        except (asyncio.CancelledError, KeyboardInterrupt):
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            self._on_error(RuntimeError(f"the {self._name} thread has ended"))
            self._ready.set()

    async def _enter(self) -> None:
        self._main = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        if self._closed:
            return
        watch = asyncio.create_task(self._measure_lag())
        try:
            await self._live()
        finally:
            watch.cancel()

    async def _measure_lag(self) -> None:
        while True:
            due = time.monotonic() + _LAG_LOOK_SECONDS
            await asyncio.sleep(_LAG_LOOK_SECONDS)
            self._lag_seconds = max(self._lag_seconds, time.monotonic() - due)

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._on_error(self._error)

    def _stop(self) -> None:
        """End the main task, unless it is cleaning up already: that must not be interrupted."""
        if not self._ending and self._main is not None:
            self._main.cancel()
