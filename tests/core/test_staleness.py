"""Where the lag of a trajectory comes from: golden numbers, and the identity K = K_gen + K_wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import make_group, make_trajectory

from pace_lightning.core.staleness import (
    StalenessDecomposition,
    decompose,
    group_lag,
    group_staleness,
    mean_staleness,
)
from pace_lightning.core.trajectory import TrajectoryGroup


@st.composite
def histories(draw):
    """``(v, c, j)`` with v_t <= c <= j."""
    versions = draw(st.lists(st.integers(0, 50), min_size=1, max_size=30))
    completed_at = max(versions) + draw(st.integers(0, 20))
    return versions, completed_at, completed_at + draw(st.integers(0, 20))


def test_one_token_sampled_late_lowers_the_generation_lag():
    # mean v = 15/4 = 3.75; c - mean v = 1.25; j - c = 3; j - mean v = 4.25
    staleness = decompose([3, 3, 4, 5], completed_at=5, consumed_at=8)
    assert staleness == StalenessDecomposition(generation=1.25, waiting=3)
    assert staleness.total == 4.25


def test_a_single_version_lags_by_the_distance_to_the_consumer():
    staleness = decompose([4, 4, 4], completed_at=4, consumed_at=7)
    assert (staleness.generation, staleness.waiting, staleness.total) == (0.0, 3, 3.0)


def test_steps_without_a_publication_count_as_generation():
    # all tokens from version 2, but the trainer was at 5 when the last one came
    assert decompose([2, 2], completed_at=5, consumed_at=5).generation == 3.0


def test_data_used_at_once_has_no_lag():
    assert decompose([6], completed_at=6, consumed_at=6).total == 0.0


@given(histories())
def test_generation_and_waiting_add_up_to_the_mean_token_lag(history):
    versions, completed_at, consumed_at = history
    staleness = decompose(versions, completed_at=completed_at, consumed_at=consumed_at)
    mean_lag = sum(consumed_at - version for version in versions) / len(versions)
    assert staleness.total == pytest.approx(mean_lag, abs=1e-12)
    assert staleness.generation >= 0
    assert staleness.waiting >= 0


@given(histories(), st.integers(0, 10_000))
def test_shifting_all_versions_changes_nothing(history, shift):
    versions, completed_at, consumed_at = history
    here = decompose(versions, completed_at=completed_at, consumed_at=consumed_at)
    there = decompose(
        [version + shift for version in versions],
        completed_at=completed_at + shift,
        consumed_at=consumed_at + shift,
    )
    assert there.waiting == here.waiting
    assert there.generation == pytest.approx(here.generation, abs=1e-9)


@given(histories(), st.randoms(use_true_random=False))
def test_the_order_of_the_tokens_does_not_matter(history, random):
    versions, completed_at, consumed_at = history
    shuffled = random.sample(versions, len(versions))
    assert decompose(shuffled, completed_at=completed_at, consumed_at=consumed_at) == decompose(
        versions, completed_at=completed_at, consumed_at=consumed_at
    )


@given(histories(), st.integers(1, 9))
def test_one_more_step_of_waiting_is_one_more_version_of_waiting(history, steps):
    versions, completed_at, consumed_at = history
    early = decompose(versions, completed_at=completed_at, consumed_at=consumed_at)
    late = decompose(versions, completed_at=completed_at, consumed_at=consumed_at + steps)
    assert late.generation == early.generation
    assert late.waiting == early.waiting + steps


def test_no_token_is_refused():
    with pytest.raises(ValueError, match="without sampled tokens"):
        decompose([], completed_at=1, consumed_at=1)


@pytest.mark.parametrize(
    ("versions", "completed_at", "consumed_at"), [([3, 6], 5, 8), ([3], 5, 4), ([9], 5, 8)]
)
def test_a_clock_that_runs_backwards_is_refused_with_the_numbers(
    versions, completed_at, consumed_at
):
    message = f"{max(versions)}, completed at {completed_at}, consumed at {consumed_at}"
    with pytest.raises(ValueError, match=message):
        decompose(versions, completed_at=completed_at, consumed_at=consumed_at)


def test_each_trajectory_of_a_group_has_its_own_completion():
    # siblings that finished at 2 and at 5: the first one waited for the second
    fast, slow = make_trajectory([2, 2]), make_trajectory([2, 5])
    group = TrajectoryGroup(make_group().prompt, (fast, slow))
    assert group.completed_at == 5
    assert group_staleness(group, 6) == [
        StalenessDecomposition(generation=0.0, waiting=4),
        StalenessDecomposition(generation=1.5, waiting=1),
    ]


@given(histories())
def test_the_staleness_of_a_group_is_the_decomposition_of_each_trajectory(history):
    versions, completed_at, consumed_at = history
    group = make_group(versions=versions, completed_at=completed_at, scores=(0.0, 1.0))
    expected = decompose(versions, completed_at=completed_at, consumed_at=consumed_at)
    assert group_staleness(group, consumed_at) == [expected, expected]


def test_a_group_cannot_be_consumed_before_it_was_completed():
    group = make_group("late", versions=(3,), completed_at=5)
    with pytest.raises(ValueError, match=r"completed at (version )?5.*consumed at 4"):
        group_staleness(group, 4)


def test_the_lag_of_a_group_is_that_of_its_most_stale_trajectory():
    group = TrajectoryGroup(make_group().prompt, (make_trajectory([2]), make_trajectory([5])))
    assert group_lag(group, 6) == 4


def test_the_mean_is_over_trajectories_part_by_part():
    parts = [StalenessDecomposition(1.0, 0), StalenessDecomposition(2.0, 3)]
    assert mean_staleness(parts) == StalenessDecomposition(generation=1.5, waiting=1.5)
    assert mean_staleness([]) is None
