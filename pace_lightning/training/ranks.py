"""The ranks of a run: one process each. Rank 0 generates; all of them train.

What rank 0 alone knows reaches the others as messages, in the order in which every rank asks for
them: its parts of a draw, or that there are no more (`Ranks.scatter`); the result of an evaluation
or of a publication (`Ranks.share`). A failure of rank 0 is a message too, so that every rank raises
it. Messages go over a gloo group of their own, with their own deadline, because what they wait for
is generation, not communication.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_FAILURE = "pace_lightning/failure"
"""Key of the rendezvous store: what the first rank that failed had to say."""


class RankError(RuntimeError):
    """Another rank failed."""


@dataclass(frozen=True)
class _Again:
    """A message without content: rank 0 goes on, wait for the next one."""


@dataclass(frozen=True)
class _Failed:
    """Rank 0 failed."""

    error: bytes


class Ranks:
    """This rank among all.

    Args:
        rank: of this process.
        size: how many there are.
        timeout_seconds: how long a message may take to come.
    """

    def __init__(self, rank: int = 0, size: int = 1, *, timeout_seconds: float = 1800.0) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; needed one of 0 to {size - 1}: there are {size}")
        self.rank = rank
        self.size = size
        self._timeout = timedelta(seconds=timeout_seconds)
        self._group: Any = None
        self._told: BaseException | None = None  # by rank 0

    def share(self, make: Callable[[], T]) -> T:
        """What ``make`` returns on rank 0, where alone it is called; on every rank.

        Raises:
            BaseException: what it raised on rank 0; on every rank.
        """
        return self.scatter(lambda: [make()] * self.size)  # type: ignore[return-value]

    def scatter(self, make: Callable[[], Sequence[T] | None]) -> T | None:
        """This rank's item of what ``make`` returns on rank 0, one for each; None: the end.

        Raises:
            BaseException: what it raised on rank 0; on every rank.
        """
        if self.rank:
            return self._receive()
        try:
            values = make()
        except BaseException as error:
            self._send([_Failed(_pickled(error))] * self.size, although_failed=True)
            raise
        if values is None:
            values = [None] * self.size  # type: ignore[list-item]
        self._send(values)
        return values[0]

    def postpone(self) -> None:
        """Called inside ``make``: the deadline of the message begins anew."""
        self._send([_Again()] * self.size)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank, in order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._messages())
        return values

    def report_failure(self, error: BaseException) -> None:
        """Leave word for rank 0 why this rank ends; the first word stays. Never raises.

        Not of what rank 0 itself said, and not of a signal, which is what ends the other ranks.
        """
        if self.size == 1 or not dist.is_initialized():
            return
        if error is self._told or isinstance(error, KeyboardInterrupt | SystemExit):
            return
        word = json.dumps([self.rank, f"{type(error).__name__}: {error}"[:2000]])
        try:
            _store().compare_set(_FAILURE, "", word)
        except Exception:  # the store ended with rank 0
            return

    def failure_elsewhere(self) -> RankError | None:
        """The error of another rank that failed before this one, if there is any. Never raises."""
        if self.size == 1 or not dist.is_initialized():
            return None
        try:
            if not _store().check([_FAILURE]):
                return None
            rank, message = json.loads(_store().get(_FAILURE))
        except Exception:
            return None
        return None if rank == self.rank else RankError(f"rank {rank} failed: {message}")

    def _send(self, values: Sequence[Any], *, although_failed: bool = False) -> None:
        if self.size == 1:
            return
        try:
            dist.scatter_object_list([None], list(values), src=0, group=self._messages())
        except Exception:
            if not although_failed:  # else the first error matters
                raise

    def _receive(self) -> Any:
        while True:
            message: list[Any] = [None]
            dist.scatter_object_list(message, None, src=0, group=self._messages())
            if isinstance(message[0], _Failed):
                self._told = pickle.loads(message[0].error)
                raise self._told
            if not isinstance(message[0], _Again):
                return message[0]

    def _messages(self) -> Any:
        """The group; made by all ranks together, at their first message."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._group


ALONE = Ranks()
"""One rank."""


def gather_vectors(vector: Tensor, all_gather: Callable[[Tensor], Tensor]) -> Tensor:
    """The vectors of all ranks, one after the other.

    Args:
        vector: this rank's; shape ``(m,)``, m may differ between ranks and be 0.
        all_gather: from a tensor of the same shape on each rank to all of them, stacked.

    Returns:
        Shape ``(M,)``, equal on each rank.
    """
    counts = all_gather(torch.tensor([len(vector)], device=vector.device)).flatten().tolist()
    padded = vector.new_zeros(max(counts))
    padded[: len(vector)] = vector
    rows = all_gather(padded).reshape(len(counts), -1)
    return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])


def _pickled(error: BaseException) -> bytes:
    """The error, or one that says the same if it does not survive the way."""
    try:
        data = pickle.dumps(error)
        if str(pickle.loads(data)) == str(error):
            return data
    except Exception:
        pass
    return pickle.dumps(RankError(f"rank 0 failed: {type(error).__name__}: {error}"))


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
