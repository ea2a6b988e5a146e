"""Each format's numbers train adapters as their dequantized twins do, bit for bit; tensors that do not fit are refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.features.load import load
from engine.models.adapters import add_adapter
from engine.models.stored_packed.linear import PackedLinear
from tests.engine.models.stored_packed.packed_files import FORMS, packed_folders
from tests.engine.models.test_stored_fp8 import config, gradients
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from, source, train  # noqa: F401

LINEARS = 4 * 7


@pytest.mark.parametrize("form", FORMS)
def test_adapters_on_packed_numbers_have_the_gradients_of_the_dequantized_model(plain, tmp_path, form):
    kind, told = FORMS[form]
    packed, twin = packed_folders(plain, tmp_path, kind, **told)
    found = []
    for folder in (packed, twin):
        torch.manual_seed(1)
        made = config(folder)
        loaded = load(made)
        weights = {path: each for path, each in loaded.model.named_modules() if isinstance(each, torch.nn.Linear)}
        found.append((loaded, weights, *gradients(add_adapter(loaded.model, made))))
    (ours, packs, loss, grads), (_, plains, twin_loss, twin_grads) = found
    exact = form not in ("nvfp4", "modelopt")  # their scale is a product of two here and a quotient there
    assert ours.stored_packed.layers == sum(isinstance(each, PackedLinear) for each in packs.values()) == LINEARS
    for path, each in packs.items():
        if isinstance(each, PackedLinear):
            torch.testing.assert_close(
                each.dequantize(torch.float32), plains[path].weight, rtol=0 if exact else 1e-6, atol=0
            )
    assert loss == twin_loss if exact else loss == pytest.approx(twin_loss, rel=1e-5)
    assert grads.keys() == twin_grads.keys()
    assert len(grads) == 2 * LINEARS
    for name, grad in grads.items():
        torch.testing.assert_close(grad, twin_grads[name], rtol=0 if exact else 1e-4, atol=0 if exact else 1e-6)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"qweight": torch.zeros(7, 64, dtype=torch.int32)}, "7 words of 32 bits are no 128 numbers"),
        ({"qweight": torch.zeros(16, 63, dtype=torch.int32)}, r"its numbers have the shape \(16, 63\) for 64 x 128"),
        ({"scales": None}, "its scales have the shape None for 64 rows"),
        ({"scales": torch.full((4, 64), float("nan"), dtype=torch.float16)}, "the scales of .* are not finite"),
        (
            {"qzeros": torch.zeros(3, 8, dtype=torch.int32)},
            r"its zero points have the shape \(3, 64\), and \(4, 64\) is wanted",
        ),
        ({"g_idx": torch.full((128,), 4, dtype=torch.int32)}, "its g_idx names groups beyond its 4"),
        ({"g_idx": torch.zeros(3, dtype=torch.int32)}, "its g_idx names groups of 3 columns of 128"),
        ({"bias": torch.ones(64)}, "has a bias in the files, for which the model has no place"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_in_a_sentence(plain, tmp_path, change, sentence):
    packed, _ = packed_folders(plain, tmp_path, "gptq")
    tensors = load_file(packed / "model.safetensors")
    changed = {f"model.layers.2.mlp.down_proj.{end}": value for end, value in change.items()}
    tensors = {key: value for key, value in {**tensors, **changed}.items() if value is not None}
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=sentence):
        load(config(packed))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("form", FORMS)
def test_packed_numbers_on_the_gpu_are_those_of_the_dequantized_model(plain, tmp_path, form):
    kind, told = FORMS[form]
    packed, twin = packed_folders(plain, tmp_path, kind, **told)
    found = []
    for folder in (packed, twin):
        torch.manual_seed(1)
        made = config(folder, "bfloat16")
        found.append((folder, *gradients(add_adapter(load(made).model.cuda(), made))))
    (_, loss, grads), (_, twin_loss, twin_grads) = found
    assert loss == pytest.approx(twin_loss, rel=1e-3)
    for name, grad in grads.items():
        assert (grad - twin_grads[name]).norm() <= 2e-2 * twin_grads[name].norm(), name
