"""From the trainer's weights to an engine's: compare, copy, and see that they arrived."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pace_lightning.rollout.engine import WrongWeightsError


def manifest_differences(
    own: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> tuple[list[str], list[str], list[str]]:
    """Names missing in ``weights``, names unknown to ``own``, and names of different shapes."""
    missing = sorted(own.keys() - weights.keys())
    unknown = sorted(weights.keys() - own.keys())
    shapes = [name for name in own if name in weights and own[name].shape != weights[name].shape]
    return missing, unknown, shapes


def compare_manifest(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Refuse weights whose names or shapes are not the engine's.

    Raises:
        WrongWeightsError: with the differences.
    """
    missing, unknown, different = manifest_differences(own, weights)
    shapes = [
        f"{name}: engine {tuple(own[name].shape)}, trainer {tuple(weights[name].shape)}"
        for name in different
    ]
    if missing or unknown or shapes:
        raise WrongWeightsError(
            "trainer and engine disagree on the weights; nothing was loaded. "
            f"Missing: {missing[:5]}; unknown to the engine: {unknown[:5]}; shapes: {shapes[:5]}"
        )


@torch.no_grad()
def copy_weights(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Copy in place, to the engine's dtype and device, and compare what is there afterwards.

    Raises:
        WrongWeightsError: if a tensor did not arrive; the engine must not go on then.
    """
    for name, tensor in own.items():
        tensor.copy_(weights[name])
        if not torch.equal(tensor, weights[name].to(dtype=tensor.dtype, device=tensor.device)):
            raise WrongWeightsError(f"{name} did not arrive in the engine (or holds NaN)")
