"""Log-probs of sampled tokens under a causal language model, in little memory.

Shapes: N sequences, T positions, P distinct prompts, R response positions, H hidden size, V
vocabulary, M tokens under the loss mask. The model is anything with the interface of a Hugging Face
causal LM: ``base_model``, ``get_output_embeddings()``, and a key-value cache for shared prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Statistic = Callable[[Tensor], Tensor]
"""From the log-probs of whole distributions, shape ``(M, V)``, to one number each, ``(M,)``."""

Fused = Callable[[nn.Module, Tensor, Tensor, float], Tensor]
"""A kernel that never holds the logits: from the output head, hidden states ``(M, H)``, tokens
``(M,)`` and temperature to log-probs ``(M,)`` in float32, with gradients for hidden states and
head."""


def entropy(logprobs: Tensor) -> Tensor:
    """Entropy in nats; shape ``(M, V)`` to ``(M,)``."""
    return -(logprobs.exp() * logprobs).sum(-1)


def sum_square_probs(logprobs: Tensor) -> Tensor:
    """The sum of pi(a)**2 over the vocabulary; shape ``(M, V)`` to ``(M,)``."""
    return (2 * logprobs).exp().sum(-1)


def token_logprobs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    loss_mask: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    peer_tokens: int = 0,
    statistic: Statistic = entropy,
    fused: Fused | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the tokens under the loss mask, and a statistic of their distributions.

    Only positions that predict such a token reach the vocabulary, ``chunk_tokens`` at a time; each
    chunk is recomputed in the backward pass, so that memory grows with ``chunk_tokens x V`` and not
    with ``N x T x V``.

    Args:
        model: a causal LM with a base model and an output head.
        input_ids: shape ``(N, T)``, padded on the right.
        attention_mask: shape ``(N, T)``, 1 for real tokens.
        loss_mask: shape ``(N, T)``, True where the token is trained on; never True at position 0.
        temperature: of the sampling whose log-probs these are compared with.
        chunk_tokens: tokens per chunk, at most.
        peer_tokens: tokens under the largest mask that ranks compute at the same time. They all
            call the output head equally often then, as they must where each has a part of it.
        statistic: of the distributions that the tokens were drawn from.
        fused: computes the log-probs instead; the statistics then need a pass of their own over the
            vocabulary, without gradient.

    Returns:
        Log-probs in float32, shape ``(N, T)``, zero outside the mask; and the statistics, same
        shape, detached.

    Raises:
        ValueError: if the mask covers position 0, which nothing predicts.
    """
    _check_predicted(loss_mask)
    hidden = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)[
        0
    ]
    predicting = loss_mask[:, 1:]
    selected = hidden[:, :-1][predicting]  # (M, H), row by row
    return _scatter(
        model,
        selected,
        input_ids,
        loss_mask,
        temperature,
        chunk_tokens,
        peer_tokens,
        statistic,
        fused,
    )


def packed_logprobs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    loss_mask: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    peer_tokens: int = 0,
    statistic: Statistic = entropy,
    fused: Fused | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as `token_logprobs`, with the rows laid end to end: no padding is computed.

    Positions start again at each row, from which the model knows that rows do not see each other.
    Attention with variable lengths (flash attention) skips what they do not see; any other kind
    gives the same numbers, but builds a matrix of all pairs of tokens of the micro-batch.

    Args:
        model: as there.
        input_ids: shape ``(N, T)``, padded on the right.
        attention_mask: as there.
        loss_mask: as there.
        temperature: as there.
        chunk_tokens: as there.
        peer_tokens: as there.
        statistic: as there.
        fused: as there.

    Returns:
        As there, equal up to float rounding.
    """
    _check_predicted(loss_mask)
    real = attention_mask.bool()
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    hidden = model.base_model(
        input_ids=input_ids[real][None], position_ids=positions[real][None], use_cache=False
    )[0]
    predicting = F.pad(loss_mask[:, 1:], (0, 1))
    selected = hidden[0, predicting[real]]  # (M, H), row by row
    return _scatter(
        model,
        selected,
        input_ids,
        loss_mask,
        temperature,
        chunk_tokens,
        peer_tokens,
        statistic,
        fused,
    )


def shared_prompt_logprobs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    loss_mask: Tensor,
    prompt_lengths: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    peer_tokens: int = 0,
    statistic: Statistic = entropy,
    fused: Fused | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as `token_logprobs`, with each distinct prompt computed once.

    The distinct prompts run first and leave keys and values; the responses then run on top of those
    of their prompt, and gradients flow back through them. With G short answers to one prompt, this
    saves most of the arithmetic. Needs a model that takes a key-value cache while training, so not
    gradient checkpointing. With P the longest prompt and R the longest response, the mask of the
    responses takes ``N x R x (P + R)`` elements instead of ``N x T x T``.

    Args:
        model: as there.
        input_ids: shape ``(N, T)``: prompt, response, padding.
        attention_mask: shape ``(N, T)``.
        loss_mask: shape ``(N, T)``; True only in responses.
        prompt_lengths: shape ``(N,)``, tokens of each row's prompt, at least 1.
        temperature: as there.
        chunk_tokens: as there.
        peer_tokens: as there.
        statistic: as there.
        fused: as there.

    Returns:
        As there, equal up to float rounding.
    """
    _num_rows, width = input_ids.shape
    position = torch.arange(width, device=input_ids.device)
    in_prompt = position < prompt_lengths[:, None]
    if bool((loss_mask & in_prompt).any()):
        raise ValueError("loss_mask covers prompt tokens")
    longest_prompt = int(prompt_lengths.max())
    # at least 2, with padding: as many passes on each rank, whatever its responses are like
    longest_response = max(2, int((attention_mask.sum(1) - prompt_lengths).max()))
    # -1 marks padding, so that a prompt never equals another one padded by the pad token
    prompts = input_ids.masked_fill(~in_prompt, -1)[:, :longest_prompt]
    prompts, of_row = torch.unique(prompts, dim=0, return_inverse=True)
    prompt_mask = (prompts >= 0).long()
    output = model.base_model(
        input_ids=prompts.clamp(min=0), attention_mask=prompt_mask, use_cache=True
    )
    last = output[0][torch.arange(len(prompts)), prompt_mask.sum(1) - 1]  # (P, H)
    predicting = last[of_row][:, None]  # (N, 1, H): predicts the first response token
    response_positions = prompt_lengths[:, None] + torch.arange(
        longest_response, device=input_ids.device
    )
    gather = response_positions.clamp(max=width - 1)
    feed = gather[:, :-1]
    fed_mask = attention_mask.gather(1, feed) * (response_positions[:, :-1] < width)
    cache = output.past_key_values
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[of_row], layer.values[of_row]
    hidden = model.base_model(
        input_ids=input_ids.gather(1, feed),
        attention_mask=torch.cat([prompt_mask[of_row], fed_mask], dim=1),
        position_ids=response_positions[:, :-1],
        past_key_values=cache,
        use_cache=True,
    )[0]
    predicting = torch.cat([predicting, hidden], dim=1)  # (N, R, H)
    trained = loss_mask.gather(1, gather) & (response_positions < width)
    selected = predicting[trained]
    return _scatter(
        model,
        selected,
        input_ids,
        loss_mask,
        temperature,
        chunk_tokens,
        peer_tokens,
        statistic,
        fused,
    )


def _check_predicted(loss_mask: Tensor) -> None:
    if bool(loss_mask[:, 0].any()):
        raise ValueError("loss_mask covers position 0, but no position predicts the first token")


def _scatter(
    model: Any,
    selected: Tensor,
    input_ids: Tensor,
    loss_mask: Tensor,
    temperature: float,
    chunk_tokens: int,
    peer_tokens: int,
    statistic: Statistic,
    fused: Fused | None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and statistics at the masked positions.

    Computed from the hidden states ``(M, H)`` that predict them.
    """
    targets = input_ids[loss_mask]  # (M,), row by row like the hidden states
    head = model.get_output_embeddings()
    num_chunks = max(1, math.ceil(max(len(targets), peer_tokens) / chunk_tokens))
    chunks = list(
        zip(
            torch.tensor_split(selected, num_chunks),
            torch.tensor_split(targets, num_chunks),
            strict=True,
        )
    )
    if fused is not None and len(targets):
        with torch.no_grad():
            values = [_chunk(head, h, t, temperature, statistic)[1] for h, t in chunks]
        parts = [(fused(head, selected, targets, temperature), torch.cat(values))]
    elif len(chunks) == 1:  # fits as a whole: nothing to recompute
        parts = [_chunk(head, *chunks[0], temperature, statistic)]
    else:
        parts = [
            checkpoint(_chunk, head, h, t, temperature, statistic, use_reentrant=False)
            for h, t in chunks
        ]
    logprobs = torch.zeros(loss_mask.shape, dtype=torch.float32, device=selected.device)
    statistics = torch.zeros_like(logprobs)
    if parts:
        logprobs = logprobs.masked_scatter(loss_mask, torch.cat([p[0] for p in parts]))
        statistics = statistics.masked_scatter(loss_mask, torch.cat([p[1] for p in parts]))
    return logprobs, statistics


def _chunk(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, statistic: Statistic
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float()
    if temperature != 1:
        logits = logits / temperature
    everything = F.log_softmax(logits, dim=-1)
    chosen = everything.gather(-1, targets[:, None]).squeeze(-1)
    with torch.no_grad():
        value = statistic(everything)
    return chosen, value
