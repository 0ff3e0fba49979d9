"""The wall clock by part, and checkpoint files that are whole or absent."""

import os
import random
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.plugins.io import TorchCheckpointIO

from pace_lightning.training import checkpoint_files, timing
from pace_lightning.training.checkpoint_files import (
    SPARE_BYTES,
    CheckpointError,
    RunCheckpointIO,
    read_checkpoint,
)
from pace_lightning.training.random_state import RandomState
from pace_lightning.training.timing import PARTS, Pacing, TimeLedger


class Clock:
    """Stands still until told otherwise."""

    def __init__(self):
        self.now = 1000.0

    def advance(self, seconds):
        self.now += seconds

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(
        timing, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.advance)
    )
    return clock


def assert_adds_up(ledger):
    seconds = dict(ledger.seconds())
    total = seconds.pop("total")
    assert seconds.keys() == {*PARTS, "other"}
    assert sum(seconds.values()) == pytest.approx(total, abs=1e-3)
    assert min(seconds.values()) >= -1e-9


# --- the time ledger ------------------------------------------------------------------------------


def test_a_span_inside_another_takes_its_time_out_of_the_outer_one(clock):
    ledger = TimeLedger()
    clock.advance(10)
    with ledger.span("train"):
        clock.advance(1)
        with ledger.span("publish"):
            clock.advance(2)
            with ledger.span("wait"):
                clock.advance(4)
            clock.advance(8)
        clock.advance(16)
    clock.advance(32)  # still setting up
    seconds = ledger.seconds()
    assert seconds == {
        "setup": 42,
        "train": 17,
        "publish": 10,
        "bookkeeping": 0,
        "wait": 4,
        "pacing": 0,
        "evaluate": 0,
        "checkpoint": 0,
        "close": 0,
        "other": 0,
        "total": 73,
    }


spans = st.recursive(
    st.integers(0, 1000),  # milliseconds
    lambda children: st.tuples(st.sampled_from(PARTS), st.lists(children, max_size=4)),
    max_leaves=20,
)


@given(st.lists(spans, max_size=6))
def test_whatever_is_nested_in_whatever_the_parts_add_up_to_the_total(schedule):
    clock = Clock()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            timing, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.advance)
        )
        ledger = TimeLedger()
        ledger.setup(None, None, "fit")
        expected = dict.fromkeys((*PARTS, "other"), 0.0)

        def run(item, part):
            if isinstance(item, int):
                clock.advance(item / 1000)
                expected[part] += item / 1000
                assert_adds_up(ledger)
                return
            inner, children = item
            with ledger.span(inner):
                for child in children:
                    run(child, inner)

        for item in schedule:
            run(item, "other")
        seconds = ledger.seconds()
        for part, value in expected.items():
            assert seconds[part] == pytest.approx(value, abs=1e-6), part


def test_asking_in_the_middle_of_a_span_counts_it_so_far_and_does_not_end_it(clock):
    ledger = TimeLedger()
    ledger.setup(None, None, "fit")
    with ledger.span("wait"):
        clock.advance(3)
        assert ledger.seconds()["wait"] == 3
        clock.advance(4)
        assert ledger.seconds()["wait"] == 7
    clock.advance(5)
    assert ledger.seconds()["wait"] == 7
    assert ledger.seconds()["other"] == 5


def test_a_span_that_raises_ends_and_the_outer_one_goes_on(clock):
    ledger = TimeLedger()
    ledger.setup(None, None, "fit")

    def break_off():
        with ledger.span("publish"):
            clock.advance(1)
            raise KeyError("inside")

    with ledger.span("train"):
        with pytest.raises(KeyError, match="inside"):
            break_off()
        clock.advance(2)
    assert (ledger.seconds()["publish"], ledger.seconds()["train"]) == (1, 2)


class Batch:
    """Nothing Lightning would look into; each is a step of its own."""

    micro_batch_index, is_last = 0, True


class Module(pl.LightningModule):
    """Spends 3 seconds on a training step and 5 on a validation step."""

    def __init__(self, clock, fail_at=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self._clock = clock
        self._fail_at = fail_at

    def training_step(self, batch, batch_idx):
        self._clock.advance(3)
        if batch_idx == self._fail_at:
            raise KeyError("in the step")
        return self.weight * 1

    def validation_step(self, batch, batch_idx):
        self._clock.advance(5)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Loader:
    """Spends 7 seconds waiting for each batch, and 17 making it."""

    def __init__(self, clock, ledger, length):
        self._clock, self._ledger, self._length = clock, ledger, length

    def __len__(self):
        return self._length

    def __iter__(self):
        for _ in range(self._length):
            with self._ledger.span("wait"):
                self._clock.advance(7)
            self._clock.advance(17)
            yield Batch()


class Publisher(pl.Callback):
    """Spends 11 seconds publishing after each step, and also when an evaluation begins."""

    def __init__(self, clock, ledger):
        self._clock, self._ledger = clock, ledger

    def _publish(self):
        with self._ledger.span("publish"):
            self._clock.advance(11)

    def on_train_batch_end(self, *_):
        self._publish()

    def on_validation_start(self, *_):
        self._publish()


def make_trainer(clock, ledger, *pacing, **arguments):
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[ledger, *pacing, Publisher(clock, ledger)],
        **arguments,
    )


def test_the_parts_of_a_real_run(clock, tmp_path):
    ledger = TimeLedger()
    clock.advance(2)
    trainer = make_trainer(clock, ledger, plugins=[RunCheckpointIO(ledger)])
    trainer.fit(Module(clock), Loader(clock, ledger, 4), Loader(clock, ledger, 2))
    clock.advance(13)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    seconds = ledger.seconds()
    assert seconds == {
        "setup": 2,
        "wait": 4 * 7 + 2 * 7,
        "train": 4 * 3,
        "pacing": 0,
        "publish": 4 * 11 + 11,
        "bookkeeping": 3 * 17,
        "evaluate": 2 * (17 + 5),
        "checkpoint": 0,
        "close": 0,
        "other": 17 + 13,  # before the first step, after the run
        "total": clock.now - 1000,
    }


@pytest.mark.parametrize(("min_step_seconds", "slept"), [(0.0, 0), (2.5, 0), (10.0, 7)])
def test_a_paced_step_sleeps_for_what_is_left_and_that_is_not_training(
    clock, min_step_seconds, slept
):
    ledger = TimeLedger()
    trainer = make_trainer(clock, ledger, Pacing(min_step_seconds, ledger))
    trainer.fit(Module(clock), Loader(clock, ledger, 4))
    seconds = ledger.seconds()
    assert (seconds["train"], seconds["pacing"]) == (4 * 3, 4 * slept)
    assert_adds_up(ledger)


def test_a_step_that_raises_is_counted_and_nothing_after_it(clock):
    ledger = TimeLedger()
    trainer = make_trainer(clock, ledger)
    with pytest.raises(KeyError, match="in the step"):
        trainer.fit(Module(clock, fail_at=1), Loader(clock, ledger, 4))
    clock.advance(100)
    seconds = ledger.seconds()
    assert (seconds["train"], seconds["wait"], seconds["other"]) == (6, 14, 117)
    assert_adds_up(ledger)


# --- checkpoint files -----------------------------------------------------------------------------


def saved(path):
    return torch.load(path, weights_only=True)


def test_a_checkpoint_comes_back_as_it_was_saved_and_leaves_no_other_file(tmp_path):
    io = RunCheckpointIO(TimeLedger())
    target = tmp_path / "new" / "version-000003.ckpt"
    checkpoint = {"weights": torch.arange(5.0), "state": {"step": 3}}
    io.save_checkpoint(checkpoint, target)
    assert list(target.parent.iterdir()) == [target]
    loaded = io.load_checkpoint(target)
    assert torch.equal(loaded["weights"], checkpoint["weights"])
    assert loaded["state"] == {"step": 3}


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("existing", [False, True])
def test_a_write_that_breaks_off_leaves_what_was_there_before(
    clock, tmp_path, monkeypatch, error, existing
):
    ledger = TimeLedger()
    io = RunCheckpointIO(ledger)
    target = tmp_path / "last.ckpt"
    if existing:
        io.save_checkpoint({"step": 1}, target)

    def write_half(self, checkpoint, path, storage_options=None):
        clock.advance(2)
        path.write_bytes(b"half a checkpoint")
        raise error

    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", write_half)
    named = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(named) as caught:
        io.save_checkpoint({"step": 2}, target)
    assert error in (caught.value, caught.value.__cause__)
    assert list(tmp_path.iterdir()) == [target] * existing
    if existing:
        assert saved(target)["step"] == 1
    assert ledger.seconds()["checkpoint"] == 2


def test_a_state_that_cannot_be_saved_leaves_what_was_there_before(tmp_path):
    io = RunCheckpointIO(TimeLedger())
    target = tmp_path / "last.ckpt"
    io.save_checkpoint({"step": 1}, target)
    with pytest.raises(Exception, match=r"(?i)pickle"):
        io.save_checkpoint({"step": 2, "hook": lambda: None}, target)
    assert list(tmp_path.iterdir()) == [target]
    assert saved(target)["step"] == 1


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    io = RunCheckpointIO(TimeLedger())
    target = tmp_path / "last.ckpt"
    io.save_checkpoint({"step": 1}, target)
    big = {"weights": torch.zeros(2**20), "again": {"same": [torch.zeros(2**20)]}}
    big["view"] = big["weights"][3:]  # of the same storage
    needed = 2 * 4 * 2**20 + SPARE_BYTES
    usage = SimpleNamespace(free=needed - 1)
    monkeypatch.setattr(checkpoint_files.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", lambda *_: pytest.fail("written"))
    with pytest.raises(CheckpointError, match=r"needs 72 MiB, and 72 MiB are free there; .*lower"):
        io.save_checkpoint(big, target)
    assert list(tmp_path.iterdir()) == [target]
    monkeypatch.undo()
    usage.free += 1
    monkeypatch.setattr(checkpoint_files.shutil, "disk_usage", lambda _: usage)
    io.save_checkpoint(big, target)
    assert torch.equal(saved(target)["view"], big["view"])


@pytest.mark.parametrize("damage", ["cut", "zeros", "emptied"])
def test_a_torn_file_is_not_taken_for_a_checkpoint(tmp_path, damage):
    io = RunCheckpointIO(TimeLedger(), "name: x")
    target = tmp_path / "last.ckpt"
    whole = {"global_step": 3, "state_dict": {"w": torch.arange(1.0, 1e5)}}
    io.save_checkpoint(whole, target)
    state = read_checkpoint(target)
    assert (state["global_step"], state["config"]) == (3, "name: x")
    assert torch.equal(state["state_dict"]["w"], whole["state_dict"]["w"])
    del state
    size = target.stat().st_size
    if damage == "zeros":  # its length reached the disk, what is in the middle did not
        with target.open("r+b") as file:
            file.seek(size // 2)
            file.write(bytes(4096))
    else:
        os.truncate(target, size - 100 if damage == "cut" else 0)
    with pytest.raises(Exception, match=r"(?i)check sum|zip"):
        read_checkpoint(target)


def test_at_no_moment_of_a_write_is_the_target_torn(tmp_path, monkeypatch):
    io = RunCheckpointIO(TimeLedger())
    target = tmp_path / "last.ckpt"
    io.save_checkpoint({"step": 1}, target)
    original, moments = TorchCheckpointIO.save_checkpoint, []

    def watched(self, checkpoint, path, storage_options=None):
        moments.append(saved(target))
        original(self, checkpoint, path, storage_options)
        moments.append(saved(target))

    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", watched)
    io.save_checkpoint({"step": 2}, target)
    assert [moment["step"] for moment in moments] == [1, 1]
    assert saved(target)["step"] == 2


# --- random numbers -------------------------------------------------------------------------------


def test_random_numbers_go_on_where_they_were_after_a_checkpoint(tmp_path):
    def numbers():
        words = torch.rand(4), torch.randn(3), np.random.rand(3), random.random()
        return [*words[0].tolist(), *words[1].tolist(), *words[2].tolist(), words[3]]

    for draw in (torch.manual_seed, random.seed, np.random.seed):
        draw(5)
    numbers()
    random.gauss(0, 1)  # leaves a second number behind
    RunCheckpointIO(TimeLedger()).save_checkpoint(
        {"random": RandomState().state_dict()}, tmp_path / "a"
    )
    first = [*numbers(), random.gauss(0, 1)]
    numbers()
    RandomState().load_state_dict(saved(tmp_path / "a")["random"])
    assert [*numbers(), random.gauss(0, 1)] == first
