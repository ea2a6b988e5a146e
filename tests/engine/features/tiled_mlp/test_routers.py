"""Routers in tiles: asked again only for a loss that looks at them, and then with all that their block gives them."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from engine.builtin import tiny
from engine.errors import ModelError
from engine.features.built import Built
from engine.features.tiled_mlp.apply import prepare
from tests.engine.features.families import EXPERTS, SHAPE, made
from tests.engine.features.tiled_mlp.test_apply import config, gradients
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, lines, source, train  # noqa: F401

BIASED = {
    "minimax_m2": ("MiniMaxM2ForCausalLM", "MiniMaxM2Config", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "afmoe": (
        "AfmoeForCausalLM", "AfmoeConfig",
        {**EXPERTS, "num_dense_layers": 0, "layer_types": ["full_attention"] * 2, "num_shared_experts": 1},
    ),
}  # fmt: skip


def built(family, **more):
    kind, told, differs = BIASED[family]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, told)(**SHAPE, **differs, **more))
    model.set_experts_implementation("eager")
    return model.double()


@pytest.mark.parametrize("family", BIASED)
@pytest.mark.parametrize("looked_at", [False, True])
def test_routers_that_are_given_a_bias_of_the_experts_are_given_it_again(family, looked_at):
    model = built(family, output_router_logits=looked_at, router_aux_loss_coef=10.0 * looked_at)
    ids = torch.arange(48).reshape(2, 24) % 61
    wanted, plain = gradients(model, ids)
    done = prepare(config(), Built(model))
    loss, found = gradients(model, ids)
    assert loss == pytest.approx(wanted, rel=1e-12)
    assert found.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    assert ("routers are asked once more" in done.detail) is looked_at
    done.undo()


def test_a_block_that_needs_more_than_hidden_states_is_refused_in_words():
    model = built("minimax_m2")
    for layer in model.model.layers:
        layer.mlp.forward = lambda hidden_states, ids=None: hidden_states * ids.reshape(-1, 1)
    with pytest.raises(ModelError, match="cannot be asked for some tokens alone: 'NoneType' object has no attribute"):
        prepare(config(), Built(model))


@pytest.mark.parametrize(("method", "rows"), [("sft", CONVERSATIONS), ("dpo", PAIRS)])
def test_runs_whose_trainer_asks_for_the_loss_of_the_routers_by_itself_learn_the_same(
    train,  # noqa: F811
    source,  # noqa: F811
    tmp_path,
    method,
    rows,
):
    folder, tokenizer = tmp_path / "experts", AutoTokenizer.from_pretrained(tiny.folder())
    made("qwen3_moe", vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = {"model.name": str(folder), "method.kind": method, "optim.max_steps": 2}
    settings["data.train"] = [{"path": source(rows)}]
    tiles = {"memory.tiled_mlp": True, "memory.tiled_mlp_tokens": 16}
    found = [
        [(event["loss"], event["aux_loss"]) for event in lines(run, "metrics")]
        for run in (train(settings), train({**settings, **tiles}))
    ]
    assert len(found[0]) == 2
    for tiled, plain in zip(found[1], found[0], strict=True):
        assert tiled == pytest.approx(plain, rel=1e-5)
