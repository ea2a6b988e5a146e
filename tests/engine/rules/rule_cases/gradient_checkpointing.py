"""Where the rules of `engine.features.gradient_checkpointing` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import Case

_SOME = {"memory.recompute_num_layers": 12}
CASES: dict[str, list[Case]] = {
    "layers-computed-again-need-checkpointing": [
        ({**_SOME, "memory.gradient_checkpointing": False}, Facts(), "memory.recompute_num_layers", "warning")
    ],
    "layers-that-keep-everything-stay-where-they-are": [
        ({**_SOME, "memory.layer_offloading": True}, Facts(), "memory.recompute_num_layers", "error")
    ],
    "layers-that-keep-everything-stay-on-the-card": [
        ({**_SOME, "memory.activation_offloading": "cpu"}, Facts(), "memory.recompute_num_layers", "error")
    ],
}
