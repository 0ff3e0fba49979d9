"""Deadlines that contradict each other are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pace_lightning.build_reliability import patience
from pace_lightning.config import Config, ConfigError
from pace_lightning.config_checks import check
from pace_lightning.config_explain import longest_deadline, watchdog_limit
from pace_lightning.config_load import load
from pace_lightning.rollout.supervision import Patience

SMOKE = Path(__file__).parents[1] / "conf" / "smoke.yaml"
DEADLINES = (
    "engine.publish_timeout_seconds",
    "engine.startup_timeout_seconds",
    "reward.startup_timeout_seconds",
    "reward.timeout_seconds",
    "rollout.timeout_seconds",
    "trainer.draw_timeout_seconds",
)


def checked(*settings: str) -> Config:
    config = load(str(SMOKE), list(settings))
    check(config)
    return config


@pytest.mark.parametrize("key", DEADLINES)
def test_the_watchdog_backs_up_every_deadline(key: str) -> None:
    assert longest_deadline(checked(f"{key}=5000")) == (key, 5000)
    assert watchdog_limit(checked(f"{key}=5000")) == 10000
    message = rf"trainer.watchdog_seconds is 5000.0, but {key} is 5000.0"
    with pytest.raises(ConfigError, match=message):
        checked(f"{key}=5000", "trainer.watchdog_seconds=5000")
    assert watchdog_limit(checked(f"{key}=5000", "trainer.watchdog_seconds=5001")) == 5001


def test_a_watchdog_of_0_is_none() -> None:
    assert watchdog_limit(checked("trainer.watchdog_seconds=0")) == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.watchdog_seconds=-1", r"trainer.watchdog_seconds is -1.0; it must be at least 0"),
        ("engine.max_retries=-1", r"engine.max_retries is -1; it must be at least 0"),
        ("engine.max_restarts=-1", r"engine.max_restarts is -1; it must be at least 0"),
        ("rollout.on_timeout=finish", r"rollout.on_timeout is .*finish"),
    ],
)
def test_values_that_mean_nothing_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(setting)


@pytest.mark.parametrize("number", [1, 9])
def test_a_completed_group_needs_two_responses_and_has_no_more_than_there_are(number: int) -> None:
    checked(f"rollout.min_responses={number}")  # without effect
    with pytest.raises(ConfigError, match=rf"min_responses is {number}.*\[2, rollout.group_size 8"):
        checked("rollout.on_timeout=complete", f"rollout.min_responses={number}")
    checked("rollout.on_timeout=complete", "rollout.min_responses=8")


def test_every_setting_reaches_the_supervisor() -> None:
    config = checked(
        "rollout.on_timeout=complete",
        "rollout.min_responses=5",
        "engine.max_retries=7",
        "engine.max_restarts=9",
    )
    assert patience(config) == Patience("complete", 5, 7, 9)
