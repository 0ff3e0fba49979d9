"""Where the policy lag of a trajectory comes from.

Notation (PACE, arXiv:2609.36830, section 2):

    v_t   policy version that sampled response token t
    c     trainer version when the trajectory finished generating
    j     trainer version that consumes it, so v_t <= c <= j

The lag of token t is ``j - v_t``. Its mean over the sampled tokens splits, exactly, into

    generation  mean_t(c - v_t)   grows while the rollout is in flight
    waiting     j - c             grows while the finished rollout sits in the pool

All quantities are counted in policy versions, i.e. optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pace_lightning.core.trajectory import PolicyVersion, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class StalenessDecomposition:
    """Mean policy lag of one trajectory, or of several, by the place where it was picked up."""

    generation: float
    """Versions that passed, on average over tokens, before the rollout finished."""

    waiting: float
    """Versions that passed between the end of the rollout and its use."""

    @property
    def total(self) -> float:
        """The policy lag: mean over tokens of ``j - v_t``."""
        return self.generation + self.waiting


def decompose(
    token_versions: Sequence[PolicyVersion],
    *,
    completed_at: PolicyVersion,
    consumed_at: PolicyVersion,
) -> StalenessDecomposition:
    """Split the mean policy lag of one trajectory (PACE, lemma 1).

    Args:
        token_versions: ``v_t`` of every token the policy sampled, in order; shape ``(T,)``, T >= 1.
            Tokens written by a tool have no version and must be left out.
        completed_at: ``c``.
        consumed_at: ``j``.

    Raises:
        ValueError: if there is no token, or the versions do not satisfy ``v_t <= c <= j``.

    >>> decompose([3, 3, 4, 6], completed_at=6, consumed_at=8)
    StalenessDecomposition(generation=2.0, waiting=2)
    """
    if not token_versions:
        raise ValueError("a trajectory without sampled tokens has no staleness")
    newest = max(token_versions)
    if not newest <= completed_at <= consumed_at:
        raise ValueError(
            f"versions must satisfy v_t <= c <= j; got newest token version {newest}, completed at "
            f"{completed_at}, consumed at {consumed_at}"
        )
    mean_version = sum(token_versions) / len(token_versions)
    return StalenessDecomposition(
        generation=completed_at - mean_version, waiting=consumed_at - completed_at
    )


def group_staleness(
    group: TrajectoryGroup, consumed_at: PolicyVersion
) -> list[StalenessDecomposition]:
    """Staleness of a group's trajectories at version ``consumed_at``, each with its own ``c``."""
    parts = []
    for t in group.trajectories:
        completed_at = t.completed_at
        if completed_at > consumed_at:
            raise ValueError(
                f"a trajectory of group {group.prompt.uid} completed at version {completed_at}, "
                f"after it is consumed at {consumed_at}: the clocks of generation and trainer "
                "disagree"
            )
        # `decompose`, from what the trajectory has checked and kept
        parts.append(
            StalenessDecomposition(completed_at - t.mean_version, consumed_at - completed_at)
        )
    return parts


def group_lag(group: TrajectoryGroup, consumed_at: PolicyVersion) -> float:
    """The largest policy lag among the trajectories of a group: what a hard lag limit looks at."""
    return max(staleness.total for staleness in group_staleness(group, consumed_at))


def mean_staleness(parts: Iterable[StalenessDecomposition]) -> StalenessDecomposition | None:
    """Mean over trajectories, or None if there are none."""
    parts = list(parts)
    if not parts:
        return None
    return StalenessDecomposition(
        generation=sum(p.generation for p in parts) / len(parts),
        waiting=sum(p.waiting for p in parts) / len(parts),
    )
