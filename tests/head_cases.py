"""Running any head of the table on one token or on a random batch."""

from __future__ import annotations

import math

import torch

from pace_lightning.core.heads import HEADS, settings_of, statistics_inputs


def random_batch(seed, num_rows=5, width=7, dtype=torch.float64, spread=0.5):
    """Policy, anchor, advantages constant along rows, and a mask; the first row is untrained."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, width)
    anchor = -0.05 - torch.rand(shape, generator=generator, dtype=dtype) * 3
    policy = anchor + spread * torch.randn(shape, generator=generator, dtype=dtype)
    policy = policy.clamp(max=-0.01)
    advantages = torch.randn((num_rows, 1), generator=generator, dtype=dtype).expand(shape).clone()
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[0] = False
    mask[1, 0] = True
    return policy, anchor, advantages, mask


def statistics_of(name, policy, anchor, advantages, mask, **settings):
    """The batch statistics of a head, of this batch alone; none for most heads."""
    head = HEADS[name]
    if head.statistics is None:
        return {}
    own = {key: x for key, x in settings.items() if key in settings_of(head.statistics)}
    return head.statistics(*statistics_inputs(head, policy, anchor, advantages, mask), **own)


def run_head(name, policy, anchor, advantages, mask, *, statistics=None, **settings):
    """Per-token losses and the gradient of their sum, statistics included."""
    head = HEADS[name]
    if statistics is None:
        statistics = statistics_of(name, policy, anchor, advantages, mask, **settings)
    own = {key: x for key, x in settings.items() if key in settings_of(head.function)}
    leaf = policy.clone().requires_grad_()
    losses = head.function(leaf, anchor, advantages, mask, **own, **statistics)
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradient


def one_token(name, ratio, advantage, *, policy=-0.5, **settings):
    """Loss and gradient of one token with the given ratio, and log pi = -0.5."""
    log_pi = torch.tensor([[policy]], dtype=torch.float64)
    losses, gradient = run_head(
        name,
        log_pi,
        log_pi - math.log(ratio),
        torch.full_like(log_pi, advantage),
        torch.ones(1, 1, dtype=torch.bool),
        **settings,
    )
    return losses.item(), gradient.item()
