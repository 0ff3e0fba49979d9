"""The commands behind the command line: train, resume, evaluate.

And the files they leave in the run directory.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from pace_lightning.build import Experiment, build
from pace_lightning.build_reliability import watchdog
from pace_lightning.build_trainer import build_follower, ranks_of
from pace_lightning.config import Config, ConfigError
from pace_lightning.config_checks import check
from pace_lightning.config_explain import run_directory
from pace_lightning.config_load import load, to_yaml
from pace_lightning.config_resume import check_changes
from pace_lightning.core.trajectory import PolicyVersion
from pace_lightning.tasks.scoring import ScorerError, ScorerTimeout
from pace_lightning.training.checkpoint_files import read_checkpoint
from pace_lightning.training.monitors import log_metrics
from pace_lightning.training.run_files import keep_lines_before
from pace_lightning.training.strategies import CONFIG

Emit = Callable[[str], None]


def train(config: Config, emit: Emit) -> int:
    """Train from the start in a new run directory. Returns the exit code."""
    run_dir = run_directory(config, datetime.now())
    if ranks_of(config).rank:
        return _follow(config, run_dir, checkpoint=None)
    if (run_dir / "config.yaml").exists():
        resumable = any((run_dir / "checkpoints").glob("version-*"))
        resume_it = f"resume it (`python -m pace_lightning resume {run_dir}`) or "
        raise ConfigError(
            f"run_dir {run_dir} already holds a run; {resume_it if resumable else ''}choose "
            "another run_dir"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    try:
        return _fit(config, run_dir, emit, checkpoint=None)
    except ConfigError:  # nothing was started: leave nothing behind that looks like a run
        for name in ("config.yaml", "summary.json"):
            (run_dir / name).unlink(missing_ok=True)
        if not any(run_dir.iterdir()):
            run_dir.rmdir()
        raise


def resume(run_dir: Path, emit: Emit, overrides: Sequence[str] = ()) -> int:
    """Go on from the newest checkpoint of a run. Returns the exit code.

    Args:
        run_dir: of the run.
        emit: prints a line for the user.
        overrides: settings that change from now on; see `config_resume`.
    """
    config = resumed_config(run_dir, overrides)
    logging.getLogger().setLevel(config.logging.level.upper())
    checkpoint, version, made_with = _newest_checkpoint(run_dir, emit)
    changes = check_changes(made_with, to_yaml(config), version=version)
    if ranks_of(config).rank:
        return _follow(config, run_dir, checkpoint=checkpoint)
    for change in changes:
        emit(f"changed: {change}")
    if overrides:
        _write(run_dir / "config.yaml", to_yaml(config))
    emit(f"resuming at version {version} from {checkpoint}")
    keep_lines_before(run_dir / "samples.jsonl", version)
    return _fit(config, run_dir, emit, checkpoint=checkpoint, version=version)


def resumed_config(run_dir: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run that is there already, with settings on top."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no config.yaml")
    config = load(run_dir / "config.yaml", overrides)
    check(config)
    return config


def evaluate(config: Config, emit: Emit) -> int:
    """Score the model of a configuration on its held-out prompts. Returns the exit code."""
    alone = {"devices": 1, "num_nodes": 1, "strategy": "auto"}  # only the engine has work to do
    config = cast("Config", OmegaConf.merge(config, {"trainer": alone}))
    run_dir = run_directory(config, datetime.now())
    run_dir.mkdir(parents=True, exist_ok=True)
    _quiet()
    try:
        experiment = _build(config, run_dir, emit)
        try:
            if not experiment.num_eval_prompts:
                raise ConfigError("nothing to evaluate: set data.held_out or data.eval_sources")
            experiment.trainer.loggers = []  # run_dir may hold a run, with curves of its own
            metrics = _validate(experiment)
        finally:
            experiment.datamodule.close()
    except BaseException as error:
        if not any(run_dir.iterdir()):
            run_dir.rmdir()
        _unmask_interrupt(error)
        raise
    for name, value in metrics.items():
        emit(f"{name:<18} {value:.4f}")
    (run_dir / "evaluation.json").write_text(json.dumps(metrics, indent=2) + "\n")
    emit(f"written to {run_dir / 'evaluation.json'}")
    return 0


def _newest_checkpoint(run_dir: Path, emit: Emit) -> tuple[Path, PolicyVersion, str]:
    """The newest checkpoint that is whole, its version, and the configuration it was made with."""
    files = [
        (int(match[1]), int(match[2] or 0), path)
        for path in (run_dir / "checkpoints").glob("version-*.ckpt")  # a directory if sharded
        # a version that is saved again beside a file that is there already gets a suffix
        if (match := re.fullmatch(r"version-(\d+)(?:-v(\d+))?", path.stem))
    ]
    if not files:
        raise ConfigError(
            f"{run_dir} has no checkpoint to resume from (set trainer.checkpoint_every_steps); "
            "start a new run instead"
        )
    for version, _, path in sorted(files, reverse=True):
        try:
            if path.is_dir():  # it got its name when it was complete
                return path, version, (path / CONFIG).read_text()
            state = read_checkpoint(path)
            return path, state["global_step"], state["config"]
        except Exception as error:
            emit(f"{path} cannot be read, trying the one before it: {error!r:.200}")
    raise ConfigError(
        f"none of the {len(files)} checkpoints in {run_dir / 'checkpoints'} can be read; start a "
        "new run instead"
    )


def _plotted_evaluation(run_dir: Path, version: PolicyVersion) -> dict[str, float]:
    """What TensorBoard shows of the evaluation of a version; empty if there was none."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.WARNING)
    size = {"scalars": 0, "histograms": 1, "compressedHistograms": 1, "tensors": 1}
    events = EventAccumulator(str(run_dir / "tensorboard"), size).Reload()
    return {
        tag: event.value
        for tag in events.Tags()["scalars"]
        if tag.startswith("eval/")
        for event in events.Scalars(tag)
        if event.step == version
    }


def _follow(config: Config, run_dir: Path, *, checkpoint: Path | None) -> int:
    """What every rank but 0 does: take part, until rank 0 ends."""
    _quiet()
    follower = build_follower(config, run_dir)
    try:
        follower.trainer.fit(
            follower.module,
            datamodule=follower.datamodule,
            ckpt_path=None if checkpoint is None else str(checkpoint),
            weights_only=True,
        )
    except BaseException as error:
        follower.ranks.report_failure(error)
        _unmask_interrupt(error)
        raise
    return 0


def _fit(
    config: Config,
    run_dir: Path,
    emit: Emit,
    *,
    checkpoint: Path | None,
    version: PolicyVersion | None = None,
) -> int:
    _quiet()
    summary: dict[str, Any] = {"status": "failed"}
    experiment: Experiment | None = None
    after: dict[str, float] | None = None
    watch = ExitStack()
    try:
        # Curves are cut at the resumed version, but the evaluation of just that version is not made
        # again.
        evaluation: dict[str, float] = {}
        if version is not None and version < config.trainer.steps:
            evaluation = _plotted_evaluation(run_dir, version)
        experiment = _build(config, run_dir, emit, version)
        watch.enter_context(
            watchdog(
                config,
                experiment,
                lambda why: _write_summary(run_dir, {"status": "failed", "error": why}),
            )
        )
        if version is not None and evaluation:
            log_metrics(experiment.trainer, evaluation, version)
        emit(f"run directory {run_dir}")
        experiment.trainer.fit(
            experiment.module,
            datamodule=experiment.datamodule,
            ckpt_path=None if checkpoint is None else str(checkpoint),
            weights_only=True,
        )
        summary |= _outcome(experiment, config.trainer.steps)
        after = experiment.datamodule.evaluations.get(experiment.trainer.global_step)
        return 0
    except BaseException as error:
        failure = error
        if experiment is not None:
            experiment.ranks.report_failure(error)
            # an error here, or the launcher's signal, may be but the echo of one there
            failure = experiment.ranks.failure_elsewhere() or error
        interrupted = isinstance(failure, KeyboardInterrupt | SystemExit)
        summary |= {"status": "interrupted" if interrupted else "failed", "error": repr(failure)}
        _unmask_interrupt(error)
        if failure is not error:
            raise failure from error
        raise
    finally:
        if experiment is not None:
            with experiment.time_ledger.span("close"):
                experiment.datamodule.close()
            summary |= _account(experiment, after)
        _write_summary(run_dir, summary)
        watch.close()
        if experiment is not None:
            _print_summary(summary, run_dir, emit)


def _outcome(experiment: Experiment, steps: int) -> dict[str, Any]:
    """How training ended that did not fail."""
    if (nothing := experiment.datamodule.nothing_to_learn) is not None:
        return {"status": "nothing_to_learn", "error": str(nothing)}
    return {"status": "finished" if experiment.trainer.global_step >= steps else "data_ended"}


def _write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    _write(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    """Whole, or not at all."""
    scratch = path.with_name(f".{path.name}.part")
    scratch.write_text(text)
    scratch.replace(path)


def _build(
    config: Config, run_dir: Path, emit: Emit, version: PolicyVersion | None = None
) -> Experiment:
    """Build, and start the scoring processes.

    What is wrong with data, model or reward function shows here.

    Raises:
        ConfigError: with what to change.
    """
    try:
        experiment = build(config, run_dir, emit=emit, resumed_version=version)
        try:
            experiment.datamodule.start_scoring()
        except BaseException:
            experiment.datamodule.close()
            raise
    except (ValueError, OSError, ScorerError, ScorerTimeout) as error:
        raise ConfigError(str(error)) from error
    return experiment


def _unmask_interrupt(error: BaseException) -> None:
    """Lightning turns Ctrl-C into an exit with code 1; raise what it was."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
        raise error.__context__ from None


def _validate(experiment: Experiment) -> dict[str, float]:
    experiment.trainer.validate(experiment.module, datamodule=experiment.datamodule, verbose=False)
    return experiment.datamodule.evaluations[experiment.trainer.global_step]


def _account(experiment: Experiment, after: dict[str, float] | None) -> dict[str, Any]:
    datamodule, staleness = experiment.datamodule, experiment.staleness.mean
    before = datamodule.evaluations.get(0)
    return {
        "steps": experiment.trainer.global_step,
        "policy_version": experiment.trainer.global_step,
        "pass_rate_before": before and before["pass_rate"],
        "pass_rate_after": after and after["pass_rate"],
        "tokens_generated": datamodule.tokens_generated,
        "tokens_trained": datamodule.tokens_trained,
        "seconds": {
            part: round(value, 3) for part, value in experiment.time_ledger.seconds().items()
        },
        "staleness": {
            "generation": None if staleness is None else staleness.generation,
            "waiting": None if staleness is None else staleness.waiting,
        },
        "fates_unit": "groups",
        "fates": datamodule.ledger.groups(),
        "fates_tokens": datamodule.ledger.tokens(),
        "incidents": asdict(datamodule.worker.incidents),
        "rejected_shares": experiment.admission.shares(),
        "never_admitted": _never_admitted(datamodule.ledger.never_trained()),
        "ranking_seconds": round(experiment.admission.ranking_seconds, 3),
        "rescore_seconds": round(experiment.admission.rescore_seconds, 3),
    }


def _never_admitted(rejections: dict[str, int]) -> dict[str, Any]:
    """What the summary says of prompts that were rejected and never trained on, worst first."""
    return {
        "prompts": len(rejections),
        "rejections": sum(rejections.values()),
        "worst": dict(list(rejections.items())[:5]),
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
    emit(
        f"  tokens               {summary['tokens_generated']} generated, "
        f"{summary['tokens_trained']} trained"
    )
    emit(
        "  groups               "
        + ", ".join(f"{count} {fate}" for fate, count in summary["fates"].items())
    )
    if any(summary["incidents"].values()):
        emit(
            "  incidents            "
            + ", ".join(f"{count} {name}" for name, count in summary["incidents"].items() if count)
        )
    if {"rejected", "too_stale"} & summary["fates"].keys():
        never = summary["never_admitted"]
        worst = ", ".join(f"no. {index}: {count}" for index, count in never["worst"].items())
        emit(
            f"  never admitted       {never['prompts']} prompts, after {never['rejections']} "
            f"rejections{f' (most: {worst})' if worst else ''}"
        )
    parts = ", ".join(f"{part} {value:.0f}" for part, value in seconds.items() if part != "total")
    emit(f"  seconds              {seconds['total']:.0f} = {parts}")
    emit(f"  written to           {run_dir}")


def _quiet() -> None:
    """Silence what libraries tell about themselves; what concerns the run is said by the run."""
    for name in (
        "lightning.pytorch.utilities.rank_zero",
        "lightning.pytorch",
        "lightning.fabric",
        "transformers",
        "ContinuousBatchingLogger",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
