"""Dion: the paper's steps, orthogonal updates of the rank asked for, nothing of the gradient lost."""

from __future__ import annotations

import math

import pytest
import torch

from engine.trainers.optimizers.dion import Dion, first_basis, rank_of


def naive(weight, grads, basis, *, lr, momentum, decay, scale):
    """Algorithm 1 as it is written, in float64, for a weight with at least as many rows as columns."""
    weight, basis = weight.double(), basis.double()
    held = torch.zeros_like(weight)
    for grad in grads:
        gathered = held + grad.double()
        left = gathered @ basis
        left = left @ torch.linalg.inv(torch.linalg.cholesky(left.T @ left).T)
        right = gathered.T @ left
        held = gathered - (1 - momentum) * left @ right.T
        basis = right / right.norm(dim=0)
        weight = (1 - lr * decay) * weight - lr * scale * left @ basis.T
    return weight


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16)], ids=str)
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_steps_are_those_of_the_paper(shape, adjust):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape))
    grads = [torch.randn(shape) for _ in range(5)]
    start, basis = weight.detach().clone(), first_basis(weight, 0.25, 0)
    lying = shape[0] < shape[1]
    scale = 0.2 * math.sqrt(max(shape)) if adjust == "match_rms_adamw" else math.sqrt(shape[0] / shape[1])
    turn = (lambda each: each.T) if lying else (lambda each: each)
    wanted = naive(turn(start), [turn(grad) for grad in grads], basis, lr=0.05, momentum=0.9, decay=0.1, scale=scale)
    optimizer = Dion([weight], lr=0.05, momentum=0.9, weight_decay=0.1, adjust_lr_fn=adjust)
    for grad in grads:
        weight.grad = grad
        optimizer.step()
    assert torch.allclose(weight.double(), turn(wanted), atol=2e-5)
    assert not torch.allclose(weight, start, atol=0.05)


def test_an_update_is_orthogonal_and_of_the_rank_asked_for():
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.zeros(32, 16))
    weight.grad = torch.randn(32, 16)
    Dion([weight], lr=1.0, rank_fraction=0.5, adjust_lr_fn="original").step()
    lengths = torch.linalg.svdvals(weight.detach())
    assert (lengths > 1e-3).sum() == rank_of(32, 16, 0.5) == 8
    assert lengths.norm() == pytest.approx(math.sqrt(8 * 2), rel=1e-4)


def test_at_full_rank_the_step_becomes_the_orthogonal_factor_of_the_gradient():
    """With a gradient that stays, its basis converges: the step is UV' of its singular value decomposition, as Muon's."""
    torch.manual_seed(2)
    u, _ = torch.linalg.qr(torch.randn(12, 6))
    v, _ = torch.linalg.qr(torch.randn(6, 6))
    weight = torch.nn.Parameter(torch.zeros(12, 6))
    optimizer = Dion([weight], lr=0.0, momentum=0.5, rank_fraction=1.0, adjust_lr_fn="original")
    for _ in range(60):
        weight.grad = u @ torch.diag(torch.tensor([9.0, 6.0, 4.0, 2.5, 1.5, 1.0])) @ v.T
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    assert torch.allclose(weight / math.sqrt(2), -u @ v.T, atol=1e-3)


def test_the_runs_random_numbers_are_left_alone():
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    first_basis(torch.zeros(8, 8), 0.5, 1)
    assert torch.equal(torch.rand(3), wanted)


def test_a_gradient_of_zeros_moves_nothing():
    weight = torch.nn.Parameter(torch.ones(8, 4))
    weight.grad = torch.zeros(8, 4)
    Dion([weight], lr=0.1).step()
    assert torch.equal(weight, torch.ones(8, 4))


def test_a_vector_is_refused():
    with pytest.raises(ValueError, match="moves matrices"):
        Dion([torch.nn.Parameter(torch.zeros(4))], lr=0.1)
