"""A whole run, but for the network, in virtual time: whatever a seed says happens to it.

Data module, worker, pool, stream, ledger, prompt stream and weight publication are the product's
own; the engine follows a script. An observer stands between them and keeps books of its own, from
which it says what must hold. A run goes through several processes: each is killed, fails or ends,
and the next goes on from the last checkpoint.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from scripted import HOLD, NAN, NEVER, ScriptedEngine
from virtual_time import BUSY, WAIT_FOR_POOL, Killed, Violation, World, simulated

from pace_lightning.core.admission import AdmissionPolicy, AdmitAll, MaxLag
from pace_lightning.core.dispatch import AheadBound, Dispatch, FixedSlots
from pace_lightning.core.pace import Pace, RejectionBudget
from pace_lightning.core.pool import DrawTimeoutError
from pace_lightning.core.staleness import mean_staleness
from pace_lightning.core.trajectory import EndOfData, Fate, Prompt, Trajectory, TrajectoryGroup
from pace_lightning.rollout.engine import (
    Completion,
    EngineError,
    PartialResponse,
    RequestError,
    Sampling,
)
from pace_lightning.rollout.groups import (
    NothingToLearnError,
    RolloutTimeoutError,
    ScoringFailedError,
)
from pace_lightning.tasks.prompts import PromptRow, PromptStream
from pace_lightning.training.datamodule import RolloutDataModule
from pace_lightning.training.weight_sync import WeightSync

GROUP_SIZE = 2
TRAINING, EVALUATION = Sampling(max_new_tokens=8), Sampling(max_new_tokens=9)
GROUP_SECONDS = 12.0
AGES = 1e6
"""A deadline that is never reached while anything still happens."""


@dataclass(frozen=True)
class Scenario:
    """What a seed chose."""

    groups_per_step: int
    micro_batches: int
    every_steps: int
    admission: AdmissionPolicy
    dispatch: Dispatch
    in_rounds: bool
    num_prompts: int
    epochs: int | None
    steps: int
    dynamic_sampling: bool
    evaluate: float
    """Probability after each step, as all below."""
    checkpoint: float
    request_fault: float
    equal_scores: float
    score_fault: float
    fatal: float
    draw_seconds: float
    publish_seconds: float

    @property
    def clean(self) -> bool:
        """Whether every prompt must be trained on, if the data suffices."""
        faults = self.request_fault + self.equal_scores + self.score_fault
        return not faults and isinstance(self.admission, AdmitAll)

    @classmethod
    def choose(cls, rng: random.Random) -> Scenario:
        """One of very many."""
        size = rng.choice([1, 2, 2, 3])
        mode = rng.choice(["slots", "ahead", "ahead", "rounds"])
        every = rng.randint(1, 2) if mode != "rounds" else 1
        eta = rng.randint(every - 1, 3) if mode == "ahead" else 0
        slots = rng.choice([None, size * rng.randint(1, 3)])
        dispatch: Dispatch = (
            FixedSlots(slots or 2 * size) if mode == "slots" else AheadBound(eta, size, slots)
        )
        if mode == "rounds":
            dispatch = AheadBound(0, size)
        pace = Pace(
            RejectionBudget(rng.choice([1, size]), smoothing=rng.choice([0.3, 1.0])),
            window_size=64,
            window_minimum=4,
            aging_limit=rng.choice([None, 1, 2]),
        )
        policies: list[AdmissionPolicy] = [AdmitAll(), pace]
        if mode != "slots":
            policies += [MaxLag(eta), MaxLag(eta)]
        admission = MaxLag(0) if mode == "rounds" else rng.choice(policies)
        num_prompts = rng.randint(size, 8)
        epochs = rng.choice([None, 1, 1, 2])
        faulty = rng.random() < 0.75
        return cls(
            groups_per_step=size,
            micro_batches=rng.randint(1, 2),
            every_steps=every,
            admission=admission,
            dispatch=dispatch,
            in_rounds=mode == "rounds",
            num_prompts=num_prompts,
            epochs=epochs,
            steps=rng.randint(2, 8) if epochs is None else epochs * num_prompts // size + 1,
            dynamic_sampling=rng.random() < 0.7,
            evaluate=rng.choice([0.0, 0.3]),
            checkpoint=rng.choice([0.3, 1.0]),
            request_fault=rng.choice([0.0, 0.05, 0.4, 0.9]) if faulty else 0.0,
            equal_scores=rng.choice([0.0, 0.0, 0.3, 0.3, 0.9]) if faulty else 0.0,
            score_fault=rng.choice([0.0, 0.2]) if faulty else 0.0,
            fatal=rng.choice([0.0, 0.0, 0.02]),
            draw_seconds=rng.choice([AGES, AGES, AGES, 6.0, 1.5]),
            publish_seconds=rng.choice([AGES, AGES, AGES, 0.6]),
        )


@dataclass
class Books:
    """What an outsider knows of the prompts; a copy of it belongs to each checkpoint."""

    out: dict[str, None] = field(default_factory=dict)
    """Leased and not settled, in this process."""
    lost: set[str] = field(default_factory=set)
    """Out when the checkpoint was taken, and not leased again yet."""
    fates: dict[str, Fate] = field(default_factory=dict)
    version: int = 0
    num_trained: int = 0
    """Groups; in the middle of a step fewer than the version says."""
    ready: dict[str, TrajectoryGroup] = field(default_factory=dict)
    """Those that the checkpoint holds; none of them may be generated again."""
    begun: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    """What the checkpoint holds of the responses of groups in flight; see `tokens_of`."""

    def restored(self) -> Books:
        """The books of a process that begins with this copy."""
        lost = {*self.out, *self.lost}
        begun = {**self.begun}
        return Books({}, lost, {**self.fates}, self.version, self.num_trained, self.ready, begun)


def tokens_of(response: PartialResponse | Trajectory) -> tuple[Any, ...]:
    """Token ids, versions and log-probs of a response, and when it ended."""
    if isinstance(response, PartialResponse):
        ids, versions, logprobs = response.token_ids, response.versions, response.logprobs
    else:
        ids, versions = response.token_ids, response.token_versions  # type: ignore[assignment]
        logprobs = response.behavior_logprobs  # type: ignore[assignment]
    return [*ids], [*versions], [*logprobs], response.completed_at


class Observer:
    """Sees what happens, and says what must hold."""

    def __init__(self, world: World, scenario: Scenario, books: Books, trace: list[str]) -> None:
        self.world = world
        self.scenario = scenario
        self.books = books
        self.trace = trace
        self.at_checkpoint = copy.deepcopy(books)
        self.pool: Any = None
        self.rollouts: Any = None
        self.num_continued = 0
        """Groups that were put with tokens from before the checkpoint."""
        self.is_loading = False
        self.ready: set[str] = set()
        """Put into the pool and not settled, those drawn included."""
        self.drawn: set[str] = set()
        """In the batch that is being trained."""
        self.num_shed = 0
        """Groups that the policy rejected since the last draw."""
        self.told = books.version
        """The version that the rollout side has been told last."""
        self.confirmed = books.version
        """The version that it has certainly heard of."""
        self.data_ended = False
        self.num_tokens = 0
        self.published: list[int] = []

    def note(self, what: str) -> None:
        self.trace.append(f"{self.world.loop.now:9.3f} {what}")

    def require(self, holds: bool, what: str) -> None:
        if not holds and not self.world.is_over:
            raise self.world.violated(what)

    def leased(self, prompt: Prompt) -> None:
        uid, books = prompt.uid, self.books
        self.note(f"lease {uid}")
        self.require(uid not in books.out, f"{uid} is leased twice")
        self.require(uid not in books.fates, f"{uid} is leased again after its fate")
        self.require(uid in books.lost or not books.lost, f"{uid} goes before those to be repeated")
        books.lost.discard(uid)
        books.out[uid] = None
        if not self.is_loading:
            free = self.capacity()
            self.require(free >= 0, f"{-free} groups too many are dispatched")

    def saved(self) -> None:
        """The state is taken: what exists of the groups goes into the books beside it."""
        copy_of = self.at_checkpoint = copy.deepcopy(self.books)
        copy_of.ready = {group.prompt.uid: group for group in self.pool._ready}
        copy_of.begun = {
            rollout.uid: [copy.deepcopy(tokens_of(r)) for r in rollout.responses]
            for rollout in self.rollouts.unended()
        }
        held = [*copy_of.ready, *copy_of.begun]
        out = {*self.books.out}
        self.require(len(held) == len({*held}) and {*held} == out, f"holds {held}, out are {out}")

    def loaded_state(self) -> None:
        """The state is back: every prompt is where it was, with the tokens it had."""
        books = self.books
        self.require(not books.lost, f"{books.lost} are lost")
        ready = {group.prompt.uid: group for group in self.pool._ready}
        self.require([*ready.items()] == [*books.ready.items()], f"ready are {[*ready]}")
        begun = {
            rollout.uid: [tokens_of(r) for r in rollout.responses]
            for rollout in self.rollouts.unended()
        }
        same = repr(begun) == repr(books.begun)  # a NaN does not equal itself
        self.require(same, f"begun are {begun}, they were {books.begun}")
        self.ready = {*ready}
        self.num_tokens = sum(group.num_tokens for group in ready.values())
        self.is_loading = False

    def continued(self, group: TrajectoryGroup) -> None:
        """What a group had at the checkpoint is what it begins with, to the last bit."""
        before = self.books.begun.pop(group.prompt.uid, [])
        for trajectory, (*parts, ended) in zip(group.trajectories, before, strict=False):
            *whole, end = tokens_of(trajectory)
            for have, had in zip(whole, parts, strict=True):
                self.require(have[: len(had)] == had, f"{have} does not begin with {had}")
            if ended is not None:
                same = len(whole[0]) == len(parts[0]) and end == ended
                self.require(same, "a response that had ended went on")
        self.num_continued += any(parts[0] for *parts, _ in before)

    def capacity(self) -> int:
        """Groups that may still be dispatched, from the books alone."""
        books, rule = self.books, self.scenario.dispatch
        assert isinstance(rule, FixedSlots | AheadBound)
        free = []
        if rule.slots is not None:
            free.append(rule.slots - len(books.out) + len(self.ready) - len(self.pool))
        if isinstance(rule, AheadBound):
            size = self.scenario.groups_per_step
            used = books.num_trained + len(books.out)
            free.append((rule.eta + self.told + 1) * size - used)
        return min(free)

    def at_rest(self, what: str) -> None:
        """The trainer trains or waits, and only time can change anything: all slots are used."""
        if what not in (WAIT_FOR_POOL, BUSY) or self.data_ended or self.pool._error is not None:
            return
        in_flight = len(self.books.out) - len(self.ready)
        waiting = [rollout.uid for rollout in self.rollouts.interrupted]
        self.require(not waiting, f"{waiting} do not go on during {what}")
        if not (self.scenario.in_rounds and in_flight):
            free = self.capacity()
            self.require(free <= 0, f"{free} slots stay empty during {what}")

    def settled(self, uid: str, fate: Fate, num_tokens: int) -> None:
        self.note(f"settle {uid} {fate}")
        self.require(uid in self.books.out, f"{uid} is settled as {fate} but is not out")
        shed = fate in (Fate.REJECTED, Fate.TOO_STALE)
        if shed or fate is Fate.TRAINED:
            self.require(uid in self.ready, f"{uid} is {fate} but never was in the pool")
        if fate is Fate.TRAINED:
            self.require(uid in self.drawn, f"{uid} is trained but was not drawn")
        self.num_shed += shed
        del self.books.out[uid]
        self.books.fates[uid] = fate
        self.books.num_trained += fate is Fate.TRAINED
        self.ready.discard(uid)
        self.drawn.discard(uid)

    def put(self, group: TrajectoryGroup) -> None:
        uid = group.prompt.uid
        self.note(f"put {uid}")
        self.require(uid in self.books.out, f"{uid} is put but is not out")
        self.require(uid not in self.ready, f"{uid} is put twice")
        self.require(uid not in self.books.ready, f"{uid} was ready at the checkpoint")
        self.continued(group)
        self.ready.add(uid)

    def draw(self, version: int, groups: Sequence[TrajectoryGroup]) -> None:
        uids = [group.prompt.uid for group in groups]
        self.note(f"draw for {version}: {' '.join(uids)}")
        self.require(not self.drawn, f"{self.drawn} were drawn and never settled")
        self.require(len({*uids}) == self.scenario.groups_per_step, f"drew {uids}")
        self.require({*uids} <= self.ready, f"drew {uids}, not all of which are ready")
        self.drawn = {*uids}
        for group in groups:
            restored = self.books.ready.get(group.prompt.uid, group)
            self.require(group == restored, f"{group} was {restored} at the checkpoint")
        self.conserved()
        for t in (t for group in groups for t in group.trajectories):
            lag = version - sum(t.token_versions) / len(t.token_versions)
            ordered = [*t.token_versions, t.completed_at, version]
            self.require(ordered == sorted(ordered), f"versions run backwards: {ordered}")
            limit = getattr(self.scenario.admission, "max_lag", None)
            self.require(limit is None or lag <= limit, f"a lag of {lag} passed the limit {limit}")

    def reported(self, batch: Any, groups: Sequence[TrajectoryGroup]) -> None:
        """The report on the draw against the groups themselves."""
        report, version = batch.report, batch.version
        lags = [
            (
                t.completed_at - sum(t.token_versions) / len(t.token_versions),
                version - t.completed_at,
            )
            for group in groups
            for t in group.trajectories
        ]
        seen = mean_staleness(report.staleness)
        assert seen is not None
        for name, value, index in (("generation", seen.generation, 0), ("wait", seen.waiting, 1)):
            mean = sum(lag[index] for lag in lags) / len(lags)
            self.require(abs(mean - value) < 1e-9, f"{name} staleness is {mean}, reported {value}")
        self.require(report.version == version == self.books.version, "a draw of another version")
        self.require(report.drawn_groups == len(groups), f"reported {report.drawn_groups} groups")
        self.require(report.rejected_groups == self.num_shed, f"{self.num_shed} rejected: {report}")
        self.num_shed = 0

    def conserved(self) -> None:
        """Produced = settled + held. Only between the trainer's steps, not inside a draw."""
        held = len(self.pool) + len(self.drawn)
        self.require(len(self.ready) == held, f"{len(self.ready)} produced, but {held} held")

    def loaded(self, version: int) -> None:
        self.note(f"publish {version}")
        last = self.published[-1] if self.published else -1
        self.require(version > last, f"version {version} is published after {last}")
        self.require(bool(self.published) or version == self.books.version, f"first is {version}")
        self.published.append(version)

    def completed(self, completions: Sequence[Completion], new: Sequence[int]) -> None:
        """Responses were returned; ``new`` are the versions at which the last of them ended."""
        self.num_tokens += sum(len(c.token_ids) for c in completions)
        for version in new:
            self.require(self.confirmed <= version <= self.told, f"clock: {version}, {self.told}")


class Prompts(PromptStream):
    """The prompt stream, watched."""

    def __init__(self, observer: Observer, rows: Sequence[PromptRow], epochs: int | None) -> None:
        super().__init__(rows, seed=0, epochs=epochs)
        self._observer = observer

    def lease(self) -> Prompt:
        try:
            prompt = super().lease()
        except EndOfData:
            self._observer.data_ended = True
            raise
        self._observer.leased(prompt)
        return prompt

    def state_dict(self) -> dict[str, Any]:
        """Also a copy of the observer's books, of the same moment."""
        state, books = super().state_dict(), self._observer.books
        self._observer.saved()
        outstanding = {*state["outstanding"]}
        expected = {*books.out, *books.lost}
        self._observer.require(outstanding == expected, f"saved {outstanding}, out are {expected}")
        return state


class Engine(ScriptedEngine):
    """Requests that end by chance, after a while."""

    def __init__(self, observer: Observer, rng: random.Random) -> None:
        super().__init__(default=HOLD)
        self._observer = observer
        self._rng = rng

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        n: int,
        sampling: Sampling,
        responses: list[PartialResponse] | None = None,
    ) -> list[Completion]:
        rng, scenario, number = self._rng, self._observer.scenario, len(self.requests) + 1
        training = sampling == TRAINING
        if responses and all(response.is_finished for response in responses):
            completions = await super().generate(
                prompt, n=n, sampling=sampling, responses=responses
            )
            self._observer.completed(completions, [])
            return completions
        how: str | BaseException = "finish"
        if rng.random() < scenario.request_fault:
            how = rng.choice([RequestError("scripted"), NAN, NEVER, "short"])
        elif training and rng.random() < scenario.fatal:
            how = EngineError("scripted death")
        if not training and how in (NEVER, NAN, "short"):
            how = RequestError("scripted")
        self._observer.require(
            not self.left_paused or scenario.in_rounds or not training,
            "a group was dispatched while weights were loaded",
        )
        if how == NEVER:
            self.script[number] = NEVER
        else:
            seconds = rng.choice([0.0, 0.5, rng.random(), 3 * rng.random(), 11 * rng.random()])
            end = "finish" if how == "short" else how
            asyncio.get_running_loop().call_later(seconds, self._finish, number, end)
        completions = await super().generate(prompt, n=n, sampling=sampling, responses=responses)
        request = self.requests[number - 1]
        if how == "short":  # refused as a whole: its tokens end with no group
            return completions[: n - 1]
        if training:
            self._observer.completed(completions, [max(c.completed_at for c in completions)])
        else:
            self._observer.require(len(request.versions) == 1, "evaluation saw two policies")
        return completions

    def _finish(self, number: int, how: str | BaseException) -> None:
        self.requests[number - 1].finish(how)

    async def load_weights(self, weights: Mapping[str, Any], *, version: int) -> None:
        await asyncio.sleep(self._rng.choice([0.0, 0.1, self._rng.random()]))
        if self._rng.random() < self._observer.scenario.fatal / 2:
            raise EngineError("scripted refusal")
        for request in self.live:
            if len(request.unfinished) > 1 and request.sampling == TRAINING:
                self._complete(request, request.unfinished[: self._rng.choice([0, 0, 1])])
        await super().load_weights(weights, version=version)
        self._observer.loaded(version)

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        rng, scenario = self._rng, self._observer.scenario
        await asyncio.sleep(rng.choice([0.0, 0.0, rng.random()]))
        if rng.random() < scenario.score_fault:
            fate = rng.choice([Fate.SCORER_ERROR, Fate.SCORER_TIMEOUT])
            raise ScoringFailedError("scripted", fate)
        equal = rng.random() < scenario.equal_scores
        return [0.0 if equal else float(index == 0) for index, _ in enumerate(completions)]


class Sync(WeightSync):
    """Publication without a network."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.data, every_steps=process.scenario.every_steps)
        self._process = process

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._publish()
        self._process.data.worker.train()

    def _publish_lagged(self, _: Any) -> None:
        self._publish()

    def _publish(self, *_: Any) -> None:
        process = self._process
        process.observer.told = process.trainer.global_step
        process.data.start()
        process.data.publish({}, process.trainer.global_step)


class Process:
    """One process of the run, until it is killed, fails or ends."""

    def __init__(
        self,
        world: World,
        scenario: Scenario,
        rng: random.Random,
        checkpoint: tuple[dict[str, Any], Books] | None,
        trace: list[str],
    ) -> None:
        self.world, self.scenario, self.rng = world, scenario, rng
        books = checkpoint[1].restored() if checkpoint else Books()
        self.observer = observer = Observer(world, scenario, books, trace)
        self.engine = Engine(observer, rng)
        self.trainer = SimpleNamespace(global_step=books.version, max_steps=scenario.steps)
        self.checkpoint = checkpoint
        self._groups: list[TrajectoryGroup] = []
        rows = [PromptRow((7, index), f"{index}", {}) for index in range(scenario.num_prompts)]
        self.data = RolloutDataModule(
            engine=self.engine,
            prompts=Prompts(observer, rows, scenario.epochs),
            eval_prompts=[Prompt("eval:0", (9, 9), "held out")] if scenario.evaluate else [],
            scorer=SimpleNamespace(start=lambda: None, close=lambda: None),
            score=self.engine.score,
            shape_reward=lambda score, _: score,
            admission=scenario.admission,
            dispatch=scenario.dispatch,
            in_rounds=scenario.in_rounds,
            group_size=GROUP_SIZE,
            sampling=TRAINING,
            eval_sampling=EVALUATION,
            eval_samples=2,
            eval_timeout_seconds=AGES,
            group_timeout_seconds=GROUP_SECONDS,
            drop_zero_variance=scenario.dynamic_sampling,
            max_empty_groups=5,
            require_gradient=True,
            startup_timeout_seconds=AGES,
            publish_timeout_seconds=scenario.publish_seconds,
            engine_threads_while_waiting=2,
            on_draw=self._on_draw,
            total_steps=scenario.steps,
            groups_per_step=scenario.groups_per_step,
            num_micro_batches=scenario.micro_batches,
            pad_token_id=0,
            advantage="grpo",
            std_ddof=1,
            mask_truncated=False,
            keep_groups=True,
            draw_timeout_seconds=scenario.draw_seconds,
            may_reject=not scenario.in_rounds,
        )
        self.data.trainer = self.trainer
        self._watch()
        if checkpoint is not None:
            observer.is_loading = True
            self.data.load_state_dict(copy.deepcopy(checkpoint[0]))
            observer.loaded_state()
        self.num_tokens_before = sum(self.data.ledger.tokens().values())
        self.sync = Sync(self)

    def run(self) -> str:
        """How it ended; raises `Killed` or a `Violation`."""
        try:
            ending = self._fit()
        except Exception as error:
            if isinstance(error, Violation):
                raise
            ending = self._explain(error)
            self.data.on_exception(error)
        if ending in ("finished", "data ended", "nothing to learn"):
            self._end(ending)
        self.data.close()
        self._nothing_left()
        return ending

    def _fit(self) -> str:
        self.sync.on_train_start(self.trainer, None)
        retries = 3
        while True:
            try:
                for batch in self.data.train_dataloader():
                    self._step(batch)
                break
            except DrawTimeoutError:
                self.observer.conserved()
                if not (retries := retries - 1):
                    raise
                self.observer.note("draw timed out, once more")
                self.observer.num_shed = 0
        done = self.trainer.global_step == self.scenario.steps
        return "finished" if done else "data ended"

    def _step(self, batch: Any) -> None:
        """What Lightning does with one micro-batch."""
        if batch.micro_batch_index == 0:
            self.observer.reported(batch, self._groups)
        self.world.sleep(self.rng.choice([0.0, 0.3, 2 * self.rng.random()]))
        if not batch.is_last:
            return
        observer, trainer = self.observer, self.trainer
        trainer.global_step += 1
        observer.books.version += 1
        if trainer.global_step % self.scenario.every_steps:
            observer.told = trainer.global_step
        self.sync.on_train_batch_end(trainer, None, None, batch, 0)
        observer.confirmed = observer.told
        observer.require(not observer.drawn, f"trained on {observer.drawn}, which are not settled")
        observer.conserved()
        if self.rng.random() < self.scenario.checkpoint:
            observer.note(f"checkpoint of version {trainer.global_step}")
            state = copy.deepcopy(self.data.state_dict())
            self.checkpoint = state, observer.at_checkpoint
        if self.rng.random() < self.scenario.evaluate:
            self._evaluate()

    def _evaluate(self) -> None:
        self.sync.on_validation_start(self.trainer, None)
        self.observer.note("evaluate")
        try:
            self.data.evaluate()
        except RuntimeError as error:
            if "could be scored" not in str(error):
                raise

    def _end(self, ending: str) -> None:
        observer, books = self.observer, self.observer.books
        self.data.end()
        observer.require(not books.out, f"{[*books.out]} never ended in a fate")
        counts = Counter(fate.value for fate in books.fates.values())
        observer.require(
            self.data.ledger.groups() == counts,
            f"the ledger says {self.data.ledger.groups()}, there were {dict(counts)}",
        )
        tokens = sum(self.data.ledger.tokens().values()) - self.num_tokens_before
        observer.require(
            tokens == observer.num_tokens or bool(self.data.worker._error),
            f"{observer.num_tokens} tokens were generated, {tokens} have a fate",
        )
        trained = books.version * self.scenario.groups_per_step
        observer.require(counts["trained"] == trained, f"{counts} after {books.version} steps")
        if ending == "data ended":
            assert self.scenario.epochs is not None
            total = self.scenario.epochs * self.scenario.num_prompts
            settled = len(books.fates)
            observer.require(settled == total, f"{settled} of {total} prompts have a fate")
            if self.scenario.clean:
                observer.require(
                    total - trained < self.scenario.groups_per_step,
                    f"trained on {trained} of {total} prompts, and nothing failed",
                )

    def _nothing_left(self) -> None:
        """After close: no task, no request, an engine that is closed and not paused."""
        observer = self.observer
        tasks = asyncio.all_tasks(self.world.loop)
        observer.require(not tasks, f"{len(tasks)} tasks are left")
        observer.require(not self.engine.live, f"{len(self.engine.live)} requests are left")
        started = self.data.worker._thread is not None
        observer.require(self.engine.closed or not started, "the engine is not closed")
        observer.require(not self.engine.left_paused, "the engine is left paused")
        observer.require(not self.data.worker.is_alive, "the rollout thread lives")

    def _explain(self, error: Exception) -> str:
        """The documented outcome that this error is; anything else is a violation."""
        scenario, text = self.scenario, str(error)
        known = {
            "nothing to learn": isinstance(error, NothingToLearnError) and scenario.equal_scores,
            "engine died": isinstance(error, EngineError) and scenario.fatal,
            "too many failures": "all failed or timed out" in text and scenario.request_fault,
            "draw timed out": isinstance(error, DrawTimeoutError) and scenario.draw_seconds < AGES,
            "publication timed out": isinstance(error, RolloutTimeoutError)
            and scenario.publish_seconds < AGES,
        }
        for name, holds in known.items():
            if holds:
                self.observer.note(f"{name}: {error}")
                return name
        raise self.world.violated(f"ended with {error!r}") from error

    def _watch(self) -> None:
        """Stand between pool, ledger and those who call them."""
        pool, ledger, observer = self.data.pool, self.data.ledger, self.observer
        observer.pool, observer.rollouts = pool, self.data.worker.rollouts
        self.world.at_rest = observer.at_rest
        put, settle = pool.put, ledger.settle

        def watched_put(group: TrajectoryGroup) -> None:
            observer.put(group)
            put(group)

        def watched_settle(uid: str, fate: Fate, *, num_tokens: int = 0) -> None:
            observer.settled(uid, fate, num_tokens)
            settle(uid, fate, num_tokens=num_tokens)

        pool.put = watched_put  # type: ignore[method-assign]
        ledger.settle = watched_settle  # type: ignore[method-assign]

    def _on_draw(self, version: int, groups: Sequence[TrajectoryGroup]) -> None:
        self._groups = list(groups)
        self.observer.draw(version, groups)


def run_process(
    rng: random.Random,
    scenario: Scenario,
    checkpoint: tuple[dict[str, Any], Books] | None,
    trace: list[str],
    *,
    kill_after_steps: int | None,
) -> tuple[str, Process | None]:
    """One process of a run: how it ended, and what it left."""
    world = World(rng, kill_after_steps=kill_after_steps)
    with simulated(world):
        process = None
        try:
            process = Process(world, scenario, rng, checkpoint, trace)
            ending = process.run()
        except Killed:
            ending = "killed"
        if world.violation is not None:
            raise world.violation
    if process and process.observer.num_continued:
        trace.append(f"          {process.observer.num_continued} groups were continued")
    trace.append(f"          {ending}")
    return ending, process


def simulate(seed: int, trace: list[str] | None = None) -> list[str]:
    """Run the schedule of this seed; how its processes ended.

    Raises:
        Violation: if an invariant does not hold.
    """
    rng = random.Random(seed)
    scenario = Scenario.choose(rng)
    trace = [] if trace is None else trace
    trace.append(f"seed {seed}: {scenario}")
    checkpoint: tuple[dict[str, Any], Books] | None = None
    endings: list[str] = []
    while len(endings) < 3:
        last = len(endings) == 2 or rng.random() < 0.4
        kill = None if last else int(600 * rng.random() ** 2)
        ending, process = run_process(rng, scenario, checkpoint, trace, kill_after_steps=kill)
        endings.append(ending)
        checkpoint = process.checkpoint if process else checkpoint
        if ending in ("finished", "data ended") or (last and rng.random() < 0.5):
            break
    return endings


def trained_prompts(
    seed: int, scenario: Scenario, kills: Sequence[int], trace: list[str]
) -> Counter[str]:
    """How often each prompt is trained on in a run that is killed so often, then ends by itself.

    Args:
        seed: of what happens beside the kills.
        scenario: what runs.
        kills: after so many callbacks of each process.
        trace: gets the story.
    """
    rng = random.Random(seed)
    checkpoint: tuple[dict[str, Any], Books] | None = None
    for kill in (*kills, None):
        ending, process = run_process(rng, scenario, checkpoint, trace, kill_after_steps=kill)
        checkpoint = process.checkpoint if process else checkpoint
        if ending != "killed":
            break
    assert process is not None
    fates = process.observer.books.fates
    return Counter(uid for uid, fate in fates.items() if fate is Fate.TRAINED)
