"""The whole weights, from whatever part of them each rank holds.

Where every rank holds all of them, they are the parameters themselves. Where they are partitioned
(ZeRO-3, FSDP), ranks gather them bucket by bucket, and rank 0 copies each bucket to host memory
before it is let go: never more than one bucket is whole on a device. All ranks walk the same
parameters in the same order, in the main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pace_lightning.training.lora import merged_weights

BUCKET_BYTES = 1 << 30
"""Of whole parameters on the device at once; a single larger parameter is a bucket of its own."""

WITH_WEIGHTS = "with_weights"
"""Name of the method of an FSDP policy that gathers, for one call, what lies outside its layers."""

Named = tuple[str, nn.Parameter]
T = TypeVar("T")


def with_weights(model: Any, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """``function(model, ...)``, with the weights there that it uses.

    FSDP gathers them in front of a module's ``forward``; a function that uses parts of a model, and
    not its ``forward``, has to say so. ZeRO-3 gathers for each part by itself.
    """
    method = getattr(model, WITH_WEIGHTS, None)
    if method is None:
        return function(model, *arguments, **options)
    result: T = method(function, *arguments, **options)
    return result


@torch.no_grad()
def gather_weights(
    model: nn.Module, *, keep: bool, bucket_bytes: int = BUCKET_BYTES
) -> Mapping[str, Tensor]:
    """The parameters by the names that an engine knows, with adapters merged in.

    Called by all ranks together if they are partitioned.

    Args:
        model: the policy.
        keep: whether this rank wants what has to be gathered; the others only take part.
        bucket_bytes: see `BUCKET_BYTES`.

    Returns:
        See `merged_weights` where they are whole; else copies in host memory, or nothing on a rank
        that does not keep them.
    """
    named = list(model.named_parameters())
    if not is_partitioned(model):
        return merged_weights(model)
    weights: dict[str, Tensor] = {}
    for bucket in buckets(named, bucket_bytes):
        for name, whole in _whole(bucket):
            if keep:
                # a copy, also on CPU: what is gathered is freed with its bucket
                weights[name] = whole.to("cpu", copy=True)
            del whole  # before the next one is gathered
    return weights


def is_partitioned(model: nn.Module) -> bool:
    """Whether this rank holds only a part of the parameters."""
    return any(_is_zero3(p) or _is_dtensor(p) for p in model.parameters())


def num_elements(parameter: nn.Parameter) -> int:
    """Of the whole parameter; ``numel`` of one that ZeRO-3 has partitioned is 0."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def buckets(named: Sequence[Named], bucket_bytes: int) -> Iterator[list[Named]]:
    """Neighbors that are at most so large together, or one that is larger alone."""
    bucket: list[Named] = []
    size = 0
    for name, parameter in named:
        own = num_elements(parameter) * parameter.element_size()
        if bucket and size + own > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += own
    if bucket:
        yield bucket


def _whole(bucket: Sequence[Named]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a bucket, whole until the next one is asked for; on every rank."""
    if _is_zero3(bucket[0][1]):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
            yield from ((name, parameter.data) for name, parameter in bucket)
        return
    for name, parameter in bucket:
        yield name, _full(parameter)


def _full(parameter: nn.Parameter) -> Tensor:
    data: Any = parameter.data
    whole: Tensor = data.full_tensor() if _is_dtensor(parameter) else data
    return whole


def _is_zero3(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_numel")


def _is_dtensor(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "full_tensor")
