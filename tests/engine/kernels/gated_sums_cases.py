"""What every device is asked of the gated activation of sums: error ratios, sums that come in, results over what was read, tiles."""

from __future__ import annotations

import torch

from engine.kernels.gated import ACTIVATIONS
from engine.kernels.gated_sums import (
    FORWARD,
    GATED_SUMS,
    GRADIENTS,
    GRADIENTS_IN_PLACE,
    gated_sums,
    gated_sums_reference,
)
from engine.kernels.gated_sums.reference import gated_sums_gradients_reference
from engine.kernels.tuner import TUNER
from tests.engine.kernels.judging import DEVICE, DTYPES, INTERPRETED, combined, compare, judge, other_format, rms, said


def drawn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=DEVICE).to(dtype)


def gated_sums_cases() -> None:
    """Outputs and gradients, of all factors too; ranks that fill no tile, one sum without a product, a layer behind or none."""
    shapes = [(2, 3, 40), (5, 300)] if INTERPRETED else [(2, 3, 40), (5, 1030), (4, 513, 3072), (1000, 12_288)]
    for shape, dtype, activation, (one, other, last) in combined(
        shapes, DTYPES, ACTIVATIONS, ((3, 16, 0), (24, 0, 5), (16, 16, 16)), together=1 if other_format() else 2
    ):
        lead, width = shape[:-1], shape[-1]
        # As a group's products are: parts of one result, apart in memory.
        both = drawn(*lead, one + other, dtype=dtype).mul_(0.3).requires_grad_()
        outers = [drawn(width, rank, dtype=dtype).requires_grad_() for rank in (one, other) if rank]
        behind = [
            drawn(*shape, dtype=dtype).mul_(width**-0.5).requires_grad_()
            for shape in ((last, width), (7, last))
            if last
        ]
        pair = [drawn(*shape, dtype=dtype).requires_grad_() for _ in range(2)]

        def call(f, x, y, inner, *more, a=activation, ranks=(one, other), last=last):
            outers, down = (more[:-2], more[-2:]) if last else (more, None)
            thin = [(part, outer) for part, outer in zip(inner.split(ranks, -1), outers, strict=False)]
            return f(x, thin[0], y, thin[1] if len(thin) > 1 else None, a, down)

        def theirs(x, x_thin, y, y_thin, a, down):
            out = gated_sums_reference(x, x_thin, y, y_thin, a)
            return out, None if down is None else out @ down[0].t() @ down[1].t()

        name = f"gated_sums {dtype} {shape} {activation} ranks {one}, {other}, {last}"

        def told(f, call=call, last=last):
            return lambda *given: call(f, *given) if last else call(f, *given)[0]

        compare(name, told(gated_sums), told(theirs), [*pair, both, *outers, *behind], 2 if last else 1)


def gated_sums_again() -> None:
    """A gradient that is a sum, the product beside the gradients, in memory of its own and over what was read."""
    for activation, thin in combined(ACTIVATIONS, (True, False)):
        grad, gate, up = (drawn(4, 37) for _ in range(3))
        low, right = (drawn(4, 5), drawn(5, 37)) if thin else (None, None)
        sums = gate, drawn(4, 7), drawn(37, 7), up, None, None
        fresh = GRADIENTS(grad, low, right, *sums, activation)
        arguments = (grad, (low, right.t()) if thin else None, gate, sums[1:3], up, None)
        wide = [tuple(x.double() for x in each) if isinstance(each, tuple) else None if each is None else each.double()
                for each in arguments]  # fmt: skip
        truth = gated_sums_gradients_reference(*wide, activation)
        eager = gated_sums_gradients_reference(*arguments, activation)
        for what, a, b, c in zip(("dgate", "dup", "product", "inwards"), truth, eager, fresh, strict=True):
            if what == "product" and not thin:
                said(c.numel() == 0, f"gated_sums without the product {activation}")
            else:
                judge(f"gated_sums again {activation} {thin} {what}", a, b, c, torch.bfloat16)
        spent = [x.clone() for x in (grad, gate, up)]
        inwards = GRADIENTS_IN_PLACE(spent[0], low, right, spent[1], *sums[1:3], spent[2], None, None, activation)
        found = (*spent[1:], spent[0], inwards) if thin else (*spent[1:], fresh[2], inwards)
        said(all(map(torch.equal, found, fresh)), f"gated_sums in place {activation} {thin}")
        said(thin or torch.equal(spent[0], grad), f"gated_sums leave a gradient as it is {activation} {thin}")


def gated_sums_tiles() -> None:
    """Every tile gives the same sums, and one that is timed spoils nothing."""
    grad, gate, up = (drawn(70, 700) for _ in range(3))
    thin, down = (drawn(70, 8), drawn(700, 8)), (drawn(8, 700), drawn(5, 8))
    taken = []

    class Nowhere:
        def find(self, name):
            return None

        def keep(self, name, entry):
            return None

    def run():
        spent = [x.clone() for x in (grad, gate, up)]
        inwards = GRADIENTS_IN_PLACE(spent[0], thin[0], down[0], spent[1], *thin, spent[2], *thin, "silu")
        return *GATED_SUMS(gate, *thin, up, *thin, *down, "silu"), *spent, inwards

    wanted = run()
    for place in range(len(FORWARD.candidates)):

        def timed(runs, place=place):
            runs[min(place, len(runs) - 1)]()
            return [0.0 if each == place else 1.0 for each in range(len(runs))]

        TUNER.start(timed, lambda device: Nowhere())
        try:
            found = run()
            taken += [each.tile for each in TUNER.picked]
        finally:
            TUNER.stop()
        # Sums over columns begin elsewhere with other tiles: a step of bfloat16 here and there.
        apart = max(rms(a.float() - b.float()) / rms(b.float()) for a, b in zip(found, wanted, strict=True))
        said(apart <= 2e-3, f"gated_sums in tile {place}", f"{apart:.1e} apart")
    said(len(set(taken)) > 1, "gated_sums: tiles are asked for")


def gated_sums_registered() -> None:
    """torch's checks of the operations that compiled code calls."""
    pair = [torch.randn(2, 3, 20, device=DEVICE).requires_grad_() for _ in range(2)]
    shapes = (2, 3, 4), (20, 4), (5, 20), (7, 5)
    inner, outer, right, last = (torch.randn(*shape, device=DEVICE).requires_grad_() for shape in shapes)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for down in ((right, last), (None, None)):
        torch.library.opcheck(
            GATED_SUMS, (pair[0], inner, outer, pair[1], None, None, *down, "silu"), test_utils=checks
        )
    grad, gate, up, inner, outer, right = (x.detach() for x in (pair[0], *pair, inner, outer, right))
    low = torch.randn(6, 5, device=DEVICE)
    for thin in ((low, right), (None, None)):
        given = grad.clone(), *thin, gate, inner, outer, up, None, None, "gelu"
        torch.library.opcheck(GRADIENTS, given, test_utils=("test_schema", "test_faketensor"))
        torch.library.opcheck(GRADIENTS_IN_PLACE, given, test_utils=("test_faketensor",))
    print("ok   gated_sums registered: schema, autograd, fake form")
