"""Advantages: golden numbers, the float64 reference, and what must be refused."""

import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pace_lightning.core.advantages import (
    ADVANTAGES,
    group_advantages,
    is_zero_variance,
    soft_overlong_penalty,
)

METHODS = sorted(ADVANTAGES)
REWARDS = st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=16)


def advantages_of(rewards, method, **kwargs):
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), method=method, **kwargs)


@pytest.mark.parametrize(
    ("method", "kwargs", "expected"),
    [
        # mean 1/4; variance (9/16 + 3/16) / 3 = 1/4; 0.75 / 0.5 and -0.25 / 0.5
        ("grpo", {"std_ddof": 1, "eps": 0.0}, [1.5, -0.5, -0.5, -0.5]),
        # the default eps of 1e-6: 0.75 / 0.500001 and -0.25 / 0.500001
        ("grpo", {"std_ddof": 1}, [1.499997, -0.499999, -0.499999, -0.499999]),
        # variance (12/16) / 4 = 3/16, deviation 0.4330127; 0.75 / 0.4330127 = sqrt(3)
        ("grpo", {"std_ddof": 0, "eps": 0.0}, [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
        ("dr_grpo", {}, [0.75, -0.25, -0.25, -0.25]),
        # 1 - 0; 0 - (1 + 0 + 0) / 3
        ("rloo", {}, [1.0, -0.3333333, -0.3333333, -0.3333333]),
    ],
)
def test_one_right_answer_of_four(method, kwargs, expected):
    result = advantages_of([1.0, 0.0, 0.0, 0.0], method, **kwargs)
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx(expected, abs=2e-7)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ddof", [0, 1])
@settings(max_examples=40, deadline=None)
@given(rewards=REWARDS)
def test_agrees_with_the_reference(method, ddof, rewards):
    result = advantages_of(rewards, method, std_ddof=ddof)
    expected = reference.advantages(rewards, method, ddof)
    assert result.tolist() == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=40, deadline=None)
@given(reward=st.floats(-1e6, 1e6), size=st.integers(2, 33))
def test_equal_rewards_give_exactly_zero(method, reward, size):
    assert advantages_of([reward] * size, method).tolist() == [0.0] * size


def test_a_mean_that_rounds_does_not_make_an_advantage():
    # fl(0.1 + 0.1 + 0.1) / 3 is 0.10000000000000002 in float64; / (0 + 1e-6) it would be -1.4e-11
    rewards = torch.tensor([0.1] * 3, dtype=torch.float64)
    assert (rewards - rewards.mean()).abs().max() > 0
    assert group_advantages(rewards, method="grpo").tolist() == [0.0] * 3


def test_small_differences_on_a_large_reward_survive():
    # in float32, 1e6 + 0.01 - 1e6 would be 0 or 0.0625
    assert advantages_of([1e6 + 0.01, 1e6], "dr_grpo").tolist() == pytest.approx(
        [0.005, -0.005], abs=1e-9
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_single_response_has_no_baseline(method):
    with pytest.raises(ValueError, match=r"group of 1 has no baseline.*at least 2"):
        advantages_of([1.0], method)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("method", METHODS)
def test_rewards_that_are_not_numbers_are_refused(method, bad):
    with pytest.raises(ValueError, match="not all finite"):
        advantages_of([1.0, bad], method)
    with pytest.raises(ValueError, match="not all finite"):
        advantages_of([bad, bad], method)


def test_advantages_beyond_float32_are_refused():
    with pytest.raises(ValueError, match="do not fit into float32"):
        advantages_of([1e39, 0.0, 0.0], "dr_grpo")


@pytest.mark.parametrize(
    ("rewards", "kwargs", "message"),
    [
        ([1.0, 0.0], {"method": "grop"}, r"'grop'; choose one of \['dr_grpo', 'grpo', 'rloo'\]"),
        ([1.0, 0.0], {"method": "grpo", "std_ddof": 2}, "std_ddof is 2"),
        ([1.0, 0.0], {"method": "grpo", "eps": -1.0}, "eps is -1.0"),
        ([[1.0, 0.0]], {"method": "grpo"}, r"shape \(1, 2\)"),
    ],
)
def test_wrong_settings_are_refused(rewards, kwargs, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.tensor(rewards), **kwargs)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        # the slope runs from 20480 - 4096 = 16384 to 20480
        (0, 0.0),
        (16384, 0.0),
        (16385, -1 / 4096),
        (18432, -0.5),  # 2048 / 4096
        (20480, -1.0),
        (30000, -1.0),
    ],
)
def test_overlong_penalty_of_dapo(num_tokens, expected):
    penalty = soft_overlong_penalty(num_tokens, max_tokens=20480, cache_tokens=4096)
    assert penalty == expected
    doubled = soft_overlong_penalty(num_tokens, max_tokens=20480, cache_tokens=4096, factor=2.0)
    assert doubled == 2 * expected


@pytest.mark.parametrize(
    ("num_tokens", "kwargs"),
    [
        (10, {"max_tokens": 100, "cache_tokens": 0}),
        (10, {"max_tokens": 100, "cache_tokens": 101}),
        (-1, {"max_tokens": 100, "cache_tokens": 20}),
        (10, {"max_tokens": 100, "cache_tokens": 20, "factor": -1.0}),
    ],
)
def test_an_impossible_penalty_is_refused(num_tokens, kwargs):
    with pytest.raises(ValueError, match=r"cache_tokens|factor"):
        soft_overlong_penalty(num_tokens, **kwargs)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1.0], True),
        ([0.0, 0.0, 0.0], True),
        ([0.0, 0.0, 1.0], False),
        ([0.3, 0.1 + 0.2], False),  # 0.1 + 0.2 is 0.30000000000000004
        ([math.nan, math.nan], False),
    ],
)
def test_zero_variance_is_exact_equality(scores, expected):
    assert is_zero_variance(scores) is expected


def test_no_scores_is_an_error():
    with pytest.raises(ValueError, match="0 scores"):
        is_zero_variance([])
