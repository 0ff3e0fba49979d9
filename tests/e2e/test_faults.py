"""Whole runs that hang, lose their engine, or are ended in the middle of something."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from experiments import (
    SMOKE,
    Command,
    DeterministicEngine,
    InProcessScorer,
    alternate,
    configure,
    measured,
    read_lines,
    read_summary,
    use_script,
)
from scripted import HOLD, STRAGGLE

from pace_lightning.config_load import load
from pace_lightning.rollout.engine import EngineError, RequestError
from pace_lightning.rollout.supervision import EngineLostError
from pace_lightning.run import train
from pace_lightning.training.watchdog import EXIT_CODE, NoProgressError

pytestmark = pytest.mark.usefixtures("no_thread_left")

SECONDS_TO_STOP = 20.0
FEW_EVALUATIONS = ("data.held_out=2", "eval.samples=1")
MIXED = "reward.function=rewards_for_runs:mixed"


@contextmanager
def faulty(tmp_path: Path, fault: str, *settings: str) -> Iterator[Command]:
    """A run of the smoke experiment with a fault, which has been reached."""
    reached = tmp_path / "reached"
    arguments = ["train", SMOKE, f"run_dir={tmp_path / 'run'}", MIXED, *FEW_EVALUATIONS, *settings]
    environment = {"FAULT": fault, "FAULT_FILE": str(reached)}
    with Command(
        tmp_path / "log", *arguments, environment=environment, module="faulty_run"
    ) as command:
        command.until(reached.exists, seconds=90, what=fault)
        yield command


def assert_nothing_is_half_written(run_dir: Path) -> None:
    """No scratch file is left, and every line is whole."""
    files = sorted(path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*"))
    assert [name for name in files if ".part" in name] == []
    for path in run_dir.glob("*.jsonl"):
        read_lines(path)
    final = run_dir / "checkpoints" / "final"
    assert not final.exists() or (final / "config.json").exists()


# --- no progress ---


def test_a_run_in_which_nothing_happens_any_more_ends_with_a_report_of_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = DeterministicEngine(default=HOLD)
    use_script(monkeypatch, engine)
    # below the deadlines, which a user may not set: so this is not checked
    settings = (f"run_dir={tmp_path / 'run'}", "data.held_out=0", "trainer.watchdog_seconds=1.0")
    config = load(SMOKE, settings)
    begin = time.monotonic()
    with pytest.raises(NoProgressError):
        train(config, lambda _: None)
    assert time.monotonic() - begin < 15
    summary = read_summary(tmp_path / "run")
    assert summary["status"] == "failed"
    assert "trainer: waits for the rollout thread" in summary["error"]
    said = capfd.readouterr().err
    waits = "waits for the engine (rollout.timeout_seconds): dispatched at version 0"
    assert said.count(waits) == 8
    assert "scripted engine with 8 live requests" in said
    assert "trainer.draw_timeout_seconds" in said
    assert "core/pool.py" in said, "where the main thread waits"
    assert engine.closed


@pytest.mark.slow
def test_a_main_thread_that_is_stuck_in_c_is_left_and_the_run_says_why(tmp_path: Path) -> None:
    with faulty(tmp_path, "get_stuck") as command:
        begin = time.monotonic()
        assert command.wait(60) == EXIT_CODE, command.output()
        measured("stuck", begin)
        output = command.output()
        assert "trainer: computes a micro-batch" in output
        assert "in get_stuck" in output
        command_ended(command)
    summary = read_summary(tmp_path / "run")
    assert summary["status"] == "failed"
    assert "no progress for 15 s" in summary["error"]


# --- the engine ---


def test_failing_requests_stop_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = {number: RequestError("the cache is full") for number in range(5, 400, 20)}
    engine = DeterministicEngine(script)
    use_script(monkeypatch, engine)
    config = configure(tmp_path / "run", "data.held_out=4", "trainer.steps=50")
    assert train(config, lambda _: None) == 0
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("finished", 50)
    assert summary["fates"]["trained"] == 200
    assert "failed" not in summary["fates"]
    assert summary["incidents"]["retried_requests"] >= 10


def test_what_blocks_the_loop_of_the_rollout_thread_is_alarmed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    block = [3.0]  # once, in the first step: evaluations are left out

    def score(texts: Sequence[str]) -> list[float]:
        time.sleep(block.pop() if block else 0.0)
        return alternate(texts)

    use_script(monkeypatch, DeterministicEngine(), InProcessScorer(score))
    assert train(configure(tmp_path / "run", "data.held_out=0"), lambda _: None) == 0
    assert re.search(r"blocked the rollout thread's event loop for [23]\.\d s", caplog.text)


def test_a_dead_engine_is_restarted_and_the_run_goes_on_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = DeterministicEngine({15: EngineError("gone")})
    use_script(monkeypatch, engine)
    config = configure(tmp_path / "run", "data.held_out=4", "trainer.steps=6")
    assert train(config, lambda _: None) == 0
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["fates"]["trained"]) == ("finished", 24)
    assert summary["incidents"]["engine_restarts"] == 1
    versions = [version for version, _ in engine.weights]
    again = next(i for i, (a, b) in enumerate(pairwise(versions)) if a == b)
    assert sorted(set(versions)) == list(range(7))
    for name, weight in engine.weights[again][1].items():
        assert weight.equal(engine.weights[again + 1][1][name])


def test_an_engine_that_keeps_dying_ends_the_run_with_a_named_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = DeterministicEngine(default=EngineError("gone"))
    use_script(monkeypatch, engine)
    with pytest.raises(EngineLostError, match=r"after 2 restarts \(engine.max_restarts\)"):
        train(configure(tmp_path / "run", "data.held_out=0"), lambda _: None)
    summary = read_summary(tmp_path / "run")
    assert summary["status"] == "failed"
    assert summary["incidents"]["engine_restarts"] == 2
    assert_nothing_is_half_written(tmp_path / "run")


@pytest.mark.parametrize("on_timeout", ["settle", "retry", "complete"])
def test_a_straggler_holds_up_no_step_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_timeout: str
) -> None:
    engine = DeterministicEngine({9: STRAGGLE})
    use_script(monkeypatch, engine)
    config = configure(
        tmp_path / "run",
        "data.held_out=4",
        "trainer.steps=3",
        "rollout.timeout_seconds=0.5",
        "rollout.group_size=3",
        "rollout.max_outstanding_groups=4",
        f"rollout.on_timeout={on_timeout}",
    )
    assert train(config, lambda _: None) == 0
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["fates"]["trained"]) == ("finished", 12)
    counts = {name: count for name, count in summary["incidents"].items() if count}
    expected: dict[str, dict[str, int]] = {
        "settle": {},
        "retry": {"retried_stragglers": 1},
        "complete": {"completed_stragglers": 1},
    }
    assert counts == expected[on_timeout]
    assert summary["fates"].get("timed_out", 0) == int(on_timeout == "settle")


@pytest.mark.slow
def test_a_generation_loop_that_crashes_is_restarted_and_the_run_finishes(tmp_path: Path) -> None:
    with faulty(tmp_path, "crash_engine", "trainer.steps=20") as command:
        begin = time.monotonic()
        draws = tmp_path / "run" / "draws.jsonl"
        before = len(read_lines(draws))
        command.until(lambda: len(read_lines(draws)) > before, seconds=30, what="the next step")
        measured("restart", begin)
        assert command.wait(90) == 0, command.output()
        assert "restart 1 of 2 of the engine" in command.output()
        assert "in the engine" in command.output()
        command_ended(command)
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("finished", 20)
    assert summary["incidents"]["engine_restarts"] == 1
    gaps = [line.get("ratio/lag0_log_abs_mean") for line in metrics(tmp_path / "run")]
    known = [gap for gap in gaps if gap is not None]
    assert known
    assert max(known) < 1e-3, "the restarted engine has the trainer's weights"


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return read_lines(run_dir / "metrics.jsonl")


@pytest.mark.slow
def test_a_generation_loop_that_crashes_without_a_restart_left_ends_the_run(tmp_path: Path) -> None:
    with faulty(tmp_path, "crash_engine", "engine.max_restarts=0") as command:
        begin = time.monotonic()
        assert command.wait(SECONDS_TO_STOP) == 1, command.output()
        measured("engine death", begin)
        assert "generation loop died" in command.output()
        command_ended(command)
    summary = read_summary(tmp_path / "run")
    assert summary["status"] == "failed"
    assert "in the engine" in summary["error"]
    assert_nothing_is_half_written(tmp_path / "run")


# --- however it ends ---


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["break_step", "break_step_and_teardown"])
def test_an_error_in_the_step_ends_the_run_with_itself(tmp_path: Path, fault: str) -> None:
    with faulty(tmp_path, fault, "trainer.checkpoint_every_steps=1") as command:
        begin = time.monotonic()
        assert command.wait(SECONDS_TO_STOP) == 1, command.output()
        measured(fault, begin)
        assert "Broken: in the step" in command.output()
        command_ended(command)
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert_nothing_is_half_written(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "number", "code"),
    [
        ("hold_in_step", signal.SIGTERM, 143),
        ("hold_in_publication", signal.SIGINT, 130),
        ("hold_in_checkpoint", signal.SIGTERM, 143),
        ("hold_in_checkpoint", signal.SIGINT, 130),
        ("hold_in_export", signal.SIGTERM, 143),
        ("hold_in_export", signal.SIGINT, 130),
    ],
)
def test_a_signal_in_the_middle_of_anything_leaves_nothing_running_and_nothing_half_written(
    tmp_path: Path, place: str, number: signal.Signals, code: int
) -> None:
    settings = ["trainer.checkpoint_every_steps=1", "trainer.steps=3"]
    with faulty(tmp_path, place, *settings) as command:
        begin = time.monotonic()
        os.kill(command.process.pid, number)
        assert command.wait(SECONDS_TO_STOP) == code, command.output()
        measured(f"{place} {number.name}", begin)
        command_ended(command)
    assert read_summary(tmp_path / "run")["status"] == "interrupted"
    assert_nothing_is_half_written(tmp_path / "run")


def command_ended(command: Command) -> None:
    assert command.children() == []
