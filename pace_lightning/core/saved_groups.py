"""Responses and groups as a checkpoint holds them: tensors, and primitives around them.

Loaded with ``weights_only``, and equal to the last bit to what was saved: a Python float is 64 bits
wide, and so are the tensors. A prompt is saved by its uid; whoever loads has its text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pace_lightning.core.trajectory import PolicyVersion, Prompt, Trajectory, TrajectoryGroup

Tokens = tuple[Sequence[int], Sequence[PolicyVersion], Sequence[float]]
"""Of one response: token ids, their versions, their behavior log-probs; equally long."""


def pack(responses: Iterable[Tokens]) -> dict[str, Tensor]:
    """The tokens of responses in four flat tensors: lengths, and what there is per token."""
    lengths, ids, versions, logprobs = array("q"), array("q"), array("q"), array("d")
    for token_ids, token_versions, token_logprobs in responses:
        lengths.append(len(token_ids))
        ids.extend(token_ids)
        versions.extend(token_versions)
        logprobs.extend(token_logprobs)
    return {
        "lengths": _tensor(lengths),
        "token_ids": _tensor(ids),
        "versions": _tensor(versions),
        "logprobs": _tensor(logprobs),
    }


def _tensor(values: array[Any]) -> Tensor:
    """Without a copy; the engine stands still meanwhile."""
    dtype = torch.float64 if values.typecode == "d" else torch.int64
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)


def unpack(
    packed: Mapping[str, Any],
) -> list[tuple[list[int], list[PolicyVersion], list[float]]]:
    """The inverse of `pack`.

    Raises:
        ValueError: if this cannot have been packed.
    """
    parts = {}
    for name, whole in (("lengths", 1), ("token_ids", 1), ("versions", 1), ("logprobs", 0)):
        tensor = packed[name]
        dtype = torch.int64 if whole else torch.float64
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tensor.dim() != 1:
            raise ValueError(f"{name} of responses is {tensor!r:.80}; needed a vector of {dtype}")
        if whole and bool((tensor < 0).any()):
            raise ValueError(f"{name} of responses has the negative value {int(tensor.min())}")
        parts[name] = tensor
    lengths = parts.pop("lengths").tolist()
    sizes = {name: len(tensor) for name, tensor in parts.items()}
    if {*sizes.values()} != {sum(lengths)}:
        raise ValueError(f"responses of {sum(lengths)} tokens in all, but there are {sizes}")
    ids, versions, logprobs = (tensor.tolist() for tensor in parts.values())
    return [
        (ids[end - length : end], versions[end - length : end], logprobs[end - length : end])
        for end, length in zip(accumulate(lengths), lengths, strict=True)
    ]


def group_state(group: TrajectoryGroup) -> dict[str, Any]:
    """A ready group, but for the prompt's text."""
    trajectories = group.trajectories
    return {
        "uid": group.prompt.uid,
        "tokens": pack((t.token_ids, t.token_versions, t.behavior_logprobs) for t in trajectories),
        "completed_at": [t.completed_at for t in trajectories],
        "rewards": [float(t.reward) for t in trajectories],
        "scores": [float(t.score) for t in trajectories],
        "truncated": [bool(t.truncated) for t in trajectories],
        "prefix_forgetting": [t.prefix_forgetting for t in trajectories],
    }


def group_from_state(state: Mapping[str, Any], prompt: Prompt) -> TrajectoryGroup:
    """The inverse of `group_state`.

    Raises:
        ValueError: if it is damaged.
    """
    names = ("completed_at", "rewards", "scores", "truncated", "prefix_forgetting")
    columns = zip(unpack(state["tokens"]), *(state[name] for name in names), strict=True)
    trajectories = tuple(
        Trajectory(
            token_ids=tuple(ids),
            token_versions=tuple(versions),
            behavior_logprobs=tuple(logprobs),
            completed_at=required(completed_at, int, "completed_at"),
            reward=required(reward, float, "a reward"),
            score=required(score, float, "a score"),
            truncated=required(truncated, bool, "truncated"),
            prefix_forgetting=(
                None if forgetting is None else required(forgetting, float, "prefix_forgetting")
            ),
        )
        for (ids, versions, logprobs), completed_at, reward, score, truncated, forgetting in columns
    )
    if not trajectories:
        raise ValueError(f"the saved group of prompt {prompt.uid} has no response")
    return TrajectoryGroup(prompt, trajectories)


def required(value: Any, kind: type, what: str) -> Any:
    """The value, if it is just of this type and not NaN; else a ValueError that names it."""
    if type(value) is not kind or value != value:
        raise ValueError(f"{what} is {value!r:.80}; needed {kind.__name__}")
    return value
