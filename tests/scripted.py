"""A rollout side without a model: an engine that follows a script, and makers of core objects.

Nothing here sleeps. A test waits for a state with `ScriptedEngine.until` or at a `Gate`, each with
a deadline, and decides itself when a request finishes.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager

from torch import Tensor

from pace_lightning.core.trajectory import EndOfData, Prompt, Trajectory, TrajectoryGroup
from pace_lightning.rollout.engine import (
    Completion,
    EngineError,
    PartialResponse,
    Sampling,
    WrongWeightsError,
    fill,
)

DEADLINE_SECONDS = 10.0
TOKENS_PER_VERSION = 2
"""Tokens that each response gets under each version it lives through."""

FINISH, HOLD, NEVER, NAN, STRAGGLE = "finish", "hold", "never", "nan", "straggle"
"""What may happen to a request, besides an exception to raise: end by itself, wait for
`Request.finish`, ignore even that, end with a log-prob that is not a number, or finish all
responses but the last."""


# --- makers of core objects -----------------------------------------------------------------------


def make_prompt(uid: object = "0", token_ids: Sequence[int] | None = None) -> Prompt:
    """A prompt whose token ids follow from its uid, unless they are given."""
    name = str(uid)
    ids = tuple(token_ids) if token_ids is not None else (7, zlib.crc32(name.encode()) % 10_000)
    return Prompt(uid=name, token_ids=ids, content=f"prompt {name}")


def make_trajectory(
    versions: Sequence[int] = (0, 0), *, completed_at: int | None = None, score: float = 1.0
) -> Trajectory:
    """A trajectory with one token per version."""
    return Trajectory(
        token_ids=tuple(range(len(versions))),
        token_versions=tuple(versions),
        behavior_logprobs=(-0.5,) * len(versions),
        completed_at=max(versions) if completed_at is None else completed_at,
        reward=score,
        score=score,
        truncated=False,
    )


def make_group(
    uid: object = "0",
    *,
    versions: Sequence[int] = (0, 0),
    completed_at: int | None = None,
    scores: Sequence[float] = (0.0, 1.0),
) -> TrajectoryGroup:
    """A group with one trajectory per score, all with the same versions."""
    return TrajectoryGroup(
        prompt=make_prompt(uid),
        trajectories=tuple(
            make_trajectory(versions, completed_at=completed_at, score=score) for score in scores
        ),
    )


class ListPrompts:
    """Leases the given prompts in order, then ends; ``None`` stands for an endless supply."""

    def __init__(self, prompts: Sequence[Prompt] | None = None) -> None:
        self._source = map(make_prompt, itertools.count()) if prompts is None else iter(prompts)
        self.leased: list[str] = []

    def lease(self) -> Prompt:
        """The next prompt."""
        prompt = next(self._source, None)
        if prompt is None:
            raise EndOfData
        self.leased.append(prompt.uid)
        return prompt


async def score_mixed(prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
    """1 for the first response, 0 for the others: every group has a gradient."""
    return [float(index == 0) for index, _ in enumerate(completions)]


def score_equal(score: float) -> Callable[[Prompt, Sequence[Completion]], Awaitable[list[float]]]:
    """The same score for each response: no group has a gradient."""

    async def scorer(prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        return [score for _ in completions]

    return scorer


# --- the engine -----------------------------------------------------------------------------------


class Gate:
    """Where the rollout thread stops until a test lets it through. Made open; `shut` to use it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened: Future[None] = Future()
        self._opened.set_result(None)

    def shut(self) -> Gate:
        """Stop whoever comes."""
        self._opened = Future()
        self.reached.clear()
        return self

    def open(self) -> None:
        """Let pass. Any thread, any number of times."""
        if not self._opened.done():
            self._opened.set_result(None)

    def await_reached(self) -> None:
        """Wait, in the test, until someone has come."""
        assert self.reached.wait(DEADLINE_SECONDS), "nobody came to the gate"

    async def pass_through(self) -> None:
        """Wait, in the rollout loop, until the gate is open; may be cancelled."""
        self.reached.set()
        await asyncio.shield(asyncio.wrap_future(self._opened))


class Request:
    """One call of `ScriptedEngine.generate`."""

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        responses: list[PartialResponse],
        sampling: Sampling,
        version: int,
    ) -> None:
        self.number = number
        """1 for the first call."""
        self.prompt = tuple(prompt)
        self.responses = responses
        self.continued = [len(response.token_ids) for response in responses]
        """Tokens that were there before."""
        self.n = len(self.unfinished)
        """Responses asked for."""
        self.sampling = sampling
        self.versions = [version]
        """Versions it has lived through."""
        self.while_paused = False
        """Whether it was submitted while the engine was paused."""
        self.cancelled = False
        self._end: Future[str | BaseException] = Future()

    @property
    def unfinished(self) -> list[tuple[int, PartialResponse]]:
        """What is still generated, each with its number."""
        return [(i, r) for i, r in enumerate(self.responses) if not r.is_finished]

    def finish(self, how: str | BaseException = FINISH) -> None:
        """End a held request: with its responses, with NaN, or with an exception. Any thread."""
        if not self._end.done():
            self._end.set_result(how)

    async def ended(self) -> str | BaseException:
        """How the test ended it."""
        return await asyncio.shield(asyncio.wrap_future(self._end))


def scripted_tokens(prompt: Sequence[int], version: int, sample: int) -> list[int]:
    """What a response samples while the weights have this version: a pure function."""
    return [
        zlib.crc32(repr((tuple(prompt), version, sample, t)).encode()) % 1000
        for t in range(TOKENS_PER_VERSION)
    ]


def scripted_logprob(token: int) -> float:
    """The log-prob of a scripted token."""
    return -(1 + token % 7) / 8


class ScriptedEngine:
    """A `RolloutEngine` that follows a script.

    Args:
        script: what happens to the request with this number, 1 for the first; else ``default``.
        default: what happens to all others; see `FINISH`.
    """

    def __init__(
        self,
        script: Mapping[int, str | BaseException] | None = None,
        *,
        default: str | BaseException = FINISH,
    ) -> None:
        self.script = dict(script or {})
        self.default = default
        self.num_threads: int | None = 1
        self.keeps_weights = False
        self.num_tokens_generated = 0
        self.rescore_seconds = 0.0
        self.changed = threading.Condition()
        self.requests: list[Request] = []
        self.live: list[Request] = []
        """Submitted and not yet ended, in the order of submission."""
        self.weights: list[tuple[int, dict[str, Tensor]]] = []
        """``(version, copy of what was loaded)`` of each load."""
        self.load_error: BaseException | None = None
        self.lost: set[str] = set()
        """Tensors that a load leaves as they were, without saying so."""
        self.fatal: BaseException | None = None
        """Why nothing can be asked of the engine any more."""
        self.start_error: BaseException | None = None
        self.start_gate = Gate()
        self.pause_gate = Gate()
        self.load_gate = Gate()
        self.verify_gate = Gate()
        self.close_gate = Gate()
        self.num_pauses = 0
        self.pause_depth = 0
        self.closed = False
        self.num_closes = 0
        self.num_starts = 0
        self._dead: Future[EngineError] = Future()
        self._version = 0
        self._clock: Callable[[], int] = lambda: 0
        self._running: asyncio.Event | None = None
        self._sent: dict[str, Tensor] = {}

    # what a test calls

    def die(self, error: BaseException) -> None:
        """End every request with this error, and raise it from whatever is asked. Any thread."""
        self.fatal = error
        for request in list(self.live):
            request.finish(error)

    def until(self, predicate: Callable[[], object], what: str) -> None:
        """Wait until the predicate holds; it is asked whenever something happens in the engine."""
        with self.changed:
            assert self.changed.wait_for(predicate, DEADLINE_SECONDS), f"never happened: {what}"

    def await_live(self, count: int) -> list[Request]:
        """Wait until exactly so many requests are live."""
        self.until(lambda: len(self.live) == count, f"{count} live requests")
        return list(self.live)

    def await_requests(self, count: int) -> list[Request]:
        """Wait until so many requests have been submitted in all."""
        self.until(lambda: len(self.requests) >= count, f"{count} requests")
        return list(self.requests)

    def notify(self) -> None:
        """Something happened: look at the predicates again."""
        with self.changed:
            self.changed.notify_all()

    @property
    def left_paused(self) -> bool:
        """Whether someone paused and did not resume."""
        return self.pause_depth > 0

    # what the worker calls

    async def start(self, clock: Callable[[], int]) -> None:
        """Become ready, unless the script says otherwise."""
        self.num_starts += 1
        await self.start_gate.pass_through()
        if self.start_error is not None:
            raise self.start_error
        self._clock = clock
        self._dead, self.closed, self.fatal = Future(), False, None
        if self.num_starts > 1:
            self._version = -1  # until weights are loaded again
        self._running = asyncio.Event()
        self._running.set()

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        n: int,
        sampling: Sampling,
        responses: list[PartialResponse] | None = None,
    ) -> list[Completion]:
        """Submit a request and wait for the end that the script gives it."""
        assert self._running is not None
        if self._dead.done():
            raise self._dead.result()
        self._check_alive()
        responses = fill(responses, n)
        if all(response.is_finished for response in responses):
            return [response.completion() for response in responses]
        request = Request(len(self.requests) + 1, prompt, responses, sampling, self._version)
        request.while_paused = self.left_paused
        self.requests.append(request)
        self.live.append(request)
        self.notify()
        how = self.script.get(request.number, self.default)
        try:
            if how == HOLD:
                how = await request.ended()
            elif how in (NEVER, STRAGGLE):
                raise await asyncio.shield(asyncio.wrap_future(self._dead))
            if isinstance(how, BaseException):
                raise how
            await self._running.wait()  # no token flows while paused
            self._check_alive()  # nor one of weights that are known to be wrong
            self._complete(request, request.unfinished)
            if how == NAN:
                responses[-1].logprobs[-1] = float("nan")
            return [response.completion() for response in responses]
        except BaseException as error:
            request.cancelled = isinstance(error, asyncio.CancelledError)
            if how == STRAGGLE:
                self._complete(request, request.unfinished[:-1])
            raise
        finally:
            self.live.remove(request)
            self.notify()

    def _complete(self, request: Request, responses: list[tuple[int, PartialResponse]]) -> None:
        """Give these responses their last tokens."""
        self._sample(request, responses)
        for _, response in responses:
            response.completed_at = self._clock()

    def _sample(self, request: Request, responses: list[tuple[int, PartialResponse]]) -> None:
        """Give these responses the tokens of the present version."""
        for sample, response in responses:
            tokens = scripted_tokens(request.prompt, self._version, sample)
            response.token_ids += tokens
            response.logprobs += map(scripted_logprob, tokens)
            response.versions += [self._version] * len(tokens)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Hold back all ends of requests."""
        assert self._running is not None
        await self.pause_gate.pass_through()
        self._check_alive()
        self.num_pauses += 1
        self.pause_depth += 1
        self._running.clear()
        try:
            yield
        finally:
            self.pause_depth -= 1
            if self.pause_depth == 0:
                self._running.set()
            self.notify()

    async def load_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Remember a copy of the weights, or raise what the script says."""
        await self.load_gate.pass_through()
        if not self.left_paused:
            raise EngineError("weights were loaded without a pause")
        self._check_alive()
        if self.load_error is not None:
            raise self.load_error
        self._sent = {name: weight.clone() for name, weight in weights.items()}
        held = self.weights[-1][1] if self.weights else {}
        kept = {name: held[name] for name in self.lost & held.keys()}
        self.weights.append((version, self._sent | kept))
        for request in self.live:
            longest = max(len(response.token_ids) for response in request.responses)
            if longest + 2 * TOKENS_PER_VERSION <= request.sampling.max_new_tokens:
                self._sample(request, request.unfinished)
            request.versions.append(version)
        self._version = version
        self.notify()

    async def prepare_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Nothing to prepare."""

    async def verify_weights(self) -> None:
        """Compare what is held with what was sent; an engine that holds anything else is lost."""
        await self.verify_gate.pass_through()
        self._check_alive()
        version, held = self.weights[-1]
        if wrong := [name for name in self._sent if not held[name].equal(self._sent[name])]:
            error = WrongWeightsError(f"{wrong} of version {version} did not arrive")
            self.die(error)
            raise error

    async def rescore_prefixes(self) -> None:
        """Its log-probs do not depend on weights: nothing has drifted."""

    def _check_alive(self) -> None:
        if self.fatal is not None:
            raise self.fatal

    def describe(self) -> str:
        """One line."""
        return f"scripted engine with {len(self.live)} live requests"

    async def close(self) -> None:
        """Remember it."""
        self.num_closes += 1
        if not self._dead.done():
            self._dead.set_result(EngineError("the scripted engine was closed"))
        for request in self.live:
            request.finish(EngineError("the scripted engine was closed"))
        self.notify()
        await self.close_gate.pass_through()
        self.closed = True
        self.notify()
