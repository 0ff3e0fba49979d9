"""What admission costs, and whether it starves long responses or hard prompts.

Each group that a draw settled, drawn or rejected, belongs to two classes:

    length_decile_01 .. 10      its mean response length among those of the latest settled groups;
                                01 is the shortest tenth, equal lengths share the middle of their
                                ranks
    pass_rate_000_025 .. 075_100    the mean score of its own responses, in quarters; the lower
                                bound belongs to the class, 1 to the last one

If length and difficulty do not matter to rejection, the rejected share is the same in all classes,
up to chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl

from pace_lightning.core.pace import DriftWindow
from pace_lightning.core.pool import DrawReport
from pace_lightning.training.module import PolicyModule
from pace_lightning.training.monitors import StepMonitor, log_metrics

RECENT_GROUPS = 1024
"""Settled groups that make the deciles and the logged shares."""

LENGTHS = tuple(f"length_decile_{decile:02}" for decile in range(1, 11))
PASS_RATES = tuple(f"pass_rate_{low:03}_{low + 25:03}" for low in (0, 25, 50, 75))


class SettledGroup(NamedTuple):
    """One group that a draw settled."""

    response_tokens: float
    pass_rate: float
    rejected: bool


def classify(groups: Sequence[SettledGroup]) -> list[tuple[str, str]]:
    """The length decile of each group among all of these, and the quarter of its pass rate."""
    # mid-rank percentiles are below 1
    lengths = tuple(group.response_tokens for group in groups)
    percentiles = DriftWindow(max(1, len(lengths)), 1).percentiles(lengths, lengths)
    return [
        (
            LENGTHS[int(10 * (percentile or 0.0))],
            PASS_RATES[min(3, max(0, int(4 * group.pass_rate)))],
        )
        for group, percentile in zip(groups, percentiles, strict=True)
    ]


class AdmissionMonitor(StepMonitor):
    """Seconds of ranking and re-scoring; rejected shares by length and pass rate.

    Args:
        rescore_seconds: what re-scoring has taken since the start.
    """

    def __init__(self, rescore_seconds: Callable[[], float]) -> None:
        self._clock = rescore_seconds
        self._recent: list[SettledGroup] = []
        self._settled: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._rescored = 0.0
        self.ranking_seconds = 0.0
        """Of all draws of this process."""

    @property
    def rescore_seconds(self) -> float:
        """Of all publications of this process."""
        return self._clock()

    def state_dict(self) -> dict[str, Any]:
        """The latest groups and the counts; primitives only."""
        return {
            "recent": [list(group) for group in self._recent],
            "settled": dict(self._settled),
            "rejected": dict(self._rejected),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._recent = [SettledGroup(*group) for group in state_dict["recent"]]
        self._settled = Counter(state_dict["settled"])
        self._rejected = Counter(state_dict["rejected"])

    def shares(self) -> dict[str, dict[str, float]]:
        """For each class that occurred: its settled groups, those rejected, and their share.

        Over the whole run, each group in the decile that it had when it was settled.
        """
        return {
            name: {
                "settled_groups": self._settled[name],
                "rejected_groups": self._rejected[name],
                "rejected_share": self._rejected[name] / self._settled[name],
            }
            for name in (*LENGTHS, *PASS_RATES)
            if self._settled[name]
        }

    def on_step_end(self, trainer: pl.Trainer, module: PolicyModule, report: DrawReport) -> None:
        """Count the groups of one draw; log."""
        new = [
            SettledGroup(tokens, rate, rejected)
            for lengths, rates, rejected in (
                (report.response_tokens, report.pass_rates, False),
                (report.rejected_response_tokens, report.rejected_pass_rates, True),
            )
            for tokens, rate in zip(lengths, rates, strict=True)
        ]
        self._recent = [*self._recent, *new][-max(RECENT_GROUPS, len(new)) :]
        classes = classify(self._recent)
        for group, names in zip(new, classes[len(classes) - len(new) :], strict=True):
            self._settled.update(names)
            if group.rejected:
                self._rejected.update(names)
        rescored = self._clock()
        self.ranking_seconds += report.ranking_seconds
        metrics = {
            "pool/ranking_seconds": report.ranking_seconds,
            "pool/rescore_seconds": rescored - self._rescored,
        }
        self._rescored = rescored
        if self._rejected:
            settled = Counter(name for names in classes for name in names)
            rejected = Counter(
                name
                for group, names in zip(self._recent, classes, strict=True)
                if group.rejected
                for name in names
            )
            metrics |= {
                f"rejected_share/{name}": rejected[name] / count
                for name, count in sorted(settled.items())
            }
        log_metrics(trainer, metrics, report.version)
