"""`workbench chat RUN`: talk to a run's model beside its base; with `--prompt` without a screen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.errors import UsageError, WorkbenchError
from engine.run import store
from workbench.cli.output import clear, echo, print_json, rewrite, styled
from workbench.cli.places import shown, to_write

if TYPE_CHECKING:
    from engine.client import Ticket
    from engine.session.chat import ChatSession

LOOK_SECONDS = 0.1


@click.command(short_help="Talk to a run's model, beside its base.")
@click.argument("run")
@click.argument("other", required=False, metavar="[OTHER]")
@click.option(
    "--checkpoint",
    "checkpoints",
    type=click.IntRange(0),
    multiple=True,
    metavar="N",
    help="The checkpoint of this step, not the newest; twice: two of them.",
)
@click.option("--base", "base", is_flag=True, help="The base model alone.")
@click.option("--tuned", "tuned", is_flag=True, help="The tuned model alone.")
@click.option("--system", default="", metavar="TEXT", help="System prompt.")
@click.option("--tools", "tools", metavar="FILE", help="JSON list of tools that the template offers to the model.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Share of likelihood to draw from.")
@click.option("--max-new-tokens", type=int, default=256, show_default=True, help="The longest answer.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of drawing tokens.")
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu", help="Where the model computes.")
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Answer this and exit; again: the next turn.")
@click.option("--answer", "answers", multiple=True, metavar="TEXT", help="Of a reward model: an answer to score.")
@click.option("--text", "texts", multiple=True, metavar="TEXT", help="Of an embedding model: a text to rank.")
@click.option("--save", "save", metavar="FILE", help="With --prompt: write the conversation as JSONL rows.")
@click.option("--runs", "runs", metavar="DIR", help="Folder that holds the runs.")
@click.option("--json", "as_json", is_flag=True, help="With --prompt: print the answers as JSON.")
def command(
    run: str,
    other: str | None,
    checkpoints: tuple[int, ...],
    base: bool,
    tuned: bool,
    prompts: tuple[str, ...],
    answers: tuple[str, ...],
    texts: tuple[str, ...],
    save: str | None,
    runs: str | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Talk to a run's newest checkpoint and its base model side by side.

    \b
    workbench chat dates-0001                  a screen
    workbench chat dates-0001 dates-0002       two runs
    workbench chat dates-0001 --checkpoint 50 --checkpoint 100
    workbench chat dates-0001 --prompt "What is 3 March 2021 in ISO form?"
    """
    from engine.session.chat import ChatSession, tools_from, who_answers
    from engine.session.conversation import Settings

    if base and tuned:
        raise UsageError("--base excludes --tuned; choose one, or leave both out for both.")
    root = store.runs_dir(runs)
    folders = [store.find(name, root) for name in (run, other) if name is not None]
    tools, device = given.pop("tools"), given.pop("device")
    offered = tools_from(Path(tools)) if tools else ()
    who = who_answers(folders, checkpoints, "base" if base else "tuned" if tuned else "")
    session = ChatSession(who, Settings(**given), tools=offered, device=device)
    if not prompts:
        for name, value in (("--save", save), ("--answer", answers), ("--text", texts), ("--json", as_json)):
            if value:
                raise UsageError(f"{name}: must stand beside --prompt.")
        from workbench.cli.app import open_app

        return open_app(chat=session, runs_dir=runs)
    more = _more(session.kind, prompts, answers, texts)
    if save and session.kind != "text":
        raise UsageError("--save: scores and nearness are no rows to train on; leave it out.")
    if save:
        to_write(Path(save), flag="--save", example="rows.jsonl", way="Name another file.")
    with closing(session):
        _load(session, quiet=as_json)
        for number, text in enumerate((*prompts, *more), 1):
            tickets = session.send(text)
            _wait(tickets)
            if tickets and not as_json and (session.kind != "rank" or number == len(prompts) + len(more)):
                _show(session)
        saved = session.conversation.save(Path(save)) if save else None
        if as_json:
            print_json(_document(session, saved))
        elif saved and save:
            echo(f"{saved} row{'' if saved == 1 else 's'} written to {shown(save)}.", err=True)
    return 1 if any(answer.problem for turn in session.conversation.turns for answer in turn.answers) else 0


def _more(kind: str, prompts: Sequence[str], answers: Sequence[str], texts: Sequence[str]) -> Sequence[str]:
    """What follows the prompt. Raises UsageError for what this kind of model does not take."""
    wants = {"text": None, "score": "--answer", "rank": "--text"}[kind]
    for name, value in (("--answer", answers), ("--text", texts)):
        if value and name != wants:
            model = {"text": "a model that answers", "score": "a reward model", "rank": "an embedding model"}[kind]
            raise UsageError(f"{name}: must be left out for {model}.")
        if not value and name == wants:
            raise UsageError(f"{name}: is missing: what should be {'scored' if kind == 'score' else 'ranked'}?")
    if wants and len(prompts) > 1:
        raise UsageError(f"--prompt: must be given once for {wants}; got {len(prompts)}.")
    return answers or texts


def _load(session: ChatSession, *, quiet: bool) -> None:
    ticket = session.load()
    try:
        while not ticket.done:
            if not quiet:
                rewrite(f"{session.phase} … {time.monotonic() - session.phase_since:.0f} s")
            time.sleep(LOOK_SECONDS)
    finally:
        if not quiet:
            clear()
    ticket.result()
    if not quiet:
        for note in session.notes:
            echo(note, err=True)


def _wait(tickets: Sequence[Ticket]) -> None:
    """Until all are answered. Raises WorkbenchError for the first where no side has an answer."""
    problems = []
    for ticket in tickets:
        while not ticket.done:
            time.sleep(0.01)
        if ticket.error is not None:
            problems.append(ticket.error)
    if problems and len(problems) == len(tickets):
        raise WorkbenchError(problems[0].message, problems[0].hint)


def _show(session: ChatSession) -> None:
    turn = session.conversation.turns[-1]
    echo(styled(turn.prompt, bold=True), lines=True)
    for who, answer in zip(session.who, turn.answers, strict=True):
        echo(styled(f"{who.title}: ", fg="cyan"), answer.text, lines=True)
        if note := answer.note():
            echo(styled(f"  {note}", dim=True))


def _document(session: ChatSession, saved: int | None) -> dict[str, Any]:
    return {
        "kind": session.kind,
        "sides": [
            {"title": who.title, "run": who.run.id, "checkpoint": who.checkpoint, **side}
            for who, side in zip(session.who, session.loaded["sides"], strict=True)
        ],
        "settings": {**session.conversation.settings.sampling(), "system": session.conversation.settings.system},
        "notes": session.notes,
        "turns": [
            {
                "prompt": turn.prompt,
                "answers": [{**answer.result, "problem": answer.problem or None} for answer in turn.answers],
            }
            for turn in session.conversation.turns
        ],
        "saved": saved,
    }
