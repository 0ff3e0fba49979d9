"""The direction of dependencies, and a few rules no linter knows."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pace_lightning"
FILES = sorted(PACKAGE.rglob("*.py"))

BUILD = {
    "build.py",
    "build_objective.py",
    "build_reliability.py",
    "build_tasks.py",
    "build_trainer.py",
    "build_vllm.py",
}
COMMANDS = BUILD | {"__main__.py", "doctor.py", "run.py"}
"""Top-level modules that may know everything, and may talk to the user."""

READERS = {"compare/grid.py", "compare/report.py", "compare/runs.py"}
"""Files that may know configurations, but not build from them."""

CONFIG = {file.name for file in PACKAGE.glob("config*.py")}

OURS = "pace_lightning"
HEAVY = ("datasets", "deepspeed", "math_verify", "peft", "reasoning_gym", "vllm")
"""Imported inside functions only."""

FORBIDDEN = {
    # where: what it must not import, with everything below that name
    "core": [f"{OURS}.{part}" for part in ("tasks", "rollout", "training", "build")],
    "tasks": [f"{OURS}.rollout", f"{OURS}.training", f"{OURS}.build", "lightning", "vllm"],
    "rollout": [f"{OURS}.tasks", f"{OURS}.training", f"{OURS}.build", "lightning"],
    "training": [f"{OURS}.build", f"{OURS}.compare", "vllm"],
    # runs are made by the command line; only what they leave is read
    "compare": [f"{OURS}.{part}" for part in ("build", "run", "rollout")] + ["lightning"],
}

MAX_LINES = 400


def imports(tree: ast.AST) -> list[tuple[str, int]]:
    """Every imported name, dotted, with its line; ``from a import b`` counts as ``a.b``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += [(f"{module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def at_import_time(tree: ast.Module) -> list[tuple[str, int]]:
    """The imports that run when the module is imported, or that only a type checker sees."""
    outside = ast.Module(body=[], type_ignores=[])
    stack: list[ast.AST] = [tree]
    while stack:
        for child in ast.iter_child_nodes(stack.pop()):
            if isinstance(child, ast.Import | ast.ImportFrom):
                outside.body.append(child)
            elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                stack.append(child)
    return imports(outside)


def under(name: str, roots: list[str] | tuple[str, ...] | set[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def violations(source: str, place: str) -> list[str]:
    """What a file with this source, at ``place`` relative to the package, does wrong."""
    tree = ast.parse(source)
    found, everything = [], imports(tree)
    folder = place.split("/")[0] if "/" in place else ""
    command = place in COMMANDS

    for name, line in everything:
        if under(name, FORBIDDEN.get(folder, [])):
            found.append(f"{place}:{line} imports {name}: not allowed in {folder}/")
        root = name.split(".")[0]
        if folder == "core":
            allowed = root in sys.stdlib_module_names or root == "torch"
            if not allowed and not under(name, [f"{OURS}.core"]):
                found.append(f"{place}:{line} imports {name}: core is torch and the stdlib only")
        if root == "vllm" and not place.startswith("rollout/vllm_"):
            found.append(f"{place}:{line} imports {name}: only rollout/vllm_*.py may")
        configs = [f"{OURS}.{file.removesuffix('.py')}" for file in CONFIG]
        if under(name, configs) and not command and place not in CONFIG | READERS:
            found.append(f"{place}:{line} imports {name}: classes take flat, named arguments")
        if name.startswith("."):
            found.append(f"{place}:{line} imports {name}: absolute imports only")
    for name, line in at_import_time(tree):
        if under(name, HEAVY):
            found.append(
                f"{place}:{line} imports {name} at module level: import it where it is used"
            )
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and not command]
    prints = [call.lineno for call in calls if getattr(call.func, "id", "") == "print"]
    found += [f"{place}:{line} prints: log, or return the text" for line in prints]
    if (lines := len(source.splitlines())) > MAX_LINES:
        found.append(f"{place} has {lines} lines: split it below {MAX_LINES}")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_module_keeps_to_the_architecture(file):
    place = file.relative_to(PACKAGE).as_posix()
    assert violations(file.read_text(encoding="utf-8"), place) == []


@pytest.mark.parametrize(
    ("place", "source", "message"),
    [
        ("core/pool.py", "import numpy as np", "core is torch and the stdlib only"),
        ("core/pool.py", "def f():\n    import lightning", "core is torch and the stdlib only"),
        ("core/pool.py", "from pace_lightning.tasks import prompts", "not allowed in core/"),
        ("core/pool.py", "from pace_lightning import rollout", "not allowed in core/"),
        ("rollout/worker.py", "from lightning.pytorch import Trainer", "not allowed in rollout/"),
        ("rollout/worker.py", "import pace_lightning.tasks.scoring", "not allowed in rollout/"),
        ("rollout/worker.py", "def f():\n    import vllm", "only rollout/vllm_*.py may"),
        ("rollout/vllm_engine.py", "import vllm", "at module level"),
        ("training/module.py", "def f():\n    from vllm import LLM", "not allowed in training/"),
        ("training/module.py", "from pace_lightning.config import Config", "flat, named arguments"),
        ("tasks/a.py", "from pace_lightning import config_load", "flat, named arguments"),
        ("compare/plots.py", "from pace_lightning import config", "flat, named arguments"),
        ("compare/runs.py", "from pace_lightning.run import train", "not allowed in compare/"),
        ("tasks/a.py", "class A:\n    import datasets", "at module level"),
        ("tasks/a.py", "try:\n    from math_verify import x\nfinally: pass", "at module level"),
        ("tasks/a.py", "from . import prompts", "absolute imports only"),
        ("tasks/a.py", "def f():\n    print(1)", "prints: log"),
        ("tasks/a.py", "x = 1\n" * 401, "has 401 lines"),
    ],
)
def test_the_guard_notices(place, source, message):
    assert any(message in violation for violation in violations(source, place))


@pytest.mark.parametrize(
    ("place", "source"),
    [
        (
            "core/pool.py",
            "import threading\nimport torch.nn\nfrom pace_lightning.core import ledger",
        ),
        ("rollout/vllm_engine.py", "def f():\n    import vllm"),
        ("tasks/a.py", "def f():\n    import datasets"),
        ("build.py", "from pace_lightning.config import Config\nprint(1)"),
        ("config_load.py", "from pace_lightning.config import Config"),
        ("training/module.py", "from pace_lightning.rollout.engine import RolloutEngine"),
        ("tasks/a.py", "x = 1\n" * 400),
    ],
)
def test_the_guard_lets_pass_what_is_allowed(place, source):
    assert violations(source, place) == []


def test_the_map_of_the_repository_names_every_module():
    described = (ROOT / "ARCHITECTURE.md").read_text()
    names = {file.name for file in FILES} - {"__init__.py"}
    assert sorted(name for name in names if name not in described) == []
