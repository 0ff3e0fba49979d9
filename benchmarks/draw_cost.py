"""How long one draw with PACE takes, from a large pool and from a very large one.

    python benchmarks/draw_cost.py

A draw of 32 groups of 8 with the largest budget, so that 64 groups are scored, 32 of them leave
untrained, and the drift window is full. The pool is filled up again between draws.
"""
# ruff: noqa: T201 - it talks to the user

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator

from pace_lightning.core.pace import Pace, RejectionBudget
from pace_lightning.core.pool import TrajectoryPool
from pace_lightning.core.trajectory import Prompt, Trajectory, TrajectoryGroup

GROUPS_PER_STEP, GROUP_SIZE, WINDOW = 32, 8, 1024
VERSION = 100
TARGETS_MILLISECONDS = {"smaller pool": 1.0, "difference": 5.0}


def make_groups(num_tokens: int) -> Iterator[TrajectoryGroup]:
    """Endless groups with uids of their own; their trajectories are shared, to save memory."""
    rng = random.Random(0)
    trajectories = [
        Trajectory(
            token_ids=(1,) * num_tokens,
            token_versions=tuple(sorted(rng.choices(range(80, 90), k=num_tokens))),
            behavior_logprobs=(-1.0,) * num_tokens,
            completed_at=rng.randint(90, VERSION),
            reward=0.0,
            score=0.0,
            truncated=False,
            prefix_forgetting=rng.choice([None, rng.expovariate(20.0)]),
        )
        for _ in range(1000)
    ]
    for number in itertools.count():
        prompt = Prompt(uid=f"{number // 17_000}:{number % 17_000}", token_ids=(1,), content="")
        yield TrajectoryGroup(prompt, tuple(rng.choices(trajectories, k=GROUP_SIZE)))


def draw_milliseconds(num_ready: int, *, num_draws: int, num_tokens: int) -> list[float]:
    """Durations of single draws from a pool of ``num_ready`` groups."""
    policy = Pace(
        RejectionBudget(target_groups=GROUPS_PER_STEP, smoothing=1.0),
        window_size=WINDOW,
        window_minimum=64,
        aging_limit=3,
    )
    pool = TrajectoryPool(policy, settle=lambda *_: None)
    groups = make_groups(num_tokens)
    durations = []
    for draw in range(-10, num_draws):  # the first ones fill the drift window
        while len(pool) < num_ready:
            pool.put(next(groups))
        start = time.perf_counter()
        _, report = pool.draw(GROUPS_PER_STEP, version=VERSION, timeout_seconds=0)
        duration = time.perf_counter() - start
        assert report.rejected_groups == GROUPS_PER_STEP
        if draw >= 0:
            durations.append(1000 * duration)
    return durations


def main() -> None:
    """Print medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--groups", type=int, nargs=2, default=[10_000, 1_000_000])
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of one response")
    options = parser.parse_args()
    medians = []
    for num_ready in options.groups:
        times = draw_milliseconds(num_ready, num_draws=options.draws, num_tokens=options.tokens)
        medians.append(statistics.median(times))
        print(
            f"{num_ready:>9,} ready groups: median {medians[-1]:.3f} ms, "
            f"90 % below {statistics.quantiles(times, n=10)[-1]:.3f} ms ({len(times)} draws)"
        )
    print(f"difference of the medians: {medians[1] - medians[0]:.3f} ms")
    within = (
        medians[0] < TARGETS_MILLISECONDS["smaller pool"]
        and medians[1] - medians[0] < TARGETS_MILLISECONDS["difference"]
    )
    print(f"targets {TARGETS_MILLISECONDS} ms: {'met' if within else 'MISSED'}")


if __name__ == "__main__":
    main()
