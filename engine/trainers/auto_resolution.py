"""What was `auto` at the launch: why it became what it is, and one second look at it, at the card's free memory.

The launch chooses by the size of a card; what else lies on it is known to the process that trains there. Of all choices
three depend on it, so where others hold memory the head gets no more than the usual for its scores, no layer is left out of
recomputation, and that is chosen again. Several processes keep what was chosen for all of them. A run that goes on on a smaller card than it was launched for is looked at as well.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from engine import figures
from engine.config.tree import RunConfig, fields
from engine.data.gather_facts import look_at
from engine.planning.auto import recomputed_within
from engine.run.store import RunFolder

OTHERS = 2**30
"""Bytes that must be taken on a card before it is looked at anew; less is this process's own context and the driver."""
_RECOMPUTED, _LAYERS = fields.memory.gradient_checkpointing, fields.memory.recompute_num_layers
_HEAD = fields.kernels.cut_ce_workspace


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


def by_free_memory(
    config: RunConfig,
    why: dict[str, str],
    base: Path,
    card: tuple[int, int] | None = None,
    *,
    planned: int | None = None,
) -> tuple[RunConfig, dict[str, str]]:
    """The config and its reasons, with `memory.gradient_checkpointing` chosen again, `memory.recompute_num_layers` and
    `kernels.cut_ce_workspace` the usual where the card has less memory than at the launch: because others hold some of it, or because it is another card.

    `card` is its free and its whole memory in bytes, asked for where it is not given, `planned` the whole memory of the
    card that the launch chose for.
    """
    if not {_RECOMPUTED.path, _LAYERS.path, _HEAD.path} & why.keys() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return config, why
    if card is None:
        card = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    free, whole = card
    held, lost = whole - free, (planned or 0) - whole if whole else 0
    if held < OTHERS and lost < OTHERS:
        return config, why
    less = f"; others hold {figures.size(held)} of the card" if held >= OTHERS else ""
    less += f"; the card has {figures.size(lost)} less than that of the launch" if lost >= OTHERS else ""
    for spec, usual in ((_HEAD, "the usual size"), (_LAYERS, "all of them")):
        if spec.path in why and spec.value(config) is not None:
            section = getattr(config, spec.section).model_copy(update={spec.name: None})
            config, why = config.model_copy(update={spec.section: section}), {**why, spec.path: f"{usual}{less}"}
    if _RECOMPUTED.path not in why:
        return config, why
    value, reason = recomputed_within(free, config, look_at(config, base, sources=False))
    memory = config.memory.model_copy(update={_RECOMPUTED.name: value})
    return config.model_copy(update={"memory": memory}), {**why, _RECOMPUTED.path: reason + less}
