"""Whole experiments: commands in processes of their own, or a scripted engine in this one."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from scripted import Request, ScriptedEngine
from torch import Tensor

from pace_lightning.build import Experiment, build
from pace_lightning.config import Config
from pace_lightning.config_checks import check
from pace_lightning.config_load import load
from pace_lightning.rollout.engine import PartialResponse

ROOT = Path(__file__).parents[1]
SMOKE = "conf/smoke.yaml"
MARK = "PACE_LIGHTNING_TEST_MARK"
"""Environment variable by which all processes of one command are found, whoever adopted them."""

STALL = (
    "reward.function=rewards_for_runs:stall",
    "reward.environment=[STALL_AFTER_GROUPS,STALL_FILE]",
)
"""Settings of a reward function that hangs when the environment says so."""

VOCABULARY = 100
MAX_NEW_TOKENS = 4


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines; none if it does not exist yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_summary(run_dir: Path) -> dict[str, Any]:
    """What a run says about itself at its end."""
    return json.loads((run_dir / "summary.json").read_text())


def until(predicate: Callable[[], object], *, seconds: float, what: str) -> None:
    """Poll what another process does, with a deadline."""
    deadline = time.monotonic() + seconds
    while not predicate():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def measured(what: str, begin: float) -> None:
    """Seconds from a fault to its outcome, as docs/reliability.md lists them."""
    path = os.environ.get("RELIABILITY_TIMES")
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps({"fault": what, "seconds": time.monotonic() - begin}) + "\n")


# --- commands in processes of their own ---


class Command:
    """``python -m MODULE ...`` while it runs; a context that leaves no process behind."""

    def __init__(
        self,
        log: Path,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        directory: Path = ROOT,
        module: str = "pace_lightning",
    ) -> None:
        self.log = log
        mark = uuid.uuid4().hex
        self._entry = (MARK, mark)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # would be inherited
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                cwd=directory,
                env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), MARK: mark}
                | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)
        for pid in self.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def children(self) -> list[int]:
        """Every other living process with this command's mark."""
        found = []
        for process in psutil.process_iter():
            try:
                marked = process.environ().get(self._entry[0]) == self._entry[1]
                alive = process.status() != psutil.STATUS_ZOMBIE
            except psutil.Error:
                continue
            if marked and alive and process.pid != self.process.pid:
                found.append(process.pid)
        return found

    def output(self) -> str:
        """What it printed so far."""
        return self.log.read_text()

    def until(self, predicate: Callable[[], object], *, seconds: float, what: str) -> None:
        """Poll what it does; its end is a failure."""

        def holds() -> object:
            if predicate():
                return True
            assert self.process.poll() is None, f"ended before {what}:\n{self.output()}"
            return False

        until(holds, seconds=seconds, what=f"{what}\n{self.output()}")

    def wait(self, seconds: float) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.output()}") from None


def run_command(log: Path, *arguments: object, seconds: float = 90.0) -> tuple[int, str]:
    """Run a command to its end: exit code and output."""
    with Command(log, *arguments) as command:
        return command.wait(seconds), command.output()


# --- experiments in this process ---


def configure(run_dir: Path, *overrides: str) -> Config:
    """The smoke experiment with settings on top; the working directory must be the repository's."""
    config = load(SMOKE, [f"run_dir={run_dir}", *overrides])
    check(config)
    return config


def respond(
    weights: Mapping[str, Tensor], prompt: Sequence[int], n: int
) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Tokens and log-probs that weights give for a prompt: a function of every bit of both."""
    digest = 0
    for name in sorted(weights):
        digest = zlib.crc32(weights[name].numpy().tobytes(), digest)
    dice = random.Random(f"{digest} {tuple(prompt)}")
    responses = []
    for _ in range(n):
        length = dice.randint(1, MAX_NEW_TOKENS)
        tokens = tuple(dice.randrange(3, VOCABULARY) for _ in range(length))
        responses.append((tokens, tuple(dice.uniform(-5.0, -4.2) for _ in tokens)))
    return responses


def judge(text: str) -> float:
    """The score of a response."""
    return float(sum(map(ord, text)) % 2)


class DeterministicEngine(ScriptedEngine):
    """Follows a script, and answers with `respond`."""

    def _sample(self, request: Request, responses: list[tuple[int, PartialResponse]]) -> None:
        """Whole responses of the weights that were published last, at the end only."""

    def _complete(self, request: Request, responses: list[tuple[int, PartialResponse]]) -> None:
        version, weights = self.weights[-1]
        answers = respond(weights, request.prompt, len(request.responses))
        for number, response in responses:
            tokens, logprobs = answers[number]
            response.token_ids, response.logprobs = [*tokens], [*logprobs]
            response.versions = [version] * len(tokens)
        super()._complete(request, responses)


def alternate(texts: Sequence[str]) -> list[float]:
    """Scores that give each group a gradient, whatever was generated."""
    return [float(index % 2) for index, _ in enumerate(texts)]


def judge_all(texts: Sequence[str]) -> list[float]:
    """`judge` for each response; now and then all scores of a group are equal."""
    return [judge(text) for text in texts]


class InProcessScorer:
    """Stands in for the scorer pool: judges at once."""

    def __init__(self, score: Callable[[Sequence[str]], list[float]] = alternate) -> None:
        self._score = score
        self.closed = False

    def start(self) -> None:
        """Nothing to start."""

    def close(self) -> None:
        """Remember it."""
        self.closed = True

    async def score_async(
        self, prompt: object, texts: Sequence[str], columns: Mapping[str, Any]
    ) -> list[float]:
        """The scores of one group."""
        return self._score(texts)


def use_script(
    monkeypatch: pytest.MonkeyPatch, engine: ScriptedEngine, scorer: InProcessScorer | None = None
) -> None:
    """Let the real wiring build around a scripted engine; all else stays as it is."""
    chosen = scorer or InProcessScorer()
    monkeypatch.setattr("pace_lightning.build.LocalEngine", lambda *_, **__: engine)
    monkeypatch.setattr("pace_lightning.build.ScorerPool", lambda *_, **__: chosen)
    # it makes its log-probs up
    monkeypatch.setattr("pace_lightning.training.on_policy_check.STOP_AT", math.inf)


def build_scripted(
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    engine: ScriptedEngine,
    scorer: InProcessScorer | None = None,
) -> Experiment:
    """The objects of an experiment around a scripted engine."""
    use_script(monkeypatch, engine, scorer)
    run_dir = Path(str(config.run_dir))
    run_dir.mkdir(parents=True, exist_ok=True)
    return build(config, run_dir, emit=lambda _: None)
