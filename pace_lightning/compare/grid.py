"""A comparison: a YAML file that names experiments (arms) and seeds; read, checked, resolved.

    name: main
    title: Accuracy, staleness and time
    seeds: [0, 1, 2]
    set: [trainer.steps=60]                   # for all arms; optional
    arms:
      sync: {conf: ../tiny/sync.yaml}         # relative to this file
      pace: {conf: ../tiny/pace.yaml, set: [pace.gamma=1]}
    baseline: sync                            # of the paired differences; default: the first arm
    disclosed: [rollout.max_outstanding_groups]
    columns: [final_pass_rate, training_seconds]
    plots: [accuracy_versions]
    early_versions: 20                        # where early learning ends; default: half way

The same seed gives each arm the same prompts in the same order, and the same initial weights: the
seeds are pairs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from pace_lightning.compare.measures import COLUMNS
from pace_lightning.compare.plots import PLOTS
from pace_lightning.config import Config, ConfigError
from pace_lightning.config_checks import check
from pace_lightning.config_load import load, nearest, show, to_yaml

OPTIONAL = {
    "set": [],
    "baseline": None,
    "disclosed": [],
    "columns": list(COLUMNS),
    "plots": list(PLOTS),
    "early_versions": None,
}
"""Keys of the file that may be left out."""

EXPECTED = {
    "name": "text, for example name: main",
    "title": "text, one line that says what is compared",
    "seeds": "a list of at least two different integers, for example [0, 1, 2]",
    "set": "a list of settings, for example [trainer.steps=60]",
    "arms": "a section with at least two entries like  sync: {conf: ../tiny/sync.yaml}",
    "baseline": "the name of an arm",
    "disclosed": "a list of settings by their path, for example [trainer.steps]",
    "columns": "a list of column names",
    "plots": "a list of plot names",
    "early_versions": "an integer of at least 1",
    "conf": "a file name, for example conf: ../tiny/sync.yaml",
}

NOT_IDENTITY = ("name", "run_dir", "logging")
"""Settings that change neither what is trained nor what is measured."""


@dataclass(frozen=True)
class Run:
    """One experiment with one seed."""

    arm: str
    seed: int
    config: Config
    identity: str
    """What was trained: equal for equal settings, seed, initial model and data."""


@dataclass(frozen=True)
class Comparison:
    """A comparison file with every run resolved."""

    file: Path
    name: str
    title: str
    seeds: tuple[int, ...]
    arms: tuple[str, ...]
    baseline: str
    disclosed: tuple[str, ...]
    columns: tuple[str, ...]
    plots: tuple[str, ...]
    early_versions: int
    runs: tuple[Run, ...]
    """Seed by seed, all arms of one before the next: a drift of the machine hits all arms."""

    def of_arm(self, arm: str) -> list[Run]:
        """The runs of one arm, by seed."""
        return [run for run in self.runs if run.arm == arm]

    def settings(self, arm: str) -> dict[str, Any]:
        """The settings of an arm by their paths, without its seed."""
        flat = flatten(to_plain(self.of_arm(arm)[0].config))
        return {path: value for path, value in flat.items() if path not in ("seed", "run_dir")}


def read_comparison(file: Path, *, fingerprint: Callable[[Config], dict[str, str]]) -> Comparison:
    """Read, check and resolve a comparison; start nothing.

    Args:
        file: the YAML file.
        fingerprint: content hashes of the files an experiment begins with, by their names.

    Raises:
        ConfigError: naming the place and what to write there.
    """
    values = _read(file)
    seeds = tuple(_list(file, "seeds", values["seeds"], int))
    if len(set(seeds)) < max(2, len(seeds)):
        raise _wrong(file, "seeds", values["seeds"])
    arms = _mapping(file, "arms", values["arms"])
    if len(arms) < 2:
        raise _wrong(file, "arms", values["arms"])
    common = _list(file, "set", values["set"], str)
    confs = {arm: _arm(file, arm, entry) for arm, entry in arms.items()}
    runs = []
    for seed in seeds:
        for arm, (conf, own) in confs.items():
            config = _resolve(file, arm, conf, [*common, *own, f"seed={seed}"])
            runs.append(Run(arm, seed, config, identity(config, fingerprint(config))))
    _refuse_twins(file, runs)
    first = runs[0].config
    steps = max(run.config.trainer.steps for run in runs)
    early = values["early_versions"]
    early = max(1, steps // 2) if early is None else _typed(file, "early_versions", early, int)
    if not 1 <= early <= steps:
        raise ConfigError(
            f"{file}: early_versions is {early}, but the runs have 1 to {steps} versions "
            "(trainer.steps)"
        )
    baseline = next(iter(arms)) if values["baseline"] is None else values["baseline"]
    return Comparison(
        file=file,
        name=_name(file, "name", values["name"]),
        title=_typed(file, "title", values["title"], str),
        seeds=seeds,
        arms=tuple(arms),
        baseline=_one_of(file, "baseline", [baseline], arms)[0],
        disclosed=_one_of(
            file, "disclosed", _list(file, "disclosed", values["disclosed"], str), _paths(first)
        ),
        columns=_one_of(file, "columns", _list(file, "columns", values["columns"], str), COLUMNS),
        plots=_one_of(file, "plots", _list(file, "plots", values["plots"], str), PLOTS),
        early_versions=early,
        runs=tuple(runs),
    )


def identity(config: Config, fingerprints: Mapping[str, str]) -> str:
    """Twelve hexadecimal digits that two runs share if they would train the same thing.

    Args:
        config: resolved; its seed counts, its name and what it logs do not.
        fingerprints: of the files the run begins with.
    """
    settings = {key: value for key, value in to_plain(config).items() if key not in NOT_IDENTITY}
    text = json.dumps([settings, dict(fingerprints)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def to_plain(config: Config) -> dict[str, Any]:
    """A configuration as plain values, as they are written into a run directory."""
    return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.create(to_yaml(config))))


def flatten(values: Any, path: str = "") -> dict[str, Any]:
    """Nested settings by dotted path; a list is one value."""
    if not isinstance(values, Mapping):
        return {path: values}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flatten(value, f"{path}.{key}" if path else str(key))
    return found


def setting(settings: Mapping[str, Any], path: str) -> Any:
    """A setting, or a whole section of settings, from what `flatten` gives."""
    if path in settings:
        return settings[path]
    start = f"{path}."
    return {key.removeprefix(start): v for key, v in settings.items() if key.startswith(start)}


# --------------------------------------------------------------------------------------- helpers


def _paths(config: Config) -> list[str]:
    """Every path of a setting and of a section."""

    def inside(values: Any, path: str) -> Iterator[str]:
        for key, value in values.items() if isinstance(values, Mapping) else ():
            where = f"{path}.{key}" if path else str(key)
            yield where
            yield from inside(value, where)

    return list(inside(to_plain(config), ""))


def _read(file: Path) -> dict[str, Any]:
    """The keys of the file, the optional ones filled in."""
    try:
        raw = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except OSError as error:
        others = ", ".join(sorted(path.name for path in file.parent.glob("*.yaml")))
        hint = f"; {file.parent} has {others}" if others else ""
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}{hint}") from error
    except Exception as error:  # the parser meets arbitrary text and has no common base class
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{file}{line}: not valid YAML: {problem}") from error
    required = ["name", "title", "seeds", "arms"]
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{file}: expected 'key: value' lines with {', '.join(required)}; a comparison names "
            "experiments, see conf/compare/"
        )
    if "arms" not in raw and {"extends", "model", "trainer"} & raw.keys():
        raise ConfigError(
            f"{file}: this is an experiment, not a comparison of experiments; run it with "
            f"`python -m pace_lightning train {file}`, or name it as an arm of a comparison"
        )
    known = [*required, *OPTIONAL]
    for key in raw:
        if key not in known:
            raise ConfigError(f"{file}: unknown key {show(key)}: {nearest(key, known)}")
    if missing := [key for key in required if key not in raw]:
        wanted = "; ".join(f"{key} ({EXPECTED[key]})" for key in missing)
        raise ConfigError(f"{file}: mandatory, but not set: {wanted}")
    return {**OPTIONAL, **{str(key): value for key, value in raw.items()}}


def _arm(file: Path, arm: str, entry: Any) -> tuple[Path, list[str]]:
    """The experiment file and the settings of one arm."""
    where = f"arms.{arm}"
    entry = _mapping(file, where, entry)
    for key in entry:
        if key not in ("conf", "set"):
            raise ConfigError(
                f"{file}: unknown key {where}.{key}: {nearest(key, ['conf', 'set'])}; settings of "
                "the experiment go into set: [key=value]"
            )
    if "conf" not in entry:
        raise ConfigError(f"{file}: {where}: mandatory, but not set: {EXPECTED['conf']}")
    conf = file.parent / _typed(file, f"{where}.conf", entry["conf"], str)
    return conf, _list(file, f"{where}.set", entry.get("set", []), str)


def _resolve(file: Path, arm: str, conf: Path, overrides: list[str]) -> Config:
    """The configuration of one run; the seed is the comparison's business."""
    for override in overrides[:-1]:
        key = override.partition("=")[0]
        if key in ("seed", "run_dir", "name"):
            raise ConfigError(
                f"{file}: arms.{arm}: {override!r} is set by the comparison itself"
                f"{': use seeds' if key == 'seed' else ''}; remove it"
            )
    try:
        config = load(conf, overrides)
        check(config)
    except ConfigError as error:
        raise ConfigError(f"{file}: arms.{arm}: {error}") from error
    return config


def _refuse_twins(file: Path, runs: Iterable[Run]) -> None:
    seen: dict[str, Run] = {}
    for run in runs:
        if (other := seen.setdefault(run.identity, run)) is not run:
            raise ConfigError(
                f"{file}: arms {other.arm} and {run.arm} are the same experiment: every setting "
                "that matters is equal; remove one, or set what should differ"
            )


def _name(file: Path, key: str, value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"\w[\w.-]*", value) or value == "RUNS":
        raise ConfigError(
            f"{file}: {key} is {show(value)}; use letters, digits and . _ - only, and not RUNS, "
            "where the runs are"
        )
    return value


def _typed(file: Path, where: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool) or value == "":
        raise _wrong(file, where, value)
    return value


def _list(file: Path, where: str, value: Any, kind: type) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(file, where, value)
    return [_typed(file, where, item, kind) for item in value]


def _mapping(file: Path, where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(file, where, value)
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(
                f"{file}: {where}.{key}: a name must be text; write '{key}' or k{key}"
            )
        _name(file, f"{where}.{key}", key)
    return value


def _one_of(file: Path, where: str, values: Iterable[Any], names: Iterable[str]) -> tuple[str, ...]:
    known = list(names)
    for value in values:
        if value not in known:
            raise ConfigError(f"{file}: {where} has {show(value)}; {nearest(value, known)}")
    return tuple(values)


def _wrong(file: Path, where: str, value: Any) -> ConfigError:
    key = "set" if where.endswith(".set") else where.rsplit(".", 1)[-1]
    expected = EXPECTED.get(key, "a section like {conf: ../tiny/sync.yaml}")
    return ConfigError(f"{file}: {where} is {show(value)}, expected {expected}")
