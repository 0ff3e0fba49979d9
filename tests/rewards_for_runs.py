"""Reward functions for whole runs; they are called in the scorer's process."""

import os
import time
from pathlib import Path

_num_calls = 0


def mixed(prompts, completions, **columns):
    """Every second response is right: each group has a gradient."""
    return [float(index % 2) for index, _ in enumerate(completions)]


def wrong(prompts, completions, **columns):
    """No response is right: no group has a gradient."""
    return [0.0] * len(completions)


def stumble(prompts, completions, **columns):
    """Never judges anything."""
    raise KeyError("the verifier stumbled")


def stumble_in_training(prompts, completions, **columns):
    """Judges 2 groups like `mixed`, the evaluation before training, and nothing after them."""
    global _num_calls
    _num_calls += 1
    return mixed(prompts, completions) if _num_calls <= 2 else stumble(prompts, completions)


def never_return(prompts, completions, **columns):
    """Hangs."""
    while True:
        time.sleep(1)


def stall(prompts, completions, **columns):
    """Judges ``$STALL_AFTER_GROUPS`` groups like `mixed`, then makes ``$STALL_FILE`` and hangs."""
    global _num_calls
    _num_calls += 1
    if _num_calls > int(os.environ["STALL_AFTER_GROUPS"]):
        Path(os.environ["STALL_FILE"]).touch()
        never_return(prompts, completions)
    return mixed(prompts, completions)
