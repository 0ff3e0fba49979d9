"""A configuration is refused with what a person needs to repair it, or it can run."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import is_dataclass
from datetime import datetime
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pace_lightning.config import Config, ConfigError, Mode
from pace_lightning.config_checks import check
from pace_lightning.config_explain import (
    evaluation_rounds,
    explain,
    outstanding_limit,
    run_directory,
    thread_layout,
)
from pace_lightning.config_load import load, to_yaml

VALID = """\
name: a
model: {path: p}
reward: {function: m:f}
data: {held_out: 2, sources: [{path: x.jsonl}]}
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("conf")


def load_text(folder: Path, text: str, *overrides: str) -> Config:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return load(file, overrides)


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(load_text(folder, text, *overrides))
    return str(caught.value)


# ------------------------------------------------------------------------------------------- load


def test_a_valid_file_gives_its_values_and_the_defaults_without_a_warning(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_text(folder, VALID + "mode: sync\noptim: {betas: [0.8, 0.9]}")
    check(config)
    assert (config.name, config.mode, config.trainer.steps) == ("a", Mode.SYNC, 20)
    assert config.data.sources[0].path == "x.jsonl"
    assert config.optim.betas == (0.8, 0.9)


def test_a_loaded_configuration_cannot_be_changed(folder):
    with pytest.raises(Exception, match="read-only"):
        load_text(folder, VALID).trainer.steps = 3


def test_a_number_in_scientific_notation_without_a_point_is_a_float(folder):
    assert load_text(folder, VALID + "optim: {learning_rate: 1e-6}").optim.learning_rate == 1e-6
    assert load_text(folder, VALID, "optim.learning_rate=2e-6").optim.learning_rate == 2e-6


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("trainer: {stepps: 3}", "run.yaml: unknown key trainer.stepps: did you mean 'steps'?"),
        ("arms: {a: {conf: b.yaml}}", "run.yaml: this is a comparison of experiments, not an"),
        ("trainr: {steps: 3}", "unknown key trainr: did you mean 'trainer'?"),
        ("learning_rate: 3", "unknown key learning_rate: did you mean 'optim.learning_rate'?"),
        ("loss: {eta: 3}", "unknown key loss.eta: did you mean 'rollout.eta'?"),
        ("loss: {zzz: 3}", "unknown key loss.zzz: choose from: objective, objective_settings,"),
        ("pace: {gama: 1}", "unknown key pace.gama: did you mean 'gamma'?"),
        ("1: 2", "unknown key 1: choose from"),
        ("data: {sources: [{sizze: 1}]}", "unknown key data.sources[0].sizze: did you mean 'size'"),
        ("seed: 1.5", "run.yaml: seed is 1.5, expected an integer"),
        ("seed: true", "seed is true, expected an integer"),
        ("seed: null", "seed is null, expected an integer"),
        ("rollout: {eta: x}", "rollout.eta is 'x', expected an integer or null"),
        ("optim: {learning_rate: fast}", "optim.learning_rate is 'fast', expected a number"),
        ("rollout: {dynamic_sampling: 7x}", "dynamic_sampling is '7x', expected true or false"),
        ("optim: {betas: [1]}", "optim.betas is [1], expected a list of 2 numbers"),
        ("mode: synk", "mode is 'synk', expected one of async, sync; did you mean 'sync'?"),
        ("loss:", "loss is null, expected a section with some of the keys objective,"),
        ("data: {sources: {path: x}}", "expected a list, each entry of which starts with '- path"),
        ("data: {sources: [x]}", "data.sources[0] is 'x', expected a section with some of"),
        ("data: {sources: [{path: x, options: 3}]}", "[0].options is 3, expected a mapping"),
        ("seed: 99999999999999999999", "seed does not fit into 64 bits"),
        ("loss: 0x" + "f" * 5000, "loss is a huge int, expected a section"),
        ("run_dir: $" + "{name}", "run_dir is '${name}'; '${...}' is not supported"),
        ("seed: ???", "mandatory, but not set: seed"),
        ("name: b", "run.yaml, line 5: not valid YAML: found duplicate key name"),
        ("seed: [", "run.yaml, line 6: not valid YAML"),
    ],
)
def test_a_wrong_entry_is_refused_with_file_path_value_and_remedy(folder, extra, message):
    # a section that VALID also has is replaced there, because YAML allows no duplicate key
    text = VALID.replace(VALID[VALID.index("data:") :], "") if extra.startswith("data:") else VALID
    text = refusal(folder, text + extra + "\n")
    assert message in text
    assert "run.yaml" in text
    assert "\n" not in text


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_an_empty_file_says_what_is_needed(folder, text):
    assert "is empty; it needs at least name: my-run; model: {path:" in refusal(folder, text)


@pytest.mark.parametrize("text", ["hello", "- a\n- b", "- a: 1"])
def test_a_file_without_keys_is_refused(folder, text):
    refused = refusal(folder, text)
    assert "expected 'key: value' lines" in refused


def test_a_file_that_is_not_text_is_refused(folder):
    (folder / "bytes.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 6\)"):
        load(folder / "bytes.yaml")


def test_missing_mandatory_values_are_all_named_with_an_example(folder):
    message = refusal(folder, "data: {sources: [{size: 3}]}")
    assert "name (for example name: my-run)" in message
    assert "model.path (for example model: {path: path/to/model})" in message
    assert "reward.function (for example reward: {function: pace_lightning" in message
    assert "data.sources[0].path (for example path: data/prompts.jsonl)" in message


def test_a_missing_file_is_refused_with_the_files_that_are_there(tmp_path):
    (tmp_path / "smoke.yaml").write_text(VALID)
    with pytest.raises(
        ConfigError, match=r"smok\.yaml' cannot be read: No such .* has smoke\.yaml"
    ):
        load(tmp_path / "smok.yaml")


# ---------------------------------------------------------------------------------------- extends


def test_extends_is_relative_to_the_file_merges_sections_and_replaces_lists(tmp_path):
    (tmp_path / "base.yaml").write_text(VALID + "trainer: {steps: 3}")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "run.yaml").write_text(
        "extends: ../base.yaml\nname: b\ntrainer: {micro_batches: 2}\ndata: {sources: [{path: y}]}"
    )
    config = load(tmp_path / "sub" / "run.yaml")
    assert (config.name, config.trainer.steps, config.trainer.micro_batches) == ("b", 3, 2)
    assert [source.path for source in config.data.sources] == ["y"]
    assert config.data.held_out == 2


def test_a_second_level_of_extends_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text(VALID)
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    (tmp_path / "c.yaml").write_text("extends: b.yaml\n")
    assert load(tmp_path / "b.yaml").name == "a"
    with pytest.raises(
        ConfigError, match=r"b\.yaml, which itself extends 'a\.yaml'; only one level"
    ):
        load(tmp_path / "c.yaml")


def test_an_error_in_the_extended_file_names_that_file(tmp_path):
    (tmp_path / "base.yaml").write_text(VALID + "seeed: 1")
    (tmp_path / "run.yaml").write_text("extends: base.yaml\n")
    with pytest.raises(ConfigError, match=r"base\.yaml: unknown key seeed: did you mean 'seed'"):
        load(tmp_path / "run.yaml")


@pytest.mark.parametrize("value", ["3", "null", "none.yaml", '"a\\0b"', "[a.yaml]", "."])
def test_an_unusable_extends_is_refused(folder, value):
    assert "extends" in refusal(folder, f"extends: {value}")


# -------------------------------------------------------------------------------------- overrides


def test_overrides_win_in_order_and_reach_into_lists_and_options(folder):
    config = load_text(
        folder,
        VALID,
        "trainer.steps=4",
        "trainer.steps=5",
        "data.sources.0.size=7",
        "data.sources[0].options.min_terms=2",
        "data.sources[0].options.max_terms=3",
        "run_dir=a=b",
        "rollout.eta=null",
        "data.template='Q: {prompt}'",
    )
    assert config.trainer.steps == 5
    assert config.data.sources[0].path == "x.jsonl"
    assert config.data.sources[0].size == 7
    assert config.data.sources[0].options == {"min_terms": 2, "max_terms": 3}
    assert config.run_dir == "a=b"
    assert config.data.template == "Q: {prompt}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "override 'seed': expected key=value, for example trainer.steps=5"),
        ("--seed=1", "expected key=value, for example trainer.steps=5"),
        ("=1", "expected key=value"),
        ("a..b=1", "expected key=value"),
        ("seed=", "override 'seed=': seed is null, expected an integer"),
        ("seed=[", "override 'seed=[', line 2: not valid YAML"),
        ("trainer.stepps=1", "unknown key trainer.stepps: did you mean 'steps'?"),
        ("trainer=1", "trainer is 1, expected a section"),
        (
            "rollout.top_p=0.9",
            "rollout.top_p is not possible: responses are sampled from the whole",
        ),
        ("rollout.top_k=20", "rollout.top_k is not possible"),
        ("rollout.repetition_penalty=1.1", "rollout.repetition_penalty is not possible"),
        ("eval.min_p=0.1", "eval.min_p is not possible"),
        ("data.sources.1.size=3", "data.sources has 1 entries, so there is no entry 1"),
        ("data.sources.x.size=3", "expected a list"),
    ],
)
def test_a_wrong_override_is_refused_by_name(folder, override, message):
    text = refusal(folder, VALID, override)
    assert message in text
    assert "\n" not in text


# ------------------------------------------------------------------------------------------- fuzz

SECTIONS = {key: hint for key, hint in get_type_hints(Config).items() if is_dataclass(hint)}
KEYS = sorted(
    {"extends", *get_type_hints(Config)}.union(
        *(get_type_hints(hint) for hint in SECTIONS.values())
    )
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["$" + "{seed}", "$" + "{", "???", "1e-6", "sync", "dapo", ".", "run.yaml"]),
    st.dates(),
    st.binary(max_size=4),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), SCALARS), inner, max_size=4),
    ),
    max_leaves=12,
)


def load_or_refuse(folder: Path, content: bytes, *overrides: str) -> None:
    """Anything but a configuration or a ConfigError escapes, and fails the test."""
    file = folder / "fuzz.yaml"
    file.write_bytes(content)
    try:
        config = load(file, overrides)
        check(config)
    except ConfigError:
        return
    explain(config, cores=2)


@settings(deadline=None, max_examples=60)
@given(
    content=st.one_of(
        st.binary(max_size=60),
        st.text(max_size=60).map(lambda s: s.encode("utf-8", "surrogatepass")),
    )
)
def test_any_bytes_give_a_configuration_or_a_refusal(folder, content):
    load_or_refuse(folder, content)


@settings(deadline=None, max_examples=60)
@given(section=st.sampled_from([key for key in KEYS if key not in VALID]), values=VALUES)
def test_any_values_under_known_keys_give_a_configuration_or_a_refusal(folder, section, values):
    load_or_refuse(folder, VALID.encode() + yaml.dump({section: values}).encode())
    load_or_refuse(folder, yaml.dump(values).encode())


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_value_of_any_key_gives_a_configuration_or_a_refusal(folder, data):
    section = data.draw(st.sampled_from(sorted(SECTIONS)))
    key = data.draw(st.sampled_from(sorted(get_type_hints(SECTIONS[section]))))
    small = st.one_of(st.integers(-3, 99), st.floats(), VALUES)
    values = yaml.safe_load(VALID)
    values.setdefault(section, {})[key] = data.draw(small)
    load_or_refuse(folder, yaml.dump(values).encode())


@settings(deadline=None, max_examples=60)
@given(
    override=st.one_of(
        st.text(max_size=20), st.builds("{}={}".format, st.sampled_from(KEYS), st.text(max_size=12))
    )
)
def test_any_override_gives_a_configuration_or_a_refusal(folder, override):
    load_or_refuse(folder, VALID.encode(), override)


# ------------------------------------------------------------------------------------------ check


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        # sums that do not add up
        (
            ["rollout.max_outstanding_groups=4"],
            "rollout.max_outstanding_groups is 4: a step needs 8 groups, but at most 4 may be "
            "outstanding: no step could ever start",
        ),
        (["mode=sync", "rollout.max_outstanding_groups=7"], "a step needs 8 groups, but at most 7"),
        (["rollout.group_size=1"], "rollout.group_size is 1, but loss.advantage grpo compares"),
        (["rollout.group_size=1", "loss.advantage=rloo"], "loss.advantage rloo compares"),
        (
            ["rollout.group_size=1", "loss.advantage=reinforce_plus_plus"],
            "set rollout.dynamic_sampling: false",
        ),
        (["trainer.micro_batches=65"], "only 8 groups x 8 = 64 responses"),
        (
            ["loss.objective=grpo", "loss.clip_high=0.28"],
            "loss: grpo has one clip bound, but clip_low is 0.2 and clip_high 0.28; make them",
        ),
        (["reward.overlong_penalty_tokens=257"], "(rollout.max_new_tokens 256)"),
        (["engine.cache_tokens=767"], "512 prompt + 256 response = 768 tokens"),
        (["engine.cache_tokens=768", "eval.max_new_tokens=300"], "512 prompt + 300 response = 812"),
        (["engine.max_batch_tokens=64"], "use at least 65"),
        (["optim.warmup_steps=21"], "more than trainer.steps 20"),
        (["pace.gamma=2"], "pace.gamma is 2.0, but admission.policy is all, which ignores it"),
        (["model.warm_start.steps=5"], "model.warm_start.path is not"),
        (["model.warm_start.steps=-1"], "it must be at least 0 (0 is no warm start)"),
        (["model.lora.rank=-1"], "it must be at least 0 (0 is no adapters)"),
        (["model.lora.alpha=16"], "but model.lora.rank is 0, which means no adapters"),
        (["model.lora.target_modules=[q_proj]"], "but model.lora.rank is 0"),
        (
            ["model.lora.rank=4", "model.lora.alpha=0"],
            "model.lora.alpha is 0.0; it must be above 0",
        ),
        (
            ["model.lora.rank=4", "model.lora.target_modules=[q_proj,q_proj]"],
            "name each layer once",
        ),
        (
            [
                "mode=sync",
                "sync.lag_versions=2",
                "model.lora.rank=4",
                "loss.proximal=snapshot",
            ],
            "loss.proximal snapshot copies adapters as they are published",
        ),
        (["trainer.min_step_seconds=-1"], "trainer.min_step_seconds is -1"),
        # lag
        (["admission.policy=max_lag"], "admission.policy is max_lag, but admission.max_lag is not"),
        (["admission.max_lag=1", "rollout.eta=1"], "admission.policy is all, which ignores it"),
        (
            ["admission.policy=max_lag", "admission.max_lag=1", "rollout.eta=2"],
            "rollout.eta is 2, above admission.max_lag 1",
        ),
        (["admission.policy=max_lag", "admission.max_lag=1"], "set rollout.eta: 1"),
        (
            [
                "admission.policy=max_lag",
                "admission.max_lag=1",
                "rollout.eta=1",
                "sync.every_steps=3",
            ],
            "admission.max_lag is 1, but weights are published every 3 steps (sync.every_steps), "
            "so they are up to 2 versions old",
        ),
        (
            ["admission.policy=pace", "admission.max_lag=2", "rollout.eta=2"],
            "admission.max_lag is 2, but admission.policy is pace, which ignores it",
        ),
        (
            ["admission.policy=pace", "pace.target_groups=4"],
            "pace.target_groups is 4 but a step needs 8 groups",
        ),
        (
            ["admission.policy=pace", "pace.target_groups=16"],
            "at most 16 groups may be outstanding, so the pool can never exceed",
        ),
        (["admission.policy=pace", "mode=sync"], "in mode sync nothing waits in the pool"),
        (["admission.policy=pace", "pace.window=32"], "smaller than pace.window_minimum 64"),
        (["admission.policy=pace", "pace.gamma=.inf"], "pace.gamma is inf; it must be finite"),
        (["admission.policy=pace", "pace.gamma=-1"], "pace.gamma is -1.0; it must be at least 0"),
        (["admission.policy=pace", "model.attention=eager"], "cannot re-score prefixes"),
        (["data.system_prompt=x", "data.chat_template=false"], "nobody would see it"),
        (["mode=sync", "rollout.eta=1"], "rollout.eta is 1, but mode sync means 0"),
        (["mode=sync", "sync.every_steps=2"], "sync.every_steps is 2, but mode sync publishes"),
        (
            ["mode=sync", "admission.policy=max_lag", "admission.max_lag=1"],
            "admission.max_lag is 1, but in mode sync the lag is sync.lag_versions 0; remove it",
        ),
        # data
        (
            ["model.shared_prompts=true", "model.gradient_checkpointing=true"],
            "model.shared_prompts and model.gradient_checkpointing are both true",
        ),
        (["model.pack_rows=true"], "set model.attention: flash_attention_2"),
        (
            [
                "model.pack_rows=true",
                "model.attention=flash_attention_2",
                "model.shared_prompts=true",
            ],
            "model.pack_rows and model.shared_prompts are both true",
        ),
        (["data.sources=[]"], "data.sources is empty"),
        (["data.eval_sources=[{path: y}]"], "data.held_out is 2, but data.eval_sources is set"),
        (["data.sources.0.size=2"], "the sources have 2 prompts in all: nothing is left"),
        (["data.sources.0.path=reasoning_gym:x"], "data.sources[0].size is not set: how many"),
        (["data.sources.0.size=0"], "data.sources[0].size is 0; it must be at least 1"),
        # names
        (["loss.objective=dapoo"], "loss.objective is 'dapoo'; did you mean 'dapo'?"),
        (["loss.advantage=gae"], "choose from: grpo, dr_grpo, rloo"),
        (["loss.aggregation=token_mean"], "did you mean 'token-mean'?"),
        (["engine.kind=vlm"], "engine.kind is 'vlm'; did you mean 'vllm'?"),
        (["engine.dtype=bf16"], "engine.dtype is 'bf16'; did you mean 'bfloat16'?"),
        (["trainer.precision=bf16"], "choose from: 32-true, bf16-mixed"),
        (["admission.policy=maxlag"], "did you mean 'max_lag'?"),
        (["data.overlong_prompts=drop"], "choose from: refuse, skip"),
        (["trainer.on_nothing_to_learn=stop"], "choose from: error, finish"),
        (["logging.level=warn"], "did you mean 'warning'?"),
        (["reward.function=rewards.f"], "expected module:function, for example pace_lightning."),
        (["name=a/b"], "name is 'a/b'; it names a directory"),
        (["name=.."], "name is '..'"),
        (["data.template=Q"], "data.template is 'Q'; it must contain {prompt}"),
        # ranges
        (["trainer.steps=0"], "trainer.steps is 0; it must be at least 1"),
        (["trainer.groups_per_step=-1"], "trainer.groups_per_step is -1; it must be at least 1"),
        (["optim.learning_rate=0"], "optim.learning_rate is 0.0; it must be above 0"),
        (["optim.learning_rate=nan"], "optim.learning_rate is nan"),
        (["optim.learning_rate=inf"], "optim.learning_rate is inf"),
        (["optim.betas=[0.9,1]"], "optim.betas[1] is 1.0; it must be in [0, 1)"),
        (["rollout.temperature=0"], "rollout.temperature is 0.0; it must be above 0: at 0 all"),
        (["eval.temperature=-1"], "eval.temperature is -1.0; it must be at least 0"),
        (["loss.std_ddof=2"], "loss.std_ddof is 2; it must be 0 or 1"),
        (["loss.kl_coef=-1"], "loss.kl_coef is -1.0; it must be at least 0"),
        (["loss.clip_low=1.5"], "loss.clip_low is 1.5; it must be in (0, 1)"),
        (["loss.clip_high=0"], "loss.clip_high is 0.0; it must be above 0"),
        (["loss.dual_clip=1"], "loss.dual_clip is 1.0; it must be above 1"),
        (["rollout.timeout_seconds=0"], "rollout.timeout_seconds is 0.0; it must be above 0"),
        (["reward.max_error_share=2"], "reward.max_error_share is 2.0; it must be in [0, 1]"),
        (["rollout.eta=-1"], "rollout.eta is -1; it must be at least 0"),
        (["seed=-1"], "seed is -1; it must be in [0, 2**32 - 1]"),
    ],
)
def test_an_impossible_combination_is_refused_with_its_sum(folder, overrides, message):
    text = refusal(folder, VALID, *overrides)
    assert message in text
    assert text.startswith("1 problem in"), text


@pytest.mark.parametrize(
    "overrides",
    [
        ["mode=sync", "rollout.eta=0", "rollout.max_outstanding_groups=8"],
        ["mode=sync", "admission.policy=max_lag", "admission.max_lag=0"],
        ["admission.policy=max_lag", "admission.max_lag=2", "rollout.eta=2", "sync.every_steps=3"],
        ["loss.objective=grpo", "loss.clip_high=0.2"],
        ["rollout.max_outstanding_groups=8"],
        ["trainer.micro_batches=64"],
        ["engine.max_batch_tokens=65", "engine.cache_tokens=768"],
        ["reward.overlong_penalty_tokens=256"],
        ["eval.temperature=0"],
        ["data.held_out=0", "data.eval_sources=[{path: y}]"],
        ["data.sources.0.size=3"],
        ["loss.dual_clip=3", "loss.kl_coef=0.01"],
    ],
)
def test_the_edge_of_what_is_possible_is_accepted(folder, overrides):
    check(load_text(folder, VALID, *overrides))


def test_all_problems_are_reported_at_once(folder):
    text = refusal(
        folder, VALID, "trainer.steps=0", "loss.objective=gpro", "trainer.micro_batches=0"
    )
    assert text.startswith("3 problems in the configuration:\n  - ")
    assert len(text.splitlines()) == 4


# ---------------------------------------------------------------------------------------- explain


def test_explain_shows_the_numbers_that_follow(folder):
    config = load_text(
        folder,
        VALID,
        "trainer.groups_per_step=4",
        "rollout.max_new_tokens=24",
        "data.max_prompt_tokens=96",
    )
    text = explain(config, cores=2)
    for line in (
        "4 x 8 = 32",  # responses per step
        "at most 768 sampled (32 x 24), and at most 3840 with prompts",  # 32 x (96 + 24)
        "at most 8 groups x 8 = 64",  # twice 4 groups
        "by slots: at most 8 groups in flight or ready",
        "about 2 versions from dispatch to use",  # 8 / 4
        "policy / mu, the behavior policy",
        "dapo: maximize token-mean of min(r A, clip(r, 0.8, 1.28) A)",
        "2 held-out prompts x 4 = 8 responses, 2 times",
        "trainer 1, 2 while the engine is idle; engine 1, 2 while the trainer waits",
    ):
        assert line in text, line


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["mode=sync"], "0 versions: every step trains on what its own weights generated"),
        (["mode=sync"], "synchronous (eta = 0): 8 groups per version, none ahead"),
        (["rollout.eta=3"], "at most about 3 versions"),
        (["rollout.eta=3"], "at most 32 groups x 8 = 256"),  # (3 + 1) x 8
        (["rollout.max_outstanding_groups=12"], "about 1.5 versions"),
        (["sync.every_steps=4"], "plus up to 3 for steps not yet published"),
        (["loss.kl_coef=0.01"], "- 0.01 k3(policy, initial weights)"),
        (["loss.dual_clip=3"], "where A < 0 at least 3 A"),
        (["loss.advantage=rloo"], "reward - mean of the other responses"),
        (["data.epochs=1"], "20, fewer if 1 epoch(s)"),
        (["eval.every_steps=5"], "= 8 responses, 5 times"),  # before, 5, 10, 15, after 20
        (
            ["data.held_out=0", "data.eval_sources=[{path: y}]"],
            "all prompts of data.eval_sources x 4",
        ),
        (
            ["data.held_out=0", "data.eval_sources=[{path: y, size: 3}]"],
            "at most 3 prompts x 4 = 12",
        ),
    ],
)
def test_explain_follows_the_configuration(folder, overrides, line):
    config = load_text(folder, VALID, *overrides)
    check(config)
    assert line in explain(config, cores=None)


def test_the_printed_configuration_loads_to_itself(folder):
    config = load_text(
        folder, VALID, "mode=sync", "optim.learning_rate=1e-6", "data.system_prompt='1e-6: #x'",
        "data.sources.0.options={a: [1, null, '2', true], b: {c: 1.0}}",
    )  # fmt: skip
    (folder / "resolved.yaml").write_text(explain(config, cores=2))
    assert load(folder / "resolved.yaml") == config
    assert "mode: sync" in to_yaml(config)


@pytest.mark.parametrize(
    ("overrides", "cores", "layout"),
    [
        ([], 1, (1, 1, 1)),
        ([], 2, (1, 1, 2)),
        ([], 5, (2, 3, 5)),
        (["mode=sync"], 4, (4, 4, 4)),
        (["trainer.num_threads=3"], 4, (3, 2, 4)),
        (["trainer.engine_threads=1", "mode=sync"], 4, (4, 1, 4)),
    ],
)
def test_threads_share_the_cores(folder, overrides, cores, layout):
    assert thread_layout(load_text(folder, VALID, *overrides), cores) == layout


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ([], 16),
        (["mode=sync"], 8),
        (["rollout.eta=2"], 24),
        (["rollout.max_outstanding_groups=9"], 9),
        (["rollout.max_outstanding_groups=9", "rollout.eta=2"], 9),
        (["rollout.max_outstanding_groups=99", "rollout.eta=0"], 8),
    ],
)
def test_the_tighter_bound_limits_outstanding_groups(folder, overrides, limit):
    assert outstanding_limit(load_text(folder, VALID, *overrides)) == limit


def test_the_run_directory_is_named_after_the_run_and_the_time(folder):
    now = datetime(2031, 2, 3, 4, 5, 6)
    assert run_directory(load_text(folder, VALID), now) == Path("runs/a/20310203-040506")
    assert run_directory(load_text(folder, VALID, "run_dir=x/y"), now) == Path("x/y")


def test_evaluations_are_before_during_and_after(folder):
    for every, steps in itertools.product((0, 1, 5, 20, 21), (1, 20)):
        config = load_text(folder, VALID, f"eval.every_steps={every}", f"trainer.steps={steps}")
        between = [step for step in range(1, steps) if every and step % every == 0]
        assert evaluation_rounds(config) == 2 + len(between)
