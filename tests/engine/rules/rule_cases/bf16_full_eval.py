"""Where the rules of `engine.features.bf16_full_eval` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import OLD, Case

CASES: dict[str, list[Case]] = {
    "bf16-eval-needs-float32-and-held-out-rows": [
        ({"optim.bf16_full_eval": True, **more}, Facts(machine=machine), "optim.bf16_full_eval", "error")
        for more, machine in (
            ({}, None),
            ({"model.dtype": "float32"}, None),
            ({"model.dtype": "float32", "data.eval": [{"path": "b.jsonl"}]}, OLD),
        )
    ],
}
