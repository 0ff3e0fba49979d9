"""Squared norms of the responses' scores, the gradients of their log-probs: what OPOB weighs by.

exact    one backward pass per response; the network's whole gradient
proxy    one forward pass per micro-batch; the gradient with respect to the logits
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pace_lightning.core.batch import TrainBatch
from pace_lightning.training.proximal_models import rows_with

NORMS = ("exact", "proxy")


def exact_score_square_norms(
    policy: nn.Module, batch: TrainBatch, logprobs: Callable[[TrainBatch], Tensor]
) -> Tensor:
    """``||grad log pi(response)||**2`` over all parameters that are trained.

    Args:
        policy: the network; its accumulated gradients stay as they are.
        batch: the responses.
        logprobs: from a batch to log-probs with gradient, shape ``(N, T)``.

    Returns:
        Float64, 0 for a row without a trained token; shape ``(N,)``.
    """
    parameters = [p for p in policy.parameters() if p.requires_grad]
    norms = torch.zeros(len(batch.loss_mask), dtype=torch.float64, device=batch.loss_mask.device)
    for row in batch.loss_mask.any(dim=1).nonzero().flatten().tolist():
        own = torch.zeros_like(batch.loss_mask)
        own[row] = batch.loss_mask[row]
        part = rows_with(batch, own)
        with torch.enable_grad():
            total = logprobs(part)[part.loss_mask].sum()
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        norms[row] = sum(float(g.double().square().sum()) for g in gradients if g is not None)
    return norms
