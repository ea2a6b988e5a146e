"""What an adapter's folder says is taken over, or refused by its name; nothing in it is run or followed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from engine.builtin import tiny
from engine.config.adapter_folder import OF_THE_FOLDER
from engine.config.facts import Facts
from engine.data.gather_facts import gather_facts
from engine.facts.adapters import adapter_facts
from engine.facts.model_shape import model_facts
from engine.rules import read
from engine.run import checkpoint
from engine.run.store import create


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One that PEFT wrote, beside the built-in model."""
    config = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, use_rslora=True)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny.folder()), config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def changed(folder: Path, **settings: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_its_shape_is_read_without_its_numbers(folder: Path) -> None:
    found = adapter_facts(folder, "./adapter")
    assert (found.problem, found.weights) == ("", 16)
    wanted = {"r": 4, "lora_alpha": 12, "target_modules": ["down_proj", "q_proj"], "use_rslora": True, "bias": "none"}
    assert {name: found.settings[name] for name in wanted} == wanted
    assert found.linears == (("down_proj", 128, 64), ("q_proj", 64, 64))


def test_what_is_left_open_is_what_the_adapter_has_and_what_is_written_stands(folder: Path) -> None:
    facts = Facts(adapter=adapter_facts(folder, "./adapter"), model=model_facts("builtin/tiny"))
    mapping = {"model": {"name": "builtin/tiny"}, "adapter": {"kind": "lora", "path": "./adapter", "lora_alpha": 32}}
    reading = read(mapping, facts)
    assert (reading.config.adapter.r, reading.config.adapter.lora_alpha) == (4, 32)
    assert reading.config.adapter.lora_dropout == 0
    said = next(each.message for each in reading.findings if each.path == "adapter.lora_alpha")
    assert "must be 12" in said
    assert "got 32" in said
    names = sorted({name for name, *_ in model_facts("builtin/tiny").linears})
    every, known = {"path": "./adapter", "kind": "lora", "target_modules": "all-linear"}, facts.adapter
    for targets, wrong in ((names, False), (names[1:], True)):
        whole = Facts(model=facts.model, adapter=replace(known, settings={**known.settings, "target_modules": targets}))
        found = read({**mapping, "adapter": every}, whole).findings
        assert any(each.path == "adapter.target_modules" for each in found) is wrong


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peft_type": "IA3"}, "describes IA3"),
        ({"rank_pattern": {"q_proj": 8}}, "has rank_pattern: {q_proj: 8}, for which there is no setting"),
        ({"layers_to_transform": [1]}, "has layers_to_transform: [1]"),
        ({"init_lora_weights": "pissa_niter_4"}, "takes a part out of the base model"),
        ({"r": 0}, "r must be"),
        ({"r": 8}, "r is 8, and base_model.model.model.layers.0.mlp.down_proj.lora_A.weight has rank 4"),
        ({"r": None}, "does not say r"),
        ({"target_modules": {"a": 1}}, "target_modules must be"),
        ({"bias": "some"}, "bias must be"),
        ({"auto_mapping": {"parent_library": "evil.code", "base_model_class": "X"}}, "names the module `evil.code`"),
    ],
)
def test_an_adapter_that_would_become_another_one_is_refused_by_what_it_has(
    folder: Path, settings: dict[str, Any], said: str
) -> None:
    changed(folder, **settings)
    found = adapter_facts(folder, "./adapter")
    assert said in found.problem
    assert found.todo


def test_a_start_that_leaves_the_base_as_it_is_serves(folder: Path) -> None:
    changed(folder, init_lora_weights="gaussian", task_type="SEQ_CLS", modules_to_save=["classifier", "score"])
    changed(folder, lora_alpha=12.0, use_rslora="yes")
    found = adapter_facts(folder, "./adapter")
    assert (found.problem, found.settings["modules_to_save"]) == ("", [])
    assert (repr(found.settings["lora_alpha"]), found.settings["use_rslora"]) == ("12", True), "as settings hold them"


def test_layers_that_are_named_by_their_weights_are_layers_again(folder: Path) -> None:
    changed(
        folder, target_modules=["q_proj"], target_parameters=["shared_expert.gate_proj.weight", "experts.down_proj"]
    )
    settings = adapter_facts(folder, "./adapter").settings
    assert settings["target_modules"] == ["q_proj", "shared_expert.gate_proj"]
    assert settings["target_parameters"] == ["experts.down_proj"]


def test_no_folder_no_config_a_pickle_and_cut_weights_are_told_apart(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert "is not there" in adapter_facts(tmp_path / "gone", "gone").problem
    assert "but a whole model" in adapter_facts(tmp_path / "model", "model").problem
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    assert "is cut" in adapter_facts(folder, "x").problem
    weights.unlink()
    torch.save({}, folder / "adapter_model.bin")
    found = adapter_facts(folder, "x")
    assert "holds no adapter_model.safetensors" in found.problem
    assert "Pickled weights" in found.todo
    save_file({}, weights)
    (folder / "adapter_config.json").write_text("[1]")
    assert "holds no settings" in adapter_facts(folder, "x").problem
    assert OF_THE_FOLDER


def test_a_name_that_no_folder_can_have_is_one_short_sentence(tmp_path: Path) -> None:
    config = read({"adapter": {"kind": "lora", "path": "x" * 5000}}).config
    known = gather_facts(config, tmp_path).adapter
    assert known is not None
    assert known.problem == "cannot be read: File name too long"


def test_of_a_run_the_newest_whole_checkpoint_is_taken_and_what_may_surprise_is_said(
    folder: Path, tmp_path: Path
) -> None:
    run = create(tmp_path / "runs", "version: 1\n", {"state": "running"})
    config = read({"adapter": {"kind": "lora", "path": str(run.path)}}).config

    def said() -> tuple[str, str, str]:
        found = gather_facts(config, tmp_path).adapter
        return Path(found.folder).name, f"{found.problem} {found.todo}".strip(), found.note

    assert said()[1:] == (
        f"the run {run.id} has no whole checkpoint. Wait for its first one, or name another adapter.",
        "",
    )
    for step in (2, 4):
        tmp = checkpoint.begin(run, step)
        for file in folder.iterdir():
            (tmp / file.name).write_bytes(file.read_bytes())
        checkpoint.commit(tmp, {"step": step})
    assert said()[:2] == ("checkpoint-4", "")
    assert "is still running, and deletes checkpoint-4 when newer ones come" in said()[2]
    run.update_json(state="finished")
    assert said() == ("checkpoint-4", "", "")
    weights = run.checkpoints / "checkpoint-4/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert said()[0] == "checkpoint-2"
    assert "checkpoint-2 of" in said()[2]
    assert "since checkpoint-4 is broken: adapter_model.safetensors has" in said()[2]
