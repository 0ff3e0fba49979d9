"""Publishes weights from trainer to engine, and moves the version clock of the rollout side.

Lightning restores weights before ``on_train_start``, and ``on_train_batch_end`` already sees the
new ``global_step`` while the next draw comes after it. So generation starts in the first hook, and
version j+1 is published in the second: nothing is drawn or dispatched between an optimizer step and
its publication.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from pace_lightning.core.batch import TrainBatch
from pace_lightning.core.trajectory import PolicyVersion
from pace_lightning.rollout.publication import PublishReport
from pace_lightning.training.datamodule import RolloutDataModule
from pace_lightning.training.module import PolicyModule


class WeightSync(pl.Callback):
    """Publishes every ``every_steps`` optimizer steps, and before each evaluation.

    With a lag of k, version j is the time at which the weights of version ``max(0, j - k)`` are
    published, so that in synchronous mode all data of step j has exactly that version. An
    evaluation is of the present weights all the same: it waits for the round of generation that is
    under way, and the older weights come back after it.

    Args:
        datamodule: the rollout side.
        every_steps: optimizer steps between publications.
        lag_versions: k; above 0 in synchronous mode only. A copy of the weights is kept for each of
            the last k + 1 versions, and in each checkpoint.
        publishing: context manager entered around each publication; for the time ledger.
    """

    def __init__(
        self,
        datamodule: RolloutDataModule,
        *,
        every_steps: int = 1,
        lag_versions: int = 0,
        publishing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._datamodule = datamodule
        self._every_steps = every_steps
        self._lag_versions = lag_versions
        self._kept: deque[tuple[PolicyVersion, Mapping[str, Tensor]]] = deque(
            maxlen=lag_versions + 1
        )
        self._publishing = publishing
        self.last_report: PublishReport | None = None

    def state_dict(self) -> dict[str, Any]:
        """The copies that are kept; none without a lag."""
        return {"kept": [(version, dict(weights)) for version, weights in self._kept]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the copies of a checkpoint."""
        self._kept.extend(state_dict["kept"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Publish the initial or restored weights, then begin to dispatch."""
        assert isinstance(pl_module, PolicyModule)
        if (leaving := pl_module.leaving) is not None:
            self._datamodule.worker.before_loads(leaving)
        self._publish_lagged(pl_module)
        self._datamodule.worker.train()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """An evaluation is of the present weights, whenever they were last published."""
        version = trainer.global_step
        if self._datamodule.published_version != version or not self._datamodule.worker.is_alive:
            if self._lag_versions and self._datamodule.worker.is_alive:
                self._datamodule.finish_round()
            self._publish(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Between two steps, go back to the weights that training data comes from."""
        goes_on = trainer.state.fn == "fit" and trainer.global_step < trainer.max_steps
        if self._lag_versions and goes_on:
            self._publish_lagged(pl_module)

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
            self._publish_lagged(pl_module)
        else:
            self._datamodule.worker.advance(version)

    def _publish_lagged(self, module: pl.LightningModule) -> None:
        """Publish what training data is to come from."""
        assert isinstance(module, PolicyModule)
        if not self._lag_versions:
            self._publish(module)
            return
        version = module.policy_version
        if not self._kept or self._kept[-1][0] < version:
            self._kept.append((version, {k: v.clone() for k, v in module.weights().items()}))
        oldest, weights = self._kept[0]
        self._publish(module, weights, oldest)

    def _publish(
        self,
        module: pl.LightningModule,
        weights: Mapping[str, Tensor] | None = None,
        version: PolicyVersion | None = None,
    ) -> None:
        """Publish the weights of a version; None: the present ones."""
        assert isinstance(module, PolicyModule)
        now = module.policy_version
        weights = module.weights() if weights is None else weights
        version = now if version is None else version
        with self._publishing():
            self._datamodule.start()
            self.last_report = self._datamodule.publish(weights, version, clock=now)
            oldest = self._datamodule.oldest_version
            module.published(weights, version, oldest=oldest)
