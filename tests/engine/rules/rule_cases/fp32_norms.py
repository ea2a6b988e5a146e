"""Where the rules of `engine.features.fp32_norms` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import Case

CASES: dict[str, list[Case]] = {
    "fp32-norms-stand-between-fewer-bits": [
        ({"memory.fp32_norms": True, "model.dtype": "float32"}, Facts(), "memory.fp32_norms", "error")
    ],
}
