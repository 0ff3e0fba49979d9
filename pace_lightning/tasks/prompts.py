"""The stream of prompts: seeded, endless, resumable; it leases prompt ids and settles them.

Every leased prompt is outstanding until it is settled, which happens once, when its group ends in a
fate. What was outstanding when the state was taken is leased again, first, after a restore: no
prompt is lost and none is repeated.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pace_lightning.core.trajectory import EndOfData, Prompt

Content = str | list[dict[str, str]]


class PromptRow(NamedTuple):
    """One tokenized row of the data set; a lease turns it into a ``Prompt``."""

    token_ids: tuple[int, ...]
    content: Content
    """What the data set holds, without the template: a string or chat messages."""
    columns: Mapping[str, Any]
    """The other columns, ``answer`` among them."""


class PromptStream:
    """Prompts in an order that depends on nothing but the seed.

    Each epoch is a fresh permutation derived from (seed, epoch). All methods may be called from any
    thread; none waits for anything but the lock.
    """

    def __init__(
        self, prompts: Sequence[PromptRow], *, seed: int, epochs: int | None = None
    ) -> None:
        """Start before the first prompt of epoch 0.

        Args:
            prompts: The data set.
            seed: Of the order.
            epochs: Permutations to go through; None: endless.
        """
        if not prompts:
            raise ValueError("a prompt stream needs at least one prompt, got none")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs = {epochs}; needed at least 1, or none for an endless stream")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._epochs = epochs
        self._fingerprint = _fingerprint(self._prompts)
        self._lock = threading.Lock()
        self._epoch = 0
        self._position = 0  # prompts of this epoch that have been leased
        self._order = self._permutation(0)
        self._leased: dict[str, None] = {}  # outstanding, in the order of leasing
        self._again: deque[str] = deque()  # outstanding before a restore, to be leased again

    def lease(self) -> Prompt:
        """Hand out the next prompt; it is outstanding until ``settle``.

        Raises:
            EndOfData: if all epochs have been leased.
        """
        with self._lock:
            if self._again:
                uid = self._again.popleft()
            else:
                if self._position == len(self._prompts):
                    if self._epochs is not None and self._epoch + 1 >= self._epochs:
                        raise EndOfData(
                            f"all {self._epochs} epochs of {len(self._prompts)} prompts have been "
                            "leased"
                        )
                    self._epoch += 1
                    self._position = 0
                    self._order = self._permutation(self._epoch)
                uid = f"{self._epoch}:{self._order[self._position]}"
                self._position += 1
            self._leased[uid] = None
            row = self._prompts[int(uid.partition(":")[2])]
        return Prompt(uid=uid, token_ids=row.token_ids, content=row.content, columns=row.columns)

    def settle(self, uid: str) -> None:
        """Note that this prompt's group ended in a fate.

        Raises:
            ValueError: if the prompt is not outstanding.
        """
        with self._lock:
            if uid not in self._leased:
                raise ValueError(
                    f"prompt {uid!r} is not outstanding ({len(self._leased)} are): it was never "
                    "leased, or it has been settled before; each leased prompt ends in exactly "
                    "one fate"
                )
            del self._leased[uid]

    @property
    def epoch(self) -> int:
        """Epoch of the newest prompt, from 0."""
        with self._lock:
            return self._epoch

    @property
    def num_outstanding(self) -> int:
        """Prompts leased and not settled, those that a restore has yet to lease again included."""
        with self._lock:
            return len(self._leased) + len(self._again)

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self._prompts)

    def state_dict(self) -> dict[str, Any]:
        """Position and outstanding prompts, in primitives and lists."""
        with self._lock:
            return {
                "fingerprint": self._fingerprint,
                "seed": self._seed,
                "epoch": self._epoch,
                "position": self._position,
                "outstanding": [*self._leased, *self._again],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; what was outstanding is leased again first, same uid.

        Raises:
            ValueError: if the state belongs to other prompts or another seed, or is damaged.
                Nothing changes then.
        """
        missing = {"fingerprint", "seed", "epoch", "position", "outstanding"} - set(state)
        if missing:
            raise ValueError(
                f"the state of the prompt stream lacks {sorted(missing)}; it has {sorted(state)}"
            )
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"the state belongs to other prompts: fingerprint {state['fingerprint'][:12]}, "
                f"here {self._fingerprint[:12]} ({len(self._prompts)} prompts); resume with the "
                "same data, template and tokenizer, or start a new run"
            )
        if state["seed"] != self._seed:
            raise ValueError(
                f"the state was made with seed {state['seed']}, here it is {self._seed}: the "
                f"order would differ; resume with seed {state['seed']}, or start a new run"
            )
        epoch, position, outstanding = state["epoch"], state["position"], list(state["outstanding"])
        if (
            epoch < 0
            or not 0 <= position <= len(self._prompts)
            or len(set(outstanding)) < len(outstanding)
        ):
            raise ValueError(
                f"the state is damaged: epoch {epoch}, position {position} of "
                f"{len(self._prompts)}, {len(outstanding)} outstanding ({len(set(outstanding))} "
                "distinct)"
            )
        order = self._permutation(epoch)
        leased_now = {f"{epoch}:{index}" for index in order[:position]}
        for uid in outstanding:
            lease_epoch, _, index = uid.partition(":")
            earlier = lease_epoch.isdecimal() and int(lease_epoch) < epoch
            known = index.isdecimal() and int(index) < len(self._prompts)
            if not known or not (earlier or uid in leased_now):
                raise ValueError(
                    f"the state is damaged: outstanding prompt {uid!r} had not been leased at "
                    f"epoch {epoch}, position {position} of {len(self._prompts)}"
                )
        with self._lock:
            self._epoch, self._position, self._order = epoch, position, order
            self._leased = {}
            self._again = deque(outstanding)

    def _permutation(self, epoch: int) -> list[int]:
        """Indices sorted by a hash of (seed, epoch, index): the same on every machine."""

        def key(index: int) -> bytes:
            return hashlib.sha256(f"{self._seed}:{epoch}:{index}".encode()).digest()

        return sorted(range(len(self._prompts)), key=key)


def tokenize_prompts(
    rows: Sequence[Mapping[str, Any]],
    *,
    tokenizer_fn: Callable[[Content], list[int]],
    template: str,
    max_prompt_tokens: int,
    overlong: str,
) -> tuple[list[PromptRow], int]:
    """Put rows into the form the model sees; refuse or skip those that are too long.

    Args:
        rows: From ``sources.normalize_rows``.
        tokenizer_fn: Token ids of a string, to which ``template`` has been applied, or of chat
            messages.
        template: Holds ``{prompt}``, where a string prompt is put; other braces are kept. Messages
            go as they are.
        max_prompt_tokens: Largest number of tokens allowed.
        overlong: ``refuse`` or ``skip``.

    Returns:
        The prompts that fit, and how many were skipped.

    Raises:
        ValueError: naming the first offender.
    """
    if overlong not in ("refuse", "skip"):
        raise ValueError(f"overlong = {overlong!r}; needed 'refuse' or 'skip'")
    if "{prompt}" not in template:
        raise ValueError(
            f"template {template!r} does not contain '{{prompt}}': every prompt would be the same"
        )
    fitting: list[PromptRow] = []
    too_long: list[tuple[int, int]] = []  # row number, length
    for number, row in enumerate(rows, start=1):
        content = row["prompt"]
        token_ids = tokenizer_fn(
            template.replace("{prompt}", content) if isinstance(content, str) else content
        )
        if (
            not isinstance(token_ids, list)
            or not token_ids
            or not all(isinstance(t, int) for t in token_ids)
        ):
            raise ValueError(
                f"prompt {number} ({str(content)[:60]!r}): the tokenizer gave "
                f"{str(token_ids)[:60]!r} ({type(token_ids).__name__}); needed a non-empty list "
                "of token ids"
            )
        if len(token_ids) > max_prompt_tokens:
            too_long.append((number, len(token_ids)))
            continue
        columns = {name: value for name, value in row.items() if name != "prompt"}
        fitting.append(PromptRow(tuple(token_ids), content, columns))
    if too_long and (overlong == "refuse" or not fitting):
        number, length = too_long[0]
        raise ValueError(
            f"{len(too_long)} of {len(rows)} prompts have more than max_prompt_tokens = "
            f"{max_prompt_tokens} tokens; the first is prompt {number} "
            f"({str(rows[number - 1]['prompt'])[:60]!r}) with {length}, the longest has "
            f"{max(length for _, length in too_long)}. Raise max_prompt_tokens"
            + (
                ", or skip overlong prompts"
                if overlong == "refuse"
                else ": skipping them leaves none"
            )
        )
    return fitting, len(too_long)


def _fingerprint(prompts: Sequence[PromptRow]) -> str:
    """Hash of the token ids of all prompts, in order."""
    digest = hashlib.sha256()
    for row in prompts:
        digest.update(",".join(map(str, row.token_ids)).encode() + b"\n")
    return digest.hexdigest()
