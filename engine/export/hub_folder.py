"""What goes to a hub of one checkpoint while its run trains, in a folder of its own: the model as other programs open it, a
model card, and the complete checkpoint where the strategy asks for that.

The folder holds hard links, which cost no room and no time: the run may delete the checkpoint meanwhile, and what is sent stays
whole. Where the file system has none, files are copied. Weights that several processes wrote in shares are put together first.
No torch but for those.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import model_files
from engine.config.tree import RunConfig
from engine.errors import WorkbenchError
from engine.export.card import base_name, card
from engine.export.places import TOKENIZER, Source, need_room
from engine.run import checkpoint, inside
from engine.run.store import RunFolder

FOLDER = "hub"
"""Of the run; there while something is sent."""
LAST = "last-checkpoint"
"""transformers' name for the folder of the newest checkpoint in a repository."""
_MODEL = ("config.json", "generation_config.json", model_files.INDEX)
_PIECE = 1 << 20


@dataclass(frozen=True)
class HubFolder:
    """What is sent: its folder, in words, files and bytes."""

    path: Path
    what: str
    files: int
    bytes: int
    card: str


def path_in_repository(strategy: str, step: int) -> str:
    """The folder of a repository for a complete checkpoint; empty where the strategy sends none."""
    return {"checkpoint": LAST, "all_checkpoints": f"checkpoint-{step}"}.get(strategy, "")


@contextlib.contextmanager
def hub_folder(run: RunFolder, config: RunConfig, step: int, strategy: str, text: str = "") -> Iterator[HubFolder]:
    """The folder of one checkpoint, gone afterwards; `text` is its card where that is made already. Raises FileNotFoundError where the checkpoint is deleted, WorkbenchError
    where it is not whole or cannot be put together."""
    place, found = run.path / FOLDER, run.checkpoints / f"checkpoint-{step}"
    drop_old(run)
    if not inside.exists(run, found):
        raise FileNotFoundError(str(found))
    if reason := checkpoint.problem_with(found):
        raise WorkbenchError(f"{found.name}: cannot be sent: it {reason}.")
    inside.make_folder(run, place)
    try:
        with _together(run, found, place) as whole:
            adapted = inside.exists(run, found / model_files.ADAPTER)
            _model(run, config, whole, place, adapted=adapted)
            text = text or card(run, config, found, "adapter" if adapted else "safetensors", None, "")
            inside.replace(run, place / "README.md", text, durable=False)
            what = f"{'the adapter' if adapted else 'the weights'}, tokenizer and model card"
            if inner := path_in_repository(strategy, step):
                _all_of(run, found, place / inner)
                what += f"; all of {found.name}, optimizer states included, in {inner}"
            sizes = [info.st_size for _, info in inside.entries(run, place) if stat.S_ISREG(info.st_mode)]
            yield HubFolder(place, what, len(sizes), sum(sizes), text)
    finally:
        drop_old(run)


def drop_old(run: RunFolder) -> None:
    """Takes away the folder, also that of a process that was killed; the checkpoints' own files stay."""
    for name in inside.names(run):
        if name == FOLDER or name.startswith(f".{FOLDER}.whole-"):
            inside.remove(run, run.path / name)


@contextlib.contextmanager
def _together(run: RunFolder, found: Path, place: Path) -> Iterator[Path]:
    """The checkpoint, its weights put together where they are in shares."""
    if not inside.exists(run, found / model_files.SHARES):
        yield found
        return
    from engine.export.shards import put_together  # torch is needed for these alone

    with put_together(Source(run, found, adapted=False), place) as source:
        yield source.checkpoint


def _model(run: RunFolder, config: RunConfig, at: Path, place: Path, *, adapted: bool) -> None:
    """The model of a checkpoint as other programs open it: no optimizer, no state of the training."""
    if adapted:
        _link(run, at / model_files.ADAPTER_WEIGHTS, place / model_files.ADAPTER_WEIGHTS)
        content: dict[str, Any] = json.loads(inside.read(run, at / model_files.ADAPTER, model_files.LARGEST_JSON))
        # A path of this machine tells others its folders, and leads them nowhere.
        content |= {"base_model_name_or_path": base_name(config.model.name), "revision": config.model.revision}
        inside.replace(run, place / model_files.ADAPTER, json.dumps(content, indent=2) + "\n", durable=False)
        names = list(TOKENIZER)
    else:
        names = [*(path.name for path in model_files.weight_files(at)), *_MODEL, *TOKENIZER]
    for name in dict.fromkeys(names):
        if inside.exists(run, at / name):
            _link(run, at / name, place / name)


def _all_of(run: RunFolder, at: Path, place: Path) -> None:
    inside.make_folder(run, place)
    for name, info in list(inside.entries(run, at)):
        if stat.S_ISDIR(info.st_mode):
            inside.make_folder(run, place / name)
        else:
            _link(run, at / name, place / name)


def _link(run: RunFolder, file: Path, place: Path) -> None:
    """A second name for a plain file of the run, or a copy where there can be none."""
    handle = inside.open_file(run, file)  # refuses what is no plain file of the run's owner
    with (
        open(handle, "rb") as content,
        inside.open_folder(run, file.parent) as from_,
        inside.open_folder(run, place.parent) as to,
    ):
        try:
            os.link(file.name, place.name, src_dir_fd=from_, dst_dir_fd=to, follow_symlinks=False)
        except FileNotFoundError:
            raise
        except OSError:
            need_room(place, os.fstat(content.fileno()).st_size)
            copy = inside.open_file(run, place, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with open(copy, "wb") as into:
                while piece := content.read(_PIECE):
                    into.write(piece)
