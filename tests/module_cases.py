"""Draws, modules and a recorder for tests of one optimizer step of the real Trainer."""

import lightning.pytorch as pl
import numpy as np
import torch

from pace_lightning.core.batch import collate
from pace_lightning.core.heads import HEADS
from pace_lightning.core.logprobs import token_logprobs
from pace_lightning.core.objective import Objective
from pace_lightning.core.trajectory import Prompt, Trajectory, TrajectoryGroup
from pace_lightning.training.module import PolicyModule
from pace_lightning.training.policy import load_policy

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
VERSION = 5
MAX_RESPONSE_TOKENS = 9


def make_policy(seed=0):
    model = load_policy("conf/models/tiny", random_init=True, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
    return model


DAPO = Objective(
    HEADS["dapo"],
    {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH},
    max_length=MAX_RESPONSE_TOKENS,
)


def make_module(policy=None, **changes):
    arguments = {
        "objective": DAPO,
        "learning_rate": 1e-3,
        "max_grad_norm": 1e9,
    }
    return PolicyModule(policy or make_policy(), **(arguments | changes))


def make_groups(seed=0, num_groups=3, group_size=4, equal_rewards=False):
    """Random responses of different lengths, with one log-prob and version for each token."""
    rng = np.random.default_rng(seed)
    groups = []
    for uid in range(num_groups):
        trajectories = []
        for index in range(group_size):
            length = int(rng.integers(1, MAX_RESPONSE_TOKENS + 1))
            trajectories.append(
                Trajectory(
                    token_ids=tuple(rng.integers(3, 100, length).tolist()),
                    token_versions=tuple(sorted(rng.integers(3, VERSION + 1, length).tolist())),
                    behavior_logprobs=tuple((-rng.uniform(0.1, 9, length)).tolist()),
                    completed_at=VERSION,
                    reward=0.0 if equal_rewards else float(index % 3 == 0),
                    score=0.0,
                    truncated=False,
                )
            )
        prompt = tuple(rng.integers(3, 100, int(rng.integers(2, 6))).tolist())
        groups.append(TrajectoryGroup(Prompt(str(uid), prompt, ""), tuple(trajectories)))
    return groups


def make_batches(groups, num_micro_batches=1, version=VERSION, keep_groups=False):
    batches = collate(
        groups,
        version=max(version, VERSION),  # collation refuses tokens of the future
        num_micro_batches=num_micro_batches,
        pad_token_id=0,
        advantage="grpo",
        std_ddof=1,
        keep_groups=keep_groups,
    )
    for batch in batches:
        batch.version = version
    return batches


def own_logprobs(policy, batch, temperature=1.0):
    """Log-probs and entropies, without gradient."""
    with torch.no_grad():
        return token_logprobs(
            policy,
            batch.input_ids,
            batch.attention_mask,
            batch.loss_mask,
            temperature=temperature,
        )


def near_policy(policy, batches, spread=0.4, seed=0):
    """Make the behavior policy one that differs from ``policy`` by noise: ratios around 1."""
    for batch in batches:
        noise = []
        for row in batch.input_ids:  # noise that belongs to the row, wherever it lies
            generator = torch.Generator().manual_seed(seed + int(row.sum()))
            noise.append(torch.randn(64, generator=generator)[: len(row)] * spread)
        logprobs, _ = own_logprobs(policy, batch)
        batch.behavior_logprobs = torch.where(batch.loss_mask, logprobs + torch.stack(noise), 0.0)
    return batches


class Batches:
    """A sized iterable that is no list: Lightning takes a list for several loaders."""

    def __init__(self, batches):
        self._batches = batches

    def __len__(self):
        return len(self._batches)

    def __iter__(self):
        yield from self._batches


class Recorder(pl.Callback):
    """What the optimizer saw, and what the module said about it."""

    def __init__(self):
        self.gradients = []
        self.clipped = []
        self.learning_rates = []
        self.versions = []
        self.metrics = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append(gradients_of(pl_module.policy))
        self.learning_rates.append(optimizer.param_groups[0]["lr"])
        self.versions.append(pl_module.policy_version)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch.is_last:
            self.clipped.append(gradients_of(pl_module.policy))
            self.metrics.append(pl_module.finish_step())


def gradients_of(policy):
    trained = [p.grad for p in policy.parameters() if p.requires_grad]
    return torch.cat([gradient.detach().double().flatten() for gradient in trained])


def fit(module, batches, *, micro_batches=1, precision="32-true", callbacks=()):
    """Run a real Trainer over the batches; returns what was recorded, and the trainer."""
    recorder = Recorder()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        precision=precision,
        max_epochs=1,
        max_steps=len(batches) // micro_batches,
        accumulate_grad_batches=micro_batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recorder, *callbacks],
    )
    trainer.fit(module, train_dataloaders=Batches(batches))
    return recorder, trainer


def relative_difference(one, other):
    return float((one - other).norm() / other.norm())
