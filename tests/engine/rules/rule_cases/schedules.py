"""Where the rules of `engine.rules.schedules` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import POLYNOMIAL, Case

CASES: dict[str, list[Case]] = {
    "lr-scheduler-kwargs-are-the-schedules-own": [
        ({"optim.lr_scheduler_kwargs": {"num_cycles": 2}}, Facts(), "optim.lr_scheduler_kwargs.num_cycles", "error"),
        ({**POLYNOMIAL, "optim.lr_scheduler_kwargs.powr": 2}, Facts(), "optim.lr_scheduler_kwargs.powr", "error"),
        ({**POLYNOMIAL, "optim.lr_scheduler_kwargs.power": 20}, Facts(), "optim.lr_scheduler_kwargs.power", "error"),
    ],
    "a-schedule-is-no-other-by-a-second-name": [
        (
            {"optim.lr_scheduler_type": "cosine_with_restarts"},
            Facts(),
            "optim.lr_scheduler_kwargs.num_cycles",
            "error",
        ),
        ({"optim.lr_scheduler_type": "polynomial"}, Facts(), "optim.lr_scheduler_kwargs.power", "error"),
    ],
    "a-falling-rate-ends-below-its-start": [
        (
            {**POLYNOMIAL, "optim.lr_scheduler_kwargs.lr_end": 1e-3, "optim.learning_rate": 1e-3},
            Facts(),
            "optim.lr_scheduler_kwargs.lr_end",
            "error",
        ),
    ],
    "warmup-needs-a-schedule-that-has-it": [
        ({"optim.lr_scheduler_type": "constant", "optim.warmup_steps": 5}, Facts(), "optim.warmup_steps", "error"),
        ({"optim.lr_scheduler_type": "constant_with_warmup"}, Facts(), "optim.warmup_steps", "error"),
    ],
    "warmup-is-steps-or-a-share": [({"optim.warmup_steps": 2.5}, Facts(), "optim.warmup_steps", "error")],
    "warmup-ends-before-the-run": [
        ({"optim.warmup_steps": 50, "optim.max_steps": 50}, Facts(), "optim.warmup_steps", "error")
    ],
}
