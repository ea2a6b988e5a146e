"""Layers for LoRA that are named by nothing but spaces are refused as those that are not named at all."""

from __future__ import annotations

import pytest

from engine.config.facts import Facts
from engine.rules import read


@pytest.mark.parametrize("targets", [[], "", "   "])
def test_targets_that_name_nothing_are_refused(targets: object) -> None:
    mapping = {"adapter": {"kind": "lora", "target_modules": targets}}
    found = [each for each in read(mapping, Facts()).findings if each.path == "adapter.target_modules"]
    assert [each.severity for each in found] == ["error"]
    assert "all-linear" in found[0].message
