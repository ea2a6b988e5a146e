"""Packed rows that are kept apart in models that would forget it: in layers that carry a state, and in masks without positions.

A layer of state space, linear attention or short convolution reads a pack from its first token to its last, whatever its attention's mask says, and its kernels take borders
under names of their own or not at all. Here each is given the documents of a batch as rows, padded on the right to the
longest of about their length, which no causal layer can tell from documents alone; its output is put back in place. So
the numbers are those of documents alone with any kernel and in any family, at less than twice the tokens of the pack. Layers
whose gated delta rule flash-linear-attention computes take the documents' bounds, but their convolution does not: they get all
documents in one row, each with zeros behind it as long as the convolution looks back, which is what it finds before a row.
Their kernels are compiled for one number of rows, where documents as rows would be another number in each batch. And
a few models make their mask without the positions that tell documents apart: they are handed one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from engine.compat.cache_names import CACHE, NAMES, cache_in
from engine.compat.instances import put
from engine.compat.state_kernels import computed_by
from engine.errors import ModelError
from engine.facts.state_kernels import FLA_MODULE
from engine.features.attention_backend import MASKED_HERE, NOT_APART, STATES_SERVED
from engine.features.attention_backend.positions import on_host
from engine.features.built import base_model

_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_WHOLE = {"attention_mask": None, **dict.fromkeys(NAMES), "use_cache": False}
"""What a layer is told of rows that are whole and remembered by nobody."""


@dataclass
class Documents:
    """Where the documents of the batch in hand are; `groups` is None where its rows are whole.

    Each group is the places [documents, tokens], int64, of documents of about one length in the flattened batch, and which
    of them are no padding.
    """

    shape: tuple[int, int] = (0, 0)
    groups: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    back: torch.Tensor | None = None
    """For each token of the flattened batch its place among the groups' outputs, one after the other."""
    bounds: torch.Tensor | None = None
    """Where each document begins in the flattened batch, and where the last one ends: [documents + 1], int64."""
    spread: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """By the zeros behind each document: the bounds among them, and the place of each token."""

    def pre_hook(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook: notes the documents by positions [B, T] that begin at 0 in each."""
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if (
            positions is not None
            and positions.dim() == 2
            and (isinstance(mask, dict) or mask is None or mask.dim() == 4)
        ):
            self._note(positions)
        elif isinstance(mask, torch.Tensor) and mask.dim() == 2:
            self.groups = None

    def _note(self, positions: torch.Tensor) -> None:
        flat = positions.flatten()
        starts = (on_host(positions).flatten() == 0).nonzero().flatten().tolist()
        lengths = [end - start for start, end in zip(starts, [*starts[1:], flat.numel()], strict=True)]
        alike: dict[int, list[tuple[int, int]]] = {}
        for start, length in zip(starts, lengths, strict=True):
            alike.setdefault(length.bit_length(), []).append((start, length))
        self.shape = (positions.shape[0], positions.shape[1])
        self.bounds, self.spread = torch.tensor([*starts, flat.numel()], device=flat.device), {}
        self.groups = []
        for members in alike.values():
            begin = torch.tensor([start for start, _ in members], device=flat.device)[:, None]
            length = torch.tensor([length for _, length in members], device=flat.device)[:, None]
            at = torch.arange(max(length for _, length in members), device=flat.device)[None]
            self.groups.append((begin + at.minimum(length - 1), at < length))
        self.back = torch.cat([places[real] for places, real in self.groups]).argsort()

    def per_document(self, forward: Callable[..., Any], hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        """What a layer's `forward` makes of hidden states [B, T, width], each document from a state of its own."""
        assert self.groups is not None
        assert self.back is not None
        kwargs = {name: _WHOLE.get(name, value) for name, value in kwargs.items() if name not in _BORDERS}
        flat, parts = hidden.flatten(0, 1), []
        more: tuple[Any, ...] | None = None
        for places, real in self.groups:
            if "position_ids" in kwargs:
                kwargs["position_ids"] = torch.arange(places.shape[1], device=flat.device).expand_as(places)
            made = forward(flat[places], **kwargs)
            if isinstance(made, tuple):
                made, more = made[0], made[1:]
            parts.append(made[real])
        whole = torch.cat(parts)[self.back].view(*self.shape, -1)
        return whole if more is None else (whole, *more)

    def in_one_row(self, forward: Callable[..., Any], hidden: torch.Tensor, kwargs: dict[str, Any], zeros: int) -> Any:
        """What a layer's `forward` that takes bounds makes of hidden states [B, T, width]: all documents in one row, so many
        zeros behind each."""
        assert self.bounds is not None
        if zeros not in self.spread:  # once a batch: kernels know the bounds' chunks again by the tensor
            number = torch.arange(len(self.bounds), device=hidden.device)
            of_token = number[:-1].repeat_interleave(self.bounds.diff(), output_size=hidden.shape[0] * hidden.shape[1])
            tokens = torch.arange(len(of_token), device=hidden.device)
            self.spread[zeros] = self.bounds + zeros * number, tokens + zeros * of_token
        bounds, places = self.spread[zeros]
        kwargs = {name: _WHOLE.get(name, value) for name, value in kwargs.items() if name not in _BORDERS}
        kwargs.pop("position_ids", None)
        flat = hidden.flatten(0, 1)
        row = flat.new_zeros(len(flat) + zeros * (len(bounds) - 1), flat.shape[1]).index_copy(0, places, flat)
        made = forward(row[None], **kwargs, cu_seq_lens_q=bounds)
        return made[0][places].view(*self.shape, -1)


def kept_apart(model: torch.nn.Module, attention: str) -> tuple[list[str], Callable[[], None]]:
    """Has layers with a state begin anew at each document, and gives a mask where the model would forget them: what was
    done, in words, and the undo.

    Raises:
        ModelError: the rows of a pack would see each other in a model of this type.
    """
    whole = base_model(model)
    kind = str(whole.config.get_text_config().model_type)
    mixers = [each for each in whole.modules() if any(isinstance(part, torch.nn.Conv1d) for part in each.children())]
    if kind in NOT_APART or ((whole._is_stateful or mixers) and kind not in STATES_SERVED):
        raise ModelError(
            f"data.packing_cross_doc_attn_mask: models of type {kind} do not tell the rows of a pack apart.",
            "Set data.packing to false.",
        ).mended_by({"data.packing": False, "data.packing_cross_doc_attn_mask": False})
    undos: list[Callable[[], None]] = []
    documents = Documents()
    if mixers:
        for each in dict.fromkeys((whole, whole.base_model)):
            undos.append(each.register_forward_pre_hook(documents.pre_hook, with_kwargs=True).remove)
    undos += [put(mixer, "forward", _by_document(mixer, documents)) for mixer in mixers]
    masks = kind in MASKED_HERE and attention in ("eager", "sdpa", "flex_attention")
    if masks:
        undos.append(whole.base_model.register_forward_pre_hook(_with_masks, with_kwargs=True).remove)

    def undo() -> None:
        while undos:
            undos.pop()()

    layers = "1 layer with a state begins" if len(mixers) == 1 else f"{len(mixers)} layers with a state begin"
    done = [f"{layers} anew at each document"] if mixers else []
    return done + (["a mask by the documents' positions, which the model's own forgets"] if masks else []), undo


def _with_masks(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook: the masks of all kinds of layers by positions [B, T] that begin at 0 in each document."""
    positions = kwargs.get("position_ids")
    if kwargs.get("attention_mask") is not None or cache_in(kwargs) is not None or positions is None:
        return None
    like = torch.empty(*positions.shape, 1, dtype=next(module.parameters()).dtype, device=positions.device)
    given = {"config": module.config, "inputs_embeds": like, "attention_mask": None, CACHE: None}
    masks = {"full_attention": create_causal_mask(**given, position_ids=positions), "linear_attention": None}
    if getattr(module.config, "sliding_window", None):
        masks["sliding_attention"] = create_sliding_window_causal_mask(**given, position_ids=positions)
    return args, {**kwargs, "attention_mask": masks}


def _zeros_between(mixer: torch.nn.Module) -> int:
    """How many zeros part the documents of one row for a layer that takes their bounds; 0 for one that does not."""
    convolution = next(part for part in mixer.children() if isinstance(part, torch.nn.Conv1d))
    by_bounds = computed_by(mixer).get("chunk_gated_delta_rule", ("", 0))[0] == FLA_MODULE
    # With a bias anywhere, what the convolution reads of a token of zeros need not be zero.
    if not by_bounds or any(getattr(part, "bias", None) is not None for part in mixer.modules()):
        return 0
    return int(convolution.kernel_size[0]) - 1


def _by_document(mixer: torch.nn.Module, documents: Documents) -> Callable[..., Any]:
    forward: Callable[..., Any] = mixer.forward
    zeros = _zeros_between(mixer)

    @torch.compiler.disable
    def by_document(*args: Any, **kwargs: Any) -> Any:
        named = dict(kwargs)
        hidden = args[0] if args else named.pop("hidden_states", None)
        if documents.groups is None or hidden is None or hidden.shape[:2] != documents.shape:
            return forward(*args, **kwargs)

        def of_states(states: torch.Tensor, **rest: Any) -> Any:
            return forward(states, *args[1:], **rest)

        return (
            documents.in_one_row(of_states, hidden, named, zeros)
            if zeros
            else documents.per_document(of_states, hidden, named)
        )

    return by_document
