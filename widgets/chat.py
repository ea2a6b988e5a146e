"""`Chat(run)`: a run's model beside its base in a cell; also behind the button of a monitor whose run is finished.

The session and its process are those of the terminal's chat. A view asks what is new and gets all turns again only when
something changed; texts from the model travel as text and are drawn as text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from engine.errors import UsageError, WorkbenchError, visible
from engine.run import store
from engine.run.store import RunFolder
from engine.session.chat import ChatSession, who_answers
from engine.session.conversation import Conversation, Settings
from widgets.protocol import NotebookWidget, Part, bundle, shown, style, verb

TURNS = 40
LONGEST = 20_000
PROMPT_SECONDS = 6.0

Run = Annotated[str, Field(max_length=400)]
Text = Annotated[str, Field(max_length=1_000_000)]


class ChatPart(Part):
    """Answers what a chat asks: one session at a time, of a run that `folder` finds, or one that was given."""

    def __init__(self, folder: Callable[[str], RunFolder], given: ChatSession | None = None) -> None:
        self._folder = folder
        self._session = given
        self._run = given.who[0].run.id if given is not None else ""
        self._said: dict[str, Conversation] = {}
        """What was said to a run whose chat was left."""

    @verb
    def chat_open(self, *, run: Run = "") -> dict[str, Any]:
        """Begin to load, or go on with the chat of this run; a chat with another run ends."""
        if self._session is not None and run in ("", self._run):
            if self._session.state in ("new", "failed"):
                self._session.load()
            return {"run": shown(self._run)}
        session = ChatSession(who_answers([self._folder(run)]))
        before = self._said.pop(run, None)
        if before is not None and before.titles == session.conversation.titles:
            session.conversation = before
        self.close()
        self._session, self._run = session, run
        session.load()
        return {"run": shown(run)}

    @verb
    def chat_leave(self, *, run: Run = "") -> dict[str, Any]:
        """End the process of this run's chat, whose memory a training may need; what was said is there when it is opened again."""
        if self._session is not None and run in ("", self._run):
            said = self._session.conversation
            self.close()
            for answer in (answer for turn in said.turns for answer in turn.answers):
                answer.done = True
            self._said[run] = said
        return {}

    @verb
    def chat(self, *, version: int = -1) -> dict[str, Any]:
        """Where the chat stands; the turns only where something changed since `version`."""
        session = self._open
        now = session.version
        state = {
            "version": now,
            "state": session.state,
            "phase": shown(session.phase),
            "seconds": round(time.monotonic() - session.phase_since),
            "problem": shown(session.problem),
        }
        return state if now == version else {**state, **_turns(session)}

    @verb
    def chat_say(self, *, text: Text) -> dict[str, Any]:
        self._open.send(text)
        return {}

    @verb
    def chat_stop(self) -> dict[str, Any]:
        self._open.stop()
        return {}

    @verb
    def chat_again(self) -> dict[str, Any]:
        self._open.retry()
        return {}

    @verb
    def chat_new(self) -> dict[str, Any]:
        self._open.renew()
        return {}

    @verb
    def chat_set(self, *, name: Annotated[str, Field(max_length=40)], value: Text) -> dict[str, Any]:
        """One of the settings, as it was typed."""
        session = self._open
        if name not in asdict(session.conversation.settings):
            raise UsageError(f"The chat has no setting {name!r}.")
        session.conversation.settings = session.conversation.settings.changed(name, value)
        return {"settings": _settings(session)}

    @verb
    def chat_prompt(self, *, text: Text = "") -> dict[str, Any]:
        """The exact text that each side reads next, with its number of tokens."""
        session = self._open
        try:
            prompts = [session.prompt(side, text).result(PROMPT_SECONDS) for side in range(len(session.who))]
        except TimeoutError:
            raise WorkbenchError("The model is busy; ask again once it has answered.") from None
        return {
            "prompts": [
                {"title": shown(who.title), "tokens": one["tokens"], "text": shown(one["text"], LONGEST)}
                for who, one in zip(session.who, prompts, strict=True)
            ]
        }

    @verb
    def chat_save(self, *, path: Annotated[str, Field(min_length=1, max_length=4000)]) -> dict[str, Any]:
        """Write the conversation as rows."""
        place = Path(path).expanduser()
        return {"rows": self._open.conversation.save(place), "path": shown(str(place))}

    @property
    def _open(self) -> ChatSession:
        if self._session is None:
            raise UsageError("No chat is open.")
        return self._session

    def summary(self) -> str:
        if self._session is None:
            return ""
        return f"Chat with {visible(self._run)}\n  In a terminal: workbench chat {visible(self._run)}"

    def close(self) -> None:
        """Ends the process that holds the models."""
        if self._session is not None:
            self._session.close()
            self._session = None


def _settings(session: ChatSession) -> dict[str, str]:
    return {name: str(value) for name, value in asdict(session.conversation.settings).items()}


def _turns(session: ChatSession) -> dict[str, Any]:
    return {
        "kind": session.kind,
        "wants": session.conversation.wants,
        "subject": shown(session.conversation.subject, LONGEST),
        "titles": [shown(who.title) for who in session.who],
        "notes": [shown(note) for note in session.notes],
        "settings": _settings(session),
        "turns": [
            {
                "prompt": shown(turn.prompt, LONGEST),
                "answers": [
                    {"text": shown(answer.text, LONGEST), "note": shown(answer.note()), "done": answer.done}
                    for answer in turn.answers
                ],
            }
            for turn in session.conversation.turns[-TURNS:]
        ],
    }


class Chat(NotebookWidget):
    """Talk to a run by its name, its folder or a RunFolder; two runs or two checkpoints stand beside each other.

    Without `checkpoints` its newest whole one answers beside the base model. `settings` are those of the command:
    `temperature`, `top_p`, `max_new_tokens`, `seed`, `system`. The process that holds the models ends with the cell's view.
    """

    _esm = bundle("chat", entry="chatFace")
    _css = style()

    def __init__(
        self,
        *names: str | Path | RunFolder,
        checkpoints: Sequence[int] = (),
        device: str = "auto",
        runs: str | Path | None = None,
        height: int = 480,
        **settings: Any,
    ) -> None:
        root = store.runs_dir(runs)
        folders = [name if isinstance(name, RunFolder) else store.find(str(name), root) for name in names]
        unknown = sorted(settings.keys() - asdict(Settings()).keys())
        if unknown:
            raise UsageError(f"{unknown[0]}: is no setting of a chat; it has {', '.join(asdict(Settings()))}.")
        self.session = ChatSession(who_answers(folders, checkpoints), Settings(**settings), device=device)
        super().__init__(ChatPart(lambda _: folders[0], self.session), height=height)
