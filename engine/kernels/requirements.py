"""What the kernels ask of a card, and how many logits a vocabulary head holds at once in which slices; no torch.

Rules and the memory estimate read it beside the kernels, so that all speak of the same cards and the same bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

CAPABILITY = (8, 0)
"""The compute capability of the oldest card that the kernels are compiled for (A100)."""
LARGEST_EXPERT_RANK = 256
"""The largest rank of adapters on the experts of a mixture that the kernels hold."""
MiB = 1024**2
EXPERT_BUFFER = 256 * MiB
"""Bytes that unpacked experts may take at a time on a card; one expert is unpacked however large it is."""
# What may be held of scores at once, and the fewest rows or words of a tile. On an H200 320 MiB ran within 3 % of 640
# (results.csv, ce_frozen); a CPU wants a tile near its caches.
CUDA_WORKSPACE, CPU_WORKSPACE, FEWEST_ROWS, FEWEST_WORDS = 320 * MiB, 16 * MiB, 128, 256
# Products with narrower slices lose more than the logits save that more of them could keep (H100, both widths measured).
FEW_WORDS = 8192
# An H100's, to weigh logits that are formed again against sums of gradients that are read and written once more.
FLOP_PER_MS, BYTES_PER_MS = 790e9, 3.0e9


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
