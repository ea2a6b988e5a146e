"""What was compared when an artefact was made, kept with it: `parity.json` in a folder, `NAME.parity.json` beside a file.

With it `verify` tells later, and on other machines, whether the artefact is still the one that was compared. No torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import UsageError, WorkbenchError, redact, visible
from engine.export.places import Source

RECORD = "parity.json"
FOR_READING = ("README.md", "LICENSE", ".gitattributes", RECORD)
"""Files of a folder that no program computes with; people change them and hubs add them."""
Report = Callable[[str, int, int], None]
_MOST = 1 << 22
_PIECE = 1 << 20


@dataclass(frozen=True)
class Verified:
    """What became of an artefact since it was compared."""

    run: str
    checkpoint: str
    form: str
    made: float
    """Seconds since 1970."""
    files: int
    bytes: int
    changed: list[str]
    """Files that are others now, are gone, or came afterwards, each with what it is."""


def record_of(artefact: Path) -> Path:
    """Where the record of a folder or a file is."""
    return artefact / RECORD if artefact.is_dir() else artefact.with_name(f"{artefact.name}.{RECORD}")


def write(artefact: Path, source: Source, form: str, parity: dict[str, Any], report: Report, named: Path) -> None:
    """Keeps what was compared with the artefact, which is to be called `named`."""
    files = {}
    names = [name for name in _names(artefact) if (artefact / name).is_file()] if artefact.is_dir() else [""]
    total, done = sum((artefact / name).stat().st_size for name in names), 0
    for name in names:
        digest, size = _digest(artefact / name)
        done += size
        files[name or named.name] = {"size": size, "sha256": digest}
        report("Noting what was compared", done, total)
    content = {
        "version": 1,
        "run": source.run.id,
        "checkpoint": source.checkpoint.name,
        "form": form,
        "made": time.time(),
        "parity": parity,
        "files": files,
    }
    place = record_of(artefact) if artefact.is_dir() else named.with_name(f"{named.name}.{RECORD}")
    beside = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    try:
        beside.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)


def verify(artefact: Path, report: Report = lambda what, done, total: None) -> Verified:
    """Whether the artefact is the one that was compared. Raises WorkbenchError where there is none, or no record of it."""
    shown = visible(redact(str(artefact)))
    if not artefact.exists():
        raise UsageError(f"{shown}: is not there.", "Name a folder or a file that `workbench export` has made.")
    said = _read(record_of(artefact), shown)
    files: dict[str, Any] = said["files"]
    whole = artefact.is_dir()
    changed, done, total = [], 0, sum(entry["size"] for entry in files.values())
    for name, entry in files.items():
        path = artefact / name if whole else artefact
        try:
            digest, size = _digest(path)
        except FileNotFoundError:
            changed.append(f"{visible(name)} is gone")
            continue
        except OSError as problem:
            changed.append(f"{visible(name)} cannot be read ({problem.strerror or problem})")
            continue
        done += size
        report("Reading it", done, total)
        if digest != entry["sha256"]:
            short = f", {entry['size'] - size:,} bytes shorter" if size < entry["size"] else ""
            changed.append(f"{visible(name)} was changed{short}")
    if whole:
        changed += [f"{visible(name)} was added" for name in _names(artefact) if name not in files]
    return Verified(said["run"], said["checkpoint"], said["form"], said["made"], len(files), total, changed)


def _read(path: Path, shown: str) -> dict[str, Any]:
    """The record at `path`. Raises WorkbenchError where there is none that can be read."""
    try:
        handle = _opened(path)
        with os.fdopen(handle, "rb") as file:
            said = json.loads(file.read(_MOST))
        files = said["files"]
        fits = (
            all(isinstance(said[key], str) for key in ("run", "checkpoint", "form"))
            and isinstance(said["made"], (int, float))
            and math.isfinite(said["made"])
            and bool(files)
            and all(
                _plain(name)
                and type(entry["size"]) is int
                and 0 <= entry["size"] < 1 << 63
                and isinstance(entry["sha256"], str)
                for name, entry in files.items()
            )
        )
    except FileNotFoundError:
        raise WorkbenchError(
            f"{shown}: nothing is known of what was compared with it: {visible(path.name)} is not there.",
            "Name a folder or a file that `workbench export` has made; those of earlier versions have none.",
        ) from None
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError):
        fits = False
    if not fits:
        raise WorkbenchError(f"{shown}: {visible(path.name)} is no record of a comparison.", "Export it again.")
    return dict(said)


def _plain(name: str) -> bool:
    """Whether this is the name of something in a folder, which a system can be asked for."""
    return name == Path(name).name != ".." and bool(name) and "\0" not in name and bool(name.encode("utf-8"))


def _names(folder: Path) -> Iterator[str]:
    """What is in an exported folder that programs read, in order: its files, and folders, of which it is made without any."""
    for name in sorted(os.listdir(folder)):
        if name not in FOR_READING and not name.startswith("."):
            yield name


def _opened(path: Path) -> int:
    """A handle of a plain file. Raises OSError for anything else, and never waits."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "no plain file")
    return handle


def _digest(path: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with os.fdopen(_opened(path), "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return digest.hexdigest(), size
