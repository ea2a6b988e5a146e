"""The page about mixtures of experts: its table is what a run of each family's experts gives.

`python -m tests.docs.test_mixtures_page` writes it anew for the installed transformers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.func import functional_call

from engine.kernels.experts import ExpertLoRA
from engine.kernels.experts.module import experts_forward, gate_of, unserved
from engine.kernels.experts.reference import gated
from tests.engine.features.fused_experts.test_apply import experts_of_transformers

PAGE = Path(__file__).parents[2] / "docs" / "mixtures.md"
BEGIN, END = "<!-- families -->\n", "<!-- end -->"
SMALL = {
    "hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16, "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "top_k": 2, "moe_latent_size": None,
}  # fmt: skip
TOKENS, TOP_K, RANK, SCALE = 24, 2, 3, 0.5
LEAST = 1e-12
"""Two orders of rounding in float64 are further apart by no more."""
IN_FLOAT32 = 1e-5


def small(experts: Any) -> Any:
    """The same class with four experts of a few numbers, all of them drawn, in float64."""
    config = type(experts.config)()
    for name, value in SMALL.items():
        if hasattr(config, name) and not isinstance(getattr(config, name), (list, dict)):
            setattr(config, name, value)
    config._experts_implementation_internal = "eager"
    torch.manual_seed(0)
    made = type(experts)(config).double()
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return made.requires_grad_(False)


def error(experts: Any) -> float:
    """How far result and gradients of tokens, routing weights and adapters are from transformers' own pass over W + B A."""
    torch.manual_seed(1)
    count = experts.down_proj.shape[0]
    weights = {name: getattr(experts, name) for name in ("gate_up_proj", "down_proj")}
    sides = {name: each.shape[:0:-1] if experts.is_transposed else each.shape[1:] for name, each in weights.items()}
    x = torch.randn(TOKENS, sides["gate_up_proj"][1], dtype=torch.float64)
    share, ids = torch.rand(TOKENS, count, dtype=torch.float64).topk(TOP_K, -1)
    factors = [
        (
            torch.randn(count, RANK, wide, dtype=torch.float64) / 4,
            torch.randn(count, high, RANK, dtype=torch.float64) / 4,
        )
        for high, wide in sides.values()
    ]
    leaves = [each.requires_grad_() for each in (x, share, *factors[0], *factors[1])]
    delta = [SCALE * b @ a for a, b in factors]
    whole = {
        name: weight + (each.mT if experts.is_transposed else each)
        for (name, weight), each in zip(weights.items(), delta, strict=True)
    }
    theirs = functional_call(experts, whole, (x, ids, share))
    gate = gate_of(experts)
    assert gate is not None
    first, second = (ExpertLoRA(*each, SCALE) for each in factors)
    ours = experts_forward(experts, x, ids, share, gate=gate, gate_up_lora=first, down_lora=second)
    dy = torch.randn_like(ours)
    pairs = zip(
        (ours, *torch.autograd.grad(ours, leaves, dy)), (theirs, *torch.autograd.grad(theirs, leaves, dy)), strict=True
    )
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)


def row(kind: str, experts: Any) -> tuple[str, float]:
    """A family's row, and its error, in the measure of float64."""
    layout = "[E, in, out]" if getattr(experts, "is_transposed", False) else "[E, out, in]"
    layout += ", biases" if getattr(experts, "has_bias", False) else ""
    if (reason := unserved(experts)) is not None:
        return f"| {kind} | {layout} | | transformers: {reason} | |", 0.0
    gate = gate_of(experts)
    assert gate is not None
    made = small(experts)
    found, rounds = error(made), in_float32(made)
    order = f"below 1e{math.ceil(math.log10(found))}{', as it rounds to float32' if rounds else ''}"
    words = f"{gate.activation}{', interleaved' if gate.interleaved else ''}"
    return f"| {kind} | {layout} | {words} | kernels | {order} |", found * (LEAST / IN_FLOAT32 if rounds else 1.0)


def in_float32(experts: Any) -> bool:
    """Whether the family computes its gate or its sum in float32, whatever the format."""
    both, gate = torch.linspace(-3, 3, 64, dtype=torch.float64).roll(5)[None], gate_of(experts)
    assert gate is not None
    if (experts._apply_gate(both) - gated(both, gate)).abs().max() > LEAST:
        return True
    wide = experts.gate_up_proj.shape[1 if experts.is_transposed else 2]
    x, share = torch.randn(4, wide, dtype=torch.float64), torch.rand(4, 2, dtype=torch.float64)
    out = experts(x, torch.tensor([[0, 1]] * 4), share)
    return torch.equal(out, out.float().double())


def table() -> tuple[list[str], float]:
    """All rows, and the largest error."""
    found = [row(kind, experts) for kind, experts in sorted(experts_of_transformers().items())]
    return [line for line, _ in found], max(each for _, each in found)


def _of(lines: list[str]) -> dict[str, str]:
    """What a row says but for the error, whose last power of ten is the machine's, by model type."""
    return {line.split(" | ")[0]: line.rpartition(" | ")[0] for line in lines}


def test_the_page_has_what_a_run_of_each_family_gives() -> None:
    rows, worst = table()
    assert worst < LEAST
    written = [line for line in PAGE.read_text().partition(BEGIN)[2].splitlines() if line.startswith("| ")][2:]
    page, here = _of(written), _of(rows)
    assert {kind: page[kind] for kind in page.keys() & here.keys()} == {
        kind: here[kind] for kind in page.keys() & here.keys()
    }
    assert len(page.keys() & here.keys()) > 40


if __name__ == "__main__":
    lines, _ = table()
    served = sum("| kernels |" in line for line in lines)
    head = (
        f"transformers {transformers.__version__}: {len(lines)} classes of experts, {served} of them computed here.\n\n"
        "| model type | weights | gate | computed by | error in float64 |\n| --- | --- | --- | --- | --- |\n"
    )
    before, _, after = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + head + "\n".join(lines) + "\n" + END + after.partition(END)[2])
