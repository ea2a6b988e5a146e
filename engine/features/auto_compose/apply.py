"""`kernels.kernel_auto_compose`: which kernels a run takes, chosen by timing their combinations on its own model.

Free is each of `use_cut_ce`, `fused_attn_kernel`, `use_liger_kernel`, `fused_experts`, `fused_lora` and `torch_compile` that
was left at `auto` and has a place in this model and on this machine; beside `torch_compile` neither `fused_lora` nor
`use_liger_kernel` is on. Of Liger's kernels each part is timed by itself first, and those that are faster than nothing are what
the combinations have. Every combination is
applied and taken back by the features' own functions, in turns; timed are forward passes without gradients, and passes
with gradients, which are asked for by name and so land nowhere. No training step is taken: weights, gradients, inputs and
random numbers are afterwards what they were. A combination that raises, changes its inputs or has no finite time is told
with its reason and never taken; if all are so, the run ends.

Times differ between two looks, so they are taken once: `kernels.json` in the run folder keeps the table and the choice
(`composed`), and a run that is resumed on the same device and versions goes on with what it had. Between any two passes a
person may stop the run.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from engine.compat.instances import atomic, in_mode
from engine.compat.trl_head import head_settings
from engine.config.facts import Facts
from engine.config.kernels import LIGER_PARTS
from engine.config.tree import RunConfig, fields
from engine.errors import Cancelled, ModelError
from engine.features import compile as compile_rules
from engine.features import cut_cross_entropy as cut_rules
from engine.features import failures
from engine.features import fused_experts as experts_rules
from engine.features import fused_lora as lora_rules
from engine.features import fused_norm_rope as norm_rope_rules
from engine.features import liger_kernel as liger_rules
from engine.features.applied import Applied
from engine.features.auto_compose import stored
from engine.features.built import Built, base_model
from engine.features.compile import SHARED
from engine.features.compile import apply as compiled
from engine.features.cut_cross_entropy import apply as cut_cross_entropy
from engine.features.feature import refusal
from engine.features.fused_experts import apply as fused_experts
from engine.features.fused_lora import apply as fused_lora
from engine.features.fused_norm_rope import apply as fused_norm_rope
from engine.features.liger_kernel import apply as liger_kernel
from engine.hardware import installed
from engine.kernels.device import lacking

FEATURE = "kernels by timing"
ROWS, LENGTH, STEPS, VOCABULARY = 32, 512, 50, 200_000
"""The most of each that is timed: rows of a batch, tokens of a row, passes of a combination, tokens of the vocabulary."""
ROUNDS, FEWEST, SECONDS = 14, 3, 30.0
"""Rounds over all combinations: at most, at least, and how long they may take together where more than the least fit."""
SAME = 1.02
"""Of combinations within 2 % of the fastest the one with the fewest kernels is taken: less is noise."""
LIGER = liger_rules.SETTING.name
NOT_TOGETHER = ({"fused_lora", "torch_compile"}, {LIGER, "torch_compile"})
"""Settings of which one is off: compiled layers take adapters together, and norms and gates with what is around them."""
_RULED = (cut_rules, norm_rope_rules, liger_rules, experts_rules, lora_rules, compile_rules)
_TURN_OFF = "Set kernels.kernel_auto_compose to false."
_OFF = {"kernels.kernel_auto_compose": False}


@dataclass(frozen=True)
class Choice:
    """A setting of the kernels section that may be free: what applies it, and why it has no place, if it has none."""

    setting: str
    summary: str
    apply: Callable[[RunConfig, Built], Applied | None]
    lacking: Callable[[RunConfig, Built], str | None]


@dataclass
class Trial:
    """One combination and what was measured of it, in seconds; `why` says why it is out."""

    on: tuple[str, ...]
    first: float | None = None
    forward: list[float] = field(default_factory=list)
    both: list[float] = field(default_factory=list)
    why: str = ""

    def seconds(self) -> float:
        """What is compared: the median of passes with gradients, infinite where it is out."""
        found = [statistics.median(times) for times in (self.forward, self.both) if times]
        return found[-1] if len(found) == 2 and all(map(math.isfinite, found)) and not self.why else math.inf


def _no_cut(config: RunConfig, built: Built) -> str | None:
    if (reason := _refused(config, "use_cut_ce")) is not None:
        return reason
    heads = cut_cross_entropy.fused_heads(built)
    if not heads:
        return "this method has no vocabulary head"
    matrix = heads[0].get_output_embeddings()
    if (reason := cut_cross_entropy.refusal(matrix)) is not None:
        return reason
    size = matrix.weight.shape[0]
    return f"a vocabulary of {size:,} is above the {VOCABULARY:,} that are timed" if size > VOCABULARY else None


def _no_fused(config: RunConfig, built: Built) -> str | None:
    if (reason := _refused(config, "fused_attn_kernel")) is not None:
        return reason
    layers = fused_norm_rope.attention_layers(built)
    if not layers:
        return "the model has no attention layer that it serves"
    missing = lacking(next(layers[0].parameters()).device)
    return None if missing is None else f"it needs {missing}"


def _no_liger(config: RunConfig, built: Built) -> str | None:
    return liger_kernel.why_not(built) or _refused(config, LIGER)


def _no_experts(config: RunConfig, built: Built) -> str | None:
    return _refused(config, "fused_experts") or fused_experts.why_not(built)


def _no_lora(config: RunConfig, built: Built) -> str | None:
    return _refused(config, "fused_lora") or fused_lora.why_not(built)


def _no_compile(config: RunConfig, built: Built) -> str | None:
    if not built.decoder_layers():
        return "the model has no decoder layers"
    if (reason := _refused(config, "torch_compile")) is not None:
        return reason
    return SHARED if built.shares_prompts else compiled.refusal()


def _refused(config: RunConfig, setting: str) -> str | None:
    """Why the config's other settings leave this one no place, by the rules of what would then be on, or None."""
    on = config.with_values({fields[f"kernels.{setting}"]: True})
    for feature in _RULED:
        if (found := refusal(feature, on, Facts())) is not None and refusal(feature, config, Facts()) is None:
            return found.todo.rstrip(".")
    return None


CHOICES = (
    Choice("use_cut_ce", "cut cross-entropy", cut_cross_entropy.apply, _no_cut),
    Choice("fused_attn_kernel", "fused norm and rotary", fused_norm_rope.apply, _no_fused),
    Choice(LIGER, "Liger kernels", liger_kernel.apply, _no_liger),
    Choice("fused_experts", "fused experts", fused_experts.apply, _no_experts),
    Choice("fused_lora", "fused LoRA", fused_lora.apply, _no_lora),
    Choice("torch_compile", "compiled layers", compiled.apply, _no_compile),
)
"""In the order in which they act in a run."""


def compose(config: RunConfig, built: Built) -> tuple[RunConfig, Applied | None]:
    """The config with its free kernels chosen, and the receipt's row; the same config and None where not asked for.

    Between passes a person may stop the run, which raises Cancelled. Raises ModelError where no combination can be timed.
    """
    if not config.kernels.kernel_auto_compose:
        return config, None
    free, lacking = _free(config, built)
    if not free:
        detail = _not_tried(lacking) or "every kernel is set by hand"
        return _with(config, (), ()), Applied(FEATURE, True, "nothing to choose", None, detail)
    model = base_model(built.policy)
    batch = _batch(config, model)
    place = {
        "device": _device_name(batch), "torch": torch.__version__, "transformers": transformers.__version__,
        "liger_kernel": installed(liger_rules.PACKAGE), "model": config.model.name, "rows": batch.shape[0], "tokens": batch.shape[1], "free": list(free),
    }  # fmt: skip
    folder = built.notes.folder
    kept = stored.kept(folder, place)
    if kept is None:
        if built.events is not None:
            built.events.write("phase", name="Timing kernels")
        kept = {**place, **_timed(config, built, free, batch)}
    kept = _of_first_rank(kept)
    problem = stored.keep(folder, kept) if built.training.args.process_index == 0 else ""
    chosen = tuple(kept["chosen"])
    config = _with_parts(config, kept[stored.PARTS])
    return _with(config, free, chosen), _applied(kept, chosen, lacking, problem)


def _timed(config: RunConfig, built: Built, free: tuple[str, ...], batch: torch.Tensor) -> dict[str, Any]:
    """What is kept of a timing: the combination taken, the table, and of Liger's parts those taken and theirs."""
    parts, alone = _time_parts(config, built, batch) if LIGER in free else ([], [])
    combined = tuple(setting for setting in free if setting != LIGER or parts)
    trials = time_all(_with_parts(config, parts), built, [_names(on) for on in _subsets(combined)], batch)
    return {
        "chosen": list(choose(trials).on), "table": [_row(trial) for trial in trials],
        stored.PARTS: parts, "parts_table": [_row(trial) for trial in alone],
    }  # fmt: skip


def _time_parts(config: RunConfig, built: Built, batch: torch.Tensor) -> tuple[list[str], list[Trial]]:
    """Liger's parts that are faster by themselves than nothing is, and the trials: of nothing, then of each part."""
    asked = [part for part in liger_rules.parts(config) if liger_rules.of_other_settings(part, config) is None]
    trials = time_all(config, built, [(), *((f"{LIGER}.{part}",) for part in asked)], batch)
    plain, *each = trials
    return [part for part, trial in zip(asked, each, strict=True) if trial.seconds() < plain.seconds()], trials


def _with_parts(config: RunConfig, parts: list[str]) -> RunConfig:
    """The config with these of Liger's parts and no other; as it is where none was taken."""
    switches = {part: part in parts for part in LIGER_PARTS}
    return config.with_values({liger_rules.PARTS: switches}) if parts else config


def _free(config: RunConfig, built: Built) -> tuple[tuple[str, ...], dict[str, str]]:
    """Settings left to be chosen that have a place here, and the others with the reason."""
    asked = [choice for choice in CHOICES if getattr(config.kernels, choice.setting) == "auto"]
    reasons = {choice.setting: choice.lacking(config, built) for choice in asked}
    return (
        tuple(setting for setting, reason in reasons.items() if reason is None),
        {setting: reason for setting, reason in reasons.items() if reason is not None},
    )


def _subsets(free: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every combination, the plain one first."""
    for size in range(len(free) + 1):
        yield from (
            on for on in itertools.combinations(free, size) if not any(pair <= set(on) for pair in NOT_TOGETHER)
        )


def _names(on: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(choice.setting for choice in CHOICES if choice.setting in on)


def _with(config: RunConfig, free: tuple[str, ...], on: tuple[str, ...]) -> RunConfig:
    """The config with these of the free settings on; what is left at auto for want of a place is off. Of Liger's kernels one
    part may be on by itself, under its dotted name."""
    part = next((name.partition(".")[2] for name in on if "." in name), None)
    if part is not None:
        return _with(_with_parts(config, [part]), (LIGER,), (LIGER,))
    settings = [choice.setting for choice in CHOICES if getattr(config.kernels, choice.setting) == "auto"]
    return config.with_values({fields[f"kernels.{setting}"]: setting in on and setting in free for setting in settings})


# -- timing ------------------------------------------------------------------------------------------------------------
def time_all(config: RunConfig, built: Built, combinations: list[tuple[str, ...]], batch: torch.Tensor) -> list[Trial]:
    """Times every combination on token ids `batch` [rows, tokens], in turns; leaves model and random numbers as they were.

    Raises ModelError if a combination leaves a weight or a gradient changed.
    """
    trials, model, trainer = [Trial(on) for on in combinations], base_model(built.policy), built.training
    # Nobody asked for what is only timed, and a failure of it is a reason to leave it out; none of it is told as training.
    built = replace(built, notes=replace(built.notes, reasons={}), events=None)
    if trainer.args.gradient_checkpointing:
        # As `train` would turn it on: what is computed again is part of the time.
        trainer.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs
        )
    before = _weights_state(model)
    devices = [batch.device.index] if batch.is_cuda else []
    try:
        with torch.random.fork_rng(devices=devices), in_mode(trainer.model, training=True):
            spent = sum(_attempt(config, built, trial, batch, warm=True) for trial in trials)
            rounds = max(FEWEST, min(ROUNDS, int(SECONDS / max(spent, 1e-9))))
            for _ in range(rounds):
                for trial in trials:
                    if not trial.why:
                        _attempt(config, built, trial, batch)
    finally:
        _forget(any("torch_compile" in trial.on for trial in trials))
    if _weights_state(model) != before:
        raise ModelError(
            "kernels.kernel_auto_compose: a kernel changed the model's weights while it was timed.", _TURN_OFF
        ).mended_by(_OFF)
    return trials


def choose(trials: list[Trial]) -> Trial:
    """The fastest, or the one with the fewest kernels within 2 % of it; one with Liger's kernels only where it is more than
    3 % faster than all without. Raises ModelError where none has a finite time."""
    without = [trial for trial in trials if LIGER not in trial.on]
    best = min((trial.seconds() for trial in without), default=math.inf)
    fastest = min(trial.seconds() for trial in trials)
    if math.isfinite(best) and best <= fastest * liger_rules.EARNS:
        trials, fastest = without, best
    if not math.isfinite(fastest):
        reasons = "; ".join(f"{_called(trial.on)}: {trial.why or 'no finite time'}" for trial in trials)
        raise ModelError(
            f"kernels.kernel_auto_compose: none of {len(trials)} combinations could be timed ({reasons}).", _TURN_OFF
        ).mended_by(_OFF)
    near = [trial for trial in trials if trial.seconds() <= fastest * SAME]
    return min(near, key=lambda trial: (len(trial.on), trial.seconds()))


def _attempt(config: RunConfig, built: Built, trial: Trial, batch: torch.Tensor, *, warm: bool = False) -> float:
    """One turn of a combination: applied, passed through, taken back. The seconds of its passes once it is warm.

    The first pass of a turn is not counted: what was applied anew is looked up again in it.
    """
    undo: list[Callable[[], None]] = []
    ids = batch.clone()

    def passed(gradients: bool) -> float:
        built.notes.check_stop()
        return _pass(built, ids, gradients=gradients)

    try:
        for choice in CHOICES:
            with atomic():
                applied = choice.apply(_with(config, trial.on, trial.on), built)
            if applied is not None:
                undo.append(applied.undo)
        first = passed(gradients=False)
        if not torch.equal(ids, batch):
            trial.why = "it changed its input"
            return 0.0
        if warm:
            trial.first = first + passed(gradients=True)
        forward, both = passed(gradients=False), passed(gradients=True)
        if not (math.isfinite(forward) and math.isfinite(both)):
            trial.why = "it has no finite time"
        elif not warm:
            trial.forward.append(forward)
            trial.both.append(both)
        return 2 * forward + both if not trial.why else 0.0
    except Cancelled:
        raise
    except failures.known() as problem:
        trial.why = failures.first_line(problem)
        return 0.0
    finally:
        while undo:
            undo.pop()()


def _pass(built: Built, ids: torch.Tensor, *, gradients: bool) -> float:
    """Seconds of one pass over token ids, with all gradients of what is trained or without any."""
    model = base_model(built.policy)
    trained = [weight for weight in model.parameters() if weight.requires_grad] if gradients else []
    _wait(ids)
    begun = time.perf_counter()
    with torch.set_grad_enabled(gradients), built.training.compute_loss_context_manager():
        loss = _loss(model, ids)
    if gradients:
        # Nothing is written into `.grad`, so no copy of the model is needed.
        torch.autograd.grad(loss, trained, allow_unused=True)
    _wait(ids)
    seconds = time.perf_counter() - begun
    if not math.isfinite(float(loss.detach())):
        raise ValueError("its loss is not finite")
    return seconds


def _loss(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """TRL's fused head over all tokens where the model has one, else a number from the last hidden states."""
    fused = head_settings(model) is not None
    if fused and model.get_output_embeddings().weight.shape[0] <= VOCABULARY:
        loss: torch.Tensor = model(input_ids=ids, labels=ids, fused_lm_head=True).loss
        return loss
    hidden: torch.Tensor = model.base_model(input_ids=ids, use_cache=False)[0]
    return hidden.float().square().mean()


def _batch(config: RunConfig, model: PreTrainedModel) -> torch.Tensor:
    """Token ids as large as the run's own batches, within the bounds; drawn from a generator of their own."""
    embeddings: Any = model.get_input_embeddings()
    embedding = embeddings.weight
    rows = min(config.optim.per_device_train_batch_size, ROWS)
    shape = (rows, min(config.data.max_length or LENGTH, LENGTH))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(embedding.shape[0], VOCABULARY), shape, generator=generator).to(embedding.device)


def _wait(ids: torch.Tensor) -> None:
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)


def _forget(was_compiled: bool) -> None:
    """Compiled code and what the compiler learned of shapes go, or training would be compiled for the shapes timed."""
    if was_compiled:
        torch.compiler.reset()
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


# -- telling -----------------------------------------------------------------------------------------------------------
def _of_first_rank(kept: dict[str, Any]) -> dict[str, Any]:
    """Every rank takes what the first one measured: one model is one program."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return kept
    held = [kept]
    torch.distributed.broadcast_object_list(held, src=0)
    return held[0]


def _row(trial: Trial) -> dict[str, Any]:
    """A trial for the table: medians in milliseconds, None where there is none."""
    times = {name: getattr(trial, name) for name in ("forward", "both")}
    medians = {f"{name}_ms": round(1e3 * statistics.median(all_), 3) if all_ else None for name, all_ in times.items()}
    first = None if trial.first is None else round(trial.first, 2)
    return {"on": list(trial.on), **medians, "first_s": first, "rounds": len(trial.both), "why": trial.why}


def _applied(kept: dict[str, Any], chosen: tuple[str, ...], lacking: dict[str, str], problem: str) -> Applied:
    timed = list(filter(stored.was_timed, kept["table"]))
    words = [
        f"{_called(row['on'])} {row['both_ms']:,.1f} ms, {row['forward_ms']:,.1f} of it forward, first {row['first_s']:,.1f} s"
        for row in timed
    ]
    words += [f"{_called(row['on'])} left out: {row['why']}" for row in kept["table"] if row["why"]]
    words += _liger_parts(kept)
    words += [_not_tried(lacking)] if lacking else []
    words += [problem] if problem else []
    detail = f"combinations timed on {kept['rows']} x {kept['tokens']} tokens, {kept['device']}; {'; '.join(words)}"
    return Applied(FEATURE, True, _called(chosen), len(timed), detail)


def _liger_parts(kept: dict[str, Any]) -> list[str]:
    """What was measured of Liger's parts, each by itself."""
    if not kept["parts_table"]:
        return []
    plain, *parts = (
        f"{row['both_ms']:,.1f} ms" if stored.was_timed(row) else f"left out ({row['why']})"
        for row in kept["parts_table"]
    )
    names = [row["on"][0].partition(".")[2] for row in kept["parts_table"][1:]]
    times = ", ".join(f"{name} {time}" for name, time in zip(names, parts, strict=True))
    faster = ", ".join(kept[stored.PARTS]) or "none is faster"
    return [f"Liger's parts by themselves: {times}; without {plain}; combined: {faster}"]


def _not_tried(lacking: dict[str, str]) -> str:
    return "; ".join(f"{_describe(setting)} not tried: {reason}" for setting, reason in lacking.items())


def _called(on: Any) -> str:
    return " + ".join(_describe(setting) for setting in on) or "plain"


def _describe(setting: str) -> str:
    return next(choice.summary for choice in CHOICES if choice.setting == setting)


def _device_name(batch: torch.Tensor) -> str:
    return torch.cuda.get_device_name(batch.device) if batch.is_cuda else batch.device.type


def _weights_state(model: torch.nn.Module) -> list[tuple[int, int, bool]]:
    """For each weight its place, how often it changed, and whether it has a gradient: it tells without a copy whether
    weights were written to between two calls.

    A weight that PEFT adapts by its name takes another number of changes in each pass, as it is put into a
    parametrization and taken out again; of those the content counts.
    """
    from peft.tuners.lora.layer import ParamWrapper

    from engine.kernels.experts.packed import PackedExperts

    named = {id(module.get_param()) for module in model.modules() if isinstance(module, ParamWrapper)}
    return [
        (held.data_ptr(), _content(held) if id(weight) in named else held._version, weight.grad is None)
        for weight in model.parameters()
        for held in (weight.held.numbers if isinstance(weight, PackedExperts) else weight,)
    ]


def _content(weight: torch.Tensor) -> int:
    """The sum of the weight's bytes as whole numbers."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return int(weight.detach().flatten().view(whole).sum(dtype=torch.int64))
