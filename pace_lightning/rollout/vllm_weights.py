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
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pace_lightning.rollout.engine import EngineError

FILE = "model.safetensors"


class ServingDirectory:
    """A directory in shared memory that vLLM loads a model from.

    Args:
        model: the trainer's causal LM.
        parameters: names, shapes and sizes that every publication has.
        dtype: to serve in.
    """

    def __init__(self, model: Any, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._model = model
        self._tied = tied_parameters(model)
        self.parameters = parameters
        """Names and shapes that every publication must have."""
        num_bytes = sum(tensor.numel() for tensor in self.parameters.values()) * dtype.itemsize
        num_bytes += sum(self.parameters[name].numel() for name in self._tied.values()) * (
            dtype.itemsize
        )
        self.path = Path(tempfile.mkdtemp(prefix="pace-lightning-", dir=_roomy(2 * num_bytes)))
        config = json.loads(model.config.to_json_string(use_diff=False))
        config["architectures"] = [type(model).__name__]
        if self._tied:
            config["tie_word_embeddings"] = False
        (self.path / "config.json").write_text(json.dumps(config))

    def checkpoint(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors to serve, by the names that a checkpoint of this architecture has.

        Args:
            weights: by the names of the model's parameters.
        """
        from transformers.core_model_loading import revert_weight_conversion

        with torch.no_grad():
            tensors = {name: weight.detach().to(self.dtype) for name, weight in weights.items()}
            for name, source in self._tied.items():
                tensors[name] = tensors[source].clone()
            # some architectures hold tensors fused that their checkpoints, and vLLM, have apart
            reverted: dict[str, Tensor] = revert_weight_conversion(self._model, tensors)
        return reverted

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Put weights where the next load finds them; nobody ever sees a part of them."""
        from safetensors.torch import save_file

        scratch = self.path / f"{FILE}.part"
        tensors = {name: t.contiguous().cpu() for name, t in self.checkpoint(weights).items()}
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
        noise = {}
        for name, weight in self.parameters.items():
            size = weight.detach().float().square().mean().sqrt().cpu()
            noise[name] = torch.randn(weight.shape, generator=generator) * size
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
