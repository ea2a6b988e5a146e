"""Data sets of the hub as streams: read by parts, from any row, at the commit that they were begun with, faults in a sentence."""

from __future__ import annotations

import functools
import gzip
import io
import json
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants, hf_file_system

import engine.hub
from engine.config.data import Data, DataSource
from engine.config.method import METHODS
from engine.config.model import Model
from engine.data.hub_fetch import hub_rows
from engine.data.hub_sets import hub_files, is_hub_set, raises_data_error, rows_by_parts
from engine.data.plan import plan_of
from engine.data.streaming import stream as streams
from engine.data.streaming.files import Files, _cut, _members, streamed_plan
from engine.data.streaming.order import Walk
from engine.errors import DataError
from engine.hub import Commits, transport_error
from tests.data_hub import DataHub, data_hub

NAMES = [f"data/train-0000{number}-of-00006" for number in range(6)]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[DataHub]:
    """A hub of data sets, with nothing of it here; shards are small, and few are prepared ahead."""
    with data_hub() as server:
        for place, value in {
            "ENDPOINT": server.address, "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HUGGINGFACE_CO_URL_TEMPLATE": server.address + "/{repo_id}/resolve/{revision}/{filename}",
        }.items():  # fmt: skip
            monkeypatch.setattr(constants, place, value)
        monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.address)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
        monkeypatch.setattr(engine.hub, "COMMITS", Commits())
        hf_file_system.HfFileSystem.clear_instance_cache()  # a port may come again, and with it what was listed there
        monkeypatch.setattr("engine.data.columnar._footers", OrderedDict())
        quick = functools.partial(hf_file_system.http_backoff, max_retries=1, base_wait_time=0.01)
        monkeypatch.setattr(hf_file_system, "http_backoff", quick)
        monkeypatch.setattr("engine.data.streaming.cuts.BYTES", 30_000)
        monkeypatch.setattr("engine.data.streaming.cuts.BLOCK", 120_000)
        monkeypatch.setattr("engine.data.hub_sets.BLOCK", 120_000)
        monkeypatch.setattr("engine.data.streaming.cuts.ROWS", 7)
        yield server


@pytest.fixture
def opened(gpt2: Any) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(steps: int | None = 9, **source: Any) -> Any:
        config = SimpleNamespace(
            model=Model(name="builtin/tiny"),
            data=Data(train=[DataSource(**{"path": "me/rows", **source})], streaming=True, max_length=64),
            method=METHODS["pretrain"].model_construct(),
            run=SimpleNamespace(seed=3),
            optim=SimpleNamespace(max_steps=steps, num_train_epochs=2.0),
        )
        made.append(streams.open_stream(config, gpt2))
        return made[-1].stream

    make.made = made
    yield make
    for each in made:
        each.stream.close()


def texts(count: int, word: str = "row") -> list[dict[str, str]]:
    """Rows beside a column that nobody learns, as wide as that of a picture."""
    draw = random.Random(0)
    return [
        {"text": f"{word} {number} " + "x" * (number % 40), "pad": draw.randbytes(3000).hex()}
        for number in range(count)
    ]


def packed(rows: list[dict[str, str]], kind: str) -> bytes:
    if kind == "parquet":
        written = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), written, row_group_size=30, compression="none")
        return written.getvalue()
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return gzip.compress(lines) if kind.endswith("gz") else lines


def put(hub: DataHub, kind: str, word: str = "row", count: int = 300) -> str:
    rows, size = texts(count, word), count // len(NAMES)
    return hub.put(
        "me/rows",
        {
            f"{name}.{kind}": packed(rows[number * size : (number + 1) * size], kind)
            for number, name in enumerate(NAMES)
        },
    )


def said(rows: Any, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(row["input_ids"]).split(" x")[0].removesuffix("<|endoftext|>").strip() for row in rows]


@pytest.mark.parametrize("kind", ["parquet", pytest.param("jsonl", marks=pytest.mark.slow), "jsonl.gz"])
def test_a_set_is_streamed_from_any_row_and_never_fetched_first(hub, opened, gpt2, monkeypatch, kind):
    monkeypatch.setattr("engine.data.streaming.producer.AHEAD", 2)
    put(hub, kind)
    stream = opened(steps=None if kind == "parquet" else 9)
    whole = sum(len(content) for content in hub.sets["me/rows"][0].values())
    first = [next(iter(stream)) for _ in range(20)]
    if not kind.endswith("gz"):  # a buffer of a megabyte holds all of these
        assert (
            sum(last - start + 1 for _, start, last in hub.parts()) < whole * 0.9
        )  # what is read ahead meanwhile is in it
    place = json.loads(json.dumps(stream.state()))
    rest = [stream.next_row() for _ in range(580)]
    assert Counter(said([*first, *rest], gpt2)) == {f"row {number}": 2 for number in range(300)}
    again = opened(steps=None if kind == "parquet" else 9)
    again.go_to(place)
    assert [again.next_row() for _ in range(580)] == rest


def test_a_stream_of_parquet_on_the_hub_is_that_of_its_files_here(hub, opened, gpt2, tmp_path):
    put(hub, "parquet")
    folder = tmp_path / "here"
    folder.mkdir()
    for name, content in hub.sets["me/rows"][0].items():
        (folder / Path(name).name).write_bytes(content)
    far, near = opened(steps=None), opened(steps=None, path=str(folder))
    assert said(far, gpt2) == said(near, gpt2)
    asked = Counter(part for part in hub.parts())
    assert max(asked.values()) <= 4  # a row group for each epoch and each of two streams' looks; a footer once


def test_a_run_goes_on_with_the_commit_that_it_began_with(hub, opened, gpt2, monkeypatch):
    noted: list[str] = []
    engine.hub.COMMITS.keep(None, noted.append)
    began = put(hub, "parquet")
    stream = opened()
    first = [stream.next_row() for _ in range(10)]
    place = stream.state()
    rest = [stream.next_row() for _ in range(50)]
    now = put(hub, "parquet", "other")
    assert json.loads(noted[-1]) == {"datasets/me/rows@main": began}
    monkeypatch.setattr(engine.hub, "COMMITS", Commits())
    engine.hub.COMMITS.keep(noted[-1].encode(), noted.append)
    again = opened()
    again.go_to(place)
    assert [again.next_row() for _ in range(50)] == rest
    monkeypatch.setattr(engine.hub, "COMMITS", Commits())
    assert said([opened().next_row()], gpt2)[0].startswith("other")
    assert said([opened(revision=began).next_row()], gpt2) == said(first[:1], gpt2)
    assert {file.url.partition("@")[2][:40] for file in hub_files("me/rows", "train", revision=now) or ()} == {now}


def test_connections_that_break_off_cost_no_row(hub, opened, gpt2):
    put(hub, "jsonl")
    stream = opened()
    hub.drops = 1
    assert Counter(said([stream.next_row() for _ in range(300)], gpt2)) == {f"row {number}": 1 for number in range(300)}
    assert hub.drops == 0


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_hub_that_stalls_or_loses_a_file_is_named_with_the_file(hub, opened, monkeypatch, kind):
    monkeypatch.setattr("engine.data.streaming.producer.AHEAD", 1)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    put(hub, kind)
    stream = opened()
    stream.next_row()
    hub.stalls = 1.0
    with pytest.raises(
        DataError, match=rf"hf://datasets/me/rows@\w+/data/train-\S+\.{kind}: cannot be read from the hub"
    ):
        list(stream)
    hub.stalls = 0
    stream = opened()
    stream.next_row()
    hub.sets["me/rows"][0].clear()
    with pytest.raises(DataError, match=rf"data/train-\S+\.{kind}: is gone from the hub"):
        list(stream)


def test_so_many_files_that_their_lengths_are_not_asked_for_are_read_one_after_the_other(
    hub, opened, gpt2, monkeypatch
):
    monkeypatch.setattr("engine.data.streaming.files.FOOTERS", 2)
    monkeypatch.setattr("engine.data.streaming.producer.AHEAD", 1)
    put(hub, "parquet")
    stream = opened()
    assert len({name for name, *_ in hub.parts()}) < len(NAMES)
    rows = said([stream.next_row() for _ in range(600)], gpt2)
    assert Counter(rows) == {f"row {number}": 2 for number in range(300)}
    assert rows[:300] != rows[300:]
    assert stream.epochs_over == 2


@pytest.mark.parametrize("many", [True, False])
def test_an_empty_file_of_parquet_among_others_costs_nothing_and_a_set_of_such_is_a_sentence(
    hub, opened, gpt2, monkeypatch, many
):
    if many:
        monkeypatch.setattr("engine.data.streaming.files.FOOTERS", 2)
    put(hub, "parquet")
    empty = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(texts(1)).slice(0, 0), empty)
    for name in (NAMES[2], NAMES[5]):
        hub.sets["me/rows"][0][f"{name}.parquet"] = empty.getvalue()
    stream = opened()
    assert Counter(said([stream.next_row() for _ in range(400)], gpt2)) == {
        f"row {number}": 2 for number in range(300) if number // 50 not in (2, 5)
    }
    assert len(rows_by_parts("me/rows", "train") or ()) == 200
    if not many:
        few = opened(rows=120)
        assert set(Counter(said([few.next_row() for _ in range(240)], gpt2)).values()) == {2}, "120 rows, twice"
        hub.put("me/empty", {"train-0.parquet": empty.getvalue(), "train-1.parquet": empty.getvalue()})
        for look in (lambda: opened(path="me/empty"), lambda: rows_by_parts("me/empty", "train")):
            with pytest.raises(DataError, match="me/empty: the data set holds no rows") as raised:
                look()
            assert raised.value.hint == "Name another split or subset."


def test_a_bad_line_is_named_by_file_and_byte(hub, opened):
    good = packed(texts(40), "jsonl")
    hub.put("me/rows", {"train.jsonl": good + b'{"text": no}\n' + good})
    with pytest.raises(
        DataError, match=rf"/train\.jsonl: the row at byte {len(good):,}: not a JSON object.*near “.*no"
    ):
        list(opened())


@pytest.mark.parametrize(
    ("source", "told", "todo"),
    [
        ({"path": "me/none"}, "me/none: is no local file, and the hub has no such data set that you may read", "auth login"),
        ({"path": "me/gated"}, "me/gated: is a gated data set of the hub, which you may not read", "Ask for access on"),
        ({"split": "dev"}, "me/rows: holds the splits train; there is no dev", "Name one of them with split"),
        ({"revision": "v9"}, "me/rows: has no such revision on the hub", "a branch, a tag or a commit"),
        ({"path": "me/two"}, "me/two: has the subsets main, other, and none is named", "with subset"),
        ({"path": "me/two", "subset": "old"}, "me/two: has the subsets main, other, and no such one", "with subset"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_one_sentence(hub, opened, source, told, todo):
    put(hub, "parquet")
    card = "---\nconfigs:\n" + "".join(f"- config_name: {name}\n  data_files: a.jsonl\n" for name in ("main", "other"))
    hub.put("me/two", {"README.md": f"{card}---\n".encode(), "a.jsonl": packed(texts(9), "jsonl")})
    hub.put("me/gated", {"train.jsonl": packed(texts(9), "jsonl")})
    hub.gated.add("me/gated")
    with pytest.raises(DataError, match=told) as raised:
        opened(**source)
    assert todo in raised.value.hint
    assert "\n" not in raised.value.full_message


@pytest.mark.parametrize(
    ("source", "found", "told"),
    [
        ({"split": "train[:20]"}, range(20), "train[:20] is not one whole split"),
        ({"path": "me/table"}, range(9), "neither Parquet nor lines of JSON"),
        ({"path": "me/list"}, range(9), "neither Parquet nor lines of JSON"),
        ({"path": "me/lines", "rows": 12}, range(12), "only of Parquet"),
        ({"rows": 60}, range(60), ""),
    ],
)
def test_what_cannot_be_read_by_parts_is_read_whole_and_told(hub, opened, gpt2, source, found, told):
    put(hub, "parquet")
    hub.put("me/table", {"train.csv": b"text\n" + b"".join(b"row %d\n" % number for number in range(9))})
    hub.put("me/list", {"train.json": json.dumps(texts(9)).encode()})
    lines = {f"train-{number}.jsonl": packed(texts(30)[number * 10 :][:10], "jsonl") for number in range(3)}
    hub.put("me/lines", lines)
    stream = opened(steps=None, **source) if source.get("path") != "me/lines" else opened(**source)
    stream.epochs = 1
    assert Counter(said(stream, gpt2)) == {f"row {number}": 1 for number in found}
    warnings = opened.made[-1].warnings
    assert [told in each and "me/" in each for each in warnings] == ([True] if told else [])


def test_a_subset_is_the_one_that_is_named_streamed_and_loaded_whole(hub, opened, gpt2):
    card = "---\nconfigs:\n" + "".join(f"- config_name: {n}\n  data_files: {n}.jsonl\n" for n in ("main", "other"))
    files = {f"{name}.jsonl": packed(texts(9, name), "jsonl") for name in ("main", "other")}
    hub.put("me/rows", {"README.md": f"{card}---\n".encode(), **files})
    assert said([opened(subset="other").next_row()], gpt2)[0].startswith("other")
    rows = hub_rows("me/rows", "train", "other")
    assert [row["text"].split()[0] for row in rows] == ["other"] * 9


def test_without_the_hub_what_was_loaded_whole_is_streamed_and_what_was_not_is_a_sentence(
    hub, opened, gpt2, monkeypatch
):
    put(hub, "parquet")
    assert len(hub_rows("me/rows", "train")) == 300
    unreachable(monkeypatch)
    assert Counter(said(opened(steps=None), gpt2)) == {f"row {number}": 2 for number in range(300)}
    with pytest.raises(DataError, match="as a data set on the hub it cannot be loaded") as raised:
        opened(path="me/other")
    assert "without a network use a local file" in raised.value.hint
    # Other processes of the run may reach it, and would read its files.
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DataError, match="the hub does not answer, and other processes"):
        opened()


def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")


def test_a_stream_of_the_hub_goes_on_there_or_not_at_all(hub, opened, monkeypatch):
    put(hub, "parquet")
    hub_rows("me/rows", "train")
    place = opened().state()
    unreachable(monkeypatch)
    without = opened()
    with pytest.raises(DataError, match="me/rows: the hub does not answer, and the rows of this run are read there"):
        without.go_to(place)
    without.go_to({name: value for name, value in place.items() if name != "layout"})  # a state of before


def test_the_cache_of_another_commit_is_not_taken_for_the_one_that_is_named(hub, monkeypatch):
    first, last = put(hub, "parquet", "first", 6), put(hub, "parquet", "last", 6)
    for commit in (first, last):
        datasets.load_dataset("me/rows", revision=commit)
    unreachable(monkeypatch)
    assert hub_rows("me/rows", "train", revision=last)[0]["text"].startswith("last")
    for ask in (hub_rows, hub_files):
        with pytest.raises(DataError, match=f"is wanted at commit {first[:8]}.*gives commit {last[:8]}"):
            ask("me/rows", "train", revision=first)


def epoch_of(hub: DataHub, tokenizer: Any, **source: Any) -> tuple[int, float, Files]:
    """Rows of an epoch, bytes asked for as a share of those of the files, and the files, still open."""
    entries = [DataSource(path=path) for path in source.pop("paths", ["me/rows"])]
    config: Any = SimpleNamespace(
        model=Model(name="builtin/tiny"),
        data=Data(train=entries, streaming=True, max_length=64),
        method=METHODS["pretrain"].model_construct(),
        run=SimpleNamespace(seed=3),
    )
    _, files = streamed_plan(config, tokenizer)
    walk, rows = Walk(files.lanes(), 3, True), 0
    hub.asked.clear()
    while (pick := walk.next()) is not None:
        cut = files.cut(pick.file)
        places, last = cut.places(pick.shard)
        assert all(cut.rows[place] for place in places)
        rows += len(places)
        walk.pass_by(pick, last)
    size = sum(len(content) for entry in entries for content in hub.sets[entry.path][-1].values())
    return rows, sum(last - start + 1 for _, start, last in hub.parts()) / size, files


def test_an_epoch_fetches_little_more_than_the_files_hold(hub, gpt2, monkeypatch):
    monkeypatch.setattr("engine.data.hub_sets.PIECE", 3000)
    put(hub, "jsonl")
    rows, share, _ = epoch_of(hub, gpt2)
    assert rows == 300
    assert 1 <= share < 1.3
    for kind, groups in (("one", 50), ("two", 25)):
        content = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(texts(50)), content, row_group_size=groups)
        hub.put(f"me/{kind}", {f"train-{number:02}.parquet": content.getvalue() for number in range(17)})
    # Of two sources whose shards come in turns one group each is in memory.
    rows, share, files = epoch_of(hub, gpt2, paths=["me/one", "me/two"])
    assert rows == 2 * 17 * 50
    assert share < 1.1
    assert sum(cut.rows._group[1] is not None for cut in files._open.values()) == 2


def test_files_of_lines_cost_no_request_before_they_are_read(hub, opened):
    hub.put("me/rows", {f"train-{number:02}.jsonl": b'{"text": "a"}\n' for number in range(40)})
    members, _ = _members(DataSource(path="me/rows"), "train")
    assert len([_cut(file, "train", 0) for file in members]) == 40
    assert not hub.parts()


def test_a_hub_that_answers_without_telling_the_commit_is_refused(hub, opened, monkeypatch):
    put(hub, "parquet")
    monkeypatch.setattr("engine.hub.PATIENCE", 0.1)
    with pytest.raises(DataError, match=r"me/rows: .*cannot be loaded"), raises_data_error("me/rows"):
        raise transport_error()("stalled while files are listed")
    hub.trouble = True
    for hub.slow, told in ((0.6, "no answer in time"), (0.0, "error 503")):
        with pytest.raises(DataError, match=rf"me/rows: the hub does not tell which commit main of it is \({told}\)"):
            opened()


def test_held_out_rows_of_a_stream_are_read_by_parts_too(hub, make_config, gpt2):
    put(hub, "parquet")
    hub.put("me/held", {"train.parquet": b"never read", "test.parquet": packed(texts(40), "parquet")})
    config = make_config(method="pretrain", streaming=True, eval=[DataSource(path="me/held")])
    (source,) = plan_of(config, gpt2, "eval").sources
    assert [source.rows[index]["text"].split()[1] for index in (0, 31, 39)] == ["0", "31", "39"]
    assert {path.rpartition("/")[2] for method, path, _ in hub.asked if method == "GET" and "/resolve/" in path} == {
        "test.parquet"
    }
    config = make_config(method="pretrain", streaming=True, eval=[DataSource(path="me/part", split="test[:5]")])
    hub.put("me/part", {"test.parquet": packed(texts(40), "parquet")})
    assert len(plan_of(config, gpt2, "eval").sources[0].rows) == 5


def test_held_out_rows_of_very_many_files_are_read_whole(hub, monkeypatch):
    put(hub, "parquet")
    assert rows_by_parts("me/rows", "train") is not None
    monkeypatch.setattr("engine.data.hub_sets.MANY", 3)
    assert rows_by_parts("me/rows", "train") is None


def test_a_name_with_a_dot_is_a_set_of_the_hub_where_it_is_no_file_of_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.v2").write_text("here")
    assert is_hub_set("teknium/OpenHermes-2.5")
    assert not any(map(is_hub_set, ("data/rows.jsonl", "data/rows.JSONL.gz", "data/notes.v2", "a/b/c-2.5", "/a-2.5")))
