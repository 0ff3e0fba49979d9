"""Configs, checkpoints, models and data from strangers: no code in them runs.

What cannot be used is refused with a message that names it.
"""

import contextlib
import copy
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine, make_group

from pace_lightning.compare.grid import read_comparison
from pace_lightning.config import ConfigError
from pace_lightning.config_load import load
from pace_lightning.core.admission import AdmitAll
from pace_lightning.core.dispatch import FixedSlots
from pace_lightning.core.pace import Pace, PrefixRescore, RejectionBudget
from pace_lightning.core.trajectory import Fate
from pace_lightning.rollout.engine import PartialResponse, Sampling
from pace_lightning.rollout.rollouts import Rollout
from pace_lightning.run import _newest_checkpoint
from pace_lightning.tasks.prompts import PromptRow, PromptStream
from pace_lightning.tasks.sources import load_rows, normalize_rows, split_held_out
from pace_lightning.training.datamodule import RolloutDataModule
from pace_lightning.training.policy import ModelError, load_policy, load_tokenizer

ROOT = Path(__file__).parents[1]
TINY_MODEL = ROOT / "conf" / "models" / "tiny"


class Bomb:
    """An object whose unpickling makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def trap(tmp_path):
    """What must not come into being."""
    path = tmp_path / "code_was_run"
    yield path
    assert not path.exists(), "code from a file was run"


# --- code ---


def test_the_trap_works(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "code_was_run")))
    assert (tmp_path / "code_was_run").exists()


def test_a_checkpoint_with_code_is_not_run_and_the_one_before_it_is_used(tmp_path, trap):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    whole = {"global_step": 1, "config": "name: x", "state_dict": {}}
    torch.save(whole, folder / "version-1.ckpt")
    torch.save({**whole, "callbacks": Bomb(trap)}, folder / "version-2.ckpt")
    (folder / "version-3.ckpt").write_bytes(pickle.dumps(Bomb(trap)))
    (folder / "version-4.ckpt").mkdir()  # as of several ranks, but emptied
    said = []
    assert _newest_checkpoint(tmp_path / "run", said.append) == (
        folder / "version-1.ckpt",
        1,
        "name: x",
    )
    assert [line.split(" cannot be read")[0] for line in said] == [
        str(folder / "version-4.ckpt"),
        str(folder / "version-3.ckpt"),
        str(folder / "version-2.ckpt"),
    ]
    (folder / "version-1.ckpt").unlink()
    with pytest.raises(ConfigError, match="none of the 3 checkpoints"):
        _newest_checkpoint(tmp_path / "run", said.append)


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir"])
def test_yaml_tags_are_not_run(tmp_path, trap, tag):
    file = tmp_path / "run.yaml"
    file.write_text(f'name: {tag} ["{trap}"]\n')
    with pytest.raises(ConfigError, match=r"run\.yaml, line 1: not valid YAML"):
        load(file)
    with pytest.raises(ConfigError, match=r"run\.yaml, line 1: not valid YAML"):
        read_comparison(file, fingerprint=lambda _: {})
    good = tmp_path / "good.yaml"
    good.write_text("name: x\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load(good, [f'name={tag} ["{trap}"]'])


@pytest.fixture
def model(tmp_path):
    """A directory with the tiny model, to be tampered with."""
    target = tmp_path / "model"
    target.mkdir()
    for file in TINY_MODEL.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_pickled_weights_are_read_as_weights_only(model, trap):
    policy = load_policy(str(model), random_init=True, seed=1)
    policy.save_pretrained(model)
    (model / "model.safetensors").unlink()
    torch.save(policy.state_dict(), model / "pytorch_model.bin")
    again = load_policy(str(model)).state_dict()
    assert all(torch.equal(again[name], value) for name, value in policy.state_dict().items())
    torch.save({**policy.state_dict(), "x": Bomb(trap)}, model / "pytorch_model.bin")
    with pytest.raises(ModelError, match="no model could be loaded from"):
        load_policy(str(model))


def test_code_in_a_model_directory_is_not_run(model, trap):
    (model / "own_model.py").write_text(f"import os\nos.mkdir({str(trap)!r})\n")
    config = json.loads((model / "config.json").read_text())
    config["model_type"] = "own_model"
    config["auto_map"] = {
        "AutoConfig": "own_model.OwnConfig",
        "AutoModelForCausalLM": "own_model.OwnModel",
    }
    (model / "config.json").write_text(json.dumps(config))
    for load_it in (
        lambda: load_policy(str(model)),
        lambda: load_policy(str(model), random_init=True),
    ):
        with pytest.raises(ModelError, match="no model could be loaded from"):
            load_it()
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": ["own_model.OwnTokenizer", None]}
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with contextlib.suppress(ModelError):  # it has a class of its own for the files that are there
        load_tokenizer(str(model))


def test_a_data_set_that_is_a_script_is_not_run(tmp_path, trap, monkeypatch):
    folder = tmp_path / "owner" / "scripted"
    folder.mkdir(parents=True)
    (folder / "scripted.py").write_text(f"import os\nos.mkdir({str(trap)!r})\n")
    monkeypatch.chdir(tmp_path)
    for options in ({}, {"trust_remote_code": True}):
        with pytest.raises(ValueError, match="cannot load 'owner/scripted'"):
            load_rows("owner/scripted", options=options)


# --- comparisons ---

KEYS = ["name", "title", "seeds", "set", "arms", "baseline", "columns", "early_versions", "conf"]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["conf/smoke.yaml", "trainer.steps=3", "$" + "{seed}", "a", "???"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(KEYS) | SCALARS, inner, max_size=3),
    ),
    max_leaves=8,
)
COMPARISON = {
    "name": "x",
    "title": "x",
    "seeds": [0, 1],
    "arms": {"a": {"conf": "conf/smoke.yaml"}, "b": {"conf": "conf/smoke.yaml", "set": ["seed=2"]}},
}


@settings(deadline=None, max_examples=60)
@given(st.one_of(st.binary(max_size=40), VALUES, st.tuples(st.sampled_from(KEYS), VALUES)))
def test_any_comparison_is_read_or_refused_with_its_name(tmp_path_factory, content):
    file = tmp_path_factory.mktemp("fuzz") / "fuzz.yaml"
    if isinstance(content, tuple):
        content = {**COMPARISON, content[0]: content[1]}
    file.write_bytes(content if isinstance(content, bytes) else yaml.dump(content).encode())
    with pytest.raises(ConfigError, match=r"fuzz\.yaml"):  # no arm's file is there
        read_comparison(file, fingerprint=lambda _: {})


# --- data ---

JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.just(10**400),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(["\ud800", "\x00", "", " ", "\ufeff"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3),
    ),
    max_leaves=6,
)


def read_or_refuse(path):
    """The rows of a file in the one schema, or the message that refused it."""
    refusal = ""
    try:
        rows = normalize_rows(
            load_rows(str(path)), prompt_column="prompt", answer_column="answer", source=str(path)
        )
        split_held_out(rows, num_held_out=0, seed=0)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert str(path) in refusal, f"the message does not name the file: {refusal}"
        return refusal
    for row in rows:
        assert row["prompt"]
        assert isinstance(row["answer"], str)
        json.dumps(row["prompt"], ensure_ascii=False).encode()
        row["answer"].encode()
    return rows


@settings(deadline=None, max_examples=150)
@given(prompt=JSON, answer=JSON, extra=JSON)
def test_any_json_row_is_used_or_refused_with_its_place(tmp_path_factory, prompt, answer, extra):
    path = tmp_path_factory.mktemp("fuzz") / "rows.jsonl"
    rows = [{"prompt": "p", "answer": "1"}, {"prompt": prompt, "answer": answer, "x": extra}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    found = read_or_refuse(path)
    assert not isinstance(found, str) or f"{path}, row 2" in found or f"{path}, line 2" in found


@settings(deadline=None, max_examples=100)
@given(junk=st.binary(max_size=20), position=st.integers(0, 60))
def test_any_bytes_in_a_jsonl_file_are_used_or_refused(tmp_path_factory, junk, position):
    path = tmp_path_factory.mktemp("fuzz") / "rows.jsonl"
    good = b'{"prompt": "p", "answer": "1"}\n' * 2
    path.write_bytes(good[:position] + junk + good[position:])
    read_or_refuse(path)


def test_endless_nesting_is_refused_with_the_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "answer": "1"}\n' + "[" * 200_000)
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2"):
        load_rows(str(path))


def test_text_that_no_tokenizer_can_read_is_refused_with_the_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    for column, other in (("prompt", "answer"), ("answer", "prompt")):
        path.write_text(json.dumps({column: "1\ud800", other: "1"}))
        message = read_or_refuse(path)
        assert f"row 1: the {column} is" in message
        assert "half a surrogate pair" in message


def test_a_torn_parquet_file_is_refused(tmp_path):
    import datasets

    path = tmp_path / "rows.parquet"
    rows = [{"prompt": f"p{i}", "answer": str(i)} for i in range(20)]
    datasets.Dataset.from_list(rows).to_parquet(path)
    whole = path.read_bytes()
    for size in (0, 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert "is not a readable parquet file" in read_or_refuse(path)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.parquet"]


# --- the state in a checkpoint ---


def make_data_module(policy=None):
    rows = [PromptRow((7, index), str(index), {}) for index in range(6)]
    return RolloutDataModule(
        engine=ScriptedEngine(),
        prompts=PromptStream(rows, seed=0),
        eval_prompts=[],
        scorer=None,
        score=None,
        shape_reward=None,
        admission=policy or AdmitAll(),
        dispatch=FixedSlots(2),
        in_rounds=False,
        group_size=2,
        sampling=Sampling(8),
        eval_sampling=Sampling(8),
        eval_samples=1,
        eval_timeout_seconds=1.0,
        group_timeout_seconds=1.0,
        drop_zero_variance=True,
        max_empty_groups=4,
        require_gradient=True,
        startup_timeout_seconds=1.0,
        publish_timeout_seconds=1.0,
        engine_threads_while_waiting=None,
        total_steps=4,
        groups_per_step=2,
        num_micro_batches=1,
        pad_token_id=0,
        advantage="grpo",
        std_ddof=1,
        mask_truncated=False,
        keep_groups=True,
        draw_timeout_seconds=1.0,
        may_reject=True,
    )


def pace():
    return Pace(RejectionBudget(2), window_size=8, window_minimum=1, aging_limit=2)


def used_state():
    module = make_data_module(pace())
    for fate in (Fate.TRAINED, Fate.REJECTED):
        module._settle(module._lease().uid, fate, 5)
    module.pool.put(make_group(module._lease().uid, versions=(0, 0, 0)))
    module._drawn = [make_group(module._lease().uid)]
    responses = [
        PartialResponse([3, 4], [-1.0, -0.5], [0, 0], [PrefixRescore(1, 0.5, 0.25, -0.5)]),
        PartialResponse([5], [-2.0], [0], unscored=True, completed_at=0, truncated=True),
    ]
    module.worker.rollouts.interrupted.append(Rollout(module._lease(), responses))
    state = module.state_dict()
    state["pool"]["policy_state"]["drift"] = [0.25, 0.5]
    state["pool"]["policy_state"]["rejections"] = {"3": 1}
    return state


def places(value, path=()):
    """The path of each value inside, and of each container."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def plain(value):
    """The same with lists in place of tensors."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


STATE = used_state()
TENSORS = st.sampled_from(
    [
        torch.tensor([2, -1, 2]),
        torch.tensor([2, 0]),
        torch.tensor(2),
        torch.tensor([[0]]),
        torch.tensor([-1.0, float("nan")], dtype=torch.float64),
        torch.tensor([-1.0, -2.0, 0.5], dtype=torch.float64),
        torch.tensor([5, 5, 5], dtype=torch.int64),
        torch.tensor([9, 9, 9, 9], dtype=torch.int64),
    ]
)
"""What tensors might become."""


@settings(deadline=None, max_examples=300)
@given(path=st.sampled_from(list(places(STATE))), value=st.one_of(st.just("gone"), TENSORS, VALUES))
def test_a_damaged_state_is_refused_or_is_as_good_as_a_whole_one(path, value):
    state = copy.deepcopy(STATE)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    if value == "gone":
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    module = make_data_module(pace())
    refusal = ""
    try:
        module.load_state_dict(state)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert "the checkpoint's state of the rollout side cannot be used" in refusal
        assert "remove this checkpoint" in refusal
        return
    for _ in range(4):
        prompt = module._lease()
        module._settle(prompt.uid, Fate.REJECTED, 1)
    module.ledger.check()
    saved = module.state_dict()
    json.dumps(plain(saved))
    make_data_module(pace()).load_state_dict(saved)


def test_a_whole_state_is_accepted():
    module = make_data_module(pace())
    module.load_state_dict(copy.deepcopy(STATE))
    groups = [*STATE["drawn"], *STATE["pool"]["groups"]]
    expected = {**STATE, "drawn": [], "pool": {**STATE["pool"], "groups": groups}}
    assert plain(module.state_dict()) == plain(expected)


@pytest.mark.parametrize("key", sorted(STATE))
def test_a_state_without_a_part_is_refused_by_its_name(key):
    with pytest.raises(ValueError, match=rf"KeyError\('{key}'\).*remove this checkpoint"):
        make_data_module().load_state_dict({k: v for k, v in STATE.items() if k != key})
