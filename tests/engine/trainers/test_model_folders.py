"""What a model folder or a hub's snapshot names is judged before a library sees it, and a run stays with its commit."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest

from engine.builtin import tiny
from engine.run.spawn import NO_HUB_TOKEN
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(tiny.folder(), tmp_path / "model")
    return tmp_path / "model"


class Evil:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self):
        return os.mkdir, (self.canary,)


def entry(file: Path, **entries: object) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**content, **entries}))


def refused(train, source, folder: Path, words: str, **settings: object) -> None:
    run = train({"model.name": str(folder), "data.train": [{"path": source(CONVERSATIONS)}], **settings}, code=1)
    (failed,) = lines(run, "failed")
    assert words in failed["message"], failed["message"]
    assert not failed["lines"], failed["lines"]


def test_a_kernel_of_the_hub_never_reaches_its_package(train, source, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    entry(folder / "config.json", _attn_implementation="owner/kernel")
    refused(train, source, folder, "would fetch a kernel from the hub and run it")


def test_a_pickle_that_an_index_names_is_not_read(train, source, folder, tmp_path):
    (folder / "model.safetensors").unlink()
    (folder / "evil.bin").write_bytes(pickle.dumps(Evil(tmp_path / "canary")))
    index = {"weight_map": {"model.embed_tokens.weight": "evil.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(train, source, folder, "names evil.bin, which is no safetensors file")
    assert not (tmp_path / "canary").exists()


def test_an_index_does_not_lead_out_of_its_folder(train, source, folder, tmp_path):
    from safetensors import safe_open

    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    with safe_open(tmp_path / "outside.safetensors", "pt") as held:
        weights = dict.fromkeys(held.keys(), "../outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    refused(train, source, folder, "names ../outside.safetensors, which leads out of the folder")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_json_that_nests_too_deep_is_one_sentence(train, source, folder, name):
    (folder / name).write_text('{"a":' * 5000 + "1" + "}" * 5000)
    refused(train, source, folder, f"{name}: nests more than 32 levels deep")


def test_weights_that_are_cut_name_the_file(train, source, folder):
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1000)
    refused(train, source, folder, "model.safetensors: is cut")


def test_a_folder_without_a_tokenizer_is_not_given_an_empty_one(train, source, folder):
    for file in folder.glob("*token*"):
        file.unlink()
    refused(train, source, folder, "holds no tokenizer")


def test_a_reward_model_that_would_run_code_is_refused(train, source, folder):
    entry(folder / "config.json", auto_map={"AutoConfig": "evil.Config"})
    settings = {"method.kind": "grpo", "method.reward_funcs": [f"model:{folder}"], "method.num_generations": 2}
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], **settings}, code=1)
    assert "would run code" in lines(run, "failed")[0]["message"]


def trained_adapter(train, source) -> Path:
    """The last checkpoint of a reward model that was trained as an adapter."""
    settings = {"method.kind": "reward", "adapter.kind": "lora", "optim.max_steps": 4}
    run = train({"data.train": [{"path": source(PAIRS)}], **settings})
    return run.checkpoints / "checkpoint-4"


def rewarded_by(train, source, folder: Path) -> str:
    settings = {"method.kind": "grpo", "method.reward_funcs": [f"model:{folder}"], "method.num_generations": 2}
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], **settings}, code=1)
    return lines(run, "failed")[0]["message"]


def test_the_base_of_a_reward_models_adapter_is_judged_too(train, source, folder):
    adapter = trained_adapter(train, source)
    entry(folder / "config.json", auto_map={"AutoModelForSequenceClassification": "evil.Model"})
    entry(adapter / "adapter_config.json", base_model_name_or_path=str(folder))
    assert "would run code" in rewarded_by(train, source, adapter)


def test_an_adapter_of_pickled_weights_is_not_read(train, source, tmp_path):
    adapter = trained_adapter(train, source)
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Evil(tmp_path / "canary")))
    assert "holds no adapter_model.safetensors" in rewarded_by(train, source, adapter)
    assert not (tmp_path / "canary").exists()


def test_the_hubs_tokens_are_gone_before_the_first_step(train, source, monkeypatch):
    from transformers import Trainer

    seen, begin = [], Trainer.train

    def noted(self, *args, **kwargs):
        seen.append({name: os.environ.get(name) for name in ("HF_TOKEN", "HF_TOKEN_PATH", NO_HUB_TOKEN)})
        return begin(self, *args, **kwargs)

    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    monkeypatch.setenv("HF_TOKEN_PATH", "/home/me/token")
    monkeypatch.setenv(NO_HUB_TOKEN, "")
    monkeypatch.setattr(Trainer, "train", noted)
    train({"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 1})
    assert seen == [{"HF_TOKEN": None, "HF_TOKEN_PATH": None, NO_HUB_TOKEN: "1"}]


@pytest.fixture
def hub(tmp_path, monkeypatch, folder):
    """A hub's cache with two commits of one model, of which the second one asks for code; no network."""
    cache = tmp_path / "hub" / "models--some--model"
    for number, commit in enumerate(("a" * 40, "b" * 40)):
        shutil.copytree(folder, cache / "snapshots" / commit)
        if number:
            entry(cache / "snapshots" / commit / "config.json", auto_map={"AutoConfig": "evil.Config"})
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))  # read once, at its import
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return cache


def test_a_run_stays_with_the_commit_that_it_began_with(train, source, hub):
    settings = {"model.name": "some/model", "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 4}
    run = train(settings)
    assert json.loads((run.path / "commits.json").read_text()) == {"some/model@main": "a" * 40}
    (hub / "refs" / "main").write_text("b" * 40)
    run.config.write_text(run.config.read_text().replace("max_steps: 4", "max_steps: 6"))
    train(folder=run)
    assert lines(run, "finished")[-1]["step"] == 6
    fresh = train(settings, code=1)
    assert "would run code" in lines(fresh, "failed")[0]["message"]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("optimizer.pt", "plain"),
        ("scheduler.pt", "zip"),
        ("rng_state.pth", "plain"),
        ("scaler.pt", "zip"),
        *(
            pytest.param(name, form, marks=pytest.mark.slow)
            for name, form in (
                ("optimizer.pt", "zip"), ("scheduler.pt", "plain"), ("rng_state.pth", "zip"), ("scaler.pt", "plain")
            )
        ),
    ],
)  # fmt: skip
def test_a_pickle_among_the_state_of_a_checkpoint_is_refused_by_its_name(
    train, source, tmp_path, monkeypatch, name, form
):
    import torch

    from engine.trainers.run_trainer import RunTrainer

    if name == "scaler.pt":  # which float16 alone has, and that a card alone
        restore = RunTrainer.restore

        def with_scaler(self, path):
            self.accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
            restore(self, path)

        monkeypatch.setattr(RunTrainer, "restore", with_scaler)
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 4}
    run = train(settings)
    newest = run.checkpoints / "checkpoint-4"
    canary = tmp_path / "canary"
    if form == "zip":
        torch.save({"state": Evil(canary)}, newest / name)
    else:
        (newest / name).write_bytes(pickle.dumps(Evil(canary)))
    commit = json.loads((newest / "COMMIT.json").read_text())
    content = (newest / name).read_bytes()
    commit["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (newest / "COMMIT.json").write_text(json.dumps(commit))
    run.config.write_text(run.config.read_text().replace("max_steps: 4", "max_steps: 6"))
    train(folder=run, code=1)
    failed = lines(run, "failed")[-1]
    assert f"checkpoint-4: {name} is no state of a training" in failed["message"]
    assert not canary.exists()
