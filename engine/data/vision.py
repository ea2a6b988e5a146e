"""Images in rows: references until the batch is made, placeholders expanded by the processor, masks kept exact.

How many tokens an image becomes hangs on its size alone, so the processor is asked once for each size and the text is
expanded before it is tokenized. Pixels are read when a batch is collated. Only what the processing class itself offers is
used, so any transformers processor fits.
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from engine.data.chat_masks import Turn
from engine.data.chat_template import Span
from engine.data.image_limits import BOMB, FORMATS, UNREADABLE, why_refused
from engine.data.image_references import DATA, content_of, embedded, short, stamp_image
from engine.data.parts import IMAGE, Example, FormatError
from engine.data.pretokenized import IGNORED
from engine.errors import DataError, first_line

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

SHOWN = 256
_SIZES = 4096
"""What Pillow raises about files that are cut or broken."""
_MARKS = {
    "<|image_pad|>": ("<|vision_start|>", "<|vision_end|>"),
    "<|image|>": ("<|begin_of_image|>", "<|end_of_image|>"),
}
"""Tokens that stand around those of an image where a chat template writes them and the processor does not."""
_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def open_image(reference: str) -> Image:
    """The image of a reference in RGB, upright by its EXIF, transparency on white. Raises `DataError` saying what is wrong."""
    from PIL import Image, ImageOps

    content = content_of(reference)
    try:
        with warnings.catch_warnings():
            # A thread that warns meanwhile is not disturbed: all that changes is what is said of bombs.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(reference if content is None else io.BytesIO(content), formats=FORMATS)
        with opened as image:
            if reason := why_refused(image):
                raise _bad(reference, reason)
            image.load()
            # Turned in place: Pillow would copy those too that are upright already.
            ImageOps.exif_transpose(image, in_place=True)
            return _rgb(image)
    except Image.DecompressionBombError:
        raise _bad(reference, BOMB) from None
    except Image.UnidentifiedImageError:
        raise _bad(reference, f"is no image ({', '.join(FORMATS)} are read)") from None
    except UNREADABLE as problem:
        reason = getattr(problem, "strerror", None) or "it is cut or broken"
        raise _bad(reference, f"the image cannot be read ({reason})") from None


def _rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith("I"):
        # Grey of 16 bits: Pillow would cut all above 255 to white.
        image = image.convert("F").point(lambda value: value * (1 / 257) + 0).convert("L")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        clear = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _bad(reference: str, what: str) -> DataError:
    return DataError(f"{short(reference)}: {what}")


def image_size(reference: str) -> tuple[int, int]:
    """Width and height of an image that was read to its end, upright. Raises `DataError`."""
    content = content_of(reference)
    if content is not None:
        return open_image(reference).size
    try:
        status = os.stat(reference)
    except OSError as problem:
        raise _bad(reference, f"the image cannot be read ({problem.strerror})") from None
    return _file_size(reference, status.st_mtime_ns, status.st_size)


def pixels_of(reference: str) -> int:
    """Pixels of an image whose size was asked for before; of one that lies in its row, by its header."""
    from PIL import Image

    content = content_of(reference)
    if content is None:
        width, height = image_size(reference)
        return width * height
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        return image.width * image.height


@functools.lru_cache(1 << 16)
def _file_size(path: str, changed: int, size: int) -> tuple[int, int]:
    return open_image(path).size


class DecodedImages:
    """The images that were decoded last, as far as so many bytes hold them. They are given out as they are, to be read alone."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        """`held`: bytes of those that are there."""
        self._images: OrderedDict[tuple[Any, ...], Image] = OrderedDict()

    def __call__(self, reference: str) -> Image:
        """As `open_image`, of a file as it is now."""
        if not self.most:
            return open_image(reference)
        stamp = stamp_image(reference)
        own = hashlib.sha256(reference.encode()).digest() if reference.startswith(DATA) else reference
        key = (own, *(stamp or ()))
        if (image := self._images.get(key)) is not None:
            self._images.move_to_end(key)
            return image
        image = _bare(open_image(reference))
        if (size := _bytes(image)) > self.most:
            return image  # it would drive out all the others and itself
        self.held += size
        self._images[key] = image
        while self.held > self.most:
            self.held -= _bytes(self._images.popitem(last=False)[1])
        return image


def _bare(image: Image) -> Image:
    """The pixels alone: what a file says beside them (a profile, a thumbnail, the file itself) may be far larger."""
    from PIL import Image

    return Image.Image()._new(image.im)


def _bytes(image: Image) -> int:
    # Pillow's own layout, where a byte of each pixel is empty, and what it and its name take beside.
    return 4 * image.width * image.height + BESIDE


BESIDE = 1024
"""Bytes that an image which is kept takes beside its pixels."""


def small_copy(reference: str) -> dict[str, Any]:
    """`width` and `height` of an image, and as a data URI a PNG of it that fits into `SHOWN` pixels a side."""
    image = open_image(reference)
    width, height = image.size
    image.thumbnail((SHOWN, SHOWN))
    saved = io.BytesIO()
    image.save(saved, "PNG")
    return {"width": width, "height": height, "thumbnail": embedded(saved.getvalue(), "image/png")}


@dataclass(frozen=True)
class Expanded:
    """A text with its images' tokens written out, and all that was known of the text moved along."""

    text: str
    spans: list[Span]
    turns: tuple[Turn, ...]
    places: list[Span]
    """Characters of each image."""


@dataclass(frozen=True)
class Resized:
    """What a processor makes of an image: its tokens as a text, and the pixels that the vision tower sees."""

    tokens: str
    width: int
    height: int
    tiles: int = 1
    """Images of this size that it is cut into, a small copy of the whole among them."""


def written_out(images: ImageTokens | None, example: Example, text: str) -> str:
    """A text without a template, with the processor's own token, and the marks around it, at each place of an image."""
    if not example.images or images is None:
        return text
    if example.sees and IMAGE not in text and images.token not in text:
        text = IMAGE * len(example.images) + text
    return text.replace(IMAGE, images.written)


class ImageTokens:
    """The tokens that a processor makes of images; `token` is the place of one in a text."""

    def __init__(self, processor: Any) -> None:
        self.processor, self.token = processor, str(processor.image_token)
        known = processor.tokenizer.get_vocab()
        marks = _MARKS.get(self.token, ("", ""))
        self.before, self.after = marks if all(mark in known for mark in marks) else ("", "")
        self.written = self.before + self.token + self.after
        self._by_size: dict[tuple[int, int], Resized] = {}

    def expand(self, text: str, spans: Sequence[Span], turns: tuple[Turn, ...], images: Sequence[str]) -> Expanded:
        """The text with each place of an image replaced by its tokens. Raises `DataError` where places and images differ
        or an image cannot be read."""
        pieces = text.split(self.token)
        if len(pieces) - 1 != len(images):
            raise FormatError(
                f"the rendered text has {_many(len(pieces) - 1, 'place')} for images and the row has {_many(len(images), 'image')}",
                "Each <image> in the text and each image of the row belong together; the chat template must write them.",
            )
        written, places, length = [pieces[0]], [], len(pieces[0])
        for image, piece in zip(images, pieces[1:], strict=True):
            tokens = self.resized(image).tokens
            places.append((length, length + len(tokens)))
            written += [tokens, piece]
            length += len(tokens) + len(piece)
        starts = _starts(pieces, len(self.token))

        def moved(position: int) -> int:
            passed = sum(start < position for start in starts)
            if not passed:
                return position
            # Behind the last image that begins before it.
            return max(position - starts[passed - 1] - len(self.token), 0) + places[passed - 1][1]

        def span(each: Span) -> Span:
            return moved(each[0]), moved(each[1])

        kept = tuple(
            replace(turn, start=moved(turn.start), end=moved(turn.end), trained=tuple(map(span, turn.trained)))
            for turn in turns
        )
        full = "".join(written)
        return Expanded(full, [span(each) for each in spans], kept, [self._with_marks(full, place) for place in places])

    def _with_marks(self, text: str, place: Span) -> Span:
        """The characters of an image with the marks around it, where there are some."""
        start, end = place
        if self.before and text.endswith(self.before, 0, start) and text.startswith(self.after, end):
            return start - len(self.before), end + len(self.after)
        return place

    def seen(self, row: Mapping[str, Any], images: list[str]) -> dict[str, Any]:
        """A row of ids with where its images are, whose tokens are never learned."""
        drawn = [at for start, end in self.among(row["input_ids"], images) for at in range(start, end)]
        labels = list(row["labels"])
        for at in drawn:
            labels[at] = IGNORED
        return {**row, "labels": labels, "images": images, "image_tokens": drawn}

    def among(self, ids: Sequence[int], images: Sequence[str]) -> list[Span]:
        """Where the tokens of each image stand among the ids of a row, marks around them included. Raises `DataError` where
        they are not those that the processor makes of the images, in their order."""
        places, at = [], 0
        for number, image in enumerate(images, 1):
            wanted = self._ids(
                self.resized(image).tokens.strip()
            )  # line breaks around it may be one token with the text
            start = next(
                (n for n in range(at, len(ids) - len(wanted) + 1) if list(ids[n : n + len(wanted)]) == wanted), None
            )
            if start is None:
                raise FormatError(
                    f"input_ids do not hold the {_many(len(wanted), 'token')} that the model's processor makes of image {number} "
                    f"of {len(images)}, {short(image)}",
                    "Tokenize the data with the model's own processor and the same limits of pixels.",
                )
            at = start + len(wanted)
            places.append((start, at))
        inside = {n for start, end in places for n in range(start, end)}
        own = set(self._ids(self.token))
        if any(token in own for n, token in enumerate(ids) if n not in inside):
            raise FormatError(
                f"input_ids hold more tokens of images than the row's {_many(len(images), 'image')} make",
                "Each image of the row and its tokens belong together.",
            )
        before, after = self._ids(self.before), self._ids(self.after)
        return [
            (start - 1, end + 1) if before and list(ids[start - 1 : start]) == before and list(ids[end : end + 1]) == after
            else (start, end)
            for start, end in places
        ]  # fmt: skip

    def _ids(self, text: str) -> list[int]:
        return list(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def resized(self, reference: str) -> Resized:
        """What becomes of an image. Raises `DataError` for one that cannot be read or is refused."""
        size = image_size(reference)
        if size not in self._by_size:
            if len(self._by_size) >= _SIZES:
                self._by_size.clear()
            self._by_size[size] = self._processed(reference)
        return self._by_size[size]

    def _processed(self, reference: str) -> Resized:
        try:
            made = self.processor(
                text=[self.token],
                images=[[open_image(reference)]],
                add_special_tokens=False,
                return_text_replacement_offsets=True,
                return_tensors="pt",
            )
        except ValueError as problem:
            reason = first_line(problem).rstrip(".")
            raise _bad(reference, f"{type(self.processor).__name__} does not take it ({reason[:200]})") from None
        tokens = str(made["text_replacement_offsets"][0][0]["replacement"])
        if (grid := made.get("image_grid_thw")) is not None:
            _, rows, columns = grid[0].tolist()
            patch = self.processor.image_processor.patch_size
            return Resized(tokens, columns * patch, rows * patch)
        *outer, _, height, width = made["pixel_values"].shape
        return Resized(tokens, width, height, math.prod(outer))


class ImageBatch:
    """What a collator adds for images: the processor's own tensors, and which tokens are an image's where a model asks."""

    def __init__(self, processor: Any, keep: int = 0) -> None:
        """`keep` bytes of decoded images are held for when they come again."""
        from engine.models.pixels import Frugal

        self.decoded = DecodedImages(keep)

        self._frugal = Frugal(processor)
        self.processor, self.token = self._frugal.processor, str(processor.image_token)
        self.ids = set(processor.image_token_ids)

    def __call__(self, rows: Sequence[Sequence[str]], ids: torch.Tensor) -> dict[str, Any]:
        """Tensors for the images of each row of `ids`, [rows, width]. Raises `DataError` for an image that is no longer the
        one that was prepared."""

        batch: dict[str, Any] = {}
        if any(rows):
            # Pairs and groups of answers have one prompt: its images are read once.
            found = {reference: self.decoded(reference) for reference in {each for row in rows for each in row}}
            opened = [[found[reference] for reference in row] for row in rows if row]
            made = self.processor(
                text=[self.token * len(row) for row in opened],
                images=opened,
                add_special_tokens=False,
                padding=True,
                return_tensors="pt",
            )
            seen = [place for place, row in enumerate(rows) if row]
            for place, now in zip(seen, made["input_ids"].tolist(), strict=True):
                self._same(rows[place], now, ids[place].tolist())
            batch = self._frugal.finished({name: value for name, value in made.items() if name not in _TEXT})
        return batch | self.kinds(ids)

    def kinds(self, ids: torch.Tensor) -> dict[str, Any]:
        """Which of these tokens are an image's, under the name that the model reads; nothing where it does not ask."""
        import torch

        if _returns_token_types(self.processor):
            # Where images have positions in three directions these are counted by the model itself, from the types.
            asked = "mm_token_type_ids" in self.processor.model_input_names
            name = "mm_token_type_ids" if asked else "token_type_ids"
            return {name: torch.tensor(self.processor.create_mm_token_type_ids(ids.tolist()))}
        return {}

    def _same(self, images: Sequence[str], now: Sequence[int], prepared: Sequence[int]) -> None:
        counts = [sum(each in self.ids for each in row) for row in (now, prepared)]
        if counts[0] != counts[1]:
            named = ", ".join(map(short, images))
            message = f"{named}: gives {counts[0]:,} image tokens, and its row was prepared with {counts[1]:,}"
            raise DataError(message, "The file changed while rows of it were trained on: start again.")


def _returns_token_types(processor: Any) -> bool:
    """Whether a processor says by itself of each token whether it is an image's, as its model asks."""
    told = getattr(processor, "return_mm_token_type_ids", None)
    if told is None:
        # transformers before 5.18 has it among the defaults of a call.
        told = processor.valid_processor_kwargs._defaults.get("text_kwargs", {}).get("return_mm_token_type_ids")
    return bool(told)


def images_of(processing_class: Any) -> Any | None:
    """The processing class where it is a processor of images; None for a tokenizer."""
    seeing = getattr(processing_class, "image_processor", None) is not None
    return processing_class if seeing and getattr(processing_class, "image_token", None) else None


def read_by(processor: Any) -> str:
    """The libraries that turn images into numbers for a processor, such as `pillow 13.0.0`."""
    packages = ("pillow",) if processor.image_processor.backend == "pil" else ("torchvision", "pillow")
    return ", ".join(f"{package} {version(package)}" for package in packages)


def no_processor(images: Sequence[Any]) -> DataError:
    """The refusal of images that the model cannot see."""
    return FormatError(
        f"the row has {_many(len(images), 'image')}, and this model has no processor for them",
        "Take a model that sees, or rows of text.",
    )


def _starts(pieces: Sequence[str], width: int) -> list[int]:
    """Where each place of an image begins in the text that these pieces come from."""
    starts, at = [], 0
    for piece in pieces[:-1]:
        at += len(piece)
        starts.append(at)
        at += width
    return starts


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
