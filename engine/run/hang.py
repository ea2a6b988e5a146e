"""A run of several ranks that stands still: which rank the others wait for, in what, and where each of them is.

The supervisor reads the ranks' heartbeats (`engine.run.beat`). A run hangs once a rank has waited in one collective for
`distributed.ddp_timeout`: torch's own limit, which lies a little later, would end the ranks that wait and name one of them.
The ranks may be on other machines, with other clocks: silence is counted by the reader's own, and not while that slept.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from engine.errors import WorkbenchError, redact, visible
from engine.run import inside
from engine.run.beat import BEAT_SECONDS, FOLDER
from engine.run.cause import Cause
from engine.run.process import identity_from
from engine.run.stack import is_stopped
from engine.run.store import RunFolder

CAUSE = "hang"
TIMEOUT_SECONDS = 1800
"""`distributed.ddp_timeout` where the config does not say it: transformers' own default."""
TORCH_SECONDS = 60
"""How much later than `distributed.ddp_timeout` torch itself gives up waiting, in whatever group of processes."""
SILENT_SECONDS = 10.0
"""A rank that beats no more for so long is stopped, or its interpreter is held."""
_MOST = 1 << 16


@dataclass
class Rank:
    """What a rank said last (`report`), and for how long it has said nothing new; `reporting` once it has said anything."""

    report: dict[str, Any]
    silent: float = 0.0
    reporting: bool = False

    def number(self, name: str) -> float:
        value = self.report.get(name)
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0

    def text(self, name: str) -> str:
        return visible(redact(str(self.report.get(name) or "")))[:300]

    @property
    def at_work(self) -> bool:
        return self.reporting and not self.report.get("over")

    @property
    def is_silent(self) -> bool:
        return self.silent >= SILENT_SECONDS

    @property
    def is_unheard(self) -> bool:
        """It was stopped before its first heartbeat. What an earlier start of it said is of another process."""
        return self.is_silent and not self.reporting and not self.report.get("over")

    @property
    def waits(self) -> str:
        return "" if self.is_silent else self.text("waits")

    @property
    def who(self) -> str:
        return f"process {int(self.number('pid'))} on {self.text('host') or 'an unknown host'}"


class Hang:
    """The heartbeats of a run's ranks; `poll` gives the cause once they wait for each other for too long."""

    def __init__(self, run: RunFolder, ranks: int) -> None:
        self.run = run
        self.patience = patience_of(run)
        self.ranks: dict[int, Rank] = {
            rank: Rank(inside.read_json(run, f"{FOLDER}/{rank}.json", _MOST)) for rank in range(ranks)
        }
        self._then = time.monotonic()

    def poll(self) -> Cause | None:
        """Reads what the ranks say, at most once a heartbeat."""
        now = time.monotonic()
        if (passed := now - self._then) < BEAT_SECONDS:
            return None
        self._then = now
        for number, rank in self.ranks.items():
            said = inside.read_json(self.run, f"{FOLDER}/{number}.json", _MOST)
            if said and said.get("beat") != rank.report.get("beat"):
                self.ranks[number] = Rank(said, reporting=True)
            else:
                rank.silent += min(passed, 2 * BEAT_SECONDS)
        return verdict(self.ranks, self.patience)


def verdict(ranks: dict[int, Rank], patience: float) -> Cause | None:
    """Which rank hangs; None while none has waited for others as long as that."""
    at_work = {number: rank for number, rank in ranks.items() if rank.at_work}
    waiting = {number: rank for number, rank in at_work.items() if rank.waits}
    longest = max(waiting, key=lambda number: waiting[number].number("still"), default=None)
    if longest is None or waiting[longest].number("still") < patience:
        return None
    unheard = [number for number, rank in ranks.items() if rank.is_unheard]
    late = _late(at_work, waiting, unheard)
    waits = waiting[longest]
    waited = (
        f"rank {longest} ({waits.who}) has waited in {waits.waits} for {waits.number('still'):.0f} s, longer than "
        "distributed.ddp_timeout allows"
    )
    lines = [line for number, rank in sorted(at_work.items()) for line in _stack(number, rank)]
    if late is None:
        numbers = ", ".join(f"rank {number} in {rank.waits}" for number, rank in sorted(waiting.items()))
        message = f"All ranks wait for each other ({numbers}), and no message comes: {waited}."
    elif late in unheard:
        message = f"Rank {late} hangs: nothing was heard of it; {waited}."
    else:
        rank = at_work[late]
        message = f"Rank {late} ({rank.who}) hangs: {_where(rank)}; {waited}."
    return Cause(CAUSE, message, tuple(lines))


def _late(at_work: dict[int, Rank], waiting: dict[int, Rank], unheard: list[int]) -> int | None:
    """The rank that the others wait for: one that is silent, else one that has said nothing yet, else one that waits for
    nobody, else the one that has begun the fewest collectives. None where all wait in the same."""
    silent = {number: rank for number, rank in at_work.items() if rank.is_silent}
    if silent:
        return max(silent, key=lambda number: silent[number].silent)
    if unheard:
        return unheard[0]
    busy = {number: rank for number, rank in at_work.items() if number not in waiting}
    if busy:
        return max(busy, key=lambda number: busy[number].number("still"))
    if len({rank.text("group") for rank in waiting.values()}) > 1:
        return None  # collectives are counted by group
    begun = {number: rank.number("number") for number, rank in waiting.items()}
    least = min(begun, key=lambda number: begun[number])
    return least if begun[least] < max(begun.values()) else None


def _where(rank: Rank) -> str:
    """What a rank does that is waited for, in words."""
    at = f"at {rank.text('at')}" if rank.text("at") else "at an unknown place"
    if rank.waits:
        return f"it waits in {rank.waits} (collective {rank.number('number'):.0f}), which the others have left behind"
    if not rank.is_silent:
        return f"it is {at}"
    process = identity_from(rank.report)
    stopped = process is not None and process.alive and is_stopped(process)
    why = "is stopped by a signal (SIGSTOP)" if stopped else "does not answer"
    return f"it {why} and was {at} {rank.silent:.0f} s ago"


def _stack(number: int, rank: Rank) -> list[str]:
    frames = rank.report.get("stack")
    frames = frames if isinstance(frames, list) else []
    head = f"rank {number}, {rank.who}" + (f", waits in {rank.waits}:" if rank.waits else ":")
    return [head, *(f"  {visible(redact(str(frame)))[:200]}" for frame in frames[:8])]


def patience_of(run: RunFolder) -> float:
    """`distributed.ddp_timeout` as the run's config says it, by hand perhaps: a number of any form that a config may have."""
    from engine.config.files import parse

    try:
        seconds = float(parse(run.read_config()).mapping["distributed"]["ddp_timeout"])
    except (WorkbenchError, OSError, KeyError, TypeError, ValueError):
        seconds = math.nan
    return seconds if math.isfinite(seconds) else float(TIMEOUT_SECONDS)
