"""Where the rules of `engine.rules.fit` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from engine.hardware import parse_machine
from tests.engine.rules.rule_cases.shared import LARGE, Case

CASES: dict[str, list[Case]] = {
    "it-fits-into-memory": [
        (
            {"model.name": "Qwen/Qwen3-8B"},
            Facts(machine=parse_machine("1xRTX4090-24GB"), model=LARGE),
            "optim.per_device_train_batch_size",
            "error",
        )
    ],
}
