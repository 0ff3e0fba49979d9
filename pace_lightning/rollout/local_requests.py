"""What the local engine knows about its requests, and a repair of their scheduling."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

from pace_lightning.rollout.engine import PartialResponse, Sampling

GREEDY_TEMPERATURE = 1e-6
"""What temperature 0 is served as: differences of logits above 1e-4 decide with certainty."""


PAGE_TOKENS = 32
"""Tokens of one block of the KV cache."""


def cache_blocks(max_sequence_tokens: int, max_running: int, cache_tokens: int | None) -> int:
    """Blocks of a KV cache of ``cache_tokens``; None: for ``max_running`` sequences of full length.

    Raises:
        ValueError: if not even one sequence fits.
    """
    pages = math.ceil((max_sequence_tokens + 1) / PAGE_TOKENS)
    if cache_tokens is None:
        return (max_running + 1) * pages
    blocks = math.ceil(cache_tokens / PAGE_TOKENS)
    if blocks < pages:
        raise ValueError(
            f"a KV cache of {blocks * PAGE_TOKENS} tokens cannot hold one sequence of "
            f"{max_sequence_tokens} tokens; raise engine.cache_tokens"
        )
    return blocks


def served(temperature: float) -> float:
    """The temperature by which logits are divided."""
    return max(temperature, GREEDY_TEMPERATURE)


@dataclass(frozen=True, slots=True)
class Submission:
    """One response as the manager was given it."""

    response: PartialResponse
    offset: int
    """Tokens that were there before, and are part of its prompt."""


@dataclass(slots=True)
class Request:
    """The responses to one prompt."""

    prompt: list[int]
    sampling: Sampling
    responses: list[PartialResponse]
    finished: asyncio.Future[None]
    ids: dict[str, Submission] = field(default_factory=dict)
    """By live request ids of the manager."""

    @property
    def unfinished(self) -> list[PartialResponse]:
        """The responses that are still being generated."""
        return [response for response in self.responses if not response.is_finished]

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
