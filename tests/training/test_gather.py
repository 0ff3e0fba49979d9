"""Which parameters are gathered together, whoever holds them."""

from __future__ import annotations

import pytest
import torch
from module_cases import make_policy
from torch import nn

from pace_lightning.training.gather import buckets, gather_weights, num_elements


def partitioned(elements: int) -> nn.Parameter:
    """As ZeRO-3 leaves one behind: nothing in it, and what it was."""
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_numel = elements  # type: ignore[attr-defined]
    return parameter


def test_sizes_are_those_of_whole_parameters() -> None:
    assert num_elements(partitioned(12)) == 12
    assert num_elements(nn.Parameter(torch.zeros(3, 4))) == 12


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (40, [["a", "b"], ["c"], ["d"]]),  # 4 bytes an element: 16 + 24, 48 alone, 4
        (52, [["a", "b"], ["c", "d"]]),
        (1, [["a"], ["b"], ["c"], ["d"]]),
        (1000, [["a", "b", "c", "d"]]),
    ],
)
def test_neighbors_share_a_bucket_up_to_its_size(limit: int, expected: list[list[str]]) -> None:
    named = [(n, partitioned(e)) for n, e in (("a", 4), ("b", 6), ("c", 12), ("d", 1))]
    assert [[name for name, _ in bucket] for bucket in buckets(named, limit)] == expected


def test_whole_weights_are_views() -> None:
    policy = make_policy()
    weights = gather_weights(policy, keep=True)
    for name, parameter in policy.named_parameters():
        assert weights[name].data_ptr() == parameter.data_ptr()
