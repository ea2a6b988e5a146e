"""One example to token rows: rendered, tokenized once, and marked with what is learned.

Ids are those of `apply_chat_template(tokenize=True)` or of the tokenizer itself; labels repeat them where the model
learns and hold -100 elsewhere. Preference rows are cut where the prompt and both answers first differ, token by token,
as TRL's DPO does. Tokenizers without character offsets are refused, since their masks cannot be exact.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from engine.config.method import learns_from_images
from engine.config.tree import RunConfig
from engine.data.chat import Chat, Conversation
from engine.data.chat_masks import Rendered, Turn, answer_start, flag_of, token_mask
from engine.data.chat_template import FLAGS, MaskError, Message, Span
from engine.data.parts import IMAGE, Example, FormatError, with_image_parts
from engine.data.plan import Plan, named_template, template_of
from engine.data.pretokenized import IGNORED, refuse_strange
from engine.data.template_flaws import CONTROL, left_out
from engine.data.vision import ImageTokens, images_of, no_processor, written_out
from engine.errors import WorkbenchError

_BEGIN, _END = itemgetter(0), itemgetter(1)


@dataclass
class Piece:
    """Text to tokenize with what is trained in it; `ready` is its row where it is tokenized already."""

    text: str
    spans: Sequence[Span]
    special: bool
    turns: tuple[Turn, ...] = ()
    images: list[str] = field(default_factory=list)
    places: Sequence[Span] = ()
    """Characters of each image, which are never trained."""
    ready: dict[str, Any] | None = None
    flaws: tuple[str, ...] = ()
    """What is odd about it, by the names of `engine.facts.template_flaws`."""


def chat_of(config: RunConfig, processing_class: Any) -> Chat | None:
    """What renders the conversations of a run outside of its rows; None where it has no chat template."""
    template, name = template_of(config, processing_class)
    return Chat(processing_class, template, name, config.model.chat_template_kwargs) if template else None


class Tokens:
    """Turns examples into prepared rows for one plan and processing class."""

    def __init__(self, plan: Plan, processing_class: Any) -> None:
        self.plan, self.processing_class = plan, processing_class
        self.tokenizer = getattr(processing_class, "tokenizer", processing_class)
        if not getattr(self.tokenizer, "is_fast", False):
            raise WorkbenchError(
                f"model.tokenizer: {type(self.tokenizer).__name__} gives no character offsets, so masks cannot be exact",
                "Use a tokenizer that has a tokenizer.json.",
            )
        processor = images_of(processing_class)
        self.images = ImageTokens(processor) if processor is not None else None
        self._sees = self.images is not None and learns_from_images(plan.method)
        """Whether a prompt has columns of its images."""
        self.chat = (
            Chat(
                processing_class,
                plan.template,
                plan.template_name,
                plan.template_kwargs,
                thinking=plan.trained_thinking,
            )
            if plan.template
            else None
        )
        self._others: dict[str, Tokens] = {}
        self._flaws: list[str] = []
        self._vocabulary: list[int] | None = None
        special = (token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special)
        drawn = {self.images.token, self.images.before, self.images.after} if self.images is not None else set()
        marks = [token for token in special if token.strip() and token not in drawn]
        self._marks = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or "(?!)")
        self._ends = tuple(token for token in map(str, self.tokenizer.added_tokens_encoder) if token.strip())

    @property
    def notes(self) -> set[str]:
        """What the templates noted of the rows so far."""
        return set[str]().union(*(each.chat.notes for each in (self, *self._others.values()) if each.chat))

    def of(self, example: Example) -> Tokens:
        """These, or those that write in the chat template which the example's source names. Raises `WorkbenchError`."""
        name = example.template
        if name is None:
            return self
        if name not in self._others:
            text, shown = named_template(name, self.processing_class, "chat_template of a source")
            plan = replace(self.plan, template=text, template_name=shown)
            self._others[name] = Tokens(plan, self.processing_class)
        return self._others[name]

    # -- SFT and pretraining -------------------------------------------------------------------------------------------
    def piece(self, example: Example, rendered: Rendered | MaskError | None = None) -> Piece:
        """The text of an example with what is trained in it; its images, which are references, are written out. `rendered`
        is what the chat template made of it, where that is known. Raises `MaskError`, and `DataError` for an image."""
        piece = self._piece(example, rendered)
        if piece.ready is not None and self.images is not None:
            images = list(example.images)
            return replace(piece, images=images, ready=self.images.seen(piece.ready, images))
        if self.images is None:
            if example.images:
                raise no_processor(example.images)
            return piece
        if not example.images and self.images.token not in piece.text:
            return piece
        full = self.images.expand(piece.text, piece.spans, piece.turns, example.images)
        images = list(example.images)
        return Piece(full.text, full.spans, piece.special, full.turns, images, full.places, flaws=piece.flaws)

    def _piece(self, example: Example, rendered: Rendered | MaskError | None) -> Piece:
        if example.kind == "tokens":
            labels = example.input_ids if example.labels is None else example.labels
            way_out = "Tokenize the data with the model's own tokenizer."
            refuse_strange(example.input_ids, example.labels, len(self.tokenizer), way_out)
            return Piece("", [], False, ready={"input_ids": list(example.input_ids), "labels": list(labels)})
        if example.drawn is not None:
            ids = example.drawn.ids(self._plain_tokens())
            return Piece("", [], False, ready={"input_ids": ids, "labels": list(ids)})
        if example.kind == "text":
            text = self._closed(written_out(self.images, example, example.text))
            # An end mark alone teaches to write nothing.
            spans = [(0, len(text))] if example.text.strip() else []
            return Piece(text, spans, True)
        if example.kind == "pair" and (isinstance(example.prompt, str) and self.chat is None):
            assert isinstance(example.chosen, str)
            prompt = written_out(self.images, example, example.prompt)
            answer = written_out(self.images, example, example.chosen)
            text = prompt + self._closed(answer)
            thought = 0 if self.plan.trained_thinking else answer_start(answer)
            start = 0 if self.plan.trained_turns == "all" else len(prompt) + thought
            spans = [(start, len(text))] if start == 0 or answer[thought:].strip() else []
            return Piece(text, spans, True)
        if rendered is None:
            rendered = self._chat().spans(*self._conversation(example))
        if isinstance(rendered, MaskError):
            raise rendered
        messages, tools, _ = self._conversation(example)
        flaws = (*rendered.flaws, *left_out(self._chat(), self._marks, messages, tools, rendered.text))
        return Piece(rendered.text, rendered.spans, False, rendered.turns, flaws=flaws)

    def conversation(self, example: Example) -> Conversation | None:
        """What the chat template is asked for an example; None where it is not asked."""
        if self.chat is None or example.kind in ("tokens", "text", "synthetic"):
            return None
        return self._conversation(example)

    def _conversation(self, example: Example) -> Conversation:
        if example.kind == "pair":
            messages, trained = _pair_messages(example, self.plan.trained_turns)
            return messages, example.tools, trained
        return list(example.messages), example.tools, self.plan.trained_turns

    def rows(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Token rows of several pieces in one call of the tokenizer."""
        rows: list[dict[str, Any]] = [{**piece.ready, "piece": piece} for piece in pieces if piece.ready is not None]
        for special in (False, True):
            chosen = [piece for piece in pieces if piece.special is special and piece.ready is None]
            if not chosen:
                continue
            texts = [piece.text for piece in chosen]
            encoded = self.tokenizer(
                texts,
                add_special_tokens=special,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
            )
            for piece, ids, offsets in zip(chosen, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                rows.append({"piece": piece, "offsets": offsets, **self._row(piece, ids, offsets)})
        order = {id(piece): number for number, piece in enumerate(pieces)}
        return sorted(rows, key=lambda row: order[id(row["piece"])])

    def _row(self, piece: Piece, ids: list[int], offsets: list[Span]) -> dict[str, Any]:
        if piece.special and piece.spans and piece.spans[0][0] == 0:
            # Plain text: special tokens that the tokenizer adds at its start belong to it.
            labels = list(ids)
        elif piece.special:
            mask = token_mask(offsets, piece.spans)
            labels = [token if trained else IGNORED for token, trained in zip(ids, mask, strict=True)]
        else:
            labels = _learned(ids, offsets, piece.spans)
        if self.images is None:
            return {"input_ids": ids, "labels": labels}
        images = [place for place, drawn in enumerate(token_mask(offsets, piece.places)) if drawn]
        for place in images:
            labels[place] = IGNORED
        # Every row of a model that sees has the column, so that a file whose first rows are text keeps those of others.
        return {"input_ids": ids, "labels": labels, "images": piece.images, "image_tokens": images}

    # -- what a template leaves out ------------------------------------------------------------------------------------
    def flaws(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """What is odd about the row that was made last, by the names of `engine.facts.template_flaws`."""
        piece = row.get("piece")
        found = list(piece.flaws if isinstance(piece, Piece) else self._flaws)
        if isinstance(piece, Piece) and CONTROL.search(piece.text):
            found.append("control")
        bos = self.tokenizer.bos_token_id
        if bos is not None and list(row.get("input_ids", row.get("prompt_ids", ())))[:2] == [bos, bos]:
            found.append("double_bos")
        return tuple(dict.fromkeys(found))

    # -- a prompt and its answers --------------------------------------------------------------------------------------
    def answers(
        self, example: Example, answers: Sequence[str | list[Message]]
    ) -> tuple[list[int], list[list[int]], dict[str, Any]]:
        """Ids of the prompt and of each answer, cut where the prompt and all answers first differ; and for a model that sees
        the columns of its images, which stand in the prompt. Raises `MaskError`, and `DataError` for an image."""
        prompt, tools = example.prompt, example.tools
        self._flaws = []
        if example.drawn is not None:
            asked = example.drawn.tokens // 2
            said = example.drawn.tokens - asked
            parts = [example.drawn.ids(self._plain_tokens(), 1 + part, said) for part in range(len(answers))]
            return example.drawn.ids(self._plain_tokens(), 0, asked), parts, {}
        if isinstance(prompt, str) and self.chat is not None:
            told = with_image_parts(prompt) if example.images else prompt
            prompt = [{"role": "user", "content": told}]
            answers = [[{"role": "assistant", "content": str(answer)}] for answer in answers]
        if isinstance(prompt, str):
            prompt = written_out(self.images, example, prompt)
            texts = [prompt, *(prompt + self._closed(str(answer)) for answer in answers)]
            start, special = len(prompt), True
        else:
            chat, special = self._chat(), False
            whole = [[*prompt, *answer] for answer in answers]
            texts = [chat.render(prompt, tools, prompt=True), *(chat.render(answer, tools) for answer in whole)]
            for messages, written in zip(whole, texts[1:], strict=True):
                self._flaws += left_out(chat, self._marks, messages, tools, written)
            if any(
                len(answer) == 1 and not text.startswith(texts[0])
                for answer, text in zip(answers, texts[1:], strict=True)
            ):
                self._flaws.append("prompt")
            start = min(
                self._answer_start(answer, tools, len(prompt), text)
                for answer, text in zip(whole, texts[1:], strict=True)
            )
        self._flaws += ["control"] if any(map(CONTROL.search, texts)) else []
        texts, start, places = self._with_images(example, texts, start)
        encoded = self.tokenizer(texts, add_special_tokens=special, return_offsets_mapping=True)
        ids = encoded["input_ids"]
        shared = min(_common(ids[0], each) for each in ids[1:])
        reached = encoded["offset_mapping"][1][shared - 1][1] if shared else 0
        if not all(text.rstrip().endswith(self._ends) for text in texts[1:]):
            self._flaws.append("no_end")
        if not isinstance(prompt, str) and reached < start:
            raise MaskError(
                f"{self.plan.template_name} writes the prompt alone otherwise than before an answer, so where the answer "
                "begins cannot be told",
                "Choose another template with model.chat_template.",
            )
        images = image_columns(example.images, encoded["offset_mapping"][0], places) if self._sees else {}
        return ids[0][:shared], [each[shared:] for each in ids[1:]], images

    def _with_images(self, example: Example, texts: list[str], start: int) -> tuple[list[str], int, list[Span]]:
        """Texts that begin with one prompt, with its images written out; where the answers then begin, and the characters of
        each image in the prompt."""
        if self.images is None:
            if example.images:
                raise no_processor(example.images)
            return texts, start, []
        if not example.images and not any(self.images.token in text for text in texts):
            return texts, start, []
        full = [self.images.expand(text, [(start, start)], (), example.images) for text in texts]
        return [each.text for each in full], full[1].spans[0][0], full[0].places

    def _answer_start(self, messages: list[Message], tools: Any, first: int, text: str) -> int:
        """Where the first answering message begins in the text; everything before it must be in the prompt."""
        turns = self._chat().turns(messages, tools, text)
        return next((turn.start for turn in turns if turn.index == first), 0)

    # -- a prompt alone ------------------------------------------------------------------------------------------------
    def turns_of(self, prompt: str | list[Message], images: Sequence[str] = ()) -> str | list[Message]:
        """The prompt as it is asked: with a chat template a text is the user's turn, each `<image>` of a row with images a
        part of it."""
        if not isinstance(prompt, str) or self.chat is None:
            return prompt
        return [{"role": "user", "content": with_image_parts(prompt) if images else prompt}]

    def prompt(
        self, prompt: str | list[Message], tools: Any, images: Sequence[str] = ()
    ) -> tuple[list[int], dict[str, Any]]:
        """Ids that an answer follows, the generation prompt of the template included, and for a model that sees the columns
        of its images. Raises `MaskError`, and `DataError` for an image."""
        self._flaws = []
        asked = self.turns_of(prompt, images)
        if isinstance(asked, str):
            text = asked.replace(IMAGE, self.images.written) if images and self.images is not None else asked
        else:
            chat = self._chat()
            text = chat.render(asked, tools, prompt=True)
            self._flaws += left_out(chat, self._marks, asked, tools, text)
        self._flaws += ["control"] if CONTROL.search(text) else []
        places: list[Span] = []
        if self.images is not None and (images or self.images.token in text):
            full = self.images.expand(text, [], (), images)
            text, places = full.text, full.places
        elif images:
            raise no_processor(images)
        encoded = self.tokenizer(text, add_special_tokens=isinstance(asked, str), return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        if isinstance(asked, str) and len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return ids, image_columns(images, encoded["offset_mapping"][: len(ids)], places) if self._sees else {}

    def steps(self, example: Example) -> tuple[list[int], list[int]]:
        """Ids of a prompt with the steps of an answer, a line each, and the place of each step's last token."""
        ids, _ = self.prompt(example.prompt, example.tools)
        ends: list[int] = []
        for number, step in enumerate(example.steps, 1):
            own = list(self.tokenizer(f"{step}\n", add_special_tokens=False)["input_ids"])
            if not own:
                raise FormatError(
                    f"step {number} of the answer is no token of this tokenizer, so nothing bears its verdict"
                )
            ids = ids + own
            ends.append(len(ids) - 1)
        return ids, ends

    # -- a text to be turned into a vector -----------------------------------------------------------------------------
    def texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text of a row with the special tokens that the tokenizer adds by itself; none of an empty one."""
        self._flaws = ["control"] if any(map(CONTROL.search, texts)) else []
        return [list(self.tokenizer(text)["input_ids"]) if text else [] for text in texts]

    # -- shared --------------------------------------------------------------------------------------------------------
    def _chat(self) -> Chat:
        if self.chat is None:
            named = (
                "model.chat_template is none"
                if self.plan.template_name == "none"
                else "the tokenizer has no chat template"
            )
            raise MaskError(
                f"{named}, and these rows are messages",
                "Name one with model.chat_template: chatml, llama3, plain, or a Jinja file.",
            )
        return self.chat

    def _plain_tokens(self) -> list[int]:
        """The vocabulary without its special tokens, which mean something to a model."""
        if self._vocabulary is None:
            special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
            self._vocabulary = [token for token in range(len(self.tokenizer)) if token not in special]
        return self._vocabulary

    def _closed(self, text: str) -> str:
        eos = self.tokenizer.eos_token or ""
        return text if text.endswith(eos) else text + eos


def _pair_messages(example: Example, trained: str) -> tuple[list[Message], str]:
    """Prompt and completion as one conversation in which only the completion is learned, or what `trained` says of it."""
    contents = [
        with_image_parts(text) if example.images and isinstance(text, str) else text
        for text in (example.prompt, example.chosen)
    ]
    first = [{"role": "user", "content": contents[0]}] if isinstance(example.prompt, str) else example.prompt
    last = [{"role": "assistant", "content": contents[1]}] if isinstance(example.chosen, str) else example.chosen
    if trained == "all":
        return [*first, *last], trained
    asked = [{**{key: value for key, value in turn.items() if key not in FLAGS}, "train": False} for turn in first]
    if trained == "flag" and any(flag_of(turn) is not None for turn in last):
        return [*asked, *last], trained
    return [*asked, *last], "last" if trained == "last" else "assistant"


def image_columns(images: Sequence[str], offsets: Sequence[Span], places: Sequence[Span]) -> dict[str, Any]:
    """The columns of a prompt's images for a model that sees, by the characters of each."""
    drawn = [token_mask(offsets, [place]) for place in places]
    spans = [(mask.index(True), len(mask) - mask[::-1].index(True)) for mask in drawn]
    tokens = [at for span in spans for at in range(*span)]
    return {"images": list(images), "image_spans": spans, "image_tokens": tokens}


def _learned(ids: list[int], offsets: list[Span], spans: Sequence[Span]) -> list[int]:
    """The ids where `token_mask` says so, elsewhere `IGNORED`. The tokens are those of the text alone, in its order, so that
    each span is looked for and only its own tokens are looked at."""
    labels, done = [IGNORED] * len(ids), 0
    for first, last in spans:
        begin = bisect_right(offsets, first, done, key=_END)
        done = bisect_left(offsets, last, begin, key=_BEGIN)
        within = zip(ids[begin:done], offsets[begin:done], strict=True)
        labels[begin:done] = [token if start < end else IGNORED for token, (start, end) in within]
        # A token may begin in one span and end in the next.
        done = max(done - 1, begin)
    return labels


def _common(ids: Sequence[int], other: Sequence[int]) -> int:
    length = min(len(ids), len(other))
    return next((index for index in range(length) if ids[index] != other[index]), length)
