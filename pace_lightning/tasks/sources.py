"""Rows of a data set, from wherever they are, in one schema.

``load_rows`` reads a local file, a hub data set or a generator; ``normalize_rows`` brings the rows
into one form:

    prompt   a non-empty string, or chat messages: a list of ``{"role": ..., "content": ...}``
    answer   a string, the reference that reward functions compare with
    ...      every other column as it was

``split_held_out`` separates training from evaluation by the text of the prompts, never by position.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import json
import logging
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Row = dict[str, Any]

_GENERATOR_PREFIX = "reasoning_gym:"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FORMS = "a .jsonl or .parquet file, a hub id such as 'owner/name', or 'reasoning_gym:NAME'"


def load_rows(
    path: str,
    *,
    split: str = "train",
    size: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Read or generate the rows of one source, as they are.

    Args:
        path: A .jsonl or .parquet file (relative to the current directory), a hub id, or
            ``reasoning_gym:NAME``.
        split: Of a hub data set; files and generators have none.
        size: Take the first ``size`` rows; for a generator, how many to generate (required there).
        seed: Of the generator.
        options: For ``datasets.load_dataset`` or the generator; files take none.

    Raises:
        FileNotFoundError: if a local file does not exist.
        ValueError: if the source cannot be read or generated, or holds fewer than ``size`` rows.
    """
    if size is not None and size < 1:
        raise ValueError(f"source {path!r}: size = {size}; needed at least 1, or none for all rows")
    chosen = dict(options or {})
    if path.startswith(_GENERATOR_PREFIX):
        _refuse_split(path, split, "choose another seed for other rows")
        return _generate(path, size=size, seed=seed, options=chosen)
    if Path(path).suffix in (".jsonl", ".parquet"):
        _refuse_split(path, split, "give each split its own file")
        if chosen:
            raise ValueError(
                f"source {path!r}: a file takes no options, got {sorted(chosen)}; remove them"
            )
        rows = _read_file(Path(path).expanduser())
    else:
        rows = _load_from_hub(path, split=split, size=size, options=chosen)
    if not rows:
        raise ValueError(f"source {path!r} holds no rows")
    if size is not None and len(rows) < size:
        raise ValueError(
            f"source {path!r} holds {len(rows)} rows, size asks for {size}; lower or remove size"
        )
    return rows[:size]


def normalize_rows(
    rows: Iterable[Mapping[str, Any]],
    *,
    prompt_column: str,
    answer_column: str,
    source: str = "data",
) -> list[Row]:
    """Bring rows into the one schema, or refuse the first that does not fit.

    Whole numbers as answers become text; decimals are refused, because their text is not unique.

    Args:
        rows: From ``load_rows``.
        prompt_column: Name of the column that becomes ``prompt``.
        answer_column: Name of the column that becomes ``answer``.
        source: Named in errors, usually the path.

    Raises:
        ValueError: naming source, row (from 1) and column.
    """
    normalized = []
    for number, row in enumerate(rows, start=1):
        where = f"{source}, row {number}"
        for wanted, column in (("prompt", prompt_column), ("answer", answer_column)):
            if column not in row:
                raise ValueError(
                    f"{where} has no column {column!r}; it has {sorted(row)}{_near(column, row)}: "
                    f"set the {wanted} column to one of them"
                )
            if column != wanted and wanted in row:
                raise ValueError(
                    f"{where}: column {column!r} is to become {wanted!r}, but a column {wanted!r} "
                    f"exists as well; rename it, or use it as the {wanted} column"
                )
        others = {
            name: value for name, value in row.items() if name not in (prompt_column, answer_column)
        }
        prompt = _prompt(row[prompt_column], where=f"{where}, column {prompt_column!r}")
        answer = row[answer_column]
        if isinstance(answer, int) and not isinstance(answer, bool):
            answer = str(answer)
        if not isinstance(answer, str):
            raise ValueError(
                f"{where}, column {answer_column!r}: the answer is {_brief(answer)}; needed a "
                "string: write it as text, or drop the row"
            )
        for name, text in (("prompt", prompt_text(prompt)), ("answer", answer)):
            if not _is_unicode(text):
                raise ValueError(
                    f"{where}: the {name} is {_brief(text)}, which holds half a surrogate pair; "
                    "needed text that can be written as UTF-8: repair or drop the row"
                )
        normalized.append({"prompt": prompt, "answer": answer, **others})
    return normalized


def split_held_out(
    rows: Sequence[Row], *, num_held_out: int, seed: int
) -> tuple[list[Row], list[Row]]:
    """Remove repeated prompts and hold some of the distinct ones out; logs how many were repeated.

    Whether a prompt is held out depends on the seed and on the prompts' texts alone, not on their
    order. Of rows with the same prompt text the first is kept.

    Returns:
        Training rows and held-out rows, both in their original order; no text is in both.

    Raises:
        ValueError: if that would leave no training prompt.
    """
    distinct: dict[str, Row] = {}
    num_contradicting = 0
    for row in rows:
        kept = distinct.setdefault(prompt_text(row["prompt"]).strip(), row)
        num_contradicting += kept["answer"] != row["answer"]
    if len(distinct) < len(rows):
        logger.warning(
            "dropped %d of %d rows whose prompt repeats an earlier one (%d of them with another "
            "answer)",
            len(rows) - len(distinct), len(rows), num_contradicting,
        )  # fmt: skip
    if num_held_out < 0 or len(distinct) < num_held_out + 1:
        raise ValueError(
            f"cannot hold out {num_held_out} prompts: the sources have {len(distinct)} distinct "
            "ones and at least one must be left for training; lower the number held out (0 or "
            "more) or add rows"
        )
    held_out = set(sorted(distinct, key=lambda text: _digest(f"{seed}:{text}"))[:num_held_out])
    return (
        [row for text, row in distinct.items() if text not in held_out],
        [row for text, row in distinct.items() if text in held_out],
    )


def prompt_text(prompt: str | Sequence[Mapping[str, str]]) -> str:
    """The text of a prompt; a single user message equals the same text as a plain string."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and prompt[0]["role"] == "user":
        return prompt[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _is_unicode(text: str) -> bool:
    """JSON can spell text that no encoding can write, and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _prompt(value: Any, *, where: str) -> str | list[dict[str, str]]:
    """A string or messages of role and content; keys with None (parquet adds some) are dropped."""
    if isinstance(value, str) and value.strip():
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{where}: the prompt is {_brief(value)}; needed a non-empty string or a list of "
            "messages"
        )
    messages = []
    for message in value:
        if not isinstance(message, Mapping):
            raise ValueError(
                f"{where}: a message is {_brief(message)}; needed a mapping with 'role' and "
                "'content'"
            )
        kept = {key: text for key, text in message.items() if text is not None}
        if set(kept) != {"role", "content"} or not all(
            isinstance(text, str) for text in kept.values()
        ):
            raise ValueError(
                f"{where}: message {_brief(kept)}; needed exactly 'role' and 'content', both "
                "strings"
            )
        messages.append(kept)
    return messages


def _read_file(path: Path) -> list[Row]:
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else []
        raise FileNotFoundError(
            f"no file {str(path)!r} (looked in "
            f"{str(path.absolute().parent)!r}){_near(path.name, siblings)}; relative paths start "
            "at the current directory"
        )
    if path.suffix == ".parquet":
        return _read_parquet(path)
    rows: list[Row] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, endless nesting
                raise ValueError(
                    f"{path}, line {number}: not JSON ({error}); one object per line is needed"
                ) from error
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path}, line {number}: {_brief(row)}; one JSON object per line is needed"
                )
            rows.append(row)
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import datasets

    try:
        with tempfile.TemporaryDirectory() as cache:  # nothing is to stay in the user's cache
            table = datasets.Dataset.from_parquet(str(path), cache_dir=cache, keep_in_memory=True)
    except Exception as error:  # from several layers, without a common type
        cause = error.__cause__ or error
        raise ValueError(
            f"{path} is not a readable parquet file ({type(cause).__name__}: {cause}); write it "
            "again"
        ) from error
    return [dict(row) for row in table]


def _load_from_hub(
    path: str, *, split: str, size: int | None, options: dict[str, Any]
) -> list[Row]:
    if not _HUB_ID.fullmatch(path) or Path(path).suffix in (".json", ".csv", ".tsv", ".txt"):
        raise ValueError(f"source {path!r} is of no known form; give {_FORMS}")
    import datasets

    try:
        loaded = datasets.load_dataset(path, split=split, **options)
        return [dict(row) for row in itertools.islice(loaded, size)]
    except Exception as error:  # the hub client raises many unrelated types
        raise ValueError(
            f"cannot load {path!r}, split {split!r}, options {options} from the hub: "
            f"{type(error).__name__}: {error}. Check id, split and options, the network and "
            f"access rights; known forms: {_FORMS}"
        ) from error


def _generate(path: str, *, size: int | None, seed: int, options: dict[str, Any]) -> list[Row]:
    """Question and answer of each generated entry; the generator's own metadata is left out."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    name = path.removeprefix(_GENERATOR_PREFIX)
    if name not in DATASETS:
        raise ValueError(
            f"source {path!r}: reasoning_gym has no generator {name!r}{_near(name, DATASETS)}"
        )
    if size is None:
        raise ValueError(
            f"source {path!r} has no size; a generator is endless: say how many rows to make"
        )
    if reserved := {"size", "seed"} & set(options):
        raise ValueError(
            f"source {path!r}: {sorted(reserved)} in options; set it beside path instead"
        )
    try:
        with contextlib.redirect_stdout(sys.stderr):
            generated = reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
            entries = [generated[index] for index in range(size)]
    except Exception as error:  # generators check their options by assertion, type and value
        known = sorted(set(DATASETS[name][1].__dataclass_fields__) - {"size", "seed"})
        raise ValueError(
            f"source {path!r} refused options {options}: {type(error).__name__}: {error}. It "
            f"knows {known}"
        ) from error
    return [{"prompt": entry["question"], "answer": entry["answer"]} for entry in entries]


def _refuse_split(path: str, split: str, remedy: str) -> None:
    if split != "train":
        raise ValueError(
            f"source {path!r}: split {split!r} has no meaning here; remove it and {remedy}"
        )


def _near(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(known), n=3)
    return f"; did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""


def _brief(value: Any) -> str:
    text = repr(value)
    return f"{text[:80]}{'...' if len(text) > 80 else ''} ({type(value).__name__})"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
