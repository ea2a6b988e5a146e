"""The folders that an assistant may look into. Every path that it names, and every path in what it names, passes here.

A path counts where it really lies, after all links. Hidden files and folders below a root are left alone (`.env`, `.ssh`), and
what has an address is not fetched: names of the hub are, by the hub's own client.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.config.files import absolute, named_places, scheme_of
from engine.errors import UsageError, as_argument, visible
from engine.run import store
from engine.run.store import RunFolder
from engine.session.browsing import CONFIGS

MOST_ENTRIES = 200_000
"""Names in a folder of rows or of a model that are looked at for links."""
MOST_CONFIGS, DEEPEST = 200, 5
"""Config files that are listed, and how far below a root."""
_LEFT_OUT = {"node_modules", "site-packages", "__pycache__", "checkpoints"}


class Roots:
    """What lies in `folders`, and in the folder of runs."""

    def __init__(self, folders: Sequence[Path], runs: Path) -> None:
        """The first of `folders`, which `root_of` gives, is where relative paths begin."""
        self.folders = tuple(folders)
        self.runs = Path(os.path.realpath(runs))
        self.all = tuple(dict.fromkeys((*self.folders, self.runs)))

    def holds(self, path: str | os.PathLike[str]) -> bool:
        """Whether this place really lies in a root and is not hidden there."""
        return self._flaw(Path(path)) == ""

    def require(self, path: str | os.PathLike[str], what: str) -> Path:
        """Where `path` really is. Raises UsageError, in the name of `what`, where that is no place to look into."""
        text = os.fspath(path)
        if "\0" in text or len(text) > 4096:
            raise UsageError(f"{what}: must be a path; got {visible(text)[:200]}.")
        place = Path(os.path.expanduser(text))
        if flaw := self._flaw(place):
            raise UsageError(
                f"{what}: must lie in a folder that this server looks into; {visible(text)[:300]} {flaw}.", self._way()
            )
        return Path(os.path.realpath(place))

    def config_file(self, name: str) -> Path:
        """The config file of this name, as it was named. Raises UsageError where it may not be read, or cannot be one."""
        real = self.require(name, "file")
        shown = visible(name)
        if real.suffix.lower() not in CONFIGS:
            raise UsageError(f"{shown}: must be a config, a file that ends in .yaml or .yml.")
        try:
            if not stat.S_ISREG(os.stat(real).st_mode) and not real.is_dir():  # a pipe would be waited for
                raise UsageError(f"{shown}: must be a plain file.")
        except OSError:
            pass  # whoever reads it says what is wrong, in the commands' words
        return Path(os.path.expanduser(name))

    def judge(self, mapping: Mapping[str, Any], base: Path) -> None:
        """Raises UsageError for the first place that a config names and that is none to look into."""
        for setting, text in named_places(absolute(mapping, base)):
            scheme = scheme_of(text)
            if scheme and scheme != "hf":
                raise UsageError(
                    f"{setting}: what lies at an address is not fetched for an assistant; got {scheme}://….",
                    "Fetch it into a folder of this server, or give the command yourself.",
                )
            if not scheme and (
                os.path.isabs(text) or os.path.lexists(text)
            ):  # libraries also look where the process is
                self._judge_place(setting, text)
            elif ".." in text.split("/") or text.startswith("~"):
                raise UsageError(f"{setting}: must lie in a folder that this server looks into.", self._way())

    def _judge_place(self, setting: str, text: str) -> None:
        """Raises UsageError where a file or a folder lies outside, or a link in it leads out."""
        real = self.require(text, setting)
        if not real.is_dir():
            return
        for place in _links_below(real, setting):
            if not self.holds(place):
                raise UsageError(
                    f"{setting}: a link in {visible(text)[:300]} leads out of the folders that this server looks into: "
                    f"{visible(place.name)[:100]}.",
                    self._way(),
                )

    def run(self, name: str) -> RunFolder:
        """The run of this id in the folder of runs, or the run folder at this path. Raises RunNotFound, UsageError."""
        if "/" in name or name.startswith((".", "~")) or "\0" in name:
            self.require(name, "run")
        folder = store.find(name, self.runs)
        self.require(folder.path, "run")
        folder.refuse_flaws()
        return folder

    def configs(self) -> list[Path]:
        """The files below the roots that may be configs: no hidden ones, and none of run folders."""
        found: list[Path] = []
        for root in self.folders:
            for folder, folders, names in os.walk(root):
                here = Path(folder)
                deep = len(here.relative_to(root).parts)
                folders[:] = sorted(each for each in folders if not each.startswith(".") and each not in _LEFT_OUT)
                if deep >= DEEPEST or store.is_run(here):
                    folders.clear()
                if store.is_run(here):
                    continue
                for name in sorted(names):
                    is_config = name.lower().endswith(CONFIGS) and (here / name).is_file()
                    if is_config and self.holds(here / name):
                        found.append(here / name)
                        if len(found) == MOST_CONFIGS:
                            return found
        return found

    def _flaw(self, place: Path) -> str:
        """Why this is no place to look into, in a few words; empty where it is one."""
        try:
            real = Path(os.path.realpath(place))
        except (OSError, ValueError):
            return "cannot be followed"
        for root in self.all:
            if real.is_relative_to(root):
                hidden = any(part.startswith(".") for part in real.relative_to(root).parts)
                return "is hidden, or in a hidden folder" if hidden else ""
        return "lies elsewhere" if real == Path(os.path.abspath(place)) else "leads elsewhere"

    def _way(self) -> str:
        named = ", ".join(as_argument(root) for root in self.all)
        return f"It looks into {named}; `workbench mcp --root FOLDER` names others."


def root_of(folder: Path) -> Path:
    """The folder as a root. Raises UsageError."""
    shown, real = visible(str(folder)), Path(os.path.realpath(os.path.expanduser(folder)))
    if not real.is_dir():
        what = "a file" if real.exists() else "nothing there"
        raise UsageError(
            f"--root: must be a folder; got {what}: {shown}.", "Make it first, or name the folder of a project."
        )
    if real == Path(real.anchor) or real == Path(os.path.realpath(os.path.expanduser("~"))):
        raise UsageError(
            f"--root: must be the folder of a project; got {shown}, which holds everything.",
            "Name the folders with your configs, rows and models: `workbench mcp --root FOLDER`.",
        )
    return real


def _links_below(folder: Path, setting: str) -> Iterator[Path]:
    """The links below a folder. Raises UsageError where it holds too many names to look for them."""
    seen = 0
    for here, folders, names in os.walk(folder):
        seen += len(folders) + len(names)
        if seen > MOST_ENTRIES:
            raise UsageError(f"{setting}: must hold at most {MOST_ENTRIES:,} names to be looked into for an assistant.")
        yield from (place for name in (*folders, *names) if (place := Path(here, name)).is_symlink())
