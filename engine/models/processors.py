"""Processors that read images on Pillow: transformers' own classes, without a processor of videos.

Many families read images and videos by one class, whose half for videos needs torchvision. Images do not: the class is
built around the image processor's form on Pillow, and the settings for videos are carried along unread, so that a folder
that is saved has them again. What the class asks of the machine for images themselves it still asks.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils import PushToHubMixin

from engine import model_files
from engine.config.architectures import needs_torchvision
from engine.config.tree import RunConfig
from engine.errors import ModelError, redact, visible
from engine.hardware import installed

_PARTS = {"image_processor", "tokenizer", "video_processor"}
_IMAGES, _VIDEOS = "preprocessor_config.json", "video_preprocessor_config.json"


class UnreadVideos(PushToHubMixin):
    """The settings of a video processor in the place of one: they are saved again, and no video is read."""

    _auto_class = None
    model_input_names: tuple[str, ...] = ()
    num_frames = fps = None

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def to_dict(self) -> dict[str, Any]:
        """The settings as they were found."""
        return dict(self.settings)


def pixel_backend(config: RunConfig) -> str:
    """What turns images into numbers here: `pil` or `torchvision`."""
    asked = config.data.image_backend
    return ("torchvision" if installed("torchvision") else "pil") if asked == "auto" else asked


def load_processor(config: RunConfig, source: str, folder: Path, revision: str | None) -> Any:
    """The processor of `source`, whose files are in `folder`, with the backend and the pixel limits of the config.

    Raises ModelError where torchvision is needed and not here, and what transformers raises for files that it cannot read.
    """
    import transformers

    backend, kind = pixel_backend(config), getattr(transformers, _class_of(folder), None)
    if backend == "torchvision" and not installed("torchvision"):
        raise _needs_torchvision("data.image_backend", "torchvision is asked for, which is not installed")
    if backend == "torchvision" or kind is None or (not _dummy(kind) and not set(kind.get_attributes()) <= _PARTS):
        asked: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
        with _without_number_words(kind):
            loaded = transformers.AutoProcessor.from_pretrained(source, **asked)
        # By itself transformers before 5.18 stays with the class for Pillow where the files name it.
        if backend == "torchvision" and getattr(loaded.image_processor, "backend", "") == "pil":
            from transformers.models.auto.image_processing_auto import AutoImageProcessor

            loaded.image_processor = AutoImageProcessor.from_pretrained(source, backend=backend, **asked)
    elif _dummy(kind) or needs_torchvision(kind.__name__, model_files.image_processor(folder)):
        name = visible(redact(source))
        raise _needs_torchvision("model.name", f"the processor of {name} reads images by torchvision alone")
    else:
        loaded = _on_pillow(kind, source, folder, revision)
    _limit(loaded, config)
    return loaded


def pixel_limits(processor: Any) -> tuple[int, int] | None:
    """The fewest and the most pixels that images are given; None for a processor that has no such limits."""
    images = processor.image_processor
    times = model_files.KEEP_SHAPE.get(type(images).__name__.removesuffix("Pil"))
    return None if times is None else (images.size.shortest_edge // times, images.size.longest_edge // times)


def _limit(processor: Any, config: RunConfig) -> None:
    """Give the pixel limits of the config to the image processor. Raises ModelError for one that has none."""
    limits = {"shortest_edge": config.data.min_pixels, "longest_edge": config.data.max_pixels}
    asked = {name: value for name, value in limits.items() if value is not None}
    if not asked:
        return
    images = processor.image_processor
    name = type(images).__name__.removesuffix("Pil")
    if name not in model_files.KEEP_SHAPE:
        path = "data.max_pixels" if "longest_edge" in asked else "data.min_pixels"
        raise ModelError(f"{path}: {name} makes images of sizes of its own, and has no such limit.", "Leave it out.")
    times = model_files.KEEP_SHAPE[name]
    size = {side: asked[side] * times if side in asked else getattr(images.size, side) for side in limits}
    if size["shortest_edge"] > size["longest_edge"]:
        least, most = (size[side] // times for side in limits)
        raise ModelError(
            f"data.min_pixels: {least:,} pixels at least and {most:,} at most leave none.",
            "Set data.min_pixels and data.max_pixels to fit each other.",
        )
    images.size = type(images.size)(**size)


def _on_pillow(kind: Any, source: str, folder: Path, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    # Without torchvision, transformers before 5.18 has a stand-in of that name at its top.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    asked: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    loaders = {
        "image_processor": lambda: AutoImageProcessor.from_pretrained(source, backend="pil", **asked),
        "tokenizer": lambda: AutoTokenizer.from_pretrained(source, **asked),
        "video_processor": lambda: UnreadVideos(_video_settings(folder)),
    }
    parts = {name: loaders[name]() for name in kind.get_attributes()}
    settings, _ = kind.get_processor_dict(source, revision=revision)
    takes = inspect.signature(kind.__init__).parameters
    given = {name: value for name, value in settings.items() if name in takes and name not in parts}
    processor = kind.__new__(kind)
    # Its check that each part is of transformers' class is passed over, on this one object, for the videos' sake.
    processor.check_argument_for_proper_class = lambda name, part: type(part)
    with _without_number_words(kind):
        processor.__init__(**parts, **given)
    del processor.check_argument_for_proper_class
    return processor


def _class_of(folder: Path) -> str:
    """The name of a model's processor class by its files, or by the architecture; empty where none says it."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    if named := model_files.processor_class(folder):
        return named
    config = model_files.read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return PROCESSOR_MAPPING_NAMES.get(config.get("model_type", "")) or ""


def _dummy(kind: Any) -> bool:
    """Whether transformers has put a stand-in in the place of a class whose packages are not here."""
    return type(kind).__name__ == "DummyObject" or "torchvision" in getattr(kind, "__backends", ())


def _video_settings(folder: Path) -> dict[str, Any]:
    """What a model's files say of videos; what they say of images where they name nothing else, as transformers takes it."""
    for name, entry in (("processor_config.json", "video_processor"), (_VIDEOS, ""), (_IMAGES, "")):
        settings = model_files.read_json(folder / name) if (folder / name).is_file() else {}
        settings = settings.get(entry) if entry else settings
        if settings:
            kind = str(settings.get("image_processor_type", ""))
            others = {key: value for key, value in settings.items() if key != "image_processor_type"}
            of_videos = {"video_processor_type": kind.replace("ImageProcessor", "VideoProcessor")} if kind else {}
            return of_videos | others
    return {}


@contextlib.contextmanager
def _without_number_words(kind: Any) -> Iterator[None]:
    """SmolVLM's class asks for a package that writes numbers as words, with which it speaks of videos."""
    module = sys.modules.get(getattr(kind, "__module__", ""))
    if getattr(module, "num2words", "") is not None:
        yield
        return
    vars(module)["num2words"] = str
    try:
        yield
    finally:
        vars(module)["num2words"] = None


def _needs_torchvision(path: str, what: str) -> ModelError:
    return ModelError(f"{path}: {what}.", "Install it beside the torch that is here: pip install torchvision.")
