"""One objective out of its parts: advantages, proximal policy, corrections, trust region, counts.

    loss = aggregation over m of  [ w * head(pi, anchor, A) ]

with w and the kept tokens from the corrections, and the anchor the proximal policy (the behavior
policy itself if there is none; then corrections compare the current policy with it). All but the
log-probs with a gradient is worked out first, as `Terms`: for all micro-batches of a draw at once
if any of it is a statistic of the draw (`Objective.needs_draw`), else for each alone. The weights
do not move within a draw, so the policy's log-probs of a pass before the first backward pass are
those of the training pass.

Shapes:

    N   responses (rows) of a micro-batch
    T   positions of the longest row; shorter rows are padded
    M   trained tokens, or responses with one, of the whole draw

Across ranks, statistics go through ``gather``: it takes this rank's vector and returns those of all
ranks, concatenated. Statistics do not depend on the order, nor on how the draw was split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pace_lightning.core.batch_advantages import opob_advantages
from pace_lightning.core.corrections import METHODS, combine, correct, normalize, weight_sum
from pace_lightning.core.heads import Head, settings_of, statistics_inputs
from pace_lightning.core.heads_batch import m2po_mask_statistics
from pace_lightning.core.importance_weights import (
    Correction,
    row_means,
    row_totals,
    trajectory_log_ratio,
)
from pace_lightning.core.losses import aggregate, blank, log_ratio
from pace_lightning.core.sequence_corrections import gepo_log_expectation, gmc_log_scale
from pace_lightning.core.token_returns import token_advantages

Gather = Callable[[Tensor], Tensor]
"""From this rank's vector to that of all ranks; both of shape ``(M,)``."""

DENOMINATORS = ("original", "kept")
"""What the aggregation counts: all trained tokens, or those that the corrections keep."""


@dataclass(frozen=True)
class Objective:
    """What to minimize."""

    head: Head
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the head and its statistics; what is not here has its default."""
    corrections: Sequence[tuple[str, Mapping[str, Any]]] = ()
    """Names in `corrections.METHODS`, each with its settings."""
    normalize_weights: bool = False
    """Divide the corrections' weights by their mean over the draw."""
    mask_denominator: str = "original"
    """One of `DENOMINATORS`."""
    aggregation: str = "token-mean"
    """One of `losses.AGGREGATIONS`."""
    max_length: int | None = None
    """Constant of the ``-norm`` aggregation, in tokens."""
    has_proximal: bool = False
    """Whether the anchor is a proximal policy; False: the behavior policy."""
    opob: Mapping[str, Any] | None = None
    """Settings of `opob_advantages`, if that is the advantage."""
    returns: Mapping[str, float] | None = None
    """Settings of `token_advantages`, if rewards are those of tokens."""

    @property
    def needs_draw(self) -> bool:
        """Whether the loss of one micro-batch depends on the others."""
        return (
            self.head.needs_prepass
            or self.opob is not None
            or self.returns is not None
            or self.normalize_weights
            or self.mask_denominator == "kept"
            or any(METHODS[name].needs_prepass for name, _ in self.corrections)
        )


@dataclass(frozen=True)
class Scored:
    """A micro-batch with its log-probs."""

    policy_logprobs: Tensor
    """log pi of the present weights; (N, T), like the next four."""
    proximal_logprobs: Tensor
    """log prox: the anchor; log mu if there is none."""
    behavior_logprobs: Tensor
    """log mu."""
    advantages: Tensor
    mask: Tensor
    """True at trained tokens."""
    rewards: Tensor
    """(N,)."""
    group_ids: Tensor
    """(N,)."""
    score_square_norms: Tensor | None = None
    """For OPOB; (N,)."""
    reference_logprobs: Tensor | None = None
    """Log ref, for a penalty in the reward; (N, T)."""


@dataclass(frozen=True)
class Terms:
    """What the loss of a micro-batch is made of, beside the log-probs with a gradient."""

    anchor_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    correction: Correction | None
    statistics: Mapping[str, Tensor]
    """Of the head."""
    num_tokens: int
    """That the aggregation divides by: of the whole draw."""
    num_sequences: int

    @property
    def keep(self) -> Tensor:
        """Trained tokens that stay; (N, T)."""
        return self.mask if self.correction is None else self.correction.keep


@torch.no_grad()
def prepare(
    objective: Objective,
    parts: Sequence[Scored],
    *,
    num_tokens: int,
    num_sequences: int,
    gather: Gather = lambda vector: vector,
) -> list[Terms]:
    """The terms of each micro-batch.

    Args:
        objective: what to minimize.
        parts: all micro-batches of this rank if the objective `needs_draw`; else any of them.
        num_tokens: trained tokens of the draw, over all ranks.
        num_sequences: rows of the draw with a trained token, likewise.
        gather: see the module's header; called only if the objective `needs_draw`, and then equally
            often on each rank.

    Returns:
        One for each part, without gradients.

    Raises:
        ValueError: if a setting is wrong or the corrections leave nothing to divide by.
    """
    if objective.opob is not None:
        parts = list(_with_opob(objective.opob, parts, gather))
    if objective.returns is not None:
        found = token_advantages(parts, gather, **objective.returns)
        parts = [replace(p, advantages=a) for p, a in zip(parts, found, strict=True)]
    corrections: list[Correction | None] = [None] * len(parts)
    if objective.corrections:
        corrections = list(_corrections(objective, parts, gather))
    statistics: dict[str, Tensor] = {}
    if objective.head.statistics is not None:
        given = [_statistics_inputs(objective.head, part) for part in parts]
        inputs = [gather(torch.cat(vectors)) for vectors in zip(*given, strict=True)]
        taken = settings_of(objective.head.statistics)
        own = {key: value for key, value in objective.settings.items() if key in taken}
        statistics = objective.head.statistics(*inputs, **own)
    if objective.mask_denominator == "kept" and objective.corrections:
        counts = [c.keep.sum(dim=1) for c in corrections if c is not None]
        kept = gather(torch.cat(counts))
        num_tokens, num_sequences = int(kept.sum()), int(kept.count_nonzero())
    return [
        Terms(
            anchor_logprobs=part.proximal_logprobs,
            advantages=part.advantages,
            mask=part.mask,
            correction=correction,
            statistics=statistics,
            num_tokens=max(num_tokens, 1),
            num_sequences=max(num_sequences, 1),
        )
        for part, correction in zip(parts, corrections, strict=True)
    ]


def token_losses(objective: Objective, policy_logprobs: Tensor, terms: Terms) -> Tensor:
    """The weighted loss of each token, 0 where the corrections keep nothing; shape ``(N, T)``."""
    taken = settings_of(objective.head.function)
    losses = objective.head.function(
        policy_logprobs,
        terms.anchor_logprobs,
        terms.advantages,
        terms.mask,
        **{key: value for key, value in objective.settings.items() if key in taken},
        **terms.statistics,
    )
    if terms.correction is None:
        return losses
    return blank(losses * terms.correction.weight, terms.correction.keep)


def objective_loss(
    objective: Objective, policy_logprobs: Tensor, terms: Terms, *, penalty: Tensor | None = None
) -> Tensor:
    """The share of one micro-batch in the loss of the draw.

    Args:
        objective: what to minimize.
        policy_logprobs: log pi, with gradient; shape ``(N, T)``.
        terms: of this micro-batch, from `prepare`.
        penalty: added to the loss of each token, uncorrected; shape ``(N, T)``.

    Returns:
        A scalar; see `losses.aggregate`.
    """
    losses = token_losses(objective, policy_logprobs, terms)
    return aggregate(
        losses if penalty is None else losses + penalty,
        terms.keep if objective.mask_denominator == "kept" else terms.mask,
        mode=objective.aggregation,
        num_tokens=terms.num_tokens,
        num_sequences=terms.num_sequences,
        max_length=objective.max_length,
    )


def active_tokens(objective: Objective, policy_logprobs: Tensor, terms: Terms) -> Tensor:
    """The trained tokens that nothing cuts off: no correction, clip, mask or clamp.

    Found by differentiating the loss of each token, so it holds for every head. A token with A = 0
    is active if the corrections keep it.

    Args:
        objective: what to minimize.
        policy_logprobs: log pi; shape ``(N, T)``.
        terms: of this micro-batch.

    Returns:
        Boolean; shape ``(N, T)``.
    """
    leaf = policy_logprobs.detach().requires_grad_()
    with torch.enable_grad():
        losses = token_losses(objective, leaf, terms)
        (slope,) = torch.autograd.grad(losses.sum(), leaf)
    return terms.keep & ((slope != 0) | (terms.advantages == 0))


@torch.no_grad()
def objective_statistics(
    objective: Objective, policy_logprobs: Tensor, behavior_logprobs: Tensor, terms: Terms
) -> dict[str, Tensor]:
    """What the corrections and the head did, as sums over the trained tokens.

    Args:
        objective: what is minimized.
        policy_logprobs: log pi; shape ``(N, T)``.
        behavior_logprobs: log mu; shape ``(N, T)``.
        terms: of this micro-batch.

    Returns:
        Scalars in float64: numbers of tokens ``active_sum`` (`active_tokens`),
        ``inactive_positive_sum`` and ``inactive_negative_sum`` (cut off, by the sign of A) and
        ``rejected_sum`` (by the corrections); sums ``log_ratio_square_sum`` of the squared
        log pi - log mu (M2PO's second moment), ``behavior_log_ratio_abs_sum`` of
        abs(log prox - log mu), and ``correction_sum`` of the corrections' weights.
    """
    mask, keep = terms.mask, terms.keep
    active = active_tokens(objective, policy_logprobs, terms)
    weights = None if terms.correction is None else weight_sum(terms.correction, mask)
    total = log_ratio(policy_logprobs, behavior_logprobs)[mask].double()
    behavior = log_ratio(terms.anchor_logprobs, behavior_logprobs)[mask].double()
    return {
        "active_sum": active.sum().double(),
        "inactive_positive_sum": (mask & ~active & (terms.advantages > 0)).sum().double(),
        "inactive_negative_sum": (mask & ~active & (terms.advantages < 0)).sum().double(),
        "rejected_sum": (mask & ~keep).sum().double(),
        "log_ratio_square_sum": total.square().sum(),
        "behavior_log_ratio_abs_sum": behavior.abs().sum(),
        "correction_sum": mask.sum().double() if weights is None else weights,
    }


def _statistics_inputs(head: Head, part: Scored) -> tuple[Tensor, Tensor, Tensor]:
    return statistics_inputs(
        head, part.policy_logprobs, part.proximal_logprobs, part.advantages, part.mask
    )


def _with_opob(
    settings: Mapping[str, Any], parts: Sequence[Scored], gather: Gather
) -> Iterator[Scored]:
    """The parts with OPOB's advantages, group by group of the draw."""
    rows: list[list[Tensor]] = []
    for part in parts:
        if part.score_square_norms is None:
            raise ValueError("opob needs the squared norms of the responses' scores")
        ratios = trajectory_log_ratio(part.policy_logprobs, part.behavior_logprobs, part.mask)
        lengths = part.mask.sum(dim=1)
        columns = (part.group_ids, part.rewards, ratios, part.score_square_norms, lengths)
        rows.append([column[lengths > 0].double() for column in columns])
    groups, *values = (gather(torch.cat(column)) for column in zip(*rows, strict=True))
    own = {key: value for key, value in settings.items() if key != "length_normalize"}
    of_reward: dict[tuple[int, float], float] = {}
    for group in set(groups.long().tolist()):
        rewards, ratios, norms, lengths = (column[groups == group] for column in values)
        if settings.get("length_normalize"):
            own["lengths"] = lengths
        advantages = opob_advantages(rewards, ratios, norms, **own)
        keys = [(group, reward) for reward in rewards.tolist()]
        of_reward |= dict(zip(keys, advantages.tolist(), strict=True))
    for part in parts:
        keys = list(zip(part.group_ids.tolist(), part.rewards.double().tolist(), strict=True))
        advantages = part.rewards.new_tensor([of_reward.get(key, 0.0) for key in keys])
        yield replace(part, advantages=blank(advantages[:, None].expand_as(part.mask), part.mask))


def _corrections(
    objective: Objective, parts: Sequence[Scored], gather: Gather
) -> Iterator[Correction]:
    """What all corrections together do to each micro-batch."""
    found: list[list[Correction]] = [[] for _ in parts]
    for name, settings in objective.corrections:
        numerators = [_numerator(objective, name, part) for part in parts]
        statistics: list[dict[str, Tensor]] = [{}] * len(parts)
        if METHODS[name].needs_prepass and objective.needs_draw:
            statistics = _correction_statistics(name, settings, numerators, parts, gather)
        for part, numerator, own, result in zip(parts, numerators, statistics, found, strict=True):
            result.append(
                correct(
                    name,
                    numerator,
                    part.behavior_logprobs,
                    part.mask,
                    advantages=part.advantages,
                    group_ids=part.group_ids,
                    **settings,
                    **own,
                )
            )
    combined = [combine(corrections) for corrections in found]
    if objective.normalize_weights:
        sums = [weight_sum(c, part.mask) for c, part in zip(combined, parts, strict=True)]
        counts = [part.mask.sum().double() for part in parts]
        total, tokens = (gather(torch.stack(x)).sum().item() for x in (sums, counts))
        mean = total / max(tokens, 1.0)
        combined = [
            normalize(c, part.mask, mean_weight=mean)
            for c, part in zip(combined, parts, strict=True)
        ]
    yield from combined


def _numerator(objective: Objective, name: str, part: Scored) -> Tensor:
    """Whose ratio to mu a correction looks at; without a proximal policy, the current policy's."""
    if objective.has_proximal and METHODS[name].numerator == "proximal":
        return part.proximal_logprobs
    return part.policy_logprobs


def _correction_statistics(
    name: str,
    settings: Mapping[str, Any],
    numerators: Sequence[Tensor],
    parts: Sequence[Scored],
    gather: Gather,
) -> list[dict[str, Tensor]]:
    """The statistic of the draw that a correction takes, for each micro-batch."""
    if METHODS[name].takes("square_limit"):
        given = [
            [x[part.mask] for x in (numerator, part.behavior_logprobs, part.advantages)]
            for numerator, part in zip(numerators, parts, strict=True)
        ]
        tokens = [gather(torch.cat(column)) for column in zip(*given, strict=True)]
        return [m2po_mask_statistics(*tokens, **settings)] * len(parts)
    statistic: Callable[..., Tensor]
    if METHODS[name].takes("group_log_scale"):
        key, statistic, own = "group_log_scale", gmc_log_scale, dict(settings)
        values = [
            trajectory_log_ratio(numerator, part.behavior_logprobs, part.mask)
            for numerator, part in zip(numerators, parts, strict=True)
        ]
    else:
        key, statistic, own = "group_log_expectation", gepo_log_expectation, {}
        reduce = row_means if settings.get("length_normalize", True) else row_totals
        values = [reduce(part.behavior_logprobs, part.mask) for part in parts]
    trained = [part.mask.any(dim=1) for part in parts]
    rows = gather(torch.cat([v[t] for v, t in zip(values, trained, strict=True)]))
    groups = gather(torch.cat([p.group_ids[t] for p, t in zip(parts, trained, strict=True)]))
    of_group = dict(zip(groups.tolist(), statistic(rows, groups, **own).tolist(), strict=True))
    return [
        {key: v.new_tensor([of_group.get(g, 0.0) for g in part.group_ids.tolist()])}
        for v, part in zip(values, parts, strict=True)
    ]
