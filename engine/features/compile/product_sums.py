"""Of compiled layers: a matrix product that is added to another is added while it is computed.

The compiler leaves each product as a result of its own and adds them wherever the sum is read. An adapter's `B A x` beside
`W x`, and the gradients that reach one input from queries, keys, values and their adapters, or from gate and up, are each
written at full width and read again. In this pass the first result of a sum is where the others are added, by the
products' own kernels, as their tiles are written. `addmm` would copy that result first, which was 23 ms of an 8B step; `addmm_` does
not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_ATEN = torch.ops.aten
ADD_PRODUCT = _ATEN.addmm_.default
VIEWS = _ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default
_MADE_BY = _ATEN.mm.default, _ATEN._scaled_mm.default
"""What makes a result that other products may be added to."""


class ProductSums(CustomGraphPass):
    """A pass over a layer's graph, forward and backward; counts what it changed."""

    def __init__(self) -> None:
        self.sums = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        totals: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in list(graph.nodes):
            found = _total_and_product(node, totals)
            if found is None:
                continue
            side, total, product = found
            with graph.inserting_before(node):
                graph.call_function(ADD_PRODUCT, (total, *product.args[:2])).meta["val"] = total.meta["val"]
                # As it was seen before, whose lengths may be the graph's own numbers.
                shaped = graph.call_function(_ATEN.reshape.default, (total, _shape(side)))
                shaped.meta.update(node.meta)
            node.replace_all_uses_with(shaped)
            totals[shaped] = total
            self.sums += 1
        if self.sums:
            graph.eliminate_dead_code()

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _total_and_product(
    node: torch.fx.Node, totals: dict[torch.fx.Node, torch.fx.Node]
) -> tuple[torch.fx.Node, torch.fx.Node, torch.fx.Node] | None:
    """Of a sum of two results that nothing else reads: the side that the other is added to, what it is a view of, and the
    product that the other is. None for any other node."""
    if node.target is not _ATEN.add.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    sides: list[tuple[Any, torch.fx.Node]] = []
    for side in node.args:
        if (made := _made_for(side, totals)) is None:
            return None
        sides.append((side, made))
    (_, a), (_, b) = sides
    if a is b or _form(a) != _form(b) or sides[0][0].meta["val"].shape != sides[1][0].meta["val"].shape:
        return None
    # Added is what has the smaller factors, since these are read once more; never what others were added to.
    sides.sort(key=lambda each: (each[1] in totals.values(), each[1].target is not _ATEN.mm.default, _inner(each[1])))
    (_, product), (side, total) = sides
    if product in totals.values() or product.target is not _ATEN.mm.default:
        return None
    return side, total, product


def _made_for(node: Any, totals: dict[torch.fx.Node, torch.fx.Node]) -> torch.fx.Node | None:
    """The result behind the views of one reader, where that is a product or a sum of them that nothing else reads."""
    while isinstance(node, torch.fx.Node) and len(node.users) == 1:
        if node in totals:
            return totals[node]
        if node.target in _MADE_BY:
            return node
        if node.target not in VIEWS:
            return None
        node = node.args[0]
    return None


def _form(product: torch.fx.Node) -> tuple[Any, torch.dtype]:
    value = product.meta["val"]
    return value.shape, value.dtype


def _inner(product: torch.fx.Node) -> int:
    left: Any = product.args[0]
    inner = left.meta["val"].shape[-1]
    return inner if isinstance(inner, int) else 0


def _shape(side: torch.fx.Node) -> Any:
    return side.args[1] if side.target in VIEWS else list(side.meta["val"].shape)
