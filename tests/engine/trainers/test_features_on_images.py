"""Features beside images: each one serves them with the same losses."""

from __future__ import annotations

import pytest

from tests.engine.seeing import BUILDERS
from tests.engine.trainers.conftest import lines
from tests.engine.trainers.test_against_trl import images_with_answers

FEATURES = {
    "cut cross-entropy": {"kernels.use_cut_ce": True},
    "selective": {"memory.gradient_checkpointing": "selective"},
    "full": {"memory.gradient_checkpointing": "full"},
    "disk": {"memory.gradient_checkpointing": "full", "memory.activation_offloading": "disk"},
    "tiles": {"memory.tiled_mlp": True, "memory.tiled_mlp_tokens": 16},
    "eager": {"model.attention": "eager"},
    "streamed": {"data.streaming": True, "data.shuffle": False},
    "held out": {"run.eval_steps": 1},
}
LORA = {"adapter.kind": "lora", "adapter.r": 4}
WITH_LORA = {"fused lora": {"kernels.fused_lora": True}, "plain lora": {}}


@pytest.mark.parametrize(
    "family", [each if each == "gemma3" else pytest.param(each, marks=pytest.mark.slow) for each in BUILDERS]
)
def test_features_serve_images_with_the_same_losses(train, source, tmp_path, shared_data, family):
    folder = BUILDERS[family](shared_data / "tokenizers/minimind", tmp_path / family)
    rows = source(images_with_answers(tmp_path, 8))
    base = {"model.name": str(folder), "data.max_length": 512, "optim.max_steps": 2, "data.shuffle": False}
    base |= {"data.train": [{"path": rows}], "optim.gradient_accumulation_steps": 1}

    def losses(**settings):
        run = train({**base, **settings})
        return [event["loss"] for event in lines(run, "metrics") if "loss" in event]

    plain, adapted = losses(), losses(**LORA)
    assert len(plain) == len(adapted) == 2
    wrong = {}
    for name, settings in FEATURES.items():
        more = {"data.eval": [{"path": rows}]} if name == "held out" else {}
        if (found := losses(**settings, **more)) != pytest.approx(plain, rel=1e-5) and name != "streamed":
            wrong[name] = found
        assert len(found) == 2
    for name, settings in WITH_LORA.items():
        if (found := losses(**LORA, **settings)) != pytest.approx(adapted, rel=1e-5):
            wrong[name] = found
    assert not wrong, (plain, adapted)
