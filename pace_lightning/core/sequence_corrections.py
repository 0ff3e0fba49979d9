"""Weights that are the whole off-policy story of a loss: ``-weight * A * log pi``.

Shapes:

    N   responses (rows) of a micro-batch
    T   positions of the longest row; shorter rows are padded
    M   all responses of a mini-batch with at least one trained token

Symbols:

    pi  ``numerator_logprobs``: the *current* policy, so that the weight replaces the ratio of a
        trust-region head; such a head on top would count mu twice
    mu  ``behavior_logprobs``: the policy that sampled the tokens
    r   ratio of a sequence, the product of pi / mu over its trained tokens (VESPO calls it W)
    A   ``advantages``

Methods, with the aggregation that makes them the paper's loss:

    gmc_grpo   r * min(1, C / sum of r over the group)     seq-mean-token-sum-norm   2610.01896
    tic_grpo   min(r, 1 + eps)                             seq-mean-token-sum-norm   2508.02833
    topr       1 for A >= 0, min(r, 1) for A < 0           seq-mean-token-sum        2503.14286
    vespo      r**k * exp(lam * (1 - r))                   token-mean                2602.10693
    gepo       pi / (expectation of mu over the group)     seq-mean-token-mean       2508.17850

Conventions are those of `importance_weights`: no gradient, log-ratios clamped to +-20. The sum of a
group needs its rows together. If a group is cut by micro-batches, compute `gmc_log_scale` or
`gepo_log_expectation` over the mini-batch first, and hand each row its entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pace_lightning.core.importance_weights import (
    Correction,
    check_like,
    check_logprobs,
    corrected,
    row_means,
    row_totals,
    token_log_ratio,
    trajectory_log_ratio,
)
from pace_lightning.core.losses import LOG_RATIO_LIMIT

MASSES = ("group", "one")
"""What a group's ratios may sum to, in units of ``1 + eps``: its size, or 1."""

ABOVE_CAP = ("weight", "drop", "pessimistic")
"""What `tic_grpo` does above its cap."""


@torch.no_grad()
def gmc_grpo(
    numerator_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    group_ids: Tensor,
    eps: float = 0.2,
    mass: str = "group",
    group_log_scale: Tensor | None = None,
) -> Correction:
    """Group mass capping (arXiv:2610.01896): a group's ratios are scaled down together.

    The form is a published note's; the capacity C is a reconstruction, hence the switch ``mass``.

    Args:
        numerator_logprobs: log pi; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        group_ids: rows with the same number belong to one group; shape ``(N,)``.
        eps: slack of the cap, > -1.
        mass: ``group`` caps the sum at C = G (1 + eps), with G the rows of the group that have a
            trained token, ``one`` at C = 1 + eps.
        group_log_scale: result of `gmc_log_scale` for these rows; shape ``(N,)``. None takes the
            groups as complete.

    Returns:
        The weight, one number per row; nothing is dropped.

    Raises:
        ValueError: if ``mass`` is unknown, ``eps`` out of range, or the shapes differ.
    """
    log_ratios = trajectory_log_ratio(numerator_logprobs, behavior_logprobs, mask)
    if group_log_scale is None:
        group_log_scale = _at_trained_rows(
            gmc_log_scale, log_ratios, group_ids, mask, eps=eps, mass=mass
        )
    _check_rows(group_log_scale, mask, "group_log_scale")
    return _row_weights((log_ratios + group_log_scale).exp(), numerator_logprobs, mask)


@torch.no_grad()
def gmc_log_scale(
    log_ratios: Tensor, group_ids: Tensor, *, eps: float = 0.2, mass: str = "group"
) -> Tensor:
    """``log kappa = min(0, log C - log(sum of r over the group))`` for each sequence.

    Args:
        log_ratios: log r of all sequences, from `trajectory_log_ratio`; shape ``(M,)``.
        group_ids: shape ``(M,)``.
        eps: as in `gmc_grpo`.
        mass: as in `gmc_grpo`.

    Returns:
        Float64, the same for all sequences of a group and in any order of them; shape ``(M,)``.

    Raises:
        ValueError: if ``mass`` is unknown, or ``eps`` out of range.
    """
    if mass not in MASSES:
        raise ValueError(f"unknown mass {mass!r}; choose one of {MASSES}")
    if not eps > -1:
        raise ValueError(f"eps is {eps}; the cap is a multiple of 1 + eps, so eps > -1 is needed")

    def scale(members: Tensor) -> Tensor:
        size = len(members) if mass == "group" else 1
        return (math.log(size * (1 + eps)) - members.logsumexp(dim=0)).clamp(max=0)

    return _per_group(scale, log_ratios, group_ids)


@torch.no_grad()
def tic_grpo(
    numerator_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    eps: float = 0.2,
    above_cap: str = "weight",
) -> Correction:
    """One ratio per trajectory, capped above (TIC-GRPO, arXiv:2508.02833).

    The trajectory ratio is the paper's and not length-normalized; what happens above the cap is a
    reconstruction, hence the switch ``above_cap``.

    Args:
        numerator_logprobs: log pi; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        advantages: A; shape ``(N, T)``. Only its sign matters, and only if ``pessimistic``.
        eps: the cap is ``1 + eps``; > -1.
        above_cap: ``weight`` keeps the score function with weight ``1 + eps``; ``drop`` has the
            gradient of ``min(r, 1 + eps)``, none; ``pessimistic`` that of
            ``max(-A r, -A min(r, 1 + eps))``: none for A >= 0, weight r for A < 0.

    Returns:
        The weight, and which rows (or tokens, if A changes sign within a row) stay.

    Raises:
        ValueError: if ``above_cap`` is unknown, ``eps`` out of range, or the shapes differ.
    """
    if above_cap not in ABOVE_CAP:
        raise ValueError(f"unknown above_cap {above_cap!r}; choose one of {ABOVE_CAP}")
    if not eps > -1:
        raise ValueError(f"eps is {eps}; the cap is 1 + eps, so eps > -1 is needed")
    negative = _is_negative(advantages, mask)
    ratio = trajectory_log_ratio(numerator_logprobs, behavior_logprobs, mask).exp()[:, None]
    weight, drop = ratio.clamp(max=1 + eps).expand_as(negative), torch.zeros_like(negative)
    if above_cap != "weight":
        drop = (ratio > 1 + eps).expand_as(negative)
    if above_cap == "pessimistic":
        weight, drop = torch.where(negative, ratio, weight), drop & ~negative
    return corrected(weight.to(numerator_logprobs.dtype), ~drop, mask)


@torch.no_grad()
def topr(
    numerator_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    level: str = "sequence",
) -> Correction:
    """Tapered off-policy REINFORCE (arXiv:2503.14286): only bad responses are weighted.

    The paper looks at the sign of the reward. Here it is the sign of A, which is the same for two
    kinds of reward, one above 0 and one not, and any baseline between them.

    Args:
        numerator_logprobs: log pi; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        advantages: A; shape ``(N, T)``. Only its sign matters.
        level: ``sequence`` weighs by min(r, 1) as the paper does, ``token`` by the token's own
            ratio, as ROLL does.

    Returns:
        The weight; nothing is dropped.

    Raises:
        ValueError: if the level is unknown, or the shapes differ.
    """
    if level not in ("sequence", "token"):
        raise ValueError(f"unknown level {level!r}; choose 'sequence' or 'token'")
    negative = _is_negative(advantages, mask)
    if level == "sequence":
        log_ratios = trajectory_log_ratio(numerator_logprobs, behavior_logprobs, mask)[:, None]
    else:
        log_ratios = token_log_ratio(numerator_logprobs, behavior_logprobs, mask)
    tapered = log_ratios.clamp(max=0).exp().to(numerator_logprobs.dtype)
    weight = torch.where(negative, tapered, torch.ones_like(tapered))
    return corrected(weight, torch.ones_like(mask), mask)


@torch.no_grad()
def vespo(
    numerator_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Correction:
    """A gamma-shaped weight of the sequence ratio (VESPO, arXiv:2602.10693; defaults of TRL).

    It is 1 at r = 1, largest at r = k / lam, and vanishes on both sides. (TRL clamps log r below at
    log 1e-8 instead of -20.)

    Args:
        numerator_logprobs: log pi; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        advantages: A; shape ``(N, T)``. Only its sign matters.
        k_positive: exponent k for A >= 0; >= 0.
        lambda_positive: decay lam for A >= 0; >= 0.
        k_negative: k for A < 0; >= 0.
        lambda_negative: lam for A < 0; >= 0.

    Returns:
        The weight; nothing is dropped.

    Raises:
        ValueError: if a setting is negative, or the shapes differ.
    """
    settings = (k_positive, lambda_positive, k_negative, lambda_negative)
    if not all(setting >= 0 for setting in settings):
        raise ValueError(
            f"k and lambda are {settings[:2]} for A >= 0 and {settings[2:]} for A < 0; all must be "
            ">= 0, or the weight grows without bound"
        )
    negative = _is_negative(advantages, mask)
    log_ratios = trajectory_log_ratio(numerator_logprobs, behavior_logprobs, mask)
    ratio = log_ratios.exp()
    good = (k_positive * log_ratios + lambda_positive * (1 - ratio)).exp()[:, None]
    bad = (k_negative * log_ratios + lambda_negative * (1 - ratio)).exp()[:, None]
    weight = torch.where(negative, bad, good).to(numerator_logprobs.dtype)
    return corrected(weight, torch.ones_like(mask), mask)


@torch.no_grad()
def gepo(
    numerator_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    group_ids: Tensor,
    length_normalize: bool = True,
    clip_low: float | None = None,
    clip_high: float | None = None,
    group_log_expectation: Tensor | None = None,
) -> Correction:
    """Group expectation policy optimization (arXiv:2508.17850): one denominator for a group.

    With P_i and Q_i the probabilities of response i under pi and mu, the weight is P_i / E with
    E = sum of Q**2 / sum of Q over the group. It is not 1 on policy.

    Args:
        numerator_logprobs: log pi; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        advantages: A; shape ``(N, T)``. Only its sign matters, and only with a clip.
        group_ids: rows with the same number belong to one group; shape ``(N,)``.
        length_normalize: P and Q are geometric means over the tokens, as in the authors' code;
            False takes the products.
        clip_low: with A < 0, a weight below ``1 - clip_low`` has no gradient (the authors' code
            clips as PPO does); None is no such bound.
        clip_high: with A > 0, a weight above ``1 + clip_high`` has none; None is no such bound.
        group_log_expectation: result of `gepo_log_expectation` for these rows; shape ``(N,)``. None
            takes the groups as complete.

    Returns:
        The weight, and which tokens stay.

    Raises:
        ValueError: if a clip is negative, or the shapes differ.
    """
    if not (clip_low or 0) >= 0 or not (clip_high or 0) >= 0:
        raise ValueError(f"clip_low is {clip_low} and clip_high {clip_high}; both must be >= 0")
    negative = _is_negative(advantages, mask)
    check_logprobs(numerator_logprobs, behavior_logprobs, mask)
    reduce = row_means if length_normalize else row_totals
    log_p, log_q = reduce(numerator_logprobs, mask), reduce(behavior_logprobs, mask)
    if group_log_expectation is None:
        group_log_expectation = _at_trained_rows(gepo_log_expectation, log_q, group_ids, mask)
    _check_rows(group_log_expectation, mask, "group_log_expectation")
    log_weight = (log_p - group_log_expectation).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    weight = log_weight.exp()[:, None].to(numerator_logprobs.dtype).expand_as(mask)
    drop = torch.zeros_like(mask)
    if clip_low is not None:
        drop = drop | (negative & (weight < 1 - clip_low))
    if clip_high is not None:
        drop = drop | ((advantages > 0) & (weight > 1 + clip_high))
    return corrected(weight, ~drop, mask)


@torch.no_grad()
def gepo_log_expectation(log_probs: Tensor, group_ids: Tensor) -> Tensor:
    """``log(sum of Q**2 / sum of Q)`` over the group of each sequence.

    Args:
        log_probs: log Q of all sequences: the mean (or sum) of log mu; shape ``(M,)``.
        group_ids: shape ``(M,)``.

    Returns:
        Float64, the same for all sequences of a group and in any order of them; shape ``(M,)``.
    """

    def expectation(members: Tensor) -> Tensor:
        return (2 * members).logsumexp(dim=0) - members.logsumexp(dim=0)

    return _per_group(expectation, log_probs, group_ids)


def _per_group(reduce: Callable[[Tensor], Tensor], values: Tensor, group_ids: Tensor) -> Tensor:
    """Each value's group reduced, in float64 and in sorted order; shapes ``(M,)``."""
    if values.shape != group_ids.shape or values.ndim != 1:
        raise ValueError(
            f"values have shape {tuple(values.shape)} and group_ids {tuple(group_ids.shape)}; both "
            "must be (M,)"
        )
    result = torch.zeros_like(values, dtype=torch.float64)
    for group_id in set(group_ids.tolist()):
        members = group_ids == group_id
        result[members] = reduce(values[members].double().sort().values)
    return result


def _at_trained_rows(
    statistic: Callable[..., Tensor],
    values: Tensor,
    group_ids: Tensor,
    mask: Tensor,
    **settings: float | str,
) -> Tensor:
    """A group statistic over the rows with a trained token; 0 at the others; shape ``(N,)``."""
    _check_rows(group_ids, mask, "group_ids")
    trained = mask.any(dim=1)
    result = torch.zeros_like(values)
    result[trained] = statistic(values[trained], group_ids[trained], **settings)
    return result


def _row_weights(weights: Tensor, like: Tensor, mask: Tensor) -> Correction:
    """One weight per row at each of its tokens; ``(N,)`` to ``(N, T)``."""
    weight = weights[:, None].to(like.dtype).expand_as(mask)
    return corrected(weight, torch.ones_like(mask), mask)


def _is_negative(advantages: Tensor, mask: Tensor) -> Tensor:
    """Where A < 0; anything at masked positions; shape ``(N, T)``."""
    check_like(advantages, mask, "advantages")
    return advantages < 0


def _check_rows(values: Tensor, mask: Tensor, name: str) -> None:
    if values.shape != mask.shape[:1]:
        raise ValueError(
            f"{name} has shape {tuple(values.shape)} and the mask {tuple(mask.shape)}; it must be "
            "(N,), one entry per row of the mask"
        )
