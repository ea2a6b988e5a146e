"""What a person means by a value: `no` for a switch, `3e-4` as text, `q_proj, v_proj` for a list.

`coerce(spec, value)` gives the value that the setting's type wants where that is beyond doubt, and otherwise the value
as it came; whether it is allowed is decided by the section's own annotation afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from engine.config.findings import shown
from engine.config.text_values import entries
from engine.config.tree import FieldSpec
from engine.figures import alternatives

_NO = {"no", "off", "false", "none", "null", "~", ""}
_NOTHING = {"", "null", "none", "~"}
_FALSE = {"no", "off", "false", "none", "null", "~", "", "0", "n", "f"}
_TRUE = {"yes", "on", "true", "1", "y", "t"}
_NUMBER = re.compile(r"[+-]?(\d[\d_]*)?(\.\d*)?([eE][+-]?\d+)?")
_NAMES = re.compile(r"[\w.*-]+(\s*,\s*[\w.*-]+)+,?")

# Other spellings of a choice that the field uses every day.
SPELLINGS: dict[str, dict[str, str]] = {
    "model.dtype": {
        "bf16": "bfloat16", "fp16": "float16", "half": "float16", "f16": "float16", "fp32": "float32", "f32": "float32",
    },
    "model.quantization": {"4bit": "nf4", "int4": "nf4", "8bit": "int8"},
    "model.attention": {"flash_attn_2": "flash_attention_2", "flash_attn_3": "flash_attention_3", "flash_attn_4": "flash_attention_4", "flex": "flex_attention", "varlen_attn": "varlen", "xformers_attention": "xformers"},
    "optim.optim": {
        "adamw": "adamw_torch_fused", "adamw_bnb_8bit": "adamw_8bit", "lion": "lion_32bit", "adopt_adamw": "adopt",
        "came_pytorch": "came", "schedule_free": "schedule_free_adamw", "galore": "galore_adamw",
        "q_galore_adamw8bit": "q_galore_adamw_8bit", "q_galore": "q_galore_adamw_8bit",
    },
}  # fmt: skip


def coerce(spec: FieldSpec, value: Any) -> Any:
    """The value as this setting's type wants it, where what is meant is beyond doubt."""
    if isinstance(value, str):
        return _of_text(spec, value)
    if value is None:
        return None if spec.nullable else _empty(spec)
    if isinstance(value, bool):
        return _of_bool(spec, value)
    if isinstance(value, (int, float)):
        if spec.control in ("text", "path"):
            return str(value)
        if spec.control == "prompts":
            return [str(value)]
        if spec.control == "bool" or True in spec.choices:
            return bool(value) if value in (0, 1) else Uncoerced(value)
        if spec.control in ("int", "list") and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            return int(value)
        return value
    if isinstance(value, list):
        if spec.control == "prompts":
            return [
                str(item) if isinstance(item, (int, float)) and not isinstance(item, bool) else item for item in value
            ]
        if spec.control == "list" and spec.path == "run.devices":
            return [Uncoerced(item) if isinstance(item, bool) else item for item in value]
    return value


class Uncoerced:
    """A value of a kind that a lax reader would bend (`true` for a number); it fits no setting."""

    def __init__(self, value: Any) -> None:
        self.value = value


def fit(spec: FieldSpec, value: Any) -> Any:
    """The value that stands in the config, by the setting's annotation; `Uncoerced` where it does not fit.

    The same answer as pydantic's validator of the section gives for what `coerce` returns, without building one.
    """
    value = coerce(spec, value)
    if (value is None and spec.nullable) or (spec.auto and isinstance(value, str) and value == "auto"):
        return value
    return value if isinstance(value, Uncoerced) else _FITS[spec.control](spec, value)


def _fit_choice(spec: FieldSpec, value: Any) -> Any:
    for choice in spec.choices:
        if type(choice) is type(value) and choice == value:
            return value
    return Uncoerced(value)


def _fit_bool(spec: FieldSpec, value: Any) -> Any:
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else Uncoerced(value)


def _fit_number(spec: FieldSpec, value: Any) -> Any:
    whole = spec.control == "int"
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        return Uncoerced(value)
    bounds = spec.bounds
    fits = (
        (bounds.gt is None or value > bounds.gt)
        and (bounds.ge is None or value >= bounds.ge)
        and (bounds.lt is None or value < bounds.lt)
        and (bounds.le is None or value <= bounds.le)
        and (whole or value == value)
    )
    if not fits:
        return Uncoerced(value)
    return value if whole else float(value)


def _fit_text(spec: FieldSpec, value: Any) -> Any:
    return value if isinstance(value, str) else Uncoerced(value)


def _fit_list(spec: FieldSpec, value: Any) -> Any:
    if spec.path == "run.devices":
        if isinstance(value, list):
            fits = all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= 1023 for item in value)
        else:
            fits = isinstance(value, int) and 1 <= value <= 1024
        return value if fits else Uncoerced(value)
    if isinstance(value, str) and not isinstance(spec.default, list):
        return value
    return _fit_texts(spec, value)


def _fit_texts(spec: FieldSpec, value: Any) -> Any:
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else Uncoerced(value)


def _fit_mapping(spec: FieldSpec, value: Any) -> Any:
    fits = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if fits and spec.of_text:
        fits = all(isinstance(item, str) for item in value.values())
    return value if fits else Uncoerced(value)


_FITS: dict[str, Callable[[FieldSpec, Any], Any]] = {
    "choice": _fit_choice,
    "bool": _fit_bool,
    "int": _fit_number,
    "float": _fit_number,
    "text": _fit_text,
    "path": _fit_text,
    "list": _fit_list,
    "mapping": _fit_mapping,
    "prompts": _fit_texts,
}


def _empty(spec: FieldSpec) -> Any:
    """What an empty value means where nothing is not a value: the empty list, mapping or choice `none`."""
    if spec.control in ("list", "prompts", "sources") and isinstance(spec.default, list):
        return []
    if spec.control == "mapping":
        return {}
    if "none" in spec.choices:
        return "none"
    return None


def _of_bool(spec: FieldSpec, value: bool) -> Any:
    if spec.control == "bool" or value in [choice for choice in spec.choices if isinstance(choice, bool)]:
        return value
    if value is False and spec.nullable:
        return None
    if value is False and "none" in spec.choices:
        return "none"
    return Uncoerced(value)


def _of_text(spec: FieldSpec, text: str) -> Any:
    word = text.strip()
    low = word.lower()
    if spec.auto and low == "auto":
        return "auto"
    if spec.control in ("text", "path"):
        return None if spec.nullable and low in _NOTHING else text
    if spec.control == "choice":
        return _choice(spec, word, low)
    if spec.nullable and low in _NOTHING:
        return None
    if spec.control == "bool":
        return low in _TRUE if low in _TRUE or low in _FALSE else Uncoerced(text)
    if spec.control in ("int", "float"):
        return _number(spec, word)
    if spec.control == "prompts":
        return [text] if word else []
    if spec.control == "list":
        return _list(spec, word)
    if spec.control == "mapping":
        parsed = entries(word, of_text=spec.of_text)
        return Uncoerced(text) if parsed is None else parsed
    if spec.control == "sources":
        return [{"path": word}] if word else []
    return text


def _choice(spec: FieldSpec, word: str, low: str) -> Any:
    for choice in spec.choices:
        if isinstance(choice, str) and choice.lower() == low.replace("-", "_"):
            return choice
    if True in spec.choices and (low in _TRUE or low in _FALSE):
        return low in _TRUE
    if low in SPELLINGS.get(spec.path, {}):
        return SPELLINGS[spec.path][low]
    if low in _NO:
        if spec.nullable:
            return None
        if "none" in spec.choices:
            return "none"
    return word


def _number(spec: FieldSpec, word: str) -> Any:
    if not word or len(word) > 400 or not _NUMBER.fullmatch(word) or not any(map(str.isdigit, word)):
        return Uncoerced(word)
    number = word.replace("_", "")
    if re.fullmatch(r"[+-]?\d+", number):
        return int(number)
    value = float(number)
    return int(value) if spec.control == "int" and value.is_integer() and abs(value) < 2**53 else value


def _list(spec: FieldSpec, word: str) -> Any:
    inner = word[1:-1].strip() if word.startswith("[") and word.endswith("]") else word
    if spec.path == "run.devices":
        if re.fullmatch(r"\d{1,6}", word):
            return int(word)
        if re.fullmatch(r"(\d{1,6}(\s*,\s*\d{1,6})*)?,?", inner):
            return [int(part) for part in inner.split(",") if part.strip()]
        return Uncoerced(word)
    if inner != word or _NAMES.fullmatch(word):
        return [part.strip().strip("'\"") for part in inner.split(",") if part.strip()]
    if isinstance(spec.default, list):
        return [word] if word else []
    return word


def expectation(spec: FieldSpec) -> str:
    """What the setting takes, in words: `a number above 0, or auto`."""
    rule = _describe_type(spec)
    if spec.auto:
        rule += ", or auto"
    if spec.nullable:
        rule += ", or empty"
    return rule


def _describe_type(spec: FieldSpec) -> str:
    if spec.path == "run.devices":
        return "a number of GPUs, a list of GPU numbers such as [0, 2]"
    if spec.control == "choice":
        return alternatives([shown(choice) for choice in spec.choices if choice not in spec.unsupported])
    if spec.control in ("int", "float"):
        return ("a whole number" if spec.control == "int" else "a number") + _describe_bounds(spec)
    return {
        "bool": "true or false",
        "text": "text",
        "path": "text: a name or a path",
        "list": "a list of names" if isinstance(spec.default, list) else "a name or a list of names",
        "mapping": "settings of the form `key: value`",
        "sources": "a list of sources, each with a `path`",
        "prompts": "a list of texts",
    }[spec.control]


def _describe_bounds(spec: FieldSpec) -> str:
    bounds = spec.bounds
    low = (
        f"above {shown(bounds.gt)}"
        if bounds.gt is not None
        else f"of at least {bounds.ge}"
        if bounds.ge is not None
        else ""
    )
    high = (
        f"below {shown(bounds.lt)}"
        if bounds.lt is not None
        else f"at most {bounds.le}"
        if bounds.le is not None
        else ""
    )
    return " " + " and ".join(part for part in (low, high) if part) if low or high else ""
