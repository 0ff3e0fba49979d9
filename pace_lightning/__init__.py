"""pace_lightning: asynchronous RL post-training of language models on PyTorch Lightning.

Staleness is measured.
"""

__version__ = "0.1.0"
