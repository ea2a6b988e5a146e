"""A few logits of each row are those of the whole product, and so are their gradients, in chunks of any size."""

from __future__ import annotations

import pytest
import torch

from engine.trainers import distill


@pytest.mark.parametrize("room", [1, 2000, 64 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_they_are_gathered_from_the_product(monkeypatch, room, dtype):
    monkeypatch.setattr(distill, "ROOM", room)
    torch.manual_seed(0)
    ids = torch.randint(128, (13, 5))
    ids[:, 1] = ids[:, 0]  # a token that is named twice gets both gradients
    weights = torch.randn(13, 5, dtype=dtype)
    given = [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((13, 32), (128, 32), (128,))]
    hidden, head, bias = given
    expected = (hidden @ head.T + bias).gather(1, ids)
    truth = torch.autograd.grad((expected * weights).sum(), given)
    found = distill.some_logits(hidden, head, ids, bias)
    close = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found, expected, **close)
    for ours, theirs in zip(torch.autograd.grad((found * weights).sum(), given), truth, strict=True):
        torch.testing.assert_close(ours, theirs, **close)
