"""Dense kernels beside their peers on one CUDA device: time, extra memory and the floor, in one run.

    python benchmarks/dense_kernels.py [ce logp rope turn sums] [--results benchmarks/results.csv] [--commit HASH]

Refuses to report while the accuracy cases fail. Times are medians with the 10th and 90th percentile over CUDA events;
implementations of one work are measured in turn, round after round, so drift hits all alike. Times are the device's, measured
behind a wait that lets the host run ahead, as it does within a step; the rows `as called` are what a caller of `norm_rope`
waits for, which is so short that the host is the slower part. Floors assume 3.0 TB/s and 790 TFLOP/s (one H100 SXM).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from _accuracy import refuse_while_red
from _figures import Results, result_options, side_by_side

from engine.kernels.gated_sums import BACKWARD, FORWARD, GATED_SUMS, GRADIENTS
from engine.kernels.linear_cross_entropy import linear_cross_entropy
from engine.kernels.logp_entropy import logp_entropy
from engine.kernels.norm_rope import norm_rope, norm_rope_reference
from engine.kernels.rope import rope as rotary
from engine.kernels.tuner import Tile, Tiles

BYTES_PER_MS, FLOP_PER_MS = 3.0e9, 790e9
ROUNDS = 20
AHEAD = 10_000_000
"""Cycles of the device, some 5 ms."""
CASES = {
    "ce": ["linear_cross_entropy_cases", "slices_that_wait"],
    "logp": ["logp_entropy_cases", "logp_entropy_in_place"],
    "rope": ["norm_rope_cases", "norm_rope_as_gradients_lie", "norm_rope_blocks", "norm_rope_registered"],
    "turn": ["rope_cases", "rope_views", "rope_registered"],
    "sums": ["gated_sums_cases:bfloat16", "gated_sums_again", "gated_sums_tiles"],
}
"""What must hold before figures of a work are told, in `tests/engine/kernels/kernel_cases.py`."""


def timed(run: Callable[[], object], ahead: int = 0) -> float:
    """Milliseconds from first to last kernel; `ahead` cycles in which the device waits before them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if ahead:
        torch.cuda._sleep(ahead)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def contest(
    work: str,
    shape: str,
    floor_ms: float,
    entrants: dict[str, Callable[[], object]],
    results: Results,
    ahead: int = AHEAD,
) -> None:
    """Each entrant once a round; peak is what one run allocates beyond what was there before it."""
    times: dict[str, list[float]] = {name: [] for name in entrants}
    peaks: dict[str, float] = {}
    for name, run in list(entrants.items()):
        try:
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = run()
            torch.cuda.synchronize()
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            del out
        except torch.cuda.OutOfMemoryError:
            print(f"{work} {shape} {name}: out of memory")
            del entrants[name]
    for _ in range(ROUNDS):
        for name, run in entrants.items():
            times[name].append(timed(run, ahead))
    side_by_side(results, work, shape, times, peaks, floor_ms)


def ce(results: Results) -> None:
    rows, vocabulary = 8192, 151_936
    for hidden in (4096, 1024):
        h = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
        w = (torch.randn(vocabulary, hidden, device="cuda") * hidden**-0.5).bfloat16().requires_grad_()
        targets = torch.randint(vocabulary, (rows,), device="cuda")
        for trained in (True, False):
            w.requires_grad_(trained)
            products = 3 if trained else 2
            floor = products * 2 * rows * hidden * vocabulary / FLOP_PER_MS

            def step(loss_of, h=h, w=w, targets=targets):
                h.grad = w.grad = None
                loss_of(h, w, targets).backward()

            entrants: dict[str, Callable[[], object]] = {}
            for budget in (160, 320, 640, 1280, 2560):  # the last holds all logits
                entrants[f"ours {budget} MiB"] = lambda s=step, b=budget: s(
                    lambda h, w, t: linear_cross_entropy(h, w, t, workspace_bytes=b << 20)
                )
            compiled = torch.compile(lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t))
            entrants["torch.compile"] = lambda s=step, f=compiled: s(f)
            try:
                from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

                liger = LigerFusedLinearCrossEntropyLoss()
                entrants["liger"] = lambda s=step, f=liger: s(lambda h, w, t: f(w, h, t))
            except ImportError:
                print("liger-kernel is not installed: left out")
            contest(
                f"ce_{'trained' if trained else 'frozen'}", f"N{rows} H{hidden} V{vocabulary}", floor, entrants, results
            )
        del h, w
        torch.cuda.empty_cache()


def logp(results: Results) -> None:
    rows, vocabulary = 16_384, 151_936
    logits = torch.randn(4, rows // 4, vocabulary, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(vocabulary, logits.shape[:2], device="cuda")
    one_pass = logits.numel() * 2 / BYTES_PER_MS
    upstream = torch.randn(2, *targets.shape, device="cuda")
    forward: dict[str, Callable[[], object]] = {"ours": lambda: logp_entropy(logits, targets)}

    def both(op):
        leaf = logits.detach().requires_grad_()
        out = op(leaf)
        torch.autograd.backward(out, [upstream[i] for i in range(len(out))])

    each_way = {
        "ours": lambda: both(lambda x: logp_entropy(x, targets)),
        "ours in place": lambda: both(lambda x: logp_entropy(x, targets, inplace_gradient=True)),
    }
    try:
        from trl.trainer.utils import selective_log_softmax_and_entropy

        forward["trl"] = lambda: selective_log_softmax_and_entropy(logits, targets)
        each_way["trl"] = lambda: both(lambda x: selective_log_softmax_and_entropy(x, targets))
    except ImportError as missing:
        print(f"trl's kernel is left out: {missing}")
    contest("logp_entropy", f"R{rows} V{vocabulary} fwd", one_pass, forward, results)
    contest("logp_entropy", f"R{rows} V{vocabulary} fwd+bwd", 3 * one_pass, each_way, results)


def rope(results: Results) -> None:
    time, size = 16_384, 128
    for heads_q, heads_k in ((32, 8), (16, 8)):
        q = torch.randn(1, time, heads_q, size, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(1, time, heads_k, size, device="cuda", dtype=torch.bfloat16)
        wq, wk = (torch.rand(size, device="cuda").bfloat16() for _ in range(2))
        angles = torch.randn(1, time, size // 2, device="cuda").repeat(1, 1, 2)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        one_pass = (q.numel() + k.numel()) * 2 / BYTES_PER_MS
        dq, dk = torch.randn_like(q), torch.randn_like(k)
        compiled = torch.compile(norm_rope_reference)

        def both(op, q=q, k=k, dq=dq, dk=dk, wq=wq, wk=wk, cos=cos, sin=sin):
            a, b = q.detach().requires_grad_(), k.detach().requires_grad_()
            torch.autograd.backward(op(a, b, wq, wk, cos, sin), (dq, dk))

        ops = {"ours": norm_rope, "torch.compile": compiled, "eager": norm_rope_reference}
        shape = f"T{time} {heads_q}+{heads_k}x{size}"
        arguments = q, k, wq, wk, cos, sin
        forward = {name: lambda op=op, given=arguments: op(*given) for name, op in ops.items()}
        each_way = {name: lambda op=op: both(op) for name, op in ops.items()}
        contest("norm_rope", f"{shape} fwd", 2 * one_pass, forward, results)
        contest("norm_rope", f"{shape} fwd+bwd", 5 * one_pass, each_way, results)
        by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dq, dk)]
        each_way_by_head = {
            name: lambda op=op, given=by_head: both(op, dq=given[0], dk=given[1]) for name, op in ops.items()
        }
        contest("norm_rope", f"{shape} fwd+bwd, gradients head by head", 5 * one_pass, each_way_by_head, results)
        contest("norm_rope", f"{shape} fwd+bwd, as called", 5 * one_pass, each_way, results, ahead=0)


def agreeing(
    ops: dict[str, Callable[..., Sequence[torch.Tensor]]],
    given: Sequence[torch.Tensor],
    upstream: Sequence[torch.Tensor],
) -> dict[str, Callable[..., Sequence[torch.Tensor]]]:
    """The ops whose results and gradients are those of `eager` but for rounding; of the others it says how far they are."""
    found = {}
    for name, op in ops.items():
        leaves = [x.detach().clone().requires_grad_() for x in given]
        results = op(*leaves)
        out = [x.detach().clone() for x in results]
        found[name] = out + list(torch.autograd.grad(results, leaves, [x.clone() for x in upstream]))
    kept = {}
    for name, op in ops.items():
        error = max(
            float((a - b).float().norm() / b.float().norm()) for a, b in zip(found[name], found["eager"], strict=True)
        )
        if error < 1e-2:
            kept[name] = op
        else:
            print(f"{name} is left out: it is {error:.1e} from eager")
    return kept


def turn(results: Results) -> None:
    """Rotation alone, as the layers of Qwen2.5-VL 7B and 3B make it: three axes of positions merged into cos and sin before.

    Liger's multimodal rotation merges the three axes in every layer; `liger` is its rotation by merged ones. Both write over
    what they are given and the gradients that come back: no time depends on those numbers, and what is compared are copies.
    """
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb

    time, size, sections = 16_384, 128, [16, 24, 24]
    for heads_q, heads_k in ((28, 4), (12, 2)):
        q, k = (torch.randn(1, time, heads, size, device="cuda").bfloat16() for heads in (heads_q, heads_k))
        dq, dk = (torch.randn_like(x).transpose(1, 2) for x in (q, k))
        axes = torch.randint(time, (3, 1, time, 1), device="cuda") * torch.rand(size // 2, device="cuda")
        apart = [x.repeat(1, 1, 1, 2).bfloat16() for x in (axes.cos(), axes.sin())]
        merged = [torch.cat([m[i % 3] for i, m in enumerate(x.split(sections * 2, -1))], -1) for x in apart]
        plain = torch.compile(apply_rotary_pos_emb, dynamic=False)
        ops: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
            "ours": lambda a, b, m=merged: [
                x.transpose(1, 2) for x in rotary(a.transpose(1, 2), b.transpose(1, 2), *m)
            ],
            "torch.compile": lambda a, b, m=merged, f=plain: f(a, b, *m),
            "eager": lambda a, b, m=merged: apply_rotary_pos_emb(a, b, *m),
        }
        try:
            from liger_kernel.transformers.qwen2vl_mrope import liger_multimodal_rotary_pos_emb
            from liger_kernel.transformers.rope import liger_rotary_pos_emb

            ops["liger multimodal"] = lambda a, b, c=apart: liger_multimodal_rotary_pos_emb(a, b, *c, sections)
            ops["liger"] = lambda a, b, m=merged: liger_rotary_pos_emb(a, b, *m)
        except ImportError:
            print("liger-kernel is not installed: left out")
        given = q.transpose(1, 2), k.transpose(1, 2)
        ops = agreeing(ops, given, (dq, dk))
        one_pass = (q.numel() + k.numel()) * 2 / BYTES_PER_MS

        def both(op, given=given, upstream=(dq, dk)):
            torch.autograd.backward(op(*(x.detach().requires_grad_() for x in given)), upstream)

        shape = f"T{time} {heads_q}+{heads_k}x{size}"
        contest("rope", f"{shape} fwd", 2 * one_pass, {n: lambda op=op: op(*given) for n, op in ops.items()}, results)
        contest("rope", f"{shape} fwd+bwd", 4 * one_pass, {n: lambda op=op: both(op) for n, op in ops.items()}, results)


def sums(results: Results) -> None:
    """A gated block between its wide products, adapters of rank 16 on all three: each tile, and what it takes the place of,
    thin products added to the wide ones before a compiled activation, and those that read what it writes."""
    tokens, width, rank = 8192, 12_288, 16
    one_pass = 2 * tokens * width / BYTES_PER_MS
    grad, gate, up = (torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    low, gate_inner, up_inner = (torch.randn(tokens, rank, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    gate_outer, up_outer = (0.01 * torch.randn(width, rank, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    right, last = (0.01 * torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((rank, width), (4096, rank)))

    @torch.compile
    def forward(gate, up):
        return F.silu(gate) * up

    @torch.compile
    def backward(grad, gate, up):
        share = torch.sigmoid(gate.float())
        act = gate.float() * share
        dgate = grad * up * (share * (1 + gate.float() * (1 - share)))
        return dgate.bfloat16(), (grad * act).bfloat16(), (act * up).bfloat16()

    def before() -> None:
        gate.addmm_(gate_inner, gate_outer.t(), beta=0.5)
        up.addmm_(up_inner, up_outer.t(), beta=0.5)
        forward(gate, up) @ right.t() @ last.t()

    def before_backward() -> None:
        gate.addmm_(gate_inner, gate_outer.t(), beta=0.5)
        up.addmm_(up_inner, up_outer.t(), beta=0.5)
        dgate, dup, product = backward(grad.addmm_(low, right, beta=0.5), gate, up)
        _ = dgate @ gate_outer, dup @ up_outer, product @ right.t()

    def tiles(kernel: Tiles, run: Callable[[], object]) -> dict[str, Callable[[], object]]:
        def of(tile: Tile) -> Callable[[], object]:
            def in_tile() -> None:
                held = kernel.candidates
                object.__setattr__(kernel, "candidates", (tile,))
                run()
                object.__setattr__(kernel, "candidates", held)

            return in_tile

        return {f"ours {kernel.words(tile)}": of(tile) for tile in kernel.candidates}

    parts = gate, gate_inner, gate_outer, up, up_inner, up_outer
    ops = tiles(FORWARD, lambda: GATED_SUMS(*parts, right, last, "silu"))
    contest("gated_sums", f"T{tokens} I{width} r{rank} fwd", 3 * one_pass, {**ops, "added, compiled": before}, results)
    ops = tiles(BACKWARD, lambda: GRADIENTS(grad, low, right, *parts, "silu"))
    ops["added, compiled"] = before_backward
    contest("gated_sums", f"T{tokens} I{width} r{rank} bwd", 6 * one_pass, ops, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", default=list(CASES))
    result_options(parser)
    options = parser.parse_args()
    refuse_while_red(*(name for work in options.works for name in CASES[work]))
    results = Results(options, torch.cuda.get_device_name(), "torch", "triton")
    for work in options.works:
        {"ce": ce, "logp": logp, "rope": rope, "turn": turn, "sums": sums}[work](results)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
