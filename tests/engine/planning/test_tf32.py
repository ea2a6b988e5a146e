"""TF32 is on by itself from Ampere on, and nowhere else."""

from __future__ import annotations

import pytest

from engine.config.facts import Facts
from engine.hardware import GiB, Gpu, Machine
from engine.planning.auto import resolved
from engine.rules import read


@pytest.mark.parametrize(
    ("capabilities", "on"),
    [([(7, 5)], False), ([(8, 0)], True), ([(9, 0)], True), ([(9, 0), (7, 5)], False)],
)
def test_tf32_is_on_where_every_card_has_it(capabilities: list[tuple[int, int]], on: bool) -> None:
    facts = Facts(machine=Machine(gpus=tuple(Gpu("card", 40 * GiB, each) for each in capabilities), name="card"))
    assert resolved(read({}, facts).config, facts).optim.tf32 is on
