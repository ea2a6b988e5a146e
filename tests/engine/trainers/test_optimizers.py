"""Optimizers from bitsandbytes: states of the size they promise, their own settings in force, exact resume."""

from __future__ import annotations

import pytest
import torch

from engine.config.facts import Facts
from engine.facts.counts import parameters
from engine.facts.model_shape import model_facts
from engine.planning.memory_model import state_bytes
from engine.rules import read
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from

pytest.importorskip("bitsandbytes", reason="the optimizers come from bitsandbytes")


def settings(source, name, **more):
    return {
        "data.train": [{"path": source(CONVERSATIONS)}], "optim.optim": name, "optim.learning_rate": 1e-3,
        "optim.max_steps": 6, "run.save_steps": 3, **more,
    }  # fmt: skip


def states(run, step):
    path = run.checkpoints / f"checkpoint-{step}" / "optimizer.pt"
    saved = torch.load(path, weights_only=True, map_location="cpu")
    # bitsandbytes keeps what it quantized in a dictionary of its own.
    saved["state"] = {
        number: {**state, **next((value for value in state.values() if isinstance(value, dict)), {})}
        for number, state in saved["state"].items()
    }
    return saved


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("adamw_8bit", {"state1": torch.uint8, "state2": torch.uint8}),
        ("lion_32bit", {"state1": torch.float32}),
        ("ademamix_8bit", {"state1": torch.uint8, "state2": torch.uint8}),
    ],
)
def test_states_have_the_promised_size_and_a_resume_goes_on_exactly(train, source, tmp_path, name, kinds):
    own = {"optim.optim_args": {"alpha": 3.0, "beta3": 0.99}} if name == "ademamix_8bit" else {}
    run = train(settings(source, name, **own))
    saved = states(run, 6)
    # The weights of the MLP hold 8,192 numbers; the larger embedding keeps 32 bits, as transformers has it.
    large = [state for state in saved["state"].values() if state["state1"].numel() in (8192, 2 * 8192)]
    assert large
    for state in large:
        assert {key: state[key].dtype for key in ("state1", "state2") if key in state} == kinds
    if own:
        assert saved["param_groups"][0]["alpha"] == 3.0
        assert saved["param_groups"][0]["betas"][2] == 0.99
    said = {entry["feature"]: entry for entry in lines(run, "receipt")[0]["entries"]}["optimizer"]
    assert said["requested"] == name
    assert (said["count"] or 0) > 0 or not name.endswith("8bit")
    losses = [event["loss"] for event in lines(run, "metrics")]
    assert losses[-1] < losses[0]

    again = train(folder=resumed_from(run, 3, tmp_path / "again"))
    resumed = {event["step"]: event["loss"] for event in lines(again, "metrics") if event["step"] > 3}
    whole = {event["step"]: event["loss"] for event in lines(run, "metrics")}
    assert resumed
    assert all(whole[step] == loss for step, loss in resumed.items())


def test_states_of_8_bits_that_no_weight_is_large_enough_for_end_the_run(train, source):
    lora = {"adapter.kind": "lora", "adapter.r": 4, "adapter.target_modules": ["q_proj"]}
    run = train(settings(source, "adamw_8bit", **lora), code=1)
    assert "optimizer was requested and touched nothing" in lines(run, "failed")[0]["message"]


def test_the_estimate_counts_states_in_their_own_size():
    facts = Facts(model=model_facts("Qwen/Qwen3-0.6B"))
    sizes = {}
    for name in ("adamw_torch_fused", "adamw_8bit", "lion_8bit", "ademamix"):
        config = read({"model": {"name": "Qwen/Qwen3-0.6B", "dtype": "float32"}, "optim": {"optim": name}}).config
        counts = parameters(config, facts)
        sizes[name] = state_bytes(config, counts) / counts.trained
    assert sizes == {"adamw_torch_fused": 8.0, "adamw_8bit": 2.04, "lion_8bit": 1.02, "ademamix": 12.0}
