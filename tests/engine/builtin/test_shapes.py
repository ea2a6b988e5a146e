"""The demo of images: what is held out, a model like any other folder, and that it learns to look where it is asked to."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from engine.builtin import GENERATED, shapes, tiny_vl
from engine.config.kinds import BUILTIN_MODELS, BUILTIN_ROWS
from engine.config.recipes import recipe_mapping
from engine.config.tree import RunConfig
from engine.data.collate import collator_for
from engine.data.gather_facts import gather_facts
from engine.data.prepare import prepare
from engine.data.pretokenized import IGNORED
from engine.data.vision import open_image
from engine.facts.model_shape import model_facts
from engine.models.load import load_processing_class
from engine.rules import read
from engine.session.first_rows import first_rows_of
from workbench.panels.raw_rows import RawRows


def config_of(path: str | Path = "builtin/shapes", **more: Any) -> RunConfig:
    mapping = recipe_mapping("demo-images")
    mapping["data"] = {**mapping["data"], "train": [{"path": str(path), **more}], "eval": []}
    return read(mapping).config


def right(folder: str | Path, rows: list[dict[str, Any]], place: Path) -> float:
    """The share of rows whose answer is what the model would write, token by token to its end."""
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(place)
    processor = load_processing_class(config)
    batch = dict(collator_for(config, processor)(list(prepare(config, processor).dataset)))
    labels = batch.pop("labels")[:, 1:]
    with torch.no_grad():
        written = AutoModelForImageTextToText.from_pretrained(folder)(**batch).logits.argmax(-1)[:, :-1]
    return ((written == labels) | (labels == IGNORED)).all(1).float().mean().item()


def test_what_is_held_out_is_in_no_training_row_and_the_answer_is_the_colour_that_is_drawn() -> None:
    rows = {split: shapes.rows(split, seed=3, count=600) for split in ("train", "eval")}
    assert rows["train"] == shapes.rows("train", seed=3, count=900)[:600]
    assert rows["train"] != shapes.rows("train", seed=4, count=600)
    for made in rows.values():
        for row in made:
            picture = open_image(row["images"][0])
            assert picture.size == (shapes.SIDE, shapes.SIDE)
            colours = {colour for _, colour in picture.getcolors() or ()} - {(255, 255, 255)}
            assert len(colours) == 2
            assert shapes.COLOURS[row["messages"][1]["content"]] in colours
    assert not set(shapes.held_out()) & set(shapes.trained())
    assert len(shapes.held_out()) + len(shapes.trained()) == 180
    assert {colour for pair in shapes.trained() for _, colour in pair} == set(shapes.COLOURS)
    with pytest.raises(ValueError, match="train or eval"):
        shapes.rows("test")


def test_what_is_known_of_it_without_torch_is_what_the_folder_says() -> None:
    folder = tiny_vl.folder()
    known, found = model_facts(tiny_vl.NAME), model_facts(str(folder))
    assert known is not None
    assert found is not None
    differ = {name for name in known.__dataclass_fields__ if getattr(known, name) != getattr(found, name)}
    assert differ == {"name", "folder"}
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert sum(weight.numel() for weight in model.parameters()) == known.parameters
    assert set(GENERATED) == set(BUILTIN_ROWS)
    assert tiny_vl.NAME in BUILTIN_MODELS


def test_every_window_shows_its_rows_and_the_recipe_is_sound() -> None:
    reading = read(recipe_mapping("demo-images"))
    facts = gather_facts(reading.config)
    assert facts.sources is not None
    assert facts.sources["builtin/shapes"].images
    checked = read(recipe_mapping("demo-images"), facts)
    assert not [finding for finding in checked.findings if finding.severity == "error"]
    look = first_rows_of({"path": "builtin/shapes"}, Path())
    assert (look.format, look.columns, look.count) == ("messages", ("images", "messages"), shapes.TRAIN_ROWS)
    raw = RawRows([{"path": "builtin/shapes"}], Path(), most=3)
    assert raw.row(1) == shapes.rows(count=2)[1]


def test_a_picture_is_four_tokens_and_a_step_reaches_the_vision_tower() -> None:
    config = config_of(rows=8)
    processor = load_processing_class(config)
    prepared = prepare(config, processor).dataset
    row = prepared[0]
    assert row["input_ids"].count(processor.image_token_id) == tiny_vl.IMAGE_TOKENS == 4
    answer = shapes.rows(seed=config.run.seed, count=1)[0]["messages"][1]["content"]
    assert processor.tokenizer.decode([label for label in row["labels"] if label != IGNORED]) == f"{answer}<|im_end|>"
    model = AutoModelForImageTextToText.from_pretrained(tiny_vl.folder()).train()
    model(**collator_for(config, processor)(list(prepared))).loss.backward()
    gradient = model.model.vision_model.embeddings.patch_embedding.weight.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_answers_by_what_it_sees_and_by_what_it_is_asked(tmp_path: Path) -> None:
    """Above 95% of held-out rows; without the picture one colour of six, with another row's question one of the two."""
    config = tmp_path / "shapes.yaml"
    product = [sys.executable, "-P", "-m", "workbench"]
    subprocess.run([*product, "new", "demo-images", "-o", str(config)], check=True, capture_output=True)
    runs = f"run.output_dir={tmp_path / 'runs'}"
    done = subprocess.run([*product, "train", str(config), "run.seed=2", runs], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (folder,) = {each.parent for each in (tmp_path / "runs").rglob("model.safetensors") if "2000" in str(each)}
    rows = shapes.rows("eval", seed=5)
    assert right(folder, rows, tmp_path / "rows.jsonl") > 0.95
    white = shapes.encoded(shapes.blank())
    assert right(folder, [{**row, "images": [white]} for row in rows], tmp_path / "blank.jsonl") < 0.3
    asked = [row["messages"][0] for row in rows]
    random.Random(0).shuffle(asked)
    mixed = [{**row, "messages": [question, row["messages"][1]]} for row, question in zip(rows, asked, strict=True)]
    assert right(folder, mixed, tmp_path / "mixed.jsonl") < 0.6
