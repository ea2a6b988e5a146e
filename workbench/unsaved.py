"""A config that no file holds yet, kept while it is edited: a crash, a hang-up or a kill loses the last second at most.

Owns one small file a window in the cache folder, written whole or not at all, and what an earlier window left there.
What is found is taken out of the cache into an ordinary YAML file at once, so it is offered once and never lost. It
refuses to be waited for: a key press only sets a timer, and the disk is written to from a thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import WorkbenchError
from engine.run.lock import try_flock
from engine.run.process import host, identity, identity_from

if TYPE_CHECKING:
    from engine.session.draft import Draft

LARGEST = 1 << 20  # bytes; a config of more is refused by the reader anyway


@dataclass(frozen=True)
class UnsavedConfig:
    """A config that was not saved: its text, the file and recipe it came from, when, the file that holds it now, and by what is
    known whether the file it came from is still as it was (`Draft.file_mark`)."""

    text: str
    path: Path | None
    recipe: str | None
    when: float
    place: Path
    file_mark: str | None = None

    def draft(self) -> Draft:
        """The draft again, of the file that it came from. Raises WorkbenchError where its text cannot be read."""
        from engine.session.draft import Draft

        draft = Draft(recipe=self.recipe)
        try:
            draft.replace_text(self.text)
        except WorkbenchError as problem:
            raise WorkbenchError(f"It cannot be read: {problem.message} It lies in {self.place}.") from problem
        self.name_file(draft)
        return draft

    def name_file(self, draft: Draft) -> None:
        """The draft is of the file that it came from, as that was then: what another wrote into it since is not replaced unasked."""
        if self.path is not None and self.path.exists():
            draft.path, draft.file_mark = self.path, self.file_mark

    @property
    def clock(self) -> str:
        """When it was last changed, as a person says it."""
        then = time.localtime(self.when)
        today = time.localtime()[:3] == then[:3]
        return time.strftime("%H:%M" if today else "%d %B, %H:%M", then)


class Unsaved:
    """The unsaved config of this window, in a file of its own."""

    def __init__(self, cache: Path, state: Path) -> None:
        self._folder, self._state = cache / "unsaved", state
        who = identity()
        # Windows in several containers have the same numbers.
        self._place = self._folder / f"{os.getpid()}-{who.start if who else 0}.json"
        self._open = -1
        self._kept: Mapping[str, Any] | None = None
        self._given_up = False
        self._lock = threading.Lock()

    def entry(self, draft: Draft) -> dict[str, Any] | None:
        """What there is to keep of a draft; nothing where a file holds it all."""
        if not draft.dirty:
            return None
        of_file = {"path": str(draft.path) if draft.path else None, "file_mark": draft.file_mark}
        return {"text": draft.text(), "recipe": draft.recipe, **of_file}

    def write(self, entry: Mapping[str, Any] | None, *, file: Path | None = None) -> None:
        """Keep this entry in place of the last one; nothing to keep removes the file. Raises OSError."""
        with self._lock:
            if self._given_up:
                return
            if entry is None:
                self._place.unlink(missing_ok=True)
                self._hold(-1)
            elif entry != self._kept or file is not None:
                who = identity()
                aside = {"when": time.time(), "file": str(file) if file else None, "owner": who and who.as_json()}
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._hold(_write_atomically(self._place, json.dumps({**entry, **aside})))
            self._kept = entry

    def _hold(self, handle: int) -> None:
        """The file stays open with a lock on it, for windows in other containers, which cannot see this process."""
        if self._open >= 0:
            os.close(self._open)
        self._open = handle

    def give_up(self) -> None:
        """The person leaves and has said what shall become of the config: nothing is kept any more."""
        with contextlib.suppress(OSError):
            self.write(None)
        self._given_up = True

    def as_file(self, text: str) -> Path:
        """Write a config as a YAML file of its own beside the app's log. Raises OSError."""
        self._state.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for number in range(1000):
            place = self._state / f"unsaved-{stamp}{f'-{number}' if number else ''}.yaml"
            with contextlib.suppress(FileExistsError), open(place, "x", encoding="utf-8") as file:
                file.write(text)
                return place
        raise FileExistsError(place)

    def left(self, path: Path | None) -> list[UnsavedConfig]:
        """What windows that are gone have left: of this file, or of any where none is open; the newest first."""
        configs = [kept for place in _entries(self._folder) if (kept := self._take(place, path)) is not None]
        return sorted(configs, key=lambda kept: -kept.when)

    def _take(self, place: Path, path: Path | None) -> UnsavedConfig | None:
        try:
            document = json.loads(place.read_bytes()) if place.stat().st_size <= LARGEST * 2 else {}
        except (OSError, ValueError):
            return None
        owner = identity_from(document.get("owner")) if isinstance(document, dict) else None
        if owner is None or owner.host != host() or owner.alive or not isinstance(document.get("text"), str):
            return None
        if owner.beside and _is_open(place):
            return None
        source = Path(document["path"]) if isinstance(document.get("path"), str) else None
        if path is not None and source != path:
            return None
        taken = place.with_suffix(".taken")
        try:
            os.rename(place, taken)  # two windows may start at once: one of them gets it
        except OSError:
            return None
        try:
            file = Path(document["file"]) if isinstance(document.get("file"), str) else None
            file = file if file is not None and file.exists() else self.as_file(document["text"])
            taken.unlink()
        except OSError:
            with contextlib.suppress(OSError):
                os.rename(taken, place)  # there is no room for it: the next start tries again
            return None
        recipe, when, mark = (document.get(key) for key in ("recipe", "when", "file_mark"))
        return UnsavedConfig(
            document["text"],
            source,
            recipe if isinstance(recipe, str) else None,
            when if isinstance(when, (int, float)) else 0.0,
            file,
            mark if isinstance(mark, str) else None,
        )


def _entries(folder: Path) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    yield from (folder / name for name in names if name.endswith(".json"))


def _is_open(place: Path) -> bool:
    """Whether the window that wrote this holds it."""
    try:
        handle = os.open(place, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return try_flock(handle) == "busy"
    finally:
        os.close(handle)


def _write_atomically(place: Path, text: str) -> int:
    """The new content or the old, whatever happens in between; a handle that holds the file's lock, where there are locks."""
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=".unsaved-")
    held = -1
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            try_flock(file.fileno())
            held = os.dup(file.fileno())
        os.replace(name, place)
        return held
    except BaseException:
        if held >= 0:
            os.close(held)
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
