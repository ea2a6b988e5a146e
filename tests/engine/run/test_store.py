"""Run folders: one each, private, found by name, read although damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config.files import absolute, load
from engine.errors import RunNotFound, WorkbenchError
from engine.rules import read
from engine.run import inside, store
from engine.run.from_config import runs_dir_of
from engine.run.store import RunFolder


def test_a_run_folder_holds_what_the_guide_names_and_is_private(run):
    names = {path.name for path in run.path.iterdir()}
    assert names == {"config.yaml", "run.json", "control", "checkpoints", "samples", "index"}
    for path in (run.path, *run.path.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    values = run.read_json()
    assert (values["id"], values["state"], values["method"]) == ("dates-0001", "starting", "sft")


def test_many_at_once_get_a_folder_each(tmp_path):
    script = "import sys;from engine.run import store;[print(store.create(sys.argv[1],'a',{'name':'x'}).id) for _ in range(10)]"
    started = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    ids = [line for process in started for line in process.communicate()[0].split()]
    assert len(ids) == len(set(ids)) == 40


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Dätes & more", "dates-more"), ("../../etc", "etc"), ("", "run"), ("\x1b[31mred", "31mred"), ("x" * 300, "x" * 40), ("-rf", "rf"), ("日本", "run")],
)  # fmt: skip
def test_names_become_slugs(tmp_path, name, expected):
    run = store.create(tmp_path, "a", {"name": name})
    assert run.id == f"{expected}-0001"
    assert run.path.parent == tmp_path


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_damaged_state_file_is_empty_and_not_a_crash(run, damage):
    run.json.write_bytes(damage)
    assert run.read_json() == {}
    assert run.state == "lost"


def test_the_state_file_is_replaced_whole_or_not_at_all(run, monkeypatch):
    before = run.json.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        run.update_json(state="running")
    assert run.json.read_bytes() == before
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".run")] == []


def test_find_by_id_by_path_and_with_a_suggestion(run, tmp_path, monkeypatch):
    root = run.path.parent
    assert store.find("dates-0001", root).path == run.path
    assert store.find(str(run.path), tmp_path).path == run.path
    monkeypatch.chdir(root)
    assert store.find("dates-0001", tmp_path).path == run.path
    copied = root / "my copy"
    shutil.copytree(run.path, copied)
    assert store.find("my copy", root).path == copied, "a name of one's own, which is no id"
    with pytest.raises(RunNotFound) as problem:
        store.find("dates-001", root)
    assert problem.value.hint == "Did you mean dates-0001?"
    for name in ("", "..", "nope\x1b]0;x\x07", "\0", "x" * 9999, "/etc"):
        with pytest.raises(RunNotFound) as problem:
            store.find(name, root)
        assert "\x1b" not in problem.value.message


@pytest.mark.parametrize(
    ("file", "words", "hint"),
    [
        (
            "checkpoint-5/pytorch_model.bin",
            "holds checkpoints of another tool, and no run: run.json",
            "workbench import",
        ),
        ("config.json", "is a model's folder and no run's", "`model.name` takes it"),
        ("rows.jsonl", "is no run's folder: run.json is not there", "workbench runs"),
    ],
)
def test_a_folder_that_is_no_run_is_told_for_what_it_is(run, tmp_path, file, words, hint):
    folder = tmp_path / "other"
    (folder / file).parent.mkdir(parents=True)
    (folder / file).write_text("{}")
    with pytest.raises(RunNotFound) as problem:
        store.find(str(folder), run.path.parent)
    assert problem.value.message.startswith(f"{folder}: {words}")
    assert hint in problem.value.hint


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    place = tmp_path / "file"
    place.write_text("x")
    with pytest.raises(WorkbenchError, match="no run can be made here"):
        store.create(place, "a", {"name": "x"})


def test_where_runs_lie(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORKBENCH_RUNS", raising=False)
    assert store.runs_dir() == tmp_path / "runs"
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "env"))
    assert store.runs_dir() == tmp_path / "env"
    assert store.runs_dir(None, "/from/config") == Path("/from/config")
    assert store.runs_dir("given", "/from/config") == tmp_path / "given"
    first = store.create(tmp_path / "elsewhere", "run: {output_dir: runs}\n", {"name": "first"})
    kept = read(absolute(load(first.config).mapping, first.path))
    assert runs_dir_of(kept.config, kept.given) == tmp_path / "elsewhere", (
        "beside the run whose config it is, not in it"
    )
    assert store.called(first) == str(first.path)
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "elsewhere"))
    assert store.called(first) == "first-0001"


def test_lists_leave_out_links_and_other_folders(run):
    root = run.path.parent
    (root / "other").mkdir()
    (root / "linked-0001").symlink_to(run.path)
    assert [found.id for found in store.runs_in(root)] == ["dates-0001"]
    assert list(store.runs_in(root / "nowhere")) == []


def test_watching_a_run_imports_nothing_heavy():
    heavy = {"torch", "transformers", "datasets", "trl", "pandas", "numpy", "pydantic", "ruamel", "textual"}
    script = (
        "import sys, json, importlib;"
        "[importlib.import_module('engine.run.' + n) for n in sys.argv[1:]];"
        "print(json.dumps(sorted(name.partition('.')[0] for name in sys.modules)))"
    )
    no_watchers = ("__init__", "array", "from_config", "rehearsal", "rehearsed")  # these know configs
    names = [path.stem for path in Path(store.__file__).parent.glob("*.py") if path.stem not in no_watchers]
    said = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True, check=True)
    assert len(names) > 15
    assert not heavy & set(json.loads(said.stdout))


def test_a_link_in_the_place_of_a_file_is_refused(run, tmp_path):
    run.lock.symlink_to(tmp_path / "victim")
    with pytest.raises(WorkbenchError, match="is a symbolic link"):
        inside.open_file(run, run.lock, os.O_RDWR | os.O_CREAT)
    assert not (tmp_path / "victim").exists()
    assert RunFolder(run.path).id == "dates-0001"
