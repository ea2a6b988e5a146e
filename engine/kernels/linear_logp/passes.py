"""The order of work of both passes: chunks of rows forward, or slices of the vocabulary forward and backward.

Plain functions on tensors, which the eager autograd node, the registered operations that compiled code calls, and the
shards of a vocabulary share. Names: N rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.kernels.device import sums_in_float32
from engine.kernels.linear_logp.slices import RunningScores, Slices
from engine.kernels.linear_logp.tiles import Scaling, Scores, Upstream, to_gradient
from engine.kernels.requirements import FEWEST_WORDS, Layout, layout
from engine.kernels.tuner import TUNER, Cost, Tile, Tiles, bucket


class Forward(NamedTuple):
    """What the forward pass hands on; `d_rows` is [N, H], formed early, or None."""

    scores: Scores
    d_rows: torch.Tensor | None


class Gradients(NamedTuple):
    """Gradients of hidden states, head and bias, in their own number formats; None where none is needed."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def forward_pass(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    scaling: Scaling,
    outputs: tuple[str, ...],
    workspace_bytes: int,
    *,
    early: bool,
    whole: bool = True,
) -> Forward:
    """Scores of all rows and, with `early`, the gradient of the hidden states under an upstream gradient of one a row."""
    dtype = working_type(hidden)
    # Inside, the number formats are ours: autocast would round the sum behind the entropy too.
    with torch.autocast(hidden.device.type, enabled=False), sums_in_float32(hidden.device):
        return _forward(
            hidden.to(dtype), weight.to(dtype), bias, targets, scaling, outputs, workspace_bytes, early, whole
        )


def _forward(
    rows_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    scaling: Scaling,
    outputs: tuple[str, ...],
    workspace_bytes: int,
    early: bool,
    whole: bool,
) -> Forward:
    # Kernels read targets and bias word by word: a view with gaps would give other words, without a sound.
    targets_N = targets.contiguous()
    bias_V = None if bias is None else bias.to(rows_NH.dtype).contiguous()
    count, vocabulary = rows_NH.shape[0], weight_VH.shape[0]
    scores = Scores(count, rows_NH, outputs, whole=whole)
    d_rows = torch.empty_like(rows_NH) if early else None
    logits_CV: torch.Tensor | None = None
    if early:
        workspace_bytes = _timed_workspace(rows_NH, weight_VH, bias_V, targets_N, scaling, outputs, workspace_bytes)
    for part in chunks(count, vocabulary * rows_NH.element_size(), workspace_bytes, 128):
        if logits_CV is None:
            logits_CV = rows_NH.new_empty(part.stop - part.start, vocabulary)
        logits = logits_CV[: part.stop - part.start]
        torch.mm(rows_NH[part], weight_VH.t(), out=logits)
        scores.fold(part, logits, targets_N[part], bias_V, scaling, early)
        if d_rows is not None:
            torch.mm(logits, weight_VH, out=d_rows[part])
    return Forward(scores, d_rows)


def forward_in_slices(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    scaling: Scaling,
    outputs: tuple[str, ...],
    workspace_bytes: int,
    *,
    trained: bool,
) -> tuple[Scores, Slices]:
    """Scores of all rows, and the logits that wait for `backward_pass`; `trained`: a weight gradient will be needed."""
    dtype = working_type(hidden)
    with torch.autocast(hidden.device.type, enabled=False), sums_in_float32(hidden.device):
        rows_NH, weight_VH, targets_N = hidden.to(dtype), weight.to(dtype), targets.contiguous()
        bias_V = None if bias is None else bias.to(dtype).contiguous()
        (count, width), vocabulary = rows_NH.shape, weight.shape[0]
        each, of_weight = rows_NH.element_size(), weight.element_size() if trained else 0
        chosen = layout(count, width, vocabulary, each, of_weight, workspace_bytes)
        d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if trained else None
        slices = Slices(rows_NH, vocabulary, d_weight, chosen)
        scores = Scores(count, rows_NH, outputs)
        running = RunningScores(scores, targets_N, scaling)
        for number, part in enumerate(slices.parts):
            logits = slices.fresh(number)
            torch.mm(rows_NH, weight_VH[part].t(), out=logits)
            running.fold(logits, part.start, None if bias_V is None else bias_V[part])
        running.finish(vocabulary)
    return scores, slices


def backward_pass(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor | None,
    upstream: Upstream,
    scaling: Scaling,
    dtype: torch.dtype,
    workspace_bytes: int,
    need: tuple[bool, bool, bool],
    *,
    first: int = 0,
    vocabulary: int | None = None,
    slices: Slices | None = None,
) -> Gradients:
    """Gradients under `upstream`; `weight` is the whole head, or the shard of `vocabulary` words that begins at `first`.

    `slices`: what `forward_in_slices` left, which is used up; without it all logits are formed again.
    """
    need_hidden, need_weight, need_bias = need
    rows_NH, weight_VH, targets_N = hidden.to(dtype), weight.to(dtype), targets.contiguous()
    bias_V = None if bias is None else bias.to(dtype).contiguous()
    upstream = Upstream(*(None if d is None else d.to(lse.dtype).contiguous() for d in upstream))
    count, words = rows_NH.shape[0], weight.shape[0]
    larger = _magnified(upstream) if dtype == torch.float16 and count else None
    if larger is not None:
        upstream = Upstream(*(None if d is None else d * larger for d in upstream))
    sums = torch.zeros(hidden.shape, dtype=lse.dtype, device=hidden.device) if need_hidden else None
    if slices is None:
        d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if need_weight else None
        each = max(count, 1) * rows_NH.element_size()
        width = chunks(words, each, workspace_bytes, FEWEST_WORDS)[0].stop if words else 0
        slices = Slices(rows_NH, words, d_weight, Layout(width, 0, 0))
    d_weight = slices.d_weight
    d_bias = torch.empty_like(bias, memory_format=torch.contiguous_format) if need_bias and bias is not None else None
    with sums_in_float32(hidden.device):
        for number, part in enumerate(slices.parts):
            logits, tile = slices.held(number), slices.turned(number)
            if logits is None:
                logits = torch.mm(rows_NH, weight_VH[part].t(), out=tile)
            bias_S = None if bias_V is None else bias_V[part]
            place = first + part.start, words if vocabulary is None else vocabulary
            to_gradient(logits, tile, *place, targets_N, bias_S, lse, entropy, upstream, scaling)
            if sums is not None:
                _accumulate(sums, tile, weight_VH[part])
            if d_weight is not None:
                _product_into(d_weight[part], tile.t(), rows_NH, larger)
            if d_bias is not None:
                total = tile.sum(0, dtype=lse.dtype)
                d_bias[part] = total if larger is None else total / larger
    if sums is not None and larger is not None:
        sums.div_(larger)
    return Gradients(None if sums is None else sums.to(hidden.dtype), d_weight, d_bias)


def _magnified(upstream: Upstream) -> torch.Tensor:
    """The power of two by which gradients in float16 are formed larger; no host waits for it.

    Divided by the tokens of a batch, most gradients of logits would lie below the smallest normal number. Brought to 2**10,
    the greatest stays below the largest number by what an entropy, a slope or a penalty multiplies it with.
    """
    highest = torch.stack([d.abs().amax() for d in upstream if d is not None]).amax()
    power = torch.exp2(10 - highest.log2().ceil())
    return torch.where(torch.isfinite(power) & (power > 0), power, 1.0)


def scales_early(upstream: Upstream, early_loss: bool) -> torch.Tensor | None:
    """The upstream gradient [N] that scales the rows formed early, or None where it asks for more than that."""
    formed, other = (upstream.loss, upstream.logp) if early_loss else (upstream.logp, upstream.loss)
    return formed if other is None and upstream.entropy is None else None


# Halves and quarters of the memory that the caller grants: what the estimate of memory counts is never passed.
WORKSPACE = Tiles("linear_logp_chunk", 1, ("share",), ((1,), (2,), (4,)), lambda tile: Cost(0, 0))


def _timed_workspace(
    rows_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    scaling: Scaling,
    outputs: tuple[str, ...],
    granted: int,
) -> int:
    """The bytes of logits whose chunk takes the least time a row: all that is granted, or the part that was timed best."""
    count, vocabulary = rows_NH.shape[0], weight_VH.shape[0]
    each = vocabulary * rows_NH.element_size()
    if not TUNER.on or count == 0:
        return granted
    logits_CV = rows_NH.new_empty(_first(count, each, granted), vocabulary)
    d_rows = torch.empty_like(rows_NH)
    scores = Scores(count, rows_NH, outputs)

    def one_chunk(tile: Tile) -> None:
        part = slice(0, _first(count, each, granted // tile[0]))
        logits = logits_CV[part]
        torch.mm(rows_NH[part], weight_VH.t(), out=logits)
        scores.fold(part, logits, targets_N[part], bias_V, scaling, True)
        torch.mm(logits, weight_VH, out=d_rows[part])

    key = bucket(count), bucket(vocabulary), rows_NH.shape[1], str(rows_NH.dtype), granted >> 20
    share = TUNER.pick(
        WORKSPACE, key, rows_NH.device, one_chunk, lambda tile: float(_first(count, each, granted // tile[0]))
    )
    return granted // share[0]


def _first(count: int, each_bytes: int, most_bytes: int) -> int:
    return chunks(count, each_bytes, most_bytes, 128)[0].stop


def working_type(hidden: torch.Tensor) -> torch.dtype:
    """The number format of the products: that of autocast where it is on, else that of the hidden states."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def chunks(count: int, each_bytes: int, most_bytes: int, step: int) -> list[slice]:
    """Even parts of `count` that each fit the memory: whole multiples of `step`, a product's tile, where they can be."""
    size = max(most_bytes // max(each_bytes, 1), 1)
    size = max(size // step * step, min(size, step)) if count > size else count
    return [slice(first, min(first + size, count)) for first in range(0, count, max(size, 1))]


def _accumulate(sums_NH: torch.Tensor, tile_NS: torch.Tensor, weight_SH: torch.Tensor) -> None:
    """`sums += tile @ weight`, added up in float32 also between slices."""
    if sums_NH.is_cuda and tile_NS.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(sums_NH, tile_NS, weight_SH, out_dtype=torch.float32, out=sums_NH)
    else:
        sums_NH.addmm_(tile_NS.to(sums_NH.dtype), weight_SH.to(sums_NH.dtype))


def _product_into(
    out_SH: torch.Tensor, tile_SN: torch.Tensor, rows_NH: torch.Tensor, larger: torch.Tensor | None
) -> None:
    """`out = tile @ rows / larger`, rounded once, to the format of `out`."""
    if larger is None and out_SH.dtype == tile_SN.dtype:
        torch.mm(tile_SN, rows_NH, out=out_SH)
    elif out_SH.is_cuda and tile_SN.dtype in (torch.float16, torch.bfloat16):
        wide = torch.mm(tile_SN, rows_NH, out_dtype=torch.float32)
        out_SH.copy_(wide if larger is None else wide.div_(larger))
    else:
        wide = tile_SN.float() @ rows_NH.float()
        out_SH.copy_(wide if larger is None else wide.div_(larger))
