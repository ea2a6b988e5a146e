"""A chat template looked at and written: a row of the draft as it writes it, which follows what is typed; and saving it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.config.files import absolute
from engine.config.tree import fields
from engine.errors import UsageError, WorkbenchError, visible
from engine.figures import count
from engine.session.collector import Ask, NewestQuestion
from engine.session.draft import Draft, write

TYPED_SECONDS = 0.3
"""After the newest letter, before a row is asked for: each question takes a process of its own."""


class TemplateEditing:
    """One template as it is typed. `wake` may come from any thread; then `poll` takes what came."""

    def __init__(self, draft: Draft, ask: Ask, wake: Callable[[], object] = lambda: None, row: int = 0) -> None:
        self.draft, self.row, self.wake = draft, row, wake
        self.text: str | None = None
        """What was typed; None while it is the config's own."""
        self.found: Mapping[str, Any] = {}
        """What the newest answer says (`engine.data.template_view.rendered`)."""
        self.problem = ""
        self._question = NewestQuestion(ask, lambda: self.wake())
        self._asked: tuple[int, str | None] | None = None
        self._answered: tuple[int, str | None] | None = None

    @property
    def changed(self) -> bool:
        """Whether something else is typed than the config's template."""
        return self.text is not None

    def type(self, text: str) -> None:
        """This is the template from now on; `send` asks for the row."""
        self.text = None if self.text is None and text == self.found.get("text") else text

    def go(self, row: int) -> None:
        """Look at another row."""
        self.row = max(0, row)
        self.send()

    def send(self) -> None:
        """Ask for the row as the template writes it; a newer question takes the place of an older."""
        self._asked = (self.row, self.text)
        config = absolute(self.draft.mapping, self.draft.base)
        self._question.send("rendered", config=config, base=str(self.draft.base), row=self.row, text=self.text)

    @property
    def open(self) -> bool:
        """Whether an answer is still to come."""
        return self._question.open

    def poll(self) -> bool:
        """Take the answer, if there is one. Of a template that cannot write the row the last that could stays."""
        found = self._question.take()
        if found is None:
            return False
        self._answered = self._asked
        if isinstance(found, WorkbenchError):
            self.problem = found.full_message
            return True
        self.problem = str(found["problem"])
        same = found["row"] == self.found.get("row")
        self.found = {**found, "turns": self.found["turns"]} if self.problem and same else found
        return True

    def summary(self) -> str:
        """`row 3, the tokenizer's chat template, 41 tokens, 12 trained`."""
        found = self.found
        parts = [f"row {count(self.row)}", str(found.get("name") or "")]
        if "tokens" in found:
            parts += [f"{count(found['tokens'])} tokens", f"{count(found['trained'])} trained"]
        return ", ".join(filter(None, parts))

    def close(self) -> None:
        """Give up what is asked."""
        self._question.cancel()

    def save(self, name: str) -> Path:
        """Write what was typed to a file and let the config name it; of files that are there already, only the one that the
        config names is written anew. Raises WorkbenchError."""
        spec = fields.model.chat_template
        self.poll()
        text = self.text if self.text is not None else str(self.found.get("text") or "")
        if not text.strip():
            raise UsageError(f"{spec.title}: there is nothing to save yet.")
        if self._answered != (self.row, self.text):
            # Whether it can write the row, or what is wrong, was told of something else than what would be saved.
            raise UsageError(f"{spec.title}: row {self.row} is still being written.", "Save it in a moment.")
        if self.problem:
            raise UsageError(f"{spec.title}: it cannot write row {self.row}: {self.problem}", "Mend it, then save it.")
        if self.found.get("of_source"):
            raise UsageError("These rows name a chat template of their own.", "Take chat_template out of their source.")
        place = Path(name).expanduser()
        place = (place if place.is_absolute() else self.draft.base / place).absolute()
        if place.suffix.lower() not in (".jinja", ".j2", ".jinja2"):
            raise UsageError(f"{visible(name)}: must end in .jinja.")
        base = self.draft.base
        named = str(self.draft.config.model.chat_template or "")
        if place.exists() and place != (base / Path(named).expanduser()).absolute():
            raise UsageError(f"{visible(name)}: is there already.", "Name another file.")
        write(place, text)
        shown = place.relative_to(base) if place.is_relative_to(base) else place
        self.draft.set(spec.path, f"./{shown}" if not shown.is_absolute() else str(shown))
        self.text = None
        return place
