"""Losses: golden numbers with gradients, the float64 reference, and the invariances."""

import math

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pace_lightning.core.heads import dapo_head
from pace_lightning.core.losses import (
    AGGREGATIONS,
    aggregate,
    blank,
    k3_kl,
    log_ratio,
    ratio_statistics,
    sequence_log_ratio,
)

DAPO = {"clip_low": 0.2, "clip_high": 0.28}
SEEDS = st.integers(0, 2**31)


def random_batch(seed, num_rows=5, width=7, dtype=torch.float32):
    """Log-probs that stray far enough to be clipped on both sides, a mask, advantages."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, width)
    anchor = -torch.rand(shape, generator=generator, dtype=dtype) * 3
    policy = anchor + 0.5 * torch.randn(shape, generator=generator, dtype=dtype)
    advantages = torch.randn((num_rows, 1), generator=generator, dtype=dtype).expand(shape).clone()
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[0] = False  # a row without a trained token
    mask[1, 0] = True
    return policy, anchor, advantages, mask


def loss_and_gradient(policy, anchor, advantages, mask, *, mode="token-mean", counts=None):
    """Aggregated DAPO loss with a KL term, as a training step forms it, and d/d log pi."""
    leaf = policy.clone().requires_grad_()
    losses = dapo_head(leaf, anchor, advantages, mask, **DAPO) + 0.1 * k3_kl(leaf, anchor)
    num_tokens, num_sequences = counts or (int(mask.sum()), int(mask.any(dim=1).sum()))
    loss = aggregate(
        losses,
        mask,
        mode=mode,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        max_length=8,
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


# --- log-ratios -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delta", "value", "gradient"), [(25.0, 20.0, 0.0), (-25.0, -20.0, 0.0), (3.0, 3.0, 1.0)]
)
def test_the_log_ratio_is_clamped_at_twenty(delta, value, gradient):
    policy = torch.tensor([[delta - 1]], requires_grad=True)
    result = log_ratio(policy, torch.tensor([[-1.0]]))
    result.sum().backward()
    assert result.item() == value
    assert policy.grad.item() == gradient


def test_nothing_is_broadcast():
    values, column = torch.zeros(2, 3), torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"\(2, 3\) and anchor log-probs \(2, 1\)"):
        log_ratio(values, column)
    with pytest.raises(ValueError, match=r"\(2, 3\) and anchor log-probs \(2, 1\)"):
        sequence_log_ratio(values, column, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask has dtype torch.bool and shape \(2, 1\)"):
        blank(values, column > 0)


@pytest.mark.parametrize("own_gradient", [False, True])
@pytest.mark.parametrize(
    ("distances", "mean", "slope"),
    [
        ([0.1, -0.1, 0.3], 0.1, 1.0),
        ([30.0, 0.0, -6.0], 8.0, 1.0),  # tokens are not clamped, their mean is
        ([30.0, 30.0, 0.0], 10.0, 0.0),
        ([-90.0, 0.0, 0.0], -20.0, 0.0),
    ],
)
def test_sequence_log_ratios_by_hand(own_gradient, distances, mean, slope):
    policy = torch.tensor([[math.nan, *distances], [math.nan] * 4], dtype=torch.float64)
    policy.requires_grad_()
    mask = torch.tensor([[False, True, True, True], [False] * 4])
    result = sequence_log_ratio(policy, torch.zeros_like(policy), mask, own_gradient=own_gradient)
    assert result.shape == policy.shape
    assert result[0, 1:].tolist() == pytest.approx([mean] * 3)
    # the last token's value: by its own log-prob only, or by a third of each
    (gradient,) = torch.autograd.grad(result[0, 3], policy)
    expected = [0.0, 0.0, 0.0, slope] if own_gradient else [0.0, *([slope / 3] * 3)]
    assert gradient[0].tolist() == pytest.approx(expected)
    assert gradient[1].count_nonzero() == 0
    if not own_gradient:
        assert result[1].tolist() == [0.0] * 4


# --- KL ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "ref", "value", "gradient"),
    [
        (-1.0, -1.0, 0.0, 0.0),
        # u = ln 2: 2 - 0.6931472 - 1; gradient 1 - 2
        (-1.0 - math.log(2), -1.0, 0.3068528, -1.0),
        # u = -ln 2: 0.5 + 0.6931472 - 1; gradient 1 - 0.5
        (-1.0 + math.log(2), -1.0, 0.1931472, 0.5),
        # u = 3: e^3 - 4 = 16.09, clamped to 10
        (-4.0, -1.0, 10.0, 0.0),
        # u = -30, clamped to -20: 2e-9 + 20 - 1 = 19, clamped to 10
        (-1.0, -31.0, 10.0, 0.0),
    ],
)
def test_k3_by_hand(policy, ref, value, gradient):
    leaf = torch.tensor([[policy]], dtype=torch.float64, requires_grad=True)
    result = k3_kl(leaf, torch.tensor([[ref]], dtype=torch.float64))
    result.sum().backward()
    assert (result.item(), leaf.grad.item()) == pytest.approx((value, gradient), abs=1e-7)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, scale=st.floats(0.1, 20))
def test_k3_agrees_with_the_reference(seed, scale):
    policy, anchor, _, _ = random_batch(seed, dtype=torch.float64)
    ref = policy + scale * (anchor - policy)
    policy.requires_grad_()
    values = k3_kl(policy, ref)
    (gradient,) = torch.autograd.grad(values.sum(), policy)
    expected_values, expected_gradient = reference.k3(policy.detach().numpy(), ref.numpy())
    np.testing.assert_allclose(values.detach().numpy(), expected_values, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(gradient.numpy(), expected_gradient, rtol=1e-9, atol=1e-14)


def test_k3_keeps_its_digits_in_float32():
    # u = 3e-4: u^2 / 2 + u^3 / 6 = 4.50045e-8; exp(u) - u - 1 in float32 steps by 1.2e-7
    policy = torch.tensor([[-3e-4]])
    assert k3_kl(policy, torch.zeros(1, 1)).item() == pytest.approx(4.50045e-8, rel=2e-3)


# --- aggregation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "value", "weight_a", "weight_b"),
    [
        ("token-mean", 10 / 6, 1 / 6, 1 / 6),  # (2 + 8) / 6
        ("seq-mean-token-mean", 1.5, 1 / 4, 1 / 8),  # (1 + 2) / 2
        ("seq-mean-token-sum", 5.0, 1 / 2, 1 / 2),  # (2 + 8) / 2
        ("seq-mean-token-sum-norm", 0.625, 1 / 16, 1 / 16),  # 5 / 8
    ],
)
def test_aggregates_by_hand(mode, value, weight_a, weight_b):
    losses = torch.tensor([[1.0, 1.0, 9.0, 9.0], [2.0, 2.0, 2.0, 2.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    result = aggregate(losses, mask, mode=mode, num_tokens=6, num_sequences=2, max_length=8)
    (gradient,) = torch.autograd.grad(result, losses)
    assert result.item() == pytest.approx(value)
    assert gradient.flatten().tolist() == pytest.approx([weight_a] * 2 + [0.0] * 2 + [weight_b] * 4)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_aggregates_agree_with_the_reference(mode, seed):
    losses, _, _, mask = random_batch(seed, dtype=torch.float64)
    losses.requires_grad_()
    result = aggregate(
        losses,
        mask,
        mode=mode,
        num_tokens=int(mask.sum()),
        num_sequences=int(mask.any(dim=1).sum()),
        max_length=9,
    )
    (gradient,) = torch.autograd.grad(result, losses)
    expected = reference.aggregate(losses.detach().numpy(), mask.numpy(), mode, max_length=9)
    assert result.item() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    for row, row_mask in enumerate(mask):
        weight = reference.token_weight(mask.numpy(), row, mode, max_length=9)
        expected_row = [weight if m else 0.0 for m in row_mask.tolist()]
        assert gradient[row].tolist() == pytest.approx(expected_row, rel=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 1), (1, 4), (2, 2)])
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_one_gradient_for_every_partition(mode, num_ranks, num_micro_batches, seed):
    """Log-probs depend on shared weights, as in a model; shares are summed over the parts."""
    policy, anchor, advantages, mask = random_batch(seed, num_rows=8, dtype=torch.float64)
    counts = (int(mask.sum()), int(mask.any(dim=1).sum()))

    def share(weights, rows):
        leaf = policy[rows] + anchor[rows] * weights
        losses = dapo_head(leaf, anchor[rows], advantages[rows], mask[rows], **DAPO)
        return aggregate(
            losses,
            mask[rows],
            mode=mode,
            num_tokens=counts[0],
            num_sequences=counts[1],
            max_length=8,
        )

    whole_weights = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    whole = share(whole_weights, torch.arange(8))
    (whole_gradient,) = torch.autograd.grad(whole, whole_weights)
    expected, _ = reference.clipped_losses(
        policy.numpy(), anchor.numpy(), advantages.numpy(), 0.2, 0.28, None
    )
    assert whole.item() == pytest.approx(
        reference.aggregate(expected, mask.numpy(), mode, max_length=8), rel=1e-10, abs=1e-13
    )

    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    weights = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    total = 0.0
    for rank_rows in order.chunk(num_ranks):
        for rows in rank_rows.chunk(num_micro_batches):
            part = share(weights, rows)
            part.backward()
            total += part.item()
    assert total == pytest.approx(whole.item(), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(weights.grad, whole_gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, width=st.integers(1, 70), left=st.integers(0, 40), right=st.integers(0, 40))
def test_padding_changes_no_bit(mode, dtype, seed, width, left, right):
    batch = random_batch(seed, width=width, dtype=dtype)
    padded = [
        torch.nn.functional.pad(values, (left, right), value=fill)
        for values, fill in zip(batch, (-7.7, -3.3, 1.9, False), strict=True)
    ]
    loss, gradient = loss_and_gradient(*batch, mode=mode)
    padded_loss, padded_gradient = loss_and_gradient(*padded, mode=mode)
    assert torch.equal(loss, padded_loss)
    assert torch.equal(gradient, padded_gradient[:, left : left + width])
    assert padded_gradient[:, :left].count_nonzero() == 0


@pytest.mark.parametrize("mode", AGGREGATIONS)
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_row_order_changes_at_most_the_last_unit(mode, seed):
    batch = random_batch(seed, num_rows=9, width=33)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    loss, gradient = loss_and_gradient(*batch, mode=mode)
    other_loss, other_gradient = loss_and_gradient(*(x[order] for x in batch), mode=mode)
    unit = torch.nextafter(loss.abs(), torch.tensor(math.inf)) - loss.abs()
    assert (other_loss - loss).abs() <= unit
    assert torch.equal(other_gradient, gradient[order])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_masked_inputs_do_not_poison(mode, poison):
    clean = random_batch(11)
    mask = clean[3]
    loss, gradient = loss_and_gradient(*clean, mode=mode)
    for poisoned in ((0,), (1,), (2,), (0, 1, 2)):
        dirty = [
            torch.where(mask, x, poison) if i in poisoned else x for i, x in enumerate(clean[:3])
        ]
        dirty_loss, dirty_gradient = loss_and_gradient(*dirty, mask, mode=mode)
        assert torch.equal(dirty_loss, loss)
        assert torch.equal(dirty_gradient, gradient)


def test_blanking_passes_no_gradient_at_masked_positions():
    values = torch.tensor([[math.nan, 2.0]], requires_grad=True)
    blanked = blank(values, torch.tensor([[False, True]]))
    (blanked.exp() * math.e).sum().backward()
    assert blanked.tolist() == [[0.0, 2.0]]
    assert values.grad.tolist() == [[0.0, pytest.approx(math.e**3)]]


def test_nan_at_a_trained_token_stays_visible():
    policy, anchor, advantages, mask = random_batch(11)
    policy[1, 0] = math.nan
    assert mask[1, 0]
    assert loss_and_gradient(policy, anchor, advantages, mask)[0].isnan()


def test_a_zero_weight_micro_batch_takes_part_with_zero():
    policy, anchor, advantages, mask = random_batch(5)
    loss, gradient = loss_and_gradient(
        policy, anchor, advantages, torch.zeros_like(mask), counts=(10, 2)
    )
    assert loss.item() == 0.0
    assert gradient.count_nonzero() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "token-sum"}, "unknown aggregation 'token-sum'"),
        ({"num_tokens": 5}, "6 trained tokens in 2 sequences, but num_tokens is 5"),
        ({"num_sequences": 1}, "num_sequences 1"),
        ({"mode": "seq-mean-token-sum-norm"}, "max_length is None"),
        ({"mode": "seq-mean-token-sum-norm", "max_length": 0}, "max_length is 0"),
        ({"mask": torch.ones(2, 3)}, "torch.float32"),
        ({"mask": torch.ones(2, 1, dtype=torch.bool)}, r"\(2, 1\)"),
    ],
)
def test_impossible_aggregates_are_refused(changes, message):
    arguments = {
        "mask": torch.ones(2, 3, dtype=torch.bool),
        "mode": "token-mean",
        "num_tokens": 6,
        "num_sequences": 2,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        aggregate(torch.ones(2, 3), arguments.pop("mask"), **arguments)


@pytest.mark.parametrize(
    ("mode", "original", "kept"),
    [
        ("token-mean", 7 / 6, 7 / 4),  # 1 + 2 + 2 + 2
        ("seq-mean-token-mean", 1.0, 1.5),  # (1/2 + 6/4) / 2; (1/1 + 6/3) / 2
        ("seq-mean-token-sum", 3.5, 3.5),
    ],
)
@pytest.mark.parametrize("split", [False, True])
def test_both_denominators_by_hand(mode, original, kept, split):
    losses = torch.tensor([[1.0, 1.0, 9.0, 9.0], [2.0, 2.0, 2.0, 2.0]])
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    keep = torch.tensor([[True, False, True, True], [True, True, False, True]])
    parts = [slice(0, 1), slice(1, 2)] if split else [slice(0, 2)]
    counts = {"num_tokens": 6, "num_sequences": 2}
    shares = [
        aggregate(torch.where(keep, losses, 0.0)[rows], mask[rows], mode=mode, **counts)
        for rows in parts
    ]
    assert sum(shares).item() == pytest.approx(original)
    counts = {"num_tokens": 4, "num_sequences": 2}
    shares = [aggregate(losses[rows], (mask & keep)[rows], mode=mode, **counts) for rows in parts]
    assert sum(shares).item() == pytest.approx(kept)


def test_a_row_of_rejected_tokens_counts_only_in_the_original_denominator():
    losses, mask = torch.tensor([[3.0, 3.0], [5.0, 5.0]]), torch.ones(2, 2, dtype=torch.bool)
    kept = torch.tensor([[True, True], [False, False]])
    mode = "seq-mean-token-mean"
    original = aggregate(blank(losses, kept), mask, mode=mode, num_tokens=4, num_sequences=2)
    assert original.item() == 1.5
    assert aggregate(losses, kept, mode=mode, num_tokens=2, num_sequences=1).item() == 3.0


# --- statistics ----------------------------------------------------------------------------------


def test_ratio_statistics_by_hand():
    ratios = torch.tensor([[2.0, 2.0, 0.5], [0.5, 1.0, 8.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    statistics = ratio_statistics(ratios.log().requires_grad_(), torch.zeros(2, 3), mask)
    assert {name: value.item() for name, value in statistics.items()} == pytest.approx(
        {
            "tokens": 5,
            "ratio_sum": 6.0,  # 2 + 2 + 0.5 + 0.5 + 1
            "ratio_max": 2.0,
            "log_ratio_abs_sum": 4 * math.log(2),
            "weight_sum": 6.0,
            "weight_square_sum": 9.5,  # 4 + 4 + 0.25 + 0.25 + 1; ESS = 36 / 9.5
        },
        rel=1e-6,
    )
    assert all(x.dtype == torch.float64 and not x.requires_grad for x in statistics.values())


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_ratio_statistics_add_over_micro_batches(seed):
    policy, anchor, _, mask = random_batch(seed, num_rows=6)
    batch = policy, anchor, mask
    whole = ratio_statistics(*batch)
    # the first part has no trained token at all
    parts = [ratio_statistics(*(x[rows] for x in batch)) for rows in ([0], [1, 4], [2, 3, 5])]
    for name, value in whole.items():
        values = [part[name].item() for part in parts]
        combined = max(values) if name == "ratio_max" else sum(values)
        assert combined == pytest.approx(value.item(), rel=1e-12)
    assert parts[0]["tokens"].item() == parts[0]["ratio_max"].item() == 0


def test_masked_nan_does_not_poison_the_statistics():
    policy, anchor, _, mask = random_batch(2)
    clean = ratio_statistics(policy, anchor, mask)
    dirty = ratio_statistics(*(torch.where(mask, x, math.nan) for x in (policy, anchor)), mask)
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)
