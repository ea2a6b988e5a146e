"""A stream's order and shards: every row once an epoch, any place at once, bounded disk, faults told by file and row."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from engine.config.data import Data, DataSource
from engine.config.facts import DataFacts
from engine.config.method import METHODS
from engine.config.model import Model
from engine.config.tree import RunConfig
from engine.data.streaming import stream as streams
from engine.data.streaming.cuts import cut_file
from engine.data.streaming.files import streamed_plan
from engine.data.streaming.order import Lane, Walk
from engine.errors import DataError, WorkbenchError
from engine.trainers.stream_loader import Dealt, StreamLoader


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.data.streaming.cuts.BYTES", 300)
    monkeypatch.setattr("engine.data.streaming.cuts.ROWS", 7)


@pytest.fixture
def opened(gpt2: Any, tmp_path: Path) -> Any:
    """Streams of sources, closed at the end."""
    from types import SimpleNamespace

    made: list[Any] = []

    def make(*sources: Any, steps: int | None = 9, epochs: float = 1.0, method: str = "pretrain", **data: Any) -> Any:
        entries = [each if isinstance(each, DataSource) else DataSource(path=str(each)) for each in sources]
        config = SimpleNamespace(
            model=Model(name="builtin/tiny"),
            data=Data(train=entries, streaming=True, **{"max_length": 64, **data}),
            method=METHODS[method].model_construct(),
            run=SimpleNamespace(seed=3),
            optim=SimpleNamespace(max_steps=steps, num_train_epochs=epochs),
        )
        made.append(streams.open_stream(config, gpt2))
        return made[-1].stream

    yield make
    for each in made:
        each.stream.close()


def texts(count: int, word: str = "row") -> list[dict[str, str]]:
    return [{"text": f"{word} {number} " + "x" * (number % 40)} for number in range(count)]


def written(path: Path, rows: list[dict[str, str]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=30)
        return path
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (path.write_bytes(gzip.compress(lines.encode())) if path.suffix == ".gz" else path.write_text(lines))
    return path


def said(rows: Any, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(row["input_ids"]).split(" x")[0].removesuffix("<|endoftext|>").strip() for row in rows]


@pytest.mark.parametrize(
    "name", [pytest.param("rows.jsonl", marks=pytest.mark.slow), "rows.parquet", "rows.jsonl.gz", "rows.csv"]
)
def test_two_epochs_hold_every_row_twice_in_two_orders(opened, gpt2, tmp_path, name):
    path = tmp_path / name
    if name.endswith(".csv"):
        path.write_text("text\n" + "".join(f"row {number}\n" for number in range(90)))
    else:
        written(path, texts(90))
    stream = opened(path, steps=None if name.endswith(("jsonl", "parquet")) else 9)
    stream.epochs = 2
    found = said(stream, gpt2)
    assert Counter(found) == {f"row {number}": 2 for number in range(90)}
    assert found[:90] != found[90:]
    assert Counter(found[:90]).most_common(1)[0][1] == 1
    assert stream.over


def test_two_processes_with_two_loader_processes_each_take_every_row_exactly_twice_in_two_epochs(opened, tmp_path):
    path = written(tmp_path / "rows.jsonl", texts(64))
    taken: list[list[int]] = []
    for rank in (0, 1):
        stream = opened(path, steps=None, epochs=2.0)
        loader = StreamLoader(stream, Dealt(4, 2, rank), _row_numbers, torch.device("cpu"), workers=2, prefetch=2)
        stream.keep = 8
        taken.append([row for batch in loader for row in batch["rows"].tolist()])
    assert Counter(taken[0] + taken[1]) == Counter(2 * list(set(taken[0] + taken[1])))
    assert len(set(taken[0] + taken[1])) == 64
    assert len(taken[0]) == len(taken[1]) == 64
    assert taken[0] != taken[1]


def _row_numbers(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"rows": torch.tensor([row["row"] for row in rows])}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", pytest.param("rows.jsonl.gz", marks=pytest.mark.slow)])
def test_a_stream_goes_on_from_any_row(opened, gpt2, tmp_path, name):
    path = written(tmp_path / name, texts(60))
    stream = opened(path)
    stream.epochs = 2
    states, rows = [stream.state()], []
    while (row := stream.next_row()) is not None:
        rows.append(row["row"])
        states.append(json.loads(json.dumps(stream.state())))
    stream.close()
    for place in (0, 13, 60, 119):
        again = opened(path)
        again.epochs = 2
        again.go_to(states[place])
        assert [row["row"] for row in again] == rows[place:]
        again.close()


def test_a_place_in_files_that_were_cut_otherwise_is_refused_unless_a_person_accepts_other_rows(opened, tmp_path):
    path = written(tmp_path / "rows.jsonl", texts(64))
    place = opened(path).state()
    written(path, texts(90))
    other = opened(path)
    with pytest.raises(DataError, match=r"data\.train: the place of this stream is one in other files") as raised:
        other.go_to(place)
    assert "Put back the files and settings of data.train" in raised.value.hint
    other.accepted = True
    other.go_to(place)
    assert other.next_row()


def ranked(count: int) -> list[dict[str, Any]]:
    """Rankings of two to five answers, whose first word is which row and which place it has."""
    return [
        {"prompt": f"Which of {number}?", "output": [f"{number}.{place} is it" for place in range(2 + number % 4)]}
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("method", "choice"),
    [
        pytest.param("dpo", "best_worst", marks=pytest.mark.slow),
        pytest.param("dpo", "adjacent", marks=pytest.mark.slow),
        ("reward", "all"),
        pytest.param("dpo", "best_rest", marks=pytest.mark.slow),
        ("kto", "best_worst"),
    ],
)
def test_rankings_give_their_pairs_once_an_epoch_and_go_on_in_the_middle_of_one(opened, gpt2, tmp_path, method, choice):
    rows = ranked(22)
    path = DataSource(path=str(written(tmp_path / "ranked.jsonl", rows)), format="ranking", ranking_pairs=choice)
    wanted: Counter[Any] = Counter()
    for number, row in enumerate(rows):
        last = len(row["output"]) - 1
        pairs = {
            "best_worst": [(0, last)],
            "best_rest": [(0, worse) for worse in range(1, last + 1)],
            "adjacent": [(place, place + 1) for place in range(last)],
            "all": [(good, bad) for good in range(last + 1) for bad in range(good + 1, last + 1)],
        }[choice]
        if method == "kto":
            wanted.update([(f"{number}.0", True), (f"{number}.{last}", False)])
        else:
            wanted.update((f"{number}.{good}", f"{number}.{bad}") for good, bad in pairs)

    def told(row: Any) -> Any:
        parts = ("completion_ids",) if method == "kto" else ("chosen_ids", "rejected_ids")
        words = [gpt2.decode(row[part]).split()[0] for part in parts]
        return (words[0], bool(row["label"])) if method == "kto" else tuple(words)

    stream = opened(path, method=method)
    stream.epochs = 2
    found, states = [], [stream.state()]
    while (row := stream.next_row()) is not None:
        found.append(told(row))
        states.append(json.loads(json.dumps(stream.state())))
    assert Counter(found[: len(found) // 2]) == Counter(found[len(found) // 2 :]) == wanted
    assert stream.left.counts.kept == sum(wanted.values())
    stream.close()
    for place in (1, len(found) // 3, len(found) - 2):
        again = opened(path, method=method)
        again.epochs = 2
        again.go_to(states[place])
        assert [told(row) for row in again] == found[place:]
        again.close()


def test_rows_that_pairs_become_are_counted_before_where_they_can_be(opened, gpt2, tmp_path):
    def rows(method: str, choice: str = "best_worst") -> int | None:
        source = DataSource(path=str(path), format="ranking", ranking_pairs=choice, weight=2)
        config = RunConfig(method=METHODS[method](), data=Data(train=[source], streaming=True, max_length=64))
        _, files = streamed_plan(config, gpt2)
        files.close()
        return files.rows()

    path = written(tmp_path / "ranked.jsonl", ranked(22))
    assert (rows("dpo"), rows("kto"), rows("dpo", "all")) == (44, 88, None)
    with pytest.raises(DataError, match=r"optim\.max_steps: must be set"):
        streams.with_steps(RunConfig(method=METHODS["dpo"](), data=Data(streaming=True)), DataFacts(rows=None))


def test_sources_are_read_as_often_as_they_weigh_and_mixed(opened, gpt2, tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        written(folder / f"part-{number}.jsonl", texts(40, f"part{number}"))
    (folder / "README.md").write_text("# about\n")
    other = DataSource(path=str(written(tmp_path / "other.parquet", texts(80, "other"))), weight=2.5)
    stream = opened(folder, other, steps=None)
    found = Counter(said(stream, gpt2))
    assert {text: count for text, count in found.items() if text.startswith("part")} == {
        f"part{file} {number}": 1 for file in range(3) for number in range(40)
    }
    others = [count for text, count in found.items() if text.startswith("other")]
    assert len(others) == 80
    assert set(others) == {2, 3}
    assert 25 <= sum(count == 3 for count in others) <= 55


def test_each_source_of_a_stream_is_written_in_its_own_template(opened, gpt2, tmp_path):
    talk = [
        {"messages": [{"role": "user", "content": f"ask {n}"}, {"role": "assistant", "content": "x"}]} for n in range(9)
    ]
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}<|endoftext|>{% endfor %}")
    paths = [written(tmp_path / name, talk) for name in ("one.jsonl", "two.jsonl")]

    def begins() -> Counter[str]:
        sources = [
            DataSource(path=str(path), chat_template=str(each))
            for path, each in zip(paths, ("chatml", own), strict=True)
        ]
        return Counter(gpt2.decode(row["input_ids"])[:7] for row in opened(*sources, steps=None))

    assert begins() == {"<|im_st": 9, "[user] ": 9}
    own.write_text(own.read_text().replace("[{{", "<{{"))
    assert begins() == {"<|im_st": 9, "<user] ": 9}


def test_the_disk_that_shards_take_is_bounded(opened, tmp_path, monkeypatch):
    path = written(tmp_path / "rows.jsonl", texts(400))
    most = 20_000
    stream = opened(path, steps=None, streaming_disk=most / (1 << 30))
    stream.epochs = 2
    sizes, count = [], 0
    for _ in stream:
        count += 1
        stream.batch += 1
        sizes.append(sum(stream.folder.all().values()))
    assert count == 800
    assert max(sizes) <= most + 6_000, "one shard more at most"


def test_bad_rows_are_refused_where_they_stand_or_counted_with_their_places(opened, gpt2, tmp_path):
    rows = [json.dumps(row) for row in texts(90)]
    rows[70] = '{"text": '
    rows[81] = '{"text": 5}'
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"rows\.jsonl:71"):
        list(opened(tmp_path / "rows.jsonl", steps=None, shuffle=False))
    stream = opened(tmp_path / "rows.jsonl", steps=None, on_bad_row="skip")
    assert len(list(stream)) == 89
    assert stream.left.counts.bad == 1
    assert "1 of 90 rows cannot be read and are left out: " in stream.left.sentences()[0]
    assert "rows.jsonl:71:" in stream.left.sentences()[0]


def test_rows_that_are_odd_or_left_out_are_counted_in_all_shards_with_the_first_place(opened, tmp_path):
    rows = texts(90)
    rows[40]["text"], rows[70]["text"] = "left\u202e right", "left\u202e again"
    rows[60]["text"] = rows[80]["text"] = " "  # nothing to learn
    path = written(tmp_path / "rows.jsonl", rows)
    stream = opened(path, steps=None, shuffle=False)
    assert len(list(stream)) == 88
    masked, control = stream.left.sentences()
    assert masked == f"2 of 90 rows hold nothing to learn and are left out; the first: {path}:61"
    assert control.startswith("2 of 90 rows hold characters that nobody sees")
    assert control.endswith(f"; the first: {path}:41")


def test_a_weight_that_leaves_no_row_ends_the_stream(opened, tmp_path):
    few = DataSource(path=str(written(tmp_path / "rows.jsonl", texts(9))), weight=0.001)
    with pytest.raises(DataError, match="nothing is left to train on: a weight below 1 leaves none of so few rows"):
        opened(few, steps=9).next_row()


def test_a_file_that_vanishes_is_named(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.data.streaming.producer.AHEAD", 2)
    path = written(tmp_path / "rows.jsonl", texts(400))
    stream = opened(path, steps=None)
    read = [stream.next_row() for _ in range(5)]
    path.unlink()
    made = sum(stream.folder.note(key).rows for key in stream.folder.all())
    with pytest.raises(DataError, match=r"rows\.jsonl: is gone: it was removed or renamed while its rows were read"):
        read.extend(stream)
    # What was made ahead of it is learned first.
    assert 5 < made <= len(read) < 400


def test_a_preparing_process_that_is_killed_is_told_with_its_file(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.data.streaming.producer.AHEAD", 1)
    stream = opened(written(tmp_path / "rows.jsonl", texts(400)), steps=None)
    stream.next_row()
    os.kill(stream.producer._pid, 9)
    with pytest.raises(DataError, match=r"rows\.jsonl: the process that prepares its rows was ended by SIGKILL"):
        list(stream)


def test_a_source_that_does_not_answer_is_named(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "STALLED", 0.5)
    monkeypatch.setattr("engine.data.streaming.producer.AHEAD", 1)
    stream = opened(written(tmp_path / "rows.jsonl", texts(400)), steps=None)
    stream.next_row()
    os.kill(stream.producer._pid, 19)
    with pytest.raises(DataError, match=r"rows\.jsonl: nothing has come from it for"):
        list(stream)


def test_a_row_that_is_too_long_is_refused_by_file_and_line(opened, tmp_path):
    rows = [*texts(90), {"text": "long " * 100}]
    with pytest.raises(DataError, match=r"rows\.jsonl:91: the row is longer than data\.max_length 64 \(\d+ tokens\)"):
        list(opened(written(tmp_path / "rows.jsonl", rows), steps=None))


def test_steps_of_a_stream_of_unknown_length_must_be_said(tmp_path):
    from types import SimpleNamespace

    from engine.config.facts import DataFacts

    config = SimpleNamespace(optim=SimpleNamespace(max_steps=None))
    with pytest.raises(WorkbenchError, match=r"optim\.max_steps"):
        streams.with_steps(config, DataFacts())


def test_the_ten_millionth_row_is_reached_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.data.streaming.cuts.BYTES", 256 << 10)
    line = b'{"text": "as short as a row may be"}\n'
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        for _ in range(100):
            file.write(line * 100_000)
    begun = time.process_time()
    cut = cut_file(str(path))
    lane = Lane(0, (0,), (cut.count,), (None,), 0, 1.0, 1)
    walk = Walk([lane], 1, shuffle=True)
    walk.go_to({"epoch": 0, "shard": cut.count - 1, "taken": [[cut.count - 1, 0]]})
    places, _ = cut.places(walk.next().shard)
    assert cut.rows[places[-1]]["text"].startswith("as short")
    assert time.process_time() - begun < 5
    assert cut.length() == 10_000_000


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"rows.json": '[{"text": "a"}, {"text": "b"}]'}, "rows.json"),
        ({"rows.json": '{"text": "a"}\n{"text": "b"}\n'}, ""),
        ({"a.jsonl": '{"text": "a"}\n', "b.jsonl.gz": ""}, "b.jsonl.gz"),
        ({"a.jsonl": '{"text": "a"}\n', "b.json": '[{"text": "a"}]'}, "b.json"),
        ({"a.jsonl": '{"text": "a"}\n', "b.jsonl": '{"text": "a"}\n'}, ""),
    ],
)
def test_what_a_stream_cannot_count_is_known_before_launch(files: dict[str, str], found: str, tmp_path: Path) -> None:
    from engine.config.data import DataSource
    from engine.data.gather_facts import inspect_source

    for name, text in files.items():
        (tmp_path / name).write_text(text)
    place = tmp_path if len(files) > 1 else tmp_path / next(iter(files))
    seen = inspect_source(DataSource(path=str(place)), tmp_path)
    assert Path(seen.in_order).name == found
