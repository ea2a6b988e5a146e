"""Features beside images: each one serves them with the same losses."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.engine.seeing import BUILDERS, FAMILIES
from tests.engine.trainers.conftest import lines
from tests.engine.trainers.test_against_trl import images_with_answers
from tests.engine.trainers.test_grpo_images import GRPO

FEATURES = {
    "cut cross-entropy": {"kernels.use_cut_ce": True},
    "selective": {"memory.gradient_checkpointing": "selective"},
    "full": {"memory.gradient_checkpointing": "full"},
    "disk": {"memory.gradient_checkpointing": "full", "memory.activation_offloading": "disk"},
    "tiles": {"memory.tiled_mlp": True, "memory.tiled_mlp_tokens": 16},
    "eager": {"model.attention": "eager"},
    "streamed": {"data.streaming": True, "data.shuffle": False},
    "held out": {"run.eval_steps": 1},
}
LORA = {"adapter.kind": "lora", "adapter.r": 4}
WITH_LORA = {"fused lora": {"kernels.fused_lora": True}, "plain lora": {}}


@pytest.mark.parametrize(
    "family", [each if each == "gemma3" else pytest.param(each, marks=pytest.mark.slow) for each in BUILDERS]
)
def test_features_serve_images_with_the_same_losses(train, source, tmp_path, shared_data, family):
    folder = BUILDERS[family](shared_data / "tokenizers/minimind", tmp_path / family)
    rows = source(images_with_answers(tmp_path, 8))
    base = {"model.name": str(folder), "data.max_length": 512, "optim.max_steps": 2, "data.shuffle": False}
    base |= {"data.train": [{"path": rows}], "optim.gradient_accumulation_steps": 1}

    def losses(**settings):
        run = train({**base, **settings})
        return [event["loss"] for event in lines(run, "metrics") if "loss" in event]

    plain, adapted = losses(), losses(**LORA)
    assert len(plain) == len(adapted) == 2
    wrong = {}
    for name, settings in FEATURES.items():
        more = {"data.eval": [{"path": rows}]} if name == "held out" else {}
        if (found := losses(**settings, **more)) != pytest.approx(plain, rel=1e-5) and name != "streamed":
            wrong[name] = found
        assert len(found) == 2
    for name, settings in WITH_LORA.items():
        if (found := losses(**LORA, **settings)) != pytest.approx(adapted, rel=1e-5):
            wrong[name] = found
    assert not wrong, (plain, adapted)


def test_text_with_images_and_its_tokens_teach_the_same_and_the_pixels_count(train, source, tmp_path, shared_data):
    from PIL import Image

    from engine.data.prepare import prepare
    from engine.models.load import load_processing_class
    from engine.rules import read

    folder = BUILDERS["gemma3"](shared_data / "tokenizers/minimind", tmp_path / "gemma3")
    colours = [(200, 30, 30), (20, 160, 60), (30, 60, 220), (240, 200, 20)]
    for number, colour in enumerate(colours):
        Image.new("RGB", (40, 30), colour).save(tmp_path / f"{number}.png")
    rows = [{"text": f"A card <image> of number {n}.", "images": [f"{n}.png"]} for n in range(4)]

    def settings(path):
        return {
            "model.name": str(folder), "method.kind": "pretrain", "data.train": [{"path": path, "format": "multimodal_pretrain"}],
            "data.max_length": 128, "optim.max_steps": 3, "optim.gradient_accumulation_steps": 1,
            "optim.per_device_train_batch_size": 2, "run.logging_steps": 1, "data.shuffle": False, "optim.learning_rate": 1e-3,
        }  # fmt: skip

    def losses(path):
        return [event["loss"] for event in lines(train(settings(path)), "metrics") if "loss" in event]

    raw = source(rows)
    config = read({"version": 1, **_nested(settings(raw))}).config
    made = prepare(config, load_processing_class(config)).dataset
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text(
        "".join(
            json.dumps({"_mm_text": row["text"], "images": row["images"], "input_ids": ids, "labels": labels}) + "\n"
            for row, ids, labels in zip(rows, made["input_ids"], made["labels"], strict=True)
        )
    )
    first = losses(raw)
    assert first[-1] < first[0]
    assert losses(str(tokens)) == first
    for number in range(4):
        Image.new("RGB", (40, 30), (255, 255, 255)).save(tmp_path / f"{number}.png")
    assert losses(raw)[0] != first[0]


@pytest.mark.parametrize("family", ["gemma3", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_nf4_serves_images_as_the_numbers_that_its_codes_stand_for(train, source, tmp_path, shared_data, family):
    folder = FAMILIES[family](shared_data / "tokenizers/minimind", tmp_path / family)
    rows = source(images_with_answers(tmp_path, 8))
    base = {**LORA, "data.max_length": 512, "optim.max_steps": 2, "data.shuffle": False, "data.train": [{"path": rows}]}

    def taught(folder, **settings):
        run = train({**base, "model.name": str(folder), "optim.gradient_accumulation_steps": 1, **settings})
        found = [(event["loss"], event["grad_norm"]) for event in lines(run, "metrics") if "loss" in event]
        told = {entry["feature"]: entry for entry in lines(run, "receipt")[0]["entries"]}
        return [number for each in found for number in each], told

    packed, told = taught(folder, **{"model.quantization": "nf4"})
    twin, _ = taught(dequantized(folder, tmp_path / "twin", "float32"))
    plain, _ = taught(folder)
    assert packed == pytest.approx(twin, rel=1e-3)
    assert packed != pytest.approx(plain, rel=1e-3)
    assert told["quantization"]["count"] == len(in_four_bits(folder, "float32"))


def in_four_bits(folder, dtype):
    """By name the numbers of the layers that `model.quantization: nf4` packs: of the language model, the projector and the
    tower."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    from engine.features.load import load_model
    from engine.rules import read

    asked = {"name": str(folder), "dtype": dtype, "quantization": "nf4"}
    data = {"train": [{"path": "builtin/shapes"}]}
    model = load_model(read({"version": 1, "model": asked, "data": data, "adapter": {"kind": "lora"}}).config)
    packed = {name: each.weight for name, each in model.named_modules() if isinstance(each, Linear4bit)}
    towers = {name for name in packed if "vision" in name or "visual" in name}
    assert towers
    assert packed.keys() - towers
    return {name: dequantize_4bit(each.data, each.quant_state).cpu() for name, each in packed.items()}


def dequantized(folder, target, dtype):
    """A copy of the model with the numbers that its layers' codes stand for in NF4."""
    import torch
    from transformers import AutoModelForImageTextToText

    shutil.copytree(folder, target)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype))
    for name, numbers in in_four_bits(folder, dtype).items():
        model.get_submodule(name).weight.data.copy_(numbers)
    model.save_pretrained(target)
    return target


def _nested(settings):
    found = {}
    for path, value in settings.items():
        section, name = path.split(".", 1)
        found.setdefault(section, {})[name] = value
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_features_serve_answers_to_pictures_with_the_same_gradients(train, source, tmp_path, shared_data, family):
    folder = FAMILIES[family](shared_data / "tokenizers/minimind", tmp_path / family)
    rows = source([{"prompt": row["prompt"], "images": row["images"]} for row in images_with_answers(tmp_path, 4)])
    settings = {**GRPO, "model.name": str(folder), "data.train": [{"path": rows}], "optim.max_steps": 2}
    settings["method.reward_funcs"] = ["length:2", "regex:[aeiou]"]
    served = ("cut cross-entropy", "selective", "full", "disk", "tiles")
    plain, *others = (
        [event["grad_norm"] for event in lines(train({**settings, **more}), "metrics") if "grad_norm" in event]
        for more in ({}, *(FEATURES[name] for name in served))
    )
    assert max(plain) > 0
    for name, found in zip(served, others, strict=True):
        assert found == pytest.approx(plain, rel=1e-4), name
