"""Adapters: what is trained, what is published, what is saved."""

import pytest
import torch
from module_cases import (
    fit,
    make_batches,
    make_groups,
    make_module,
    make_policy,
    near_policy,
    relative_difference,
)
from module_cases import own_logprobs as logprobs_of
from transformers import AutoConfig, AutoModelForCausalLM

from pace_lightning.rollout.vllm_weights import ServingDirectory, served_model
from pace_lightning.rollout.weights import LazyWeights, compare_manifest, copy_weights
from pace_lightning.training import batch_logprobs
from pace_lightning.training.lora import (
    adapted_layers,
    add_adapters,
    merged_weights,
    save_policy,
    trained_parameters,
    without_adapters,
)
from pace_lightning.training.policy import ModelError, copy_for_engine, load_policy
from pace_lightning.training.proximal_models import EwmaPolicy, SnapshotStore

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapt(policy, *, rank=4, alpha=16.0, moved=True, **options):
    """Put adapters on; ``moved``: as after some training, so that they matter."""
    add_adapters(policy, rank=rank, alpha=alpha, **options)
    if moved:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in trained_parameters(policy).items():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


def snapshot(weights):
    return {name: weight.detach().clone() for name, weight in weights.items()}


def far_batch(policy):
    """A batch of which the log-probs of the policy are some way from those of its behavior."""
    (batch,) = near_policy(policy, make_batches(make_groups(), keep_groups=True))
    return batch


# --- what is trained ------------------------------------------------------------------------------


def test_training_begins_at_the_model_itself_and_changes_adapters_only():
    policy = make_policy()
    batches = [far_batch(policy) for _ in range(2)]
    before, _ = logprobs_of(policy, batches[0])
    adapt(policy, moved=False)
    after, _ = logprobs_of(policy, batches[0])
    assert torch.equal(before, after)

    everything = snapshot(dict(policy.named_parameters()))
    _, trainer = fit(make_module(policy, learning_rate=1e-2), batches)
    changed = {
        name
        for name, parameter in policy.named_parameters()
        if not torch.equal(parameter, everything[name])
    }
    assert changed == set(trained_parameters(policy))
    assert all(".lora_" in name for name in changed)
    assert len(changed) == 2 * 2 * len(LAYERS)  # A and B, two blocks
    assert all(p.grad is None for p in policy.parameters() if not p.requires_grad)
    (optimizer,) = trainer.optimizers
    assert len(optimizer.state) == len(changed)


def test_only_the_layers_that_are_named_get_an_adapter():
    policy = adapt(make_policy(), target_modules=["q_proj", "model.layers.1.mlp.up_proj"])
    assert set(adapted_layers(policy)) == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


def test_experts_that_are_one_tensor_get_none_and_keep_their_published_names():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 50, "num_experts": 4}
    config = AutoConfig.for_model("qwen3_moe", **sizes, moe_intermediate_size=16)
    policy = AutoModelForCausalLM.from_config(config)
    names = dict(policy.named_parameters()).keys()
    add_adapters(policy, rank=2, alpha=2)
    attention = [f"model.layers.0.self_attn.{x}_proj" for x in "kqvo"]
    assert sorted(adapted_layers(policy)) == sorted(attention)
    assert merged_weights(policy).keys() == names


@pytest.mark.parametrize("name", ["qproj", "lm_head", "embed_tokens", "proj", "self_attn"])
def test_a_name_that_fits_no_layer_is_refused_beside_one_that_does(name):
    with pytest.raises(ModelError, match=rf"'{name}', which is no linear layer.*'q_proj'"):
        add_adapters(make_policy(), rank=2, alpha=2, target_modules=["q_proj", name])


def test_the_first_adapter_follows_from_the_seed_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (
        snapshot(trained_parameters(adapt(make_policy(), moved=False, seed=seed)))
        for seed in (3, 3, 4)
    )
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.layers.0.mlp.up_proj.lora_A.default.weight"
    assert not torch.equal(first[name], other[name])


@pytest.mark.parametrize("options", [{"share_prompts": True}, {"gradient_checkpointing": True}])
def test_ways_to_save_time_or_memory_change_no_gradient_of_an_adapter(options):
    gradients = []
    for chosen in ({}, options):
        policy = adapt(make_policy())
        recorder, _ = fit(make_module(policy, **chosen), [far_batch(policy)])
        gradients += recorder.gradients
    assert relative_difference(gradients[1], gradients[0]) < 2e-6


# --- what is published ----------------------------------------------------------------------------


def test_an_engine_with_the_published_weights_has_the_trainers_log_probs():
    policy = make_policy()
    engine = copy_for_engine(policy, torch.float32)
    batch = far_batch(policy)
    unadapted, _ = logprobs_of(policy, batch)
    module = make_module(adapt(policy))
    own = snapshot(dict(policy.named_parameters()))

    weights = module.weights()
    compare_manifest(dict(engine.named_parameters()), weights)
    copy_weights(dict(engine.named_parameters()), weights)

    trainers, _ = logprobs_of(policy, batch)
    engines, _ = logprobs_of(engine, batch)
    assert (trainers - unadapted).abs().max() > 0.1
    torch.testing.assert_close(engines, trainers, atol=1e-5, rtol=1e-5)
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, own[name]), f"the publication changed {name}"
    assert not any(weight.requires_grad for weight in weights.values())


def test_a_published_weight_is_the_base_plus_alpha_over_rank_times_b_a():
    policy = adapt(make_policy(), rank=4, alpha=16.0)
    layer = policy.model.layers[1].mlp.down_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = layer.base_layer.weight + 16 / 4 * (b @ a)
    published = merged_weights(policy)["model.layers.1.mlp.down_proj.weight"]
    torch.testing.assert_close(published, expected.detach(), atol=1e-7, rtol=1e-6)


def test_merging_makes_each_tensor_once_per_copy_and_none_to_compare_names_and_shapes():
    policy = make_policy()
    engine = dict(copy_for_engine(policy, torch.float32).named_parameters())
    merged = merged_weights(adapt(policy))
    made = []

    def make(name):
        made.append(name)
        return merged[name]

    lazy = LazyWeights(merged.shapes, make)
    compare_manifest(engine, lazy)
    assert made == []
    copy_weights(engine, lazy)
    assert sorted(made) == sorted(engine)
    untouched = merged["model.norm.weight"]
    assert untouched.data_ptr() == policy.model.norm.weight.data_ptr(), "no adapter: no copy"
    with pytest.raises(KeyError):
        lazy["model.layers.0.self_attn.q_proj.base_layer.weight"]


def test_what_vllm_loads_has_the_names_of_the_model_without_adapters():
    policy = make_policy()
    served = served_model(policy)
    plain = ServingDirectory(served, torch.float32)
    expected = plain.checkpoint(merged_weights(policy))
    adapt(policy)
    adapted = ServingDirectory(served, torch.float32)
    try:
        tensors = adapted.checkpoint(merged_weights(policy))
        compare_manifest(adapted.parameters, merged_weights(policy))
        adapted.write_noise()
    finally:
        plain.remove()
        adapted.remove()
    assert tensors.keys() == expected.keys()
    moved = {name for name in tensors if not torch.equal(tensors[name], expected[name])}
    assert moved == {f"{name}.weight" for name in adapted_layers(policy)}


# --- the initial model, still there ---------------------------------------------------------------


def test_without_its_adapters_the_policy_is_what_training_began_with():
    policy = make_policy()
    batch = far_batch(policy)
    before, _ = logprobs_of(policy, batch)
    adapt(policy)
    moved, _ = logprobs_of(policy, batch)
    with without_adapters(policy):
        assert torch.equal(logprobs_of(policy, batch)[0], before)
    assert torch.equal(logprobs_of(policy, batch)[0], moved)
    with pytest.raises(ValueError, match="has no adapters"), without_adapters(make_policy()):
        pass


def test_the_kl_penalty_to_the_bare_policy_has_the_gradient_of_one_to_a_frozen_copy():
    gradients, penalties = [], []
    for copied in (True, False):
        policy = make_policy()
        twin = copy_for_engine(policy, torch.float32) if copied else None
        adapt(policy)
        module = make_module(policy, reference=twin, kl_coef=0.5)
        recorder, _ = fit(module, [far_batch(policy)])
        penalties.append(recorder.metrics[0]["loss/kl"])
        gradients += recorder.gradients
    assert penalties[0] > 0.01
    assert penalties[1] == pytest.approx(penalties[0], rel=1e-6)
    assert relative_difference(gradients[1], gradients[0]) < 1e-6


def test_a_penalty_with_neither_reference_nor_adapters_is_refused():
    with pytest.raises(ValueError, match=r"kl_coef is 0.5, but there is neither"):
        make_module(make_policy(), kl_coef=0.5)


def test_an_average_of_past_policies_holds_the_adapters_alone():
    policy = adapt(make_policy())
    source = EwmaPolicy(decay=0.5, reset_below=0)
    batches = [far_batch(policy) for _ in range(2)]
    for version, batch in enumerate(batches):
        batch.version = version
        batch.token_versions.clamp_(max=version)
    base = snapshot({n: p for n, p in policy.named_parameters() if not p.requires_grad})
    recorder, _ = fit(make_module(policy, proximal=source, learning_rate=1e-2), batches)
    assert source.parameters.keys() == trained_parameters(policy).keys()
    assert recorder.metrics[-1]["proximal/lag_versions"] > 0
    parameters = dict(policy.named_parameters())
    assert all(torch.equal(parameters[name], weight) for name, weight in base.items())


def test_a_snapshot_of_a_published_policy_is_of_its_adapters_and_scores_as_it_did(monkeypatch):
    monkeypatch.setattr(batch_logprobs, "PLAIN_SCORES", 0)  # one attention kernel for both
    policy = adapt(make_policy())
    batch = far_batch(policy)
    store = SnapshotStore()
    module = make_module(policy, proximal=store)
    then, _ = logprobs_of(policy, batch)
    module.published(module.weights(), 0, oldest=0)
    with torch.no_grad():
        for parameter in trained_parameters(policy).values():
            parameter.add_(0.05)
    assert (logprobs_of(policy, batch)[0] - then).abs().max() > 0.1
    batch.token_versions.masked_fill_(batch.loss_mask, 0)
    scored = store.logprobs(batch, module._compute)
    torch.testing.assert_close(scored[batch.loss_mask], then[batch.loss_mask], atol=1e-6, rtol=0)
    (kept,) = store.state_dict()["copies"].values()
    assert kept.keys() == trained_parameters(policy).keys()


# --- what is saved --------------------------------------------------------------------------------


def test_the_saved_model_is_merged_and_its_adapter_fits_the_model_that_training_began_with(
    tmp_path,
):
    from peft import PeftModel

    policy = make_policy()
    policy.save_pretrained(tmp_path / "base")
    policy = load_policy(str(tmp_path / "base"))
    batch = far_batch(policy)
    adapt(policy)
    expected, _ = logprobs_of(policy, batch)
    save_policy(policy, tmp_path / "final")

    merged = load_policy(str(tmp_path / "final"))
    assert not adapted_layers(merged)
    torch.testing.assert_close(logprobs_of(merged, batch)[0], expected, atol=1e-5, rtol=1e-5)

    wrapped = PeftModel.from_pretrained(
        load_policy(str(tmp_path / "base")), tmp_path / "final" / "adapter"
    )
    model = wrapped.get_base_model()
    torch.testing.assert_close(logprobs_of(model, batch)[0], expected, atol=1e-6, rtol=1e-6)
    (config,) = wrapped.peft_config.values()
    assert config.base_model_name_or_path == str(tmp_path / "base")
    assert config.lora_dropout == 0


def test_a_model_without_adapters_is_saved_as_it_is(tmp_path):
    policy = make_policy()
    save_policy(policy, tmp_path / "final")
    assert not (tmp_path / "final" / "adapter").exists()
    again = dict(load_policy(str(tmp_path / "final")).named_parameters())
    assert all(torch.equal(again[name], p) for name, p in policy.named_parameters())
