"""What a step of each optimizer takes on a card: time and memory on the weights of a Qwen3-0.6B shape with four layers.

    python benchmarks/gpu_optimizers.py [--only muon adopt] [--steps 12] [--results FILE --commit HASH]

Full weights in bfloat16 (211 million, of which 156 million are embeddings, tied), random gradients that are given anew
before each step. Times are those of `step` alone by the device's own clock; the first step, which makes the states and
the projections, is told apart. The peak is what the states and the step take beside weights and gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from _figures import Results, result_options
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from engine.config.optim import Optim
from engine.config.optimizers import BUILT_HERE, KINDS, PROJECTED
from engine.hardware import installed
from engine.trainers.optimizers.building import optimizer_for

SHAPE = "0.6b, 4 layers"
PLAIN = ("adamw_torch_fused", "adamw_8bit")
MiB = 2**20


def model_of_the_shape() -> Any:
    """Random weights on the card."""
    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151_936, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("cuda"):
        return Qwen3ForCausalLM(config).to(torch.bfloat16)


def built(name: str, model: Any) -> Any:
    """The optimizer as a run builds it."""
    args = {"rank": 128} if name in PROJECTED else {}
    optim = Optim.model_construct(optim=name, learning_rate=1e-5, weight_decay=0.01, optim_args=args)
    decayed = [each for each, weight in model.named_parameters() if weight.ndim > 1]
    if (ours := optimizer_for(optim, model, decayed)) is not None:
        return ours
    arguments = TrainingArguments(output_dir="/tmp", optim=name, learning_rate=1e-5, weight_decay=0.01)
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    return kind(model.parameters(), **settings)


def measure(name: str, steps: int) -> tuple[float, list[float], int, int]:
    """Milliseconds of the first step, of the others, bytes of state, and bytes of the peak beside weights and gradients."""
    torch.manual_seed(0)
    model = model_of_the_shape()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    optimizer = built(name, model)
    if hasattr(optimizer, "train"):
        optimizer.train()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        for weight in weights:
            weight.grad.normal_(std=1e-3)  # type: ignore[union-attr]
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begun.record()
        optimizer.step()
        ended.record()
        torch.cuda.synchronize()
        times.append(begun.elapsed_time(ended))
    return times[0], times[1:], torch.cuda.memory_allocated() - held, torch.cuda.max_memory_allocated() - held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME")
    parser.add_argument("--steps", type=int, default=12)
    result_options(parser)
    given = parser.parse_args()
    results = Results(given, torch.cuda.get_device_name(), "torch")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {SHAPE}", flush=True)
    for name in given.only or [*PLAIN, *sorted(BUILT_HERE)]:
        package = KINDS[name].package
        if package and installed(package) is None:
            print(f"{name:<22} left out: {package} is not installed", flush=True)
            continue
        begun = time.monotonic()
        first, others, held, peak = measure(name, given.steps)
        torch.cuda.empty_cache()
        middle = statistics.median(others)
        text = (
            f"{middle:9.2f} ms a step, first {first:10.1f} ms, states {held / MiB:8.1f} MiB, peak {peak / MiB:8.1f} MiB"
        )
        print(f"{name:<22} {text} ({time.monotonic() - begun:.1f} s)", flush=True)
        results.add("optimizer step", SHAPE, name, ms=others, peak_mib=peak / MiB)
        results.add("optimizer first step", SHAPE, name, ms=[first])
        results.add("optimizer states", SHAPE, name, peak_mib=held / MiB)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit(f"{Path(__file__).name}: needs a CUDA device")
    main()
