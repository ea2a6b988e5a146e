"""Packed experts: read one at a time, computed as their unpacked numbers are, adapted by keys that plain PEFT loads."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, GptOssForCausalLM, Mxfp4Config

from engine.builtin import tiny
from engine.chat.models import load_sides
from engine.config.adapter import NoAdapter
from engine.config.facts import Facts
from engine.errors import ModelError
from engine.facts.model_shape import model_facts
from engine.features.built import Built
from engine.features.load import load_model
from engine.features.packed_experts import EXPERTS_ALONE
from engine.features.packed_experts.apply import prepare
from engine.hardware import parse_machine
from engine.kernels.experts.packed import PackedExperts, Packer
from engine.models.adapters import add_adapter
from engine.models.packed_experts import packed_experts
from engine.models.sizes import bytes_of
from engine.planning.auto import resolved
from engine.planning.memory_model import QUANTIZED, memory
from engine.rules import read
from engine.trainers.finite import refuse_non_finite
from tests.engine.features.families import batches, made, stored_in_mxfp4
from tests.engine.rules.rule_cases.model import MIXTURE
from tests.engine.trainers.conftest import CONVERSATIONS, lines, resumed_from, source, train  # noqa: F401

pytest.importorskip("bitsandbytes", reason="weights of 4 and 8 bits are bitsandbytes'")
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of tiny mixtures with the built-in model's tokenizer: Qwen3-MoE's files hold each expert by itself,
    gpt-oss's all of a layer in one weight, as it holds them."""
    found, tokenizer = {}, AutoTokenizer.from_pretrained(tiny.folder())
    for family in ("qwen3_moe", "gpt_oss", "qwen3_vl_moe"):
        found[family] = tmp_path_factory.mktemp(family)
        made(family, vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(found[family])
        tokenizer.save_pretrained(found[family])
    return found


class Largest(TorchDispatchMode):
    """The largest wide tensor that any operation makes, in numbers; views are none, such as those of a mapped file."""

    wide = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func.is_view:
            return found
        for each in found if isinstance(found, (tuple, list)) else (found,):
            wide = isinstance(each, torch.Tensor) and each.is_floating_point() and each.device.type != "meta"
            if wide and not isinstance(each, PackedExperts):
                self.wide = max(self.wide, each.numel())
        return found


def settings(folder, kind="nf4", **more):
    model = {"name": str(folder), "dtype": "float32", "quantization": kind, **more}
    adapter = {"kind": "lora", "r": 3, "target_modules": ["q_proj"], "target_parameters": TARGETS}
    return resolved(read({"model": model, "adapter": adapter}).config)


def adapted(config, seed=2):
    """The model of a config with its adapter, both factors random, and what packed experts report."""
    model = add_adapter(load_model(config), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.2 * torch.randn_like(weight))
    return model, prepare(config, Built(model))


def unpacked(model):
    """The same model with plain weights of the numbers that the packed ones stand for, computed by transformers and PEFT."""
    for owner in list(model.modules()):
        for name, weight in list(owner.named_parameters(recurse=False)):
            if isinstance(weight, PackedExperts):
                setattr(owner, name, torch.nn.Parameter(weight.all_unpacked(), requires_grad=False))
    model.set_experts_implementation("eager")
    return model


def learned(model):
    model.train().zero_grad()
    ids = batches(1, 3, 11)[0]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}


def same(ours, theirs, tolerance=1e-5):
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert ours[1].keys() == theirs[1].keys()
    assert any("experts" in name for name in theirs[1])
    for name, gradient in theirs[1].items():
        assert (ours[1][name] - gradient).norm() <= tolerance * gradient.norm() + 1e-8, name


KINDS = {"gpt_oss": ("nf4", "fp4", "int8", "mxfp4", "nvfp4"), "qwen3_moe": ("nf4", "mxfp4")}
"""Every time: each kind with one family, one of bitsandbytes' and one of ours with the other; all in `make test-all`."""


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=() if kind in KINDS.get(family, ()) else pytest.mark.slow)
        for family in ("qwen3_moe", "gpt_oss", "qwen3_vl_moe")
        for kind in KINDS["gpt_oss"]
    ],
)
def test_loss_and_gradients_are_those_of_the_unpacked_numbers(folders, family, kind):
    config = settings(folders[family], kind)
    model, told = adapted(config)
    held = dict(packed_experts(model))
    assert told.count == 2 * 4
    assert len(held) == 4
    assert told.effective == kind
    ours = learned(model)
    told.undo()
    same(ours, learned(unpacked(model)))
    plain, loaded = load_model(settings(folders[family], "none")), load_model(config)
    assert [name for name, _ in loaded.named_parameters()] == [name for name, _ in plain.named_parameters()]
    # Beside MXFP4 and NVFP4 the other layers are plain, and so is the model to transformers, PEFT and TRL.
    linears = {type(module).__name__ for module in loaded.modules()} & {"Linear4bit", "Linear8bitLt"}
    assert bool(linears) is (kind not in EXPERTS_ALONE)
    assert hasattr(loaded, "hf_quantizer") is (kind not in EXPERTS_ALONE)


def test_an_expert_at_a_time_is_read_and_packed(tmp_path, monkeypatch):
    """Whether files hold experts apart or in one weight: what is read before the one before it is packed is one expert."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder())
    # One expert has as many numbers as the embeddings, the largest weight beside them.
    shape = {"num_experts": 16, "num_local_experts": 16, "hidden_size": 64, "vocab_size": len(tokenizer)}
    shape |= {"intermediate_size": 256, "moe_intermediate_size": 256, "max_position_embeddings": 512}
    for family, kind in (("qwen3_moe", "nf4"), ("gpt_oss", "nf4"), ("qwen3_moe", "mxfp4"), ("gpt_oss", "mxfp4")):
        folder = tmp_path / family
        made(family, **shape).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        given, add = [], Packer.add
        with monkeypatch.context() as patched, Largest() as largest:
            patched.setattr(Packer, "add", lambda self, expert: (given.append(tuple(expert.shape)), add(self, expert)))
            model = load_model(settings(folder, kind, dtype="bfloat16"))  # files hold float32
        packed = dict(packed_experts(model))
        assert sorted(given) == sorted(tuple(each) for weight in packed.values() for each in [weight.shape[1:]] * 16)
        assert largest.wide == 64 * len(tokenizer) == max(weight[0].numel() for weight in packed.values())
        assert sum(weight.packed_bytes for weight in packed.values()) < 0.54 * sum(w.numel() for w in packed.values())


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder of a tiny gpt-oss as it is published, and what its experts stand for."""
    folder, tokenizer = tmp_path_factory.mktemp("stored"), AutoTokenizer.from_pretrained(tiny.folder())
    shape = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": len(tokenizer), "num_local_experts": 16}
    made("gpt_oss", max_position_embeddings=512, **shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, stored_in_mxfp4(folder)


def test_what_files_hold_in_mxfp4_stays_as_it_is_under_an_adapter(stored):
    folder, wide = stored
    with Largest() as largest:
        model = load_model(settings(folder, "none", dtype="bfloat16"))
    packed = dict(packed_experts(model))
    assert packed.keys() == wide.keys()
    # The embeddings, and nothing of the experts, of which a layer has 96 times 192 times 16.
    assert largest.wide == model.config.vocab_size * 64 < 64 * 96 * 16
    assert not hasattr(model, "hf_quantizer")
    assert not hasattr(model.config, "quantization_config")
    files = load_file(folder / "model.safetensors")
    for name, weight in packed.items():
        assert torch.equal(weight.held.numbers.flatten(), files[f"{name}_blocks"].flatten())
        assert torch.equal(weight.all_unpacked().float(), wide[name])
    model, told = adapted(settings(folder, "none"))
    assert (told.effective, told.count) == ("mxfp4", 2 * 16)
    ours = learned(model)
    told.undo()
    same(ours, learned(unpacked(model)))
    # transformers' own reading of the same files.
    theirs = GptOssForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype="float32"
    )
    for name, weight in wide.items():
        assert torch.equal(theirs.get_parameter(name), weight)
    for asked in ({"quantize_moe_experts": False}, None):
        config = settings(folder, "none", **(asked or {}))
        if asked is None:
            config = config.model_copy(update={"adapter": NoAdapter()})
        loaded = load_model(config)
        assert not list(packed_experts(loaded))
        for name, weight in wide.items():
            assert torch.equal(loaded.get_parameter(name), weight)
            assert loaded.get_parameter(name).requires_grad


def test_a_gpt_oss_as_it_is_published_trains_and_goes_on_bit_for_bit(stored, train, source, tmp_path):  # noqa: F811
    asked = {
        "model.name": str(stored[0]), "model.dtype": "bfloat16", "adapter.kind": "lora", "adapter.r": 3,
        "adapter.target_modules": ["q_proj"], "adapter.target_parameters": TARGETS, "optim.learning_rate": 1e-2,
        "optim.max_steps": 4, "run.save_steps": 2, "data.train": [{"path": source(CONVERSATIONS)}],
    }  # fmt: skip
    run = train(asked)
    losses = [event["loss"] for event in lines(run, "metrics")]
    assert losses[-1] < losses[0]
    told = {entry["feature"]: entry for entry in lines(run, "receipt")[0]["entries"]}
    stays = told["stored weights"]
    assert (stays["requested"], stays["effective"], stays["count"]) == ("mxfp4", "mxfp4", 4)
    assert (told["packed experts"]["effective"], told["packed experts"]["count"]) == ("mxfp4", 2 * 16)
    assert "quantization" not in told
    numbers = 2 * 16 * 3 * 64 * 96
    assert f"{numbers:,} in mxfp4" in told["precision"]["detail"]
    copy = resumed_from(run, 2, tmp_path / "copy")
    train(folder=copy)
    ends = [load_file(each.checkpoints / "checkpoint-4/adapter_model.safetensors") for each in (run, copy)]
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())
    (side,) = load_sides([{"title": "", "run": str(run.path), "checkpoint": 4}], lambda phase: None)
    assert dict(packed_experts(side.model))


def test_files_in_mxfp4_that_do_not_fit_are_refused_in_a_sentence(stored, tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    for change, sentence in (
        (lambda files: files.pop(f"{name}_scales"), rf"its files hold no {name}_scales\."),
        (lambda files: files.update({f"{name}_scales": files[f"{name}_scales"][:, 1:]}), r"bytes \[E, rows, blocks, 16\]"),
        (
            lambda files: files.update({f"{name}_{end}": files[f"{name}_{end}"][:, 1:] for end in ("blocks", "scales")}),
            rf"{name} in MXFP4 has the shape 16 x 96 x 63, and 16 x 96 x 64 is wanted",
        ),
    ):  # fmt: skip
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(stored[0], folder)
        files = load_file(folder / "model.safetensors")
        change(files)
        save_file(
            {key: value.contiguous() for key, value in files.items()}, folder / "model.safetensors", {"format": "pt"}
        )
        with pytest.raises(ModelError, match=sentence):
            load_model(settings(folder, "none"))
    with pytest.raises(ModelError, match=r"none for .*, whose experts are stored in MXFP4; got nf4"):
        load_model(settings(stored[0], "nf4"))


def test_a_run_goes_on_bit_for_bit_and_its_adapter_is_plain_pefts(folders, train, source, tmp_path):  # noqa: F811
    asked = {
        "model.name": str(folders["qwen3_moe"]), "model.quantization": "nf4", "model.dtype": "float32",
        "adapter.kind": "lora", "adapter.r": 3, "adapter.target_modules": ["q_proj"],
        "adapter.target_parameters": TARGETS, "optim.learning_rate": 1e-2, "optim.max_steps": 6, "run.save_steps": 3,
        "memory.gradient_checkpointing": True, "data.train": [{"path": source(CONVERSATIONS)}],
    }  # fmt: skip
    run = train(asked)
    losses = [event["loss"] for event in lines(run, "metrics")]
    assert losses[-1] < losses[0]
    told = {entry["feature"]: entry for entry in lines(run, "receipt")[0]["entries"]}
    assert (told["packed experts"]["effective"], told["packed experts"]["count"]) == ("nf4", 8)
    assert re.fullmatch(
        r"experts in 2 layers, 10\.\d KiB instead of 48\.0 KiB; one unpacked at a time, in each pass anew; "
        "2 layers with adapters beside them",
        told["packed experts"]["detail"],
    )
    assert f"{2 * 4 * 3 * 32 * 16 + 2 * (2 * 32 * 32 + 2 * 32 * 16):,} in nf4" in told["precision"]["detail"]

    copy = resumed_from(run, 3, tmp_path / "copy")
    train(folder=copy)
    ends = [load_file(each.checkpoints / "checkpoint-6/adapter_model.safetensors") for each in (run, copy)]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())

    # The same keys and shapes as on plain weights, and plain PEFT gives the logits that our pass gives.
    plain = train({**asked, "model.quantization": "none", "optim.max_steps": 3})
    wide = load_file(plain.checkpoints / "checkpoint-3/adapter_model.safetensors")
    assert {name: weight.shape for name, weight in wide.items()} == {name: w.shape for name, w in ends[0].items()}
    saved = run.checkpoints / "checkpoint-6"
    base = unpacked(load_model(settings(folders["qwen3_moe"])))
    model, _ = adapted(settings(folders["qwen3_moe"]))
    found = model.load_state_dict(
        {name.replace(".weight", ".default.weight"): weight for name, weight in ends[0].items()}, strict=False
    )
    assert not found.unexpected_keys
    ids = batches(1, 2, 9)[0]
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(base, saved).eval()(input_ids=ids).logits
        torch.testing.assert_close(model.eval()(input_ids=ids).logits, theirs, rtol=1e-5, atol=1e-5)

    # A chat loads base and checkpoint, and answers by the same pass.
    asked = [{"title": "", "run": str(run.path), "checkpoint": step} for step in (6, None)]
    mine, its_base = load_sides(asked, lambda phase: None)
    logits = {}
    for side in (mine, its_base):
        with side.active() as answering, torch.no_grad():
            logits[side.title, side.adapter] = answering(input_ids=ids).logits
            packed = [each for _, each in packed_experts(side.model)]
    torch.testing.assert_close(logits["", mine.adapter], theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits["", None], unpacked(its_base.model)(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    assert sum(bytes_of(weight)[1] for weight in packed) < 0.25 * 4 * sum(weight.numel() for weight in packed)


def test_experts_stay_wide_where_that_is_asked_for(folders):
    for told in ({"quantize_moe_experts": False}, {}):
        model = load_model(settings(folders["qwen3_moe"], **told))
        kinds = {type(module).__name__ for module in model.modules()}
        assert "Linear4bit" in kinds
        wide = bool(told)
        assert bool(list(packed_experts(model))) is not wide
        assert (prepare(settings(folders["qwen3_moe"], **told), Built(model)) is None) is wide


def test_what_is_not_served_is_refused_in_words(folders, tmp_path, monkeypatch):
    experts = type(next(m for m in made("qwen3_moe").modules() if hasattr(m, "_apply_gate")))
    with monkeypatch.context() as patched:
        patched.setattr(experts, "_apply_gate", lambda self, both: both.chunk(2, -1)[0].sin())
        with pytest.raises(ModelError, match="experts of Qwen3MoeExperts stay in 16 bits: its activation") as refused:
            load_model(settings(folders["qwen3_moe"]))
        assert refused.value.mends == ({"model.quantize_moe_experts": False},)
    holed = made("qwen3_moe", vocab_size=512, max_position_embeddings=512)
    with torch.no_grad():
        holed.model.layers[1].mlp.experts.down_proj[2, 0, 0] = torch.nan
    holed.save_pretrained(tmp_path)
    model = load_model(settings(tmp_path))
    with pytest.raises(ModelError, match=r"not finite .*layers\.1\.mlp\.experts\.down_proj"):
        refuse_non_finite(model, "m")
    first = next(iter(dict(packed_experts(model)).values()))
    with pytest.raises(RuntimeError, match="cannot be written to"):
        first.data += 1
    config = settings(folders["qwen3_moe"])
    lora = config.adapter.model_copy(update={"target_parameters": ["mlp.experts.gate_proj"]})
    with pytest.raises(ModelError, match=r"no weight 'mlp\.experts\.gate_proj'") as lost:
        add_adapter(model, config.model_copy(update={"adapter": lora}))
    assert "experts.gate_up_proj" in lost.value.hint
    for name in ("experts", "layers.1.mlp"):
        whole = config.adapter.model_copy(update={"modules_to_save": [name]})
        with pytest.raises(ModelError, match=r"modules_to_save: .* has experts that are held in few bits"):
            add_adapter(model, config.model_copy(update={"adapter": whole}))


def test_what_the_estimate_says_of_experts():
    """Qwen3-30B-A3B: its experts are 54 of 57 GiB, and packed a quarter of that; unpacked ones have their room."""
    machine = parse_machine("1xH100-80GB")
    told = {"model": {"name": "Qwen/Qwen3-30B-A3B", "quantization": "nf4"}, "adapter": {"kind": "lora"}}
    found = {}
    for experts in (True, False):
        told["model"]["quantize_moe_experts"] = experts
        found[experts] = memory(read(told).config, replace(MIXTURE, machine=machine), "full")
    numbers = 48 * 128 * 3 * 2048 * 768
    saved = found[False]["weights"] - found[True]["weights"]
    assert saved == pytest.approx(numbers * (2 - QUANTIZED["nf4"]), rel=1e-6)
    assert found[True]["activations"] - found[False]["activations"] == 256 * 2**20


def test_what_the_estimate_says_of_experts_in_mxfp4(tmp_path):
    """gpt-oss-20b from its config.json alone: 12.8 GiB as published, and 39 widened."""
    told = {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "vocab_size": 201_088,
        "tie_word_embeddings": False, "attention_bias": True,
    }  # fmt: skip
    weights, numbers = {}, 24 * 32 * 3 * 2880**2
    for stored in ("mxfp4", ""):
        (tmp_path / "config.json").write_text(
            json.dumps({**told, **({"quantization_config": {"quant_method": "mxfp4"}} if stored else {})})
        )
        facts = Facts(model=model_facts(str(tmp_path)), machine=parse_machine("1xH100-80GB"))
        for asked in ({}, {"quantization": "mxfp4"}, {"quantize_moe_experts": False}):
            config = read({"model": {"name": str(tmp_path), **asked}, "adapter": {"kind": "lora"}}).config
            weights[stored, *asked] = memory(resolved(config, facts), facts, "full")["weights"]
    wide = 2 * facts.model.parameters
    assert facts.model.parameters == 20_914_757_184
    packed = wide - numbers * (2 - 4.25 / 8)
    assert {key: value for key, value in weights.items() if value == pytest.approx(wide, rel=1e-6)}.keys() == {
        ("mxfp4", "quantize_moe_experts"), ("", "quantize_moe_experts"), ("",),
    }  # fmt: skip
    assert [value for value in weights.values() if value == pytest.approx(packed, rel=1e-6)] == [packed] * 3
    assert packed / 2**30 == pytest.approx(12.8, abs=0.05)


def test_processes_do_not_send_each_other_packed_experts(folders):
    model, _ = adapted(settings(folders["qwen3_moe"]))
    names = {name for name, _ in packed_experts(model)}
    assert set(model._ddp_params_and_buffers_to_ignore) == names
