"""Packages whose kernels transformers computes layers with a state by, where they are installed: linear attention and state
space. Pure, without torch.

transformers asks for none of them. Where it defines a model it tries to import them, and computes by a loop of torch for each
layer where that fails; which of both it is stands in the receipt. What it does not ask is whether the kernels serve here:
flash-linear-attention 0.6 raises on a CPU, and in the backward pass of the gated delta rule on a Hopper card with Triton
3.4 to 3.7.0, whose compiler made its gradients wrong (https://github.com/fla-org/flash-linear-attention/issues/640).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

FLA, FLA_MODULE = "flash-linear-attention", "fla"
GATED_DELTA = frozenset({"lara_mini", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp"})
"""Model types, without the ending `_text`, whose linear attention is the gated delta rule (arXiv:2412.06464)."""
LINEAR = GATED_DELTA | {"bailing_hybrid", "glm5_next", "kimi_linear"}
"""Those and the ones of Kimi delta attention (arXiv:2510.26692): what flash-linear-attention computes."""
STATE_SPACE = frozenset({
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h", "zamba",
    "zamba2",
})  # fmt: skip
"""Model types with layers of state space (Mamba), which mamba-ssm and causal-conv1d compute."""
FLA_INSTALL = f"pip install {FLA}"
TILELANG_INSTALL = "pip install 'tilelang[nvcc]'"
MAMBA_INSTALL = "pip install --no-build-isolation mamba-ssm causal-conv1d"
_HOPPER, _WRONG_FROM, _RIGHT_FROM = (9, 0), (3, 4), (3, 7, 1)


def family(model_type: str) -> str:
    """The model type without what tells a language model from the one with other parts around it."""
    return model_type.removesuffix("_text")


def unfit(model_type: str, packages: Mapping[str, str | None], cards: Sequence[tuple[int, int]]) -> str:
    """Why flash-linear-attention, if it is installed, does not train a model of this type on cards of these compute
    capabilities; empty where it does."""
    if not cards:
        return "its kernels are for GPUs"
    triton = packages.get("triton") or ""
    hopper = any(card == _HOPPER for card in cards)
    if family(model_type) not in GATED_DELTA or not hopper or packages.get("tilelang") or not _miscompiles(triton):
        return ""
    return f"on a Hopper card its gradients need Triton 3.7.1 or tilelang, and Triton here is {triton}"


def _miscompiles(triton: str) -> bool:
    numbers = tuple(int(number) for number in re.findall(r"\d+", triton)[:3])
    return _WRONG_FROM <= numbers < _RIGHT_FROM
