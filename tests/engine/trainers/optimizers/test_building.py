"""Optimizers that we build: the library's own steps on the same gradients, the right weights for each part, exact resume."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine.config.optim import Optim
from engine.config.optimizers import BUILT_HERE, KINDS, MATRICES_ONLY, PROJECTED
from engine.errors import WorkbenchError
from engine.facts.counts import Parameters
from engine.planning.memory_model import state_bytes
from engine.trainers.optimizers.building import keep_state_formats, optimizer_for, projected, receipt_note, split

PACKAGES = {"pytorch-optimizer": "pytorch_optimizer", "schedulefree": "schedulefree", "bitsandbytes": "bitsandbytes"}
DECAY = 0.1
GALORE = {"rank": 8, "update_proj_gap": 3, "scale": 0.5}
"""A checkpoint after three steps: the fourth goes on with the projection of the third, the sixth renews it."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 96), nn.Linear(96, 32, bias=False), nn.LayerNorm(32)
        self.places = nn.Embedding(4, 32)
        self.experts = nn.Parameter(torch.randn(2, 32, 32) / 8)


class Model(nn.Module):
    """Embeddings tied to the head, two layers, a norm: what a decoder has, without its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.layers, self.norm = nn.Embedding(128, 32), nn.ModuleList([Layer(), Layer()]), nn.LayerNorm(32)
        self.head = nn.Linear(32, 128, bias=False)
        self.head.weight = self.embed.weight
        self.layers[0].up.weight.requires_grad_(False)


def section(name: str, **more: Any) -> Any:
    if KINDS[name].package:
        pytest.importorskip(PACKAGES[KINDS[name].package])
    args = {**(GALORE if name in PROJECTED else {}), **more.pop("optim_args", {})}
    return Optim.model_construct(optim=name, learning_rate=3e-3, weight_decay=DECAY, optim_args=args, **more)


def decayed(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if "norm" not in name and "bias" not in name]


def built(model: nn.Module, optim: Any) -> Any:
    optimizer = optimizer_for(optim, model, decayed(model))
    assert optimizer is not None
    return optimizer


def give_gradients(model: nn.Module, step: int) -> None:
    torch.manual_seed(100 + step)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.randn_like(weight) / 4 + weight.detach() / 8


def steps(model: nn.Module, optimizer: Any, begin: int, end: int) -> None:
    for step in range(begin, end):
        if hasattr(optimizer, "train"):
            optimizer.train()
        give_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def by_hand(name: str, model: nn.Module) -> list[Any]:
    """The libraries' own classes, given weights by name."""
    named = {each: weight for each, weight in model.named_parameters() if weight.requires_grad}
    groups = [
        {"params": [weight for each, weight in named.items() if each in decayed(model)], "weight_decay": DECAY},
        {"params": [weight for each, weight in named.items() if each not in decayed(model)], "weight_decay": 0.0},
    ]
    if name == "muon":
        inside = ["layers.0.down.weight", "layers.1.up.weight", "layers.1.down.weight"]
        rest = [
            {**group, "params": [p for p in group["params"] if not any(p is named[n] for n in inside)]}
            for group in groups
        ]
        muon = torch.optim.Muon(
            [named[each] for each in inside], lr=3e-3, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"
        )
        return [muon, torch.optim.AdamW(rest, lr=3e-3, fused=True)]
    if name == "schedule_free_adamw":
        import schedulefree

        return [schedulefree.AdamWScheduleFree(groups, lr=3e-3)]
    import pytorch_optimizer

    if name == "galore_adamw":
        inside = ["layers.0.down.weight", "layers.1.up.weight", "layers.1.down.weight"]
        low = [{"params": [named[each] for each in inside], "weight_decay": DECAY, **GALORE, "projection_type": "std"}]
        taken = [id(named[each]) for each in inside]
        rest = [{**group, "params": [p for p in group["params"] if id(p) not in taken]} for group in groups]
        return [pytorch_optimizer.GaLore(low + rest, lr=3e-3, eps=1e-8)]
    if name == "adopt":
        return [pytorch_optimizer.ADOPT(groups, lr=3e-3, weight_decouple=True)]
    if name == "flash_adamw":
        return [pytorch_optimizer.FlashAdamW(groups, lr=3e-3)]
    return [pytorch_optimizer.CAME(groups, lr=3e-3)]


@pytest.mark.parametrize("name", ["muon", "adopt", "came", "flash_adamw", "schedule_free_adamw", "galore_adamw"])
def test_weights_move_as_by_the_librarys_own_class(name):
    ours, theirs = Model(), Model()
    steps(ours, built(ours, section(name)), 0, 6)
    for_theirs = by_hand(name, theirs)
    for step in range(6):
        give_gradients(theirs, step)
        for each in for_theirs:
            if hasattr(each, "train"):
                each.train()
            each.step()
    start = dict(Model().named_parameters())
    for key, weight in ours.named_parameters():
        assert torch.equal(weight, dict(theirs.named_parameters())[key]), key
        assert weight.requires_grad == (not torch.equal(weight, start[key])), key


def whole_and_resumed(name, dtype, device="cpu"):
    """A model after six steps, and one that took three of them up from a checkpoint."""
    whole, again = Model().to(device, dtype), Model().to(device, dtype)
    optimizer = built(whole, section(name))
    steps(whole, optimizer, 0, 3)
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    file = io.BytesIO()
    torch.save({"weights": whole.state_dict(), "optimizer": optimizer.state_dict()}, file)
    steps(whole, optimizer, 3, 6)

    file.seek(0)
    # As transformers reads it: nothing but tensors and plain values.
    saved = torch.load(file, weights_only=True, map_location="cpu")
    again.load_state_dict(saved["weights"])
    resumed = built(again, section(name))
    resumed.load_state_dict(saved["optimizer"])
    steps(again, resumed, 3, 6)
    return whole, again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(BUILT_HERE))
def test_a_checkpoint_goes_on_to_the_bit(name, dtype):
    whole, again = whole_and_resumed(name, dtype)
    for (key, weight), other in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(weight, other), key


@pytest.mark.parametrize("name", sorted(BUILT_HERE))
def test_the_rate_of_the_scheduler_is_the_rate_of_every_part(name):
    model = Model()
    optimizer = built(model, section(name))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    assert schedule.get_last_lr()[0] == 0.0
    steps(model, optimizer, 0, 2)
    for weight, start in zip(model.parameters(), Model().parameters(), strict=True):
        assert torch.equal(weight, start)


@pytest.mark.parametrize("name", sorted(BUILT_HERE - {"schedule_free_adamw"}))  # a rule leaves it the constant ones
def test_a_schedule_that_ends_at_a_rate_of_its_own_ends_there_in_every_part(name):
    from transformers import get_scheduler

    optimizer = built(Model(), section(name))
    own = {"power": 2.0, "lr_end": 1e-4}
    schedule = get_scheduler("polynomial", optimizer, 0, 4, scheduler_specific_kwargs=own)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-4] * len(optimizer.param_groups))


@pytest.mark.parametrize("name", sorted(BUILT_HERE))
def test_a_checkpoint_of_a_resumed_run_is_the_same_again(name):
    """The scheduler's rate and every setting come back, and parts still share them after loading."""
    model = Model()
    optimizer = built(model, section(name))
    steps(model, optimizer, 0, 2)
    other = built(model, section(name))
    other.load_state_dict(optimizer.state_dict())
    for group in other.param_groups:
        group["lr"] = 0.0
    before = [weight.clone() for weight in model.parameters()]
    if name != "schedule_free_adamw":  # whose weights move on towards the average at any rate
        steps(model, other, 2, 3)
        assert all(torch.equal(weight, start) for weight, start in zip(model.parameters(), before, strict=True))
    again = other.state_dict()
    assert [group["lr"] for group in again["param_groups"]] == [0.0] * len(other.param_groups)
    assert again["state"].keys() == optimizer.state_dict()["state"].keys()


def test_only_matrices_inside_the_layers_are_taken_apart():
    parts = split(Model())
    assert set(parts.matrices) == {"layers.0.down.weight", "layers.1.up.weight", "layers.1.down.weight"}
    assert "embed.weight" in parts.rest
    assert "layers.1.experts" in parts.rest
    assert "layers.1.places.weight" in parts.rest
    assert "layers.0.up.weight" not in {**parts.matrices, **parts.rest}


@pytest.mark.parametrize("name", sorted(MATRICES_ONLY))
def test_the_receipt_counts_what_each_part_moves(name):
    kind, count, detail = receipt_note(section(name), Model())
    assert count == 3
    assert f"{3 * 32 * 96:,} numbers" in detail
    optimizer = built(Model(), section(name))
    others = sum(weight.numel() for group in optimizer.parts[1].param_groups for weight in group["params"])
    assert f"of {others:,} numbers" in detail
    assert kind.replace(" ", ".").rsplit(".", 1)[-1] == type(optimizer.parts[0]).__name__


@pytest.mark.parametrize(
    ("named", "taken"),
    [
        ("all-linear", {"layers.0.down", "layers.1.up", "layers.1.down"}),
        (["down"], {"layers.0.down", "layers.1.down"}),
        (r".*\.1\.up", {"layers.1.up"}),
        (["nothing"], set()),
    ],
    ids=["all-linear", "down", "pattern", "nothing"],
)
def test_galore_projects_the_layers_that_are_named(named, taken):
    optim, model = section("galore_adamw", optim_target_modules=named), Model()
    assert {name.removesuffix(".weight") for name in projected(optim, model)} == taken
    _, count, detail = receipt_note(optim, model)
    assert count == len(taken)
    assert "rank 8" in detail
    optimizer = built(model, optim)
    steps(model, optimizer, 0, 1)
    low = [state["exp_avg"].shape for state in optimizer.state.values() if "projector" in state]
    assert low == [(96, 8) if "up" in name else (8, 96) for name in sorted(taken, key=NAMES.index)]


NAMES = ["layers.0.down", "layers.1.up", "layers.1.down"]


def held_bytes(optimizer: Any) -> int:
    return sum(size_of(value) for state in optimizer.state_dict()["state"].values() for value in state.values())


def size_of(value: Any) -> int:
    if isinstance(value, dict):
        return sum(size_of(each) for each in value.values())
    if isinstance(value, (tuple, list)):
        return sum(size_of(each) for each in value)
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) and value.numel() > 1 else 0


@pytest.mark.parametrize("name", sorted(BUILT_HERE))
def test_the_estimate_counts_the_states_that_are_there(name):
    optim, model = section(name), Model()
    optimizer = built(model, optim)
    steps(model, optimizer, 0, 1)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    config = SimpleNamespace(optim=optim, model=SimpleNamespace(dtype="float32"), adapter=SimpleNamespace(kind="none"))
    counts = Parameters(trained, trained, 0, ((32, 96, 2), (96, 32, 1)))
    # In a model of this size the code of 8-bit states, weights too small for 8 bits, and sums of rows weigh more.
    room = {"q_galore_adamw_8bit": 0.35, "came": 0.15}.get(name, 0.02)
    assert held_bytes(optimizer) == pytest.approx(state_bytes(config, counts), rel=room)


def test_flash_adamw_moves_weights_of_16_bits_by_less_than_they_can_show_and_the_estimate_knows_what_that_takes():
    optim, model = section("flash_adamw").model_copy(update={"learning_rate": 1e-5}), Model().bfloat16()
    optimizer = built(model, optim)
    weight = next(weight for weight in model.parameters() if weight.requires_grad)
    start, exact = weight.detach().clone(), weight.detach().double().mean().item()
    for _ in range(200):
        for each in model.parameters():
            each.grad = torch.ones_like(each)
        optimizer.step()
    assert not torch.equal(weight, start)
    moved = optimizer.get_fp32_model_state_dict(model)
    name = next(name for name, each in model.named_parameters() if each is weight)
    assert exact - moved[name].double().mean().item() == pytest.approx(200 * 1e-5, rel=0.3)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    config = SimpleNamespace(optim=optim, model=SimpleNamespace(dtype="bfloat16"), adapter=SimpleNamespace(kind="none"))
    assert held_bytes(optimizer) == pytest.approx(state_bytes(config, Parameters(trained, trained, 0, ())), rel=0.02)


def test_a_group_that_is_added_later_belongs_to_adamw():
    """PPO's value head has a rate of its own, and one row: no matrix to make orthogonal."""
    model, head = Model(), nn.Linear(32, 1)
    optimizer = built(model, section("muon"))
    optimizer.add_param_group({"params": list(head.parameters()), "lr": 1e-2, "weight_decay": 0.0})
    start = head.weight.detach().clone()
    head.weight.grad = torch.ones_like(head.weight)
    optimizer.step()
    # AdamW's first step is the rate itself, whatever the gradient.
    assert torch.allclose(start - head.weight, torch.full_like(start, 1e-2), atol=1e-6)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[-1]["lr"] == 1e-2
    assert optimizer.param_groups[-1] is optimizer.parts[-1].param_groups[-1]


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name in sorted(BUILT_HERE) for key in KINDS[name].own], ids=str
)
def test_each_own_setting_changes_the_steps(name, key):
    # Only a projection that is renewed, and found to be like the last, waits longer.
    eager = {"update_proj_gap": 1, "queue_size": 2, "cos_threshold": 0.0} if name == "q_galore_adamw_8bit" else {}
    own, start = KINDS[name].own[key], Model()
    steps(start, built(start, section(name, optim_args=eager)), 0, 5)
    for value in own.words or (own.least, own.most):
        assert own.fits(value)
        changed = Model()
        steps(changed, built(changed, section(name, optim_args={**eager, key: value})), 0, 5)
        if not all(torch.equal(one, two) for one, two in zip(start.parameters(), changed.parameters(), strict=True)):
            return
    pytest.fail("neither end of its bounds changes anything")


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setattr("engine.trainers.optimizers.building.installed", lambda package: None)
    with pytest.raises(WorkbenchError, match="adopt needs the package pytorch-optimizer") as caught:
        built(Model(), Optim.model_construct(optim="adopt", learning_rate=1e-3))
    assert "pip install pytorch-optimizer" in caught.value.hint


def test_others_are_left_to_transformers():
    optim = SimpleNamespace(optim="adamw_torch_fused")
    assert optimizer_for(optim, Model(), []) is None


@pytest.mark.parametrize(("before", "now"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_weights_that_are_given_another_format_go_on_with_their_states_in_it(
    before: torch.dtype, now: torch.dtype
) -> None:
    """A run that is resumed with another `model.dtype`: fused steps take states of their weight's format alone."""
    states: dict[str, Any] = {}
    for dtype in (before, now):
        weight = nn.Parameter(torch.ones(8, dtype=dtype))
        weight.grad = torch.full_like(weight, 0.5)
        optimizer = torch.optim.AdamW([weight], fused=True)
        keep_state_formats(optimizer)
        if states:
            optimizer.load_state_dict(states)
        optimizer.step()
        states = optimizer.state_dict()
    assert states["state"][0]["exp_avg"].dtype == now
    assert states["state"][0]["step"] == 2
