"""Mixtures of experts under FSDP2: two processes take the steps of one, and their checkpoints go on anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoTokenizer

from engine.builtin import tiny
from engine.errors import ModelError
from engine.export import shards
from engine.export.__main__ import answer
from engine.export.places import Source
from engine.features.built import decoder_layers
from engine.model_files import weight_files
from engine.run.store import RunFolder
from engine.trainers import sharded
from tests.caches import own_cache
from tests.engine.features.families import made
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, lines
from tests.engine.trainers.test_fsdp2 import ALONE, DDP, HALF, SHORT, Pair, Place, alike, curve, strategy
from tests.engine.trainers.test_grpo import GRPO
from tests.engine.trainers.two_ranks import TwoRanks, run_folder

LORA = {"adapter.kind": "lora", "adapter.r": 4}
ON_EXPERTS = {**LORA, "adapter.target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def kernels_anywhere() -> None:
    """Has `kernels.fused_experts` act without a GPU, where the same block computes by plain torch."""
    from engine.features.fused_experts import apply

    apply.lacking = lambda device: None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("mixtures")
    with TwoRanks(own_cache(root / "cache"), f"{__name__}:kernels_anywhere") as two:
        yield Place(root, two)


def mixture(place: Place, family: str) -> str:
    """A folder of a tiny one, whose file holds each expert by itself where that family is published so."""
    folder = place.root / family
    if not folder.exists():
        tokenizer = AutoTokenizer.from_pretrained(tiny.folder())
        made(family, vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def receipt(run: RunFolder) -> list[dict[str, Any]]:
    return list(lines(run, "receipt")[-1]["entries"])


CASES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "lora on experts": ("qwen3_moe", CONVERSATIONS, {**ON_EXPERTS, "memory.gradient_checkpointing": True}),
    "experts with biases": ("gpt_oss", CONVERSATIONS, ON_EXPERTS),
    "eight gates": ("mixtral", CONVERSATIONS, {"optim.gradient_accumulation_steps": 2}),
    "a shared expert": ("qwen3_5_moe", CONVERSATIONS, LORA),
    "experts in 16 bits beside nf4": (
        "qwen3_moe", CONVERSATIONS, {**ON_EXPERTS, "model.quantization": "nf4", "model.quantize_moe_experts": False}
    ),
    "dpo": ("qwen3_moe", PAIRS, {**ON_EXPERTS, "method.kind": "dpo"}),
    "reward": ("qwen3_moe", PAIRS, {**LORA, "method.kind": "reward"}),
    "grpo": ("qwen3_moe", CONVERSATIONS[:12], {**GRPO, **LORA}),
}  # fmt: skip


@pytest.fixture(scope="module")
def full(place: Place) -> Pair:
    return place.both(CONVERSATIONS, {"model.name": mixture(place, "qwen3_moe")})


def test_all_weights_learn_what_one_process_would(full: Pair) -> None:
    entry = strategy(full.shared)
    assert (entry["effective"], entry["count"]) == ("fsdp2", 25)
    assert entry["detail"] == "of 25 weights are shares (DTensor); the first process holds 25,824 of 51,648 numbers"
    alike(*full)


def test_merge_makes_the_files_that_the_model_is_published_in(place: Place, full: Pair) -> None:
    into = place.root / "merged"
    asked = {"do": "merge", "run": str(full.shared.path), "checkpoint": 4, "places": {"safetensors": str(into)}}
    (part,) = answer(asked, lambda **_: None, lambda *_: None)["parts"]
    assert part["ok"], part
    theirs = load_file(full.alone.checkpoints / "checkpoint-4/model.safetensors")
    ours = {name: value for file in weight_files(into) for name, value in load_file(file).items()}
    assert any(name.endswith("mlp.experts.3.gate_proj.weight") for name in ours), "each expert by itself"
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-4, msg=name)


def test_files_that_were_put_together_wrongly_are_not_kept(
    place: Place, full: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = shards._saved

    def swapped(*given: Any) -> dict[str, torch.Tensor]:
        made = saved(*given)
        for name in [name for name in made if name.endswith("gate_proj.weight")]:
            other = name.replace("gate_proj", "up_proj")
            made[name], made[other] = made[other], made[name]
        return made

    monkeypatch.setattr(shards, "_saved", swapped)
    into = place.root / "swapped"
    asked = {"do": "merge", "run": str(full.shared.path), "checkpoint": 4, "places": {"safetensors": str(into)}}
    (part,) = answer(asked, lambda **_: None, lambda *_: None)["parts"]
    assert not part["ok"]
    assert not into.exists()


def test_checkpoints_go_on_on_other_numbers_of_processes(place: Place, full: Pair) -> None:
    same = place.two.train(place.again(full.shared))
    assert curve(same, segment=1) == {step: loss for step, loss in curve(full.shared).items() if step > 2}
    one = {**ALONE, "run.devices": 1, "distributed.strategy": "auto"}
    moved = [
        place.two.train_alone(place.again(full.shared, **one)),
        place.two.train(place.again(full.alone, **SHORT, **HALF)),  # whose file holds each expert by itself
    ]
    for run in moved:
        assert sorted(curve(run, segment=1)) == [3, 4]
        alike(run, full.alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_others_learn_what_one_process_would(place: Place, name: str) -> None:
    family, rows, settings = CASES[name]
    pair = place.both(rows, {"model.name": mixture(place, family), **settings}, DDP if name == "grpo" else None)
    entry = strategy(pair.shared)
    assert entry["effective"] == "fsdp2"
    assert entry["detail"].startswith(f"of {entry['count']} weights are shares (DTensor)")
    alike(*pair, tolerance=1e-3)


@pytest.mark.parametrize(("name", "adapted"), [("lora on experts", 2), ("all weights", 0)])
def test_fused_experts_read_what_is_put_together(place: Place, name: str, adapted: int) -> None:
    """Beside one process without them."""
    settings = ON_EXPERTS if adapted else {}
    given = {**SHORT, "data.train": place.rows(CONVERSATIONS), "model.name": mixture(place, "qwen3_moe"), **settings}
    shared = place.two.train(run_folder(place.root / "runs", given | HALF | {"kernels.fused_experts": True}))
    alone = place.two.train_alone(run_folder(place.root / "runs", given | ALONE | {"kernels.fused_experts": False}))
    (entry,) = [entry for entry in receipt(shared) if entry["feature"] == "fused experts"]
    assert (entry["effective"], entry["count"]) == ("Triton", 2)
    assert entry["detail"].startswith("blocks of experts; " + ("2 of them with" if adapted else "none of them has"))
    assert strategy(shared)["effective"] == "fsdp2"
    alike(shared, alone, tolerance=1e-3)


def test_a_checkpoint_in_shares_that_names_code_is_refused(tmp_path: Path) -> None:
    model = made("qwen3_moe")
    sharded.save_weights(model, tmp_path)
    sharded.save_settings(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "theirs.Config"}}))
    source = Source(RunFolder(tmp_path), tmp_path, False)
    with pytest.raises(ModelError, match="auto_map"), shards.put_together(source, tmp_path / "whole"):
        pass


@pytest.mark.parametrize("size", [1 << 30, 20_000])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "qwen3_vl_moe", "qwen3_5_moe", "qwen3"])
def test_shares_become_the_files_that_saving_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, size: int
) -> None:
    monkeypatch.setattr(shards, "FILE_BYTES", size)
    model = made(family)
    model.save_pretrained(tmp_path / "saved")
    sharded.save_weights(model, tmp_path)
    sharded.save_settings(model, tmp_path)
    read: list[int] = []

    def load(state: dict[str, torch.Tensor], **how: Any) -> None:
        read.append(sum(value.nbytes for value in state.values()))
        dcp_load(state, **how)

    dcp_load = dcp.load
    monkeypatch.setattr(dcp, "load", load)
    with shards.put_together(Source(RunFolder(tmp_path), tmp_path, False), tmp_path / "whole") as source:
        files = weight_files(source.checkpoint)
        ours = {name: value for file in files for name, value in load_file(file).items()}
        again = type(model).from_pretrained(source.checkpoint)
    assert (len(files) > 1) is (size == 20_000)
    largest = max(sum(weight.nbytes for weight in layer.parameters()) for layer in decoder_layers(model))
    assert all(size <= max(largest, model.lm_head.weight.nbytes * 3) for size in read), "a layer at a time"
    assert bool(read) is (family in ("qwen3_moe", "mixtral", "qwen3_5_moe")), "those whose files hold other pieces"
    theirs = load_file(tmp_path / "saved/model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
