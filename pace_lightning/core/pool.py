"""The trajectory pool: finished groups that wait to be trained on.

One lock, one condition. The rollout thread calls `put`, `fail` and `close`, and never waits; the
trainer's thread calls `draw`, and waits for enough groups, an error, the end of the data or its
deadline, whichever comes first. What may be drawn is decided by an admission policy, a pure
function that runs under the lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

from pace_lightning.core.admission import AdmissionPolicy, Selection
from pace_lightning.core.saved_groups import group_state
from pace_lightning.core.staleness import (
    StalenessDecomposition,
    group_staleness,
    mean_staleness,
)
from pace_lightning.core.trajectory import Fate, PolicyVersion, TrajectoryGroup


class EndOfGroups(Exception):  # not an error: the data ended
    """The prompt stream is through and fewer groups are left than a step needs."""


class DrawTimeoutError(RuntimeError):
    """Not enough groups became ready before the deadline of a draw."""


@dataclass
class _Share:
    """The groups that a draw admitted, or those that it rejected."""

    version: PolicyVersion
    groups: list[TrajectoryGroup] = field(default_factory=list)
    staleness: list[StalenessDecomposition] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    """One per group, or none at all if the policy gives none."""

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, position: int, group: TrajectoryGroup, selection: Selection) -> None:
        known = selection.staleness
        self.groups.append(group)
        self.staleness += known[position] if known else group_staleness(group, self.version)
        self.scores += selection.scores[position : position + 1]

    @property
    def mean_score(self) -> float | None:
        return sum(self.scores) / len(self.scores) if self.scores else None

    def prefix_forgetting(self) -> tuple[float, ...]:
        scores = (t.prefix_forgetting for group in self.groups for t in group.trajectories)
        return tuple(score for score in scores if score is not None)


@dataclass(frozen=True, slots=True)
class DrawReport:
    """What one draw saw and did; one line of ``draws.jsonl``.

    Counts in groups, staleness in policy versions.
    """

    version: PolicyVersion
    """``j``: the trainer version that consumes the draw."""
    occupancy_before_groups: int
    """Ready groups when the draw began, before any wait."""
    occupancy_after_groups: int
    budget_groups: int
    """How many groups the admission policy was allowed to reject."""
    drawn_groups: int
    rejected_groups: int
    beyond_candidates_groups: int
    """Ready groups that were too young to be looked at."""
    generation_staleness_versions: float
    """Mean over the drawn trajectories, as the next two."""
    waiting_staleness_versions: float
    total_staleness_versions: float
    rejected_generation_staleness_versions: float | None
    """Mean over the rejected trajectories, None if there are none; as the next two."""
    rejected_waiting_staleness_versions: float | None
    rejected_total_staleness_versions: float | None
    wait_seconds: float
    """How long the trainer waited for the draw."""
    ranking_seconds: float = 0.0
    """The part of it in which the admission policy chose."""
    redrawn_groups: int = 0
    """Groups drawn before these and dropped, because not one of them had a gradient."""
    effective_staleness_versions: float | None = None
    """Mean over the drawn groups, None if the policy knows no such score."""
    rejected_effective_staleness_versions: float | None = None
    """Mean over the rejected groups, None if there are none or no score."""
    warning: str | None = None
    """From the admission policy: what to change, if its draws cannot do what they should."""
    staleness: tuple[StalenessDecomposition, ...] = field(default=(), repr=False)
    """Of each drawn trajectory; for histograms, not in ``draws.jsonl``, as all below."""
    rejected_staleness: tuple[StalenessDecomposition, ...] = field(default=(), repr=False)
    effective_staleness: tuple[float, ...] = field(default=(), repr=False)
    """Of each drawn group, if the policy knows it."""
    rejected_effective_staleness: tuple[float, ...] = field(default=(), repr=False)
    prefix_forgetting: tuple[float, ...] = field(default=(), repr=False)
    """Of each drawn trajectory that has a score."""
    rejected_prefix_forgetting: tuple[float, ...] = field(default=(), repr=False)
    response_tokens: tuple[float, ...] = field(default=(), repr=False)
    """Mean response length of each drawn group."""
    rejected_response_tokens: tuple[float, ...] = field(default=(), repr=False)
    pass_rates: tuple[float, ...] = field(default=(), repr=False)
    """Mean unshaped score of each drawn group."""
    rejected_pass_rates: tuple[float, ...] = field(default=(), repr=False)

    def as_json(self) -> dict[str, Any]:
        """The fields of ``draws.jsonl``: all but the tuples."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.repr}


class TrajectoryPool:
    """Finished groups, in order of arrival.

    Args:
        policy: decides which groups a draw may use.
        settle: called with ``(uid, fate, num_tokens)`` for each group that leaves untrained.
        on_change: called when a draw freed slots; wakes the producer.
        describe_producer: what the other side is doing, for the message of a draw that timed out.

    All three are called under the lock: they must neither wait nor call the pool.
    """

    def __init__(
        self,
        policy: AdmissionPolicy,
        *,
        settle: Callable[[str, Fate, int], None],
        on_change: Callable[[], None] = lambda: None,
        describe_producer: Callable[[], str] = lambda: "nothing known about the producer",
    ) -> None:
        self._policy = policy
        self._settle = settle
        self.on_change = on_change
        self.describe_producer = describe_producer
        self._changed = threading.Condition()
        self._ready: deque[TrajectoryGroup] = deque()
        self._policy_state: Any = None
        self._error: BaseException | None = None
        self._closed = False
        self._accepted = 0
        self._ranking_seconds = 0.0

    def __len__(self) -> int:
        """Occupancy: ready groups."""
        return len(self._ready)

    @property
    def num_accepted(self) -> int:
        """Groups put so far, less those rejected from the pool or discounted."""
        return self._accepted

    def put(self, group: TrajectoryGroup) -> None:
        """Add a finished group. Called by the rollout thread; never waits.

        Raises:
            RuntimeError: if the pool is closed.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the pool is closed, group {group.prompt.uid} came too late")
            self._ready.append(group)
            self._accepted += 1
            self._changed.notify_all()

    def ready(self) -> list[TrajectoryGroup]:
        """The ready groups, oldest first."""
        with self._changed:
            return list(self._ready)

    def discount(self, num_groups: int) -> None:
        """Drawn groups were dropped without a step: others may take their place.

        Called by the trainer's thread.
        """
        with self._changed:
            self._accepted -= num_groups
            self.on_change()

    def fail(self, error: BaseException) -> None:
        """The producer died: every present and future draw raises ``error``.

        The first error stays.
        """
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def close(self) -> None:
        """No more groups will come. What is ready can still be drawn. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def draw(
        self,
        num_groups: int,
        *,
        version: PolicyVersion,
        timeout_seconds: float,
        again: bool = False,
    ) -> tuple[list[TrajectoryGroup], DrawReport]:
        """Take exactly ``num_groups`` groups for the step at ``version``.

        Called by the trainer's thread; waits.

        Args:
            num_groups: how many.
            version: ``j``.
            timeout_seconds: how long to wait.
            again: this repeats a draw for the same step: the policy is not asked for another
                budget, and nothing is rejected under it.

        Raises:
            EndOfGroups: if the pool is closed and cannot fill the draw.
            DrawTimeoutError: if it took longer than ``timeout_seconds``.
            BaseException: whatever `fail` was given.
        """
        start = time.monotonic()
        deadline = start + timeout_seconds
        admitted, rejected = _Share(version), _Share(version)
        with self._changed:
            occupancy_before = len(self._ready)
            budget = 0
            ranking_before = self._ranking_seconds
            if not again:
                with self._ranking():
                    budget, self._policy_state = self._policy.begin(
                        needed=num_groups, occupancy=occupancy_before, state=self._policy_state
                    )
            try:
                beyond, warning = self._collect(
                    num_groups, version, budget, admitted, rejected, deadline
                )
            except BaseException:
                self._ready.extendleft(reversed(admitted.groups))
                raise
            occupancy_after = len(self._ready)
            ranking_seconds = self._ranking_seconds - ranking_before
            self.on_change()
        mean_kept = mean_staleness(admitted.staleness) or StalenessDecomposition(0.0, 0.0)
        mean_shed = mean_staleness(rejected.staleness)
        report = DrawReport(
            version=version,
            occupancy_before_groups=occupancy_before,
            occupancy_after_groups=occupancy_after,
            budget_groups=budget,
            drawn_groups=len(admitted),
            rejected_groups=len(rejected),
            beyond_candidates_groups=beyond,
            generation_staleness_versions=mean_kept.generation,
            waiting_staleness_versions=mean_kept.waiting,
            total_staleness_versions=mean_kept.total,
            rejected_generation_staleness_versions=mean_shed.generation if mean_shed else None,
            rejected_waiting_staleness_versions=mean_shed.waiting if mean_shed else None,
            rejected_total_staleness_versions=mean_shed.total if mean_shed else None,
            wait_seconds=time.monotonic() - start,
            ranking_seconds=ranking_seconds,
            effective_staleness_versions=admitted.mean_score,
            rejected_effective_staleness_versions=rejected.mean_score,
            warning=warning,
            staleness=tuple(admitted.staleness),
            rejected_staleness=tuple(rejected.staleness),
            effective_staleness=tuple(admitted.scores),
            rejected_effective_staleness=tuple(rejected.scores),
            prefix_forgetting=admitted.prefix_forgetting(),
            rejected_prefix_forgetting=rejected.prefix_forgetting(),
            response_tokens=tuple(group.mean_tokens for group in admitted.groups),
            rejected_response_tokens=tuple(group.mean_tokens for group in rejected.groups),
            pass_rates=tuple(group.mean_score for group in admitted.groups),
            rejected_pass_rates=tuple(group.mean_score for group in rejected.groups),
        )
        return admitted.groups, report

    def drain(self) -> list[TrajectoryGroup]:
        """Take whatever is ready, for settling it when the run ends."""
        with self._changed:
            groups = list(self._ready)
            self._ready.clear()
            return groups

    def state_dict(self) -> dict[str, Any]:
        """The ready groups, and the admission policy's memory."""
        with self._changed:
            return {
                "policy_state": self._policy.state_to_primitives(self._policy_state),
                "groups": [group_state(group) for group in self._ready],
            }

    def load_state_dict(
        self, state: Mapping[str, Any], groups: Iterable[TrajectoryGroup], *, drawn: int
    ) -> None:
        """Go on from a checkpoint.

        Args:
            state: from `state_dict`.
            groups: that are ready, oldest first.
            drawn: groups drawn so far, i.e. version x groups per step; without it a dispatch rule
                that bounds the lead would let a burst through.
        """
        with self._changed:
            self._policy_state = self._policy.state_from_primitives(state["policy_state"])
            self._ready = deque(groups)
            self._accepted = drawn + len(self._ready)

    # Everything below runs under the lock.

    def _collect(
        self,
        num_groups: int,
        version: PolicyVersion,
        budget: int,
        admitted: _Share,
        rejected: _Share,
        deadline: float,
    ) -> tuple[int, str | None]:
        """Fill both shares; return how many ready groups were not looked at, and a warning."""
        while True:
            needed = num_groups - len(admitted)
            self._wait_for(needed, deadline, num_groups, version)
            occupancy = len(self._ready)
            budget_left = max(0, min(budget - len(rejected), occupancy - needed))
            window = (
                occupancy if self._policy.examines_all else min(needed + budget_left, occupancy)
            )
            with self._ranking():
                selection, self._policy_state = self._policy.select(
                    list(islice(self._ready, window)),
                    needed=needed,
                    version=version,
                    occupancy=occupancy,
                    budget=budget_left,
                    state=self._policy_state,
                )
            candidates = self._remove(window, selection.admitted, selection.rejected)
            for position in selection.admitted:
                admitted.add(position, candidates[position], selection)
            for position, fate in selection.rejected:
                group = candidates[position]
                rejected.add(position, group, selection)
                self._accepted -= 1
                self._settle(group.prompt.uid, fate, group.num_tokens)
            if len(admitted) == num_groups:
                return occupancy - window, selection.warning
            # rejections freed slots, and the draw is about to wait for them to be filled
            self.on_change()

    def _wait_for(
        self, needed: int, deadline: float, num_groups: int, version: PolicyVersion
    ) -> None:
        while self._error is None and len(self._ready) < needed and not self._closed:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                missing = needed - len(self._ready)
                raise DrawTimeoutError(
                    f"step {version} waited for {num_groups} groups past its deadline: "
                    f"{num_groups - missing} ready, {missing} missing. The trainer waits for the "
                    f"rollout thread: {self.describe_producer()}. If generation is just slow, "
                    "raise trainer.draw_timeout_seconds."
                )
            self._changed.wait(remaining)
        if self._error is not None:
            raise self._error
        if len(self._ready) < needed:
            left = num_groups - needed + len(self._ready)
            raise EndOfGroups(
                f"the data ended: step {version} needs {num_groups} groups, {left} are left"
            )

    @contextmanager
    def _ranking(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._ranking_seconds += time.perf_counter() - begin

    def _remove(
        self, window: int, admitted: Iterable[int], rejected: Iterable[tuple[int, Fate]]
    ) -> list[TrajectoryGroup]:
        """Take out the oldest ``window`` groups; put back those not chosen, in their order."""
        candidates = [self._ready.popleft() for _ in range(window)]
        gone = {*admitted, *(position for position, _ in rejected)}
        stay = [group for position, group in enumerate(candidates) if position not in gone]
        self._ready.extendleft(reversed(stay))
        return candidates
