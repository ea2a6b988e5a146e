"""What a vision tower keeps of images: the arithmetic against the tensors that autograd saves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.builtin import tiny_vl
from engine.config.facts import DataFacts, Facts, VisionFacts
from engine.facts.model_shape import model_facts
from engine.planning.memory_model import memory
from engine.rules import read
from tests.engine.seeing import BUILDERS, qwen2_5_vl
from tests.families.vision import FAMILIES

H, W, LAYERS, SIDE = 96, 384, 4, 16
"""Width, MLP's width and layers of a tower, and patches a side of an image."""


def planned(model: Any, checkpointing: bool | str = False, **settings: Any) -> int:
    """Bytes of images for one row of one image of SIDE x SIDE patches."""
    tree: dict[str, Any] = {
        "version": 1,
        "model": {"name": model.name, "dtype": "float32"},
        "data": {"train": [{"path": "rows.jsonl"}]},
    }
    tree |= {"optim": {"per_device_train_batch_size": 1}}
    for path, value in settings.items():
        section, name = path.split("__")
        tree.setdefault(section, {})[name] = value
    config = read(tree).config
    data = DataFacts(rows=4, longest=512, image_tokens=SIDE * SIDE // model.vision.patches)
    found = memory(config, Facts(model=model, data=data), checkpointing)
    assert found is not None
    return found.get("images", 0)


def saved(tower: torch.nn.Module, run: Any) -> int:
    """Bytes that autograd keeps of a forward pass, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in tower.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def siglip() -> tuple[Any, Any]:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    shape = {"hidden_size": H, "intermediate_size": W, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    config = SiglipVisionConfig(**shape, image_size=SIDE * 8, patch_size=8, vision_use_head=False)
    tower = SiglipVisionModel._from_config(config, attn_implementation="sdpa")
    return tower, lambda: tower(pixel_values=torch.randn(1, 3, SIDE * 8, SIDE * 8))


def qwen(kind: str) -> tuple[Any, Any]:
    import transformers

    shape = {
        "hidden_size": H,
        "intermediate_size": W,
        "depth": LAYERS,
        "num_heads": 4,
        "patch_size": 8,
        "out_hidden_size": 64,
    }
    own = (
        {"window_size": 32, "fullatt_block_indexes": [1]}
        if kind == "Qwen2_5_VL"
        else {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    )
    module = getattr(transformers.models, kind.lower())
    config = getattr(module, f"configuration_{kind.lower()}")
    modeling = getattr(module, f"modeling_{kind.lower()}")
    vision = {"Qwen2_5_VL": "Qwen2_5_VisionTransformerPretrainedModel", "Qwen3_VL": "Qwen3VLVisionModel"}[kind]
    made = getattr(config, {"Qwen2_5_VL": "Qwen2_5_VLVisionConfig", "Qwen3_VL": "Qwen3VLVisionConfig"}[kind])
    tower = getattr(modeling, vision)._from_config(
        made(**shape, **own, temporal_patch_size=1), attn_implementation="sdpa"
    )
    grid = torch.tensor([[1, SIDE, SIDE]])
    return tower, lambda: tower(torch.randn(SIDE * SIDE, 3 * 64), grid_thw=grid)


def pixtral() -> tuple[Any, Any]:
    from transformers import PixtralVisionConfig, PixtralVisionModel

    shape = {"hidden_size": H, "intermediate_size": W, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    config = PixtralVisionConfig(**shape, image_size=SIDE * 8, patch_size=8)
    tower = PixtralVisionModel._from_config(config, attn_implementation="sdpa")
    return tower, lambda: tower(torch.randn(1, 3, SIDE * 8, SIDE * 8), image_sizes=torch.tensor([[SIDE * 8, SIDE * 8]]))


@pytest.mark.parametrize(
    ("tower", "gated", "rotary"),
    [
        (siglip, False, False),
        (pixtral, True, True),
        (lambda: qwen("Qwen2_5_VL"), True, True),
        (lambda: qwen("Qwen3_VL"), False, True),
    ],
    ids=["siglip", "pixtral", "qwen2_5_vl", "qwen3_vl"],
)
def test_a_tower_that_learns_takes_what_autograd_saves(tower: Any, gated: bool, rotary: bool) -> None:
    base = model_facts("builtin/tiny-vl")
    assert base is not None
    seeing = replace(base, vision=VisionFacts(H, LAYERS, W, gated, rotary, 4))
    made, run = tower()
    assert planned(seeing) == pytest.approx(saved(made, run), rel=0.15)
    made.gradient_checkpointing_enable()
    made.train()
    # Beside the inputs of all layers, one layer's tensors come again later than the forward pass. Pixtral keeps least beside
    # its layers: 6.7 of its width where 9.5 are told.
    layer = planned(seeing) - planned(replace(seeing, vision=replace(seeing.vision, layers=LAYERS - 1)))
    assert planned(seeing, True) - layer == pytest.approx(saved(made, run), rel=0.3)
    assert planned(seeing, True) < planned(seeing) * 0.6


def test_nothing_is_kept_of_a_frozen_tower_or_of_rows_without_images() -> None:
    base = model_facts("builtin/tiny-vl")
    assert base is not None
    seeing = replace(base, vision=VisionFacts(H, LAYERS, W, False, False, 4))
    assert planned(seeing) > 0
    assert planned(seeing, model__train_vision="projector") == planned(seeing, model__train_vision="none") == 0
    assert planned(seeing, optim__per_device_train_batch_size=3) == pytest.approx(3 * planned(seeing), rel=1e-6)
    assert planned(seeing, method__kind="dpo") == pytest.approx(2 * planned(seeing), rel=1e-6)


@pytest.mark.parametrize("family", list(BUILDERS))
def test_a_tower_is_known_by_every_familys_own_names(family: str, tmp_path: Path, shared_data: Path) -> None:
    folder = BUILDERS[family](shared_data / "tokenizers/minimind", tmp_path / family)
    found = model_facts(str(folder))
    assert found is not None
    assert found.vision is not None
    told = json.loads((folder / "config.json").read_text())["vision_config"]
    assert (found.vision.hidden_size, found.vision.layers) == (32, told.get("depth") or told["num_hidden_layers"])
    assert found.vision.patches == 4
    assert model_facts("builtin/tiny") is not None
    assert model_facts("builtin/tiny").vision is None  # type: ignore[union-attr]


def test_pixtrals_tower_is_known_where_its_config_leaves_sizes_out(tmp_path: Path, shared_data: Path) -> None:
    """transformers' own sizes are meant then. Each patch is a token; Mistral Small 3.1 takes four for one."""
    for family, patches in (("pixtral", 1), ("mistral3", 4)):
        folder = FAMILIES[family](shared_data / "tokenizers/minimind", tmp_path / family)
        told = json.loads((folder / "config.json").read_text())
        found = model_facts(str(folder))
        assert found is not None
        assert found.vision == VisionFacts(32, 2, 64, True, True, patches)
        tower, projector = ({name for name, *_ in part} for part in (found.tower, found.projector))
        assert tower == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
        assert {"linear_1", "linear_2"} <= projector
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers"):
            del told["vision_config"][name]
        (folder / "config.json").write_text(json.dumps(told))
        found = model_facts(str(folder))
        assert found is not None
        assert found.vision == VisionFacts(1024, 24, 4096, True, True, patches)


def test_the_layer_that_reads_patches_counts_where_it_is_linear(tmp_path: Path, shared_data: Path) -> None:
    """LFM2-VL's tower, SigLIP 2, has an adapter beside it."""
    found = model_facts(str(FAMILIES["lfm2_vl"](shared_data / "tokenizers/minimind", tmp_path / "model")))
    assert found is not None
    assert ("patch_embedding", 192, 32, 1) in found.tower
    assert sum(count for *_, count in found.tower) == 13, "six layers of two blocks each"


def test_the_built_in_models_tower_is_told_as_it_is_built() -> None:
    known, built = model_facts("builtin/tiny-vl"), model_facts(str(tiny_vl.folder()))
    assert known is not None
    assert built is not None
    assert known.vision == built.vision


def test_what_sees_is_packed_and_streamed_with_the_rest(tmp_path: Path, shared_data: Path) -> None:
    """The estimate of the weights against those that are loaded, and without a card by arithmetic where layers stream."""
    from engine.features.load import load_model

    wide = {"hidden_size": 256, "intermediate_size": 1024}
    tower = {**wide, "depth": 4, "num_heads": 4, "out_hidden_size": 32}
    folder = qwen2_5_vl(shared_data / "tokenizers/minimind", tmp_path / "model", tower=tower)
    facts = model_facts(str(folder))
    tree: dict[str, Any] = {"version": 1, "adapter": {"kind": "lora"}, "data": {"train": [{"path": "rows.jsonl"}]}}

    def weights(quantization: str = "none", **more: Any) -> tuple[Any, float]:
        model = {"name": str(folder), "dtype": "float32", "quantization": quantization}
        config = read({**tree, "model": model, "memory": more}).config
        found = memory(config, Facts(model=facts, data=DataFacts(rows=4, longest=64)), True)
        assert found is not None
        return config, found["weights"]

    def loaded(config: Any) -> int:
        return sum(weight.nbytes for weight in load_model(config).parameters())

    (plain, wide_bytes), (packed, few_bytes) = weights(), weights("nf4")
    assert wide_bytes == pytest.approx(loaded(plain), rel=0.01)
    # bitsandbytes keeps scales beside the parameters.
    assert few_bytes == pytest.approx(loaded(packed), rel=0.06)
    seen = 4 * sum(wide_in * wide_out * count for _, wide_in, wide_out, count in facts.tower)
    assert seen > wide_bytes / 2
    assert weights(layer_offloading=True)[1] <= wide_bytes - seen
