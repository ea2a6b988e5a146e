"""Which curves a monitor draws, in which order, with which words: the method's own beside those that every run has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from engine.errors import visible
from engine.run.view import RunView

MOST = 24


@dataclass(frozen=True, slots=True)
class Words:
    """How a metric is shown. `beside` draws it into another one's chart; `listed` puts its newest value in the list."""

    title: str
    unit: str = ""
    per: str = ""
    beside: str = ""
    listed: bool = True


KNOWN: dict[str, Words] = {
    "loss": Words("loss"),
    "eval_loss": Words("held-out loss", beside="loss"),
    "rewards/margins": Words("reward margin"),
    "rewards/accuracies": Words("preferred the better answer", "share"),
    "rewards/chosen": Words("reward of chosen"),
    "rewards/rejected": Words("reward of rejected", beside="rewards/chosen"),
    "mean_token_accuracy": Words("token accuracy", "share"),
    "entropy": Words("entropy"),
    "grad_norm": Words("gradient norm"),
    "learning_rate": Words("learning rate"),
    "tokens_per_second": Words("tokens per second"),
    "step_seconds": Words("one step", "brief"),
    "data_seconds": Words("waiting for data", "brief"),
    "mfu": Words("of the card's peak", "share"),
    "memory_peak": Words("peak memory", "bytes"),
    "memory_allocated": Words("memory", "bytes", beside="memory_peak"),
    "memory_reserved": Words("memory reserved", "bytes"),
}
# Counted up for ever: a value to read, not a curve.
UNDRAWN = re.compile(r"(eval_)?(tokens|trained_tokens|num_tokens|runtime|\w+_per_second)")


def entries(view: RunView) -> list[dict[str, Any]]:
    """The curves of a run, those that matter most first."""
    order = {name: place for place, name in enumerate(KNOWN)}
    method = order["grad_norm"] - 0.5
    names = [
        name for name in view.series if (name in KNOWN or not UNDRAWN.fullmatch(name)) and not name.startswith("gpu")
    ]
    names.sort(key=lambda name: (order.get(name, method), name))
    found = []
    for name in names[:MOST]:
        words = KNOWN.get(name) or _unnamed(name)
        beside = words.beside if words.beside in view.series else ""
        found.append(
            {
                "name": name,
                "title": words.title,
                "unit": words.unit,
                "per": words.per,
                "with": beside,
                "listed": words.listed,
            }
        )
    return found


def _unnamed(name: str) -> Words:
    """A metric that we have no words for; one measured on held-out rows stands beside its twin."""
    twin = name.removeprefix("eval_")
    if twin != name:
        known = KNOWN.get(twin)
        return Words(f"held-out {known.title if known else _plain(twin)}", known.unit if known else "", "", twin)
    return Words(_plain(name))


def _plain(name: str) -> str:
    return visible(name).replace("_", " ")[:60]


def devices(view: RunView) -> list[list[str]]:
    """The newest word of each GPU as label and value."""
    from widgets.numbers import size

    found = []
    for device in view.gpu[:16]:
        parts = []
        if isinstance(device.get("load"), int | float):
            parts.append(f"{device['load']:.0f} %")
        if isinstance(device.get("memory_used"), int | float):
            parts.append(size(device["memory_used"]))
        if isinstance(device.get("temperature"), int | float):
            parts.append(f"{device['temperature']:.0f} °C")
        if isinstance(device.get("power"), int | float):
            parts.append(f"{device['power']:.0f} W")
        found.append([f"GPU {device.get('index', '')}", "  ".join(parts)])
    return found
