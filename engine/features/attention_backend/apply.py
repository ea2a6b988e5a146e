"""Packed rows that are kept apart: where each document begins is told to all layers at once.

transformers finds the documents of a pack in its positions, but only in a batch of one row, and in every layer anew; in
larger batches it would let the documents of a row see each other. The model's own instance therefore gets a hook that finds
the beginnings once a pass, over all rows of the batch, and hands them on under the names that transformers' flash attention
reads, as does torch's own attention over documents. Refuses models whose `forward` hands nothing on.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from engine.compat.cache_names import cache_in
from engine.config.tree import RunConfig
from engine.errors import ModelError
from engine.features.applied import Applied
from engine.features.attention_backend import (
    cudnn_documents,
    documents_as_rows,
    kept_apart,
    sinks,
    varlen,
    xformers_documents,
)
from engine.features.attention_backend.positions import on_host
from engine.features.built import Built, base_model

FEATURE = "packed attention"


def prepare(config: RunConfig, built: Built) -> Applied | None:
    """Hooks the model's backbone; None where rows are not packed and kept apart, or the model itself tells them apart."""
    if not kept_apart(config):
        return None
    model = base_model(built.policy)
    attention = str(model.config._attn_implementation)
    is_told, backbone = "flash" in attention or attention in _TELLS, model.base_model
    forward = inspect.signature(type(backbone).forward).parameters.values()
    if is_told and not any(each.kind is each.VAR_KEYWORD for each in forward):
        raise ModelError(
            f"data.packing_cross_doc_attn_mask: {type(backbone).__name__} does not tell its layers where documents begin, "
            f"which {attention} needs.",
            "Set model.attention to sdpa.",
        ).mended_by({"model.attention": "sdpa"})
    done, forget = documents_as_rows.kept_apart(model, attention)
    if not is_told:
        return Applied(FEATURE, True, attention, None, "; ".join(done), forget) if done else None
    tell = _TELLS.get(attention, _with_beginnings)
    hook = backbone.register_forward_pre_hook(tell, with_kwargs=True)
    detail = "; ".join(["documents of all rows of a batch in one call of variable lengths; no mask", *done])

    def undo() -> None:
        hook.remove()
        forget()

    return Applied(FEATURE, True, attention, None, detail, undo)


def _with_beginnings(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    positions = kwargs.get("position_ids")
    known = kwargs.get("attention_mask") is not None or cache_in(kwargs) is not None
    if known or positions is None or positions.dim() != 2:
        return None
    return args, {**kwargs, **beginnings(positions)}


def _with_beginnings_and_no_mask(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Without a mask given transformers would make one of all pairs; one of four dimensions it hands on as it is."""
    told = _with_beginnings(module, args, kwargs)
    if told is None:
        return None
    taken_by_nobody = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=kwargs["position_ids"].device)
    return told[0], {**told[1], "attention_mask": taken_by_nobody}


def _in_places_and_no_mask(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    told = _with_beginnings_and_no_mask(module, args, kwargs)
    return told and (told[0], {**told[1], **cudnn_documents.in_places(told[1])})


def _with_lengths_and_no_mask(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    told = _with_beginnings_and_no_mask(module, args, kwargs)
    return told and (told[0], {**told[1], **xformers_documents.lengths(told[1])})


def position_kwargs(name: str, positions: torch.Tensor) -> dict[str, Any]:
    """What layers are told of a pack with these positions [B, T], under this attention."""
    found: dict[str, Any] = _TELLS.get(name, _with_beginnings)(None, (), {"position_ids": positions})[1]
    return found


_TELLS = {
    varlen.NAME: _with_beginnings_and_no_mask,
    sinks.NAME: _with_beginnings_and_no_mask,
    cudnn_documents.NAME: _in_places_and_no_mask,
    xformers_documents.NAME: _with_lengths_and_no_mask,
}


def beginnings(positions: torch.Tensor) -> dict[str, Any]:
    """Of positions [B, T] that begin at 0 in each document: the documents' bounds in the flattened batch, int32, and the
    longest one's tokens. Waits for the device once, unless it was told what the host knows."""
    flat = on_host(positions).flatten()
    starts = (flat == 0).nonzero().flatten()
    bounds = torch.cat([starts, starts.new_tensor([flat.numel()])]).int()
    longest = int(bounds.diff().max())
    bounds = bounds.to(positions.device, non_blocking=True)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
