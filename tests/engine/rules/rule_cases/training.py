"""Where the rules of `engine.rules.training` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import CPU, DPO, LORA, OLD, TINY_FACTS, Case, model

MIXTURE = model(
    model_type="qwen3_moe", experts=8, expert_weights=(("gate_up_proj", 64, 96, 2), ("down_proj", 48, 64, 2))
)

CASES: dict[str, list[Case]] = {
    "noise-is-for-answers-that-are-not-compared": [
        ({**DPO, "optim.neftune_noise_alpha": 5.0}, Facts(), "optim.neftune_noise_alpha", "error")
    ],
    "noise-knows-the-length-of-rows": [
        (
            {"optim.neftune_noise_alpha": 5.0, "run.devices": 2, "distributed.context_parallel_size": 2},
            Facts(),
            "optim.neftune_noise_alpha",
            "error",
        )
    ],
    "target-modules-name-layers": [
        ({**LORA, "adapter.target_modules": "(q_proj"}, Facts(), "adapter.target_modules", "error"),
        ({**LORA, "adapter.target_modules": []}, Facts(), "adapter.target_modules", "error"),
        ({**LORA, "adapter.target_modules": "q_proj"}, Facts(), "adapter.target_modules", "error"),
        ({**LORA, "adapter.target_modules": "all-liner"}, Facts(), "adapter.target_modules", "error"),
    ],
    "target-modules-exist-in-the-model": [
        (
            {**LORA, "adapter.target_modules": ["q_proj", "v_porj"]},
            Facts(model=TINY_FACTS),
            "adapter.target_modules.1",
            "error",
        )
    ],
    "biases-change-the-base": [({**DPO, **LORA, "adapter.bias": "all"}, Facts(), "adapter.bias", "error")],
    "the-head-has-no-adapter": [
        ({**LORA, "adapter.target_modules": ["q_proj", "lm_head"]}, Facts(), "adapter.target_modules", "error"),
        (
            {**DPO, **LORA, "adapter.target_modules": ["q_proj", "model.lm_head"]},
            Facts(),
            "adapter.target_modules",
            "error",
        ),
    ],
    "biases-are-there": [({**LORA, "adapter.bias": "all"}, model(biases=False), "adapter.bias", "error")],
    "saved-modules-exist-in-the-model": [
        (
            {**LORA, "adapter.modules_to_save": ["lm_head", "embed_token"]},
            model(modules=frozenset({"model", "model.embed_tokens"})),
            "adapter.modules_to_save.1",
            "error",
        )
    ],
    "saved-modules-are-not-quantized": [
        (
            {**LORA, "model.quantization": "nf4", "adapter.modules_to_save": ["q_proj"]},
            Facts(model=TINY_FACTS),
            "adapter.modules_to_save",
            "error",
        )
    ],
    "target-parameters-are-plain-lora": [
        (
            {**LORA, "adapter.target_parameters": ["mlp.experts.down_proj"], name: value},
            facts,
            "adapter.target_parameters",
            "error",
        )
        for name, value, facts in (
            ("adapter.use_dora", True, Facts()),
            ("adapter.lora_dropout", 0.1, Facts()),
            ("model.quantization", "fp8", Facts()),
            ("model.quantization", "nf4", Facts(model=TINY_FACTS)),
            ("adapter.r", 4, Facts(model=TINY_FACTS)),
            ("adapter.target_parameters", ["mlp.experts.gate_proj"], Facts()),
            ("adapter.target_parameters", ["mlp.experts.3.up_proj.weight"], Facts()),
            ("adapter.target_parameters", ["mlp.experts.gate_up_projj"], MIXTURE),
        )
    ],
    "float32-adapters-stand-beside-bfloat16": [
        (
            {**LORA, "adapter.autocast_adapter_dtype": True, "model.dtype": "float32"},
            Facts(),
            "adapter.autocast_adapter_dtype",
            "error",
        )
    ],
    "unfrozen-parameters-are-expressions": [
        ({"adapter.unfrozen_parameters": ["lm_head", "layers.(1"]}, Facts(), "adapter.unfrozen_parameters.1", "error"),
        ({"adapter.unfrozen_parameters": [" "]}, Facts(), "adapter.unfrozen_parameters.0", "error"),
    ],
    "unfrozen-parameters-match-weights": [
        ({"adapter.unfrozen_parameters": ["layers"]}, Facts(model=TINY_FACTS), "adapter.unfrozen_parameters", "error")
    ],
    "epochs-or-steps": [
        ({"optim.max_steps": 5, "optim.num_train_epochs": 3}, Facts(), "optim.num_train_epochs", "error")
    ],
    "learning-rate-is-in-proportion": [
        ({"model.name": "Qwen/Qwen3-8B", "optim.learning_rate": 0.1}, Facts(), "optim.learning_rate", "warning"),
        ({"optim.learning_rate": 10.0}, Facts(), "optim.learning_rate", "warning"),
    ],
    "eval-batch-needs-held-out-data": [
        ({"optim.per_device_eval_batch_size": 9}, Facts(), "optim.per_device_eval_batch_size", "error")
    ],
    "tf32-needs-a-card-that-has-it": [
        ({"optim.tf32": True}, Facts(machine=CPU), "optim.tf32", "error"),
        ({"optim.tf32": True, "model.dtype": "float32"}, Facts(machine=OLD), "optim.tf32", "error"),
    ],
    "tf32-needs-products-of-float32": [
        ({"optim.tf32": True}, Facts(), "optim.tf32", "warning"),
        ({**LORA, "optim.tf32": True}, Facts(), "optim.tf32", "warning"),
    ],
    "rank-stabilised-needs-a-rank": [
        ({**LORA, "adapter.r": 1, "adapter.use_rslora": True}, Facts(), "adapter.use_rslora", "error")
    ],
}
