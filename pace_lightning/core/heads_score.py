"""Trust-region heads that weight ``log pi``: the ratio is detached, and bounded or masked.

The loss is ``-w A log pi`` with a weight w without gradient, so its gradient is ``-w A`` at the
tokens that are kept and 0 at those that are not. Shapes, arguments, symbols and names of bounds are
those of `heads`. Rejections are written so that NaN is never rejected: it must stay visible.

    reinforce w = 1, every token is kept: what corrections of the whole ratio are multiplied with
    cispo     w = min(rho, cap); every token is kept
    dppo      w = min(rho, cap); kept if the divergence from the anchor is small or shrinks
    dro       -A log pi and a penalty on the squared log-ratio: nothing is clipped or weighted
    sao       w = rho; kept if 1 - clip_low < rho < 1 + clip_high
"""

from __future__ import annotations

import torch
from torch import Tensor

from pace_lightning.core.losses import blank, clip_bounds, log_ratio

PROBABILITY_FLOOR = 1e-8
"""Added to 1 - p and 1 - q in the binary KL of DPPO (as in verl)."""


def reinforce_head(
    policy_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """The plain policy gradient, ``-A log pi``: no trust region, and the anchor is not used.

    Off-policy it needs a correction whose numerator is the current policy.
    """
    return _score_loss(blank(policy_logprobs, mask), blank(advantages, mask))


def dro_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """``-A log pi + beta/2 (log rho)^2``: the trust region is a penalty, and no ratio is a weight.

    DRO, and with beta = tau the objective of Kimi k1.5; confirmed in code.

    Settings:
        beta: weight of the penalty; >= 0.

    Raises:
        ValueError: if the shapes differ or the weight is negative.
    """
    if not beta >= 0:
        raise ValueError(f"beta is {beta}; it is the weight of a penalty, so it must be >= 0")
    policy, anchor = blank(policy_logprobs, mask), blank(anchor_logprobs, mask)
    penalty = beta / 2 * log_ratio(policy, anchor).square()
    return _score_loss(policy, blank(advantages, mask)) + penalty


def cispo_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio_cap: float = 5.0,
    ratio_low: float = 0.0,
    unified_mask: bool = False,
) -> Tensor:
    """Policy gradient with a clipped, detached ratio: no token loses its gradient (CISPO).

    Sources write the upper bound in two ways: 1 + epsilon_high (verl, the paper) or the cap itself
    (TRL, after ScaleRL, arXiv:2510.13786). Here it is the cap itself.

    Source: arXiv:2506.13585, equations 4 to 7; confirmed in verl, and in ROLL for the mask.

    Settings:
        ratio_cap: the ratio is clipped to at most this; ScaleRL's 5.
        ratio_low: the ratio is clipped to at least this; 0, the paper's, is no bound.
        unified_mask: reject the tokens that PPO's clip would: above the cap with A > 0, below the
            lower bound with A < 0.

    Raises:
        ValueError: if the shapes differ or the bounds do not enclose 1.
    """
    if not 0 <= ratio_low <= 1 <= ratio_cap:
        raise ValueError(
            f"ratio_low is {ratio_low} and ratio_cap {ratio_cap}; they bound the ratio itself, so "
            "0 <= ratio_low <= 1 <= ratio_cap is needed (a radius of 0.28 is a cap of 1.28)"
        )
    policy, advantages = blank(policy_logprobs, mask), blank(advantages, mask)
    ratio = log_ratio(policy.detach(), blank(anchor_logprobs, mask)).exp()
    losses = ratio.clamp(ratio_low, ratio_cap) * _score_loss(policy, advantages)
    if not unified_mask:
        return losses
    rejected = ((advantages > 0) & (ratio > ratio_cap)) | ((advantages < 0) & (ratio < ratio_low))
    return blank(losses, ~rejected)


def dppo_tv_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    limit_low: float = 0.15,
    limit_high: float = 0.15,
    ratio_cap: float = 20.0,
    symmetric: bool = False,
    square_penalty: float = 0.0,
) -> Tensor:
    """Divergence PPO, masked by the change of the sampled token's probability (DPPO-Binary-TV).

    With p = pi and q = anchor probability of the token, it is kept if ``p - q <= limit_high`` where
    A > 0, and if ``p - q >= -limit_low`` elsewhere.

    Source: arXiv:2602.04879; confirmed in verl.

    Settings:
        limit_low: largest fall of the probability; >= 0.
        limit_high: largest rise; >= 0.
        ratio_cap: the detached ratio is at most this; >= 1.
        symmetric: reject on both sides whatever the sign of A (prime-rl's IPO, with limits of 0.1).
        square_penalty: times ``(log rho)^2``, added at every token, rejected or not (prime-rl:
            0.001, with limits of 0.2 and no cap); >= 0.

    Raises:
        ValueError: if the shapes differ or a bound is out of range.
    """
    if not square_penalty >= 0:
        raise ValueError(f"square_penalty is {square_penalty}; it must be >= 0")
    policy, anchor, advantages = (
        blank(x, mask) for x in (policy_logprobs, anchor_logprobs, advantages)
    )
    change = policy.detach().exp() - anchor.exp()
    rose, fell = change > limit_high, change < -limit_low
    rejected = rose | fell if symmetric else torch.where(advantages > 0, rose, fell)
    losses = _dppo(policy, anchor, advantages, rejected, limit_low, limit_high, ratio_cap)
    return losses + square_penalty * log_ratio(policy, anchor).square()


def dppo_kl_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    limit_low: float = 0.05,
    limit_high: float = 0.05,
    ratio_cap: float = 20.0,
    symmetric: bool = False,
) -> Tensor:
    """Divergence PPO, masked by the KL of "this token or another one" (DPPO-Binary-KL).

    With p = pi and q = anchor probability of the token, and KL(q || p) of the two coins: kept where
    A > 0 if ``KL <= limit_high`` or ``p <= q``, and elsewhere if ``KL <= limit_low`` or ``p >= q``.

    Source: arXiv:2602.04879; confirmed in verl.

    Settings:
        limit_low: in nats; >= 0.
        limit_high: in nats; >= 0.
        ratio_cap: the detached ratio is at most this; >= 1.
        symmetric: reject on both sides whatever the sign of A (KPop, of which only the name and
            the divergence could be read: a reconstruction).

    Raises:
        ValueError: if the shapes differ or a bound is out of range.
    """
    policy, anchor, advantages = (
        blank(x, mask) for x in (policy_logprobs, anchor_logprobs, advantages)
    )
    log_p, p, q = policy.detach(), policy.detach().exp(), anchor.exp()
    others_p, others_q = (
        (-torch.expm1(x)).clamp(min=0) + PROBABILITY_FLOOR for x in (log_p, anchor)
    )
    kl = q * (anchor - log_p) + others_q * (others_q / others_p).log()
    rose, fell = (kl > limit_high) & (p > q), (kl > limit_low) & (p < q)
    rejected = rose | fell if symmetric else torch.where(advantages > 0, rose, fell)
    return _dppo(policy, anchor, advantages, rejected, limit_low, limit_high, ratio_cap)


def sao_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.3,
    clip_high: float = 5.0,
) -> Tensor:
    """Double-sided importance sampling: tokens outside the bounds are rejected (SAO, its loss).

    Kept if ``1 - clip_low < rho < 1 + clip_high``, both strict, whatever the sign of A. The anchor
    is the behavior policy.

    Source: arXiv:2607.07508, as a reading note and a public re-implementation state it; defaults of
    its tool-use mathematics (for code 0.8 and 3.0).

    Settings:
        clip_low: in ``[0, 1)``.
        clip_high: >= 0.

    Raises:
        ValueError: if the shapes differ or a bound is out of range.
    """
    lower, upper = clip_bounds(clip_low, clip_high)
    policy = blank(policy_logprobs, mask)
    ratio = log_ratio(policy.detach(), blank(anchor_logprobs, mask)).exp()
    losses = ratio * _score_loss(policy, blank(advantages, mask))
    return blank(losses, ~((ratio <= lower) | (ratio >= upper)))


def _score_loss(policy: Tensor, advantages: Tensor) -> Tensor:
    """The loss whose gradient is the policy gradient."""
    return -advantages * policy


def _dppo(
    policy: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    rejected: Tensor,
    limit_low: float,
    limit_high: float,
    ratio_cap: float,
) -> Tensor:
    if not min(limit_low, limit_high) >= 0 or not ratio_cap >= 1:
        raise ValueError(
            f"limit_low is {limit_low}, limit_high {limit_high} and ratio_cap {ratio_cap}; the "
            "limits must be >= 0, and the cap of the ratio itself >= 1"
        )
    ratio = log_ratio(policy.detach(), anchor).exp()
    return blank(ratio.clamp(max=ratio_cap) * _score_loss(policy, advantages), ~rejected)
