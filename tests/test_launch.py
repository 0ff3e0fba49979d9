"""Ranks live and end together. The ranks here are small scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from experiments import ROOT, SMOKE, until

from pace_lightning.__main__ import main
from pace_lightning.config_load import load, to_yaml
from pace_lightning.config_ranks import launched_by_others, launched_ranks
from pace_lightning.launch import LAUNCHER, launch

pytestmark = pytest.mark.slow

STUBBORN = """
import os, pathlib, signal, sys, time
rank = os.environ["RANK"]
if rank == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], rank).write_text(str(os.getpid()))
while rank == "1" or not pathlib.Path(sys.argv[1], "1").exists():
    time.sleep(0.05)
sys.exit(int(sys.argv[2]))
"""


def scripted(script: str, *arguments: object) -> list[str]:
    return [sys.executable, "-S", "-c", script, *map(str, arguments)]


def test_each_rank_learns_who_it_is(tmp_path: Path) -> None:
    script = """
import os, pathlib, sys
names = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(os.environ[n] for n in names))
"""
    assert launch(3, print, command=scripted(script, tmp_path)) == 0
    told = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [words[:4] for words in told] == [[str(r), "0", "3", "127.0.0.1"] for r in range(3)]
    assert len({words[4] for words in told}) == 1, "one meeting point"


def test_the_first_failure_ends_all_and_is_the_exit_code(tmp_path: Path) -> None:
    said: list[str] = []
    begin = time.monotonic()
    command = scripted(STUBBORN, tmp_path, 7)
    code = launch(2, said.append, command=command, grace_seconds=0.5, kill_seconds=0.5)
    assert code == 7
    assert time.monotonic() - begin < 20
    assert said == [
        "rank 0 ended with code 7; the other ranks end too",
        "rank 1 still runs after 0.5 s: SIGTERM",
        "rank 1 still runs after 0.5 s: SIGKILL",
    ]
    assert not psutil.pid_exists(int((tmp_path / "1").read_text()))


def test_a_rank_that_is_killed_ends_all_with_128_and_the_signal(tmp_path: Path) -> None:
    script = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    code = launch(2, print, command=scripted(script), grace_seconds=0.2, kill_seconds=10)
    assert code == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_signal_to_the_launcher_reaches_every_rank(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    rank = f"""
import os, pathlib, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pace_lightning.launch import follow_launcher
follow_launcher(os.environ)
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(60)
"""
    launcher = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pace_lightning.launch import launch
sys.exit(launch(2, print, command={scripted(rank, tmp_path)!r}))
"""
    files = [tmp_path / "0", tmp_path / "1"]
    with subprocess.Popen(scripted(launcher)) as process:
        until(
            lambda: all(file.exists() and file.read_text() for file in files),
            seconds=20,
            what="ranks",
        )
        process.send_signal(number)
        assert process.wait(20) == code
    pids = [int(file.read_text()) for file in files]
    until(lambda: not any(map(_runs, pids)), seconds=10, what="the end of the ranks")


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("environment", "is_rank"),
    [
        ({}, False),
        ({"LOCAL_RANK": "0"}, True),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "train"}, True),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "bash"}, False),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, False),
    ],
)
def test_processes_of_other_launchers_are_ranks(environment: dict[str, str], is_rank: bool) -> None:
    assert launched_by_others(environment) is is_rank


@pytest.mark.parametrize(
    ("environment", "number"),
    [
        ({}, None),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "4"}, 4),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # in a batch script, before srun
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, 2),
    ],
)
def test_launchers_say_how_many_ranks_there_are(
    environment: dict[str, str], number: int | None
) -> None:
    assert launched_ranks(environment) == number


@pytest.mark.parametrize("command", ["train", "resume"])
def test_ranks_that_were_started_for_a_configuration_of_fewer_are_refused(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    arguments = [command, SMOKE, f"run_dir={tmp_path / 'run'}"]
    if command == "resume":
        (tmp_path / "config.yaml").write_text(to_yaml(load(SMOKE, [])))
        monkeypatch.setattr("pace_lightning.run.resumed_config", lambda *_: load(SMOKE, []))
        arguments = [command, str(tmp_path)]
    assert main(arguments) == 2
    assert "2 processes were started for 1 ranks: trainer.devices is 1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_ranks_do_not_ask_slurm_who_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    script = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str("SLURM_NTASKS" in os.environ))
"""
    assert launch(2, print, command=scripted(script, tmp_path)) == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["False", "False"]


def test_this_process_has_no_launcher() -> None:
    assert LAUNCHER not in os.environ
