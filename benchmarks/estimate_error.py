"""How far the closed-form memory estimate is from what a step really takes here: the product's own rehearsal, shape by shape.

    python benchmarks/estimate_error.py [--shape 0.6b|1.7b|small] [--only NAME ...] [--all] [--together 3]
                                        [--results FILE --commit HASH]

A randomly initialised model of the shape is written once; then each case is rehearsed through the worker on rows of full
length, several at a time in processes of their own (their peaks do not mix; their times are no timings). `reserved` is the
allocator's peak on a GPU and the resident pages on a CPU; the driver's own share is on neither side.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from _device import processor
from _figures import Results, result_options
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from engine.builtin import tiny
from engine.data.gather_facts import gather_facts
from engine.errors import WorkbenchError
from engine.planning import memory_model
from engine.planning.auto import resolved
from engine.rules import read
from engine.run.rehearsal import rehearse
from engine.run.rehearsed import Rehearsal

GiB = 1024**3
SHAPES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 16_384},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
}  # fmt: skip
FULL, LORA = {"adapter": {"kind": "none"}}, {"adapter": {"kind": "lora", "r": 16}}


def case(adapter: dict[str, Any], tier: bool | str, batch: int = 4, **more: Any) -> dict[str, Any]:
    memory = {"gradient_checkpointing": tier, **more.pop("memory", {})}
    return {**adapter, "memory": memory, "optim": {"per_device_train_batch_size": batch}, **more}


# The first six are the usual ones.
CASES: dict[str, dict[str, Any]] = {
    "full weights": case(FULL, False),
    "full weights, checkpointing": case(FULL, True),
    "lora": case(LORA, False),
    "lora, checkpointing": case(LORA, True),
    "lora, checkpointing, cut head": case(LORA, True, kernels={"use_cut_ce": True}),
    "dpo, lora, selective": case(LORA, "selective", 2, method={"kind": "dpo"}),
    "full weights, medium, cut head": case(FULL, "medium", kernels={"use_cut_ce": True}),
    "full weights, float32, 2 rows": case(FULL, False, 2, model={"dtype": "float32"}),
    "lora, one row": case(LORA, False, 1),
    "lora, eager attention, 1 row": case(LORA, False, 1, model={"attention": "eager"}),
    "lora, offloading": case(LORA, True, memory={"activation_offloading": "cpu"}),
    "qlora, checkpointing": case(LORA, True, model={"quantization": "nf4"}),
    "dpo, full weights, copy": case(FULL, True, 2, method={"kind": "dpo"}),
}


def make_model(folder: Path, shape: str) -> None:
    on_gpu = torch.cuda.is_available()
    with torch.device("cuda" if on_gpu else "cpu"):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[shape], tie_word_embeddings=True))
    model.to(torch.bfloat16).save_pretrained(folder)
    del model
    if on_gpu:
        torch.cuda.empty_cache()
    AutoTokenizer.from_pretrained(tiny.folder()).save_pretrained(folder)


def make_rows(folder: Path, length: int) -> None:
    """Rows of nearly `length` tokens: an answer, and pairs of answers to a prompt of the same length."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def words(tokens: int) -> str:
        """So many tokens of text."""
        draw = random.Random(0)
        text = "".join(draw.choice("abcdefghij 0123456789") for _ in range(4 * tokens))
        return tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][:tokens])

    # Template and seams between words take a few tokens.
    whole, half = words(length - 24), words(length // 2 - 24)
    rows = [{"prompt": "a", "completion": whole} for _ in range(16)]
    pairs = [{"prompt": half, "chosen": half, "rejected": half[:-1] + str(number)} for number in range(16)]
    for name, made in (("rows", rows), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))


def measure(name: str, folder: Path, length: int) -> tuple[Rehearsal, dict[str, int]] | str:
    """The rehearsal and the estimate's classes for the rows that were rehearsed; a sentence where it did not get through."""
    mapping = json.loads(json.dumps(CASES[name]))
    mapping["model"] = {"name": str(folder), "dtype": "bfloat16", **mapping.get("model", {})}
    rows = "pairs.jsonl" if "method" in mapping else "rows.jsonl"
    mapping["data"] = {"train": [{"path": str(folder / rows)}], "max_length": length}
    mapping["optim"] |= {"gradient_accumulation_steps": 1}
    reading = read(mapping)
    facts = gather_facts(reading.config, folder)
    reading = read(mapping, facts)
    # That it will not fit is for the card to say.
    errors = [each.message for each in reading.findings if each.severity == "error" and "not fit" not in each.message]
    if errors:
        return errors[0]
    try:
        found = rehearse(reading.config, facts)
    except WorkbenchError as problem:
        return problem.message
    whole = resolved(reading.config.model_copy(update={"data": reading.config.data.model_copy(
        update={"max_length": found.longest})}), facts)  # fmt: skip
    classes = memory_model.memory(whole, facts, whole.memory.gradient_checkpointing) or {}
    return found, classes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b" if torch.cuda.is_available() else "small")
    parser.add_argument("--only", nargs="*", choices=list(CASES))
    parser.add_argument("--all", action="store_true", help="also the less usual cases")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--together", type=int, default=3, help="rehearsals at a time")
    result_options(parser)
    options = parser.parse_args()
    logging.disable_progress_bar()
    names = options.only or list(CASES)[: None if options.all else 6]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    results = Results(options, device, "torch")
    print(f"{device}, torch {torch.__version__}, {options.shape}, rows of {options.length} tokens; GiB", flush=True)
    print(f"{'case':<32}{'allocated':>11}{'reserved':>11}{'estimate':>11}{'error':>8}  estimate by class")
    with tempfile.TemporaryDirectory() as place:
        os.environ["WORKBENCH_CACHE"] = str(Path(place) / "cache")
        folder = Path(place) / "model"
        make_model(folder, options.shape)
        make_rows(folder, options.length)
        with ThreadPoolExecutor(options.together) as pool:
            for name, found in zip(
                names, pool.map(lambda name: measure(name, folder, options.length), names), strict=True
            ):
                show(name, found)
                record(results, f"{options.shape} {name}", found)


def show(name: str, found: Any) -> None:
    if isinstance(found, str):
        print(f"{name:<32}  {found}", flush=True)
        return
    measured, classes = found
    sizes = (measured.memory_allocated or 0, measured.memory_peak, measured.estimated or 0)
    figures = "".join(f"{size / GiB:>11.2f}" for size in sizes)
    parts = " ".join(f"{label} {size / GiB:.2f}" for label, size in classes.items())
    print(f"{name:<32}{figures}{measured.error or 0:>+8.1%}  {parts}", flush=True)


def record(results: Results, case: str, found: Any) -> None:
    if not isinstance(found, str):
        measured, _ = found
        for which, size in (("measured", measured.memory_peak), ("estimate", measured.estimated or 0)):
            results.add("estimate_error", f"{case}, rows of {measured.longest}", which, peak_mib=size / 2**20)


if __name__ == "__main__":
    main()
