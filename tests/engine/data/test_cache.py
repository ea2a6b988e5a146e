"""Prepared data are kept exactly as long as nothing changed, and never half written."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.data.cache import tokenizer_fingerprint
from engine.data.cache_entries import locked
from engine.data.prepare import prepare
from engine.errors import Cancelled, WorkbenchError

Write = Callable[..., Path]
Config = Callable[..., Any]


def _chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_nothing_changed_hits_and_any_change_misses(
    write: Write, make_config: Config, minimind: Any, phi: Any, tmp_path: Path
) -> None:
    from engine.config.data import DataSource

    rows = [_chat(f"question {n}?", f"answer {n}") for n in range(8)]
    path = write(rows)
    first = prepare(make_config(path), minimind)
    assert not first.cached
    again = prepare(make_config(path), minimind)
    assert again.cached
    assert list(again.dataset) == list(first.dataset)
    os.utime(path, (1, 1))
    moved = tmp_path / "elsewhere" / "rows.jsonl"
    moved.parent.mkdir()
    shutil.copy(path, moved)
    assert prepare(make_config(path), minimind).cached
    assert prepare(make_config(moved), minimind).cached

    other = write([*rows[:-1], _chat("question 7?", "answer 8")], "other.jsonl")
    sources = [DataSource(path=str(path)), DataSource(path=str(other))]
    changed = [
        make_config(other),
        make_config(source=sources),
        make_config(source=sources[::-1]),
        make_config(source=[DataSource(path=str(path), weight=2)]),
        make_config(source=[DataSource(path=str(path), rows=4)]),
        make_config(path, max_length=1024),
        make_config(path, trained_turns="all"),
        make_config(path, packing=True),
        make_config(path, packing=True, packing_cross_doc_attn_mask=True),
        make_config(path, excess_length="drop"),
        make_config(path, model={"chat_template_kwargs": {"open_thinking": True}}),
    ]
    assert [prepare(config, minimind).cached for config in changed] == [False] * len(changed)
    assert [prepare(config, minimind).cached for config in changed] == [True] * len(changed)
    assert not prepare(make_config(path), phi).cached
    own = copy.deepcopy(minimind)
    own.chat_template = own.chat_template.replace("im_end|>\\n", "im_end|>\\n\\n")
    assert not prepare(make_config(path), own).cached


def test_a_cancelled_build_leaves_nothing_and_the_next_one_works(
    write: Write, make_config: Config, minimind: Any, tmp_path: Path
) -> None:
    path = write([_chat(f"q {n}", f"a {n}") for n in range(600)])

    def stop(what: str, done: int, total: int) -> None:
        if what == "tokenizing":
            raise Cancelled("cancelled")

    with pytest.raises(Cancelled):
        prepare(make_config(path, dataset_prepared_path=str(tmp_path / "p")), minimind, on_progress=stop)
    assert [each.name for each in (tmp_path / "p").iterdir() if each.suffix != ".lock"] == []
    assert len(prepare(make_config(path, dataset_prepared_path=str(tmp_path / "p")), minimind).dataset) == 600


def test_progress_reaches_the_end(write: Write, make_config: Config, minimind: Any) -> None:
    seen: list[tuple[str, int, int]] = []
    prepare(make_config(write([_chat("q", "a")] * 700)), minimind, on_progress=lambda *state: seen.append(state))
    assert seen[-1] == ("tokenizing", 700, 700)
    assert ("tokenizing", 256, 700) in seen


def test_who_waits_for_rows_hears_how_far_their_maker_is(
    write: Write, make_config: Config, minimind: Any, tmp_path: Path
) -> None:
    path, there = write([_chat(f"q {n}", f"a {n}") for n in range(600)]), tmp_path / "p"
    config = make_config(path, dataset_prepared_path=str(there))
    heard, held = threading.Event(), threading.Event()

    def slowly(what: str, done: int, total: int) -> None:
        if what == "tokenizing":
            held.set()
            assert heard.wait(60)

    maker = threading.Thread(target=prepare, args=(config, minimind), kwargs={"on_progress": slowly})
    maker.start()
    assert held.wait(60)
    seen: list[tuple[str, int, int]] = []

    def hear(what: str, done: int, total: int) -> None:
        seen.append((what, done, total))
        if done and what.startswith("waits"):
            heard.set()

    other = copy.deepcopy(minimind)
    found = prepare(config, other, on_progress=hear)
    maker.join()
    assert ("waits: another process prepares these rows (tokenizing)", 256, 600) in seen
    assert found.cached
    assert {each.suffix for each in there.iterdir() if each.name.startswith(".")} <= {".lock"}


def test_what_a_killed_maker_left_is_not_told_of_the_next_one(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    (tmp_path / ".rows.progress").write_text('["tokenizing", 5, 9]')

    def stop(*state: Any) -> None:
        seen.append(state)
        raise Cancelled("cancelled")

    with locked(tmp_path / "rows", lambda *_: None), pytest.raises(Cancelled), locked(tmp_path / "rows", stop):
        raise AssertionError("two hold one lock")
    assert seen == [("waits: another process prepares these rows", 0, 0)]


def test_a_folder_that_cannot_be_written_is_named(
    write: Write, make_config: Config, minimind: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkbenchError, match=r"data\.dataset_prepared_path: prepared data cannot be written to"):
        prepare(make_config(write([_chat("q", "a")]), dataset_prepared_path=str(tmp_path / "file" / "x")), minimind)


def test_a_full_disk_leaves_nothing_half_written(
    write: Write, make_config: Config, minimind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from engine.data.arrow_file import ArrowFile

    def full(self: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ArrowFile, "_flush", full)
    with pytest.raises(WorkbenchError, match="No space left on device"):
        prepare(make_config(write([_chat("q", "a")]), dataset_prepared_path=str(tmp_path / "p")), minimind)
    assert [each.name for each in (tmp_path / "p").iterdir() if each.suffix != ".lock"] == []


def test_the_fingerprint_changes_with_the_mask_alone(write: Write, make_config: Config, minimind: Any) -> None:
    path = write([_chat("one?", "first")])
    one = prepare(make_config(path), minimind).fingerprint
    assert prepare(make_config(path, max_length=512), minimind).fingerprint == one
    assert prepare(make_config(path, trained_turns="all"), minimind).fingerprint != one


def test_the_fingerprint_of_a_tokenizer_is_that_of_its_whole_file_and_stays_what_it_was(minimind: Any) -> None:
    """Rows that were prepared under it are found again; what is kept of one tokenizer's file serves no other."""
    for tokens in ([], ["<more>"], []):
        tokenizer = copy.deepcopy(minimind)
        tokenizer.add_tokens(tokens)
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        del state["padding"], state["truncation"]
        names = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        wanted = hashlib.sha256(json.dumps([state, names], sort_keys=True).encode()).hexdigest()[:32]
        assert tokenizer_fingerprint(tokenizer) == wanted
        tokenizer.backend_tokenizer.enable_truncation(7)
        assert tokenizer_fingerprint(tokenizer) == wanted
