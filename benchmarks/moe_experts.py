"""Experts with LoRA beside their peers on one CUDA device: time, extra memory and the floor, in one run.

    python benchmarks/moe_experts.py [WORK ...] [--tokens 1024] [--packed [--kind mxfp4] [--way "decoded inside"]] [--results FILE] [--commit HASH]

Works are `even skewed long mixtral olmoe many gptoss`: shapes of Qwen3-30B-A3B with 4,096 tokens spread evenly, unevenly,
and with 16,384, then those of other models. Forward and backward, frozen base in bfloat16, adapters on both projections.
With `--packed` ours over experts in few bits beside ours over 16 bits (work `moe_lora_KIND`), and one launch that unpacks four
experts of them all (`unpack_KIND`); numbers in nf4 are drawn by chance where bitsandbytes is not installed, which takes as
long. Refuses to report while the accuracy cases fail; everyone's result and gradients must agree with a float32 reference.
The floor is the larger of the base products at 790 TFLOP/s and of the weights read twice with each tensor of rows written
and read once at 3.0 TB/s (one H100 SXM).
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from _accuracy import refuse_while_red
from _figures import Results, result_options
from dense_kernels import contest

from engine.kernels.experts import ExpertLoRA, expert_mlp, expert_mlp_reference, launch
from engine.kernels.experts import packed as packing
from engine.kernels.experts import unpack as unpacking
from engine.kernels.experts.packed import Form, Held, PackedExperts, Packer

BYTES_PER_MS, FLOP_PER_MS = 3.0e9, 790e9
SCALE = 2.0
KINDS = ("nf4", "mxfp4", "nvfp4", "fp8")
NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
    0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
MiB = 2**20
WAYS: dict[str, dict[str, object]] = {
    "decoded inside": {"rows": 2**20},
    "unpacked in turn": {"rows": 0, "ahead": False},
    "unpacked ahead": {"rows": 0, "ahead": True},
    "unpacked ahead, products in turn": {"rows": 0, "ahead": True, "paired": False},
    **{
        f"unpacked ahead {n} x {size}": {"rows": 0, "ahead": True, "beside": (n, size, 3)}
        for n in (1, 2, 3, 4, 8)
        for size in (1024, 2048, 4096)
    },
}
"""Ways of products with packed weights, beside the one that runs choose."""
Step = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Work:
    """One block of experts; `skew` spreads the router's preferences."""

    experts: int
    hidden: int
    width: int
    top_k: int
    tokens: int
    rank: int = 16
    skew: float = 0.0

    @property
    def shape(self) -> str:
        skewed = f" skew {self.skew}" if self.skew else ""
        return f"E{self.experts} H{self.hidden} I{self.width} k{self.top_k} r{self.rank} T{self.tokens}{skewed}"

    @property
    def floor(self) -> float:
        slots = self.tokens * self.top_k
        products = 12 * slots * self.hidden * self.width / FLOP_PER_MS
        weights = 2 * 3 * self.experts * self.hidden * self.width * 2
        rows = 2 * 2 * slots * (2 * self.hidden + 3 * self.width) * 2
        return max(products, (weights + rows) / BYTES_PER_MS)


QWEN = Work(128, 2048, 768, 8, 4096)
WORKS = {
    "even": QWEN,
    "skewed": Work(128, 2048, 768, 8, 4096, skew=0.5),
    "long": Work(128, 2048, 768, 8, 16_384),
    "mixtral": Work(8, 4096, 14_336, 2, 4096),
    "olmoe": Work(64, 2048, 1024, 8, 4096),
    "many": Work(256, 2048, 512, 8, 4096),
    "gptoss": Work(32, 2880, 2880, 4, 4096),
}


class Block:
    """Inputs of one work, and everyone's forward and backward over them."""

    def __init__(self, work: Work) -> None:
        self.work = work
        experts, hidden, width, rank = work.experts, work.hidden, work.width, work.rank
        generator = torch.Generator(device="cuda").manual_seed(3)

        def drawn(*shape: int, scale: float = 0.02) -> torch.Tensor:
            return (torch.randn(shape, device="cuda", generator=generator) * scale).bfloat16()

        self.gate_up, self.down = drawn(experts, 2 * width, hidden), drawn(experts, hidden, width)
        self.x, self.dy = (drawn(work.tokens, hidden, scale=1.0) for _ in range(2))
        logits = torch.randn(work.tokens, experts, device="cuda", generator=generator)
        logits += work.skew * torch.randn(experts, device="cuda", generator=generator)
        routing, self.ids = torch.softmax(logits, -1).topk(work.top_k, -1)
        self.routing = (routing / routing.sum(-1, keepdim=True)).bfloat16()
        self.factors = [
            drawn(experts, rank, hidden), drawn(experts, 2 * width, rank), drawn(experts, rank, width),
            drawn(experts, hidden, rank),
        ]  # fmt: skip

    def gradients(self, block: Callable[..., torch.Tensor], leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out = block(*leaves)
        return out, *torch.autograd.grad(out, leaves, self.dy.to(out.dtype))

    def leaves(self, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
        return [each.to(dtype, copy=True).requires_grad_() for each in (self.x, *self.factors)]

    def ours(self) -> Step:
        leaves = self.leaves()
        return lambda: self.gradients(lambda *t: self._mlp(expert_mlp, *t), leaves)

    def packed(self, held: list[torch.Tensor]) -> Step:
        """Ours over experts that are held in few bits and unpacked as they are routed."""
        leaves = self.leaves()
        return lambda: self.gradients(lambda *t: self._mlp(expert_mlp, *t, base=held), leaves)

    def truth(self) -> tuple[torch.Tensor, ...]:
        return self.gradients(lambda *t: self._mlp(expert_mlp_reference, *t), self.leaves(torch.float32))

    def _mlp(
        self,
        op: Callable[..., torch.Tensor],
        x: torch.Tensor,
        *factors: torch.Tensor,
        base: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        weights = base or [each.to(x.dtype) for each in (self.gate_up, self.down)]
        loras = {"gate_up_lora": ExpertLoRA(*factors[:2], SCALE), "down_lora": ExpertLoRA(*factors[2:], SCALE)}
        return op(x, self.ids, self.routing, *weights, **loras)

    def split(self, compiled: bool) -> Step:
        """torch's grouped products with the factors kept apart, gathered and added up in plain torch."""

        def adapted(rows, weight, a, b, ends):
            inner = F.grouped_mm(rows, a.transpose(1, 2), offs=ends)
            return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends) + SCALE * F.grouped_mm(
                inner, b.transpose(1, 2), offs=ends
            )

        def block(x, a1, b1, a2, b2):
            experts, top_k, width = self.work.experts, self.work.top_k, self.work.width
            owner, order = torch.sort(self.ids.reshape(-1))
            ends = torch.cumsum(torch.histc(owner.int(), experts, 0, experts - 1), 0, dtype=torch.int32)
            both = adapted(x[order // top_k], self.gate_up, a1, b1, ends)
            h = F.silu(both[:, :width]) * both[:, width:]
            rows = adapted(h, self.down, a2, b2, ends) * self.routing.reshape(-1)[order][:, None]
            place = torch.empty_like(order)
            place[order] = torch.arange(order.numel(), device=order.device)
            return rows[place].view(x.shape[0], top_k, -1).sum(1)

        run, leaves = torch.compile(block, dynamic=False) if compiled else block, self.leaves()
        return lambda: self.gradients(run, leaves)

    def peft(self) -> Step:
        """transformers' grouped experts under PEFT's adapters of parameters, as a user gets them."""
        from peft import LoraConfig, get_peft_model
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        work = self.work
        config = Qwen3MoeConfig(
            hidden_size=work.hidden, moe_intermediate_size=work.width, num_experts=work.experts,
            num_experts_per_tok=work.top_k,
        )  # fmt: skip
        config._experts_implementation = "grouped_mm"
        ids, routing = self.ids, self.routing

        class Around(torch.nn.Module):
            def __init__(self, experts: torch.nn.Module) -> None:
                super().__init__()
                self.experts = experts

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.experts(x, ids, routing)

        with torch.device("meta"):
            experts = Qwen3MoeExperts(config)
        experts.gate_up_proj, experts.down_proj = (
            torch.nn.Parameter(each, requires_grad=False) for each in (self.gate_up, self.down)
        )
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        lora = LoraConfig(r=work.rank, lora_alpha=int(work.rank * SCALE), target_modules=[], target_parameters=targets)
        model = get_peft_model(Around(experts), lora, autocast_adapter_dtype=False)
        x = self.x.clone().requires_grad_()
        leaves = [x, *(each for name, each in model.named_parameters() if "lora_" in name)]

        def step() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(model(x), leaves, self.dy)

        return step

    def products(self) -> Step:
        """The four base products alone, of rows that are sorted already."""
        ends = torch.bincount(self.ids.flatten(), minlength=self.work.experts).cumsum(0).int()
        slots = self.ids.numel()
        rows, both, h = (
            torch.randn(slots, n, device="cuda").bfloat16()
            for n in (self.work.hidden, 2 * self.work.width, self.work.width)
        )
        turned = self.gate_up.transpose(1, 2), self.down.transpose(1, 2)
        pairs = (rows, turned[0]), (h, turned[1]), (both, self.gate_up), (rows, self.down)
        return lambda: tuple(F.grouped_mm(a, b, offs=ends) for a, b in pairs)


def held_in(kind: str, weight: torch.Tensor) -> PackedExperts:
    """The experts in few bits."""
    if kind == "nf4" and find_spec("bitsandbytes") is None:
        return drawn_in_nf4(weight)
    packer = Packer(len(weight), kind, weight.dtype)
    for expert in weight:
        packer.add(expert)
    return packer.done()


def drawn_in_nf4(weight: torch.Tensor) -> PackedExperts:
    """Numbers by chance as bitsandbytes holds NF4 with scales quantized again."""
    experts, rows, columns = weight.shape
    blocks = rows * columns // 64
    random = {"dtype": torch.uint8, "device": "cuda"}
    held = Held(
        torch.randint(0, 256, (experts, rows * columns // 2), **random),
        torch.randint(0, 256, (experts, blocks), **random),
        torch.full((experts,), 0.04, device="cuda"),
        torch.full((experts, -(-blocks // 256)), 0.01, device="cuda"),
        torch.tensor(NF4, device="cuda"),
        torch.linspace(-1, 1, 256, device="cuda"),
    )
    return PackedExperts(held, Form("nf4", rows, columns, False, 64, 256, weight.dtype, True))


@contextlib.contextmanager
def told(
    rows: int | None = None,
    ahead: bool | None = None,
    room: int | None = None,
    beside: tuple[int, int, int] | None = None,
    paired: bool | None = None,
):
    """Other choices than our own: rows of an expert up to which products decode inside, whether the next experts are unpacked beside
    a product, MiB unpacked at a time, programs of a multiprocessor that do so beside one, bytes that each reads and how many
    on their way, and whether a product begins before another has ended."""
    own = launch.DECODED_ROWS, launch.AHEAD, packing.EXPERT_BUFFER, unpacking.BESIDE, packing.PAIRED
    launch.DECODED_ROWS = own[0] if rows is None else rows
    launch.AHEAD = own[1] if ahead is None else ahead
    packing.EXPERT_BUFFER = own[2] if room is None else room * MiB
    unpacking.BESIDE = beside or own[3]
    packing.PAIRED = own[4] if paired is None else paired
    try:
        yield
    finally:
        launch.DECODED_ROWS, launch.AHEAD, packing.EXPERT_BUFFER, unpacking.BESIDE, packing.PAIRED = own


def otherwise(step: Step, **choices: object) -> Step:
    def run() -> tuple[torch.Tensor, ...]:
        with told(**choices):
            return step()

    return run


def contest_packed(block: Block, kind: str, rooms: list[int], ways: list[str], results: Results) -> None:
    """Ours packed and over 16 bits, with each of these rooms in MiB and each of these ways, which must agree to rounding."""
    held = [held_in(kind, weight) for weight in (block.gate_up, block.down)]
    step = block.packed(held)
    entrants = {"ours": step, "ours over 16 bits": block.ours()}
    entrants |= {f"ours, {room} MiB at a time": otherwise(step, room=room) for room in rooms}
    entrants |= {f"ours, {way}": otherwise(step, **WAYS[way]) for way in ways}
    first, *others = ([each.float() for each in run()] for name, run in entrants.items() if name != "ours over 16 bits")
    for other, name in zip(others, [*rooms, *ways], strict=True):
        apart = max(float((a - b).norm() / b.norm()) for a, b in zip(other, first, strict=True))
        print(f"{kind} {block.work.shape} {name}: {apart:.1e} from ours", flush=True)
        if apart > 1e-2:
            raise SystemExit("the numbers differ")
    del first, others
    work = block.work
    contest(f"moe_lora_{kind}", work.shape, work.floor, entrants, results)


def contest_unpack(block: Block, kind: str, results: Results) -> None:
    """One launch that unpacks four experts of them all."""
    gate_up, experts = held_in(kind, block.gate_up), block.work.experts
    places = torch.arange(experts + 1, device="cuda")
    starts = torch.bucketize(places, places[experts // 5 :: experts // 5][:4]).int()
    out = torch.empty_like(block.gate_up)
    weights = gate_up.form.rows * gate_up.form.columns
    floor = 4 * (gate_up.packed_bytes / experts + 2 * weights) / BYTES_PER_MS
    shape = f"4 of {experts}, {gate_up.form.rows} x {gate_up.form.columns}"
    contest(f"unpack_{kind}", shape, floor, {"ours": lambda: gate_up.unpack_range(0, out, starts)}, results)


def agreeing(block: Block, entrants: dict[str, Step]) -> dict[str, Step]:
    """Those whose result and gradients are a rounding away from float32; of the others it says how far they are."""
    truth = [each.detach() for each in block.truth()]
    kept = {}
    for name, step in entrants.items():
        try:
            found = step()
        except (RuntimeError, torch.cuda.OutOfMemoryError) as problem:
            print(f"{name} is left out: {str(problem).splitlines()[0][:150]}")
            continue
        pairs = zip(found, truth, strict=True)
        error = max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)
        print(f"{block.work.shape} {name}: {error:.1e} from float32 at most", flush=True)
        if error < 2e-2:
            kept[name] = step
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", default=list(WORKS))
    parser.add_argument("--packed", action="store_true", help="experts held in few bits beside 16 bits, and no peers")
    parser.add_argument("--kind", action="append", choices=KINDS, help="of the few bits; all without it")
    parser.add_argument("--room", action="append", type=int, default=[], help="MiB unpacked at a time, beside its own")
    parser.add_argument("--way", action="append", choices=WAYS, default=[], help="beside the one that runs choose")
    parser.add_argument("--tokens", action="append", type=int, default=[], help="instead of a work's own")
    parser.add_argument("--unchecked", action="store_true", help="the accuracy cases have passed just now")
    result_options(parser)
    options = parser.parse_args()
    if not options.unchecked:
        refuse_while_red("experts_cases", "experts_plan", "experts_packed", "experts_decoded")
    results = Results(options, torch.cuda.get_device_name(), "torch", "triton")
    for name, tokens in [(each, n) for each in options.works for n in options.tokens or [WORKS[each].tokens]]:
        work = replace(WORKS[name], tokens=tokens)
        block = Block(work)
        if options.packed:
            for kind in options.kind or KINDS:
                contest_packed(block, kind, options.room, options.way, results)
                if work == WORKS[name]:
                    contest_unpack(block, kind, results)
                torch.cuda.empty_cache()
            continue
        entrants = {
            "ours": block.ours(),
            "grouped_mm + split LoRA": block.split(False),
            "grouped_mm + split LoRA, compiled": block.split(True),
        }
        entrants = agreeing(block, entrants)
        # Its factors are its own, so their gradients are others; the four products are no block at all.
        entrants["grouped_mm, base products alone"] = block.products()
        if name in ("even", "skewed", "long"):
            entrants["transformers grouped_mm + peft"] = block.peft()
        contest("moe_lora", work.shape, work.floor, entrants, results)
        del block, entrants
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
