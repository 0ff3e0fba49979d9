"""The groups in flight: each with its lease, what exists of its responses, and its last event.

Written by the rollout thread. Any thread may read the events, for messages and for the watchdog;
the responses are read in the rollout thread, for a checkpoint.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pace_lightning.core.trajectory import PolicyVersion, Prompt
from pace_lightning.rollout.engine import PartialResponse

ENGINE, SCORER = "engine", "scorer"
SETTINGS = {ENGINE: "rollout.timeout_seconds", SCORER: "reward.timeout_seconds"}
"""Whom a group waits for, and the setting that bounds the wait."""


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
    since: float = field(default_factory=time.monotonic)
    event_at: float = field(default_factory=time.monotonic)

    @property
    def uid(self) -> str:
        """Of its prompt."""
        return self.prompt.uid

    @property
    def setting(self) -> str:
        """What bounds its present wait."""
        return SETTINGS[self.waits_for]

    def oldest_version(self, published: PolicyVersion) -> PolicyVersion:
        """Of its tokens and of those that weights of ``published`` may sample for it."""
        return min([published, *(v for r in self.responses for v in r.versions[:1])])

    def describe(self, now: float) -> str:
        """One line."""
        return (
            f"prompt {self.uid} waits for the {self.waits_for} ({self.setting}): {self.event} "
            f"{now - self.event_at:.1f} s ago, in flight for {now - self.since:.1f} s"
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

    def next(self, lease: Callable[[], Prompt]) -> Rollout:
        """The next to dispatch; may raise what ``lease`` does."""
        return self.interrupted.popleft() if self.interrupted else Rollout(lease())

    def say(self, event: str) -> None:
        """Something happened that concerns no single group, or one that has ended."""
        self.last_event = event
        self.num_events += 1

    def publish(self, version: PolicyVersion, *, oldest_ready: PolicyVersion | None) -> None:
        """The engine has the weights of a version; ready groups have tokens as old as that."""
        self._published = version
        versions = [rollout.version for rollout in self.present()]
        versions += [rollout.oldest_version(version) for rollout in self.interrupted]
        ready = version if oldest_ready is None else oldest_ready
        self.oldest_version = min([version, ready, *versions])
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
