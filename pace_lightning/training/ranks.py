"""Vectors of different lengths, gathered from all ranks.

Tested with simulated ranks only: no run of this package uses more than one yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def gather_vectors(vector: Tensor, all_gather: Callable[[Tensor], Tensor]) -> Tensor:
    """The vectors of all ranks, one after the other.

    Args:
        vector: this rank's; shape ``(m,)``, m may differ between ranks and be 0.
        all_gather: from a tensor of the same shape on each rank to all of them, stacked.

    Returns:
        Shape ``(M,)``, equal on each rank.
    """
    counts = all_gather(torch.tensor([len(vector)], device=vector.device)).flatten().tolist()
    padded = vector.new_zeros(max(counts))
    padded[: len(vector)] = vector
    rows = all_gather(padded).reshape(len(counts), -1)
    return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])
