"""A comparison with the weights of one layer in memory gives what the whole model gives, and takes no more."""

from __future__ import annotations

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

from engine.errors import WorkbenchError
from engine.export import parity, streamed
from engine.export.__main__ import _config
from engine.export.folder import Model
from engine.export.making import make
from engine.export.places import source
from engine.export.process import ENVIRONMENT
from engine.run.store import RunFolder
from tests.engine.export.test_experts import FAMILIES as MIXTURES
from tests.engine.export.test_experts import on_experts
from tests.prestarted import prestarted

Make = Callable[..., RunFolder]
ADAPTERS: dict[str, dict[str, Any]] = {
    "llama": {"use_dora": True, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["embed_tokens"]},
    "qwen2": {"bias": "all"},
    "gemma3_text": {"use_rslora": True},
    "phi3": {"modules_to_save": ["lm_head"]},
    "gpt2": {"target_modules": ["c_attn", "wte"]},
}


IN_LAYERS = ("qwen3_moe", "gpt_oss", "deepseek_v3")
"""Experts one by one, turned and with biases, beside shared ones."""


def in_layers_and_whole(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> tuple[parity.Reference, parity.Reference]:
    model = Model(source(run), _config(run))
    assert parity.in_layers(model.config, model.whole, adapted=model.source.adapted) is not None
    first = model.reference
    monkeypatch.setattr(parity, "in_layers", lambda *args, **settings: None)
    return first, Model(source(run), _config(run)).reference


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[pytest.mark.slow] if each in ("qwen2", "gemma3_text") else []) for each in ADAPTERS],
)
def test_a_layer_at_a_time_answers_as_the_whole_model(
    make_run: Make, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    small = {"n_embd": 64, "n_layer": 2, "n_head": 4} if family == "gpt2" else {}
    run = make_run(family, adapter=ADAPTERS[family], dtype=torch.bfloat16, **small)
    ours, whole = in_layers_and_whole(run, monkeypatch)
    assert parity.distance(whole.trained, ours.trained) < 1e-5
    assert parity.distance(whole.base, ours.base) < 1e-5
    assert parity.distance(whole.base, ours.trained) > 1e-3, "the adapter says something"


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_base_in_few_bits_is_rounded_as_training_held_it(
    make_run: Make, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    run = make_run("llama", adapter={}, quantization=kind, dtype=torch.bfloat16)
    ours, whole = in_layers_and_whole(run, monkeypatch)
    assert parity.distance(whole.trained, ours.trained) < 1e-5
    assert parity.distance(whole.base, ours.base) < 1e-5


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each in IN_LAYERS else [pytest.mark.slow]) for each in MIXTURES]
)
def test_a_mixture_is_put_together_a_layer_at_a_time(
    make_run: Make, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Its experts one by one or as one weight, with an adapter on them; also merged and rounded to the format of the files."""
    run = make_run(family, adapter=on_experts(family), dtype=torch.bfloat16, sharded="40KB", **MIXTURES[family])
    ours, whole = in_layers_and_whole(run, monkeypatch)
    assert parity.distance(whole.trained, ours.trained) < 1e-5
    assert parity.distance(whole.base, ours.base) < 1e-5
    assert parity.distance(whole.rounded, ours.rounded) < 1e-5
    assert parity.distance(ours.rounded, ours.trained) > 1e-4, "rounding moves something"
    assert parity.distance(whole.base, ours.trained) > 1e-3, "the adapter says something"


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen3_moe", "nf4"), ("gpt_oss", "mxfp4"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("gpt_oss", "int8"), ("mixtral", "nvfp4"))),
    ],
)  # fmt: skip
def test_experts_in_few_bits_are_rounded_as_training_held_them(
    make_run: Make, monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    wide = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
    shape = {**MIXTURES[family], **wide}
    run = make_run(family, adapter=on_experts(family), quantization=kind, dtype=torch.bfloat16, **shape)
    ours, whole = in_layers_and_whole(run, monkeypatch)
    assert parity.distance(whole.trained, ours.trained) < 1e-5
    assert parity.distance(whole.base, ours.base) < 1e-5


HYBRIDS: dict[str, dict[str, Any]] = {
    "FalconH1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
    "Bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "GraniteMoeHybrid": {
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "layer_types": ["mamba", "attention"],
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64,
    },
    "Jamba": {
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False,
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "NemotronH": {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "layers_block_type": ["mamba", "attention"],
        "head_dim": 16,
    },
    "Mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "Mamba": {"state_size": 8},
}  # fmt: skip


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each == "GraniteMoeHybrid" else [pytest.mark.slow]) for each in HYBRIDS]
)
def test_a_hybrid_is_exported_with_the_logits_that_it_was_trained_to(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Merged and opened by plain transformers, and the adapter by PEFT; a layer at a time as whole."""
    # PEFT refuses adapters on what leaves a layer of Mamba.
    run = make_run(family, adapter={"target_modules": ["in_proj"]}, dtype=torch.bfloat16, **HYBRIDS[family])
    for form in ("safetensors", "adapter"):
        found = make(Model(source(run), _config(run)), form, tmp_path / form, {}, lambda *_: None)["parity"]
        assert found["logits_error"] <= found["bound"]
        assert found["trained_effect"] > 1e-3
    ours, whole = in_layers_and_whole(run, monkeypatch)
    assert parity.distance(whole.trained, ours.trained) < 1e-5
    assert parity.distance(whole.base, ours.base) < 1e-5
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "safetensors", dtype=torch.float32)
    given = Model(source(run), _config(run)).inputs
    assert parity.distance(ours.rounded or ours.trained, parity.outputs(plain, given)) < 1e-4


def test_all_weights_of_a_checkpoint_are_read_so_too(make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, whole = in_layers_and_whole(make_run("llama", tie_word_embeddings=True), monkeypatch)
    assert parity.distance(whole.trained, ours.trained) < 1e-5


BUILDS: dict[str, dict[str, Any]] = {
    "Bert": {},
    "DistilBert": {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4},
    "MPNet": {},
    "ModernBert": {"cls_token_id": 1, "sep_token_id": 2},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "GPTNeoX": {},
    "Cohere": {},
    "Lfm2": {},
    "Llama4Text": {
        "num_local_experts": 2,
        "intermediate_size_mlp": 64,
        "head_dim": 16,
    },  # asks where its embeddings lie
}
UNLIKE = ("Bert", "Bloom", "OPT", "Lfm2", "Llama4Text")
"""An encoder, a norm on the embeddings, positions of its own, layers of two kinds, a mixture."""


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each in UNLIKE else [pytest.mark.slow]) for each in BUILDS]
)
def test_layers_of_every_build_find_their_weights(tmp_path: Path, family: str) -> None:
    shape = getattr(transformers, f"{family}Config")(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2, **BUILDS[family],
    )  # fmt: skip
    encoder = "Bert" in family or family == "MPNet"
    loader = transformers.AutoModel if encoder else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    loader.from_config(shape, dtype=torch.bfloat16).save_pretrained(tmp_path)
    ids = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [20] * 17]
    made = streamed.opened(tmp_path, loader, transformers.AutoConfig.from_pretrained(tmp_path))
    assert made is not None
    assert streamed.complete(made)
    whole = parity.outputs(loader.from_pretrained(tmp_path, dtype=torch.float32), ids)
    assert parity.distance(whole, streamed.outputs(made, ids)) < 1e-5
    assert sum(each.untyped_storage().nbytes() for each in made.model.parameters()) < 1000, "nothing stays in memory"


def test_a_head_beside_embeddings_that_it_is_not_is_read_too(make_run: Make) -> None:
    """transformers ties what its config ties only where the files hold the same numbers."""
    run = make_run(adapter={}, tie_word_embeddings=True)
    model = Model(source(run), _config(run))
    file = model.whole / "model.safetensors"
    kept = load_file(file)
    head = kept["model.embed_tokens.weight"].clone()
    save_file({**kept, "lm_head.weight": head}, file, {"format": "pt"})
    assert parity.in_layers(model.config, model.whole, adapted=True) is not None
    save_file({**kept, "lm_head.weight": head.flip(0)}, file, {"format": "pt"})
    assert parity.in_layers(model.config, model.whole, adapted=True) is None


def test_a_buffer_that_the_files_hold_under_no_name_of_the_model_has_the_model_opened_whole(make_run: Make) -> None:
    class WithBuffer(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("scale", torch.ones(2))

    class Loader:
        from_config = staticmethod(lambda shape, dtype: WithBuffer(shape))

    base = source(make_run(adapter={})).run.path.parents[1] / "base"
    shape = transformers.AutoConfig.from_pretrained(base)
    assert streamed.opened(base, Loader, shape) is None
    kept = load_file(base / "model.safetensors")
    save_file({**kept, "scale": torch.full((2,), 3.0)}, base / "model.safetensors", {"format": "pt"})
    made = streamed.opened(base, Loader, shape)
    assert made is not None
    assert made.model.scale.tolist() == [3.0, 3.0]
    save_file({**kept, "scale": torch.ones(5)}, base / "model.safetensors", {"format": "pt"})
    assert streamed.opened(base, Loader, shape) is None


def test_a_machine_with_little_memory_refuses_before_anything_is_written(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    run = make_run(adapter={})
    little = psutil.virtual_memory()._replace(available=1 << 20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: little)
    with pytest.raises(WorkbenchError, match=r"takes .* of memory, and 1.0 MiB are free"):
        make(Model(source(run), _config(run)), "safetensors", tmp_path / "out", {}, lambda *_: None)
    assert not (tmp_path / "out").exists()


MEASURE = """
import sys
from pathlib import Path
from engine.export.__main__ import _config
from engine.export.folder import Model
from engine.export.making import make
from engine.export.places import source
from engine.run.store import RunFolder

run = RunFolder(sys.argv[1])
for which in ("first", "measured"):
    model = Model(source(run), _config(run))
    ids = model.inputs
    if which == "measured":  # what the libraries import at the first is no memory of exporting
        before = int(open("/proc/self/statm").read().split()[1]) * 4096
        open("/proc/self/clear_refs", "w").write("5")
    made = make(model, "safetensors", Path(sys.argv[2]) / which, {}, lambda *_: None)
    assert made["parity"]["logits_error"] is not None
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(before, peak, sum(map(len, ids)), len(ids) * max(map(len, ids)))
"""


LARGE: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3": (
        {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8, "head_dim": 64},
        512 * 64 * (8 * 2 + 2 * 2) + 3 * 512 * 2048,
    ),
    "qwen3_moe": (
        {
            "hidden_size": 256, "num_hidden_layers": 18, "num_attention_heads": 4, "head_dim": 64,
            "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True,
        },
        256 * 64 * (4 * 2 + 2 * 2) + 16 * 3 * 256 * 256,
    ),
}  # fmt: skip
"""A shape of each, and how many numbers a layer of it has."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, as a device of Linux")
@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_an_export_with_its_comparison_takes_a_shard_and_a_layer(make_run: Make, tmp_path: Path, family: str) -> None:
    shape, layer = LARGE[family]
    adapter = {"target_modules": ["q_proj", "o_proj"]}
    run = make_run(family, adapter=adapter, sharded="12MB", dtype=torch.bfloat16, **shape)
    shards = [path.stat().st_size for path in (tmp_path / "base").glob("*.safetensors")]
    numbers = sum(shards) // 2
    prestarted.wait()
    done = subprocess.run(
        [sys.executable, "-P", "-c", MEASURE, str(run.path), str(tmp_path)],
        capture_output=True, text=True, check=True, env={**os.environ, **ENVIRONMENT, prestarted.WARM: "1"},
    )  # fmt: skip
    before, peak, tokens, padded = map(int, done.stdout.split())
    answers = 4 * 6400 * (3 * tokens + 2 * padded)
    if family == "qwen3_moe":  # and once more the answers of the weights rounded alike
        answers += 4 * 6400 * tokens
    bound = 1.3 * max(shards) + 4 * layer + answers
    assert bound < 3 * numbers, "the model whole, in float32, would not fit below"
    assert peak - before < bound, f"{(peak - before) / 2**20:.0f} MiB, at most {bound / 2**20:.0f}"
