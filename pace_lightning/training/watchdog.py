"""Ends a run in which nothing happens any more, and says who waited for whom.

Every wait has a deadline of its own; this is for what no deadline covers: a main thread that hangs
in a kernel, a driver or a file system, or two parties that wait for each other. Three stages, each
for the case that the one before it cannot act:

    1. a thread of its own prints the report and the stacks of all threads, and makes the trainer's
       wait for groups raise `NoProgressError`
    2. a grace period later, if the run has not ended, the thread writes the summary and leaves the
       process with `EXIT_CODE`, whatever the main thread does
    3. if not even this thread runs, because something holds the interpreter's lock, faulthandler's
       own timer prints the stacks and leaves with code 1
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType

from pace_lightning.rollout.rollouts import Rollout

EXIT_CODE = 75
GRACE_SECONDS = 60.0
"""Longer than a bounded teardown takes."""
_LOOK_SECONDS = 5.0
_ALL_STEPS_SECONDS = 30.0
"""More than the steps of stages 1 and 2 take together, each with its own limit."""
_STDERR = 2

TRAINER_WAITS: dict[str | None, tuple[str, str]] = {
    "setup": ("sets up the run", "trainer.watchdog_seconds"),
    "wait": ("waits for the rollout thread to make groups ready", "trainer.draw_timeout_seconds"),
    "train": ("computes a micro-batch", "trainer.micro_batches"),
    "pacing": ("sleeps", "trainer.min_step_seconds"),
    "publish": ("waits for the engine to take weights", "engine.publish_timeout_seconds"),
    "bookkeeping": ("logs, or makes the next batch", "trainer.watchdog_seconds"),
    "evaluate": ("waits for the engine and the scorer to evaluate", "eval.timeout_seconds"),
    "checkpoint": ("waits for the disk", "trainer.checkpoint_every_steps"),
    "close": ("waits for engine and scorer to end", "trainer.watchdog_seconds"),
    None: ("is between two activities", "trainer.watchdog_seconds"),
}
"""What each part of the time ledger is waiting for, and the setting that bounds it."""


class NoProgressError(RuntimeError):
    """Nothing happened for longer than `trainer.watchdog_seconds`."""


def who_waits(
    limit_seconds: float,
    *,
    trainer: tuple[str, float] | None,
    rollout: str,
    num_ready: int,
    rollouts: Sequence[Rollout],
) -> str:
    """The report.

    Args:
        limit_seconds: how long nothing happened.
        trainer: part of the time ledger that the main thread is in, and since when.
        rollout: what the worker says of itself.
        num_ready: groups in the pool.
        rollouts: groups in flight.
    """
    now = time.monotonic()
    part, since = trainer or (None, None)
    does, setting = TRAINER_WAITS.get(part, TRAINER_WAITS[None])
    lasting = "" if since is None else f" for {now - since:.1f} s"
    settings = sorted({setting} | {rollout.setting for rollout in rollouts})
    return "\n".join(
        [
            f"no progress for {limit_seconds:g} s (trainer.watchdog_seconds); the run is ended",
            f"  trainer: {does}{lasting}",
            f"  rollout: {rollout}",
            f"  pool: {num_ready} groups ready",
            *(f"  {rollout.describe(now)}" for rollout in rollouts),
            "  if it is slow and not stuck, raise trainer.watchdog_seconds; these settings bound "
            f"what is waited for: {', '.join(settings)}",
        ]
    )


class Watchdog:
    """Watches while its context is entered. Used once.

    Time is counted in looks, so that a machine that was suspended does not count as a run that
    hangs; but stage 3 cannot tell the two apart.

    Args:
        limit_seconds: how long nothing may happen; 0: never watch.
        progress: a value that changes whenever something happens; must not wait.
        report: who waits for whom; must not wait.
        end: told of the error; makes the run end if it can.
        last_words: told of the report before the process is left; for the summary.
        grace_seconds: from stage 1 to stage 2.
        leave: leaves the process.
    """

    def __init__(
        self,
        limit_seconds: float,
        *,
        progress: Callable[[], Hashable],
        report: Callable[[], str],
        end: Callable[[BaseException], None],
        last_words: Callable[[str], None] = lambda _: None,
        grace_seconds: float | None = None,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._limit_seconds = limit_seconds
        self._progress = progress
        self._report = report
        self._end = end
        self._last_words = last_words
        self._grace_seconds = GRACE_SECONDS if grace_seconds is None else grace_seconds
        self._leave = leave
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        """Begin to watch."""
        if self._limit_seconds:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """The run has ended."""
        self._over.set()
        if self._limit_seconds:
            self._thread.join(1.0)
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        look = min(_LOOK_SECONDS, self._limit_seconds / 10)
        seen, quiet = self._progress(), 0.0
        while True:
            _leave_after(self._limit_seconds + self._grace_seconds)
            if self._over.wait(look):
                return
            now = self._progress()
            quiet = quiet + look if now == seen else 0.0
            seen = now
            if quiet >= self._limit_seconds:
                break
        self._bite()

    def _bite(self) -> None:
        _leave_after(self._grace_seconds + _ALL_STEPS_SECONDS)
        try:
            report = self._report()
        except Exception as error:
            report = f"no progress for {self._limit_seconds:g} s; no report: {error!r}"
        _say(report)
        _try(lambda: faulthandler.dump_traceback(file=_STDERR, all_threads=True), seconds=5.0)
        # The lock that this takes may be what the main thread holds.
        _try(lambda: self._end(NoProgressError(report)), seconds=1.0)
        if self._over.wait(self._grace_seconds):
            return
        _say(
            f"the run did not end within {self._grace_seconds:g} s more; leaving the process with "
            f"code {EXIT_CODE}"
        )
        _try(lambda: self._last_words(report), seconds=5.0)
        self._leave(EXIT_CODE)


def _leave_after(seconds: float) -> None:
    """Stage 3; replaces what was asked for before."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)


def _say(text: str) -> None:
    """Without any lock, and also if nobody reads it."""
    _try(lambda: os.write(_STDERR, f"{text}\n".encode()), seconds=5.0)


def _try(function: Callable[[], object], *, seconds: float) -> None:
    """Call something that may hang, and wait for it for a while."""
    thread = threading.Thread(target=function, name="watchdog-helper", daemon=True)
    thread.start()
    thread.join(seconds)
