"""Which versions a token may still have."""

from __future__ import annotations

from scripted import make_group, make_prompt

from pace_lightning.core.admission import AdmitAll
from pace_lightning.core.pool import TrajectoryPool
from pace_lightning.rollout.engine import PartialResponse
from pace_lightning.rollout.rollouts import Rollout, Rollouts


def test_no_token_is_older_than_the_oldest_dispatch_or_ready_group() -> None:
    rollouts = Rollouts()
    rollouts.publish(3, oldest_ready=None)
    assert rollouts.oldest_version == 3
    rollouts.begin(Rollout(make_prompt("a")), "dispatched")
    rollouts.publish(4, oldest_ready=None)
    rollouts.begin(Rollout(make_prompt("b")), "dispatched")
    rollouts.publish(5, oldest_ready=None)
    assert rollouts.oldest_version == 3  # of a
    rollouts.end("a")
    assert rollouts.oldest_version == 3  # until the next publication
    rollouts.publish(6, oldest_ready=5)
    assert rollouts.oldest_version == 4  # of b, which is in flight
    rollouts.publish(7, oldest_ready=2)
    assert rollouts.oldest_version == 2
    rollouts.end("b")
    rollouts.publish(8, oldest_ready=9)  # older weights than those of a ready group
    assert rollouts.oldest_version == 8


def test_what_goes_on_keeps_its_tokens_from_before() -> None:
    rollouts = Rollouts()
    responses = [PartialResponse(), PartialResponse([5, 6], [-1.0, -1.0], [2, 3])]
    rollouts.interrupted.append(Rollout(make_prompt("a"), responses))
    rollouts.publish(7, oldest_ready=None)
    assert rollouts.oldest_version == 2
    rollouts.begin(rollouts.next(lambda: make_prompt("b")), "dispatched")
    assert not rollouts.interrupted
    rollouts.publish(8, oldest_ready=None)
    assert rollouts.oldest_version == 2
    rollouts.end("a")
    rollouts.publish(9, oldest_ready=None)
    assert rollouts.oldest_version == 9


def test_a_pool_knows_its_oldest_token() -> None:
    pool = TrajectoryPool(AdmitAll(), settle=lambda *_: None)
    assert pool.oldest_version is None
    pool.put(make_group("a", versions=(4, 5)))
    pool.put(make_group("b", versions=(2, 6, 1)))
    assert pool.oldest_version == 1
    pool.draw(2, version=6, timeout_seconds=1)
    assert pool.oldest_version is None
