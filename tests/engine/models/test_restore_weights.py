"""A resumed run of full weights goes on with the checkpoint's weights, however transformers names them in a file."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from engine.builtin import tiny
from engine.errors import ModelError
from engine.models.restore_weights import take_up
from tests.engine.features.families import made
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from, source, train  # noqa: F401


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A mixture of experts, whose file holds each expert by itself."""
    folder, tokenizer = tmp_path_factory.mktemp("experts"), AutoTokenizer.from_pretrained(tiny.folder())
    made("qwen3_moe", vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def same(one, other):
    return all(torch.equal(weight, other.state_dict()[name]) for name, weight in one.state_dict().items())


def moved(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1)
    return model


@pytest.mark.parametrize(
    "unfrozen", [pytest.param([], marks=pytest.mark.slow), [r"model\.layers\.1\."]], ids=["all weights", "one layer"]
)
def test_experts_that_were_trained_go_on_as_they_were(train, source, tmp_path, experts, unfrozen):  # noqa: F811
    rows = [{"path": source(CONVERSATIONS)}]
    whole = train({"model.name": str(experts), "data.train": rows, "adapter.unfrozen_parameters": unfrozen})
    again = train(folder=resumed_from(whole, 4, tmp_path / "again"))
    curves = [
        [event["loss"] for event in lines(run, "metrics", segment) if event["step"] > 4]
        for run, segment in ((whole, 0), (again, 1))
    ]
    assert len(curves[0]) == 6
    assert curves[1] == curves[0]
    last, other = (load_file(run.checkpoints / "checkpoint-10/model.safetensors") for run in (whole, again))
    assert any("experts.3." in name for name in last)
    assert last.keys() == other.keys()
    assert all(last[name].equal(other[name]) for name in last)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mixtral", "qwen3_vl_moe"])
@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_every_weight_comes_back_from_one_file_and_from_many(tmp_path, family, size):
    saved = moved(made(family))
    saved.save_pretrained(tmp_path, max_shard_size=size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is (size == "20KB")
    model = made(family)
    assert not same(saved, model)
    take_up(model, tmp_path)
    assert same(saved, model)


def test_norms_in_float32_keep_their_digits_beside_experts_of_fewer_bits(tmp_path):
    saved, model = (made("qwen3_moe").bfloat16() for _ in range(2))
    for each in (saved, model):
        each.model.norm.weight.data = each.model.norm.weight.data.float()
    saved.model.norm.weight.data += 1e-4
    saved.save_pretrained(tmp_path)
    take_up(model, tmp_path)
    assert same(saved, model)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3", "model.layers.1.mlp.up_proj.weight"), ("qwen3_moe", "model.layers.1.self_attn.q_proj.weight")],
)
def test_a_checkpoint_of_another_model_is_one_sentence(tmp_path, family, name):
    folder = tmp_path / "checkpoint-4"
    made(family).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    gone = stored.pop(name)
    for tensors, words in (
        (stored, f"holds no weight {name}"),
        ({**stored, name: gone, "more": gone + 1}, "lacks: more"),
    ):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match="checkpoint-4: holds") as refused:
            take_up(made(family), folder)
        assert words in str(refused.value)


def test_weights_kept_elsewhere_are_not_missed(tmp_path):
    moved(made("qwen3")).save_pretrained(tmp_path)
    model = made("qwen3")
    model.value_head = torch.nn.Linear(32, 1)
    with pytest.raises(ModelError, match="holds no weight value_head"):
        take_up(model, tmp_path)
    take_up(model, tmp_path, list(model.value_head.parameters()))
    assert same(moved(made("qwen3")), model)
