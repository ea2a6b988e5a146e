"""What was chosen at the launch keeps its reason, and recomputation is chosen again where others hold the card's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.facts import Facts
from engine.config.files import dump
from engine.facts.model_shape import model_facts
from engine.hardware import GiB, parse_machine
from engine.planning.auto import choices, resolved
from engine.rules import read
from engine.run import from_config
from engine.run.store import create
from engine.trainers import auto_resolution
from engine.trainers.auto_resolution import by_free_memory, launched_for, reasons

TIER, COMPILE = "memory.gradient_checkpointing", "kernels.torch_compile"
MAPPING = {
    "model": {"name": "Qwen/Qwen3-8B"}, "adapter": {"kind": "lora"}, "data": {"packing": True, "max_length": 2048},
    "optim": {"per_device_train_batch_size": 4, "max_steps": 1000}, "kernels": {"use_cut_ce": True},
}  # fmt: skip
FACTS = Facts(machine=parse_machine("1xH100-80GB"), model=model_facts("Qwen/Qwen3-8B"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """An 8B run on a card of 80 GB, as a launch stores it."""
    monkeypatch.setattr(auto_resolution, "look_at", lambda *_, **__: FACTS)
    config = read(MAPPING).config
    return create(tmp_path, dump(resolved(config, FACTS)), {"auto": choices(config, FACTS)})


def stored(run):
    from engine.config.files import load

    return read(load(run.config).mapping).config


def test_a_run_keeps_why_auto_became_what_it_is(run):
    config = stored(run)
    why = reasons(run, config)
    assert (config.kernels.torch_compile, config.memory.gradient_checkpointing) == (True, False)
    assert "H100" in why[COMPILE]
    assert "fit into 78.8 GiB" in why[TIER]
    assert "optim.max_steps" not in why


def test_what_was_changed_by_hand_since_then_is_asked_for(run):
    run.config.write_text(run.config.read_text().replace("torch_compile: true", "torch_compile: false"))
    assert COMPILE not in reasons(run, stored(run))


def test_a_run_json_without_choices_has_no_reasons(tmp_path):
    config = resolved(read(MAPPING).config, FACTS)
    assert reasons(create(tmp_path, dump(config), {}), config) == {}


@pytest.mark.parametrize(("free", "tier"), [(79, False), (50, "selective"), (40, "medium"), (23, True)])
def test_more_is_computed_again_where_others_hold_the_cards_memory(run, tmp_path, free, tier):
    config = stored(run)
    found, why = by_free_memory(config, reasons(run, config), tmp_path, (free * GiB, int(79.2 * GiB)))
    assert found.memory.gradient_checkpointing == tier
    assert ("others hold" in why[TIER]) == (free < 79)
    assert found.kernels == config.kernels


@pytest.mark.parametrize(("gib", "tier"), [(80, False), (48, "medium"), (24, True)])
def test_a_run_that_goes_on_on_a_smaller_card_computes_more_again_and_says_so(tmp_path, monkeypatch, gib, tier):
    launched = []
    monkeypatch.setattr(from_config, "launch", lambda text, **given: launched.append(given["info"]))
    config = read(MAPPING).config
    from_config.launch_config(config, FACTS, runs_dir=tmp_path)
    run = create(tmp_path, dump(resolved(config, FACTS)), launched[0])
    monkeypatch.setattr(
        auto_resolution, "look_at", lambda *_, **__: replace(FACTS, machine=parse_machine(f"1xA6000-{gib}GB"))
    )
    whole = FACTS.machine.gpus[0].memory_bytes * gib // 80
    found, why = by_free_memory(
        stored(run), reasons(run, stored(run)), run.path, (whole, whole), planned=launched_for(run)
    )
    assert found.memory.gradient_checkpointing == tier
    assert ("less than that of the launch" in why[TIER]) == (gib < 80)
    assert "others hold" not in why[TIER]


def test_what_was_asked_for_stays_on_a_full_card(run, tmp_path):
    config = stored(run)
    assert by_free_memory(config, {}, tmp_path, (8 * GiB, 80 * GiB)) == (config, {})


def test_several_processes_keep_what_was_chosen_for_all(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = stored(run)
    why = reasons(run, config)
    assert by_free_memory(config, why, tmp_path, (8 * GiB, 80 * GiB)) == (config, why)


def test_the_head_gets_no_more_than_the_usual_where_others_hold_the_cards_memory(tmp_path, monkeypatch):
    mapping = {**MAPPING, "model": {"name": "Qwen/Qwen3-0.6B"}, "adapter": {"kind": "none"}}
    facts = replace(FACTS, model=model_facts("Qwen/Qwen3-0.6B"))
    monkeypatch.setattr(auto_resolution, "look_at", lambda *_, **__: facts)
    asked = read(mapping).config
    config, why = resolved(asked, facts), {path: found["reason"] for path, found in choices(asked, facts).items()}
    assert config.kernels.cut_ce_workspace == 2374
    found, said = by_free_memory(config, why, tmp_path, (30 * GiB, 79 * GiB))
    assert (found.kernels.cut_ce_workspace, found.memory.gradient_checkpointing) == (None, False)
    assert "others hold 49.0 GiB" in said["kernels.cut_ce_workspace"]
    assert by_free_memory(config, why, tmp_path, (79 * GiB, 79 * GiB)) == (config, why)
