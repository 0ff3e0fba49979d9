"""Where the time of an optimizer step goes, from the groups of a draw to the logged metrics.

    python benchmarks/step_profile.py [--model MODEL] [--rounds 3] [--steps 4] [--results FILE]

The real module under Lightning's Trainer, with timers around its parts and two loggers. Batches as
in `trainer_step.py`; the first step is left out. In each round once as a run has it, `kept`, and
once with an allocator that returns freed memory to the system, `returned`, each in a process of its
own: see `pace_lightning/training/freed_memory.py`.
"""
# ruff: noqa: T201 - it talks to the user

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import trainer_step
from lightning.pytorch.loggers import TensorBoardLogger

from pace_lightning.core.batch import TrainBatch
from pace_lightning.training import module as module_file
from pace_lightning.training.freed_memory import keep_freed_memory
from pace_lightning.training.monitors import log_metrics
from pace_lightning.training.policy import load_policy
from pace_lightning.training.run_files import RunFiles

RESULTS = Path(__file__).parents[1] / "docs/results/performance/step_profile.json"
WAYS = ("returned", "kept")
PARTS = (
    "batch building",
    "forward",
    "log-probs",
    "objective",
    "statistics",
    "backward",
    "clipping",
    "optimizer",
    "logging",
    "other",
)


class Stopwatch:
    """Seconds by part; inner parts are not counted in outer ones."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Around some work."""
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - start
            self.seconds[name] += whole - self._inner.pop()
            self._inner[-1] += whole

    def wrap(self, name: str, function: Any) -> Any:
        """The function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return timed


class Steps(pl.Callback):
    """Logs as a run does, and forgets the first step."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._start = 0.0
        self.total = 0.0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: TrainBatch, batch_idx: int
    ) -> None:
        """At the end of a step."""
        if not batch.is_last:
            return
        with self._watch.part("statistics"):
            metrics = pl_module.finish_step()
        with self._watch.part("logging"):
            log_metrics(trainer, metrics, batch.version)
        if trainer.global_step == 1:
            self._watch.seconds.clear()
            self._start = time.perf_counter()
        self.total = time.perf_counter() - self._start


def main() -> None:
    """Measure, print, write."""
    parser = trainer_step.arguments(__doc__)
    parser.set_defaults(steps=4)
    parser.add_argument("--plain", action="store_true", help="prompts are not shared")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(one(options)))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way, *sys.argv[1:]]
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[way].append(json.loads(answer.splitlines()[-1]))
            total = sum(found[way][-1].values())
            print(f"round {number + 1}: {way:<9}{1000 * total:9.1f} ms per step", flush=True)
    seconds = {
        way: {part: round(statistics.median(x[part] for x in runs), 5) for part in PARTS}
        for way, runs in found.items()
    }
    result = {
        "model": options.model,
        "shared_prompts": not options.plain,
        "responses": options.groups * options.group_size,
        "micro_batches": options.micro_batches,
        "threads": len(os.sched_getaffinity(0)),
        "seconds": seconds,
        "step_seconds": {
            way: [round(sum(x.values()), 3) for x in runs] for way, runs in found.items()
        },
        "load_average": os.getloadavg()[2],
        "measured_at": time.strftime("%Y-%m-%d %H:%M"),
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(result, indent=2) + "\n")
    total = sum(seconds["kept"].values())
    for part in sorted(PARTS, key=lambda part: -seconds["kept"][part]):
        value = seconds["kept"][part]
        print(f"{part:<16}{1000 * value:9.1f} ms {value / total:7.1%}")
    print(f"medians of a step as a run has it; written to {options.results}")


def one(options: argparse.Namespace) -> dict[str, float]:
    """Seconds by part of a step, in this process."""
    trainer_step.quiet()
    if options.way == "kept":
        keep_freed_memory()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    watch = Stopwatch()
    model = load_policy(options.model, random_init=options.random_init)
    module = trainer_step.make_module(model, not options.plain)
    instrument(watch, module)
    steps = Steps(watch)
    building = watch.wrap("batch building", trainer_step.draw)
    building(options, 0)  # warm
    draws = [trainer_step.draw(options, step) for step in range(options.steps + 1)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_step.make_trainer(draws, [steps])
        trainer.loggers = [TensorBoardLogger(folder, name=""), RunFiles(Path(folder))]
        trainer.fit(module, trainer_step.Batches(draws))
    for step in range(1, options.steps + 1):
        building(options, step)
    seconds = {part: watch.seconds[part] / options.steps for part in PARTS}
    total = steps.total / options.steps + seconds["batch building"]
    return seconds | {"other": total - sum(seconds.values())}


def instrument(watch: Stopwatch, module: Any) -> None:
    """Timers around the parts of this module's step."""
    model = module.policy
    model.base_model.forward = watch.wrap("forward", model.base_model.forward)
    module._logprobs = watch.wrap("log-probs", module._logprobs)
    module._prepare = watch.wrap("objective", module._prepare)
    module._statistics.record = watch.wrap("statistics", module._statistics.record)
    module_file.objective_loss = watch.wrap("objective", module_file.objective_loss)
    module.backward = watch.wrap("backward", module.backward)
    module.configure_gradient_clipping = watch.wrap("clipping", module.configure_gradient_clipping)
    configure = module.configure_optimizers

    def timed_optimizer() -> Any:
        found = configure()
        optimizer = found["optimizer"]
        step = optimizer.step

        def timed(closure: Any = None) -> Any:
            # the closure is forward, backward and clipping: timed by themselves, the rest of it is
            # Lightning's
            with watch.part("optimizer"):
                return step(None if closure is None else watch.wrap("other", closure))

        optimizer.step = timed
        return found

    module.configure_optimizers = timed_optimizer


if __name__ == "__main__":
    main()
