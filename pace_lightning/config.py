"""The whole schema of an experiment: every key, its type, its default and its unit.

An experiment is one YAML file, with at most one level of ``extends:``, plus ``key=value``
overrides. ``config_load`` merges them into the schema below, so that an unknown key or a wrong type
is refused with its path before anything starts; ``config_checks`` refuses combinations that cannot
work; ``config_explain`` derives the numbers that follow from a configuration.

Only ``build.py`` and the command modules import these four: the classes of the system take flat,
named arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from pace_lightning.config_training import (
    EvalConfig,
    LoggingConfig,
    LossConfig,
    OptimConfig,
    SyncConfig,
    TrainerConfig,
)


class ConfigError(ValueError):
    """A configuration that cannot be used; its message is written for the person who edits it."""


class Mode(StrEnum):
    """Whether generation may run ahead of training."""

    ASYNC = "async"
    SYNC = "sync"


class KVCache(StrEnum):
    """What happens to the KV cache of running sequences when new weights arrive."""

    RECOMPUTE = "recompute"
    KEEP = "keep"


@dataclass
class WarmStartConfig:
    """A short supervised run before RL, for models that cannot do the task at all yet.

    Its result is cached by content, so that it is made once; off while ``steps`` is 0.
    """

    path: str | None = None
    """A .jsonl or .parquet file of worked solutions."""
    completion_column: str = "solution"
    """What the model learns to answer to ``data.prompt_column``."""
    steps: int = 0
    batch_size: int = 64
    learning_rate: float = 1e-3
    """Peak; linear warm-up over a tenth of the steps, then linear decay."""
    seed: int = 0
    """Of its own, so that runs of different seeds start from the same weights."""


@dataclass
class LoraConfig:
    """Low-rank adapters: the only weights that are trained; engines get them merged with the rest.

    There is no dropout: the policy that is trained is the policy that samples.
    """

    rank: int = 0
    """0: no adapters, all weights are trained."""
    alpha: float | None = None
    """Updates are scaled by ``alpha / rank``. None: 2 x ``rank``."""
    target_modules: list[str] = field(default_factory=list)
    """Linear layers that get one, by name (``q_proj``). Empty: all but the output head."""


@dataclass
class ModelConfig:
    """The policy."""

    path: str = MISSING
    """Local directory, GGUF file, hub id, or ``package:NAME/FILE``.

    The last form is a file inside an installed Python package.
    """
    random_init: bool = False
    """Build the architecture of ``path`` with random weights (seeded by ``seed``)."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    attention: str = "sdpa"
    """The attention implementation, by the name transformers gives it."""
    gradient_checkpointing: bool = False
    shared_prompts: bool | None = None
    """Compute the prompt that a group's responses share once.

    None: yes, unless gradient checkpointing or ``pack_rows`` is on.
    """
    pack_rows: bool = False
    """Lay the rows of a micro-batch end to end, so that no padding is computed.

    On GPUs, with an ``attention`` of variable lengths, ``flash_attention_2`` or ``_3``.
    """
    fused_logprobs: bool = False
    """Compute log-probs by Liger's fused kernel, which never holds the logits; on GPUs."""
    logprob_chunk_tokens: int = 1024
    """Tokens whose vocabulary row is held in memory at once."""


@dataclass
class SourceConfig:
    """One source of prompts."""

    path: str = MISSING
    """A .jsonl or .parquet file, a hub id, or ``reasoning_gym:NAME``."""
    split: str = "train"
    size: int | None = None
    """Rows to take (hub, files) or to generate (reasoning_gym, where it is required)."""
    seed: int = 0
    """Of the generator."""
    options: dict[str, Any] = field(default_factory=dict)
    """Passed to the generator or to ``datasets.load_dataset``."""


@dataclass
class DataConfig:
    """Prompts: where they come from and how they are put to the model."""

    sources: list[SourceConfig] = field(default_factory=list)
    eval_sources: list[SourceConfig] = field(default_factory=list)
    """Held-out prompts. Empty: ``held_out`` prompts are taken out of ``sources``."""
    held_out: int = 0
    """Distinct prompts held out by text when ``eval_sources`` is empty."""
    prompt_column: str = "prompt"
    """A string, or a list of chat messages."""
    answer_column: str = "answer"
    system_prompt: str | None = None
    template: str = "{prompt}"
    """Wrapped around string prompts before the chat template."""
    chat_template: bool = True
    """False: the prompt's text goes to the tokenizer as it is."""
    max_prompt_tokens: int = 512
    overlong_prompts: str = "refuse"
    """``refuse``: end with a message; ``skip``: drop them and say how many."""
    epochs: int | None = None
    """None: endless."""


@dataclass
class RewardConfig:
    """How responses are judged."""

    function: str = MISSING
    """``module:function``; called as ``fn(prompts, completions, **columns) -> list[float]``."""
    paths: list[str] = field(default_factory=list)
    """Directories to import it from, beside ``PYTHONPATH`` and the installed packages."""
    environment: list[str] = field(default_factory=list)
    """Environment variables it needs. It sees no others but harmless ones: no keys, no tokens."""
    memory_gib: float = 4.0
    """Of one scoring process; more is an error of the function, not a reward of 0."""
    num_workers: int = 1
    """Processes that score groups at the same time."""
    timeout_seconds: float = 20.0
    """For one group, from the moment its scoring starts; its CPU time may not be more, either."""
    startup_timeout_seconds: float = 60.0
    """For the import of the function's module in a scoring process."""
    max_error_share: float = 0.1
    """Share of recent groups whose scoring may raise or time out before the run stops."""
    overlong_penalty_tokens: int = 0
    """Width of DAPO's soft punishment zone before ``rollout.max_new_tokens``; 0: off."""
    overlong_penalty_factor: float = 1.0
    """Penalty at ``rollout.max_new_tokens``, where the zone ends."""


@dataclass
class EngineConfig:
    """What generates."""

    kind: str = "local"
    """``vllm``, ``local`` (transformers), or ``auto``: vLLM if it is installed."""
    devices: list[int] | None = None
    """GPUs of vLLM, tensor parallel. None: those the trainer leaves, or all if it leaves none."""
    transfer: str = "auto"
    """How weights reach vLLM: ``file`` (shared memory), ``ipc`` or ``nccl`` (GPUs).

    ``auto``: ``file`` on CPU; on GPUs ``ipc`` where trainer and engine share one, else ``nccl``.
    """
    dtype: str = "auto"
    """``auto``: bfloat16 if the trainer runs in bf16, else float32."""
    kv_cache: KVCache = KVCache.RECOMPUTE
    max_running: int = 64
    """Sequences decoded at once."""
    max_batch_tokens: int = 512
    """Prefill and decode tokens of one engine step."""
    cache_tokens: int | None = None
    """KV cache size.

    None: enough for ``max_running`` sequences of full length; with vLLM on GPUs what it finds free.
    """
    startup_timeout_seconds: float = 120.0
    publish_timeout_seconds: float = 120.0
    """For one publication of weights: pause, load, verify, resume."""
    max_retries: int = 3
    """Failed requests of one group that are asked again; then the group has failed."""
    max_restarts: int = 2
    """Restarts of a dead engine during one run, at the version it had; then the run ends.

    Above 0, an engine with processes of its own has a copy of the published weights kept for it.
    """


@dataclass
class RolloutConfig:
    """What is asked of the engine, and how far ahead of training."""

    group_size: int = 8
    """G: responses to one prompt, over which the baseline is taken."""
    max_new_tokens: int = 256
    """Per response."""
    temperature: float = 1.0
    max_outstanding_groups: int | None = None
    """Groups in flight plus groups ready.

    None with ``eta`` None: twice ``trainer.groups_per_step``.
    """
    eta: int | None = None
    """AReaL's bound on how many versions generation may run ahead.

    None: ``max_outstanding_groups`` alone decides. Mode ``sync`` implies 0.
    """
    timeout_seconds: float = 600.0
    """For one group, from dispatch to its last token."""
    on_timeout: str = "settle"
    """What becomes of a group past its deadline.

    ``settle``: it ends as timed_out; ``retry``: its missing responses are asked for once more, then
    it is settled; ``complete``: it is trained on with the responses that are finished, which favors
    short ones, or settled if there are fewer than ``min_responses``.
    """
    min_responses: int = 2
    """Finished responses that ``on_timeout: complete`` needs."""
    dynamic_sampling: bool = True
    """Drop groups whose scores are all equal, before they reach the pool."""


@dataclass
class AdmissionConfig:
    """Which ready groups a draw may use."""

    policy: str = "all"
    """Which ready groups a draw may use.

    ``all``: oldest first; ``max_lag``: no group of a larger lag; ``pace``: see section ``pace``.
    """
    max_lag: int | None = None
    """In policy versions; needs a dispatch bound ``rollout.eta`` of at most the same."""


@dataclass
class PaceConfig:
    """PACE (arXiv:2609.36830): how many ready groups to reject, and which.

    Used with ``admission.policy: pace``.
    """

    target_groups: int | None = None
    """Occupancy above which groups are rejected. None: ``trainer.groups_per_step``."""
    excess: str = "occupancy"
    """``occupancy``: 1 - target/N; ``target``: N/target - 1, at most 1."""
    smoothing: float = 0.2
    """Weight of the newest draw in the average of the excess."""
    rate_max: float = 0.5
    """Largest rejected share of what a draw takes."""
    reserve_groups: int = 0
    """Ready groups that rejection must leave beside the draw."""
    ranking: str = "effective"
    """``effective``, ``raw`` (whole lag) or ``generation``."""
    gamma: float = 4.0
    """Sharpening of the drift percentile."""
    group_score: str = "mean"
    """``mean`` or ``max`` over the group's trajectories."""
    forgetting: str = "absolute"
    """Prefix forgetting score: ``absolute``, ``drop`` or ``signed`` change of log-probs."""
    forgetting_aggregate: str = "last"
    """Over publications: ``last``, ``max`` or ``token_weighted``."""
    window: int | None = None
    """Recent scores that give the percentile. None: max(1024, 4 x groups per step x group size)."""
    window_minimum: int = 64
    """Below so many scores every weight is 1."""
    no_score: str = "raw"
    """A trajectory that met no publication: ``raw`` (weight 1) or ``zero`` (has not drifted)."""
    aging_limit: int | None = None
    """A prompt rejected so often is admitted next; an addition to the paper, off by default."""


@dataclass
class Config:
    """One experiment."""

    name: str = MISSING
    mode: Mode = Mode.ASYNC
    seed: int = 0
    run_dir: str | None = None
    """None: ``runs/<name>/<timestamp>``."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    pace: PaceConfig = field(default_factory=PaceConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
