"""Linear layers of a family that no formula is known of, by the matrices that its files hold.

Matrices that are no linear layers are left out: experts, routers and embeddings, and norms that have a row for each head; the
head has no adapter.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from engine.model_files import Tensor

Linear = tuple[str, int, int, int]
_EXPERT = re.compile(r"\.experts\.")
_OF_LAYER = re.compile(r"\.(\d+)\.(?:[A-Za-z_]\w*\.)*experts\.")
_AHEAD = re.compile(r"(^|\.)mtp\.")
_NO_LINEAR = re.compile(
    r"(?<!un)embed|norm|(^|\.)pooler\.|(^|\.)(lm_head|wte|wpe|relative_attention_bias|correction_coefs|prediction_coefs)\.weight$"
)
_LINEAR = re.compile(
    r"(^|\.)(patch_embed(ding|der)?\.([a-z]+(_[a-z]+)*\.)?|embed_vision\.embedding_projection\.)weight$"
)
"""Linear layers that are called embeddings: of a patch's numbers (SigLIP 2, Gemma 4), of the projector of Gemma 3n and 4."""
_PROJECTS = re.compile(r"(^|\.)(connector|multi_modal_projector|merger|patch_merger|projector|aligner|embed_vision)\.")
_SEES = re.compile(r"(^|\.)(visual|vision_tower|vision_model|vision_encoder|vision_embedder)\.")
MAMBA = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Model types in which PEFT refuses an adapter beside `out_proj`, whose weight Mamba's kernels read too."""
_ROUTER = re.compile(r"\.(gate|router|wg)(\.layer)?\.weight$")


def linears(stored: Mapping[str, Tensor], experts: int) -> tuple[Linear, ...]:
    """Linear layers as `(name, in, out, how many)`, without the head and the parts that see."""
    return _counted(_matrices(stored, experts, ""))


def that_see(stored: Mapping[str, Tensor]) -> tuple[tuple[Linear, ...], tuple[Linear, ...]]:
    """Those of the vision tower, and those of the projector from it to the language model."""
    return _counted(_matrices(stored, 0, "tower")), _counted(_matrices(stored, 0, "projector"))


def _counted(matrices: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[Linear, ...]:
    found = Counter((name.split(".")[-2], shape[1], shape[0]) for name, shape in matrices)
    return tuple((name, wide_in, wide_out, count) for (name, wide_in, wide_out), count in found.items())


def sees(name: str) -> bool:
    """Whether a weight of this name belongs to the vision tower or its projector."""
    return _part(name) != ""


def agrees(fused: Iterable[Linear], experts: int, stored: Mapping[str, Tensor]) -> bool:
    """Whether the experts of these layers have as many numbers as those in the files."""
    held = sum(math.prod(each.shape) for name, each in stored.items() if _EXPERT.search(name) and len(each.shape) > 1)
    return held == sum(experts * wide_in * wide_out * count for _, wide_in, wide_out, count in fused)


def layers_with_experts(stored: Mapping[str, Tensor], layers: int) -> tuple[int, ...]:
    """The numbers of the layers of the language model whose experts are in the files; what predicts several tokens at once is
    none."""
    numbers = {int(at[1]) for name in stored if not _AHEAD.search(name) and (at := _OF_LAYER.search(name))}
    return tuple(sorted(number for number in numbers if number < layers))


def _matrices(stored: Mapping[str, Tensor], experts: int, part: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, tensor in stored.items():
        if len(tensor.shape) != 2 or not name.endswith(".weight") or _part(name) != part:
            continue
        routes = bool(experts) and tensor.shape[0] == experts and _ROUTER.search(name) is not None
        no_linear = _NO_LINEAR.search(name) is not None and _LINEAR.search(name) is None
        if not (_EXPERT.search(name) or no_linear or routes):
            yield name, tensor.shape


def _part(name: str) -> str:
    """The part that sees which a weight belongs to, as `engine.models.vision_parts` finds it on the model."""
    return "projector" if _PROJECTS.search(name) else "tower" if _SEES.search(name) else ""
