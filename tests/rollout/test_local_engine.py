"""The local engine with real continuous batching: what it says about each token is true.

The generation thread is held at chosen steps by a hook on the model, so that publications,
cancellations and crashes fall where a test wants them. Nothing depends on how fast anything is.
"""

import asyncio
import random
import threading

import pytest
import torch
from local_engines import (
    CLOSE,
    NEVER,
    PROMPT,
    STOP,
    assert_well_formed,
    expected_logprobs,
    make_policy,
    pause_requested,
    paused_at,
    publish,
    trainer_logprobs,
    until,
    weights_of,
    with_engine,
)

from pace_lightning.rollout.engine import EngineError, RequestError, Sampling
from pace_lightning.rollout.local_engine import LocalEngine
from pace_lightning.training.policy import copy_for_engine

# --- log-probs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("n", [1, 8])
def test_behavior_log_probs_are_the_trainers_own(n, temperature):
    policy = make_policy()
    prompts = [PROMPT, PROMPT[:2], list(range(3, 60))]

    async def scenario(engine, _):
        requests = [
            engine.generate(prompt, n=n, sampling=Sampling(40, temperature)) for prompt in prompts
        ]
        return await asyncio.gather(*requests)

    results = with_engine(scenario, policy=policy, temperatures=(temperature,), max_batch_tokens=32)
    for prompt, completions in zip(prompts, results, strict=True):
        assert len(completions) == n
        assert len({completion.token_ids for completion in completions}) == n
        for completion in completions:
            assert_well_formed(completion, 40)
            expected = trainer_logprobs(policy, prompt, completion, temperature)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)


def test_requests_of_different_temperatures_share_a_batch():
    policy = make_policy()
    temperatures = (0.7, 1.0, 1.3)

    async def scenario(engine, _):
        return await asyncio.gather(
            *(engine.generate(PROMPT, n=4, sampling=Sampling(24, t)) for t in temperatures)
        )

    results = with_engine(scenario, policy=policy, temperatures=temperatures)
    for temperature, completions in zip(temperatures, results, strict=True):
        for completion in completions:
            expected = trainer_logprobs(policy, PROMPT, completion, temperature)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)


@pytest.mark.parametrize("n", [1, 8])
def test_a_prompt_of_one_token_is_served(n):
    policy = make_policy()

    async def scenario(engine, _):
        return await engine.generate([5], n=n, sampling=Sampling(12))

    for completion in with_engine(scenario, policy=policy):
        assert_well_formed(completion, 12)
        expected = trainer_logprobs(policy, [5], completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)


def test_temperature_zero_is_greedy_also_beside_sampled_requests():
    policy = make_policy()

    async def scenario(engine, _):
        greedy, _ = await asyncio.gather(
            engine.generate(PROMPT, n=3, sampling=Sampling(24, 0.0)),
            engine.generate(PROMPT, n=3, sampling=Sampling(24, 1.0)),
        )
        return greedy

    greedy = with_engine(scenario, policy=policy, temperatures=(1.0, 0.0), stop_token_ids=[NEVER])
    tokens = list(PROMPT)
    for _ in range(24):
        with torch.no_grad():
            tokens.append(int(policy(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert {completion.token_ids for completion in greedy} == {tuple(tokens[len(PROMPT) :])}
    assert all(abs(logprob) < 1e-6 for c in greedy for logprob in c.logprobs)


def test_a_cache_too_small_for_all_still_completes_all_with_true_log_probs():
    policy = make_policy()
    prompts = [PROMPT, PROMPT[::-1], PROMPT[:3]]

    async def scenario(engine, _):
        requests = [engine.generate(prompt, n=4, sampling=Sampling(90)) for prompt in prompts]
        return await asyncio.gather(*requests)

    # one sequence of full length has 5 pages of 32 tokens; all twelve would need 48
    results = with_engine(
        scenario,
        policy=policy,
        cache_tokens=7 * 32,
        temperatures=(0.7, 1.0),
        stop_token_ids=[NEVER],
    )
    for prompt, completions in zip(prompts, results, strict=True):
        assert len(completions) == 4
        for completion in completions:
            assert len(completion.token_ids) == len(completion.versions) == 90
            expected = trainer_logprobs(policy, prompt, completion)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)


def test_a_cache_that_cannot_hold_one_sequence_is_refused():
    with pytest.raises(ValueError, match="cannot hold one sequence of 128 tokens"):
        LocalEngine(
            make_policy(),
            stop_token_ids=[STOP],
            pad_token_id=0,
            max_sequence_tokens=128,
            cache_tokens=96,
        )


@pytest.mark.slow
def test_the_same_seed_and_the_same_requests_sample_the_same_tokens():
    async def scenario(engine, steps):
        async with engine.paused():
            requests = [
                asyncio.ensure_future(engine.generate(prompt, n=4, sampling=Sampling(30)))
                for prompt in (PROMPT, PROMPT[:4])
            ]
            await asyncio.sleep(0)  # each of them submits
        return await asyncio.gather(*requests)

    first, again, other = (with_engine(scenario, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other


# --- publications ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
def test_publications_in_the_middle_of_generation(recompute, temperature):
    policies = {version: make_policy(seed=version) for version in range(3)}
    sampling = Sampling(48, temperature)

    async def scenario(engine, steps):
        steps.hold_at(10)
        requests = [
            asyncio.ensure_future(engine.generate(PROMPT, n=8, sampling=sampling)),
            asyncio.ensure_future(engine.generate(PROMPT[:3], n=1, sampling=sampling)),
        ]
        for version, next_hold in ((1, 24), (2, None)):
            async with paused_at(engine, steps, next_hold):
                await publish(engine, policies[version], version)
        results = await asyncio.gather(*requests)
        return results, engine.num_tokens_generated

    results, num_tokens = with_engine(
        scenario,
        policy=policies[0],
        recompute_cache=recompute,
        temperatures=(temperature,),
        stop_token_ids=[NEVER],
    )
    assert [len(completions) for completions in results] == [8, 1]
    everything = [completion for completions in results for completion in completions]
    assert num_tokens == sum(len(completion.token_ids) for completion in everything) == 9 * 48
    largest = 0.0
    for prompt, completions in zip((PROMPT, PROMPT[:3]), results, strict=True):
        for completion in completions:
            assert list(completion.versions) == sorted(completion.versions)
            assert set(completion.versions) == {0, 1, 2}
            assert completion.completed_at == 2
            assert completion.truncated
            expected = expected_logprobs(policies, prompt, completion, temperature)
            actual = torch.tensor(completion.logprobs)
            if recompute:
                torch.testing.assert_close(actual, expected, **CLOSE)
                continue
            first = completion.versions.count(0)
            torch.testing.assert_close(actual[:first], expected[:first], **CLOSE)
            largest = max(largest, float((actual - expected)[first:].abs().max()))
    if not recompute:
        assert largest > 1e-2, "keys and values of the old weights made no difference"


def test_responses_that_end_around_a_publication_are_neither_lost_nor_extended():
    # ten stop tokens: some responses end before the publication, some after it, some by length
    policies = {version: make_policy(seed=version) for version in range(2)}
    stops = list(range(2, 100, 10))

    async def scenario(engine, steps):
        steps.hold_at(8)
        requests = [
            asyncio.ensure_future(engine.generate([*PROMPT, i], n=8, sampling=Sampling(24)))
            for i in range(4)
        ]
        async with paused_at(engine, steps):
            await publish(engine, policies[1], 1)
        return await asyncio.gather(*requests), engine.num_tokens_generated

    results, num_tokens = with_engine(scenario, policy=policies[0], stop_token_ids=stops)
    everything = [(i, completion) for i, group in enumerate(results) for completion in group]
    assert len(everything) == 32
    assert num_tokens == sum(len(completion.token_ids) for _, completion in everything)
    kinds = set()
    for i, completion in everything:
        tokens = completion.token_ids
        assert not set(tokens[:-1]) & set(stops)
        assert completion.truncated == (tokens[-1] not in stops)
        assert len(tokens) == 24 or not completion.truncated
        assert completion.completed_at == completion.versions[-1]
        kinds.add((min(completion.versions), max(completion.versions), completion.truncated))
        expected = expected_logprobs(policies, [*PROMPT, i], completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
    assert {(0, 0, False), (0, 1, False)} <= kinds, "the publication fell beside the responses"


def test_a_publication_before_the_first_token_keeps_the_group_whole():
    policies = {version: make_policy(seed=version) for version in range(2)}

    async def scenario(engine, steps):
        steps.hold_at(1)
        request = asyncio.ensure_future(engine.generate(PROMPT, n=8, sampling=Sampling(16)))
        async with paused_at(engine, steps):
            late = asyncio.ensure_future(engine.generate(PROMPT, n=8, sampling=Sampling(16)))
            await asyncio.sleep(0)  # it submits while nothing runs
            await publish(engine, policies[1], 1)
        return [*await request, *await late], engine.num_tokens_generated

    completions, num_tokens = with_engine(scenario, policy=policies[0], stop_token_ids=[NEVER])
    assert len(completions) == 16
    assert len({completion.token_ids for completion in completions}) == 16
    assert num_tokens == 16 * 16
    for completion in completions:
        expected = expected_logprobs(policies, PROMPT, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_tight_cache_with_publications_and_cancellations_keeps_every_log_prob_true(seed):
    rng = random.Random(seed)
    policies = {version: make_policy(seed=version) for version in range(4)}
    stops = list(range(2, 100, 25))
    prompts = [[rng.randrange(3, 100) for _ in range(rng.randint(1, 40))] for _ in range(6)]

    async def scenario(engine, steps):
        steps.hold_at(rng.randint(1, 6))
        requests = [
            asyncio.ensure_future(engine.generate(prompt, n=4, sampling=Sampling(60)))
            for prompt in prompts
        ]
        for version in (1, 2, 3):
            await until(
                lambda: steps.is_held or all(request.done() for request in requests), "a held step"
            )
            if not steps.is_held:
                break
            victim = rng.choice(requests)
            if rng.random() < 0.7:
                victim.cancel()
            next_hold = steps.count + rng.randint(3, 30) if version < 3 else None
            async with paused_at(engine, steps, next_hold):
                await publish(engine, policies[version], version)
        return await asyncio.gather(*requests, return_exceptions=True)

    results = with_engine(
        scenario,
        policy=policies[0],
        cache_tokens=8 * 32,
        max_batch_tokens=24,
        max_running=6,
        stop_token_ids=stops,
        seed=seed,
    )
    versions = set()
    for prompt, completions in zip(prompts, results, strict=True):
        if isinstance(completions, asyncio.CancelledError):
            continue
        assert len(completions) == 4
        for completion in completions:
            versions |= set(completion.versions)
            assert len(completion.token_ids) == 60 or completion.token_ids[-1] in stops
            assert not set(completion.token_ids[:-1]) & set(stops)
            expected = expected_logprobs(policies, prompt, completion)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
    assert len(versions) > 1


def test_completed_at_is_read_from_the_clock_when_the_response_ends():
    async def scenario(engine, steps):
        steps.hold_at(6)
        request = asyncio.ensure_future(engine.generate(PROMPT, n=2, sampling=Sampling(12)))
        await steps.held()
        engine.test_clock[0] = 7  # the trainer goes on; nothing is published
        steps.release()
        return await request

    for completion in with_engine(scenario, stop_token_ids=[NEVER]):
        assert completion.versions == (0,) * 12
        assert completion.completed_at == 7


def test_no_token_flows_while_paused_and_generation_goes_on_after_an_error_inside():
    async def scenario(engine, steps):
        steps.hold_at(5)
        request = asyncio.ensure_future(engine.generate(PROMPT, n=4, sampling=Sampling(30)))

        async def break_off():
            async with paused_at(engine, steps):
                before = steps.count, engine.num_tokens_generated
                await asyncio.sleep(0.2)  # a window in which a running engine makes many steps
                assert (steps.count, engine.num_tokens_generated) == before
                assert not request.done()
                raise KeyError("inside")

        with pytest.raises(KeyError, match="inside"):
            await break_off()
        return await request

    completions = with_engine(scenario, stop_token_ids=[NEVER])
    assert [len(completion.token_ids) for completion in completions] == [30] * 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "model.norm.weight"),
        (lambda weights: weights.update(surplus=torch.zeros(1)), "surplus"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight: engine \(64,\), trainer \(3,\)",
        ),
    ],
    ids=["missing", "unknown", "misshaped"],
)
def test_weights_that_do_not_fit_are_refused_by_name_and_nothing_is_loaded(change, named):
    policy, other = make_policy(), make_policy(seed=1)

    async def scenario(engine, _):
        weights = weights_of(other)
        change(weights)
        with pytest.raises(EngineError, match=named):
            async with engine.paused():
                await engine.load_weights(weights, version=1)
        assert "at version 0" in engine.describe()
        return await engine.generate(PROMPT, n=2, sampling=Sampling(8))

    for completion in with_engine(scenario, policy=policy):
        assert set(completion.versions) == {0}
        expected = trainer_logprobs(policy, PROMPT, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)


def test_published_weights_are_copied_and_not_kept():
    policy, other = make_policy(), make_policy(seed=1)

    async def scenario(engine, _):
        weights = {name: weight.clone() for name, weight in weights_of(other).items()}
        async with engine.paused():
            await engine.load_weights(weights, version=1)
        for weight in weights.values():
            weight.zero_()
        return await engine.generate(PROMPT, n=2, sampling=Sampling(8))

    for completion in with_engine(scenario, policy=policy):
        assert set(completion.versions) == {1}
        expected = trainer_logprobs(other, PROMPT, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)


# --- requests that do not end well ----------------------------------------------------------------


@pytest.mark.parametrize("at_step", [1, 2, 12], ids=["prefill", "fork", "decode"])
def test_a_cancelled_request_frees_the_engine(at_step):
    async def scenario(engine, steps):
        steps.hold_at(at_step)
        request = asyncio.ensure_future(engine.generate(PROMPT, n=8, sampling=Sampling(100)))
        await steps.held()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert "0 requests with 0 unfinished" in engine.describe()
        steps.release()
        processor = engine._manager.batch_processor
        await until(lambda: not processor.has_pending_requests(), "an idle engine")
        before = engine.num_tokens_generated
        completions = await engine.generate(PROMPT, n=2, sampling=Sampling(6))
        assert engine.num_tokens_generated == before + 12
        assert steps.count < at_step + 12  # the cancelled one took no further part
        return completions

    completions = with_engine(scenario, stop_token_ids=[NEVER])
    assert [len(completion.token_ids) for completion in completions] == [6, 6]


def test_a_request_cancelled_before_the_engine_has_seen_it_is_never_computed():
    async def scenario(engine, steps):
        async with engine.paused():
            request = asyncio.ensure_future(engine.generate(PROMPT, n=8, sampling=Sampling(100)))
            await asyncio.sleep(0)  # it submits
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
        await engine.generate(PROMPT, n=1, sampling=Sampling(6))  # behind it in the queue
        assert steps.count == 6

    with_engine(scenario, stop_token_ids=[NEVER])


def test_a_request_that_does_not_fit_is_refused_and_the_engine_goes_on():
    async def scenario(engine, _):
        with pytest.raises(
            RequestError, match="28 tokens \\+ 101 new ones exceed the engine's 128"
        ):
            await engine.generate(PROMPT * 4, n=1, sampling=Sampling(101))
        with pytest.raises(RequestError, match=r"temperature 0.5 was not announced.*1\.0"):
            await engine.generate(PROMPT, n=1, sampling=Sampling(4, 0.5))
        assert "0 requests" in engine.describe()
        return await engine.generate(PROMPT * 4, n=1, sampling=Sampling(100))

    (completion,) = with_engine(scenario, stop_token_ids=[NEVER])
    assert len(completion.token_ids) == 100


def test_a_forward_that_raises_fails_every_waiting_request_with_an_engine_error():
    async def scenario(engine, steps):
        steps.crash_at = 6
        requests = [engine.generate(PROMPT, n=4, sampling=Sampling(50)) for _ in range(3)]
        async with asyncio.timeout(5):
            errors = await asyncio.gather(*requests, return_exceptions=True)
            assert [type(error) for error in errors] == [EngineError] * 3
            for error in errors:
                assert "the forward broke" in str(error)
            with pytest.raises(EngineError):
                await engine.generate(PROMPT, n=1, sampling=Sampling(4))
            with pytest.raises(EngineError):
                async with engine.paused():
                    pass
        assert "stopped" in engine.describe()

    with_engine(scenario)


def test_a_pause_that_waits_for_a_dying_engine_ends_with_an_engine_error():
    async def scenario(engine, steps):
        steps.hold_at(5)
        request = asyncio.ensure_future(engine.generate(PROMPT, n=2, sampling=Sampling(50)))
        await steps.held()
        letting_go = asyncio.ensure_future(pause_requested(engine, steps))

        def crash(*_):
            raise RuntimeError("the forward broke")

        # registered last: runs after the hook that holds the thread now
        engine._model.register_forward_hook(crash)
        async with asyncio.timeout(5):
            with pytest.raises(EngineError, match="generation loop"):
                async with engine.paused():
                    raise AssertionError("a dead engine was paused")
            await letting_go
            with pytest.raises(EngineError):
                await request

    with_engine(scenario)


def test_an_engine_that_cannot_start_says_why():
    model = copy_for_engine(make_policy(), torch.float32)
    engine = LocalEngine(
        model, stop_token_ids=[STOP], pad_token_id=0, max_sequence_tokens=128, seed="no number"
    )

    async def run():
        try:
            async with asyncio.timeout(10):
                await engine.start(lambda: 0)
        finally:
            await engine.close()

    with pytest.raises(EngineError) as caught:
        asyncio.run(run())
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_close_leaves_no_thread_and_may_be_repeated(busy):
    before = set(threading.enumerate())

    async def scenario(engine, steps):
        async with engine.paused():
            pass
        request = None
        if busy:
            steps.hold_at(8)
            request = asyncio.ensure_future(engine.generate(PROMPT, n=4, sampling=Sampling(100)))
            await steps.held()
            steps.release()
        async with asyncio.timeout(10):
            await engine.close()
            await engine.close()
            if request is not None:
                with pytest.raises(EngineError):
                    await request
        with pytest.raises(EngineError, match="not started, or closed"):
            await engine.generate(PROMPT, n=1, sampling=Sampling(4))

    with_engine(scenario, close=False, stop_token_ids=[NEVER])
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(5)
    assert not [thread for thread in left if thread.is_alive()]


def test_an_engine_may_be_closed_before_it_was_started():
    engine = LocalEngine(
        make_policy(), stop_token_ids=[STOP], pad_token_id=0, max_sequence_tokens=128
    )
    asyncio.run(engine.close())
    assert "stopped" in engine.describe()


def test_intra_op_threads_are_those_asked_for_and_can_change_meanwhile():
    seen = []

    async def scenario(engine, steps):
        engine._model.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
        await engine.generate(PROMPT, n=1, sampling=Sampling(4))
        engine.num_threads = 2
        await engine.generate(PROMPT, n=1, sampling=Sampling(4))

    with_engine(scenario, num_threads=1, stop_token_ids=[NEVER])
    assert seen == [1] * 4 + [2] * 4
