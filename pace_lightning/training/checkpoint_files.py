"""Checkpoint files: written whole or not at all, and recognized if they are torn."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from pace_lightning.core.batch import TrainBatch
from pace_lightning.training.timing import TimeLedger

SPARE_BYTES = 64 * 2**20
"""Beside the tensors: for the rest of a checkpoint, and for the other files of a run."""


class StepCheckpoints(ModelCheckpoint):
    """Lightning's checkpoints, of complete draws only.

    After a resume Lightning does not know what it saved before, and would save the resumed version
    again after the first micro-batch of the next draw. That is a checkpoint from which each later
    step would begin in the middle of a draw.
    """

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: TrainBatch,
        batch_idx: int,
    ) -> None:
        """After the last micro-batch of a draw."""
        if batch.is_last:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


class CheckpointError(OSError):
    """A checkpoint could not be written; those before it are whole."""


class RunCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, timed, and written under another name first.

    Args:
        time_ledger: gets the seconds.
        config: the run's configuration as YAML, which each file holds.
    """

    def __init__(self, time_ledger: TimeLedger, config: str = "") -> None:
        super().__init__()
        self._time_ledger = time_ledger
        self._config = config

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write one file; a run that is killed meanwhile keeps the file before it.

        Raises:
            CheckpointError: if the disk has no room for it, or refuses it.
        """
        with self._time_ledger.span("checkpoint"):
            target = Path(path)
            scratch = target.with_name(f".{target.name}.part")
            checkpoint = {**checkpoint, "config": self._config}
            check_space(checkpoint, target)
            try:
                super().save_checkpoint(checkpoint, scratch, storage_options)
                force_to_disk(scratch)
                scratch.replace(target)
                force_to_disk(target.parent)  # its name, too
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint {target} could not be written ({error}); those before it are whole"
                ) from error
            finally:
                scratch.unlink(missing_ok=True)


def check_space(checkpoint: Mapping[str, Any], target: Path) -> None:
    """Refuse to begin a file that the disk has no room for.

    Raises:
        CheckpointError: with what is needed and what is free.
    """
    storages = [tensor.untyped_storage() for tensor in _tensors(checkpoint)]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    check_room(target, sum(sizes.values()))


def check_room(target: Path, num_bytes: int) -> None:
    """The same for a checkpoint of so many bytes.

    Raises:
        CheckpointError: with what is needed and what is free.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    needed, free = num_bytes + SPARE_BYTES, shutil.disk_usage(target.parent).free
    if free < needed:
        raise CheckpointError(
            f"checkpoint {target} needs {needed / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB are "
            "free there; the checkpoints before it are whole. Make room, or lower "
            "trainer.keep_checkpoints, and resume the run"
        )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, tensors mapped from the file; no code in it is run.

    Raises:
        Exception: of many kinds, if the file is torn, damaged or no checkpoint. A file whose length
            is right but whose content is not, as after a power cut, is found by its check sums.
    """
    with zipfile.ZipFile(path) as file:
        if damaged := file.testzip():
            raise zipfile.BadZipFile(f"the check sum of {damaged} in it is wrong")
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    missing = {"global_step", "config", "state_dict"} - set(state)
    if missing:
        raise ValueError(f"it lacks {sorted(missing)}")
    return dict(state)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


def force_to_disk(path: Path) -> None:
    """A file's content, or a directory's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
