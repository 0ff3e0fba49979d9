"""Everything on the rollout side around a scripted engine, as the data module puts it together."""

import asyncio
import threading

import pytest
import torch
from scripted import DEADLINE_SECONDS, HOLD, ListPrompts, ScriptedEngine, make_prompt, score_mixed

from pace_lightning.core.admission import AdmitAll
from pace_lightning.core.dispatch import FixedSlots
from pace_lightning.core.ledger import Ledger
from pace_lightning.core.pool import TrajectoryPool
from pace_lightning.core.trajectory import Fate
from pace_lightning.rollout.engine import Sampling
from pace_lightning.rollout.worker import RolloutWorker

WEIGHTS = {"w": torch.arange(3.0)}
SAMPLING = Sampling(max_new_tokens=8)


class WatchedPool(TrajectoryPool):
    """Tells the test of each group that arrives."""

    def __init__(self, *arguments, on_put, **options):
        super().__init__(*arguments, **options)
        self._on_put = on_put

    def put(self, group):
        super().put(group)
        self._on_put()


class Rig:
    """Everything on the rollout side, put together as the data module does it."""

    def __init__(
        self, engine=None, *, prompts=None, score=score_mixed, dispatch=None, policy=None, **worker
    ):
        self.engine = engine or ScriptedEngine(default=HOLD)
        self.prompts = ListPrompts(prompts)
        self.ledger = Ledger()
        self.fates = {}
        self.settled_twice = []
        self.pool = WatchedPool(policy or AdmitAll(), settle=self.settle, on_put=self.engine.notify)
        self.worker = RolloutWorker(
            engine=self.engine,
            pool=self.pool,
            lease=self.lease,
            settle=self.settle,
            score=score,
            dispatch=dispatch or FixedSlots(4),
            sampling=SAMPLING,
            **{"group_size": 2, **worker},
        )

    def lease(self):
        prompt = self.prompts.lease()
        self.ledger.lease(prompt.uid)
        return prompt

    def settle(self, uid, fate, num_tokens):
        if uid in self.fates:
            self.settled_twice.append(uid)
        self.ledger.settle(uid, fate, num_tokens=num_tokens)
        self.fates[uid] = fate
        self.engine.notify()

    def start(self):
        self.worker.start(timeout_seconds=DEADLINE_SECONDS)
        return self

    def train(self):
        self.start().worker.train()
        return self

    def publish(self, version):
        return self.worker.publish(WEIGHTS, version, timeout_seconds=DEADLINE_SECONDS)

    def draw(self, num_groups, version=0, timeout_seconds=DEADLINE_SECONDS):
        return self.pool.draw(num_groups, version=version, timeout_seconds=timeout_seconds)[0]

    def step(self, num_groups, version, timeout_seconds=DEADLINE_SECONDS):
        """What one optimizer step does: draw, train, settle."""
        groups = self.draw(num_groups, version, timeout_seconds)
        for group in groups:
            self.settle(group.prompt.uid, Fate.TRAINED, group.num_tokens)
        return groups

    def end(self):
        """What the data module does when training is over."""
        self.worker.stop_training()
        for group in self.pool.drain():
            self.settle(group.prompt.uid, Fate.UNUSED, group.num_tokens)
        tokens = {rollout.uid: rollout.num_tokens for rollout in self.worker.rollouts.present()}
        for uid in self.ledger.pending:
            self.settle(uid, Fate.UNUSED, tokens[uid])

    def let_run(self):
        """Let the rollout loop do whatever it can do without outside help."""

        async def turns():
            for _ in range(30):
                await asyncio.sleep(0)

        future = asyncio.run_coroutine_threadsafe(turns(), self.worker._loop)
        future.result(DEADLINE_SECONDS)

    def await_fate(self, fate, count=1):
        self.engine.until(
            lambda: list(self.fates.values()).count(fate) >= count, f"{count} groups {fate}"
        )

    def await_ready(self, count):
        self.engine.until(lambda: len(self.pool) >= count, f"{count} groups ready")

    def await_thread_end(self):
        self.worker._thread.join(DEADLINE_SECONDS)
        assert not self.worker.is_alive


@pytest.fixture
def make_rig():
    """Makes rigs, closes them, and sees to it that no thread is left."""
    before = set(threading.enumerate())
    rigs = []

    def make(*arguments, **options):
        rigs.append(Rig(*arguments, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        for name in ("start_gate", "pause_gate", "load_gate", "verify_gate", "close_gate"):
            getattr(rig.engine, name).open()
        rig.worker.close()
        assert not rig.engine.left_paused
        assert rig.settled_twice == []
        rig.ledger.check()
    assert [t for t in threading.enumerate() if t not in before] == []


def in_thread(function):
    """Run in a thread; returns a function that waits for the result or raises the exception."""
    outcome = {}

    def run():
        try:
            outcome["result"] = function()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive(), "the call did not return"
        if "error" in outcome:
            raise outcome["error"]
        return outcome["result"]

    return result


def evaluate(rig, uids="xyz", samples=3, timeout_seconds=DEADLINE_SECONDS):
    sampling = Sampling(max_new_tokens=5, temperature=0.0)
    return rig.worker.evaluate(
        [make_prompt(uid) for uid in uids],
        samples=samples,
        sampling=sampling,
        timeout_seconds=timeout_seconds,
    )
