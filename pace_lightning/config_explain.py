"""Numbers that follow from a configuration, and a page that explains them.

``build.py`` uses the same functions, so the page says what the run does. Symbols: B groups per
step, G responses per group, r the ratio of the policy to its anchor, A the advantage.
"""

from __future__ import annotations

import importlib.util
from datetime import datetime
from pathlib import Path

from pace_lightning.config import Config, Mode
from pace_lightning.config_formula import (
    advantage_text,
    anchor_text,
    objective_text,
)
from pace_lightning.config_load import to_yaml
from pace_lightning.config_memory import memory_text
from pace_lightning.model_shape import ModelShape


def dispatch_ahead(config: Config) -> int | None:
    """AReaL's eta: versions generation may run ahead; 0 in mode sync, None for no such bound."""
    return 0 if config.mode == Mode.SYNC else config.rollout.eta


def outstanding_limit(config: Config) -> int:
    """The most groups that may be in flight or ready at once, by the tighter of the two bounds."""
    needed, slots = config.trainer.groups_per_step, config.rollout.max_outstanding_groups
    eta = dispatch_ahead(config)
    if eta is None:
        return 2 * needed if slots is None else slots
    lead = (eta + 1) * needed
    return lead if slots is None else min(slots, lead)


def thread_layout(config: Config, cores: int) -> tuple[int, int, int]:
    """Intra-op threads on CPU.

    Args:
        config: numbers set there win over the defaults.
        cores: cores of this machine that may be used, at least 1.

    Returns:
        Threads of each of the trainer's ranks and of the engine while all compute, and of all ranks
        together, or of the engine, while the other side is idle: all cores. A number set for the
        trainer holds always.
    """
    if config.mode == Mode.SYNC:
        trainer = engine = cores
    else:
        trainer = max(1, cores // 2)
        engine = max(1, cores - trainer)
    trainer = max(1, trainer // config.trainer.devices)
    trainer = config.trainer.num_threads or trainer
    engine = config.trainer.engine_threads or engine
    return trainer, engine, cores


ENGINE_NAMES = {"vllm": "vLLM", "local": "transformers' continuous batching"}
"""What to call the two kinds."""


def choose_engine(config: Config, *, vllm_installed: bool) -> tuple[str, str]:
    """The engine of a run, ``vllm`` or ``local``, and why."""
    kind = config.engine.kind
    if kind != "auto":
        return kind, "engine.kind"
    rescores = config.admission.policy == "pace" and config.pace.ranking == "effective"
    if not vllm_installed:
        return "local", "engine.kind auto: vLLM is not installed; `make train` tries to"
    if rescores and config.rollout.temperature != 1:
        return "local", "engine.kind auto: vLLM re-scores prefixes at temperature 1 only"
    if config.loss.proximal == "interruption":
        return "local", "engine.kind auto: loss.proximal interruption has to see each token in time"
    return "vllm", "engine.kind auto: vLLM is installed"


def is_vllm_installed() -> bool:
    """Whether vLLM can be imported; looks, and does not."""
    return importlib.util.find_spec("vllm") is not None


def shares_prompts(config: Config) -> bool:
    """Whether the trainer computes each group's prompt once."""
    chosen = config.model.shared_prompts
    excluded = config.model.gradient_checkpointing or config.model.pack_rows
    return not excluded if chosen is None else chosen


def lora_alpha(config: Config) -> float:
    """The scale of the adapters' update, times their rank."""
    lora = config.model.lora
    return 2.0 * lora.rank if lora.alpha is None else lora.alpha


def pace_window(config: Config) -> int:
    """Scores in PACE's drift window."""
    step = config.trainer.groups_per_step * config.rollout.group_size
    return config.pace.window or max(1024, 4 * step)


def longest_deadline(config: Config) -> tuple[str, float]:
    """The key and the seconds of the longest deadline that the watchdog backs up.

    Evaluations are not among them: each prompt that ends in one is progress.
    """
    deadlines = {
        "engine.publish_timeout_seconds": config.engine.publish_timeout_seconds,
        "engine.startup_timeout_seconds": config.engine.startup_timeout_seconds,
        "reward.startup_timeout_seconds": config.reward.startup_timeout_seconds,
        "reward.timeout_seconds": config.reward.timeout_seconds,
        "rollout.timeout_seconds": config.rollout.timeout_seconds,
        "trainer.draw_timeout_seconds": config.trainer.draw_timeout_seconds,
    }
    path = max(deadlines, key=lambda path: deadlines[path])
    return path, deadlines[path]


def watchdog_limit(config: Config) -> float:
    """Seconds without progress after which the run is ended; 0: never."""
    limit = config.trainer.watchdog_seconds
    return 2 * longest_deadline(config)[1] if limit is None else limit


def run_directory(config: Config, now: datetime) -> Path:
    """``run_dir`` if it is set, else ``runs/<name>/<YYYYmmdd-HHMMSS>``."""
    if config.run_dir is not None:
        return Path(config.run_dir)
    return Path("runs") / config.name / now.strftime("%Y%m%d-%H%M%S")


def evaluation_rounds(config: Config) -> int:
    """Evaluations in a full run: before training, every ``eval.every_steps``, and at the end."""
    every, steps = config.eval.every_steps, config.trainer.steps
    return 2 + ((steps - 1) // every if every else 0)


def explain(config: Config, *, cores: int | None, shape: ModelShape | None = None) -> str:
    """The resolved configuration, and what follows from it.

    Args:
        config: a configuration that passed ``check``.
        cores: cores of this machine; None if unknown, which leaves the thread counts open.
        shape: of the model; None if unknown, which leaves the memory open.
    """
    groups, size = config.trainer.groups_per_step, config.rollout.group_size
    response, prompt = config.rollout.max_new_tokens, config.data.max_prompt_tokens
    responses, outstanding = groups * size, outstanding_limit(config)
    rows = [
        ("groups per step", f"{groups}"),
        ("responses per step", f"{groups} x {size} = {responses}"),
        (
            "tokens per step",
            f"at most {responses * response} sampled ({responses} x {response}), and at most "
            f"{responses * (prompt + response)} with prompts",
        ),
        (
            "trajectories outstanding",
            f"at most {outstanding} groups x {size} = {outstanding * size}, of which the engine "
            f"decodes {min(outstanding * size, config.engine.max_running)} at once",
        ),
        ("dispatch", _dispatch(config)),
        ("expected lag", _lag(config)),
        ("weights", _publication(config)),
        ("ratio r", anchor_text(config)),
        ("advantage A", advantage_text(config)),
        ("objective", objective_text(config)),
        ("optimizer steps", _steps(config)),
        ("evaluation", _evaluation(config)),
        ("engine", _engine(config)),
        ("threads", _threads(config, cores)),
        ("memory per GPU", memory_text(config, shape)),
    ]
    width = max(len(label) for label, _ in rows)
    derived = "\n".join(f"# {label:<{width}}  {text}" for label, text in rows)
    return f"{to_yaml(config)}\n# What follows from it\n{derived}\n"


def _dispatch(config: Config) -> str:
    """Which rule bounds generation."""
    groups, slots = config.trainer.groups_per_step, config.rollout.max_outstanding_groups
    if config.mode == Mode.SYNC:
        return f"synchronous (eta = 0): {groups} groups per version, none ahead"
    if config.rollout.eta is None:
        return f"by slots: at most {outstanding_limit(config)} groups in flight or ready"
    rule = f"by eta = {config.rollout.eta}: generation leads training by at most that many versions"
    return rule if slots is None else f"{rule}, and at most {slots} groups outstanding"


def _lag(config: Config) -> str:
    """The lag to expect from the dispatch rule, and what admission does about it."""
    eta = dispatch_ahead(config)
    if config.mode == Mode.SYNC and config.sync.lag_versions:
        lag = config.sync.lag_versions
        text = f"exactly {lag} versions, fewer in the first {lag} steps: older weights generate"
    elif config.mode == Mode.SYNC:
        text = "0 versions: every step trains on what its own weights generated"
    elif eta is not None:
        text = f"at most about {eta} versions; a rollout that lasts longer than that exceeds it"
        if outstanding_limit(config) < (eta + 1) * config.trainer.groups_per_step:
            steady = outstanding_limit(config) / config.trainer.groups_per_step
            text = f"about {steady:g} versions: the slots are tighter than eta = {eta}"
    else:
        steady = outstanding_limit(config) / config.trainer.groups_per_step
        text = (
            f"about {steady:g} versions from dispatch to use in steady state (outstanding groups / "
            "groups per step); less for tokens sampled after a publication"
        )
    if config.sync.every_steps > 1:
        text += f"; plus up to {config.sync.every_steps - 1} for steps not yet published"
    if config.admission.max_lag is not None:
        text += f"; groups above {config.admission.max_lag} are discarded"
    if config.admission.policy == "pace":
        target = config.pace.target_groups or config.trainer.groups_per_step
        text += (
            f"; PACE holds the wait near {target / config.trainer.groups_per_step:g} "
            f"({target} target groups / {config.trainer.groups_per_step} per step)"
        )
    return text


def _publication(config: Config) -> str:
    """How often the engine gets new weights."""
    every = config.sync.every_steps
    if config.sync.lag_versions:
        return f"published after every step, {config.sync.lag_versions} versions late"
    return "published after every step" if every == 1 else f"published every {every} steps"


def _steps(config: Config) -> str:
    """How many optimizer steps the run takes."""
    text = f"{config.trainer.steps}"
    if config.data.epochs is not None:
        text += f", fewer if {config.data.epochs} epoch(s) of the prompts end first"
    if config.trainer.on_nothing_to_learn == "finish":
        text += ", fewer if nothing is left to learn"
    if config.trainer.min_step_seconds:
        text += (
            f"; each takes at least {config.trainer.min_step_seconds:g} s, the trainer sleeps for "
            "the rest"
        )
    if config.model.warm_start.steps:
        text += f"; before them {config.model.warm_start.steps} supervised ones, unless cached"
    return text


def _evaluation(config: Config) -> str:
    """What each evaluation generates."""
    data, samples = config.data, config.eval.samples
    if not data.eval_sources and not data.held_out:
        return "none: neither data.eval_sources nor data.held_out is set"
    sizes = [source.size for source in data.eval_sources]
    if not data.eval_sources:
        work = f"{data.held_out} held-out prompts x {samples} = {data.held_out * samples} responses"
    elif None in sizes:
        work = f"all prompts of data.eval_sources x {samples} responses"
    else:
        total = sum(size for size in sizes if size is not None)
        work = f"at most {total} prompts x {samples} = {total * samples} responses"
    return f"{work}, {evaluation_rounds(config)} times"


def _engine(config: Config) -> str:
    """What generates, why, and where."""
    kind, why = choose_engine(config, vllm_installed=is_vllm_installed())
    where = "" if config.engine.devices is None else f" on GPUs {list(config.engine.devices)}"
    return f"{ENGINE_NAMES[kind]}{where} ({why}), {config.engine.dtype} arithmetic"


def _threads(config: Config, cores: int | None) -> str:
    """How the cores are shared."""
    if cores is None:
        share = "all cores each, in turn" if config.mode == Mode.SYNC else "half of the cores each"
        trainer = config.trainer.num_threads or f"default ({share})"
        engine = config.trainer.engine_threads or f"default ({share})"
        return (
            f"trainer {trainer}, engine {engine}; the engine gets all cores while the trainer waits"
        )
    trainer, engine, alone = thread_layout(config, cores)
    if choose_engine(config, vllm_installed=is_vllm_installed())[0] == "vllm":
        whole = "" if config.trainer.num_threads else f", {alone} while the engine is idle"
        return (
            f"trainer {trainer}{whole}; engine {engine}, bound to its own cores, if it has no GPU"
        )
    takeover = f"engine {engine}, {alone} while the trainer waits"
    if config.trainer.num_threads is not None:
        return f"trainer {trainer}, {takeover}"
    return f"trainer {trainer}, {alone} while the engine is idle; {takeover}"
