"""Log-probs of what unfinished responses consist of, under the weights of a publication.

Notation, for one response:

    P, S    tokens of its prompt; tokens of the response that exist at the publication
    Q, H    positions that one step of the engine computes, of all its sequences together; hidden
            size
    l_t     log-prob of response token t under the new weights, predicted at position P + t - 1

Two ways, by what happens to the KV cache at a publication:

    recompute   the prefill that rebuilds the cache computes the hidden states of all P + S
                positions. Continuous batching applies the output head to the last one only;
                `PrefillScorer` applies it to the S that predict the response (PACE,
                arXiv:2609.36830, section 3: re-scoring shares that prefill)
    keep        nothing is prefilled, so `rescore_unfinished` makes a forward pass of its own
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pace_lightning.core.logprobs import shared_prompt_logprobs
from pace_lightning.core.pace import rescore
from pace_lightning.rollout.engine import PartialResponse, RequestError
from pace_lightning.rollout.local_requests import Request, served

ROWS_AT_ONCE = 1024
"""Positions whose vocabulary row is held in memory at once."""

RESCORED_AT_ONCE = 64
"""Responses of one forward pass of `rescore_unfinished`."""


@dataclass(slots=True)
class _Prefix:
    """An unfinished response whose prefill is on its way."""

    request: Request
    response: PartialResponse
    tokens: list[int]
    """Those that exist now, shape ``(S,)``; the next ones are sampled under the new weights."""
    logprobs: list[float] = field(default_factory=list)
    """``l_t``, as far as the prefill has come."""


class PrefillScorer:
    """Takes log-probs out of prefills, with a hook on the model's hidden states.

    A prefill may be split over steps, and begin again if the cache is full. The hook runs in the
    generation thread; what it finds is there before the response's next token is sampled.

    Args:
        model: the engine's causal LM.
        batch: the sequences of the present step in packed order, as continuous batching keeps them.
    """

    def __init__(self, model: Any, batch: Callable[[], Sequence[Any]]) -> None:
        self.seconds = 0.0
        """Spent in the hook so far; the forward pass itself is not part of it."""
        self._head = model.get_output_embeddings()
        self._batch = batch
        self._expected: dict[str, _Prefix] = {}
        model.base_model.register_forward_hook(self._after_forward)

    def expect(self, request: Request, request_id: str) -> None:
        """Score what exists of an unfinished response in its coming prefill, if anything does.

        Called by the event loop, when it was submitted and before the next step.
        """
        submission = request.ids[request_id]
        response = submission.response
        response.unscored = submission.offset > 0 and not response.is_finished
        if response.unscored:
            tokens = response.token_ids[: submission.offset]
            self._expected[request_id] = _Prefix(request, response, tokens)

    def forget(self, request_id: str) -> None:
        """The request was withdrawn; any thread."""
        self._expected.pop(request_id, None)

    def is_expecting(self, request_id: str) -> bool:
        """Whether the prefill of this request is not through."""
        return request_id in self._expected

    def _after_forward(self, _module: Any, _inputs: Any, output: Any) -> None:
        if not self._expected:
            return
        hidden = output[0][0]  # (Q, H)
        if hidden.is_cuda:
            torch.cuda.synchronize(hidden.device)  # the time of the forward pass is not ours
        begin = time.perf_counter()
        rows: list[int] = []
        targets: list[int] = []
        temperatures: list[float] = []
        parts: list[tuple[str, _Prefix, int, int]] = []  # with first and last + 1 of its tokens
        row = 0
        for item in self._batch():
            request_id, length = item.state.request_id, item.query_length
            prefix = self._expected.get(request_id)
            if prefix is not None:
                # the position is that of row 0, minus 1 for predicting and P for the prompt
                shift = item.state.position_offset - length + 1 - len(prefix.request.prompt)
                first = max(0, shift)
                end = max(first, min(len(prefix.tokens), shift + length))
                rows += range(row + first - shift, row + end - shift)
                targets += prefix.tokens[first:end]
                temperatures += [served(prefix.request.sampling.temperature)] * (end - first)
                parts.append((request_id, prefix, first, end))
            row += length
        values = _logprobs(self._head, hidden[rows], targets, temperatures) if rows else []
        for request_id, prefix, first, end in parts:
            prefix.logprobs[first:] = values[: end - first]
            del values[: end - first]
            if end == len(prefix.tokens):
                self.forget(request_id)
                try:
                    event = rescore(prefix.response.logprobs[:end], prefix.logprobs)
                except ValueError as error:
                    prefix.request.fail_from_thread(RequestError(str(error)))
                else:
                    prefix.response.rescores.append(event)
                    prefix.response.unscored = False
        self.seconds += time.perf_counter() - begin


def _logprobs(
    head: Any, hidden: Tensor, targets: Sequence[int], temperatures: Sequence[float]
) -> list[float]:
    """Log-prob of one token for each hidden state ``(M, H)``, computed like the engine's own."""
    chosen = torch.tensor(targets, device=hidden.device)
    scale = torch.tensor(temperatures, device=hidden.device)
    values: list[float] = []
    for start in range(0, len(hidden), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        logits = head(hidden[part]).float().div_(scale[part, None])  # (m, V)
        own = logits.gather(-1, chosen[part, None]).squeeze(-1)
        values += (own - logits.logsumexp(-1)).clamp(max=0.0).tolist()
    return values


@torch.no_grad()
def rescore_unfinished(model: Any, requests: Sequence[Request], *, pad_token_id: int) -> None:
    """Score the tokens that exist of each unfinished response in a forward pass of its own.

    Each distinct prompt is computed once.

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
            if response.token_ids and not response.is_finished
        ]
        rows.sort(key=lambda row: len(row[0]) + len(row[1].token_ids))
        for start in range(0, len(rows), RESCORED_AT_ONCE):
            part = rows[start : start + RESCORED_AT_ONCE]
            _rescore_rows(model, part, temperature, pad_token_id)


def _rescore_rows(
    model: Any,
    rows: Sequence[tuple[list[int], PartialResponse]],
    temperature: float,
    pad_token_id: int,
) -> None:
    width = max(len(prompt) + len(response.token_ids) for prompt, response in rows)
    input_ids = torch.full((len(rows), width), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    sampled = torch.zeros(input_ids.shape, dtype=torch.bool)
    for index, (prompt, response) in enumerate(rows):
        tokens = [*prompt, *response.token_ids]
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
