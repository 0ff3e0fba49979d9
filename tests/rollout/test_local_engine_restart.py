"""The real local engine ends, begins again, and gives up what is finished."""

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

from pace_lightning.rollout.engine import EngineError, Sampling
from pace_lightning.rollout.supervision import Patience, Supervisor

pytestmark = pytest.mark.timeout(120)


def test_a_cancelled_request_gives_up_the_responses_that_are_finished():
    async def scenario(engine, steps):
        finished = []
        task = asyncio.ensure_future(
            engine.generate(PROMPT, n=8, sampling=Sampling(100), finished=finished)
        )
        await until(lambda: engine._requests and engine._requests[0].completions, "a response")
        there = list(engine._requests[0].completions)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return there, finished

    stop = list(range(10))  # of 100 tokens, so that a response ends after about ten
    there, finished = with_engine(scenario, stop_token_ids=stop)
    assert there == finished
    assert 1 <= len(finished) < 8


def test_a_request_that_returns_adds_nothing():
    async def scenario(engine, steps):
        finished = []
        result = await engine.generate(PROMPT, n=2, sampling=Sampling(3), finished=finished)
        return result, finished

    result, finished = with_engine(scenario)
    assert (len(result), finished) == (2, [])


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
