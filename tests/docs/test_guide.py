"""What the guide and the README name exists: commands with their options, settings, pages, files of the tree."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from engine.config.tree import SECTIONS, fields
from workbench.__main__ import COMMANDS, cli

ROOT = Path(__file__).parents[2]
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = [*GUIDE, ROOT / "README.md", ROOT / "CHANGELOG.md"]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_NAME = re.compile(rf"^({'|'.join(SECTIONS)})\.\w+")
_SHELL = re.compile(r"^(?:\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?workbench(?= |$)")
_FILE = re.compile(r"\.(md|py|toml|ya?ml)$")


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every `workbench` command of a page, in blocks and in sentences."""
    text = page.read_text("utf-8")
    shown = [line for kind, block in _BLOCK.findall(text) if kind in ("", "bash") for line in block.splitlines()]
    for line in shown + _INLINE.findall(_BLOCK.sub("", text)):
        start = _SHELL.match(line)
        if start:
            yield shlex.split(line[start.end() :], comments=True)


def settings(page: Path) -> Iterator[str]:
    """Every setting that a page names as `section.name`, alone, with a value behind it, or as an override of a command."""
    for words in commands(page):
        yield from (word.partition("=")[0] for word in words if _NAME.match(word) and "=" in word)
    for code in _INLINE.findall(_BLOCK.sub("", page.read_text("utf-8"))):
        name = re.split(r"[=: ]", code, maxsplit=1)[0]
        if _NAME.match(name) and not _FILE.search(name):
            yield name


def parse(words: list[str]) -> None:
    """Parses a command as click would, and runs nothing. Raises click.ClickException for what it would refuse."""
    with cli.make_context("workbench", list(words), resilient_parsing=False) as context:
        left = [*context._protected_args, *context.args]
        if not left:
            return
        name, command, rest = cli.resolve_command(context, left)
        assert command is not None, name
        if name in COMMANDS:
            command.make_context(name, rest[1:] if rest[:1] == [name] else rest, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_command_that_is_named_exists_with_its_options(page):
    for words in commands(page):
        unfilled = [word for word in words if word not in ("...", "…")]
        try:
            parse(unfilled)
        except click.exceptions.Exit:
            pass
        except click.MissingParameter:
            in_a_sentence = all(word.startswith("-") for word in unfilled[1:])  # its name and options, without a file
            assert in_a_sentence, f"{page.name}: workbench {' '.join(words)}"
        except click.ClickException as problem:
            raise AssertionError(f"{page.name}: workbench {' '.join(words)}: {problem.message}") from problem


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_setting_that_is_named_exists(page):
    wrong = set(settings(page)) - {spec.path for spec in fields} - SHOWN_AS_WRONG
    assert not wrong, f"{page.name} names settings that there are not: {sorted(wrong)}"


SHOWN_AS_WRONG = {"optim.learning_rat"}
"""Slips that the guide shows on purpose, with what `check` answers."""


def test_what_the_tests_look_for_is_found():
    words = [words for page in GUIDE for words in commands(page)]
    assert len(words) > 40
    assert len({each[0] for each in words if each} & set(COMMANDS)) > 12
    assert len({name for page in GUIDE for name in settings(page)}) > 40
    with pytest.raises(click.ClickException):
        parse(["preview", "my.yaml", "--wrost", "longest"])


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_link_to_a_file_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_path_of_the_project_that_is_named_exists(page):
    for code in _INLINE.findall(_BLOCK.sub("", page.read_text("utf-8"))):
        if re.match(r"^(engine|tests|workbench|widgets|docs|demos|benchmarks)/[\w./]+$", code):
            assert (ROOT / code).exists(), f"{page.name} names {code}"


def test_the_guides_index_names_every_page():
    index = (ROOT / "docs" / "guide" / "README.md").read_text("utf-8")
    assert not [page.name for page in GUIDE if page.name != "README.md" and f"]({page.name})" not in index]


def test_the_readmes_tree_names_what_is_there():
    tree = next(
        block for _, block in _BLOCK.findall((ROOT / "README.md").read_text("utf-8")) if block.startswith("engine/")
    )
    above = Path()
    for line in tree.splitlines():
        name = line.split()[0]
        above = above if line.startswith(" ") else Path(name)
        place = above / name if line.startswith(" ") else above
        assert (ROOT / place).exists(), f"README.md's tree names {place}"
    inside = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.startswith("  ")}
    packages = {path.parent.name for path in (ROOT / "engine").glob("*/__init__.py")}
    packages |= {path.name for path in (ROOT / "engine").glob("*.py")} - {"__init__.py"}
    assert packages <= inside, f"README.md's tree leaves out {sorted(packages - inside)}"
