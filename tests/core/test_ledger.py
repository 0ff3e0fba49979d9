"""The ledger: every leased prompt ends in exactly one fate, or is pending."""

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pace_lightning.core.ledger import Ledger
from pace_lightning.core.trajectory import Fate


def test_groups_and_tokens_are_counted_by_fate():
    ledger = Ledger()
    for uid in "abcd":
        ledger.lease(uid)
    ledger.settle("a", Fate.TRAINED, num_tokens=10)
    ledger.settle("b", Fate.TRAINED, num_tokens=5)
    ledger.settle("c", Fate.FAILED)
    assert ledger.groups() == {"trained": 2, "failed": 1, "pending": 1}
    assert ledger.tokens() == {"trained": 15}
    assert ledger.num_pending == 1
    ledger.check()


def test_a_prompt_cannot_be_settled_twice():
    ledger = Ledger()
    ledger.lease("a")
    ledger.settle("a", Fate.TRAINED)
    with pytest.raises(ValueError, match="prompt a was settled as failed but is not out"):
        ledger.settle("a", Fate.FAILED)
    assert ledger.groups() == {"trained": 1}


def test_a_prompt_that_was_never_leased_cannot_be_settled():
    with pytest.raises(ValueError, match="never leased"):
        Ledger().settle("a", Fate.TRAINED)


def test_a_prompt_that_is_out_cannot_be_leased_again_until_it_is_settled():
    ledger = Ledger()
    ledger.lease("a")
    with pytest.raises(ValueError, match="leased twice"):
        ledger.lease("a")
    ledger.settle("a", Fate.TIMED_OUT)
    ledger.lease("a")
    assert ledger.groups() == {"timed_out": 1, "pending": 1}


def test_a_lost_prompt_is_noticed():
    ledger = Ledger()
    ledger.lease("a")
    ledger._open.clear()  # what a bug would do
    with pytest.raises(AssertionError, match="1 prompts were leased, but 0 settled and 0 pending"):
        ledger.check()


def test_a_restored_ledger_goes_on_with_nothing_pending():
    ledger = Ledger()
    for uid in "abc":
        ledger.lease(uid)
    ledger.settle("a", Fate.TRAINED, num_tokens=7)
    ledger.settle("b", Fate.TOO_STALE, num_tokens=2)
    restored = Ledger()
    restored.load_state_dict(json.loads(json.dumps(ledger.state_dict())))  # primitives only
    assert restored.groups() == {"trained": 1, "too_stale": 1}
    assert restored.tokens() == {"trained": 7, "too_stale": 2}
    restored.lease("c")  # what was pending is leased again
    restored.settle("c", Fate.TRAINED, num_tokens=1)
    restored.check()
    assert restored.groups() == {"trained": 2, "too_stale": 1}


def settle(ledger, uid, fate):
    ledger.lease(uid)
    ledger.settle(uid, fate)


def test_a_prompt_that_was_rejected_and_never_trained_on_is_known_by_its_index():
    ledger = Ledger()
    for uid, fate in (
        ("0:7", Fate.REJECTED),
        ("0:12", Fate.REJECTED),
        ("0:3", Fate.REJECTED),
        ("0:4", Fate.TRAINED),
        ("0:5", Fate.ZERO_VARIANCE),
        ("1:7", Fate.FAILED),  # no rejection
        ("1:12", Fate.TOO_STALE),
        ("1:4", Fate.REJECTED),  # was trained on before
        ("1:3", Fate.TRAINED),  # no longer starving
        ("2:3", Fate.REJECTED),
    ):
        settle(ledger, uid, fate)
    assert list(ledger.never_trained().items()) == [("12", 2), ("7", 1)]


def test_a_restored_ledger_knows_who_was_trained_on_and_who_was_rejected():
    ledger, restored = Ledger(), Ledger()
    for uid, fate in (("0:1", Fate.TRAINED), ("0:2", Fate.REJECTED), ("0:3", Fate.REJECTED)):
        settle(ledger, uid, fate)
    restored.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    for uid, fate in (("1:1", Fate.REJECTED), ("1:2", Fate.REJECTED), ("1:3", Fate.TRAINED)):
        settle(restored, uid, fate)
    assert restored.never_trained() == {"2": 2}


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(Fate), st.integers(0, 9))))
def test_the_sums_close_after_any_sequence_of_leases_and_settlements(moves):
    ledger, out, settled, tokens = Ledger(), set(), 0, 0
    for uid, fate, num_tokens in moves:
        if uid in out:
            ledger.settle(str(uid), fate, num_tokens=num_tokens)
            out.remove(uid)
            settled, tokens = settled + 1, tokens + num_tokens
        else:
            ledger.lease(str(uid))
            out.add(uid)
        ledger.check()
    assert ledger.num_pending == len(out)
    assert sum(ledger.groups().values()) == settled + len(out)
    assert sum(ledger.tokens().values()) == tokens


@pytest.mark.timeout(30)
def test_two_threads_lose_no_count():
    ledger, barrier, errors = Ledger(), threading.Barrier(2), []

    def run(name):
        try:
            barrier.wait(10)
            for i in range(2000):
                ledger.lease(f"{name}{i}")
                ledger.settle(f"{name}{i}", Fate.TRAINED, num_tokens=1)
                ledger.check()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors == []
    assert ledger.groups() == {"trained": 4000}
    assert ledger.tokens() == {"trained": 4000}
