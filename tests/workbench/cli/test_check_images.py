"""`workbench check` looks at rows with images: what would end the run after its launch is told before it, without torch."""

from __future__ import annotations

import base64
import json
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from engine.builtin import tiny
from tests import warm

CODE = (
    "import sys\nfrom workbench.cli.check import command\n"
    "code = command.main(sys.argv[1:], standalone_mode=False)\n"
    "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()\nsys.exit(code)"
)
TEXT = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a whole image, and a model that says it has a processor for images."""
    Image.effect_noise((200, 200), 50).convert("RGB").save(tmp_path / "cat.png")
    Image.effect_noise((200, 200), 50).convert("RGB").save(tmp_path / "cat.jpg")
    shutil.copytree(tiny.folder(), tmp_path / "seeing")
    (tmp_path / "seeing" / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    return tmp_path


def parts(image: Any, **keys: Any) -> dict[str, Any]:
    asked = [{"type": "image", "image": image, **keys}, {"type": "text", "text": "What is it?"}]
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "A cat."}]}


def column(image: Any, name: str = "images") -> dict[str, Any]:
    turns = [{"role": "user", "content": "<image> What is it?"}, {"role": "assistant", "content": "A cat."}]
    return {"messages": turns, name: [image] if name == "images" else image}


def errors(place: Path, *rows: dict[str, Any], **sections: Any) -> list[str]:
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"model": {"name": "seeing"}, "data": {"train": [{"path": "rows.jsonl"}]}, **sections}
    (place / "my.yaml").write_text(json.dumps(config))
    done = warm.command(str(place / "my.yaml"), "--json", code=CODE)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    found = [each for each in json.loads(done.stdout)["findings"] if each["severity"] == "error"]
    assert done.returncode == bool(found)
    return [each["message"] for each in found]


def test_rows_whose_images_are_whole_are_taken(place: Path) -> None:
    rows = [parts("cat.png"), column(str(place / "cat.jpg")), column("cat.png", "image"), TEXT]
    assert errors(place, *rows) == []


def test_the_first_bad_row_is_told_whatever_is_wrong_with_it_and_where_the_others_are(place: Path) -> None:
    many = {"messages": [{"role": "user", "content": "<image><image>"}, TEXT["messages"][1]], "images": ["cat.png"]}
    good = column("cat.png")
    (told,) = errors(place, good, column("dog.png"), good, many, column("cow.png"), TEXT)
    assert told.startswith("data.train.0.path: line 2: dog.png: there is no such file.")
    assert "The others: lines 4, 5." in told
    (told,) = errors(place, many, good, column("dog.png"), good)
    assert told.startswith("data.train.0.path: line 1: the text has 2 places for images")
    assert "The other: line 3." in told
    (told,) = errors(place, good, *[column(f"{number}.png") for number in range(20)])
    assert "The others: lines 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14 and 7 more." in told


@pytest.mark.parametrize("row", [parts("cat.png"), column("cat.png")])
def test_images_in_any_row_are_refused_by_a_model_that_has_no_processor(place: Path, row: dict[str, Any]) -> None:
    (told,) = errors(place, TEXT, TEXT, row, model={"name": "builtin/tiny"})
    assert told.startswith("data.train.0.path: must be rows that the model can read; got rows with images (line 3).")
    assert "builtin/tiny has no processor for images: take a model that has one" in told
    (told,) = errors(place, column("cat.png", "image"), model={"name": "builtin/tiny"})
    assert "got rows with images (line 1)." in told


@pytest.mark.parametrize("written", ["column", "part"])
def test_images_are_refused_by_a_method_that_would_not_look_at_them(place: Path, written: str) -> None:
    asked: Any = "<image> What is it?"
    if written == "part":
        asked = parts("cat.png")["messages"][:1]
    answers = ("a cat", "a dog") if written == "column" else ([TEXT["messages"][1]], [parts("x")["messages"][1]])
    row = {"prompt": asked, "chosen": answers[0], "rejected": answers[1]}
    row |= {"images": ["cat.png"]} if written == "column" else {}
    (told,) = errors(place, row, method={"kind": "reward"})
    assert told == (
        "data.train.0.path: must be rows without images; got rows with images (line 1). "
        "reward does not learn from images: take sft, dpo or kto, or rows of text."
    )


def test_images_beside_packing_are_refused_with_the_way_out(place: Path) -> None:
    told = errors(place, parts("cat.png"), data={"train": [{"path": "rows.jsonl"}], "packing": True})
    assert any("got rows with images (line 1). Images are not packed." in each for each in told)


def cut(place: Path, name: str) -> None:
    content = (place / name).read_bytes()
    (place / f"cut-{name}").write_bytes(content[: len(content) // 2])


def odd(place: Path) -> None:
    """Files that a header tells to be no image that a model sees."""
    image = Image.new("RGB", (8, 8))
    Image.new("RGB", (1, 1)).save(place / "dot.png")
    for name in ("dance.gif", "pages.tif"):
        image.save(place / name, save_all=True, append_images=[Image.new("RGB", (8, 8), "white")])
    dance = (place / "dance.gif").read_bytes()
    (place / "cut.gif").write_bytes(dance[: len(dance) // 2 + 8])
    image.save(place / "torn.tif")
    torn = bytearray((place / "torn.tif").read_bytes())
    torn[8 + 2 + 12 * torn[8] : 8 + 6 + 12 * torn[8]] = b"\xff\0\0\0"  # where the next page stands
    (place / "torn.tif").write_bytes(torn)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 0, 0, 0, 0)), (b"IDAT", zlib.compress(b"\0"))]
    written = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    (place / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(written))


@pytest.mark.parametrize("image", [7, None, {"width": 3}, "data:image/png;base64,xx"])
def test_what_is_no_image_at_all_is_named_with_its_line(place: Path, image: Any) -> None:
    (told,) = errors(place, TEXT, parts("cat.png"), column(image))
    assert told.startswith("data.train.0.path: line 3: "), told


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (
            "gone.png",
            "there is no such file. Relative paths begin at {place}; data.image_base_dir names another folder.",
        ),
        ("empty.png", "the file is empty (0 bytes)."),
        ("text.png", "this file holds no image."),
        ("cut-cat.png", "the image cannot be read"),
        ("cut-cat.jpg", "the image cannot be read"),
        (".", "is no plain file, so it holds no image."),
        ("https://example.com/cat.png", "images are read from files, not from a server."),
        ("dot.png", "the image is one pixel, which shows nothing."),
        ("bomb.png", "the image has more than 178,956,970 pixels, as only a decompression bomb has."),
        ("dance.gif", "the image has 2 frames, and a model sees one image."),
        ("cut.gif", "the image cannot be read (it is cut or broken)."),
        ("torn.tif", "the image cannot be read (it is cut or broken)."),
        ("pages.tif", "the image has 2 pages, and a model sees one image."),
    ],
)
def test_an_image_that_cannot_be_read_is_named_with_its_line(place: Path, image: str, reason: str) -> None:
    (place / "empty.png").touch()
    (place / "text.png").write_text("hello\n")
    cut(place, "cat.png")
    cut(place, "cat.jpg")
    odd(place)
    (told,) = errors(place, TEXT, parts("cat.png"), parts(image))
    assert told.startswith(f"data.train.0.path: line 3: {image}: {reason.format(place=place)}"), told


def test_an_image_that_stands_in_its_row_is_judged_like_a_file(place: Path) -> None:
    odd(place)
    cut(place, "cat.png")
    (place / "text.png").write_text("hello\n")
    for name, reason in (
        ("text.png", "these bytes hold no image."),
        ("cut-cat.png", "the image cannot be read"),
        ("dot.png", "the image is one pixel"),
        ("bomb.png", "the image has more than 178,956,970 pixels"),
    ):
        content = (place / name).read_bytes()
        plain = base64.b64encode(content).decode()
        given = [f"data:image/png;base64,{plain}", {"base64": plain}]
        told = errors(place, TEXT, *(column(image) for image in given))
        assert told[0].startswith(
            f"data.train.0.path: line 2: an image of {len(content):,} bytes in the row: {reason}"
        ), told
        assert "The other: line 3." in told[0]


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("../cat.png", "the path leads out of {place}/below. Images lie below their folder."),
        ("out.png", "a link leads out of {place}/below. Images lie below their folder."),
        ("/etc/hostname", "the path leads out of {place}/below. Images lie below their folder."),
        ("loop.png", "is a loop of links."),
        ("round/cat.png", "is a loop of links."),
    ],
)
def test_no_path_or_link_leads_out_of_the_folder_of_images_or_round_in_it(place: Path, image: str, reason: str) -> None:
    below = place / "below"
    below.mkdir()
    shutil.copy(place / "cat.png", below)
    (below / "here.png").symlink_to("cat.png")
    for name, target in (("out.png", "../cat.png"), ("loop.png", "loop.png"), ("round", "circle"), ("circle", "round")):
        (below / name).symlink_to(target)
    data = {"train": [{"path": "rows.jsonl"}], "image_base_dir": "below"}
    (told,) = errors(place, parts("here.png"), parts("cat.png"), parts(image), data=data)
    assert told.startswith(f"data.train.0.path: line 3: {image}: {reason.format(place=place)}"), told


def test_a_source_that_is_a_loop_of_links_is_said(place: Path) -> None:
    (place / "rows").symlink_to("rows")
    (told,) = errors(place, TEXT, data={"train": [{"path": "rows"}]})
    assert told == "data.train.0.path: is a link that leads nowhere, or in a circle."


def test_rows_whose_images_cannot_be_read_are_left_out_where_that_is_asked_for(place: Path) -> None:
    data = {"train": [{"path": "rows.jsonl"}], "on_bad_row": "skip"}
    assert errors(place, parts("cat.png"), parts("gone.png"), data=data) == []
    (told,) = errors(place, parts("gone.png"), parts("gone.png"), data=data)
    assert "line 1: gone.png: there is no such file" in told
