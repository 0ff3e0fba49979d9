"""``python -m rank_messages OUT``: one of two ranks that exchange every kind of message."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from pace_lightning.rollout.groups import NothingToLearnError
from pace_lightning.training.ranks import Ranks


class Unportable(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def failing(ranks, error):
    """What each rank sees of an error of rank 0."""

    def fail():
        raise error

    try:
        ranks.scatter(fail)
    except Exception as seen:
        return [type(seen).__name__, str(seen)]
    return None


def postponed(ranks):
    ranks.postpone()
    ranks.postpone()
    return ["late", "later"]


def main(out):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ranks = Ranks(rank, 2, timeout_seconds=60)
    seen = {
        "scattered": ranks.scatter(lambda: ["first", "second"]),
        "ended": ranks.scatter(lambda: None),
        "postponed": ranks.scatter(lambda: postponed(ranks)),
        "shared": ranks.share(lambda: {"by": rank}),
        "gathered": ranks.gather(rank * 10),
        "failed": failing(ranks, NothingToLearnError("pass rate 0.00")),
        "unportable": failing(ranks, Unportable("this", "that")),
    }
    seen["before"] = str(ranks.failure_elsewhere())
    ranks.gather("nobody reports before all have looked")
    if rank == 1:
        ranks.report_failure(ValueError("the first word"))
    ranks.gather("rank 1 has reported")
    ranks.report_failure(RuntimeError("an echo"))
    ranks.gather("both have reported")
    seen["after"] = str(ranks.failure_elsewhere())
    Path(out, str(rank)).write_text(json.dumps(seen))
    ranks.gather("the store lives as long as anybody asks it")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
