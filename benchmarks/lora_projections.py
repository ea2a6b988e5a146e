"""Adapted projections of an 8B layer, forward and backward: PEFT, PEFT compiled and ours in closed form, on one CUDA device.

    python benchmarks/lora_projections.py [--rounds 20] [--seconds 90] [--tokens 8192 2048] [--bases bf16 nf4 gptq]
                                          [--results FILE --commit HASH]

`mlp` is Qwen3's gated block, 4,096 to 12,288; `attention` its queries, keys, values and output, 4,096 to 4,096 and
1,024. LoRA r=16 on all of them, adapters in bf16, frozen bases in bf16, bitsandbytes' NF4 or GPTQ's four bits (groups of 128).
Implementations take turns round after round; gradients of adapters are kept from pass to pass, as in accumulation. The peak is
what one pass allocates beyond weights, input and the gradients that come in. Nothing is reported while the kernel's accuracy
cases fail, nor of an implementation whose gradients differ from PEFT's by more than bf16 rounds. The floor is the wide products
at 790 TFLOP/s, one forward and one for the input's gradient. `activation` is act(gate) * up alone at 12,288 columns; its floor is
eight passes over one such tensor at 3.0 TB/s. `--shape tiny` runs without a card, which shows that everything runs and agrees,
and no time of interest.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from _accuracy import refuse_while_red
from _figures import Results, result_options, side_by_side
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from engine.features.fused_lora.apply import fuse
from engine.kernels.experts import groups
from engine.kernels.gated import gated
from engine.models.stored_packed.formats import Parts
from engine.models.stored_packed.linear import PackedLinear

FLOP_PER_MS, BYTES_PER_MS = 790e9, 3.0e9
CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Run = Callable[[], Sequence[torch.Tensor]]
"""One forward and backward pass; what it answers are the gradients to be compared."""


class Attention(torch.nn.Module):
    """The projections of attention, with nothing between them."""

    def __init__(self, size: int, few: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            torch.nn.Linear(size, width, bias=False) for width in (size, few, few, size)
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        return torch.cat((self.o_proj(q), k, v), -1)


def block(kind: str, base: str, size: int, wide: int) -> Any:
    """The module under PEFT, its adapters saying something, in training."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        inside: Any = (
            Qwen3MLP(Qwen3Config(hidden_size=size, intermediate_size=wide))
            if kind == "mlp"
            else Attention(size, size // 4)
        )
    inside = torch.nn.ModuleDict({"part": inside.to(torch.bfloat16)})
    if base != "bf16":
        for name, linear in list(inside["part"].named_children()):
            if isinstance(linear, torch.nn.Linear):
                setattr(inside["part"], name, (in_nf4 if base == "nf4" else in_gptq)(linear))
    model = get_peft_model(inside, LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS))
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(torch.bfloat16)
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    return model.base_model.model["part"].train()


def in_nf4(linear: torch.nn.Linear) -> Any:
    import bitsandbytes as bnb

    made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4")
    made.weight = bnb.nn.Params4bit(linear.weight.data.cpu(), requires_grad=False, quant_type="nf4", module=made)
    return made.to(DEVICE)


def in_gptq(linear: torch.nn.Linear) -> Any:
    """The layer in what GPTQ's files hold, rounded to the nearest."""
    made, width = PackedLinear(linear), min(128, linear.in_features)
    wide = linear.weight.data.float().unflatten(1, (-1, width))
    low, high = wide.amin(2), wide.amax(2)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(0, 15)
    codes = (wide / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15).flatten(1).to(torch.uint8)
    made.fill(Parts("uint4", groups.in_bytes(codes, 4), scale, width, zero.to(torch.uint8)))
    return made.to(DEVICE)


def passes(module: Any, x: torch.Tensor, call: Callable[..., torch.Tensor]) -> Run:
    """Forward and backward through `call`; gradients of adapters stay."""
    slope: list[torch.Tensor] = []

    def run() -> Sequence[torch.Tensor]:
        x.grad = None
        out = call(x)
        if not slope:
            slope.append(
                torch.randn(out.shape, dtype=out.dtype, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
            )
        out.backward(slope[0])
        del out
        return [x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]

    return run


def entrants(kind: str, base: str, tokens: int, size: int, wide: int) -> dict[str, Run]:
    theirs = block(kind, base, size, wide)
    ours, other = copy.deepcopy(theirs), copy.deepcopy(theirs)
    found, _ = fuse([ours])
    assert not found.left, found.summary()
    x = torch.randn(1, tokens, size, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    return {
        "peft": passes(theirs, x, theirs),
        "peft compiled": passes(other, x, torch.compile(other, backend="inductor" if CARD else "aot_eager")),
        "ours": passes(ours, x, ours),
    }


def activations(tokens: int, wide: int) -> dict[str, Run]:
    gate, up = (torch.randn(tokens, wide, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    slope = torch.randn(tokens, wide, device=DEVICE, dtype=torch.bfloat16)

    def plain(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    ways: dict[str, Callable[..., torch.Tensor]] = {
        "torch": plain, "torch compiled": torch.compile(plain, backend="inductor" if CARD else "aot_eager"), "ours": gated,
    }  # fmt: skip
    try:
        from liger_kernel.ops import LigerSiLUMulFunction

        if CARD:
            ways["liger"] = LigerSiLUMulFunction.apply
    except ImportError:
        pass

    def of(name: str, call: Callable[..., torch.Tensor]) -> Run:
        # Liger writes its gradients over what it keeps, so it gets a copy each time.
        given = (lambda: (gate * 1, up * 1)) if name == "liger" else (lambda: (gate, up))
        return lambda: torch.autograd.grad(call(*given()), (gate, up), slope)

    return {name: of(name, call) for name, call in ways.items()}


def once(run: Run) -> tuple[float, float]:
    """Milliseconds and MiB of one pass."""
    if not CARD:
        begun = time.perf_counter()
        run()
        return (time.perf_counter() - begun) * 1e3, 0.0
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end), (torch.cuda.max_memory_allocated() - held) / 2**20


def contest(
    work: str, shape: str, runs: dict[str, Run], floor: float, options: Any, until: float, results: Results
) -> None:
    right: dict[str, Run] = {}
    truth: list[torch.Tensor] = []
    for name, run in runs.items():
        begun = time.perf_counter()
        found = [each.detach().clone() for each in run()]
        truth = truth or found
        error = max(float((a - b).float().norm() / b.float().norm()) for a, b in zip(found, truth, strict=True))
        print(
            f"{work} {shape} {name}: {error:.1e} from the first, first pass {time.perf_counter() - begun:.1f} s",
            flush=True,
        )
        if error > 3e-2:
            print(f"{work} {shape} {name}: DIFFERS, not reported", flush=True)
            continue
        right[name] = run
        once(run)
    times: dict[str, list[float]] = {name: [] for name in right}
    peaks: dict[str, float] = {}
    for number in range(options.rounds):
        for name, run in right.items():
            took, peaks[name] = once(run)
            times[name].append(took)
        if time.perf_counter() > until and number > 3:
            break
    side_by_side(results, work, shape, times, peaks, floor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=90, help="shared by all contests; none does more rounds later")
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192, 2048])
    parser.add_argument("--bases", nargs="*", choices=["bf16", "nf4", "gptq"], default=["bf16", "nf4"])
    parser.add_argument("--shape", choices=["8b", "tiny"], default="8b")
    result_options(parser)
    options = parser.parse_args()
    refuse_while_red("gated_cases:bfloat16", "gated_again")
    size, wide = (4096, 12_288) if options.shape == "8b" else (64, 128)
    results = Results(options, torch.cuda.get_device_name() if CARD else "cpu", "torch", "triton")
    plans = [
        (kind, base, tokens) for base in options.bases for kind in ("mlp", "attention") for tokens in options.tokens
    ]
    begun, contests = time.perf_counter(), len(plans) + 1

    def until(number: int) -> float:
        return begun + options.seconds * (number + 1) / contests

    tokens = options.tokens[0]
    floor = 8 * 2 * tokens * wide / BYTES_PER_MS
    contest("gated_activation", f"{tokens} x {wide}", activations(tokens, wide), floor, options, until(0), results)
    for number, (kind, base, tokens) in enumerate(plans, 1):
        weights = 3 * size * wide if kind == "mlp" else size * (2 * size + size // 2)
        floor = 2 * 2 * tokens * weights / FLOP_PER_MS
        runs = entrants(kind, base, tokens, size, wide)
        contest(f"lora_{kind}", f"{tokens} tokens, {base}", runs, floor, options, until(number), results)
        del runs
        torch._dynamo.reset()
        if CARD:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
