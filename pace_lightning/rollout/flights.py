"""The groups in flight, each with its last event: for messages, and for the watchdog.

Written by the rollout thread, read by any.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pace_lightning.core.trajectory import PolicyVersion

ENGINE, SCORER = "engine", "scorer"
SETTINGS = {ENGINE: "rollout.timeout_seconds", SCORER: "reward.timeout_seconds"}
"""Whom a group waits for, and the setting that bounds the wait."""


@dataclass(slots=True)
class Flight:
    """One group, from its dispatch to the pool or to another fate."""

    uid: str
    event: str
    """What happened to it last."""
    version: PolicyVersion = 0
    """Of the engine's weights at its dispatch: no token of it is older."""
    waits_for: str = ENGINE
    num_tokens: int = 0
    """Those of its responses, once they are all there."""
    since: float = field(default_factory=time.monotonic)
    event_at: float = field(default_factory=time.monotonic)

    @property
    def setting(self) -> str:
        """What bounds its present wait."""
        return SETTINGS[self.waits_for]

    def describe(self, now: float) -> str:
        """One line."""
        return (
            f"prompt {self.uid} waits for the {self.waits_for} ({self.setting}): {self.event} "
            f"{now - self.event_at:.1f} s ago, in flight for {now - self.since:.1f} s"
        )


class Flights:
    """The groups in flight, and how much has happened so far."""

    def __init__(self) -> None:
        self._flights: dict[str, Flight] = {}
        self.last_event = "nothing yet"
        self.num_events = 0
        """Grows with whatever happens on the rollout side."""
        self.oldest_version: PolicyVersion = 0
        """At the last publication: no token that may still be trained on is older."""
        self._published: PolicyVersion = 0

    def __len__(self) -> int:
        """Groups dispatched and not yet ended."""
        return len(self._flights)

    def present(self) -> list[Flight]:
        """The groups in flight, in the order of their dispatch."""
        return list(self._flights.copy().values())

    def say(self, event: str) -> None:
        """Something happened that concerns no single group, or one that has ended."""
        self.last_event = event
        self.num_events += 1

    def publish(self, version: PolicyVersion, *, oldest_ready: PolicyVersion | None) -> None:
        """The engine has the weights of a version; ready groups have tokens as old as that."""
        self._published = version
        versions = [flight.version for flight in self.present()]
        ready = version if oldest_ready is None else oldest_ready
        self.oldest_version = min([version, ready, *versions])
        self.say(f"version {version} was published")

    def begin(self, uid: str, event: str) -> None:
        """A group was dispatched."""
        self._flights[uid] = Flight(uid, event, self._published)
        self.num_events += 1

    def note(self, uid: str, event: str) -> None:
        """Something happened to a group that is still in flight."""
        flight = self._flights[uid]
        flight.event, flight.event_at = event, time.monotonic()
        self.say(f"prompt {uid} {event}")

    def score(self, uid: str, num_tokens: int) -> None:
        """The responses are there and go to the scorer."""
        flight = self._flights[uid]
        flight.waits_for, flight.num_tokens = SCORER, num_tokens
        self.note(uid, f"given to the scorer with {num_tokens} tokens")

    def end(self, uid: str) -> int:
        """A group is no longer in flight; returns its tokens if they were all there."""
        self.num_events += 1
        return self._flights.pop(uid).num_tokens
