"""Where the proximal log-probs come from: one interface, and the sources without memory.

What prox is for each token, and what it costs beyond the forward and backward that every method
needs (F: one forward without gradient over what is trained; P: one copy of the weights):

    source              prox                                        memory              time
    bypass              mu                                          -                   -
    recompute           weights at the beginning of the step        -                   F, or none
    log_linear          mu^(1/d) pi^(1 - 1/d)                       -                   -
    linear              mu / d + (1 - 1/d) pi                       -                   -
    InterruptionScores  the token's own version, scored in time     P, 4 bytes a token  F, in pauses
    SnapshotStore       the token's own version, from a copy        P a live version    F a version
    EwmaPolicy          mean of all versions, most of the newest    P                   F

mu, pi and d are those of `core.proximal`. The last three hold weights: `training.own_scores`,
`training.proximal_models`.
Measured by others for 4 billion parameters (arXiv:2605.12070, from a reading note): snapshots 7 s a
step and 40 GB, EWMA 8 s and 7.9 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from pace_lightning.core.batch import TrainBatch
from pace_lightning.core.proximal import (
    linear_logprobs,
    log_linear_logprobs,
)
from pace_lightning.core.trajectory import PolicyVersion

Compute = Callable[[TrainBatch, Mapping[str, Tensor] | None], Tensor]
"""From a micro-batch and weights by name (None: the present ones) to log-probs at its loss mask,
shape ``(N, T)``, without gradient. The module that owns the network provides it."""


class ProximalSource(Protocol):
    """Where the proximal log-probs come from, and what has to be remembered for them."""

    def begin(self, version: PolicyVersion, parameters: Mapping[str, Tensor]) -> None:
        """Training begins or goes on, after any state was loaded, with these weights."""
        ...

    def logprobs(
        self, batch: TrainBatch, compute: Compute, policy_logprobs: Tensor | None = None
    ) -> Tensor:
        """The proximal log-probs of a micro-batch.

        Args:
            batch: one whose step has not been taken yet.
            compute: scores it.
            policy_logprobs: of the weights at the beginning of the step, shape ``(N, T)``, if they
                are known: they save a pass to those that need one.

        Returns:
            Shape ``(N, T)``, without gradient; anything outside the loss mask.
        """
        ...

    def after_step(
        self,
        version: PolicyVersion,
        parameters: Mapping[str, Tensor],
        *,
        active_share: float | None = None,
    ) -> None:
        """The optimizer made the weights of ``version``.

        Args:
            version: of the new weights.
            parameters: by name; read before the call returns, never kept.
            active_share: active-token fraction of the step, over the whole draw and all ranks (see
                `objective.active_tokens`); None: unknown.
        """
        ...

    def published(
        self,
        version: PolicyVersion,
        parameters: Mapping[str, Tensor],
        *,
        oldest_version: PolicyVersion,
    ) -> None:
        """From now on the weights of ``version`` sample.

        Args:
            version: of these weights.
            parameters: by name; read before the call returns, never kept.
            oldest_version: no token that may still come to training is older.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """What there is to log about it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Primitives and tensors; the tensors are its own, not copies."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse; copies the tensors."""
        ...


class Memoryless:
    """A `ProximalSource` that remembers nothing.

    Args:
        function: takes the arguments of `ProximalSource.logprobs`: `bypass`, `recompute`,
            `log_linear` or `linear`.
    """

    def __init__(self, function: Callable[[TrainBatch, Compute, Tensor | None], Tensor]) -> None:
        self._function = function

    def begin(self, version: PolicyVersion, parameters: Mapping[str, Tensor]) -> None:
        """Nothing to do."""

    def logprobs(
        self, batch: TrainBatch, compute: Compute, policy_logprobs: Tensor | None = None
    ) -> Tensor:
        """See `ProximalSource.logprobs`."""
        return self._function(batch, compute, policy_logprobs).detach()

    def after_step(
        self,
        version: PolicyVersion,
        parameters: Mapping[str, Tensor],
        *,
        active_share: float | None = None,
    ) -> None:
        """Nothing to do."""

    def published(
        self,
        version: PolicyVersion,
        parameters: Mapping[str, Tensor],
        *,
        oldest_version: PolicyVersion,
    ) -> None:
        """Nothing to do."""

    def metrics(self) -> dict[str, float]:
        """Nothing to log."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""


def bypass(batch: TrainBatch, compute: Compute, policy_logprobs: Tensor | None) -> Tensor:
    """Prox = mu: the trust region bounds the total ratio (coupled PPO). Costs nothing."""
    return batch.behavior_logprobs


def recompute(batch: TrainBatch, compute: Compute, policy_logprobs: Tensor | None) -> Tensor:
    """Prox = the weights at the beginning of the step (decoupled PPO of AReaL, arXiv:2505.24298).

    Costs one pass without gradient before the first optimizer step on the draw, and nothing if
    ``policy_logprobs`` are given. With one optimizer step per draw the weights do not move between
    the two: pi/prox is 1 in value, never clipped, and prox/mu carries all of the total ratio.
    """
    return _present(batch, compute, policy_logprobs)


def log_linear(batch: TrainBatch, compute: Compute, policy_logprobs: Tensor | None) -> Tensor:
    """`log_linear_logprobs` of the batch; costs nothing if ``policy_logprobs`` are given."""
    return log_linear_logprobs(
        _present(batch, compute, policy_logprobs),
        batch.behavior_logprobs,
        batch.token_versions,
        version=batch.version,
    )


def linear(batch: TrainBatch, compute: Compute, policy_logprobs: Tensor | None) -> Tensor:
    """`linear_logprobs` of the batch; costs nothing if ``policy_logprobs`` are given."""
    return linear_logprobs(
        _present(batch, compute, policy_logprobs),
        batch.behavior_logprobs,
        batch.token_versions,
        version=batch.version,
    )


def _present(batch: TrainBatch, compute: Compute, policy_logprobs: Tensor | None) -> Tensor:
    return compute(batch, None) if policy_logprobs is None else policy_logprobs.detach()
