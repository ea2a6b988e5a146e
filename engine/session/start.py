"""What a window opens on: runs that go on, what was done last, and the ways to begin. Text and order, for any frontend.

`StartList` reads folders; what it gives is plain data. What knows configs is imported when one is read, which is after the first
look: a window's first lines wait for half of the libraries.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config.method_names import CALLED
from engine.figures import count, duration, number
from engine.run.listing import Listing, Summary
from engine.session.recent import Recent, with_sources

if TYPE_CHECKING:
    from engine.config.tree import RunConfig

LIVE_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One line to open. `kind` is run, config, unsaved or begin; `key` names it among its kind."""

    kind: str
    key: str
    title: str
    state: str = ""
    """A run's state, by which it gets its sign; nothing for anything else."""
    method: str = ""
    word: str = ""
    """What it is or how it stands, in a word."""
    detail: str = ""
    when: float | None = None
    bytes: int | None = None
    model: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and its lines."""

    title: str
    entries: tuple[Entry, ...]


GUIDED = Entry("begin", "guide", "Guided first run", detail="The ideas on a few rows, also yours; 5 minutes")
BEGIN: tuple[Entry, ...] = (
    GUIDED,
    Entry("begin", "demo", "The demo", detail="A tiny model learns dates here; nothing is downloaded"),
    Entry("begin", "new", "New config", detail="From what the model shall learn, or a ready config"),
    Entry("begin", "file", "Open a file", detail="A config of yours, or of Axolotl, LLaMA-Factory or TRL"),
)


class StartList:
    """Reads what there is to come back to, for any thread. `runs` is how many there are in all after `sections`."""

    def __init__(self, runs_dir: Path, recent: Recent, cache: Path | None = None) -> None:
        self._listing = Listing(runs_dir, cache)
        self._recent = recent
        self._configs: dict[Path, tuple[tuple[int, int], Entry]] = {}
        self._lock = threading.Lock()
        self.runs = 0

    def sections(self, rows: int, *, read: bool = True) -> list[Section]:
        """Headings with their lines, for a place of about so many rows; ways to begin stand last, and always. Of configs that
        are not to be `read` yet, the names alone."""
        with self._lock:
            return self._sections(rows, read)

    def _sections(self, rows: int, read: bool) -> list[Section]:
        summaries = self._listing.read()
        self.runs = len(summaries)
        live = [self._listing.refresh(run) for run in summaries if not run.over][:LIVE_SHOWN]
        going, ended = [run for run in live if not run.over], [run for run in summaries if run.over]
        # A run of which its file says that it goes on may turn out to be over.
        ended = sorted([*ended, *(run for run in live if run.over)], key=lambda run: -run.when)
        room = max(4, rows - len(BEGIN) - len(going) - 6)
        configs = with_sources(self._recent.configs(), ((run.source, run.created) for run in summaries[:100]))
        for_configs = min(len(configs), max(2, room // 3))
        recent = [_run(self._listing.refresh(run)) for run in ended[: room - for_configs]]
        self._listing.keep()
        lines = [*recent, *(entry for path, when in configs[:for_configs] if (entry := self._config(path, when, read)))]
        sections = [Section("Going on", tuple(_run(run) for run in going)), Section("Recent", tuple(lines))]
        return [section for section in sections if section.entries] + [Section("Begin", BEGIN)]

    def models(self) -> list[str]:
        """The models of the newest runs and configs, each once."""
        with self._lock:
            names = [summary.model for summary in self._listing.read()[:200] if summary.model]
        names += [config.model.name for config in self._recent_configs() if config.model.name]
        return list(dict.fromkeys(names))

    def rows(self) -> list[str]:
        """The rows that the newest configs and runs name, each once; a path as it can be opened from anywhere."""
        return list(
            dict.fromkeys(
                source.path for config in self._recent_configs() for source in config.data.train if source.path
            )
        )

    def files(self) -> list[str]:
        """The config files that were opened last, or that runs were started from."""
        return [str(path) for path, _ in self._recent_files()]

    def _recent_files(self) -> list[tuple[Path, float]]:
        with self._lock:
            sources = [(summary.source, summary.created) for summary in self._listing.read()[:100]]
        return with_sources(self._recent.configs(), sources)

    def _recent_configs(self) -> list[RunConfig]:
        from engine.session.opening import configs_in

        return configs_in(path for path, _ in self._recent_files()[:12])

    def _config(self, path: Path, when: float, read: bool) -> Entry | None:
        """A config file as a line; one that cannot be read any more is left out."""
        try:
            state = os.stat(path)
        except OSError:
            return None
        stamp = (state.st_size, state.st_mtime_ns)
        known = self._configs.get(path)
        if known is None or known[0] != stamp:
            entry = Entry("config", str(path), path.name, word="config")
            if not read:
                return replace(entry, when=max(when, state.st_mtime))
            from engine.session.opening import about

            kind, detail, model = about(path)
            known = self._configs[path] = (stamp, replace(entry, method=_called(kind), detail=detail, model=model))
        return replace(known[1], when=max(when, state.st_mtime))


def _run(summary: Summary) -> Entry:
    return Entry(
        "run",
        summary.id,
        summary.id,
        state=summary.state,
        method=_called(summary.method),
        word="silent" if summary.silent_seconds is not None else summary.state,
        detail=_standing(summary),
        when=None if not summary.over else summary.when,
        bytes=summary.bytes if summary.over else None,
        model=summary.model,
    )


def _standing(summary: Summary) -> str:
    """What matters of a run: how far it is, how good it became, or why it ended."""
    if summary.state in ("failed", "lost", "queued"):
        return summary.cause
    if summary.over:
        if summary.held_out is not None:
            return f"held-out {summary.metric} {number(summary.held_out)}"
        return f"{summary.metric} {number(summary.value)}" if summary.value is not None else ""
    parts = []
    if summary.step:
        parts.append(f"step {count(summary.step)}" + (f" of {count(summary.max_steps)}" if summary.max_steps else ""))
    if summary.value is not None:
        parts.append(f"{summary.metric} {number(summary.value)}")
    if summary.eta_seconds is not None:
        parts.append(f"{duration(summary.eta_seconds)} left")
    return ", ".join(parts)


def _called(kind: str) -> str:
    return CALLED.get(kind, kind)
