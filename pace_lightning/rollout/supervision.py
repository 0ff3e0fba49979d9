"""What is done when generation fails, is late, or the engine dies.

    a request fails     ask again, a bounded number of times (engine.max_retries)
    a group is late     end it, ask once more, or take what is finished (rollout.on_timeout)
    the engine dies     close it, start it at the version it had, and ask again for what was in
                        flight, a bounded number of times (engine.max_restarts)

Responses that are finished stay. Unfinished ones go on from the tokens they have, with the versions
and log-probs of those. Only a request that failed loses them, because nobody knows what is wrong
with it. Everything here runs in the rollout thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from pace_lightning.core.trajectory import PolicyVersion
from pace_lightning.rollout.engine import (
    Completion,
    EngineError,
    PartialResponse,
    RequestError,
    RolloutEngine,
    Sampling,
    WrongWeightsError,
)
from pace_lightning.rollout.publication import Leave, PublishReport, publish

log = logging.getLogger(__name__)
T = TypeVar("T")

_FIRST_RETRY_SECONDS = 0.05


class EngineLostError(EngineError):
    """The engine died more often than it may be restarted."""


class GroupTimeoutError(Exception):
    """A group passed its deadline, and too little of it is there."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How much may go wrong, and what then."""

    on_timeout: Literal["settle", "retry", "complete"] = "settle"
    """A group past its deadline: settle it, ask once more for what is missing, or use what is
    finished."""
    min_responses: int = 2
    """With ``complete``: fewer finished responses than this are not used."""
    max_retries: int = 0
    """Requests that may fail for one group."""
    max_restarts: int = 0
    """Of the engine, during the whole run."""


@dataclass(slots=True)
class Incidents:
    """What went wrong so far and was dealt with."""

    retried_requests: int = 0
    retried_stragglers: int = 0
    completed_stragglers: int = 0
    engine_restarts: int = 0


class Supervisor:
    """Stands between the worker and the engine.

    Args:
        engine: what generates.
        patience: how much may go wrong; None: nothing is tried twice.
        group_timeout_seconds: for the generation of one group, once more if it is asked again.
        say: told of what happens, for messages and the watchdog.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        patience: Patience | None = None,
        *,
        group_timeout_seconds: float,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._engine = engine
        self._patience = patience or Patience()
        self._group_timeout_seconds = group_timeout_seconds
        self.say = say
        self._clock: Callable[[], PolicyVersion] = lambda: 0
        self._has_weights = False
        self._kept: tuple[dict[str, Tensor], PolicyVersion] | None = None
        self._life = 0  # grows with each restart
        self._reviving: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        """Held by a publication and by a restart: either would pull the engine from the other."""
        self.incidents = Incidents()
        self.leave: Leave | None = None
        """Done in each publication."""

    async def start(self, clock: Callable[[], PolicyVersion]) -> None:
        """Start the engine; an error in that is the caller's."""
        self._clock = clock
        await self._engine.start(clock)

    async def close(self) -> None:
        """Close the engine. The tasks of the loop, a restart among them, were cancelled before."""
        await self._engine.close()

    async def generate_group(
        self,
        prompt: Sequence[int],
        *,
        n: int,
        sampling: Sampling,
        responses: list[PartialResponse],
        note: Callable[[str], None] = lambda _: None,
    ) -> list[Completion]:
        """The responses to one prompt within the deadline; fewer if ``complete`` allows it.

        Args:
            prompt: token ids.
            n: how many.
            sampling: how.
            responses: what exists of them; see `RolloutEngine.generate`.
            note: told of what happens.

        Raises:
            GroupTimeoutError: if it was late.
            RequestError: if it failed too often.
            EngineError: if the engine is gone for good.
        """
        patience, limit = self._patience, self._group_timeout_seconds
        attempts = 2 if patience.on_timeout == "retry" else 1
        for attempt in range(1, attempts + 1):
            try:
                async with asyncio.timeout(limit):
                    return await self.generate(prompt, n=n, sampling=sampling, responses=responses)
            except TimeoutError:
                finished = [r.completion() for r in responses if r.is_finished]
                if attempt < attempts:
                    self.incidents.retried_stragglers += 1
                    note(f"asked again after {limit} s, {len(finished)} of {n} finished")
        if patience.on_timeout == "complete" and len(finished) >= patience.min_responses:
            self.incidents.completed_stragglers += 1
            note(f"completed after {limit} s with {len(finished)} of {n} responses")
            return finished
        times = "" if attempts == 1 else ", twice"
        raise GroupTimeoutError(
            f"no result within {limit} s{times} (rollout.timeout_seconds, rollout.on_timeout); "
            f"{len(finished)} of {n} responses were finished"
        )

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        n: int,
        sampling: Sampling,
        responses: list[PartialResponse] | None = None,
    ) -> list[Completion]:
        """Like `RolloutEngine.generate`, but survives failed requests and deaths of the engine."""
        kept = [] if responses is None else responses

        async def ask() -> list[Completion]:
            answer = await self._engine.generate(prompt, n=n, sampling=sampling, responses=kept)
            if len(answer) != n:
                raise RequestError(f"asked for {n} responses, got {len(answer)}")
            return answer

        for retry in range(self._patience.max_retries):
            try:
                return await self._survive(ask)
            except RequestError as error:
                log.warning("a request failed and is asked again: %s", error)
                self.incidents.retried_requests += 1
                kept[:] = [r if r.is_finished else PartialResponse() for r in kept]
                await asyncio.sleep(_FIRST_RETRY_SECONDS * 2**retry)
        return await self._survive(ask)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Like `RolloutEngine.paused`; a dead engine is restarted first."""
        stack = AsyncExitStack()
        await self._survive(lambda: stack.enter_async_context(self._engine.paused()))
        done = False
        try:
            async with stack:
                yield
                done = True
        except EngineError as error:
            wrong = isinstance(error, WrongWeightsError)
            if not done or wrong or not self._patience.max_restarts:
                raise
            # whoever needs it next restarts it
            log.warning("the engine died at the end of a pause: %s", error)

    def is_restarting(self) -> bool:
        """Whether the engine is being started again, under deadlines of its own. Any thread."""
        return self._reviving is not None and not self._reviving.done()

    async def publish(
        self, weights: Mapping[str, Tensor], version: PolicyVersion, *, rescore: bool
    ) -> PublishReport:
        """Replace the engine's weights; see `publication.publish`.

        An engine that dies meanwhile is restarted and given the weights again, unless they are the
        first: then it has never worked, and its own error says why.
        """

        async def load() -> PublishReport:
            async with self._changing:
                report = await publish(
                    self._engine, weights, version, rescore=rescore, leave=self.leave
                )
                if self._patience.max_restarts and not self._engine.keeps_weights:
                    self._kept = await asyncio.to_thread(_copy, weights), version
                return report

        report = await (self._survive(load) if self._has_weights else load())
        self._has_weights = True
        return report

    async def _survive(self, action: Callable[[], Awaitable[T]]) -> T:
        """Do something with the engine; if it dies, restart it and do it again."""
        while True:
            if self._reviving is not None and self.is_restarting():
                await asyncio.shield(self._reviving)  # it may run already, with other weights
            life = self._life
            try:
                return await action()
            except EngineError as error:
                if not self._patience.max_restarts or isinstance(error, WrongWeightsError):
                    raise
                if life == self._life and not self.is_restarting():
                    self._reviving = asyncio.create_task(self._restart(error))
                if self._reviving is not None:
                    # shielded: the deadline of whoever noticed must not interrupt a restart
                    await asyncio.shield(self._reviving)

    async def _restart(self, error: EngineError) -> None:
        async with self._changing:
            await self._start_again(error)

    async def _start_again(self, error: EngineError) -> None:
        limit = self._patience.max_restarts
        while True:
            if self.incidents.engine_restarts >= limit:
                raise EngineLostError(
                    f"the engine died again after {limit} restarts (engine.max_restarts); the last "
                    f"error: {error}"
                ) from error
            self.incidents.engine_restarts += 1
            what = f"restart {self.incidents.engine_restarts} of {limit} of the engine: {error}"
            log.warning(what)
            self.say(what)
            try:
                await self._engine.close()
                await self._engine.start(self._clock)
                if self._kept is not None:
                    await publish(self._engine, *self._kept, rescore=False)
            except WrongWeightsError:
                raise
            except EngineError as again:
                error = again
            else:
                self._life += 1
                self.say("the engine is back")
                return


def _copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty_like(w, device="cpu").copy_(w) for name, w in weights.items()}
