"""Writes docs/results/performance.md from the files that the benchmarks leave.

    python benchmarks/performance_page.py

No number on the page is typed: what was not measured says so. A test compares the page with this.
"""
# ruff: noqa: T201 - it talks to the user

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import against_trl

PAGE = Path(__file__).parents[1] / "docs/results/performance.md"
FOLDER = PAGE.with_suffix("")
MISSING = "Not measured yet."


def page() -> str:
    """The page as text."""
    sections = (
        header(),
        module_step(),
        shared_prompts(),
        memory(),
        publication(),
        profile(),
        trl(),
    )
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def header() -> Iterator[str]:
    """What all of it is about."""
    yield "# Performance"
    yield ""
    yield (
        "Ratios of two things that were measured side by side on two CPU cores, with nothing else "
        "running. Written by\n`python benchmarks/performance_page.py` from the files in "
        "`docs/results/performance/`; each section names the command behind it."
    )


def module_step() -> Iterator[str]:
    """The trainer against the bare computation."""
    yield "## The trainer's step against the bare computation"
    yield ""
    yield (
        "`python benchmarks/trainer_step.py`. Bare: forward, log-probs of the trained tokens, "
        "backward, fused AdamW, on the same\nmicro-batches. Goal: at least 0.90 of its tokens per "
        "second, without sharing prompts."
    )
    yield ""
    if (found := result("trainer_step")) is None:
        yield MISSING
        return
    yield "| | seconds per step, by round | trained tokens per second |"
    yield "|---|---|---|"
    for arm, name in (("bare", "bare"), ("module", "`PolicyModule`, whole rows")):
        yield step_row(found, arm, name)
    yield ""
    yield (
        f"Median ratio of the rounds: **{found['module_to_bare']:.2f}**. {draw_text(found)} "
        f"{conditions(found)}"
    )


def shared_prompts() -> Iterator[str]:
    """Each prompt once against whole rows."""
    yield "## Shared prompts computed once"
    yield ""
    yield "The same run of `python benchmarks/trainer_step.py`."
    yield ""
    if (found := result("trainer_step")) is None:
        yield MISSING
        return
    yield "| | seconds per step, by round | trained tokens per second |"
    yield "|---|---|---|"
    for arm, name in (("module", "whole rows"), ("shared", "each prompt once")):
        yield step_row(found, arm, name)
    yield ""
    yield f"Median ratio of the rounds: **{found['shared_to_plain']:.2f}**. {draw_text(found)}"


def memory() -> Iterator[str]:
    """Chunks against all logits."""
    yield "## Peak memory of log-probs"
    yield ""
    yield (
        "`python benchmarks/logprob_memory.py`. Forward and backward of one micro-batch in a "
        "process of its own; peak resident set\nminus that after loading."
    )
    yield ""
    if (found := result("logprob_memory")) is None:
        yield MISSING
        return
    yield "| | GiB, by round |"
    yield "|---|---|"
    for way, name in (("full", "all logits"), ("chunked", f"{found['chunk_tokens']} at a time")):
        yield f"| {name} | {', '.join(f'{x:.2f}' for x in found['gib'][way])} |"
    yield ""
    yield (
        f"Ratio of the medians: **{found['full_to_chunked']:.1f}**. {found['rows']} rows of "
        f"{found['tokens']} tokens. Measured {found['measured_at']}."
    )


def publication() -> Iterator[str]:
    """What ranks hold while weights are gathered."""
    yield "## Peak memory of a publication"
    yield ""
    yield (
        "`python benchmarks/publication_memory.py`. Ranks of ZeRO-3 gather the weights bucket by "
        "bucket: bytes of parameters that are\nwhole at once, which a device has to hold beside "
        "its part. Rank 0 copies each bucket to host memory before the next."
    )
    yield ""
    if (found := result("publication_memory")) is None:
        yield MISSING
        return
    yield "| bucket, MiB | whole at once, MiB | share of all weights |"
    yield "|---|---|---|"
    for row in found["rows"]:
        bucket, whole = row["bucket"] / 2**20, row["whole"] / 2**20
        yield f"| {bucket:.0f} | {whole:.0f} | {row['whole'] / found['all_bytes']:.0%} |"
    yield ""
    yield (
        f"{found['ranks']} ranks of {found['own_bytes'] / 2**20:.0f} MiB each, all weights "
        f"{found['all_bytes'] / 2**20:.0f} MiB in {found['dtype']}, the largest parameter "
        f"{found['largest_bytes'] / 2**20:.0f} MiB; on CPU over gloo. "
        f"Measured {found['measured_at']}."
    )


def profile() -> Iterator[str]:
    """Where a step's time goes."""
    yield "## Where the time of a step goes"
    yield ""
    yield (
        "`python benchmarks/step_profile.py`: the module's step with timers around its parts, "
        "medians of the rounds."
    )
    yield ""
    if (found := result("step_profile")) is None:
        yield MISSING
        return
    kept, returned = found["seconds"]["kept"], found["seconds"]["returned"]
    total = sum(kept.values())
    yield "| part | ms | share | ms, freed memory returned to the system |"
    yield "|---|---|---|---|"
    parts = sorted(kept, key=lambda part: -kept[part])
    for part in parts:
        share = kept[part] / total
        yield f"| {part} | {1000 * kept[part]:.1f} | {share:.1%} | {1000 * returned[part]:.1f} |"
    yield ""
    rounds = {
        way: ", ".join(f"{x:.2f}" for x in found["step_seconds"][way])
        for way in ("kept", "returned")
    }
    yield (
        f"The largest parts are {parts[0]} and {parts[1]}, the model's own arithmetic. Page faults "
        "of memory that is freed and asked for again are ours:\nwith the allocator's usual "
        f"settings a step took {rounds['returned']} s in the rounds, with memory that stays with "
        f"the\nprocess (`training/freed_memory.py`) {rounds['kept']} s."
    )
    yield ""
    yield (
        f"{found['responses']} responses in {found['micro_batches']} micro-batches, prompts "
        f"{'shared' if found['shared_prompts'] else 'not shared'}. {conditions(found)}"
    )


def trl() -> Iterator[str]:
    """Against another system."""
    yield "## Time to a pass rate, against TRL"
    yield ""
    yield (
        "`python benchmarks/against_trl.py`. Model, prompts, scoring, batch, loss, optimizer and "
        "rate of `conf/quickstart.yaml` for\nall; ours generates with vLLM, TRL's `GRPOTrainer` "
        "with transformers, in bfloat16, all responses of a step in\none call of `generate`, both "
        "cores, no logging, no recomputation, the allocator's usual settings. Weights are written "
        "every few steps and\nevaluated after the run by one evaluator; seconds are of training, "
        "of that writing and of the start of vLLM.\nIn brackets: how many times faster than the "
        "first row. Goal: 5, with three seeds."
    )
    yield ""
    runs = against_trl.lines(FOLDER / against_trl.RESULTS.name, steps=against_trl.STEPS)
    if not runs:
        yield MISSING
        return
    yield from against_trl.report(runs)
    yield ""
    loads = [run["load_average"] for run in runs]
    yield (
        f"Load average over 15 minutes at the end of the runs: {min(loads):.1f} to "
        f"{max(loads):.1f}; {runs[0]['machine']}; {runs[0]['packages']['trl']}."
    )


def step_row(found: dict[str, Any], arm: str, name: str) -> str:
    """One arm of the trainer's step."""
    seconds = found["seconds_per_step"][arm]
    rate = found["trained_tokens_per_step"] * len(seconds) / sum(seconds)
    return f"| {name} | {', '.join(f'{x:.2f}' for x in seconds)} | {rate:.0f} |"


def draw_text(found: dict[str, Any]) -> str:
    """What a step trains on."""
    return (
        f"{found['groups']} prompts of {found['prompt_tokens']} tokens x {found['group_size']} "
        f"responses of {found['response_tokens']} in the mean, {found['micro_batches']} "
        "micro-batches."
    )


def conditions(found: dict[str, Any]) -> str:
    """Under which it was measured."""
    return (
        f"{found['threads']} threads, load average {found['load_average']:.1f}, measured "
        f"{found['measured_at']}."
    )


def result(name: str) -> dict[str, Any] | None:
    """A benchmark's file."""
    file = FOLDER / f"{name}.json"
    found: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    return found


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written to {PAGE}")
