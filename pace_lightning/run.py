"""The commands behind the command line: train, resume, evaluate; and the files they leave in the run directory."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from pace_lightning.build import Experiment, build
from pace_lightning.config import Config, ConfigError
from pace_lightning.config_explain import run_directory
from pace_lightning.config_load import load, to_yaml
from pace_lightning.rollout.worker import NothingToLearnError

Emit = Callable[[str], None]


def train(config: Config, emit: Emit) -> int:
    """Train from the start in a new run directory. Returns the exit code."""
    run_dir = run_directory(config, datetime.now())
    if (run_dir / "config.yaml").exists():
        raise ConfigError(
            f"run_dir {run_dir} already holds a run; resume it (`python -m pace_lightning resume {run_dir}`) or choose "
            "another run_dir"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    return _fit(config, run_dir, emit, checkpoint=None)


def resume(run_dir: Path, emit: Emit) -> int:
    """Go on from the newest checkpoint of a run. Returns the exit code."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no config.yaml")
    checkpoints = sorted((run_dir / "checkpoints").glob("version-*.ckpt"))
    if not checkpoints:
        raise ConfigError(
            f"{run_dir} has no checkpoint to resume from (set trainer.checkpoint_every_steps); start a new run instead"
        )
    config = load(run_dir / "config.yaml")
    emit(f"resuming from {checkpoints[-1]}")
    return _fit(config, run_dir, emit, checkpoint=checkpoints[-1])


def evaluate(config: Config, emit: Emit) -> int:
    """Score the model of a configuration on its held-out prompts. Returns the exit code."""
    run_dir = run_directory(config, datetime.now())
    run_dir.mkdir(parents=True, exist_ok=True)
    _quiet()
    experiment = build(config, run_dir, emit=emit)
    if not experiment.num_eval_prompts:
        raise ConfigError("nothing to evaluate: set data.held_out or data.eval_sources")
    try:
        metrics = _validate(experiment)
    finally:
        experiment.datamodule.close()
    for name, value in metrics.items():
        emit(f"{name:<18} {value:.4f}")
    (run_dir / "evaluation.json").write_text(json.dumps(metrics, indent=2) + "\n")
    emit(f"written to {run_dir / 'evaluation.json'}")
    return 0


def _fit(config: Config, run_dir: Path, emit: Emit, *, checkpoint: Path | None) -> int:
    _quiet()
    summary: dict[str, Any] = {"status": "failed", "error": None}
    experiment: Experiment | None = None
    before: dict[str, float] | None = None
    after: dict[str, float] | None = None
    try:
        experiment = build(config, run_dir, emit=emit)
        emit(f"run directory {run_dir}")
        if experiment.num_eval_prompts and checkpoint is None:
            before = _validate(experiment)
            emit(f"held-out pass rate before training: {before['pass_rate']:.3f}")
        try:
            experiment.trainer.fit(
                experiment.module,
                datamodule=experiment.datamodule,
                ckpt_path=None if checkpoint is None else str(checkpoint),
                weights_only=True,
            )
            summary["status"] = "finished"
        except NothingToLearnError as error:
            if config.trainer.on_nothing_to_learn != "finish":
                raise
            emit(str(error))
            summary |= {"status": "nothing_to_learn", "error": str(error)}
        if summary["status"] == "finished":
            experiment.datamodule.end()
            if experiment.trainer.global_step < config.trainer.steps:
                summary["status"] = "data_ended"
            if experiment.num_eval_prompts:
                after = experiment.datamodule.evaluations.get(experiment.trainer.global_step)
                after = after or _validate(experiment)
        with experiment.time_ledger.span("checkpoint"):
            target = run_dir / "checkpoints" / "final"
            experiment.module.policy.save_pretrained(target)
            experiment.tokenizer.save_pretrained(target)
        return 0
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        summary |= {"status": "interrupted" if interrupted else "failed", "error": repr(error)}
        raise
    finally:
        if experiment is not None:
            experiment.datamodule.close()
            summary |= _account(experiment, before, after)
        scratch = run_dir / ".summary.json.part"
        scratch.write_text(json.dumps(summary, indent=2) + "\n")
        scratch.replace(run_dir / "summary.json")
        if experiment is not None:
            _print_summary(summary, run_dir, emit)


def _validate(experiment: Experiment) -> dict[str, float]:
    experiment.trainer.validate(experiment.module, datamodule=experiment.datamodule, verbose=False)
    return experiment.datamodule.evaluations[experiment.trainer.global_step]


def _account(
    experiment: Experiment, before: dict[str, float] | None, after: dict[str, float] | None
) -> dict[str, Any]:
    datamodule, staleness = experiment.datamodule, experiment.staleness.mean
    return {
        "steps": experiment.trainer.global_step,
        "policy_version": experiment.trainer.global_step,
        "pass_rate_before": before and before["pass_rate"],
        "pass_rate_after": after and after["pass_rate"],
        "tokens_generated": datamodule.worker.num_tokens_generated,
        "tokens_trained": datamodule.tokens_trained,
        "seconds": {part: round(value, 3) for part, value in experiment.time_ledger.seconds().items()},
        "staleness": {
            "generation": None if staleness is None else staleness.generation,
            "waiting": None if staleness is None else staleness.waiting,
        },
        "fates_unit": "groups",
        "fates": datamodule.ledger.groups(),
        "fates_tokens": datamodule.ledger.tokens(),
    }


def _print_summary(summary: dict[str, Any], run_dir: Path, emit: Emit) -> None:
    seconds = summary["seconds"]
    training = seconds["total"] - seconds["setup"] - seconds["evaluate"]
    emit("")
    emit(f"{summary['status']} after {summary['steps']} steps, {training:.0f} s of training")
    if summary["pass_rate_before"] is not None:
        after = summary["pass_rate_after"]
        emit(
            f"  held-out pass rate   {summary['pass_rate_before']:.3f} before, "
            f"{'not measured' if after is None else format(after, '.3f')} after"
        )
    if summary["staleness"]["generation"] is not None:
        emit(
            f"  staleness (versions) {summary['staleness']['generation']:.2f} generation + "
            f"{summary['staleness']['waiting']:.2f} waiting"
        )
    emit(f"  tokens               {summary['tokens_generated']} generated, {summary['tokens_trained']} trained")
    emit("  groups               " + ", ".join(f"{count} {fate}" for fate, count in summary["fates"].items()))
    parts = ", ".join(f"{part} {value:.0f}" for part, value in seconds.items() if part != "total")
    emit(f"  seconds              {seconds['total']:.0f} = {parts}")
    emit(f"  written to           {run_dir}")


def _quiet() -> None:
    """Silence what libraries tell about themselves; what concerns the run is said by the run."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch", "transformers", "ContinuousBatchingLogger"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
