"""A supervised run whose result is cached by what went into it."""

import json
import random

import pytest
import torch

from pace_lightning.core.logprobs import token_logprobs
from pace_lightning.training import warm_start as module
from pace_lightning.training.policy import ModelError, load_policy, load_tokenizer
from pace_lightning.training.warm_start import MARKER, _batches, _collate, warm_start

TINY = "conf/models/tiny"


def make_examples(count=40, seed=0):
    draw = random.Random(seed)
    examples = []
    for _ in range(count):
        word = [draw.randrange(40, 60) for _ in range(draw.randrange(1, 9))]
        examples.append((word, [*reversed(word), 2]))
    return examples


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PACE_LIGHTNING_CACHE", str(tmp_path))
    return tmp_path


def run(examples, **changes):
    lines = []
    settings = {
        "tokenizer": load_tokenizer(TINY),
        "steps": 12,
        "batch_size": 8,
        "learning_rate": 1e-2,
        "seed": 0,
        "random_init": True,
        "attention": "sdpa",
        "num_threads": 1,
        "emit": lines.append,
    }
    return warm_start(TINY, examples, **(settings | changes)), lines


def loss_of(model, examples):
    parts = _collate(examples)
    with torch.no_grad():
        return -torch.cat([token_logprobs(model, *p)[0][p[2]] for p in parts]).mean().item()


def test_the_result_has_learned_and_loads_like_any_model(cache):
    examples = make_examples()
    directory, lines = run(examples, steps=30)
    before = loss_of(load_policy(TINY, random_init=True), examples)
    after = loss_of(load_policy(str(directory)), examples)
    assert after < 0.8 * before
    assert load_tokenizer(str(directory)).eos_token_id == 2
    report = json.loads((directory / MARKER).read_text())
    assert report["steps"] == 30
    assert report["loss_nats_per_token"] == pytest.approx(after, rel=0.3)
    assert "once" in lines[0]


def test_it_is_made_once_for_the_same_content(cache, monkeypatch):
    first, _ = run(make_examples())
    monkeypatch.setattr(module, "_train", lambda *_: pytest.fail("trained again"))
    second, lines = run(make_examples())
    assert second == first
    assert "from the cache" in lines[0]


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"steps": 13}, {"learning_rate": 2e-2}, {"batch_size": 4}]
)
def test_other_settings_are_another_model(cache, change):
    assert run(make_examples())[0] != run(make_examples(), **change)[0]


def test_other_examples_are_another_model(cache):
    assert run(make_examples())[0] != run(make_examples(seed=1))[0]


def test_two_equal_runs_give_equal_weights(cache, tmp_path, monkeypatch):
    first, _ = run(make_examples())
    monkeypatch.setenv("PACE_LIGHTNING_CACHE", str(tmp_path / "other"))
    second, _ = run(make_examples())
    one, other = (load_policy(str(d)).state_dict() for d in (first, second))
    assert first != second
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_fails_leaves_nothing_in_the_cache(cache):
    with pytest.raises(ModelError, match=r"lower model\.warm_start\.learning_rate"):
        run(make_examples(), learning_rate=1e30, steps=20)
    assert not list(cache.rglob(MARKER))
    assert not list(cache.rglob("*.safetensors"))


def test_only_completions_are_learned():
    prompt, completion = [41, 42, 43], [44, 45, 2]
    ((input_ids, attention_mask, loss_mask),) = _collate([(prompt, completion)])
    assert input_ids.tolist() == [[41, 42, 43, 44, 45, 2]]
    assert attention_mask.tolist() == [[1] * 6]
    assert loss_mask.tolist() == [[False] * 3 + [True] * 3]


def test_parts_of_a_batch_hold_each_example_once_and_pad_less():
    examples = make_examples(32)
    parts = _collate(examples)
    rows = [
        input_ids[row][attention_mask[row] == 1].tolist()
        for input_ids, attention_mask, _ in parts
        for row in range(len(input_ids))
    ]
    assert sorted(rows) == sorted([*prompt, *completion] for prompt, completion in examples)
    together = max(len(row) for row in rows) * len(rows)
    assert sum(part[0].numel() for part in parts) < together


def test_batches_go_through_all_examples_before_any_repeats():
    examples = make_examples(20)
    order = [e for batch in _batches(examples, 5, 8, seed=3) for e in batch]
    assert len(order) == 40
    for half in (order[:20], order[20:]):
        assert sorted(half) == sorted(examples)
    assert order[:20] != order[20:]
