"""Publishes weights from trainer to engine, and moves the version clock of the rollout side.

Lightning restores weights before ``on_train_start``, and ``on_train_batch_end`` already sees the
new ``global_step`` while the next draw comes after it. So generation starts in the first hook, and
version j+1 is published in the second: nothing is drawn or dispatched between an optimizer step and
its publication.

With many ranks, all of them gather the weights, rank 0 publishes, and the others wait for it.
"""

from __future__ import annotations

import functools
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
from pace_lightning.training.gather import gather_weights
from pace_lightning.training.module import PolicyModule
from pace_lightning.training.ranks import ALONE, Ranks


class WeightSync(pl.Callback):
    """Publishes every ``every_steps`` optimizer steps, and before each evaluation.

    With a lag of k, version j is the time at which the weights of version ``max(0, j - k)`` are
    published, so that in synchronous mode all data of step j has exactly that version. An
    evaluation is of the present weights all the same: it waits for the round of generation that is
    under way, and the older weights come back after it.

    Args:
        datamodule: the rollout side; None on every rank but 0.
        every_steps: optimizer steps between publications.
        lag_versions: k; above 0 in synchronous mode only. A copy of the weights is kept for each of
            the last k + 1 versions, and in each checkpoint.
        publishing: context manager entered around each publication; for the time ledger.
        ranks: who holds parts of the weights.
    """

    def __init__(
        self,
        datamodule: RolloutDataModule | None,
        *,
        every_steps: int = 1,
        lag_versions: int = 0,
        publishing: Callable[[], AbstractContextManager[None]] = nullcontext,
        ranks: Ranks = ALONE,
    ) -> None:
        self._datamodule = datamodule
        self._ranks = ranks
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
        """Publish the initial or restored weights, unless an evaluation did; begin to dispatch."""
        assert isinstance(pl_module, PolicyModule)
        leaving = pl_module.leaving
        if leaving is not None and self._datamodule is not None:
            self._datamodule.worker.before_loads(leaving)
        if self._lag_versions or self._ranks.share(lambda: self._lacks(trainer.global_step)):
            self._publish_lagged(pl_module)
        if self._datamodule is not None:
            self._datamodule.worker.train()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """An evaluation is of the present weights, whenever they were last published."""
        if self._ranks.share(lambda: self._lacks(trainer.global_step)):
            self._publish(pl_module)

    def _lacks(self, version: PolicyVersion) -> bool:
        """Whether the engine has other weights; if so, it has finished its round. Rank 0."""
        assert self._datamodule is not None
        alive = self._datamodule.worker.is_alive
        if alive and self._datamodule.published_version == version:
            return False
        if self._lag_versions and alive:
            self._datamodule.finish_round()
        return True

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
        if self._datamodule is not None:
            self._datamodule.complete_step()
            if version == trainer.max_steps:
                self._datamodule.worker.stop_training()  # nobody will draw what it would generate
        if version % self._every_steps == 0:
            self._publish_lagged(pl_module)
        elif self._datamodule is not None:
            self._datamodule.worker.advance(version)

    def _publish_lagged(self, module: pl.LightningModule) -> None:
        """Publish what training data is to come from."""
        assert isinstance(module, PolicyModule)
        if not self._lag_versions:
            self._publish(module)
            return
        version = module.policy_version
        if not self._kept or self._kept[-1][0] < version:
            weights = self._gather(module)
            self._kept.append((version, {k: v.clone() for k, v in weights.items()}))
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
        version = now if version is None else version
        with self._publishing():
            weights = self._gather(module) if weights is None else weights
            oldest = self._ranks.share(functools.partial(self._send, weights, version, now))
            module.published(weights, version, oldest=oldest)

    def _gather(self, module: PolicyModule) -> Mapping[str, Tensor]:
        return gather_weights(module.policy, keep=self._datamodule is not None)

    def _send(
        self, weights: Mapping[str, Tensor], version: PolicyVersion, now: PolicyVersion
    ) -> PolicyVersion:
        """Rank 0's part of a publication; the oldest version that may still be trained on."""
        assert self._datamodule is not None
        self._datamodule.start()
        self.last_report = self._datamodule.publish(weights, version, clock=now)
        return self._datamodule.oldest_version
