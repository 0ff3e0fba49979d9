"""Which ready groups a draw may use.

A policy is pure: it is asked by the pool, under the pool's lock, and answers from its arguments
alone. What it has to remember between draws is an immutable state that the pool holds for it and
hands back.

    begin    once per draw, before any wait, with the occupancy at that moment
    select   each time enough groups are ready; may admit fewer than were asked for, then the draw
             goes on waiting
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pace_lightning.core.staleness import StalenessDecomposition, group_lag
from pace_lightning.core.trajectory import Fate, PolicyVersion, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Selection:
    """Positions in the candidate list. What is in neither list stays in the pool."""

    admitted: tuple[int, ...]
    rejected: tuple[tuple[int, Fate], ...] = ()
    staleness: tuple[Sequence[StalenessDecomposition], ...] = ()
    """Of the trajectories of each candidate.

    Given if the policy has worked it out; saves the report's time.
    """
    scores: tuple[float, ...] = ()
    """Effective staleness of each candidate, in versions.

    For the report, if the policy knows it.
    """
    warning: str | None = None
    """What is wrong with how the draws go, and what to change; for the report."""


class AdmissionPolicy(Protocol):
    """Decides which ready groups are trained on, which leave untrained, and which stay."""

    def begin(self, *, needed: int, occupancy: int, state: Any) -> tuple[int, Any]:
        """Open a draw.

        Args:
            needed: groups that the draw must deliver.
            occupancy: groups ready when the draw begins.
            state: what the last call returned; None at the start of a run.

        Returns:
            How many groups may be rejected in this draw, and the new state.
        """
        ...

    def select(
        self,
        candidates: Sequence[TrajectoryGroup],
        *,
        needed: int,
        version: PolicyVersion,
        occupancy: int,
        budget: int,
        state: Any,
    ) -> tuple[Selection, Any]:
        """Choose among the oldest ready groups.

        Args:
            candidates: ready groups, oldest first; at most ``needed + budget`` of them, or all of
                them if the policy sets ``examines_all``.
            needed: groups still missing in this draw.
            version: ``j``, the trainer version that will consume the selection.
            occupancy: groups ready now, the candidates included.
            budget: rejections still allowed in this draw.
            state: as in `begin`.

        Returns:
            The selection, with at most ``needed`` admitted, and the new state.
        """
        ...

    @property
    def examines_all(self) -> bool:
        """Whether `select` must see every ready group."""
        ...

    def state_to_primitives(self, state: Any) -> Any:
        """The state as a checkpoint holds it: None, numbers, strings, lists and dicts of them."""
        ...

    def state_from_primitives(self, primitives: Any) -> Any:
        """The inverse of `state_to_primitives`; gets None from a policy without a memory."""
        ...


class _Memoryless:
    """A policy that remembers nothing."""

    def state_to_primitives(self, state: Any) -> None:
        """Nothing to keep."""
        return

    def state_from_primitives(self, primitives: Any) -> None:
        """What another policy remembered is of no use."""
        return


class AdmitAll(_Memoryless):
    """Unfiltered asynchronous training: every group, oldest first."""

    examines_all = False

    def begin(self, *, needed: int, occupancy: int, state: Any) -> tuple[int, Any]:
        """Nothing may be rejected."""
        return 0, state

    def select(
        self,
        candidates: Sequence[TrajectoryGroup],
        *,
        needed: int,
        version: PolicyVersion,
        occupancy: int,
        budget: int,
        state: Any,
    ) -> tuple[Selection, Any]:
        """The oldest ``needed`` candidates."""
        return Selection(admitted=tuple(range(min(needed, len(candidates))))), state


class MaxLag(_Memoryless):
    """A hard limit: admits a group if the largest lag of its trajectories is at most ``max_lag``.

    The controlled Stale-k setting of PACE (arXiv:2609.36830, section 2). Groups over the limit
    leave as ``too_stale``: their lag can only grow. Pair it with a dispatch bound of the same size
    (``rollout.eta``), otherwise nearly everything that is generated gets discarded.

    Args:
        max_lag: ``k`` in policy versions; 0 admits on-policy data only.

    Raises:
        ValueError: if ``max_lag`` is negative.
    """

    examines_all = True

    def __init__(self, max_lag: int) -> None:
        if max_lag < 0:
            raise ValueError(f"max_lag is {max_lag}; a lag cannot be below 0")
        self.max_lag = max_lag

    def begin(self, *, needed: int, occupancy: int, state: Any) -> tuple[int, Any]:
        """The limit is hard, so the budget does not apply to it."""
        return 0, state

    def select(
        self,
        candidates: Sequence[TrajectoryGroup],
        *,
        needed: int,
        version: PolicyVersion,
        occupancy: int,
        budget: int,
        state: Any,
    ) -> tuple[Selection, Any]:
        """The oldest ``needed`` groups within the limit; every group over it is rejected."""
        fresh: list[int] = []
        stale: list[tuple[int, Fate]] = []
        for position, group in enumerate(candidates):
            if group_lag(group, version) > self.max_lag:
                stale.append((position, Fate.TOO_STALE))
            elif len(fresh) < needed:
                fresh.append(position)
        return Selection(admitted=tuple(fresh), rejected=tuple(stale)), state
