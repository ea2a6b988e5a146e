"""Rotary embedding alone against float64: shapes, formats, views, blocks of heads, the registered form, and its transpose."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils.checkpoint import checkpoint

from engine.kernels.rope import rope, rope_reference
from tests.engine.kernels.judging import DEVICE, DTYPES, INTERPRETED, combined, compare, rms, said


def angles_of(batch: int, time: int, rotated: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Halves that differ, which no position gives: a kernel that read one half twice would be found out."""
    angles = torch.randn(batch, time, rotated, device=DEVICE)
    return angles.cos(), angles.sin()


def turning(function, cos, sin, wrap=lambda x: x):
    return lambda q, k: function(wrap(q), wrap(k), cos.to(q.dtype), sin.to(q.dtype))


def rope_cases() -> None:
    shapes = [(2, 2, 4, 2, 16, 16), (1, 3, 3, 1, 24, 8)]
    if not INTERPRETED:
        shapes += [
            (2, 257, 28, 4, 128, 128),
            (1, 300, 12, 2, 128, 128),
            (1, 100, 16, 2, 256, 64),
            (2, 65, 5, 5, 80, 80),
        ]
    for shape, dtype, shared in combined(shapes, DTYPES, (False, True)):
        batch, time, heads_q, heads_k, size, rotated = shape
        q, k = (
            torch.randn(batch, time, heads, size, device=DEVICE).to(dtype).requires_grad_()
            for heads in (heads_q, heads_k)
        )
        angles = [x.to(dtype) for x in angles_of(1 if shared else batch, time, rotated)]
        compare(
            f"rope {dtype} {shape} shared={shared}", turning(rope, *angles), turning(rope_reference, *angles), [q, k], 2
        )


def rope_views() -> None:
    """What is not laid out as a projection gives it: heads before time, every second number, a part of a fused product."""
    angles = angles_of(2, 5, 8)
    for name, shape, wrap in (
        ("heads before time", (2, 3, 5, 16), lambda x: x.transpose(1, 2)),
        ("every second number", (2, 5, 3, 32), lambda x: x[..., ::2]),
        ("a part of a wider product", (2, 5, 7, 16), lambda x: x[:, :, 2:5]),
        ("rows of one", (1, 5, 3, 16), lambda x: x.expand(2, -1, -1, -1)),
    ):
        inputs = [torch.randn(*shape, device=DEVICE).requires_grad_() for _ in range(2)]
        compare(f"rope of {name}", turning(rope, *angles, wrap), turning(rope_reference, *angles, wrap), inputs, 2)
    back = [torch.randn(2, 3, 5, 16, device=DEVICE).transpose(1, 2) for _ in range(2)]
    q, k = (torch.randn(2, 5, 3, 16, device=DEVICE).requires_grad_() for _ in range(2))
    found = [torch.autograd.grad(op(q, k, *angles), (q, k), back) for op in (rope, rope_reference)]
    said(all(rms(a - b) < 1e-6 for a, b in zip(*found, strict=True)), "rope: a gradient that is not contiguous")


def rope_blocks() -> None:
    """Fewer heads a program than there are, and a last program that is not full."""
    import engine.kernels.rope as package

    before, package.TILES = package.TILES, replace(package.TILES, candidates=((2, 1),))
    q, k = (torch.randn(1, 2, heads, 24, device=DEVICE).requires_grad_() for heads in (5, 3))
    angles = angles_of(1, 2, 8)
    compare("rope in blocks of heads", turning(rope, *angles), turning(rope_reference, *angles), [q, k], 2)
    package.TILES = before


def rope_registered() -> None:
    """The registered operation, which compiled layers call, with its gradients; torch checks its fake form."""
    from engine.kernels.rope import _rope_op

    q, k = (torch.randn(1, 2, heads, 16, device=DEVICE).requires_grad_() for heads in (4, 2))
    angles = angles_of(1, 2, 8)
    compare("rope registered", lambda q, k: _rope_op(q, k, *angles, False), turning(rope_reference, *angles), [q, k], 2)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for transposed in (False, True):
        torch.library.opcheck(_rope_op, (q, k, *angles, transposed), test_utils=checks)
    print("ok   rope registered: schema, autograd, fake form")
    whole = torch.compile(lambda q, k: _rope_op(q * 2.0, k, *angles, False), fullgraph=True, backend="aot_eager")
    compare("rope in one graph", whole, lambda q, k: turning(rope_reference, *angles)(q * 2.0, k), [q, k], 2)


def rope_twice() -> None:
    """Computed again under a checkpoint, differentiated again, and one of the two results left unused."""
    q, k = (torch.randn(2, 3, heads, 16, device=DEVICE).requires_grad_() for heads in (4, 2))
    angles = angles_of(2, 3, 16)

    def bent(op, q, k):
        return sum(x.pow(3).sum() for x in op(q * 1.5, k, *angles))

    plain = torch.autograd.grad(bent(rope_reference, q, k), (q, k), create_graph=True)
    for name, value in (
        ("plain", bent(rope, q, k)),
        ("under a checkpoint", checkpoint(bent, rope, q, k, use_reentrant=False)),
    ):
        found = torch.autograd.grad(value, (q, k), create_graph=name == "plain")
        said(all(rms(a - b) < 1e-5 * rms(b) for a, b in zip(found, plain, strict=True)), f"rope {name}")
        if name == "plain":
            again = [torch.autograd.grad(sum(x.sum() for x in each), (q, k)) for each in (found, plain)]
            close = all(rms(a - b) < 1e-5 * rms(b) for a, b in zip(*again, strict=True))
            said(close, "rope: the derivative of its gradient")
    alone = [torch.autograd.grad(op(q, k, *angles)[0].square().sum(), q)[0] for op in (rope, rope_reference)]
    said(rms(alone[0] - alone[1]) < 1e-5, "rope of q alone")
    turned = [x.clone().requires_grad_() for x in angles]
    found = [torch.autograd.grad(op(q, k, *turned)[0].sum(), turned) for op in (rope, rope_reference)]
    said(all(torch.equal(a, b) for a, b in zip(*found, strict=True)), "rope: angles that are trained have a gradient")
