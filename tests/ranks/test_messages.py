"""What rank 0 tells the others, and what they tell it when they fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from experiments import ROOT

from pace_lightning.launch import launch
from pace_lightning.training.ranks import Ranks


@pytest.mark.slow
def test_every_rank_sees_what_rank_0_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    command = [sys.executable, "-m", "rank_messages", str(tmp_path)]
    assert launch(2, print, command=command) == 0
    zero, one = (json.loads((tmp_path / name).read_text()) for name in "01")
    assert (zero["scattered"], one["scattered"]) == ("first", "second")
    assert (zero["ended"], one["ended"]) == (None, None)
    assert (zero["postponed"], one["postponed"]) == ("late", "later")
    assert zero["shared"] == one["shared"] == {"by": 0}
    assert zero["gathered"] == one["gathered"] == [0, 10]
    assert zero["failed"] == one["failed"] == ["NothingToLearnError", "pass rate 0.00"]
    assert zero["unportable"] == ["Unportable", "this and that"]
    assert one["unportable"] == ["RankError", "rank 0 failed: Unportable: this and that"]
    assert zero["before"] == one["before"] == "None"
    assert zero["after"] == "rank 1 failed: ValueError: the first word"
    assert one["after"] == "None", "its own word is no news to it"


def test_a_rank_alone_needs_no_process_group() -> None:
    ranks = Ranks()
    assert ranks.scatter(lambda: ["mine"]) == "mine"
    assert ranks.scatter(lambda: None) is None
    assert ranks.share(lambda: 3) == 3
    assert ranks.gather(4) == [4]
    ranks.postpone()
    ranks.report_failure(ValueError("nobody to tell"))
    assert ranks.failure_elsewhere() is None


def test_a_rank_beyond_the_last_is_refused() -> None:
    with pytest.raises(ValueError, match="rank is 2; needed one of 0 to 1"):
        Ranks(2, 2)
