"""The advantages of a draw that follow from its rewards and lengths alone.

One number per response, the same at each of its tokens. Those of one group are in `advantages`;
whitening looks at all groups of the draw. The baseline of ``opob`` needs the policy's log-probs, so
it is taken by whoever has them (`objective`); until then the advantages are NaN, which no loss
survives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pace_lightning.core.advantages import ADVANTAGES, group_advantages
from pace_lightning.core.batch_advantages import (
    opo_advantages,
    reinforce_plus_plus_baseline,
    reinforce_plus_plus_returns,
    whiten,
    whitening_statistics,
)

WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Scaled by the deviation over all trained tokens of the draw."""

DRAW_ADVANTAGES = (*ADVANTAGES, "opo", "opob", *WHITENED)
"""Every advantage by the field's name."""

GROUP_BASELINES = tuple(name for name in DRAW_ADVANTAGES if name != "reinforce_plus_plus")
"""Those that compare a response with its siblings: equal rewards are nothing to learn from."""


def draw_advantages(
    rewards: Sequence[Sequence[float]],
    lengths: Sequence[Sequence[int]],
    *,
    method: str,
    std_ddof: int = 1,
) -> list[list[float]]:
    """One advantage per response of a draw.

    Args:
        rewards: of each group.
        lengths: trained tokens of each response, 0 if it carries no loss; the same shape.
        method: one of `DRAW_ADVANTAGES`.
        std_ddof: as in `group_advantages`.

    Returns:
        The same shape; NaN for ``opob``.

    Raises:
        ValueError: if the method is unknown, or for the reasons of `group_advantages`.
    """
    if method not in DRAW_ADVANTAGES:
        raise ValueError(f"unknown advantage {method!r}; choose one of {sorted(DRAW_ADVANTAGES)}")
    if method == "opob":
        return [[math.nan] * len(group) for group in rewards]
    if method in WHITENED:
        return _whitened(rewards, lengths, with_baseline=method == "reinforce_plus_plus_baseline")
    found = []
    for group_rewards, group_lengths in zip(rewards, lengths, strict=True):
        values = torch.tensor(group_rewards, dtype=torch.float64)
        if method != "opo":
            advantages = group_advantages(values, method=method, std_ddof=std_ddof)
        elif any(group_lengths):
            advantages = opo_advantages(values, torch.tensor(group_lengths))
        else:  # no response of the group is trained on
            advantages = torch.zeros_like(values)
        found.append(advantages.tolist())
    return found


def _whitened(
    rewards: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]], *, with_baseline: bool
) -> list[list[float]]:
    """REINFORCE++ without discount and penalty: the return of each token is the reward."""
    flat = torch.tensor([r for group in rewards for r in group], dtype=torch.float64)
    counts = torch.tensor([n for group in lengths for n in group])
    groups = torch.tensor([g for g, group in enumerate(rewards) for _ in group])
    one_token = torch.ones(len(flat), 1, dtype=torch.bool)
    if with_baseline:
        values = reinforce_plus_plus_baseline(flat, groups, one_token)
    else:
        values = reinforce_plus_plus_returns(flat, one_token)
    statistics = whitening_statistics(values[:, 0].repeat_interleave(counts))
    mean, variance = statistics["mean"], statistics["variance"]
    split = iter(whiten(values, one_token, mean=mean, variance=variance)[:, 0].tolist())
    return [[next(split) for _ in group] for group in rewards]
