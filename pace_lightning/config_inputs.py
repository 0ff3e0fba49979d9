"""Refuse settings of model and data that cannot go together; a part of `config_checks`."""

from __future__ import annotations

from collections.abc import Iterator

from pace_lightning.config import Config


def model_problems(config: Config) -> Iterator[str]:
    """Settings of the model that cannot go together, or that nobody would read."""
    if config.model.attention == "eager" and config.admission.policy == "pace":
        yield (
            "model.attention is eager, with which the local engine cannot re-score prefixes for "
            "admission.policy pace; use sdpa"
        )
    if config.model.warm_start.steps > 0 and config.model.warm_start.path is None:
        yield (
            "model.warm_start.steps is set, but model.warm_start.path is not; name a file of "
            "worked solutions"
        )
    if config.data.system_prompt is not None and not config.data.chat_template:
        yield "data.system_prompt is set, but data.chat_template is false: nobody would see it"
    if config.model.shared_prompts and config.model.gradient_checkpointing:
        yield (
            "model.shared_prompts and model.gradient_checkpointing are both true, but the first "
            "keeps the keys and values that the second recomputes; choose one"
        )
    if config.model.pack_rows and not config.model.attention.startswith("flash_attention"):
        yield (
            f"model.pack_rows is true, but model.attention {config.model.attention} computes what "
            "packed rows must not see; set model.attention: flash_attention_2"
        )
    if config.model.pack_rows and config.model.shared_prompts:
        yield "model.pack_rows and model.shared_prompts are both true; choose one"
    lora = config.model.lora
    if lora.rank == 0 and (lora.alpha is not None or lora.target_modules):
        yield (
            "model.lora.alpha or model.lora.target_modules is set, but model.lora.rank is 0, which "
            "means no adapters; set a rank, for example 16"
        )
    if lora.rank and config.sync.lag_versions and config.loss.proximal == "snapshot":
        yield (
            f"model.lora.rank is {lora.rank} and sync.lag_versions {config.sync.lag_versions}, but "
            "loss.proximal snapshot copies adapters as they are published, which is later then; "
            "use loss.proximal recompute or none"
        )
    if len(set(lora.target_modules)) < len(lora.target_modules):
        yield f"model.lora.target_modules is {list(lora.target_modules)}; name each layer once"


def data_problems(config: Config) -> Iterator[str]:
    """Prompts that nothing would be left of, or whose number nobody gave."""
    data = config.data
    if not data.sources:
        yield "data.sources is empty; add at least one: sources: [{path: data/prompts.jsonl}]"
    lists = (("data.sources", data.sources), ("data.eval_sources", data.eval_sources))
    for path, sources in lists:
        for index, source in enumerate(sources):
            if source.size is not None and source.size < 1:
                yield f"{path}[{index}].size is {source.size}; it must be at least 1"
            if source.size is None and source.path.startswith("reasoning_gym:"):
                yield f"{path}[{index}].size is not set: how many prompts should be generated?"
    if data.eval_sources and data.held_out:
        yield (
            f"data.held_out is {data.held_out}, but data.eval_sources is set and replaces it; "
            "remove one of the two"
        )
    sizes = [source.size for source in data.sources]
    total = sum(size for size in sizes if size is not None)
    if sizes and None not in sizes and not data.eval_sources and data.held_out >= total > 0:
        yield (
            f"data.held_out is {data.held_out}, but the sources have {total} prompts in all: "
            "nothing is left to train on"
        )
