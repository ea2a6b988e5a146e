"""The parts of a row: text, messages in any of the known shapes, tools. Each reader of a format is made of these.

What cannot be read is a `FormatError` that says which column holds what instead. Standard library only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from engine.errors import DataError, visible

Row = Mapping[str, Any]
Message = dict[str, Any]

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "function", "ipython", "tool_response"), "tool"),
}
ROLE = "role "
"""In a source's columns, before a name that its rows give to a role."""
_FUNCTIONS = "functions"
"""What OpenAI called a row's tools at first."""
IMAGE = "<image>"
"""The place of an image in a text."""
_FLAGS = ("train", "trained", "weight", "loss_weight")
_KEPT = (*_FLAGS, "name", "tool_call_id")
_THINKING = ("reasoning_content", "thinking", "reasoning")
_CHANNELS = ("analysis", "commentary", "final")
"""What OpenAI's harmony format calls the thinking, the calls of tools with what is said before them, and the answer."""
_ALL = "all"
"""The recipient of what is written to no tool."""


class Encoder(Protocol):
    """What makes tokens of a text."""

    tokenizer: Any

    def texts(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text of a row by itself."""


class FormatError(DataError):
    """A row does not hold what its format needs; the caller adds the place."""


class Drawn(NamedTuple):
    """Of a synthetic row: how many tokens it has, and the seed that they are drawn by."""

    tokens: int
    seed: int

    def ids(self, vocabulary: Sequence[int], part: int = 0, count: int | None = None) -> list[int]:
        """Ids of `vocabulary`; `count` of them where the row has several parts, which are drawn apart."""
        return random.Random(f"{self.seed} {part}").choices(vocabulary, k=self.tokens if count is None else count)


@dataclass
class Example:
    """What one row says, before any template. Prompts and answers are strings or lists of messages."""

    kind: str
    messages: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    text: str = ""
    prompt: str | list[Message] = ""
    chosen: str | list[Message] = ""
    rejected: str | list[Message] = ""
    input_ids: list[int] = field(default_factory=list)
    """Of a row that holds tokens, with the tokens of its images in their places."""
    labels: list[int] | None = None
    label: bool | None = None
    score: float | None = None
    verdicts: list[bool] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    targets: list[tuple[list[int], list[float]]] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    drawn: Drawn | None = None
    """Of a synthetic row, whose tokens are drawn where the vocabulary is known."""
    template: str | None = None
    """The chat template that the source names for its rows."""
    ranked: list[str | list[Message]] = field(default_factory=list)
    """All answers of a ranking, the best first; `chosen` and `rejected` are the first and the last of them."""
    ranking_pairs: str = "best_worst"
    """Which pairs the source makes of a ranking."""
    sees: bool = False
    """Whether tokens of images may stand among `input_ids`, or in the text by the processor's own words."""


def columns_of(
    columns: Mapping[str, str] | None, properties: Mapping[str, str] | None, roles: Mapping[str, str] | None
) -> dict[str, str]:
    """All that a source says of the names in its rows: columns, keys inside messages, and its words for roles."""
    said = {f"{ROLE}{name}": role for name, role in (roles or {}).items()}
    return {**(columns or {}), **(properties or {}), **said}


def names(row: Row) -> str:
    return ", ".join(visible(str(name)) for name in list(row)[:12]) or "no columns"


def text_of(row: Row, columns: Mapping[str, str], part: str, default: str | None = None) -> str:
    column = columns.get(part, part)
    value = row.get(column)
    if value is None and default is not None:
        return default
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise FormatError(f"column {visible(column)} must hold text; got {kind_of(value)}")
    return value


def prompt_text(row: Row, columns: Mapping[str, str]) -> str:
    """The text of a prompt; what stands beside an instruction in a column of its own belongs to it."""
    prompt = text_of(row, columns, "prompt")
    beside = columns.get("input", "input")
    if beside == columns.get("prompt", "prompt"):
        return prompt
    # `input` is a word of its own elsewhere: beside an instruction, or where the source names it, it belongs to the prompt.
    named = columns.get("prompt") == "instruction" or beside != "input"
    extra = text_of(row, columns, "input", "") if named else ""
    return f"{prompt}\n{extra}" if extra else prompt


def kind_of(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", bool: "true or false", type(None): "nothing", str: "text"}
    return f"{kinds.get(type(value), type(value).__name__)} ({visible(str(value))[:60]})"


def tools_of(row: Row, columns: Mapping[str, str]) -> list[Any] | None:
    column = columns.get("tools", "tools")
    if row.get(column) is None and row.get(_FUNCTIONS) is not None:
        column = _FUNCTIONS
    value = row.get(column)
    if isinstance(value, str):
        if not value.strip():
            return None
        value = json_of(value, f"column {visible(column)}")
    if value is not None and not isinstance(value, list):
        raise FormatError(f"column {visible(column)} must hold a list of tools; got {kind_of(value)}")
    if column == _FUNCTIONS:
        bare = [isinstance(each, Mapping) and "function" not in each for each in value or ()]
        value = [
            {"type": "function", "function": each} if alone else each
            for each, alone in zip(value or (), bare, strict=True)
        ]
    return value or None


def json_of(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as problem:
        raise FormatError(f"{place} must hold JSON; {problem}; found {visible(text[:60])}") from None


def messages_of(value: Any, columns: Mapping[str, str], part: str) -> list[Message]:
    """A list of turns in any of the known shapes as role, content, reasoning_content, tool_calls."""
    place = f"column {visible(columns.get(part, part))}"
    if isinstance(value, str):
        value = json_of(value, place)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        either = "" if part in ("messages", "conversations") else "text or "  # of the others a text is taken, too
        raise FormatError(f"{place} must hold {either}a list of messages; got {kind_of(value)}")
    turns = [_message(turn, columns, f"message {number} of {place}") for number, turn in enumerate(value, 1)]
    return _without_channels(turns, place) if any("channel" in turn for turn in turns) else turns


def _without_channels(turns: list[Message], place: str) -> list[Message]:
    """Turns in the channels of OpenAI's harmony format: the thinking goes into the turn that it comes before, and what is
    written to a tool is a call of it."""
    made: list[Message] = []
    thought: Message = {}
    for number, turn in enumerate(turns, 1):
        channel, recipient = turn.pop("channel", "final"), turn.pop("recipient", None)
        if channel not in _CHANNELS:
            raise FormatError(
                f"message {number} of {place} is in the channel {visible(str(channel))}; known are {', '.join(_CHANNELS)}"
            )
        if thought and turn["role"] == "assistant":
            if any(thought.get(flag) != turn.get(flag) for flag in _FLAGS):
                raise FormatError(
                    f"message {number} of {place} is flagged otherwise than the thinking before it",
                    "Flag both alike; data.trained_thinking: false leaves all thinking out of what is learned.",
                )
            before = [thought["reasoning_content"], turn.get("reasoning_content", "")]
            turn["reasoning_content"], thought = "\n".join(filter(None, before)), {}
        elif thought:
            made, thought = [*made, thought], {}
        if recipient not in (None, "", _ALL) and turn["role"] == "assistant":
            call = {"name": str(recipient).removeprefix("functions."), "arguments": turn["content"] or "{}"}
            turn |= {"content": "", "tool_calls": [_call(call, f"message {number} of {place}")]}
        elif channel == "analysis" and turn["role"] == "assistant" and isinstance(turn["content"], str):
            thinking = [turn.get("reasoning_content", ""), turn["content"]]
            thought = turn | {"content": "", "reasoning_content": "\n".join(filter(None, thinking))}
            continue
        made.append(turn)
    return [*made, thought] if thought else made


def _message(turn: Any, columns: Mapping[str, str], place: str) -> Message:
    if not isinstance(turn, Mapping):
        raise FormatError(f"{place} must be an object with a role and a content; got {kind_of(turn)}")
    role_name = columns.get("role") or ("role" if "role" in turn else "from")
    content_name = columns.get("content") or ("content" if "content" in turn else "value")
    spoken = turn.get(role_name)
    role = (columns.get(f"{ROLE}{spoken}") if columns else None) or ROLES.get(str(spoken).lower())
    if role is None:
        if spoken is None:
            raise FormatError(
                f"{place} has no role; its keys are {names(turn)}",
                "Name the key that holds the role under the source's properties, as role.",
            )
        raise FormatError(
            f"{place} has the role {visible(str(spoken))}; known are system, user, assistant, tool",
            f"Say what it means under the source's roles, as {visible(str(spoken))}: user.",
        )
    message: Message = {"role": role}
    content = turn.get(content_name)
    calls = turn.get(columns.get("tool_calls", "tool_calls"))
    if not calls and isinstance(turn.get("function_call"), Mapping):
        calls = [turn["function_call"]]
    if str(spoken).lower() == "function_call":
        calls, content = json_of(str(content), place), ""
    if isinstance(content, list):
        content, reasoning, more = _parts(content, place)
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = [*(calls or []), *more]
    elif content is not None and not isinstance(content, str):
        raise FormatError(f"{place} must hold text; got {kind_of(content)}")
    if content is None and not calls:
        raise FormatError(f"{place} has no content")
    message["content"] = content if content is not None else ""
    named = columns.get("thinking")
    for name in (named, *_THINKING) if named else _THINKING:
        if name in turn and isinstance(turn[name], str):
            message["reasoning_content"] = turn[name]
            break
    if calls:
        message["tool_calls"] = [_call(call, place) for call in (calls if isinstance(calls, list) else [calls])]
    if len(turn) > 2:
        message |= {name: turn[name] for name in _KEPT if turn.get(name) is not None}
        if role == "assistant" and turn.get("channel") and isinstance(turn["channel"], str):
            message |= {name: turn[name] for name in ("channel", "recipient") if turn.get(name) is not None}
    return message


def _parts(parts: list[Any], place: str) -> tuple[Any, str, list[Any]]:
    """Typed content parts: text, reasoning, tool calls; pictures keep their place in a list of parts."""
    texts: list[Any] = []
    reasoning, calls, pictures = "", [], False
    for part in parts:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, Mapping) else None
        value = (
            next((part[key] for key in ("text", "value", "content") if part.get(key) is not None), None)
            if kind
            else None
        )
        if kind == "text":
            texts.append({"type": "text", "text": str(value)})
        elif kind in ("reasoning", "thinking"):
            reasoning += str(value if value is not None else part.get("thinking", ""))
        elif kind in ("tool_call", "function_call"):
            calls.append(json_of(value, place) if isinstance(value, str) else value)
        elif kind in ("image", "image_url"):
            own = ("image", "image_url", "path", "url", "bytes", "base64")
            image = next((part[key] for key in own if part.get(key) is not None), value)
            texts.append({"type": "image", "image": image})
            pictures = True
        else:
            raise FormatError(f"{place} holds a part of type {visible(str(kind))}, which is not supported")
    return (texts if pictures else "".join(part["text"] for part in texts)), reasoning, calls


def with_image_parts(text: str) -> str | list[Message]:
    """A text with each `<image>` in it as a part; without one it stays text."""
    if IMAGE not in text:
        return text
    first, *rest = text.split(IMAGE)
    parts: list[Message] = [{"type": "text", "text": first}]
    for piece in rest:
        parts += [{"type": "image"}, {"type": "text", "text": piece}]
    return [part for part in parts if part["type"] == "image" or part["text"]]


def _call(call: Any, place: str) -> dict[str, Any]:
    if isinstance(call, str):
        call = json_of(call, place)
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or "name" not in inner:
        raise FormatError(f"{place} holds a tool call without a name: {visible(str(call))[:60]}")
    arguments = inner.get("arguments", inner.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {"arguments": arguments}
    kept = {"id": call["id"]} if call.get("id") else {}
    return {**kept, "type": "function", "function": {"name": str(inner["name"]), "arguments": arguments}}
