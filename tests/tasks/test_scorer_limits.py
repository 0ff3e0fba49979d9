"""What a reward function may see and use: no secrets, no stray modules, limited memory and CPU."""

import time

import pytest

import pace_lightning
from pace_lightning.tasks.scorer_process import ProcessDied, ScorerProcess, ScorerSettings
from pace_lightning.tasks.scoring import ScorerError, ScorerPool

FUNCTIONS = """
import os

def lengths(prompts, completions, **columns):
    return [float(len(text)) for text in completions]

def seen(prompts, completions, **columns):
    return [float(text in os.environ) for text in completions]

def fill(prompts, completions, **columns):
    for text in completions:
        bytearray(int(text) * 2**20)
    return [float(os.getpid())] * len(completions)

def burn(prompts, completions, **columns):
    while True:
        pass
"""


@pytest.fixture
def start(tmp_path):
    """Make started pools whose functions are in a directory of their own."""
    directory = tmp_path / "rewards"
    directory.mkdir()
    (directory / "own_rewards.py").write_text(FUNCTIONS)
    pools = []

    def make(function, **settings):
        pools.append(ScorerPool(function, **{"paths": [str(directory)], **settings}))
        pools[-1].start()
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


REQUEST = b'{"prompt": "p", "completions": ["x"], "columns": {}}'
SECRETS = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "GITHUB_PASSWORD"]


def test_the_parents_secrets_do_not_reach_the_function(start, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "a secret")
    pool = start("own_rewards:seen", environment=["DATABASE_URL"])
    assert pool.score("p", [*SECRETS, "PATH"], {}) == [0.0, 0.0, 0.0, 1.0, 0.0, 1.0]


def test_a_variable_that_is_declared_but_not_set_is_refused(monkeypatch):
    monkeypatch.delenv("JUDGE_URL", raising=False)
    with pytest.raises(ValueError, match=r"reward\.environment has \['JUDGE_URL'\]"):
        ScorerPool("own_rewards:seen", environment=["JUDGE_URL"])


def test_the_current_directory_is_not_imported_from_unless_it_is_declared(
    start, tmp_path, monkeypatch
):
    (tmp_path / "stray.py").write_text(FUNCTIONS)
    (tmp_path / "json.py").write_text("raise RuntimeError('this shadows the standard library')")
    monkeypatch.chdir(tmp_path)
    assert start("own_rewards:lengths").score("p", ["abc"], {}) == [3.0]
    with pytest.raises(ScorerError, match=r"cannot import module 'stray'.*reward\.paths"):
        start("stray:lengths")
    (tmp_path / "json.py").unlink()
    assert start("stray:lengths", paths=["."]).score("p", ["abc"], {}) == [3.0]


def test_a_path_that_is_no_directory_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"reward\.paths has .*missing"):
        ScorerPool("own_rewards:seen", paths=[str(tmp_path / "missing")])


def test_too_much_memory_is_an_error_and_the_next_group_gets_a_fresh_process(start):
    pool = start("own_rewards:fill", memory_gib=0.5)
    before = pool.score("p", ["100"], {})
    with pytest.raises(ScorerError, match="MemoryError"):
        pool.score("p", ["1", "600"], {})
    after = pool.score("p", ["100"], {})
    assert after != before


def test_a_module_that_needs_too_much_memory_is_refused_at_the_start(start, tmp_path):
    (tmp_path / "rewards" / "huge.py").write_text("DATA = bytearray(2**30)")
    with pytest.raises(ScorerError, match=r"cannot import module 'huge'(.|\n)*MemoryError"):
        start("huge:anything", memory_gib=0.5)


def test_too_much_cpu_time_ends_the_process_before_its_deadline(tmp_path):
    (tmp_path / "own_rewards.py").write_text(FUNCTIONS)
    process = ScorerProcess(
        ScorerSettings("own_rewards:burn", paths=(str(tmp_path),), cpu_seconds=0.1)
    )
    try:
        assert process.receive(time.monotonic() + 30) == {"ready": True}
        with pytest.raises(ProcessDied):
            process.exchange(REQUEST, time.monotonic() + 30)
    finally:
        assert process.discard() == "by SIGXCPU"


def test_the_limit_of_cpu_time_is_for_one_group_not_for_all(start, tmp_path):
    spin = "import time\ndef spin(prompts, completions, **columns):\n"
    spin += "    end = time.process_time() + 0.6\n    while time.process_time() < end: pass\n"
    (tmp_path / "rewards" / "spinning.py").write_text(spin + "    return [1.0]\n")
    process = ScorerProcess(
        ScorerSettings("spinning:spin", paths=(str(tmp_path / "rewards"),), cpu_seconds=1.0)
    )
    try:
        process.receive(time.monotonic() + 30)
        for _ in range(4):  # 2.4 s in all
            assert process.exchange(REQUEST, time.monotonic() + 30) == {"rewards": [1.0]}
    finally:
        process.discard()


def test_the_function_runs_beside_the_package_that_started_it(start, tmp_path):
    where = "import pace_lightning\ndef where(prompts, completions, **columns):\n"
    where += "    return [float(pace_lightning.__file__ == completions[0])]\n"
    (tmp_path / "rewards" / "locating.py").write_text(where)
    assert start("locating:where").score("p", [pace_lightning.__file__], {}) == [1.0]
