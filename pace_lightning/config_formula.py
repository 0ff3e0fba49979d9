"""The objective of a configuration as one formula.

Symbols, for each token: pi the policy that is trained, mu the behavior policy, prox the proximal
policy, A the advantage, r the ratio to the anchor. Of corrections: x the ratio to mu of a token, X
of its response, g its geometric mean over the response. sg: without gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pace_lightning.config import Config
from pace_lightning.config_methods import corrections_of, head_settings, returns_of
from pace_lightning.core.corrections import METHODS
from pace_lightning.core.heads import HEADS

PROXIMAL = {
    "none": "mu, the behavior policy: the log-prob each token was sampled with",
    "recompute": "prox, the weights at the beginning of the step",
    "loglinear": "prox = mu^(1/d) pi^(1 - 1/d) with d the lag of the token in versions",
    "linear": "prox = mu / d + (1 - 1/d) pi with d the lag of the token in versions",
    "ewma": "prox, the moving average of all versions",
    "interruption": "prox, the weights that sampled the token, scored by them before they go",
    "snapshot": "prox, the weights that sampled the token, scored by a copy of them",
}

ADVANTAGES = {
    "grpo": "(reward - mean of the group) / standard deviation of the group (ddof {ddof})",
    "dr_grpo": "reward - mean of the group",
    "rloo": "reward - mean of the other responses of the group",
    "opo": "reward - mean of the group weighted by length",
    "opob": "reward - mean of the group weighted by (ratio x norm of the score)^2",
    "reinforce_plus_plus": "reward, whitened over the tokens of the step",
    "reinforce_plus_plus_baseline": "reward - mean of the group, whitened over the tokens of the "
    "step",
}

RATIOS = {"token": "x", "sequence": "X", "geometric": "g"}


def anchor_text(config: Config) -> str:
    """What the ratio is."""
    if config.loss.objective == "reinforce":
        return "none: the objective has none"
    text = f"policy / {PROXIMAL[config.loss.proximal]}"
    if config.loss.proximal == "recompute":
        return f"{text}; 1 in value, as a draw is one step"
    if config.loss.proximal in ("loglinear", "linear"):
        return f"{text}; a bound on it and one on a correction are both bounds on pi / mu"
    return text


def advantage_text(config: Config) -> str:
    """What the advantage is."""
    text = ADVANTAGES[config.loss.advantage].format(ddof=config.loss.std_ddof)
    if (returns := returns_of(config)) is None:
        return text
    return (
        f"return of each token, discounted by {returns['gamma']:g}, with a reward of "
        f"-{returns['kl_coef']:g} (log pi - log of the initial weights) at each token; whitened "
        "over the tokens of the step"
    )


def objective_text(config: Config) -> str:
    """The whole objective: head, penalty, aggregation, proximal policy, corrections, step size."""
    loss, anchor = config.loss, "mu" if config.loss.proximal == "none" else "prox"
    term = f"sg[w] {_head(config)}" if loss.corrections else _head(config)
    if loss.kl_coef > 0:
        term += f" - {loss.kl_coef:g} k3(policy, initial weights)"
    parts = [f"{loss.objective}: maximize {loss.aggregation} of {term}"]
    if loss.objective != "reinforce":
        parts.append(f"r = pi / {anchor}")
    if loss.corrections:
        weights = " x ".join(_correction(n, s) for n, s in corrections_of(config))
        normalized = " / its mean over the step" if loss.normalize_weights else ""
        numerator = "pi" if loss.proximal == "none" else anchor
        parts.append(f"w = {weights}{normalized} with x = {numerator} / mu")
        parts.append(f"{loss.mask_denominator} denominator")
    if loss.mask_truncated:
        parts.append("truncated responses carry no loss")
    return "; ".join([*parts, f"learning rate {rate_text(config)}"])


def rate_text(config: Config) -> str:
    """The learning rate of a step."""
    optim = config.optim
    text = f"{optim.learning_rate:g}"
    if optim.ess_scaling != "none":
        base = "" if optim.ess_base == 1 else f" / {optim.ess_base:g}"
        share = f"min(1, ESS / responses{base})"
        text += f" x sqrt({share})" if optim.ess_scaling == "sqrt" else f" x {share}"
    limits = []
    if optim.stale_budget is not None:
        limits.append(f"{optim.stale_budget:g} / mean lag of the step")
    if optim.lifetime_budget is not None:
        limits.append(f"what is left of {optim.lifetime_budget:g} / steps left")
    return f"min({', '.join([text, *limits])})" if limits else text


def _head(config: Config) -> str:
    head = HEADS[config.loss.objective]
    settings = {**head.settings, **head_settings(config)}
    term = _filled(head.formula, settings)
    if settings.get("dual_clip") is not None:
        term = f"[{term}, where A < 0 at least {settings['dual_clip']:g} A]"
    return term


def _correction(name: str, settings: Mapping[str, Any]) -> str:
    method = METHODS[name]
    return f"{name}[{_filled(method.formula, {**method.settings(), **settings})}]"


def _filled(formula: str, settings: Mapping[str, Any]) -> str:
    values = {key: f"{x:g}" if type(x) in (int, float) else x for key, x in settings.items()}
    if "clip_low" in settings and "clip_high" in settings:
        low, high = settings["clip_low"], settings["clip_high"]
        if low is not None and high is not None:
            values |= {"low": f"{1 - low:g}", "high": f"{1 + high:g}"}
    values["ratio"] = RATIOS.get(str(settings.get("level", "token")), "x")
    return formula.format(**{key: "0" if x is None else x for key, x in values.items()})
