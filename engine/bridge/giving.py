"""Writing our config for another tool: each setting with what says it there, or with the reason why nothing does.

What is learned stands in the sections model, method, adapter, data and optim: a setting of these that the tool cannot say
refuses the whole, by name. Those of memory, kernels and run change nothing of it and are left out with a row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.bridge.keys import Answer, changed, mapped, needless, unsupported
from engine.bridge.ledger import Ledger, Row
from engine.config.data import DataSource
from engine.config.facts import Facts
from engine.config.reward_specs import BadReward, RewardSpec, reward_specs
from engine.config.section import plain
from engine.config.tree import FieldSpec, RunConfig, fields, fields_of
from engine.planning.auto import AUTO

LEARNED = ("model", "method", "adapter", "data", "optim")
"""The sections whose settings say what is learned."""
BALANCED = unsupported(
    "Good and bad answers are not balanced by their numbers there: set it to false, and the weights by hand."
)
"""KTO's weights by the numbers of good and bad answers."""
PLAIN_OPTIMIZERS = (
    "adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop", "adamw_8bit", "paged_adamw_8bit",
    "lion_32bit", "lion_8bit", "ademamix", "ademamix_8bit", "schedule_free_adamw", "galore_adamw",
)  # fmt: skip
"""Optimizers that are transformers' own, under the names that it gives them."""


@dataclass(frozen=True, slots=True)
class Giving:
    """A config on its way to another tool: the config, the folder of its file, and that of the new one."""

    config: RunConfig
    folder: Path
    out: Path
    title: str

    def place(self, name: str) -> str:
        """A path as the new file names it; names of models and data sets stay."""
        there = self.folder / os.path.expanduser(name)
        if os.path.isabs(os.path.expanduser(name)) or not there.exists():
            return name
        return Path(os.path.relpath(there, self.out)).as_posix()


Meaning = Callable[[Any, Giving], Answer]


def key(name: str, unless: Any = None) -> Meaning:
    """The same value under this key; nothing where it has the value that is there by itself."""

    def means(value: Any, giving: Giving) -> Answer:
        if value is None or (
            unless is not None and value == unless and isinstance(value, bool) == isinstance(unless, bool)
        ):
            return needless(f"It is so in {giving.title} by itself.")
        return mapped({name: value})

    return means


def placed(name: str) -> Meaning:
    """A path, or a name, under this key."""

    def means(value: Any, giving: Giving) -> Answer:
        return needless("Nothing is named.") if value is None else mapped({name: giving.place(value)})

    return means


def filled(name: str) -> Meaning:
    """A list, a mapping or a text under this key, where there is something in it."""
    return off("It is empty.", key(name))


def off(words: str, means: Meaning) -> Meaning:
    """Nothing is written where the setting is off or empty; else what `means` says."""
    return lambda value, giving: means(value, giving) if value else needless(words)


def of_new_adapter(means: Meaning) -> Meaning:
    """Of an adapter that is trained further its own folder says it."""
    there = needless("The folder of the adapter that training goes on from says it.")
    return lambda value, giving: there if getattr(giving.config.adapter, "path", None) else means(value, giving)


def always(answer: Answer) -> Meaning:
    """The same answer, whatever the value."""
    return lambda value, giving: answer


def choice(answers: Mapping[Any, Answer], otherwise: Answer) -> Meaning:
    """A value out of some, each with its own answer."""
    return lambda value, giving: answers.get(value, otherwise)


def by_itself(words: str) -> Meaning:
    """Nothing is written, whatever the value: what happens there says it."""
    return always(needless(words))


def write_for(
    name: str, title: str, table: Mapping[str, Meaning], config: RunConfig, source: str, folder: Path, out: Path
) -> Ledger:
    """The ledger of our settings, with the config that they make for the tool."""
    giving = Giving(config, folder, out, title)
    rows = [row for spec in fields_of(config) for row in _rows(spec, table, giving)]
    mapping: dict[str, Any] = {}
    for row in rows:
        for path, value in row.settings.items():
            _put(mapping, path.split("."), value)
    return Ledger(name, title, source, tuple(rows), mapping, f"Written from {source} for {title}.", "settings")


def refused(ledger: Ledger) -> list[Row]:
    """The settings that the tool cannot say and without which something else would be learned."""
    return [row for row in ledger.of("unsupported") if row.key.partition(".")[0] in LEARNED]


def _rows(spec: FieldSpec, table: Mapping[str, Meaning], giving: Giving) -> list[Row]:
    value = spec.value(giving.config)
    shown = plain(value)
    means = table.get(spec.path)
    if means is not None:
        answer = means(value, giving)
        return [Row(spec.path, shown, answer.outcome, answer.settings, answer.reason)]
    if value == spec.default and isinstance(value, bool) == isinstance(spec.default, bool):
        return []
    learned = spec.section in LEARNED
    words = f"{giving.title} has no such setting." + ("" if learned else " It changes nothing of what is learned.")
    return [Row(spec.path, shown, "unsupported", {}, words)]


def _put(place: dict[str, Any], parts: list[str], value: Any) -> None:
    for part in parts[:-1]:
        place = place.setdefault(part, {})
    place[parts[-1]] = value


def sliced(entry: DataSource) -> str | None:
    """The split of a source with the first so many rows of it; nothing where neither is said."""
    if entry.rows is None:
        return entry.split
    return f"{entry.split or 'train'}[:{entry.rows}]"


def resolved_rate(value: Any, giving: Giving) -> Answer:
    """The learning rate under its own name, `auto` as the number that it becomes."""
    if value != "auto":
        return mapped({"learning_rate": value})
    rate, reason = AUTO[fields.optim.learning_rate](giving.config, Facts())
    return changed({"learning_rate": rate}, f"auto is {reason}.")


def optimizer(key: str, more: Mapping[str, str]) -> Meaning:
    """The optimizer under this key, where the tool has the same one."""

    def means(value: Any, giving: Giving) -> Answer:
        name = more.get(value, value if value in PLAIN_OPTIMIZERS else None)
        if name is None:
            return unsupported(f"{giving.title} has none of that name, or another one: take one of transformers' own.")
        return mapped({key: name})

    return means


def of_galore(means: Meaning) -> Meaning:
    """What GaLore projects, which counts with it alone."""
    return lambda value, giving: (
        means(value, giving) if "galore" in giving.config.optim.optim else needless("It counts with GaLore.")
    )


def save_steps(counted: str) -> Meaning:
    """Steps between checkpoints, where `counted`, the key for so many an epoch, does not say it."""
    return lambda value, giving: (
        needless(f"{counted} says it.")
        if giving.config.run.saves_per_epoch is not None
        else mapped({"save_steps": value})
    )


def eval_steps(counted: str, auto: Answer) -> Meaning:
    """Steps between measurements, where there are held-out rows and `counted` does not say it."""

    def means(value: Any, giving: Giving) -> Answer:
        if not giving.config.data.evaluates:
            return needless("No rows are held out.")
        if giving.config.run.evals_per_epoch is not None:
            return needless(f"{counted} says it.")
        return auto if value == "auto" else mapped({"eval_steps": value})

    return means


def quantization(tool: str, four_bits: Callable[[str], Mapping[str, Any]]) -> Meaning:
    """The base in few bits; `four_bits` gives the tool's keys beside `load_in_4bit` for nf4 and fp4."""

    def means(value: Any, giving: Giving) -> Answer:
        if value == "none":
            return needless("Weights stay as they are by themselves.")
        if value == "int8":
            return mapped({"load_in_8bit": True})
        known = "nf4, fp4 and int8 are known there."
        if value == "fp8":
            return unsupported(f"{tool} does not hold base weights in 8-bit floating point: {known}")
        if value in ("mxfp4", "nvfp4"):
            return unsupported(f"{tool} does not pack experts into {value.upper()}: {known}")
        return mapped({"load_in_4bit": True, **four_bits(value)})

    return means


def checkpointing(value: Any, giving: Giving) -> Answer:
    """Recomputation: on or off there."""
    if isinstance(value, bool):
        return mapped({"gradient_checkpointing": value})
    words = (
        "It is chosen by the card here; there it is on or off." if value == "auto" else f"{giving.title} has no tiers."
    )
    return changed({"gradient_checkpointing": True}, words)


def attention(value: Any, giving: Giving) -> Answer:
    """Which implementation computes attention: the same mathematics, whatever it is."""
    if value == "auto":
        return needless("Each tool takes what fits by itself.")
    if value in ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"):
        return mapped({"attn_implementation": value})
    return changed({}, f"{giving.title} has no such implementation; it computes the same.")


def reference(tool: str) -> Meaning:
    """Where the reference comes from; the tool has a copy beside full weights, and else the model without its adapter."""

    def mean(value: Any, giving: Giving) -> Answer:
        if value == "precompute":
            return mapped({"precompute_ref_log_probs": True})
        adapter = giving.config.adapter
        usual = ("adapter_copy" if adapter.path else "adapter_off") if adapter.kind == "lora" else "copy"
        same = value in ("auto", usual)
        return needless("It is so by itself.") if same else unsupported(f"{tool}'s reference is {usual} here.")

    return mean


def rewards(value: list[str], giving: Giving) -> tuple[list[RewardSpec], str]:
    """The rewards read, and why they cannot be said there: the tools know functions of modules alone."""
    try:
        specs = list(reward_specs(value))
    except BadReward as problem:
        return [], str(problem)
    odd = next((spec.text for spec in specs if spec.kind not in ("function", "model")), "")
    return (
        specs,
        f"{giving.title} has no reward {odd}; a Python function, as in rewards.py:score, can be taken there."
        if odd
        else "",
    )


def module_of(spec: RewardSpec, giving: Giving) -> str | None:
    """`module.function` for a function of a file below the new config's folder."""
    parts = giving.place(spec.argument).removesuffix(".py").removeprefix("./").split("/")
    return ".".join([*parts, spec.function]) if all(part.isidentifier() for part in parts) else None
