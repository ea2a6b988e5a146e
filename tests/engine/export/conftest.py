"""Runs with a checkpoint, made without training: a small model of a family, random adapter weights, a real tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from engine.run import checkpoint, store
from engine.run.store import RunFolder

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
}  # fmt: skip
Make = Callable[..., RunFolder]


@pytest.fixture
def make_run(tmp_path: Path, shared_data: Path) -> Make:
    """`make_run(family, adapter={...}, dtype=..., sharded=..., quantization=...)`: a run with `checkpoint-3`."""

    def make(
        family: str = "llama",
        *,
        adapter: dict[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
        sharded: str = "5GB",
        quantization: str = "none",
        method: str = "sft",
        tokenizer: Path | None = None,
        **shape: Any,
    ) -> RunFolder:
        base = tmp_path / "base"
        model, words = build(base, family, tokenizer or shared_data / "tokenizers/minimind", dtype, sharded, shape)
        settings = {"r": 4, "target_modules": "all-linear", **(adapter or {})}
        text = config_text(base, method, settings if adapter is not None else None, quantization)
        run = store.create(tmp_path / "runs", text, {"name": "taken"})
        tmp = checkpoint.begin(run, 3)
        save(tmp, model, settings if adapter is not None else None, method)
        words.save_pretrained(tmp)
        checkpoint.commit(tmp, {"versions": {"peft": "0"}})
        run.update_json(state="finished")
        return run

    return make


def run_that_sees(root: Path, base: Path, adapter: dict[str, Any]) -> RunFolder:
    """A run of a model with a processor, whose adapter says something."""
    import json

    from transformers import AutoModelForImageTextToText

    from engine.models.load import load_processing_class
    from engine.rules import read

    settings = {
        "model": {"name": str(base), "dtype": "float32"}, "data": {"train": [{"path": "rows.jsonl"}]},
        "adapter": {"kind": "lora", "r": 4, **adapter},
    }  # fmt: skip
    run = store.create(root / "runs", json.dumps(settings), {"name": "taken"})
    tmp = checkpoint.begin(run, 3)
    save(tmp, AutoModelForImageTextToText.from_pretrained(base), {"r": 4, **adapter}, "sft")
    load_processing_class(read(settings).config).save_pretrained(tmp)
    checkpoint.commit(tmp, {"versions": {"peft": "0"}})
    run.update_json(state="finished")
    return run


def build(base: Path, family: str, tokenizer: Path, dtype: torch.dtype, sharded: str, shape: dict[str, Any]) -> Any:
    """A model folder of the family with first weights, and its tokenizer."""
    import transformers

    words = AutoTokenizer.from_pretrained(tokenizer)
    kind = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma": "Gemma", "gemma2": "Gemma2",
                       "gemma3_text": "Gemma3Text", "phi3": "Phi3", "gpt2": "GPT2", "olmo2": "Olmo2", "granite": "Granite", "smollm3": "SmolLM3", "qwen3_moe": "Qwen3Moe",
            "olmoe": "Olmoe", "mixtral": "Mixtral", "gpt_oss": "GptOss", "deepseek_v3": "DeepseekV3",
            "qwen3_5_moe": "Qwen3_5MoeText"}.get(family, family)  # fmt: skip
    ids = {"eos_token_id": words.eos_token_id, "bos_token_id": words.bos_token_id, "pad_token_id": words.pad_token_id}
    sizes = {} if family == "gpt2" else SIZES
    config = getattr(transformers, f"{kind}Config")(vocab_size=len(words), **{**sizes, **ids, **shape})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, weight in model.named_parameters():
        if weight.ndim == 1 or name.endswith("_bias"):
            weight.data = weight.data + 0.1 * torch.randn_like(weight)
        assert torch.isfinite(weight).all(), name
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(base, max_shard_size=sharded)
    words.save_pretrained(base)
    # As a run loads it: transformers chooses the class by the model beside it.
    return model, AutoTokenizer.from_pretrained(base)


def config_text(base: Path, method: str, adapter: dict[str, Any] | None, quantization: str) -> str:
    """The config of such a run."""
    import json

    section = {"kind": "none"} if adapter is None else {"kind": "lora", **adapter}
    return (
        f"model: {{name: {base}, dtype: float32, quantization: {quantization}}}\nmethod: {{kind: {method}}}\n"
        f"data: {{train: [{{path: builtin/dates}}]}}\nadapter: {json.dumps(section)}\n"
    )


def save(at: Path, model: Any, adapter: dict[str, Any] | None, method: str) -> None:
    """The checkpoint's weights: all of them moved a little, or an adapter that says something."""
    if adapter is None:
        for weight in model.parameters():
            weight.data = weight.data + (0.01 * torch.randn(weight.shape)).to(weight.dtype)
        model.save_pretrained(at)
        return
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model.float(), LoraConfig(task_type="CAUSAL_LM", **adapter))
    for name, weight in adapted.named_parameters():
        if weight.requires_grad:
            weight.data = weight.data + 0.1 * torch.randn_like(weight)
            assert torch.isfinite(weight).all(), name
    adapted.save_pretrained(at)
