"""One row of any known format to one example: messages, text, a prompt with its completion, a preference, tokens.

Formats are a table (`FORMATS`) of parts and the column names that people use for them; `columns` in the config overrides
any of them. Here rows are only re-arranged, never rendered or tokenized. Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.data.embedding_rows import NEGATIVE, ONLY_SCORED, SCORE, is_meaning, read_texts
from engine.data.labelled_rows import is_rated, read_rated, read_steps
from engine.data.parts import (
    IMAGE,
    Drawn,
    Example,
    FormatError,
    Message,
    Row,
    kind_of,
    messages_of,
    names,
    prompt_text,
    text_of,
    tools_of,
    with_image_parts,
)
from engine.data.pretokenized import ids_of
from engine.data.teacher_logprobs import read_teacher_row
from engine.errors import visible

_OTHER_MEDIA = {"audios", "videos", "audio", "video"}
_TRANSCRIPT = re.compile(r"\n\n(Human|Assistant):")


@dataclass(frozen=True)
class Format:
    """Parts with the column names seen in the wild, the first one being ours; optional parts end in `?`."""

    name: str
    title: str
    parts: Mapping[str, tuple[str, ...]]
    read: Callable[[Row, Mapping[str, str]], Example]
    looks: Callable[[Row, Mapping[str, str]], bool] = lambda row, columns: True
    """Asked while the format is detected, where the names of the columns alone do not tell."""

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
    for media in _OTHER_MEDIA & row.keys():
        if row[media]:
            raise FormatError(f"column {media} holds media other than images, which is not supported")
    example = known.read(row, columns)
    _place_images(example, row, columns.get("images", "images"))
    return example


def _place_images(example: Example, row: Row, column: str) -> None:
    """Turn each `<image>` of a row with a column of images into a part and collect the images in the order of their places.

    A part that names its own image takes none of the column. Where no turn has a place, images stand before the first
    turn of the user, as TRL has it, or before the text or the prompt. Raises `FormatError` where places and images differ
    in number.
    """
    given = row.get(column)
    images = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    if example.sees:
        example.images = images  # their tokens, or places in the processor's own words, are looked for among the tokens
        return
    chats = [
        turns
        for turns in (example.messages, example.prompt, example.chosen, example.rejected)
        if isinstance(turns, list)
    ]
    turns = [turn for chat in chats for turn in chat]
    if column not in row and all(isinstance(turn["content"], str) for turn in turns):
        return
    if column in row:
        for turn in turns:
            if isinstance(turn["content"], str):
                turn["content"] = with_image_parts(turn["content"])
            else:
                turn["content"] = [found for part in turn["content"] for found in _with_places(part)]
    parts = [part for turn in turns if isinstance(turn["content"], list) for part in turn["content"]]
    places = [part for part in parts if part["type"] == "image"]
    texts = [text for text in (example.text, example.prompt, example.chosen) if isinstance(text, str) and column in row]
    if images and turns and not places and not any(IMAGE in text for text in texts):
        asked = next((turn for turn in turns if turn["role"] == "user"), turns[0])
        places = [{"type": "image"} for _ in images]
        told = asked["content"]
        asked["content"] = [*places, *(told if isinstance(told, list) else [{"type": "text", "text": told}])]
    if images and example.kind == "text" and IMAGE not in example.text:
        example.text = IMAGE * len(images) + example.text
        texts = [example.text]
    plain = example.prompt if isinstance(example.prompt, str) and not turns else ""
    if images and plain and not any(IMAGE in text for text in texts):
        example.prompt = IMAGE * len(images) + plain
        texts.append(example.prompt)
    own = [part.pop("image", None) for part in places]
    wanted = sum(image is None for image in own) + sum(text.count(IMAGE) for text in texts)
    if wanted != len(images):
        have = f"{len(images)} image{'' if len(images) == 1 else 's'}"
        raise FormatError(
            f"the text has {wanted} place{'' if wanted == 1 else 's'} for images, and column {visible(column)} holds {have}",
            "Each <image> in the text, or part of type image, needs one, in the same order.",
        )
    left = iter(images)
    example.images = [next(left) if image is None else image for image in own] + list(left)


def _with_places(part: Message) -> list[Message]:
    """A part of text with its `<image>` as parts; any other part as it is."""
    found = with_image_parts(part["text"]) if part["type"] == "text" else part
    return found if isinstance(found, list) else [part]


# -- formats -----------------------------------------------------------------------------------------------------------
def _read_messages(row: Row, columns: Mapping[str, str]) -> Example:
    part = "messages" if row.get(columns.get("messages", "messages")) is not None else "conversations"
    chat = messages_of(row.get(columns.get(part, part)), columns, part)
    system = row.get(columns.get("system", "system"))
    if isinstance(system, str) and system and not (chat and chat[0]["role"] == "system"):
        chat.insert(0, {"role": "system", "content": system})
    return Example("chat", messages=chat, tools=tools_of(row, columns))


def _read_alpaca(row: Row, columns: Mapping[str, str]) -> Example:
    instruction, extra = text_of(row, columns, "instruction"), text_of(row, columns, "input", "")
    chat: list[Message] = []
    if system := text_of(row, columns, "system", ""):
        chat.append({"role": "system", "content": system})
    for pair in row.get(columns.get("history", "history")) or ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise FormatError(f"column history must hold pairs of question and answer; got {kind_of(pair)}")
        chat += [{"role": "user", "content": str(pair[0])}, {"role": "assistant", "content": str(pair[1])}]
    chat.append({"role": "user", "content": f"{instruction}\n{extra}" if extra else instruction})
    chat.append({"role": "assistant", "content": text_of(row, columns, "output")})
    return Example("chat", messages=chat)


def _read_pair(row: Row, columns: Mapping[str, str]) -> Example:
    prompt, answer = (row.get(columns.get(part, part)) for part in ("prompt", "completion"))
    if isinstance(prompt, (list, Mapping)) or isinstance(answer, (list, Mapping)):
        first = messages_of(prompt, columns, "prompt") if not isinstance(prompt, str) else _turn("user", prompt)
        last = messages_of(answer, columns, "completion") if not isinstance(answer, str) else _turn("assistant", answer)
        return Example("pair", prompt=first, chosen=last, tools=tools_of(row, columns))
    return Example("pair", prompt=text_of(row, columns, "prompt"), chosen=text_of(row, columns, "completion"))


def _turn(role: str, text: str) -> list[Message]:
    return [{"role": role, "content": text}]


def _read_text(row: Row, columns: Mapping[str, str]) -> Example:
    return Example("text", text=text_of(row, columns, "text"))


def _read_tokens(row: Row, columns: Mapping[str, str]) -> Example:
    ids, labels = ids_of(row, columns)
    return Example("tokens", input_ids=ids, labels=labels)


def _read_drawn(row: Row, columns: Mapping[str, str]) -> Example:
    return Example("synthetic", drawn=Drawn(row["tokens"], row["seed"]), label=row["label"])


def _read_seen(row: Row, columns: Mapping[str, str]) -> Example:
    """Text, or its tokens with those of its images among them."""
    if row.get(columns.get("input_ids", "input_ids")) is None:
        written = columns.get("_mm_text", "_mm_text")
        named = columns.get("text", "text") if row.get(written) is None else written
        return Example("text", text=text_of(row, {**columns, "text": named}, "text"), sees=True)
    ids, labels = ids_of(row, columns)
    return Example("tokens", input_ids=ids, labels=labels, sees=True)


def _is_seen(row: Row, columns: Mapping[str, str]) -> bool:
    return columns.get("_mm_text", "_mm_text") in row


def _read_prompt(row: Row, columns: Mapping[str, str]) -> Example:
    prompt, answer = (row.get(columns.get(part, part)) for part in ("prompt", "answer"))
    asked = messages_of(prompt, columns, "prompt") if isinstance(prompt, (list, Mapping)) else None
    return Example(
        "prompt",
        prompt=asked if asked is not None else prompt_text(row, columns),
        chosen="" if answer is None else answer if isinstance(answer, str) else json.dumps(answer),
        tools=tools_of(row, columns),
    )


def _read_preference(row: Row, columns: Mapping[str, str]) -> Example:
    chosen, rejected = (_answer(row, columns, part) for part in ("chosen", "rejected"))
    given = row.get(columns.get("prompt", "prompt"))
    tools = tools_of(row, columns)
    inner = row.get("input") if given is None else None
    if isinstance(inner, Mapping) and inner.get("messages") is not None:
        # OpenAI's rows of preferences: what was asked is an object of its own, with its tools.
        given, tools = inner["messages"], tools_of(inner, columns) or tools
        columns = {**columns, "prompt": "input"}
    if given is None:
        given = row.get(columns.get("conversations", "conversations"))
        columns = {**columns, "prompt": columns.get("conversations", "conversations")}
    if given is None and type(chosen) is not type(rejected):
        raise FormatError("chosen and rejected must both hold text or both hold messages")
    if given is not None:
        prompt = prompt_text(row, columns) if isinstance(given, str) else messages_of(given, columns, "prompt")
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


def _read_ranking(row: Row, columns: Mapping[str, str]) -> Example:
    """The best answer against the worst, the pair that the ranking says most about, and all answers for other pairs."""
    name = columns.get("output", "output")
    ranked = row.get(name)
    if not isinstance(ranked, list) or len(ranked) < 2:
        raise FormatError(f"column {visible(name)} must hold a list of answers, the best first; got {kind_of(ranked)}")
    answers = [answer if isinstance(answer, str) else messages_of(answer, columns, "output") for answer in ranked]
    given = row.get(columns.get("prompt", "prompt"))
    prompt = prompt_text(row, columns) if isinstance(given, str) else messages_of(given, columns, "prompt")
    if not all(isinstance(text, str) for text in (prompt, *answers)):
        prompt = _turn("user", prompt) if isinstance(prompt, str) else prompt
        answers = [_turn("assistant", answer) if isinstance(answer, str) else answer for answer in answers]
    tools = tools_of(row, columns)
    return Example("preference", prompt=prompt, chosen=answers[0], rejected=answers[-1], tools=tools, ranked=answers)


def _is_ranking(row: Row, columns: Mapping[str, str]) -> bool:
    ranked = row.get(columns.get("output", "output"))
    return isinstance(ranked, list) and len(ranked) > 1 and all(isinstance(answer, (str, Mapping)) for answer in ranked)


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
        Format(
            "distill",
            "tokens with a teacher's log-probabilities",
            {
                "input_ids": ("input_ids",),
                "target_token_ids": ("target_token_ids",),
                "target_logprobs": ("target_logprobs",),
                "labels?": ("labels",),
                "attention_mask?": ("attention_mask",),
            },
            read_teacher_row,
        ),
        Format(
            "multimodal_pretrain",
            "text with images, or its tokens",
            {
                "text?": ("text", "content", "caption"),
                "images?": ("images", "image"),
                "input_ids?": ("input_ids",),
                "labels?": ("labels",),
                "attention_mask?": ("attention_mask",),
                "_mm_text?": ("_mm_text",),
            },
            _read_seen,
            _is_seen,
        ),
        Format(
            "tokens",
            "tokens",
            {"input_ids": ("input_ids",), "labels?": ("labels",), "attention_mask?": ("attention_mask",)},
            _read_tokens,
        ),
        Format(
            "preference",
            "a preference pair",
            {
                "chosen": (
                    "chosen",
                    "chosen_messages",
                    "response_j",
                    "chosen_response",
                    "preferred",
                    "preferred_output",
                ),
                "rejected": (
                    "rejected",
                    "rejected_messages",
                    "response_k",
                    "rejected_response",
                    "dispreferred",
                    "non_preferred_output",
                ),
                "prompt?": ("prompt", "question", "conversations", "instruction", "messages", "query"),
                "input?": ("input",),
                **_EXTRA,
            },
            _read_preference,
        ),
        Format(
            "ranking",
            "answers from best to worst, of which the first and the last are the pair",
            {
                "prompt": ("prompt", "question", "instruction", "query"),
                "output": ("output", "outputs", "responses", "ranking"),
                "input?": ("input",),
                "tools?": ("tools",),
            },
            _read_ranking,
            _is_ranking,
        ),
        Format(
            "stepwise_supervision",
            "an answer in judged steps",
            {
                "prompt": ("prompt", "question", "problem", "query"),
                "completions": ("completions", "steps"),
                "labels": ("labels", "ratings"),
                "tools?": ("tools",),
            },
            read_steps,
        ),
        Format(
            "embedding",
            "texts that belong together",
            {
                "anchor": ("anchor", "query", *ONLY_SCORED),
                "positive": ("positive", "pos", "sentence2", "text2", "sentence_B"),
                "negative?": NEGATIVE,
                "score?": SCORE,
            },
            read_texts,
            is_meaning,
        ),
        Format(
            "unpaired_preference",
            "an answer with a verdict",
            {
                "label": ("label", "desirable"),
                "prompt?": ("prompt", "question", "instruction", "query"),
                "input?": ("input",),
                "completion?": ("completion", "answer", "response", "output"),
                "messages?": ("messages", "conversations"),
                "tools?": ("tools",),
                "images?": ("images", "image"),
            },
            read_rated,
            is_rated,
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
                "input?": ("input",),
                "answer?": ("answer", "solution", "reference", "ground_truth"),
                "tools?": ("tools",),
                "images?": ("images", "image"),
            },
            _read_prompt,
        ),
        Format("text", "plain text", {"text": ("text", "content", "document"), "images?": ("images",)}, _read_text),
        Format(
            "synthetic",
            "tokens drawn by chance",
            {},
            _read_drawn,
            lambda row, columns: False,
        ),
    )
}
