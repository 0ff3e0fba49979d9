"""Which versions a token may still have."""

from __future__ import annotations

import math

import pytest
from scripted import make_group, make_prompt

from pace_lightning.rollout.engine import PartialResponse
from pace_lightning.rollout.groups import build_group
from pace_lightning.rollout.rollouts import Rollout, Rollouts


def test_no_token_is_older_than_the_oldest_dispatch_or_ready_group() -> None:
    rollouts = Rollouts()
    rollouts.publish(3, [])
    assert rollouts.oldest_version == 3
    rollouts.begin(Rollout(make_prompt("a")), "dispatched")
    rollouts.publish(4, [])
    rollouts.begin(Rollout(make_prompt("b")), "dispatched")
    rollouts.publish(5, [])
    assert rollouts.oldest_version == 3  # of a
    rollouts.end("a")
    assert rollouts.oldest_version == 3  # until the next publication
    rollouts.publish(6, [make_group("r", versions=(9, 5))])
    assert rollouts.oldest_version == 4  # of b, which is in flight
    rollouts.publish(7, [make_group("r", versions=(9, 2))])
    assert rollouts.oldest_version == 2
    rollouts.end("b")
    rollouts.publish(
        8, [make_group("r", versions=(9, 9))]
    )  # older weights than those of a ready group
    assert rollouts.oldest_version == 8


def test_what_goes_on_keeps_its_tokens_from_before() -> None:
    rollouts = Rollouts()
    responses = [PartialResponse(), PartialResponse([5, 6], [-1.0, -1.0], [2, 3])]
    rollouts.interrupted.append(Rollout(make_prompt("a"), responses))
    rollouts.publish(7, [])
    assert rollouts.oldest_version == 2
    rollouts.begin(rollouts.next(lambda: make_prompt("b")), "dispatched")
    assert not rollouts.interrupted
    rollouts.publish(8, [])
    assert rollouts.oldest_version == 2
    rollouts.end("a")
    rollouts.publish(9, [])
    assert rollouts.oldest_version == 9


def test_what_may_still_be_trained_on_is_all_of_the_groups_that_are_ready_or_have_not_ended() -> (
    None
):
    rollouts = Rollouts()
    rollouts.begin(Rollout(make_prompt("a"), [PartialResponse([5], [-1.0], [2])]), "dispatched")
    rollouts.interrupted.append(Rollout(make_prompt("b"), [PartialResponse()]))
    found = rollouts.sampled([make_group("c", versions=(1, 2), scores=(0.0,))])
    assert [(x.prompt, list(x.token_ids), list(x.versions)) for x in found] == [
        (make_prompt("c").token_ids, [0, 1], [1, 2]),
        (make_prompt("a").token_ids, [5], [2]),
        (make_prompt("b").token_ids, [], []),
    ]


def test_a_log_prob_that_is_none_does_not_spoil_the_checkpoint_it_is_in() -> None:
    response = PartialResponse([5, 6], [math.nan, -1.0], [2, 3], completed_at=3)
    prompt = make_prompt("a")
    restored = Rollout.from_state(Rollout(prompt, [response]).state_dict(), prompt)
    restored.check(group_size=1, max_new_tokens=2, version=4)
    assert math.isnan(restored.responses[0].logprobs[0])
    completions = [r.completion() for r in restored.responses]
    with pytest.raises(ValueError, match="log-prob"):
        build_group(prompt, completions, [1.0], shape_reward=lambda score, _: score)
