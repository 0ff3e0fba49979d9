"""Engine and trainer agree about a token that the present weights sampled, or nothing runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiments import configure, read_lines, read_summary

from pace_lightning.rollout.engine import Sampling
from pace_lightning.run import train
from pace_lightning.training.on_policy_check import OnPolicyError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_at_each_temperature_the_ratio_is_1_where_there_is_no_lag(
    tmp_path: Path, temperature: float
) -> None:
    config = configure(
        tmp_path, "mode=sync", "trainer.steps=3", f"rollout.temperature={temperature}"
    )
    assert train(config, lambda _: None) == 0
    for line in read_lines(tmp_path / "metrics.jsonl"):
        if "ratio/lag0_log_abs_mean" in line:
            assert line["ratio/lag0_tokens"] == line["tokens/trained"]
            assert line["ratio/lag0_log_abs_max"] < 1e-4
            assert line["ratio/mean"] == pytest.approx(1.0, abs=1e-4)


def test_an_engine_that_samples_at_another_temperature_ends_the_run_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pace_lightning.build.Sampling", lambda tokens, _: Sampling(tokens, temperature=0.7)
    )
    config = configure(tmp_path, "trainer.steps=3", "eval.temperature=0.7")
    with pytest.raises(OnPolicyError, match=r"step 0: .* at temperature 1; rounding"):
        train(config, lambda _: None)
    summary = read_summary(tmp_path)
    assert (summary["status"], summary["steps"]) == ("failed", 0)
