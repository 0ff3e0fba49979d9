"""Strategies that partition what DDP keeps whole on each rank.

ZeroStrategy       DeepSpeed: optimizer states (1), gradients too (2), parameters too (3)
ShardedStrategy    PyTorch's FSDP2: all three
"""

from __future__ import annotations

import logging
import os
import shutil
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from pace_lightning.training.checkpoint_files import CheckpointError, check_room, force_to_disk
from pace_lightning.training.gather import WITH_WEIGHTS, is_partitioned, num_elements

T = TypeVar("T")

CONFIG = "config.yaml"
"""File of a checkpoint directory: the configuration that it was made with."""


class ZeroStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy, on CPU too, and with checkpoints that are whole or absent.

    Lightning refuses CPU; ZeRO runs there over gloo all the same.

    Args:
        stage: 1, 2 or 3.
        offload_optimizer: keep optimizer states in host memory.
        offload_parameters: keep parameters there too; stage 3 only.
        max_grad_norm: DeepSpeed clips to it, since it alone has the whole gradient; 0: never.
        config: the run's configuration as YAML, which each checkpoint holds.
    """

    def __init__(
        self,
        stage: int,
        *,
        max_grad_norm: float,
        config: str = "",
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
    ) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            logging_level=logging.ERROR,
        )
        self._own_config = config
        assert isinstance(self.config, dict)
        self.config["gradient_clipping"] = max_grad_norm
        # the module's own optimizer, wherever its states are
        self.config["zero_force_ds_cpu_optimizer"] = False
        if stage >= 2:
            # many small micro-batches would vanish in a sum of bfloat16
            self.config["data_types"] = {"grad_accum_dtype": "fp32"}

    @property
    def root_device(self) -> torch.device:
        """This rank's device; DeepSpeed wants a number on CPU too."""
        return torch.device("cpu", 0) if self._is_on_cpu else super().root_device

    def setup_environment(self) -> None:
        """Without the refusal."""
        if not self._is_on_cpu:
            super().setup_environment()
            return
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        """Join the other ranks."""
        if not self._is_on_cpu:
            super().setup_distributed()
            return
        import deepspeed

        # gloo does it all: this kernel is compiled when it is first used, and a process that is
        # killed meanwhile leaves a lock on which every later one waits forever
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Not through DeepSpeed's engine: an evaluation uses no weights of the policy.

        The engine would begin to fetch some (stage 3), and nobody would let go of them.
        """
        assert self.lightning_module is not None
        return self.lightning_module.validation_step(*args, **kwargs)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """See `_whole_or_absent`."""
        with _whole_or_absent(self, filepath, self._own_config) as scratch:
            super().save_checkpoint(checkpoint, scratch, storage_options)

    @property
    def _is_on_cpu(self) -> bool:
        return isinstance(self.accelerator, CPUAccelerator)


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2: each layer of the policy is gathered for the time in which it computes.

    Args:
        num_ranks: over which everything is partitioned.
        config: the run's configuration as YAML, which each checkpoint holds.
    """

    def __init__(self, num_ranks: int, *, config: str = "") -> None:
        super().__init__(data_parallel_size=num_ranks, tensor_parallel_size=1)
        self._own_config = config

    def setup(self, trainer: pl.Trainer) -> None:
        """Partition the policy, then make its optimizer."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        policy: Any = self.model.policy
        shard(policy, self.device_mesh["data_parallel"])
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """See `_whole_or_absent`."""
        with _whole_or_absent(self, filepath, self._own_config) as scratch:
            super().save_checkpoint(checkpoint, scratch, storage_options)


def shard(policy: Any, mesh: Any) -> None:
    """Partition a causal LM over the ranks of a mesh, layer by layer; in place, once.

    What lies outside the layers (embedding, head, last norm) is gathered by `with_weights`.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    from transformers.modeling_layers import GradientCheckpointingLayer

    if is_partitioned(policy):
        return
    for layer in [m for m in policy.modules() if isinstance(m, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh, reshard_after_forward=True)
    setattr(policy, WITH_WEIGHTS, types.MethodType(_call, policy))
    register_fsdp_forward_method(policy, WITH_WEIGHTS)


def _call(policy: Any, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    return function(policy, *arguments, **options)


@contextmanager
def _whole_or_absent(strategy: ParallelStrategy, filepath: Any, config: str) -> Iterator[Path]:
    """A directory into which all ranks write; it gets its name when it is complete."""
    target = Path(strategy.broadcast(str(filepath)))
    scratch = target.with_name(f".{target.name}.part")
    problem = None
    if strategy.is_global_zero:
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            check_room(target, _state_bytes(strategy))
        except CheckpointError as error:
            problem = str(error)
    if problem := strategy.broadcast(problem):  # for all ranks or for none
        raise CheckpointError(problem)
    yield scratch
    strategy.barrier()
    if strategy.is_global_zero:
        (scratch / CONFIG).write_text(config)
        for path in [*scratch.rglob("*"), scratch]:
            force_to_disk(path)
        shutil.rmtree(target, ignore_errors=True)
        scratch.replace(target)
        force_to_disk(target.parent)
    strategy.barrier()


def _state_bytes(strategy: ParallelStrategy) -> int:
    """What all ranks together write: parameters as they are, AdamW's moments, float32 copies."""
    assert strategy.lightning_module is not None
    copies = 4 if isinstance(strategy, ZeroStrategy) else 0
    parameters = strategy.lightning_module.parameters()
    return sum(
        num_elements(p) * (p.element_size() + (8 + copies) * p.requires_grad) for p in parameters
    )
