"""LLaMA-Factory's list of data sets, `dataset_info.json`: what each entry means here, key by key.

It is read where it lies: below `dataset_dir` or beside the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.bridge.keys import Answer, File, changed, mapped, needless, unsupported
from engine.bridge.ledger import Row
from engine.config.files import DATA_SUFFIXES
from engine.config.renames import sentence_for

LIST = "dataset_info.json"
MOST_BYTES = 8 * 1024 * 1024
PAIRS = ("dpo", "ipo", "orpo", "simpo", "reward")
_TAGS = {"role_tag": "role", "content_tag": "content"}
_ROLE_TAGS = {
    "user_tag": ("user", "human"),
    "assistant_tag": ("assistant", "gpt"),
    "observation_tag": ("tool", "observation"),
    "function_tag": ("assistant", "function_call"),
    "system_tag": ("system", "system"),
}
_COLUMNS = {
    "sft": {"prompt": "instruction", "query": "input", "response": "output", "history": "history"},
    "pretrain": {"prompt": "text"},
    "kto": {"prompt": "prompt", "query": "input", "response": "completion", "kto_tag": "label"},
    "ppo": {"prompt": "prompt", "query": "input", "response": "answer"},
}
_PAIR_COLUMNS = {"prompt": "prompt", "query": "input", "chosen": "chosen", "rejected": "rejected"}
_MESSAGES = {"sft": "conversations", "kto": "messages", "ppo": "prompt"}
_FORMATS = {"pretrain": "text", "kto": "unpaired_preference", "ppo": "prompts"}
_DEFAULT_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
_MEDIA = ("images", "videos", "audios")
_UNKNOWN = unsupported(f"It is no key that is known of {LIST}, so nothing was taken from it.")
_REST = {
    "ms_hub_url": needless("The data set is taken from the Hugging Face hub, or from its file."),
    "om_hub_url": needless("The data set is taken from the Hugging Face hub, or from its file."),
    "script_url": unsupported("A data set that brings code is not read: bring its rows as a file."),
    "cloud_file_name": unsupported("Bring the rows as a file."),
    "subset": unsupported(sentence_for("dataset_config")),
    "folder": unsupported(sentence_for("dataset_config")),
    "revision": unsupported("A data set is read at its main branch here."),
}


def datasets(setting: str, method_of: Callable[[File], str]) -> Any:
    """What a list of names means for `data.train` or `data.eval`, the `setting`; columns are those of the file's method."""

    def means(value: Any, file: File) -> Answer:
        names = value if isinstance(value, list) else [name.strip() for name in str(value).split(",")]
        settings: dict[str, Any] = {}
        missing: list[str] = []
        place, listed = sources_of(file)
        known = 0
        for name in [str(item) for item in names if str(item)]:
            entry = listed.get(name)
            at = f"{setting}.{known}"
            if isinstance(entry, Mapping):
                settings.update(_entry(at, name, entry, file, place, method_of(file)))
            elif name.lower().endswith(DATA_SUFFIXES) or "/" in name:
                settings[f"{at}.path"] = file.place(name)
            else:
                missing.append(name)
                continue
            rows = file.get("max_samples")
            if isinstance(rows, int) and rows > 0:
                settings[f"{at}.rows"] = min(rows, settings.get(f"{at}.rows", rows))
            known += 1
        if missing:
            where = (
                f"{LIST} does not name {', '.join(missing)}."
                if listed
                else f"No {LIST} was found; --data-dir names its folder."
            )
            words = f"{where} {sentence_for('dataset')}"
            return changed(settings, words) if settings else unsupported(words)
        return mapped(settings)

    return means


def sources_of(file: File) -> tuple[Path, Mapping[str, Any]]:
    """Where the list of data sets lies, and what it says; an empty one where none is found."""
    named = str(file.get("dataset_dir", "data"))
    places = (
        [file.lists]
        if file.lists is not None
        else [file.resolve_path(named), file.folder, file.folder / "data", Path.cwd() / "data"]
    )
    for place in places:
        if place is None or not (place / LIST).is_file() or (place / LIST).stat().st_size > MOST_BYTES:
            continue
        try:
            listed = json.loads((place / LIST).read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(listed, Mapping):
            return place, listed
    return file.folder, {}


def _entry(at: str, name: str, entry: Mapping[str, Any], file: File, place: Path, method: str) -> dict[str, Any]:
    """The settings of one data set of the list; each of its keys becomes a row of the ledger."""
    chat = entry.get("formatting", "alpaca") != "alpaca"
    paired = method in PAIRS
    if paired:
        form = "preference"
    else:
        form = _FORMATS.get(method, "sharegpt" if chat else "alpaca")
    settings: dict[str, Any] = {f"{at}.format": form}

    def add_row(key: str, value: Any, answer: Answer) -> None:
        file.from_lists.append(
            Row(f"{LIST}: {name}.{key}", value, answer.outcome, answer.settings, answer.reason, "list")
        )
        if key in ("file_name", "hf_hub_url", "num_samples"):
            settings.update(answer.settings)

    hub = "hf_hub_url" in entry
    for key, value in entry.items():
        if key == "columns" and isinstance(value, Mapping):
            for part, column in value.items():
                add_row(f"columns.{part}", column, _column(at, str(part), column, method, chat))
        elif key == "tags" and isinstance(value, Mapping):
            for tag, word in value.items():
                add_row(f"tags.{tag}", word, _tag(at, str(tag), word))
        elif key == "file_name":
            add_row(
                key,
                value,
                needless("hf_hub_url counts before it.") if hub else mapped({f"{at}.path": _file(value, place, file)}),
            )
        elif key == "hf_hub_url":
            add_row(key, value, mapped({f"{at}.path": str(value)}))
        elif key == "formatting":
            add_row(key, value, mapped({f"{at}.format": form}))
        elif key == "ranking":
            add_row(key, value, needless("The method says it: pairs are read as chosen and rejected."))
        elif key == "split":
            add_row(key, value, mapped({f"{at}.split": value}) if hub else needless("A file has no splits."))
        elif key in ("subset", "revision") and hub:
            add_row(key, value, mapped({f"{at}.{key}": value}))
        elif key == "num_samples":
            add_row(key, value, mapped({f"{at}.rows": value}))
        else:
            add_row(key, value, _REST.get(str(key), _UNKNOWN))
    if not chat and "columns" not in entry:
        columns = {part: column for part, column in _named(method).items() if part in _DEFAULT_COLUMNS}
        wanted = {ours: _DEFAULT_COLUMNS[part] for part, ours in columns.items() if ours != _DEFAULT_COLUMNS[part]}
        if wanted:
            settings[f"{at}.columns"] = wanted
    return settings


def _file(value: Any, place: Path, file: File) -> str:
    there = place / str(value)
    return file.from_out(there) if there.exists() else str(value)


def _named(method: str) -> Mapping[str, str]:
    return _PAIR_COLUMNS if method in PAIRS else _COLUMNS.get(method, _COLUMNS["sft"])


def _column(at: str, part: str, column: Any, method: str, chat: bool) -> Answer:
    if part in _MEDIA:
        return mapped({f"{at}.columns": {part: column}}) if part == "images" else unsupported("Train on text alone.")
    if part == "messages" and chat:
        ours = "prompt" if method in PAIRS else _MESSAGES.get(method)
    elif part in ("system", "tools"):
        ours = part
    else:
        ours = _named(method).get(part)
    if ours is None:
        return needless(f"Rows of method {method} have no such part.")
    return mapped({f"{at}.columns": {ours: column}}) if ours != column else needless("The column has our name.")


def _tag(at: str, tag: str, word: Any) -> Answer:
    if tag in _TAGS:
        same_name = _TAGS[tag] == word or word in ("from", "value")
        return needless("It is known by that name.") if same_name else mapped({f"{at}.properties": {_TAGS[tag]: word}})
    if tag in _ROLE_TAGS:
        role, usual = _ROLE_TAGS[tag]
        known = word in (role, usual)
        return needless("The role is known by that name.") if known else mapped({f"{at}.roles": {str(word): role}})
    return _UNKNOWN
