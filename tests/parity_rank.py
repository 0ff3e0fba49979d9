"""``python -m parity_rank OUT STEPS SETTING ...``: one rank that trains on fixed draws.

Everything but the rollout side is what `pace_lightning.build` makes of the settings. Rank 0 writes
what the optimizer saw and did to the file OUT.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import torch
from module_cases import gradients_of, make_groups, own_logprobs

from pace_lightning.__main__ import _leave
from pace_lightning.build_objective import policy_module
from pace_lightning.build_trainer import build_trainer, ranks_of
from pace_lightning.config_checks import check
from pace_lightning.config_load import load
from pace_lightning.core.batch import collate
from pace_lightning.training import gather
from pace_lightning.training.gather import gather_weights, is_partitioned
from pace_lightning.training.gradients import deepspeed_engine
from pace_lightning.training.policy import load_policy
from pace_lightning.training.stream import ReceivingStream, deal
from pace_lightning.training.timing import TimeLedger

SPREAD = 0.25
"""Of the behavior policy's log-probs around those of the initial weights."""


def initial_policy():
    """Random weights, a little larger than usual: distributions that are not all alike."""
    model = load_policy("conf/models/tiny", random_init=True, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(2.0)
    return model


def draw(policy, version):
    """The same groups for a version whoever asks: tokens, rewards and log-probs of the behavior."""
    groups = []
    for group in make_groups(seed=version, num_groups=4, group_size=4):
        generator = torch.Generator().manual_seed(int(group.prompt.uid) + 1000 * version)
        trajectories = []
        for trajectory in group.trajectories:
            (alone,) = collate(
                [replace(group, trajectories=(trajectory, trajectory))],
                version=100,
                num_micro_batches=1,
                pad_token_id=0,
                advantage="grpo",
                std_ddof=0,
            )
            own = own_logprobs(policy, alone)[0][0][alone.loss_mask[0]]
            noise = SPREAD * torch.randn(len(own), generator=generator)
            trajectories.append(
                replace(
                    trajectory,
                    token_versions=(0,) * len(own),
                    completed_at=0,
                    behavior_logprobs=tuple((own + noise).clamp(max=0).tolist()),
                )
            )
        groups.append(replace(group, trajectories=tuple(trajectories)))
    return groups


class FixedStream(ReceivingStream):
    """Rank 0 has the draws, and deals them out as the product does."""

    def __init__(self, ranks, config, version):
        self._config = config
        self._initial = initial_policy()
        super().__init__(
            ranks,
            policy_version=version,
            total_steps=config.trainer.steps,
            num_micro_batches=config.trainer.micro_batches,
        )

    def _next(self, version):
        batches = collate(
            draw(self._initial, version),
            version=version,
            num_micro_batches=self._num_micro_batches * self._ranks.size,
            pad_token_id=0,
            advantage=self._config.loss.advantage,
            std_ddof=1,
        )
        return deal(batches, self._ranks.size)


class FixedDraws(pl.LightningDataModule):
    def __init__(self, ranks, config):
        super().__init__()
        self._stream = FixedStream(ranks, config, lambda: self.trainer.global_step)

    def train_dataloader(self):
        return self._stream


class Recorder(pl.Callback):
    """Gradients before they are clipped, norms, rates, and weights after each step."""

    def __init__(self, ranks):
        self._ranks = ranks
        self.seen = {"gradients": [], "norms": [], "rates": [], "weights": [], "metrics": []}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if pl_module._is_last:
            self.seen["gradients"].append(whole_gradients(pl_module))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if not batch.is_last:
            return
        metrics = pl_module.finish_step()
        self.seen["metrics"].append(metrics)
        self.seen["norms"].append(metrics["loss/gradient_norm"])
        self.seen["rates"].append(metrics["optim/learning_rate"])
        weights = gather_weights(pl_module.policy, keep=self._ranks.rank == 0)
        if weights:
            flat = [tensor.detach().float().flatten().cpu() for tensor in weights.values()]
            self.seen["weights"].append(torch.cat(flat).clone())
        if trainer.global_step == trainer.max_steps:
            sizes = (1, 64 << 10, 1 << 30)
            self.seen["peaks"] = {size: peak_bytes(pl_module.policy, size) for size in sizes}


def peak_bytes(policy, bucket_bytes):
    """The most that is whole at once while ZeRO-3 gathers all weights by such buckets."""
    seen, whole = [], gather._whole

    def watched(bucket):
        for item in whole(bucket):
            seen.append(sum(p.data.nbytes for p in policy.parameters()))
            yield item

    gather._whole = watched
    try:
        gather_weights(policy, keep=False, bucket_bytes=bucket_bytes)
    finally:
        gather._whole = whole
    return max(seen, default=0)


def whole_gradients(module):
    """Of all ranks together, in one vector; called on all of them."""
    if deepspeed_engine(module.trainer) is not None:
        from deepspeed.utils import safe_get_full_grad

        found = [safe_get_full_grad(p) for p in module.policy.parameters()]
    elif is_partitioned(module.policy):
        found = [p.grad.full_tensor() for p in module.policy.parameters()]
    else:
        return gradients_of(module.policy)
    return torch.cat([gradient.detach().double().flatten() for gradient in found])


def main(out, steps, *settings):
    config = load(
        "conf/smoke.yaml",
        ["data.held_out=0", "rollout.group_size=4", f"trainer.steps={steps}", *settings],
    )
    check(config)
    torch.set_num_threads(1)
    ranks = ranks_of(config)
    module = policy_module(config, initial_policy(), ranks)
    recorder = Recorder(ranks)
    trainer = build_trainer(config, Path(out).parent, [recorder], TimeLedger(), ranks)
    if (zero := getattr(trainer.strategy, "config", {}).get("zero_optimization")) is not None:
        # the model is so small that ZeRO-3 would never let go of a parameter
        zero["stage3_param_persistence_threshold"] = 0
    resumed = os.environ.get("RESUME_FROM")
    trainer.fit(module, datamodule=FixedDraws(ranks, config), ckpt_path=resumed, weights_only=True)
    if ranks.rank == 0:
        torch.save(recorder.seen, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
    _leave(0)
