"""Where the rules of `engine.rules.async_rollouts` speak."""

from __future__ import annotations

from engine.config.facts import Facts, VisionFacts
from tests.engine.rules.rule_cases.shared import CPU, GRPO, H100, LORA, Case, model

CASES: dict[str, list[Case]] = {
    "the-generating-process-is-given-an-adapter": [
        ({**GRPO, "method.async_prefetch": "answers"}, Facts(), "method.async_prefetch", "error")
    ],
    "prompts-to-come-are-known-by-number": [
        (
            {**GRPO, "method.async_prefetch": "rewards", "data.streaming": True, "optim.max_steps": 5},
            Facts(),
            "method.async_prefetch",
            "error",
        )
    ],
    "replays-need-answers-of-now": [
        (
            {**GRPO, "method.async_prefetch": "rewards", "method.replay_buffer_size": 8},
            Facts(),
            "method.replay_buffer_size",
            "error",
        )
    ],
    "samplings-ahead-need-one-process": [
        ({**GRPO, "method.async_prefetch": "rewards", "run.devices": 2}, Facts(), "method.async_prefetch", "error")
    ],
    "the-generating-process-has-a-gpu-that-is-there": [
        (
            {**GRPO, **LORA, "method.async_prefetch": "answers", "method.generation_device": 1},
            Facts(machine=machine),
            "method.generation_device",
            "error",
        )
        for machine in (CPU, H100)
    ],
    "samplings-ahead-are-of-text": [
        (
            {**GRPO, "method.async_prefetch": "rewards"},
            model(vision=VisionFacts(8, 2, 16, gated=False, rotary=False, patches=4)),
            "method.async_prefetch",
            "error",
        )
    ],
    **{
        f"{name.replace('_', '-')}-counts-with-samplings-ahead": [
            ({**GRPO, **LORA, f"method.{name}": value, **beside}, Facts(), f"method.{name}", "error")
            for beside in ({}, *([{"method.async_prefetch": "rewards"}] if of_process else []))
        ]
        for name, value, of_process in (
            ("prefetch_depth", 2, False),
            ("importance_sampling_mode", "token_mask", False),
            ("importance_sampling_cap", 2.0, False),
            ("weight_sync_steps", 2, True),
            ("generation_timeout", 60.0, True),
            ("generation_device", 0, True),
        )
    },
    "reward-functions-compute-meanwhile": [
        (
            {**GRPO, "method.async_prefetch": "rewards", "method.reward_funcs": ["model:someone/judge"]},
            Facts(),
            "method.async_prefetch",
            "warning",
        )
    ],
    "only-old-answers-are-far-off": [
        ({**GRPO, "method.off_policy_mask_threshold": 0.5}, Facts(), "method.off_policy_mask_threshold", "error")
    ],
}
