"""The built-in model: an ordinary folder, made once however many ask, whole or absent, and around any vocabulary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.builtin import dates, tiny
from engine.errors import ModelError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        return tiny.folder()


def test_it_loads_as_any_model_folder_does_and_has_the_shape_it_says(made: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    assert model.dtype == torch.float32
    config = json.loads((made / "config.json").read_text())
    assert {key: config[key] for key in tiny.shape()} == tiny.shape()
    assert config["vocab_size"] == len(tokenizer) == model.get_input_embeddings().num_embeddings
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000


@pytest.mark.parametrize(
    "text", ["What is 3 March 2021 in ISO form?", "Grüße, 世界 🎉\n\tdef f(x):  return 'a'  # 007", " "]
)
def test_its_tokenizer_gives_every_text_back_unchanged(made: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_its_vocabulary_fits_dates_and_every_pair_of_digits_is_one_token(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert {f"{number:02}" for number in range(100)} <= set(tokenizer.get_vocab())
    assert tokenizer.tokenize("2021-03-03") == ["20", "21", "-", "03", "-", "03"]
    lengths = [
        len(tokenizer.apply_chat_template(row["messages"])["input_ids"]) for row in dates.rows("eval", count=200)
    ]
    assert max(lengths) <= 48


def test_its_chat_template_renders_turns_parts_and_tool_calls(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Which day?"}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "day", "arguments": {"of": 1}}}]},
        {"role": "tool", "content": "Monday"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhich day?<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>\n{"name": "day", "arguments": {"of": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nMonday<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_it_is_the_same_model_in_every_cache_and_making_it_draws_no_random_number(cache: Path, made: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    again = tiny.folder()
    assert torch.equal(torch.rand(3), expected)
    assert again != made
    assert again.name == made.name
    for name in ("model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"):
        assert (again / name).read_bytes() == (made / name).read_bytes(), name


def test_a_process_that_was_not_forked_calls_it_by_the_same_name(made: Path) -> None:
    code = "from engine.builtin import tiny; print(tiny._digest(tiny._recipe()))"
    other = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert made.name == f"tiny-{other.stdout.strip()}"


def test_processes_that_ask_at_once_get_one_whole_folder(cache: Path) -> None:
    # Forked, not started: both have all imported and are at work in the same moment.
    several = [get_context("fork").Process(target=tiny.folder) for _ in range(2)]
    for process in several:
        process.start()
    for process in several:
        process.join(120)
    assert [process.exitcode for process in several] == [0, 0]
    assert [path.name for path in (cache / "builtin").iterdir()] == [tiny.folder().name]


def test_a_second_call_makes_nothing_and_a_damaged_folder_is_made_anew(cache: Path) -> None:
    first = tiny.folder()
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert tiny.folder() == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    (first / "tokenizer.json").unlink()
    assert tiny.folder() == first
    AutoTokenizer.from_pretrained(first)
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_one_who_comes_second_leaves_the_first_ones_folder_alone(cache: Path) -> None:
    target = cache / "builtin" / "tiny-x"
    with tiny._aside(target) as late:
        (late / "config.json").write_text("late")
        with tiny._aside(target) as early:
            for name in ("config.json", "model.safetensors", "tokenizer.json"):
                (early / name).write_text("early")
    assert (target / "config.json").read_text() == "early"
    assert [path.name for path in target.parent.iterdir()] == ["tiny-x"]


def test_with_another_tokenizer_it_has_that_vocabulary(cache: Path, shared_data: Path) -> None:
    other = shared_data / "tokenizers" / "minimind"
    made = tiny.folder(other)
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert (
        tokenizer("A day in March")["input_ids"] == AutoTokenizer.from_pretrained(other)("A day in March")["input_ids"]
    )
    model = AutoModelForCausalLM.from_pretrained(made)
    assert model.config.vocab_size == len(tokenizer) == 6400
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert tiny.folder(other) == made != tiny.folder()


def test_a_tokenizer_that_is_none_is_one_sentence(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"model\.tokenizer: no tokenizer can be read from .*empty") as caught:
        tiny.folder(tmp_path / "empty")
    assert "\n" not in caught.value.message
    assert not (cache / "builtin").exists()


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/self").exists(), reason="needs a path that cannot be written")
def test_a_cache_that_cannot_be_written_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", "/proc/self/nowhere")
    with pytest.raises(ModelError, match="cannot be written into the cache") as caught:
        tiny.folder()
    assert "WORKBENCH_CACHE" in caught.value.hint
