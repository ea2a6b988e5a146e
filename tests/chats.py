"""Runs with checkpoints to talk to, made without training: a tiny model, and weights moved at random where a run would
have trained them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from engine.builtin import tiny
from engine.run import checkpoint
from engine.run.store import RunFolder, create

QUESTION = "What is 3 March 2021 in ISO form?"
LOADERS = {"sft": AutoModelForCausalLM, "reward": AutoModelForSequenceClassification, "embedding": AutoModel}
TASKS = {"sft": "CAUSAL_LM", "reward": "SEQ_CLS", "embedding": "FEATURE_EXTRACTION"}


def model_folder(to: Path, *, template: bool = True, positions: int = 4096) -> Path:
    """A folder with the built-in model, perhaps without its chat template or with fewer positions."""
    shutil.copytree(tiny.folder(None), to)
    (to / "chat_template.jinja").unlink(missing_ok=True)
    words = json.loads((to / "tokenizer_config.json").read_text())
    words.pop("chat_template", None)
    if template:
        words["chat_template"] = tiny.CHAT_TEMPLATE
    (to / "tokenizer_config.json").write_text(json.dumps(words))
    shape = json.loads((to / "config.json").read_text())
    shape["max_position_embeddings"] = positions
    (to / "config.json").write_text(json.dumps(shape))
    return to


def tuned(kind: str, folder: str | Path, seed: int, *, lora: bool = True) -> Any:
    """The model of a method with weights as no base has them."""
    more = {"num_labels": 1} if kind == "reward" else {}
    torch.manual_seed(seed)
    model = LOADERS[kind].from_pretrained(folder, dtype=torch.float32, **more)
    if lora:
        model = get_peft_model(model, LoraConfig(task_type=TASKS[kind], r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not lora or "lora_" in name or "score" in name:
                weight.add_(torch.randn_like(weight) * 0.3)
    return model.eval()


def make_run(
    root: Path,
    *,
    kind: str = "sft",
    lora: bool = True,
    steps: tuple[int, ...] = (10,),
    model: str | Path = "builtin/tiny",
    method: dict[str, Any] | None = None,
    name: str = "dates",
) -> RunFolder:
    """A finished run with a checkpoint at each of these steps."""
    config = {
        "version": 1,
        "model": {"name": str(model), "dtype": "float32"},
        "method": {"kind": kind, **(method or {})},
        "adapter": {"kind": "lora", "r": 4, "target_modules": ["q_proj", "v_proj"]} if lora else {"kind": "none"},
        "data": {"train": [{"path": "builtin/dates"}]},
    }
    run = create(root, yaml.safe_dump(config), {"name": name, "method": kind, "model": str(model)})
    folder = tiny.folder(None) if str(model) == "builtin/tiny" else Path(model)
    for step in steps:
        tmp = checkpoint.begin(run, step)
        tuned(kind, folder, step, lora=lora).save_pretrained(tmp)
        AutoTokenizer.from_pretrained(folder).save_pretrained(tmp)
        checkpoint.commit(tmp, {"step": step})
    run.update_json(state="finished")
    return run
