"""``python -m pace_lightning compare``: make the runs, write the report."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pace_lightning.compare.grid import read_comparison
from pace_lightning.compare.report import write_report
from pace_lightning.compare.runs import fingerprint, make_runs, outcome

ROOT = Path("runs/compare")


def compare(file: Path, emit: Callable[[str], None], *, report_only: bool = False) -> int:
    """Run what is missing of a comparison and render it. Returns the exit code.

    Args:
        file: the comparison, a YAML file.
        emit: prints a line.
        report_only: start nothing; render what is there.

    Raises:
        ConfigError: if the file cannot be used, or another comparison is at work.
    """
    begin = time.monotonic()
    comparison = read_comparison(file, fingerprint=fingerprint)
    if not report_only:
        make_runs(comparison, ROOT, emit)
    outcomes = {(run.arm, run.seed): outcome(ROOT, run) for run in comparison.runs}
    lines = write_report(comparison, outcomes, ROOT / comparison.name)
    emit("")
    for line in lines:
        emit(line)
    emit(f"written to {ROOT / comparison.name / 'index.html'} ({time.monotonic() - begin:.0f} s)")
    missing = sum(found.series is None for found in outcomes.values())
    if missing:
        emit(f"{missing} of {len(outcomes)} runs are missing: see the notes under the table")
    return 1 if missing and not report_only else 0
