"""What a chat template leaves out of a conversation, by the names of `engine.facts.template_flaws`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.data.chat import Chat
from engine.data.chat_masks import has_content
from engine.data.chat_template import SENTINEL, MaskError, Message

CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters of control other than those between words and lines, and those that turn the direction of writing. The marks
that Arabic and Hebrew are written with (U+200E, U+200F) and those that join (U+200C, U+200D) are none of them."""


def left_out(chat: Chat, marks: re.Pattern[str], messages: Sequence[Message], tools: Any, text: str) -> list[str]:
    """What the messages say and the rendered text does not hold, and `marks` of the tokenizer in what they say."""
    found = []
    for place, message in enumerate(messages):
        if any(map(marks.search, _written(message, text))):
            found.append("marks")
        if message["role"] != "tool" and not has_content(message):
            found.append("empty_turn")
        said = message.get("content") if message["role"] == "system" else None
        if isinstance(said, str) and said.strip() not in text and _is_lost(chat, messages, place, "content", tools):
            found.append("system")
        thought = message.get("reasoning_content")
        if isinstance(thought, str) and thought.strip() not in text:
            later = any(each["role"] == "user" for each in messages[place + 1 :])
            if _is_lost(chat, messages, place, "reasoning_content", tools):
                found.append("earlier_thinking" if later else "thinking")
    known = [tool.get("function") or tool for tool in tools or () if isinstance(tool, dict)]
    if any(_is_lost_tool(chat, messages, tool, text) for tool in known if tool.get("name")):
        found.append("tools")
    return found


def _is_lost_tool(chat: Chat, messages: Sequence[Message], tool: Mapping[str, Any], text: str) -> bool:
    """Whether the template writes nothing of a tool, whose name may stand in the text because it is called there."""
    name, about = str(tool["name"]), str(tool.get("description") or "")
    if name not in text:
        return True
    if (about and about in text) or not any(name in str(message) for message in messages):
        return False
    try:
        return SENTINEL not in chat.render(messages, [{"type": "function", "function": {**tool, "name": SENTINEL}}])
    except MaskError:
        return False  # it reads the tool, or it would not refuse this one


def _written(message: Message, text: str) -> Iterator[str]:
    """All that a message brings to the rendered text: what it says, in typed parts too, what it thinks and what it calls."""
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)
    thought = str(message.get("reasoning_content") or "")
    yield thought if thought.strip() in text else ""
    yield str(message.get("tool_calls") or "")


def _is_lost(chat: Chat, messages: Sequence[Message], place: int, key: str, tools: Any) -> bool:
    """Whether the template writes nothing of this part of a message, in whatever form."""
    other = {**messages[place], key: SENTINEL}
    try:
        return SENTINEL not in chat.render([*messages[:place], other, *messages[place + 1 :]], tools)
    except MaskError:
        return False  # it reads the part, or it would not refuse this one
