"""Every configuration that is shipped can be used."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pace_lightning.build import build
from pace_lightning.config_checks import check
from pace_lightning.config_explain import explain
from pace_lightning.config_load import load

CONF = Path(__file__).parents[1] / "conf"
FILES = sorted([*CONF.glob("*.yaml"), *CONF.glob("tiny/*.yaml")])


def name_of(file):
    return file.stem if file.parent == CONF else f"{file.parent.name}_{file.stem}"


def test_there_are_configurations():
    assert {"smoke.yaml", "quickstart.yaml"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_shipped_configuration_loads_passes_the_checks_and_is_explained(file):
    config = load(file)
    check(config)
    assert config.name == name_of(file)
    assert "expected lag" in explain(config, cores=2)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_shipped_configuration_builds_its_objects_and_starts_nothing(file, tmp_path, monkeypatch):
    threads = {thread.name for thread in threading.enumerate()}
    config = load(file)
    if config.model.warm_start.steps:
        config = load(file, ["model.warm_start.steps=2"])
        monkeypatch.setenv("PACE_LIGHTNING_CACHE", str(tmp_path))
    if not config.model.path.startswith(("conf/", "package:")):
        pytest.skip("its model and data come from the hub")
    if config.engine.kind == "vllm":
        pytest.importorskip("vllm")
    experiment = build(config, tmp_path, emit=lambda _: None)
    assert experiment.num_train_prompts > config.trainer.groups_per_step
    assert experiment.num_eval_prompts == config.data.held_out > 0
    steps = config.trainer.steps * config.trainer.micro_batches
    assert len(experiment.datamodule.train_dataloader()) == steps
    assert not experiment.datamodule.worker.is_alive
    # tqdm's is of the process, once a library has shown a progress bar
    assert {thread.name for thread in threading.enumerate()} <= threads | {"tqdm_monitor"}
