"""What was said in a chat: the texts of the person and what each side answered, and the rows to train on that it makes."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from engine.errors import UsageError, WorkbenchError, visible
from engine.run import store

MOST_NEW_TOKENS = 1 << 20
Kind = Literal["text", "score", "rank"]
ENDED = {
    "stop": "",
    "stopped": "stopped by you",
    "length": "stopped at max_new_tokens",
    "positions": "stopped at the last position that the model has",
}


@dataclass(frozen=True)
class Settings:
    """How tokens are chosen, and what stands before the conversation. A temperature of 0 takes the likeliest token."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0
    system: str = ""

    def __post_init__(self) -> None:
        """Raises UsageError naming the setting, its value and what it takes."""
        for name, takes, fits in (
            ("temperature", "a number from 0 to 100", _number(self.temperature) and 0 <= self.temperature <= 100),
            ("top_p", "a number above 0, at most 1", _number(self.top_p) and 0 < self.top_p <= 1),
            ("max_new_tokens", f"a whole number from 1 to {MOST_NEW_TOKENS}", _is_token_count(self.max_new_tokens, 1)),
            ("seed", f"a whole number from 0 to {MOST_NEW_TOKENS}", _is_token_count(self.seed, 0)),
        ):
            if not fits:
                raise UsageError(f"{name}: must be {takes}; got {visible(str(getattr(self, name)))[:40]}.")

    def changed(self, name: str, text: str) -> Settings:
        """The settings with one of them read from what a person typed. Raises UsageError."""
        if name == "system":
            return replace(self, system=text)
        kind = int if name in ("max_new_tokens", "seed") else float
        try:
            value: Any = kind(text.strip())
        except ValueError:
            value = text
        return replace(self, **{name: value})

    def sampling(self) -> dict[str, Any]:
        """What the process is given of it."""
        return {name: value for name, value in asdict(self).items() if name != "system"}


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_token_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST_NEW_TOKENS


@dataclass
class Answer:
    """What one side says to one text; grows while it is made."""

    text: str = ""
    tokens: int = 0
    done: bool = False
    ended: str = ""
    """`stop`, `stopped`, `length` or `positions`, once it is done; empty where it failed."""
    problem: str = ""
    result: dict[str, Any] = field(default_factory=dict)

    def note(self) -> str:
        """What stands below it: tokens and speed, and why it ended where the model did not end it."""
        if self.problem:
            return self.problem
        if not self.done:
            return f"{self.tokens} tokens" if self.tokens else "waiting"
        seconds = self.result.get("seconds")
        if seconds is None:
            return ""
        speed = f", {self.tokens / seconds:.0f}/s" if seconds > 0 else ""
        made = f"{self.tokens} token{'' if self.tokens == 1 else 's'}{speed}"
        return f"{made}  {ENDED.get(self.ended, '')}".rstrip()


@dataclass
class Turn:
    """A text of the person and what each side says to it."""

    prompt: str
    answers: list[Answer]


@dataclass
class Conversation:
    """`titles` are the sides'; `has_template` tells whether what was said before is read again with each turn."""

    kind: Kind
    titles: list[str]
    settings: Settings
    tools: list[Any]
    turns: list[Turn] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Of a reward model the prompt and its answers, of an embedding model the query and the texts to be ranked."""
    has_template: bool = True

    @property
    def wants(self) -> str:
        """What the next text is: a `prompt`, an `answer` to score, a `query`, a `text` to rank."""
        if self.kind == "text":
            return "prompt"
        first, more = ("prompt", "answer") if self.kind == "score" else ("query", "text")
        return more if self.texts else first

    @property
    def subject(self) -> str:
        """The prompt whose answers are scored, or the query; empty in a conversation."""
        return self.texts[0] if self.texts else ""

    def messages(self, side: int, upto: int | None = None) -> list[dict[str, Any]]:
        """What this side has read and said, the system prompt first; without a template the newest text alone."""
        turns = self.turns[:upto]
        conversation: list[dict[str, Any]] = []
        if self.settings.system:
            conversation.append({"role": "system", "content": self.settings.system})
        for turn in turns if self.has_template else turns[-1:]:
            conversation.append({"role": "user", "content": turn.prompt})
            if turn.answers[side].done and not turn.answers[side].problem:
                conversation.append({"role": "assistant", "content": turn.answers[side].text})
        return conversation

    def rows(self) -> list[dict[str, Any]]:
        """The conversation as rows to train on, one a side, and `model`, who answered.

        An answer that was cut is flagged as not trained: it would teach to stop in the middle. Without a chat template a
        row is a prompt and its completion, and one that was cut is left out.
        """
        if self.kind != "text":
            raise UsageError("scores and nearness are no rows to train on; only conversations are saved.")
        rows: list[dict[str, Any]] = []
        for side, title in enumerate(self.titles):
            if not self.has_template:
                rows += [
                    {"prompt": turn.prompt, "completion": turn.answers[side].text, "model": title}
                    for turn in self.turns
                    if turn.answers[side].ended == "stop" and turn.answers[side].text
                ]
                continue
            turns = [turn for turn in self.turns if turn.answers[side].done and not turn.answers[side].problem]
            if not turns:
                continue
            messages: list[dict[str, Any]] = []
            if self.settings.system:
                messages.append({"role": "system", "content": self.settings.system})
            for turn in turns:
                answer = turn.answers[side]
                cut = {} if answer.ended == "stop" else {"train": False}
                messages.append({"role": "user", "content": turn.prompt})
                messages.append({"role": "assistant", "content": answer.text, **cut})
            rows.append({"messages": messages, **({"tools": self.tools} if self.tools else {}), "model": title})
        return rows

    def save(self, path: Path) -> int:
        """Write the rows as JSONL, all or nothing, and return how many. Raises WorkbenchError, also where a file is there."""
        rows = self.rows()
        if not rows:
            raise UsageError("there is no whole answer to save yet.")
        if os.path.lexists(path):
            raise UsageError(f"{visible(str(path))}: is there already; name another file.")
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        try:
            store.replace_file(path, text)
        except (OSError, UnicodeError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else "an answer is no valid text"
            raise WorkbenchError(f"{visible(str(path))}: cannot be written: {reason}.", "Name another file.") from None
        return len(rows)
