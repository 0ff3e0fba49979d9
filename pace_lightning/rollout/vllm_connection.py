"""vLLM's front, the processes behind it, and the directory they load from, as one thing that lives.

Every answer has a deadline, and every error says whether the engine or one request is to blame.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pace_lightning.rollout.engine import EngineError, RequestError, life_seed
from pace_lightning.rollout.vllm_process import EngineProcess, Launch, environment, make_front
from pace_lightning.rollout.vllm_requests import score
from pace_lightning.rollout.vllm_weights import ServingDirectory, served_model

T = TypeVar("T")

_HEALTH_CHECK_SECONDS = 1.0


class Connection:
    """A running vLLM, from `start` to `close`.

    Args:
        model: the trainer's causal LM, whole and without adapters.
        launch: how vLLM is to run.
        startup_timeout_seconds: for `start`.
        answer_timeout_seconds: for one answer of the engine process.
    """

    def __init__(
        self,
        model: Any,
        launch: Launch,
        *,
        startup_timeout_seconds: float,
        answer_timeout_seconds: float,
    ) -> None:
        self.llm: Any = None
        """The front, an `AsyncLLM`; None before the start and after the end."""
        self.serving: ServingDirectory
        self.sender: Any = None
        """A `WeightSender`, if weights do not go through the directory."""
        self.fatal: EngineError | None = None
        """Why the engine must not be used any more."""
        self._served = served_model(model, with_scales=launch.transfer == "file")
        self._launch = launch
        self._num_starts = 0
        self._startup_timeout_seconds = startup_timeout_seconds
        self._answer_timeout_seconds = answer_timeout_seconds
        self._process: EngineProcess | None = None
        self._serial = itertools.count()
        self._frozen = False

    async def start(self) -> None:
        """Start vLLM on noise.

        Raises:
            EngineError: if it cannot be started, or not in time.
        """
        launch = replace(self._launch, seed=life_seed(self._launch.seed, restarts=self._num_starts))
        self._num_starts += 1
        self.fatal, self.sender, self._frozen = None, None, False
        self.serving = ServingDirectory(self._served, launch.dtype)
        path = str(self.serving.path)
        self._process = EngineProcess(
            functools.partial(make_front, path, self._served.model.config, launch),
            environment(path, () if launch.devices else launch.cores),
        )
        if launch.transfer == "file":
            await asyncio.to_thread(self.serving.write_noise)
        self.llm = await self._process.start(self._startup_timeout_seconds)
        self.serving.clear()
        if launch.transfer != "file":
            from pace_lightning.rollout.vllm_transfer import WeightSender

            self.sender = WeightSender(
                self.llm,
                asyncio.get_running_loop(),
                backend=launch.transfer,
                num_workers=len(launch.devices),
                timeout_seconds=self._answer_timeout_seconds,
            )

    def name(self) -> str:
        """A name for a new request."""
        return f"r{next(self._serial)}"

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of the tokens but the first under the present weights, at temperature 1."""
        return await score(self.llm, tokens, self.name())

    async def freeze(self) -> None:
        """Stop generation between two steps; what is running stays as it is."""
        self._frozen = True
        pausing = self.llm.pause_generation(mode="keep", clear_cache=False)
        await self.answer(pausing, "pausing")

    async def thaw(self) -> None:
        """Let generation go on, if it was stopped."""
        if self._frozen:
            await self.answer(self.llm.resume_generation(), "resuming")
            self._frozen = False

    async def answer(self, work: Awaitable[T], what: str) -> T:
        """Wait for the engine process, not longer than the deadline.

        Raises:
            EngineError: if it does not answer, or not as it should.
        """
        task, llm = asyncio.ensure_future(work), self.llm
        deadline = time.monotonic() + self._answer_timeout_seconds
        try:
            while not task.done():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise EngineError(
                        f"vLLM did not answer within {self._answer_timeout_seconds} s: {what} "
                        "(engine.publish_timeout_seconds)"
                    )
                await asyncio.wait([task], timeout=min(left, _HEALTH_CHECK_SECONDS))
                self._check_process()  # a dead one never answers
                if self.llm is not llm:
                    raise EngineError(f"vLLM was closed meanwhile: {what}")
            return task.result()
        except Exception as error:
            raise self.failure(error, what, alive=EngineError) from error
        finally:
            task.cancel()

    def failure(
        self, error: Exception, what: str, *, alive: type[Exception] = RequestError
    ) -> Exception:
        """What an error says about the engine: a dead one is never just a failed request."""
        if isinstance(error, EngineError | RequestError):
            return error
        try:
            self.check_alive()
        except EngineError as dead:
            return dead
        return alive(f"{what} failed: {type(error).__name__}: {error}")

    def check_alive(self) -> None:
        """Raise an `EngineError` if the engine cannot be used."""
        if self.fatal is not None:
            raise self.fatal
        if self.llm is None:
            raise EngineError("vLLM is not started, or closed")
        self._check_process()

    def _check_process(self) -> None:
        if self.llm is not None and self.llm.errored:
            codes = [] if self._process is None else self._process.exit_codes()
            raise EngineError(f"the vLLM engine process died (exit codes {codes})")

    def pids(self) -> list[int]:
        """The engine's processes."""
        return [] if self._process is None else self._process.pids()

    def describe(self) -> str:
        """A few words for messages. Any thread may ask."""
        launch, llm, process = self._launch, self.llm, self._process
        where = f"GPUs {launch.devices}" if launch.devices else f"cores {launch.cores}"
        if process is None:
            state = "stopped"
        elif llm is None:
            state = "starting"
        else:
            state = "dead" if llm.errored else "running"
        return f"vLLM {state} on {where}"

    async def close(self) -> None:
        """End all processes and remove the directory."""
        process, self._process = self._process, None
        self.llm = None
        if process is not None:
            await process.close()
            self.serving.remove()
