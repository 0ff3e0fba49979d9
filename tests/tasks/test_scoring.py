"""An error is not a wrong answer, and nothing that a reward function does stops the run."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pace_lightning.tasks.scorer_process import ScorerProcess
from pace_lightning.tasks.scoring import (
    ErrorBudget,
    ScorerClosed,
    ScorerError,
    ScorerPool,
    ScorerTimeout,
    TooManyScorerErrors,
)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{ROOT}")


@pytest.fixture
def start():
    """Make started pools; afterwards nothing of them may be left."""
    pools = []
    threads_before = set(threading.enumerate())

    def make(function="scorer_functions:obey", **settings):
        pool = ScorerPool(function, **settings)
        pools.append(pool)
        pool.start()
        return pool

    yield make
    for pool in pools:
        pool.close()
    assert children() == []
    assert set(threading.enumerate()) <= threads_before


def children():
    """Child processes of this one that still run the scorer (also unreaped ones)."""
    pids = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    found = [int(pid) for listing in pids for pid in listing.read_text().split()]
    return [pid for pid in found if os.getpgid(pid) == pid]


def wait_gone(pid, seconds):
    """True once the process has ended, by a file descriptor that becomes readable then."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)


def pid_of(pool):
    return int(pool.score("p", ["pid"], {})[0])


def test_rewards_come_back_in_the_order_of_the_completions(start):
    assert start().score("p", ["lengths", "a", "ccc"], {}) == [7.0, 1.0, 3.0]


def test_columns_are_repeated_per_completion_and_not_shared(start):
    columns = {"answer": ["7"], "level": {"hard": True}}
    assert start().score("a prompt", ["columns", "x", "y"], columns) == [1.0, 1.0, 1.0]


def test_a_message_prompt_gets_message_completions(start):
    content = [{"role": "user", "content": "hello"}]
    assert start().score(content, ["conversation"], {}) == [1.0]


@pytest.mark.parametrize(
    ("order", "complaint"),
    [
        ("raise", "the verifier stumbled"),
        ("leave", "SystemExit: leaving"),
        ("none", "returned None"),
        ("none-inside", "reward of completion 0 is None"),
        ("nan", "is nan"),
        ("infinite", "is inf"),
        ("too-few", "1 rewards for 2 completions"),
        ("text", "'1.0'"),
    ],
)
def test_what_is_not_a_list_of_numbers_is_an_error_with_its_traceback(start, order, complaint):
    pool = start()
    before = pid_of(pool)
    with pytest.raises(ScorerError, match=complaint) as caught:
        pool.score("p", [order, "other"], {})
    assert "Traceback" in str(caught.value)
    assert pid_of(pool) == before, "an exception is no reason to replace the process"


def test_a_function_that_never_returns_is_killed_and_the_next_group_is_scored_by_another(start):
    pool = start(timeout_seconds=0.3)
    before = pid_of(pool)
    begun = time.monotonic()
    with pytest.raises(ScorerTimeout, match=r"longer than 0\.3 s"):
        pool.score("p", ["hang"], {})
    assert 0.3 <= time.monotonic() - begun < 2
    assert wait_gone(before, 0)
    after = pid_of(pool)
    assert after != before
    assert children() == [after]


def test_programs_started_by_a_killed_function_die_as_well(start, tmp_path):
    pool = start(timeout_seconds=1.0)
    with pytest.raises(ScorerTimeout):
        pool.score("p", ["hang_with_a_child"], {"path": str(tmp_path / "pid")})
    assert wait_gone(int((tmp_path / "pid").read_text()), 5)


@pytest.mark.parametrize("order", ["exit", "exit_leaving_a_fork"])
def test_a_process_that_exits_is_an_error_of_that_group_only(start, order):
    pool = start(timeout_seconds=10)
    with pytest.raises(ScorerError, match="with exit code 3"):
        pool.score("p", [order], {})
    assert pool.score("p", ["lengths"], {}) == [7.0]


def test_a_function_may_use_signals(start):
    assert start().score("p", ["alarm"], {}) == [0.25]


@pytest.mark.slow
def test_an_alarm_left_behind_does_not_strike_a_later_group(start):
    pool = start()
    pool.score("p", ["alarm_left_behind"], {})
    with pytest.raises(ScorerTimeout):  # lets more than the alarm's second pass
        start(timeout_seconds=1.5).score("p", ["hang"], {})
    assert pool.score("p", ["lengths"], {}) == [7.0]


def test_printing_does_not_disturb_the_protocol(start):
    pool = start()
    assert pool.score("p", ["print", "x"], {}) == [0.5, 0.5]
    assert pool.score("p", ["lengths"], {}) == [7.0]


def test_a_group_larger_than_a_pipe_is_scored(start):
    text = "x" * 300_000
    assert start().score(text, ["lengths", text], {"answer": text}) == [7.0, 300_000.0]


@pytest.mark.parametrize("caller", ["event loop", "threads"])
def test_the_deadline_starts_when_scoring_starts_not_when_it_is_queued(start, caller):
    pool = start("scorer_functions:slow", timeout_seconds=1.4)
    group = ("p", ["x"], {"seconds": 0.8})

    async def both():
        return await asyncio.gather(pool.score_async(*group), pool.score_async(*group))

    if caller == "event loop":
        assert asyncio.run(both()) == [[1.0], [1.0]]
    else:
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(lambda _: pool.score(*group), range(2))) == [[1.0], [1.0]]


def test_scoring_does_not_block_the_event_loop(start):
    pool = start(timeout_seconds=0.5)

    async def race():
        hanging = asyncio.create_task(pool.score_async("p", ["hang"], {}))
        turns = 0
        while not hanging.done():
            turns += 1
            await asyncio.sleep(0)
        with pytest.raises(ScorerTimeout):
            hanging.result()
        return turns

    assert asyncio.run(race()) > 100


def test_two_processes_score_two_groups_at_once(start, tmp_path):
    pool = start("scorer_functions:meet", num_workers=2, timeout_seconds=10)
    assert len(children()) == 2
    with ThreadPoolExecutor(2) as threads:
        met = threads.map(lambda me: pool.score("p", ["x"], {"meet": [str(tmp_path), me]}), "ab")
        assert list(met) == [[1.0], [1.0]]


def test_distributed_settings_do_not_reach_the_function(start, monkeypatch):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    for name in names:
        monkeypatch.setenv(name, "1")
    assert start().score("p", ["environment"], {"absent": names}) == [1.0]


def test_a_column_that_cannot_be_sent_is_named(start):
    with pytest.raises(ValueError, match="column 'when'"):
        start().score("p", ["lengths"], {"answer": "1", "when": object()})
    with pytest.raises(ValueError, match="column 'prompts' has the name of an argument"):
        start().score("p", ["lengths"], {"prompts": "1"})


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("scorer_functions:obeyy", "did you mean 'obey'"),
        ("scorer_functions:not_a_function", "holds a int, not a function"),
        ("scorer_function:obey", "did you mean 'scorer_functions'"),
        (
            "pace_lightning.tasks.reward:last_number",
            r"did you mean 'pace_lightning\.tasks\.rewards'",
        ),
        ("this_module_raises:anything", "ZeroDivisionError"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_at_the_start(
    start, monkeypatch, tmp_path, function, complaint
):
    (tmp_path / "this_module_raises.py").write_text("1 / 0")
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{ROOT}{os.pathsep}{tmp_path}")
    with pytest.raises(ScorerError, match=complaint):
        start(function)


def test_a_module_that_never_finishes_importing_or_exits_is_refused(start, monkeypatch, tmp_path):
    (tmp_path / "endless.py").write_text("while True: pass")
    (tmp_path / "exits.py").write_text("import os; os._exit(0)")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    with pytest.raises(ScorerTimeout, match=r"not imported within 0\.5 s.*reward\.startup_timeout"):
        start("endless:x", startup_timeout_seconds=0.5)
    with pytest.raises(ScorerError, match="died while importing"):
        start("exits:x")


def test_a_function_without_a_module_is_refused():
    with pytest.raises(ValueError, match="needed 'module:function'"):
        ScorerPool("last_number")


def test_closing_ends_a_group_that_is_being_scored_and_those_that_wait(start, tmp_path):
    pool = start(timeout_seconds=60)
    scored = threading.Event()

    async def run():
        path = tmp_path / "pid"
        hanging = asyncio.create_task(
            pool.score_async("p", ["hang_with_a_child"], {"path": str(path)})
        )
        waiting = asyncio.create_task(pool.score_async("p", ["lengths"], {}))
        while not (path.exists() and path.read_text()):
            await asyncio.sleep(0)
        await asyncio.get_running_loop().run_in_executor(None, pool.close)
        results = await asyncio.gather(hanging, waiting, return_exceptions=True)
        scored.set()
        return results

    assert [type(result) for result in asyncio.run(run())] == [ScorerClosed, ScorerClosed]
    pool.close()
    with pytest.raises(ScorerClosed):
        pool.score("p", ["lengths"], {})
    assert scored.is_set()


def test_a_group_that_ends_while_the_pool_closes_keeps_its_rewards(start, monkeypatch):
    pool = start()
    closers = [threading.Thread(target=pool.close)]
    exchange = ScorerProcess.exchange

    def exchange_and_see_the_pool_close(process, request, deadline):
        reply = exchange(process, request, deadline)
        closers[0].start()
        while not pool._closed:
            pass
        return reply

    monkeypatch.setattr(ScorerProcess, "exchange", exchange_and_see_the_pool_close)
    assert pool.score("p", ["lengths"], {}) == [7.0]
    closers[0].join(2)
    assert not closers[0].is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["hang_with_a_child", "hang_holding_the_interpreter"])
def test_when_the_parent_is_killed_nothing_is_left(tmp_path, order):
    path = tmp_path / "pid"
    script = textwrap.dedent(
        f"""
        from pace_lightning.tasks.scoring import ScorerPool
        pool = ScorerPool("scorer_functions:obey", timeout_seconds=1000)
        pool.start()
        print(int(pool.score("p", ["pid"], {{}})[0]), flush=True)
        pool.score("p", [{order!r}], {{"path": {str(path)!r}}})
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE) as run:
        try:
            scorer = int(run.stdout.readline())
            while not (path.exists() and path.read_text()):
                assert run.poll() is None
            started = int(path.read_text())
        finally:
            os.kill(run.pid, signal.SIGKILL)
    assert wait_gone(scorer, 5)
    assert wait_gone(started, 5)


def test_the_error_budget_ends_the_run_over_its_share():
    budget = ErrorBudget(0.25, window=8, minimum=4)
    for ok in (False, True, True, True, True, True, True, False):
        budget.record(ok, "" if ok else "the verifier stumbled")
    budget.record(True)  # the first failure has left the window
    budget.record(False, "again")
    with pytest.raises(TooManyScorerErrors, match=r"3 of the last 8 .* 0\.25.*Last error: broken"):
        budget.record(False, "broken")


def test_the_error_budget_does_not_judge_few_groups_or_a_single_failure():
    budget = ErrorBudget(0.1, minimum=4)
    for _ in range(3):
        budget.record(False, "error")
    with pytest.raises(TooManyScorerErrors):
        budget.record(True)
    single = ErrorBudget(0.1, minimum=4)
    for ok in (True, True, False, True, True):
        single.record(ok)
    none = ErrorBudget(0.0, minimum=1)
    none.record(True)
    with pytest.raises(TooManyScorerErrors):
        none.record(False)
