"""A step of each method, ours against the plain library trainer with the same settings and against its own defaults.

    python benchmarks/gpu_methods.py --shape 8b --arms plain ours "cut, compiled" [--methods sft dpo] [--seconds 200]
                                     [--profile ARM] [--results FILE --commit HASH]
    python benchmarks/gpu_methods.py --shape tiny --methods all --arms plain ours cut --rounds 1 --check

LoRA r=16 on all linear layers of a Qwen3 shape (with --full every weight of it), random weights made on the card in bf16,
4 sequences of 2,048 tokens a step (16 answers of `--answer` tokens where a method generates). The plain trainer of each method is
that of `_peers.py`; where no library has one (PPO, stored probabilities of a teacher), or it is not installed, features are
measured against ours without them. All arms of a method share the
frozen base (those named `fp8 base` round its layers to a copy of their own) and train at the same time, each in a thread of
its own: a step of one, then a step of the next, in an order that turns, so what slows the card down slows all. Each runs its trainer's own loop, ours with events, receipt and
telemetry. Times are from the release of a trainer to the end of its step on the device, or of its `--window` of steps;
the ratio is that of the medians, its 95 % interval from drawing the rounds again. The peak is what an arm alone would
take: its weights, its optimizer and its step. Loss and gradient norm of the first step, from one seed, are compared with
the first arm's and told; with --check the exit code is 1 where they lie apart or an arm fell.
The shape `tiny` is float32 and runs without a card, which shows that the arms run and agree, and no time of interest.
`--profile` prints where the device's time in one step of an arm goes. Rows are written as soon as they are known.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import logging
import math
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from _figures import Results, ratio, result_options
from _method_rows import GENERATES, method_rows, reward_names, rows_a_step
from _peers import NoPeer, plain_trainer
from _profile import profile
from peft import get_peft_model
from transformers import PrinterCallback, Qwen3Config, TrainerCallback

from engine.config.files import as_yaml
from engine.config.method import METHODS
from engine.config.schema import read, resolved
from engine.data.collate import collator_for
from engine.data.look import look_at
from engine.errors import WorkbenchError
from engine.models.adapters import add_adapter, lora_config
from engine.models.fp8_base import compute_in_fp8
from engine.models.load import LOADERS
from engine.patches.plan import Patches
from engine.run.control import Controls
from engine.run.late import LateWriter
from engine.run.store import create
from engine.trainers.job import Job
from engine.trainers.receipt import receipt
from engine.trainers.table import method as module_of
from engine.trainers.watching import Watching

SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8b": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
KERNELS = "kernels.use_cut_ce", "kernels.torch_compile"
ON = dict.fromkeys(KERNELS, True)
ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "default": {},
    "ours": {},
    "cut": {"kernels.use_cut_ce": True},
    "fused": {"kernels.fused_attn_kernel": True},
    "compiled": {"kernels.torch_compile": True},
    "lora": {"kernels.fused_lora": True},
    "cut, lora": {"kernels.fused_lora": True, "kernels.use_cut_ce": True},
    "cut, fused, lora": {"kernels.fused_lora": True, "kernels.use_cut_ce": True, "kernels.fused_attn_kernel": True},
    "cut, compiled": ON,
    "all three": {**ON, "kernels.fused_attn_kernel": True},
    "cut, compiled, medium": {**ON, "memory.gradient_checkpointing": "medium"},
    "cut, compiled, selective": {**ON, "memory.gradient_checkpointing": "selective"},
    "cut, compiled, auto": {**ON, "memory.gradient_checkpointing": "auto"},
    "cut, compiled, none": {**ON, "memory.gradient_checkpointing": False},
    "cut, compiled, streamed": {**ON, "memory.layer_offloading": True},
    "cut, compiled, graphs": {**ON, "kernels.torch_compile_options": {"triton.cudagraphs": True}},
    "cut, compiled, none, graphs": {
        **ON,
        "memory.gradient_checkpointing": False,
        "kernels.torch_compile_options": {"triton.cudagraphs": True},
    },
    "cut, all auto": {
        "kernels.use_cut_ce": True,
        "kernels.torch_compile": "auto",
        "memory.gradient_checkpointing": "auto",
    },
    "all three, none": {**ON, "kernels.fused_attn_kernel": True, "memory.gradient_checkpointing": False},
    "none": {"memory.gradient_checkpointing": False},
    "fp8 base": {**ON, "model.quantization": "fp8"},
    "fp8 base, none": {**ON, "model.quantization": "fp8", "memory.gradient_checkpointing": False},
    "fp8 base, medium": {**ON, "model.quantization": "fp8", "memory.gradient_checkpointing": "medium"},
    "fp8 base, eager": {"kernels.use_cut_ce": True, "model.quantization": "fp8"},
    "offloaded": {"memory.activation_offloading": "cpu"},
    "on disk": {"memory.activation_offloading": "disk"},
}
"""Settings on top of the common ones. `plain` is TRL with the same settings, `default` TRL as it comes (autocast, float32
adapters), `ours` the same settings with no feature on."""
WARM = 3
NEAR = {"float32": 1e-4, "bfloat16": 5e-2, "fp8": 2e-1}
"""How far loss and gradient norm of a first step may lie from the first arm's, relative to it: two orders of rounding, and
of FP8 a few of its roundings."""
CARD = torch.cuda.is_available()


class Baton(TrainerCallback):
    """Holds a trainer after each few steps until it is released again."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.go, self.there = threading.Event(), threading.Event()
        self.over, self.failed = False, ""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._hold()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.steps == 0:
            wait()
            self._hold()
        control.should_training_stop = self.over

    def _hold(self) -> None:
        self.there.set()
        self.go.wait()
        self.go.clear()

    def release(self) -> None:
        """Its next steps; returns when the device has done them. Raises RuntimeError when its trainer fell."""
        self.there.clear()
        self.go.set()
        self.there.wait()
        if self.failed:
            raise RuntimeError(self.failed)


class Arm:
    """One trainer in its thread, and what its steps took."""

    def __init__(self, name: str, trainer: Any, close: Callable[[], None], told: str, steps: int) -> None:
        self.name, self.trainer, self.close, self.told = name, trainer, close, told
        self.baton = Baton(steps)
        trainer.add_callback(self.baton)
        trainer.remove_callback(PrinterCallback)
        self.times: list[float] = []
        self.first = math.nan, math.nan
        self.peak, self.failed, self.sound = 0, "", True
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()
        self.baton.there.wait()

    def _train(self) -> None:
        try:
            self.trainer.train()
        except Exception as problem:  # noqa: BLE001 - one arm's failure is a finding, the others go on
            traceback.print_exc()
            self.baton.failed = f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}"
        self.baton.there.set()

    def step(self) -> float:
        wait()
        held = torch.cuda.memory_allocated()
        if CARD:
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        self.baton.release()
        took = (time.perf_counter() - begun) * 1e3 / self.baton.steps
        self.peak = torch.cuda.max_memory_allocated() - held
        return took

    def warm(self) -> list[float]:
        """The first steps, from a seed that all arms begin with; notes loss and gradient norm of the very first."""
        torch.manual_seed(0)
        took = [self.step() for _ in range(WARM)]
        told = self.trainer.state.log_history[0]
        self.first = told["loss"], float(told["grad_norm"])
        return took

    def apart(self, other: Arm) -> float:
        """By how much of the other's loss and gradient norm the first ones differ, the larger of the two.

        A loss that the signs of advantages make nearly nothing is held against the norm.
        """
        (loss, norm), (their_loss, their_norm) = self.first, other.first
        return max(abs(loss - their_loss) / max(abs(their_loss), their_norm), abs(norm - their_norm) / their_norm)

    def alone(self) -> float:
        """MiB that the arm would take at its peak with the card to itself."""
        model = self.trainer.model
        weights = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in (*model.parameters(), *model.buffers())
        }
        states = self.trainer.optimizer.state.values() if self.trainer.optimizer is not None else ()
        held = sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))
        return (sum(weights.values()) + held + self.peak) / 2**20

    def end(self) -> None:
        self.baton.over = True
        self.baton.go.set()
        self.thread.join(60)
        self.close()


def settings(options: argparse.Namespace, method: str, arm: dict[str, Any], folder: Path) -> Any:
    """The run's config, with `auto` resolved for this card and shape."""
    kind: dict[str, Any] = {"kind": method}
    if method in GENERATES:
        length = min(options.answer, options.tokens)
        kind |= {"reward_funcs": reward_names(method), "max_completion_length": length, "beta": 0.0}
        kind |= {} if method == "ppo" else {"num_generations": 8}
    mapping: dict[str, Any] = {
        "version": 1,
        "model": {"name": str(folder), "dtype": precision(options)},
        "method": kind,
        "adapter": {"kind": "none"} if options.full else {"kind": "lora", "r": 16, "lora_alpha": 32},
        "data": {"train": [{"path": "builtin/dates"}], "max_length": options.tokens,
                 "packing": method == "sft" and not options.ragged,
                 "shuffle": method != "kto"},  # TRL's KTO takes rows as they come
        "optim": {
            "per_device_train_batch_size": rows_a_step(method, options.rows), "gradient_accumulation_steps": 1,
            "max_steps": 100_000, "learning_rate": 1e-4,
        },
        "memory": {"gradient_checkpointing": True},
        "kernels": {"torch_compile": False},
        "run": {"save_steps": 1_000_000},
    }  # fmt: skip
    for path, value in arm.items():
        section, name = path.split(".")
        mapping[section][name] = value
    reading = read(mapping)
    wrong = [found.message for found in reading.findings if found.severity == "error"]
    if wrong:
        raise SystemExit(f"{method}: {wrong}")
    return resolved(reading.config, look_at(reading.config, sources=False))


def precision(options: argparse.Namespace) -> str:
    """Of the base and of what is trained."""
    return "float32" if options.shape == "tiny" and not any(map(in_fp8, options.arms)) else "bfloat16"


def in_fp8(arm: str) -> bool:
    """Whether the arm rounds its own copy of the frozen layers to FP8."""
    return ARMS[arm].get("model.quantization") == "fp8"


class Builder:
    """Makes the arms of one method around one frozen base."""

    def __init__(self, options: argparse.Namespace, method: str, folder: Path, tokenizer: Any) -> None:
        self.options, self.method, self.folder, self.tokenizer = options, method, folder, tokenizer
        size = SHAPES[options.shape]
        few = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936} if options.shape != "tiny" else {}
        self.shape = Qwen3Config(
            **size, **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, **few},
            tie_word_embeddings=options.shape != "8b", pad_token_id=0, num_labels=2 if method == "prm" else 1,
            classifier_dropout=0.0,
        )  # fmt: skip
        self.shape.architectures = ["Qwen3ForCausalLM"]
        self.shape.save_pretrained(folder)
        self.shape._name_or_path = str(folder)  # where a copied reference is loaded from, ours and the library's
        self.device = "cuda" if CARD else "cpu"
        self.weights: dict[str, torch.Tensor] | None = None
        self.rows = method_rows(method, options.tokens, self.shape.vocab_size, tokenizer, ragged=options.ragged)

    def base(self) -> Any:
        kind = getattr(transformers, LOADERS[METHODS[self.method].head])
        torch.manual_seed(0)
        with torch.device(self.device):
            model = kind.from_config(copy.deepcopy(self.shape), dtype=getattr(torch, precision(self.options)))
        if self.weights is None:
            self.weights = model.state_dict()
            if self.options.full:
                self.weights = {name: weight.clone() for name, weight in self.weights.items()}
                model.save_pretrained(self.folder)
        else:
            own = {name: weight.clone() if self.options.full else weight for name, weight in self.weights.items()}
            model.load_state_dict(own, assign=True)
            model.tie_weights()
        return model

    def arm(self, name: str) -> Arm:
        config = settings(self.options, self.method, ARMS[name], self.folder)
        place = Path(tempfile.mkdtemp(dir=self.folder.parent))
        if name in ("plain", "default"):
            return Arm(name, self.theirs(config, place, name == "default"), lambda: None, "", self.options.window)
        model = self.base()
        if in_fp8(name):
            compute_in_fp8(model, least=0 if self.options.shape == "tiny" else None)
        model = add_adapter(model, config)
        patches = Patches(config, place)
        patches.on_model(model)
        run = create(place, as_yaml({"version": 1}), {})
        stack = contextlib.ExitStack()
        writer = stack.enter_context(LateWriter(run))
        stack.callback(patches.undo)
        opening = {"method": self.method, "model": "bench", "devices": []}
        watching = Watching(run, writer, Controls(run, writer), opening, 1, [], 1, list)
        collator = collator_for(config, self.tokenizer)
        job = Job(config, run.path, model, self.tokenizer, collator, self.rows, callbacks=[watching])
        trainer = module_of(self.method).build(job)
        trainer.args.save_strategy = "no"
        watching.trainer = trainer
        trainer.attach(run, writer, 2, {})
        patches.on_trainer(trainer)
        prepared = argparse.Namespace(counts={"kept": len(self.rows), "packs": 0}, warnings=(), fingerprint="")
        prepared.dataset = self.rows
        writer.write("receipt", entries=receipt(config, trainer, prepared) + patches.entries())
        told = f"checkpointing {config.memory.gradient_checkpointing}, compiled {config.kernels.torch_compile},"
        return Arm(name, trainer, stack.close, told, self.options.window)

    def theirs(self, config: Any, place: Path, default: bool) -> Any:
        """The library's trainer on the same rows; `default` with the precision that TRL comes with."""
        arguments = module_of(self.method).arguments(config, place)
        arguments.save_strategy = "no"
        if default:
            arguments = dataclasses.replace(arguments, bf16=CARD)
            model = self.base() if self.options.full else get_peft_model(self.base(), lora_config(config))
        else:
            model = add_adapter(self.base(), config)
        return plain_trainer(config, arguments, model, self.tokenizer, self.rows)


def compare(options: argparse.Namespace, method: str, names: list[str], until: float, results: Results) -> bool:
    """Builds, warms and steps the arms in turn until the time is over; whether all ran and began alike."""
    from engine.builtin import tiny

    sound = True

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.folder())
    with tempfile.TemporaryDirectory() as folder:
        model_folder = Path(folder) / "model"
        model_folder.mkdir()
        builder, arms = Builder(options, method, model_folder, tokenizer), []
        for name in names:
            begun = time.perf_counter()
            if begun > until:
                say(f"{method} {name}: not reached")
                continue
            try:
                arm = builder.arm(name)
                took = arm.warm()
            except NoPeer as reason:
                say(f"{method} {name}: left out, {reason}")
                continue
            except (WorkbenchError, RuntimeError, ValueError, TypeError, AttributeError) as problem:
                say(f"{method} {name}: FAILED {type(problem).__name__}: {str(problem).splitlines()[0][:300]}")
                traceback.print_exc()
                sound = False
                continue
            arms.append(arm)
            apart = arm.apart(arms[0])
            agrees = (
                apart <= NEAR["fp8" if in_fp8(name) else precision(options)] or name == "default"
            )  # which computes in another precision
            arm.sound, sound = agrees, sound and agrees
            say(
                f"{method} {name}: {arm.told} first steps {', '.join(f'{each:.0f}' for each in took)} ms, first loss "
                f"{arm.first[0]:.6g} and gradient norm {arm.first[1]:.6g}, {apart:.1e} from {arms[0].name}"
                f"{'' if agrees else ' (APART, not reported)'}, {time.perf_counter() - begun:.1f} s in all"
            )
        rounds = 0
        while arms and rounds < options.rounds and (time.perf_counter() < until or rounds < 3):
            turn = rounds % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                arm.times.append(arm.step())
            rounds += 1
        report(options, method, arms, results)
        for arm in arms:
            if arm.name == options.profile:
                profile(arm.name, arm.step)
            arm.end()
        arms.clear()
        del builder
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return sound


def report(options: argparse.Namespace, method: str, arms: list[Arm], results: Results) -> None:
    peers = {arm.name: arm for arm in arms if arm.name in ("plain", "default")}
    libraries = set(peers)
    peers = peers or {arm.name: arm for arm in arms if arm.name == "ours"}
    tokens = options.rows * options.tokens
    for arm in filter(lambda arm: arm.sound, arms):
        middle = statistics.median(arm.times)
        found = {
            peer: ratio(list(zip(arm.times, other.times, strict=True)))
            for peer, other in peers.items()
            if other is not arm
        }
        words = "".join(f"  /{peer} {mid:.4f} [{low:.4f}, {high:.4f}]" for peer, (mid, low, high) in found.items())
        say(
            f"{method:7} {arm.name:26} {middle:8.1f} ms {tokens / middle * 1e3:8.0f} tokens/s "
            f"{arm.alone() / 1024:6.2f} GiB n={len(arm.times)}{words}"
        )
        against = "".join(f"; / {peer} {mid:.3f} [{low:.3f}, {high:.3f}]" for peer, (mid, low, high) in found.items())
        results.add(
            f"step_{options.shape.replace('.', '')}_{'full' if options.full else 'lora'}_{method}",
            f"{work_of(options, method)}; {len(arm.times)} rounds{against}",
            f"{library(method)} {arm.name}" if arm.name in libraries else arm.name, ms=arm.times, peak_mib=arm.alone(),
        )  # fmt: skip


def work_of(options: argparse.Namespace, method: str) -> str:
    """The work of a step, for the rows."""
    if method in GENERATES:
        return f"{rows_a_step(method, options.rows)} answers of {options.answer}"
    return f"{options.rows}x{options.tokens}{' ragged' if options.ragged else ''}"


def library(method: str) -> str:
    """The name in the rows: whose trainer the plain one is."""
    return {"embedding": "sentence-transformers", "prm": "transformers"}.get(method, "trl")


def wait() -> None:
    """Until the device has done all that it was given; on a CPU, where this script only shows that it runs, at once."""
    if CARD:
        torch.cuda.synchronize()


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument(
        "--methods", nargs="*", default=["sft"], choices=[*METHODS, "all"], help="all: one after the other"
    )
    parser.add_argument("--arms", nargs="*", default=["plain", "ours", "cut, compiled"], choices=list(ARMS))
    parser.add_argument("--full", action="store_true", help="all weights are trained, and no adapter")
    parser.add_argument("--rows", type=int, default=4, help="sequences a step")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer, where a method generates")
    parser.add_argument(
        "--ragged", action="store_true", help="rows of many lengths, padded; tokens/s then count padding"
    )
    parser.add_argument("--rounds", type=int, default=25, help="steps of each arm at most")
    parser.add_argument("--window", type=int, default=1, help="steps of an arm before the next has its turn")
    parser.add_argument("--seconds", type=float, default=200, help="no round is begun later than this")
    parser.add_argument("--profile", choices=list(ARMS), help="the kernels of one step of this arm")
    parser.add_argument("--check", action="store_true", help="exit 1 where an arm fell or began apart from the first")
    result_options(parser)
    options = parser.parse_args()
    methods = list(METHODS) if "all" in options.methods else options.methods
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    begun = time.perf_counter()
    device = torch.cuda.get_device_name() if CARD else "cpu"
    say(json.dumps({"device": device, "torch": torch.__version__, "shape": options.shape}))
    results = Results(options, device, "torch", "triton")
    sound = True
    for place, method in enumerate(methods):
        left = options.seconds - (time.perf_counter() - begun)
        until = time.perf_counter() + left / (len(methods) - place)
        sound = compare(options, method, options.arms, until, results) and sound
    return int(options.check and not sound)


if __name__ == "__main__":
    sys.exit(main())
