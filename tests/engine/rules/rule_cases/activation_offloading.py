"""Where the rules of `engine.features.activation_offloading` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import CPU, H100, Case

CASES: dict[str, list[Case]] = {
    "offloading-to-the-host-needs-a-gpu": [
        ({"memory.activation_offloading": "cpu"}, Facts(machine=CPU), "memory.activation_offloading", "error")
    ],
    "offloading-moves-what-autograd-saves": [
        (
            {"memory.activation_offloading": "cpu", "memory.gradient_checkpointing": tier},
            Facts(machine=H100),
            "memory.gradient_checkpointing",
            "error",
        )
        for tier in ("selective", "medium")
    ],
}
