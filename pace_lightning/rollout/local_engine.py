"""An engine in the trainer's process: transformers' continuous batching on its own weights.

How a request runs. The G responses to one prompt are one request that is forked after its prefill,
so that the prompt is computed once. Tokens are streamed to the event loop, where each is stamped
with the version of the weights that sampled it. Weights are copied in place while the generation
loop is parked between two steps.

KV cache of running sequences at a publication:

    recompute   cancel every running request and submit prompt + partial response again; the new
                prefill is made with the new weights (AReaL, arXiv:2505.24298)
    keep        go on with keys and values of the old weights (PipelineRL, arXiv:2509.19128)

No prefix cache is shared between requests, so none can outlive its weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pace_lightning.core.trajectory import PolicyVersion
from pace_lightning.rollout.engine import (
    Completion,
    EngineError,
    PartialResponse,
    RequestError,
    Sampling,
    check_room,
    fill,
    life_seed,
)
from pace_lightning.rollout.local_requests import (
    PAGE_TOKENS,
    Request,
    Submission,
    cache_blocks,
    served,
    unblock_after_cancellations,
)
from pace_lightning.rollout.local_rescoring import PrefillScorer, rescore_unfinished
from pace_lightning.rollout.weights import compare_manifest, copy_weights

_HEALTH_CHECK_SECONDS = 1.0


class LocalEngine:
    """Drives a `ContinuousBatchingManager`.

    Args:
        model: a causal LM that belongs to this engine alone, in the dtype to generate with.
        stop_token_ids: tokens that end a response.
        pad_token_id: any valid id.
        max_sequence_tokens: longest prompt plus response.
        max_running: sequences decoded at once.
        max_batch_tokens: tokens of one step, prefill and decode together.
        cache_tokens: size of the KV cache; None for ``max_running`` sequences of full length.
        recompute_cache: what to do with running sequences when weights change; see the header.
        temperatures: every temperature that will be asked for.
        num_threads: intra-op threads of a step on CPU; the attribute changes it at any time.
        seed: of the sampling; sets torch's global generator when the engine starts.
        startup_timeout_seconds: for `start`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stop_token_ids: Sequence[int],
        pad_token_id: int,
        max_sequence_tokens: int,
        max_running: int = 64,
        max_batch_tokens: int = 512,
        cache_tokens: int | None = None,
        recompute_cache: bool = True,
        temperatures: Iterable[float] = (1.0,),
        num_threads: int | None = None,
        seed: int = 0,
        startup_timeout_seconds: float = 120.0,
    ) -> None:
        self.num_threads = num_threads
        self.keeps_weights = True
        self._model: Any = model
        self._stop_token_ids = list(stop_token_ids)
        self._pad_token_id = pad_token_id
        self._max_sequence_tokens = max_sequence_tokens
        self._max_running = max_running
        self._max_batch_tokens = max_batch_tokens
        self._num_blocks = cache_blocks(max_sequence_tokens, max_running, cache_tokens)
        self._recompute_cache = recompute_cache
        self._temperatures = {served(t) for t in temperatures}
        self._seed = seed
        self._num_starts = 0
        self._startup_timeout_seconds = startup_timeout_seconds
        self._parameters = dict(model.named_parameters())
        self._manager: Any = None
        self._prefills = PrefillScorer(model, self._batch)
        self._rescore_seconds = 0.0
        self._clock: Callable[[], PolicyVersion] = lambda: 0
        self._version: PolicyVersion = 0
        self._requests: list[Request] = []
        self._serial = itertools.count()
        self._num_tokens = 0
        self._executor: ThreadPoolExecutor | None = None
        self._threads_in_use: int | None = None
        model.register_forward_pre_hook(self._apply_threads)

    @property
    def num_tokens_generated(self) -> int:
        """Tokens sampled since the start."""
        return self._num_tokens

    @property
    def rescore_seconds(self) -> float:
        """See `RolloutEngine.rescore_seconds`."""
        return self._rescore_seconds + self._prefills.seconds

    async def start(self, clock: Callable[[], PolicyVersion]) -> None:
        """See `RolloutEngine.start`."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self._clock = clock
        self._num_starts += 1
        default_temperature = next((t for t in sorted(self._temperatures) if t != 1.0), 1.0)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="local-engine-pause")
        self._manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=True,
                temperature=default_temperature,
                top_k=0,
                top_p=1.0,
                eos_token_id=self._stop_token_ids,
                pad_token_id=self._pad_token_id,
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=self._num_blocks,
                max_batch_tokens=self._max_batch_tokens,
                max_requests_per_batch=self._max_running,
                return_logprobs=True,
                seed=life_seed(self._seed, restarts=self._num_starts - 1),
                allow_block_sharing=False,
                use_async_batching=False,
                use_cuda_graph=False,
                per_request_processors=default_temperature != 1.0,
            ),
        )
        self._per_request_temperature = default_temperature != 1.0
        self._manager.start()
        limit = self._startup_timeout_seconds
        deadline = time.monotonic() + limit
        while self._manager.batch_processor is None:
            self._check_alive()
            if time.monotonic() > deadline:
                raise EngineError(f"not ready after {limit} s (engine.startup_timeout_seconds)")
            await asyncio.sleep(0.01)
        unblock_after_cancellations(self._manager.batch_processor.scheduler)

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        n: int,
        sampling: Sampling,
        responses: list[PartialResponse] | None = None,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        check_room(prompt, sampling, self._max_sequence_tokens)
        if served(sampling.temperature) not in self._temperatures:
            raise RequestError(
                f"temperature {sampling.temperature} was not announced to the engine; known: "
                f"{sorted(self._temperatures)}"
            )
        self._check_alive()
        request = Request(
            prompt=list(prompt),
            sampling=sampling,
            responses=fill(responses, n),
            finished=asyncio.get_running_loop().create_future(),
        )
        if not request.unfinished:
            request.finished.set_result(None)
        self._requests.append(request)
        try:
            self._submit(request)
            while not request.finished.done():
                await asyncio.wait([request.finished], timeout=_HEALTH_CHECK_SECONDS)
                if not request.finished.done():
                    self._check_alive()
            request.finished.result()
        finally:
            self._requests.remove(request)
            self._withdraw(request)
        return [response.completion() for response in request.responses]

    async def prepare_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `RolloutEngine.prepare_weights`. They are copied from where they are."""
        compare_manifest(self._parameters, weights)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """See `RolloutEngine.paused`. Waits for the engine's present step to end."""
        self._check_alive()
        loop = asyncio.get_running_loop()
        pause = self._manager.pause()
        # The pause belongs to a thread, so one does both; the loop stays free for tokens meanwhile.
        entered = loop.run_in_executor(self._executor, pause.__enter__)
        try:
            try:
                await asyncio.shield(entered)
            except RuntimeError as error:
                raise EngineError("the local engine's generation loop is gone") from error
            yield
        finally:
            with contextlib.suppress(Exception):
                await asyncio.shield(entered)
                await loop.run_in_executor(self._executor, pause.__exit__, None, None, None)

    async def load_weights(self, weights: Mapping[str, Tensor], *, version: PolicyVersion) -> None:
        """See `RolloutEngine.load_weights`."""
        compare_manifest(self._parameters, weights)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, copy_weights, self._parameters, weights)
        self._version = version
        # tokens of requests withdrawn since the last publication
        with contextlib.suppress(queue.Empty):
            while True:
                self._manager.output_router.output_queue.get_nowait()
        if self._recompute_cache:
            for request in self._requests:
                if not request.finished.done():
                    self._withdraw(request)
                    self._submit(request)

    async def verify_weights(self) -> None:
        """See `RolloutEngine.verify_weights`. Each tensor was compared when it was copied."""

    async def rescore_prefixes(self) -> None:
        """See `RolloutEngine.rescore_prefixes`.

        With a recomputed cache this only prepares the prefills that `load_weights` has submitted.
        """
        if self._recompute_cache:
            for request in self._requests:
                for request_id in request.ids:
                    self._prefills.expect(request, request_id)
        else:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._rescore)

    def describe(self) -> str:
        """See `RolloutEngine.describe`."""
        requests = list(self._requests)  # any thread may ask
        waiting = sum(len(request.unfinished) for request in requests)
        alive = self._manager is not None and self._manager.is_running()
        return (
            f"local engine {'running' if alive else 'stopped'} at version {self._version}, "
            f"{len(requests)} requests with {waiting} unfinished responses, "
            f"{self._num_tokens} tokens so far"
        )

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        manager, self._manager = self._manager, None
        executor, self._executor = self._executor, None
        for request in self._requests:
            request.fail(EngineError("the local engine was closed"))
        if manager is not None:
            stop = functools.partial(manager.stop, block=True, timeout=10.0, hard_stop=True)
            await asyncio.get_running_loop().run_in_executor(None, stop)
        if executor is not None:
            executor.shutdown(wait=False)

    def _rescore(self) -> None:
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        begin = time.perf_counter()
        rescore_unfinished(self._model, list(self._requests), pad_token_id=self._pad_token_id)
        self._rescore_seconds += time.perf_counter() - begin

    def _batch(self) -> Sequence[Any]:
        """The sequences of the present step, in packed order."""
        return self._manager.batch_processor.inputs_and_outputs.requests_in_batch

    def _apply_threads(self, *_: Any) -> None:
        """Runs in the generation thread before each step: intra-op threads are set per thread."""
        if self.num_threads is not None and self.num_threads != self._threads_in_use:
            torch.set_num_threads(self.num_threads)
            self._threads_in_use = self.num_threads

    def _check_alive(self) -> None:
        if self._manager is None:
            raise EngineError("the local engine is not started, or closed")
        if not self._manager.is_running():
            cause = self._manager.background_thread_status.fatal_error
            raise EngineError(f"the local engine's generation loop died: {cause}") from cause

    def _submit(self, request: Request) -> None:
        """Hand the unfinished responses to the manager, as one fork if none has a token yet."""
        unfinished = request.unfinished
        # A prompt of one token cannot be forked: that happens after its last token but one.
        begun = any(response.token_ids for response in unfinished)
        if begun or len(request.prompt) == 1:
            for response in unfinished:
                self._add(request, [response])
        elif unfinished:
            self._add(request, unfinished)

    def _add(self, request: Request, responses: Sequence[PartialResponse]) -> None:
        """Hand over responses with the same tokens, and the number that may follow."""
        tokens = responses[0].token_ids
        first = f"r{next(self._serial)}"
        # The manager names the forks of a request like this.
        ids = [first, *(f"{first}__child#{i}" for i in range(len(responses) - 1))]
        for request_id, response in zip(ids, responses, strict=True):
            request.ids[request_id] = Submission(response, len(tokens))
            if response.unscored:
                self._prefills.expect(request, request_id)
            self._manager.register_result_handler(
                request_id, functools.partial(self._receive, request, request_id)
            )
        self._manager.num_return_sequences = len(responses)
        temperature = served(request.sampling.temperature)
        options = {"temperature": temperature} if self._per_request_temperature else {}
        accepted = self._manager.add_request(
            request.prompt + tokens,
            request_id=first,
            max_new_tokens=request.sampling.max_new_tokens - len(tokens),
            streaming=True,
            **options,
        )
        if accepted is None:
            raise EngineError(
                "the local engine refused a request: "
                f"{self._manager.background_thread_status.can_accept_new_requests()}"
            )

    def _withdraw(self, request: Request) -> None:
        """Cancel what is still running of a request; tokens that are on their way are ignored."""
        processor = None if self._manager is None else self._manager.batch_processor
        for request_id, submission in request.ids.items():
            self._prefills.forget(request_id)
            if not submission.response.is_finished and processor is not None:
                # The first acts before the next step, the second on a request still in the queue.
                processor.scheduler.set_request_cancellation(request_id)
                self._manager.cancel_request(request_id)
                with self._manager.output_router._lock:
                    self._manager.output_router.result_handlers.pop(request_id, None)
        request.ids = {}

    def _receive(self, request: Request, request_id: str, output: Any) -> None:
        """Take over new tokens; runs in the event loop, once per token."""
        submission = request.ids.get(request_id)
        if submission is None or request.finished.done():
            return
        response, offset = submission.response, submission.offset
        if output.error is not None:
            request.finished.set_exception(self._failure(output.error))
            return
        new = output.generated_tokens[len(response.token_ids) - offset :]
        if len(output.logprobs) < len(output.generated_tokens):
            counts = len(output.generated_tokens), len(output.logprobs)
            request.fail(RequestError("{} tokens came with {} log-probs".format(*counts)))
            return
        if self._prefills.is_expecting(request_id):
            request.fail(RequestError("a token came before its prefix had been re-scored"))
            return
        response.token_ids += new
        response.logprobs += output.logprobs[len(response.logprobs) - offset :]
        response.versions += [self._version] * len(new)
        self._num_tokens += len(new)
        if output.is_finished():
            response.truncated = response.token_ids[-1] not in self._stop_token_ids
            response.completed_at = self._clock()
            if not request.unfinished:
                request.finished.set_result(None)

    def _failure(self, why: str) -> Exception:
        """What an error that the manager reports for one request says about the engine."""
        if self._manager is None:
            return EngineError("the local engine was closed")
        # A loop that is about to die fails all its requests first, and may still be alive now.
        if self._manager.background_thread_status.can_accept_new_requests() is not None:
            return EngineError(f"the local engine's generation loop died: {why}")
        return RequestError(f"generation failed: {why}")
