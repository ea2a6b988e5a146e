"""Whether layers recorded as CUDA graphs give the gradients of the same layers launched one by one, on a card.

    python benchmarks/gpu_stack_graph.py [--shapes tiny 06b] [--plain] [--seconds 90] [--results FILE --commit HASH]

Two models of the same weights, compiled alike (`--plain`: not compiled), bfloat16; one is recorded. Both get the same batches:
six, each with its step; six in steps of three, clipped; held-out rows in between; another length in between; two passes
before a backward pass, and a pass that is never differentiated. Each case prints how many gradients are equal to the bit and
which kind of weight lies farthest apart (norm of the difference over the norm), beside how far two passes of the
launched model lie apart there, since attention may add up in any order. A case fails where the distance is more than
four times that and above 0.001, and prints each kind of weight with its worst layer then. Then come what tells where a fault would lie: whether the recorded
answer is that of the layers, whether two plays of one batch agree, how many gradients in the pool the next forward pass writes
over, with one pool for both graphs and with one each. The last lines are times of a forward and backward pass and memory. Exits 1
where a case fails.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from _figures import Results, result_options
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.features.applied import Applied
from engine.features.compile import stack_graph
from engine.features.compile.apply import WHOLE_CALL, compile_layers
from engine.features.compile.stack_graph import CudaRecorder, StackGraph

SHAPES: dict[str, tuple[dict[str, Any], int, int]] = {
    "tiny": (
        {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512},
        2, 128,
    ),
    "06b": (
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 8192},
        4, 2048,
    ),
}  # fmt: skip
"""Sizes of a Qwen3, rows and tokens of a batch. The vocabulary is small: the head is not what is looked at."""
TOLERANCE = 1e-3
NOISE = 4.0
CLIP = 0.5
TIMED = 12
DEVICE = torch.device("cuda")

Gradients = dict[str, torch.Tensor]


class Side:
    """One model with its layers' calls, its optimizer and what the last case left."""

    def __init__(self, model: Any, compiled: bool) -> None:
        self.model = model
        self.layers = list(model.model.layers)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if compiled:
            compile_layers(self.layers, {}, one_shape=False)
        self.attribute = WHOLE_CALL.attribute if compiled else "forward"

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(ids, labels=ids, use_cache=False).loss
        return loss

    def gradients(self) -> Gradients:
        return {name: weight.grad.clone() for name, weight in self.model.named_parameters() if weight.grad is not None}


def batch(vocabulary: int, rows: int, tokens: int, seed: int) -> torch.Tensor:
    ids = torch.randint(0, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return ids.to(DEVICE)


@torch.no_grad()
def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    norm = theirs.float().norm()
    return float((ours.float() - theirs.float()).norm() / norm.clamp_min(1e-20))


def kind_of(name: str) -> tuple[str, str]:
    """`model.layers.3.mlp.up_proj.weight` is `mlp.up_proj.weight` of layer 3."""
    head, _, rest = name.partition("layers.")
    number, _, kind = rest.partition(".")
    return (kind, number) if rest else (head, "")


def compared(name: str, ours: Gradients, theirs: Gradients, noise: dict[str, float]) -> bool:
    """Prints the farthest kind of weight, and a line for each where one is too far; whether all are near enough."""
    kinds: dict[str, list[tuple[float, str, bool]]] = defaultdict(list)
    for weight, truth in theirs.items():
        kind, layer = kind_of(weight)
        found = ours.get(weight)
        far = math.inf if found is None else apart(found, truth)
        # What is not a number is the farthest.
        kinds[kind].append(
            (math.inf if math.isnan(far) else far, layer, found is not None and torch.equal(found, truth))
        )
    allowed = {kind: max(TOLERANCE, NOISE * noise.get(kind, 0.0)) for kind in kinds}
    good = ours.keys() == theirs.keys() and all(max(each)[0] <= allowed[kind] for kind, each in kinds.items())
    equal = sum(one[2] for each in kinds.values() for one in each)
    far, kind = max((max(each)[0], kind) for kind, each in kinds.items())
    words = f"{equal}/{len(theirs)} gradients to the bit, farthest {kind} {far:.1e}, noise {noise.get(kind, 0.0):.1e}"
    print(f"  {name}: {'' if good else 'WRONG, '}{words}", flush=True)
    for kind, each in kinds.items():
        if not good:
            where, same = f"layer {max(each)[1]}" if max(each)[1] else "", sum(one[2] for one in each)
            mark = "" if max(each)[0] <= allowed[kind] else "  <-- WRONG"
            print(f"    {kind:34} {max(each)[0]:.1e} {where:8} {same}/{len(each)} to the bit{mark}")
    return good


class Trial:
    """Both models of one shape, and what the cases found."""

    def __init__(self, shape: str, compiled: bool) -> None:
        told, self.rows, self.tokens = SHAPES[shape]
        self.vocabulary = told["vocab_size"]
        torch.manual_seed(0)
        with DEVICE:
            model = Qwen3ForCausalLM(Qwen3Config(**told, tie_word_embeddings=True)).to(torch.bfloat16).train()
        self.plain, self.ours = Side(copy.deepcopy(model), compiled), Side(model, compiled)
        self.told: list[Applied] = []
        self.stack = StackGraph(self.ours.layers, stack_graph.recorder(DEVICE), self.told.append)
        self.stack.put(self.ours.attribute)
        self.noise: dict[str, float] = {}
        self.failed: list[str] = []
        self.seed = 0

    def batch(self, tokens: int | None = None) -> torch.Tensor:
        self.seed += 1
        return batch(self.vocabulary, self.rows, tokens or self.tokens, self.seed)

    def align(self) -> None:
        """Ours gets the other's weights where they lie, so that no case inherits what one before did."""
        with torch.no_grad():
            torch._foreach_copy_(list(self.ours.model.parameters()), list(self.plain.model.parameters()))
        for side in (self.ours, self.plain):
            side.model.zero_grad()

    def case(self, name: str, run: Callable[[Side], Gradients]) -> None:
        self.align()
        ours, theirs = run(self.ours), run(self.plain)
        if not compared(name, ours, theirs, self.noise):
            self.failed.append(name)

    def warm(self) -> None:
        """Two passes of one form in each model, and how far two passes of the launched one lie apart."""
        ids, seen = self.batch(), []
        for _ in range(2):
            for side in (self.ours, self.plain):
                side.model.zero_grad()
                side.loss(ids).backward()
            seen.append(self.plain.gradients())
        for name, truth in seen[1].items():
            kind = kind_of(name)[0]
            self.noise[kind] = max(self.noise.get(kind, 0.0), apart(seen[0][name], truth))


def step(
    batches: list[torch.Tensor], *, clip: bool = False, between: Callable[[Side], None] = lambda side: None
) -> Callable[[Side], Gradients]:
    """An optimizer step over these batches; returns the gradients that it takes."""

    def run(side: Side) -> Gradients:
        for ids in batches:
            side.loss(ids).backward()
            between(side)
        if clip:
            torch.nn.utils.clip_grad_norm_(side.model.parameters(), CLIP, foreach=True)
        found = side.gradients()
        side.optimizer.step()
        return found

    return run


def each_step(trial: Trial, name: str, batches: list[torch.Tensor], of: int, clip: bool) -> None:
    """A case for each step: both models take it from the same weights, with the optimizer's step after it."""
    for first in range(0, len(batches), of):
        part = batches[first : first + of]
        trial.case(f"{name}, step {first // of + 1}", step(part, clip=clip))


def cases(trial: Trial) -> None:
    trial.warm()
    six = [trial.batch() for _ in range(6)]
    each_step(trial, "a batch a step", six, 1, clip=False)
    if [row.effective for row in trial.told] != ["recorded"]:
        trial.failed.append(f"not recorded: {[(row.effective, row.detail) for row in trial.told]}")
        return
    each_step(trial, "three batches a step, clipped", six, 3, clip=True)
    held_out = trial.batch()

    def look(side: Side) -> None:
        side.model.eval()
        with torch.no_grad():
            side.loss(held_out)
        side.model.train()

    trial.case("held-out rows between", step(six[:3], between=look))
    short = trial.batch(trial.tokens // 2)
    trial.case("another length between", step([six[0], short, six[1]]))

    def two(side: Side) -> Gradients:
        first, second = side.loss(six[2]), side.loss(six[3])
        (first + 2 * second).backward()
        side.loss(six[4])  # is never differentiated
        return side.gradients()

    trial.case("two passes before a backward pass, one after it", two)


def examined(trial: Trial, ids: torch.Tensor) -> None:
    """Where a fault would lie: the answer, the plays, the pool."""
    recorded = trial.stack._recorded
    if recorded is None:
        return
    with torch.no_grad():
        embedded = trial.ours.model.model.embed_tokens(ids)
        recorded.inputs[0].copy_(embedded)
    recorded.forward()
    plays = recorded.out.clone()
    launched = trial.stack.run(recorded.inputs, recorded.form)
    print(f"  recorded answer: {apart(plays, launched):.1e} of the layers' own, equal {torch.equal(plays, launched)}")
    torch.manual_seed(1)
    grad = torch.randn_like(plays) / plays.numel()
    truth = torch.autograd.grad(launched, recorded.weights, grad, allow_unused=True)
    names = {id(weight): name for name, weight in trial.ours.model.named_parameters()}
    seen = []
    for _ in range(2):
        recorded.forward()
        recorded.grad_out.copy_(grad)
        recorded.backward()
        seen.append([None if each is None else each.clone() for each in recorded.gradients])
    pairs = [
        (names[id(weight)], one, two, own)
        for weight, one, two, own in zip(recorded.weights, *seen, truth, strict=True)
        if one is not None and two is not None and own is not None
    ]
    worst = max((apart(one, own), name) for name, one, _, own in pairs)
    print(f"  gradients as played: {worst[0]:.1e} of the layers' own at most, in {worst[1]}")
    worst = max((apart(one, two), name) for name, one, two, _ in pairs)
    print(f"  two plays of one batch: {worst[0]:.1e} apart at most, in {worst[1]}")
    written_over(recorded, "one pool for both graphs")


def written_over(recorded: Any, words: str) -> None:
    """Prints how many gradients in the pool are others after the next forward pass, which is why none is handed out."""
    recorded.forward()
    recorded.backward()
    before = [None if each is None else each.clone() for each in recorded.gradients]
    recorded.forward()
    changed = [
        now is not None and old is not None and not torch.equal(now, old)
        for now, old in zip(recorded.gradients, before, strict=True)
    ]
    print(f"  {words}: the next forward pass writes over {sum(changed)} of {len(changed)} gradients of the pool")


def with_two_pools(trial: Trial) -> None:
    recorded = trial.stack._recorded
    if recorded is None:
        return
    own = stack_graph._Recorded(trial.stack, recorded.form, recorded.inputs, CudaRecorder(shared=False))
    written_over(own, "a pool for each graph")


def timed(side: Side, ids: torch.Tensor) -> list[float]:
    found = []
    for _ in range(TIMED):
        side.model.zero_grad()
        torch.cuda.synchronize()
        before = time.perf_counter()
        side.loss(ids).backward()
        torch.cuda.synchronize()
        found.append(1000 * (time.perf_counter() - before))
    return found[2:]


def tried(shape: str, given: argparse.Namespace, results: Results, ends: float) -> list[str]:
    print(f"{shape}, {'layers as they are' if given.plain else 'compiled layers'}", flush=True)
    trial = Trial(shape, not given.plain)
    cases(trial)
    ids = trial.batch()
    examined(trial, ids)
    words = f"{shape}; {trial.rows}x{trial.tokens}; forward and backward, vocabulary {trial.vocabulary}"
    for name, side in (("launched", trial.plain), ("recorded", trial.ours)):
        took = timed(side, ids)
        print(f"  {name}: {statistics.median(took):.2f} ms forward and backward")
        results.add("stack_graph", words, name, ms=took)
    print(f"  reserved at most, both models: {torch.cuda.max_memory_reserved() // 2**20:,} MiB", flush=True)
    if time.monotonic() < ends:
        with_two_pools(trial)
    return [f"{shape}: {each}" for each in trial.failed]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    options.add_argument("--plain", action="store_true", help="layers that are not compiled")
    options.add_argument("--seconds", type=float, default=90)
    result_options(options)
    given = options.parse_args()
    ends, failed = time.monotonic() + given.seconds * 0.8, list[str]()
    results = Results(given, torch.cuda.get_device_name(), "torch", "triton")
    for shape in given.shapes:
        failed += tried(shape, given, results, ends)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    print("\n".join(f"FAILED {each}" for each in failed) or "all gradients are those of launched layers")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
