"""The rollout thread with a scripted engine, a real pool and a real ledger."""

import asyncio
import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from rigs import SAMPLING, WEIGHTS, Rig, evaluate, in_thread, make_rig
from scripted import (
    DEADLINE_SECONDS,
    FINISH,
    HOLD,
    NAN,
    NEVER,
    ListPrompts,
    ScriptedEngine,
    make_prompt,
    score_equal,
    score_mixed,
    scripted_logprob,
    scripted_tokens,
)

from pace_lightning.core.admission import AdmitAll, MaxLag
from pace_lightning.core.dispatch import AheadBound, FixedSlots
from pace_lightning.core.pool import DrawTimeoutError, EndOfGroups
from pace_lightning.core.trajectory import Fate
from pace_lightning.rollout.engine import EngineError, RequestError, Sampling
from pace_lightning.rollout.groups import (
    NothingToLearnError,
    RolloutTimeoutError,
    ScoringFailedError,
)

__all__ = ["make_rig"]  # a fixture

pytestmark = pytest.mark.timeout(60)


def close_in_thread(rig):
    """Begin to close; returns once `close` has said what it had to say and waits for the thread."""
    thread, joining = rig.worker._thread, threading.Event()
    join = thread.join

    def announcing(timeout=None):
        joining.set()
        join(timeout)

    thread.join = announcing
    result = in_thread(rig.worker.close)
    assert joining.wait(DEADLINE_SECONDS)
    return result


# --- what a group is made of ---------------------------------------------------------------------


def test_a_group_holds_what_the_engine_sampled_and_the_scorer_said(make_rig):
    prompt = make_prompt("a")
    rig = make_rig(
        ScriptedEngine(),
        prompts=[prompt],
        shape_reward=lambda score, num_tokens: score - num_tokens / 8,
    ).train()
    (group,) = rig.draw(1)
    assert group.prompt is prompt
    for sample, trajectory in enumerate(group.trajectories):
        tokens = scripted_tokens(prompt.token_ids, 0, sample)
        assert trajectory.token_ids == tuple(tokens)
        assert trajectory.behavior_logprobs == tuple(map(scripted_logprob, tokens))
        assert trajectory.token_versions == (0, 0)
        assert trajectory.completed_at == 0
        assert trajectory.score == float(sample == 0)
        assert trajectory.reward == trajectory.score - 2 / 8
    request = rig.engine.requests[0]
    assert (request.prompt, request.n, request.sampling) == (prompt.token_ids, 2, SAMPLING)
    assert rig.worker.num_tokens_generated == 4
    generated = rig.worker.generated
    assert (generated.groups, generated.responses, generated.tokens) == (1, 2, 4)
    assert (generated.score_sum, generated.mixed_groups) == (1.0, 1)


def test_slots_are_filled_and_refilled_when_a_draw_frees_them(make_rig):
    rig = make_rig(dispatch=FixedSlots(3)).start()
    rig.let_run()
    assert rig.engine.requests == []  # not before training begins
    rig.worker.train()
    requests = rig.engine.await_live(3)
    requests[1].finish()
    rig.await_ready(1)
    rig.let_run()
    assert len(rig.engine.requests) == 3  # a ready group still fills its slot
    assert rig.draw(1)[0].prompt.uid == "1"
    rig.engine.await_requests(4)
    assert rig.worker.num_in_flight == 3
    assert rig.prompts.leased == ["0", "1", "2", "3"]


def test_a_straggler_does_not_block_the_others(make_rig):
    rig = make_rig(ScriptedEngine({1: NEVER}), dispatch=FixedSlots(3)).train()
    drawn = [group.prompt.uid for _ in range(20) for group in rig.step(2, 0)]
    assert len(set(drawn)) == 40
    assert "0" not in drawn
    assert rig.worker.num_in_flight >= 1


def test_lag_over_the_limit_is_settled_and_refilled(make_rig):
    rig = make_rig(
        ScriptedEngine({1: HOLD, 2: HOLD}, default=FINISH),
        dispatch=FixedSlots(2),
        policy=MaxLag(0),
    ).train()
    first, second = rig.engine.await_live(2)
    rig.publish(1)
    first.finish()
    second.finish()
    groups = rig.draw(2, version=1)
    assert [group.prompt.uid for group in groups] == ["2", "3"]
    assert rig.fates == {"0": Fate.TOO_STALE, "1": Fate.TOO_STALE}


# --- failures ------------------------------------------------------------------------------------


def test_a_dead_engine_reaches_the_draw_as_the_very_exception_and_the_thread_ends(make_rig):
    error = EngineError("the fifth broke it")
    rig = make_rig(ScriptedEngine({5: error}), dispatch=FixedSlots(8)).train()
    start = time.monotonic()

    def consume():
        while True:
            rig.step(4, 0)

    with pytest.raises(EngineError) as raised:
        consume()
    assert raised.value is error
    assert time.monotonic() - start < 5
    rig.await_thread_end()
    assert rig.engine.closed
    with pytest.raises(EngineError) as raised:
        rig.publish(1)
    assert raised.value is error


def test_a_dead_engine_is_reported_before_it_is_cleaned_up(make_rig):
    engine = ScriptedEngine({1: EngineError("dead")}, default=NEVER)
    engine.close_gate.shut()
    rig = make_rig(engine).train()
    with pytest.raises(EngineError, match="dead"):
        rig.draw(1)
    engine.close_gate.await_reached()
    assert rig.worker.is_alive
    with pytest.raises(EngineError, match="dead"):
        rig.publish(1)


def test_closing_does_not_interrupt_the_clean_up_of_a_dead_engine(make_rig):
    engine = ScriptedEngine({1: EngineError("dead")}, default=NEVER)
    engine.close_gate.shut()
    rig = make_rig(engine).train()
    engine.close_gate.await_reached()
    closing = close_in_thread(rig)
    rig.let_run()
    engine.close_gate.open()
    closing()
    assert engine.closed
    assert engine.num_closes == 1
    assert not rig.worker.is_alive


def test_a_failed_request_costs_its_group_only_and_its_slot_is_refilled(make_rig):
    script = {number: RequestError(f"request {number}") for number in (2, 3, 7)}
    rig = make_rig(ScriptedEngine(script), dispatch=FixedSlots(4)).train()
    drawn = [group.prompt.uid for _ in range(5) for group in rig.step(4, 0)]
    assert len(drawn) == 20
    rig.await_fate(Fate.FAILED, 3)
    failed = sorted(uid for uid, fate in rig.fates.items() if fate == Fate.FAILED)
    assert failed == ["1", "2", "6"]
    assert rig.worker.is_alive


def test_when_all_requests_fail_the_run_ends_and_says_so(make_rig):
    rig = make_rig(ScriptedEngine(default=RequestError("cache is full")), max_failed_groups=6)
    rig.train()
    with pytest.raises(RuntimeError, match=r"the last 6 groups all failed.*cache is full"):
        rig.draw(1)
    rig.await_thread_end()


def test_a_success_in_between_resets_the_count_of_failures(make_rig):
    script = {number: RequestError("no") for number in range(1, 40) if number % 3}
    rig = make_rig(ScriptedEngine(script), dispatch=FixedSlots(1), max_failed_groups=3).train()
    for _ in range(10):
        rig.step(1, 0)
    assert list(rig.fates.values()).count(Fate.FAILED) >= 18
    assert rig.worker.is_alive


def test_a_log_prob_that_is_not_a_number_fails_its_group_and_is_never_trained_on(make_rig):
    rig = make_rig(ScriptedEngine({2: NAN}), dispatch=FixedSlots(3)).train()
    groups = rig.step(3, 0)
    assert "1" not in [group.prompt.uid for group in groups]
    assert rig.fates["1"] == Fate.FAILED
    for group in groups:
        for trajectory in group.trajectories:
            expected = [scripted_logprob(token) for token in trajectory.token_ids]
            assert list(trajectory.behavior_logprobs) == expected
    assert rig.ledger.tokens()["failed"] == 4  # sampled all the same


def test_a_response_too_few_fails_its_group(make_rig):
    class Miser(ScriptedEngine):
        async def generate(self, prompt, *, n, sampling, responses=None):
            completions = await super().generate(prompt, n=n, sampling=sampling)
            return completions[: 1 if len(self.requests) == 1 else n]

    rig = make_rig(Miser(), dispatch=FixedSlots(1)).train()
    assert rig.step(1, 0)[0].prompt.uid == "1"
    assert rig.fates["0"] == Fate.FAILED


def test_a_group_past_its_deadline_is_settled_and_its_request_withdrawn(make_rig):
    rig = make_rig(
        ScriptedEngine({2: NEVER}), dispatch=FixedSlots(2), group_timeout_seconds=0.5
    ).train()
    rig.await_fate(Fate.TIMED_OUT)
    assert rig.fates == {"1": Fate.TIMED_OUT}
    stuck = rig.engine.requests[1]
    assert stuck.cancelled
    assert stuck not in rig.engine.live
    assert [group.prompt.uid for group in rig.step(2, 0)] == ["0", "2"]  # the slot was refilled


def test_when_every_group_times_out_the_run_ends_and_says_so(make_rig):
    rig = make_rig(
        ScriptedEngine(default=NEVER), group_timeout_seconds=0.02, max_failed_groups=8
    ).train()
    with pytest.raises(RuntimeError, match=r"all failed or timed out.*no result within 0.02 s"):
        rig.draw(1)


def test_a_bug_in_the_engine_is_not_taken_for_a_failed_request(make_rig):
    error = ValueError("shape mismatch")
    rig = make_rig(ScriptedEngine({1: error})).train()
    with pytest.raises(ValueError, match="shape mismatch") as raised:
        rig.draw(4)
    assert raised.value is error


# --- scoring -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", [Fate.SCORER_ERROR, Fate.SCORER_TIMEOUT])
def test_a_group_that_could_not_be_scored_ends_in_the_fate_of_that(make_rig, fate):
    async def score(prompt, completions):
        if prompt.uid == "1":
            raise ScoringFailedError("no", fate)
        return await score_mixed(prompt, completions)

    rig = make_rig(ScriptedEngine(), score=score, dispatch=FixedSlots(2)).train()
    assert [group.prompt.uid for group in rig.step(2, 0)] == ["0", "2"]
    assert rig.fates["1"] == fate
    assert rig.ledger.tokens()[fate] == 4


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, TimeoutError, KeyError])
def test_any_other_exception_of_the_scorer_ends_the_run(make_rig, kind):
    error = kind("the budget of scoring errors is spent")

    async def score(prompt, completions):
        raise error

    rig = make_rig(ScriptedEngine(), score=score).train()
    with pytest.raises(kind) as raised:
        rig.draw(1)
    assert raised.value is error
    rig.await_thread_end()


def test_a_scorer_that_takes_its_time_is_not_cut_off_by_the_deadline_of_generation(make_rig):
    async def score(prompt, completions):
        await asyncio.sleep(0.6)  # the deadline passes meanwhile
        return await score_mixed(prompt, completions)

    rig = make_rig(ScriptedEngine(), score=score, group_timeout_seconds=0.3).train()
    assert len(rig.step(4, 0)) == 4
    assert Fate.TIMED_OUT not in rig.fates.values()


def test_groups_without_a_gradient_never_reach_the_pool_and_are_refilled(make_rig):
    async def score(prompt, completions):
        if int(prompt.uid) % 2:
            return [1.0 for _ in completions]
        return await score_mixed(prompt, completions)

    rig = make_rig(ScriptedEngine(), score=score, dispatch=FixedSlots(2)).train()
    drawn = [group.prompt.uid for _ in range(5) for group in rig.step(2, 0)]
    assert sorted(drawn, key=int) == [str(uid) for uid in range(0, 20, 2)]
    assert rig.pool.num_accepted <= 12  # the ten drawn, and two slots
    zero = [uid for uid, fate in rig.fates.items() if fate == Fate.ZERO_VARIANCE]
    assert len(zero) >= 8
    assert all(int(uid) % 2 for uid in zero)
    assert rig.worker.generated.groups > rig.worker.generated.mixed_groups


def test_equal_groups_are_kept_without_dynamic_sampling(make_rig):
    rig = make_rig(ScriptedEngine(), score=score_equal(0.0), drop_zero_variance=False).train()
    assert len(rig.draw(4)) == 4
    assert rig.fates == {}


@pytest.mark.parametrize(("score", "rate"), [(0.0, "0.00"), (1.0, "1.00")])
def test_when_nothing_has_a_gradient_the_run_ends_and_names_the_pass_rate(make_rig, score, rate):
    rig = make_rig(ScriptedEngine(), score=score_equal(score), max_empty_groups=12).train()
    with pytest.raises(NothingToLearnError, match=f"pass rate {rate} on the last 12 groups"):
        rig.draw(1)
    assert rig.worker.is_alive  # an evaluation may still be wanted
    rig.worker.stop_training()
    assert rig.worker.num_in_flight == 0
    assert list(rig.fates.values()).count(Fate.ZERO_VARIANCE) >= 12


def test_one_group_with_a_gradient_resets_the_count_of_empty_ones(make_rig):
    async def score(prompt, completions):
        if int(prompt.uid) % 4 == 3:
            return await score_mixed(prompt, completions)
        return [0.0 for _ in completions]

    rig = make_rig(
        ScriptedEngine(), score=score, dispatch=FixedSlots(1), max_empty_groups=4
    ).train()
    for _ in range(6):
        rig.step(1, 0)
    assert rig.worker.is_alive


# --- publication ---------------------------------------------------------------------------------


def test_a_response_that_spans_a_publication_keeps_the_version_of_each_token(make_rig):
    rig = make_rig(dispatch=FixedSlots(1)).train()
    (request,) = rig.engine.await_live(1)
    report = rig.publish(1)
    assert report.version == 1
    assert 0 <= report.pause_seconds <= report.seconds
    rig.worker.advance(2)  # a step that publishes nothing
    request.finish()
    (group,) = rig.draw(1, version=2)
    trajectory = group.trajectories[0]
    assert trajectory.token_versions == (0, 0, 1, 1)
    assert trajectory.completed_at == 2  # the trainer's clock, not the published version
    old, new = (scripted_tokens(request.prompt, version, 0) for version in (0, 1))
    assert trajectory.token_ids == (*old, *new)
    ((version, weights),) = rig.engine.weights
    assert version == 1
    assert torch.equal(weights["w"], WEIGHTS["w"])


def test_a_group_that_waits_for_two_publications_has_waited_two_versions(make_rig):
    rig = make_rig(ScriptedEngine(), dispatch=FixedSlots(1)).train()
    rig.await_ready(1)
    rig.publish(1)
    rig.publish(2)
    _, report = rig.pool.draw(1, version=2, timeout_seconds=5)
    assert report.waiting_staleness_versions == 2
    assert report.generation_staleness_versions == 0


def test_nothing_is_dispatched_between_the_step_and_the_end_of_its_publication(make_rig):
    engine = ScriptedEngine(default=HOLD)
    rig = make_rig(engine, dispatch=AheadBound(eta=0, groups_per_step=2)).train()
    for request in engine.await_live(2):
        request.finish()
    rig.step(2, 0)
    engine.load_gate.shut()
    publishing = in_thread(lambda: rig.publish(1))
    engine.load_gate.await_reached()
    rig.worker.wake()
    rig.let_run()
    assert len(engine.requests) == 2  # version 1 allows two more, its weights are not there yet
    engine.load_gate.open()
    publishing()
    assert [request.versions for request in engine.await_requests(4)[2:]] == [[1], [1]]


def test_no_response_ends_while_the_weights_are_being_loaded(make_rig):
    rig = make_rig(dispatch=FixedSlots(1)).train()
    (request,) = rig.engine.await_live(1)
    rig.engine.load_gate.shut()
    publishing = in_thread(lambda: rig.publish(1))
    rig.engine.load_gate.await_reached()
    request.finish()
    rig.let_run()
    assert len(rig.pool) == 0
    rig.engine.load_gate.open()
    publishing()
    assert rig.draw(1, version=1)[0].trajectories[0].completed_at == 1


@pytest.mark.parametrize("kind", [EngineError, RuntimeError, TimeoutError])
def test_refused_weights_reach_the_publisher_and_the_engine_goes_on(make_rig, kind):
    rig = make_rig(dispatch=FixedSlots(2)).train()
    request, _ = rig.engine.await_live(2)
    rig.engine.load_error = error = kind("names differ")
    with pytest.raises(kind) as raised:
        rig.publish(1)
    assert raised.value.args == error.args  # asyncio makes a new TimeoutError
    assert not rig.engine.left_paused
    assert rig.engine.weights == []
    request.finish()
    assert len(rig.draw(1, version=1)) == 1
    rig.engine.await_requests(3)  # and dispatch is open again


def test_dispatch_goes_on_by_itself_after_a_failed_publication(make_rig):
    rig = make_rig(dispatch=AheadBound(eta=0, groups_per_step=1)).train()
    rig.engine.await_live(1)[0].finish()
    rig.step(1, 0)
    rig.engine.load_error = EngineError("names differ")
    with pytest.raises(EngineError):
        rig.publish(1)
    rig.engine.await_requests(2)  # version 1 allows one more, and nobody else wakes the worker


def test_a_publication_that_hangs_is_given_up_with_a_message_and_resumed(make_rig):
    rig = make_rig().train()
    rig.engine.load_gate.shut()
    with pytest.raises(RolloutTimeoutError, match=r"a publication took longer than 0.05 s.*alive"):
        rig.worker.publish(WEIGHTS, 1, timeout_seconds=0.05)
    rig.engine.until(lambda: not rig.engine.left_paused, "the engine was resumed")
    assert rig.worker.is_alive


def test_an_engine_that_dies_during_a_publication_fails_it_with_its_own_error(make_rig):
    error = EngineError("died while loading")
    rig = make_rig(dispatch=FixedSlots(1)).train()
    (request,) = rig.engine.await_live(1)
    rig.engine.load_gate.shut()
    publishing = in_thread(lambda: rig.publish(1))
    rig.engine.load_gate.await_reached()
    request.finish(error)
    with pytest.raises(EngineError) as raised:
        publishing()
    assert raised.value is error


def weights_of_version(version):
    return {"body": torch.full((3,), float(version)), "head": torch.full((2,), float(version))}


def test_a_publication_that_arrives_in_part_stops_everything_before_the_next_token(make_rig):
    rig = make_rig(dispatch=FixedSlots(3)).train()
    rig.worker.publish(weights_of_version(0), 0, timeout_seconds=DEADLINE_SECONDS)
    begun, *_ = rig.engine.await_live(3)
    rig.engine.lost = {"head"}
    rig.engine.verify_gate.shut()
    publishing = in_thread(
        lambda: rig.worker.publish(weights_of_version(1), 1, timeout_seconds=DEADLINE_SECONDS)
    )
    rig.engine.verify_gate.await_reached()
    begun.finish()  # in the pause: it must not be handed out under weights that nobody has verified
    rig.let_run()
    rig.engine.verify_gate.open()
    with pytest.raises(EngineError, match=r"\['head'\] of version 1 did not arrive") as raised:
        publishing()
    with pytest.raises(EngineError) as drawn:
        rig.draw(1, version=1)
    assert drawn.value is raised.value
    rig.await_thread_end()
    assert len(rig.pool) == 0
    assert not rig.engine.left_paused
    assert rig.engine.closed


def test_a_tensor_that_is_left_alone_and_is_right_anyway_is_no_fault(make_rig):
    rig = make_rig().start()
    rig.engine.lost = {"head"}  # the engine never held another one
    rig.worker.publish(weights_of_version(1), 1, timeout_seconds=DEADLINE_SECONDS)
    rig.worker.publish(
        weights_of_version(2) | {"head": weights_of_version(1)["head"]},
        2,
        timeout_seconds=DEADLINE_SECONDS,
    )
    assert [version for version, _ in rig.engine.weights] == [1, 2]


def test_a_verification_that_hangs_is_given_up_with_a_message_and_resumed(make_rig):
    rig = make_rig().train()
    rig.engine.verify_gate.shut()
    with pytest.raises(RolloutTimeoutError, match=r"a publication took longer than 0.05 s.*alive"):
        rig.worker.publish(WEIGHTS, 1, timeout_seconds=0.05)
    rig.engine.until(lambda: not rig.engine.left_paused, "the engine was resumed")


@pytest.mark.parametrize("moment", ["pause", "load", "verify"])
def test_an_engine_that_dies_in_a_publication_ends_the_worker_with_its_own_error(make_rig, moment):
    rig = make_rig(dispatch=FixedSlots(2)).train()
    rig.engine.await_live(2)
    gate = getattr(rig.engine, f"{moment}_gate").shut()
    publishing = in_thread(lambda: rig.publish(1))
    gate.await_reached()
    rig.engine.die(death := EngineError(f"killed in the {moment}"))
    gate.open()
    with pytest.raises(EngineError) as raised:
        publishing()
    assert raised.value is death
    with pytest.raises(EngineError) as drawn:
        rig.draw(1, version=1)
    assert drawn.value is death
    rig.await_thread_end()
    assert rig.engine.closed


def test_the_time_of_the_verification_is_told_apart(make_rig, monkeypatch):
    rig = make_rig().start()
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("pace_lightning.rollout.publication.time", clock)
    load, verify = rig.engine.load_weights, rig.engine.verify_weights

    async def load_for_two_seconds(weights, *, version):
        await load(weights, version=version)
        now[0] += 2.0

    async def verify_for_three_seconds():
        await verify()
        now[0] += 3.0

    rig.engine.load_weights, rig.engine.verify_weights = (
        load_for_two_seconds,
        verify_for_three_seconds,
    )
    report = rig.publish(1)
    assert (report.seconds, report.pause_seconds, report.verify_seconds) == (5.0, 5.0, 3.0)


def test_an_error_while_dispatching_fails_a_waiting_call_with_that_error(make_rig):
    rig = make_rig().start()
    error = KeyError("no such column")

    def lease():
        raise error

    rig.worker._lease = lease
    rig.engine.load_gate.shut()
    publishing = in_thread(lambda: rig.publish(1))
    rig.engine.load_gate.await_reached()
    rig.worker._dispatch_open = True  # else nothing is leased during a publication
    rig.worker.train()
    with pytest.raises(KeyError) as raised:
        publishing()
    assert raised.value is error


def test_an_answer_that_arrives_at_the_deadline_is_not_lost(make_rig, monkeypatch):
    """A wait for the answer may run out in the very moment in which the answer comes."""
    rig = make_rig().train()
    submit = asyncio.run_coroutine_threadsafe

    def late(coroutine, loop):
        future = submit(coroutine, loop)
        result = future.result

        def just_missed(timeout=None):
            answer = result(DEADLINE_SECONDS)
            if timeout is not None:
                raise TimeoutError
            return answer

        future.result = just_missed
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", late)
    assert rig.publish(1).version == 1


# --- evaluation ----------------------------------------------------------------------------------


def test_an_evaluation_runs_beside_training_rollouts_and_stops_new_ones(make_rig):
    rig = make_rig(dispatch=FixedSlots(2)).train()
    rig.publish(1)
    training = rig.engine.await_live(2)
    evaluating = in_thread(lambda: evaluate(rig))
    requests = rig.engine.await_live(5)[2:]
    assert {request.n for request in requests} == {3}
    assert {request.sampling for request in requests} == {Sampling(5, temperature=0.0)}
    training[0].finish()
    rig.engine.await_live(4)
    assert len(rig.draw(1, version=1)) == 1  # training rollouts in flight go on
    rig.let_run()
    assert len(rig.engine.requests) == 5  # but their slots stay empty
    for request in reversed(requests):
        request.finish()
    results = evaluating()
    assert [result.prompt.uid for result in results] == ["x", "y", "z"]  # in the order asked
    assert [result.scores for result in results] == [(1.0, 0.0, 0.0)] * 3
    tokens = scripted_tokens(make_prompt("y").token_ids, 1, 2)
    assert results[1].completions[2].token_ids == tuple(tokens)
    rig.engine.await_requests(6)  # dispatch goes on by itself
    assert rig.prompts.leased == ["0", "1", "2"]
    assert rig.worker.generated.groups == 1  # evaluation is not counted


def test_an_evaluation_works_before_and_after_training(make_rig):
    rig = make_rig(ScriptedEngine()).start()
    assert len(evaluate(rig)) == 3
    rig.worker.train()
    rig.step(2, 0)
    rig.worker.stop_training()
    count = len(rig.engine.requests)
    assert len(evaluate(rig)) == 3
    assert len(rig.engine.requests) == count + 3


def test_an_evaluation_that_cannot_be_scored_has_no_scores(make_rig):
    async def score(prompt, completions):
        if prompt.uid == "y":
            raise ScoringFailedError("no", Fate.SCORER_ERROR)
        return await score_mixed(prompt, completions)

    rig = make_rig(ScriptedEngine(), score=score).start()
    assert [bool(result.scores) for result in evaluate(rig)] == [True, False, True]
    assert rig.fates == {}


def test_an_error_in_an_evaluation_reaches_the_caller_and_training_goes_on(make_rig):
    rig = make_rig(ScriptedEngine({1: HOLD, 2: HOLD, 4: EngineError("no")}), dispatch=FixedSlots(2))
    first, second = rig.train().engine.await_live(2)
    rig.engine.default = HOLD
    evaluating = in_thread(lambda: evaluate(rig))
    rig.engine.await_requests(5)
    for request in (first, second):
        request.finish()
    with pytest.raises(EngineError, match="no"):
        evaluating()
    rig.step(2, 0)
    rig.engine.await_requests(7)
    siblings = [rig.engine.requests[2], rig.engine.requests[4]]
    assert all(request.cancelled for request in siblings)  # none is left to generate for nobody


def test_dispatch_goes_on_by_itself_after_a_failed_evaluation(make_rig):
    rig = make_rig(dispatch=FixedSlots(1)).train()
    rig.engine.await_live(1)[0].finish()
    rig.await_ready(1)
    evaluating = in_thread(lambda: evaluate(rig, uids="x"))
    (request,) = rig.engine.await_live(1)
    rig.step(1, 0)
    rig.let_run()
    assert len(rig.engine.requests) == 2
    request.finish(EngineError("no"))
    with pytest.raises(EngineError):
        evaluating()
    rig.engine.await_requests(3)


def test_an_evaluation_that_hangs_is_given_up_with_a_message(make_rig):
    rig = make_rig(ScriptedEngine(default=NEVER)).start()
    with pytest.raises(RolloutTimeoutError, match=r"an evaluation took longer than 0.05 s"):
        evaluate(rig, timeout_seconds=0.05)
    rig.engine.await_live(0)
    assert all(request.cancelled for request in rig.engine.requests)


# --- rounds --------------------------------------------------------------------------------------


def test_a_round_is_dispatched_whole_while_the_engine_is_paused(make_rig):
    rig = make_rig(in_rounds=True, dispatch=AheadBound(eta=0, groups_per_step=3)).train()
    requests = rig.engine.await_live(3)
    assert all(request.while_paused for request in requests)
    rig.engine.until(lambda: not rig.engine.left_paused, "the engine was resumed")
    assert rig.engine.num_pauses == 1


def test_a_round_is_completed_with_exactly_the_missing_groups_once_nothing_is_in_flight(make_rig):
    rig = make_rig(in_rounds=True, dispatch=AheadBound(eta=0, groups_per_step=4)).train()
    requests = rig.engine.await_live(4)
    requests[0].finish()
    requests[2].finish(RequestError("no"))
    requests[3].finish(RequestError("no"))
    rig.await_fate(Fate.FAILED, 2)
    rig.let_run()
    assert len(rig.engine.requests) == 4  # one is still in flight
    requests[1].finish()
    refill = rig.engine.await_requests(6)[4:]
    assert all(request.while_paused for request in refill)
    rig.let_run()
    assert len(rig.engine.requests) == 6
    for request in refill:
        request.finish()
    assert sorted(g.prompt.uid for g in rig.step(4, 0)) == ["0", "1", "4", "5"]
    rig.let_run()
    assert len(rig.engine.requests) == 6  # the next round belongs to version 1
    rig.publish(1)
    assert [request.versions for request in rig.engine.await_requests(10)[6:]] == [[1]] * 4


def test_a_round_is_counted_again_once_the_engine_has_paused(make_rig):
    """Training stops while a round waits for the engine's pause: nothing may be leased any more."""
    engine = ScriptedEngine(default=HOLD)
    engine.pause_gate.shut()
    rig = make_rig(engine, in_rounds=True, dispatch=AheadBound(eta=0, groups_per_step=2)).train()
    engine.pause_gate.await_reached()
    rig.worker.stop_training()
    engine.pause_gate.open()
    rig.let_run()
    assert rig.prompts.leased == []
    assert engine.requests == []


def test_no_round_begins_during_a_publication(make_rig):
    engine = ScriptedEngine(default=HOLD)
    rig = make_rig(engine, in_rounds=True, dispatch=AheadBound(eta=0, groups_per_step=1))
    engine.pause_gate.shut()
    rig.train()
    engine.pause_gate.await_reached()  # the round waits for the pause
    engine.pause_gate.reached.clear()
    engine.load_gate.shut()
    publishing = in_thread(lambda: rig.publish(1))
    engine.pause_gate.await_reached()  # so does the publication
    engine.pause_gate.open()  # now both get it
    engine.load_gate.await_reached()
    rig.let_run()
    assert engine.requests == []
    engine.load_gate.open()
    publishing()
    assert [request.versions for request in engine.await_requests(2)] == [[1], [1]]


# --- the end -------------------------------------------------------------------------------------


def test_the_end_of_the_data_closes_the_pool_once_all_groups_are_in(make_rig):
    rig = make_rig(prompts=[make_prompt(i) for i in range(5)], dispatch=FixedSlots(8)).train()
    requests = rig.engine.await_live(5)
    for request in requests[:4]:
        request.finish()
    rig.draw(4)
    drawing = in_thread(lambda: rig.draw(1))
    requests[4].finish()
    assert len(drawing()) == 1
    with pytest.raises(EndOfGroups):
        rig.draw(1)
    assert rig.worker.is_alive  # an evaluation may follow
    rig.engine.default = FINISH
    assert len(evaluate(rig)) == 3


def test_the_data_end_although_the_last_group_failed(make_rig):
    prompts = [make_prompt(i) for i in range(3)]
    rig = make_rig(ScriptedEngine({3: RequestError("no")}), prompts=prompts).train()
    rig.draw(2)
    with pytest.raises(EndOfGroups):
        rig.draw(1)


def test_stopping_leaves_what_is_in_flight_in_the_books(make_rig):
    rig = make_rig(dispatch=FixedSlots(3)).train()
    requests = rig.engine.await_live(3)
    requests[0].finish()
    rig.await_ready(1)
    rig.worker.stop_training()
    assert rig.fates == {}
    assert [rollout.uid for rollout in rig.worker.rollouts.present()] == ["1", "2"]
    assert [request.cancelled for request in requests] == [False, True, True]
    assert rig.worker.num_in_flight == 0
    rig.worker.wake()
    rig.let_run()
    assert len(rig.engine.requests) == 3
    assert [group.prompt.uid for group in rig.pool.drain()] == ["0"]


def test_what_is_being_scored_at_the_end_is_settled_with_its_tokens(make_rig):
    reached = threading.Event()

    async def score(prompt, completions):
        reached.set()
        await asyncio.get_running_loop().create_future()

    rig = make_rig(ScriptedEngine(), score=score, dispatch=FixedSlots(1)).train()
    assert reached.wait(DEADLINE_SECONDS)
    rig.end()
    assert rig.fates == {"0": Fate.UNUSED}
    assert rig.ledger.tokens() == {"unused": 4}
    assert rig.worker.num_tokens_generated == 4


def test_a_draw_that_times_out_says_what_the_rollout_thread_was_doing(make_rig):
    rig = make_rig(ScriptedEngine({2: RequestError("cache is full")}, default=HOLD)).train()
    rig.engine.await_requests(5)
    with pytest.raises(DrawTimeoutError) as raised:
        rig.draw(1, timeout_seconds=0)
    message = str(raised.value)
    assert "rollout thread alive at version 0, 4 groups in flight" in message
    assert "prompt 1 failed: cache is full" in message
    assert "scripted engine with 4 live requests" in message


# --- closing -------------------------------------------------------------------------------------


def close_within(rig, seconds=5.0):
    start = time.monotonic()
    rig.worker.close()
    rig.worker.close()
    assert time.monotonic() - start < seconds
    assert not rig.worker.is_alive


def test_closing_before_the_start_does_nothing(make_rig):
    rig = make_rig()
    close_within(rig)
    assert rig.engine.num_closes == 0


def idle(rig):
    rig.start()


def in_flight(rig):
    rig.train().engine.await_live(4)


def with_groups_ready(rig):
    rig.engine.default = FINISH
    rig.train().await_ready(4)


def after_the_data_ended(rig):
    rig.prompts = ListPrompts([])
    rig.train().let_run()


def after_an_error(rig):
    rig.engine.script = {1: EngineError("dead")}
    rig.train().await_thread_end()


def after_stopping(rig):
    rig.train().engine.await_live(4)
    rig.worker.stop_training()


@pytest.mark.parametrize(
    "state",
    [idle, in_flight, with_groups_ready, after_the_data_ended, after_an_error, after_stopping],
)
def test_closing_is_quick_and_complete_in_every_state(make_rig, state):
    rig = make_rig()
    state(rig)
    close_within(rig)
    assert rig.engine.closed
    assert rig.engine.num_closes == 1
    assert rig.engine.live == []


def test_closing_during_a_publication_frees_the_publisher(make_rig):
    rig = make_rig().train()
    rig.engine.load_gate.shut()
    publishing = in_thread(lambda: rig.publish(1))
    rig.engine.load_gate.await_reached()
    close_within(rig)
    with pytest.raises(RuntimeError, match=r"closed|ended"):
        publishing()
    assert not rig.engine.left_paused


def test_closing_wakes_a_waiting_draw(make_rig):
    rig = make_rig().train()
    drawing = in_thread(lambda: rig.draw(1))
    close_within(rig)
    with pytest.raises(RuntimeError, match="the rollout thread has ended"):
        drawing()


def test_an_engine_that_never_becomes_ready_is_named_with_its_setting(make_rig):
    rig = make_rig()
    rig.engine.start_gate.shut()
    message = r"not ready after 0.05 s \(engine.startup_timeout_seconds\): scripted engine"
    with pytest.raises(RolloutTimeoutError, match=message):
        rig.worker.start(timeout_seconds=0.05)
    close_within(rig)


def test_closing_right_after_the_start_finds_a_thread_that_has_not_begun(make_rig):
    rig = make_rig()
    begin, run = threading.Event(), rig.worker._run
    rig.engine.start_gate.shut()

    def slow_run():
        begin.wait(DEADLINE_SECONDS)
        run()

    rig.worker._run = slow_run
    with pytest.raises(RolloutTimeoutError):
        rig.worker.start(timeout_seconds=0)
    closing = close_in_thread(rig)
    begin.set()
    closing()
    assert not rig.worker.is_alive


def test_an_engine_that_cannot_start_raises_its_own_error_and_is_closed(make_rig):
    rig = make_rig()
    rig.engine.start_error = error = EngineError("no such model")
    with pytest.raises(EngineError) as raised:
        rig.start()
    assert raised.value is error
    rig.await_thread_end()
    assert rig.engine.closed
    with pytest.raises(EngineError):
        rig.draw(1)


def test_starting_twice_starts_once(make_rig):
    rig = make_rig().start()
    thread = rig.worker._thread
    rig.start()
    assert rig.worker._thread is thread


def test_a_closed_worker_cannot_be_started_again(make_rig):
    rig = make_rig().start()
    rig.worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        rig.start()


@pytest.mark.parametrize(
    "call",
    [
        lambda rig: rig.worker.train(),
        lambda rig: rig.worker.stop_training(),
        lambda rig: rig.worker.advance(1),
        lambda rig: rig.publish(1),
        evaluate,
    ],
)
def test_a_call_to_a_worker_that_does_not_run_is_refused_at_once(make_rig, call):
    rig = make_rig()
    with pytest.raises(RuntimeError, match="not running"):
        call(rig)
    rig.start()
    rig.worker.close()
    with pytest.raises(RuntimeError, match="not running"):
        call(rig)


def test_waking_a_worker_from_another_thread_does_nothing_before_the_start_or_after_the_end(
    make_rig,
):
    rig = make_rig()
    in_thread(rig.worker.wake)()
    rig.start()
    rig.worker.close()
    in_thread(rig.worker.wake)()
    assert rig.engine.requests == []


def test_what_blocks_the_event_loop_is_measured_once(make_rig):
    rig = make_rig().start()
    rig.worker.take_lag()
    rig.worker._loop.call_soon_threadsafe(time.sleep, 0.7)
    time.sleep(1.5)
    assert rig.worker.take_lag() == pytest.approx(0.6, abs=0.3)
    assert rig.worker.take_lag() < 0.3


def test_the_engine_gets_the_cores_of_a_waiting_trainer_and_gives_them_back(make_rig):
    rig = make_rig()
    seen = []

    def fail():
        with rig.worker.waiting_trainer(4):
            seen.append(rig.engine.num_threads)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [4]
    assert rig.engine.num_threads == 1
    with rig.worker.waiting_trainer(None):
        assert rig.engine.num_threads == 1
    rig.engine.num_threads = None
    with rig.worker.waiting_trainer(4):
        assert rig.engine.num_threads is None


# --- all of it at once ---------------------------------------------------------------------------


class Schedule:
    """One run in which a seed decides what happens next."""

    def __init__(self, seed):
        self.random = rng = random.Random(seed)
        self.batch = rng.randint(1, 3)
        self.version = 0
        self.drawn = []
        num_prompts = rng.choice([None, rng.randint(0, 12)])
        prompts = None if num_prompts is None else [make_prompt(i) for i in range(num_prompts)]
        eta = rng.randint(0, 2)
        dispatch = rng.choice(
            [FixedSlots(self.batch + rng.randint(0, 3)), AheadBound(eta, self.batch)]
        )
        self.rig = Rig(
            ScriptedEngine(default=HOLD),
            prompts=prompts,
            score=self.score,
            dispatch=dispatch,
            policy=rng.choice([AdmitAll(), MaxLag(eta)]),
            in_rounds=rng.random() < 0.3,
            max_empty_groups=1000,
            max_failed_groups=1000,
        )

    async def score(self, prompt, completions):
        kind = int(prompt.uid) % 5
        if kind == 0:
            raise ScoringFailedError("no", Fate.SCORER_ERROR)
        return [float(kind != 1 and index == 0) for index, _ in enumerate(completions)]

    def run(self):
        rig, rng = self.rig, self.random
        rig.train()
        moves = [self.end_one] * 6 + [self.draw] * 3 + [self.publish, self.advance, rig.let_run]
        try:
            for _ in range(rng.randint(5, 40)):
                rng.choice(moves)()
            if rng.random() < 0.7:
                rig.end()
                assert rig.ledger.num_pending == 0
                assert sum(rig.ledger.tokens().values()) == rig.worker.num_tokens_generated
        finally:
            rig.worker.close()
        self.check()

    def end_one(self):
        live = list(self.rig.engine.live)
        if live:
            how = self.random.choices(
                [FINISH, NAN, RequestError("no"), TimeoutError()], weights=[7, 1, 1, 1]
            )[0]
            self.random.choice(live).finish(how)

    def draw(self):
        try:
            groups = self.rig.step(self.batch, self.version, timeout_seconds=0)
        except (DrawTimeoutError, EndOfGroups):
            return
        self.drawn += [group.prompt.uid for group in groups]
        self.version += 1
        self.publish() if self.random.random() < 0.8 else self.advance()

    def publish(self):
        self.rig.publish(self.version)

    def advance(self):
        self.rig.worker.advance(self.version)

    def check(self):
        rig = self.rig
        ready = [group.prompt.uid for group in rig.pool.drain()]
        rig.ledger.check()
        counts = rig.ledger.groups()
        assert sum(counts.values()) == len(rig.prompts.leased)
        assert counts.get("pending", 0) >= len(ready)
        assert rig.settled_twice == []
        assert len(set(self.drawn)) == len(self.drawn) == counts.get("trained", 0)
        assert not {uid for uid in self.drawn if int(uid) % 5 in (0, 1)}
        assert not rig.worker.is_alive
        assert rig.engine.live == []
        assert not rig.engine.left_paused
        with pytest.raises(RuntimeError, match="the rollout thread has ended"):
            rig.draw(1)  # no error of its own before


def check_schedules(count):
    first = random.randrange(10**9)
    before = set(threading.enumerate())
    for seed in range(first, first + count):
        try:
            Schedule(seed).run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert [thread for thread in threading.enumerate() if thread not in before] == []


@pytest.mark.parametrize(
    "count", [300, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_every_prompt_ends_once_whatever_happens_in_whatever_order(count):
    check_schedules(count)
