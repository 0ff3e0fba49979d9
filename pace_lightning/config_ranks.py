"""What a configuration says about ranks: how many, by which strategy, what does not go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pace_lightning.config import Config
from pace_lightning.config_load import nearest, show

DEEPSPEED = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
STRATEGIES = ("auto", "ddp", "fsdp", *DEEPSPEED)
OFFLOADS = ("none", "optimizer", "parameters")

SLACK_SECONDS = 60.0
"""What rank 0 may take beside its deadlines between two messages."""


def num_ranks(config: Config) -> int:
    """Processes that train, on all machines."""
    return config.trainer.devices * config.trainer.num_nodes


def chosen_strategy(config: Config) -> str:
    """The strategy of a run; ``auto`` is left for a single rank only."""
    strategy = config.trainer.strategy
    return "ddp" if strategy == "auto" and num_ranks(config) > 1 else strategy


def is_sharded(config: Config) -> bool:
    """Whether no rank holds the whole weights."""
    return config.trainer.strategy in ("fsdp", "deepspeed_stage_3")


def message_timeout(config: Config) -> float:
    """Seconds that the other ranks wait for the next message of rank 0.

    Between two messages rank 0 waits for a draw, an evaluation or a publication, and for a start or
    restarts of the engine in it; each has its own deadline, and ends with a message.
    """
    engine = config.engine
    revival = engine.startup_timeout_seconds + engine.publish_timeout_seconds
    return (
        SLACK_SECONDS
        + max(
            config.trainer.draw_timeout_seconds,
            config.eval.timeout_seconds,
            engine.startup_timeout_seconds + engine.publish_timeout_seconds,
        )
        + engine.max_restarts * revival
    )


def launched_by_others(environment: Mapping[str, str]) -> bool:
    """Whether this process is a rank already: torchrun, SLURM or our own launcher started it."""
    in_slurm = (
        int(environment.get("SLURM_NTASKS", "1")) > 1
        and "SLURM_PROCID" in environment
        and environment.get("SLURM_JOB_NAME") not in ("bash", "interactive")
    )
    return "LOCAL_RANK" in environment or in_slurm


def launched_ranks(environment: Mapping[str, str]) -> int | None:
    """How many ranks whoever started this process says that there are; None: it does not say."""
    name = "WORLD_SIZE" if "LOCAL_RANK" in environment else "SLURM_STEP_NUM_TASKS"
    number = environment.get(name)
    return None if number is None else int(number)


def rank_problems(config: Config) -> Iterator[str]:
    """What cannot work, as sentences."""
    trainer, loss = config.trainer, config.loss
    for path, value, choices in (
        ("trainer.strategy", trainer.strategy, STRATEGIES),
        ("trainer.offload", trainer.offload, OFFLOADS),
    ):
        if value not in choices:
            yield f"{path} is {show(value)}; {nearest(value, choices)}"
    for path, count in (
        ("trainer.devices", trainer.devices),
        ("trainer.num_nodes", trainer.num_nodes),
    ):
        if count < 1:
            yield f"{path} is {count}; it must be at least 1"
    responses = trainer.groups_per_step * config.rollout.group_size
    ranks = num_ranks(config)
    if ranks > 1 and ranks * trainer.micro_batches > responses > 0:
        yield (
            f"trainer.micro_batches is {trainer.micro_batches} on each of {ranks} ranks, "
            f"{ranks * trainer.micro_batches} in all, but a step has only "
            f"{trainer.groups_per_step} groups x {config.rollout.group_size} = {responses} "
            "responses"
        )
    if trainer.strategy == "fsdp" and ranks == 1:
        yield "trainer.strategy is fsdp, but there is one rank: nothing to shard; use auto"
    if trainer.offload != "none" and trainer.strategy not in DEEPSPEED:
        yield (
            f"trainer.offload is {trainer.offload}, but trainer.strategy {trainer.strategy} keeps "
            "everything on its device; use a deepspeed strategy"
        )
    if trainer.offload == "parameters" and trainer.strategy != "deepspeed_stage_3":
        yield (
            f"trainer.offload is parameters, but trainer.strategy {trainer.strategy} does not "
            "partition them; use deepspeed_stage_3, or offload: optimizer"
        )
    if is_sharded(config) and loss.proximal in ("ewma", "snapshot", "interruption"):
        yield (
            f"loss.proximal is {loss.proximal}, which keeps copies of whole weights, but "
            f"trainer.strategy {trainer.strategy} gives each rank a part of them; use ddp or "
            "deepspeed_stage_2"
        )
    elif ranks > 1 and loss.proximal == "interruption":
        yield (
            f"loss.proximal is interruption, whose scores are with rank 0, but there are {ranks} "
            "ranks that train; use snapshot or recompute"
        )
    if trainer.strategy == "deepspeed_stage_3" and config.model.fused_logprobs:
        yield (
            "model.fused_logprobs is true, whose kernel takes the output head's weight, but "
            "trainer.strategy deepspeed_stage_3 leaves it with its ranks; use fsdp, or turn it off"
        )
    if is_sharded(config) and config.model.lora.rank:
        yield (
            f"model.lora.rank is {config.model.lora.rank}, but trainer.strategy {trainer.strategy} "
            "partitions weights, most of which are frozen then; use ddp or deepspeed_stage_2"
        )
    if trainer.strategy in ("fsdp", *DEEPSPEED) and loss.advantage_settings.get("norms") == "exact":
        yield (
            "loss.advantage_settings.norms is exact, which needs the whole gradient of each "
            f"response, but trainer.strategy {trainer.strategy} gives each rank a part of it; use "
            "ddp, or norms: proxy"
        )
