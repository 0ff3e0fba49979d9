"""docs/methods.md says what the code has: names, roles, files; nothing more, nothing less."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pace_lightning.config import OptimConfig
from pace_lightning.config_load import load
from pace_lightning.config_methods import PROXIMAL_SETTINGS
from pace_lightning.core.corrections import METHODS
from pace_lightning.core.draw_advantages import DRAW_ADVANTAGES
from pace_lightning.core.heads import HEADS
from pace_lightning.core.losses import AGGREGATIONS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
FILES = {file.stem for file in (ROOT / "conf" / "methods").glob("*.yaml")}
EVIDENCE = ("code", "paper", "note", "reconstruction")


def table(title: str) -> list[dict[str, str]]:
    """The rows of the table in a section."""
    section = PAGE.split(f"## {title}")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


def names(title: str, column: str = "name") -> list[str]:
    return [row[column].strip("`") for row in table(title)]


SECTIONS = {
    "Trust-region heads": HEADS,
    "Corrections": METHODS,
    "Proximal policy": PROXIMAL_SETTINGS,
    "Advantages": DRAW_ADVANTAGES,
}


@pytest.mark.parametrize("title", SECTIONS)
def test_a_table_has_every_name_once(title: str) -> None:
    assert sorted(names(title)) == sorted(SECTIONS[title])


def test_roles_are_those_of_the_code() -> None:
    assert {row["name"].strip("`"): row["role"] for row in table("Corrections")} == {
        name: method.role for name, method in METHODS.items()
    }


@pytest.mark.parametrize("title", [*SECTIONS, "Step size"])
def test_each_row_names_files_that_use_it_and_its_evidence(title: str) -> None:
    key = "key" if title == "Step size" else "name"
    for row in table(title):
        name = row[key].strip("`")
        assert re.split(r"[;:]", row["evidence"])[0] in EVIDENCE, row
        for file in row["file"].split(", "):
            config = load(ROOT / "conf" / "methods" / f"{file}.yaml")
            used = {
                config.loss.objective,
                config.loss.advantage,
                config.loss.proximal,
                *(correction["name"] for correction in config.loss.corrections),
            }
            if config.optim.ess_scaling != "none":
                used.add("ess_scaling")
            if config.optim.stale_budget is not None:
                used.add("stale_budget")
            if config.optim.lifetime_budget is not None:
                used.add("lifetime_budget")
            assert name in used, (file, name)


def test_every_file_is_on_the_page() -> None:
    tables = [row for title in [*SECTIONS, "Step size"] for row in table(title)]
    assert {file for row in tables for file in row["file"].split(", ")} == FILES


def test_reconstructions_say_so_in_their_file() -> None:
    for title in ("Trust-region heads", "Corrections"):
        for row in table(title):
            if row["evidence"] == "reconstruction":
                text = (ROOT / "conf" / "methods" / f"{row['file']}.yaml").read_text()
                assert "reconstruction" in text, row["file"]


def test_aggregations_and_steps_have_their_names() -> None:
    section = PAGE.split("## Aggregations")[1].split("\n## ")[0]
    assert all(f"`{name}`" in section for name in AGGREGATIONS)
    assert set(names("Step size", "key")) <= set(OptimConfig.__dataclass_fields__)


def test_metrics_that_the_page_promises_are_logged() -> None:
    sources = "".join(
        (ROOT / "pace_lightning" / "training" / file).read_text()
        for file in ("step_statistics.py", "module.py")
    )
    for metric in re.findall(r"`((?:ratio|loss|optim|time)/\w+)`", PAGE):
        assert f'"{metric}"' in sources, metric
