"""A run that was killed goes on from its newest checkpoint as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experiments import (
    ROOT,
    SMOKE,
    Command,
    DeterministicEngine,
    InProcessScorer,
    build_scripted,
    configure,
    measured,
    read_lines,
    read_summary,
    run_command,
    use_script,
)
from safetensors.torch import load_file
from scripted import HOLD
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pace_lightning.__main__ import main
from pace_lightning.build_tasks import sample_writer
from pace_lightning.config import Config, ConfigError
from pace_lightning.config_load import load
from pace_lightning.core.ledger import Ledger
from pace_lightning.core.saved_groups import unpack
from pace_lightning.core.trajectory import Fate, TrajectoryGroup
from pace_lightning.run import resume, train
from pace_lightning.tasks.prompts import PromptStream
from pace_lightning.training.checkpoint_files import CheckpointError, read_checkpoint

STEPS, EVERY = 8, 2
SCRIPTED = (
    f"trainer.steps={STEPS}",
    f"trainer.checkpoint_every_steps={EVERY}",
    "trainer.micro_batches=2",
    "data.held_out=2",
    "eval.samples=1",
)


class Killed(BaseException):
    """Ends a run as abruptly as is possible inside one process."""


# --- a process that is killed ---


@pytest.mark.slow
def test_a_killed_run_is_resumed_to_its_last_step_with_nothing_twice(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = [
        f"run_dir={run_dir}",
        "trainer.steps=40",
        "trainer.checkpoint_every_steps=2",
        "reward.function=rewards_for_runs:mixed",
        "data.held_out=2",
    ]
    with Command(tmp_path / "log", "train", SMOKE, *settings) as command:
        command.until(
            lambda: len(checkpoints(run_dir)) == 2, seconds=60, what="the second checkpoint"
        )
        command.process.kill()
        command.wait(5)
    assert not (run_dir / "summary.json").exists(), "it was killed too late"
    restored = version_of(checkpoints(run_dir)[-1])

    code, output = run_command(tmp_path / "log-2", "resume", run_dir)
    assert code == 0, output
    assert f"version {restored}" in output
    summary = read_summary(run_dir)
    assert summary["status"] == "finished"
    assert summary["policy_version"] == summary["steps"] == 40
    draws = read_lines(run_dir / "draws.jsonl")
    assert [draw["version"] for draw in draws] == list(range(40))
    assert summary["fates"]["trained"] == 4 * 40
    assert "pending" not in summary["fates"]
    assert summary["tokens_trained"] == summary["fates_tokens"]["trained"]
    assert summary["tokens_generated"] >= sum(summary["fates_tokens"].values())
    assert summary["pass_rate_before"] is not None
    # the last checkpoint is that of version 40: its books must close
    books = torch.load(checkpoints(run_dir)[-1], weights_only=True)["RolloutDataModule"]
    prompts, groups = books["prompts"], books["ledger"]["groups"]
    leased = prompts["epoch"] * 79 + prompts["position"]
    assert leased == sum(groups.values()) + len(prompts["outstanding"])
    # the bound on what is outstanding (8 groups) bounds the lag: 2 draws of 4
    assert max(draw["total_staleness_versions"] for draw in draws) <= 3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_responses_that_a_killed_process_had_begun_go_on_token_by_token_in_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    settings = [
        f"run_dir={run_dir}",
        "trainer.steps=30",
        "trainer.checkpoint_every_steps=1",
        "rollout.max_new_tokens=48",
        "rollout.group_size=4",
        "trainer.groups_per_step=2",
        "reward.function=rewards_for_runs:mixed",
        "data.held_out=0",
    ]
    begun: dict[str, Any] = {}

    def has_begun() -> bool:
        if len(checkpoints(run_dir)) < 2:
            return False
        state = read_checkpoint(checkpoints(run_dir)[-1])["RolloutDataModule"]
        begun.clear()
        begun.update({r["uid"]: unpack(r["tokens"]) for r in state["rollouts"]})
        return any(tokens for responses in begun.values() for tokens, _, _ in responses)

    with Command(tmp_path / "log", "train", SMOKE, *settings) as command:
        command.until(has_begun, seconds=120, what="a checkpoint with begun responses")
        command.process.kill()
        command.wait(5)
    killed_at = time.monotonic()
    newest = checkpoints(run_dir)[-1]
    restored = version_of(newest)
    state = read_checkpoint(newest)["RolloutDataModule"]
    begun = {r["uid"]: unpack(r["tokens"]) for r in state["rollouts"]}
    ready = {g["uid"]: unpack(g["tokens"]) for g in state["pool"]["groups"]}
    trained: dict[str, TrajectoryGroup] = {}

    def record(version: int, groups: Sequence[TrajectoryGroup]) -> None:
        if not trained:
            measured("killed, then resumed: from the kill to the first draw", killed_at)
        trained.update({group.prompt.uid: group for group in groups})

    monkeypatch.setattr("pace_lightning.build.sample_writer", lambda *_: record)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    assert resume(run_dir, lambda _: None, ["trainer.steps=" + str(restored + 4)]) == 0
    old = 0
    for uid, responses in [*ready.items(), *begun.items()]:
        if uid not in trained:
            continue
        for trajectory, (tokens, versions, logprobs) in zip(
            trained[uid].trajectories, responses, strict=False
        ):
            size = len(tokens) if uid in begun else None
            assert [*trajectory.token_ids[:size]] == tokens
            assert [*trajectory.token_versions[:size]] == versions
            assert [*trajectory.behavior_logprobs[:size]] == logprobs
            assert all(version >= restored for version in trajectory.token_versions[len(tokens) :])
            old += uid in begun and bool(tokens) and min(versions) < restored
            old += uid in begun and len(trajectory.token_ids) > len(tokens) > 0
    assert old, "no response that had been begun was trained on"
    assert read_summary(run_dir)["policy_version"] == restored + 4


# --- scripted runs ---


def test_prompts_trained_before_and_after_are_those_of_a_run_without_a_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Recorder()
    run(configure(tmp_path / "whole", *SCRIPTED, "mode=sync"), monkeypatch, recorder=whole)
    config = configure(tmp_path / "broken", *SCRIPTED, "mode=sync")
    first, second = Recorder(die_at=5), Recorder()
    with pytest.raises(Killed):
        run(config, monkeypatch, recorder=first)
    continue_run(config, monkeypatch, recorder=second)
    assert list(second.uids) == [4, 5, 6, 7], "version 4 was the last with a checkpoint"
    kept = {version: uids for version, uids in first.uids.items() if version < 4}
    assert kept | second.uids == whole.uids
    trained = [uid for uids in (kept | second.uids).values() for uid in uids]
    assert len(trained) == len(set(trained))


METHODS_WITH_A_MEMORY = (
    "sync.lag_versions=3",
    "loss.proximal=ewma",
    "loss.proximal_settings={stale_versions: 3, reset_below: 0}",
    "loss.corrections=[{name: mis, lower: null}]",
    "loss.mask_denominator=kept",
    "optim.ess_scaling=sqrt",
    "trainer.micro_batches=2",
)


@pytest.mark.parametrize(
    ("method", "published"),
    [
        ((), {4, 5, 6, 7, 8}),
        (METHODS_WITH_A_MEMORY, {1, 2, 3, 4, 5}),
        (("model.lora.rank=4", "loss.kl_coef=0.01"), {4, 5, 6, 7, 8}),
    ],
    ids=["plain", "with a memory", "adapters"],
)
def test_resumed_training_equals_training_without_a_break_bit_for_bit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: tuple[str, ...],
    published: set[int],
) -> None:
    settings = (*SCRIPTED, "mode=sync", "trainer.num_threads=1", "trainer.engine_threads=1")
    settings = (*settings, "optim.warmup_steps=6", *method)
    whole = run(configure(tmp_path / "whole", *settings), monkeypatch)
    config = configure(tmp_path / "broken", *settings)
    with pytest.raises(Killed):
        run(config, monkeypatch, recorder=Recorder(die_at=5))
    resumed = continue_run(config, monkeypatch)
    expected, found = dict(whole.weights), dict(resumed.weights)
    assert published <= set(found)
    for version, weights in found.items():
        for name, weight in weights.items():
            assert torch.equal(weight, expected[version][name]), (version, name)
    finals = [
        load_file(tmp_path / x / "checkpoints" / "final" / "model.safetensors")
        for x in ("whole", "broken")
    ]
    assert all(torch.equal(weight, finals[1][name]) for name, weight in finals[0].items())


def test_an_asynchronous_run_loses_and_repeats_no_prompt_and_keeps_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path / "run", *SCRIPTED, "rollout.max_outstanding_groups=6")
    first, second = Recorder(die_at=5), Recorder()
    with pytest.raises(Killed):
        run(config, monkeypatch, recorder=first)
    engine = continue_run(config, monkeypatch, recorder=second)
    kept = {version: uids for version, uids in first.uids.items() if version < 4}
    trained = [uid for uids in (kept | second.uids).values() for uid in uids]
    assert len(trained) == len(set(trained)) == 4 * STEPS
    summary = read_summary(tmp_path / "run")
    assert summary["fates"]["trained"] == 4 * STEPS
    assert engine.most_live <= 6
    assert max(second.lags) <= 2, "6 groups outstanding are at most 2 steps of 4"


def test_what_was_outstanding_at_the_checkpoint_is_asked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path / "run", *SCRIPTED)
    with pytest.raises(Killed):
        run(config, monkeypatch, recorder=Recorder(die_at=5))
    state = torch.load(checkpoints(tmp_path / "run")[-1], weights_only=True)["RolloutDataModule"]
    outstanding = state["prompts"]["outstanding"]
    assert 4 <= len(outstanding) <= 8
    recorder = Recorder()
    continue_run(config, monkeypatch, recorder=recorder)
    assert recorder.uids[4] == sorted(outstanding[:4])


def test_files_and_curves_are_cut_at_the_restored_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    config = configure(run_dir, *SCRIPTED, "logging.samples_every_steps=1")
    with pytest.raises(Killed):
        run(config, monkeypatch, recorder=Recorder(die_at=5))
    assert [line["version"] for line in read_lines(run_dir / "draws.jsonl")] == [0, 1, 2, 3, 4]
    with (run_dir / "draws.jsonl").open("a") as file:
        file.write('{"version": 5, "occup')  # killed while it wrote
    continue_run(config, monkeypatch)
    for name in ("draws.jsonl", "samples.jsonl"):
        assert [line["version"] for line in read_lines(run_dir / name)] == list(range(STEPS)), name
    events = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0, "histograms": 0})
    events.Reload()
    for tag in ("staleness/total", "pool/occupancy_before_groups", "time/total_seconds"):
        assert [event.step for event in events.Scalars(tag)] == list(range(STEPS)), tag
    histograms = events.Histograms("histograms/staleness/total")
    assert [event.step for event in histograms] == list(range(STEPS))
    assert [event.step for event in events.Scalars("eval/pass_rate")] == [0, STEPS]


@pytest.mark.parametrize(("every", "expected"), [(3, [0, 3, 6, 8]), (2, [0, 2, 4, 6, 8])])
def test_evaluations_are_plotted_at_their_versions_across_a_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, expected: list[int]
) -> None:
    config = configure(tmp_path / "run", *SCRIPTED, f"eval.every_steps={every}")
    with pytest.raises(Killed):
        run(config, monkeypatch, recorder=Recorder(die_at=5))
    continue_run(config, monkeypatch)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), {"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("eval/pass_rate")] == expected


def test_the_summary_of_a_resumed_run_is_about_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path / "run", *SCRIPTED, "mode=async")
    with pytest.raises(Killed):
        run(config, monkeypatch, recorder=Recorder(die_at=5))
    before = read_summary(tmp_path / "run")
    continue_run(config, monkeypatch)
    summary = read_summary(tmp_path / "run")
    draws = read_lines(tmp_path / "run" / "draws.jsonl")
    assert before["pass_rate_before"] == summary["pass_rate_before"]
    assert summary["tokens_generated"] >= sum(summary["fates_tokens"].values())
    for part in ("generation", "waiting"):
        mean = sum(draw[f"{part}_staleness_versions"] for draw in draws) / STEPS
        assert summary["staleness"][part] == pytest.approx(mean, abs=1e-9)


def test_rejections_before_and_after_a_break_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overfull = ("admission.policy=pace", "pace.smoothing=1.0", "rollout.max_outstanding_groups=16")
    config = configure(tmp_path / "run", *SCRIPTED, *overfull)
    with pytest.raises(Killed):
        run(config, monkeypatch, recorder=Recorder(die_at=5))
    books = torch.load(checkpoints(tmp_path / "run")[-1], weights_only=True)["RolloutDataModule"]
    trained, rejections = set(books["ledger"]["trained_prompts"]), books["ledger"]["rejections"]
    assert books["policy_version"] == 4
    assert sum(rejections.values()) > 0, "the pool never overfilled before the break"
    settle = Ledger.settle

    def spy(ledger: Ledger, uid: str, fate: Fate, **named: int) -> None:
        settle(ledger, uid, fate, **named)
        index = uid.split(":")[1]
        if fate == "trained":
            trained.add(index)
        elif fate == "rejected":
            rejections[index] = rejections.get(index, 0) + 1

    monkeypatch.setattr(Ledger, "settle", spy)
    continue_run(config, monkeypatch)
    summary = read_summary(tmp_path / "run")
    starved = {index: count for index, count in rejections.items() if index not in trained}
    assert summary["never_admitted"]["prompts"] == len(starved) > 0
    assert summary["never_admitted"]["rejections"] == sum(starved.values())
    assert max(starved.values()) == max(summary["never_admitted"]["worst"].values())
    rejected = sum(d["rejected_groups"] for d in read_lines(tmp_path / "run" / "draws.jsonl"))
    lengths = [c for name, c in summary["rejected_shares"].items() if name.startswith("length")]
    assert sum(c["rejected_groups"] for c in lengths) == rejected == summary["fates"]["rejected"]
    assert sum(c["settled_groups"] for c in lengths) == rejected + summary["fates"]["trained"]


def test_a_resumed_run_whose_prompts_end_has_lost_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("data.sources.0.size=16", "data.epochs=1", "trainer.checkpoint_every_steps=1")
    config = configure(tmp_path / "run", *SCRIPTED, *few)
    first, second = Recorder(die_at=2), Recorder()
    with pytest.raises(Killed):
        run(config, monkeypatch, recorder=first)
    continue_run(config, monkeypatch, recorder=second)
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("data_ended", 3)
    assert summary["fates"] == {"trained": 12, "unused": 2}, "14 prompts are 3 steps of 4"
    trained = [uid for uids in (first.uids | second.uids).values() for uid in uids]
    assert len(trained) == len(set(trained)) == 12


def test_a_finished_run_can_be_resumed_and_finishes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path / "run", *SCRIPTED)
    run(config, monkeypatch)
    first = read_summary(tmp_path / "run")
    continue_run(config, monkeypatch)
    summary = read_summary(tmp_path / "run")
    assert summary["status"] == "finished"
    assert summary["policy_version"] == STEPS
    assert summary["tokens_trained"] == first["tokens_trained"]


def test_a_checkpoint_taken_while_groups_end_has_books_that_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = DeterministicEngine(default=HOLD)
    scorer = InProcessScorer(lambda texts: [0.0] * len(texts))  # settled by the rollout thread
    experiment = build_scripted(monkeypatch, configure(tmp_path), engine, scorer)
    datamodule, settled = experiment.datamodule, threading.Event()
    take_state, count = PromptStream.state_dict, datamodule.ledger.settle

    def state_dict(stream: PromptStream) -> dict[str, Any]:
        state = take_state(stream)
        engine.live[0].finish()
        settled.wait(0.3)  # in vain, if the books are locked
        return state

    def settle(*arguments: Any, **keywords: Any) -> None:
        count(*arguments, **keywords)
        settled.set()

    monkeypatch.setattr(PromptStream, "state_dict", state_dict)
    monkeypatch.setattr(datamodule.ledger, "settle", settle)
    try:
        datamodule.start()
        datamodule.publish(experiment.module.weights(), 0)
        datamodule.worker.train()
        engine.await_live(8)
        state = datamodule.state_dict()
        assert settled.wait(5), "the group ended, before or after"
    finally:
        datamodule.close()
    books = state["prompts"], state["ledger"]["groups"]
    assert books[0]["position"] == len(books[0]["outstanding"]) + sum(books[1].values())


# --- changed settings ---


def test_a_run_goes_on_with_settings_that_may_change_and_remembers_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path / "run", *SCRIPTED)
    with pytest.raises(Killed):
        run(config, monkeypatch, recorder=Recorder(die_at=5))
    said: list[str] = []
    script(monkeypatch, None)
    changes = ["trainer.steps=6", "engine.max_retries=7"]
    assert resume(tmp_path / "run", said.append, changes) == 0
    assert "changed: trainer.steps from 8 to 6" in said
    assert "changed: engine.max_retries from 3 to 7" in said
    assert read_summary(tmp_path / "run")["policy_version"] == 6
    saved = load(tmp_path / "run" / "config.yaml")
    assert (saved.trainer.steps, saved.engine.max_retries) == (6, 7)


def test_a_finished_run_goes_on_for_longer_with_the_groups_it_had_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path / "run", *SCRIPTED)
    first, second = Recorder(), Recorder()
    run(config, monkeypatch, recorder=first)
    unused = read_summary(tmp_path / "run")["fates"]["unused"]
    assert unused > 0
    state = read_checkpoint(checkpoints(tmp_path / "run")[-1])["RolloutDataModule"]
    left = [group["uid"] for group in (*state["pool"]["groups"], *state["rollouts"])]
    assert len(left) == unused
    script(monkeypatch, second)
    assert resume(tmp_path / "run", lambda _: None, [f"trainer.steps={STEPS + 2}"]) == 0
    assert list(second.uids) == [STEPS, STEPS + 1]
    assert set(left[:4]) == set(second.uids[STEPS])
    trained = [uid for uids in (first.uids | second.uids).values() for uid in uids]
    assert len(trained) == len(set(trained)) == 4 * (STEPS + 2)
    assert read_summary(tmp_path / "run")["status"] == "finished"


def test_settings_that_a_run_learns_from_cannot_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    config = configure(run_dir, *SCRIPTED)
    with pytest.raises(Killed):
        run(config, monkeypatch, recorder=Recorder(die_at=5))
    draws, written = read_lines(run_dir / "draws.jsonl"), (run_dir / "config.yaml").read_text()
    engine = script(monkeypatch, None)
    for changes, message in (
        (["rollout.temperature=0.5"], r"cannot change rollout.temperature from 1.0 to 0.5"),
        (
            ["trainer.steps=9", "seed=4"],
            r"cannot change seed from 0 to 4: .* docs/reliability.md lists",
        ),
        (["trainer.steps=3"], r"trainer.steps is 3, but the checkpoint is of version 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            resume(run_dir, lambda _: None, changes)
    (run_dir / "config.yaml").write_text(written.replace("learning_rate: ", "learning_rate: 1"))
    with pytest.raises(ConfigError, match=r"optim.learning_rate from 0.003 to 10.003"):
        resume(run_dir, lambda _: None)
    assert engine.requests == []
    assert read_lines(run_dir / "draws.jsonl") == draws


# --- damaged and missing files ---


def test_a_full_disk_ends_the_run_by_name_and_leaves_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path / "run", *SCRIPTED)
    free = iter([2**40, 2**20])
    with monkeypatch.context() as full:
        usage = lambda _: SimpleNamespace(free=next(free))  # noqa: E731
        full.setattr("pace_lightning.training.checkpoint_files.shutil.disk_usage", usage)
        with pytest.raises(CheckpointError, match=r"version-000004.ckpt needs .* 1 MiB are free"):
            run(config, monkeypatch)
    assert [version_of(path) for path in checkpoints(tmp_path / "run")] == [EVERY]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert "trainer.keep_checkpoints" in read_summary(tmp_path / "run")["error"]
    recorder = Recorder()
    continue_run(config, monkeypatch, recorder=recorder)
    assert list(recorder.uids) == [*range(EVERY, STEPS)]


def test_a_torn_checkpoint_is_passed_over_for_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path / "run", *SCRIPTED)
    with pytest.raises(Killed):
        run(config, monkeypatch, recorder=Recorder(die_at=5))
    older, newest = checkpoints(tmp_path / "run")
    truncate(newest)
    said: list[str] = []
    recorder = Recorder()
    continue_run(config, monkeypatch, recorder=recorder, emit=said.append)
    assert any(newest.name in line and "cannot be read" in line for line in said)
    assert any(older.name in line and "version 2" in line for line in said)
    assert list(recorder.uids) == [2, 3, 4, 5, 6, 7]
    # the torn file does not shadow what was saved since
    assert [version_of(path) for path in checkpoints(tmp_path / "run")][-1] == STEPS


def test_a_checkpoint_saved_again_beside_a_torn_one_is_the_newer_of_the_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path / "run", *SCRIPTED)
    with pytest.raises(Killed):
        run(config, monkeypatch, recorder=Recorder(die_at=5))
    truncate(checkpoints(tmp_path / "run")[-1])
    with pytest.raises(Killed):
        continue_run(config, monkeypatch, recorder=Recorder(die_at=5))
    recorder = Recorder()
    continue_run(config, monkeypatch, recorder=recorder)
    assert list(recorder.uids) == [4, 5, 6, 7]


def test_a_resumed_run_saves_complete_draws_only_however_often_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path / "run", *SCRIPTED)
    with pytest.raises(Killed):
        run(config, monkeypatch, recorder=Recorder(die_at=5))
    saved = [path.name for path in checkpoints(tmp_path / "run")]
    assert saved == ["version-000002.ckpt", "version-000004.ckpt"]
    with pytest.raises(Killed):  # after the first step, and before there is something new to save
        continue_run(config, monkeypatch, recorder=Recorder(die_at=5))
    assert [path.name for path in checkpoints(tmp_path / "run")] == saved
    recorder = Recorder()
    continue_run(config, monkeypatch, recorder=recorder)
    assert list(recorder.uids) == [4, 5, 6, 7]
    loops = read_checkpoint(checkpoints(tmp_path / "run")[-1])["loops"]
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    assert progress["total"]["ready"] == 2 * STEPS, "two micro-batches for each step"


def test_the_last_checkpoint_is_made_before_the_books_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(
        tmp_path / "run",
        *SCRIPTED,
        "trainer.steps=5",
        "trainer.checkpoint_every_steps=5",
        "eval.every_steps=2",  # so that the last step is not one with an evaluation
    )
    run(config, monkeypatch)
    (checkpoint,) = checkpoints(tmp_path / "run")
    state = read_checkpoint(checkpoint)["RolloutDataModule"]
    uids = {rollout["uid"] for rollout in state["rollouts"]}
    assert uids <= set(state["prompts"]["outstanding"])
    recorder = Recorder()
    script(monkeypatch, recorder)
    assert resume(tmp_path / "run", lambda _: None, ["trainer.steps=7"]) == 0
    assert list(recorder.uids) == [5, 6]


def test_with_every_checkpoint_torn_it_is_an_error_and_not_a_fresh_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path / "run", *SCRIPTED)
    with pytest.raises(Killed):
        run(config, monkeypatch, recorder=Recorder(die_at=5))
    draws = read_lines(tmp_path / "run" / "draws.jsonl")
    for path in checkpoints(tmp_path / "run"):
        truncate(path)
    engine = script(monkeypatch, None)
    with pytest.raises(ConfigError, match=r"none of the 2 checkpoints .* can be read"):
        resume(tmp_path / "run", lambda _: None)
    assert engine.requests == []
    assert read_lines(tmp_path / "run" / "draws.jsonl") == draws


def test_a_directory_without_configuration_or_without_checkpoint_is_refused_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(tmp_path / "nowhere")]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    assert main(["resume", str(run_dir)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    shutil.copy(SMOKE, run_dir / "config.yaml")
    assert main(["resume", str(run_dir)]) == 2
    assert "no checkpoint" in capsys.readouterr().err
    assert [path.name for path in run_dir.iterdir()] == ["config.yaml"]


# --- helpers ---


class Recorder:
    """Notes the prompts of each draw, and breaks the run off inside a draw.

    Args:
        die_at: raise `Killed` instead of handing out the draw for this version.
    """

    def __init__(self, die_at: int | None = None) -> None:
        self.uids: dict[int, list[str]] = {}
        self.lags: list[int] = []
        self._die_at = die_at

    def __call__(self, version: int, groups: Sequence[TrajectoryGroup]) -> None:
        if version == self._die_at:
            raise Killed
        self.uids[version] = [group.prompt.uid for group in groups]
        self.lags += [version - min(t.token_versions) for g in groups for t in g.trajectories]


class CountingEngine(DeterministicEngine):
    """Remembers how many requests were live at once."""

    most_live = 0

    def notify(self) -> None:
        self.most_live = max(self.most_live, len(self.live))
        super().notify()


def script(monkeypatch: pytest.MonkeyPatch, recorder: Recorder | None) -> CountingEngine:
    """Let the next command use a scripted engine, and tell the recorder of each draw."""
    engine = CountingEngine()
    use_script(monkeypatch, engine)

    def recording_writer(*arguments: Any) -> Any:
        dump = sample_writer(*arguments)

        def on_draw(version: int, groups: Sequence[TrajectoryGroup]) -> None:
            if recorder is not None:
                recorder(version, groups)
            dump(version, groups)

        return on_draw

    monkeypatch.setattr("pace_lightning.build.sample_writer", recording_writer)
    return engine


def run(
    config: Config, monkeypatch: pytest.MonkeyPatch, recorder: Recorder | None = None
) -> CountingEngine:
    """Train with a scripted engine."""
    engine = script(monkeypatch, recorder)
    assert train(config, lambda _: None) == 0
    return engine


def continue_run(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    recorder: Recorder | None = None,
    emit: Callable[[str], None] = lambda _: None,
) -> CountingEngine:
    """Resume with a scripted engine."""
    engine = script(monkeypatch, recorder)
    assert resume(Path(str(config.run_dir)), emit) == 0
    return engine


def version_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.split("-")[1])


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = (run_dir / "checkpoints").glob("version-*.ckpt")
    return sorted(found, key=lambda path: (version_of(path), path.stem))


def truncate(path: Path) -> None:
    """Leave the first half of a file, as if the machine had stopped while it was written."""
    os.truncate(path, path.stat().st_size // 2)
