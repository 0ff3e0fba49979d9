"""The rollout thread: keeps groups in flight, scores them, and puts them into the pool.

One daemon thread with one event loop. It waits for free slots (woken by a draw, a finished group or a publication) and
for the engine; nothing in its loop blocks. The trainer's thread calls `start`, `publish`, `evaluate`, `waiting_trainer`
and `close`; each of them waits for the loop with a deadline. Whatever ends the thread, the pool is told.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from pace_lightning.core.dispatch import Dispatch, DispatchCounts
from pace_lightning.core.pool import TrajectoryPool
from pace_lightning.core.trajectory import (
    EndOfData,
    Fate,
    PolicyVersion,
    Prompt,
    Trajectory,
    TrajectoryGroup,
)
from pace_lightning.rollout.engine import Completion, RequestError, RolloutEngine, Sampling

log = logging.getLogger(__name__)
T = TypeVar("T")

_CLOSE_SECONDS = 20.0


class NothingToLearnError(RuntimeError):
    """Too many groups in a row had no gradient."""


class RolloutTimeoutError(RuntimeError):
    """The rollout thread did not answer within its deadline."""


class ScoringFailedError(Exception):
    """One group could not be scored. Carries the fate it ends in."""

    def __init__(self, message: str, fate: Fate) -> None:
        super().__init__(message)
        self.fate = fate


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Where the time of one publication went."""

    version: PolicyVersion
    seconds: float
    pause_seconds: float
    """How long no token flowed."""


@dataclass(frozen=True, slots=True)
class EvaluatedPrompt:
    """One held-out prompt, its responses and their scores."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    scores: tuple[float, ...]
    """Empty if scoring failed."""


@dataclass(frozen=True, slots=True)
class GeneratedStatistics:
    """Scored training groups, whether or not they reached the pool."""

    groups: int = 0
    responses: int = 0
    tokens: int = 0
    score_sum: float = 0.0
    mixed_groups: int = 0
    """Groups with at least two different scores."""


class RolloutWorker:
    """The producer of trajectories.

    Args:
        engine: generates; used from the rollout thread only.
        pool: where finished groups go.
        lease: next prompt; raises `EndOfData` after the last one.
        settle: called with ``(uid, fate, num_tokens)`` for each group that ends before it reaches the pool.
        score: judges the responses to one prompt, one number each; raises `ScoringFailedError`.
        shape_reward: from ``(score, num_tokens)`` to the reward that is trained on.
        dispatch: how much may be ahead of training.
        group_size: responses per prompt.
        sampling: of training rollouts.
        in_rounds: dispatch only when nothing is in flight, and then all at once while the engine is paused, so that
            what is sampled does not depend on timing (synchronous mode).
        group_timeout_seconds: for the generation of one group.
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
        shape_reward: Callable[[float, int], float] = lambda score, _: score,
        group_timeout_seconds: float = 600.0,
        drop_zero_variance: bool = True,
        max_empty_groups: int = 256,
        max_failed_groups: int = 16,
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._lease = lease
        self._settle = settle
        self._score = score
        self._shape_reward = shape_reward
        self._dispatch = dispatch
        self._group_size = group_size
        self._sampling = sampling
        self._in_rounds = in_rounds
        self._group_timeout_seconds = group_timeout_seconds
        self._drop_zero_variance = drop_zero_variance
        self._max_empty_groups = max_empty_groups
        self._max_failed_groups = max_failed_groups
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._wake: asyncio.Event | None = None
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._version: PolicyVersion = 0
        self._training = False
        self._dispatch_open = True
        self._data_ended = False
        self._in_flight: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._empty_scores: deque[float] = deque(maxlen=max_empty_groups)
        self._num_empty = 0
        self._num_failed = 0
        self._num_tokens = 0
        self._generated = GeneratedStatistics()
        self._last_event = "nothing yet"

    # --- called by the trainer's thread ---------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether the rollout thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def num_in_flight(self) -> int:
        """Groups dispatched and not yet ended."""
        return len(self._in_flight)

    @property
    def num_tokens_generated(self) -> int:
        """Tokens of finished training rollouts, whatever became of them."""
        return self._num_tokens

    @property
    def generated(self) -> GeneratedStatistics:
        """Totals since the start."""
        return self._generated

    def start(self, *, timeout_seconds: float) -> None:
        """Start the thread and wait until the engine is ready. Idempotent.

        Raises:
            RolloutTimeoutError: if the engine is not ready in time.
            BaseException: whatever the engine's start raised.
        """
        if self._thread is None:
            self._pool.on_change = self.wake
            self._pool.describe_producer = self.describe
            self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)
            self._thread.start()
        if not self._ready.wait(timeout_seconds):
            raise RolloutTimeoutError(
                f"the engine was not ready after {timeout_seconds} s (engine.startup_timeout_seconds): "
                f"{self._engine.describe()}"
            )
        if self._error is not None:
            raise self._error

    def train(self) -> None:
        """Begin to dispatch training rollouts."""
        self._call(self._set_training(True), timeout_seconds=30.0, what="the start of training")

    def stop_training(self) -> None:
        """Dispatch no more training rollouts, and settle those in flight as unused."""
        self._call(self._abandon(), timeout_seconds=30.0, what="the end of training")

    def advance(self, version: PolicyVersion) -> None:
        """The trainer reached ``version`` and publishes nothing."""
        self._call(self._advance(version), timeout_seconds=30.0, what="the new version")

    def publish(
        self, weights: Mapping[str, Tensor], version: PolicyVersion, *, timeout_seconds: float
    ) -> PublishReport:
        """Pause generation, load the weights of ``version``, go on. The weights must not change meanwhile."""
        return self._call(
            self._publish(weights, version), timeout_seconds=timeout_seconds, what="a publication"
        )

    def evaluate(
        self, prompts: Sequence[Prompt], *, samples: int, sampling: Sampling, timeout_seconds: float
    ) -> list[EvaluatedPrompt]:
        """Generate and score ``samples`` responses to each prompt under the published weights.

        Training rollouts in flight go on, new ones are not dispatched meanwhile.
        """
        return self._call(
            self._evaluate(prompts, samples, sampling), timeout_seconds=timeout_seconds, what="an evaluation"
        )

    @contextmanager
    def waiting_trainer(self, engine_threads: int | None) -> Iterator[None]:
        """While the trainer waits, the engine may use the trainer's cores too."""
        before = self._engine.num_threads
        if engine_threads is None or before is None:
            yield
            return
        self._engine.num_threads = engine_threads
        try:
            yield
        finally:
            self._engine.num_threads = before

    def wake(self) -> None:
        """Look for free slots again. Any thread; never waits."""
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(wake.set)
            except RuntimeError:
                return  # closed in between: nobody to wake

    def describe(self) -> str:
        """One line for error messages: who waits for what."""
        now = time.monotonic()
        oldest = max((now - since for since in list(self._in_flight.values())), default=0.0)
        state = "alive" if self.is_alive else "dead"
        return (
            f"rollout thread {state} at version {self._version}, {len(self._in_flight)} groups in flight "
            f"(oldest for {oldest:.0f} s), {len(self._pool)} ready, last event: {self._last_event}; "
            f"{self._engine.describe()}"
        )

    def close(self) -> None:
        """Stop the thread and the engine. Idempotent, bounded; never raises."""
        thread, loop, main = self._thread, self._loop, self._main
        if thread is None:
            return
        if loop is not None and main is not None and thread.is_alive():
            try:
                loop.call_soon_threadsafe(main.cancel)
            except RuntimeError:
                log.debug("the rollout loop was closed already")
        thread.join(_CLOSE_SECONDS)
        if thread.is_alive():
            log.warning("the rollout thread did not end within %s s: %s", _CLOSE_SECONDS, self.describe())

    # --- everything below runs in the rollout thread -----------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except (asyncio.CancelledError, KeyboardInterrupt):
            pass
        except BaseException as error:
            self._error = error
            self._pool.fail(error)
        finally:
            self._pool.fail(RuntimeError("the rollout thread has ended"))
            self._ready.set()

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._main = asyncio.current_task()
        try:
            await self._engine.start(lambda: self._version)
            self._ready.set()
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._dispatch_groups()
                if self._error is not None:
                    raise self._error
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._engine.close()

    async def _dispatch_groups(self) -> None:
        num_groups = self._num_dispatchable()
        if num_groups > 0:
            if self._in_rounds:
                async with self._engine.paused():
                    self._create_rollouts(num_groups)
                    await asyncio.sleep(0)  # each of them submits its request
            else:
                self._create_rollouts(num_groups)
        if self._data_ended and not self._in_flight:
            self._pool.close()

    def _num_dispatchable(self) -> int:
        if not (self._training and self._dispatch_open) or (self._in_rounds and self._in_flight):
            return 0
        return self._dispatch.capacity(
            DispatchCounts(
                in_flight=len(self._in_flight),
                ready=len(self._pool),
                accepted=self._pool.num_accepted,
                version=self._version,
            )
        )

    def _create_rollouts(self, num_groups: int) -> None:
        for _ in range(num_groups):
            try:
                prompt = self._lease()
            except EndOfData:
                self._data_ended = True
                return
            self._in_flight[prompt.uid] = time.monotonic()
            task = asyncio.create_task(self._roll_out(prompt))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and self._error is None:
            self._error = task.exception()
        assert self._wake is not None  # noqa: S101 - set before the first task exists
        self._wake.set()

    async def _roll_out(self, prompt: Prompt) -> None:
        """The life of one group, from dispatch to the pool or to another fate."""
        try:
            async with asyncio.timeout(self._group_timeout_seconds):
                completions = await self._engine.generate(
                    prompt.token_ids, n=self._group_size, sampling=self._sampling
                )
            self._num_tokens += sum(len(completion.token_ids) for completion in completions)
            scores = await self._score(prompt, completions)
            group = self._build(prompt, completions, scores)
        except TimeoutError:
            self._lost(prompt, Fate.TIMED_OUT, f"no result within {self._group_timeout_seconds} s")
        except (RequestError, ValueError) as error:
            self._lost(prompt, Fate.FAILED, str(error))
        except ScoringFailedError as error:
            self._end(prompt, error.fate, sum(len(c.token_ids) for c in completions))
            self._last_event = f"prompt {prompt.uid} was not scored: {error}"
        else:
            self._num_failed = 0
            self._deliver(prompt, group)

    def _build(
        self, prompt: Prompt, completions: Sequence[Completion], scores: Sequence[float]
    ) -> TrajectoryGroup:
        trajectories = tuple(
            Trajectory(
                token_ids=completion.token_ids,
                token_versions=completion.versions,
                behavior_logprobs=completion.logprobs,
                completed_at=completion.completed_at,
                reward=self._shape_reward(score, len(completion.token_ids)),
                score=score,
                truncated=completion.truncated,
            )
            for completion, score in zip(completions, scores, strict=True)
        )
        if len(trajectories) != self._group_size:
            raise RequestError(f"asked for {self._group_size} responses, got {len(trajectories)}")
        return TrajectoryGroup(prompt=prompt, trajectories=trajectories)

    def _deliver(self, prompt: Prompt, group: TrajectoryGroup) -> None:
        mixed = len({t.score for t in group.trajectories}) > 1
        self._generated = GeneratedStatistics(
            groups=self._generated.groups + 1,
            responses=self._generated.responses + len(group.trajectories),
            tokens=self._generated.tokens + group.num_tokens,
            score_sum=self._generated.score_sum + sum(t.score for t in group.trajectories),
            mixed_groups=self._generated.mixed_groups + mixed,
        )
        if self._drop_zero_variance and not mixed:
            self._end(prompt, Fate.ZERO_VARIANCE, group.num_tokens)
            self._num_empty += 1
            self._empty_scores.append(group.mean_score)
            if self._num_empty >= self._max_empty_groups:
                mean = sum(self._empty_scores) / len(self._empty_scores)
                raise NothingToLearnError(
                    f"nothing to learn: pass rate {mean:.2f} on the last {self._num_empty} groups, each with "
                    "equal rewards. The task is too hard or solved, or the reward function is wrong "
                    "(trainer.max_empty_groups, trainer.on_nothing_to_learn)"
                )
            return
        self._num_empty = 0
        self._in_flight.pop(prompt.uid)
        self._last_event = f"prompt {prompt.uid} became ready"
        self._pool.put(group)

    def _lost(self, prompt: Prompt, fate: Fate, why: str) -> None:
        self._end(prompt, fate, 0)
        self._num_failed += 1
        self._last_event = f"prompt {prompt.uid} {fate}: {why}"
        log.warning("prompt %s %s: %s", prompt.uid, fate, why)
        if self._num_failed >= self._max_failed_groups:
            raise RuntimeError(
                f"the last {self._num_failed} groups all failed or timed out; the latest, prompt "
                f"{prompt.uid}, {fate}: {why}"
            )

    def _end(self, prompt: Prompt, fate: Fate, num_tokens: int) -> None:
        self._in_flight.pop(prompt.uid)
        self._last_event = f"prompt {prompt.uid} ended: {fate}"
        self._settle(prompt.uid, fate, num_tokens)

    async def _set_training(self, training: bool) -> None:
        self._training = training
        self.wake()

    async def _abandon(self) -> None:
        self._training = False
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for uid in list(self._in_flight):
            del self._in_flight[uid]
            self._settle(uid, Fate.UNUSED, 0)

    async def _advance(self, version: PolicyVersion) -> None:
        self._version = version
        self.wake()

    async def _publish(self, weights: Mapping[str, Tensor], version: PolicyVersion) -> PublishReport:
        start = time.monotonic()
        # From here on the trainer is at the new version, but nothing may be dispatched to the old weights.
        self._version = version
        self._dispatch_open = False
        try:
            async with self._engine.paused():
                paused = time.monotonic()
                await self._engine.load_weights(weights, version=version)
                pause_seconds = time.monotonic() - paused
        finally:
            self._dispatch_open = True
        self.wake()
        return PublishReport(version, seconds=time.monotonic() - start, pause_seconds=pause_seconds)

    async def _evaluate(
        self, prompts: Sequence[Prompt], samples: int, sampling: Sampling
    ) -> list[EvaluatedPrompt]:
        async def one(prompt: Prompt) -> EvaluatedPrompt:
            completions = await self._engine.generate(prompt.token_ids, n=samples, sampling=sampling)
            try:
                scores = await self._score(prompt, completions)
            except ScoringFailedError as error:
                log.warning("evaluation prompt %s was not scored: %s", prompt.uid, error)
                scores = ()
            return EvaluatedPrompt(prompt, tuple(completions), tuple(scores))

        self._dispatch_open = False
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(prompt)) for prompt in prompts]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            self._dispatch_open = True
        self.wake()
        return [task.result() for task in tasks]

    # --- and this one again in the trainer's ---------------------------------------------------------

    def _call(self, coroutine: Coroutine[Any, Any, T], *, timeout_seconds: float, what: str) -> T:
        """Run a coroutine in the rollout loop and wait for it, no longer than ``timeout_seconds``."""
        if self._error is not None or not self.is_alive or self._loop is None:
            coroutine.close()
            raise self._error or RuntimeError("the rollout thread is not running")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                return future.result(timeout=min(1.0, max(0.0, deadline - time.monotonic())))
            except FutureTimeoutError:
                if future.done():  # the coroutine itself raised a TimeoutError
                    raise
                if not self.is_alive:
                    raise self._error or RuntimeError("the rollout thread ended") from None
                if time.monotonic() > deadline:
                    future.cancel()
                    raise RolloutTimeoutError(
                        f"{what} took longer than {timeout_seconds} s: {self.describe()}"
                    ) from None
            except FutureCancelledError:
                raise self._error or RuntimeError("the rollout thread was closed") from None
