"""How many weights a parameter holds, in which format and in how many bytes: two of four bits share each stored byte."""

from __future__ import annotations

import math
from typing import Any


def weights_in(parameter: Any) -> int:
    """Weights of the model, whatever they are packed into."""
    state, form = getattr(parameter, "quant_state", None), getattr(parameter, "form", None)
    if isinstance(form, tuple) and not hasattr(
        parameter, "held"
    ):  # the bytes of a layer; packed experts show their shape
        return int(form[1] * form[2])
    return int(parameter.numel()) if state is None else math.prod(state.shape)


def bytes_of(weight: Any) -> tuple[int, int]:
    """The address of a weight, and the bytes that it takes; of packed experts those of all their parts."""
    held = getattr(weight, "held", None)
    return (weight.data_ptr(), weight.nbytes) if held is None else (held.numbers.data_ptr(), weight.packed_bytes)


def format_of(parameter: Any) -> str:
    """The name of the numbers' format: `nf4` and the like where they are packed, else the tensor's own."""
    if isinstance(form := getattr(parameter, "form", None), tuple):  # of packed experts and layers
        return str(form[0])
    state = getattr(parameter, "quant_state", None)
    return str(parameter.dtype).removeprefix("torch.") if state is None else str(state.quant_type)
