"""A gated MLP over 65,536 tokens in tiles, beside the plain block, a checkpoint around it and Liger's tiles, on one CUDA device.

    python benchmarks/tiled_mlp.py [--tokens 65536] [--rounds 12] [--seconds 120] [--results FILE --commit HASH]

Width 4,096 to 12,288, bf16, forward and backward; once with frozen weights and once with all trained. Implementations
take turns round after round. The peak is what one pass allocates beyond weights, input, output gradient and trained
weights' gradients. Nothing is reported while the kernel's accuracy cases fail, nor of an implementation whose gradients
differ from the plain block's by more than bf16 rounds. The floor is nine products forward and backward at 790 TFLOP/s
with one recomputation (eleven where weights train).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from _accuracy import refuse_while_red
from _figures import Results, result_options, side_by_side
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from engine.features.tiled_mlp.apply import _in_closed_tiles, _in_tiles

HIDDEN, WIDE, FLOP_PER_MS = 4096, 12_288, 790e9
Pass = Callable[[torch.Tensor], torch.Tensor]


def entrants(block: Qwen3MLP) -> dict[str, Pass]:
    """Each way through the block."""
    found: dict[str, Pass] = {
        "plain": block,
        "checkpoint": lambda x: checkpoint(block, x, use_reentrant=False),
    }
    for tokens in (32_768, 16_384, 8_192, 4_096, 2_048):
        plain = _in_tiles(block, tokens, False, block.down_proj)
        found[f"ours, tiles of {tokens}"] = _in_closed_tiles(block, plain, "silu", tokens, False)
        if tokens == 4_096:
            found["ours differentiated, tiles of 4096"] = plain
    try:
        from liger_kernel.ops import LigerSiLUMulFunction, apply_tiled_mlp
    except ImportError:
        return found

    def fused(module: Qwen3MLP, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = module.down_proj(LigerSiLUMulFunction.apply(module.gate_proj(x), module.up_proj(x)))
        return out

    for name, shards in (("liger, its own tiles", None), ("liger, 4 tiles", 4)):
        found[name] = lambda x, shards=shards: apply_tiled_mlp(fused, block, x, num_shards=shards)
    return found


def once(run: Pass, x: torch.Tensor, slope: torch.Tensor) -> tuple[float, float]:
    """Milliseconds and MiB of one pass; gradients of weights are kept from pass to pass, as in accumulation."""
    x.grad = torch.zeros_like(x)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run(x).backward(slope)
    end.record()
    end.synchronize()
    return start.elapsed_time(end), (torch.cuda.max_memory_allocated() - held) / 2**20


def contest(options: argparse.Namespace, results: Results, trained: bool, until: float) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        block = Qwen3MLP(Qwen3Config(hidden_size=HIDDEN, intermediate_size=WIDE)).to(torch.bfloat16)
        block.requires_grad_(trained)
        x = torch.randn(1, options.tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        slope = torch.randn(1, options.tokens, HIDDEN, dtype=torch.bfloat16)
    block.train()
    runs, right = entrants(block), {}
    truth: list[torch.Tensor] = []
    for name, run in runs.items():
        block.zero_grad()
        try:
            once(run, x, slope)
        except (RuntimeError, TypeError) as problem:
            print(f"{name}: {str(problem).splitlines()[0][:160]}", flush=True)
            continue
        assert x.grad is not None
        ours = [x.grad, *(p.grad for p in block.parameters() if p.grad is not None)]
        truth = truth or [each.clone() for each in ours]
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(ours, truth, strict=True))
        if error > 1e-2:
            print(f"{name}: DIFFERS by {error:.1e}, not reported", flush=True)
            continue
        right[name] = run
    times: dict[str, list[float]] = {name: [] for name in right}
    peaks: dict[str, float] = {}
    for number in range(options.rounds):
        for name, run in right.items():
            took, peaks[name] = once(run, x, slope)
            if number:
                times[name].append(took)
        if time.monotonic() > until and number > 2:
            break
    products = 11 if trained else 9
    floor = products * 2 * options.tokens * HIDDEN * WIDE / FLOP_PER_MS
    shape = f"{options.tokens} tokens, {HIDDEN} to {WIDE}, {'trained' if trained else 'frozen'}"
    side_by_side(results, "tiled_mlp", shape, times, peaks, floor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=120, help="after so long no round is begun")
    result_options(parser)
    options = parser.parse_args()
    refuse_while_red("gated_cases:bfloat16", "gated_again")
    begun = time.monotonic()
    results = Results(options, torch.cuda.get_device_name(), "torch", "triton")
    for share, trained in ((0.5, False), (1.0, True)):
        contest(options, results, trained, begun + share * options.seconds)


if __name__ == "__main__":
    main()
