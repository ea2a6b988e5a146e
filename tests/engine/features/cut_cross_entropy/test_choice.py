"""`kernels.use_cut_ce: auto` takes the smaller head where it was measured to be no slower, and elsewhere where memory needs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.config.facts import Facts
from engine.facts.model_shape import model_facts
from engine.features.built import Built, Notes
from engine.features.cut_cross_entropy import apply as cut
from engine.hardware import Machine, parse_machine
from engine.planning.auto import FILLED, choices, resolved
from engine.planning.memory_model import memory
from engine.rules import read
from tests.engine.features.compile.test_choice import GOOD, QWEN

PATH = "kernels.use_cut_ce"


def chosen(settings: dict[str, Any], machine: str | Machine = "1xH100-80GB") -> tuple[Any, str]:
    mapping = {name: dict(section) for name, section in GOOD.items()}
    for path, value in settings.items():
        section, name = path.split(".", 1)
        mapping.setdefault(section, {})[name] = value
    config = read(mapping).config
    here = parse_machine(machine) if isinstance(machine, str) else machine
    model = model_facts(config.model.name) if config.model.name != "Qwen/Qwen3-8B" else QWEN
    facts = Facts(machine=here, model=model)
    found = choices(config, facts)[PATH]
    assert resolved(config, facts).kernels.use_cut_ce == found["value"]
    return found["value"], found["reason"]


@pytest.mark.parametrize(
    ("settings", "machine", "on", "word"),
    [
        ({}, "1xH100-80GB", True, "measured on cards like it"),
        ({}, "1xH200-141GB", True, "H200"),
        ({"method.kind": "dpo"}, "1xH100-80GB", True, "faster"),
        ({"method.kind": "reward"}, "1xH100-80GB", False, "no vocabulary head"),
        ({"model.dtype": "float32"}, "1xH100-80GB", False, "16 bits"),
        ({"distributed.strategy": "fsdp2", "run.devices": 2}, "2xH100-80GB", False, "share a model"),
        ({}, Machine(cpu_count=4), False, "no GPU"),
        # A trained head of 151,936 words: its sums in float32 alone are more than 3 % of 24 GB.
        ({"adapter.kind": "none"}, "1xA10-24GB", True, "of the card's memory"),
        ({"optim.per_device_train_batch_size": 1, "data.max_length": 512}, "1xA100-80GB", False, "not measured on"),
        ({"kernels.kernel_auto_compose": True}, "1xH100-80GB", "auto", "timing"),
    ],
)
def test_it_is_taken_where_it_is_no_slower_or_memory_needs_it(settings: Any, machine: Any, on: Any, word: str) -> None:
    found, why = chosen(settings, machine)
    assert (found, word in why) == (on, True), why


def test_the_estimate_counts_what_it_saves() -> None:
    facts = Facts(machine=parse_machine("1xH100-80GB"), model=QWEN)
    asked = {**GOOD, "adapter": {"kind": "none"}}
    taken, left = (
        resolved(read({**asked, "kernels": kernels}).config, facts)
        for kernels in ({"cut_ce_workspace": None}, {"use_cut_ce": False})
    )
    ours, theirs = (sum((memory(each, facts, checkpointing=True) or {}).values()) for each in (taken, left))
    assert theirs - ours > 2**30


ROOM = "kernels.cut_ce_workspace"
SMALL = model_facts("Qwen/Qwen3-0.6B")
FULL = {**GOOD, "model": {"name": "Qwen/Qwen3-0.6B"}, "adapter": {"kind": "none"}}


def room(mapping: dict[str, Any], machine: str | Machine = "1xH100-80GB") -> tuple[Any, str]:
    config = read(mapping).config
    here = parse_machine(machine) if isinstance(machine, str) else machine
    found = choices(config, Facts(machine=here, model=SMALL))[ROOM]
    return found["value"], found["reason"]


@pytest.mark.parametrize(
    ("mapping", "machine", "taken", "word"),
    [
        (FULL, "1xH100-80GB", 2374, "all scores of 8,192 tokens take 2,374 MiB"),
        ({**FULL, "optim": {**GOOD["optim"], "per_device_train_batch_size": 1}}, "1xH100-80GB", 594, "2,048 tokens"),
        ({**FULL, "adapter": {"kind": "lora"}}, "1xH100-80GB", None, "frozen head"),
        ({**FULL, "kernels": {"use_cut_ce": False}}, "1xH100-80GB", None, "not used without kernels.use_cut_ce"),
        ({**FULL, "kernels": {"use_cut_ce": True}}, "1xA100-80GB", None, "not measured on"),
        (FULL, Machine(cpu_count=4), None, "near its caches"),
        ({**FULL, "run": {"devices": 2}}, "2xH100-80GB", 2374, "fit into 78.8 GiB of each card"),
        (
            {**FULL, "run": {"devices": 2}, "optim": {**GOOD["optim"], "per_device_train_batch_size": 25}},
            "2xH100-80GB",
            None,
            "not every card has room",
        ),
    ],
)
def test_a_trained_head_gets_room_for_its_scores_where_that_was_measured(
    mapping: dict[str, Any], machine: Any, taken: int | None, word: str
) -> None:
    found, why = room(mapping, machine)
    assert (found, word in why) == (taken, True), why


@pytest.mark.parametrize(
    ("rows", "taken", "tier"),
    [(24, None, False), (8, 2374, False), (16, 2374, False), (26, None, False), (27, 4006, "selective")],
)
def test_the_head_gets_what_layers_leave_and_the_estimate_counts_it(rows: int, taken: Any, tier: Any) -> None:
    """Half or a quarter of the scores of more tokens; never so much that more of the layers is computed again."""
    mapping = {**FULL, "optim": {**GOOD["optim"], "per_device_train_batch_size": rows}}
    facts = Facts(machine=parse_machine("1xH100-80GB"), model=SMALL)
    ours, usual = (
        resolved(read({**mapping, "kernels": kernels}).config, facts) for kernels in ({}, {"cut_ce_workspace": None})
    )
    assert (ours.kernels.cut_ce_workspace, ours.memory.gradient_checkpointing) == (taken, tier)
    assert ours.memory == usual.memory
    need, before = (sum((memory(each, facts, tier) or {}).values()) for each in (ours, usual))
    # Where layers are computed again, what one of them takes is there when the scores are gone.
    assert taken is None or need <= FILLED * facts.machine.gpus[0].memory_bytes
    assert need - before >= (0 if tier else 2**20 * ((taken or 320) - 320) * 0.5)


class Answering(torch.nn.Module):
    """Has a head that is not one plain matrix."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.head = head

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


@pytest.mark.parametrize(
    ("head", "word"), [(torch.nn.Identity(), "Identity"), (torch.nn.Linear(4, 8, bias=False), "CUDA")]
)
def test_a_head_that_it_does_not_serve_keeps_the_trainers_blocks_where_nobody_asked(monkeypatch, head, word) -> None:
    monkeypatch.setattr(cut, "fused_heads", lambda built: [Answering(head)])
    built = Built(torch.nn.Linear(1, 1), notes=Notes(reasons={PATH: "measured"}))
    done = cut.apply(read({"kernels": {"use_cut_ce": True}}).config, built)
    assert done is not None
    assert (done.requested, done.effective, word in done.detail) == ("auto", "off", True)
