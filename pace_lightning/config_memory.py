"""How much memory each GPU of a run needs: an estimate from the shape of its model.

Weights, gradients and optimizer states are exact up to a few scalars; activations are a sum over
the tensors that a block keeps for its backward pass (checked against those of real models in the
tests, to a fifth), for the largest micro-batch that can come, all of it at full length. What the
allocator, kernels and communication take beside that is not in it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from pace_lightning.config_ranks import chosen_strategy, num_ranks
from pace_lightning.model_shape import ModelShape

if TYPE_CHECKING:
    from pace_lightning.config import Config

GIB = 2**30
FLOAT32, BFLOAT16 = 4, 2
ADAM_BYTES = 8
"""Two moments in float32."""
CHUNK_BYTES = 16
"""For each logit of a chunk: itself, its log-softmax, and two more at the peak; all float32."""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on one GPU of the trainer."""

    weights: float
    casts: float
    """Copies that autocast makes in bfloat16 and keeps for the backward pass.

    Of sharded weights, beside them, what is gathered.
    """
    gradients: float
    optimizer: float
    """AdamW's moments and, with DeepSpeed, its float32 copy of the weights."""
    reference: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(asdict(self).values()))


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU of the engine."""

    weights: float
    kv_cache: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.kv_cache


def trainer_memory(
    shape: ModelShape,
    *,
    strategy: str = "auto",
    ranks: int = 1,
    mixed: bool,
    tokens: int,
    logit_tokens: int,
    gradient_checkpointing: bool = False,
    lora_rank: int = 0,
    reference: bool = False,
    offload: str = "none",
) -> TrainerMemory:
    """What training takes on each GPU.

    Args:
        shape: of the model.
        strategy: ``auto``, ``ddp``, ``fsdp`` or ``deepspeed_stage_1``, ``_2``, ``_3``.
        ranks: GPUs of the trainer.
        mixed: arithmetic in bfloat16. DDP and FSDP keep float32 weights and cast them; DeepSpeed
            keeps bfloat16 weights and a float32 copy with its optimizer states, and adds up
            gradients in float32 from stage 2 on.
        tokens: positions of the largest micro-batch of one rank, padding included.
        logit_tokens: of them, those whose logits are held at once.
        gradient_checkpointing: keep the input of each block only.
        lora_rank: of adapters on all linear layers; 0: all weights are trained.
        reference: whether a frozen copy of the weights is kept for a KL penalty, on each GPU.
        offload: ``optimizer`` or ``parameters`` (and optimizer) in host memory.

    Returns:
        Bytes.
    """
    stage = int(strategy[-1]) if strategy.startswith("deepspeed") else 0
    whole = shape.parameters + shape.adapter_parameters(lora_rank)
    trained = shape.adapter_parameters(lora_rank) if lora_rank else shape.parameters
    held = BFLOAT16 if stage and mixed else FLOAT32
    accumulated = FLOAT32 if stage >= 2 else held
    master = FLOAT32 if stage else 0
    shards_all = stage == 3 or strategy == "fsdp"
    in_host = {"none": 0, "optimizer": 1, "parameters": 2}[offload]
    weights = held * whole / (ranks if shards_all else 1)
    optimizer = (ADAM_BYTES + master) * trained / (ranks if stage or shards_all else 1)
    embedding = shape.vocabulary * shape.hidden
    outside = shape.parameters - shape.layers * shape.layer_parameters
    casts, reduced = 0.0, 0.0
    if mixed and not stage:  # an untied embedding is looked up as it is
        casts = BFLOAT16 * (whole - (0 if shape.tied else embedding))
    if strategy == "fsdp":  # what lies outside the blocks all the time, and one block
        casts += FLOAT32 * (outside + shape.layer_parameters)
        reduced = FLOAT32 * outside
    elif stage == 3:
        casts = held * max(shape.layer_parameters, embedding)
    kept = activation_bytes(shape, mixed=mixed)
    per_token = shape.layers * kept
    if gradient_checkpointing:
        per_token = shape.layers * shape.hidden * FLOAT32 + kept
    return TrainerMemory(
        weights=0.0 if in_host == 2 else weights,
        casts=casts,
        gradients=reduced + accumulated * trained / (ranks if stage >= 2 or shards_all else 1),
        optimizer=0.0 if in_host else optimizer,
        reference=FLOAT32 * shape.parameters if reference else 0.0,
        activations=tokens * per_token,
        logits=min(logit_tokens, tokens) * shape.vocabulary * CHUNK_BYTES,
    )


def activation_bytes(shape: ModelShape, *, mixed: bool) -> float:
    """What one block keeps for the backward pass, for each token.

    Each of the two norms: its input, the normalized input and its output; queries, keys, values and
    the attention's output; of the MLP the gate, its activation, the other half and their product.
    Attention is of a kind that keeps no matrix of all pairs of tokens; the small ones that a run on
    a CPU keeps (`batch_logprobs.PLAIN_SCORES`) are not counted.
    """
    half = BFLOAT16 if mixed else FLOAT32
    inner = shape.intermediate
    if shape.experts:
        inner = shape.experts_per_token * shape.expert_intermediate
    attention = 2 * shape.query_size + 2 * shape.kv_size
    norms = 2 * (2 * FLOAT32 * shape.hidden + (half if mixed else 0) * shape.hidden)
    if shape.qk_norm:
        norms += 2 * FLOAT32 * (shape.query_size + shape.kv_size)
    return norms + half * (attention + 4 * inner)


def engine_memory(
    shape: ModelShape, *, cache_tokens: int, element_bytes: int, tensor_parallel: int = 1
) -> EngineMemory:
    """What generation takes on each GPU.

    Args:
        shape: of the model.
        cache_tokens: of the key-value cache.
        element_bytes: of a weight, and of a number in the cache.
        tensor_parallel: GPUs that share the engine.
    """
    per_token = 2 * shape.layers * shape.kv_size * element_bytes
    # more GPUs than heads of keys: heads are kept more than once
    split = min(tensor_parallel, shape.kv_heads)
    return EngineMemory(
        weights=shape.parameters * element_bytes / tensor_parallel,
        kv_cache=cache_tokens * per_token / split,
    )


def memory_of(config: Config, shape: ModelShape) -> tuple[TrainerMemory, EngineMemory]:
    """The memory of a configuration; an upper bound on what its responses need."""
    from pace_lightning.config_explain import shares_prompts

    trainer, rollout, ranks = config.trainer, config.rollout, num_ranks(config)
    prompt, response = config.data.max_prompt_tokens, rollout.max_new_tokens
    responses = trainer.groups_per_step * rollout.group_size
    rows = math.ceil(responses / (ranks * trainer.micro_batches))
    prompts = math.ceil(rows / rollout.group_size) if shares_prompts(config) else rows
    lora_rank = config.model.lora.rank
    mixed = trainer.precision != "32-true"
    half = config.engine.dtype == "bfloat16" or (config.engine.dtype == "auto" and mixed)
    sequence = prompt + max(response, config.eval.max_new_tokens or 0)
    return trainer_memory(
        shape,
        strategy=chosen_strategy(config),
        ranks=ranks,
        offload=trainer.offload,
        mixed=mixed,
        tokens=prompts * prompt + rows * response,
        logit_tokens=min(config.model.logprob_chunk_tokens, rows * response),
        gradient_checkpointing=config.model.gradient_checkpointing,
        lora_rank=lora_rank,
        reference=config.loss.kl_coef > 0 and not lora_rank,
    ), engine_memory(
        shape,
        cache_tokens=config.engine.cache_tokens or config.engine.max_running * sequence,
        element_bytes=BFLOAT16 if half else FLOAT32,
        tensor_parallel=len(config.engine.devices or [0]),
    )


def memory_text(config: Config, shape: ModelShape | None) -> str:
    """The estimate in words."""
    if shape is None:
        return (
            "unknown: the shape of model.path is not known before it is fetched or converted, or "
            "it is not a model of Llama's or Qwen's kind"
        )
    trainer, engine = memory_of(config, shape)
    generation = f"about {_size(engine.total)} for the engine ({_parts(engine)})"
    if config.engine.devices and config.engine.cache_tokens is None:  # vLLM takes what is free
        running = config.engine.max_running
        generation = (
            f"for the engine about {_size(engine.weights)} of weights and, for a KV cache, what "
            f"vLLM finds free: {_size(engine.kv_cache / running)} for a response of full length, "
            f"{_size(engine.kv_cache)} if all of {running} were as long; those that do not fit wait"
        )
    return (
        f"{shape.parameters / 1e9:.2f} B parameters; about {_size(trainer.total)} for the trainer "
        f"({_parts(trainer)}), and {generation}"
    )


def _parts(memory: TrainerMemory | EngineMemory) -> str:
    sizes = [
        (field.name.replace("_", " "), getattr(memory, field.name)) for field in fields(memory)
    ]
    return ", ".join(f"{name} {_size(size)}" for name, size in sizes if size)


def _size(num_bytes: float) -> str:
    gib = num_bytes / GIB
    return f"{gib:.1f} GiB" if gib >= 1 else f"{1024 * gib:.1f} MiB"
