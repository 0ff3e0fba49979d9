"""The plots of a comparison, as PNG pictures. Bands are minimum to maximum over the seeds."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pace_lightning.compare.measures import spread
from pace_lightning.compare.series import PARTS, Curve, RunSeries, area, band, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Arms = Mapping[str, Sequence[RunSeries]]
"""The runs of each arm, in the order of the comparison; an arm may have none."""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, told apart with any color vision."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PART_NAMES = {
    "wait": "waiting for a draw",
    "train": "forward, backward, optimizer",
    "pacing": "sleep (trainer.min_step_seconds)",
    "publish": "publishing weights",
    "rest": "rest",
}
PART_COLORS = ("#BBBBBB", "#0072B2", "#EEEEEE", "#D55E00", "#E69F00")
SMOOTHING = 5
"""Steps of the moving average over quantities that jump from step to step."""
BAND = "line: mean over seeds, band: minimum to maximum"
MOVING = f"mean of {SMOOTHING} steps; {BAND}"

STYLE: Any = {  # matplotlib's own type lists every key there is
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.labelsize": 12,
    "legend.fontsize": 11,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.facecolor": "white",
}


@dataclass(frozen=True)
class Plot:
    """One picture."""

    title: str
    size: Callable[[int], tuple[float, float]]
    """Width and height in inches for a number of arms."""
    draw: Callable[[Figure, Arms, int], None]
    """Called with an empty figure, the runs, and the version at which early learning ends."""


def render(name: str, arms: Arms, *, early_versions: int) -> bytes:
    """One plot of ``PLOTS`` as PNG."""
    import matplotlib
    from matplotlib.figure import Figure

    plot = PLOTS[name]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=plot.size(len(arms)), layout="constrained")
        figure.suptitle(plot.title, fontsize=14, wrap=True)
        plot.draw(figure, arms, early_versions)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


# ---------------------------------------------------------------------------------- curves


def _accuracy_versions(figure: Figure, arms: Arms, early_versions: int) -> None:
    axes = figure.subplots()
    _curves(axes, arms, RunSeries.accuracy)
    axes.set(xlabel="policy version (optimizer steps)", ylabel="held-out pass rate")
    _legend(axes)


def _accuracy_seconds(figure: Figure, arms: Arms, early_versions: int) -> None:
    axes = figure.subplots()
    _curves(axes, arms, RunSeries.accuracy_by_seconds, interpolate=True)
    axes.set(xlabel="training time without evaluation (s)", ylabel="held-out pass rate")
    _legend(axes)


def _train_pass_rate(figure: Figure, arms: Arms, early_versions: int) -> None:
    axes = figure.subplots()
    _curves(axes, arms, _smoothed("reward/generated_mean"))
    axes.set(xlabel="policy version (optimizer steps)", ylabel="pass rate of generated responses")
    _legend(axes)


def _panels(*rows: tuple[str, str]) -> Callable[[Figure, Arms, int], None]:
    """One panel per metric, below each other, against policy versions."""

    def draw(figure: Figure, arms: Arms, early_versions: int) -> None:
        panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, label) in zip(panels, rows, strict=True):
            _curves(axes, arms, _smoothed(name))
            axes.set(ylabel=label)
            axes.set_ylim(bottom=0)
        panels[-1].set(xlabel="policy version (optimizer steps)")
        _legend(panels[0])

    return draw


def _smoothed(name: str) -> Callable[[RunSeries], Curve]:
    return lambda run: smooth(run.curve(name), SMOOTHING)


def _curves(
    axes: Axes, arms: Arms, curve: Callable[[RunSeries], Curve], *, interpolate: bool = False
) -> None:
    """Mean over seeds as a line, minimum to maximum as a band."""
    for index, (arm, runs) in enumerate(arms.items()):
        together = band([curve(run) for run in runs], interpolate=interpolate)
        if together is None:
            continue
        color = COLORS[index % len(COLORS)]
        count = len(together.positions)
        axes.plot(
            together.positions,
            together.mean,
            color=color,
            linestyle="-" if index < len(COLORS) else "--",
            marker=MARKERS[index % len(MARKERS)],
            markevery=max(1, count // 10),
            markersize=5,
            label=f"{arm} (n = {together.num_runs})",
        )
        axes.fill_between(together.positions, together.low, together.high, color=color, alpha=0.15)


def _legend(axes: Axes, **place: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**{"loc": "best", "framealpha": 0.85, **place})
    else:
        axes.text(0.5, 0.5, "nothing measured yet", ha="center", transform=axes.transAxes)


# --------------------------------------------------------------------------- distributions

DISTRIBUTIONS = (
    ("waiting", "K_wait (versions)", 1.0),
    ("generation", "K_gen (versions)", 0.5),
    ("effective", "score E (versions)", 0.5),
)
"""Quantity, label, width of a bin; K_wait is a whole number."""
MAX_BINS = 40


def _distributions(figure: Figure, arms: Arms, early_versions: int) -> None:
    """A row per arm, a column per quantity; kept filled, rejected as an outline."""
    table = figure.subplots(len(arms), len(DISTRIBUTIONS), sharex="col", squeeze=False)
    for column, (name, label, width) in enumerate(DISTRIBUTIONS):
        sides = {
            arm: (_all(runs, f"staleness/{name}"), _all(runs, f"staleness/rejected/{name}"))
            for arm, runs in arms.items()
        }
        values = [value for side in sides.values() for part in side for value in part]
        edges = _edges(max(values, default=1.0), width)
        for row, (arm, (kept, rejected)) in enumerate(sides.items()):
            axes = table[row, column]
            _sides(axes, kept, rejected, edges, COLORS[row % len(COLORS)])
            if column == 0:
                axes.set_ylabel(f"{arm}\nshare")
            if row == len(arms) - 1:
                axes.set_xlabel(label)


def _sides(
    axes: Axes, kept: list[float], rejected: list[float], edges: Sequence[float], color: str
) -> None:
    looks: list[tuple[str, list[float], dict[str, Any]]] = [
        ("kept", kept, {"color": color, "alpha": 0.55}),
        ("rejected", rejected, {"histtype": "step", "color": "black", "linewidth": 1.8}),
    ]
    for name, values, look in looks:
        if values:
            share = [1 / len(values)] * len(values)
            mean = statistics.fmean(values)
            axes.hist(values, bins=edges, weights=share, label=f"{name}, mean {mean:.2f}", **look)
    if kept or rejected:
        axes.legend(loc="upper right", fontsize=9, framealpha=0.85)
        axes.margins(y=0.35)  # room for the legend
    else:
        axes.text(0.5, 0.5, "no score", ha="center", va="center", transform=axes.transAxes)


def _all(runs: Sequence[RunSeries], name: str) -> list[float]:
    return [value for run in runs for value in run.distributions.get(name, [])]


def _edges(top: float, width: float) -> list[float]:
    """Bins from 0 to ``top``, the first of which is centered on 0; wider ones for long tails."""
    width *= math.ceil((top / width + 1) / MAX_BINS)
    return list(np.arange(-width / 2, top + 1.5 * width, width))


# ------------------------------------------------------------------------------------- bars


def _step_seconds(figure: Figure, arms: Arms, early_versions: int) -> None:
    """Stacked bars: means over steps, then over seeds; the first step, which warms up, is out."""
    axes = figure.subplots()
    names = list(arms)
    left = np.zeros(len(names))
    runs = {arm: [_mean_parts(run) for run in runs] for arm, runs in arms.items()}
    for part, color in zip(PARTS, PART_COLORS, strict=True):
        seconds = np.array([_mean([run[part] for run in runs[arm]]) for arm in names])
        if seconds.any():
            axes.barh(names, seconds, left=left, color=color, label=PART_NAMES[part])
        left += seconds
    rescoring = [
        _mean([_mean(run.values("pool/rescore_seconds")[1:]) for run in arms[arm]]) for arm in names
    ]
    if any(rescoring):
        label = "re-scoring prefixes (in the engine, meanwhile)"
        axes.barh(names, rescoring, height=0.2, color="white", hatch="////", label=label)
    for index, arm in enumerate(names):
        total = spread(dict(enumerate(sum(run.values()) for run in runs[arm])))
        if total is not None:
            whisker = total.deviation or 0.0
            if whisker:
                axes.errorbar(total.mean, index, xerr=whisker, color="black", capsize=4)
            text = f"  {total.mean:.2f} s, n = {total.count}"
            axes.text(total.mean + whisker, index, text, va="center")
    axes.invert_yaxis()
    axes.grid(axis="y", alpha=0)
    axes.margins(x=0.25)
    axes.set_xlabel("seconds per step without evaluation; whiskers: ± 1 standard deviation")
    _legend(axes, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)


def _mean(values: Sequence[float]) -> float:
    """The mean, or 0 if there is nothing."""
    return statistics.fmean(values) if values else 0.0


def _mean_parts(run: RunSeries) -> dict[str, float]:
    steps = run.step_seconds[1:] or run.step_seconds
    return {part: statistics.fmean(step[part] for step in steps) for part in PARTS}


def _early_learning(figure: Figure, arms: Arms, early_versions: int) -> None:
    """Mean over seeds with its standard deviation, and each seed as a dot."""
    axes = figure.subplots()
    areas = [[area(run.accuracy(), until=early_versions) for run in runs] for runs in arms.values()]
    labels = [
        _dots(axes, index, arm, values, COLORS[index % len(COLORS)])
        for index, (arm, values) in enumerate(zip(arms, areas, strict=True))
    ]
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel(f"mean held-out pass rate,\nversions 0 to {early_versions}")


def _dots(axes: Axes, position: float, arm: str, values: Sequence[float | None], color: str) -> str:
    """A bar, its whisker, and its seeds; returns the label below it."""
    known = [value for value in values if value is not None]
    together = spread(dict(enumerate(known)))
    if together is not None:
        axes.bar(position, together.mean, color=color, alpha=0.45)
        if together.deviation:
            axes.errorbar(position, together.mean, together.deviation, color="black", capsize=6)
        offsets = (np.arange(len(known)) - (len(known) - 1) / 2) * 0.12
        axes.scatter(position + offsets, known, color=color, edgecolor="black", zorder=3)
    return f"{arm}\n(n = {len(known)})"


def _rejected_shares(figure: Figure, arms: Arms, early_versions: int) -> None:
    """Means over seeds, by length and by difficulty; whiskers from minimum to maximum."""
    from pace_lightning.training.admission_monitor import LENGTHS, PASS_RATES

    panels = figure.subplots(1, 2, sharey=True)
    for axes, names in zip(panels, (LENGTHS, PASS_RATES), strict=True):
        for index, (arm, runs) in enumerate(arms.items()):
            together = band([_by_class(run, names) for run in runs])
            if together is None or not any(together.high):
                continue
            low, mean, high = map(np.array, (together.low, together.mean, together.high))
            axes.errorbar(
                np.array(together.positions) + 0.08 * index,
                mean,
                yerr=[mean - low, high - mean],
                color=COLORS[index % len(COLORS)],
                marker=MARKERS[index % len(MARKERS)],
                capsize=3,
                label=f"{arm} (n = {together.num_runs})",
            )
    panels[0].set_ylim(bottom=0)  # both: the axis is shared, and all is drawn
    tenths = [str(tenth) for tenth in range(1, len(LENGTHS) + 1)]
    panels[0].set_xticks(range(len(tenths)), tenths)
    panels[0].set(xlabel="mean response length of a group, by tenth (1: shortest)")
    panels[0].set_ylabel("rejected share of the groups\nthat draws settled")
    panels[1].set_xticks(range(4), ["0 to 0.25", "to 0.5", "to 0.75", "to 1"])
    panels[1].set(xlabel="pass rate of a group", xlim=(-0.5, 3.5))
    _legend(panels[0])


def _by_class(run: RunSeries, names: Sequence[str]) -> Curve:
    """Rejected share by the position of the class."""
    shares = run.summary["rejected_shares"]
    known = [position for position, name in enumerate(names) if name in shares]
    return known, [shares[names[position]]["rejected_share"] for position in known]


PLOTS = {
    "accuracy_versions": Plot(
        f"Held-out pass rate against policy versions\n({BAND})",
        lambda n: (9, 5.5),
        _accuracy_versions,
    ),
    "accuracy_seconds": Plot(
        f"Held-out pass rate against training time\n({BAND};\n"
        "a line ends where the first of its seeds ended)",
        lambda n: (9, 5.5),
        _accuracy_seconds,
    ),
    "train_pass_rate": Plot(
        f"Pass rate of the responses generated for training\n({MOVING})",
        lambda n: (9, 5.5),
        _train_pass_rate,
    ),
    "pool": Plot(
        f"The pool over policy versions\n({MOVING})",
        lambda n: (9, 9.5),
        _panels(
            ("pool/occupancy_before_groups", "ready groups when\na draw begins"),
            ("staleness/waiting", "mean K_wait of what is\ntrained on (versions)"),
            ("pool/rejected_groups", "rejected groups\nper step"),
        ),
    ),
    "staleness": Plot(
        f"Staleness of what is trained on\n({MOVING})",
        lambda n: (9, 9.5),
        _panels(
            ("staleness/total", "mean K (versions)"),
            ("staleness/generation", "mean K_gen (versions)"),
            ("staleness/waiting", "mean K_wait (versions)"),
        ),
    ),
    "distributions": Plot(
        "Staleness of kept and of rejected trajectories, and their groups' score\n"
        "(all steps of all seeds)",
        lambda n: (12, 1.2 + 2.2 * n),
        _distributions,
    ),
    "rejected_shares": Plot(
        "Rejected share by length and by difficulty; the same for all if neither matters\n"
        "(mean over seeds, whiskers: minimum to maximum)",
        lambda n: (11, 5),
        _rejected_shares,
    ),
    "step_seconds": Plot(
        "Where the time of a step goes\n(mean over steps after the first, then over seeds)",
        lambda n: (10, 2.8 + 0.55 * n),
        _step_seconds,
    ),
    "early_learning": Plot(
        "Early learning: area under the accuracy curve\n(bar: mean over seeds, "
        "whisker: ± 1 standard deviation, dots: seeds)",
        lambda n: (max(9, 1.5 * n), 5),
        _early_learning,
    ),
}
"""Every plot by its name in a comparison file."""
