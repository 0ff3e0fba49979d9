"""However a run ends, it ends soon, says why, and leaves nothing running."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from experiments import (
    SMOKE,
    STALL,
    Command,
    DeterministicEngine,
    InProcessScorer,
    build_scripted,
    configure,
    read_lines,
    read_summary,
    until,
    use_script,
)
from scripted import HOLD

from pace_lightning.build import Experiment
from pace_lightning.config_explain import outstanding_limit
from pace_lightning.core.pool import DrawTimeoutError
from pace_lightning.rollout.engine import EngineError
from pace_lightning.rollout.groups import NothingToLearnError, RolloutTimeoutError
from pace_lightning.run import train
from pace_lightning.tasks.scoring import TooManyScorerErrors

pytestmark = pytest.mark.usefixtures("no_thread_left")

SECONDS_TO_FAIL = 15.0
SECONDS_TO_STOP = 15.0

FEW_EVALUATIONS = ("data.held_out=2", "eval.samples=1")
LONG_RUN = ("trainer.steps=100000", "optim.learning_rate=1e-6", *FEW_EVALUATIONS)


class Broken(Exception):
    """What a test breaks a run with."""


@pytest.fixture
def engine() -> DeterministicEngine:
    return DeterministicEngine()


@pytest.fixture
def scorer() -> InProcessScorer:
    return InProcessScorer()


@pytest.fixture
def experiment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: DeterministicEngine,
    scorer: InProcessScorer,
) -> Experiment:
    # the first request is one of training, and the first error is the one to see
    config = configure(tmp_path, "engine.max_restarts=0", "data.held_out=0")
    return build_scripted(monkeypatch, config, engine, scorer)


def fit(experiment: Experiment) -> None:
    experiment.trainer.fit(experiment.module, datamodule=experiment.datamodule)


# --- something breaks inside ---


def test_an_engine_that_dies_in_group_5_ends_the_fit_with_its_error(
    experiment: Experiment, engine: DeterministicEngine, scorer: InProcessScorer
) -> None:
    death = EngineError("the engine burned down")
    engine.script[5] = death
    start = time.monotonic()
    with pytest.raises(EngineError) as raised:
        fit(experiment)
    assert raised.value is death
    assert time.monotonic() - start < SECONDS_TO_FAIL
    assert (engine.closed, scorer.closed) == (True, True)
    assert not experiment.datamodule.worker.is_alive


def test_an_error_in_the_training_step_ends_the_fit_with_it(
    experiment: Experiment,
    engine: DeterministicEngine,
    scorer: InProcessScorer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = experiment.module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        if batch.version == 2:
            raise Broken("in the step")
        return original(batch, batch_idx)

    monkeypatch.setattr(experiment.module, "training_step", training_step)
    start = time.monotonic()
    with pytest.raises(Broken, match="in the step"):
        fit(experiment)
    assert time.monotonic() - start < SECONDS_TO_FAIL
    assert experiment.trainer.global_step == 2
    assert (engine.closed, scorer.closed) == (True, True)
    assert not experiment.datamodule.worker.is_alive


def test_an_engine_that_cannot_start_ends_the_fit_before_the_first_draw(
    experiment: Experiment, engine: DeterministicEngine, scorer: InProcessScorer
) -> None:
    engine.start_error = EngineError("no room for the cache")
    with pytest.raises(EngineError, match="no room for the cache"):
        fit(experiment)
    assert scorer.closed
    assert not experiment.datamodule.worker.is_alive


def test_an_error_in_a_publication_ends_the_fit_with_generation_resumed(
    experiment: Experiment, engine: DeterministicEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = experiment.module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        if batch.version == 1:
            engine.load_error = EngineError("weights refused")
        return original(batch, batch_idx)

    monkeypatch.setattr(experiment.module, "training_step", training_step)
    with pytest.raises(EngineError, match="weights refused"):
        fit(experiment)
    assert not engine.left_paused
    assert engine.closed


@pytest.mark.parametrize("late", ["draw", "publication", "start"])
def test_an_engine_that_stops_answering_ends_the_fit_at_a_deadline_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    engine = DeterministicEngine(default=HOLD)
    if late == "publication":
        engine.load_gate.shut()
    elif late == "start":
        engine.start_gate.shut()
    deadlines = (
        "data.held_out=0",
        "trainer.draw_timeout_seconds=0.5",
        "engine.publish_timeout_seconds=0.5",
        "engine.startup_timeout_seconds=0.5",
    )
    experiment = build_scripted(monkeypatch, configure(tmp_path, *deadlines), engine)
    kind = DrawTimeoutError if late == "draw" else RolloutTimeoutError
    start = time.monotonic()
    with pytest.raises(kind, match="scripted engine with"):
        fit(experiment)
    assert time.monotonic() - start < SECONDS_TO_FAIL
    assert not experiment.datamodule.worker.is_alive


def test_a_failed_run_says_so_in_its_summary_and_keeps_its_books(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: DeterministicEngine
) -> None:
    # 4 evaluation prompts come first, and 4 groups make a step
    engine.script[4 + 11] = EngineError("the engine burned down")
    use_script(monkeypatch, engine)
    settings = ("data.held_out=4", "engine.max_restarts=0")
    with pytest.raises(EngineError, match="burned down"):
        train(configure(tmp_path / "run", *settings), lambda _: None)
    summary = read_summary(tmp_path / "run")
    assert summary["status"] == "failed"
    assert "the engine burned down" in summary["error"]
    assert summary["fates"]["trained"] == 4 * summary["steps"]
    # the lost request, and whatever waited with it, is still accounted for
    assert summary["fates"]["pending"] >= 1
    assert sum(summary["fates"].values()) == len(engine.requests) - 4


# --- the reward function misbehaves ---


@pytest.mark.slow
def test_a_reward_function_that_always_raises_ends_the_run_with_its_own_error(
    tmp_path: Path,
) -> None:
    start = time.monotonic()
    run_dir = tmp_path / "run"
    settings = [f"run_dir={run_dir}", "reward.function=rewards_for_runs:stumble", *FEW_EVALUATIONS]
    with Command(tmp_path / "log", "train", SMOKE, *settings) as command:
        assert command.wait(60) == 1, command.output()
        assert "the verifier stumbled" in command.output()
        assert "rewards_for_runs.py" in command.output(), "where it was raised"
        assert command.children() == []
    summary = read_summary(run_dir)
    assert summary["status"] == "failed"
    assert "the verifier stumbled" in summary["error"]
    assert time.monotonic() - start < 45


@pytest.mark.slow
def test_a_reward_function_that_raises_in_training_ends_the_run_with_its_own_error(
    tmp_path: Path,
) -> None:
    config = configure(
        tmp_path / "run",
        "reward.function=rewards_for_runs:stumble_in_training",
        *FEW_EVALUATIONS,
    )
    with pytest.raises(TooManyScorerErrors, match="the verifier stumbled"):
        train(config, lambda _: None)
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("failed", 0)
    # the budget judges 8 groups: 2 of the evaluation and 6 that failed; the last ends the run
    assert summary["fates"]["scorer_error"] == 5


@pytest.mark.slow
def test_a_reward_function_that_never_returns_ends_the_run_by_its_time_outs(
    tmp_path: Path,
) -> None:
    before = scorer_processes()
    config = configure(
        tmp_path / "run",
        "reward.function=rewards_for_runs:never_return",
        "reward.timeout_seconds=0.3",
        "reward.num_workers=2",
    )
    with pytest.raises(TooManyScorerErrors, match=r"took longer than 0\.3 s"):
        train(config, lambda _: None)
    assert read_summary(tmp_path / "run")["status"] == "failed"
    assert scorer_processes() == before


@pytest.mark.slow
def test_without_one_right_answer_there_is_nothing_to_learn_which_is_an_error(
    tmp_path: Path,
) -> None:
    config = nothing_to_learn(tmp_path / "run")
    with pytest.raises(NothingToLearnError, match=r"nothing to learn: pass rate 0\.00"):
        train(config, lambda _: None)
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("failed", 0)
    assert_ended_by_the_16th(config, summary)


@pytest.mark.slow
def test_nothing_to_learn_is_an_end_like_others_if_the_configuration_says_so(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    config = nothing_to_learn(tmp_path / "run", "trainer.on_nothing_to_learn=finish")
    assert train(config, said.append) == 0
    assert any("nothing to learn: pass rate 0.00" in line for line in said)
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("nothing_to_learn", 0)
    assert_ended_by_the_16th(config, summary)
    assert "pending" not in summary["fates"], "the run is over: what was under way is unused"
    assert summary["pass_rate_after"] is not None, "the engine lives on for a last evaluation"
    assert (tmp_path / "run" / "checkpoints" / "final" / "config.json").exists()


def assert_ended_by_the_16th(config: Any, summary: dict[str, Any]) -> None:
    """No group was dispatched after it; those in flight may have ended before the run did."""
    assert 16 <= summary["fates"]["zero_variance"] <= 16 + outstanding_limit(config)


def nothing_to_learn(run_dir: Path, *overrides: str) -> Any:
    return configure(
        run_dir,
        "reward.function=rewards_for_runs:wrong",
        "trainer.max_empty_groups=16",
        *FEW_EVALUATIONS,
        *overrides,
    )


# --- the data ends ---


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_when_the_prompts_end_the_run_ends_well_and_no_prompt_is_lost(
    tmp_path: Path, mode: str
) -> None:
    config = configure(
        tmp_path / "run",
        f"mode={mode}",
        "reward.function=rewards_for_runs:mixed",
        "eval.every_steps=1",  # also after the last prompt: there is no round to wait for
        "data.sources.0.size=16",
        "data.held_out=2",
        "data.epochs=1",
    )
    assert train(config, lambda _: None) == 0
    summary = read_summary(tmp_path / "run")
    assert summary["status"] == "data_ended"
    assert summary["steps"] == 3, "14 prompts are 3 steps of 4, and 2 are left"
    assert summary["fates"] == {"trained": 12, "unused": 2}
    assert summary["pass_rate_after"] is not None
    assert (tmp_path / "run" / "checkpoints" / "final" / "config.json").exists()


# --- signals ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_in_the_middle_of_training_ends_the_run_and_every_process(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run_dir = tmp_path / "run"
    settings = [f"run_dir={run_dir}", "reward.function=rewards_for_runs:mixed", *LONG_RUN]
    with Command(tmp_path / "log", "train", SMOKE, *settings) as command:
        command.until(
            lambda: len(read_lines(run_dir / "draws.jsonl")) >= 3, seconds=60, what="step 3"
        )
        assert command.children(), "the scorer runs in a process of its own"
        os.kill(command.process.pid, number)
        assert command.wait(SECONDS_TO_STOP) == code, command.output()
        assert command.children() == []
    summary = read_summary(run_dir)
    assert summary["status"] == "interrupted"
    assert summary["steps"] >= 3
    assert summary["fates"]["trained"] == 4 * summary["steps"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_while_the_trainer_waits_for_groups_ends_the_run_and_every_process(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run_dir, stalled = tmp_path / "run", tmp_path / "stalled"
    settings = [f"run_dir={run_dir}", *STALL, *LONG_RUN]
    # 2 evaluation prompts, 2 steps of 4 groups, and 3 groups of a third step
    environment = {"STALL_AFTER_GROUPS": "13", "STALL_FILE": str(stalled)}
    settings += ["reward.timeout_seconds=300"]
    with Command(tmp_path / "log", "train", SMOKE, *settings, environment=environment) as command:
        command.until(
            lambda: stalled.exists() and len(read_lines(run_dir / "draws.jsonl")) == 2,
            seconds=60,
            what="the third draw, which cannot be filled",
        )
        os.kill(command.process.pid, number)
        assert command.wait(SECONDS_TO_STOP) == code, command.output()
        assert command.children() == []
    summary = read_summary(run_dir)
    assert summary["status"] == "interrupted"
    assert summary["fates"] == {"trained": 8, "pending": 8}


@pytest.mark.slow
def test_the_scorer_does_not_outlive_a_trainer_that_was_killed(tmp_path: Path) -> None:
    run_dir, stalled = tmp_path / "run", tmp_path / "stalled"
    settings = [f"run_dir={run_dir}", *STALL, *LONG_RUN]
    environment = {"STALL_AFTER_GROUPS": "5", "STALL_FILE": str(stalled)}
    with Command(tmp_path / "log", "train", SMOKE, *settings, environment=environment) as command:
        command.until(stalled.exists, seconds=60, what="a reward function that hangs")
        assert command.children()
        command.process.kill()
        command.wait(5)
        until(lambda: not command.children(), seconds=5, what="the end of the scorer")


def scorer_processes() -> set[int]:
    """Scorers started by this process and not reaped."""
    return {child.pid for child in psutil.Process().children(recursive=True)}
