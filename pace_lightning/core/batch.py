"""From one draw of groups to a fixed number of padded micro-batches.

Shapes:

    N   rows (responses) of a micro-batch
    T   tokens of its longest row, prompt and response together

Alignment: position t of every tensor belongs to token t. The network predicts token t at position
t - 1, so position 0 is never trained. A row is prompt, response, padding, in this order:

    input_ids          p p p r r r r . .
    attention_mask     1 1 1 1 1 1 1 0 0
    loss_mask          0 0 0 1 1 1 1 0 0
    token_versions    -1-1-1 v v v v-1-1

One draw always gives the same number of micro-batches, whatever its lengths: the number of backward
passes per optimizer step is fixed. If there are fewer responses than micro-batches, the rest hold
one zero-weight row each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pace_lightning.core.draw_advantages import draw_advantages
from pace_lightning.core.trajectory import TrajectoryGroup

ZERO_WEIGHT_TOKENS = 2
"""Length of a zero-weight row: the shortest in which one token predicts another."""


class TrainBatch:
    """The padded tensors of one micro-batch, and what is known of the whole draw.

    A plain class on purpose. Lightning walks into dicts, tuples, named tuples and dataclasses: half
    precision plugins then cast every float tensor to bfloat16, log-probs included, and a frozen
    dataclass raises. It treats an object of a plain class as one leaf, and moves it with `to`.
    """

    __slots__ = (
        "advantages",
        "attention_mask",
        "behavior_logprobs",
        "followers",
        "group_ids",
        "input_ids",
        "loss_mask",
        "micro_batch_index",
        "num_micro_batches",
        "num_sequences_global",
        "num_tokens_global",
        "peer_tokens",
        "prompt_lengths",
        "report",
        "rewards",
        "token_versions",
        "version",
    )

    def __init__(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        behavior_logprobs: Tensor,
        advantages: Tensor,
        token_versions: Tensor,
        prompt_lengths: Tensor,
        rewards: Tensor,
        group_ids: Tensor,
        version: int,
        num_tokens_global: int,
        num_sequences_global: int,
        micro_batch_index: int,
        num_micro_batches: int,
        report: Any = None,
    ) -> None:
        """Keep the parts.

        Args:
            input_ids: int64; shape ``(N, T)``.
            attention_mask: int64, 1 at tokens and 0 at padding; shape ``(N, T)``.
            loss_mask: boolean, True exactly at the trained tokens; shape ``(N, T)``.
            behavior_logprobs: log mu in float32, 0 where nothing was sampled; shape ``(N, T)``.
            advantages: float32, 0 where nothing was sampled; shape ``(N, T)``.
            token_versions: ``v_t`` in int32, -1 where nothing was sampled; shape ``(N, T)``.
            prompt_lengths: int64, tokens of each row's prompt; shape ``(N,)``.
            rewards: float32; shape ``(N,)``.
            group_ids: int64, the row's group within the draw, -1 for a zero-weight row; ``(N,)``.
            version: ``j``, the policy version that this batch trains.
            num_tokens_global: trained tokens of the whole draw.
            num_sequences_global: rows of the whole draw with at least one trained token.
            micro_batch_index: which micro-batch of this rank's share of the draw it is, from 0.
            num_micro_batches: micro-batches of that share.
            report: what the draw has to say about itself; the same object on each micro-batch.
        """
        self.input_ids = input_ids
        self.attention_mask = attention_mask
        self.loss_mask = loss_mask
        self.behavior_logprobs = behavior_logprobs
        self.advantages = advantages
        self.token_versions = token_versions
        self.prompt_lengths = prompt_lengths
        self.rewards = rewards
        self.group_ids = group_ids
        self.version = version
        self.num_tokens_global = num_tokens_global
        self.num_sequences_global = num_sequences_global
        self.micro_batch_index, self.num_micro_batches = micro_batch_index, num_micro_batches
        self.report = report
        self.peer_tokens = 0
        """Trained tokens of the largest micro-batch that ranks compute together with this one."""
        self.followers: tuple[TrainBatch, ...] = ()
        """On the first micro-batch the others of the share: for statistics of all of it."""

    @property
    def is_last(self) -> bool:
        """Whether this is the last micro-batch of its share: the optimizer steps after it."""
        return self.micro_batch_index == self.num_micro_batches - 1

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> TrainBatch:
        """Move the tensors, in place; their dtypes stay.

        Args:
            device: where to.
            non_blocking: as in `torch.Tensor.to`.

        Returns:
            This object.
        """
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device=device, non_blocking=non_blocking))
        return self


def collate(
    groups: Sequence[TrajectoryGroup],
    *,
    version: int,
    num_micro_batches: int,
    pad_token_id: int,
    advantage: str,
    std_ddof: int,
    mask_truncated: bool = False,
    keep_groups: bool = False,
    report: Any = None,
) -> list[TrainBatch]:
    """Turn one draw into micro-batches.

    Rows are sorted by length, longest first (ties keep their order), and cut into contiguous
    micro-batches so that the largest has as few positions, padding included, as such a cut allows.

    Args:
        groups: the draw.
        version: ``j``, the policy version that the draw trains.
        num_micro_batches: how many to make, over all ranks; >= 1.
        pad_token_id: fills the padding; never attended to, except in zero-weight rows.
        advantage: method of `draw_advantages`, applied to the rewards of the draw.
        std_ddof: as there.
        mask_truncated: if True, truncated responses carry no loss (overlong filtering). They still
            count in the baseline of their group, unless it is weighted by trained tokens.
        keep_groups: if True, rows are sorted group by group, so that the responses to one prompt
            share a micro-batch where that is possible, and the prompt needs to be computed once.
        report: handed on with each micro-batch.

    Returns:
        Exactly ``num_micro_batches`` batches of at least one row, the longest rows first.

    Raises:
        ValueError: if the draw has no trained token, a prompt is empty, a token is newer than
            ``version``, or the advantages refuse a group.
    """
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches is {num_micro_batches}; it must be >= 1")
    rows = [
        row
        for index, group in enumerate(groups)
        for row in _rows_of(group, index, mask_truncated=mask_truncated)
    ]
    trained = [row for row in rows if row.trained]
    num_tokens_global = sum(len(row.response) for row in trained)
    if not trained:
        raise ValueError(
            f"nothing to train on: {len(rows)} responses in {len(groups)} groups have 0 loss "
            f"tokens (mask_truncated is {mask_truncated}); draw again, allow longer responses, or "
            "turn mask_truncated off"
        )
    _set_advantages(rows, len(groups), advantage, std_ddof)
    newest = max(max(row.versions) for row in rows)
    if newest > version:
        raise ValueError(
            f"a token was sampled at version {newest}, after the version {version} that trains on "
            "it: the clocks of engine and trainer disagree"
        )
    rows.extend(
        _zero_weight_row(pad_token_id) for _ in range(max(0, num_micro_batches - len(rows)))
    )
    if keep_groups:
        longest = [
            max(row.num_tokens for row in rows if row.group == g) for g in range(len(groups))
        ]
        rows.sort(key=lambda row: (-row.padded_to(longest), row.group, -row.num_tokens))
        parts = balanced_split([row.padded_to(longest) for row in rows], num_micro_batches)
    else:
        rows.sort(key=lambda row: -row.num_tokens)
        parts = balanced_split([row.num_tokens for row in rows], num_micro_batches)
    batches = [
        TrainBatch(
            **_pad(rows[part.start : part.stop], pad_token_id),
            version=version,
            num_tokens_global=num_tokens_global,
            num_sequences_global=len(trained),
            micro_batch_index=index,
            num_micro_batches=num_micro_batches,
            report=report,
        )
        for index, part in enumerate(parts)
    ]
    batches[0].followers = tuple(batches[1:])
    return batches


def balanced_split(lengths: Sequence[int], num_parts: int) -> list[range]:
    """Cut a falling list of lengths into contiguous parts of nearly equal padded size.

    The padded size of a part is its number of rows times its longest (first) row. The largest
    padded size is the smallest that any cut into at most ``num_parts`` contiguous parts reaches.

    Args:
        lengths: falling, all >= 1; at least ``num_parts`` of them.
        num_parts: how many parts to return, none of them empty.

    Returns:
        Ranges of indices, in order, that cover ``lengths``.

    Raises:
        ValueError: if there are fewer rows than parts.

    >>> balanced_split([8, 4, 4, 2, 2, 2], 3)
    [range(0, 1), range(1, 3), range(3, 6)]
    """
    if not 1 <= num_parts <= len(lengths):
        raise ValueError(
            f"cannot cut {len(lengths)} rows into {num_parts} parts of at least one row each"
        )
    low, high = lengths[0], lengths[0] * len(lengths)
    while low < high:
        middle = (low + high) // 2
        if _fill(lengths, middle, num_parts) is None:
            low = middle + 1
        else:
            high = middle
    parts = _fill(lengths, low, num_parts) or []
    while len(parts) < num_parts:  # halving a part never enlarges the largest one
        largest = max(
            (part for part in parts if len(part) > 1),
            key=lambda part: (len(part) * lengths[part.start], -part.start),
        )
        position = parts.index(largest)
        middle = (largest.start + largest.stop) // 2
        halves = [range(largest.start, middle), range(middle, largest.stop)]
        parts[position : position + 1] = halves
    return parts


def padding_share(batches: Sequence[TrainBatch]) -> float:
    """Share of all positions that hold no token of a response or its prompt.

    Zero-weight rows count as padding.

    Args:
        batches: micro-batches of one draw, or of several; at least one.

    Returns:
        A number in ``[0, 1)``.
    """
    num_positions = sum(batch.input_ids.numel() for batch in batches)
    if num_positions == 0:
        raise ValueError(f"{len(batches)} micro-batches have 0 positions; pass at least one batch")
    num_tokens = 0
    for batch in batches:
        is_response = (batch.token_versions >= 0).any(dim=1, keepdim=True)
        num_tokens += int((batch.attention_mask.bool() & is_response).sum())
    return 1 - num_tokens / num_positions


@dataclass(slots=True)
class _Row:
    """One response with its prompt, before padding."""

    prompt: Sequence[int]
    response: Sequence[int]
    versions: Sequence[int]
    logprobs: Sequence[float]
    reward: float
    trained: bool
    group: int
    """Position of the group in the draw; -1 for a zero-weight row."""
    advantage: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.response)

    def padded_to(self, longest: Sequence[int]) -> int:
        """Tokens of the longest row of this row's group."""
        return longest[self.group] if self.group >= 0 else self.num_tokens


def _rows_of(group: TrajectoryGroup, index: int, *, mask_truncated: bool) -> list[_Row]:
    """One row per trajectory of the group, in order."""
    if not group.prompt.token_ids:
        raise ValueError(
            f"prompt {group.prompt.uid!r} has 0 tokens; nothing predicts the first response token, "
            "so a prompt needs at least one (a begin-of-sequence token will do)"
        )
    return [
        _Row(
            prompt=group.prompt.token_ids,
            response=trajectory.token_ids,
            versions=trajectory.token_versions,
            logprobs=trajectory.behavior_logprobs,
            reward=trajectory.reward,
            trained=not (mask_truncated and trajectory.truncated),
            group=index,
        )
        for trajectory in group.trajectories
    ]


def _set_advantages(rows: Sequence[_Row], num_groups: int, method: str, std_ddof: int) -> None:
    groups = [[row for row in rows if row.group == index] for index in range(num_groups)]
    advantages = draw_advantages(
        [[row.reward for row in group] for group in groups],
        [[len(row.response) * row.trained for row in group] for group in groups],
        method=method,
        std_ddof=std_ddof,
    )
    for group, values in zip(groups, advantages, strict=True):
        for row, value in zip(group, values, strict=True):
            row.advantage = value


def _zero_weight_row(pad_token_id: int) -> _Row:
    """A row that is attended to, so that no softmax is empty, and trains nothing."""
    return _Row(
        (pad_token_id,) * ZERO_WEIGHT_TOKENS, (), (), (), reward=0.0, trained=False, group=-1
    )


def _fill(lengths: Sequence[int], capacity: int, num_parts: int) -> list[range] | None:
    """Parts filled up to a padded size one after the other; None if they are too many."""
    parts: list[range] = []
    start = 0
    while start < len(lengths):
        if len(parts) == num_parts:
            return None
        stop = min(start + capacity // lengths[start], len(lengths))
        parts.append(range(start, stop))
        start = stop
    return parts


def _pad(rows: Sequence[_Row], pad_token_id: int) -> dict[str, Tensor]:
    """The tensors of one micro-batch; each of shape ``(N, T)``."""
    shape = (len(rows), max(row.num_tokens for row in rows))
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    behavior_logprobs = torch.zeros(shape, dtype=torch.float32)
    advantages = torch.zeros(shape, dtype=torch.float32)
    token_versions = torch.full(shape, -1, dtype=torch.int32)
    prompt_lengths = torch.tensor([len(row.prompt) for row in rows], dtype=torch.int64)
    for index, row in enumerate(rows):
        sampled = slice(len(row.prompt), row.num_tokens)
        input_ids[index, : row.num_tokens] = torch.tensor((*row.prompt, *row.response))
        attention_mask[index, : row.num_tokens] = 1
        loss_mask[index, sampled] = row.trained
        behavior_logprobs[index, sampled] = torch.tensor(row.logprobs, dtype=torch.float32)
        advantages[index, sampled] = row.advantage
        token_versions[index, sampled] = torch.tensor(row.versions, dtype=torch.int32)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "loss_mask": loss_mask,
        "behavior_logprobs": behavior_logprobs,
        "advantages": advantages,
        "token_versions": token_versions,
        "prompt_lengths": prompt_lengths,
        "rewards": torch.tensor([row.reward for row in rows]),
        "group_ids": torch.tensor([row.group for row in rows]),
    }
