"""What a side of a chat answers: a text, token by token, a score of an answer, or texts by their nearness to a query.

Texts come from transformers' own `generate`, so that greedy answers are its tokens; a streamer passes each token on as it
is chosen, and a stopping criterion hears the stop key between two tokens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from engine.chat.models import Side
from engine.config.embedding import Embedding
from engine.config.tree import method_of
from engine.errors import UsageError, WorkbenchError, visible
from engine.generate import prompts_of, without_router_loss

Message = Mapping[str, Any]
_INCOMPLETE = "\ufffd"
"""How a decoder writes bytes that are no whole character yet."""
_MOST_BYTES = 4
"""A character has no more; tokens that make none with so many never will."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. A temperature of 0 takes the likeliest; `top_p` and `seed` then have no part in it."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0


def rendered(side: Side, messages: Sequence[Message], tools: Sequence[Any] = ()) -> tuple[str, list[int]]:
    """The exact text that the model reads and its ids: by the chat template with its generation prompt; without a template
    the last message as it stands. Raises WorkbenchError for what the template does not render."""
    if side.chat is not None:
        text = side.chat.render(list(map(dict, messages)), list(tools), prompt=True)
        return text, list(side.tokenizer(text, add_special_tokens=False)["input_ids"])
    if tools or any(message["role"] == "system" for message in messages):
        what = "tools" if tools else "a system prompt"
        raise UsageError(f"{side.title} has no chat template, so {what} would reach no one.", "Leave it out.")
    text = str(messages[-1]["content"])
    ids = prompts_of(side.processing_class, [text], None).ids[0]
    return side.tokenizer.decode(ids), list(ids)


def answer(
    side: Side,
    messages: Sequence[Message],
    tools: Sequence[Any],
    sampling: Sampling,
    emit: Callable[[str, int], None],
    stopped: threading.Event,
) -> dict[str, Any]:
    """The answer to a conversation. `emit(text, tokens)` is called for each token, with the text that is new (it may wait
    for the tokens that make its character whole) and the tokens so far.

    Returns `text` and `ids` without the mark that ends it, `tokens` made, `prompt_tokens`, `seconds`, `first_seconds` until
    the first token, and `ended`: `stop` by its own mark, `stopped` by a person, `length` by `max_new_tokens`, `positions`
    by what the model can read. Raises WorkbenchError for a conversation that leaves no room for an answer.
    """
    _, ids = rendered(side, messages, tools)
    room = sampling.max_new_tokens
    if side.positions is not None:
        room = min(room, side.positions - len(ids))
        if room < 1:
            raise WorkbenchError(
                f"The conversation is {len(ids)} tokens long, and {side.title} has {side.positions} positions.",
                "Begin a new conversation, or shorten the prompt.",
            )
    torch.manual_seed(sampling.seed)
    stream = _Stream(side.tokenizer, set(side.stops), emit)
    with torch.no_grad(), side.active() as model, without_router_loss(model):
        device = side.model.get_input_embeddings().weight.device
        input_ids = torch.tensor([ids], device=device)
        made = side.model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=_generation(side, sampling, room),
            streamer=stream,
            stopping_criteria=[_Stopped(stopped)],
        )
    new = made[0, len(ids) :].tolist()
    by_itself = bool(new) and new[-1] in side.stops
    if by_itself:
        ended = "stop"
    elif len(new) >= room:
        ended = "length" if room == sampling.max_new_tokens else "positions"
    else:
        ended = "stopped"
    kept = new[:-1] if by_itself else new
    return {
        "text": side.tokenizer.decode(kept, skip_special_tokens=True),
        "ids": kept,
        "tokens": len(new),
        "prompt_tokens": len(ids),
        "seconds": time.monotonic() - stream.began,
        "first_seconds": stream.first,
        "ended": ended,
    }


def score(side: Side, messages: Sequence[Message], answered: str) -> dict[str, Any]:
    """The reward model's number for an answer to these messages, as in training: read at the last token of both."""
    if side.chat is not None:
        text = side.chat.render([*map(dict, messages), {"role": "assistant", "content": answered}])
        ids = side.tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ends = side.tokenizer.eos_token or ""
        text = f"{messages[-1]['content']}{answered}"
        ids = side.tokenizer(text if text.endswith(ends) else text + ends)["input_ids"]
    _refuse_too_long(side, len(ids), "The prompt with its answer")
    with torch.no_grad(), side.active() as model:
        input_ids = torch.tensor([ids], device=side.model.get_input_embeddings().weight.device)
        found = model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).logits
    return {"score": float(found[0, 0]), "prompt_tokens": len(ids)}


def rank(side: Side, query: str, texts: Sequence[str]) -> dict[str, Any]:
    """`order`: the texts' places, nearest to the query first, each with its cosine similarity, pooled as in training."""
    from engine.trainers.embedding import pooled

    how = method_of(side.config, Embedding).pooling
    vectors = []
    with torch.no_grad(), side.active() as model:
        device = side.model.get_input_embeddings().weight.device
        for text in (query, *texts):
            ids = torch.tensor([side.tokenizer(text)["input_ids"]], device=device)
            _refuse_too_long(side, ids.shape[1], "A text")
            mask = torch.ones_like(ids)
            vectors.append(pooled(model(input_ids=ids, attention_mask=mask).last_hidden_state, mask, how)[0])
    unit = torch.nn.functional.normalize(torch.stack(vectors), dim=-1)
    similarity = (unit[1:] @ unit[0]).tolist()
    order = sorted(range(len(texts)), key=lambda place: -similarity[place])
    return {"order": [{"place": place, "text": texts[place], "similarity": similarity[place]} for place in order]}


def _refuse_too_long(side: Side, tokens: int, what: str) -> None:
    if side.positions is not None and tokens > side.positions:
        raise WorkbenchError(
            f"{what} is {tokens} tokens long, and {side.title} has {side.positions} positions.", "Shorten it."
        )


def _generation(side: Side, sampling: Sampling, room: int) -> GenerationConfig:
    """As the samples of a run: nothing of the model's own sampling figures, and no penalty."""
    pad = side.tokenizer.pad_token_id
    draws = sampling.temperature > 0
    return GenerationConfig(
        do_sample=draws,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        max_new_tokens=room,
        use_cache=True,
        pad_token_id=pad if pad is not None else (side.stops or [0])[0],
        eos_token_id=side.stops or None,
        temperature=sampling.temperature if draws else 1.0,
        top_p=sampling.top_p if draws else 1.0,
        top_k=0 if draws else 50,
    )


class _Stopped(StoppingCriteria):
    """Ends the answer once a person has asked for it."""

    def __init__(self, stopped: threading.Event) -> None:
        self._stopped = stopped

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._stopped.is_set(), device=input_ids.device, dtype=torch.bool)


class _Stream(BaseStreamer):
    """Turns tokens into pieces of text as they come; a character of several tokens waits until it is whole."""

    def __init__(self, tokenizer: Any, stops: set[int], emit: Callable[[str, int], None]) -> None:
        self._tokenizer, self._stops, self._emit = tokenizer, stops, emit
        self._ids: list[int] = []
        self._before, self._read = 0, 0
        self._prompt = True
        self.began, self.first = time.monotonic(), 0.0

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:  # generate begins with the prompt's own ids
            self._prompt = False
            return
        if not self._ids:
            self.first = time.monotonic() - self.began
        ids = value.reshape(-1).tolist()
        self._ids += [token for token in ids if token not in self._stops]
        self._pass_on()

    def end(self) -> None:
        self._pass_on(all_of_it=True)

    def _pass_on(self, all_of_it: bool = False) -> None:
        """What the newest tokens add to the text: they are decoded behind those before, on which their spaces depend."""
        before = self._decode(self._ids[self._before : self._read])
        text = self._decode(self._ids[self._before :])
        waits = text.endswith(_INCOMPLETE) and len(self._ids) - self._read < _MOST_BYTES
        piece = "" if waits and not all_of_it else text[len(before) :]
        if piece:
            self._before, self._read = self._read, len(self._ids)
        self._emit(piece, len(self._ids))

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def summary(side: Side) -> dict[str, Any]:
    """What a frontend shows of a side."""
    model = side.model
    return {
        "title": side.title,
        "model": visible(str(side.config.model.name)),
        "template": side.chat is not None,
        "positions": side.positions,
        "device": str(model.get_input_embeddings().weight.device.type),
        "stops": [side.tokenizer.decode([token]) for token in side.stops],
    }
