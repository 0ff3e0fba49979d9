"""Random number generators, as part of a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch


class RandomState(pl.Callback):
    """Saves and restores the generators of Python, NumPy and torch, CPU and GPU.

    Sampling is not among what this repeats: an engine has a seed of its own, and one that begins
    after a resume has another one (`life_seed`). The local engine, which samples with the global
    generators of torch, seeds them when it starts.
    """

    def state_dict(self) -> dict[str, Any]:
        """Tensors and primitives."""
        version, words, gauss = random.getstate()
        numpy = np.random.get_state(legacy=False)
        assert isinstance(numpy, dict)
        inner = numpy["state"]
        return {
            "python": [version, list(words), gauss],
            "numpy": {**numpy, "state": {"key": inner["key"].tolist(), "pos": int(inner["pos"])}},
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the numbers were; those of GPUs if there are as many as before."""
        version, words, gauss = state_dict["python"]
        random.setstate((version, tuple(words), gauss))
        numpy = dict(state_dict["numpy"])
        key = np.asarray(numpy["state"]["key"], dtype=np.uint32)
        numpy["state"] = {"key": key, "pos": numpy["state"]["pos"]}
        np.random.set_state(numpy)
        torch.set_rng_state(state_dict["torch"])
        if torch.cuda.is_available() and len(state_dict["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state_dict["cuda"])
