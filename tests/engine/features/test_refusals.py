"""What a machine refuses a run is said by the worker in the words of the check, and asked at one place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config.facts import Facts
from engine.config.files import put
from engine.errors import ModelError
from engine.features.activation_offloading import apply as activation_offloading
from engine.features.built import Built
from engine.features.fp8_base.layers import refuse_what_has_no_fp8
from engine.features.layer_offloading import apply as layer_offloading
from engine.features.quantization_aware import apply as quantization_aware
from engine.hardware import Gpu, Machine
from engine.rules import read
from tests.engine.features.conftest import built_of, tiny_model

LORA = {"adapter.kind": "lora"}
ASKED: list[tuple[dict[str, Any], Any]] = [
    ({**LORA, "memory.layer_offloading": True}, lambda config: layer_offloading.prepare(config, Built(tiny_model()))),
    ({"memory.activation_offloading": "cpu"}, lambda config: activation_offloading.apply(config, _built())),
    ({"kernels.quantization_aware": "fp8"}, lambda config: quantization_aware.apply(config, Built(tiny_model()))),
    ({**LORA, "model.quantization": "fp8"}, refuse_what_has_no_fp8),
]


def _built() -> Built:
    args = SimpleNamespace(process_index=0)
    return built_of(SimpleNamespace(model=tiny_model(), args=args))


def found(changes: dict[str, Any], machine: Machine) -> tuple[Any, list[str]]:
    mapping: dict[str, Any] = {"model": {"name": "builtin/tiny", "dtype": "bfloat16"}}
    for path, value in changes.items():
        put(mapping, path, value)
    path = list(changes)[-1]
    reading = read(mapping, Facts(machine=machine))
    return reading.config, [each.message for each in reading.findings if each.path == path and each.severity == "error"]


@pytest.mark.parametrize(("changes", "act"), ASKED, ids=[list(changes)[-1] for changes, _ in ASKED])
@pytest.mark.parametrize("card", [None, Gpu("A100", 0, (8, 0))], ids=["no GPU", "A100"])
def test_check_and_worker_say_the_same(monkeypatch, changes, act, card):
    config, messages = found(changes, Machine(gpus=(card,) if card else ()))
    if card is not None:
        if "offloading" in list(changes)[-1]:
            pytest.skip("any card will do")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: card.name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: card.capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card is not None)
    (said,) = messages
    with pytest.raises(ModelError) as problem:
        act(config)
    assert problem.value.full_message == said
