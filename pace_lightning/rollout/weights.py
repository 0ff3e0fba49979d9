"""From the trainer's weights to an engine's: compare, copy, and see that they arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from pace_lightning.rollout.engine import WrongWeightsError


class LazyWeights(Mapping[str, Tensor]):
    """Weights that are made when they are asked for, one at a time; whoever asks owns the tensor.

    Args:
        shapes: of all of them, by name.
        make: from a name to its tensor; the same one each time until the trainer's next step.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], make: Callable[[str], Tensor]) -> None:
        self.shapes = shapes
        self._make = make

    def __getitem__(self, name: str) -> Tensor:
        """Make it."""
        if name not in self.shapes:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self.shapes)

    def __len__(self) -> int:
        """How many."""
        return len(self.shapes)


def shapes_of(weights: Mapping[str, Tensor]) -> Mapping[str, torch.Size]:
    """The shape of each tensor; makes none."""
    if isinstance(weights, LazyWeights):
        return weights.shapes
    return {name: tensor.shape for name, tensor in weights.items()}


def manifest_differences(
    own: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> tuple[list[str], list[str], list[str]]:
    """Names missing in ``weights``, names unknown to ``own``, and names of different shapes."""
    ours, theirs = shapes_of(own), shapes_of(weights)
    missing = sorted(ours.keys() - theirs.keys())
    unknown = sorted(theirs.keys() - ours.keys())
    shapes = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    return missing, unknown, shapes


def compare_manifest(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Refuse weights whose names or shapes are not the engine's.

    Raises:
        WrongWeightsError: with the differences.
    """
    missing, unknown, different = manifest_differences(own, weights)
    ours, theirs = shapes_of(own), shapes_of(weights)
    shapes = [
        f"{name}: engine {tuple(ours[name])}, trainer {tuple(theirs[name])}" for name in different
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
        weight = weights[name]  # once: it may be made for the asking
        tensor.copy_(weight)
        if not torch.equal(tensor, weight.to(dtype=tensor.dtype, device=tensor.device)):
            raise WrongWeightsError(f"{name} did not arrive in the engine (or holds NaN)")
