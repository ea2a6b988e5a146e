"""Attention over documents packed into one row, as a model's layer calls it: each implementation that keeps them apart.

    python benchmarks/packed_attention.py [--documents 8] [--tokens 8192] [--rounds 30] [--results FILE --commit HASH]
    python benchmarks/packed_attention.py --shape tiny

32 query and 8 key heads of 128 numbers, bf16, forward and backward, through the functions that transformers' layers
call. Implementations take turns round after round, on a card several passes at a turn behind a wait that lets the host
run ahead, as within a model; masks are made before, since a model makes one for all its layers. Nothing is reported of
an implementation whose output or gradients differ from each document's alone by more than bf16 rounds. The floor is the
arithmetic of causal attention inside documents at 790 TFLOP/s. `--shape tiny` runs on a CPU and shows that script and
implementations agree, not how fast they are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _device import processor
from _figures import Results, result_options, side_by_side
from transformers import Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.features.attention_backend import CUDNN, FLASH, cudnn_documents, varlen
from engine.features.attention_backend.apply import beginnings
from engine.hardware import installed

FLOP_PER_MS = 790e9
PASSES, AHEAD = 8, 60_000_000
"""Passes at a turn, and the cycles of the device before them, some 30 ms."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(torch.nn.Module):
    """What transformers' attention functions read of a layer."""

    def __init__(self, config: Qwen3Config, name: str) -> None:
        super().__init__()
        self.config, self.is_causal, self.layer_idx = config, True, 0
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.config._attn_implementation = name


def lengths(documents: int, tokens: int) -> list[int]:
    """Documents of other lengths that fill the row: the i-th about i times as long as the first."""
    shares = [tokens * (number + 1) * 2 // (documents * (documents + 1)) for number in range(documents)]
    return [*shares[:-1], tokens - sum(shares[:-1])]


def entrants(config: Qwen3Config, each: list[int], device: torch.device) -> dict[str, Attend]:
    """Each implementation over [1, heads, tokens, width]; of flash attention those that are installed."""
    document = torch.repeat_interleave(torch.arange(len(each)), torch.tensor(each)).to(device)
    positions = torch.cat([torch.arange(count) for count in each])[None].to(device)
    pairs = (document[:, None] == document) & torch.ones(sum(each), sum(each), dtype=torch.bool, device=device).tril()
    told = beginnings(positions)

    def through(name: str, mask: Any, **more: Any) -> Attend:
        layer = Layer(Qwen3Config(**config.to_dict()), name)
        attend: Any = ALL_ATTENTION_FUNCTIONS[name]
        return lambda q, k, v: attend(layer, q, k, v, mask, scaling=q.shape[-1] ** -0.5, dropout=0.0, **more)[0]

    found = {"sdpa, mask of all pairs": through("sdpa", pairs[None, None])}
    packages = {name for name, flash in FLASH.items() if installed(flash.package)}
    found |= {name: through(name, None, **told) for name in FLASH if name in packages - {CUDNN}}
    flex: dict[str, Attend] = {}

    def flexible(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not flex:
            flex["made"] = through("flex_attention", blocks(document))
        return flex["made"](q, k, v)

    found["flex_attention"] = flexible
    varlen.register()
    found["ours: varlen"] = through(varlen.NAME, None, **told)
    if CUDNN in packages and device.type == "cuda":
        cudnn_documents.register()
        found["ours: cudnn"] = through(CUDNN, None, **{**told, **cudnn_documents.in_places(told)})
    return found


def blocks(document: torch.Tensor) -> Any:
    """Flex attention's mask of a row."""
    from torch.nn.attention.flex_attention import create_block_mask

    def apart(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (document[query] == document[key]) & (query >= key)

    size = len(document)
    return create_block_mask(apart, None, None, size, size, device=str(document.device))


def truth(each: list[int]) -> Attend:
    """Torch's own attention of each document alone."""

    def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        parts = zip(*(x.split(each, 2) for x in (q, k, v)), strict=True)
        answers = [
            F.scaled_dot_product_attention(
                own, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), is_causal=True
            )
            for own, key, value in parts
        ]
        return torch.cat(answers, 2).transpose(1, 2)

    return alone


def once(run: Attend, inputs: list[torch.Tensor], slope: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of a pass both ways."""
    out = run(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, slope)]


def timed(run: Attend, inputs: list[torch.Tensor], slope: torch.Tensor) -> float:
    """Milliseconds of a pass both ways; on a card the device's, which waits until the host has run ahead."""
    if not slope.is_cuda:
        begun = time.perf_counter()
        once(run, inputs, slope)
        return 1e3 * (time.perf_counter() - begun)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD)
    start.record()
    for _ in range(PASSES):
        once(run, inputs, slope)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / PASSES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--shape", choices=("8b", "tiny"), default="8b")
    result_options(parser)
    options = parser.parse_args()
    small = options.shape == "tiny"
    device = torch.device("cpu" if small else "cuda")
    heads, shared, width = (4, 2, 16) if small else (32, 8, 128)
    tokens, rounds = (96, 5) if small else (options.tokens, options.rounds)
    each = lengths(options.documents, tokens)
    config = Qwen3Config(
        hidden_size=heads * width, num_attention_heads=heads, num_key_value_heads=shared, head_dim=width
    )
    torch.manual_seed(0)
    # As projections leave them: heads lie inside tokens.
    inputs = [
        torch.randn(1, tokens, count, width, dtype=torch.bfloat16, device=device).transpose(1, 2).requires_grad_()
        for count in (heads, shared, shared)
    ]
    slope = torch.randn(1, tokens, heads, width, dtype=torch.bfloat16, device=device)
    right = once(truth(each), inputs, slope)
    runs: dict[str, Attend] = {}
    for name, run in entrants(config, each, device).items():
        try:
            ours = once(run, inputs, slope)
        except (ImportError, RuntimeError, ValueError, TypeError, AttributeError) as problem:
            print(f"{name}: {str(problem).strip().splitlines()[0][:160]}", flush=True)
            continue
        error = max(
            float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(ours, right, strict=True)
        )
        if error > 2e-2:
            print(f"{name}: DIFFERS by {error:.1e}, not reported", flush=True)
        else:
            runs[name] = run
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name, run in runs.items():
            took = timed(run, inputs, slope)
            if number > 1:
                times[name].append(took)
    # Two products forward and five backward, of half the pairs inside each document.
    floor = 7 * sum(count * count for count in each) * heads * width / FLOP_PER_MS
    shape = f"{options.documents} documents in {tokens}, {heads}/{shared} heads of {width}"
    results = Results(options, processor() if small else torch.cuda.get_device_name(), "torch", "triton")
    side_by_side(results, "packed_attention", shape, times, {}, floor)


if __name__ == "__main__":
    main()
