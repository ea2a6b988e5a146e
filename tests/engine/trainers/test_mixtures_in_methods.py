"""Every method trains adapters on experts that stay packed: each expert's own pair moves, and what was packed stays so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.config.method import METHODS
from engine.config.recipes import recipes
from engine.run.store import RunFolder
from tests.engine.trainers.conftest import lines
from tests.engine.trainers.test_recipes import method_of, mixture, on_few_rows  # noqa: F401

FEW = ("dpo",)
"""By default; the others in `make test-all`."""
ON_EXPERTS = {
    "model.quantization": "nvfp4", "adapter.kind": "lora", "adapter.r": 2, "adapter.target_modules": ["q_proj"],
    "adapter.target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "optim.learning_rate": 1e-2,
    "optim.lr_scheduler_type": "constant", "optim.warmup_steps": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "method", [each if each in FEW else pytest.param(each, marks=pytest.mark.slow) for each in METHODS]
)
def test_a_method_trains_adapters_of_packed_experts(
    train: Callable[..., RunFolder],
    source: Callable[..., str],
    mixture: Path,  # noqa: F811
    method: str,
) -> None:
    name = next(each.name for each in recipes() if method_of(each.name) == method and "images" not in each.name)
    settings: dict[str, Any] = on_few_rows(name, source, mixture)
    settings = {
        key: value for key, value in settings.items() if not key.startswith(("adapter.", "run.prompts", "run.max_new"))
    }
    if method == "ppo":  # the recipe's reward, right numbers, is nothing for all of few answers: no advantage, no loss
        settings |= {"method.reward_funcs": ["regex:[a-m]", "length:4"], "optim.per_device_train_batch_size": 8}
    run = train({**settings, **ON_EXPERTS, "model.name": str(mixture)})
    rows = {entry["feature"]: entry for entry in lines(run, "receipt")[0]["entries"]}
    assert rows["packed experts"]["effective"] == "nvfp4"
    held = load_file(run.checkpoints / "checkpoint-2/adapter_model.safetensors")
    moved = [value for key, value in held.items() if ".experts." in key and "lora_B" in key]
    assert len(moved) == 2 * 2
    assert all(bool(value.any()) and bool(torch.isfinite(value).all()) for value in moved)
    if method in FEW:
        assert len(lines(run, "experts")[0]["load"]) == 2  # a line for each layer
