"""Axolotl's data sets as sources of rows: their files, their types and columns, the keys of an entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.bridge.axolotl import values
from engine.bridge.keys import (
    OFF,
    SAME_HERE,
    Answer,
    File,
    Key,
    Part,
    changed,
    flag,
    mapped,
    needless,
    nothing,
    unless,
    unless_off,
    unsupported,
)
from engine.bridge.sources import READERS, SPLIT_OF_FILE, named_split
from engine.config.data import IN_MESSAGES
from engine.config.kinds import SYNTHETIC
from engine.config.renames import TEMPLATES, sentence_for

_PROMPT = (
    "Axolotl writes such rows with a prompt text of its own; here they become turns in the model's chat template, which "
    "model.chat_template can replace."
)


def sources(setting: str) -> Any:
    def means(value: Any, file: File) -> Answer | list[Part]:
        if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
            return unsupported(sentence_for("datasets"))
        return [part for number, entry in enumerate(value) for part in _entry(setting, number, entry, file)]

    return means


def _entry(setting: str, number: int, entry: Mapping[str, Any], file: File) -> list[Part]:
    at, method = f"{setting}.{number}", values.method_of(file)
    path, files = str(entry.get("path") or ""), entry.get("data_files")
    if entry.get("type") in ("_synthetic", "synthetic"):
        return _synthetic(at, number, entry, file)
    generic = path in READERS and isinstance(files, (str, list))
    parts: list[Part] = [] if entry else [(str(number), entry, unsupported("It names no rows."))]
    for key, value in entry.items():
        answer: Answer | list[Part]
        if value is None:
            answer = needless(OFF)
        elif key == "path":
            answer = needless("data_files names the rows.") if generic else mapped({f"{at}.path": file.place(path)})
        elif key == "data_files":
            answer = _data_files(at, value, file) if generic else unsupported(_PARTS)
        elif key == "split":
            local = generic or file.is_local(path)
            answer = needless(SPLIT_OF_FILE) if local else named_split(f"{at}.split", f"{at}.rows", value)
        elif key in ("name", "revision") and not generic and not file.is_local(path):
            answer = mapped({f"{at}.{'subset' if key == 'name' else key}": value})
        elif key == "type":
            answer = _type(at, value, method)
        elif key in _COLUMNS:
            answer = mapped({f"{at}.columns": {_column(key, method): value}})
        elif key in ("message_property_mappings", "roles") and isinstance(value, Mapping):
            answer = _properties(at, value) if key != "roles" else _roles(at, value)
        elif key in ("message_field_role", "message_field_content"):
            answer = mapped({f"{at}.properties": {key.rpartition("_")[2]: value}})
        elif key in ("chat_template", "chat_template_jinja"):
            answer = _template(at, key, value, file)
        else:
            answer = _IN_ENTRY[key].means(value, file) if key in _IN_ENTRY else unsupported(_NO_SUCH)
        inner = answer if isinstance(answer, list) else [("", value, answer)]
        parts += [(".".join(filter(None, (str(number), str(key), name))), item, part) for name, item, part in inner]
    if entry.get("type") == "chat_template.default" and method in values.PAIRS and not entry.get("field_messages"):
        name, item, part = next(candidate for candidate in parts if candidate[0] == f"{number}.type")
        settings = {**part.settings, f"{at}.columns": {"prompt": "messages"}}
        parts[parts.index((name, item, part))] = (name, item, Answer(part.outcome, settings, part.reason))
    if setting == "data.train" and method == "pretrain" and parts:
        name, item, part = parts[0]
        parts[0] = (name, item, Answer(part.outcome, {"method.kind": "pretrain", **part.settings}, part.reason))
    return parts


def _template(at: str, key: str, value: Any, file: File) -> Answer:
    """The template of one source: the model's where it is the only one, so that samples and export speak the same."""
    answer = values.template(value, file) if key == "chat_template" else values.jinja(value, file)
    if at == "data.train.0" and len(file.get("datasets") or ()) == 1:
        return answer
    settings = {f"{at}.chat_template": name for name in answer.settings.values()}
    return Answer(answer.outcome, settings, answer.reason)


def _synthetic(at: str, number: int, entry: Mapping[str, Any], file: File) -> list[Part]:
    """Rows of tokens drawn by chance; without a length of their own they are as long as a row may be."""
    answers = {
        "type": mapped({f"{at}.format": "synthetic"}),
        "path": mapped({f"{at}.path": SYNTHETIC}),
        "length": mapped({f"{at}.rows": entry.get("length")}),
        "sequence_length": mapped({f"{at}.tokens": entry.get("sequence_length")}),
        "min_input_id": needless(_VOCABULARY),
        "max_input_id": needless(_VOCABULARY),
        "seed": needless("run.seed draws them."),
    }
    if entry.get("sequence_length") is None and (longest := file.get("sequence_len")) is not None:
        answers["type"] = mapped({f"{at}.format": "synthetic", f"{at}.tokens": longest})
    return [
        (f"{number}.{key}", value, needless(OFF) if value is None else answers.get(str(key), unsupported(_NO_SUCH)))
        for key, value in entry.items()
    ]


_VOCABULARY = "Tokens are drawn from the whole vocabulary but its special ones."
SEEN = "multimodal_pretrain"
_PARTS = "The files of a data set have no setting here: each file is a source with a path of its own below data.train."
_NO_SUCH = "It is no key of a source that is known of Axolotl, so nothing was taken from it."


def _data_files(at: str, value: Any, file: File) -> Answer:
    names = value if isinstance(value, list) else [value]
    if len(names) != 1 or not isinstance(names[0], str):
        return unsupported(_PARTS)
    return mapped({f"{at}.path": file.place(names[0])})


def _type(at: str, value: Any, method: str) -> Answer | list[Part]:
    if isinstance(value, Mapping):
        return _written_type(at, value, method)
    word = str(value)
    base, _, _variant = word.partition(".")
    form = {"kto": "unpaired_preference", "grpo": "prompts", "gdpo": "prompts", "prm": "stepwise_supervision"}.get(
        method, "preference" if method in values.PAIRS else ""
    )
    if form:
        written = {f"{at}.format": form}
        if base in TEMPLATES:
            return changed({**written, "model.chat_template": base}, f"{_PROMPT} {base} is that template here.")
        own = base in ("chat_template", "bradley_terry", "stepwise_supervised") and "." not in word.removeprefix(
            "bradley_terry.chat_template"
        ).removeprefix("chat_template.default")
        return mapped(written) if own else changed(written, "Which columns hold what is seen in the rows here.")
    simple = {"chat_template": "messages", "completion": "text", "pretrain": "text", SEEN: SEEN}
    if word in simple:
        return mapped({f"{at}.format": simple[word]})
    if word == "sharegpt":
        return changed({f"{at}.format": "sharegpt"}, _PROMPT)
    if base == "alpaca":
        return changed({f"{at}.format": "alpaca"}, _PROMPT)
    return changed({}, f"Its format is detected. {_PROMPT}")


_WRITTEN = {
    "sft": ("alpaca", {"instruction": "instruction", "input": "input", "output": "output", "system": "system"}),
    "pairs": ("preference", {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "system": "system"}),
    "kto": ("unpaired_preference", {"prompt": "prompt", "completion": "completion", "label": "label"}),
}


def _written_type(at: str, value: Mapping[str, Any], method: str) -> list[Part]:
    """A format that the file itself writes out: its columns are ours, its prompt texts are not."""
    form, columns = _WRITTEN["kto" if method == "kto" else "pairs" if method in values.PAIRS else "sft"]
    parts: list[Part] = []
    for key, item in value.items():
        column = columns.get(str(key).removeprefix("field_"))
        if item is None:
            parts.append((str(key), item, needless(OFF)))
        elif str(key).startswith("field_") and column:
            parts.append((str(key), item, mapped({f"{at}.format": form, f"{at}.columns": {column: item}})))
        else:
            parts.append((str(key), item, unsupported(_PROMPT)))
    return parts


_COLUMNS = {
    "field_messages": "messages",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_tools": "tools",
    "field_system": "system",
    "field": "text",
    "text_column": "text",
}


def _column(key: str, method: str) -> str:
    return "prompt" if key == "field_messages" and method in values.PAIRS else _COLUMNS[key]


def _properties(at: str, value: Mapping[str, Any]) -> list[Part]:
    why = f"A message is made of {', '.join(IN_MESSAGES)} here."
    return [
        (str(key), item, mapped({f"{at}.properties": {key: item}}) if key in IN_MESSAGES else unsupported(why))
        for key, item in value.items()
    ]


def _roles(at: str, value: Mapping[str, Any]) -> list[Part]:
    """There a role has its names, here a name has its role."""
    parts: list[Part] = []
    for role, names in value.items():
        written = {str(name): role for name in (names if isinstance(names, list) else [names]) if name != role}
        answer = mapped({f"{at}.roles": written}) if written else needless("The role has that name here too.")
        parts.append((str(role), names, answer))
    return parts


def _trained_roles(value: Any, file: File) -> Answer:
    names = value if isinstance(value, list) else [value]
    if names and all(name in ("assistant", "gpt") for name in names):
        return mapped({"data.trained_turns": "assistant"})
    if "all" in names:
        return mapped({"data.trained_turns": "all"})
    return unsupported(
        "data.trained_turns takes every assistant turn, all turns, the last, or those with `train: true`."
    )


def _train_mark(value: Any, file: File) -> Answer:
    if value == "train":
        return mapped({"data.trained_turns": "flag"})
    return unsupported(
        "Such a mark is called `train` here: data.trained_turns flag learns the turns with `train: true`."
    )


SHARDS = "A source takes its first rows with `rows`; other shares have no setting here: bring them as a file."
_IN_ENTRY: dict[str, Key] = {
    "name": unless_off("A data set's parts have no setting here: bring the rows of this one as a file."),
    "ds_type": nothing("The file's ending says it."),
    "trust_remote_code": unless_off(),
    "revision": unless_off("A file has no revision."),
    "shards": unless_off(SHARDS),
    "shards_idx": unless_off(SHARDS),
    "skip": unless_off(SHARDS),
    "preprocess_shards": nothing("Rows are prepared in blocks by themselves."),
    "input_transform": unless_off("Rows are taken as they stand: change them in a file of your own."),
    "input_format": unless_off(_PROMPT),
    "conversation": nothing("The preview says what was seen in the rows; format and columns say it otherwise."),
    "field_human": unless_off("columns names the columns of a source by their parts."),
    "field_model": unless_off("columns names the columns of a source by their parts."),
    "field_thinking": unless_off("properties names the key inside a message, as `thinking: reasoning`."),
    "template_thinking_key": unless_off("The template gets a message's reasoning as it stands."),
    "message_field_training": Key(_train_mark),
    "message_field_training_detail": unless_off("A turn is learned as a whole here: data.trained_turns flag."),
    "split_thinking": unless_off("The template gets a message's reasoning as it stands."),
    "logprobs_field": unless_off("Rows of method distill name a teacher's log-probabilities under columns."),
    "temperature": unless_off("method.kd_temperature says it of method distill."),
    "roles_to_train": Key(_trained_roles),
    "train_on_eos": unless("turn", "The end of each learned turn is learned, of others none.", SAME_HERE),
    "drop_system_message": unless_off("A row's system turn is read: leave it out of the rows."),
    "step_separator": unless_off("A step ends with a line break here."),
    "max_completion_length": unless_off("data.max_length bounds a row, its prompt and its steps together."),
    "train_on_last_step_only": flag({"method.train_on_last_step_only": True}),
}
