"""One optimizer step of the real Trainer: its gradient, its size, and what is said about it."""

import math
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import reference
import torch
from module_cases import (
    CLIP_HIGH,
    CLIP_LOW,
    DAPO,
    VERSION,
    fit,
    gradients_of,
    make_batches,
    make_groups,
    make_module,
    make_policy,
    near_policy,
    own_logprobs,
    relative_difference,
)

from pace_lightning.core.batch import TrainBatch
from pace_lightning.core.heads import Head
from pace_lightning.core.logprobs import token_logprobs
from pace_lightning.core.losses import AGGREGATIONS
from pace_lightning.core.objective import Objective
from pace_lightning.training import batch_logprobs as batch_logprobs_file
from pace_lightning.training.batch_logprobs import PLAIN_SCORES, batch_logprobs
from pace_lightning.training.module import NonFiniteLossError
from pace_lightning.training.policy import copy_for_engine

# --- the gradient ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["plain", "shared prompts"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_of_a_step_does_not_depend_on_its_partition(aggregation, shared):
    gradients, losses = {}, {}
    for micro_batches in (1, 2, 4):
        policy = make_policy()
        split = make_batches(make_groups(), micro_batches, keep_groups=shared)
        batches = near_policy(policy, split)
        module = make_module(
            policy, objective=replace(DAPO, aggregation=aggregation), share_prompts=shared
        )
        recorder, _ = fit(module, batches, micro_batches=micro_batches)
        (gradients[micro_batches],) = recorder.gradients
        losses[micro_batches] = recorder.metrics[0]["loss/objective"]
    for micro_batches in (2, 4):
        assert relative_difference(gradients[micro_batches], gradients[1]) < 1e-6
        assert losses[micro_batches] == pytest.approx(losses[1], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("limit", "fused"), [(PLAIN_SCORES, False), (0, True)], ids=["short", "long"]
)
def test_short_rows_on_a_cpu_do_without_the_fused_attention(limit, fused, monkeypatch):
    monkeypatch.setattr(batch_logprobs_file, "PLAIN_SCORES", limit)
    policy = make_policy()
    (batch,) = make_batches(make_groups(), 1)
    with torch.profiler.profile() as profile:
        logprobs, _ = batch_logprobs(policy, batch, temperature=1.0, chunk_tokens=64)
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert (kernel in {event.key for event in profile.key_averages()}) == fused
    whole, _ = token_logprobs(policy, batch.input_ids, batch.attention_mask, batch.loss_mask)
    torch.testing.assert_close(logprobs, whole, atol=1e-5, rtol=0)


def test_shared_prompts_give_the_gradient_of_whole_rows():
    gradients = []
    for shared in (False, True):
        policy = make_policy()
        batches = near_policy(policy, make_batches(make_groups(), 2, keep_groups=True))
        recorder, _ = fit(make_module(policy, share_prompts=shared), batches, micro_batches=2)
        gradients += recorder.gradients
    assert relative_difference(gradients[1], gradients[0]) < 2e-6


def test_zero_weight_rows_add_nothing_to_the_gradient():
    groups = make_groups(num_groups=1, group_size=3)
    gradients = []
    for micro_batches in (1, 6):
        policy = make_policy()
        batches = near_policy(policy, make_batches(groups, micro_batches))
        recorder, _ = fit(make_module(policy), batches, micro_batches=micro_batches)
        gradients += recorder.gradients
    assert relative_difference(gradients[1], gradients[0]) < 1e-6


def test_on_policy_the_gradient_is_that_of_minus_advantage_times_log_prob():
    policy = make_policy()
    (batch,) = near_policy(policy, make_batches(make_groups()), spread=0.0)
    logprobs, _ = token_logprobs(policy, batch.input_ids, batch.attention_mask, batch.loss_mask)
    loss = -(batch.advantages * logprobs)[batch.loss_mask].sum() / int(batch.loss_mask.sum())
    loss.backward()
    expected = gradients_of(policy)

    recorder, _ = fit(make_module(policy), [batch])
    assert relative_difference(recorder.gradients[0], expected) < 1e-6
    metrics = recorder.metrics[0]
    assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["ratio/ess_share"] == pytest.approx(1, abs=1e-6)
    assert metrics["loss/active_share"] == 1
    assert metrics["loss/inactive_negative_share"] == metrics["loss/inactive_positive_share"] == 0


def test_the_trainers_log_probs_are_at_the_temperature_of_the_rollouts():
    policy = make_policy()
    (batch,) = make_batches(make_groups())
    batch.behavior_logprobs, _ = own_logprobs(policy, batch, temperature=0.7)
    recorder, _ = fit(make_module(policy, temperature=0.7), [batch])
    assert recorder.metrics[0]["ratio/log_abs_mean"] < 1e-6
    assert recorder.metrics[0]["ratio/lag0_log_abs_max"] < 1e-5


def test_gradient_checkpointing_recomputes_layers_and_changes_no_gradient(monkeypatch):
    monkeypatch.setattr(batch_logprobs_file, "PLAIN_SCORES", 0)  # one attention kernel for both
    gradients, forwards = [], []
    for checkpointing in (False, True):
        policy = make_policy()
        batches = near_policy(policy, make_batches(make_groups()))
        module = make_module(policy, gradient_checkpointing=checkpointing)
        calls = []
        policy.model.layers[0].self_attn.register_forward_hook(
            lambda *_, calls=calls: calls.append(1)
        )
        recorder, _ = fit(module, batches)
        gradients += recorder.gradients
        forwards.append(len(calls))
    assert relative_difference(gradients[1], gradients[0]) < 1e-6
    assert forwards == [1, 2]


def test_a_step_with_a_positive_advantage_makes_its_tokens_likelier():
    policy = make_policy()
    (batch,) = near_policy(policy, make_batches(make_groups()), spread=0.0)
    before, _ = own_logprobs(policy, batch)
    fit(make_module(policy), [batch])
    after, _ = own_logprobs(policy, batch)
    moved = ((after - before) * batch.advantages)[batch.loss_mask].sum()
    assert moved > 0.1


# --- the step -------------------------------------------------------------------------------------


def test_the_version_counts_draws_and_not_micro_batches():
    policy = make_policy()
    draws = [make_batches(make_groups(seed), 4) for seed in range(3)]
    batches = near_policy(policy, [batch for draw in draws for batch in draw])
    recorder, trainer = fit(make_module(policy), batches, micro_batches=4)
    assert trainer.global_step == 3
    assert recorder.versions == [0, 1, 2]
    assert len(recorder.metrics) == 3


def test_the_reported_gradient_norm_is_the_one_before_clipping():
    policy = make_policy()
    batches = near_policy(policy, make_batches(make_groups(), 2))
    recorder, _ = fit(make_module(policy, max_grad_norm=1e-3), batches, micro_batches=2)
    norm = float(recorder.gradients[0].norm())
    assert norm > 1e-2
    assert recorder.metrics[0]["loss/gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert float(recorder.clipped[0].norm()) == pytest.approx(1e-3, rel=1e-3)
    direction = recorder.clipped[0] / recorder.clipped[0].norm()
    assert relative_difference(direction, recorder.gradients[0] / norm) < 1e-5


def test_a_gradient_below_the_limit_is_left_alone():
    policy = make_policy()
    batches = near_policy(policy, make_batches(make_groups()))
    recorder, _ = fit(make_module(policy, max_grad_norm=1e3), batches)
    assert torch.equal(recorder.clipped[0], recorder.gradients[0])


def test_the_learning_rate_warms_up_linearly_and_the_reported_one_is_the_one_used():
    policy = make_policy()
    batches = near_policy(policy, [make_batches(make_groups(seed))[0] for seed in range(6)])
    recorder, _ = fit(make_module(policy, learning_rate=1e-4, warmup_steps=4), batches)
    expected = [0.25e-4, 0.5e-4, 0.75e-4, 1e-4, 1e-4, 1e-4]
    assert recorder.learning_rates == pytest.approx(expected)
    reported = [metrics["optim/learning_rate"] for metrics in recorder.metrics]
    assert reported == pytest.approx(expected)


def test_without_warm_up_the_first_step_has_the_full_rate():
    policy = make_policy()
    batches = near_policy(policy, make_batches(make_groups()))
    recorder, _ = fit(make_module(policy, learning_rate=1e-4), batches)
    assert recorder.learning_rates == pytest.approx([1e-4])


def test_a_loss_that_is_not_finite_names_its_step_and_leaves_the_weights_alone():
    policy = make_policy()
    good = near_policy(policy, make_batches(make_groups(0), 2, version=0))
    bad = near_policy(policy, make_batches(make_groups(1), 2, version=1))
    bad[1].advantages[bad[1].loss_mask] = math.nan
    weights = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            weights.append([p.detach().clone() for p in pl_module.policy.parameters()])

    module = make_module(policy)
    with pytest.raises(NonFiniteLossError, match="the loss of step 1, micro-batch 1 is nan"):
        fit(module, [*good, *bad], micro_batches=2, callbacks=[Watch()])
    assert all(torch.equal(p, w) for p, w in zip(policy.parameters(), weights[-1], strict=True))
    assert any(not torch.equal(one, other) for one, other in zip(*weights[1:3], strict=True))


def test_a_gradient_that_is_not_finite_is_refused_although_the_loss_is():
    policy = make_policy()
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}

    def head(logprobs, anchor, advantages, mask):  # 0, with slope infinity
        return (logprobs - logprobs.detach()).sqrt()

    batches = near_policy(policy, make_batches(make_groups()))
    with pytest.raises(NonFiniteLossError, match=r"the gradient norm of step 0 is (nan|inf)"):
        fit(make_module(policy, objective=Objective(Head(head))), batches)
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_batch_keeps_its_precision_whatever_that_of_the_network(precision):
    policy = make_policy()
    (batch,) = make_batches(make_groups())
    batch.behavior_logprobs[batch.loss_mask] = -12.3456  # -12.375 in bfloat16
    names = [n for n in TrainBatch.__slots__ if isinstance(getattr(batch, n), torch.Tensor)]
    expected = {name: getattr(batch, name).clone() for name in names}
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(batch)
            assert {p.dtype for p in pl_module.policy.parameters()} == {
                torch.bfloat16 if precision == "bf16-true" else torch.float32
            }

    recorder, _ = fit(make_module(policy), [batch], precision=precision, callbacks=[Watch()])
    assert seen == [batch]
    for name in names:
        actual = getattr(batch, name)
        assert actual.dtype == expected[name].dtype
        assert torch.equal(actual, expected[name])
    assert math.isfinite(recorder.metrics[0]["loss/objective"])
    assert recorder.metrics[0]["ratio/lag0_tokens"] > 0


def test_the_engine_gets_the_parameters_themselves_under_their_own_names():
    module = make_module()
    weights = module.weights()
    own = dict(module.policy.named_parameters())
    assert weights.keys() == own.keys()
    assert all(weights[name].data_ptr() == own[name].data_ptr() for name in own)
    assert not any(weight.requires_grad for weight in weights.values())


# --- the penalty ----------------------------------------------------------------------------------


def test_a_policy_that_is_its_own_reference_pays_no_penalty():
    policy = make_policy()
    twin = copy_for_engine(policy, torch.float32)
    groups = make_groups(equal_rewards=True)  # advantages 0: the penalty is all there is
    module = make_module(policy, reference=twin, kl_coef=1.0)
    recorder, _ = fit(module, near_policy(policy, make_batches(groups, 2)), micro_batches=2)
    assert recorder.metrics[0]["loss/kl"] == pytest.approx(0, abs=1e-9)
    assert recorder.metrics[0]["loss/objective"] == pytest.approx(0, abs=1e-9)
    assert recorder.metrics[0]["loss/gradient_norm"] < 1e-6


def test_the_penalty_pulls_back_to_the_reference_which_stays_where_it_is():
    policy, anchor = make_policy(seed=0), make_policy(seed=0).requires_grad_(False)
    with torch.no_grad():  # a policy that went astray, not far
        generator = torch.Generator().manual_seed(0)
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    frozen = {name: weight.clone() for name, weight in anchor.state_dict().items()}
    groups = make_groups(equal_rewards=True)
    batches = [near_policy(policy, make_batches(groups, version=v))[0] for v in range(8)]
    module = make_module(policy, reference=anchor, kl_coef=0.5)
    (batch, *_) = batches
    own, _ = own_logprobs(policy, batch)
    theirs, _ = own_logprobs(anchor, batch)
    mask = batch.loss_mask
    values, _ = reference.k3(own[mask].double().numpy(), theirs[mask].double().numpy())

    recorder, _ = fit(module, batches)
    penalties = [metrics["loss/kl"] for metrics in recorder.metrics]
    assert penalties[0] == pytest.approx(values.mean(), rel=1e-4)
    assert recorder.metrics[0]["loss/objective"] == pytest.approx(0.5 * values.mean(), rel=1e-4)
    assert penalties[-1] < 0.7 * penalties[0]
    assert all(torch.equal(weight, frozen[name]) for name, weight in anchor.state_dict().items())
    assert not any("reference" in name for name in module.state_dict())
    assert len(list(module.parameters())) == len(list(policy.parameters()))


# --- the statistics -------------------------------------------------------------------------------


def expected_statistics(policy, groups, version):
    """The numbers of `finish_step`, from loops over single tokens of the whole draw."""
    (batch,) = near_policy(policy, make_batches(groups, version=version), spread=0.6)
    logprobs, entropies = own_logprobs(policy, batch)
    mask = batch.loss_mask.numpy()
    own, anchor = logprobs.double().numpy(), batch.behavior_logprobs.double().numpy()
    advantages = batch.advantages.double().numpy()
    losses, _ = reference.clipped_losses(own, anchor, advantages, CLIP_LOW, CLIP_HIGH, None)
    ratios, low, high, gaps, fresh, entropy = [], 0, 0, [], [], []
    for at in zip(*mask.nonzero(), strict=True):
        ratio = math.exp(own[at] - anchor[at])
        ratios.append(ratio)
        gaps.append(abs(own[at] - anchor[at]))
        entropy.append(float(entropies[at]))
        low += advantages[at] < 0 and ratio < 1 - CLIP_LOW
        high += advantages[at] > 0 and ratio > 1 + CLIP_HIGH
        if batch.token_versions[at] == version:
            fresh.append(gaps[-1])
    count = len(ratios)
    assert low
    assert high
    assert 0 < len(fresh) < count
    return {
        "loss/active_share": 1 - (low + high) / count,
        "ratio/second_moment": sum(gap * gap for gap in gaps) / count,
        "loss/objective": reference.aggregate(losses, mask, "token-mean"),
        "loss/inactive_negative_share": low / count,
        "loss/inactive_positive_share": high / count,
        "policy/entropy_nats": sum(entropy) / count,
        "ratio/mean": sum(ratios) / count,
        "ratio/max": max(ratios),
        "ratio/log_abs_mean": sum(gaps) / count,
        "ratio/ess_share": sum(ratios) ** 2 / sum(r * r for r in ratios) / count,
        "ratio/lag0_log_abs_mean": sum(fresh) / len(fresh),
        "ratio/lag0_log_abs_max": max(fresh),
        "ratio/lag0_tokens": len(fresh),
        "tokens/trained": count,
    }


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_statistics_of_each_step_are_those_of_its_whole_draw_alone(micro_batches):
    policy = make_policy()
    draws, expected = [], []
    for seed in (0, 1):
        groups = make_groups(seed)
        expected.append(expected_statistics(policy, groups, VERSION))
        draws += near_policy(policy, make_batches(groups, micro_batches), spread=0.6)
    consumed = [
        sum(int(batch.attention_mask.sum()) for batch in draws[i : i + micro_batches])
        for i in range(0, len(draws), micro_batches)
    ]
    module = make_module(policy, learning_rate=0.0)
    recorder, _ = fit(module, draws, micro_batches=micro_batches)
    assert len(recorder.metrics) == 2
    for metrics, values, tokens in zip(recorder.metrics, expected, consumed, strict=True):
        for name, value in values.items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        assert metrics["tokens/consumed"] == tokens
    assert module.step_metrics == recorder.metrics[1]


def test_a_draw_without_a_token_of_its_own_version_has_no_lag0_gap():
    policy = make_policy()
    batches = near_policy(policy, make_batches(make_groups(), version=VERSION + 1))
    recorder, _ = fit(make_module(policy), batches)
    assert not any("lag0" in name for name in recorder.metrics[0])
