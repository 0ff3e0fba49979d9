"""The shipped smoke experiment, from the command line to the files it leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from experiments import SMOKE, read_lines, read_summary, run_command
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pace_lightning.__main__ import main
from pace_lightning.config_load import load

pytestmark = pytest.mark.slow

STEPS, GROUPS_PER_STEP, GROUP_SIZE = 30, 4, 8

DRAW_FIELDS = {
    "version",
    "occupancy_before_groups",
    "occupancy_after_groups",
    "budget_groups",
    "drawn_groups",
    "rejected_groups",
    "beyond_candidates_groups",
    "generation_staleness_versions",
    "waiting_staleness_versions",
    "total_staleness_versions",
    "rejected_generation_staleness_versions",
    "rejected_waiting_staleness_versions",
    "rejected_total_staleness_versions",
    "effective_staleness_versions",
    "rejected_effective_staleness_versions",
    "warning",
    "wait_seconds",
    "ranking_seconds",
    "redrawn_groups",
}

SUMMARY_FIELDS = {
    "status",
    "steps",
    "policy_version",
    "pass_rate_before",
    "pass_rate_after",
    "tokens_generated",
    "tokens_trained",
    "seconds",
    "staleness",
    "fates",
    "incidents",
    "fates_unit",
    "fates_tokens",
    "rejected_shares",
    "never_admitted",
    "ranking_seconds",
    "rescore_seconds",
}

TIME_PARTS = {
    *("setup", "wait", "train", "pacing", "publish", "bookkeeping", "evaluate", "checkpoint"),
    *("close", "other", "total"),
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of one finished run."""
    target = tmp_path_factory.mktemp("smoke") / "run"
    code, output = run_command(target.with_suffix(".log"), "train", SMOKE, f"run_dir={target}")
    assert code == 0, output
    return target


@pytest.fixture(scope="module")
def events(run_dir: Path) -> EventAccumulator:
    """What TensorBoard shows of it."""
    kinds = ("scalars", "histograms", "tensors")
    accumulator = EventAccumulator(str(run_dir / "tensorboard"), dict.fromkeys(kinds, 0))
    return accumulator.Reload()


def test_the_written_configuration_loads_back_as_the_one_that_ran(run_dir: Path) -> None:
    assert load(run_dir / "config.yaml") == load(SMOKE, [f"run_dir={run_dir}"])


def test_each_step_has_one_line_in_draws_whose_staleness_adds_up(run_dir: Path) -> None:
    lines = read_lines(run_dir / "draws.jsonl")
    assert [line["version"] for line in lines] == list(range(STEPS))
    for line in lines:
        assert line.keys() == DRAW_FIELDS
        assert line["drawn_groups"] == GROUPS_PER_STEP
        generation, waiting = (line[f"{p}_staleness_versions"] for p in ("generation", "waiting"))
        assert generation + waiting == pytest.approx(line["total_staleness_versions"], abs=1e-9)
        assert generation >= 0
        assert waiting >= 0


def test_training_was_asynchronous_by_the_draws_and_by_the_summary(run_dir: Path) -> None:
    lines = read_lines(run_dir / "draws.jsonl")
    staleness = read_summary(run_dir)["staleness"]
    assert staleness.keys() == {"generation", "waiting"}
    for part, value in staleness.items():
        # every draw has equally many trajectories, so the mean of means is the mean
        mean = sum(line[f"{part}_staleness_versions"] for line in lines) / STEPS
        assert value == pytest.approx(mean, abs=1e-9)
    assert staleness["generation"] + staleness["waiting"] > 0


@pytest.mark.parametrize(
    "tag",
    [
        "staleness/generation",
        "staleness/waiting",
        "staleness/total",
        "pool/occupancy_before_groups",
        "pool/occupancy_after_groups",
        "pool/rejected_groups",
        "pool/wait_seconds",
        "pool/ranking_seconds",
        "pool/rescore_seconds",
        "ratio/mean",
        "loss/objective",
        "time/wait_seconds",
        "time/train_seconds",
        "time/publish_seconds",
        "time/total_seconds",
    ],
)
def test_each_step_metric_is_plotted_once_per_policy_version(
    events: EventAccumulator, tag: str
) -> None:
    assert [event.step for event in events.Scalars(tag)] == list(range(STEPS))


def test_plotted_staleness_is_that_of_the_draws(events: EventAccumulator, run_dir: Path) -> None:
    lines = read_lines(run_dir / "draws.jsonl")
    for part in ("generation", "waiting", "total"):
        plotted = [event.value for event in events.Scalars(f"staleness/{part}")]
        assert plotted == pytest.approx([line[f"{part}_staleness_versions"] for line in lines])


def test_the_reward_is_plotted_at_versions_and_rises(events: EventAccumulator) -> None:
    rewards = events.Scalars("reward/generated_mean")
    steps = [event.step for event in rewards]
    assert steps == sorted(set(steps))
    assert set(steps) <= set(range(STEPS))
    values = [event.value for event in rewards]
    assert sum(values[-5:]) / 5 > sum(values[:5]) / 5 + 0.2


def test_the_pass_rate_is_plotted_before_and_after_training(
    events: EventAccumulator, run_dir: Path
) -> None:
    summary = read_summary(run_dir)
    plotted = {event.step: event.value for event in events.Scalars("eval/pass_rate")}
    assert plotted == pytest.approx(
        {0: summary["pass_rate_before"], STEPS: summary["pass_rate_after"]}
    )


def test_tensorboard_has_the_page_of_multi_line_charts_and_staleness_histograms(
    events: EventAccumulator,
) -> None:
    assert "custom_scalars__config__" in events.Tags()["tensors"]
    layout = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    tags = events.Tags()
    # the page of charts cannot show a scalar that shares its tag with a histogram
    assert not {*tags["scalars"]} & {*tags["histograms"]}
    for curve in (b"staleness/waiting", b"pool/occupancy_before_groups", b"eval/pass_rate"):
        assert curve in layout
    plots = events.Histograms("histograms/staleness/total")
    assert [plot.step for plot in plots] == list(range(STEPS))
    assert {plot.histogram_value.num for plot in plots} == {GROUPS_PER_STEP * GROUP_SIZE}


def test_the_final_checkpoint_is_a_hugging_face_model_that_answers(run_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = run_dir / "checkpoints" / "final"
    tokenizer = AutoTokenizer.from_pretrained(final)
    model = AutoModelForCausalLM.from_pretrained(final)
    prompt = tokenizer("3 5", add_special_tokens=False, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=1, do_sample=False)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert text in {"6", "7", "8", "9"}


def test_samples_show_a_whole_group_every_few_steps(run_dir: Path) -> None:
    samples = read_lines(run_dir / "samples.jsonl")
    assert [sample["version"] for sample in samples] == list(range(0, STEPS, 5))
    for sample in samples:
        assert len(sample["responses"]) == GROUP_SIZE
        assert len({response["score"] for response in sample["responses"]}) > 1
        for response in sample["responses"]:
            assert max(response["versions"]) <= sample["version"]


def test_the_summary_has_the_documented_fields_and_its_sums_close(run_dir: Path) -> None:
    summary = read_summary(run_dir)
    assert summary.keys() == SUMMARY_FIELDS
    assert summary["status"] == "finished"
    assert summary["steps"] == summary["policy_version"] == STEPS
    seconds = summary["seconds"]
    assert seconds.keys() == TIME_PARTS
    parts = sum(value for part, value in seconds.items() if part != "total")
    assert parts == pytest.approx(seconds["total"], rel=0.01)
    assert all(value >= 0 for value in seconds.values())
    assert seconds["other"] < 0.2 * seconds["total"], "the parts explain too little"
    fates, tokens = summary["fates"], summary["fates_tokens"]
    assert summary["fates_unit"] == "groups"
    assert fates["trained"] == STEPS * GROUPS_PER_STEP
    assert set(fates) <= {"trained", "zero_variance", "unused"}, "lost, failed or pending groups"
    assert summary["tokens_trained"] == tokens["trained"]
    # groups cut off in flight at the end have no count of their own
    assert tokens["trained"] < sum(tokens.values()) <= summary["tokens_generated"]


def test_the_model_learned(run_dir: Path) -> None:
    summary = read_summary(run_dir)
    assert summary["pass_rate_after"] >= summary["pass_rate_before"] + 0.2


def test_a_run_directory_that_holds_a_run_is_refused_and_left_alone(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    assert main(["train", SMOKE, f"run_dir={run_dir}"]) == 2
    message = capsys.readouterr().err
    assert "choose another run_dir" in message
    assert "resume" not in message, "there is no checkpoint to resume from"
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_evaluating_the_final_checkpoint_gives_the_pass_rate_of_the_run(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = run_dir / "checkpoints" / "final"
    settings = [f"model.path={model}", "model.random_init=false", f"run_dir={tmp_path / 'eval'}"]
    assert main(["eval", SMOKE, *settings]) == 0
    metrics = json.loads((tmp_path / "eval" / "evaluation.json").read_text())
    # two samples of 64 responses: a standard deviation of the difference below 0.09
    assert metrics["pass_rate"] == pytest.approx(read_summary(run_dir)["pass_rate_after"], abs=0.25)
    assert f"{metrics['pass_rate']:.4f}" in capsys.readouterr().out


def test_an_evaluation_in_the_directory_of_a_run_adds_its_result_and_no_more(
    run_dir: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "run")
    before = {path.relative_to(copy): path.read_bytes() for path in files_of(copy)}
    model = [f"model.path={copy / 'checkpoints' / 'final'}", "model.random_init=false"]
    settings = [f"run_dir={copy}", "eval.samples=1", *model]
    assert main(["eval", str(copy / "config.yaml"), *settings]) == 0
    after = {path.relative_to(copy): path.read_bytes() for path in files_of(copy)}
    assert after.pop(Path("evaluation.json"))
    assert after == before


def files_of(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_config_prints_what_follows_and_creates_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", SMOKE, f"run_dir={tmp_path / 'run'}"]) == 0
    page = capsys.readouterr().out
    assert "name: smoke" in page
    assert f"# responses per step        {GROUPS_PER_STEP} x {GROUP_SIZE} = 32" in page
    assert list(tmp_path.iterdir()) == []


def test_doctor_finds_everything_the_smoke_experiment_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["doctor", SMOKE])
    assert (code, "FAIL" in capsys.readouterr().out) == (0, False)


def test_a_misspelt_key_ends_with_code_2_its_neighbor_and_no_run_directory(tmp_path: Path) -> None:
    target = tmp_path / "run"
    setting = "rollout.group_sise=4"
    code, output = run_command(tmp_path / "log", "train", SMOKE, f"run_dir={target}", setting)
    assert code == 2
    assert "rollout.group_sise" in output
    assert "did you mean 'group_size'?" in output
    assert "Traceback" not in output
    assert not target.exists()


def test_pace_rejects_surplus_and_reports_both_sides(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, output = run_command(
        tmp_path / "log",
        "train",
        SMOKE,
        f"run_dir={run_dir}",
        "trainer.steps=12",
        "rollout.max_outstanding_groups=16",
        "rollout.max_new_tokens=24",
        "rollout.dynamic_sampling=false",
        "trainer.micro_batches=4",
        "admission.policy=pace",
        "pace.smoothing=1.0",
        "pace.window_minimum=8",
        "eval.samples=1",
    )
    assert code == 0, output
    draws = read_lines(run_dir / "draws.jsonl")
    assert all(draw["drawn_groups"] == GROUPS_PER_STEP for draw in draws)
    assert all(draw["rejected_groups"] <= draw["budget_groups"] for draw in draws)
    rejected = sum(draw["rejected_groups"] for draw in draws)
    assert rejected > 0, "the pool never overfilled"
    summary = read_summary(run_dir)
    assert summary["fates"]["rejected"] == rejected
    for kind in ("length_decile", "pass_rate"):
        classes = [c for name, c in summary["rejected_shares"].items() if name.startswith(kind)]
        assert sum(c["rejected_groups"] for c in classes) == rejected
        assert sum(c["settled_groups"] for c in classes) == rejected + 12 * GROUPS_PER_STEP
    never = summary["never_admitted"]
    assert 0 <= never["prompts"] <= never["rejections"] <= rejected
    assert f"never admitted       {never['prompts']} prompts" in output
    ranking = sum(draw["ranking_seconds"] for draw in draws)
    assert summary["ranking_seconds"] == pytest.approx(ranking, abs=1e-3)
    assert 0 < summary["rescore_seconds"] < summary["seconds"]["total"]
    for draw in draws:
        total, effective = draw["total_staleness_versions"], draw["effective_staleness_versions"]
        assert draw["waiting_staleness_versions"] - 1e-9 <= effective <= total + 1e-9
        if draw["rejected_groups"]:
            assert draw["rejected_effective_staleness_versions"] is not None
    kinds = dict.fromkeys(("scalars", "histograms", "tensors"), 0)
    tags = EventAccumulator(str(run_dir / "tensorboard"), kinds).Reload().Tags()
    assert {"pool/budget_groups", "staleness/effective", "staleness/rejected/effective"} <= {
        *tags["scalars"]
    }
    assert any(tag.startswith("rejected_share/length_decile_") for tag in tags["scalars"])
    assert any(tag.startswith("rejected_share/pass_rate_") for tag in tags["scalars"])
    assert {
        "histograms/staleness/prefix_forgetting",
        "histograms/staleness/rejected/effective",
    } <= {*tags["histograms"]}
