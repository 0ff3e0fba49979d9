"""The metrics of a run as text, under the names that TensorBoard shows.

``metrics.jsonl`` has one line for each set of scalars that was logged, ``distributions.jsonl`` one
for each histogram, with every value in it. Each line begins with its policy version.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger

from pace_lightning.core.trajectory import PolicyVersion

log = logging.getLogger(__name__)

METRICS, DISTRIBUTIONS = "metrics.jsonl", "distributions.jsonl"


class RunFiles(Logger):
    """Appends to the two files; a killed run loses at most the line it was writing.

    Args:
        run_dir: where the files are.
        resumed_version: lines of this version and later, logged by an earlier process, are dropped
            before the first new one is written.
    """

    def __init__(self, run_dir: Path, *, resumed_version: PolicyVersion | None = None) -> None:
        super().__init__()
        self._run_dir = run_dir
        self._cut_at = resumed_version

    @property
    def name(self) -> str:
        """Lightning wants one."""
        return ""

    @property
    def version(self) -> str:
        """Likewise."""
        return ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append scalars; one that is not finite becomes null."""
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: x if math.isfinite(x) else None for name, x in values.items()}
        self._append(METRICS, {"version": step, **finite})

    def log_distribution(self, name: str, values: Sequence[float], step: int) -> None:
        """Append all values of a histogram."""
        self._append(DISTRIBUTIONS, {"version": step, "name": name, "values": list(values)})

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """They are in ``config.yaml``."""

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if self._cut_at is not None:
            for other in (METRICS, DISTRIBUTIONS):
                keep_lines_before(self._run_dir / other, self._cut_at)
            self._cut_at = None
        with (self._run_dir / name).open("a") as file:
            file.write(json.dumps(line) + "\n")


def keep_lines_before(path: Path, version: PolicyVersion) -> None:
    """Drop the lines of this version and later from a file of JSON lines.

    And a line that was cut off by a kill.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            if json.loads(line)["version"] < version:
                kept.append(line)
        except json.JSONDecodeError:
            log.warning("%s: dropped a line that was cut off: %.60r", path, line)
    scratch = path.with_name(f".{path.name}.part")
    scratch.write_text("".join(f"{line}\n" for line in kept))
    scratch.replace(path)
