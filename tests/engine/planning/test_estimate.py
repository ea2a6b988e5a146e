"""The consequences of an edit: right where they can be computed, unknown where they cannot, moved the right way."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config.facts import DataFacts, Facts, ModelFacts, SourceFacts
from engine.config.tree import fields
from engine.facts.model_shape import model_facts
from engine.features import compile
from engine.hardware import Gpu, Machine, parse_machine
from engine.planning.auto import choices, effective, resolved
from engine.planning.estimate import Estimate, estimate
from engine.planning.memory_model import memory
from engine.rules import read
from engine.session.paragraph import paragraph
from tests.caches import own_cache
from tests.engine.rules.rule_cases.model import MIXTURE

GiB = 2**30
NAME = "Qwen/Qwen3-0.6B"
MODEL = model_facts(NAME)
H100 = parse_machine("1xH100-80GB")
LARGE = model_facts("Qwen/Qwen3-8B")


def of(facts: Facts | None = None, **sections: dict[str, Any]) -> Estimate:
    mapping: dict[str, Any] = {"model": {"name": NAME}, **sections}
    mapping["model"] = {"name": NAME, **sections.get("model", {})}
    return estimate(read(mapping).config, facts or Facts(machine=H100, model=MODEL))


def test_nothing_is_guessed_without_facts() -> None:
    found = estimate(read({}).config)
    assert found.effective_batch == 8
    assert (found.steps, found.memory, found.memory_total, found.checkpoint_bytes) == (None, {}, None, None)
    assert (found.trainable_parameters, found.device_bytes, found.seconds_left) == (None, None, None)


def test_steps_follow_rows_batch_epochs_and_max_steps() -> None:
    facts = Facts(data=DataFacts(rows=1000, tokens=50_000))
    assert of(facts).steps == 125
    assert of(facts, optim={"num_train_epochs": 3}).steps == 375
    assert of(facts, optim={"num_train_epochs": 0.5}).steps == 63
    assert of(facts, optim={"gradient_accumulation_steps": 1, "per_device_train_batch_size": 3}).steps == 334
    assert of(facts, optim={"max_steps": 7}).steps == 7
    assert of(facts, run={"devices": 2}).steps == 63
    assert of(facts).tokens_per_epoch == 50_000


def test_steps_are_those_of_the_trainer() -> None:
    """transformers: batches are rounded up, then steps are batches over accumulation, rounded up."""
    facts = Facts(data=DataFacts(rows=10))
    assert of(facts, optim={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}).steps == 2
    assert of(facts, optim={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}).steps == 1


def test_packing_makes_fewer_steps() -> None:
    facts = Facts(data=DataFacts(rows=1000, tokens=100_000))
    packed = of(
        facts,
        data={"packing": True, "max_length": 1000},
        optim={"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
    )
    assert packed.steps == 104
    assert of(Facts(data=DataFacts(rows=1000)), data={"packing": True}).steps is None


def test_rows_come_from_the_files_until_they_are_counted() -> None:
    entries = [{"path": "a", "weight": 2}, {"path": "b", "rows": 10}]
    facts = Facts(sources={"a": SourceFacts("a", rows=100), "b": SourceFacts("b", rows=500)})
    assert of(facts, data={"train": entries}).steps == 27  # 210 rows in batches of 8
    half = Facts(sources={"a": SourceFacts("a", rows=100)})
    assert of(half, data={"train": entries}).steps is None


def test_full_weights_cost_weights_gradients_and_two_states() -> None:
    found = of()
    assert MODEL is not None
    assert found.trainable_parameters == MODEL.parameters == 596_049_920
    assert found.memory["weights"] == 2 * 596_049_920
    assert found.memory["gradients"] == found.memory["weights"]
    assert found.memory["optimizer"] == 2 * found.memory["weights"]
    assert "adapter" not in found.memory
    assert found.memory_total == sum(found.memory.values())


def test_gradients_take_the_room_of_activations_unless_they_are_kept_for_the_next_batch() -> None:
    apart, kept = (of(optim={"gradient_accumulation_steps": batches}).memory for batches in (1, 2))
    beside = apart["activations"] + apart["logits"]
    assert kept["gradients"] - apart.get("gradients", 0) == min(beside, kept["gradients"])


def test_gradients_that_no_block_of_activations_takes_are_held_beside_them() -> None:
    """Qwen3-4B, 2,048 tokens (H200 and H100, torch 2.11): 37,421 and 37,739 MiB were held for 32,150 of tensors; with four rows 61,385 for 57,315."""
    shape = model_facts("Qwen/Qwen3-4B")

    def held(rows: int, **optim: int) -> dict[str, int]:
        optim = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1, **optim}
        mapping = {
            "model": {"name": "Qwen/Qwen3-4B"}, "data": {"max_length": 2048, "packing": True}, "optim": optim,
            "kernels": {"use_cut_ce": True, "torch_compile": True, "cut_ce_workspace": 4096},
            "memory": {"gradient_checkpointing": False},
        }  # fmt: skip
        return memory(read(mapping).config, Facts(machine=H100, model=shape), False) or {}

    assert sum(held(1).values()) / 2**20 == pytest.approx(37_421, rel=0.03)
    assert sum(held(4).values()) / 2**20 == pytest.approx(61_385, rel=0.04)
    kept = held(1, gradient_accumulation_steps=2)
    assert kept["gradients"] == kept["weights"]
    assert kept["overhead"] < GiB + 0.04 * sum(kept.values()), "gradients that are kept anyway are counted once"


def test_what_the_allocator_gives_back_before_it_runs_out_changes_no_choice() -> None:
    """Qwen3-4B, 2,048 tokens: by a model of torch's allocator 36.3 GiB are held where there is room, and 34.2 suffice."""
    shape = model_facts("Qwen/Qwen3-4B")
    mapping = {
        "model": {"name": "Qwen/Qwen3-4B"}, "data": {"max_length": 2048, "packing": True},
        "optim": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
        "kernels": {"use_cut_ce": True, "torch_compile": True, "cut_ce_workspace": 4096},
    }  # fmt: skip
    config = read(mapping).config

    def on(gib: float) -> tuple[float, Any]:
        machine = Machine(gpus=(Gpu("a card", int(gib * GiB), (9, 0)),))
        facts = Facts(machine=machine, model=shape)
        tier = choices(config, facts)["memory.gradient_checkpointing"]["value"]
        return sum((memory(config, facts, False) or {}).values()) / GiB, tier

    assert on(80) == (pytest.approx(37.26, rel=0.01), False)
    assert on(39.4) == (pytest.approx(0.92 * 39.4, rel=0.001), False)
    told, tier = on(34.2)
    assert told == pytest.approx(32.87, rel=0.01), "without what would be given back"
    assert tier is not False


def test_lora_trains_little_and_saves_little() -> None:
    lora, full = of(adapter={"kind": "lora", "r": 8}), of()
    assert lora.trainable_parameters == 5_046_272
    assert of(adapter={"kind": "lora", "r": 16}).trainable_parameters == 2 * 5_046_272
    assert lora.memory["weights"] == full.memory["weights"]
    assert lora.memory_total is not None
    assert full.memory_total is not None
    assert lora.memory_total < full.memory_total
    assert lora.checkpoint_bytes is not None
    assert lora.checkpoint_bytes < 50 * 1024**2


@pytest.mark.parametrize("settings", [{"r": 8}, {"r": 4, "use_dora": True}, {"r": 8, "target_modules": ["q_proj"]}])
def test_trained_parameters_are_those_of_the_adapter_that_is_built(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.features.load import load_model
    from engine.models.adapters import add_adapter

    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path))
    mapping = {"model": {"name": "builtin/tiny", "dtype": "float32"}, "adapter": {"kind": "lora", **settings}}
    config = resolved(read(mapping).config)
    built = add_adapter(load_model(config), config)
    counted = sum(weight.numel() for weight in built.parameters() if weight.requires_grad)
    assert estimate(config, Facts(model=model_facts("builtin/tiny"))).trainable_parameters == counted


# A head that holds all scores of a batch makes the peak by itself, whatever one layer takes.
USUAL_HEAD: dict[str, Any] = {"kernels": {"cut_ce_workspace": None}}


@pytest.mark.parametrize(
    ("cheaper", "dearer"),
    [
        ({"optim": {"per_device_train_batch_size": 2}}, {"optim": {"per_device_train_batch_size": 4}}),
        ({"memory": {"gradient_checkpointing": True}}, {"memory": {"gradient_checkpointing": False}}),
        ({"data": {"max_length": 512}}, {"data": {"max_length": 1024}}),
        ({"optim": {"optim": "sgd"}}, {"optim": {"optim": "adamw_torch"}}),
        ({"adapter": {"kind": "lora"}, "model": {"quantization": "nf4"}}, {"adapter": {"kind": "lora"}}),
        ({"adapter": {"kind": "lora"}, "method": {"kind": "dpo"}}, {"method": {"kind": "dpo"}}),
        ({"adapter": {"kind": "lora"}, "kernels": {"fused_lora": True}}, {"adapter": {"kind": "lora"}}),
        ({"model": {"dtype": "bfloat16"}}, {"model": {"dtype": "float32"}}),
        (
            {"memory": {"gradient_checkpointing": True}, **USUAL_HEAD},
            {"memory": {"gradient_checkpointing": True}, "model": {"attention": "eager"}, **USUAL_HEAD},
        ),
    ],
)
def test_memory_moves_the_right_way(cheaper: dict[str, Any], dearer: dict[str, Any]) -> None:
    small, large = of(**cheaper).memory_total, of(**dearer).memory_total
    assert small is not None
    assert large is not None
    assert small < large


def test_scores_are_counted_wherever_attention_keeps_them() -> None:
    assert MODEL is not None
    facts = Facts(machine=H100, model=replace(MODEL, model_type="gpt_oss"))

    def needed(attention: str, method: str = "sft", dtype: str = "bfloat16") -> int:
        mapping = {
            "model": {"name": NAME, "attention": attention, "dtype": dtype},
            "method": {"kind": method},
            "memory": {"gradient_checkpointing": True},
        }
        found = memory(read(mapping).config, facts, True)
        assert found is not None
        return sum(found.values())

    assert needed("sinks") < needed("eager")
    # Prompts of sampled answers are padded on the left, for which scores are masked and kept.
    assert needed("sinks", "grpo") == needed("eager", "grpo")
    # Where `auto` comes to eager it is known to.
    assert needed("auto", dtype="float32") == needed("eager", dtype="float32")


def test_sampled_answers_are_as_long_as_rows_of_prompt_and_answer() -> None:
    rows = {"data": {"max_length": 768}, "optim": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}}
    sft = of(adapter={"kind": "lora"}, **rows)
    grpo = {
        "kind": "grpo",
        "reward_funcs": ["length:5"],
        "num_generations": 8,
        "max_completion_length": 256,
        "beta": 0.0,
    }
    sampled = of(adapter={"kind": "lora"}, method=grpo, **{**rows, "data": {"max_length": 512}})
    assert sampled.memory["activations"] == sft.memory["activations"]
    short = Facts(machine=H100, model=MODEL, data=DataFacts(rows=9, longest=256))
    shorter = of(short, adapter={"kind": "lora"}, method=grpo, **{**rows, "data": {"max_length": 4096}})
    sft = of(adapter={"kind": "lora"}, **{**rows, "data": {"max_length": 512}})
    assert shorter.memory["activations"] == sft.memory["activations"], "no prompt is longer than the longest"


def test_keys_and_values_of_many_answers_count_where_a_step_has_no_room_for_them() -> None:
    method = {"kind": "grpo", "reward_funcs": ["length:5"], "num_generations": 8, "max_completion_length": 256}
    # A static cache has room for a multiple of 128 tokens, here for 1,024; one that grows for 700 and 256.
    for kind, length in (("static", 1024), ("dynamic", 956)):
        _holds_keys_and_values({**method, "cache_implementation": kind}, length)


def _holds_keys_and_values(method, length) -> None:
    rest = {"adapter": {"kind": "lora"}, "data": {"max_length": 700}, "memory": {"gradient_checkpointing": True}}
    rest["optim"] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    few = of(method={**method, "steps_per_generation": 1}, **rest)
    many = of(method={**method, "steps_per_generation": 32}, **rest)
    more = of(method={**method, "steps_per_generation": 64}, **rest)
    assert "cache" not in few.memory
    # 256 more answers: keys and values of 28 layers and one twice, 8 heads of 128, and five rows of scores
    each = 2 * 8 * 128 * length * 29 * 2 + 5 * 4 * 151_936
    assert more.memory["cache"] - many.memory["cache"] == 256 * each
    assert {name: size for name, size in more.memory.items() if name not in ("cache", "overhead")} == {
        name: size for name, size in many.memory.items() if name not in ("cache", "overhead")
    }


def test_weights_stored_in_fp8_take_a_byte_under_an_adapter_alone() -> None:
    assert MODEL is not None
    stored, lora = Facts(machine=H100, model=replace(MODEL, stored="fp8")), {"kind": "lora", "r": 8}
    linear = sum(wide_in * wide_out * count for _, wide_in, wide_out, count in MODEL.linears)
    assert of(adapter=lora).memory["weights"] - of(stored, adapter=lora).memory["weights"] == linear
    assert of(stored).memory["weights"] == of().memory["weights"]


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_packed_weights_take_the_bytes_that_their_files_take_under_an_adapter_alone(method: str) -> None:
    assert MODEL is not None
    size, lora = 0.5 + 3 / 128, {"kind": "lora", "r": 8}
    stored = Facts(machine=H100, model=replace(MODEL, stored=method, stored_size=size))
    linear = sum(wide_in * wide_out * count for _, wide_in, wide_out, count in MODEL.linears)
    saved = of(adapter=lora).memory["weights"] - of(stored, adapter=lora).memory["weights"]
    assert saved == pytest.approx(linear * (2 - size), abs=1)
    assert of(stored).memory["weights"] == of().memory["weights"]


def test_dpo_with_full_weights_holds_a_second_model() -> None:
    found = of(method={"kind": "dpo"})
    assert found.memory["reference"] == found.memory["weights"]
    assert "reference" not in of(method={"kind": "dpo"}, adapter={"kind": "lora"}).memory
    assert "reference" not in of(method={"kind": "dpo", "reference": "precompute"}).memory


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        ({"model": {"dtype": "float32"}}, 2_456_519),
        ({"model": {"dtype": "bfloat16"}, "method": {"kind": "dpo"}, "adapter": {"kind": "lora", "r": 4}}, 209_204),
    ],
    ids=["all weights", "an adapter"],
)
def test_a_checkpoint_of_the_built_in_model_is_told_as_large_as_one_was(settings: dict[str, Any], written: int) -> None:
    settings["model"]["name"] = "builtin/tiny"
    found = estimate(read(settings).config, Facts(model=model_facts("builtin/tiny"))).checkpoint_bytes
    assert found is not None
    assert 0.9 <= found / written <= 1.2


def test_disk_counts_the_kept_checkpoints_and_the_one_being_written() -> None:
    facts = Facts(machine=H100, model=MODEL, data=DataFacts(rows=100_000))
    found = of(facts, run={"save_total_limit": 3})
    assert found.checkpoint_bytes is not None
    assert found.checkpoints_bytes == 4 * found.checkpoint_bytes
    few = of(Facts(machine=H100, model=MODEL, data=DataFacts(rows=100)), run={"save_total_limit": 3})
    assert few.checkpoints_bytes == few.checkpoint_bytes


def test_facts_of_another_model_are_not_used() -> None:
    facts = Facts(machine=H100, model=ModelFacts("other/model", parameters=7))
    assert of(facts).trainable_parameters is None


def test_shares_and_time() -> None:
    facts = Facts(machine=H100, model=MODEL, data=DataFacts(rows=200, tokens=40_000, truncated=3, masked=1, exact=True))
    found = of(facts)
    assert found.truncated_share == 0.015
    assert (found.masked_rows, found.exact) == (1, True)
    assert found.seconds_left is not None
    assert 0.1 < found.seconds_left < 600
    tiny = of(Facts(machine=H100, model=replace(MODEL, parameters=200_000), data=facts.data))
    assert tiny.seconds_left is not None
    assert found.steps is not None
    assert tiny.seconds_left >= 0.003 * (MODEL.layers or 0) * found.steps > 0, "the host launches its layers one by one"
    slow = of(Facts(machine=parse_machine("cpu"), model=MODEL, data=facts.data)).seconds_left
    assert slow is not None
    assert slow > 10 * found.seconds_left
    sampled = of(facts, method={"kind": "grpo", "reward_funcs": ["gsm8k"]})
    assert (sampled.truncated_share, sampled.seconds_left) == (0.015, None)  # its answers' length is not known before


def test_the_time_on_a_cpu_has_what_no_model_is_too_small_for() -> None:
    """Measured on two quiet cores: 30 steps of the tiny model took 7.5 s, of which the products are a fifth of a second."""
    cpu = Machine(cpu_count=2, memory_bytes=2**34, name="cpu")
    rows = DataFacts(rows=24_000, tokens=700_000)

    def seconds(machine: Machine = cpu, **sections: dict[str, Any]) -> float:
        mapping: dict[str, Any] = {"model": {"name": "builtin/tiny", "dtype": "float32"}, "optim": {"max_steps": 30}}
        facts = Facts(machine=machine, model=model_facts("builtin/tiny"), data=rows)
        found = estimate(read({**mapping, **sections}).config, facts).seconds_left
        assert found is not None
        return found

    assert 5 < seconds() < 12
    busy = replace(cpu, cpu_share=0.2)
    assert seconds(busy) == pytest.approx(5 * seconds()), "others compute beside it"
    many = {"max_steps": 30, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    assert seconds(optim=many) > seconds() + 1, "each batch has a price of its own"
    half = {"name": "builtin/tiny", "dtype": "bfloat16"}
    assert seconds(replace(cpu, slow_bfloat16=True), model=half) > seconds(model=half) + 1


def test_rows_of_a_sample_stand_for_all_and_every_reason_to_leave_one_out_counts() -> None:
    sample = DataFacts(rows=90, read=100, total=1_000, masked=1, dropped=2, identical=3, bad=4)
    found = of(Facts(data=sample))
    assert (found.masked_rows, found.dropped_rows) == (10, 100)


def test_evaluations_count_that_of_the_last_step_and_their_best_checkpoint_is_kept_beside_the_newest() -> None:
    facts = Facts(machine=H100, model=MODEL, data=DataFacts(rows=1_000, eval_rows=10, tokens=50_000))
    run = {"eval_steps": 50, "save_steps": 10, "save_total_limit": 3}
    held_out, plain = of(facts, run=run, data={"val_set_size": 10}), of(facts, run=run)
    assert (held_out.evaluations, plain.evaluations) == (3, 0)
    each = plain.checkpoint_bytes
    assert each is not None
    assert (held_out.checkpoints_bytes, plain.checkpoints_bytes) == (5 * each, 4 * each)


def test_products_of_float32_take_longer_on_a_card_and_less_of_it_in_tf32() -> None:
    facts = Facts(machine=H100, model=LARGE, data=DataFacts(rows=1_000, tokens=2_000_000))
    half, rounded, whole = (
        of(facts, model={"name": "Qwen/Qwen3-8B", "dtype": dtype}, optim={"tf32": tf32}).seconds_left
        for dtype, tf32 in (("bfloat16", "auto"), ("float32", True), ("float32", False))
    )
    assert half is not None
    assert rounded == pytest.approx(2 * half, rel=0.1)
    assert 5 * half < whole < 8 * half, "what stands between products takes twice as long, no more"


def test_prompts_that_do_not_fill_a_sampling_are_no_step() -> None:
    method = {"kind": "grpo", "reward_funcs": ["length:5"], "num_generations": 4, "num_iterations": 2}
    optim = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    found = of(Facts(data=DataFacts(rows=11)), method=method, optim=optim)
    # 4 prompts are sampled at a time, for two batches of 8 answers that are trained on twice: two times in 11 prompts.
    assert found.steps == 4


def test_the_change_of_an_edit_is_told() -> None:
    before, after = of(), of(optim={"per_device_train_batch_size": 8})
    change = after.changes(before)
    assert change["effective_batch"] == 8
    assert change["memory_total"] > 0
    assert "trainable_parameters" not in change
    assert before.changes(before) == {}


def test_it_is_plain_data_and_quick() -> None:
    config, facts = (
        read({"model": {"name": NAME}, "adapter": {"kind": "lora"}}).config,
        Facts(machine=H100, model=MODEL),
    )
    json.dumps(estimate(config, facts).as_json())
    started = time.process_time()
    for _ in range(200):
        estimate(config, facts)
    assert (time.process_time() - started) / 200 < 0.001


@pytest.mark.parametrize(
    ("machine", "dtype", "expected", "words"),
    [
        ("2xH100-80GB", "bfloat16", "ddp", "the whole model takes"),
        ("2xH200-141GB", "float32", "fsdp2", "a share and what is put together at once take"),
        ("2xH100-80GB", "float16", "ddp", "fsdp2 does not serve here: Its gradient scaler"),
    ],
)
def test_devices_hold_the_model_as_it_fits(machine: str, dtype: str, expected: str, words: str) -> None:
    facts = Facts(machine=parse_machine(machine), model=LARGE)
    sections: dict[str, Any] = {"run": {"devices": 2}, "model": {"name": LARGE.name, "dtype": dtype}}
    sections |= {"data": {"max_length": 4096 if dtype == "float16" else 512}}
    sections["optim"] = {"per_device_train_batch_size": 16 if dtype == "float16" else 1}
    asked = read(sections).config
    entry = next(each for each in effective(asked, facts) if each.path == "distributed.strategy")
    assert (entry.effective, words in entry.reason) == (expected, True), entry.reason
    asked = asked.with_values({fields.distributed.reshard_after_forward: True})
    held = {strategy: of_config(asked, strategy, facts) for strategy in ("ddp", "fsdp2")}
    assert held["fsdp2"]["optimizer"] * 2 == pytest.approx(held["ddp"]["optimizer"], abs=2)
    assert held["fsdp2"]["weights"] < held["ddp"]["weights"]


@pytest.mark.parametrize(
    ("adapter", "distributed", "gib"),
    [
        ("lora", {"strategy": "ddp"}, 19.65),
        ("lora", {"strategy": "fsdp2", "reshard_after_forward": True}, 12.99),
        ("lora", {"strategy": "fsdp2", "reshard_after_forward": False}, 27.17),
        ("none", {"strategy": "fsdp2", "reshard_after_forward": True}, 33.94),
    ],
)
def test_what_two_h200_hold_of_8b_is_what_was_measured(
    adapter: str, distributed: dict[str, Any], gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GiB that torch handed out at the peak, `cards_lora` and `cards_save` of benchmarks/results.csv, compiled layers before
    they had gated blocks of their own."""
    monkeypatch.setattr(compile, "OF_GATED", compile.OF_BLOCK)
    config = read({
        "model": {"name": LARGE.name, "dtype": "bfloat16"}, "adapter": {"kind": adapter} | ({"r": 16} if adapter == "lora" else {}),
        "data": {"max_length": 2048, "packing": True}, "optim": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
        "memory": {"gradient_checkpointing": True}, "kernels": {"use_cut_ce": True, "torch_compile": True},
        "run": {"devices": 2}, "distributed": distributed,
    }).config  # fmt: skip
    classes = memory(config, Facts(machine=parse_machine("2xH200-141GB"), model=LARGE), True)
    assert classes is not None
    assert sum(classes.values()) - classes["overhead"] == pytest.approx(gib * GiB, rel=0.04)


@pytest.mark.parametrize(
    ("tier", "rows", "length", "gib"),
    [
        (True, 4, 2048, 18.96), (True, 1, 65_536, 43.16), (True, 1, 131_072, 70.83), ("medium", 1, 32_768, 59.44),
        (False, 1, 16_384, 79.35), (False, 1, 1024, 19.75),
    ],
)  # fmt: skip
def test_what_compiled_layers_of_8b_take_is_what_was_measured(tier: Any, rows: int, length: int, gib: float) -> None:
    """GiB that torch handed out on one H200, LoRA: benchmarks/scale_curves.csv, `step_8b_lora` of benchmarks/results.csv."""
    config = read({
        "model": {"name": LARGE.name, "dtype": "bfloat16"}, "adapter": {"kind": "lora", "r": 16},
        "data": {"max_length": length, "packing": True}, "memory": {"gradient_checkpointing": tier},
        "optim": {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1},
        "kernels": {"use_cut_ce": True, "torch_compile": True},
    }).config  # fmt: skip
    classes = memory(config, Facts(machine=parse_machine("1xH200-141GB"), model=LARGE), tier)
    assert classes is not None
    assert sum(classes.values()) - classes["overhead"] == pytest.approx(gib * GiB, rel=0.025)


@pytest.mark.parametrize(("tier", "layers"), [(False, LARGE.layers), (True, 1)])
def test_compiled_layers_that_keep_scores_of_all_pairs_are_counted_with_them(tier: Any, layers: int) -> None:
    """Gemma 2 attends eagerly, also where its layers are compiled."""
    config = read({
        "model": {"name": LARGE.name}, "adapter": {"kind": "lora"}, "data": {"max_length": 4096},
        "memory": {"gradient_checkpointing": tier}, "optim": {"per_device_train_batch_size": 1},
        "kernels": {"use_cut_ce": True, "torch_compile": True},
    }).config  # fmt: skip
    fused, eager = (
        memory(config, Facts(machine=parse_machine("1xH200-141GB"), model=model), tier)
        for model in (LARGE, replace(LARGE, model_type="gemma2"))
    )
    assert fused is not None
    assert eager is not None
    scores = 4096 * 4096 * (LARGE.heads or 0) * 6
    assert eager["activations"] - fused["activations"] == pytest.approx(layers * scores, rel=0.01)


@pytest.mark.parametrize(
    ("devices", "length", "shares", "gib"),
    [
        (1, 8192, {}, 19.1),
        (1, 131_072, {}, 71.43),
        (2, 131_072, {"strategy": "ddp"}, 44.08),
        (2, 131_072, {"strategy": "fsdp2", "reshard_after_forward": True}, 37.61),
        (2, 131_072, {"strategy": "fsdp2", "reshard_after_forward": True, "cpu_offload": True}, 29.86),
    ],
)
def test_what_a_long_row_of_8b_takes_is_what_was_measured(
    devices: int, length: int, shares: dict[str, Any], gib: float
) -> None:
    """GiB that torch handed out on H200s, LoRA by our kernels, layers computed again (`context_parallel` of
    benchmarks/results.csv); the shortest without a ring and as four rows."""
    config = read({
        "model": {"name": LARGE.name, "dtype": "bfloat16"}, "adapter": {"kind": "lora", "r": 16}, "data": {"max_length": length},
        "optim": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}, "memory": {"gradient_checkpointing": True},
        "kernels": {"use_cut_ce": True, "torch_compile": False, "fused_lora": True}, "run": {"devices": devices},
        "distributed": {"context_parallel_size": devices, **shares} if devices > 1 else {},
    }).config  # fmt: skip
    classes = memory(config, Facts(machine=parse_machine("2xH200-141GB"), model=LARGE), True)
    assert classes is not None
    assert sum(classes.values()) - classes["overhead"] == pytest.approx(gib * GiB, rel=0.05)


def test_layers_stay_together_where_there_is_room_after_all_else() -> None:
    """Measured on two H200, 8B with LoRA: a step takes 3 % less, 27.2 GiB in place of 13.0."""
    path = "distributed.reshard_after_forward"

    def chosen(machine: str, **more: dict[str, Any]) -> tuple[Any, str, Estimate]:
        sections: dict[str, Any] = {
            "model": {"name": LARGE.name}, "adapter": {"kind": "lora"}, "run": {"devices": 2}, "data": {"max_length": 2048},
            "optim": {"per_device_train_batch_size": 4}, "memory": {"gradient_checkpointing": True},
        }  # fmt: skip
        facts = Facts(machine=parse_machine(machine), model=LARGE)
        config = read({**sections, **more, "distributed": {"strategy": "fsdp2", **more.get("distributed", {})}}).config
        entry = next(each for each in effective(config, facts) if each.path == path)
        return entry.effective, entry.reason, estimate(config, facts)

    kept, why, held = chosen("2xH200-141GB")
    assert (kept, "of 139 GiB on each GPU with layers kept together" in why) == (False, True), why
    apart, why, less = chosen("2xRTX4090")
    assert (apart, why.startswith("it would be ")) == (True, True), why
    assert held.memory["weights"] - less.memory["weights"] > 12 * GiB
    assert chosen("2xH200-141GB", distributed={"cpu_offload": True})[0] is True
    # What is spared being computed again comes first, and is not taken back for it.
    spared = {"gradient_checkpointing": True, "recompute_num_layers": "auto"}
    assert chosen("2xH100-80GB", memory=spared)[0] is True
    assert chosen("2xH100-80GB")[0] is False
    alone = read({"model": {"name": LARGE.name}, "run": {"devices": 2}}).config
    facts = Facts(machine=parse_machine("2xH200-141GB"), model=LARGE)
    assert path not in {entry.path for entry in effective(alone, facts)}, "nothing is said of it where it has no effect"
    assert resolved(alone, facts).distributed.reshard_after_forward is True


def test_replicas_hold_more_each_and_ask_for_shares() -> None:
    facts = Facts(machine=parse_machine("2x8xH100-80GB"), model=LARGE)
    sections: dict[str, Any] = {"run": {"devices": 8}, "model": {"name": LARGE.name}, "optim": {"optim": "adamw_torch"}}

    def asked(**sizes: int) -> Any:
        return read({**sections, "distributed": {"nodes": 2, **sizes}})

    hybrid = asked(dp_replicate_size=2)
    assert not [each for each in hybrid.findings if each.path.startswith("distributed.dp_")]
    entry = next(each for each in effective(hybrid.config, facts) if each.path == "distributed.strategy")
    assert (entry.effective, entry.reason) == ("fsdp2", "shares are asked for by distributed.dp_replicate_size")
    whole = of_config(hybrid.config, "ddp", facts)
    sixteenth = of_config(asked().config, "fsdp2", facts)
    eighth = of_config(hybrid.config, "fsdp2", facts)
    assert whole["optimizer"] == pytest.approx(8 * eighth["optimizer"], abs=8)
    assert eighth["optimizer"] == pytest.approx(2 * sixteenth["optimizer"], abs=8)
    assert "every 8 hold one of 2 replicas of the model between them" in paragraph(
        hybrid.config, facts, estimate(hybrid.config, facts)
    )


def test_devices_that_divide_rows_keep_their_parts_activations() -> None:
    facts = Facts(machine=parse_machine("2xH200-141GB"), model=LARGE)
    sections: dict[str, Any] = {
        "model": {"name": LARGE.name}, "adapter": {"kind": "lora"}, "kernels": {"use_cut_ce": True},
        "optim": {"per_device_train_batch_size": 1, "max_steps": 10}, "memory": {"gradient_checkpointing": True},
        "data": {"max_length": 40_960}, "run": {"devices": 2},
    }  # fmt: skip
    whole, halves = (
        read(sections | {"distributed": {"context_parallel_size": size, "strategy": "ddp"}}, facts) for size in (1, 2)
    )
    assert not [each for each in halves.findings if each.path.startswith("distributed")]
    before, after = (estimate(each.config, facts) for each in (whole, halves))
    # What goes round the ring finds room where the block's own was (measured 0.51, `context_parallel` of benchmarks/results.csv).
    taken = [each.memory["activations"] + each.memory["logits"] for each in (before, after)]
    assert 0.5 <= taken[1] / taken[0] < 0.55
    assert after.memory["weights"] == before.memory["weights"]
    accumulated = halves.config.optim.gradient_accumulation_steps
    assert (before.effective_batch, after.effective_batch) == (2 * accumulated, accumulated)
    told = paragraph(halves.config, facts, after)
    assert "Of 2 devices each holds the whole model (ddp). All divide the tokens of each row between them." in told


def test_devices_that_divide_experts_hold_their_part() -> None:
    mixture = MIXTURE.model
    assert mixture is not None
    facts = Facts(machine=parse_machine("2x8xH100-80GB"), model=mixture)
    sections: dict[str, Any] = {
        "model": {"name": mixture.name}, "data": {"max_length": 2048}, "run": {"devices": 8},
        "adapter": {"kind": "lora", "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        "optim": {"per_device_train_batch_size": 1, "max_steps": 10},
    }  # fmt: skip
    whole, parts = (
        read(sections | {"distributed": {"nodes": 2, "expert_parallel_size": size, "strategy": "ddp"}}, facts)
        for size in (1, 8)
    )
    assert not [each for each in parts.findings if each.path.startswith("distributed")]
    before, after = (estimate(each.config, facts) for each in (whole, parts))
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    saved = before.memory["weights"] - after.memory["weights"]
    assert saved == pytest.approx(experts * 7 / 8, rel=1e-3)
    # Most of what is trained is on experts.
    for name in ("adapter", "optimizer"):
        assert 1 / 8 < after.memory[name] / before.memory[name] < 0.2, name
    assert "Every 8 divide the experts between them." in paragraph(parts.config, facts, after)
    refused = read(sections | {"distributed": {"nodes": 2, "expert_parallel_size": 3}}, facts)
    assert {each.rule for each in refused.findings if each.path == "distributed.expert_parallel_size"} >= {
        "experts-are-divided-over-the-processes", "experts-divide"
    }  # fmt: skip


def test_full_weights_of_divided_experts_have_states_of_their_part_alone() -> None:
    mixture = MIXTURE.model
    assert mixture is not None
    facts = Facts(machine=parse_machine("8xH200-141GB"), model=mixture)
    sections: dict[str, Any] = {
        "model": {"name": mixture.name}, "data": {"max_length": 2048}, "run": {"devices": 8}, "adapter": {"kind": "none"},
        "optim": {"per_device_train_batch_size": 1, "max_steps": 10, "optim": "adamw_torch_fused"},
    }  # fmt: skip
    whole, parts = (
        read(sections | {"distributed": {"expert_parallel_size": size, "strategy": "ddp"}}, facts) for size in (1, 8)
    )
    assert not [each for each in parts.findings if each.path == "distributed.expert_parallel_size"]
    before, after = (estimate(each.config, facts) for each in (whole, parts))
    experts = 48 * 128 * 3 * 2048 * 768
    share = 1 - 7 / 8 * experts / (mixture.parameters or 0)
    for name in ("weights", "optimizer"):
        assert after.memory[name] / before.memory[name] == pytest.approx(share, rel=2e-2), name


def test_shares_in_main_memory_leave_the_layers_that_are_computed() -> None:
    facts = Facts(machine=parse_machine("2xH200-141GB"), model=LARGE)
    sections: dict[str, Any] = {"run": {"devices": 2}, "model": {"name": LARGE.name, "dtype": "float32"}}
    here, there = (
        read(sections | {"distributed": {"strategy": "fsdp2", "cpu_offload": asked}}, facts) for asked in (False, True)
    )
    assert not [each for each in there.findings if each.path.startswith("distributed")]
    on_card, away = (estimate(each.config, facts) for each in (here, there))
    assert away.memory.get("optimizer", 0) == 0
    assert away.memory["weights"] < on_card.memory["weights"] - 0.45 * 4 * (LARGE.parameters or 0)
    assert "each holds a share of the model (fsdp2), in main memory" in paragraph(there.config, facts, away)


def of_config(config: Any, strategy: str, facts: Facts) -> dict[str, int]:
    """The memory of this config with this strategy."""
    taken = config.distributed.model_copy(update={"strategy": strategy})
    return estimate(config.model_copy(update={"distributed": taken}), facts).memory


def test_who_samples_answers_has_all_layers_meanwhile() -> None:
    facts = Facts(machine=parse_machine("4xH100-80GB"), model=LARGE)
    sections: dict[str, Any] = {"run": {"devices": 4}, "model": {"name": LARGE.name}, "data": {"max_length": 256}}
    sections |= {
        "method": {"kind": "grpo", "reward_funcs": ["exact_match"]},
        "optim": {"per_device_train_batch_size": 8},
    }
    sections["adapter"] = {"kind": "lora"}
    asked = read(sections | {"distributed": {"reshard_after_forward": True}}).config
    held, whole = (of_config(asked, strategy, facts) for strategy in ("fsdp2", "ddp"))
    assert held["weights"] < whole["weights"] / 2
    assert sum(held.values()) > whole["weights"], "while it samples, beside which there is little"
    assert sum(held.values()) < sum(whole.values())


def test_one_device_has_nothing_to_share() -> None:
    entry = next(each for each in effective(read({}).config) if each.path == "distributed.strategy")
    assert (entry.effective, entry.reason) == ("ddp", "one device has nothing to share")
