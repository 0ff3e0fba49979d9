"""The stream under a real Trainer: when it draws, what it hands out, and how it ends."""

import contextlib
import itertools
import queue
import threading
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch

from pace_lightning.core.admission import AdmitAll, MaxLag
from pace_lightning.core.batch import collate
from pace_lightning.core.pool import EndOfGroups, TrajectoryPool
from pace_lightning.core.staleness import StalenessDecomposition
from pace_lightning.core.trajectory import Fate, Prompt, Trajectory, TrajectoryGroup
from pace_lightning.training.stream import TrajectoryStream, deal

DEADLINE_SECONDS = 20.0
TENSORS = (
    "input_ids",
    "attention_mask",
    "loss_mask",
    "behavior_logprobs",
    "advantages",
    "token_versions",
)


def make_group(uid, *, version=0, rewards=(0.0, 1.0), truncated=False, length=3):
    """A group whose tokens tell the groups apart."""
    return TrajectoryGroup(
        Prompt(f"{uid:03}", (7, 8, uid % 90), ""),
        tuple(
            Trajectory(
                token_ids=tuple(range(index, index + length + index)),
                token_versions=(version,) * (length + index),
                behavior_logprobs=(-0.5 - uid / 1000,) * (length + index),
                completed_at=version,
                reward=reward,
                score=reward,
                truncated=truncated,
            )
            for index, reward in enumerate(rewards)
        ),
    )


def make_pool(groups=(), policy=None, settled=None):
    ends = [] if settled is None else settled
    pool = TrajectoryPool(policy or AdmitAll(), settle=lambda *end: ends.append(end))
    for group in groups:
        pool.put(group)
    return pool


def make_stream(pool, policy_version, **changes):
    arguments = {
        "total_steps": 3,
        "groups_per_step": 1,
        "num_micro_batches": 1,
        "pad_token_id": 0,
        "advantage": "dr_grpo",
        "std_ddof": 1,
        "mask_truncated": False,
        "keep_groups": False,
        "draw_timeout_seconds": DEADLINE_SECONDS,
        "drop_empty": lambda groups: None,
        "needs_spread": False,
        "may_reject": True,
        "on_draw": lambda groups: None,
    }
    return TrajectoryStream(pool, policy_version=policy_version, **(arguments | changes))


class Module(pl.LightningModule):
    """One weight. Remembers the batches it was given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.batches = []
        self.seen_at = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch)
        self.seen_at.append(self.trainer.global_step)
        return self.weight * batch.advantages.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class OnStep(pl.Callback):
    """Calls ``act(version)`` when training starts and after each optimizer step."""

    def __init__(self, act):
        self._act = act

    def on_train_start(self, trainer, pl_module):
        self._act(trainer.global_step)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch.is_last:
            self._act(trainer.global_step)


def make_trainer(act=lambda version: None, *, steps=3, micro_batches=1):
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        max_steps=steps,
        accumulate_grad_batches=micro_batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[OnStep(act)],
    )


class Versions:
    """A clock that advances when told, for iterating without a Trainer."""

    def __init__(self, now=0):
        self.now = now

    def __call__(self):
        return self.now


def drawn(stream, versions):
    """Iterate, with one optimizer step after each draw; the micro-batches of each draw."""
    draws = []
    for batch in stream:
        if batch.micro_batch_index == 0:
            draws.append([])
        draws[-1].append(batch)
        if batch.is_last:
            versions.now += 1
    return draws


# --- when it draws --------------------------------------------------------------------------------


def test_its_length_is_the_micro_batches_of_the_whole_run():
    stream = make_stream(make_pool(), Versions(), total_steps=7, num_micro_batches=3)
    assert len(stream) == 21


def test_making_it_and_asking_its_length_and_for_an_iterator_draws_nothing():
    pool = make_pool([make_group(0)])
    draws = []
    stream = make_stream(pool, Versions(), on_draw=draws.append)
    assert len(stream) == 3
    iter(stream)
    assert len(pool) == 1
    assert not draws


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_draw_comes_after_the_step_before_it_has_ended(micro_batches):
    events = []
    trainer = make_trainer(
        lambda version: events.append(("at", version)), micro_batches=micro_batches
    )
    stream = make_stream(
        make_pool([make_group(uid) for uid in range(3)]),
        lambda: trainer.global_step,
        num_micro_batches=micro_batches,
        on_draw=lambda groups: events.append(("draw", trainer.global_step)),
    )
    module = Module()
    trainer.fit(module, train_dataloaders=stream)
    expected = [("at", 0), ("draw", 0), ("at", 1), ("draw", 1), ("at", 2), ("draw", 2), ("at", 3)]
    assert events == expected
    assert len(module.batches) == 3 * micro_batches
    assert [batch.version for batch in module.batches] == module.seen_at


def test_without_a_length_it_would_draw_too_early_and_says_so():
    class Unsized:
        def __iter__(self):
            return iter(stream)

    trainer = make_trainer()
    draws = []
    stream = make_stream(
        make_pool([make_group(uid) for uid in range(3)]),
        lambda: trainer.global_step,
        on_draw=draws.append,
    )
    with pytest.raises(RuntimeError, match="one draw must be exactly one optimizer step"):
        trainer.fit(Module(), train_dataloaders=Unsized())
    assert len(draws) == 1


def test_on_policy_data_made_after_each_step_is_drawn_on_policy():
    # the producer makes a group only once it knows the version: an early draw would wait forever
    settled, versions = [], queue.Queue()
    pool = make_pool(policy=MaxLag(0), settled=settled)

    def produce():
        for version in iter(versions.get, None):
            pool.put(make_group(version, version=version))

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        trainer = make_trainer(versions.put)
        module = Module()
        trainer.fit(module, train_dataloaders=make_stream(pool, lambda: trainer.global_step))
    finally:
        versions.put(None)
        producer.join(DEADLINE_SECONDS)
    assert [batch.version for batch in module.batches] == [0, 1, 2]
    for version, batch in enumerate(module.batches):
        assert batch.report.total_staleness_versions == 0
        assert set(batch.token_versions[batch.loss_mask].tolist()) == {version}
    assert not settled


def test_after_a_resume_it_goes_on_at_the_restored_version():
    versions = Versions(2)
    stream = make_stream(make_pool([make_group(uid) for uid in range(5)]), versions)
    assert [draw[0].version for draw in drawn(stream, versions)] == [2]


def test_a_draw_that_was_not_one_step_is_an_error():
    stream = iter(make_stream(make_pool([make_group(0), make_group(1)]), Versions()))
    next(stream)
    with pytest.raises(
        RuntimeError, match="version 0 was consumed, but the trainer is at version 0"
    ):
        next(stream)


# --- what it hands out ----------------------------------------------------------------------------


def test_rows_do_not_depend_on_the_order_of_arrival():
    groups = [make_group(uid, rewards=(0.0, 1.0, float(uid))) for uid in range(4)]
    results = []
    for order in itertools.permutations(groups):
        versions = Versions()
        stream = make_stream(
            make_pool(order), versions, total_steps=1, groups_per_step=4, num_micro_batches=3
        )
        (batches,) = drawn(stream, versions)
        results.append(batches)
    for batches in results[1:]:
        for one, other in zip(results[0], batches, strict=True):
            assert all(torch.equal(getattr(one, n), getattr(other, n)) for n in TENSORS)


def test_every_micro_batch_carries_the_report_of_its_draw_and_the_groups_are_announced_first():
    versions, announced = Versions(), []
    stream = make_stream(
        make_pool([make_group(uid) for uid in range(4)]),
        versions,
        total_steps=2,
        groups_per_step=2,
        num_micro_batches=4,
        on_draw=lambda groups: announced.append([group.prompt.uid for group in groups]),
    )
    for number, batches in enumerate(drawn(stream, versions)):
        assert len({id(batch.report) for batch in batches}) == 1
        assert batches[0].report.version == number
        assert batches[0].report.drawn_groups == 2
    assert announced == [["000", "001"], ["002", "003"]]


def with_wait(pool, *seconds):
    """Make the draws of a pool report these waiting times."""
    draw, waits = pool.draw, iter(seconds)

    def patched(*arguments, **named):
        groups, report = draw(*arguments, **named)
        seconds = next(waits)
        return groups, replace(report, wait_seconds=seconds, ranking_seconds=seconds / 10)

    pool.draw = patched
    return pool


def test_a_draw_without_gradient_is_repeated_and_its_groups_are_handed_back():
    empty = [make_group(uid, rewards=(1.0, 1.0)) for uid in range(4)]
    mixed = [make_group(4), make_group(5, rewards=(0.0, 0.0))]
    pool = with_wait(make_pool([*empty, *mixed, make_group(6)]), 1.0, 2.0, 4.0)
    versions, dropped, announced = Versions(), [], []
    stream = make_stream(
        pool,
        versions,
        total_steps=1,
        groups_per_step=2,
        needs_spread=True,
        drop_empty=lambda groups: dropped.append([group.prompt.uid for group in groups]),
        on_draw=lambda groups: announced.append([group.prompt.uid for group in groups]),
    )
    ((batch,),) = drawn(stream, versions)
    assert dropped == [["000", "001"], ["002", "003"]]
    assert announced == [["004", "005"]]  # one group with a gradient is enough
    report = batch.report
    assert report.redrawn_groups == 4
    assert report.drawn_groups == 2
    assert report.wait_seconds == 7.0
    assert report.ranking_seconds == pytest.approx(0.7)
    assert (report.occupancy_before_groups, report.occupancy_after_groups) == (7, 1)


def test_rejections_of_a_repeated_draw_stay_in_its_report():
    # version 4, at most 1 behind: lags 4 and 2 are rejected by the first draw, 3 by the second
    settled = []
    pool = make_pool(policy=MaxLag(1), settled=settled)
    pool.put(make_group(0, version=0))
    pool.put(make_group(1, version=2))
    pool.put(make_group(2, version=4, rewards=(1.0, 1.0)))
    versions = Versions(4)

    def drop(groups):
        pool.put(make_group(3, version=1))
        pool.put(make_group(4, version=3))

    stream = make_stream(pool, versions, total_steps=5, drop_empty=drop, needs_spread=True)
    ((batch,),) = drawn(stream, versions)
    report = batch.report
    assert settled == [(f"{uid:03}", Fate.TOO_STALE, 7) for uid in (0, 1, 3)]
    assert report.rejected_groups == 3
    assert report.rejected_response_tokens == (3.5,) * 3
    assert report.rejected_pass_rates == (0.5,) * 3
    lags = [part.total for part in report.rejected_staleness]
    assert lags == [4, 4, 2, 2, 3, 3]
    assert (
        report.rejected_total_staleness_versions == report.rejected_waiting_staleness_versions == 3
    )
    assert report.rejected_generation_staleness_versions == 0
    assert report.staleness == (StalenessDecomposition(0.0, 1),) * 2
    assert report.total_staleness_versions == 1


def test_a_draw_whose_differing_responses_carry_no_loss_has_no_gradient():
    # overlong filtering leaves nothing of the first group
    versions, dropped = Versions(), []
    stream = make_stream(
        make_pool([make_group(0, truncated=True), make_group(1)]),
        versions,
        total_steps=1,
        mask_truncated=True,
        needs_spread=True,
        drop_empty=dropped.extend,
    )
    ((batch,),) = drawn(stream, versions)
    assert [group.prompt.uid for group in dropped] == ["000"]
    assert set(batch.input_ids[:, 2].tolist()) == {1}


def test_a_draw_without_gradient_is_trained_on_where_a_penalty_gives_it_one():
    versions = Versions()
    stream = make_stream(make_pool([make_group(0, rewards=(1.0, 1.0))]), versions, total_steps=1)
    ((batch,),) = drawn(stream, versions)
    assert not batch.advantages.any()
    assert batch.loss_mask.any()


# --- how it ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_training_ends_early_and_cleanly_when_the_data_ends(micro_batches):
    pool = make_pool([make_group(uid) for uid in range(5)])
    pool.close()
    trainer = make_trainer(steps=9, micro_batches=micro_batches)
    stream = make_stream(
        pool,
        lambda: trainer.global_step,
        total_steps=9,
        groups_per_step=2,
        num_micro_batches=micro_batches,
    )
    module = Module()
    trainer.fit(module, train_dataloaders=stream)
    assert trainer.global_step == 2
    assert trainer.state.finished
    assert len(module.batches) == 2 * micro_batches
    assert len(pool) == 1  # too few for a step: still there, to be settled


@pytest.mark.parametrize("at_version", [0, 2])
def test_the_error_of_the_producer_leaves_fit_as_the_same_object(at_version):
    error = ZeroDivisionError("the engine died")
    pool = make_pool([make_group(uid) for uid in range(at_version)])
    failed = threading.Event()

    def act(version):
        if version == at_version:
            threading.Thread(target=lambda: (pool.fail(error), failed.set())).start()

    trainer = make_trainer(act)
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.fit(Module(), train_dataloaders=make_stream(pool, lambda: trainer.global_step))
    assert failed.wait(DEADLINE_SECONDS)
    assert caught.value is error
    assert trainer.global_step == at_version


def test_who_gives_up_on_empty_draws_ends_the_run():
    error = ZeroDivisionError("nothing to learn")

    def give_up(groups):
        raise error

    trainer = make_trainer()
    pool = make_pool([make_group(0), make_group(1, rewards=(0.0, 0.0))])
    stream = make_stream(pool, lambda: trainer.global_step, drop_empty=give_up, needs_spread=True)
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.fit(Module(), train_dataloaders=stream)
    assert caught.value is error
    assert trainer.global_step == 1


def test_each_wait_is_announced_and_its_end_too_however_it_ends():
    events = []

    @contextlib.contextmanager
    def waiting():
        events.append("begin")
        try:
            yield
        except EndOfGroups:
            events.append("nothing came")
            raise
        finally:
            events.append("end")

    pool = make_pool([make_group(0)])
    pool.close()
    versions = Versions()
    stream = make_stream(
        pool, versions, waiting=waiting, on_draw=lambda groups: events.append("drawn")
    )
    assert len(drawn(stream, versions)) == 1
    assert events == ["begin", "end", "drawn", "begin", "nothing came", "end"]


# --- what each rank gets --------------------------------------------------------------------------


def test_ranks_know_how_much_the_largest_of_them_computes_at_the_same_time():
    groups = [make_group(uid, length=1 + 3 * uid) for uid in range(4)]
    batches = collate(
        groups, version=0, num_micro_batches=4, pad_token_id=0, advantage="grpo", std_ddof=1
    )
    sizes = [int(batch.loss_mask.sum()) for batch in batches]
    assert len(set(sizes)) > 2, "ranks get different numbers of tokens"
    first, second = deal(batches, 2)
    assert [int(batch.loss_mask.sum()) for batch in first] == sizes[0::2]
    for hand in (first, second):
        assert [batch.peer_tokens for batch in hand] == [max(sizes[:2]), max(sizes[2:])]
