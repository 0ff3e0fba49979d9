"""What a checkpoint holds of the rollout side, put back together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pace_lightning.core.saved_groups import group_from_state
from pace_lightning.core.trajectory import PolicyVersion, Prompt, TrajectoryGroup
from pace_lightning.rollout.rollouts import Rollout


def restore(
    state: Mapping[str, Any],
    outstanding: Iterable[Prompt],
    *,
    version: PolicyVersion,
    group_size: int,
    max_new_tokens: int,
) -> tuple[list[TrajectoryGroup], list[Rollout]]:
    """The groups that were ready, and the rollouts that go on.

    Args:
        state: has ``drawn`` and ``pool`` with ready groups, and ``rollouts``.
        outstanding: prompts leased and not settled; each must be in one of the three.
        version: of the checkpoint.
        group_size: responses per prompt.
        max_new_tokens: of one response.

    Raises:
        ValueError: if the state is damaged.
        KeyError: if it names a prompt twice, or one that is not outstanding.
    """
    prompts = {prompt.uid: prompt for prompt in outstanding}
    groups = [
        group_from_state(group, prompts.pop(group["uid"]))
        for group in (*state["drawn"], *state["pool"]["groups"])
    ]
    rollouts = [Rollout.from_state(r, prompts.pop(r["uid"])) for r in state["rollouts"]]
    if prompts:
        raise ValueError(f"nothing is known about the outstanding prompts {[*prompts]!r:.80}")
    if any(group.completed_at > version for group in groups):
        raise ValueError(f"a ready group was completed after version {version}")
    for rollout in rollouts:
        rollout.check(group_size=group_size, max_new_tokens=max_new_tokens, version=version)
    return groups, rollouts
