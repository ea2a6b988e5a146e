"""Which characters of a rendered conversation the model writes itself, exactly, for any chat template.

A turn's trained part begins where the template's own generation prompt ends (that much is given at inference) and ends
with the mark that closes the turn (the model learns to stop); white space after that mark is the template's. So content,
reasoning and tool calls as rendered are trained, the role header is not.

How: the template is parsed by transformers' sandboxed environment, and a marker is written at the start of each round of
each loop over the messages. Markers taken out, the text must equal `apply_chat_template`'s, or it is a `MaskError`: so
the borders of turns are facts of this rendering, not guesses. Where it is certain that markers change nothing, the first
`COMPARED` conversations are compared and the others taken as they are. A template that carries `{% generation %}` marks is
believed, provided that each mark lies inside a turn of the assistant. Nothing here is guessed silently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.data.chat_template import FLAGS, SENTINEL, ChatTemplate, MaskError, Message, Span
from engine.data.markers import MARKER, Marked
from engine.errors import visible

THOUGHT = ("</think>", "[/THINK]", "</thinking>", "</thought>", "</reasoning>", "</seed:think>")
"""How reasoning that stands in the content itself ends."""
COMPARED = 32
"""Conversations whose text is rendered with markers and without, before one rendering is believed."""


@dataclass(frozen=True)
class Turn:
    """One message as rendered: `start:end` is all of it, `trained` the part that the model writes (assistant only)."""

    index: int
    role: str
    start: int
    end: int
    trained: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Rendered:
    text: str
    turns: tuple[Turn, ...]
    spans: tuple[Span, ...]
    flaws: tuple[str, ...] = ()
    """What is odd about it, by the names of `engine.facts.template_flaws`."""


class Masking:
    """What `Chat` asks for, in the process where the template runs; without `thinking` what the assistant thinks is not
    trained."""

    def __init__(
        self,
        processing_class: Any,
        template: str,
        name: str = "the chat template",
        kwargs: Mapping[str, Any] | None = None,
        way_out: str = "",
        thinking: bool = True,
    ) -> None:
        self.template = ChatTemplate(processing_class, template, name, kwargs or {}, way_out)
        self.name, self.thinking = name, thinking
        self.notes: set[str] = set()
        self._compared = self._tried = 0

    def answer(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Plain JSON: the answer or the refusal, and what is to be noted."""
        if name == "each":
            return {"answer": [self.answer(*question) for question in arguments[0]], "notes": []}
        questions: dict[str, Callable[..., Any]] = {
            "compile": self.template.compile,
            "render": lambda messages, tools, prompt: self.template.render(messages, tools, prompt=prompt),
            "spans": self.spans,
            "turns": self.turns,
        }
        try:
            found: Any = questions[name](*arguments)
        except MaskError as problem:
            return {"refused": [problem.message, problem.hint], "notes": sorted(self.notes)}
        if isinstance(found, Rendered):
            found = [found.text, list(map(_plain_turn, found.turns)), found.spans, found.flaws]
        elif isinstance(found, tuple):
            found = list(map(_plain_turn, found))
        return {"answer": found, "notes": sorted(self.notes)}

    def spans(self, messages: Sequence[Message], tools: Any = None, trained: str = "assistant") -> Rendered:
        """Render, and find the trained characters. `trained` is assistant, all, last or flag. Raises `MaskError`."""
        marked = self.template.regions(messages, tools)
        sure = (
            marked is not None
            and marked.certain
            and not tools
            and not self.template.has_marks
            and self.template.plain_call
        )
        if marked is not None and sure and self._compared >= COMPARED:
            text = marked.text
        else:
            text = self.template.render(messages, tools)
            if marked is not None and sure:
                self._compared = self._compared + 1 if marked.text == text else -sys.maxsize
        if SENTINEL in text or MARKER.search(text):
            raise MaskError(
                "the row holds the noncharacters U+FDD0 to U+FDD3, with which the borders of turns are found",
                "No text needs them: take them out of the row.",
            )
        if trained == "all":
            without = [index for index, message in enumerate(messages) if flag_of(message) in (False, 0)]
            turns = self._turns(messages, marked, text, tolerant=not without)
            self._check_left_out(without, marked, messages)
            return Rendered(text, turns, _outside(len(text), [turn for turn in turns if turn.index in without]))
        wanted = _wanted(messages, trained)
        marks = self.template.marks(messages, tools, text) if self.template.has_marks else None
        assigned = _assign(marks, self._turns(messages, marked, text, tolerant=True)) if marks is not None else None
        if assigned is None:
            turns = self._turns(messages, marked, text)
            assigned = tuple(
                self._with_span(turn, messages, tools, text, turns) if turn.index in wanted else turn for turn in turns
            )
        turns = assigned
        for turn in turns:
            if turn.index in wanted:
                self._check_rendered(turn, messages, tools, text)
        if not self.template.has_marks:
            self._check_others([turn for turn in turns if turn.index in wanted and turn.trained], messages, tools, text)
        if not self.thinking:
            turns = tuple(
                self._without_thinking(turn, messages, tools, text) if turn.index in wanted else turn for turn in turns
            )
        spans = tuple(span for turn in turns if turn.index in wanted for span in turn.trained if span[0] < span[1])
        flaws = []
        if any(turn.trained and not self._ended(text, turn.trained[-1]) for turn in turns if turn.index in wanted):
            flaws.append("no_end")
        last = len(messages) - 1
        if last in wanted and last and not text.startswith(self.template.prompt(messages[:last], tools)[0]):
            flaws.append("prompt")
        return Rendered(text, turns, tuple(sorted(spans)), tuple(flaws))

    def _ended(self, text: str, span: Span) -> bool:
        """Whether what is learned of a turn ends with a token that the model can stop at."""
        return text[slice(*span)].rstrip().endswith(self.template.ends)

    # -- borders of turns ----------------------------------------------------------------------------------------------
    def turns(self, messages: Sequence[Message], tools: Any, text: str) -> tuple[Turn, ...]:
        """Where each message stands in the rendered text. Raises `MaskError`."""
        return self._turns(messages, self.template.regions(messages, tools), text)

    def _turns(
        self, messages: Sequence[Message], found: Marked | None, text: str, *, tolerant: bool = False
    ) -> tuple[Turn, ...]:
        if found is None or found.text != text:
            if tolerant:
                return ()
            raise MaskError(
                f"{self.name} does not write its messages in one loop over them, so the borders of a turn cannot be told",
                "Choose another template with model.chat_template, or add {% generation %} marks to this one.",
            )
        turns: dict[int, Turn] = {}
        for index, start, end in found.regions:
            role = str(messages[index].get("role", ""))
            if index in turns and role == "assistant":
                raise MaskError(f"{self.name} writes message {index + 1} in two places, so its mask cannot be told")
            turns.setdefault(index, Turn(index, role, start, end))
        missing = [
            index for index, message in enumerate(messages) if index not in turns and message["role"] == "assistant"
        ]
        if missing and not tolerant and _content(messages[missing[0]]):
            raise MaskError(f"{self.name} leaves out message {missing[0] + 1}, an assistant turn")
        return tuple(sorted(turns.values(), key=lambda turn: turn.start))

    def _check_left_out(self, without: Sequence[int], found: Marked | None, messages: Sequence[Message]) -> None:
        """A turn that is not learned while all others are must stand in one place, or its other places would be learned."""
        regions = found.regions if found is not None else []
        for index in without:
            places = sum(number == index for number, _, _ in regions)
            if places != 1 and has_content(messages[index]):
                what = "in more places than one" if places else "outside the loop over messages"
                raise MaskError(
                    f"{self.name} writes message {index + 1}, which is flagged as not trained, {what}",
                    "Set data.trained_turns to assistant, or take the flag out.",
                )

    # -- the trained part ----------------------------------------------------------------------------------------------
    def _with_span(
        self, turn: Turn, messages: Sequence[Message], tools: Any, text: str, turns: tuple[Turn, ...]
    ) -> Turn:
        body = text[turn.start : turn.end]
        header = self._header(body, turn.index, messages, tools)
        end, closed = self._closing(body, turn.index, messages, tools)
        start, stop = turn.start + header, turn.start + max(end, header)
        if not closed:
            # Some templates close only the conversation, after the loop.
            eos = self.template.tokenizer.eos_token or ""
            if turn is turns[-1] and eos and text.startswith(eos, turn.end):
                stop = turn.end + len(eos)
        return Turn(turn.index, turn.role, turn.start, turn.end, ((start, stop),))

    def _check_rendered(self, turn: Turn, messages: Sequence[Message], tools: Any, text: str) -> None:
        """A turn that leaves out what the assistant says, or holds what a tool says, would train the wrong thing."""
        index, message, body = turn.index, messages[turn.index], text[turn.start : turn.end]
        content = message.get("content")
        if isinstance(content, str) and content.strip() and content.strip() not in body:
            other = self.template.body(
                index, [*messages[:index], {**message, "content": SENTINEL}, *messages[index + 1 :]], tools
            )
            if other == body:
                raise MaskError(f"{self.name} leaves out the content of message {index + 1}, an assistant turn")
        for call in message.get("tool_calls") or ():
            name = str((call.get("function") or call).get("name", "")) if isinstance(call, Mapping) else ""
            if name and name not in body:
                hint = "Choose a template that writes tool calls with model.chat_template."
                raise MaskError(f"{self.name} leaves out the tool call {visible(name)} of message {index + 1}", hint)
        following = messages[index + 1] if index + 1 < len(messages) else {}
        if following.get("role") == "tool" and not self.template.has_marks:
            other = self.template.body(
                index, [*messages[: index + 1], {**following, "content": SENTINEL}, *messages[index + 2 :]], tools
            )
            if other != body:
                raise MaskError(
                    f"{self.name} writes the answer of a tool inside the turn of the assistant (message {index + 1})"
                )

    def _check_others(self, turns: Sequence[Turn], messages: Sequence[Message], tools: Any, text: str) -> None:
        """What others say must not be learned: a template may write the next question in the round of an answer.

        The first `COMPARED` conversations are rendered with something added to what others say; the later ones where an
        answer holds what another says, word for word.
        """
        learned = [text[turn.trained[0][0] : turn.end] for turn in turns]
        changed = [*messages]
        for index, message in enumerate(messages):
            said = message.get("content")
            if message["role"] == "assistant" or not isinstance(said, str) or not said.strip():
                continue
            if self._tried < COMPARED or any(said.strip() in words for words in learned):
                changed[index] = {**message, "content": said + SENTINEL}
        if all(one is other for one, other in zip(changed, messages, strict=True)):
            return
        self._tried += 1
        found = self.template.regions(changed, tools)
        bodies = {index: found.text[start:end] for index, start, end in found.regions} if found is not None else {}
        for turn, words in zip(turns, learned, strict=True):
            body = bodies.get(turn.index, "")
            if SENTINEL in body and not body.endswith(words):
                raise MaskError(
                    f"{self.name} writes what another says inside the turn of the assistant (message {turn.index + 1})",
                    "Choose another template with model.chat_template.",
                )

    def _without_thinking(self, turn: Turn, messages: Sequence[Message], tools: Any, text: str) -> Turn:
        """The turn with what is trained from its answer on: its content, or its first call of a tool where it has none."""
        index, message, body = turn.index, messages[turn.index], text[turn.start : turn.end]
        if not _answers(message):
            return replace(turn, trained=())
        first = self._answer(body, index, messages, tools)
        thought = str(message.get("reasoning_content") or "").strip()
        if first is None or (thought and thought in body[first:] and thought not in body[:first]):
            raise MaskError(
                f"{self.name} does not write message {index + 1} with its reasoning before its answer, so where the "
                "answer begins cannot be told",
                "Set data.trained_thinking to true, or choose another template with model.chat_template.",
            )
        start = turn.start + first
        return replace(turn, trained=tuple((max(begin, start), end) for begin, end in turn.trained if end > start))

    def _answer(self, body: str, index: int, messages: Sequence[Message], tools: Any) -> int | None:
        """The first character of the turn that comes of its content; of its calls where that writes none."""
        message = messages[index]
        content = message.get("content")
        if isinstance(content, str):
            start = answer_start(content)
            variants = [{**message, "content": content[:start] + SENTINEL + content[start:]}]
        else:
            variants = [{**message, "content": [{"type": "text", "text": SENTINEL}, *(content or ())]}]
        if message.get("tool_calls"):
            variants.append({key: value for key, value in message.items() if key != "tool_calls"})
        for variant in variants:
            other = self.template.body(index, [*messages[:index], variant, *messages[index + 1 :]], tools)
            if other is not None and other != body:
                first = _common(body, other)
                inside = (
                    each.start() for each in self.template.added.finditer(body) if each.start() < first < each.end()
                )
                return next(inside, first)
        return None

    def _header(self, body: str, index: int, messages: Sequence[Message], tools: Any) -> int:
        """Characters at the start of the turn that the generation prompt supplies."""
        shared = 0
        for prefix in (messages[:index], [{"role": "user", "content": "x"}]):
            _, prompt = self.template.prompt(prefix, tools) if prefix else ("", "")
            if not prompt:
                continue
            lead = len(body) - len(body.lstrip())
            for skip in (0, lead):
                if body.startswith(prompt, skip):
                    return skip + len(prompt)
            shared = max(shared, _common(body, prompt))
        position = min(shared, self._first_dependent(body, index, messages, tools))
        for match in self.template.added.finditer(body):
            if match.start() < position < match.end():
                position = match.start()
        if position == 0:
            raise MaskError(
                f"{self.name} begins message {index + 1} otherwise than its generation prompt, so where the answer "
                "begins cannot be told",
                "Choose another template with model.chat_template, or add {% generation %} marks to this one.",
            )
        return position

    def _first_dependent(self, body: str, index: int, messages: Sequence[Message], tools: Any) -> int:
        """The first character of the turn that depends on what the assistant says, thinks or calls."""
        message = messages[index]
        variants: list[Message] = [{**message, "content": SENTINEL}, {**message, "reasoning_content": SENTINEL}]
        if message.get("tool_calls"):
            calls = [{"id": "call00000", "type": "function", "function": {"name": SENTINEL, "arguments": {}}}]
            variants.append({**message, "tool_calls": calls})
        first = len(body)
        for variant in variants:
            other = self.template.body(index, [*messages[:index], variant, *messages[index + 1 :]], tools)
            if other is not None and other != body:
                first = min(first, _common(body, other))
        return first

    def _closing(self, body: str, index: int, messages: Sequence[Message], tools: Any) -> tuple[int, bool]:
        """Where the turn's end mark ends; without one where its content ends, and whether there is a mark."""
        stripped = len(body.rstrip())
        if body[:stripped].endswith(self.template.ends):
            return stripped, True
        content = messages[index].get("content")
        if not isinstance(content, str):
            return stripped, True
        longer = {**messages[index], "content": content + SENTINEL}
        other = self.template.body(index, [*messages[:index], longer, *messages[index + 1 :]], tools)
        if other is None or SENTINEL not in other:
            return stripped, False
        tail = _common(body[::-1], other[other.rindex(SENTINEL) + len(SENTINEL) :][::-1])
        if body[len(body) - tail :].strip():
            return stripped, True
        return len(body) - tail, False


def _plain_turn(turn: Turn) -> list[Any]:
    return [turn.index, turn.role, turn.start, turn.end, turn.trained]


def token_mask(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """For each token, whether any of its characters is trained; a token of no characters is not."""
    if len(spans) <= 1:
        first, last = spans[0] if spans else (0, 0)
        return [first < end > start < last for start, end in offsets]
    mask, current = [], 0
    for start, end in offsets:
        while current < len(spans) and spans[current][1] <= start:
            current += 1
        mask.append(start < end and current < len(spans) and spans[current][0] < end)
    return mask


def _wanted(messages: Sequence[Message], trained: str) -> set[int]:
    """The turns that are learned. A turn flagged as not trained never is, nor one in which the assistant says nothing:
    its end mark alone would teach to be silent, so only a flag of its own asks for that."""
    assistant = {index for index, message in enumerate(messages) if message["role"] == "assistant"}
    flags = {index: flag for index, message in enumerate(messages) if (flag := flag_of(message)) is not None}
    if trained != "flag":
        asked = {max(assistant, default=-1)} & assistant if trained == "last" else assistant
        return {index for index in asked if flags.get(index, True) and (index in flags or has_content(messages[index]))}
    for index, flag in flags.items():
        if flag and "train" in messages[index] and index not in assistant:
            raise MaskError(f"message {index + 1} is flagged as trained, but only turns of the assistant can be")
    return {index for index, flag in flags.items() if flag and index in assistant}


def flag_of(message: Message) -> Any:
    """What the row itself says about learning this turn; nothing where it says nothing."""
    return next((message[name] for name in FLAGS if message.get(name) is not None), None)


def has_content(message: Message) -> bool:
    """Whether the turn holds anything: text, a part of a list, reasoning or a call of a tool."""
    content = message.get("content")
    said = bool(content.strip()) if isinstance(content, str) else bool(content)
    return said or bool(message.get("reasoning_content")) or bool(message.get("tool_calls"))


def _assign(marks: list[Span], turns: tuple[Turn, ...]) -> tuple[Turn, ...] | None:
    """The marks by turn, or nothing when one does not lie in a turn of the assistant (then they are not believed)."""
    if not turns:
        return None
    spans: dict[int, list[Span]] = {}
    for start, end in marks:
        home = next((turn for turn in reversed(turns) if turn.start <= start), None)
        if home is None or home.role != "assistant" or (end > home.end and home is not turns[-1]):
            return None
        spans.setdefault(home.index, []).append((start, end))
    return tuple(Turn(t.index, t.role, t.start, t.end, tuple(spans.get(t.index, ()))) for t in turns)


def _outside(length: int, turns: Sequence[Turn]) -> tuple[Span, ...]:
    """What is left of a text of this length without these turns, which lie in order."""
    borders = [0, *(border for turn in turns for border in (turn.start, turn.end)), length]
    return tuple((start, end) for start, end in zip(borders[::2], borders[1::2], strict=True) if start < end)


def answer_start(content: str) -> int:
    """Where the answer begins in a text that may hold the reasoning before it."""
    end = max((content.rfind(mark) + len(mark) for mark in THOUGHT if mark in content), default=0)
    return len(content) - len(content[end:].lstrip()) if end else 0


def _answers(message: Message) -> bool:
    """Whether the turn holds anything beside reasoning."""
    content = message.get("content")
    said = bool(content[answer_start(content) :].strip()) if isinstance(content, str) else bool(content)
    return said or bool(message.get("tool_calls"))


def _content(message: Message) -> bool:
    return bool(message.get("content") or message.get("tool_calls"))


def _common(one: str, other: str) -> int:
    length = min(len(one), len(other))
    for position in range(length):
        if one[position] != other[position]:
            return position
    return length
