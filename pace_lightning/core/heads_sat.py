"""SAT: a trust region that contracts where the policy has moved unusually far from behavior.

A wrapper of the heads with nominal bounds: it replaces the two bounds of a clip by bounds of each
token, or of each sequence for GSPO. The anchor is the behavior policy. Arguments, symbols and names
of bounds are those of `heads`, statistics those of `heads_batch`; d is the log-ratio.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pace_lightning.core.losses import (
    blank,
    clip_bounds,
    clipped_surrogate,
    log_ratio,
    sequence_log_ratio,
)

SAT_KERNELS = ("hill", "hill_excess", "gaussian")
"""How the distance from 1 of a bound shrinks with d; see `sat_bounds`."""


def sat_statistics(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    *,
    quantile: float = 0.9,
) -> dict[str, Tensor]:
    """The quantile of ``|d|`` over the mini-batch, linearly interpolated (SAT).

    For GSPO, d is a sequence's log-ratio, counted once for each of its tokens (reconstruction).

    Source: arXiv:2607.18722, as a reading note states it; there it is that of a micro-batch.

    Settings:
        quantile: in ``[0, 1]``.

    Returns:
        ``log_ratio_scale``, q; 0 for an empty batch.

    Raises:
        ValueError: if the quantile is out of range.
    """
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile is {quantile}; it must be in [0, 1] (0.9 is SAT's)")
    distances = log_ratio(policy_logprobs, anchor_logprobs).abs().double().sort().values
    if len(distances) == 0:
        return {"log_ratio_scale": distances.new_tensor(0.0)}
    position = quantile * (len(distances) - 1)
    below, above = distances[math.floor(position)], distances[math.ceil(position)]
    return {"log_ratio_scale": torch.lerp(below, above, position - math.floor(position))}


def sat_bounds(
    log_ratios: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    log_ratio_scale: Tensor,
    kernel: str = "hill",
    exponent: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """Bounds of each token's ratio, contracted on the side to which an outlier has moved (SAT).

    With ``u = |d| / q`` the factor c is 1 up to u = 1 and beyond it, with exponent h:

        hill           1 / (1 + u^h)              half at u = 1: it jumps there
        hill_excess    1 / (1 + (u - 1)^h)
        gaussian       exp(-(u - 1)^2 / 2)

    Where d > 0 the upper bound is ``1 + c clip_high``, where d < 0 the lower one is
    ``1 - c clip_low``; otherwise the nominal ones hold.

    Source: arXiv:2607.18722, as reading notes state it. The closed form of the kernel is a
    reconstruction: they name it Hill's with exponent 2, or a Gaussian.

    Args:
        log_ratios: d, of tokens or of sequences; any shape.
        clip_low: nominal, in ``[0, 1)``.
        clip_high: nominal, >= 0.
        log_ratio_scale: q; 0 contracts nothing.
        kernel: one of `SAT_KERNELS`.
        exponent: h; > 0. Not used by ``gaussian``.

    Returns:
        Lower and upper bounds without gradient, of the shape of ``log_ratios``.

    Raises:
        ValueError: if a setting is out of range.
    """
    lower, upper = clip_bounds(clip_low, clip_high)
    if kernel not in SAT_KERNELS or not exponent > 0:
        raise ValueError(
            f"kernel is {kernel!r} and exponent {exponent}; choose one of {SAT_KERNELS} and an "
            "exponent > 0"
        )
    distances = log_ratios.detach()
    units = distances.abs() / log_ratio_scale
    if kernel == "hill":
        factors = 1 / (1 + _power(units, exponent))
    elif kernel == "hill_excess":
        factors = 1 / (1 + _power((units - 1).clamp(min=0), exponent))
    else:
        factors = (-((units - 1) ** 2) / 2).exp()
    is_outlier = (distances.abs() > log_ratio_scale) & (log_ratio_scale > 0)
    return (
        torch.where(is_outlier & (distances < 0), 1 - clip_low * factors, lower),
        torch.where(is_outlier & (distances > 0), 1 + clip_high * factors, upper),
    )


def sat_dapo_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    kernel: str = "hill",
    exponent: float = 2.0,
    log_ratio_scale: Tensor,
) -> Tensor:
    """`heads.dapo_head` within the bounds of `sat_bounds` (SAT-DAPO).

    Settings:
        clip_low, clip_high, dual_clip: as in `heads.dapo_head`.
        kernel, exponent: as in `sat_bounds`.

    Statistics:
        log_ratio_scale: from `sat_statistics`.
    """
    log_ratios = log_ratio(blank(policy_logprobs, mask), blank(anchor_logprobs, mask))
    lower, upper = sat_bounds(
        log_ratios,
        clip_low=clip_low,
        clip_high=clip_high,
        log_ratio_scale=log_ratio_scale,
        kernel=kernel,
        exponent=exponent,
    )
    ratio = log_ratios.exp()
    return clipped_surrogate(
        ratio, ratio.clamp(lower, upper), blank(advantages, mask), dual_clip=dual_clip
    )


def sat_grpo_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kernel: str = "hill",
    exponent: float = 2.0,
    log_ratio_scale: Tensor,
) -> Tensor:
    """`heads.grpo_head` within the bounds of `sat_bounds` (SAT-GRPO): `sat_dapo_head`, .2 and .2.

    Settings:
        clip_low, clip_high, dual_clip: as in `heads.grpo_head`; equal distances are required.
        kernel, exponent: as in `sat_bounds`.

    Statistics:
        log_ratio_scale: from `sat_statistics`.

    Raises:
        ValueError: if the nominal distances differ.
    """
    if clip_low != clip_high:
        raise ValueError(
            f"sat_grpo has one nominal bound, but clip_low is {clip_low} and clip_high "
            f"{clip_high}; make them equal, or use the sat_dapo objective"
        )
    return sat_dapo_head(
        policy_logprobs,
        anchor_logprobs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        kernel=kernel,
        exponent=exponent,
        log_ratio_scale=log_ratio_scale,
    )


def sat_gspo_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    kernel: str = "hill",
    exponent: float = 2.0,
    log_ratio_scale: Tensor,
) -> Tensor:
    """`heads.gspo_head`, token form, within the bounds of `sat_bounds` of sequences (SAT-GSPO).

    That d is the sequence's log-ratio here is a reconstruction.

    Settings:
        clip_low, clip_high: as in `heads.gspo_head`.
        kernel, exponent: as in `sat_bounds`.

    Statistics:
        log_ratio_scale: from `sat_statistics`, of sequences.
    """
    log_ratios = sequence_log_ratio(
        blank(policy_logprobs, mask), blank(anchor_logprobs, mask), mask, own_gradient=True
    )
    lower, upper = sat_bounds(
        log_ratios,
        clip_low=clip_low,
        clip_high=clip_high,
        log_ratio_scale=log_ratio_scale,
        kernel=kernel,
        exponent=exponent,
    )
    ratio = log_ratios.exp()
    return clipped_surrogate(ratio, ratio.clamp(lower, upper), blank(advantages, mask))


def _power(base: Tensor, exponent: float) -> Tensor:
    """``base ** exponent``; the operator's last bit depends on the position in the tensor."""
    return (exponent * base.log()).exp()
