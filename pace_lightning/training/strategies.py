"""Strategies that partition what DDP keeps whole on each rank.

ZeroStrategy    DeepSpeed: optimizer states (1), gradients too (2), parameters too (3)
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy


class ZeroStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy, on CPU too, and with checkpoints that are whole or absent.

    Lightning refuses CPU; ZeRO runs there over gloo all the same.

    Args:
        stage: 1, 2 or 3.
        offload_optimizer: keep optimizer states in host memory.
        offload_parameters: keep parameters there too; stage 3 only.
        max_grad_norm: DeepSpeed clips to it, since it alone has the whole gradient; 0: never.
    """

    def __init__(
        self,
        stage: int,
        *,
        max_grad_norm: float,
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
        assert isinstance(self.config, dict)
        self.config["gradient_clipping"] = max_grad_norm
        # the module's own optimizer, wherever its states are
        self.config["zero_force_ds_cpu_optimizer"] = False

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
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """All ranks write into a directory that gets its name when it is complete."""
        target = Path(self.broadcast(str(filepath)))
        scratch = target.with_name(f".{target.name}.part")
        if self.is_global_zero:
            shutil.rmtree(scratch, ignore_errors=True)
        self.barrier()
        super().save_checkpoint(checkpoint, scratch, storage_options)
        self.barrier()
        if self.is_global_zero:
            shutil.rmtree(target, ignore_errors=True)
            scratch.replace(target)
        self.barrier()

    @property
    def _is_on_cpu(self) -> bool:
        return isinstance(self.accelerator, CPUAccelerator)
