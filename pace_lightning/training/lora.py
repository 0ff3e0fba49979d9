"""Low-rank adapters (LoRA, arXiv:2106.09685) through peft: the only weights that are trained then.

``W x`` becomes ``W x + alpha / rank * B A x`` with ``W`` frozen, ``A`` random and ``B`` zero at
first, so that training begins at the model itself. There is no dropout: the policy that is trained
is the policy that samples. Engines know nothing of adapters; they get ``W + alpha / rank * B A``
under the names that the model had without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pace_lightning.rollout.weights import LazyWeights
from pace_lightning.training.policy import ModelError

_ADAPTER = "default"
"""peft's name of the only adapter."""


def add_adapters(
    model: Any, *, rank: int, alpha: float, target_modules: Sequence[str] = (), seed: int = 0
) -> None:
    """Put an adapter on linear layers, and freeze all else; in place.

    Args:
        model: a causal LM.
        rank: of ``B A``.
        alpha: the update is scaled by ``alpha / rank``.
        target_modules: names of linear layers, or the ends of such names (``q_proj``); empty: all
            of them but the output head. Experts that a model holds in one tensor are none.
        seed: of ``A``.

    Raises:
        ModelError: if a name fits no layer, or one that is no linear layer, or the output head.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = set(target_modules)
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    head = model.get_output_embeddings()
    linear -= {name for name, module in model.named_modules() if module is head}
    for name in sorted(names):
        if not any(layer == name or layer.endswith(f".{name}") for layer in linear):
            known = sorted({layer.rpartition(".")[2] for layer in linear})
            raise ModelError(
                f"model.lora.target_modules has {name!r}, which is no linear layer of "
                f"{type(model).__name__} beside its output head; its layers are {known}"
            )
    chosen = {
        layer
        for layer in linear
        if not names or any(layer == name or layer.endswith(f".{name}") for name in names)
    }
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # declared int, used as a factor
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted(chosen),  # by full names: "all-linear" would take experts too
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    model.eval()
    if (found := set(adapted_layers(model))) != chosen:
        raise ModelError(
            f"peft put adapters on {sorted(found - chosen)[:3]} and not on "
            f"{sorted(chosen - found)[:3]}; name the layers in model.lora.target_modules"
        )


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that have an adapter, by the names that they had without it."""
    if not hasattr(model, "peft_config"):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What an optimizer may change, by name: the adapters if there are any, else everything."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Their values; views, not copies."""
    return {name: parameter.data for name, parameter in trained_parameters(model).items()}


def merged_weights(model: nn.Module) -> Mapping[str, Tensor]:
    """The parameters that the model would have without adapters, by name.

    Views where there is no adapter. Where there is one, each tensor is computed when it is asked
    for and kept by nobody, so that at most one of them is held beside the trainer's own weights,
    which stay as they are.
    """
    layers = adapted_layers(model)
    plain: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        owner, _, inside = name.rpartition(".base_layer.")
        if owner in layers:
            plain[f"{owner}.{inside}"] = parameter.data
        elif name.partition(".lora_")[0] not in layers:
            plain[name] = parameter.data
    if not layers:
        return plain
    by_weight = {f"{name}.weight": layer for name, layer in layers.items()}

    @torch.no_grad()
    def merge(name: str) -> Tensor:
        weight = plain[name]
        if (layer := by_weight.get(name)) is None:
            return weight
        return weight + layer.get_delta_weight(_ADAPTER).to(weight)

    return LazyWeights({name: weight.shape for name, weight in plain.items()}, merge)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model is the one that training began with; no gradients are recorded.

    Nothing is copied or computed.

    Raises:
        ValueError: if there are no adapters that could be left out.
    """
    layers = list(adapted_layers(model).values())
    if not layers:
        raise ValueError(f"{type(model).__name__} has no adapters, so it cannot be without them")
    with torch.no_grad():
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)


def save_policy(model: Any, directory: Path) -> None:
    """Write the model as a Hugging Face directory: adapters merged in, and also by themselves.

    The adapter lies in ``adapter/``, as peft loads it on top of the model that training began with:
    beside the merged weights, transformers would add it to them once more.
    """
    layers = adapted_layers(model)
    if not layers:
        model.save_pretrained(directory)
        return
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    merged = {name: weight.cpu() for name, weight in merged_weights(model).items()}
    model.save_pretrained(directory, state_dict=merged)
    adapter = get_peft_model_state_dict(model, adapter_name=_ADAPTER)
    config = model.peft_config[_ADAPTER]
    config.base_model_name_or_path = model.config._name_or_path
    target = directory / "adapter"
    config.save_pretrained(target)
    save_file(
        # as of a model that is wrapped by peft, which is how peft loads them
        {f"base_model.model.{name}": t.detach().cpu().contiguous() for name, t in adapter.items()},
        target / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
