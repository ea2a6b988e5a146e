"""What stands in `method.reward_funcs`, one text a reward: its weight, which one it is, what it is given, its name.

`0.2 * length:64` is the built-in reward `length` with the argument 64 at a fifth of the weight; `rewards.py:score` is the
function `score` of a file; `model:NAME` is a reward model. Only the text is read here: whether a file is there and its
function fit to be called is found out before training (`engine.rewards`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from engine.errors import nearest

BUILTIN: dict[str, str] = {
    "exact_match": "1 where the answer is word for word the row's answer, else 0",
    "gsm8k": "1 where the last number of the answer is the number of the row's answer, else 0",
    "regex": "1 where the pattern is found in the answer, else 0: `regex:^\\d{4}-`",
    "format": "1 where the answer has this form, `{}` standing for any text, else 0: `format:<think>{}</think>{}`",
    "length": "1 up to so many tokens, then falling to 0 at twice as many: `length:64`",
    "json_schema": "1 where the answer is JSON that fits the schema in the file, else 0: `json_schema:schema.json`",
}
"""The built-in rewards and what each gives."""
SEES_NOT = "A reward model reads text alone: score the answers by a function, which is given the images of the row."
THINK = "<think>{}</think>{}"

_WEIGHT = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*\*\s*(.*)", re.DOTALL)
_FILE = re.compile(r"(.+\.py):([^:/\\]*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One reward. `kind` is the name of a built-in one, `function` or `model`; `name` is what its curves are called."""

    kind: str
    argument: str
    function: str
    weight: float
    name: str
    text: str


class BadReward(ValueError):
    """A text that names no reward: what it must be, and what to do."""

    def __init__(self, rule: str, todo: str) -> None:
        super().__init__(f"must be {rule}. {todo}")
        self.rule, self.todo = rule, todo


def reward_specs(texts: Sequence[str]) -> tuple[RewardSpec, ...]:
    """The rewards of a config, each with a name of its own. Raises BadReward for the first that is none."""
    specs: list[RewardSpec] = []
    taken: dict[str, int] = {}
    for text in texts:
        spec = reward_spec(text)
        taken[spec.name] = taken.get(spec.name, 0) + 1
        number = taken[spec.name]
        specs.append(spec if number == 1 else replace(spec, name=f"{spec.name}_{number}"))
    return tuple(specs)


def reward_spec(text: str) -> RewardSpec:
    """One reward read from its text. Raises BadReward."""
    weighted = _WEIGHT.fullmatch(text)
    weight, rest = (float(weighted[1]), weighted[2].strip()) if weighted else (1.0, text.strip())
    if not math.isfinite(weight) or weight == 0:
        raise BadReward("a reward with a weight that is a number other than 0", "Leave it out instead.")
    if (match := _FILE.fullmatch(rest)) is not None:
        if not match[2].isidentifier():
            raise BadReward("a function of a file, as in rewards.py:score", "Name the function after the colon.")
        return RewardSpec("function", match[1], match[2], weight, match[2], text)
    kind, _, argument = rest.partition(":")
    if kind == "model":
        if not argument:
            raise BadReward("a reward model by its name, as in model:NAME", "Name it after the colon.")
        if argument.startswith("builtin/"):
            todo = "The built-in model has no head that scores; method.kind reward trains one."
            raise BadReward("a reward model by its folder or hub id", todo)
        return RewardSpec("model", argument, "", weight, PurePath(argument).name or argument, text)
    if kind not in BUILTIN:
        raise BadReward(
            f"one of {', '.join(BUILTIN)}, a function as in rewards.py:score, or a model as in model:NAME",
            f"Did you mean {close}?" if (close := nearest(kind, BUILTIN)) else "Choose one of them.",
        )
    return RewardSpec(kind, _argument(kind, argument), "", weight, kind, text)


def _argument(kind: str, argument: str) -> str:
    if kind in ("exact_match", "gsm8k"):
        if argument:
            raise BadReward(f"{kind} without an argument", "It compares with the row's answer.")
    elif kind == "regex":
        try:
            re.compile(argument)
        except re.error as problem:
            raise BadReward(f"a regular expression; {problem}", "Mend the pattern after the colon.") from None
        if not argument:
            raise BadReward("a regular expression, as in regex:^\\d{4}-", "Write the pattern after the colon.")
    elif kind == "format":
        argument = argument or THINK
        if "{}" not in argument:
            raise BadReward("a form with {} where any text may stand", "Without one it would be exact_match.")
    elif kind == "length" and not (argument.isdigit() and int(argument) > 0):
        raise BadReward("a number of tokens above 0, as in length:64", "Write it after the colon.")
    elif kind == "json_schema" and not argument:
        raise BadReward("a file with a JSON schema, as in json_schema:schema.json", "Name it after the colon.")
    return argument


def with_path(text: str, place: Callable[[str], str]) -> str:
    """The text with the file or model it names put through `place(name) -> name`; others stay as they are."""
    try:
        spec = reward_spec(text)
    except BadReward:
        return text
    if spec.kind not in ("function", "model", "json_schema"):
        return text
    named = place(spec.argument)
    return text.replace(spec.argument, named, 1) if named != spec.argument else text


def files_of(texts: Sequence[str]) -> list[str]:
    """The files that rewards name, as written: of functions and of JSON schemas, and the folders of reward models."""
    files: list[str] = []
    for text in texts:
        try:
            spec = reward_spec(text)
        except BadReward:
            continue
        local_model = spec.kind == "model" and spec.argument.startswith((".", "~", "/"))
        if local_model or spec.kind in ("function", "json_schema"):
            files.append(spec.argument)
    return files


def pattern_of(form: str) -> str:
    """The regular expression of a `format` argument: `{}` stands for any text, the rest for itself."""
    return r"\s*" + "(?s:.*?)".join(re.escape(part) for part in form.split("{}")) + r"\s*"


__all__ = ["BUILTIN", "BadReward", "RewardSpec", "files_of", "pattern_of", "reward_spec", "reward_specs", "with_path"]
