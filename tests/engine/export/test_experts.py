"""Adapters on experts that are one weight leave the house: merged into every stored form, and as one adapter an expert."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.errors import UsageError, WorkbenchError
from engine.export.__main__ import _config
from engine.export.folder import Model
from engine.export.making import make
from engine.export.merge import merge
from engine.export.parity import ParityError
from engine.export.per_expert import PerExpert
from engine.export.places import source
from engine.export.process import compared
from engine.kernels.experts import ExpertLoRA
from engine.run.store import RunFolder
from tests.engine.export.conftest import run_that_sees
from tests.engine.features.families import made, stored_in_mxfp4
from tests.engine.models.test_stored_fp8 import stored as stored_in_fp8
from tests.engine.seeing import qwen2_5_vl
from workbench.cli import export, push

Make = Callable[..., RunFolder]
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**FEW, "head_dim": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rope_parameters": PLAIN},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4,
    },
    "qwen3_5_moe": {
        **FEW, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 16,
    },
}  # fmt: skip
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def on_experts(family: str, **more: Any) -> dict[str, Any]:
    attention = "kv_b_proj" if family == "deepseek_v3" else "o_proj"
    return {"target_modules": [attention], "target_parameters": EXPERTS, "lora_alpha": 6, **more}


def exported(run: RunFolder, into: Path, form: str = "safetensors", **asked: Any) -> dict[str, Any]:
    return make(Model(source(run), _config(run)), form, into, asked, quiet)


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[pytest.mark.slow] if each in ("olmoe", "mixtral") else []) for each in FAMILIES],
)
def test_experts_leave_the_house(make_run: Make, tmp_path: Path, family: str) -> None:
    """Merged they are what PEFT merges, in the base's own layout; one by one, W + alpha / r * B A gives the same."""
    stabilised = family in ("olmoe", "gpt_oss")
    run = make_run(family, adapter=on_experts(family, use_rslora=stabilised), sharded="40KB", **FAMILIES[family])
    model = Model(source(run), _config(run))
    merged = make(model, "safetensors", tmp_path / "out", {}, quiet)["parity"]
    cut = make(model, "adapter", tmp_path / "cut", {"per_expert": True}, quiet)["parity"]
    layers = 1 if family == "deepseek_v3" else 2
    assert max(merged["logits_error"], cut["logits_error"]) < 1e-5
    assert merged["trained_effect"] > 0.01
    assert cut["reader"] == "plain torch, expert by expert"
    assert cut["weights"] == 4 * 3 * layers

    base, out = tmp_path / "base", tmp_path / "out"
    before, after = everything(base), everything(out)
    assert [(name, value.shape) for name, value in before.items()] == [
        (name, value.shape) for name, value in after.items()
    ]
    ours = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    untouched = {name: value.clone() for name, value in plain.state_dict().items()}
    theirs = PeftModel.from_pretrained(plain, str(run.checkpoints / "checkpoint-3")).merge_and_unload().state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-6, msg=name)
    moved = [name for name, value in ours.items() if ".experts." in name and not torch.equal(value, untouched[name])]
    assert len(moved) == 2 * layers

    settings = json.loads((tmp_path / "cut/adapter_config.json").read_text())
    assert not settings["target_parameters"]
    assert not settings["use_rslora"]
    card = (tmp_path / "cut/README.md").read_text()
    assert "one for each expert" in card
    assert ("the base's files hold the experts as one weight" in card) == (family == "gpt_oss")
    if family == "gpt_oss":
        before, after = apart(before), apart(after)
    adapter = load_file(tmp_path / "cut/adapter_model.safetensors")
    stems = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in adapter}
    assert len(stems) == 4 * 3 * layers + len(
        [key for key in adapter if "_proj.lora_A" in key and ".experts." not in key]
    )
    for stem in stems:
        a, b = (adapter[f"base_model.model.{stem}.lora_{each}.weight"] for each in "AB")
        assert a.shape[0] == b.shape[1] == 4
        added = settings["lora_alpha"] / settings["r"] * b @ a
        torch.testing.assert_close(
            before[f"{stem}.weight"] + added, after[f"{stem}.weight"], rtol=1e-5, atol=1e-6, msg=stem
        )


def quiet(what: str, done: int, total: int) -> None:
    pass


def everything(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a model folder, file by file."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def apart(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """gpt-oss's experts [E, in, out] one by one: gate, up, gate, up."""
    found = dict(weights)
    for name, value in weights.items():
        owner, _, leaf = name.rpartition(".")
        for expert in range(4):
            if leaf == "gate_up_proj":
                found[f"{owner}.{expert}.gate_proj.weight"] = value[expert].T[0::2]
                found[f"{owner}.{expert}.up_proj.weight"] = value[expert].T[1::2]
            elif leaf == "down_proj":
                found[f"{owner}.{expert}.down_proj.weight"] = value[expert].T
    return found


def test_a_mixture_in_16_bits_is_held_against_the_weights_rounded_alike(make_run: Make, tmp_path: Path) -> None:
    """Rounding may send tokens of this one to other experts: its logits alone would not tell it from a wrong model."""
    shape = {**FAMILIES["gpt_oss"], "dtype": torch.bfloat16}
    parity = exported(make_run("gpt_oss", adapter=on_experts("gpt_oss"), **shape), tmp_path / "out")["parity"]
    assert parity["logits_error"] < 1e-5
    # 0.07 where a token changes its expert, 0.005 on a processor whose sums send it to the same.
    assert parity["rounding_effect"] > 1e-3
    assert "rounded alike, rounding moved them by" in compared(parity)


@pytest.mark.parametrize(
    ("family", "kind", "adapter"),
    [
        ("qwen3_moe", "nf4", "experts"),
        ("mixtral", "int8", "attention"),
        ("gpt_oss", "mxfp4", "experts"),
        ("gpt_oss", "nvfp4", "attention"),
        *(
            pytest.param(family, kind, adapter, marks=pytest.mark.slow)
            for family, kind, adapter in (
                ("qwen3_moe", "nf4", "attention"),
                ("mixtral", "int8", "experts"),
                ("gpt_oss", "mxfp4", "attention"),
                ("gpt_oss", "nvfp4", "experts"),
                *itertools.product(("gpt_oss",), ("nf4",), ("experts", "attention")),
                *itertools.product(("qwen3_moe",), ("mxfp4",), ("experts", "attention")),
            )
        ),
    ],
)
def test_packed_experts_are_merged_as_training_saw_them(
    make_run: Make, tmp_path: Path, family: str, kind: str, adapter: str
) -> None:
    """Also those that no adapter is on: the adapter beside them learned with what few bits held of them."""
    shape = {
        **FAMILIES[family],
        **({"intermediate_size": 64} if "moe_intermediate_size" not in FAMILIES[family] else {}),
    }
    settings = on_experts(family) if adapter == "experts" else {"target_modules": ["o_proj"]}
    run = make_run(family, adapter=settings, quantization=kind, **shape)
    part = exported(run, tmp_path / "out")
    assert part["parity"]["logits_error"] < 1e-3
    held, base = everything(tmp_path / "out"), everything(tmp_path / "base")
    experts = [name for name in base if ".experts." in name and base[name].ndim > 1 and "bias" not in name]
    assert experts
    assert not any(torch.equal(held[name], base[name]) for name in experts)


def test_experts_in_mxfp4_leave_the_house_in_bfloat16(make_run: Make, tmp_path: Path) -> None:
    """Of a gpt-oss as it is published, its bytes in one file and their scales in another; the adapter is on bfloat16."""
    shape = {**FAMILIES["gpt_oss"], "dtype": torch.bfloat16}
    run, base = make_run("gpt_oss", adapter=on_experts("gpt_oss"), **shape), tmp_path / "base"
    wide = stored_in_mxfp4(base)
    weights = load_file(base / "model.safetensors")
    files = {name: f"model-0000{1 + name.endswith('_scales')}-of-00002.safetensors" for name in weights}
    for file in set(files.values()):
        save_file({name: weights[name] for name in weights if files[name] == file}, base / file, {"format": "pt"})
    (base / "model.safetensors").unlink()
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))

    merged = exported(run, tmp_path / "out")["parity"]
    assert merged["logits_error"] < 1e-5
    assert merged["trained_effect"] > 0.01
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    held = everything(tmp_path / "out")
    assert not [name for name in held if name.endswith(("_blocks", "_scales"))]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert theirs.state_dict().keys() == held.keys()
    saved = run.checkpoints / "checkpoint-3/adapter_model.safetensors"
    adapter = {key: value.float() for key, value in load_file(saved).items()}
    for name, weight in wide.items():
        stem = f"base_model.model.{name.rpartition('.')[0]}"
        inner = stem if name.endswith("down_proj") else f"{stem}.base_layer"
        a, b = (adapter[f"{inner}.lora_{each}.weight"] for each in "AB")
        lora = ExpertLoRA.from_peft(a, b, 4, 6 / 4)
        merged_here = (weight + lora.scale * (lora.b @ lora.a).mT).bfloat16()
        torch.testing.assert_close(held[name].float(), merged_here.float(), rtol=8e-3, atol=1e-3)
    cut = exported(run, tmp_path / "cut", "adapter", per_expert=True)["parity"]
    assert cut["logits_error"] < 1e-5


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_weights_in_fp8_leave_the_house_in_bfloat16(make_run: Make, tmp_path: Path, family: str) -> None:
    """Linear layers and experts with a scale for each block, adapters on both."""
    shape = {**FAMILIES[family], "dtype": torch.bfloat16}
    run, base = make_run(family, adapter=on_experts(family, target_modules=["o_proj"]), **shape), tmp_path / "base"
    wide, tensors = {}, load_file(base / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name or name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"], wide[name] = stored_in_fp8(tensors[name].float(), (24, 16))
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    told = json.loads((base / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [24, 16]}
    (base / "config.json").write_text(json.dumps(told))
    run.config.write_text(run.config.read_text().replace("dtype: float32", "dtype: bfloat16"))

    merged = exported(run, tmp_path / "out")["parity"]
    assert merged["logits_error"] < 1e-3
    assert merged["trained_effect"] > 0.01
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    held = everything(tmp_path / "out")
    assert not [name for name in held if "scale" in name]
    assert {value.dtype for value in held.values()} == {torch.bfloat16}
    untouched = [name for name in wide if "q_proj" in name]
    assert untouched
    for name in untouched:
        assert torch.equal(held[name], wide[name].bfloat16())
    assert all(not torch.equal(held[name], wide[name].bfloat16()) for name in wide if "o_proj" in name)
    assert exported(run, tmp_path / "cut", "adapter", per_expert=True)["parity"]["logits_error"] < 1e-3


def test_experts_in_fp8_that_the_files_hold_as_one_weight_leave_it_too(make_run: Make, tmp_path: Path) -> None:
    run = make_run("mixtral", adapter=on_experts("mixtral"), dtype=torch.bfloat16, **FAMILIES["mixtral"])
    base = tmp_path / "base"
    model = AutoModelForCausalLM.from_pretrained(base)
    (base / "model.safetensors").unlink()
    model.save_pretrained(base, save_original_format=False)
    file = base / "model.safetensors"
    tensors = load_file(file)
    names = [name for name in tensors if ".mlp.experts." in name]
    assert names
    wide = {}
    for name in names:
        every = [stored_in_fp8(each.float(), (24, 16)) for each in tensors[name]]
        tensors[name], tensors[f"{name}_scale_inv"], wide[name] = (
            torch.stack(parts) for parts in zip(*every, strict=True)
        )
    save_file(tensors, file, {"format": "pt"})
    told = json.loads((base / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [24, 16]}
    (base / "config.json").write_text(json.dumps(told))
    run.config.write_text(run.config.read_text().replace("dtype: float32", "dtype: bfloat16"))
    parity = exported(run, tmp_path / "out")["parity"]
    assert parity["logits_error"] < parity["bound"]
    held = load_file(tmp_path / "out/model.safetensors")
    assert held.keys() == {name for name in tensors if not name.endswith("_scale_inv")}
    assert all(held[name].dtype == torch.bfloat16 and held[name].shape == wide[name].shape for name in names)


def test_other_stored_forms_and_the_router(make_run: Make, tmp_path: Path) -> None:
    """A router that the files name otherwise; experts that were saved as one weight; experts that were trained whole."""
    run = make_run(
        "mixtral", adapter=on_experts("mixtral", target_parameters=[*EXPERTS, "mlp.gate.weight"]), **FAMILIES["mixtral"]
    )
    assert exported(run, tmp_path / "named")["parity"]["logits_error"] < 1e-5
    assert exported(run, tmp_path / "cut", "adapter", per_expert=True)["parity"]["logits_error"] < 1e-5
    file = tmp_path / "base/model.safetensors"
    AutoModelForCausalLM.from_pretrained(tmp_path / "base").save_pretrained(
        tmp_path / "base", save_original_format=False
    )
    assert "model.layers.0.mlp.experts.down_proj" in load_file(file)
    assert exported(run, tmp_path / "fused")["parity"]["logits_error"] < 1e-5
    assert "model.layers.0.mlp.experts.down_proj" in load_file(tmp_path / "fused/model.safetensors")
    whole = make_run(
        "gpt_oss", adapter={"target_modules": ["q_proj"], "modules_to_save": ["experts"]}, **FAMILIES["gpt_oss"]
    )
    assert exported(whole, tmp_path / "trained")["parity"]["logits_error"] < 1e-5
    whole = make_run(
        "mixtral", adapter={"target_modules": ["q_proj"], "modules_to_save": ["experts"]}, **FAMILIES["mixtral"]
    )
    assert exported(whole, tmp_path / "whole")["parity"]["logits_error"] < 1e-5
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in load_file(tmp_path / "whole/model.safetensors")


def test_experts_whose_files_have_them_turned(tmp_path: Path, shared_data: Path) -> None:
    """Older files of Qwen3-VL-MoE hold [E, in, out], which transformers turns where the shape tells."""
    base = qwen2_5_vl(shared_data / "tokenizers/minimind", tmp_path / "base")
    shape = {"vocab_size": len(AutoTokenizer.from_pretrained(base)), "bos_token_id": 1, "eos_token_id": 2}
    model = made("qwen3_vl_moe", moe_intermediate_size=24, initializer_range=0.1, **shape)
    model.save_pretrained(base)
    file = base / "model.safetensors"
    save_file(
        {name: value.mT.contiguous() if ".experts." in name else value for name, value in load_file(file).items()}, file
    )
    run = run_that_sees(tmp_path, base, {"target_modules": ["q_proj"], "target_parameters": EXPERTS})
    parity = exported(run, tmp_path / "out")["parity"]
    assert parity["logits_error"] < 1e-5
    assert parity["trained_effect"] > 0.01
    after = load_file(tmp_path / "out/model.safetensors")
    assert after["model.language_model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 32, 48)


def test_wrong_factors_fail_the_comparison_and_leave_nothing(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("qwen3_moe", adapter=on_experts("qwen3_moe"), **FAMILIES["qwen3_moe"])

    def expert_by_expert(cls: Any, a: torch.Tensor, b: torch.Tensor, experts: int, scale: float) -> Any:
        return cls(a.view(experts, -1, a.shape[-1]), b.view(b.shape[0], experts, -1).permute(1, 0, 2), scale)

    monkeypatch.setattr(ExpertLoRA, "from_peft", classmethod(expert_by_expert))
    for form, why in (
        ("safetensors", "logits are .* away"),
        ("adapter", "adds something else than the trained adapter"),
    ):
        with pytest.raises(ParityError, match=why):
            exported(run, tmp_path / "out", form, per_expert=form == "adapter")
    assert sorted(os.listdir(tmp_path)) == ["base", "runs"]


def test_what_is_not_served_is_a_sentence(make_run: Make, tmp_path: Path) -> None:
    run = make_run("gpt_oss", adapter=on_experts("gpt_oss"), **FAMILIES["gpt_oss"])
    file = tmp_path / "base/model.safetensors"
    weights = load_file(file)
    packed = {name.replace("gate_up_proj", "gate_up_proj_blocks"): value for name, value in weights.items()}
    save_file(packed, file)
    with pytest.raises(
        WorkbenchError, match=r"layers\.0\.mlp\.experts\.gate_up_proj: .* packed in four bits"
    ) as refused:
        exported(run, tmp_path / "out")
    assert "--to adapter" in refused.value.hint
    cut = PerExpert.of(_config(run), tmp_path / "base", run.checkpoints / "checkpoint-3")
    assert len(cut.singles) == 4 * 3 * 2, "an adapter is written whatever holds the base's experts"
    assert not cut.one_by_one
    save_file({name: value for name, value in weights.items() if "gate_up_proj" not in name}, file)
    with pytest.raises(WorkbenchError, match="how the base's files hold this weight cannot be told"):
        exported(run, tmp_path / "out")
    save_file(weights, file)
    adapter = run.checkpoints / "checkpoint-3/adapter_model.safetensors"
    factors = load_file(adapter)
    save_file({name: value[:-1] if "experts.lora_A" in name else value for name, value in factors.items()}, adapter)
    with pytest.raises(
        WorkbenchError, match=r"experts\.lora_A\.weight is \[15, \d+\], and the base's weight asks for \[16"
    ):
        merge(_config(run), tmp_path / "base", adapter.parent, tmp_path, quiet)
    assert sorted(os.listdir(tmp_path)) == ["base", "runs"]


def test_an_adapter_without_experts_is_not_cut(make_run: Make, tmp_path: Path) -> None:
    only = {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}
    for run in (make_run(adapter={}), make_run("mixtral", adapter=only, **FAMILIES["mixtral"])):
        with pytest.raises(WorkbenchError, match="--per-expert: this adapter is on no experts"):
            exported(run, tmp_path / "out", "adapter", per_expert=True)
    assert sorted(os.listdir(tmp_path)) == ["base", "runs"]
    for command, more in ((export.command, ["--to", "gguf"]), (push.command, ["--to", "me/it"])):
        told = CliRunner().invoke(command, [run.id, "--runs", str(run.path.parent), "--per-expert", *more])
        assert isinstance(told.exception, UsageError)
        assert "--per-expert: is for an adapter" in str(told.exception)
