"""Answers of a model to prompts: greedy, in batches, without leaving a trace in the model that is training.

Used for the samples during a run and for exact-match figures. Training mode of every module, the random state and the
tokenizer's settings are as before afterwards, so a run with samples has the same losses as one without; padding is on
the left and made here, never by changing `padding_side` of the tokenizer that the trainer shares. Sampling with a
temperature is refused: a sample that changes should change because the model did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from engine.compat.instances import in_mode
from engine.data.chat import Chat
from engine.data.plan import own_template
from engine.models.expert_shards import is_divided

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]


class Generates(Protocol):
    """A model of transformers', or PEFT's around one, which passes on what it lacks itself."""

    def get_input_embeddings(self) -> Any: ...

    def generate(self, **inputs: Any) -> torch.Tensor: ...


_SENTINEL = "answer"


@dataclass(frozen=True)
class Prompts:
    """Prompts as token ids, and the ids that end a turn of the template they were rendered by."""

    ids: Sequence[list[int]]
    ends: Sequence[int]


def prompts_of(processing_class: Any, prompts: Sequence[Prompt], chat: Chat | None) -> Prompts:
    """The prompts as they are asked. Raises MaskError where the template does not render one of them.

    A prompt is a text or the messages so far. With a chat template a text is the user's turn and the generation prompt is
    added; without one it is continued as it is.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    return Prompts([_prompt_ids(tokenizer, prompt, chat) for prompt in prompts], end_of_turn(tokenizer, chat))


def generate(
    model: torch.nn.Module,
    processing_class: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    batch_size: int = 64,
) -> list[str]:
    """The greedy completion of each prompt, in order, without special tokens, by the tokenizer's own chat template."""
    asked = prompts_of(processing_class, prompts, _own_chat(processing_class))
    return complete(model, processing_class, asked, max_new_tokens=max_new_tokens, batch_size=batch_size)


def complete(
    model: torch.nn.Module, processing_class: Any, prompts: Prompts, *, max_new_tokens: int = 64, batch_size: int = 64
) -> list[str]:
    """The greedy completion of each prompt, in order, without special tokens.

    `model` may be a PEFT model or have gradient checkpointing on; it must not be wrapped for distributed training.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    ids, stops = prompts.ids, stop_ids(model, tokenizer, prompts.ends)
    # Batches of like length need little padding.
    order = sorted(range(len(ids)), key=lambda number: len(ids[number]))
    answers = [""] * len(ids)
    with preserving_state(model), torch.no_grad():
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size]
            made = _complete(model, [ids[number] for number in part], stops, max_new_tokens, tokenizer)
            for number, new in zip(part, made, strict=True):
                answers[number] = tokenizer.decode(new, skip_special_tokens=True)
    return answers


def answers_to(
    model: torch.nn.Module, processing_class: Any, rows: Sequence[Mapping[str, Any]], batch_size: int = 128
) -> list[tuple[str, str, str]]:
    """For each chat row: its last question, the model's answer and the row's own answer."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    wanted = [row["messages"][-1]["content"].strip() for row in rows]
    longest = max((len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in wanted), default=0)
    prompts = [row["messages"][:-1] for row in rows]
    # Two more than the longest answer: the end of the turn, and room to be wrong by going on.
    given = generate(model, processing_class, prompts, max_new_tokens=longest + 2, batch_size=batch_size)
    return [
        (prompt[-1]["content"], text.strip(), right) for prompt, text, right in zip(prompts, given, wanted, strict=True)
    ]


def stop_ids(model: torch.nn.Module, tokenizer: Any, ends: Sequence[int] = ()) -> list[int]:
    """Ids that end an answer: those of the model's generation config, the tokenizer's, and the template's end of turn."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = {*ends, *([named] if isinstance(named, int) else named or [])}
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return sorted(ids)


def end_of_turn(tokenizer: Any, chat: Chat | None) -> list[int]:
    """The special token with which the template closes a turn of the assistant, if it does by one."""
    if chat is None:
        return []
    shown = chat.render([{"role": "user", "content": "question"}, {"role": "assistant", "content": _SENTINEL}])
    after = shown.rpartition(_SENTINEL)[2]
    first = tokenizer(after, add_special_tokens=False)["input_ids"][:1]
    return list(first) if set(first) <= _special_ids(tokenizer) else []


@contextlib.contextmanager
def preserving_state(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module's mode and the random state are what they were."""
    devices = sorted(
        {p.device.index for p in model.parameters() if p.device.type == "cuda" and p.device.index is not None}
    )
    with torch.random.fork_rng(devices=devices), without_router_loss(model), in_mode(model, training=False):
        yield


@contextlib.contextmanager
def without_router_loss(model: torch.nn.Module) -> Iterator[None]:
    """No loss of the routers of a mixture of experts inside: transformers computes it while it samples too, where nobody
    reads it, and fails over prompts that are padded."""
    held: Any = getattr(model, "config", None)
    text = held.get_text_config() if hasattr(held, "get_text_config") else held
    if not getattr(text, "output_router_logits", False):
        yield
        return
    text.output_router_logits = False
    try:
        yield
    finally:
        text.output_router_logits = True


def _own_chat(processing_class: Any) -> Chat | None:
    template, name = own_template(processing_class)
    return Chat(processing_class, template, name) if template else None


def _prompt_ids(tokenizer: Any, prompt: Prompt, chat: Chat | None) -> list[int]:
    if chat is not None:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(dict, prompt))
        ids = tokenizer(chat.render(messages, prompt=True), add_special_tokens=False)["input_ids"]
    else:
        text = prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)
        ids = tokenizer(text)["input_ids"]
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]
    return ids or [_first_of(tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, 0)]


def _complete(
    model: torch.nn.Module, prompts: list[list[int]], stops: list[int], max_new_tokens: int, tokenizer: Any
) -> list[list[int]]:
    from transformers import GenerationConfig

    pad = _first_of(tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    width = max(len(prompt) for prompt in prompts)
    policy = cast(Generates, model)
    device = policy.get_input_embeddings().weight.device
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    settings = GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        max_new_tokens=max_new_tokens,
        use_cache=True,
        pad_token_id=pad,
        eos_token_id=stops or None,
        # The model's own sampling figures would only cause warnings here.
        temperature=1.0,
        top_p=1.0,
        top_k=50,
    )
    # Processes that divide experts make as many passes as the longest answer of them all takes.
    together = True if is_divided(model) else None
    out = policy.generate(input_ids=ids, attention_mask=mask, generation_config=settings, synced_gpus=together)
    return [_until(new, stops) for new in out[:, width:].tolist()]


def _until(ids: list[int], stops: list[int]) -> list[int]:
    end = next((place for place, token in enumerate(ids) if token in stops), len(ids))
    return ids[:end]


def _special_ids(tokenizer: Any) -> set[int]:
    return {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}


def _first_of(*ids: int | None) -> int:
    return next(value for value in ids if value is not None)
