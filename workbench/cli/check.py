"""`workbench check FILE [KEY=VALUE ...]`: everything wrong with a config at once. Exit 0 without errors, 1 with some, 2 unreadable."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from engine.errors import visible


@click.command(short_help="Find everything wrong with a config.")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--for", "machine", metavar="MACHINE", help="Judge it for another machine, such as 1xH100-80GB or cpu.")
@click.option(
    "--data", "with_data", is_flag=True, help="Tokenize the rows too: lengths, cuts, rows with nothing to learn."
)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(file: Path, overrides: tuple[str, ...], machine: str | None, with_data: bool, as_json: bool) -> int:
    """Find everything wrong with the config FILE, without starting anything.

    \b
    workbench check my.yaml
    workbench check my.yaml --for 1xH100-80GB
    workbench check my.yaml optim.learning_rate=1e-4
    """
    from engine.config.files import load
    from engine.config.reading import read
    from engine.data.look import look_at
    from engine.hardware import parse_machine
    from workbench.cli.reading import read_with

    target = parse_machine(machine) if machine else None
    base = file.resolve().parent
    mapping, lines = read_with(load(file), base, overrides)
    first = read(mapping)
    facts = look_at(first.config, base, target)
    reading = read(mapping, facts)
    problem = ""
    if with_data and not any(
        finding.path.startswith(("data.", "model.")) for finding in reading.findings if finding.severity == "error"
    ):
        data, problem = _counts(mapping, base, quiet=as_json)
        reading = read(mapping, replace(facts, data=data))
    findings = list(reading.findings)
    if problem:
        from engine.config.findings import RANK, say

        place, sentence = _placed(problem)
        findings.append(replace(say(place, sentence, severity="error"), rule="data-cannot-be-prepared"))
        findings.sort(key=lambda finding: RANK[finding.severity])
    bad = any(finding.severity == "error" for finding in findings)
    if as_json:
        click.echo(json.dumps({"ok": not bad, "findings": [finding.as_json() for finding in findings]}, default=str))
        return int(bad)
    from workbench.cli.findings import count_in_words, show

    show(findings, lines)
    click.echo(f"{visible(str(file))}: {count_in_words(findings)}{_judged_for(facts.machine)}")
    return int(bad)


def _placed(problem: str) -> tuple[str, str]:
    """The setting that the sentence itself begins with, and the rest; else it is about the data as a whole."""
    from engine.config.schema import fields

    place, _, rest = problem.partition(": ")
    return (place, rest) if place in fields else ("data", problem)


def _judged_for(machine: Any) -> str:
    return f"; judged for {machine.name}" if machine is not None and machine.name else ""


def _counts(mapping: dict[str, Any], base: Path, *, quiet: bool) -> tuple[Any, str]:
    """What the inspector counts over the prepared rows, or the sentence why they cannot be prepared."""
    from engine.client import Inspector
    from engine.config.facts import DataFacts
    from engine.errors import WorkbenchError
    from workbench.cli.progress import on_stderr

    with Inspector() as inspector:
        ticket = inspector.ask("data", on_progress=None if quiet else on_stderr, config=mapping, base=str(base))
        try:
            found = ticket.result()
        except KeyboardInterrupt:
            ticket.cancel()
            raise click.Abort from None
        except WorkbenchError as problem:
            return None, problem.told
    return DataFacts.counted(found), ""
