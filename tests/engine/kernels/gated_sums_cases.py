"""What every device is asked of the gated activation of sums: error ratios, sums that come in, results over what was read, tiles."""

from __future__ import annotations

import torch

from engine.kernels.gated import ACTIVATIONS
from engine.kernels.gated_sums import (
    BACKWARD,
    FORWARD,
    GATED_SUMS,
    GRADIENTS,
    GRADIENTS_IN_PLACE,
    gated_sums,
    gated_sums_reference,
)
from engine.kernels.gated_sums.reference import gated_sums_gradients_reference
from engine.kernels.tuner import TUNER
from tests.engine.kernels.judging import DEVICE, DTYPES, INTERPRETED, combined, compare, judge, rms, said


def drawn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=DEVICE).to(dtype)


def gated_sums_cases() -> None:
    """Outputs and gradients, of both factors too; ranks that fill no tile, and one sum without a product."""
    shapes = [(2, 3, 40), (5, 300)] if INTERPRETED else [(2, 3, 40), (5, 1030), (4, 513, 3072), (1000, 12_288)]
    for shape, dtype, activation, (one, other) in combined(shapes, DTYPES, ACTIVATIONS, ((3, 16), (24, 0))):
        lead, width = shape[:-1], shape[-1]
        # As a group's products are: parts of one result, apart in memory.
        both = drawn(*lead, one + other, dtype=dtype).mul_(0.3).requires_grad_()
        outers = [drawn(width, rank, dtype=dtype).requires_grad_() for rank in (one, other) if rank]
        pair = [drawn(*shape, dtype=dtype).requires_grad_() for _ in range(2)]

        def call(f, x, y, inner, *outers, a=activation, ranks=(one, other)):
            parts = inner.split(ranks, -1)
            thin = [(part, outer) for part, outer in zip(parts, outers, strict=False)]
            return f(x, thin[0], y, thin[1] if len(thin) > 1 else None, a)

        name = f"gated_sums {dtype} {shape} {activation} ranks {one}, {other}"
        ours, theirs = (lambda *given, f=f, call=call: call(f, *given) for f in (gated_sums, gated_sums_reference))
        compare(name, ours, theirs, [*pair, both, *outers], 1)


def gated_sums_again() -> None:
    """A gradient that is a sum, the product beside the gradients, in memory of its own and over what was read."""
    for activation, thin in combined(ACTIVATIONS, (True, False)):
        grad, gate, up = (drawn(4, 37) for _ in range(3))
        low, right = (drawn(4, 5), drawn(5, 37)) if thin else (None, None)
        sums = gate, drawn(4, 7), drawn(37, 7), up, None, None
        fresh = GRADIENTS(grad, low, right, *sums, activation, True)
        arguments = (grad, (low, right.t()) if thin else None, gate, sums[1:3], up, None)
        wide = [tuple(x.double() for x in each) if isinstance(each, tuple) else None if each is None else each.double()
                for each in arguments]  # fmt: skip
        truth = gated_sums_gradients_reference(*wide, activation)
        eager = gated_sums_gradients_reference(*arguments, activation)
        for what, a, b, c in zip(("dgate", "dup", "product"), truth, eager, fresh, strict=True):
            judge(f"gated_sums again {activation} {thin} {what}", a, b, c, torch.bfloat16)
        alone = GRADIENTS(grad, low, right, *sums, activation, False)
        said(alone[2].numel() == 0 and torch.equal(alone[0], fresh[0]), f"gated_sums without the product {activation}")
        spent = [x.clone() for x in (grad, gate, up)]
        GRADIENTS_IN_PLACE(spent[0], low, right, spent[1], *sums[1:3], spent[2], None, None, activation)
        said(all(map(torch.equal, (spent[1], spent[2], spent[0]), fresh)), f"gated_sums in place {activation} {thin}")


def gated_sums_tiles() -> None:
    """Every tile gives the same sums, and one that is timed spoils nothing."""
    grad, gate, up = (drawn(70, 300) for _ in range(3))
    thin = drawn(70, 8), drawn(300, 8)
    taken = []

    class Nowhere:
        def find(self, name):
            return None

        def keep(self, name, entry):
            return None

    def run():
        spent = [x.clone() for x in (grad, gate, up)]
        GRADIENTS_IN_PLACE(spent[0], None, None, spent[1], *thin, spent[2], *thin, "silu")
        return GATED_SUMS(gate, *thin, up, *thin, "silu"), *spent

    wanted = run()
    for place in range(len(FORWARD.candidates)):

        def timed(runs, place=place):
            runs[place]()
            return [0.0 if each == place else 1.0 for each in range(len(runs))]

        TUNER.start(timed, lambda device: Nowhere())
        try:
            found = run()
            taken += [each.tile for each in TUNER.picked]
        finally:
            TUNER.stop()
        # Two kinds of a card's products may add in another order: a step of bfloat16 here and there.
        apart = max(rms(a.float() - b.float()) / rms(b.float()) for a, b in zip(found, wanted, strict=True))
        said(apart <= (0.0 if INTERPRETED else 1e-3), f"gated_sums in tile {place}", f"{apart:.1e} apart")
    said(set(taken) == {*FORWARD.candidates, *BACKWARD.candidates}, "gated_sums: all tiles are asked for")


def gated_sums_registered() -> None:
    """torch's checks of the operations that compiled code calls."""
    pair = [torch.randn(2, 3, 20, device=DEVICE).requires_grad_() for _ in range(2)]
    inner, outer = (torch.randn(*shape, device=DEVICE).requires_grad_() for shape in ((2, 3, 4), (20, 4)))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(GATED_SUMS, (pair[0], inner, outer, pair[1], None, None, "silu"), test_utils=checks)
    grad, gate, up, inner, outer = (x.detach() for x in (pair[0], *pair, inner, outer))
    given = grad.clone(), None, None, gate, inner, outer, up, None, None, "gelu"
    for product in (True, False):
        torch.library.opcheck(GRADIENTS, (*given, product), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(GRADIENTS_IN_PLACE, given, test_utils=("test_schema", "test_faketensor"))
    print("ok   gated_sums registered: schema, autograd, fake form")
