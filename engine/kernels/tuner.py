"""Which tiles a kernel runs with: those picked by hand, or the fastest on this card once timing was asked for.

The launcher asks before each launch; a decorator would want a card at import and fail in Triton's interpreter. Off, and
wherever nothing can be timed (no card, the interpreter, a CUDA graph being recorded, torch told to be deterministic), the
answer is the first candidate at no cost. On, the first launch of a kernel with a new key times the candidates that fit
the card, in turn, and another than the first must be 2 % faster to be taken. Keys hold lengths rounded up to powers of
two, so a new length rarely times again; what was found is kept for later runs (`engine.kernels.tuned`). Times are of this
card at this moment: two ranks of a run may pick different tiles, whose results differ by rounding alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from engine.kernels.device import interpreted
from engine.kernels.tuned import Entry, Kept

Tile = tuple[int, ...]
Key = tuple[int | str, ...]
_FASTER = 0.98
_ROUNDS = 7


class Cost(NamedTuple):
    """What a tile asks of a multiprocessor, an estimate from above: 32-bit registers a thread, threads, shared bytes."""

    registers: int
    threads: int
    shared_bytes: int = 0


class Limits(NamedTuple):
    """What one program may take on a card."""

    registers: int = 255
    threads: int = 1024
    shared_bytes: int = 48 << 10

    def allow(self, cost: Cost) -> bool:
        return all(asked <= most for asked, most in zip(cost, self, strict=True))


@dataclass(frozen=True)
class Tiles:
    """The tiles that one kernel may take, the one picked by hand first.

    `version` grows when the kernel's code changes what a tile costs: older timings no longer count then.
    """

    kernel: str
    version: int
    names: tuple[str, ...]
    candidates: tuple[Tile, ...]
    cost: Callable[[Tile], Cost]

    @property
    def default(self) -> Tile:
        return self.candidates[0]

    def fitting(self, limits: Limits) -> tuple[Tile, ...]:
        """The default, and the others that the card has room for."""
        return (self.default, *(tile for tile in self.candidates[1:] if limits.allow(self.cost(tile))))

    def words(self, tile: Tile) -> str:
        return ", ".join(f"{name} {value}" for name, value in zip(self.names, tile, strict=True))


@dataclass(frozen=True)
class Picked:
    """One answer, for the receipt. Times in milliseconds; `origin` is `timed` or `kept` (from an earlier run)."""

    tiles: Tiles
    key: Key
    tile: Tile
    times: dict[Tile, float]
    origin: str

    def words(self) -> str:
        """`logp_entropy_bwd: block 2048, warps 8 (3.41 ms, by hand 3.57)`."""
        ours, first = self.times.get(self.tile), self.times.get(self.tiles.default)
        if self.tile == self.tiles.default:
            return f"{self.tiles.kernel}: {self.tiles.words(self.tile)}, as by hand"
        told = f" ({ours:.3g} ms, by hand {first:.3g})" if ours is not None and first is not None else ""
        return f"{self.tiles.kernel}: {self.tiles.words(self.tile)}{told}"


def bucket(n: int) -> int:
    """The power of two at or above `n`, at least 1: all lengths in between share one timing."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass
class Tuner:
    """Answers launchers. `measure` times runs in milliseconds, infinity for one that cannot run; tests bring their own."""

    on: bool = False
    picked: list[Picked] = field(default_factory=list)
    _known: dict[tuple[str, int, str, Key, tuple[Tile, ...]], Tile] = field(default_factory=dict)
    _kept: dict[str, Kept] = field(default_factory=dict)
    _measure: Callable[[Sequence[Callable[[], object]]], list[float]] | None = None
    _keep_in: Callable[[torch.device], Kept] = Kept.of

    def start(
        self,
        measure: Callable[[Sequence[Callable[[], object]]], list[float]] | None = None,
        keep_in: Callable[[torch.device], Kept] = Kept.of,
    ) -> None:
        """From now on launchers get timed tiles."""
        self.on, self._measure, self._keep_in = True, measure, keep_in

    def stop(self) -> None:
        """Back to the tiles picked by hand, as if nothing had been timed in this process."""
        self.on = False
        self.picked.clear()
        self._known.clear()
        self._kept.clear()

    def pick(
        self,
        tiles: Tiles,
        key: Key,
        device: torch.device,
        run: Callable[[Tile], object],
        work: Callable[[Tile], float] = lambda tile: 1.0,
    ) -> Tile:
        """The tile to launch `tiles.kernel` with.

        Args:
            key: what the time depends on: lengths through `bucket`, number format, flags.
            run: launches once with a tile, on memory that may be spoiled.
            work: how much one run does with a tile, where tiles do not all do the same.
        """
        if not self.on or not self._can_time(device):
            return tiles.default
        # A shape in the same bucket may have fewer tiles that serve it.
        place = (tiles.kernel, tiles.version, str(device), key, tiles.candidates)
        if (known := self._known.get(place)) is None:
            known = self._known[place] = self._find(tiles, key, device, run, work)
        return known

    @property
    def problems(self) -> list[str]:
        """Why what was found could not be kept for later runs, once each."""
        return list(dict.fromkeys(kept.problem for kept in self._kept.values() if kept.problem))

    def _can_time(self, device: torch.device) -> bool:
        if self._measure is not None:
            return True
        if torch.are_deterministic_algorithms_enabled():
            return False
        return device.type == "cuda" and not interpreted() and not torch.cuda.is_current_stream_capturing()

    def _find(
        self,
        tiles: Tiles,
        key: Key,
        device: torch.device,
        run: Callable[[Tile], object],
        work: Callable[[Tile], float],
    ) -> Tile:
        kept = self._kept.setdefault(str(device), self._keep_in(device))
        name = "|".join(map(str, (f"{tiles.kernel}@{tiles.version}", *key)))
        found = kept.find(name)
        if found is not None and found.tile in tiles.candidates:
            self.picked.append(Picked(tiles, key, found.tile, found.times, "kept"))
            return found.tile
        those = tiles.fitting(limits_of(device))
        measure = self._measure or by_events
        spent = measure([partial(run, tile) for tile in those])
        times = {tile: each / work(tile) for tile, each in zip(those, spent, strict=True)}
        best = choose(times, tiles.default)
        kept.keep(name, Entry(best, times))
        self.picked.append(Picked(tiles, key, best, times, "timed"))
        return best


def choose(times: dict[Tile, float], default: Tile) -> Tile:
    """The fastest, if it beats the default by 2 %; one without a finite time never."""
    sure = {tile: time if math.isfinite(time) else math.inf for tile, time in times.items()}
    best = min(sure, key=sure.__getitem__)
    return best if sure[best] < _FASTER * sure[default] else default


def limits_of(device: torch.device) -> Limits:
    if device.type != "cuda":
        return Limits()
    told = torch.cuda.get_device_properties(device)
    return Limits(shared_bytes=int(getattr(told, "shared_memory_per_block_optin", 48 << 10)))


def by_events(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Median milliseconds of each run on the current CUDA device, one of each in turn; the first round compiles."""
    from triton.runtime.errors import OutOfResources

    times: list[list[float]] = [[] for _ in runs]
    failed: set[int] = set()
    for i, run in enumerate(runs):
        try:
            run()
        except (OutOfResources, torch.cuda.OutOfMemoryError):
            failed.add(i)
    torch.cuda.synchronize()
    for _ in range(_ROUNDS):
        for i, run in enumerate(runs):
            if i in failed:
                continue
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times[i].append(start.elapsed_time(end))
    return [statistics.median(each) if each else float("inf") for each in times]


TUNER = Tuner()
"""The one of this process: launchers ask it; whoever runs a training turns it on and off."""
