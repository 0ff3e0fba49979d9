"""What vLLM is started with, in its own words; needs no vLLM."""

from types import SimpleNamespace

import pytest
import torch

from pace_lightning.build_vllm import engine_devices
from pace_lightning.config import ConfigError
from pace_lightning.rollout.vllm_process import Launch, engine_arguments, environment

MODEL = SimpleNamespace(
    num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=16
)


def test_on_gpus_the_cache_is_what_vllm_finds_free_unless_its_size_is_set():
    gpus = {"max_sequence_tokens": 100, "dtype": torch.bfloat16, "devices": (0, 1)}
    assert "kv_cache_memory_bytes" not in engine_arguments("path", MODEL, Launch(**gpus))
    arguments = engine_arguments("path", MODEL, Launch(**gpus, cache_tokens=1000))
    # keys and values of 3 layers, 2 of the 4 heads on each GPU, 16 numbers of 2 bytes
    assert arguments["kv_cache_memory_bytes"] == 2 * 3 * 2 * 16 * 2 * (1024 + 32)
    assert arguments["tensor_parallel_size"] == 2


def test_on_a_cpu_the_engine_process_computes_on_its_own_cores():
    arguments = engine_arguments("path", MODEL, Launch(100, cores=(2, 5)))
    assert arguments["distributed_executor_backend"] == "uni"
    # 64 sequences of 101 tokens take 4 blocks of 32 each, and one is vLLM's own
    assert arguments["kv_cache_memory_bytes"] == 2 * 3 * 4 * 16 * 4 * 32 * (64 * 4 + 1)
    settings = environment("scratch", (2, 5))
    assert settings["OMP_PLACES"] == "{2,5}"
    assert settings["OMP_NUM_THREADS"] == "2"
    assert settings["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "OMP_PLACES" not in environment("scratch", ())


def test_trainer_and_engine_share_no_gpu_but_a_single_one():
    assert engine_devices([2, 3], 4, 2, (4, 2, 8)) == (2, 3)
    assert engine_devices([0], 1, 1) == engine_devices(None, 1, 1) == (0,)
    assert engine_devices([0], 2, 1) == (0,)
    assert engine_devices(None, 0, 2) == ()
    assert engine_devices(None, 8, 1, (32, 8, 12288)) == (1, 2, 3, 4), "7 cannot divide 32 heads"
    assert engine_devices(None, 9, 1, (32, 4, 768)) == tuple(range(1, 9)), "heads of keys twice"
    assert engine_devices(None, 8, 1, (9, 3, 1536)) == (1, 2, 3)
    assert engine_devices(None, 8, 3, (40, 40, 13824)) == (3, 4, 5, 6), "5 cannot divide the MLP"
    with pytest.raises(ConfigError, match="names 3 GPUs, among which vLLM cannot divide 32"):
        engine_devices([1, 2, 3], 4, 1, (32, 8, 12288))
    for wanted, num_gpus, trainers, problem in (
        ([2, 3], 4, 4, r"ranks are on GPUs 0 to 3 \(trainer.devices 4\)"),
        ([0, 1], 2, 1, "ranks are on GPUs 0 to 0"),
        (None, 4, 4, "none is left for vLLM"),
        ([4], 4, 1, r"GPUs \[4\] do not exist"),
    ):
        with pytest.raises(ConfigError, match=problem):
            engine_devices(wanted, num_gpus, trainers, (4, 4, 4))
