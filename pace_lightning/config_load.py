"""Read an experiment: YAML, one level of ``extends:``, ``key=value`` overrides; merged and typed.

Layers are applied in this order: the file named by ``extends:``, the file itself, the overrides.
Sections are merged key by key; a list replaces the list of the layer below. Values are assigned to
the schema one at a time, so that every refusal can name the layer, the full path, the value and the
nearest valid key. Whatever the text, the outcome is a configuration or a ``ConfigError``.
"""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pace_lightning.config import Config, ConfigError, SourceConfig

EXAMPLES = {
    "name": "name: my-run",
    "model.path": "model: {path: path/to/model}",
    "reward.function": "reward: {function: pace_lightning.tasks.rewards:last_number}",
    "path": "path: data/prompts.jsonl",
}
"""What to write for each value that has no default, by its path or its last key."""

TRUNCATING = (
    *("top_k", "top_p", "min_p", "typical_p", "logit_bias", "bad_words"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
TRUNCATED = (
    "responses are sampled from the whole softmax at rollout.temperature, because the trainer's "
    "log-probs are of that distribution, and the importance ratio of any other would be wrong; "
    "remove it"
)
"""What a person may miss among the settings of sampling, and why it is not there."""

TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load one experiment.

    Args:
        path: the YAML file.
        overrides: assignments such as ``trainer.steps=5`` or ``data.sources.0.size=100``.

    Returns:
        A read-only OmegaConf ``DictConfig`` with exactly the fields of ``Config``. It is not an
        instance of that class; the annotation is for type checkers.

    Raises:
        ConfigError: if the file cannot be read, is not what the schema allows, or leaves a
            mandatory value out. Combinations of values are the business of ``config_checks.check``.
    """
    file = Path(path)
    layers = [*_file_layers(file), *map(_parse_override, overrides)]
    config = OmegaConf.structured(Config)
    for origin, values in layers:
        _assign_section(config, Config, values, path="", origin=origin)
    if missing := sorted(OmegaConf.missing_keys(config)):
        wanted = "; ".join(f"{key} ({_example(key)})" for key in missing)
        raise ConfigError(f"{file}: mandatory, but not set: {wanted}")
    OmegaConf.set_readonly(config, True)
    return cast("Config", config)


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML; loading it again gives the same configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(OmegaConf.to_container(cast("Any", config)))))


def nearest(word: object, choices: Iterable[str]) -> str:
    """The end of a sentence that refuses ``word``: the nearest choice, or else all of them.

    >>> nearest("dapoo", ["dapo", "grpo"])
    "did you mean 'dapo'?"
    """
    names = list(choices)
    close = difflib.get_close_matches(str(word), names, n=1)
    return f"did you mean '{close[0]}'?" if close else f"choose from: {', '.join(names)}"


def show(value: object) -> str:
    """A value as a person would write it in YAML, shortened to fit into a sentence."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = repr(str(value)) if isinstance(value, str) else str(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---------------------------------------------------------------------------------------- layers


def _file_layers(file: Path) -> list[tuple[str, dict[Any, Any]]]:
    """The layers a file stands for, lowest first: the one it extends, then itself."""
    values = _read(file)
    if "extends" not in values:
        return [(str(file), values)]
    parent = values.pop("extends")
    if not isinstance(parent, str) or not parent:
        raise ConfigError(
            f"{file}: extends is {show(parent)}, expected a file name, for example "
            "extends: base.yaml"
        )
    parent_file = file.parent / parent
    try:
        parent_values = _read(parent_file)
    except ConfigError as error:
        raise ConfigError(
            f"{file}: extends: {error} (a path is taken from the folder of this file)"
        ) from error
    if "extends" in parent_values:
        raise ConfigError(
            f"{file}: extends {parent}, which itself extends {show(parent_values['extends'])}; "
            "only one level is allowed: extend the last one, and copy what the middle one changes"
        )
    return [(str(parent_file), parent_values), (str(file), values)]


def _read(file: Path) -> dict[Any, Any]:
    """One file as plain Python values."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start})") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{str(file)!r} cannot be read: {reason}{_neighbors(file)}") from error
    values = _parse(lambda: OmegaConf.load(io.StringIO(text)), text, str(file))
    if values == {}:
        wanted = "; ".join(EXAMPLES[key] for key in ("name", "model.path", "reward.function"))
        raise ConfigError(f"{file}: the file is empty; it needs at least {wanted}")
    if not isinstance(values, dict) or ":" not in text:
        raise ConfigError(f"{file}: expected 'key: value' lines, for example name: my-run")
    return values


def _neighbors(file: Path) -> str:
    """Which YAML files lie where a missing one was expected."""
    try:
        names = sorted(other.name for other in file.parent.glob("*.yaml"))
    except (OSError, ValueError):
        return ""
    return f"; {file.parent} has {', '.join(names[:12])}" if names and not file.exists() else ""


def _parse_override(text: str) -> tuple[str, dict[str, Any]]:
    """``a.b=1`` as a layer: its name in messages, and ``{"a": {"b": 1}}``."""
    origin = f"override {text!r}"
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+|\[\d+\])*", key):
        raise ConfigError(f"{origin}: expected key=value, for example trainer.steps=5")
    nested = _parse(lambda: OmegaConf.from_dotlist([f"value={value}"]), value, origin)["value"]
    for part in reversed(key.replace("[", ".").replace("]", "").split(".")):
        nested = {part: nested}
    return origin, nested


def _parse(parser: Callable[[], Any], text: str, origin: str) -> Any:
    """Text to plain values; every failure of the parser becomes a ``ConfigError``."""
    try:
        return OmegaConf.to_container(parser(), resolve=False)
    except Exception as error:  # the parser meets arbitrary text and has no common base class
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        if "${" in text:
            problem += " ('${...}' is not supported: write the value out)"
        raise ConfigError(f"{origin}{line}: not valid YAML: {problem}") from error


# ------------------------------------------------------------------------------------ assignment


def _assign_section(node: Any, schema: type, values: Any, *, path: str, origin: str) -> None:
    """Assign a mapping to one section of the schema, key by key."""
    hints = get_type_hints(schema)
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{origin}: {path} is {show(values)}, expected a section with some of the keys "
            f"{', '.join(hints)}"
        )
    for key, value in values.items():
        where = f"{path}.{key}" if path else str(key)
        if key in TRUNCATING and path in ("rollout", "eval"):
            raise ConfigError(f"{origin}: {where} is not possible: {TRUNCATED}")
        if key not in hints and not path and {"arms", "seeds"} & values.keys():
            raise ConfigError(
                f"{origin}: this is a comparison of experiments, not an experiment; run it with "
                f"`python -m pace_lightning compare {origin}`"
            )
        if key not in hints:
            raise ConfigError(f"{origin}: unknown key {where}: {_near_key(key, hints)}")
        if is_dataclass(hints[key]):
            _assign_section(node[key], hints[key], value, path=where, origin=origin)
        elif hints[key] == list[SourceConfig]:
            _assign_sources(node, key, value, path=where, origin=origin)
        else:
            _assign_value(node, key, value, hints[key], path=where, origin=origin)


def _assign_sources(node: Any, key: str, values: Any, *, path: str, origin: str) -> None:
    """Assign a whole list of sources, or, from an override, to entries of the present list."""
    if isinstance(values, list):
        sources = []
        for index, item in enumerate(values):
            source = OmegaConf.structured(SourceConfig)
            _assign_section(source, SourceConfig, item, path=f"{path}[{index}]", origin=origin)
            sources.append(source)
        OmegaConf.update(node, key, sources)
        return
    if not isinstance(values, Mapping) or not all(re.fullmatch("[0-9]+", str(i)) for i in values):
        raise ConfigError(
            f"{origin}: {path} is {show(values)}, expected a list, each entry of which starts with "
            "'- path: ...'"
        )
    for index, item in values.items():
        if int(index) >= len(node[key]):
            raise ConfigError(
                f"{origin}: {path} has {len(node[key])} entries, so there is no entry {index} "
                "(the first is 0)"
            )
        entry = node[key][int(index)]
        _assign_section(entry, SourceConfig, item, path=f"{path}[{index}]", origin=origin)


def _assign_value(node: Any, key: str, value: Any, hint: Any, *, path: str, origin: str) -> None:
    """Assign one value, converted to its type."""
    for leaf in _leaves(value):
        if isinstance(leaf, str) and "${" in leaf:
            raise ConfigError(
                f"{origin}: {path} is {show(leaf)}; '${{...}}' is not supported: "
                "write the value out"
            )
        if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
            raise ConfigError(f"{origin}: {path} does not fit into 64 bits")
    try:
        OmegaConf.update(node, key, value)
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        expected = _expected(hint)
        if isinstance(hint, type) and issubclass(hint, Enum):
            expected += f"; {nearest(value, [member.value for member in hint])}"
        raise ConfigError(f"{origin}: {path} is {show(value)}, expected {expected}") from error


def _leaves(value: Any) -> Iterator[Any]:
    """Every key and every value at the end of a nesting."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _plain(value: Any) -> Any:
    """The same values without enums and tuples."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _expected(hint: Any) -> str:
    """A type in words."""
    if isinstance(hint, UnionType):
        parts = [_expected(part) for part in get_args(hint) if part is not NoneType]
        return " or ".join([*parts, "null"])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(member.value for member in hint)}"
    if hint in TYPE_NAMES:
        return TYPE_NAMES[hint]
    if get_origin(hint) is tuple:
        return f"a list of {len(get_args(hint))} numbers"
    if get_origin(hint) is list:
        return "a list of texts"
    return "a mapping with text keys"


def _near_key(key: object, valid: Iterable[str]) -> str:
    """The nearest valid key; failing that, the same key in another section."""
    names = list(valid)
    if not difflib.get_close_matches(str(key), names, n=1):
        sections = {n: hint for n, hint in get_type_hints(Config).items() if is_dataclass(hint)}
        homes = [f"{n}.{key}" for n, hint in sections.items() if key in get_type_hints(hint)]
        if homes:
            return f"did you mean '{homes[0]}'?"
    return nearest(key, names)


def _example(key: str) -> str:
    """What to write for a mandatory value."""
    example = EXAMPLES.get(key) or EXAMPLES.get(key.rsplit(".", 1)[-1])
    return f"for example {example}" if example else "give it a value"
