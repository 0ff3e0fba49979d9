"""Exact proximal policies in whole runs: prox / mu is the discrepancy of the engine alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiments import configure, read_lines

from pace_lightning.run import train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("source", ["snapshot", "interruption"])
@pytest.mark.parametrize(
    "schedule",
    [
        ("rollout.max_outstanding_groups=12",),
        ("rollout.max_outstanding_groups=12", "sync.every_steps=3", "trainer.micro_batches=3"),
        ("mode=sync", "sync.lag_versions=2"),
    ],
)
def test_each_token_is_scored_by_the_weights_that_sampled_it(
    tmp_path: Path, source: str, schedule: tuple[str, ...]
) -> None:
    config = configure(
        tmp_path,
        f"loss.proximal={source}",
        "loss.corrections=[{name: mis, lower: 0.5, upper: 5.0}]",
        "reward.function=rewards_for_runs:mixed",  # each group has a gradient
        "rollout.max_new_tokens=12",
        "trainer.steps=9",
        "eval.every_steps=4",
        "eval.samples=1",
        *schedule,
    )
    assert train(config, lambda _: None) == 0
    steps = [x for x in read_lines(tmp_path / "metrics.jsonl") if "ratio/log_abs_mean" in x]
    assert len(steps) == 9
    # trainer and engine both compute in float32: at its own version a token has no discrepancy
    assert max(x["ratio/behavior_log_abs_mean"] for x in steps) < 2e-5
    assert max(x["loss/rejected_share"] for x in steps) == 0
    # which would not hold of the weights of the step
    assert sum(x["ratio/log_abs_mean"] > 1e-3 for x in steps) >= 3
    if source == "snapshot":
        assert max(x["proximal/versions"] for x in steps) >= 2
        assert max(x["proximal/missing_tokens"] for x in steps) == 0
