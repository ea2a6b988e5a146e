"""The drawn panels of the monitor: what a run's view says, as lines. They read a `RunView` and keep nothing.

Colour is never alone: a state is a sign and a word, what is learned better or worse is said by numbers.
"""

from __future__ import annotations

from typing import Any

from textual.content import Content

from engine.run.view import RunView
from workbench.panels.bars import Bar
from workbench.panels.drawn import Drawn, Scrolled
from workbench.panels.figures import brief, count, duration, number, percent, size, size_of
from workbench.panels.glyphs import look, sign
from workbench.panels.paint import Line, clean, columns, cut, paragraph

# What matters most, per method: the large chart's lines, then the two small charts.
LEADING: dict[str, tuple[tuple[str, ...], str, str]] = {
    "sft": (("loss", "eval_loss"), "grad_norm", "learning_rate"),
    "pretrain": (("loss", "eval_loss"), "grad_norm", "learning_rate"),
    "dpo": (("rewards/margins",), "loss", "rewards/accuracies"),
}
USUAL = (("loss", "eval_loss"), "grad_norm", "learning_rate")


def leading(method: str) -> tuple[tuple[str, ...], str, str]:
    """The curves that come first for a method."""
    return LEADING.get(method, USUAL)


class RunBar(Bar):
    """Name, method, step of how many, time left; the state at the right."""

    DEFAULT_CSS = "RunBar { height: 2; border-bottom: solid $wb-line; }"

    def show(self, view: RunView, loading: float) -> None:
        """Draw this view."""
        parts = [clean(view.id), view.method.upper() if len(view.method) < 6 else view.method]
        if view.max_steps:
            parts += [f"step {count(view.step)} of {count(view.max_steps)}", percent(view.step / view.max_steps)]
        elif view.step:
            parts.append(f"step {count(view.step)}")
        if view.eta_seconds is not None and not view.over:
            parts.append(f"{duration(view.eta_seconds)} left")
        if loading < 1:
            parts.append(f"reading {percent(loading)}")
        state = look(view.state)
        left = "   ".join(part for part in parts if part)
        right = f"{sign(view.state)} {state.word}"
        room = max(1, self.size.width - len(left) - len(right) - 2)
        self.say(
            Content.assemble(
                (" " + cut(left, max(10, self.size.width - len(right) - 3)), "bold"),
                " " * room,
                (right, f"bold {state.colour}"),
            )
        )


class Numbers(Drawn):
    """Newest values at the right edge, with units."""

    DEFAULT_CSS = "Numbers { width: 25; height: 100%; padding: 0 0 0 1; border-left: solid $wb-line; }"
    view: RunView | None = None

    def lines(self, width: int) -> list[Line]:
        """One value a line; what is not known is left out."""
        if self.view is None:
            return []
        view, latest = self.view, self.view.latest
        rows: list[tuple[str, str]] = []
        main, small, other = leading(view.method)
        for name in (*main, small, other):
            if name in latest:
                rows.append((name, number(latest[name])))
        rows.append(("", ""))
        rows += [
            (label, text)
            for label, key, text in (
                ("tokens/s", "tokens_per_second", count(latest.get("tokens_per_second"))),
                ("step", "step_seconds", brief(latest.get("step_seconds"))),
                ("data wait", "data_seconds", brief(latest.get("data_seconds"))),
                ("tokens", "tokens", count(latest.get("tokens"))),
                ("MFU", "mfu", percent(latest.get("mfu"), 1)),
                ("memory", "memory_allocated", size(latest.get("memory_allocated"))),
                ("peak", "memory_peak", size(latest.get("memory_peak"))),
            )
            if key in latest
        ]
        for device in view.gpu[:4]:
            rows.append(("", ""))
            rows.append((f"GPU {device.get('index', '')}", f"{number(device.get('load'))} %"))
            rows.append(("  memory", size_of(device.get("memory_used"), device.get("memory_total"))))
            rows.append(("  heat", f"{number(device.get('temperature'))} C {number(device.get('power'))} W"))
        if view.epoch is not None:
            rows.append(("epoch", f"{view.epoch:.2f} of {number(view.epochs)}" if view.epochs else f"{view.epoch:.2f}"))
        return [columns(label, text, width, "value") if label else [] for label, text in rows]


class PinnedPrompt(Drawn):
    """The newest answer to the first pinned prompt, beside the first one."""

    DEFAULT_CSS = "PinnedPrompt { height: 3; border-top: solid $wb-line; padding: 0 1; }"
    view: RunView | None = None

    def lines(self, width: int) -> list[Line]:
        """Prompt, then newest and first answer."""
        found = [sample for sample in self.view.samples if sample["index"] == 0] if self.view else []
        if not found:
            return [[("No sample prompts are set for this run (run.prompts).", "faint")]]
        first, newest = found[0], found[-1]
        answer = f"step {newest['step']}: {clean(newest['completion'])}"
        lines: list[Line] = [[(clean(newest["prompt"]), "dim"), ("  ", ""), (answer, "given")]]
        if len(found) > 1:
            lines.append([(f"step {first['step']}: {clean(first['completion'])}", "faint")])
        return lines


class StatusLine(Bar):
    """What happens now: the phase, the last answer to a request, the last warning."""

    DEFAULT_CSS = "StatusLine { height: 1; }"

    def show(self, view: RunView, said: str = "") -> None:
        """Draw the most recent of them."""
        text, style = said, "$accent"
        if not text and view.controls:
            last = list(view.controls.values())[-1]
            text, style = f"{last['do']}: {last['status']}. {last['message']}", "$accent"
        if view.diverged:
            text, style = f"! not finite since step {view.diverged[-1]['step']}: {view.diverged[-1]['what']}", "$error"
        elif not text and view.progress:
            total = view.progress.get("total")
            text = f"{view.progress.get('what', '')}: {count(view.progress.get('done'))}"
            text += f" of {count(total)}" if total else ""
        elif not text and view.state == "starting":
            text, style = view.phase, "$wb-dim"
        elif not text and view.findings:
            text, style = f"! {view.findings[-1]['message']}", "$warning"
        self.say(Content.styled(" " + cut(clean(text), max(10, self.size.width - 2)), style))


class PostMortem(Drawn):
    """Why the run ended, the lines that matter, and the way on; hidden while all is well."""

    DEFAULT_CSS = (
        "PostMortem { height: auto; max-height: 10; border-bottom: solid $wb-line; padding: 0 1; display: none; }"
    )
    view: RunView | None = None

    def show(self, view: RunView) -> None:
        """Draw the card if the run failed or was lost."""
        self.view = view
        self.display = view.state in ("failed", "lost")
        if self.display:
            self.styles.height = min(10, len(self.lines(max(20, self.app.size.width - 3))) + 1)
            self.redraw()

    def lines(self, width: int) -> list[Line]:
        """Cause, log lines, what to do."""
        view = self.view
        if view is None:
            return []
        made: list[Line] = [*paragraph(f"✗ {clean(view.cause or 'The run ended without a word.')}", width, "bad")]
        made += [[("  " + cut(clean(line), width - 2), "dim")] for line in view.cause_lines[-4:]]
        kept = [entry["step"] for entry in view.checkpoints if entry.get("state") == "committed"]
        way = f"R goes on from step {max(kept)}." if kept else "No checkpoint was kept; R starts again."
        made.append([("  " + way + "  3 shows the whole log.", "accent")])
        return made


class Samples(Scrolled):
    """Every pinned prompt with its answers, newest first."""

    view: RunView | None = None

    def lines(self, width: int) -> list[Line]:
        """A block a prompt."""
        samples = self.view.samples if self.view else []
        if not samples:
            return [[("No samples. Set run.prompts to see answers change while the model learns.", "faint")]]
        made: list[Line] = []
        for index in sorted({sample["index"] for sample in samples}):
            answers = [sample for sample in samples if sample["index"] == index]
            if made:
                made.append([])
            made += paragraph(clean(answers[0]["prompt"]), width, "accent")
            for sample in reversed(answers):
                head = f"  step {count(sample['step']):>8}  "
                body = paragraph(clean(sample["completion"]), width - len(head), "value")
                made += [
                    [(head if place == 0 else " " * len(head), "dim"), *line] for place, line in enumerate(body or [[]])
                ]
        return made


class Lines(Scrolled):
    """Plain lines of text: the log, the config."""

    texts: tuple[str, ...] = ()
    style_name = "value"

    def show(self, texts: list[str]) -> None:
        """Draw these; a reader at the end stays at the end."""
        at_end = self.top >= len(self.made) - self.size.height if self.size else True
        if tuple(texts) != self.texts:
            self.texts = tuple(texts)
            self.redraw()
            if at_end:
                self.scroll_lines(len(texts))

    def lines(self, width: int) -> list[Line]:
        """One line of text, one line; the empty log says so."""
        return [[(cut(clean(text), width), self.style_name)] for text in self.texts] or [[("Nothing yet.", "faint")]]


class Receipt(Scrolled):
    """Requested, done, on how many modules."""

    view: RunView | None = None

    def lines(self, width: int) -> list[Line]:
        """Two lines an entry: the facts, and the detail in words."""
        entries: list[dict[str, Any]] = self.view.receipt if self.view else []
        if not entries:
            return [[("The receipt is written before the first step.", "faint")]]
        made: list[Line] = []
        for entry in entries:
            requested = "" if entry["requested"] is None else f"{clean(entry['requested'])} → "
            number_of = "" if entry["count"] is None else f"  ({count(entry['count'])})"
            made.append(
                [
                    (f"{clean(entry['feature']):22}", "dim"),
                    (requested, "dim"),
                    (clean(entry["effective"]), "given"),
                    (number_of, "value"),
                ]
            )
            if entry["detail"]:
                made += paragraph(clean(entry["detail"]), width, "faint", indent=" " * 22)
        return made


def kept_text(view: RunView) -> str:
    """What a run that dies now has kept, in words."""
    kept = [entry["step"] for entry in view.checkpoints if entry.get("state") == "committed"]
    if not kept:
        return "Nothing is kept yet: there is no checkpoint."
    lost = view.step - max(kept)
    seconds = lost * view.step_seconds if view.step_seconds else None
    behind = f"{count(lost)} steps" + (f", about {brief(seconds)}," if seconds else "") + " would be lost"
    return f"The last checkpoint is step {count(max(kept))}; {behind if lost else 'nothing would be lost'}."


__all__ = [
    "Lines",
    "Numbers",
    "PinnedPrompt",
    "PostMortem",
    "Receipt",
    "RunBar",
    "Samples",
    "StatusLine",
    "kept_text",
    "leading",
]
