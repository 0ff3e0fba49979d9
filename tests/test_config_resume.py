"""Which settings a resumed run may change: the table is of real settings, documented, enforced."""

from pathlib import Path

import pytest

from pace_lightning.config import ConfigError
from pace_lightning.config_load import load, to_yaml
from pace_lightning.config_resume import MAY_CHANGE, _leaves, _read, check_changes

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf" / "smoke.yaml"


def text(*overrides):
    return to_yaml(load(CONF, overrides))


def test_every_key_of_the_table_is_a_setting_and_stands_in_the_documentation():
    settings = dict(_leaves(_read(text())))
    assert set(settings) >= set(MAY_CHANGE)
    page = (ROOT / "docs" / "reliability.md").read_text()
    section = page[page.index("## Resume") :].partition("\n## ")[0]
    listed = {word.strip("`") for line in section.splitlines() for word in line.split("|")[1:2]}
    listed = {key.strip().strip("`") for cell in listed for key in cell.split(",")}
    assert {key for key in listed if "." in key or key in MAY_CHANGE} == set(MAY_CHANGE)


def test_what_did_not_change_is_no_change():
    assert check_changes(text(), text(), version=3) == []


def test_each_setting_that_may_change_is_said():
    now = text("trainer.steps=40", "reward.paths=[a,b]", "engine.cache_tokens=4096")
    assert check_changes(text(), now, version=30) == [
        "reward.paths from [] to ['a', 'b']",
        "engine.cache_tokens from null to 4096",
        "trainer.steps from 30 to 40",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.group_size=4", "rollout.group_size from 8 to 4"),
        ("data.sources.0.size=5", "data.sources.0.size from null to 5"),
        (
            "loss.objective_settings={cap: 1}",
            "loss.objective_settings from {} to null; loss.objective_settings.cap from null to 1",
        ),
        ("mode=sync", "mode from 'async' to 'sync'"),
        ("rollout.eta=2", "rollout.eta from null to 2"),
    ],
)
def test_what_a_run_learns_from_may_not_change(override, message):
    with pytest.raises(ConfigError, match=f"cannot change {message}: what it learns from"):
        check_changes(text(), text(override), version=3)


def test_a_run_cannot_end_before_it_goes_on():
    with pytest.raises(ConfigError, match="needed at least 12"):
        check_changes(text(), text("trainer.steps=11"), version=12)
    assert check_changes(text(), text("trainer.steps=12"), version=12)
