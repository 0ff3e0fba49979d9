"""Heads without batch statistics: golden numbers with gradients, the float64 reference.

Further down, what every head of the table has to satisfy.
"""

import math

import numpy as np
import pytest
import reference_heads as reference
import torch
from head_cases import one_token, random_batch, run_head, statistics_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pace_lightning.core.heads import HEADS, dapo_head, grpo_head, gspo_head, settings_of
from pace_lightning.core.losses import AGGREGATIONS, aggregate

SEEDS = st.integers(0, 2**31)
NAMES = sorted(HEADS)


# --- by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 1.0, -1.2, 0.0),  # -1.5 < -1.2: clipped
        (1.5, -1.0, 1.5, 1.5),  # 1.5 > 1.2: the pessimistic side keeps its gradient -A rho
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0.0),  # 0.5 < 0.8: clipped
        (1.1, 2.0, -2.2, -2.2),  # within the bounds: -A rho twice
        (0.9, -2.0, 1.8, 1.8),
    ],
)
def test_grpo_by_hand(ratio, advantage, loss, gradient):
    assert one_token("grpo", ratio, advantage) == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.26, 1.0, -1.26, -1.26),  # below 1.28: not clipped
        (1.30, 1.0, -1.28, 0.0),
        (0.79, -1.0, 0.8, 0.0),  # the lower bound is still 1 - 0.2
        (0.81, -1.0, 0.81, 0.81),
    ],
)
def test_dapo_by_hand(ratio, advantage, loss, gradient):
    assert one_token("dapo", ratio, advantage) == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (5.0, -1.0, 3.0, 0.0),  # min(5, 3)
        (2.0, -1.0, 2.0, 2.0),
        (5.0, 1.0, -1.2, 0.0),  # positive advantages do not see the dual clip
        (0.5, -1.0, 0.8, 0.0),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, loss, gradient):
    assert one_token("grpo", ratio, advantage, dual_clip=3.0) == pytest.approx((loss, gradient))


@pytest.mark.parametrize("form", ["token", "sequence"])
@pytest.mark.parametrize(
    ("log_ratios", "advantage", "loss", "gradient"),
    [
        # mean 0.1, s = e^0.1 = 1.10517, above 1.0004: clipped
        ([0.1, -0.1, 0.3], 1.0, -1.0004, 0.0),
        # the pessimistic side: loss s; seq-mean-token-mean gives each token a third of -A s
        ([0.1, -0.1, 0.3], -1.0, 1.1051709, 1.1051709 / 3),
        # mean -0.1, s = 0.904837, below 0.9997
        ([-0.1, 0.1, -0.3], -1.0, 0.9997, 0.0),
        ([-0.1, 0.1, -0.3], 2.0, -1.8096748, -1.8096748 / 3),
        # mean 2e-4, within: s = 1.00020002
        ([3e-4, 3e-4, 0.0], 1.0, -1.00020002, -1.00020002 / 3),
    ],
)
def test_gspo_by_hand(form, log_ratios, advantage, loss, gradient):
    anchor = torch.full((1, 4), -1.0, dtype=torch.float64)
    policy = anchor + torch.tensor([[*log_ratios, 7.0]], dtype=torch.float64)
    policy.requires_grad_()
    mask = torch.tensor([[True, True, True, False]])
    losses = gspo_head(policy, anchor, torch.full_like(anchor, advantage), mask, form=form)
    total = aggregate(losses, mask, mode="seq-mean-token-mean", num_tokens=3, num_sequences=1)
    (slopes,) = torch.autograd.grad(total, policy)
    assert total.item() == pytest.approx(loss)
    assert slopes.flatten().tolist() == pytest.approx([gradient] * 3 + [0.0])


def test_gspo_token_form_allows_advantages_of_tokens():
    # s = e^0.1; each token's gradient is -A_t s of its own; in the sequence form all get the mean
    anchor = torch.full((1, 2), -1.0, dtype=torch.float64)
    policy = (anchor + torch.tensor([[0.3, -0.1]])).requires_grad_()
    advantages, mask = torch.tensor([[-1.0, -3.0]], dtype=torch.float64), torch.ones(1, 2) > 0
    s = math.exp(0.1)
    for form, expected in (("token", [s, 3 * s]), ("sequence", [2 * s, 2 * s])):
        losses = gspo_head(policy, anchor, advantages, mask, form=form)
        (gradient,) = torch.autograd.grad(losses.sum(), policy)
        assert losses.flatten().tolist() == pytest.approx([s, 3 * s])
        assert gradient.flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("form", ["token", "sequence"])
@pytest.mark.parametrize(
    ("log_ratio", "loss", "gradient"),
    [(10.5, math.exp(10), 0.0), (9.5, math.exp(9.5), math.exp(9.5))],
)
def test_the_log_ratio_of_a_sequence_is_clamped_at_ten(form, log_ratio, loss, gradient):
    result = one_token("gspo", math.exp(log_ratio), -1.0, form=form)
    assert result == pytest.approx((loss, gradient))


def test_reinforce_by_hand():
    assert one_token("reinforce", 7.0, -2.0) == pytest.approx((-1.0, 2.0))  # 2 x -0.5


@pytest.mark.parametrize(
    ("ratio", "advantage", "changes", "loss", "gradient"),
    [
        (7.0, 1.0, {}, 2.5, -5.0),  # -5 x 1 x -0.5: clipped to the cap, yet with a gradient
        (7.0, -1.0, {}, -2.5, 5.0),
        (0.5, -2.0, {}, -0.5, 1.0),  # no lower bound
        (0.5, -2.0, {"ratio_low": 0.8}, -0.8, 1.6),  # 0.8 x 2 x -0.5
        (7.0, 1.0, {"unified_mask": True}, 0.0, 0.0),
        (7.0, -1.0, {"unified_mask": True}, -2.5, 5.0),  # inward: kept
        (0.5, -2.0, {"unified_mask": True, "ratio_low": 0.8}, 0.0, 0.0),
        (0.5, 2.0, {"unified_mask": True, "ratio_low": 0.8}, 0.8, -1.6),
        (1.3, 1.0, {"ratio_cap": 1.28}, 0.64, -1.28),
    ],
)
def test_cispo_by_hand(ratio, advantage, changes, loss, gradient):
    assert one_token("cispo", ratio, advantage, **changes) == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    ("name", "p", "q", "advantage", "weight"),
    [
        # rises by 0.2 > 0.15, the ratio being only 1.286
        ("dppo_tv", 0.9, 0.7, 1.0, 0.0),
        ("dppo_tv", 0.9, 0.7, -1.0, 0.9 / 0.7),  # against its advantage: not beyond the limit
        ("dppo_tv", 0.02, 0.001, 1.0, 20.0),  # rises by 0.019; ratio 20
        ("dppo_tv", 0.03, 0.001, 1.0, 20.0),  # ratio 30, capped
        ("dppo_tv", 0.7, 0.9, -1.0, 0.0),
        ("dppo_tv", 0.7, 0.9, 1.0, 0.7 / 0.9),
        # KL = 0.7 ln(7/9) + 0.3 ln 3 = -0.17592 + 0.32958 = 0.15366 > 0.05
        ("dppo_kl", 0.9, 0.7, 1.0, 0.0),
        ("dppo_kl", 0.9, 0.7, -1.0, 0.9 / 0.7),  # p >= q
        # KL = 0.9 ln(9/7) + 0.1 ln(1/3) = 0.22618 - 0.10986 = 0.11632 > 0.05
        ("dppo_kl", 0.7, 0.9, -1.0, 0.0),
        ("dppo_kl", 0.7, 0.9, 1.0, 0.7 / 0.9),  # p <= q
        # KL = 0.5 ln(5/6) + 0.5 ln(5/4) = -0.09116 + 0.11157 = 0.02041
        ("dppo_kl", 0.6, 0.5, 1.0, 1.2),
        # KL = 0.001 ln(1/20) + 0.999 ln(0.999/0.98) = -0.0029957 + 0.0191828 = 0.0161871
        ("dppo_kl", 0.02, 0.001, 1.0, 20.0),
    ],
)
def test_dppo_by_hand(name, p, q, advantage, weight):
    result = one_token(name, p / q, advantage, policy=math.log(p))
    assert result == pytest.approx((-weight * advantage * math.log(p), -weight * advantage))


def test_symmetric_dppo_rejects_whatever_the_sign_of_the_advantage():
    for name, changes in (("dppo_tv", {"limit_high": 0.1, "limit_low": 0.1}), ("dppo_kl", {})):
        for p, q in ((0.9, 0.7), (0.7, 0.9)):
            for advantage in (1.0, -1.0):
                _, gradient = one_token(
                    name, p / q, advantage, policy=math.log(p), symmetric=True, **changes
                )
                assert gradient == 0


def test_the_square_penalty_is_at_every_token_rejected_or_not():
    # rejected: 0.001 ln(9/7)^2, slope 0.002 ln(9/7)
    log_ratio = math.log(0.9 / 0.7)
    loss, slope = one_token("dppo_tv", 0.9 / 0.7, 1.0, policy=math.log(0.9), square_penalty=1e-3)
    assert (loss, slope) == pytest.approx((1e-3 * log_ratio**2, 2e-3 * log_ratio))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 1.0, 0.5, -1.0),
        # 0.5 + 0.1/2 ln(2)^2, -1 + 0.1 ln 2
        (2.0, 1.0, 0.5240227, -0.9306853),
        (0.5, -2.0, -0.9759773, 1.9306853),
    ],
)
def test_dro_by_hand(ratio, advantage, loss, gradient):
    assert one_token("dro", ratio, advantage) == pytest.approx((loss, gradient))


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize(
    ("changes", "kept"), [({"limit_high": 0.21}, True), ({"limit_low": 0.21}, False)]
)
def test_dppo_limits_are_told_apart(name, changes, kept):
    _, rising = one_token(name, 0.9 / 0.7, 1.0, policy=math.log(0.9), **changes)
    _, falling = one_token(name, 0.7 / 0.9, -1.0, policy=math.log(0.7), **changes)
    assert (rising != 0, falling != 0) == (kept, not kept)


@pytest.mark.parametrize(
    ("ratio", "kept"), [(0.69, False), (0.71, True), (1.0, True), (5.9, True), (6.01, False)]
)
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_sao_by_hand(ratio, kept, advantage):
    weight = ratio * kept
    expected = (0.5 * weight * advantage, -weight * advantage)
    assert one_token("sao", ratio, advantage) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("log_ratio", "bounds"), [(0.0, {"clip_high": 0.0}), (0.0, {"clip_low": 0.0})]
)
def test_sao_rejects_at_its_bounds(log_ratio, bounds):
    assert one_token("sao", math.exp(log_ratio), 1.0, **bounds) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # 4 sigmoid(-0.5) = 4 x 0.3775407; slope 4 x 0.3775407 x 0.6224593 x 0.5
        (0.5, 1.0, -1.510163, -0.4700074),
        (1.0, 1.0, -2.0, -1.0),
        (2.0, 1.0, -2.924234, -1.5728955),  # 4 sigmoid(1), 4 x 0.7310586 x 0.2689414 x 2
        (1.0, -1.0, 1.904762, 1.0),  # 2 / 1.05
        (2.0, -1.0, 2.8219996, 1.5362196),  # 4 / 1.05 x sigmoid(1.05) = 3.8095238 x 0.7407749
    ],
)
def test_sapo_by_hand(ratio, advantage, loss, gradient):
    assert one_token("sapo", ratio, advantage) == pytest.approx((loss, gradient), rel=2e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (0.5, 1.0, -2.0, -2.0),  # 1 / 0.5
        (1.1, 2.0, -2 / 1.1, -2 / 1.1),
        (0.2, 1.0, -3.0, -3.0),  # 1 / 0.2 = 5, capped at 3, with its gradient
        (2.0, 1.0, 0.0, 0.0),  # above 1.2
        (2.0, -1.0, 2.0, 2.0),  # negative advantages as in grpo
        (5.0, -1.0, 3.0, 0.0),
        (0.5, -1.0, 0.8, 0.0),
    ],
)
def test_aspo_by_hand(ratio, advantage, loss, gradient):
    assert one_token("aspo", ratio, advantage) == pytest.approx((loss, gradient))


def test_aspo_without_the_mask_turns_two_into_a_half():
    assert one_token("aspo", 2.0, 1.0, clip_high=1.5) == pytest.approx((-0.5, -0.5))


# --- against the reference -----------------------------------------------------------------------

TOKEN_CASES = [
    ("dapo", {}, reference.clipped, {"low": 0.8, "high": 1.28}),
    ("dapo", {"dual_clip": 1.7}, reference.clipped, {"low": 0.8, "high": 1.28, "dual": 1.7}),
    ("grpo", {"clip_low": 0.1, "clip_high": 0.1}, reference.clipped, {"low": 0.9, "high": 1.1}),
    ("cispo", {"ratio_cap": 1.4}, reference.cispo, {"cap": 1.4}),
    (
        "cispo",
        {"ratio_cap": 1.4, "ratio_low": 0.7, "unified_mask": True},
        reference.cispo,
        {"cap": 1.4, "low": 0.7, "unified": True},
    ),
    ("dppo_tv", {"ratio_cap": 1.5}, reference.dppo_tv, {"limit": 0.15, "cap": 1.5}),
    ("dppo_kl", {"ratio_cap": 1.5}, reference.dppo_kl, {"limit": 0.05, "cap": 1.5}),
    (
        "dppo_tv",
        {"limit_low": 0.1, "limit_high": 0.1, "symmetric": True, "square_penalty": 0.03},
        reference.dppo_tv,
        {"limit": 0.1, "cap": 20.0, "both": True, "penalty": 0.03},
    ),
    (
        "dppo_kl",
        {"symmetric": True},
        reference.dppo_kl,
        {"limit": 0.05, "cap": 20.0, "both": True},
    ),
    ("dro", {"beta": 0.3}, reference.dro, {"beta": 0.3}),
    ("sao", {"clip_high": 0.6}, reference.sao, {"low": 0.7, "high": 1.6}),
    ("sapo", {}, reference.sapo, {"positive": 1.0, "negative": 1.05}),
    ("aspo", {"dual_clip": 1.5}, reference.aspo, {"low": 0.8, "high": 1.2, "dual": 1.5}),
]


@pytest.mark.parametrize(("name", "changes", "function", "bounds"), TOKEN_CASES)
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_token_heads_agree_with_the_reference(name, changes, function, bounds, seed):
    batch = random_batch(seed)
    losses, gradient = run_head(name, *batch, **changes)
    expected = reference.each_token(function, *(x.numpy() for x in batch), **bounds)
    # the floor of 1e-8 in the KL of dppo moves the threshold only
    np.testing.assert_allclose(losses.numpy(), expected[0], rtol=1e-11, atol=1e-15)
    np.testing.assert_allclose(gradient.numpy(), expected[1], rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("form", ["token", "sequence"])
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_gspo_agrees_with_the_reference(form, seed):
    batch = random_batch(seed)
    losses, gradient = run_head("gspo", *batch, form=form, clip_low=0.1, clip_high=0.2)
    expected = reference.each_sequence(*(x.numpy() for x in batch), lambda _: (0.9, 1.2))
    np.testing.assert_allclose(losses.numpy(), expected[0], rtol=1e-11, atol=1e-15)
    np.testing.assert_allclose(gradient.numpy(), expected[1], rtol=1e-11, atol=1e-15)


# --- every head ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cispo", "dppo_kl", "dppo_tv", "reinforce", "sao"])
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_weights_without_gradient_make_the_loss_linear_in_log_pi(name, seed):
    policy, *others = random_batch(seed)
    losses, gradient = run_head(name, policy, *others)
    torch.testing.assert_close(gradient * policy, losses, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bapo", {}),
        ("dapo", {}),
        ("gspo", {"form": "sequence"}),
        ("m2po", {"min_clip_low": 0.0, "min_clip_high": 0.0}),
        ("m2po_mask", {}),
        ("sapo", {}),
    ],
)
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_autograd_agrees_with_finite_differences(name, changes, seed):
    policy, *others, mask = random_batch(seed, num_rows=3, width=4)
    statistics = statistics_of(name, policy, *others, mask, **changes)
    losses, gradient = run_head(name, policy, *others, mask, statistics=statistics, **changes)
    for row, column in np.argwhere(mask.numpy()):
        slopes = []
        for step in (1e-7, -1e-7):
            moved = policy.clone()
            moved[row, column] += step
            after, _ = run_head(name, moved, *others, mask, statistics=statistics, **changes)
            slopes.append((after.sum() - losses.sum()).item() / step)
        # at a kink autograd takes the slope of one side
        expected = gradient[row, column].item()
        assert min(abs(slope - expected) for slope in slopes) < 1e-5 * max(1.0, abs(expected))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@settings(max_examples=5, deadline=None)
@given(seed=SEEDS)
def test_what_is_masked_does_not_matter(name, poison, seed):
    *tensors, mask = random_batch(seed, dtype=torch.float32)
    losses, gradient = run_head(name, *tensors, mask)
    dirty = [torch.where(mask, x, poison) for x in tensors]
    dirty_losses, dirty_gradient = run_head(name, *dirty, mask)
    assert torch.equal(losses, dirty_losses)
    assert torch.equal(gradient, dirty_gradient)
    assert dirty_losses[~mask].count_nonzero() == dirty_gradient[~mask].count_nonzero() == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS, width=st.integers(1, 60), left=st.integers(0, 30), right=st.integers(0, 30))
def test_padding_changes_no_bit(name, dtype, seed, width, left, right):
    batch = random_batch(seed, width=width, dtype=dtype)
    padded = [
        torch.nn.functional.pad(x, (left, right, 1, 2), value=fill)
        for x, fill in zip(batch, (math.nan, math.nan, math.nan, False), strict=True)
    ]
    inner = (slice(1, -2), slice(left, left + width))
    for plain, wide in zip(run_head(name, *batch), run_head(name, *padded), strict=True):
        assert torch.equal(plain, wide[inner])
        assert wide.count_nonzero() == plain.count_nonzero()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("log_ratio", [-1e3, -50.0, -19.0, 19.0, 50.0, 1e3])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
def test_extreme_ratios_have_finite_losses_and_gradients(name, log_ratio, advantage):
    policy = torch.tensor([[-0.1 + min(log_ratio, 0.0), -0.5]])
    anchor = torch.tensor([[-0.1 - max(log_ratio, 0.0), -0.6]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    losses, gradient = run_head(name, policy, anchor, torch.full((1, 2), advantage), mask)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "reinforce"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_at_a_trained_token_stays_visible(name, which):
    tensors = list(random_batch(3, dtype=torch.float32))
    tensors[which] = tensors[which].clone()
    tensors[which][1, 0] = math.nan
    losses, _ = run_head(name, *tensors)
    assert losses[1, 0].isnan()


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_consistent(name):
    head = HEADS[name]
    batch = random_batch(0)
    statistics = statistics_of(name, *batch)
    needed = set(head.function.__kwdefaults__ or {}) | set(statistics)
    code = head.function.__code__
    keywords = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    assert needed == set(keywords)
    assert head.needs_prepass == bool(statistics)
    assert all(x.ndim == 0 and not x.requires_grad for x in statistics.values())
    assert head.canonical_aggregation in AGGREGATIONS
    assert set(settings_of(head.function)) <= set(head.settings)
    assert not set(statistics) & set(head.settings)
    assert not head.has_bounds or {"clip_low", "clip_high"} <= set(head.settings)
    run_head(name, *batch, **head.settings)


def test_heads_that_sat_wraps_have_bounds():
    assert [name for name in NAMES if HEADS[name].has_bounds] == ["dapo", "grpo", "gspo"]
    for name in ("dapo", "grpo", "gspo"):
        base, wrapped = HEADS[name], HEADS[f"sat_{name}"]
        assert base.sequence_level == wrapped.sequence_level
        assert base.canonical_aggregation == wrapped.canonical_aggregation
        for bound in ("clip_low", "clip_high"):
            assert base.settings[bound] == wrapped.settings[bound]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dapo", {"clip_low": 1.0}, "clip_low is 1.0"),
        ("dapo", {"clip_low": -0.1}, "clip_low is -0.1"),
        ("dapo", {"clip_high": -0.1}, "clip_high -0.1"),
        ("dapo", {"clip_low": math.nan}, "clip_low is nan"),
        ("dapo", {"dual_clip": 1.0}, "dual_clip is 1.0"),
        ("grpo", {"clip_high": 0.28}, r"clip_low is 0\.2 and clip_high 0\.28.*dapo objective"),
        ("gspo", {"clip_low": 1.0}, "clip_low is 1.0"),
        ("gspo", {"form": "row"}, "form is 'row'"),
        ("cispo", {"ratio_cap": 0.28}, r"ratio_cap 0\.28.*1\.28"),
        ("cispo", {"ratio_low": -1.0}, "ratio_low is -1.0"),
        ("dppo_tv", {"limit_low": -0.1}, "limit_low is -0.1"),
        ("dppo_kl", {"ratio_cap": 0.5}, "ratio_cap 0.5"),
        ("dppo_tv", {"square_penalty": -1.0}, "square_penalty is -1.0"),
        ("dro", {"beta": -0.1}, "beta is -0.1"),
        ("sao", {"clip_low": 2.0}, "clip_low is 2.0"),
        ("sapo", {"tau_negative": 0.0}, "tau_negative 0.0"),
        ("aspo", {"dual_clip": 0.5}, "dual_clip is 0.5"),
    ],
)
def test_settings_out_of_range_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        one_token(name, 1.0, 1.0, **changes)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "reinforce"])
@pytest.mark.parametrize("which", range(4))
def test_nothing_is_broadcast(name, which):
    batch = list(random_batch(0))
    statistics = statistics_of(name, *batch)
    batch[which] = batch[which][:, :1]
    with pytest.raises(ValueError, match=r"\(5, 1\)"):
        run_head(name, *batch, statistics=statistics)


def test_grpo_and_dapo_take_the_same_arguments():
    batch = random_batch(1)
    bounds = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    assert torch.equal(grpo_head(*batch, **bounds), dapo_head(*batch, **bounds))
