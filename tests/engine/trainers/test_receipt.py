"""Lines of the receipt beside what was really built: no line claims what another one denies."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from engine.builtin import tiny
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, lines
from tests.families.models import built


def entries(run):
    return {entry["feature"]: entry for entry in lines(run, "receipt")[0]["entries"]}


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


def test_as_many_rows_are_told_as_one_epoch_takes_steps_of_one_row(train, source):
    run = train({"data.train": [{"path": source([*CONVERSATIONS[:5], CONVERSATIONS[0]])}], "optim.max_steps": None,
                 "optim.num_train_epochs": 1, "optim.per_device_train_batch_size": 1,
                 "optim.gradient_accumulation_steps": 1})  # fmt: skip
    assert entries(run)["rows"]["effective"] == lines(run, "finished")[0]["step"] == 6


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
