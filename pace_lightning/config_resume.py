"""Which settings of a run may change when it is resumed.

What a run learns from stays: data, model, rewards, objective, sampling, admission, dispatch. How
long it runs, on which machine, and how it deals with faults may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from pace_lightning.config import ConfigError
from pace_lightning.config_load import show

MAY_CHANGE = {
    "name": "a word for people",
    "run_dir": "a run directory may be moved",
    "model.gradient_checkpointing": "memory of the trainer",
    "model.logprob_chunk_tokens": "memory of the trainer",
    "reward.num_workers": "scoring processes",
    "reward.timeout_seconds": "a deadline",
    "reward.startup_timeout_seconds": "a deadline",
    "reward.memory_gib": "of one scoring process",
    "reward.max_error_share": "when the run gives up",
    "reward.paths": "where the function lies on this machine",
    "reward.environment": "what it may see",
    "engine.kind": "responses go on under either engine",
    "engine.devices": "of vLLM",
    "engine.transfer": "of weights to vLLM",
    "engine.max_running": "memory of the engine",
    "engine.max_batch_tokens": "memory of the engine",
    "engine.cache_tokens": "memory of the engine",
    "engine.startup_timeout_seconds": "a deadline",
    "engine.publish_timeout_seconds": "a deadline",
    "engine.max_retries": "when a group is given up",
    "engine.max_restarts": "when the run gives up",
    "rollout.timeout_seconds": "a deadline",
    "rollout.on_timeout": "what becomes of late groups",
    "rollout.min_responses": "what becomes of late groups",
    "trainer.steps": "to go on for longer; not below the version that is resumed",
    "trainer.draw_timeout_seconds": "a deadline",
    "trainer.watchdog_seconds": "a deadline",
    "trainer.max_empty_groups": "when the run gives up",
    "trainer.on_nothing_to_learn": "how it ends then",
    "trainer.checkpoint_every_steps": "checkpoints",
    "trainer.keep_checkpoints": "checkpoints",
    "trainer.num_threads": "cores",
    "trainer.engine_threads": "cores",
    "eval.samples": "precision of the evaluation",
    "eval.every_steps": "evaluations",
    "eval.timeout_seconds": "a deadline",
    "logging.samples_every_steps": "what is written",
    "logging.level": "what is said",
}
"""The only keys that may change, and what they are about."""


def check_changes(before: str, now: str, *, version: int) -> list[str]:
    """The changed settings of a resumed run, each in words.

    Args:
        before: the configuration that the checkpoint was made with, resolved, as YAML.
        now: that of the run to come.
        version: of the checkpoint.

    Raises:
        ConfigError: if something changed that may not.
    """
    old, new = (dict(_leaves(_read(text))) for text in (before, now))
    changed = {
        key: f"{key} from {show(old.get(key))} to {show(new.get(key))}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    }
    if fixed := [text for key, text in changed.items() if key not in MAY_CHANGE]:
        raise ConfigError(
            f"a resumed run cannot change {'; '.join(fixed)}: what it learns from must stay. Start "
            "a new run, or change only what docs/reliability.md lists under Resume"
        )
    if new["trainer.steps"] < version:
        raise ConfigError(
            f"trainer.steps is {new['trainer.steps']}, but the checkpoint is of version {version}; "
            f"needed at least {version}"
        )
    return list(changed.values())


def _read(text: str) -> dict[str, Any]:
    values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    return values if isinstance(values, dict) else {}  # type: ignore[return-value]


def _leaves(values: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting with its dotted key; a list of plain values is one setting."""
    for key, value in values.items():
        where = f"{path}{key}"
        inner = value
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            inner = dict(enumerate(value))
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{where}.")
        else:
            yield where, value
