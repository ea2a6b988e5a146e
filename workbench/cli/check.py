"""`workbench check FILE [KEY=VALUE ...]`: everything wrong with a config at once. Exit 0 without errors, 1 with some, 2 unreadable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from engine.errors import UsageError, visible
from workbench.cli.output import echo, print_json, styled
from workbench.cli.places import PATH

if TYPE_CHECKING:
    from engine.config.facts import Facts
    from engine.config.findings import Finding
    from engine.config.tree import RunConfig
    from engine.planning.estimate import Estimate
    from workbench.cli.reading import Ask


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
    from workbench.cli.findings import count_text, show
    from workbench.cli.reading import asking, import_way

    mended: dict[str, Any] = {}
    if mending:
        mended = _mend(file, detect(load(file).mapping), overrides)
    judged = judge(file, overrides, machine, ask=asking(quiet=as_json) if with_data else None)
    if as_json:
        print_json({**judged.as_json(), **mended})
        return int(not judged.ok)
    if mending:
        _print_mended(file, mended, left=any(finding.fix for finding in judged.findings))
    show(judged.findings, judged.lines)
    if judged.ok and judged.tool is None:
        _summarize(judged.summary, judged.compared)
    rows = _describe_rows(judged.config, judged.facts, with_data)
    echo(f"{file}: {count_text(judged.findings)}{_machine_clause(judged.facts.machine)}{rows}")
    if judged.tool is not None:
        echo(f"It is a config of {TITLES[judged.tool]}. {import_way(file, judged.tool)}")
    return int(not judged.ok)


class Judged(NamedTuple):
    """All that `check` says of a config."""

    findings: list[Finding]
    lines: dict[str, int | None]
    config: RunConfig
    facts: Facts
    known: Estimate
    summary: str
    """The run in a paragraph."""
    compared: tuple[Estimate, Estimate] | None
    """The file without and with the settings beside it, where there are some."""
    tool: str | None
    """The other tool that it is a config of."""

    @property
    def ok(self) -> bool:
        """Whether none of the findings is an error."""
        return not any(finding.severity == "error" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The document of `check --json`."""
        changes = {"changes": self.compared[1].changes(self.compared[0])} if self.compared is not None else {}
        listed = [finding.as_json() for finding in self.findings]
        return {"ok": self.ok, "findings": listed, "data": self.known.shares(), "summary": self.summary, **changes}


def judge(file: Path, overrides: tuple[str, ...], machine: str | None = None, *, ask: Ask | None = None) -> Judged:
    """Everything about the config FILE with these settings beside it; with `ask` its rows are tokenized, too.

    Raises ConfigUnreadable, UsageError.
    """
    from engine.bridge.detect import detect
    from engine.config.files import load
    from engine.data.gather_facts import countable, gather_facts
    from engine.hardware import parse_machine
    from engine.planning.estimate import estimate
    from engine.rules import read
    from engine.session.paragraph import paragraph
    from workbench.cli.reading import counts, read_with

    base = file.resolve().parent
    document = load(file)
    tool = detect(document.mapping)
    mapping, lines = read_with(document, overrides)
    facts = gather_facts(read(mapping).config, base, parse_machine(machine) if machine else None)
    reading = read(mapping, facts)
    problem = ""
    if ask is not None and countable(reading.findings):
        data, problem = counts(mapping, base, ask)
        facts = replace(facts, data=data)
        reading = read(mapping, facts)
    known = estimate(reading.config, facts)
    compared = _compared(file, overrides, facts) if overrides and tool is None else None
    findings = _with_problem(reading.findings, problem)
    words = paragraph(reading.config, facts, known)
    return Judged(findings, lines, reading.config, facts, known, words, compared, tool)


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
