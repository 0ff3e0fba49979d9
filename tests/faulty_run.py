"""``python -m faulty_run COMMAND ...``: the command line with one fault built in.

The fault is named by ``$FAULT``; ``$FAULT_FILE`` is made when it is reached. A signal ends those
that hold.
"""

import asyncio
import ctypes
import os
import sys
import time
from pathlib import Path

from lightning.pytorch.plugins.io import TorchCheckpointIO
from transformers import PreTrainedModel

from pace_lightning import __main__ as command_line
from pace_lightning import build_reliability
from pace_lightning.rollout.local_engine import LocalEngine
from pace_lightning.training import watchdog
from pace_lightning.training.datamodule import RolloutDataModule
from pace_lightning.training.module import PolicyModule

AT_VERSION = 2
WATCHDOG_SECONDS = 15.0
"""Below the deadlines, which a user may not set it to."""
CRASHES_AT_STEP = 40


class Broken(Exception):
    """What a fault breaks the run with."""


def reached():
    Path(os.environ["FAULT_FILE"]).touch()


def hold():
    reached()
    while True:
        time.sleep(0.05)


def at_step(act):
    """Do something in the training step of `AT_VERSION`."""
    original = PolicyModule.training_step

    def training_step(self, batch, batch_idx):
        if batch.version == AT_VERSION:
            act()
        return original(self, batch, batch_idx)

    PolicyModule.training_step = training_step


def on_rank(rank, fault):
    """The fault is built into one of the ranks; the others, and their launcher, are sound."""
    if os.environ.get("RANK") == str(rank):
        fault()


def break_step():
    reached()
    raise Broken("in the step")


def get_stuck():
    """In C, where no signal handler of Python runs."""
    reached()
    while True:
        ctypes.CDLL(None).sleep(1000)


def get_stuck_soon_noticed():
    at_step(get_stuck)
    build_reliability.watchdog_limit = lambda _: WATCHDOG_SECONDS


def hold_in_checkpoint():
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(b"half of a checkpoint")
        hold()

    TorchCheckpointIO.save_checkpoint = save_checkpoint


def hold_in_export():
    def save_pretrained(self, directory, **_):
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / "model.safetensors").write_bytes(b"half of a model")
        hold()

    PreTrainedModel.save_pretrained = save_pretrained


def hold_in_publication():
    original = LocalEngine.load_weights

    async def load_weights(self, weights, *, version):
        if version == AT_VERSION:
            reached()
            await asyncio.sleep(1000)
        await original(self, weights, version=version)

    LocalEngine.load_weights = load_weights


def break_step_and_teardown():
    at_step(break_step)
    close = RolloutDataModule.on_exception

    def on_exception(self, exception):
        close(self, exception)
        raise ValueError("in the teardown")

    RolloutDataModule.on_exception = on_exception


def crash_engine():
    """The forward of the engine's model raises, once."""
    start, count = LocalEngine.start, [0]

    def step(*_):
        count[0] += 1
        if count[0] == CRASHES_AT_STEP:
            reached()
            raise Broken("in the engine")

    async def start_with_fault(self, clock):
        if not count[0]:
            self._model.register_forward_pre_hook(step)
        await start(self, clock)

    LocalEngine.start = start_with_fault


FAULTS = {
    "break_step": lambda: at_step(break_step),
    "break_step_and_teardown": break_step_and_teardown,
    "break_step_of_rank_1": lambda: on_rank(1, lambda: at_step(break_step)),
    "crash_engine": crash_engine,
    "crash_engine_of_rank_0": lambda: on_rank(0, crash_engine),
    "get_stuck": get_stuck_soon_noticed,
    "hold_in_checkpoint": hold_in_checkpoint,
    "hold_in_export": hold_in_export,
    "hold_in_publication": hold_in_publication,
    "hold_in_step": lambda: at_step(hold),
}

if __name__ == "__main__":
    FAULTS[os.environ["FAULT"]]()
    watchdog.GRACE_SECONDS = 1.0
    command_line._leave(command_line.main(sys.argv[1:]))
