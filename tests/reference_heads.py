"""Slow references of the trust-region heads: float64, one token after the other.

Written from the equations of the papers; nothing here looks at the package. A token's function
returns its loss and the derivative of that loss with respect to the token's log pi.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Token = tuple[float, float]


def clipped(
    pi: float, anchor: float, a: float, *, low: float, high: float, dual: float | None = None
) -> Token:
    """PPO's clip to [low, high], case by case."""
    return clipped_ratio(math.exp(pi - anchor), a, low=low, high=high, dual=dual)


def clipped_ratio(
    rho: float, a: float, *, low: float, high: float, dual: float | None = None
) -> Token:
    if a > 0 and rho > high:
        return -a * high, 0.0
    if a < 0 and rho < low:
        return -a * low, 0.0
    if a < 0 and dual is not None and rho > dual:
        return -a * dual, 0.0
    return -a * rho, -a * rho


def cispo(
    pi: float, anchor: float, a: float, *, cap: float, low: float = 0.0, unified: bool = False
) -> Token:
    rho = math.exp(pi - anchor)
    if unified and ((a > 0 and rho > cap) or (a < 0 and rho < low)):
        return 0.0, 0.0
    weight = max(low, min(cap, rho))
    return -weight * a * pi, -weight * a


def dppo_tv(
    pi: float,
    anchor: float,
    a: float,
    *,
    limit: float,
    cap: float,
    both: bool = False,
    penalty: float = 0.0,
) -> Token:
    p, q, d = math.exp(pi), math.exp(anchor), pi - anchor
    loss, slope = penalty * d**2, 2 * penalty * d
    if (a > 0 or both) and p - q > limit:
        return loss, slope
    if (a <= 0 or both) and q - p > limit:
        return loss, slope
    weight = min(p / q, cap)
    return loss - weight * a * pi, slope - weight * a


def dro(pi: float, anchor: float, a: float, *, beta: float) -> Token:
    d = pi - anchor
    return -a * pi + beta / 2 * d**2, -a + beta * d


def dppo_kl(
    pi: float, anchor: float, a: float, *, limit: float, cap: float, both: bool = False
) -> Token:
    p, q = math.exp(pi), math.exp(anchor)
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    if kl > limit and (both or (a > 0 and p > q) or (a <= 0 and p < q)):
        return 0.0, 0.0
    weight = min(p / q, cap)
    return -weight * a * pi, -weight * a


def sao(pi: float, anchor: float, a: float, *, low: float, high: float) -> Token:
    rho = math.exp(pi - anchor)
    return (-rho * a * pi, -rho * a) if low < rho < high else (0.0, 0.0)


def sapo(pi: float, anchor: float, a: float, *, positive: float, negative: float) -> Token:
    rho, tau = math.exp(pi - anchor), positive if a > 0 else negative
    gate = 1 / (1 + math.exp(-tau * (rho - 1)))
    # d/d rho of (4 / tau) sigmoid(tau (rho - 1)) is 4 sigmoid (1 - sigmoid)
    return -a * 4 / tau * gate, -a * 4 * gate * (1 - gate) * rho


def aspo(pi: float, anchor: float, a: float, *, low: float, high: float, dual: float) -> Token:
    rho = math.exp(pi - anchor)
    if a <= 0:
        return clipped_ratio(rho, a, low=low, high=high, dual=dual)
    if rho > high:
        return 0.0, 0.0
    weight = min(1 / rho, dual)
    return -a * weight, -a * weight


def each_token(
    function: Callable[..., Token],
    pi: Array,
    anchor: Array,
    a: Array,
    mask: Mask,
    **settings: object,
) -> tuple[Array, Array]:
    """Losses and gradients of every trained token, 0 elsewhere; shape (N, T)."""
    losses, gradients = np.zeros(pi.shape), np.zeros(pi.shape)
    for at in np.argwhere(mask):
        i = tuple(at)
        losses[i], gradients[i] = function(float(pi[i]), float(anchor[i]), float(a[i]), **settings)
    return losses, gradients


def mean_log_ratio(pi: Array, anchor: Array, mask: Mask) -> float:
    """Of one row."""
    distances = [p - q for p, q, m in zip(pi, anchor, mask, strict=True) if m]
    return math.fsum(distances) / len(distances)


def each_sequence(
    pi: Array,
    anchor: Array,
    a: Array,
    mask: Mask,
    bounds: Callable[[float], tuple[float, float]],
) -> tuple[Array, Array]:
    """GSPO with advantages constant along each row; ``bounds`` of s from a row's mean log-ratio.

    Every trained token has its row's loss; the gradient is that of the sum of these losses.
    """
    losses, gradients = np.zeros(pi.shape), np.zeros(pi.shape)
    for row in range(len(pi)):
        if not mask[row].any():
            continue
        mean = mean_log_ratio(pi[row], anchor[row], mask[row])
        low, high = bounds(mean)
        first = int(np.argmax(mask[row]))
        loss, slope = clipped_ratio(math.exp(mean), float(a[row, first]), low=low, high=high)
        # d s / d log pi_t = s / length; the row's loss appears once per token
        losses[row, mask[row]], gradients[row, mask[row]] = loss, slope
    return losses, gradients


def outward(distances: list[float], a: list[float]) -> list[float]:
    """d of the tokens that move as their advantage says."""
    return [d for d, x in zip(distances, a, strict=True) if (x > 0 and d > 0) or (x < 0 and d < 0)]


def m2po_bounds(
    distances: list[float], a: list[float], budget: float, min_low: float, min_high: float
) -> tuple[float, float]:
    """The search of the authors' repository."""
    squares = sorted(d * d for d in outward(distances, a))
    if not squares or math.fsum(squares) / len(squares) <= budget:
        return 0.0, math.inf
    index = 0
    while math.fsum(min(v, squares[index]) for v in squares) < budget * len(squares):
        index += 1
    radius = math.sqrt(squares[index - 1]) if index else 0.0
    return min(math.exp(-radius), 1 - min_low), max(math.exp(radius), 1 + min_high)


def m2po_kept(distances: list[float], budget: float) -> list[bool]:
    """Reject the largest d^2, with all its equals, until the mean is below the budget."""
    kept = [True] * len(distances)
    squares = [d * d for d in distances]
    while True:
        left = [v for v, k in zip(squares, kept, strict=True) if k]
        if math.fsum(left) / len(left) < budget or min(left) == max(left):
            return kept
        kept = [k and v < max(left) for v, k in zip(squares, kept, strict=True)]


def sat_interval(
    d: float, q: float, clip_low: float, clip_high: float, kernel: str, exponent: float = 2.0
) -> tuple[float, float]:
    """A token's bounds."""
    factor = 1.0
    if q > 0 and abs(d) > q:
        excess = (abs(d) - q) / q
        if kernel == "hill":
            factor = q**exponent / (q**exponent + abs(d) ** exponent)
        elif kernel == "hill_excess":
            factor = 1 / (1 + excess**exponent)
        elif kernel == "gaussian":
            factor = math.exp(-0.5 * excess * excess)
        else:
            raise KeyError(kernel)
    return (
        1 - clip_low * (factor if d < 0 else 1.0),
        1 + clip_high * (factor if d > 0 else 1.0),
    )


def bapo_bounds(
    distances: list[float],
    a: list[float],
    *,
    target: float,
    measure: str,
    low: tuple[float, float, float],
    high: tuple[float, float, float],
) -> tuple[float, float]:
    """The repository's search; ``low`` and ``high`` are (start, maximum, step)."""
    lower, upper = low[0], high[0]

    def satisfied() -> bool:
        gains = losses = 0.0
        for d, x in zip(distances, a, strict=True):
            rho = math.exp(d)
            if x > 0:
                gains += x * min(rho, upper)
            else:
                losses -= x * max(rho, lower)
        if measure == "share":
            return gains + losses == 0 or gains / (gains + losses) >= target
        return losses == 0 or gains / losses >= target

    while not satisfied() and lower < low[1] - 1e-9:
        lower = min(lower + low[2], low[1])
    while not satisfied() and upper < high[1] - 1e-9:
        upper = min(upper + high[2], high[1])
    return lower, upper
