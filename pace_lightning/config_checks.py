"""Refuse combinations of values that cannot work, before anything starts.

The schema knows types; this module knows sums. All problems are reported at once, each with its
path, its value and the reason. What depends on the machine or on files is checked where it is used.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

from pace_lightning.config import Config, ConfigError, Mode
from pace_lightning.config_explain import longest_deadline, outstanding_limit, pace_window
from pace_lightning.config_inputs import data_problems, model_problems
from pace_lightning.config_load import nearest, show
from pace_lightning.config_methods import ignored_pace, method_problems, needs_group, probe_problems
from pace_lightning.config_ranks import rank_problems
from pace_lightning.core.draw_advantages import DRAW_ADVANTAGES
from pace_lightning.core.losses import AGGREGATIONS
from pace_lightning.core.objective import DENOMINATORS
from pace_lightning.core.step_size import RULES as ESS_RULES

CHOICES: dict[str, tuple[str, ...]] = {
    "admission.policy": ("all", "max_lag", "pace"),
    "data.overlong_prompts": ("refuse", "skip"),
    "engine.dtype": ("auto", "float32", "bfloat16"),
    "engine.kind": ("auto", "vllm", "local"),
    "engine.transfer": ("auto", "file", "ipc", "nccl"),
    "logging.level": ("debug", "info", "warning", "error"),
    "loss.advantage": DRAW_ADVANTAGES,
    "loss.aggregation": AGGREGATIONS,
    "loss.mask_denominator": DENOMINATORS,
    "optim.ess_scaling": ("none", *ESS_RULES),
    "pace.excess": ("occupancy", "target"),
    "pace.forgetting": ("absolute", "drop", "signed"),
    "pace.forgetting_aggregate": ("last", "max", "token_weighted"),
    "pace.group_score": ("mean", "max"),
    "pace.no_score": ("raw", "zero"),
    "pace.ranking": ("effective", "raw", "generation"),
    "rollout.on_timeout": ("settle", "retry", "complete"),
    "trainer.on_nothing_to_learn": ("error", "finish"),
    "trainer.precision": ("32-true", "bf16-mixed"),
}
"""Every value with a closed set of names."""

AT_LEAST_ONE = (
    "data.epochs",
    "data.max_prompt_tokens",
    "engine.cache_tokens",
    "engine.max_batch_tokens",
    "engine.max_running",
    "eval.max_new_tokens",
    "eval.samples",
    "model.logprob_chunk_tokens",
    "model.warm_start.batch_size",
    "pace.aging_limit",
    "pace.target_groups",
    "pace.window",
    "pace.window_minimum",
    "reward.num_workers",
    "rollout.group_size",
    "rollout.max_new_tokens",
    "rollout.max_outstanding_groups",
    "sync.every_steps",
    "trainer.engine_threads",
    "trainer.groups_per_step",
    "trainer.keep_checkpoints",
    "trainer.max_empty_groups",
    "trainer.micro_batches",
    "trainer.num_threads",
    "trainer.steps",
)
"""Counts; null is allowed where the schema allows it."""

RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "admission.max_lag": (lambda x: x >= 0, "at least 0"),
    "data.held_out": (lambda x: x >= 0, "at least 0"),
    "model.lora.alpha": (lambda x: x > 0, "above 0"),
    "model.lora.rank": (lambda x: x >= 0, "at least 0 (0 is no adapters)"),
    "model.warm_start.learning_rate": (lambda x: x > 0, "above 0"),
    "model.warm_start.steps": (lambda x: x >= 0, "at least 0 (0 is no warm start)"),
    "trainer.min_step_seconds": (lambda x: x >= 0, "at least 0"),
    "engine.max_restarts": (lambda x: x >= 0, "at least 0"),
    "engine.max_retries": (lambda x: x >= 0, "at least 0"),
    "engine.publish_timeout_seconds": (lambda x: x > 0, "above 0"),
    "engine.startup_timeout_seconds": (lambda x: x > 0, "above 0"),
    "eval.every_steps": (lambda x: x >= 0, "at least 0"),
    "eval.temperature": (lambda x: x >= 0, "at least 0 (0 is greedy)"),
    "eval.timeout_seconds": (lambda x: x > 0, "above 0"),
    "logging.samples_every_steps": (lambda x: x >= 0, "at least 0"),
    "loss.clip_high": (lambda x: x > 0, "above 0"),
    "loss.clip_low": (lambda x: 0 < x < 1, "in (0, 1)"),
    "loss.dual_clip": (lambda x: x > 1, "above 1"),
    "loss.kl_coef": (lambda x: x >= 0, "at least 0"),
    "loss.std_ddof": (lambda x: x in (0, 1), "0 or 1"),
    "optim.ess_base": (lambda x: 0 < x <= 1, "in (0, 1]"),
    "optim.ess_ratio_cap": (lambda x: x > 0, "above 0"),
    "optim.learning_rate": (lambda x: x > 0, "above 0"),
    "optim.max_grad_norm": (lambda x: x >= 0, "at least 0 (0 is no clipping)"),
    "optim.stale_budget": (lambda x: x > 0, "above 0"),
    "optim.lifetime_budget": (lambda x: x > 0, "above 0"),
    "optim.warmup_steps": (lambda x: x >= 0, "at least 0"),
    "optim.weight_decay": (lambda x: x >= 0, "at least 0"),
    "pace.gamma": (lambda x: x >= 0, "at least 0"),
    "pace.rate_max": (lambda x: 0 < x < 1, "in (0, 1)"),
    "pace.reserve_groups": (lambda x: x >= 0, "at least 0"),
    "pace.smoothing": (lambda x: 0 < x <= 1, "in (0, 1]"),
    "reward.memory_gib": (lambda x: x > 0, "above 0"),
    "reward.startup_timeout_seconds": (lambda x: x > 0, "above 0"),
    "reward.max_error_share": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "reward.overlong_penalty_factor": (lambda x: x >= 0, "at least 0"),
    "reward.overlong_penalty_tokens": (lambda x: x >= 0, "at least 0"),
    "reward.timeout_seconds": (lambda x: x > 0, "above 0"),
    "rollout.eta": (lambda x: x >= 0, "at least 0"),
    "rollout.temperature": (
        lambda x: x > 0,
        "above 0: at 0 all responses of a group are equal and nothing is learned",
    ),
    "rollout.timeout_seconds": (lambda x: x > 0, "above 0"),
    "seed": (lambda x: 0 <= x < 2**32, "in [0, 2**32 - 1]"),
    "sync.lag_versions": (lambda x: x >= 0, "at least 0"),
    "trainer.checkpoint_every_steps": (lambda x: x >= 0, "at least 0"),
    "trainer.draw_timeout_seconds": (lambda x: x > 0, "above 0"),
    "trainer.watchdog_seconds": (lambda x: x >= 0, "at least 0 (0 is no watchdog)"),
}
"""Every other number: what it must satisfy, and that in words."""


def check(config: Config) -> None:
    """Refuse a configuration that could not run.

    Raises:
        ConfigError: naming every problem found, one per line.
    """
    problems = [problem for rule in RULES for problem in rule(config)]
    problems = problems or list(probe_problems(config))
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"{count} in the configuration:{lines}")


def _names(config: Config) -> Iterator[str]:
    for path, choices in CHOICES.items():
        value = _get(config, path)
        if value not in choices:
            yield f"{path} is {show(value)}; {nearest(value, choices)}"
    if not re.fullmatch(r"\w[\w.-]*", config.name):
        yield (
            f"name is {show(config.name)}; it names a directory: use letters, digits and . _ - only"
        )
    if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*", config.reward.function):
        yield (
            f"reward.function is {show(config.reward.function)}; expected module:function, for "
            "example pace_lightning.tasks.rewards:last_number"
        )
    if "{prompt}" not in config.data.template:
        yield f"data.template is {show(config.data.template)}; it must contain {{prompt}}"


def _numbers(config: Config) -> Iterator[str]:
    for path in AT_LEAST_ONE:
        value = _get(config, path)
        if value is not None and value < 1:
            yield f"{path} is {value}; it must be at least 1"
    for path, (holds, need) in RANGES.items():
        value = _get(config, path)
        if value is not None and not (math.isfinite(value) and holds(value)):
            yield f"{path} is {value}; it must be {need if math.isfinite(value) else 'finite'}"
    for index, beta in enumerate(config.optim.betas):
        if not 0 <= beta < 1:
            yield f"optim.betas[{index}] is {beta}; it must be in [0, 1)"


def _batch(config: Config) -> Iterator[str]:
    rollout, trainer = config.rollout, config.trainer
    responses = trainer.groups_per_step * rollout.group_size
    if trainer.micro_batches > responses > 0:
        yield (
            f"trainer.micro_batches is {trainer.micro_batches}, but a step has only "
            f"{trainer.groups_per_step} groups x {rollout.group_size} = {responses} responses"
        )
    if rollout.group_size == 1 and needs_group(config):
        yield (
            f"rollout.group_size is 1, but loss.advantage {config.loss.advantage} compares the "
            "responses of a group: every advantage would be 0; use at least 2"
        )
    elif rollout.group_size == 1 and rollout.dynamic_sampling:
        yield (
            "rollout.group_size is 1, and rollout.dynamic_sampling drops groups whose scores are "
            "all equal, as those of one response are; set rollout.dynamic_sampling: false"
        )
    if config.optim.warmup_steps > trainer.steps:
        yield (
            f"optim.warmup_steps is {config.optim.warmup_steps}, more than trainer.steps "
            f"{trainer.steps}: the learning rate would never be reached"
        )


def _dispatch(config: Config) -> Iterator[str]:
    slots, needed = config.rollout.max_outstanding_groups, config.trainer.groups_per_step
    if slots is not None and slots < needed:
        yield (
            f"rollout.max_outstanding_groups is {slots}: a step needs {needed} groups, but at most "
            f"{slots} may be outstanding: no step could ever start"
        )
    if config.mode != Mode.SYNC and config.sync.lag_versions:
        yield (
            f"sync.lag_versions is {config.sync.lag_versions}, but data has one exact age only if "
            "nothing is generated ahead; set mode: sync, or bound the lag with rollout.eta"
        )
    if config.mode == Mode.SYNC:
        if config.rollout.eta not in (None, 0):
            yield (
                f"rollout.eta is {config.rollout.eta}, but mode sync means 0: nothing is generated "
                "ahead; remove it, or set mode: async"
            )
        if config.sync.every_steps != 1:
            yield (
                f"sync.every_steps is {config.sync.every_steps}, but mode sync publishes after "
                "every step; remove it, or set mode: async"
            )


def _deadlines(config: Config) -> Iterator[str]:
    rollout, limit = config.rollout, config.trainer.watchdog_seconds
    path, longest = longest_deadline(config)
    if limit is not None and 0 < limit <= longest:
        yield (
            f"trainer.watchdog_seconds is {limit}, but {path} is {longest}: the watchdog would end "
            "the run before that deadline can; raise it, lower the deadline, or use null"
        )
    if rollout.on_timeout == "complete" and not 2 <= rollout.min_responses <= rollout.group_size:
        yield (
            f"rollout.min_responses is {rollout.min_responses}; with rollout.on_timeout complete "
            f"it must be in [2, rollout.group_size {rollout.group_size}]: a baseline needs two"
        )


def _admission(config: Config) -> Iterator[str]:
    policy, max_lag, eta = config.admission.policy, config.admission.max_lag, config.rollout.eta
    every = config.sync.every_steps
    if max_lag is None:
        if policy == "max_lag":
            yield "admission.policy is max_lag, but admission.max_lag is not set"
        return
    if policy != "max_lag":
        yield (
            f"admission.max_lag is {max_lag}, but admission.policy is {policy}, which ignores it; "
            "set admission.policy: max_lag"
        )
    if max_lag < every - 1:
        yield (
            f"admission.max_lag is {max_lag}, but weights are published every {every} steps "
            f"(sync.every_steps), so they are up to {every - 1} versions old when they are used"
        )
    if config.mode == Mode.SYNC:
        if max_lag != config.sync.lag_versions:
            yield (
                f"admission.max_lag is {max_lag}, but in mode sync the lag is sync.lag_versions "
                f"{config.sync.lag_versions}; remove it"
            )
    elif eta is None:
        yield (
            f"admission.max_lag is {max_lag}, but rollout.eta is not set: without a bound on "
            f"dispatch, older groups are generated and discarded; set rollout.eta: {max_lag}"
        )
    elif eta > max_lag:
        yield (
            f"rollout.eta is {eta}, above admission.max_lag {max_lag}: groups are generated up to "
            f"{eta} versions ahead, and admission would discard nearly everything; use eta <= "
            f"{max_lag}"
        )


def _pace(config: Config) -> Iterator[str]:
    if config.admission.policy != "pace":
        return
    pace, needed = config.pace, config.trainer.groups_per_step
    if config.mode == Mode.SYNC:
        yield "admission.policy is pace, but in mode sync nothing waits in the pool; use mode async"
        return
    if pace.target_groups is not None and pace.target_groups < needed:
        yield (
            f"pace.target_groups is {pace.target_groups} but a step needs {needed} groups "
            "(trainer.groups_per_step): rejecting down to it would starve the trainer"
        )
    limit, target = outstanding_limit(config), pace.target_groups or needed
    if limit <= target + pace.reserve_groups:
        yield (
            f"at most {limit} groups may be outstanding, so the pool can never exceed "
            f"pace.target_groups {target} + pace.reserve_groups {pace.reserve_groups}: PACE would "
            "never reject; raise rollout.max_outstanding_groups or rollout.eta"
        )
    window = pace_window(config)
    if window < pace.window_minimum:
        yield (
            f"pace.window is {window}, smaller than pace.window_minimum {pace.window_minimum}: the "
            "percentile would never be used"
        )


def _reward(config: Config) -> Iterator[str]:
    limit = config.rollout.max_new_tokens
    if config.reward.overlong_penalty_tokens > limit:
        yield (
            f"reward.overlong_penalty_tokens is {config.reward.overlong_penalty_tokens}, longer "
            f"than a whole response (rollout.max_new_tokens {limit})"
        )


def _engine(config: Config) -> Iterator[str]:
    engine, prompt = config.engine, config.data.max_prompt_tokens
    response = max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)
    if engine.cache_tokens is not None and engine.cache_tokens < prompt + response:
        yield (
            f"engine.cache_tokens is {engine.cache_tokens}, but one full sequence takes {prompt} "
            f"prompt + {response} response = {prompt + response} tokens"
        )
    if engine.max_batch_tokens < 1 + engine.max_running:
        yield (
            f"engine.max_batch_tokens is {engine.max_batch_tokens}, but {engine.max_running} "
            "running sequences (engine.max_running) decode one token each, which leaves none for "
            f"a new prompt; use at least {1 + engine.max_running}"
        )
    if engine.kind == "local" and engine.devices is not None:
        yield "engine.devices is set, but engine.kind local generates on the trainer's device"
    if engine.devices is not None and (
        not engine.devices
        or len(set(engine.devices)) < len(engine.devices)
        or min(engine.devices) < 0
    ):
        yield f"engine.devices is {list(engine.devices)}; give distinct GPU numbers, e.g. [1]"
    rescores = config.admission.policy == "pace" and config.pace.ranking == "effective"
    if engine.kind == "vllm" and rescores and config.rollout.temperature != 1:
        yield (
            f"rollout.temperature is {config.rollout.temperature}, but vLLM re-scores prefixes for "
            "pace.ranking effective at temperature 1 only; use 1, another ranking, or engine.kind "
            "local"
        )


RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    _names,
    _numbers,
    _batch,
    _dispatch,
    _deadlines,
    _admission,
    _pace,
    ignored_pace,
    _reward,
    method_problems,
    _engine,
    model_problems,
    data_problems,
    rank_problems,
)


def _get(config: Config, path: str) -> Any:
    """The value at a dotted path."""
    return operator.attrgetter(path)(config)
