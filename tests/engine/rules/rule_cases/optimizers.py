"""Where the rules of `engine.rules.optimizers` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import CPU, LORA, NOTHING, TINY_FACTS, Case

FASTER = {**LORA, "adapter.loraplus_lr_ratio": 16.0}
CASES: dict[str, list[Case]] = {
    "faster-second-matrices-need-one-optimizer": [
        ({**FASTER, "optim.optim": "muon"}, Facts(), "adapter.loraplus_lr_ratio", "error")
    ],
    "faster-second-matrices-where-experts-are-whole": [
        (
            {**FASTER, "run.devices": 2, "distributed.expert_parallel_size": 2},
            Facts(),
            "adapter.loraplus_lr_ratio",
            "error",
        )
    ],
    "a-rate-of-embeddings-is-part-of-loraplus": [
        ({**LORA, "adapter.loraplus_lr_embedding": 1e-4}, Facts(), "adapter.loraplus_lr_embedding", "error")
    ],
    "a-rate-of-embeddings-needs-an-adapter-on-them": [
        ({**FASTER, "adapter.loraplus_lr_embedding": 1e-4}, Facts(), "adapter.loraplus_lr_embedding", "error")
    ],
    "adam-settings-need-adam": [
        ({"optim.optim": "sgd", "optim.adam_beta2": 0.95}, Facts(), "optim.adam_beta2", "error"),
        ({"optim.optim": "lion_8bit", "optim.adam_epsilon": 1e-6}, Facts(), "optim.adam_epsilon", "error"),
        ({"optim.optim": "muon", "optim.adam_beta2": 0.95, **LORA}, Facts(), "optim.adam_beta2", "error"),
    ],
    "optimizers-of-packages-need-them": [
        ({"optim.optim": name}, Facts(packages=NOTHING), "optim.optim", "error")
        for name in ("adamw_8bit", "adopt", "flash_adamw", "schedule_free_adamw")
    ],
    "schedule-free-has-no-schedule": [
        ({"optim.optim": "schedule_free_adamw", **more}, Facts(), "optim.lr_scheduler_type", "error")
        for more in ({}, {"optim.lr_scheduler_type": "cosine", "optim.warmup_steps": 0.1})
    ],
    "galore-trains-full-weights": [
        ({"optim.optim": name, **LORA}, Facts(), "optim.optim", "error")
        for name in ("galore_adamw", "q_galore_adamw_8bit")
    ],
    "projected-layers-need-galore": [
        ({"optim.optim_target_modules": ["mlp"]}, Facts(), "optim.optim_target_modules", "error")
    ],
    "projected-layers-are-named": [
        (
            {"optim.optim": "galore_adamw", "optim.optim_target_modules": named},
            Facts(),
            "optim.optim_target_modules",
            "error",
        )
        for named in ([], "mlp.(", ["mlp", "(q"])
    ],
    "galore-has-a-low-rank": [
        ({"optim.optim": "galore_adamw"}, Facts(model=TINY_FACTS), "optim.optim_args.rank", "error"),
    ],
    "schedule-free-averages-with-beta1": [
        (
            {"optim.optim": "schedule_free_adamw", "optim.lr_scheduler_type": "constant", "optim.adam_beta1": 0},
            Facts(),
            "optim.adam_beta1",
            "error",
        )
    ],
    "paging-needs-a-gpu": [({"optim.optim": "paged_adamw_8bit"}, Facts(machine=CPU), "optim.optim", "error")],
    "optim-args-are-the-optimizers-own": [
        ({"optim.optim_args": {"alpha": 5.0}}, Facts(), "optim.optim_args.alpha", "error"),
        ({"optim.optim": "ademamix", "optim.optim_args": {"aplha": 5}}, Facts(), "optim.optim_args.aplha", "error"),
        ({"optim.optim": "ademamix", "optim.optim_args": {"beta3": 1.5}}, Facts(), "optim.optim_args.beta3", "error"),
        (
            {"optim.optim": "ademamix", "optim.optim_args": {"t_alpha": 0.5}},
            Facts(),
            "optim.optim_args.t_alpha",
            "error",
        ),
        ({"optim.optim": "muon", "optim.optim_args": {"ns_steps": 0}}, Facts(), "optim.optim_args.ns_steps", "error"),
        (
            {"optim.optim": "q_galore_adamw_8bit", "optim.optim_args": {"proj_bits": 5}},
            Facts(),
            "optim.optim_args.proj_bits",
            "error",
        ),
        (
            {"optim.optim": "muon", "optim.optim_args": {"adjust_lr_fn": "fast"}},
            Facts(),
            "optim.optim_args.adjust_lr_fn",
            "error",
        ),
    ],
}
