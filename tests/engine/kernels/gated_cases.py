"""What every device is asked of the gated activation: error ratios, halves of one tensor, results over what was read."""

from __future__ import annotations

import torch

from engine.kernels.gated import ACTIVATIONS, gated, gated_gradients, gated_reference
from engine.kernels.tuner import TUNER
from tests.engine.kernels.judging import DEVICE, DTYPES, INTERPRETED, combined, compare, judge, said


def gated_cases() -> None:
    """Outputs and gradients, on tensors of their own and on halves of one projection's result."""
    shapes = [(2, 3, 40), (5, 1030)] if INTERPRETED else [(2, 3, 40), (5, 1030), (4, 513, 3072), (1000, 12_288)]
    for shape, dtype, activation, halves in combined(shapes, DTYPES, ACTIVATIONS, (False, True)):
        name = f"gated {dtype} {shape} {activation}{' halves' if halves else ''}"
        if halves:
            both = (2 * torch.randn(*shape[:-1], 2 * shape[-1], device=DEVICE)).to(dtype).requires_grad_()
            ours, theirs = (
                lambda x, f=f, a=activation: f(*x.chunk(2, dim=-1), a) for f in (gated, gated_reference)
            )  # fmt: skip
            compare(name, ours, theirs, [both], 1)
        else:
            pair = [(2 * torch.randn(shape, device=DEVICE)).to(dtype).requires_grad_() for _ in range(2)]
            ours, theirs = (lambda x, y, f=f, a=activation: f(x, y, a) for f in (gated, gated_reference))
            compare(name, ours, theirs, pair, 1)


def gated_again() -> None:
    """The product beside the gradients, in memory of its own and over what was read, which is the same to the bit."""
    for activation, lies in combined(ACTIVATIONS, ("rows", "halves", "columns")):
        grad, gate, up = (torch.randn(4, 37, device=DEVICE).bfloat16() for _ in range(3))
        if lies == "halves":
            gate, up = torch.cat((gate, up), -1).chunk(2, -1)
        elif lies == "columns":
            gate, up = gate.t().contiguous().t(), up[:, :1].expand(4, 37).clone()
        fresh = gated_gradients(grad, gate, up, activation, with_product=True)
        wide = [x.double().requires_grad_() for x in (gate, up)]
        product = gated_reference(*wide, activation)
        truth = (*torch.autograd.grad(product, wide, grad.double()), product)
        plain = [x.clone().requires_grad_() for x in (gate, up)]
        out = gated_reference(*plain, activation)
        eager = (*torch.autograd.grad(out, plain, grad), out)
        for what, a, b, c in zip(("dgate", "dup", "product"), truth, eager, fresh, strict=True):
            judge(f"gated again {activation} {lies} {what}", a, b, c, torch.bfloat16)
        no_product = gated_gradients(grad, gate, up, activation)
        said(no_product[2] is None and torch.equal(no_product[0], fresh[0]), f"gated without the product {activation}")
        spent = gated_gradients(grad, gate, up, activation, with_product=True, in_place=True)
        same = all(map(torch.equal, spent, fresh)) and [x.data_ptr() for x in spent] == [
            x.data_ptr() for x in (gate, up, grad)
        ]
        said(same, f"gated in place {activation} {lies}")


def gated_tiles() -> None:
    """Every tile gives the same numbers, and one that is timed spoils nothing."""
    grad, gate, up = (torch.randn(3, 700, device=DEVICE) for _ in range(3))
    truth, wanted = gated(gate, up), gated_gradients(grad, gate, up, with_product=True)

    def timed(runs):
        for run in runs:
            run()
        return [float(len(runs) - i) for i in range(len(runs))]  # the last one is taken

    class Nowhere:
        def find(self, name):
            return None

        def keep(self, name, entry):
            return None

    TUNER.start(timed, lambda device: Nowhere())
    try:
        again = gated(gate, up)
        over = gated_gradients(grad.clone(), gate.clone(), up.clone(), with_product=True, in_place=True)
        picked = {each.tiles.kernel for each in TUNER.picked if each.tile != each.tiles.default}
    finally:
        TUNER.stop()
    said(torch.equal(again, truth) and all(map(torch.equal, over, wanted)), "gated in other tiles")
    said(picked == {"gated_fwd", "gated_bwd"}, "gated: tiles are asked for")


def gated_registered() -> None:
    """The operation that compiled code calls: numbers of the eager form, and torch's checks of its fake form."""
    from engine.kernels.gated import _gated_backward_op, _gated_op

    gate, up = (torch.randn(2, 3, 20, device=DEVICE).requires_grad_() for _ in range(2))
    found = []
    for op in (_gated_op, gated):
        out = op(gate, up, "gelu_tanh")
        found.append((out, *torch.autograd.grad(out.square().sum(), (gate, up))))
    said(all(map(torch.equal, *found)), "gated registered")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_gated_op, (gate, up, "silu"), test_utils=checks)
    frozen = [x.detach() for x in (found[0][0], gate, up)]
    torch.library.opcheck(_gated_backward_op, (*frozen, "silu"), test_utils=("test_schema", "test_faketensor"))
    print("ok   gated registered: schema, autograd, fake form")
