"""Checkpoints of several ranks are whole or absent, and begun only if there is room for them."""

from types import SimpleNamespace

import pytest
import torch

from pace_lightning.training import checkpoint_files
from pace_lightning.training.checkpoint_files import SPARE_BYTES, CheckpointError
from pace_lightning.training.strategies import CONFIG, _state_bytes, _whole_or_absent


@pytest.fixture
def strategy():
    """Of one rank, with 12 trained parameters and 3 frozen ones."""
    module = torch.nn.Linear(4, 3)
    module.bias.requires_grad_(False)
    return SimpleNamespace(
        broadcast=lambda value: value,
        barrier=lambda: None,
        is_global_zero=True,
        lightning_module=module,
    )


def write(strategy, target):
    with _whole_or_absent(strategy, target, "name: x") as scratch:
        (scratch / "deep").mkdir(parents=True)
        (scratch / "deep" / "part").write_text("content")


def test_a_directory_gets_its_name_when_it_is_complete(strategy, tmp_path):
    target = tmp_path / "checkpoints" / "version-000002.ckpt"
    write(strategy, target)
    assert (target / "deep" / "part").read_text() == "content"
    assert (target / CONFIG).read_text() == "name: x"
    assert list(target.parent.iterdir()) == [target]


def test_one_that_breaks_off_leaves_what_was_there_before(strategy, tmp_path):
    target = tmp_path / "last.ckpt"
    write(strategy, target)
    with pytest.raises(OSError, match="broken"), _whole_or_absent(strategy, target, "name: y"):
        raise OSError("broken")
    assert (target / CONFIG).read_text() == "name: x"


def test_what_an_earlier_attempt_left_is_removed_before_room_is_looked_for(
    strategy, tmp_path, monkeypatch
):
    left = tmp_path / ".last.ckpt.part"
    left.mkdir()

    def disk_usage(_):
        return SimpleNamespace(free=0 if left.exists() else 2**40)

    monkeypatch.setattr(checkpoint_files.shutil, "disk_usage", disk_usage)
    write(strategy, tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt" / CONFIG).exists()


def test_without_room_nothing_is_begun(strategy, tmp_path, monkeypatch):
    assert _state_bytes(strategy) == 4 * 15 + 8 * 12
    usage = SimpleNamespace(free=SPARE_BYTES + 4 * 15 + 8 * 12 - 1)
    monkeypatch.setattr(checkpoint_files.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"lower trainer\.keep_checkpoints"):
        write(strategy, tmp_path / "last.ckpt")
    assert list(tmp_path.iterdir()) == []
    usage.free += 1
    write(strategy, tmp_path / "last.ckpt")
