"""Weights and masks for data whose behavior policy is not the policy that is corrected to.

Shapes:

    N   responses (rows)
    T   positions of the longest row; shorter rows are padded

Symbols:

    p   ``numerator_logprobs``: the proximal policy or, where there is none, the current policy
    mu  ``behavior_logprobs``: the policy that sampled the tokens
    m   ``mask``: True at the trained tokens; L is their number in a row
    d   log-ratio of a token, ``log p - log mu``
    x   ratio of a token, exp(d)
    X   ratio of a sequence, the product of x over its trained tokens
    g   geometric mean of x over a row, X ** (1 / L)

Methods; "drop" means that a token, or all tokens of a row, contribute no loss:

    tis            weight min(x or X or g, cap)                                  TIS
    mis            weight x or X or g; drop outside [lower, upper]               MIS, IcePop
    rs             weight 1; drop where x or X or g is outside [lower, upper]    rejection
    seq_mask_tis   weight x; drop rows with g outside [lower, upper]             OpenRLHF
    k2_rs, k3_rs   weight 1; drop tokens or rows whose estimate of KL(mu || p) exceeds a bound
    opsm           weight 1; drop where A < 0 and the mean of -d exceeds a bound  DeepSeek-V3.2

A method takes ``(numerator_logprobs, behavior_logprobs, mask)``, then tensors it needs and its
settings by name, and returns a `Correction`, always without gradient. Log-ratios are clamped to
+-20, of a token and of a sequence. Masked positions may hold anything. A NaN at a trained token is
never dropped: it stays, and shows in the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pace_lightning.core.losses import LOG_RATIO_LIMIT, blank, log_ratio, row_sums

LEVELS = ("token", "sequence", "geometric")
"""Which ratio a method looks at: x, X or g."""

ESTIMATE_LEVELS = ("token", "seq-sum", "seq-mean", "seq-max")
"""How `k2_rs` and `k3_rs` reduce the estimates of a row's tokens."""


@dataclass(frozen=True, slots=True)
class Correction:
    """What a correction does to each token: ``weight * loss`` is aggregated over ``keep``."""

    weight: Tensor
    """Detached; 0 at dropped tokens, 1 where nothing is done, masked positions included; (N, T)."""

    keep: Tensor
    """True at trained tokens that stay, so a subset of the mask; (N, T)."""


@torch.no_grad()
def tis(
    numerator_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    cap: float = 2.0,
    floor: float = 0.0,
) -> Correction:
    """Truncated importance sampling: the ratio as a weight, at most ``cap``.

    Args:
        numerator_logprobs: log p; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        level: one of `LEVELS`. ``sequence`` and ``geometric`` give a row one weight.
        cap: largest weight; 2 in verl and slime, 8 for sequences in VCPO.
        floor: smallest weight (slime); 0 truncates above only.

    Returns:
        The weight; nothing is dropped.

    Raises:
        ValueError: if the level is unknown, the bounds are out of order, or the shapes differ.
    """
    if not 0 <= floor < cap:
        raise ValueError(
            f"floor is {floor} and cap {cap}; a weight lies between them, so 0 <= floor < cap"
        )
    ratio = _ratio_at(level, numerator_logprobs, behavior_logprobs, mask)
    return corrected(ratio.clamp(floor, cap), torch.ones_like(mask), mask)


@torch.no_grad()
def mis(
    numerator_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    lower: float | None = 0.5,
    upper: float = 5.0,
) -> Correction:
    """Masked importance sampling, IcePop: the ratio as a weight, or nothing outside the bounds.

    Args:
        numerator_logprobs: log p; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        level: one of `LEVELS`. ``token`` is IcePop (arXiv:2510.18855), ``sequence`` TRL's
            ``sequence_mask`` (no lower bound, upper 3), ``geometric`` AReaL's aggregated ratio (no
            lower bound, upper 5).
        lower: smallest ratio that stays, or None.
        upper: largest ratio that stays.

    Returns:
        The weight, and which tokens stay.

    Raises:
        ValueError: if the level is unknown, the bounds are out of order, or the shapes differ.
    """
    ratio = _ratio_at(level, numerator_logprobs, behavior_logprobs, mask)
    return corrected(ratio, _inside(ratio, lower, upper), mask)


@torch.no_grad()
def rs(
    numerator_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    level: str = "geometric",
    lower: float | None = 0.999,
    upper: float = 1.001,
) -> Correction:
    """Rejection by the ratio: `mis` with weight 1 at what stays.

    verl's ``*_k1`` options compare mu / p with the bounds; here, as in its formulas, it is p / mu.

    Args:
        numerator_logprobs: log p; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        level: one of `LEVELS`. The default bounds are meant for ``geometric``.
        lower: smallest ratio that stays, or None.
        upper: largest ratio that stays.

    Returns:
        Which tokens stay.

    Raises:
        ValueError: if the level is unknown, the bounds are out of order, or the shapes differ.
    """
    ratio = _ratio_at(level, numerator_logprobs, behavior_logprobs, mask)
    return corrected(torch.ones_like(ratio), _inside(ratio, lower, upper), mask)


@torch.no_grad()
def seq_mask_tis(
    numerator_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    lower: float | None = 0.5,
    upper: float = 5.0,
) -> Correction:
    """OpenRLHF's ``seq-mask-tis``: rows pass by their geometric mean, tokens weigh their own ratio.

    Args:
        numerator_logprobs: log p; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        lower: smallest geometric mean that stays, or None.
        upper: largest geometric mean that stays.

    Returns:
        The weight x, not truncated, and which rows stay.

    Raises:
        ValueError: if the bounds are out of order, or the shapes differ.
    """
    ratio = _ratio_at("token", numerator_logprobs, behavior_logprobs, mask)
    mean_ratio = _ratio_at("geometric", numerator_logprobs, behavior_logprobs, mask)
    return corrected(ratio, _inside(mean_ratio, lower, upper), mask)


@torch.no_grad()
def k2_rs(
    numerator_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    upper: float = 2.0,
) -> Correction:
    """Rejection by ``k2 = d ** 2 / 2`` (verl's ``token_k2``, ``seq_mean_k2`` and so on).

    Args:
        numerator_logprobs: log p; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        level: one of `ESTIMATE_LEVELS`; all but ``token`` drop whole rows.
        upper: largest estimate that stays, in nats.

    Returns:
        Which tokens stay.

    Raises:
        ValueError: if the level is unknown, the bound is negative, or the shapes differ.
    """
    d = token_log_ratio(numerator_logprobs, behavior_logprobs, mask)
    return _reject_estimates(d.square() / 2, mask, level, upper)


@torch.no_grad()
def k3_rs(
    numerator_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    level: str = "seq-mean",
    upper: float = 0.01,
) -> Correction:
    """Rejection by ``k3 = exp(d) - d - 1`` (verl's ``seq_mean_k3`` and so on).

    Args:
        numerator_logprobs: log p; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        level: one of `ESTIMATE_LEVELS`; all but ``token`` drop whole rows. ``seq-max`` is the trust
            region mask of arXiv:2512.23075.
        upper: largest estimate that stays, in nats; 0.001 to 0.01 is usual for means.

    Returns:
        Which tokens stay.

    Raises:
        ValueError: if the level is unknown, the bound is negative, or the shapes differ.
    """
    d = token_log_ratio(numerator_logprobs, behavior_logprobs, mask)
    return _reject_estimates(d.expm1() - d, mask, level, upper)


@torch.no_grad()
def opsm(
    numerator_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    delta: float = 1e-4,
) -> Correction:
    """Off-policy sequence masking (DeepSeek-V3.2): forget bad responses the policy moved away from.

    Args:
        numerator_logprobs: log pi of the *current* policy; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        advantages: A; shape ``(N, T)``. Only its sign matters, token by token.
        delta: where A < 0, a row stays up to this mean of ``log mu - log pi``, in nats per token;
            1e-4 in slime, 0.5 in TRL's advice.

    Returns:
        Which tokens stay.

    Raises:
        ValueError: if the shapes differ.
    """
    check_like(advantages, mask, "advantages")
    d = token_log_ratio(numerator_logprobs, behavior_logprobs, mask)
    moved_away = -row_means(d, mask) > delta
    drop = moved_away[:, None] & (advantages < 0)
    return corrected(torch.ones_like(d), ~drop, mask)


@torch.no_grad()
def trajectory_log_ratio(
    numerator_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor
) -> Tensor:
    """``log X`` of each row, clamped to +-20; 0 for a row without a trained token.

    Args:
        numerator_logprobs: log p; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.

    Returns:
        Float64, without gradient; shape ``(N,)``.

    Raises:
        ValueError: if the shapes differ.
    """
    d = token_log_ratio(numerator_logprobs, behavior_logprobs, mask)
    return row_totals(d, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_log_ratio(numerator_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """d, clamped to +-20; anything at masked positions; shape ``(N, T)``."""
    check_logprobs(numerator_logprobs, behavior_logprobs, mask)
    return log_ratio(numerator_logprobs, behavior_logprobs)


def row_totals(values: Tensor, mask: Tensor) -> Tensor:
    """The sums of `losses.row_sums`, in float64; ``(N, T)`` to ``(N,)``."""
    return row_sums(values, mask)[0]


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the trained tokens of each row, in float64, 0 without any; to ``(N,)``."""
    sums, counts = row_sums(values, mask)
    return sums / counts.clamp(min=1)


def corrected(weight: Tensor, keep: Tensor, mask: Tensor) -> Correction:
    """A `Correction` with the conventions of its fields; ``weight`` and ``keep`` of ``(N, T)``."""
    keep = keep & mask
    unweighted = (~mask).to(weight.dtype)  # 1 at masked positions, 0 at dropped tokens
    return Correction(weight=torch.where(keep, weight, unweighted).detach(), keep=keep)


def _ratio_at(
    level: str, numerator_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor
) -> Tensor:
    """x, or X or g at each token of its row; shape ``(N, T)``."""
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}; choose one of {LEVELS}")
    d = token_log_ratio(numerator_logprobs, behavior_logprobs, mask)
    if level == "token":
        return d.exp()
    rows = row_totals(d, mask) if level == "sequence" else row_means(d, mask)
    ratio = rows.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().to(d.dtype)
    return ratio[:, None].expand_as(d)


def _inside(ratio: Tensor, lower: float | None, upper: float) -> Tensor:
    """Where a ratio is not outside the bounds; NaN is not."""
    if not 0 <= (lower or 0.0) < upper:
        raise ValueError(
            f"lower is {lower} and upper {upper}; ratios between them stay, so 0 <= lower < upper "
            "(or no lower bound) is needed"
        )
    outside = ratio > upper
    return ~(outside if lower is None else outside | (ratio < lower))


def _reject_estimates(estimates: Tensor, mask: Tensor, level: str, upper: float) -> Correction:
    """Drop tokens, or rows, whose (reduced) estimate exceeds the bound."""
    if level not in ESTIMATE_LEVELS:
        raise ValueError(f"unknown level {level!r}; choose one of {ESTIMATE_LEVELS}")
    if not upper >= 0:
        raise ValueError(f"upper is {upper}; it bounds an estimate of a KL, so it must be >= 0")
    if level == "token":
        drop = estimates > upper
    elif level == "seq-max":  # an estimate is >= 0, so the 0 of a masked one is never the largest
        drop = (blank(estimates, mask).amax(dim=1) > upper)[:, None]
    else:
        reduce = row_totals if level == "seq-sum" else row_means
        drop = (reduce(estimates, mask) > upper)[:, None]
    return corrected(torch.ones_like(estimates), ~drop.expand_as(mask), mask)


def check_logprobs(numerator_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> None:
    """Refuse log-probs that do not fit a boolean mask of shape ``(N, T)``."""
    if mask.dtype != torch.bool or mask.ndim != 2 or len(mask) == 0:
        raise ValueError(
            f"mask has dtype {mask.dtype} and shape {tuple(mask.shape)}; it must be torch.bool and "
            "(N, T) with N >= 1"
        )
    check_like(numerator_logprobs, mask, "numerator log-probs")
    check_like(behavior_logprobs, mask, "behavior log-probs")


def check_like(values: Tensor, mask: Tensor, name: str) -> None:
    """Refuse values that are not of the mask's shape."""
    if values.shape != mask.shape:
        raise ValueError(
            f"{name} have shape {tuple(values.shape)} and the mask {tuple(mask.shape)}; both must "
            "be (N, T), nothing is broadcast"
        )
