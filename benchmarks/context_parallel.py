"""Rows that cards divide against rows on one card: the ring itself, whole runs beside each other, and a long step's time.

    python benchmarks/context_parallel.py [--parts attention equal sharded memory long] [--seconds 330]
                                          [--tokens 131072] [--layers 36] [--arms ddp fsdp2 offloaded one] [--cards 2]
                                          [--warm 0] [--tiled] [--results FILE --commit HASH]

For two cards of one machine; every run is one that `workbench train` starts, of a Qwen3 shape with random weights.
`attention`: outputs and gradients of torch's ring as a run calls it, beside those of one card for the same rows (4,096 and
32,768 tokens), and the time of both at 131,072. `equal`: losses and gradient norms of four steps, one card beside two that
divide each row, all weights at 4,096 and 32,768 tokens, then what else serves divided rows: tiers, FSDP2, adapters with
kernels, four bits, held-out rows. `sharded`: FSDP2 and its shares in main memory, each beside one card.
`long`: Qwen3-8B's shape with LoRA r=16, rows of `--tokens`; seconds and memory of a step on one card and on `--cards` that divide
them, which hold the weights whole (`ddp`), in shares (`fsdp2`), or in shares that wait in main memory (`offloaded`), each beside
the memory that the product's estimate gives for it. With `--warm` a row that short comes first: a single long step can be timed.
`memory`: four layers of that width on one card, 32,768 tokens, by what is computed again and by which kernels: the peak of each
beside the estimate. A line of JSON for each; exits 1 where one lies apart or a run failed. What does not fit into `--seconds` is said to be left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _arms import SHAPES
from _figures import Results, result_options
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from engine.builtin import tiny
from engine.config.files import as_yaml, load, put
from engine.data.gather_facts import gather_facts
from engine.errors import WorkbenchError
from engine.planning.estimate import estimate
from engine.rules import read as read_config
from engine.run import control, store

LORA = {"adapter.kind": "lora", "adapter.r": 16}
KERNELS = {
    "kernels.use_cut_ce": True, "kernels.fused_lora": True, "kernels.fused_attn_kernel": True, "memory.tiled_mlp": True,
}  # fmt: skip
FOUR_BITS = {"model.quantization": "nf4"}
RING = {"run.devices": 2, "distributed.context_parallel_size": 2}
SHARED = {
    "distributed.strategy": "fsdp2", "distributed.reshard_after_forward": True, "kernels.fused_attn_kernel": False,
}  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "ddp": {"distributed.strategy": "ddp"},
    "fsdp2": SHARED,
    "offloaded": SHARED | {"distributed.cpu_offload": True},
    "one": {"run.devices": 1},
}
"""How the cards of the long row hold the model."""
FULL = {"optim.learning_rate": 1e-4}
FAR = {"loss": 2e-3, "norm": 4e-2, "attention": 2e-2}
"""How far numbers in bfloat16 may lie apart, relative to them: sums in another order, four steps long."""
STEPS, START = 4, 45
"""Steps of a short run, and the seconds that one may take with its start."""
LONG = 131_072
"""Tokens of the row whose attention is timed."""
WORKER = "--attention-worker"


@dataclass
class Trial:
    """A run of `workbench train`: started at once, read when it has ended."""

    name: str
    settings: dict[str, Any]
    cards: str
    begun: float = field(default_factory=time.monotonic)
    process: Any = None
    folder: Path = Path()

    def start(self, root: Path) -> Trial:
        """Writes its config and starts it on these cards."""
        mapping: dict[str, Any] = {"version": 1}
        for path, value in self.settings.items():
            put(mapping, path, value)
        self.folder = root / self.name.replace(" ", "-")
        self.folder.mkdir()
        config = self.folder / "config.yaml"
        config.write_text(as_yaml(mapping))
        argv = [sys.executable, "-m", "workbench", "train", str(config), "--runs", str(self.folder / "runs"), "--json"]
        with (self.folder / "said").open("w") as said:
            lent = [card for card in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if card]
            cards = ",".join(lent[int(card)] if lent else card for card in self.cards.split(",") if card)
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": cards, "HF_HUB_OFFLINE": "1"}
            self.process = subprocess.Popen(argv, stdout=said, stderr=subprocess.STDOUT, env=environment)
        return self

    def estimated(self) -> dict[str, int]:
        """Bytes by class that the product tells before it starts."""
        config = read_config(load(self.folder / "config.yaml").mapping).config
        return estimate(config, gather_facts(config, self.folder)).memory

    def read(self, seconds: float) -> dict[str, Any]:
        """Its numbers by name, or its `failure`."""
        try:
            code = self.process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()
            self._end()
            return {"failure": f"not done in {seconds:.0f} s"}
        found = list(self.folder.glob("runs/*/events.jsonl"))
        events = [json.loads(line) for line in found[0].read_text().splitlines()] if found else []
        if code:
            failed = next((each.get("message", "") for each in events if each["kind"] == "failed"), "")
            return {"failure": failed or (self.folder / "said").read_text()[-1500:]}
        steps = [each for each in events if each["kind"] == "metrics" and "loss" in each]
        peaks = [each["memory_peak"] for each in events if "memory_peak" in each]
        receipt = [entry for each in events if each["kind"] == "receipt" for entry in each["entries"]]
        return {
            "losses": [each["loss"] for each in steps],
            "norms": [each["grad_norm"] for each in steps],
            "held_out": [each["eval_loss"] for each in events if "eval_loss" in each],
            "step_seconds": [each["step_seconds"] for each in steps],
            "tokens": steps[-1]["tokens"] if steps else 0,
            "peak": max(peaks, default=0),
            "receipt": {
                entry["feature"]: f"{entry['effective']}; {entry['detail']}"
                for entry in receipt
                if entry["feature"] in ("strategy", "context parallelism", "processes", "attention")
            },
            "seconds": round(time.monotonic() - self.begun, 1),
        }

    def _end(self) -> None:
        """Ends the run: it outlives the command that started it, and would keep the cards from the next one."""
        for run in store.runs_in(self.folder / "runs"):
            with contextlib.suppress(WorkbenchError):  # it has ended by itself
                control.request(run, "stop", now=True)
            until = time.monotonic() + 20
            while run.state not in store.ENDED and time.monotonic() < until:
                time.sleep(0.1)


class Bench:
    """What has been said and measured so far, until when there is time, and the folder of all runs."""

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        self.options, self.root, self.sound = options, root, True
        self.until = time.monotonic() + options.seconds
        self.results = Results(options, torch.cuda.get_device_name(), "torch")

    def say(self, *, ok: bool | None = None, **told: Any) -> None:
        """A line of JSON; what is not `ok` makes the script fail."""
        self.sound = self.sound and ok is not False
        print(json.dumps({**told, **({} if ok is None else {"ok": ok})}), flush=True)

    def left(self, need: float, name: str) -> bool:
        """Whether there is time for this."""
        if self.until - time.monotonic() >= need:
            return True
        self.say(left_out=name, needs_seconds=need)
        return False

    def settings(self, model: Path, tokens: int, steps: int, rows: int = 16, warm: int = 0) -> dict[str, Any]:
        """What all runs of this model and length share; the first row is `warm` long where that is set."""
        file = self.root / f"{tokens}.jsonl"
        if not file.exists():
            draw = random.Random(0)
            with file.open("w") as out:
                for number in range(rows):
                    many = warm if warm and number == 0 else tokens
                    out.write(json.dumps({"input_ids": [draw.randrange(10, 300) for _ in range(many)]}) + "\n")
        return {
            "model.name": str(model), "model.dtype": "bfloat16", "model.attention": "sdpa",
            "data.train": [{"path": str(file), "format": "tokens"}], "data.max_length": tokens, "data.shuffle": False,
            "optim.per_device_train_batch_size": 1, "optim.gradient_accumulation_steps": 1, "optim.max_steps": steps,
            "optim.warmup_steps": 0, "optim.tf32": False, "run.save_steps": 1000, "run.logging_steps": 1,
            "memory.gradient_checkpointing": True, "kernels.use_cut_ce": False, "kernels.fused_attn_kernel": False,
            "kernels.torch_compile": False, "kernels.fused_lora": False,
        }  # fmt: skip

    def apart(self, name: str, one: dict[str, Any], two: dict[str, Any]) -> None:
        """Says how far two runs lie apart."""
        if "failure" in one or "failure" in two:
            failures = {"one": one.get("failure", ""), "two": two.get("failure", "")}
            self.say(ok=False, name=name, **failures)
            return
        loss, norm = (_worst(one[key], two[key]) for key in ("losses", "norms"))
        held = _worst(one["held_out"], two["held_out"])
        ok = max(loss, held) <= FAR["loss"] and norm <= FAR["norm"] and one["tokens"] == two["tokens"]
        shown = {key: [one[key], two[key]] for key in ("losses", "norms", "held_out", "tokens", "peak", "seconds")}
        steps = [each["step_seconds"][-1] for each in (one, two)]
        self.say(ok=ok, name=name, loss_apart=loss, norm_apart=norm, last_step=steps, **shown, receipt=two["receipt"])


def _worst(first: list[float], second: list[float]) -> float:
    """The largest difference relative to the first; infinite where they are not as many."""
    if len(first) != len(second):
        return math.inf
    return max((abs(b - a) / max(abs(a), 1e-9) for a, b in zip(first, second, strict=True)), default=0.0)


def make_model(folder: Path, shape: str, layers: int) -> Path:
    """A Qwen3 shape with random weights, drawn on the card, and the tokenizer of the built-in model."""
    config = Qwen3Config(
        **{**SHAPES[shape], "num_hidden_layers": layers}, num_key_value_heads=8, head_dim=128, vocab_size=151_936,
        tie_word_embeddings=shape == "0.6b", pad_token_id=0, max_position_embeddings=1 << 20,
    )  # fmt: skip
    with torch.device("cuda"):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    AutoTokenizer.from_pretrained(tiny.folder()).save_pretrained(folder)
    return folder


def attention(bench: Bench) -> None:
    """The ring of two cards as the trainer calls it, beside one card's attention."""
    if not bench.left(START, "attention"):
        return
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", __file__, WORKER]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=150, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        bench.say(ok=line["worst"] <= FAR["attention"], part="attention", **line)
    if done.returncode or not lines:
        bench.say(ok=False, part="attention", failure=done.stderr[-2500:])


def attention_worker() -> None:
    """One rank: its pieces of q, k, v and their gradients through the ring, against the same pieces computed whole; then the
    time of both for a long row. By the kernel that torch chooses, and by its flash kernel alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from engine.compat import ring_attention

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    mesh = init_device_mesh("cuda", (size,), mesh_dim_names=("ring",))
    chosen = ring_attention.FUSED
    for kernel, allowed in (("chosen", chosen), ("flash", [SDPBackend.FLASH_ATTENTION])):
        ring_attention.FUSED = allowed
        for tokens in (4096, 32_768, LONG):
            draw = torch.Generator("cuda").manual_seed(0)
            whole = [torch.randn(1, n, tokens, 128, generator=draw, device="cuda").bfloat16() for n in (16, 8, 8, 16)]
            parts = [_pieces(each, size, rank) for each in whole]
            one = functools.partial(_whole_row, allowed, *whole)
            two = functools.partial(_divided_row, mesh, *parts)
            if tokens < LONG:
                told = {}
                for name, expected, found in zip(("out", "q", "k", "v"), one(), two(), strict=True):
                    expected = _pieces(expected, size, rank).float()
                    far = (found.float() - expected).norm() / expected.norm()
                    dist.all_reduce(far, dist.ReduceOp.MAX)
                    told[name] = round(float(far), 6)
                told["worst"] = max(told.values())
            else:
                told = {"one_ms": _milliseconds(one), "two_ms": _milliseconds(two), "worst": 0.0}
                told["faster"] = told["one_ms"] / told["two_ms"]
            if rank == 0:
                print(json.dumps({"kernel": kernel, "tokens": tokens, **told}), flush=True)
    dist.destroy_process_group()


Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _pieces(whole: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """[B, heads, T, width] to this rank's two pieces of T."""
    parts = whole.chunk(2 * size, dim=2)
    return torch.cat([parts[rank], parts[2 * size - 1 - rank]], dim=2).contiguous()


def _whole_row(
    allowed: list[SDPBackend], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor
) -> Four:
    """Output and gradients of one card's attention."""
    q, k, v = (each.detach().requires_grad_() for each in (q, k, v))
    with sdpa_kernel(allowed):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))  # type: ignore[return-value]


def _divided_row(mesh: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> Four:
    """The same of this rank's pieces, as a model's layer calls it."""
    from engine.compat.ring_attention import ring_attention, ring_attention_forward

    model: Any = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
    q, k, v = (each.detach().requires_grad_() for each in (q, k, v))
    with ring_attention(model, mesh):
        out = ring_attention_forward(torch.nn.Module(), q, k, v, None)[0].transpose(1, 2)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))  # type: ignore[return-value]


def _milliseconds(call: Callable[[], object]) -> float:
    """The least of three calls after one that warms."""
    times = []
    for _ in range(4):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        call()
        ended.record()
        torch.cuda.synchronize()
        times.append(begun.elapsed_time(ended))
    return min(times[1:])


def equal(bench: Bench) -> None:
    """Whole runs: two that one card each takes beside each other, then those that divide rows."""
    model = make_model(bench.root / "small", "0.6b", 6)
    short, far = (bench.settings(model, tokens, STEPS) for tokens in (4096, 32_768))
    eval_rows = {"data.val_set_size": 3, "run.eval_steps": 2}
    one: dict[str, dict[str, Any]] = {}
    four_bits = {"four bits": short | LORA | FOUR_BITS} if find_spec("bitsandbytes") else {}
    for pair in ({"4k": short | FULL | eval_rows, "lora": short | LORA}, {"32k": far | FULL, **four_bits}):
        if not bench.left(START, ", ".join(pair)):
            return
        trials = [
            Trial(f"one {name}", settings | {"run.devices": 1}, str(card)).start(bench.root)
            for card, (name, settings) in enumerate(pair.items())
        ]
        for name, trial in zip(pair, trials, strict=True):
            one[name] = trial.read(bench.until - time.monotonic())
    ddp = {"distributed.strategy": "ddp"}
    divided: dict[str, tuple[str, dict[str, Any]]] = {
        "4k": ("4k", short | FULL | eval_rows | ddp),
        "32k": ("32k", far | FULL | ddp),
        "lora, kernels": ("lora", short | LORA | KERNELS | ddp),
        "fsdp2": ("4k", short | FULL | eval_rows | {"distributed.strategy": "fsdp2"}),
        "selective": ("4k", short | FULL | eval_rows | ddp | {"memory.gradient_checkpointing": "selective"}),
        "medium": ("4k", short | FULL | eval_rows | ddp | {"memory.gradient_checkpointing": "medium"}),
        "nothing again": ("4k", short | FULL | eval_rows | ddp | {"memory.gradient_checkpointing": False}),
        "four bits": ("four bits", short | LORA | FOUR_BITS | ddp),
    }
    asked = {name: (base, settings | RING) for name, (base, settings) in divided.items() if base in one}
    beside(bench, "equal", one, asked)


def sharded(bench: Bench) -> None:
    """FSDP2 on two cards, its shares on the cards and in main memory, beside one card with as many rows a step."""
    model = make_model(bench.root / "small-sharded", "0.6b", 6)
    given = bench.settings(model, 2048, STEPS) | FULL
    two = {"run.devices": 2, "distributed.strategy": "fsdp2"}
    rows = {"optim.per_device_train_batch_size": 2}
    if not bench.left(START, "sharded"):
        return
    trials = {
        "full": Trial("one sharded", given | rows | {"run.devices": 1}, "0").start(bench.root),
        "lora": Trial("one sharded lora", given | rows | LORA | {"run.devices": 1}, "1").start(bench.root),
    }
    one = {name: trial.read(bench.until - time.monotonic()) for name, trial in trials.items()}
    runs = {
        "fsdp2": ("full", given | two),
        "fsdp2, in main memory": ("full", given | two | {"distributed.cpu_offload": True, "run.save_steps": 2}),
        "fsdp2, lora in main memory": ("lora", given | two | LORA | {"distributed.cpu_offload": True}),
    }
    if torch.cuda.device_count() >= 4:
        four = {"run.devices": 4, "distributed.dp_replicate_size": 2, "optim.per_device_train_batch_size": 1}
        quarter = Trial("one hsdp", given | {"optim.per_device_train_batch_size": 4, "run.devices": 1}, "0")
        one["four rows"] = quarter.start(bench.root).read(bench.until - time.monotonic())
        runs["hsdp"] = ("four rows", given | two | four)
    beside(bench, "sharded", one, runs)


def beside(
    bench: Bench, part: str, one: dict[str, dict[str, Any]], runs: dict[str, tuple[str, dict[str, Any]]]
) -> None:
    """Each of these runs on all its cards, after the other, told beside the run of one card that it names."""
    for name, (base, settings) in runs.items():
        if not bench.left(START, name):
            continue
        cards = ",".join(map(str, range(settings["run.devices"])))
        found = Trial(f"{part} {name}", settings, cards).start(bench.root).read(bench.until - time.monotonic())
        bench.apart(f"{part}: {name}", one[base], found)


def long(bench: Bench) -> None:
    """A step of one long row, on cards that divide it and on one."""
    options = bench.options
    model = make_model(bench.root / "large", "8b", options.layers)
    steps = options.steps + bool(options.warm)
    given = bench.settings(model, options.tokens, steps, rows=steps, warm=options.warm) | LORA
    given |= {"kernels.use_cut_ce": True, "kernels.fused_attn_kernel": True, "kernels.fused_lora": True}
    given |= {"memory.tiled_mlp": True} if options.tiled else {}
    ring = {"run.devices": options.cards, "distributed.context_parallel_size": options.cards}
    shape = f"8b of {options.layers} layers, LoRA{', tiled MLP' if options.tiled else ''}, one row of {options.tokens}"
    found = {}
    for name in options.arms:
        if not bench.left(2 * START, f"long {name}"):
            continue
        settings = given | (ring if name != "one" else {}) | ARMS[name]
        cards = ",".join(map(str, range(settings["run.devices"])))
        trial = Trial(f"long {name}", settings, cards).start(bench.root)
        told = trial.read(bench.until - time.monotonic())
        if "failure" in told:
            bench.say(ok=False, name=trial.name, failure=told["failure"])
            continue
        bench.say(name=trial.name, **told, **beside_estimate(trial, told["peak"]))
        found[name] = told
        milliseconds = [1e3 * each for each in told["step_seconds"][1:] or told["step_seconds"]]
        words = "one card" if name == "one" else f"{options.cards} cards, {name}"
        bench.results.add("context_parallel", shape, words, ms=milliseconds, peak_mib=told["peak"] / 2**20)
    for name, told in found.items():
        if name == "one" or "one" not in found:
            continue
        one = found["one"]
        bench.say(
            name=f"long {name}", tokens=options.tokens, layers=options.layers, cards=options.cards,
            faster=one["step_seconds"][-1] / told["step_seconds"][-1], memory=told["peak"] / one["peak"],
            loss_apart=_worst(one["losses"], told["losses"]), norm_apart=_worst(one["norms"], told["norms"]),
        )  # fmt: skip


def memory(bench: Bench) -> None:
    """What a step of a row of 32,768 tokens holds, four runs at a time on one card: torch counts each process's own."""
    if not bench.left(2 * START, "memory"):
        return
    model = make_model(bench.root / "four-layers", "8b", 4)
    given = bench.settings(model, 32_768, 2, rows=2) | {"kernels.use_cut_ce": True, "run.devices": 1}
    norms, lora, tiles = (
        {name: True} for name in ("kernels.fused_attn_kernel", "kernels.fused_lora", "memory.tiled_mlp")
    )
    tier = "memory.gradient_checkpointing"
    cases: dict[str, dict[str, Any]] = {
        "plain": {}, "fused norms": norms, "fused lora": lora, "both": norms | lora,
        "tiles": tiles, "tiles, both": tiles | norms | lora, "selective, both": norms | lora | {tier: "selective"},
        "medium, both": norms | lora | {tier: "medium"}, "nothing again": {tier: False},
        "nothing again, both": norms | lora | {tier: False},
    }  # fmt: skip
    cases = {name: LORA | more for name, more in cases.items()}
    cases |= {"full weights": FULL, "full weights, tiles": FULL | tiles}
    names = list(cases)
    for four in (names[at : at + 4] for at in range(0, len(names), 4)):
        if not bench.left(START, ", ".join(four)):
            return
        trials = [Trial(f"memory {name}", given | cases[name], "0").start(bench.root) for name in four]
        for trial in trials:
            told = trial.read(bench.until - time.monotonic())
            if "failure" in told:
                bench.say(ok=False, name=trial.name, failure=told["failure"])
            else:
                bench.say(name=trial.name, **beside_estimate(trial, told["peak"]))


def beside_estimate(trial: Trial, peak: int) -> dict[str, Any]:
    """What was estimated of it: what torch hands out, which is what `peak` counts, and all with driver and fragments."""
    classes = trial.estimated()
    handed_out = sum(size for name, size in classes.items() if name != "overhead")
    in_gib = {name: round(size / 2**30, 2) for name, size in classes.items()}
    return {"peak_gib": peak / 2**30, "estimated_gib": handed_out / 2**30, "estimated/peak": handed_out / max(1, peak),
            "estimated_with_driver_gib": sum(classes.values()) / 2**30, "classes": in_gib}  # fmt: skip


PARTS = {"attention": attention, "equal": equal, "sharded": sharded, "memory": memory, "long": long}


def main() -> int:
    """Runs the parts that were asked for."""
    if WORKER in sys.argv:
        attention_worker()
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--layers", type=int, default=36, help="of 36; fewer where time is short")
    parser.add_argument("--steps", type=int, default=2, help="of the long row")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["ddp", "one"], help="of the long row")
    parser.add_argument("--cards", type=int, default=2, help="that divide the long row")
    parser.add_argument(
        "--warm", type=int, default=0, metavar="TOKENS", help="of a row before the long ones, which is not timed"
    )
    parser.add_argument("--tiled", action="store_true", help="the long row's feed-forward blocks run in tiles")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the runs are left, with their logs")
    result_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = options.keep or Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        bench = Bench(options, root)
        for part in options.parts:
            begun = time.monotonic()
            PARTS[part](bench)
            bench.say(part=part, seconds=round(time.monotonic() - begun, 1))
    return 0 if bench.sound else 1


if __name__ == "__main__":
    sys.exit(main())
