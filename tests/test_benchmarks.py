"""Benchmarks run to their end and write what the page is made of; on a tiny random model here."""

import json
import subprocess
import sys

import pytest
from experiments import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TINY = ("--model", str(ROOT / "conf/models/tiny"), "--random-init")


def results_of(name, tmp_path, *arguments):
    """What the benchmark wrote."""
    file = tmp_path / "results.json"
    command = [sys.executable, f"benchmarks/{name}.py", "--results", str(file), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text())


def test_the_trainers_step(tmp_path):
    found = results_of("trainer_step", tmp_path, *TINY, "--rounds", "1", "--steps", "1")
    assert set(found["seconds_per_step"]) == {"bare", "module", "shared"}
    assert all(seconds > 0 for (seconds,) in found["seconds_per_step"].values())


def test_the_profile_accounts_for_the_whole_step(tmp_path):
    found = results_of("step_profile", tmp_path, *TINY, "--steps", "2", "--rounds", "1")
    seconds = found["seconds"]["kept"]
    assert min(seconds[part] for part in ("forward", "log-probs", "backward", "optimizer")) > 0
    assert 0 <= seconds["other"] < 0.5 * sum(seconds.values())


def test_the_memory_of_log_probs(tmp_path):
    shape = ("--rows", "4", "--tokens", "256", "--chunk-tokens", "16", "--rounds", "1")
    found = results_of("logprob_memory", tmp_path, *TINY, *shape)
    assert set(found["gib"]) == {"full", "chunked"}


def test_the_memory_of_a_publication(tmp_path):
    pytest.importorskip("deepspeed")
    found = results_of("publication_memory", tmp_path, *TINY, "--bucket-mib", "1", "1024")
    small, large = found["rows"]
    assert small["whole"] <= max(1 << 20, found["largest_bytes"])
    assert large["whole"] == found["all_bytes"]
    assert found["own_bytes"] < 0.6 * found["all_bytes"], "each rank has half"
