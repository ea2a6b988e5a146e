"""Kernels by timing: the fastest finite combination is taken, nothing of the trial stays, and the run is one chosen by hand."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import types
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl.trainer.utils import add_fused_lm_head

from engine.errors import Cancelled, ModelError
from engine.features.applied import Applied
from engine.features.auto_compose import apply as auto_compose
from engine.features.auto_compose import stored
from engine.features.compile import apply as compiled
from engine.features.sequence import Features
from engine.rules import read
from tests.engine.features.conftest import built_of, tiny_model
from tests.engine.features.families import made
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from


def config(**kernels):
    given = {"kernel_auto_compose": True, **kernels}
    mapping = {
        "model": {"name": "builtin/tiny"},
        "data": {"train": [{"path": "rows.jsonl"}], "max_length": 16},
        "adapter": {"kind": "lora"},
    }
    return read({**mapping, "kernels": given, "optim": {"per_device_train_batch_size": 2}}).config


class Trainer:
    """What timing needs of a trainer. A pass takes one second on the test's own clock, more where a kernel says so."""

    writer = None
    args = SimpleNamespace(process_index=0, gradient_checkpointing=False)

    def __init__(self, model, clock=None):
        self.model, self.clock = model, clock

    @contextlib.contextmanager
    def compute_loss_context_manager(self):
        if self.clock is not None:
            self.clock.now += 1.0
        yield

    def training_step(self, ids):
        self.model.zero_grad()
        loss = self.model(input_ids=ids, labels=ids, fused_lm_head=True).loss
        loss.backward()
        return loss.item()


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only where a test lets it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(auto_compose, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def fused(**changes):
    model = tiny_model(**changes)
    add_fused_lm_head(model)
    return model


def planted(setting, act):
    """A kernel that calls `act(ids)` in each pass through the first layer."""

    def apply(config, built):
        if getattr(config.kernels, setting) is not True:
            return None
        layer = built.policy.model.layers[0]
        before, plain = vars(layer).get("forward"), layer.forward

        def forward(self, x, *args, **kwargs):
            act(x)
            return plain(x, *args, **kwargs)

        layer.forward = types.MethodType(forward, layer)
        undo = partial(setattr, layer, "forward", before) if before else partial(vars(layer).pop, "forward")
        return Applied(setting, True, "planted", 1, "", undo)

    return auto_compose.Choice(setting, setting, apply, lambda config, built: None)


def raising(x):
    raise RuntimeError("no such kernel here\nand more")


def zeroed(ids):
    ids.zero_()


def instances(model):
    """What hangs on each module's own instance."""
    return {
        name: {key: id(value) for key, value in vars(module).items()}
        for name, module in model.named_modules(remove_duplicate=False)
    }


def test_the_slow_one_is_left_and_the_quick_one_taken(monkeypatch, clock, tmp_path):
    def pass_seconds(seconds):
        return lambda x: setattr(clock, "now", clock.now + seconds)

    choices = (planted("use_cut_ce", pass_seconds(0.5)), planted("torch_compile", pass_seconds(-0.25)))
    monkeypatch.setattr(auto_compose, "CHOICES", choices)
    trainer = Trainer(fused(), clock)
    chosen, said = auto_compose.compose(config(fused_attn_kernel=False), built_of(trainer, folder=tmp_path))
    assert (chosen.kernels.use_cut_ce, chosen.kernels.torch_compile) == (False, True)
    assert (said.effective, said.count) == ("torch_compile", 4)
    table = json.loads((tmp_path / stored.FILE).read_text())["table"]
    assert [(row["on"], row["forward_ms"], row["both_ms"]) for row in table] == [
        ([], 1000, 1000), (["use_cut_ce"], 1500, 1500), (["torch_compile"], 750, 750),
        (["use_cut_ce", "torch_compile"], 1250, 1250),
    ]  # fmt: skip


def test_of_what_is_as_fast_the_plainest_is_taken():
    plain, cut = auto_compose.Trial(()), auto_compose.Trial(("use_cut_ce",))
    for trial, seconds in ((plain, 1.015), (cut, 1.0)):
        trial.forward, trial.both = [seconds], [seconds]
    assert auto_compose.choose([plain, cut]) is plain
    plain.both = [1.03]
    assert auto_compose.choose([plain, cut]) is cut


def test_ligers_kernels_are_taken_only_where_they_are_more_than_3_percent_faster_than_all_without():
    plain, fused, liger = (auto_compose.Trial(on) for on in ((), ("fused_attn_kernel",), (auto_compose.LIGER,)))
    for trial, seconds in ((plain, 1.2), (fused, 1.03), (liger, 1.0)):
        trial.forward, trial.both = [seconds], [seconds]
    assert auto_compose.choose([plain, fused, liger]) is fused
    liger.both = [0.99]
    assert auto_compose.choose([plain, fused, liger]) is liger
    fused.why = plain.why = "it failed"
    liger.both = [5.0]
    assert auto_compose.choose([plain, fused, liger]) is liger


def with_parts(monkeypatch, clock, seconds):
    """Liger's kernels planted: each part that is on takes so much more of a pass."""

    def apply(config, built):
        if config.kernels.use_liger_kernel is not True:
            return None
        on = [part for part in seconds if config.kernels.liger_kernel_config.get(part, True)]
        taken = sum(seconds[part] for part in on)
        hook = built.policy.model.layers[0].register_forward_pre_hook(
            lambda *args: setattr(clock, "now", clock.now + taken)
        )
        return Applied("", True, "", 1, "", hook.remove)

    choice = auto_compose.Choice(auto_compose.LIGER, "Liger kernels", apply, lambda config, built: None)
    monkeypatch.setattr(auto_compose, "CHOICES", (choice,))


def test_of_ligers_parts_those_that_are_faster_alone_are_combined_told_and_kept(monkeypatch, clock, tmp_path):
    with_parts(monkeypatch, clock, {"rms_norm": -0.1, "rope": 0.2, "swiglu": -0.2, "geglu": 0.0})
    trainer = Trainer(fused(layers=1), clock)
    chosen, said = auto_compose.compose(config(), built_of(trainer, folder=tmp_path))
    assert chosen.kernels.use_liger_kernel is True
    assert chosen.kernels.liger_kernel_config == {"rms_norm": True, "rope": False, "swiglu": True, "geglu": False}
    assert "plain 1,000.0 ms" in said.detail
    assert "Liger kernels 700.0 ms" in said.detail
    assert (
        "Liger's parts by themselves: rms_norm 900.0 ms, rope 1,200.0 ms, swiglu 800.0 ms, geglu 1,000.0 ms; "
        "without 1,000.0 ms; combined: rms_norm, swiglu"
    ) in said.detail
    # A resumed run has the same parts without a pass; a damaged table is timed anew.
    before = clock.now
    again = auto_compose.compose(config(), built_of(trainer, folder=tmp_path))
    assert (again[0], again[1].detail, clock.now) == (chosen, said.detail, before)
    kept = json.loads((tmp_path / stored.FILE).read_text())
    for damage in ({"parts": ["norms"]}, {"parts": None}, {"parts_table": [7]}, {"liger_kernel": "9.9"}):
        (tmp_path / stored.FILE).write_text(json.dumps({**kept, **damage}))
        before = clock.now
        assert auto_compose.compose(config(), built_of(trainer, folder=tmp_path))[0] == chosen
        assert clock.now > before


def test_where_no_part_is_faster_ligers_kernels_are_off_and_the_table_tells_why(monkeypatch, clock, tmp_path):
    with_parts(monkeypatch, clock, {"rms_norm": 0.1, "rope": 0.2, "swiglu": 0.0, "geglu": 0.0})
    chosen, said = auto_compose.compose(config(), built_of(Trainer(fused(layers=1), clock), folder=tmp_path))
    assert (chosen.kernels.use_liger_kernel, said.effective, said.count) == (False, "plain", 1)
    assert "combined: none is faster" in said.detail


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (raising, "no such kernel here"),
        (lambda x: x.mul_(math.nan), "its loss is not finite"),
    ],
)
def test_what_cannot_be_timed_is_told_and_never_taken(monkeypatch, clock, tmp_path, act, why):
    monkeypatch.setattr(auto_compose, "CHOICES", (planted("use_cut_ce", act),))
    chosen, said = auto_compose.compose(config(), built_of(Trainer(fused(), clock), folder=tmp_path))
    assert chosen.kernels.use_cut_ce is False
    assert (said.effective, said.count) == ("plain", 1)
    assert f"use_cut_ce left out: {why}" in said.detail
    assert "\n" not in said.detail


def test_a_time_that_is_no_number_is_out_and_if_all_are_the_run_ends(monkeypatch, clock, tmp_path):
    monkeypatch.setattr(auto_compose, "CHOICES", (planted("use_cut_ce", lambda x: setattr(clock, "now", math.nan)),))
    clock_of = Trainer(fused(), clock)
    # From the first such time on the clock stays so: the plain one was warm before, and has no finite time either.
    with pytest.raises(ModelError, match=r"none of 2 combinations .*no finite time"):
        auto_compose.compose(config(), built_of(clock_of, folder=tmp_path))
    assert not (tmp_path / stored.FILE).exists()


def test_an_input_that_is_written_to_is_found_out(monkeypatch, clock, tmp_path):
    def apply(config, built):
        if config.kernels.use_cut_ce is not True:
            return None
        hook = built.policy.model.embed_tokens.register_forward_pre_hook(lambda module, args: zeroed(*args))
        return Applied("", True, "", 1, "", hook.remove)

    monkeypatch.setattr(
        auto_compose, "CHOICES", (auto_compose.Choice("use_cut_ce", "use_cut_ce", apply, lambda config, built: None),)
    )
    _, said = auto_compose.compose(config(), built_of(Trainer(fused(), clock), folder=tmp_path))
    assert (said.effective, "it changed its input" in said.detail) == ("plain", True)


def test_experts_with_adapters_by_their_names_are_timed_and_a_write_to_one_ends_the_run(monkeypatch, clock, tmp_path):
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    base = made("qwen3_moe")
    add_fused_lm_head(base)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=[], target_parameters=names))
    monkeypatch.setattr(auto_compose, "CHOICES", (auto_compose.CHOICES[0],))  # use_cut_ce
    _, said = auto_compose.compose(config(), built_of(Trainer(model, clock), folder=tmp_path))
    assert said.count == 2

    expert = dict(model.named_parameters())[
        "base_model.model.model.layers.0.mlp.experts.base_layer.base_layer.down_proj"
    ]
    apply = auto_compose.CHOICES[0].apply

    def spoiling(config, trainer):
        with torch.no_grad():
            expert[0, 0, 0] += 1e-3
        return apply(config, trainer)

    choice = auto_compose.Choice("use_cut_ce", "use_cut_ce", spoiling, lambda config, built: None)
    monkeypatch.setattr(auto_compose, "CHOICES", (choice,))
    with pytest.raises(ModelError, match="changed the model's weights"):
        auto_compose.compose(config(), built_of(Trainer(model, clock), folder=tmp_path / "again"))


def test_a_weight_that_is_written_to_ends_the_run(monkeypatch, clock, tmp_path):
    model = fused()

    def spoil(x):
        with torch.no_grad():
            model.model.norm.weight.mul_(1.0)

    monkeypatch.setattr(auto_compose, "CHOICES", (planted("use_cut_ce", spoil),))
    with pytest.raises(ModelError, match="changed the model's weights"):
        auto_compose.compose(config(), built_of(Trainer(model, clock), folder=tmp_path))


def test_nothing_of_the_trial_stays_on_the_model_the_trainer_or_the_random_numbers(tmp_path, monkeypatch):
    """The real features; layers are compiled without building code, which the slow test does."""
    eager = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, options=None, **how: eager(function, backend="eager", **how))
    monkeypatch.setattr(auto_compose, "SECONDS", 0)
    model = fused(layers=1)
    trainer = Trainer(model.eval())
    ids = torch.randint(128, (2, 9), generator=torch.Generator().manual_seed(1))
    loss = trainer.training_step(ids)
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before, own, random = instances(model), dict(vars(trainer)), torch.get_rng_state()
    # The head's kernel, set by hand, is part of both combinations.
    chosen, said = auto_compose.compose(config(use_cut_ce=True), built_of(trainer, folder=tmp_path))
    assert instances(model) == before
    assert dict(vars(trainer)) == own
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert said.count == 2
    assert "fused norm and rotary not tried" in said.detail
    assert "left out" not in said.detail
    assert "auto" not in [getattr(chosen.kernels, choice.setting) for choice in auto_compose.CHOICES]
    assert trainer.training_step(ids) == loss
    assert all(torch.equal(weight.grad, gradients[name]) for name, weight in model.named_parameters())


def lora_model(**settings):
    """One layer with adapters that already say something, under PEFT."""
    model = get_peft_model(tiny_model(layers=1), LoraConfig(r=2, target_modules="all-linear", **settings))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model.train()


def test_fused_lora_is_timed_where_it_acts_and_never_beside_compiled_layers(monkeypatch, tmp_path):
    eager = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, options=None, **how: eager(function, backend="eager", **how))
    monkeypatch.setattr(auto_compose, "SECONDS", 0)
    model, given = lora_model(), config(use_cut_ce=False)
    before = instances(model)
    seen = []
    real = auto_compose.fused_lora.projected
    monkeypatch.setattr(auto_compose.fused_lora, "projected", lambda *args: seen.append(1) or real(*args))
    monkeypatch.setattr(auto_compose, "choose", lambda trials: trials[1])
    chosen, said = auto_compose.compose(given, built_of(Trainer(model), folder=tmp_path))
    table = json.loads((tmp_path / stored.FILE).read_text())["table"]
    assert [(row["on"], row["why"]) for row in table] == [([], ""), (["fused_lora"], ""), (["torch_compile"], "")]
    assert (chosen.kernels.fused_lora, chosen.kernels.torch_compile, said.effective) == (True, False, "fused LoRA")
    assert seen, "closed form was computed while it was timed"
    assert instances(model) == before


@pytest.mark.parametrize(
    ("model", "kernels", "reason"),
    [
        (lambda: lora_model(use_dora=True), {}, "PEFT computes all 7 adapted projections"),
        (lora_model, {"torch_compile": True}, "Compiled layers take adapters together themselves"),
        (
            lora_model,
            {"torch_compile_options": {"shape_padding": True}},
            "Compiled layers take adapters together themselves",
        ),
        (lora_model, {}, None),
    ],
)
def test_why_fused_lora_is_not_tried(model, kernels, reason):
    said = auto_compose._no_lora(config(**kernels), built_of(Trainer(model())))
    assert (said or "").startswith(reason) if reason else said is None


def test_what_is_set_by_hand_is_so_in_every_combination_and_bounds_hold(monkeypatch, clock, tmp_path):
    passes = []
    assert (auto_compose.ROWS, auto_compose.LENGTH, auto_compose.STEPS, auto_compose.VOCABULARY) == (
        32,
        512,
        50,
        200_000,
    )
    monkeypatch.setattr(auto_compose, "ROWS", 3)
    monkeypatch.setattr(auto_compose, "LENGTH", 8)
    monkeypatch.setattr(
        auto_compose, "CHOICES", (planted("use_cut_ce", passes.append), planted("torch_compile", raising))
    )
    given = config(torch_compile=False).model_copy(
        update={"optim": config().optim.model_copy(update={"per_device_train_batch_size": 64})}
    )
    given = given.model_copy(update={"data": given.data.model_copy(update={"max_length": 4096})})
    monkeypatch.setattr(auto_compose, "SECONDS", 1e9)
    _, said = auto_compose.compose(given, built_of(Trainer(fused(layers=1), clock), folder=tmp_path))
    assert said.count == 2
    assert {tuple(x.shape[:2]) for x in passes} == {(3, 8)}
    assert 30 < len(passes) <= auto_compose.STEPS


def test_a_head_above_the_bound_is_not_timed(monkeypatch):
    monkeypatch.setattr(auto_compose, "VOCABULARY", 100)
    trainer = Trainer(fused(vocab=128))
    assert "above the 100 that are timed" in auto_compose._no_cut(config(), built_of(trainer))
    seen = []
    trainer.model.lm_head.register_forward_pre_hook(lambda *args: seen.append(args))
    assert math.isfinite(auto_compose._loss(trainer.model, torch.zeros(1, 4, dtype=torch.long)).item())
    assert seen == []


def test_tiles_shared_prompts_and_models_without_a_head_say_why(tmp_path):
    trainer = Trainer(tiny_model())
    tiled = config().model_copy(update={"memory": config().memory.model_copy(update={"tiled_mlp": True})})
    chosen, said = auto_compose.compose(tiled, built_of(trainer, folder=tmp_path))
    assert (said.effective, said.count) == ("nothing to choose", None)
    assert "no vocabulary head" in said.detail
    assert "A tile is differentiated" in said.detail
    assert [getattr(chosen.kernels, choice.setting) for choice in auto_compose.CHOICES] == [False] * 6
    assert "fused LoRA not tried: the model has no decoder layer with a LoRA adapter" in said.detail
    trainer.shares_prompts = True
    assert "share their prompt" in auto_compose._no_compile(config(), built_of(trainer))
    assert "Compiled layers take adapters together" in auto_compose._no_compile(
        config(fused_lora=True), built_of(trainer)
    )


def test_what_was_timed_is_kept_for_a_resume_in_the_same_place_and_for_no_other(monkeypatch, clock, tmp_path):
    passes = []
    monkeypatch.setattr(auto_compose, "CHOICES", (planted("use_cut_ce", passes.append),))
    trainer = Trainer(fused(layers=1), clock)
    first = auto_compose.compose(config(), built_of(trainer, folder=tmp_path))
    timed, kept = len(passes), json.loads((tmp_path / stored.FILE).read_text())
    again = auto_compose.compose(config(), built_of(trainer, folder=tmp_path))
    assert (len(passes), again[0], again[1].detail) == (timed, first[0], first[1].detail)
    # The other choice, as a slower day might have had it, stands.
    (tmp_path / stored.FILE).write_text(json.dumps({**kept, "chosen": ["use_cut_ce"]}))
    chosen, said = auto_compose.compose(config(), built_of(trainer, folder=tmp_path))
    assert (chosen.kernels.use_cut_ce, said.effective, len(passes)) == (True, "use_cut_ce", timed)
    row = kept["table"][0]
    damaged = [{"chosen": 5}, {"chosen": [["a"]]}, {"chosen": ["use_cut_ce"] * 2}, {"table": "none"}, {"table": [7]}]
    damaged += [{"table": [row | change]} for change in ({"on": 1}, {"both_ms": "fast"}, {"first_s": None}, {"why": 1})]
    for change in ({"device": "another"}, {"torch": "1.0"}, {"chosen": ["no_such"]}, {"table": []}, *damaged):
        (tmp_path / stored.FILE).write_text(json.dumps({**kept, **change}))
        passes.clear()
        assert auto_compose.compose(config(), built_of(trainer, folder=tmp_path))[1].effective == "plain"
        assert passes
    (tmp_path / stored.FILE).write_text("{")
    assert auto_compose.compose(config(), built_of(trainer, folder=tmp_path))[1].effective == "plain"


@pytest.mark.parametrize("in_the_way", ["a folder", "a folder that is not empty", "no room"])
def test_where_the_table_cannot_be_kept_the_run_goes_on_and_says_so(monkeypatch, clock, tmp_path, in_the_way):
    monkeypatch.setattr(auto_compose, "CHOICES", (planted("use_cut_ce", lambda x: None),))
    if in_the_way == "no room":

        def full(*args):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
    else:
        (tmp_path / stored.FILE).mkdir()
        if "not" in in_the_way:
            (tmp_path / stored.FILE / "held").touch()
    chosen, said = auto_compose.compose(config(), built_of(Trainer(fused(layers=1), clock), folder=tmp_path))
    assert (chosen.kernels.use_cut_ce, said.effective, said.count) == (False, "plain", 2)
    reason = "No space left on device" if in_the_way == "no room" else "Is a directory"
    assert f"kernels.json could not be written ({reason}), so a resume times again" in said.detail
    assert {path.name for path in tmp_path.iterdir()} <= {stored.FILE}


@pytest.mark.parametrize("heard", [1, 2, 3, 5, 9])
def test_timing_ends_at_the_next_pass_once_a_stop_is_heard_and_leaves_nothing(monkeypatch, clock, tmp_path, heard):
    passes, calls = [], []
    monkeypatch.setattr(auto_compose, "CHOICES", (planted("use_cut_ce", passes.append),))
    trainer = Trainer(fused(layers=1), clock)
    before, own = instances(trainer.model), dict(vars(trainer))

    def listen():
        calls.append(1)
        if len(calls) == heard:
            raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        auto_compose.compose(config(), built_of(trainer, folder=tmp_path, check_stop=listen))
    assert clock.now == heard - 1, "no pass after it"
    assert (instances(trainer.model), dict(vars(trainer))) == (before, own)
    assert not (tmp_path / stored.FILE).exists()


def test_without_the_setting_nothing_is_timed(tmp_path):
    plain = config(kernel_auto_compose=False)
    assert auto_compose.compose(plain, built_of(Trainer(fused()), folder=tmp_path)) == (plain, None)
    assert Features(plain).entries() == []


@pytest.mark.slow
def test_a_run_with_the_choice_is_the_run_chosen_by_hand_and_a_resumed_one_keeps_it(train, source, tmp_path):
    base = {
        "adapter.kind": "lora", "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 2, "run.save_steps": 1,
        "kernels.torch_compile": False, "optim.gradient_accumulation_steps": 1,
    }  # fmt: skip
    run = train({**base, "kernels.kernel_auto_compose": True})
    kept = json.loads((run.path / stored.FILE).read_text())
    by_hand = train({**base, **{f"kernels.{name}": name in kept["chosen"] for name in ("use_cut_ce", "fused_lora")}})
    losses = [event["loss"] for event in lines(run, "metrics")]
    assert losses == [event["loss"] for event in lines(by_hand, "metrics")]
    said = {entry["feature"]: entry for event in lines(run, "receipt") for entry in event["entries"]}
    assert said[auto_compose.FEATURE]["count"] == 4
    assert "cut cross-entropy" in said[auto_compose.FEATURE]["detail"]
    assert "Timing kernels" in [event["name"] for event in lines(run, "phase")]
    # The other choice, as a slower day might have had it: the resumed run takes it as it stands and times nothing.
    other = [] if kept["chosen"] else ["use_cut_ce"]
    copy = resumed_from(run, 1, tmp_path / "copy")
    (copy.path / stored.FILE).write_text(json.dumps({**kept, "chosen": other}))
    train(folder=copy)
    again = {entry["feature"]: entry for event in lines(copy, "receipt", 1) for entry in event["entries"]}
    assert again[auto_compose.FEATURE]["effective"] == ("cut cross-entropy" if other else "plain")
    assert ("cut cross-entropy" in again) == bool(other)
    assert "Timing kernels" not in [event["name"] for event in lines(copy, "phase", 1)]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_compiled_layers_are_timed_and_a_run_with_them_is_the_run_chosen_by_hand(train, source, monkeypatch):
    if compiled.refusal() is not None:
        pytest.skip("torch compiles for a CPU with g++")
    base = {
        "data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 3, "kernels.use_cut_ce": False,
        "optim.gradient_accumulation_steps": 1,
    }  # fmt: skip
    monkeypatch.setattr(auto_compose, "choose", lambda trials: trials[-1])
    run = train({**base, "kernels.kernel_auto_compose": True})
    said = {entry["feature"]: entry for event in lines(run, "receipt") for entry in event["entries"]}
    assert (said[auto_compose.FEATURE]["effective"], said[auto_compose.FEATURE]["count"]) == ("compiled layers", 2)
    torch._dynamo.reset()
    by_hand = train({**base, "kernels.torch_compile": True})
    assert [e["loss"] for e in lines(run, "metrics")] == [e["loss"] for e in lines(by_hand, "metrics")]


def one_of_two(rank, folder, answers):
    """A process to which the other combination seems faster."""
    meet = f"file://{folder}/meet"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    clock = SimpleNamespace(now=0.0)
    auto_compose.time = SimpleNamespace(perf_counter=lambda: clock.now)
    seconds = 0.5 if rank else -0.5
    auto_compose.CHOICES = (planted("use_cut_ce", lambda x: setattr(clock, "now", clock.now + seconds)),)
    trainer = Trainer(fused(layers=1), clock)
    trainer.args = SimpleNamespace(process_index=rank, gradient_checkpointing=False)
    chosen, said = auto_compose.compose(config(), built_of(trainer, folder=folder))
    answers[rank] = (chosen.kernels.use_cut_ce, said.detail)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_all_processes_of_a_run_take_what_the_first_one_measured(tmp_path):
    answers = torch.multiprocessing.get_context("spawn").Manager().dict()
    torch.multiprocessing.spawn(one_of_two, (tmp_path, answers), nprocs=2)
    assert answers[0] == answers[1]
    assert answers[1][0] is True
    assert json.loads((tmp_path / stored.FILE).read_text())["chosen"] == ["use_cut_ce"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_the_gpu_every_combination_has_its_times_and_leaves_no_trace(tmp_path):
    model = fused(hidden_size=256, num_attention_heads=4, head_dim=64).to("cuda", torch.bfloat16).train()
    trainer = Trainer(model)
    before, random = instances(model), torch.cuda.get_rng_state()
    # Liger's are tests/engine/features/liger_kernel/test_on_gpu.py's to look at.
    _, said = auto_compose.compose(config(use_liger_kernel=False), built_of(trainer, folder=tmp_path))
    table = json.loads((tmp_path / stored.FILE).read_text())["table"]
    assert [row["why"] for row in table] == [""] * 8, said.detail
    assert all(row["forward_ms"] > 0 and row["both_ms"] > 0 for row in table)
    assert instances(model) == before
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert all(weight.grad is None for weight in model.parameters())
