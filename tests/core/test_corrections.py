"""Corrections: golden numbers with gradients, the float64 reference, limits and invariances."""

import functools
import math

import numpy as np
import pytest
import reference_corrections as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pace_lightning.core.corrections import (
    CORRECTIONS,
    METHODS,
    combine,
    correct,
    normalize,
    weight_sum,
)
from pace_lightning.core.importance_weights import trajectory_log_ratio
from pace_lightning.core.losses import aggregate
from pace_lightning.core.sequence_corrections import gepo_log_expectation, gmc_log_scale

SEEDS = st.integers(0, 2**31)
WIDE = {"lower": 0.8, "upper": 1.25}
CASES = [
    ("tis", {}),
    ("tis", {"floor": 0.7, "cap": 1.3}),
    ("tis", {"level": "sequence", "cap": 8.0}),
    ("tis", {"level": "geometric", "cap": 1.05}),
    ("mis", {"lower": 0.7, "upper": 1.4}),
    ("mis", {"level": "sequence"}),
    ("mis", {"level": "geometric", "lower": None, "upper": 1.1}),
    ("rs", {}),
    ("rs", {"level": "geometric", **WIDE}),
    ("rs", {"level": "token", **WIDE}),
    ("rs", {"level": "sequence", **WIDE}),
    ("seq_mask_tis", WIDE),
    ("k2_rs", {"upper": 0.05}),
    ("k2_rs", {"level": "seq-max", "upper": 0.3}),
    ("k3_rs", {"level": "seq-mean", "upper": 0.08}),
    ("k3_rs", {"level": "seq-sum", "upper": 0.3}),
    ("k3_rs", {"level": "token", "upper": 0.05}),
    ("opsm", {}),
    ("opsm", {"delta": 0.1}),
    ("carm", {"upper": 1.3}),
    ("mu_grpo", {"upper": 1.1}),
    ("gipo", {}),
    ("gipo", {"sigma": 0.2}),
    ("gmc_grpo", {}),
    ("gmc_grpo", {"eps": -0.5}),
    ("gmc_grpo", {"mass": "one"}),
    ("tic_grpo", {}),
    ("tic_grpo", {"above_cap": "drop"}),
    ("tic_grpo", {"above_cap": "pessimistic", "eps": -0.1}),
    ("topr", {}),
    ("topr", {"level": "token"}),
    ("vespo", {}),
    ("vespo", {"k_positive": 1.0, "lambda_positive": 0.5, "k_negative": 0.0}),
    ("gepo", {}),
    ("gepo", {"length_normalize": False}),
    ("gepo", {"clip_low": 0.2, "clip_high": 0.1}),
]
IDS = [f"{name}-{'-'.join(map(str, values.values()))}" for name, values in CASES]


def rows_of(log_ratios):
    """Log-probs of p and mu with the given log-ratios, one list per row, and the mask."""
    width = max(len(row) for row in log_ratios)
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in log_ratios])
    d = torch.tensor([[*row, *[0.0] * (width - len(row))] for row in log_ratios]).double()
    mu = torch.full_like(d, -1.0)
    return mu + d, mu, mask


def apply(name, log_ratios, advantage=1.0, groups=None, **values):
    """Weights and keeps of the trained tokens, flat."""
    p, mu, mask = rows_of(log_ratios)
    a = torch.as_tensor(advantage, dtype=torch.float64)
    advantages = (a[:, None] if a.ndim else a).expand(mask.shape)
    ids = torch.tensor(groups if groups is not None else [0] * len(mask))
    result = correct(name, p, mu, mask, advantages=advantages, group_ids=ids, **values)
    return result.weight[mask].tolist(), result.keep[mask].tolist()


def logs(values):
    return [math.log(value) for value in values]


def random_batch(seed, num_rows=8, width=6, dtype=torch.float64, spread=0.3):
    """p, mu, mask, advantages, group ids; the first row has no trained token."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, width)
    mu = -torch.rand(shape, generator=generator, dtype=dtype) * 2
    p = mu + spread * torch.randn(shape, generator=generator, dtype=dtype)
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[0], mask[1, 0] = False, True
    advantages = torch.randn((num_rows, 1), generator=generator, dtype=dtype).expand(shape).clone()
    group_ids = torch.arange(num_rows) % 3
    return p, mu, mask, advantages, group_ids


# --- golden numbers ------------------------------------------------------------------------------

RATIOS = [0.3, 0.8, 1.5, 7.0]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("tis", {}, [0.3, 0.8, 1.5, 2.0]),
        ("tis", {"floor": 0.5, "cap": 5.0}, [0.5, 0.8, 1.5, 5.0]),
        ("icepop", {}, [0.0, 0.8, 1.5, 0.0]),  # 0.3 < 0.5 and 7 > 5
        ("mis", {"lower": None}, [0.3, 0.8, 1.5, 0.0]),
        ("rs", {"level": "token", "lower": 0.5, "upper": 5.0}, [0.0, 1.0, 1.0, 0.0]),
        # log(7)^2 / 2 = 1.893 <= 2, log(0.3)^2 / 2 = 0.725
        ("k2_rs", {}, [1.0, 1.0, 1.0, 1.0]),
        ("k2_rs", {"upper": 1.8}, [1.0, 1.0, 1.0, 0.0]),
        # 7 - log(7) - 1 = 4.054; 0.3 - log(0.3) - 1 = 0.504; 1.5 - log(1.5) - 1 = 0.0945
        ("k3_rs", {"level": "token", "upper": 0.1}, [0.0, 1.0, 1.0, 0.0]),
        # x exp(-(ln x)^2 / 0.5), with (ln x)^2 = 1.449551, 0.0497930, 0.1644020, 3.7865663
        ("gipo", {}, [0.01652181, 0.7241696, 1.0796762, 0.003598557]),
    ],
)
def test_token_levels_by_hand(name, values, expected):
    weights, keeps = apply(name, [logs(RATIOS)], **values)
    assert weights == pytest.approx(expected)
    assert keeps == [weight > 0 for weight in expected]


@pytest.mark.parametrize(
    ("name", "values", "weight"),
    [
        # log x = [0.2, 0.2, -0.1]: sum 0.3, mean 0.1
        ("tis", {"level": "sequence"}, 1.34986),
        ("tis", {"level": "geometric"}, 1.10517),
        ("tis", {"level": "sequence", "cap": 1.3}, 1.3),
        ("mis", {"level": "sequence"}, 1.34986),
        ("mis", {"level": "sequence", "upper": 1.34}, 0.0),
        ("mis", {"level": "geometric"}, 1.10517),
        ("rs", {}, 0.0),  # 1.10517 > 1.001
        ("rs", {"upper": 1.1052}, 1.0),
        ("rs", {"lower": 1.1052, "upper": 2.0}, 0.0),
        # k3 of 0.2 is 0.0214028, of -0.1 0.0048374: mean 0.0158810, sum 0.0476429, max 0.0214028
        ("k3_rs", {}, 0.0),
        ("k3_rs", {"upper": 0.01589}, 1.0),
        ("k3_rs", {"upper": 0.01587}, 0.0),
        ("k3_rs", {"level": "seq-sum", "upper": 0.04765}, 1.0),
        ("k3_rs", {"level": "seq-sum", "upper": 0.04763}, 0.0),
        ("k3_rs", {"level": "seq-max", "upper": 0.02141}, 1.0),
        ("k3_rs", {"level": "seq-max", "upper": 0.02139}, 0.0),
        # k2: (0.02 + 0.02 + 0.005) / 3 = 0.015
        ("k2_rs", {"level": "seq-mean", "upper": 0.01501}, 1.0),
        ("k2_rs", {"level": "seq-mean", "upper": 0.01499}, 0.0),
    ],
)
def test_sequence_levels_by_hand(name, values, weight):
    weights, keeps = apply(name, [[0.2, 0.2, -0.1]], **values)
    assert weights == pytest.approx([weight] * 3, rel=1e-5)
    assert keeps == [weight > 0] * 3


def test_seq_mask_tis_filters_rows_and_weighs_tokens():
    # geometric means: sqrt(7 * 0.8) = 2.366 passes with 7 not truncated; sqrt(0.1 * 0.9) = 0.3
    weights, keeps = apply("seq_mask_tis", [logs([7.0, 0.8]), logs([0.1, 0.9])])
    assert weights == pytest.approx([7.0, 0.8, 0.0, 0.0])
    assert keeps == [True, True, False, False]


@pytest.mark.parametrize(("upper", "kept"), [(9.99, False), (10.01, True)])
def test_carm_counts_distances_that_a_geometric_mean_cancels(upper, kept):
    # log x = [ln 10, -ln 10]: the mean distance is ln 10, the mean 0
    weights, keeps = apply("carm", [[math.log(10), -math.log(10)]], upper=upper)
    assert keeps == [kept] * 2
    assert weights == [float(kept)] * 2
    assert apply("rs", [[math.log(10), -math.log(10)]])[1] == [True] * 2


@pytest.mark.parametrize(
    ("advantage", "kept"), [(-1.0, [True, True, False, False]), (1.0, [True] * 4)]
)
def test_mu_grpo_forgets_what_follows_a_token_that_the_policy_left(advantage, kept):
    # 2.1 > 2 is the first of two, and stays itself
    _, keeps = apply("mu_grpo", [logs([1.9, 2.1, 0.5, 3.0])], advantage=advantage)
    assert keeps == kept


@pytest.mark.parametrize(
    ("advantage", "delta", "kept"),
    [(-1.0, 0.5, False), (1.0, 0.5, True), (-1.0, 0.7, True), (0.0, 0.5, True)],
)
def test_opsm_drops_bad_rows_the_policy_left(advantage, delta, kept):
    # log mu - log pi = [0.9, 0.3]: mean 0.6
    assert apply("opsm", [[-0.9, -0.3]], advantage, delta=delta)[1] == [kept] * 2
    assert apply("opsm", [[0.9, 0.3]], advantage, delta=delta)[1] == [True] * 2  # moved towards it


@pytest.mark.parametrize(
    ("ratios", "values", "expected"),
    [
        # sum 5.7, cap 4 * 1.2 = 4.8: kappa = 0.842105; 0.842105 * 0.2 = 0.168421 and so on
        ([0.2, 0.5, 1.0, 4.0], {}, [0.168421, 0.421053, 0.842105, 3.368421]),
        ([0.9, 1.1, 0.8, 1.0], {}, [0.9, 1.1, 0.8, 1.0]),
        ([0.1, 0.2, 0.3, 3.0], {}, [0.1, 0.2, 0.3, 3.0]),  # 3.6 < 4.8
        # C = 1.2: 1.2 / 5.7 = 0.210526
        ([0.2, 0.5, 1.0, 4.0], {"mass": "one"}, [0.0421053, 0.105263, 0.210526, 0.842105]),
    ],
)
def test_gmc_by_hand(ratios, values, expected):
    weights, keeps = apply("gmc_grpo", [[x] for x in logs(ratios)], **values)
    assert weights == pytest.approx(expected, rel=1e-5)
    assert all(keeps)


def test_groups_are_capped_apart_and_rows_without_tokens_do_not_count():
    # group 7: 0.2 and 4.0, sum 4.2 > 2.4: kappa 0.571429; group 3: 1.0 and 0.5 stay
    log_ratios = [logs([0.2]), logs([1.0]), [], logs([4.0]), logs([0.5])]
    weights, _ = apply("gmc_grpo", log_ratios, groups=[7, 3, 7, 7, 3])
    assert weights == pytest.approx([0.114286, 1.0, 2.285714, 0.5], rel=1e-5)


@pytest.mark.parametrize(
    ("above_cap", "advantage", "expected"),
    [
        ("weight", 1.0, [0.2, 0.5, 1.0, 1.2]),
        ("weight", -1.0, [0.2, 0.5, 1.0, 1.2]),
        ("drop", 1.0, [0.2, 0.5, 1.0, 0.0]),
        ("drop", -1.0, [0.2, 0.5, 1.0, 0.0]),
        ("pessimistic", 1.0, [0.2, 0.5, 1.0, 0.0]),
        ("pessimistic", -1.0, [0.2, 0.5, 1.0, 4.0]),
    ],
)
def test_tic_by_hand(above_cap, advantage, expected):
    # each ratio as a product over two tokens: sqrt(r) * sqrt(r)
    log_ratios = [[x / 2, x / 2] for x in logs([0.2, 0.5, 1.0, 4.0])]
    weights, _ = apply("tic_grpo", log_ratios, advantage, above_cap=above_cap)
    assert weights == pytest.approx(np.repeat(expected, 2).tolist())


@pytest.mark.parametrize("above_cap", ["drop", "pessimistic"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_tic_forms_have_the_gradient_of_their_loss(above_cap, advantage):
    p, mu, mask = rows_of([[0.3, -0.2], [0.2, 0.3], [-0.9, 0.1]])  # r = 1.105, 1.649, 0.449
    advantages = torch.full_like(p, advantage)
    leaf = p.clone().requires_grad_()
    r = (leaf - mu).sum(dim=1).exp()
    capped = -advantage * r.clamp(max=1.2)
    loss = capped if above_cap == "drop" else torch.maximum(-advantage * r, capped)
    (expected,) = torch.autograd.grad(loss.sum(), leaf)
    result = correct(
        "tic_grpo",
        p,
        mu,
        mask,
        advantages=advantages,
        group_ids=torch.zeros(3),
        above_cap=above_cap,
    )
    torch.testing.assert_close(-result.weight * result.keep * advantages, expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_topr_by_hand(level):
    log_ratios = [[x] for x in logs([0.5, 2.0])]
    assert apply("topr", log_ratios, -1.0, level=level)[0] == pytest.approx([0.5, 1.0])
    assert apply("topr", log_ratios, 1.0, level=level)[0] == [1.0, 1.0]


def test_topr_levels_differ_within_a_row():
    row = logs([0.5, 3.0])  # product 1.5
    assert apply("topr", [row], -1.0)[0] == [1.0, 1.0]
    assert apply("topr", [row], -1.0, level="token")[0] == pytest.approx([0.5, 1.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (0.5, 1.0, 1.120422),  # 0.5^2 exp(1.5)
        (1.0, 1.0, 1.0),
        (2.0, 1.0, 0.199148),  # 2^2 exp(-3)
        (0.5, -1.0, 0.339785),  # 0.5^3 exp(1)
        (2.0, -1.0, 1.082682),  # 2^3 exp(-2)
    ],
)
def test_vespo_by_hand(ratio, advantage, expected):
    half = math.log(ratio) / 2
    assert apply("vespo", [[half, half]], advantage)[0] == pytest.approx([expected] * 2, rel=1e-5)


def gepo_rows(q, p, mask=None):
    mu, policy = torch.tensor(q).double().log(), torch.tensor(p).double().log()
    mask = torch.ones_like(mu, dtype=torch.bool) if mask is None else mask
    return policy, mu, mask


def test_gepo_by_hand():
    # E = (0.04 + 0.01 + 0.16) / 0.7 = 0.3
    p, mu, mask = gepo_rows([[0.2], [0.1], [0.4]], [[0.3], [0.1], [0.2]])
    ids, plus = torch.zeros(3, dtype=torch.int64), torch.ones_like(p)
    result = correct("gepo", p, mu, mask, advantages=plus, group_ids=ids)
    assert result.weight[:, 0].tolist() == pytest.approx([1.0, 1 / 3, 2 / 3])
    clips = {"clip_low": 0.5, "clip_high": 0.5}
    result = correct("gepo", p, mu, mask, advantages=-plus, group_ids=ids, **clips)
    assert result.keep[:, 0].tolist() == [True, False, True]  # 1/3 < 1 - 0.5


def test_gepo_takes_geometric_means_or_products():
    # geometric means q = sqrt(0.4 * 0.1) = 0.2 and sqrt(0.9 * 0.4) = 0.6, p = 0.3 and 0.5:
    # E = (0.04 + 0.36) / 0.8 = 0.5. Products q = 0.04, 0.36, p = 0.09, 0.25: E = 0.1312 / 0.4
    p, mu, mask = gepo_rows([[0.4, 0.1], [0.9, 0.4]], [[0.9, 0.1], [0.5, 0.5]])
    tensors = {"advantages": torch.ones_like(p), "group_ids": torch.zeros(2, dtype=torch.int64)}
    mean = correct("gepo", p, mu, mask, **tensors)
    assert mean.weight[:, 1].tolist() == pytest.approx([0.6, 1.0])
    product = correct("gepo", p, mu, mask, **tensors, length_normalize=False)
    assert product.weight[:, 0].tolist() == pytest.approx([0.09 / 0.328, 0.25 / 0.328])


# --- the float64 reference -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "values"), CASES, ids=IDS)
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_agrees_with_the_reference(name, values, seed):
    p, mu, mask, advantages, group_ids = random_batch(seed)
    result = correct(name, p, mu, mask, advantages=advantages, group_ids=group_ids, **values)
    weight, keep = reference.correction(
        name, p.numpy(), mu.numpy(), mask.numpy(), advantages.numpy(), group_ids.tolist(), **values
    )
    assert result.keep.tolist() == keep.tolist()
    np.testing.assert_allclose(result.weight.numpy(), weight, rtol=1e-9)


@pytest.mark.parametrize(("name", "values"), CASES, ids=IDS)
def test_the_cases_do_something(name, values):
    """Otherwise the reference would be compared with ones."""
    p, mu, mask, advantages, group_ids = random_batch(3, num_rows=40)
    result = correct(name, p, mu, mask, advantages=advantages, group_ids=group_ids, **values)
    if METHODS[name].role == "mask":
        assert 0 <= result.keep[mask].double().mean() < 1
    else:
        assert result.weight[mask].std() > 0.01


# --- limits and invariances ----------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"gepo"}))
def test_on_policy_nothing_is_done(name):
    """The gradient is that of the uncorrected loss; GEPO's weight is not 1 on policy."""
    _, mu, mask, advantages, group_ids = random_batch(1)
    result = correct(name, mu, mu, mask, advantages=advantages, group_ids=group_ids)
    assert torch.equal(result.weight, torch.ones_like(mu))
    assert torch.equal(result.keep, mask)


@pytest.mark.parametrize(("name", "values"), CASES, ids=IDS)
def test_the_gradient_is_the_weighted_score(name, values):
    """d/d log pi of ``-w A log pi``, token-mean, is ``-w A / tokens``: w carries no gradient."""
    p, mu, mask, advantages, group_ids = random_batch(5)
    leaf = p.requires_grad_()
    result = correct(name, leaf, mu, mask, advantages=advantages, group_ids=group_ids, **values)
    num_tokens = int(mask.sum())
    losses = -result.weight * advantages * leaf
    loss = aggregate(losses, result.keep, mode="token-mean", num_tokens=num_tokens, num_sequences=8)
    (gradient,) = torch.autograd.grad(loss, leaf)
    weight, keep = reference.correction(
        name,
        p.detach().numpy(),
        mu.numpy(),
        mask.numpy(),
        advantages.numpy(),
        group_ids.tolist(),
        **values,
    )
    np.testing.assert_allclose(
        gradient.numpy(), -weight * keep * advantages.numpy() / num_tokens, rtol=1e-9
    )


@pytest.mark.parametrize(("name", "values"), CASES, ids=IDS)
@pytest.mark.parametrize("extreme", [1e3, -1e3])
def test_extreme_log_ratios_stay_finite(name, values, extreme):
    p, mu, mask, advantages, group_ids = random_batch(7, dtype=torch.float32)
    p = p.clone()
    p[1], p[2, 0] = mu[1] + extreme, mu[2, 0] - extreme
    result = correct(name, p, mu, mask, advantages=advantages, group_ids=group_ids, **values)
    assert result.weight.dtype == torch.float32
    assert result.weight.isfinite().all()
    assert (result.weight >= 0).all()


def padded(tensor, columns, rows, fill):
    """The tensor with more columns before and after, and more rows below."""
    wide = torch.nn.functional.pad(tensor.double(), (1, columns), value=fill)
    tall = torch.full((rows, wide.shape[1]), fill, dtype=torch.float64)
    return torch.cat([wide, tall]).to(tensor.dtype)


@pytest.mark.parametrize(("name", "values"), CASES, ids=IDS)
@settings(max_examples=5, deadline=None)
@given(seed=SEEDS)
def test_padding_changes_no_bit(name, values, seed):
    p, mu, mask, advantages, group_ids = random_batch(seed, dtype=torch.float32, spread=1.0)
    plain = correct(name, p, mu, mask, advantages=advantages, group_ids=group_ids, **values)
    nan = float("nan")
    result = correct(
        name,
        padded(torch.where(mask, p, nan), 3, 2, nan),
        padded(torch.where(mask, mu, nan), 3, 2, nan),
        padded(mask, 3, 2, 0.0),
        advantages=padded(torch.where(mask, advantages, nan), 3, 2, nan),
        group_ids=torch.cat([group_ids, torch.tensor([0, 9])]),
        **values,
    )
    assert torch.equal(result.weight[:-2, 1:-3], plain.weight)
    assert torch.equal(result.keep[:-2, 1:-3], plain.keep)
    assert result.weight[-2:].eq(1).all()
    assert not result.keep[-2:].any()


@pytest.mark.parametrize(("name", "values"), CASES, ids=IDS)
def test_a_nan_at_a_trained_token_is_not_dropped(name, values):
    p, mu, mask, advantages, group_ids = random_batch(1)
    mu[1, 0] = float("nan")
    result = correct(name, p, mu, mask, advantages=advantages, group_ids=group_ids, **values)
    assert result.keep[1, 0]
    harmless = name == "topr" and advantages[1, 0] > 0  # good responses have no ratio
    assert METHODS[name].role == "mask" or harmless or result.weight[1, 0].isnan()


@pytest.mark.parametrize("parts", [[8], [2, 2, 2, 2], [1, 4, 3]])
def test_cut_groups_agree_with_whole_ones(parts):
    """Group statistics over the mini-batch, rows handed out to micro-batches, to the last bit."""
    p, mu, mask, advantages, group_ids = random_batch(11, dtype=torch.float32, spread=1.0)
    trained = mask.any(dim=1)
    log_q = torch.stack([row[m].double().mean() for row, m in zip(mu, mask, strict=True)])
    statistics = {
        "gmc_grpo": ("group_log_scale", gmc_log_scale, trajectory_log_ratio(p, mu, mask)),
        "gepo": ("group_log_expectation", gepo_log_expectation, log_q),
    }
    for name, (argument, statistic, flat) in statistics.items():
        order = torch.randperm(int(trained.sum()), generator=torch.Generator().manual_seed(2))
        shuffled = statistic(flat[trained][order], group_ids[trained][order])
        per_row = torch.zeros(len(mask), dtype=torch.float64)
        per_row[trained.nonzero()[:, 0][order]] = shuffled
        whole = correct(name, p, mu, mask, advantages=advantages, group_ids=group_ids)
        weights = [
            correct(
                name, *part[:3], advantages=part[3], group_ids=part[4], **{argument: part[5]}
            ).weight
            for part in zip(
                *(x.split(parts) for x in (p, mu, mask, advantages, group_ids, per_row)),
                strict=True,
            )
        ]
        assert torch.equal(torch.cat(weights), whole.weight)
        assert not torch.equal(whole.weight, torch.ones_like(whole.weight))


def test_the_log_ratio_of_a_sequence_is_clamped():
    log_ratios = [[15.0, 15.0], [-15.0, -15.0], [30.0, -5.0], []]  # 30 is clamped to 20 first
    assert trajectory_log_ratio(*rows_of(log_ratios)).tolist() == [20.0, -20.0, 15.0, 0.0]
    weights, _ = apply("mis", log_ratios[:1], level="sequence", upper=1e9)
    assert weights == pytest.approx([math.exp(20)] * 2)


@pytest.mark.parametrize(
    "statistic", [functools.partial(gmc_log_scale, mass="one"), gepo_log_expectation]
)
def test_group_statistics_do_not_depend_on_the_order(statistic):
    generator = torch.Generator().manual_seed(0)
    # small, so that the logarithm of a group's sum keeps the last bits of the sum
    values = torch.randn(6000, generator=generator, dtype=torch.float64) - 4.8
    group_ids = torch.arange(6000) % 30
    order = torch.randperm(6000, generator=generator)
    shuffled = statistic(values[order], group_ids[order])
    assert torch.equal(statistic(values, group_ids)[order], shuffled)


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS)
def test_gmc_caps_the_mass_and_keeps_proportions(seed):
    p, mu, mask, _, group_ids = random_batch(seed, spread=1.5)
    weight = CORRECTIONS["gmc_grpo"](p, mu, mask, group_ids=group_ids).weight
    ratio = trajectory_log_ratio(p, mu, mask).exp()
    for group in range(3):
        members = (group_ids == group) & mask.any(dim=1)
        if members.any():
            w = (weight * mask).amax(dim=1)[members]
            assert w.sum() <= 1.2 * members.sum() * (1 + 1e-12)
            torch.testing.assert_close(w / w[0], ratio[members] / ratio[members][0])


# --- putting them together -----------------------------------------------------------------------


def test_combine_multiplies_weights_and_intersects_masks():
    p, mu, mask = rows_of([logs(RATIOS)])
    both = combine([CORRECTIONS["tis"](p, mu, mask), CORRECTIONS["k2_rs"](p, mu, mask, upper=1.8)])
    assert both.weight[0].tolist() == pytest.approx([0.3, 0.8, 1.5, 0.0])
    assert both.keep[0].tolist() == [True, True, True, False]


def test_normalized_weights_have_mean_one_over_all_micro_batches():
    p, mu, mask, _, _ = random_batch(2)
    parts = list(zip(*(x.split([3, 5]) for x in (p, mu, mask)), strict=True))
    corrections = [CORRECTIONS["mis"](*part, lower=0.8) for part in parts]
    total = sum(weight_sum(c, part[2]) for c, part in zip(corrections, parts, strict=True))
    mean = (total / mask.sum()).item()
    after = [
        normalize(c, part[2], mean_weight=mean) for c, part in zip(corrections, parts, strict=True)
    ]
    weight = torch.cat([c.weight for c in after])
    assert weight[mask].mean().item() == pytest.approx(1.0)
    assert torch.equal(weight[~mask], torch.ones_like(weight[~mask]))
    assert mean != pytest.approx(1.0, abs=0.01)


def test_settings_are_what_a_user_may_write():
    assert METHODS["gmc_grpo"].settings() == {"eps": 0.2, "mass": "group"}
    assert METHODS["icepop"].settings() == {"level": "token", "lower": 0.5, "upper": 5.0}
    for method in METHODS.values():
        simple = (float, int, bool, str, type(None))
        assert all(isinstance(default, simple) for default in method.settings().values())


def test_a_method_that_replaces_the_ratio_is_about_the_current_policy():
    roles = {name: (m.role, m.numerator) for name, m in METHODS.items()}
    assert {n for n, (role, _) in roles.items() if role == "objective"} == {
        "gmc_grpo", "tic_grpo", "topr", "vespo", "gepo", "gipo"
    }  # fmt: skip
    assert all(numerator == "policy" for role, numerator in roles.values() if role == "objective")
    assert all(numerator == "proximal" for role, numerator in roles.values() if role == "weight")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("tiss", {}, "unknown correction 'tiss'"),
        ("tis", {"cpa": 3.0}, r"no setting \['cpa'\]; it takes \['cap', 'floor', 'level'\]"),
        ("tis", {"cap": 0.5, "floor": 0.7}, "floor is 0.7 and cap 0.5"),
        ("tis", {"level": "row"}, "unknown level 'row'"),
        ("mis", {"lower": 6.0}, "lower is 6.0 and upper 5.0"),
        ("rs", {"lower": None, "upper": -1.0}, "lower is None and upper -1.0"),
        ("k2_rs", {"level": "mean"}, "unknown level 'mean'"),
        ("k3_rs", {"upper": -0.1}, "upper is -0.1"),
        ("carm", {"upper": 0.9}, "upper is 0.9"),
        ("mu_grpo", {"upper": 0.0}, "upper is 0.0"),
        ("gipo", {"sigma": 0.0}, "sigma is 0.0"),
        ("gmc_grpo", {"mass": "all"}, "unknown mass 'all'"),
        ("gmc_grpo", {"eps": -1.0}, "eps is -1.0"),
        ("tic_grpo", {"above_cap": "clip"}, "unknown above_cap 'clip'"),
        ("tic_grpo", {"eps": -2.0}, "eps is -2.0"),
        ("topr", {"level": "geometric"}, "unknown level 'geometric'"),
        ("vespo", {"lambda_negative": -1.0}, r"\(3.0, -1.0\) for A < 0"),
        ("gepo", {"clip_low": -0.1}, "clip_low is -0.1"),
    ],
)
def test_wrong_settings_are_refused(name, values, message):
    p, mu, mask, advantages, group_ids = random_batch(0)
    with pytest.raises(ValueError, match=message):
        correct(name, p, mu, mask, advantages=advantages, group_ids=group_ids, **values)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (name, wrong)
        for name, method in METHODS.items()
        for wrong in ("numerator", "mask", "mask dtype", "advantages", "group_ids")
        if wrong not in ("advantages", "group_ids") or method.takes(wrong)
    ],
)
def test_wrong_shapes_are_refused(name, wrong):
    p, mu, mask, advantages, group_ids = random_batch(0)
    p = p[:, :1] if wrong == "numerator" else p
    mask = {"mask": mask[:1], "mask dtype": mask.double()}.get(wrong, mask)
    advantages = advantages[:, :1] if wrong == "advantages" else advantages
    group_ids = group_ids[:3] if wrong == "group_ids" else group_ids
    with pytest.raises(ValueError, match=r"shape|dtype"):
        correct(name, p, mu, mask, advantages=advantages, group_ids=group_ids)


def test_nothing_to_combine_or_to_divide_by_is_refused():
    with pytest.raises(ValueError, match="got 0 corrections"):
        combine([])
    p, mu, mask = rows_of([[0.0]])
    with pytest.raises(ValueError, match=r"mean weight is 0.0"):
        normalize(CORRECTIONS["tis"](p, mu, mask), mask, mean_weight=0.0)
