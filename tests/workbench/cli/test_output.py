"""What leaves a command: nothing raw to a terminal whatever stands in it, and with `--json` JSON on every outcome."""

from __future__ import annotations

import ast
import gc
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import psutil
import pytest

from engine.run import store
from engine.run.process import send
from engine.run.store import RunFolder
from tests import warm
from workbench.__main__ import COMMANDS, main
from workbench.cli import output

ROOT = Path(__file__).parents[3]
SMALL = ROOT / "tests" / "fault" / "small_worker"
# a clipboard write, a title, colour, both kinds of C1, direction, a hidden character, a forged line
HOSTILE = "\x1b]52;c;b3duZWQ=\x07\x1b]0;t\x07\x1b[31m\x9b31m\x9d0;t\x9c\u202egnp.\u2066\u200b\r\x08\x7f"
OURS = re.compile(r"\x1b\[[0-9;]*m|\r\x1b\[2K|\r\n")
RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
ROWS = [{"messages": [{"role": "user", "content": f"a{HOSTILE}"}, {"role": "assistant", "content": f"b{HOSTILE}"}]}]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder whose every name and text was chosen by somebody else; runs use the small worker."""
    here = tmp_path / f"place{HOSTILE}"
    here.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{SMALL}{os.pathsep}{ROOT}")
    monkeypatch.setenv("SMALL_WORKER", json.dumps({"step_seconds": 0.001, "steps": 3, "save_steps": 3}))
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "WORKBENCH_RUNS"):
        monkeypatch.delenv(name, raising=False)
    (here / f"rows{HOSTILE}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = {
        "model": {"name": "builtin/tiny", f"model{HOSTILE}": 1},
        "data": {"train": [{"path": f"rows{HOSTILE}.jsonl"}], "excess_length": HOSTILE},
        "run": {"name": f"run{HOSTILE}"},
    }
    (here / f"my{HOSTILE}.yaml").write_text(json.dumps(words))
    good = {**words, "model": {"name": "builtin/tiny"}, "data": {"train": words["data"]["train"]}}
    (here / f"good{HOSTILE}.yaml").write_text(json.dumps(good))
    source = {"path": HOSTILE, "type": HOSTILE, HOSTILE: HOSTILE}
    foreign = {
        "base_model": HOSTILE,
        "datasets": [source],
        "sequence_len": HOSTILE,
        "micro_batch_size": 1,
        HOSTILE: HOSTILE,
    }
    (here / f"foreign{HOSTILE}.yaml").write_text(json.dumps(foreign))
    yield here
    for root in (here, here / "runs"):
        for run in store.runs_in(root):
            for who in (run.supervisor(), run.worker()):
                if who is not None:
                    send(who, signal.SIGKILL)


def foreign_run(here: Path, state: str, number: int = 1) -> RunFolder:
    """A run folder in which every text is hostile, its own name included."""
    made = store.create(here / "made", json.dumps({"version": 1, "run": {"name": HOSTILE}}), {"name": "x"})
    made.path.rename(here / f"run{number}{HOSTILE}")
    run = RunFolder(here / f"run{number}{HOSTILE}")
    evil = {"method": HOSTILE, "model": HOSTILE, "cause": HOSTILE, "name": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    run.update_json(id=f"run{HOSTILE}", state=state, **evil)
    events: list[dict[str, Any]] = [
        {"kind": "phase", "name": HOSTILE},
        {
            "kind": "receipt",
            "entries": [dict.fromkeys(("feature", "requested", "effective", "count", "detail"), HOSTILE)],
        },
        {"kind": "started", "method": HOSTILE, "model": HOSTILE, "max_steps": 9, "epochs": 1},
        {"kind": "metrics", "step": 1, "loss": 1.0, HOSTILE: 2.0},
        {"kind": "sample", "step": 1, "index": 0, "prompt": HOSTILE, "completion": HOSTILE},
        {"kind": "diverged", "step": 1, "what": HOSTILE},
    ]
    if state == "failed":
        events.append({"kind": "failed", "cause": HOSTILE, "message": HOSTILE, "lines": [HOSTILE, HOSTILE]})
    else:
        events.append({"kind": "stopped", "step": 1, "by": HOSTILE})
    lines = [
        json.dumps({"v": 1, "seq": seq, "t": 1e9 + seq, "rank": 0, "segment": 0, **event})
        for seq, event in enumerate(events)
    ]
    run.events.write_text("\n".join(lines) + "\n")
    (run.checkpoints / f"checkpoint-1{HOSTILE}").mkdir()
    (run.checkpoints / "checkpoint-2").mkdir()
    return run


def on_terminal(here: Path, *words: str) -> str:
    """What a command writes to a terminal, both streams."""
    master, slave = pty.openpty()

    def run() -> None:
        try:
            warm.command(*words, cwd=here, terminal=slave)
        finally:
            os.close(slave)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run)
        seen = b""
        try:
            while block := os.read(master, 1 << 16):
                seen += block
        except OSError:  # how Linux says that the other end was closed
            pass
        done.result(60)
    os.close(master)
    return seen.decode("utf-8", "surrogateescape")


CALLS: dict[str, list[list[str]]] = {
    "new": [["nothing" + HOSTILE], ["-o", f"{HOSTILE}/x.yaml"], ["-o", f"made{HOSTILE}.yaml"]],
    "import": [[f"my{HOSTILE}.yaml"], [f"foreign{HOSTILE}.yaml"], [f"foreign{HOSTILE}.yaml", "--from", HOSTILE]],
    "export-config": [[f"good{HOSTILE}.yaml", "--to", "trl"], [f"my{HOSTILE}.yaml", "--to", "axolotl"], [HOSTILE]],
    "check": [[f"my{HOSTILE}.yaml"], [HOSTILE], [f"good{HOSTILE}.yaml", f"run.{HOSTILE}={HOSTILE}"]],
    "preview": [[f"good{HOSTILE}.yaml"], [f"my{HOSTILE}.yaml"], [f"good{HOSTILE}.yaml", "--search", f"x{HOSTILE}"]],
    "estimate": [[f"my{HOSTILE}.yaml"], [f"good{HOSTILE}.yaml", "--for", HOSTILE]],
    "train": [[f"my{HOSTILE}.yaml"], [f"good{HOSTILE}.yaml"], [f"good{HOSTILE}.yaml", HOSTILE]],
    "sweep": [
        [f"good{HOSTILE}.yaml", f"run.{HOSTILE}=1,2"],
        [f"good{HOSTILE}.yaml", f"run.seed=1,{HOSTILE}"],
        [f"sweep{HOSTILE}"],
    ],
    "submit": [
        [f"my{HOSTILE}.yaml", "--to", "slurm"],
        [f"good{HOSTILE}.yaml", "--to", "slurm", "--dry-run", "--runs", HOSTILE],
        [HOSTILE, "--to", "slurm"],
        [f"good{HOSTILE}.yaml", "--to", "slurm", f"--sbatch=--comment={HOSTILE}"],
    ],
    "runs": [["--runs", "."], ["--runs", HOSTILE]],
    "watch": [["RUN"], ["FAILED"], [HOSTILE]],
    "stack": [["RUN"], [HOSTILE]],
    "stop": [["RUN"], ["RUN", "--now"], [HOSTILE]],
    "checkpoint": [["RUN"], [HOSTILE]],
    "resume": [["RUN", "--changed"], ["FAILED"], [HOSTILE]],
    "receipt": [["RUN"], [HOSTILE]],
    "evaluate": [["RUN"], ["RUN", "--checkpoint", HOSTILE], ["RUN", "--data", HOSTILE], [HOSTILE]],
    "prune": [["RUN"], ["FAILED", "--keep", HOSTILE], [HOSTILE]],
    "merge": [["RUN"], ["FAILED", "-o", f"out{HOSTILE}"], [HOSTILE]],
    "export": [["RUN", "--to", "adapter"], ["RUN", "--to", HOSTILE], [HOSTILE, "--to", "gguf"]],
    "verify": [[HOSTILE], [f"there{HOSTILE}"]],
    "push": [["RUN", "--to", "a/b"], ["RUN", "--to", HOSTILE], [HOSTILE, "--to", "a/b"]],
    "compare": [["RUN", "FAILED"], ["RUN", HOSTILE]],
    "cache": [["--folder", HOSTILE], ["--folder", f"cache{HOSTILE}"], ["prune", HOSTILE, "--yes"], [HOSTILE]],
    "doctor": [["--runs", f"there{HOSTILE}"]],
    "explain": [[HOSTILE]],
    "recipes": [[HOSTILE]],
    "demo": [[f"run.name={HOSTILE}"], [f"run.{HOSTILE}=1"], [f"--{HOSTILE}"]],
    "chat": [["RUN", "--prompt", HOSTILE], [HOSTILE], ["RUN", "--base", "--tools", f"{HOSTILE}.json"]],
    "queue": [[HOSTILE, "--first"], [f"--{HOSTILE}"]],
    "guide": [[HOSTILE], [f"there{HOSTILE}"], [f"good{HOSTILE}.yaml"]],
    "mcp": [["--root", HOSTILE], ["--root", f"rows{HOSTILE}.jsonl", "--json"], [HOSTILE]],
    "app": [[HOSTILE], [HOSTILE, HOSTILE], [f"my{HOSTILE}.yaml", HOSTILE]],
}


def test_every_command_is_tried() -> None:
    assert set(CALLS) == {*COMMANDS, "app"}


@pytest.mark.parametrize("command", CALLS)
def test_no_text_from_outside_reaches_a_terminal_raw(command: str, place: Path) -> None:
    names = {"RUN": foreign_run(place, "stopped", 1).path.name, "FAILED": foreign_run(place, "failed", 2).path.name}
    told = 0
    for words in CALLS[command]:
        asked = [names.get(word, word) for word in words]
        seen = OURS.sub("", on_terminal(place, *(() if command == "app" else (command,)), *asked))
        assert "workbench/__main__.py" not in seen, seen  # no traceback of ours
        assert RAW.findall(seen) == [], (words, seen)
        told += "␛" in seen
    assert told or command == "recipes", "the texts are shown, made visible"


def test_nothing_in_the_terminals_package_prints_past_the_gate() -> None:
    found = []
    for path in sorted((ROOT / "workbench").rglob("*.py")):
        if path == Path(output.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called == "print" or re.fullmatch(r"click\.s?echo|sys\.std(out|err)\.write|.*\.show_usage", called):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {called}")
    assert found == []


def test_a_line_from_outside_is_no_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    output.echo("run one\nError: forged")
    assert capsys.readouterr().out == "run one␊Error: forged\n"


def test_a_sentence_is_broken_between_words_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    sentence = (
        "x error",
        "  data.train: 日本語の行 cannot be read; `ollama create mine -f Modelfile` names each of them.",
    )
    output.echo(*sentence, hang=9)
    assert len(capsys.readouterr().out.splitlines()) == 1
    monkeypatch.setattr(output, "_is_terminal", lambda err: True)
    output.echo(output.styled(sentence[0], fg="red"), sentence[1], hang=9)
    lines = click.unstyle(capsys.readouterr().out).splitlines()
    assert lines == [
        "x error  data.train:",
        "         日本語の行 cannot be",
        "         read;",
        "         `ollama create mine -f Modelfile`",
        "         names each of them.",
    ]


def test_a_sentence_fits_the_terminal_also_where_the_other_output_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 40))
    with os.fdopen(theirs, "w") as terminal, os.fdopen(ours, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stderr", terminal)
        output.echo("Error: my.yaml: the config has 1 error; no run was started.", err=True, hang=2)
        terminal.flush()
        assert click.unstyle(screen.read(200).decode()).splitlines() == [
            "Error: my.yaml: the config has 1 error;",
            "  no run was started.",
        ]


def test_an_output_that_cannot_hold_a_sign_gets_its_escape(place: Path) -> None:
    foreign_run(place, "stopped")
    argv = [sys.executable, "-P", "-m", "workbench", "runs", "--runs", "."]
    done = subprocess.run(argv, cwd=place, env={**os.environ, "PYTHONIOENCODING": "latin-1"}, capture_output=True)
    assert (done.returncode, b"\\u25a0 stopped" in done.stdout) == (0, True), (done.stdout, done.stderr)


def test_no_colour_means_none(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign_run(place, "failed")
    assert "\x1b[31m" in on_terminal(place, "runs", "--runs", ".")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in on_terminal(place, "runs", "--runs", ".")


# -- JSON on every outcome ---------------------------------------------------------------------------------------------


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    """Exit code, the document on standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["workbench", *words])
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main()
    gc.enable()
    said = capsys.readouterr()
    return int(left.value.code or 0), json.loads(said.out), said.err


def is_error(document: Any, code: int) -> None:
    assert document["ok"] is False
    assert set(document["error"]) == {"message", "hint", "code"}
    assert document["error"]["message"]
    assert document["error"]["code"] == code


NEEDS = {
    "import": 1,
    "export-config": 1,
    "check": 1,
    "preview": 1,
    "estimate": 1,
    "train": 1,
    "watch": 1,
    "stop": 1,
    "checkpoint": 1,
    "resume": 1,
}
MISSING = {
    **NEEDS,
    "evaluate": 1,
    "prune": 1,
    "sweep": 1,
    "merge": 1,
    "export": 1,
    "push": 1,
    "verify": 1,
    "receipt": 1,
    "stack": 1,
    "submit": 1,
    "compare": 2,
    "chat": 1,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_call_is_json(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document, err = call(monkeypatch, capsys, command, "--nonsense", "--json")
    assert code == 2
    is_error(document, 2)
    assert "--nonsense" in document["error"]["message"]
    assert document["error"]["hint"] == f"Try `workbench {command} --help`."
    assert document["error"]["message"] in err


def test_a_run_that_is_not_named_is_looked_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, document, _ = call(monkeypatch, capsys, "stop", "--json")
    assert document["error"]["hint"] == "`workbench runs` lists them. Try `workbench stop --help`."


@pytest.mark.parametrize("command", MISSING)
def test_what_is_not_there_is_json(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["nothing-0001", "nothing-0002"][: MISSING[command]]
    code, document, _ = call(monkeypatch, capsys, command, *names, "--json")
    assert code == 2
    is_error(document, 2)
    code, document, _ = call(monkeypatch, capsys, command, "--json")  # an argument is missing
    assert code == 2
    is_error(document, 2)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (RuntimeError(f"that{HOSTILE}"), 1),
        (KeyboardInterrupt(), 130),
        (PermissionError(13, "Permission denied", "/x"), 1),
    ],
)
def test_a_crash_and_an_interrupt_are_json(
    command: str,
    problem: BaseException,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def callback(*_: Any, **__: Any) -> int:
        raise problem

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    real = import_module(f"workbench.cli.{COMMANDS[command][0]}").command
    monkeypatch.setattr(real, "callback", callback)
    words = ["x"] * MISSING.get(command, 0)
    got, document, err = call(monkeypatch, capsys, command, *words, "--json")
    assert got == code
    is_error(document, code)
    assert "Traceback" not in err
    assert not RAW.search(err)
    if code == 1:
        assert "Traceback" in (tmp_path / "workbench" / "app.log").read_text()
    if isinstance(problem, PermissionError):
        assert document["error"]["message"] == "/x: Permission denied."


def test_the_app_and_the_group_answer_in_json_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--json"], ["nothing-0001", "--json"], ["--nonsense", "--json"]):
        code, document, _ = call(monkeypatch, capsys, *words)
        assert code == 2
        is_error(document, 2)
    _, document, _ = call(monkeypatch, capsys, "chekc", "--json")
    assert document["error"]["hint"] == "Did you mean the command `workbench check`?"


def test_findings_are_an_answer_of_check_and_reasons_of_a_refused_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(
        "model: {name: builtin/tiny}\ndata: {train: [{path: builtin/dates}]}\noptim: {max_stebs: 3}\n"
    )
    code, document, _ = call(monkeypatch, capsys, "check", "my.yaml", "--json")
    assert (code, document["ok"], "error" in document) == (1, False, False)
    assert "optim.max_stebs" in [finding["path"] for finding in document["findings"]]
    code, document, _ = call(monkeypatch, capsys, "train", "my.yaml", "--json")
    assert code == 1
    is_error(document, 1)
    assert "optim.max_stebs" in [finding["path"] for finding in document["findings"]]
    code, document, _ = call(monkeypatch, capsys, "estimate", "my.yaml", "--json")
    assert (code, [finding["path"] for finding in document["findings"]]) == (0, ["optim.max_stebs"])


def test_new_writes_and_says_so_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, document, _ = call(monkeypatch, capsys, "new", "dpo", "-o", "my.yaml", "--json")
    assert (code, document["recipe"], document["path"]) == (0, "dpo", str(tmp_path / "my.yaml"))
    assert Path("my.yaml").read_text() == document["text"]
    code, document, _ = call(monkeypatch, capsys, "new", "dpo", "-o", "my.yaml", "--json")
    is_error(document, 2)


def test_a_number_that_is_not_finite_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"loss": float("nan"), "curve": [(1, float("inf"))], "name": "\x7f\x9b"})
    said = capsys.readouterr().out
    assert json.loads(said, parse_constant=pytest.fail) == {"loss": None, "curve": [[1, None]], "name": "\x7f\x9b"}
    assert not RAW.search(said)


def test_an_interrupted_start_is_json_and_the_run_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMALL_WORKER", json.dumps({"load_seconds": 30}))
    argv = [sys.executable, "-P", "-m", "workbench", "train", f"good{HOSTILE}.yaml", "--detach", "--json"]
    process = subprocess.Popen(argv, cwd=place, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    give_up = time.monotonic() + 30
    while not list(store.runs_in(place / "runs")) and time.monotonic() < give_up:
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    is_error(json.loads(said), 130)
    assert "goes on" in json.loads(said)["error"]["message"]


INTERRUPTED = [
    (signal.SIGINT, 130, "Interrupted."),
    (signal.SIGTERM, 143, "Ended by SIGTERM."),
    (signal.SIGHUP, 129, "Ended by SIGHUP."),
]


def each_once(commands: list[tuple[str, ...]]) -> Any:
    """Each command with one signal and each signal with a command; the other pairs are slow."""
    return pytest.mark.parametrize(
        ("words", "number", "code", "sentence"),
        [
            pytest.param(
                words,
                *ending,
                id=f"{' '.join(words)}-{ending[0]}",
                marks=() if (row + place) % min(3, len(commands)) == 0 else pytest.mark.slow,
            )
            for row, words in enumerate(commands)
            for place, ending in enumerate(INTERRUPTED)
        ],
    )


def _lives(pid: int) -> bool:
    """Whether it has not ended; one that nobody waits for stays as a zombie, where the first process does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@each_once([("check", "--data"), ("preview",), ("estimate",), ("estimate", "--rehearse")])
def test_a_command_that_a_signal_ends_while_it_works_is_json(
    place: Path, words: tuple[str, ...], number: int, code: int, sentence: str
) -> None:
    argv = [sys.executable, "-P", "-m", "workbench", *words, f"good{HOSTILE}.yaml", "--json"]
    process = subprocess.Popen(argv, cwd=place, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    give_up = time.monotonic() + 30
    while not children.read_text() and time.monotonic() < give_up:
        time.sleep(0.02)
    started = [int(pid) for pid in children.read_text().split()]
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == code
    is_error(json.loads(said), code)
    assert json.loads(said)["error"]["message"] == sentence
    assert started
    give_up = time.monotonic() + 120  # at the lowest priority, it may be in the middle of an import
    while (left := [pid for pid in started if _lives(pid)]) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not left


@each_once([("stop",), ("checkpoint",)])
def test_a_request_that_is_not_waited_for_is_json(
    place: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], number: int, code: int, sentence: str
) -> None:
    monkeypatch.setenv("SMALL_WORKER", json.dumps({"step_seconds": 0.01, "deaf": True, "steps": 100_000}))
    workbench = [sys.executable, "-P", "-m", "workbench"]
    subprocess.run([*workbench, "train", f"good{HOSTILE}.yaml", "--detach", "--json"], cwd=place, check=True)
    (run,) = store.runs_in(place / "runs")
    process = subprocess.Popen(
        [*workbench, *words, run.id, "--json"], cwd=place, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    give_up = time.monotonic() + 30
    while not list(run.control.glob("*.json")) and time.monotonic() < give_up:
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == code
    is_error(json.loads(said), code)
    assert "its answer was not waited for" in json.loads(said)["error"]["message"]


def test_the_commands_and_the_page_about_json_name_each_other() -> None:
    page = (ROOT / "docs" / "json.md").read_text()
    named = set(re.findall(r"^\| `([a-z-]+)", page, flags=re.MULTILINE))
    assert named == set(COMMANDS)
    for name in COMMANDS:
        command = import_module(f"workbench.cli.{COMMANDS[name][0]}").command
        assert any(isinstance(each, click.Option) and "--json" in each.opts for each in command.params), name
