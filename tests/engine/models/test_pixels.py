"""Images become the same numbers, to the bit, as transformers makes of them, wherever they are made."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from engine.models.pixels import Frugal, PackedPatches, _on_device
from tests.engine.seeing import FAMILIES, real_processor

PATCHES = ("qwen2_5_vl", "qwen3_vl", "glm4v")
"""Families whose images are cut into patches by the processor."""


@pytest.fixture(scope="module")
def processors(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Any] = {}

    def processor(name: str) -> Any:
        if name not in made:
            folder = FAMILIES[name](shared_data / "tokenizers/minimind", tmp_path_factory.mktemp("seeing") / name)
            made[name] = real_processor(folder)
        return made[name]

    return processor


def pictures() -> list[Image.Image]:
    """Noise, in which all values of a pixel are, in two shapes."""
    numbers = np.random.default_rng(0)
    return [Image.fromarray(numbers.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in ((300, 200), (64, 420))]


def made_of(processor: Any) -> dict[str, Any]:
    return dict(
        processor(
            text=[processor.image_token] * 2,
            images=[[each] for each in pictures()],
            padding=True,
            return_tensors="pt",
        )
    )


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return list(one) == list(other) and all(
        torch.as_tensor(one[name]).dtype == torch.as_tensor(other[name]).dtype
        and torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name]))
        for name in one
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gets_the_numbers_that_transformers_makes(processors: Any, name: str) -> None:
    processor = processors(name)
    frugal = Frugal(processor)
    assert frugal.processor is not processor
    assert (frugal.patches is not None) == (name in PATCHES)
    assert equal(frugal.finished(made_of(frugal.processor)), made_of(processor))
    # Nothing of it is on the processor that is saved.
    assert not {"rescale", "normalize", "_preprocess"} & set(vars(processor.image_processor))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "idefics3"])
@pytest.mark.parametrize(
    "settings",
    [
        {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.25, 0.7)},
        {"rescale_factor": 1 / 128},
        {"rescale_factor": 0.0039},
        {"do_normalize": False},
        {"do_rescale": False},
        {"do_rescale": False, "do_normalize": False},
        {"do_resize": False, "size": {"shortest_edge": 56, "longest_edge": 56 * 56 * 9}},
    ],
    ids=str,
)
def test_settings_of_the_processor_are_followed(processors: Any, name: str, settings: dict[str, Any]) -> None:
    if "size" in settings and name != "qwen2_5_vl":
        settings = {"do_image_splitting": False}
    processor = copy.copy(processors(name))
    images = processor.image_processor = copy.copy(processor.image_processor)
    for setting, value in settings.items():
        if setting == "size":
            value = type(images.size)(**value)
        if setting != "do_resize":
            setattr(images, setting, value)
    frugal = Frugal(processor)
    assert equal(frugal.finished(made_of(frugal.processor)), made_of(processor))


def test_a_class_that_works_otherwise_is_left_to_transformers(processors: Any) -> None:
    processor = copy.copy(processors("qwen2_5_vl"))
    kind = type(processor.image_processor)

    class Brighter(kind):  # type: ignore[misc,valid-type]
        def normalize(self, *given: Any, **more: Any) -> Any:
            return super().normalize(*given, **more) + 1

    class Mirrored(kind):  # type: ignore[misc,valid-type]
        def patchify(self, image: Any, patch_size: int, merge_size: int, temporal_patch_size: int) -> Any:
            return super().patchify(image[:, :, ::-1], patch_size, merge_size, temporal_patch_size)

    for other, copied in ((Brighter, False), (Mirrored, True)):
        processor.image_processor = other(**{
            name: getattr(processors("qwen2_5_vl").image_processor, name) for name in ("size", "patch_size", "merge_size")
        })  # fmt: skip
        frugal = Frugal(processor)
        assert frugal.patches is None
        assert (frugal.processor is not processor) == copied
        assert equal(frugal.finished(made_of(frugal.processor)), made_of(processor))


def test_what_torchvision_reads_is_left_to_it() -> None:
    processor = SimpleNamespace(image_processor=SimpleNamespace(backend="torchvision"))
    assert Frugal(processor).processor is processor


class Batches(torch.utils.data.Dataset[Any]):
    """One batch, as a process of a loader makes it."""

    def __init__(self, frugal: Frugal) -> None:
        self.frugal = frugal

    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self.frugal.finished(made_of(self.frugal.processor))


def test_bytes_leave_a_process_of_the_loader_and_are_numbers_on_the_device(processors: Any) -> None:
    processor = processors("qwen2_5_vl")
    wanted = made_of(processor)["pixel_values"]
    packed = next(iter(DataLoader(Batches(Frugal(processor)), batch_size=None, num_workers=1)))["pixel_values"]
    assert isinstance(packed, PackedPatches)
    assert packed.flat.is_shared()
    frames, numbers = processor.image_processor.temporal_patch_size, 4
    assert packed.flat.nbytes * frames * numbers == wanted.nbytes
    assert torch.equal(packed.to("cpu"), wanted)
    # What a card does, where it divides as the host does.
    assert torch.equal(_on_device(packed.flat, packed.full, packed.mean, packed.std, packed.frames), wanted)


def test_a_device_that_rounds_otherwise_gets_the_hosts_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    import engine.models.pixels as pixels

    numbers = (255.0, (0.48, 0.46, 0.41), (0.27, 0.26, 0.28))
    packed = PackedPatches(torch.arange(12, dtype=torch.uint8).view(1, 12), *numbers, 2)
    host = torch.device("cpu")
    pixels._exact_on.cache_clear()
    assert pixels._exact_on(host, numbers)
    pixels._exact_on.cache_clear()
    exact = pixels._exact_on
    monkeypatch.setattr(pixels, "_on_device", lambda *given: _on_device(*given) * (1 + 2**-23))
    try:
        assert not exact(host, numbers)
    finally:
        exact.cache_clear()
    monkeypatch.setattr(pixels, "_exact_on", lambda *given: False)
    monkeypatch.setattr(pixels, "_on_device", lambda *given: pytest.fail("computed where it is rounded otherwise"))
    assert packed.to("meta").shape == (1, 24)
