"""An engine in processes of its own: vLLM, on CPU or on GPUs.

vLLM's front (`AsyncLLM`) runs in the event loop of the rollout thread; the engine process behind it
(on several GPUs its workers) holds weights and caches. Token ids go in and come out; each response
is one request of vLLM, and its tokens are stamped with the version of the weights as they arrive.
When a response ends, the versions are compared with those that vLLM itself kept.

A publication (`paused`, `load_weights`, `verify_weights`, `rescore_prefixes`):

    prepare    write the weights to shared memory, and have the trainer score a probe
    pause      vLLM stops between two steps and freezes what is running
    load       vLLM reads the weights
    verify     vLLM scores the probe; the run ends if it does not say what the trainer says
    resume

KV cache of running sequences at a publication:

    recompute  take every running request back, load, and submit prompt + partial response again;
               one prefill rebuilds the cache and re-scores the prefix (AReaL, arXiv:2505.24298)
    keep       leave them frozen (PipelineRL, arXiv:2509.19128). vLLM cannot run a probe beside
               frozen requests, so it runs with them after the resume, and no response is handed
               out before its verdict. Prefixes are re-scored by requests of their own.

Prefixes are shared between requests under one version only: the cache is emptied at a publication
(recompute), or not used (keep).

On GPUs, vLLM's transfer engines send the weights and a checksum must change: not run yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from pace_lightning.core.pace import rescore
from pace_lightning.core.trajectory import PolicyVersion
from pace_lightning.rollout.engine import (
    Completion,
    EngineError,
    PartialResponse,
    Sampling,
    check_room,
    fill,
)
from pace_lightning.rollout.vllm_connection import Connection
from pace_lightning.rollout.vllm_probe import Probe
from pace_lightning.rollout.vllm_process import Launch
from pace_lightning.rollout.vllm_requests import Request, Response, receive, sampling_parameters
from pace_lightning.rollout.weights import compare_manifest

_HEALTH_CHECK_SECONDS = 1.0


class VLLMEngine:
    """Drives an `AsyncLLM`.

    Args:
        model: the trainer's causal LM, whole and without adapters.
        launch: how vLLM is to run.
        reference: log-probs of the tokens but the first of a sequence, by the trainer, under the
            weights that are being published, which it is given too; called from a thread.
        stop_token_ids: tokens that end a response.
        recompute_cache: what to do with running sequences when weights change; see the header.
        startup_timeout_seconds: for `start`.
        answer_timeout_seconds: for one answer of the engine process, and for the next token while
            requests are running.
    """

    def __init__(
        self,
        model: Any,
        launch: Launch,
        *,
        reference: Callable[[Sequence[int], Mapping[str, Tensor]], Sequence[float]],
        stop_token_ids: Sequence[int],
        recompute_cache: bool = True,
        startup_timeout_seconds: float = 120.0,
        answer_timeout_seconds: float = 120.0,
    ) -> None:
        self.num_threads: int | None = None  # bound to cores at the start
        self.keeps_weights = False
        launch = replace(launch, share_prefixes=recompute_cache)
        self._link = Connection(
            model,
            launch,
            startup_timeout_seconds=startup_timeout_seconds,
            answer_timeout_seconds=answer_timeout_seconds,
        )
        self._launch = launch
        self._reference = reference
        self._stop_token_ids = list(stop_token_ids)
        self._recompute_cache = recompute_cache
        self._answer_timeout_seconds = answer_timeout_seconds
        self._probe = Probe(model.config.vocab_size, launch.max_sequence_tokens, launch.dtype)
        self._clock: Callable[[], PolicyVersion] = lambda: 0
        self._version: PolicyVersion | None = None
        self._door: asyncio.Lock
        """Held while requests are submitted, and during a pause."""
        self._trusted: asyncio.Event
        """Set while the weights are known to be those of ``_version``."""
        self._requests: list[Request] = []
        self._num_tokens = 0
        self._last_heard = 0.0
        self._rescore_seconds = 0.0

    @property
    def num_tokens_generated(self) -> int:
        """Tokens sampled since the start."""
        return self._num_tokens

    @property
    def rescore_seconds(self) -> float:
        """See `RolloutEngine.rescore_seconds`.

        With a recomputed cache, the prefill that rebuilds it gives the scores, at a cost that vLLM
        does not tell apart; with a kept one, this is the time from asking to scores.
        """
        return self._rescore_seconds

    async def start(self, clock: Callable[[], PolicyVersion]) -> None:
        """See `RolloutEngine.start`. Serves noise until the first publication."""
        self._clock = clock
        self._door, self._trusted = asyncio.Lock(), asyncio.Event()
        self._version = None  # also if it is started again: it serves noise
        self._probe.forget()
        await self._link.start()

    # --- generation -------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        n: int,
        sampling: Sampling,
        responses: list[PartialResponse] | None = None,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        check_room(prompt, sampling, self._launch.max_sequence_tokens)
        self._link.check_alive()
        request = Request(
            prompt=list(prompt),
            sampling=sampling,
            responses=[Response(partial) for partial in fill(responses, n)],
            finished=asyncio.get_running_loop().create_future(),
        )
        if not request.unfinished:
            request.finished.set_result(None)
        self._requests.append(request)
        try:
            async with self._door:  # one that comes during a pause is submitted at its end
                if not request.submitted:
                    self._link.check_alive()
                    await self._submit(request)
            while not request.finished.done():
                await asyncio.wait([request.finished], timeout=_HEALTH_CHECK_SECONDS)
                if not request.finished.done():
                    self._link.check_alive()
                    self._check_heard()
            request.finished.result()
            while not self._trusted.is_set():
                self._link.check_alive()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._trusted.wait(), _HEALTH_CHECK_SECONDS)
            await asyncio.gather(*request.rescoring)
        finally:
            self._requests.remove(request)
            for task in request.rescoring:
                task.cancel()
            await self._withdraw([request])
        return [response.partial.completion() for response in request.responses]

    async def _submit(self, request: Request) -> None:
        """Give vLLM what is unfinished of a request, each response with the tokens it has."""
        from vllm.inputs import tokens_input

        if self._version is None:
            raise EngineError("no weights were published to vLLM yet")
        request.submitted = True
        self._last_heard = time.monotonic()
        for response in request.unfinished:
            response.offset = len(response.partial.token_ids)
            try:
                response.outputs = await self._link.llm.add_request(
                    self._link.name(),
                    tokens_input(request.prompt + response.partial.token_ids),
                    sampling_parameters(request, response, self._stop_token_ids),
                )
            except Exception as error:
                request.fail(self._link.failure(error, "a request"))
                return
            response.reader = asyncio.create_task(self._read(request, response))

    async def _read(self, request: Request, response: Response) -> None:
        """Take over what arrives for one response, until it is finished."""
        try:
            while not response.partial.is_finished:
                output = response.outputs.get_nowait() or await response.outputs.get()
                self._receive(request, response, output)
        except Exception as error:
            request.fail(self._link.failure(error, "generation"))

    def _receive(self, request: Request, response: Response, output: Any) -> None:
        assert self._version is not None
        self._last_heard = time.monotonic()
        self._num_tokens += receive(
            request, response, output, version=self._version, now=self._clock()
        )
        if not request.unfinished and not request.finished.done():
            request.finished.set_result(None)

    async def _withdraw(self, requests: Sequence[Request]) -> None:
        """Take requests back, in one call of the engine; what has arrived of them stays."""
        ids = [name for request in requests for name in self._stop_reading(request)]
        if ids and self._link.llm is not None and not self._link.llm.errored:
            with contextlib.suppress(EngineError):  # dead: whoever waits for it hears of it
                await self._link.answer(
                    self._link.llm.abort(ids, internal=True), "taking requests back"
                )

    def _stop_reading(self, request: Request) -> list[str]:
        """Take over what has arrived of a request; vLLM's names of the responses that it runs."""
        names = []
        for response in request.unfinished:
            if response.reader is None:
                continue
            response.reader.cancel()
            response.reader = None
            names.append(response.outputs.request_id)
            if request.finished.done():
                continue
            try:
                while output := response.outputs.get_nowait():
                    self._receive(request, response, output)
            except Exception as error:
                request.fail(self._link.failure(error, "generation"))
        return names

    # --- publication ------------------------------------------------------------------------------

    async def prepare_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `RolloutEngine.prepare_weights`."""
        self._link.check_alive()
        compare_manifest(self._link.serving.parameters, weights)
        tokens = self._probe.tokens
        self._probe.expected = list(await asyncio.to_thread(self._reference, tokens, weights))
        if self._link.sender is None:
            await asyncio.to_thread(self._link.serving.write, weights)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """See `RolloutEngine.paused`."""
        self._link.check_alive()
        async with self._door:
            try:
                await self._link.freeze()
                yield
            except BaseException:
                with contextlib.suppress(EngineError):  # the first error says more
                    await self._resume()
                raise
            await self._resume()

    async def load_weights(self, weights: Mapping[str, Tensor], *, version: PolicyVersion) -> None:
        """See `RolloutEngine.load_weights`."""
        if self._probe.expected is None:
            await self.prepare_weights(weights)
        self._probe.recall(version)
        if self._recompute_cache:
            requests = list(self._requests)
            await self._withdraw(requests)
            for request in requests:
                request.submitted = False
        self._trusted.clear()
        try:
            if self._link.sender is None:
                load = self._link.llm.collective_rpc(
                    "reload_weights", kwargs={"weights_path": str(self._link.serving.path)}
                )
                await self._link.answer(load, "loading weights")
            else:
                await self._link.sender.send(self._link.serving.checkpoint(weights))
            if self._recompute_cache:
                emptied = await self._link.answer(
                    self._link.llm.reset_prefix_cache(), "emptying the prefix cache"
                )
                if not emptied:
                    raise EngineError("vLLM did not empty its prefix cache for the new weights")
            await self._link.answer(
                self._link.llm.update_weight_version(str(version)), "naming a version"
            )
        except EngineError as error:
            self._link.fatal = error  # nobody knows which weights it has now
            raise
        self._version = version

    async def verify_weights(self) -> None:
        """See `RolloutEngine.verify_weights`.

        With a kept cache, the end of the pause does it. With a recomputed one nothing but the probe
        can run here: requests were taken back, and the door is held.
        """
        if self._recompute_cache:
            await self._link.thaw()
            await self._verify()

    async def _verify(self) -> None:
        try:
            scores = await self._link.answer(
                self._link.score(self._probe.tokens), "scoring the probe"
            )
            sums = None
            if self._launch.devices:
                work = self._link.llm.compute_weight_checksums()
                sums = await self._link.answer(work, "checksums")
            self._probe.check(scores, self._version, sums)
        except EngineError as error:
            self._link.fatal = error
            raise
        self._trusted.set()

    async def rescore_prefixes(self) -> None:
        """See `RolloutEngine.rescore_prefixes`.

        With a recomputed cache, the prefill that rebuilds it gives the scores, after the pause.
        """
        for request in self._requests:
            begun = [response for response in request.unfinished if response.partial.token_ids]
            if begun and request.sampling.temperature != 1:
                raise EngineError(
                    "vLLM scores prefixes at temperature 1, but a request is sampled at "
                    f"{request.sampling.temperature}; set it to 1, or use engine.kind local"
                )
            for response in begun:
                response.partial.unscored = True
                if not self._recompute_cache:
                    task = asyncio.create_task(self._rescore(request, response))
                    request.rescoring.append(task)

    async def _rescore(self, request: Request, response: Response) -> None:
        start = time.monotonic()
        partial = response.partial
        behavior = list(partial.logprobs)
        tokens = request.prompt + partial.token_ids
        try:
            scores = await self._link.score(tokens)
        except Exception as error:
            raise self._link.failure(error, "re-scoring a prefix") from error
        partial.rescores.append(rescore(behavior, scores[len(request.prompt) - 1 :]))
        partial.unscored = False
        self._rescore_seconds += time.monotonic() - start

    async def _resume(self) -> None:
        """Let tokens flow, also after an error; not with weights that are known to be wrong."""
        if self._link.llm is None or self._link.llm.errored:
            return
        try:
            if self._link.fatal is None:
                for request in list(self._requests):
                    if not request.submitted:
                        await self._submit(request)
        finally:
            await self._link.thaw()
            self._last_heard = time.monotonic()
        await asyncio.to_thread(self._link.serving.clear)
        if self._link.fatal is None and self._version is not None and not self._trusted.is_set():
            await self._verify()

    # --- life -------------------------------------------------------------------------------------

    def describe(self) -> str:
        """See `RolloutEngine.describe`."""
        requests = list(self._requests)  # any thread may ask
        waiting = sum(len(request.unfinished) for request in requests)
        return (
            f"{self._link.describe()} at version {self._version}, {len(requests)} requests with "
            f"{waiting} unfinished responses, {self._num_tokens} tokens so far"
        )

    def pids(self) -> list[int]:
        """The engine's processes."""
        return self._link.pids()

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        for request in self._requests:
            request.fail(EngineError("the vLLM engine was closed"))
        await self._link.close()

    def _check_heard(self) -> None:
        silent = time.monotonic() - self._last_heard
        if silent > self._answer_timeout_seconds and not self._door.locked():
            raise EngineError(f"vLLM has returned no token for {silent:.0f} s: {self.describe()}")
