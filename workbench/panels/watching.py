"""The drawn panels of the monitor: what a run's view says, as lines. They read a `RunView` and keep nothing.

Colour is never alone: a state is a sign and a word, what is better or worse is said by numbers.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

from rich.cells import cell_len
from textual.content import Content

from engine.figures import brief, count, duration, number, percent, size, size_of
from engine.figures import doing as doing_words
from engine.run import silence, stopping
from engine.run.best import best_text
from engine.run.curves import concern, format_metric, leading, titled, watch_for
from engine.run.ending import End, done_text
from engine.run.phases import TITLE, before_first_step, reason
from engine.run.view import RunView
from engine.session.run_messages import NO_RECEIPT, NO_SAMPLES, NO_WORDS, damaged, sample_time
from workbench.panels.bars import Bar, TextBar
from workbench.panels.drawn import Drawn, Scrolled
from workbench.panels.glyphs import ascii_only, sign, style_of
from workbench.panels.paint import Line, clean, columns, cut, fold, paragraph


def doing(view: RunView) -> str:
    """What goes on beside the steps: the phase and how far it is."""
    return clean(doing_words(view.progress)) if view.progress else clean(view.phase)


def adapter_of(view: RunView) -> str:
    """LoRA or the like, as the receipt has it; nothing for full weights."""
    effective = next((str(entry["effective"]) for entry in view.receipt if entry["feature"] == "adapter"), "")
    return clean(effective).split(" ")[0].replace("lora", "LoRA") if effective.lower() not in ("", "none") else ""


class RunBar(Bar):
    """Name, method, step of how many, time left; the state at the right; below it how much of the run is done."""

    DEFAULT_CSS = "RunBar { height: 2; }"

    def show(self, view: RunView, loading: float) -> None:
        """Draw this view."""
        width = self.size.width
        state = style_of(view.state)
        right = f"{sign(view.state)} {state.word}"
        method = view.method.upper() if len(view.method) < 6 else view.method
        parts = [clean(view.id), clean(f"{method} {adapter_of(view)}".strip()), *self._progress(view)]
        if loading < 1:
            parts.append(f"reading the curve {percent(loading)}")
        room = max(10, width - len(right) - 4)
        filled = [part for part in parts if part]
        for spare in (lambda part: part.endswith("%"), lambda part: part == parts[1]):  # the line below shows the share
            if cell_len("   ".join(filled)) > room:
                filled = [part for part in filled if not spare(part)]
        left = cut("   ".join(filled), room)
        space = max(1, width - Content(left).cell_length - len(right) - 2)
        share = view.step / view.max_steps if view.max_steps else None
        if view.state in ("queued", "starting"):
            known = view.progress or {}
            share = known["done"] / known["total"] if known.get("total") and known.get("done") is not None else None
        done = round(width * min(1.0, share)) if share else 0
        line, rest = ("=", "-") if ascii_only() else ("━", "─")
        self.update(
            Content.assemble(
                (f" {left}", "bold"), " " * space, (right, f"bold {state.colour}"), "\n",
                (line * done, state.colour), (rest * (width - done), "$wb-line"),
            )
        )  # fmt: skip

    @staticmethod
    def _progress(view: RunView) -> list[str]:
        if view.state in ("queued", "starting"):
            return [doing(view) or "its process is starting", silence.describe(view.silent_seconds)]
        parts = []
        if view.max_steps:
            parts += [f"step {count(view.step)} of {count(view.max_steps)}", percent(view.step / view.max_steps)]
        elif view.step:
            parts.append(f"step {count(view.step)}")
        if view.over and view.seconds:
            parts.append(f"took {duration(view.seconds)}")
        elif view.silent_seconds is not None:
            parts.append(silence.describe(view.silent_seconds))
        elif (left := view.seconds_left()) is not None and not view.over:
            parts.append(f"{duration(left)} left")
        return parts


class Numbers(Drawn):
    """Newest values at the right edge, with units; what does not fit the height is left out, the least wanted first."""

    DEFAULT_CSS = "Numbers { width: 27; height: 100%; padding: 0 0 0 1; border-left: solid $wb-line; }"
    view: RunView | None = None

    def lines(self, width: int) -> list[Line]:
        """One value a line; what is not known is left out."""
        if self.view is None:
            return []
        groups = [group for of in (_speed, _device, _method, _other) if (group := of(self.view))]
        drawn: list[Line] = []
        for group in groups:
            gap = 1 if drawn else 0
            room = self.size.height - len(drawn) - gap
            if room < min(2, len(group)):
                break
            drawn += [[]] * gap
            drawn += [columns(label, text, width, "value") for label, text in group[:room]]
        return drawn or _way(self.view, width)


def _way(view: RunView, width: int) -> list[Line]:
    """The way to the first step, while there is none: what is done, what goes on and how long, what comes next."""
    phases = before_first_step(view)
    if not phases:
        return [[("no values yet", "faint")]]
    done, here = ("* ", "> ") if ascii_only() else ("✓ ", "▸ ")
    signs = {"done": (done, "dim"), "now": (here, "here"), "later": ("  ", "faint")}
    drawn: list[Line] = [[(TITLE, "dim")]]
    for phase in phases:
        sign, style = signs[phase.state]
        drawn.append([(sign, style), *columns(phase.word, phase.time, width - 2, style)])
        if phase.state == "now" and (words := doing(view)) and view.progress:
            drawn += [[("  ", ""), *line] for line in paragraph(words, width - 2, "dim")]
        if phase.state == "now" and (why := clean(reason(view))):
            drawn += [[("  ", ""), *line] for line in paragraph(why, width - 2, "dim")]
    return drawn


def _speed(view: RunView) -> list[tuple[str, str]]:
    latest = view.latest
    rows = [
        ("tokens/s", "tokens_per_second", count),
        ("step", "step_seconds", brief),
        ("data wait", "data_seconds", brief),
        ("MFU", "mfu", lambda share: percent(share, 1)),
    ]
    figures = [(label, show(latest[key])) for label, key, show in rows if key in latest]
    if (slowest := view.slowest) is not None:
        figures.append(("slowest", f"rank {slowest[0]} +{brief(slowest[2])}"))
    elif view.ranks:
        figures.append(("ranks", f"{len(view.ranks)} alike"))
    return figures


def _device(view: RunView) -> list[tuple[str, str]]:
    latest, gpus = view.latest, view.gpu
    rows: list[tuple[str, str]] = []
    if len(gpus) == 1:
        card = gpus[0]
        used = card.get("memory_used") or latest.get("memory_allocated")
        total = card.get("memory_total")
        rows.append(("memory", size_of(used, total, "/", 0) if used and total else size(used)))
    elif "memory_allocated" in latest:
        rows.append(("memory", size(latest["memory_allocated"])))
    if "memory_peak" in latest:
        rows.append(("peak", size(latest["memory_peak"])))
    for card in gpus[:8]:
        name = "GPU" if len(gpus) == 1 else f"GPU {card.get('index', '')}"
        heat = f"{number(card.get('temperature'))} C" if card.get("temperature") is not None else ""
        power = f"{number(card.get('power'))} W" if card.get("power") is not None else ""
        load = percent((card.get("load") or 0) / 100)
        rows.append((name, " ".join(part for part in (load, heat, power) if part)))
    return rows


def _method(view: RunView) -> list[tuple[str, str]]:
    latest = view.latest
    names = [name for group in leading(view.method, latest) for name in group]
    rows = [
        (titled(name), format_metric(name, latest[name])) for name in names if name in latest and name not in _SHOWN
    ]
    above = ["", *(label for label, _ in rows)]
    # Right below the number of the rows that are learned, the held-out one needs no name of its own.
    return [
        ("  held-out" if label == f"held-out {before}" else label, text)
        for before, (label, text) in zip(above, rows, strict=False)
    ]


def _other(view: RunView) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if view.epoch is not None:
        # By the steps: the trainer's own number of epochs is rounded up where run.max_steps ends the run within one.
        whole = round(view.epoch * view.max_steps / view.step, 2) if view.max_steps and view.step else None
        rows.append(("epoch", f"{view.epoch:.2f} of {whole:g}" if whole else f"{view.epoch:.2f}"))
    rows += [(label, count(view.latest[key])) for label, key in _TOKENS if key in view.latest]
    return rows


_SHOWN = ("tokens_per_second", "memory_allocated", "memory_peak")  # by other words in the groups above
_TOKENS = (("tokens", "tokens"), ("trained", "trained_tokens"))


class PinnedPrompts(Drawn):
    """The newest answers to the pinned prompts, beside the one before and the first one: two lines a prompt."""

    DEFAULT_CSS = "PinnedPrompts { height: 3; border-top: solid $wb-line; padding: 0 1; }"
    view: RunView | None = None

    def lines(self, width: int) -> list[Line]:
        """Prompt and newest answer; first answer and the one before the newest."""
        samples = self.view.samples if self.view else []
        if not samples:
            words = "no pinned prompts in this run: run.prompts sets them"
            return [[(words if self.view and self.view.series else "", "faint")]]
        drawn: list[Line] = []
        for index in sorted({sample["index"] for sample in samples})[: max(1, self.size.height // 2)]:
            answers = [sample for sample in samples if sample["index"] == index]
            first, newest = answers[0], answers[-1]
            drawn.append(self._pair(clean(newest["prompt"]), newest, width, "given"))
            if len(answers) > 1:
                words = f"{_when(first)}: {answered(first)}"
                drawn.append(self._pair(words, answers[-2] if len(answers) > 2 else None, width, "faint"))
            else:
                drawn.append([])
        return drawn

    @staticmethod
    def _pair(left: str, sample: dict[str, Any] | None, width: int, style: str) -> Line:
        right = cut(f"{_when(sample)}: {answered(sample)}", width // 2) if sample else ""
        return columns(left, right, width, style, "dim")


def answered(sample: dict[str, Any]) -> str:
    """An answer in one line; blanks alone would look like no answer at all."""
    return clean(sample["completion"]) if str(sample["completion"]).strip() else NO_WORDS


def _when(sample: dict[str, Any]) -> str:
    return sample_time(sample["step"])


_UNKNOWN = End()


class StatusLine(TextBar):
    """What happens now: the last answer to a person, a request on its way, a phase, the last warning."""

    DEFAULT_CSS = "StatusLine { height: 1; }"

    def __init__(self) -> None:
        super().__init__()
        self._message, self._until = "", 0.0

    def show_message(self, words: str, seconds: float) -> None:
        """An answer to a person, which stands before all else for so long; shown by the next `show`."""
        self._message, self._until = words, time.monotonic() + seconds

    @property
    def over(self) -> bool:
        """Whether an answer has stood long enough, and is gone now."""
        if not self._message or time.monotonic() < self._until:
            return False
        self._message = ""
        return True

    def show(self, view: RunView, waiting: str = "", end: End = _UNKNOWN, of: str = "") -> None:
        """Draw the most pressing of them; `waiting` is a request that has no answer yet, `end` what a run that is over left, `of`
        whose page is shown, which stays beside all but an answer."""
        text, style = self._choose(view, self._message, waiting, end)
        text = f"{of}  {text}".strip() if of and not self._message else text
        if self._message or view.over:
            self.write_wrapped(text, style=style)
        else:
            self.write(text, style=style)

    @staticmethod
    def _choose(view: RunView, message: str, waiting: str, end: End) -> tuple[str, str]:
        last = list(view.controls.values())[-1] if view.controls else None
        answer = stopping.answered(last) if last else ""
        if message:
            return message, "$accent"
        if waiting:
            return waiting, "$accent"
        if last and last["status"] == "accepted" and not view.over:
            return answer, "$accent"
        if view.silent_seconds is not None:
            return f"! {silence.describe(view.silent_seconds)}: its worker may hang; K shows where it is", "$warning"
        if view.progress and not view.over and view.state != "starting":
            return doing(view), "$wb-dim"
        if view.restarts and view.step <= view.restarts[-1]["step"] and not view.over:
            return f"! {view.restarts[-1]['message']}", "$warning"
        if view.diverged:
            return f"! not finite at step {view.diverged[-1]['step']}: {view.diverged[-1]['what']}", "$error"
        finding = f"! {view.findings[-1]['message']}" if view.findings else ""
        if view.state == "finished" and not view.cause and view.committed:
            return f"{done_text(view, end)}  {finding}".rstrip(), "$wb-dim"
        if view.state == "stopped":
            steps = view.committed
            kept = f"checkpoint-{steps[-1]} is kept, R goes on from it" if steps else "no checkpoint is kept"
            return f"{view.cause or 'stopped'}: {kept}", "$wb-dim"
        if not view.over and (words := concern(view.method, view.series)):
            return f"! {words}", "$warning"
        if not view.over and view.slowest_text:
            return f"! {view.slowest_text}: 8 shows all", "$warning"
        if finding:
            return finding, "$warning"
        if last and last["status"] == "refused":
            return answer, "$warning"
        if view.bad_lines:
            return f"! {damaged(view)}", "$warning"
        if view.state == "finished" and view.cause:
            return ". ".join(part for part in (view.cause, best_text(view)) if part), "$wb-dim"
        return answer or ("" if view.over else watch_for(view.method, view.series)), "$wb-dim"


class Samples(Scrolled):
    """Every pinned prompt with its answers, newest first."""

    view: RunView | None = None

    def lines(self, width: int) -> list[Line]:
        """A block a prompt."""
        samples = self.view.samples if self.view else []
        if not samples:
            return [[(NO_SAMPLES, "faint")]]
        drawn: list[Line] = []
        for index in sorted({sample["index"] for sample in samples}):
            answers = [sample for sample in samples if sample["index"] == index]
            if drawn:
                drawn.append([])
            drawn += paragraph(clean(answers[0]["prompt"]), width, "accent")
            for place, (first, last) in enumerate(reversed(_runs_of_equal(answers))):
                when = _when(last) if first is last else f"{_when(first)} to {count(last['step'])}"
                head = f"{when:>20}  "
                style = "given" if place == 0 else "value"
                body = paragraph(answered(last), width - len(head), style)
                drawn += [[(head if row == 0 else " " * len(head), "dim"), *line] for row, line in enumerate(body)]
        return drawn


def _runs_of_equal(answers: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(first, last) of each stretch of answers that are the same, oldest first; the one before training stands alone."""
    spans: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for sample in answers:
        if spans and spans[-1][0]["step"] and spans[-1][1]["completion"] == sample["completion"]:
            spans[-1] = (spans[-1][0], sample)
        else:
            spans.append((sample, sample))
    return spans


FAR = 1 << 30  # a line beyond the last; what is painted is the last page


class Lines(Scrolled):
    """Plain lines of text: the log, the config. What is longer than the panel is wide goes on below."""

    texts: tuple[str, ...] = ()
    empty = "Nothing yet."
    found = -1
    starts: tuple[int, ...] = ()
    """Where each text begins among the drawn lines."""

    def show(self, texts: list[str]) -> None:
        """Draw these; a reader at the end stays at the end."""
        at_end = self.top >= len(self.rendered_lines) - self.size.height if self.size else True
        if tuple(texts) != self.texts:
            self.texts, self.found = tuple(texts), -1
            if at_end:
                self.top = FAR
            self.redraw()

    def find(self, words: str) -> bool:
        """Goes to the next line that holds these words, round the end; False where none does."""
        wanted, total = words.casefold(), len(self.texts)
        start = self.found + 1 if self.found >= 0 else bisect_left(self.starts, self.top)
        for place in (index % total for index in range(start, start + total)) if total else ():
            if wanted in self.texts[place].casefold():
                self.found = place
                self.redraw()
                self.show_lines(max(0, self.starts[place] - 2), 5)
                return True
        return False

    def ground(self, y: int) -> str:
        """The line that was found stands out."""
        return "cursor" if self.found >= 0 and bisect_right(self.starts, y) - 1 == self.found else ""

    def lines(self, width: int) -> list[Line]:
        """The texts, folded; the empty log says so."""
        drawn: list[Line] = []
        starts: list[int] = []
        for text in self.texts:
            starts.append(len(drawn))
            drawn += [[(piece, "value")] for piece in fold(clean(text), width)]
        self.starts = tuple(starts)
        return drawn or [[(self.empty, "faint")]]


_RANK = "{:>6}{:>12}{:>12}{:>11}{:>12}{:>11}"
_RANK_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("tokens/s", "tokens_per_second", count),
    ("data wait", "data_seconds", brief),
    ("forward", "forward_seconds", brief),
    ("memory", "memory", size),
    ("comm wait", "communication_share", lambda share: percent(share, 1)),
)


class Ranks(Scrolled):
    """What each process of a run does by itself, a line a rank."""

    view: RunView | None = None

    def lines(self, width: int) -> list[Line]:
        """A table, and what it says; what is not known is left out."""
        view = self.view
        if view is None or not view.ranks:
            return paragraph(self._nothing(), width, "faint")
        slowest = view.slowest
        drawn: list[Line] = [[(_RANK.format("rank", *(head for head, _, _ in _RANK_COLUMNS)), "dim")]]
        for rank, figures in enumerate(view.ranks):
            cells = ("" if figures[key] is None else show(figures[key]) for _, key, show in _RANK_COLUMNS)
            late = slowest is not None and slowest[0] == rank
            row = _RANK.format(str(rank), *cells)
            drawn.append([(f"{row}  slowest" if late else row, "given" if late else "value")])
        verdict = view.slowest_text or "none stands out by a tenth of a step"
        explained = (
            f"Of one step, on average: {verdict}. Ranks wait for each other in the backward pass, so the slowest sets the pace of "
            "all and waits least itself. Comm wait is exposed communication: the share of a step in which a rank computed nothing for "
            "want of others' gradients, weights or counts. With fsdp2 they wait in the forward pass too, where layers are put "
            "together. ] and [ show the log of each."
        )
        return [*drawn, [], *paragraph(explained, width, "faint")]

    def _nothing(self) -> str:
        if self.view is not None and self.view.world_size == 1 and self.view.series:
            return "One process trains this model, so there are no ranks to compare: the numbers beside the curves are its own."
        return "Figures of each rank come with the first steps, where several processes train one model."


class Receipt(Scrolled):
    """Requested, done, on how many modules."""

    view: RunView | None = None

    def lines(self, width: int) -> list[Line]:
        """Two lines an entry: the facts, and the detail in words."""
        entries: list[dict[str, Any]] = self.view.receipt if self.view else []
        if not entries:
            return [[(NO_RECEIPT, "faint")]]
        drawn: list[Line] = []
        label = min(30, max(cell_len(clean(entry["feature"])) for entry in entries) + 2)
        for entry in entries:
            effective = _effective(entry["effective"])
            changed = entry["requested"] is not None and clean(entry["requested"]) != clean(entry["effective"])
            arrow = " -> " if ascii_only() else " → "
            times = f"  ({count(entry['count'])})" if entry["count"] and count(entry["count"]) != effective else ""
            head = f"{cut(clean(entry['feature']), label - 1):{label}}"
            parts: Line = [
                (f"{clean(entry['requested'])}{arrow}" if changed else "", "dim"),
                (effective, "given"),
                (times, "value"),
            ]
            if label + sum(cell_len(text) for text, _ in parts) <= width:
                drawn.append([(head, "dim"), *parts])
            else:
                wrapped = paragraph("".join(text for text, _ in parts), width - label, "given")
                drawn += [[(head if row == 0 else " " * label, "dim"), *line] for row, line in enumerate(wrapped)]
            if entry["detail"]:
                drawn += paragraph(clean(entry["detail"]), width, "faint", indent=" " * label)
        return drawn


def _effective(value: object) -> str:
    return count(value) if isinstance(value, int) and not isinstance(value, bool) else clean(value)
