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
from torch.nn.utils import clip_grad_norm_

from pace_lightning.core.batch import TrainBatch
from pace_lightning.core.batch_advantages import score_square_norm_proxy
from pace_lightning.core.logprobs import (
    entropy,
    shared_prompt_logprobs,
    sum_square_probs,
    token_logprobs,
)
from pace_lightning.core.losses import k3_kl
from pace_lightning.core.objective import (
    Objective,
    Scored,
    Terms,
    objective_loss,
    prepare,
)
from pace_lightning.core.proximal_sources import Memoryless, ProximalSource, bypass
from pace_lightning.core.step_size import effective_sample_size
from pace_lightning.core.trajectory import PolicyVersion
from pace_lightning.training.policy import checkpoint_layers
from pace_lightning.training.proximal_models import other_weights
from pace_lightning.training.ranks import ALONE, Ranks, gather_vectors
from pace_lightning.training.score_norms import exact_score_square_norms
from pace_lightning.training.step_statistics import StepStatistics


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient became NaN or infinite."""


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
        reference: frozen causal LM of the KL penalty, or None.
        kl_coef: weight of the k3 penalty.
        chunk_tokens: vocabulary rows held in memory at once.
        gradient_checkpointing: recompute activations in the backward pass.
        share_prompts: compute each distinct prompt of a micro-batch once; excludes gradient
            checkpointing.
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
        reference: Any = None,
        kl_coef: float = 0.0,
        chunk_tokens: int = 1024,
        gradient_checkpointing: bool = False,
        share_prompts: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.policy = policy
        self._reference = [reference]  # in a list: not a submodule, neither trained nor saved
        self._objective = objective
        self._proximal = proximal or Memoryless(bypass)
        self._opob_norms = opob_norms
        self._temperature = temperature
        self._learning_rate = learning_rate
        self._weight_decay = weight_decay
        self._betas = betas
        self._warmup_steps = warmup_steps
        self._max_grad_norm = max_grad_norm
        self._rate_scale = rate_scale
        self._stale_budget = stale_budget
        self._kl_coef = kl_coef
        self._chunk_tokens = chunk_tokens
        self._share_prompts = share_prompts
        self._ranks = ranks
        self._terms: dict[int, Terms] = {}  # by micro-batch, if they were prepared together
        self._statistics = StepStatistics(objective, has_proximal=proximal is not None)
        self._is_last = False  # the present micro-batch, of its draw
        self._cumulated_rate = 0.0
        self.step_metrics: dict[str, float] = {}
        """Statistics of the last optimizer step, over the whole draw; read by the monitors."""
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
        """The parameters under the names that an engine knows; views, not copies."""
        return {name: parameter.data for name, parameter in self.policy.named_parameters()}

    def on_train_start(self) -> None:
        """Move the reference along (Lightning moves submodules only), begin with these weights."""
        if self._reference[0] is not None:
            self._reference[0].to(self.device)
        self._proximal.begin(self.policy_version, self.weights())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What is remembered beside the weights."""
        checkpoint["proximal"] = self._proximal.state_dict()
        checkpoint["cumulated_learning_rate"] = self._cumulated_rate

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The inverse."""
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
            with torch.no_grad():
                reference, _ = self._logprobs(self._reference[0], batch)
            kl = k3_kl(logprobs, reference)
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
        return loss * self._averaging_factor()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip to ``max_grad_norm``; refuse a gradient that would destroy the weights.

        Done here and not by Lightning, which refuses fused optimizers under mixed precision,
        although bfloat16 needs no unscaling. DeepSpeed clips what it has partitioned itself.
        """
        if self._engine is None:
            norm = clip_grad_norm_(self.policy.parameters(), self._max_grad_norm or math.inf)
            self._record_norm(float(norm))

    def _record_norm(self, norm: float) -> None:
        if not math.isfinite(norm):
            raise NonFiniteLossError(
                f"the gradient norm of step {self.policy_version} is {norm}; lower "
                "optim.learning_rate"
            )
        self._statistics.sums["gradient_norm"] = norm

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step with a rate that fits the draw; then put the scheduled rate back.

        DeepSpeed counts micro-batches itself, and is called for each of them.
        """
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
        if not self._is_last:
            return
        if self._engine is not None:
            self._record_norm(float(self._engine.get_global_grad_norm()))
        self._cumulated_rate += self._statistics.sums["learning_rate"]
        self._proximal.after_step(
            self.policy_version + 1,  # not counted yet
            self.weights(),
            active_share=self._statistics.active_share,
        )

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
        """AdamW, with linear warm-up and then a constant rate."""
        optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=self._learning_rate,
            betas=self._betas,
            weight_decay=self._weight_decay,
            fused=True,
        )
        warmup = max(1, self._warmup_steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / warmup)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

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
        if self._stale_budget is not None and (lag := self._mean_lag()) * scheduled > 0:
            factor = min(factor, self._stale_budget / (lag * scheduled))
        return factor

    def _mean_lag(self) -> float:
        """Versions between the trained tokens of the draw and the present weights."""
        sums = self._statistics.sums
        return sums["lag"] / max(sums["tokens"], 1.0)

    def _logprobs(
        self, model: Any, batch: TrainBatch, *, statistic: Callable[[Tensor], Tensor] = entropy
    ) -> tuple[Tensor, Tensor]:
        compute: Callable[..., tuple[Tensor, Tensor]] = token_logprobs
        if self._share_prompts:
            compute = functools.partial(shared_prompt_logprobs, prompt_lengths=batch.prompt_lengths)
        return compute(
            model,
            batch.input_ids,
            batch.attention_mask,
            batch.loss_mask,
            temperature=self._temperature,
            chunk_tokens=self._chunk_tokens,
            statistic=statistic,
        )

    @property
    def _engine(self) -> Any:
        """DeepSpeed's, which accumulates, clips and steps by itself; None without it."""
        strategy = self.trainer.strategy
        return strategy.model if strategy.handles_gradient_accumulation else None

    def _averaging_factor(self) -> float:
        """Undo the means over micro-batches and ranks that are taken; the loss is a sum of shares.

        Lightning divides by the micro-batches, DeepSpeed does so again, and all strategies average
        the gradients of the ranks.
        """
        micro_batches = self.trainer.accumulate_grad_batches
        divisions = 1 if self._engine is None else 2
        return float(micro_batches**divisions * self._ranks.size)
