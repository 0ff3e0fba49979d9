"""One advantage per response of a draw, by every name."""

import math

import pytest
import torch

from pace_lightning.core.advantages import ADVANTAGES, group_advantages
from pace_lightning.core.draw_advantages import DRAW_ADVANTAGES, draw_advantages

REWARDS = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]]
LENGTHS = [[1, 2, 3, 4], [2, 2, 0, 1]]


@pytest.mark.parametrize("method", sorted(ADVANTAGES))
def test_those_of_a_group_look_at_nothing_else(method):
    found = draw_advantages(REWARDS, LENGTHS, method=method, std_ddof=0)
    for rewards, advantages in zip(REWARDS, found, strict=True):
        expected = group_advantages(torch.tensor(rewards), method=method, std_ddof=0)
        assert advantages == expected.tolist()


def test_opo_weighs_by_trained_tokens():
    # group 1: b = 1 / 10; group 2: b = (2 + 2 + 0 + 1) / 5 = 1, the untrained response too
    found = draw_advantages(REWARDS, LENGTHS, method="opo")
    assert found[0] == pytest.approx([0.9, -0.1, -0.1, -0.1])
    assert found[1] == pytest.approx([0.0, 0.0, -1.0, 0.0])
    assert draw_advantages([[1.0, 0.0]], [[0, 0]], method="opo") == [[0.0, 0.0]]


def test_reinforce_plus_plus_whitens_over_the_tokens_of_the_draw():
    # tokens of reward 1: 1 + 2 + 2 + 1 = 6, of reward 0: 2 + 3 + 4 = 9; mean 0.4, variance
    # (6 * 0.36 + 9 * 0.16) / 14 = 0.2571428...
    scale = math.sqrt(3.6 / 14 + 1e-8)
    found = draw_advantages(REWARDS, LENGTHS, method="reinforce_plus_plus")
    for rewards, advantages in zip(REWARDS, found, strict=True):
        assert advantages == pytest.approx([(r - 0.4) / scale for r in rewards], rel=1e-6)


def test_reinforce_plus_plus_baseline_subtracts_the_mean_of_the_group_first():
    # centered 0.75 (1 token), -0.25 (9); 0.25 (5 tokens), -0.75 (none); sum 0.75 - 2.25 + 1.25
    values = [0.75] + [-0.25] * 9 + [0.25] * 5
    mean = sum(values) / 15
    scale = math.sqrt(sum((v - mean) ** 2 for v in values) / 14 + 1e-8)
    found = draw_advantages(REWARDS, LENGTHS, method="reinforce_plus_plus_baseline")
    assert found[0][0] == pytest.approx((0.75 - mean) / scale, rel=1e-6)
    assert found[0][1] == pytest.approx((-0.25 - mean) / scale, rel=1e-6)
    assert found[1][0] == pytest.approx((0.25 - mean) / scale, rel=1e-6)


def test_opob_is_left_to_who_has_log_probs():
    assert all(math.isnan(a) for group in draw_advantages(REWARDS, LENGTHS, method="opob")
               for a in group)  # fmt: skip


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="unknown advantage 'gae'"):
        draw_advantages(REWARDS, LENGTHS, method="gae")
    assert "opob" in DRAW_ADVANTAGES
