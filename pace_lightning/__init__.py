"""pace_lightning: asynchronous RL post-training of language models on PyTorch Lightning, with staleness measured."""

__version__ = "0.1.0"
