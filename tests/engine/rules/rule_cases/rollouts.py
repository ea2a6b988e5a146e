"""Where the rules of `engine.rules.rollouts` speak."""

from __future__ import annotations

from dataclasses import replace

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import GRPO, LORA, TINY_FACTS, Case, model, rows, source

CASES: dict[str, list[Case]] = {
    "rewards-are-named": [({"method.kind": "grpo"}, Facts(), "method.reward_funcs", "error")],
    "rewards-are-known": [
        ({**GRPO, "method.reward_funcs": ["gsm8k", text]}, Facts(), "method.reward_funcs.1", "error")
        for text in ("exakt_match", "0 * gsm8k", "regex:(", "length", "mine.py:")
    ],
    "reward-files-exist": [
        (
            {**GRPO, "method.reward_funcs": ["gsm8k", text]},
            Facts(files={"mine.py": False, "shape.json": False, "./judge": False}),
            "method.reward_funcs.1",
            "error",
        )
        for text in ("0.5 * mine.py:score", "json_schema:shape.json", "model:./judge")
    ]
    + [
        (
            {**GRPO, "method.reward_funcs": ["gsm8k", "mine.py:scor"]},
            Facts(reward_flaws={"mine.py:scor": "mine.py has no function scor. Did you mean score?"}),
            "method.reward_funcs.1",
            "error",
        )
    ],
    "groups-need-more-than-one-answer": [
        ({**GRPO, "method.num_generations": 1}, Facts(), "method.num_generations", "error")
    ],
    "batches-hold-whole-groups": [
        ({**GRPO, "optim.per_device_train_batch_size": 3}, Facts(), "optim.per_device_train_batch_size", "error"),
        (
            {**GRPO, "optim.per_device_train_batch_size": 5, "method.steps_per_generation": 4},
            Facts(),
            "optim.per_device_train_batch_size",
            "error",
        ),
    ],
    "several-rewards-for-gdpo": [({**GRPO, "method.kind": "gdpo"}, Facts(), "method.reward_funcs", "warning")],
    "advantages-need-more-than-one-answer": [
        (
            {
                **GRPO,
                "method.kind": "ppo",
                "optim.per_device_train_batch_size": 1,
                "optim.gradient_accumulation_steps": 1,
            },
            Facts(),
            "optim.per_device_train_batch_size",
            "error",
        )
    ],
    "held-out-batches-hold-whole-groups": [
        (
            {**GRPO, "data.eval": [{"path": "b.jsonl"}], "optim.per_device_eval_batch_size": 12},
            Facts(),
            "optim.per_device_eval_batch_size",
            "error",
        )
    ],
    "there-are-prompts-for-one-sampling": [
        ({**GRPO, "optim.gradient_accumulation_steps": 16}, source(rows=9), "data.train", "error")
    ],
    "answers-stay-within-the-model": [
        (
            {**GRPO, "data.max_length": 4096, "method.max_completion_length": 500},
            replace(rows(longest=3800), model=TINY_FACTS),
            "method.max_completion_length",
            "error",
        ),
        (
            {**GRPO, "data.max_length": 4096, "method.max_completion_length": 500},
            replace(rows(longest=5000), model=TINY_FACTS),
            "data.max_length",
            "error",
        ),
        (
            {**GRPO, "data.max_length": 4000},
            Facts(model=TINY_FACTS),
            "method.max_completion_length",
            "hint",
        ),
        (
            {**GRPO, "method.max_completion_length": 5000},
            Facts(model=TINY_FACTS),
            "method.max_completion_length",
            "error",
        ),
    ],
    "clipping-needs-a-loss-that-clips": [
        ({**GRPO, "method.loss_type": "sapo", "method.epsilon": 0.3}, Facts(), "method.epsilon", "error"),
        ({**GRPO, "method.loss_type": "sapo", "method.epsilon_high": 0.3}, Facts(), "method.epsilon_high", "error"),
        ({**GRPO, "method.loss_type": "cispo"}, Facts(), "method.epsilon_high", "error"),
    ],
    "bounds-need-answers-that-grow-old": [
        ({**GRPO, "method.epsilon": 0.3}, Facts(), "method.epsilon", "error"),
        ({**GRPO, "method.epsilon_high": 0.28}, Facts(), "method.epsilon_high", "error"),
        *(
            ({**GRPO, "method.epsilon": 0.3, **beside}, Facts(), "method.epsilon", "error")
            for beside in ({"method.replay_buffer_size": 8}, {"method.async_prefetch": "rewards"})
        ),
        (
            {**GRPO, "method.importance_sampling_level": "sequence", "method.loss_type": "grpo"},
            Facts(),
            "method.importance_sampling_level",
            "error",
        ),
        (
            {**GRPO, "method.kind": "ppo", "method.num_iterations": 1, "method.cliprange_value": 0.4},
            Facts(),
            "method.cliprange_value",
            "error",
        ),
    ],
    "ratios-of-whole-answers-need-equal-answers": [
        ({**GRPO, "method.importance_sampling_level": "sequence"}, Facts(), "method.loss_type", "warning")
    ],
    "each-answer-is-held-to-the-reference": [
        (
            {**GRPO, "method.skip_zero_advantage": True, "method.beta": 0.1},
            Facts(),
            "method.skip_zero_advantage",
            "error",
        )
    ],
    "prompts-come-back-where-that-is-asked-for": [
        ({**GRPO, "method.reroll_max_groups": 2}, Facts(), "method.reroll_max_groups", "error")
    ],
    "failed-prompts-are-tried-where-they-come-back": [
        ({**GRPO, "method.reroll_max_tries": 2}, Facts(), "method.reroll_max_tries", "error")
    ],
    "an-oldest-replay-where-groups-are-kept": [
        ({**GRPO, "method.replay_max_age": 2}, Facts(), "method.replay_max_age", "error")
    ],
    "old-log-probabilities-of-replayed-groups": [
        ({**GRPO, "method.replay_recompute_logps": False}, Facts(), "method.replay_recompute_logps", "error")
    ],
    "a-weight-where-groups-are-kept": [
        ({**GRPO, "method.replay_max_weight": 3.0}, Facts(), "method.replay_max_weight", "error")
    ],
    "a-weight-where-the-ratio-is-none": [
        (
            {
                **GRPO,
                "method.replay_buffer_size": 8,
                "method.replay_recompute_logps": False,
                "method.replay_max_weight": 3.0,
            },
            Facts(),
            "method.replay_max_weight",
            "error",
        )
    ],
    "other-prompts-are-asked-too": [
        (
            {**GRPO, "method.reroll_start_fraction": 0.5, **settings},
            Facts(),
            "method.reroll_max_groups",
            "warning",
        )
        for settings in (
            {"optim.per_device_train_batch_size": 4},
            {"optim.per_device_train_batch_size": 2, "method.steps_per_generation": 4},
            {"method.reroll_max_groups": 2},
        )
    ],
    "experts-are-balanced-over-all-tokens": [
        (
            {**GRPO, "method.skip_zero_advantage": True},
            model(experts=8),
            "method.skip_zero_advantage",
            "error",
        )
    ],
    "a-reference-needs-weight": [({**GRPO, "method.reference": "copy"}, Facts(), "method.reference", "warning")],
    "sampled-and-trained-with-the-same-weights": [
        ({**GRPO, **LORA, "adapter.lora_dropout": 0.1}, Facts(), "adapter.lora_dropout", "warning")
    ],
}
