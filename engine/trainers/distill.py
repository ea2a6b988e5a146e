"""Distillation from stored top-k log-probabilities (arXiv:1503.02531): cross-entropy and KL in one pass of the head.

TRL's SFTTrainer with our loss. The model's full log-probability of a teacher's token is that of the row's own token, which
the fused head gives, plus the difference of their two logits: so k logits a token are formed, and never all of them. The
teacher's k probabilities are scaled to a sum of one; the model's are those over its whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from trl import SFTTrainer

from engine.compat.trl_head import HeadSettings, head_settings
from engine.config import distill
from engine.config.tree import method_of
from engine.features.built import base_model
from engine.kernels.linear_logp import linear_logp
from engine.trainers.job import Job
from engine.trainers.run_trainer import RunTrainer
from engine.trainers.sft import arguments

__all__ = ["Distill", "arguments", "build"]

ROOM = 64 << 20
"""The gathered rows of the head, [rows, K, H], stay within so many bytes forward and backward."""


class Distill(RunTrainer, SFTTrainer):
    """SFT's trainer with the teacher in its loss."""

    method: distill.Distill
    head: HeadSettings
    loss_by = "ours, on SFTTrainer"
    sums_tokens = True

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        ids = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with self._hidden_states() as seen:
            outputs = model(**ids, labels=inputs["labels"], use_cache=False, fused_lm_head=True)
        mask = outputs.label_mask
        kl = self._divergence(seen[0][:, :-1][mask], outputs.log_probs[mask], inputs, mask)
        nll = -outputs.log_probs.sum()
        weight = self.method.kd_alpha * self.method.kd_temperature**2
        count = mask.sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        loss = (weight * kl.sum() + self.method.kd_ce_alpha * nll) / count.clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        if self.aux_loss_enabled:
            steps = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / steps
        self._note(model, outputs, kl, nll, inputs)
        return loss

    def _divergence(
        self, hidden_NH: torch.Tensor, own_N: torch.Tensor, inputs: dict[str, Any], mask: torch.Tensor
    ) -> torch.Tensor:
        """KL of teacher to model for each learned token, [N]; `own_N` is the log-probability of the row's own token."""
        base = base_model(self.model)
        head, scores = base.get_output_embeddings(), self.head
        temperature = self.method.kd_temperature
        labels_N = inputs["labels"][:, 1:][mask]
        tokens_NK, teacher_NK = (inputs[name][:, 1:][mask] for name in ("teacher_tokens", "teacher_logps"))
        if temperature != 1:
            own_N = linear_logp(
                hidden_NH, head.weight, labels_N, bias=head.bias, temperature=temperature, outputs=(),
                logit_scale=scores.logit_scale, soft_cap=scores.soft_cap,
            ).log_probs  # fmt: skip
        logits = some_logits(hidden_NH, head.weight, torch.cat([labels_N[:, None], tokens_NK], 1), head.bias)
        logits = logits * scores.logit_scale
        if (cap := scores.soft_cap) is not None:
            logits = cap * torch.tanh(logits / cap)
        logits = logits / temperature
        model_NK = own_N[:, None] + logits[:, 1:] - logits[:, :1]
        teacher_NK = (teacher_NK.to(model_NK.dtype) / temperature).log_softmax(-1)
        return (teacher_NK.exp() * (teacher_NK - model_NK)).sum(-1)

    @contextmanager
    def _hidden_states(self) -> Iterator[list[torch.Tensor]]:
        """What the head is given, as the model runs inside: [B, L, H]."""
        seen: list[torch.Tensor] = []
        handle = base_model(self.model).base_model.register_forward_hook(
            lambda module, given, output: seen.append(output.last_hidden_state)
        )
        try:
            yield seen
        finally:
            handle.remove()

    @torch.no_grad()
    def _note(
        self, model: torch.nn.Module, outputs: Any, kl: torch.Tensor, nll: torch.Tensor, inputs: dict[str, Any]
    ) -> None:
        sums = [kl.sum(), nll, outputs.entropy.sum(), outputs.is_top1.sum(), outputs.label_mask.sum()]
        sums.append(inputs["attention_mask"].sum())
        own = torch.stack([each.double() for each in sums]) * (not self.batch_part.fills_in)
        found = self.accelerator.reduce(own).tolist()
        mode, tokens = "train" if model.training else "eval", max(found[4], 1.0)
        for name, value in zip(("kl", "nll_loss", "entropy", "mean_token_accuracy"), found[:4], strict=True):
            self._metrics[mode][name].append(value / tokens)
        if mode == "train":
            self._total_train_tokens += int(found[5])
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]

    def receipt_note(self) -> str:
        """What the receipt adds about the loss."""
        return f"{self.method.kd_alpha:g} x KL from the teacher, {self.method.kd_ce_alpha:g} x cross-entropy"


def build(job: Job) -> Distill:
    """The trainer, ready to `attach`."""
    trainer = Distill(args=arguments(job.config, job.run_folder), **job.trainer_arguments())
    trainer.method = method_of(job.config, distill.Distill)
    # Before accelerate puts its own forward around the model's.
    head = head_settings(base_model(trainer.model))
    assert head is not None, "TRL's SFTTrainer gives its model a fused head"
    trainer.head = head
    return trainer


def some_logits(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, ids_NK: torch.Tensor, bias_V: torch.Tensor | None = None
) -> torch.Tensor:
    """[N, K] logits of `ids_NK`: `(hidden @ weight.T + bias).gather(1, ids)` without the others.

    Float32, or float64 for float64 input; differentiable in hidden, weight and bias.
    """
    logits: torch.Tensor = _SomeLogits.apply(hidden_NH, weight_VH, ids_NK)
    return logits if bias_V is None else logits + bias_V.to(logits.dtype)[ids_NK]


class _SomeLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden_NH, weight_VH, ids_NK)
        ctx.dtype = torch.float64 if weight_VH.dtype == torch.float64 else torch.float32
        logits = torch.empty(ids_NK.shape, dtype=ctx.dtype, device=hidden_NH.device)
        for part in _chunks(ids_NK, weight_VH):
            rows = weight_VH[ids_NK[part]].to(ctx.dtype)
            logits[part] = torch.einsum("nkh,nh->nk", rows, hidden_NH[part].to(ctx.dtype))
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (d_NK,) = gradients
        hidden_NH, weight_VH, ids_NK = ctx.saved_tensors
        need_hidden, need_weight, _ = ctx.needs_input_grad
        d_hidden = torch.empty(hidden_NH.shape, dtype=ctx.dtype, device=d_NK.device) if need_hidden else None
        d_weight = torch.zeros(weight_VH.shape, dtype=ctx.dtype, device=d_NK.device) if need_weight else None
        for part in _chunks(ids_NK, weight_VH):
            if d_hidden is not None:
                d_hidden[part] = torch.einsum("nk,nkh->nh", d_NK[part], weight_VH[ids_NK[part]].to(ctx.dtype))
            if d_weight is not None:
                outer = d_NK[part][..., None] * hidden_NH[part].to(ctx.dtype)[:, None]
                d_weight.index_add_(0, ids_NK[part].flatten(), outer.flatten(0, 1))
        return (
            None if d_hidden is None else d_hidden.to(hidden_NH.dtype),
            None if d_weight is None else d_weight.to(weight_VH.dtype),
            None,
        )


def _chunks(ids_NK: torch.Tensor, weight_VH: torch.Tensor) -> Iterator[slice]:
    size = max(1, ROOM // max(1, ids_NK.shape[1] * weight_VH.shape[1] * 8))
    yield from (slice(first, first + size) for first in range(0, ids_NK.shape[0], size))
