"""Monitor, list of runs and preview in a real pseudo-terminal: hostile text in rows, names and logs reaches it as text only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.run.events import EventWriter
from engine.run.process import identity
from engine.run.store import RunFolder, create

ATTACKS = (
    "\x1b]0;owned\x07", "\x1b]52;c;b3duZWQ=\x07", "\x1b[2J\x1b[31mred", "\x9b31mc1", "\x1bPq\x1b\\", "\x1b_apc\x1b\\",
    "\u202egnp.exe", "[/b][@click=app.quit]x[/]", "\x00\x08\x7f", "\r\x1b[A\x1b[K",
)  # fmt: skip
# What the attacks would leave in the stream if any part of the app passed them on.
TRACES = (
    b"\x1b]0;owned",
    b"owned\x07",
    b"\x1b]52;",
    b"\x1b[2J\x1b[31mred",
    b"\x1bPq",
    b"\x1b_apc",
    b"\xe2\x80\xae",
    b"\xc2\x9b31m",
)


@pytest.fixture
def hostile_run(tmp_path: Path) -> RunFolder:
    """A run that goes on, with hostile text wherever a stranger's text can stand."""
    bad = "".join(ATTACKS)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"messages": _chat(bad), bad: bad}) + "\n" for _ in range(8)))
    config = f"version: 1\nmodel: {{name: builtin/tiny}}\ndata:\n  train: [{{path: {rows}}}]\n"
    run = create(tmp_path / "runs", config, {"name": "hostile", "method": "sft", "model": bad})
    with EventWriter(run) as writer:
        writer.write(
            "receipt", entries=[{"feature": bad, "requested": bad, "effective": bad, "count": 1, "detail": bad}]
        )
        writer.write("started", method=f"sft{bad}", model=bad, max_steps=20, epochs=1)
        for step in range(1, 11):
            writer.write("metrics", step=step, epoch=0.5, **{"loss": 1.0 / step, f"reward{bad}": 0.5})
            writer.write("batch", step=step, offset=0, count=4)
        writer.write("sample", step=10, index=0, prompt=f"Q {bad}", completion=f"A {bad}")
        writer.write("finding", path="data", severity="warning", rule="r", message=f"Found {bad}")
    run.batches.write_bytes(b"".join(number.to_bytes(8, "little") for number in range(4)))
    run.log.write_bytes(f"log {bad} end\n".encode() * 5)
    who = identity(os.getpid())
    assert who is not None
    run.update_json(
        state="running", segment=0, supervisor_pid=who.pid, supervisor_start=who.start, worker_pid=who.pid,
        worker_start=who.start, boot_id=who.boot, host=who.host,
    )  # fmt: skip
    return run


def _chat(bad: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Say {bad}"}, {"role": "assistant", "content": f"said {bad}"}]


def test_no_page_of_the_monitor_passes_on_what_strangers_wrote(
    spawn: Callable[..., Any], workbench_command: list[str], hostile_run: RunFolder
) -> None:
    root = str(hostile_run.path.parent)
    terminal = spawn(*workbench_command, hostile_run.id, "--runs", root)
    terminal.wait_for(b"running", b"loss")
    terminal.type(b"\x1b[D\r")
    terminal.wait_for(b"rows it was trained on")
    terminal.settle(0.5)
    terminal.type(b"\x1b")
    terminal.settle(0.3)
    with hostile_run.config.open("a", encoding="utf-8") as config:  # no longer a config, still to be looked at
        config.write(f"# {''.join(ATTACKS)}\n")
    # A carriage return in the log takes the line back to its start, as on a terminal: its end is what is left.
    for key, words in (("2", b"step 10"), ("3", b"[K end"), ("4", b"(1)"), ("5", b"version"), ("1", b"loss")):
        terminal.type(key.encode())
        terminal.wait_for(words)
        terminal.settle(0.3)
    for _ in range(4):
        terminal.type(b"v")
        terminal.settle(0.2)
    terminal.type(b"s")
    terminal.wait_for(b"save, then stop")
    terminal.type(b"\x1b")
    terminal.settle(0.3)
    terminal.type(b"q")
    assert terminal.exit_code() == 0
    for trace in TRACES:
        assert trace not in terminal.seen, trace
    assert b"hostile-0001 goes on without this window" in terminal.seen


def test_the_list_of_runs_and_the_preview_pass_on_nothing_either(
    spawn: Callable[..., Any], workbench_command: list[str], hostile_run: RunFolder
) -> None:
    terminal = spawn(*workbench_command, WORKBENCH_RUNS=str(hostile_run.path.parent))
    terminal.wait_for(b"hostile-0001")  # a run goes on, so it stands first
    terminal.settle(0.5)
    terminal.type(b"r")
    terminal.settle(0.5)
    terminal.type(b"/")
    terminal.settle(0.3)
    terminal.type(b"host\r")
    terminal.settle(0.5)
    terminal.type(b"D")
    terminal.settle(0.3)
    terminal.type(b"\x11")
    assert terminal.exit_code() == 0
    config = hostile_run.path.parent.parent / "own.yaml"
    config.write_text(hostile_run.config.read_text("utf-8"))
    # Cold, the preview loads torch first, and the raw row stands until the tokens are there.
    cold = {"WORKBENCH_TESTS_COLD": "1", "WORKBENCH_RUNS": str(hostile_run.path.parent / "none")}
    preview = spawn(*workbench_command, str(config), **cold)
    preview.wait_for(b"Launch")
    preview.settle(0.5)
    preview.type(b"p")
    preview.wait_for(b"as it stands in its file")
    preview.wait_for("▌".encode(), timeout=90)
    preview.type(b"#v")
    preview.settle(0.5)
    preview.type(b"\x11")
    assert preview.exit_code() == 0
    for trace in TRACES:
        assert trace not in terminal.seen, trace
        assert trace not in preview.seen, trace
