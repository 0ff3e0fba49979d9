"""What a run leaves as text: every scalar and every histogram, cut at a resume."""

from __future__ import annotations

import math
from pathlib import Path

from experiments import read_lines

from pace_lightning.training.run_files import DISTRIBUTIONS, METRICS, RunFiles


def versions(path: Path) -> list[int]:
    return [line["version"] for line in read_lines(path)]


def test_scalars_and_histograms_are_lines_with_their_version_and_name(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.log_metrics({"loss/objective": 0.5, "time/wait_seconds": 2}, step=7)
    files.log_distribution("staleness/total", [0.0, 2.5], 7)
    assert read_lines(tmp_path / METRICS) == [
        {"version": 7, "loss/objective": 0.5, "time/wait_seconds": 2.0}
    ]
    assert read_lines(tmp_path / DISTRIBUTIONS) == [
        {"version": 7, "name": "staleness/total", "values": [0.0, 2.5]}
    ]


def test_what_is_not_finite_becomes_null_because_json_knows_no_nan(tmp_path: Path) -> None:
    RunFiles(tmp_path).log_metrics({"a": math.nan, "b": -math.inf, "c": 1.0}, step=0)
    assert "NaN" not in (tmp_path / METRICS).read_text()
    assert read_lines(tmp_path / METRICS) == [{"version": 0, "a": None, "b": None, "c": 1.0}]


def test_a_resumed_run_replaces_the_lines_of_its_version_and_later_ones(tmp_path: Path) -> None:
    first = RunFiles(tmp_path)
    for version in range(5):
        first.log_metrics({"x": version}, step=version)
        first.log_distribution("y", [version], version)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"version": 5, "x"')  # killed here
    again = RunFiles(tmp_path, resumed_version=3)
    assert versions(tmp_path / DISTRIBUTIONS) == [0, 1, 2, 3, 4], "cut before anything is logged"
    again.log_metrics({"x": 30}, step=3)
    again.log_metrics({"x": 40}, step=4)
    assert [(line["version"], line["x"]) for line in read_lines(tmp_path / METRICS)] == [
        *((0, 0.0), (1, 1.0), (2, 2.0)),
        *((3, 30.0), (4, 40.0)),
    ]
    assert versions(tmp_path / DISTRIBUTIONS) == [0, 1, 2]
