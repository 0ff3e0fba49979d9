"""Every method that is shipped: its YAML loads, is explained, builds and trains; rules hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import DeterministicEngine, InProcessScorer, build_scripted, judge_all

from pace_lightning.build_objective import policy_module
from pace_lightning.compare.grid import read_comparison
from pace_lightning.compare.runs import fingerprint
from pace_lightning.config import Config, ConfigError
from pace_lightning.config_checks import check
from pace_lightning.config_explain import explain
from pace_lightning.config_load import load
from pace_lightning.config_methods import PROXIMAL_SETTINGS
from pace_lightning.core.corrections import METHODS
from pace_lightning.core.draw_advantages import DRAW_ADVANTAGES
from pace_lightning.core.heads import HEADS
from pace_lightning.training.policy import load_policy

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "conf" / "methods").glob("*.yaml"))
NAMES = [file.stem for file in FILES]
TINY = (
    "model.path=conf/models/tiny",
    "model.warm_start.steps=0",
    "data.max_prompt_tokens=64",
    "data.held_out=2",
    "eval.samples=1",
    "rollout.group_size=4",
    "rollout.max_new_tokens=8",
    "rollout.max_outstanding_groups=8",
    "trainer.groups_per_step=2",
    "trainer.steps=2",
    "trainer.min_step_seconds=0",
    "trainer.num_threads=1",
    "trainer.engine_threads=1",
)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def policy() -> Any:
    return load_policy(str(ROOT / "conf/models/tiny"), random_init=True, seed=0)


def configure(name: str, *overrides: str) -> Config:
    config = load(f"conf/methods/{name}.yaml", overrides)
    check(config)
    return config


def refusal(name: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        configure(name, *overrides)
    return str(caught.value)


# --- the files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_method_loads_and_is_explained_as_one_formula(name: str) -> None:
    config = configure(name)
    assert config.name == name
    (line,) = [x for x in explain(config, cores=2).splitlines() if x.startswith("# objective ")]
    assert f"{config.loss.objective}: maximize {config.loss.aggregation} of " in line
    assert "{" not in line
    for correction in config.loss.corrections:
        assert f"{correction['name']}[" in line
    assert ("pi / prox" in line) == (config.loss.proximal != "none")
    first = (ROOT / "conf" / "methods" / f"{name}.yaml").read_text().splitlines()[0]
    assert first.startswith("# "), "say what it is, and where it is from"


def test_every_head_correction_advantage_and_source_has_a_file() -> None:
    configs = [configure(name) for name in NAMES]
    assert {c.loss.objective for c in configs} == set(HEADS)
    used = {x["name"] for c in configs for x in c.loss.corrections}
    assert used == set(METHODS)
    assert {c.loss.advantage for c in configs} == set(DRAW_ADVANTAGES)
    assert {c.loss.proximal for c in configs} == set(PROXIMAL_SETTINGS)


@pytest.mark.parametrize("name", NAMES)
def test_a_method_builds(name: str, policy: Any) -> None:
    module = policy_module(configure(name, *TINY), policy)
    assert len(list(module.parameters())) == len(list(policy.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_method_trains(
    name: str, micro_batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(
        f"conf/methods/{name}.yaml",
        [*TINY, f"run_dir={tmp_path}", f"trainer.micro_batches={micro_batches}"],
    )
    check(config)
    engine, scorer = DeterministicEngine(), InProcessScorer(judge_all)
    experiment = build_scripted(monkeypatch, config, engine, scorer)
    before = {k: v.clone() for k, v in experiment.module.weights().items()}
    try:
        experiment.trainer.fit(experiment.module, datamodule=experiment.datamodule)
    finally:
        experiment.datamodule.close()
    assert experiment.trainer.global_step == 2
    metrics = experiment.module.step_metrics
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["optim/cumulated_learning_rate"] > 0
    weights = experiment.module.weights()
    if metrics["loss/active_share"] > 0:
        assert any(not torch.equal(weights[k], before[k]) for k in before)


@pytest.mark.parametrize("lag", [4, 16, 64])
def test_the_comparisons_are_of_data_of_one_age(lag: int) -> None:
    comparison = read_comparison(
        ROOT / "conf" / "compare" / f"methods_k{lag}.yaml", fingerprint=fingerprint
    )
    assert set(comparison.arms) == {"grpo", "m2po", "vcpo", "sat", "tic", "gmc", "decoupled"}
    assert comparison.seeds == (0, 1, 2)
    for run in comparison.runs:
        assert (run.config.mode, run.config.sync.lag_versions) == ("sync", lag)
        assert run.config.trainer.steps > lag


# --- the rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        # names and settings
        ("dapo", ["loss.objective=m2p"], "loss.objective is 'm2p'; did you mean 'm2po'?"),
        ("dapo", ["loss.objective=ppo"], "'ppo'; PPO's clip is grpo, with two bounds dapo"),
        ("dapo", ["loss.objective=vcpo"], "VCPO is reinforce with loss.advantage: opob and"),
        ("dapo", ["loss.objective=gmc_grpo"], "a correction: loss.corrections: [{name: gmc_grpo}]"),
        ("dapo", ["loss.objective=rloo"], "it is an advantage: loss.advantage: rloo"),
        ("dapo", ["loss.objective=snapshot"], "a proximal policy: loss.proximal: snapshot"),
        ("dapo", ["loss.objective=GRPO"], "loss.objective is 'GRPO'; write grpo"),
        ("dapo", ["loss.proximal=ewm"], "loss.proximal is 'ewm'; did you mean 'ewma'?"),
        ("tis", ["loss.corrections=[{name: tiss}]"], "did you mean 'tis'?"),
        ("tis", ["loss.corrections=[tis]"], "loss.corrections[0] is 'tis'; write a name and"),
        ("tis", ["loss.corrections=[{name: tis, cpa: 2}]"], "no setting 'cpa'; did you mean 'cap'"),
        ("tis", ["loss.corrections=[{name: tis, cap: x}]"], "cap is 'x', expected a number"),
        ("tis", ["loss.corrections=[{name: tis, cap: -1}]"], "floor is 0.0 and cap -1"),
        ("tis", ["loss.corrections=[{name: tis, level: row}]"], "unknown level 'row'"),
        ("m2po", ["loss.objective_settings={bugdet: 1}"], "did you mean 'budget'?"),
        ("m2po", ["loss.objective_settings={budget: -1}"], "budget is -1; the mean of d^2 needs"),
        ("m2po", ["loss.clip_low=0.1"], "loss.objective m2po has no such bound"),
        ("dapo", ["loss.clip_low=0.1", "loss.objective_settings={clip_low: 0.2}"], "both set"),
        ("sat_grpo", ["loss.objective_settings={kernel: box}"], "kernel is 'box'"),
        ("ppo_ewma", ["loss.proximal_settings={decay: 0.5}"], "has no setting 'decay'"),
        ("dapo", ["loss.proximal_settings={x: 1}"], "has no setting 'x'; there are none here"),
        ("vcpo", ["loss.advantage_settings={norms: exakt}"], "norms is 'exakt'; choose from"),
        ("vcpo", ["loss.advantage_settings={weighting: x}"], "weighting is 'x' and center"),
        ("grpo", ["loss.advantage_settings={center: mean}"], "has no setting 'center'"),
        ("dapo", ["loss.mask_denominator=keep"], "did you mean 'kept'?"),
        ("vcpo", ["optim.ess_scaling=root"], "optim.ess_scaling is 'root'; choose from: none"),
        (
            "reinforce_plus_plus_kl",
            ["loss.advantage_settings={gamma: 1.5, kl_coef: 0.1}"],
            "gamma is 1.5 and kl_coefficient 0.1",
        ),
        ("reinforce_plus_plus", ["loss.advantage_settings={gama: 1}"], "did you mean 'gamma'?"),
        # one trust region, mu counted once
        (
            "dapo",
            ["loss.corrections=[{name: tis}]"],
            "with loss.proximal none the ratio of loss.objective dapo already is the one to the "
            "behavior policy, which must be counted once",
        ),
        (
            "gmc_grpo",
            ["loss.objective=dapo"],
            "gmc_grpo, whose weight is the whole ratio of the policy to the behavior policy, and "
            "loss.objective dapo has a ratio too: one trust region, and no more",
        ),
        (
            "tis",
            ["loss.corrections=[{name: tis}, {name: mis}]"],
            "the weights tis, mis, which all contain the ratio to the behavior policy",
        ),
        ("tis", ["loss.corrections=[{name: rs}, {name: rs}]"], "one of them twice"),
        ("tic_grpo", ["loss.proximal=recompute"], "reinforce has no ratio that could be taken"),
        ("sat_grpo", ["loss.proximal=ewma"], "measures the distance from the behavior policy"),
        ("sao", ["loss.proximal=recompute"], "measures the distance from the behavior policy"),
        # the source of the proximal policy
        ("snapshot", ["loss.proximal_settings={max_versions: 0}"], "max_versions is 0; needed"),
        ("snapshot", ["loss.proximal_settings={max_versions: x}"], "is 'x', expected a number"),
        ("snapshot", ["loss.proximal_settings={missing: mu}"], "missing is 'mu'; choose from"),
        ("snapshot", ["loss.proximal_settings={offload: 1}"], "is 1, expected true or false"),
        ("interruption", ["mode=sync"], "in mode sync the weights that sampled a token are those"),
        (
            "interruption",
            ["engine.kind=vllm"],
            "tokens of vLLM (engine.kind) may still be on their",
        ),
        ("interruption", ["loss.proximal_settings={batch_positions: 0}"], "batch_positions is 0;"),
        ("snapshot", ["mode=sync"], "in mode sync the weights that sampled a token are those of"),
        ("ppo_ewma", ["loss.proximal_settings={stale_versions: -1}"], "stale_versions is -1 and"),
        ("ppo_ewma", ["loss.proximal_settings={reset_below: 2}"], "reset_below 2; needed a"),
        # whole groups
        (
            "gmc_grpo",
            [
                "rollout.group_size=1",
                "rollout.dynamic_sampling=false",
                "loss.advantage=reinforce_plus_plus",
            ],
            "gmc_grpo shares one weight out over a whole group",
        ),
        ("vcpo", ["rollout.group_size=1"], "loss.advantage opob compares the responses of a group"),
        # settings that nobody reads
        ("dapo", ["loss.normalize_weights=true"], "no correction in loss.corrections has a weight"),
        ("dapo", ["loss.mask_denominator=kept"], "nothing in loss.corrections rejects a token"),
        ("dapo", ["optim.ess_base=0.5"], "optim.ess_scaling is none, which ignores them"),
        ("dapo", ["sync.lag_versions=4"], "data has one exact age only if nothing is generated"),
        ("dapo", ["mode=sync", "sync.lag_versions=-1"], "sync.lag_versions is -1; it must be at"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_its_rule(
    name: str, overrides: list[str], message: str
) -> None:
    text = refusal(name, *overrides)
    assert message in text
    assert text.startswith("1 problem in"), text


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("dapo", ["loss.corrections=[{name: opsm}, {name: k2_rs}, {name: m2po}]"]),
        ("tis", ["loss.corrections=[{name: rs}, {name: tis}, {name: opsm}]"]),
        ("tis", ["loss.normalize_weights=true", "loss.mask_denominator=kept"]),
        ("dppo_tv", ["loss.proximal=recompute", "loss.corrections=[{name: icepop}]"]),
        ("tis", ["loss.corrections=[{name: mis, lower: null}]"]),
        ("tis", ["loss.corrections=[{name: tis, cap: 3}]"]),
        ("gmc_grpo", ["mode=sync", "sync.lag_versions=4", "admission.max_lag=4",
                      "admission.policy=max_lag"]),
        ("reinforce_plus_plus", ["rollout.group_size=1"]),
    ],
)  # fmt: skip
def test_what_can_be_combined_is_accepted(name: str, overrides: list[str]) -> None:
    configure(name, *overrides)


@pytest.mark.parametrize(
    ("name", "overrides", "text"),
    [
        (
            "decoupled",
            [],
            "grpo: maximize token-mean of sg[w] min(r A, clip(r, 0.8, 1.2) A); r = pi / prox; "
            "w = mis[x where 0 <= x <= 5] with x = prox / mu; original denominator; "
            "learning rate 0.0001",
        ),
        (
            "vcpo",
            ["optim.stale_budget=1e-3"],
            "reinforce: maximize seq-mean-token-mean of sg[w] A log pi; w = tis[min(X, 8)] with "
            "x = pi / mu; original denominator; learning rate min(0.0001 x sqrt(min(1, ESS / "
            "responses)), 0.001 / mean lag of the step)",
        ),
        (
            "stale_budget",
            [],
            "learning rate min(0.0001, 0.0004 / mean lag of the step, what is left of 0.006 / "
            "steps left)",
        ),
        ("m2po", ["loss.objective_settings={budget: 0.1}"], "(budget 0.1, at least"),
        ("sat_gspo", [], "|log s| is above its 0.9 quantile"),
        ("a3po", [], "a bound on it and one on a correction are both bounds on pi / mu"),
        ("dapo", ["mode=sync", "sync.lag_versions=4"], "exactly 4 versions, fewer in the first 4"),
    ],
)
def test_the_formula_follows_the_configuration(name: str, overrides: list[str], text: str) -> None:
    assert text in explain(configure(name, *overrides), cores=2)
