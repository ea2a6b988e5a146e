"""Two cards against one, and against what else there is: LoRA under DDP and FSDP2, full weights, experts, checkpoints.

    python benchmarks/two_cards.py [PART[:SECONDS] ...] [--seconds 520] [--logs FOLDER] [--place FOLDER]
                                   [--rounds 20] [--window 1] [--layers N] [--moe-layers 8] [--no-compile]
                                   [--results FILE --commit HASH]
    python benchmarks/two_cards.py lora full moe ep save overhead --shape tiny

`lora`: 8B, r=16 on all linear layers, 4x2048 a card, each card beside two under DDP, then DDP beside FSDP2. `full`: 8B full
weights under FSDP2, ours against a plain `fully_shard` loop with compiled layers and TRL's trainer under accelerate's FSDP2,
one after the other. `moe`: LoRA on a mixture of 30B-A3B's width. `ep`: the same on two cards that
each hold all experts, and that divide them (`distributed.expert_parallel_size`), compiled and not. `save`: how long a sharded checkpoint of 8B full
weights with its optimizer keeps the training waiting. `overhead`: our trainer on two ranks against TRL's with the same settings.
`context`: one row of 131,072 tokens, by `context_parallel.py`.

Each arm is processes of its own (`_ranks.py`), ours the worker of a run with its config, rows, receipt and telemetry; weights
are random, drawn on the card. The arms of `lora`, `moe`, `ep` and `overhead` stand on the cards together and take turns, those of
`full` do not fit beside each other. All arms of all parts import side by side at the start. Weights, gradients and AdamW's
states are bfloat16 in every arm. A part that fails or runs over its seconds is ended and the next one begins; figures are said
as soon as they are there. `--shape tiny` shows on two processes of a CPU that all of it runs, uncompiled, and no figure of
interest. `--moe-layers 48` is the whole mixture, one arm after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from _figures import Results, ratio, result_options
from _ranks import Fell, Ranks

from engine.config.files import as_yaml, put
from engine.errors import WorkbenchError
from engine.rules import read
from engine.run import store
from engine.run.devices import cards, choose
from engine.run.store import RunFolder

HERE = Path(__file__).resolve().parent
ROWS, CARDS = 4, 2
"""Rows a card and step, and cards."""
LORA: dict[str, Any] = {"adapter.kind": "lora", "adapter.r": 16, "adapter.lora_alpha": 32}
FULL: dict[str, Any] = {"adapter.kind": "none", "optim.learning_rate": 1e-5}
DDP: dict[str, Any] = {"run.devices": CARDS, "distributed.strategy": "ddp"}
FSDP2: dict[str, Any] = {"run.devices": CARDS, "distributed.strategy": "fsdp2"}
LET_GO: dict[str, Any] = {"distributed.reshard_after_forward": True}
DIVIDED: dict[str, Any] = {"distributed.expert_parallel_size": CARDS}
CUT: dict[str, Any] = {"kernels.use_cut_ce": True}
COMPILED: dict[str, Any] = {"kernels.torch_compile": True}
PLAIN: dict[str, Any] = {"kernels.use_cut_ce": False, "kernels.torch_compile": False, "kernels.fused_lora": False,
                         "kernels.fused_attn_kernel": False}  # fmt: skip
TOLD = (
    "strategy",
    "torch.compile",
    "cut cross-entropy",
    "fused experts",
    "expert parallelism",
    "fused LoRA",
    "fused norm and rotary",
    "attention",
)
"""What is said of an arm's receipt."""
WARM = 3
CHECKPOINTS = 5
GIB_A_CHECKPOINT = 50
"""Of 8B weights with AdamW's two states, all in bfloat16."""


@dataclass(frozen=True)
class Spec:
    """An arm: its kind (`_ranks.py`), how many processes it has, and its settings on top of the part's. `wanted` are set past
    the rules where they refuse them, which is then said. A single process is on the card of this number."""

    name: str
    kind: str = "worker"
    processes: int = CARDS
    settings: dict[str, Any] = field(default_factory=dict)
    wanted: dict[str, Any] = field(default_factory=dict)
    card: int = 0


@dataclass(frozen=True)
class Part:
    """A row of the table: its seconds, the shape, settings and arms, and what is done with them."""

    seconds: float
    shape: str
    settings: dict[str, Any]
    arms: tuple[Spec, ...]
    run: Callable[[Stage], None]
    tiny: str = "tiny"


class Stage:
    """A part while it is measured: its arms by name, its folder, and until when it may take."""

    def __init__(self, bench: Bench, name: str, part: Part, until: float) -> None:
        self.bench, self.given, self.name, self.part, self.until = bench, bench.given, name, part, until
        self.arms = {
            spec.name: bench.started.pop(f"{name} {spec.name}") for spec in part.arms if not bench.outside(name)
        }
        self.specs = {spec.name: spec for spec in part.arms}
        self.place = bench.root / name
        self.place.mkdir()
        self.ready: set[str] = set()

    def left(self) -> float:
        return self.until - time.monotonic()

    def begin(self, *names: str, within: float = 0.0) -> list[str]:
        """Has these arms build, and take their first steps side by side; those that did. What fails is said, as what takes
        longer than `within` seconds."""
        begun, going = time.monotonic(), []
        until = min(self.until, begun + within) if within else self.until
        for name in names:
            arm = self.arms[name]
            try:
                arm.answers(until)  # it has imported
                arm.begin(**self._order(self.specs[name]))
                # Built one after the other, as whole models lie on the cards until they are shared out; they compile together.
                self.bench.on(arm.answers(until)[0]["device"])
                arm.order("steps", n=1)
                going.append(name)
            except (Fell, WorkbenchError) as problem:
                self.failed(name, problem)
        for name in list(going):
            try:
                first = self.arms[name].answers(until)
                took = [max(each["ms"] for each in first)]
                told = self.arms[name].steps(until, WARM - 1)
                took.append(told["ms"])
                say(
                    f"{self.name} {name}: first steps {took[0]:.0f}, then {took[1]:.0f} ms, first loss {told.get('first_loss', 0):.5f} "
                    f"and gradient norm {told.get('first_norm', 0):.5f}, {told['peak_mib'] / 1024:.2f} GiB, {told.get('graph_breaks', 0)} graph breaks, ready after "
                    f"{time.monotonic() - begun:.0f} s{self.receipt(name)}"
                )
            except Fell as problem:
                going.remove(name)
                self.failed(name, problem)
        self.ready.update(going)
        return going

    def failed(self, name: str, problem: Exception) -> None:
        self.bench.sound = False
        say(f"{self.name} {name}: FAILED {problem}")
        self.arms[name].end()

    def _order(self, spec: Spec) -> dict[str, Any]:
        """What an arm is told to build; the run's folder for ours."""
        common, place = (
            self.bench.common(self.part, self.place),
            self.place / spec.name.replace(",", "").replace(" ", "-"),
        )
        wanted = {} if self.given.no_compile or self.bench.tiny else spec.wanted
        settings = {**common, **self.part.settings, **spec.settings}
        if self.bench.tiny and "kernels.fused_experts" in settings:
            settings["kernels.fused_experts"] = False  # its kernels need a card
        settings["run.devices"] = spec.processes if spec.processes == 1 else settings.get("run.devices", CARDS)
        mapping, past = _as_mapping({**settings, **wanted}), {}
        if wrong := _refused(mapping):
            mapping, past = _as_mapping(settings), wanted
            if further := _refused(mapping):
                raise WorkbenchError(f"{spec.name}: {further[0]}")
            say(f"{self.name} {spec.name}: {', '.join(wanted)} is set past the rules, which say: {wrong[0]}")
        place.mkdir()
        config = place / "config.yaml"
        config.write_text(as_yaml(mapping))
        run = ""
        if spec.kind == "worker":
            run = str(store.create(place, as_yaml(mapping), {"name": "bench", "method": "sft", "model": "bench"}).path)
        return {
            "kind": spec.kind, "run": run, "past": past, "place": str(place), "config": str(config),
            "model": common["model.name"], "data": common["data.train"][0]["path"], "rows": ROWS,
            "tokens": self.given.tokens, "dtype": common["model.dtype"],
            "learning_rate": settings["optim.learning_rate"], "compiled": bool(wanted),
        }  # fmt: skip

    def run_of(self, name: str) -> RunFolder:
        """The run of an arm of ours."""
        place = self.place / name.replace(",", "").replace(" ", "-")
        return RunFolder(next(path for path in place.iterdir() if (path / "run.json").is_file()))

    def receipt(self, name: str) -> str:
        """What the run itself says was built: shares, compiled layers, kernels."""
        if self.specs[name].kind != "worker":
            return ""
        entries = [
            entry for event in events_of(self.run_of(name)) if event["kind"] == "receipt" for entry in event["entries"]
        ]
        words = [f"{entry['feature']} {entry['effective']} ({entry.get('detail', '')})"[:160] for entry in entries
                 if entry["feature"] in TOLD]  # fmt: skip
        return "\n    | " + "; ".join(words) if words else ""

    def waits(self, name: str) -> str:
        """How long each rank of an arm of ours stood still for others in a step (exposed communication)."""
        if self.specs[name].kind != "worker" or self.specs[name].processes == 1:
            return ""
        told = [event["communication_seconds"] for event in events_of(self.run_of(name)) if event["kind"] == "ranks"]
        each = [f"{1e3 * seconds:.1f}" for seconds in (told[-1] if told else []) if seconds is not None]
        return f", ranks waited {' and '.join(each)} ms a step" if each else ""

    def turns(self, names: Sequence[str], until: float, rounds: int, window: int = 1) -> Times:
        """So many rounds of turns, fewer where the time is over, each of `window` times as many steps as were asked for; an
        arm that falls is left out from then on."""
        times = Times({name: [] for name in names})
        going, took = list(names), 0.0
        for number in range(rounds):
            begun = time.monotonic()
            if not going or (number >= 3 and begun + took > until):
                break
            turn = number % len(going)
            for name in going[turn:] + going[:turn]:
                try:
                    told = self.arms[name].steps(self.until, window * self.given.window)
                    times.ms[name].append(told["ms"])
                    times.peaks[name] = max(times.peaks.get(name, 0.0), told["peak_mib"])
                except Fell as problem:
                    self.failed(name, problem)
                    going.remove(name)
            took = time.monotonic() - begun
        times.ms = {name: times.ms[name] for name in going if times.ms[name]}
        return times

    def report(self, times: Times, words: str = "") -> None:
        """A line and a row for each arm."""
        for name, each in times.ms.items():
            cards_, middle = self.specs[name].processes, statistics.median(each)
            tokens = cards_ * ROWS * self.given.tokens / middle * 1e3
            say(
                f"{self.name:9} {name:34} {middle:9.1f} ms a step {tokens:9,.0f} tokens/s "
                f"{times.peaks[name] / 1024:6.2f} GiB a card n={len(each)}{self.waits(name)}"
            )
            self.bench.add(
                f"cards_{self.name}", f"{self.bench.shape_of(self.part)}; {ROWS}x{self.given.tokens} a card{words}",
                name if name.startswith(("ours", "trl", "fully_shard")) else f"ours, {name}",
                ms=each, peak_mib=times.peaks[name],
            )  # fmt: skip

    def end(self) -> None:
        for arm in self.arms.values():
            arm.end()


@dataclass
class Times:
    """Milliseconds of a step in each round, and MiB at the peak, by arm."""

    ms: dict[str, list[float]]
    peaks: dict[str, float] = field(default_factory=dict)

    def both(self, first: str, second: str) -> bool:
        return first in self.ms and second in self.ms

    def ratio(self, first: str, second: str, factor: float = 1.0) -> tuple[float, float, float]:
        """Of first to second, times the factor, and its 95 % interval; rounds are pairs."""
        return ratio([(factor * one, two) for one, two in zip(self.ms[first], self.ms[second], strict=False)])


class Bench:
    """What all parts share: where models, rows and runs are, the arms that wait to begin, and what was found."""

    def __init__(self, given: argparse.Namespace, root: Path) -> None:
        self.given, self.root, self.sound = given, root, True
        self.tiny = given.shape == "tiny"
        self.started: dict[str, Ranks] = {}
        self.goals: list[str] = []
        self.models: dict[str, Path] = {}
        self.device = ""
        self.results: Results | None = None

    def outside(self, name: str) -> bool:
        """Whether a part is another script's."""
        return not PARTS[name].arms

    def start(self, names: Sequence[str]) -> None:
        """All ranks of these parts, which import side by side."""
        for name in names:
            for spec in PARTS[name].arms:
                wanted = [spec.card] if spec.processes == 1 else spec.processes
                visible = () if self.tiny else choose(wanted).visible
                self.started[f"{name} {spec.name}"] = Ranks(
                    f"{name}-{spec.name}", visible, spec.processes, self.given.logs
                )

    def on(self, device: str) -> None:
        if not self.device:
            self.device = device
            self.results = Results(self.given, device, "torch", "triton")
            say(json.dumps({"device": device, "nccl_nvls": os.environ.get("NCCL_NVLS_ENABLE", "")}))

    def add(self, *given: Any, **told: Any) -> None:
        if self.results is not None:
            self.results.add(*given, **told)

    def shape_of(self, part: Part) -> str:
        """The name of a part's shape, for its rows."""
        layers = self.given.layers if part.shape == "8b" else self.given.moe_layers if "a3b" in part.shape else None
        return part.tiny if self.tiny else part.shape + (f" of {layers} layers" if layers else "")

    def common(self, part: Part, place: Path) -> dict[str, Any]:
        """Settings that all arms of a part have, its model's folder and its rows made where they are not there yet."""
        shape, tokens = self.shape_of(part), self.given.tokens
        if shape not in self.models:
            self.models[shape] = make_model(self.root / f"model-{len(self.models)}", part, self.given)
        rows = self.root / "rows.jsonl"
        if not rows.exists():
            draw, most = random.Random(0), 400
            # As frequent as in text: few tokens often, most of them seldom.
            lines = ([int(most ** draw.random()) for _ in range(tokens)] for _ in range(128))
            rows.write_text("".join(json.dumps({"input_ids": line}) + "\n" for line in lines))
        return {
            "model.name": str(self.models[shape]), "model.dtype": "float32" if self.tiny else "bfloat16",
            "model.attention": "sdpa", "data.train": [{"path": str(rows), "format": "tokens"}],
            "data.max_length": tokens, "data.packing": True, "data.packing_cross_doc_attn_mask": False,
            "optim.per_device_train_batch_size": ROWS, "optim.gradient_accumulation_steps": 1,
            "optim.max_steps": 100_000, "optim.learning_rate": 1e-4, "optim.warmup_steps": 0,
            "memory.gradient_checkpointing": True, "kernels.torch_compile": False,
            "run.save_steps": 1_000_000, "run.output_dir": str(place / "runs"),
        }  # fmt: skip

    def goal(
        self, what: str, found: tuple[float, float, float], aim: float, *, least: bool, bound: float | None = None
    ) -> None:
        """Says how a figure stands to its goal; `bound` is the end of the interval that is judged, else the figure itself."""
        value, low, high = found
        judged = value if bound is None else bound
        met = judged >= aim if least else judged <= aim
        verdict = "no goal at this shape" if self.tiny else "MET" if met else "MISSED"
        words = (
            f"{what}: {value:.3f} [{low:.3f}, {high:.3f}], goal at {'least' if least else 'most'} {aim:g}: {verdict}"
        )
        self.goals.append(words)
        say(f"GOAL {words}")


def make_model(folder: Path, part: Part, given: argparse.Namespace) -> Path:
    """A config, the tokenizer of the built-in model, and one weight: a model folder, but for the others, which are drawn."""
    import torch
    import transformers
    from _arms import SHAPES, UNTIED
    from safetensors.torch import save_file

    from engine.builtin import tiny

    small = given.shape == "tiny"
    shape = dict(SHAPES[part.tiny if small else part.shape])
    fewer = None if small else given.layers if part.shape == "8b" else given.moe_layers if "a3b" in part.shape else None
    if fewer:
        shape["num_hidden_layers"] = fewer
    kind, name = (
        ("Qwen3MoeConfig", "Qwen3MoeForCausalLM") if "num_experts" in shape else ("Qwen3Config", "Qwen3ForCausalLM")
    )
    beside = {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512} if small else {
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}  # fmt: skip
    config = getattr(transformers, kind)(
        **{**beside, **shape}, tie_word_embeddings=part.shape not in UNTIED, pad_token_id=0
    )
    config.architectures = [name]
    config.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tiny.folder()).save_pretrained(folder)
    save_file({"model.norm.weight": torch.ones(shape["hidden_size"])}, folder / "model.safetensors", {"format": "pt"})
    return folder


def _as_mapping(settings: dict[str, Any]) -> dict[str, Any]:
    mapping: dict[str, Any] = {"version": 1, "method": {"kind": "sft"}}
    for path, value in settings.items():
        put(mapping, path, value)
    return mapping


def _refused(mapping: dict[str, Any]) -> list[str]:
    return [finding.message for finding in read(mapping).findings if finding.severity == "error"]


def events_of(run: RunFolder) -> list[dict[str, Any]]:
    found = run.events.read_text().splitlines() if run.events.exists() else []
    return [json.loads(line) for line in found]


# -- the parts ---------------------------------------------------------------------------------------------------------
def lora(stage: Stage) -> None:
    """One card beside two, then DDP beside FSDP2, with layers compiled and without. Half of the time is the first's."""
    begun, whole = time.monotonic(), stage.left()
    alone = ["one card", "the other card"]  # the slower of both sets the pace of two
    if len(going := stage.begin(*alone, "ddp", within=0.75 * whole)) > 1:
        until = max(begun + 0.55 * whole, time.monotonic() + 0.15 * whole)
        times = stage.turns(going, until, stage.given.rounds)
        scaling(stage, times, 1.96)
        if times.both(alone[1], "ddp"):
            found = times.ratio(alone[1], "ddp", CARDS)
            say(f"{stage.name}: tokens/s, two cards / the other card {found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]")
    for name in alone:
        stage.arms[name].end()
    shared = stage.begin(
        "fsdp2, compiled", "fsdp2, layers let go of", "fsdp2, plain layers", within=0.65 * stage.left()
    )
    if "ddp" in stage.ready and shared:
        beside(stage, "ddp", shared, stage.until - 0.35 * stage.left())
    for name in ("ddp", "fsdp2, compiled", "fsdp2, layers let go of"):
        stage.arms[name].end()
    if "fsdp2, plain layers" in shared and stage.begin("ddp, plain layers"):
        beside(stage, "ddp, plain layers", ["fsdp2, plain layers"], stage.until - 3)


def beside(stage: Stage, whole: str, shared: list[str], until: float) -> None:
    """Steps of DDP and of FSDP2 in turn."""
    times = stage.turns([whole, *shared], until, min(stage.given.rounds, 12))
    stage.report(times, f"; beside {', '.join(shared)}")
    for name in shared:
        if times.both(name, whole):
            stage.bench.goal(f"{stage.name}: a step, {name} / {whole}", times.ratio(name, whole), 1.1, least=False)


def scaling(stage: Stage, times: Times, aim: float) -> None:
    """Tokens a second of two cards to those of one."""
    if not times.both("one card", "ddp"):
        stage.report(times)
        return
    found = times.ratio("one card", "ddp", CARDS)
    stage.report(times, f"; two cards / one {found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]")
    stage.bench.goal(f"{stage.name}: tokens/s, two cards / one", found, aim, least=True)


def full(stage: Stage) -> None:
    """One arm after the other; steps of all are of the same length, so they are paired as they come."""
    found = Times({})
    order = ["ours, compiled", "trl under accelerate's fsdp2", "fully_shard, compiled", "ours, plain layers"]
    for number, name in enumerate(order):
        share = 2 * stage.left() / (len(order) - number)
        begun = time.monotonic()
        if stage.begin(name, within=share):
            times = stage.turns([name], max(begun + share, time.monotonic() + 20), min(stage.given.rounds, 8), 2)
            stage.report(times)
            found.ms |= times.ms
            found.peaks |= times.peaks
        stage.arms[name].end()
    for ours in ("ours, compiled", "ours, plain layers"):
        if found.both(ours, "trl under accelerate's fsdp2"):
            told = found.ratio("trl under accelerate's fsdp2", ours)
            stage.bench.goal(f"{stage.name}: speed, {ours} / TRL's", told, 1.3, least=True)
        if found.both(ours, "fully_shard, compiled"):
            told = found.ratio(ours, "fully_shard, compiled")
            stage.bench.goal(f"{stage.name}: a step, {ours} / plain fully_shard", told, 1.05, least=False)


def moe(stage: Stage) -> None:
    """One card beside two; a whole mixture fits on a card once, so its arms then come one after the other."""
    names = ["one card", "ddp"]
    if stage.given.moe_layers <= 24:  # twice on the first card: 34 GiB each
        if stage.begin(*names, within=0.6 * stage.left()):
            until = stage.until - 0.4 * stage.left()
            scaling(stage, stage.turns(sorted(stage.ready, reverse=True), until, stage.given.rounds), 1.9)
        for name in names:
            stage.arms[name].end()
        if stage.left() > 20 and stage.begin("fsdp2"):  # whose experts the kernels read where they are put together
            stage.report(stage.turns(["fsdp2"], stage.until - 3, 5))
        return
    found = Times({})
    for number, name in enumerate(names):
        share = stage.left() / (len(names) - number)
        if stage.begin(name):
            times = stage.turns([name], time.monotonic() + share / 2, stage.given.rounds)
            found.ms |= times.ms
            found.peaks |= times.peaks
        stage.arms[name].end()
    scaling(stage, found, 1.9)


def divided(stage: Stage) -> None:
    """Two cards with all experts each beside two that divide them; time, and the peaks of memory."""
    for whole, *parts in (
        ("all experts, compiled", "divided, compiled"),
        ("all experts", "divided", "divided, PEFT's pass"),
    ):
        ready = stage.begin(whole, *parts, within=0.6 * stage.left()) if stage.left() > 30 else []
        if whole in ready and len(ready) > 1:
            times = stage.turns(ready, stage.until - 0.4 * stage.left(), stage.given.rounds)
            stage.report(times)
            for name in (name for name in parts if times.both(name, whole)):
                found = times.ratio(name, whole)
                say(f"{stage.name}: a step, {name} / {whole} {found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]")
        for name in (whole, *parts):
            stage.arms[name].end()


def save(stage: Stage) -> None:
    """Checkpoints of a run that goes on: what each keeps it waiting for, and its steps while one is written."""
    (name,) = stage.arms
    if not stage.begin(name):
        return
    arm, run = stage.arms[name], stage.run_of(name)
    usual = statistics.median(arm.steps(stage.until, 1)["ms"] for _ in range(4))
    waits: list[float] = []
    lasted = 0.0
    for number in range(CHECKPOINTS):
        if number and stage.left() < 1.2 * lasted:
            say(f"{stage.name}: no time for more than {number} checkpoints")
            break
        begun = time.monotonic()
        try:
            found = arm.steps(stage.until, 1, save=True)
            waits.append(found["waited"])
            parts = {key.removeprefix("wait: "): each for key, each in found.items() if key.startswith("wait: ")}
            beside = [arm.steps(stage.until, 1)["ms"] for _ in range(3)]
            arm.order("settle")
            for each in arm.answers(stage.until):
                for key, took in each.items():
                    if key.startswith("beside: "):
                        parts[key] = max(took, parts.get(key, 0.0))
        except Fell as problem:
            stage.failed(name, problem)
            break
        lasted = time.monotonic() - begun
        told: dict[str, Any] = next(
            (
                each
                for each in reversed(events_of(run))
                if each["kind"] == "checkpoint" and each["state"] == "committed"
            ),
            {},
        )
        say(
            f"{stage.name}: checkpoint {number + 1} kept the training waiting for {waits[-1]:.3f} s; written whole after "
            f"{told.get('seconds', 0):.1f} s, {told.get('bytes', 0) / 2**30:.1f} GiB; steps meanwhile "
            f"{', '.join(f'{each:.0f}' for each in beside)} ms, else {usual:.0f}\n"
            f"    | of the wait, by the slowest rank: {', '.join(f'{key} {each:.3f} s' for key, each in parts.items())}"
        )
        for path in run.checkpoints.iterdir():  # the disk has room for one
            shutil.rmtree(path, ignore_errors=True)
    if not waits:
        return
    stage.bench.add(
        f"cards_{stage.name}", f"{stage.bench.shape_of(stage.part)} with optimizer; training waits, {len(waits)} checkpoints",
        "ours, fsdp2", ms=[1e3 * each for each in waits],
    )  # fmt: skip
    longest = max(waits)
    what = f"{stage.name}: seconds that training waits, longest of {len(waits)}"
    stage.bench.goal(what, (longest, min(waits), longest), 3.0, least=False)


def overhead(stage: Stage) -> None:
    """The same settings in both: what events, receipt, telemetry and requests cost on two ranks."""
    ours, theirs = stage.arms
    if len(stage.begin(ours, theirs)) < 2:
        return
    times = stage.turns([ours, theirs], stage.until - 3, stage.given.rounds, 1 if stage.bench.tiny else 4)
    stage.report(times)
    if times.both(ours, theirs):
        found = times.ratio(ours, theirs)
        what = f"{stage.name}: a step of two ranks, ours / TRL's, upper end"
        stage.bench.goal(what, found, 1.03, least=False, bound=found[2])


def context(stage: Stage) -> None:
    """`context_parallel.py`, whose last line has the ratio and the share of memory."""
    if stage.bench.tiny:
        say("context: left out, gloo has no ring; it needs two cards")
        return
    told = ["--parts", "long", "--seconds", f"{stage.left() - 10:.0f}", "--layers", str(stage.given.context_layers)]
    told += ["--keep", str(stage.place / "runs")]
    if stage.given.results is not None:
        told += ["--results", str(stage.given.results), "--commit", stage.given.commit]
    process = subprocess.Popen(
        [sys.executable, "-u", str(HERE / "context_parallel.py"), *told],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    timer = subprocess.Popen([sys.executable, "-c", _END, str(process.pid), f"{stage.left():.0f}"])
    try:
        assert process.stdout is not None
        for line in process.stdout:
            say(line.rstrip()[:2000])
            if line.startswith("{") and "faster" in (found := json.loads(line)):
                for what, value, aim, least in ((f"speed, {found['name']} / one card", found["faster"], 1.8, True),
                                                (f"memory, {found['name']} / one card", found["memory"], 0.55, False)):  # fmt: skip
                    stage.bench.goal(f"{stage.name}: {what}", (value, value, value), aim, least=least)
    finally:
        timer.kill()
        timer.wait()
        _kill(process)


_END = "import os, signal, sys, time; time.sleep(float(sys.argv[2])); os.killpg(int(sys.argv[1]), signal.SIGKILL)"


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


_BEST = {**LORA, **CUT}
_MIXTURE = {
    **LORA, **CUT, "kernels.fused_experts": True, "adapter.target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "adapter.target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}  # fmt: skip
PARTS: dict[str, Part] = {
    "lora": Part(
        235, "8b", _BEST,
        (
            Spec("one card", processes=1, wanted=COMPILED),
            Spec("the other card", processes=1, wanted=COMPILED, card=1),
            Spec("ddp", settings=DDP, wanted=COMPILED),
            Spec("fsdp2, compiled", settings=FSDP2, wanted=COMPILED),
            Spec("fsdp2, layers let go of", settings={**FSDP2, **LET_GO}, wanted=COMPILED),
            Spec("fsdp2, plain layers", settings=FSDP2),
            Spec("ddp, plain layers", settings=DDP),
        ),
        lora,
    ),
    "full": Part(
        230, "8b", {**FULL, **CUT, **FSDP2},
        (
            Spec("ours, compiled", wanted=COMPILED),
            Spec("trl under accelerate's fsdp2", kind="trl"),
            Spec("fully_shard, compiled", kind="fully_shard", wanted=COMPILED),
            Spec("ours, plain layers"),
        ),
        full,
    ),
    "moe": Part(
        130, "30b-a3b", _MIXTURE,
        (Spec("one card", processes=1, wanted=COMPILED), Spec("ddp", settings=DDP, wanted=COMPILED),
         Spec("fsdp2", settings=FSDP2)),
        moe, "tiny mixture",
    ),
    "ep": Part(
        150, "30b-a3b", {**_MIXTURE, **DDP},
        (
            Spec("all experts, compiled", wanted=COMPILED),
            Spec("divided, compiled", settings=DIVIDED, wanted=COMPILED),
            Spec("all experts"),
            Spec("divided", settings=DIVIDED),
            Spec("divided, PEFT's pass", settings={**DIVIDED, "kernels.fused_experts": False}),
        ),
        divided, "tiny mixture",
    ),
    "save": Part(120, "8b", {**FULL, **CUT, **FSDP2}, (Spec("ours"),), save),
    "overhead": Part(
        75, "0.6b", {**LORA, **PLAIN, **DDP}, (Spec("ours"), Spec("trl, same settings", kind="trl alike")), overhead
    ),
    "context": Part(280, "8b", {}, (), context),
}  # fmt: skip


def say(text: str) -> None:
    print(text, flush=True)


def _parts(given: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, float]:
    """The parts that are asked for with the seconds of each."""
    asked = {}
    for word in given.parts or PARTS:
        name, _, seconds = word.partition(":")
        if name not in PARTS or (seconds and not seconds.replace(".", "", 1).isdigit()):
            parser.error(
                f"{word}: no part is named so; there are {', '.join(PARTS)}, with seconds after a colon or without"
            )
        asked[name] = float(seconds) if seconds else PARTS[name].seconds
    return asked


def _place(given: argparse.Namespace) -> Path:
    """Where models, rows and runs lie: what was asked for, else main memory where it has room for a checkpoint, as disks of
    lent machines are slow; how long training waits does not hang on it."""
    if given.place is not None:
        given.place.mkdir(parents=True, exist_ok=True)
        return Path(given.place)
    memory = Path("/dev/shm")
    wants = 2 * GIB_A_CHECKPOINT << 30
    try:
        if given.shape is None and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > wants:
            return memory
    except OSError:
        pass
    return Path(tempfile.gettempdir())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", metavar="PART[:SECONDS]", help=f"of {', '.join(PARTS)}; all where none is named"
    )
    parser.add_argument(
        "--seconds", type=float, default=520, help="of all parts together; none takes longer than is left"
    )
    parser.add_argument("--logs", type=Path, default=Path("two_cards"), metavar="FOLDER", help="what each rank says")
    parser.add_argument("--place", type=Path, metavar="FOLDER", help="where models, rows and checkpoints lie meanwhile")
    parser.add_argument("--shape", choices=["tiny"], help="on a CPU, with gloo")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each arm at most")
    parser.add_argument("--window", type=int, default=1, help="steps of a turn")
    parser.add_argument("--layers", type=int, default=0, help="of 8B's 36; fewer where time is short")
    parser.add_argument("--moe-layers", type=int, default=8, help="of 30B-A3B's 48")
    parser.add_argument(
        "--context-layers", type=int, default=12, help="of 8B's 36 in the part `context`; all take some 330 seconds"
    )
    parser.add_argument("--no-compile", action="store_true", help="no arm compiles its layers")
    parser.add_argument("--check", action="store_true", help="exit 1 where an arm or a part failed")
    result_options(parser)
    given = parser.parse_args()
    begun = time.monotonic()
    asked = _parts(given, parser)
    if given.shape == "tiny":
        given.tokens = min(given.tokens, 64)
    elif len(cards()) < CARDS:
        parser.error(f"{CARDS} cards are needed and {len(cards())} found; --shape tiny runs on a CPU")
    given.logs = given.logs.resolve()
    given.logs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _leave)
    root = Path(tempfile.mkdtemp(prefix="two-cards-", dir=_place(given)))
    bench = Bench(given, root)
    say(f"runs in {root}, logs in {given.logs}")
    try:
        bench.start(list(asked))
        for name, seconds in asked.items():
            measure(bench, name, min(seconds, given.seconds - (time.monotonic() - begun)))
    finally:
        for arm in bench.started.values():
            arm.end()
        shutil.rmtree(root, ignore_errors=True)
        say("\n".join(["", "| goal |", "| --- |", *(f"| {words} |" for words in bench.goals)]))
    say(f"{time.monotonic() - begun:.0f} s in all")
    return int(given.check and not bench.sound)


def measure(bench: Bench, name: str, seconds: float) -> None:
    """One part within its seconds; whatever goes wrong is said and the next one begins."""
    if seconds < 20:
        say(f"== {name}: no time is left for it")
        return
    say(f"== {name}: {seconds:.0f} s at most")
    begun = time.monotonic()
    stage = Stage(bench, name, PARTS[name], begun + seconds)
    try:
        stage.part.run(stage)
    except Exception as problem:  # noqa: BLE001 - one part's failure is a finding, the others go on
        bench.sound = False
        say(f"{name}: FAILED {type(problem).__name__}: {problem}\n{traceback.format_exc()}")
    finally:
        stage.end()
        shutil.rmtree(stage.place, ignore_errors=True)
    say(f"== {name}: {time.monotonic() - begun:.0f} s")


def _leave(*_: int | FrameType | None) -> None:
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(main())
