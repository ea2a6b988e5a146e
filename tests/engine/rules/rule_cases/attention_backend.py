"""Where the rules of `engine.features.attention_backend` speak."""

from __future__ import annotations

from engine.config.facts import Facts
from engine.hardware import parse_machine
from tests.engine.rules.rule_cases.shared import APART, CPU, H100, NOTHING, Case, model

CASES: dict[str, list[Case]] = {
    "flash-attention-needs-its-package": [
        ({"model.attention": name}, Facts(packages=NOTHING), "model.attention", "error")
        for name in ("flash_attention_2", "flash_attention_4")
    ],
    "flash-attention-needs-its-card": [
        ({"model.attention": "flash_attention_2"}, Facts(machine=CPU), "model.attention", "error"),
        (
            {"model.attention": "flash_attention_3"},
            Facts(machine=parse_machine("A100")),
            "model.attention",
            "error",
        ),
        (
            {"model.attention": "flash_attention_3"},
            Facts(machine=parse_machine("B200-192GB")),
            "model.attention",
            "error",
        ),
    ],
    "flash-attention-serves-heads-up-to-a-width": [
        ({"model.attention": name}, model(head_dim=width), "model.attention", "error")
        for name, width in (("flash_attention_2", 512), ("flash_attention_4", 192))
    ],
    "flex-attention-needs-a-gpu": [
        ({"model.attention": "flex_attention"}, Facts(machine=CPU), "model.attention", "error")
    ],
    "packs-kept-apart-want-no-mask-of-all-pairs": [
        ({**APART, **changes}, Facts(machine=H100, packages=NOTHING), "model.attention", "warning")
        for changes in ({"model.attention": "sdpa"}, {"model.attention": "eager"})
    ],
    "packs-kept-apart-need-a-model-that-can": [
        ({**APART}, model(model_type=kind), "data.packing_cross_doc_attn_mask", "error") for kind in ("opt", "rwkv")
    ],
    "varlen-needs-a-card-16-bits-and-heads-of-its-width": [
        ({**APART, "model.attention": "varlen", **changes}, facts, "model.attention", "error")
        for changes, facts in (
            ({}, Facts(machine=CPU)),
            ({}, Facts(machine=parse_machine("T4-16GB"))),
            ({"model.dtype": "float32"}, Facts(machine=H100)),
            ({}, model(head_dim=512)),
        )
    ],
    "cudnn-adds-in-another-order-each-time": [
        (
            {**APART, "model.attention": "cudnn", "run.full_determinism": True},
            Facts(machine=H100),
            "model.attention",
            "error",
        )
    ],
    "sinks-need-a-model-that-has-them": [
        ({"model.attention": "sinks"}, model(model_type="qwen3_moe", parameters=1000), "model.attention", "error"),
        ({"model.attention": "sinks", "model.dtype": "float32"}, Facts(machine=H100), "model.attention", "error"),
    ],
    "attention-over-documents-is-for-packs-kept-apart": [
        ({"model.attention": name}, Facts(machine=H100), "model.attention", "hint") for name in ("varlen", "cudnn")
    ],
    "flash-attention-needs-half-precision": [
        ({"model.attention": "flash_attention_2", "model.dtype": "float32"}, Facts(), "model.attention", "error")
    ],
}
