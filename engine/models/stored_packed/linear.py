"""A linear layer whose weight stays packed, and what data-parallel training leaves of such weights to each process."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from engine.kernels.experts.packed import Form, Held, PackedExperts, matrix_unpacked, matrix_unpacked_op
from engine.models.expert_shards import share_of
from engine.models.stored_fp8 import Fp8Linear
from engine.models.stored_packed.formats import Parts, weight_of


class PackedLinear(torch.nn.Linear):
    """A frozen linear layer whose weight stays packed: `x @ unpacked(weight).T + bias`.

    `weight` is its bytes, [rows, ...] uint8; gradients reach x alone. `compute_dtype` tells PEFT the format of an adapter
    beside it. Casts of the module leave scales and zero points as they are: they would change the numbers.
    """

    form: Form
    weight_scale: torch.Tensor
    weight_zero: torch.Tensor | None
    weight_of_column: torch.Tensor | None
    weight_middle: torch.Tensor | None

    def __init__(self, layer: torch.nn.Linear) -> None:
        """The layer without its weight, which `fill` gives it."""
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.compute_dtype = layer.weight.dtype
        self.register_parameter("weight", None)
        self.bias = layer.bias
        self.train(layer.training)

    def fill(self, parts: Parts) -> None:
        """Takes its weight."""
        packed = weight_of([parts], (self.out_features, self.in_features), self.compute_dtype)
        self.form, held = packed.form, packed.held
        self.weight = torch.nn.Parameter(held.numbers.view(self.out_features, -1), requires_grad=False)
        self._note_form()
        self.register_buffer("weight_scale", held.scales)
        self.register_buffer("weight_zero", held.zeros)
        self.register_buffer("weight_of_column", held.of_column)
        self.register_buffer("weight_middle", held.middle)

    def _note_form(self) -> None:
        """On the weight itself, where what counts weights reads it."""
        weight: Any = self.weight
        weight.form = self.form

    def _held(self) -> tuple[torch.Tensor | None, ...]:
        return self.weight, self.weight_scale, self.weight_middle, self.weight_zero, self.weight_of_column

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """What its weight stands for, made anew for whoever asks."""
        return dequantized_weight(self._held(), self.form, dtype)

    @property
    def packed_bytes(self) -> int:
        """Bytes that its weight takes."""
        return sum(each.numel() * each.element_size() for each in (self.weight, *self.buffers()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            form = self.form
            packing = form.kind, form.rows, form.columns, form.block, form.scale_block
            out = _in_graph(input, *packing, *self._held())
        else:
            out = _Product.apply(input, self.form, *self._held())
        return out if self.bias is None else out + self.bias

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        kinds = {}
        for name, value in list(self._buffers.items()):
            if value is not None and value.is_floating_point():
                kinds[name] = value.dtype
                self._buffers[name] = value.view({2: torch.int16, 4: torch.int32}[value.element_size()])
        super()._apply(fn, recurse)
        for name, dtype in kinds.items():
            value = self._buffers[name]
            assert value is not None
            self._buffers[name] = value.view(dtype)
        if self.weight is not None:
            self._note_form()
        return self


def ignore_in_ddp(model: torch.nn.Module) -> None:
    """Has data-parallel training not send FP8 weights, packed layers and packed experts to the other processes at its start:
    some it cannot, and each process has read the same files; nor experts that are this process's alone, whose gradients it must
    not average either. Marks the instance that will be wrapped, where it has such weights."""
    names = [f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Fp8Linear)]
    for path, layer in model.named_modules():
        if isinstance(layer, PackedLinear):
            names += [f"{path}.weight", *(f"{path}.{name}" for name, _ in layer.named_buffers())]
    names += [
        name
        for name, weight in model.named_parameters()
        if isinstance(weight, PackedExperts) or share_of(weight) is not None
    ]
    if names:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


class _Product(torch.autograd.Function):
    """Keeps the packed numbers for the backward pass, not the wide ones, which are made again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, form: Form, *held: torch.Tensor | None) -> torch.Tensor:
        ctx.form = form
        ctx.save_for_backward(*held)
        return torch.nn.functional.linear(x, dequantized_weight(held, form, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return gradient @ dequantized_weight(ctx.saved_tensors, ctx.form, gradient.dtype), *(None,) * 6


class _Traced(torch.autograd.Function):
    """The same for code that is being compiled, where unpacking is a node of its own, forward and again in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packing: tuple[str, int, int, int, int], *held: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.packing = packing
        ctx.save_for_backward(*held)
        return torch.nn.functional.linear(x, matrix_unpacked_op(*held, *packing, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        wide = matrix_unpacked_op(*ctx.saved_tensors, *ctx.packing, gradient.dtype, gradient)
        return gradient @ wide, *(None,) * 6


@torch.compiler.allow_in_graph
def _in_graph(
    x: torch.Tensor, kind: str, rows: int, columns: int, block: int, scale_block: int, *held: torch.Tensor | None
) -> torch.Tensor:
    """One node for the first half of the compiler, so that a checkpoint around it reaches its operations with torch 2.11 too."""
    out: torch.Tensor = _Traced.apply(x, (kind, rows, columns, block, scale_block), *held)
    return out


def dequantized_weight(held: tuple[torch.Tensor | None, ...], form: Form, dtype: torch.dtype) -> torch.Tensor:
    numbers, scales, middle, zeros, of_column = held
    assert numbers is not None
    assert scales is not None
    return matrix_unpacked(
        Held(numbers.detach().view(1, -1), scales, middle, zeros=zeros, of_column=of_column), form._replace(dtype=dtype)
    )
