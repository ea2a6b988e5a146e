"""States come from a checkpoint, settings from the config of now: every optimizer goes on to the bit, or as it is changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments, get_scheduler

from engine.config.optimizers import BUILT_HERE, KINDS
from engine.errors import WorkbenchError
from engine.trainers.optimizers.configured import COUNTED, as_configured, settings_of
from tests.engine.trainers.optimizers.test_building import Model, built, decayed, section, steps

SHAPING = ("rank", "rank_fraction", "proj_type", "proj_bits")
EAGER = {"q_galore_adamw_8bit": {"update_proj_gap": 1, "queue_size": 2, "cos_threshold": 0.0},
         "ademamix_8bit": {"alpha": 3.0, "beta3": 0.99}, "ademamix": {"alpha": 3.0, "beta3": 0.99}}  # fmt: skip
"""Own settings without which others change nothing in a few steps."""


def made(model: Model, name: str, tmp_path: Any, **own: Any) -> Any:
    """The optimizer of a run, ours or transformers' own."""
    own = {**EAGER.get(name, {}), **own}
    optim = section(name, optim_args=own)
    if name in BUILT_HERE:
        return built(model, optim)
    told = ",".join(f"{key}={value}" for key, value in own.items())
    arguments = TrainingArguments(str(tmp_path), optim=name, optim_args=told, learning_rate=3e-3, use_cpu=True)
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
    named = dict(model.named_parameters())
    return kind(
        [weight for each, weight in named.items() if weight.requires_grad and each in decayed(model)], **settings
    )


@pytest.fixture
def saved(tmp_path):
    """Weights and states after three steps, and the weights that the same optimizer came to after eight."""

    def saved(name: str) -> tuple[dict[str, Any], dict[str, Any], list[torch.Tensor]]:
        model = Model()
        optimizer = made(model, name, tmp_path)
        before = [settings_of(group) for group in optimizer.param_groups]
        steps(model, optimizer, 0, 3)
        if hasattr(optimizer, "eval"):
            optimizer.eval()
        assert before == [settings_of(group) for group in optimizer.param_groups], "a step writes what is no setting"
        weights, states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        steps(model, optimizer, 3, 8)
        return weights, states, list(model.parameters())

    return saved


def gone_on(
    name: str, tmp_path: Any, weights: dict[str, Any], states: dict[str, Any], **own: Any
) -> list[torch.Tensor]:
    model = Model()
    model.load_state_dict(weights)
    optimizer = made(model, name, tmp_path, **own)
    with as_configured(optimizer, None):
        optimizer.load_state_dict(copy.deepcopy(states))
    steps(model, optimizer, 3, 8)
    return list(model.parameters())


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", sorted(set(KINDS) - {"paged_adamw_8bit"}))
def test_settings_of_now_are_in_force_and_the_same_ones_go_on_to_the_bit(saved, tmp_path, name):
    weights, states, end = saved(name)
    assert same(gone_on(name, tmp_path, weights, states), end)
    for key, own in KINDS[name].own.items():
        default = EAGER.get(name, {}).get(key, own.default)
        ends = own.words or (own.least, min(own.most, 0.9) if key == "beta3" else own.most)
        now = [value for value in ends if value != default]
        if key in SHAPING:
            with pytest.raises(
                WorkbenchError, match=rf"optim\.optim_args\.{key}: the optimizer's states .* do not serve"
            ):
                gone_on(name, tmp_path, weights, states, **{key: now[-1]})
        else:
            others = [gone_on(name, tmp_path, weights, states, **{key: value}) for value in now]
            assert not all(same(other, end) for other in others), key


def test_what_steps_count_is_no_setting(saved):
    """`k` and its like of schedule-free, and the steps of pytorch-optimizer's, come from the checkpoint."""
    for name in ("schedule_free_adamw", "came"):
        group = saved(name)[1]["param_groups"][0]
        assert {key for key in group if key in COUNTED} == (
            {"step"} if name == "came" else {"k", "weight_sum", "lr_max", "scheduled_lr", "train_mode"}
        )


def test_a_gap_that_has_grown_changes_with_the_setting(saved, tmp_path):
    weights, states, _ = saved("q_galore_adamw_8bit")
    grown = [state["gap"] for state in states["state"].values() if "gap" in state]
    assert max(grown) > 1
    model = Model()
    model.load_state_dict(weights)
    optimizer = made(model, "q_galore_adamw_8bit", tmp_path, update_proj_gap=10)
    with as_configured(optimizer, None):
        optimizer.load_state_dict(states)
    assert [state["gap"] for state in optimizer.state.values() if "gap" in state] == [10 * gap for gap in grown]


def test_the_next_step_has_the_rate_of_the_schedule_of_now() -> None:
    """One that is trained longer, or by another schedule, began with the rate that its old schedule had ended at: 0."""

    def begun(total: int, rate: float) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=rate)
        return optimizer, get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=total)

    optimizer, scheduler = begun(4, 1e-3)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0
    states = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    for total, rate, wanted in ((8, 1e-3, 5e-4), (8, 4e-3, 2e-3), (4, 1e-3, 0)):
        optimizer, scheduler = begun(total, rate)
        with as_configured(optimizer, scheduler):
            optimizer.load_state_dict(states[0])
            scheduler.load_state_dict(states[1])
        assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == wanted
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == rate * max(0, total - 5) / total
