"""Collation: where every token lands, how the work is split, and what must be refused."""

import itertools
import pickle
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pace_lightning.core.batch import balanced_split, collate, padding_share
from pace_lightning.core.trajectory import Prompt, Trajectory, TrajectoryGroup

PAD = 99
TENSORS = (
    "input_ids",
    "attention_mask",
    "loss_mask",
    "behavior_logprobs",
    "advantages",
    "token_versions",
)


def make_group(uid, prompt_ids, responses, truncated=()):
    """A group from ``(token_ids, versions, logprobs, reward)`` of each response."""
    return TrajectoryGroup(
        prompt=Prompt(uid=str(uid), token_ids=tuple(prompt_ids), content=""),
        trajectories=tuple(
            Trajectory(
                token_ids=tuple(token_ids),
                token_versions=tuple(versions),
                behavior_logprobs=tuple(logprobs),
                completed_at=max(versions),
                reward=reward,
                score=reward,
                truncated=index in truncated,
            )
            for index, (token_ids, versions, logprobs, reward) in enumerate(responses)
        ),
    )


def random_draw(seed, num_groups=3, group_size=4, longest=9):
    """Groups in which every sampled token has an id, a log-prob and versions of its own."""
    rng = random.Random(seed)
    fresh = itertools.count(1000)
    groups = []
    for uid in range(num_groups):
        responses = []
        for index in range(group_size):
            length = rng.randint(1, longest)
            ids = [next(fresh) for _ in range(length)]
            versions = sorted(rng.randint(0, 5) for _ in ids)
            responses.append((ids, versions, [-token / 1000 for token in ids], float(index == 0)))
        prompt_ids = [next(fresh) for _ in range(rng.randint(1, 4))]
        groups.append(make_group(uid, prompt_ids, responses))
    return groups


def collated(groups, num_micro_batches, **changes):
    arguments = {"version": 5, "pad_token_id": PAD, "advantage": "dr_grpo", "std_ddof": 1}
    return collate(groups, num_micro_batches=num_micro_batches, **(arguments | changes))


def test_a_draw_by_hand():
    # rewards 1 and 0: advantages 1/2 and -1/2; lengths 2 + 3 and 2 + 1
    group = make_group(
        "p", [7, 8], [([1], [4], [-0.5], 1.0), ([2, 3, 4], [3, 3, 5], [-0.1, -0.2, -0.3], 0.0)]
    )
    (batch,) = collated([group], 1, version=6, report="the report")
    assert batch.input_ids.tolist() == [[7, 8, 2, 3, 4], [7, 8, 1, PAD, PAD]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, False, True, True, True], [0, 0, 1, 0, 0]]
    assert batch.token_versions.tolist() == [[-1, -1, 3, 3, 5], [-1, -1, 4, -1, -1]]
    assert batch.advantages.tolist() == [[0, 0, -0.5, -0.5, -0.5], [0, 0, 0.5, 0, 0]]
    expected = torch.tensor([[0, 0, -0.1, -0.2, -0.3], [0, 0, -0.5, 0, 0]])
    assert torch.equal(batch.behavior_logprobs, expected)
    assert (batch.num_tokens_global, batch.num_sequences_global) == (4, 2)
    assert (batch.version, batch.micro_batch_index, batch.num_micro_batches) == (6, 0, 1)
    assert batch.report == "the report"
    assert padding_share([batch]) == pytest.approx(2 / 10)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), num_groups=st.integers(1, 5), num_parts=st.integers(1, 24))
def test_every_token_lands_once_with_what_belongs_to_it(seed, num_groups, num_parts):
    groups = random_draw(seed, num_groups=num_groups)
    expected = {}
    for group in groups:
        for index, trajectory in enumerate(group.trajectories):
            advantage = 0.75 if index == 0 else -0.25  # one right answer of four, dr_grpo
            for token, version, logprob in zip(
                trajectory.token_ids,
                trajectory.token_versions,
                trajectory.behavior_logprobs,
                strict=True,
            ):
                expected[token] = (version, torch.tensor(logprob).item(), advantage)
    found = {}
    batches = collated(groups, num_parts)
    for batch in batches:
        for at in batch.loss_mask.nonzero().tolist():
            where = tuple(at)
            token = batch.input_ids[where].item()
            assert token not in found
            found[token] = (
                batch.token_versions[where].item(),
                batch.behavior_logprobs[where].item(),
                batch.advantages[where].item(),
            )
    assert found == expected
    assert {batch.num_tokens_global for batch in batches} == {len(expected)}
    assert {batch.num_sequences_global for batch in batches} == {4 * num_groups}
    assert [batch.micro_batch_index for batch in batches] == list(range(num_parts))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), num_parts=st.integers(1, 16))
def test_rows_are_prompt_response_padding(seed, num_parts):
    groups = random_draw(seed)
    rows = {
        (*group.prompt.token_ids, *trajectory.token_ids): len(group.prompt.token_ids)
        for group in groups
        for trajectory in group.trajectories
    }
    found = 0
    last = 10**6
    for batch in collated(groups, num_parts):
        lengths = batch.attention_mask.sum(dim=1).tolist()
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] <= last
        last = lengths[-1]
        assert max(lengths) == batch.input_ids.shape[1]
        for index, length in enumerate(lengths):
            ids = tuple(batch.input_ids[index].tolist())
            assert batch.attention_mask[index, :length].all()
            assert set(ids[length:]) <= {PAD}
            sampled = (batch.token_versions[index] >= 0).tolist()
            assert sampled == batch.loss_mask[index].tolist()
            assert not (batch.behavior_logprobs[index] != 0)[~batch.loss_mask[index]].any()
            assert not (batch.advantages[index] != 0)[~batch.loss_mask[index]].any()
            if any(sampled):
                found += 1
                assert sampled.index(True) == rows[ids[:length]]
    assert found == len(rows)


def test_missing_rows_are_filled_with_zero_weight():
    group = make_group("p", [7], [([1, 2], [0, 0], [-1, -1], 1.0), ([3], [0], [-1], 0.0)])
    batches = collated([group], 5)
    assert [batch.loss_mask.sum().item() for batch in batches] == [2, 1, 0, 0, 0]
    for batch in batches[2:]:
        assert batch.input_ids.tolist() == [[PAD, PAD]]
        assert batch.attention_mask.tolist() == [[1, 1]]
        assert batch.token_versions.tolist() == [[-1, -1]]
        assert (batch.num_tokens_global, batch.num_sequences_global) == (3, 2)
    # 3 + 2 tokens in 3 + 2 + 3 x 2 positions
    assert padding_share(batches) == pytest.approx(1 - 5 / 11)


def test_truncated_responses_can_be_left_out_of_the_loss():
    responses = [([1, 2], [0, 0], [-1, -1], 1.0), ([3], [0], [-1], 0.0)]
    group = make_group("p", [7], responses, truncated={0})
    (kept,) = collated([group], 1)
    (masked,) = collated([group], 1, mask_truncated=True)
    assert (kept.num_tokens_global, kept.num_sequences_global) == (3, 2)
    assert (masked.num_tokens_global, masked.num_sequences_global) == (1, 1)
    assert masked.loss_mask.tolist() == [[False, False, False], [False, True, False]]
    # the truncated response still counts in the baseline: 0 - 1/2
    assert masked.advantages[1, 1].item() == -0.5
    # and its tokens are still sampled tokens, not padding
    assert masked.token_versions.tolist() == kept.token_versions.tolist()
    assert padding_share([masked]) == pytest.approx(1 / 6)


def test_a_draw_without_loss_tokens_is_refused():
    group = make_group("p", [7], [([1], [0], [-1], 1.0), ([3], [0], [-1], 0.0)], truncated={0, 1})
    with pytest.raises(ValueError, match=r"2 responses in 1 groups have 0 loss.*is True"):
        collated([group], 1, mask_truncated=True)
    with pytest.raises(ValueError, match=r"0 responses in 0 groups have 0 loss"):
        collated([], 1)


@pytest.mark.parametrize(
    ("prompt_ids", "changes", "message"),
    [
        ([7], {"num_micro_batches": 0}, "num_micro_batches is 0"),
        ([], {}, "prompt 'p' has 0 tokens"),
        ([7], {"version": 3}, "version 4, after the version 3"),
        ([7], {"advantage": "none"}, "unknown advantage 'none'"),
    ],
)
def test_impossible_draws_are_refused(prompt_ids, changes, message):
    group = make_group("p", prompt_ids, [([1], [4], [-1], 1.0), ([3], [4], [-1], 0.0)])
    with pytest.raises(ValueError, match=message):
        collated([group], **({"num_micro_batches": 1} | changes))


def test_advantage_settings_reach_the_groups():
    # grpo, ddof 0, two responses: deviation 1/2, (1 - 1/2) / 0.5; ddof 1: deviation sqrt(1/2)
    group = make_group("p", [7], [([1], [4], [-1], 1.0), ([3], [4], [-1], 0.0)])
    for ddof, expected in ((0, 1.0), (1, 0.7071068)):
        (batch,) = collated([group], 1, advantage="grpo", std_ddof=ddof)
        values = sorted(batch.advantages[batch.loss_mask].tolist())
        assert values == pytest.approx([-expected, expected], rel=1e-5)


def test_rewards_keep_their_digits_until_they_are_centered():
    group = make_group("p", [7], [([1], [4], [-1], 1e6 + 0.01), ([3], [4], [-1], 1e6)])
    (batch,) = collated([group], 1)
    values = sorted(batch.advantages[batch.loss_mask].tolist())
    assert values == pytest.approx([-0.005, 0.005], abs=1e-9)


def test_collation_is_deterministic():
    first, second = (collated(random_draw(3), 4) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in TENSORS)


def test_rows_of_equal_length_keep_their_order():
    groups = [
        make_group(uid, [1], [([uid], [0], [-1], 1.0), ([uid + 10], [0], [-1], 0.0)])
        for uid in range(3)
    ]
    (batch,) = collated(groups, 1)
    assert batch.input_ids[:, 1].tolist() == [0, 10, 1, 11, 2, 12]


# --- splitting -----------------------------------------------------------------------------------

FALLING = st.one_of(
    st.lists(st.integers(1, longest), min_size=1, max_size=9).map(
        lambda lengths: sorted(lengths, reverse=True)
    )
    for longest in (2, 9, 60)
)


@settings(max_examples=150, deadline=None)
@given(lengths=FALLING, data=st.data())
def test_no_contiguous_cut_has_a_smaller_largest_part(lengths, data):
    num_parts = data.draw(st.integers(1, len(lengths)))
    parts = balanced_split(lengths, num_parts)
    assert [index for part in parts for index in part] == list(range(len(lengths)))
    assert len(parts) == num_parts
    assert all(len(part) > 0 for part in parts)
    best = min(
        max(
            (stop - start) * lengths[start]
            for start, stop in itertools.pairwise((0, *cuts, len(lengths)))
        )
        for cuts in itertools.combinations(range(1, len(lengths)), num_parts - 1)
    )
    assert max(len(part) * lengths[part.start] for part in parts) == best


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), num_parts=st.integers(1, 8))
def test_no_micro_batch_is_larger_than_an_equal_share_of_rows(seed, num_parts):
    batches = collated(random_draw(seed, num_groups=6, longest=40), num_parts)
    longest = max(batch.input_ids.shape[1] for batch in batches)
    rows = sum(len(batch.input_ids) for batch in batches)
    # equal numbers of rows, each padded to the longest of all, is one of the possible cuts
    assert max(batch.input_ids.numel() for batch in batches) <= longest * -(-rows // num_parts)


def test_sorting_keeps_padding_small():
    groups = random_draw(1, num_groups=32, group_size=8, longest=200)
    shares = [padding_share(collated(groups, parts)) for parts in (1, 4, 16)]
    assert shares[0] > 0.4  # lengths are uniform: half of one big rectangle is padding
    assert shares[1] < 0.25
    assert shares[2] < 0.1


def test_a_large_draw_is_split_quickly():
    rng = random.Random(0)
    lengths = sorted((rng.randint(50, 32_000) for _ in range(4096)), reverse=True)
    started = time.process_time()
    parts = balanced_split(lengths, 64)
    assert time.process_time() - started < 0.05
    sizes = [len(part) * lengths[part.start] for part in parts]
    assert max(sizes) < 1.1 * sum(lengths) / 64


def test_the_largest_part_is_halved_when_parts_are_missing():
    # filled up to 8: [8] [2 2 2 2] [1 1]; a fourth part comes from the 8 positions, not from the 2
    parts = balanced_split([8, 2, 2, 2, 2, 1, 1], 4)
    assert parts == [range(0, 1), range(1, 3), range(3, 5), range(5, 7)]


def test_more_parts_than_rows_are_refused():
    with pytest.raises(ValueError, match="cannot cut 2 rows into 3 parts"):
        balanced_split([5, 4], 3)


# --- TrainBatch ----------------------------------------------------------------------------------


def test_moving_a_batch_moves_tensors_and_keeps_the_rest():
    (batch,) = collated(random_draw(0), 1, report={"a": 1})
    before = {name: getattr(batch, name) for name in TENSORS}
    assert batch.to("meta", non_blocking=True) is batch
    for name, tensor in before.items():
        moved = getattr(batch, name)
        assert moved.device.type == "meta"
        assert (moved.dtype, moved.shape) == (tensor.dtype, tensor.shape)
    assert batch.report == {"a": 1}
    assert batch.version == 5


def test_dtypes_are_those_the_loss_needs():
    (batch,) = collated(random_draw(0), 1)
    assert [getattr(batch, name).dtype for name in TENSORS] == [
        torch.int64,
        torch.int64,
        torch.bool,
        torch.float32,
        torch.float32,
        torch.int32,
    ]


def test_a_batch_survives_pickling():
    """Rank 0 sends the batches of the other ranks as pickles."""
    (batch,) = collated(random_draw(0), 1, report="r")
    copy = pickle.loads(pickle.dumps(batch))
    assert all(torch.equal(getattr(copy, name), getattr(batch, name)) for name in TENSORS)
    assert (copy.version, copy.num_tokens_global, copy.report) == (
        batch.version,
        batch.num_tokens_global,
        "r",
    )


def test_a_batch_takes_no_stray_attributes():
    (batch,) = collated(random_draw(0), 1)
    with pytest.raises(AttributeError):
        batch.num_tokens = 3
