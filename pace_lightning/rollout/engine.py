"""What the rollout thread asks of a generation engine, whichever it is.

Token ids in, token ids out. An engine is driven from one event loop, that of the rollout thread; it
may run its own threads or processes behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from pace_lightning.core.pace import PrefixRescore
from pace_lightning.core.trajectory import PolicyVersion


class EngineError(RuntimeError):
    """The engine is unusable: it never became ready, died, or refused the weights."""


class WrongWeightsError(EngineError):
    """A publication did not arrive, or not whole. Never tried again: nobody knows why."""


class RequestError(RuntimeError):
    """One request failed; the engine lives."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample.

    The distribution is the whole softmax at ``temperature``: nothing is cut off.
    """

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One response. Per-token tuples have length T >= 1, the stop token included."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Under the distribution that was sampled from, temperature included."""
    versions: tuple[PolicyVersion, ...]
    completed_at: PolicyVersion
    """The trainer's version when the last token arrived."""
    truncated: bool
    """True if the token limit ended it."""
    rescores: tuple[PrefixRescore, ...] = ()
    """One for each publication at which the unfinished response was re-scored, oldest first."""


@dataclass(slots=True, eq=False)
class PartialResponse:
    """One response as far as it has come.

    The engine writes it, whoever asked owns it: it outlives a request, an engine and, in a
    checkpoint, the process. The three lists have one entry per token that is there, and the last
    token arrives together with ``completed_at``.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """See `Completion`."""
    versions: list[PolicyVersion] = field(default_factory=list)
    rescores: list[PrefixRescore] = field(default_factory=list)
    unscored: bool = False
    """Whether its tokens have yet to be re-scored under the weights that were loaded last: the
    prefill of the next request that goes on with it does it."""
    completed_at: PolicyVersion | None = None
    """None while it is unfinished."""
    truncated: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether its last token is there."""
        return self.completed_at is not None

    def cut(self, num_tokens: int) -> None:
        """Keep only so many tokens, the oldest ones."""
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:], self.versions[num_tokens:]

    def completion(self) -> Completion:
        """The finished response."""
        assert self.completed_at is not None
        return Completion(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            completed_at=self.completed_at,
            truncated=self.truncated,
            rescores=tuple(self.rescores),
        )


def fill(responses: list[PartialResponse] | None, n: int) -> list[PartialResponse]:
    """The caller's responses, with new ones appended to the list until there are ``n``."""
    responses = [] if responses is None else responses
    responses += [PartialResponse() for _ in range(n - len(responses))]
    return responses


def life_seed(seed: int, *, resumed_version: PolicyVersion = 0, restarts: int = 0) -> int:
    """The seed of one life of an engine: what goes on must not meet the random numbers again.

    Args:
        seed: of the run; a run that neither was resumed nor lost its engine has this one.
        resumed_version: of the checkpoint that the process began with.
        restarts: of the engine in this process.

    Returns:
        An integer in ``[0, 2**31)``, or ``seed`` itself.
    """
    if not (resumed_version or restarts):
        return seed
    digest = hashlib.sha256(f"{seed}:{resumed_version}:{restarts}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def check_room(prompt: Sequence[int], sampling: Sampling, max_sequence_tokens: int) -> None:
    """Raise a `RequestError` if prompt and response may not fit into the engine's sequences."""
    if len(prompt) + sampling.max_new_tokens > max_sequence_tokens:
        raise RequestError(
            f"prompt of {len(prompt)} tokens + {sampling.max_new_tokens} new ones exceed the "
            f"engine's {max_sequence_tokens}"
        )


class RolloutEngine(Protocol):
    """A generator whose weights can be replaced while it generates."""

    num_threads: int | None
    """Intra-op threads of a step on CPU, changeable at any time.

    None if the engine manages its own.
    """

    keeps_weights: bool
    """Whether a `start` after `close` goes on with the weights that were loaded last.

    If not, whoever restarts it must load them again before anything is generated.
    """

    @property
    def num_tokens_generated(self) -> int:
        """Tokens sampled since the start; any thread."""
        ...

    @property
    def rescore_seconds(self) -> float:
        """Time that re-scoring has added to generation since the start; any thread."""
        ...

    async def start(self, clock: Callable[[], PolicyVersion]) -> None:
        """Become ready; also again, after `close`.

        Args:
            clock: the trainer's version, read when a response completes.

        Raises:
            EngineError: if it cannot.
        """
        ...

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        n: int,
        sampling: Sampling,
        responses: list[PartialResponse] | None = None,
    ) -> list[Completion]:
        """Sample ``n`` responses to one prompt. Cancelling the call frees the engine of the work.

        Args:
            prompt: token ids.
            n: how many.
            sampling: how; ``max_new_tokens`` counts the tokens that are there already.
            responses: the caller's, at most ``n``; `fill` adds those that are missing. Finished
                ones are returned as they are; the others go on from their tokens, prefilled under
                the present weights. Each token is written into them as it arrives, and stays
                there if the call is cancelled or fails. None: nobody wants to know.

        Raises:
            RequestError: if this request failed.
            EngineError: if the engine did.
        """
        ...

    async def prepare_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Do what a publication of these weights can do while tokens still flow.

        Raises:
            EngineError: if names or shapes differ from the engine's own.
        """
        ...

    def paused(self) -> AbstractAsyncContextManager[None]:
        """No token flows inside the context.

        Running requests continue after it, also after an error.
        """
        ...

    async def load_weights(self, weights: Mapping[str, Tensor], *, version: PolicyVersion) -> None:
        """Replace the weights; call it while paused. Tokens sampled from now on carry ``version``.

        Args:
            weights: name to tensor; read before the call returns, never kept.
            version: of these weights.

        Raises:
            EngineError: if names or shapes differ from the engine's own; then nothing was loaded.
        """
        ...

    async def verify_weights(self) -> None:
        """See that the weights arrived that were loaded; call it while still paused.

        No response that these weights sampled is returned before they are verified.

        Raises:
            EngineError: if they did not.
        """
        ...

    async def rescore_prefixes(self) -> None:
        """Have what exists of each unfinished response scored under the weights just loaded.

        Call it after `load_weights`, in the same pause; the work may be done after it. The
        log-probs are of the same distribution as those that `generate` returns, temperature
        included. The results arrive with the completions.
        """
        ...

    def describe(self) -> str:
        """One line for error messages: what it is doing."""
        ...

    async def close(self) -> None:
        """Stop and leave no thread or process behind. Idempotent, bounded in time.

        Whatever still generates fails with an `EngineError`.
        """
        ...
