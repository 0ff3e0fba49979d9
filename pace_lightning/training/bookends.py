"""What frames the steps of a run: evaluations before the first and after the last; the model.

Inside Lightning's ``fit``, because weights that are partitioned over ranks can be gathered only
there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from pace_lightning.training.datamodule import RolloutDataModule
from pace_lightning.training.gather import gather_weights, is_partitioned
from pace_lightning.training.lora import save_policy
from pace_lightning.training.module import PolicyModule
from pace_lightning.training.ranks import Ranks
from pace_lightning.training.timing import TimeLedger


class Bookends(pl.Callback):
    """Evaluates before and after training; exports the model; settles what was not used.

    Must come before `WeightSync`, which begins to dispatch when training starts.

    Args:
        datamodule: the rollout side; None on every rank but 0.
        ranks: all of them take part.
        target: directory of the exported model.
        tokenizer: exported beside it; not needed where there is no data module.
        evaluates: whether there is anything to evaluate.
        time_ledger: gets the seconds of the export.
        emit: prints a line.
    """

    def __init__(
        self,
        datamodule: RolloutDataModule | None,
        *,
        ranks: Ranks,
        target: Path,
        tokenizer: Any,
        evaluates: bool,
        time_ledger: TimeLedger,
        emit: Callable[[str], None],
    ) -> None:
        self._datamodule = datamodule
        self._ranks = ranks
        self._target = target
        self._tokenizer = tokenizer
        self._evaluates = evaluates
        self._time_ledger = time_ledger
        self._emit = emit

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Unless the run goes on from a checkpoint, evaluate the initial weights."""
        if not self._evaluates or trainer.ckpt_path is not None:
            return
        _evaluate(trainer)
        if self._datamodule is not None and (before := self._datamodule.evaluations.get(0)):
            self._emit(f"held-out pass rate before training: {before['pass_rate']:.3f}")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All steps are taken, or there is nothing to take one with."""
        assert isinstance(pl_module, PolicyModule)
        self._ranks.share(self._end)
        if self._evaluates and self._ranks.share(lambda: self._lacks(trainer.global_step)):
            _evaluate(trainer)
        with self._time_ledger.span("checkpoint"):
            weights = gather_weights(pl_module.policy, keep=self._datamodule is not None)
            self._ranks.share(lambda: self._export(pl_module.policy, weights))

    # what rank 0 alone does

    def _end(self) -> None:
        assert self._datamodule is not None
        if self._datamodule.nothing_to_learn is not None:
            self._emit(str(self._datamodule.nothing_to_learn))
        self._datamodule.end()

    def _lacks(self, version: int) -> bool:
        assert self._datamodule is not None
        return version not in self._datamodule.evaluations

    def _export(self, policy: Any, weights: Mapping[str, Tensor]) -> None:
        """The model for others to load; a run that is ended meanwhile leaves none, or the last."""
        target, scratch = self._target, self._target.with_name(f".{self._target.name}.part")
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            if is_partitioned(policy):
                kept = policy.state_dict().keys()
                buffers = {name: b for name, b in policy.named_buffers() if name in kept}
                policy.save_pretrained(scratch, state_dict={**weights, **buffers})
            else:
                save_policy(policy, scratch)
            self._tokenizer.save_pretrained(scratch)
            shutil.rmtree(target, ignore_errors=True)
            scratch.replace(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _evaluate(trainer: pl.Trainer) -> None:
    """Run the validation loop here, with its hooks, and go back to training."""
    trainer.validating = True
    try:
        trainer.fit_loop.epoch_loop.val_loop.run()
    finally:
        trainer.training = True
