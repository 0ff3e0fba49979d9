"""Rows come in one schema, or are refused with place and remedy."""

import json
from pathlib import Path

import pytest

from pace_lightning.tasks.sources import load_rows, normalize_rows, split_held_out

DATA = Path(__file__).parents[2] / "data"


def rows_of(*prompts):
    return [{"prompt": prompt, "answer": "1"} for prompt in prompts]


def test_a_jsonl_file_is_read_in_order_and_relative_to_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "\u00fc"}\n', "utf-8")
    monkeypatch.chdir(tmp_path)
    assert load_rows("rows.jsonl") == [{"prompt": "a"}, {"prompt": "\u00fc"}]
    assert load_rows("rows.jsonl", size=1) == [{"prompt": "a"}]


@pytest.mark.slow
def test_a_parquet_file_is_read_without_leaving_a_cache(tmp_path, monkeypatch):
    import datasets

    rows = [{"prompt": [{"role": "user", "content": "a"}], "answer": "1", "level": 3}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    assert load_rows(str(tmp_path / "rows.parquet")) == rows
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]
    (tmp_path / "broken.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"broken\.parquet is not a readable parquet file"):
        load_rows(str(tmp_path / "broken.parquet"))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', r"rows\.jsonl, line 2: not JSON"),
        (b'{"prompt": "a"}\n["b"]\n', r"rows\.jsonl, line 2: \['b'\] \(list\)"),
        (b"\n\xff\xfe\n", r"rows\.jsonl, line 2: not JSON"),
        (b"", "holds no rows"),
    ],
)
def test_a_broken_jsonl_file_is_refused_with_the_line(tmp_path, content, complaint):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint):
        load_rows(str(path))


def test_a_missing_file_names_its_neighbor(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"did you mean 'train\.jsonl'"):
        load_rows(str(tmp_path / "tran.jsonl"))


def test_settings_without_meaning_are_refused_and_not_ignored(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match="split 'test' has no meaning"):
        load_rows(str(path), split="test")
    with pytest.raises(ValueError, match="takes no options"):
        load_rows(str(path), options={"name": "main"})
    with pytest.raises(ValueError, match="holds 1 rows, size asks for 2"):
        load_rows(str(path), size=2)
    with pytest.raises(ValueError, match="size = 0"):
        load_rows(str(path), size=0)
    with pytest.raises(ValueError, match="of no known form"):
        load_rows("./rows.csv")


@pytest.mark.slow
def test_an_unreachable_hub_is_refused_with_id_split_and_remedy(monkeypatch):
    import datasets

    def unreachable(*arguments, **options):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"'owner/name', split 'test'.*no route to host.*Check id"):
        load_rows("owner/name", split="test")


@pytest.mark.slow
def test_the_hub_is_asked_for_the_split_with_the_options_and_cut_to_size(monkeypatch):
    import datasets

    def three_rows(path, *, split, name):
        assert (path, split, name) == ("owner/name", "test", "main")
        return datasets.Dataset.from_list([{"prompt": p} for p in "abc"])

    monkeypatch.setattr(datasets, "load_dataset", three_rows)
    rows = load_rows("owner/name", split="test", size=2, options={"name": "main"})
    assert rows == [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.slow
def test_a_generator_gives_the_same_rows_for_the_same_seed():
    settings = {"size": 5, "options": {"min_terms": 2, "max_terms": 2}}
    rows = load_rows("reasoning_gym:chain_sum", seed=1, **settings)
    assert len(rows) == 5
    assert rows == load_rows("reasoning_gym:chain_sum", seed=1, **settings)
    assert rows != load_rows("reasoning_gym:chain_sum", seed=2, **settings)
    assert normalize_rows(rows, prompt_column="prompt", answer_column="answer") == rows
    for change, complaint in [
        ({"path": "reasoning_gym:chain_sun"}, "did you mean 'chain_sum'"),
        ({"size": None}, "has no size"),
        ({"options": {"min_term": 2}}, "refused options.*It knows.*'min_terms'"),
        ({"options": {"min_terms": 5, "max_terms": 2}}, "refused options"),
        ({"options": {"seed": 2}}, r"\['seed'\] in options"),
        ({"split": "test"}, "no meaning"),
    ]:
        given = {"path": "reasoning_gym:chain_sum", "size": 5, **change}
        with pytest.raises(ValueError, match=complaint):
            load_rows(given.pop("path"), **given)


def test_rows_are_brought_into_one_schema():
    rows = [{"question": "2 + 2", "solution": 4, "level": 3}]
    assert normalize_rows(rows, prompt_column="question", answer_column="solution") == [
        {"prompt": "2 + 2", "answer": "4", "level": 3}
    ]
    messages = [{"role": "user", "content": "hi", "name": None}]
    normalized = normalize_rows(
        [{"prompt": messages, "answer": "a"}], prompt_column="prompt", answer_column="answer"
    )
    assert normalized[0]["prompt"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"answer": "1", "promt": "a"}, "no column 'prompt'.*did you mean 'promt'"),
        ({"prompt": "a"}, "no column 'answer'"),
        ({"prompt": "  ", "answer": "1"}, "column 'prompt'"),
        ({"prompt": [], "answer": "1"}, "column 'prompt'"),
        ({"prompt": None, "answer": "1"}, "column 'prompt'"),
        ({"prompt": ["hi"], "answer": "1"}, "needed a mapping"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "needed exactly 'role' and 'content'"),
        ({"prompt": [{"role": "user", "content": "a", "x": 1}], "answer": "1"}, "needed exactly"),
        ({"prompt": [{"role": "user", "content": 1}], "answer": "1"}, "needed exactly"),
        ({"prompt": "a", "answer": None}, "column 'answer'"),
        ({"prompt": "a", "answer": 0.5}, "column 'answer'"),
        ({"prompt": "a", "answer": True}, "column 'answer'"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_with_place(row, complaint):
    rows = [*rows_of("fine"), row]
    with pytest.raises(ValueError, match=rf"file\.jsonl, row 2.*{complaint}"):
        normalize_rows(rows, prompt_column="prompt", answer_column="answer", source="file.jsonl")


def test_two_columns_that_would_become_one_are_refused():
    row = {"question": "a", "prompt": "b", "answer": "1"}
    with pytest.raises(ValueError, match="a column 'prompt' exists as well"):
        normalize_rows([row], prompt_column="question", answer_column="answer")


def test_held_out_prompts_share_no_text_with_training_and_repeats_are_reported(caplog):
    message = [{"role": "user", "content": "a"}]
    rows = rows_of("a", "b", "c", "a ", "d", "b", message)
    rows[5]["answer"] = "2"
    train, held_out = split_held_out(rows, num_held_out=2, seed=0)
    texts = [row["prompt"] for row in (*train, *held_out)]
    assert sorted(texts) == ["a", "b", "c", "d"]
    assert len(held_out) == 2
    assert "dropped 3 of 7 rows" in caplog.text
    assert "1 of them with another answer" in caplog.text


def test_what_is_held_out_depends_on_seed_and_text_only():
    rows = rows_of(*(f"prompt {i}" for i in range(40)))

    def held_out(rows, seed):
        return {row["prompt"] for row in split_held_out(rows, num_held_out=5, seed=seed)[1]}

    assert held_out(rows, 0) == held_out(rows[::-1], 0) == held_out(rows + rows[:7], 0)
    assert held_out(rows, 0) != held_out(rows, 1)
    # the five smallest of `printf SEED:PROMPT | sha256sum`, in every release and Python version
    assert held_out(rows, 0) == {f"prompt {i}" for i in (34, 8, 4, 30, 28)}


def test_holding_out_everything_is_refused():
    with pytest.raises(ValueError, match="have 2 distinct ones"):
        split_held_out(rows_of("a", "b", "a"), num_held_out=2, seed=0)
    assert split_held_out(rows_of("a"), num_held_out=0, seed=0) == (rows_of("a"), [])


def test_the_shipped_digits_have_an_answer_to_every_prompt():
    rows = load_rows(str(DATA / "larger_digit.jsonl"))
    assert normalize_rows(rows, prompt_column="prompt", answer_column="answer") == rows
    assert {row["prompt"] for row in rows} == {f"{a} {b}" for a in range(9) for b in range(9)}
    assert len(rows) == 81
    assert all(json.loads(row["answer"]) == 9 for row in rows)
