"""What a step does beyond the forward and backward of one micro-batch at a time."""

import math
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from module_cases import (
    DAPO,
    MAX_RESPONSE_TOKENS,
    fit,
    make_batches,
    make_groups,
    make_module,
    make_policy,
    near_policy,
    own_logprobs,
    relative_difference,
)

from pace_lightning.core.heads import HEADS
from pace_lightning.core.importance_weights import trajectory_log_ratio
from pace_lightning.core.logprobs import token_logprobs
from pace_lightning.core.objective import Objective
from pace_lightning.core.proximal_sources import Memoryless, recompute
from pace_lightning.core.step_size import effective_sample_size, ess_scale
from pace_lightning.training.proximal_models import EwmaPolicy
from pace_lightning.training.ranks import gather_vectors
from pace_lightning.training.score_norms import exact_score_square_norms

SEQUENCE_TIS = ("tis", {"level": "sequence", "cap": 8.0})
OBJECTIVES = {
    "m2po": Objective(HEADS["m2po"], {"min_clip_low": 0.01, "min_clip_high": 0.01}),
    "sat": Objective(HEADS["sat_grpo"], aggregation="seq-mean-token-mean"),
    "gmc": Objective(HEADS["reinforce"], corrections=[("gmc_grpo", {})]),
    "kept": Objective(HEADS["reinforce"], corrections=[("icepop", {})], mask_denominator="kept"),
    "vcpo": Objective(HEADS["reinforce"], corrections=[SEQUENCE_TIS], opob={}),
}


def draw(policy, micro_batches, seed=0, version=5):
    """One draw whose responses are short, so that products of ratios stay small."""
    split = make_batches(make_groups(seed), micro_batches, version=version)
    return near_policy(policy, split, spread=0.25)


def count_forwards(policy):
    calls = []
    policy.model.layers[0].self_attn.register_forward_hook(
        lambda *_: calls.append(torch.is_grad_enabled())
    )
    return calls


@pytest.mark.parametrize(
    ("name", "norms"), [*((name, "proxy") for name in sorted(OBJECTIVES)), ("vcpo", "exact")]
)
def test_statistics_of_the_draw_are_those_of_all_micro_batches(name, norms):
    objective = replace(OBJECTIVES[name], max_length=MAX_RESPONSE_TOKENS)
    gradients, metrics = [], []
    for micro_batches in (1, 4):
        policy = make_policy()
        batches = draw(policy, micro_batches)
        module = make_module(policy, objective=objective, opob_norms=norms)
        recorder, _ = fit(module, batches, micro_batches=micro_batches)
        gradients += recorder.gradients
        metrics += recorder.metrics
    assert float(gradients[0].norm()) > 1e-3
    assert relative_difference(gradients[1], gradients[0]) < 1e-5
    for key in ("loss/objective", "loss/active_share", "ratio/sequence_ess_share"):
        assert metrics[1][key] == pytest.approx(metrics[0][key], rel=1e-4, abs=1e-7), key


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_pass_before_the_first_backward_is_made_only_where_it_is_needed(micro_batches):
    for objective, passes in ((DAPO, 0), (OBJECTIVES["m2po"], micro_batches)):
        policy = make_policy()
        batches = draw(policy, micro_batches)
        calls = count_forwards(policy)
        recorder, _ = fit(make_module(policy, objective=objective), batches,
                          micro_batches=micro_batches)  # fmt: skip
        # a single micro-batch is the whole draw: its own forward pass comes before its backward
        passes = 0 if micro_batches == 1 else passes
        assert calls == [False] * passes + [True] * micro_batches
        assert ("time/prepass_seconds" in recorder.metrics[0]) == (passes > 0)


def test_the_pass_keeps_gradients_under_autocast():
    gradients = []
    for micro_batches in (1, 2):  # without and with a pass
        policy = make_policy()
        module = make_module(policy, objective=OBJECTIVES["m2po"])
        recorder, _ = fit(
            module, draw(policy, micro_batches), micro_batches=micro_batches, precision="bf16-mixed"
        )
        gradients += recorder.gradients
    assert relative_difference(gradients[1], gradients[0]) < 0.05


def test_exact_score_norms_are_those_of_whole_gradients_and_leave_no_trace():
    policy = make_policy()
    (batch,) = draw(policy, 1)
    batch.loss_mask[2] = False

    def logprobs(part):
        return token_logprobs(policy, part.input_ids, part.attention_mask, part.loss_mask)[0]

    norms = exact_score_square_norms(policy, batch, logprobs)
    assert all(p.grad is None for p in policy.parameters())
    for row in range(len(batch.loss_mask)):
        policy.zero_grad()
        values = logprobs(batch)[row]
        values[batch.loss_mask[row]].sum().backward()
        expected = sum(float(p.grad.double().square().sum()) for p in policy.parameters())
        assert norms[row].item() == pytest.approx(expected, rel=1e-4, abs=1e-12)
    assert norms[2] == 0


def test_decoupled_with_recompute_has_a_ratio_of_one_and_costs_nothing():
    objective = replace(DAPO, corrections=[("tis", {"cap": 1.1})], has_proximal=True)
    policy = make_policy()
    batches = draw(policy, 2)
    calls = count_forwards(policy)
    module = make_module(policy, objective=objective, proximal=Memoryless(recompute))
    expected = 0.0
    for batch in batches:
        logprobs, _ = own_logprobs(policy, batch)
        weight = (logprobs - batch.behavior_logprobs).exp().clamp(max=1.1)
        expected -= float((batch.advantages * weight)[batch.loss_mask].sum())
    calls.clear()
    recorder, _ = fit(module, batches, micro_batches=2)
    assert calls == [True, True]
    metrics = recorder.metrics[0]
    assert metrics["loss/active_share"] == 1
    assert metrics["loss/objective"] == pytest.approx(
        expected / metrics["tokens/trained"], rel=1e-4
    )
    assert metrics["ratio/behavior_log_abs_mean"] == pytest.approx(
        metrics["ratio/log_abs_mean"], rel=1e-6
    )
    assert metrics["loss/correction_mean"] < metrics["ratio/mean"]


# --- the step size --------------------------------------------------------------------------------


class SeenRates(pl.Callback):
    """The rate after each step, as the schedule goes on from it."""

    def __init__(self):
        self.rates = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def steps_of(module, policy, num_steps=3, micro_batches=2, callbacks=()):
    draws = [draw(policy, micro_batches, seed, version=seed) for seed in range(num_steps)]
    batches = [batch for micro in draws for batch in micro]
    return fit(module, batches, micro_batches=micro_batches, callbacks=callbacks)


def test_ess_scaling_acts_on_the_step_and_the_rate_comes_back():
    policy = make_policy()
    (batch,) = draw(policy, 1)
    logprobs, _ = own_logprobs(policy, batch)
    ratios = trajectory_log_ratio(logprobs, batch.behavior_logprobs, batch.loss_mask)
    scale = ess_scale(ratios)
    assert 0.1 < scale < 0.95
    before = {k: v.detach().clone() for k, v in policy.named_parameters()}
    seen = SeenRates()
    module = make_module(policy, learning_rate=1e-3, rate_scale=ess_scale)
    recorder, _ = fit(module, draw(policy, 2), micro_batches=2, callbacks=[seen])
    metrics = recorder.metrics[0]
    assert metrics["optim/learning_rate"] == pytest.approx(1e-3 * scale, rel=1e-4)
    assert metrics["optim/cumulated_learning_rate"] == metrics["optim/learning_rate"]
    share = effective_sample_size(ratios).item() / len(ratios)
    assert metrics["ratio/sequence_ess_share"] == pytest.approx(share, rel=1e-4)
    assert seen.rates[-1] == 1e-3
    # the first step of AdamW moves each weight by the rate itself
    moved = max(float((p - before[k]).abs().max()) for k, p in policy.named_parameters())
    assert moved == pytest.approx(1e-3 * scale, rel=1e-2)


def test_the_scaled_rate_follows_the_schedule():
    policy = make_policy()
    module = make_module(policy, learning_rate=1e-4, warmup_steps=4, rate_scale=lambda _: 0.5)
    recorder, _ = steps_of(module, policy)
    rates = [m["optim/learning_rate"] for m in recorder.metrics]
    assert rates == pytest.approx([0.125e-4, 0.25e-4, 0.375e-4])
    cumulated = [m["optim/cumulated_learning_rate"] for m in recorder.metrics]
    assert cumulated == pytest.approx([0.125e-4, 0.375e-4, 0.75e-4])


def test_the_stale_budget_bounds_rate_times_lag_after_the_other_scale():
    policy = make_policy()
    batches = draw(policy, 2)
    lags = [(b.version - b.token_versions[b.loss_mask]).double() for b in batches]
    lag = float(torch.cat(lags).mean())
    assert 0.5 < lag < 2
    for budget, expected in ((1e-5, 1e-5 / lag), (1.0, 0.8e-4)):
        module = make_module(
            make_policy(), learning_rate=1e-4, rate_scale=lambda _: 0.8, stale_budget=budget
        )
        recorder, _ = fit(module, batches, micro_batches=2)
        assert recorder.metrics[0]["optim/learning_rate"] == pytest.approx(expected, rel=1e-5)


def test_the_rates_of_a_run_sum_to_its_lifetime_budget():
    for budget, expected in ((1.5e-4, [0.5e-4] * 3), (1.0, [1e-4] * 3)):
        policy = make_policy()
        module = make_module(policy, learning_rate=1e-4, lifetime_budget=budget)
        recorder, _ = steps_of(module, policy)
        rates = [m["optim/learning_rate"] for m in recorder.metrics]
        assert rates == pytest.approx(expected)
    policy = make_policy()
    module = make_module(policy, learning_rate=1e-4, warmup_steps=4, lifetime_budget=1.4e-4)
    recorder, _ = steps_of(module, policy)
    # scheduled 0.25, 0.5, 0.75; 1.4/3 is no bound, (1.4 - .25)/2 neither, what is left is 0.65
    rates = [m["optim/learning_rate"] for m in recorder.metrics]
    assert rates == pytest.approx([0.25e-4, 0.5e-4, 0.65e-4])


# --- memory ---------------------------------------------------------------------------------------


def test_an_average_of_the_weights_moves_after_each_step_and_is_in_the_checkpoint(tmp_path):
    objective = replace(DAPO, corrections=[("mis", {})], has_proximal=True)

    def build():
        source = EwmaPolicy(decay=0.5, reset_below=0.0)
        return make_module(make_policy(), objective=objective, proximal=source), source

    module, source = build()
    versions = []
    after_step = source.after_step

    def watch(version, parameters, **options):
        versions.append((version, options["active_share"]))
        after_step(version, parameters, **options)

    source.after_step = watch
    _, trainer = steps_of(module, module.policy)
    assert [version for version, _ in versions] == [1, 2, 3]
    assert all(0 < share <= 1 for _, share in versions)
    # W = 1, 1.5, 1.75, 1.875; lag = 0.5 W (lag + 1) / W': 1/3, 4/7, 11/15
    assert module.step_metrics["proximal/lag_versions"] == pytest.approx(11 / 15)
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)

    again, other = build()
    checkpoint = torch.load(path, weights_only=True)
    again.on_load_checkpoint(checkpoint)
    assert other.lag_versions == source.lag_versions
    for name, mean in source.parameters.items():
        assert torch.equal(other.parameters[name], mean)
    assert again._cumulated_rate == module._cumulated_rate > 0


# --- ranks ----------------------------------------------------------------------------------------


def test_vectors_of_different_lengths_are_gathered():
    vectors = [torch.tensor([1.0, 2.0, 3.0]), torch.zeros(0), torch.tensor([4.0])]

    def all_gather_of(rank):
        calls = []

        def all_gather(tensor):
            calls.append(tensor)
            if len(calls) == 1:
                return torch.tensor([[len(v)] for v in vectors])
            assert tensor.shape == (3,)
            return torch.stack([torch.nn.functional.pad(v, (0, 3 - len(v))) for v in vectors])

        return all_gather

    for rank, vector in enumerate(vectors):
        assert gather_vectors(vector, all_gather_of(rank)).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_log_prob_that_is_not_finite_is_an_error_in_the_pass_too():
    policy = make_policy()
    batches = draw(policy, 2)
    batches[1].behavior_logprobs[batches[1].loss_mask] = math.nan
    module = make_module(policy, objective=OBJECTIVES["sat"])
    with pytest.raises(Exception, match=r"nan|NaN|not finite"):
        fit(module, batches, micro_batches=2)
