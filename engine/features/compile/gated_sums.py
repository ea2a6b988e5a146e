"""Of compiled layers: a gated block adds its adapters' low-rank products where gate and up are multiplied with each other.

`down(act(W_g x + B_g A_g x) * (W_u x + B_u A_u x))`: the compiler has no kernel that adds a thin product to a wide one on its
way into the activation, so each is written and read as a result of full width, five of them a layer that is computed again, or a
twentieth of an 8B step. `engine.kernels.gated_sums` forms them tile by tile. A block whose class computes just this, with
plain LoRA on gate and up, gets a `forward` on its instance that hands the four factors on. Two passes over the graphs do what
code cannot say: the block's product is computed again for the backward pass and never held for it, and there it comes
with the gradients, which take the gradient's own low-rank product and the place of what they were computed from.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from engine.compat.instances import all_of, put
from engine.features.compile.gate import Gate
from engine.features.compile.grouped import ALONE, factors, group, grouped, serves, together
from engine.features.compile.low_rank_sums import LOW_RANK, VIEWS, inner_size, product_behind
from engine.features.fused_lora.projections import gated_form
from engine.kernels.device import kernel_serves
from engine.kernels.gated_sums import GATED_SUMS, GRADIENTS, GRADIENTS_IN_PLACE, gated_sums

_ATEN = torch.ops.aten
_PRODUCTS = _ATEN.mm.default, _ATEN._scaled_mm.default
"""What makes a result that is nobody else's: gradients may be written over it."""


def group_blocks(layers: list[torch.nn.Module], gate: Gate | None = None) -> tuple[int, int, Callable[[], None]]:
    """As `grouped.group`, and gated blocks on a device that has kernels get their own forward; how many modules, how many
    of them blocks, and the undo."""
    forms = [
        (module, form)
        for module, names in grouped(layers)
        if "gate_proj" in names
        and set(ALONE) & set(module._modules) == {"down_proj"}
        and kernel_serves(*module.parameters())
        and (form := gated_form(module)) is not None
    ]
    count, undo = group(layers, gate)
    undos = [undo]
    for module, form in forms:
        if all(map(serves, _projections(module)[:2])):
            theirs: Any = module.forward
            undos.append(put(module, "forward", types.MethodType(_block(theirs.__func__, form, gate), module)))
    return count, len(undos) - 1, all_of(undos)


def _projections(module: Any) -> list[Any]:
    return [module.gate_proj, module.up_proj, module.down_proj]


def _block(theirs: Callable[..., Any], activation: str, gate: Gate | None) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        *front, down = _projections(self)
        if args or kwargs or not all(serves(layer, x) for layer in front):
            return theirs(self, x, *args, **kwargs)
        wide = [layer.base_layer(x) for layer in front]
        gate_thin, up_thin = factors(x, front, gate)
        product = gated_sums(wide[0], gate_thin, wide[1], up_thin, activation)
        return together(product, [down], gate)[0] if serves(down, product) else down(product)

    return forward


class Passes(CustomGraphPass):
    """Several passes over a graph, one after the other."""

    def __init__(self, passes: Sequence[CustomGraphPass]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: torch.fx.Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self) -> Any:
        return tuple(each.uuid() for each in self.passes)


class ComputeProductsAgain(CustomGraphPass):
    """A pass over a layer's joint graph, before it is parted: a block's product is not held, but computed again."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is GATED_SUMS:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


class GatedSums(CustomGraphPass):
    """A pass over a layer's graph, forward and backward; counts what it changed."""

    def __init__(self) -> None:
        self.thin = self.products = self.in_place = 0
        """Gradients that came as a sum, products that came with the gradients, and launches that wrote over what they read."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        found = [node for node in graph.nodes if node.target is GRADIENTS]
        for node in found:
            self._take_thin_gradient(graph, node)
            product = self._product_behind(graph, node)
            if product is not None and not self._in_place(graph, node, product):
                _with_product(graph, node, product)
                self.products += 1
        if found:
            graph.eliminate_dead_code()

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))

    def _take_thin_gradient(self, graph: torch.fx.Graph, node: torch.fx.Node) -> None:
        """A gradient that is the sum of a wide and a low-rank product is handed on as its parts."""
        total = _made_for_one(node.args[0])
        found = None if total is None else _parts(total)
        if found is None:
            return
        wide, (inner, right) = found
        node.args = (wide, inner, right, *node.args[3:])
        graph.eliminate_dead_code()  # so that the sum no longer counts among the readers
        self.thin += 1

    def _product_behind(self, graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node | None:
        """The node that computes the product of these sums again, its readers moved behind `node`; None where there is none
        or what leads to `node` reads it."""
        products = (each for each in graph.nodes if each.target is GATED_SUMS and each.args == node.args[3:10])
        product = next(products, None)
        if product is None:
            return None
        reading, behind = {product}, [product]
        for each in graph.nodes:
            if each is node:
                break
            if reading & set(each.all_input_nodes):
                reading.add(each)
                behind.append(each)
        if reading & set(node.all_input_nodes):
            return None
        for each in reversed(behind):
            node.append(each)
        return product

    def _in_place(self, graph: torch.fx.Graph, node: torch.fx.Node, product: torch.fx.Node) -> bool:
        """Has all three written over what they are computed from, where nothing else reads that."""
        places = [_made_for_one(node.args[at], product) for at in (0, 3, 6)]
        if not all(place is not None and place.target in _PRODUCTS for place in places):
            return False
        grad, gate, up = places
        args = (grad, *node.args[1:3], gate, *node.args[4:6], up, *node.args[7:10])
        with graph.inserting_before(node):
            graph.call_function(GRADIENTS_IN_PLACE, args).meta["val"] = None
        outputs = {each.args[1]: each for each in node.users}
        for place, old in ((gate, outputs.get(0)), (up, outputs.get(1)), (grad, product)):
            if old is None:
                continue
            with graph.inserting_before(node):
                shaped = graph.call_function(_ATEN.reshape.default, (place, list(old.meta["val"].shape)))
            shaped.meta.update(old.meta)
            old.replace_all_uses_with(shaped)
        self.in_place += 1
        return True


def _with_product(graph: torch.fx.Graph, node: torch.fx.Node, product: torch.fx.Node) -> None:
    """Has the product come with the gradients."""
    node.args = (*node.args[:10], True)
    node.meta["val"] = (*node.meta["val"][:2], product.meta["val"])
    with graph.inserting_before(product):
        third = graph.call_function(operator.getitem, (node, 2))
    third.meta.update(product.meta)
    product.replace_all_uses_with(third)


def _parts(total: torch.fx.Node) -> tuple[torch.fx.Node, tuple[Any, Any]] | None:
    """What a low-rank product is added to, and its factors [T, R] and [R, I]; None for a node that is no such sum."""
    if total.target is not _ATEN.add.Tensor or len(total.args) != 2 or total.kwargs:
        return None
    for wide, thin in (total.args, total.args[::-1]):
        product = product_behind(thin)
        if product is None or not isinstance(wide, torch.fx.Node):
            continue
        alike = (
            wide.meta["val"].shape == total.meta["val"].shape and wide.meta["val"].dtype == product.meta["val"].dtype
        )
        if alike and inner_size(product) * LOW_RANK <= product.meta["val"].shape[-1]:
            return wide, (product.args[0], product.args[1])
    return None


def _made_for_one(node: Any, also: torch.fx.Node | None = None) -> torch.fx.Node | None:
    """What was computed for one reader alone, behind its views; `also` is a reader that does not count."""
    while isinstance(node, torch.fx.Node) and len(set(node.users) - {also}) == 1:
        if node.target not in VIEWS:
            return node
        node = node.args[0]
    return None
