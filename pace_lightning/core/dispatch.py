"""How much may be generated ahead of training.

The pool never blocks the producer, so this is where back-pressure is applied: before a prompt is
dispatched. All counts are in groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pace_lightning.core.trajectory import PolicyVersion


@dataclass(frozen=True, slots=True)
class DispatchCounts:
    """What a dispatch rule may look at, in groups."""

    in_flight: int
    """Dispatched and not yet in the pool: generating or being scored."""
    ready: int
    """In the pool, not yet drawn."""
    accepted: int
    """Ever put into the pool, those drawn since included.

    Groups rejected from the pool do not count.
    """
    version: PolicyVersion
    """The trainer's version after its last publication."""


class Dispatch(Protocol):
    """A rule for how many more groups may be dispatched."""

    def capacity(self, counts: DispatchCounts) -> int:
        """Groups that may be dispatched now; zero or less means wait."""
        ...


@dataclass(frozen=True, slots=True)
class FixedSlots:
    """At most ``slots`` groups in flight or ready.

    In steady state a step uses B groups, so a group waits about ``slots / B`` steps between
    dispatch and use.

    Raises:
        ValueError: if ``slots`` is not positive.
    """

    slots: int

    def __post_init__(self) -> None:
        """Refuse a rule that could never dispatch."""
        if self.slots < 1:
            raise ValueError(f"slots is {self.slots}; with no slot nothing would ever be generated")

    def capacity(self, counts: DispatchCounts) -> int:
        """Free slots."""
        return self.slots - counts.in_flight - counts.ready


@dataclass(frozen=True, slots=True)
class AheadBound:
    """AReaL's staleness control (arXiv:2505.24298): generation leads by at most ``eta`` versions.

        capacity = (eta + version + 1) * B - (accepted + in_flight), and no more than the free slots

    It bounds the lead of the whole system, not the lag of one sample: a rollout that takes more
    than ``eta`` steps exceeds it. ``eta`` = 0 is synchronous training: B groups for version i, and
    none before i is published.

    Attributes:
        eta: versions that generation may run ahead.
        groups_per_step: B.
        slots: groups in flight or ready at once, or None for no limit of its own.

    Raises:
        ValueError: if a number is out of range.

    >>> AheadBound(4, 32).capacity(DispatchCounts(in_flight=20, ready=0, accepted=440, version=10))
    20
    """

    eta: int
    groups_per_step: int
    slots: int | None = None

    def __post_init__(self) -> None:
        """Refuse a rule that could never dispatch a whole batch."""
        if self.eta < 0 or self.groups_per_step < 1:
            raise ValueError(
                f"eta is {self.eta} and groups_per_step is {self.groups_per_step}; eta must be at "
                "least 0 (synchronous) and a step must use at least one group"
            )
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"slots is {self.slots}; nothing would ever be generated")

    def capacity(self, counts: DispatchCounts) -> int:
        """Groups that may be dispatched now."""
        allowed = (self.eta + counts.version + 1) * self.groups_per_step
        lead = allowed - (counts.accepted + counts.in_flight)
        if self.slots is None:
            return lead
        return min(self.slots - counts.in_flight - counts.ready, lead)
