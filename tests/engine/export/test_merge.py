"""A merged folder answers as base and adapter do, whatever the adapter is, and is written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine import model_files
from engine.errors import WorkbenchError
from engine.export import merge as merging
from engine.export import parity, places, stored
from engine.export.__main__ import _config
from engine.export.folder import Model
from engine.export.making import make
from engine.export.parity import ParityError
from engine.export.places import source
from engine.export.process import ENVIRONMENT
from engine.run import checkpoint
from engine.run.store import RunFolder
from tests.engine.export.conftest import run_that_sees
from tests.engine.seeing import qwen2_5_vl
from tests.prestarted import prestarted

Make = Callable[..., RunFolder]


def quiet(what: str, done: int, total: int) -> None:
    pass


def merged(run: RunFolder, into: Path, form: str = "safetensors") -> dict[str, Any]:
    return make(Model(source(run), _config(run)), form, into, {}, quiet)


ADAPTERS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "bias": {"bias": "all"},
    "head": {"modules_to_save": ["lm_head"]},
    "embedding": {"modules_to_save": ["embed_tokens"], "target_modules": ["q_proj"]},
    "both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "embedding_lora": {"target_modules": ["q_proj", "embed_tokens"]},
}


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        pytest.param(kind, tied, marks=[pytest.mark.slow] if (place + tied) % 2 else [])
        for place, kind in enumerate(ADAPTERS)
        for tied in (True, False)
    ],
)
def test_a_merged_model_answers_as_base_and_adapter(make_run: Make, tmp_path: Path, kind: str, tied: bool) -> None:
    family = "qwen2" if kind == "bias" else "llama"
    run = make_run(family, adapter=ADAPTERS[kind], tie_word_embeddings=tied)
    part = merged(run, tmp_path / "out")
    assert part["parity"]["logits_error"] < 1e-5
    assert part["parity"]["trained_effect"] > 0.01
    weights = load_file(tmp_path / "out/model.safetensors")
    untied = tied and kind in ("head", "embedding", "both", "embedding_lora")
    assert ("lm_head.weight" in weights) == (untied or not tied)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] == (tied and not untied)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".out")]


def test_a_tied_base_whose_files_hold_the_head_too_is_untied_where_one_of_them_was_trained(
    make_run: Make, tmp_path: Path
) -> None:
    run = make_run(adapter=ADAPTERS["embedding"], tie_word_embeddings=True)
    file = tmp_path / "base/model.safetensors"
    kept = load_file(file)
    save_file({**kept, "lm_head.weight": kept["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    assert merged(run, tmp_path / "out")["parity"]["logits_error"] < 1e-5
    weights = load_file(tmp_path / "out/model.safetensors")
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_has_the_precision_and_the_files_of_its_base(make_run: Make, tmp_path: Path, dtype: torch.dtype) -> None:
    run = make_run(adapter={}, dtype=dtype, sharded="200KB")
    part = merged(run, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "base").glob("*.safetensors*"))
    assert len(names) > 3
    assert names == sorted(path.name for path in (tmp_path / "out").glob("*.safetensors*"))
    found = {each.dtype for path in (tmp_path / "out").glob("*.safetensors") for each in load_file(path).values()}
    assert found == {dtype}
    assert 0 < part["parity"]["logits_error"] < part["parity"]["bound"]


@pytest.mark.parametrize("kind", ["nf4", pytest.param("fp4", marks=pytest.mark.slow), "int8"])
def test_a_quantized_base_is_merged_as_training_saw_it(make_run: Make, tmp_path: Path, kind: str) -> None:
    run = make_run(adapter={}, quantization=kind, tie_word_embeddings=False)
    part = merged(run, tmp_path / "out")
    assert part["parity"]["logits_error"] < 1e-3
    weights, base = load_file(tmp_path / "out/model.safetensors"), load_file(tmp_path / "base/model.safetensors")
    assert torch.equal(weights["lm_head.weight"], base["lm_head.weight"]), "the head is not quantized"
    assert not torch.equal(weights["model.embed_tokens.weight"][:1], weights["lm_head.weight"][:1])


def test_a_model_that_sees_is_merged_by_the_names_of_its_files(tmp_path: Path, shared_data: Path) -> None:
    base = qwen2_5_vl(shared_data / "tokenizers/minimind", tmp_path / "base")
    run = run_that_sees(tmp_path, base, {"target_modules": ["q_proj", "down_proj"]})
    part = merged(run, tmp_path / "out")
    assert part["parity"]["logits_error"] < 1e-5
    assert part["parity"]["trained_effect"] > 0.01
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    changed = {name.split(".")[-2] for name, value in after.items() if not torch.equal(before[name], value)}
    assert changed == {"q_proj", "down_proj"}
    assert "model.layers.0.self_attn.q_proj.weight" in after, "in memory it is below model.language_model"


def test_a_merge_without_the_adapter_fails_where_training_moved_less_than_rounding_may(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(adapter={"r": 256, "lora_alpha": 1}, dtype=torch.bfloat16)
    right = merged(run, tmp_path / "right")["parity"]
    assert right["trained_effect"] < right["bound"], "the distance alone cannot tell"
    monkeypatch.setattr(merging, "merged_weight", lambda config, made, name, value, weights: value)
    with pytest.raises(WorkbenchError, match="it answers as its base does, without what was trained"):
        merged(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_number_is_as_near_to_nothing() -> None:
    numbers, broken = [torch.ones(1, 2, 3)], [torch.full((1, 2, 3), float("nan"))]
    assert parity.distance(numbers, broken) == parity.distance(broken, numbers) == float("inf")
    with pytest.raises(WorkbenchError, match="trained model's own logits are not finite"):
        parity.check_logits(parity.Parity("transformers", 0, 0, []), parity.Reference(broken), broken, 1.0)


def test_a_base_in_bitsandbytes_own_files_leaves_the_house_in_16_bits(make_run: Make, tmp_path: Path) -> None:
    run = make_run(adapter={})
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    packed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=settings)
    packed.save_pretrained(tmp_path / "base")
    told = merged(run, tmp_path / "out")["parity"]
    assert told["logits_error"] < told["bound"]
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert not any("absmax" in name for name in load_file(tmp_path / "out/model.safetensors"))
    assert merged(run, tmp_path / "adapter", "adapter")["parity"]["logits_error"] < 1e-6


def test_a_weight_whose_rows_the_files_hold_in_another_order_has_no_name_there(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers turns the rows of query and key for rotary embeddings in some families; a delta would go to others."""
    make_run(adapter={})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    name = "model.layers.0.self_attn.q_proj.weight"
    there = {"wq": model_files.Tensor("F32", tuple(model.get_parameter(name).shape))}
    monkeypatch.setattr(stored, "_saved", lambda model, name, value: {"wq": value})
    assert stored.stored_name(model, name, there) == "wq"
    monkeypatch.setattr(stored, "_saved", lambda model, name, value: {"wq": value.flip(0)})
    assert stored.stored_name(model, name, there) == name


def test_one_wrong_weight_fails_the_comparison_and_leaves_nothing(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, right = make_run(adapter={}), merging.merged_weight

    def wrong(config: Any, made: Any, name: str, value: torch.Tensor, weights: Any) -> torch.Tensor:
        if name == "model.layers.1.self_attn.q_proj.weight":
            return value
        return right(config, made, name, value, weights)

    monkeypatch.setattr(merging, "merged_weight", wrong)
    with pytest.raises(ParityError, match=r"logits are .* of their size away"):
        merged(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".out")]


def test_the_model_stops_where_training_ended_a_turn(make_run: Make, tmp_path: Path) -> None:
    run = make_run(adapter={})
    (tmp_path / "base/generation_config.json").unlink()
    part = merged(run, tmp_path / "out")
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == 2
    assert part["parity"]["stop_tokens"] == ["<|im_end|>"]
    assert (tmp_path / "out/chat_template.jinja").read_text() == (tmp_path / "base/chat_template.jinja").read_text()


def test_the_adapter_is_taken_along_alone(make_run: Make, tmp_path: Path) -> None:
    part = merged(make_run(adapter={"use_dora": True}), tmp_path / "out", "adapter")
    assert part["parity"]["reader"] == "PEFT"
    assert part["parity"]["logits_error"] < 1e-6
    assert not list((tmp_path / "out").glob("optimizer*"))


def test_all_weights_are_copied_and_have_no_adapter(make_run: Make, tmp_path: Path) -> None:
    run = make_run()
    assert merged(run, tmp_path / "out")["parity"]["logits_error"] == 0
    with pytest.raises(WorkbenchError, match=r"no adapter"):
        merged(run, tmp_path / "adapter", "adapter")
    assert not (tmp_path / "adapter").exists()


def test_runs_without_a_sound_checkpoint_are_refused(make_run: Make, tmp_path: Path) -> None:
    run = make_run(adapter={})
    with pytest.raises(WorkbenchError, match=r"checkpoint-9 cannot be taken along.*is not there"):
        source(run, 9)
    file = run.checkpoints / "checkpoint-3/adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(WorkbenchError, match="has changed since it was saved"):
        source(run)
    file.unlink()
    for path in (run.checkpoints / "checkpoint-3").iterdir():
        path.unlink()
    (run.checkpoints / "checkpoint-3").rmdir()
    with pytest.raises(WorkbenchError, match="has no checkpoint, so there is no model"):
        source(run)


def test_a_checkpoint_with_another_tokenizer_is_refused(make_run: Make, tmp_path: Path, shared_data: Path) -> None:
    from transformers import AutoTokenizer

    run = make_run(adapter={})
    other = AutoTokenizer.from_pretrained(shared_data / "tokenizers/phi-3-mini")
    tmp = checkpoint.begin(run, 4)
    for path in (run.checkpoints / "checkpoint-3").glob("adapter*"):
        (tmp / path.name).write_bytes(path.read_bytes())
    other.save_pretrained(tmp)
    checkpoint.commit(tmp, {})
    with pytest.raises(WorkbenchError, match=r"its tokenizer \(\d+ tokens\) is another than that of"):
        merged(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_base_is_refused(make_run: Make, tmp_path: Path) -> None:
    run = make_run(adapter={})
    file = tmp_path / "base/model.safetensors"
    weights = load_file(file)
    save_file({name.replace("q_proj", "query"): value for name, value in weights.items()}, file)
    with pytest.raises(WorkbenchError, match="has no place in the base model"):
        merged(run, tmp_path / "out")


def test_places_that_are_taken_full_or_in_use(make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "there"
    place.mkdir()
    with pytest.raises(WorkbenchError, match="exists already"), places.placed(place, 1):
        pass
    with places.placed(tmp_path / "out", 1) as part:
        part.mkdir()
        with pytest.raises(WorkbenchError, match="another export is writing"), places.placed(tmp_path / "out", 1):
            raise AssertionError("two write at once")
    assert (tmp_path / "out").is_dir(), "the first one ends well"
    with (
        pytest.raises(WorkbenchError, match=r"needs .* TiB, and the disk has"),
        places.placed(tmp_path / "big", 1 << 50),
    ):
        pass
    with pytest.raises(WorkbenchError, match="the disk is full: about 1 B are needed, and nothing was kept"):
        _fill(tmp_path / "new/full")
    assert sorted(os.listdir(tmp_path)) == ["out", "there"]


def _fill(place: Path) -> None:
    with places.placed(place, 1) as part:
        part.mkdir()
        (part / "half").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")


MEASURE = """
import resource, sys
from pathlib import Path
from engine.export.merge import merge
from engine.export.__main__ import _config
from engine.run.store import RunFolder
import torch, peft, transformers
run = RunFolder(sys.argv[1]); base = Path(sys.argv[2]); into = Path(sys.argv[3]); into.mkdir()
config = _config(run)
transformers.AutoConfig.from_pretrained(base)
for which in ("first", "whole"):
    out = into / which; out.mkdir()
    if which == "first":
        import engine.export.merge as m
        # the libraries import parts of themselves at the first merge, which is no memory of merging
        m.merge(config, base, run.checkpoints / "checkpoint-3", out, lambda *_: None)
        before = int(open("/proc/self/statm").read().split()[1]) * 4096
        open("/proc/self/clear_refs", "w").write("5")
    else:
        merge(config, base, run.checkpoints / "checkpoint-3", out, lambda *_: None)
        peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
        print(before, peak)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, as a device of Linux")
def test_merging_takes_the_memory_of_a_shard_and_a_layer(make_run: Make, tmp_path: Path) -> None:
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    run = make_run(
        "qwen3_moe", adapter={"target_modules": ["q_proj", "o_proj"], "target_parameters": names}, sharded="35MB",
        hidden_size=1024, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=512, num_hidden_layers=4,
        dtype=torch.bfloat16, max_position_embeddings=64, num_attention_heads=8, head_dim=128,
    )  # fmt: skip
    base = tmp_path / "base"
    shards = [path.stat().st_size for path in base.glob("*.safetensors")]
    assert sum(shards) > 3 * max(shards)
    prestarted.wait()
    done = subprocess.run(
        [sys.executable, "-P", "-c", MEASURE, str(run.path), str(base), str(tmp_path / "out")],
        capture_output=True, text=True, check=True, env={**os.environ, **ENVIRONMENT, prestarted.WARM: "1"},
    )  # fmt: skip
    before, peak = map(int, done.stdout.split())
    layer = 4 * (2.5 * 1024 * 1024 + 8 * 3 * 1024 * 512)  # one layer's weights in float32, all its experts
    assert peak - before < 1.3 * max(shards) + layer, f"{(peak - before) / 2**20:.0f} MiB"
