"""Which linear layers `model.quantization: fp8` computes in FP8, and what it needs of a card: one rule for the loader, the
findings and the estimate.

A layer is served where its products in FP8, forward and for its input's gradient, gain clearly more than rounding costs.
Compiled after its norm, 8,192 tokens, one H100, ratio to bfloat16: 1024 to 1024 0.968, 2560 to 1024 0.906, 1024 to 3072
0.907, 2048 to 2048 0.857; the smallest that gains a tenth is the least. An 8B model, all of whose layers lie above, took
0.69 of bfloat16's step (H200, compiled).
"""

from __future__ import annotations

LEAST_CAPABILITY = (8, 9)
"""The compute capability of the oldest card with FP8 products that have a scale for each row (Ada)."""
MULTIPLE = 16
"""Both sizes of a weight must be a multiple of this."""
LEAST_NUMBERS = 2560 * 1024
"""Numbers of the smallest weight that is worth it."""
ROUTERS = ("gate", "router")
"""Names of layers whose few results decide where a token goes: rounding them would send it elsewhere."""


def why_not(name: str, rows: int, columns: int, *, least: int | None = None) -> str | None:
    """Why a layer of this name and shape stays as it is, in words that follow a count, or None where it is served."""
    least = LEAST_NUMBERS if least is None else least
    if name in ROUTERS:
        return "router"
    if rows % MULTIPLE or columns % MULTIPLE:
        return f"of sizes that are no multiple of {MULTIPLE}"
    if rows * columns < least:
        return f"of fewer than {least:,} numbers, which would gain little"
    return None
