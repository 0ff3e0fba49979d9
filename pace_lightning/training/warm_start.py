"""A short supervised run that gives a small model something for RL to improve.

It is a Lightning run of its own. Its result, a Hugging Face directory, is cached under a hash of
everything that goes into it, so all runs of a comparison start from the same weights.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pace_lightning.core.logprobs import token_logprobs
from pace_lightning.training.policy import (
    ModelError,
    cached,
    load_policy,
    local_model,
    made_once,
)

MARKER = "pace_lightning_warm_start.json"
KIND = "warm_starts"

Example = tuple[list[int], list[int]]
"""Token ids of a prompt and of its completion, which ends with the end-of-sequence token."""

Part = tuple[Tensor, Tensor, Tensor]
"""Token ids, attention mask and loss mask (completions only), padded on the right; ``(N, T)``."""

_PARTS = 4
"""A batch is computed in so many parts of similar length: less padding, the same gradient."""


def warm_start(
    path: str,
    examples: Sequence[Example],
    *,
    tokenizer: Any,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    random_init: bool,
    attention: str,
    num_threads: int,
    emit: Callable[[str], None],
) -> Path:
    """The directory of the model after supervised training; trained now unless it is in the cache.

    The cache is ``$PACE_LIGHTNING_CACHE``, by default ``~/.cache/pace_lightning``. Its key is the
    content of model and examples, the settings below and this file.

    Args:
        path: of the model, see `policy.resolve`.
        examples: shuffled by ``seed``, repeated as often as the steps need.
        tokenizer: saved beside the model.
        steps: optimizer steps.
        batch_size: examples per step.
        learning_rate: peak of AdamW's; linear warm-up over a tenth, then linear decay to a tenth.
        seed: of the order, and of the weights if ``random_init``.
        random_init: take only the architecture from ``path``.
        attention: see `policy.load_policy`.
        num_threads: intra-op threads on CPU.
        emit: prints a line for the user.

    Raises:
        ModelError: if the model cannot be loaded or training diverges.
    """
    settings = {
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "seed": seed,
        "random_init": random_init,
    }
    key = _key(path, examples, settings)
    if (found := cached(KIND, key, MARKER)) is not None:
        emit(f"warm start: from the cache, {found}")
        return found
    emit(f"warm start: {steps} supervised steps, once; the result is cached")
    report: dict[str, Any] = {}

    def make(scratch: Path) -> dict[str, Any]:
        started = time.monotonic()
        model = load_policy(path, random_init=random_init, seed=seed, attention=attention)
        loss = _train(model, examples, settings, num_threads)
        seconds = round(time.monotonic() - started, 1)
        report.update({"model": path, **settings, "loss_nats_per_token": loss, "seconds": seconds})
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        return report

    target = made_once(KIND, key, MARKER, make)
    seconds, loss = report["seconds"], report["loss_nats_per_token"]
    emit(f"warm start: {seconds:.0f} s, loss {loss:.3f} nats per token, {target}")
    return target


class _Supervised(pl.LightningModule):
    """Minimizes the mean negative log-prob of the completions' tokens."""

    def __init__(self, policy: Any, *, learning_rate: float, steps: int) -> None:
        super().__init__()
        self.policy = policy
        self._learning_rate = learning_rate
        self._steps = steps
        self.recent_losses: list[float] = []

    def training_step(self, batch: Sequence[Part], batch_idx: int) -> Tensor:
        logprobs = [token_logprobs(self.policy, *part)[0][part[2]] for part in batch]
        loss = -torch.cat(logprobs).mean()
        if not torch.isfinite(loss):
            raise ModelError(
                f"the loss of warm-start step {batch_idx} is {loss.item()}; lower "
                "model.warm_start.learning_rate"
            )
        self.recent_losses = [*self.recent_losses[-19:], float(loss.detach())]
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self._learning_rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        rise = max(1, self._steps // 10)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / rise, 1 - 0.9 * step / self._steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _train(
    model: Any, examples: Sequence[Example], settings: dict[str, Any], num_threads: int
) -> float:
    """Train in place; returns the mean loss of the last steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    module = _Supervised(model, learning_rate=settings["learning_rate"], steps=settings["steps"])
    batches = list(_batches(examples, settings["steps"], settings["batch_size"], settings["seed"]))
    try:
        trainer = pl.Trainer(
            accelerator="auto",
            devices=1,
            max_steps=settings["steps"],
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(batches, batch_size=None, collate_fn=_collate))  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(before)
    model.to("cpu").eval()
    return sum(module.recent_losses) / len(module.recent_losses)


def _batches(
    examples: Sequence[Example], steps: int, batch_size: int, seed: int
) -> Iterator[list[Example]]:
    """Batches from one random order after the other."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(steps):
        while len(order) < batch_size:
            order += torch.randperm(len(examples), generator=generator).tolist()
        yield [examples[i] for i in order[:batch_size]]
        order = order[batch_size:]


def _collate(batch: Sequence[Example]) -> list[Part]:
    """A batch in parts of similar length."""
    by_length = sorted(batch, key=lambda example: len(example[0]) + len(example[1]))
    size = -(-len(batch) // _PARTS)
    return [_pad(by_length[i : i + size]) for i in range(0, len(batch), size)]


def _pad(examples: Sequence[Example]) -> Part:
    longest = max(len(prompt) + len(completion) for prompt, completion in examples)
    input_ids = torch.zeros(len(examples), longest, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    loss_mask = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(examples):
        length = len(prompt) + len(completion)
        input_ids[row, :length] = torch.tensor(prompt + completion)
        attention_mask[row, :length] = 1
        loss_mask[row, len(prompt) : length] = True
    return input_ids, attention_mask, loss_mask


def _key(path: str, examples: Sequence[Example], settings: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(json.dumps(examples).encode())
    digest.update(Path(__file__).read_bytes())
    directory = Path(local_model(path))
    if directory.is_dir():
        for file in sorted(directory.iterdir()):
            if file.is_file():
                digest.update(file.name.encode() + file.read_bytes())
    else:
        digest.update(str(directory).encode())
    return digest.hexdigest()[:16]
