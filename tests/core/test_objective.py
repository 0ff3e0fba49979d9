"""A draw's objective: the same whatever the draw is split into, and put together as it says."""

import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from pace_lightning.core.batch_advantages import opob_advantages
from pace_lightning.core.corrections import METHODS
from pace_lightning.core.heads import HEADS, dapo_head
from pace_lightning.core.importance_weights import tis, trajectory_log_ratio
from pace_lightning.core.losses import aggregate, blank
from pace_lightning.core.objective import (
    Objective,
    Scored,
    active_tokens,
    objective_loss,
    objective_statistics,
    prepare,
)

DEADLINE_SECONDS = 20.0
WEIGHTED = [name for name in METHODS if METHODS[name].role != "objective"]
WHOLE = [name for name in METHODS if METHODS[name].role == "objective"]
SETTINGS = {  # so that the statistics matter
    "m2po": {"min_clip_low": 0.01, "min_clip_high": 0.01},
    "sat_gspo": {"clip_low": 0.2, "clip_high": 0.3},
}
WIDE = {"lower": 0.8, "upper": 1.25}
OBJECTIVES = {
    "returns": Objective(HEADS["grpo"], returns={"gamma": 0.9, "kl_coef": 0.1}),
    **{name: Objective(HEADS[name], SETTINGS.get(name, {})) for name in HEADS},
    **{
        f"dapo {name}": Objective(
            HEADS["dapo"], corrections=[(name, WIDE if name == "rs" else {})], has_proximal=True
        )
        for name in WEIGHTED
    },
    **{f"reinforce {n}": Objective(HEADS["reinforce"], corrections=[(n, {})]) for n in WHOLE},
    "kept": Objective(
        HEADS["grpo"],
        corrections=[("mis", {"lower": 0.8, "upper": 1.3}), ("m2po", {})],
        has_proximal=True,
        mask_denominator="kept",
        normalize_weights=True,
        aggregation="seq-mean-token-mean",
    ),
    "vcpo": Objective(
        HEADS["reinforce"],
        corrections=[("tis", {"level": "sequence", "cap": 8.0})],
        opob={"weighting": "paper", "std_normalize": True},
        aggregation="seq-mean-token-mean",
    ),
    "opob of lengths": Objective(
        HEADS["reinforce"], opob={"weighting": "repo", "length_normalize": True}
    ),
}


def make_draw(seed=0, num_groups=4, group_size=3, width=9):
    """Rows of a whole draw; groups lie next to each other, one row has no trained token."""
    generator = torch.Generator().manual_seed(seed)
    rows = num_groups * group_size
    shape = (rows, width)
    behavior = -3 * torch.rand(shape, generator=generator) - 0.05
    proximal = behavior + 0.3 * torch.randn(shape, generator=generator)
    policy = proximal + 0.4 * torch.randn(shape, generator=generator)
    lengths = torch.randint(1, width, (rows,), generator=generator)
    mask = (torch.arange(width) >= 1) & (torch.arange(width) <= lengths[:, None])
    mask[5] = False
    rewards = torch.randint(0, 2, (rows,), generator=generator).float()
    rewards[::group_size], rewards[1::group_size] = 1.0, 0.0
    advantages = (rewards - 0.5)[:, None].expand(shape).clone()
    return Scored(
        policy_logprobs=torch.where(mask, policy, math.nan),
        proximal_logprobs=torch.where(mask, proximal, math.nan),
        behavior_logprobs=torch.where(mask, behavior, math.nan),
        advantages=advantages,
        mask=mask,
        rewards=rewards,
        group_ids=torch.arange(rows) // group_size,
        score_square_norms=1 + torch.rand(rows, generator=generator),
        reference_logprobs=torch.where(mask, behavior + 0.1, math.nan),
    )


def split(draw, parts):
    """The rows in an order that cuts groups apart, in parts."""
    order = torch.randperm(len(draw.mask), generator=torch.Generator().manual_seed(1))
    pieces = []
    for rows in torch.tensor_split(order, parts):
        fields = {name: getattr(draw, name)[rows] for name in draw.__dataclass_fields__}
        pieces.append((rows, Scored(**fields)))
    return pieces


def for_objective(objective, draw):
    return draw if objective.has_proximal else replace(
        draw, proximal_logprobs=draw.behavior_logprobs
    )  # fmt: skip


def loss_and_gradient(objective, draw, parts, gather=None, rows_of_rank=None):
    """The loss of a rank's micro-batches, and d/d log pi in the order of the draw."""
    tokens, sequences = int(draw.mask.sum()), int(draw.mask.any(dim=1).sum())
    mine = [parts[i] for i in (rows_of_rank or range(len(parts)))]
    options = {} if gather is None else {"gather": gather}
    all_terms = prepare(
        objective,
        [part for _, part in mine],
        num_tokens=tokens,
        num_sequences=sequences,
        **options,
    )
    gradient, total = torch.zeros_like(draw.mask, dtype=torch.float32), 0.0
    for (rows, part), terms in zip(mine, all_terms, strict=True):
        leaf = part.policy_logprobs.clone().requires_grad_()
        loss = objective_loss(objective, leaf, terms)
        gradient[rows] = torch.autograd.grad(loss, leaf)[0]
        total += float(loss.detach())
    return total, gradient


class Ranks:
    """Simulated ranks: `gather` waits for all of them, in threads."""

    def __init__(self, count):
        self._slots = [None] * count
        self._barrier = threading.Barrier(count)
        self.calls = [0] * count

    def gather_for(self, rank):
        def gather(vector):
            self._slots[rank] = vector
            self.calls[rank] += 1
            self._barrier.wait(DEADLINE_SECONDS)
            joined = torch.cat(self._slots)
            self._barrier.wait(DEADLINE_SECONDS)
            return joined

        return gather


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_loss_and_gradient_do_not_depend_on_micro_batches_and_ranks(name):
    objective = replace(OBJECTIVES[name], max_length=9)
    draw = for_objective(objective, make_draw())
    whole, expected = loss_and_gradient(objective, draw, split(draw, 1))
    assert expected.abs().sum() > 0
    assert expected.isfinite().all()

    total, gradient = loss_and_gradient(objective, draw, split(draw, 4))
    assert total == pytest.approx(whole, rel=1e-5, abs=1e-7)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)

    ranks, parts, results = Ranks(2), split(draw, 4), [None, None]

    def run(rank, rows):
        results[rank] = loss_and_gradient(
            objective, draw, parts, gather=ranks.gather_for(rank), rows_of_rank=rows
        )

    threads = [
        threading.Thread(target=run, args=(r, rows)) for r, rows in enumerate([[0, 3], [1, 2]])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_SECONDS)
    assert sum(r[0] for r in results) == pytest.approx(whole, rel=1e-5, abs=1e-7)
    torch.testing.assert_close(results[0][1] + results[1][1], expected, rtol=1e-5, atol=1e-7)
    assert ranks.calls[0] == ranks.calls[1]
    assert (ranks.calls[0] > 0) == objective.needs_draw


def test_the_kept_denominator_counts_only_sequences_that_keep_a_token():
    # the second row is rejected (x = e > 1.1): the mean is over the first alone
    policy = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
    part = Scored(
        policy_logprobs=policy,
        proximal_logprobs=policy,
        behavior_logprobs=policy - torch.tensor([[0.0], [1.0]]),
        advantages=torch.ones(2, 2),
        mask=torch.ones(2, 2, dtype=torch.bool),
        rewards=torch.ones(2),
        group_ids=torch.zeros(2),
    )
    objective = Objective(
        HEADS["reinforce"],
        corrections=[("rs", {"lower": 0.9, "upper": 1.1})],
        mask_denominator="kept",
        aggregation="seq-mean-token-mean",
    )
    (terms,) = prepare(objective, [part], num_tokens=4, num_sequences=2)
    assert (terms.num_tokens, terms.num_sequences) == (2, 1)
    assert objective_loss(objective, policy, terms).item() == pytest.approx(1.0)


def test_returns_of_tokens_are_discounted_penalized_and_whitened_over_the_draw():
    # log pi - log ref = 1, 2, 3 | 4; beta 0.5, gamma 0.5, rewards 1 | 3
    # G = 1 - 1.5 = -0.5, -1 - 0.25 = -1.25, -0.5 - 0.625 = -1.125 | 3 - 2 = 1
    policy = torch.tensor([[9.0, -1.0, -1.0, -1.0], [9.0, 9.0, -1.0, 9.0]])
    kl = torch.tensor([[7.0, 1.0, 2.0, 3.0], [7.0, 7.0, 4.0, 7.0]])
    mask = torch.tensor([[False, True, True, True], [False, False, True, False]])
    part = Scored(
        policy_logprobs=policy,
        proximal_logprobs=policy,
        behavior_logprobs=policy,
        advantages=torch.full((2, 4), math.nan),
        mask=mask,
        rewards=torch.tensor([1.0, 3.0]),
        group_ids=torch.tensor([0, 1]),
        reference_logprobs=policy - kl,
    )
    objective = Objective(HEADS["reinforce"], returns={"gamma": 0.5, "kl_coef": 0.5})
    (terms,) = prepare(objective, [part], num_tokens=4, num_sequences=2)
    returns = np.array([-1.125, -1.25, -0.5, 1.0])
    expected = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(terms.advantages[mask].numpy(), expected, rtol=1e-6)
    assert (terms.advantages[~mask] == 0).all()
    bare = replace(part, reference_logprobs=None)
    with pytest.raises(ValueError, match="pass the estimates"):
        prepare(objective, [bare], num_tokens=4, num_sequences=2)


@pytest.mark.parametrize("name", sorted(n for n in OBJECTIVES if OBJECTIVES[n].needs_draw))
def test_an_objective_that_needs_the_draw_would_differ_without_it(name):
    """Otherwise the test above proves nothing."""
    objective = replace(OBJECTIVES[name], max_length=9)
    differs = False
    for seed in range(12):
        draw = for_objective(objective, make_draw(seed))
        whole, expected = loss_and_gradient(objective, draw, split(draw, 1))
        total, gradient = 0.0, torch.zeros_like(expected)
        for part in split(draw, 4):
            own_total, own = loss_and_gradient(objective, draw, [part])
            total, gradient = total + own_total, gradient + own
        differs |= abs(total - whole) > 1e-4 or not torch.allclose(gradient, expected, rtol=1e-4)
    assert differs


def test_the_parts_are_put_together_as_the_header_says():
    draw = make_draw()
    objective = Objective(
        HEADS["dapo"],
        {"clip_low": 0.1, "clip_high": 0.15},
        corrections=[("tis", {"cap": 1.1}), ("rs", {"level": "token", "lower": 0.8, "upper": 1.2})],
        has_proximal=True,
    )
    ratio = (draw.proximal_logprobs - draw.behavior_logprobs).exp()
    keep = draw.mask & (ratio >= 0.8) & (ratio <= 1.2)
    weight = tis(draw.proximal_logprobs, draw.behavior_logprobs, draw.mask, cap=1.1).weight
    head = dapo_head(
        draw.policy_logprobs, draw.proximal_logprobs, draw.advantages, draw.mask,
        clip_low=0.1, clip_high=0.15,
    )  # fmt: skip
    losses = torch.where(keep, head * weight, 0.0)
    for denominator, mask in (("original", draw.mask), ("kept", keep)):
        changed = replace(objective, mask_denominator=denominator)
        (terms,) = prepare(changed, [draw], num_tokens=int(draw.mask.sum()), num_sequences=11)
        loss = objective_loss(changed, draw.policy_logprobs, terms)
        assert loss.item() == pytest.approx(losses.sum().item() / int(mask.sum()), rel=1e-6)
    assert 0 < int(keep.sum()) < int(draw.mask.sum())


def test_without_a_proximal_policy_corrections_look_at_the_whole_ratio():
    draw = make_draw()
    objective = Objective(HEADS["reinforce"], corrections=[("tis", {"cap": 1.2})])
    (terms,) = prepare(objective, [draw], num_tokens=99, num_sequences=12)
    expected = tis(draw.policy_logprobs, draw.behavior_logprobs, draw.mask, cap=1.2)
    assert torch.equal(terms.correction.weight, expected.weight)


def test_opob_takes_the_baseline_of_each_group_at_trained_rows():
    draw = make_draw()
    objective = OBJECTIVES["vcpo"]
    parts = split(draw, 4)
    all_terms = prepare(objective, [p for _, p in parts], num_tokens=99, num_sequences=12)
    ratios = trajectory_log_ratio(draw.policy_logprobs, draw.behavior_logprobs, draw.mask)
    for (rows, _), terms in zip(parts, all_terms, strict=True):
        for position, row in enumerate(rows.tolist()):
            group = (draw.group_ids == draw.group_ids[row]) & draw.mask.any(dim=1)
            expected = torch.zeros(len(group))
            expected[group] = opob_advantages(
                draw.rewards[group], ratios[group], draw.score_square_norms[group],
                std_normalize=True,
            )  # fmt: skip
            values = terms.advantages[position][draw.mask[row]]
            assert values.tolist() == pytest.approx([expected[row].item()] * len(values))
            assert (terms.advantages[position][~draw.mask[row]] == 0).all()


def test_active_tokens_are_those_that_nothing_cuts_off():
    # ratios 1.5 (A 1: clipped), 1.5 (A -1), .5 (A 1), .5 (A -1: clipped), 1 (A 0), masked
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.0, 1.5]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 0.0, 1.0]])
    mask = torch.tensor([[True] * 5 + [False]])
    draw = Scored(
        ratios.log(), torch.zeros(1, 6), torch.zeros(1, 6), advantages, mask,
        torch.zeros(1), torch.zeros(1),
    )  # fmt: skip
    objective = Objective(HEADS["dapo"])
    (terms,) = prepare(objective, [draw], num_tokens=5, num_sequences=1)
    active = active_tokens(objective, draw.policy_logprobs, terms)
    assert active.tolist() == [[False, True, True, False, True, False]]
    found = objective_statistics(objective, draw.policy_logprobs, draw.behavior_logprobs, terms)
    values = {name: value.item() for name, value in found.items()}
    assert (values["inactive_positive_sum"], values["inactive_negative_sum"]) == (1, 1)
    assert values["rejected_sum"] == 0
    squares = 2 * math.log(1.5) ** 2 + 2 * math.log(0.5) ** 2
    assert values["log_ratio_square_sum"] == pytest.approx(squares, rel=1e-6)
    # a mask that drops ratios above 1.4 takes the second token too
    masked = replace(
        objective, corrections=[("rs", {"level": "token", "lower": 0.1, "upper": 1.4})]
    )
    (terms,) = prepare(masked, [draw], num_tokens=5, num_sequences=1)
    active = active_tokens(masked, draw.policy_logprobs, terms)
    assert active.tolist() == [[False, False, True, False, True, False]]


def test_nothing_kept_at_all_is_a_loss_of_zero():
    draw = make_draw()
    for mode in ("token-mean", "seq-mean-token-mean"):
        objective = Objective(
            HEADS["dapo"],
            corrections=[("k2_rs", {"upper": 0.0})],
            has_proximal=True,
            mask_denominator="kept",
            aggregation=mode,
        )
        (terms,) = prepare(objective, [draw], num_tokens=99, num_sequences=12)
        assert objective_loss(objective, draw.policy_logprobs, terms).item() == 0.0


def test_a_penalty_is_added_uncorrected():
    draw = make_draw()
    objective = Objective(HEADS["dapo"], corrections=[("tis", {})], has_proximal=True)
    (terms,) = prepare(objective, [draw], num_tokens=99, num_sequences=12)
    penalty = blank(torch.rand(draw.mask.shape), draw.mask)
    plain = objective_loss(objective, draw.policy_logprobs, terms)
    both = objective_loss(objective, draw.policy_logprobs, terms, penalty=penalty)
    share = aggregate(penalty, draw.mask, mode="token-mean", num_tokens=99, num_sequences=12)
    assert (both - plain).item() == pytest.approx(share.item(), rel=1e-4)


def test_opob_without_norms_is_refused():
    draw = replace(make_draw(), score_square_norms=None)
    with pytest.raises(ValueError, match="squared norms"):
        prepare(OBJECTIVES["vcpo"], [draw], num_tokens=99, num_sequences=12)
