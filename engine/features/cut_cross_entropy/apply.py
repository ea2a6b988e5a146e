"""`kernels.use_cut_ce`: TRL's fused head with our op in it, so that every method with a vocabulary takes it.

TRL gives the model a `forward` that answers `model(..., fused_lm_head=True)` with per-token log-probabilities. The instance
gets one of ours with the same call contract (`engine.compat.trl_head`), in which the op is `linear_logp`. Refuses heads
that are not one plain matrix (quantized, or with an adapter of their own).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from engine import figures
from engine.compat.instances import all_of, put
from engine.compat.trl_head import FusedForward, HeadSettings, TokenFields, head_settings
from engine.config.tree import RunConfig, fields
from engine.errors import ModelError
from engine.features import cut_cross_entropy
from engine.features.applied import Applied, left_out
from engine.features.built import Built, base_model
from engine.kernels.device import lacking
from engine.kernels.linear_logp import LinearLogp, workspace

FEATURE = "cut cross-entropy"


@dataclass(frozen=True)
class CutCrossEntropy:
    """The op under the head: fields of N tokens from hidden [N, H], weight [V, H] and labels [N], without the logits.

    With smoothing or z-loss, `log_probs` are what the loss is the negative sum of: the negative cross-entropies with both.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    workspace_bytes: int | None = None

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        head: HeadSettings,
    ) -> TokenFields:
        added = self.label_smoothing or self.z_loss
        outputs = (*head.outputs, "cross_entropy") if added else head.outputs
        found = LinearLogp.apply(
            hidden, weight, bias, labels, head.temperature, workspace(hidden.device, self.workspace_bytes), head.soft_cap,
            head.logit_scale, outputs, self.label_smoothing, self.z_loss, torch.is_grad_enabled(),
        )  # fmt: skip
        fields = TokenFields(*found[: len(TokenFields._fields)])
        return fields._replace(log_probs=-found[-1]) if added else fields

    def describe(self) -> str:
        """What it adds to the loss, in words; empty where that is nothing."""
        words = {"label smoothing": self.label_smoothing, "z-loss": self.z_loss}
        return "".join(f"; {name} {value:g} in the loss" for name, value in words.items() if value)


def apply(config: RunConfig, built: Built) -> Applied | None:
    """Replaces the op in every fused head of the trainer's models; None where it was neither asked for nor left to be chosen."""
    auto = built.notes.reasons.get(fields.kernels.use_cut_ce.path)
    if config.kernels.use_cut_ce is not True:
        return left_out(FEATURE, auto)
    heads = fused_heads(built)
    if not heads:
        return Applied(
            FEATURE, True, "no head", None, "this method has no vocabulary head: there are no logits to save"
        )
    added = {spec.name: spec.value(config) for spec in cut_cross_entropy.beside_it(config)}
    if auto is not None and not added and (reason := _not_of_use(heads)) is not None:
        return Applied(FEATURE, "auto", "off", None, f"the trainer's own blocks: {reason}")
    for model in heads:
        if (reason := refusal(model.get_output_embeddings())) is not None:
            way = f"leave {' and '.join(added)} out" if added else "set it to auto or false"
            raise ModelError(f"kernels.use_cut_ce: {reason}.", f"{way.capitalize()}: TRL's own head serves it.")
    op = CutCrossEntropy(**added, workspace_bytes=cut_cross_entropy.room_of(config))
    undo = all_of([put(model, "forward", fused_forward(model, op)) for model in heads])
    matrix = heads[0].get_output_embeddings()
    requested, words = (True, "") if auto is None else ("auto", f"; {auto}")
    held = built.notes.reasons.get(fields.kernels.cut_ce_workspace.path)
    words += f"; {held}" if held is not None else ""
    detail = describe(matrix, op.workspace_bytes) + op.describe() + words
    return Applied(FEATURE, requested, effective(matrix.weight), len(heads), detail, undo)


def _not_of_use(heads: list[PreTrainedModel]) -> str | None:
    """Why it is left out where nobody asked for it, or None: a head that it does not serve, a kernel that cannot run."""
    for model in heads:
        matrix = model.get_output_embeddings()
        if (reason := refusal(matrix)) is not None:
            return reason
        if (missing := lacking(matrix.weight.device)) is not None:
            return f"the kernel needs {missing}"
    return None


def fused_heads(built: Built) -> list[PreTrainedModel]:
    """Every model with TRL's fused head among the trainer's models: the policy's base and a reference copy."""
    bases = (base_model(model) for model in built.models())
    return [model for model in bases if head_settings(model) is not None]


def fused_forward(model: PreTrainedModel, op: CutCrossEntropy) -> FusedForward:
    """The forward of a model with a fused head, with our op in it."""
    settings = head_settings(model)
    assert settings is not None
    return FusedForward(model, settings, op)


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


def describe(head: Any, workspace_bytes: int | None = None) -> str:
    """Which plan the op takes for this head, in words."""
    vocabulary, hidden = head.weight.shape
    room = figures.size(workspace(head.weight.device, workspace_bytes))
    plan = (
        "trained head: slices of the vocabulary, logits computed again in the backward pass where they do not fit"
        if head.weight.requires_grad
        else "frozen head: gradient formed in the forward pass, two products"
    )
    return f"vocabulary {vocabulary:,}, hidden {hidden:,}; {plan}; at most {room} of logits at once"
