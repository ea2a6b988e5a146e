"""Which linear layers `model.quantization: fp8` computes in FP8, and what it needs of a card: one rule for the loader, the
findings and the estimate.

A layer is served where its product in FP8 gains more than rounding its input costs. The least size is the smallest whose
product was measured to gain (4096 to 1024, 8,192 tokens, H100: 0.078 ms for 0.110); its neighbours read the same rounded
input, so that rounding is paid once. With this size a step of an 8B model took 0.69 of bfloat16's (H200, compiled).
"""

from __future__ import annotations

LEAST_CAPABILITY = (8, 9)
"""The compute capability of the oldest card with FP8 products that have a scale for each row (Ada)."""
MULTIPLE = 16
"""Both sizes of a weight must be a multiple of this."""
LEAST_NUMBERS = 4096 * 1024
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
        return f"of fewer than {least:,} numbers, which would be slower"
    return None
