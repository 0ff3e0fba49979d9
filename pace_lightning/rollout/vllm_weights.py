"""What the engine loads from: a model configuration and, for the time of a load, its weights.

The model is served **untied**. vLLM's CPU back end keeps a repacked copy of the output head; when a
model ties its head to the embedding, a reload replaces the embedding and leaves that copy as it
was, without an error. So the configuration that is served says ``tie_word_embeddings: false``, and
the head is written out as a tensor of its own with every publication.

The engine starts on **noise**, never on the trainer's weights: the first publication must replace
every tensor, and its verification shows whether it did. A tensor that vLLM silently leaves alone is
found then, before the first token, and not when training has slowly moved away from it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pace_lightning.rollout.engine import EngineError

FILE = "model.safetensors"


@dataclass(frozen=True)
class ServedModel:
    """What an engine has to know of the trainer's model, looked up while each rank has all of it.

    A strategy that partitions the model empties its parameters or puts others in their place, and
    FSDP changes its class; adapters change the names. An engine is started, and started again,
    after all that.
    """

    model: Any
    architecture: str
    parameters: Mapping[str, Tensor]
    """Names and shapes that every publication must have; the tensors are without memory."""
    scales: Mapping[str, float]
    """Root mean square of each parameter; empty if no noise will be asked for."""
    tied: Mapping[str, str]
    """See `tied_parameters`."""


def served_model(model: Any, *, with_scales: bool = True) -> ServedModel:
    """Look at a causal LM as it is now; scales take a pass over all its weights."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return ServedModel(
        model=model,
        architecture=type(model).__name__,
        parameters={
            name: torch.empty_like(tensor, device="meta") for name, tensor in named.items()
        },
        scales={
            name: float(torch.linalg.vector_norm(tensor, dtype=torch.float32))
            / math.sqrt(tensor.numel())
            for name, tensor in named.items()
            if with_scales
        },
        tied=tied_parameters(model),
    )


class ServingDirectory:
    """A directory in shared memory that vLLM loads a model from.

    Args:
        served: the trainer's causal LM.
        dtype: to serve in.
    """

    def __init__(self, served: ServedModel, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.parameters = served.parameters
        """Names and shapes that every publication must have."""
        self._served = served
        num_elements = sum(tensor.numel() for tensor in self.parameters.values())
        num_elements += sum(self.parameters[name].numel() for name in served.tied.values())
        room = 2 * num_elements * dtype.itemsize
        self.path = Path(tempfile.mkdtemp(prefix="pace-lightning-", dir=_roomy(room)))
        config = json.loads(served.model.config.to_json_string(use_diff=False))
        config["architectures"] = [served.architecture]
        if served.tied:
            config["tie_word_embeddings"] = False
        (self.path / "config.json").write_text(json.dumps(config))

    def checkpoint(
        self, weights: Mapping[str, Tensor], device: str | None = None
    ) -> dict[str, Tensor]:
        """The tensors to serve, by the names that a checkpoint of this architecture has.

        Args:
            weights: by the names of the model's parameters.
            device: where to; None: where they are.
        """
        from transformers.core_model_loading import revert_weight_conversion

        with torch.no_grad():
            tensors = {
                name: weight.detach().to(device=device, dtype=self.dtype)
                for name, weight in weights.items()
            }
            for name, source in self._served.tied.items():
                tensors[name] = tensors[source].clone()
            # some architectures hold tensors fused that their checkpoints, and vLLM, have apart
            reverted: dict[str, Tensor] = revert_weight_conversion(self._served.model, tensors)
        return reverted

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Put weights where the next load finds them; nobody ever sees a part of them."""
        from safetensors.torch import save_file

        scratch = self.path / f"{FILE}.part"
        tensors = {name: t.contiguous() for name, t in self.checkpoint(weights, "cpu").items()}
        try:
            save_file(tensors, scratch, metadata={"format": "pt"})
            os.replace(scratch, self.path / FILE)
        except OSError as error:
            raise EngineError(
                f"the weights could not be written to {self.path}: {error}; make room there, or "
                "name another directory in TMPDIR"
            ) from error

    def write_noise(self) -> None:
        """Put noise of each tensor's size where the first load finds it."""
        generator = torch.Generator().manual_seed(0)
        noise = {
            name: torch.randn(weight.shape, generator=generator) * self._served.scales[name]
            for name, weight in self.parameters.items()
        }
        self.write(noise)

    def clear(self) -> None:
        """Give the memory of the weights back: they are loaded."""
        (self.path / FILE).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.path, ignore_errors=True)


def tied_parameters(model: Any) -> dict[str, str]:
    """Parameters that are another one under a second name, each with the first name."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


def _roomy(num_bytes: int) -> str:
    """A directory with that much room: memory, if there is enough of it."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK):
        free = shutil.disk_usage(memory).free
        if free > num_bytes:
            return str(memory)
    return tempfile.gettempdir()
