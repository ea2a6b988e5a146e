"""What a rehearsal is asked, and whether it learned: its rows are examined before it, and judged by its events after.

Rows are pinned that are one question with one answer, since only what is asked in training's own words can be judged word
for word.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.files import place_of
from engine.config.kinds import BUILTIN_ROWS
from engine.errors import WorkbenchError, visible
from engine.figures import brief, count
from engine.run.view import RunView
from engine.session.first_rows import COLUMNAR, SourcePreview, first_rows_of
from engine.session.pages import FIRST_ROWS

DATES = "builtin/dates"
STEPS, EVERY, ASKED = 300, 10, 3
"""Steps at most, the steps between two askings, and how many questions are asked."""
ROWS = 24
MOST_TOKENS = 1024
FEWEST = 2
_SHORT = 400
"""Bytes of an answer that is asked for word for word without a thought; each token more is one that can go wrong."""
_MOST_OF_A_TOKEN = 16
"""Letters that no token of ordinary text is longer than: an answer of more than these is too long by any tokenizer."""
_KNOWN = 0.99
"""The share of learned tokens that are guessed right of rows that are known by heart."""
_SEED = 42
"""The seed of a run that names none: the built-in dates hang on it."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """A question of the rehearsal's rows, and the answer that its row gives."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Examined:
    """What the first rows of a source are to a rehearsal; `problem` where it cannot take them."""

    preview: SourcePreview
    rows: int = 0
    pinned: tuple[Pinned, ...] = ()
    contradicting: int = 0
    """Rows whose question another of them answers otherwise: no model can know both by heart."""
    first: tuple[tuple[str, str], ...] = ()
    """The first questions with their answers."""
    first_answer: str = ""
    longest_answer: int = 0
    """Bytes of the longest pinned answer: it has no more tokens."""
    problem: str = ""

    @property
    def question(self) -> str:
        """The first of the questions, with which a talk may begin; empty where it has several lines, which a person writes."""
        asked = self.pinned[0].prompt if self.pinned else ""
        return "" if "\n" in asked else asked


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a rehearsal stands: `learning`, `learned` or `failed`; for a failed one the page to look at and what to do."""

    state: str
    message: str
    page: str = ""
    todo: str = ""


def examine(path: str, base: Path) -> Examined:
    """Read the first rows of a source as question and answer; for any thread. What is wrong is part of the answer."""
    place = place_of(path, base)
    look = first_rows_of({"path": path}, base, _SEED)
    if look.problems:
        return Examined(look, problem=look.problems[0])
    if look.later:
        kind = "a folder" if Path(place).is_dir() else Path(place).suffix if place.endswith(COLUMNAR) else "of the hub"
        words = (
            f"{visible(path)}: the guided run reads JSON, JSONL and CSV files; this is {kind}. A new config reads it."
        )
        return Examined(look, problem=words)
    if place in BUILTIN_ROWS and place != DATES:
        return Examined(
            look, problem=f"{place}: the guided run reads text; `workbench new demo-images` begins with these."
        )
    asked, problem = _dates() if place == DATES else _prompts_and_answers(place)
    if problem:
        return Examined(look, problem=problem)
    if asked and all(len(answer) > MOST_TOKENS * _MOST_OF_A_TOKEN for _, answer, _ in asked):
        words = f"each answer of the first {count(len(asked))} rows is longer than the {count(MOST_TOKENS)} tokens a rehearsal reads"
        return Examined(look, problem=f"{visible(path)}: {words}. Take rows with shorter answers, or a new config.")
    if len(asked) < FEWEST:
        return Examined(look, problem=f"{visible(path)}: at least {FEWEST} rows are needed; it has {len(asked)}.")
    answers: dict[str, set[str]] = {}
    for question, answer, _ in asked:
        answers.setdefault(question, set()).add(answer)
    contradicting = sum(len(answers[question]) > 1 for question, _, _ in asked)
    pinned: dict[str, Pinned] = {}
    for question, answer, alone in asked:
        if alone and len(answers[question]) == 1:
            pinned.setdefault(question, Pinned(question, answer))
    chosen = tuple(sorted(pinned.values(), key=_hard_to_know)[:ASKED])
    longest = max((len(row.answer.encode()) for row in chosen), default=0)
    first = tuple((question, answer) for question, answer, _ in asked[:FIRST_ROWS])
    return Examined(look, len(asked), chosen, contradicting, first, asked[0][1], longest)


def _hard_to_know(row: Pinned) -> tuple[bool, int]:
    """Rows that may be left out for their length come last, since none can answer what it never read; then long answers."""
    long = len(row.prompt.encode()) + len(row.answer.encode()) > MOST_TOKENS
    return long, max(0, len(row.answer.encode()) - _SHORT)


def _dates() -> tuple[list[tuple[str, str, bool]], str]:
    from engine.builtin.dates import rows

    return [
        (row["messages"][0]["content"], row["messages"][1]["content"], True) for row in rows("train", _SEED, ROWS)
    ], ""


def _prompts_and_answers(place: str) -> tuple[list[tuple[str, str, bool]], str]:
    """Of each of the first rows: all before its last answer as one text, that answer, and whether the question stands alone."""
    from engine.data.detect import detect
    from engine.data.formats import FORMATS, read_example
    from engine.data.rows import open_rows

    asked: list[tuple[str, str, bool]] = []
    try:
        rows = open_rows(place)
        try:
            detection = detect(rows, {}, None)
            for index in range(ROWS):
                try:
                    example = read_example(rows[index], detection.format or "", detection.columns)
                except IndexError:
                    break
                turns: list[Any] = list(example.messages)
                if example.kind == "pair":
                    turns = [*_turns(example.prompt, "user"), *_turns(example.chosen, "assistant")]
                texts = [(turn.get("role"), turn.get("content")) for turn in turns]
                if not texts or texts[-1][0] != "assistant" or not all(isinstance(text, str) for _, text in texts):
                    title = FORMATS[detection.format].title if detection.format else "nothing that is known"
                    # Of turns the last may be the person's, or hold pictures.
                    what = "" if turns else f", but {title}"
                    words = f"row {index + 1} holds no question with an answer in words{what}"
                    return [], f"{visible(Path(place).name)}: {words}. For such rows take a new config."
                before = "\n".join(str(text) for _, text in texts[:-1])
                asked.append((before, str(texts[-1][1]).strip(), [role for role, _ in texts] == ["user", "assistant"]))
        finally:
            rows.close()
    except (WorkbenchError, OSError) as problem:
        return [], str(problem)
    return asked, ""


def _turns(part: Any, role: str) -> list[Any]:
    return [{"role": role, "content": part}] if isinstance(part, str) else list(part)


def judge(view: RunView, examined: Examined) -> Verdict:
    """What the events of a rehearsal say: whether the rows are known, and if it is over and they are not, why."""
    answers = answers_of(view, examined)
    loss = view.series.get("loss")
    points = loss.points()[1] if loss is not None and len(loss) else []
    right = [given[-1]["completion"].strip() == pinned.answer for pinned, given in answers]
    accurate = view.latest.get("mean_token_accuracy", 0.0) >= _KNOWN
    seconds = f" after {brief(view.seconds)}" if view.seconds else ""
    if known_at(answers) is not None:
        asked = f"all {len(right)} questions" if len(right) > 1 else "the question"
        return Verdict("learned", f"It answers {asked} word for word{seconds}: it learns these rows.")
    if not examined.pinned and accurate and view.step >= EVERY:
        words = "it was asked nothing, since no row is one question with one answer"
        return Verdict("learned", f"It guesses {_KNOWN:.0%} of the learned tokens{seconds}; {words}.")
    if view.state in ("failed", "lost"):
        return Verdict("failed", f"The rehearsal failed: {visible(view.cause)}", "rehearsal", "Its log says more.")
    if not view.over:
        return Verdict("learning", f"step {view.step}")
    if view.state == "stopped":
        return Verdict("failed", f"It was stopped at step {view.step}, before its answers were right.", "rehearsal")
    if not points or points[-1] > points[0] / 2:
        begun = f" ({points[0]:.2f} at first, {points[-1]:.2f} at the end)" if points else ""
        todo = "Read the rows once more: answers that do not follow from their questions cannot be learned."
        return Verdict("failed", f"The loss has not fallen{begun}: nothing was learned.", "rows", todo)
    wrong = [
        (pinned, given[-1]["completion"].strip()) for (pinned, given), ok in zip(answers, right, strict=True) if not ok
    ]
    if any(text.startswith(pinned.answer) for pinned, text in wrong):
        todo = "The end of the answer is not learned, or another mark ends it: look at the last learned token."
        return Verdict("failed", "It gives the right answer and does not stop.", "tokens", todo)
    if accurate:
        todo = "The question is rendered otherwise when it is asked than in training: look at the chat template."
        return Verdict("failed", "It knows the rows in training, and answers otherwise when asked.", "tokens", todo)
    todo = "Long answers need more steps than a rehearsal takes: try shorter ones; rows that contradict each other are never known."
    return Verdict("failed", f"After {view.step} steps it does not know the rows yet.", "rows", todo)


def answers_of(view: RunView, examined: Examined | None) -> list[tuple[Pinned, list[dict[str, Any]]]]:
    """Each pinned question with the answers given to it so far, the oldest first."""
    given: dict[str, list[dict[str, Any]]] = {}
    for sample in view.samples:
        given.setdefault(sample["prompt"], []).append(sample)
    return [(row, given[row.prompt]) for row in (examined.pinned if examined else ()) if row.prompt in given]


def known_at(answers: list[tuple[Pinned, list[dict[str, Any]]]]) -> int | None:
    """The first step after training began at which every pinned question was answered right, if there was one."""
    right = [
        {sample["step"] for sample in given if sample["step"] and sample["completion"].strip() == pinned.answer}
        for pinned, given in answers
    ]
    return min(set.intersection(*right), default=None) if right else None
