"""The objective of a configuration: its parts, and which of them may not be combined.

Rules on combinations are those of docs/methods.md; each refusal says its rule in words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch

from pace_lightning.config import Config, Mode, PaceConfig
from pace_lightning.config_load import nearest, show
from pace_lightning.core.batch_advantages import opob_advantages
from pace_lightning.core.corrections import METHODS
from pace_lightning.core.draw_advantages import DRAW_ADVANTAGES, GROUP_BASELINES
from pace_lightning.core.heads import HEADS, settings_of
from pace_lightning.core.objective import Objective, Scored, objective_loss, prepare
from pace_lightning.core.token_returns import token_advantages

CLIP_KEYS = ("clip_low", "clip_high", "dual_clip")
"""Settings of heads that are keys of their own."""

PROXIMAL_SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "recompute": {},
    "loglinear": {},
    "linear": {},
    "ewma": {"stale_versions": 8.0, "reset_below": 0.9},
    "interruption": {"batch_positions": 16384, "missing": "error", "offload": True},
    "snapshot": {"max_versions": None, "missing": "error", "offload": True},
}
"""Sources of the proximal policy and their settings, with defaults; `core.proximal_sources`."""

MISSING = ("error", "behavior")
"""What becomes of tokens for which such a source has nothing: the run ends, or prox = mu."""

OPOB_SETTINGS: dict[str, Any] = {
    "norms": "proxy",
    "length_normalize": False,
    **{k: v for k, v in settings_of(opob_advantages).items() if k not in ("lengths", "eps")},
}
"""Settings of the advantage ``opob``, with defaults."""

OTHER_NAMES = {
    **dict.fromkeys(("ppo", "ppo_clip"), "PPO's clip is grpo, with two bounds dapo"),
    **dict.fromkeys(
        ("decoupled", "decoupled_ppo", "areal"),
        "decoupled PPO is grpo with loss.proximal: recompute and a correction "
        "(conf/methods/decoupled.yaml)",
    ),
    "a3po": "A-3PO is grpo with loss.proximal: loglinear (conf/methods/a3po.yaml)",
    "ppo_ewma": "PPO-EWMA is dapo with loss.proximal: ewma (conf/methods/ppo_ewma.yaml)",
    "vcpo": "VCPO is reinforce with loss.advantage: opob and optim.ess_scaling "
    "(conf/methods/vcpo.yaml)",
    "luspo": "LUSPO is gspo with loss.aggregation: seq-mean-token-sum (conf/methods/luspo.yaml)",
    "dppo": "DPPO is dppo_tv or dppo_kl",
    "sat": "SAT is sat_grpo, sat_dapo or sat_gspo",
}
"""What the field calls some methods, and which parts they are of."""

RETURN_SETTINGS: dict[str, Any] = settings_of(token_advantages)
"""Settings of the advantage ``reinforce_plus_plus``, with defaults."""

ADVANTAGE_SETTINGS = {"opob": OPOB_SETTINGS, "reinforce_plus_plus": RETURN_SETTINGS}

GROUP_CORRECTIONS = tuple(name for name, method in METHODS.items() if method.takes("group_ids"))


def proximal_settings(config: Config) -> dict[str, Any]:
    """The settings of the source of the proximal policy, with defaults."""
    return PROXIMAL_SETTINGS[config.loss.proximal] | dict(config.loss.proximal_settings)


def head_settings(config: Config) -> dict[str, Any]:
    """The settings of the head that are set."""
    own = {key: getattr(config.loss, key) for key in CLIP_KEYS}
    return {k: v for k, v in own.items() if v is not None} | dict(config.loss.objective_settings)


def corrections_of(config: Config) -> list[tuple[str, dict[str, Any]]]:
    """Names and settings of the corrections."""
    given = [dict(correction) for correction in config.loss.corrections]
    return [(str(correction.pop("name")), correction) for correction in given]


def objective_of(config: Config) -> Objective:
    """The objective; the configuration is a checked one."""
    loss = config.loss
    opob = {k: v for k, v in loss.advantage_settings.items() if k != "norms"}
    return Objective(
        head=HEADS[loss.objective],
        settings=head_settings(config),
        corrections=tuple(corrections_of(config)),
        normalize_weights=loss.normalize_weights,
        mask_denominator=loss.mask_denominator,
        aggregation=loss.aggregation,
        max_length=config.rollout.max_new_tokens,
        has_proximal=loss.proximal != "none",
        opob=opob if loss.advantage == "opob" else None,
        returns=returns_of(config),
    )


def returns_of(config: Config) -> dict[str, float] | None:
    """Settings of returns of tokens; None where a response has one advantage."""
    if config.loss.advantage != "reinforce_plus_plus":
        return None
    settings = RETURN_SETTINGS | dict(config.loss.advantage_settings)
    return settings if settings != RETURN_SETTINGS else None


def keeps_reference(config: Config) -> bool:
    """Whether the initial weights are needed: for a penalty, in the loss or in the reward."""
    return bool(config.loss.kl_coef or (returns_of(config) or {}).get("kl_coef"))


def ignored_pace(config: Config) -> Iterator[str]:
    """Settings of section ``pace`` that nobody would read."""
    if config.admission.policy == "pace":
        return
    for field in fields(PaceConfig):
        value = getattr(config.pace, field.name)
        if value != field.default:
            yield (
                f"pace.{field.name} is {show(value)}, but admission.policy is "
                f"{config.admission.policy}, which ignores it; set admission.policy: pace"
            )


def method_problems(config: Config) -> Iterator[str]:
    """Unknown names, wrong settings, and combinations that the rules forbid."""
    names = list(_name_problems(config))
    yield from names or [*_setting_problems(config), *_rule_problems(config)]


def probe_problems(config: Config) -> Iterator[str]:
    """What the objective itself says about its settings, on a batch of two responses."""
    objective = objective_of(config)
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -0.5]])
    part = Scored(
        policy_logprobs=logprobs,
        proximal_logprobs=logprobs,
        behavior_logprobs=logprobs,
        advantages=torch.tensor([[1.0, 1.0], [-1.0, -1.0]]),
        mask=torch.ones(2, 2, dtype=torch.bool),
        rewards=torch.tensor([1.0, 0.0]),
        group_ids=torch.tensor([0, 0]),
        score_square_norms=torch.ones(2),
        reference_logprobs=logprobs,
    )
    try:
        (terms,) = prepare(objective, [part], num_tokens=4, num_sequences=2)
        objective_loss(objective, logprobs, terms)
    except (TypeError, ValueError) as error:
        yield f"loss: {error}"


def _name_problems(config: Config) -> Iterator[str]:
    for index, correction in enumerate(config.loss.corrections):
        where = f"loss.corrections[{index}]"
        if not isinstance(correction, Mapping) or "name" not in correction:
            yield f"{where} is {show(correction)}; write a name and settings: {{name: tis, cap: 2}}"
        elif correction["name"] not in METHODS:
            yield f"{where}.name is {show(correction['name'])}; " + nearest(
                correction["name"], METHODS
            )
    if (value := config.loss.objective) not in HEADS:
        yield f"loss.objective is {show(value)}; {_where_it_is(value)}"
    if (value := config.loss.proximal) not in PROXIMAL_SETTINGS:
        yield f"loss.proximal is {show(value)}; {nearest(value, PROXIMAL_SETTINGS)}"


def _where_it_is(name: str) -> str:
    """What to write instead of a name that is no trust-region head."""
    plain = name.lower().replace("-", "_").replace("+", "_plus")
    if plain in HEADS:
        return f"write {plain}"
    if plain in OTHER_NAMES:
        return OTHER_NAMES[plain]
    if plain in METHODS:
        return f"it is a correction: loss.corrections: [{{name: {plain}}}]"
    if plain in DRAW_ADVANTAGES:
        return f"it is an advantage: loss.advantage: {plain}"
    if plain in PROXIMAL_SETTINGS:
        return f"it is a proximal policy: loss.proximal: {plain}"
    return nearest(name, HEADS)


def _setting_problems(config: Config) -> Iterator[str]:
    loss = config.loss
    known = HEADS[loss.objective].settings
    for key in CLIP_KEYS:
        if getattr(loss, key) is None:
            continue
        if key not in known:
            yield (
                f"loss.{key} is {getattr(loss, key)}, but loss.objective {loss.objective} has no "
                f"such bound; its settings are {_listed(known)}"
            )
        elif key in loss.objective_settings:
            yield f"loss.{key} and loss.objective_settings.{key} are both set; remove one"
    yield from _settings("loss.objective_settings", loss.objective_settings, known)
    known = PROXIMAL_SETTINGS[loss.proximal]
    problems = list(_settings("loss.proximal_settings", loss.proximal_settings, known))
    yield from problems or _proximal_problems(config)
    known = ADVANTAGE_SETTINGS.get(loss.advantage, {})
    yield from _settings("loss.advantage_settings", loss.advantage_settings, known)
    norms = loss.advantage_settings.get("norms", "proxy")
    if norms not in ("proxy", "exact"):
        yield f"loss.advantage_settings.norms is {show(norms)}; choose from: proxy, exact"
    for index, (name, settings) in enumerate(corrections_of(config)):
        where = f"loss.corrections[{index}] ({name})"
        yield from _settings(where, settings, METHODS[name].settings())


def _proximal_problems(config: Config) -> Iterator[str]:
    """Values that the source of the proximal policy cannot have."""
    name, where = config.loss.proximal, "loss.proximal_settings"
    settings = proximal_settings(config)
    if name == "ewma":
        stale, reset = settings["stale_versions"], settings["reset_below"]
        if stale is None or not 0 <= stale < math.inf or reset is None or not 0 <= reset <= 1:
            yield (
                f"{where}: stale_versions is {show(stale)} and reset_below {show(reset)}; needed a "
                "number of versions, at least 0, and a share of the tokens, in [0, 1]"
            )
    if name == "snapshot":
        limit = settings["max_versions"]
        if limit is not None and (limit != int(limit) or limit < 1):
            yield f"{where}: max_versions is {show(limit)}; needed null or a whole number above 0"
    if name == "interruption":
        positions = settings["batch_positions"]
        if positions is None or positions != int(positions) or positions < 1:
            yield f"{where}: batch_positions is {show(positions)}; needed a whole number above 0"
    if (missing := settings.get("missing", "error")) not in MISSING:
        yield f"{where}: missing is {show(missing)}; choose from: {_listed(MISSING)}"


def _settings(where: str, given: Mapping[Any, Any], known: Mapping[str, Any]) -> Iterator[str]:
    """Settings that do not exist or have another type than their default."""
    for key, value in given.items():
        if key not in known:
            hint = nearest(key, known) if known else "there are none here"
            yield f"{where} has no setting {show(str(key))}; {hint}"
        elif not _fits(value, known[key]):
            yield f"{where}: {key} is {show(value)}, expected {_kind(known[key])}"


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool | str):
        return type(value) is type(default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # a number with a default of None may be None, and so may a bound
    return is_number or value is None


def _kind(default: Any) -> str:
    if isinstance(default, bool):
        return "true or false"
    return "text" if isinstance(default, str) else "a number"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _rule_problems(config: Config) -> Iterator[str]:
    loss, head = config.loss, HEADS[config.loss.objective]
    names = [name for name, _ in corrections_of(config)]
    is_plain = loss.objective == "reinforce"
    weights = [name for name in names if METHODS[name].role != "mask"]
    if len(set(names)) < len(names):
        yield f"loss.corrections has {_listed(names)}: one of them twice; list each once"
    elif len(weights) > 1:
        yield (
            f"loss.corrections has the weights {_listed(weights)}, which all contain the ratio to "
            "the behavior policy: it must be counted once; keep one of them, beside any masks"
        )
    for name in weights:
        if METHODS[name].role == "objective" and not is_plain:
            yield (
                f"loss.corrections has {name}, whose weight is the whole ratio of the policy to "
                f"the behavior policy, and loss.objective {loss.objective} has a ratio too: one "
                "trust region, and no more; set loss.objective: reinforce"
            )
        elif loss.proximal == "none" and not is_plain:
            yield (
                f"loss.corrections has {name}, and with loss.proximal none the ratio of "
                f"loss.objective {loss.objective} already is the one to the behavior policy, which "
                "must be counted once; set loss.proximal: recompute, or loss.objective: reinforce"
            )
    if is_plain and loss.proximal != "none":
        yield (
            f"loss.proximal is {loss.proximal}, but loss.objective reinforce has no ratio that "
            "could be taken to it; set loss.proximal: none"
        )
    if head.behavior_anchor and loss.proximal != "none":
        yield (
            f"loss.proximal is {loss.proximal}, but loss.objective {loss.objective} measures the "
            "distance from the behavior policy itself; set loss.proximal: none"
        )
    exact = loss.proximal in ("snapshot", "interruption")
    if exact and config.mode == Mode.SYNC and not config.sync.lag_versions:
        yield (
            f"loss.proximal is {loss.proximal}, but in mode sync the weights that sampled a token "
            "are those of the step; set loss.proximal: recompute, which needs no copies, or "
            "sync.lag_versions"
        )
    if loss.proximal == "interruption" and config.engine.kind == "vllm":
        yield (
            "loss.proximal is interruption, which scores all that was sampled while no token "
            "flows, but tokens of vLLM (engine.kind) may still be on their way then; set "
            "loss.proximal: snapshot, or engine.kind: local"
        )
    if config.rollout.group_size == 1:
        whole = [name for name in names if name in GROUP_CORRECTIONS]
        for name in whole:
            yield (
                f"rollout.group_size is 1, but loss.corrections {name} shares one weight out over "
                "a whole group; use at least 2"
            )
    if loss.normalize_weights and not weights:
        yield "loss.normalize_weights is true, but no correction in loss.corrections has a weight"
    if loss.mask_denominator == "kept" and not names:
        yield "loss.mask_denominator is kept, but nothing in loss.corrections rejects a token"
    optim = config.optim
    if optim.ess_scaling == "none" and (optim.ess_base != 1.0 or optim.ess_ratio_cap is not None):
        yield (
            "optim.ess_base or optim.ess_ratio_cap is set, but optim.ess_scaling is none, which "
            "ignores them; set optim.ess_scaling: sqrt"
        )


def needs_group(config: Config) -> bool:
    """Whether the advantage compares the responses of a group."""
    return config.loss.advantage in GROUP_BASELINES
