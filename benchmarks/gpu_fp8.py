"""FP8 products against bf16: step time at layer shapes of an 8B model, and 200 steps of learning at a small one.

    python benchmarks/gpu_fp8.py layers [--arms NAME ...] [--seconds 150] [--commit HASH] [--results FILE]
    python benchmarks/gpu_fp8.py learn [--steps 200] [--commit HASH] [--results FILE]
    python benchmarks/gpu_fp8.py base [--steps 200] [--seeds 3] [--commit HASH] [--results FILE]
    python benchmarks/gpu_fp8.py sizes [--commit HASH] [--results FILE]

`layers`: four decoder layers of Qwen3-8B's shape (hidden 4096, MLP 12,288, 32 heads, 8 for keys and values) with random
weights under a head of 2,048 words, 4 rows of 2,048 tokens; a step is forward, backward, clip and fused AdamW, whole
weights or LoRA (r 16, all linear layers, bf16), once on weights stored in FP8 that are scaled in each product. A whole
model has nine times the layers and a larger head, so its ratio lies nearer to 1. Every arm is compiled layer by layer
as a run does it, but the two named eager. All arms of a kind start from the same weights; a round gives each in turn
one step, and the order turns. A row is the median and percentiles in ms, the peak above what the arms hold, and the
median ratio to bf16 of the same round with its 95% interval.

`learn`: a model of 4 layers, hidden 512, on the bytes of this project's own Python files, 16 rows of 512, bf16 and both
FP8 recipes on the same batches: first whole weights on the engine, then LoRA (r 16) on the tests, from what bf16 learned;
what is compared is the mean loss of every 20 steps.

`base`: as the second part of `learn`, with frozen layers rounded once (`model.quantization: fp8`), by as many seeds,
each of its own adapter and batches, as bf16: the furthest that FP8 comes from bf16 of its seed, beside how far bf16's
seeds lie apart.

`sizes`: from which size on a layer gains: a norm and a frozen linear layer, compiled together, forward and input
gradient of 8,192 tokens, in bf16 and computed in FP8, in turn; and the relative error of both results against bf16's;
of the large ones also what is done beside the product.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _accuracy import refuse_while_red
from _figures import Results, ratio, result_options
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.features.built import Built, decoder_layers
from engine.features.compile.apply import compile_layers
from engine.features.fp8_base.layers import Fp8BaseLinear, compute_in_fp8
from engine.features.quantization_aware.apply import apply as quantization_aware
from engine.kernels.fp8_rows import rounded_rows, rounded_rows_reference, transposed, transposed_reference
from engine.models.stored_fp8 import Fp8Linear

LAYERS, ROWS, TOKENS, VOCABULARY = 4, 4, 2048, 2048
SHAPE = {
    "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": LAYERS, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCABULARY, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 256, "tie_word_embeddings": False,
}  # fmt: skip
STORED = "stored"
"""In place of a recipe: the frozen weights are those of a model stored in FP8, blocks of 128, scaled in each product."""
BASE = "base"
"""In place of a recipe: the frozen layers are rounded once and multiply in FP8."""
SIZES = [
    (1024, 1024),
    (1024, 3072),
    (2048, 2048),
    (2560, 1024),
    (2560, 2560),
    (4096, 1024),
    (4096, 4096),
    (4096, 12_288),
]
"""Inputs and outputs of layers, from those of a 0.6B model to those of an 8B one."""
# (name, LoRA, recipe or None, compiled)
ARMS = [
    ("LoRA bf16", True, None, True),
    ("LoRA fp8 tensorwise", True, "tensorwise", True),
    ("LoRA fp8 rowwise", True, "rowwise", True),
    ("LoRA on weights stored in FP8", True, STORED, True),
    ("LoRA on an fp8 base", True, BASE, True),
    ("full bf16", False, None, True),
    ("full fp8 tensorwise", False, "tensorwise", True),
    ("full fp8 rowwise", False, "rowwise", True),
    ("LoRA bf16 eager", True, None, False),
    ("LoRA fp8 tensorwise eager", True, "tensorwise", False),
]
MOST_ROUNDS = 25


def model_of(
    shape: dict[str, Any],
    recipe: str | None,
    *,
    lora: bool,
    compiled: bool,
    weights: dict[str, torch.Tensor] | None = None,
    seed: int = 1,
) -> Any:
    """A model on the card with the same weights each time; with a recipe its layers are converted as a run does it."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = Qwen3ForCausalLM(Qwen3Config(**shape)).to(torch.bfloat16)
    if weights is not None:
        model.load_state_dict(weights)
    if recipe == STORED:
        store_in_fp8(model)
    if recipe == BASE:
        compute_in_fp8(model, least=0).plain.clear()
    if lora:
        adapter = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
        torch.manual_seed(seed)
        model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    model.train()
    if recipe not in (None, STORED, BASE):
        kernels = SimpleNamespace(quantization_aware="fp8", fp8_recipe_name=recipe)
        applied = quantization_aware(SimpleNamespace(kernels=kernels), Built(model))
        say(f"  {applied.count} {applied.detail}" if applied else "  nothing converted")
    if compiled:
        compile_layers(list(decoder_layers(model)), {})
    return model


def store_in_fp8(model: Any, size: int = 128) -> None:
    """The linear layers of the decoder as a model stored in FP8 has them."""
    for layer in model.model.layers.modules():
        for name, module in list(layer.named_children()):
            if type(module) is torch.nn.Linear:
                blocks = module.weight.data.float().unflatten(0, (-1, size)).unflatten(2, (-1, size))
                scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
                module.weight.data = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.bfloat16)
                numbers = module.weight.data.to(torch.float8_e4m3fn)
                setattr(layer, name, Fp8Linear(module, numbers, scale, (size, size)))


class Arm:
    """One model, its optimizer and what its steps took."""

    def __init__(self, name: str, lora: bool, recipe: str | None, compiled: bool) -> None:
        self.name = name
        held = torch.cuda.memory_allocated()
        self.model = model_of(SHAPE, recipe, lora=lora, compiled=compiled)
        self.weights = torch.cuda.memory_allocated() - held
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-5, fused=True)
        self.times: list[float] = []
        self.peak = 0

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def timed(self, ids: torch.Tensor) -> None:
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        self.step(ids)
        torch.cuda.synchronize()
        self.times.append((time.perf_counter() - begun) * 1e3)
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() - held)


def batch(number: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(number)
    return torch.randint(VOCABULARY, (ROWS, TOKENS), device="cuda", generator=generator)


def layers(options: argparse.Namespace, results: Results) -> None:
    until = time.monotonic() + options.seconds
    for first, count in ((0, 5), (8, 2), (5, 3)):
        plain, *others = ARMS[first : first + count]
        chosen = [arm for arm in others if not options.arms or arm[0] in options.arms]
        if not chosen:
            continue
        group: list[Arm] = []
        for name, lora, recipe, compiled in (plain, *chosen):
            begun = time.monotonic()
            arm = Arm(name, lora, recipe, compiled)
            losses = [arm.step(batch(number)).item() for number in range(3)]
            group.append(arm)
            say(f"{name}: first losses {losses[0]:.5f} {losses[1]:.5f}, {time.monotonic() - begun:.1f} s to begin")
        rounds = 0
        while rounds < MOST_ROUNDS and (time.monotonic() < until or rounds < 8):
            ids = batch(10 + rounds)
            turn = rounds % len(group)
            for arm in group[turn:] + group[:turn]:
                arm.timed(ids)
            rounds += 1
        for arm in group:
            middle, low, high = ratio(list(zip(arm.times, group[0].times, strict=True)))
            say(
                f"{arm.name:28} {statistics.median(arm.times):8.2f} ms  ratio {middle:.3f} [{low:.3f}, {high:.3f}]  "
                f"peak {arm.peak / 2**20:.0f} MiB over weights of {arm.weights / 2**20:.0f} MiB  n={rounds}"
            )
            shape = f"{LAYERS} layers of Qwen3-8B, {ROWS}x{TOKENS}; ratio {middle:.3f} [{low:.3f}, {high:.3f}]"
            results.add("fp8_step", shape, arm.name, ms=arm.times, peak_mib=arm.peak / 2**20)
        group.clear()
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def text_of(pattern: str) -> torch.Tensor:
    files = sorted(Path(__file__).resolve().parent.parent.glob(pattern))
    text = bytearray(b"".join(file.read_bytes() for file in files))
    say(f"{len(text):,} bytes of {len(files)} files {pattern}")
    return torch.frombuffer(text, dtype=torch.uint8).long().cuda()


def curve(model: Any, text: torch.Tensor, steps: int, rate: float, first: int) -> list[float]:
    """Mean loss of every 20 steps; `first` is the number of the first batch, the same ones from the same number on."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, fused=True)
    losses = []
    for number in range(steps):
        generator = torch.Generator("cuda").manual_seed(number + first)
        starts = torch.randint(len(text) - 512, (16, 1), device="cuda", generator=generator)
        ids = text[starts + torch.arange(512, device="cuda")]
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (number + 1) / 20)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    torch._dynamo.reset()
    values = torch.stack(losses).float().cpu()
    return [float(values[start : start + 20].mean()) for start in range(0, steps, 20)]


def learn(options: argparse.Namespace, results: Results) -> None:
    code, tests = text_of("engine/**/*.py"), text_of("tests/**/*.py")
    learned: dict[str, torch.Tensor] | None = None
    plain: dict[bool, list[float]] = {}
    for lora in (False, True):
        for name in ("bf16", "bf16, other batches", "fp8 tensorwise", "fp8 rowwise"):
            recipe = name.removeprefix("fp8 ") if name.startswith("fp8") else None
            model = model_of(SMALL, recipe, lora=lora, compiled=True, weights=learned)
            means = curve(model, tests if lora else code, options.steps, 1e-3, 10_000 if "other" in name else 0)
            plain.setdefault(lora, means)
            apart = max(abs(a - b) / b for a, b in zip(means, plain[lora], strict=True))
            kind = "LoRA" if lora else "full"
            say(f"{kind} {name:20} {' '.join(f'{value:.4f}' for value in means)}  furthest from bf16 {apart:.2%}")
            shape = f"hidden 512, 4 layers, {options.steps} steps; loss {means[0]:.3f} to {means[-1]:.3f}"
            results.add("fp8_learn", f"{shape}; furthest from bf16 {apart:.2%}", f"{kind} {name}")
            if name == "bf16" and not lora:
                trained = {key: value.detach().clone() for key, value in model.state_dict().items()}
        learned = trained


def base(options: argparse.Namespace, results: Results) -> None:
    code, tests = text_of("engine/**/*.py"), text_of("tests/**/*.py")
    whole = model_of(SMALL, None, lora=False, compiled=True)
    means = curve(whole, code, options.steps, 1e-3, 0)
    say(f"whole weights, bf16: {means[0]:.4f} to {means[-1]:.4f}")
    learned = {key: value.detach().clone() for key, value in whole.state_dict().items()}
    found: dict[str, list[list[float]]] = {"bf16": [], "fp8 base": []}
    for seed in range(options.seeds):
        for name, curves in found.items():
            recipe = BASE if name == "fp8 base" else None
            model = model_of(SMALL, recipe, lora=True, compiled=True, weights=learned, seed=seed + 1)
            curves.append(curve(model, tests, options.steps, 1e-3, 10_000 * seed))
            say(f"seed {seed} {name:9} {' '.join(f'{value:.4f}' for value in curves[-1])}")
    spread = max((max(each) - min(each)) / min(each) for each in zip(*found["bf16"], strict=True))
    for seed, (ours, plain) in enumerate(zip(found["fp8 base"], found["bf16"], strict=True)):
        off = [a / b - 1 for a, b in zip(ours, plain, strict=True)]
        words = f"from {min(off):+.2%} to {max(off):+.2%} off bf16 of its seed; bf16's seeds lie {spread:.2%} apart"
        say(f"seed {seed}: fp8 base {words}")
        shape = f"hidden 512, 4 layers, {options.steps} steps; loss {ours[0]:.3f} to {ours[-1]:.3f}; {words}"
        results.add("fp8_base_learn", shape, f"LoRA on an fp8 base, seed {seed}")


def sizes(options: argparse.Namespace, results: Results) -> None:
    for columns, rows in SIZES:
        torch._dynamo.reset()  # or the ninth layer is no longer compiled
        torch.manual_seed(0)
        plain = torch.nn.Linear(columns, rows, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
        layers = {"bf16": plain, "fp8 base": Fp8BaseLinear(plain, *rounded_rows(plain.weight.data))}
        norm = torch.nn.RMSNorm(columns, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
        x = torch.randn(8192, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn(8192, rows, device="cuda", dtype=torch.bfloat16)
        calls = {name: torch.compile(torch.nn.Sequential(norm, layer), dynamic=False) for name, layer in layers.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        made: dict[str, list[torch.Tensor]] = {}
        for turn in range(23):
            for name, call in calls.items():
                took = elapsed(lambda name=name, call=call: made.update({name: both(call, x, gradient)}))
                if turn >= 3:
                    times[name].append(took)
        middle, low, high = ratio(list(zip(times["fp8 base"], times["bf16"], strict=True)))
        errors = [
            ((a - b).float().norm() / b.float().norm()).item() for a, b in zip(*reversed(made.values()), strict=True)
        ]
        words = f"ratio {middle:.3f} [{low:.3f}, {high:.3f}]; error {errors[0]:.2%} forward, {errors[1]:.2%} backward"
        ms = statistics.median(times["fp8 base"]), statistics.median(times["bf16"])
        say(f"{columns:6} to {rows:6}: fp8 {ms[0]:.3f} ms, bf16 {ms[1]:.3f} ms, {words}")
        results.add("fp8_base_layer", f"{columns} to {rows}, 8,192 tokens; {words}", "fp8 base", ms=times["fp8 base"])
        if rows * columns >= 4096 * 4096:
            parts(plain.weight.data, gradient, options, results)


def both(call: Callable[..., torch.Tensor], x: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    """A layer's output and the gradient of its input."""
    out = call(x)
    return [out.detach(), *torch.autograd.grad(out, x, gradient)]


def parts(weight: torch.Tensor, gradient: torch.Tensor, options: argparse.Namespace, results: Results) -> None:
    """What is done beside a product, by the kernels and as torch's compiler makes it: a weight turned, rows rounded."""
    numbers, scale = rounded_rows(weight)
    work: dict[str, tuple[Callable[[], Any], int]] = {
        "turned, kernel": (lambda: transposed(numbers), 2 * numbers.numel()),
        "turned, compiled": (partial(torch.compile(transposed_reference), numbers), 2 * numbers.numel()),
        "rounded, kernel": (lambda: rounded_rows(gradient, scale.t()), 3 * gradient.numel()),
        "rounded, compiled": (
            partial(torch.compile(rounded_rows_reference), gradient, scale.t()),
            3 * gradient.numel(),
        ),
        "rounded, eager": (lambda: rounded_rows_reference(gradient, scale.t()), 3 * gradient.numel()),
    }
    for name, (call, moved) in work.items():
        times = [elapsed(call) for _ in range(13)][3:]
        middle = statistics.median(times)
        say(f"    {tuple(weight.shape)} {name:17} {middle:.4f} ms, {moved / middle / 1e6:,.0f} GB/s")
        results.add("fp8_base_parts", f"{tuple(weight.shape)}, 8,192 tokens; {name}", name.rpartition(" ")[2], ms=times)


def elapsed(call: Callable[[], Any]) -> float:
    """Milliseconds on the device, which begins when the host has launched all."""
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(4_000_000)
    begun.record()
    call()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended))


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["layers", "learn", "base", "sizes"])
    parser.add_argument("--seconds", type=float, default=150, help="after so long each kind takes eight rounds alone")
    parser.add_argument("--arms", nargs="*", help="of `layers`, these alone beside bf16")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3, help="of `base`")
    result_options(parser)
    options = parser.parse_args()
    if options.what != "learn":  # that one is torchao's alone
        refuse_while_red("fp8_rows_cases", "fp8_rows_numbers")
    results = Results(options, torch.cuda.get_device_name(), "torch", "triton")
    {"layers": layers, "learn": learn, "base": base, "sizes": sizes}[options.what](options, results)


if __name__ == "__main__":
    main()
