"""Rows with images: read, written out by the processor, masked, checked and batched; bad images are named by file and row."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import struct
import unicodedata
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from engine.config.data import DataSource
from engine.data.collate import collator_for
from engine.data.prepare import prepare
from engine.data.pretokenized import IGNORED
from engine.data.preview import preview
from engine.data.prompts import reward_columns, written
from engine.data.vision import ImageBatch, open_image
from engine.errors import DataError, ModelError
from tests.engine.seeing import FAMILIES, real_processor

NAMES = ("idefics3", "gemma3")


SOME = [
    name if name in ("idefics3", "qwen3_vl", "glm4v") else pytest.param(name, marks=pytest.mark.slow)
    for name in FAMILIES
]
"""Images in tiles, of their own shape by a count of patches, and of their own shape between marks."""


class AtFirstUse(dict[str, Any]):
    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Any:
        self[name] = self._make(name)
        return self[name]


@pytest.fixture(scope="module")
def folders(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("seeing")
    return AtFirstUse(lambda name: FAMILIES[name](shared_data / "tokenizers/minimind", base / name))


@pytest.fixture(scope="module")
def processors(folders: dict[str, Path]) -> dict[str, Any]:
    return AtFirstUse(lambda name: loaded(folders[name], image_backend="pil"))


def loaded(folder: Path, **data: Any) -> Any:
    """The processor as a run loads it."""
    from engine.config.data import Data
    from engine.config.model import Model
    from engine.config.tree import RunConfig
    from engine.models.load import load_processing_class

    return load_processing_class(RunConfig(model=Model(name=str(folder)), data=Data(**data)))


def asked(text: Any, answer: str = "It is a cat.", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}], **more}


def picture(folder: Path, name: str = "cat.png", size: tuple[int, int] = (40, 30), **saved: Any) -> Path:
    path = folder / name
    Image.new("RGB", size, (200, 30, 30)).save(path, **saved)
    return path


def learned(processor: Any, row: dict[str, Any]) -> str:
    return processor.tokenizer.decode([label for label in row["labels"] if label != IGNORED])


@pytest.mark.parametrize("name", SOME)
def test_rows_become_what_the_processor_itself_makes_of_them(
    shared_data: Path, make_config: Callable[..., Any], processors: dict[str, Any], folders: dict[str, Path], name: str
) -> None:
    from transformers import AutoModelForImageTextToText

    processor, path = processors[name], shared_data / "scikit-image/chat_image_text.jsonl"
    real = real_processor(folders[name])
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    config = make_config(path)
    prepared = prepare(config, processor)
    theirs = []
    for row, source in zip(prepared.dataset, rows, strict=True):
        image = Image.open(path.parent / source["images"][0])
        text = source["messages"][0]["content"].removeprefix("<image>")
        parts = [{"type": "image"}, {"type": "text", "text": text}]
        messages = [{"role": "user", "content": parts}, *source["messages"][1:]]
        rendered = real.tokenizer.apply_chat_template(messages, chat_template=real.chat_template, tokenize=False)
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image).convert("RGB") if image.mode == "RGBA" else image.convert("RGB")
        given = real(text=[rendered], images=[[image]], add_special_tokens=False, return_tensors="pt")
        assert row["input_ids"] == given["input_ids"][0].tolist()
        assert learned(processor, row) == source["messages"][1]["content"] + "<|im_end|>"
        assert row["images"] == [str(path.parent / source["images"][0])]
        theirs.append(given)
    collate = collator_for(config, processor)
    for row, given in zip(prepared.dataset, theirs, strict=True):
        batch = collate([row])
        assert {*given} - {"input_ids", "attention_mask"} == {*batch} - {"input_ids", "attention_mask", "labels"}
        for key in given:
            assert (batch[key] == given[key]).all(), key
    model = AutoModelForImageTextToText.from_pretrained(folders[name]).train()
    model(**collate(list(prepared.dataset)[:3])).loss.backward()
    seen = [weight.grad for path, weight in model.named_parameters() if "vision" in path or "visual" in path]
    assert any(grad is not None and grad.abs().sum() > 0 for grad in seen)


def test_every_way_to_give_an_image_gives_the_same_row(
    tmp_path: Path, write: Callable[..., Path], make_config: Callable[..., Any], processors: dict[str, Any]
) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    path = picture(tmp_path)
    content = path.read_bytes()
    text = base64.b64encode(content).decode()
    part: Callable[..., list[Any]] = lambda **image: [{"type": "image", **image}, {"type": "text", "text": "What?"}]  # noqa: E731
    rows = [
        asked("<image>What?", images=["cat.png"]),
        asked("<image>What?", images="cat.png"),
        asked("<image>What?", images=[str(path)]),
        asked("<image>What?", images=[f"file://{path}"]),
        asked("<image>What?", images=[text]),
        asked("<image>What?", images=[f"data:image/png;base64,{text}"]),
        asked("<image>What?", images=[{"bytes": None, "path": "cat.png"}]),
        asked("What?", images=["cat.png"]),
        asked(part(image="cat.png")),
        asked(part(path="cat.png")),
        asked([{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}, {"type": "text", "text": "What?"}]),
        asked(part(), images=["cat.png"]),
        {"prompt": "<image>What?", "completion": "It is a cat.", "images": ["cat.png"]},
    ]  # fmt: skip
    found = []
    for number, row in enumerate(rows):
        prepared = prepare(make_config(write([row], f"{number}.jsonl")), processors["idefics3"])
        found.append((prepared.dataset[0]["input_ids"], prepared.dataset[0]["labels"]))
        assert open_image(prepared.dataset[0]["images"][0]).size == (40, 30)
    table = arrow.Table.from_pylist([asked("<image>What?", images=[{"bytes": content, "path": None}])])
    parquet.write_table(table, tmp_path / "rows.parquet")
    prepared = prepare(make_config(tmp_path / "rows.parquet"), processors["idefics3"])
    found.append((prepared.dataset[0]["input_ids"], prepared.dataset[0]["labels"]))
    assert all(each == found[0] for each in found)
    assert processors["idefics3"].image_token_id in found[0][0]
    # A prompt alone is what stands before the answer, and the rewards are told of the image beside the row's other columns.
    table = table.append_column("kind", [["cat"]])
    parquet.write_table(table, tmp_path / "rows.parquet")
    more = [
        {"prompt": "<image>What?", "answer": "It is a cat.", "image": "cat.png"},
        {"prompt": "What?", "answer": "It is a cat.", "image": {"path": "cat.png"}},
        {"prompt": [{"role": "user", "content": part(image="cat.png")}], "answer": "It is a cat."},
    ]
    paths = [write([{**row, "kind": "cat"}], f"prompt-{number}.jsonl") for number, row in enumerate([*rows, *more])]
    learned_from = found[0][1].index(next(label for label in found[0][1] if label != IGNORED))
    for each in (*paths, tmp_path / "rows.parquet"):
        row = prepare(make_config(each, method="grpo"), processors["idefics3"]).dataset[0]
        assert row["prompt_ids"] == found[0][0][:learned_from], each
        columns = reward_columns(row)
        assert (columns["kind"], columns["answer"]) == ("cat", "It is a cat.")
        assert open_image(columns["images"][0]).size == (40, 30)
        assert "bytes" not in row["columns"]
        assert ["".join(map(written, json.loads(row["prompt"])))] == ["<image>What?"]


def test_several_images_keep_their_order_and_rows_of_text_stand_beside_them(
    tmp_path: Path, write: Callable[..., Path], make_config: Callable[..., Any], processors: dict[str, Any]
) -> None:
    wide, tall = picture(tmp_path, "wide.png", (64, 32)), picture(tmp_path, "tall.png", (32, 64))
    rows = [asked("No image.")] * 300
    rows += [asked("First <image> then <image>.", images=["wide.png", "tall.png"])]
    config = make_config(write(rows))
    prepared = prepare(config, processors["idefics3"])
    last = prepared.dataset[300]
    assert last["images"] == [str(wide), str(tall)]
    text = processors["idefics3"].tokenizer.decode(last["input_ids"])
    between = text.partition("First ")[2].partition(" then ")
    assert "<row_1_col_2>" in between[0]
    assert "<row_2_col_1>" not in between[0]
    assert "<row_2_col_1>" in between[2]
    batch = collator_for(config, processors["idefics3"])([prepared.dataset[0], last])
    assert batch["pixel_values"].shape[:2] == (1, 6)
    assert "pixel_values" not in collator_for(config, processors["idefics3"])([prepared.dataset[0]])


def test_a_text_to_read_on_learns_all_but_the_images(
    tmp_path: Path, write: Callable[..., Path], make_config: Callable[..., Any], processors: dict[str, Any]
) -> None:
    picture(tmp_path)
    rows = [{"text": "Here <image> it stands.", "images": ["cat.png"]}]
    for name in FAMILIES:
        row = prepare(make_config(write(rows), method="pretrain"), processors[name]).dataset[0]
        told = learned(processors[name], row)
        # A space that one token holds together with the beginning of an image is the image's.
        assert told.split() == ["Here", "it", "stands.<|im_end|>"]


@pytest.mark.parametrize("name", SOME)
def test_tokens_with_those_of_images_are_taken_as_they_are(
    tmp_path: Path, write: Callable[..., Path], make_config: Callable[..., Any], processors: dict[str, Any], name: str
) -> None:
    """Rows of text and rows of their tokens give one row; tokens that the processor would not make are named."""
    picture(tmp_path)
    picture(tmp_path, "wide.png", (90, 30))
    processor, images = processors[name], ["cat.png", "wide.png"]
    one, other = (
        {"text": "Here <image> and <image> it stands.", "images": images},
        {"text": "It stands.", "images": images[:1]},
    )

    def config(rows: list[dict[str, Any]], file: str) -> Any:
        source = DataSource(path=str(write(rows, file)), format="multimodal_pretrain")
        return make_config(method="pretrain", source=[source])

    raw = prepare(config([one, other], "raw.jsonl"), processor).dataset
    ids = [row["input_ids"] for row in raw]
    own = {
        "_mm_text": one["text"],
        "images": images,
        "input_ids": [*ids[0], 0, 0],
        "attention_mask": [1] * len(ids[0]) + [0, 0],
    }
    own["labels"] = [*raw[0]["labels"], IGNORED, IGNORED]
    made = prepare(config([own, {"images": images[:1], "input_ids": ids[1]}], "made.jsonl"), processor).dataset
    for before, after in zip(raw, made, strict=True):
        assert {key: before[key] for key in ("input_ids", "images")} == {
            key: after[key] for key in ("input_ids", "images")
        }
    assert made[0]["labels"] == raw[0]["labels"]
    seen = set(processor.tokenizer(processor.image_token, add_special_tokens=False)["input_ids"])
    assert not seen & set(made[1]["labels"])
    batch = collator_for(config([one], "one.jsonl"), processor)([made[0]])
    assert "pixel_values" in batch
    strange = next(token for token in range(50, 200) if token not in seen)
    short = [token for token in ids[0] if token not in seen] + [strange]
    for bad, words in (
        ({"images": images, "input_ids": short}, "do not hold the"),
        ({"images": images[:1], "input_ids": ids[0]}, "hold more tokens of images than the row's 1 image make"),
        ({"images": images, "input_ids": ids[0], "attention_mask": [2]}, "must hold a 0 or a 1"),
    ):
        with pytest.raises(DataError, match=words) as refused:
            prepare(config([own, bad], "bad.jsonl"), processor)
        assert "bad.jsonl:2: " in str(refused.value)


def test_positions_of_images_count_rows_and_columns(
    tmp_path: Path, write: Callable[..., Path], make_config: Callable[..., Any], folders: dict[str, Path], processors: dict[str, Any]
) -> None:  # fmt: skip
    """Two images side by side, and a row of text in one batch: what the model's attention is given, counted by hand."""
    from unittest import mock

    from transformers import AutoModelForImageTextToText

    picture(tmp_path, "wide.png", (64, 32))
    rows = [{"text": "See <image><image> there.", "images": ["wide.png", "wide.png"]}, {"text": "No image at all."}]
    for name in ("qwen2_5_vl", "qwen3_vl", "glm4v"):
        processor, config = processors[name], make_config(write(rows), method="pretrain")
        prepared = prepare(config, processor).dataset
        batch = collator_for(config, processor)(list(prepared))
        ids, expected, at, column = batch["input_ids"][0].tolist(), [], 0, 0
        for token in ids:
            if token != processor.image_token_id:
                expected.append((at, at, at))
                at, column = at + 1, 0
                continue
            # 64 x 32 pixels are 4 x 2 tokens; an image begins anew behind its eighth.
            expected.append((at, at + column // 4, at + column % 4))
            column += 1
            at += 4 if column == 8 else 0
        model = AutoModelForImageTextToText.from_pretrained(folders[name])
        language = model.model.language_model
        with mock.patch.object(language, "forward", wraps=language.forward) as seen:
            model(**batch)
        positions = seen.call_args.kwargs["position_ids"]
        assert positions[:, 0].T.tolist() == [list(each) for each in expected], name
        assert ids.count(processor.image_token_id) == 16
        long = len(prepared[1]["input_ids"])
        assert positions[:, 1, :long].tolist() == [list(range(long))] * 3


def test_a_saved_processor_has_its_video_settings_again(tmp_path: Path, processors: dict[str, Any]) -> None:
    for name in ("qwen2_5_vl", "smolvlm"):
        processors[name].save_pretrained(tmp_path / name)
        kept = json.loads((tmp_path / name / "processor_config.json").read_text())
        assert kept["processor_class"] == type(processors[name]).__name__
        assert kept["video_processor"]["fps"] == 2
        assert loaded(tmp_path / name, image_backend="pil").to_dict() == processors[name].to_dict()


def test_pixel_limits_decide_the_tokens_of_an_image(
    tmp_path: Path, write: Callable[..., Path], make_config: Callable[..., Any], folders: dict[str, Path]
) -> None:
    picture(tmp_path, "large.png", (512, 256))
    picture(tmp_path, "small.png", (16, 16))
    path = write([asked("<image>What?", images=[name]) for name in ("large.png", "small.png")])
    for name in ("qwen2_5_vl", "glm4v"):
        limits = {"min_pixels": 2048, "max_pixels": 4096}
        processor, config = loaded(folders[name], **limits), make_config(path, **limits)
        sizes: list[list[int]] = []
        for row in prepare(config, processor).dataset:
            batch = collator_for(config, processor)([row])
            _, high, wide = batch["image_grid_thw"][0].tolist()
            assert 2048 <= high * wide * 64 <= 4096, name
            assert row["input_ids"].count(processor.image_token_id) == high * wide // 4
            sizes.append([wide * 8, high * 8])
        shown = [preview(config, processor, {"kind": "index", "index": index})["rows"][0] for index in (0, 1)]
        images = [row["images"][0] for row in shown]
        assert [(image["width"], image["height"]) for image in images] == [(512, 256), (16, 16)]
        assert [image["resized"] for image in images] == sizes != [[512, 256], [16, 16]], name
        # The marks around an image are its too.
        assert [image["tokens"] for image in images] == [wide * high // 256 + 2 for wide, high in sizes]
        processor.save_pretrained(tmp_path / name)
        assert loaded(tmp_path / name).image_processor.size == processor.image_processor.size
    for name in ("idefics3", "gemma3", "internvl"):
        with pytest.raises(ModelError, match=r"data\.max_pixels: \w+ makes images of sizes of its own"):
            loaded(folders[name], max_pixels=4096)
    with pytest.raises(ModelError, match="9,999 pixels at least and 8,192 at most leave none"):
        loaded(folders["qwen2_5_vl"], min_pixels=9999)


def test_rows_prepared_with_other_tokens_an_image_are_not_taken(
    tmp_path: Path, write: Callable[..., Path], make_config: Callable[..., Any], folders: dict[str, Path]
) -> None:
    picture(tmp_path)
    config = make_config(write([asked("<image>What?", images=["cat.png"])]))
    made = []
    for tokens in (4, 9, 4):
        processor = loaded(folders["idefics3"])
        processor.image_seq_len = tokens  # which the processor says, not its image processor
        prepared = prepare(config, processor)
        made.append((prepared.cached, prepared.dataset[0]["input_ids"].count(processor.image_token_id) % tokens))
    assert made == [(False, 0), (False, 0), (True, 0)]


def test_every_limit_of_pixels_counts_as_transformers_does() -> None:
    """On each of the processors that keep shapes: the limits that are named hold for the image as it is resized."""
    import transformers

    from engine.model_files import KEEP_SHAPE

    for name, times in KEEP_SHAPE.items():
        reader = getattr(transformers, f"{name}Pil")()
        for size, least, most in (((1000, 800), 0.8, 1.0), ((20, 30), 1.0, 1.3)):
            limit = 100_000
            reader.size = type(reader.size)(shortest_edge=limit * times, longest_edge=limit * times)
            _, high, wide = reader([Image.new("RGB", size)], return_tensors="pt")["image_grid_thw"][0].tolist()
            assert least <= high * wide * reader.patch_size**2 / limit <= most, name


def test_images_are_read_by_one_library_and_the_choice_is_kept(
    tmp_path: Path,
    write: Callable[..., Path],
    make_config: Callable[..., Any],
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chosen at launch by what is installed, then asked for by name: a machine that lacks it refuses to go on."""
    from engine.config.facts import Facts, ModelFacts
    from engine.models import processors as module
    from engine.planning.auto import choices, resolved
    from engine.rules import read

    config = read({"model": {"name": "m"}, "data": {"train": [{"path": "r.jsonl"}]}}).config
    for seeing, here, chosen in ((True, "0.28.0", "torchvision"), (True, None, "pil"), (False, None, "pil")):
        facts = Facts(model=ModelFacts("m", processor=seeing), packages={"torchvision": here})
        assert resolved(config, facts).data.image_backend == chosen
        assert ("data.image_backend" in choices(config, facts)) is seeing
    monkeypatch.setattr(module, "installed", lambda package: None)
    with pytest.raises(ModelError, match="torchvision is asked for, which is not installed"):
        loaded(folders["idefics3"], image_backend="torchvision")
    # A run that began on Pillow goes on with it where torchvision is installed since then.
    monkeypatch.setattr(module, "installed", lambda package: "0.28.0")
    processor = loaded(folders["qwen2_5_vl"], image_backend="pil")
    assert processor.image_processor.backend == "pil"
    picture(tmp_path)
    config = make_config(write([asked("<image>What?", images=["cat.png"])]))
    assert not prepare(config, processor).cached
    assert prepare(config, processor).cached
    monkeypatch.setattr("engine.data.cache.read_by", lambda processor: "torchvision 0.28.0")
    assert not prepare(config, processor).cached


def test_what_torchvision_alone_reads_is_refused_with_the_way_out(tmp_path: Path, folders: dict[str, Path]) -> None:
    from engine.facts.model_shape import model_facts

    for kind, reader in (("PixtralProcessor", "PixtralImageProcessor"), ("Lfm2VlProcessor", "Lfm2VlImageProcessor")):
        folder = tmp_path / kind
        shutil.copytree(folders["qwen2_5_vl"], folder)
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": kind}))
        (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": reader}))
        with pytest.raises(ModelError, match="reads images by torchvision alone") as told:
            loaded(folder, image_backend="pil")
        assert "pip install torchvision" in told.value.full_message
        facts = model_facts(str(folder))
        assert facts is not None
        assert (facts.by_torchvision, facts.keeps_shape) == (True, False)
    facts = model_facts(str(folders["qwen2_5_vl"]))
    assert facts is not None
    assert (facts.by_torchvision, facts.keeps_shape) == (False, True)


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: None, "there is no such file"),
    "empty": (lambda path: path.write_bytes(b""), r"the file is empty \(0 bytes\)"),
    "text": (lambda path: path.write_text("no image at all"), "is no image"),
    "cut": (lambda path: path.write_bytes(noise("PNG")[:2000]), "it is cut or broken"),
    "cut jpeg": (lambda path: path.write_bytes(noise("JPEG")[:1500]), "it is cut or broken"),
    "one pixel": (lambda path: Image.new("RGB", (1, 1)).save(path, "PNG"), "is one pixel"),
    "bomb": (lambda path: claims(path, 30_000), "pixels"),
    "large": (lambda path: claims(path, 10_000), "10,000 x 10,000 pixels"),
    "animated": (lambda path: several(path, "GIF"), "has 3 frames"),
    "pages": (lambda path: several(path, "TIFF"), "has 3 pages"),
    "cut gif": (lambda path: several(path, "GIF", cut=40), "it is cut or broken"),
    "torn tiff": (lambda path: torn(path), "it is cut or broken"),
    "folder": (lambda path: path.mkdir(), "is no plain file"),
    "loop": (lambda path: path.symlink_to(path), "is a loop of links"),
    "link out": (lambda path: path.symlink_to("/etc/hostname"), "a link leads out of"),
}  # fmt: skip


def noise(kind: str) -> bytes:
    made = io.BytesIO()
    Image.frombytes("RGB", (64, 64), os.urandom(64 * 64 * 3)).save(made, kind)
    return made.getvalue()


def claims(path: Path, side: int) -> None:
    """Says that it is so large, and holds a pixel: what is refused by its size is never decoded."""
    Image.new("1", (1, 1)).save(path, "PNG")
    made = bytearray(path.read_bytes())
    made[16:24] = struct.pack(">II", side, side)
    made[29:33] = struct.pack(">I", zlib.crc32(made[12:29]))
    path.write_bytes(made)


def torn(path: Path) -> None:
    """The place of the next page is beyond the file."""
    Image.new("RGB", (4, 4)).save(path, "TIFF")
    made = bytearray(path.read_bytes())
    last = 8 + 2 + 12 * made[8]
    made[last : last + 4] = b"\xff\0\0\0"
    path.write_bytes(made)


def several(path: Path, kind: str, cut: int = 0) -> None:
    frames = [Image.new("L", (8, 8), shade) for shade in (0, 100, 200)]
    frames[0].save(path, kind, save_all=True, append_images=frames[1:])
    if cut:
        path.write_bytes(path.read_bytes()[:-cut])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_named_by_file_and_row_and_skipped_where_asked(
    tmp_path: Path, write: Callable[..., Path], make_config: Callable[..., Any], processors: dict[str, Any], name: str
) -> None:
    make, sentence = BAD[name]
    picture(tmp_path)
    make(tmp_path / "bad.png")
    rows = [asked("<image>What?", images=["cat.png"]), asked("<image>What?", images=["bad.png"])]
    path = write(rows)
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: row 1: .*bad\.png: .*{sentence}"):
        prepare(make_config(path), processors["idefics3"])
    prepared = prepare(make_config(path, on_bad_row="skip"), processors["idefics3"])
    assert prepared.counts["bad"] == 1
    assert len(prepared.dataset) == 1
    shown = preview(make_config(path, on_bad_row="skip"), processors["idefics3"], {"kind": "index", "index": 1})
    assert "bad.png" in shown["rows"][0]["error"]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (asked("<image> and <image>?", images=["cat.png"]), "2 places for images, and column images holds 1 image"),
        (asked("<image>?", images=["cat.png", "cat.png"]), "1 place for images, and column images holds 2 images"),
        (asked("<image>?", images=[]), "1 place for images, and column images holds 0 images"),
        (asked("<image>?"), "1 place for images and the row has 0 images"),
        (asked("<image>?", images=["../cat.png"]), "the path leads out of"),
        (asked("<image>?", images=["http://x.org/cat.png"]), "not from a server"),
        (asked("<image>?", images=["data:image/png;base64,%%%"]), "is empty|no whole base64"),
        (asked("<image>?", images=[{"caption": "a cat"}]), "must have bytes or a path"),
        (asked("<image>?", images=[7]), "an image must be a path, bytes, base64 or a data URI"),
    ],
)
def test_places_and_images_that_differ_are_told_with_the_row(
    tmp_path: Path, write: Callable[..., Path], make_config: Callable[..., Any], processors: dict[str, Any], row: Any, sentence: str
) -> None:  # fmt: skip
    picture(tmp_path)
    path = write([asked("<image>What?", images=["cat.png"]), row])
    with pytest.raises(DataError) as told:
        prepare(make_config(path), processors["idefics3"])
    assert "rows.jsonl:2" in told.value.full_message
    assert any(each in told.value.message for each in sentence.split("|"))


def test_paths_stay_below_the_folder_that_the_config_names(
    tmp_path: Path, write: Callable[..., Path], make_config: Callable[..., Any], processors: dict[str, Any]
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    inside, outside = picture(images), picture(tmp_path, "other.png")
    path = write([asked("<image>What?", images=["cat.png"])])
    prepared = prepare(make_config(path, image_base_dir=str(images)), processors["idefics3"])
    assert prepared.dataset[0]["images"] == [str(inside)]
    with pytest.raises(DataError, match="there is no such file"):
        prepare(make_config(path), processors["idefics3"])
    picture(images, unicodedata.normalize("NFD", "caf\u00e9.png"))
    path = write([asked("<image>What?", images=["caf\u00e9.png"])], "accents.jsonl")
    with pytest.raises(DataError, match="there is no such file") as told:
        prepare(make_config(path, image_base_dir=str(images)), processors["idefics3"])
    assert "in another form of Unicode (NFD)" in told.value.full_message
    path = write([asked("<image>What?", images=[str(outside)])], "absolute.jsonl")
    assert len(prepare(make_config(path), processors["idefics3"]).dataset) == 1
    with pytest.raises(DataError, match="the path leads out of"):
        prepare(make_config(path, image_base_dir=str(images)), processors["idefics3"])


def test_images_are_read_as_people_see_them(tmp_path: Path) -> None:
    turned = Image.new("RGB", (40, 20), "white")
    turned.paste("black", (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.png", exif=exif)
    upright = open_image(str(tmp_path / "turned.png"))
    assert upright.size == (20, 40)
    assert upright.getpixel((10, 5)) == (0, 0, 0)
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "cmyk.tif")
    assert open_image(str(tmp_path / "cmyk.tif")).getpixel((0, 0)) == (255, 0, 0)
    Image.new("P", (8, 8), 1).save(tmp_path / "palette.png")
    assert open_image(str(tmp_path / "palette.png")).mode == "RGB"
    Image.new("I;16", (8, 8), 32_896).save(tmp_path / "grey.png")
    assert open_image(str(tmp_path / "grey.png")).getpixel((0, 0)) == (128, 128, 128)
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert open_image(str(tmp_path / "clear.png")).getpixel((0, 0)) == (255, 255, 255)


def test_no_image_is_ever_cut(
    tmp_path: Path, write: Callable[..., Path], make_config: Callable[..., Any], processors: dict[str, Any]
) -> None:
    picture(tmp_path)
    rows = [
        asked("<image>What?", "cat " * 60, images=["cat.png"]),
        asked("What is it? " * 20 + "<image>", images=["cat.png"]),
    ]
    path, processor = write(rows), processors["idefics3"]
    whole = prepare(make_config(path), processor).dataset
    places = [place for place, each in enumerate(whole[0]["input_ids"]) if each == processor.image_token_id]
    kept = prepare(make_config(path, max_length=places[-1] + 20, excess_length="truncate"), processor)
    assert [row["row"] for row in kept.dataset] == [0]
    assert (kept.counts["truncated"], kept.counts["dropped"]) == (1, 1)
    assert kept.dataset[0]["input_ids"].count(processor.image_token_id) == len(places)
    collator_for(make_config(path), processor)(list(kept.dataset))
    for settings in ({"max_length": places[-1]}, {"max_length": 100, "truncation_side": "left"}):
        with pytest.raises(DataError, match=r"2 of 2 rows are longer than data\.max_length and are left out"):
            prepare(make_config(path, excess_length="truncate", **settings), processor)
    with pytest.raises(DataError, match=r"row 0 is longer than data\.max_length"):
        prepare(make_config(path, max_length=100), processor)


def test_what_cannot_serve_images_refuses_by_name(
    tmp_path: Path, write: Callable[..., Path], make_config: Callable[..., Any], processors: dict[str, Any], minimind: Any
) -> None:  # fmt: skip
    picture(tmp_path)
    path = write([asked("<image>What?", images=["cat.png"])])
    with pytest.raises(DataError, match="rows with images are not packed"):
        prepare(make_config(path, packing=True), processors["idefics3"])
    with pytest.raises(DataError, match="this model has no processor for them"):
        prepare(make_config(path), minimind)
    turns = asked("<image>What?")["messages"]
    pair = {"prompt": turns[:1], "chosen": turns[1:], "rejected": [{"role": "assistant", "content": "A dog."}]}
    path = write([{**pair, "images": ["cat.png"]}], "pairs.jsonl")
    with pytest.raises(DataError, match="the row has images, which method reward does not learn from yet"):
        prepare(make_config(path, method="reward"), processors["idefics3"])
    with pytest.raises(DataError, match="which method ppo does not learn from yet") as refused:
        prepare(
            make_config(write([{"prompt": "<image>?", "images": ["cat.png"]}]), method="ppo"), processors["idefics3"]
        )
    assert refused.value.hint == "Choose method grpo or gdpo, or rows of text."


def test_pairs_and_rated_rows_keep_the_images_of_their_prompt(
    tmp_path: Path, write: Callable[..., Path], make_config: Callable[..., Any], processors: dict[str, Any]
) -> None:
    picture(tmp_path)
    processor = processors["qwen2_5_vl"]
    question = [{"role": "user", "content": "<image>What is it?"}]
    right, wrong = ([{"role": "assistant", "content": text}] for text in ("A cat.", "A dog, I am quite sure of it."))
    seen = {"prompt": question, "images": ["cat.png"]}
    words = {"prompt": [{"role": "user", "content": "What is it?"}], "images": []}
    rows = {
        "dpo": [{**each, "chosen": right, "rejected": wrong} for each in (seen, words)],
        "kto": [{**seen, "completion": right, "label": True}, {**words, "completion": wrong, "label": False}],
    }
    asked_alone = prepare(make_config(write([asked("<image>What is it?", "A cat.", images=["cat.png"])])), processor)
    for method, given in rows.items():
        path = write(given, f"{method}.jsonl")
        config = make_config(path, method=method)
        config.method = config.method.model_copy(update={"loss_type": "kto"})
        prepared = prepare(config, processor).dataset
        first = prepared[0]
        answer = first["chosen_ids" if method == "dpo" else "completion_ids"]
        assert first["prompt_ids"] + answer == asked_alone.dataset[0]["input_ids"]
        assert [row["images"] for row in prepared] == [[str(tmp_path / "cat.png")], []]
        batch = collator_for(config, processor)(list(prepared))
        assert len(batch["image_grid_thw"]) == (2 if method == "dpo" else 1)
        names = ("input_ids", "mm_token_type_ids")
        for ids, kinds in (names, *([(f"KL_{name}" for name in names)] if method == "kto" else [])):
            assert batch[kinds].tolist() == (batch[ids] == processor.image_token_id).int().tolist()
        shown = preview(config, processor, {"kind": "index", "index": 0})["rows"][0]
        (image,) = shown["images"]
        tokens = first["prompt_ids"][image["start"] : image["end"]]
        assert processor.tokenizer.decode(tokens).startswith("<|vision_start|><|image_pad|>")
        assert tokens[1:-1] == [processor.image_token_id] * (image["tokens"] - 2)
        # An answer may be cut, an image never.
        whole = make_config(path, method=method, excess_length="truncate", max_length=len(first["prompt_ids"]) + 3)
        assert prepare(whole, processor).counts["truncated"]
        cut = make_config(path, method=method, excess_length="truncate", max_length=image["end"] - 1)
        with pytest.raises(DataError, match=r"1 of 2 rows are longer than data\.max_length and are left out"):
            prepare(cut, processor)
        part = "chosen" if method == "dpo" else "completion"
        bad = write([{**given[0], part: [{"role": "assistant", "content": "<image>"}]}], "bad.jsonl")
        with pytest.raises(DataError, match="2 places for images, and column images holds 1 image"):
            prepare(make_config(bad, method=method), processor)


def test_a_prompt_alone_is_shown_with_its_images_and_never_cut_through_one(
    tmp_path: Path, write: Callable[..., Path], make_config: Callable[..., Any], processors: dict[str, Any]
) -> None:
    picture(tmp_path)
    processor = processors["qwen2_5_vl"]
    rows = [{"prompt": "<image>What is it?", "images": ["cat.png"]}, {"prompt": "And it?", "images": []}]
    config = make_config(path := write(rows), method="grpo")
    first, second = prepare(config, processor).dataset
    assert (first["images"], second["images"]) == ([str(tmp_path / "cat.png")], [])
    shown = preview(config, processor)["rows"][0]
    (image,) = shown["images"]
    items = shown["parts"]["prompt"]
    assert [item["id"] for item in items] == first["prompt_ids"]
    tokens = first["prompt_ids"][image["start"] : image["end"]]
    assert processor.tokenizer.decode(tokens).startswith("<|vision_start|><|image_pad|>")
    assert tokens.count(processor.image_token_id) == first["prompt_ids"].count(processor.image_token_id) > 0
    assert open_image(image["thumbnail"]).getpixel((0, 0)) == (200, 30, 30)
    for side, limit in (("right", image["end"] - 1), ("left", len(first["prompt_ids"]) - 1)):
        cut = make_config(path, method="grpo", excess_length="truncate", truncation_side=side, max_length=limit)
        assert [row["images"] for row in prepare(cut, processor).dataset] == [[]]
    bad = write([{"prompt": "<image><image>What is it?", "images": ["cat.png"]}], "bad.jsonl")
    with pytest.raises(DataError, match="2 places for images, and column images holds 1 image"):
        prepare(make_config(bad, method="grpo"), processor)


def test_an_image_that_changed_is_prepared_anew_or_named(
    tmp_path: Path, write: Callable[..., Path], make_config: Callable[..., Any], processors: dict[str, Any]
) -> None:
    picture(tmp_path, size=(64, 32))
    config = make_config(write([asked("<image>What?", images=["cat.png"])]))
    first = prepare(config, processors["idefics3"])
    assert prepare(config, processors["idefics3"]).cached
    picture(tmp_path, size=(64, 64))
    with pytest.raises(DataError, match=r"cat\.png: gives 20 image tokens, and its row was prepared with 12"):
        collator_for(config, processors["idefics3"])(list(first.dataset))
    again = prepare(config, processors["idefics3"])
    assert not again.cached
    assert len(again.dataset[0]["input_ids"]) > len(first.dataset[0]["input_ids"])


@pytest.mark.parametrize("name", NAMES)
def test_the_preview_shows_the_batch_with_its_images(
    tmp_path: Path, write: Callable[..., Path], make_config: Callable[..., Any], processors: dict[str, Any], name: str
) -> None:
    path = picture(tmp_path)
    config = make_config(write([asked("See <image> here.", images=["cat.png"])]))
    shown = preview(config, processors[name])["rows"][0]
    items = shown["parts"]["input"]
    assert [item["id"] for item in items] == prepare(config, processors[name]).dataset[0]["input_ids"]
    assert "".join(item["text"] for item in items if item["trained"]) == "It is a cat.<|im_end|>"
    (image,) = shown["images"]
    assert (image["name"], image["width"], image["height"]) == (str(path), 40, 30)
    tokens = items[image["start"] : image["end"]]
    assert len(tokens) == image["tokens"]
    ids = set(processors[name].image_token_ids)
    assert sum(item["id"] in ids for item in tokens) == sum(item["id"] in ids for item in items) > 0
    assert not any(item["trained"] for item in tokens)
    assert open_image(image["thumbnail"]).getpixel((0, 0)) == (200, 30, 30)
    assert [turn["role"] for turn in shown["turns"]] == ["user", "assistant"]


@pytest.mark.parametrize(("told", "asked_for"), [({"return_mm_token_type_ids": True}, True), ({}, False)])
def test_which_tokens_are_an_images_is_told_as_releases_before_5_18_ask_for_it(told: Any, asked_for: bool) -> None:
    kwargs = SimpleNamespace(_defaults={"text_kwargs": told})
    processor = SimpleNamespace(
        image_token="<image>", image_token_ids=[7], valid_processor_kwargs=kwargs, model_input_names=["mm_token_type_ids"],
        create_mm_token_type_ids=lambda ids: [[int(each == 7) for each in row] for row in ids],
    )  # fmt: skip
    kinds = ImageBatch(processor).kinds(torch.tensor([[1, 7, 7, 2]]))
    assert {name: each.tolist() for name, each in kinds.items()} == (
        {"mm_token_type_ids": [[0, 1, 1, 0]]} if asked_for else {}
    )
