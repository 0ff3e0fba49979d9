"""vLLM for real, on the tiny model: what it says about each token is true, and it dies with us.

Starting vLLM takes long, so tests share an engine, and the loop that it lives in, where they can.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from local_engines import STOP, assert_well_formed, trainer_logprobs
from local_engines import expected_logprobs as logprobs_by_version

from pace_lightning.core.pace import rescore
from pace_lightning.rollout import vllm_weights
from pace_lightning.rollout.engine import EngineError, RequestError, Sampling
from pace_lightning.rollout.publication import publish
from pace_lightning.rollout.vllm_engine import VLLMEngine
from pace_lightning.rollout.vllm_process import Launch
from pace_lightning.training.policy import load_policy, sequence_logprobs

pytest.importorskip("vllm", reason="make setup-vllm installs it", exc_type=ImportError)
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    # vLLM leaves sockets to the garbage collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PROMPT = [5, 17, 42, 8, 3, 11, 29]
DEADLINE_SECONDS = 600.0
"""On a machine that is busy with other things, vLLM gets little of a core."""
CLOSE = {"atol": 2e-5, "rtol": 0.0}
CORE = max(os.sched_getaffinity(0))


def make_policy(seed: int):
    """The tiny model with weights so large that tokens, and their age, matter to its output."""
    model = load_policy("conf/models/tiny", random_init=True, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)
    return model.requires_grad_(False)


def weights_of(policy):
    return {name: parameter.data for name, parameter in policy.named_parameters()}


class Trained:
    """A trainer's side: its policy of each version, and the engine that serves them.

    Version v has the weights of seed v. The loop runs in a thread of its own, as in a run.
    """

    def __init__(self, **settings):
        self.version = 0
        self.policies = {}
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        launch = settings.pop("launch", Launch(128, cores=(CORE,), max_running=16))
        self.engine = VLLMEngine(
            self.policy(0),
            launch,
            reference=lambda tokens, _: sequence_logprobs(self.policy(self.version), tokens),
            stop_token_ids=[STOP],
            **{"answer_timeout_seconds": 300.0, "startup_timeout_seconds": 500.0} | settings,
        )

    def policy(self, version):
        if version not in self.policies:
            self.policies[version] = make_policy(version)
        return self.policies[version]

    def run(self, work):
        """Run a coroutine in the engine's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DEADLINE_SECONDS)

    def start(self):
        self.run(self.engine.start(lambda: self.version))
        return self

    async def publish(self, version, *, rescore=True):
        self.version = version
        weights = weights_of(self.policy(version))
        return await publish(self.engine, weights, version, rescore=rescore)

    async def publish_next(self, **options):
        await self.publish(self.version + 1, **options)
        return self.version

    async def tokens(self, count):
        """Wait until the engine has sampled so many more tokens."""
        target = self.engine.num_tokens_generated + count
        while self.engine.num_tokens_generated < target:
            await asyncio.sleep(0.002)

    def close(self):
        try:
            self.run(self.engine.close())
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()


def engine_children():
    """Processes below this one but Python's resource trackers, which serve until the end."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
            if not any("resource_tracker" in word for word in child.cmdline()):
                found.append(child)
    return found


@pytest.fixture
def nothing_left():
    """No process is left that the test started; the shared engine may run beside it."""
    before = set(engine_children())
    yield
    _, alive = psutil.wait_procs(set(engine_children()) - before, timeout=60)
    assert alive == []


@pytest.fixture
def make_trained(nothing_left):
    """Makes engines that are not shared, and closes them."""
    made = []

    def make(**settings):
        made.append(Trained(**settings))
        return made[-1]

    yield make
    for trained in made:
        trained.close()


def set_answer_timeout(engine, seconds):
    engine._answer_timeout_seconds = engine._link._answer_timeout_seconds = seconds


@pytest.fixture(scope="module")
def trained():
    trained = Trained()
    try:
        yield trained.start()
    finally:
        trained.close()
        assert engine_children() == []
        assert not trained.engine._link.serving.path.exists()


def expected_logprobs(trained, prompt, completion):
    """Each token under the weights of its version."""
    policies = {version: trained.policy(version) for version in set(completion.versions)}
    return logprobs_by_version(policies, prompt, completion)


async def across_publications(trained, count, *, publications, tokens=40):
    """Responses, and the versions that were published while they were generated."""
    task = asyncio.ensure_future(trained.engine.generate(PROMPT, n=count, sampling=Sampling(110)))
    versions = []
    for _ in range(publications):
        waiting = asyncio.ensure_future(trained.tokens(tokens))
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        assert not task.done(), "the responses ended too early for this test"
        versions.append(await trained.publish_next())
    return await task, versions


# --- tokens, log-probs, versions ------------------------------------------------------------------


def test_no_token_is_sampled_before_the_first_publication(trained):
    with pytest.raises(EngineError, match="no weights were published"):
        trained.run(trained.engine.generate(PROMPT, n=1, sampling=Sampling(4)))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_behavior_log_probs_are_the_trainers_own(trained, temperature):
    prompts = [PROMPT, PROMPT[:1], list(range(3, 60))]

    async def scenario():
        await trained.publish_next()
        requests = [
            trained.engine.generate(prompt, n=4, sampling=Sampling(40, temperature))
            for prompt in prompts
        ]
        return await asyncio.gather(*requests)

    for prompt, completions in zip(prompts, trained.run(scenario()), strict=True):
        assert len({completion.token_ids for completion in completions}) == 4
        for completion in completions:
            assert_well_formed(completion, 40)
            assert set(completion.versions) == {trained.version}
            expected = trainer_logprobs(
                trained.policy(trained.version), prompt, completion, temperature
            )
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)


def test_a_greedy_token_is_the_likeliest_and_was_certain(trained):
    async def scenario():
        await trained.publish_next()
        return await trained.engine.generate(PROMPT, n=1, sampling=Sampling(12, 0.0))

    (completion,) = trained.run(scenario())
    assert set(completion.logprobs) == {0.0}
    ids = torch.tensor([[*PROMPT, *completion.token_ids]])
    likeliest = trained.policy(trained.version)(ids).logits.argmax(-1)[0, len(PROMPT) - 1 : -1]
    assert likeliest.tolist() == list(completion.token_ids)


def test_each_token_carries_the_version_that_sampled_it_across_two_publications(trained):
    async def scenario():
        await trained.publish_next()
        return await across_publications(trained, 12, publications=2)

    completions, versions = trained.run(scenario())
    before = versions[0] - 1
    assert {v for completion in completions for v in completion.versions} == {before, *versions}
    for completion in completions:
        assert_well_formed(completion, 110)
        expected = expected_logprobs(trained, PROMPT, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)


def test_prefix_scores_at_a_publication_are_the_trainers_own(trained):
    async def scenario():
        await trained.publish_next()
        return await across_publications(trained, 12, publications=2)

    completions, versions = trained.run(scenario())
    events = 0
    for completion in completions:
        crossed = [v for v in versions if completion.versions[0] < v <= completion.versions[-1]]
        assert len(completion.rescores) == len(crossed)
        for version, event in zip(crossed, completion.rescores, strict=True):
            size = sum(v < version for v in completion.versions)
            new = trainer_logprobs(trained.policy(version), PROMPT, completion)[:size]
            ours = rescore(completion.logprobs[:size], new.clamp(max=0.0).tolist())
            assert event.num_tokens == size
            for name in ("absolute", "drop", "signed"):
                assert getattr(event, name) == pytest.approx(getattr(ours, name), abs=1e-3)
            events += 1
    assert events >= 8


def test_prefixes_are_not_scored_where_nobody_asks(trained):
    async def scenario():
        await trained.publish_next()
        task = asyncio.ensure_future(trained.engine.generate(PROMPT, n=8, sampling=Sampling(100)))
        await trained.tokens(30)
        await trained.publish_next(rescore=False)
        return await task

    completions = trained.run(scenario())
    assert any(len(set(completion.versions)) == 2 for completion in completions)
    assert all(completion.rescores == () for completion in completions)


def test_prefix_scores_at_another_temperature_are_refused(trained):
    async def scenario():
        await trained.publish_next()
        task = asyncio.ensure_future(
            trained.engine.generate(PROMPT, n=4, sampling=Sampling(100, 0.9))
        )
        await trained.tokens(8)
        try:
            with pytest.raises(EngineError, match=r"temperature 1, but .* sampled at 0.9"):
                await trained.publish_next()
        finally:
            await task

    trained.run(scenario())


# --- pause ----------------------------------------------------------------------------------------


def test_a_pause_stops_all_tokens_loses_none_and_ends_also_after_an_error(trained):
    async def scenario():
        await trained.publish_next()
        task = asyncio.ensure_future(trained.engine.generate(PROMPT, n=8, sampling=Sampling(100)))
        await trained.tokens(20)
        with contextlib.suppress(ZeroDivisionError):
            async with trained.engine.paused():
                paused_at = trained.engine.num_tokens_generated
                late = asyncio.ensure_future(
                    trained.engine.generate(PROMPT, n=1, sampling=Sampling(1))
                )
                await asyncio.sleep(0.3)  # a step takes milliseconds
                assert trained.engine.num_tokens_generated == paused_at
                assert not late.done()
                raise ZeroDivisionError
        return await task, await late

    completions, (late,) = trained.run(scenario())
    assert len(late.token_ids) == 1
    for completion in completions:
        assert_well_formed(completion, 100)
        expected = expected_logprobs(trained, PROMPT, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)


def test_a_second_request_goes_on_from_what_the_first_had_come_to(trained):
    async def scenario():
        responses = []
        first = await trained.publish_next()
        task = asyncio.ensure_future(
            trained.engine.generate(PROMPT, n=8, sampling=Sampling(100), responses=responses)
        )
        await trained.tokens(60)
        task.cancel()
        await asyncio.wait([task])
        there = [(r.completed_at, *map(tuple, (r.token_ids, r.logprobs))) for r in responses]
        for response in responses:
            response.unscored = bool(response.token_ids) and not response.is_finished
        second = await trained.publish_next()
        again = trained.engine.generate(PROMPT, n=8, sampling=Sampling(100), responses=responses)
        return first, second, there, await again

    first, second, there, completions = trained.run(scenario())
    assert sum(ended is None and bool(tokens) for ended, tokens, _ in there) >= 4
    for (ended, tokens, logprobs), completion in zip(there, completions, strict=True):
        size = len(tokens)
        assert completion.token_ids[:size] == tokens
        assert completion.logprobs[:size] == logprobs
        new = len(completion.token_ids) - size
        assert completion.versions == (first,) * size + (second,) * new
        assert completion.completed_at == (second if ended is None else ended)
        assert_well_formed(completion, 100)
        expected = expected_logprobs(trained, PROMPT, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
        scored = [size] if size and ended is None else []
        assert [event.num_tokens for event in completion.rescores] == scored


def test_a_cancelled_request_leaves_nothing_behind_in_the_engine(trained):
    async def scenario():
        await trained.publish_next()
        task = asyncio.ensure_future(trained.engine.generate(PROMPT, n=8, sampling=Sampling(100)))
        await trained.tokens(10)
        task.cancel()
        await asyncio.wait([task])
        return trained.engine._link.llm.get_num_unfinished_requests()

    assert trained.run(scenario()) == 0
    assert trained.engine._requests == []


def test_a_prompt_that_is_too_long_fails_alone(trained):
    async def scenario():
        await trained.publish_next()
        with pytest.raises(RequestError, match=r"120 tokens \+ 9 new ones exceed the engine's 128"):
            await trained.engine.generate([5] * 120, n=1, sampling=Sampling(9))
        return await trained.engine.generate([5] * 120, n=1, sampling=Sampling(8))

    assert len(trained.run(scenario())) == 1


def test_a_publication_takes_all_requests_back_in_one_call(trained, monkeypatch):
    calls = []
    abort = trained.engine._link.llm.abort

    async def counting(names, **options):
        calls.append(list(names))
        await abort(names, **options)

    monkeypatch.setattr(trained.engine._link.llm, "abort", counting)

    async def scenario():
        await trained.publish_next()
        tasks = [
            asyncio.ensure_future(
                trained.engine.generate(PROMPT, n=4, sampling=Sampling(100, temperature=1.0))
            )
            for _ in range(3)
        ]
        await trained.tokens(24)
        unfinished = sum(len(request.unfinished) for request in trained.engine._requests)
        await trained.publish_next()
        return unfinished, await asyncio.gather(*tasks)

    unfinished, results = trained.run(scenario())
    assert len(calls) == 1
    assert 8 < len(calls[0]) <= unfinished
    assert len(set(calls[0])) == len(calls[0])
    for completion in [completion for completions in results for completion in completions]:
        assert_well_formed(completion, 100)


# --- publications that go wrong -------------------------------------------------------------------


def test_weights_of_other_names_or_shapes_are_refused_and_generation_goes_on(trained):
    async def scenario():
        await trained.publish_next()
        weights = weights_of(trained.policy(trained.version))
        weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
        with pytest.raises(EngineError, match=r"model.norm.weight: engine \(64,\), trainer \(63,"):
            await publish(trained.engine, weights, trained.version + 1, rescore=False)
        return await trained.engine.generate(PROMPT, n=1, sampling=Sampling(3))

    (completion,) = trained.run(scenario())
    assert set(completion.versions) == {trained.version}


def test_the_process_has_an_environment_and_a_core_of_its_own(trained):
    # the process itself computes: a worker beside it would be waited for by polling
    assert not [child for child in psutil.Process().children(True) if "Worker" in child.name()]
    core = psutil.Process(trained.engine.pids()[0])
    environment = core.environ()
    assert environment["PACE_LIGHTNING_TRAINER_PID"] == str(os.getpid())
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & environment.keys()
    assert core.cpu_affinity() == [CORE]


def test_the_trainers_own_environment_is_left_as_it_was(trained):
    names = ("PACE_LIGHTNING_TRAINER_PID", "OMP_PLACES", "VLLM_ENABLE_V1_MULTIPROCESSING")
    assert not set(names) & os.environ.keys()


def test_an_engine_that_is_killed_in_the_middle_ends_all_requests_with_an_error_that_says_so(
    make_trained,
):
    trained = make_trained().start()

    async def scenario():
        await trained.publish(1)
        tasks = [
            asyncio.ensure_future(trained.engine.generate(PROMPT, n=4, sampling=Sampling(100)))
            for _ in range(3)
        ]
        await trained.tokens(5)
        with contextlib.suppress(EngineError):  # if its death is noticed so soon
            async with trained.engine.paused():  # or they might be finished before it
                os.kill(trained.engine.pids()[0], signal.SIGKILL)
        start = time.monotonic()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - start < DEADLINE_SECONDS / 10
        for result in results:
            assert isinstance(result, EngineError)
            assert "the vLLM engine process died" in str(result)
        with pytest.raises(EngineError, match="died"):
            await trained.publish(2)

    trained.run(scenario())
    assert "dead" in trained.engine.describe()


def test_a_stopped_engine_is_named_within_the_deadline(make_trained):
    trained = make_trained().start()

    async def stop_in_a_pause():
        async with trained.engine.paused():
            for pid in trained.engine.pids():
                os.kill(pid, signal.SIGSTOP)

    async def scenario():
        await trained.publish(1)
        task = asyncio.ensure_future(trained.engine.generate(PROMPT, n=4, sampling=Sampling(100)))
        await trained.tokens(5)
        set_answer_timeout(trained.engine, 5.0)  # now: a busy machine takes its time to publish
        with pytest.raises(EngineError, match=r"did not answer within 5\.0 s: resuming"):
            await stop_in_a_pause()
        with pytest.raises(EngineError, match="no token for"):
            await asyncio.wait_for(task, DEADLINE_SECONDS)
        with pytest.raises(EngineError, match=r"did not answer within 5\.0 s: pausing"):
            await trained.publish(2)

    trained.run(scenario())


def test_an_engine_that_is_not_ready_in_time_is_given_up_and_ended(make_trained):
    trained = make_trained(startup_timeout_seconds=3.0)
    with pytest.raises(EngineError, match=r"not ready after 3.0 s"):
        trained.start()


def test_a_tied_head_that_stays_behind_is_found_at_the_first_publication(monkeypatch, make_trained):
    # without the repair: the model is served as it is, its head tied to the embedding
    monkeypatch.setattr(vllm_weights, "tied_parameters", lambda model: {})
    trained = make_trained().start()
    with pytest.raises(EngineError, match="version 1 did not arrive in vLLM as they are"):
        trained.run(trained.publish(1))
    with pytest.raises(EngineError, match="did not arrive"):
        trained.run(trained.engine.generate(PROMPT, n=1, sampling=Sampling(4)))


def test_a_kept_cache_keeps_versions_and_prefix_scores_true(make_trained):
    trained = make_trained(recompute_cache=False).start()

    async def scenario():
        await trained.publish(1)
        return await across_publications(trained, 12, publications=1)

    completions, _ = trained.run(scenario())
    mixed = [completion for completion in completions if len(set(completion.versions)) == 2]
    assert mixed
    for completion in mixed:
        assert_well_formed(completion, 110)
        size = sum(version < 2 for version in completion.versions)
        expected = trainer_logprobs(trained.policy(1), PROMPT, completion)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs[:size]), expected[:size], **CLOSE
        )
        # the keys and values of the old weights are still used: the rest is of neither
        new = trainer_logprobs(trained.policy(2), PROMPT, completion)
        gap = (torch.tensor(completion.logprobs) - new)[size:].abs().max()
        assert gap > 0.01
        (event,) = completion.rescores
        ours = rescore(completion.logprobs[:size], new[:size].clamp(max=0.0).tolist())
        assert event.absolute == pytest.approx(ours.absolute, abs=1e-3)


KILLED_TRAINER = """
import asyncio, sys
from test_vllm_engine import Trained

if __name__ == "__main__":
    trained = Trained().start()
    trained.run(trained.publish(1))
    print(trained.engine._link.serving.path, *trained.engine.pids(), flush=True)
    sys.stdin.read()
"""


def test_the_engine_dies_with_a_trainer_that_is_killed(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(KILLED_TRAINER)
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    trainer = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        path, *pids = trainer.stdout.readline().split()
        assert len(pids) == 1
        assert all(psutil.pid_exists(int(pid)) for pid in pids)
        trainer.kill()
        trainer.wait()
        _, alive = psutil.wait_procs(
            [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))], timeout=60
        )
        assert alive == []
        assert not Path(path).exists()
    finally:
        trainer.kill()
