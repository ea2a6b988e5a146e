"""The methods that this version trains, by kind. Modules are imported when they are used: each brings in TRL."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

METHODS: dict[str, str] = {
    "sft": "engine.trainers.sft",
    "pretrain": "engine.trainers.pretrain",
    "dpo": "engine.trainers.dpo",
    "ipo": "engine.trainers.ipo",
    "simpo": "engine.trainers.simpo",
    "orpo": "engine.trainers.orpo",
    "kto": "engine.trainers.kto",
    "reward": "engine.trainers.reward",
    "prm": "engine.trainers.prm",
    "embedding": "engine.trainers.embedding",
    "distill": "engine.trainers.distill",
    "grpo": "engine.trainers.grpo",
    "gdpo": "engine.trainers.gdpo",
    "ppo": "engine.trainers.ppo",
}


def method(kind: str) -> ModuleType:
    """The method's module: `build(job)`, which gives the trainer."""
    return import_module(METHODS[kind])
