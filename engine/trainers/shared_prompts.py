"""The prompt of a group, computed once: log-probabilities of many answers to one prompt for the price of one prompt.

The prompts without their last token go through the model once each and leave their keys and values; every answer, with
the prompt's last token before it, is computed on top of these. The numbers and gradients are those of the plain pass but
for rounding. Refused where the keys and values of a prompt are not all that an answer sees of it, or where a library
drops them: layers with windows or states of their own, gradient checkpointing, weights split over ranks; and where a
feature counts on one pass a step: offloading, compiled models. Ranks that hold the whole model each share by themselves:
gradients of both passes meet in one reduction.

Shapes: B answers to B / G prompts, P tokens of the longest prompt, T of the longest answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from peft import PeftModel
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from engine.compat.cache_names import CACHE
from engine.compat.instances import put
from engine.config.tree import RunConfig
from engine.features.attention_backend.sdpa_cudnn_workaround import NAME as WHOLE_TILES
from engine.trainers.arguments import checkpointing

ATTENTION = ("sdpa", WHOLE_TILES, "eager")


def can_share(config: RunConfig, model: PreTrainedModel, whole: bool) -> bool:
    """Whether the answers to a prompt can share it, by the run's config and the model as it was built.

    `whole` is whether each rank holds all of the weights.
    """
    memory = config.memory
    return (
        whole
        and not (checkpointing(config) or memory.activation_offloading or memory.layer_offloading)
        and config.kernels.torch_compile is not True
        and model.config._attn_implementation in ATTENTION
        and model.config.get_text_config() is model.config
        and all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
    )


LEAST_SAVED = 2e11
"""Tokens that need not be computed times the weights of a layer, from which a pass more is earned on a card: a host takes a
millisecond to launch a layer's forward pass, in which a card multiplies this often (H100, 4e14 operations a second). At 0.6B
and prompts of 25 tokens a step waited longer for the host than without."""


def is_worth_a_pass(model: PreTrainedModel, rows: int, prompt: int, each: int) -> bool:
    """Whether prompts of that many tokens are computed once for `each` of so many rows; always where no host launches kernels."""
    if model.device.type != "cuda":
        return True
    shape: Any = model.config
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    heads = 2 * (shape.num_attention_heads + (getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads))
    weights = shape.hidden_size * (
        width * heads + 3 * (getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size)
    )
    return (rows - rows // each) * (prompt - 1) * weights >= LEAST_SAVED


def answers_per_prompt(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor) -> int:
    """G, how many answers in a row each prompt of (B, P) has; 1 unless all have as many."""
    new = (prompt_ids[1:] != prompt_ids[:-1]).any(1) | (prompt_mask[1:] != prompt_mask[:-1]).any(1)
    starts = [0, *(new.nonzero().squeeze(1) + 1).tolist(), len(prompt_ids)]
    sizes = {end - start for start, end in pairwise(starts)}
    return sizes.pop() if len(sizes) == 1 else 1


def side_by_side(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with the answers to a row next to each other; entries that are not one for each answer stay."""
    order = batch["row"].argsort(stable=True)
    return {
        name: part[order] if isinstance(part, torch.Tensor) and part.dim() and len(part) == len(order) else part
        for name, part in batch.items()
    }


def read_answers(
    model: torch.nn.Module, base: Any, ids: torch.Tensor, mask: torch.Tensor, width: int, each: int
) -> tuple[torch.Tensor, Any]:
    """Log-probabilities and entropies (B, T) of the last `width` tokens of `ids`, `each` rows in a row having one prompt.

    `model` has TRL's fused head (whose entropies are None if it was not given them), `base` is the part of it below the
    head. `ids` and `mask` are (B, P + T), padded left.
    """
    prompt = ids.shape[1] - width - 1
    cache = _prompts(base, ids[::each, :prompt], mask[::each, :prompt], each)
    own = ids[:, prompt:]
    labels = own.masked_fill(mask[:, prompt:] == 0, -100)
    labels[:, 0] = -100
    out = model(input_ids=own, attention_mask=mask, labels=labels, fused_lm_head=True, **{CACHE: cache})
    return out.log_probs[:, -width:], None if out.entropy is None else out.entropy[:, -width:]


@contextlib.contextmanager
def sampling_once(model: PreTrainedModel | PeftModel, base: Any, each: int) -> Iterator[None]:
    """Inside, `model.generate` computes a prompt once for the `each` rows in a row that have it. An instance's own doing."""

    def generate(input_ids: torch.Tensor, attention_mask: torch.Tensor, **more: Any) -> Any:
        ids, mask = input_ids[::each, :-1], attention_mask[::each, :-1]
        # `generate` counts positions from a prompt's first token, without its padding
        places = (mask.long().cumsum(1) - 1).clamp(min=0)
        more[CACHE] = _prompts(base, ids, mask, each, position_ids=places)
        return plain(input_ids=input_ids, attention_mask=attention_mask, **more)

    plain: Any = model.generate
    undo = put(model, "generate", generate)
    try:
        yield
    finally:
        undo()


def _prompts(base: Any, ids: torch.Tensor, mask: torch.Tensor, each: int, **more: Any) -> DynamicCache:
    """Keys and values of prompts (B / G, P), one for each of the answers to come."""
    cache = DynamicCache(config=base.config)
    base(input_ids=ids, attention_mask=mask, use_cache=True, **{CACHE: cache}, **more)
    layers: list[Any] = cache.layers
    for layer in layers:
        layer.keys, layer.values = _repeat_prompts(layer.keys, each), _repeat_prompts(layer.values, each)
    return cache


def _repeat_prompts(states: Any, each: int) -> torch.Tensor:
    """Repeated by a view, whose backward is one sum: the same at every run, also on a GPU."""
    shape = (states.shape[0], each, *states.shape[1:])
    return states.unsqueeze(1).expand(shape).reshape(-1, *shape[2:])
