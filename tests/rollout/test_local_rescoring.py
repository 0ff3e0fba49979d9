"""Re-scoring of unfinished responses: the numbers are those of the new weights, and nearly free."""

import asyncio
import random
from types import SimpleNamespace

import pytest
import torch
from local_engines import (
    NEVER,
    PROMPT,
    make_policy,
    paused_at,
    publish,
    trainer_logprobs,
    until,
    with_engine,
)

from pace_lightning.core.pace import rescore
from pace_lightning.rollout import local_rescoring
from pace_lightning.rollout.engine import PartialResponse, RequestError, Sampling
from pace_lightning.rollout.local_requests import Request, Submission
from pace_lightning.rollout.local_rescoring import PrefillScorer


async def publish_and_rescore(engine, policy, version):
    """What the worker does while the engine is paused, for PACE."""
    await publish(engine, policy, version)
    await engine.rescore_prefixes()


def expected_event(policy, version, prompt, completion, temperature=1.0):
    """The re-scoring of what existed when a version was published, from the trainer's log-probs."""
    existed = sum(v < version for v in completion.versions)
    new = trainer_logprobs(policy, prompt, completion, temperature)[:existed]
    return rescore(completion.logprobs[:existed], new.clamp(max=0.0).tolist())


def publications_met(completion):
    """Versions whose weights went on with a response; a prefill cut off by the next is not one."""
    return sorted(set(completion.versions))[1:]


def assert_events(actual, expected):
    """Equal up to float32 rounding, and not by being zero."""
    assert [event.num_tokens for event in actual] == [event.num_tokens for event in expected]
    for one, other in zip(actual, expected, strict=True):
        for name in ("absolute", "drop", "signed"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-3)
        assert one.absolute > 0.1  # other weights, other log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
@pytest.mark.parametrize("max_batch_tokens", [512, 10], ids=["whole", "split"])
def test_prefixes_are_rescored_under_the_weights_of_each_publication(
    temperature, recompute, max_batch_tokens
):
    policies = {version: make_policy(version) for version in range(3)}
    prompts = [PROMPT, PROMPT[:1], PROMPT * 3]  # one that cannot be forked; one that is split

    async def scenario(engine, steps):
        steps.hold_at(14)
        tasks = [
            asyncio.ensure_future(engine.generate(prompt, n=3, sampling=Sampling(40, temperature)))
            for prompt in prompts
        ]
        for version, hold_after in ((1, 40), (2, None)):
            async with paused_at(engine, steps, hold_after and steps.count + hold_after):
                await publish_and_rescore(engine, policies[version], version)
        results = await asyncio.gather(*tasks)
        assert engine.rescore_seconds > 0
        return results

    results = with_engine(
        scenario,
        policy=policies[0],
        stop_token_ids=[NEVER],
        temperatures=[temperature],
        recompute_cache=recompute,
        max_batch_tokens=max_batch_tokens,
    )
    events = 0
    for prompt, completions in zip(prompts, results, strict=True):
        for completion in completions:
            met = publications_met(completion)
            expected = [
                expected_event(policies[v], v, prompt, completion, temperature) for v in met
            ]
            assert_events(completion.rescores, expected)
            events += len(met)
    assert events > 9


def test_requests_of_several_temperatures_share_a_prefill():
    policies = [make_policy(0), make_policy(1)]
    temperatures = (0.7, 1.0, 1.3)

    async def scenario(engine, steps):
        steps.hold_at(8)
        tasks = [
            asyncio.ensure_future(engine.generate(PROMPT, n=2, sampling=Sampling(20, t)))
            for t in temperatures
        ]
        async with paused_at(engine, steps):
            await publish_and_rescore(engine, policies[1], 1)
        return await asyncio.gather(*tasks)

    results = with_engine(
        scenario, policy=policies[0], temperatures=temperatures, stop_token_ids=[NEVER]
    )
    for temperature, completions in zip(temperatures, results, strict=True):
        for completion in completions:
            expected = expected_event(policies[1], 1, PROMPT, completion, temperature)
            assert_events(completion.rescores, [expected])


def test_of_two_publications_in_one_pause_the_last_one_counts():
    policies = [make_policy(0), make_policy(1), make_policy(2)]

    async def scenario(engine, steps):
        steps.hold_at(8)
        task = asyncio.ensure_future(engine.generate(PROMPT, n=3, sampling=Sampling(20)))
        async with paused_at(engine, steps):
            await publish_and_rescore(engine, policies[1], 1)
            await publish_and_rescore(engine, policies[2], 2)
        return await task

    for completion in with_engine(scenario, policy=policies[0], stop_token_ids=[NEVER]):
        assert set(completion.versions) == {0, 2}
        assert_events(completion.rescores, [expected_event(policies[2], 2, PROMPT, completion)])


def test_rescoring_runs_no_forward_pass_of_its_own_and_says_what_it_took():
    policies = [make_policy(0), make_policy(1)]

    async def scenario(engine, steps, *, rescoring):
        steps.hold_at(8)
        task = asyncio.ensure_future(engine.generate(PROMPT, n=3, sampling=Sampling(20)))
        async with paused_at(engine, steps):
            await publish(engine, policies[1], 1)
            assert engine.rescore_seconds == 0
            if rescoring:
                await engine.rescore_prefixes()
        completions = await task
        assert all(bool(completion.rescores) == rescoring for completion in completions)
        return steps.count, engine.rescore_seconds

    (with_it, seconds), (without, none) = (
        with_engine(
            lambda engine, steps, on=on: scenario(engine, steps, rescoring=on),
            policy=policies[0],
            stop_token_ids=[NEVER],
        )
        for on in (True, False)
    )
    assert with_it == without
    assert seconds > none == 0


def test_vocabulary_rows_are_computed_in_parts(monkeypatch):
    policies = [make_policy(0), make_policy(1)]
    monkeypatch.setattr(local_rescoring, "ROWS_AT_ONCE", 5)

    async def scenario(engine, steps):
        steps.hold_at(9)
        task = asyncio.ensure_future(engine.generate(PROMPT, n=3, sampling=Sampling(20)))
        async with paused_at(engine, steps):
            await publish_and_rescore(engine, policies[1], 1)
        return await task

    for completion in with_engine(scenario, policy=policies[0], stop_token_ids=[NEVER]):
        assert_events(completion.rescores, [expected_event(policies[1], 1, PROMPT, completion)])


def test_a_prefill_that_begins_again_is_scored_once_from_its_beginning():
    # what continuous batching does with a sequence that it had to evict in the middle
    policy, step = make_policy(0), SimpleNamespace(state=SimpleNamespace(request_id="a"))
    tokens = [9, 4, 7, 7, 3]
    response = PartialResponse(tokens, [-1.0, -2.0, -0.5, -3.0, -0.25], [0] * 5)
    ids = {"a": Submission(response, offset=5)}
    request = Request(PROMPT, Sampling(20), [response], finished=None, ids=ids)
    scorer = PrefillScorer(policy, lambda: [step])
    scorer.expect(request, "a")
    assert response.unscored
    whole = [*PROMPT, *tokens]
    for length in (len(PROMPT) + 3, len(whole)):
        step.state.position_offset = step.query_length = length
        policy(input_ids=torch.tensor([whole[:length]]))
        assert scorer.is_expecting("a") == (length < len(whole))
    policy(input_ids=torch.tensor([whole]))  # once more, when its tokens are evicted again
    new = trainer_logprobs(policy, PROMPT, SimpleNamespace(token_ids=tokens))
    assert_events(response.rescores, [rescore(response.logprobs, new.tolist())])
    assert not response.unscored


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_tight_cache_with_publications_and_cancellations_keeps_every_score_true(seed):
    rng = random.Random(seed)
    policies = {version: make_policy(seed=version) for version in range(4)}
    prompts = [[rng.randrange(3, 100) for _ in range(rng.randint(1, 40))] for _ in range(6)]

    async def scenario(engine, steps):
        steps.hold_at(rng.randint(8, 20))
        tasks = [
            asyncio.ensure_future(engine.generate(prompt, n=4, sampling=Sampling(60)))
            for prompt in prompts
        ]
        for version in (1, 2, 3):
            await until(lambda: steps.is_held or all(task.done() for task in tasks), "a held step")
            if not steps.is_held:
                break
            if rng.random() < 0.5:
                rng.choice(tasks).cancel()
            next_hold = steps.count + rng.randint(3, 60) if version < 3 else None
            async with paused_at(engine, steps, next_hold):
                await publish_and_rescore(engine, policies[version], version)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert engine._prefills._expected == {}
        return results

    results = with_engine(
        scenario,
        policy=policies[0],
        cache_tokens=8 * 32,
        max_batch_tokens=24,
        max_running=6,
        stop_token_ids=list(range(2, 100, 25)),
        seed=seed,
    )
    num_events = 0
    for prompt, completions in zip(prompts, results, strict=True):
        if isinstance(completions, asyncio.CancelledError):
            continue
        for completion in completions:
            met = publications_met(completion)
            expected = [expected_event(policies[v], v, prompt, completion) for v in met]
            assert_events(completion.rescores, expected)
            num_events += len(met)
    assert num_events > 3


def test_a_log_prob_that_is_not_a_number_fails_its_request_only():
    policies = [make_policy(0), make_policy(1)]

    async def scenario(engine, steps):
        steps.hold_at(8)
        broken, sound = (
            asyncio.ensure_future(engine.generate(prompt, n=3, sampling=Sampling(20)))
            for prompt in (PROMPT, PROMPT[:3])
        )
        async with paused_at(engine, steps):
            engine._requests[0].responses[1].logprobs[2] = float("nan")
            await publish_and_rescore(engine, policies[1], 1)
        with pytest.raises(RequestError, match="log-prob of a prefix token is \\[nan\\]"):
            await broken
        return await sound

    completions = with_engine(scenario, policy=policies[0], stop_token_ids=[NEVER])
    assert [len(completion.rescores) for completion in completions] == [1, 1, 1]


def test_a_prefix_that_was_not_scored_fails_its_request_instead_of_counting_as_unchanged():
    policies = [make_policy(0), make_policy(1)]

    async def scenario(engine, steps):
        steps.hold_at(8)
        task = asyncio.ensure_future(engine.generate(PROMPT, n=3, sampling=Sampling(20)))
        async with paused_at(engine, steps):
            engine._prefills._batch = list  # what a change inside continuous batching might do
            await publish_and_rescore(engine, policies[1], 1)
        with pytest.raises(RequestError, match="before its prefix had been re-scored"):
            await task

    with_engine(scenario, policy=policies[0], stop_token_ids=[NEVER])


def test_a_response_that_met_no_publication_has_no_rescoring():
    async def scenario(engine, steps):
        return await engine.generate(PROMPT, n=2, sampling=Sampling(3))

    assert all(completion.rescores == () for completion in with_engine(scenario))
