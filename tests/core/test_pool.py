"""The pool: who waits for whom, what a draw takes and leaves, and that no group is ever lost."""

import json
import random
import sys
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from scripted import make_group

from pace_lightning.core.admission import AdmitAll, MaxLag, Selection
from pace_lightning.core.pool import DrawTimeoutError, EndOfGroups, TrajectoryPool
from pace_lightning.core.trajectory import Fate

pytestmark = pytest.mark.timeout(60)


@dataclass
class ShedOldest:
    """Rejects the oldest candidates, as many as the budget allows; its state counts the draws."""

    allowed: int
    examines_all = False

    def state_to_primitives(self, state):
        return {"draws": state}

    def state_from_primitives(self, primitives):
        return primitives["draws"]

    def begin(self, *, needed, occupancy, state):
        return self.allowed, (state or 0) + 1

    def select(self, candidates, *, needed, version, occupancy, budget, state):
        assert len(candidates) <= needed + budget
        end = min(len(candidates), budget + needed)
        return Selection(
            admitted=tuple(range(budget, end)),
            rejected=tuple((position, Fate.REJECTED) for position in range(budget)),
        ), state


def make_pool(policy=None, **hooks):
    hooks.setdefault("settle", lambda *_: pytest.fail("nothing may be settled here"))
    return TrajectoryPool(policy or AdmitAll(), **hooks)


def fill(pool, count, **group):
    groups = [make_group(i, **group) for i in range(count)]
    for group in groups:
        pool.put(group)
    return groups


def uids(groups):
    return [group.prompt.uid for group in groups]


class Waiter(threading.Thread):
    """A draw in a thread of its own, and what came of it."""

    def __init__(self, pool, num_groups, version=0, timeout_seconds=20.0):
        super().__init__(daemon=True)
        self._arguments = (pool, num_groups, version, timeout_seconds)
        self.groups = self.report = self.error = None
        self.start()

    def run(self):
        pool, num_groups, version, timeout = self._arguments
        try:
            self.groups, self.report = pool.draw(
                num_groups, version=version, timeout_seconds=timeout
            )
        except BaseException as error:
            self.error = error

    def result(self, seconds=5.0):
        self.join(seconds)
        assert not self.is_alive(), f"the draw was not woken within {seconds} s"
        return self


@pytest.fixture
def waiting(monkeypatch):
    """Blocks until a draw is about to wait; it holds the lock then."""
    about_to_wait = threading.Semaphore(0)
    wait = threading.Condition.wait

    def announcing(self, timeout=None):
        if sys._getframe(1).f_code.co_name == "_wait_for":
            about_to_wait.release()
        return wait(self, timeout)

    monkeypatch.setattr(threading.Condition, "wait", announcing)
    return lambda: about_to_wait.acquire(timeout=10) or pytest.fail("no draw began to wait")


# --- what a draw takes and leaves ----------------------------------------------------------------


def test_a_draw_takes_the_oldest_and_leaves_the_others_in_order():
    pool = make_pool()
    fill(pool, 10)
    groups, report = pool.draw(4, version=0, timeout_seconds=5)
    assert uids(groups) == ["0", "1", "2", "3"]
    assert len(pool) == 6
    assert uids(pool.drain()) == ["4", "5", "6", "7", "8", "9"]
    assert len(pool) == 0
    assert (report.occupancy_before_groups, report.occupancy_after_groups) == (10, 6)
    assert (report.drawn_groups, report.rejected_groups, report.budget_groups) == (4, 0, 0)
    assert report.beyond_candidates_groups == 6


@pytest.mark.parametrize("num_groups", [1, 3, 10])
def test_a_draw_leaves_with_exactly_the_groups_it_was_asked_for(num_groups):
    pool = make_pool()
    fill(pool, 10)
    groups, report = pool.draw(num_groups, version=0, timeout_seconds=5)
    assert len(groups) == report.drawn_groups == num_groups
    assert len(pool) == 10 - num_groups


def test_a_group_that_waits_for_two_publications_has_waited_two_versions():
    pool = make_pool()
    pool.put(make_group(versions=(3, 3)))
    _, report = pool.draw(1, version=5, timeout_seconds=5)
    assert report.waiting_staleness_versions == 2
    assert report.generation_staleness_versions == 0
    assert report.version == 5


def test_the_report_has_the_mean_staleness_of_both_sides():
    settled = []
    pool = make_pool(ShedOldest(1), settle=lambda *ended: settled.append(ended))
    pool.put(make_group("old", versions=(0, 2), completed_at=3))  # K_gen 3 - 1 = 2
    pool.put(make_group("a", versions=(4, 4), completed_at=5))  # K_gen 1
    pool.put(make_group("b", versions=(6, 6)))  # K_gen 0
    groups, report = pool.draw(2, version=8, timeout_seconds=5)
    assert uids(groups) == ["a", "b"]
    assert settled == [("old", Fate.REJECTED, 4)]  # 2 trajectories of 2 tokens
    assert report.generation_staleness_versions == 0.5
    assert report.waiting_staleness_versions == 2.5  # (8 - 5 + 8 - 6) / 2
    assert report.total_staleness_versions == 3.0
    assert report.rejected_generation_staleness_versions == 2.0
    assert report.rejected_waiting_staleness_versions == 5.0
    assert report.rejected_total_staleness_versions == 7.0
    assert len(report.staleness) == 4  # of each trajectory
    assert len(report.rejected_staleness) == 2


def test_the_staleness_of_the_rejected_is_none_when_nothing_was_rejected():
    pool = make_pool()
    fill(pool, 1)
    _, report = pool.draw(1, version=0, timeout_seconds=5)
    assert report.rejected_total_staleness_versions is None
    assert report.rejected_generation_staleness_versions is None
    assert report.rejected_waiting_staleness_versions is None


def test_the_report_has_length_and_pass_rate_of_each_group_of_both_sides():
    pool = make_pool(ShedOldest(1), settle=lambda *_: None)
    pool.put(make_group("old", versions=(0, 0, 0), scores=(0.0, 0.0, 0.0, 1.0)))
    pool.put(make_group("a", versions=(1,), scores=(1.0, 0.0)))
    pool.put(make_group("b", versions=(1, 1), scores=(1.0, 1.0, 0.0, 1.0)))
    _, report = pool.draw(2, version=1, timeout_seconds=5)
    assert (report.response_tokens, report.pass_rates) == ((1.0, 2.0), (0.5, 0.75))
    assert (report.rejected_response_tokens, report.rejected_pass_rates) == ((3.0,), (0.25,))
    assert not {"response_tokens", "pass_rates"} & report.as_json().keys()


def test_the_report_has_the_seconds_in_which_the_policy_chose_and_no_others(monkeypatch):
    now = [100.0]

    class Slow(ShedOldest):
        def begin(self, **arguments):
            now[0] += 1
            return super().begin(**arguments)

        def select(self, *arguments, **named):
            now[0] += 4
            return super().select(*arguments, **named)

    def freed():  # takes its time too, and is not ranking
        now[0] += 16

    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr("pace_lightning.core.pool.time", clock)
    pool = make_pool(Slow(0), on_change=freed)
    fill(pool, 3)
    reports = [
        pool.draw(1, version=version, timeout_seconds=5, again=version == 2)[1]
        for version in range(3)
    ]
    assert [report.ranking_seconds for report in reports] == [5, 5, 4]  # no budget for a repetition
    assert [report.wait_seconds for report in reports] == [21, 21, 20]
    assert reports[0].as_json()["ranking_seconds"] == 5


def test_a_report_is_one_line_of_json_without_the_histograms():
    pool = make_pool()
    fill(pool, 1)
    _, report = pool.draw(1, version=4, timeout_seconds=5)
    line = json.loads(json.dumps(report.as_json()))
    assert line["version"] == 4
    assert line["waiting_staleness_versions"] == 4.0
    assert "staleness" not in line
    assert "rejected_staleness" not in line


def test_the_occupancy_before_is_read_when_the_draw_begins(waiting):
    pool = make_pool()
    fill(pool, 1)
    draw = Waiter(pool, 3)
    waiting()
    for uid in "abc":
        pool.put(make_group(uid))
    report = draw.result().report
    assert report.occupancy_before_groups == 1
    assert report.occupancy_after_groups == 1
    assert report.wait_seconds > 0


# --- rejection -----------------------------------------------------------------------------------


def test_rejections_never_starve_a_draw():
    settled = []
    pool = make_pool(ShedOldest(100), settle=lambda *ended: settled.append(ended))
    fill(pool, 6)
    groups, report = pool.draw(4, version=0, timeout_seconds=0)
    assert uids(groups) == ["2", "3", "4", "5"]
    assert [uid for uid, *_ in settled] == ["0", "1"]
    assert (report.budget_groups, report.rejected_groups) == (100, 2)


def test_the_budget_limits_the_rejections_of_a_draw():
    settled = []
    pool = make_pool(ShedOldest(3), settle=lambda *ended: settled.append(ended))
    fill(pool, 20)
    groups, report = pool.draw(4, version=0, timeout_seconds=5)
    assert uids(groups) == ["3", "4", "5", "6"]
    assert len(settled) == report.rejected_groups == 3
    assert report.beyond_candidates_groups == 13
    assert uids(pool.drain()) == [str(i) for i in range(7, 20)]


def test_a_lag_limit_sheds_exactly_the_too_stale_and_waits_for_fresh_ones(waiting):
    settled, freed = [], threading.Semaphore(0)
    pool = make_pool(MaxLag(1), settle=lambda *e: settled.append(e), on_change=freed.release)
    pool.put(make_group("stale0", versions=(2,)))
    pool.put(make_group("fresh0", versions=(5,)))
    pool.put(make_group("stale1", versions=(3,)))
    draw = Waiter(pool, 3, version=5)
    waiting()
    # it waits for two more; the slots of the two that were shed are free already
    assert freed.acquire(timeout=5)
    assert settled == [("stale0", Fate.TOO_STALE, 2), ("stale1", Fate.TOO_STALE, 2)]
    assert pool.num_accepted == 1
    for uid, version in (("stale2", 3), ("fresh1", 4), ("fresh2", 5)):
        pool.put(make_group(uid, versions=(version,)))
    report = draw.result().report
    assert uids(draw.groups) == ["fresh0", "fresh1", "fresh2"]
    assert [uid for uid, *_ in settled] == ["stale0", "stale1", "stale2"]
    assert report.rejected_groups == 3
    assert report.rejected_total_staleness_versions == pytest.approx((3 + 2 + 2) / 3)
    assert max(s.total for s in report.staleness) <= 1
    assert pool.num_accepted == 3


def test_a_draw_that_frees_slots_wakes_the_producer():
    calls = []
    pool = make_pool(on_change=lambda: calls.append(len(pool)))
    fill(pool, 5)
    assert calls == []
    pool.draw(2, version=0, timeout_seconds=5)
    assert calls == [3]  # the groups are out when the producer looks


def test_a_drawn_group_stays_accepted_and_a_rejected_one_does_not():
    pool = make_pool(ShedOldest(1), settle=lambda *_: None)
    fill(pool, 5)
    pool.draw(2, version=0, timeout_seconds=5)
    assert pool.num_accepted == 4


def test_a_drawn_group_that_was_dropped_can_be_discounted_and_wakes_the_producer():
    calls = []
    pool = make_pool(on_change=lambda: calls.append(pool.num_accepted))
    fill(pool, 4)
    pool.draw(3, version=0, timeout_seconds=5)
    pool.discount(3)
    assert pool.num_accepted == 1
    assert calls == [4, 1]


# --- waiting -------------------------------------------------------------------------------------


def test_a_draw_that_times_out_names_the_other_side_and_keeps_the_groups():
    pool = make_pool(describe_producer=lambda: "3 groups in flight")
    fill(pool, 2)
    message = "step 7 waited for 4 groups past its deadline: 2 ready, 2 missing"
    with pytest.raises(DrawTimeoutError, match=message) as raised:
        pool.draw(4, version=7, timeout_seconds=0)
    assert "3 groups in flight" in str(raised.value)
    assert "trainer.draw_timeout_seconds" in str(raised.value)
    assert uids(pool.drain()) == ["0", "1"]


def test_groups_admitted_before_a_timeout_go_back_in_front():
    settled = []
    pool = make_pool(MaxLag(0), settle=lambda *ended: settled.append(ended))
    for uid, version in (("a", 4), ("stale", 1), ("b", 4)):
        pool.put(make_group(uid, versions=(version,)))
    with pytest.raises(DrawTimeoutError, match="2 ready, 1 missing"):
        pool.draw(3, version=4, timeout_seconds=0)
    assert [uid for uid, *_ in settled] == ["stale"]
    pool.put(make_group("c", versions=(4,)))
    groups, _ = pool.draw(3, version=4, timeout_seconds=0)
    assert uids(groups) == ["a", "b", "c"]


def test_a_failure_wakes_a_waiting_draw_with_the_very_same_exception(waiting):
    pool = make_pool()
    draw = Waiter(pool, 1)
    waiting()
    error = RuntimeError("the engine died")
    pool.fail(error)
    assert draw.result(seconds=1).error is error


def test_the_first_failure_stays_and_meets_every_later_draw():
    pool = make_pool()
    fill(pool, 3)
    first = RuntimeError("first")
    pool.fail(first)
    pool.fail(RuntimeError("second"))
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            pool.draw(1, version=0, timeout_seconds=5)
        assert raised.value is first
    assert len(pool) == 3


def test_a_failure_returns_what_a_waiting_draw_had_admitted_in_its_place(waiting):
    pool = make_pool(MaxLag(0), settle=lambda *_: None)
    for uid, version in (("a", 4), ("stale0", 1), ("stale1", 1)):
        pool.put(make_group(uid, versions=(version,)))
    draw = Waiter(pool, 3, version=4)
    waiting()
    pool.put(make_group("b", versions=(4,)))
    pool.fail(RuntimeError("x"))
    draw.result()
    assert uids(pool.drain()) == ["a", "b"]


def test_a_put_wakes_a_waiting_draw(waiting):
    pool = make_pool()
    draw = Waiter(pool, 2)
    waiting()
    pool.put(make_group(0))
    waiting()  # one is not enough
    pool.put(make_group(1))
    assert uids(draw.result().groups) == ["0", "1"]


def test_a_closed_pool_delivers_what_is_ready_and_then_ends():
    pool = make_pool()
    fill(pool, 5)
    pool.close()
    pool.close()
    groups, _ = pool.draw(4, version=0, timeout_seconds=5)
    assert uids(groups) == ["0", "1", "2", "3"]
    with pytest.raises(EndOfGroups, match="needs 4 groups, 1 are left"):
        pool.draw(4, version=1, timeout_seconds=5)
    assert uids(pool.drain()) == ["4"]


def test_closing_wakes_a_waiting_draw(waiting):
    pool = make_pool()
    fill(pool, 1)
    draw = Waiter(pool, 2)
    waiting()
    pool.close()
    assert isinstance(draw.result(seconds=1).error, EndOfGroups)
    assert len(pool) == 1


def test_the_end_counts_the_groups_it_had_admitted_already():
    pool = make_pool(MaxLag(0), settle=lambda *_: None)
    for uid, version in (("a", 4), ("stale", 1), ("b", 4)):
        pool.put(make_group(uid, versions=(version,)))
    pool.close()
    with pytest.raises(EndOfGroups, match="needs 3 groups, 2 are left"):
        pool.draw(3, version=4, timeout_seconds=5)
    assert uids(pool.drain()) == ["a", "b"]


def test_a_closed_pool_takes_nothing():
    pool = make_pool()
    pool.close()
    with pytest.raises(RuntimeError, match="the pool is closed, group 0 came too late"):
        pool.put(make_group(0))
    assert pool.num_accepted == 0


# --- memory --------------------------------------------------------------------------------------


def test_the_memory_of_the_policy_lives_in_the_pool_and_in_the_checkpoint():
    pool = make_pool(ShedOldest(0))
    fill(pool, 4)
    for version in range(2):
        pool.draw(1, version=version, timeout_seconds=5)
    assert pool.state_dict()["policy_state"] == {"draws": 2}
    resumed = make_pool(ShedOldest(0))
    resumed.load_state_dict(pool.state_dict(), [], drawn=20)
    assert resumed.num_accepted == 20
    resumed.put(make_group(0))
    resumed.draw(1, version=2, timeout_seconds=5)
    assert resumed.state_dict()["policy_state"] == {"draws": 3}
    assert resumed.num_accepted == 21


def test_ready_groups_of_a_checkpoint_are_ready_in_their_order_and_count_as_accepted():
    pool = make_pool()
    groups = fill(pool, 3)
    resumed = make_pool()
    resumed.load_state_dict(pool.state_dict(), groups, drawn=4)
    assert (len(resumed), resumed.num_accepted) == (3, 7)
    drawn, _ = resumed.draw(3, version=2, timeout_seconds=0)
    assert drawn == groups


# --- conservation --------------------------------------------------------------------------------


def random_life(seed):
    """One thread puts and ends the pool, one draws; returns what became of every group."""
    rng = random.Random(seed)
    policy = rng.choice([AdmitAll(), MaxLag(rng.randint(0, 2)), ShedOldest(rng.randint(0, 3))])
    settled, problems = [], []
    pool = TrajectoryPool(policy, settle=lambda uid, fate, _: settled.append((uid, fate)))
    barrier = threading.Barrier(2)
    versions = [0]
    num_puts = rng.randint(0, 12)
    end = rng.choice(["fail", "close"])
    error = RuntimeError(f"seed {seed}")
    draws = [(rng.randint(1, 4), rng.choice([0.0, 20.0])) for _ in range(rng.randint(1, 8))]
    ages = [rng.randint(0, 2) for _ in range(num_puts)]
    drawn, put = [], []

    def produce():
        barrier.wait(20)
        for number, age in enumerate(ages):
            version = max(0, versions[0] - age)
            put.append(str(number))
            pool.put(make_group(number, versions=(version,)))
        pool.fail(error) if end == "fail" else pool.close()

    def consume():
        barrier.wait(20)
        for num_groups, timeout in draws:
            try:
                groups, report = pool.draw(num_groups, version=versions[0], timeout_seconds=timeout)
            except DrawTimeoutError:
                continue
            except EndOfGroups:
                if end != "close":
                    problems.append("the data ended, but nobody closed the pool")
                return
            except RuntimeError as raised:
                if raised is not error:
                    problems.append(raised)
                return
            if len(groups) != num_groups:
                problems.append(f"{len(groups)} groups instead of {num_groups}")
            if isinstance(policy, MaxLag):
                problems.extend(s for s in report.staleness if s.total > policy.max_lag)
            drawn.extend(uids(groups))
            versions[0] += 1

    threads = [threading.Thread(target=run, daemon=True) for run in (produce, consume)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        if thread.is_alive():
            problems.append(f"{thread} hangs")
    return put, drawn, settled, uids(pool.drain()), pool.num_accepted, problems


def check_life(seed):
    put, drawn, settled, held, accepted, problems = random_life(seed)
    where = f"seed {seed}: put {put}, drawn {drawn}, settled {settled}, held {held}"
    assert problems == [], where
    rejected = [uid for uid, _ in settled]
    assert sorted(put) == sorted(drawn + rejected + held), where
    assert accepted == len(put) - len(rejected), where
    for part in (drawn, held):  # order of arrival, throughout
        assert part == sorted(part, key=int), where
    assert all(int(d) < int(h) for d in drawn for h in held), where


@pytest.fixture
def eager_switching():
    """Let threads take turns after a few instructions, so that more interleavings happen."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("lives", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_no_group_is_lost_or_doubled_in_any_interleaving(eager_switching, lives):
    first = random.randrange(10**9)
    for seed in range(first, first + lives):
        check_life(seed)
