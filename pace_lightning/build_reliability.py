"""From a configuration to what deals with faults; a part of ``build.py``."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from pace_lightning.config import Config
from pace_lightning.config_explain import watchdog_limit
from pace_lightning.rollout.supervision import Patience
from pace_lightning.training.watchdog import Watchdog, who_waits

if TYPE_CHECKING:
    from pace_lightning.build import Experiment


def patience(config: Config) -> Patience:
    """What is done when generation fails or is late."""
    return Patience(
        on_timeout=config.rollout.on_timeout,  # type: ignore[arg-type]  # one of its names
        min_responses=config.rollout.min_responses,
        max_retries=config.engine.max_retries,
        max_restarts=config.engine.max_restarts,
    )


def watchdog(config: Config, experiment: Experiment, last_words: Callable[[str], None]) -> Watchdog:
    """Watches the main thread and the rollout side.

    Args:
        config: checked.
        experiment: built from it.
        last_words: see `Watchdog`.
    """
    worker, pool, ledger = (
        experiment.datamodule.worker,
        experiment.datamodule.pool,
        experiment.time_ledger,
    )
    limit = watchdog_limit(config)

    def progress() -> Hashable:
        return ledger.present, worker.progress

    def report() -> str:
        return who_waits(
            limit,
            trainer=ledger.present,
            rollout=worker.describe(),
            num_ready=len(pool),
            rollouts=worker.rollouts.present(),
        )

    return Watchdog(limit, progress=progress, report=report, end=pool.fail, last_words=last_words)
