"""The part of ``build.py`` that every rank needs: model, Trainer, strategy; all of a follower."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_only

from pace_lightning.build_objective import policy_module
from pace_lightning.build_tasks import warm_started
from pace_lightning.config import Config, KVCache
from pace_lightning.config_explain import thread_layout
from pace_lightning.config_load import to_yaml
from pace_lightning.config_ranks import DEEPSPEED, chosen_strategy, message_timeout, num_ranks
from pace_lightning.core.trajectory import PolicyVersion
from pace_lightning.training.bookends import Bookends
from pace_lightning.training.checkpoint_files import RunCheckpointIO, StepCheckpoints
from pace_lightning.training.core_sharing import CoreSharing
from pace_lightning.training.datamodule import RolloutDataModule
from pace_lightning.training.follower import FollowerDataModule
from pace_lightning.training.freed_memory import keep_freed_memory
from pace_lightning.training.module import PolicyModule
from pace_lightning.training.on_policy_check import OnPolicyCheck, max_lag0_gap
from pace_lightning.training.policy import load_policy, load_tokenizer
from pace_lightning.training.ranks import Ranks
from pace_lightning.training.run_files import RunFiles
from pace_lightning.training.strategies import ShardedStrategy, ZeroStrategy
from pace_lightning.training.timing import Pacing, TimeLedger
from pace_lightning.training.weight_sync import WeightSync


@dataclass(frozen=True)
class Follower:
    """The objects of a rank that follows rank 0."""

    trainer: pl.Trainer
    module: PolicyModule
    datamodule: FollowerDataModule
    ranks: Ranks


def build_follower(config: Config, run_dir: Path) -> Follower:
    """Build what every rank but 0 needs: it has no prompts, no engine, no pool, no loggers.

    Args:
        config: checked.
        run_dir: rank 0 alone writes into it, but for this rank's part of checkpoints.

    Raises:
        ModelError: if the model cannot be loaded.
    """
    time_ledger = TimeLedger()
    torch.manual_seed(config.seed)
    threads, _, all_threads = thread_layout(config, len(os.sched_getaffinity(0)))
    torch.set_num_threads(threads)
    keep_freed_memory()
    ranks = ranks_of(config)
    _, policy = load_model(config, all_threads, lambda _: None)
    callbacks = [
        *first_callbacks(config, ranks, time_ledger, lambda: False),
        Bookends(
            None,
            ranks=ranks,
            target=run_dir,
            tokenizer=None,
            evaluates=evaluates(config),
            time_ledger=time_ledger,
            emit=lambda _: None,
        ),
        weight_sync_of(config, None, ranks, time_ledger),
    ]
    return Follower(
        trainer=build_trainer(config, run_dir, callbacks, time_ledger, ranks),
        module=policy_module(config, policy, ranks),
        datamodule=FollowerDataModule(
            ranks,
            total_steps=config.trainer.steps,
            num_micro_batches=config.trainer.micro_batches,
        ),
        ranks=ranks,
    )


def ranks_of(config: Config) -> Ranks:
    """This process among those of the run."""
    size = num_ranks(config)
    rank = int(getattr(rank_zero_only, "rank", 0)) if size > 1 else 0
    return Ranks(rank, size, timeout_seconds=message_timeout(config))


def load_model(config: Config, num_threads: int, emit: Callable[[str], None]) -> tuple[Any, Any]:
    """Tokenizer and policy, after the warm start if there is one.

    Raises:
        ModelError: if they cannot be loaded.
    """
    tokenizer = load_tokenizer(config.model.path)
    path, random_init = config.model.path, config.model.random_init
    if config.model.warm_start.steps:
        path, random_init = str(warm_started(config, tokenizer, num_threads, emit)), False
    policy = load_policy(
        path, random_init=random_init, seed=config.seed, attention=config.model.attention
    )
    return tokenizer, policy


def evaluates(config: Config) -> bool:
    """Whether there are held-out prompts; the same answer on each rank."""
    return bool(config.data.eval_sources) or config.data.held_out > 0


def weight_sync_of(
    config: Config, datamodule: RolloutDataModule | None, ranks: Ranks, time_ledger: TimeLedger
) -> WeightSync:
    """Publishes on rank 0, and takes part in it elsewhere."""
    return WeightSync(
        datamodule,
        every_steps=config.sync.every_steps,
        lag_versions=config.sync.lag_versions,
        publishing=lambda: time_ledger.span("publish"),
        ranks=ranks,
    )


def first_callbacks(
    config: Config, ranks: Ranks, time_ledger: TimeLedger, engine_is_idle: Callable[[], bool]
) -> list[pl.Callback]:
    """Those that every rank has before it publishes, and in front of all others."""
    threads, _, all_threads = thread_layout(config, len(os.sched_getaffinity(0)))
    alone = config.trainer.num_threads or max(1, all_threads // config.trainer.devices)
    return [
        time_ledger,
        CoreSharing(threads, alone, engine_is_idle=engine_is_idle),
        OnPolicyCheck(
            alarm_gap(config),
            config.rollout.temperature,
            only_at_the_beginning=config.engine.kv_cache == KVCache.KEEP,
        ),
        Pacing(config.trainer.min_step_seconds, time_ledger),
    ]


def alarm_gap(config: Config) -> float:
    """See `max_lag0_gap`."""
    dtypes = (engine_dtype(config), _trainer_dtype(config))
    return max_lag0_gap(dtypes, temperature=config.rollout.temperature)


def engine_dtype(config: Config) -> torch.dtype:
    """In which the engine computes."""
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return named.get(config.engine.dtype, _trainer_dtype(config))


def build_trainer(
    config: Config,
    run_dir: Path,
    callbacks: Sequence[pl.Callback],
    time_ledger: TimeLedger,
    ranks: Ranks,
    *,
    resumed_version: PolicyVersion | None = None,
) -> pl.Trainer:
    """Lightning's Trainer, of which only rank 0 logs."""
    micro_batches = config.trainer.micro_batches
    every = config.eval.every_steps
    return pl.Trainer(
        accelerator="auto",
        devices=config.trainer.devices,
        num_nodes=config.trainer.num_nodes,
        strategy=strategy(config),
        precision=config.trainer.precision,  # type: ignore[arg-type]
        max_epochs=1,
        max_steps=config.trainer.steps,
        accumulate_grad_batches=micro_batches,
        # Lightning counts batches here, i.e. micro-batches; 1.0 is once, at the end.
        val_check_interval=every * micro_batches if 0 < every <= config.trainer.steps else 1.0,
        limit_val_batches=1.0 if evaluates(config) else 0,
        num_sanity_val_steps=0,
        # Both forget what an earlier process logged at this step and later ones.
        logger=[
            TensorBoardLogger(run_dir, name="", version="tensorboard", purge_step=resumed_version),
            RunFiles(run_dir, resumed_version=resumed_version),
        ]
        if ranks.rank == 0
        else False,
        log_every_n_steps=1,
        callbacks=[*callbacks, *_checkpoints(config, run_dir)],
        plugins=[RunCheckpointIO(time_ledger, to_yaml(config))],
        enable_checkpointing=bool(config.trainer.checkpoint_every_steps),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=run_dir,
    )


def strategy(config: Config) -> Strategy | str:
    """How ranks share the work."""
    name, offload = chosen_strategy(config), config.trainer.offload
    if name == "ddp":
        return DDPStrategy(gradient_as_bucket_view=True)
    if name == "fsdp":
        return ShardedStrategy(num_ranks(config), config=to_yaml(config))
    if name in DEEPSPEED:
        return ZeroStrategy(
            DEEPSPEED.index(name) + 1,
            max_grad_norm=config.optim.max_grad_norm,
            config=to_yaml(config),
            offload_optimizer=offload != "none",
            offload_parameters=offload == "parameters",
        )
    return "auto"


def _checkpoints(config: Config, run_dir: Path) -> list[pl.Callback]:
    if not config.trainer.checkpoint_every_steps:
        return []
    return [
        StepCheckpoints(
            dirpath=run_dir / "checkpoints",
            filename="version-{step:06d}",
            auto_insert_metric_name=False,
            every_n_train_steps=config.trainer.checkpoint_every_steps,
            monitor="step",
            mode="max",
            save_top_k=config.trainer.keep_checkpoints,
            # never put off until a validation, which may come when the run's books are closed
            save_on_train_epoch_end=True,
        )
    ]


def _trainer_dtype(config: Config) -> torch.dtype:
    return torch.bfloat16 if config.trainer.precision.startswith("bf16") else torch.float32
