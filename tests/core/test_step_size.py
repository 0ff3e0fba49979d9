"""Step sizes: golden numbers, the reference, and order invariance."""

import math

import pytest
import reference_corrections as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pace_lightning.core.step_size import (
    effective_sample_size,
    ess_scale,
    largest_rate,
)


def logs(ratios):
    return torch.tensor(ratios, dtype=torch.float64).log()


def test_effective_sample_size_by_hand():
    # (1 + 1 + 1 + 5)^2 / (1 + 1 + 1 + 25) = 64 / 28
    assert effective_sample_size(logs([1.0, 1.0, 1.0, 5.0])).item() == pytest.approx(2.285714)
    # capped at 2: 25 / 7
    capped = effective_sample_size(logs([1.0, 1.0, 1.0, 5.0]), ratio_cap=2.0)
    assert capped.item() == pytest.approx(3.571429)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 0.755929),  # sqrt(2.285714 / 4) = sqrt(0.571429)
        ({"rule": "linear"}, 0.571429),
        ({"base": 0.8}, 0.845154),  # sqrt(0.714286)
        ({"base": 0.5}, 1.0),
        ({"ratio_cap": 2.0}, 0.944911),  # sqrt(25 / 28)
    ],
)
def test_ess_scale_by_hand(values, expected):
    assert ess_scale(logs([1.0, 1.0, 1.0, 5.0]), **values) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("log_ratio", [0.0, 1.7, -3.0])
def test_equal_ratios_leave_the_rate(log_ratio):
    assert ess_scale(torch.full((64,), log_ratio)) == pytest.approx(1.0, abs=1e-6)
    assert ess_scale(torch.full((64,), log_ratio), eps=0.0) <= 1.0


def test_tiny_ratios_stop_the_step_unless_eps_is_zero():
    # 64 ratios of exp(-20): sum of squares 64 exp(-40) = 2.7e-16, far below eps = 1e-8
    assert ess_scale(torch.full((64,), -50.0)) == pytest.approx(
        math.sqrt(64 * math.exp(-40) / 1e-8), rel=1e-4
    )
    assert ess_scale(torch.full((64,), -50.0), eps=0.0) == pytest.approx(1.0)


@settings(max_examples=50, deadline=None)
@given(
    ratios=st.lists(st.floats(-40, 40), min_size=1, max_size=30),
    cap=st.sampled_from([None, 8.0]),
    seed=st.integers(0, 2**31),
)
def test_agrees_with_the_reference_in_any_order(ratios, cap, seed):
    flat = torch.tensor(ratios, dtype=torch.float64)
    result = effective_sample_size(flat, ratio_cap=cap)
    expected = reference.effective_sample_size(ratios, cap)
    assert result.item() == pytest.approx(expected, rel=1e-9)
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed))
    assert effective_sample_size(flat[order], ratio_cap=cap) == result
    assert 0 <= ess_scale(flat, ratio_cap=cap) <= 1


def test_extreme_ratios_stay_finite():
    # one ratio dominates: ESS 1 of 4
    assert ess_scale(torch.tensor([1e3, 0.0, -1e3, 1.0])) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("lag", "stale", "remaining", "steps", "expected"),
    [
        (1, 8e-6, None, 1, 8e-6),  # c / S
        (4, 8e-6, None, 1, 2e-6),
        (16, 8e-6, None, 1, 5e-7),
        (0, 8e-6, None, 1, math.inf),
        (0.25, 8e-6, None, 1, 32e-6),
        (9, None, 1e-3, 2000, 5e-7),  # B / steps
        (4, 8e-6, 1e-3, 2000, 5e-7),  # min(2e-6, 5e-7)
        (4, 8e-6, 1e-3, 100, 2e-6),  # min(2e-6, 1e-5)
        (4, 8e-6, -1e-9, 100, 0.0),
        (4, None, None, 100, math.inf),
    ],
)
def test_the_largest_rate_by_hand(lag, stale, remaining, steps, expected):
    found = largest_rate(
        mean_lag_versions=lag,
        stale_budget=stale,
        remaining_budget=remaining,
        remaining_steps=steps,
    )
    assert found == pytest.approx(expected)


def test_rates_that_follow_what_is_left_never_sum_to_more_than_the_budget():
    spent = 0.0
    for step, wanted in enumerate([3.0, 0.1, 5.0, 5.0]):
        limit = largest_rate(
            mean_lag_versions=3, remaining_budget=4 - spent, remaining_steps=4 - step
        )
        spent += min(wanted, limit)
    # 4/4 of 3; 0.1; (4 - 1.1)/2; what is left
    assert spent == pytest.approx(1 + 0.1 + 1.45 + 1.45)


ZERO = torch.zeros(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: effective_sample_size(torch.zeros(0)), r"shape \(0,\)"),
        (lambda: effective_sample_size(ZERO * float("nan")), "3 NaN"),
        (lambda: effective_sample_size(ZERO, eps=-1.0), "eps is -1.0"),
        (lambda: effective_sample_size(ZERO, ratio_cap=0.0), "ratio_cap 0.0"),
        (lambda: ess_scale(ZERO, rule="cubic"), "unknown rule 'cubic'"),
        (lambda: ess_scale(ZERO, base=0.0), "base is 0.0"),
        (lambda: ess_scale(ZERO, base=1.5), "base is 1.5"),
        (lambda: largest_rate(mean_lag_versions=-1), "mean_lag_versions is -1"),
        (lambda: largest_rate(mean_lag_versions=math.nan), "mean_lag_versions is nan"),
        (lambda: largest_rate(mean_lag_versions=1, remaining_steps=0), "remaining_steps 0"),
    ],
)
def test_wrong_inputs_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
