"""`workbench cache`: what it lists is what was prepared, and what is in use is never removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.data.cache_entries import Held
from tests import warm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of prepared data with three entries: rows used now, rows of 40 days ago, a stream of 10 days ago."""
    place = tmp_path / "prepared"
    about = {
        "sources": ["/data/rows.jsonl"],
        "split": "train",
        "method": "sft",
        "tokenizer": "gpt2",
        "template": "chatml",
    }
    _entry(place, "a", {"counts": {"kept": 7, "packs": 0}, "about": {**about, "max_length": 64, "packing": False}}, 0)
    _entry(place, "b", {"counts": {"kept": 3, "packs": 2}}, 40)
    _entry(place, "c", {"stream": {**about, "sources": ["/data/large"]}}, 10)
    (place / "notes").mkdir()
    (place / "notes" / "mine.txt").write_text("not prepared data")
    return place


def _entry(place: Path, letter: str, meta: dict[str, Any], days: int) -> None:
    entry = place / (letter * 32)
    entry.mkdir(parents=True)
    (entry / "data.arrow").write_bytes(b"x" * 1000)
    (entry / "meta.json").write_text(json.dumps(meta))
    then = time.time() - days * 86400
    os.utime(entry / "meta.json", (then, then))


def cache(*words: Any, code: int = 0) -> Any:
    done = warm.here("cache", *map(str, words), "--json")
    assert done.returncode == code, done.stderr + done.stdout
    return json.loads(done.stdout)


def left(folder: Path) -> list[str]:
    return sorted(path.name[0] for path in folder.iterdir() if len(path.name) == 32)


def test_what_is_listed(folder: Path) -> None:
    found = cache("--folder", folder)
    assert [entry["id"][0] for entry in found["entries"]] == ["a", "c", "b"]
    assert [entry["kind"] for entry in found["entries"]] == ["rows", "stream", "rows"]
    assert [entry["rows"] for entry in found["entries"]] == [7, None, 2]
    first = found["entries"][0]
    assert (first["sources"], first["tokenizer"], first["in_use"]) == (["/data/rows.jsonl"], "gpt2", False)
    assert found["bytes"] == sum(path.stat().st_size for key in "abc" for path in (folder / (key * 32)).iterdir())
    assert cache("size", "--folder", folder) == {"folder": str(folder), "bytes": found["bytes"], "count": 3}
    assert cache("--folder", folder, "list") == found
    text = warm.here("cache", "--folder", str(folder)).stdout
    assert "7 rows, used" in text
    assert "/data/large" in text


@pytest.mark.parametrize(
    ("words", "stay"),
    [
        (["--older-than", "30d"], "ac"),
        (["--older-than", "24h"], "a"),
        (["--older-than", "2w"], "ac"),
        (["--all"], ""),
        (["bb"], "ac"),
    ],
)
def test_what_is_pruned(folder: Path, words: list[str], stay: str) -> None:
    found = cache("prune", *words, "--yes", "--folder", folder)
    assert sorted(id[0] for id in found["removed"]) == sorted(set("abc") - set(stay))
    assert "".join(left(folder)) == stay
    assert found["bytes"] > 1000 * len(found["removed"])
    assert (folder / "notes" / "mine.txt").exists()
    assert not [path for path in folder.iterdir() if path.suffix == ".tmp"]


def test_what_a_process_holds_stays_until_it_ends(folder: Path) -> None:
    script = "import sys, time; from pathlib import Path; from engine.data.cache_entries import Held;"
    script += "held = Held(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    held = folder / ("b" * 32)
    with subprocess.Popen([sys.executable, "-c", script, str(held)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        refused = cache("prune", "b", "--yes", "--folder", folder, code=1)
        assert "in use; nothing was removed" in refused["error"]["message"]
        found = cache("prune", "--all", "--yes", "--folder", folder)
        assert ([id[0] for id in found["kept"]], left(folder)) == (["b"], ["b"])
        process.kill()
    assert time.time() - (held / "meta.json").stat().st_mtime < 600  # holding is using
    assert [id[0] for id in cache("prune", "b", "--yes", "--folder", folder)["removed"]] == ["b"]


def test_what_is_let_go_can_be_removed(folder: Path) -> None:
    held = Held(folder / ("a" * 32))
    assert cache("prune", "--all", "--yes", "--folder", folder)["kept"] == ["a" * 32]
    del held
    assert cache("prune", "--all", "--yes", "--folder", folder)["removed"] == ["a" * 32]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["prune"], "ids, --older-than or --all"),
        (["prune", "--all", "--older-than", "3d"], "one of them"),
        (["prune", "--older-than", "soon"], "got soon"),
        (["prune", "dd"], "dd is no entry"),
        (["prune", "--all"], "nobody can be asked here whether to remove 3 entries"),
        (["list", "--folder", "nowhere"], "nothing there: nowhere"),
    ],
)
def test_a_wrong_call_removes_nothing(folder: Path, words: list[str], told: str) -> None:
    given = words if "--folder" in words else [*words, "--folder", folder]
    assert told in cache(*given, code=2)["error"]["message"]
    assert left(folder) == ["a", "b", "c"]


def test_a_link_is_no_entry(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    _entry(outside, "d", {"counts": {"kept": 1}}, 90)
    (folder / ("e" * 32)).symlink_to(outside / ("d" * 32))
    assert len(cache("prune", "--all", "--yes", "--folder", folder)["removed"]) == 3
    assert (outside / ("d" * 32) / "data.arrow").exists()


def test_prepared_rows_name_what_they_are_made_of_and_are_held(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from engine.builtin import tiny
    from engine.data.prepare import prepare
    from engine.rules import read

    data = {"train": [{"path": "builtin/dates", "rows": 20}], "dataset_prepared_path": str(tmp_path / "kept")}
    config = read({"version": 1, "model": {"name": "builtin/tiny"}, "method": {"kind": "sft"}, "data": data}).config
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder())
    prepared = prepare(config, tokenizer)
    (entry,) = cache("--folder", tmp_path / "kept")["entries"]
    assert (entry["sources"], entry["split"], entry["method"], entry["rows"]) == (["builtin/dates"], "train", "sft", 20)
    assert entry["in_use"]
    assert cache("prune", "--all", "--yes", "--folder", tmp_path / "kept")["removed"] == []
    assert len(prepared.dataset) == 20
