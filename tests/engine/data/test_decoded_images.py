"""Images that come again are decoded once while memory for them is left, and never as they were before they changed."""

from __future__ import annotations

import base64
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, JpegImagePlugin

import engine.data.vision as vision
from engine.data.vision import DecodedImages, open_image
from tests.engine.seeing import FAMILIES

SIDE = 512
EACH = 4 * SIDE * SIDE + vision.BESIDE


def pictures(folder: Path, count: int) -> list[str]:
    numbers = np.random.default_rng(0)
    paths = [str(folder / f"{number}.jpg") for number in range(count)]
    for path in paths:
        Image.fromarray(numbers.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(path)
    return paths


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The references that are decoded from now on."""
    found: list[str] = []

    def opening(reference: str) -> Any:
        found.append(reference)
        return open_image(reference)

    monkeypatch.setattr(vision, "open_image", opening)
    return found


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_comes_again_is_decoded_once_within_the_bound(tmp_path: Path, decoded: list[str]) -> None:
    paths = pictures(tmp_path, 64)
    kept = DecodedImages(8 * EACH + 1)
    for path in paths[:8] * 2:
        assert np.array_equal(np.array(kept(path)), np.array(open_image(path)))
    assert decoded == paths[:8]
    assert kept.held == 8 * EACH
    kept(paths[8])  # the one that was asked for longest ago makes room
    kept(paths[1])
    kept(paths[0])
    assert decoded == [*paths[:9], paths[0]]
    before = resident()
    for path in paths:
        kept(path)
        assert kept.held <= kept.most
    assert resident() - before < 16 * EACH  # of the 64
    del decoded[:]
    everything = DecodedImages(64 * EACH)
    for _ in range(3):
        for path in paths:
            everything(path)
    assert decoded == paths


def test_nothing_is_kept_where_none_may_be_and_none_that_is_larger(tmp_path: Path, decoded: list[str]) -> None:
    paths = pictures(tmp_path, 1)
    for most in (0, EACH - 1):
        kept = DecodedImages(most)
        kept(paths[0])
        kept(paths[0])
        assert kept.held == 0
    assert len(decoded) == 4


def test_what_files_hold_beside_their_pixels_is_not_kept(tmp_path: Path) -> None:
    """A profile, a thumbnail and notes are often larger than a small image."""
    paths = [str(tmp_path / f"{number}.{'jpg' if number % 2 else 'png'}") for number in range(400)]
    notes = Image.Exif()
    notes[0x010E] = "x" * 60_000
    for path in paths:
        Image.new("RGB", (16, 16)).save(path, exif=notes, icc_profile=os.urandom(60_000))
    kept = DecodedImages(64 << 20)
    before = resident()
    for path in paths:
        assert kept(path).info == {}
    assert resident() - before < kept.held + (8 << 20)
    assert np.array_equal(np.array(kept(paths[0])), np.array(open_image(paths[0])))


def test_an_image_that_is_larger_than_all_that_may_be_kept_drives_none_out(tmp_path: Path, decoded: list[str]) -> None:
    small, large = str(tmp_path / "small.png"), str(tmp_path / "large.png")
    Image.new("RGB", (64, 64)).save(small)
    Image.new("RGB", (2048, 2048)).save(large)
    kept = DecodedImages(EACH)
    for path in (small, large, small):
        kept(path)
    assert decoded == [small, large]


def test_an_image_that_changed_is_decoded_anew(tmp_path: Path) -> None:
    path = pictures(tmp_path, 1)[0]
    kept = DecodedImages(8 * EACH)
    kept(path)
    Image.new("RGB", (SIDE, SIDE), (1, 2, 3)).save(path)
    os.utime(path, ns=(1, 1))
    assert np.array_equal(np.array(kept(path)), np.array(open_image(path)))
    os.remove(path)
    with pytest.raises(vision.DataError, match="No such file"):
        kept(path)


def test_an_image_in_its_row_is_found_by_its_bytes(tmp_path: Path, decoded: list[str]) -> None:
    path = pictures(tmp_path, 1)[0]
    held = "data:;base64," + base64.b64encode(Path(path).read_bytes()).decode()
    kept = DecodedImages(8 * EACH)
    assert np.array_equal(np.array(kept(held)), np.array(kept(path)))
    kept("data:;base64," + held.partition(",")[2])
    assert decoded == [held, path]


def test_time_that_decoding_took_is_not_taken_again(shared_data: Path, tmp_path: Path) -> None:
    processor = FAMILIES["idefics3"](shared_data / "tokenizers/minimind", tmp_path / "idefics3")
    from tests.engine.seeing import real_processor

    batch = vision.ImageBatch(real_processor(processor), 64 * EACH)
    row = pictures(tmp_path, 8)
    ids = torch.tensor(
        batch.processor(text=[batch.token * 8], images=[[open_image(path) for path in row]], add_special_tokens=False)[
            "input_ids"
        ]
    )
    spent = []
    for _ in range(2):
        took, plain = [0.0], JpegImagePlugin.JpegImageFile.load

        def loading(image, took=took, plain=plain):
            began = time.process_time()
            loaded = plain(image)
            took[0] += time.process_time() - began
            return loaded

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(JpegImagePlugin.JpegImageFile, "load", loading)
            batch([row], ids)
        spent.append(took[0])
    assert spent[1] < spent[0] / 5
