"""LoRA adapters on a loaded model: PEFT's own, with targets that are checked to exist.

Adapters take the number format of a bfloat16 base (float32 adapters under autocast cost an eighth of an 8B step on an
H100); beside a float16 or quantized base they are float32 or what the trainer makes of them.
"""

from __future__ import annotations

import re
from typing import Any

from engine.config.kinds import Head
from engine.config.method import METHODS
from engine.errors import ModelError, nearest

TASKS: dict[Head, str] = {"vocabulary": "CAUSAL_LM", "score": "SEQ_CLS"}


def lora_config(config: Any) -> Any:
    """PEFT's LoraConfig from the adapter section."""
    from peft import LoraConfig

    adapter = config.adapter
    return LoraConfig(
        # PEFT trains a new head whole beside the adapter where the task has one.
        task_type=TASKS[METHODS[config.method.kind].head],
        r=adapter.r,
        lora_alpha=adapter.lora_alpha,
        lora_dropout=adapter.lora_dropout,
        target_modules=adapter.target_modules,
        modules_to_save=adapter.modules_to_save or None,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        bias=adapter.bias,
    )


def add_adapter(model: Any, config: Any) -> Any:
    """The model with its adapter, or the model itself where there is none. Raises ModelError for targets it lacks."""
    if config.adapter.kind == "none":
        return model
    from peft import get_peft_model

    _check_targets(model, config.adapter.target_modules)
    return get_peft_model(model, lora_config(config), autocast_adapter_dtype=config.model.dtype != "bfloat16")


def _check_targets(model: Any, targets: str | list[str]) -> None:
    if targets == "all-linear":
        return
    names = [name for name, _ in model.named_modules() if name]
    leaves = sorted({name.rsplit(".", 1)[-1] for name in names})
    if isinstance(targets, str):
        if not any(re.fullmatch(targets, name) for name in names):
            raise ModelError(
                f"adapter.target_modules: the expression {targets!r} matches no module of the model.",
                f"Modules are named such as {', '.join(leaves[:8])}; the whole dotted name must match.",
            )
        return
    for target in targets:
        if not any(name == target or name.endswith("." + target) for name in names):
            near = nearest(target, leaves)
            raise ModelError(
                f"adapter.target_modules: the model has no module {target!r}.",
                f"Did you mean {near!r}?" if near else f"It has {', '.join(leaves[:12])}.",
            )
