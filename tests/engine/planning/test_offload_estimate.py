"""What streaming layers and tiles save, and when a layer's way over the bus is hidden, by the estimate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import figures
from engine.config.facts import DataFacts, Facts
from engine.config.files import as_yaml
from engine.facts.model_shape import model_facts
from engine.hardware import parse_machine
from engine.planning.auto import effective, resolved
from engine.planning.estimate import estimate
from engine.planning.speed import layer_seconds, tiling_share
from engine.rules import read
from engine.session.draft import Draft

NAME = "Qwen/Qwen3-8B"
FACTS = Facts(machine=parse_machine("1xH100-80GB"), model=model_facts(NAME))
LAYER = 2 * (4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 12_288)


def config(memory: dict[str, Any], **sections: Any) -> Any:
    mapping = {"model": {"name": NAME}, "adapter": {"kind": "lora"}, "memory": memory, **sections}
    return read(mapping).config


@pytest.mark.parametrize(("quantization", "share"), [("none", 1.0), ("nf4", 4.127 / 16)])
def test_all_layers_but_two_leave_the_card(quantization: str, share: float) -> None:
    model = {"name": NAME, "quantization": quantization}
    resident, streamed = (
        estimate(config({"layer_offloading": on}, model=model), FACTS).memory["weights"] for on in (False, True)
    )
    assert resident - streamed == pytest.approx(34 * LAYER * share, rel=1e-6)


def test_of_activations_on_the_host_five_of_the_widest_are_on_their_way() -> None:
    """In place of each layer's input, which full checkpointing keeps: 36 of 8,192 tokens."""
    kept, moved = (
        estimate(
            config({"gradient_checkpointing": True, "activation_offloading": where}, data={"max_length": 2048}), FACTS
        ).memory["activations"]
        for where in (None, "cpu")
    )
    assert kept - moved == pytest.approx(2 * 4 * 2048 * (36 * 4096 - 5 * 12_288), rel=1e-6)


@pytest.mark.parametrize(("adapter", "a_weight"), [("lora", 2), ("none", 6)])
def test_rounding_keeps_rounded_weights_and_inputs_of_all_products(adapter: str, a_weight: int) -> None:
    """A rounded weight in 16 bits, four bytes more where it is trained; five of each number of an input."""
    plain, rounded = (
        estimate(
            config(
                {"gradient_checkpointing": False}, adapter={"kind": adapter}, kernels={"quantization_aware": on},
                data={"max_length": 2048},
            ),
            FACTS,
        ).memory["activations"]
        for on in (False, True)
    )  # fmt: skip
    inputs = 4 * 4096 + 2 * 4096 + 12_288  # of q, k, v and o, of gate and up, of down
    assert rounded - plain == pytest.approx(36 * (LAYER / 2 * a_weight + 4 * 2048 * inputs * 5), rel=1e-6)


def test_packed_experts_leave_the_card_with_their_layers(tmp_path: Path) -> None:
    shape = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 48, "vocab_size": 151_936,
        "max_position_embeddings": 40_960, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    name = str(tmp_path)
    facts = replace(FACTS, model=model_facts(name))
    asked = {"name": name, "quantization": "nf4"}
    resident, streamed = (
        estimate(config({"layer_offloading": on}, model=asked), facts).memory["weights"] for on in (False, True)
    )
    experts, attention = 128 * 3 * 768 * 2048, 2048 * (4096 + 2 * 512 + 4096)
    assert resident - streamed == pytest.approx(46 * (experts + attention) * 4.127 / 8, rel=1e-3)


def test_a_copied_reference_streams_too() -> None:
    method = {"kind": "dpo", "reference": "copy"}
    kept = estimate(config({"layer_offloading": True}, method=method), FACTS).memory
    assert kept["reference"] == kept["weights"]


def test_tiles_leave_the_wide_results_of_one_tile() -> None:
    data, optim = {"max_length": 65_536}, {"per_device_train_batch_size": 1}
    memory = {"gradient_checkpointing": True}
    plain, tiled = (
        estimate(config({**memory, "tiled_mlp": on}, data=data, optim=optim), FACTS).memory["activations"]
        for on in (False, True)
    )
    wide = 65_536 * 12_288 * 2
    # Half the tokens are in a tile: half of four wide results a token, a little less where the base is frozen.
    assert plain - tiled == pytest.approx(0.5 * wide * (4.0 * 0.87 + 3), rel=0.01)


def test_tiles_are_chosen_by_the_batch_and_stored() -> None:
    for length, wanted in ((65_536, 32_768), (8_192, 2_048)):
        asked = config({"tiled_mlp": True}, data={"max_length": length}, optim={"per_device_train_batch_size": 1})
        assert resolved(asked, FACTS).memory.tiled_mlp_tokens == wanted
        told = [entry for entry in effective(asked, FACTS) if entry.path == "memory.tiled_mlp_tokens"]
        assert [entry.effective for entry in told] == [wanted]


@pytest.mark.parametrize(
    ("tokens", "compiled", "hidden"), [(4096, False, False), (8192, False, True), (8192, True, False)]
)
def test_the_bus_is_hidden_where_a_layer_computes_longer(tokens: int, compiled: bool, hidden: bool) -> None:
    data, optim = {"max_length": tokens}, {"per_device_train_batch_size": 1}
    kernels = {"torch_compile": compiled}
    found = layer_seconds(config({"layer_offloading": True}, data=data, optim=optim, kernels=kernels), FACTS)
    assert found is not None
    moving, computing = found
    assert moving == pytest.approx(7.0e-3, rel=0.02)
    assert (moving <= computing) is hidden


@pytest.mark.parametrize(("compiled", "least", "most"), [(False, 1.02, 1.1), (True, 1.2, 1.5)])
def test_the_time_left_knows_what_the_bus_costs(compiled: bool, least: float, most: float) -> None:
    """7.0 ms a layer and pass over the bus, against 6 forward and 12 backward of 4,096 tokens, and 4 and 7 compiled."""
    facts = replace(FACTS, data=DataFacts(rows=1000, tokens=1_024_000))
    memory, kernels = {"gradient_checkpointing": True}, {"torch_compile": compiled}
    resident, streamed = (
        estimate(
            config({**memory, "layer_offloading": on}, data={"max_length": 1024}, kernels=kernels), facts
        ).seconds_left
        for on in (False, True)
    )
    assert resident is not None
    assert streamed is not None
    assert least < streamed / resident < most


def test_what_will_not_fit_is_offered_streaming_layers() -> None:
    mapping = {
        "model": {"name": NAME},
        "adapter": {"kind": "lora"},
        "data": {"train": [{"path": "rows.jsonl"}], "max_length": 1024},
        "memory": {"gradient_checkpointing": True},
        "optim": {"per_device_train_batch_size": 1},
    }
    draft = Draft(as_yaml(mapping))
    draft.learn(Facts(machine=parse_machine("1xRTX3060-12GB"), model=FACTS.model))
    finding = next(finding for finding in draft.findings if finding.rule == "it-fits-into-memory")
    assert "layers in the host's memory" in finding.message


def test_tiles_say_before_launch_what_they_save_and_what_they_cost() -> None:
    """Gate and up once more, of one product forward and one backward for each frozen weight; nothing under a checkpoint."""
    data = {"max_length": 32_768}
    for tier, share in ((False, 2 * 4096 * 12_288 / (2 * LAYER / 2)), (True, 0.0)):
        tiled, plain = ({"tiled_mlp": on, "gradient_checkpointing": tier} for on in (True, False))
        assert tiling_share(config(tiled, data=data), FACTS) == pytest.approx(share)
        reading = read({**config(tiled, data=data).model_dump(), "version": 1}, FACTS)
        (told,) = (each for each in reading.findings if each.rule == "tiled-mlp-has-its-price")
        totals = [estimate(config(each, data=data), FACTS).memory_total for each in (plain, tiled)]
        assert all(figures.size(size) in told.message for size in totals)
        assert (f"about {share:.0%} longer" if share else "costs no time") in told.message
