"""Trainer and engine share the cores of a CPU machine; each takes over what the other leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch


class CoreSharing(pl.Callback):
    """Sets the trainer's intra-op threads before each forward and each backward pass.

    The other direction, an engine that gets all cores while the trainer waits, is
    `RolloutWorker.waiting_trainer`.

    Args:
        shared: threads while the engine generates.
        alone: threads while it is idle, because as much is outstanding as may be.
        engine_is_idle: whether nothing is being generated.
    """

    def __init__(self, shared: int, alone: int, engine_is_idle: Callable[[], bool]) -> None:
        self._shared = shared
        self._alone = alone
        self._engine_is_idle = engine_is_idle

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Before a forward pass."""
        self._look()

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor
    ) -> None:
        """Before a backward pass."""
        self._look()

    def _look(self) -> None:
        """Who is running? ``set_num_threads`` holds for the calling thread only."""
        threads = self._alone if self._engine_is_idle() else self._shared
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
