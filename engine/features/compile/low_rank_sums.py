"""Of compiled layers: a low-rank product is added inside the sum that takes it, where the sum is wide and memory is short.

The compiler leaves `W x` and an adapter's `B A x` as two results of full width and adds them wherever the sum is read, so
in a gated block four wide results wait for the backward pass in place of two, and a third pair joins them there. Where
layers are computed again to save memory, each such sum is one product that is added to the other's result where it lies:
torch's `addmm` copies it first, which was 184 copies and 23 ms of an 8B step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

LOW_RANK = 8
"""The added product's inner size is this many times smaller than its width."""
_ATEN = torch.ops.aten
_LIBRARY = torch.library.Library("workbench", "FRAGMENT")
_LIBRARY.define("add_product_(Tensor(a!) total, Tensor left, Tensor right) -> ()")
_LIBRARY.impl("add_product_", lambda total, left, right: None, "Meta")


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    total.addmm_(left, right)


for _kind in ("CPU", "CUDA"):
    _LIBRARY.impl("add_product_", _add_product, _kind)
ADD_PRODUCT = torch.ops.workbench.add_product_.default
VIEWS = _ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default


class LowRankSums(CustomGraphPass):
    """A pass over a layer's graph, forward and backward; counts what it changed."""

    def __init__(self) -> None:
        self.sums = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in list(graph.nodes):
            found = _base_and_low_rank(node)
            if found is None:
                continue
            wide, (left, right) = found
            with graph.inserting_before(node):
                graph.call_function(ADD_PRODUCT, (wide, left, right)).meta["val"] = None
                shaped = graph.call_function(_ATEN.reshape.default, (wide, list(node.meta["val"].shape)))
                shaped.meta.update(node.meta)
            node.replace_all_uses_with(shaped)
            self.sums += 1
        if self.sums:
            graph.eliminate_dead_code()

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _base_and_low_rank(node: torch.fx.Node) -> tuple[torch.fx.Node, tuple[Any, Any]] | None:
    """The product that a sum is wide by, and the factors of the low-rank one beside it; None for any other node."""
    if node.target is not _ATEN.add.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    first, second = (_product(side) for side in node.args)
    if first is None or second is None or first is second:
        return None
    for wide, low_rank in ((first, second), (second, first)):
        a, b = wide.meta["val"], low_rank.meta["val"]
        if (
            a.shape == b.shape
            and a.dtype == b.dtype
            and _inner(wide) < a.shape[-1]
            and _inner(low_rank) * LOW_RANK <= a.shape[-1]
        ):
            return wide, (low_rank.args[0], low_rank.args[1])
    return None


def _product(node: Any) -> torch.fx.Node | None:
    """The matrix product behind a result that nothing else reads."""
    while isinstance(node, torch.fx.Node) and node.target in VIEWS and len(node.users) == 1:
        node = node.args[0]
    plain = isinstance(node, torch.fx.Node) and node.target is _ATEN.mm.default and len(node.users) == 1
    return node if plain and isinstance(node, torch.fx.Node) else None


def _inner(product: torch.fx.Node) -> Any:
    left: Any = product.args[0]
    return left.meta["val"].shape[-1]
