"""`sinks`: flash attention for models whose heads share their sum with a sink (gpt-oss), as an attention of transformers.

A sink is one more score in a head's softmax, a trained number, that brings no value. With l the logarithm of a row's sum
and s the sink, attention with the sink is plain attention times sigmoid(l - s), and its sum's logarithm log(e^l + e^s).
Handed these two in place of its own, flash attention's backward pass is exact as it stands: it makes probabilities of scores
and that logarithm anew, and subtracts the product of result and gradient, to which a sink adds nothing. So torch's own
kernels compute it, with windows and documents, and no score is kept. All of it is in float32 but the products.

Passes with a cache, or padded on the left, are computed plainly with the mask that transformers makes for its eager form.
What lies on the right is seen by no token before it, and needs none. Refuses dropout and models that compute a sink
otherwise; a model's own function is the judge (`trial`).
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.features.attention_backend import SINKS, WITH_SINKS
from engine.features.attention_backend.sdpa_cudnn_workaround import make_known

NAME = SINKS
ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative error against the model's own function; of 16 bits the other kernels' bound."""
TRIED_TOKENS, TRIED_WINDOW = 200, 48


def register() -> None:
    """Makes the name known to transformers; a second time changes nothing."""
    make_known(NAME, sinks_attention_forward, sinks_mask)


def lacking(model: PreTrainedModel) -> str | None:
    """What this model asks of attention that is not served, or None."""
    text = model.config.get_text_config()
    if text.model_type not in WITH_SINKS:
        return f"models of type {text.model_type} have no sinks that it knows"
    if getattr(text, "attention_dropout", 0.0):
        return f"it has no dropout, and the model asks for {text.attention_dropout}"
    if model.device.type == "cuda" and model.dtype not in (torch.float16, torch.bfloat16):
        return f"on a card it computes in 16 bits, and the model in {str(model.dtype).removeprefix('torch.')}"
    return None


def sinks_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **more: Any,
) -> Tensor | None:
    """transformers' `eager_mask`, its arguments and result; None where tokens see all before them, in the layer's window, and
    padding is on the right alone. Waits for the device where a mask is given."""
    from transformers.masking_utils import eager_mask

    whole = q_length == kv_length and int(q_offset) == int(kv_offset) == 0 and allow_is_causal_skip
    if whole and (attention_mask is None or _on_the_right(attention_mask, kv_length)):
        return None
    more |= {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": attention_mask}
    mask: Tensor = eager_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **more)
    return mask


def _on_the_right(mask: Tensor, length: int) -> bool:
    if mask.dim() != 2 or mask.shape[1] != length:
        return False
    real = mask.bool()
    return bool((real[:, :-1] | ~real[:, 1:]).all())


def sinks_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' layers call it.

    Args:
        query: [B, heads, T, width]; key, value: [B, shared heads, keys, width]; s_aux: [heads], the sinks.
        cu_seq_lens_q: [documents + 1] int32, their bounds in the B * T tokens; None: `attention_mask` says who sees whom.
        max_length_q: tokens of the longest document. sliding_window: tokens that each sees, itself among them.

    Returns:
        [B, T, heads, width] and no weights.
    """
    assert s_aux is not None
    assert not dropout
    rows, heads, tokens, width = query.shape
    scale = width**-0.5 if scaling is None else scaling
    if cu_seq_lens_q is None or max_length_q is None:
        if attention_mask is not None:
            return plain_with_sinks(query, key, value, s_aux, scale, attention_mask), None
        cu_seq_lens_q = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * tokens
        max_length_q = tokens
    # gpt-oss turns queries and keys into tensors that lie head by head: copied for several rows, views of another layout for one.
    q, k, v = (x.transpose(1, 2).reshape(rows * tokens, x.shape[1], x.shape[3]) for x in (query, key, value))
    out: Tensor = attention_with_sinks(q, k, v, s_aux, cu_seq_lens_q, max_length_q, scale, sliding_window or 0)[0]
    return out.view(rows, tokens, heads, width), None


def plain_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float, mask: Tensor) -> Tensor:
    """The same in plain torch, [B, T, heads, width]: softmax over masked scores and the sink, whose share is dropped.

    q: [B, heads, T, width]; k, v: [B, shared heads, keys, width]; mask: what is added to scores [B, 1, T, keys], or whether
    they are seen.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) * scale).to(torch.promote_types(q.dtype, torch.float32))
    mask = mask[..., : k.shape[2]]
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    shares = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return (shares.to(v.dtype) @ v).transpose(1, 2).contiguous()


@torch.library.custom_op("workbench::attention_with_sinks", mutates_args=())
def attention_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bounds: Tensor, longest: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Causal attention over documents laid end to end, each head with its sink.

    Args:
        q: [N, heads, width]; k, v: [N, shared heads, width]; sinks: [heads]; bounds: [documents + 1] int32.
        longest: tokens of the longest document. window: tokens that each sees, itself among them; 0: all before it.

    Returns:
        The result [N, heads, width], and [heads, N], float32 or wider, the logarithm of each row's sum, sink included.
    """
    if q.device.type == "cpu":
        out, sums = _on_a_cpu(q, k, v, bounds, scale, window)
    else:
        left = window - 1 if window else -1
        out, sums, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, bounds, bounds, longest, longest, 0.0, not window, False,
            scale=scale, window_size_left=left, window_size_right=0,
        )  # fmt: skip
    sink = sinks.to(sums.dtype)[:, None]
    shared = torch.logaddexp(sums, sink)
    # Torch's kernel lays its result out as the queries are, which in a batch of one row may be head by head.
    out = (out * (sums - shared).exp().T[..., None]).to(q.dtype)
    return out.contiguous(), shared


@attention_with_sinks.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bounds: Tensor, longest: int, scale: float, window: int) -> Any:
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[1], q.shape[0], dtype=wide)


@torch.library.custom_op("workbench::attention_with_sinks_backward", mutates_args=())
def attention_with_sinks_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, out: Tensor, sums: Tensor, bounds: Tensor,
    longest: int, scale: float, window: int, trained: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and the sinks, those zeros where they are not `trained`; `out` and `sums` are what the forward
    operation returned."""
    grad = grad.contiguous()
    if q.device.type == "cpu":
        found = _back_on_a_cpu(grad, q, k, v, out, sums, bounds, scale, window)
    else:
        left = window - 1 if window else -1
        state = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        found = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, sums, bounds, bounds, longest, longest, 0.0, not window, *state,
            scale=scale, window_size_left=left, window_size_right=0,
        )  # fmt: skip
    dq, dk, dv = (each.contiguous() for each in found)
    if not trained:
        return dq, dk, dv, torch.zeros_like(sinks)
    share = (sinks.to(sums.dtype)[:, None] - sums).exp()
    towards = (grad.to(sums.dtype) * out.to(sums.dtype)).sum(-1).T
    return dq, dk, dv, -(share * towards).sum(1).to(sinks.dtype)


@attention_with_sinks_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *more: Any) -> Any:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, sinks))


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, sinks, bounds, *ctx.told = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, bounds)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    q, k, v, sinks, out, sums, bounds = ctx.saved_tensors
    trained = ctx.needs_input_grad[3]
    found = attention_with_sinks_backward(grad, q, k, v, sinks, out, sums, bounds, *ctx.told, trained)
    return *found, None, None, None, None


attention_with_sinks.register_autograd(_backward, setup_context=_setup)


# -- torch's flash attention for CPUs ----------------------------------------------------------------------------------
def _documents(bounds: Tensor) -> list[tuple[int, int, int]]:
    """Documents of one length that follow each other: how many, where the first begins, and how long they are."""
    at = bounds.tolist()
    found: list[tuple[int, int, int]] = []
    for begin, end in itertools.pairwise(at):
        if found and found[-1][2] == end - begin:
            found[-1] = (found[-1][0] + 1, *found[-1][1:])
        elif end > begin:
            found.append((1, begin, end - begin))
    return found


def _rows(x: Tensor, count: int, begin: int, length: int, groups: int = 1) -> Tensor:
    """[documents, heads, tokens, width] of documents in [N, heads, width], each head `groups` times."""
    rows = x[begin : begin + count * length].view(count, length, *x.shape[1:]).transpose(1, 2)
    return rows.repeat_interleave(groups, 1) if groups > 1 else rows


def _seen(length: int, window: int, like: Tensor) -> dict[str, Any]:
    """Who sees whom, as torch is told."""
    if not window or window >= length:
        return {"is_causal": True}
    every = torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.zeros(length, length, dtype=like.dtype).masked_fill(~every | every.tril(-window), -torch.inf)
    return {"is_causal": False, "attn_mask": mask[None, None]}


def _on_a_cpu(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    sums = q.new_zeros(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    groups = q.shape[1] // k.shape[1]
    for count, begin, length in _documents(bounds):
        place = slice(begin, begin + count * length)
        own = _rows(q, count, begin, length), *(_rows(x, count, begin, length, groups) for x in (k, v))
        part, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *own, scale=scale, **_seen(length, window, q)
        )
        out[place] = part.transpose(1, 2).flatten(0, 1)
        sums[:, place] = logs.transpose(0, 1).flatten(1)
    return out, sums


def _back_on_a_cpu(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, bounds: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    made = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    shared, groups = k.shape[1], q.shape[1] // k.shape[1]
    for count, begin, length in _documents(bounds):
        place = slice(begin, begin + count * length)
        upstream, query, result = (_rows(x, count, begin, length) for x in (grad, q, out))
        keys, values = (_rows(x, count, begin, length, groups) for x in (k, v))
        # As the forward operation lays them out: heads of a token beside each other.
        logs = sums[:, place].T.contiguous().view(count, length, -1).transpose(1, 2)
        seen = _seen(length, window, q)
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            upstream, query, keys, values, result, logs, 0.0, seen.pop("is_causal"), scale=scale, **seen
        )
        for whole, part in zip(made, parts, strict=True):
            tokens = part.transpose(1, 2).flatten(0, 1)
            whole[place] = tokens if whole is made[0] else tokens.unflatten(1, (shared, groups)).sum(2)
    return made[0], made[1], made[2]


# -- the trial of a loaded model ---------------------------------------------------------------------------------------
def trial(model: PreTrainedModel, device: torch.device, allowed: float) -> str | None:
    """This attention against the model's own function, forward and backward, with and without a window: why they differ,
    or None."""
    module: Any = next(each for each in model.modules() if getattr(each, "sinks", None) is not None)
    eager = vars(sys.modules[type(module).__module__]).get("eager_attention_forward")
    if eager is None:
        return f"{type(module).__name__} has no function of its own to be held to"
    text, dtype = model.config.get_text_config(), model.dtype
    heads, shared = text.num_attention_heads, text.num_key_value_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    drawn = torch.Generator().manual_seed(0)
    sizes = [(2, count, TRIED_TOKENS, width) for count in (heads, shared, shared)] + [(2, TRIED_TOKENS, heads, width)]
    q, k, v, upstream = (torch.randn(size, generator=drawn).to(device, dtype) for size in sizes)
    sinks = torch.randn(heads, generator=drawn).to(device, dtype)
    before = module.sinks
    allowed = ALLOWED.get(dtype, allowed)
    for window in (None, TRIED_WINDOW):
        every = torch.ones(TRIED_TOKENS, TRIED_TOKENS, dtype=torch.bool, device=device).tril()
        every = every if window is None else every & ~every.tril(-window)
        mask = torch.zeros(every.shape, dtype=torch.float32, device=device).masked_fill(~every, -1e30)
        found = []
        for mine in (True, False):
            leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, sinks)]
            more: dict[str, Any] = {"scaling": width**-0.5, "dropout": 0.0, "sliding_window": window}
            if mine:
                out = sinks_attention_forward(module, leaves[0], leaves[1], leaves[2], None, s_aux=leaves[3], **more)[0]
            else:
                # In float32: what is asked is whether the function is the same, not how it rounds.
                wide = [x.to(torch.promote_types(dtype, torch.float32)) for x in leaves]
                try:
                    module._parameters["sinks"] = wide[3]
                    out = eager(module, *wide[:3], mask[None, None].to(wide[0].dtype), s_aux=wide[3], **more)[0]
                finally:
                    module._parameters["sinks"] = before
            found.append([out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))])
        for what, ours, theirs in zip(("output", "dq", "dk", "dv", "gradient of sinks"), *found, strict=True):
            error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
            if not error <= allowed:
                return f"its {what} differs from the model's own by {error:.1%}"
    return None
