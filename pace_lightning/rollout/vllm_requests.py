"""What the vLLM engine knows about its requests, and how it reads what vLLM says about them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pace_lightning.core.pace import rescore
from pace_lightning.core.trajectory import PolicyVersion
from pace_lightning.rollout.engine import EngineError, PartialResponse, RequestError, Sampling


@dataclass(slots=True, eq=False)
class Response:
    """One response being generated, across submissions."""

    partial: PartialResponse
    offset: int = 0
    """Tokens that were there before the present submission, and are part of its prompt."""
    outputs: Any = None
    """Where vLLM puts what it generates for the present submission."""
    reader: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class Request:
    """The responses to one prompt."""

    prompt: list[int]
    sampling: Sampling
    responses: list[Response]
    finished: asyncio.Future[None]
    submitted: bool = False
    rescoring: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def unfinished(self) -> list[Response]:
        """The responses that are still being generated."""
        return [response for response in self.responses if not response.partial.is_finished]

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        if not self.finished.done():
            self.finished.set_exception(error)


def sampling_parameters(request: Request, response: Response, stop: Sequence[int]) -> Any:
    """What vLLM is asked to sample for the rest of a response."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.sampling.temperature,
        max_tokens=request.sampling.max_new_tokens - len(response.partial.token_ids),
        stop_token_ids=list(stop),
        ignore_eos=True,  # vLLM would take another from the model's configuration
        logprobs=0,
        prompt_logprobs=0 if response.partial.unscored else None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


async def score(llm: Any, tokens: Sequence[int], name: str) -> list[float]:
    """Log-probs of the tokens but the first, by vLLM's present weights, at temperature 1."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = [o async for o in llm.generate(tokens_input(list(tokens)), parameters, name)]
    return prompt_logprobs(outputs[-1], tokens)


def receive(
    request: Request, response: Response, output: Any, *, version: PolicyVersion, now: PolicyVersion
) -> int:
    """Take over one output of vLLM; returns the number of new tokens.

    Args:
        request: of the response.
        response: takes the tokens.
        output: with the tokens since the one before it.
        version: of the weights.
        now: the trainer's version.

    Raises:
        RequestError: if a log-prob is missing or not a number, or vLLM gave the request up.
        EngineError: if vLLM says that other weights sampled these tokens.
    """
    partial = response.partial
    if partial.unscored and output.prompt_logprobs:
        tokens = request.prompt + partial.token_ids[: response.offset]
        scores = prompt_logprobs(output, tokens)[len(request.prompt) - 1 :]
        partial.rescores.append(rescore(partial.logprobs[: response.offset], scores))
        partial.unscored = False
    new = output.outputs[0]
    logprobs = [
        position[token].logprob
        for token, position in zip(new.token_ids, new.logprobs or [], strict=False)
    ]
    if request.sampling.temperature == 0:
        logprobs = [0.0] * len(logprobs)  # the distribution that is sampled from has one point
    if len(logprobs) != len(new.token_ids) or not all(map(math.isfinite, logprobs)):
        raise RequestError(f"{len(new.token_ids)} tokens came with log-probs {logprobs}")
    partial.token_ids += new.token_ids
    # rounding can leave the log-prob of a certain token above 0
    partial.logprobs += [min(0.0, logprob) for logprob in logprobs]
    partial.versions += [version] * len(new.token_ids)
    if output.finished:
        if new.finish_reason not in ("stop", "length"):
            raise RequestError(f"vLLM ended a request: {new.finish_reason}")
        stamped = partial.versions[response.offset :]
        if (said := span_versions(new.weight_versions)) != stamped:
            partial.cut(response.offset)  # a restarted engine must not go on from them
            raise EngineError(
                f"a response was stamped with the versions {stamped} as its tokens arrived, but "
                f"vLLM says that the weights of {said} sampled them"
            )
        partial.truncated = new.finish_reason == "length"
        partial.completed_at = now
    return len(new.token_ids)


def span_versions(spans: Sequence[Any] | None) -> list[PolicyVersion]:
    """The version of each token, from vLLM's spans of output positions."""
    return [int(span.version) for span in spans or [] for _ in range(span.start, span.end)]


def prompt_logprobs(output: Any, tokens: Sequence[int]) -> list[float]:
    """Log-probs of the tokens of a prompt but the first, which nothing predicts.

    At temperature 1, whatever the sampling: vLLM scores prompts with the model's own distribution.
    """
    scored = output.prompt_logprobs[1:]
    return [
        min(0.0, position[token].logprob)
        for token, position in zip(tokens[1:], scored, strict=True)
    ]
