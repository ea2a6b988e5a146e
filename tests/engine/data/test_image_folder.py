"""A folder of images with captions: its rows, and what is said of one that is wrong, before any training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from engine.config.data import DataSource
from engine.config.model import Model
from engine.config.tree import RunConfig
from engine.data.detect import detect
from engine.data.formats import read_example
from engine.data.gather_facts import inspect_source
from engine.data.prepare import prepare
from engine.data.pretokenized import IGNORED
from engine.data.rows import open_rows
from engine.data.streaming.folders import paths_of
from engine.errors import DataError
from engine.models.load import load_processing_class
from engine.session.first_rows import first_rows_of

COLOURS = ("red", "green", "blue")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images, in a folder below the one that tells of them."""
    (tmp_path / "shown").mkdir()
    for colour in COLOURS:
        Image.new("RGB", (8, 8), colour).save(tmp_path / "shown" / f"{colour}.png")
    return tmp_path


def told(folder: Path, *rows: dict[str, object]) -> Path:
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def facts(folder: Path, **entry: object) -> SimpleNamespace:
    return inspect_source(DataSource(path=str(folder), **entry), folder)  # type: ignore[arg-type, return-value]


def test_metadata_names_the_image_and_its_caption_in_every_form_of_the_field(folder: Path) -> None:
    rows = [{"file_name": f"shown/{colour}.png", "caption": f"All {colour}."} for colour in COLOURS]
    for write in ("jsonl", "csv", "parquet"):
        if write == "jsonl":
            told(folder, *rows)
        elif write == "csv":
            (folder / "metadata.csv").write_text(
                "file_name,text\n" + "".join(f"{row['file_name']},{row['caption']}\n" for row in rows)
            )
        else:
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "metadata.parquet")
        opened = open_rows(folder)
        seen = detect(opened)
        assert (seen.format, seen.problems, len(opened)) == ("text", (), 3), write
        assert "a folder of images" in seen.why
        example = read_example(opened[1], "text", seen.columns)
        assert (example.text, example.images) == ("<image>All green.", ["shown/green.png"])
        opened.close()
        (folder / f"metadata.{write}").unlink()


def test_messages_and_several_images_are_rows_as_in_a_file(folder: Path) -> None:
    turns = [
        {"role": "user", "content": "<image><image>Which is first?"},
        {"role": "assistant", "content": "The red one."},
    ]
    told(folder, {"file_names": ["shown/red.png", "shown/blue.png"], "messages": turns})
    seen = facts(folder)
    assert (seen.format, seen.problem, seen.bad, seen.images) == ("messages", "", 0, "line 1")
    assert first_rows_of({"path": str(folder)}, folder).format == "messages"


def test_texts_beside_images_are_their_captions_in_the_order_of_names(folder: Path) -> None:
    for colour in COLOURS:
        (folder / "shown" / f"{colour}.txt").write_text(f"All {colour}.\n")
    opened = open_rows(folder / "shown")
    assert [row["text"] for row in opened] == ["All blue.", "All green.", "All red."]
    assert detect(opened).problems == ()
    (folder / "shown" / "green.txt").unlink()
    assert facts(folder / "shown").bad_row == "row 1, green.png: there is no green.txt beside it. Each image has one."
    (folder / "shown" / "green.txt").write_text(" \n")
    assert "green.txt is empty" in facts(folder / "shown").bad_row


def test_captions_are_learned_after_their_images_and_a_changed_caption_is_prepared_anew(
    folder: Path, make_config: Callable[..., Any]
) -> None:
    rows = [{"file_name": f"shown/{colour}.png", "text": f"All {colour}."} for colour in COLOURS]
    config = make_config(told(folder, *rows), method="pretrain")
    processor = load_processing_class(RunConfig(model=Model(name="builtin/tiny-vl")))
    for caption in ("All red.", "Nothing else."):
        rows[0]["text"] = caption
        told(folder, *rows)
        prepared = prepare(config, processor)
        assert len(prepared.dataset) == 3
        row = prepared.dataset[0]
        assert [Path(image).name for image in row["images"]] == ["red.png"]
        learned = [label for label in row["labels"] if label != IGNORED]
        assert caption in processor.tokenizer.decode(learned)
        assert row["input_ids"].count(processor.image_token_id) == 4
        assert processor.image_token_id not in learned
    assert not prepared.cached


def test_what_is_wrong_is_named_with_its_row_before_training(folder: Path) -> None:
    good = {"file_name": "shown/red.png", "text": "Red."}
    for bad, sentence in (
        ({"file_name": "shown/gone.png", "text": "Gone."}, "shown/gone.png: there is no such file"),
        ({"file_name": "../shown/red.png", "text": "Out."}, "the path leads out of"),
        ({"text": "Nothing."}, "column file_name is missing or empty: the row names no image"),
        ({"file_name": "shown/red.png", "text": "<image><image>"}, "2 places for images"),
    ):
        inner = folder / "inner"
        shutil.rmtree(inner, ignore_errors=True)
        (inner / "shown").mkdir(parents=True)
        shutil.copy(folder / "shown" / "red.png", inner / "shown")
        seen = facts(told(inner, good, bad))
        assert seen.bad == 1, bad
        assert sentence in seen.bad_row, seen.bad_row
        assert seen.bad_row.startswith(("metadata.jsonl:2: ", "line 2: ")), seen.bad_row


def test_a_folder_without_captions_is_none_and_a_stream_of_one_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(DataError, match="is a folder; name a file in it"):
        open_rows(folder / "shown")
    with pytest.raises(DataError, match="a folder of images, which is not streamed"):
        paths_of(str(told(folder, {"file_name": "shown/red.png", "text": "Red."})))
