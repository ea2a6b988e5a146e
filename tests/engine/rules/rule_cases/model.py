"""Where the rules of `engine.rules.model` speak."""

from __future__ import annotations

from dataclasses import replace

from engine.config.facts import Facts, ModelFacts, TokenizerFacts
from engine.facts.model_shape import ELSEWHERE, OF_A_RUN
from tests.engine.rules.rule_cases.shared import CPU, H100, LORA, NOTHING, OLD, TINY_FACTS, Case, model, source

_A_LAYER = (("q_proj", 2048, 4096), ("k_proj", 2048, 512), ("v_proj", 2048, 512), ("o_proj", 4096, 2048))
MIXTURE = Facts(
    model=ModelFacts(
        "Qwen/Qwen3-30B-A3B",
        model_type="qwen3_moe",
        parameters=30_532_122_624,
        hidden_size=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        intermediate_size=6144,
        vocab_size=151_936,
        experts=128,
        linears=tuple((*each, 48) for each in _A_LAYER),
        expert_weights=(("gate_up_proj", 2048, 1536, 48), ("down_proj", 768, 2048, 48)),
    )
)


def with_state(kind: str, **packages: str | None) -> Facts:
    known = {name.replace("_", "-"): version for name, version in packages.items()}
    return Facts(machine=H100, model=ModelFacts("builtin/tiny", model_type=kind, parameters=1000), packages=known)


CASES: dict[str, list[Case]] = {
    "layers-with-a-state-have-kernels": [
        ({}, with_state("qwen3_5_moe", triton="3.7.1"), "model.name", "warning"),
        ({}, with_state("kimi_linear", triton="3.6.0"), "model.name", "warning"),
        ({}, with_state("qwen3_next", triton="3.6.0", flash_linear_attention="0.6.0"), "model.name", "warning"),
        ({}, with_state("bamba", mamba_ssm="2.3.0"), "model.name", "hint"),
    ],
    "model-is-named": [({"model.name": ""}, Facts(), "model.name", "error")],
    "tokens-go-to-as-many-experts-as-there-are": [
        ({}, model(model_type="mixtral", parameters=1000, experts=8, experts_per_token=9), "model.name", "error")
    ],
    "blocks-that-layers-share-take-no-adapter": [
        (
            {**LORA, "adapter.target_modules": asked},
            model(model_type="zamba2", parameters=1000),
            "adapter.target_modules",
            "error",
        )
        for asked in ("all-linear", ["q_proj", "in_proj"])
    ],
    "weights-that-blocks-read-stay-numbers": [
        (
            {**LORA, "model.quantization": kind},
            model(model_type="gemma3n_text", parameters=1000),
            "model.quantization",
            "error",
        )
        for kind in ("nf4", "int8")
    ],
    "model-exists": [
        ({}, model(missing="there is no such folder"), "model.name", "error"),
        ({}, model(remote=True), "model.name", "warning"),
        (
            {"model.name": "models/mine"},
            Facts(model=ModelFacts("models/mine", remote=True)),
            "model.name",
            "warning",
        ),
        ({}, model(missing=ELSEWHERE), "model.name", "error"),
        ({}, model(missing=OF_A_RUN, checkpoint="runs/mine-0001/checkpoints/checkpoint-60"), "model.name", "error"),
        (LORA, model(missing="it holds an adapter", base="someone/model"), "model.name", "error"),
        ({"adapter.kind": "none"}, model(missing="it holds an adapter", base="someone/model"), "model.name", "error"),
        ({}, model(missing="it holds an adapter", base=""), "model.name", "error"),
    ],
    "model-files-can-be-loaded": [
        ({}, model(flaw="its files are cut."), "model.name", "error"),
        ({}, model(loaders=frozenset()), "model.name", "error"),
        ({}, model(headless=True), "model.name", "error"),
    ],
    "tokenizer-files-can-be-loaded": [
        (
            {"model.tokenizer": "tokens"},
            Facts(tokenizer=TokenizerFacts("tokens", flaw="it holds none.")),
            "model.tokenizer",
            "error",
        ),
        *(
            (
                {"model.name": "some/model"},
                Facts(
                    model=ModelFacts("some/model", vocab_size=100),
                    tokenizer=TokenizerFacts("some/model", tokens=120, base=base),
                ),
                "model.name",
                severity,
            )
            for base, severity in ((90, "warning"), (110, "error"))
        ),
    ],
    "chat-template-is-there": [
        ({"model.chat_template": "gone.jinja"}, Facts(files={"gone.jinja": False}), "model.chat_template", "error")
    ],
    "builtin-tiny-vl-has-its-own-tokenizer": [
        ({"model.name": "builtin/tiny-vl", "model.tokenizer": "org/some"}, Facts(), "model.tokenizer", "error")
    ],
    "builtin-names-are-known": [({"model.name": "builtin/huge"}, Facts(), "model.name", "error")],
    "vision-parts-need-a-model-that-sees": [
        ({"model.train_vision": "none"}, Facts(model=TINY_FACTS), "model.train_vision", "error")
    ],
    "revision-needs-a-hub-model": [({"model.revision": "main"}, Facts(), "model.revision", "error")],
    "quantized-weights-need-an-adapter": [({"model.quantization": "nf4"}, Facts(), "model.quantization", "error")],
    "quantized-weights-need-bitsandbytes": [
        ({**LORA, "model.quantization": "nf4"}, Facts(packages=NOTHING), "model.quantization", "error")
    ],
    "quantized-weights-need-a-gpu": [
        ({**LORA, "model.quantization": "int8"}, Facts(machine=CPU), "model.quantization", "warning")
    ],
    "float16-needs-a-gpu": [({**LORA, "model.dtype": "float16"}, Facts(machine=CPU), "model.dtype", "error")],
    "bfloat16-is-slow-on-old-processors": [
        ({"model.dtype": "bfloat16"}, Facts(machine=replace(CPU, slow_bfloat16=True)), "model.dtype", "warning")
    ],
    "bfloat16-needs-a-card-that-has-it": [({}, Facts(machine=OLD), "model.dtype", "error")],
    "float16-weights-cannot-be-trained-whole": [({"model.dtype": "float16"}, Facts(), "model.dtype", "error")],
    "messages-need-a-chat-template": [
        (
            {},
            replace(source(format="messages"), model=ModelFacts("builtin/tiny", chat_template=False)),
            "model.chat_template",
            "error",
        )
    ],
    "experts-are-not-quantized": [
        (
            {**LORA, "model.name": "Qwen/Qwen3-30B-A3B", "model.quantization": "nf4", **experts},
            MIXTURE,
            "model.quantization",
            "warning",
        )
        for experts in ({"model.quantize_moe_experts": False}, {"model.quantization": "fp8"})
    ],
    "stored-weights-are-of-a-known-format": [
        ({**LORA}, model(stored=stored), "model.name", "error") for stored in ("aqlm", "awq (gemv)")
    ],
    "stored-weights-take-no-second-format": [
        ({**LORA, "model.quantization": "nf4"}, model(stored=stored), "model.quantization", "error")
        for stored in ("fp8", "mxfp4", "gptq", "awq", "compressed-tensors")
    ],
    "weights-stored-in-fp8-take-plain-lora": [
        ({**LORA, "adapter.use_dora": True}, model(stored=stored), "adapter.use_dora", "error")
        for stored in ("fp8", "gptq")
    ],
}
