"""Tokens go to the processes that hold their experts, and what those make of them comes back.

A token goes once to each process that has any of its experts, however many it has of them, with its router's choice: there
the experts of others are ids of no expert, which take part in nothing. What comes back is a token's sum over the experts
of that process, so that two rows of a token travel for each process, where a row for each of its experts would be many
more. Messages are torch's `all_to_all_single`, in the forward pass and, the other way, in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A layer's experts: tokens [T, H], their experts [T, k] and the weights of these [T, k] to results [T, H]."""
Span = Callable[[], AbstractContextManager[object]]
"""What is done within one is waiting for others."""


class _Exchange(torch.autograd.Function):
    """Rows [sum(sent), ...] to the processes of a group, so many to each: [sum(received), ...]. Gradients go back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int], waiting: Span
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received, ctx.waiting = group, sent, received, waiting
        return exchanged(rows, group, sent, received, waiting)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return exchanged(gradients[0], ctx.group, ctx.received, ctx.sent, ctx.waiting), None, None, None, None


def exchanged(
    rows: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int], waiting: Span = nullcontext
) -> Tensor:
    """The rows that the processes of a group have for this one, in their order."""
    taken, given = rows.new_empty(sum(received), *rows.shape[1:]), rows.contiguous()
    with waiting():
        dist.all_to_all_single(taken, given, received, sent, group=group)
    return taken


def dispatch(
    experts: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
    *, held: int, size: int, group: dist.ProcessGroup, waiting: Span = nullcontext,
) -> Tensor:  # fmt: skip
    """What all experts of a group make of this process's tokens.

    Args:
        experts: Those of this process; ids from 0, and `held` for an expert of another.
        hidden_states: This process's tokens [T, H].
        top_k_index: Their experts [T, k], by the ids of all of them.
        top_k_weights: The weights of these [T, k].
        held: How many experts each process holds.
        size: How many processes there are in the group.
        waiting: What each message is sent within.

    Returns:
        [T, H]
    """
    places = torch.div(top_k_index, held, rounding_mode="floor")
    goes = torch.zeros(len(hidden_states), size, dtype=torch.bool, device=hidden_states.device)
    goes.scatter_(1, places, True)
    counts = goes.sum(0)
    theirs = torch.empty_like(counts)
    with waiting():
        dist.all_to_all_single(theirs, counts, group=group)
    sent, received = torch.stack([counts, theirs]).tolist()
    # By place, then by token; here the host has waited already.
    tokens = goes.t().nonzero()[:, 1].split(sent)
    # To one place a token goes once: no two rows of one gradient are added up in an order of their own.
    rows = torch.cat([hidden_states.index_select(0, token) for token in tokens])
    weights = torch.cat([top_k_weights.index_select(0, token) for token in tokens])
    ids = torch.cat([_local(top_k_index[token], place, held) for place, token in enumerate(tokens)])
    rows, weights = (_Exchange.apply(each, group, sent, received, waiting) for each in (rows, weights))
    made = dispatched(experts, rows, exchanged(ids, group, sent, received, waiting), weights, held)
    back = _Exchange.apply(made, group, received, sent, waiting)
    out = torch.zeros_like(hidden_states)
    # Also what a layer that is computed again ends with: the messages before it are sent by all processes or by none.
    for token, part in zip(tokens, back.split(sent), strict=True):
        out = out.index_add(0, token, part.to(out.dtype))
    return out


def _local(ids: Tensor, place: int, held: int) -> Tensor:
    """Ids as one place knows them."""
    own = ids - place * held
    return torch.where((own < 0) | (own >= held), held, own)


def dispatched(experts: Experts, rows: Tensor, ids: Tensor, weights: Tensor, held: int) -> Tensor:
    """What this process's experts make of the rows that came; the weights of absent experts count as 0."""
    weights = weights.masked_fill(ids == held, 0)
    if len(rows):
        return experts(rows, ids, weights)
    # No token came: the experts see one of zeros, so that every process has the same gradients and messages.
    one, nothing = rows.sum(0, keepdim=True), weights.sum(0, keepdim=True)
    return experts(one, ids.new_zeros(1, ids.shape[1]), nothing)[:0]


def of_known_ids(experts: Experts, held: int) -> Experts:
    """The same for experts that know no id of no expert: they see each pair of a token and one of their experts."""

    def all_known(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        (count, chosen), hidden = ids.shape, rows.shape[1]
        pairs = (ids.reshape(-1) < held).nonzero()[:, 0]
        spread = rows.unsqueeze(1).expand(count, chosen, hidden).reshape(-1, hidden)
        known, ones = ids.reshape(-1, 1).index_select(0, pairs), weights.new_ones(len(pairs), 1)
        made = experts(spread.index_select(0, pairs), known, ones)
        made = made * weights.reshape(-1, 1).index_select(0, pairs)
        every = made.new_zeros(count * chosen, hidden).index_copy(0, pairs, made)
        return every.view(count, chosen, hidden).sum(1).to(rows.dtype)

    return all_known
