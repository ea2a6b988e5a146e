"""The numbers of images in fewer passes over memory, each the same to the bit as the image processor's own.

transformers' image processors on Pillow turn each image into float64 and back, copy it for each step, and write each frame of
a patch twice. Here pixels stay bytes until they are where they belong, and rescaling and normalizing are done there, a few
patches at a time: the same operations on the same numbers, in the same order. Every setting of them is first tried on all 256
values of a pixel, and every class on an image; one that gives any other number is left to transformers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_PATCHES = 256
"""Patches that are made numbers at once: they stay in a core's own cache."""
_TAKES = ["self", "image", "patch_size", "merge_size", "temporal_patch_size"]


class Frugal:
    """`processor` makes the same of images as the one given and needs less for it; what it makes passes `finished`."""

    def __init__(self, processor: Any) -> None:
        self.processor, self.patches = processor, None
        images = getattr(processor, "image_processor", None)
        if images is None or getattr(images, "backend", "") != "pil":
            return
        from transformers.image_processing_backends import PilBackend

        kind = type(images)
        if kind.rescale is not PilBackend.rescale or kind.normalize is not PilBackend.normalize:
            return
        # Copies, since what is set on an image processor would be saved with it.
        self.processor, lighter = copy.copy(processor), copy.copy(images)
        plain = Plain(images)
        lighter.rescale, lighter.normalize = plain.rescale, plain.normalize
        self.processor.image_processor = lighter
        patches = Patches(images)
        if patches.fits():
            self.patches = patches
            lighter._preprocess = patches.preprocess

    def finished(self, made: dict[str, Any]) -> dict[str, Any]:
        """What the model reads. In a process of a loader patches stay bytes, and are numbers once they are on the device."""
        import torch

        if self.patches is None or made["pixel_values"].dtype != torch.uint8:
            return made
        packed = self.patches.packed(made["pixel_values"])
        waits = torch.utils.data.get_worker_info() is not None
        return {**made, "pixel_values": packed if waits else packed.to("cpu")}


class Plain:
    """Rescaling and normalizing of an image in float32, without a way over float64."""

    def __init__(self, images: Any) -> None:
        self.images = images
        self._exact: dict[Any, bool] = {}

    def rescale(self, image: np.ndarray[Any, Any], scale: float, **kwargs: Any) -> Any:
        """Bytes times `scale`."""
        if image.dtype == np.uint8 and not kwargs and self.rescales(scale):
            return np.divide(image, np.float32(1 / scale), dtype=np.float32)
        return self.images.rescale(image, scale, **kwargs)

    def normalize(self, image: np.ndarray[Any, Any], mean: Any, std: Any, **kwargs: Any) -> Any:
        """Without the mean, by the deviation, for each of the three colours."""
        if image.dtype == np.float32 and image.ndim == 3 and not kwargs and np.size(mean) == np.size(std) == len(image):
            colour = (len(image), 1, 1)
            taken = image - np.asarray(mean, np.float32).reshape(colour)
            return np.divide(taken, np.asarray(std, np.float32).reshape(colour), out=taken)
        return self.images.normalize(image, mean, std, **kwargs)

    def rescales(self, scale: float) -> bool:
        """Whether dividing bytes in float32 is what transformers' way over float64 gives, for each of their values."""
        if scale not in self._exact:
            values = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
            taken = np.divide(values, np.float32(1 / scale), dtype=np.float32)
            self._exact[scale] = np.array_equal(taken, self.images.rescale(values, scale))
        return self._exact[scale]


class Patches:
    """Images cut into patches by processors of the kind of Qwen-VL's: as bytes, and made numbers where the batch lies."""

    def __init__(self, images: Any) -> None:
        self.images = images
        self.cutting = copy.copy(images)
        self.cutting.patchify = self._cut
        self._numbers: Any = None
        self.plain = Plain(images)

    def fits(self) -> bool:
        """Whether this processor works as it is done here: tried on an image with all values of a pixel in each colour."""
        images = self.images
        sizes: list[Any] = [getattr(images, name, None) for name in ("patch_size", "merge_size", "temporal_patch_size")]
        cuts = getattr(type(images), "patchify", None)
        if (
            not all(isinstance(size, int) for size in sizes)
            or cuts is None
            or list(signature(cuts).parameters) != _TAKES
        ):
            return False
        side = sizes[0] * sizes[1]
        high, wide = (side * -(-16 // side) * more for more in (1, 2))
        values = np.random.default_rng(0).permuted(np.arange(high * wide * 3) % 256).astype(np.uint8)
        from PIL import Image

        picture = Image.fromarray(values.reshape(high, wide, 3))
        trial = copy.copy(images)
        trial._preprocess = self.preprocess
        made, wanted = (
            dict(each.preprocess([picture], do_resize=False, return_tensors="pt")) for each in (trial, images)
        )
        if self._numbers is None:
            return False  # it is set neither to rescale nor to normalize
        made["pixel_values"] = self.packed(made["pixel_values"]).to("cpu")
        return list(made) == list(wanted) and all(_same(made[name], wanted[name]) for name in wanted)

    def preprocess(self, images: list[np.ndarray[Any, Any]], **kwargs: Any) -> Any:
        """What the processor's own `_preprocess` makes of the images."""
        scale: Any = kwargs.get("rescale_factor")
        if not (kwargs.get("do_rescale") and kwargs.get("do_normalize") and self.plain.rescales(scale)):
            return self.images._preprocess(images, **kwargs)
        as_bytes = {"do_rescale": False, "do_normalize": False}
        made = self.cutting._preprocess(images, **kwargs | as_bytes)
        mean, std = (
            tuple(np.broadcast_to(np.float32(kwargs[name]), 3).tolist()) for name in ("image_mean", "image_std")
        )
        self._numbers = (float(np.float32(1 / scale)), mean, std, kwargs["temporal_patch_size"])
        return made

    def packed(self, flat: torch.Tensor) -> PackedPatches:
        """The bytes that `preprocess` has made last, with what makes numbers of them."""
        return PackedPatches(flat, *self._numbers)

    def _cut(
        self, image: np.ndarray[Any, Any], patch_size: int, merge_size: int, temporal_patch_size: int
    ) -> tuple[np.ndarray[Any, Any], int, int]:
        """The bytes of each patch, [patches, colours, pixels] flat, once, however many frames they are for."""
        if image.dtype != np.uint8:
            taken: tuple[np.ndarray[Any, Any], int, int] = self.images.patchify(
                image, patch_size, merge_size, temporal_patch_size
            )
            return taken
        colours, high, wide = image.shape
        rows, columns = high // patch_size, wide // patch_size
        blocks = image.reshape(
            colours, rows // merge_size, merge_size, patch_size, columns // merge_size, merge_size, patch_size
        )
        return blocks.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, -1), rows, columns


@dataclass(frozen=True)
class PackedPatches:
    """Patches as bytes, [patches, colours x pixels], which become what the model reads on the device that they are sent to.

    That is a seventh of the memory while they wait, and of what goes over the bus, where a patch has two frames."""

    flat: torch.Tensor
    full: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    frames: int

    def pin_memory(self) -> PackedPatches:
        """The same in memory that a device reads by itself."""
        return replace(self, flat=self.flat.pin_memory())

    def to(self, device: Any, non_blocking: bool = False) -> torch.Tensor:
        """[patches, colours x frames x pixels] in float32 on `device`."""
        import torch

        numbers = (self.full, self.mean, self.std)
        where = torch.device(device)
        if where.type == "cpu":
            return _on_host(self.flat, *numbers, self.frames)
        if not _exact_on(where, numbers):
            return _on_host(self.flat, *numbers, self.frames).to(where, non_blocking=non_blocking)
        return _on_device(self.flat.to(where, non_blocking=non_blocking), *numbers, self.frames)


def _on_host(flat: torch.Tensor, full: float, mean: Any, std: Any, frames: int) -> torch.Tensor:
    import torch

    patches = flat.numpy().reshape(len(flat), len(mean), -1)
    made = torch.empty(len(flat), frames * flat.shape[1])
    into = made.numpy().reshape(len(flat), len(mean), frames, -1)
    chunk = np.empty((_PATCHES, *patches.shape[1:]), np.float32)
    means, stds = (np.array(each, np.float32)[:, None] for each in (mean, std))
    for start in range(0, len(flat), _PATCHES):
        part = patches[start : start + _PATCHES]
        numbers = chunk[: len(part)]
        np.divide(part, np.float32(full), out=numbers, dtype=np.float32)
        np.subtract(numbers, means, out=numbers)
        np.divide(numbers, stds, out=numbers)
        into[start : start + _PATCHES] = numbers[:, :, None]
    return made


def _on_device(flat: torch.Tensor, full: float, mean: Any, std: Any, frames: int) -> torch.Tensor:
    import torch

    made = torch.empty(len(flat), len(mean), frames, flat.shape[1] // len(mean), device=flat.device)
    # Tensors on the device, also where a number would do: by a number torch multiplies with its inverse there.
    whole, means, stds = (torch.tensor(each, device=flat.device).view(-1, 1) for each in (full, mean, std))
    first = made[:, :, 0]
    first.copy_(flat.view(first.shape)).div_(whole).sub_(means).div_(stds)
    made[:, :, 1:] = made[:, :, :1]
    return made.view(len(flat), -1)


@cache
def _exact_on(device: torch.device, numbers: tuple[float, tuple[float, ...], tuple[float, ...]]) -> bool:
    """Whether a device makes the same numbers of all 256 values of a pixel as the host."""
    import torch

    every = torch.arange(256, dtype=torch.uint8).repeat(1, len(numbers[1]))
    return torch.equal(_on_device(every.to(device), *numbers, 1).cpu(), _on_host(every, *numbers, 1))


def _same(made: Any, wanted: Any) -> bool:
    return made.dtype == wanted.dtype and made.shape == wanted.shape and bool((made == wanted).all())
