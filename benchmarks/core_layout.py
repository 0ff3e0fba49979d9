"""What it is worth to share the cores: seconds per step under several layouts, side by side.

    python benchmarks/core_layout.py [--steps 4] [--rounds 1] [--conf CONF] [key=value ...]
        [--layouts 0 2 4]

Runs the same experiment under each layout in turn, ``--rounds`` times over, without evaluation.
Prints the seconds per step (first step and set-up left out) and the ratio to the first layout of
the same round. CPU timings are noisy: read the ratios.
"""
# ruff: noqa: T201 - it talks to the user

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

LIBGOMP_SPINS = "300000"
"""libgomp's own default."""

CORES = len(os.sched_getaffinity(0))
BOTH = [f"trainer.num_threads={CORES}", f"trainer.engine_threads={CORES}"]

LAYOUTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "a share each, taking over from an idle side (default)": ([], {}),
    "a share each, always": ([f"trainer.num_threads={max(1, CORES // 2)}"], {}),
    "all cores each, bounded spinning": (BOTH, {}),
    "all cores each, libgomp's spinning": (BOTH, {"GOMP_SPINCOUNT": LIBGOMP_SPINS}),
    "taking turns on all cores (mode: sync)": (["mode=sync"], {}),
}


def seconds_per_step(
    conf: str, steps: int, settings: list[str], environment: dict[str, str]
) -> float:
    """Train in a process of its own; mean seconds of the steps after the first."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "pace_lightning", "train", conf, f"run_dir={run_dir}"]
        command += [f"trainer.steps={steps}", "data.held_out=0", *settings]
        subprocess.run(command, check=True, env=os.environ | environment, stdout=subprocess.DEVNULL)
        assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"
        events = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0}).Reload()
        return statistics.fmean(
            event.value for event in events.Scalars("time/total_seconds") if event.step > 0
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conf", default="conf/quickstart.yaml")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--layouts",
        nargs="+",
        type=int,
        choices=range(len(LAYOUTS)),
        default=list(range(len(LAYOUTS))),
        help=", ".join(f"{number}: {name}" for number, name in enumerate(LAYOUTS)),
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every layout")
    options = parser.parse_args()
    for round_number in range(options.rounds):
        base = None
        for name, (settings, environment) in (list(LAYOUTS.items())[i] for i in options.layouts):
            seconds = seconds_per_step(
                options.conf, options.steps, [*options.overrides, *settings], environment
            )
            base = base or seconds
            print(
                f"round {round_number}: {seconds:7.1f} s per step, {seconds / base:5.2f} x  {name}",
                flush=True,
            )


if __name__ == "__main__":
    main()
