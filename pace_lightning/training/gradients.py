"""What becomes of gradients between the backward pass and the step, whoever holds them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from torch import nn

from pace_lightning.core.trajectory import PolicyVersion


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient became NaN or infinite."""


def deepspeed_engine(trainer: pl.Trainer) -> Any:
    """DeepSpeed's, which accumulates, clips and steps by itself; None without it."""
    strategy = trainer.strategy
    return strategy.model if strategy.handles_gradient_accumulation else None


def averaging_factor(trainer: pl.Trainer, num_ranks: int) -> float:
    """Undoes the means over micro-batches and ranks that are taken; the loss is a sum of shares.

    Lightning divides by the micro-batches, DeepSpeed does so again, and all strategies average the
    gradients of the ranks.
    """
    divisions = 1 if deepspeed_engine(trainer) is None else 2
    return float(trainer.accumulate_grad_batches**divisions * num_ranks)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale the gradients of all ranks together to at most this norm; 0: leave them as they are.

    Returns:
        The norm before.
    """
    norm: Any = nn.utils.clip_grad_norm_(parameters, max_norm or math.inf)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def deepspeed_norm(trainer: pl.Trainer) -> float | None:
    """The norm that DeepSpeed found in the step that it took; None without it."""
    engine = deepspeed_engine(trainer)
    return None if engine is None else float(engine.get_global_grad_norm())


def finite(norm: float, version: PolicyVersion) -> float:
    """The gradient norm of a step.

    Raises:
        NonFiniteLossError: if it is not a number, or infinite.
    """
    if not math.isfinite(norm):
        raise NonFiniteLossError(
            f"the gradient norm of step {version} is {norm}; lower optim.learning_rate"
        )
    return norm
