"""Synchronous mode is the textbook loop: generate, train, repeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from experiments import (
    DeterministicEngine,
    InProcessScorer,
    build_scripted,
    configure,
    judge,
    judge_all,
    read_lines,
    read_summary,
    respond,
    use_script,
)
from safetensors.torch import load_file
from torch import Tensor

from pace_lightning.config import Config
from pace_lightning.core.batch import TrainBatch, collate
from pace_lightning.core.heads import dapo_head
from pace_lightning.core.logprobs import token_logprobs
from pace_lightning.core.losses import aggregate
from pace_lightning.core.trajectory import Prompt, Trajectory, TrajectoryGroup
from pace_lightning.rollout.local_engine import LocalEngine
from pace_lightning.run import train
from pace_lightning.training.batch_logprobs import attention_kernels

STEPS = 8
GROUPS_PER_STEP, GROUP_SIZE, MICRO_BATCHES = 4, 4, 2

SCRIPTED = (
    f"trainer.steps={STEPS}",
    f"trainer.groups_per_step={GROUPS_PER_STEP}",
    f"trainer.micro_batches={MICRO_BATCHES}",
    f"rollout.group_size={GROUP_SIZE}",
    # the last bits of a sum depend on how many threads share it
    "trainer.num_threads=1",
    "trainer.engine_threads=1",
    "model.shared_prompts=false",  # the plain loop knows no such trick, which changes last bits
    "data.held_out=2",
    "eval.samples=2",
)
SYNC = ("mode=sync",)
ASYNC_WITHOUT_LAG = (
    "mode=async",
    "rollout.eta=0",
    "admission.policy=max_lag",
    "admission.max_lag=0",
)

Weights = dict[str, Tensor]


class RecordStaleness(pl.Callback):
    """Keeps what every trained trajectory says about its lag."""

    def __init__(self) -> None:
        self.lags: list[list[float]] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: TrainBatch, i: int
    ) -> None:
        if batch.is_last:
            self.lags.append([part.total for part in batch.report.staleness])


@pytest.mark.slow
def test_two_runs_with_one_seed_have_no_lag_and_end_with_the_same_bits_whatever_the_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = LocalEngine._submit

    def submit_slowly(engine: LocalEngine, request: Any) -> None:
        time.sleep(0.003)  # a busy machine: the engine gets ahead of who submits
        submit(engine, request)

    finals = []
    for name in ("first", "second"):
        run_dir = tmp_path / name
        config = configure(run_dir, "mode=sync", "seed=3", "trainer.steps=6")
        assert train(config, lambda _: None) == 0
        assert read_summary(run_dir)["staleness"] == {"generation": 0.0, "waiting": 0.0}
        draws = read_lines(run_dir / "draws.jsonl")
        assert [draw["total_staleness_versions"] for draw in draws] == [0.0] * 6
        assert all(draw["rejected_groups"] == 0 for draw in draws)
        finals.append(load_file(run_dir / "checkpoints" / "final" / "model.safetensors"))
        monkeypatch.setattr(LocalEngine, "_submit", submit_slowly)
    assert differing(finals[0], finals[1]) == []


def test_a_synchronous_run_submits_every_request_while_the_engine_is_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = DeterministicEngine()
    use_script(monkeypatch, engine)
    config = configure(tmp_path / "run", *SCRIPTED, *SYNC, "trainer.steps=2")
    assert train(config, lambda _: None) == 0
    # otherwise the composition of its batches, and with it what is sampled, depends on timing
    alone = [request.prompt for request in engine.requests if not request.while_paused]
    assert alone == [], f"{len(alone)} of {len(engine.requests)} requests"


@pytest.mark.slow
def test_another_seed_ends_with_other_bits(tmp_path: Path) -> None:
    finals = []
    for seed in (3, 4):
        run_dir = tmp_path / str(seed)
        settings = ("mode=sync", f"seed={seed}", "trainer.steps=1", "data.held_out=2")
        assert train(configure(run_dir, *settings), lambda _: None) == 0
        finals.append(load_file(run_dir / "checkpoints" / "final" / "model.safetensors"))
    assert differing(finals[0], finals[1])


def test_no_trajectory_of_a_synchronous_run_has_lag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = build_scripted(
        monkeypatch,
        configure(tmp_path, *SCRIPTED, *SYNC),
        DeterministicEngine(),
        InProcessScorer(judge_all),
    )
    record = RecordStaleness()
    experiment.trainer.callbacks.append(record)
    experiment.trainer.fit(experiment.module, datamodule=experiment.datamodule)
    experiment.datamodule.close()
    assert record.lags == [[0.0] * GROUPS_PER_STEP * GROUP_SIZE] * STEPS


class RecordVersions(pl.Callback):
    """Keeps the versions of the trained tokens of each step, and of the engine in evaluations."""

    def __init__(self, engine: DeterministicEngine) -> None:
        self._engine = engine
        self.trained: list[set[int]] = []
        self.evaluated: list[tuple[int, int]] = []
        self.lags: list[set[float]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: TrainBatch, i: int) -> None:
        if batch.micro_batch_index == 0:
            self.trained.append(set())
        self.trained[-1] |= set(batch.token_versions[batch.loss_mask].tolist())

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: TrainBatch, i: int
    ) -> None:
        if batch.is_last:
            self.lags.append({part.total for part in batch.report.staleness})

    def on_validation_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.evaluated.append((trainer.global_step, self._engine.weights[-1][0]))


@pytest.mark.parametrize("lag", [1, 3])
def test_with_a_lag_of_k_every_token_of_step_j_has_version_j_minus_k(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag: int
) -> None:
    engine = DeterministicEngine()
    experiment = build_scripted(
        monkeypatch,
        configure(tmp_path, *SCRIPTED, *SYNC, f"sync.lag_versions={lag}", "eval.every_steps=2"),
        engine,
        InProcessScorer(judge_all),
    )
    record = RecordVersions(engine)
    experiment.trainer.callbacks.append(record)
    try:
        experiment.trainer.fit(experiment.module, datamodule=experiment.datamodule)
    finally:
        experiment.datamodule.close()
    assert record.trained == [{max(0, step - lag)} for step in range(STEPS)]
    assert record.lags == [{float(min(step, lag))} for step in range(STEPS)]
    # evaluations are of the present weights
    assert record.evaluated == [(step, step) for step in range(0, STEPS + 1, 2)]
    # and the engine never had the same version with two kinds of weights
    by_version: dict[int, Weights] = {}
    for version, weights in engine.weights:
        assert differing(by_version.setdefault(version, weights), weights) == []
    assert len(by_version) > lag + 1


def test_training_equals_a_plain_loop_bit_for_bit_at_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    through_lightning = weights_of_each_version(tmp_path / "a", monkeypatch, *SYNC)
    config = configure(tmp_path / "b", *SCRIPTED, *SYNC)
    scorer = InProcessScorer(judge_all)
    material = build_scripted(monkeypatch, config, DeterministicEngine(), scorer)
    plain = plain_training(
        material.module.policy,
        lease=material.datamodule._prompts.lease,
        decode=lambda ids: material.tokenizer.decode(ids, skip_special_tokens=True),
        config=config,
    )
    assert len(through_lightning) == len(plain) == STEPS + 1
    for version, (ours, expected) in enumerate(zip(through_lightning, plain, strict=True)):
        assert differing(ours, expected) == [], f"at version {version}"
    assert differing(plain[0], plain[-1]), "nothing was trained"


def test_asynchronous_training_without_lag_equals_synchronous_training_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synchronous = weights_of_each_version(tmp_path / "sync", monkeypatch, *SYNC)
    asynchronous = weights_of_each_version(tmp_path / "async", monkeypatch, *ASYNC_WITHOUT_LAG)
    assert len(synchronous) == len(asynchronous) == STEPS + 1
    for version, (one, other) in enumerate(zip(synchronous, asynchronous, strict=True)):
        assert differing(one, other) == [], f"at version {version}"


def weights_of_each_version(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str
) -> list[Weights]:
    """What a whole run published, by version."""
    engine = DeterministicEngine()
    config, scorer = configure(run_dir, *SCRIPTED, *overrides), InProcessScorer(judge_all)
    experiment = build_scripted(monkeypatch, config, engine, scorer)
    try:
        experiment.trainer.fit(experiment.module, datamodule=experiment.datamodule)
    finally:
        experiment.datamodule.close()
    assert [version for version, _ in engine.weights] == list(range(STEPS + 1))
    return [weights for _, weights in engine.weights]


def plain_training(
    policy: Any,
    *,
    lease: Callable[[], Prompt],
    decode: Callable[[Sequence[int]], str],
    config: Config,
) -> list[Weights]:
    """Generate, then train; no thread, no pool, no Lightning."""
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=config.optim.learning_rate, weight_decay=0.0, fused=True
    )
    history = [copy_of(policy)]
    for version in range(STEPS):
        groups: list[TrajectoryGroup] = []
        while len(groups) < GROUPS_PER_STEP:
            group = roll_out(lease(), history[-1], version, decode)
            if len({trajectory.score for trajectory in group.trajectories}) > 1:
                groups.append(group)
        batches = collate(
            sorted(groups, key=lambda group: group.prompt.uid),
            version=version,
            num_micro_batches=MICRO_BATCHES,
            pad_token_id=0,
            advantage="grpo",
            std_ddof=1,
        )
        for batch in batches:
            with attention_kernels(batch.input_ids):
                logprobs, _ = token_logprobs(
                    policy, batch.input_ids, batch.attention_mask, batch.loss_mask
                )
            losses = dapo_head(
                logprobs,
                batch.behavior_logprobs,
                batch.advantages,
                batch.loss_mask,
            )
            aggregate(
                losses,
                batch.loss_mask,
                mode="token-mean",
                num_tokens=batch.num_tokens_global,
                num_sequences=batch.num_sequences_global,
            ).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), config.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        history.append(copy_of(policy))
    return history


def roll_out(
    prompt: Prompt, weights: Weights, version: int, decode: Callable[[Sequence[int]], str]
) -> TrajectoryGroup:
    trajectories = []
    for tokens, logprobs in respond(weights, prompt.token_ids, GROUP_SIZE):
        score = judge(decode(tokens))
        trajectories.append(
            Trajectory(
                token_ids=tokens,
                token_versions=(version,) * len(tokens),
                behavior_logprobs=logprobs,
                completed_at=version,
                reward=score,
                score=score,
                truncated=False,
            )
        )
    return TrajectoryGroup(prompt=prompt, trajectories=tuple(trajectories))


def copy_of(policy: Any) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}


def differing(one: Weights, other: Weights) -> list[str]:
    """Names of the tensors that are not equal to the last bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
