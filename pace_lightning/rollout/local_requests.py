"""What the local engine knows about its requests, and how it re-scores unfinished ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pace_lightning.core.logprobs import shared_prompt_logprobs
from pace_lightning.core.pace import PrefixRescore, rescore
from pace_lightning.core.trajectory import PolicyVersion
from pace_lightning.rollout.engine import Completion, Sampling

RESCORED_AT_ONCE = 64
"""Responses of one forward pass."""


@dataclass(slots=True)
class Response:
    """One response being generated, across resubmissions."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    offset: int = 0
    """Tokens that were generated before the present submission, and are part of its prompt."""
    rescores: list[PrefixRescore] = field(default_factory=list)
    completion: Completion | None = None


@dataclass(slots=True)
class Request:
    """The responses to one prompt."""

    prompt: list[int]
    sampling: Sampling
    responses: list[Response]
    finished: asyncio.Future[None]
    ids: dict[str, Response] = field(default_factory=dict)
    """Live request ids of the manager."""


@torch.no_grad()
def rescore_unfinished(model: Any, requests: Sequence[Request], *, pad_token_id: int) -> None:
    """Score the tokens that exist of each unfinished response under the model's present weights.

    One forward pass over prompts and prefixes, each distinct prompt computed once. Continuous
    batching returns no log-probs of the tokens it prefills, so this pass comes on top of the
    prefill that rebuilds the cache.

    Args:
        model: the engine's model, while nothing is generated.
        requests: all of them; finished responses and those without a token are left out.
        pad_token_id: fills rows.
    """
    for temperature in {request.sampling.temperature for request in requests}:
        rows = [
            (request.prompt, response)
            for request in requests
            if request.sampling.temperature == temperature
            for response in request.responses
            if response.completion is None and response.tokens
        ]
        rows.sort(key=lambda row: len(row[0]) + len(row[1].tokens))
        for start in range(0, len(rows), RESCORED_AT_ONCE):
            part = rows[start : start + RESCORED_AT_ONCE]
            _rescore_rows(model, part, temperature, pad_token_id)


def _rescore_rows(
    model: Any, rows: Sequence[tuple[list[int], Response]], temperature: float, pad_token_id: int
) -> None:
    width = max(len(prompt) + len(response.tokens) for prompt, response in rows)
    input_ids = torch.full((len(rows), width), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    sampled = torch.zeros(input_ids.shape, dtype=torch.bool)
    for index, (prompt, response) in enumerate(rows):
        tokens = [*prompt, *response.tokens]
        input_ids[index, : len(tokens)] = torch.tensor(tokens)
        attention_mask[index, : len(tokens)] = 1
        sampled[index, len(prompt) : len(tokens)] = True
    device = next(model.parameters()).device
    logprobs, _ = shared_prompt_logprobs(
        model,
        input_ids.to(device),
        attention_mask.to(device),
        sampled.to(device),
        torch.tensor([len(prompt) for prompt, _ in rows], device=device),
        temperature=temperature,
    )
    for index, (_, response) in enumerate(rows):
        new = logprobs[index][sampled[index].to(device)].clamp(max=0.0).tolist()
        response.rescores.append(rescore(response.logprobs, new))
