"""What the local engine knows about its requests, and a repair of their scheduling."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from pace_lightning.core.pace import PrefixRescore
from pace_lightning.core.trajectory import PolicyVersion
from pace_lightning.rollout.engine import Completion, Sampling

GREEDY_TEMPERATURE = 1e-6
"""What temperature 0 is served as: differences of logits above 1e-4 decide with certainty."""


def served(temperature: float) -> float:
    """The temperature by which logits are divided."""
    return max(temperature, GREEDY_TEMPERATURE)


@dataclass(slots=True)
class Response:
    """One response being generated, across resubmissions."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    offset: int = 0
    """Tokens that were generated before the present submission, and are part of its prompt."""
    rescores: list[PrefixRescore] = field(default_factory=list)
    completion: Completion | None = None

    def finish(self, completed_at: PolicyVersion, stop_token_ids: Collection[int]) -> None:
        """The last token has arrived."""
        self.completion = Completion(
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            completed_at=completed_at,
            truncated=self.tokens[-1] not in stop_token_ids,
            rescores=tuple(self.rescores),
        )


@dataclass(slots=True)
class Request:
    """The responses to one prompt."""

    prompt: list[int]
    sampling: Sampling
    responses: list[Response]
    finished: asyncio.Future[None]
    ids: dict[str, Response] = field(default_factory=dict)
    """Live request ids of the manager."""

    @property
    def completions(self) -> list[Completion]:
        """The responses that are finished."""
        return [r.completion for r in self.responses if r.completion is not None]

    def fail(self, error: Exception) -> None:
        """End it with an error, unless it has ended."""
        if not self.finished.done():
            self.finished.set_exception(error)

    def fail_from_thread(self, error: Exception) -> None:
        """The same, from any thread."""
        self.finished.get_loop().call_soon_threadsafe(self.fail, error)


def unblock_after_cancellations(scheduler: Any) -> None:
    """Let waiting requests in once a running one was cancelled.

    When its cache is full, the scheduler puts running requests back and admits none until one
    *finishes*. If all others are cancelled instead, as by a publication, it would wait forever.
    """
    clear = scheduler.clear_cancelled_requests

    def clear_and_unblock() -> list[Any]:
        cancelled: list[Any] = clear()
        scheduler.block_new_requests &= not cancelled
        return cancelled

    scheduler.clear_cancelled_requests = clear_and_unblock
