"""`workbench recipes`: what there is, one line each."""

from __future__ import annotations

import json

from click.testing import CliRunner

from engine.config.recipes import recipes
from workbench.cli.recipes import command


def test_every_recipe_is_listed_with_its_title() -> None:
    output = CliRunner().invoke(command, [], standalone_mode=False).output
    for each in recipes():
        assert any(line.startswith(f"{each.name} ") and each.title in line for line in output.splitlines())


def test_json_carries_the_text() -> None:
    found = json.loads(CliRunner().invoke(command, ["--json"], standalone_mode=False).output)
    assert [each["name"] for each in found] == [each.name for each in recipes()]
    assert all(set(each) == {"name", "title", "goal", "text"} for each in found)
