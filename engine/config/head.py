"""Bytes of the vocabulary head at the peak of a batch, for each way in which the scores of tokens are computed here.

No way holds all scores: they are formed in tiles, and what counts is the tile, the hidden states gathered for it, and the
buffers of gradients. `fused` is what TRL 1.16 does in every method with a vocabulary head, `cut` is `kernels.use_cut_ce`;
methods without a head take nothing. A test holds the sizes of tiles to those of the installed code, another the bytes to
what the code takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from engine.config.method import METHODS
from engine.config.tree import RunConfig

MiB = 1024**2
Path = Literal["none", "fused", "cut"]
# A tile of TRL's head is so many tokens high and so many words wide, whatever the vocabulary.
TOKEN_CHUNK, VOCABULARY_CHUNK = 4096, 32768
# Without Triton tiles are worked on in plain torch, in float32: TRL makes seven copies and a mask, ours so many copies.
FOLDED, COPIES_BY_ROWS, COPIES_BY_WORDS = 29, 3, 5
# What ours may hold of scores at once, and the fewest rows or words of a tile. On an H200 320 MiB ran within 3 % of 640
# (results.csv, ce_frozen); a CPU wants a tile near its caches.
CUDA_WORKSPACE, CPU_WORKSPACE, FEWEST_ROWS, FEWEST_WORDS = 320 * MiB, 16 * MiB, 128, 256


# Products with narrower slices lose more than the logits save that more of them could keep (H100, both widths measured).
FEW_WORDS = 8192
# An H100's, to weigh logits that are formed again against sums of gradients that are read and written once more.
FLOP_PER_MS, BYTES_PER_MS = 790e9, 3.0e9


@dataclass(frozen=True, slots=True)
class Head:
    """One head in one batch: `tokens` that are scored, `size` bytes of a number, `trained` where it is learned too."""

    tokens: int
    hidden: int
    vocabulary: int
    size: float
    trained: bool
    on_gpu: bool

    @property
    def states(self) -> float:
        """The hidden states of all scored tokens, gathered and kept for the backward pass."""
        return self.tokens * self.hidden * self.size

    @property
    def weight(self) -> float:
        """The head's weight, or its gradient in the same numbers."""
        return self.vocabulary * self.hidden * self.size

    def in_float32(self, size: float) -> float:
        """A sum in float32 beside a result of `size` bytes; with float32 numbers they are one."""
        return size * 4 / self.size + size if self.size < 4 else size


class Layout(NamedTuple):
    """How `cut` goes through the vocabulary of a trained head: slices of `words`, whole multiples of a product's tile.

    The logits of the first `waiting` wait for the backward pass in the memory of the weight gradient, those of the last
    `kept` in the workspace; the others, among them one that is smaller, are formed again.
    """

    words: int
    waiting: int
    kept: int

    def parts(self, vocabulary: int) -> list[slice]:
        """The slices in order."""
        step, last = max(self.words, 1), vocabulary - self.kept * self.words
        before = [slice(start, min(start + step, last)) for start in range(0, last, step)]
        return before + [slice(start, start + step) for start in range(last, vocabulary, step)]


@lru_cache(maxsize=1024)
def layout(count: int, hidden: int, vocabulary: int, logit_bytes: int, weight_bytes: int, room: int) -> Layout:
    """The slices that cost least. `weight_bytes`: of one number of the weight gradient, 0 where it is not needed."""
    row = max(count, 1) * logit_bytes
    most = max(room // row, FEWEST_WORDS)
    if most >= vocabulary:
        return Layout(vocabulary, 0, 1)
    # Going upward, no slice of the weight gradient may land on logits that are still to be read.
    shelf = vocabulary * hidden * weight_bytes if row >= hidden * weight_bytes else 0
    fewest = -(-vocabulary // most)
    sizes = {-(-vocabulary // (number * FEWEST_WORDS)) * FEWEST_WORDS for number in range(fewest, 2 * fewest + 16)}
    sizes |= {shelf // (number * row) // FEWEST_WORDS * FEWEST_WORDS for number in range(1, 2 * fewest + 16)}

    def laid(words: int) -> tuple[float, Layout]:
        whole = vocabulary // words
        waiting = min(shelf // (words * row), whole)
        kept = min(most // words - 1, whole - waiting)
        again, slices = vocabulary - (waiting + kept) * words, -(-vocabulary // words)
        cost = 2.0 * count * hidden * again / FLOP_PER_MS + 8.0 * count * hidden * slices / BYTES_PER_MS
        return cost, Layout(words, waiting, kept)

    largest = most // FEWEST_WORDS * FEWEST_WORDS
    smallest = max(min(FEW_WORDS, largest // 2) // FEWEST_WORDS * FEWEST_WORDS, FEWEST_WORDS)
    return min(laid(min(max(words, smallest), largest)) for words in sizes)[1]


def path_of(config: RunConfig) -> Path:
    """Which way this config's scores take."""
    if METHODS[config.method.kind].head != "vocabulary":
        return "none"
    return "cut" if config.kernels.use_cut_ce is True else "fused"


def is_trained(config: RunConfig) -> bool:
    """Whether the head's weight gets a gradient."""
    return config.adapter.kind == "none" or "lm_head" in config.adapter.modules_to_save


def head_bytes(path: Path, head: Head) -> float:
    """Bytes at the head's own peak, which is in its backward pass or, for `cut` before a frozen head, before it."""
    return {"none": _none, "fused": _fused, "cut": _cut}[path](head)


def _none(head: Head) -> float:
    return 0.0


def _fused(head: Head) -> float:
    high, wide = min(head.tokens, TOKEN_CHUNK), min(head.vocabulary, VOCABULARY_CHUNK)
    # The buffer has its full width also before a small vocabulary; pages that nobody touches cost nothing on a CPU.
    tile = high * (VOCABULARY_CHUNK if head.on_gpu else wide) * head.size
    folded = 0 if head.on_gpu else FOLDED * high * wide
    sums = head.in_float32(head.states) + (head.in_float32(head.weight) if head.trained else 0.0)
    return tile + folded + head.states + sums


def _cut(head: Head) -> float:
    room = CUDA_WORKSPACE if head.on_gpu else CPU_WORKSPACE
    scores = head.tokens * head.vocabulary * head.size
    if not head.trained:
        by_rows = _worked(head, min(scores, max(room, FEWEST_ROWS * head.vocabulary * head.size)), COPIES_BY_ROWS)
        # Gradients are formed beside the scores and only scaled later, when the tile is gone.
        return head.states + max(by_rows + head.states, 2 * head.states)
    size = int(head.size)
    chosen = layout(head.tokens, head.hidden, head.vocabulary, size, size, room)
    tile = head.tokens * chosen.words * head.size
    held = chosen.kept * tile + (0 if chosen.words == head.vocabulary else tile)
    return head.states + held + _worked(head, tile, COPIES_BY_WORDS) - tile + head.in_float32(head.states) + head.weight


def _worked(head: Head, tile: float, copies: int) -> float:
    """A tile with the float32 copies that plain torch makes of it; 16-bit numbers are copied once more."""
    return tile if head.on_gpu else tile * (1 + 4 * (copies + (head.size < 4)) / head.size)
