"""From the pool to Lightning: a sized stream of micro-batches.

One draw is one optimizer step: it is split into a fixed number of micro-batches, which is what
Lightning accumulates over. The stream has a length, because Lightning prefetches from unsized ones,
which would draw every batch one version too early. Building it has no side effects; drawing happens
in `__iter__` alone.

With many ranks, each has a stream: that of rank 0 draws and splits, and hands the others their
parts, or the word that there are no more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from pace_lightning.core.batch import TrainBatch, collate
from pace_lightning.core.draw_advantages import GROUP_BASELINES
from pace_lightning.core.pool import DrawReport, EndOfGroups, TrajectoryPool
from pace_lightning.core.staleness import mean_staleness
from pace_lightning.core.trajectory import PolicyVersion, Prompt, Trajectory, TrajectoryGroup
from pace_lightning.rollout.groups import NothingToLearnError
from pace_lightning.training.ranks import ALONE, Ranks


class Prompts(Protocol):
    """What the data module needs of a prompt stream."""

    def lease(self) -> Prompt:
        """Next prompt; raises `EndOfData` after the last one."""
        ...

    def settle(self, uid: str) -> None:
        """The prompt's group ended."""
        ...

    @property
    def num_outstanding(self) -> int:
        """Prompts leased and not settled, those that a restore has yet to lease again included."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Primitives only."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; what was leased and not settled is leased again."""
        ...


class ReceivingStream:
    """The sized stream of a rank that does not draw.

    Args:
        ranks: where the parts come from.
        policy_version: the trainer's version.
        total_steps: optimizer steps of the whole run, those before a resume included.
        num_micro_batches: micro-batches of this rank in one draw.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        policy_version: Callable[[], PolicyVersion],
        total_steps: int,
        num_micro_batches: int,
    ) -> None:
        self._ranks = ranks
        self._policy_version = policy_version
        self._total_steps = total_steps
        self._num_micro_batches = num_micro_batches

    def __len__(self) -> int:
        """Micro-batches of the whole run, on this rank."""
        return self._total_steps * self._num_micro_batches

    def __iter__(self) -> Iterator[TrainBatch]:
        """This rank's part of each draw, until all steps are done or rank 0 has no more."""
        while (version := self._policy_version()) < self._total_steps:
            batches = self._ranks.scatter(functools.partial(self._next, version))
            if batches is None:
                return
            yield from batches
            if self._policy_version() != version + 1:
                raise RuntimeError(
                    f"the draw for version {version} was consumed, but the trainer is at version "
                    f"{self._policy_version()}: one draw must be exactly one optimizer step"
                )

    def _next(self, version: PolicyVersion) -> list[list[TrainBatch]] | None:
        """Called on rank 0 only: the micro-batches of each rank; None at the end."""
        raise NotImplementedError(f"rank {self._ranks.rank} does not draw")


class TrajectoryStream(ReceivingStream):
    """Sized iterable of `TrainBatch`.

    Args:
        pool: where groups are drawn from.
        policy_version: the trainer's version; read when a draw begins.
        total_steps: optimizer steps of the whole run, those before a resume included.
        groups_per_step: groups of one draw.
        num_micro_batches: micro-batches of one draw, on each rank.
        pad_token_id: fills rows.
        advantage: name in `core.draw_advantages`.
        std_ddof: of the group's standard deviation.
        mask_truncated: leave truncated responses out of the loss.
        keep_groups: put the responses to one prompt into the same micro-batch.
        draw_timeout_seconds: deadline of one draw.
        drop_empty: called with the groups of a draw that has no gradient; the draw is repeated,
            since an optimizer step without gradient is never taken. May raise to give up.
        needs_spread: whether equal rewards mean no gradient; false with a KL penalty, which has one
            of its own.
        may_reject: False in synchronous mode: a rejected group is an error there.
        on_draw: called with the groups of each draw, before it is handed out.
        waiting: context manager entered while the trainer waits for a draw.
        on_nothing_to_learn: called when there is nothing to learn any more; the stream ends unless
            it raises. None: the error is raised.
        ranks: who else gets a part.
    """

    def __init__(
        self,
        pool: TrajectoryPool,
        *,
        policy_version: Callable[[], PolicyVersion],
        total_steps: int,
        groups_per_step: int,
        num_micro_batches: int,
        pad_token_id: int,
        advantage: str,
        std_ddof: int,
        mask_truncated: bool,
        keep_groups: bool,
        draw_timeout_seconds: float,
        drop_empty: Callable[[list[TrajectoryGroup]], None],
        needs_spread: bool,
        may_reject: bool,
        on_draw: Callable[[list[TrajectoryGroup]], None],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_nothing_to_learn: Callable[[NothingToLearnError], None] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(
            ranks,
            policy_version=policy_version,
            total_steps=total_steps,
            num_micro_batches=num_micro_batches,
        )
        self._pool = pool
        self._groups_per_step = groups_per_step
        self._pad_token_id = pad_token_id
        self._advantage = advantage
        self._std_ddof = std_ddof
        self._mask_truncated = mask_truncated
        self._keep_groups = keep_groups
        self._draw_timeout_seconds = draw_timeout_seconds
        self._drop_empty = drop_empty
        self._needs_spread = needs_spread
        self._may_reject = may_reject
        self._on_draw = on_draw
        self._waiting = waiting
        self._on_nothing_to_learn = on_nothing_to_learn

    def _next(self, version: PolicyVersion) -> list[list[TrainBatch]] | None:
        """Draw; None if the data ends, or there is nothing left to learn."""
        try:
            groups, report = self._draw(version)
        except EndOfGroups:
            return None
        except NothingToLearnError as error:
            if self._on_nothing_to_learn is None:
                raise
            self._on_nothing_to_learn(error)
            return None
        # Arrival order depends on timing; the order of rows must not.
        groups.sort(key=lambda group: group.prompt.uid)
        self._on_draw(groups)
        batches = collate(
            groups,
            version=version,
            num_micro_batches=self._num_micro_batches * self._ranks.size,
            pad_token_id=self._pad_token_id,
            advantage=self._advantage,
            std_ddof=self._std_ddof,
            mask_truncated=self._mask_truncated,
            keep_groups=self._keep_groups,
            report=report,
        )
        return deal(batches, self._ranks.size)

    def _draw(self, version: PolicyVersion) -> tuple[list[TrajectoryGroup], DrawReport]:
        """Draw until there is a gradient; repetitions extend the same report."""
        reports: list[DrawReport] = []
        while True:
            with self._waiting():
                groups, report = self._pool.draw(
                    self._groups_per_step,
                    version=version,
                    timeout_seconds=self._draw_timeout_seconds,
                    again=bool(reports),
                )
            reports.append(report)
            if report.rejected_groups and not self._may_reject:
                raise RuntimeError(
                    f"{report.rejected_groups} groups of step {version} were too old in "
                    "synchronous mode, which knows every lag beforehand: the clocks of trainer and "
                    "engine disagree"
                )
            if self._has_gradient(groups):
                return groups, _merged(reports)
            self._drop_empty(groups)
            self._ranks.postpone()

    def _has_gradient(self, groups: Sequence[TrajectoryGroup]) -> bool:
        """Whether rewards differ among what is compared: a group, or the whole draw."""
        if self._advantage not in GROUP_BASELINES:
            return self._differ(t for group in groups for t in group.trajectories)
        return any(self._differ(group.trajectories) for group in groups)

    def _differ(self, compared: Iterable[Trajectory]) -> bool:
        trajectories = list(compared)
        rewards = {trajectory.reward for trajectory in trajectories}
        trained = not self._mask_truncated or any(not t.truncated for t in trajectories)
        return trained and (len(rewards) > 1 or not self._needs_spread)


class EvaluationStream:
    """One validation "batch": the scores of all held-out prompts.

    Made by the same engine under one version.
    """

    def __init__(self, run: Callable[[], dict[str, float]]) -> None:
        self._run = run

    def __len__(self) -> int:
        """One."""
        return 1

    def __iter__(self) -> Iterator[dict[str, float]]:
        """Generate, score and summarize."""
        yield self._run()


def deal(batches: Sequence[TrainBatch], num_ranks: int) -> list[list[TrainBatch]]:
    """Each rank's micro-batches of a draw, numbered and linked anew.

    Dealt out in turn, so that the batches that the ranks compute at the same time are neighbors in
    size.

    Args:
        batches: from `collate`, the longest rows first; changed in place.
        num_ranks: divides their number.
    """
    hands = [list(batches[rank::num_ranks]) for rank in range(num_ranks)]
    for hand in hands:
        for index, batch in enumerate(hand):
            batch.micro_batch_index, batch.num_micro_batches = index, len(hand)
            batch.followers = tuple(hand[1:]) if index == 0 else ()
            peers = batches[index * num_ranks : (index + 1) * num_ranks]
            batch.peer_tokens = max(int(peer.loss_mask.sum()) for peer in peers)
    return hands


def _merged(reports: Sequence[DrawReport]) -> DrawReport:
    """The report on a draw, the last of these, and its repetitions.

    It began with the first, and lost what all did.
    """
    all_rejected: dict[str, Any] = {
        name: tuple(value for report in reports for value in getattr(report, name))
        for name in (
            "rejected_staleness",
            "rejected_effective_staleness",
            "rejected_prefix_forgetting",
            "rejected_response_tokens",
            "rejected_pass_rates",
        )
    }
    mean = mean_staleness(all_rejected["rejected_staleness"])
    scores = all_rejected["rejected_effective_staleness"]
    return replace(
        reports[-1],
        occupancy_before_groups=reports[0].occupancy_before_groups,
        budget_groups=sum(report.budget_groups for report in reports),
        rejected_groups=sum(report.rejected_groups for report in reports),
        rejected_generation_staleness_versions=mean.generation if mean else None,
        rejected_waiting_staleness_versions=mean.waiting if mean else None,
        rejected_total_staleness_versions=mean.total if mean else None,
        rejected_effective_staleness_versions=sum(scores) / len(scores) if scores else None,
        **all_rejected,
        redrawn_groups=sum(report.drawn_groups for report in reports[:-1]),
        wait_seconds=sum(report.wait_seconds for report in reports),
        ranking_seconds=sum(report.ranking_seconds for report in reports),
    )
