"""Admission policies, as pure functions: who is admitted, who leaves, who stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import make_group

from pace_lightning.core.admission import AdmitAll, MaxLag
from pace_lightning.core.staleness import group_lag
from pace_lightning.core.trajectory import Fate

VERSION = 10


def select(policy, candidates, needed, budget=0):
    selection, state = policy.select(
        candidates,
        needed=needed,
        version=VERSION,
        occupancy=len(candidates),
        budget=budget,
        state="kept",
    )
    assert state == "kept"
    return selection


def groups_of(lags):
    return [make_group(i, versions=(VERSION - lag,)) for i, lag in enumerate(lags)]


def test_unfiltered_admits_the_oldest_and_rejects_nothing():
    selection = select(AdmitAll(), groups_of([9, 0, 5, 1]), needed=3)
    assert selection.admitted == (0, 1, 2)
    assert selection.rejected == ()


def test_neither_policy_has_a_budget():
    for policy in (AdmitAll(), MaxLag(2)):
        assert policy.begin(needed=4, occupancy=100, state="kept") == (0, "kept")


def test_a_lag_limit_admits_up_to_the_limit_and_rejects_what_is_over_it():
    selection = select(MaxLag(2), groups_of([3, 2, 0, 4]), needed=4)
    assert selection.admitted == (1, 2)
    assert selection.rejected == ((0, Fate.TOO_STALE), (3, Fate.TOO_STALE))


def test_a_lag_limit_of_zero_admits_on_policy_data_only():
    selection = select(MaxLag(0), groups_of([0, 1, 0]), needed=3)
    assert selection.admitted == (0, 2)


def test_a_fractional_lag_counts_as_it_is():
    # mean versions 8 and 7.5: lags 2 and 2.5
    groups = [
        make_group(0, versions=(7, 9), completed_at=9),
        make_group(1, versions=(7, 8), completed_at=8),
    ]
    assert select(MaxLag(2), groups, needed=2).admitted == (0,)


def test_the_stalest_trajectory_decides_for_its_group():
    fresh, stale = make_group(0, versions=(10,)), make_group(0, versions=(5,))
    mixed = type(fresh)(fresh.prompt, (fresh.trajectories[0], stale.trajectories[0]))
    assert select(MaxLag(2), [mixed], needed=1).rejected == ((0, Fate.TOO_STALE),)


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="max_lag is -1"):
        MaxLag(-1)


@given(st.lists(st.integers(0, 8), max_size=20), st.integers(1, 6), st.integers(0, 6))
def test_a_lag_limit_rejects_exactly_the_too_stale_and_admits_the_oldest_others(
    lags, needed, limit
):
    groups = groups_of(lags)
    selection = select(MaxLag(limit), groups, needed=needed)
    fresh = [i for i, group in enumerate(groups) if group_lag(group, VERSION) <= limit]
    assert list(selection.admitted) == fresh[:needed]
    assert sorted(position for position, _ in selection.rejected) == sorted(
        set(range(len(groups))) - set(fresh)
    )
