"""Where the rules of `engine.rules.method` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import DPO, KTO, LORA, Case, source

CASES: dict[str, list[Case]] = {
    "label-smoothing-needs-a-loss-that-uses-it": [
        (
            {**DPO, "method.loss_type": "hinge", "method.label_smoothing": 0.1},
            Facts(),
            "method.label_smoothing",
            "error",
        ),
        ({**DPO, "method.loss_type": "robust"}, Facts(), "method.label_smoothing", "error"),
        ({**DPO, "method.label_smoothing": 0.1}, Facts(), "method.label_smoothing", "error"),
    ],
    "beta-needs-a-loss-that-uses-it": [
        ({**DPO, "method.loss_type": "sft", "method.beta": 0.5}, Facts(), "method.beta", "error")
    ],
    "means-over-tokens-need-a-loss-of-sums": [
        ({**DPO, "method.loss_type": name, "method.dpo_norm_loss": True}, Facts(), "method.dpo_norm_loss", "error")
        for name in ("ipo", "sigmoid_norm", "sft")
    ],
    "likelihood-is-weighed-beside-a-preference": [
        ({**DPO, "method.loss_type": "sft", "method.rpo_alpha": 0.5}, Facts(), "method.rpo_alpha", "error")
    ],
    "mismatched-rows-need-a-batch": [
        ({**KTO, "optim.per_device_train_batch_size": 1}, Facts(), "optim.per_device_train_batch_size", "error")
    ],
    "weights-stand-on-top-of-the-balance": [
        ({**KTO, "method.desirable_weight": 2.0}, Facts(), "method.desirable_weight", "warning")
    ],
    "adapter-off-needs-an-adapter": [
        ({**KTO, "method.reference": "adapter_off"}, Facts(), "method.reference", "error"),
        ({**DPO, "method.reference": "adapter_off"}, Facts(), "method.reference", "error"),
    ],
    "a-copy-beside-an-adapter-wastes-memory": [
        ({**DPO, **LORA, "method.reference": "copy"}, Facts(), "method.reference", "hint")
    ],
    "dropout-is-off-where-answers-are-compared": [
        ({"method.kind": kind, **LORA, "adapter.lora_dropout": 0.1}, Facts(), "adapter.lora_dropout", "error")
        for kind in ("dpo", "ipo", "kto", "reward")
    ],
    "negatives-come-from-the-batch": [
        (
            {"method.kind": "embedding", "optim.per_device_train_batch_size": 1},
            Facts(),
            "optim.per_device_train_batch_size",
            "error",
        )
    ],
    "negatives-come-from-the-held-out-rows": [
        ({"method.kind": "embedding", "data.val_set_size": 1}, Facts(), "data.val_set_size", "error")
    ],
    "samples-need-a-model-that-writes": [
        ({"method.kind": "reward", "run.prompts": ["Who are you?"]}, Facts(), "run.prompts", "error")
    ],
    "packing-needs-single-texts": [
        ({**DPO, "data.packing": True, "data.packing_cross_doc_attn_mask": True}, Facts(), "data.packing", "error")
    ],
    "trained-turns-need-sft": [
        ({**DPO, "data.trained_turns": "last"}, Facts(), "data.trained_turns", "error"),
        ({"method.kind": "pretrain", "data.trained_turns": "all"}, Facts(), "data.trained_turns", "error"),
    ],
    "trained-thinking-needs-answers": [
        ({**DPO, "data.trained_thinking": False}, Facts(), "data.trained_thinking", "error"),
        (
            {"data.trained_turns": "all", "data.trained_thinking": False},
            Facts(),
            "data.trained_thinking",
            "error",
        ),
    ],
    "chat-template-needs-messages": [
        ({"method.kind": "pretrain", "model.chat_template": "chatml"}, Facts(), "model.chat_template", "error"),
        (
            {"method.kind": "pretrain", "model.chat_template_kwargs": {"a": 1}},
            Facts(),
            "model.chat_template_kwargs",
            "error",
        ),
    ],
    "values-of-the-template-need-messages": [
        (
            {"model.chat_template_kwargs": {"a": 1}, "data.train.0.format": "tokens"},
            Facts(),
            "model.chat_template_kwargs",
            "error",
        ),
        ({"model.chat_template_kwargs": {"a": 1}}, source(format="text"), "model.chat_template_kwargs", "error"),
        (
            {"method.kind": "distill", "model.chat_template_kwargs": {"a": 1}},
            Facts(),
            "model.chat_template_kwargs",
            "error",
        ),
    ],
    "formats-fit-the-method": [
        ({**DPO}, source(format="messages"), "data.train.0.format", "error"),
        ({"data.train.0.format": "preference"}, Facts(), "data.train.0.format", "error"),
        ({"method.kind": "pretrain"}, source(format="alpaca"), "data.train.0.format", "error"),
    ],
}
