"""Heads with batch statistics: golden numbers, the float64 reference, order and partition."""

import math

import numpy as np
import pytest
import reference_heads as reference
import torch
from head_cases import random_batch, run_head, statistics_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pace_lightning.core.heads import HEADS, statistics_inputs
from pace_lightning.core.heads_batch import (
    bapo_statistics,
    m2po_keep,
    m2po_mask_statistics,
    m2po_statistics,
)
from pace_lightning.core.heads_sat import SAT_KERNELS, sat_bounds, sat_statistics
from pace_lightning.core.losses import aggregate

SEEDS = st.integers(0, 2**31)
WITH_STATISTICS = sorted(name for name, head in HEADS.items() if head.needs_prepass)


def flat(log_ratios, advantages=1.0):
    """Arguments of a statistics function: tokens with these log-ratios."""
    policy = torch.tensor(log_ratios, dtype=torch.float64)
    advantages = torch.as_tensor(advantages, dtype=torch.float64).expand(len(policy))
    return policy - 1.0, torch.full_like(policy, -1.0), advantages


def row(log_ratios, advantage):
    """One row of tokens with these log-ratios, all trained: arguments of a head."""
    policy, anchor, advantages = flat(log_ratios, advantage)
    mask = torch.ones(1, len(policy), dtype=torch.bool)
    return policy[None], anchor[None], advantages[None], mask


def items(statistics):
    return {name: value.item() for name, value in statistics.items()}


# --- M2PO ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("squares", "budget", "low", "high"),
    [
        # sorted .0001 .01 .04 .25, S = .16: capped sums .0004, .0301, .0901, .3001: k = 3, t = .2
        ([0.04, 0.01, 0.25, 0.0001], 0.04, math.exp(-0.2), math.exp(0.2)),
        # S = 1.25: .45, .73, 1.0, 1.78: k = 3, t = .5
        ([0.09, 0.16, 0.25, 0.64, 1.0], 0.25, math.exp(-0.5), math.exp(0.5)),
        # all equal: already the first capped sum is their sum: t = 0
        ([0.09, 0.09, 0.09], 0.04, 1.0, 1.0),
        # the mean is within the budget: no bounds
        ([0.09, 0.01, 0.01, 0.01], 0.04, 0.0, math.inf),
        ([], 0.04, 0.0, math.inf),
    ],
)
def test_m2po_bounds_by_hand(squares, budget, low, high):
    inputs = flat([math.sqrt(x) for x in squares])
    bounds = items(m2po_statistics(*inputs, budget=budget, min_clip_low=0.0, min_clip_high=0.0))
    assert bounds == pytest.approx({"ratio_low": low, "ratio_high": high})


@pytest.mark.parametrize(
    ("squares", "budget", "low", "high"),
    [
        # radii 1 - e^-.2 = .181269 and e^.2 - 1 = .221403 are below the minimum
        ([0.04, 0.01, 0.25, 0.0001], 0.04, 0.7, 1.5),
        # radii 1 - e^-.5 = .393469 and e^.5 - 1 = .648721 are above it
        ([0.09, 0.16, 0.25, 0.64, 1.0], 0.25, 0.606531, 1.648721),
        ([0.0], 0.04, 0.0, math.inf),
    ],
)
def test_m2po_bounds_are_widened_to_a_minimum(squares, budget, low, high):
    inputs = flat([math.sqrt(x) for x in squares])
    bounds = items(m2po_statistics(*inputs, budget=budget))
    assert bounds == pytest.approx({"ratio_low": low, "ratio_high": high}, rel=1e-6)


def test_m2po_counts_only_tokens_that_move_outward():
    # outward: .5 (A > 0) and -.1 (A < 0); .25 and .01 have mean .13 > .04, S = .08; k = 1, t = .1
    # with the .15 of A = 0: S = .12, capped sums .03, .055, .2825: t would be .15
    inputs = flat([0.5, -0.9, -0.1, 0.9, 0.15], [1.0, 1.0, -1.0, -1.0, 0.0])
    bounds = items(m2po_statistics(*inputs, min_clip_low=0.0, min_clip_high=0.0))
    assert bounds == pytest.approx({"ratio_low": math.exp(-0.1), "ratio_high": math.exp(0.1)})
    # d = 0 does not move: .0625 is above the budget, and half of it would not be
    bounds = items(m2po_statistics(*flat([0.25, 0.0]), min_clip_low=0.0, min_clip_high=0.0))
    assert bounds == {"ratio_low": 1.0, "ratio_high": 1.0}


def test_m2po_by_hand():
    # the bounds are .606531 and 1.648721: t = .5 as above; the last two tokens are clipped
    batch = row([0.3, 0.4, 0.5, 0.8, 1.0], 2.0)
    losses, gradient = run_head("m2po", *batch, budget=0.25)
    ratios = [math.exp(x) for x in (0.3, 0.4)]
    assert losses[0, :2].tolist() == pytest.approx([-2 * x for x in ratios])
    assert losses[0, 3:].tolist() == pytest.approx([-2 * 1.648721] * 2, rel=1e-6)
    assert gradient[0, :2].tolist() == pytest.approx([-2 * x for x in ratios])
    assert gradient[0, 3:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("squares", "budget", "limit"),
    [
        # mean .075025; without .25 it is .0167: the limit is halfway from .04 to .25
        ([0.04, 0.01, 0.25, 0.0001], 0.04, 0.145),
        # means .428, .285, .1667: two go
        ([0.09, 0.16, 0.25, 0.64, 1.0], 0.25, 0.445),
        # strict: a mean of exactly the budget is too much
        ([0.25, 0.25, 0.0625], 0.1875, 0.15625),
        # equals share their fate, though without one .25 the mean is .375 / 3 = .125 < .13
        ([0.0625, 0.0625, 0.25, 0.25], 0.13, 0.15625),
        # one stays whatever it is, and its equals
        ([0.25, 1.0], 0.04, 0.625),
        ([0.25, 0.25, 1.0], 0.04, 0.625),
        ([0.25, 0.25], 0.04, math.inf),
        ([0.01, 0.04], 0.04, math.inf),
        ([], 0.04, math.inf),
    ],
)
def test_m2po_mask_limit_by_hand(squares, budget, limit):
    inputs = flat([math.sqrt(x) for x in squares])
    result = items(m2po_mask_statistics(*inputs, budget=budget))
    assert result == pytest.approx({"square_limit": limit})


def test_m2po_mask_by_hand():
    # the token of d^2 = .25 is rejected; the others keep -A rho, without a clip
    batch = row([0.2, -0.1, 0.5, 0.01], -1.0)
    losses, gradient = run_head("m2po_mask", *batch)
    expected = [math.exp(0.2), math.exp(-0.1), 0.0, math.exp(0.01)]
    assert losses.flatten().tolist() == pytest.approx(expected)
    assert gradient.flatten().tolist() == pytest.approx(expected)


def test_m2po_mask_of_outward_tokens_leaves_the_others():
    # A < 0: outward are -.1 and -.3, mean .05 > .04; .5 is not even counted
    batch = row([0.5, -0.1, -0.3], -1.0)
    _, gradient = run_head("m2po_mask", *batch, candidates="outward")
    assert gradient.flatten().tolist() == pytest.approx([math.exp(0.5), math.exp(-0.1), 0.0])


@pytest.mark.parametrize("candidates", ["all", "outward"])
@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, budget=st.floats(0.001, 0.5))
def test_m2po_agrees_with_the_reference(candidates, seed, budget):
    policy, anchor, advantages, mask = random_batch(seed)
    distances = (policy - anchor)[mask].tolist()
    signs = advantages[mask].tolist()
    bounds = statistics_of("m2po", policy, anchor, advantages, mask, budget=budget)
    low, high = reference.m2po_bounds(distances, signs, budget, 0.3, 0.5)
    assert items(bounds) == pytest.approx({"ratio_low": low, "ratio_high": high}, rel=1e-12)

    chosen = {"budget": budget, "candidates": candidates}
    limit = statistics_of("m2po_mask", policy, anchor, advantages, mask, **chosen)
    kept = m2po_keep(policy, anchor, advantages, mask, candidates=candidates, **limit)
    moves = [d * a > 0 or candidates == "all" for d, a in zip(distances, signs, strict=True)]
    counted = [d for d, m in zip(distances, moves, strict=True) if m]
    expected = iter(reference.m2po_kept(counted, budget) if counted else [])
    assert kept[mask].tolist() == [next(expected) if m else True for m in moves]
    assert not kept[~mask].any()


# --- SAT -----------------------------------------------------------------------------------------


def test_the_quantile_is_interpolated():
    # position .9 x 9 = 8.1: .1 + .1 (.4 - .1); signs do not matter
    distances = [0.1, -0.02, 0.03, 0.05, -0.05, 0.06, -0.08, 0.01, 0.4, 0.1]
    assert items(sat_statistics(*flat(distances))) == pytest.approx({"log_ratio_scale": 0.13})
    assert items(sat_statistics(*flat(distances), quantile=1.0)) == {
        "log_ratio_scale": pytest.approx(0.4)
    }
    assert items(sat_statistics(*flat([]))) == {"log_ratio_scale": 0.0}


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, quantile=st.floats(0, 1))
def test_the_quantile_is_that_of_numpy(seed, quantile):
    batch = random_batch(seed)
    statistics = statistics_of("sat_dapo", *batch, quantile=quantile)
    distances = (batch[0] - batch[1])[batch[3]].abs().numpy()
    expected = np.quantile(distances, quantile)
    assert statistics["log_ratio_scale"].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("log_ratio", "kernel", "lower", "upper"),
    [
        (0.3, "hill", 0.8, 1.02),  # u = 3: c = 1 / 10
        (0.3, "hill_excess", 0.8, 1.04),  # u - 1 = 2: c = 1 / 5
        (0.3, "gaussian", 0.8, 1.0270671),  # c = e^-2 = .1353353
        (-0.3, "hill", 0.98, 1.2),
        (-0.3, "hill_excess", 0.96, 1.2),
        (0.2, "hill", 0.8, 1.04),  # u = 2: c = 1 / 5
        (0.1, "hill", 0.8, 1.2),  # not beyond q
        (-0.1, "gaussian", 0.8, 1.2),
        (0.0, "hill", 0.8, 1.2),
    ],
)
def test_sat_bounds_by_hand(log_ratio, kernel, lower, upper):
    bounds = sat_bounds(
        torch.tensor([log_ratio], dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.2,
        log_ratio_scale=torch.tensor(0.1, dtype=torch.float64),
        kernel=kernel,
    )
    assert [x.item() for x in bounds] == pytest.approx([lower, upper])


def test_a_quantile_of_zero_contracts_nothing():
    for kernel in SAT_KERNELS:
        lower, upper = sat_bounds(
            torch.tensor([-3.0, 0.0, 3.0]),
            clip_low=0.2,
            clip_high=0.28,
            log_ratio_scale=torch.tensor(0.0),
            kernel=kernel,
        )
        assert lower.tolist() == pytest.approx([0.8] * 3)
        assert upper.tolist() == pytest.approx([1.28] * 3)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"),
    [
        # q = .1; u = 1.5: c = 1 / 3.25: upper 1 + .2 / 3.25 = 1.0615385 < e^.15 = 1.1618
        (0.15, 1.0, -1.0615385, 0.0),  # plain grpo would not clip
        (0.15, -1.0, 1.1618342, 1.1618342),  # the way back keeps its gradient
        (-0.15, -1.0, 0.9384615, 0.0),
        (-0.15, 1.0, -0.8607080, -0.8607080),
        (0.05, 1.0, -1.0512711, -1.0512711),
    ],
)
def test_sat_grpo_by_hand(log_ratio, advantage, loss, gradient):
    statistics = {"log_ratio_scale": torch.tensor(0.1, dtype=torch.float64)}
    result = run_head("sat_grpo", *row([log_ratio], advantage), statistics=statistics)
    assert [x.item() for x in result] == pytest.approx([loss, gradient])


@pytest.mark.parametrize("kernel", SAT_KERNELS)
@pytest.mark.parametrize("name", ["sat_grpo", "sat_dapo", "sat_gspo"])
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, exponent=st.sampled_from([1.0, 2.0, 2.5]))
def test_sat_agrees_with_the_reference(name, kernel, seed, exponent):
    batch = random_batch(seed)
    chosen = {"kernel": kernel, "exponent": exponent, "clip_low": 0.2, "clip_high": 0.28}
    if name == "sat_grpo":
        chosen["clip_high"] = 0.2
    losses, gradient = run_head(name, *batch, quantile=0.6, **chosen)
    policy, anchor, advantages, mask = (x.numpy() for x in batch)
    rows = [i for i in range(len(mask)) if mask[i].any()]
    means = {i: reference.mean_log_ratio(policy[i], anchor[i], mask[i]) for i in rows}
    sequences = name == "sat_gspo"
    distances = (
        [means[i] for i in rows for _ in range(mask[i].sum())]
        if sequences
        else (policy - anchor)[mask]
    )
    q = float(np.quantile(np.abs(distances), 0.6))

    def interval(d):
        bounds = chosen["clip_low"], chosen["clip_high"]
        return reference.sat_interval(d, q, *bounds, kernel, exponent)

    def token(pi, mu, a):
        low, high = interval(pi - mu)
        return reference.clipped(pi, mu, a, low=low, high=high)

    if sequences:
        expected = reference.each_sequence(policy, anchor, advantages, mask, interval)
    else:
        expected = reference.each_token(token, policy, anchor, advantages, mask)
    np.testing.assert_allclose(losses.numpy(), expected[0], rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(gradient.numpy(), expected[1], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kernel", SAT_KERNELS)
@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_sat_only_contracts(name, kernel, seed):
    batch = random_batch(seed)
    base, _ = run_head(name, *batch)
    losses, _ = run_head(f"sat_{name}", *batch, kernel=kernel, quantile=0.5)
    assert (losses >= base - 1e-15).all()


@pytest.mark.parametrize("kernel", SAT_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sat_bounds_do_not_depend_on_the_position_in_the_tensor(dtype, kernel):
    log_ratios = torch.linspace(0.2, 3, 499, dtype=dtype)
    # so wide that no digit of the factor is lost beside the 1
    chosen = {"clip_low": 0.2, "clip_high": 1e6, "kernel": kernel, "exponent": 1.5}
    scale = torch.tensor(0.1, dtype=dtype)
    _, upper = sat_bounds(log_ratios, log_ratio_scale=scale, **chosen)
    alone = [sat_bounds(x, log_ratio_scale=scale, **chosen)[1] for x in log_ratios.split(1)]
    assert torch.equal(upper, torch.cat(alone))


# --- BAPO ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log_ratios", "advantages", "changes", "low", "high"),
    [
        # P / N = 1 / 1; the share is 1 / 2: both targets are met at the start
        ([0.0, 0.0], [1.0, -1.0], {}, 0.6, 1.2),
        ([0.0, 0.0], [1.0, -1.0], {"measure": "share"}, 0.6, 1.2),
        # ratios 2 and 4: P = ratio_high, N = 4; P >= 1.8 from 1.8 on, after ratio_low's whole way
        ([math.log(2), math.log(4)], [1.0, -1.0], {"target": 0.45}, 0.9, 1.8),
        # the share P / (P + 4) >= .3 needs P >= 1.714
        ([math.log(2), math.log(4)], [1.0, -1.0], {"target": 0.3, "measure": "share"}, 0.9, 1.8),
        # never met: P is at most 2
        ([math.log(2), math.log(9)], [1.0, -1.0], {}, 0.9, 3.0),
        # only gains; only losses; nothing
        ([0.0], [1.0], {}, 0.6, 1.2),
        ([0.0], [-1.0], {}, 0.9, 3.0),
        ([], [], {"measure": "share"}, 0.6, 1.2),
    ],
)
def test_bapo_bounds_by_hand(log_ratios, advantages, changes, low, high):
    bounds = items(bapo_statistics(*flat(log_ratios, advantages), **changes))
    assert bounds == pytest.approx({"ratio_low": low, "ratio_high": high})


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"),
    [
        (math.log(1.6), 1.0, -1.6, -1.6),
        (math.log(1.8), 1.0, -1.7, 0.0),
        (math.log(0.6), -1.0, 0.7, 0.0),
        (math.log(4), -1.0, 3.0, 0.0),  # the dual clip
        (math.log(2), -1.0, 2.0, 2.0),
    ],
)
def test_bapo_by_hand(log_ratio, advantage, loss, gradient):
    statistics = {"ratio_low": torch.tensor(0.7), "ratio_high": torch.tensor(1.7)}
    result = run_head("bapo", *row([log_ratio], advantage), statistics=statistics)
    assert [x.item() for x in result] == pytest.approx([loss, gradient])


@pytest.mark.parametrize("measure", ["ratio", "share"])
@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, target=st.floats(0.05, 2))
def test_bapo_agrees_with_the_reference(measure, seed, target):
    policy, anchor, advantages, mask = random_batch(seed, spread=1.5)
    target = target / 2.5 if measure == "share" else target
    bounds = statistics_of("bapo", policy, anchor, advantages, mask, measure=measure, target=target)
    low, high = reference.bapo_bounds(
        (policy - anchor)[mask].tolist(),
        advantages[mask].tolist(),
        target=target,
        measure=measure,
        low=(0.6, 0.9, 0.05),
        high=(1.2, 3.0, 0.1),
    )
    assert items(bounds) == pytest.approx({"ratio_low": low, "ratio_high": high}, rel=1e-9)


# --- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_STATISTICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_the_order_of_tokens_changes_no_bit(name, dtype, seed):
    head = HEADS[name]
    batch = random_batch(seed, num_rows=9, width=30, dtype=dtype)
    inputs = statistics_inputs(head, *batch)
    order = torch.randperm(len(inputs[0]), generator=torch.Generator().manual_seed(seed))
    shuffled = head.statistics(*(x[order] for x in inputs))
    assert items(shuffled) == items(head.statistics(*inputs))


@pytest.mark.parametrize("name", WITH_STATISTICS)
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 1), (1, 4), (2, 2)])
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_one_gradient_for_every_partition(name, num_ranks, num_micro_batches, seed):
    head = HEADS[name]
    batch = random_batch(seed, num_rows=8)
    counts = {"num_tokens": int(batch[3].sum()), "num_sequences": int(batch[3].any(1).sum())}
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    parts = [rows for rank in order.chunk(num_ranks) for rows in rank.chunk(num_micro_batches)]
    gathered = [statistics_inputs(head, *(x[rows] for x in batch)) for rows in parts]
    statistics = head.statistics(*(torch.cat(x) for x in zip(*gathered, strict=True)))
    whole_statistics = statistics_of(name, *batch)
    assert items(statistics) == items(whole_statistics)

    def gradient_of(rows):
        leaf = batch[0][rows].clone().requires_grad_()
        losses = head.function(leaf, *(x[rows] for x in batch[1:]), **statistics)
        aggregate(losses, batch[3][rows], mode=head.canonical_aggregation, **counts).backward()
        return leaf.grad

    whole = gradient_of(torch.arange(8))
    for rows in parts:
        torch.testing.assert_close(gradient_of(rows), whole[rows], rtol=1e-12, atol=1e-15)


def test_statistics_come_in_float32_from_half_precision():
    batch = [x.to(torch.bfloat16) for x in random_batch(0)[:3]]
    inputs = statistics_inputs(HEADS["m2po"], *batch, random_batch(0)[3])
    assert {x.dtype for x in inputs} == {torch.float32}


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        (m2po_statistics, {"budget": 0.0}, "budget is 0.0"),
        (m2po_statistics, {"min_clip_low": 1.0}, "clip_low is 1.0"),
        (m2po_mask_statistics, {"budget": -1.0}, "budget is -1.0"),
        (m2po_mask_statistics, {"candidates": "some"}, "candidates is 'some'"),
        (sat_statistics, {"quantile": 90.0}, "quantile is 90.0"),
        (bapo_statistics, {"measure": "sum"}, "measure is 'sum'"),
        (bapo_statistics, {"target": -1.0}, "target -1.0"),
        (bapo_statistics, {"ratio_low_step": 0.0}, "ratio_low goes from 0.6 to 0.9 in steps of 0"),
        (bapo_statistics, {"ratio_high_max": 1.0}, "ratio_high goes from 1.2 to 1.0"),
        (bapo_statistics, {"ratio_low_max": 1.1}, "0 < ratio_low <= 1"),
        (bapo_statistics, {"ratio_high_start": 0.2}, "1 <= ratio_high"),
    ],
)
def test_settings_out_of_range_are_refused(function, changes, message):
    with pytest.raises(ValueError, match=message):
        function(*flat([0.1, 0.2]), **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("sat_dapo", {"kernel": "step"}, "kernel is 'step'"),
        ("sat_dapo", {"exponent": 0.0}, "exponent 0.0"),
        ("sat_grpo", {"clip_high": 0.28}, r"clip_low is 0\.2 and clip_high 0\.28"),
        ("sat_gspo", {"clip_low": 1.0}, "clip_low is 1.0"),
        ("m2po_mask", {"candidates": "some"}, "candidates is 'some'"),
    ],
)
def test_settings_of_heads_out_of_range_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        run_head(name, *row([0.1], 1.0), **changes)
