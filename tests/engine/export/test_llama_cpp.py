"""llama.cpp itself opens what was exported: the same ids, the logits of the trained model, K-quants by its own hand."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.export import parity
from engine.export.__main__ import _config
from engine.export.folder import Model
from engine.export.making import make
from engine.export.places import places, source
from engine.export.tokens_of_gguf import RULES
from engine.run.store import RunFolder
from tests.engine.export.test_forms import FAMILIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not here: a compiler makes it"
    ),
]
WIDE = {"hidden_size": 256, "intermediate_size": 512}


def exported(run: RunFolder, folder: Path, quant: str) -> dict[str, Any]:
    place = places(run, ["gguf"], folder, quant)["gguf"]
    asked = {"quant": quant, "places": {"gguf": str(place)}}
    return make(Model(source(run), _config(run)), "gguf", place, asked, lambda *_: None)["parity"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_answers_in_llama_cpp_as_it_was_trained(
    make_run: Callable[..., RunFolder], tmp_path: Path, shared_data: Path, family: str
) -> None:
    spm = family in ("gemma", "gemma2", "gemma3_text", "phi3")
    tokenizer = shared_data / ("weights/tinystories-llama-260k" if spm else "tokenizers/minimind")
    run = make_run(family, adapter={}, tokenizer=tokenizer, **{**FAMILIES[family], **WIDE})
    # In F32 nothing is rounded, neither by the export nor by llama.cpp but for the GELU table of Gemma: what is left tells of the file.
    bound = 1e-3 if family.startswith("gemma") else 1e-5
    assert exported(run, tmp_path / "F32", "F32")["logits_error"] < bound
    for quant in ("F16", "BF16", "Q8_0"):
        found = exported(run, tmp_path / quant, quant)
        assert found["reader"] == "gguf and llama.cpp"
        assert found["probes"] > 5
        assert found["file_error"] < bound, "both compute with the file's numbers, in float32"
        assert found["logits_error"] < 0.1
        assert found["divergence"] < 1e-2


def words_of(steps: tuple[str, ...], whole_words: bool, text: str) -> Any:
    """A tokenizer that cuts texts by these steps, trained on `text`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    kinds: dict[str, Callable[[], Any]] = {
        "bytes+words": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
        "bytes": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        "digits": lambda: pre_tokenizers.Digits(individual_digits=True),
    }
    parts = [
        pre_tokenizers.Split(Regex(step[6:]), "isolated") if step.startswith("split ") else kinds[step]()
        for step in steps
    ]
    made = Tokenizer(models.BPE(ignore_merges=whole_words))
    made.pre_tokenizer = parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    made.train_from_iterator([text, *parity.PROBES * 3], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>")


@pytest.mark.parametrize(
    ("steps", "name", "whole_words"),
    [(steps, name, words) for steps, names in RULES.items() for name, words in names],
    ids=[name for names in RULES.values() for name, _ in names],
)
def test_llama_cpp_cuts_texts_as_each_known_tokenizer_does(
    make_run: Callable[..., RunFolder],
    tmp_path: Path,
    shared_data: Path,
    steps: tuple[str, ...],
    name: str,
    whole_words: bool,
) -> None:
    import gguf

    text = next((shared_data / "tinyshakespeare").glob("*.txt")).read_text()[:100_000]
    words_of(steps, whole_words, text).save_pretrained(tmp_path / "words")
    run = make_run("llama", adapter={}, tokenizer=tmp_path / "words", **WIDE)
    found = exported(run, tmp_path / "out", "F16")
    assert found["probes"] > 5
    file = next((tmp_path / "out").glob("*.gguf"))
    assert gguf.GGUFReader(file).get_field("tokenizer.ggml.pre").contents() == name


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_q8_0_is_to_the_byte_what_llama_cpp_makes_of_the_same_numbers(
    make_run: Callable[..., RunFolder], tmp_path: Path, shared_data: Path, family: str
) -> None:
    """So what Q8_0 costs a model, more or less than 0.001 nats, is the format's cost and none of ours."""
    import gguf

    from engine.export import llama_cpp

    tokenizer = shared_data / ("weights/tinystories-llama-260k" if family == "gemma2" else "tokenizers/minimind")
    run = make_run(family, adapter={}, tokenizer=tokenizer, **{**FAMILIES[family], **WIDE})
    for quant in ("F32", "Q8_0"):
        exported(run, tmp_path / quant, quant)
    llama_cpp.quantize(next((tmp_path / "F32").glob("*.gguf")), tmp_path / "theirs.gguf", "Q8_0")
    ours, theirs = (
        {each.name: (each.tensor_type, each.data.tobytes()) for each in gguf.GGUFReader(file).tensors}
        for file in (next((tmp_path / "Q8_0").glob("*.gguf")), tmp_path / "theirs.gguf")
    )
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_k_quants_are_told_with_what_they_lose(make_run: Callable[..., RunFolder], tmp_path: Path) -> None:
    run = make_run("llama", adapter={}, **WIDE)
    lost = {}
    for quant, kind in (("Q6_K", "Q6_K"), ("Q4_K_M", "Q4_K"), ("Q2_K", "Q2_K")):
        found = exported(run, tmp_path / quant, quant)
        assert found["formats"][kind] > 5
        assert found["file_error"] < 1e-5
        lost[quant] = found["divergence"]
    assert 0 < lost["Q6_K"] < lost["Q4_K_M"] < lost["Q2_K"]


@pytest.mark.parametrize(
    ("quant", "room", "said"), [("F16", False, "its logits are"), ("Q4_K_M", True, "its logits in float32 are")]
)
def test_a_file_that_answers_otherwise_is_no_export(
    make_run: Callable[..., RunFolder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quant: str,
    room: bool,
    said: str,
) -> None:
    """The header alone is changed, which no comparison of weights and tokens sees; of few bits only one that rounds nothing."""
    from engine.export import families_of_gguf, to_gguf

    if not room:
        monkeypatch.setattr(to_gguf, "_in_float32", lambda *_: "no room")
    run = make_run("llama", adapter={}, **WIDE)
    honest = families_of_gguf._rope
    monkeypatch.setattr(families_of_gguf, "_rope", lambda config: {**honest(config), "rope_theta": 77.0})
    with pytest.raises(parity.ParityError, match=f"opened by llama.cpp, {said}"):
        exported(run, tmp_path / "out", quant)
    assert not list((tmp_path / "out").glob("*"))
