"""How much memory a run needs, by its model's shape: against hand arithmetic and real tensors."""

import json
import shutil

import pytest
import torch
from module_cases import fit, make_batches, make_groups, make_module, make_policy, near_policy
from transformers import AutoConfig, AutoModelForCausalLM

from pace_lightning.__main__ import main
from pace_lightning.config_load import load
from pace_lightning.config_memory import (
    GIB,
    activation_bytes,
    engine_memory,
    memory_of,
    memory_text,
    trainer_memory,
)
from pace_lightning.model_shape import KNOWN, ModelShape, from_config, shape_of
from pace_lightning.training.lora import add_adapters, trained_parameters

TINY = "conf/models/tiny"
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 90,
}
MODELS = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [],
    },
}


def build(kind, **changes):
    config = AutoConfig.for_model(kind, **(SIZES | MODELS[kind] | changes))
    return AutoModelForCausalLM.from_config(config).eval()


def shape_of_model(model):
    return from_config(json.loads(model.config.to_json_string(use_diff=False)))


# --- the shape ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_the_parameters_of_a_shape_are_those_of_the_model(kind):
    model = build(kind)
    shape = shape_of_model(model)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    add_adapters(model, rank=3, alpha=3)
    adapters = sum(p.numel() for p in trained_parameters(model).values())
    assert shape.adapter_parameters(3) == adapters


@pytest.mark.parametrize(
    ("name", "billions"),  # as arXiv:2505.09388 and the model cards round them
    [("Qwen/Qwen3-4B", 4.0), ("Qwen/Qwen3-8B", 8.2), ("Qwen/Qwen3-30B-A3B", 30.5)],
)
def test_the_known_shapes_have_the_sizes_that_the_models_are_named_for(name, billions):
    assert round(KNOWN[name].parameters / 1e9, 1) == billions
    assert KNOWN[f"{name}-Base"] == KNOWN[name]


def test_a_shape_is_read_from_a_directory_and_unknown_for_what_nobody_can_say(tmp_path):
    assert shape_of(TINY) == ModelShape(2, 64, 2, 1, 32, 128, 100, tied=True)
    assert shape_of("owner/never-fetched") is None
    assert shape_of(tmp_path) is None
    shutil.copy(f"{TINY}/config.json", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    for change in ({"model_type": "gpt2"}, {"num_attention_heads": "many"}):
        (tmp_path / "config.json").write_text(json.dumps(settings | change))
        assert shape_of(tmp_path) is None
    moe = SIZES | MODELS["qwen3_moe"] | {"model_type": "qwen3_moe"}
    assert from_config(moe | {"mlp_only_layers": [0]}) is None, "experts in some layers only"


# --- the trainer ----------------------------------------------------------------------------------

# 2 blocks of 4 * 4 * 2 (queries, output) + 2 * 4 * 2 (keys, values) + 3 * 4 * 8 (MLP) + 2 * 4
# (norms) = 32 + 16 + 96 + 8 = 152, an embedding of 10 * 4, a last norm of 4: 348
SMALL = ModelShape(2, 4, 2, 1, 2, 8, 10, tied=True)


def test_the_small_shape_has_348_parameters():
    assert SMALL.layer_parameters == 152
    assert SMALL.parameters == 348


@pytest.mark.parametrize(
    ("strategy", "mixed", "weights", "casts", "gradients", "optimizer"),
    [
        # float32 weights and gradients, two moments; mixed: a bfloat16 copy for the arithmetic
        ("auto", False, 4 * 348, 0, 4 * 348, 8 * 348),
        ("auto", True, 4 * 348, 2 * 348, 4 * 348, 8 * 348),
        ("ddp", True, 4 * 348, 2 * 348, 4 * 348, 8 * 348),
        # ZeRO: 2 + 2 + 12 bytes, from 12 on divided among 4 ranks; 4 of gradients if divided
        ("deepspeed_stage_1", True, 2 * 348, 0, 2 * 348, 3 * 348),
        ("deepspeed_stage_2", True, 2 * 348, 0, 348, 3 * 348),
        ("deepspeed_stage_3", True, 2 * 348 / 4, 2 * 152, 348, 3 * 348),
        ("deepspeed_stage_2", False, 4 * 348, 0, 348, 3 * 348),
        # FSDP: embedding and last norm, 44, stay gathered beside a block, with their gradients
        ("fsdp", True, 348, 2 * 348 + 4 * (44 + 152), 348 + 4 * 44, 2 * 348),
        ("fsdp", False, 348, 4 * (44 + 152), 348 + 4 * 44, 2 * 348),
    ],
)
def test_what_a_strategy_divides_among_four_ranks(
    strategy, mixed, weights, casts, gradients, optimizer
):
    found = trainer_memory(SMALL, strategy=strategy, ranks=4, mixed=mixed, tokens=0, logit_tokens=0)
    assert found.weights == weights
    assert found.casts == casts
    assert found.gradients == gradients
    assert found.optimizer == optimizer
    assert found.total == weights + casts + gradients + optimizer


def test_adapters_are_all_that_has_gradients_and_moments():
    # rank 3, per block: 3 * (4+4 + 4+2 + 4+2 + 4+4 + 4+8 + 4+8 + 8+4) = 3 * 64 = 192
    found = trainer_memory(SMALL, mixed=False, tokens=0, logit_tokens=0, lora_rank=3)
    assert found.weights == 4 * (348 + 2 * 192)
    assert found.gradients == 4 * 2 * 192
    assert found.optimizer == 8 * 2 * 192


def test_what_is_offloaded_is_not_on_the_gpu_and_a_reference_is():
    settings = {"strategy": "deepspeed_stage_3", "ranks": 2, "mixed": True}
    sizes = {
        offload: trainer_memory(
            SMALL, **settings, tokens=0, logit_tokens=0, reference=True, offload=offload
        )
        for offload in ("none", "optimizer", "parameters")
    }
    assert [sizes[name].optimizer for name in sizes] == [6 * 348, 0, 0]
    assert [sizes[name].weights for name in sizes] == [348, 348, 0]
    assert all(found.reference == 4 * 348 for found in sizes.values())


def test_activations_and_logits_grow_with_tokens_and_chunks_only():
    # float32, one token of a block: norms 2 * 2 * 4 * 4 = 64; queries, output 4 * 2 * 4 = 32; keys,
    # values 4 * 2 * 2 = 16; MLP 4 * 4 * 8 = 128: 240
    assert activation_bytes(SMALL, mixed=False) == 240
    # bfloat16: norms 64 + 2 * 2 * 4 = 80, all else half: 16 + 8 + 64 = 88
    assert activation_bytes(SMALL, mixed=True) == 168
    plain = trainer_memory(SMALL, mixed=False, tokens=100, logit_tokens=30)
    assert plain.activations == 100 * 2 * 240
    assert plain.logits == 30 * 10 * 16
    # the input of each block, and all of one block at a time
    again = trainer_memory(
        SMALL, mixed=False, tokens=100, logit_tokens=300, gradient_checkpointing=True
    )
    assert again.activations == 100 * (2 * 4 * 4 + 240)
    assert again.logits == 100 * 10 * 16, "no more logits than tokens"


@pytest.mark.parametrize("rank", [0, 4], ids=["all weights", "adapters"])
def test_weights_gradients_and_moments_of_a_real_step_take_what_was_predicted(rank):
    policy = make_policy()
    batches = near_policy(policy, make_batches(make_groups()))
    if rank:
        add_adapters(policy, rank=rank, alpha=rank)
    _, trainer = fit(make_module(policy), batches)
    (optimizer,) = trainer.optimizers
    measured = {
        "weights": sum(p.nbytes for p in policy.parameters()),
        "gradients": sum(p.grad.nbytes for p in policy.parameters() if p.grad is not None),
        "optimizer": sum(
            value.nbytes
            for state in optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        ),
    }
    shape = shape_of(TINY)
    predicted = trainer_memory(shape, mixed=False, tokens=0, logit_tokens=0, lora_rank=rank)
    assert measured == {name: getattr(predicted, name) for name in measured}


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_block_keeps_about_the_predicted_bytes_for_its_backward_pass(kind, mixed):
    kept = []
    for layers in (1, 3):  # the difference has no embedding, no last norm, no head
        model = build(kind, num_hidden_layers=layers)
        ids = torch.randint(3, 90, (1, 37))
        sizes = {}

        def keep(tensor, sizes=sizes):
            storage = tensor.untyped_storage()
            if tensor.numel() % 37 == 0:  # of the tokens, and not a weight
                sizes[storage.data_ptr()] = storage.nbytes(), tensor  # held, so never reused
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=mixed),
        ):
            model.base_model(input_ids=ids, use_cache=False)
        kept.append(sum(size for size, _ in sizes.values()))
    measured = (kept[1] - kept[0]) / 2 / 37
    predicted = activation_bytes(shape_of_model(model), mixed=mixed)
    assert predicted == pytest.approx(measured, rel=0.2)


# --- the engine, and a whole configuration --------------------------------------------------------


def test_the_engine_holds_weights_and_a_cache_by_the_token():
    # a token: keys and values of 2 blocks x 2 numbers = 8
    assert engine_memory(SMALL, cache_tokens=50, element_bytes=2).kv_cache == 50 * 8 * 2
    # one head of keys cannot be split among two GPUs
    assert engine_memory(SMALL, cache_tokens=50, element_bytes=2, tensor_parallel=2).kv_cache == 800
    assert engine_memory(SMALL, cache_tokens=0, element_bytes=2, tensor_parallel=2).weights == 348


def test_the_estimate_of_a_configuration_is_for_its_largest_micro_batch():
    config = load(
        "conf/smoke.yaml",
        ["trainer.micro_batches=2", "model.logprob_chunk_tokens=1000", "engine.max_running=3"],
    )
    shape = shape_of(TINY)
    trainer, engine = memory_of(config, shape)
    # 4 groups x 8 / 2 = 16 rows of 4 new tokens on the 2 prompts of 16 that they share
    expected = trainer_memory(shape, mixed=False, tokens=2 * 16 + 16 * 4, logit_tokens=64)
    assert trainer == expected
    assert engine == engine_memory(shape, cache_tokens=3 * 20, element_bytes=4)
    assert "unknown" in memory_text(config, None)


def test_config_prints_the_memory_of_a_model_that_was_never_fetched(capsys):
    assert main(["config", "conf/qwen3_8b_async.yaml"]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("# memory per GPU")]
    assert "8.19 B parameters" in line
    shape = KNOWN["Qwen/Qwen3-8B"]
    # ZeRO-3 over 4 GPUs: float32 copy, both moments
    assert f"optimizer {(4 + 8) * shape.parameters / 4 / GIB:.1f} GiB" in line
    # 36 layers x 8 heads x 128, keys and values in bfloat16; four GPUs share the heads
    sequence = 2 * 36 * 8 * 128 * 2 * (2048 + 20480) / 4
    assert f"{1024 * sequence / GIB:.1f} MiB for a response of full length" in line
    assert f"{256 * sequence / GIB:.1f} GiB if all of 256 were as long" in line
