"""The page on performance has the numbers of the files behind it, and its arithmetic is right."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import against_trl  # noqa: E402
import performance_page  # noqa: E402

MIB = 2**20
PATH = [
    {"steps": 0, "seconds": 0.0, "cpu_seconds": 0.0, "pass_rate": 0.2},
    {"steps": 4, "seconds": 100.0, "cpu_seconds": 150.0, "pass_rate": 0.6},
    {"steps": 8, "seconds": 200.0, "cpu_seconds": 300.0, "pass_rate": 0.5},
]


def run(system, factor, seed=0, points=PATH):
    scaled = [p | {k: p[k] * factor for k in ("seconds", "cpu_seconds")} for p in points]
    line = {
        "system": system,
        "seed": seed,
        "steps": against_trl.STEPS,
        "overrides": [],
        "points": scaled,
        "load_average": 0.5,
    }
    return line | {"machine": "m", "packages": {"trl": "trl"}}


def test_the_page_is_what_its_files_say():
    assert performance_page.PAGE.read_text() == performance_page.page(), (
        "run: python benchmarks/performance_page.py"
    )


def test_a_pass_rate_is_reached_between_two_evaluations():
    # 0.5 is three quarters of the way from 0.2 to 0.6
    assert against_trl.reached(PATH, 0.5, "seconds") == pytest.approx(75.0)
    assert against_trl.reached(PATH, 0.5, "cpu_seconds") == pytest.approx(112.5)
    assert against_trl.reached(PATH, 0.6, "seconds") == 100.0
    assert against_trl.reached(PATH, 0.7, "seconds") is None


def test_the_table_compares_with_trl_and_says_who_did_not_get_there():
    runs = [run("async", 1.0), run("trl", 6.0), run("trl", 6.0, seed=1), run("async", 1.0, seed=1)]
    lines = list(against_trl.report(runs))
    (trl,) = [line for line in lines if line.startswith("| trl")]
    (ours,) = [line for line in lines if line.startswith("| async")]
    assert "450 ± 0, 675 ± 0 (1.0 x)" in trl
    assert "75 ± 0, 112 ± 0 (6.0 x)" in ours
    assert "reached by 0 of 2" in ours
    assert "| 25.0 ± 0.0 |" in ours, "seconds per step"
    assert not any(line.startswith("| sync") for line in lines)


def test_every_section_of_the_page_is_made_from_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(performance_page, "FOLDER", tmp_path)
    assert performance_page.page().count(performance_page.MISSING) == 6
    common = {"load_average": 0.1, "threads": 2, "measured_at": "2026-01-01 00:00"}
    step = common | {
        "groups": 8,
        "group_size": 8,
        "prompt_tokens": 45,
        "response_tokens": 16,
        "micro_batches": 4,
        "trained_tokens_per_step": 1000,
        "seconds_per_step": {"bare": [2.0, 2.0], "module": [2.5, 2.5], "shared": [1.0, 1.0]},
        "module_to_bare": 0.8,
        "shared_to_plain": 2.5,
    }
    peak = common | {"gib": {"full": [4.0], "chunked": [1.0]}, "full_to_chunked": 4.0}
    peak |= {"chunk_tokens": 1024, "rows": 8, "tokens": 512}
    kept, returned = {"forward": 1.0, "backward": 3.0}, {"forward": 1.5, "backward": 4.0}
    parts = common | {"seconds": {"kept": kept, "returned": returned}, "responses": 64}
    parts |= {"step_seconds": {"kept": [4.0], "returned": [5.5]}}
    parts |= {"micro_batches": 4, "shared_prompts": True}
    rows = [{"bucket": 64 * MIB, "whole": 60 * MIB}]
    gathered = common | {"ranks": 2, "dtype": "float32", "rows": rows, "own_bytes": 120 * MIB}
    gathered |= {"all_bytes": 240 * MIB, "largest_bytes": 50 * MIB}
    for name, content in (
        ("publication_memory", gathered),
        ("trainer_step", step),
        ("logprob_memory", peak),
        ("step_profile", parts),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "against_trl.jsonl").write_text(json.dumps(run("trl", 1.0)) + "\n")
    text = performance_page.page()
    assert performance_page.MISSING not in text
    assert "| bare | 2.00, 2.00 | 500 |" in text
    assert "| each prompt once | 1.00, 1.00 | 1000 |" in text
    assert "Ratio of the medians: **4.0**" in text
    assert "| 64 | 60 | 25% |" in text
    backward = text.index("| backward | 3000.0 | 75.0% | 4000.0 |")
    forward = text.index("| forward | 1000.0 | 25.0% | 1500.0 |")
    assert backward < forward
    assert "took 5.50 s in the rounds" in text
