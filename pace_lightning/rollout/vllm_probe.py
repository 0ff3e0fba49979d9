"""Whether the weights that vLLM serves are the trainer's: log-probs of a probe say so.

Checksums would not: vLLM keeps the weights of prepacked layers in another form. The probe is a
sequence of tokens from all over the vocabulary, scored by the trainer under the weights that are
published and by vLLM under those that it has then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pace_lightning.core.trajectory import PolicyVersion
from pace_lightning.rollout.engine import WrongWeightsError

MAX_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Nats by which engine and trainer may differ, in the mean over the probe.

With SmolLM2-135M 0.07 was measured in bfloat16 and 1e-5 in float32; with the output head of other
weights 0.32 and more.
"""

NOTICEABLE = 1e-3
"""Nats by which the probe moves in the trainer, from which on it must move in the engine too."""

NUM_TOKENS = 48


class Probe:
    """A sequence and what was said about it.

    Args:
        vocab_size: of the model.
        max_tokens: longest sequence that the engine takes.
        dtype: of the engine.
    """

    def __init__(self, vocab_size: int, max_tokens: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        size = (min(NUM_TOKENS, max_tokens),)
        self.tokens: list[int] = torch.randint(vocab_size, size, generator=generator).tolist()
        self.expected: list[float] | None = None
        """By the trainer, of the publication that is still to be verified."""
        self._dtype = dtype
        self._verified: dict[PolicyVersion, list[float]] = {}
        self._before: tuple[list[float], list[float], object] | None = None

    def forget(self) -> None:
        """Start again, with an engine that never had weights."""
        self.expected = self._before = None

    def recall(self, version: PolicyVersion) -> None:
        """Weights come that an engine before this one had: expect of them what held there.

        The trainer may have gone on meanwhile, and score the probe under later weights.
        """
        if self._before is None and version in self._verified:
            self.expected = self._verified[version]

    def check(
        self, scores: Sequence[float], version: PolicyVersion | None, checksums: object = None
    ) -> None:
        """Compare, and remember for the next publication.

        Args:
            scores: log-probs of the tokens but the first, by the engine.
            version: that it should have.
            checksums: of its weights; None if they say nothing.

        Raises:
            WrongWeightsError: if the engine does not serve the weights of ``version``.
        """
        assert self.expected is not None
        expected, self.expected = self.expected, None
        gap, limit = mean_gap(scores, expected), MAX_GAP[self._dtype]
        if not gap <= limit:  # NaN is not
            raise WrongWeightsError(
                f"the weights of version {version} did not arrive in vLLM as they are in the "
                f"trainer: log-probs of a probe of {len(scores)} tokens differ by {gap:.3g} nats "
                f"on average, and rounding to {self._dtype} explains no more than {limit:g}"
            )
        if self._before is not None:
            trainer, engine, sums = self._before
            moved = mean_gap(expected, trainer)
            same = list(scores) == engine or (checksums is not None and checksums == sums)
            if moved > NOTICEABLE and same:
                raise WrongWeightsError(
                    f"the weights of version {version} did not arrive in vLLM: what it says about "
                    f"a probe is unchanged, while the trainer's log-probs moved by {moved:.3g} nats"
                )
        self._before = (expected, list(scores), checksums)
        if version is not None:
            last = list(self._verified.items())[-1:]
            self._verified = dict(last) | {version: expected}


def mean_gap(first: Sequence[float], second: Sequence[float]) -> float:
    """Mean absolute difference."""
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)
