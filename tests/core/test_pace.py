"""PACE: golden numbers of each part, and what must hold for any pool."""

import json
import math
import random
import threading
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import make_prompt, make_trajectory

from pace_lightning.core.admission import AdmitAll, MaxLag
from pace_lightning.core.pace import (
    CAPPED_DRAWS,
    BudgetState,
    DriftWindow,
    Pace,
    PaceState,
    PrefixRescore,
    RejectionBudget,
    effective_staleness,
    prefix_forgetting,
    rescore,
)
from pace_lightning.core.pool import TrajectoryPool
from pace_lightning.core.staleness import StalenessDecomposition, decompose, group_staleness
from pace_lightning.core.trajectory import Fate, TrajectoryGroup

VERSION = 20
WINDOW = (0.01, 0.02, 0.02, 0.03, 0.05, 0.05, 0.08, 0.1)


def make_group(uid, *trajectories):
    """A group of ``(K_gen, K_wait, drift score or None)`` at `VERSION`."""
    made = []
    for generation, waiting, drift in trajectories:
        completed_at = VERSION - waiting
        # whole versions: all tokens from one version; halves: from two
        versions = (completed_at - math.floor(generation), completed_at - math.ceil(generation))
        trajectory = make_trajectory(versions, completed_at=completed_at)
        made.append(replace(trajectory, prefix_forgetting=drift))
    return TrajectoryGroup(make_prompt(uid), tuple(made))


def make_pace(**settings):
    defaults = {"budget": RejectionBudget(8), "window_size": 8, "window_minimum": 4}
    return Pace(**{**defaults, **settings})


def select(policy, groups, *, needed, state=None, occupancy=None):
    return policy.select(
        groups,
        needed=needed,
        version=VERSION,
        occupancy=len(groups) if occupancy is None else occupancy,
        budget=len(groups) - needed,
        state=state,
    )


def uids_of(selection, groups):
    return [groups[i].prompt.uid for i in selection.admitted], [
        groups[i].prompt.uid for i, _ in selection.rejected
    ]


def rejected_uids(policy, groups, *, needed, state=None):
    return uids_of(select(policy, groups, needed=needed, state=state)[0], groups)[1]


# --- the budget ----------------------------------------------------------------------------------


def test_the_average_approaches_the_excess():
    budget = RejectionBudget(64, smoothing=0.1)
    state = BudgetState()
    for _ in range(3):
        _, state = budget.update(state, occupancy=96, needed=32)
    # e = 1 - 64/96 = 1/3; from 0, three times: (1 - 0.9^3) / 3 = 0.271 / 3
    assert state.ema == pytest.approx(0.0903333, abs=1e-7)


def test_a_third_of_the_candidates_is_half_of_the_draw():
    # rate = 1/3, B = 32: (1/3) 32 / (2/3) = 16, of 48 candidates
    state = BudgetState(ema=1 / 3)
    assert RejectionBudget(64).update(state, occupancy=96, needed=32)[0] == 16


def test_what_is_left_must_fill_the_draw():
    # rate = 0.5, B = 32 would be 32, but 40 - 32 = 8
    budget = RejectionBudget(20)  # e = 1 - 20/40 = 0.5
    assert budget.update(BudgetState(ema=0.5), occupancy=40, needed=32)[0] == 8
    # and 8 - 3 with a reserve
    budget = RejectionBudget(20, reserve_groups=3)
    assert budget.update(BudgetState(ema=0.5), occupancy=40, needed=32)[0] == 5


def test_what_the_guard_holds_back_does_not_come_as_a_burst_later():
    budget = RejectionBudget(20)
    _, state = budget.update(BudgetState(ema=0.5), occupancy=40, needed=32)
    assert state.carry == 0.0


@pytest.mark.parametrize("occupancy", [0, 10, 63, 64])
def test_at_the_target_or_below_nothing_is_rejected_and_the_average_decays(occupancy):
    before = BudgetState(ema=0.4, carry=0.7, capped_draws=9)
    budget, state = RejectionBudget(64, smoothing=0.25).update(
        before, occupancy=occupancy, needed=8
    )
    assert budget == 0
    assert state == BudgetState(ema=pytest.approx(0.3), carry=0.7, capped_draws=0)


def test_a_pool_that_cannot_fill_the_draw_loses_nothing():
    assert RejectionBudget(4).update(BudgetState(ema=0.5), occupancy=31, needed=32)[0] == 0


@pytest.mark.parametrize(
    ("excess", "occupancy", "expected"),
    [
        ("occupancy", 96, 1 / 3),  # 1 - 64/96
        ("target", 96, 1 / 2),  # 32/64
        ("occupancy", 256, 3 / 4),  # 1 - 64/256
        ("target", 256, 1.0),  # 192/64 = 3, at most 1
        ("occupancy", 0, 0.0),
        ("target", 0, 0.0),
    ],
)
def test_the_excess_is_relative_to_the_occupancy_or_to_the_target(excess, occupancy, expected):
    budget = RejectionBudget(64, smoothing=1.0, excess=excess)
    _, state = budget.update(BudgetState(), occupancy=occupancy, needed=8)
    assert state.ema == pytest.approx(expected)


def test_the_rate_is_capped():
    # rate 0.25, B = 30: 0.25 * 30 / 0.75 = 10, though e = 0.99
    budget = RejectionBudget(10, smoothing=1.0, rate_max=0.25)
    assert budget.update(BudgetState(), occupancy=1000, needed=30)[0] == 10


def test_a_cap_of_zero_rejects_nothing():
    budget = RejectionBudget(1, smoothing=1.0, rate_max=0.0)
    assert budget.update(BudgetState(), occupancy=1000, needed=30)[0] == 0


def test_fractions_of_a_group_are_carried():
    # rate 0.2, B = 2: 0.5 per draw
    budget, state = RejectionBudget(80, smoothing=1.0), BudgetState()
    rejected = []
    for _ in range(6):
        number, state = budget.update(state, occupancy=100, needed=2)
        rejected.append(number)
    assert rejected == [0, 1, 0, 1, 0, 1]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 99))
def test_carrying_loses_nothing_in_the_long_run(needed, percent):
    rate = percent / 200
    budget, state = RejectionBudget(10_000 * (1 - rate), smoothing=1.0), BudgetState()
    total, draws = 0, 20_000 // percent + 500
    for _ in range(draws):
        number, state = budget.update(state, occupancy=10_000, needed=needed)
        total += number
    expected = rate * needed / (1 - rate)
    assert total / draws == pytest.approx(expected, rel=0.01)


@given(
    budget=st.builds(
        RejectionBudget,
        target_groups=st.floats(0.5, 200),
        smoothing=st.floats(0.01, 1),
        rate_max=st.floats(0, 0.95),
        reserve_groups=st.integers(0, 20),
        excess=st.sampled_from(["occupancy", "target"]),
    ),
    occupancies=st.lists(st.integers(0, 400), min_size=1, max_size=30),
    needed=st.integers(1, 64),
)
def test_no_budget_ever_starves_a_draw(budget, occupancies, needed):
    state = BudgetState()
    for occupancy in occupancies:
        number, state = budget.update(state, occupancy=occupancy, needed=needed)
        assert number == 0 or occupancy - number >= needed + budget.reserve_groups
        assert number <= budget.rate_max * needed / (1 - budget.rate_max) + 1
        assert 0 <= state.ema <= 1
        assert 0 <= state.carry < 1


def test_the_budget_warns_after_many_draws_at_the_cap_and_stops_when_it_is_over():
    budget, state = RejectionBudget(8, smoothing=1.0), BudgetState()
    warnings = []
    for occupancy in [17] * (CAPPED_DRAWS + 1) + [16]:  # e = 9/17 > 0.5, then 0.5
        _, state = budget.update(state, occupancy=occupancy, needed=4)
        warnings.append(budget.warning(state))
    assert warnings[: CAPPED_DRAWS - 1] == [None] * (CAPPED_DRAWS - 1)
    for part in ("rate_max = 0.5", "over 2 times", "target: 8 groups", "raise rate_max"):
        assert part in warnings[CAPPED_DRAWS - 1]
    assert warnings[CAPPED_DRAWS] == warnings[CAPPED_DRAWS - 1]  # the same text: shown once
    assert warnings[-1] is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"target_groups": 0}, "target_groups is 0"),
        ({"target_groups": math.nan}, "target_groups is nan"),
        ({"smoothing": 0.0}, "smoothing is 0.0"),
        ({"smoothing": 1.5}, "smoothing is 1.5"),
        ({"rate_max": 1.0}, "rate_max is 1.0"),
        ({"rate_max": -0.1}, "rate_max is -0.1"),
        ({"reserve_groups": -1}, "reserve_groups is -1"),
        ({"excess": "both"}, "excess is 'both'"),
    ],
)
def test_a_budget_that_means_nothing_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        RejectionBudget(**{"target_groups": 8, **setting})


# --- prefix drift --------------------------------------------------------------------------------


def test_the_sums_of_a_rescore():
    # changes -0.5, +0.25, 0
    event = rescore([-1.0, -2.0, -0.5], [-1.5, -1.75, -0.5])
    assert event == PrefixRescore(num_tokens=3, absolute=0.75, drop=0.5, signed=-0.25)
    assert prefix_forgetting([event]) == pytest.approx(0.25)
    assert prefix_forgetting([event], form="drop") == pytest.approx(0.5 / 3)
    assert prefix_forgetting([event], form="signed") == pytest.approx(0.25 / 3)


def test_the_same_weights_have_forgotten_nothing():
    event = rescore([-1.0, -0.25], [-1.0, -0.25])
    for form in ("absolute", "drop", "signed"):
        assert prefix_forgetting([event], form=form) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.1])
@pytest.mark.parametrize("side", [0, 1])
def test_a_rescore_refuses_what_is_not_a_log_prob(bad, side):
    sides = [[-1.0, -2.0], [-1.0, -2.0]]
    sides[side][1] = bad
    with pytest.raises(ValueError, match="log-prob of a prefix token"):
        rescore(*sides)


def test_a_rescore_needs_both_log_probs_of_each_token():
    with pytest.raises(ValueError, match=r"number of log-probs is \(2, 1\)"):
        rescore([-1.0, -2.0], [-1.0])


def test_the_events_of_a_trajectory_make_one_score():
    # 0.4 over 2 tokens is 0.2; 0.6 over 6 tokens is 0.1; together 1.0 over 8
    events = [PrefixRescore(2, 0.4, 0.4, -0.4), PrefixRescore(6, 0.6, 0.0, 0.6)]
    assert prefix_forgetting(events) == pytest.approx(0.1)
    assert prefix_forgetting(events, aggregate="max") == pytest.approx(0.2)
    assert prefix_forgetting(events, aggregate="token_weighted") == pytest.approx(0.125)
    # the size of each event's mean change, before they are averaged: -0.4 and +0.6 do not cancel
    signed = prefix_forgetting(events, form="signed", aggregate="token_weighted")
    assert signed == pytest.approx(0.125)


def test_an_event_without_tokens_says_nothing():
    empty, event = rescore([], []), PrefixRescore(2, 0.4, 0.4, -0.4)
    assert prefix_forgetting([]) is None
    assert prefix_forgetting([empty]) is None
    for aggregate in ("last", "max", "token_weighted"):
        assert prefix_forgetting([event, empty], aggregate=aggregate) == pytest.approx(0.2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.1])
def test_a_trajectory_refuses_a_score_that_is_none(bad):
    with pytest.raises(ValueError, match="prefix_forgetting is"):
        replace(make_trajectory(), prefix_forgetting=bad)


# --- the window ----------------------------------------------------------------------------------


def test_the_percentile_counts_ties_half():
    # of 8 scores 4 are smaller than 0.05 and 2 are equal: (4 + 2/2) / 8
    assert DriftWindow(8, 8).percentiles(WINDOW, [0.05]) == [0.625]


def test_the_ends_of_the_scale():
    assert DriftWindow(8, 1).percentiles(WINDOW, [0.0, 0.01, 0.1, 0.2]) == [0, 0.0625, 0.9375, 1]


def test_too_few_scores_give_no_percentile():
    assert DriftWindow(8, 4).percentiles((0.1, 0.2, 0.3), [0.1]) == [None]
    assert DriftWindow(8, 4).percentiles((0.1, 0.2, 0.3, 0.4), [0.25]) == [0.5]


def test_the_window_keeps_the_newest():
    window = DriftWindow(3, 1)
    assert window.extend((0.1, 0.2), [0.3]) == (0.1, 0.2, 0.3)
    assert window.extend((0.1, 0.2, 0.3), [0.4, 0.5]) == (0.3, 0.4, 0.5)
    assert window.extend((0.1,), [0.2, 0.3, 0.4, 0.5]) == (0.3, 0.4, 0.5)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(0, 9), st.randoms())
def test_the_percentile_is_a_count_over_the_window(window, score, rng):
    smaller = sum(h < score for h in window)
    equal = sum(h == score for h in window)
    expected = (smaller + 0.5 * equal) / len(window)
    shuffled = rng.sample(window, len(window))
    (percentile,) = DriftWindow(30, 1).percentiles(tuple(shuffled), [score])
    assert percentile == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("size", "minimum"), [(4, 5), (4, 0), (0, 0)])
def test_a_window_that_never_fills_is_refused(size, minimum):
    with pytest.raises(ValueError, match=f"window_minimum is {minimum}; needed 1..{size}"):
        DriftWindow(size, minimum)


# --- effective staleness -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gamma", "expected"),
    [
        (1, 3.78125),  # 3 + 0.625 * 1.25
        (2, 3.48828125),  # 3 + 0.390625 * 1.25
        (4, 3.19073486328125),  # 3 + 0.152587890625 * 1.25
    ],
)
def test_drift_sharpens_the_weight_of_generation(gamma, expected):
    staleness = decompose([3, 3, 4, 5], completed_at=5, consumed_at=8)
    assert effective_staleness(staleness, 0.625, gamma) == expected


def test_without_a_percentile_or_with_gamma_zero_it_is_raw_staleness():
    staleness = StalenessDecomposition(generation=1.25, waiting=3)
    assert effective_staleness(staleness, None, 4.0) == 4.25
    for percentile in (0.0, 0.3, 1.0):
        assert effective_staleness(staleness, percentile, 0.0) == 4.25


@given(
    st.integers(0, 60).map(lambda n: n / 4),
    st.integers(0, 20),
    st.none() | st.floats(0, 1),
    st.floats(0, 8),
)
def test_it_lies_between_waiting_and_the_total_and_grows_with_each_step(g, w, q, gamma):
    now = effective_staleness(StalenessDecomposition(g, w), q, gamma)
    later = effective_staleness(StalenessDecomposition(g, w + 1), q, gamma)
    assert w <= now <= w + g
    assert later - now == pytest.approx(1.0)


# --- which groups --------------------------------------------------------------------------------


def test_the_stalest_leave_and_the_others_stay_in_order():
    groups = [make_group(f"0:{i}", (0, wait, None)) for i, wait in enumerate([3, 9, 1, 7, 5])]
    selection, _ = select(make_pace(), groups, needed=3)
    assert selection.admitted == (0, 2, 4)
    assert selection.rejected == ((1, Fate.REJECTED), (3, Fate.REJECTED))
    assert selection.scores == (3, 9, 1, 7, 5)
    assert selection.warning is None


def test_the_candidates_are_the_oldest():
    groups = [make_group(f"0:{i}", (0, wait, None)) for i, wait in enumerate([1, 2, 3, 9])]
    selection, _ = make_pace().select(
        groups, needed=2, version=VERSION, occupancy=4, budget=1, state=None
    )
    assert selection.admitted == (0, 1)
    assert selection.rejected == ((2, Fate.REJECTED),)


@pytest.mark.parametrize(
    ("ranking", "stalest"),
    [
        ("raw", "0:waited"),  # 10, 9, 11
        ("generation", "0:drifted-little"),  # 9, 7, 3
        # q: 0 of 8 below 0.001; 8 of 8 below 0.2; 4 of 8 below 0.04.
        # 1 + 0 * 9 = 1;  2 + 1 * 7 = 9;  8 + 0.5^4 * 3 = 8.1875
        ("effective", "0:drifted-much"),
    ],
)
def test_a_long_rollout_that_has_not_drifted_is_kept(ranking, stalest):
    groups = [
        make_group("0:drifted-little", (9, 1, 0.001)),
        make_group("0:drifted-much", (7, 2, 0.2)),
        make_group("0:waited", (3, 8, 0.04)),
    ]
    selection, _ = select(
        make_pace(ranking=ranking), groups, needed=2, state=PaceState(drift=WINDOW)
    )
    assert uids_of(selection, groups)[1] == [stalest]
    assert selection.scores == (1.0, 9.0, 8.1875)  # whatever ranks


def test_effective_ranking_keeps_waiting_in_full():
    groups = [make_group("0:a", (0, 5, 0.001)), make_group("0:b", (4, 4, 0.001))]
    state = PaceState(drift=WINDOW)
    assert rejected_uids(make_pace(), groups, needed=1, state=state) == ["0:a"]
    assert rejected_uids(make_pace(ranking="raw"), groups, needed=1, state=state) == ["0:b"]
    assert rejected_uids(make_pace(ranking="generation"), groups, needed=1, state=state) == ["0:b"]


def test_a_group_is_judged_by_the_mean_or_by_its_worst():
    groups = [
        make_group("0:even", (0, 5, None), (0, 5, None)),  # mean 5, max 5
        make_group("0:uneven", (0, 1, None), (0, 8, None)),  # mean 4.5, max 8
    ]
    assert rejected_uids(make_pace(), groups, needed=1) == ["0:even"]
    assert rejected_uids(make_pace(group_score="max"), groups, needed=1) == ["0:uneven"]


def test_a_trajectory_without_a_score_counts_in_full_or_as_not_drifted():
    groups = [make_group("0:a", (4, 1, None)), make_group("0:b", (4, 1, 0.05))]
    state = PaceState(drift=WINDOW)
    # weights: 1 and 0.625^4
    assert rejected_uids(make_pace(), groups, needed=1, state=state) == ["0:a"]
    # weights: 0 and 0.625^4
    assert rejected_uids(make_pace(no_score="zero"), groups, needed=1, state=state) == ["0:b"]


def test_of_equally_stale_groups_the_one_that_waited_longer_leaves():
    groups = [make_group("0:1", (3, 2, None)), make_group("0:2", (1, 4, None))]
    assert rejected_uids(make_pace(), groups, needed=1) == ["0:2"]


@pytest.mark.parametrize(("older", "younger"), [("0:9", "0:10"), ("0:12", "1:3"), ("9:1", "10:0")])
def test_of_equal_groups_the_older_prompt_leaves(older, younger):
    for order in ((older, younger), (younger, older)):
        groups = [make_group(uid, (1, 2, None)) for uid in order]
        assert rejected_uids(make_pace(), groups, needed=1) == [older]


def test_the_policy_keeps_the_guard_itself_at_selection():
    policy = make_pace(budget=RejectionBudget(8, reserve_groups=1))
    groups = [make_group(f"0:{i}", (0, i, None)) for i in range(5)]
    selection, _ = select(policy, groups, needed=3)  # 5 - 3 - 1 = 1 of the 2 that are asked for
    assert selection.admitted == (0, 1, 2)
    assert selection.rejected == ((3, Fate.REJECTED),)


TRAJECTORIES = st.tuples(
    st.integers(0, 6).map(lambda n: n / 2),
    st.integers(0, 4),
    st.none() | st.integers(0, 5).map(lambda n: n / 10),
)
GROUPS = st.lists(st.lists(TRAJECTORIES, min_size=1, max_size=3), min_size=1, max_size=10).map(
    lambda all_parts: [make_group(f"0:{i}", *parts) for i, parts in enumerate(all_parts)]
)
SETTINGS = st.fixed_dictionaries(
    {
        "ranking": st.sampled_from(["effective", "raw", "generation"]),
        "group_score": st.sampled_from(["mean", "max"]),
        "no_score": st.sampled_from(["raw", "zero"]),
        "gamma": st.sampled_from([0.0, 1.0, 4.0]),
    }
)


@given(GROUPS, SETTINGS, st.data(), st.randoms(use_true_random=False))
def test_the_order_of_the_candidates_does_not_change_who_leaves(groups, kwargs, data, rng):
    needed = data.draw(st.integers(1, len(groups)))
    policy, state = make_pace(**kwargs), PaceState(drift=WINDOW)
    shuffled = rng.sample(groups, len(groups))
    rejected = rejected_uids(policy, groups, needed=needed, state=state)
    assert len(rejected) == len(groups) - needed
    assert set(rejected_uids(policy, shuffled, needed=needed, state=state)) == set(rejected)


@given(GROUPS, SETTINGS, st.data())
def test_exactly_what_is_needed_is_admitted_and_no_rejected_group_is_fresher(groups, kwargs, data):
    needed = data.draw(st.integers(1, len(groups)))
    policy = make_pace(**{**kwargs, "ranking": "effective"})
    selection, _ = select(policy, groups, needed=needed, state=PaceState(drift=WINDOW))
    gone = [i for i, _ in selection.rejected]
    assert sorted([*selection.admitted, *gone]) == list(range(len(groups)))
    assert list(selection.admitted) == sorted(selection.admitted)
    assert len(selection.admitted) == needed
    if gone:
        kept = max(selection.scores[i] for i in selection.admitted)
        assert min(selection.scores[i] for i in gone) >= kept - 1e-12


@given(GROUPS, st.data())
def test_gamma_zero_ranks_by_raw_staleness(groups, data):
    needed = data.draw(st.integers(1, len(groups)))
    state = PaceState(drift=WINDOW)
    sharp, raw = make_pace(gamma=0.0), make_pace(ranking="raw")
    expected = rejected_uids(raw, groups, needed=needed, state=state)
    assert rejected_uids(sharp, groups, needed=needed, state=state) == expected


@given(GROUPS, st.data())
def test_without_any_drift_score_effective_ranks_by_raw_staleness(groups, data):
    needed = data.draw(st.integers(1, len(groups)))
    expected = rejected_uids(make_pace(ranking="raw"), groups, needed=needed)
    assert rejected_uids(make_pace(), groups, needed=needed) == expected


# --- memory --------------------------------------------------------------------------------------


def test_percentiles_are_read_before_the_scores_of_the_draw_enter():
    policy = make_pace()  # a minimum of 4
    groups = [make_group(f"0:{i}", (2, 1, 0.1 * i)) for i in range(4)]
    first, state = select(policy, groups, needed=3)
    assert first.scores == (3, 3, 3, 3)  # no basis yet: weight 1
    assert sorted(state.drift) == pytest.approx([0.0, 0.1, 0.2, 0.3])
    second, state = select(policy, [make_group("0:9", (2, 1, 0.9))], needed=1, state=state)
    assert second.scores == (3,)  # above all four: weight 1
    third, _ = select(policy, [make_group("0:8", (2, 1, 0.05))], needed=1, state=state)
    assert third.scores == (pytest.approx(1 + (1 / 5) ** 4 * 2),)  # one of five is below


def test_scores_of_the_admitted_and_the_rejected_enter_once_and_no_others():
    policy = make_pace(aging_limit=1)
    aged = PaceState(rejections={"1": 1, "2": 1})
    groups = [
        make_group("1:0", (1, 1, 0.5), (1, 1, None)),
        make_group("1:1", (1, 1, 0.6)),
        make_group("1:2", (1, 1, 0.7)),
    ]
    selection, state = policy.select(
        groups, needed=1, version=VERSION, occupancy=3, budget=2, state=aged
    )
    # 1:0 leaves; one of the two that have aged is enough, the other waits in the pool
    assert uids_of(selection, groups) == (["1:1"], ["1:0"])
    assert sorted(state.drift) == [0.5, 0.6]


def test_only_the_beginning_of_a_draw_moves_the_average():
    policy = make_pace(budget=RejectionBudget(2, smoothing=0.5))
    groups = [make_group(f"0:{i}", (0, i, None)) for i in range(4)]
    budget, begun = policy.begin(needed=2, occupancy=8, state=None)
    assert budget == 1  # e = 0.75, rho = 0.375, 0.375 * 2 / 0.625 = 1.2
    assert begun.budget == BudgetState(ema=0.375, carry=pytest.approx(0.2), capped_draws=0)
    state = begun
    for _ in range(3):
        _, state = select(policy, groups, needed=2, state=state, occupancy=100)
        assert state.budget == begun.budget
    _, empty = policy.begin(needed=2, occupancy=0, state=state)  # e = 0 counts too
    assert empty.budget.ema == pytest.approx(0.1875)


def test_states_are_not_changed_in_place():
    policy = make_pace(aging_limit=3)
    before = PaceState(BudgetState(0.3, 0.1, 2), WINDOW, {"0": 1, "7": 2})
    copy = PaceState(BudgetState(0.3, 0.1, 2), WINDOW, {"0": 1, "7": 2})
    groups = [make_group(f"1:{i}", (1, 9 - i, 0.05)) for i in range(4)]
    policy.begin(needed=2, occupancy=30, state=before)
    select(policy, groups, needed=2, state=before)
    assert before == copy


def test_a_prompt_that_was_rejected_often_enough_is_admitted_next():
    policy, state = make_pace(aging_limit=2), None
    fates = []
    for epoch in range(6):
        # the same prompt is the stalest in each epoch
        groups = [make_group(f"{epoch}:7", (4, 5, None))]
        groups += [make_group(f"{epoch}:{i}", (0, 1, None)) for i in range(3)]
        selection, state = select(policy, groups, needed=3, state=state)
        fates.append("rejected" if f"{epoch}:7" in uids_of(selection, groups)[1] else "trained")
    # once trained on, it starts anew
    assert fates == ["rejected", "rejected", "trained"] * 2


@settings(max_examples=50)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 4), st.randoms(use_true_random=False))
def test_no_prompt_is_ever_rejected_more_often_in_a_row_than_the_limit(limit, needed, budget, rng):
    policy = make_pace(aging_limit=limit, budget=RejectionBudget(1))
    state, ready, in_a_row = None, [], dict.fromkeys(range(8), 0)
    for epoch in range(12):
        for index in rng.sample(range(8), 8):
            parts = (index % 3, rng.randint(0, 5), None)
            ready += [make_group(f"{epoch}:{index}", parts)]
        while len(ready) >= needed + budget:
            selection, state = policy.select(
                ready[: needed + budget],
                needed=needed,
                version=VERSION,
                occupancy=len(ready),
                budget=budget,
                state=state,
            )
            admitted, rejected = uids_of(selection, ready)
            assert len(admitted) == needed
            for uid in rejected:
                in_a_row[int(uid.partition(":")[2])] += 1
            assert max(in_a_row.values()) <= limit
            for uid in admitted:
                in_a_row[int(uid.partition(":")[2])] = 0
            gone = {*admitted, *rejected}
            ready = [group for group in ready if group.prompt.uid not in gone]


STATE = PaceState(BudgetState(0.3, 0.125, 7), WINDOW, {"12": 2, "7": 1})


def test_the_state_goes_through_json():
    policy = make_pace()
    text = json.dumps(policy.state_to_primitives(STATE))
    assert policy.state_from_primitives(json.loads(text)) == STATE


def test_the_state_goes_through_a_safe_checkpoint(tmp_path):
    policy = make_pace()
    torch.save(policy.state_to_primitives(STATE), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert policy.state_from_primitives(loaded) == STATE


def test_a_policy_without_a_past_starts_anew():
    policy = make_pace()
    assert policy.state_from_primitives(policy.state_to_primitives(None)) == PaceState()
    assert policy.state_from_primitives(None) == PaceState()
    for other in (AdmitAll(), MaxLag(1)):
        assert other.state_to_primitives("anything") is None
        assert other.state_from_primitives(STATE.to_primitives()) is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"ranking": "random"}, "ranking is 'random'"),
        ({"group_score": "min"}, "group_score is 'min'"),
        ({"no_score": "drop"}, "no_score is 'drop'"),
        ({"gamma": -1.0}, "gamma is -1.0"),
        ({"gamma": math.nan}, "gamma is nan"),
        ({"aging_limit": 0}, "aging_limit is 0"),
        ({"window_minimum": 9}, "window_minimum is 9"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        make_pace(**setting)


# --- in the pool ---------------------------------------------------------------------------------


def make_pool(policy, **hooks):
    hooks.setdefault("settle", lambda *_: None)
    return TrajectoryPool(policy, **hooks)


def test_a_draw_reports_the_scores_of_both_sides():
    settled = []
    policy = make_pace(budget=RejectionBudget(1, smoothing=1.0), gamma=1.0)
    pool = make_pool(policy, settle=lambda uid, fate, _: settled.append((uid, fate)))
    state = {"policy_state": PaceState(drift=WINDOW).to_primitives()}
    pool.load_state_dict(state, [], drawn=0)
    pool.put(make_group("0:0", (0, 6, 0.5), (0, 6, None)))  # 6
    pool.put(make_group("0:1", (4, 1, 0.05), (4, 1, 0.05)))  # 1 + 0.625 * 4 = 3.5
    groups, report = pool.draw(1, version=VERSION, timeout_seconds=0)
    assert [group.prompt.uid for group in groups] == ["0:1"]
    assert settled == [("0:0", Fate.REJECTED)]
    assert report.effective_staleness_versions == 3.5
    assert report.rejected_effective_staleness_versions == 6.0
    assert report.total_staleness_versions == 5.0
    assert report.rejected_waiting_staleness_versions == 6.0
    assert report.effective_staleness == (3.5,)
    assert report.rejected_effective_staleness == (6.0,)
    assert report.prefix_forgetting == (0.05, 0.05)
    assert report.rejected_prefix_forgetting == (0.5,)
    line = json.loads(json.dumps(report.as_json()))
    assert line["effective_staleness_versions"] == 3.5
    assert not {"effective_staleness", "prefix_forgetting", "rejected_prefix_forgetting"} & {*line}
    kept = pool.state_dict()["policy_state"]
    assert kept["drift"][-3:] == [0.05, 0.05, 0.5]


def test_a_draw_without_scores_reports_none():
    pool = make_pool(AdmitAll())
    pool.put(make_group("0:0", (0, 6, None)))
    _, report = pool.draw(1, version=VERSION, timeout_seconds=0)
    assert report.effective_staleness_versions is None
    assert report.rejected_effective_staleness_versions is None
    assert report.effective_staleness == report.prefix_forgetting == ()
    assert report.warning is None


def test_a_report_has_the_staleness_that_the_groups_have():
    pool = make_pool(make_pace(budget=RejectionBudget(1, smoothing=1.0)))
    groups = [make_group(f"0:{i}", (i / 2, i, None), (0, 2 * i, None)) for i in range(6)]
    for group in groups:
        pool.put(group)
    drawn, report = pool.draw(2, version=VERSION, timeout_seconds=0)
    assert report.staleness == tuple(s for g in drawn for s in group_staleness(g, VERSION))
    gone = [g for g in groups[:4] if g not in drawn]
    assert report.rejected_staleness == tuple(s for g in gone for s in group_staleness(g, VERSION))


def test_a_draw_that_had_to_wait_moves_the_average_once_and_rejects_nothing(monkeypatch):
    pool = make_pool(make_pace(budget=RejectionBudget(1, smoothing=0.5)))
    late = [make_group(f"0:{i}", (0, 0, None)) for i in range(9)]
    pool.put(late.pop())
    pool.put(late.pop())

    def wait_for_one(condition, timeout):  # the next group arrives while the draw waits
        pool.put(late.pop())

    monkeypatch.setattr(threading.Condition, "wait", wait_for_one)
    groups, report = pool.draw(4, version=VERSION, timeout_seconds=20)
    assert len(late) == 5
    assert len(groups) == 4
    assert report.budget_groups == report.rejected_groups == 0
    # e = 1 - 1/2 at the beginning; not again when the third and the fourth arrived
    assert pool.state_dict()["policy_state"]["budget"]["ema"] == 0.25


@settings(max_examples=50)
@given(st.integers(1, 6), st.integers(0, 30), st.integers(0, 20), st.integers(0, 3))
def test_a_draw_delivers_whenever_the_pool_can(needed, ready, seed, reserve):
    rng = random.Random(seed)
    budget = RejectionBudget(2, smoothing=1.0, reserve_groups=reserve)
    pool = make_pool(make_pace(budget=budget))
    for i in range(ready):
        pool.put(make_group(f"0:{i}", (rng.randint(0, 3), rng.randint(0, 3), None)))
    for _ in range(ready // needed):
        if len(pool) < needed:
            break
        before = len(pool)
        groups, report = pool.draw(needed, version=VERSION, timeout_seconds=0)
        assert len(groups) == needed
        assert len(pool) == before - needed - report.rejected_groups
        assert report.rejected_groups == report.budget_groups
        assert len(pool) >= reserve or report.rejected_groups == 0


def test_the_staleness_kept_by_a_trajectory_is_that_of_its_tokens():
    trajectory = make_trajectory([3, 3, 4, 5], completed_at=6)
    group = TrajectoryGroup(make_prompt("0:0"), (trajectory,))
    expected = decompose([3, 3, 4, 5], completed_at=6, consumed_at=9)
    assert group_staleness(group, 9) == [expected]
    with pytest.raises(ValueError, match="completed at version 6, after it is consumed at 5"):
        group_staleness(group, 5)


def test_the_state_of_the_budget_is_made_of_numbers():
    assert asdict(BudgetState(0.5, 0.25, 3)) == {"ema": 0.5, "carry": 0.25, "capped_draws": 3}
