"""Slow references of corrections, batch advantages and step sizes: loops over single tokens.

Written from the equations, in float64, with Python's own `math`; nothing here looks at the package.
Log-ratios are clamped to +-20, of a token and of a sequence. Rows are lists of trained tokens only.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]


def clamp(value: float) -> float:
    return min(max(value, -20.0), 20.0)


def token_ratios(p: Array, mu: Array, mask: Bools) -> list[list[float]]:
    """Log-ratio of every trained token, row by row."""
    return [
        [clamp(float(p[i, t] - mu[i, t])) for t in range(p.shape[1]) if mask[i, t]]
        for i in range(p.shape[0])
    ]


def row_log_ratio(row: list[float], level: str) -> float:
    total = math.fsum(row)
    return clamp(total if level == "sequence" else total / max(len(row), 1))


def scatter(rows: list[list[float]], mask: Bools, fill: float) -> Array:
    """Values of trained tokens back at their positions, ``fill`` elsewhere."""
    result = np.full(mask.shape, fill)
    for i, row in enumerate(rows):
        values = iter(row)
        for t in range(mask.shape[1]):
            if mask[i, t]:
                result[i, t] = next(values)
    return result


def correction(name: str, p: Array, mu: Array, mask: Bools, A: Array, groups: list[int], **s):
    """Weight and keep of every position, for any correction by its name."""
    d = token_ratios(p, mu, mask)
    advantage = [[float(a) for a, m in zip(A[i], mask[i], strict=True) if m] for i in range(len(A))]
    weights = [[1.0] * len(row) for row in d]
    keeps = [[True] * len(row) for row in d]
    denominators = group_denominators(name, mu, mask, d, groups, s)
    for i, row in enumerate(d):
        for k, token in enumerate(row):
            log_p = token_log_p(p, mask, i)
            weights[i][k], keeps[i][k] = one_token(
                name, token, row, advantage[i][k], denominators[i], log_p, s, row[:k]
            )
            if not keeps[i][k]:
                weights[i][k] = 0.0
    keep = scatter([[float(x) for x in row] for row in keeps], mask, 0.0).astype(bool)
    return scatter(weights, mask, 1.0), keep


def token_log_p(p: Array, mask: Bools, i: int) -> list[float]:
    return [float(p[i, t]) for t in range(p.shape[1]) if mask[i, t]]


def group_denominators(name, mu, mask, d, groups, s) -> list[float]:
    """GMC's kappa or GEPO's log E of each row's group, over rows with a trained token."""
    result = [0.0] * len(d)
    for i in range(len(d)):
        members = [j for j in range(len(d)) if groups[j] == groups[i] and d[j]]
        if not members:
            continue
        if name == "gmc_grpo":
            mass = math.fsum(math.exp(row_log_ratio(d[j], "sequence")) for j in members)
            size = len(members) if s.get("mass", "group") == "group" else 1
            result[i] = min(1.0, size * (1 + s.get("eps", 0.2)) / mass)
        elif name == "gepo":
            q = []
            for j in members:
                tokens = token_log_p(mu, mask, j)
                length = len(tokens) if s.get("length_normalize", True) else 1
                q.append(math.exp(math.fsum(tokens) / length))
            result[i] = math.log(math.fsum(x * x for x in q) / math.fsum(q))
    return result


def one_token(name, d, row, a, denominator, log_p, s, before) -> tuple[float, bool]:
    """Weight and keep of one trained token."""
    level = s.get("level")
    if name in ("tis", "mis", "rs"):
        level = level or {"rs": "geometric"}.get(name, "token")
        x = math.exp(d if level == "token" else row_log_ratio(row, level))
        if name == "tis":
            return max(s.get("floor", 0.0), min(x, s.get("cap", 2.0))), True
        low, high = {"mis": (0.5, 5.0), "rs": (0.999, 1.001)}[name]
        low, high = s.get("lower", low), s.get("upper", high)
        return (x if name == "mis" else 1.0), (low is None or x >= low) and x <= high
    if name == "seq_mask_tis":
        g = math.exp(row_log_ratio(row, "geometric"))
        return math.exp(d), s.get("lower", 0.5) <= g <= s.get("upper", 5.0)
    if name in ("k2_rs", "k3_rs"):
        k = [x * x / 2 if name == "k2_rs" else math.exp(x) - x - 1 for x in row]
        here = d * d / 2 if name == "k2_rs" else math.exp(d) - d - 1
        level = level or {"k2_rs": "token", "k3_rs": "seq-mean"}[name]
        value = {
            "token": here,
            "seq-sum": math.fsum(k),
            "seq-mean": math.fsum(k) / len(k),
            "seq-max": max(k),
        }[level]
        return 1.0, value <= s.get("upper", {"k2_rs": 2.0, "k3_rs": 0.01}[name])
    if name == "opsm":
        return 1.0, not (a < 0 and -math.fsum(row) / len(row) > s.get("delta", 1e-4))
    if name == "carm":
        return 1.0, math.exp(math.fsum(abs(x) for x in row) / len(row)) <= s.get("upper", 1.1)
    if name == "gipo":
        return math.exp(d) * math.exp(-(d**2) / (2 * s.get("sigma", 0.5) ** 2)), True
    if name == "mu_grpo":
        return 1.0, a >= 0 or max([0.0, *(math.exp(x) for x in before)]) <= s.get("upper", 2.0)
    r = math.exp(row_log_ratio(row, "sequence"))
    if name == "gmc_grpo":
        return denominator * r, True
    if name == "tic_grpo":
        cap, form = 1 + s.get("eps", 0.2), s.get("above_cap", "weight")
        if form == "pessimistic" and a < 0:
            return r, True
        return min(r, cap), form == "weight" or r <= cap
    if name == "topr":
        x = math.exp(d) if level == "token" else r
        return (min(x, 1.0) if a < 0 else 1.0), True
    if name == "vespo":
        k = s.get("k_negative", 3.0) if a < 0 else s.get("k_positive", 2.0)
        lam = s.get("lambda_negative", 2.0) if a < 0 else s.get("lambda_positive", 3.0)
        return r**k * math.exp(lam * (1 - r)), True
    if name == "gepo":
        length = len(log_p) if s.get("length_normalize", True) else 1
        w = math.exp(clamp(math.fsum(log_p) / length - denominator))
        low, high = s.get("clip_low"), s.get("clip_high")
        gone = (a < 0 and low is not None and w < 1 - low) or (
            a > 0 and high is not None and w > 1 + high
        )
        return w, not gone
    raise KeyError(name)


def opob(rewards, log_ratios, squares, weighting, center, cap=None, lengths=None) -> float:
    """VCPO's baseline."""
    weights = []
    for i in range(len(rewards)):
        w = math.exp(clamp(log_ratios[i]))
        if weighting == "paper":
            weight = (w if cap is None else min(w, cap)) ** 2 * squares[i]
        else:
            weight = min(w, 8.0 if cap is None else cap) ** 2 * w**2 * squares[i]
        weights.append(weight / (lengths[i] ** 2 if lengths is not None else 1))
    total = math.fsum(weights)

    def quantile(q: float) -> float:
        running = 0.0
        for i in sorted(range(len(rewards)), key=lambda i: rewards[i]):
            running += weights[i]
            if running >= q * total:
                return rewards[i]
        return max(rewards)

    if center == "median":
        return quantile(0.5)
    values = list(rewards)
    if center == "winsorized":
        values = [min(max(v, quantile(0.05)), quantile(0.95)) for v in values]
    return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / total


def token_returns(rewards, mask: Bools, gamma, kl, coefficient) -> Array:
    """REINFORCE++: for each trained token, the discounted rewards of the trained tokens from it."""
    result = np.zeros(mask.shape)
    for i in range(mask.shape[0]):
        trained = [t for t in range(mask.shape[1]) if mask[i, t]]
        paid = [-coefficient * float(kl[i, t]) for t in trained]
        if paid:
            paid[-1] += rewards[i]
        for k, t in enumerate(trained):
            result[i, t] = math.fsum(gamma ** (n - k) * paid[n] for n in range(k, len(paid)))
    return result


def whitened(values: Array, mask: Bools, eps: float = 1e-8) -> Array:
    """(x - mean) / sqrt(unbiased variance + eps) over all trained tokens."""
    flat = [float(v) for v, m in zip(values.ravel(), mask.ravel(), strict=True) if m]
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((v - mean) ** 2 for v in flat) / (len(flat) - 1)
    return np.where(mask, (values - mean) / math.sqrt(variance + eps), 0.0)


def effective_sample_size(log_ratios, cap=None, eps=1e-8) -> float:
    w = [math.exp(clamp(float(x))) for x in log_ratios]
    w = [x if cap is None else min(x, cap) for x in w]
    return math.fsum(w) ** 2 / (math.fsum(x * x for x in w) + eps)
