"""What every loss is made of: log-ratios, the clipped surrogate, KL, aggregation, statistics.

The trust-region heads are in `heads` and `heads_batch`.

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

Masked positions may hold anything, NaN included. Heads blank their *inputs* (`blank`): selecting
afterwards protects the value, but the chain rule multiplies the selected-out gradient 0 by NaN.
Nothing here hides a NaN at a trained token: the loss is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +- this before ``exp`` (as in verl)."""

SEQUENCE_LOG_RATIO_LIMIT = 10.0
"""A sequence's mean log-ratio is clamped below this (as in verl), and above -20."""

KL_LIMIT = 10.0
"""Values of k3 are clamped to +- this (as in verl)."""

AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
"""The modes of `aggregate`, named as in verl."""


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
        policy_logprobs: any shape.
        anchor_logprobs: the same shape.

    Returns:
        The same shape.
    """
    _check_shapes(policy_logprobs, anchor_logprobs, "anchor log-probs")
    return (policy_logprobs - anchor_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_log_ratio(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    mask: Tensor,
    *,
    own_gradient: bool = False,
) -> Tensor:
    """The mean log-ratio of each row's trained tokens, at each of its positions.

    The logarithm of GSPO's s (arXiv:2507.18071), clamped to [-20, 10]: beyond it the gradient is 0.

    Args:
        policy_logprobs: shape ``(N, T)``.
        anchor_logprobs: shape ``(N, T)``.
        mask: m, boolean; shape ``(N, T)``.
        own_gradient: if True, the value at a token has gradient 1 with respect to the token's own
            log-prob, and none with respect to the others (GSPO's token form).

    Returns:
        Shape ``(N, T)``, constant along each row; 0 in rows without a trained token.
    """
    _check_shapes(policy_logprobs, anchor_logprobs, "anchor log-probs")
    sums, counts = row_sums(policy_logprobs - anchor_logprobs, mask)
    means = (sums / counts.clamp(min=1)).to(policy_logprobs.dtype).unsqueeze(1)
    if own_gradient:
        own = blank(policy_logprobs, mask)
        means = means.detach() + (own - own.detach())
    return means.expand_as(mask).clamp(-LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT)


def clip_bounds(clip_low: float, clip_high: float) -> tuple[float, float]:
    """The interval ``[1 - clip_low, 1 + clip_high]`` of ratios.

    Raises:
        ValueError: if it is not an interval of positive numbers around 1.
    """
    if not 0 <= clip_low < 1 or not clip_high >= 0:
        raise ValueError(
            f"clip_low is {clip_low} and clip_high {clip_high}; the ratio is bounded by "
            "[1 - clip_low, 1 + clip_high], so 0 <= clip_low < 1 and clip_high >= 0 are needed"
        )
    return 1 - clip_low, 1 + clip_high


def clipped_surrogate(
    ratio: Tensor, clipped_ratio: Tensor, advantages: Tensor, *, dual_clip: float | None = None
) -> Tensor:
    """``max(-A rho, -A rho_clipped)``: the pessimistic side of PPO's clip (arXiv:1707.06347).

    Args:
        ratio: rho; shape ``(N, T)``.
        clipped_ratio: rho, clamped to the trust region; shape ``(N, T)``.
        advantages: A; shape ``(N, T)``.
        dual_clip: for A < 0 the loss is at most ``-A * dual_clip`` (arXiv:1912.09729); > 1, or None
            for no such bound.

    Returns:
        Loss of each token; shape ``(N, T)``.

    Raises:
        ValueError: if ``dual_clip`` is not above 1.
    """
    losses = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    if dual_clip is None:
        return losses
    if not dual_clip > 1:
        raise ValueError(
            f"dual_clip is {dual_clip}; it bounds ratios above 1, so it must be > 1 (3.0 is usual)"
        )
    return torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)


def blank(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` where the mask is True, 0 elsewhere, whatever was there; shapes ``(N, T)``."""
    _check_mask(values, mask)
    return torch.where(mask, values, torch.zeros_like(values))


def row_sums(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over each row's trained tokens, and their number.

    Tokens are selected and then summed, in float64, so that neither padding nor the other rows can
    change a row's sum by a bit.

    Args:
        values: shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.

    Returns:
        Sums in float64 and counts in int64, both of shape ``(N,)``.
    """
    _check_mask(values, mask)
    counts = mask.sum(dim=1)
    selected = values.masked_select(mask).double()
    return torch.stack([row.sum() for row in torch.split(selected, counts.tolist())]), counts


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

    Rows without a trained token count nowhere. Row sums are those of `row_sums`.

    Two denominators are in use where tokens are rejected. *Original*: give a rejected token the
    loss 0 and leave ``mask`` and the counts as they were. *Kept*: take it out of ``mask``, and pass
    the counts of what is left of the whole batch (at least 1), known before the first backward
    pass.

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
    sums, counts = row_sums(token_losses, mask)
    tokens_here, rows_here = int(counts.sum()), int(counts.count_nonzero())
    if num_tokens < max(tokens_here, 1) or num_sequences < max(rows_here, 1):
        raise ValueError(
            f"this micro-batch has {tokens_here} trained tokens in {rows_here} sequences, but "
            f"num_tokens is {num_tokens} and num_sequences {num_sequences}; pass the counts of the "
            "whole batch, which must be at least 1 and at least these"
        )
    if mode == "token-mean":
        share = sums.sum() / num_tokens
    elif mode == "seq-mean-token-mean":
        share = (sums / counts.clamp(min=1)).sum() / num_sequences
    elif mode == "seq-mean-token-sum":
        share = sums.sum() / num_sequences
    else:
        if max_length is None or max_length < 1:
            raise ValueError(
                f"{mode} divides by a constant length, but max_length is {max_length}; pass the "
                "maximum response length in tokens"
            )
        share = sums.sum() / (num_sequences * max_length)
    return share.to(token_losses.dtype)


@torch.no_grad()
def ratio_statistics(
    policy_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """What the total ratio pi / mu did, as sums over the trained tokens.

    Add the sums over micro-batches and ranks, and take the maximum of ``ratio_max``; then divide:
    ``ratio_sum / tokens`` is the mean ratio, and ``weight_sum ** 2 / weight_square_sum`` the
    effective sample size, in tokens.

    Args:
        policy_logprobs: shape ``(N, T)``.
        behavior_logprobs: shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.

    Returns:
        Scalars in float64, without gradient: ``tokens``, ``ratio_sum``, ``ratio_max`` (0 without
        tokens), ``log_ratio_abs_sum``, and ``weight_sum`` and ``weight_square_sum``, where a
        token's weight is its ratio.
    """
    _check_mask(policy_logprobs, mask)
    selected = log_ratio(policy_logprobs, behavior_logprobs)[mask]
    ratio = selected.exp().double()
    return {
        "tokens": mask.sum().double(),
        "ratio_sum": ratio.sum(),
        "ratio_max": ratio.max() if len(ratio) else ratio.new_zeros(()),
        "log_ratio_abs_sum": selected.double().abs().sum(),
        "weight_sum": ratio.sum(),
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
