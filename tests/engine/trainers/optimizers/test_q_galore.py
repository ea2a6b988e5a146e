"""Q-GaLore: bitsandbytes' own steps in the projected space, a projection of few bits, renewed less often where it is still."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("bitsandbytes", reason="8-bit states come from bitsandbytes")

from bitsandbytes.optim import AdamW8bit

from engine.trainers.optimizers.q_galore import QGaLoreAdamW8bit, quantized, restored, signed

PROJECTION = {
    "rank": 64, "update_proj_gap": 100, "scale": 0.5, "proj_bits": 4, "cos_threshold": 0.4, "gamma_proj": 2.0,
    "queue_size": 2,
}  # fmt: skip


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [256, 1000, 7])
def test_a_projection_comes_back_within_half_a_step_of_its_scale(bits, count):
    torch.manual_seed(0)
    values = torch.randn(count)
    numbers, scale, least = quantized(values, bits)
    assert numbers.numel() == -(-count // 256) * 256 * bits // 8
    found = restored(numbers, scale, least, bits, count)
    assert (found - values).abs().max() <= scale.max() / 2 + 1e-6


def test_a_step_does_not_depend_on_the_sign_that_a_library_gives_singular_vectors(monkeypatch):
    svd, found = torch.linalg.svd, []
    for turned in (1, -1):

        def either(values, turned=turned, **settings):
            u, s, v = svd(values, **settings)
            return u * turned, s, v * turned

        monkeypatch.setattr(torch.linalg, "svd", either)
        torch.manual_seed(3)
        weight = torch.nn.Parameter(torch.randn(96, 80))
        optimizer = QGaLoreAdamW8bit([{"params": [weight], **PROJECTION}], lr=1e-2)
        for _ in range(3):
            weight.grad = torch.randn(96, 80)
            optimizer.step()
        found.append(weight.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("shape", [(96, 80), (80, 96)], ids=str)
def test_steps_are_the_librarys_in_the_projected_space(shape):
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(shape))
    wanted, grads = weight.detach().clone(), [torch.randn(shape) for _ in range(4)]
    optimizer = QGaLoreAdamW8bit([{"params": [weight], **PROJECTION}], lr=1e-2, weight_decay=0.1)
    tall = shape[0] >= shape[1]
    u, _, v = torch.linalg.svd(grads[0], full_matrices=False)
    exact = signed(v[:64] if tall else u.T[:64])
    basis = restored(*quantized(exact, 4), 4, exact.numel()).view(exact.shape)
    low = torch.nn.Parameter(torch.zeros((shape[0], 64) if tall else (64, shape[1])))
    library = AdamW8bit([low], lr=1e-2, weight_decay=0.0)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
        low.data.zero_()
        low.grad = grad @ basis.T if tall else basis @ grad
        library.step()
        wanted = wanted * (1 - 1e-2 * 0.1) + 0.5 * (low.data @ basis if tall else basis.T @ low.data)
    assert torch.allclose(weight, wanted, atol=1e-6)
    state = optimizer.state[weight]
    assert state["state1"].dtype == torch.uint8
    assert state["state1"].shape == low.shape
    assert state["basis"].numel() == 64 * 80 // 2
    assert len(optimizer.state) == 1


@pytest.mark.parametrize(("still", "gap"), [(True, 4), (False, 1)])
def test_a_layer_whose_direction_stays_is_projected_anew_less_often(still, gap):
    torch.manual_seed(2)
    weight, grad = torch.nn.Parameter(torch.zeros(64, 48)), torch.randn(64, 48)
    group = {"params": [weight], **PROJECTION, "rank": 4, "update_proj_gap": 1}
    optimizer = QGaLoreAdamW8bit([group], lr=1e-3)
    for _ in range(8):
        weight.grad = grad.clone() if still else torch.randn(64, 48)
        optimizer.step()
    assert optimizer.state[weight]["gap"] == gap
