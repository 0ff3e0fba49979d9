"""The stream loses no prompt and repeats none, also across a restore."""

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pace_lightning.tasks.prompts import EndOfData, PromptRow, PromptStream, tokenize_prompts

TINY = Path(__file__).parents[2] / "conf" / "models" / "tiny"


def rows(n):
    return [PromptRow((index, 7), f"prompt {index}", {"answer": str(index)}) for index in range(n)]


def stream(n=5, *, seed=0, epochs=None):
    return PromptStream(rows(n), seed=seed, epochs=epochs)


def lease(source, n):
    return [source.lease().uid for _ in range(n)]


def test_a_lease_carries_the_row_it_names():
    source = stream()
    for _ in range(10):
        prompt = source.lease()
        index = int(prompt.uid.split(":")[1])
        assert (prompt.token_ids, prompt.content) == ((index, 7), f"prompt {index}")
        assert prompt.columns == {"answer": str(index)}


def test_each_epoch_is_another_permutation_of_all_prompts():
    source = stream(20)
    first, second = lease(source, 20), lease(source, 20)
    assert sorted(first) == sorted(f"0:{index}" for index in range(20))
    assert sorted(second) == sorted(f"1:{index}" for index in range(20))
    assert [uid[2:] for uid in first] != [uid[2:] for uid in second]
    assert source.epoch == 1
    assert len(source) == 20


def test_the_order_depends_on_the_seed_and_not_on_the_process():
    assert lease(stream(20), 20) != lease(stream(20, seed=1), 20)
    # the order of `printf SEED:EPOCH:INDEX | sha256sum`, under every hash seed and Python version
    assert lease(stream(5), 7) == ["0:4", "0:1", "0:2", "0:3", "0:0", "1:3", "1:0"]


def test_the_epochs_end_with_a_named_event():
    source = stream(3, epochs=2)
    lease(source, 6)
    with pytest.raises(EndOfData, match="all 2 epochs of 3 prompts"):
        source.lease()


def test_a_prompt_is_settled_exactly_once():
    source = stream()
    uid = source.lease().uid
    assert source.num_outstanding == 1
    source.settle(uid)
    assert source.num_outstanding == 0
    with pytest.raises(ValueError, match=f"'{uid}' is not outstanding"):
        source.settle(uid)
    with pytest.raises(ValueError, match="'7:0' is not outstanding"):
        source.settle("7:0")


@given(
    n=st.integers(1, 6),
    leased=st.integers(0, 20),
    settled=st.sets(st.integers(0, 19)),
    again=st.integers(0, 20),
    more=st.integers(0, 15),
)
def test_a_restored_stream_leases_what_was_unsettled_first_and_loses_nothing(
    n, leased, settled, again, more
):
    source = stream(n)
    uids = lease(source, leased)
    done = [uid for position, uid in enumerate(uids) if position in settled]
    for uid in done:
        source.settle(uid)
    unsettled = [uid for uid in uids if uid not in done]

    # twice: a second interruption may come before everything has been leased again
    restored = stream(n)
    restored.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert restored.num_outstanding == len(unsettled)
    early = lease(restored, min(again, len(unsettled)))
    second = stream(n)
    second.load_state_dict(json.loads(json.dumps(restored.state_dict())))

    assert lease(second, len(unsettled)) == early + unsettled[len(early) :]
    continued = lease(second, more)
    assert Counter(done + unsettled + continued) == Counter(lease(stream(n), leased + more))


def test_a_restored_stream_respects_the_end_of_the_epochs():
    source = stream(2, epochs=1)
    uids = lease(source, 2)
    source.settle(uids[0])
    restored = stream(2, epochs=1)
    restored.load_state_dict(source.state_dict())
    assert lease(restored, 1) == uids[1:]
    with pytest.raises(EndOfData):
        restored.lease()


def test_a_state_of_other_data_or_another_seed_is_refused():
    source = stream(5)
    lease(source, 3)
    state = source.state_dict()
    with pytest.raises(ValueError, match="belongs to other prompts"):
        stream(6).load_state_dict(state)
    moved = PromptStream(rows(5)[::-1], seed=0)
    with pytest.raises(ValueError, match="belongs to other prompts"):
        moved.load_state_dict(state)
    with pytest.raises(ValueError, match="made with seed 0, here it is 1"):
        stream(5, seed=1).load_state_dict(state)


@pytest.mark.parametrize(
    "damage",
    [
        {"position": 9},
        {"epoch": -1},
        {"outstanding": ["0:4", "0:4"]},
        {"outstanding": ["0:9"]},
        {"outstanding": ["1:0"]},
        {"outstanding": ["nonsense"]},
        {"position": 0},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage):
    source = stream(5)
    uids = lease(source, 3)
    target = stream(5)
    with pytest.raises(ValueError, match="damaged"):
        target.load_state_dict({**source.state_dict(), **damage})
    assert lease(target, 3) == uids
    state = source.state_dict()
    del state["outstanding"]
    with pytest.raises(ValueError, match="lacks \\['outstanding'\\]"):
        target.load_state_dict(state)


def test_threads_never_share_a_lease():
    source = stream(7)
    barrier = threading.Barrier(8, timeout=20)
    seen = [[] for _ in range(8)]

    def work(mine):
        barrier.wait()
        for _ in range(100):
            uid = source.lease().uid
            mine.append(uid)
            source.settle(uid)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert Counter(uid for mine in seen for uid in mine) == Counter(lease(stream(7), 800))
    assert source.num_outstanding == 0


def test_an_empty_stream_or_no_epoch_is_refused():
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptStream([], seed=0)
    with pytest.raises(ValueError, match="epochs = 0"):
        stream(epochs=0)


def codes(content):
    text = content if isinstance(content, str) else "".join(m["content"] for m in content)
    return [ord(character) for character in text]


def tokenize(contents, *, template="{prompt}", max_prompt_tokens=8, overlong="refuse"):
    return tokenize_prompts(
        [{"prompt": content, "answer": "1", "level": 2} for content in contents],
        tokenizer_fn=codes,
        template=template,
        max_prompt_tokens=max_prompt_tokens,
        overlong=overlong,
    )


def test_the_template_wraps_what_the_model_sees_and_not_what_the_reward_sees():
    messages = [{"role": "user", "content": "b"}]
    (text, chat), skipped = tokenize(["a{x}", messages], template="<{}{prompt}>")
    assert text == (tuple(map(ord, "<{}a{x}>")), "a{x}", {"answer": "1", "level": 2})
    assert chat == ((ord("b"),), messages, {"answer": "1", "level": 2})
    assert skipped == 0


def test_overlong_prompts_are_refused_or_skipped_and_counted():
    contents = ["12345678", "123456789", "1", "1234567890"]
    complaint = r"2 of 4 prompts.*= 8 tokens.*prompt 2 \('123456789'\) with 9, the longest has 10"
    with pytest.raises(ValueError, match=complaint):
        tokenize(contents)
    kept, skipped = tokenize(contents, overlong="skip")
    assert [row.content for row in kept] == ["12345678", "1"]
    assert skipped == 2
    with pytest.raises(ValueError, match="leaves none"):
        tokenize(["123456789"], overlong="skip")


def test_what_would_give_wrong_prompts_is_refused():
    with pytest.raises(ValueError, match=r"does not contain '\{prompt\}'"):
        tokenize(["a"], template="{promt}")
    with pytest.raises(ValueError, match="overlong = 'drop'"):
        tokenize(["a"], overlong="drop")
    for wrong in ([], {"input_ids": [1]}, [[1]], None):
        with pytest.raises(ValueError, match="needed a non-empty list of token ids"):
            tokenize_prompts(
                [{"prompt": "a"}],
                tokenizer_fn=lambda _, wrong=wrong: wrong,
                template="{prompt}",
                max_prompt_tokens=8,
                overlong="refuse",
            )


@given(st.text([*map(chr, range(0x20, 0x7F)), "\n"]))
def test_the_tiny_tokenizer_has_one_token_per_character_and_gives_the_text_back(text):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    if not any(special in text for special in ("<pad>", "<bos>", "<eos>", "<unk>")):
        assert len(ids) == len(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_the_tiny_model_is_what_its_script_makes_and_transformers_reads_it(tmp_path):
    script = Path(__file__).parents[2] / "data" / "make_tiny_tokenizer.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in TINY.iterdir()}

    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    config = AutoConfig.from_pretrained(TINY)
    assert tokenizer.decode(tokenizer("1 + 2 = 3 ?")["input_ids"]) == "1 + 2 = 3 ?"
    assert len(tokenizer) == config.vocab_size
    assert tokenizer.pad_token_id == config.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.eos_token_id == config.eos_token_id
    assert config.head_dim == 32
