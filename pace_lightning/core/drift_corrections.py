"""Corrections by how far the policy has drifted from the one that sampled, in either direction.

Shapes, symbols and conventions are those of `importance_weights`; p is the current policy.

    carm       weight 1; drop rows with exp(mean of |d|) above a bound         CARM
    mu_grpo    weight 1; drop what comes after a token with x above a bound where A < 0    mu-GRPO
    gipo       weight x exp(-d^2 / (2 sigma^2)), the whole ratio               GIPO
"""

from __future__ import annotations

import torch
from torch import Tensor

from pace_lightning.core.importance_weights import (
    Correction,
    check_like,
    corrected,
    row_means,
    token_log_ratio,
)
from pace_lightning.core.losses import LOG_RATIO_LIMIT


@torch.no_grad()
def carm(
    numerator_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, upper: float = 1.1
) -> Correction:
    """Rejection of responses by the mean distance of their tokens (CARM, arXiv:2610.02039).

    Unlike a geometric mean, tokens that became likelier do not make up for those that became less
    likely. From a reading note; the default of the bound is a reconstruction.

    Args:
        numerator_logprobs: log pi; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        upper: largest ``exp(mean of |d|)`` that stays; >= 1.

    Returns:
        Which tokens stay.

    Raises:
        ValueError: if the bound is below 1, or the shapes differ.
    """
    if not upper >= 1:
        raise ValueError(f"upper is {upper}; exp of a mean distance is never below 1")
    d = token_log_ratio(numerator_logprobs, behavior_logprobs, mask)
    distance = row_means(d.abs(), mask).clamp(max=LOG_RATIO_LIMIT).exp()
    return corrected(torch.ones_like(d), ~(distance > upper)[:, None].expand_as(mask), mask)


@torch.no_grad()
def mu_grpo(
    numerator_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    upper: float = 2.0,
) -> Correction:
    """A suffix is forgotten once the policy has left a bad response (mu-GRPO, arXiv:2605.17570).

    Where A < 0, what comes after the first token with x > ``upper`` is dropped; the token itself
    stays. From a reading note; the default of the bound is a reconstruction.

    Args:
        numerator_logprobs: log pi; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        advantages: A; shape ``(N, T)``. Only its sign matters, token by token.
        upper: largest ratio of a token that lets the following ones stay; > 0.

    Returns:
        Which tokens stay.

    Raises:
        ValueError: if the bound is not positive, or the shapes differ.
    """
    if not upper > 0:
        raise ValueError(f"upper is {upper}; it bounds a ratio, so it must be > 0")
    check_like(advantages, mask, "advantages")
    d = token_log_ratio(numerator_logprobs, behavior_logprobs, mask)
    vetoes = mask & (advantages < 0) & (d.exp() > upper)
    vetoed_before = vetoes.cumsum(dim=1) - vetoes.long() > 0
    return corrected(torch.ones_like(d), ~(vetoed_before & (advantages < 0)), mask)


@torch.no_grad()
def gipo(
    numerator_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, sigma: float = 0.5
) -> Correction:
    """A Gaussian of the log-ratio times the ratio: a soft trust region (GIPO, arXiv:2603.03955).

    The form is a reconstruction from the abstract.

    Args:
        numerator_logprobs: log pi; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.
        sigma: width, in nats; > 0; 0.2 to 0.5.

    Returns:
        The weight ``x exp(-d^2 / (2 sigma^2))``; nothing is dropped.

    Raises:
        ValueError: if the width is not positive, or the shapes differ.
    """
    if not sigma > 0:
        raise ValueError(f"sigma is {sigma}; it is a width, so it must be > 0")
    d = token_log_ratio(numerator_logprobs, behavior_logprobs, mask)
    return corrected((d - d.square() / (2 * sigma**2)).exp(), torch.ones_like(mask), mask)
