"""The comparison file: what it may say, what is refused, and which runs are the same."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from pace_lightning.compare.grid import Comparison, flatten, identity, read_comparison, setting
from pace_lightning.compare.runs import fingerprint
from pace_lightning.config import ConfigError
from pace_lightning.config_load import load

ROOT = Path(__file__).parents[1]
SMOKE = ROOT / "conf" / "smoke.yaml"

GOOD = f"""
name: good
title: Two arms
seeds: [3, 1]
set: [trainer.steps=10]
arms:
  sync: {{conf: {SMOKE}, set: [mode=sync]}}
  async: {{conf: {SMOKE}}}
"""


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the paths of the smoke experiment are relative


def read(tmp_path: Path, text: str) -> Comparison:
    file = tmp_path / "comparison.yaml"
    file.write_text(text)
    return read_comparison(file, fingerprint=fingerprint)


def test_runs_go_seed_by_seed_so_that_a_drift_of_the_machine_hits_all_arms(tmp_path):
    comparison = read(tmp_path, GOOD)
    assert [(run.seed, run.arm) for run in comparison.runs] == [
        *((3, "sync"), (3, "async")),
        *((1, "sync"), (1, "async")),
    ]


def test_each_run_has_the_settings_of_its_file_its_comparison_its_arm_and_its_seed(tmp_path):
    for run in read(tmp_path, GOOD).runs:
        assert run.config.trainer.steps == 10
        assert run.config.seed == run.seed
        assert run.config.mode == run.arm
        assert run.config.rollout.max_new_tokens == 4


def test_what_an_arm_sets_wins_over_what_the_comparison_sets(tmp_path):
    text = GOOD.replace("set: [mode=sync]", "set: [mode=sync, trainer.steps=7]")
    steps = {run.arm: run.config.trainer.steps for run in read(tmp_path, text).runs}
    assert steps == {"sync": 7, "async": 10}


def test_defaults_are_all_columns_and_plots_the_first_arm_and_half_of_the_versions(tmp_path):
    comparison = read(tmp_path, GOOD)
    assert comparison.baseline == "sync"
    assert comparison.early_versions == 5
    assert {"final_pass_rate", "k_wait"} < set(comparison.columns)
    assert {"accuracy_versions", "pool"} < set(comparison.plots)


def test_experiments_are_found_relative_to_the_comparison(tmp_path):
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.yaml").write_text(SMOKE.read_text())
    comparison = read(tmp_path, GOOD.replace(str(SMOKE), "experiments/mine.yaml"))
    assert {run.config.name for run in comparison.runs} == {"smoke"}


# --- identity ---


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        (["name=other"], True),
        (["run_dir=elsewhere"], True),
        (["logging.samples_every_steps=1", "logging.level=debug"], True),
        (["trainer.steps=30"], True),  # what it is already
        (["trainer.steps=31"], False),
        (["seed=1"], False),
        (["rollout.max_outstanding_groups=9"], False),
        (["eval.samples=5"], False),
        (["pace.gamma=1"], False),  # ignored without PACE; not worth knowing here
        (["data.sources.0.size=50"], False),
    ],
)
def test_a_run_is_known_by_what_it_trains_and_measures(overrides, same):
    base = load(SMOKE)
    other = load(SMOKE, overrides)
    equal = identity(base, fingerprint(base)) == identity(other, fingerprint(other))
    assert equal is same


def test_the_identity_is_twelve_digits_and_does_not_depend_on_the_process():
    config = load(SMOKE)
    first = identity(config, {"a": "1", "b": "2"})
    assert re.fullmatch("[0-9a-f]{12}", first)
    assert identity(load(SMOKE), {"b": "2", "a": "1"}) == first


@pytest.fixture
def with_files(tmp_path: Path) -> list[str]:
    """Overrides that point the smoke experiment at a model and at data of its own."""
    model = tmp_path / "model"
    (model / "inside").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "inside" / "weights").write_bytes(b"12345678")
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    return [f"model.path={model}", f"data.sources.0.path={tmp_path / 'prompts.jsonl'}"]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda path: (path / "model/inside/weights").write_bytes(b"12345679"), False),
        (lambda path: (path / "model/inside/more").write_bytes(b""), False),
        (lambda path: (path / "model/config.json").rename(path / "model/confih.json"), False),
        (lambda path: (path / "prompts.jsonl").write_text("{}\n{}\n"), False),
        (lambda path: (path / "unrelated").write_text("x"), True),
        (lambda path: (path / "model/config.json").touch(), True),
    ],
)
def test_another_initial_model_or_other_data_under_the_same_path_is_another_run(
    tmp_path, with_files, change, same
):
    config = load(SMOKE, with_files)
    before = identity(config, fingerprint(config))
    change(tmp_path)
    assert (identity(config, fingerprint(config)) == before) is same


def test_a_fingerprint_is_of_the_content(tmp_path, with_files):
    found = fingerprint(load(SMOKE, with_files))
    content = hashlib.sha256(b"{}\n").hexdigest()
    assert found[str(tmp_path / "prompts.jsonl")] == content
    reward = "reward pace_lightning.tasks.rewards"
    assert set(found) == {str(tmp_path / "prompts.jsonl"), str(tmp_path / "model"), reward}


def test_another_reward_function_under_the_same_name_is_another_run(tmp_path, with_files):
    (tmp_path / "judge.py").write_text("def exact(**_): return [1.0]\n")
    settings = [*with_files, "reward.function=judge:exact", f"reward.paths=[{tmp_path}]"]
    before = fingerprint(load(SMOKE, settings))
    (tmp_path / "judge.py").write_text("def exact(**_): return [0.0]\n")
    assert fingerprint(load(SMOKE, settings)) != before


# --- what is refused ---


def arms(text: str) -> str:
    return GOOD[: GOOD.index("arms:")] + text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "line 2: not valid YAML"),
        ("- a", "expected 'key: value' lines"),
        ("", r"mandatory, but not set: name \(text"),
        ("extends: a.yaml\nname: b", "this is an experiment, not a comparison of experiments"),
        (GOOD + "seed: [1]", "unknown key 'seed': did you mean 'seeds'?"),
        (GOOD.replace("title: Two arms", ""), r"not set: title \(text, one line"),
        (GOOD.replace("[3, 1]", "[3]"), r"seeds is \[3\], expected a list of at least two diff"),
        (GOOD.replace("[3, 1]", "[3, 3]"), r"seeds is \[3, 3\]"),
        (GOOD.replace("[3, 1]", "[3, x]"), "seeds is 'x', expected"),
        (GOOD.replace("[3, 1]", "[3, true]"), "seeds is true, expected"),
        (GOOD.replace("[3, 1]", "3"), "seeds is 3, expected"),
        (GOOD.replace("[3, 1]", "[3, -1]"), "arms.sync: .*\n.*seed is -1"),
        (GOOD.replace("name: good", "name: a/b"), "name is 'a/b'; use letters"),
        (GOOD.replace("name: good", "name: RUNS"), "name is 'RUNS'; .* and not RUNS"),
        (arms(f"arms: {{one: {{conf: {SMOKE}}}}}"), "arms is .*, expected a section with at least"),
        (arms("arms: [one, two]"), r"arms is \['one', 'two'\]"),
        (arms(f"arms: {{1: {{conf: {SMOKE}}}, b: {{conf: x}}}}"), "arms.1: a name must be text"),
        (
            arms(f"arms: {{a: {{conf: {SMOKE}}}, b: {{}}}}"),
            "arms.b: mandatory, but not set: a file name",
        ),
        (arms(f"arms: {{a: {{conf: {SMOKE}}}, b: x}}"), "arms.b is 'x', expected a section like"),
        (arms(f"arms: {{a: {{conf: {SMOKE}}}, b: {{conf: no.yaml}}}}"), "arms.b: .*no.yaml.*read"),
        (
            GOOD.replace("set: [mode=sync]", "overrides: [mode=sync]"),
            "unknown key arms.sync.overrides: choose from: conf, set; settings of the experiment",
        ),
        (
            GOOD.replace("set: [mode=sync]", "set: [trainer.stepz=1]"),
            "arms.sync: override 'trainer.stepz=1': .* did you mean 'steps'?",
        ),
        (
            GOOD.replace("set: [mode=sync]", "set: mode=sync"),
            r"arms.sync.set is 'mode=sync', expected a list of settings",
        ),
        (GOOD.replace("set: [mode=sync]", "set: [seed=4]"), "'seed=4' is set by .* use seeds"),
        (GOOD.replace("set: [mode=sync]", "set: [trainer.steps=0]"), "arms.sync: 1 problem"),
        (
            GOOD.replace("set: [mode=sync]", "set: [mode=async]"),
            "arms sync and async are the same experiment",
        ),
        (GOOD + "baseline: asink", "baseline has 'asink'; did you mean 'async'?"),
        (GOOD + "columns: [final_pas_rate]", "did you mean 'final_pass_rate'?"),
        (GOOD + "plots: [pole]", "did you mean 'pool'?"),
        (GOOD + "disclosed: [trainer.step]", "did you mean 'trainer.steps'?"),
        (GOOD + "early_versions: 11", "early_versions is 11, but the runs have 1 to 10 versions"),
        (GOOD + "early_versions: early", "early_versions is 'early', expected an integer"),
    ],
)
def test_a_bad_file_is_refused_with_the_place_and_the_remedy(tmp_path, text, message):
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, text)
    assert re.search(message, str(refusal.value)), refusal.value
    assert str(tmp_path / "comparison.yaml") in str(refusal.value)


def test_a_missing_file_is_refused_with_its_neighbors(tmp_path):
    (tmp_path / "main.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"mian.yaml cannot be read: .* has main.yaml"):
        read_comparison(tmp_path / "mian.yaml", fingerprint=fingerprint)


# --- what is shipped ---


@pytest.mark.parametrize(
    "file", sorted((ROOT / "conf" / "compare").glob("*.yaml")), ids=lambda file: file.stem
)
def test_a_shipped_comparison_can_be_used_and_discloses_something(file):
    comparison = read_comparison(file, fingerprint=fingerprint)
    assert comparison.name == file.stem
    assert len(comparison.seeds) >= 3
    assert comparison.disclosed


# --- settings by path ---


def test_settings_are_found_by_path_alone_or_as_a_section():
    flat = flatten({"a": {"b": 1, "c": {"d": [2, 3]}}, "e": None})
    assert flat == {"a.b": 1, "a.c.d": [2, 3], "e": None}
    assert setting(flat, "a.b") == 1
    assert setting(flat, "e") is None
    assert setting(flat, "a") == {"b": 1, "c.d": [2, 3]}
