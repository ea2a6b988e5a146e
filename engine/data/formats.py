"""One row of any known format to one example: messages, text, a prompt with its completion, a preference, tokens.

Formats are a table (`FORMATS`) of parts and the column names that people use for them; `columns` in the config overrides
any of them. Here rows are only re-arranged, never rendered or tokenized; what cannot be read is a `FormatError` that says
which column holds what instead. Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import DataError, visible

Row = Mapping[str, Any]
Message = dict[str, Any]

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "function", "ipython", "tool_response"), "tool"),
}
_TRANSCRIPT = re.compile(r"\n\n(Human|Assistant):")
PICTURE = "<image>"
_KEPT = ("train", "trained", "weight", "loss_weight", "name", "tool_call_id")


class FormatError(DataError):
    """A row does not hold what its format needs; the caller adds the place."""


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
    labels: list[int] | None = None
    label: bool | None = None
    images: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Format:
    """Parts with the column names seen in the wild, the first one being ours; optional parts end in `?`."""

    name: str
    title: str
    parts: Mapping[str, tuple[str, ...]]
    read: Callable[[Row, Mapping[str, str]], Example]

    def required(self) -> list[str]:
        return [part for part in self.parts if not part.endswith("?")]


def read_example(row: Row, format_name: str, columns: Mapping[str, str]) -> Example:
    """The example that a row holds. Raises `FormatError`."""
    known = FORMATS.get(format_name)
    if known is None:
        raise FormatError(f"unknown format {visible(format_name)}; known are {', '.join(FORMATS)}")
    for part in known.required():
        column = columns.get(part, part)
        if row.get(column) is None:
            state = "is empty" if column in row else "is missing"
            message = f"column {visible(column)} ({part} of {known.title}) {state}; the row has {names(row)}"
            raise FormatError(message, "Name the right one under columns, or name another format.")
    for media in ("audios", "videos", "audio", "video"):
        if row.get(media):
            raise FormatError(f"column {media} holds media other than pictures, which is not supported")
    example = known.read(row, columns)
    images = row.get(columns.get("images", "images"))
    if images:
        example.images = images if isinstance(images, list) else [images]
        _place_pictures(example)
    else:
        example.images = [part["image"] for part in _picture_parts(example)]
    return example


def _picture_parts(example: Example) -> list[Any]:
    contents = [message["content"] for message in example.messages if isinstance(message["content"], list)]
    return [part for content in contents for part in content if part["type"] == "image"]


def _place_pictures(example: Example) -> None:
    """Turn each `<image>` in the text of a message into a part; a message without pictures stays text."""
    for message in example.messages:
        content = message["content"]
        if isinstance(content, str) and PICTURE in content:
            texts = content.split(PICTURE)
            parts: list[Any] = [{"type": "text", "text": texts[0]}]
            for text in texts[1:]:
                parts += [{"type": "image"}, {"type": "text", "text": text}]
            message["content"] = [part for part in parts if part["type"] == "image" or part["text"]]


def names(row: Row) -> str:
    return ", ".join(visible(str(name)) for name in list(row)[:12]) or "no columns"


# -- reading parts -----------------------------------------------------------------------------------------------------
def _text(row: Row, columns: Mapping[str, str], part: str, default: str | None = None) -> str:
    column = columns.get(part, part)
    value = row.get(column)
    if value is None and default is not None:
        return default
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise FormatError(f"column {visible(column)} must hold text; got {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", bool: "true or false", type(None): "nothing", str: "text"}
    return f"{kinds.get(type(value), type(value).__name__)} ({visible(str(value))[:60]})"


def _tools(row: Row, columns: Mapping[str, str]) -> list[Any] | None:
    column = columns.get("tools", "tools")
    value = row.get(column)
    if isinstance(value, str):
        if not value.strip():
            return None
        value = _json(value, f"column {visible(column)}")
    if value is not None and not isinstance(value, list):
        raise FormatError(f"column {visible(column)} must hold a list of tools; got {_kind(value)}")
    return value or None


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as problem:
        raise FormatError(f"{place} must hold JSON; {problem}; found {visible(text[:60])}") from None


def messages_of(value: Any, columns: Mapping[str, str], part: str) -> list[Message]:
    """A list of turns in any of the known shapes as role, content, reasoning_content, tool_calls."""
    place = f"column {visible(columns.get(part, part))}"
    if isinstance(value, str):
        value = _json(value, place)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise FormatError(f"{place} must hold a list of messages; got {_kind(value)}")
    return [_message(turn, columns, f"message {number} of {place}") for number, turn in enumerate(value, 1)]


def _message(turn: Any, columns: Mapping[str, str], place: str) -> Message:
    if not isinstance(turn, Mapping):
        raise FormatError(f"{place} must be an object with a role and a content; got {_kind(turn)}")
    role_name = columns.get("role") or ("role" if "role" in turn else "from")
    content_name = columns.get("content") or ("content" if "content" in turn else "value")
    spoken = turn.get(role_name)
    role = ROLES.get(str(spoken).lower())
    if role is None:
        raise FormatError(
            f"{place} has the role {visible(str(spoken))}; known are system, user, assistant, tool",
            "Name the property that holds the role under columns, as role.",
        )
    message: Message = {"role": role}
    content = turn.get(content_name)
    calls = turn.get(columns.get("tool_calls", "tool_calls"))
    if str(spoken).lower() == "function_call":
        calls, content = _json(str(content), place), ""
    if isinstance(content, list):
        content, reasoning, more = _parts(content, place)
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = [*(calls or []), *more]
    elif content is not None and not isinstance(content, str):
        raise FormatError(f"{place} must hold text; got {_kind(content)}")
    if content is None and not calls:
        raise FormatError(f"{place} has no content")
    message["content"] = content if content is not None else ""
    for name in filter(None, (columns.get("thinking"), "reasoning_content", "thinking", "reasoning")):
        if isinstance(turn.get(name), str):
            message["reasoning_content"] = turn[name]
            break
    if calls:
        message["tool_calls"] = [_call(call, place) for call in (calls if isinstance(calls, list) else [calls])]
    message |= {name: turn[name] for name in _KEPT if turn.get(name) is not None}
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
            calls.append(_json(value, place) if isinstance(value, str) else value)
        elif kind in ("image", "image_url"):
            texts.append({"type": "image", "image": part.get("image") or part.get("image_url") or value})
            pictures = True
        else:
            raise FormatError(f"{place} holds a part of type {visible(str(kind))}, which is not supported")
    return (texts if pictures else "".join(part["text"] for part in texts)), reasoning, calls


def _call(call: Any, place: str) -> dict[str, Any]:
    if isinstance(call, str):
        call = _json(call, place)
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


# -- formats -----------------------------------------------------------------------------------------------------------
def _read_messages(row: Row, columns: Mapping[str, str]) -> Example:
    part = "messages" if row.get(columns.get("messages", "messages")) is not None else "conversations"
    chat = messages_of(row.get(columns.get(part, part)), columns, part)
    system = row.get(columns.get("system", "system"))
    if isinstance(system, str) and system and not (chat and chat[0]["role"] == "system"):
        chat.insert(0, {"role": "system", "content": system})
    return Example("chat", messages=chat, tools=_tools(row, columns))


def _read_alpaca(row: Row, columns: Mapping[str, str]) -> Example:
    instruction, extra = _text(row, columns, "instruction"), _text(row, columns, "input", "")
    chat: list[Message] = []
    if system := _text(row, columns, "system", ""):
        chat.append({"role": "system", "content": system})
    for pair in row.get(columns.get("history", "history")) or ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise FormatError(f"column history must hold pairs of question and answer; got {_kind(pair)}")
        chat += [
            {"role": "user", "content": str(pair[0])},
            {"role": "assistant", "content": str(pair[1]), "train": False},
        ]
    chat.append({"role": "user", "content": f"{instruction}\n{extra}" if extra else instruction})
    chat.append({"role": "assistant", "content": _text(row, columns, "output")})
    return Example("chat", messages=chat)


def _read_pair(row: Row, columns: Mapping[str, str]) -> Example:
    prompt, answer = (row.get(columns.get(part, part)) for part in ("prompt", "completion"))
    if isinstance(prompt, (list, Mapping)) or isinstance(answer, (list, Mapping)):
        first = messages_of(prompt, columns, "prompt") if not isinstance(prompt, str) else _turn("user", prompt)
        last = messages_of(answer, columns, "completion") if not isinstance(answer, str) else _turn("assistant", answer)
        return Example("pair", prompt=first, chosen=last, tools=_tools(row, columns))
    return Example("pair", prompt=_text(row, columns, "prompt"), chosen=_text(row, columns, "completion"))


def _turn(role: str, text: str) -> list[Message]:
    return [{"role": role, "content": text}]


def _read_text(row: Row, columns: Mapping[str, str]) -> Example:
    return Example("text", text=_text(row, columns, "text"))


def _read_tokens(row: Row, columns: Mapping[str, str]) -> Example:
    ids, labels = (row.get(columns.get(part, part)) for part in ("input_ids", "labels"))
    for name, value in (("input_ids", ids), ("labels", labels)):
        if value is not None and not (isinstance(value, list) and all(type(token) is int for token in value)):
            raise FormatError(f"column {name} must hold a list of whole numbers; got {_kind(value)}")
    if labels is not None and len(labels) != len(ids or ()):
        raise FormatError(f"labels hold {len(labels)} numbers and input_ids {len(ids or ())}; they must be as many")
    return Example("tokens", input_ids=list(ids or ()), labels=labels)


def _read_prompt(row: Row, columns: Mapping[str, str]) -> Example:
    prompt, answer = (row.get(columns.get(part, part)) for part in ("prompt", "answer"))
    asked = messages_of(prompt, columns, "prompt") if isinstance(prompt, (list, Mapping)) else None
    return Example(
        "prompt",
        prompt=asked if asked is not None else _text(row, columns, "prompt"),
        chosen="" if answer is None else answer if isinstance(answer, str) else json.dumps(answer),
        tools=_tools(row, columns),
    )


def _read_preference(row: Row, columns: Mapping[str, str]) -> Example:
    chosen, rejected = (_answer(row, columns, part) for part in ("chosen", "rejected"))
    given = row.get(columns.get("prompt", "prompt"))
    tools = _tools(row, columns)
    if given is None:
        given = row.get(columns.get("conversations", "conversations"))
    if given is None and type(chosen) is not type(rejected):
        raise FormatError("chosen and rejected must both hold text or both hold messages")
    if given is not None:
        prompt = given if isinstance(given, str) else messages_of(given, columns, "prompt")
        if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
            return Example("preference", prompt=prompt, chosen=chosen, rejected=rejected, tools=tools)
        first = _turn("user", prompt) if isinstance(prompt, str) else prompt
        pair = [_turn("assistant", answer) if isinstance(answer, str) else answer for answer in (chosen, rejected)]
        # Some sets repeat the prompt in the answers.
        pair = [answer[len(first) :] if answer[: len(first)] == first else answer for answer in pair]
        return Example("preference", prompt=first, chosen=pair[0], rejected=pair[1], tools=tools)
    if isinstance(chosen, str) and isinstance(rejected, str):
        turns = transcript(chosen), transcript(rejected)
        if turns[0] is None or turns[1] is None:
            raise FormatError(
                "there is no prompt, and chosen is no transcript of Human and Assistant to take one from",
                "Name the column of the prompt under columns.",
            )
        chosen, rejected = turns[0], turns[1]
    assert isinstance(chosen, list)
    assert isinstance(rejected, list)
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == 0:
        raise FormatError("there is no prompt: chosen and rejected do not begin with the same turn")
    return Example(
        "preference", prompt=chosen[:shared], chosen=chosen[shared:], rejected=rejected[shared:], tools=tools
    )


def _answer(row: Row, columns: Mapping[str, str], part: str) -> str | list[Message]:
    value = row.get(columns.get(part, part))
    return value if isinstance(value, str) else messages_of(value, columns, part)


def transcript(text: str) -> list[Message] | None:
    """Turns of a text with `Human:` and `Assistant:` at paragraph starts, or nothing when it is not one."""
    pieces = _TRANSCRIPT.split(text)
    if len(pieces) < 3 or pieces[0].strip():
        return None
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[name], "content": said.strip()} for name, said in zip(pieces[1::2], pieces[2::2], strict=True)
    ]


_EXTRA = {"tools?": ("tools",), "system?": ("system", "system_prompt"), "images?": ("images", "image")}

# Order is the order of detection: the first whose required parts are all present wins.
FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        Format("tokens", "tokens", {"input_ids": ("input_ids",), "labels?": ("labels",)}, _read_tokens),
        Format(
            "preference",
            "a preference pair",
            {
                "chosen": ("chosen", "chosen_messages", "response_j", "chosen_response", "preferred"),
                "rejected": ("rejected", "rejected_messages", "response_k", "rejected_response", "dispreferred"),
                "prompt?": ("prompt", "question", "conversations", "instruction", "messages", "query"),
                **_EXTRA,
            },
            _read_preference,
        ),
        Format("messages", "messages (OpenAI)", {"messages": ("messages",), **_EXTRA}, _read_messages),
        Format("sharegpt", "ShareGPT", {"conversations": ("conversations", "conversation"), **_EXTRA}, _read_messages),
        Format(
            "alpaca",
            "Alpaca",
            {
                "instruction": ("instruction",),
                "output": ("output",),
                "input?": ("input",),
                "history?": ("history",),
                **_EXTRA,
            },
            _read_alpaca,
        ),
        Format(
            "prompt_completion",
            "prompt and completion",
            {
                "prompt": ("prompt", "question", "query", "problem", "instruction", "input"),
                "completion": ("completion", "answer", "response", "solution", "output"),
                **_EXTRA,
            },
            _read_pair,
        ),
        Format(
            "prompts",
            "prompts",
            {
                "prompt": ("prompt", "question", "query", "problem", "instruction"),
                "answer?": ("answer", "solution", "reference", "ground_truth"),
                "tools?": ("tools",),
            },
            _read_prompt,
        ),
        Format("text", "plain text", {"text": ("text", "content", "document"), "images?": ("images",)}, _read_text),
    )
}
