"""Where the rules of `engine.rules.adapter_folder` speak."""

from __future__ import annotations

from dataclasses import replace

from engine.config.facts import AdapterFacts, Facts
from tests.engine.rules.rule_cases.shared import DPO, LORA, TINY_FACTS, Case

ON = {**LORA, "adapter.path": "./before"}
SETTINGS = {
    "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "target_parameters": [], "modules_to_save": [],
    "use_rslora": False, "use_dora": False, "bias": "none",
}  # fmt: skip
KNOWN = AdapterFacts(
    "./before", "/x/before", settings=SETTINGS, base="builtin/tiny", weights=4, linears=(("q_proj", 64, 64),)
)


def known(**changes: object) -> Facts:
    return Facts(model=TINY_FACTS, adapter=replace(KNOWN, **changes))  # type: ignore[arg-type]


CASES: dict[str, list[Case]] = {
    "the-adapter-is-part-of-the-reference": [
        ({**DPO, **ON, "method.reference": "copy"}, known(), "method.reference", "warning"),
        ({**DPO, **ON, "method.reference": "adapter_off"}, known(), "method.reference", "warning"),
    ],
    "a-copy-of-an-adapter-needs-one-that-learned": [
        ({**DPO, **LORA, "method.reference": "adapter_copy"}, Facts(), "method.reference", "error"),
        ({**DPO, "method.reference": "adapter_copy"}, Facts(), "method.reference", "error"),
    ],
    "divided-experts-begin-anew": [
        ({**ON, "run.devices": 2, "distributed.expert_parallel_size": 2}, Facts(), "adapter.path", "error")
    ],
    "the-adapter-is-there": [(ON, known(problem="/x/before is not there", todo="Name one."), "adapter.path", "error")],
    "the-adapter-is-the-one-meant-and-stays": [
        (ON, known(note="the run is still running."), "adapter.path", "warning")
    ],
    "an-adapter-stays-what-it-was": [
        ({**ON, "adapter.r": 16}, known(), "adapter.r", "error"),
        ({**ON, "adapter.lora_alpha": 32}, known(), "adapter.lora_alpha", "error"),
        ({**ON, "adapter.target_modules": "all-linear"}, known(), "adapter.target_modules", "error"),
        ({**ON, "adapter.use_dora": True}, known(), "adapter.use_dora", "error"),
    ],
    "an-adapter-fits-its-model": [
        (ON, known(linears=(("q_proj", 64, 128),)), "adapter.path", "error"),
        (ON, known(base="Qwen/Qwen3-8B"), "adapter.path", "warning"),
    ],
}
