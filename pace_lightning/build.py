"""From a configuration to objects.

The only file that knows both, and the home of every unit conversion.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from pace_lightning.build_objective import policy_module
from pace_lightning.build_reliability import patience
from pace_lightning.build_tasks import (
    judge,
    prompts_of,
    sample_writer,
    shape_reward,
)
from pace_lightning.build_trainer import (
    alarm_gap,
    build_trainer,
    engine_dtype,
    evaluates,
    first_callbacks,
    load_model,
    ranks_of,
    weight_sync_of,
)
from pace_lightning.build_vllm import chosen_engine, vllm_engine
from pace_lightning.config import Config, ConfigError, KVCache, Mode
from pace_lightning.config_explain import (
    ENGINE_NAMES,
    dispatch_ahead,
    outstanding_limit,
    pace_window,
    shares_prompts,
    thread_layout,
)
from pace_lightning.config_methods import keeps_reference
from pace_lightning.core.admission import AdmissionPolicy, AdmitAll, MaxLag
from pace_lightning.core.dispatch import AheadBound, Dispatch, FixedSlots
from pace_lightning.core.pace import Pace, PrefixRescore, RejectionBudget, prefix_forgetting
from pace_lightning.core.trajectory import PolicyVersion, Prompt
from pace_lightning.rollout.engine import RolloutEngine, Sampling, life_seed
from pace_lightning.rollout.local_engine import LocalEngine
from pace_lightning.tasks.prompts import PromptStream
from pace_lightning.tasks.scoring import ErrorBudget, ScorerPool
from pace_lightning.training.admission_monitor import AdmissionMonitor
from pace_lightning.training.bookends import Bookends
from pace_lightning.training.datamodule import RolloutDataModule
from pace_lightning.training.freed_memory import keep_freed_memory
from pace_lightning.training.module import PolicyModule
from pace_lightning.training.monitors import LearningMonitor, PoolMonitor, StalenessMonitor
from pace_lightning.training.policy import copy_for_engine
from pace_lightning.training.random_state import RandomState
from pace_lightning.training.ranks import Ranks
from pace_lightning.training.timing import TimeLedger


@dataclass(frozen=True)
class Experiment:
    """The objects of one run."""

    run_dir: Path
    trainer: pl.Trainer
    module: PolicyModule
    datamodule: RolloutDataModule
    tokenizer: Any
    ranks: Ranks
    time_ledger: TimeLedger
    staleness: StalenessMonitor
    admission: AdmissionMonitor
    num_train_prompts: int
    num_eval_prompts: int


def build(
    config: Config,
    run_dir: Path,
    *,
    emit: Callable[[str], None],
    resumed_version: PolicyVersion | None = None,
) -> Experiment:
    """Build everything; start nothing.

    Args:
        config: checked.
        run_dir: exists.
        emit: prints a line for the user.
        resumed_version: of the checkpoint that the run will go on from; curves are cut there.

    Raises:
        ConfigError: if data and model do not fit the configuration.
        ModelError: if the model cannot be loaded.
    """
    time_ledger = TimeLedger()
    torch.manual_seed(config.seed)
    trainer_threads, engine_threads, all_threads = thread_layout(
        config, len(os.sched_getaffinity(0))
    )
    torch.set_num_threads(trainer_threads)
    keep_freed_memory()
    ranks = ranks_of(config)
    tokenizer, policy = load_model(config, all_threads, emit)
    train_rows, eval_rows = prompts_of(config, tokenizer, emit)
    engine = make_engine(config, policy, tokenizer, engine_threads, resumed_version or 0, emit)
    scorer = ScorerPool(
        config.reward.function,
        num_workers=config.reward.num_workers,
        timeout_seconds=config.reward.timeout_seconds,
        startup_timeout_seconds=config.reward.startup_timeout_seconds,
        paths=list(config.reward.paths),
        environment=list(config.reward.environment),
        memory_gib=config.reward.memory_gib,
    )
    module = policy_module(config, policy, ranks)
    datamodule = RolloutDataModule(
        engine=engine,
        prompts=PromptStream(train_rows, seed=config.seed, epochs=config.data.epochs),
        eval_prompts=[
            Prompt(
                uid=f"eval:{i}", token_ids=row.token_ids, content=row.content, columns=row.columns
            )
            for i, row in enumerate(eval_rows)
        ],
        scorer=scorer,
        score=judge(scorer, tokenizer, ErrorBudget(config.reward.max_error_share)),
        shape_reward=shape_reward(config),
        admission=_admission(config),
        dispatch=_dispatch(config),
        in_rounds=config.mode == Mode.SYNC,
        prefix_forgetting=_forgetting(config),
        group_size=config.rollout.group_size,
        sampling=Sampling(config.rollout.max_new_tokens, config.rollout.temperature),
        eval_sampling=Sampling(
            config.eval.max_new_tokens or config.rollout.max_new_tokens, config.eval.temperature
        ),
        eval_samples=config.eval.samples,
        eval_timeout_seconds=config.eval.timeout_seconds,
        group_timeout_seconds=config.rollout.timeout_seconds,
        patience=patience(config),
        drop_zero_variance=config.rollout.dynamic_sampling,
        max_empty_groups=config.trainer.max_empty_groups,
        require_gradient=not keeps_reference(config),
        startup_timeout_seconds=config.engine.startup_timeout_seconds,
        publish_timeout_seconds=config.engine.publish_timeout_seconds,
        engine_threads_while_waiting=all_threads,
        waiting=lambda: time_ledger.span("wait"),
        on_draw=sample_writer(config, run_dir / "samples.jsonl", tokenizer),
        finish_with_nothing_to_learn=config.trainer.on_nothing_to_learn == "finish",
        ranks=ranks,
        may_reject=config.mode != Mode.SYNC,
        total_steps=config.trainer.steps,
        groups_per_step=config.trainer.groups_per_step,
        num_micro_batches=config.trainer.micro_batches,
        pad_token_id=tokenizer.pad_token_id,
        advantage=config.loss.advantage,
        std_ddof=config.loss.std_ddof,
        mask_truncated=config.loss.mask_truncated,
        keep_groups=shares_prompts(config),
        draw_timeout_seconds=config.trainer.draw_timeout_seconds,
    )
    weight_sync = weight_sync_of(config, datamodule, ranks, time_ledger)
    staleness = StalenessMonitor()
    admission = AdmissionMonitor(lambda: engine.rescore_seconds)
    callbacks: list[pl.Callback] = [
        *first_callbacks(config, ranks, time_ledger, lambda: not datamodule.worker.num_in_flight),
        Bookends(
            datamodule,
            ranks=ranks,
            target=run_dir / "checkpoints" / "final",
            tokenizer=tokenizer,
            evaluates=evaluates(config),
            time_ledger=time_ledger,
            emit=emit,
        ),
        weight_sync,
        RandomState(),
        staleness,
        PoolMonitor(run_dir / "draws.jsonl"),
        admission,
        LearningMonitor(
            total_steps=config.trainer.steps,
            time_ledger=time_ledger,
            weight_sync=weight_sync,
            generated=lambda: datamodule.worker.generated,
            loop_lag=lambda: datamodule.worker.take_lag(),
            max_lag0_gap=None if config.engine.kv_cache == KVCache.KEEP else alarm_gap(config),
            may_reject=config.admission.policy != "all",
            emit=emit,
        ),
    ]
    return Experiment(
        run_dir=run_dir,
        trainer=build_trainer(
            config, run_dir, callbacks, time_ledger, ranks, resumed_version=resumed_version
        ),
        module=module,
        datamodule=datamodule,
        tokenizer=tokenizer,
        ranks=ranks,
        time_ledger=time_ledger,
        staleness=staleness,
        admission=admission,
        num_train_prompts=len(train_rows),
        num_eval_prompts=len(eval_rows),
    )


def make_engine(
    config: Config,
    policy: Any,
    tokenizer: Any,
    num_threads: int,
    resumed_version: PolicyVersion,
    emit: Callable[[str], None],
) -> RolloutEngine:
    """The engine that the configuration asks for; says which, and does not start it."""
    seed = life_seed(config.seed, resumed_version=resumed_version)
    dtype = engine_dtype(config)
    new_tokens = max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)
    longest = config.data.max_prompt_tokens + new_tokens
    allowed = getattr(policy.config, "max_position_embeddings", None)
    if allowed is not None and longest > allowed:
        raise ConfigError(
            f"data.max_prompt_tokens + new tokens = {config.data.max_prompt_tokens} + {new_tokens} "
            f"= {longest}, but the model of model.path has {allowed} positions"
        )
    stop = policy.generation_config.eos_token_id
    stop_ids = {tokenizer.eos_token_id, *(stop if isinstance(stop, list) else [stop])} - {None}
    kind, why = chosen_engine(config)
    emit(f"{ENGINE_NAMES[kind]} generates ({why})")
    if kind == "vllm":
        return vllm_engine(
            config,
            policy,
            dtype=dtype,
            stop_token_ids=sorted(stop_ids),
            max_sequence_tokens=longest,
            num_threads=num_threads,
            seed=seed,
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return LocalEngine(
        copy_for_engine(policy, dtype).to(device),
        stop_token_ids=sorted(stop_ids),
        pad_token_id=tokenizer.pad_token_id,
        max_sequence_tokens=longest,
        max_running=config.engine.max_running,
        max_batch_tokens=config.engine.max_batch_tokens,
        cache_tokens=config.engine.cache_tokens,
        recompute_cache=config.engine.kv_cache == KVCache.RECOMPUTE,
        temperatures=(config.rollout.temperature, config.eval.temperature),
        num_threads=num_threads,
        seed=seed,
        startup_timeout_seconds=config.engine.startup_timeout_seconds,
    )


def _admission(config: Config) -> AdmissionPolicy:
    if config.mode == Mode.SYNC:
        # an assertion: the stream refuses a draw that rejected anything
        return MaxLag(config.sync.lag_versions)
    if config.admission.policy == "max_lag":
        assert config.admission.max_lag is not None
        return MaxLag(config.admission.max_lag)
    if config.admission.policy == "pace":
        return _pace(config)
    assert config.admission.policy == "all", config.admission.policy
    return AdmitAll()


def _pace(config: Config) -> Pace:
    pace = config.pace
    budget = RejectionBudget(
        pace.target_groups or config.trainer.groups_per_step,
        smoothing=pace.smoothing,
        rate_max=pace.rate_max,
        reserve_groups=pace.reserve_groups,
        excess=pace.excess,  # type: ignore[arg-type]  # one of its names, like those below
    )
    return Pace(
        budget,
        ranking=pace.ranking,  # type: ignore[arg-type]
        gamma=pace.gamma,
        group_score=pace.group_score,  # type: ignore[arg-type]
        window_size=pace_window(config),
        window_minimum=pace.window_minimum,
        no_score=pace.no_score,  # type: ignore[arg-type]
        aging_limit=pace.aging_limit,
    )


def _forgetting(config: Config) -> Callable[[Sequence[PrefixRescore]], float | None] | None:
    """How a trajectory's re-scorings become its prefix forgetting score; None if nobody asks."""
    if config.admission.policy != "pace" or config.pace.ranking != "effective":
        return None
    return functools.partial(
        prefix_forgetting,
        form=config.pace.forgetting,  # type: ignore[arg-type]
        aggregate=config.pace.forgetting_aggregate,  # type: ignore[arg-type]
    )


def _dispatch(config: Config) -> Dispatch:
    eta, slots = dispatch_ahead(config), config.rollout.max_outstanding_groups
    if eta is None:
        return FixedSlots(outstanding_limit(config))
    return AheadBound(eta, config.trainer.groups_per_step, slots)
