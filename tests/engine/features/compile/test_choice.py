"""`kernels.torch_compile: auto` compiles where it was measured to win, and says why it does or does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.config.facts import CompilerWait, Facts, ModelFacts
from engine.config.tree import fields
from engine.facts.model_shape import model_facts
from engine.features import compile
from engine.features.compile import EARNS, EARNS_PADDED
from engine.hardware import GiB, Machine, parse_machine
from engine.planning.auto import choices, resolved
from engine.planning.memory_model import memory
from engine.rules import read

H100, LAPTOP = parse_machine("1xH100-80GB"), Machine(cpu_count=4, memory_bytes=16 * GiB)
QWEN = model_facts("Qwen/Qwen3-8B")
assert QWEN is not None
GOOD: dict[str, dict[str, Any]] = {
    "model": {"name": "Qwen/Qwen3-8B"}, "adapter": {"kind": "lora"}, "data": {"packing": True, "max_length": 2048},
    "optim": {"per_device_train_batch_size": 4, "max_steps": 1000},
}  # fmt: skip


SHARES: dict[str, Any] = {"run.devices": 2, "distributed.strategy": "fsdp2"}


def compiled(
    settings: dict[str, Any],
    machine: Machine | None = H100,
    model: ModelFacts | None = QWEN,
    known: CompilerWait | None = None,
) -> Any:
    """What `auto` becomes with these settings on top of GOOD, and why."""
    mapping = {name: dict(section) for name, section in GOOD.items()}
    for path, value in settings.items():
        section, name = path.split(".", 1)
        mapping.setdefault(section, {})[name] = value
    config = read(mapping).config
    facts = Facts(machine=machine, model=model, compiler=known)
    found = choices(config, facts)["kernels.torch_compile"]
    assert resolved(config, facts).kernels.torch_compile == found["value"]
    return found["value"], found["reason"]


def test_a_long_packed_run_on_a_card_is_compiled_and_says_why() -> None:
    on, why = compiled({})
    assert on is True
    assert "H100" in why
    assert "1,000 steps" in why


@pytest.mark.parametrize("attention", ["sdpa", "varlen", "cudnn"])
def test_attention_that_was_measured_compiled_is_compiled(attention: str) -> None:
    assert compiled({"model.attention": attention})[0] is True


def test_layers_on_two_cards_that_each_hold_the_model_are_compiled() -> None:
    """8B, LoRA on two H100: 725 ms a step compiled, 1,140 plain."""
    assert compiled({"run.devices": 2}, parse_machine("2xH100-80GB"))[0] is True


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_layers_whose_weights_are_shares_are_compiled(adapter: str) -> None:
    assert compiled({**SHARES, "adapter.kind": adapter}, parse_machine("2xH100-80GB"))[0] is True


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "falcon_h1"])
def test_layers_with_a_state_that_documents_break_into_pieces_wait_for_no_compiler(kind: str) -> None:
    assert QWEN is not None
    carries = replace(QWEN, model_type=kind)
    on, why = compiled({"data.packing_cross_doc_attn_mask": True}, model=carries)
    assert (on, "carry a state" in why) == (False, True)
    assert compiled({}, model=carries)[0] is True


def test_a_run_whose_length_is_unknown_is_compiled() -> None:
    assert compiled({"optim.max_steps": None})[0] is True


def test_a_short_run_does_not_wait_for_the_compiler() -> None:
    on, why = compiled({"optim.max_steps": EARNS - 1})
    assert (on, str(EARNS) in why) == (False, True)
    assert compiled({"optim.max_steps": EARNS})[0] is True


@pytest.mark.parametrize(
    ("settings", "on", "word"),
    [
        ({"optim.max_steps": EARNS_PADDED}, True, "150 steps"),
        ({"optim.max_steps": EARNS_PADDED - 1}, False, "149 batches of many lengths"),
        ({"optim.max_steps": EARNS_PADDED // 2, "optim.gradient_accumulation_steps": 2}, True, "75 steps"),
        ({"optim.max_steps": EARNS - 1, "optim.gradient_accumulation_steps": 64}, False, "too few"),
        ({"optim.max_steps": None}, False, "not known yet"),
        ({"optim.max_steps": EARNS_PADDED, "method.kind": "dpo"}, True, "H100"),
        ({"optim.max_steps": EARNS_PADDED, "model.quantization": "nf4"}, False, "nf4"),
    ],
)
def test_padded_batches_wait_longer_and_are_compiled_in_longer_runs(settings: Any, on: bool, word: str) -> None:
    found, why = compiled({"data.packing": False, "optim.gradient_accumulation_steps": 1, **settings})
    assert (found, word in why) == (on, True)


@pytest.mark.parametrize(
    ("machine", "word"),
    [(None, "launch decides"), (LAPTOP, "no GPU"), (parse_machine("1xT4-16GB"), "older")],
    ids=["unknown", "cpu", "old card"],
)
def test_without_a_card_that_serves_nothing_changes(machine: Machine | None, word: str) -> None:
    on, why = compiled({}, machine)
    assert (on, word in why) == (False, True)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"adapter.use_dora": True}, "DoRA"),
        ({"model.quantization": "int8"}, "8-bit"),
        ({"memory.tiled_mlp": True}, "A tile is differentiated"),
        ({"memory.layer_offloading": True}, "stream"),
        ({"memory.activation_offloading": "cpu"}, "offloaded"),
        ({"kernels.quantization_aware": True}, "int8"),
        ({"kernels.fused_lora": True}, "LoRA's own backward pass"),
        ({"model.attention": "flex_attention"}, "flex_attention"),
        ({**SHARES, "model.quantization": "nf4"}, "in few bits"),
        ({**SHARES, "distributed.cpu_offload": True}, "in main memory"),
        ({"run.devices": 2, "distributed.context_parallel_size": 2}, "divide the tokens"),
        (
            {"method.kind": "grpo", "method.reward_funcs": ["exact_match"], "data.packing": False},
            "answers share",
        ),
    ],
)  # fmt: skip
def test_what_was_not_measured_or_breaks_graphs_is_left_to_be_asked_for(settings: dict[str, Any], word: str) -> None:
    on, why = compiled(settings)
    assert (on, word in why) == (False, True)


EXPERTS = {"adapter.target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "adapter.r": 16}
"""On a card 48 layers of such a mixture took 795 ms a step plain and 534 compiled."""


def test_a_mixture_is_compiled_where_its_experts_run_by_kernels_that_were_measured_so() -> None:
    assert QWEN is not None
    mixture = replace(QWEN, model_type="qwen3_moe", experts=128)
    assert compiled(EXPERTS, model=mixture)[0] is True
    assert compiled({**EXPERTS, **SHARES}, model=mixture)[0] is False
    for settings, word in (
        ({}, "kernels.fused_experts"),
        ({**EXPERTS, "kernels.fused_experts": False}, "kernels.fused_experts"),
        ({**EXPERTS, "data.packing": False}, "not packed"),
        ({**EXPERTS, "model.quantization": "nf4"}, "kernels.fused_experts"),
    ):
        on, why = compiled(settings, model=mixture)
        assert (on, word in why, "mixtures" in why) == (False, True, True)


def test_stored_fp8_is_left_to_be_asked_for() -> None:
    assert QWEN is not None
    assert "stored in fp8" in compiled({}, model=replace(QWEN, stored="fp8"))[1]


def test_recomputation_follows_what_is_compiled_and_the_room_there_is() -> None:
    """An 8B LoRA step of 4 x 2,048 tokens took 54.1 GiB compiled and without checkpointing, measured on a card."""
    taken = {}
    for gib in (80, 40, 24):
        card = Machine(gpus=(replace(H100.gpus[0], memory_bytes=gib * GiB),), memory_bytes=128 * GiB)
        mapping = {**GOOD, "kernels": {"use_cut_ce": True}}
        whole = resolved(read(mapping).config, Facts(machine=card, model=QWEN))
        taken[gib] = whole.memory.gradient_checkpointing
    assert taken == {80: False, 40: "medium", 24: True}


@pytest.mark.parametrize(("tier", "measured"), [(False, 55_356), ("medium", 28_261), (True, 20_551)])
def test_the_estimate_of_compiled_layers_is_near_what_a_card_measured(
    tier: bool | str, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MiB at the peak of an 8B LoRA step of 4 x 2,048 tokens on an H200, without the card's context, before gated blocks."""
    monkeypatch.setattr(compile, "OF_GATED", compile.OF_BLOCK)
    mapping = {**GOOD, "kernels": {"use_cut_ce": True, "torch_compile": True}}
    classes = memory(read(mapping).config, Facts(machine=H100, model=QWEN), checkpointing=tier)
    assert classes is not None
    estimated = sum(size for name, size in classes.items() if name != "overhead") / 2**20
    assert estimated == pytest.approx(measured, rel=0.05)


def test_the_help_tells_from_when_on_auto_compiles() -> None:
    told = fields.kernels.torch_compile.help
    assert f"{EARNS} steps or more of packed rows, or {EARNS_PADDED} batches of padded ones" in " ".join(told.split())


def test_recorded_layers_are_estimated_with_gradients_beside_a_pool_that_nothing_else_uses() -> None:
    """They are given out of the graphs' memory: all of them beside the activations, where others lie in the room those leave."""
    small = model_facts("Qwen/Qwen3-0.6B")
    settings: dict[str, Any] = {
        **GOOD, "model": {"name": "Qwen/Qwen3-0.6B"}, "adapter": {"kind": "none"},
        "memory": {"gradient_checkpointing": False}, "kernels": {"torch_compile": True},
    }  # fmt: skip
    settings["optim"] = {**settings["optim"], "gradient_accumulation_steps": 1}
    recorded = {**settings, "kernels": {"torch_compile": True, "torch_compile_options": {"stack_cudagraph": True}}}
    facts = Facts(machine=H100, model=small)
    launched, pooled = (memory(read(each).config, facts, False) or {} for each in (settings, recorded))
    assert launched.get("gradients", 0) == 0
    assert pooled["gradients"] == pytest.approx(2 * 596e6, rel=0.02)
    short = {**recorded, "data": {"packing": True, "max_length": 256}}
    again = memory(read(short).config, facts, "full") or {}
    assert again["gradients"] > pooled["gradients"]  # those of the pool no longer lie where activations were
