"""Where the rules of `engine.rules.later` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import Case

CASES: dict[str, list[Case]] = {
    "mlx-is-not-a-backend-here": [({"run.backend": "mlx"}, Facts(), "run.backend", "error")],
    "unsloth-is-not-a-backend-here": [({"run.backend": "unsloth"}, Facts(), "run.backend", "error")],
}
