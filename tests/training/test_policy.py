"""The trainer's own view of a policy: log-probs, where models come from, the engine's copy."""

import asyncio
import functools
import json
import math
import shutil
import threading

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pace_lightning.core.logprobs import (
    packed_logprobs,
    shared_prompt_logprobs,
    token_logprobs,
)
from pace_lightning.rollout.engine import Sampling
from pace_lightning.rollout.local_engine import LocalEngine
from pace_lightning.training import batch_logprobs
from pace_lightning.training.batch_logprobs import check_gpu_ways
from pace_lightning.training.policy import (
    ModelError,
    copy_for_engine,
    load_policy,
    load_tokenizer,
    resolve,
    sequence_logprobs,
    weights_logprobs,
)

TINY = "conf/models/tiny"
VOCABULARY = 100


def make_model(scale=6.0, kind="llama"):
    """A tiny model with weights so large that tokens, and their order, matter to its output."""
    model = load_policy(TINY, random_init=True, seed=0)
    if kind != "llama":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        sizes |= experts if kind == "qwen3_moe" else {}
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, **sizes)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    return model


def make_rows(lengths, *, prompt=4, width=None, pad=0, seed=1):
    """Random rows, padded on the right, trained after the prompt."""
    generator = torch.Generator().manual_seed(seed)
    width = width or max(lengths)
    ids = torch.full((len(lengths), width), pad)
    attention, loss_mask = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(3, VOCABULARY, (length,), generator=generator)
        attention[row, :length] = 1
        loss_mask[row, prompt:length] = True
    return ids, attention, loss_mask


def full_distribution(model, ids, attention, temperature):
    """log pi of the whole vocabulary at each position, as if nothing had to be saved."""
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits
    return torch.log_softmax(logits / temperature, dim=-1)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# --- log-probs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_gradients_are_those_of_the_full_softmax(temperature):
    model = make_model()
    ids, attention, mask = make_rows([12, 9, 5])
    weights = torch.linspace(-1, 2, mask.numel()).view(mask.shape)

    ours, entropies = token_logprobs(model, ids, attention, mask, temperature=temperature)
    our_gradients = gradients(model, (ours * weights).sum())

    full = full_distribution(model, ids, attention, temperature)
    theirs = torch.zeros(mask.shape)
    their_entropies = torch.zeros(mask.shape)
    for row, position in mask.nonzero().tolist():
        before = full[row, position - 1]  # position t - 1 predicts token t
        theirs[row, position] = before[ids[row, position]]
        their_entropies[row, position] = -(before.exp() * before).sum()
    their_gradients = gradients(model, (theirs * weights).sum())

    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropies, their_entropies.detach(), atol=1e-5, rtol=1e-6)
    for name, gradient in our_gradients.items():
        scale = float(their_gradients[name].abs().max())
        assert scale > 0
        torch.testing.assert_close(gradient, their_gradients[name], atol=1e-6 * scale, rtol=1e-5)


def test_the_temperature_divides_the_logits():
    # with logits (2, 0) and T = 1/2: log pi(first) = -log(1 + exp(-4))
    model = make_model()
    ids, attention, mask = make_rows([6])
    logits = torch.full((VOCABULARY,), -torch.inf)
    logits[ids[0, 4]], logits[ids[0, 5]] = 2.0, 0.0

    class Head(torch.nn.Module):
        def forward(self, hidden):
            return logits.expand(len(hidden), VOCABULARY) + 0 * hidden.sum()

    model.set_output_embeddings(Head())
    logprobs, _ = token_logprobs(model, ids, attention, mask, temperature=0.5)
    assert logprobs[0, 4].item() == pytest.approx(-math.log1p(math.exp(-4)), abs=1e-6)
    assert logprobs[0, 5].item() == pytest.approx(-4 - math.log1p(math.exp(-4)), abs=1e-6)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 16, 1000])
def test_the_chunk_size_changes_nothing_but_the_last_digits(chunk_tokens):
    model = make_model()
    ids, attention, mask = make_rows([12, 9, 5])
    results = []
    for chunk in (4, chunk_tokens):
        logprobs, entropies = token_logprobs(model, ids, attention, mask, chunk_tokens=chunk)
        results.append((logprobs, entropies, gradients(model, logprobs.sum())))
    for (one, other), tolerance in zip(zip(*results, strict=True), (1e-6, 1e-5, None), strict=True):
        if tolerance is None:
            for name in one:
                scale = float(one[name].abs().max())
                torch.testing.assert_close(one[name], other[name], atol=1e-6 * scale, rtol=1e-5)
        else:
            torch.testing.assert_close(one, other, atol=tolerance, rtol=1e-6)


def test_padding_and_what_it_holds_change_values_by_rounding_only():
    model = make_model()
    alone = make_rows([9])
    padded = make_rows([9], width=20, pad=0)
    other_pad = make_rows([9], width=20, pad=57)
    with torch.no_grad():
        expected, entropies = token_logprobs(model, *alone)
        for rows in (padded, other_pad):
            logprobs, more_entropies = token_logprobs(model, *rows)
            torch.testing.assert_close(logprobs[:, :9], expected, atol=2e-6, rtol=1e-6)
            torch.testing.assert_close(more_entropies[:, :9], entropies, atol=1e-5, rtol=1e-6)
            assert not logprobs[:, 9:].any()


def test_everything_outside_the_mask_is_exactly_zero():
    ids, attention, mask = make_rows([12, 9, 5])
    mask[0, 6:9] = False  # a hole, as a tool's tokens leave
    logprobs, entropies = token_logprobs(make_model(), ids, attention, mask)
    assert not logprobs[~mask].any()
    assert not entropies[~mask].any()
    assert (logprobs[mask] < 0).all()
    assert (entropies[mask] > 0).all()
    assert not entropies.requires_grad


def test_no_token_sees_what_comes_after_it():
    model = make_model()
    ids, attention, mask = make_rows([12])
    changed = ids.clone()
    changed[0, 9:] = (changed[0, 9:] + 11) % VOCABULARY
    with torch.no_grad():
        before, _ = token_logprobs(model, ids, attention, mask)
        after, _ = token_logprobs(model, changed, attention, mask)
    torch.testing.assert_close(before[:, :9], after[:, :9], atol=1e-6, rtol=1e-6)
    assert (before[:, 9:] - after[:, 9:]).abs().min() > 1e-3


def test_a_mask_at_the_first_position_is_refused():
    ids, attention, mask = make_rows([6, 6])
    mask[1, 0] = True
    with pytest.raises(ValueError, match="position 0"):
        token_logprobs(make_model(), ids, attention, mask)


def test_an_empty_mask_gives_zeros_with_zero_gradients():
    model = make_model()
    ids, attention, mask = make_rows([5], prompt=5)
    assert not mask.any()
    logprobs, entropies = token_logprobs(model, ids, attention, mask)
    assert not logprobs.any()
    assert not entropies.any()
    assert all(not gradient.any() for gradient in gradients(model, logprobs.sum()).values())


# --- the same, with each prompt computed once -----------------------------------------------------


def make_groups(prompts, lengths, *, seed=2):
    """Rows of prompt, response of this many tokens, padding; a response may be empty."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        [*prompt, *torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()]
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    attention = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    mask = attention.bool() & (torch.arange(width) >= prompt_lengths[:, None])
    return ids, attention, mask, prompt_lengths


SHORT, LONG, PADDED, ONE = [5, 6], [9, 8, 7, 6, 5, 4], [5, 6, 0], [5]


KINDS = ("llama", "qwen3", "qwen3_moe")


def assert_equal_scores(model, ways, weights, *, gradient_tolerance=3e-6):
    """Log-probs, statistics and gradients of two ways to compute them."""
    results = []
    for way in ways:
        logprobs, entropies = way()
        results.append((logprobs, entropies, gradients(model, (logprobs * weights).sum())))
    (plain, entropies, plain_gradients), (other, more_entropies, other_gradients) = results
    torch.testing.assert_close(other, plain, atol=5e-6, rtol=1e-6)
    torch.testing.assert_close(more_entropies, entropies, atol=2e-5, rtol=1e-6)
    for name, gradient in plain_gradients.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            other_gradients[name], gradient, atol=gradient_tolerance * scale, rtol=1e-4
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("prompts", "lengths"),
    [
        ([LONG] * 4, [7, 3, 1, 5]),
        ([SHORT, LONG, SHORT, LONG], [7, 1, 2, 9]),
        ([SHORT, PADDED, ONE, SHORT], [3, 3, 4, 1]),  # equal but for tokens that look like padding
        ([LONG, SHORT], [1, 1]),
        ([LONG, SHORT, [0, 0]], [4, 2, 0]),  # the last is a zero-weight row
        ([LONG], [12]),
    ],
)
def test_shared_prompts_change_neither_values_nor_gradients(prompts, lengths, temperature, kind):
    model = make_model(kind=kind, scale=6.0 if kind == "llama" else 3.0)
    ids, attention, mask, prompt_lengths = make_groups(prompts, lengths)
    weights = torch.linspace(-1, 2, mask.numel()).view(mask.shape)
    settings = {"temperature": temperature, "chunk_tokens": 5}
    ways = (
        lambda: token_logprobs(model, ids, attention, mask, **settings),
        lambda: shared_prompt_logprobs(model, ids, attention, mask, prompt_lengths, **settings),
    )
    assert_equal_scores(model, ways, weights)


def test_shared_prompts_leave_holes_in_the_mask_alone():
    model = make_model()
    ids, attention, mask, prompt_lengths = make_groups([LONG, LONG, SHORT], [6, 8, 5])
    mask[0, 7:9], mask[1], mask[2, 2] = False, False, False
    plain, _ = token_logprobs(model, ids, attention, mask)
    shared, _ = shared_prompt_logprobs(model, ids, attention, mask, prompt_lengths)
    torch.testing.assert_close(shared, plain, atol=5e-6, rtol=1e-6)
    assert not shared[~mask].any()


def test_a_mask_that_covers_a_prompt_cannot_share_it():
    ids, attention, mask, prompt_lengths = make_groups([LONG, LONG], [3, 3])
    mask[1, 5] = True
    with pytest.raises(ValueError, match="covers prompt tokens"):
        shared_prompt_logprobs(make_model(), ids, attention, mask, prompt_lengths)


def test_a_micro_batch_without_responses_gives_zeros_with_zero_gradients():
    model = make_model()
    ids, attention, mask, prompt_lengths = make_groups([[0, 0], [0, 0]], [0, 0])
    logprobs, _ = shared_prompt_logprobs(model, ids, attention, mask, prompt_lengths)
    assert not logprobs.any()
    assert all(not gradient.any() for gradient in gradients(model, logprobs.sum()).values())


def calls_of(model, compute):
    """How often the layers and the output head are called, forward and back."""
    counts = {"layers": 0, "head": 0}

    def count(name):
        def hook(*_):
            counts[name] += 1

        return hook

    handles = [
        model.model.layers[0].register_forward_pre_hook(count("layers")),
        model.get_output_embeddings().register_forward_pre_hook(count("head")),
    ]
    compute()[0].sum().backward()
    for handle in handles:
        handle.remove()
    return counts


@pytest.mark.parametrize("lengths", [[0, 0, 0], [1, 1, 1], [3, 9, 4]])
def test_ranks_that_share_a_model_call_its_parts_equally_often_whatever_their_rows_are(lengths):
    model = make_model()
    ids, attention, mask, prompt_lengths = make_groups([LONG, LONG, [5, 6]], lengths)
    settings = {"chunk_tokens": 4, "peer_tokens": 16}
    assert int(mask.sum()) <= 16
    shared = calls_of(
        model,
        lambda: shared_prompt_logprobs(model, ids, attention, mask, prompt_lengths, **settings),
    )
    # prompts, then responses; 4 chunks, computed again in the backward pass
    assert shared == {"layers": 2, "head": 8}
    plain = calls_of(model, lambda: token_logprobs(model, ids, attention, mask, **settings))
    assert plain == {"layers": 1, "head": 8}


# --- packed rows, and kernels ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[12, 9, 5, 6], [7], [5, 5]])
def test_packed_rows_change_neither_values_nor_gradients(lengths, kind):
    model = make_model(kind=kind, scale=6.0 if kind == "llama" else 3.0)
    ids, attention, mask = make_rows(lengths)
    weights = torch.linspace(-1, 2, mask.numel()).view(mask.shape)
    settings = {"temperature": 0.7, "chunk_tokens": 5}
    ways = (
        lambda: token_logprobs(model, ids, attention, mask, **settings),
        lambda: packed_logprobs(model, ids, attention, mask, **settings),
    )
    assert_equal_scores(model, ways, weights)


def test_packed_rows_do_not_see_each_other():
    model = make_model()
    ids, attention, mask = make_rows([12, 9])
    changed = ids.clone()
    changed[0] = (changed[0] + 11) % VOCABULARY
    with torch.no_grad():
        before, _ = packed_logprobs(model, ids, attention, mask)
        after, _ = packed_logprobs(model, changed, attention, mask)
    torch.testing.assert_close(before[1], after[1], atol=1e-6, rtol=1e-6)
    assert (before[0] - after[0])[mask[0]].abs().min() > 1e-3
    with pytest.raises(ValueError, match="position 0"):
        packed_logprobs(model, ids, attention, torch.ones_like(mask))


def test_a_kernel_for_the_log_probs_leaves_values_gradients_and_statistics_as_they_are():
    def kernel(head, hidden, targets, temperature):
        logits = torch.nn.functional.linear(hidden / temperature, head.weight)
        return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")

    model = make_model()
    ids, attention, mask, prompt_lengths = make_groups([SHORT, SHORT, LONG], [4, 7, 2])
    weights = torch.linspace(-1, 2, mask.numel()).view(mask.shape)
    settings = {"temperature": 0.7, "chunk_tokens": 5}
    for compute in (
        token_logprobs,
        packed_logprobs,
        functools.partial(shared_prompt_logprobs, prompt_lengths=prompt_lengths),
    ):
        ways = (
            lambda compute=compute: compute(model, ids, attention, mask, **settings),
            lambda compute=compute: compute(model, ids, attention, mask, **settings, fused=kernel),
        )
        assert_equal_scores(model, ways, weights)
    nothing, _ = token_logprobs(model, ids, attention, mask & False, fused=kernel)
    assert not nothing.any()


def test_ways_that_need_a_gpu_or_a_package_are_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_gpu_ways(pack_rows=False, fused=False)
    with pytest.raises(ModelError, match=r"model.pack_rows is true, which needs an NVIDIA GPU"):
        check_gpu_ways(pack_rows=True, fused=True)
    with pytest.raises(ModelError, match=r"model.fused_logprobs is true, which needs"):
        check_gpu_ways(pack_rows=False, fused=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for version, problem in ((None, "not installed"), ("0.8.4", "here in version 0.8.4")):
        monkeypatch.setattr(batch_logprobs, "_version", lambda _, version=version: version)
        with pytest.raises(ModelError, match=f"{problem}; `pip install 'liger-kernel>=0.8.5'`"):
            check_gpu_ways(pack_rows=False, fused=True)
    monkeypatch.setattr(batch_logprobs, "_version", lambda _: "0.10.0")
    check_gpu_ways(pack_rows=False, fused=True)


# --- where models and tokenizers come from --------------------------------------------------------


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package on the path that must not be imported to be found."""
    package = tmp_path / "weights_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    return package


def test_a_file_inside_a_package_is_found_without_importing_it(installed):
    assert resolve("package:weights_package/model.gguf") == installed / "model.gguf"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("package:no_such_package/model.gguf", "'no_such_package' is not installed"),
        ("package:weights_package/other.gguf", "other.gguf does not exist"),
        ("package:/model.gguf", "'' is not installed"),
        ("package:json/model.gguf", "model.gguf does not exist"),
        ("./nowhere", "'./nowhere' does not exist"),
        ("/nowhere/at/all", "does not exist"),
        ("~/nowhere/at/all", "does not exist"),
        ("models/nowhere/at-all", "does not exist"),
        ("nowhere.gguf", "does not exist"),
    ],
)
def test_a_named_package_or_file_that_is_missing_is_refused_by_name(installed, path, message):
    with pytest.raises(ModelError, match=message):
        resolve(path)


def test_a_hub_id_is_passed_on_and_a_local_directory_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/some-model") == "owner/some-model"
    (tmp_path / "owner" / "some-model").mkdir(parents=True)
    assert resolve("owner/some-model").samefile(tmp_path / "owner" / "some-model")


def test_a_file_that_is_not_gguf_is_refused():
    with pytest.raises(ModelError, match="give the directory that holds it"):
        load_policy(f"{TINY}/config.json", random_init=True)


def test_a_directory_without_weights_is_refused_unless_they_are_random():
    with pytest.raises(ModelError, match="no model could be loaded"):
        load_policy(TINY)


def test_random_weights_follow_from_their_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = load_policy(TINY, random_init=True, seed=3).state_dict()
    assert torch.equal(torch.rand(3), expected)
    again = load_policy(TINY, random_init=True, seed=3).state_dict()
    other = load_policy(TINY, random_init=True, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_the_policy_has_no_dropout_and_the_tokenizer_pads_on_the_right():
    assert not load_policy(TINY, random_init=True).training
    tokenizer = load_tokenizer(TINY)
    assert tokenizer.padding_side == "right"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)


@pytest.mark.parametrize("without", [("pad_token", "eos_token"), ("eos_token",), ("pad_token",)])
def test_a_tokenizer_without_an_end_is_refused_and_one_without_padding_pads_with_the_end(
    tmp_path, without
):
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for name in without:
        del settings[name]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if "eos_token" in without:
        with pytest.raises(ModelError, match="no end-of-sequence token"):
            load_tokenizer(str(tmp_path))
    else:
        tokenizer = load_tokenizer(str(tmp_path))
        assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    shutil.copy(f"{TINY}/config.json", tmp_path)
    with pytest.raises(ModelError, match="no tokenizer could be loaded"):
        load_tokenizer(str(tmp_path))


# --- the engine's copy ----------------------------------------------------------------------------


def test_the_copy_shares_neither_memory_nor_configuration():
    model = make_model()
    twin = copy_for_engine(model, torch.float32)
    own = dict(twin.named_parameters())
    assert own.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(own[name], parameter)
        assert own[name].data_ptr() != parameter.data_ptr()
        assert not own[name].requires_grad
    configs = {id(module.config) for module in model.modules() if hasattr(module, "config")}
    assert not configs & {
        id(module.config) for module in twin.modules() if hasattr(module, "config")
    }
    assert not twin.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_copy_has_the_dtype_that_was_asked_for():
    model = make_model()
    twin = copy_for_engine(model, torch.bfloat16)
    assert {parameter.dtype for parameter in twin.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_generation_in_a_thread_does_not_change_what_the_trainer_computes():
    # Continuous batching writes is_causal=False into the configuration of its model during each
    # forward: a shared configuration makes the trainer's forward attend to the future meanwhile.
    model = make_model()
    ids, attention, mask = make_rows([40, 40, 40, 40])
    with torch.no_grad():
        expected, _ = token_logprobs(model, ids, attention, mask)
    engine = LocalEngine(
        copy_for_engine(model, torch.float32),
        stop_token_ids=[VOCABULARY],  # never: it keeps generating
        pad_token_id=0,
        max_sequence_tokens=256,
    )
    generating, stop, errors = threading.Event(), threading.Event(), []

    async def generate():
        try:
            await engine.start(lambda: 0)
            while not stop.is_set():
                request = asyncio.ensure_future(
                    engine.generate([5, 6, 7], n=8, sampling=Sampling(max_new_tokens=240))
                )
                while not request.done():
                    if engine.num_tokens_generated:
                        generating.set()
                    if stop.is_set():
                        request.cancel()
                    await asyncio.wait([request], timeout=0.05)
        except BaseException as error:
            errors.append(error)
        finally:
            await engine.close()

    thread = threading.Thread(target=lambda: asyncio.run(generate()))
    thread.start()
    try:
        assert generating.wait(60)
        before = engine.num_tokens_generated
        worst = 0.0
        with torch.no_grad():
            for _ in range(150):
                logprobs, _ = token_logprobs(model, ids, attention, mask)
                worst = max(worst, float((logprobs - expected).abs().max()))
        assert engine.num_tokens_generated > before, "nothing was generated meanwhile"
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    assert not errors
    assert worst < 1e-5


def test_weights_without_a_model_give_the_log_probs_of_the_model_that_has_them():
    model, tokens = make_model(), list(range(3, 40))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert weights_logprobs(model.config, tokens, weights) == sequence_logprobs(model, tokens)
    changed = weights | {"model.norm.weight": weights["model.norm.weight"] * 1.5}
    assert weights_logprobs(model.config, tokens, changed) != sequence_logprobs(model, tokens)
