"""What can stand where a path or a model is asked for: files and folders, what was used last, and what the hub's cache holds.

Plain looks at folders and at the hub client's own list of its cache; no torch, no network. A folder that cannot be read
has nothing to offer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.config.files import DATA_SUFFIXES
from engine.config.kinds import BUILTIN_MODELS, BUILTIN_ROWS
from engine.config.tree import FieldSpec, fields
from engine.figures import size

MOST_NAMES, MOST_SHOWN = 5000, 200
CONFIGS = (".yaml", ".yml")
ROWS = tuple(each for each in DATA_SUFFIXES if each != ".md")  # pages about the rows, mostly


@dataclass(frozen=True, slots=True)
class Offer:
    """Something that can be taken: its text as it would be written, and what it is."""

    text: str
    about: str
    folder: bool = False
    """A folder to go into; it can be taken as well."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for: `what` is model, rows, config, or path; files count where they end in one of `ends`."""

    what: str
    ends: tuple[str, ...] = ()
    builtin: tuple[str, ...] | None = None
    """Which of what is built in can be taken; None for all of its kind."""


def wanted(spec: FieldSpec) -> Wanted:
    """What a setting asks for."""
    if spec in (fields.model.name, fields.model.tokenizer):
        return Wanted("model")
    if spec.control == "sources":
        return Wanted("rows", ROWS)
    return Wanted("path", (".jinja", ".jinja2", ".txt") if spec is fields.model.chat_template else ())


def files(base: Path, text: str, want: Wanted) -> list[Offer]:
    """Folders and files that begin with what is typed, folders first; hidden ones once their dot is typed."""
    head, slash, tail = text.rpartition("/")
    folder = base / os.path.expanduser(head + slash if slash else ".")
    folders: list[Offer] = []
    listed: list[Offer] = []
    try:
        with os.scandir(folder) as entries:
            for _, entry in zip(range(MOST_NAMES), entries, strict=False):
                if not entry.name.startswith(tail) or (entry.name.startswith(".") and not tail):
                    continue
                written = text[: len(text) - len(tail)] + entry.name
                if entry.is_dir():
                    is_model = os.path.exists(os.path.join(entry.path, "config.json"))
                    folders.append(Offer(written, "a model's folder" if is_model else "folder", folder=True))
                elif want.what != "model" and (not want.ends or entry.name.lower().endswith(want.ends)):
                    listed.append(Offer(written, _size(entry)))
    except (OSError, ValueError):
        return []
    by_name = [sorted(offers, key=lambda offer: offer.text.lower()) for offers in (folders, listed)]
    return [*by_name[0], *by_name[1]][:MOST_SHOWN]


def cached(want: Wanted) -> list[Offer]:
    """Models, or data sets, that the hub's cache on this machine holds; those used last first. Looks at every file of it."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    kind = {"model": "model", "rows": "dataset"}.get(want.what)
    if kind is None:
        return []
    try:
        repos = [repo for repo in scan_cache_dir().repos if repo.repo_type == kind]
    except (CacheNotFound, OSError, ValueError):
        return []
    repos.sort(key=lambda repo: -repo.last_accessed)
    return [Offer(repo.repo_id, f"on this machine, {size(repo.size_on_disk)}") for repo in repos]


def offers(base: Path, text: str, want: Wanted, known: Sequence[Offer]) -> list[Offer]:
    """What fits what is typed: of `known` (recent, cached, built in) whatever has its words, then files and folders."""
    words = text.lower().split()
    fitting = [offer for offer in known if all(word in offer.text.lower() for word in words) and offer.text != text]
    offered = files(base, text, want)
    seen = {offer.text for offer in offered}
    return [*(offer for offer in fitting if offer.text not in seen), *offered][:MOST_SHOWN]


def known_of(want: Wanted, recent: Iterable[str], base: Path) -> list[Offer]:
    """What needs no typing: used before, built in, in the cache; each once."""
    builtin = (
        {"model": BUILTIN_MODELS, "rows": BUILTIN_ROWS}.get(want.what, ()) if want.builtin is None else want.builtin
    )
    generated = [
        *(Offer(_below(path, base), "used before") for path in recent),
        *(Offer(path, "built in, needs no download") for path in builtin),
        *cached(want),
    ]
    about = {offer.text: offer for offer in reversed(generated)}
    cached_too = {offer.text: offer.about for offer in generated if offer.about.startswith("on this machine")}
    return [
        Offer(
            text,
            f"used before, {cached_too[text]}" if offer.about == "used before" and text in cached_too else offer.about,
        )
        for text in dict.fromkeys(offer.text for offer in generated)
        if (offer := about[text])
    ]


def completed(text: str, offered: Sequence[Offer]) -> str:
    """What is typed with all that every fitting file has in common; as it is where nothing begins with it."""
    mine = [offer.text + ("/" if offer.folder else "") for offer in offered if offer.text.startswith(text)]
    return os.path.commonprefix(mine) if mine else text  # noqa: RUF071  texts as typed, also in the middle of a name


def _below(text: str, base: Path) -> str:
    """A path as it is written from `base`, where it lies below."""
    if not os.path.isabs(text):
        return text
    try:
        return str(Path(text).relative_to(base))
    except ValueError:
        return text


def _size(entry: os.DirEntry[str]) -> str:
    try:
        return size(entry.stat().st_size)
    except OSError:
        return "cannot be looked at"
