"""The off-policy corrections by name, and what each one needs and claims.

Two families, one call: `importance_weights` brings the behavior policy mu back to the proximal
policy, before a trust-region head; `sequence_corrections` replaces the head's ratio altogether. A
ratio of mu must be counted once, so a method's *role* says what it may be combined with:

    mask        any head: it only drops tokens
    weight      a head whose anchor is the proximal policy, or plain REINFORCE (no ratio at all);
                never a head anchored at mu
    objective   plain REINFORCE only: ``-weight * A * log pi``

and at most one method of a run is not a mask. A correction of plain REINFORCE has the current
policy in its numerator, whatever `Method.numerator` says for the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pace_lightning.core import (
    drift_corrections,
    heads_batch,
    importance_weights,
    sequence_corrections,
)
from pace_lightning.core.importance_weights import Correction

TENSORS = ("advantages", "group_ids")
"""What a method may take beyond the log-probs and the mask: A of (N, T), group numbers of (N,)."""

STATISTICS = ("group_log_scale", "group_log_expectation", "square_limit")
"""What a method may be given from a pass over the whole mini-batch: (N,), the last a scalar."""


@dataclass(frozen=True, slots=True)
class Method:
    """A correction and what has to be known to use it."""

    function: Callable[..., Correction]
    """Takes ``(numerator_logprobs, behavior_logprobs, mask)``, then everything else by name."""

    numerator: Literal["proximal", "policy"]
    """Which log-probs are the numerator: the proximal or the current policy's."""

    role: Literal["mask", "weight", "objective"]
    """What it may be combined with; see the module's header."""

    formula: str = ""
    """In the symbols of `config`: x, X, g the ratio to mu of a token, of a response and its
    geometric mean, {ratio} that of the setting ``level``; settings in braces."""

    def takes(self, name: str) -> bool:
        """Whether the function has an argument of this name."""
        return name in inspect.signature(self.function).parameters

    @property
    def needs_prepass(self) -> bool:
        """Whether it has a statistic of the whole mini-batch, unless that is one micro-batch."""
        return any(self.takes(name) for name in STATISTICS)

    def settings(self) -> dict[str, Any]:
        """The settings a user may write, with their defaults."""
        return {
            name: parameter.default
            for name, parameter in inspect.signature(self.function).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and name not in TENSORS + STATISTICS
        }


@torch.no_grad()
def m2po(
    numerator_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    budget: float = 0.04,
    candidates: str = "all",
    square_limit: Tensor | None = None,
) -> Correction:
    """M2PO's mask as AReaL has it, beside a behavior weight and any head (arXiv:2510.01161).

    Args:
        numerator_logprobs: log prox; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        advantages: A; shape ``(N, T)``. Only its sign matters, and only if ``outward``.
        budget: as in `heads_batch.m2po_mask_statistics`.
        candidates: likewise.
        square_limit: result of that function for the whole mini-batch; None takes these rows as
            all of it.

    Returns:
        Which tokens stay.

    Raises:
        ValueError: if a setting is out of range, or the shapes differ.
    """
    importance_weights.check_logprobs(numerator_logprobs, behavior_logprobs, mask)
    importance_weights.check_like(advantages, mask, "advantages")
    if square_limit is None:
        selected = (x[mask] for x in (numerator_logprobs, behavior_logprobs, advantages))
        square_limit = heads_batch.m2po_mask_statistics(
            *selected, budget=budget, candidates=candidates
        )["square_limit"]
    keep = heads_batch.m2po_keep(
        numerator_logprobs,
        behavior_logprobs,
        advantages,
        mask,
        candidates=candidates,
        square_limit=square_limit,
    )
    return importance_weights.corrected(torch.ones_like(behavior_logprobs), keep, mask)


METHODS: dict[str, Method] = {
    "tis": Method(importance_weights.tis, "proximal", "weight", "min({ratio}, {cap})"),
    "mis": Method(
        importance_weights.mis, "proximal", "weight", "{ratio} where {lower} <= {ratio} <= {upper}"
    ),
    "icepop": Method(
        importance_weights.mis, "proximal", "weight", "{ratio} where {lower} <= {ratio} <= {upper}"
    ),
    "rs": Method(
        importance_weights.rs, "proximal", "mask", "1 where {lower} <= {ratio} <= {upper}"
    ),
    "seq_mask_tis": Method(
        importance_weights.seq_mask_tis, "proximal", "weight", "x where {lower} <= g <= {upper}"
    ),
    "k2_rs": Method(
        importance_weights.k2_rs, "proximal", "mask", "1 where ({level}) (log x)^2 / 2 <= {upper}"
    ),
    "k3_rs": Method(
        importance_weights.k3_rs, "proximal", "mask", "1 where ({level}) x - log x - 1 <= {upper}"
    ),
    "m2po": Method(
        m2po, "proximal", "mask", "1 without the largest (log x)^2: mean below {budget}"
    ),
    "opsm": Method(
        importance_weights.opsm, "policy", "mask", "1 where A >= 0 or mean of -log x <= {delta}"
    ),
    "carm": Method(
        drift_corrections.carm, "policy", "mask", "1 where exp(mean of |log x|) <= {upper}"
    ),
    "mu_grpo": Method(
        drift_corrections.mu_grpo,
        "policy",
        "mask",
        "1, where A < 0 only up to the first token with x > {upper}",
    ),
    "gipo": Method(
        drift_corrections.gipo, "policy", "objective", "x exp(-(log x)^2 / (2 {sigma}^2))"
    ),
    "gmc_grpo": Method(
        sequence_corrections.gmc_grpo,
        "policy",
        "objective",
        "X min(1, C / sum of X in the group), C = (1 + {eps}) x {mass}",
    ),
    "tic_grpo": Method(
        sequence_corrections.tic_grpo, "policy", "objective", "min(X, 1 + {eps}) ({above_cap})"
    ),
    "topr": Method(
        sequence_corrections.topr, "policy", "objective", "1 where A >= 0, min({ratio}, 1) else"
    ),
    "vespo": Method(
        sequence_corrections.vespo,
        "policy",
        "objective",
        "X^k exp(l (1 - X)), k = {k_positive}, l = {lambda_positive} where A >= 0, else "
        "{k_negative}, {lambda_negative}",
    ),
    "gepo": Method(
        sequence_corrections.gepo, "policy", "objective", "pi / (expectation of mu in the group)"
    ),
}
"""The field's name to the method; ``mis`` and ``icepop`` are two names of one."""

CORRECTIONS: dict[str, Callable[..., Correction]] = {
    name: method.function for name, method in METHODS.items()
}
"""The field's name to the function."""


def correct(
    name: str,
    numerator_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    group_ids: Tensor,
    **settings: Any,
) -> Correction:
    """Call a method by name, with those of the tensors that it takes.

    Args:
        name: a key of `METHODS`.
        numerator_logprobs: log-probs of `Method.numerator`; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        advantages: A; shape ``(N, T)``.
        group_ids: rows with the same number belong to one group; shape ``(N,)``.
        **settings: the method's own, and its statistic of the mini-batch, if there is one.

    Returns:
        What the method does to each token.

    Raises:
        ValueError: if the name or a setting is unknown, or for the reasons of the method.
    """
    if name not in METHODS:
        raise ValueError(f"unknown correction {name!r}; choose one of {sorted(METHODS)}")
    method = METHODS[name]
    if unknown := [setting for setting in settings if not method.takes(setting)]:
        raise ValueError(
            f"correction {name!r} has no setting {unknown}; it takes {sorted(method.settings())}"
        )
    tensors = {"advantages": advantages, "group_ids": group_ids}
    taken = {key: value for key, value in tensors.items() if method.takes(key)}
    return method.function(numerator_logprobs, behavior_logprobs, mask, **taken, **settings)


def combine(corrections: Sequence[Correction]) -> Correction:
    """All corrections together: the product of the weights, and only what all of them keep.

    Args:
        corrections: of the same tokens; at least one. At most one may come from a method that is
            not a mask, or mu is counted twice; that is the caller's to check, by `Method.role`.

    Returns:
        The joint correction.

    Raises:
        ValueError: if there is none.
    """
    if not corrections:
        raise ValueError("got 0 corrections to combine; leave the correction out instead")
    weight, keep = corrections[0].weight, corrections[0].keep
    for correction in corrections[1:]:
        weight, keep = weight * correction.weight, keep & correction.keep
    return Correction(weight=weight, keep=keep)


def weight_sum(correction: Correction, mask: Tensor) -> Tensor:
    """Sum of the weights over the trained tokens, 0 at dropped ones.

    The sums of all micro-batches add up; over the number of trained tokens, they are the mean that
    `normalize` needs.

    Args:
        correction: of one micro-batch.
        mask: boolean; shape ``(N, T)``.

    Returns:
        A scalar in float64.
    """
    return importance_weights.row_totals(correction.weight, mask).sum()


def normalize(correction: Correction, mask: Tensor, *, mean_weight: float) -> Correction:
    """Divide the weights by their mean over the whole batch (verl's batch normalization).

    Args:
        correction: of one micro-batch.
        mask: boolean; shape ``(N, T)``.
        mean_weight: mean weight of the trained tokens of all micro-batches and ranks; > 0.

    Returns:
        The correction with weights of mean 1; what is kept stays the same.

    Raises:
        ValueError: if the mean is not positive.
    """
    if not mean_weight > 0:
        raise ValueError(
            f"the mean weight is {mean_weight}; weights can be divided by a positive mean only: if "
            "every token was dropped, widen the bounds of the correction"
        )
    weight = torch.where(mask, correction.weight / mean_weight, correction.weight)
    return Correction(weight=weight, keep=correction.keep)
