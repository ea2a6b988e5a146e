"""Which slices' logits wait for the gradient, and that each place they can wait in gives the numbers of plain torch."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.linear_logp import OUTPUTS, linear_logp, linear_logp_reference
from engine.kernels.requirements import layout


@pytest.mark.parametrize(
    ("count", "hidden", "weight_bytes"), [(8192, 4096, 2), (8192, 1024, 2), (8192, 4096, 4), (700, 1024, 2)]
)
@pytest.mark.parametrize("room", [32 << 20, 320 << 20, 4 << 30])
def test_what_waits_fits_its_memory_and_no_gradient_lands_on_it(count, hidden, weight_bytes, room):
    vocabulary = 151_936
    chosen = layout(count, hidden, vocabulary, 2, weight_bytes, room)
    words, waiting, kept = chosen
    parts = chosen.parts(vocabulary)
    slices = len(parts)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == vocabulary
    assert all(part.stop - part.start == words for part in [*parts[:waiting], *parts[slices - kept :]])
    assert waiting * words * count * 2 <= vocabulary * hidden * weight_bytes
    buffers = kept + (kept < slices)
    assert buffers * words * count * 2 <= max(room, 256 * count * 2)
    for number in range(waiting):  # the weight gradient of slice `number` ends before the logits of the next begin
        assert (number + 1) * words * hidden * weight_bytes <= (number + 1) * words * count * 2


def test_no_more_than_two_fifths_are_formed_again_where_half_fits_the_gradient():
    vocabulary = 151_936
    words, waiting, kept = layout(8192, 4096, vocabulary, 2, 2, 320 << 20)
    assert 1 - (waiting + kept) * words / vocabulary <= 0.44
    assert words >= 8192
    words, waiting, kept = layout(8192, 4096, vocabulary, 2, 2, 3 << 30)
    assert kept * words >= vocabulary


@pytest.mark.parametrize("buffers", [1, 2, 3, 20])
@pytest.mark.parametrize(("rows", "hidden"), [(40, 8), (16, 8), (5, 8)])
@pytest.mark.parametrize("trained", ["head and bias", "head", "bias"])
def test_scores_and_gradients_in_float64_are_those_of_all_logits_at_once(rows, hidden, buffers, trained):
    torch.manual_seed(0)
    vocabulary = 1500
    h = torch.randn(rows, hidden, dtype=torch.float64, requires_grad=True)
    w = torch.randn(vocabulary, hidden, dtype=torch.float64, requires_grad="head" in trained)
    bias = torch.randn(vocabulary, dtype=torch.float64)
    bias[300:700] = float("-inf")  # whole slices of words that cannot come
    bias.requires_grad_("bias" in trained)
    targets = torch.randint(700, vocabulary, (rows,))
    targets[1] = 3
    leaves = [x for x in (h, w, bias) if x.requires_grad]
    settings = {"bias": bias, "z_loss": 0.01, "soft_cap": None, "temperature": 0.9}
    ours = linear_logp(
        h, w, targets, outputs=(*OUTPUTS, "cross_entropy"), workspace_bytes=buffers * rows * 256 * 8, **settings
    )
    truth = linear_logp_reference(h, w, targets, **settings)
    for name in ("log_probs", "entropy", "log_sum_sq_probs", "cross_entropy", "is_top1"):
        torch.testing.assert_close(getattr(ours, name), getattr(truth, name), rtol=1e-12, atol=1e-12)
    weights = torch.rand(3, rows, dtype=torch.float64)
    found, right = (
        torch.autograd.grad(
            (weights * torch.stack([scores.log_probs, scores.entropy, scores.cross_entropy])).sum(), leaves
        )
        for scores in (ours, truth)
    )
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b.nan_to_num(), rtol=1e-10, atol=1e-11)


def test_looking_alone_holds_no_logits():
    h = torch.randn(64, 8)
    w = torch.randn(4000, 8, requires_grad=True)
    targets = torch.arange(64)
    with torch.no_grad():
        assert linear_logp(h, w, targets, outputs=()).log_probs.grad_fn is None
    scores = linear_logp(h, w, targets, outputs=()).log_probs
    node = scores.grad_fn
    assert node.slices is not None
    scores.sum().backward()
    assert node.slices is None


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("wrong", [-5, 50])
def test_a_target_outside_the_vocabulary_is_refused_on_a_cpu(trained, wrong):
    h = torch.randn(4, 8, requires_grad=True)
    w = torch.randn(50, 8, requires_grad=trained)
    with pytest.raises((IndexError, RuntimeError)):
        linear_logp(h, w, torch.tensor([1, wrong, 2, 3]), outputs=())
