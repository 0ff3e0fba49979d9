"""Which versions a token may still have."""

from __future__ import annotations

from scripted import make_group

from pace_lightning.core.admission import AdmitAll
from pace_lightning.core.pool import TrajectoryPool
from pace_lightning.rollout.flights import Flights


def test_no_token_is_older_than_the_oldest_dispatch_or_ready_group() -> None:
    flights = Flights()
    flights.publish(3, oldest_ready=None)
    assert flights.oldest_version == 3
    flights.begin("a", "dispatched")
    flights.publish(4, oldest_ready=None)
    flights.begin("b", "dispatched")
    flights.publish(5, oldest_ready=None)
    assert flights.oldest_version == 3  # of a
    flights.end("a")
    assert flights.oldest_version == 3  # until the next publication
    flights.publish(6, oldest_ready=5)
    assert flights.oldest_version == 4  # of b, which is in flight
    flights.publish(7, oldest_ready=2)
    assert flights.oldest_version == 2
    flights.end("b")
    flights.publish(8, oldest_ready=9)  # older weights than those of a ready group
    assert flights.oldest_version == 8


def test_a_pool_knows_its_oldest_token() -> None:
    pool = TrajectoryPool(AdmitAll(), settle=lambda *_: None)
    assert pool.oldest_version is None
    pool.put(make_group("a", versions=(4, 5)))
    pool.put(make_group("b", versions=(2, 6, 1)))
    assert pool.oldest_version == 1
    pool.draw(2, version=6, timeout_seconds=1)
    assert pool.oldest_version is None
