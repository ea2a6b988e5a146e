"""`distributed.expert_parallel_size`: each layer's experts are asked where they are.

What the layer calls gets a `forward` of our own on its instance, around whatever computes experts there: transformers' pass,
PEFT's, or the fused kernels. Gradients of a process's own experts come from the tokens of all processes of its group, so
DistributedDataParallel leaves them alone: they are divided by the number of all processes, as it divides the others, and
added up over those that hold the same experts. The norm of the gradients counts each expert once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.compat.instances import all_of, noted, put
from engine.config.tree import RunConfig
from engine.errors import ModelError
from engine.features.applied import Applied
from engine.features.built import Built, base_model
from engine.features.expert_parallel import SETTING
from engine.features.expert_parallel.dispatch import Span, dispatch, of_known_ids
from engine.features.fused_experts.apply import Block, blocks, is_fused
from engine.kernels.experts.packed import PackedExperts
from engine.models.expert_shards import Group, Share, is_divided, share_of

FEATURE = "expert parallelism"


def apply(config: RunConfig, built: Built) -> Applied | None:
    """Has all experts of the trainer's models take the tokens of their group; None where this process holds all experts."""
    if not is_divided(built.policy):
        return None
    found = [(block, share) for block in blocks(built) if (share := _share(block)) is not None]
    held = {id(weight): weight for module in built.modules() for weight in module.parameters(recurse=False)}
    parts = [weight for weight in held.values() if share_of(weight) is not None]
    waiting = built.training.ranks.waits.span
    compiled = config.kernels.torch_compile is True
    undos = [_dispatch_tokens(block, share, waiting, compiled=compiled) for block, share in found]
    group, ranks = found[0][1].group, found[0][1].group.ranks
    trained = [weight for weight in built.policy.parameters() if weight.requires_grad]
    if all(share_of(weight) is not None for weight in trained):
        raise ModelError(
            f"{SETTING.path}: must be 1 where experts alone are trained; got {group.size}: the processes would have no "
            "gradients to average.",
            "Give other layers an adapter too, in adapter.target_modules.",
        ).mended_by({SETTING.path: 1})
    for weight in trained:
        if share_of(weight) is not None:
            undos.append(noted(weight.register_hook(lambda gradient: gradient / ranks).remove))
    if base_model(built.policy).can_generate():
        undos.append(_sampled_together(base_model(built.policy)))
    undos.append(put(built.training.accelerator, "clip_grad_norm_", _clip(built.training.accelerator, group, waiting)))
    here, layers = (
        sum(part.packed_bytes if isinstance(part, PackedExperts) else part.nbytes for part in parts),
        len(found),
    )
    share = found[0][1]
    detail = f"layers, of whose {share.experts} experts each process holds {share.held}: {here:,} bytes with what is trained "
    detail += f"on them, of {here * group.size:,}; tokens go to them and back by all-to-all"
    if group.copies is not None:
        detail += f" in groups of {group.size}"
    return Applied(FEATURE, config.distributed.expert_parallel_size, group.size, layers, detail, all_of(undos))


def _share(block: Block) -> Share | None:
    return share_of(block.experts.get_parameter("down_proj"))


def _dispatch_tokens(block: Block, share: Share, waiting: Span, *, compiled: bool) -> Callable[[], None]:
    """With `compiled` layers their graphs end before the messages: how many tokens travel is known to the host alone."""
    outermost, group, held = block.outermost, share.group, share.held
    experts = outermost.forward if is_fused(block) else of_known_ids(outermost.forward, held)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return dispatch(
            experts,
            hidden_states,
            top_k_index,
            top_k_weights,
            held=held,
            size=group.size,
            group=group.members,
            waiting=waiting,
        )

    return put(outermost, "forward", torch.compiler.disable(forward) if compiled else forward)


def _sampled_together(model: PreTrainedModel) -> Callable[[], None]:
    """Has all processes sample until the longest answer of them all is done: each pass asks the experts of all."""
    generate: Any = model.generate

    def together(*args: Any, **more: Any) -> Any:
        return generate(*args, **{"synced_gpus": True, **more})

    return put(model, "generate", together)


def _clip(accelerator: Any, group: Group, waiting: Span) -> Callable[..., Tensor]:
    """accelerate's `clip_grad_norm_`, which is called once a step, with the gradients of experts put together before it."""

    def clip_grad_norm_(
        parameters: Iterable[nn.Parameter] | nn.Parameter, max_norm: float, norm_type: int = 2
    ) -> Tensor:
        assert norm_type == 2
        accelerator.unscale_gradients()
        weights = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
        weights = [weight for weight in weights if weight.grad is not None]
        own = [weight.grad for weight in weights if share_of(weight) is not None and weight.grad is not None]
        others = [weight.grad for weight in weights if share_of(weight) is None and weight.grad is not None]
        if group.copies is not None:
            with waiting():
                for gradient in own:
                    dist.all_reduce(gradient, group=group.copies)
        norm = torch.nn.utils.get_total_norm(others).float()
        squares = torch.nn.utils.get_total_norm(own).to(norm).square() if own else torch.zeros_like(norm)
        dist.all_reduce(squares, group=group.members)
        norm = (norm.square() + squares).sqrt()
        torch.nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
        return norm

    return clip_grad_norm_
