"""`workbench new`: a config to edit, never over another one."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from engine.config.recipes import recipe_text, recipes
from engine.errors import UsageError
from workbench.cli.new import command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments), standalone_mode=False)


@pytest.mark.parametrize("name", [each.name for each in recipes()])
def test_each_recipe_is_printed_as_it_is(name: str) -> None:
    result = run("--recipe", name)
    assert result.return_value == 0
    assert result.stdout == recipe_text(name)


def test_a_file_is_written_and_the_next_command_named(tmp_path: Path) -> None:
    place = tmp_path / "my.yaml"
    result = run("--recipe", "dpo", "-o", str(place))
    assert place.read_text() == recipe_text("dpo")
    assert "workbench check" in result.stderr
    assert result.stdout == ""


def test_the_next_command_can_be_typed_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = run("--recipe", "demo", "-o", "my new config.yaml").stderr
    command = said.rpartition("Next: `")[2].partition("`")[0]
    assert shlex.split(command) == ["workbench", "check", "my new config.yaml"]


def test_an_existing_file_is_kept_without_force(tmp_path: Path) -> None:
    place = tmp_path / "my.yaml"
    place.write_text("mine")
    result = run("-o", str(place))
    assert isinstance(result.exception, UsageError)
    assert "--force" in result.exception.hint
    assert place.read_text() == "mine"
    assert run("-o", str(place), "--force").return_value == 0
    assert place.read_text() == recipe_text("sft-lora")


def test_places_that_cannot_be_written_say_so(tmp_path: Path) -> None:
    assert isinstance(run("-o", str(tmp_path)).exception, UsageError)
    missing = run("-o", str(tmp_path / "none" / "my.yaml")).exception
    assert isinstance(missing, UsageError)
    assert "must stand in a folder that exists; got nothing there" in missing.message
    wrong = run("--recipe", "sft-lorra").exception
    assert isinstance(wrong, UsageError)
    assert "Did you mean sft-lora?" in wrong.message


def test_a_recipe_may_be_named_without_the_option_and_two_are_refused() -> None:
    assert run("dpo").stdout == recipe_text("dpo")
    assert run("dpo", "--recipe", "dpo").stdout == recipe_text("dpo")
    assert run().stdout == recipe_text("sft-lora")
    problem = run("dpo", "--recipe", "demo").exception
    assert isinstance(problem, UsageError)
    assert "got dpo and --recipe demo" in problem.message
