"""Experts that a base's files hold in MXFP4, laid as llama.cpp has them: the same bits in other places, so that nothing is rounded.

Both have blocks of 32 numbers of four bits with a power of two (OCP Microscaling 1.0). In checkpoints byte j of a block has numbers
2j and 2j + 1, and scales are a weight of their own; in llama.cpp's `block_mxfp4` the scale comes first, and byte j has numbers j and
j + 16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from engine import model_files
from engine.errors import ModelError, visible
from engine.export.families_of_gguf import Part
from engine.export.folder import Model
from engine.export.places import MXFP4

_WAY = "Take --quant BF16, which holds what experts in MXFP4 stand for exactly, or Q8_0."


def refuse_unserved(model: Model) -> None:
    """Raises ModelError where the model's experts are not those that the base's files hold in MXFP4."""
    every = model_files.stored_weights(model.whole)
    if not any(name.endswith("_blocks") for name in every):
        place = model_files.place(model.whole)
        raise ModelError(
            f"gguf: {MXFP4} keeps experts that the files hold in it, and those of {place} hold none.",
            "Take --quant BF16 or Q8_0.",
        )
    if model.config.model.quantization != "none":
        held = model.config.model.quantization
        raise ModelError(f"gguf: training held these experts in {held}, and the files hold them in {MXFP4}.", _WAY)
    trained = model_files.header(model.source.checkpoint / model_files.ADAPTER_WEIGHTS)
    if any(".experts." in name for name in trained):
        raise ModelError(f"gguf: {MXFP4} keeps the base's experts to the bit, and this run's adapter is on them.", _WAY)


def blocks(base: Path, part: Part) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One expert's part of a weight of the base's files as llama.cpp's bytes [rows, 17 x blocks], uint8."""
    numbers, scales = (_of_expert(base, f"{part.name}_{end}", part) for end in ("blocks", "scales"))
    codes = torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(-2)
    half = codes.shape[-1] // 2
    laid = torch.cat([scales[..., None], codes[..., :half] | codes[..., half:] << 4], dim=-1)
    return np.ascontiguousarray(laid.flatten(1).numpy())


def _of_expert(base: Path, key: str, part: Part) -> torch.Tensor:
    for file in model_files.weight_files(base):
        if key in model_files.header(file):
            with safe_open(file, "pt") as weights:
                value: torch.Tensor = weights.get_slice(key)[part.expert]
            return value[part.outputs]
    raise ModelError(f"gguf: the files of {model_files.place(base)} lack {visible(key)}.")
