"""Real local engines on a tiny model, whose generation thread a test can hold at chosen steps."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import torch

from pace_lightning.core.logprobs import token_logprobs
from pace_lightning.rollout.local_engine import LocalEngine
from pace_lightning.training.policy import copy_for_engine, load_policy

VOCABULARY = 100
STOP = 2
NEVER = VOCABULARY  # not in the vocabulary: responses end by length only
DEADLINE_SECONDS = 60.0
CLOSE = {"atol": 1e-5, "rtol": 0.0}

PROMPT = [5, 17, 42, 8, 3, 11, 29]


def make_policy(seed=0):
    """The tiny model with weights so large that tokens, and their age, matter to its output."""
    model = load_policy("conf/models/tiny", random_init=True, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)
    return model.requires_grad_(False)


def weights_of(policy):
    return {name: parameter.data for name, parameter in policy.named_parameters()}


class Steps:
    """Counts the forwards of a model; can hold its thread at the start of one, or end it there."""

    def __init__(self, model):
        self.count = 0
        self.crash_at = None
        self._hold_at = None
        self._held = threading.Event()
        self._go = threading.Event()
        model.register_forward_pre_hook(self._begin)

    def _begin(self, *_):
        self.count += 1
        if self.count == self.crash_at:
            raise RuntimeError("the forward broke")
        if self._hold_at is not None and self.count >= self._hold_at:
            self._hold_at = None
            self._held.set()
            assert self._go.wait(DEADLINE_SECONDS)

    def hold_at(self, step):
        """Hold the first step with this number or a later one."""
        self._held.clear()
        self._go.clear()
        self._hold_at = step

    @property
    def is_held(self):
        return self._held.is_set()

    async def held(self):
        assert await asyncio.to_thread(self._held.wait, DEADLINE_SECONDS)

    def release(self):
        self._go.set()


def with_engine(scenario, *, policy=None, close=True, **settings):
    """Run ``scenario(engine, steps)`` with a started engine, then close it; in bounded time."""
    model = copy_for_engine(policy or make_policy(), torch.float32)
    steps = Steps(model)
    arguments = {
        "stop_token_ids": [STOP],
        "pad_token_id": 0,
        "max_sequence_tokens": 128,
    }
    engine = LocalEngine(model, **(arguments | settings))

    engine.test_clock = clock = [0]  # the trainer's version; a scenario advances it

    async def run():
        await engine.start(lambda: clock[0])
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                return await scenario(engine, steps)
        finally:
            steps.release()
            if close:
                await engine.close()

    return asyncio.run(run())


async def until(predicate, what):
    """Wait for a condition that no one announces."""
    try:
        async with asyncio.timeout(DEADLINE_SECONDS / 2):
            while not predicate():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


async def pause_requested(engine, steps):
    """Let a held generation thread go on once someone waits for it to pause."""
    status = engine._manager.background_thread_status
    await until(status.is_pause_requested, "a request to pause")
    steps.release()


@asynccontextmanager
async def paused_at(engine, steps, step=None):
    """A pause that begins when the thread, held inside a step, is let go; then hold ``step``."""
    await steps.held()
    letting_go = asyncio.ensure_future(pause_requested(engine, steps))
    async with engine.paused():
        await letting_go
        if step is not None:
            steps.hold_at(step)
        yield


async def publish(engine, policy, version):
    """What the worker does while the engine is paused."""
    await engine.load_weights(weights_of(policy), version=version)
    engine.test_clock[0] = version


def trainer_logprobs(policy, prompt, completion, temperature=1.0):
    """What the trainer says about the tokens of one response, which it sees whole."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, len(prompt) :] = True
    with torch.no_grad():
        logprobs, _ = token_logprobs(
            policy, ids, torch.ones_like(ids), mask, temperature=temperature
        )
    return logprobs[0, len(prompt) :]


def expected_logprobs(policies, prompt, completion, temperature=1.0):
    """Each token under the weights of its version."""
    by_version = {
        version: trainer_logprobs(policies[version], prompt, completion, temperature)
        for version in set(completion.versions)
    }
    return torch.stack([by_version[version][t] for t, version in enumerate(completion.versions)])


def assert_well_formed(completion, max_new_tokens):
    """Nothing was lost or sampled twice."""
    tokens = completion.token_ids
    assert len(tokens) == len(completion.logprobs) == len(completion.versions)
    assert 1 <= len(tokens) <= max_new_tokens
    assert STOP not in tokens[:-1]
    assert completion.truncated == (tokens[-1] != STOP)
    if completion.truncated:
        assert len(tokens) == max_new_tokens
    assert list(completion.versions) == sorted(completion.versions)
    assert completion.versions[-1] <= completion.completed_at
