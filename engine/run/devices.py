"""Which GPUs a run gets: the launcher always chooses, and the worker sees only those.

`auto` is the first GPU with free memory that no other live run uses, or the CPU. A list picks by number, a number takes
that many, which on a machine without GPU are processes on its cores, at most one each. NVML is asked; a
CUDA_VISIBLE_DEVICES set by a scheduler is kept to: numbers count inside it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from engine.errors import WorkbenchError

# A GPU with more than this in use is someone else's; a desktop's few hundred MiB are not.
_BUSY_BYTES = 2 << 30


@dataclass(frozen=True)
class Card:
    """One GPU that this process may use. `name` is what CUDA_VISIBLE_DEVICES calls it."""

    name: str
    free_bytes: int
    used_bytes: int


@dataclass(frozen=True)
class Choice:
    """`visible` goes into CUDA_VISIBLE_DEVICES (empty: the CPU); `processes` is how many ranks to start."""

    visible: tuple[str, ...]
    processes: int


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cards() -> list[Card]:
    """The GPUs that NVML reports and CUDA_VISIBLE_DEVICES allows, in its order."""
    return _allowed(_all_cards(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _all_cards() -> list[tuple[str, Card]]:
    """(UUID, card) of every GPU of this machine."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        # A container may have the devices without NVML: then they are used, with nothing known of their memory.
        numbers = sorted(int(path.name[6:]) for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit())
        return [("", Card(str(number), 0, 0)) for number in numbers]
    try:
        return [_card(pynvml, number) for number in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _allowed(cards: Sequence[tuple[str, Card]], allowed: str | None) -> list[Card]:
    """Those that CUDA_VISIBLE_DEVICES names, by number, UUID, start of a UUID, or as a MIG slice; all without it."""
    if allowed is None:
        return [card for _, card in cards]
    known = {key: card for uuid, card in cards for key in (card.name, uuid)}
    chosen = []
    for name in filter(None, (part.strip() for part in allowed.split(","))):
        match = known.get(name) or next(
            (card for key, card in known.items() if key.startswith("GPU-") and key.startswith(name)), None
        )
        if match is None and name.startswith("MIG-") and cards:
            match = Card(name, 0, 0)
        if match is None:
            break  # CUDA itself stops at the first name that it does not know.
        chosen.append(Card(name, match.free_bytes, match.used_bytes))
    return chosen


def _card(pynvml: ModuleType, number: int) -> tuple[str, Card]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    name = uuid if isinstance(uuid, str) else uuid.decode()
    return name, Card(str(number), int(memory.free), int(memory.used))


def choose(wanted: object, taken: Collection[str] = (), known: Sequence[Card] | None = None) -> Choice:
    """The devices for `run.devices`. Raises WorkbenchError, naming what there is, if they are not here."""
    here = list(cards() if known is None else known)
    if wanted is None or wanted == "auto":
        return _auto(here, taken)
    if isinstance(wanted, bool) or not isinstance(wanted, (int, list, tuple)):
        raise WorkbenchError(f"run.devices: must be auto, a number or a list of numbers; got {wanted!r}.")
    if isinstance(wanted, int):
        return _count(wanted, here, taken)
    numbers = list(wanted)
    if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
        raise WorkbenchError(f"run.devices: must list numbers of GPUs; got {wanted!r}.")
    if len(set(numbers)) != len(numbers):
        raise WorkbenchError(f"run.devices: names a GPU twice; got {numbers}.")
    missing = [number for number in numbers if not 0 <= number < len(here)]
    if missing:
        raise WorkbenchError(
            f"run.devices: there is no GPU {missing[0]} here; {_have(here)}.",
            "Set run.devices to auto, or to one of these.",
        )
    return Choice(tuple(here[number].name for number in numbers), max(1, len(numbers)))


def free(wanted: object, taken: Collection[str], on_cpu: int, present: Sequence[Card] | None = None) -> Choice | None:
    """The devices for a run that waits until they are free; None while they are not.

    A GPU is free when no run here has it and hardly any of its memory is in use; the CPU when no run of the folder
    (`on_cpu` of them do) works on it. Raises WorkbenchError as `choose` does.
    """
    here = list(cards() if present is None else present)
    choice = choose(wanted, taken, here)
    if not choice.visible:
        return choice if not on_cpu else None
    known = {card.name: card for card in here}
    busy = any(name in taken or known[name].used_bytes >= _BUSY_BYTES for name in choice.visible)
    return None if busy else choice


def _auto(here: Sequence[Card], taken: Collection[str]) -> Choice:
    if not here:
        return Choice((), 1)
    free = [card for card in here if card.name not in taken and card.used_bytes < _BUSY_BYTES]
    best = free[0] if free else max(here, key=lambda card: card.free_bytes)
    return Choice((best.name,), 1)


def _count(wanted: int, here: Sequence[Card], taken: Collection[str]) -> Choice:
    if wanted < 1:
        raise WorkbenchError(f"run.devices: must be 1 or more; got {wanted}. Use auto for one GPU or the CPU.")
    if not here:
        if wanted > cores():
            raise WorkbenchError(
                f"run.devices: {wanted} processes were asked for; this machine has no GPU and {cores()} CPU "
                f"core{'' if cores() == 1 else 's'}.",
                "Lower run.devices, or leave it out for one process.",
            )
        return Choice((), wanted)
    if wanted > len(here):
        raise WorkbenchError(f"run.devices: {wanted} GPUs were asked for; {_have(here)}.", "Lower run.devices.")
    order = sorted(here, key=lambda card: (card.name in taken, card.used_bytes >= _BUSY_BYTES))
    chosen = {card.name for card in order[:wanted]}
    return Choice(tuple(card.name for card in here if card.name in chosen), wanted)


def _have(here: Sequence[Card]) -> str:
    if not here:
        return "this machine shows none"
    return f"there {'is 1 GPU' if len(here) == 1 else f'are {len(here)} GPUs'} (0 to {len(here) - 1})"
