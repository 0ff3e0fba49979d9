"""Every configuration that is shipped can be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from pace_lightning.config_checks import check
from pace_lightning.config_explain import explain
from pace_lightning.config_load import load

CONF = Path(__file__).parents[1] / "conf"
FILES = sorted(CONF.glob("*.yaml"))


def test_there_are_configurations():
    assert {"smoke.yaml", "quickstart.yaml"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_shipped_configuration_loads_passes_the_checks_and_is_explained(file):
    config = load(file)
    check(config)
    assert config.name == file.stem
    assert "expected lag" in explain(config, cores=2)
