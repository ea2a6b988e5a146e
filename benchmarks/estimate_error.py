"""How far the closed-form memory estimate is from the measured peak of one training step on this GPU.

    python benchmarks/estimate_error.py [--only NAME]

Each case is a randomly initialised model of a published shape, trained for three steps on random tokens; the peak is what
torch's allocator had reserved. The driver's own share, which torch does not count, is left out of the estimate's side.
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.config import footprint
from engine.config.facts import Facts, model_facts
from engine.config.schema import read
from engine.hardware import this_machine
from engine.memory.estimate import estimate

SMALL, MIDDLE = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"
CASES: dict[str, dict[str, Any]] = {
    "full": {"model": SMALL, "length": 1024, "batch": 4, "lora": 0, "checkpointing": False},
    "full-checkpointing": {"model": SMALL, "length": 1024, "batch": 4, "lora": 0, "checkpointing": True},
    "lora": {"model": SMALL, "length": 1024, "batch": 4, "lora": 16, "checkpointing": False},
    "lora-checkpointing": {"model": SMALL, "length": 2048, "batch": 4, "lora": 16, "checkpointing": True},
    "lora-one-row": {"model": SMALL, "length": 512, "batch": 1, "lora": 16, "checkpointing": False},
    "full-float32": {"model": SMALL, "length": 1024, "batch": 2, "lora": 0, "checkpointing": False, "dtype": "float32"},
    "larger-full": {"model": MIDDLE, "length": 1024, "batch": 2, "lora": 0, "checkpointing": False},
    "larger-full-checkpointing": {"model": MIDDLE, "length": 2048, "batch": 4, "lora": 0, "checkpointing": True},
    "larger-lora": {"model": MIDDLE, "length": 1024, "batch": 4, "lora": 16, "checkpointing": False},
    "eager": {"model": SMALL, "length": 1024, "batch": 2, "lora": 16, "checkpointing": False, "attention": "eager"},
}


def measured(case: dict[str, Any]) -> tuple[float, float]:
    """Peak bytes allocated and reserved of three steps."""
    facts = model_facts(case["model"])
    assert facts is not None
    shape = Qwen3Config(
        hidden_size=facts.hidden_size, intermediate_size=facts.intermediate_size, num_hidden_layers=facts.layers,
        num_attention_heads=facts.heads, num_key_value_heads=facts.kv_heads, head_dim=128,
        vocab_size=facts.vocab_size, tie_word_embeddings=True, attn_implementation=case.get("attention", "sdpa"),
    )  # fmt: skip
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.set_default_dtype(getattr(torch, case.get("dtype", "bfloat16")))
    with torch.device("cuda"):
        model: Any = Qwen3ForCausalLM(shape)
    torch.set_default_dtype(torch.float32)
    if case["lora"]:
        model = get_peft_model(
            model, LoraConfig(r=case["lora"], target_modules="all-linear"), autocast_adapter_dtype=False
        )
        model.enable_input_require_grads()
    if case["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    tokens = torch.randint(0, 1000, (case["batch"], case["length"]), device="cuda")
    for _ in range(3):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def estimated(case: dict[str, Any]) -> dict[str, int]:
    """The estimate by class, without the driver's share."""
    mapping = {
        "model": {
            "name": case["model"],
            "dtype": case.get("dtype", "bfloat16"),
            "attention": case.get("attention", "auto"),
        },
        "adapter": {"kind": "lora", "r": case["lora"]} if case["lora"] else {"kind": "none"},
        "data": {"train": "builtin/dates", "max_length": case["length"], "packing": True},
        "optim": {"per_device_train_batch_size": case["batch"], "gradient_accumulation_steps": 1},
        "memory": {"gradient_checkpointing": case["checkpointing"]},
    }
    found = estimate(read(mapping).config, Facts(machine=this_machine(), model=model_facts(case["model"])))
    return {**found.memory, "overhead": found.memory["overhead"] - footprint.CUDA_CONTEXT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only")
    options = parser.parse_args()
    print(f"{'case':<28}{'allocated':>11}{'reserved':>11}{'estimate':>11}{'error':>8}  by class, GiB")
    for name, case in CASES.items():
        if options.only in (None, name):
            allocated, reserved = measured(case)
            classes = estimated(case)
            total = sum(classes.values())
            parts = " ".join(f"{label} {size / footprint.GiB:.2f}" for label, size in classes.items())
            figures = "".join(f"{size / footprint.GiB:>11.2f}" for size in (allocated, reserved, total))
            print(f"{name:<28}{figures}{total / reserved - 1:>+8.0%}  {parts}", flush=True)


if __name__ == "__main__":
    main()
