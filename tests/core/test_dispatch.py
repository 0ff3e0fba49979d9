"""How much may be generated ahead of training."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pace_lightning.core.dispatch import AheadBound, DispatchCounts, FixedSlots


def counts(in_flight=0, ready=0, accepted=0, version=0):
    return DispatchCounts(in_flight=in_flight, ready=ready, accepted=accepted, version=version)


def test_fixed_slots_are_those_neither_in_flight_nor_ready():
    assert FixedSlots(8).capacity(counts(in_flight=3, ready=4, accepted=90, version=9)) == 1
    assert FixedSlots(8).capacity(counts(in_flight=8)) == 0


def test_the_ahead_bound_of_areal():
    # (4 + 10 + 1) * 32 = 480 may exist; 440 + 20 do
    bound = AheadBound(eta=4, groups_per_step=32)
    assert bound.capacity(counts(in_flight=20, accepted=440, version=10)) == 20


def test_the_slots_limit_groups_in_flight_and_ready_beside_the_lead():
    bound = AheadBound(eta=4, groups_per_step=32, slots=25)
    assert bound.capacity(counts(in_flight=20, accepted=440, version=10)) == 5
    assert bound.capacity(counts(in_flight=20, ready=3, accepted=440, version=10)) == 2
    wide = AheadBound(eta=4, groups_per_step=32, slots=100)
    assert wide.capacity(counts(in_flight=20, accepted=440, version=10)) == 20


@given(st.integers(1, 40), st.integers(0, 30), st.integers(0, 40))
def test_eta_zero_gives_exactly_one_batch_per_version(groups_per_step, version, done):
    bound = AheadBound(eta=0, groups_per_step=groups_per_step)
    before = version * groups_per_step
    assert bound.capacity(counts(accepted=before, version=version)) == groups_per_step
    done = min(done, groups_per_step)
    in_flight = groups_per_step - done
    # however far that batch has come, nothing more is dispatched before the next version
    assert bound.capacity(counts(in_flight, done, before + done, version)) == 0
    assert (
        bound.capacity(counts(accepted=before + groups_per_step, version=version + 1))
        == groups_per_step
    )


@given(st.integers(0, 8), st.integers(1, 16), st.lists(st.integers(0, 2), max_size=60))
def test_what_exists_never_exceeds_eta_plus_one_batches_beyond_the_version(eta, batch, moves):
    """Dispatch all that is allowed, finish everything, or take a step, in any order."""
    bound = AheadBound(eta=eta, groups_per_step=batch)
    in_flight = accepted = version = 0
    for move in moves:
        if move == 0:
            in_flight += max(0, bound.capacity(counts(in_flight, 0, accepted, version)))
        elif move == 1:
            accepted, in_flight = accepted + in_flight, 0
        elif accepted >= (version + 1) * batch:
            version += 1
        assert accepted + in_flight <= (eta + version + 1) * batch


def test_a_rejected_group_may_be_replaced():
    bound = AheadBound(eta=0, groups_per_step=4)
    assert bound.capacity(counts(accepted=4)) == 0
    assert bound.capacity(counts(accepted=3)) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedSlots(0), "slots is 0"),
        (lambda: AheadBound(-1, 4), "eta is -1"),
        (lambda: AheadBound(0, 0), "groups_per_step is 0"),
        (lambda: AheadBound(0, 4, slots=0), "slots is 0"),
    ],
)
def test_a_rule_that_could_never_dispatch_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
