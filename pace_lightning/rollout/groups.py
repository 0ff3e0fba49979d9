"""What the rollout thread reports and raises, and what it does with the responses to one prompt."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pace_lightning.core.pace import PrefixRescore
from pace_lightning.core.trajectory import Fate, Prompt, Trajectory, TrajectoryGroup
from pace_lightning.rollout.engine import Completion, RequestError, RolloutEngine, Sampling
from pace_lightning.rollout.supervision import Supervisor

log = logging.getLogger(__name__)


class NothingToLearnError(RuntimeError):
    """Too many groups in a row had no gradient."""


class RolloutTimeoutError(RuntimeError):
    """The rollout thread did not answer within its deadline."""


class ScoringFailedError(Exception):
    """One group could not be scored. Carries the fate it ends in."""

    def __init__(self, message: str, fate: Fate) -> None:
        super().__init__(message)
        self.fate = fate


class Streaks:
    """Groups in a row that were of no use, and the errors that end a run because of them.

    Args:
        max_empty_groups: in a row without gradient.
        max_failed_groups: in a row that failed or timed out.
    """

    def __init__(self, max_empty_groups: int, max_failed_groups: int) -> None:
        self._max_empty = max_empty_groups
        self._max_failed = max_failed_groups
        self._empty_scores: deque[float] = deque(maxlen=max_empty_groups)
        self._num_empty = 0
        self._num_failed = 0

    def empty(self, score: float) -> NothingToLearnError | None:
        """A group had no gradient and this mean score; the error if it was one too many."""
        self._num_failed = 0
        self._num_empty += 1
        self._empty_scores.append(score)
        if self._num_empty < self._max_empty:
            return None
        return nothing_to_learn(self._num_empty, self._empty_scores)

    def useful(self) -> None:
        """A group can be trained on."""
        self._num_failed = self._num_empty = 0

    def failed(self, prompt: Prompt, fate: Fate, why: str) -> RuntimeError | None:
        """A group failed; the error if it was one too many."""
        self._num_failed += 1
        if self._num_failed < self._max_failed:
            return None
        return too_many_failures(self._num_failed, prompt, fate, why)


def nothing_to_learn(num_groups: int, scores: Collection[float]) -> NothingToLearnError:
    """The error after ``num_groups`` groups in a row with equal scores; ``scores`` are theirs."""
    mean = sum(scores) / len(scores)
    return NothingToLearnError(
        f"nothing to learn: pass rate {mean:.2f} on the last {num_groups} groups, each with "
        "equal rewards. The task is too hard or solved, or the reward function is wrong "
        "(trainer.max_empty_groups, trainer.on_nothing_to_learn)"
    )


def too_many_failures(num_groups: int, prompt: Prompt, fate: Fate, why: str) -> RuntimeError:
    """The error after ``num_groups`` groups in a row failed; the rest describes the latest."""
    return RuntimeError(
        f"the last {num_groups} groups all failed or timed out; the latest, prompt "
        f"{prompt.uid}, {fate}: {why}"
    )


@dataclass(frozen=True, slots=True)
class EvaluatedPrompt:
    """One held-out prompt, its responses and their scores."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    scores: tuple[float, ...]
    """Empty if generation or scoring failed."""
    error: str = ""
    """Why it failed."""


def evaluation_metrics(results: Sequence[EvaluatedPrompt]) -> dict[str, float]:
    """What an evaluation measured.

    Raises:
        RuntimeError: if not one prompt could be scored.
    """
    scores = [score for result in results for score in result.scores]
    if not scores:
        raise RuntimeError(
            f"not one of {len(results)} evaluation prompts could be scored; the last error: "
            f"{results[-1].error}"
        )
    completions = [completion for result in results for completion in result.completions]
    return {
        "pass_rate": sum(scores) / len(scores),
        "scored_share": sum(bool(result.scores) for result in results) / len(results),
        "response_tokens": sum(len(c.token_ids) for c in completions) / len(completions),
        "truncated_share": sum(c.truncated for c in completions) / len(completions),
    }


@dataclass(frozen=True, slots=True)
class GeneratedStatistics:
    """Scored training groups, whether or not they reached the pool."""

    groups: int = 0
    responses: int = 0
    tokens: int = 0
    score_sum: float = 0.0
    mixed_groups: int = 0
    """Groups with at least two different scores."""

    def plus(self, group: TrajectoryGroup, *, mixed: bool) -> GeneratedStatistics:
        """These and one more group."""
        return GeneratedStatistics(
            groups=self.groups + 1,
            responses=self.responses + len(group.trajectories),
            tokens=self.tokens + group.num_tokens,
            score_sum=self.score_sum + sum(t.score for t in group.trajectories),
            mixed_groups=self.mixed_groups + mixed,
        )


def build_group(
    prompt: Prompt,
    completions: Sequence[Completion],
    scores: Sequence[float],
    *,
    shape_reward: Callable[[float, int], float],
    forgetting: Callable[[Sequence[PrefixRescore]], float | None] | None = None,
) -> TrajectoryGroup:
    """The group of one prompt, from what the engine and the scorer returned.

    Raises:
        ValueError: if a completion cannot be trained on, or there is not one score for each.
    """
    return TrajectoryGroup(
        prompt=prompt,
        trajectories=tuple(
            Trajectory(
                token_ids=completion.token_ids,
                token_versions=completion.versions,
                behavior_logprobs=completion.logprobs,
                completed_at=completion.completed_at,
                reward=shape_reward(score, len(completion.token_ids)),
                score=score,
                truncated=completion.truncated,
                prefix_forgetting=forgetting(completion.rescores) if forgetting else None,
            )
            for completion, score in zip(completions, scores, strict=True)
        ),
    )


@contextmanager
def temporary_threads(engine: RolloutEngine, num_threads: int | None) -> Iterator[None]:
    """The engine uses ``num_threads`` inside the context, if both it and the caller set one."""
    before = engine.num_threads
    if num_threads is None or before is None:
        yield
        return
    engine.num_threads = num_threads
    try:
        yield
    finally:
        engine.num_threads = before


async def evaluate(
    engine: Supervisor,
    score: Callable[[Prompt, Sequence[Completion]], Awaitable[Sequence[float]]],
    prompts: Sequence[Prompt],
    *,
    samples: int,
    sampling: Sampling,
) -> list[EvaluatedPrompt]:
    """Generate and score ``samples`` responses to each prompt.

    One that fails is left without scores. All are submitted while the engine is paused, so that
    what is sampled does not depend on timing.
    """

    async def one(prompt: Prompt) -> EvaluatedPrompt:
        completions: Sequence[Completion] = ()
        scores: Sequence[float] = ()
        why = ""
        try:
            completions = await engine.generate(prompt.token_ids, n=samples, sampling=sampling)
            scores = await score(prompt, completions)
        except (RequestError, ScoringFailedError) as error:
            log.warning("evaluation prompt %s was not scored: %s", prompt.uid, error)
            why = str(error)
        engine.say(f"evaluation prompt {prompt.uid} ended")
        return EvaluatedPrompt(prompt, tuple(completions), tuple(scores), why)

    try:
        async with asyncio.TaskGroup() as group, engine.paused():
            tasks = [group.create_task(one(prompt)) for prompt in prompts]
            await asyncio.sleep(0)  # each of them submits its request
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]
