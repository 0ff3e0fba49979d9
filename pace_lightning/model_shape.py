"""How large a model is, from its configuration alone: no weights, no network, no heavy import.

Shapes of models whose configuration is not on this machine are in `KNOWN`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """A decoder of Llama's kind: grouped-query attention, RMS norms, gated MLP or experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Of the dense MLP; unused if there are experts."""
    vocabulary: int
    tied: bool = False
    """Whether the output head is the embedding."""
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    qk_norm: bool = False
    """Qwen3: queries and keys are normalized per head."""
    qkv_bias: bool = False
    """Qwen2."""

    @property
    def query_size(self) -> int:
        """Of all heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Of all heads of keys, or of values."""
        return self.kv_heads * self.head_dim

    @property
    def linear_sizes(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the linear layers of one block; experts and router left out."""
        hidden = self.hidden
        attention = [
            (hidden, self.query_size),
            (hidden, self.kv_size),
            (hidden, self.kv_size),
            (self.query_size, hidden),
        ]
        if self.experts:
            return attention
        return [*attention, *[(hidden, self.intermediate)] * 2, (self.intermediate, hidden)]

    @property
    def layer_parameters(self) -> int:
        """Of one block."""
        total = sum(inputs * outputs for inputs, outputs in self.linear_sizes) + 2 * self.hidden
        total += self.experts * 3 * self.hidden * self.expert_intermediate
        total += self.experts * self.hidden  # the router
        total += 2 * self.head_dim * self.qk_norm
        return total + (self.query_size + 2 * self.kv_size) * self.qkv_bias

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return embeddings + self.layers * self.layer_parameters + self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Of LoRA adapters of this rank on all linear layers; see `linear_sizes`."""
        return self.layers * rank * sum(sum(sizes) for sizes in self.linear_sizes)


_QWEN3_4B = ModelShape(
    layers=36,
    hidden=2560,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=9728,
    vocabulary=151_936,
    tied=True,
    qk_norm=True,
)
_QWEN3_8B = replace(_QWEN3_4B, hidden=4096, intermediate=12_288, tied=False)
_QWEN3_30B_A3B = replace(
    _QWEN3_8B,
    layers=48,
    hidden=2048,
    kv_heads=4,
    intermediate=6144,
    experts=128,
    experts_per_token=8,
    expert_intermediate=768,
)

KNOWN = {
    "Qwen/Qwen3-4B": _QWEN3_4B,
    "Qwen/Qwen3-4B-Base": _QWEN3_4B,
    "Qwen/Qwen3-8B": _QWEN3_8B,
    "Qwen/Qwen3-8B-Base": _QWEN3_8B,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B,
    "Qwen/Qwen3-30B-A3B-Base": _QWEN3_30B_A3B,
}
"""By hub name, from ``config.json`` of the models and tables 1 and 2 of arXiv:2505.09388."""

_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


def shape_of(name: Path | str) -> ModelShape | None:
    """The shape of a model; None if it cannot be said without loading or fetching it.

    Args:
        name: a directory with ``config.json``, or a hub id: one that was fetched before, or one of
            `KNOWN`.
    """
    file = Path(name) / "config.json"
    if not file.is_file():
        if (known := KNOWN.get(str(name))) is not None:
            return known
        if (found := _fetched(str(name))) is None:
            return None
        file = found
    try:
        return from_config(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # for an estimate; what loads the model says what is wrong with it


def from_config(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a ``config.json`` describes; None if it is of another kind of model."""
    kind = config.get("model_type")
    if kind not in _TYPES:
        return None
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    is_sparse = kind == "qwen3_moe"
    if is_sparse and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        return None  # experts in some layers only
    return ModelShape(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        # transformers writes it under another name than the models' authors
        experts=(config.get("num_experts") or config["num_local_experts"]) if is_sparse else 0,
        experts_per_token=config["num_experts_per_tok"] if is_sparse else 0,
        expert_intermediate=config["moe_intermediate_size"] if is_sparse else 0,
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        qkv_bias=kind == "qwen2",
    )


def _fetched(name: str) -> Path | None:
    """The configuration of a hub model in the cache of this machine."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # no hub id
        return None
    return Path(found) if isinstance(found, str) else None
