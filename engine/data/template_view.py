"""A row as a chat template writes it, turn by turn: the tokens of each, what is learned, and what is odd about it.

For whoever looks at a template or writes one: `text` is tried in the place of the config's. The template runs in its own
process as everywhere; what it refuses is part of the answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.data.parts import Example, Message
from engine.data.plan import Plan, named_template
from engine.data.pretokenized import IGNORED
from engine.data.preview import locate
from engine.data.token_parts import learned, slices, tokens_of
from engine.data.tokens import Piece, Tokens
from engine.errors import DataError, WorkbenchError
from engine.facts.template_flaws import TEMPLATE_FLAWS

MOST_TURNS = 200


def rendered(plan: Plan, processing_class: Any, number: int, text: str | None) -> dict[str, Any]:
    """Row `number` as a template writes it: `turns` of tokens, what is `asked` before an answer, `flaws` in sentences, and
    `problem` where it cannot be written. Raises `DataError` for a row that is not there."""
    place = locate(plan, number)
    if place is None:
        raise DataError(f"there is no row {number}")
    own = plan.sources[place[0]].template
    example, _ = plan.example(*place)
    example.template = None
    template, name = plan.template, plan.template_name
    if own is not None:
        template, name = named_template(own, processing_class, "chat_template of a source")
    if text is not None:
        template, name = text, "this template"
    told: dict[str, Any] = {
        "row": number,
        "name": name,
        "text": template or "",
        "of_source": own is not None,
        "turns": [],
        "asked": "",
        "flaws": [],
        "problem": "",
    }
    messages = conversation(example)
    if not messages:
        return told | {"problem": "this row is text or tokens, and no chat template writes it"}
    if not template:
        return told | {"problem": "there is no chat template: these rows need one under model.chat_template"}
    try:
        tokens = Tokens(replace(plan, template=template, template_name=name), processing_class)
        chat = Example("chat", messages=messages, tools=example.tools, images=example.images)
        piece = tokens.piece(chat)
        (row,) = tokens.rows([piece])
        flaws = [TEMPLATE_FLAWS[each] for each in tokens.flaws(row)]
    except WorkbenchError as problem:
        return told | {"problem": problem.full_message}
    return told | {
        "turns": _turns(piece, row)[:MOST_TURNS],
        "asked": _generation_prompt(tokens, messages, example.tools),
        "flaws": [f"This row {flaw.one}. {flaw.todo}" for flaw in flaws],
        "tokens": len(row["input_ids"]),
        "trained": sum(label != IGNORED for label in row["labels"]),
    }


def conversation(example: Example) -> list[Message]:
    """The turns of a row, the better answer of a pair as the last; none where it has no turns."""
    if example.messages:
        return list(example.messages)
    if example.kind not in ("pair", "preference", "rated", "prompt"):
        return []
    made: list[Message] = []
    for role, said in (("user", example.prompt), ("assistant", "" if example.kind == "prompt" else example.chosen)):
        made += said if isinstance(said, list) else [{"role": role, "content": said}] if said else []
    return made


def _turns(piece: Piece, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The tokens of each turn; what stands before the first is one without a role, what follows a turn belongs to it."""
    offsets = row["offsets"]
    items = tokens_of(row["input_ids"], slices(piece.text, offsets), learned(row["labels"]))
    starts = [next((at for at, (_, end) in enumerate(offsets) if end > turn.start), len(items)) for turn in piece.turns]
    found = []
    if (first := starts[0] if starts else len(items)) > 0:
        found.append({"role": "", "tokens": items[:first]})
    for turn, start, after in zip(piece.turns, starts, [*starts[1:], len(items)], strict=True):
        found.append({"role": turn.role, "tokens": items[start:after]})
    return found


def _generation_prompt(tokens: Tokens, messages: list[Message], tools: Any) -> str:
    """What the template writes behind the last question to have it answered; empty where it writes nothing of the kind."""
    last = max((at for at, turn in enumerate(messages) if turn["role"] == "assistant"), default=len(messages))
    before = messages[:last]
    if not before or tokens.chat is None:
        return ""
    try:
        plain, asked = (tokens.chat.render(before, tools, prompt=prompt) for prompt in (False, True))
    except WorkbenchError:
        return ""
    return asked[len(plain) :] if asked.startswith(plain) else ""
