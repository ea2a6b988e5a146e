"""Adapters merged into packed bases in the bases' own formats: the nearest numbers of each grid, and what rounding did is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from engine.config.files import parse
from engine.errors import WorkbenchError
from engine.export import to_packed
from engine.export.__main__ import _config
from engine.export.merge import merge
from engine.export.places import forms_of
from engine.export.process import compared
from engine.export.stored import read_weight
from engine.rules import read
from engine.run.store import RunFolder
from tests.engine.export.test_experts import FAMILIES, exported, on_experts, quiet
from tests.engine.export.test_packed import packed_base
from tests.engine.features.families import stored_in_mxfp4
from tests.engine.models.test_stored_fp8 import stored as stored_in_fp8

Make = Callable[..., RunFolder]
DENSE = {"target_modules": ["o_proj", "down_proj"], "lora_alpha": 8}
KINDS: dict[str, tuple[str, dict[str, Any], float]] = {
    "gptq": ("gptq", {"ordered": True}, 0.2),
    "gptq-3": ("gptq", {"bits": 3}, 0.4),
    "gptq-v2-8": ("gptq", {"bits": 8, "form": "gptq_v2"}, 0.06),
    "awq": ("awq", {}, 0.2),
    "packed": ("packed", {"symmetric": False}, 0.2),
    "packed-3-whole": ("packed", {"bits": 3, "symmetric": False, "whole": True}, 0.4),
    "eights": ("eights", {"group": None}, 0.06),
    "eights-of-4": ("eights", {"group": None, "bits": 4}, 0.4),
    "mxfp4": ("floats", {"group": 32}, 0.2),
    "nvfp4": ("floats", {"group": 16}, 0.2),
    "modelopt": ("modelopt", {"group": 16}, 0.2),
}
"""By a name: how the base is packed, and how far rounding may be at the most, as a share of a weight's size."""


def in_16_bits(run: RunFolder, base: Path, into: Path) -> dict[str, torch.Tensor]:
    """The weights of the plain merge."""
    into.mkdir()
    merge(_config(run), base, run.checkpoints / "checkpoint-3", into, quiet)
    return {name: value for file in into.glob("*.safetensors") for name, value in load_file(file).items()}


def raw(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("form", KINDS)
def test_an_adapter_is_rounded_onto_the_grid_of_the_base(make_run: Make, tmp_path: Path, form: str) -> None:
    kind, told, most = KINDS[form]
    run = make_run("llama", adapter=DENSE, dtype=torch.bfloat16)
    told = {"group": 32, **told}
    packed_base(run, tmp_path, kind, **{name: value for name, value in told.items() if value is not None})
    base, out = tmp_path / "base", tmp_path / "out"
    parity = exported(run, out, "packed")["parity"]
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert {name: (value.dtype, value.shape) for name, value in after.items()} == {
        name: (value.dtype, value.shape) for name, value in before.items()
    }
    moved = {name for name in after if not torch.equal(raw(after[name]), raw(before[name]))}
    assert {name.rpartition(".")[2] for name in moved} <= {
        "qweight",
        "scales",
        "weight_packed",
        "weight",
        "weight_scale",
    }
    assert {name.split(".")[-2] for name in moved} == {"o_proj", "down_proj"}
    if form == "eights-of-4":
        assert all(
            -8 <= int(after[name].min()) <= int(after[name].max()) <= 7 for name in moved if name.endswith("weight")
        )
    assert json.loads((out / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    assert parity["weights"] == 4
    assert [each["kind"] for each in parity["requantized"]] == ["down_proj", "o_proj"]
    wide = in_16_bits(run, base, tmp_path / "wide")
    for each in parity["requantized"]:
        assert each["weights"] == 2
        assert 0 < each["error"] < most
        assert 0.7 < each["kept"] < 2
        assert 0.5 < each["cosine"] <= 1
        names = [name for name in wide if f".{each['kind']}." in name]
        off = [
            (read_weight(out, name).float() - wide[name].float()).norm() / wide[name].float().norm() for name in names
        ]
        assert float(torch.stack(off).mean()) == pytest.approx(each["error"], rel=0.1, abs=2e-3)
    assert 0 < parity["logits_error"] < 3 * parity["trained_effect"]
    assert "o_proj rounded by" in compared(parity)


def test_each_number_is_the_nearest_of_those_that_its_scale_can_say(make_run: Make, tmp_path: Path) -> None:
    run = make_run("llama", adapter=DENSE, dtype=torch.bfloat16)
    packed_base(run, tmp_path, "gptq", group=32)
    weights = to_packed.Weights(tmp_path / "base")
    name = "model.layers.1.mlp.down_proj.weight"
    torch.manual_seed(2)
    wanted = weights.read(name) + 0.05 * torch.randn(weights.read(name).shape)
    found = weights.read(name, weights.rounded(name, wanted))
    held = weights.rounded(name, wanted)
    steps = held[f"{name.removesuffix('.weight')}.scales"].float().T.repeat_interleave(32, 1)
    assert (
        (found - wanted).abs() <= steps * 0.5001
    ).float().mean() > 0.97  # what lies beyond the ends of a grid is cut off
    kept = load_file(tmp_path / "base/model.safetensors")[f"{name.removesuffix('.weight')}.scales"].float().T
    assert 0 < (steps[:, ::32] != kept).float().mean() < 1  # a wider scale where it is nearer
    again = weights.read(name, weights.rounded(name, found))
    assert torch.equal(again, found)


@pytest.mark.parametrize("scale", [pytest.param("_scale_inv", marks=pytest.mark.slow), "_scale"])
def test_weights_and_experts_in_fp8_stay_in_it(make_run: Make, tmp_path: Path, scale: str) -> None:
    shape = {**FAMILIES["qwen3_moe"], "dtype": torch.bfloat16}
    adapter = on_experts("qwen3_moe", target_modules=["o_proj"])
    run, base = make_run("qwen3_moe", adapter=adapter, sharded="60KB", **shape), tmp_path / "base"
    for file in base.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if ".experts." in name or name.endswith("_proj.weight")]:
            tensors[name], tensors[f"{name}{scale}"], _ = stored_in_fp8(tensors[name].float(), (24, 16))
        save_file(tensors, file, {"format": "pt"})
    index = json.loads((base / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file.name for file in base.glob("*.safetensors") for name in load_file(file)}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    told = json.loads((base / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [24, 16]}
    (base / "config.json").write_text(json.dumps(told))
    run.config.write_text(run.config.read_text().replace("dtype: float32", "dtype: bfloat16"))
    parity = exported(run, tmp_path / "out", "packed")["parity"]
    kinds = {each["kind"]: each for each in parity["requantized"]}
    assert kinds.keys() == {"experts.gate_proj", "experts.up_proj", "experts.down_proj", "o_proj"}
    assert all(each["error"] < 0.03 and each["cosine"] > 0.9 for each in kinds.values())
    assert parity["weights"] == 2 * (1 + 4 * 3)
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"] == told["quantization_config"]
    ours = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert ours["weight_map"] == index["weight_map"]
    every = [value.nbytes for file in (tmp_path / "out").glob("*.safetensors") for value in load_file(file).values()]
    assert ours["metadata"]["total_size"] == sum(every)


def test_one_scale_for_all_experts_is_refused_before_anything_is_written(make_run: Make, tmp_path: Path) -> None:
    shape = {**FAMILIES["gpt_oss"], "dtype": torch.bfloat16}
    run, base, out = make_run("gpt_oss", adapter=on_experts("gpt_oss"), **shape), tmp_path / "base", tmp_path / "out"
    (file,) = base.glob("*.safetensors")
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("experts.down_proj")]:
        tensors[name], tensors[f"{name}_scale"] = tensors[name].to(torch.float8_e4m3fn), torch.ones(1)
    save_file(tensors, file, {"format": "pt"})
    told = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**told, "quantization_config": {"quant_method": "fp8"}}))
    out.mkdir()
    with pytest.raises(WorkbenchError, match="down_proj has one scale for all experts"):
        to_packed.write(_config(run), base, run.checkpoints / "checkpoint-3", out, quiet)
    assert not list(out.iterdir())


def test_a_file_is_opened_once_not_for_each_of_its_entries(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens it parses its header, which takes 22 ms where it has 18,432 entries."""
    run = make_run("llama", adapter=DENSE, dtype=torch.bfloat16)
    packed_base(run, tmp_path, "gptq", group=32)
    weights, opened = to_packed.Weights(tmp_path / "base"), []
    plain = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda *args: opened.append(args) or plain(*args))
    monkeypatch.setattr(to_packed, "safe_open", safetensors.safe_open)
    for key in weights.every:
        weights.raw(key)
    assert len(opened) == 1
    before = {key: value.clone() for key, value in load_file(tmp_path / "base/model.safetensors").items()}
    weights.close()
    assert all(torch.equal(raw(weights.raw(key)), raw(value)) for key, value in before.items())


def test_experts_in_mxfp4_stay_in_it(make_run: Make, tmp_path: Path) -> None:
    shape = {**FAMILIES["gpt_oss"], "dtype": torch.bfloat16}
    run, base = make_run("gpt_oss", adapter=on_experts("gpt_oss"), **shape), tmp_path / "base"
    stored_in_mxfp4(base)
    run.config.write_text(run.config.read_text().replace("dtype: float32", "dtype: bfloat16"))
    parity = exported(run, tmp_path / "out", "packed")["parity"]
    kinds = {each["kind"]: each for each in parity["requantized"]}
    assert kinds.keys() == {"experts.gate_up_proj", "experts.down_proj"}
    assert all(0.01 < each["error"] < 0.15 and each["cosine"] > 0.5 for each in kinds.values())
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert before.keys() == after.keys()
    moved = {name.partition("layers.")[2][2:] for name in after if not torch.equal(after[name], before[name])}
    experts = {f"mlp.experts.{each}_blocks" for each in ("gate_up_proj", "down_proj")}
    assert {name for name in moved if not name.endswith("scales")} == {
        *experts,
        "self_attn.o_proj.weight",
    }  # attention's output in 16 bits beside them
    wide = in_16_bits(run, base, tmp_path / "wide")
    for name in [name for name in wide if name.endswith("gate_up_proj")]:
        off = (read_weight(tmp_path / "out", name).float() - wide[name].float()).norm() / wide[name].float().norm()
        assert float(off) == pytest.approx(kinds["experts.gate_up_proj"]["error"], rel=0.2)


def test_without_a_change_the_files_stay_as_they_are(make_run: Make, tmp_path: Path) -> None:
    """An adapter that adds nothing: the nearest numbers are those that were there, also beside rounding of 16 bits."""
    run = make_run("llama", adapter=DENSE, dtype=torch.bfloat16)
    packed_base(run, tmp_path, "floats", group=16)
    file = run.checkpoints / "checkpoint-3/adapter_model.safetensors"
    save_file({name: value * ("lora_A" in name) for name, value in load_file(file).items()}, file, {"format": "pt"})
    weights = to_packed.Weights(tmp_path / "base")
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_bytes((tmp_path / "base/config.json").read_bytes())
    written = to_packed.write(_config(run), tmp_path / "base", file.parent, out, quiet)
    assert {(each.error, each.kept, each.cosine) for each in written.kinds.values()} == {(0.0, 1.0, 1.0)}
    ours = to_packed.Weights(out)
    assert len(written.digests) == 4
    assert all(torch.equal(ours.read(name), weights.read(name)) for name in written.digests)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"base": None}, "held in plain numbers"),
        ({"base": {"quant_method": "hqq"}}, "held in hqq"),
        ({"quantization": "nf4"}, "training held this base in nf4"),
    ],
)
def test_what_is_not_rounded_is_refused_by_name(
    make_run: Make, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    run, base = make_run("llama", adapter=DENSE, dtype=torch.bfloat16), tmp_path / "base"
    packed_base(run, tmp_path, "gptq", group=32)
    told = json.loads((base / "config.json").read_text())
    if "base" in change:
        told.pop("quantization_config")
        told |= {"quantization_config": change["base"]} if change["base"] else {}
    (base / "config.json").write_text(json.dumps(told))
    text = run.config.read_text().replace("quantization: none", f"quantization: {change.get('quantization', 'none')}")
    config = read(parse(text).mapping).config
    with pytest.raises(WorkbenchError, match=sentence):
        to_packed.refuse_unserved(config, base)
    assert ("packed" in forms_of(run)) == ("quantization" in change)


@pytest.mark.parametrize(
    "form", ["nf4-once", "int8", *(pytest.param(each, marks=pytest.mark.slow) for each in ("nf4", "fp4"))]
)
def test_a_base_in_bitsandbytes_own_files_stays_in_them(make_run: Make, tmp_path: Path, form: str) -> None:
    """Opened again by transformers with bitsandbytes, whose numbers are what the files are read as here."""
    kind, _, once = form.partition("-")
    run, base, out = make_run("llama", adapter=DENSE, dtype=torch.bfloat16), tmp_path / "base", tmp_path / "out"
    settings = transformers.BitsAndBytesConfig(
        load_in_8bit=kind == "int8", load_in_4bit=kind != "int8", bnb_4bit_quant_type=kind if kind != "int8" else "nf4",
        bnb_4bit_use_double_quant=not once, bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    loader = transformers.AutoModelForCausalLM
    loader.from_pretrained(base, quantization_config=settings, dtype=torch.bfloat16).save_pretrained(base)
    run.config.write_text(run.config.read_text().replace("dtype: float32", "dtype: bfloat16"))
    assert "packed" in forms_of(run)
    parity = exported(run, out, "packed")["parity"]
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    moved = {name for name in after if not torch.equal(raw(after[name]), raw(before[name]))}
    assert {name.split("_proj")[0].rpartition(".")[2] for name in moved} == {"o", "down"}
    assert all(name.endswith((".weight", "absmax", "SCB")) for name in moved)
    kinds = {each["kind"]: each for each in parity["requantized"]}
    assert kinds.keys() == {"o_proj", "down_proj"}
    least, most = (0.0, 0.02) if kind == "int8" else (0.03, 0.2)
    assert all(
        least < each["error"] < most and 0.7 < each["kept"] < 2 and each["cosine"] > 0.5 for each in kinds.values()
    )
    assert 0 < parity["logits_error"] < 3 * parity["trained_effect"]
    wide = in_16_bits(run, base, tmp_path / "wide")
    opened = loader.from_pretrained(out, dtype=torch.bfloat16).dequantize()
    for name in (
        f"model.layers.{layer}.{end}.weight" for layer in (0, 1) for end in ("self_attn.o_proj", "mlp.down_proj")
    ):
        theirs = opened.get_parameter(name).float()
        assert (read_weight(out, name).float() - theirs).abs().max() <= theirs.abs().max() * 2**-8
        apart = (theirs - wide[name].float()).norm() / wide[name].float().norm()
        assert float(apart) == pytest.approx(kinds[name.split(".")[-2]]["error"], rel=0.2, abs=2e-3)
    weights = to_packed.Weights(out)
    again = {key: value for key, value in weights.rounded(name, weights.read(name)).items()}
    assert torch.equal(weights.read(name, again), weights.read(name))  # what the grid says stays


def test_the_command_tells_each_kind(make_run: Make, tmp_path: Path) -> None:
    from workbench.cli import merge as command

    run = make_run("llama", adapter=DENSE, dtype=torch.bfloat16)
    packed_base(run, tmp_path, "packed", group=32)
    asked = [run.id, "--packed", "--runs", str(run.path.parent), "-o", str(tmp_path / "made"), "--json"]
    result = CliRunner().invoke(command.command, asked)
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    assert [each["kind"] for each in said["parity"]["requantized"]] == ["down_proj", "o_proj"]
    assert (tmp_path / "made/parity.json").is_file()
    assert "| rounding o_proj |" in (tmp_path / "made/README.md").read_text()
