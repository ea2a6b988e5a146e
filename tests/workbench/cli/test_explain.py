"""`workbench explain`: any setting, section or term in plain words; a typo is answered."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner, Result

from engine.config.glossary import TERMS
from engine.config.tree import SECTIONS, fields
from engine.errors import UsageError
from engine.session.explain import Explanation, explain
from workbench.cli.explain import command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments), standalone_mode=False)


def test_a_setting_says_what_it_takes_and_what_auto_means() -> None:
    output = run("optim.learning_rate").output
    assert "a number above 0 and at most 10, or auto" in output
    assert re.search(r"auto, dpo +1e-05 with LoRA, 1e-06 with full weights\n", output)
    assert run("learning_rate").output == output
    assert "arXiv:2305.18290" in run("beta").output
    assert "known, and refused by this version" in run("run.backend").output


def test_a_section_lists_its_settings() -> None:
    output = run("data").output
    for spec in fields.data:
        assert spec.name in output


def test_everything_can_be_explained() -> None:
    for name in [*SECTIONS, *TERMS, *(spec.path for spec in fields)]:
        result = run(name)
        assert result.exception is None, name
        assert len(result.output) > 40


def test_without_a_name_everything_is_listed() -> None:
    output = run().output
    assert "max_length" in output
    assert "gradient accumulation" in " ".join(output.split())
    assert set(json.loads(run("--json").output)) == {*SECTIONS, "terms"}


def test_json_is_plain_data() -> None:
    found = json.loads(run("epoch", "--json").output)
    assert found["name"] == "epoch"


@pytest.mark.parametrize(
    ("typo", "words"),
    [
        ("epocs", "Did you mean epoch?"),
        ("lora_alfa", "lora_alpha"),
        ("qqqqq", "lists what there is"),
        ("kind", "method.kind or adapter.kind"),
    ],
)
def test_a_typo_is_answered(typo: str, words: str) -> None:
    problem = run(typo).exception
    assert isinstance(problem, UsageError)
    assert words in problem.hint


@pytest.mark.parametrize(("name", "shown"), [("", "''"), ("x" * 5000, "…")])
def test_an_empty_or_endless_name_is_a_short_sentence(name: str, shown: str) -> None:
    message = str(run(name).exception)
    assert f"{shown}: must be a setting" in message
    assert len(message) < 200


@pytest.mark.parametrize(
    ("term", "path"),
    [("learning rate", "optim.learning_rate"), ("LoRA", "adapter.kind: lora"), ("dpo", "method.kind: dpo")],
)
def test_a_term_says_which_setting_sets_it(term: str, path: str) -> None:
    found = explain(term)
    assert isinstance(found, Explanation)
    assert found.facts == (("set by", path),)
