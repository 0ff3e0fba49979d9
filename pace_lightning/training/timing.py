"""Where the wall clock of a run goes: parts that add up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from pace_lightning.core.batch import TrainBatch

PARTS = (
    *("setup", "wait", "train", "pacing", "publish", "bookkeeping"),
    *("evaluate", "checkpoint", "close"),
)


class TimeLedger(pl.Callback):
    """Seconds by activity of the main thread.

    Must be the first callback, so that "train" ends before others begin.

    ``setup`` runs from construction to the first hook; ``bookkeeping`` is what lies between two
    training steps: logging, and making the next batch; ``close`` ends engine and
    scoring processes; ``other`` is what is left of the wall clock.
    """

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._open: tuple[str, float] | None = None
        self._enter("setup")

    @property
    def present(self) -> tuple[str, float] | None:
        """The part that the main thread is in, and since when; None between two. Any thread."""
        return self._open

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """Count the time inside as ``part``.

        A span inside another one takes its time out of the outer one.
        """
        outer = self._leave()
        self._enter(part)
        try:
            yield
        finally:
            self._leave()
            if outer is not None:
                self._enter(outer)

    def seconds(self) -> dict[str, float]:
        """Seconds by part, ``other`` and ``total`` included; the parts add up to the total."""
        part = self._leave()
        total = time.monotonic() - self._begin
        if part is not None:
            self._enter(part)
        return {**self._seconds, "other": total - sum(self._seconds.values()), "total": total}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """The objects are built."""
        if self._open is not None and self._open[0] == "setup":
            self._leave()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: TrainBatch, batch_idx: int
    ) -> None:
        """Forward, backward and optimizer step begin."""
        self._enter("train")

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: TrainBatch,
        batch_idx: int,
    ) -> None:
        """They ended; other callbacks and the next batch come."""
        self._enter("bookkeeping")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """There is no next batch."""
        self._leave()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """An evaluation begins."""
        self._enter("evaluate")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """It ended."""
        self._leave()
        if trainer.state.fn == TrainerFn.FITTING:
            self._enter("bookkeeping")

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Whatever was open is over."""
        self._leave()

    def _enter(self, part: str) -> None:
        self._leave()
        self._open = (part, time.monotonic())

    def _leave(self) -> str | None:
        if self._open is None:
            return None
        part, since = self._open
        self._seconds[part] += time.monotonic() - since
        self._open = None
        return part


class Pacing(pl.Callback):
    """Makes an optimizer step take at least so long, by sleeping before the weights change.

    Args:
        min_step_seconds: from the beginning of the forward pass; 0: never sleep.
        time_ledger: gets the seconds slept, as ``pacing``.
    """

    def __init__(self, min_step_seconds: float, time_ledger: TimeLedger) -> None:
        self._min_step_seconds = min_step_seconds
        self._time_ledger = time_ledger
        self._begin = 0.0
        self._is_last = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: TrainBatch, batch_idx: int
    ) -> None:
        """A micro-batch begins, perhaps the first of a step."""
        self._is_last = batch.is_last
        if batch.micro_batch_index == 0:
            self._begin = time.monotonic()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Wait for the rest of the time; the policy version is still the old one.

        DeepSpeed has Lightning call this after each micro-batch.
        """
        if not self._is_last:
            return
        rest = self._begin + self._min_step_seconds - time.monotonic()
        if rest > 0:
            with self._time_ledger.span("pacing"):
                time.sleep(rest)
