"""The optimizer and its schedule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def adamw(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    warmup_steps: int,
) -> dict[str, Any]:
    """AdamW with linear warm-up and then a constant rate, as Lightning takes it.

    Args:
        parameters: what is trained.
        learning_rate: after the warm-up.
        weight_decay: decoupled, times the rate.
        betas: of the moments.
        warmup_steps: optimizer steps until the full rate; 0 and 1 have it from the first step on.
    """
    optimizer = torch.optim.AdamW(
        parameters, lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=True
    )
    warmup = max(1, warmup_steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup)
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
