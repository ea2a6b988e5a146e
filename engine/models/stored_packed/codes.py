"""Codes of two to eight bits in the words of 32 that the formats' files hold, and the order in which AWQ has them."""

from __future__ import annotations

import torch

AWQ_ORDER = 0, 2, 4, 6, 1, 3, 5, 7
"""Which of eight outputs each four bits of a word are, from the lowest on."""


def codes_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes [rows, ...], uint8, that follow each other in words int32 [rows, n], also across their ends."""
    found = words.contiguous().view(torch.uint8)
    if bits == 8:
        return found
    if bits == 4:
        return torch.stack((found & 15, found >> 4), -1).flatten(1)
    runs = torch.nn.functional.pad(words, (0, -words.shape[1] % bits)).unflatten(1, (-1, bits)).long() & 0xFFFFFFFF
    codes = torch.empty(*runs.shape[:2], 32, dtype=torch.uint8, device=words.device)
    for place in range(32):
        word, shift = divmod(place * bits, 32)
        value = runs[..., word] >> shift
        if shift + bits > 32:
            value = value | runs[..., word + 1] << (32 - shift)
        codes[..., place] = (value & ((1 << bits) - 1)).to(torch.uint8)
    return codes.flatten(1)


def codes_in_whole_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes [rows, ...], uint8, of words int32 [rows, n] that each hold as many as fit whole."""
    shifts = torch.arange(32 // bits, device=words.device) * bits
    return ((words.long()[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)


def codes_of_awq(words: torch.Tensor) -> torch.Tensor:
    """The codes [rows, 8 * n] of AWQ's words [rows, n]."""
    found = words.contiguous().view(torch.uint8)
    codes = torch.stack((found & 15, found >> 4), -1).view(*words.shape, 8)
    place = torch.tensor([AWQ_ORDER.index(output) for output in range(8)], device=words.device)
    return codes.index_select(2, place).flatten(1)


def code_layout(count: int, columns: int, told: tuple[int, ...]) -> tuple[int, bool]:
    """Bits of a code where so many words hold a row, and whether no code lies across the end of a word, as compressed-tensors
    wrote them until it put each behind the one before."""
    for bits in told:
        if count == -(-columns * bits // 32):
            return bits, False
    for bits in told:
        if count == -(-columns // (32 // bits)):
            return bits, True
    return count * 32 // columns, False


def words_of(codes: torch.Tensor, bits: int, *, whole: bool = False) -> torch.Tensor:
    """Words int32 [rows, n] of codes [rows, columns], uint8: what `codes_of` reads, or `codes_in_whole_words`."""
    a_word = 32 // bits if whole else 32
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % a_word)).unflatten(1, (-1, a_word)).long()
    if whole:
        return _signed((padded << torch.arange(a_word) * bits).sum(-1))
    words = torch.zeros(*padded.shape[:2], bits, dtype=torch.int64)
    for place in range(32):
        word, shift = divmod(place * bits, 32)
        words[..., word] |= padded[..., place] << shift & 0xFFFFFFFF
        if shift + bits > 32:
            words[..., word + 1] |= padded[..., place] >> 32 - shift
    return _signed(words.flatten(1)[:, : -(-codes.shape[1] * bits // 32)])


def words_of_awq(codes: torch.Tensor) -> torch.Tensor:
    """AWQ's words int32 [rows, n] of codes [rows, 8 * n]."""
    return words_of(codes.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4)


def _signed(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
