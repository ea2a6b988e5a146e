"""Lines of the receipt beside what was really built: no line claims what another one denies."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from engine.builtin import tiny
from engine.config.facts import Facts
from engine.config.files import dump
from engine.data.gather_facts import gather_facts
from engine.planning.auto import choices, resolved
from engine.rules import read
from engine.run.store import create
from tests.engine.trainers.conftest import BASE, CONVERSATIONS, PAIRS, lines
from tests.families.models import built


def entries(run):
    return {entry["feature"]: entry for entry in lines(run, "receipt")[0]["entries"]}


def of_an_object(path, config):
    """Whether what this setting chooses is there in a run on a CPU, in one process: only then there is something to tell."""
    return {
        "kernels.fused_experts": False,  # a dense model has no experts
        "kernels.cut_ce_workspace": config.kernels.use_cut_ce is True,
        "distributed.strategy": False,  # one process shares nothing
        "optim.tf32": False,  # a card's format
        "run.eval_steps": config.data.evaluates,
        "run.prompts_steps": bool(config.run.prompts),
        "memory.recompute_num_layers": bool(config.memory.gradient_checkpointing),
    }.get(path, True)


@pytest.mark.parametrize("settings", [
    {"method.kind": "sft", "data.val_set_size": 8, "run.prompts": ["What comes after 3?"], "run.max_new_tokens": 4},
    {"method.kind": "dpo", "adapter.kind": "lora"},
    {"method.kind": "sft", "kernels.use_cut_ce": True, "memory.gradient_checkpointing": True,
     "memory.recompute_num_layers": "auto"},
], ids=["sft", "dpo", "tiers"])  # fmt: skip
def test_each_choice_that_was_left_to_auto_is_told_with_its_reason(train, source, tmp_path, settings):
    """What the launch notes of every `auto` is in a row that says so, in the words of the launch."""
    rows = source(PAIRS if settings["method.kind"] == "dpo" else CONVERSATIONS)
    paths = BASE | {"optim.max_steps": 1, "optim.learning_rate": "auto", "data.train": [{"path": rows}]} | settings
    mapping = {"version": 1}
    for path, value in paths.items():
        section, name = path.split(".")
        mapping.setdefault(section, {})[name] = value
    asked = read(mapping).config
    facts = gather_facts(asked, tmp_path)
    chosen, complete = choices(asked, facts), resolved(asked, facts)
    folder = create(
        tmp_path / "runs", dump(complete), {"method": asked.method.kind, "model": "builtin/tiny", "auto": chosen}
    )
    said = entries(train(folder=folder))
    assert len(chosen) > 8
    lost = {path: choice for path, choice in chosen.items() if of_an_object(path, complete) and not [
        entry for entry in said.values()
        if choice["reason"] in entry["detail"] and (entry["requested"] == "auto" or path in BESIDE)
    ]}  # fmt: skip
    assert lost == {}


def test_evaluations_that_are_counted_by_the_epoch_are_told_so(train, source, tmp_path):
    """At the launch of large data nobody knows an epoch's steps: the number that stands for them then is not what happens."""
    rows = [{"path": source(CONVERSATIONS)}]
    mapping = {"version": 1}
    for path, value in (
        BASE | {"data.train": rows, "data.eval": rows, "run.evals_per_epoch": 2, "optim.max_steps": 1}
    ).items():
        section, name = path.split(".")
        mapping.setdefault(section, {})[name] = value
    asked = read(mapping).config
    of_launch = {"method": "sft", "model": "builtin/tiny", "auto": choices(asked, Facts())}
    said = entries(train(folder=create(tmp_path / "runs", dump(resolved(asked, Facts())), of_launch)))
    assert said["held-out rows"]["effective"] == "2 times an epoch"


BESIDE = ("kernels.cut_ce_workspace", "memory.recompute_num_layers", "method.reference")
"""Settings whose choice stands in the row of another one."""


def test_packs_kept_apart_by_a_mask_are_told_with_it(train, source):
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "data.packing": True,
                 "data.packing_cross_doc_attn_mask": True, "optim.max_steps": 1})  # fmt: skip
    said = entries(run)
    assert said["attention"]["effective"] == "sdpa"
    assert "by a mask of all pairs" in said["packing"]["detail"]
    assert not [entry for entry in said.values() if "without a mask of all pairs" in entry["detail"]]
    assert "layers with a state" not in said


def test_layers_with_a_state_are_told_with_what_computes_them(train, source, tmp_path):
    folder = built("qwen3_5", tiny.folder(), tmp_path / "model")
    layers = json.loads((folder / "config.json").read_text())["layer_types"].count("linear_attention")
    run = train({"model.name": str(folder), "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 1})
    said = entries(run)["layers with a state"]
    assert (said["effective"], said["count"]) == ("torch", layers)
    assert "chunk_gated_delta_rule by transformers' own form in torch" in said["detail"]


def test_packs_of_joined_documents_and_single_rows_have_none(train, source):
    rows = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 1}
    joined = entries(train({**rows, "data.packing": True, "data.packing_cross_doc_attn_mask": False}))
    assert "mask" not in joined["packing"]["detail"]
    assert "without a mask of all pairs" in entries(train(rows))["padding"]["detail"]


@pytest.mark.parametrize(("method", "rows"), [("sft", CONVERSATIONS), ("dpo", PAIRS)])
def test_the_head_is_told_once(train, source, method, rows):
    settings = {"method.kind": method, "data.train": [{"path": source(rows)}], "optim.max_steps": 1}
    theirs = entries(train({**settings, "kernels.use_cut_ce": False}))
    ours = entries(train({**settings, "kernels.use_cut_ce": True}))
    assert "TRL's fused head" in theirs["loss"]["detail"]
    assert ours["cut cross-entropy"]["count"]
    assert "TRL's fused head" not in ours["loss"]["detail"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_and_their_precision_are_those_of_the_files_that_are_written(train, source, dtype):
    rows = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 1}
    run = train({**rows, "adapter.kind": "none", "model.dtype": dtype})
    written = load_file(run.checkpoints / "checkpoint-1/model.safetensors").values()
    said, count = entries(run), sum(weight.numel() for weight in written)
    assert {weight.dtype for weight in written} == {getattr(torch, dtype)}
    assert (said["precision"]["effective"], said["precision"]["count"]) == (dtype, count)
    assert said["trainable parameters"]["count"] == count
    assert said["adapter"]["count"] == 0


@pytest.mark.parametrize("packing", [False, True])
def test_as_many_rows_or_packs_are_told_as_one_epoch_takes_steps_of_one(train, source, packing):
    run = train({"data.train": [{"path": source([*CONVERSATIONS[:5], CONVERSATIONS[0]])}], "data.packing": packing,
                 "optim.max_steps": None, "optim.num_train_epochs": 1, "optim.per_device_train_batch_size": 1,
                 "optim.gradient_accumulation_steps": 1})  # fmt: skip
    said, steps = entries(run), lines(run, "finished")[0]["step"]
    assert said["rows"]["effective"] == 6
    assert steps == (said["packing"]["count"] if packing else 6)
    assert not packing or 1 < steps < 6


def test_the_fingerprint_is_of_what_is_read_and_of_what_is_learned(train, source):
    def fingerprint(rows, **settings):
        run = train({"data.train": [{"path": source(rows)}], "optim.max_steps": 1, **settings})
        return entries(run)["tokens fingerprint"]["effective"]

    turns = [CONVERSATIONS[0] + CONVERSATIONS[1], *CONVERSATIONS[2:8]]
    other = [[turns[0][0], {"role": "assistant", "content": "Two."}, *turns[0][2:]], *turns[1:]]
    same, again, reworded, less = (
        fingerprint(turns),
        fingerprint(turns),
        fingerprint(other),
        fingerprint(turns, **{"data.trained_turns": "last"}),
    )
    assert same == again
    assert len({same, reworded, less}) == 3


def test_the_optimizer_that_is_told_has_left_its_states(train, source):
    """Adafactor keeps rows and columns of squares, AdamW two numbers a weight: read off the checkpoint, not the trainer."""
    rows = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 1}
    kept = {}
    for name in ("adamw_torch", "adafactor"):
        run = train({**rows, "optim.optim": name})
        states = torch.load(run.checkpoints / "checkpoint-1/optimizer.pt", weights_only=True)["state"]
        kept[entries(run)["optimizer"]["effective"]] = {key for state in states.values() for key in state}
    assert kept["AdamW"] == {"step", "exp_avg", "exp_avg_sq"}
    assert "exp_avg_sq_row" in kept["Adafactor"]


def test_of_an_address_to_notify_the_host_alone_is_told(train, source):
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 1,
                 "run.notify": "https://hooks.example.org/services/T1/verysecret"})  # fmt: skip
    assert "to hooks.example.org, when" in entries(run)["notifications"]["detail"]
    assert "verysecret" not in run.events.read_text("utf-8")


@pytest.mark.parametrize(("attention", "again"), [("sdpa", False), ("sdpa", True), ("eager", False)])
def test_torch_itself_saw_the_attention_and_the_layers_computed_again_that_are_told(train, source, attention, again):
    """Torch's profiler counts the operations of one step of one batch: one attention a layer, two where it is computed again, and
    the head's logits twice, since nothing keeps them."""
    settings = {"model.attention": attention, "memory.gradient_checkpointing": again, "optim.max_steps": 1,
                "optim.gradient_accumulation_steps": 1}  # fmt: skip
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
        run = train({"data.train": [{"path": source(CONVERSATIONS)}], **settings})
    count = {event.key: event.count for event in seen.key_averages()}
    said = entries(run)
    assert said["attention"]["effective"] == attention
    assert said["gradient checkpointing"]["count"] == (LAYERS if again else 0)
    fused = count.get("aten::scaled_dot_product_attention", 0)
    assert fused == (0 if attention == "eager" else LAYERS * (2 if again else 1))
    assert "formed block by block, and again for the gradients" in said["loss"]["detail"]
    products = [event for event in seen.key_averages(group_by_input_shape=True) if event.key == "aten::mm"]
    # Heads are tried on a few tokens before the first step; a batch has more.
    logits = [e.count for e in products if e.input_shapes[1] == [HIDDEN, WORDS] and e.input_shapes[0][0] > 100]
    assert sum(logits) == 2


LAYERS, HIDDEN, WORDS = 4, 64, 512
"""Of the built-in model."""
