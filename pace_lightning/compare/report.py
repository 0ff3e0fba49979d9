"""What a comparison shows: its tables as text, its plots, and one page with all of it."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pace_lightning.compare.grid import Comparison, setting
from pace_lightning.compare.measures import COLUMNS, Spread, paired, spread
from pace_lightning.compare.page import Table, page
from pace_lightning.compare.plots import PLOTS, render
from pace_lightning.compare.runs import Outcome
from pace_lightning.config_load import show

Outcomes = Mapping[tuple[str, int], Outcome]
"""By arm and seed."""


@dataclass(frozen=True)
class Row:
    """One column of the comparison over all arms; printed as a row, for the eye."""

    column: str
    values: dict[str, dict[int, float | None]]
    """By arm and seed; None: not measured, or the run is missing."""

    def spread(self, arm: str) -> Spread | None:
        """Mean and spread over seeds."""
        return spread(self.values[arm])

    def difference(self, arm: str, baseline: str) -> Spread | None:
        """Mean and spread of the differences to the same seeds of another arm."""
        return paired(self.values[arm], self.values[baseline])


def measure(comparison: Comparison, outcomes: Outcomes) -> list[Row]:
    """The numbers behind the table."""
    rows = []
    for name in comparison.columns:
        value = COLUMNS[name].value
        found: dict[str, dict[int, float | None]] = {arm: {} for arm in comparison.arms}
        for (arm, seed), outcome in outcomes.items():
            series = outcome.series
            found[arm][seed] = None if series is None else value(series, comparison.early_versions)
        rows.append(Row(name, found))
    return rows


def write_report(comparison: Comparison, outcomes: Outcomes, target: Path) -> list[str]:
    """Write every file of the report. Returns the table as lines of text.

    Args:
        comparison: what was to be run.
        outcomes: what there is.
        target: the directory; an earlier report in it is replaced.
    """
    target.mkdir(parents=True, exist_ok=True)
    measured = measure(comparison, outcomes)
    rows = [row for row in measured if any(map(row.spread, comparison.arms))] or measured
    tables = [_means(comparison, rows, outcomes), _differences(comparison, rows, outcomes)]
    notes = _notes(comparison, outcomes)
    facts = _facts(comparison, outcomes)
    text = [f"# {comparison.name}: {comparison.title}", ""]
    for title, table in tables:
        text += [f"## {title}", "", *_markdown(table), "", *(f"- {note}" for note in notes), ""]
    text += ["## How it was made", "", *(f"- {name}: {fact}" for name, fact in facts), ""]
    (target / "table.md").write_text("\n".join(text))
    _write_csv(target / "table.csv", _aggregated(comparison, rows))
    _write_csv(target / "runs.csv", _single(comparison, rows, outcomes))
    arms = {
        arm: [
            series
            for seed in comparison.seeds
            if (series := outcomes[arm, seed].series) is not None
        ]
        for arm in comparison.arms
    }
    pictures = {}
    for name in PLOTS:
        (target / f"{name}.png").unlink(missing_ok=True)
    for name in comparison.plots:
        pictures[name] = render(name, arms, early_versions=comparison.early_versions)
        (target / f"{name}.png").write_bytes(pictures[name])
    missing = sum(outcome.series is None for outcome in outcomes.values())
    gap = f", of which {missing} of {len(outcomes)} runs are missing" if missing else ""
    (target / "index.html").write_text(
        page(
            title=comparison.title,
            subtitle=f"Comparison {comparison.name}{gap}",
            tables=tables,
            notes=notes,
            pictures=pictures,
            details=[
                ("What differs between the arms", _apart(comparison)),
                ("How it was made", [["", ""], *([name, fact] for name, fact in facts)]),
                ("Runs", _run_table(comparison, outcomes)),
            ],
        ),
        encoding="utf-8",
    )
    return [*_markdown(tables[0][1]), "", *(f"- {note}" for note in notes)]


# ---------------------------------------------------------------------------------- tables


def _means(comparison: Comparison, rows: Sequence[Row], outcomes: Outcomes) -> tuple[str, Table]:
    counts = {arm: len(_seeds_of(comparison, outcomes, arm)) for arm in comparison.arms}
    table = _table(comparison, rows, counts, Row.spread)
    return "Mean ± standard deviation over seeds", table


def _differences(
    comparison: Comparison, rows: Sequence[Row], outcomes: Outcomes
) -> tuple[str, Table]:
    base = comparison.baseline
    common = _seeds_of(comparison, outcomes, base)
    counts = {
        arm: len(common & _seeds_of(comparison, outcomes, arm))
        for arm in comparison.arms
        if arm != base
    }
    table = _table(comparison, rows, counts, lambda row, arm: row.difference(arm, base), sign=True)
    return f"Difference to {base}, paired by seed: mean ± standard deviation", table


def _seeds_of(comparison: Comparison, outcomes: Outcomes, arm: str) -> set[int]:
    """The seeds whose runs are there."""
    return {seed for seed in comparison.seeds if outcomes[arm, seed].series is not None}


def _table(
    comparison: Comparison,
    rows: Sequence[Row],
    counts: Mapping[str, int],
    spread_of: Callable[[Row, str], Spread | None],
    *,
    sign: bool = False,
) -> Table:
    """One line per column of the comparison, one cell per arm of ``counts``, its seeds."""
    table = [["", "unit", *_heads(counts, len(comparison.seeds))]]
    for row in rows:
        column = COLUMNS[row.column]
        cells = []
        for arm, count in counts.items():
            known = spread_of(row, arm)
            text = "-" if known is None else known.text(column.digits, sign=sign)
            if known is not None and 1 < known.count < count:
                text += f" (n = {known.count})"
            cells.append(text)
        table.append([_title(comparison, row.column), column.unit, *cells])
    return table


def _heads(counts: Mapping[str, int], wanted: int) -> list[str]:
    """The arms, with how many seeds they have."""
    return [
        f"{arm} (n = {count})" if count == wanted else f"{arm} (n = {count} of {wanted})"
        for arm, count in counts.items()
    ]


def _title(comparison: Comparison, column: str) -> str:
    title = COLUMNS[column].title
    return title.replace("early versions", f"versions 0 to {comparison.early_versions}")


def _markdown(table: Table) -> list[str]:
    """Aligned, so that it can be read as it is."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in table]
    widths = [max(len(row[i]) for row in escaped) for i in range(len(table[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in escaped
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return [lines[0], rule, *lines[1:]]


def _aggregated(comparison: Comparison, rows: Iterable[Row]) -> Iterable[dict[str, Any]]:
    for row in rows:
        for arm in comparison.arms:
            known = row.spread(arm)
            apart = None
            if arm != comparison.baseline:
                apart = row.difference(arm, comparison.baseline)
            yield {
                "column": row.column,
                "unit": COLUMNS[row.column].unit,
                "arm": arm,
                "mean": known and known.mean,
                "sd": known and known.deviation,
                "n": known.count if known else 0,
                "seeds": len(comparison.seeds),
                "baseline": comparison.baseline,
                "difference_mean": apart and apart.mean,
                "difference_sd": apart and apart.deviation,
                "difference_n": apart and apart.count,
            }


def _single(
    comparison: Comparison, rows: Sequence[Row], outcomes: Outcomes
) -> Iterable[dict[str, Any]]:
    for run in comparison.runs:
        yield {
            "arm": run.arm,
            "seed": run.seed,
            "run": run.identity,
            "status": outcomes[run.arm, run.seed].status,
            **{row.column: row.values[run.arm][run.seed] for row in rows},
        }


def _write_csv(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    lines = list(lines)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


# ------------------------------------------------------------------------------- sentences


def _notes(comparison: Comparison, outcomes: Outcomes) -> list[str]:
    """What stands under each table: disclosed settings, and what is missing."""
    notes = []
    settings = {arm: comparison.settings(arm) for arm in comparison.arms}
    for path in comparison.disclosed:
        values = {arm: _shown(setting(settings[arm], path)) for arm in comparison.arms}
        if len(set(values.values())) == 1:
            notes.append(f"{path} = {values[comparison.baseline]} in every arm")
        else:
            each = ", ".join(f"{arm} {value}" for arm, value in values.items())
            notes.append(f"{path} = {each}")
    if "best_pass_rate" in comparison.columns:
        notes.append("'best' is the highest of several noisy evaluations, and so too high")
    for (arm, seed), outcome in outcomes.items():
        if outcome.series is None:
            notes.append(f"MISSING: {arm}, seed {seed}: {outcome.status}: {outcome.message}")
        elif outcome.status != "finished":
            steps = outcome.series.summary["steps"]
            notes.append(f"{arm}, seed {seed} ended early: {outcome.status} after {steps} steps")
    for what in ("code", "machine", "packages"):
        kinds = {str(o.record[what]) for o in outcomes.values() if o.record is not None}
        if len(kinds) > 1:
            notes.append(
                f"the runs were made with {len(kinds)} different versions of {what}; to compare "
                "like with like, remove the older ones from RUNS/ and run again"
            )
    return notes


def _facts(comparison: Comparison, outcomes: Outcomes) -> list[tuple[str, str]]:
    """How it was made."""
    records = [o.record for o in outcomes.values() if o.record is not None]
    seconds = sum(
        o.series.summary["seconds"]["total"] for o in outcomes.values() if o.series is not None
    )
    done = sum(o.series is not None for o in outcomes.values())
    begun = sorted(record["started"] for record in records)
    facts = [
        ("command", f"python -m pace_lightning compare {comparison.file}"),
        ("runs", f"{done} of {len(outcomes)}, seeds {show(list(comparison.seeds))}"),
        ("time", f"{seconds:,.0f} s for all runs together"),
    ]
    if begun:
        facts.append(("begun", f"from {begun[0]} to {begun[-1]}"))
    for name, values in (
        ("machine", [record["machine"] for record in records]),
        ("packages", [", ".join(f"{k} {v}" for k, v in r["packages"].items()) for r in records]),
        ("code", [record["code"] for record in records]),
    ):
        if values:
            facts.append((name, "; ".join(sorted(set(values)))))
    return facts


def _shown(value: Any) -> str:
    return (
        ", ".join(f"{k}: {show(v)}" for k, v in value.items())
        if isinstance(value, dict)
        else (show(value))
    )


def _apart(comparison: Comparison) -> Table:
    """The settings in which the arms differ."""
    settings = {arm: comparison.settings(arm) for arm in comparison.arms}
    paths = dict.fromkeys(path for arm in settings.values() for path in arm)
    table = [["setting", *comparison.arms]]
    for path in paths:
        values = [_shown(settings[arm].get(path)) for arm in comparison.arms]
        if path != "name" and len(set(values)) > 1:
            table.append([path, *values])
    return table


def _run_table(comparison: Comparison, outcomes: Outcomes) -> Table:
    """Each run with its command."""
    table = [["arm", "seed", "run", "status", "command"]]
    for run in comparison.runs:
        outcome = outcomes[run.arm, run.seed]
        command = outcome.record["command"] if outcome.record else "-"
        table.append([run.arm, str(run.seed), run.identity, outcome.status, command])
    return table
