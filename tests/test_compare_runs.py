"""Comparisons with real runs of the smoke experiment: made once, shared, resumed, reported."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from experiments import ROOT, STALL, Command, read_lines, until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pace_lightning.__main__ import main
from pace_lightning.compare.command import compare
from pace_lightning.config import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SHORT = "trainer.steps=2, eval.every_steps=1, data.held_out=2, eval.samples=1"
SYNC, ASYNC = ("sync", "mode=sync"), ("async", "rollout.max_outstanding_groups=8")
SECONDS_TO_STOP = 15.0


def write(directory: Path, name: str, *arms: tuple[str, ...]) -> Path:
    """A comparison of arms, each a name and its settings, on seeds 0 and 1."""
    lines = [f"  {arm}: {{conf: conf/smoke.yaml, set: {list(own)}}}" for arm, *own in arms]
    file = directory / f"{name}.yaml"
    text = f"name: {name}\ntitle: Comparison {name}\nseeds: [0, 1]\nset: [{SHORT}]\narms:\n"
    file.write_text(text + "\n".join(lines) + "\n")
    return file


def link(directory: Path) -> Path:
    """A working directory that has the shipped files, and runs of its own."""
    for name in ("conf", "data"):
        (directory / name).symlink_to(ROOT / name)
    return directory


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))  # for rewards_for_runs


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A working directory with one comparison in it, and what the command said."""
    directory = link(tmp_path_factory.mktemp("work"))
    lines: list[str] = []
    with contextlib.chdir(directory):
        file = write(directory, "first", SYNC, ASYNC)
        assert compare(file, lines.append) == 0, "\n".join(lines)
    return directory, lines


@pytest.fixture
def directory(first: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(first[0])
    return first[0]


def runs_of(directory: Path) -> dict[str, int]:
    """Every file of every run with the time it was written."""
    runs = directory / "runs" / "compare" / "RUNS"
    files = [path for path in runs.rglob("*") if path.is_file()]
    return {str(path.relative_to(runs)): path.stat().st_mtime_ns for path in files}


def report(directory: Path, name: str) -> str:
    return (directory / "runs" / "compare" / name / "table.md").read_text()


def test_every_arm_is_run_once_per_seed_and_leaves_what_is_needed(first, directory):
    _, lines = first
    begun = [line for line in lines if line.startswith("[")]
    labels = ["[1/4] seed 0, sync", "[2/4] seed 0, async", "[3/4] seed 1, sync"]
    for line, label in zip(begun, [*labels, "[4/4] seed 1, async"], strict=True):
        assert line.startswith(label)
    places = list((directory / "runs" / "compare" / "RUNS").iterdir())
    assert len(places) == 4
    for place in places:
        record = json.loads((place / "run.json").read_text())
        assert record["exit_code"] == 0
        assert record["command"] == (
            f"python -m pace_lightning train runs/compare/RUNS/{place.name}/experiment.yaml "
            f"run_dir=runs/compare/RUNS/{place.name}/run"
        )
        metrics = read_lines(place / "run" / "metrics.jsonl")
        assert [m["version"] for m in metrics if "eval/pass_rate" in m] == [0, 1, 2]
        assert [m["version"] for m in metrics if "time/total_seconds" in m] == [0, 1]
    assert "sync (n = 2)" in report(directory, "first")
    page = (directory / "runs" / "compare" / "first" / "index.html").read_text()
    pictures = re.findall('src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) >= 8
    assert all(base64.b64decode(data).startswith(b"\x89PNG") for data in pictures)
    assert not re.search("https?://", page)


def test_the_text_files_of_a_run_hold_what_tensorboard_shows(directory):
    run_dir = next((directory / "runs" / "compare" / "RUNS").iterdir()) / "run"
    size = dict.fromkeys(("scalars", "histograms"), 0)
    events = EventAccumulator(str(run_dir / "tensorboard"), size).Reload()
    written: dict[str, dict[int, float]] = {}
    for line in read_lines(run_dir / "metrics.jsonl"):
        for name, value in line.items():
            if name != "version":
                written.setdefault(name, {})[line["version"]] = value
    shown = {
        tag: {event.step: pytest.approx(event.value, rel=1e-5) for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }
    assert len(shown) > 20
    assert written == shown
    values = {
        (f"histograms/{line['name']}", line["version"]): len(line["values"])
        for line in read_lines(run_dir / "distributions.jsonl")
    }
    assert values == {
        (tag, event.step): event.histogram_value.num
        for tag in events.Tags()["histograms"]
        for event in events.Histograms(tag)
    }


def test_a_finished_comparison_is_rendered_again_without_a_run(directory):
    before = runs_of(directory)
    lines: list[str] = []
    assert compare(directory / "first.yaml", lines.append) == 0
    assert sum("is there already" in line for line in lines) == 4
    assert runs_of(directory) == before


def test_two_comparisons_share_their_runs_whatever_they_call_them(directory):
    before = runs_of(directory)
    file = write(directory, "second", ("turbo", ASYNC[1]), ("slow", SYNC[1]))
    lines: list[str] = []
    assert compare(file, lines.append) == 0
    assert sum("is there already" in line for line in lines) == 4
    assert runs_of(directory) == before
    assert "turbo (n = 2)" in report(directory, "second")
    cells = [
        re.findall(r"\| final held-out .*", report(directory, n))[0] for n in ("first", "second")
    ]
    first, second = ([cell.strip() for cell in line.split("|")][3:5] for line in cells)
    assert first == second[::-1]


def test_a_failed_run_is_shown_the_others_go_on_and_the_exit_code_says_so(directory, capsys):
    reward = "reward.function=rewards_for_runs:stumble"
    file = write(directory, "broken", ("broken", reward), SYNC)
    assert main(["compare", str(file)]) == 1
    output = capsys.readouterr().out
    assert len(re.findall(r"FAILED after \d+ s: .*stumbled", output)) == 2, output
    logs = re.findall(r"its log: (\S+);", output)
    assert all("stumbled" in Path(log).read_text() for log in logs)
    assert "broken (n = 0 of 2)" in output
    assert "sync (n = 2)" in output
    assert "MISSING: broken, seed 1: failed: " in report(directory, "broken")
    assert "2 of 4 runs are missing" in output


def test_a_report_starts_nothing_and_marks_what_is_missing(directory, capsys):
    before = runs_of(directory)
    file = write(directory, "planned", SYNC, ("planned", "optim.learning_rate=1e-4"))
    assert main(["compare", str(file), "--report"]) == 0
    assert "MISSING: planned, seed 0: missing: not made yet" in capsys.readouterr().out
    assert runs_of(directory) == before


def test_a_file_that_is_no_comparison_ends_with_code_2(directory, capsys):
    assert main(["compare", "conf/smoke.yaml"]) == 2
    assert "conf/smoke.yaml: this is an experiment, not a comparison" in capsys.readouterr().err


# --- interrupted ---


@pytest.fixture
def stalled(
    request: pytest.FixtureRequest,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Command, Path]]:
    """A comparison in a process of its own, whose first run hangs; another time it would not."""
    flag = tmp_path / "stalled"
    monkeypatch.setenv("STALL_FILE", str(flag))
    monkeypatch.setenv("STALL_AFTER_GROUPS", "1000000")
    # settings of its own for each test, so that none finds the run of another
    own = f"reward.timeout_seconds={300 + len(request.node.name)}"
    file = write(directory, request.node.name, ("stalled", *STALL, own), SYNC)
    now = {"STALL_AFTER_GROUPS": "3"}
    with Command(
        tmp_path / "log", "compare", file, environment=now, directory=directory
    ) as command:
        command.until(flag.exists, seconds=120, what="the run stalls")
        yield command, file


def test_one_comparison_runs_at_a_time_and_after_ctrl_c_it_goes_on(stalled):
    command, file = stalled
    with pytest.raises(ConfigError) as refusal:
        compare(file, lambda _: None)
    holder = f"another comparison is at work: process {command.process.pid}, run "
    assert holder in str(refusal.value)
    assert compare(file, lambda _: None, report_only=True) == 0

    command.process.send_signal(signal.SIGINT)
    assert command.wait(SECONDS_TO_STOP) == 130, command.output()
    until(lambda: not command.children(), seconds=5, what="the end of its processes")
    assert "Traceback" not in command.output()

    lines: list[str] = []
    assert compare(file, lines.append) == 0, "\n".join(lines)
    assert "(interrupted before: from scratch)" in lines[0]
    assert sum("finished in" in line for line in lines) == 2
    assert sum("is there already" in line for line in lines) == 2


def test_the_run_of_a_comparison_that_was_killed_holds_the_lock_until_it_ends(stalled):
    command, file = stalled
    command.process.kill()
    command.process.wait(10)
    with pytest.raises(ConfigError, match=r"at work: .*, run \w+ as process \d+") as refusal:
        compare(file, lambda _: None)
    run = int(re.findall(r"as process (\d+)", str(refusal.value))[0])
    os.killpg(run, signal.SIGKILL)
    until(lambda: not command.children(), seconds=10, what="the end of its processes")
    lines: list[str] = []
    compare(file, lines.append, report_only=True)
    assert any("MISSING: stalled, seed 0: interrupted: " in line for line in lines)
