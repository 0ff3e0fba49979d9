"""Sums over the micro-batches of one optimizer step, and the metrics that they become."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pace_lightning.core.batch import TrainBatch
from pace_lightning.core.importance_weights import trajectory_log_ratio
from pace_lightning.core.losses import ratio_statistics
from pace_lightning.core.objective import Objective, Terms, objective_statistics

MAXIMA = ("ratio_max", "fresh_gap_max", "prepass_seconds")
"""Names in `StepStatistics.sums` that are no sums."""


class StepStatistics:
    """What one draw did: of this rank, and after `merge` of all.

    Args:
        objective: what is minimized.
        has_proximal: whether the anchor is another policy than that of behavior.
    """

    def __init__(self, objective: Objective, *, has_proximal: bool) -> None:
        self._objective = objective
        self._has_proximal = has_proximal
        self.sums: dict[str, float] = defaultdict(float)
        """By name; others may add theirs."""
        self._log_ratios: list[Tensor] = []

    def begin(self) -> None:
        """Forget the draw before."""
        self.sums.clear()
        self._log_ratios.clear()

    @torch.no_grad()
    def record(
        self, batch: TrainBatch, terms: Terms, logprobs: Tensor, entropies: Tensor, loss: float
    ) -> None:
        """Add a micro-batch; log-probs and entropies of shape ``(N, T)``."""
        mask = batch.loss_mask
        found = ratio_statistics(logprobs, batch.behavior_logprobs, mask)
        found |= objective_statistics(self._objective, logprobs, batch.behavior_logprobs, terms)
        for name, value in found.items():
            if name == "ratio_max":
                self.sums[name] = max(self.sums[name], float(value))
            else:
                self.sums[name] += float(value)
        log_ratios = trajectory_log_ratio(logprobs, batch.behavior_logprobs, mask)
        self._log_ratios.append(log_ratios[mask.any(dim=1)])
        self.sums["lag"] += float((batch.version - batch.token_versions[mask]).sum())
        self.sums["loss"] += loss
        self.sums["entropy"] += float(entropies[mask].sum())
        self.sums["consumed"] += float(batch.attention_mask.sum())
        fresh = mask & (batch.token_versions == batch.version)
        if bool(fresh.any()):
            gap = (logprobs - batch.behavior_logprobs)[fresh].abs()
            self.sums["fresh_tokens"] += gap.numel()
            self.sums["fresh_gap"] += float(gap.sum())
            self.sums["fresh_gap_max"] = max(self.sums["fresh_gap_max"], float(gap.max()))

    def merge(self, gather: Callable[[Mapping[str, float]], list[Mapping[str, float]]]) -> None:
        """Take in what the other ranks did of the same draw; on every rank."""
        every = gather(dict(self.sums))
        for name in sorted({name for sums in every for name in sums}):
            values = [sums.get(name, 0.0) for sums in every]
            self.sums[name] = max(values) if name in MAXIMA else sum(values)

    @property
    def log_ratios(self) -> Tensor:
        """Log pi - log mu of each trained response of this rank so far; shape ``(M,)``."""
        return torch.cat(self._log_ratios)

    @property
    def mean_lag(self) -> float:
        """Versions between the trained tokens of the draw and the weights."""
        return self.sums["lag"] / max(self.sums["tokens"], 1.0)

    @property
    def active_share(self) -> float:
        """Share of the trained tokens that nothing cuts off."""
        return self.sums["active_sum"] / max(self.sums["tokens"], 1.0)

    @property
    def lag0_gap(self) -> float | None:
        """Mean of |policy - behavior log-prob| on tokens of the present version, if any."""
        sums = self.sums
        return sums["fresh_gap"] / sums["fresh_tokens"] if sums["fresh_tokens"] else None

    def metrics(self) -> dict[str, float]:
        """Means over the draw."""
        sums = self.sums
        tokens = max(sums["tokens"], 1.0)
        metrics = {
            "loss/objective": sums["loss"],
            "loss/gradient_norm": sums["gradient_norm"],
            "loss/active_share": self.active_share,
            "loss/inactive_positive_share": sums["inactive_positive_sum"] / tokens,
            "loss/inactive_negative_share": sums["inactive_negative_sum"] / tokens,
            "policy/entropy_nats": sums["entropy"] / tokens,
            "ratio/mean": sums["ratio_sum"] / tokens,
            "ratio/max": sums["ratio_max"],
            "ratio/log_abs_mean": sums["log_ratio_abs_sum"] / tokens,
            "ratio/second_moment": sums["log_ratio_square_sum"] / tokens,
            "ratio/ess_share": sums["weight_sum"] ** 2
            / max(sums["weight_square_sum"] * tokens, 1e-12),
            "ratio/sequence_ess_share": sums["sequence_ess_share"],
            "tokens/trained": sums["tokens"],
            "tokens/consumed": sums["consumed"],
            "optim/learning_rate": sums["learning_rate"],
        }
        if self._objective.corrections:
            metrics["loss/rejected_share"] = sums["rejected_sum"] / tokens
            metrics["loss/correction_mean"] = sums["correction_sum"] / tokens
        if self._has_proximal:
            metrics["ratio/behavior_log_abs_mean"] = sums["behavior_log_ratio_abs_sum"] / tokens
        if sums["prepass_seconds"]:
            metrics["time/prepass_seconds"] = sums["prepass_seconds"]
        if "kl" in sums:
            metrics["loss/kl"] = sums["kl"] / tokens
        if (gap := self.lag0_gap) is not None:
            metrics["ratio/lag0_log_abs_mean"] = gap
            metrics["ratio/lag0_log_abs_max"] = sums["fresh_gap_max"]
            metrics["ratio/lag0_tokens"] = sums["fresh_tokens"]
        return metrics
