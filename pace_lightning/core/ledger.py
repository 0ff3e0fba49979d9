"""Every leased prompt ends in exactly one fate, or is pending.

Counted in groups, with the sampled tokens beside them. Of each prompt it is known whether it was
ever trained on and, if not, how often it was rejected: so those that starve have names. Written by
the rollout thread and by the trainer's thread, hence a lock of its own, held for a few additions
only.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pace_lightning.core.trajectory import Fate, prompt_index


class Ledger:
    """Counts where prompts and tokens ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._groups: Counter[Fate] = Counter()
        self._tokens: Counter[Fate] = Counter()
        self._leased = 0
        self._trained: set[str] = set()
        self._rejections: Counter[str] = Counter()  # of prompts that were never trained on

    def lease(self, uid: str) -> None:
        """A prompt left the stream.

        Raises:
            ValueError: if it is out already.
        """
        with self._lock:
            if uid in self._open:
                raise ValueError(f"prompt {uid} was leased twice without being settled in between")
            self._open.add(uid)
            self._leased += 1

    def settle(self, uid: str, fate: Fate, *, num_tokens: int = 0) -> None:
        """A prompt's group ended.

        Args:
            uid: the prompt.
            fate: how it ended.
            num_tokens: tokens that were sampled for it.

        Raises:
            ValueError: if the prompt is not out: never leased, or settled before.
        """
        with self._lock:
            if uid not in self._open:
                raise ValueError(
                    f"prompt {uid} was settled as {fate} but is not out: it was never leased, or "
                    "settled before"
                )
            self._open.remove(uid)
            self._groups[fate] += 1
            self._tokens[fate] += num_tokens
            index = prompt_index(uid)
            if fate is Fate.TRAINED:
                self._trained.add(index)
                self._rejections.pop(index, None)
            elif fate in (Fate.REJECTED, Fate.TOO_STALE) and index not in self._trained:
                self._rejections[index] += 1

    @property
    def pending(self) -> list[str]:
        """The prompts that are out, in no particular order."""
        with self._lock:
            return list(self._open)

    @property
    def num_pending(self) -> int:
        """Prompts that are out: in flight, ready, or in the batch being trained."""
        with self._lock:
            return len(self._open)

    def check(self) -> None:
        """Assert that the sums close.

        Raises:
            AssertionError: if prompts were lost or counted twice.
        """
        with self._lock:
            settled = sum(self._groups.values())
            if self._leased != settled + len(self._open):
                raise AssertionError(
                    f"{self._leased} prompts were leased, but {settled} settled and "
                    f"{len(self._open)} pending"
                )

    def groups(self) -> dict[str, int]:
        """Groups by fate, and those still pending."""
        with self._lock:
            counts = {fate.value: self._groups[fate] for fate in Fate if self._groups[fate]}
            if self._open:
                counts["pending"] = len(self._open)
            return counts

    def tokens(self) -> dict[str, int]:
        """Sampled tokens by the fate of their group."""
        with self._lock:
            return {fate.value: self._tokens[fate] for fate in Fate if self._tokens[fate]}

    def never_trained(self) -> dict[str, int]:
        """How often each prompt was rejected that has never been trained on, most often first.

        By its index in the data, over all epochs.
        """
        with self._lock:
            return dict(self._rejections.most_common())

    def state_dict(self) -> dict[str, Any]:
        """The settled counts; what was pending is leased again by the prompt stream."""
        with self._lock:
            return {
                "groups": {fate.value: count for fate, count in self._groups.items()},
                "tokens": {fate.value: count for fate, count in self._tokens.items()},
                "trained_prompts": sorted(self._trained),
                "rejections": dict(self._rejections),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the counts of a checkpoint, with nothing pending.

        Raises:
            ValueError: if they are damaged. Nothing changes then.
        """
        groups, tokens = ({Fate(k): n for k, n in state[x].items()} for x in ("groups", "tokens"))
        rejections = dict(state["rejections"])
        trained = {*state["trained_prompts"]}
        for count in (*groups.values(), *tokens.values(), *rejections.values()):
            if type(count) is not int or count < 0:
                raise ValueError(f"the ledger is damaged: {count!r:.80} is not a count")
        for index in (*trained, *rejections):
            if not isinstance(index, str):
                raise ValueError(f"the ledger is damaged: {index!r:.80} is not a prompt")
        with self._lock:
            self._groups, self._tokens = Counter(groups), Counter(tokens)
            self._trained = trained
            self._rejections = Counter(rejections)
            self._open = set()
            self._leased = sum(groups.values())
