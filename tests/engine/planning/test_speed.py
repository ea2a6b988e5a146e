"""What changes a batch's time beside the card's numbers: padding, passes without gradients, layers that stream, experts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.facts import DataFacts, Facts, StepTime, VisionFacts
from engine.facts import counts, step_speeds
from engine.facts.model_shape import model_facts
from engine.hardware import parse_machine
from engine.planning.speed import card_batch_seconds, layer_seconds, padded
from engine.rules import read

QWEN = model_facts("Qwen/Qwen3-8B")
assert QWEN is not None
FACTS = Facts(machine=parse_machine("1xH100-80GB"), model=QWEN)


def config_of(**sections):
    mapping = {
        "model": {"name": "Qwen/Qwen3-8B"}, "adapter": {"kind": "lora"},
        "data": {"max_length": 2048, "packing": False}, "kernels": {"torch_compile": False},
        "memory": {"gradient_checkpointing": True}, "optim": {"per_device_train_batch_size": 4},
    }  # fmt: skip
    return read(
        {**mapping, **{name: {**mapping.get(name, {}), **section} for name, section in sections.items()}}
    ).config


def seconds(config, facts=FACTS, tokens=8192.0):
    parameters = counts.parameters(config, facts)
    assert parameters is not None
    found = card_batch_seconds(config, facts, parameters, tokens)
    assert found is not None
    return found


def test_a_batch_is_as_long_as_its_longest_row() -> None:
    facts = replace(FACTS, data=DataFacts(lengths=(100, 100, 100, 2100)))
    rows = config_of()
    # All four of 100 in (3/4)^4 of the batches; what is longer than the limit is cut.
    wanted = (100 * 0.75**4 + 2048 * (1 - 0.75**4)) / ((300 + 2048) / 4)
    assert padded(rows, facts, 4) == pytest.approx(wanted)
    assert seconds(rows, facts) == pytest.approx(wanted * seconds(rows), rel=0.1)
    assert padded(config_of(data={"packing": True}), facts, 4) == 1
    assert padded(rows, facts, 1) == 1


def test_a_reference_and_rows_that_do_not_match_are_passes_more() -> None:
    alone, dpo, kto, apo = (
        seconds(config_of(method=method))
        for method in (
            {"kind": "sft"}, {"kind": "dpo"}, {"kind": "kto"}, {"kind": "kto", "loss_type": "apo_zero_unpaired"},
        )
    )  # fmt: skip
    assert dpo == pytest.approx(apo, rel=0.03)
    assert 1.2 * alone < dpo < 1.5 * alone
    assert 1.7 * alone < kto < 2.3 * alone
    ahead = seconds(config_of(method={"kind": "dpo", "reference": "precompute"}))
    assert ahead == pytest.approx(alone, rel=0.03)


def test_layers_that_stream_wait_for_the_bus_where_it_is_slower_and_nothing_where_it_is_not() -> None:
    streamed = config_of(memory={"gradient_checkpointing": True, "layer_offloading": True})
    short, long = (seconds(streamed, tokens=tokens) for tokens in (512.0, 32_768.0))
    moving = layer_seconds(streamed, FACTS)
    assert moving is not None
    assert short == pytest.approx(2 * 36 * moving[0], rel=0.01), "both passes bring every layer"
    assert long == pytest.approx(seconds(config_of(), tokens=32_768.0))


def test_a_mixture_takes_what_its_tokens_meet() -> None:
    experts = (("mlp.experts.gate_up_proj", 2048, 1536, 48), ("mlp.experts.down_proj", 768, 2048, 48))
    mixture = replace(
        QWEN, experts=128, experts_per_token=8, expert_weights=experts, hidden_size=2048, layers=48, kv_heads=4,
        intermediate_size=6144, parameters=30_532_122_624,
        linears=tuple(("q_proj", 2048, 4096, 48) for _ in range(2)) + tuple(("k_proj", 2048, 512, 48) for _ in range(2)),
    )  # fmt: skip
    facts = replace(FACTS, model=mixture)
    config = config_of(adapter={"kind": "lora", "target_modules": ["q_proj"]})
    few, more = seconds(config, facts), seconds(config, replace(facts, model=replace(mixture, experts_per_token=16)))
    assert 0.2 < few < 1.5, "30B-A3B took 0.5 to 0.8 s on an H100, not what 30 billion parameters take"
    assert 1.2 * few < more < 2 * few


def test_adapters_that_are_added_to_experts_and_scores_that_are_held_take_longer() -> None:
    row = StepTime("", "lora", "bfloat16", True, "False", 48, 3_000_000_000, 4096, 8192, 2048, 1.0, numbers=22_000)
    plain, added, scored, asked = (
        step_speeds.seconds(step_speeds.published(9.0e14, 3.35e12), step_speeds.terms(replace(row, **change)))
        for change in (
            {}, {"put_together": 29_000_000_000}, {"scores": 32}, {"compiled": False, "again": "selective"},
        )
    )  # fmt: skip
    assert added - plain == pytest.approx(48 * 604e6 * 41e-12, rel=0.1), "as it was measured, 41 ps a weight"
    assert scored > 1.5 * plain
    eager = step_speeds.seconds(step_speeds.published(9.0e14, 3.35e12), step_speeds.terms(replace(row, compiled=False)))
    assert asked - eager > 0.15, "each operation of 48 layers is asked about"


def test_a_vision_tower_that_looks_at_images_is_launched_and_computed() -> None:
    tower = VisionFacts(1280, 32, 3420, True, True, 4)
    facts = replace(FACTS, model=replace(QWEN, vision=tower, tower=(("qkv", 1280, 3840, 32), ("up", 1280, 3420, 96))))
    data = DataFacts(rows=64, tokens=64 * 1024, all_image_tokens=64 * 680)
    blind, seeing = (
        seconds(config_of(), replace(facts, data=replace(data, images=images)), tokens=1024.0) for images in (0, 64)
    )
    assert 1.1 * blind < seeing < 2.5 * blind


def test_where_no_step_is_like_it_float32_takes_twice_as_long_in_tf32_and_eight_times_without() -> None:
    facts = replace(FACTS, model=replace(QWEN, heads=None))  # of another shape than all steps that were measured
    half, rounded, whole = (
        seconds(config_of(model={"dtype": dtype}, optim={"tf32": tf32}), facts)
        for dtype, tf32 in (("bfloat16", "auto"), ("float32", True), ("float32", False))
    )
    assert (rounded / half, whole / half) == (pytest.approx(2), pytest.approx(8))
