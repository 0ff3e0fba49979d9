"""Slow references for the proximal policies: float64 loops over tokens, from the equations.

Nothing here looks at the package. Gradients are the derivatives of the equations, case by case.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def log_linear(policy: Array, behavior: Array, versions: Array, version: int) -> Array:
    """mu^(1/d) pi^(1 - 1/d), mu for d < 2 and where nothing was sampled; in probabilities."""
    result = np.zeros(policy.shape)
    for at in np.ndindex(policy.shape):
        d = version - int(versions[at])
        share_of_mu = 1.0 / d if d >= 1 and versions[at] >= 0 else 1.0
        mu, pi = math.exp(behavior[at]), math.exp(policy[at])
        result[at] = math.log(mu**share_of_mu * pi ** (1 - share_of_mu))
    return result


def linear(policy: Array, behavior: Array, versions: Array, version: int) -> Array:
    """mu/d + (1 - 1/d) pi."""
    result = np.zeros(policy.shape)
    for at in np.ndindex(policy.shape):
        d = version - int(versions[at])
        share_of_mu = 1.0 / d if d >= 1 and versions[at] >= 0 else 1.0
        mu, pi = math.exp(behavior[at]), math.exp(policy[at])
        result[at] = math.log(share_of_mu * mu + (1 - share_of_mu) * pi)
    return result


def decoupled_token(
    policy: float, proximal: float, behavior: float, advantage: float, low: float, high: float
) -> tuple[float, float]:
    """w max(-A rho, -A clip(rho)) with w = prox/mu, and its derivative with respect to log pi."""
    rho, weight = math.exp(policy - proximal), math.exp(proximal - behavior)
    if advantage > 0 and rho > 1 + high:
        return -weight * advantage * (1 + high), 0.0
    if advantage < 0 and rho < 1 - low:
        return -weight * advantage * (1 - low), 0.0
    return -weight * advantage * rho, -weight * advantage * rho


def ewma(values: list[Array], decay: float) -> tuple[Array, float, float]:
    """sum_k beta^(t-k) x_k / sum_k beta^(t-k); its total weight, and the mean age of its parts."""
    t = len(values) - 1
    weights = [decay ** (t - k) for k in range(t + 1)]
    total = math.fsum(weights)
    mean = np.zeros_like(values[0])
    for weight, value in zip(weights, values, strict=True):
        mean = mean + weight * value / total
    age = math.fsum(weight * (t - k) for k, weight in enumerate(weights)) / total
    return mean, total, age


def statistics(
    policy: Array,
    proximal: Array,
    behavior: Array,
    advantage: Array,
    mask: Array,
    keep: Array,
    low: float,
    high: float,
) -> dict[str, float]:
    """Active tokens and total ratio."""
    active, ratios, totals, gaps = 0, [], [], []
    for at in np.ndindex(policy.shape):
        if not mask[at]:
            continue
        rho = math.exp(policy[at] - proximal[at])
        above = advantage[at] > 0 and rho > 1 + high
        below = advantage[at] < 0 and rho < 1 - low
        active += bool(keep[at]) and not above and not below
        ratios.append(math.exp(policy[at] - behavior[at]))
        totals.append(abs(policy[at] - behavior[at]))
        gaps.append(abs(proximal[at] - behavior[at]))
    return {
        "tokens": float(len(ratios)),
        "active_sum": float(active),
        "total_ratio_sum": math.fsum(ratios),
        "total_ratio_max": max(ratios, default=0.0),
        "total_log_ratio_abs_sum": math.fsum(totals),
        "behavior_log_ratio_abs_sum": math.fsum(gaps),
    }
