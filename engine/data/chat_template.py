"""A chat template bound to a processing class: what it writes of a conversation, and where each message stands in it.

The template runs in transformers' sandboxed environment. A text is written twice: as `apply_chat_template` writes it, and
with markers at the borders of messages (`engine.data.markers`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from engine.data.markers import Marked, marked_template, render_marked
from engine.data.rendering import limited
from engine.errors import WorkbenchError, visible

Message = dict[str, Any]
Span = tuple[int, int]

FLAGS = ("train", "trained", "weight", "loss_weight")
GENERATION = re.compile(r"\{%-?\+?\s*generation\s*[-+]?%\}")
SENTINEL = "\ufdd2\ufdd3\ufdd2"  # noncharacters: absent from text, untouched by strip() and split()

_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


class MaskError(WorkbenchError):
    """The trained part of a conversation cannot be told exactly; the caller adds the row's place."""


@dataclass
class ChatTemplate:
    """`text` is the template itself, `kwargs` are given to it; `way_out` is what a person can do about one that needs too
    much time or memory."""

    processing_class: Any
    text: str
    name: str
    kwargs: Mapping[str, Any]
    way_out: str

    def __post_init__(self) -> None:
        self.tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        self.has_marks = GENERATION.search(self.text) is not None
        tokens = sorted(map(str, self.tokenizer.added_tokens_encoder), key=len, reverse=True)
        self.ends = tuple(token for token in tokens if token.strip())
        """Tokens at which a model can stop."""
        self.added = re.compile("|".join(map(re.escape, self.ends)) or "(?!)")
        self._last_prompt: tuple[tuple[Sequence[Message], Any], str, str] = (((), None), "", "")

    def compile(self) -> None:
        """Raises `MaskError` where the template is none."""
        try:
            with limited():
                marked_template(self.text)
        except jinja2.TemplateError as problem:
            raise MaskError(f"{self.name} is not a valid template: {visible(str(problem))}") from None
        except _REFUSALS as problem:
            raise self._refused(problem) from None

    def render(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
        """What `apply_chat_template` writes; `prompt` adds the generation prompt."""
        try:
            with limited():
                return self.tokenizer.apply_chat_template(
                    self.read(messages),
                    tools=tools or None,
                    chat_template=self.text,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    **self.kwargs,
                )
        except _REFUSALS as problem:
            raise self._refused(problem) from None

    def regions(self, messages: Sequence[Message], tools: Any, *, prompt: bool = False) -> Marked | None:
        """The text with where each turn stands; None where the template refuses the conversation."""
        variables = {**self.special, **self.kwargs}
        variables |= {"tools": tools or None, "documents": None, "add_generation_prompt": prompt}
        try:
            with limited():
                return render_marked(self.text, _aliased(self.read(messages)), variables)
        except _REFUSALS:
            return None

    def body(self, index: int, messages: Sequence[Message], tools: Any) -> str | None:
        """What is written of one message; None where that cannot be told."""
        found = self.regions(messages, tools)
        if found is None:
            return None
        return next((found.text[start:end] for number, start, end in found.regions if number == index), None)

    def prompt(self, messages: Sequence[Message], tools: Any) -> tuple[str, str]:
        """The text that a next answer follows, and the generation prompt at its end; empty where there is none."""
        if self._last_prompt[0] != (messages, tools):
            found = self.regions(messages, tools, prompt=True)
            self._last_prompt = ((messages, tools), found.text if found else "", found.tail if found else "")
        return self._last_prompt[1:]

    def read(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the form that this template reads: text, or a list of typed parts where it takes no text."""
        return [in_parts(message) for message in plain(messages)] if self.takes_parts else plain(messages)

    @cached_property
    def special(self) -> dict[str, Any]:
        return dict(self.tokenizer.special_tokens_map)

    @cached_property
    def plain_call(self) -> bool:
        """Whether `apply_chat_template` is transformers' own, given nothing but variables of the template: one of a
        tokenizer's own code may write some conversations otherwise."""
        own = getattr(type(self.tokenizer), "apply_chat_template", None)
        theirs = PreTrainedTokenizerBase.apply_chat_template
        return own is theirs and not self.kwargs.keys() & inspect.signature(theirs).parameters.keys()

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template writes content as a list of typed parts alone."""
        return takes_parts(self.tokenizer, self.text, self.kwargs)

    def marks(self, messages: Sequence[Message], tools: Any, text: str) -> list[Span] | None:
        """What stands between the template's own `{% generation %}` marks; None where `text` is another."""
        variables = {**self.special, **self.kwargs}
        try:
            with limited():
                result: Any = render_jinja_template(
                    conversations=[self.read(messages)],
                    tools=tools or None,
                    chat_template=self.text,
                    return_assistant_tokens_mask=True,
                    **variables,
                )
        except _REFUSALS as problem:
            raise self._refused(problem) from None
        rendered, marks = result
        return [(int(start), int(end)) for start, end in marks[0]] if rendered[0] == text else None

    def _refused(self, problem: Exception) -> MaskError:
        reason = visible(str(problem)).rstrip(".") or type(problem).__name__
        if isinstance(problem, MemoryError):
            return MaskError(f"{self.name} needs too much memory", self.way_out)
        if isinstance(problem, jinja2.exceptions.SecurityError):
            return MaskError(f"{self.name} does something that a template may not do ({reason})")
        return MaskError(f"{self.name} does not accept this conversation ({reason})")


def plain(messages: Sequence[Message]) -> list[Message]:
    """The messages as a template sees them: without absent values and without the flags of this tool."""
    return [
        {key: value for key, value in message.items() if value is not None and key not in FLAGS} for message in messages
    ]


def takes_parts(tokenizer: Any, template: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a template leaves out a message that is text and writes one of typed parts, as those of some vision
    models do."""

    def writes(turn: Message) -> bool:
        try:
            text = tokenizer.apply_chat_template([turn], chat_template=template, tokenize=False, **kwargs)
        except (TimeoutError, MemoryError):
            raise  # one that loops would be waited for once more
        except _REFUSALS:
            return False
        return SENTINEL in text

    turn: Message = {"role": "user", "content": SENTINEL}
    return not writes(turn) and writes(in_parts(turn))


def in_parts(message: Message) -> Message:
    """The message with its text as a list of one typed part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _aliased(messages: list[Message]) -> list[Message]:
    """Reasoning under every name that templates read, as this version of `apply_chat_template` offers it."""
    alias = getattr(chat_template_utils, "_alias_reasoning_fields", list)
    return [dict(message) for message in alias(messages)]
