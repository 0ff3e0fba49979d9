"""The rollout thread: keeps groups in flight, scores them, and puts them into the pool.

One event loop, in which nothing blocks: it waits for free slots (woken by a draw, a finished group
or a publication) and for the engine. The trainer's calls wait for the loop with a deadline.
Whatever ends the thread, the pool is told first of all.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TypeVar

from torch import Tensor

from pace_lightning.core.advantages import is_zero_variance
from pace_lightning.core.dispatch import Dispatch, DispatchCounts
from pace_lightning.core.pace import PrefixRescore
from pace_lightning.core.pool import TrajectoryPool
from pace_lightning.core.trajectory import EndOfData, Fate, PolicyVersion, Prompt, TrajectoryGroup
from pace_lightning.rollout.engine import Completion, RequestError, RolloutEngine, Sampling
from pace_lightning.rollout.groups import (
    EvaluatedPrompt,
    GeneratedStatistics,
    RolloutTimeoutError,
    ScoringFailedError,
    Streaks,
    build_group,
    evaluate,
    temporary_threads,
)
from pace_lightning.rollout.loop_thread import LoopThread
from pace_lightning.rollout.publication import PublishReport
from pace_lightning.rollout.rollouts import Leaving, Rollout, Rollouts
from pace_lightning.rollout.supervision import GroupTimeoutError, Patience, Supervisor

log = logging.getLogger(__name__)
T = TypeVar("T")


class RolloutWorker(LoopThread):
    """The producer of trajectories.

    Args:
        engine: generates; used from the rollout thread only.
        pool: where finished groups go.
        lease: next prompt; raises `EndOfData` after the last one.
        settle: called with ``(uid, fate, num_tokens)`` for each group that ends before the pool.
        score: judges the responses to one prompt, one number each; raises `ScoringFailedError`.
        shape_reward: from ``(score, num_tokens)`` to the reward that is trained on.
        dispatch: how much may be ahead of training.
        group_size: responses per prompt.
        sampling: of training rollouts.
        prefix_forgetting: from a response's re-scorings to its score; None: unfinished responses
            are not re-scored at publications.
        in_rounds: dispatch when nothing is in flight, all at once, the engine paused (mode sync).
        group_timeout_seconds: for the generation of one group.
        patience: what is done when generation fails or is late.
        drop_zero_variance: settle groups with equal scores at once (dynamic sampling).
        max_empty_groups: groups in a row without gradient before the run is ended.
        max_failed_groups: failed or timed-out groups in a row before the run is ended.
    """

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        pool: TrajectoryPool,
        lease: Callable[[], Prompt],
        settle: Callable[[str, Fate, int], None],
        score: Callable[[Prompt, Sequence[Completion]], Awaitable[Sequence[float]]],
        dispatch: Dispatch,
        group_size: int,
        sampling: Sampling,
        in_rounds: bool = False,
        prefix_forgetting: Callable[[Sequence[PrefixRescore]], float | None] | None = None,
        shape_reward: Callable[[float, int], float] = lambda score, _: score,
        group_timeout_seconds: float = 600.0,
        patience: Patience | None = None,
        drop_zero_variance: bool = True,
        max_empty_groups: int = 256,
        max_failed_groups: int = 16,
    ) -> None:
        super().__init__("rollout", excuse=lambda: self._supervisor.is_restarting())
        self.rollouts = Rollouts()
        """The groups in flight, and, given before `train`, what an earlier process had begun."""
        self._engine = engine
        self._supervisor = Supervisor(
            engine, patience, group_timeout_seconds=group_timeout_seconds, say=self.rollouts.say
        )
        self.incidents = self._supervisor.incidents
        self._pool = pool
        self._lease = lease
        self._settle = settle
        self._score = score
        self._build = functools.partial(
            build_group, shape_reward=shape_reward, forgetting=prefix_forgetting
        )
        self._dispatch = dispatch
        self._group_size = group_size
        self._sampling = sampling
        self._in_rounds = in_rounds
        self._rescores = prefix_forgetting is not None
        self._drop_zero_variance = drop_zero_variance
        self._streaks = Streaks(max_empty_groups, max_failed_groups)
        self._wake: asyncio.Event | None = None
        self._version: PolicyVersion = 0
        self._training = False
        self._dispatch_open = True
        self._data_ended = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_tokens = 0
        self._generated = GeneratedStatistics()

    # --- called by the trainer's thread ---------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Groups that are generated or scored."""
        return len(self._tasks)

    @property
    def progress(self) -> tuple[int, int]:
        """Changes whenever something happens on the rollout side."""
        return self.rollouts.num_events, self._engine.num_tokens_generated

    @property
    def num_tokens_generated(self) -> int:
        """Tokens of the training rollouts whose generation ended, whatever became of them."""
        return self._num_tokens

    @property
    def generated(self) -> GeneratedStatistics:
        """Totals since the start."""
        return self._generated

    def start(self, *, timeout_seconds: float) -> None:
        """Start the thread and wait until the engine is ready. Idempotent.

        Raises:
            RolloutTimeoutError: if the engine is not ready in time.
            RuntimeError: if the worker was closed.
            BaseException: whatever the engine's start raised.
        """
        self._pool.on_change = self.wake
        self._pool.describe_producer = self.describe
        if not self._start(timeout_seconds):
            raise RolloutTimeoutError(
                f"the engine was not ready after {timeout_seconds} s "
                f"(engine.startup_timeout_seconds): {self._engine.describe()}"
            )

    def snapshot(self, take: Callable[[list[Rollout]], T], *, timeout_seconds: float) -> T:
        """What ``take`` makes of the rollouts that have not ended; it must not wait.

        It is called in the rollout thread with the engine paused: no token flows, no group ends.
        """
        if not self.is_alive:
            return take(self.rollouts.unended())
        return self._call(self._snapshot(take), timeout_seconds=timeout_seconds, what="a snapshot")

    def train(self) -> None:
        """Begin to dispatch training rollouts."""
        self._call(self._set_training(True), timeout_seconds=30.0, what="the start of training")

    def stop_training(self) -> None:
        """Go on with no rollout; those in flight stay in the books, for a last checkpoint."""
        self._call(self._abandon(), timeout_seconds=30.0, what="the end of training")

    def advance(self, version: PolicyVersion) -> None:
        """The trainer reached ``version`` and publishes nothing."""
        self._call(self._advance(version), timeout_seconds=30.0, what="the new version")

    def publish(
        self,
        weights: Mapping[str, Tensor],
        version: PolicyVersion,
        *,
        timeout_seconds: float,
        clock: PolicyVersion | None = None,
    ) -> PublishReport:
        """Pause, load the weights of ``version``, go on. The weights must not change meanwhile.

        ``clock`` is the trainer's version; None: it is that of the weights.
        """
        work = self._publish(weights, version, version if clock is None else clock)
        return self._call(work, timeout_seconds=timeout_seconds, what="a publication")

    def before_loads(self, leaving: Leaving) -> None:
        """Have it called in the pause of each publication, before the load; see `Leaving`."""
        ready = self._pool.ready
        self._supervisor.leave = lambda: asyncio.to_thread(leaving, self.rollouts.sampled(ready()))

    def evaluate(
        self, prompts: Sequence[Prompt], *, samples: int, sampling: Sampling, timeout_seconds: float
    ) -> list[EvaluatedPrompt]:
        """Generate and score ``samples`` responses to each prompt under the published weights.

        Training rollouts in flight go on, new ones are not dispatched meanwhile.
        """
        work = self._evaluate(prompts, samples, sampling)
        return self._call(work, timeout_seconds=timeout_seconds, what="an evaluation")

    def waiting_trainer(self, engine_threads: int | None) -> AbstractContextManager[None]:
        """While the trainer waits, the engine may use the trainer's cores too."""
        return temporary_threads(self._engine, engine_threads)

    def wake(self) -> None:
        """Look for free slots again. Any thread; never waits."""
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None and not loop.is_closed():
            with suppress(RuntimeError):  # closed in between: nobody to wake
                loop.call_soon_threadsafe(wake.set)

    def describe(self) -> str:
        """One line for error messages: who waits for what."""
        ages = [time.monotonic() - rollout.since for rollout in self.rollouts.present()]
        return (
            f"{super().describe()} at version {self._version}, {len(ages)} groups in flight "
            f"(oldest for {max(ages, default=0.0):.0f} s), {len(self._pool)} ready, last event: "
            f"{self.rollouts.last_event}; {self._engine.describe()}"
        )

    # --- everything below runs in the rollout thread ---------------------------------------------

    async def _live(self) -> None:
        self._wake = asyncio.Event()
        try:
            await self._supervisor.start(lambda: self._version)
            self._ready.set()
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._error is not None:
                    raise self._error
                await self._dispatch_groups()
        except Exception as error:
            self._fail(error)  # the trainer must not wait for the clean-up below to hear of it
            raise
        finally:
            self._ending = True
            # publications and evaluations too: an engine that is paused is slow to close
            for task in (tasks := asyncio.all_tasks() - {asyncio.current_task()}):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._supervisor.close()

    def _on_error(self, error: BaseException) -> None:
        self._pool.fail(error)

    async def _dispatch_groups(self) -> None:
        if not self._in_rounds:
            self._create_rollouts(self._num_dispatchable())
        elif self._num_dispatchable() > 0:
            async with self._supervisor.paused():
                # Counted again: a publication or the end of training may have begun meanwhile.
                self._create_rollouts(self._num_dispatchable())
                await asyncio.sleep(0)  # each of them submits its request
        if self._data_ended and not self._tasks:
            self._pool.close()

    def _num_dispatchable(self) -> int:
        closed = self._data_ended or not (self._training and self._dispatch_open)
        if closed or (self._in_rounds and self._tasks):
            return 0
        counts = DispatchCounts(
            in_flight=self.num_in_flight,
            ready=len(self._pool),
            accepted=self._pool.num_accepted,
            version=self._version,
        )
        return self._dispatch.capacity(counts)

    def _create_rollouts(self, num_groups: int) -> None:
        for _ in range(num_groups):
            try:
                rollout = self.rollouts.next(self._lease)
            except EndOfData:
                self._data_ended = True
                return
            self.rollouts.begin(rollout, f"dispatched at version {self._version}")
            task = asyncio.create_task(self._roll_out(rollout))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and self._error is None:
            self._error = task.exception()
        assert self._wake is not None  # set before the first task exists
        self._wake.set()

    async def _roll_out(self, rollout: Rollout) -> None:
        """The life of one group, from dispatch to the pool or to another fate."""
        prompt = rollout.prompt
        try:
            completions = await self._supervisor.generate_group(
                prompt.token_ids,
                n=self._group_size,
                sampling=self._sampling,
                responses=rollout.responses,
                note=functools.partial(self.rollouts.note, prompt.uid),
            )
        except GroupTimeoutError as error:
            self._lost(prompt, Fate.TIMED_OUT, str(error))
            return
        except RequestError as error:
            self._lost(prompt, Fate.FAILED, str(error))
            return
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        self._num_tokens += num_tokens
        self.rollouts.score(prompt.uid, num_tokens)
        try:
            scores = await self._score(prompt, completions)
        except ScoringFailedError as error:
            self._end(prompt, error.fate, num_tokens)
            self.rollouts.say(f"prompt {prompt.uid} was not scored: {error}")
            return
        try:
            group = self._build(prompt, completions, scores)
        except ValueError as error:  # what the engine returned cannot be trained on
            self._lost(prompt, Fate.FAILED, str(error), num_tokens)
            return
        self._deliver(prompt, group)

    def _deliver(self, prompt: Prompt, group: TrajectoryGroup) -> None:
        mixed = not is_zero_variance([t.score for t in group.trajectories])
        self._generated = self._generated.plus(group, mixed=mixed)
        if self._drop_zero_variance and not mixed:
            self._end(prompt, Fate.ZERO_VARIANCE, group.num_tokens)
            if error := self._streaks.empty(group.mean_score):
                self._training = False  # the engine lives on, for a last evaluation
                self._pool.fail(error)
            return
        self._streaks.useful()
        self.rollouts.end(prompt.uid)
        self.rollouts.say(f"prompt {prompt.uid} became ready")
        self._pool.put(group)

    def _lost(self, prompt: Prompt, fate: Fate, why: str, num_tokens: int = 0) -> None:
        self._end(prompt, fate, num_tokens)
        self.rollouts.say(f"prompt {prompt.uid} {fate}: {why}")
        log.warning("prompt %s %s: %s", prompt.uid, fate, why)
        if error := self._streaks.failed(prompt, fate, why):
            raise error

    def _end(self, prompt: Prompt, fate: Fate, num_tokens: int) -> None:
        self.rollouts.end(prompt.uid)
        self.rollouts.say(f"prompt {prompt.uid} ended: {fate}")
        self._settle(prompt.uid, fate, num_tokens)

    async def _set_training(self, training: bool) -> None:
        self._training = training
        self.wake()

    async def _abandon(self) -> None:
        self._training = False
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _snapshot(self, take: Callable[[list[Rollout]], T]) -> T:
        async with self._supervisor.paused():
            return take(self.rollouts.unended())

    async def _advance(self, version: PolicyVersion) -> None:
        self._version = version
        self.wake()

    async def _publish(
        self, weights: Mapping[str, Tensor], version: PolicyVersion, clock: PolicyVersion
    ) -> PublishReport:
        self._version = clock  # but nothing may be dispatched to the old weights any more
        self._dispatch_open = False
        try:
            report = await self._supervisor.publish(weights, version, rescore=self._rescores)
        finally:
            self._dispatch_open = True
            self.wake()
        self.rollouts.publish(version, self._pool.ready())
        if self._in_rounds:  # before anything else can ask the engine for something
            await self._dispatch_groups()
        return report

    async def _evaluate(
        self, prompts: Sequence[Prompt], samples: int, sampling: Sampling
    ) -> list[EvaluatedPrompt]:
        while self._in_rounds and (self._tasks or self._num_dispatchable() > 0):
            await asyncio.sleep(0.005)  # a round first: see in_rounds
        self._dispatch_open = False
        try:
            ask = self._supervisor, self._score
            return await evaluate(*ask, prompts, samples=samples, sampling=sampling)
        finally:
            self._dispatch_open = True
            self.wake()
