"""Compiles every kernel, with every tile it may take, for a card that is not there, and tells what each asks of it.

A script: `compile_for_a_card.py CAPABILITY` (90, say) prints one JSON line a kernel and tile: registers a thread, bytes
of stack (spilled registers) and shared memory; with `by hand` behind it the tiles picked by hand alone. The launchers
run on tiny CPU tensors as they would on a card; each launch is compiled where it would be started, and nothing is
computed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels import device, tuner
from engine.kernels.experts import ExpertLoRA, Gate, expert_mlp, launch
from engine.kernels.experts.packed import Packer, of_groups
from engine.kernels.fp8_rows import rounded_rows, transposed
from engine.kernels.gated import ACTIVATIONS, gated, gated_gradients
from engine.kernels.gated_sums import gated_sums
from engine.kernels.linear_cross_entropy import linear_cross_entropy
from engine.kernels.linear_logp import linear_logp
from engine.kernels.logp_entropy import logp_entropy
from engine.kernels.norm_rope import norm_rope
from engine.kernels.rope import rope
from engine.kernels.tuned import Kept

TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64", torch.bool: "*i1",
    torch.uint8: "*u8", torch.int32: "*i32",
    torch.int8: "*i8", torch.int16: "*i16",
}  # fmt: skip
BYTES = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
DONE: set[str] = set()
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes that a program may have of a multiprocessor's memory."""


def compiled(fn: JITFunction, capability: int, values: dict[str, Any], options: dict[str, Any]) -> None:
    """Compiles one launch and prints what it takes; a launch that was compiled before is passed over."""
    constants = {p.name: values[p.name] for p in fn.params if p.is_constexpr}
    constants |= {name: value for name, value in values.items() if value is None or value is True or value is False}
    signature, aligned = {}, {}
    for i, name in enumerate(fn.arg_names):
        value = values[name]
        if name in constants:
            signature[name] = "constexpr"
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
        elif isinstance(value, tuple):  # the parts of a packed weight
            signature[name] = tuple(TYPES[part.dtype] for part in value)
            aligned |= {(i, j): [["tt.divisibility", 16]] for j in range(len(value))}
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            aligned[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int) and value == 1:  # so does Triton specialise
            constants[name], signature[name] = 1, "constexpr"
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                aligned[(i,)] = [["tt.divisibility", 16]]
    key = json.dumps(
        [fn.__name__, signature, sorted(aligned), {k: str(v) for k, v in constants.items()}, options], sort_keys=True
    )
    if key in DONE:
        return
    DONE.add(key)
    source = ASTSource(
        fn, signature, {(fn.arg_names.index(name),): value for name, value in constants.items()}, aligned
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run([BYTES, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name.lower(): int(n) for name, n in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", told)}
    sizes = {name: value for name, value in constants.items() if isinstance(value, int) and not isinstance(value, bool)}
    flags = [name for name, value in constants.items() if value is True]
    print(json.dumps({"kernel": fn.__name__, **sizes, **options, **found, "flags": flags}), flush=True)


def main(capability: int, every_tile: bool) -> None:
    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **more: Any) -> None:
        names = set(self.arg_names)
        values = dict(zip(self.arg_names, args, strict=False)) | {k: v for k, v in more.items() if k in names}
        compiled(self, capability, values, {k: v for k, v in more.items() if k not in names})

    def every(runs: Sequence[Callable[[], object]]) -> list[float]:
        for each in runs:
            each()
        return [1.0] * len(runs)

    JITFunction.run = run
    for module in (
        "linear_logp.tiles",
        "linear_logp.slices",
        "logp_entropy",
        "norm_rope",
        "rope",
        "gated",
        "gated_sums",
        "fp8_rows",
    ):
        __import__(f"engine.kernels.{module}")
        sys.modules[f"engine.kernels.{module}"].kernel_serves = lambda *tensors: True
    from engine.kernels.experts import packed

    launch.kernel_serves = packed.kernel_serves = lambda *tensors: True
    launch.copies_tiles = lambda device: capability >= 90
    limits, of_a_cpu = tuner.Limits(shared_bytes=SHARED[capability]), tuner.limits_of
    tuner.limits_of = sys.modules["engine.kernels.gated_sums"].limits_of = lambda device: limits
    assert not device.interpreted()
    with tempfile.TemporaryDirectory() as folder:
        if every_tile:
            tuner.TUNER.start(every, lambda device: Kept(Path(folder) / "card.json"))
        launch_everything()
        # Of the experts' largest tiles one spills 120 bytes: the timed choice takes it where it is faster all the same.
        tuner.limits_of = of_a_cpu
        launch_experts(torch.bfloat16)


def launch_everything() -> None:
    words, size, half = 40_000, 128, torch.bfloat16
    targets = torch.zeros(2, dtype=torch.long)
    for trained in (True, False):
        h = torch.zeros(2, 16, dtype=half, requires_grad=True)
        w = torch.zeros(words, 16, dtype=half, requires_grad=trained)
        for outputs in (("entropy", "cross_entropy"), ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")):
            scores = linear_logp(h, w, targets, outputs=outputs, soft_cap=30.0)
            (scores.log_probs.sum() + scores.entropy.sum()).backward()
        linear_logp(h, w, targets, outputs=()).log_probs.sum().backward()
        linear_cross_entropy(h, w, targets, label_smoothing=0.1).backward()
    logits = torch.zeros(1, 2, words, dtype=half, requires_grad=True)
    sum(x.sum() for x in logp_entropy(logits, targets[None])).backward()
    with tempfile.NamedTemporaryFile() as file:
        apart, count = 2**31 // 64, 2**31 + 64
        file.truncate(2 * count)  # a file with holes takes no room
        far = torch.from_file(file.name, shared=True, size=count, dtype=torch.float16).as_strided(
            (1, 1, 64), (0, 0, apart)
        )
        logp_entropy(far.requires_grad_(), targets[:1, None], inplace_gradient=True)[0].sum().backward()
    q, k = (torch.zeros(1, 2, heads, size, dtype=half, requires_grad=True) for heads in (32, 8))
    weights = [torch.zeros(size, dtype=half, requires_grad=True) for _ in range(2)]
    angles = torch.zeros(1, 2, size, dtype=half)
    sum(x.sum() for x in norm_rope(q, k, *weights, angles, angles)).backward()
    sum(x.sum() for x in rope(q, k, angles, angles)).backward()
    gate, up = (torch.zeros(2, words, dtype=half, requires_grad=True) for _ in range(2))
    for activation in ACTIVATIONS:
        gated(gate, up, activation).sum().backward()
        wide, other = (torch.zeros(2, words, dtype=half, requires_grad=True) for _ in range(2))
        thin = torch.zeros(2, 16, dtype=half), torch.zeros(words, 16, dtype=half)
        low, right = torch.zeros(16, words, dtype=half), torch.zeros(8, 16, dtype=half)
        out, answer = gated_sums(wide, thin, other, thin, activation, (low, right))
        (out.sum() + answer.sum()).backward()
    low, right = torch.zeros(2, 16, dtype=half), torch.zeros(16, words, dtype=half)
    wide, other, slope = (torch.zeros(2, words, dtype=half) for _ in range(3))
    torch.ops.workbench.gated_sums_backward_(slope, low, right, wide, *thin, other, *thin, "silu")
    for width in (4096, 12_288, words):
        numbers, _ = rounded_rows(torch.zeros(2, width, dtype=half))
        rounded_rows(torch.zeros(2, width, dtype=half), torch.ones(1, width))
        transposed(numbers)
        gated_gradients(*(torch.zeros(2, words, dtype=half) for _ in range(3)), activation, with_product=True)


def packed_experts(weight: torch.Tensor, kind: str) -> torch.Tensor:
    packer = Packer(len(weight), kind, weight.dtype)
    for expert in weight:
        packer.add(expert)
    return packer.done()


def launch_experts(half: torch.dtype) -> None:
    """A block as most models have it, one as gpt-oss has it, and the first packed, with tiles of 128 rows; packed also of so few
    that products decode."""
    experts, hidden, width, rank = 2, 512, 256, 16
    packed_experts(torch.zeros(1, 8, 40, dtype=half), "mxfp4").all_unpacked()  # rows that end in a part of a block
    packed_experts(torch.zeros(1, 128, 128, dtype=half), "fp8").all_unpacked()  # products of 128 tokens decode theirs
    for kind, wide in (("uint4", 64), ("uint8", 128)):
        codes, scales = torch.zeros(1, 8, wide, dtype=torch.uint8), torch.zeros(1, 8, 2, dtype=torch.float16)
        of_groups(kind, codes, scales, 64, 128, half).all_unpacked()
        more = {"zeros": scales.short(), "of_column": torch.zeros(1, 128, dtype=torch.int32)}
        of_groups(kind, codes, scales, 64, 128, half, **more).all_unpacked()

    def leaf(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=half, requires_grad=True)

    kinds = (
        (False, None),
        (True, None),
        (False, "nf4"),
        (False, "int8"),
        (True, "mxfp4"),
        (False, "nvfp4"),
        (False, "fp8"),
    )
    few = [(like_gpt_oss, held, 8) for like_gpt_oss, held in kinds if held in launch.DECODED]
    for like_gpt_oss, held, tokens in [*((*each, 128) for each in kinds), *few]:
        ids = torch.zeros(tokens, 2, dtype=torch.int64)
        gate_up, down = (
            torch.zeros(experts, 2 * width, hidden, dtype=half),
            torch.zeros(experts, hidden, width, dtype=half),
        )
        biases = (None, None)
        if like_gpt_oss:
            gate_up, down = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (gate_up, down))
            biases = torch.zeros(experts, 2 * width, dtype=half), torch.zeros(experts, hidden, dtype=half)
        if held is not None:
            gate_up, down = (packed_experts(each, held) for each in (gate_up, down))
        expert_mlp(
            leaf(tokens, hidden), ids, leaf(tokens, 2), gate_up, down, gate_up_bias=biases[0], down_bias=biases[1],
            gate_up_lora=ExpertLoRA(leaf(experts, rank, hidden), leaf(experts, 2 * width, rank)),
            down_lora=ExpertLoRA(leaf(experts, rank, width), leaf(experts, hidden, rank)),
            gate=Gate("clamped_swiglu", interleaved=True) if like_gpt_oss else Gate(),
        ).sum().backward()  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), every_tile=sys.argv[2:] != ["by hand"])
