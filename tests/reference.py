"""Slow references: float64 loops over single tokens, written from the equations.

Nothing here looks at the package. Gradients are the derivatives of the equations, case by case.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def advantages(rewards: list[float], method: str, ddof: int = 1, eps: float = 1e-6) -> Array:
    """A_i of one group, from the definitions of GRPO, Dr. GRPO and RLOO."""
    size = len(rewards)
    mean = math.fsum(rewards) / size
    result = np.zeros(size)
    for i, reward in enumerate(rewards):
        if method == "grpo":
            variance = math.fsum((r - mean) ** 2 for r in rewards) / (size - ddof)
            result[i] = (reward - mean) / (math.sqrt(variance) + eps)
        elif method == "dr_grpo":
            result[i] = reward - mean
        elif method == "rloo":
            others = [r for k, r in enumerate(rewards) if k != i]
            result[i] = reward - math.fsum(others) / (size - 1)
        else:
            raise KeyError(method)
    return result


def clipped_token(
    policy: float, anchor: float, advantage: float, low: float, high: float, dual: float | None
) -> tuple[float, float]:
    """Loss of one token and its derivative with respect to log pi."""
    delta = policy - anchor
    inside = -20.0 <= delta <= 20.0
    rho = math.exp(min(max(delta, -20.0), 20.0))
    slope = -advantage * rho if inside else 0.0  # d(-A rho) / d log pi
    if advantage > 0 and rho > 1 + high:
        return -advantage * (1 + high), 0.0
    if advantage < 0 and rho < 1 - low:
        return -advantage * (1 - low), 0.0
    if advantage < 0 and dual is not None and rho > dual:
        return -advantage * dual, 0.0
    return -advantage * rho, slope


def clipped_losses(
    policy: Array, anchor: Array, advantage: Array, low: float, high: float, dual: float | None
) -> tuple[Array, Array]:
    """Per-token losses and gradients of the clipped surrogate; shape (N, T)."""
    losses, gradients = np.zeros(policy.shape), np.zeros(policy.shape)
    for at in np.ndindex(policy.shape):
        losses[at], gradients[at] = clipped_token(
            float(policy[at]), float(anchor[at]), float(advantage[at]), low, high, dual
        )
    return losses, gradients


def k3(policy: Array, reference: Array) -> tuple[Array, Array]:
    """Per-token k3 and its derivative with respect to log pi; shape (N, T)."""
    values, gradients = np.zeros(policy.shape), np.zeros(policy.shape)
    for at in np.ndindex(policy.shape):
        raw = float(reference[at] - policy[at])
        u = min(max(raw, -20.0), 20.0)
        value = math.exp(u) - u - 1
        values[at] = min(max(value, -10.0), 10.0)
        if raw == u and value <= 10.0:
            gradients[at] = 1 - math.exp(u)
    return values, gradients


def aggregate(losses: Array, mask: NDArray[np.bool_], mode: str, max_length: int = 1) -> float:
    """The aggregate over a whole batch."""
    per_row: list[list[float]] = []
    for row_losses, row_mask in zip(losses, mask, strict=True):
        kept = [float(x) for x, m in zip(row_losses, row_mask, strict=True) if m]
        if kept:
            per_row.append(kept)
    if mode == "token-mean":
        return math.fsum(x for row in per_row for x in row) / sum(len(row) for row in per_row)
    if mode == "seq-mean-token-mean":
        return math.fsum(math.fsum(row) / len(row) for row in per_row) / len(per_row)
    if mode == "seq-mean-token-sum":
        return math.fsum(math.fsum(row) for row in per_row) / len(per_row)
    if mode == "seq-mean-token-sum-norm":
        return math.fsum(math.fsum(row) for row in per_row) / len(per_row) / max_length
    raise KeyError(mode)


def token_weight(mask: NDArray[np.bool_], row: int, mode: str, max_length: int = 1) -> float:
    """d aggregate / d loss of any one trained token of the row."""
    rows = sum(bool(m.any()) for m in mask)
    return {
        "token-mean": 1 / int(mask.sum()),
        "seq-mean-token-mean": 1 / rows / max(int(mask[row].sum()), 1),
        "seq-mean-token-sum": 1 / rows,
        "seq-mean-token-sum-norm": 1 / rows / max_length,
    }[mode]
