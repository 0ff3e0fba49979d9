"""A publication: the engine gets new weights, and it is checked that they arrived."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pace_lightning.core.trajectory import PolicyVersion
from pace_lightning.rollout.engine import RolloutEngine


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Where the time of one publication went."""

    version: PolicyVersion
    seconds: float
    pause_seconds: float
    """How long no token flowed."""
    verify_seconds: float = 0.0
    """The part of the pause that went into seeing that the weights arrived.

    0 where that happens while tokens flow again.
    """


async def publish(
    engine: RolloutEngine, weights: Mapping[str, Tensor], version: PolicyVersion, *, rescore: bool
) -> PublishReport:
    """Replace the engine's weights: prepare, pause, load, verify, re-score, resume."""
    start = time.monotonic()
    await engine.prepare_weights(weights)
    async with engine.paused():
        paused = time.monotonic()
        await engine.load_weights(weights, version=version)
        loaded = time.monotonic()
        await engine.verify_weights()
        verified = time.monotonic()
        if rescore:
            await engine.rescore_prefixes()
        done = time.monotonic()
    return PublishReport(
        version,
        seconds=time.monotonic() - start,
        pause_seconds=done - paused,
        verify_seconds=verified - loaded,
    )
