"""Rows show at once, a bad one is named with its place, and nothing is loaded that is not asked for."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.mapped import BLOCK, Lines
from engine.data.rows import open_rows
from engine.errors import DataError

Write = Callable[..., Path]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
json_rows = st.lists(st.dictionaries(st.text(), json_values, max_size=4), min_size=1, max_size=8)


def _written(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@settings(max_examples=60, deadline=None)
@given(rows=json_rows, ascii_only=st.booleans(), blank=st.booleans(), ending=st.sampled_from(["\n", "\r\n"]))
def test_jsonl_gives_back_every_row(
    tmp_path_factory: Any, rows: Any, ascii_only: bool, blank: bool, ending: str
) -> None:
    lines = [json.dumps(row, ensure_ascii=ascii_only) + ending * (2 if blank else 1) for row in rows]
    path = _written(tmp_path_factory.mktemp("rows"), "r.jsonl", "".join(lines).encode("utf-8", "surrogatepass"))
    opened = open_rows(path)
    assert list(opened) == rows


@settings(max_examples=60, deadline=None)
@given(rows=json_rows, indent=st.sampled_from([None, 2]), ascii_only=st.booleans())
def test_a_json_list_gives_back_every_row(tmp_path_factory: Any, rows: Any, indent: Any, ascii_only: bool) -> None:
    path = _written(
        tmp_path_factory.mktemp("rows"), "r.json", json.dumps(rows, indent=indent, ensure_ascii=ascii_only).encode()
    )
    assert list(open_rows(path)) == rows


cells = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from('\n",'), max_size=12)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(cells, cells), min_size=1, max_size=6))
def test_csv_gives_back_every_cell_with_quotes_and_line_breaks(tmp_path_factory: Any, rows: Any) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(["question", "answer"])
    writer.writerows(rows)
    path = _written(tmp_path_factory.mktemp("rows"), "r.csv", out.getvalue().encode())
    assert [(row["question"], row["answer"]) for row in open_rows(path)] == rows


def test_csv_without_a_header_names_its_columns(shared_data: Path) -> None:
    rows = open_rows(shared_data / "stsb/stsb_en_images_dev_250_headerless.csv")
    assert len(rows) == 250
    assert list(rows[0]) == ["column 1", "column 2", "column 3"]
    assert "first line is data" in rows.note


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", zstandard.compress)],
)
def test_compressed_files_read_like_plain_ones(write: Write, suffix: str, pack: Any) -> None:
    content = b"".join(json.dumps({"text": f"row {n}"}).encode() + b"\n" for n in range(3000))
    rows = open_rows(write(pack(content), f"rows.jsonl{suffix}"))
    assert rows.first(1) == [{"text": "row 0"}]
    assert len(rows) == 3000
    assert rows[2999] == {"text": "row 2999"}


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", zstandard.compress)],
)
def test_a_cut_compressed_file_says_so(write: Write, suffix: str, pack: Any) -> None:
    content = b"".join(json.dumps({"text": f"row {n} {hash(n * 7919)}"}).encode() + b"\n" for n in range(60000))
    path = write(pack(content)[:-500], f"rows.jsonl{suffix}")
    with pytest.raises(DataError, match=r"rows\.jsonl.*broken or cut off|middle|not a JSON"):
        list(open_rows(path))


def test_a_scratch_folder_of_no_use_is_named_where_rows_are_unpacked(write: Write, monkeypatch: Any) -> None:
    monkeypatch.setenv("WORKBENCH_SCRATCH", "/nowhere/at/all")
    with pytest.raises(DataError, match=r"unpacked into /nowhere/at/all: No such file") as told:
        list(open_rows(write(gzip.compress(b'{"text": "row"}\n'), "rows.jsonl.gz")))
    assert "WORKBENCH_SCRATCH" in told.value.hint


def test_parquet_and_saved_data_sets(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet
    from datasets import Dataset, DatasetDict

    made = [{"text": f"row {n}", "n": n} for n in range(1000)]
    parquet.write_table(arrow.Table.from_pylist(made), tmp_path / "rows.parquet", row_group_size=128)
    rows = open_rows(tmp_path / "rows.parquet")
    assert (len(rows), rows[0], rows[999], rows[128]) == (1000, made[0], made[999], made[128])
    Dataset.from_list(made).save_to_disk(tmp_path / "saved")
    assert open_rows(tmp_path / "saved")[7] == made[7]
    DatasetDict({"train": Dataset.from_list(made), "test": Dataset.from_list(made[:3])}).save_to_disk(tmp_path / "dict")
    assert len(open_rows(tmp_path / "dict")) == 1000


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.table({"text": ["a"] * 100}), tmp_path / "whole.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "whole.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cut\.parquet: not a whole Parquet file"):
        open_rows(tmp_path / "cut.parquet")
    from engine.config.data import DataSource
    from engine.data.gather_facts import inspect_source

    (tmp_path / "short.parquet").write_bytes(b"PAR1")
    (tmp_path / "empty.parquet").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.parquet")
    for name, told in (
        ("whole", ""),
        ("cut", "not a whole Parquet file (its end is missing)."),
        ("short", "not a whole Parquet file (its end is missing)."),
        ("empty", "the file is empty."),
        ("pipe", "is a named pipe. Write its rows to a file, and name that."),
    ):
        assert inspect_source(DataSource(path=f"{name}.parquet"), tmp_path).problem == told


GOOD = b'{"text": "one"}\n'


@pytest.mark.parametrize(
    ("content", "name", "sentence"),
    [
        (b"", "r.jsonl", r"r\.jsonl: the file is empty"),
        (b"\n \n\t\n", "r.jsonl", r"r\.jsonl: the file is empty"),
        (b"\xef\xbb\xbf", "r.jsonl", r"r\.jsonl: the file is empty"),
        (GOOD + b'{"text": "tw', "r.jsonl", r"r\.jsonl:2:10: not a JSON object: .*“\{\"text\": \"tw”"),
        (GOOD + b"\n" + b'{"text": bad}\n', "r.jsonl", r"r\.jsonl:3:10: not a JSON object: expecting value"),
        (GOOD + b'{"text": "caf\xe9"}\n', "r.jsonl", r"r\.jsonl:2:14: not UTF-8: byte 0xe9; near .*caf\\xe9"),
        (GOOD + b"[1, 2]\n", "r.jsonl", r"r\.jsonl:2:1: each row must be a JSON object; got a list: “\[1, 2\]"),
        (GOOD + b"instruction,output\n", "r.jsonl", r"r\.jsonl:2:1: not a JSON object"),
        (b'{"text": NaN}\n', "r.jsonl", r"r\.jsonl:1: NaN is not a JSON value"),
        (b'{"a": 1, "a": 2}\n', "r.jsonl", r"r\.jsonl:1: the key “a” stands twice"),
        (b'{"text": "\\ud800"}\n', "r.jsonl", r"r\.jsonl:1: half of a character"),
        (b'{"text": "a\x00b"}\n', "r.jsonl", r"r\.jsonl:1:12: not a JSON object: invalid control character"),
        (b'{\n"a": 1}\n{"a": 2}', "r.json", r"r\.json:2:8: text follows after the end of the object"),
        (b'{\n"a": 1', "r.json", r"r\.json:1:1: the file ends in the middle of this row"),
        (b'[{"a": 1},\n{"a": 2},\n]', "r.json", r"r\.json:2:9: a comma stands after the last row of the list"),
        (b'[{"a": 1},, {"a": 2}]', "r.json", r"r\.json:1:11: a row is missing before this comma"),
        (b'[, {"a": 1}]', "r.json", r"r\.json:1:2: a row is missing before this comma"),
        (b'[{"a": 1} {"a": 2}]', "r.json", r"r\.json:1:11: a comma is missing before this row"),
        (b'[{"a": 1}, 5, {"a": 2}]', "r.json", r"r\.json:1:12: each row must be a JSON object; got a number: “5”"),
        (b'[{"a": 1}, null]', "r.json", r"r\.json:1:12: each row must be a JSON object; got null"),
        (b'[{"a": 1}, {"a": 2', "r.json", r"r\.json:1:12: the file ends in the middle of this row"),
        (b'[{"a": 1}]\n{"a": 2}', "r.json", r"r\.json:1:11: text follows after the end of the list"),
        (b'[{"a": 1},\n {"a": x}]', "r.json", r"r\.json:2:8: not a JSON object"),
        (b"a,b\n1,2,3\n", "r.csv", r"r\.csv:2: 3 fields where the first line names 2 columns"),
        (b'a,b\n"1,2\n', "r.csv", r"r\.csv:2:1: a quote opened in this row is never closed"),
        (b"a,a\n1,2\n", "r.csv", r"r\.csv:1: two columns have one name"),
        (b"a,b\r1,2\r", "r.csv", r"r\.csv:1: no row of a table \(new-line character seen in unquoted field\)"),
        (b'{"a": 1}\n' + b"\0" * 4096, "r.jsonl", r"r\.jsonl:2:1: 4,096 zero bytes stand in the place of a row"),
        (b"a,b\n1,caf\xe9\n", "r.csv", r"r\.csv:2:6: not UTF-8"),
        (b"one\n\xff\xfe\n", "r.txt", r"r\.txt:2:1: not UTF-8: byte 0xff"),
    ],
)
def test_a_bad_file_is_one_sentence_with_the_place(write: Write, content: bytes, name: str, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        list(open_rows(write(content, name)))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_only_the_bad_row_is_bad(write: Write, position: str) -> None:
    rows = [GOOD] * 9
    bad = {"first": 0, "middle": 4, "last": 8}[position]
    rows[bad] = b"{broken}\n"
    opened = open_rows(write(b"".join(rows)))
    assert len(opened) == 9
    for index in range(9):
        if index == bad:
            with pytest.raises(DataError, match=f":{bad + 1}:2:"):
                opened[index]
        else:
            assert opened[index] == {"text": "one"}


@pytest.mark.parametrize("name", ["rows.pkl", "rows.zip", "rows.py", "rows.tar.gz", "rows.pt"])
def test_archives_pickles_and_scripts_are_refused_by_name(write: Write, name: str) -> None:
    with pytest.raises(DataError, match=r"is an archive|is a pickle|is a script"):
        open_rows(write(b"anything", name))


def test_a_missing_file_a_folder_and_an_unreadable_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        open_rows(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match="is a folder"):
        open_rows(tmp_path)


def test_escape_sequences_in_rows_and_names_come_out_visible(write: Write) -> None:
    path = write(b'{"text": "\x1b[31m', "a\x1b[2Jb.jsonl")
    with pytest.raises(DataError) as caught:
        list(open_rows(path))
    assert "\x1b" not in caught.value.message
    assert "a␛[2Jb.jsonl" in caught.value.message


def test_text_rows_are_paragraphs_or_lines(write: Write, shared_data: Path) -> None:
    assert [row["text"] for row in open_rows(write("one\ntwo\n\n\nthree\n", "p.txt"))] == ["one\ntwo", "three"]
    assert [row["text"] for row in open_rows(write("one\r\ntwo\r\n", "l.txt"))] == ["one", "two"]
    assert len(open_rows(shared_data / "llama-factory/wiki_demo.txt")) == 30


def test_byte_order_mark_and_lists_in_jsonl_files(write: Write) -> None:
    assert list(open_rows(write(b"\xef\xbb\xbf" + GOOD))) == [{"text": "one"}]
    assert list(open_rows(write(b'[{"a": 1}, {"a": 2}]', "list.jsonl"))) == [{"a": 1}, {"a": 2}]
    assert list(open_rows(write(b'{"a": 1}\n{"a": 2}\n', "lines.json"))) == [{"a": 1}, {"a": 2}]


def test_a_row_of_100_megabytes_is_looked_at_without_being_parsed(write: Write) -> None:
    path = write(GOOD + b'{"text": "' + b"x" * 100_000_000 + b'"}\n' + GOOD)
    code = (
        "import resource, sys\n"
        "from engine.data.rows import open_rows\n"
        "rows = open_rows(sys.argv[1])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert rows.first(1) == [{'text': 'one'}] and len(rows) == 3\n"
        "assert rows.size(1) > 100_000_000 and len(rows.text(1)) == 65536 and rows[2] == {'text': 'one'}\n"
        "with open('/proc/self/status') as status:\n"
        "    print(next(line for line in status if line.startswith('RssAnon')).split()[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) < 60_000  # kilobytes of memory that are not the mapped file


def test_reading_rows_imports_no_heavy_library(write: Write) -> None:
    code = (
        "import sys\n"
        "from engine.data.rows import open_rows\n"
        "from engine.data.detect import detect\n"
        "assert detect(open_rows(sys.argv[1])).format == 'text'\n"
        "heavy = {'torch', 'transformers', 'datasets', 'trl', 'pandas', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code, str(write(GOOD))], check=True, timeout=60)


def test_lines_of_places_far_into_a_large_file_are_exact_and_counted_once() -> None:
    text = b"".join(b"x" * (number % 500) + b"\n" for number in range(20_000))
    assert len(text) > 4 * BLOCK
    lines = Lines(text)
    for offset in (0, 1, len(text) - 1, BLOCK, BLOCK - 1, 3 * BLOCK + 7, 5, len(text)):
        before = text[:offset]
        assert lines.place(offset) == (before.count(b"\n") + 1, offset - (before.rfind(b"\n") + 1) + 1)
    began = time.process_time()
    for _ in range(2000):
        lines.place(len(text) - 1)
    assert time.process_time() - began < 2000 * 0.001, "a place costs a part of one block, not the file"


def test_a_picture_named_as_rows_is_told_with_a_way_out(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from engine.data.gather_facts import inspect_source

    (tmp_path / "cat.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")
    entry = SimpleNamespace(path="cat.png", columns={}, properties={}, roles={}, format=None)
    problem = inspect_source(entry, tmp_path).bad_row
    assert problem.startswith("line 1:1: not UTF-8: byte 0x89")
    assert problem.endswith(". Convert the file, for example with iconv -t UTF-8.")


def test_one_object_over_several_lines_is_one_row(write: Write) -> None:
    text = b'{\n "text": "one",\n "more": [1, {"a": "}"}]\n}\n'
    for name in ("one.json", "one.jsonl"):
        assert list(open_rows(write(text, name))) == [{"text": "one", "more": [1, {"a": "}"}]}]


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero"])
def test_a_device_is_named_and_not_read(path: str) -> None:
    with pytest.raises(DataError, match="is a device"):
        open_rows(path)
