"""What the probe expects of an engine, and of the one that comes after it."""

import pytest
import torch

from pace_lightning.rollout.engine import WrongWeightsError
from pace_lightning.rollout.vllm_probe import Probe

OLD, NEW, LATER = [-1.0, -2.0], [-1.5, -2.5], [-9.0, -9.0]


def verified():
    """A probe after the publications of versions 1 and 2."""
    probe = Probe(100, 64, torch.float32)
    for version, scores in ((1, OLD), (2, NEW)):
        probe.expected = scores
        probe.check(scores, version)
    return probe


@pytest.mark.parametrize(("version", "scores"), [(1, OLD), (2, NEW)])
def test_a_restarted_engine_is_compared_with_what_was_true_of_the_weights_that_it_gets(
    version, scores
):
    probe = verified()
    probe.forget()
    probe.expected = LATER  # by the trainer, which has gone on
    probe.recall(version)
    probe.check(scores, version)
    probe.forget()
    probe.expected = LATER
    probe.recall(version)
    with pytest.raises(WrongWeightsError, match=f"version {version} did not arrive"):
        probe.check([-1.2, -2.2], version)


def test_while_an_engine_lives_the_trainer_has_the_last_word():
    probe = verified()
    probe.expected = LATER
    probe.recall(2)
    assert probe.expected == LATER


def test_of_weights_that_were_never_verified_nothing_is_known():
    probe = verified()
    probe.forget()
    probe.expected = LATER
    probe.recall(3)
    assert probe.expected == LATER
