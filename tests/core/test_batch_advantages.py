"""Advantages of the batch: golden numbers, the float64 reference, partition invariance."""

import math

import numpy as np
import pytest
import reference_corrections as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pace_lightning.core.advantages import group_advantages
from pace_lightning.core.batch_advantages import (
    CENTERS,
    WEIGHTINGS,
    opo_advantages,
    opob_advantages,
    opob_baseline,
    reinforce_plus_plus_baseline,
    reinforce_plus_plus_returns,
    score_square_norm_proxy,
    whiten,
    whitening_statistics,
)

SEEDS = st.integers(0, 2**31)
NAN = float("nan")


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


# --- OPO -----------------------------------------------------------------------------------------


def test_opo_by_hand():
    # (100 * 1 + 300 * 0 + 100 * 0.5) / 500 = 0.3
    result = opo_advantages(tensor([1.0, 0.0, 0.5]), torch.tensor([100, 300, 100]))
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx([0.7, -0.3, 0.2])


def test_opo_with_equal_lengths_subtracts_the_mean():
    rewards = tensor([1.0, 0.0, 0.0, 0.3])
    expected = group_advantages(rewards, method="dr_grpo").tolist()
    assert opo_advantages(rewards, torch.full((4,), 17)).tolist() == pytest.approx(expected)


# --- OPOB ----------------------------------------------------------------------------------------

REWARDS = [1.0, 0.0, 1.0, 0.0]
LOG_RATIOS = [0.0, 0.0, 0.0, math.log(5)]
SQUARES = [1.0, 4.0, 1.0, 1.0]  # norms 1, 2, 1, 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 0.0645161),  # W = 1, 4, 1, 25: 2 / 31
        ({"weighting": "repo"}, 0.00316957),  # W = 1, 4, 1, 25 * 25: 2 / 631
        ({"weighting": "repo", "ratio_cap": 2.0}, 0.0188679),  # W = 1, 4, 1, 25 * 4: 2 / 106
        ({"ratio_cap": 2.0}, 0.2),  # W = 1, 4, 1, 4: 2 / 10
        ({"lengths": tensor([1, 2, 1, 5])}, 0.5),  # W = 1, 1, 1, 1
        ({"center": "median"}, 0.0),  # weight 29 of 31 is at 0
        ({"center": "winsorized"}, 0.0645161),  # 0 and 1 are the quantiles: 29/31 < 0.95
    ],
)
def test_opob_by_hand(values, expected):
    baseline = opob_baseline(tensor(REWARDS), tensor(LOG_RATIOS), tensor(SQUARES), **values)
    assert baseline.item() == pytest.approx(expected, rel=1e-5)


def test_winsorizing_cuts_a_reward_of_little_weight():
    # W = 97, 2, 1 in the order of rewards 0, 1, 100: 95 % of 100 is reached at 0 already
    rewards, flat, squares = tensor([100.0, 0.0, 1.0]), torch.zeros(3), tensor([1.0, 97.0, 2.0])
    assert opob_baseline(rewards, flat, squares, center="winsorized").item() == 0.0
    # W = 94, 5, 1: at 1, so (94 * 0 + 5 + 1) / 100
    squares = tensor([1.0, 94.0, 5.0])
    assert opob_baseline(rewards, flat, squares, center="winsorized").item() == pytest.approx(0.06)
    assert opob_baseline(rewards, flat, squares).item() == pytest.approx(1.05)


def test_opob_advantages_by_hand():
    arguments = (tensor(REWARDS), tensor(LOG_RATIOS), tensor(SQUARES))
    b = 2 / 31
    assert opob_advantages(*arguments).tolist() == pytest.approx([1 - b, -b, 1 - b, -b])
    # deviation (ddof 0) of 1, 0, 1, 0 is 1/2
    result = opob_advantages(*arguments, std_normalize=True)
    assert result.tolist() == pytest.approx([2 - 2 * b, -2 * b, 2 - 2 * b, -2 * b])


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_opob_with_equal_weights_is_the_mean(weighting):
    same = (torch.full((4,), 0.3), torch.full((4,), 2.0))
    assert opob_baseline(tensor(REWARDS), *same, weighting=weighting).item() == pytest.approx(0.5)


def test_opob_without_any_gradient_is_the_mean():
    assert opob_baseline(tensor(REWARDS), tensor(LOG_RATIOS), torch.zeros(4)).item() == 0.5


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("center", CENTERS)
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("by_length", [False, True])
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_opob_agrees_with_the_reference(weighting, center, cap, by_length, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(9, generator=generator, dtype=torch.float64)
    log_ratios = 2 * torch.randn(9, generator=generator, dtype=torch.float64)
    squares = torch.rand(9, generator=generator, dtype=torch.float64) + 0.01
    lengths = torch.randint(1, 5, (9,), generator=generator) if by_length else None
    result = opob_baseline(
        rewards,
        log_ratios,
        squares,
        weighting=weighting,
        center=center,
        ratio_cap=cap,
        lengths=lengths,
    )
    expected = reference.opob(
        rewards.tolist(), log_ratios.tolist(), squares.tolist(), weighting, center, cap,
        lengths.tolist() if by_length else None,
    )  # fmt: skip
    assert result.item() == pytest.approx(expected, rel=1e-9)


def test_opob_minimizes_the_variance_of_the_weighted_gradient():
    """b is the minimum of sum of w^2 ||s||^2 (R - b)^2, not only near it."""
    b = opob_baseline(tensor(REWARDS), tensor(LOG_RATIOS), tensor(SQUARES)).requires_grad_()
    w2 = tensor(LOG_RATIOS).exp().square()
    second_moment = (w2 * tensor(SQUARES) * (tensor(REWARDS) - b).square()).sum()
    (slope,) = torch.autograd.grad(second_moment, b)
    assert slope.item() == pytest.approx(0.0, abs=1e-12)


def test_extreme_ratios_leave_a_finite_baseline():
    log_ratios = tensor([1e3, -1e3, 0.0, 5.0])
    for weighting in WEIGHTINGS:
        baseline = opob_baseline(
            tensor([1.0, 0.0, 0.3, 0.0]), log_ratios, tensor(SQUARES), weighting=weighting
        )
        assert 0.99 < baseline.item() <= 1.0  # the first response dominates


def test_the_proxy_is_the_squared_gradient_with_respect_to_the_logits():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((3, 5, 7), generator=generator, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 7, (3, 5, 1), generator=generator)
    mask = torch.rand((3, 5), generator=generator) < 0.6
    logprobs = logits.log_softmax(dim=-1)
    taken = logprobs.gather(-1, tokens)[..., 0]
    (gradient,) = torch.autograd.grad((taken * mask).sum(), logits)
    expected = gradient.square().sum(dim=(1, 2))
    sums = logprobs.exp().square().sum(dim=-1)
    hidden = taken.detach().masked_fill(~mask, NAN)
    result = score_square_norm_proxy(hidden, sums.detach().masked_fill(~mask, NAN), mask)
    torch.testing.assert_close(result, expected)


# --- REINFORCE++ ---------------------------------------------------------------------------------


def test_returns_by_hand():
    mask = torch.tensor([[False, True, True, False, True, False]])
    kl = tensor([[NAN, 0.1, 0.2, NAN, 0.4, NAN]])
    # rewards of the three trained tokens: -0.05, -0.1, 2 - 0.2 = 1.8; gamma 0.5
    # 1.8; -0.1 + 0.9 = 0.8; -0.05 + 0.4 = 0.35
    result = reinforce_plus_plus_returns(tensor([2.0]), mask, gamma=0.5, kl=kl, kl_coefficient=0.5)
    assert result[0].tolist() == pytest.approx([0, 0.35, 0.8, 0, 1.8, 0])


def random_rows(seed, num_rows=7, width=6):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(num_rows, generator=generator, dtype=torch.float64)
    mask = torch.rand((num_rows, width), generator=generator) < 0.6
    mask[0], mask[1] = False, True
    kl = torch.rand((num_rows, width), generator=generator, dtype=torch.float64)
    return rewards, mask, kl


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS, gamma=st.sampled_from([1.0, 0.9, 0.0]))
def test_returns_agree_with_the_reference(seed, gamma):
    rewards, mask, kl = random_rows(seed)
    result = reinforce_plus_plus_returns(rewards, mask, gamma=gamma, kl=kl, kl_coefficient=0.2)
    expected = reference.token_returns(rewards.tolist(), mask.numpy(), gamma, kl.numpy(), 0.2)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-6, atol=1e-7)


def test_without_discount_and_penalty_each_token_returns_the_reward():
    rewards, mask, _ = random_rows(4)
    result = reinforce_plus_plus_returns(rewards, mask)
    assert torch.equal(result, torch.where(mask, rewards[:, None], 0.0).float())


def test_the_baseline_form_centers_by_group():
    mask = torch.tensor([[True, True], [True, False], [True, True], [False, False], [True, True]])
    # group 4: 1, 0 and 0.5 (the row without a trained token counts), mean 0.5; group 2: equal
    result = reinforce_plus_plus_baseline(
        tensor([1.0, 0.7, 0.0, 0.5, 0.7]), torch.tensor([4, 2, 4, 4, 2]), mask
    )
    assert result.tolist() == [[0.5, 0.5], [0.0, 0.0], [-0.5, -0.5], [0.0, 0.0], [0.0, 0.0]]


# --- whitening -----------------------------------------------------------------------------------


def test_whitening_by_hand():
    # 1, 2, 3 and 6: mean 3, unbiased variance (4 + 1 + 0 + 9) / 3 = 4.6666667, root 2.1602469
    values, mask = tensor([[1.0, NAN, 2.0], [3.0, 6.0, NAN]]), torch.tensor([[1, 0, 1], [1, 1, 0]])
    mask = mask.bool()
    result = whiten(values, mask, **whitening_statistics(values[mask]))
    assert result.dtype == torch.float32
    expected = [-0.9258201, 0, -0.4629100, 0, 1.3887301, 0]
    assert result.flatten().tolist() == pytest.approx(expected)


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS)
def test_whitening_agrees_with_the_reference(seed):
    _, mask, values = random_rows(seed)
    result = whiten(values, mask, **whitening_statistics(values[mask]))
    np.testing.assert_allclose(
        result.numpy(), reference.whitened(values.numpy(), mask.numpy()), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("parts", [[7], [2, 2, 2, 1], [1, 6]])
def test_whitening_does_not_depend_on_the_partition(parts):
    """1, 4 and 2 micro-batches or ranks, their tokens gathered in another order: the same bits."""
    rewards, mask, kl = random_rows(8)
    returns = reinforce_plus_plus_returns(rewards, mask, gamma=0.9, kl=kl, kl_coefficient=0.1)
    whole = whiten(returns, mask, **whitening_statistics(returns[mask]))
    pieces = list(zip(returns.split(parts), mask.split(parts), strict=True))
    gathered = torch.cat([values[m] for values, m in reversed(pieces)])
    statistics = whitening_statistics(gathered)
    result = torch.cat([whiten(values, m, **statistics) for values, m in pieces])
    assert torch.equal(result, whole)


def test_whitening_statistics_do_not_depend_on_the_order():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5000, generator=generator)
    order = torch.randperm(5000, generator=generator)
    assert whitening_statistics(values) == whitening_statistics(values[order])


def test_padding_changes_no_bit():
    rewards, mask, kl = random_rows(9)
    pad = torch.nn.functional.pad
    wide_mask, wide_kl = pad(mask, (2, 3)), pad(kl.masked_fill(~mask, NAN), (2, 3), value=NAN)
    settings_ = {"gamma": 0.9, "kl_coefficient": 0.1}
    plain = reinforce_plus_plus_returns(rewards, mask, kl=kl, **settings_)
    wide = reinforce_plus_plus_returns(rewards, wide_mask, kl=wide_kl, **settings_)
    assert torch.equal(wide[:, 2:-3], plain)
    statistics = whitening_statistics(wide[wide_mask])
    assert statistics == whitening_statistics(plain[mask])
    whitened = whiten(wide.masked_fill(~wide_mask, NAN), wide_mask, **statistics)
    assert torch.equal(whitened[:, 2:-3], whiten(plain, mask, **statistics))


@pytest.mark.parametrize("value", [0.1, -7.3, 1 / 3])
def test_equal_values_whiten_to_exactly_zero(value):
    values = torch.full((3, 33), value, dtype=torch.float64)
    mask = torch.ones_like(values, dtype=torch.bool)
    assert not whiten(values, mask, **whitening_statistics(values[mask])).any()


@pytest.mark.parametrize("value", [0.1, -7.3, 1 / 3])
def test_equal_rewards_give_exactly_zero(value):
    rewards, size = torch.full((7,), value, dtype=torch.float64), 7
    weights = torch.rand(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids, mask = torch.zeros(size, dtype=torch.int64), torch.ones((size, 2), dtype=torch.bool)
    assert not opo_advantages(rewards, weights).any()
    assert not opob_advantages(rewards, weights, weights, std_normalize=True).any()
    assert not reinforce_plus_plus_baseline(rewards, ids, mask).any()


# --- refusals ------------------------------------------------------------------------------------

ONES, MASK = torch.ones(2), torch.ones((2, 3), dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: opo_advantages(ONES, torch.ones(3)), r"lengths \(3,\)"),
        (lambda: opo_advantages(ONES, torch.zeros(2)), r"lengths are \[0.0, 0.0\]"),
        (lambda: opo_advantages(ONES / 0, ONES), "not all finite"),
        (lambda: opob_baseline(ONES, ONES, -ONES), "squared norms are"),
        (lambda: opob_baseline(ONES, ONES, ONES * NAN), "squared norms are"),
        (lambda: opob_baseline(ONES, torch.ones(3), ONES), r"log_ratios \(3,\)"),
        (lambda: opob_baseline(ONES, ONES, ONES, weighting="code"), "weighting is 'code'"),
        (lambda: opob_baseline(ONES, ONES, ONES, center="mode"), "center 'mode'"),
        (lambda: opob_baseline(ONES, ONES, ONES, ratio_cap=0.0), "ratio_cap is 0.0"),
        (lambda: opob_baseline(ONES, ONES, ONES, lengths=ONES * 0), "lengths are"),
        (lambda: opob_advantages(ONES, ONES, ONES, eps=-1.0), "eps is -1.0"),
        (lambda: score_square_norm_proxy(MASK[:1].float(), MASK.float(), MASK), r"\(1, 3\)"),
        (lambda: reinforce_plus_plus_returns(ONES, MASK, gamma=1.1), "gamma is 1.1"),
        (lambda: reinforce_plus_plus_returns(ONES, MASK, kl_coefficient=0.1), "kl is None"),
        (lambda: reinforce_plus_plus_returns(torch.ones(3), MASK), r"rewards has shape \(3,\)"),
        (lambda: reinforce_plus_plus_returns(ONES, MASK.float()), "dtype torch.float32"),
        (lambda: reinforce_plus_plus_baseline(ONES, torch.ones(3), MASK), "group_ids has shape"),
        (lambda: whitening_statistics(torch.ones(1)), r"\(1,\)"),
        (lambda: whitening_statistics(ONES * NAN), "2 of 2 are not finite"),
        (lambda: whiten(MASK.float(), MASK, mean=ONES[0], variance=ONES[0], eps=0), "eps is 0"),
    ],
)
def test_wrong_inputs_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
