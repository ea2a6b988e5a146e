"""`workbench check FILE [KEY=VALUE ...]`: everything wrong with a config at once. Exit 0 without errors, 1 with some, 2 unreadable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.errors import UsageError, visible
from workbench.cli.output import echo, print_json, styled
from workbench.cli.places import PATH

if TYPE_CHECKING:
    from engine.config.facts import Facts
    from engine.config.findings import Finding
    from engine.config.tree import RunConfig
    from engine.planning.estimate import Estimate


@click.command(short_help="Find everything wrong with a config.")
@click.argument("file", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option(
    "--for",
    "machine",
    metavar="MACHINE",
    help="Judge it for another machine, such as 1xH100-80GB, 2x8xH100-80GB or cpu.",
)
@click.option(
    "--data", "with_data", is_flag=True, help="Tokenize the rows too: lengths, cuts, rows with nothing to learn."
)
@click.option("--fix", "mending", is_flag=True, help="Apply the fixes that keep what the file says; shows the diff.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(
    file: Path, overrides: tuple[str, ...], machine: str | None, with_data: bool, mending: bool, as_json: bool
) -> int:
    """Find everything wrong with the config FILE, without starting anything.

    \b
    workbench check my.yaml
    workbench check my.yaml --for 1xH100-80GB
    workbench check my.yaml optim.learning_rate=1e-4
    workbench check my.yaml --fix
    """
    from engine.bridge.detect import TITLES, detect
    from engine.config.files import load
    from engine.data.gather_facts import countable, gather_facts
    from engine.hardware import parse_machine
    from engine.rules import read
    from workbench.cli.reading import counts, import_way, read_with

    base = file.resolve().parent
    document = load(file)
    tool = detect(document.mapping)
    mended: dict[str, Any] = {}
    if mending:
        mended = _mend(file, tool, overrides)
        document = load(file)
    mapping, lines = read_with(document, overrides)
    facts = gather_facts(read(mapping).config, base, parse_machine(machine) if machine else None)
    reading = read(mapping, facts)
    problem = ""
    if with_data and countable(reading.findings):
        data, problem = counts(mapping, base, quiet=as_json)
        facts = replace(facts, data=data)
        reading = read(mapping, facts)
    findings = _with_problem(reading.findings, problem)
    bad = any(finding.severity == "error" for finding in findings)
    from engine.planning.estimate import estimate
    from engine.session.paragraph import paragraph

    known = estimate(reading.config, facts)
    words = paragraph(reading.config, facts, known)
    compared = _compared(file, overrides, facts) if overrides and tool is None else None
    if as_json:
        mended |= {"changes": compared[1].changes(compared[0])} if compared is not None else {}
        listed = [finding.as_json() for finding in findings]
        print_json({"ok": not bad, "findings": listed, "data": known.shares(), "summary": words, **mended})
        return int(bad)
    from workbench.cli.findings import count_text, show

    if mending:
        _print_mended(file, mended, left=any(finding.fix for finding in findings))
    show(findings, lines)
    if not bad and tool is None:
        _summarize(words, compared)
    rows = _describe_rows(reading.config, facts, with_data)
    echo(f"{file}: {count_text(findings)}{_machine_clause(facts.machine)}{rows}")
    if tool is not None:
        echo(f"It is a config of {TITLES[tool]}. {import_way(file, tool)}")
    return int(bad)


def _compared(file: Path, overrides: tuple[str, ...], facts: Facts) -> tuple[Estimate, Estimate]:
    """The file without and with the settings beside it, their paths whole on both sides."""
    from engine.config.files import load, placed
    from engine.rules import read
    from workbench.cli.reading import beside_the_file, with_overrides

    base = file.resolve().parent
    beside = read(with_overrides(load(file).mapping, base, overrides)).config
    return beside_the_file(file, beside, placed(facts, base))


def _summarize(words: str, compared: tuple[Estimate, Estimate] | None) -> None:
    """The run in a paragraph, and what the settings beside the file change of it."""
    from engine.session.consequences import consequences

    echo(words, hang=0)
    if compared is None:
        return
    before, known = compared
    if changed := [f"{each.label} {each.change}" for each in consequences(known, before) if each.change]:
        echo(f"The settings beside the file change: {', '.join(changed)}.", hang=0)


def _describe_rows(config: RunConfig, facts: Facts, with_data: bool) -> str:
    """How many rows are held out, and which were not counted."""
    from engine.facts.counts import eval_rows, not_counted

    held_out, uncounted = eval_rows(config, facts), not_counted(config, facts)
    words = f"; {held_out:,} row{'s' if held_out != 1 else ''} held out" if held_out else ""
    way = "" if with_data else ": --data counts them"
    return f"{words}; {uncounted}{way}" if uncounted else words


def _with_problem(findings: Iterable[Finding], problem: str) -> list[Finding]:
    """Findings, the gravest first, with why the rows could not be prepared, if they could not."""
    from engine.config.findings import RANK, notice

    if not problem:
        return list(findings)
    place, sentence = _placed(problem)
    found = replace(notice(place, sentence, severity="error"), rule="data-cannot-be-prepared")
    return sorted([*findings, found], key=lambda finding: RANK[finding.severity])


def _mend(file: Path, tool: str | None, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Apply the fixes that keep what the file says, and write the file; which, and what changed. Raises UsageError beside
    overrides, and for a config of another tool."""
    from difflib import unified_diff

    from engine.bridge.detect import TITLES
    from engine.session.draft import Draft, mend
    from workbench.cli.reading import import_way

    if overrides:
        raise UsageError(f"{overrides[0]}: must be left out with --fix, which changes the file itself.")
    if tool is not None:
        raise UsageError(f"{visible(str(file))}: a config of {TITLES[tool]} is not changed.", import_way(file, tool))

    draft = Draft.open(file)
    before = draft.text()
    done = mend(draft)
    diff = "".join(
        unified_diff(before.splitlines(keepends=True), draft.text().splitlines(keepends=True), str(file), str(file))
    )
    if done:
        draft.save()
    return {"fixed": done, "diff": diff}


def _print_mended(file: Path, mended: dict[str, Any], *, left: bool) -> None:
    """Show what a file's fixes changed; `left`: some are offered below."""
    for line in mended["diff"].splitlines():
        colour = "green" if line[:1] == "+" else "red" if line[:1] == "-" else None
        echo(styled(line, fg=colour))
    number = len(mended["fixed"])
    none = "no fix applied: those below change what the file says, so they are yours to take over."
    said = f"{number} fix{'es' if number != 1 else ''} applied." if number else none if left else "no fix to apply."
    echo(f"{file}: {said}")


def _placed(problem: str) -> tuple[str, str]:
    """The setting that the sentence itself begins with, and the rest; else it is about the data as a whole."""
    from engine.config.tree import fields

    place, _, rest = problem.partition(": ")
    return (place, rest) if place in fields else ("data", problem)


def _machine_clause(machine: Any) -> str:
    return f"; judged for {machine.name}" if machine is not None and machine.name else ""
