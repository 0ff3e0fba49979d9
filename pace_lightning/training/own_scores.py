"""A proximal policy that is scored in time: each token by the weights that sampled it, as they go.

At each publication the engine stands still, and whatever the weights that leave have sampled is
scored by a copy of them, before the new ones are loaded (arXiv:2605.12070, route c). What is kept
afterwards is one number per token.

A number is found again by content: by the version, and by all tokens up to the last one that this
version sampled. They determine it, so no response needs a name, and it outlives whoever holds the
response: an engine, a pool, a checkpoint.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pace_lightning.core.batch import TrainBatch
from pace_lightning.core.proximal import own_version_logprobs
from pace_lightning.core.proximal_sources import Compute
from pace_lightning.core.trajectory import PolicyVersion, Sampled
from pace_lightning.rollout.rollouts import Leaving
from pace_lightning.training.proximal_models import copies_of, rows_with


class InterruptionScores:
    """A `ProximalSource`: what each version said of its own tokens.

    prox/mu is then the discrepancy between trainer and engine alone, as with a `SnapshotStore`.

    Memory: one copy of the weights, those that sample; 4 bytes per token that may still come to
    training. Time: at each publication, while no token flows, one copy and one pass without
    gradient over the responses that the leaving version has added to. Where the weights that sample
    are older than those of the step, one pass over their rows in each micro-batch too.

    Args:
        batch_positions: padded positions of one pass at a publication.
        missing: what becomes of trained tokens that were not scored: ``error``, or ``behavior``:
            prox = mu for them, counted in ``missing_tokens``.
        device: where the copy lives; None: with the parameters.
    """

    def __init__(
        self,
        *,
        batch_positions: int = 16384,
        missing: Literal["error", "behavior"] = "error",
        device: torch.device | str | None = "cpu",
    ) -> None:
        if batch_positions < 1:
            raise ValueError(f"batch_positions is {batch_positions}; it must be above 0")
        if missing not in ("error", "behavior"):
            raise ValueError(f"missing is {missing!r}; needed 'error' or 'behavior'")
        self._batch_positions = batch_positions
        self._missing = missing
        self._device = device
        self._version: PolicyVersion | None = None
        self._weights: dict[str, Tensor] = {}
        self._scores: dict[PolicyVersion, dict[str, Tensor]] = {}
        """By version and by `_key`, the log-probs of the tokens that the version sampled."""
        self._missing_tokens = 0
        self._seconds = 0.0

    def begin(self, version: PolicyVersion, parameters: Mapping[str, Tensor]) -> None:
        """Nothing to do: the copy comes from a publication, or from a checkpoint."""

    def leaving(self, responses: Sequence[Sampled], compute: Compute) -> None:
        """The weights that sample are about to go: score what they have sampled.

        Call it while no token flows.

        Args:
            responses: all that may still come to training.
            compute: scores a batch, of which it may read the tokens, masks and prompt lengths.
        """
        if self._version is None:
            return
        begin = time.perf_counter()
        version = self._version
        known = self._scores.setdefault(version, {})
        found = [row for x in responses if (row := _row(x, version)) is not None]
        rows = {key: row for row in found if (key := row.key) not in known}
        for part in _batches(list(rows.values()), self._batch_positions):
            batch = _padded(part, version)
            logprobs = compute(batch, self._weights).detach().float().cpu()
            for row, mask, values in zip(part, batch.loss_mask, logprobs, strict=True):
                known[row.key] = values[mask].clone()
        self._seconds += time.perf_counter() - begin

    def leaver(
        self, compute: Compute, context: Callable[[], AbstractContextManager[None]]
    ) -> Leaving:
        """`leaving` for another thread, with the present number of threads; see `Leaving`.

        Args:
            compute: as there.
            context: entered around all of it, for the precision.
        """
        num_threads = torch.get_num_threads()  # a setting of each thread

        def leaving(responses: Sequence[Sampled]) -> None:
            torch.set_num_threads(num_threads)
            with context():
                self.leaving(responses, compute)

        return leaving

    def logprobs(
        self, batch: TrainBatch, compute: Compute, policy_logprobs: Tensor | None = None
    ) -> Tensor:
        """See `ProximalSource.logprobs`.

        Raises:
            ValueError: if a trained token was not scored and ``missing`` is ``error``.
        """
        found = torch.full_like(batch.behavior_logprobs, math.nan)
        for row, own in enumerate(batch.loss_mask.cpu()):
            ids, versions = batch.input_ids[row].cpu(), batch.token_versions[row].cpu()
            for version in versions[own].unique().tolist():
                at = (versions == version).nonzero()[:, 0]
                key = _key(ids[: int(at[-1]) + 1].tolist(), int(at[0]))
                values = self._scores.get(version, {}).get(key)
                if values is not None and len(values) == len(at):
                    found[row, at] = values.to(found)
        sampling = batch.loss_mask & found.isnan() & (batch.token_versions == self._version)
        if bool(sampling.any()) and self._version != batch.version:
            part = rows_with(batch, sampling)
            found[sampling] = compute(part, self._weights).detach()[part.loss_mask]
        if policy_logprobs is None:
            policy_logprobs = compute(batch, None)
        if self._missing == "behavior":
            lost = batch.loss_mask & found.isnan() & (batch.token_versions != batch.version)
            self._missing_tokens += int(lost.sum())
            found = torch.where(lost, batch.behavior_logprobs, found)
        return own_version_logprobs(
            policy_logprobs.detach(),
            found,
            batch.token_versions,
            batch.loss_mask,
            version=batch.version,
        )

    def after_step(
        self,
        version: PolicyVersion,
        parameters: Mapping[str, Tensor],
        *,
        active_share: float | None = None,
    ) -> None:
        """Nothing to do: weights that are not published sample nothing."""

    def published(
        self,
        version: PolicyVersion,
        parameters: Mapping[str, Tensor],
        *,
        oldest_version: PolicyVersion,
    ) -> None:
        """Forget what no token has any more, and keep a copy of what samples now."""
        for old in [v for v in self._scores if v < oldest_version]:
            del self._scores[old]
        self._weights = {}  # first, so that there is never a second copy
        self._weights = copies_of(parameters, self._device)
        self._version = version

    def metrics(self) -> dict[str, float]:
        """Numbers kept (``scored_tokens``), ``missing_tokens`` and ``seconds`` since the start."""
        numbers = (len(x) for scores in self._scores.values() for x in scores.values())
        return {
            "scored_tokens": float(sum(numbers)),
            "missing_tokens": float(self._missing_tokens),
            "seconds": self._seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        """See `ProximalSource.state_dict`: the numbers, and the weights that sample."""
        return {
            "scores": {version: dict(scores) for version, scores in self._scores.items()},
            "version": self._version,
            "weights": dict(self._weights),
            "missing_tokens": self._missing_tokens,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `ProximalSource.load_state_dict`."""
        self._scores = {
            version: {key: values.cpu().clone() for key, values in scores.items()}
            for version, scores in state["scores"].items()
        }
        self._version = state["version"]
        self._weights = copies_of(state["weights"], self._device)
        self._missing_tokens = state["missing_tokens"]


class _Row(NamedTuple):
    """A prompt and its response up to the last token of a version."""

    token_ids: list[int]
    first: int
    """Position of the first token of the version."""
    prompt_tokens: int

    @property
    def key(self) -> str:
        return _key(self.token_ids, self.first)


def _row(response: Sampled, version: PolicyVersion) -> _Row | None:
    """None if the version has sampled none of it, or newer ones have too."""
    versions = response.versions
    if not versions or versions[-1] != version:
        return None
    prompt = list(response.prompt)
    return _Row([*prompt, *response.token_ids], len(prompt) + versions.index(version), len(prompt))


def _key(token_ids: Sequence[int], first: int) -> str:
    """Of the tokens from position ``first`` on, after those before it."""
    digest = hashlib.blake2b(np.asarray(token_ids, dtype=np.int64).tobytes(), digest_size=16)
    return f"{first} {digest.hexdigest()}"


def _batches(rows: Sequence[_Row], positions: int) -> Iterator[list[_Row]]:
    """Rows of like length together, at most so many padded positions at once, one row at least."""
    part: list[_Row] = []
    for row in sorted(rows, key=lambda row: -len(row.token_ids)):
        if part and (len(part) + 1) * len(part[0].token_ids) > positions:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _padded(rows: Sequence[_Row], version: PolicyVersion) -> TrainBatch:
    """Only what is needed to score the tokens from ``first`` on."""
    shape = (len(rows), max(len(row.token_ids) for row in rows))
    input_ids = torch.zeros(shape, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        length = len(row.token_ids)
        input_ids[index, :length] = torch.tensor(row.token_ids)
        attention_mask[index, :length] = 1
        loss_mask[index, row.first : length] = True
    return TrainBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        loss_mask=loss_mask,
        behavior_logprobs=torch.zeros(shape),
        advantages=torch.zeros(shape),
        token_versions=torch.where(loss_mask, version, -1).int(),
        prompt_lengths=torch.tensor([row.prompt_tokens for row in rows]),
        rewards=torch.zeros(len(rows)),
        group_ids=torch.full((len(rows),), -1),
        version=version,
        num_tokens_global=int(loss_mask.sum()),
        num_sequences_global=len(rows),
        micro_batch_index=0,
        num_micro_batches=1,
    )
