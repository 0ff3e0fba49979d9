"""Two ranks that hold parts of the policy, and vLLM, which gets the whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiments import ROOT, SMOKE, read_lines, read_summary, run_command

pytest.importorskip("vllm", reason="make setup-vllm installs it", exc_type=ImportError)
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 2
SETTINGS = (
    "mode=sync",
    "engine.kind=vllm",
    "engine.startup_timeout_seconds=400",
    "engine.publish_timeout_seconds=200",
    "data.held_out=0",
    f"trainer.steps={STEPS}",
    "trainer.devices=2",
    "trainer.micro_batches=1",
)


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_3"])
def test_vllm_serves_a_policy_that_no_rank_holds_alone(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    monkeypatch.chdir(ROOT)
    run_dir = tmp_path / "run"
    settings = (*SETTINGS, f"trainer.strategy={strategy}", f"run_dir={run_dir}")
    code, output = run_command(tmp_path / "log", "train", SMOKE, *settings, seconds=500)
    assert code == 0, output
    summary = read_summary(run_dir)
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)
    lines = [x for x in read_lines(run_dir / "metrics.jsonl") if "ratio/lag0_log_abs_max" in x]
    assert len(lines) == STEPS
    for line in lines:  # the weights of the step are those that the tokens were sampled from
        assert line["ratio/lag0_tokens"] == line["tokens/trained"] > 0
        assert line["ratio/lag0_log_abs_max"] < 1e-3
