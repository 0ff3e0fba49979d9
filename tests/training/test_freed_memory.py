"""Memory that was freed is used again without the system's help."""

import os
import subprocess
import sys

import pytest

ROUNDS = 24
PAGES = 100 * 256
"""Of 4 KiB, in each of the rounds."""

PROGRAM = f"""
import ctypes, resource, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: small pages, whatever the system has
from pace_lightning.training.freed_memory import keep_freed_memory
print(int(keep_freed_memory()))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}):
    torch.ones({PAGES} * 1024)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def told_and_faults(**environment):
    """Whether the allocator was told, and the page faults of all rounds."""
    rest = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, env=rest | environment, check=True, capture_output=True, text=True, timeout=120
    )
    told, faults = map(int, done.stdout.split())
    return told, faults


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="for glibc")
def test_freed_memory_is_used_again_without_page_faults():
    told, faults = told_and_faults()
    assert told == 1
    # the first rounds leave holes that are a little too small for the next one
    assert faults < ROUNDS / 2 * PAGES


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="for glibc")
@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_ARENA_MAX": "4"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}],
)
def test_an_allocator_that_the_user_has_set_up_is_left_alone(environment):
    told, faults = told_and_faults(**environment)
    assert told == 0
    assert faults > 0.9 * ROUNDS * PAGES
