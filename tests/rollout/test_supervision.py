"""Failed requests, late groups and a dying engine, with a scripted engine and a real worker."""

import random
import time
from contextlib import asynccontextmanager

import pytest
import torch
from rigs import WEIGHTS, evaluate, in_thread, make_rig
from scripted import (
    DEADLINE_SECONDS,
    FINISH,
    HOLD,
    NEVER,
    STRAGGLE,
    ScriptedEngine,
    make_prompt,
    scripted_tokens,
)

from pace_lightning.core.dispatch import AheadBound, FixedSlots
from pace_lightning.core.trajectory import Fate
from pace_lightning.rollout.engine import EngineError, RequestError, WrongWeightsError
from pace_lightning.rollout.supervision import EngineLostError, Incidents, Patience

__all__ = ["make_rig"]  # a fixture

pytestmark = pytest.mark.timeout(60)


def dies():
    return EngineError("the engine process is gone")


def fails():
    return RequestError("the cache is full")


# --- failed requests ------------------------------------------------------------------------------


def test_a_failed_request_is_asked_again_and_its_prompt_is_trained_on(make_rig):
    rig = make_rig(
        ScriptedEngine({1: fails(), 2: fails()}),
        dispatch=FixedSlots(1),
        patience=Patience(max_retries=2),
    ).train()
    assert rig.step(1, 0)[0].prompt.uid == "0"
    assert len({request.prompt for request in rig.engine.requests[:3]}) == 1
    assert rig.worker.incidents == Incidents(retried_requests=2)
    assert Fate.FAILED not in rig.fates.values()


def test_a_request_that_fails_too_often_costs_its_group(make_rig):
    script = {number: fails() for number in (1, 2, 3)}
    rig = make_rig(
        ScriptedEngine(script), dispatch=FixedSlots(1), patience=Patience(max_retries=2)
    ).train()
    assert rig.step(1, 0)[0].prompt.uid == "1"
    assert rig.fates["0"] == Fate.FAILED
    assert rig.worker.incidents.retried_requests == 2


def test_the_budget_is_that_of_a_prompt_and_not_of_the_run(make_rig):
    script = {number: fails() for number in (1, 3, 5, 7)}
    rig = make_rig(
        ScriptedEngine(script), dispatch=FixedSlots(1), patience=Patience(max_retries=1)
    ).train()
    assert [rig.step(1, 0)[0].prompt.uid for _ in range(4)] == ["0", "1", "2", "3"]
    assert rig.worker.incidents.retried_requests == 4


@pytest.mark.parametrize("seed", range(3))
def test_5_percent_of_requests_failing_at_random_stop_no_run_of_50_steps_and_lose_no_prompt(
    make_rig, seed
):
    dice = random.Random(seed)
    script = {number: fails() for number in range(1, 1000) if dice.random() < 0.05}
    rig = make_rig(
        ScriptedEngine(script), dispatch=FixedSlots(8), patience=Patience(max_retries=3)
    ).train()
    for version in range(50):
        assert len(rig.step(4, version)) == 4
        rig.publish(version + 1)
    assert rig.ledger.groups()["trained"] == 200
    failed = rig.worker.incidents.retried_requests
    assert failed >= 5  # of about 210
    # four failures lose a prompt: 0.05**4 x 200 = 0.001 of them are expected
    assert list(rig.fates.values()).count(Fate.FAILED) <= 1


# --- stragglers -----------------------------------------------------------------------------------


def straggling(make_rig, on_timeout, script, **options):
    patience = Patience(on_timeout=on_timeout, min_responses=2)
    options = {"group_size": 3, "group_timeout_seconds": 0.3, **options}
    return make_rig(
        ScriptedEngine(script), dispatch=FixedSlots(1), patience=patience, **options
    ).train()


def test_a_late_group_is_settled_and_counted(make_rig, caplog):
    rig = straggling(make_rig, "settle", {1: STRAGGLE})
    assert rig.step(1, 0)[0].prompt.uid == "1"
    assert rig.fates["0"] == Fate.TIMED_OUT
    assert rig.worker.incidents == Incidents()
    (warning,) = caplog.messages
    assert "prompt 0 timed_out: no result within 0.3 s (rollout.timeout_seconds" in warning
    assert "2 of 3 responses were finished" in warning


def test_a_late_group_is_asked_once_more_for_the_response_that_is_missing(make_rig):
    rig = straggling(make_rig, "retry", {1: STRAGGLE})
    (group,) = rig.step(1, 0)
    assert group.prompt.uid == "0"
    assert [request.n for request in rig.engine.requests[:2]] == [3, 1]
    assert rig.engine.requests[0].cancelled
    prompt = group.prompt.token_ids
    expected = [tuple(scripted_tokens(prompt, 0, sample)) for sample in (0, 1, 2)]
    assert [t.token_ids for t in group.trajectories] == expected
    assert rig.worker.incidents == Incidents(retried_stragglers=1)


def test_a_group_that_is_late_twice_is_settled(make_rig):
    rig = straggling(make_rig, "retry", {1: NEVER, 2: NEVER})
    begin = time.monotonic()
    assert rig.step(1, 0)[0].prompt.uid == "1"
    assert 0.6 <= time.monotonic() - begin < 2.0
    assert rig.fates["0"] == Fate.TIMED_OUT
    assert rig.worker.incidents == Incidents(retried_stragglers=1)


def test_a_late_group_is_completed_with_what_is_there(make_rig):
    rig = straggling(make_rig, "complete", {1: STRAGGLE})
    (group,) = rig.step(1, 0)
    assert group.prompt.uid == "0"
    assert len(group.trajectories) == 2
    assert rig.worker.num_tokens_generated >= 4
    assert rig.ledger.tokens() == {"trained": 4}
    assert rig.worker.incidents == Incidents(completed_stragglers=1)


@pytest.mark.parametrize("how", [STRAGGLE, NEVER])
def test_a_late_group_with_too_few_finished_responses_is_settled(make_rig, how):
    rig = straggling(make_rig, "complete", {1: how}, group_size=2)
    assert rig.step(1, 0)[0].prompt.uid == "1"
    assert rig.fates["0"] == Fate.TIMED_OUT
    assert rig.worker.incidents == Incidents()


def test_a_completed_group_of_equal_scores_is_not_trained_on(make_rig):
    async def score(prompt, completions):
        return [float(index == 2) for index, _ in enumerate(completions)]  # only the third is right

    rig = straggling(make_rig, "complete", {1: STRAGGLE}, score=score)
    assert rig.step(1, 0)[0].prompt.uid == "1"
    assert rig.fates["0"] == Fate.ZERO_VARIANCE


# --- an engine that dies --------------------------------------------------------------------------


def mortal(make_rig, script=None, *, default=FINISH, max_restarts=2, **options):
    return make_rig(
        ScriptedEngine(script, default=default),
        patience=Patience(max_restarts=max_restarts),
        **options,
    ).start()


def test_a_dead_engine_is_restarted_at_its_version_and_what_was_in_flight_is_asked_again(make_rig):
    rig = mortal(make_rig, default=HOLD, dispatch=FixedSlots(3))
    rig.publish(7)
    rig.worker.train()
    first = rig.engine.await_live(3)
    rig.engine.default = FINISH
    begin = time.monotonic()
    first[1].finish(dies())
    groups = rig.step(3, 7)
    assert time.monotonic() - begin < 2.0
    assert sorted(group.prompt.uid for group in groups) == ["0", "1", "2"]
    assert (rig.engine.num_starts, rig.engine.num_closes) == (2, 1)
    assert [version for version, _ in rig.engine.weights] == [7, 7]
    assert torch.equal(rig.engine.weights[1][1]["w"], WEIGHTS["w"])
    versions = {v for group in groups for t in group.trajectories for v in t.token_versions}
    assert versions == {7}, "no token was sampled before the weights were there again"
    assert rig.worker.incidents == Incidents(engine_restarts=1)


def test_the_weights_of_a_restart_are_those_published_and_not_what_the_trainer_has_made_of_them(
    make_rig,
):
    weights = {"w": torch.arange(3.0)}
    rig = mortal(make_rig, default=HOLD, dispatch=FixedSlots(1))
    rig.worker.publish(weights, 1, timeout_seconds=DEADLINE_SECONDS)
    weights["w"] += 100  # an optimizer step
    rig.worker.train()
    rig.engine.await_live(1)[0].finish(dies())
    rig.engine.until(lambda: len(rig.engine.weights) == 2, "weights loaded again")
    assert torch.equal(rig.engine.weights[1][1]["w"], torch.arange(3.0))


def test_an_engine_that_keeps_its_weights_is_not_given_them_again(make_rig):
    rig = mortal(make_rig, {1: dies()}, dispatch=FixedSlots(1))
    rig.engine.keeps_weights = True
    rig.publish(3)
    rig.worker.train()
    rig.step(1, 3)
    assert rig.engine.num_starts == 2
    assert len(rig.engine.weights) == 1


def test_an_engine_that_dies_too_often_ends_the_run_with_a_named_error(make_rig):
    rig = mortal(make_rig, default=dies(), dispatch=FixedSlots(2))
    rig.publish(0)
    rig.worker.train()
    begin = time.monotonic()
    message = r"died again after 2 restarts \(engine.max_restarts\).*the engine process is gone"
    with pytest.raises(EngineLostError, match=message):
        rig.draw(1)
    assert time.monotonic() - begin < 2.0
    rig.await_thread_end()
    assert rig.engine.num_starts == 3
    assert rig.engine.closed


def test_an_engine_that_cannot_start_again_ends_the_run_within_the_same_budget(make_rig):
    rig = mortal(make_rig, {1: dies()}, dispatch=FixedSlots(1))
    rig.publish(0)
    rig.engine.start_error = EngineError("no such device")
    rig.worker.train()
    with pytest.raises(EngineLostError, match="no such device"):
        rig.draw(1)
    assert rig.engine.num_starts == 3


def test_many_requests_that_die_together_cause_one_restart(make_rig):
    rig = mortal(make_rig, default=HOLD, dispatch=FixedSlots(6), max_restarts=1)
    rig.publish(0)
    rig.worker.train()
    live = rig.engine.await_live(6)
    rig.engine.default = FINISH
    for request in live:
        request.finish(dies())
    assert len(rig.step(6, 0)) == 6
    assert rig.worker.incidents.engine_restarts == 1


def test_an_engine_that_dies_in_a_publication_is_restarted_and_gets_the_new_weights(make_rig):
    rig = mortal(make_rig, dispatch=FixedSlots(1))
    rig.publish(1)

    load, failures = rig.engine.load_weights, [dies()]

    async def load_weights(weights, *, version):
        if failures:
            raise failures.pop()
        await load(weights, version=version)

    rig.engine.load_weights = load_weights
    rig.publish(2)
    assert [version for version, _ in rig.engine.weights] == [1, 1, 2]
    assert not rig.engine.left_paused
    rig.worker.train()
    (group,) = rig.draw(1, version=2)
    assert group.trajectories[0].token_versions == (2, 2)


def test_weights_that_an_engine_refuses_from_the_first_are_no_reason_for_a_restart(make_rig):
    rig = mortal(make_rig)
    rig.engine.load_error = error = EngineError("names differ")
    with pytest.raises(EngineError) as raised:
        rig.publish(0)
    assert raised.value is error
    assert rig.engine.num_starts == 1


def test_the_deadline_of_a_group_does_not_interrupt_a_restart(make_rig):
    rig = mortal(
        make_rig,
        {1: dies()},
        dispatch=FixedSlots(1),
        group_timeout_seconds=0.1,
        max_failed_groups=1000,
    )
    rig.publish(0)
    rig.engine.start_gate.shut()
    rig.worker.train()
    rig.await_fate(Fate.TIMED_OUT, 2)  # they waited for the restart
    rig.engine.start_gate.open()
    assert len(rig.step(1, 0)) == 1
    assert rig.engine.num_starts == 2


def test_a_publication_waits_for_a_restart(make_rig):
    rig = mortal(make_rig, {1: dies()}, dispatch=FixedSlots(1))
    rig.publish(1)
    rig.engine.start_gate.shut()
    rig.worker.train()
    rig.engine.start_gate.await_reached()
    publishing = in_thread(lambda: rig.publish(2))
    rig.let_run()
    rig.engine.start_gate.open()
    publishing()
    assert [version for version, _ in rig.engine.weights] == [1, 1, 2]


def test_the_time_of_a_restart_does_not_count_for_a_publication(make_rig):
    rig = mortal(make_rig, {1: dies()}, dispatch=FixedSlots(1))
    rig.publish(1)
    rig.engine.start_gate.shut()
    rig.worker.train()
    rig.engine.start_gate.await_reached()
    limit = 0.3
    publishing = in_thread(lambda: rig.worker.publish(WEIGHTS, 2, timeout_seconds=limit))
    time.sleep(3 * limit)  # nothing that could be waited for happens meanwhile
    rig.engine.start_gate.open()
    publishing()
    assert [version for version, _ in rig.engine.weights] == [1, 1, 2]


def test_an_engine_that_dies_at_the_end_of_a_pause_is_restarted_by_whoever_needs_it(make_rig):
    rig = mortal(make_rig, in_rounds=True, dispatch=AheadBound(eta=0, groups_per_step=2))
    rig.publish(0)
    pause, deaths = rig.engine.paused, [dies()]

    @asynccontextmanager
    async def paused():
        async with pause():
            yield
        if deaths:
            rig.engine.die(deaths[0])
            raise deaths.pop()

    rig.engine.paused = paused
    rig.worker.train()
    assert len(rig.step(2, 0)) == 2


def test_wrong_weights_after_a_restart_end_the_run_at_once(make_rig):
    rig = mortal(make_rig, {1: dies()}, dispatch=FixedSlots(1))
    rig.publish(0)
    rig.engine.load_error = WrongWeightsError("they did not arrive")
    rig.worker.train()
    with pytest.raises(WrongWeightsError, match="they did not arrive"):
        rig.draw(1)
    assert rig.engine.num_starts == 2, "not as often as an engine may be restarted"


def test_nothing_is_asked_of_an_engine_that_runs_again_but_has_no_weights_yet(make_rig):
    rig = mortal(make_rig, {1: dies()}, dispatch=FixedSlots(1))
    rig.publish(1)
    rig.engine.load_gate.shut()
    rig.worker.train()
    rig.engine.load_gate.await_reached()
    evaluating = in_thread(lambda: evaluate(rig))
    rig.let_run()
    assert len(rig.engine.requests) == 1
    rig.engine.load_gate.open()
    assert len(evaluating()) == 3
    assert {version for request in rig.engine.requests for version in request.versions} == {1}


def test_an_error_of_the_life_before_the_restart_causes_no_second_one(make_rig):
    class Forgetful(ScriptedEngine):
        async def close(self):
            if self.num_starts > 1:
                await super().close()

    engine = Forgetful(default=HOLD)
    rig = make_rig(engine, patience=Patience(max_restarts=5), dispatch=FixedSlots(2)).start()
    rig.publish(0)
    rig.worker.train()
    first, second = engine.await_live(2)
    engine.default = FINISH
    first.finish(dies())
    assert len(rig.step(1, 0)) == 1
    second.finish(dies())
    rig.step(2, 0)
    engine.until(lambda: second not in engine.live, "the end of the second")
    rig.let_run()
    assert rig.worker.incidents.engine_restarts == 1


def test_a_restart_waits_for_a_publication_and_keeps_its_weights(make_rig):
    rig = mortal(make_rig, default=HOLD, dispatch=FixedSlots(1))
    rig.publish(1)
    rig.worker.train()
    (request,) = rig.engine.await_live(1)
    rig.engine.load_gate.shut()
    publishing = in_thread(lambda: rig.publish(2))
    rig.engine.load_gate.await_reached()
    request.finish(dies())
    rig.let_run()
    assert rig.engine.num_starts == 1
    rig.engine.load_gate.open()
    publishing()
    rig.engine.until(lambda: rig.engine.num_starts == 2, "a restart")
    rig.engine.await_live(1)[0].finish()
    assert rig.draw(1, version=2)[0].trajectories[0].token_versions == (2, 2)
    assert [version for version, _ in rig.engine.weights] == [1, 2, 2]


def test_closing_in_the_middle_of_a_restart_leaves_nothing(make_rig):
    rig = mortal(make_rig, {1: dies()}, dispatch=FixedSlots(1))
    rig.publish(1)
    rig.engine.start_gate.shut()
    rig.worker.train()
    rig.engine.start_gate.await_reached()
    begin = time.monotonic()
    rig.worker.close()
    assert time.monotonic() - begin < 2.0
    assert not rig.worker.is_alive
    assert rig.engine.closed


def test_an_evaluation_survives_the_death_of_the_engine(make_rig):
    rig = mortal(make_rig, {2: dies()})
    rig.publish(4)
    results = evaluate(rig)
    assert [result.scores for result in results] == [(1.0, 0.0, 0.0)] * 3
    tokens = scripted_tokens(make_prompt("y").token_ids, 4, 2)
    assert results[1].completions[2].token_ids == tuple(tokens)


def test_a_round_begins_although_the_engine_died_between_two_rounds(make_rig):
    rig = mortal(make_rig, in_rounds=True, dispatch=AheadBound(eta=0, groups_per_step=2))
    rig.publish(0)
    pause, deaths = rig.engine.paused, [dies()]

    def paused():
        if deaths:
            raise deaths.pop()
        return pause()

    rig.engine.paused = paused
    rig.worker.train()
    assert len(rig.step(2, 0)) == 2
    assert rig.engine.num_starts == 2


def test_finished_responses_survive_a_restart_and_only_the_others_are_asked_again(make_rig):
    rig = mortal(make_rig, {1: STRAGGLE}, dispatch=FixedSlots(2), group_size=3)
    rig.publish(0)
    rig.engine.script[2] = HOLD
    rig.worker.train()
    _, second = rig.engine.await_live(2)
    second.finish(dies())
    groups = rig.step(2, 0)
    assert {len(group.trajectories) for group in groups} == {3}
    assert sorted(request.n for request in rig.engine.requests[2:4]) == [1, 3]


def test_what_had_come_of_a_response_survives_a_restart(make_rig):
    rig = mortal(make_rig, default=HOLD, dispatch=FixedSlots(1))
    rig.publish(0)
    rig.worker.train()
    (request,) = rig.engine.await_live(1)
    rig.publish(1)
    (rollout,) = rig.worker.rollouts.present()
    assert [response.versions for response in rollout.responses] == [[0, 0]] * 2
    rig.engine.default = FINISH
    request.finish(dies())
    (group,) = rig.step(1, 1)
    assert rig.engine.requests[1].continued == [2, 2]
    for sample, trajectory in enumerate(group.trajectories):
        assert trajectory.token_versions == (0, 0, 1, 1)
        tokens = [scripted_tokens(request.prompt, version, sample) for version in (0, 1)]
        assert trajectory.token_ids == (*tokens[0], *tokens[1])


def test_a_failed_request_is_asked_again_without_what_had_come_of_it(make_rig):
    patience = Patience(max_retries=1)
    rig = make_rig(ScriptedEngine({1: HOLD}), dispatch=FixedSlots(1), patience=patience).start()
    rig.publish(0)
    rig.worker.train()
    (request,) = rig.engine.await_live(1)
    rig.publish(1)
    request.finish(fails())
    (group,) = rig.step(1, 1)
    assert rig.engine.requests[1].continued == [0, 0]
    assert {trajectory.token_versions for trajectory in group.trajectories} == {(1, 1)}


def test_a_bug_in_the_engine_is_no_reason_for_a_restart(make_rig):
    error = ValueError("shape mismatch")
    rig = mortal(make_rig, {1: error}, dispatch=FixedSlots(1))
    rig.publish(0)
    rig.worker.train()
    with pytest.raises(ValueError, match="shape mismatch") as raised:
        rig.draw(1)
    assert raised.value is error
    assert rig.engine.num_starts == 1


@pytest.mark.parametrize("seed", range(20))
def test_whatever_dies_or_fails_when_every_prompt_ends_once_and_the_steps_are_taken(make_rig, seed):
    dice = random.Random(seed)
    kinds = [fails(), dies(), STRAGGLE]
    script = {n: dice.choice(kinds) for n in range(1, 400) if dice.random() < 0.15}
    rig = make_rig(
        ScriptedEngine(script),
        dispatch=FixedSlots(4),
        group_size=3,
        group_timeout_seconds=0.05,
        max_failed_groups=1000,
        patience=Patience(
            on_timeout=dice.choice(["settle", "retry", "complete"]),
            max_retries=1,
            max_restarts=1000,
        ),
    ).start()
    rig.publish(0)
    rig.worker.train()
    for version in range(8):
        for group in rig.step(3, version):
            assert len(group.trajectories) in (2, 3)
            for trajectory in group.trajectories:
                assert min(trajectory.token_versions) >= 0
        rig.publish(version + 1)
    rig.end()
    assert rig.ledger.num_pending == 0
    assert sum(rig.ledger.tokens().values()) == rig.worker.num_tokens_generated
