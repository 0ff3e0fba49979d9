"""The columns of a comparison's table: one number per run, and its mean and spread over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pace_lightning.compare.series import RunSeries, area


@dataclass(frozen=True)
class Column:
    """One number of a run."""

    title: str
    unit: str
    value: Callable[[RunSeries, int], float | None]
    """Called with the run and the version at which early learning ends; None: not measured."""
    digits: int


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over the seeds that have a value."""

    mean: float
    deviation: float | None
    """None with a single value: one run has no spread."""
    count: int

    def text(self, digits: int, *, sign: bool = False) -> str:
        """For a table.

        >>> Spread(0.5, 0.025, 3).text(2)
        '0.50 ± 0.03'
        """
        mean = round(self.mean, digits) + 0.0  # -0.0 becomes 0.0
        text = f"{mean:{'+' if sign else ''},.{digits}f}"
        if self.deviation is None:
            return f"{text} (no spread, n = 1)"
        return f"{text} ± {self.deviation:,.{digits}f}"


def spread(values: Mapping[int, float | None]) -> Spread | None:
    """Mean and sample standard deviation (ddof 1) of the values that are there, by seed.

    >>> spread({0: 1.0, 1: 3.0, 2: None})
    Spread(mean=2.0, deviation=1.4142135623730951, count=2)
    """
    known = [value for value in values.values() if value is not None and math.isfinite(value)]
    if not known:
        return None
    deviation = statistics.stdev(known) if len(known) > 1 else None
    return Spread(statistics.fmean(known), deviation, len(known))


def paired(
    values: Mapping[int, float | None], baseline: Mapping[int, float | None]
) -> Spread | None:
    """Mean and spread of the differences to the baseline, over the seeds that have both.

    The same seed is the same prompts and the same initial weights, so what seeds have in common
    cancels, and the spread is that of the difference.

    >>> paired({0: 1.0, 1: 2.0}, {0: 0.5, 1: 1.0, 2: 7.0})
    Spread(mean=0.75, deviation=0.3535533905932738, count=2)
    """
    differences: dict[int, float | None] = {}
    for seed, value in values.items():
        other = baseline.get(seed)
        if value is not None and other is not None:
            differences[seed] = value - other
    return spread(differences)


def _mean(name: str) -> Callable[[RunSeries, int], float | None]:
    def value(run: RunSeries, early_versions: int) -> float | None:
        values = run.values(name)
        return statistics.fmean(values) if values else None

    return value


def _pooled(name: str) -> Callable[[RunSeries, int], float | None]:
    """Mean over all trajectories or groups, however many each step had."""

    def value(run: RunSeries, early_versions: int) -> float | None:
        values = run.distributions.get(name, [])
        return statistics.fmean(values) if values else None

    return value


def _milliseconds(name: str) -> Callable[[RunSeries, int], float | None]:
    """Mean over steps of a metric in seconds."""

    def value(run: RunSeries, early_versions: int) -> float | None:
        values = run.values(name)
        return 1000 * statistics.fmean(values) if values else None

    return value


def _rejected_share(run: RunSeries, early_versions: int) -> float | None:
    fates = run.summary["fates"]
    rejected = fates.get("rejected", 0) + fates.get("too_stale", 0)
    taken = fates.get("trained", 0) + rejected
    return rejected / taken if taken else None


def _step_seconds(run: RunSeries, early_versions: int) -> float | None:
    steps = [sum(step.values()) for step in run.step_seconds]
    return statistics.median(steps) if steps else None


COLUMNS = {
    "final_pass_rate": Column(
        "final held-out pass rate", "share", lambda r, e: next(iter(r.accuracy()[1][-1:]), None), 3
    ),
    "best_pass_rate": Column(
        "best held-out pass rate", "share", lambda r, e: max(r.accuracy()[1], default=None), 3
    ),
    "mean_pass_rate": Column(
        "mean held-out pass rate over versions", "share", lambda r, e: area(r.accuracy()), 3
    ),
    "early_pass_rate": Column(
        "mean held-out pass rate, early versions",
        "share",
        lambda r, e: area(r.accuracy(), until=e),
        3,
    ),
    "train_pass_rate": Column(
        "pass rate of generated responses, mean over versions",
        "share",
        _mean("reward/generated_mean"),
        3,
    ),
    "versions": Column("policy versions", "steps", lambda r, e: r.summary["steps"], 0),
    "training_seconds": Column(
        "training time without evaluation", "s", lambda r, e: r.training_seconds, 1
    ),
    "evaluation_seconds": Column(
        "evaluation time", "s", lambda r, e: r.summary["seconds"]["evaluate"], 1
    ),
    "step_seconds": Column("time per step, median", "s", _step_seconds, 3),
    "ranking_seconds": Column(
        "choosing groups, per step", "ms", _milliseconds("pool/ranking_seconds"), 3
    ),
    "rescore_seconds": Column(
        "re-scoring prefixes in the engine, per step",
        "ms",
        _milliseconds("pool/rescore_seconds"),
        2,
    ),
    "k_wait": Column("K_wait of what was trained on", "versions", _pooled("staleness/waiting"), 2),
    "k_gen": Column("K_gen of what was trained on", "versions", _pooled("staleness/generation"), 2),
    "k": Column("K of what was trained on", "versions", _pooled("staleness/total"), 2),
    "effective": Column(
        "score E of what was trained on", "versions", _pooled("staleness/effective"), 2
    ),
    "rejected_k": Column(
        "K of what was rejected", "versions", _pooled("staleness/rejected/total"), 2
    ),
    "rejected_effective": Column(
        "score E of what was rejected", "versions", _pooled("staleness/rejected/effective"), 2
    ),
    "occupancy": Column(
        "ready groups when a draw begins, mean", "groups", _mean("pool/occupancy_before_groups"), 1
    ),
    "rejected_share": Column(
        "rejected share of the groups taken from the pool", "share", _rejected_share, 3
    ),
    "never_admitted": Column(
        "prompts that were rejected and never trained on",
        "prompts",
        lambda r, e: r.summary["never_admitted"]["prompts"],
        1,
    ),
    "generated_tokens": Column(
        "generated tokens", "tokens", lambda r, e: r.summary["tokens_generated"], 0
    ),
    "trained_tokens": Column(
        "trained tokens", "tokens", lambda r, e: r.summary["tokens_trained"], 0
    ),
}
"""Every column by its name in a comparison file."""
