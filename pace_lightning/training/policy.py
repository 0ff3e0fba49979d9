"""Load a causal language model and its tokenizer; copy it for the engine."""

from __future__ import annotations

import copy
import fcntl
import functools
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pace_lightning.core.logprobs import token_logprobs

log = logging.getLogger(__name__)

_CONVERTED = "pace_lightning_converted.json"


class ModelError(ValueError):
    """The model cannot be loaded; the message says what to change."""


def resolve(path: str) -> Path | str:
    """Where a model is: a directory or GGUF file on this machine, or a hub id as it was given.

    Args:
        path: local path, ``package:NAME/FILE`` for a file inside an installed package (which is not
            imported), or a hub id.

    Raises:
        ModelError: if a package or a file that is named does not exist.
    """
    if path.startswith("package:"):
        name, _, inside = path.removeprefix("package:").partition("/")
        # a name with a dot would import the package around it
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        locations = None if spec is None else spec.submodule_search_locations
        if not locations:
            raise ModelError(
                f"model.path {path!r}: package {name!r} is not installed; `make setup` installs "
                "the one that the default experiment needs"
            )
        found = Path(next(iter(locations))) / inside
        if not found.exists():
            raise ModelError(f"model.path {path!r}: {found} does not exist")
        return found
    local = Path(path).expanduser()
    if local.exists():
        return local
    if path.endswith(".gguf") or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ModelError(f"model.path {path!r} does not exist (relative to {Path.cwd()})")
    return path


def local_model(path: str) -> str:
    """A name that transformers can load: a directory or a hub id.

    A GGUF file is converted once and cached. The cache is ``$PACE_LIGHTNING_CACHE``, by default
    ``~/.cache/pace_lightning``.
    """
    found = resolve(path)
    if isinstance(found, Path) and found.is_file():
        if found.suffix != ".gguf":
            raise ModelError(
                f"model.path {path!r} is a file but not GGUF; give the directory that holds it"
            )
        return str(_converted(found))
    return str(found)


def present_model(path: str) -> Path | str | None:
    """The same without converting anything: None for a GGUF file that was not converted before.

    And for what does not exist.
    """
    try:
        found = resolve(path)
    except ModelError:
        return None
    if isinstance(found, Path) and found.is_file():
        return cached("models", _converted_name(found), _CONVERTED)
    return found


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model, padding on the right.

    Raises:
        ModelError: if there is none, or it cannot pad.
    """
    from transformers import AutoTokenizer

    name = local_model(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"no tokenizer could be loaded from {name!r}: {_first_line(error)}"
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {name!r} has no end-of-sequence token: no response could ever stop"
        )
    tokenizer.padding_side = "right"
    return tokenizer


def load_policy(
    path: str,
    *,
    random_init: bool = False,
    seed: int = 0,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A causal LM in ``dtype``. Code that comes with it is never run.

    Args:
        path: see `resolve`.
        random_init: take only the architecture from ``path`` and draw the weights from ``seed``.
        seed: of the random weights.
        attention: transformers' name of the attention implementation.
        dtype: of the parameters.

    Raises:
        ModelError: if it cannot be loaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    name = local_model(path)
    try:
        if random_init:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(
                    config, attn_implementation=attention, dtype=dtype
                )
        else:
            model = AutoModelForCausalLM.from_pretrained(
                name,
                attn_implementation=attention,
                dtype=dtype,
                trust_remote_code=False,
                weights_only=True,
            )
    except (OSError, ValueError, UnpicklingError) as error:
        raise ModelError(
            f"no model could be loaded from {name!r}: {_first_line(error)}. Give a local "
            "directory, a GGUF file, or a hub id that this machine can reach"
        ) from error
    return model.eval()  # no dropout: the policy that is trained is the policy that samples


def copy_for_engine(model: Any, dtype: torch.dtype) -> Any:
    """The same architecture and weights, sharing neither memory nor configuration, in ``dtype``.

    The configuration must not be shared: continuous batching passes ``is_causal=False`` with each
    forward, and transformers writes that into ``model.config`` while it lasts, so that a forward of
    the trainer in another thread would silently attend to the future.
    """
    from transformers import AutoModelForCausalLM

    twin = AutoModelForCausalLM.from_config(
        copy.deepcopy(model.config),
        attn_implementation=model.config._attn_implementation,
        dtype=dtype,
    )
    twin.load_state_dict(model.state_dict())
    return twin.eval().requires_grad_(False)


@torch.no_grad()
def sequence_logprobs(model: Any, token_ids: Sequence[int]) -> list[float]:
    """Log-probs of the tokens of a sequence but the first, at temperature 1."""
    device = next(model.parameters()).device
    input_ids = torch.tensor([list(token_ids)], device=device)
    predicted = torch.ones_like(input_ids, dtype=torch.bool)
    predicted[:, 0] = False
    logprobs, _ = token_logprobs(model, input_ids, torch.ones_like(input_ids), predicted)
    values: list[float] = logprobs[0, 1:].tolist()
    return values


def weights_logprobs(
    config: Any, token_ids: Sequence[int], weights: Mapping[str, Tensor]
) -> list[float]:
    """`sequence_logprobs` of weights in host memory, which are neither copied nor kept.

    Args:
        config: of the model.
        token_ids: the sequence.
        weights: all parameters, by name.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    model.load_state_dict(dict(weights), strict=False, assign=True)
    model.tie_weights()
    return sequence_logprobs(model.eval(), token_ids)


def checkpoint_layers(model: Any) -> None:
    """Recompute the activations of each layer in the backward pass, in place.

    Not by ``gradient_checkpointing_enable``: it has no effect in evaluation mode, in which a policy
    stays.

    Raises:
        ModelError: if the architecture has no layers that can be recomputed.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ModelError(f"{type(model).__name__} does not support model.gradient_checkpointing")
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def _converted(gguf: Path) -> Path:
    """The Hugging Face directory made from a GGUF file, in the cache; converted on first use."""

    def convert(scratch: Path) -> dict[str, Any]:
        log.info("converting %s once, into the cache", gguf.name)
        _convert(gguf, scratch)
        return {"source": gguf.name, "bytes": gguf.stat().st_size}

    return made_once("models", _converted_name(gguf), _CONVERTED, convert)


def _converted_name(gguf: Path) -> str:
    size = gguf.stat().st_size
    key = hashlib.sha256(f"{gguf.name}:{size}:{_head_hash(gguf)}".encode()).hexdigest()[:16]
    return f"{gguf.stem}-{key}"


def cached(kind: str, name: str, marker: str) -> Path | None:
    """A directory that `made_once` has made, or None."""
    target = _cache() / kind / name
    return target if (target / marker).exists() else None


def made_once(kind: str, name: str, marker: str, make: Callable[[Path], Mapping[str, Any]]) -> Path:
    """A directory in the cache, made now unless it is there; whole or absent, whoever is killed.

    Args:
        kind: subdirectory of the cache.
        name: of the directory; must stand for everything that goes into it.
        marker: file that says it is whole, and holds what ``make`` returns.
        make: fills an empty directory.
    """
    if (found := cached(kind, name, marker)) is not None:
        return found
    target = _cache() / kind / name
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = (target.parent / f".{name}.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # of many ranks one makes it; let go also by a kill
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        if (found := cached(kind, name, marker)) is not None:
            return found
        report = make(scratch)
        (scratch / marker).write_text(json.dumps(report, indent=2) + "\n")
        try:
            scratch.rename(target)
        except OSError:
            if not (target / marker).exists():  # else another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        lock.close()
    return target


def _cache() -> Path:
    return Path(os.environ.get("PACE_LIGHTNING_CACHE", "~/.cache/pace_lightning")).expanduser()


def _head_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(file.read(1 << 20)).hexdigest()


def _convert(gguf: Path, target: Path) -> None:
    """De-quantize a GGUF file into a directory of safetensors.

    Three repairs to what transformers reads from GGUF: the digit splitter of SmolLM2's tokenizer is
    lost, the padding side is not saved, and ``rms_norm_eps`` is a float32 number written out as
    float64.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    backend = tokenizer.backend_tokenizer
    if "smollm" in gguf.name.lower():
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
        )
    tokenizer.padding_side = "right"
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    eps = getattr(model.config, "rms_norm_eps", None)
    if eps is not None:
        model.config.rms_norm_eps = float(f"{eps:.6g}")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
