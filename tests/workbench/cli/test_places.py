"""What each command says of a file or folder that is not there, is something else, or may not be read or written.

The calls are made in a process without the right of root to pass over permissions.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.run import store

CONFIG = "version: 1\nmodel: {name: builtin/tiny}\ndata: {train: [{path: builtin/dates}]}\n"
READS = {
    "train": ["train", "{}"],
    "submit": ["submit", "{}"],
    "estimate": ["estimate", "{}"],
    "preview": ["preview", "{}"],
    "check": ["check", "{}"],
    "check --fix": ["check", "{}", "--fix"],
    "export-config": ["export-config", "{}", "--to", "trl"],
    "import": ["import", "{}"],
    "sweep": ["sweep", "{}", "run.seed=1,2"],
    "guide": ["guide", "{}"],
    "verify": ["verify", "{}"],
    "evaluate --data": ["evaluate", "my-0001", "--data", "{}"],
    "evaluate --tasks": ["evaluate", "my-0001", "--tasks", "{}"],
    "chat --tools": ["chat", "my-0001", "--prompt", "Hello", "--tools", "{}"],
}
TAKES_FOLDERS = {"verify", "evaluate --data"}
WRITES = {
    "new": ["new", "-o", "{}.yaml"],
    "new --force": ["new", "--force", "-o", "{}.yaml"],
    "import": ["import", "theirs.yaml", "-o", "{}.yaml"],
    "export-config": ["export-config", "my.yaml", "--to", "trl", "-o", "{}.yaml"],
    "preview": ["preview", "my.yaml", "--export", "{}.jsonl"],
    "guide": ["guide", "--save", "{}.yaml"],
}
RUNS = {
    "runs": ["runs"],
    "queue": ["queue"],
    "watch": ["watch", "my-0001"],
    "stop": ["stop", "my-0001"],
    "resume": ["resume", "my-0001"],
    "compare": ["compare", "my-0001", "my-0002"],
    "receipt": ["receipt", "my-0001"],
    "prune": ["prune", "my-0001"],
    "export": ["export", "my-0001", "--to", "adapter"],
    "chat": ["chat", "my-0001"],
}
SCRIPT = """
import contextlib, io, json, sys
from workbench.__main__ import main
for line in sys.stdin:
    sys.argv = ["workbench", *json.loads(line)]
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as left:
            code = left.code or 0
    print(json.dumps([code, err.getvalue(), out.getvalue()]), flush=True)
"""


def calls(words: list[list[str]], place: Path) -> list[tuple[int, str]]:
    """Exit code and standard error of each call."""
    return [(code, said) for code, said, _ in outputs(words, place)]


def outputs(words: list[list[str]], place: Path) -> list[tuple[int, str, str]]:
    """Exit code, standard error and standard output of each call, all in one process, with `place` as the home directory."""
    rights = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*rights, sys.executable, "-P", "-c", SCRIPT], cwd=place, input="\n".join(map(json.dumps, words)), text=True,
        env={**os.environ, "HOME": str(place), "HF_HUB_OFFLINE": "1"}, capture_output=True, timeout=300, check=True,
    )  # fmt: skip
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root reads every file, and setpriv is not installed")
    (tmp_path / "my.yaml").write_text(CONFIG)
    (tmp_path / "theirs.yaml").write_text("base_model: x\ndatasets: [{path: y, type: chat_template}]\nadapter: lora\n")
    (tmp_path / "folder").mkdir()
    for name in ("folder.yaml", "folder.jsonl", "shut"):
        (tmp_path / name).mkdir()
    (tmp_path / "locked.yaml").write_text(CONFIG)
    (tmp_path / "locked.yaml").chmod(0)
    store.create(tmp_path / "runs", CONFIG, {"name": "my"}).update_json(state="finished", host="another-machine")
    (tmp_path / "shut").chmod(0)
    return tmp_path


def check(found: list[tuple[int, str]], wanted: list[list[str]], names: list[str], place: Path) -> None:
    """One sentence and a way out each, exit code 2, nothing of a crash, of click's own words or of the home directory."""
    assert len(found) == len(wanted)
    for words, (code, said), name in zip(wanted, found, names, strict=True):
        told = (words, code, said)
        assert code == 2, told
        assert name in said, told
        assert said.startswith("Error: "), told
        assert len(said.strip().splitlines()) == 2 or said.count(". ") >= 1, told
        assert "details are in" not in said, told
        assert "Invalid value" not in said, told
        assert str(place) not in said, told


def test_what_a_command_reads(place: Path) -> None:
    kinds = ("nothing.yaml", "folder", "locked.yaml", "shut/my.yaml")
    wanted, names = [], []
    for command, words in READS.items():
        for kind in kinds:
            if not (kind == "folder" and command in TAKES_FOLDERS):
                wanted.append([word.format(kind) for word in words])
                names.append(kind)
    check(calls(wanted, place), wanted, names, place)
    assert not list(place.glob("runs/my-0002"))


def test_what_a_command_writes(place: Path) -> None:
    kinds = ("nothing/my", "folder", "shut/my")
    wanted = [[word.format(kind) for word in words] for words in WRITES.values() for kind in kinds]
    check(calls(wanted, place), wanted, [kind for _ in WRITES for kind in kinds], place)
    assert not list(place.glob("runs/*-0002"))


def test_a_model_is_taken_along_into_a_new_folder(place: Path) -> None:
    wanted = [["export", "my-0001", "--to", "adapter", "-o", "my.yaml"], ["merge", "my-0001", "-o", "my.yaml"]]
    (code, below), (other, there) = calls(wanted, place)
    assert (code, other) == (2, 2)
    assert "my.yaml: is a file, and results go into a folder." in below
    assert "my.yaml: exists already, and an export replaces nothing." in there


def test_paths_of_a_file_are_shown_as_they_stand_in_it_and_others_without_the_home_directory(place: Path) -> None:
    """Also beside settings of the call, whose paths are from the working directory."""
    (place / "configs").mkdir()
    (place / "configs/mine.yaml").write_text(CONFIG.replace("builtin/dates", "./gone.jsonl"))
    words = ["configs/mine.yaml", "optim.learning_rate=1e-4"]
    (_, _, alone), (_, _, beside), (code, _, other) = outputs(
        [["check", words[0]], ["check", *words], ["check", words[0], "data.train=[{path: ./absent.jsonl}]"]], place
    )
    assert "./gone.jsonl" in alone
    assert [line for line in beside.splitlines() if "gone" in line] == [
        line for line in alone.splitlines() if "gone" in line
    ]
    assert "~/absent.jsonl" in other
    assert code == 1
    for said in (alone, beside, other):
        assert str(place) not in said


def test_where_runs_lie(place: Path) -> None:
    kinds = ("nothing", "locked.yaml", "shut")
    wanted = [[*words, "--runs", kind] for words in RUNS.values() for kind in kinds]
    check(calls(wanted, place), wanted, [kind for _ in RUNS for kind in kinds], place)
    begun = [["train", "my.yaml", "--detach", "--runs", "locked.yaml"]]
    ((code, said),) = calls(begun, place)
    assert code == 2
    assert "~/locked.yaml: must be a folder for runs; got a file." in said
