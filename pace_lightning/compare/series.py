"""What one run measured, by policy version, read from its directory.

A step that turns version j into j + 1 is filed under j, as in ``draws.jsonl``; an evaluation of
version j happens before that step. Training seconds at version j are the steps before it, without
what evaluations and checkpoints took, and without setting up.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from pace_lightning.training.run_files import DISTRIBUTIONS, METRICS

Curve = tuple[Sequence[float], Sequence[float]]
"""Positions and values, of equal length; positions rise."""

PARTS = ("wait", "train", "pacing", "publish", "rest")
"""Where the seconds of a step go; `pacing` is sleep that was asked for."""


@dataclass(frozen=True)
class RunSeries:
    """Everything the tables and plots use of one run."""

    summary: dict[str, Any]
    """``summary.json``."""
    metrics: dict[str, dict[int, float]] = field(repr=False)
    """Value by policy version, by the name it has in TensorBoard; only finite ones."""
    distributions: dict[str, list[float]] = field(repr=False)
    """All values of all versions, by the name of the histogram."""

    def curve(self, name: str) -> Curve:
        """A metric against policy versions; empty if it was never logged."""
        values = self.metrics.get(name, {})
        versions = sorted(values)
        return versions, [values[version] for version in versions]

    def values(self, name: str) -> list[float]:
        """A metric without its versions."""
        return list(self.curve(name)[1])

    @cached_property
    def step_seconds(self) -> list[dict[str, float]]:
        """Seconds of each step by part, in the order of versions; they add up to the step."""
        steps = []
        for version in sorted(self.metrics.get("time/total_seconds", {})):
            time = {
                part: self.metrics.get(f"time/{part}_seconds", {}).get(version, 0.0)
                for part in (*PARTS[:-1], "evaluate", "checkpoint", "total")
            }
            apart = time.pop("evaluate") + time.pop("checkpoint")
            total = time.pop("total")
            steps.append({**time, "rest": total - apart - sum(time.values())})
        return steps

    @property
    def training_seconds(self) -> float:
        """Of all steps."""
        return sum(sum(step.values()) for step in self.step_seconds)

    def accuracy(self) -> Curve:
        """Held-out pass rate against policy versions."""
        return self.curve("eval/pass_rate")

    def accuracy_by_seconds(self) -> Curve:
        """Held-out pass rate against training seconds."""
        versions, rates = self.accuracy()
        elapsed = [0.0, *accumulate(sum(step.values()) for step in self.step_seconds)]
        return [elapsed[min(int(version), len(elapsed) - 1)] for version in versions], rates


def read_run(run_dir: Path) -> RunSeries:
    """Read the files of a run that ended.

    Raises:
        OSError: if one of them is missing.
        ValueError: if one is not what a run writes.
    """
    metrics: dict[str, dict[int, float]] = defaultdict(dict)
    for line in _lines(run_dir / METRICS):
        version = line.pop("version")
        for name, value in line.items():
            if value is not None:
                metrics[name][version] = value
    distributions: dict[str, list[float]] = defaultdict(list)
    for line in _lines(run_dir / DISTRIBUTIONS):
        distributions[line["name"]] += line["values"]
    return RunSeries(
        summary=json.loads((run_dir / "summary.json").read_text()),
        metrics=dict(metrics),
        distributions=dict(distributions),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def area(curve: Curve, *, until: float | None = None) -> float | None:
    """Mean height of a curve between its first position and ``until`` (trapezoids).

    Args:
        curve: at least two positions, or there is no area.
        until: the end, by linear interpolation; None: the last position.

    Returns:
        None if the curve does not reach ``until``.

    >>> area(([0, 10, 20], [0.0, 0.4, 0.8]))
    0.4
    >>> round(area(([0, 10, 20], [0.0, 0.4, 0.8]), until=15), 3)
    0.3
    """
    positions, heights = np.asarray(curve[0], float), np.asarray(curve[1], float)
    end = positions[-1] if until is None and len(positions) else until
    if len(positions) < 2 or end is None or not positions[0] < end <= positions[-1]:
        return None
    inside = positions < end
    x = np.append(positions[inside], end)
    y = np.append(heights[inside], np.interp(end, positions, heights))
    return float(np.trapezoid(y, x) / (end - positions[0]))


@dataclass(frozen=True)
class Band:
    """Curves of several runs, put together where all of them are known."""

    positions: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    num_runs: int


def band(curves: Sequence[Curve], *, interpolate: bool = False, points: int = 200) -> Band | None:
    """Mean, minimum and maximum over runs.

    Never over fewer runs at one position than at another: a position counts only if every curve has
    it.

    Args:
        curves: one per run; those that are empty are left out.
        interpolate: between positions, in the range that all curves share; for positions that
            differ from run to run, such as seconds.
        points: of the grid to interpolate on.
    """
    curves = [curve for curve in curves if len(curve[0])]
    if not curves:
        return None
    if interpolate:
        start = max(float(curve[0][0]) for curve in curves)
        end = min(float(curve[0][-1]) for curve in curves)
        positions = list(np.linspace(start, end, points)) if end > start else [start]
        rows = [np.interp(positions, curve[0], curve[1]) for curve in curves]
    else:
        known = [dict(zip(*curve, strict=True)) for curve in curves]
        positions = sorted(set.intersection(*(set(values) for values in known)))
        rows = [np.array([values[position] for position in positions]) for values in known]
    table = np.stack(rows)
    if not table.size:
        return None
    return Band(
        [float(position) for position in positions],
        table.mean(0).tolist(),
        table.min(0).tolist(),
        table.max(0).tolist(),
        len(curves),
    )


def smooth(curve: Curve, width: int) -> Curve:
    """Moving average over ``width`` neighboring values, fewer at the ends.

    >>> smooth(([0, 1, 2], [0.0, 3.0, 6.0]), 3)
    ([0, 1, 2], [1.5, 3.0, 4.5])
    """
    half, values = width // 2, curve[1]
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return curve[0], [sum(window) / len(window) for window in windows]
