"""`workbench check` reads a model's own files: what would end the run at its start is told before it is started, without torch."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.builtin import tiny
from tests import warm

Change = Callable[[Path], None]


@pytest.fixture(scope="session")
def whole() -> Path:
    return tiny.folder()


def check(folder: Path, base: Path, **sections: Any) -> tuple[int, list[dict[str, str]], str]:
    """Exit code, errors and all that was written by `check --json` in a process of its own, which must not load torch."""
    config = {"model": {"name": str(folder), "dtype": "float32"}, "data": {"train": "builtin/dates"}, **sections}
    file = base / "my.yaml"
    file.write_text(json.dumps(config))
    code = (
        "import sys\nfrom workbench.cli.check import command\n"
        "code = command.main(sys.argv[1:], standalone_mode=False)\n"
        "assert not {'torch', 'transformers', 'safetensors'} & sys.modules.keys()\nsys.exit(code)"
    )
    done = warm.command(str(file), "--json", code=code)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    found = json.loads(done.stdout)["findings"]
    return done.returncode, [each for each in found if each["severity"] == "error"], done.stdout + done.stderr


def edited(name: str, **entries: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / name
        content = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({**content, **entries}))

    return change


def index(**weights: str) -> Change:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        held = dict.fromkeys(names(folder / "part.safetensors"), "part.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**held, **weights}}))

    return change


def names(file: Path) -> list[str]:
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        return [name for name in json.loads(stream.read(size)) if name != "__metadata__"]


def rewritten(change: Callable[[dict[str, Any]], None]) -> Change:
    """The weights with another header, its places as they are."""

    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        content = file.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])

    return apply


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)


def halved(name: str) -> Change:
    def change(folder: Path) -> None:
        os.truncate(folder / name, (folder / name).stat().st_size // 2)

    return change


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1\n")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()


def deep(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 5000 + "]" * 5000)


def deep_generation(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"a":' * 200 + "1" + "}" * 200)


def renamed(header: dict[str, Any]) -> None:
    name = "model.layers.2.self_attn.q_proj.weight"
    header["model.layers.2.self_attn.other.weight"] = header.pop(name)


def reshaped(header: dict[str, Any]) -> None:
    header["model.embed_tokens.weight"]["shape"].reverse()


def many_tokens(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] |= {f"word{number}": 600 + number for number in range(50)}
    file.write_text(json.dumps(content))


REFUSED: dict[str, tuple[Change, str]] = {
    "pickles alone": (pickled, "holds no safetensors weights, only pickles such as pytorch_model.bin"),
    "cut": (cut, "model.safetensors: is cut: "),
    "a cut tokenizer": (halved("tokenizer.json"), "tokenizer.json: is cut, or no JSON"),
    "a cut config": (halved("config.json"), "Copy or download it again."),
    "a pointer of Git LFS": (pointer, "is a pointer of Git LFS, not the file itself. Run `git lfs pull`"),
    "an index with a pickle": (index(more="evil.bin"), "names evil.bin, which is no safetensors file"),
    "an index that leads out": (index(more="../outside.safetensors"), "names ../outside.safetensors, which leads out"),
    "an index with a file that is not there": (
        index(more="model-2.safetensors"),
        "names model-2.safetensors, which is not",
    ),
    "a lacking weight": (rewritten(renamed), "hold no model.layers.2.self_attn.q_proj.weight, so it would start from"),
    "another shape": (
        rewritten(reshaped),
        "model.embed_tokens.weight has the shape 64 x 512, and its config.json wants",
    ),
    "an unknown architecture": (
        edited("config.json", model_type="qwen99"),
        "no AutoModelForCausalLM for models of type qwen99",
    ),
    "a kernel": (edited("config.json", _attn_implementation="owner/kernel"), "would fetch a kernel from the hub"),
    "a kernel within": (
        edited("config.json", text={"deep": {"attn_implementation": {"": "owner/kernel@main"}}}),
        "would fetch a kernel from the hub",
    ),
    "experts by a kernel": (edited("config.json", _experts_implementation="a/b"), "would fetch a kernel from the hub"),
    "code in the config": (edited("config.json", text={"auto_map": {"AutoConfig": "evil.C"}}), "would run code"),
    "code in the generation config": (edited("generation_config.json", trust_remote_code=True), "would run code"),
    "code in the tokenizer": (
        edited("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]}),
        "would run code",
    ),
    "code in the processor": (edited("processor_config.json", sub={"trust_remote_code": True}), "would run code"),
    "an internal field": (edited("config.json", a={"_attn_implementation_internal": "sdpa"}), "would run code"),
    "weights elsewhere": (edited("config.json", transformers_weights="../x.safetensors"), "leads out of the folder"),
    "a tokenizer elsewhere": (
        edited("tokenizer_config.json", fast_tokenizer_files=["../t.json"]),
        "leads out of the folder",
    ),
    "an adapter beside it": (
        edited("adapter_config.json", base_model_name_or_path="x/y"),
        "holds a model and an adapter",
    ),
    "depth": (deep, "nests more than 32 levels deep"),
    "depth beside the config": (deep_generation, "generation_config.json: nests more than 32 levels deep"),
    "no tokenizer": (without_tokenizer, "holds no tokenizer"),
    "more tokens than weights": (many_tokens, "knows 650 tokens and the model has weights for 512"),
}


def test_a_whole_model_folder_is_taken(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "model")
    assert check(tmp_path / "model", tmp_path)[:2] == (0, [])


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_folder_that_cannot_be_trained_is_refused_by_its_files(case: str, whole: Path, tmp_path: Path) -> None:
    change, words = REFUSED[case]
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    change(folder)
    code, errors, written = check(folder, tmp_path)
    assert code == 1
    assert any(words in each["message"] for each in errors), errors
    assert len(errors) == 1, "what is wrong is told once"
    assert all(each["path"] == "model.name" for each in errors)
    assert "Traceback" not in written


@pytest.mark.parametrize(
    ("sections", "place", "words"),
    [
        ({"adapter": {"kind": "lora", "bias": "all"}}, "adapter.bias", "hold no bias vectors"),
        (
            {"adapter": {"kind": "lora", "modules_to_save": ["embed_token"]}},
            "adapter.modules_to_save.0",
            "Did you mean embed_tokens?",
        ),
        ({"model.chat_template": "gone.jinja"}, "model.chat_template", "got gone.jinja"),
        ({"model.chat_template": "chatmll"}, "model.chat_template", "got chatmll"),
    ],
)
def test_what_a_config_asks_of_a_model_is_held_against_its_files(
    whole: Path, tmp_path: Path, sections: dict[str, Any], place: str, words: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    model = {"name": str(folder), "dtype": "float32"}
    for path in [name for name in sections if name.startswith("model.")]:
        model[path.removeprefix("model.")] = sections[path]
    rest = {name: value for name, value in sections.items() if "." not in name}
    code, errors, _ = check(folder, tmp_path, model=model, **rest)
    assert (code, [each["path"] for each in errors]) == (1, [place])
    assert words in errors[0]["message"]


def test_a_scratch_folder_that_is_not_there_is_told(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_SCRATCH", str(tmp_path / "gone"))
    memory = {"activation_offloading": "disk"}
    _, errors, _ = check(whole, tmp_path, memory=memory)
    assert [each["path"] for each in errors] == ["memory.activation_offloading"]
    assert "WORKBENCH_SCRATCH names a folder that cannot be used: there is no such folder" in errors[0]["message"]
    assert check(whole, tmp_path)[:2] == (0, [])
