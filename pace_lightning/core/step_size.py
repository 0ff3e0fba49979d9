"""How large an optimizer step may be, given how old its data is.

Symbols:

    M     responses of the global mini-batch with at least one trained token
    w_i   ratio of sequence i, the product of pi / mu over its trained tokens
    ESS   effective sample size, (sum w)^2 / sum w^2: M if all w are equal, 1 if one dominates
    S     lag of the data: optimizer steps between two publications of the weights
    eta   learning rate
    c     stale budget: the median over S of S * (largest stable eta at S)
    B     lifetime budget: the median over collapsed runs of the sum of eta until the collapse

    VCPO (arXiv:2602.17616)          eta * sqrt(min(1, ESS / M / base))
    S eta laws (arXiv:2607.01083)    eta = safety * min(c / S, B / steps)

The scale multiplies the scheduled rate first, then the cap of the laws applies. It holds for one
step: the caller puts the scheduled rate back.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

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


def fit_stale_budget(largest_stable_rates: Mapping[int, float]) -> float:
    """Stale budget c of a coarse sweep: the median over S of ``S * eta_max(S)``.

    Args:
        largest_stable_rates: S in optimizer steps, >= 1, to the largest rate that did not collapse.

    Raises:
        ValueError: if there is no entry, or one is not positive.
    """
    if not largest_stable_rates or min(*largest_stable_rates, *largest_stable_rates.values()) <= 0:
        raise ValueError(
            f"{dict(largest_stable_rates)}: S and rate must be > 0, for one S at least"
        )
    return statistics.median(lag * rate for lag, rate in largest_stable_rates.items())


def fit_lifetime_budget(cumulated_rates: Sequence[float]) -> float:
    """Lifetime budget B: the median, over runs that collapsed, of their rates summed until then.

    Args:
        cumulated_rates: one sum for each collapsed run; at least one, all > 0.

    Raises:
        ValueError: if there is no run, or a sum is not positive.
    """
    if not cumulated_rates or min(cumulated_rates) <= 0:
        raise ValueError(f"sums are {list(cumulated_rates)}; one at least, and all > 0, are needed")
    return statistics.median(cumulated_rates)


def safe_rate(
    *,
    lag_versions: float,
    stale_budget: float,
    planned_steps: int,
    lifetime_budget: float,
    safety: float = 0.5,
) -> float:
    """``safety * min(c / S, B / steps)``: the learning rate to plan a run with.

    Args:
        lag_versions: S, in optimizer steps; > 0.
        stale_budget: c.
        planned_steps: optimizer steps of the run; >= 1.
        lifetime_budget: B.
        safety: share of the limit to use, in (0, 1]; the default of 0.5 is a reconstruction.

    Returns:
        The learning rate.

    Raises:
        ValueError: if a number is out of range.
    """
    if not min(lag_versions, stale_budget, planned_steps, lifetime_budget) > 0:
        raise ValueError(
            f"lag_versions is {lag_versions}, stale_budget {stale_budget}, planned_steps "
            f"{planned_steps} and lifetime_budget {lifetime_budget}; all must be > 0"
        )
    if not 0 < safety <= 1:
        raise ValueError(f"safety is {safety}; it is a share of the limit, in (0, 1]")
    return safety * min(stale_budget / lag_versions, lifetime_budget / planned_steps)


def lag_scale(mean_lag_versions: float, *, reference_lag_versions: float) -> float:
    """``min(1, S_ref / K)``: the factor of the learning rate for data of mean lag K.

    Args:
        mean_lag_versions: K, measured; >= 0.
        reference_lag_versions: the lag up to which the rate is not reduced; > 0.

    Raises:
        ValueError: if a lag is out of range.
    """
    if not mean_lag_versions >= 0 or not reference_lag_versions > 0:
        raise ValueError(
            f"mean_lag_versions is {mean_lag_versions} and reference_lag_versions "
            f"{reference_lag_versions}; they must be >= 0 and > 0"
        )
    return reference_lag_versions / max(mean_lag_versions, reference_lag_versions)


def is_budget_spent(
    cumulated_rate: float, *, lifetime_budget: float, fraction: float = 0.8
) -> bool:
    """Whether the summed learning rate of a run exceeds this share of B: stop, or decay.

    Args:
        cumulated_rate: sum of the learning rates of all steps so far.
        lifetime_budget: B.
        fraction: the share.
    """
    return cumulated_rate > fraction * lifetime_budget
