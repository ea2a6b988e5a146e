"""What was `auto` at the launch: why it became what it is, and one second look at it, at the card's free memory and the rows.

The launch chooses by the size of a card, and takes rows that nobody has counted to be as long as they may be: prompts of 25
tokens for prompts of `data.max_length`. What else lies on the card is known to the process that trains there, and so are the
rows, once they are prepared, and how long its attention takes. Of all choices three depend on that memory. Where others hold
memory, the card is smaller than that of the launch, or the longest row is another, what is recomputed is chosen
again; and where the estimate no longer fits, no layer is left out of that, and the head gets the usual for its scores.
Sums round otherwise with another size of the head's scores, so a run keeps the one of its first start as long as that fits,
with `run.full_determinism` always. Several processes look at the rows alone, which they share, and keep what was chosen for
all of them where they are on several machines.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine import figures
from engine.config.facts import DataFacts, Facts
from engine.config.tree import RunConfig, fields
from engine.data.gather_facts import gather_facts
from engine.facts import counts
from engine.features.attention_backend import kept_apart, timing
from engine.planning import memory_model
from engine.planning.auto import FIT, recomputed_within, spared_within
from engine.run import inside
from engine.run.store import RunFolder

OTHERS = 2**30
"""Bytes that must be taken on a card before it is looked at anew; less is this process's own context and the driver."""
_RECOMPUTED, _LAYERS = fields.memory.gradient_checkpointing, fields.memory.recompute_num_layers
_HEAD, _ATTENTION = fields.kernels.cut_ce_workspace, fields.model.attention
BEGUN_WITH = "begun_with.json"
"""The file of a run that keeps, by path, what numbers hang on and a start took other than the launch, or could have."""


def reasons(run: RunFolder, config: RunConfig) -> dict[str, str]:
    """By path, why each setting that was `auto` is what it is in `config`; settings changed since then are left out."""
    found = {}
    for path, choice in (run.read_json().get("auto") or {}).items():
        if path in fields and fields[path].value(config) == choice.get("value"):
            found[path] = str(choice.get("reason"))
    return found


def launched_for(run: RunFolder) -> int | None:
    """Bytes of the smallest card of the machine that the launch looked at; None where it had none."""
    found = run.read_json().get("device_bytes")
    return found if isinstance(found, int) else None


def planned_row(run: RunFolder) -> int | None:
    """Tokens of the longest row that the launch chose for; None of a run from before that was kept."""
    found = run.read_json().get("longest_row")
    return found if isinstance(found, int) else None


def at_the_card(
    run: RunFolder, config: RunConfig, card: tuple[int, int] | None = None, rows: DataFacts | None = None
) -> tuple[RunConfig, dict[str, str]]:
    """The config that a start trains with, and by path why each choice is what it is; `card` as of `by_free_memory`. `rows`
    are the counts of what it trains on.

    Keeps the size of the head's scores and the attention over packs in the run at its first start, and takes them from there
    at others.
    """
    why = reasons(run, config)
    launched = _HEAD.value(config) if _HEAD.path in why else None
    begun = _begun_with(run) if {_HEAD.path, _ATTENTION.path} & why.keys() else {}
    if launched is not None and begun.get(_HEAD.path, launched) is None:
        config, why = config.with_values({_HEAD: None}), {**why, _HEAD.path: "the usual size, as this run took before"}
    planned = launched_for(run), planned_row(run)
    config, why = by_free_memory(config, why, run.path, card, planned=planned, rows=rows)
    config, why = by_times_of_attention(config, why, run.path, begun)
    taken = {_HEAD.path: _HEAD.value(config)} if launched is not None else {}
    timed = _ATTENTION.path in why and kept_apart(config) and torch.cuda.is_available()
    if timed:
        taken[_ATTENTION.path] = _ATTENTION.value(config)
    elif _ATTENTION.path in why and _ATTENTION.path in begun:
        taken[_ATTENTION.path] = begun[_ATTENTION.path]  # a start without a card leaves it to the next with one
    if taken and taken != begun and _processes() == 1:
        inside.replace(run, BEGUN_WITH, json.dumps(taken) + "\n")
    return config, why


def by_times_of_attention(
    config: RunConfig, why: dict[str, str], base: Path, begun: Mapping[str, Any]
) -> tuple[RunConfig, dict[str, str]]:
    """The config and its reasons, with the attention over packed documents chosen by times that are taken here, where
    several implementations are installed and none was measured for such a run before. What the run began with stays."""
    if _ATTENTION.path not in why or not torch.cuda.is_available() or _processes() > 1:
        return config, why
    if (before := begun.get(_ATTENTION.path)) is not None:
        same = before == _ATTENTION.value(config)
        told = why[_ATTENTION.path] if same else "this run began with it"
        return config.with_values({_ATTENTION: before}), {**why, _ATTENTION.path: told}
    facts = gather_facts(config, base, sources=False)
    device = torch.device("cuda", torch.cuda.current_device())
    if (found := timing.decide(config, facts, device)) is None:
        return config, why
    return config.with_values({_ATTENTION: found[0]}), {**why, _ATTENTION.path: found[1]}


def _begun_with(run: RunFolder) -> dict[str, Any]:
    """What was kept; nothing at a first start, and where the file is damaged."""
    try:
        found = json.loads(inside.read(run, BEGUN_WITH, 2**16)) if inside.exists(run, BEGUN_WITH) else {}
    except ValueError:
        return {}
    found = found if isinstance(found, dict) else {}
    known = found.get(_ATTENTION.path) in _ATTENTION.choices
    return found if known else {path: value for path, value in found.items() if path != _ATTENTION.path}


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def by_free_memory(
    config: RunConfig,
    why: dict[str, str],
    base: Path,
    card: tuple[int, int] | None = None,
    *,
    planned: tuple[int | None, int | None] = (None, None),
    rows: DataFacts | None = None,
) -> tuple[RunConfig, dict[str, str]]:
    """The config and its reasons, with `memory.gradient_checkpointing` chosen again where the card has less memory than at
    the launch, because others hold some of it or because it is another card, and where the longest row is another. Where
    the estimate does not fit, `memory.recompute_num_layers` and then `kernels.cut_ce_workspace` become the usual.

    `card` is its free and its whole memory in bytes, asked for where it is not given, `planned` the whole memory of the
    card that the launch chose for, and the tokens of the longest row.
    """
    several = _processes() > 1
    if not {_RECOMPUTED.path, _LAYERS.path, _HEAD.path} & why.keys() or (several and config.distributed.nodes > 1):
        return config, why
    if several:
        card = 0, 0  # what is free on each is its own, and all must choose alike
    elif card is None:
        card = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    free, whole = card
    held, lost = whole - free, (planned[0] or 0) - whole if whole else 0
    others = _other_rows(config, planned[1], rows)
    if held < OTHERS and lost < OTHERS and not others:
        return config, why
    less = f"; others hold {figures.size(held)} of the card" if held >= OTHERS else ""
    less += f"; the card has {figures.size(lost)} less than that of the launch" if lost >= OTHERS else ""
    less += others
    facts = gather_facts(config, base, sources=False)
    facts = replace(facts, data=rows) if rows is not None and rows.exact else facts
    room = free if held >= OTHERS or lost >= OTHERS else whole or sys.maxsize
    # Layers first: no number hangs on them. What a size of scores is worth is a few milliseconds, the same numbers are more.
    for spec, usual in ((_LAYERS, "all of them"), (_HEAD, "the usual size")):
        is_fixed = spec is _HEAD and config.run.full_determinism
        if spec.path in why and spec.value(config) is not None and not is_fixed:
            classes = memory_model.memory(config, facts, config.memory.gradient_checkpointing) or {}
            if sum(classes.values()) > FIT * room:
                config, why = config.with_values({spec: None}), {**why, spec.path: f"{usual}{less}"}
    if _RECOMPUTED.path in why:
        value, reason = recomputed_within(room, config, facts)
        config, why = config.with_values({_RECOMPUTED: value}), {**why, _RECOMPUTED.path: reason + less}
    if _LAYERS.path in why and others:
        value, reason = spared_within(room, config, facts)
        config, why = config.with_values({_LAYERS: value}), {**why, _LAYERS.path: reason + less}
    return config, why


def _other_rows(config: RunConfig, planned: int | None, rows: DataFacts | None) -> str:
    """That the longest row is another than the launch reckoned with, behind a reason; empty where it is not, or where not
    every row was counted."""
    if planned is None or rows is None or not rows.exact:
        return ""
    longest = counts.longest_row(config, Facts(data=rows))
    return (
        "" if longest == planned else f"; the longest row has {longest:,} tokens, the launch reckoned with {planned:,}"
    )
