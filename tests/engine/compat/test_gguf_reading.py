"""gguf's reader over plain arrays gives what gguf's own gives, and asks for each piece of a file where it is replaced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from engine.compat.gguf_reading import QuickReader  # noqa: E402


def test_every_field_and_tensor_is_that_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "ü", "", "<end>"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1, 1, 3])
    writer.add_string("empty", "")
    writer.add_float32("rate", 0.5)
    writer.add_tensor("wide", np.arange(64, dtype=np.float32).reshape(4, 16))
    packed = gguf.quants.quantize(
        np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = gguf.GGUFReader(file)
    monkeypatch.setattr(gguf.GGUFReader, "_get", None)  # every piece is asked for in the place that is replaced
    ours = QuickReader(file)
    assert list(ours.fields) == list(theirs.fields)
    monkeypatch.undo()
    for name, field in theirs.fields.items():
        assert ours.fields[name].contents() == field.contents(), name
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert (mine.name, list(mine.shape), mine.tensor_type) == (other.name, list(other.shape), other.tensor_type)
        assert mine.data.dtype == other.data.dtype
        np.testing.assert_array_equal(mine.data, other.data)
    assert not isinstance(ours.tensors[0].data, np.memmap), "a slice of a memory map is what takes long"
    assert not ours.tensors[0].data.flags.writeable
