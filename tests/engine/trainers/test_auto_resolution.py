"""What was chosen at the launch keeps its reason, and recomputation is chosen again where others hold the card's memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine import worker
from engine.config.facts import DataFacts, Facts
from engine.config.files import dump, parse
from engine.config.tree import fields
from engine.data import gather_facts
from engine.facts.model_shape import model_facts
from engine.hardware import GiB, Machine, parse_machine
from engine.planning.auto import choices, resolved
from engine.rules import read
from engine.run import from_config, inside
from engine.run.store import RunFolder, create
from engine.trainers import auto_resolution
from engine.trainers.auto_resolution import at_the_card, by_free_memory, launched_for, reasons
from tests.engine.trainers.conftest import CONVERSATIONS, lines

TIER, COMPILE, HEAD = "memory.gradient_checkpointing", "kernels.torch_compile", "kernels.cut_ce_workspace"
MAPPING = {
    "model": {"name": "Qwen/Qwen3-8B"}, "adapter": {"kind": "lora"}, "data": {"packing": True, "max_length": 2048},
    "optim": {"per_device_train_batch_size": 4, "max_steps": 1000}, "kernels": {"use_cut_ce": True},
}  # fmt: skip
FACTS = Facts(machine=parse_machine("1xH100-80GB"), model=model_facts("Qwen/Qwen3-8B"))
ROWS = {**MAPPING["data"], "train": [{"path": "builtin/dates"}]}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """An 8B run on a card of 80 GB, as a launch stores it."""
    monkeypatch.setattr(auto_resolution, "gather_facts", lambda *_, **__: FACTS)
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


@pytest.mark.parametrize(("gib", "tier"), [(80, False), (48, "selective"), (40, "medium"), (24, True)])
def test_a_run_that_goes_on_on_a_smaller_card_computes_more_again_and_says_so(tmp_path, monkeypatch, gib, tier):
    launched = []
    monkeypatch.setattr(from_config, "launch", lambda text, **given: launched.append(given["info"]))
    config = read(MAPPING).config
    from_config.launch_config(config, FACTS, runs_dir=tmp_path)
    run = create(tmp_path, dump(resolved(config, FACTS)), launched[0])
    monkeypatch.setattr(
        auto_resolution, "gather_facts", lambda *_, **__: replace(FACTS, machine=parse_machine(f"1xA6000-{gib}GB"))
    )
    whole = FACTS.machine.gpus[0].memory_bytes * gib // 80
    found, why = by_free_memory(
        stored(run), reasons(run, stored(run)), run.path, (whole, whole), planned=(launched_for(run), None)
    )
    assert found.memory.gradient_checkpointing == tier
    assert ("less than that of the launch" in why[TIER]) == (gib < 80)
    assert "others hold" not in why[TIER]


ANSWERS = {
    **MAPPING,
    "method": {"kind": "grpo", "reward_funcs": ["length:8"], "max_completion_length": 64},
    "data": {"max_length": 2048, "train": [{"path": "prompts.jsonl"}]},
    "optim": {"per_device_train_batch_size": 16, "max_steps": 1000},
}
ROOMY = (int(78.6 * GiB), int(79.2 * GiB))
"""Free and whole, in bytes, of a card of 80 GB that this process alone holds something of."""


def launched(tmp_path, monkeypatch, mapping, facts=FACTS):
    """A run as `launch_config` stores it."""
    kept = []
    monkeypatch.setattr(from_config, "launch", lambda text, **given: kept.append((text, given["info"])))
    monkeypatch.setattr(auto_resolution, "gather_facts", lambda *_, **__: facts)
    from_config.launch_config(read(mapping).config, facts, runs_dir=tmp_path)
    return create(tmp_path, *kept[0])


@pytest.mark.parametrize(("longest", "tier"), [(25, False), (600, "selective"), (1000, "medium"), (2048, True)])
def test_answers_of_an_8b_keep_all_that_fits_once_prompts_are_counted(tmp_path, monkeypatch, longest, tier):
    """A launch takes prompts that nobody counted to have `data.max_length` tokens; 16 answers to short ones need no tier at all."""
    run = launched(tmp_path, monkeypatch, ANSWERS)
    assert stored(run).memory.gradient_checkpointing is True
    config, why = at_the_card(run, stored(run), ROOMY, DataFacts(longest=longest, exact=True))
    assert config.memory.gradient_checkpointing == tier
    told = f"the longest row has {longest + 64:,} tokens, the launch reckoned with 2,112"
    assert (told in why[TIER]) == (longest < 2048)
    assert "others hold" not in why[TIER]
    assert config.kernels == stored(run).kernels
    # A launch that knows the counts chooses alike.
    counted = replace(FACTS, data=DataFacts(longest=longest, exact=True))
    assert resolved(read(ANSWERS).config, counted).memory.gradient_checkpointing == tier


@pytest.mark.parametrize("rows", [None, DataFacts(), DataFacts(longest=25)])
def test_rows_that_were_not_all_counted_change_nothing(tmp_path, monkeypatch, rows):
    run = launched(tmp_path, monkeypatch, ANSWERS)
    assert at_the_card(run, stored(run), ROOMY, rows) == (stored(run), reasons(run, stored(run)))


@pytest.mark.parametrize(("nodes", "tier"), [(1, False), (2, True)])
def test_processes_of_one_machine_choose_alike_by_the_rows_that_they_share(tmp_path, monkeypatch, nodes, tier):
    """Whatever is free on the card of each; and what other machines have, none of them knows."""
    run = launched(tmp_path, monkeypatch, ANSWERS)
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = stored(run).with_values({fields.distributed.nodes: nodes})
    for free in (8, 78):
        found, _ = at_the_card(run, config, (free * GiB, 80 * GiB), DataFacts(longest=25, exact=True))
        assert found.memory.gradient_checkpointing is tier


def test_what_an_earlier_launch_reckoned_with_is_not_guessed(tmp_path, monkeypatch):
    run = launched(tmp_path, monkeypatch, ANSWERS)
    run.update_json(longest_row=None)
    config, _ = at_the_card(run, stored(run), ROOMY, DataFacts(longest=25, exact=True))
    assert config == stored(run)


def test_a_run_over_rows_that_nobody_counted_keeps_what_they_leave_room_for(train, source, tmp_path, monkeypatch):
    """A machine with room for rows of 20 tokens and none for those of 1,024, by which the launch chose."""
    facts = Facts(machine=Machine(memory_bytes=2 * GiB), model=model_facts("builtin/tiny"))
    mapping = {
        "model": {"name": "builtin/tiny", "dtype": "float32"}, "adapter": {"kind": "none"},
        "data": {"train": [{"path": source(CONVERSATIONS)}], "max_length": 1024},
        "optim": {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 1, "max_steps": 1},
    }  # fmt: skip
    run = launched(tmp_path, monkeypatch, mapping, facts)
    assert stored(run).memory.gradient_checkpointing is True
    train(folder=run)
    (told,) = (
        entry
        for line in lines(run, "receipt")
        for entry in line["entries"]
        if entry["feature"] == "gradient checkpointing"
    )
    assert told["count"] == 0
    assert "the launch reckoned with 1,024" in told["detail"]


def test_short_rows_spare_layers_that_long_ones_would_not(tmp_path, monkeypatch):
    """Where `recompute_num_layers` is `auto`, too; and packs are as long as ever."""
    memory = {"gradient_checkpointing": "full", "recompute_num_layers": "auto"}
    mapping = {**ANSWERS, "memory": memory, "optim": {"per_device_train_batch_size": 64, "max_steps": 1000}}
    run = launched(tmp_path, monkeypatch, mapping)
    config, why = at_the_card(run, stored(run), ROOMY, DataFacts(longest=100, exact=True))
    assert stored(run).memory.recompute_num_layers is None
    assert config.memory.recompute_num_layers < 36
    assert "layers keep everything" in why["memory.recompute_num_layers"]
    packed = launched(tmp_path, monkeypatch, MAPPING)
    assert at_the_card(packed, stored(packed), ROOMY, DataFacts(longest=25, exact=True))[0] == stored(packed)


def test_what_was_asked_for_stays_on_a_full_card(run, tmp_path):
    config = stored(run)
    assert by_free_memory(config, {}, tmp_path, (8 * GiB, 80 * GiB)) == (config, {})


def test_several_processes_keep_what_was_chosen_for_all(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = stored(run)
    why = reasons(run, config)
    assert by_free_memory(config, why, tmp_path, (8 * GiB, 80 * GiB)) == (config, why)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Launches 0.6B with full weights on a card of 80 GB: its head gets 2,374 MiB for scores."""
    facts = replace(FACTS, model=model_facts("Qwen/Qwen3-0.6B"))
    for module in (auto_resolution, gather_facts):
        monkeypatch.setattr(module, "gather_facts", lambda *_, **__: facts)

    def launched(**settings):
        mapping = {
            **MAPPING,
            "model": {"name": "Qwen/Qwen3-0.6B"},
            "adapter": {"kind": "none"},
            "data": ROWS,
            **settings,
        }
        asked = read(mapping).config
        return create(tmp_path, dump(resolved(asked, facts)), {"auto": choices(asked, facts)})

    return launched


def started(run, free):
    config, why = at_the_card(run, stored(run), (free * GiB, 79 * GiB))
    return config.kernels.cut_ce_workspace, why[HEAD]


def test_the_head_keeps_its_size_from_start_to_start_while_that_fits(small):
    run = small()
    assert [started(run, free)[0] for free in (79, 60, 22, 79)] == [2374] * 4
    size, why = started(run, 18)
    assert (size, "others hold 61.0 GiB" in why) == (None, True)
    size, why = started(run, 79)
    assert (size, why) == (None, "the usual size, as this run took before")


def test_a_run_that_began_with_the_usual_size_goes_on_with_it(small):
    run = small()
    assert [started(run, free)[0] for free in (18, 79)] == [None, None]
    (run.path / "begun_with.json").write_text("[")
    assert started(run, 79)[0] == 2374


def test_full_determinism_keeps_the_heads_size_whatever_is_free(small):
    run = small(run={"full_determinism": True})
    assert [started(run, free)[0] for free in (18, 79, 18)] == [2374] * 3


def test_layers_are_left_out_while_the_estimate_fits(small):
    again = {"gradient_checkpointing": "full", "recompute_num_layers": "auto"}
    run = small(memory=again, optim={"per_device_train_batch_size": 32, "max_steps": 100})
    launched = stored(run).memory.recompute_num_layers
    found = [at_the_card(run, stored(run), (free * GiB, 79 * GiB))[0] for free in (79, 75, 60)]
    assert [config.memory.recompute_num_layers for config in found] == [launched, launched, None]
    assert launched


def test_a_run_stored_before_a_setting_was_there_goes_on_without_it(small):
    """Of a launch that knew no `cut_ce_workspace` and no fused experts; what a person wrote into no run means what it says."""
    run = small()
    for line in ("  cut_ce_workspace: 2374\n", "  fused_experts: false\n"):
        assert line in run.config.read_text()
        run.config.write_text(run.config.read_text().replace(line, ""))
    assert worker._config(run).kernels.cut_ce_workspace == 2374  # the launch knew it, so it is asked for again
    known = {
        path: found for path, found in run.read_json()["auto"].items() if path not in (HEAD, "kernels.fused_experts")
    }
    run.update_json(auto=known)
    assert (worker._config(run).kernels.cut_ce_workspace, worker._config(run).kernels.fused_experts) == (None, False)
    run.update_json(auto=None)
    assert worker._config(run).kernels.cut_ce_workspace == 2374


def test_a_run_of_version_0_1_0_knew_no_size_of_scores_no_fused_experts_and_no_liger_kernel():
    earlier = RunFolder(Path(__file__).parents[2] / "end_to_end" / "earlier" / "dates-0001")
    stored = parse(earlier.read_config()).mapping
    meant = gather_facts.as_launched(stored, earlier.read_json()["auto"])
    added = {name: value for name, value in meant["kernels"].items() if name not in stored["kernels"]}
    assert added == {"cut_ce_workspace": None, "fused_experts": False, "use_liger_kernel": False}
    assert {**meant, "kernels": None} == {**stored, "kernels": None}


def test_answers_of_a_run_that_knew_no_static_cache_are_sampled_as_before():
    """A static cache gives the same numbers but for rounding, and other answers by that."""
    stored = {"method": {"kind": "grpo"}}
    before = {"cache_implementation": "dynamic", "skip_zero_advantage": False}
    assert gather_facts.as_launched(stored, {})["method"] == {"kind": "grpo", **before}
    own = {"cache_implementation": "static", "skip_zero_advantage": True}
    for method in ({"kind": "grpo", **own}, {"kind": "dpo"}):
        assert gather_facts.as_launched({"method": method}, {})["method"] == method
    assert gather_facts.as_launched(stored, {f"method.{name}": {} for name in own}) == stored


def packed_run(tmp_path, monkeypatch, answers):
    """A run whose rows are packed and kept apart, launched for a card, and what a measurement there answers in turn."""
    packages = {"nvidia-cudnn-frontend": "1.18.0"}
    facts = replace(FACTS, packages=packages)
    monkeypatch.setattr(auto_resolution, "gather_facts", lambda *_, **__: facts)
    monkeypatch.setattr(auto_resolution.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(auto_resolution.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(auto_resolution.timing, "decide", lambda *_: answers.pop(0))
    config = read({**MAPPING, "data": {**MAPPING["data"], "packing_cross_doc_attn_mask": True}}).config
    return create(tmp_path, dump(resolved(config, facts)), {"auto": choices(config, facts)})


def test_attention_over_packs_is_taken_by_its_times_and_a_run_keeps_what_it_began_with(tmp_path, monkeypatch):
    run = packed_run(tmp_path, monkeypatch, [("varlen", "measured here"), *[("cudnn", "measured here")] * 2])
    assert stored(run).model.attention == "cudnn"
    whole = (80 * GiB, 80 * GiB)
    for why in ("measured here", "this run began with it"):
        config, reasons_now = at_the_card(run, stored(run), whole)
        assert (config.model.attention, reasons_now["model.attention"]) == ("varlen", why)
    # A start without a card forgets nothing, and a name that no setting has is none.
    monkeypatch.setattr(auto_resolution.torch.cuda, "is_available", lambda: False)
    at_the_card(run, stored(run), whole)
    monkeypatch.setattr(auto_resolution.torch.cuda, "is_available", lambda: True)
    assert at_the_card(run, stored(run), whole)[0].model.attention == "varlen"
    for name in ("somebody/kernel", ["varlen"]):
        inside.replace(run, auto_resolution.BEGUN_WITH, json.dumps({"model.attention": name}))
        assert at_the_card(run, stored(run), whole)[0].model.attention == "cudnn"
    # Another process of a run with several takes what all were launched with.
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert at_the_card(run, stored(run), whole)[0].model.attention == "cudnn"
