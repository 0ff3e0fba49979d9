"""What ranks cannot do is refused before anything starts."""

from __future__ import annotations

import re

import pytest

from pace_lightning.config import ConfigError
from pace_lightning.config_checks import check
from pace_lightning.config_load import load
from pace_lightning.config_ranks import message_timeout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.strategy=dpp"], "trainer.strategy is 'dpp'; did you mean 'ddp'?"),
        (["trainer.devices=0"], "trainer.devices is 0; it must be at least 1"),
        (["trainer.strategy=fsdp"], "there is one rank: nothing to shard"),
        (["trainer.devices=64"], "128 in all, but a step has only"),
        (["trainer.offload=optimizer"], "keeps everything on its device"),
        (
            ["trainer.offload=parameters", "trainer.strategy=deepspeed_stage_2"],
            "does not partition them",
        ),
        (
            ["loss.proximal=ewma", "trainer.strategy=deepspeed_stage_3", "trainer.devices=2"],
            "which keeps copies of whole weights",
        ),
        (["loss.proximal=interruption", "trainer.devices=2"], "whose scores are with rank 0"),
        (
            ["model.lora.rank=4", "trainer.strategy=fsdp", "trainer.devices=2"],
            "partitions weights, most of which are frozen",
        ),
        (
            ["model.fused_logprobs=true", "trainer.strategy=deepspeed_stage_3"],
            "takes the output head's weight",
        ),
    ],
)
def test_ranks_and_what_they_cannot_do_are_refused(settings, message):
    config = load("conf/quickstart.yaml", settings)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(config)


def test_ranks_wait_for_a_message_longer_than_rank_0_may_take():
    config = load("conf/quickstart.yaml", ["trainer.draw_timeout_seconds=5000"])
    assert message_timeout(config) > 5000
    config = load("conf/quickstart.yaml", ["eval.timeout_seconds=7000"])
    assert message_timeout(config) > 7000
