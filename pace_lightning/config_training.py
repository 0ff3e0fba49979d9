"""The part of the schema about training: objective, optimizer, loop, evaluation, logging.

See ``config`` for the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class LossConfig:
    """The objective."""

    objective: str = "dapo"
    """The trust-region head, by its name in docs/methods.md: ``dapo``, ``grpo``, ``m2po`` ..."""
    objective_settings: dict[str, Any] = field(default_factory=dict)
    """Of the head, by name; what is not set has the default of the head's source."""
    clip_low: float | None = None
    """The ratio is clipped below 1 - ``clip_low``. None: the head's default."""
    clip_high: float | None = None
    """The ratio is clipped above 1 + ``clip_high``. None: the head's default."""
    dual_clip: float | None = None
    """Above 1: cap of the ratio for negative advantages. None: the head's default."""
    advantage: str = "grpo"
    """``grpo``, ``dr_grpo``, ``rloo``, ``opo``, ``opob`` (VCPO), ``reinforce_plus_plus`` or
    ``reinforce_plus_plus_baseline``."""
    advantage_settings: dict[str, Any] = field(default_factory=dict)
    """Of ``opob`` and ``reinforce_plus_plus``, by name."""
    std_ddof: int = 1
    """0 or 1: the group's standard deviation divides by G or by G - 1."""
    proximal: str = "none"
    """What the ratio is taken to.

    ``none``: the behavior policy; else where the proximal policy comes from: ``recompute``,
    ``loglinear``, ``linear``, ``ewma``, ``snapshot`` or ``interruption``.
    """
    proximal_settings: dict[str, Any] = field(default_factory=dict)
    corrections: list[Any] = field(default_factory=list)
    """Off-policy corrections, each a name and its settings: ``[{name: tis, cap: 2.0}]``."""
    normalize_weights: bool = False
    """Divide the corrections' weights by their mean over the step."""
    mask_denominator: str = "original"
    """Counts every trained token (``original``), or those that no correction rejects (``kept``)."""
    aggregation: str = "token-mean"
    """``token-mean``: the mean over all response tokens of the step."""
    kl_coef: float = 0.0
    """Weight of the k3 KL penalty to the initial weights; 0: no reference model is kept."""
    mask_truncated: bool = False
    """Overlong filtering: truncated responses carry no loss."""


@dataclass
class OptimConfig:
    """AdamW."""

    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    warmup_steps: int = 0
    """Steps of linear warm-up; the rate is constant afterwards."""
    max_grad_norm: float = 1.0
    """0: no clipping."""
    ess_scaling: str = "none"
    """VCPO: the step's rate times the share of the effective sample size of its responses.

    ``sqrt`` of that share (Adam), or the share itself, ``linear`` (SGD).
    """
    ess_base: float = 1.0
    """Share at and above which the rate is not reduced."""
    ess_ratio_cap: float | None = None
    """Cap of a response's ratio in the effective sample size. None: no cap."""
    stale_budget: float | None = None
    """Bound on learning rate times mean lag of a step, in versions. None: no limit."""
    lifetime_budget: float | None = None
    """Bound on the sum of the learning rates of a run: a step takes at most its part of what is
    left of it. None: no limit."""


@dataclass
class SyncConfig:
    """Weight publication."""

    every_steps: int = 1
    """Optimizer steps from one publication to the next."""
    lag_versions: int = 0
    """In mode sync: generate with the weights of exactly so many versions before.

    For experiments on data of a known age; the first steps use the initial weights. Keeps one copy
    of the weights per version.
    """


@dataclass
class TrainerConfig:
    """The training loop."""

    steps: int = 20
    """Optimizer steps, i.e. policy versions."""
    groups_per_step: int = 8
    """B: groups drawn from the pool for one optimizer step."""
    micro_batches: int = 4
    """Parts of each rank's share of a step; gradients are accumulated: more parts, less memory."""
    devices: int = 1
    """Ranks on each machine: one process each, with a GPU of its own where there are GPUs."""
    num_nodes: int = 1
    """Machines; above 1, torchrun or SLURM starts the processes."""
    strategy: str = "auto"
    """How ranks share the work: ``ddp``, ``fsdp`` or ``deepspeed_stage_1``, ``_2``, ``_3``.

    ``auto``: ddp, or none at all with a single rank.
    """
    offload: str = "none"
    """With deepspeed: ``optimizer`` states, or ``parameters`` too (stage 3), in host memory."""
    precision: str = "32-true"
    """``32-true`` or ``bf16-mixed``."""
    min_step_seconds: float = 0.0
    """Forward, backward and optimizer step take at least so long: the trainer sleeps for the rest.

    For experiments on staleness with small models: it paces training as a larger model would, so
    that generation outruns it.
    """
    draw_timeout_seconds: float = 900.0
    """How long one step may wait for its groups."""
    watchdog_seconds: float | None = None
    """Without any progress for so long, the run says who waits for whom, and ends.

    None: twice the longest of the deadlines that it backs up; 0: never.
    """
    max_empty_groups: int = 256
    """Groups in a row without gradient before a draw gives up."""
    on_nothing_to_learn: str = "error"
    """``error`` or ``finish``."""
    checkpoint_every_steps: int = 0
    """Resumable checkpoints; 0: none, only the model at the end."""
    keep_checkpoints: int = 2
    num_threads: int | None = None
    """Intra-op threads of the trainer on CPU. None: half of the cores (async), all (sync)."""
    engine_threads: int | None = None
    """Intra-op threads of the engine while the trainer computes. None: as above."""


@dataclass
class EvalConfig:
    """Held-out evaluation."""

    samples: int = 4
    """Responses to each held-out prompt; the score is their mean."""
    every_steps: int = 0
    """0: only before and after training."""
    temperature: float = 1.0
    max_new_tokens: int | None = None
    """None: ``rollout.max_new_tokens``."""
    timeout_seconds: float = 1800.0


@dataclass
class LoggingConfig:
    """What is written, beside TensorBoard events and ``draws.jsonl``."""

    samples_every_steps: int = 5
    """Dump one group as text to ``samples.jsonl``; 0: never."""
    level: str = "info"
    """``debug``, ``info``, ``warning`` or ``error``."""
