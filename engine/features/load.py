"""A model as a run trains it: loaded, with the attention that was asked for and, where it was, a base in FP8."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from engine.config.tree import RunConfig
from engine.features import failures
from engine.features.attention_backend.backend import TRIED, settle
from engine.features.attention_backend.sdpa_cudnn_workaround import at_stake, guard
from engine.features.fp8_base.layers import compute_in_fp8, refuse_what_has_no_fp8
from engine.models.expert_shards import divide_experts, expert_group
from engine.models.load import Loaded, load_pretrained


def load_model(config: RunConfig) -> PreTrainedModel:
    """The model that `load` loads, for whoever chooses its device later."""
    return load(config, onto_card=False).model


def load(config: RunConfig, *, onto_card: bool = True) -> Loaded:
    """The model of a config, before an adapter is put beside it; on the card at once, where its weights stay there and
    `onto_card` says so. Raises ModelError as `load_pretrained` does.
    """
    in_fp8 = config.model.quantization == "fp8"
    if in_fp8:
        refuse_what_has_no_fp8(config)
    card = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    straight = card is not None and onto_card and stays_on_the_card(config) and is_of_this_rank(card)
    loaded = (_onto(card, config) if card is not None and straight else None) or load_pretrained(config)
    model, reasons = loaded.model, [loaded.attention_reason]
    if (group := expert_group(config)) is not None:
        divide_experts(model, group)
    if config.model.attention in TRIED:
        reasons = [settle(model, config.model.attention, card)]
    if at_stake(model, card):
        reasons.append(guard(model))
    if in_fp8:
        # On the card, where the layers stay unless they are to wait on the host.
        compute_in_fp8(model, card, stay=not config.memory.layer_offloading)
    return replace(loaded, attention_reason="; ".join(filter(None, reasons)))


def is_of_this_rank(card: torch.device) -> bool:
    """Whether this process trains on the card: one process does on its current one, and of several each on its own, which
    is the current one from when they know of each other."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    return card.index == int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()


def _onto(card: torch.device, config: RunConfig) -> Loaded | None:
    """The model read onto the card; None where that fails, as where the parts of experts and what they are joined to have
    no room beside each other. What is wrong with the model itself is said when it is read without a card."""
    try:
        return load_pretrained(config, card)
    except RuntimeError as problem:
        print(f"The weights are read by way of the host's memory: {failures.first_line(problem)}", file=sys.stderr)
    # Here the error, which holds what was read, is gone.
    gc.collect()
    torch.cuda.empty_cache()
    return None


def stays_on_the_card(config: RunConfig) -> bool:
    """Whether all weights come from files and stay on the card as they are, so that they are read onto it at once: no copy of
    the model lies in the host's memory first, and what looks at all weights looks at them where that is quick.

    Left on the host are weights that are shared out, that wait there, or that are packed on their way, and models whose
    method draws a new head.
    """
    shared = config.distributed.strategy == "fsdp2" or config.distributed.cpu_offload
    plain = config.model.quantization == "none" and not config.memory.layer_offloading
    return plain and not shared and config.method.head == "vocabulary"
