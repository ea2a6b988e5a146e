"""`kernels.use_cut_ce`: TRL's fused head with our op in it, so that every method with a vocabulary takes it.

TRL gives the model a `forward` that answers `model(..., fused_lm_head=True)` with per-token log-probabilities. That
contract (shifted labels, mixture-of-experts loss, output class) stays TRL's: the instance gets a `forward` of the same
code, in whose own namespace the op is `linear_logp`. TRL's module is untouched. Refuses heads that are not one plain
matrix (quantized, or with an adapter of their own).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from engine.errors import ModelError
from engine.kernels.device import lacking
from engine.kernels.linear_logp import LinearLogp, workspace
from engine.patches.plan import Applied

FEATURE = "cut cross-entropy"
# The names in TRL's forward that are replaced; a test fails by name when an upgrade changes them.
OP, COMPACT = "_ChunkedLogProbFunction", "_use_triton"
_FIELDS = 5  # what TRL unpacks: log-probabilities to is_top1


class _Op:
    """Stands where TRL's autograd function stands: same arguments, `chunk_size` replaced by a workspace in bytes."""

    @staticmethod
    def apply(hidden: torch.Tensor, weight: torch.Tensor, bias: Any, targets: torch.Tensor, *rest: Any) -> Any:
        temperature, _chunk_size, soft_cap, logit_scale, outputs = rest
        room = workspace(hidden.device)
        found = LinearLogp.apply(
            hidden, weight, bias, targets, temperature, room, soft_cap, logit_scale, outputs, 0.0, 0.0,
            torch.is_grad_enabled(),
        )  # fmt: skip
        return found[:_FIELDS]


def cut_cross_entropy(config: Any, trainer: Any) -> Applied | None:
    """Replaces the op in every fused head of the trainer's models; None where it was not asked for."""
    if config.kernels.use_cut_ce is not True:
        return None
    heads: list[Any] = list(fused_heads(trainer))
    if not heads:
        return Applied(
            FEATURE, True, "no head", None, "this method has no vocabulary head: there are no logits to save"
        )
    before = [(model, model.forward) for model in heads]
    words = ""
    for model in heads:
        head = model.get_output_embeddings()
        if (reason := refusal(head)) is not None:
            raise ModelError(f"kernels.use_cut_ce: {reason}.", "Set it to auto or false: TRL's own head serves it.")
        words = words or describe(head)
    for model in heads:
        model.forward = with_our_op(model.forward)

    def undo() -> None:
        for model, forward in before:
            model.forward = forward

    return Applied(FEATURE, True, effective(heads[0].get_output_embeddings().weight), len(heads), words, undo)


def fused_heads(trainer: Any) -> Iterator[torch.nn.Module]:
    """Every module with TRL's fused head among the trainer's models: the policy's base and a reference copy."""
    seen: set[int] = set()
    for value in list(vars(trainer).values()):
        for module in value.modules() if isinstance(value, torch.nn.Module) else ():
            forward = vars(module).get("forward")
            code = getattr(getattr(forward, "__func__", None), "__code__", None)
            if code is not None and OP in code.co_names and id(module) not in seen:
                seen.add(id(module))
                yield module


def with_our_op(forward: types.MethodType) -> types.MethodType:
    """TRL's forward with our op in its namespace, and rows without a label left out on every device."""
    return with_op(forward, _Op)


def with_op(forward: types.MethodType, op: Any) -> types.MethodType:
    """The same with any op that has TRL's arguments."""
    theirs: Any = forward.__func__
    namespace = {**theirs.__globals__, OP: op, COMPACT: lambda device: True}
    function = types.FunctionType(theirs.__code__, namespace, theirs.__name__, theirs.__defaults__, theirs.__closure__)
    function.__kwdefaults__ = theirs.__kwdefaults__
    # `generate` checks its arguments against the signature, which TRL takes from the model's class.
    return types.MethodType(functools.wraps(theirs.__wrapped__)(function), forward.__self__)


def refusal(head: Any) -> str | None:
    """Why this head is not served, or None."""
    weight = getattr(head, "weight", None)
    if hasattr(head, "lora_A"):
        return "the head has an adapter of its own, which a product with its weight alone would leave out"
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        return f"the head is {type(head).__name__}, not one matrix of floating-point numbers"
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        return f"the head is held in {str(weight.dtype).removeprefix('torch.')}"
    if isinstance(weight, DTensor):
        return "the head is spread over devices, and each product would see its own part alone"
    if weight.is_meta:
        return "the head's weight is not in memory (meta device)"
    bias = getattr(head, "bias", None)
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"the head's bias is {tuple(bias.shape)} for a vocabulary of {weight.shape[0]:,}"
    return None


def effective(weight: torch.Tensor) -> str:
    """What computes the scores under this head, as the receipt tells it."""
    missing = lacking(weight.device)
    if weight.is_cuda and missing is not None:
        return f"torch, in chunks: the kernel needs {missing}"
    if missing is not None:
        return "torch, in chunks"
    return "torch, in chunks: no kernel serves float64" if weight.dtype == torch.float64 else "Triton"


def describe(head: Any) -> str:
    """Which plan the op takes for this head, in words."""
    vocabulary, hidden = head.weight.shape
    room = workspace(head.weight.device) >> 20
    plan = (
        "trained head: slices of the vocabulary, logits computed again in the backward pass where they do not fit"
        if head.weight.requires_grad
        else "frozen head: gradient formed in the forward pass, two products"
    )
    return f"vocabulary {vocabulary:,}, hidden {hidden:,}; {plan}; at most {room} MiB of logits at once"
