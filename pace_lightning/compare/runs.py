"""Makes the runs of a comparison: each once, one at a time, in a process of its own.

A run lives in ``RUNS/IDENTITY/``, whatever comparisons use it:

    experiment.yaml   the resolved configuration, as it was when the run began
    run.json          command, machine, packages, code; the exit code at its end
    train.log         what the command printed
    run/              its run directory; ``summary.json`` says whether it finished

A finished run is never repeated. One that failed or was interrupted is made again from scratch, in
a directory that is emptied first, by the next command that needs it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import psutil

from pace_lightning.compare.grid import Comparison, Run, identity, to_plain
from pace_lightning.compare.series import RunSeries, read_run
from pace_lightning.config import Config, ConfigError
from pace_lightning.config_load import to_yaml
from pace_lightning.training.policy import ModelError, resolve

DONE = ("finished", "nothing_to_learn", "data_ended")
"""What ``summary.json`` says of a run that came to an end of its own."""

PACKAGES = ("torch", "transformers", "lightning", "numpy")
END_SECONDS = 10.0
"""How long a run that is told to end may take before it is killed."""


@dataclass(frozen=True)
class Outcome:
    """What is known of one run."""

    status: str
    """One of ``DONE``; else ``failed``, ``interrupted`` or ``missing``."""
    place: Path
    series: RunSeries | None = None
    record: dict[str, Any] | None = None
    """``run.json``."""
    message: str = ""
    """Why there is no series."""


def place_of(root: Path, run: Run) -> Path:
    """Where a run lives."""
    return root / "RUNS" / run.identity


def outcome(root: Path, run: Run) -> Outcome:
    """Look at what a run left."""
    place = place_of(root, run)
    try:
        record = json.loads((place / "run.json").read_text())
    except (OSError, ValueError):
        return Outcome("missing", place, message="not made yet")
    try:
        summary = json.loads((place / "run" / "summary.json").read_text())
    except (OSError, ValueError):
        code = record.get("exit_code")
        if code is None:
            message = "interrupted, or still running"
            return Outcome("interrupted", place, record=record, message=message)
        return Outcome("failed", place, record=record, message=f"exit code {code}: {_last(place)}")
    status = summary["status"]
    if status not in DONE:
        message = summary.get("error", "no reason given")
        return Outcome(status, place, record=record, message=message)
    try:
        return Outcome(status, place, read_run(place / "run"), record)
    except (OSError, ValueError, KeyError) as error:
        return Outcome("failed", place, record=record, message=f"unreadable: {error!r}")


def make_runs(comparison: Comparison, root: Path, emit: Callable[[str], None]) -> int:
    """Make every run that is not finished, in order. Returns how many failed.

    Args:
        comparison: what to run.
        root: of all comparisons.
        emit: prints a line.

    Raises:
        ConfigError: if another comparison is at work, or an initial model or data file changed
            meanwhile.
    """
    failed = 0
    with _alone(root, comparison) as lock:
        for number, run in enumerate(comparison.runs, start=1):
            label = f"[{number}/{len(comparison.runs)}] seed {run.seed}, {run.arm}"
            before = outcome(root, run)
            if before.status in DONE and before.series is not None:
                emit(f"{label}: {run.identity} is there already")
                continue
            again = "" if before.status == "missing" else f" ({before.status} before: from scratch)"
            emit(f"{label}: {run.identity}{again}, log {before.place / 'train.log'}")
            begin = time.monotonic()
            _make(run, before.place, lock)
            after = outcome(root, run)
            seconds = time.monotonic() - begin
            if after.series is None:
                failed += 1
                emit(f"  FAILED after {seconds:.0f} s: {after.message}")
                emit(f"  its log: {after.place / 'train.log'}; the other runs go on")
                continue
            rates = after.series.accuracy()[1]
            learned = f", held-out pass rate {rates[0]:.3f} -> {rates[-1]:.3f}" if rates else ""
            emit(f"  {after.status} in {seconds:.0f} s{learned}")
    return failed


def fingerprint(config: Config) -> dict[str, str]:
    """Content hashes of the files that a run begins with, where they are on this machine."""
    found = {}
    for name in _paths(to_plain(config)):
        with suppress(ModelError):  # the run will say what is wrong with it
            path = resolve(name)
            if isinstance(path, Path):
                found[name] = _hash_of(path)
    reward = config.reward.function.partition(":")[0]
    for folder in [*config.reward.paths, *sys.path]:  # where the judge looks, without importing it
        file = Path(folder) / f"{reward.replace('.', '/')}.py"
        if file.is_file():
            found[f"reward {reward}"] = _hash_of(file)
            break
    return found


def _paths(values: Any) -> Iterator[str]:
    """Every text under a key ``path``."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from _paths(value)
        elif key == "path" and isinstance(value, str):
            yield value


def code_version() -> str:
    """Hash of the sources that train; comparisons only read what they leave."""
    package = Path(__file__).parents[1]
    files = [file for file in package.rglob("*.py") if "compare" not in file.parts]
    return _hash(f"{file.relative_to(package)} {_hash_of(file)}" for file in sorted(files))


def machine() -> str:
    """This machine in words."""
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().total / 2**30
    return f"{model}, {cores} cores, {memory:.0f} GiB"


# ---------------------------------------------------------------------------------- one run


def _make(run: Run, place: Path, lock: IO[str]) -> None:
    """Run the training command to its end, whatever that is."""
    now = fingerprint(run.config)
    if identity(run.config, now) != run.identity:
        raise ConfigError(
            f"the initial model or the data of arm {run.arm} changed while the comparison ran "
            f"({', '.join(now)}); start it again, and what depends on them is made again"
        )
    if place.exists():
        shutil.rmtree(place)
    place.mkdir(parents=True)
    (place / "experiment.yaml").write_text(to_yaml(run.config))
    arguments = ["train", str(place / "experiment.yaml"), f"run_dir={place / 'run'}"]
    record: dict[str, Any] = {
        "command": " ".join(["python -m pace_lightning", *arguments]),
        "started": datetime.now().isoformat(timespec="seconds"),
        "machine": machine(),
        "packages": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "code": code_version(),
    }
    _write(place / "run.json", record)
    with (place / "train.log").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pace_lightning", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes from here, once
            pass_fds=[lock.fileno()],  # if this process is killed, the run still holds the lock
        )
    try:
        _note(lock, f"{_holder()}, run {run.identity} as process {process.pid}")
        record["exit_code"] = process.wait()
    except BaseException:
        _end(process)
        raise
    _write(place / "run.json", record)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run and every process it started, within ``END_SECONDS``."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _alone(root: Path, comparison: Comparison) -> Iterator[IO[str]]:
    """Hold the lock file of all comparisons: two at once would slow each other down."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                f"another comparison is at work: {lock.read().strip()}. Two at once would slow "
                "each other down, and their times would mean nothing. Wait for it, or end it; "
                "--report shows what is there"
            ) from None
        _note(lock, f"{_holder()}, comparison {comparison.name}")
        yield lock


def _holder() -> str:
    return f"process {os.getpid()}"


def _note(lock: IO[str], text: str) -> None:
    """Say who holds the lock, for whoever finds it held."""
    lock.seek(0)
    lock.truncate()
    lock.write(f"{text}\n")
    lock.flush()


def _last(place: Path) -> str:
    """The last line of a log."""
    with suppress(OSError):
        lines = (place / "train.log").read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
    return "its log is empty"


def _write(path: Path, values: dict[str, Any]) -> None:
    scratch = path.with_name(f".{path.name}.part")
    scratch.write_text(json.dumps(values, indent=2) + "\n")
    scratch.replace(path)


# ------------------------------------------------------------------------------------ hashes


def _hash(parts: Iterator[str] | list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _hash_of(path: Path) -> str:
    """Of a file, or of all files below a directory with their names."""
    if path.is_file():
        stat = path.stat()
        return _hash_file(path, stat.st_mtime_ns, stat.st_size)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return _hash([f"{file.relative_to(path)} {_hash_of(file)}" for file in files])


@functools.cache
def _hash_file(path: Path, modified: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
