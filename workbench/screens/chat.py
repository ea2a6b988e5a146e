"""The chat: a run's model and its base, or two of them, side by side on what a person writes.

The session (`engine.session.chat`) owns turns and the process that answers; the screen looks at it ten times a second and
draws what is new, so a token from the process never waits for the screen and typing never for a token. A text that is sent
while the model loads waits for it. The process goes with the screen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Input, Static

from engine.errors import WorkbenchError, full_text, visible
from engine.figures import number
from engine.run.store import RunFolder
from engine.session.chat import ChatSession, who_answers
from engine.session.conversation import Answer, Settings, Turn
from workbench.actions import bindings, key_line
from workbench.panels.bars import Bar, KeyLine, TextBar
from workbench.panels.drawn import Scrolled
from workbench.panels.paint import Line, clean, cut, paragraph, side_by_side, wrap
from workbench.screens.dialog import Ask, Item, Pick, Show

LOOK_SECONDS = 0.1
MESSAGE_SECONDS = 8.0
BESIDE = 56
"""Columns from which two answers stand side by side."""
HELP = {
    "temperature": "0 takes the likeliest token, 1 draws as the model gives",
    "top_p": "draws from the likeliest tokens that make this share together",
    "max_new_tokens": "the longest answer",
    "seed": "equal seeds draw equal tokens",
    "system": "the system prompt, before the conversation",
}


class ChatView(Scrolled):
    """What was said, each turn with its answers beside one another."""

    DEFAULT_CSS = "ChatView { height: 1fr; padding: 0 1; }"
    session: ChatSession | None = None
    waiting = ""
    """What was sent before the model was there."""
    _newest = 0
    """The line on which the newest turn begins."""
    _held = 0
    """The turn that was brought back into view, by its number."""

    def lines(self, width: int) -> list[Line]:
        """Notes, then the turns."""
        session = self.session
        if session is None:
            return []
        drawn: list[Line] = []
        for note in session.notes:
            drawn += paragraph(clean(note), width, "dim")
        for tool in session.conversation.tools:
            drawn += paragraph(clean(f"tool {_tool_name(tool)}"), width, "dim")
        if session.kind != "text" and session.conversation.subject:
            drawn += _text(session.conversation.subject, width, {"score": "prompt  ", "rank": "query  "}[session.kind])
        for turn in session.conversation.turns:
            drawn += [[]] if drawn else []
            self._newest = len(drawn)
            if session.kind != "rank":
                drawn += _text(turn.prompt, width, "you  " if session.kind == "text" else "answer  ")
            drawn += self._answers(session, turn, width)
        if self.waiting:
            drawn += [[]] if drawn else []
            drawn += _text(self.waiting, width, "you  " if session.kind == "text" else "")
        return drawn

    def _answers(self, session: ChatSession, turn: Turn, width: int) -> list[Line]:
        beside = len(turn.answers) if width >= BESIDE else 1
        room = (width - 3 * (beside - 1)) // beside
        blocks = [_answer(who.title, answer, room) for who, answer in zip(session.who, turn.answers, strict=True)]
        return (
            side_by_side(blocks, room, (" │ ", "faint")) if beside > 1 else [line for block in blocks for line in block]
        )

    def follow(self) -> None:
        """Draw anew; a view that showed the end goes on showing it. An answer that is whole is not scrolled away by a longer
        one beside it: the turn is shown from its first line, once."""
        at_end = self.top >= len(self.rendered_lines) - self.size.height
        self.redraw()
        turns = self.session.conversation.turns if self.session is not None else []
        answers = turns[-1].answers if turns else []
        if not at_end:
            return
        self.scroll_lines(len(self.rendered_lines))
        whole = len(answers) > 1 and any(answer.done for answer in answers)
        if whole and self._held != len(turns) and self.top > self._newest:
            self._held = len(turns)
            self.scroll_lines(self._newest - self.top)


def _tool_name(tool: Any) -> str:
    inner = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(inner.get("name", "without a name") if isinstance(inner, dict) else "without a name")


def _text(text: str, width: int, head: str = "") -> list[Line]:
    """A text of several lines, safe to draw, its beginnings of lines kept."""
    drawn: list[Line] = []
    room = max(8, width - len(head))
    for line in visible(text, lines=True).replace("\t", "    ").split("\n"):
        bare = line.lstrip(" ")
        indent = line[: min(len(line) - len(bare), room // 2)]
        for piece in wrap(bare, room - len(indent)):
            drawn.append([(head if not drawn else " " * len(head), "accent"), (indent + piece, "")])
    return drawn


def _answer(title: str, answer: Answer, width: int) -> list[Line]:
    body = _text(answer.text + ("" if answer.done else "▌"), width)
    below = paragraph(clean(answer.note()), width, "bad" if answer.problem else "dim") if answer.note() else []
    return [[(cut(clean(title), width), "bold")], *body, *below]


def _write_on(screen: Screen[None], text: str) -> None:
    """What was sent and did not arrive stands in the line again."""
    line = screen.query_one("#words", Input)
    line.value = text + line.value
    line.cursor_position = len(line.value)
    screen.query_one(ChatView).redraw()


class ChatScreen(Screen[None]):
    """Talk to the sides of a chat."""

    NAME = "chat"
    BINDINGS: ClassVar[list[BindingType]] = bindings("chat")
    DEFAULT_CSS = """
    ChatScreen #head { height: 2; border-bottom: solid $wb-line; }
    ChatScreen #foot { height: auto; border-top: solid $wb-line; }
    ChatScreen #line { height: 1; }
    ChatScreen #sign { width: 3; color: $accent; }
    ChatScreen Input { width: 1fr; background: $background; }
    """

    def __init__(self, session: ChatSession, begin: str = "") -> None:
        """`begin` stands in the line at first, to be asked by Enter."""
        super().__init__()
        self.session, self._begin = session, begin
        self._drawn = -1
        self._queued: str | None = None
        self._message, self._message_until = "", 0.0

    def compose(self) -> ComposeResult:
        """Who answers, what was said, what goes on, the line to write in, keys."""
        yield Bar("head")
        yield ChatView()
        with Vertical(id="foot"):
            yield TextBar("status")
            with Horizontal(id="line"):
                yield Static(" > ", id="sign", markup=False)
                yield Input(self._begin, compact=True, id="words", select_on_focus=False)
            yield KeyLine("chat")

    def on_mount(self) -> None:
        """Start loading; the line can be written in at once."""
        self.app.watched = self.session.who[0].run  # type: ignore[attr-defined]
        self.query_one(ChatView).session = self.session
        self.query_one("#words", Input).focus()
        self.session.load()
        self._poll()
        self.set_interval(LOOK_SECONDS, self._poll)

    def on_unmount(self) -> None:
        """The process goes, without the app waiting for it."""
        threading.Thread(target=self.session.close, name="chat-close").start()

    # -- drawing -------------------------------------------------------------------------------------------------------
    def _poll(self) -> None:
        session = self.session
        if self._queued is not None and session.state == "ready":
            text = self._unqueue()
            if not self._send(text):
                _write_on(self, text)
        if session.version != self._drawn:
            self._drawn = session.version
            self.query_one(ChatView).follow()
        self._draw_bars()

    def _draw_bars(self) -> None:
        session, width = self.session, max(10, self.app.size.width - 2)
        titles = "  |  ".join(clean(who.title) for who in session.who)
        how = f"temperature {number(session.conversation.settings.temperature)}" if session.kind == "text" else ""
        gap = " " * max(2, width - Content(titles).cell_length - len(how) - 7)
        self.query_one("#head", Bar).update(Content.styled(cut(f" chat  {titles}{gap}{how}", width), "bold"))
        words, look = self._status()
        # An answer to a key or an error has a way out at its end, so it is shown whole.
        self.query_one("#status", TextBar).write_wrapped(words, style=look)
        self.query_one("#words", Input).placeholder = _HINTS[session.conversation.wants]
        answering = session.state == "answering"
        keys = key_line("chat", "answering" if answering else "quiet", session.kind)
        back = "back" if self._queued is None else "take back"
        keys = keys if answering else [("esc", back), *keys]
        self.query_one(KeyLine).use(keys)

    def _status(self) -> tuple[str, str]:
        session = self.session
        if self._message and time.monotonic() < self._message_until:
            return self._message, "$accent"
        seconds = time.monotonic() - session.phase_since
        if session.state == "loading":
            later = "; what you sent waits for it, esc takes it back" if self._queued is not None else ""
            return f"{session.phase} … {seconds:.0f} s{later}", "$wb-dim"
        if session.state == "failed":
            return f"{session.problem} Enter loads again.", "$error"
        if session.state == "answering":
            return "answering … esc stops it", "$wb-dim"
        return f"ready on the {_device(session)}", "$wb-dim"

    def _show_message(self, words: str) -> None:
        self._message, self._message_until = words, time.monotonic() + MESSAGE_SECONDS
        self._draw_bars()

    # -- talking -------------------------------------------------------------------------------------------------------
    @on(Input.Submitted, "#words")
    def _enter(self, event: Input.Submitted) -> None:
        session = self.session
        if session.state == "failed":
            session.load()
            return
        if not event.value.strip():
            return
        if session.state == "loading" and self._queued is None:
            self._queued = self.query_one(ChatView).waiting = event.value
            event.input.clear()
            self.query_one(ChatView).follow()
            self._draw_bars()
        elif self._send(event.value):
            event.input.clear()

    def _unqueue(self) -> str:
        """The text that waits for the model, which it does no longer."""
        text, self._queued = self._queued or "", None
        view = self.query_one(ChatView)
        view.waiting = ""
        view.redraw()
        return text

    def _send(self, text: str) -> bool:
        try:
            self.session.send(text)
        except WorkbenchError as problem:
            self._show_message(problem.full_message)
            return False
        view = self.query_one(ChatView)
        view.redraw()
        view.scroll_lines(len(view.rendered_lines))
        return True

    def _do(self, act: Callable[[], object]) -> None:
        try:
            act()
        except WorkbenchError as problem:
            self._show_message(problem.full_message)

    def action_again(self) -> None:
        """The newest text once more, with the settings as they are now."""
        self._do(self.session.retry)

    def action_renew(self) -> None:
        """A new conversation."""
        self._do(self.session.renew)

    def action_halt(self) -> None:
        """Stops an answer; where none is made, takes back what waits for the model, or goes back."""
        if self.session.state == "answering":
            self.session.stop()
        elif self._queued is not None:
            _write_on(self, self._unqueue())
        else:
            self.app.action_leave()  # type: ignore[attr-defined]

    def action_scroll(self) -> None:
        """The keys go to what was said, or back to the line."""
        line = self.query_one("#words", Input)
        (self.query_one(ChatView) if line.has_focus else line).focus()

    # -- looking and setting -------------------------------------------------------------------------------------------
    def action_template(self) -> None:
        """The exact text that each side reads, with its tokens."""
        if self.session.state != "ready" or self.session.kind != "text":
            self._show_message("The rendered prompt is shown once the model is there and no answer is being made.")
            return
        words = self.query_one("#words", Input).value
        self.run_worker(
            lambda: self._find_prompts(words), thread=True, exclusive=True, group="template", exit_on_error=True
        )

    def _find_prompts(self, words: str) -> None:
        texts: list[tuple[str, str]] = []
        try:
            for side, who in enumerate(self.session.who):
                prompt = self.session.prompt(side, words).result(30)
                texts.append((f"{who.title}: {prompt['tokens']} tokens", prompt["text"]))
        except (WorkbenchError, TimeoutError) as problem:
            self.app.call_from_thread(self._show_message, full_text(problem))
            return
        if len({text for _, text in texts}) == 1:
            texts = texts[:1]
        shown = "\n\n".join(f"{head}\n{text}" for head, text in texts)
        self.app.call_from_thread(self.app.push_screen, Show("What the model reads", visible(shown, lines=True)))

    def action_settings(self) -> None:
        """How tokens are chosen, and the system prompt."""
        values = {field.name: getattr(self.session.conversation.settings, field.name) for field in fields(Settings)}
        items = [
            Item(name, Content.assemble((f"{name}  ", "bold"), clean(value) or "none"), Content(f"   {HELP[name]}"))
            for name, value in values.items()
        ]

        def chosen(name: str | None) -> None:
            if name is not None:
                self.app.push_screen(
                    Ask(name, str(values[name]), HELP[name]), lambda text: self._do(lambda: put(name, text))
                )

        def put(name: str, text: str | None) -> None:
            if text is not None:
                settings = self.session.conversation.settings.changed(name, text)
                self.session.conversation.settings = settings
                self._show_message(f"{name} is set; ^r answers once more with it.")

        self.app.push_screen(Pick("Settings of the chat", items), chosen)

    def action_save(self) -> None:
        """The conversation as rows to train on."""

        def save(path: Path) -> None:
            rows = self.session.conversation.save(path)
            self._show_message(f"{rows} row{'' if rows == 1 else 's'} written to {path}.")

        def named(name: str | None) -> None:
            if name:
                self._do(lambda: save(Path(name).expanduser()))

        name = f"chat-{self.session.who[0].run.id}"
        free = next(path for count in range(1, 1 << 20) if not (path := Path(f"{name}-{count}.jsonl")).exists())
        note = "A row for each side; answers that were cut are flagged as not trained."
        self.app.push_screen(Ask("Save the conversation as JSONL rows", str(free), note), named)


def chat_of(run: RunFolder) -> ChatSession:
    """A run's newest whole checkpoint beside its base. Raises WorkbenchError where there is nothing to talk to."""
    return ChatSession(who_answers([run]))


_HINTS = {
    "prompt": "write here",
    "answer": "an answer to score",
    "query": "the query",
    "text": "a text to rank",
}


def _device(session: ChatSession) -> str:
    sides = session.loaded.get("sides") or [{}]
    return "GPU" if sides[0].get("device") == "cuda" else "CPU"
