"""GGUF files and Modelfiles: each family from a config, read back; what llama.cpp would read otherwise is refused by name."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from engine.compat.gguf_reading import QuickReader
from engine.errors import WorkbenchError
from engine.export import llama_cpp, modelfile, parity
from engine.export.__main__ import _config
from engine.export.families_of_gguf import FAMILIES as WRITTEN
from engine.export.folder import Model
from engine.export.making import make
from engine.export.places import places, source
from engine.export.process import compared
from engine.kernels.experts import mxfp4
from engine.run.store import RunFolder
from tests.engine.export.test_experts import on_experts
from tests.engine.features.families import stored_in_mxfp4

Make = Callable[..., RunFolder]
gguf = pytest.importorskip("gguf")

YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "truncate": True,
    "original_max_position_embeddings": 512,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    "mistral": {"head_dim": 16},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 32, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "smollm3": {"num_hidden_layers": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 16,
                "rope_parameters": YARN, "max_position_embeddings": 2048},
}  # fmt: skip

ALIKE = {"mistral", "qwen3", "gemma", "gemma2", "olmoe", "olmo2", "mixtral"}
"""Their weights go ways that those of the others go too."""


def exported(run: RunFolder, forms: list[str], folder: Path, quant: str = "F16") -> list[dict[str, Any]]:
    where = places(run, forms, folder, quant)
    asked = {"quant": quant, "places": {form: str(path) for form, path in where.items()}}
    model = Model(source(run), _config(run))
    return [make(model, form, path, asked, lambda *_: None) for form, path in where.items()]


def test_a_model_that_sees_goes_along_with_its_pixel_limits(tmp_path: Path, shared_data: Path) -> None:
    """Opened again by the class that sees; its processor as the checkpoint holds it, video settings too."""
    from transformers import AutoModelForImageTextToText

    from engine.models.load import load_processing_class
    from engine.rules import read
    from engine.run import checkpoint, store
    from tests.engine.seeing import qwen2_5_vl

    base = qwen2_5_vl(shared_data / "tokenizers/minimind", tmp_path / "base")
    settings = {
        "model": {"name": str(base), "dtype": "float32"},
        "data": {"train": [{"path": "rows.jsonl"}], "max_pixels": 4096},
        "adapter": {"kind": "none"},
    }
    run = store.create(tmp_path / "runs", json.dumps(settings), {"name": "taken"})
    kept = checkpoint.begin(run, 3)
    AutoModelForImageTextToText.from_pretrained(base).save_pretrained(kept)
    load_processing_class(read(settings).config).save_pretrained(kept)
    checkpoint.commit(kept, {"versions": {"peft": "0"}})
    run.update_json(state="finished")
    part = exported(run, ["safetensors"], tmp_path / "out")[0]
    made = json.loads((Path(part["path"]) / "processor_config.json").read_text())
    assert made["image_processor"]["size"] == {"shortest_edge": 1024, "longest_edge": 4096}
    assert made["video_processor"]["fps"] == 2


def architecture_of(family: str) -> str:
    """What llama.cpp calls it."""
    ours = {"mistral": "LLAMA", "mixtral": "LLAMA", "gemma3_text": "GEMMA3", "gpt_oss": "GPT_OSS"}
    known = ours.get(family, family.upper().replace("_", ""))
    return str(gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, known)])


def test_every_family_has_an_architecture_of_llama_cpp() -> None:
    for family in FAMILIES:
        assert gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, WRITTEN[family])] == architecture_of(family)


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.slow] if each in ALIKE else []) for each in FAMILIES]
)
def test_every_weight_of_a_family_comes_back(make_run: Make, tmp_path: Path, shared_data: Path, family: str) -> None:
    spm = family in ("gemma", "gemma2", "gemma3_text", "phi3")
    tokenizer = shared_data / ("weights/tinystories-llama-260k" if spm else "tokenizers/minimind")
    run = make_run(family, adapter={}, tokenizer=tokenizer, **FAMILIES[family])
    part = exported(run, ["gguf"], tmp_path / "out", "BF16")[0]
    assert part["parity"]["weights"] > 14
    reader = QuickReader(part["path"])
    assert reader.get_field("general.architecture").contents() == architecture_of(family)
    assert reader.get_field("tokenizer.ggml.model").contents() == ("llama" if spm else "gpt2")
    assert ("rope_freqs.weight" in {each.name for each in reader.tensors}) == (family == "llama")
    made = f"{run.id}-BF16.gguf"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [made, f"{made}.parity.json"]


@pytest.mark.parametrize("quants", [("Q8_0", "F32"), pytest.param(("F16",), marks=pytest.mark.slow)])
def test_transformers_own_reader_gives_the_logits_of_the_trained_model(
    make_run: Make, tmp_path: Path, quants: tuple[str, ...]
) -> None:
    from transformers import AutoModelForCausalLM

    run = make_run("llama", adapter={})
    model = Model(source(run), _config(run))
    for quant in quants:
        bound = {"F16": 1e-2, "Q8_0": 5e-2, "F32": 1e-4}[quant]
        part = exported(run, ["gguf"], tmp_path / quant, quant)[0]
        file = Path(part["path"])
        opened = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        assert parity.distance(model.reference[0], parity.outputs(opened, model.inputs)) < bound


def test_a_comparison_in_float32_that_the_disk_has_no_room_for_is_told(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In llama.cpp's place stands transformers' own reader."""
    from transformers import AutoModelForCausalLM

    from engine.export import to_gguf

    run = make_run("llama", adapter={})
    model = Model(source(run), _config(run))

    def answers(file: Path, texts: list[str], ids: list[list[int]]) -> tuple[list[list[int]], list[torch.Tensor]]:
        opened = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        return [model.tokenizer(text)["input_ids"] for text in texts], [each[0] for each in parity.outputs(opened, ids)]

    monkeypatch.setattr(to_gguf.llama_cpp, "installed", lambda: True)
    monkeypatch.setattr(to_gguf.llama_cpp, "answers", answers)
    monkeypatch.setattr(to_gguf, "SPARE_BYTES", 1 << 60)
    told = exported(run, ["gguf"], tmp_path / "out", "F16")[0]["parity"]
    assert told["file_error"] is None
    assert "not compared in float32 (a copy in float32 wants" in compared(told)


def test_a_modelfile_renders_the_prompt_that_was_trained(make_run: Make, tmp_path: Path, shared_data: Path) -> None:
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(shared_data / "tokenizers/minimind")
    words.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    words.save_pretrained(tmp_path / "words")
    run = make_run("llama", adapter={}, tokenizer=tmp_path / "words")
    parts = exported(run, ["gguf", "modelfile"], tmp_path / "out")
    text = Path(parts[1]["path"]).read_text()
    assert text.startswith(f"FROM ./{run.id}-F16.gguf\nTEMPLATE")
    assert '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n' in text
    assert 'PARAMETER stop "<|im_end|>"' in text
    words.chat_template = "{% for m in messages %}{{ loop.length }}{{ m['content'] }}{% endfor %}"
    with pytest.raises(WorkbenchError, match="no plain sequence of turns"):
        modelfile.turns_of(words, {})
    with pytest.raises(WorkbenchError, match="this export made none"):
        exported(run, ["modelfile"], tmp_path / "alone")


def read_by_ollama(text: str) -> list[tuple[str, str]]:
    """A Modelfile's commands with their values, as Ollama's parser cuts them (its `parser/parser.go`)."""
    found, rest = [], text
    while rest := rest.lstrip():
        command, rest = rest.split(" ", 1)
        if command == "PARAMETER":
            name, rest = rest.split(" ", 1)
            command = name
        if rest.startswith('"""'):
            value, rest = rest[3:].split('"""', 1)
        elif rest.startswith('"'):
            value, rest = rest[1:].split('"', 1)
        else:
            value, _, rest = rest.partition("\n")
        found.append((command.lower(), value))
    return found


def test_a_modelfile_is_read_by_ollama_as_it_was_meant() -> None:
    turns = {"user": ('<u name="user">\n', "</u>\n"), "assistant": ("<a>", '"end"\n')}
    text = modelfile.text(turns, "<a>\n", "run-F16.gguf", ["</s>", "\n\n", 'a "word" more'])
    assert read_by_ollama(text) == [
        ("from", "./run-F16.gguf"),
        (
            "template",
            '{{ range .Messages }}{{ if eq .Role "user" }}<u name="user">\n{{ .Content }}</u>\n{{ else if eq .Role '
            '"assistant" }}<a>{{ .Content }}"end"\n{{ end }}{{ end }}<a>\n',
        ),
        ("stop", "</s>"),
        ("stop", "\n\n"),
        ("stop", 'a "word" more'),
    ]
    with pytest.raises(WorkbenchError, match="no plain sequence of turns"):
        modelfile.text(turns, 'answer: "', "run-F16.gguf", [])
    with pytest.raises(WorkbenchError, match="a stop token has quotation marks"):
        modelfile.text(turns, "<a>", "run-F16.gguf", ['"'])


def test_a_family_that_is_not_written_is_refused(make_run: Make, tmp_path: Path) -> None:
    run = make_run("gpt2", adapter={"target_modules": ["c_attn"]}, n_embd=64, n_layer=2, n_head=4)
    with pytest.raises(WorkbenchError, match=r"a model of type gpt2 is not written as GGUF"):
        exported(run, ["gguf"], tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize(
    ("family", "shape", "what"),
    [
        ("olmo2", {"attention_bias": True}, "biases of attention"),
        ("smollm3", {"mlp_bias": True}, "biases of the MLP"),
        ("olmo2", {"head_dim": 32}, "heads of this size"),
        ("granite", {"hidden_act": "gelu"}, "the activation"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "layers without experts"),
        ("qwen3_moe", {"norm_topk_prob": False}, "the shares of experts"),
        ("olmoe", {"norm_topk_prob": True}, "the shares of experts"),
        ("olmoe", {"num_key_value_heads": 2}, "keys of fewer heads"),
        ("olmoe", {"clip_qkv": 8.0}, "queries and keys that are clipped"),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}, "which layers rotate"),
        ("gemma", {"use_bidirectional_attention": True}, "attention that looks ahead"),
        ("gemma2", {"query_pre_attn_scalar": 24}, "the scale of attention"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 4}, "the order of sliding and full layers"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "where gates are clamped"),
        ("gpt_oss", {"attention_bias": False}, "attention without biases"),
        ("gpt_oss", {"rope_parameters": {**YARN, "beta_fast": 16.0}}, "YaRN (beta_fast, beta_slow)"),
        ("gpt_oss", {"rope_parameters": {**YARN, "attention_factor": 1.0}}, "the scale of rotated heads"),
        (
            "mixtral",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "rotation of type yarn",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(family: str, shape: dict[str, Any], what: str) -> None:
    from engine.export.families_of_gguf import architecture

    plain = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64, **FAMILIES[family]}
    if family not in ("mixtral", "gemma2"):
        assert architecture(AutoConfig.for_model(family, **plain))
    with pytest.raises(WorkbenchError, match=re.escape(f"llama.cpp computes {what}")):
        architecture(AutoConfig.for_model(family, **{**plain, **shape}))


def test_gpt_oss_as_published_is_refused_for_the_ends_of_its_rotation() -> None:
    """The model's own defaults: a ramp from 8.1 to 17.4, where llama.cpp has whole numbers."""
    from transformers import GptOssConfig

    from engine.export.families_of_gguf import architecture

    with pytest.raises(WorkbenchError, match=r"ramp from 8\.1 to 17\.4, `truncate: false`\) to 8 and 18") as refused:
        architecture(GptOssConfig())
    assert "convert_hf_to_gguf.py" in refused.value.full_message
    rope = {**GptOssConfig().rope_parameters, "truncate": True}
    assert architecture(GptOssConfig(rope_parameters=rope)) == "GPT_OSS"


def test_gpt_oss_has_its_experts_apart_in_a_gguf(make_run: Make, tmp_path: Path) -> None:
    """Its files hold [expert, in, gate up gate up ...]; cut here without the code that wrote the file."""
    run = make_run("gpt_oss", adapter={}, **FAMILIES["gpt_oss"])
    part = exported(run, ["gguf"], tmp_path / "out", "F32")[0]
    read = {each.name: torch.from_numpy(each.data.copy()) for each in gguf.GGUFReader(part["path"]).tensors}
    held = load_file(tmp_path / "base/model.safetensors")
    for layer in range(2):
        ours, theirs = f"model.layers.{layer}.mlp.experts.", f"blk.{layer}.ffn_"
        for name, first in (("gate", 0), ("up", 1)):
            cut = torch.stack([each.T[first::2] for each in held[f"{ours}gate_up_proj"]])
            assert torch.equal(read[f"{theirs}{name}_exps.weight"], cut)
            assert torch.equal(read[f"{theirs}{name}_exps.bias"], held[f"{ours}gate_up_proj_bias"][:, first::2])
        assert torch.equal(read[f"{theirs}down_exps.weight"], held[f"{ours}down_proj"].mT)
        assert torch.equal(read[f"blk.{layer}.attn_sinks.weight"], held[f"model.layers.{layer}.self_attn.sinks"])


def test_experts_in_mxfp4_go_into_a_gguf_to_the_bit(make_run: Make, tmp_path: Path) -> None:
    """Laid otherwise there; read by gguf's own reader, and held against what the base's bytes stand for."""
    shape = {**FAMILIES["gpt_oss"], "dtype": torch.bfloat16, "intermediate_size": 96}
    run, base = make_run("gpt_oss", adapter={"target_modules": ["o_proj"]}, **shape), tmp_path / "base"
    stored_in_mxfp4(base)
    run.config.write_text(run.config.read_text().replace("dtype: float32", "dtype: bfloat16"))
    assert llama_cpp.offered_quants(run)[4] == "MXFP4"
    part = exported(run, ["gguf"], tmp_path / "out", "MXFP4")[0]
    assert part["parity"]["formats"]["MXFP4"] == 2 * 3
    assert part["parity"]["formats"].keys() == {"MXFP4", "BF16", "F32"}
    read = {each.name: each for each in gguf.GGUFReader(part["path"]).tensors}
    held = load_file(base / "model.safetensors")
    for layer in range(2):
        ours = f"model.layers.{layer}.mlp.experts."
        for theirs, name, rows in (
            ("gate", "gate_up_proj", slice(0, None, 2)),
            ("up", "gate_up_proj", slice(1, None, 2)),
            ("down", "down_proj", slice(None)),
        ):
            tensor = read[f"blk.{layer}.ffn_{theirs}_exps.weight"]
            found = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            numbers, scales = held[f"{ours}{name}_blocks"], held[f"{ours}{name}_scales"]
            for expert, value in enumerate(found):
                wide = mxfp4.unpacked(numbers[expert, rows], scales[expert, rows], value.shape[-1])
                assert torch.equal(value, wide)
                assert wide.unique().numel() > 8


def test_experts_that_are_not_the_bases_own_are_not_kept_in_mxfp4(make_run: Make, tmp_path: Path) -> None:
    shape = {**FAMILIES["gpt_oss"], "dtype": torch.bfloat16}
    run, base = make_run("gpt_oss", adapter=on_experts("gpt_oss"), **shape), tmp_path / "base"
    assert "MXFP4" not in llama_cpp.offered_quants(run)
    with pytest.raises(WorkbenchError, match=r"those of .*base hold none"):
        exported(run, ["gguf"], tmp_path / "out", "MXFP4")
    stored_in_mxfp4(base)
    assert "MXFP4" not in llama_cpp.offered_quants(run), "its adapter is on the experts"
    with pytest.raises(WorkbenchError, match=r"this run's adapter is on them") as refused:
        exported(run, ["gguf"], tmp_path / "out", "MXFP4")
    assert "Take --quant BF16" in refused.value.full_message
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_the_numbers_of_a_file_are_those_of_the_folder(make_run: Make, tmp_path: Path, family: str) -> None:
    """What llama.cpp is held against: in F32 the folder's own, in Q8_0 those that were rounded."""
    from engine.export.to_gguf import _numbers_of

    run = make_run(family, **FAMILIES[family])
    model = Model(source(run), _config(run))
    config, folder = AutoConfig.from_pretrained(model.whole), model.whole
    plain = parity.open_folder(model.config, folder, model.inputs)
    apart = {}
    for quant in ("F32", "Q8_0"):
        file = exported(run, ["gguf"], tmp_path / quant, quant)[0]["path"]
        numbers = _numbers_of(QuickReader(file), folder, config)
        assert numbers is not None
        if quant == "F32":
            for name, value in load_file(folder / "model.safetensors").items():
                assert torch.equal(numbers(name), value), name
        made = parity.outputs_with(model.config, folder, model.inputs, numbers)
        assert made is not None
        apart[quant] = parity.distance(plain, made)
    assert apart["F32"] == 0
    assert 1e-3 < apart["Q8_0"] < 0.5


def test_a_weight_that_the_files_hold_in_another_way_is_refused(make_run: Make, tmp_path: Path) -> None:
    """Experts as one weight, which transformers writes where a base has them so, and a layer that lacks one."""
    from safetensors.torch import save_file

    from engine import model_files
    from engine.export.families_of_gguf import tensors

    make_run("qwen3_moe", adapter={}, **FAMILIES["qwen3_moe"])
    base = tmp_path / "base"
    config = AutoConfig.from_pretrained(base)
    names = tensors(config, "QWEN3MOE", model_files.stored_weights(base))
    assert names["blk.1.ffn_up_exps.weight"][3].name == "model.layers.1.mlp.experts.3.up_proj.weight"
    kept = load_file(base / "model.safetensors")
    lost = {name: value for name, value in kept.items() if ".1.mlp.experts.3.up_proj" not in name}
    save_file(lost, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(WorkbenchError, match=r"have 3 of 4 experts for blk\.1\.ffn_up_exps\.weight"):
        tensors(config, "QWEN3MOE", model_files.stored_weights(base))
    one = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 192, 64)}
    save_file({**kept, **one}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(WorkbenchError, match=r"no place for the weight .*gate_up_proj"):
        tensors(config, "QWEN3MOE", model_files.stored_weights(base))


def test_k_quants_are_made_by_llama_cpp_and_without_it_refused(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in llama.cpp's place: what it writes is held against the trained weights, whatever it says."""
    run = make_run("llama", adapter={}, hidden_size=256, num_attention_heads=4)
    monkeypatch.setattr(llama_cpp, "installed", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(WorkbenchError, match=r"Q4_K_M is made by llama\.cpp") as refused:
        exported(run, ["gguf"], tmp_path / "out", "Q4_K_M")
    assert "pip install llama-cpp-python" in refused.value.full_message
    program = tmp_path / "bin/llama-quantize"
    program.parent.mkdir()
    told = "import sys, shutil\nsource, target, quant = sys.argv[1:]\nassert quant == 'Q4_K_M'\n"

    def does(script: str) -> None:
        program.write_text(f"#!{sys.executable}\n{told}{script}")
        program.chmod(0o755)

    does("print('no such thing', file=sys.stderr)\nsys.exit(3)")
    with pytest.raises(WorkbenchError, match=r"llama\.cpp failed at Q4_K_M \(exit code 3\): no such thing"):
        exported(run, ["gguf"], tmp_path / "out", "Q4_K_M")
    does(
        "content = bytearray(open(source, 'rb').read())\ncontent[-400:] = bytes(400)\nopen(target, 'wb').write(content)"
    )
    with pytest.raises(parity.ParityError, match="further from its source than rounding"):
        exported(run, ["gguf"], tmp_path / "out", "Q4_K_M")
    assert not list((tmp_path / "out").glob("*"))
    does("shutil.copy(source, target)")
    found = exported(run, ["gguf"], tmp_path / "out", "Q4_K_M")[0]["parity"]
    assert found["formats"] == {"F16": 16, "F32": 5}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"{run.id}-Q4_K_M.gguf",
        f"{run.id}-Q4_K_M.gguf.parity.json",
    ]


def test_unknown_rules_of_a_tokenizer_are_refused(make_run: Make, tmp_path: Path) -> None:
    run = make_run("llama", adapter={})
    from engine.export.tokens_of_gguf import vocabulary

    path = tmp_path / "base/tokenizer.json"
    content = json.loads(path.read_text())
    assert vocabulary(tmp_path / "base", None, 6400).pre == "gpt-2"
    content["model"]["ignore_merges"] = True
    path.write_text(json.dumps(content))
    assert vocabulary(tmp_path / "base", None, 6400).pre == "gpt-2", "joining makes every token"
    joins = content["model"]["merges"]
    content["model"]["merges"] = joins[:-1]
    path.write_text(json.dumps(content))
    with pytest.raises(WorkbenchError, match=r"tokens that joining does not make"):
        vocabulary(tmp_path / "base", None, 6400)
    content["model"]["merges"], content["model"]["ignore_merges"] = joins, False
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "[0-9]{1,2}"}, "behavior": "Isolated", "invert": False}, content["pre_tokenizer"],
    ]}  # fmt: skip
    path.write_text(json.dumps(content))
    with pytest.raises(WorkbenchError, match=r"rules which llama.cpp does not have"):
        vocabulary(tmp_path / "base", None, 6400)
    assert source(run).adapted
