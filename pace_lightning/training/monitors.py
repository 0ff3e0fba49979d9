"""Callbacks that only observe: staleness, pool, learning, time; one set of metrics per step.

Every metric is logged at the policy version that the step trained, so that the axis of each plot is
policy versions. The numbers come with the batch (its `DrawReport`) or from the module's own
statistics.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
from lightning.pytorch.loggers import TensorBoardLogger

from pace_lightning.core.batch import TrainBatch
from pace_lightning.core.pool import DrawReport
from pace_lightning.core.staleness import StalenessDecomposition
from pace_lightning.rollout.groups import GeneratedStatistics
from pace_lightning.training.module import PolicyModule
from pace_lightning.training.run_files import RunFiles, keep_lines_before
from pace_lightning.training.timing import TimeLedger
from pace_lightning.training.weight_sync import WeightSync

log = logging.getLogger(__name__)

LAYOUT = {
    "pace_lightning": {
        "staleness of what was trained on (versions)": [
            "Multiline",
            ["staleness/generation", "staleness/waiting", "staleness/total"],
        ],
        "pool (groups)": [
            "Multiline",
            [
                "pool/occupancy_before_groups",
                "pool/occupancy_after_groups",
                "pool/budget_groups",
                "pool/rejected_groups",
            ],
        ],
        "pass rate": ["Multiline", ["reward/generated_mean", "eval/pass_rate"]],
        "importance ratio": ["Multiline", ["ratio/mean", "ratio/ess_share"]],
        "seconds per step": [
            "Multiline",
            [
                "time/wait_seconds",
                "time/train_seconds",
                "time/publish_seconds",
                "time/other_seconds",
            ],
        ],
        "tokens per second": [
            "Multiline",
            ["tokens/generated_per_second", "tokens/consumed_per_second"],
        ],
    }
}
"""One page of TensorBoard's Custom Scalars."""

LOOP_LAG_ALARM_SECONDS = 2.0

REJECTED = {
    "staleness of what was rejected (versions)": [
        "Multiline",
        [
            "staleness/rejected/generation",
            "staleness/rejected/waiting",
            "staleness/rejected/effective",
        ],
    ]
}
"""One more plot, where something may be rejected."""


def log_metrics(trainer: pl.Trainer, metrics: Mapping[str, float], step: int) -> None:
    """Send metrics to every logger of the run."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=step)


def log_histogram(trainer: pl.Trainer, name: str, values: Sequence[float], step: int) -> None:
    """Send a histogram to the loggers that know how.

    Under a name of its own: the Custom Scalars page cannot show a scalar that shares its tag with a
    histogram.
    """
    if not values:
        return
    for logger in trainer.loggers:
        if isinstance(logger, RunFiles):
            logger.log_distribution(name, values, step)
        elif isinstance(logger, TensorBoardLogger):
            import numpy as np

            logger.experiment.add_histogram(
                f"histograms/{name}", np.asarray(values, dtype=np.float64), step
            )


class StepMonitor(pl.Callback):
    """A callback that acts once per optimizer step."""

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: TrainBatch,
        batch_idx: int,
    ) -> None:
        """Pass on the last micro-batch of a draw."""
        if batch.is_last:
            assert isinstance(pl_module, PolicyModule)
            self.on_step_end(trainer, pl_module, batch.report)

    def on_step_end(self, trainer: pl.Trainer, module: PolicyModule, report: DrawReport) -> None:
        """The optimizer step on the draw of ``report`` was taken."""


class StalenessMonitor(StepMonitor):
    """Where the lag of the trained trajectories came from, and of the rejected ones."""

    def __init__(self) -> None:
        self._sum = StalenessDecomposition(0.0, 0.0)
        self._count = 0

    def state_dict(self) -> dict[str, Any]:
        """The sums."""
        return {
            "generation": self._sum.generation,
            "waiting": self._sum.waiting,
            "count": self._count,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the sums of a checkpoint."""
        self._sum = StalenessDecomposition(state_dict["generation"], state_dict["waiting"])
        self._count = state_dict["count"]

    @property
    def mean(self) -> StalenessDecomposition | None:
        """Mean over all trained trajectories so far; None before the first."""
        if not self._count:
            return None
        return StalenessDecomposition(
            self._sum.generation / self._count, self._sum.waiting / self._count
        )

    def on_step_end(self, trainer: pl.Trainer, module: PolicyModule, report: DrawReport) -> None:
        """Log means and histograms."""
        self._sum = StalenessDecomposition(
            self._sum.generation + sum(s.generation for s in report.staleness),
            self._sum.waiting + sum(s.waiting for s in report.staleness),
        )
        self._count += len(report.staleness)
        metrics = {
            "staleness/generation": report.generation_staleness_versions,
            "staleness/waiting": report.waiting_staleness_versions,
            "staleness/total": report.total_staleness_versions,
        }
        rejected = {
            "staleness/rejected/generation": report.rejected_generation_staleness_versions,
            "staleness/rejected/waiting": report.rejected_waiting_staleness_versions,
            "staleness/rejected/total": report.rejected_total_staleness_versions,
        }
        rejected |= {
            "staleness/effective": report.effective_staleness_versions,
            "staleness/rejected/effective": report.rejected_effective_staleness_versions,
        }
        metrics |= {name: value for name, value in rejected.items() if value is not None}
        log_metrics(trainer, metrics, report.version)
        for side, parts in (("", report.staleness), ("rejected/", report.rejected_staleness)):
            for name in ("generation", "waiting", "total"):
                values = [float(getattr(part, name)) for part in parts]
                log_histogram(trainer, f"staleness/{side}{name}", values, report.version)
        for name, scores in (
            ("staleness/effective", report.effective_staleness),
            ("staleness/rejected/effective", report.rejected_effective_staleness),
            ("staleness/prefix_forgetting", report.prefix_forgetting),
            ("staleness/rejected/prefix_forgetting", report.rejected_prefix_forgetting),
        ):
            log_histogram(trainer, name, scores, report.version)


class PoolMonitor(StepMonitor):
    """Occupancy, rejections and waiting; writes ``draws.jsonl``.

    Args:
        path: the file, one `DrawReport` per line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._warnings: set[str] = set()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After a resume, drop the lines beyond the restored version."""
        keep_lines_before(self._path, trainer.global_step)

    def on_step_end(self, trainer: pl.Trainer, module: PolicyModule, report: DrawReport) -> None:
        """Log and append."""
        log_metrics(
            trainer,
            {
                "pool/occupancy_before_groups": report.occupancy_before_groups,
                "pool/occupancy_after_groups": report.occupancy_after_groups,
                "pool/budget_groups": report.budget_groups,
                "pool/rejected_groups": report.rejected_groups,
                "pool/redrawn_groups": report.redrawn_groups,
                "pool/wait_seconds": report.wait_seconds,
            },
            report.version,
        )
        if report.warning is not None and report.warning not in self._warnings:
            self._warnings.add(report.warning)
            log.warning("step %d: %s", report.version, report.warning)
        with self._path.open("a") as file:
            file.write(json.dumps(report.as_json()) + "\n")


class LearningMonitor(StepMonitor):
    """Loss, ratios, rewards, throughput and time; prints one line per step.

    Args:
        total_steps: of the run.
        time_ledger: the wall clock by part.
        weight_sync: its last publication is logged.
        generated: totals of the rollout side.
        loop_lag: the longest time for which the rollout thread's loop was blocked since the last
            call, in seconds.
        max_lag0_gap: mean absolute difference between engine and trainer log-probs on tokens of the
            present version above which a warning is given; None: never.
        may_reject: whether rejected groups get a plot.
        emit: prints a line.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        time_ledger: TimeLedger,
        weight_sync: WeightSync,
        generated: Callable[[], GeneratedStatistics],
        loop_lag: Callable[[], float],
        max_lag0_gap: float | None,
        may_reject: bool,
        emit: Callable[[str], None],
    ) -> None:
        self._total_steps = total_steps
        self._time_ledger = time_ledger
        self._weight_sync = weight_sync
        self._generated = generated
        self._loop_lag = loop_lag
        self._max_lag0_gap = max_lag0_gap
        self._may_reject = may_reject
        self._emit = emit
        self._before = GeneratedStatistics()
        self._seconds: dict[str, float] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lay out the TensorBoard page; start the clocks of the first step."""
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                plots = LAYOUT["pace_lightning"] | (REJECTED if self._may_reject else {})
                logger.experiment.add_custom_scalars({"pace_lightning": plots})
        self._seconds = self._time_ledger.seconds()
        self._before = self._generated()

    def on_step_end(self, trainer: pl.Trainer, module: PolicyModule, report: DrawReport) -> None:
        """Log and print."""
        metrics = module.finish_step()
        seconds = self._time_ledger.seconds()
        step_seconds = {part: seconds[part] - self._seconds.get(part, 0.0) for part in seconds}
        self._seconds = seconds
        now = self._generated()
        groups = now.groups - self._before.groups
        responses = max(now.responses - self._before.responses, 1)
        generated_mean = (now.score_sum - self._before.score_sum) / responses
        if groups:
            metrics |= {
                "reward/generated_mean": generated_mean,
                "reward/mixed_group_share": (now.mixed_groups - self._before.mixed_groups) / groups,
                "tokens/response_mean": (now.tokens - self._before.tokens) / responses,
            }
        wall = max(step_seconds["total"] - step_seconds["evaluate"], 1e-9)
        metrics |= {
            "tokens/generated_per_second": (now.tokens - self._before.tokens) / wall,
            "tokens/consumed_per_second": metrics["tokens/consumed"]
            / max(step_seconds["train"], 1e-9),
            "time/rollout_loop_lag_seconds": self._loop_lag(),
            "time/rss_gib": psutil.Process().memory_info().rss / 2**30,
        }
        metrics |= {f"time/{part}_seconds": value for part, value in step_seconds.items()}
        if (published := self._weight_sync.last_report) is not None:
            metrics["time/publish_pause_seconds"] = published.pause_seconds
            metrics["time/publish_verify_seconds"] = published.verify_seconds
        self._before = now
        log_metrics(trainer, metrics, report.version)
        if (lag := metrics["time/rollout_loop_lag_seconds"]) > LOOP_LAG_ALARM_SECONDS:
            log.warning(
                "step %d: something blocked the rollout thread's event loop for %.1f s; tokens, "
                "deadlines and publications were late by as much",
                report.version,
                lag,
            )
        gap = metrics.get("ratio/lag0_log_abs_mean")
        if self._max_lag0_gap is not None and gap is not None and gap > self._max_lag0_gap:
            log.warning(
                "step %d: engine and trainer disagree by %.4f nats per token on tokens of the "
                "present version (alarm at %.4f): the importance ratios are wrong. Check "
                "temperature, dtype and weights",
                report.version,
                gap,
                self._max_lag0_gap,
            )
        self._emit(
            f"step {report.version + 1:>4}/{self._total_steps}  "
            f"reward {f'{generated_mean:.2f}' if groups else '   -'}  "
            f"lag {report.total_staleness_versions:.2f} = "
            f"{report.generation_staleness_versions:.2f} gen + "
            f"{report.waiting_staleness_versions:.2f} wait  "
            f"pool {report.occupancy_before_groups:>3}  "
            f"ratio {metrics['ratio/mean']:.3f}  "
            f"entropy {metrics['policy/entropy_nats']:.2f}  "
            f"{step_seconds['total']:.1f} s (wait {step_seconds['wait']:.1f}, "
            f"train {step_seconds['train']:.1f}, "
            f"publish {step_seconds['publish']:.1f})"
        )
