"""From what runs left to tables, plots and the page; numbers worked out by hand."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pace_lightning.compare.grid import Comparison, Run
from pace_lightning.compare.measures import COLUMNS, Spread, paired, spread
from pace_lightning.compare.plots import PLOTS, render
from pace_lightning.compare.report import write_report
from pace_lightning.compare.runs import Outcome
from pace_lightning.compare.series import Band, RunSeries, area, band, read_run, smooth
from pace_lightning.config_load import load

SMOKE = Path(__file__).parents[1] / "conf" / "smoke.yaml"
ARMS, SEEDS = ("sync", "async", "pace"), (0, 1, 2)

STEPS = 4
FINAL = {
    "sync": {0: 0.5, 1: 0.6, 2: 0.7},
    "async": {0: 0.4, 1: 0.2, 2: 0.3},
    "pace": {0: 0.6, 1: 0.4, 2: 0.8},
}
"""Held-out pass rate at version 4; before, it is 0.1 at version 0 and 0.2 at version 2."""


def write_run(run_dir: Path, final: float, *, scores: bool, drift: float = 0.0) -> RunSeries:
    """The files of a run of four steps, each 2 s long, with one evaluation of 5 s in the third."""
    run_dir.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"version": 0, "eval/pass_rate": 0.1}]
    for version in range(STEPS):
        if version == 2:
            lines.append({"version": 2, "eval/pass_rate": 0.2})
        lines.append({"version": version, "staleness/waiting": 1.0, "staleness/total": 1.5})
        lines.append({"version": version, "pool/occupancy_before_groups": 10.0 + version})
        seconds = {"wait": 0.5, "train": 0.75, "pacing": 0.25, "publish": 0.25}
        seconds |= {"evaluate": 5.0 * (version == 2), "checkpoint": 0.0}
        total = 2.0 + drift + seconds["evaluate"]
        timed = {f"time/{part}_seconds": value for part, value in seconds.items()}
        rate = None if version == 3 else 0.25
        lines.append(
            {
                "version": version,
                **timed,
                "time/total_seconds": total,
                "reward/generated_mean": rate,
            }
        )
    lines.append({"version": STEPS, "eval/pass_rate": final})
    values = [("staleness/waiting", [0.0, 1.0]), ("staleness/waiting", [2.0, 2.0, 2.0, 2.0])]
    if scores:
        values += [("staleness/effective", [0.5]), ("staleness/rejected/effective", [1.5, 2.5])]
    summary = {
        "status": "finished",
        "steps": STEPS,
        "tokens_generated": 1000,
        "tokens_trained": 600,
        "seconds": {"evaluate": 5.0, "total": 20.0},
        "fates": {"trained": 30, "rejected": 10 * scores, "zero_variance": 7},
        "rejected_shares": {"length_decile_10": {"rejected_share": 0.25 * scores}},
        "never_admitted": {"prompts": 3},
    }
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "distributions.jsonl").write_text(
        "".join(
            json.dumps({"version": 0, "name": name, "values": part}) + "\n" for name, part in values
        )
    )
    (run_dir / "summary.json").write_text(json.dumps(summary))
    return read_run(run_dir)


@pytest.fixture
def run(tmp_path: Path) -> RunSeries:
    return write_run(tmp_path / "run", 0.6, scores=True)


def value(run: RunSeries, column: str, early_versions: int = 3) -> float | None:
    return COLUMNS[column].value(run, early_versions)


# --- one run ---


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("final_pass_rate", 0.6),
        ("best_pass_rate", 0.6),
        # versions 0, 2, 4: (0.1 + 0.2) / 2 * 2 + (0.2 + 0.6) / 2 * 2 = 1.1, over 4 versions
        ("mean_pass_rate", 0.275),
        # until version 3, where the line is at 0.4: 0.3 + (0.2 + 0.4) / 2 = 0.6, over 3
        ("early_pass_rate", 0.2),
        ("train_pass_rate", 0.25),  # of the three steps that generated something
        ("training_seconds", 8.0),  # 4 x 2 s; the 5 s of evaluation are not training
        ("evaluation_seconds", 5.0),
        ("step_seconds", 2.0),
        ("versions", 4),
        ("k_wait", 1.5),  # of six trajectories 0 + 1 + 4 x 2; not the mean of the two steps
        ("k_gen", None),
        ("effective", 0.5),
        ("rejected_effective", 2.0),
        ("occupancy", 11.5),
        ("rejected_share", 0.25),  # 10 of 40; groups without gradient never met a draw
        ("never_admitted", 3),
        ("generated_tokens", 1000),
        ("trained_tokens", 600),
    ],
)
def test_a_column_is_the_number_it_says(run, column, expected):
    assert value(run, column) == (None if expected is None else pytest.approx(expected))


def test_the_parts_of_a_step_add_up_to_it_without_evaluation(run):
    parts = {"wait": 0.5, "train": 0.75, "pacing": 0.25, "publish": 0.25, "rest": 0.25}
    assert run.step_seconds == [pytest.approx(parts)] * 4


def test_accuracy_is_placed_at_the_training_seconds_before_its_evaluation(run):
    seconds, rates = run.accuracy_by_seconds()
    assert list(seconds) == [0.0, 4.0, 8.0]
    assert list(rates) == [0.1, 0.2, 0.6]


def test_early_learning_that_was_not_reached_is_not_measured(run):
    assert value(run, "early_pass_rate", early_versions=4) == pytest.approx(0.275)
    assert value(run, "early_pass_rate", early_versions=5) is None


# --- several runs ---


def test_area_needs_two_points():
    assert area(([], [])) is None
    assert area(([0], [0.5])) is None
    assert area(([2, 4], [1.0, 2.0])) == 1.5


def test_area_does_not_see_what_comes_after_its_end():
    # 1 up to 2, then (1 + 0.5) / 2 up to 3
    assert area(([0, 2, 4, 6], [0.0, 1.0, 0.0, 8.0]), until=3) == pytest.approx(1.75 / 3)


def test_spread_is_the_sample_standard_deviation_of_what_is_there():
    # mean 2; squares 1 + 0 + 1, over 3 - 1
    assert spread({0: 1.0, 1: 2.0, 2: 3.0}) == Spread(2.0, 1.0, 3)
    assert spread({0: 1.0, 1: None, 2: 3.0}) == Spread(2.0, pytest.approx(math.sqrt(2)), 2)
    assert spread({0: 1.0, 1: math.nan}) == Spread(1.0, None, 1)
    assert spread({0: None}) is None


def test_pairs_are_of_equal_seeds_and_half_a_pair_does_not_count():
    assert paired({0: 5.0, 1: 7.0, 2: None}, {1: 4.0, 0: 4.0, 2: 1.0}) == Spread(
        2.0, pytest.approx(math.sqrt(2)), 2
    )
    assert paired({0: 1.0}, {1: 1.0}) is None


@pytest.mark.parametrize(
    ("known", "digits", "sign", "text"),
    [
        (Spread(0.4567, 0.0123, 3), 3, False, "0.457 ± 0.012"),
        (Spread(1234.5, 10.0, 3), 0, False, "1,234 ± 10"),
        (Spread(0.02, 0.01, 3), 2, True, "+0.02 ± 0.01"),
        (Spread(-0.001, 0.01, 3), 2, True, "+0.00 ± 0.01"),
        (Spread(0.5, None, 1), 1, False, "0.5 (no spread, n = 1)"),
    ],
)
def test_a_cell_shows_the_spread_or_says_that_there_is_none(known, digits, sign, text):
    assert known.text(digits, sign=sign) == text


def test_a_band_has_only_the_versions_that_all_its_runs_have():
    first, second = ([0, 1, 2], [0.0, 1.0, 2.0]), ([0, 2, 3], [1.0, 4.0, 9.0])
    assert band([first, ([], []), second]) == Band([0, 2], [0.5, 3.0], [0, 2], [1, 4], 2)
    assert band([([], [])]) is None
    assert band([([0], [1.0]), ([1], [1.0])]) is None


def test_an_interpolated_band_ends_with_the_first_of_its_runs():
    first, second = ([0.0, 2.0], [0.0, 2.0]), ([0.0, 4.0], [1.0, 5.0])
    assert band([first, second], interpolate=True, points=3) == Band(
        [0, 1, 2], [0.5, 1.5, 2.5], [0, 1, 2], [1, 2, 3], 2
    )


def test_smoothing_keeps_what_is_level_and_its_positions():
    assert smooth(([3, 5, 6], [2.0, 2.0, 2.0]), 5) == ([3, 5, 6], [2.0, 2.0, 2.0])
    assert smooth(([0, 1, 2, 3], [0.0, 0.0, 3.0, 0.0]), 3)[1] == [0.0, 1.0, 1.0, 1.5]


# --- the report ---


def compare(tmp_path: Path, *missing: tuple[str, int], **changes: Any) -> tuple[Comparison, dict]:
    """A comparison of three arms and three seeds, and its outcomes."""
    overrides = {"sync": ["mode=sync"], "async": [], "pace": ["rollout.max_outstanding_groups=9"]}
    runs = tuple(
        Run(arm, seed, load(SMOKE, [*overrides[arm], f"seed={seed}"]), f"{arm}-{seed}")
        for seed in SEEDS
        for arm in ARMS
    )
    settings = {
        "file": Path("conf/compare/x&y.yaml"),
        "name": "x",
        "title": "Three <arms> & more",
        "seeds": SEEDS,
        "arms": ARMS,
        "baseline": "async",
        "disclosed": ("trainer.steps", "rollout.max_outstanding_groups"),
        "columns": ("final_pass_rate", "effective"),
        "plots": ("accuracy_versions", "step_seconds"),
        "early_versions": 3,
        "runs": runs,
        **changes,
    }
    outcomes = {}
    for run in runs:
        key = run.arm, run.seed
        place = tmp_path / run.identity
        record = {
            "command": f"python -m pace_lightning train {run.identity}",
            "started": "2026-01-01T00:00:00",
            "machine": "a machine of 2 cores",
            "packages": {"torch": "9.9.9"},
            "code": "c0de",
        }
        if key in missing:
            outcomes[key] = Outcome("failed", place, None, record, "ValueError('it <broke>')")
            continue
        series = write_run(place, FINAL[run.arm][run.seed], scores=run.arm == "pace")
        outcomes[key] = Outcome("finished", place, series, record)
    return Comparison(**settings), outcomes


def rows_of(text: str, first: str) -> list[list[str]]:
    """The cells of the lines of a Markdown table that begin with ``first``."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {first} ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_has_mean_and_spread_over_seeds_and_paired_differences(tmp_path):
    comparison, outcomes = compare(tmp_path)
    lines = write_report(comparison, outcomes, tmp_path / "report")
    text = (tmp_path / "report" / "table.md").read_text()
    means, differences = rows_of(text, "final held-out pass rate")
    # 0.6, 0.8: pace has deviations 0, -0.2, 0.2, so sqrt(0.08 / 2) = 0.2
    assert means[1:] == ["share", "0.600 ± 0.100", "0.300 ± 0.100", "0.600 ± 0.200"]
    # sync - async: 0.1, 0.4, 0.4, mean 0.3, sd sqrt((0.04 + 0.01 + 0.01) / 2) = 0.173;
    # pace - async: 0.2, 0.2, 0.5, the same; unpaired, it would be sqrt(0.1**2 + 0.2**2) = 0.224
    assert differences[1:] == ["share", "+0.300 ± 0.173", "+0.300 ± 0.173"]
    assert rows_of(text, "score E of what was trained on")[0][2:] == ["-", "-", "0.50 ± 0.00"]
    assert lines[0] in text
    assert "sync (n = 3)" in lines[0]
    assert "MISSING" not in text


def test_disclosed_settings_stand_under_every_table_with_their_values(tmp_path):
    comparison, outcomes = compare(tmp_path)
    write_report(comparison, outcomes, tmp_path / "report")
    text = (tmp_path / "report" / "table.md").read_text()
    page = (tmp_path / "report" / "index.html").read_text()
    for note in (
        "trainer.steps = 30 in every arm",
        "rollout.max_outstanding_groups = sync null, async null, pace 9",
    ):
        assert text.count(note) == 2
        assert page.count(note) == 2


def test_a_missing_run_is_named_and_the_means_say_over_how_many_seeds_they_are(tmp_path):
    comparison, outcomes = compare(tmp_path, ("sync", 1), ("pace", 0), ("pace", 1))
    lines = write_report(comparison, outcomes, tmp_path / "report")
    text = (tmp_path / "report" / "table.md").read_text()
    assert re.search(r"sync \(n = 2 of 3\) .* async \(n = 3\) .* pace \(n = 1 of 3\)", lines[0])
    means, differences = rows_of(text, "final held-out pass rate")
    # sync 0.5 and 0.7: sd sqrt(2 x 0.01) = 0.141; differences 0.1 and 0.4
    assert means[2:] == ["0.600 ± 0.141", "0.300 ± 0.100", "0.800 (no spread, n = 1)"]
    assert differences[2:] == ["+0.250 ± 0.212", "+0.500 (no spread, n = 1)"]
    assert text.count("MISSING: pace, seed 0: failed: ValueError('it <broke>')") == 2
    page = (tmp_path / "report" / "index.html").read_text()
    assert "3 of 9 runs are missing" in page
    assert "it <broke>" not in page, "not escaped"


def test_without_the_baseline_of_a_seed_its_differences_are_missing_too(tmp_path):
    comparison, outcomes = compare(tmp_path, ("async", 0), ("pace", 1))
    write_report(comparison, outcomes, tmp_path / "report")
    text = (tmp_path / "report" / "table.md").read_text()
    assert re.search(r"sync \(n = 2 of 3\) .* pace \(n = 1 of 3\)", text)
    differences = rows_of(text, "final held-out pass rate")[1]
    # 0.6 - 0.2 and 0.7 - 0.3; 0.8 - 0.3
    assert differences[2:] == ["+0.400 ± 0.000", "+0.500 (no spread, n = 1)"]


def test_a_report_without_a_single_run_still_says_what_is_missing(tmp_path):
    everything = [(arm, seed) for arm in ARMS for seed in SEEDS]
    comparison, outcomes = compare(tmp_path, *everything, plots=tuple(PLOTS))
    lines = write_report(comparison, outcomes, tmp_path / "report")
    assert sum("MISSING" in line for line in lines) == 9
    assert rows_of("\n".join(lines), "final held-out pass rate")[0][2:] == ["-", "-", "-"]


@pytest.mark.parametrize(
    ("what", "other"),
    [("code", "c0ff"), ("machine", "another"), ("packages", {"torch": "9.9.8"})],
)
def test_runs_of_different_code_machines_or_packages_are_pointed_out(tmp_path, what, other):
    comparison, outcomes = compare(tmp_path)
    outcomes["sync", 2].record[what] = other
    notes = write_report(comparison, outcomes, tmp_path / "report")
    assert sum(f"2 different versions of {what}" in note for note in notes) == 1


def test_a_run_that_ended_early_is_pointed_out(tmp_path):
    comparison, outcomes = compare(tmp_path)
    known = outcomes["pace", 2]
    outcomes["pace", 2] = Outcome("nothing_to_learn", known.place, known.series, known.record)
    notes = write_report(comparison, outcomes, tmp_path / "report")
    assert "- pace, seed 2 ended early: nothing_to_learn after 4 steps" in notes


class Links(HTMLParser):
    """Collects what a page loads, and its cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [str(text) for name, text in attrs if name in ("src", "href", "srcset")]


def test_the_page_embeds_every_plot_names_every_arm_and_loads_nothing(tmp_path):
    comparison, outcomes = compare(tmp_path)
    write_report(comparison, outcomes, tmp_path / "report")
    text = (tmp_path / "report" / "index.html").read_text()
    page = Links(text)
    assert len(page.sources) == len(comparison.plots)
    for name, source in zip(comparison.plots, page.sources, strict=True):
        head, _, data = source.partition(",")
        assert head == "data:image/png;base64"
        assert base64.b64decode(data) == (tmp_path / "report" / f"{name}.png").read_bytes()
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert "Three &lt;arms&gt; &amp; more" in text
    for arm in ARMS:
        assert f"<th>{arm} (n = 3)</th>" in text
    for fact in (
        "python -m pace_lightning compare conf/compare/x&amp;y.yaml",
        "python -m pace_lightning train pace-2",
        "a machine of 2 cores",
        "torch 9.9.9",
        "180 s for all runs together",  # nine of 20 s
        "<td>rollout.max_outstanding_groups</td><td>null</td><td>null</td><td>9</td>",
    ):
        assert fact in text


def test_the_tables_for_programs_hold_the_same_numbers_and_every_run(tmp_path):
    comparison, outcomes = compare(tmp_path, ("sync", 1))
    write_report(comparison, outcomes, tmp_path / "report")
    with (tmp_path / "report" / "table.csv").open() as file:
        lines = {(line["column"], line["arm"]): line for line in csv.DictReader(file)}
    pace = lines["final_pass_rate", "pace"]
    assert float(pace["mean"]) == pytest.approx(0.6)
    assert float(pace["sd"]) == pytest.approx(0.2)
    assert float(pace["difference_sd"]) == pytest.approx(math.sqrt(0.03))
    assert (pace["n"], pace["seeds"], pace["baseline"], pace["unit"]) == (
        *("3", "3", "async"),
        "share",
    )
    assert lines["final_pass_rate", "sync"]["n"] == "2"
    assert lines["effective", "sync"]["mean"] == ""
    with (tmp_path / "report" / "runs.csv").open() as file:
        runs = {(line["arm"], line["seed"]): line for line in csv.DictReader(file)}
    assert len(runs) == 9
    assert runs["sync", "1"]["status"] == "failed"
    assert runs["sync", "1"]["final_pass_rate"] == ""
    assert float(runs["pace", "2"]["final_pass_rate"]) == 0.8


def test_plots_that_are_no_longer_wanted_disappear_and_other_files_stay(tmp_path):
    comparison, outcomes = compare(tmp_path)
    target = tmp_path / "report"
    write_report(comparison, outcomes, target)
    (target / "notes.txt").write_text("mine")
    fewer = Comparison(**{**vars(comparison), "plots": ("step_seconds",)})
    write_report(fewer, outcomes, target)
    assert {path.name for path in target.iterdir()} == {
        *("table.md", "table.csv", "runs.csv", "index.html"),
        *("notes.txt", "step_seconds.png"),
    }


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_shows_its_data(tmp_path, name):
    runs = {
        arm: [
            write_run(tmp_path / f"{arm}{seed}", 0.3 + 0.1 * seed, scores=True) for seed in (0, 1)
        ]
        for arm in ("a", "b")
    }
    with_data = picture(render(name, {**runs, "nothing": []}, early_versions=3))
    without = picture(render(name, {"a": [], "b": [], "nothing": []}, early_versions=3))
    assert with_data.width >= 700
    assert len(colors(with_data) - colors(without)) > 1, "neither arm is to be seen"


def picture(png: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG"
    return image.convert("RGB")


def colors(image: Image.Image) -> set[Any]:
    """Colors of more than a few pixels that are not gray."""
    counts = image.getcolors(1 << 24) or []
    return {color for count, color in counts if count > 30 and len(set(color)) > 1}  # type: ignore
