"""The watchdog by itself: threads, stages, report. Whole runs: tests/e2e/test_faults.py."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from scripted import make_prompt

from pace_lightning.rollout.rollouts import Rollout, Rollouts
from pace_lightning.training.watchdog import EXIT_CODE, NoProgressError, Watchdog, who_waits

LIMIT = 0.2
SECONDS_TO_WAIT = 5.0


class Run:
    """What a watchdog is given, and what it did with it."""

    def __init__(self, progress=lambda: 0, report=lambda: "the report", end=None, **options):
        self.ended, self.left = threading.Event(), threading.Event()
        self.error = self.words = self.code = None
        self.dog = Watchdog(
            options.pop("limit_seconds", LIMIT),
            progress=progress,
            report=report,
            end=end or self.end,
            last_words=self.hear,
            leave=self.leave,
            grace_seconds=options.pop("grace_seconds", 0.2),
        )

    def end(self, error):
        self.error = error
        self.ended.set()

    def hear(self, words):
        self.words = words

    def leave(self, code):
        self.code = code
        self.left.set()


def test_while_something_happens_nothing_is_done():
    count = itertools.count()
    run = Run(progress=lambda: next(count))
    with run.dog:
        assert not run.ended.wait(4 * LIMIT)
    assert run.code is None


def test_progress_that_comes_late_but_in_time_begins_the_wait_anew():
    begin = time.monotonic()
    # one value for 0.7 limits, another for 0.7, and so on
    run = Run(progress=lambda: int((time.monotonic() - begin) / (0.7 * LIMIT)))
    with run.dog:
        assert not run.ended.wait(5 * LIMIT)


def test_a_run_that_hangs_is_told_of_it_in_time_and_not_left_if_it_ends(capfd):
    run = Run()
    begin = time.monotonic()
    with run.dog:
        assert run.ended.wait(SECONDS_TO_WAIT)
        assert LIMIT <= time.monotonic() - begin < LIMIT + 2.0
    assert isinstance(run.error, NoProgressError)
    assert str(run.error) == "the report"
    assert not run.left.wait(0.5)
    said = capfd.readouterr().err
    assert "the report" in said
    assert "test_watchdog.py" in said, "the stack of the main thread"


def test_a_run_that_does_not_end_is_left_with_a_code_of_its_own_and_last_words(capfd):
    run = Run()
    with run.dog:
        assert run.left.wait(SECONDS_TO_WAIT)
    assert (run.code, run.words) == (EXIT_CODE, "the report")
    assert f"leaving the process with code {EXIT_CODE}" in capfd.readouterr().err


def test_a_way_to_end_that_hangs_itself_does_not_hold_up_the_watchdog():
    release = threading.Event()
    run = Run(end=lambda _: release.wait(30))
    with run.dog:
        assert run.left.wait(SECONDS_TO_WAIT)
    release.set()


def test_a_report_that_cannot_be_made_does_not_hold_up_the_watchdog():
    run = Run(report=lambda: 1 / 0)
    with run.dog:
        assert run.left.wait(SECONDS_TO_WAIT)
    assert "ZeroDivisionError" in str(run.error)


def test_a_limit_of_0_never_watches():
    before = threading.active_count()
    with Run(limit_seconds=0).dog:
        assert threading.active_count() == before


def test_the_report_says_who_waits_for_whom_and_which_setting_to_change():
    rollouts = Rollouts()
    for uid in ("0:17", "0:18"):
        rollouts.begin(Rollout(make_prompt(uid)), "dispatched at version 3")
    rollouts.score("0:18", 41)
    report = who_waits(
        900,
        trainer=("wait", time.monotonic() - 12),
        rollout="rollout thread alive",
        num_ready=2,
        rollouts=rollouts.present(),
    )
    lines = report.splitlines()
    assert lines[0].startswith("no progress for 900 s (trainer.watchdog_seconds)")
    assert lines[1] == "  trainer: waits for the rollout thread to make groups ready for 12.0 s"
    assert lines[2:4] == ["  rollout: rollout thread alive", "  pool: 2 groups ready"]
    assert lines[4].startswith(
        "  prompt 0:17 waits for the engine (rollout.timeout_seconds): dispatched at version 3 0.0"
    )
    assert lines[5].startswith(
        "  prompt 0:18 waits for the scorer (reward.timeout_seconds): given to the scorer with 41"
    )
    assert lines[6].endswith(
        "reward.timeout_seconds, rollout.timeout_seconds, trainer.draw_timeout_seconds"
    )


STUCK = """
    import ctypes, pathlib, sys
    from pace_lightning.training.watchdog import Watchdog

    with Watchdog(
        0.5,
        progress=lambda: 0,
        report=lambda: "the report",
        end=lambda error: None,
        last_words=lambda words: pathlib.Path(sys.argv[1]).write_text(words),
        grace_seconds=0.5,
    ):
        ctypes.{library}(None).sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("library", "code"), [("CDLL", EXIT_CODE), ("PyDLL", 1)])
def test_a_process_whose_main_thread_is_stuck_in_c_is_left(tmp_path, library, code):
    """`CDLL` releases the interpreter's lock during the call, `PyDLL` keeps it."""
    program = textwrap.dedent(STUCK.format(library=library))
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "words")],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == code, done.stderr
    assert 'File "<string>", line' in done.stderr, "the stack of the main thread"
    assert time.monotonic() - begin < 45
    if code == EXIT_CODE:
        assert (tmp_path / "words").read_text() == "the report"
        assert "the report" in done.stderr
