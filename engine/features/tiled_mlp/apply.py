"""`memory.tiled_mlp`: the feed-forward block of each decoder layer runs over tiles of the batch's tokens.

A block gets a `forward` of its own on its instance (`engine.features.tiled_mlp.tiling`), also where it is a mixture of experts, whose
experts look at each token by itself. Before the first step one block of each class is asked with and without tiles, and the
run ends if the answers differ. A gated block (SwiGLU, GeGLU) of plain, 4-bit or FP8 linear layers, with LoRA or without,
has its gradients in closed form (`engine.kernels.lora`), on a card with one kernel for the activation. A loss that looks
at the routers hears all tokens (`engine.features.tiled_mlp.routers`). Packed experts have tiles of their own, which share one
unpacking (`engine.kernels.experts.in_tiles`): their router, whose product is thin, takes all tokens at once, and experts
beside them that every token takes are blocks by themselves. Refuses blocks that return more than hidden states, and models
with such a loss whose routers are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper

from engine.compat.instances import all_of, in_mode, put
from engine.config.facts import Facts
from engine.config.tree import RunConfig
from engine.errors import ModelError
from engine.facts import counts
from engine.features.applied import Applied
from engine.features.built import Built, base_model, decoder_layers
from engine.features.fused_lora.projections import all_described, block_names, described, gated_form, in_closed_form
from engine.features.tiled_mlp import routers
from engine.features.tiled_mlp.tiling import tiled
from engine.kernels.experts.packed import PackedExperts
from engine.kernels.lora import GatedBlock

FEATURE = "tiled MLP"
NAMES = ("mlp", "feed_forward", "block_sparse_moe", "ffn", "moe")
"""What the models of transformers call the feed-forward block of a decoder layer."""
_LEAVE_OUT = "Leave it out."
# Relative error that another order of rounding may make in one block.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def prepare(config: RunConfig, built: Built) -> Applied | None:
    """Gives the model's feed-forward blocks their tiles; None where it was not asked for. Before the trainer is built."""
    if not config.memory.tiled_mlp:
        return None
    model = base_model(built.policy)
    found = list(feed_forward_blocks(model))
    blocks = [part for block in found for part in (_beside_experts(block) if _packed_experts(block) else [block])]
    if not found:
        raise ModelError(
            "memory.tiled_mlp: no feed-forward block was found in the model's decoder layers.",
            f"They are known as {', '.join(NAMES)}. {_LEAVE_OUT}",
        )
    text = model.config.get_text_config()
    asked_for = getattr(text, "output_router_logits", False)
    # TRL's trainers ask for it by themselves, later, where the model has a weight for that loss.
    looked_at = asked_for or (asked_for is False and getattr(text, "router_aux_loss_coef", 0.0))
    whole = [block for block in blocks if block in found]
    if asked_for and not all(routers.recorded(model, block) for block in whole):
        raise ModelError(
            "memory.tiled_mlp: the model's loss looks at the router of all tokens (output_router_logits), which tiles forget.",
            _LEAVE_OUT,
        )
    tokens, in_float32 = config.memory.tiled_mlp_tokens, config.memory.tiled_mlp_fp32_sums
    assert tokens is not None  # a run's config has no default left
    undos, closed, recorded, shared = [], 0, 0, 0
    for block in found:
        if experts := _packed_experts(block):
            undos.append(_experts_in_tiles(block, experts, tokens, _width(block, text.hidden_size), model.dtype))
            shared += 1
    spared = {
        build: _try(block, _width(block, text.hidden_size), model.dtype) for build, block in _by_build(blocks).items()
    }
    for block in blocks:
        last = _last_linear(block) if spared[_build(block)] else None
        activation = gated_form(block)
        names = block_names(block) or ()
        if activation is not None and all(not isinstance(described(getattr(block, name)), str) for name in names):
            plain, closed = _in_tiles(block, tokens, in_float32, last), closed + 1
            undos.append(put(block, "forward", _in_closed_tiles(block, plain, activation, tokens, in_float32)))
        else:
            in_tiles = _in_tiles(block, tokens, in_float32, last)
            if looked_at and (asked := routers.recorded(model, block)):
                two = _drawn(block, _width(block, text.hidden_size), model.dtype)[:1, :2]
                in_tiles, recorded = routers.record_router_logits(in_tiles, block, asked, tokens, two), recorded + 1
            undos.append(put(block, "forward", in_tiles))

    longest = counts.batch_tokens(config, Facts())
    count = -(-longest // tokens)
    detail = (
        f"feed-forward blocks; a batch of at most {longest:,} tokens makes {count} tiles"
        f"{f'; {closed:,} with gradients in closed form' if closed else ''}"
        f"{'; the last product is not computed again' if blocks and (all(spared.values()) or closed == len(blocks)) else ''}"
        f"{f'; in {shared:,} packed experts, unpacked once for all tiles' if shared else ''}"
        f"{'; gradients of tiles are added in float32' if in_float32 else ''}"
        f"{'; routers are asked once more for all tokens' if recorded else ''}"
    )
    return Applied(FEATURE, True, f"{tokens:,} tokens a tile", len(found), detail, all_of(undos))


def feed_forward_blocks(model: torch.nn.Module) -> Iterator[Any]:
    """The feed-forward block of every decoder layer that has one under a known name."""
    for layer in decoder_layers(model):
        children = dict(layer.named_children())
        yield from (children[name] for name in NAMES if name in children)


def _packed_experts(block: Any) -> list[Any]:
    """The modules of a block whose experts are packed and computed by the pass of this project."""
    return [
        module
        for module in block.modules()
        if any(isinstance(weight, PackedExperts) for weight in module.parameters(recurse=False))
        and str(getattr(module.config, "_experts_implementation_internal", "")).startswith("workbench_")
    ]


def _beside_experts(block: Any) -> list[Any]:
    """Gated blocks beside the experts, which every token takes."""
    return [child for child in block.children() if gated_form(child) is not None]


def _experts_in_tiles(
    block: Any, experts: list[Any], tokens: int, width: int, dtype: torch.dtype
) -> Callable[[], None]:
    """Gives the experts of a block their tiles; returns the undo. Raises ModelError where the block answers otherwise."""
    hidden = _drawn(block, width, dtype)
    with torch.no_grad(), in_mode(block, training=False):
        whole = block(hidden)
        three = [put(module, "tile_tokens", 3) for module in experts]
        in_tiles = block(hidden)
        all_of(three)()
    first, other = (each[0] if isinstance(each, tuple) else each for each in (in_tiles, whole))
    if not (error := _relative_error(first, other)) <= _TOLERANCE.get(other.dtype, 3e-2):
        raise ModelError(
            f"memory.tiled_mlp: {type(block).__name__} answers otherwise when its experts are asked tile by tile (relative "
            f"error {error:.1e}).",
            _LEAVE_OUT,
        )
    return all_of([put(module, "tile_tokens", tokens) for module in experts])


def _build(block: Any) -> tuple[tuple[str, type], ...]:
    return tuple((name, type(module)) for name, module in block.named_modules())


def _by_build(blocks: list[Any]) -> dict[tuple[tuple[str, type], ...], Any]:
    """One block of each kind: blocks whose modules are alike answer alike."""
    return {_build(block): block for block in blocks}


def _last_linear(block: Any) -> torch.nn.Linear | None:
    """The linear layer that may make the block's result: the last of its own, or what PEFT put an adapter beside."""
    own = [getattr(child, "base_layer", child) for child in block.children()]
    linears = [layer for layer in own if isinstance(layer, torch.nn.Linear)]
    return linears[-1] if linears and type(linears[-1]) is torch.nn.Linear else None


def _in_tiles(block: Any, tokens: int, in_float32: bool, last: torch.nn.Linear | None) -> Any:
    plain = block.forward

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        weights = list(block.parameters())
        return tiled(plain, hidden_states, weights, tokens, in_float32=in_float32, random=block.training, last=last)

    return forward


def _in_closed_tiles(block: Any, plain: Any, activation: str, tokens: int, in_float32: bool) -> Any:
    """As `_in_tiles` for a gated block: its gradients in closed form as long as its projections allow that."""

    names = block_names(block) or ()

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        group = all_described([getattr(block, name) for name in names], hidden_states)
        if group is None:
            out: torch.Tensor = plain(hidden_states)
            return out
        closed = GatedBlock(group, activation)
        weights = [weight for weight in block.parameters() if weight.requires_grad]

        def gradients(x: torch.Tensor, slope: torch.Tensor, inwards: bool) -> Any:
            inside, found = closed.gradients(x, slope, inwards)
            of = {id(weight): each for weight, each in zip(closed.flat, found, strict=True) if weight is not None}
            return inside, [of.get(id(weight)) for weight in weights]

        random = any(layer.dropout for layer in (*closed.front, closed.down))
        return tiled(closed, hidden_states, weights, tokens, in_float32=in_float32, random=random, gradients=gradients)

    return in_closed_form(forward)


def _width(block: Any, usual: int) -> int:
    """The width of the block's input, by its first linear layer (`in_features`, or `nx` in GPT-2's kind).

    An adapter of fused experts says one of an expert's sizes, whichever its weight was named for: it is no such layer.
    """
    experts = [path for path, module in block.named_modules() if isinstance(module, ParamWrapper)]
    for path, module in block.named_modules():
        if any(path == each or path.startswith(f"{each}.lora_") for each in experts):
            continue
        for name in ("in_features", "nx"):
            if isinstance(width := getattr(module, name, None), int):
                return width
    return usual


def _drawn(block: Any, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Eight tokens in two rows, the same each time, where the block's weights are."""
    drawn = torch.randn(2, 4, width, generator=torch.Generator().manual_seed(0))
    return drawn.to(next(block.parameters()).device, dtype)


def _try(block: Any, width: int, dtype: torch.dtype) -> bool:
    """The block on 8 tokens at once and in tiles of 3: whether its gradients are the same without its last product.

    `dtype` is the model's; weights may be held in fewer bits. Raises ModelError where it is not a block of tokens by themselves.
    """
    name = type(block).__name__
    hidden = _drawn(block, width, dtype)
    try:
        with in_mode(block, training=False):
            with torch.no_grad():
                whole = block(hidden)
                if not isinstance(whole, torch.Tensor) or whole.shape != hidden.shape:
                    what = f"{len(whole)} values" if isinstance(whole, (tuple, list)) else "another shape"
                    sentence = f"memory.tiled_mlp: {name} returns {what} where tiles need hidden states."
                    raise ModelError(sentence, _LEAVE_OUT)
                error = _relative_error(tiled(block.forward, hidden, (), 3), whole)
            allowed = _TOLERANCE.get(whole.dtype, 3e-2)
            if not error <= allowed:
                raise ModelError(
                    f"memory.tiled_mlp: {name} answers otherwise when it is asked tile by tile (relative error {error:.1e}).",
                    _LEAVE_OUT,
                )
            # The same products in the same order: what is left out may not show.
            return _spares_last(block, hidden, allowed / 30)
    except (TypeError, RuntimeError, AttributeError, LookupError, ValueError) as problem:
        sentence = f"memory.tiled_mlp: {name} cannot be asked for some tokens alone: {problem}"
        raise ModelError(sentence, _LEAVE_OUT) from problem


def _spares_last(block: Any, hidden: torch.Tensor, allowed: float) -> bool:
    """Whether every gradient is the same when the last linear layer is not computed again."""
    last, weights = _last_linear(block), [p for p in block.parameters() if p.requires_grad]
    found = []
    for spared in (None, last):
        x = hidden.clone().requires_grad_()
        out = tiled(block.forward, x, weights, 4, random=False, last=spared)
        slope = torch.linspace(-1, 1, out.numel()).to(out).view_as(out)
        found.append(torch.autograd.grad(out, (x, *weights), slope, allow_unused=True))
    pairs = [(ours, theirs) for theirs, ours in zip(*found, strict=True) if theirs is not None or ours is not None]
    return last is not None and all(
        ours is not None and theirs is not None and _relative_error(ours, theirs) <= allowed for ours, theirs in pairs
    )


def _relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    dtype = torch.promote_types(ours.dtype, torch.float32)
    return float((ours - theirs).to(dtype).norm() / theirs.to(dtype).norm().clamp(min=1e-12))
