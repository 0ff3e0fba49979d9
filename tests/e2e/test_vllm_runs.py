"""Whole runs with vLLM as the engine, with the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import configure, read_lines, read_summary
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pace_lightning.rollout.engine import Sampling
from pace_lightning.run import train
from pace_lightning.training.on_policy_check import OnPolicyError

pytest.importorskip("vllm", reason="make setup-vllm installs it", exc_type=ImportError)
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # vLLM leaves sockets to the garbage collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

STEPS = 4
PATIENT = (
    "engine.kind=vllm",
    "engine.startup_timeout_seconds=400",
    "engine.publish_timeout_seconds=200",
)


SYNCHRONOUS = ("mode=sync", "seed=3", f"trainer.steps={STEPS}", "rollout.temperature=0.7")


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """What was measured at each step."""
    lines = read_lines(run_dir / "metrics.jsonl")
    return [line for line in lines if "ratio/lag0_log_abs_mean" in line]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two synchronous runs with one seed, not at temperature 1."""
    runs = []
    for name in ("first", "second"):
        run_dir = tmp_path_factory.mktemp("twins") / name
        assert train(configure(run_dir, *PATIENT, *SYNCHRONOUS), lambda _: None) == 0
        runs.append(run_dir)
    return runs


def test_two_synchronous_runs_with_one_seed_end_with_the_same_bits(twins: list[Path]) -> None:
    one, other = (load_file(run / "checkpoints/final/model.safetensors") for run in twins)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert read_summary(twins[0])["pass_rate_after"] == read_summary(twins[1])["pass_rate_after"]


def test_at_temperature_0_7_the_ratio_is_1_where_there_is_no_lag(twins: list[Path]) -> None:
    lines = steps_of(twins[0])
    assert len(lines) == STEPS
    for line in lines:
        assert line["ratio/lag0_tokens"] == line["tokens/trained"] > 0
        assert line["ratio/lag0_log_abs_max"] < 1e-4
        assert line["ratio/mean"] == pytest.approx(1.0, abs=1e-4)


def test_the_time_of_each_verification_is_in_the_metrics_and_on_the_board(
    twins: list[Path],
) -> None:
    board = EventAccumulator(str(twins[0] / "tensorboard")).Reload()
    plotted = [event.value for event in board.Scalars("time/publish_verify_seconds")]
    lines = steps_of(twins[0])
    assert plotted == pytest.approx([line["time/publish_verify_seconds"] for line in lines])
    for line in lines:
        assert 0 < line["time/publish_verify_seconds"] < line["time/publish_pause_seconds"]


def test_the_tensorboard_page_is_that_of_a_run_with_the_local_engine(
    twins: list[Path], tmp_path: Path
) -> None:
    local = configure(tmp_path / "local", "engine.kind=local", *SYNCHRONOUS)
    assert train(local, lambda _: None) == 0
    boards = [
        EventAccumulator(str(run / "tensorboard")).Reload().Tags()
        for run in (twins[0], tmp_path / "local")
    ]
    for kind in ("scalars", "histograms", "distributions", "tensors"):
        assert boards[0][kind], kind
        assert set(boards[0][kind]) == set(boards[1][kind]), kind


def test_weights_that_are_published_late_are_verified_against_themselves(tmp_path: Path) -> None:
    settings = ("mode=sync", "sync.lag_versions=1", f"trainer.steps={STEPS}")
    assert train(configure(tmp_path / "late", *PATIENT, *settings), lambda _: None) == 0
    assert read_summary(tmp_path / "late")["steps"] == STEPS


def test_sampling_at_another_temperature_ends_the_run_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pace_lightning.build.Sampling", lambda tokens, _: Sampling(tokens, temperature=0.7)
    )
    with pytest.raises(OnPolicyError, match=r"step 0: .* at temperature 1; rounding"):
        train(configure(tmp_path, *PATIENT, f"trainer.steps={STEPS}"), lambda _: None)
    assert read_summary(tmp_path)["steps"] == 0
