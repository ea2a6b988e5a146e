"""Where what was fetched of a data set of the hub lies: entries of the user's cache, known by all that decides their files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.data.cache_entries import NOTE, cache_folder, entries
from engine.hub import COMMIT, commit_of

MAIN = "main"
"""The branch that is meant where no revision is named."""


def is_fetched(name: str, split: str, subset: str | None, revision: str | None) -> bool:
    """Whether all rows of a split are in the user's cache, for who does not reach the hub."""
    commit = commit_of(name, revision, kind="dataset")
    known = commit if commit is not None and COMMIT.fullmatch(commit) else None
    about = about_of(name, subset, known, split, None)
    return (entry_of(about) if known is not None else last_used([about], revision)) is not None


def about_of(name: str, subset: str | None, commit: str | None, wanted: str, limit: int | None) -> dict[str, Any]:
    """All that decides which files an entry is made of."""
    return {"name": name, "subset": subset, "commit": commit, "splits": sorted(splits_of(wanted)), "limit": limit}


def note_of(about: Mapping[str, Any], revision: str | None) -> dict[str, Any]:
    """What an entry says of itself. The revision that was asked for is no part of its key: two may mean one commit."""
    parts = [about["subset"], *about["splits"], about["limit"] and f"first {about['limit']:,} rows"]
    shown = f"{about['name']} ({', '.join(filter(None, parts))})"
    return {"copy": {"sources": [shown], "hub": {**about, "revision": revision or MAIN}}}


def folder_of(about: Mapping[str, Any]) -> Path:
    return cache_folder(None) / hashlib.sha256(json.dumps(["hub", about], sort_keys=True).encode()).hexdigest()[:32]


def entry_of(about: Mapping[str, Any]) -> Path | None:
    folder = folder_of(about)
    return folder if (folder / NOTE).is_file() else None


def last_used(abouts: Sequence[Mapping[str, Any]], revision: str | None) -> Path | None:
    """The entry used last that is like one of these and was fetched for this revision, whatever its commit."""
    alike = [{**about, "commit": None, "revision": revision or MAIN} for about in abouts]
    for entry in entries(cache_folder(None)):
        hub = entry.about.get("hub")
        if isinstance(hub, dict) and {**hub, "commit": None} in alike:
            return entry.folder
    return None


def splits_of(wanted: str) -> list[str]:
    """The splits that an expression such as `train[:10%]+test` names."""
    return [part.partition("[")[0].strip() for part in wanted.split("+")]
