"""Ready configs, one a goal, holding only what differs from the defaults; their comments teach.

The first line of a recipe is its title. A recipe is a YAML file in this folder; nothing else knows what is in it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engine.errors import UsageError, nearest, visible

# name -> the goal it serves, in the order shown
NAMES: dict[str, str] = {
    "demo": "try",
    "demo-images": "try",
    "sft-lora": "answer",
    "qlora-24gb": "answer",
    "full": "answer",
    "qwen3-30b-a3b": "answer",
    "qwen3-30b-a3b-24gb": "answer",
    "qwen3.5-35b-a3b": "answer",
    "olmoe": "answer",
    "mixtral": "answer",
    "gpt-oss-20b": "answer",
    "moonlight-16b-a3b": "answer",
    "dpo": "prefer",
    "ipo": "prefer",
    "simpo": "prefer",
    "orpo": "prefer",
    "kto": "prefer",
    "grpo": "score",
    "gdpo": "score",
    "ppo": "score",
    "distill": "answer",
    "pretrain-text": "read",
    "embedding": "vectors",
    "reward": "judge",
    "prm": "judge",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A ready config: its name, a title, its YAML, and the goal it serves."""

    name: str
    title: str
    text: str
    goal: str


@cache
def recipes() -> tuple[Recipe, ...]:
    """All recipes, the built-in demo first."""
    return tuple(_recipe(name) for name in NAMES)


@cache
def _recipe(name: str) -> Recipe:
    text = (Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8")
    return Recipe(name, text.partition("\n")[0].lstrip("# ").rstrip("."), text, NAMES[name])


def recipe(name: str) -> Recipe:
    """The recipe of this name. Raises UsageError that names the recipes."""
    if name not in NAMES:
        close = nearest(name, NAMES)
        todo = f"Did you mean {close}?" if close else f"There are {', '.join(NAMES)}."
        raise UsageError(f"--recipe: must be the name of a recipe; got {visible(name)}. {todo}")
    return _recipe(name)


def recipe_text(name: str) -> str:
    """The recipe's YAML with its comments."""
    return recipe(name).text


def recipe_mapping(name: str) -> dict[str, Any]:
    """What the recipe says, as a plain mapping."""
    return copy.deepcopy(_parsed(recipe(name).name))


@cache
def _parsed(name: str) -> dict[str, Any]:
    from engine.config.files import parse

    return parse(_recipe(name).text).mapping
