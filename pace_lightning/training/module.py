"""The LightningModule: network, log-probs, loss, optimizer.

It has never heard of engines or pools.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor

from pace_lightning.core.batch import TrainBatch
from pace_lightning.core.batch_advantages import score_square_norm_proxy
from pace_lightning.core.logprobs import Fused, sum_square_probs
from pace_lightning.core.losses import k3_kl
from pace_lightning.core.objective import (
    Objective,
    Scored,
    Terms,
    objective_loss,
    prepare,
)
from pace_lightning.core.proximal_sources import Memoryless, ProximalSource, bypass
from pace_lightning.core.step_size import effective_sample_size, largest_rate
from pace_lightning.core.trajectory import PolicyVersion
from pace_lightning.rollout.rollouts import Leaving
from pace_lightning.training import gradients, lora
from pace_lightning.training.batch_logprobs import batch_logprobs
from pace_lightning.training.gather import with_weights
from pace_lightning.training.gradients import NonFiniteLossError
from pace_lightning.training.optimizer import adamw
from pace_lightning.training.own_scores import InterruptionScores
from pace_lightning.training.policy import checkpoint_layers
from pace_lightning.training.proximal_models import other_weights
from pace_lightning.training.ranks import ALONE, Ranks, gather_vectors
from pace_lightning.training.score_norms import exact_score_square_norms
from pace_lightning.training.step_statistics import StepStatistics


class PolicyModule(pl.LightningModule):
    """Trains a causal LM on micro-batches of scored trajectories.

    Automatic optimization with one optimizer, so that Lightning's ``global_step`` counts optimizer
    steps: it is the policy version.

    Args:
        policy: the causal LM.
        objective: what to minimize.
        proximal: where the anchor of the trust region comes from; None: the behavior policy.
        opob_norms: how OPOB measures scores, ``proxy`` or ``exact``; see `score_norms`.
        temperature: of the rollouts; the trainer's log-probs are of the same distribution.
        learning_rate: peak.
        weight_decay: of AdamW.
        betas: of AdamW.
        warmup_steps: linear warm-up, in optimizer steps.
        max_grad_norm: gradients are scaled down to this norm; 0: never.
        rate_scale: from the sequences' log-ratios of the draw, shape ``(M,)``, to the factor of the
            learning rate of its step (`step_size.ess_scale`); None: 1.
        stale_budget: the learning rate times the mean lag of the draw, in versions, is at most
            this; None: no limit.
        lifetime_budget: the learning rates of all steps sum to at most this: each step takes no
            more than its part of what is left; None: no limit.
        reference: frozen causal LM of the KL penalty; None: the policy without its adapters.
        kl_coef: weight of the k3 penalty.
        chunk_tokens: vocabulary rows held in memory at once.
        gradient_checkpointing: recompute activations in the backward pass.
        share_prompts: compute each distinct prompt of a micro-batch once; excludes gradient
            checkpointing.
        pack_rows: compute no padding; excludes shared prompts.
        fused: kernel of the log-probs, see `batch_logprobs`.
        ranks: who trains along.
    """

    def __init__(
        self,
        policy: Any,
        *,
        objective: Objective,
        proximal: ProximalSource | None = None,
        opob_norms: str = "proxy",
        temperature: float = 1.0,
        learning_rate: float = 1e-6,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        warmup_steps: int = 0,
        max_grad_norm: float = 1.0,
        rate_scale: Callable[[Tensor], float] | None = None,
        stale_budget: float | None = None,
        lifetime_budget: float | None = None,
        reference: Any = None,
        kl_coef: float = 0.0,
        chunk_tokens: int = 1024,
        gradient_checkpointing: bool = False,
        share_prompts: bool = False,
        pack_rows: bool = False,
        fused: Fused | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.policy = policy
        self._reference = [reference]  # in a list: not a submodule, neither trained nor saved
        self._objective = objective
        self._proximal = proximal or Memoryless(bypass)
        self._opob_norms = opob_norms
        self._learning_rate = learning_rate
        self._weight_decay = weight_decay
        self._betas = betas
        self._warmup_steps = warmup_steps
        self._max_grad_norm = max_grad_norm
        self._rate_scale = rate_scale
        self._stale_budget = stale_budget
        self._lifetime_budget = lifetime_budget
        self._kl_coef = kl_coef
        self._batch_logprobs = functools.partial(
            batch_logprobs,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            share_prompts=share_prompts,
            pack_rows=pack_rows,
            recompute_layers=gradient_checkpointing,
            fused=fused,
        )
        self._ranks = ranks
        self._terms: dict[int, Terms] = {}  # by micro-batch, if they were prepared together
        self._statistics = StepStatistics(objective, has_proximal=proximal is not None)
        self._is_last = False  # the present micro-batch, of its draw
        self._cumulated_rate = 0.0
        self.step_metrics: dict[str, float] = {}  # of the last step, over the whole draw
        if kl_coef and reference is None and not lora.adapted_layers(policy):
            raise ValueError(f"kl_coef is {kl_coef}, but there is neither reference nor adapters")
        if gradient_checkpointing:
            checkpoint_layers(policy)

    @property
    def policy_version(self) -> PolicyVersion:
        """Optimizer steps behind the present weights: the clock of the system."""
        return self.trainer.global_step

    @property
    def lag0_gap(self) -> float | None:
        """See `StepStatistics.lag0_gap`; of this draw."""
        return self._statistics.lag0_gap

    def weights(self) -> Mapping[str, Tensor]:
        """The parameters under the names that an engine knows; see `merged_weights`."""
        return lora.merged_weights(self.policy)

    def on_train_start(self) -> None:
        """Move the reference along (Lightning moves submodules only), begin with these weights."""
        if self._reference[0] is not None:
            self._reference[0].to(self.device)
        self._proximal.begin(self.policy_version, lora.trained_weights(self.policy))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What is remembered beside the weights."""
        checkpoint["proximal"] = self._proximal.state_dict()
        checkpoint["cumulated_learning_rate"] = self._cumulated_rate

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The inverse; a run that ended at its last step may go on with more of them.

        Lightning takes the last batch of the shorter stream for the end of its only epoch.
        """
        progress = checkpoint["loops"]["fit_loop"].get("epoch_loop.batch_progress", {})
        progress["is_last_batch"] = False
        self._proximal.load_state_dict(checkpoint["proximal"])
        self._cumulated_rate = checkpoint["cumulated_learning_rate"]

    def training_step(self, batch: TrainBatch, batch_idx: int) -> Tensor:
        """The share of one micro-batch in the loss of the draw."""
        self._is_last = batch.is_last
        if batch.micro_batch_index == 0:
            self._statistics.begin()
            self._terms.clear()
            if self._objective.needs_draw and (batch.followers or self._objective.opob is not None):
                self._prepare_draw([batch, *(b.to(self.device) for b in batch.followers)])
        logprobs, entropies = self._logprobs(self.policy, batch)
        terms = self._terms.pop(batch.micro_batch_index, None)
        if terms is None:
            (terms,) = self._prepare([batch], [logprobs.detach()])
        penalty = None
        if self._kl_coef:
            kl = k3_kl(logprobs, self._reference_logprobs(batch))
            penalty = self._kl_coef * kl
            self._statistics.sums["kl"] += float(kl.detach()[batch.loss_mask].sum())
        loss = objective_loss(self._objective, logprobs, terms, penalty=penalty)
        if not torch.isfinite(loss):
            raise NonFiniteLossError(
                f"the loss of step {batch.version}, micro-batch {batch.micro_batch_index} is "
                f"{loss.item()}; lower optim.learning_rate, or look for broken rewards in "
                "samples.jsonl"
            )
        self._statistics.record(batch, terms, logprobs.detach(), entropies, float(loss.detach()))
        if not math.isfinite(self._statistics.sums["ratio_sum"]):
            raise NonFiniteLossError(f"a log-prob of step {batch.version} is not finite")
        return loss * gradients.averaging_factor(self.trainer, self._ranks.size)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip to ``max_grad_norm``, unless DeepSpeed does; refuse what would destroy the weights.

        Not by Lightning, which refuses fused optimizers under mixed precision.
        """
        if gradients.deepspeed_engine(self.trainer) is None:
            norm = gradients.clip_gradients(self.policy.parameters(), self._max_grad_norm)
            self._statistics.sums["gradient_norm"] = gradients.finite(norm, self.policy_version)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step with a rate that fits the draw, then put the scheduled rate back."""
        scheduled = [group["lr"] for group in optimizer.param_groups]

        def closure() -> Any:  # gradients are complete after it, and the step comes next
            result = optimizer_closure() if optimizer_closure is not None else None
            if not self._is_last:
                return result
            self._statistics.merge(self._ranks.gather)
            factor = self._rate_factor(scheduled[0])
            for group in optimizer.param_groups:
                group["lr"] *= factor
            self._statistics.sums["learning_rate"] = optimizer.param_groups[0]["lr"]
            return result

        try:
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
        finally:
            for group, rate in zip(optimizer.param_groups, scheduled, strict=True):
                group["lr"] = rate
        if not self._is_last:  # DeepSpeed counts micro-batches itself
            return
        if (norm := gradients.deepspeed_norm(self.trainer)) is not None:
            self._statistics.sums["gradient_norm"] = gradients.finite(norm, self.policy_version)
        self._cumulated_rate += self._statistics.sums["learning_rate"]
        self._proximal.after_step(
            self.policy_version + 1,  # not counted yet
            lora.trained_weights(self.policy),
            active_share=self._statistics.active_share,
        )

    @property
    def leaving(self) -> Leaving | None:
        """Scores what weights that are about to be replaced have sampled; None: nobody asks."""
        if not isinstance(self._proximal, InterruptionScores):
            return None
        context = self.trainer.precision_plugin.forward_context
        return self._proximal.leaver(self._compute_elsewhere, context)

    def published(
        self, weights: Mapping[str, Tensor], version: PolicyVersion, *, oldest: PolicyVersion
    ) -> None:
        """These weights, with adapters the present ones, sample now; see `ProximalSource`."""
        if lora.adapted_layers(self.policy):  # then the proximal policy knows of nothing else
            weights = lora.trained_weights(self.policy)
        self._proximal.published(version, weights, oldest_version=oldest)

    def finish_step(self) -> dict[str, float]:
        """Means over the draw that was just trained on."""
        metrics = self._statistics.metrics()
        metrics["optim/cumulated_learning_rate"] = self._cumulated_rate
        metrics |= {f"proximal/{name}": x for name, x in self._proximal.metrics().items()}
        self.step_metrics = metrics
        return metrics

    def validation_step(self, batch: Mapping[str, float], batch_idx: int) -> None:
        """Log what the rollout side measured; see `RolloutDataModule.val_dataloader`."""
        metrics = {f"eval/{name}": value for name, value in batch.items()}
        self.log_dict(metrics, batch_size=1, logger=False)
        # Lightning's own step lags by one inside a run: it counts a step after the validation that
        # follows it
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=self.policy_version)

    def configure_optimizers(self) -> Any:
        """See `adamw`."""
        return adamw(
            lora.trained_parameters(self.policy).values(),
            learning_rate=self._learning_rate,
            weight_decay=self._weight_decay,
            betas=self._betas,
            warmup_steps=self._warmup_steps,
        )

    def _prepare_draw(self, batches: list[TrainBatch]) -> None:
        """The pass before the first backward pass, and the terms of all micro-batches."""
        scored = [self._score(batch, None) for batch in batches]
        terms = self._prepare(batches, [logprobs for logprobs, _ in scored])
        self._terms = {b.micro_batch_index: t for b, t in zip(batches, terms, strict=True)}

    def _prepare(self, batches: list[TrainBatch], logprobs: list[Tensor]) -> list[Terms]:
        parts = [
            Scored(
                policy_logprobs=own,
                proximal_logprobs=self._proximal.logprobs(batch, self._compute, own),
                behavior_logprobs=batch.behavior_logprobs,
                advantages=batch.advantages,
                mask=batch.loss_mask,
                rewards=batch.rewards,
                group_ids=batch.group_ids,
                score_square_norms=self._score_square_norms(batch, own),
                reference_logprobs=self._reference_logprobs(batch)
                if (self._objective.returns or {}).get("kl_coef")
                else None,
            )
            for batch, own in zip(batches, logprobs, strict=True)
        ]
        return prepare(
            self._objective,
            parts,
            num_tokens=batches[0].num_tokens_global,
            num_sequences=batches[0].num_sequences_global,
            gather=self._gather,
        )

    def _compute(self, batch: TrainBatch, weights: Mapping[str, Tensor] | None) -> Tensor:
        return self._score(batch, weights)[0]

    def _compute_elsewhere(self, batch: TrainBatch, weights: Mapping[str, Tensor] | None) -> Tensor:
        with other_weights(self.policy, weights):
            return self._logprobs(self.policy, batch.to(self.device))[0]

    @contextmanager
    def _prepass(self) -> Iterator[None]:
        """Around whatever passes through the network beside the training pass.

        Autocast would go on with what it has cast of other weights, or without gradient.
        """
        start = time.perf_counter()
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            self._statistics.sums["prepass_seconds"] += time.perf_counter() - start

    def _score(
        self, batch: TrainBatch, weights: Mapping[str, Tensor] | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        with self._prepass(), torch.no_grad(), other_weights(self.policy, weights):
            return self._logprobs(self.policy, batch, **options)

    def _reference_logprobs(self, batch: TrainBatch) -> Tensor:
        reference = self._reference[0]
        if reference is None:
            with lora.without_adapters(self.policy):
                return self._logprobs(self.policy, batch)[0]
        with torch.no_grad():
            return self._logprobs(reference, batch)[0]

    def _score_square_norms(self, batch: TrainBatch, logprobs: Tensor) -> Tensor | None:
        if self._objective.opob is None:
            return None
        if self._opob_norms == "proxy":
            _, squares = self._score(batch, None, statistic=sum_square_probs)
            return score_square_norm_proxy(logprobs, squares, batch.loss_mask)
        with self._prepass():
            return exact_score_square_norms(
                self.policy, batch, lambda part: self._logprobs(self.policy, part)[0]
            )

    def _gather(self, vector: Tensor) -> Tensor:
        if self._ranks.size == 1:
            return vector
        return gather_vectors(vector, lambda x: cast("Tensor", self.all_gather(x)))

    def _rate_factor(self, scheduled: float) -> float:
        """What the learning rate of this step is multiplied with."""
        log_ratios = self._gather(self._statistics.log_ratios)
        share = effective_sample_size(log_ratios).item() / len(log_ratios)
        self._statistics.sums["sequence_ess_share"] = share
        factor = 1.0 if self._rate_scale is None else self._rate_scale(log_ratios)
        limit = largest_rate(
            mean_lag_versions=0.0 if self._stale_budget is None else self._statistics.mean_lag,
            stale_budget=self._stale_budget,
            remaining_budget=self._lifetime_budget and self._lifetime_budget - self._cumulated_rate,
            remaining_steps=self.trainer.max_steps - self.policy_version,
        )
        return min(factor, limit / scheduled) if scheduled else factor

    def _logprobs(self, model: Any, batch: TrainBatch, **options: Any) -> tuple[Tensor, Tensor]:
        return with_weights(model, self._batch_logprobs, batch, **options)
