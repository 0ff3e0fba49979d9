"""Trust-region heads: the loss of each token, from log-ratios, advantages and bounds.

Every head is called as

    head(policy_logprobs, anchor_logprobs, advantages, mask, *, settings..., statistics...)

with four tensors of shape ``(N, T)``, ``mask`` boolean, and returns the loss of each token, to be
minimized, of shape ``(N, T)``; 0 where the mask is False, whatever the inputs hold there. Only
``policy_logprobs`` has a gradient. A keyword with a default is a setting, and its default that of
the source; one without is a batch statistic, computed beforehand by the function of the same record
in `HEADS` from the whole mini-batch (`heads_batch`). The per-token losses of a sequence-level head
give the loss of its paper under the aggregation that its record names.

A rejected token has the loss 0 and stays in the denominator, as in all the sources here.

Symbols are those of `losses`. Names of bounds:

    clip_low, clip_high       distances from 1: the ratio's bounds are 1 - clip_low, 1 + clip_high
    ratio_low, ratio_high,
    ratio_cap                 the bounds themselves

The heads, with sg for "no gradient"; the second part is in `heads_score`, `heads_batch` and
`heads_sat`:

    dapo       max(-A rho, -A clip(rho))
    grpo       the same, with clip_low = clip_high
    gspo       max(-A s, -A clip(s)),  s = exp(mean over the row's tokens of log rho)
    sapo       -A (4 / tau) sigmoid(tau (rho - 1))
    aspo       dapo for A < 0; -A / rho for A > 0, with the gradient of -A sg[1 / rho] log pi

    reinforce  -A log pi; corrections of the whole ratio are multiplied with it
    cispo      -sg[min(rho, cap)] A log pi
    dppo       -sg[min(rho, cap)] A log pi, if the divergence from the anchor is small or shrinks
    sao        -sg[rho] A log pi, if 1 - clip_low < rho < 1 + clip_high
    m2po       dapo, the bounds found so that the second moment of log rho keeps to a budget
    bapo       dapo, the bounds found so that positive advantages contribute enough
    sat        grpo, dapo or gspo, bounds contracted where log rho is in the tail of the batch

Two methods need no function of their own. *Decoupled PPO* (arXiv:2110.00641, AReaL
arXiv:2505.24298) is ``dapo`` with the proximal policy as the anchor, times the detached behavior
weight prox / mu of the corrections; its dual clip acts before the weight. *LUSPO*
(arXiv:2602.05261), GSPO with each sequence's loss times its length, is ``gspo`` aggregated by
``seq-mean-token-sum``, with its own bounds 2e-3 and 2.5e-3.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pace_lightning.core import heads_batch, heads_sat, heads_score
from pace_lightning.core.losses import (
    blank,
    clip_bounds,
    clipped_surrogate,
    log_ratio,
    sequence_log_ratio,
)


def dapo_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> Tensor:
    """Clipped surrogate with a lower and an upper bound of their own (DAPO, equation 10).

    Source: arXiv:2503.14476; confirmed in verl.

    Settings:
        clip_low: in ``[0, 1)``.
        clip_high: >= 0.
        dual_clip: for A < 0 the loss is at most ``-A * dual_clip``; > 1, or None for no such bound.

    Raises:
        ValueError: if the shapes differ or a bound is out of range.
    """
    lower, upper = clip_bounds(clip_low, clip_high)
    ratio = log_ratio(blank(policy_logprobs, mask), blank(anchor_logprobs, mask)).exp()
    return clipped_surrogate(
        ratio, ratio.clamp(lower, upper), blank(advantages, mask), dual_clip=dual_clip
    )


def grpo_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """Clipped surrogate with equal bounds (GRPO, equation 3): `dapo_head`, unequal bounds refused.

    Source: arXiv:2402.03300; confirmed in verl.

    Settings:
        clip_low: as in `dapo_head`.
        clip_high: must equal ``clip_low``.
        dual_clip: as in `dapo_head`.

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
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def gspo_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    form: str = "token",
) -> Tensor:
    """Clipped surrogate of a sequence's geometric-mean ratio s (GSPO, equations 5 and 14).

    Every token of a row has the row's loss. Both forms have the same loss, and the same gradient if
    the advantages are constant along the row.

    Source: arXiv:2507.18071; the token form as in verl; defaults of TRL's reproduction.

    Settings:
        clip_low: in ``[0, 1)``; bounds s, not the tokens' ratios.
        clip_high: >= 0; likewise.
        form: ``sequence``: s itself is differentiated; ``token``: each token's loss is
            differentiated by its own log-prob only, so advantages may differ along a row.

    Raises:
        ValueError: if the shapes differ, a bound is out of range, or the form is unknown.
    """
    if form not in ("token", "sequence"):
        raise ValueError(f"gspo form is {form!r}; use 'token' or 'sequence'")
    lower, upper = clip_bounds(clip_low, clip_high)
    ratio = sequence_log_ratio(
        blank(policy_logprobs, mask),
        blank(anchor_logprobs, mask),
        mask,
        own_gradient=form == "token",
    ).exp()
    return clipped_surrogate(ratio, ratio.clamp(lower, upper), blank(advantages, mask))


def sapo_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Tensor:
    """Surrogate with a soft gate instead of a clip (SAPO, equations 5 and 6).

    The gate ``(4 / tau) sigmoid(tau (rho - 1))`` has slope 1 at rho = 1 and flattens beside it.

    Source: arXiv:2511.20347; confirmed in verl and TRL.

    Settings:
        tau_positive: tau where A > 0; > 0.
        tau_negative: tau elsewhere; > 0, larger is a narrower region.

    Raises:
        ValueError: if the shapes differ or a temperature is not positive.
    """
    if not min(tau_positive, tau_negative) > 0:
        raise ValueError(
            f"tau_positive is {tau_positive} and tau_negative {tau_negative}; both must be > 0"
        )
    ratio = log_ratio(blank(policy_logprobs, mask), blank(anchor_logprobs, mask)).exp()
    advantages = blank(advantages, mask)
    tau = torch.where(
        advantages > 0, ratio.new_tensor(tau_positive), ratio.new_tensor(tau_negative)
    )
    # torch.sigmoid differs in its last bit with the position in the tensor, so with the padding
    return -advantages * (4 / tau) / (1 + (-tau * (ratio - 1)).exp())


def aspo_head(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> Tensor:
    """Reciprocal ratios for positive advantages: tokens that lag behind weigh more (ASPO).

    A < 0: `dapo_head`. A > 0: rejected if ``rho > 1 + clip_high``; otherwise the ratio is replaced
    by ``sg[1 / rho^2] rho``, capped so that the gradient remains.

    Source: arXiv:2510.06062, section 6; the paper prints no threshold of the dual clip: 3.0 is the
    usual one of PPO.

    Settings:
        clip_low: in ``[0, 1)``.
        clip_high: >= 0.
        dual_clip: cap of ``1 / rho`` for A > 0, and of rho for A < 0; > 1.

    Raises:
        ValueError: if the shapes differ or a bound is out of range.
    """
    clipped = dapo_head(
        policy_logprobs,
        anchor_logprobs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    policy, advantages = blank(policy_logprobs, mask), blank(advantages, mask)
    ratio = log_ratio(policy.detach(), blank(anchor_logprobs, mask)).exp()
    weight = (1 / ratio).clamp(max=dual_clip)
    flipped = -advantages * weight * (policy - policy.detach()).exp()
    positive = blank(flipped, ~(ratio > 1 + clip_high))
    return torch.where(advantages > 0, positive, clipped)


@dataclass(frozen=True)
class Head:
    """What there is to know about a head without reading it."""

    function: Callable[..., Tensor]
    formula: str = ""
    """What is maximized for each token, in the symbols of `config`: r the ratio to the anchor, A
    the advantage; settings in braces, and {low}, {high} for the bounds of the ratio."""
    canonical_aggregation: str = "token-mean"
    """The aggregation of the source; see `losses.aggregate`."""
    statistics: Callable[..., dict[str, Tensor]] | None = None
    """Computes the head's batch statistics from what `statistics_inputs` selects."""
    sequence_level: bool = False
    """Whether the trust region is one of sequences: then so are the batch statistics."""
    has_bounds: bool = False
    """Whether it clips to ``[1 - clip_low, 1 + clip_high]``: what SAT can wrap."""
    behavior_anchor: bool = False
    """Whether the source measures the distance from the behavior policy itself."""

    @property
    def needs_prepass(self) -> bool:
        """Whether the policy's log-probs of the whole mini-batch are needed beforehand."""
        return self.statistics is not None

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting of the function and of its statistics, with its default."""
        return {**settings_of(self.function), **settings_of(self.statistics)}


def settings_of(function: Callable[..., Any] | None) -> dict[str, Any]:
    """The keyword-only arguments of a function that have a default, with it; none for None."""
    parameters = inspect.signature(function).parameters.values() if function else ()
    return {
        p.name: p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.default is not p.empty
    }


def statistics_inputs(
    head: Head,
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one micro-batch contributes to the arguments of ``head.statistics``.

    Concatenate them over the micro-batches and ranks of a step, in any order.

    Args:
        head: a record that has statistics.
        policy_logprobs: shape ``(N, T)``.
        anchor_logprobs: shape ``(N, T)``.
        advantages: shape ``(N, T)``.
        mask: boolean; shape ``(N, T)``.

    Returns:
        Policy and anchor log-probs and advantages of the trained tokens, in float32 (or float64 if
        given so), without gradient; each of shape ``(M,)``. For a sequence-level head the first is
        the sequence's log-ratio at each of its tokens, and the second 0.
    """
    if head.sequence_level:
        policy_logprobs = sequence_log_ratio(policy_logprobs, anchor_logprobs, mask)
        anchor_logprobs = torch.zeros_like(policy_logprobs)
    policy, anchor, selected = (
        x.detach()[mask] for x in (policy_logprobs, anchor_logprobs, advantages)
    )
    dtype = torch.promote_types(policy.dtype, torch.float32)
    return policy.to(dtype), anchor.to(dtype), selected.to(dtype)


CLIP = "min(r A, clip(r, {low}, {high}) A)"
SEQUENCE_CLIP = "min(s A, clip(s, {low}, {high}) A) with s the geometric mean of r in the response"
SAT = ", bounds contracted ({kernel}) where |log r| is above its {quantile} quantile of the step"

HEADS: dict[str, Head] = {
    "grpo": Head(grpo_head, CLIP, "seq-mean-token-mean", has_bounds=True),
    "dapo": Head(dapo_head, CLIP, has_bounds=True),
    "gspo": Head(
        gspo_head, SEQUENCE_CLIP, "seq-mean-token-mean", sequence_level=True, has_bounds=True
    ),
    "reinforce": Head(heads_score.reinforce_head, "A log pi"),
    "dro": Head(heads_score.dro_head, "A log pi - {beta} / 2 (log r)^2"),
    "cispo": Head(heads_score.cispo_head, "sg[clip(r, {ratio_low}, {ratio_cap})] A log pi"),
    "dppo_tv": Head(
        heads_score.dppo_tv_head,
        "sg[min(r, {ratio_cap})] A log pi, rejected where pi - anchor is above {limit_high} with "
        "A > 0, or below -{limit_low} (symmetric: {symmetric}), - {square_penalty} (log r)^2",
    ),
    "dppo_kl": Head(
        heads_score.dppo_kl_head,
        "sg[min(r, {ratio_cap})] A log pi, rejected where the binary KL from the anchor is above "
        "{limit_high} and rising with A > 0, or above {limit_low} and falling (symmetric: "
        "{symmetric})",
    ),
    "sao": Head(
        heads_score.sao_head, "sg[r] A log pi where {low} < r < {high}", behavior_anchor=True
    ),
    "sapo": Head(
        sapo_head,
        "A (4 / t) sigmoid(t (r - 1)) with t = {tau_positive} where A > 0, else {tau_negative}",
        "seq-mean-token-mean",
    ),
    "aspo": Head(aspo_head, CLIP + " where A < 0, A / r where A > 0 and r <= {high}"),
    "m2po": Head(
        heads_batch.m2po_head,
        "min(r A, clip(r, a, b) A), a and b from the mean of (log r)^2 over the step (budget "
        "{budget}, at least 1 - {min_clip_low} and 1 + {min_clip_high})",
        statistics=heads_batch.m2po_statistics,
    ),
    "m2po_mask": Head(
        heads_batch.m2po_mask_head,
        "r A without the tokens of the largest (log r)^2, so that its mean is below {budget}",
        statistics=heads_batch.m2po_mask_statistics,
    ),
    "sat_grpo": Head(
        heads_sat.sat_grpo_head,
        CLIP + SAT,
        "seq-mean-token-mean",
        statistics=heads_sat.sat_statistics,
        behavior_anchor=True,
    ),
    "sat_dapo": Head(
        heads_sat.sat_dapo_head,
        CLIP + SAT,
        statistics=heads_sat.sat_statistics,
        behavior_anchor=True,
    ),
    "sat_gspo": Head(
        heads_sat.sat_gspo_head,
        SEQUENCE_CLIP + SAT.replace("|log r|", "|log s|"),
        "seq-mean-token-mean",
        statistics=heads_sat.sat_statistics,
        sequence_level=True,
        behavior_anchor=True,
    ),
    "bapo": Head(
        heads_batch.bapo_head,
        "min(r A, clip(r, a, b) A), a and b searched until the {measure} of positive advantages is "
        "at least {target}",
        statistics=heads_batch.bapo_statistics,
    ),
}
"""Objective name to its head."""
