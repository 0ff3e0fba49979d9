"""Trust-region heads whose bounds depend on the whole mini-batch, and the statistics they need.

    statistics(policy_logprobs, anchor_logprobs, advantages, *, settings...) -> {name: scalar}

takes vectors over the M trained tokens of the mini-batch, of all micro-batches and ranks, in any
order: what `heads.statistics_inputs` selects. It needs the policy's log-probs before the first
backward pass; these are the proximal log-probs as well. The result's names are keywords of the
head. Sums run in float64 over sorted values, so the order of the tokens changes no bit. An empty
batch gives the widest bounds.

Arguments, symbols and names of bounds are those of `heads`; d is the log-ratio ``log pi - anchor``.

    m2po         clip(rho) to bounds beyond which the mean of d^2 would exceed a budget
    m2po_mask    tokens of the largest d^2 are rejected until the mean keeps to the budget
    bapo         clip(rho) to bounds searched for the contribution of positive advantages

and, in `heads_sat`, clips whose nominal bounds contract for the outliers of the batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pace_lightning.core.losses import blank, clip_bounds, clipped_surrogate, log_ratio

CANDIDATES = ("all", "outward")
"""The tokens whose d^2 M2PO's mask counts."""

BAPO_MEASURES = ("ratio", "share")
"""How BAPO compares the gains P of positive advantages and the losses N of negative ones."""


def m2po_statistics(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    *,
    budget: float = 0.04,
    min_clip_low: float = 0.3,
    min_clip_high: float = 0.5,
) -> dict[str, Tensor]:
    """Bounds of the ratio from a budget of the second moment (M2PO, its authors' repository).

    Of the n tokens that move outward (A > 0 and rho > 1, or A < 0 and rho < 1), sort d^2 into
    ``v_0 <= v_1 ...``. If their mean is at most the budget, nothing is bounded. Otherwise k is the
    first index with ``sum_{i<=k} v_i + (n - k - 1) v_k >= n budget``, and the bounds are
    ``exp(-t), exp(t)`` with ``t = sqrt(v_{k-1})``, or 0 if k = 0; then they are widened to the
    minimal distances.

    Source: arXiv:2510.01161; Infini-AI-Lab/M2PO, which searches in each micro-batch.

    Settings:
        budget: of the mean of d^2; > 0.
        min_clip_low: the lower bound is at most ``1 - min_clip_low``; in ``[0, 1)``.
        min_clip_high: the upper bound is at least ``1 + min_clip_high``; >= 0.

    Returns:
        ``ratio_low`` and ``ratio_high``.

    Raises:
        ValueError: if a setting is out of range.
    """
    lower, upper = clip_bounds(min_clip_low, min_clip_high)
    distances = log_ratio(policy_logprobs, anchor_logprobs)
    squares = _sorted_squares(distances[_is_outward(distances, advantages)])
    total = _budget_of(budget) * len(squares)
    radius = squares.new_tensor(math.inf)
    if squares.sum() > total:
        remaining = torch.arange(len(squares) - 1, -1, -1, device=squares.device)
        capped_sums = squares.cumsum(0) + remaining * squares  # rises with the index
        index = int((capped_sums < total).sum())
        radius = squares[index - 1].sqrt() if index > 0 else squares.new_tensor(0.0)
    return {
        "ratio_low": (-radius).exp().clamp(max=lower),
        "ratio_high": radius.exp().clamp(min=upper),
    }


def m2po_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio_low: Tensor,
    ratio_high: Tensor,
) -> Tensor:
    """Clipped surrogate with the bounds of `m2po_statistics` (M2PO, its authors' repository).

    Statistics:
        ratio_low: the lower bound of the ratio.
        ratio_high: the upper one.
    """
    ratio = log_ratio(blank(policy_logprobs, mask), blank(anchor_logprobs, mask)).exp()
    return clipped_surrogate(ratio, ratio.clamp(ratio_low, ratio_high), blank(advantages, mask))


def m2po_mask_statistics(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    *,
    budget: float = 0.04,
    candidates: str = "all",
) -> dict[str, Tensor]:
    """The limit of d^2 above which tokens are rejected, so that the mean of the rest is < budget.

    As few as possible of the largest d^2 are rejected; tokens of equal d^2 share their fate, so
    that their order cannot matter, and the smallest are never rejected. The limit lies halfway
    between the largest that is kept and the smallest that is not: rounding in the training pass
    moves no token across it.

    Source: arXiv:2510.01161 (as a reading note states it) and AReaL, which breaks ties by position.

    Settings:
        budget: of the mean of d^2; > 0.
        candidates: ``all`` tokens (AReaL), or only those that move ``outward`` (reconstruction:
            the repository's rule applied to the mask).

    Returns:
        ``square_limit``; infinite if nothing is rejected.

    Raises:
        ValueError: if a setting is out of range.
    """
    distances = log_ratio(policy_logprobs, anchor_logprobs)
    squares = _sorted_squares(distances[_is_candidate(distances, advantages, candidates)])
    counts = torch.arange(1, len(squares) + 1, device=squares.device)
    num_kept = max(1, int((squares.cumsum(0) / counts < _budget_of(budget)).sum()))
    if num_kept >= len(squares):
        return {"square_limit": squares.new_tensor(math.inf)}
    boundary = squares[num_kept]  # the smallest that must go
    below = squares[squares < boundary]
    if len(below) == 0:  # the smallest of all are tied with it: they stay
        below, squares = boundary.unsqueeze(0), squares[squares > boundary]
        boundary = squares[0] if len(squares) else boundary.new_tensor(math.inf)
    return {"square_limit": (below[-1] + boundary) / 2}


def m2po_keep(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    candidates: str = "all",
    square_limit: Tensor,
) -> Tensor:
    """The tokens that M2PO's mask keeps; in AReaL, of proximal against behavior policy.

    So AReaL's form is a keep mask of the corrections, beside the behavior weight and any clipped
    head; the paper's form is `m2po_mask_head`.

    Args:
        proximal_logprobs: shape ``(N, T)``.
        behavior_logprobs: shape ``(N, T)``.
        advantages: A; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        candidates: as in `m2po_mask_statistics`.
        square_limit: from there.

    Returns:
        Boolean, True only where the mask is; shape ``(N, T)``.
    """
    distances = log_ratio(blank(proximal_logprobs, mask), blank(behavior_logprobs, mask)).detach()
    is_candidate = _is_candidate(distances, blank(advantages, mask), candidates)
    return mask & ~(is_candidate & (distances.double().square() > square_limit))


def m2po_mask_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    candidates: str = "all",
    square_limit: Tensor,
) -> Tensor:
    """``-A rho`` without any clip, at the tokens that `m2po_keep` keeps (M2PO, the paper's text).

    Source: arXiv:2510.01161, as a reading note states it: rejected tokens stay in the denominator.

    Settings:
        candidates: as in `m2po_mask_statistics`.

    Statistics:
        square_limit: from there.
    """
    kept = m2po_keep(
        policy_logprobs,
        anchor_logprobs,
        advantages,
        mask,
        candidates=candidates,
        square_limit=square_limit,
    )
    ratio = log_ratio(blank(policy_logprobs, kept), blank(anchor_logprobs, kept)).exp()
    return -blank(advantages, kept) * ratio


def bapo_statistics(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    *,
    target: float = 0.5,
    measure: str = "ratio",
    ratio_low_start: float = 0.6,
    ratio_low_max: float = 0.9,
    ratio_low_step: float = 0.05,
    ratio_high_start: float = 1.2,
    ratio_high_max: float = 3.0,
    ratio_high_step: float = 0.1,
) -> dict[str, Tensor]:
    """Bounds of the ratio, moved until positive advantages contribute enough (BAPO).

    P is the sum of ``A min(rho, ratio_high)`` over A > 0, N that of ``-A max(rho, ratio_low)`` over
    A < 0. While ``P / N`` (or ``P / (P + N)``) is below the target, the lower bound rises to its
    maximum, then the upper one. Raising the lower bound never lowers N, so in this measure the
    first part of the search cannot succeed; it is what the source does.

    Source: arXiv:2510.18927; WooooDyy/BAPO, whose code measures P / N and whose text the share.

    Settings:
        target: of the measure; >= 0.
        measure: ``ratio``, P / N, or ``share``, P / (P + N).
        ratio_low_start, ratio_low_max, ratio_low_step: of the search; in (0, 1], in (0, 1], > 0.
        ratio_high_start, ratio_high_max, ratio_high_step: of the search; >= 1, >= 1, > 0.

    Returns:
        ``ratio_low`` and ``ratio_high``.

    Raises:
        ValueError: if a setting is out of range.
    """
    if measure not in BAPO_MEASURES or not target >= 0:
        raise ValueError(
            f"measure is {measure!r} and target {target}; choose one of {BAPO_MEASURES} and a "
            "target >= 0"
        )
    lows = _steps("ratio_low", ratio_low_start, ratio_low_max, ratio_low_step)
    highs = _steps("ratio_high", ratio_high_start, ratio_high_max, ratio_high_step)
    if not 0 < lows[0] <= lows[-1] <= 1 <= highs[0]:
        raise ValueError(
            f"ratio_low goes from {lows[0]} to {lows[-1]} and ratio_high from {highs[0]}; they "
            "bound the ratio itself, so 0 < ratio_low <= 1 <= ratio_high is needed"
        )
    ratio = log_ratio(policy_logprobs, anchor_logprobs).double().exp()
    order = advantages.argsort(stable=True)
    order = order[ratio[order].argsort(stable=True)]  # whatever the order was before
    ratio, advantages = ratio[order], advantages[order].double()
    for low, high in [(x, highs[0]) for x in lows] + [(lows[-1], x) for x in highs[1:]]:
        gains = (advantages.clamp(min=0) * ratio.clamp(max=high)).sum()
        losses = (-advantages.clamp(max=0) * ratio.clamp(min=low)).sum()
        if gains >= target * (losses if measure == "ratio" else gains + losses):
            break
    return {"ratio_low": ratio.new_tensor(low), "ratio_high": ratio.new_tensor(high)}


def bapo_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    dual_clip: float | None = 3.0,
    ratio_low: Tensor,
    ratio_high: Tensor,
) -> Tensor:
    """Clipped surrogate with the bounds of `bapo_statistics` (BAPO).

    Settings:
        dual_clip: as in `heads.dapo_head`.

    Statistics:
        ratio_low: the lower bound of the ratio.
        ratio_high: the upper one.
    """
    ratio = log_ratio(blank(policy_logprobs, mask), blank(anchor_logprobs, mask)).exp()
    return clipped_surrogate(
        ratio, ratio.clamp(ratio_low, ratio_high), blank(advantages, mask), dual_clip=dual_clip
    )


def _sorted_squares(distances: Tensor) -> Tensor:
    return distances.double().square().sort().values


def _is_outward(distances: Tensor, advantages: Tensor) -> Tensor:
    """Whether the policy has moved a token's log-prob in the direction of its advantage."""
    return distances.sign() * advantages.sign() > 0


def _is_candidate(distances: Tensor, advantages: Tensor, candidates: str) -> Tensor:
    if candidates not in CANDIDATES:
        raise ValueError(f"candidates is {candidates!r}; choose one of {CANDIDATES}")
    if candidates == "outward":
        return _is_outward(distances, advantages)
    return torch.ones_like(distances, dtype=torch.bool)


def _budget_of(budget: float) -> float:
    if not budget > 0:
        raise ValueError(f"budget is {budget}; the mean of d^2 needs a bound > 0 (0.04 is M2PO's)")
    return budget


def _steps(name: str, start: float, stop: float, step: float) -> list[float]:
    """``start``, ``start + step`` and so on, and ``stop`` at the end."""
    if not step > 0 or not start <= stop:
        raise ValueError(
            f"{name} goes from {start} to {stop} in steps of {step}; it must rise, by a step > 0"
        )
    num_steps = math.ceil((stop - start) / step - 1e-9)
    return [*(start + index * step for index in range(num_steps)), stop]
