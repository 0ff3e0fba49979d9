"""Stops a run whose importance ratios are wrong from the start, before the first optimizer step.

On tokens of the present version, policy and behavior are the same distribution, so that the ratio
of each token is 1 up to rounding. If it is not, the two sides disagree about temperature, weights,
attention or precision, and every ratio of the run would be wrong.

The mean ratio cannot show this. Over tokens that mu sampled, pi / mu has mean 1 whatever pi is, and
a sample of it looks healthy. The mean of |log(pi / mu)| has no such excuse.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch

from pace_lightning.core.batch import TrainBatch
from pace_lightning.training.module import PolicyModule

MAX_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Nats by which the log-probs of engine and trainer may differ, in the mean, before an alarm.

At temperature 1. In bfloat16, 0.02 to 0.06 was measured with SmolLM2-135M; float32 differs by
rounding only.
"""

STOP_AT = 2.0
"""Times the alarm: the gap that ends a run at its first step."""


def max_lag0_gap(dtypes: Iterable[torch.dtype], *, temperature: float) -> float:
    """The threshold of the alarm: that of the coarsest; low temperatures magnify the rounding.

    Args:
        dtypes: in which engine and trainer compute.
        temperature: of the rollouts.

    >>> max_lag0_gap([torch.float32, torch.bfloat16], temperature=0.5)
    0.2
    """
    return max(MAX_GAP[dtype] for dtype in dtypes) / min(1.0, temperature)


class OnPolicyError(RuntimeError):
    """Engine and trainer disagree about the same tokens under the same weights."""


class OnPolicyCheck(pl.Callback):
    """Looks once, at the first draw of the process that has tokens of the present version.

    Args:
        max_gap: that of the alarm, see `max_lag0_gap`.
        temperature: of the rollouts; for the message.
        only_at_the_beginning: do not look after version 0: keys and values that the engine keeps
            across a publication are of other weights, and the gap is real then.
    """

    def __init__(
        self, max_gap: float, temperature: float, *, only_at_the_beginning: bool = False
    ) -> None:
        self._limit = STOP_AT * max_gap
        self._temperature = temperature
        self._only_at_the_beginning = only_at_the_beginning
        self._looking = True
        self._is_last = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: TrainBatch, batch_idx: int
    ) -> None:
        """A micro-batch begins."""
        self._is_last = batch.is_last

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        """All micro-batches of a draw have been computed, if it was the last one.

        DeepSpeed has Lightning call this after each.

        Raises:
            OnPolicyError: if the ratio is not 1 within tolerance.
        """
        assert isinstance(pl_module, PolicyModule)
        if (
            not self._is_last
            or not self._looking
            or (self._only_at_the_beginning and trainer.global_step)
        ):
            return
        gap = pl_module.lag0_gap
        if gap is None:
            return
        self._looking = False
        if not gap <= self._limit:  # NaN is not
            raise OnPolicyError(
                f"step {trainer.global_step}: engine and trainer disagree by {gap:.4f} nats per "
                f"token about tokens that the present weights sampled at temperature "
                f"{self._temperature:g}; rounding explains at most {self._limit:g}. With wrong "
                "importance ratios nothing good is learned: nothing was trained. Make engine.dtype "
                "and trainer.precision the same; if they are, weights, attention or sampling of "
                "the engine are not the trainer's"
            )
