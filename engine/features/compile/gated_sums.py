"""Of compiled layers: a gated block adds its adapters' low-rank products where gate and up are multiplied with each other.

`down(act(W_g x + B_g A_g x) * (W_u x + B_u A_u x))`: the compiler has no kernel that adds a thin product to a wide one on its
way into the activation, so each is written and read as a result of full width, five of them a layer that is computed again, or a
twentieth of an 8B step. `engine.kernels.gated_sums` forms them tile by tile. A block whose class computes just this, with
plain LoRA on gate and up, gets a `forward` on its instance that hands the four factors on. Two passes over the graphs do what
code cannot say: the block's product is never held for the backward pass, where it comes with the gradients, and those
take the place of what they are computed from.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from engine.compat.instances import all_of, put
from engine.features.compile.gate import Gate
from engine.features.compile.grouped import ALONE, factors, first_matrix, group, grouped, second_matrix, serves
from engine.features.compile.product_sums import VIEWS
from engine.features.fused_lora.projections import gated_form
from engine.kernels.device import kernel_serves
from engine.kernels.gated_sums import GATED_SUMS, GRADIENTS, GRADIENTS_IN_PLACE, gated_sums

_ATEN = torch.ops.aten
_PRODUCTS = _ATEN.mm.default, _ATEN._scaled_mm.default
"""What makes a result that is nobody else's: gradients may be written over it."""
_READ = 0, 3, 6
"""Where gradient, gate and up stand among the arguments of a block's gradients."""


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
        if {each.dtype for each in (*wide, *gate_thin, *up_thin)} != {x.dtype}:
            return theirs(self, x)
        behind = (first_matrix(down, gate), second_matrix(down)) if serves(down, x) else None
        product, answer = gated_sums(wide[0], gate_thin, wide[1], up_thin, activation, behind)
        return down(product) if answer is None else down.base_layer(product) + answer

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
    """A pass over a layer's graph, forward and backward: gradients take the place of what they are computed from, where
    nothing else reads that. Counts what it changed."""

    def __init__(self) -> None:
        self.in_place = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in [node for node in graph.nodes if node.target is GRADIENTS]:
            self.in_place += _in_place(graph, node)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _in_place(graph: torch.fx.Graph, node: torch.fx.Node) -> bool:
    """Has gradients of gate and up and the product written over gate, up and the gradient; whether they can be."""
    places = [place for at in _READ if (place := _single_use(node.args[at])) is not None and place.target in _PRODUCTS]
    if len(places) < len(_READ):
        return False
    args = list(node.args)
    for at, place in zip(_READ, places, strict=True):
        args[at] = place
    outputs = {each.args[1]: each for each in node.users}
    with graph.inserting_before(node):
        inwards = graph.call_function(GRADIENTS_IN_PLACE, tuple(args))
    inwards.meta["val"] = node.meta["val"][3]
    for at, place in zip((2, 0, 1), places, strict=True):
        if at not in outputs:
            continue
        # As it was seen before, whose lengths may be the graph's own numbers.
        seen: Any = node.args[_READ[0] if at == 2 else _READ[1 + at]]
        with graph.inserting_before(node):
            shape = seen.args[1] if seen is not place else list(place.meta["val"].shape)
            shaped = graph.call_function(_ATEN.reshape.default, (place, shape))
        shaped.meta.update(outputs[at].meta)
        outputs[at].replace_all_uses_with(shaped)
    if 3 in outputs:
        outputs[3].replace_all_uses_with(inwards)
    for each in (*outputs.values(), node):
        graph.erase_node(each)
    return True


def _single_use(node: Any) -> torch.fx.Node | None:
    """What was computed for one reader alone, behind its views."""
    while isinstance(node, torch.fx.Node) and len(node.users) == 1:
        if node.target not in VIEWS:
            return node
        node = node.args[0]
    return None
