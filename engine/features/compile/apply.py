"""`kernels.torch_compile`: each decoder layer compiled by itself, in every method.

A layer is compiled once and serves all that are like it, so the wait does not grow with depth, and nothing between layers
can break the graph. Its checkpoint is part of what is compiled, also where the release of transformers puts it around the
layer: so the compiler chooses by the tier what is kept, at no cost for the host, and what the backward pass does not ask
for (the last product of a layer) is not computed again. A layer that sends tokens to experts on other processes is compiled in
pieces around that, inside its checkpoint. What generates keeps the plain layers: with a cache of keys that
grows each token would be a new shape. The options reach the compiler with each compilation and are restored by it. What
came of it the first step tells (`engine.features.compile.fallback`). Where `auto` took it, whatever is in the way, at the first
batch or at a later one, leaves plain layers and a reason; where it was asked for, it ends the run.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from engine.compat.cache_names import cache_in
from engine.compat.instances import all_of, atomic, noted, put
from engine.compat.router_outputs import call_with_router_logits, install_graph_hooks, recording
from engine.config.files import place_of
from engine.config.kernels import STACK_GRAPH
from engine.config.tree import RunConfig, fields
from engine.errors import ModelError
from engine.facts import compiler_waits
from engine.facts.model_shape import model_facts
from engine.features import failures
from engine.features.applied import Applied, left_out
from engine.features.built import Built, base_model, cards_here
from engine.features.compile import recompiles, stack_graph
from engine.features.compile.fallback import FEATURE, Compiling, Switch, as_many_graphs, watch_first_step
from engine.features.compile.gate import Gate, gated
from engine.features.compile.one_graph import OneGraph
from engine.features.compile.recompiles import TURN_OFF
from engine.features.gradient_checkpointing.tiers import WIDEST, decoder_layers_of
from engine.models.expert_shards import is_divided


@atomic()
def apply(config: RunConfig, built: Built) -> Applied | None:
    """Compiles the layers of every model of the trainer; None where it was neither asked for nor left to be chosen."""
    auto = built.notes.reasons.get(fields.kernels.torch_compile.path)
    if config.kernels.torch_compile is not True:
        return left_out(FEATURE, auto)
    auto = None if config.kernels.torch_compile_options else auto
    layers = built.decoder_layers()
    problem = refusal() if layers else "the model has no decoder layers that could be compiled."
    if problem is None and auto is not None and not config.data.packing and _sees_images(built):
        problem = "padded batches with images are compiled where it is asked for."
    if problem is not None and auto is None:
        raise ModelError(f"kernels.torch_compile: {problem}", TURN_OFF)
    if problem is not None:
        return Applied(FEATURE, "auto", "off", None, f"layers run as they are: {problem}")
    gate, one_way, undo_gate = _one_way(built, layers)
    if auto is not None and one_way and gate is None:
        return Applied(FEATURE, "auto", "off", None, f"layers run as they are: {one_way}")
    undo_cache = _without_cache(built)
    part = (
        IN_PIECES
        if is_divided(built.policy)
        else WITHIN_HOOKS
        if config.distributed.strategy == "fsdp2"
        else WHOLE_CALL
    )
    undo_checkpoints = checkpoint_inside(built.pretrained(), everywhere=part is IN_PIECES)
    from engine.features.compile.gated_sums import group_blocks  # with the compiler, which takes a while

    together, blocks, undo_groups = group_blocks(layers, gate)
    switch, one = Switch(requested=auto is None), OneGraph(layers)
    options = dict(config.kernels.torch_compile_options)
    recorded = options.pop(STACK_GRAPH, False)
    if torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True  # no choice of the compiler by timing
    lean = config.memory.gradient_checkpointing in (True, "full") and part is not IN_PIECES
    options |= _passes(layers, lean=lean, blocks=bool(blocks), tier=config.memory.gradient_checkpointing)
    undo_layers = compile_layers(layers, options, switch, one_shape=config.data.packing, one=one, part=part)
    undo_graph = _record(built, layers, part) if recorded else lambda: None
    undo_notes = one.watch_checkpoints(built.pretrained())
    words = f"; adapters' products taken together in {together} modules" if together else ""
    words += f"; low-rank products are added where {blocks} gated blocks multiply" if blocks else ""
    words += "; where products are summed, they are added while they are computed"
    words += f"; {one_way}" if one_way else ""
    words += f"; {auto}" if auto else ""
    shape, expected = _known_wait(config, built, layers[0])
    compiling = Compiling(len(layers), words, auto, shape, expected)
    undo_step = watch_first_step(built, switch, compiling)

    undo = all_of(
        [undo_gate, undo_cache, undo_checkpoints, undo_groups, undo_layers, undo_graph, undo_notes, undo_step]
    )
    requested = True if auto is None else "auto"
    return Applied(FEATURE, requested, "inductor", len(layers), f"layers; {_summary(config)}{words}", undo)


def _passes(layers: list[torch.nn.Module], *, lean: bool, blocks: bool, tier: bool | str = False) -> dict[str, Any]:
    """The compiler's options that have its graphs changed; `lean`: layers are computed again whole."""
    from engine.features.compile.gated_sums import ComputeProductsAgain, GatedSums, Passes
    from engine.features.compile.product_sums import ProductSums

    after: list[Any] = []
    before: list[Any] = []
    if blocks:
        after.append(GatedSums())
        before.append(ComputeProductsAgain())
    after.append(ProductSums())
    if any(type(module).__name__ == "Linear4bit" for layer in layers for module in layer.modules()):
        from engine.features.compile.recompute_4bit import Recompute4bit

        before.append(Recompute4bit(products=lean, widest=WIDEST.get(str(tier))))
    found = {"post_grad_custom_post_pass": after, "joint_custom_pre_pass": before}
    return {name: passes[0] if len(passes) == 1 else Passes(passes) for name, passes in found.items() if passes}


def _record(built: Built, layers: list[torch.nn.Module], part: Part) -> Callable[[], None]:
    """Has those of the layers that read text recorded as CUDA graphs; returns the undo. Raises ModelError where they cannot be."""
    compiled = set(map(id, layers))
    layers = [layer for layer in decoder_layers_of(base_model(built.policy)) if id(layer) in compiled]
    reason = stack_graph.problem(layers)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        reason = "several processes train together"
    elif built.reference_by not in ("none", "precomputed"):
        reason = "a reference answers by layers of its own"
    if reason is not None:
        raise ModelError(f"kernels.torch_compile_options.{STACK_GRAPH}: {reason}.", stack_graph.TURN_OFF)
    device = next(weight.device for weight in layers[0].parameters())
    return stack_graph.StackGraph(layers, stack_graph.recorder(device), built.report).put(part.attribute)


def _one_way(built: Built, layers: list[torch.nn.Module]) -> tuple[Gate | None, str, Callable[[], None]]:
    """The gate by which the model with its adapter off is the reference, words for the receipt, and the undo."""
    if built.reference_by == "precomputed":
        return (
            None,
            "the stored reference was computed by plain layers, which round apart from compiled ones",
            lambda: None,
        )
    if built.reference_by != "adapter_off":
        return None, "", lambda: None
    gate, reason, undo = gated(built.policy, layers)
    if gate is not None:
        return gate, "policy and reference run the same graph", undo
    return None, f"the reference is a graph of its own: {reason}" if reason else "", undo


def _known_wait(config: RunConfig, built: Built, layer: torch.nn.Module) -> tuple[str | None, float | None]:
    """What the wait for layers like these is kept under on this machine, and its seconds in the last run that had it."""
    model = model_facts(place_of(config.model.name, built.notes.folder), config.model.revision)
    cards = cards_here(next((weight.device for weight in layer.parameters()), None)).machine
    card = cards.gpus[0].name if cards is not None and cards.gpus else "cpu"
    known = compiler_waits.known(config, model, card)
    return compiler_waits.key(config, model, card), None if known is None else known.again


def refusal() -> str | None:
    """Why this machine cannot compile, as a sentence, or None."""
    compilers = [os.environ.get("CC"), os.environ.get("CXX"), "c++", "g++", "gcc", "cc", "clang"]
    if not any(name and shutil.which(name) for name in compilers):
        return "torch needs a C compiler on this machine (gcc or clang), and none is on the PATH."
    return None


class _Inside:
    """Stands where a layer keeps its checkpoint function and lets calls pass: the compiled code makes the checkpoint."""

    def __init__(self, checkpoint: functools.partial[Any]) -> None:
        self.checkpoint, self.keywords = checkpoint, checkpoint.keywords

    def __call__(self, run: Callable[..., Any], *args: Any) -> Any:
        return run(*args)


def checkpoint_inside(models: list[Any], *, everywhere: bool = False) -> Callable[[], None]:
    """From now on these models' layers make their checkpoints in the compiled code; returns the undo.

    Where transformers makes them in a layer's `forward` (5.23), there is nothing to do; before, `__call__` made them
    around it. `everywhere` moves those of `forward` too, for whoever makes them around what is compiled.
    """
    moves = _is_checkpointed if everywhere else _checkpoints_around
    around = [model for model in models if any(map(moves, model.modules()))]
    before = [vars(model).get("gradient_checkpointing_enable") for model in around]
    for model in around:
        model.gradient_checkpointing_enable = _then_inside(model, model.gradient_checkpointing_enable, moves)
        _move_inside(model, moves)

    def undo() -> None:
        for model, held in zip(around, before, strict=True):
            vars(model).pop("gradient_checkpointing_enable")
            if held is not None:
                model.gradient_checkpointing_enable = held
            for module in model.modules():
                moved = vars(module).get("_gradient_checkpointing_func")
                if isinstance(moved, _Inside):
                    module._gradient_checkpointing_func = moved.checkpoint

    return noted(undo)


def _is_checkpointed(module: torch.nn.Module) -> bool:
    return isinstance(module, GradientCheckpointingLayer)


def _checkpoints_around(module: torch.nn.Module) -> bool:
    return _is_checkpointed(module) and type(module).__call__ is not torch.nn.Module.__call__


def _then_inside(
    model: PreTrainedModel, enable: Callable[..., Any], moves: Callable[[torch.nn.Module], bool]
) -> Callable[..., Any]:
    @functools.wraps(enable)
    def gradient_checkpointing_enable(*args: Any, **kwargs: Any) -> Any:
        done = enable(*args, **kwargs)
        _move_inside(model, moves)
        return done

    return gradient_checkpointing_enable


def _move_inside(model: PreTrainedModel, moves: Callable[[torch.nn.Module], bool]) -> None:
    moved: dict[int, _Inside] = {}
    layers: Iterator[Any] = filter(moves, model.modules())
    for module in layers:
        held = vars(module).get("_gradient_checkpointing_func")
        if isinstance(held, functools.partial):
            module._gradient_checkpointing_func = moved.setdefault(id(held), _Inside(held))


def _call(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """What is compiled of each layer: its call, in the checkpoint that was moved inside."""
    return _checkpointed(layer, layer._call_impl, args, kwargs)


def _forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """What is compiled of a layer whose weights are put together by hooks around it: its forward pass, in that checkpoint.

    As the hooks stay outside, the layer is put together once for the backward pass, which computes again what it asks for.
    """
    return _checkpointed(layer, functools.partial(type(layer).forward, layer), args, kwargs)


def _checkpointed(layer: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if layer.training and layer.gradient_checkpointing and isinstance(layer._gradient_checkpointing_func, _Inside):
        checkpoint = layer._gradient_checkpointing_func.checkpoint
        return checkpoint(functools.partial(run, **kwargs), *args)
    return run(*args, **kwargs)


def _call_with_router_logits(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """The same of each layer whose router logits are recorded: its call, and those logits."""
    return call_with_router_logits(_call, layer, *args, **kwargs)


def _forward_with_router_logits(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return call_with_router_logits(_forward, layer, *args, **kwargs)


def _bare(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """What is compiled of a layer that sends tokens to other processes: its call, whose checkpoint is around it."""
    return layer._call_impl(*args, **kwargs)


def _bare_with_router_logits(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return call_with_router_logits(_bare, layer, *args, **kwargs)


@dataclass(frozen=True)
class Part:
    """Which part of a layer's call is compiled: the attribute that stands for it, what it runs, and beside router logits."""

    attribute: str
    run: Any
    with_router_logits: Any
    checkpointed: bool = True
    """Whether the checkpoint is in what is compiled."""

    def call(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The part's call by `run`, which is `self.run`, compiled or not, with the layer's checkpoint."""
        if self.checkpointed:
            return run
        return lambda layer, *args, **kwargs: _checkpointed(layer, functools.partial(run, layer), args, kwargs)


WHOLE_CALL = Part("_compiled_call_impl", _call, _call_with_router_logits)
WITHIN_HOOKS = Part("forward", _forward, _forward_with_router_logits)
"""FSDP2's hooks put a layer's weights together and cannot be followed: within a checkpoint they make the compiler leave the
whole layer as it is, without a word. Within them it finds whole weights."""
IN_PIECES = Part("_compiled_call_impl", _bare, _bare_with_router_logits, checkpointed=False)
"""Where a layer's tokens go to experts on other processes its graph ends, and another one begins behind them. In a checkpoint the
compiler follows, an end would leave the whole layer as it is; so the checkpoint is around the pieces."""


def compile_layers(
    layers: list[torch.nn.Module],
    options: dict[str, Any],
    switch: Switch | None = None,
    *,
    one_shape: bool = True,
    one: OneGraph | None = None,
    part: Part = WHOLE_CALL,
) -> Callable[[], None]:
    """Has each layer compiled at its first call outside generation, as long as `switch` is on; returns the undo.

    `options` are names of torch._inductor.config. With `one_shape` the first graph is for the first batch's own lengths,
    else for any length at once, so that batches of different lengths do not compile anew until torch gives up.
    """
    compiled, recorded = (
        part.call(torch.compile(run, options=dict(options) or None, dynamic=None if one_shape else True))
        for run in (part.run, part.with_router_logits)
    )
    switch, one = switch or Switch(), one or OneGraph(layers)
    undos = list[Callable[[], None]]()
    undos += [
        put(layer, part.attribute, _unless_generating(layer, compiled, recorded, switch, one, undos, part))
        for layer in layers
    ]
    return lambda: all_of(undos)()


def _unless_generating(
    layer: Any,
    compiled: Callable[..., Any],
    recorded: Callable[..., Any],
    switch: Switch,
    one: OneGraph,
    undos: list[Callable[[], None]],
    part: Part,
) -> Callable[..., Any]:
    hearing, plain = False, part.call(part.run)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal hearing
        if cache_in(kwargs) is not None and not torch.is_grad_enabled():
            return layer._call_impl(*args, **kwargs) if part is WHOLE_CALL else plain(layer, *args, **kwargs)
        if not switch.on:
            return plain(layer, *args, **kwargs)
        if (records := recording()) is not None and not hearing:
            undos.append(install_graph_hooks(layer))  # transformers makes its hooks when they are first asked for
            hearing = True
        switch.ran.add((part.run if records is None else part.with_router_logits).__code__)
        try:
            with as_many_graphs(switch):
                if records is None:
                    return one.call(compiled, layer, args, kwargs)
                out, said = one.call(recorded, layer, args, kwargs)
            records.extend(said)
            return out
        except recompiles.limit_hit():
            if switch.give_up is None:
                raise recompiles.too_many(switch.requested) from None
            switch.give_up(recompiles.too_many(switch.requested))
        except failures.known() as error:
            if switch.give_up is None:
                raise
            switch.give_up(error)
        return plain(layer, *args, **kwargs)

    return call


def _sees_images(built: Built) -> bool:
    """Whether a model takes images, whose own layers meet other numbers of patches in each batch."""
    return any(hasattr(model.config, "vision_config") for model in built.pretrained())


def _without_cache(built: Built) -> Callable[[], None]:
    """A forward pass of training makes no cache of keys, which would be a new shape in each layer; returns the undo."""
    configs = {id(held): held for model in built.models() if (held := _cached(model)) is not None}
    return all_of([put(held, "use_cache", False) for held in configs.values()])


def _cached(value: Any) -> Any | None:
    held: Any = getattr(value, "config", None) if isinstance(value, torch.nn.Module) else None
    held = held.get_text_config() if hasattr(held, "get_text_config") else held
    return held if getattr(held, "use_cache", False) else None


def _summary(config: RunConfig) -> str:
    options = config.kernels.torch_compile_options
    given = ", ".join(f"{name}={str(value).lower()}" for name, value in options.items())
    return f"{given or 'no options'}; generation runs the plain layers"
