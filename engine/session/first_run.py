"""The guided first run: six pages that teach one idea each, on the person's own rows, and a rehearsal that proves the way.

The rehearsal trains on few rows until the model knows them by heart. If it does, rows, template, mask, loss and end of turn
work together; if not, the page that failed is named. App, notebook and command show the same words.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from engine.config.files import absolute, place_of
from engine.config.steps import GOALS, Goal
from engine.config.steps import STEPS as QUESTIONS
from engine.config.tree import fields
from engine.errors import WorkbenchError, visible
from engine.figures import count
from engine.hardware import Machine, machine_text
from engine.run import control
from engine.run.phases import before_first_step
from engine.run.store import RunFolder
from engine.run.view import RunView
from engine.run.warm import WarmWorker
from engine.session.build import BuildSession
from engine.session.collector import Ask
from engine.session.draft import Draft
from engine.session.first_rows import SourcePreview
from engine.session.guided_rehearsal import (
    DATES,
    EVERY,
    MOST_TOKENS,
    ROWS,
    STEPS,
    Examined,
    Verdict,
    answers_of,
    judge,
    known_at,
)
from engine.session.pages import GAP, Block
from engine.session.rows import tokens_of

PAGES = ("machine", "goal", "rows", "tokens", "rehearsal", "next")
TITLES = {
    "machine": "This machine",
    "goal": "What training does",
    "rows": "Your rows",
    "tokens": "What the model sees",
    "rehearsal": "The rehearsal",
    "next": "And now",
}
ROWS_NOTE = "A JSON, JSONL or CSV file of questions and answers; builtin/dates is built in."
WORDS: dict[str, tuple[str, ...]] = {
    "machine": (),
    "goal": ("fine-tuning", "base model", "chat model"),
    "rows": ("prompt", "completion"),
    "tokens": ("token", "chat template", "mask", "label"),
    "rehearsal": ("loss", "step", "learning rate", "optimizer"),
    "next": ("overfitting", "held-out data", "epoch", "LoRA"),
}
"""The terms of each page that the glossary explains."""
TINY = "builtin/tiny"
QUESTION = QUESTIONS[0].question
CHOICES = tuple(goal for goal in GOALS if goal.recipe not in (None, "demo"))
"""What the guide asks for: the goals with rows of one's own. The guided run serves the first; others begin at a new config."""
HELD_OUT = 0.1
"""The share of the rows that the real run never sees, by which it is measured."""
_MOST_TURNS = 5
"""Stretches of read and learned tokens that are shown of a row."""
_MANY = 2000
"""Rows of which an epoch is long enough for checkpoints and measurements every so many steps."""
_MOST_SHOWN = 150
"""Letters of a question or an answer that the rehearsal shows: two lines of a narrow window each."""
_FEW_BYTES = 60
"""Bytes of an answer that the built-in model knows by heart within half a minute."""
_SPACE, _BREAK = "␣", "⏎"
"""A space within a token, which could not be told from one between two, and a line break, by a sign that most fonts have."""


class FirstRun:
    """Rows and model of a guided first run, its rehearsal, and the config of the real run after it."""

    def __init__(
        self,
        ask: Ask,
        *,
        rows: str = DATES,
        model: str = TINY,
        base: Path | None = None,
        runs: str | os.PathLike[str] | None = None,
    ) -> None:
        self.rows, self.model = rows, model
        self.base = base or Path.cwd()
        self.examined: Examined | None = None
        self.row: dict[str, Any] | None = None
        """The first row as the collator gives it, once the inspector has answered."""
        self.warm = WarmWorker()
        self._ask, self._runs = ask, runs
        self._stopped: str | None = None

    @property
    def question(self) -> str:
        """What a talk with the rehearsal's model may begin with; empty where rows do not say."""
        return "" if self.examined is None else self.examined.question

    def take(self, rows: str) -> None:
        """Other rows: what was found out about those of before is forgotten."""
        self.rows, self.examined, self.row = rows, None, None

    # The rehearsal

    def rehearsal(self) -> Draft:
        """The config of the rehearsal: few rows, no held-out part, enough steps to know them by heart."""
        draft = Draft.new()
        tiny = self.model == TINY
        small = min(8, max(1, self.examined.rows // 3)) if self.examined else 8
        for path, value in {
            fields.model.name.path: self.model,
            fields.data.train.path: [{"path": place_of(self.rows, self.base), "rows": ROWS}],
            fields.data.max_length.path: MOST_TOKENS,
            fields.data.excess_length.path: "drop",
            fields.optim.learning_rate.path: 0.004 if tiny else 0.001,
            fields.optim.lr_scheduler_type.path: "linear",
            fields.optim.warmup_steps.path: 5,
            fields.optim.weight_decay.path: 0.0,
            fields.optim.per_device_train_batch_size.path: small,
            fields.optim.gradient_accumulation_steps.path: 1,
            fields.optim.max_steps.path: STEPS,
            fields.run.name.path: "rehearsal",
            fields.run.save_steps.path: STEPS // 2,
        }.items():
            draft.set(path, value)
        if tiny:
            draft.set(fields.model.dtype.path, "float32")
            draft.set(fields.adapter.kind.path, "none")
            draft.set(fields.optim.adam_beta2.path, 0.99)
        if self.examined and self.examined.pinned:
            draft.set(fields.run.prompts.path, [row.prompt for row in self.examined.pinned])
            draft.set(fields.run.prompts_steps.path, EVERY)
            draft.set(fields.run.max_new_tokens.path, self.examined.longest_answer + 8)
        return draft

    def ask_tokens(self, then: Callable[[dict[str, Any] | WorkbenchError], object]) -> None:
        """Ask the inspector for the first row as tokens; `then` gets the row or the problem, on the reader's thread."""
        draft = self.rehearsal()
        ticket = self._ask("preview", config=absolute(draft.mapping, draft.base), base=str(draft.base))

        def answered(_: Any) -> None:
            if ticket.error is not None:
                then(ticket.error)
            else:
                rows = ticket.result(0)["rows"]
                then(rows[0] if rows else WorkbenchError("there is no row to show"))

        ticket.add_done_callback(answered)

    def warm_up(self) -> None:
        """Have a worker load the libraries while a person reads what comes before the rehearsal; for any thread."""
        from engine.run.from_config import warm_up

        session = BuildSession(self.rehearsal(), self._ask, runs=self._runs, warm=self.warm)
        try:
            with contextlib.suppress(WorkbenchError, OSError):  # the launch says what is wrong
                warm_up(self.warm, session.draft.config, session.draft.facts, session.runs_dir)
        finally:
            session.facts.close()

    def launch(self) -> RunFolder:
        """Start the rehearsal; for any thread. Raises WorkbenchError where it cannot start."""
        session = BuildSession(self.rehearsal(), self._ask, runs=self._runs, warm=self.warm)
        try:
            return session.launch()()
        finally:
            session.facts.close()

    def follow(self, run: RunFolder, view: RunView) -> Verdict:
        """How the rehearsal stands by its events; one that has learned its rows is asked to save and stop, once."""
        verdict = judge(view, self.examined or Examined(SourcePreview(self.rows)))
        if verdict.state == "learned" and not view.over and self._stopped != run.id:
            self._stopped = run.id
            control.request(run, "save_stop", by="the guided first run")
        return verdict

    def real(self, goal: Goal = CHOICES[0]) -> Draft:
        """The config of the real run: all rows but a held-out part, the first questions asked again and again. For another
        goal than the guide's own a new one."""
        if goal is not CHOICES[0]:
            return Draft.new(goal.recipe)
        if self.rows == DATES and self.model == TINY:
            return Draft.new("demo")
        draft = Draft.new("sft-lora")
        draft.set(fields.model.name.path, self.model)
        draft.set(fields.data.train.path, [{"path": place_of(self.rows, self.base)}])
        draft.set(fields.data.val_set_size.path, HELD_OUT)
        if (
            (self.examined and self.examined.preview.count) or _MANY
        ) < _MANY:  # fewer steps than lie between two checkpoints
            draft.set(fields.run.saves_per_epoch.path, 1)
            draft.set(fields.run.evals_per_epoch.path, 1)
        if self.model == TINY:  # nothing is learned in it yet that an adapter could stand beside
            draft.unset(fields.adapter.kind.section)
            for path in (fields.optim.learning_rate.path, fields.model.dtype.path, fields.adapter.kind.path):
                draft.set(path, self.rehearsal().value(path))
        if self.examined and self.examined.pinned:
            draft.set(fields.run.prompts.path, [row.prompt for row in self.examined.pinned])
        return draft

    # The pages

    def page(self, name: str, machine: Machine | None = None, view: RunView | None = None) -> list[Block]:
        """What a page says, with what is known by now."""
        if name == "machine":
            return list(_about_machine(machine))
        if name == "goal":
            return list(_about_goal())
        if name == "rows":
            return list(self._about_rows())
        if name == "tokens":
            return list(self._about_tokens())
        verdict = judge(view, self.examined) if view is not None and self.examined is not None else None
        return list(self._about_rehearsal(view, verdict) if name == "rehearsal" else self._about_next(verdict))

    def _about_rows(self) -> Iterator[Block]:
        yield _text(
            "A row is one example: a question (the prompt), and the answer you wish the model gave (the completion). It "
            "learns from nothing else, so read a few: what is wrong in them it learns, too."
        )
        yield GAP
        examined = self.examined
        if examined is None:
            yield Block("dim", f"Reading {visible(self.rows)} …")
            return
        if examined.problem:
            yield Block("bad", visible(examined.problem))
            return
        total = f" of {count(examined.preview.count)}" if examined.preview.count else ""
        yield Block("title", f"{visible(self.rows)}: the first {count(examined.rows)}{total} rows are rehearsed")
        for place, (question, answer) in enumerate(examined.first):
            if place:
                yield GAP
            said = (("question", question), ("answer", answer))
            yield Block("table", rows=tuple((label, visible(text, lines=True)) for label, text in said))
        if examined.contradicting:
            yield GAP
            words = "rows ask what another row answers otherwise; no model can know both by heart"
            yield Block("warn", f"{count(examined.contradicting)} {words}. Decide which answer is right.")

    def _about_tokens(self) -> Iterator[Block]:
        yield _text(
            "A model reads no letters but tokens: pieces of text, each with a number. The chat template puts marks "
            "between them that say who speaks. Only the answer and the mark that ends it are learned; the question is "
            "read, not learned. That is the mask."
        )
        yield GAP
        if self.row is None:
            yield Block("dim", "Asking the tokenizer for the first row; its libraries are loaded first, some seconds …")
            return
        if reason := self.row.get("refused") or self.row.get("left_out"):
            yield Block("bad", visible(str(reason)))
            return
        tokens = tokens_of(self.row)
        learned = [token for token in tokens if token["trained"]]
        yield Block("title", f"The first row: {count(len(tokens))} tokens, {count(len(learned))} of them learned")
        runs = [(bool(key), list(run)) for key, run in groupby(tokens, key=lambda token: bool(token["trained"]))]
        pieces = tuple(("learned" if key else "read", _pieces(run)) for key, run in runs[:_MOST_TURNS])
        yield Block("table", rows=(*pieces, ("…", "")) if runs[_MOST_TURNS:] else pieces)
        signs = {_SPACE: "a space", _BREAK: "a line break"}
        if meant := [f"{sign} is {words}" for sign, words in signs.items() if any(sign in text for _, text in pieces)]:
            yield Block("dim", f"{', '.join(meant)}.")
        if learned:
            yield GAP
            whole = "".join(str(token["text"]) for token in learned).strip()
            if self.examined is not None and whole.endswith(self.examined.first_answer):
                yield Block("warn", "No mark of an end is learned here: asked, the model may not know when to stop.")
            else:
                last = f"{visible(repr(learned[-1]['text']))} (number {learned[-1]['id']})"
                yield _text(
                    f"The last that is learned, {last}, is no part of the answer: it teaches the model to stop."
                )

    def _about_rehearsal(self, view: RunView | None, verdict: Verdict | None) -> Iterator[Block]:
        waits = before_first_step(view) if view is not None else []
        begins = view is not None and not view.over and not view.step
        if view is None or begins:
            yield _text(
                "Before a long training comes a short proof: the model reads these few rows again and again until it knows "
                "them by heart. The loss says how surprised it is by each token that really comes next; it must fall "
                "towards 0. Then it is asked questions of these rows. It stops by itself when its answers are right."
            )
            yield GAP
            if begins and not waits:
                yield Block("dim", "starting …")
                return
            if waits:
                yield Block("title", "Before the first step")
                yield Block("table", rows=tuple((phase.word, f"{phase.state:<5} {phase.time}") for phase in waits))
                return
            yield Block("dim", f"It takes {STEPS} steps at most{self._how_long()}.")
            if words := self.warm.summary():
                yield Block("dim", words)
            return
        if verdict is not None and verdict.state != "learning":
            yield Block("title" if verdict.state == "learned" else "bad", verdict.message)
            if verdict.todo:
                yield _text(verdict.todo)
            yield GAP
        if view.step and "loss" in view.latest:
            most = f" of at most {STEPS}" if not view.over else ""
            yield Block("text", f"step {view.step}{most}: loss {view.latest['loss']:.3f}")
        else:
            yield Block("dim", f"{visible(view.phase) or 'starting'} …")
        known = known_at(answers := answers_of(view, self.examined))
        for pinned, given in answers:
            # A step later an answer may be another one again: a few rows at a high rate are not known steadily.
            shown = next((sample for sample in given if sample["step"] == known), given[-1])
            newest = [(f"step {shown['step']}", shown["completion"])] if given[1:] else []
            # What changes stands above what does not: a narrow window shows it without scrolling.
            rows = [("asked", pinned.prompt), ("wanted", pinned.answer), *newest, ("at first", given[0]["completion"])]
            yield GAP
            yield Block("table", rows=tuple((label, _brief(text)) for label, text in rows))

    def _how_long(self) -> str:
        """Of the built-in model, whose pace is known; two idle cores."""
        if self.model != TINY:
            return ""
        return ": about half a minute" if self._longest <= _FEW_BYTES else ": one to two minutes for answers this long"

    @property
    def _longest(self) -> int:
        return self.examined.longest_answer if self.examined is not None else 0

    def _about_next(self, verdict: Verdict | None) -> Iterator[Block]:
        if verdict is None or verdict.state != "learned":
            yield _text("The rehearsal comes first: it shows that rows, template, mask and end of turn work together.")
            return
        yield _text(
            "Rows, template, mask and the mark of the end fit together: the model learned. What it has done so far is "
            "overfitting: it knows these rows by heart, which says nothing about others. The real run learns from all rows, "
            "and rows that it never sees tell whether it has understood: their loss must fall, too, and a training is long "
            "enough when that one rises again."
        )
        yield GAP
        yield Block("title", "The config of the real run comes next; it starts when you say so there.")
        yield _text("Before that you can talk to this model: its run has a chat, beside the model that knew nothing.")
        if self.model == TINY and self.rows != DATES:
            yield GAP
            yield Block(
                "warn",
                "builtin/tiny is a toy that has read nothing. For rows of your own name a real model at the step Model.",
            )


def _about_machine(machine: Machine | None) -> Iterator[Block]:
    yield _text(
        "In about five minutes you will see a model learn rows, know why it did, and have a config for your own training. "
        "Your rows stay on this machine."
    )
    yield GAP
    if machine is None:
        yield Block("dim", "Looking at this machine …")
        return
    yield Block("title", machine_text(machine))
    if machine.gpus:
        yield _text("There is a GPU: models of billions of parameters can be trained here, small ones in minutes.")
    else:
        yield _text(
            "There is no GPU: a tiny model learns here in a minute, one of half a billion parameters in hours. A config "
            "made here runs on a machine with a GPU as it is; `workbench check FILE --for 1xH100-80GB` tells whether "
            "it fits there."
        )


def _about_goal() -> Iterator[Block]:
    yield _text(
        "A language model guesses the next piece of text. Fine-tuning shows it examples and moves its weights a little "
        "after each, so that the guesses come nearer to yours."
    )
    yield GAP
    yield Block("title", "This guided run teaches a model to answer like your examples.")
    others = ", ".join(goal.description[0].lower() + goal.description[1:] for goal in CHOICES[1:])
    yield _text(f"Other goals begin at a new config: {others}.")


def choices(page: str) -> tuple[Goal, ...]:
    """What can be chosen on a page."""
    return CHOICES if page == "goal" else ()


def about_choice(goal: Goal) -> list[Block]:
    """The page of the goal where one can choose: what training does, the question, and what this goal leads to."""
    first, own = next(_about_goal()), goal is CHOICES[0]
    then = (
        "This guided run shows it, first with a tiny model." if own else "It begins at a new config, with its own rows."
    )
    return [first, GAP, Block("title", QUESTION), Block("dim", f"{goal.note} {then}")]


def _brief(text: str) -> str:
    """As much of a text as tells it apart, on one line."""
    text = " ".join(text.split()) or "(nothing)"
    return visible(text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN].rstrip() + " …")


def _pieces(tokens: list[Any], most: int = 24) -> str:
    """`‹What› ‹␣is› ‹␣the›`: the texts of tokens, kept apart. Of many the first and the last, where marks of the template stand."""
    texts = [f"‹{visible(str(token['text']).replace(chr(10), _BREAK)).replace(' ', _SPACE)}›" for token in tokens]
    if len(texts) > most:
        texts = [*texts[: most * 2 // 3], "…", *texts[-(most // 3) :]]
    return " ".join(texts)


def _text(words: str) -> Block:
    return Block("text", words)
