"""A publication: the engine gets new weights, and it is checked that they arrived."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from pace_lightning.core.trajectory import PolicyVersion
from pace_lightning.rollout.engine import RolloutEngine

Leave = Callable[[], Awaitable[None]]
"""What is done while no token flows, before the weights of the engine are replaced."""


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
    engine: RolloutEngine,
    weights: Mapping[str, Tensor],
    version: PolicyVersion,
    *,
    rescore: bool,
    leave: Leave | None = None,
) -> PublishReport:
    """Replace the engine's weights: prepare, pause, leave the old ones, load, verify, re-score."""
    start = time.monotonic()
    await engine.prepare_weights(weights)
    async with engine.paused():
        paused = time.monotonic()
        if leave is not None:
            await leave()
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
