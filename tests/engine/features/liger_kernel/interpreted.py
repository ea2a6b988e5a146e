"""Models of each family by the real package against their classes, printed a line each; `python -m` this, with the families.

In Triton's interpreter (TRITON_INTERPRET=1) two things that Liger asks of Triton are put in its place: numbers that a
kernel gets as Python has them become tensors, as a compiled kernel has them, and functions of CUDA's own library are
Triton's.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from engine.features.liger_kernel import apply as liger
from engine.kernels.device import interpreted
from engine.rules import read
from tests.engine.features.conftest import built_of
from tests.engine.features.families import batches, made

ON = read({"kernels": {"use_liger_kernel": True}, "memory": {"gradient_checkpointing": False}}).config


def ready_the_interpreter() -> None:
    """Puts what the interpreter lacks into this process."""
    import liger_kernel.ops.geglu
    import liger_kernel.ops.rms_norm
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    plain: Any = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(numpy.array([value], numpy.float32), tl.float32), tl.float32)
        return plain(value)

    interpreter._implicit_cvt = converted
    liger_kernel.ops.rms_norm.rsqrt = lambda x: 1 / tl.sqrt(x)
    liger_kernel.ops.geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1


def step(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and the gradients of all weights."""
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative error."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12))


def compare(family: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What Liger computed of a family's model, and how far logits and the worst gradient are from its classes'; and, once
    it is taken back, how far the worst of both is from before."""
    model = made(family).to(device, dtype)
    ids = batches(1, 2, 12, device)[0]
    logits, gradients = step(model, ids)
    found, undo = liger.use(ON, built_of(type("Trainer", (), {"model": model})()))
    mine, own = step(model, ids)
    undo()
    again = step(model, ids)
    same = max(difference(again[0], logits), *(difference(again[1][name], x) for name, x in gradients.items()))
    return {
        "family": family, "taken": dict(found.taken), "left": found.left, "logits": difference(mine, logits),
        "gradients": max(difference(own[name], x) for name, x in gradients.items()), "again": same,
    }  # fmt: skip


if __name__ == "__main__":
    if interpreted():
        ready_the_interpreter()
    for family in sys.argv[1:]:
        print(json.dumps(compare(family)), flush=True)
