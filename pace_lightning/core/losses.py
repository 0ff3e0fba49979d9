"""Per-token losses of the policy, and how they become one number.

Shapes:

    N   responses (rows) of a micro-batch
    T   positions of the longest row; shorter rows are padded

Symbols, for each token:

    log pi     ``policy_logprobs``: the network being trained, the only input with a gradient
    anchor     ``anchor_logprobs``: what the trust region is centered on; the behavior policy mu, or
               a proximal policy computed by the trainer
    ref        ``reference_logprobs``: the frozen policy of the KL penalty
    rho        ``ratio`` = exp(log pi - anchor)
    A          ``advantages``
    m          ``mask``: True at the tokens that are trained

Heads (each a per-token loss, to be minimized):

    dapo   max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))     DAPO, arXiv:2503.14476
    grpo   the same with clip_low = clip_high                         GRPO, arXiv:2402.03300

Masked positions may hold anything, NaN included, provided the *inputs* of a head are blanked
(`blank`) wherever they may be NaN: selecting afterwards protects the value, but the chain rule
multiplies the selected-out gradient 0 by NaN. For log-probs the clamp in `log_ratio` already stops
that; advantages have no such guard. Nothing here hides a NaN at a trained token: the loss is NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +- this before ``exp`` (as in verl)."""

KL_LIMIT = 10.0
"""Values of k3 are clamped to +- this (as in verl)."""

AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
"""The modes of `aggregate`, named as in verl."""


def dapo_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Clipped surrogate with a lower and an upper bound of their own (DAPO, equation 10).

    Args:
        policy_logprobs: log pi, with gradient; shape ``(N, T)``.
        anchor_logprobs: shape ``(N, T)``.
        advantages: A; shape ``(N, T)``.
        clip_low: the ratio is clipped below ``1 - clip_low``; in ``[0, 1)``.
        clip_high: the ratio is clipped above ``1 + clip_high``; >= 0.
        dual_clip: for A < 0 the loss is at most ``-A * dual_clip``; > 1, or None for no such bound.

    Returns:
        Loss of each token; shape ``(N, T)``.

    Raises:
        ValueError: if the shapes differ or a bound is out of range.
    """
    if not 0 <= clip_low < 1 or not clip_high >= 0:
        raise ValueError(
            f"clip_low is {clip_low} and clip_high {clip_high}; the ratio is clipped to "
            "[1 - clip_low, 1 + clip_high], so 0 <= clip_low < 1 and clip_high >= 0 are needed"
        )
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(
            f"dual_clip is {dual_clip}; it bounds ratios above 1, so it must be > 1 (3.0 is usual)"
        )
    _check_shapes(policy_logprobs, advantages, "advantages")
    ratio = log_ratio(policy_logprobs, anchor_logprobs).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)


def grpo_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Clipped surrogate with equal bounds (GRPO, equation 3): `dapo_head`, unequal bounds refused.

    Args:
        policy_logprobs: log pi, with gradient; shape ``(N, T)``.
        anchor_logprobs: shape ``(N, T)``.
        advantages: A; shape ``(N, T)``.
        clip_low: as in `dapo_head`.
        clip_high: must equal ``clip_low``.
        dual_clip: as in `dapo_head`.

    Returns:
        Loss of each token; shape ``(N, T)``.

    Raises:
        ValueError: if the bounds differ, or for the reasons of `dapo_head`.
    """
    if clip_low != clip_high:
        raise ValueError(
            f"grpo has one clip bound, but clip_low is {clip_low} and clip_high {clip_high}; make "
            "them equal, or use the dapo objective"
        )
    return dapo_head(
        policy_logprobs,
        anchor_logprobs,
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


HEADS: dict[str, Callable[..., Tensor]] = {"grpo": grpo_head, "dapo": dapo_head}
"""Objective name to its per-token loss; all take the arguments of `dapo_head`."""


def k3_kl(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(pi || ref): ``k3 = exp(u) - u - 1`` with ``u = log ref - log pi``.

    ``u`` is clamped to +-20 and k3 to +-10 (verl); a clamped token has no gradient. The difference
    is taken as ``expm1(u) - u``, which keeps its digits near ``u = 0``.

    Args:
        policy_logprobs: log pi, with gradient; shape ``(N, T)``.
        reference_logprobs: shape ``(N, T)``.

    Returns:
        k3 of each token, its gradient ``1 - exp(u)``; shape ``(N, T)``.
    """
    u = log_ratio(reference_logprobs, policy_logprobs)
    return (u.expm1() - u).clamp(-KL_LIMIT, KL_LIMIT)


def log_ratio(policy_logprobs: Tensor, anchor_logprobs: Tensor) -> Tensor:
    """``log pi - anchor``, clamped to +-20: beyond it, and at NaN, the gradient is 0.

    Args:
        policy_logprobs: shape ``(N, T)``.
        anchor_logprobs: shape ``(N, T)``.

    Returns:
        Shape ``(N, T)``.
    """
    _check_shapes(policy_logprobs, anchor_logprobs, "anchor log-probs")
    return (policy_logprobs - anchor_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def blank(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` where the mask is True, 0 elsewhere, whatever was there; shapes ``(N, T)``."""
    return torch.where(mask, values, torch.zeros_like(values))


def aggregate(
    token_losses: Tensor,
    mask: Tensor,
    *,
    mode: str,
    num_tokens: int,
    num_sequences: int,
    max_length: int | None = None,
) -> Tensor:
    """This micro-batch's share of the loss of the whole batch.

    The results of all micro-batches on all ranks *sum* to the aggregate over the whole batch, so
    the gradient does not depend on how the batch was split. The modes, over the whole batch:

        token-mean                sum of all m l / num_tokens
        seq-mean-token-mean       mean over rows of (sum_t m l / sum_t m)
        seq-mean-token-sum        mean over rows of (sum_t m l)
        seq-mean-token-sum-norm   the previous / max_length

    Rows without a trained token count nowhere. Each row's tokens are selected and then summed, in
    float64, so neither padding nor the other rows can change a row's sum by a bit.

    Args:
        token_losses: l; shape ``(N, T)``.
        mask: m, boolean; shape ``(N, T)``. All False gives 0, with zero gradients.
        mode: one of `AGGREGATIONS`.
        num_tokens: trained tokens in the whole batch, over all micro-batches and ranks.
        num_sequences: rows with at least one trained token in the whole batch.
        max_length: the constant length that ``seq-mean-token-sum-norm`` divides by, in tokens.

    Returns:
        A scalar with the dtype of ``token_losses``.

    Raises:
        ValueError: if the mode is unknown, the shapes differ, or the counts cannot be global ones.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {mode!r}; choose one of {AGGREGATIONS}")
    _check_mask(token_losses, mask)
    row_counts = mask.sum(dim=1)
    counts: list[int] = row_counts.tolist()
    rows_here = sum(count > 0 for count in counts)
    if num_tokens < max(sum(counts), 1) or num_sequences < max(rows_here, 1):
        raise ValueError(
            f"this micro-batch has {sum(counts)} trained tokens in {rows_here} sequences, but "
            f"num_tokens is {num_tokens} and num_sequences {num_sequences}; pass the counts of the "
            "whole batch, which must be at least 1 and at least these"
        )
    selected = token_losses.masked_select(mask).double()
    row_sums = torch.stack([row.sum() for row in torch.split(selected, counts)])
    if mode == "token-mean":
        share = row_sums.sum() / num_tokens
    elif mode == "seq-mean-token-mean":
        share = (row_sums / row_counts.clamp(min=1)).sum() / num_sequences
    elif mode == "seq-mean-token-sum":
        share = row_sums.sum() / num_sequences
    else:
        if max_length is None or max_length < 1:
            raise ValueError(
                f"{mode} divides by a constant length, but max_length is {max_length}; pass the "
                "maximum response length in tokens"
            )
        share = row_sums.sum() / (num_sequences * max_length)
    return share.to(token_losses.dtype)


@torch.no_grad()
def clip_statistics(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> dict[str, Tensor]:
    """What the ratio did, as sums over the trained tokens.

    Add the sums over micro-batches and ranks, and take the maximum of ``ratio_max``; then divide:
    ``ratio_sum / tokens`` is the mean ratio, ``clipped_low_sum / tokens`` a clip fraction, and
    ``weight_sum ** 2 / weight_square_sum`` the effective sample size, in tokens.

    Clipped means that the clip is active *and* removes the gradient: A > 0 above the upper bound,
    A < 0 below the lower one. The dual clip is not counted.

    Args:
        policy_logprobs: shape ``(N, T)``.
        anchor_logprobs: shape ``(N, T)``.
        advantages: shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        clip_low: as in `dapo_head`.
        clip_high: as in `dapo_head`.

    Returns:
        Scalars in float64, without gradient: ``tokens``, ``ratio_sum``, ``ratio_max`` (0 without
        tokens), ``log_ratio_abs_sum``, ``clipped_low_sum``, ``clipped_high_sum``, and
        ``weight_sum`` and ``weight_square_sum``, where a token's weight is its ratio.
    """
    _check_mask(policy_logprobs, mask)
    _check_shapes(policy_logprobs, advantages, "advantages")
    selected_log_ratio = log_ratio(policy_logprobs, anchor_logprobs)[mask]
    # compared in the head's own precision, so that both agree on what is clipped
    selected_ratio = selected_log_ratio.exp()
    selected_advantages = advantages[mask]
    clipped_low = (selected_advantages < 0) & (selected_ratio < 1 - clip_low)
    clipped_high = (selected_advantages > 0) & (selected_ratio > 1 + clip_high)
    ratio = selected_ratio.double()
    ratio_sum = ratio.sum()
    return {
        "tokens": mask.sum().double(),
        "ratio_sum": ratio_sum,
        "ratio_max": ratio.max() if len(ratio) else ratio.new_zeros(()),
        "log_ratio_abs_sum": selected_log_ratio.double().abs().sum(),
        "clipped_low_sum": clipped_low.sum().double(),
        "clipped_high_sum": clipped_high.sum().double(),
        "weight_sum": ratio_sum.clone(),
        "weight_square_sum": ratio.square().sum(),
    }


def _check_shapes(policy_logprobs: Tensor, other: Tensor, name: str) -> None:
    if policy_logprobs.shape != other.shape:
        raise ValueError(
            f"policy log-probs have shape {tuple(policy_logprobs.shape)} and {name} "
            f"{tuple(other.shape)}; both must be (N, T), nothing is broadcast"
        )


def _check_mask(values: Tensor, mask: Tensor) -> None:
    if mask.dtype != torch.bool or mask.shape != values.shape or mask.ndim != 2 or len(mask) == 0:
        raise ValueError(
            f"mask has dtype {mask.dtype} and shape {tuple(mask.shape)}, the values have shape "
            f"{tuple(values.shape)}; both must be (N, T) with N >= 1, and the mask torch.bool"
        )
