"""The formula of each head against the code it speaks of: the same tiles, and the bytes that it really takes."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from engine.features.cut_cross_entropy import TOKEN_CHUNK, VOCABULARY_CHUNK, Head, Path, head_bytes, path_of
from engine.rules import read


def measured(way: Path, head: Head) -> int:
    """The most bytes that torch's allocator had handed out at once during a batch through the real code."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    from engine.kernels.linear_logp import LinearLogp, workspace

    op, room = (
        (ChunkedLogProbFunction, VOCABULARY_CHUNK) if way == "fused" else (LinearLogp, workspace(torch.device("cpu")))
    )
    dtype = torch.bfloat16 if head.size == 2 else torch.float32
    states = torch.randn(1, head.tokens + 1, head.hidden, dtype=dtype).requires_grad_(True)
    weight = torch.randn(head.vocabulary, head.hidden, dtype=dtype).requires_grad_(head.trained)
    targets = torch.randint(0, head.vocabulary, (head.tokens,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        gathered = states[:, :-1].reshape(-1, head.hidden)
        op.apply(gathered, weight, None, targets, 1.0, room, None, 1.0, ("entropy", "is_top1"))[0].sum().backward()
    found = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def test_tiles_are_as_large_as_in_the_installed_code() -> None:
    from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    assert (TOKEN_CHUNK, VOCABULARY_CHUNK) == (TOKEN_CHUNK_SIZE, _CHUNKED_LOGPROB_CHUNK_SIZE)


@pytest.mark.parametrize(
    ("way", "tokens", "vocabulary", "size", "trained"),
    [
        ("fused", 256, 4096, 4, False),
        ("fused", 256, 4096, 2, True),
        pytest.param("fused", 5000, 4096, 2, True, marks=pytest.mark.slow),
        ("cut", 1024, 16_384, 4, False),
        ("cut", 1024, 16_384, 4, True),
        pytest.param("cut", 1024, 16_384, 2, True, marks=pytest.mark.slow),
        pytest.param("cut", 1024, 16_384, 2, False, marks=pytest.mark.slow),
    ],
)
def test_a_head_takes_the_bytes_that_the_formula_says(
    way: Path, tokens: int, vocabulary: int, size: float, trained: bool
) -> None:
    head = Head(tokens, 128, vocabulary, size, trained, on_gpu=False)
    # The buffer is handed out at its full width; the formula counts the part that is touched.
    untouched = min(tokens, TOKEN_CHUNK) * (VOCABULARY_CHUNK - vocabulary) * size if way == "fused" else 0
    assert measured(way, head) == pytest.approx(head_bytes(way, head) + untouched, rel=0.03)


def test_no_way_holds_the_scores_of_all_tokens() -> None:
    """Qwen3-0.6B, 4 rows of 2,048 tokens: 2.3 GiB in 16 bits if they were held."""
    head = Head(8192, 1024, 151_936, 2, trained=False, on_gpu=True)
    all_scores = head.tokens * head.vocabulary * head.size
    assert head_bytes("fused", head) < 0.15 * all_scores
    assert head_bytes("cut", head) < 0.18 * all_scores
    whole = Head(8192, 1024, 151_936, 2, trained=True, on_gpu=True)
    float32_gradient = 151_936 * 1024 * 4
    assert head_bytes("fused", whole) - head_bytes("fused", head) == 1.5 * float32_gradient
    assert head_bytes("cut", whole) < head_bytes("fused", whole) - float32_gradient / 2


def test_which_way_is_taken() -> None:
    assert path_of(read({}).config) == "fused"
    assert path_of(read({"kernels": {"use_cut_ce": True}}).config) == "cut"
    assert path_of(read({"method": {"kind": "reward"}}).config) == "none"
    assert path_of(read({"method": {"kind": "dpo"}, "kernels": {"use_cut_ce": False}}).config) == "fused"
