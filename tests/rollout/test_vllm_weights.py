"""What vLLM loads from is made of the model as it was before anybody took it apart."""

import json

import pytest
import torch
from experiments import ROOT
from safetensors.torch import load_file

from pace_lightning.rollout.vllm_transfer import mapping_source
from pace_lightning.rollout.vllm_weights import ServingDirectory, served_model
from pace_lightning.training.policy import load_policy


@pytest.fixture
def policy():
    return load_policy(str(ROOT / "conf/models/tiny"), random_init=True, seed=0)


@pytest.fixture
def serve():
    made = []

    def make(served, dtype):
        made.append(ServingDirectory(served, dtype))
        return made[-1]

    yield make
    for directory in made:
        directory.remove()


def take_apart(policy):
    """As ZeRO-3 does to parameters, and FSDP to the class."""
    for parameter in policy.parameters():
        parameter.data = torch.empty(0)
    policy.__class__ = type(f"FSDP{type(policy).__name__}", (type(policy),), {})


def test_noise_has_names_shapes_and_sizes_of_a_model_that_is_in_parts_by_now(policy, serve):
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    served = served_model(policy)
    take_apart(policy)
    directory = serve(served, torch.float32)
    directory.write_noise()
    noise = load_file(directory.path / "model.safetensors")
    assert noise.keys() == before.keys() | {"lm_head.weight"}, (
        "the tied head is a tensor of its own"
    )
    for name, weight in before.items():
        assert noise[name].shape == weight.shape
        assert not torch.equal(noise[name], weight)
        size = float(weight.square().mean().sqrt())
        assert float(noise[name].square().mean().sqrt()) == pytest.approx(size, rel=0.3)
    config = json.loads((directory.path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is False


def test_of_the_model_no_memory_is_kept(policy):
    served = served_model(policy)
    assert all(tensor.is_meta for tensor in served.parameters.values())


def test_what_is_written_is_in_the_dtype_that_is_served(policy, serve):
    directory = serve(served_model(policy), torch.bfloat16)
    directory.write({name: p.detach() for name, p in policy.named_parameters()})
    written = load_file(directory.path / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])


def test_weights_in_host_memory_are_moved_to_the_device_that_sends_them():
    pytest.importorskip("vllm", reason="make setup-vllm installs it", exc_type=ImportError)
    source = mapping_source(torch.device("meta"))
    source.tensors = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    sent = dict(source)
    assert [(name, t.shape) for name, t in sent.items()] == [("a", (3,)), ("b", (2, 2))]
    assert all(tensor.is_meta for tensor in sent.values())
