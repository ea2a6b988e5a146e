"""Fused experts give transformers' and PEFT's own: outputs, gradients, curves, saved adapters, and back; what is refused."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from engine.config.facts import Facts, ModelFacts
from engine.config.files import put
from engine.errors import ModelError
from engine.features.built import Notes
from engine.features.fused_experts import UNSERVED, apply, chosen
from engine.features.gradient_checkpointing.tiers import POLICIES, tier_of, use_tier
from engine.hardware import parse_machine
from engine.kernels.experts.module import unserved
from engine.rules import read
from tests.engine.features.conftest import built_of
from tests.engine.features.families import batches, made

MIXTURES = ("qwen3_moe", "qwen3_5_moe", "qwen3_vl_moe", "mixtral", "gpt_oss")
ON = SimpleNamespace(kernels=SimpleNamespace(fused_experts=True))


def targets(model):
    """PEFT's names of the weights that hold all experts."""
    names = {".".join(name.split(".")[-2:]) for name, weight in model.named_parameters() if ".experts." in name}
    return sorted(name for name in names if name.endswith(("gate_up_proj", "down_proj")))


def exact(family):
    """The family's model in float64, which torch's grouped products do not serve."""
    model = made(family).double()
    model.set_experts_implementation("eager")
    return model


def with_adapters(family, rank=3, which=None, **changes):
    model = exact(family)
    torch.manual_seed(2)
    config = LoraConfig(
        r=rank, lora_alpha=5, target_modules=["q_proj"], target_parameters=which or targets(model),
        init_lora_weights=False, **changes,
    )  # fmt: skip
    return get_peft_model(model, config)


def fused(model):
    built = built_of(SimpleNamespace(model=model))
    found = apply.blocks(built)
    assert found
    return apply.fuse(found)


def learned(model):
    """Loss and gradients of one batch."""
    model.zero_grad()
    ids = batches(1, 3, 11)[0]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(ours, theirs):
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        assert (ours[1][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


@pytest.mark.parametrize("family", MIXTURES)
def test_full_weights_of_a_family_get_the_same_gradients_and_are_given_back(family):
    theirs = learned(exact(family))
    model = exact(family)
    before = {name: vars(module).copy() for name, module in model.named_modules()}
    kinds = [module.config._experts_implementation for module in model.modules() if apply._registrable(module)]
    undo = fused(model)
    assert all(
        module.config._experts_implementation.startswith("workbench_")
        for module in model.modules()
        if apply._registrable(module)
    )
    same(learned(model), theirs)
    undo()
    assert kinds == [module.config._experts_implementation for module in model.modules() if apply._registrable(module)]
    assert all(vars(module).keys() == before[name].keys() for name, module in model.named_modules())


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("which", ["both", "down_proj", "gate_up_proj"])
def test_adapters_of_experts_get_the_same_gradients_without_their_product_being_formed(family, which, monkeypatch):
    chosen = None if which == "both" else [name for name in targets(made(family)) if name.endswith(which)]
    theirs = learned(with_adapters(family, which=chosen))
    assert any(".experts." in name and "lora_B" in name for name in theirs[1])
    model = with_adapters(family, which=chosen)
    undo = fused(model)

    def formed(*args):
        raise AssertionError("the adapters' product was formed")

    with monkeypatch.context() as patched:
        patched.setattr(apply.ParamWrapper, "_activate_lora", formed)
        patched.setattr(apply.ParamWrapper, "get_delta_weight", formed)
        same(learned(model), theirs)
    undo()
    same(learned(model), theirs)
    assert not any("forward" in vars(module) for module in model.modules())


def test_adapters_that_are_off_merged_or_several_give_what_peft_gives():
    theirs, ours = (with_adapters("qwen3_moe") for _ in range(2))
    fused(ours)
    ids = batches(1, 2, 9)[0]

    def agree(change):
        found = []
        for model in (theirs, ours):
            with torch.no_grad():
                found.append(change(model))
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
        return found[0]

    def off(model):
        with model.disable_adapter():
            return model(input_ids=ids).logits

    plain, adapted = agree(off), agree(lambda model: model(input_ids=ids).logits)
    assert not torch.allclose(plain, adapted)

    def merged(model):
        model.merge_adapter()
        found = model(input_ids=ids).logits
        model.unmerge_adapter()
        return found

    torch.testing.assert_close(agree(merged), adapted)

    def other(model):
        torch.manual_seed(3)
        if "other" not in model.peft_config:
            model.add_adapter("other", model.peft_config["default"])
        model.set_adapter("other")
        return model(input_ids=ids).logits

    assert not torch.allclose(agree(other), adapted)

    def both(model):
        model.base_model.set_adapter(["default", "other"])
        return model(input_ids=ids).logits

    agree(both)


def test_an_adapter_trained_so_is_plain_pefts_on_disk(tmp_path):
    model = with_adapters("mixtral")
    fused(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for ids in batches(3, 2, 9):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path)
    fresh = PeftModel.from_pretrained(exact("mixtral"), tmp_path)
    ids = batches(1, 2, 9)[0]
    with torch.no_grad():
        torch.testing.assert_close(fresh(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-6, atol=1e-6)


def test_two_families_in_one_process_keep_their_own_gates():
    first, second = exact("mixtral"), exact("gpt_oss")
    wanted = learned(first), learned(second)
    fused(first), fused(second)
    same(learned(first), wanted[0])
    same(learned(second), wanted[1])


def test_generation_goes_through_the_same_experts():
    model = with_adapters("qwen3_moe").eval()
    ids = batches(1, 2, 5)[0]
    told = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    theirs = model.generate(input_ids=ids, **told)
    fused(model)
    assert torch.equal(model.generate(input_ids=ids, **told), theirs)


@pytest.mark.parametrize("tier", ["reentrant", "full", "medium", "selective"])
def test_checkpointed_layers_get_the_same_gradients(tier):
    theirs = learned(with_adapters("mixtral"))
    model = with_adapters("mixtral")
    fused(model)
    model.enable_input_require_grads()
    base = model.get_base_model()
    if tier in POLICIES:
        use_tier(base, tier)
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": tier == "reentrant"})
    assert {tier_of(layer) for layer in base.model.layers} == {"full" if tier == "reentrant" else tier}
    same(learned(model.train()), theirs)


def test_a_block_that_answers_otherwise_ends_the_run(monkeypatch):
    model = with_adapters("mixtral")
    kept = apply.experts_forward
    monkeypatch.setattr(apply, "experts_forward", lambda *args, **kwargs: 1.1 * kept(*args, **kwargs))
    with pytest.raises(ModelError, match="MixtralExperts answers otherwise with the kernels"):
        fused(model)


def test_what_has_no_place_is_refused_with_the_reason():
    dense = built_of(SimpleNamespace(model=made("qwen3")))
    with pytest.raises(ModelError, match="the model has no experts in transformers' form"):
        apply.apply(ON, dense)
    with pytest.raises(ModelError, match="the kernels need a CUDA device"):
        apply.apply(ON, built_of(SimpleNamespace(model=made("mixtral"))))
    wide = with_adapters("mixtral", rank=257)
    with pytest.raises(ModelError, match="an adapter has rank 257, and the kernels take up to 256"):
        fused(wide)
    biased = with_adapters("gpt_oss", which=["experts.gate_up_proj_bias"])
    with pytest.raises(ModelError, match="an adapter is on gate_up_proj_bias"):
        fused(biased)
    assert apply.apply(SimpleNamespace(kernels=SimpleNamespace(fused_experts=False)), dense) is None


def test_auto_takes_it_where_steps_were_measured_and_says_why():
    mixture = ModelFacts("m", model_type="qwen3_moe", experts=8)
    card = Facts(model=mixture, machine=parse_machine("1xH100-80GB"))

    def taken(facts=card, **changes):
        mapping = {"version": 1, "model": {"name": "m"}}
        mapping["adapter"] = {"kind": "lora", "target_parameters": ["mlp.experts.down_proj"]}
        for name, value in changes.items():
            put(mapping, name.replace("__", "."), value)
        return chosen(read(mapping).config, facts)

    assert taken() == (
        True,
        "H100 computes experts with their adapters faster and in less memory by it",
    )
    assert taken(run__devices=2)[0] is True  # each holds the model: 8 layers of Qwen3-30B-A3B on two H100
    assert taken(kernels__kernel_auto_compose=True)[0] == "auto"
    for words, found in {
        "no mixture": taken(replace(card, model=replace(mixture, model_type="qwen3", experts=None))),
        "launch decides": taken(replace(card, machine=None)),
        "no GPU": taken(replace(card, machine=parse_machine("cpu"))),
        "older than": taken(replace(card, machine=parse_machine("1xA100-80GB"))),
        "its gate": taken(replace(card, model=replace(mixture, model_type="hy_v4"))),
        "no adapters": taken(adapter__target_parameters=[]),
        "up to rank 256": taken(adapter__r=300),
        "in float32": taken(model__dtype="float32"),
        "no plain numbers": taken(model__quantization="fp8"),
        "a pass of their own": taken(model__quantization="nf4"),
        "layers stream": taken(memory__layer_offloading=True),
        "shared out": taken(run__devices=2, distributed__strategy="fsdp2"),
        "not known yet": taken(replace(card, model=None)),
    }.items():
        assert found[0] is False
        assert words in found[1]


def test_what_auto_took_and_does_not_serve_stays_with_transformers():
    """There is no card here, so the kernels lack one; the receipt says so, and nothing is left on the model."""
    model = made("mixtral")
    before = {name: vars(module).copy() for name, module in model.named_modules()}
    auto = replace(
        built_of(SimpleNamespace(model=model)), notes=Notes(reasons={"kernels.fused_experts": "it is faster"})
    )
    if not torch.cuda.is_available():
        row = apply.apply(ON, auto)
        assert (row.requested, row.effective, row.count) == ("auto", "off", None)
        assert "the kernels need a CUDA device" in row.detail
    off = apply.apply(SimpleNamespace(kernels=SimpleNamespace(fused_experts=False)), auto)
    assert (off.effective, off.detail) == ("off", "it is faster")
    assert all(vars(module).keys() == before[name].keys() for name, module in model.named_modules())


IN_THE_INTERPRETER = """
import torch
from tests.engine.features.families import batches, made
from tests.engine.features.fused_experts.test_apply import fused, learned, targets
from engine.trainers.sharded import full_tensor
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def adapted():
    torch.manual_seed(2)
    told = dict(r=3, target_modules=["q_proj"], target_parameters=targets(made("FAMILY")), init_lora_weights=False)
    return get_peft_model(made("FAMILY", num_hidden_layers=1), LoraConfig(**told))

theirs, model = learned(adapted()), adapted()
fused(model)
if SHARED:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
loss, found = learned(model)
ours = loss, {name: full_tensor(gradient) for name, gradient in found.items()}
assert abs(ours[0] - theirs[0]) < 1e-4 * theirs[0]
assert ours[1].keys() == theirs[1].keys()
for name, gradient in theirs[1].items():
    assert (ours[1][name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6, name
print("agree")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shared"), [("qwen3_moe", False), ("gpt_oss", False), ("qwen3_moe", True)])
def test_the_kernels_themselves_train_adapters_of_experts(family, shared):
    """Also of layers whose weights FSDP2 lets go of after the forward pass and puts together again for the backward pass."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_INTERPRETER.replace("FAMILY", family).replace("SHARED", str(shared))],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "agree"), done.stderr[-2000:]


def experts_of_transformers():
    """Every class of experts that takes a registered function, built from its config's defaults, by model type."""
    found = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        names = re.findall(r"use_experts_implementation(?:\([^)]*\))?\s*\nclass (\w+)\(", path.read_text())
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}") if names else None
        for name in names:
            for config in [
                each for key, each in vars(module).items() if key.endswith("Config") and inspect.isclass(each)
            ]:
                try:
                    with torch.device("meta"):
                        found[config.model_type] = getattr(module, name)(config())
                    break
                except (AttributeError, TypeError):
                    continue
    return found


def test_the_model_types_that_are_not_served_are_those_that_check_refuses():
    every = experts_of_transformers()
    assert len(every) > 40
    refused = {kind: reason for kind, experts in every.items() if (reason := unserved(experts)) is not None}
    assert refused.keys() == UNSERVED.keys() & every.keys()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", MIXTURES)
def test_on_a_card_adapters_learn_alike_and_take_less_memory(family):
    """In bfloat16 at sizes where the adapters' product on all experts is what fills the memory."""
    wide = {"hidden_size": 256, "moe_intermediate_size": 512, "intermediate_size": 512, "num_hidden_layers": 2}
    ids = torch.randint(0, 60, (2, 128), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for kernels in (False, True):
        model = made(family, **wide)
        torch.manual_seed(2)
        told = {"r": 8, "target_modules": ["q_proj"], "target_parameters": targets(model), "init_lora_weights": False}
        model = get_peft_model(model, LoraConfig(**told)).to("cuda", torch.bfloat16)
        if kernels:
            assert apply.apply(ON, built_of(SimpleNamespace(model=model))).effective == "Triton"
        losses, optimizer = [], torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
        for _ in range(30):
            torch.cuda.reset_peak_memory_stats()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            peak = torch.cuda.max_memory_allocated()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append((losses, peak))
    (theirs, more), (ours, less) = found
    assert ours[-1] < ours[0]
    assert max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True)) < 5e-2
    assert less < more
