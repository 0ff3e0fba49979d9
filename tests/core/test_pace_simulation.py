"""PACE against Little's law: steady states with a virtual clock, on which a step lasts 1.

A group that finishes between two draws has waited one version at the next one, so its waiting
staleness is the number of draws at whose beginning it was in the pool. With N groups there at each
beginning and P groups leaving per step, the mean is N / P.
"""

import random
from dataclasses import replace
from statistics import fmean

import pytest
from scripted import make_prompt, make_trajectory

from pace_lightning.core.admission import AdmitAll
from pace_lightning.core.dispatch import DispatchCounts, FixedSlots
from pace_lightning.core.pace import CAPPED_DRAWS, Pace, RejectionBudget
from pace_lightning.core.pool import TrajectoryPool
from pace_lightning.core.trajectory import TrajectoryGroup

B = 16
WARM_UP, MEASURED = 100, 400


class Generation:
    """Groups finish at random times, ``rate`` per step, as far as dispatch allows."""

    def __init__(self, rate, *, slots=10**9, seed=0):
        self._rng = random.Random(seed)
        self._rate = rate
        self._dispatch = FixedSlots(slots)
        self._next = 0.0
        self._count = 0

    def finished_until(self, time, pool):
        """Put what finishes before ``time``; a group that finds no slot is never begun."""
        while self._next < time:
            version = int(self._next)
            counts = DispatchCounts(0, len(pool), pool.num_accepted, version)
            if self._dispatch.capacity(counts) > 0:
                pool.put(self._group(version))
            self._next += self._rng.expovariate(self._rate)

    def _group(self, version):
        self._count += 1
        trajectories = []
        for _ in range(2):
            begun = max(0, version - self._rng.randint(0, 3))
            drift = self._rng.expovariate(10.0) if begun < version else None
            trajectory = make_trajectory((begun, version), completed_at=version)
            trajectories.append(replace(trajectory, prefix_forgetting=drift))
        return TrajectoryGroup(make_prompt(f"0:{self._count}"), tuple(trajectories))


def simulate(policy, generation, *, steps=WARM_UP + MEASURED):
    """The reports of the draws: one per step, the first when there is enough."""
    pool = TrajectoryPool(policy, settle=lambda *_: None)
    reports = []
    for version in range(1, steps + 1):
        generation.finished_until(version, pool)
        if len(pool) >= B:
            reports.append(pool.draw(B, version=version, timeout_seconds=0)[1])
    return reports


def make_pace(target_groups, **budget):
    return Pace(
        RejectionBudget(target_groups, **budget), window_size=1024, window_minimum=64, aging_limit=3
    )


def steady(reports):
    """Mean occupancy, mean wait of what was trained on, and mean number rejected."""
    last = reports[-MEASURED:]
    return (
        fmean(report.occupancy_before_groups for report in last),
        fmean(report.waiting_staleness_versions for report in last),
        fmean(report.rejected_groups for report in last),
    )


@pytest.mark.parametrize("held", [3 * B, 5 * B])
def test_without_rejection_a_group_waits_for_the_groups_before_it(held):
    # more is generated than used, dispatch holds the pool at N: the wait is N/B
    reports = simulate(AdmitAll(), Generation(3 * B, slots=held))
    occupancy, wait, rejected = steady(reports)
    assert occupancy == pytest.approx(held, rel=0.02)
    assert wait == pytest.approx(held / B, rel=0.1)
    assert rejected == 0


@pytest.mark.parametrize("production", [1.2, 1.5, 1.8])
@pytest.mark.parametrize("target", [2, 4])
def test_with_pace_the_wait_is_what_the_target_says_whatever_the_production(target, production):
    # P = 1.2, 1.5, 1.8 B; wait -> N*/B; occupancy -> N* P/B; rejected -> P - B
    reports = simulate(make_pace(target * B), Generation(production * B))
    occupancy, wait, rejected = steady(reports)
    assert wait == pytest.approx(target, rel=0.1)
    assert occupancy == pytest.approx(target * B * production, rel=0.1)
    assert rejected == pytest.approx((production - 1) * B, rel=0.1)
    assert {report.warning for report in reports} == {None}


def test_relative_to_the_target_the_wait_settles_lower():
    # P = 1.5 B: rate = (N - N*)/N* = 1 - B/P = 1/3, so N = (4/3) N*, and N/P = (8/9) N*/B
    reports = simulate(make_pace(4 * B, excess="target"), Generation(1.5 * B))
    occupancy, wait, _ = steady(reports)
    assert occupancy == pytest.approx(4 / 3 * 4 * B, rel=0.1)
    assert wait == pytest.approx(8 / 9 * 4, rel=0.1)


def test_production_below_consumption_loses_nothing():
    reports = simulate(make_pace(4 * B), Generation(0.9 * B))
    assert sum(report.rejected_groups for report in reports) == 0


def test_production_above_what_the_cap_can_shed_fills_the_pool_and_is_said():
    # P = 2.5 B, but at most 2 B leave per step: the pool grows by B/2 per step
    reports = simulate(make_pace(2 * B), Generation(2.5 * B), steps=200)
    growth = reports[-1].occupancy_before_groups - reports[99].occupancy_before_groups
    assert growth == pytest.approx((len(reports) - 100) * B / 2, rel=0.1)
    assert {report.rejected_groups for report in reports[-100:]} == {B}
    warned = [report.warning is not None for report in reports]
    first = warned.index(True)
    assert CAPPED_DRAWS <= first < 2 * CAPPED_DRAWS
    assert all(warned[first:])


def test_rejection_spares_fresh_groups():
    reports = simulate(make_pace(2 * B), Generation(1.5 * B))[-MEASURED:]
    kept = fmean(score for report in reports for score in report.effective_staleness)
    shed = fmean(score for report in reports for score in report.rejected_effective_staleness)
    assert shed > kept + 0.5
