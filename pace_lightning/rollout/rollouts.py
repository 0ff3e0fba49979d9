"""The groups in flight: each with its lease, what exists of its responses, and its last event.

Written by the rollout thread. Any thread may read the events, for messages and for the watchdog;
the responses are read in the rollout thread, for a checkpoint.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from pace_lightning.core.pace import PrefixRescore
from pace_lightning.core.saved_groups import pack, required, unpack
from pace_lightning.core.trajectory import PolicyVersion, Prompt, Sampled, TrajectoryGroup
from pace_lightning.rollout.engine import PartialResponse

ENGINE, SCORER = "engine", "scorer"
SETTINGS = {ENGINE: "rollout.timeout_seconds", SCORER: "reward.timeout_seconds"}
"""Whom a group waits for, and the setting that bounds the wait."""


Leaving = Callable[[Sequence[Sampled]], None]
"""What is done, in a thread, with all that may still be trained on while no token flows and the
weights that sampled the newest tokens are about to be replaced."""


@dataclass(slots=True)
class Rollout:
    """One group, from its lease to the pool or to another fate."""

    prompt: Prompt
    responses: list[PartialResponse] = field(default_factory=list)
    """As far as they have come; empty before the engine has been asked."""
    event: str = "not dispatched yet"
    """What happened to it last."""
    version: PolicyVersion = 0
    """Of the engine's weights at its first dispatch: no token of it is older."""
    waits_for: str = ENGINE
    num_tokens: int = 0
    """Those of its responses, once they are all there."""
    since: float = 0.0
    """Its dispatch."""
    event_at: float = 0.0

    @property
    def uid(self) -> str:
        """Of its prompt."""
        return self.prompt.uid

    @property
    def setting(self) -> str:
        """What bounds its present wait."""
        return SETTINGS[self.waits_for]

    def state_dict(self) -> dict[str, Any]:
        """What exists of the responses, but not the prompt's text; tensors and primitives."""
        responses = self.responses
        return {
            "uid": self.uid,
            "tokens": pack((r.token_ids, r.versions, r.logprobs) for r in responses),
            "completed_at": [r.completed_at for r in responses],
            "truncated": [r.truncated for r in responses],
            "unscored": [r.unscored for r in responses],
            "rescores": [[[*astuple(event)] for event in r.rescores] for r in responses],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], prompt: Prompt) -> Rollout:
        """The inverse of `state_dict`.

        Raises:
            ValueError: if it is damaged.
        """
        names = ("completed_at", "truncated", "unscored", "rescores")
        columns = zip(unpack(state["tokens"]), *(state[name] for name in names), strict=True)
        responses = [
            PartialResponse(
                token_ids=ids,
                logprobs=logprobs,
                versions=versions,
                rescores=[_rescore(event) for event in rescores],
                unscored=required(unscored, bool, "unscored"),
                completed_at=None if ended is None else required(ended, int, "completed_at"),
                truncated=required(truncated, bool, "truncated"),
            )
            for (ids, versions, logprobs), ended, truncated, unscored, rescores in columns
        ]
        return cls(prompt, responses)

    def check(self, *, group_size: int, max_new_tokens: int, version: PolicyVersion) -> None:
        """Refuse what a run at this version cannot have generated.

        Log-probs are judged where any group is built: what an engine returned as NaN fails one
        prompt, not the checkpoint it was saved in.

        Raises:
            ValueError: saying what is wrong.
        """
        if len(self.responses) > group_size:
            raise ValueError(f"prompt {self.uid} has {len(self.responses)} saved responses")
        for r in self.responses:
            size = len(r.token_ids)
            clock = [*r.versions, version if r.completed_at is None else r.completed_at, version]
            if clock != sorted(clock):
                raise ValueError(f"the versions of a response to {self.uid} run backwards")
            if not (size > 0 if r.is_finished else size < max_new_tokens):
                raise ValueError(f"a response to {self.uid} has {size} tokens")

    def oldest_version(self, published: PolicyVersion) -> PolicyVersion:
        """Of its tokens and of those that weights of ``published`` may sample for it."""
        return min([published, *(v for r in self.responses for v in r.versions[:1])])

    def describe(self, now: float) -> str:
        """One line."""
        return (
            f"prompt {self.uid} waits for the {self.waits_for} ({self.setting}): {self.event} "
            f"{now - self.event_at:.1f} s ago, in flight for {now - self.since:.1f} s"
        )


def _rescore(event: Sequence[Any]) -> PrefixRescore:
    count, *sums = event
    return PrefixRescore(
        required(count, int, "the tokens of a re-scoring"),
        *(required(value, float, "a sum of a re-scoring") for value in sums),
    )


class Rollouts:
    """The groups in flight, and how much has happened so far."""

    def __init__(self) -> None:
        self._rollouts: dict[str, Rollout] = {}
        self.interrupted: deque[Rollout] = deque()
        """Begun by an earlier process, and not dispatched again yet: they go first."""
        self.last_event = "nothing yet"
        self.num_events = 0
        """Grows with whatever happens on the rollout side."""
        self.oldest_version: PolicyVersion = 0
        """At the last publication: no token that may still be trained on is older."""
        self._published: PolicyVersion = 0

    def __len__(self) -> int:
        """Groups dispatched and not yet ended."""
        return len(self._rollouts)

    def present(self) -> list[Rollout]:
        """The groups in flight, in the order of their dispatch."""
        return list(self._rollouts.copy().values())

    def unended(self) -> list[Rollout]:
        """Those in flight, and those that are to be dispatched again."""
        return [*self.present(), *self.interrupted]

    def sampled(self, ready: Sequence[TrajectoryGroup]) -> list[Sampled]:
        """All that may still be trained on: of these groups, and of those that have not ended.

        Rollout thread.
        """
        finished = [
            Sampled(group.prompt.token_ids, t.token_ids, t.token_versions)
            for group in ready
            for t in group.trajectories
        ]
        unended = [
            Sampled(rollout.prompt.token_ids, tuple(r.token_ids), tuple(r.versions))
            for rollout in self.unended()
            for r in rollout.responses
        ]
        return finished + unended

    def next(self, lease: Callable[[], Prompt]) -> Rollout:
        """The next to dispatch; may raise what ``lease`` does."""
        return self.interrupted.popleft() if self.interrupted else Rollout(lease())

    def say(self, event: str) -> None:
        """Something happened that concerns no single group, or one that has ended."""
        self.last_event = event
        self.num_events += 1

    def publish(self, version: PolicyVersion, ready: Sequence[TrajectoryGroup]) -> None:
        """The engine has the weights of a version; these groups are ready."""
        self._published = version
        versions = [rollout.version for rollout in self.present()]
        versions += [rollout.oldest_version(version) for rollout in self.interrupted]
        versions += [t.oldest_version for group in ready for t in group.trajectories]
        self.oldest_version = min([version, *versions])
        self.say(f"version {version} was published")

    def begin(self, rollout: Rollout, event: str) -> None:
        """A group was dispatched."""
        rollout.version = rollout.oldest_version(self._published)
        rollout.event, rollout.since = event, time.monotonic()
        rollout.event_at = rollout.since
        self._rollouts[rollout.uid] = rollout
        self.num_events += 1

    def note(self, uid: str, event: str) -> None:
        """Something happened to a group that is still in flight."""
        rollout = self._rollouts[uid]
        rollout.event, rollout.event_at = event, time.monotonic()
        self.say(f"prompt {uid} {event}")

    def score(self, uid: str, num_tokens: int) -> None:
        """The responses are there and go to the scorer."""
        rollout = self._rollouts[uid]
        rollout.waits_for, rollout.num_tokens = SCORER, num_tokens
        self.note(uid, f"given to the scorer with {num_tokens} tokens")

    def end(self, uid: str) -> int:
        """A group is no longer in flight; returns its tokens if they were all there."""
        self.num_events += 1
        return self._rollouts.pop(uid).num_tokens
