"""Random schedules in virtual time: no prompt is lost, nobody waits for ever, every bound holds.

A failure names its seed. To see its whole story:

    PACE_SIMULATION_SEED=4711 python -m pytest tests/simulation
"""

import logging
import os
from collections import Counter

import pytest
from simulated_run import simulate

REPLAY = "PACE_SIMULATION_SEED"
FAST = 100
"""Schedules before each commit; the rest is marked slow."""
CHUNK, NUM_CHUNKS = 660, 15
STORY_LINES = 40
ENDINGS = {
    "finished",
    "data ended",
    "killed",
    "engine died",
    "draw timed out",
    "publication timed out",
    "too many failures",
    "nothing to learn",
}


@pytest.fixture(autouse=True)
def silence():
    """Thousands of scripted failures are nothing to warn about."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def check(seeds):
    """Run these schedules; how often each ending came about."""
    endings = Counter()
    for seed in seeds:
        story = []
        try:
            endings.update(simulate(seed, story))
        except BaseException as error:
            lines = [story[0], *story[1:][-STORY_LINES:]]
            raise AssertionError(
                f"seed {seed}: {error}\n" + "\n".join(lines) + f"\n\nreplay with "
                f"{REPLAY}={seed} python -m pytest tests/simulation"
            ) from error
    return endings


def test_schedules_keep_every_invariant():
    if REPLAY in os.environ:
        pytest.skip("replaying one seed")
    endings = check(range(FAST))
    assert {"finished", "data ended", "killed"} <= endings.keys()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_many_schedules_keep_every_invariant(chunk):
    if REPLAY in os.environ:
        pytest.skip("replaying one seed")
    first = FAST + chunk * CHUNK
    endings = check(range(first, first + CHUNK))
    missed = ENDINGS - endings.keys()
    assert not missed, f"the schedules no longer cover {missed}: {endings}"


@pytest.mark.skipif(REPLAY not in os.environ, reason=f"set {REPLAY} to replay one schedule")
def test_replay():
    story = []
    try:
        simulate(int(os.environ[REPLAY]), story)
    finally:
        print("\n".join(story))  # noqa: T201


def test_a_schedule_follows_from_its_seed_alone():
    stories = []
    for _ in range(2):
        stories.append([])
        for seed in range(12):
            simulate(seed, stories[-1])
    first, second = ([line for line in story if "Scenario" not in line] for story in stories)
    assert first == second
