"""The LightningModule: network, log-probs, loss, optimizer.

It has never heard of engines or pools.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from pace_lightning.core.batch import TrainBatch
from pace_lightning.core.logprobs import shared_prompt_logprobs, token_logprobs
from pace_lightning.core.losses import aggregate, clip_statistics, k3_kl
from pace_lightning.core.trajectory import PolicyVersion
from pace_lightning.training.policy import checkpoint_layers

Head = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient became NaN or infinite."""


class PolicyModule(pl.LightningModule):
    """Trains a causal LM on micro-batches of scored trajectories.

    Automatic optimization with one optimizer, so that Lightning's ``global_step`` counts optimizer
    steps: it is the policy version.

    Args:
        policy: the causal LM.
        head: from ``(policy_logprobs, anchor_logprobs, advantages, mask)`` to per-token losses, all
            of shape ``(N, T)``.
        aggregation: name of the aggregation in `core.losses.aggregate`.
        clip_low: lower clip radius; for the logged clip fractions.
        clip_high: upper clip radius; likewise.
        temperature: of the rollouts; the trainer's log-probs are of the same distribution.
        learning_rate: peak.
        weight_decay: of AdamW.
        betas: of AdamW.
        warmup_steps: linear warm-up, in optimizer steps.
        max_grad_norm: gradients are scaled down to this norm; 0: never.
        reference: frozen causal LM of the KL penalty, or None.
        kl_coef: weight of the k3 penalty.
        max_response_tokens: constant of the ``-norm`` aggregation.
        chunk_tokens: vocabulary rows held in memory at once.
        gradient_checkpointing: recompute activations in the backward pass.
        share_prompts: compute each distinct prompt of a micro-batch once; excludes gradient
            checkpointing.
    """

    def __init__(
        self,
        policy: Any,
        *,
        head: Head,
        aggregation: str = "token-mean",
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        temperature: float = 1.0,
        learning_rate: float = 1e-6,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        warmup_steps: int = 0,
        max_grad_norm: float = 1.0,
        reference: Any = None,
        kl_coef: float = 0.0,
        max_response_tokens: int | None = None,
        chunk_tokens: int = 1024,
        gradient_checkpointing: bool = False,
        share_prompts: bool = False,
    ) -> None:
        super().__init__()
        self.policy = policy
        self._reference = [reference]  # in a list: not a submodule, neither trained nor saved
        self._head = head
        self._aggregation = aggregation
        self._clip_low = clip_low
        self._clip_high = clip_high
        self._temperature = temperature
        self._learning_rate = learning_rate
        self._weight_decay = weight_decay
        self._betas = betas
        self._warmup_steps = warmup_steps
        self._max_grad_norm = max_grad_norm
        self._kl_coef = kl_coef
        self._max_response_tokens = max_response_tokens
        self._chunk_tokens = chunk_tokens
        self._share_prompts = share_prompts
        self._sums: dict[str, float] = defaultdict(float)
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
        """Mean of |policy - behavior log-prob| on tokens of the present version, of this draw.

        None if there are none.
        """
        tokens = self._sums["fresh_tokens"]
        return self._sums["fresh_gap"] / tokens if tokens else None

    def weights(self) -> Mapping[str, Tensor]:
        """The parameters under the names that an engine knows; views, not copies."""
        return {name: parameter.data for name, parameter in self.policy.named_parameters()}

    def on_train_start(self) -> None:
        """Move the reference along: Lightning moves submodules only."""
        if self._reference[0] is not None:
            self._reference[0].to(self.device)

    def training_step(self, batch: TrainBatch, batch_idx: int) -> Tensor:
        """The share of one micro-batch in the loss of the draw."""
        if batch.micro_batch_index == 0:
            self._sums.clear()
        logprobs, entropies = self._logprobs(self.policy, batch)
        token_losses = self._head(
            logprobs, batch.behavior_logprobs, batch.advantages, batch.loss_mask
        )
        if self._kl_coef:
            with torch.no_grad():
                reference, _ = self._logprobs(self._reference[0], batch)
            kl = k3_kl(logprobs, reference)
            token_losses = token_losses + self._kl_coef * kl
            self._sums["kl"] += float(kl.detach()[batch.loss_mask].sum())
        loss = aggregate(
            token_losses,
            batch.loss_mask,
            mode=self._aggregation,
            num_tokens=batch.num_tokens_global,
            num_sequences=batch.num_sequences_global,
            max_length=self._max_response_tokens,
        )
        if not torch.isfinite(loss):
            raise NonFiniteLossError(
                f"the loss of step {batch.version}, micro-batch {batch.micro_batch_index} is "
                f"{loss.item()}; lower optim.learning_rate, or look for broken rewards in "
                "samples.jsonl"
            )
        self._record(batch, logprobs.detach(), entropies, float(loss.detach()))
        return loss * self._averaging_factor()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip to ``max_grad_norm``; refuse a gradient that would destroy the weights.

        Done here and not by Lightning, which refuses fused optimizers under mixed precision,
        although bfloat16 needs no unscaling.
        """
        norm = torch.nn.utils.clip_grad_norm_(
            self.policy.parameters(), self._max_grad_norm or math.inf
        )
        if not torch.isfinite(norm):
            raise NonFiniteLossError(
                f"the gradient norm of step {self.policy_version} is {norm.item()}; lower "
                "optim.learning_rate"
            )
        self._sums["gradient_norm"] = float(norm)
        # the schedule goes on before `finish_step`
        self._sums["learning_rate"] = optimizer.param_groups[0]["lr"]

    def finish_step(self) -> dict[str, float]:
        """Means over the draw that was just trained on."""
        sums = self._sums
        tokens = max(sums["tokens"], 1.0)
        metrics = {
            "loss/objective": sums["loss"],
            "loss/gradient_norm": sums["gradient_norm"],
            "loss/clipped_low_share": sums["clipped_low_sum"] / tokens,
            "loss/clipped_high_share": sums["clipped_high_sum"] / tokens,
            "policy/entropy_nats": sums["entropy"] / tokens,
            "ratio/mean": sums["ratio_sum"] / tokens,
            "ratio/max": sums["ratio_max"],
            "ratio/log_abs_mean": sums["log_ratio_abs_sum"] / tokens,
            "ratio/ess_share": sums["weight_sum"] ** 2
            / max(sums["weight_square_sum"] * tokens, 1e-12),
            "tokens/trained": sums["tokens"],
            "tokens/consumed": sums["consumed"],
            "optim/learning_rate": sums["learning_rate"],
        }
        if self._kl_coef:
            metrics["loss/kl"] = sums["kl"] / tokens
        if (gap := self.lag0_gap) is not None:
            metrics["ratio/lag0_log_abs_mean"] = gap
            metrics["ratio/lag0_log_abs_max"] = sums["fresh_gap_max"]
            metrics["ratio/lag0_tokens"] = sums["fresh_tokens"]
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

    def _logprobs(self, model: Any, batch: TrainBatch) -> tuple[Tensor, Tensor]:
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
        )

    def _averaging_factor(self) -> float:
        """Undo the means over micro-batches and ranks that Lightning and DDP take.

        The loss is a sum of shares.
        """
        return float(self.trainer.accumulate_grad_batches * self.trainer.world_size)

    @torch.no_grad()
    def _record(self, batch: TrainBatch, logprobs: Tensor, entropies: Tensor, loss: float) -> None:
        statistics = clip_statistics(
            logprobs,
            batch.behavior_logprobs,
            batch.advantages,
            batch.loss_mask,
            clip_low=self._clip_low,
            clip_high=self._clip_high,
        )
        for name, value in statistics.items():
            if name == "ratio_max":
                self._sums[name] = max(self._sums[name], float(value))
            else:
                self._sums[name] += float(value)
        self._sums["loss"] += loss
        self._sums["entropy"] += float(entropies[batch.loss_mask].sum())
        self._sums["consumed"] += float(batch.attention_mask.sum())
        fresh = batch.loss_mask & (batch.token_versions == batch.version)
        if bool(fresh.any()):
            gap = (logprobs - batch.behavior_logprobs)[fresh].abs()
            self._sums["fresh_tokens"] += gap.numel()
            self._sums["fresh_gap"] += float(gap.sum())
            self._sums["fresh_gap_max"] = max(self._sums["fresh_gap_max"], float(gap.max()))
        if not math.isfinite(self._sums["ratio_sum"]):
            raise NonFiniteLossError(f"a log-prob of step {batch.version} is not finite")
