"""The part of `build` that is about the objective: from names and settings to functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pace_lightning.config import Config
from pace_lightning.config_explain import lora_alpha, shares_prompts
from pace_lightning.config_methods import keeps_reference, objective_of, proximal_settings
from pace_lightning.core.proximal import ewma_decay
from pace_lightning.core.proximal_sources import (
    Memoryless,
    ProximalSource,
    linear,
    log_linear,
    recompute,
)
from pace_lightning.core.step_size import ess_scale
from pace_lightning.training.batch_logprobs import check_gpu_ways, liger_logprobs
from pace_lightning.training.lora import add_adapters
from pace_lightning.training.module import PolicyModule
from pace_lightning.training.own_scores import InterruptionScores
from pace_lightning.training.policy import copy_for_engine
from pace_lightning.training.proximal_models import EwmaPolicy, SnapshotStore
from pace_lightning.training.ranks import ALONE, Ranks


def policy_module(config: Config, policy: Any, ranks: Ranks = ALONE) -> PolicyModule:
    """The module that trains ``policy``, which gets its adapters here: the engine is built before.

    Raises:
        ModelError: if the model cannot have the adapters, or the machine has no GPU for a setting.
    """
    loss, optim, lora = config.loss, config.optim, config.model.lora
    check_gpu_ways(pack_rows=config.model.pack_rows, fused=config.model.fused_logprobs)
    if lora.rank:
        add_adapters(
            policy,
            rank=lora.rank,
            alpha=lora_alpha(config),
            target_modules=list(lora.target_modules),
            seed=config.seed,
        )
    return PolicyModule(
        policy,
        objective=objective_of(config),
        proximal=proximal_source(config),
        opob_norms=loss.advantage_settings.get("norms", "proxy"),
        temperature=config.rollout.temperature,
        learning_rate=optim.learning_rate,
        weight_decay=optim.weight_decay,
        betas=(optim.betas[0], optim.betas[1]),
        warmup_steps=optim.warmup_steps,
        max_grad_norm=optim.max_grad_norm,
        rate_scale=_rate_scale(config),
        stale_budget=optim.stale_budget,
        lifetime_budget=optim.lifetime_budget,
        reference=_reference(config, policy),
        kl_coef=loss.kl_coef,
        chunk_tokens=config.model.logprob_chunk_tokens,
        gradient_checkpointing=config.model.gradient_checkpointing,
        share_prompts=shares_prompts(config),
        pack_rows=config.model.pack_rows,
        fused=liger_logprobs if config.model.fused_logprobs else None,
        ranks=ranks,
    )


def _reference(config: Config, policy: Any) -> Any:
    """A frozen copy of the initial weights for the KL penalty; None if adapters make it needless.

    Without its adapters, the policy is what it was.
    """
    if not keeps_reference(config) or config.model.lora.rank:
        return None
    return copy_for_engine(policy, torch.float32)


def proximal_source(config: Config) -> ProximalSource | None:
    """Where the proximal policy comes from; None: there is none."""
    name = config.loss.proximal
    settings = proximal_settings(config)
    if name == "none":
        return None
    if name == "ewma":
        return EwmaPolicy(
            decay=ewma_decay(settings["stale_versions"]), reset_below=settings["reset_below"]
        )
    if name == "snapshot":
        return SnapshotStore(
            max_versions=settings["max_versions"],
            missing=settings["missing"],
            device="cpu" if settings["offload"] else None,
        )
    if name == "interruption":
        return InterruptionScores(
            batch_positions=int(settings["batch_positions"]),
            missing=settings["missing"],
            device="cpu" if settings["offload"] else None,
        )
    functions = {"recompute": recompute, "loglinear": log_linear, "linear": linear}
    return Memoryless(functions[name])


def _rate_scale(config: Config) -> Callable[[Tensor], float] | None:
    optim = config.optim
    if optim.ess_scaling == "none":
        return None
    return functools.partial(
        ess_scale, base=optim.ess_base, rule=optim.ess_scaling, ratio_cap=optim.ess_ratio_cap
    )
