"""A chat template as the rest asks it: conversations rendered, with the characters that are trained.

The template and the search for what it marks (`engine.data.chat_masks`) run in a child process, since a template may loop or
take all memory; what comes back is plain JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from engine.data.chat_masks import Masking, Rendered, Turn
from engine.data.chat_template import MaskError, Message
from engine.data.rendering import SECONDS, Child, RenderingEnded, Sent

Conversation = tuple[list[Message], Any, str]
"""Messages, tools, and which turns are trained."""


class Chat:
    """A chat template bound to a processing class: renders conversations and says what is trained in them.

    The template itself runs in a child process (`engine.data.rendering`); all of one conversation is one question to it.
    Without `thinking` the trained part of a turn begins with its answer, behind all that is thought. `way_out` is what a
    person can do about a template that needs too much time or memory.
    """

    def __init__(
        self,
        processing_class: Any,
        template: str,
        name: str = "the chat template",
        kwargs: Mapping[str, Any] | None = None,
        *,
        thinking: bool = True,
        way_out: str = "It may loop; choose another with model.chat_template.",
    ) -> None:
        self.name, self.notes, self.way_out = name, set[str](), way_out
        given = dict(kwargs or {})
        self._child = Child(partial(Masking, processing_class, template, name, given, way_out, thinking))
        self._ask("compile")

    def render(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
        """What `apply_chat_template` writes; `prompt` adds the generation prompt. Raises `MaskError`."""
        return str(self._ask("render", list(messages), tools, prompt))

    def spans(self, messages: Sequence[Message], tools: Any = None, trained: str = "assistant") -> Rendered:
        """Render, and find the trained characters. `trained` is assistant, all, last or flag. Raises `MaskError`."""
        return _rendered(self._ask("spans", list(messages), tools, trained))

    def send(self, conversations: Sequence[Conversation]) -> Sent:
        """Begin with the `spans` of many conversations, while the caller does something else."""
        return self._child.send("each", [("spans", *conversation) for conversation in conversations])

    def take(self, sent: Sent, conversations: Sequence[Conversation]) -> Iterator[Rendered | MaskError]:
        """What `spans` says of each conversation that was sent, refusals among it."""
        answers = self._child.take(sent)
        # Where one of them ended the child, they are asked one by one, so that only this one is refused.
        for place, conversation in enumerate(conversations):
            try:
                yield (
                    self.spans(*conversation)
                    if answers is None
                    else _rendered(self._answer_of(answers["answer"][place]))
                )
            except MaskError as refused:
                yield refused

    def turns(self, messages: Sequence[Message], tools: Any, text: str) -> tuple[Turn, ...]:
        """Where each message stands in the rendered text. Raises `MaskError`."""
        return _turns(self._ask("turns", list(messages), tools, text))

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            found = self._child.ask(name, *arguments)
        except RenderingEnded as ended:
            what = f"runs longer than {SECONDS:g} seconds" if ended.slow else "needs too much memory"
            raise MaskError(f"{self.name} {what}", self.way_out) from None
        return self._answer_of(found)

    def _answer_of(self, found: Mapping[str, Any]) -> Any:
        self.notes.update(found["notes"])
        if "refused" in found:
            raise MaskError(*found["refused"])
        return found["answer"]


def _rendered(found: Sequence[Any]) -> Rendered:
    text, turns, spans, flaws = found
    return Rendered(text, _turns(turns), tuple((start, end) for start, end in spans), tuple(flaws))


def _turns(found: Sequence[Sequence[Any]]) -> tuple[Turn, ...]:
    return tuple(
        Turn(index, role, start, end, tuple((first, last) for first, last in trained))
        for index, role, start, end, trained in found
    )
