"""The part of `build` that is about the task: prompts, scoring, samples to look at."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from pace_lightning.config import Config, ConfigError, SourceConfig
from pace_lightning.core.advantages import soft_overlong_penalty
from pace_lightning.core.trajectory import Fate, Prompt, TrajectoryGroup
from pace_lightning.rollout.engine import Completion
from pace_lightning.rollout.groups import ScoringFailedError
from pace_lightning.tasks.prompts import PromptRow, tokenize_prompts
from pace_lightning.tasks.scoring import ErrorBudget, ScorerError, ScorerPool, ScorerTimeout
from pace_lightning.tasks.sources import load_rows, normalize_rows, prompt_text, split_held_out
from pace_lightning.training.warm_start import warm_start


def prompts_of(
    config: Config, tokenizer: Any, emit: Callable[[str], None]
) -> tuple[list[PromptRow], list[PromptRow]]:
    """Tokenized training and held-out prompts."""
    data = config.data

    def rows_of(sources: Sequence[SourceConfig]) -> list[dict[str, Any]]:
        return [
            row
            for source in sources
            for row in normalize_rows(
                load_rows(
                    source.path,
                    split=source.split,
                    size=source.size,
                    seed=source.seed,
                    options=dict(source.options),
                ),
                prompt_column=data.prompt_column,
                answer_column=data.answer_column,
                source=source.path,
            )
        ]

    held_out = 0 if data.eval_sources else data.held_out
    train, evaluation = split_held_out(
        rows_of(data.sources), num_held_out=held_out, seed=config.seed
    )
    if data.eval_sources:
        evaluation = rows_of(data.eval_sources)
        asked = {prompt_text(row["prompt"]).strip() for row in evaluation}
        num_before = len(train)
        train = [row for row in train if prompt_text(row["prompt"]).strip() not in asked]
        if len(train) < num_before:
            emit(f"dropped {num_before - len(train)} training prompts that evaluation asks too")
        if not train:
            raise ConfigError("data.eval_sources holds every prompt of data.sources: none is left")
    tokenize = functools.partial(
        tokenize_prompts,
        tokenizer_fn=_tokenizer_fn(config, tokenizer),
        template=data.template,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,
    )
    train_rows, num_skipped = tokenize(train)
    eval_rows, num_eval_skipped = tokenize(evaluation) if evaluation else ([], 0)
    epochs, needed = data.epochs, config.trainer.groups_per_step
    if epochs is not None and epochs * len(train_rows) < needed:
        raise ConfigError(
            f"data.epochs {epochs} x {len(train_rows)} prompts = {epochs * len(train_rows)}, but "
            f"one step needs trainer.groups_per_step {needed}: no step could ever be taken"
        )
    emit(f"{len(train_rows)} training prompts, {len(eval_rows)} held out")
    if num_skipped or num_eval_skipped:
        emit(
            f"skipped {num_skipped} training and {num_eval_skipped} held-out prompts of more than "
            f"{data.max_prompt_tokens} tokens"
        )
    return train_rows, eval_rows


def _tokenizer_fn(
    config: Config, tokenizer: Any
) -> Callable[[str | list[dict[str, str]]], list[int]]:
    data = config.data

    def tokenize(content: str | list[dict[str, str]]) -> list[int]:
        if not data.chat_template:
            if not isinstance(content, str):
                raise ConfigError(
                    "data.chat_template is false, but a prompt is a list of chat messages"
                )
            return list(tokenizer(content, add_special_tokens=False).input_ids)
        messages = (
            [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        )
        if data.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": data.system_prompt}, *messages]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    if data.chat_template and tokenizer.chat_template is None:
        raise ConfigError(
            "data.chat_template is true, but the tokenizer of model.path has no chat template"
        )
    return tokenize


def warm_started(
    config: Config, tokenizer: Any, num_threads: int, emit: Callable[[str], None]
) -> Path:
    """The directory of the model after the supervised run of ``model.warm_start``."""
    settings, data = config.model.warm_start, config.data
    assert settings.path is not None  # checked with the configuration
    rows = normalize_rows(
        load_rows(settings.path),
        prompt_column=data.prompt_column,
        answer_column=settings.completion_column,
        source=settings.path,
    )
    prompts, _ = tokenize_prompts(
        rows,
        tokenizer_fn=_tokenizer_fn(config, tokenizer),
        template=data.template,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,
    )
    solutions = tokenizer([row.columns["answer"] for row in prompts], add_special_tokens=False)
    examples = [
        (list(row.token_ids), [*solution, tokenizer.eos_token_id])
        for row, solution in zip(prompts, solutions.input_ids, strict=True)
    ]
    return warm_start(
        config.model.path,
        examples,
        tokenizer=tokenizer,
        steps=settings.steps,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        seed=settings.seed,
        random_init=config.model.random_init,
        attention=config.model.attention,
        num_threads=num_threads,
        emit=emit,
    )


def judge(
    scorer: ScorerPool, tokenizer: Any, budget: ErrorBudget
) -> Callable[[Prompt, Sequence[Completion]], Awaitable[Sequence[float]]]:
    """Decode and score the responses to one prompt; failures are charged to the budget."""

    async def score(prompt: Prompt, completions: Sequence[Completion]) -> Sequence[float]:
        texts = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
        try:
            scores = await scorer.score_async(prompt.content, texts, prompt.columns)
        except ScorerTimeout as error:
            budget.record(ok=False, error=error)
            raise ScoringFailedError(str(error), Fate.SCORER_TIMEOUT) from error
        except ScorerError as error:
            budget.record(ok=False, error=error)
            raise ScoringFailedError(str(error), Fate.SCORER_ERROR) from error
        budget.record(ok=True)
        return scores

    return score


def shape_reward(config: Config) -> Callable[[float, int], float]:
    """From score and length to the reward that is trained on."""
    if not config.reward.overlong_penalty_tokens:
        return lambda score, _: score
    penalty = functools.partial(
        soft_overlong_penalty,
        max_tokens=config.rollout.max_new_tokens,
        cache_tokens=config.reward.overlong_penalty_tokens,
        factor=config.reward.overlong_penalty_factor,
    )
    return lambda score, num_tokens: score + penalty(num_tokens)


def sample_writer(
    config: Config, path: Path, tokenizer: Any
) -> Callable[[int, Sequence[TrajectoryGroup]], None]:
    """Dumps one drawn group as text every few steps."""
    every = config.logging.samples_every_steps

    def write(version: int, groups: Sequence[TrajectoryGroup]) -> None:
        if not every or version % every:
            return
        group = groups[0]
        line = {
            "version": version,
            "prompt": tokenizer.decode(group.prompt.token_ids),
            "answer": group.prompt.columns.get("answer"),
            "responses": [
                {
                    "text": tokenizer.decode(t.token_ids),
                    "score": t.score,
                    "reward": t.reward,
                    "versions": [min(t.token_versions), max(t.token_versions)],
                }
                for t in group.trajectories
            ],
        }
        with path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")

    return write
