"""The real local engine ends, begins again, and goes on with what has come of its responses."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from local_engines import (
    CLOSE,
    NEVER,
    PROMPT,
    assert_well_formed,
    expected_logprobs,
    make_policy,
    publish,
    until,
    with_engine,
)

from pace_lightning.core.pace import rescore
from pace_lightning.rollout.engine import EngineError, PartialResponse, Sampling
from pace_lightning.rollout.supervision import Patience, Supervisor

pytestmark = pytest.mark.timeout(120)


def whole(response):
    """A response without the time at which it ended: tokens, log-probs, versions."""
    return tuple(response.token_ids), tuple(response.logprobs), tuple(response.versions)


def test_what_arrived_belongs_to_the_caller_and_a_second_request_goes_on_from_it():
    policy = make_policy()

    async def scenario(engine, steps):
        responses = []
        task = asyncio.ensure_future(
            engine.generate(PROMPT, n=8, sampling=Sampling(60), responses=responses)
        )
        await until(lambda: any(r.is_finished for r in responses), "a response")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        there = [whole(response) for response in responses]
        finished = [response.is_finished for response in responses]
        tokens = engine.num_tokens_generated
        engine.test_clock[0] = 5
        again = await engine.generate(PROMPT, n=8, sampling=Sampling(60), responses=responses)
        assert again == [response.completion() for response in responses]
        return there, finished, again, engine.num_tokens_generated - tokens

    stop = list(range(10))  # of 100 tokens, so that a response ends after about ten
    there, finished, completions, new = with_engine(scenario, policy=policy, stop_token_ids=stop)
    assert 1 <= sum(finished) < 8
    assert any(tokens and not done for (tokens, _, _), done in zip(there, finished, strict=True))
    for (tokens, logprobs, versions), done, completion in zip(
        there, finished, completions, strict=True
    ):
        assert completion.token_ids[: len(tokens)] == tokens
        assert completion.logprobs[: len(tokens)] == logprobs
        assert completion.versions[: len(tokens)] == versions
        assert (len(completion.token_ids) == len(tokens)) == done
        assert completion.completed_at == (0 if done else 5)
        assert not set(completion.token_ids[:-1]) & set(stop)
        assert completion.token_ids[-1] in stop or len(completion.token_ids) == 60
        expected = expected_logprobs({0: policy}, PROMPT, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
    sampled = sum(len(c.token_ids) - len(t[0]) for c, t in zip(completions, there, strict=True))
    assert new == sampled, "only what was missing was sampled"


def test_responses_of_different_lengths_go_on_within_what_is_left_of_their_budget():
    policy = make_policy()

    def some(count):
        return PartialResponse([11] * count, [-1.0] * count, [0] * count)

    async def scenario(engine, steps):
        responses = [some(5), some(0), some(11)]
        return await engine.generate(PROMPT, n=4, sampling=Sampling(12), responses=responses)

    completions = with_engine(scenario, policy=policy, stop_token_ids=[NEVER])
    assert [len(c.token_ids) for c in completions] == [12] * 4
    assert all(c.truncated for c in completions)
    for completion, kept in zip(completions, (5, 0, 11, 0), strict=True):
        assert completion.logprobs[:kept] == (-1.0,) * kept
        expected = expected_logprobs({0: policy}, PROMPT, completion)[kept:]
        torch.testing.assert_close(torch.tensor(completion.logprobs[kept:]), expected, **CLOSE)


def test_a_response_that_was_to_be_rescored_is_rescored_when_it_goes_on():
    policy = make_policy()
    logprobs = [-1.0, -2.0, -0.5]

    async def scenario(engine, steps):
        responses = [PartialResponse([9, 4, 7], list(logprobs), [0] * 3, unscored=True)]
        return await engine.generate(PROMPT, n=2, sampling=Sampling(6), responses=responses)

    first, second = with_engine(scenario, policy=policy, stop_token_ids=[NEVER])
    new = expected_logprobs({0: policy}, PROMPT, first)[:3].tolist()
    (event,), expected = first.rescores, rescore(logprobs, new)
    assert event.num_tokens == 3
    assert event.absolute == pytest.approx(expected.absolute, abs=1e-4)
    assert second.rescores == ()


def test_a_restarted_engine_does_not_sample_what_it_sampled_before():
    async def scenario(engine, steps):
        async def sample():
            completions = await engine.generate(PROMPT, n=4, sampling=Sampling(20))
            return [completion.token_ids for completion in completions]

        first = await sample()
        await engine.close()
        await engine.start(lambda: 0)
        return first, await sample()

    settings = {"stop_token_ids": [NEVER], "seed": 3}
    first, second = with_engine(scenario, **settings)
    assert first != second
    assert with_engine(scenario, **settings) == (first, second)


def test_closing_fails_what_generates_at_once():
    async def scenario(engine, steps):
        task = asyncio.ensure_future(engine.generate(PROMPT, n=2, sampling=Sampling(100)))
        await until(lambda: steps.count > 3, "a few steps")
        manager, stop = engine._manager, engine._manager.stop
        manager.stop = lambda **_: None  # one that does not end in time
        await engine.close()
        async with asyncio.timeout(0.5):  # sooner than a look after its health
            with pytest.raises(EngineError, match="closed"):
                await task
        await asyncio.to_thread(stop, block=True, timeout=10.0, hard_stop=True)

    with_engine(scenario, stop_token_ids=[NEVER])


def test_a_generation_loop_that_crashes_is_restarted_with_its_weights_version_and_requests():
    new = make_policy(seed=1)
    before = set(threading.enumerate())

    async def scenario(engine, steps):
        supervisor = Supervisor(engine, Patience(max_restarts=1), group_timeout_seconds=60)
        supervisor._clock = lambda: engine.test_clock[0]
        async with engine.paused():
            await publish(engine, new, 3)
        steps.crash_at = steps.count + 6
        asked = [supervisor.generate(PROMPT, n=4, sampling=Sampling(12)) for _ in range(3)]
        return await asyncio.gather(*asked), supervisor.incidents

    groups, incidents = with_engine(scenario)
    assert incidents.engine_restarts == 1
    for group in groups:
        assert len(group) == 4
        for completion in group:
            assert_well_formed(completion, 12)
            assert set(completion.versions) == {3}
            assert completion.completed_at == 3
            expected = expected_logprobs({3: new}, PROMPT, completion)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]
    assert [name for name in left if not name.startswith("asyncio")] == []


def test_weights_can_be_published_to_a_restarted_engine():
    new = make_policy(seed=1)

    async def scenario(engine, steps):
        await engine.close()
        await engine.start(lambda: engine.test_clock[0])
        task = asyncio.ensure_future(engine.generate(PROMPT, n=2, sampling=Sampling(60)))
        await until(lambda: engine.num_tokens_generated > 6, "a few tokens")
        async with engine.paused():
            await publish(engine, new, 1)
        return await task

    policies = {0: make_policy(), 1: new}
    for completion in with_engine(scenario, policy=policies[0], stop_token_ids=[NEVER]):
        assert list(dict.fromkeys(completion.versions)) == [0, 1]
        expected = expected_logprobs(policies, PROMPT, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
