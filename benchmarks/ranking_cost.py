"""What PACE adds to a step, timed directly: seconds of ranking and of re-scoring.

    python benchmarks/ranking_cost.py [--steps 5] [--rounds 3] [--conf CONF] [key=value ...]

Runs the experiment on the local engine, unfiltered, with raw and with effective ranking in turn,
``--rounds`` times over, the KV cache rebuilt at publications in all three, without evaluation; the
first step is left out. Shares are of the step time of the unfiltered runs, over all rounds:

    raw         seconds inside the admission policy
    effective   those, and the seconds that re-scoring adds to the prefills which rebuild the cache

Re-scoring runs in the engine's thread, beside the trainer: its share is the most by which it can
delay a step. The step times themselves are printed too; on a CPU they vary by more than the shares.
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

ARMS = {
    "unfiltered": ["admission.policy=all"],
    "raw": ["admission.policy=pace", "pace.ranking=raw"],
    "effective": ["admission.policy=pace", "pace.ranking=effective"],
}
TARGETS_PERCENT = {"raw": 0.5, "effective": 3.0}
TAGS = ("time/total_seconds", "pool/ranking_seconds", "pool/rescore_seconds")


def measure(conf: str, steps: int, settings: list[str]) -> tuple[list[dict[str, float]], float]:
    """Train in a process of its own.

    Returns:
        The metrics ``TAGS`` of each step after the first, and the rejected share of what draws
        took, over the whole run.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "pace_lightning", "train", conf, f"run_dir={run_dir}"]
        command += [f"trainer.steps={steps}", "data.held_out=0", "engine.kv_cache=recompute"]
        subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL)
        summary = json.loads((run_dir / "summary.json").read_text())
        assert summary["status"] == "finished", summary
        events = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0}).Reload()
        by_step: dict[int, dict[str, float]] = {}
        for tag in TAGS:
            for event in events.Scalars(tag):
                by_step.setdefault(event.step, {})[tag] = event.value
        fates = summary["fates"]
        rejected, trained = fates.get("rejected", 0), fates["trained"]
        return [by_step[step] for step in sorted(by_step)[1:]], rejected / (rejected + trained)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--conf", default="conf/pace.yaml")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every arm")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first step is left out")
    print(f"{options.conf} {' '.join(options.overrides)}, {len(os.sched_getaffinity(0))} cores")
    collected: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for number in range(options.rounds):
        for arm, settings in ARMS.items():
            steps, rejected = measure(
                options.conf, options.steps, ["engine.kind=local", *options.overrides, *settings]
            )
            collected[arm] += steps
            total, ranking, rescoring = (statistics.fmean(s[tag] for s in steps) for tag in TAGS)
            print(
                f"round {number}  {arm:<10}  {total:7.2f} s per step  ranking {1000 * ranking:7.2f}"
                f" ms  re-scoring {1000 * rescoring:7.1f} ms  {100 * rejected:3.0f} % rejected",
                flush=True,
            )
    base = statistics.fmean(step["time/total_seconds"] for step in collected["unfiltered"])
    print(f"unfiltered: {base:.2f} s per step")
    for arm, target in TARGETS_PERCENT.items():
        added = statistics.fmean(sum(s[tag] for tag in TAGS[1:]) for s in collected[arm])
        share = 100 * added / base
        print(
            f"{arm:<10} adds {1000 * added:7.2f} ms = {share:.3f} % of it "
            f"(target: {target} %, {'met' if share < target else 'MISSED'})"
        )


if __name__ == "__main__":
    main()
