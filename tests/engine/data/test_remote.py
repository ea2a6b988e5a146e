"""Rows of an object store: fetched once for each version, whole or not at all, and told by their address."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from engine.config.data import Data, DataSource
from engine.config.facts import Facts
from engine.config.files import parse
from engine.config.method import METHODS
from engine.config.model import Model
from engine.data import remote
from engine.data.cache_entries import cache_folder, entries
from engine.data.gather_facts import gather_facts
from engine.data.plan import plan_of
from engine.data.prepare import prepare
from engine.data.preview import preview
from engine.data.remote import local_copy
from engine.data.streaming.stream import open_stream
from engine.errors import Cancelled, DataError
from engine.rules import read

URL = "memory://bucket/below/rows.jsonl"


def _lines(count: int, word: str = "answer") -> bytes:
    turns = [
        [{"role": "user", "content": f"q {n}"}, {"role": "assistant", "content": f"{word} {n}"}] for n in range(count)
    ]
    return b"".join(json.dumps({"messages": each}).encode() + b"\n" for each in turns)


@pytest.fixture
def store() -> Iterator[Any]:
    """A store of objects in this process's memory."""
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def _copies() -> list[str]:
    return [entry.key for entry in entries(cache_folder(None)) if entry.kind == "copy"]


def test_a_run_learns_the_same_from_a_store_as_from_a_file(
    store: Any,
    write: Callable[..., Path],
    make_config: Callable[..., Any],
    minimind: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.pipe(URL, _lines(8))
    told: list[tuple[str, int, int]] = []
    config = make_config(URL)
    far = prepare(config, minimind, on_progress=lambda *each: told.append(each))
    near = prepare(make_config(write(_lines(8).decode())), minimind)
    assert list(far.dataset["input_ids"]) == list(near.dataset["input_ids"])
    assert ("fetching", len(_lines(8)), len(_lines(8))) in told
    assert far.sources == (URL,)
    assert len(_copies()) == 1
    with monkeypatch.context() as once:
        once.setattr(remote, "_fetch", None)  # not called again
        assert prepare(config, minimind).cached
        assert preview(config, minimind)["sources"][0]["path"] == URL
    store.pipe(URL, _lines(8, "other"))
    again = prepare(config, minimind)
    assert not again.cached
    assert list(again.dataset["input_ids"]) != list(far.dataset["input_ids"])
    assert len(_copies()) == 2


def test_a_stream_of_a_store_is_the_stream_of_the_file(store: Any, tmp_path: Path, gpt2: Any) -> None:
    lines = b"".join(b'{"text": "row %d"}\n' % number for number in range(60))
    for name, content in (("rows.jsonl", lines), ("rows.jsonl.gz", gzip.compress(lines))):
        url = f"memory://bucket/{name}"
        store.pipe(url, content)
        (tmp_path / name).write_bytes(content)
        found = []
        for path in (url, str(tmp_path / name)):
            config = SimpleNamespace(
                model=Model(name="builtin/tiny"),
                data=Data(train=[DataSource(path=path)], streaming=True, max_length=64),
                method=METHODS["pretrain"].model_construct(),
                run=SimpleNamespace(seed=3),
                optim=SimpleNamespace(max_steps=9, num_train_epochs=1.0),
            )
            prepared = open_stream(config, gpt2)
            found.append([prepared.stream.next_row()["input_ids"] for _ in range(30)])
            prepared.stream.close()
        assert found[0] == found[1]
    assert len(_copies()) == 2


def test_a_bad_row_is_named_by_address_and_line(store: Any, make_config: Callable[..., Any], minimind: Any) -> None:
    store.pipe(URL, _lines(2) + b"{no row\n")
    with pytest.raises(DataError, match=r"memory://bucket/below/rows\.jsonl:3"):
        prepare(make_config(URL), minimind)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://bucket/none.jsonl", "there is no such object"),
        ("memory://bucket/below", "is a folder"),
        ("what://bucket/rows.jsonl", r"cannot be fetched \(Protocol not known: what\)"),
    ],
)
def test_what_cannot_be_had_is_said_in_a_sentence(store: Any, url: str, said: str) -> None:
    store.pipe(URL, b"{}")
    with pytest.raises(DataError, match=said) as raised:
        local_copy(url)
    assert raised.value.path == url
    assert "\n" not in str(raised.value)


def test_a_connection_that_fails_is_tried_again(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store.pipe(URL, _lines(3))
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    asked, info = [], type(store).info

    def failing(files: Any, path: str, **more: Any) -> Any:
        asked.append(path)
        if len(asked) < 3:
            raise ConnectionError("the line is dead")
        return info(files, path, **more)

    monkeypatch.setattr(type(store), "info", failing)
    assert local_copy(URL).file.read_bytes() == _lines(3)
    asked.clear()
    monkeypatch.setattr(remote, "TRIES", 1)
    with pytest.raises(DataError, match=r"cannot be fetched \(the line is dead\)"):
        local_copy(URL)


class _Answer(Exception):
    """As aiohttp tells what a server answered."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}, message='as the server says'")
        self.status = status


class _Dropped(Exception):
    """As aiohttp tells of a connection that ended before its answer: without a status."""

    __module__ = "aiohttp.client_exceptions"


class RepositoryNotFoundError(OSError):
    """As the hub's client tells of a repository that is not there, or not shown to strangers."""

    response = SimpleNamespace(status_code=401)


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (_Dropped("Server disconnected"), "cannot be fetched (Server disconnected)"),
        (RepositoryNotFoundError("401 Client Error"), "there is no such object"),
        (_Answer(404), "there is no such object"),
        (_Answer(403), "may not be read (403, message='as the server says')"),
        (_Answer(503), "cannot be fetched (503, message='as the server says')"),
        (ConnectionRefusedError("nobody listens"), "cannot be fetched (nobody listens)"),
    ],
)
def test_what_a_server_answers_is_told_apart_from_a_file_that_is_not_there(
    store: Any, monkeypatch: pytest.MonkeyPatch, cause: Exception, said: str
) -> None:
    def missing(files: Any, path: str, **more: Any) -> Any:
        raise FileNotFoundError(path) from cause  # as fsspec does, whatever came

    monkeypatch.setattr(type(store), "info", missing)
    monkeypatch.setattr(remote, "TRIES", 1)
    with pytest.raises(DataError) as raised:
        local_copy(URL)
    assert raised.value.message == f"{URL}: {said}"


def test_what_breaks_off_or_is_given_up_leaves_nothing(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    store.pipe(URL, b"x" * 5_000_000)
    silent: list[float] = []

    class Cut:
        """A connection that ends early, or goes silent."""

        def __init__(self, chunks: int) -> None:
            self._left = chunks

        def __enter__(self) -> Cut:
            return self

        def __exit__(self, *_: object) -> None:
            return

        def read(self, size: int) -> bytes:
            self._left -= 1
            time.sleep(silent[0] if silent and self._left < 0 else 0)
            return b"x" * size if self._left >= 0 else b""

    with monkeypatch.context() as broken:
        broken.setattr(type(store), "open", lambda *_: Cut(2))
        with pytest.raises(DataError, match=r"2,097,152 of its 5,000,000 bytes came"):
            local_copy(URL)
        silent.append(3.0)
        broken.setattr(remote, "PATIENCE", 0.3)
        began = time.monotonic()
        with pytest.raises(DataError, match=r"nothing came for 0\.3 s"):
            local_copy(URL)
        assert time.monotonic() - began < 2  # silence is not waited for three times

    def cancel(*_: object) -> None:
        raise Cancelled("given up")

    with pytest.raises(Cancelled):
        local_copy(URL, cancel)
    monkeypatch.setattr(remote, "KEEP_FREE", 1 << 60)
    with pytest.raises(DataError, match="do not fit onto the disk"):
        local_copy(URL)
    assert not [each for each in cache_folder(None).iterdir() if not each.name.endswith(".lock")]


def test_a_copy_in_use_is_not_removed(store: Any, make_config: Callable[..., Any], minimind: Any) -> None:
    store.pipe(URL, _lines(3))
    plan = plan_of(make_config(URL), minimind, "train")
    (entry,) = entries(cache_folder(None))
    assert entry.in_use
    assert entry.as_json()["sources"] == [URL]
    del plan
    assert not entry.in_use


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("gs://bucket/rows.jsonl", "pip install gcsfs"),
        ("what://bucket/rows.jsonl", "an address of s3://"),
        ("file:///data/rows.jsonl", "It needs no file://"),
        ("hf://datasets/some/rows/train.jsonl", ""),
    ],
)
def test_an_address_is_judged_before_anything_is_fetched(path: str, said: str, tmp_path: Path) -> None:
    config = parse(f"model: {{name: builtin/tiny}}\ndata: {{train: [{{path: '{path}'}}]}}\n").mapping
    found = read(config, Facts(packages={"gcsfs": None, "huggingface_hub": "1.30"}))
    sentences = [str(each) for each in found.findings if each.path == "data.train.0.path" and each.severity == "error"]
    assert (said in " ".join(sentences)) if said else not sentences
    assert gather_facts(found.config, tmp_path).sources[path].exists is None
