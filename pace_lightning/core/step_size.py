"""How large an optimizer step may be, given how old its data is.

Symbols:

    M     responses of the global mini-batch with at least one trained token
    w_i   ratio of sequence i, the product of pi / mu over its trained tokens
    ESS   effective sample size, (sum w)^2 / sum w^2: M if all w are equal, 1 if one dominates
    S     lag of the data, in optimizer steps
    eta   learning rate
    c     stale budget: a share of the median over S of S * (largest stable eta at S)
    B     lifetime budget: a share of the median over collapsed runs of the sum of eta until then

    VCPO (arXiv:2602.17616)          eta * sqrt(min(1, ESS / M / base))
    S eta laws (arXiv:2607.01083)    eta <= min(c / S, B / steps)

c and B come from a coarse sweep over S and eta of the model at hand; a share of one half is a
reconstruction. The scale multiplies the scheduled rate first, then the cap of the laws applies. It
holds for one step: the caller puts the scheduled rate back.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pace_lightning.core.losses import LOG_RATIO_LIMIT

RULES = ("sqrt", "linear")
"""How the rate follows the effective sample size: ``sqrt`` for Adam, ``linear`` for SGD."""


@torch.no_grad()
def effective_sample_size(
    log_ratios: Tensor, *, ratio_cap: float | None = None, eps: float = 1e-8
) -> Tensor:
    """``(sum w)**2 / (sum w**2 + eps)`` over the global mini-batch (VCPO).

    Args:
        log_ratios: log w of all sequences on all ranks, in any order: they are sorted first, so the
            order does not change a bit; clamped to +-20; shape ``(M,)``, M >= 1.
        ratio_cap: caps w (an option of the authors' code); None, the default there, does not.
        eps: as in the authors' code. It matters only if all ratios are tiny, and then says that
            nothing is left of the batch; 0 makes the result independent of the scale of w.

    Returns:
        A scalar in float64, in [0, M].

    Raises:
        ValueError: if there is no sequence, a log-ratio is NaN, or a setting is out of range.

    >>> round(effective_sample_size(torch.tensor([1.0, 1.0, 1.0, 5.0]).log()).item(), 6)
    2.285714
    """
    if log_ratios.ndim != 1 or len(log_ratios) == 0 or log_ratios.isnan().any():
        raise ValueError(
            f"log_ratios have shape {tuple(log_ratios.shape)} and {int(log_ratios.isnan().sum())} "
            "NaN; the log-ratios of all sequences of the mini-batch are needed, (M,) with M >= 1"
        )
    if not eps >= 0 or (ratio_cap is not None and not ratio_cap > 0):
        raise ValueError(f"eps is {eps} and ratio_cap {ratio_cap}; eps >= 0 and a cap > 0 needed")
    ratios = log_ratios.double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().sort().values
    if ratio_cap is not None:
        ratios = ratios.clamp(max=ratio_cap)
    return ratios.sum().square() / (ratios.square().sum() + eps)


def ess_scale(
    log_ratios: Tensor,
    *,
    base: float = 1.0,
    rule: str = "sqrt",
    ratio_cap: float | None = None,
    eps: float = 1e-8,
) -> float:
    """The factor of the learning rate for a mini-batch of this effective sample size (VCPO).

    Args:
        log_ratios: as in `effective_sample_size`.
        base: share ESS / M at and above which the rate is not reduced; in (0, 1].
        rule: one of `RULES`.
        ratio_cap: as in `effective_sample_size`.
        eps: as in `effective_sample_size`.

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: if the rule is unknown, ``base`` is out of range, or as
            `effective_sample_size`.
    """
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}; choose one of {RULES}")
    if not 0 < base <= 1:
        raise ValueError(f"base is {base}; it is a share of the batch, in (0, 1]")
    share = effective_sample_size(log_ratios, ratio_cap=ratio_cap, eps=eps).item() / len(log_ratios)
    scale = min(1.0, share / base)
    return float(scale**0.5) if rule == "sqrt" else scale


def largest_rate(
    *,
    mean_lag_versions: float,
    stale_budget: float | None = None,
    remaining_budget: float | None = None,
    remaining_steps: int = 1,
) -> float:
    """``min(c / S, B / steps)``: the largest learning rate that the S eta laws allow a step.

    Asked at each step with the lag that its data has and with what is left of B, so that the rates
    of a run never sum to more than B: a run that planned more is slowed down from its first step.

    Args:
        mean_lag_versions: S, of the trained tokens; >= 0. 0 is no bound.
        stale_budget: c; None: no bound.
        remaining_budget: B without the rates of the steps before; None: no bound.
        remaining_steps: of the run, this one included; >= 1.

    Returns:
        The rate; infinite if nothing bounds it.

    Raises:
        ValueError: if a number is out of range.

    >>> largest_rate(mean_lag_versions=4, stale_budget=8e-6)
    2e-06
    """
    if not mean_lag_versions >= 0 or not remaining_steps >= 1:
        raise ValueError(
            f"mean_lag_versions is {mean_lag_versions} and remaining_steps {remaining_steps}; they "
            "must be >= 0 and >= 1"
        )
    limits = [math.inf]
    if stale_budget is not None and mean_lag_versions > 0:
        limits.append(stale_budget / mean_lag_versions)
    if remaining_budget is not None:
        limits.append(max(remaining_budget, 0.0) / remaining_steps)
    return min(limits)
