"""The ratio on tokens of the present version is 1, or the run ends before its first step."""

import copy
from types import SimpleNamespace

import pytest
import torch

from pace_lightning.training.module import PolicyModule
from pace_lightning.training.on_policy_check import OnPolicyCheck, OnPolicyError, max_lag0_gap

F32, BF16 = torch.float32, torch.bfloat16


class Module(PolicyModule):
    """Says what a test wants it to have measured."""

    def __init__(self, *gaps):
        self._gaps = list(gaps)

    @property
    def lag0_gap(self):
        return self._gaps.pop(0)


def steps(check, *gaps, first_version=0):
    """So many optimizer steps."""
    module = Module(*gaps)
    for version, _ in enumerate(gaps, start=first_version):
        check.on_before_optimizer_step(SimpleNamespace(global_step=version), module, None)


def test_twice_the_alarm_is_tolerated_and_no_more():
    steps(OnPolicyCheck(0.1, 1.0), 0.2)
    with pytest.raises(
        OnPolicyError, match=r"step 0: .* disagree by 0\.2010 nats .* at most 0\.2\."
    ):
        steps(OnPolicyCheck(0.1, 1.0), 0.201)
    with pytest.raises(OnPolicyError, match=r"temperature 0\.7"):
        steps(OnPolicyCheck(0.1, 0.7), float("nan"))


def test_it_looks_at_the_first_draw_that_has_such_tokens_and_at_no_other():
    check = OnPolicyCheck(0.1, 1.0)
    steps(check, None, None, first_version=7)
    with pytest.raises(OnPolicyError, match="step 9"):
        steps(copy.copy(check), 1.0, first_version=9)
    steps(check, 0.1, 1.0, first_version=9)


def test_where_keys_and_values_are_kept_it_looks_before_the_first_publication_only():
    steps(OnPolicyCheck(0.1, 1.0, only_at_the_beginning=True), None, 1.0)
    with pytest.raises(OnPolicyError):
        steps(OnPolicyCheck(0.1, 1.0, only_at_the_beginning=True), 1.0)


@pytest.mark.parametrize(
    ("dtypes", "temperature", "gap"),
    [
        ((F32, F32), 1.0, 1e-3),
        ((F32, BF16), 1.0, 0.1),
        ((BF16, F32), 2.0, 0.1),
        ((F32, F32), 0.5, 2e-3),
    ],
)
def test_the_tolerance_is_that_of_the_coarser_side_and_of_the_temperature(dtypes, temperature, gap):
    assert max_lag0_gap(dtypes, temperature=temperature) == pytest.approx(gap)
