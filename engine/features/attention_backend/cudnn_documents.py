"""`cudnn`: cuDNN's attention over documents of any lengths, as an attention of transformers, through its own Python package.

Takes all rows end to end as `engine.features.attention_backend.varlen` does, and hands that every pass it has no form for: windows, layers that
look both ways, rows that are not packed. cuDNN works by plans, which are compiled for a number of documents and a longest
one; so both are rounded up to powers of two (places that no document fills are empty), and a run needs few plans. Torch's
own binding to the same kernel is not used: up to 2.12 its backward pass takes the width of a head for the longest document.
Refuses what was not tried: other cards than Hopper, releases of cuDNN before 9.19, determinism (4 GiB of workspace).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.features.attention_backend import CUDNN, NOT_DETERMINISTIC, varlen
from engine.features.attention_backend.sdpa_cudnn_workaround import make_known

NAME = CUDNN
LEAST_PLACES, LEAST_LONGEST = 16, 256
OLDEST = 91900
_Q, _K, _V, _O, _LSE, _DO, _DQ, _DK, _DV, _AT_Q, _AT_K, _AT_LSE, _LENGTHS = range(1, 14)
"""Numbers of the tensors in cuDNN's graphs."""
_KEYS = (_K, _V, _DK, _DV)


def register() -> None:
    """Makes the name known to transformers; a second time changes nothing."""
    make_known(NAME, cudnn_attention_forward)


def lacking(model: PreTrainedModel) -> str | None:
    """What of this model, of the installed cuDNN or of the run it has no form for, or None. ImportError without its package."""
    if torch.are_deterministic_algorithms_enabled():
        return NOT_DETERMINISTIC[0].lower() + NOT_DETERMINISTIC[1:]
    if (reason := varlen.lacking(model)) is not None:
        return reason
    import cudnn

    found = int(cudnn.backend_version())
    return None if found >= OLDEST else f"it needs cuDNN 9.19, and {found // 10000}.{found // 100 % 100} is installed"


def in_places(told: dict[str, Any]) -> dict[str, Any]:
    """Bounds and longest document rounded up, so that batches of other documents share a plan."""
    bounds = told["cu_seq_lens_q"]
    more = _power(bounds.numel() - 1, LEAST_PLACES) + 1 - bounds.numel()
    bounds, longest = torch.cat([bounds, bounds[-1:].expand(more)]), _power(told["max_length_q"], LEAST_LONGEST)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def cudnn_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' layers call it; arguments and result as those of `varlen.varlen_attention_forward`."""
    rows, heads, tokens, width = query.shape
    # cuDNN is told where documents begin in 32 bits, in numbers rather than tokens.
    large = rows * tokens * heads * width >= 2**31
    whole = sliding_window is None and getattr(module, "is_causal", True) and value.shape[-1] == width
    if cu_seq_lens_q is None or max_length_q is None or large or not whole:
        return varlen.varlen_attention_forward(
            module, query, key, value, attention_mask, scaling, dropout, sliding_window, cu_seq_lens_q, max_length_q, **kwargs
        )  # fmt: skip
    q, k, v = (x.transpose(1, 2).reshape(rows * tokens, x.shape[1], width) for x in (query, key, value))
    scale = width**-0.5 if scaling is None else scaling
    out: Tensor = attention_over_documents(q, k, v, cu_seq_lens_q, max_length_q, scale)[0]
    return out.view(rows, tokens, heads, width), None


class Plan:
    """Both passes for up to `places` documents of up to `longest` tokens, `tokens` in all, on the current card."""

    def __init__(
        self, dtype: torch.dtype, heads: tuple[int, int, int], sizes: tuple[int, int, int], scale: float
    ) -> None:
        """`heads`: query heads, shared heads, width; `sizes`: places, longest, tokens. Raises RuntimeError for no plan."""
        import cudnn

        self.heads, self.sizes, self.scale = heads, sizes, scale
        kinds = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}
        if dtype not in kinds:
            raise RuntimeError(
                f"cuDNN's attention computes in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
            )
        self.kind = kinds[dtype]
        self.handle = _handle(torch.cuda.current_device())
        try:
            self.forwards, self.backwards = self._forwards(), self._backwards()
        except cudnn.cudnnGraphNotSupportedError as problem:
            raise RuntimeError(f"cuDNN has no plan for it: {problem}") from problem
        self.room = [graph.get_workspace_size() for graph in (self.forwards, self.backwards)]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """[N, heads, width] and the logarithms of the sums of exponentials, [N, heads] float32."""
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        self._run(self.forwards, self.room[0], table, {_Q: q, _K: k, _V: v, _O: out, _LSE: lse})
        return out, lse

    def backward(
        self, slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Tensor
    ) -> list[Tensor]:
        """Gradients of queries, keys and values."""
        found = [torch.empty_like(x) for x in (q, k, v)]
        told = {_Q: q, _K: k, _V: v, _O: out, _LSE: lse, _DO: slope, **dict(zip((_DQ, _DK, _DV), found, strict=True))}
        self._run(self.backwards, self.room[1], table, told)
        return found

    def _run(self, graph: Any, room: int, table: Tensor, told: dict[int, Tensor]) -> None:
        import cudnn

        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        workspace = torch.empty(room, dtype=torch.uint8, device=table.device)
        places = zip((_AT_Q, _AT_K, _AT_LSE, _LENGTHS), table.unbind(), strict=True)
        graph.execute(
            {name: x.data_ptr() for name, x in (*told.items(), *places)}, workspace.data_ptr(), handle=self.handle
        )

    def _begun(self) -> tuple[Any, dict[int, Any], dict[str, Any]]:
        """A graph with what both passes read: where documents begin, how long each is; queries, keys and values."""
        import cudnn

        graph = cudnn.pygraph(
            io_data_type=self.kind, intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT, handle=self.handle,
        )  # fmt: skip
        count, whole = self.sizes[0], cudnn.data_type.INT32
        known = {
            name: graph.tensor(
                name=str(name), dim=[count + (name != _LENGTHS), 1, 1, 1], stride=[1] * 4, data_type=whole, uid=name
            )
            for name in (_AT_Q, _AT_K, _AT_LSE, _LENGTHS)
        }
        known |= {name: self._given(graph, name, known) for name in (_Q, _K, _V)}
        asked = {
            "attn_scale": self.scale, "use_causal_mask": True, "use_padding_mask": True,
            "seq_len_q": known[_LENGTHS], "seq_len_kv": known[_LENGTHS],
        }  # fmt: skip
        return graph, known, asked

    def _form(self, name: int) -> tuple[list[int], list[int], int]:
        """Size and strides, of a place's longest document, and which tensor says where each begins."""
        (places, longest, _), (heads, shared, width) = self.sizes, self.heads
        count = shared if name in _KEYS else heads
        last = 1 if name == _LSE else width
        begins = _AT_LSE if name == _LSE else _AT_K if name in _KEYS else _AT_Q
        return [places, count, longest, last], [longest * count * last, last, count * last, 1], begins

    def _given(self, graph: Any, name: int, known: dict[int, Any]) -> Any:
        import cudnn

        size, strides, begins = self._form(name)
        kind = cudnn.data_type.FLOAT if name == _LSE else self.kind
        tensor = graph.tensor(name=str(name), dim=size, stride=strides, data_type=kind, uid=name)
        tensor.set_ragged_offset(known[begins])
        return tensor

    def _wanted(self, tensor: Any, name: int, known: dict[int, Any]) -> None:
        size, strides, begins = self._form(name)
        tensor.set_uid(name).set_output(True).set_dim(size).set_stride(strides).set_ragged_offset(known[begins])

    def _forwards(self) -> Any:
        import cudnn

        graph, known, asked = self._begun()
        out, lse = graph.sdpa(known[_Q], known[_K], known[_V], generate_stats=True, **asked)
        self._wanted(out, _O, known)
        lse.set_data_type(cudnn.data_type.FLOAT)
        self._wanted(lse, _LSE, known)
        return _built(graph)

    def _backwards(self) -> Any:
        graph, known, asked = self._begun()
        tokens = self.sizes[2]
        found = graph.sdpa_backward(
            q=known[_Q], k=known[_K], v=known[_V], o=self._given(graph, _O, known), dO=self._given(graph, _DO, known),
            stats=self._given(graph, _LSE, known), max_total_seq_len_q=tokens, max_total_seq_len_kv=tokens, **asked,
        )  # fmt: skip
        for tensor, name in zip(found, (_DQ, _DK, _DV), strict=True):
            self._wanted(tensor, name, known)
        return _built(graph)


def _built(graph: Any) -> Any:
    import cudnn

    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph


@lru_cache
def _handle(card: int) -> Any:
    import cudnn

    return cudnn.create_handle()


@lru_cache(maxsize=64)
def plan_for(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], sizes: tuple[int, int, int], scale: float
) -> Any:
    """The plan of these sizes, made once."""
    with torch.cuda.device(device):
        return Plan(dtype, heads, sizes, scale)


def _plan(q: Tensor, k: Tensor, places: int, longest: int, scale: float) -> Any:
    # The tokens in all bound the workspace alone: an eighth more of it at most, and few plans where batches differ in width.
    step = max(1 << max((q.shape[0] - 1).bit_length() - 3, 0), 256)
    tokens = -(-q.shape[0] // step) * step
    heads = (q.shape[1], k.shape[1], q.shape[2])
    return plan_for(q.device, q.dtype, heads, (places, _power(longest, LEAST_LONGEST), tokens), scale)


def _power(number: int, least: int) -> int:
    """The next power of two, `least` or more."""
    return max(least, 1 << (number - 1).bit_length())


def _pitch(places: int) -> int:
    return 4 * (places // 4 + 1)


def _table(q: Tensor, k: Tensor, bounds: Tensor) -> Tensor:
    """Where each document begins among queries, keys and sums, counted in numbers, and its tokens: [4, at least places + 1]
    int32, rows 16 bytes apart or a multiple of them."""
    places, (heads, width), shared = bounds.numel() - 1, q.shape[1:], k.shape[1]
    table = bounds.new_zeros(4, _pitch(places))
    for row, factor in enumerate((heads * width, shared * width, heads)):
        torch.mul(bounds, factor, out=table[row, : places + 1])
    torch.sub(bounds[1:], bounds[:-1], out=table[3, :places])
    return table


@torch.library.custom_op("workbench::attention_over_documents", mutates_args=())
def attention_over_documents(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention of each document alone: `softmax(q kT * scale) v`, and what its backward pass reads.

    Args:
        q: [N, heads, width] float16 or bfloat16; k, v: [N, shared heads, width]. bounds: [places + 1] int32, rising from 0
            to N, equal where a place is empty. longest: no document has more tokens.
    """
    table = _table(q, k, bounds)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"queries, keys and values must be of one dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse = _plan(q, k, bounds.numel() - 1, longest, scale).forward(q, k, v, table)
    return out, lse, table


@torch.library.custom_op("workbench::attention_over_documents_backward", mutates_args=())
def attention_over_documents_backward(
    slope: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    table: Tensor,
    places: int,
    longest: int,
    scale: float,
) -> list[Tensor]:
    q, k, v = (x.contiguous() for x in (q, k, v))
    plan = _plan(q, k, places, longest, scale)
    found: list[Tensor] = plan.backward(slope.contiguous(), q, k, v, out, lse, table)
    return found


@attention_over_documents.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    table = bounds.new_empty(4, _pitch(bounds.shape[0] - 1))
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32), table


@attention_over_documents_backward.register_fake
def _(
    slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Tensor, places: int, longest: int,
    scale: float,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape) for x in (q, k, v)]


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, bounds, *settings = inputs
    ctx.settings = (bounds.shape[0] - 1, *settings)
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, slope: Tensor, _lse: Tensor, _table: Tensor) -> Any:
    found = attention_over_documents_backward(slope, *ctx.saved_tensors, *ctx.settings)
    return *found, None, None, None


attention_over_documents.register_autograd(_differentiate, setup_context=_remember)
