"""ARCHITECTURE.md says what the code says: its layers, its table of features, and paths that are there.

`python tests/docs/test_architecture.py` writes the table anew.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from engine.features.table import FEATURES, name_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- features -->\n", "<!-- end -->"
TOP = {path.name for path in ROOT.iterdir() if path.is_dir()}


def table() -> str:
    """Every feature in the order in which they act, with its setting and the calls that its `apply.py` has."""
    rows = [
        f"| {number} | {name_of(feature)} | {f'`{feature.SETTING.path}`' if feature.SETTING else ''} | {_acts(name_of(feature))} |"
        for number, feature in enumerate(FEATURES, 1)
    ]
    return "\n".join(("| | feature | setting | acts in |", "| --- | --- | --- | --- |", *rows, ""))


def _acts(name: str) -> str:
    body = ast.parse((ROOT / "engine/features" / name / "apply.py").read_text("utf-8")).body
    return ", ".join(
        node.name for node in body if isinstance(node, ast.FunctionDef) and node.name in ("prepare", "apply", "compose")
    )


def _layers_of_the_test() -> list[list[str]]:
    body = ast.parse((ROOT / "tests/test_layers.py").read_text("utf-8")).body
    value = next(
        node.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "LAYERS"
    )
    layers = [[pattern.removeprefix("engine.") for pattern in layer] for layer in ast.literal_eval(value)]
    assert layers.pop() == ["engine"]
    return layers


def _layers_of_the_page() -> list[list[str]]:
    block = re.findall(r"```text\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[1]
    names = [re.split(r"\s{2,}", line)[0] for line in block.splitlines() if line[:1].isalpha()]
    return [layer.split(" | ") for layer in names]


def test_the_layers_are_those_that_are_held() -> None:
    frontends, *layers = _layers_of_the_page()
    assert frontends == ["workbench", "widgets"]
    assert layers == _layers_of_the_test()


def test_the_table_of_features_is_that_of_the_code() -> None:
    shown = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    assert shown == table(), "run `make docs`"


def test_each_invariant_names_what_holds_it() -> None:
    part = PAGE.read_text("utf-8").partition("## What always holds")[2].partition("\n## ")[0]
    items = re.split(r"\n(?=\d+\. )", part)[1:]
    assert len(items) > 10
    assert [item for item in items if "`tests/" not in item and "`make " not in item] == []


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_path_of_the_page_is_there(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    named = {name for name in re.findall(r"`([\w./<>-]+)`", text) if "/" in name and name.partition("/")[0] in TOP}
    named |= {name for name in re.findall(r"\]\(([\w./-]+)\)", text)}
    assert named
    missing = [name for name in sorted(named) if not any(ROOT.glob(re.sub(r"<\w+>", "*", name).rstrip("/")))]
    assert missing == []


def test_the_page_stays_short() -> None:
    assert len(PAGE.read_bytes()) <= 10_000


def write() -> None:
    """Puts the table of today's code into the page."""
    head, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}{table()}{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    write()
