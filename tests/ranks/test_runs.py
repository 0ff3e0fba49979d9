"""Whole runs on two ranks: they end like those on one, however they end."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from experiments import ROOT, SMOKE, Command, read_lines, read_summary, run_command
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

log = logging.getLogger(__name__)

STEPS = 4
GROUPS_PER_STEP = 4
ACCURACY = 1e-5
SECONDS_TO_END = 60.0
"""From a failure of one rank to the end of all, on a busy machine."""
EVALUATION = ("data.held_out=4", "eval.samples=1", "eval.every_steps=2")
RUN = ("mode=sync", f"trainer.steps={STEPS}", *EVALUATION)


@pytest.fixture(autouse=True)
def from_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one rank."""
    return train(tmp_path_factory.mktemp("alone"), "trainer.micro_batches=2")


def train(directory: Path, *settings: str) -> Path:
    run_dir = directory / "run"
    code, output = run_command(
        directory / "log", "train", SMOKE, f"run_dir={run_dir}", *RUN, *settings, seconds=500
    )
    assert code == 0, output
    return run_dir


def exported_logprobs(run_dir: Path) -> torch.Tensor:
    """Of the model that is left for others, as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "final")
    tokens = torch.arange(3, 67).reshape(4, 16)
    with torch.no_grad():
        return model(tokens).logits.log_softmax(-1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_a_run_on_two_ranks_trains_what_one_rank_trains(
    strategy: str, tmp_path: Path, alone: Path
) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    settings = ("trainer.devices=2", f"trainer.strategy={strategy}", "trainer.micro_batches=1")
    run_dir = train(tmp_path, *settings)
    summary, expected = read_summary(run_dir), read_summary(alone)
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    assert summary["fates"]["trained"] == STEPS * GROUPS_PER_STEP
    for name in ("fates", "fates_tokens", "tokens_trained", "pass_rate_before", "pass_rate_after"):
        assert summary[name] == expected[name], name
    draws = read_lines(run_dir / "draws.jsonl")
    assert [(line["version"], line["drawn_groups"]) for line in draws] == [
        (version, GROUPS_PER_STEP) for version in range(STEPS)
    ]
    ours, theirs = (
        load_file(directory / "checkpoints" / "final" / "model.safetensors")
        for directory in (run_dir, alone)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=ACCURACY)
    difference = exported_logprobs(run_dir) - exported_logprobs(alone)
    assert float(difference.abs().max()) < 10 * ACCURACY


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_3"])
def test_a_run_that_stops_half_way_is_resumed_by_as_many_ranks_and_loses_nothing(
    strategy: str, tmp_path: Path
) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    ranks = ("trainer.devices=2", f"trainer.strategy={strategy}", "trainer.micro_batches=1")
    half = ("trainer.checkpoint_every_steps=2", f"trainer.steps={STEPS // 2}")
    run_dir = train(tmp_path, *ranks, *half)
    arguments = ("resume", str(run_dir), f"trainer.steps={STEPS}")
    code, output = run_command(tmp_path / "resume.log", *arguments, seconds=500)
    assert code == 0, output
    summary = read_summary(run_dir)
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    # no group of the first half is lost or trained again; later ones are sampled by another seed
    assert summary["fates"]["trained"] == STEPS * GROUPS_PER_STEP
    assert [line["version"] for line in read_lines(run_dir / "draws.jsonl")] == list(range(STEPS))
    assert exported_logprobs(run_dir).isfinite().all()


def test_torchrun_starts_ranks_as_well(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ("train", SMOKE, f"run_dir={run_dir}", *RUN, "trainer.devices=2")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "pace_lightning", *arguments, "trainer.micro_batches=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = read_summary(run_dir)
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    assert summary["fates"]["trained"] == STEPS * GROUPS_PER_STEP


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("break_step_of_rank_1", "rank 1 failed: Broken: in the step"),
        ("crash_engine_of_rank_0", "in the engine"),
    ],
)
def test_a_failure_of_one_rank_ends_all_with_its_error(
    fault: str, error: str, tmp_path: Path
) -> None:
    reached, run_dir = tmp_path / "reached", tmp_path / "run"
    settings = (
        f"run_dir={run_dir}",
        "trainer.steps=100000",
        "trainer.devices=2",
        "engine.max_restarts=0",
        "data.held_out=0",
    )
    environment = {"FAULT": fault, "FAULT_FILE": str(reached)}
    arguments = ("train", SMOKE, *settings)
    with Command(
        tmp_path / "log", *arguments, module="faulty_run", environment=environment
    ) as command:
        command.until(reached.exists, seconds=300, what="the fault")
        begin = time.monotonic()
        assert command.wait(SECONDS_TO_END) == 1, command.output()
        seconds = time.monotonic() - begin
        assert command.children() == []
        output = command.output()
    log.info("%s: ended %.1f s after the fault", fault, seconds)
    summary = read_summary(run_dir)
    assert summary["status"] == "failed"
    assert error in summary["error"]
    assert ("rank 1 failed" in summary["error"]) is error.startswith("rank 1"), "who failed"
    assert "ended with code 1; the other ranks end too" in output
    assert output.count(error.rpartition(": ")[2]) >= 2, "both ranks say it"
