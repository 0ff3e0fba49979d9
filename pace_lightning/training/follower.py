"""The data module of every rank but 0: nothing generates here, everything is received."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from pace_lightning.training.ranks import Ranks
from pace_lightning.training.stream import EvaluationStream, ReceivingStream


class FollowerDataModule(pl.LightningDataModule):
    """The streams of a rank that follows rank 0.

    Args:
        ranks: where everything comes from.
        total_steps: optimizer steps of the whole run, those before a resume included.
        num_micro_batches: micro-batches of this rank in one draw.
    """

    def __init__(self, ranks: Ranks, *, total_steps: int, num_micro_batches: int) -> None:
        super().__init__()
        self._ranks = ranks
        self._stream = ReceivingStream(
            ranks,
            policy_version=lambda: self.trainer.global_step if self.trainer is not None else 0,
            total_steps=total_steps,
            num_micro_batches=num_micro_batches,
        )

    def train_dataloader(self) -> ReceivingStream:
        """This rank's part of each draw."""
        return self._stream

    def val_dataloader(self) -> EvaluationStream:
        """What rank 0 measured."""
        return EvaluationStream(lambda: self._ranks.share(self._evaluate))

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the state of the rollout side is rank 0's."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Likewise."""

    def _evaluate(self) -> dict[str, float]:
        raise NotImplementedError(f"rank {self._ranks.rank} has no engine")
