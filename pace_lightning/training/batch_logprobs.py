"""Log-probs of a micro-batch, in the way that was chosen: whole rows, shared prompts, or packed."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from pace_lightning.core.batch import TrainBatch
from pace_lightning.core.logprobs import (
    Fused,
    Statistic,
    entropy,
    packed_logprobs,
    shared_prompt_logprobs,
    token_logprobs,
)
from pace_lightning.training.policy import ModelError

LIGER = "0.8.5"
"""The least version of liger-kernel; some before it scale gradients of single tokens wrongly."""

PLAIN_SCORES = 2**19
"""Scores of a head, rows x tokens^2, up to which attention on a CPU is plain matrix products.

PyTorch's fused kernel saves the memory of the scores, but its backward pass is slow on short rows:
on two cores, a pass forward and back of 64 rows of 69 tokens, prompts shared, took 3.8 and 4.2 s by
products, 5.1 and 8.1 s by it (SmolLM2-135M).
"""


def batch_logprobs(
    model: Any,
    batch: TrainBatch,
    *,
    temperature: float,
    chunk_tokens: int,
    share_prompts: bool = False,
    pack_rows: bool = False,
    recompute_layers: bool = False,
    fused: Fused | None = None,
    statistic: Statistic = entropy,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the trained tokens and a statistic of their distributions; each ``(N, T)``.

    Args:
        model: causal LM.
        batch: micro-batch.
        temperature: see `token_logprobs`, like the next one and the last two.
        chunk_tokens: as there.
        share_prompts: see `shared_prompt_logprobs`.
        pack_rows: see `packed_logprobs`; not together with shared prompts.
        recompute_layers: the backward pass computes layers again: see `attention_kernels`.
        fused: as there.
        statistic: as there.
    """
    compute: Callable[..., tuple[Tensor, Tensor]] = token_logprobs
    if share_prompts:
        compute = functools.partial(shared_prompt_logprobs, prompt_lengths=batch.prompt_lengths)
    elif pack_rows:
        compute = packed_logprobs
    with contextlib.nullcontext() if recompute_layers else attention_kernels(batch.input_ids):
        return compute(
            model,
            batch.input_ids,
            batch.attention_mask,
            batch.loss_mask,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            peer_tokens=batch.peer_tokens,
            statistic=statistic,
            fused=fused,
        )


class PlainAttention(TorchFunctionMode):
    """Attention by plain matrix products in this thread.

    PyTorch's own switch is one of the process, so it would reach an engine in another thread.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace PyTorch's attention, and nothing else."""
        if func is scaled_dot_product_attention:
            return _plain_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **more: Any,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # it takes what is added only
        seen = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = seen.masked_fill_(~attn_mask, -torch.inf)
    plain = torch.ops.aten._scaled_dot_product_attention_math
    result: Tensor = plain(query, key, value, attn_mask, *args, **more)[0]
    return result


def attention_kernels(input_ids: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Which of its kernels PyTorch's attention takes for rows ``(N, T)``; see `PLAIN_SCORES`.

    Not for layers that are computed again after it has been left, by another kernel.
    """
    num_rows, width = input_ids.shape
    if input_ids.device.type == "cpu" and num_rows * width**2 <= PLAIN_SCORES:
        return PlainAttention()
    return contextlib.nullcontext()


def liger_logprobs(head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Log-probs by Liger's fused linear cross-entropy; a `Fused`. Not run on a GPU yet.

    With ``reduction="none"`` it computes the gradient again in the backward pass, with that of each
    token, so that any loss may follow.
    """
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction="none")
    bias = getattr(head, "bias", None)
    result: Tensor = -loss(head.weight, hidden / temperature, targets, bias).float()
    return result


def check_gpu_ways(*, pack_rows: bool, fused: bool) -> None:
    """Refuse ways to compute log-probs that this machine cannot take.

    Raises:
        ModelError: with what to change.
    """
    wanted = [
        name for name, is_set in (("pack_rows", pack_rows), ("fused_logprobs", fused)) if is_set
    ]
    if wanted and not torch.cuda.is_available():
        raise ModelError(
            f"model.{wanted[0]} is true, which needs an NVIDIA GPU, and there is none here; set "
            "it to false: rows are padded and the vocabulary computed in chunks, with equal results"
        )
    if fused:
        found = _version("liger-kernel")
        if found is None or Version(found) < Version(LIGER):
            raise ModelError(
                f"model.fused_logprobs is true and needs package liger-kernel {LIGER} or later, "
                f"which is {'not installed' if found is None else f'here in version {found}'}; "
                f"`pip install 'liger-kernel>={LIGER}'`, or set it to false: chunks of the "
                "vocabulary give equal results"
            )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
