"""Where the rules of `engine.features.tiled_mlp` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import Case, model

CASES: dict[str, list[Case]] = {
    "tiles-need-tiled-mlp": [
        ({"memory.tiled_mlp_tokens": 512}, Facts(), "memory.tiled_mlp_tokens", "error"),
        ({"memory.tiled_mlp_fp32_sums": True}, Facts(), "memory.tiled_mlp_fp32_sums", "error"),
    ],
    "a-tile-is-smaller-than-a-batch": [
        (
            {"memory.tiled_mlp": True, "memory.tiled_mlp_tokens": 16384, "optim.per_device_train_batch_size": 8},
            Facts(),
            "memory.tiled_mlp_tokens",
            "error",
        )
    ],
    "tiles-need-a-block-of-tokens-by-themselves": [
        ({"memory.tiled_mlp": True}, model(model_type="gpt_oss", parameters=1000), "memory.tiled_mlp", "error")
    ],
}
