"""A chat template as it is typed and saved: what is judged is what is saved, and no other file is written over."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import UsageError
from engine.session.draft import Draft
from engine.session.template import TemplateEditing


class Slow:
    """Answers when the test says so, that the template writes the row."""

    def __init__(self) -> None:
        self.open: list[tuple[Any, dict[str, Any]]] = []

    def ask(self, do: str, **params: Any) -> Any:
        ticket = SimpleNamespace(done=False, error=None, cancel=lambda: None, add_done_callback=lambda done: None)
        self.open.append((ticket, params))
        return ticket

    def answer(self, problem: str = "", turns: Any = ()) -> None:
        ticket, params = self.open[-1]
        found = {"row": params["row"], "text": params["text"] or "own", "problem": problem, "turns": list(turns)}
        ticket.result, ticket.done = lambda timeout: found, True


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    draft = Draft.new("demo")
    draft.save(tmp_path / "my.yaml")
    return draft


def test_only_what_was_seen_to_write_the_row_is_saved(draft: Draft, tmp_path: Path) -> None:
    slow = Slow()
    editing = TemplateEditing(draft, slow.ask)
    editing.send()
    slow.answer()
    assert editing.poll()
    editing.type("{{ broken")
    with pytest.raises(UsageError, match="row 0 is still being written"):
        editing.save("mine.jinja")
    editing.send()
    slow.answer("it is broken")
    with pytest.raises(UsageError, match="it cannot write row 0: it is broken"):
        editing.save("mine.jinja")
    editing.type("{{ mended }}")
    with pytest.raises(UsageError, match="row 0 is still being written"):
        editing.save("mine.jinja")
    editing.send()
    slow.answer()
    editing.save("mine.jinja")
    assert (tmp_path / "mine.jinja").read_text() == "{{ mended }}"
    assert draft.config.model.chat_template == "./mine.jinja"


def test_a_row_that_cannot_be_written_keeps_what_it_was_and_nothing_of_another_row(draft: Draft) -> None:
    slow = Slow()
    editing = TemplateEditing(draft, slow.ask)
    editing.send()
    slow.answer(turns=["of row 0"])
    assert editing.poll()
    editing.type("{{ broken")
    editing.send()
    slow.answer("it is broken")
    assert editing.poll()
    assert (editing.problem, editing.found["turns"]) == ("it is broken", ["of row 0"])
    editing.go(1)
    slow.answer("it is broken")
    assert editing.poll()
    assert (editing.found["row"], editing.found["turns"]) == (1, [])


def test_a_file_that_is_there_is_written_over_only_where_the_config_names_it(draft: Draft, tmp_path: Path) -> None:
    (tmp_path / "other.jinja").write_text("of somebody else")
    slow = Slow()
    editing = TemplateEditing(draft, slow.ask)
    for text in ("first", "second"):
        editing.type(text)
        editing.send()
        slow.answer()
        with pytest.raises(UsageError, match=r"other\.jinja: is there already"):
            editing.save("other.jinja")
        editing.save("mine.jinja")
        assert (tmp_path / "mine.jinja").read_text() == text
    assert (tmp_path / "other.jinja").read_text() == "of somebody else"
