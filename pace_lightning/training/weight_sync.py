"""Publishes weights from trainer to engine, and moves the version clock of the rollout side.

Lightning restores weights before ``on_train_start``, and ``on_train_batch_end`` already sees the
new ``global_step`` while the next draw comes after it. So generation starts in the first hook, and
version j+1 is published in the second: nothing is drawn or dispatched between an optimizer step and
its publication.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl

from pace_lightning.core.batch import TrainBatch
from pace_lightning.rollout.groups import PublishReport
from pace_lightning.training.datamodule import RolloutDataModule
from pace_lightning.training.module import PolicyModule


class WeightSync(pl.Callback):
    """Publishes every ``every_steps`` optimizer steps, and before each evaluation.

    Args:
        datamodule: the rollout side.
        every_steps: optimizer steps between publications.
        publishing: context manager entered around each publication; for the time ledger.
    """

    def __init__(
        self,
        datamodule: RolloutDataModule,
        *,
        every_steps: int = 1,
        publishing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._datamodule = datamodule
        self._every_steps = every_steps
        self._publishing = publishing
        self.last_report: PublishReport | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Publish the initial or restored weights, then begin to dispatch."""
        self._publish(pl_module)
        self._datamodule.worker.train()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """An evaluation is of the present weights, whenever they were last published."""
        version = trainer.global_step
        if self._datamodule.published_version != version or not self._datamodule.worker.is_alive:
            self._publish(pl_module)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: TrainBatch,
        batch_idx: int,
    ) -> None:
        """After the optimizer step of a draw: settle its prompts, publish."""
        if not batch.is_last:
            return
        version = trainer.global_step
        if version != batch.version + 1:
            raise RuntimeError(
                f"the draw for version {batch.version} is consumed, but the optimizer is at "
                f"version {version}: one draw must be exactly one optimizer step"
            )
        self._datamodule.complete_step()
        if version == trainer.max_steps:
            self._datamodule.worker.stop_training()  # nobody will draw what it would generate
        if version % self._every_steps == 0:
            self._publish(pl_module)
        else:
            self._datamodule.worker.advance(version)

    def _publish(self, module: pl.LightningModule) -> None:
        assert isinstance(module, PolicyModule)
        with self._publishing():
            self._datamodule.start()
            self.last_report = self._datamodule.publish(module.weights(), module.policy_version)
