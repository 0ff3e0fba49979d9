"""Liger's kernel, on a GPU: values and gradients are those of chunks of the vocabulary."""

import pytest
import torch

from pace_lightning.training.batch_logprobs import check_gpu_ways, liger_logprobs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_gradients_of_single_tokens_are_those_of_a_log_softmax(temperature):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    pytest.importorskip("liger_kernel")
    check_gpu_ways(pack_rows=False, fused=True)
    generator = torch.Generator("cuda").manual_seed(0)
    draw = {"generator": generator, "device": "cuda"}
    head = torch.nn.Linear(64, 1000, bias=False, device="cuda")
    hidden = torch.randn(37, 64, **draw).requires_grad_()
    targets = torch.randint(1000, (37,), **draw)
    weights = torch.randn(37, **draw)  # any loss: each token has a factor of its own
    found = []
    for way in (
        lambda: liger_logprobs(head, hidden, targets, temperature),
        lambda: (head(hidden) / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0],
    ):
        head.weight.grad = hidden.grad = None
        logprobs = way()
        (weights * logprobs).sum().backward()
        found.append([logprobs.detach(), head.weight.grad.clone(), hidden.grad.clone()])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
