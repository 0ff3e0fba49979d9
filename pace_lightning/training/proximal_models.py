"""Proximal policies that hold weights: an average of all versions, or a copy of each live one.

Both satisfy `core.proximal_sources.ProximalSource`. They hold the parameters that are trained (with
adapters: those alone) and no buffers, and know the model only by their names. `other_weights` lends
weights to it for one pass.

Under data parallelism each rank holds its own, equal copies. Sharded parameters are not supported.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pace_lightning.core.batch import TrainBatch
from pace_lightning.core.proximal_sources import Compute
from pace_lightning.core.trajectory import PolicyVersion
from pace_lightning.rollout.weights import manifest_differences
from pace_lightning.training.lora import trained_parameters


@contextmanager
def other_weights(model: nn.Module, weights: Mapping[str, Tensor] | None) -> Iterator[None]:
    """The model has other weights inside the context, and no gradients are recorded.

    Nothing is copied where device and dtype agree; otherwise one copy of the weights lives on the
    model's device meanwhile. The parameters stay the same objects, and get back the very tensors
    that they had, also after an exception: a graph recorded before may go backward after.

    Args:
        model: any module.
        weights: every trained parameter, by the names of ``named_parameters``; None: the present
            ones.

    Raises:
        ValueError: if names or shapes differ; then nothing was changed.
    """
    with torch.no_grad():
        if weights is None:
            yield
            return
        parameters = trained_parameters(model)
        _check_manifest(parameters, weights)
        present = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.data = weights[name].to(parameter)
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = present[name]


class EwmaPolicy:
    """Revised PPO-EWMA: an exponentially weighted mean of all versions, which resets itself.

    PPO-EWMA is arXiv:2110.00641 (confirmed in its code), the reset arXiv:2605.12070 (from a reading
    note). With W = 1 and the mean at the first weights in the beginning, each optimizer step does

        W <- beta W + 1,    mean <- mean + (weights - mean) / W

    so that ``mean = sum_k beta^(t-k) weights_k / sum_k beta^(t-k)``. A reset is a step with beta 0.

    Memory: one copy of the weights, in ``dtype``. Time: one pass without gradient over each batch,
    and one over the parameters after each optimizer step.

    Args:
        decay: beta, in ``[0, 1)``; see `core.proximal.ewma_decay`. 0 is the present weights.
        reset_below: the mean is set to the present weights after a step whose active-token fraction
            was below this; 0: never.
        device: where the mean lives; None: with the parameters.
        dtype: of the mean; float32 whatever the parameters are, because steps in bfloat16 vanish.
    """

    def __init__(
        self,
        *,
        decay: float,
        reset_below: float = 0.9,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not 0 <= decay < 1 or not 0 <= reset_below <= 1:
            raise ValueError(
                f"decay is {decay} and reset_below {reset_below}; needed 0 <= decay < 1, since at "
                "1 the mean would never move on, and a fraction in [0, 1]"
            )
        self._decay = decay
        self._reset_below = reset_below
        self._device = device
        self._dtype = dtype
        self._mean: dict[str, Tensor] = {}
        self._weight = 1.0
        self._lag = 0.0
        self._resets = 0

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The mean, by name; views, not copies."""
        return self._mean

    @property
    def lag_versions(self) -> float:
        """How many versions the center of mass is behind the present one.

        It tends to ``decay / (1 - decay)``.
        """
        return self._lag

    def begin(self, version: PolicyVersion, parameters: Mapping[str, Tensor]) -> None:
        """Start from these weights, unless a state was loaded."""
        if not self._mean:
            self._restart(parameters)
        _check_manifest(parameters, self._mean)
        # a loaded state lies where the checkpoint was read to
        self._mean = {
            name: mean.to(device=self._device or parameters[name].device, dtype=self._dtype)
            for name, mean in self._mean.items()
        }

    def logprobs(
        self, batch: TrainBatch, compute: Compute, policy_logprobs: Tensor | None = None
    ) -> Tensor:
        """See `ProximalSource.logprobs`: one pass under the mean."""
        return compute(batch, self._mean).detach()

    @torch.no_grad()
    def after_step(
        self,
        version: PolicyVersion,
        parameters: Mapping[str, Tensor],
        *,
        active_share: float | None = None,
    ) -> None:
        """Take the new weights into the mean, or start again from them.

        Raises:
            ValueError: if the names or shapes are not those of the mean, or ``active_share`` is not
                a fraction.
        """
        if active_share is not None and not 0 <= active_share <= 1:
            raise ValueError(
                f"active_share is {active_share}; needed a fraction of the trained tokens of the "
                "whole draw, in [0, 1]: active_sum / tokens"
            )
        if active_share is not None and active_share < self._reset_below:
            self._resets += 1
            self._restart(parameters)
            return
        _check_manifest(parameters, self._mean)
        remaining = self._decay * self._weight
        self._weight = remaining + 1
        self._lag = remaining * (self._lag + 1) / self._weight
        for name, mean in self._mean.items():
            mean.lerp_(parameters[name].to(mean), 1 / self._weight)

    def published(
        self,
        version: PolicyVersion,
        parameters: Mapping[str, Tensor],
        *,
        oldest_version: PolicyVersion,
    ) -> None:
        """Nothing to do: the mean is of all versions, published or not."""

    def metrics(self) -> dict[str, float]:
        """``lag_versions`` and the number of ``resets``."""
        return {"lag_versions": self._lag, "resets": float(self._resets)}

    def state_dict(self) -> dict[str, Any]:
        """See `ProximalSource.state_dict`."""
        return {
            "mean": dict(self._mean),
            "weight": self._weight,
            "lag": self._lag,
            "resets": self._resets,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `ProximalSource.load_state_dict`."""
        self._mean = {name: tensor.clone() for name, tensor in state["mean"].items()}
        self._weight = state["weight"]
        self._lag = state["lag"]
        self._resets = state["resets"]

    @torch.no_grad()
    def _restart(self, parameters: Mapping[str, Tensor]) -> None:
        if self._mean:  # in place: there is never a second copy
            _check_manifest(parameters, self._mean)
            for name, mean in self._mean.items():
                mean.copy_(parameters[name])
        else:
            self._mean = copies_of(parameters, self._device, self._dtype)
        self._weight = 1.0
        self._lag = 0.0


class SnapshotStore:
    """Each token is scored by the version that sampled it, from copies of the live versions.

    The exact proximal policy of arXiv:2605.12070, route a. prox/mu is then the discrepancy between
    trainer and engine alone, pi/prox the staleness alone.

    Memory: one copy of the weights for each published version that may still be in a token: ready,
    in flight, or sampling now; at most ``max_versions``. Time: one copy per publication; per
    micro-batch and older version in it, one pass without gradient over the rows that have tokens of
    that version, and where the copies are not on the model's device, their way there.

    Args:
        max_versions: copies at most; beyond it the oldest is dropped. None: no bound.
        missing: what becomes of trained tokens whose version was dropped: ``error``, or
            ``behavior``: prox = mu for them, counted in ``missing_tokens``.
        device: where the copies live; None: with the parameters.
    """

    def __init__(
        self,
        *,
        max_versions: int | None = None,
        missing: Literal["error", "behavior"] = "error",
        device: torch.device | str | None = "cpu",
    ) -> None:
        if max_versions is not None and max_versions < 1:
            raise ValueError(f"max_versions is {max_versions}; the version that samples is kept")
        if missing not in ("error", "behavior"):
            raise ValueError(f"missing is {missing!r}; needed 'error' or 'behavior'")
        self._max_versions = max_versions
        self._missing = missing
        self._device = device
        self._copies: dict[PolicyVersion, dict[str, Tensor]] = {}
        self._missing_tokens = 0

    @property
    def versions(self) -> list[PolicyVersion]:
        """What is kept, oldest first."""
        return sorted(self._copies)

    def begin(self, version: PolicyVersion, parameters: Mapping[str, Tensor]) -> None:
        """Nothing to do: copies come from publications, or from a checkpoint."""

    def logprobs(
        self, batch: TrainBatch, compute: Compute, policy_logprobs: Tensor | None = None
    ) -> Tensor:
        """See `ProximalSource.logprobs`; tokens of the present version need no copy.

        Raises:
            ValueError: if a token's version was dropped and ``missing`` is ``error``.
        """
        result = batch.behavior_logprobs.clone()
        for version in batch.token_versions[batch.loss_mask].unique().tolist():
            own = batch.loss_mask & (batch.token_versions == version)
            if version == batch.version and policy_logprobs is not None:
                result[own] = policy_logprobs.detach()[own]
            elif version == batch.version or version in self._copies:
                weights = None if version == batch.version else self._copies[version]
                part = rows_with(batch, own)
                result[own] = compute(part, weights).detach()[part.loss_mask]
            elif self._missing == "error":
                raise ValueError(
                    f"{int(own.sum())} tokens were sampled at version {version}, but of the "
                    f"versions before {batch.version} only {self.versions} are kept; raise "
                    f"max_versions ({self._max_versions}), bound the lag, or let such tokens use "
                    "their behavior log-probs (missing: behavior)"
                )
            else:
                self._missing_tokens += int(own.sum())
        return result

    def after_step(
        self,
        version: PolicyVersion,
        parameters: Mapping[str, Tensor],
        *,
        active_share: float | None = None,
    ) -> None:
        """Nothing to do: weights that are not published sample nothing."""

    def published(
        self,
        version: PolicyVersion,
        parameters: Mapping[str, Tensor],
        *,
        oldest_version: PolicyVersion,
    ) -> None:
        """Drop what no token has any more, then keep a copy of what samples now."""
        for old in self.versions:
            if old < oldest_version or old == version:
                del self._copies[old]
        limit = math.inf if self._max_versions is None else self._max_versions
        while len(self._copies) >= limit:  # first, so that the bound holds always
            del self._copies[min(self._copies)]
        self._copies[version] = copies_of(parameters, self._device)

    def metrics(self) -> dict[str, float]:
        """Number of ``versions`` kept, their ``bytes``, ``missing_tokens`` since the start."""
        sizes = (t.nbytes for weights in self._copies.values() for t in weights.values())
        return {
            "versions": float(len(self._copies)),
            "bytes": float(sum(sizes)),
            "missing_tokens": float(self._missing_tokens),
        }

    def state_dict(self) -> dict[str, Any]:
        """See `ProximalSource.state_dict`: all copies, as tokens of their versions come back too.

        The first publication after a resume drops those that no token needs.
        """
        copies = {version: dict(weights) for version, weights in self._copies.items()}
        return {"copies": copies, "missing_tokens": self._missing_tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `ProximalSource.load_state_dict`."""
        self._copies = {
            version: copies_of(weights, self._device)
            for version, weights in state["copies"].items()
        }
        self._missing_tokens = state["missing_tokens"]


def rows_with(batch: TrainBatch, own: Tensor) -> TrainBatch:
    """The rows with a True in ``own``, shape ``(N, T)``, up to the last one; ``own`` is the mask.

    Later tokens do not matter to a causal model.
    """
    rows = own.any(dim=1)
    width = int(own.any(dim=0).nonzero().max()) + 1
    part = copy.copy(batch)
    part.loss_mask, part.peer_tokens = own, 0
    for name in part.__slots__:
        value = getattr(part, name)
        if isinstance(value, Tensor):
            setattr(part, name, value[rows, :width] if value.ndim == 2 else value[rows])
    return part


def copies_of(
    parameters: Mapping[str, Tensor],
    device: torch.device | str | None,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Copies on a device, in a dtype; None: as they are."""
    return {
        name: tensor.detach().to(
            device=device or tensor.device, dtype=dtype or tensor.dtype, copy=True
        )
        for name, tensor in parameters.items()
    }


def _check_manifest(parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not those of the parameters, by names and shapes."""
    different = sorted(
        name for names in manifest_differences(parameters, weights) for name in names
    )
    if different:
        raise ValueError(
            f"{len(different)} of {len(parameters)} parameters differ in name or shape from the "
            f"weights given, {different[:3]} among them; needed the weights of the same model"
        )
