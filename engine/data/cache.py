"""Prepared data on disk under a key of everything that changes tokens; a folder there is whole or absent.

The key covers the content of the sources in order, the tokenizer, the template, the mask policy, the limits and the
library versions. Changing any of them misses, changing none hits; the location of a file and its date are not part of it.
A build happens beside its target and is renamed, so a killed build leaves nothing that could be read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock

from engine.data.cache_entries import Progress, cache_folder, locked
from engine.data.image_references import changed_images, folder_of
from engine.data.plan import Plan, Source, named_template
from engine.data.vision import images_of, read_by
from engine.errors import WorkbenchError, redact, visible

FORMAT = 6  # grows when the prepared rows of an unchanged config, or what lies beside them, would differ
IMAGES = "images.json"
"""Beside prepared rows: size and date of each image that they refer to."""
WHOLE = 256 << 20
STRIDE = 1 << 20


class Store:
    """The folder of prepared data: named by the config, else in the user's cache."""

    def __init__(self, folder: str | None) -> None:
        self.folder = cache_folder(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as problem:
            raise self.error(problem) from None

    def path(self, key: str) -> Path:
        return self.folder / key

    def find(self, key: str) -> Path | None:
        """The folder of this key; none where an image that its rows were counted by is no longer what it was."""
        folder = self.path(key)
        if not (folder / "meta.json").is_file():
            return None
        if (stamps := folder / IMAGES).is_file() and changed_images(json.loads(stamps.read_text("utf-8"))):
            shutil.rmtree(folder, ignore_errors=True)
            return None
        return folder

    def lock(self, key: str, on_progress: Progress) -> contextlib.AbstractContextManager[Progress]:
        """Alone with this key; `on_progress` hears of another process that is, and what is reported inside."""
        return locked(self.path(key), on_progress)

    @contextlib.contextmanager
    def building(self, key: str) -> Iterator[Path]:
        """A folder to build in; it gets its name when the block ends well, else it is removed."""
        self._collect()
        folder = Path(tempfile.mkdtemp(prefix=f".{key}.", suffix=".tmp", dir=self.folder))
        try:
            yield folder
            os.rename(folder, self.path(key))
        except OSError as problem:
            raise self.error(problem) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _collect(self) -> None:
        """Remove what killed builds left: the lock is ours, so a build of this key is not under way elsewhere."""
        for left in self.folder.glob(".*.tmp"):
            key = left.name.split(".")[1]
            lock = FileLock(self.folder / f".{key}.lock", timeout=0)
            with contextlib.suppress(TimeoutError), lock:
                shutil.rmtree(left, ignore_errors=True)

    def error(self, problem: OSError) -> WorkbenchError:
        """What is told where nothing can be written here."""
        place = visible(redact(str(self.folder)))
        return WorkbenchError(
            f"data.dataset_prepared_path: prepared data cannot be written to {place} ({problem.strerror or problem})",
            "Free some space there, or name another folder.",
        )


def stored_choice(
    plan: Plan,
    name: str,
    parts: Mapping[str, Any],
    choose: Callable[[Plan, Progress], list[Any]],
    progress: Progress | None,
) -> list[Any]:
    """What `choose` picks of a plan's rows: kept under the content of its sources and `parts`, and chosen once."""
    waiting = progress or (lambda what, done, total: None)
    store = Store(plan.prepared_path)
    key = digest_of({**parts, "sources": source_parts(plan, waiting)})
    with store.lock(key, waiting) as report:
        if (folder := store.find(key)) is None:
            chosen = choose(plan, report)
            with store.building(key) as folder:
                (folder / "meta.json").write_text(json.dumps({name: chosen}), "utf-8")
                plan.refuse_changed()
            folder = store.path(key)
        found: list[Any] = json.loads((folder / "meta.json").read_text("utf-8"))[name]
    return found


def key_of(plan: Plan, processing_class: Any, progress: Callable[[str, int, int], None]) -> str:
    """The key of a plan's prepared rows."""
    parts = {**tokens_parts(plan, processing_class), "sources": source_parts(plan, progress)}
    if any(templates := [own_parts(source, processing_class) for source in plan.sources]):
        parts["templates"] = templates
    if plan.val_set_size is not None:
        parts["held out"] = [plan.val_set_size, plan.seed]
    if plan.deduplicate is not None:
        parts["deduplicate"] = plan.deduplicate
    return digest_of(parts)


def source_parts(plan: Plan, progress: Callable[[str, int, int], None]) -> list[dict[str, Any]]:
    """What decides which rows a plan's sources give, by their content."""
    return [_source(source, plan.seed, progress) for source in plan.sources]


def own_parts(source: Source, processing_class: Any) -> dict[str, Any]:
    """What a source says of the making of its rows, the text of its template among it; nothing where it says nothing."""
    parts: dict[str, Any] = {}
    if source.template is not None:
        parts["template"] = named_template(source.template, processing_class, "chat_template of a source")[0]
    if source.ranking_pairs != "best_worst":
        parts["ranking_pairs"] = source.ranking_pairs
    return parts


def digest_of(parts: Mapping[str, Any]) -> str:
    """The key of what these parts decide."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def tokens_parts(plan: Plan, processing_class: Any) -> dict[str, Any]:
    """All beside the sources that decides which tokens a row becomes and what is kept of it."""
    return {
        "format": FORMAT,
        "method": plan.method,
        "split": plan.split,
        "tokenizer": tokenizer_fingerprint(processing_class),
        "template": plan.template,
        "template_kwargs": dict(plan.template_kwargs),
        "trained_turns": plan.trained_turns if plan.trained_thinking else [plan.trained_turns, "answers"],
        "max_length": plan.max_length,
        "excess_length": [plan.excess_length, plan.truncation_side],
        "packing": [plan.packing, plan.separate],
        "on_bad_row": plan.on_bad_row,
        **_images_parts(plan, processing_class),
        "versions": {name: version(name) for name in ("transformers", "tokenizers", "jinja2")},
    }


def _images_parts(plan: Plan, processing_class: Any) -> dict[str, Any]:
    """Where images are looked for and what reads them; nothing for a model that sees none."""
    processor = images_of(processing_class)
    if processor is None:
        return {}
    folders = [folder_of(source.path, plan.image_base_dir).path for source in plan.sources]
    return {"images": [folders, read_by(processor)]}


def about(plan: Plan, processing_class: Any) -> dict[str, Any]:
    """What prepared rows are made of, for a person who lists them: no part of their key."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    return {
        "sources": list(dict.fromkeys(redact(str(entry["path"])) for entry in plan.entries)),
        "split": plan.split,
        "method": plan.method,
        "tokenizer": redact(str(getattr(tokenizer, "name_or_path", ""))),
        "template": redact(plan.template_name) if plan.template else None,
        "max_length": plan.max_length,
        "packing": plan.packing,
    }


def tokenizer_fingerprint(processing_class: Any) -> str:
    """A hash of what turns text and images into ids: the tokenizer's own file, its special tokens, the image processor, and
    what the processor of both says itself, such as the tokens of a tile or how many patches become one."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    found = _of_state(backend.to_str() if backend is not None else "{}").copy()
    parts: list[Any] = [{name: str(token) for name, token in tokenizer.special_tokens_map.items()}]
    processor = getattr(processing_class, "image_processor", None)
    if processor is not None:
        parts += [processor.to_dict(), _settings_of(processing_class)]
    told = json.dumps(parts, sort_keys=True, default=str)
    found.update(f", {told.removeprefix('[')}".encode())
    return found.hexdigest()[:32]


@functools.lru_cache(maxsize=4)
def _of_state(written: str) -> hashlib._Hash:
    """The hash of a list of parts, begun with a tokenizer's file, of which a vocabulary of 50,000 takes a third of a second to read and
    write again."""
    state = json.loads(written)
    # Padding and truncation are switched on and off in use and change no ids here.
    state.pop("padding", None)
    state.pop("truncation", None)
    return hashlib.sha256(f"[{json.dumps(state, sort_keys=True, default=str)}".encode())


def _settings_of(processor: Any) -> dict[str, Any]:
    """The plain values that a processor holds beside its parts; its chat template is a setting of the rows."""
    plain = (str, int, float, bool)
    return {
        name: value
        for name, value in vars(processor).items()
        if name != "chat_template"
        and (
            isinstance(value, plain)
            or (isinstance(value, (list, tuple)) and all(isinstance(each, plain) for each in value))
        )
    }


def _source(source: Source, seed: int, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    detection = source.detection
    return {
        "content": _content(source, progress),
        "format": detection.format,
        "columns": dict(detection.columns),
        "weight": source.weight,
        "limit": source.limit,
        "split": source.split,
        # A whole weight takes every row, whatever the seed.
        "seed": seed if source.weight % 1 else None,
    }


def _content(source: Source, progress: Callable[[str, int, int], None]) -> str:
    path = Path(source.file)
    dataset = getattr(source.rows, "_dataset", None)
    if dataset is not None:
        return str(dataset._fingerprint)
    if not path.is_file():
        if told := getattr(source.rows, "content", ""):
            return str(told)
        generated = hashlib.sha256()
        written = json.JSONEncoder(sort_keys=True, default=str)  # `dumps` makes one for each row
        for row in source.rows:
            generated.update(written.encode(row).encode())
        return generated.hexdigest()
    size = path.stat().st_size
    digest = hashlib.blake2b(f"{path.suffixes[-2:]} {size} ".encode())
    with path.open("rb") as file:
        if size > WHOLE:
            # A file too large to hash in a second: its date, and a megabyte in every 64.
            digest.update(str(path.stat().st_mtime_ns).encode())
        step = STRIDE if size <= WHOLE else 64 * STRIDE
        for offset in range(0, size, step):
            file.seek(offset)
            digest.update(file.read(STRIDE))
            if offset % (64 * STRIDE) == 0:
                progress("reading", offset, size)
    return digest.hexdigest()
