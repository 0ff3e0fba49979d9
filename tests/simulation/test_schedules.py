"""Random schedules in virtual time: no prompt is lost, nobody waits for ever, every bound holds.

A failure names its seed. To see its whole story:

    PACE_SIMULATION_SEED=4711 python -m pytest tests/simulation
"""

import logging
import os
import random
from collections import Counter

import pytest
from simulated_run import Scenario, simulate, trained_prompts

from pace_lightning.core.admission import AdmitAll
from pace_lightning.core.dispatch import AheadBound, FixedSlots

REPLAY = "PACE_SIMULATION_SEED"
FAST = 100
"""Schedules before each commit; the rest is marked slow."""
CHUNK, NUM_CHUNKS = 660, 15
STORY_LINES = 40
CONTINUED = "groups were continued"
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
    endings: Counter[str] = Counter()
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
        endings[CONTINUED] += sum(CONTINUED in line for line in story)
    return endings


def test_schedules_keep_every_invariant():
    if REPLAY in os.environ:
        pytest.skip("replaying one seed")
    endings = check(range(FAST))
    assert {"finished", "data ended", "killed"} <= endings.keys()
    assert endings[CONTINUED] >= 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_many_schedules_keep_every_invariant(chunk):
    if REPLAY in os.environ:
        pytest.skip("replaying one seed")
    first = FAST + chunk * CHUNK
    endings = check(range(first, first + CHUNK))
    assert endings[CONTINUED] >= 20
    missed = ENDINGS - endings.keys()
    assert not missed, f"the schedules no longer cover {missed}: {endings}"


@pytest.mark.parametrize("mode", ["slots", "ahead", "rounds"])
def test_a_run_that_is_killed_again_and_again_trains_on_the_prompts_of_one_that_is_not(mode):
    story = []
    for seed in range(6):
        rng = random.Random(seed)
        size, eta = rng.choice([1, 2, 4]), rng.choice([1, 2])
        bound = AheadBound(0 if mode == "rounds" else eta, size)
        scenario = Scenario(
            groups_per_step=size,
            micro_batches=1,
            every_steps=1,
            admission=AdmitAll(),
            dispatch=FixedSlots(2 * size) if mode == "slots" else bound,
            in_rounds=mode == "rounds",
            num_prompts=8,
            epochs=2,
            steps=16 // size + 1,
            dynamic_sampling=True,
            evaluate=0.0,
            checkpoint=1.0,
            request_fault=0.0,
            equal_scores=0.0,
            score_fault=0.0,
            fatal=0.0,
            draw_seconds=1e6,
            publish_seconds=1e6,
        )
        whole = trained_prompts(seed, scenario, [], [])
        kills = [rng.randrange(50, 500) for _ in range(3)]
        assert trained_prompts(seed, scenario, kills, story) == whole
        assert whole == {f"{epoch}:{index}": 1 for epoch in range(2) for index in range(8)}
    assert sum("killed" in line for line in story) >= 6
    if mode != "rounds":
        assert any(CONTINUED in line for line in story)


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
