"""Where methods must coincide: cross-checks of one implementation by another."""

import math

import pytest
import torch
from head_cases import random_batch, run_head, statistics_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pace_lightning.core.corrections import METHODS, correct
from pace_lightning.core.heads import HEADS, dapo_head
from pace_lightning.core.heads_batch import m2po_keep
from pace_lightning.core.losses import AGGREGATIONS, aggregate

SEEDS = st.integers(0, 2**31)
NAMES = sorted(HEADS)
EXACT = {"rtol": 0.0, "atol": 0.0}
CLOSE = {"rtol": 1e-12, "atol": 1e-14}


def assert_same(one, other, **tolerance):
    for x, y in zip(one, other, strict=True):
        torch.testing.assert_close(x, y, **(tolerance or EXACT))


def total_and_gradient(losses, policy, mask, mode):
    """Aggregated over one batch, with the gradient with respect to log pi."""
    counts = {"num_tokens": int(mask.sum()), "num_sequences": int(mask.any(1).sum())}
    total = aggregate(losses, mask, mode=mode, max_length=9, **counts)
    return total.detach(), torch.autograd.grad(total, policy)[0]


def corrected(name, numerator, behavior, advantages, mask, **settings):
    """A correction by name; all rows are one group."""
    groups = torch.zeros(len(mask), dtype=torch.int64)
    return correct(
        name, numerator, behavior, mask, advantages=advantages, group_ids=groups, **settings
    )


def decoupled(policy, proximal, behavior, advantages, mask, **bounds):
    """AReaL's objective, composed: the clip around the proximal policy, times prox / mu."""
    weight = corrected("tis", proximal, behavior, advantages, mask, cap=math.inf).weight
    return weight * dapo_head(policy, proximal, advantages, mask, **bounds)


# --- on policy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", AGGREGATIONS)
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_on_policy_every_head_gives_the_policy_gradient(name, mode, seed):
    policy, _, advantages, mask = random_batch(seed)
    statistics = statistics_of(name, policy, policy, advantages, mask)
    leaf = policy.clone().requires_grad_()
    losses = HEADS[name].function(leaf, policy, advantages, mask, **statistics)
    plain = leaf * -advantages
    _, gradient = total_and_gradient(losses, leaf, mask, mode)
    _, expected = total_and_gradient(plain, leaf, mask, mode)
    torch.testing.assert_close(gradient, expected, **CLOSE)


@pytest.mark.parametrize("name", [x for x in NAMES if HEADS[x].has_bounds or "m2po" in x])
@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_on_policy_every_surrogate_is_minus_the_advantage(name, seed):
    policy, _, advantages, mask = random_batch(seed, dtype=torch.float32)
    losses, gradient = run_head(name, policy, policy, advantages, mask)
    assert torch.equal(losses[mask], -advantages[mask])
    assert torch.equal(gradient[mask], -advantages[mask]) or name == "gspo"


@pytest.mark.parametrize("name", [x for x in sorted(METHODS) if x != "gepo"])
@settings(max_examples=5, deadline=None)
@given(seed=SEEDS)
def test_on_policy_no_correction_does_anything(name, seed):
    """GEPO is not among them: it divides by the group's expectation, whatever the policy is."""
    policy, _, advantages, mask = random_batch(seed)
    correction = corrected(name, policy, policy, advantages, mask)
    losses, _ = run_head("dapo", policy, policy, advantages, mask)
    assert torch.equal(correction.keep, mask)
    assert torch.equal(correction.weight * losses, losses)


# --- decoupled PPO -------------------------------------------------------------------------------


def test_decoupled_ppo_by_hand():
    # pi .6, prox .5, mu .4, A 1: w = 1.25, rho = 1.2 at the bound: -1.25 x 1.2; coupled: pi / mu =
    # 1.5, clipped to 1.2
    policy, proximal, behavior = (
        torch.tensor([[math.log(x)]], dtype=torch.float64) for x in (0.6, 0.5, 0.4)
    )
    advantages, mask = torch.ones_like(policy), torch.ones(1, 1, dtype=torch.bool)
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    losses = decoupled(policy, proximal, behavior, advantages, mask, **bounds)
    assert losses.item() == pytest.approx(-1.5)
    assert dapo_head(policy, behavior, advantages, mask, **bounds).item() == pytest.approx(-1.2)
    # A = -1: the way back: 1.25 x 1.2, with the gradient -A w rho
    leaf = policy.clone().requires_grad_()
    losses = decoupled(leaf, proximal, behavior, -advantages, mask, **bounds)
    losses.backward()
    assert (losses.item(), leaf.grad.item()) == pytest.approx((1.5, 1.5))


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_decoupled_ppo_with_prox_equal_to_mu_is_dapo(seed):
    policy, behavior, advantages, mask = random_batch(seed)
    leaf = policy.clone().requires_grad_()
    losses = decoupled(leaf, behavior, behavior, advantages, mask)
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    assert_same((losses.detach(), gradient), run_head("dapo", policy, behavior, advantages, mask))


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_decoupled_ppo_at_the_proximal_policy_is_unclipped_importance_sampling(seed):
    """So is the paper's M2PO without a mask, around mu; and AReaL's with the same mask."""
    policy, behavior, advantages, mask = random_batch(seed)
    limit = statistics_of("m2po_mask", policy, behavior, advantages, mask)
    kept = m2po_keep(policy, behavior, advantages, mask, **limit)
    assert kept[mask].any()
    assert not kept[mask].all()
    for keep, square_limit in ((kept, limit["square_limit"]), (mask, torch.tensor(math.inf))):
        leaf = policy.clone().requires_grad_()
        losses = decoupled(leaf, policy, behavior, advantages, mask) * keep
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        other = run_head(
            "m2po_mask",
            policy,
            behavior,
            advantages,
            mask,
            statistics={"square_limit": square_limit},
        )
        assert_same((losses.detach(), gradient), other, **CLOSE)


# --- bounds that do not bind, or are given -------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
@pytest.mark.parametrize("scale", [0.0, 1e9])
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_sat_that_contracts_nothing_is_its_base(name, scale, seed):
    batch = random_batch(seed, dtype=torch.float32)
    statistics = {"log_ratio_scale": torch.tensor(scale)}
    assert_same(run_head(f"sat_{name}", *batch, statistics=statistics), run_head(name, *batch))


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_m2po_within_its_budget_is_not_bounded(seed):
    batch = random_batch(seed)
    assert_same(run_head("m2po", *batch, budget=1e3), run_head("m2po_mask", *batch, budget=1e3))


@pytest.mark.parametrize("name", ["m2po", "bapo"])
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_m2po_and_bapo_with_given_bounds_are_dapo(name, seed):
    batch = random_batch(seed)
    statistics = {
        "ratio_low": torch.tensor(1 - 0.2, dtype=torch.float64),
        "ratio_high": torch.tensor(1 + 0.28, dtype=torch.float64),
    }
    dual = {} if name == "m2po" else {"dual_clip": 2.0}
    assert_same(
        run_head(name, *batch, statistics=statistics, **dual), run_head("dapo", *batch, **dual)
    )


def test_bapo_that_may_not_search_keeps_its_bounds():
    batch = random_batch(0)
    fixed = {
        "ratio_low_start": 0.8,
        "ratio_low_max": 0.8,
        "ratio_high_start": 1.28,
        "ratio_high_max": 1.28,
    }
    for target in (0.0, 1e9):
        got = statistics_of("bapo", *batch, target=target, **fixed)
        assert {k: x.item() for k, x in got.items()} == {"ratio_low": 0.8, "ratio_high": 1.28}


# --- sequences -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["token", "sequence"])
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_gspo_of_sequences_of_one_token_is_dapo(form, seed):
    batch = random_batch(seed, num_rows=20, width=1)
    bounds = {"clip_low": 0.2, "clip_high": 0.28}
    assert_same(
        run_head("gspo", *batch, form=form, **bounds), run_head("dapo", *batch, **bounds), **CLOSE
    )


@pytest.mark.parametrize("mode", AGGREGATIONS)
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_both_forms_of_gspo_have_one_gradient(mode, seed):
    policy, anchor, advantages, mask = random_batch(seed, spread=0.1)
    leaf = policy.clone().requires_grad_()
    token, sequence = (
        total_and_gradient(
            HEADS["gspo"].function(leaf, anchor, advantages, mask, form=form), leaf, mask, mode
        )
        for form in ("token", "sequence")
    )
    assert_same(token, sequence, **CLOSE)


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_luspo_is_gspo_summed_over_tokens(seed):
    """The mean over sequences of length x loss of the sequence, from its definition."""
    policy, anchor, advantages, mask = random_batch(seed, spread=0.01)
    bounds = {"clip_low": 2e-3, "clip_high": 2.5e-3}
    leaf = policy.clone().requires_grad_()
    losses = HEADS["gspo"].function(leaf, anchor, advantages, mask, **bounds)
    ours = total_and_gradient(losses, leaf, mask, "seq-mean-token-sum")
    expected = []
    for row in range(len(mask)):
        if mask[row].any():
            s = (leaf - anchor)[row, mask[row]].mean().exp()
            a = advantages[row, 0]
            loss = torch.maximum(-a * s, -a * s.clamp(1 - 2e-3, 1 + 2.5e-3))
            expected.append(mask[row].sum() * loss)
    total = torch.stack(expected).mean()
    assert_same(ours, (total.detach(), torch.autograd.grad(total, leaf)[0]), **CLOSE)


# --- detached weights ----------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_without_bounds_every_detached_weight_is_importance_sampling(seed):
    batch = random_batch(seed, spread=1.0)
    _, unclipped = run_head("m2po_mask", *batch, budget=1e3)
    cispo = run_head("cispo", *batch, ratio_cap=math.inf)
    torch.testing.assert_close(cispo[1], unclipped, **CLOSE)
    nothing = {"limit_low": 1e9, "limit_high": 1e9, "ratio_cap": math.inf}
    assert_same(run_head("dppo_tv", *batch, **nothing), cispo)
    assert_same(run_head("dppo_kl", *batch, **nothing), cispo)
    assert_same(run_head("sao", *batch, clip_low=1 - 1e-9, clip_high=math.inf), cispo)


@pytest.mark.parametrize(
    ("correction", "changes", "head", "bounds"),
    [
        ("tis", {"cap": 1.5}, "cispo", {"ratio_cap": 1.5}),
        ("mis", {"lower": 0.7, "upper": 1.6}, "sao", {"clip_low": 0.3, "clip_high": 0.6}),
    ],
)
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_reinforce_times_a_token_correction_is_a_head(correction, changes, head, bounds, seed):
    policy, behavior, advantages, mask = random_batch(seed)
    chosen = corrected(correction, policy, behavior, advantages, mask, **changes)
    losses, gradient = run_head("reinforce", policy, behavior, advantages, mask)
    composed = (torch.where(chosen.keep, chosen.weight * x, 0.0) for x in (losses, gradient))
    assert_same(composed, run_head(head, policy, behavior, advantages, mask, **bounds), **CLOSE)


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_cispo_with_its_mask_has_the_gradient_of_dapo_inside(seed):
    batch = random_batch(seed)
    _, dapo = run_head("dapo", *batch)
    _, masked = run_head("cispo", *batch, ratio_cap=1.28, ratio_low=0.8, unified_mask=True)
    _, plain = run_head("cispo", *batch, ratio_cap=1.28, ratio_low=0.8)
    assert torch.equal(masked == 0, dapo == 0)
    ratio = (batch[0] - batch[1]).exp()
    inside = batch[3] & (ratio >= 0.8) & (ratio <= 1.28)
    torch.testing.assert_close(masked[inside], dapo[inside], **CLOSE)
    assert (plain[batch[3]] != 0).all()


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_aspo_is_grpo_for_negative_advantages(seed):
    policy, anchor, advantages, mask = random_batch(seed)
    batch = policy, anchor, -advantages.abs(), mask
    bounds = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.5}
    assert_same(run_head("aspo", *batch, **bounds), run_head("grpo", *batch, **bounds))
