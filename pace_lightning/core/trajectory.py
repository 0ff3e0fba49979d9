"""The nouns of the system: prompts, trajectories, groups, and how a group can end.

All types are immutable: a trajectory is made once, by the rollout thread, and then only read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

PolicyVersion = int
"""Number of optimizer steps behind a set of weights; the clock of the system."""


def prompt_index(uid: str) -> str:
    """Which prompt of the data a uid ``epoch:index`` stands for: the same in each epoch.

    >>> prompt_index("2:17")
    '17'
    """
    return uid.rpartition(":")[2]


class EndOfData(Exception):  # an event, not an error
    """All prompts of all epochs have been leased."""


class Fate(StrEnum):
    """How a group left the system. Every leased prompt ends in exactly one fate, or is pending."""

    TRAINED = "trained"
    """Used in an optimizer step."""
    REJECTED = "rejected"
    """Ready, but shed by the admission policy's budget."""
    TOO_STALE = "too_stale"
    """Ready, but over the hard lag limit."""
    ZERO_VARIANCE = "zero_variance"
    """All rewards equal: no gradient (dynamic sampling)."""
    FAILED = "failed"
    """The engine failed, or returned something that must not be trained on (a NaN log-prob)."""
    TIMED_OUT = "timed_out"
    """Generation passed its deadline."""
    SCORER_ERROR = "scorer_error"
    """The reward function raised or returned something that is not a number."""
    SCORER_TIMEOUT = "scorer_timeout"
    """The reward function passed its deadline and was killed."""
    UNUSED = "unused"
    """Ready or in flight when the run ended."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, leased from the stream for one group of responses."""

    uid: str
    """Unique within a run, also across epochs."""
    token_ids: tuple[int, ...]
    content: str | list[dict[str, str]]
    """What the data set holds: a string, or chat messages. Reward functions see this."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row, the reference ``answer`` among them."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One response, token by token.

    All per-token tuples have length T >= 1, the number of sampled tokens.
    """

    token_ids: tuple[int, ...]
    token_versions: tuple[PolicyVersion, ...]
    """``v_t``: version of the weights that sampled each token."""
    behavior_logprobs: tuple[float, ...]
    """``log mu``: log-prob of each token under the distribution it was really sampled from."""
    completed_at: PolicyVersion
    """``c``: trainer version when the engine finished the last token."""
    reward: float
    """What the advantages see: the score plus shaping (overlong penalty)."""
    score: float
    """What the reward function returned, unshaped."""
    truncated: bool
    """True if the response hit the token limit instead of stopping by itself."""
    prefix_forgetting: float | None = None
    """Drift of its prefix, in nats per token; None if no prefix was re-scored."""
    mean_version: float = field(init=False, repr=False, compare=False)
    """Mean of ``token_versions``: kept, so that a draw costs nothing per token."""
    oldest_version: PolicyVersion = field(init=False, repr=False, compare=False)
    """Smallest of ``token_versions``, kept likewise."""

    def __post_init__(self) -> None:
        """Refuse a trajectory whose parts do not fit together."""
        lengths = (len(self.token_ids), len(self.token_versions), len(self.behavior_logprobs))
        if len(set(lengths)) != 1 or lengths[0] == 0:
            raise ValueError(
                "a trajectory needs one version and one behavior log-prob per sampled token, and "
                f"at least one token; got {lengths[0]} tokens, {lengths[1]} versions, {lengths[2]} "
                "log-probs"
            )
        # not(x <= 0) is also true for NaN
        bad = [t for t, logprob in enumerate(self.behavior_logprobs) if not -1e30 < logprob <= 1e-6]
        if bad:
            raise ValueError(
                f"behavior log-prob of token {bad[0]} is {self.behavior_logprobs[bad[0]]}; "
                "expected a finite number <= 0: the engine's output cannot be trained on"
            )
        if max(self.token_versions) > self.completed_at:
            raise ValueError(
                f"a token was sampled at version {max(self.token_versions)}, after the trajectory "
                f"completed at version {self.completed_at}: the clocks of engine and trainer "
                "disagree"
            )
        if self.prefix_forgetting is not None and not 0 <= self.prefix_forgetting < math.inf:
            raise ValueError(
                f"prefix_forgetting is {self.prefix_forgetting}; expected a finite number >= 0, or "
                "None if no prefix was re-scored"
            )
        object.__setattr__(self, "mean_version", sum(self.token_versions) / lengths[0])
        object.__setattr__(self, "oldest_version", min(self.token_versions))


@dataclass(frozen=True, slots=True)
class Sampled:
    """One response as far as it has come, finished or not, with its prompt."""

    prompt: Sequence[int]
    token_ids: Sequence[int]
    versions: Sequence[PolicyVersion]
    """``v_t`` of each token of the response; they never fall."""


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """The G trajectories of one prompt: the unit of admission and of the group baseline."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def completed_at(self) -> PolicyVersion:
        """Version at which the last trajectory finished; for display, never for staleness."""
        return max(trajectory.completed_at for trajectory in self.trajectories)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens in the group."""
        return sum(len(trajectory.token_ids) for trajectory in self.trajectories)

    @property
    def mean_tokens(self) -> float:
        """Mean length of the responses, in tokens."""
        return self.num_tokens / len(self.trajectories)

    @property
    def mean_score(self) -> float:
        """Mean unshaped score, the prompt's pass rate for 0/1 rewards."""
        return sum(trajectory.score for trajectory in self.trajectories) / len(self.trajectories)
