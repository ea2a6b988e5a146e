"""The workbench as an object of a kernel: re-run, closed, light, and readable without widgets."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config.tree import fields
from engine.session.draft import Draft
from widgets import Preview, Workbench, asking


@pytest.fixture
def workbench(tmp_path: Path) -> Iterator[Workbench]:
    face = Workbench(runs=tmp_path / "runs")
    yield face
    face.close()


def ask(face: object, do: str, **params: object) -> dict:
    return face.answer({"id": "1", "do": do, **params}).data  # type: ignore[attr-defined]


def wait_for(face: object, do: str, seconds: float = 90, **params: object) -> dict:
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        answer = ask(face, do, **params)
        if answer.get("done", True):
            return answer
        time.sleep(0.1)
    raise TimeoutError(do)


def test_the_kernel_imports_no_torch_and_no_data_library(tmp_path: Path) -> None:
    script = f"""
import sys, time
import prestarted
prestarted.install()
from widgets import ConfigForm, Monitor, Preview, Workbench
face = Workbench(runs={str(tmp_path)!r})
for step in ("goal", "model", "data", "method", "memory", "review", "launch"):
    assert face.answer({{"id": "1", "do": "step", "step": step}}).data["ok"]
assert face.answer({{"id": "1", "do": "runs"}}).data["ok"]
assert face.answer({{"id": "1", "do": "guide_go", "at": 2}}).data["ok"]
give_up = time.monotonic() + 30
while face.draft.facts.model is None and time.monotonic() < give_up:
    face.answer({{"id": "1", "do": "state"}})
    time.sleep(0.05)
assert face.draft.facts.model is not None
while "24,000 rows" not in str(face.answer({{"id": "1", "do": "guide"}}).data["blocks"]) and time.monotonic() < give_up:
    time.sleep(0.05)
assert "24,000 rows" in str(face.answer({{"id": "1", "do": "guide"}}).data["blocks"])
repr(face)
face.close()
heavy = {{"torch", "transformers", "datasets", "trl", "pandas", "numpy", "pyarrow"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_costs_nothing() -> None:
    script = "import sys, widgets; assert 'anywidget' not in sys.modules and 'pydantic' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_the_cell_run_again_takes_over_the_draft_and_retires_the_old_view(tmp_path: Path) -> None:
    first = Workbench(runs=tmp_path)
    first.draft.set(fields.run.name.path, "mine")
    ask(first, "step", step="method")
    second = Workbench(runs=tmp_path)
    assert second.draft is first.draft
    assert ask(second, "state")["step"] == "method"
    told = ask(first, "state")
    assert (told["ok"], told["retired"]) == (False, True)
    third = Workbench(runs=tmp_path, fresh=True)
    assert third.draft is not second.draft
    for face in (first, second, third):
        face.close()


def test_closing_ends_threads_and_the_inspector(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    face = Workbench(runs=tmp_path)
    ask(face, "state")
    ask(face, "rows", kind="index")
    ask(face, "guide")
    inspector = asking._shared.pid if asking._shared is not None else None
    assert inspector is not None
    face.close()
    face.close()
    give_up = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not set(threading.enumerate()) - before
    assert not Path(f"/proc/{inspector}").exists()


def test_faces_of_one_kernel_share_one_inspector(tmp_path: Path) -> None:
    faces = [Workbench(runs=tmp_path), Preview(Draft.new("demo")), Preview(Draft.new("demo"))]
    started = set()
    for face in faces:
        ask(face, "rows", kind="index")
        started.add(asking._shared.pid if asking._shared is not None else None)
    assert len(started) == 1
    for face in faces[1:]:
        face.close()
    assert ask(faces[0], "rows", kind="index")["ok"]
    assert asking._shared is not None
    assert {asking._shared.pid} == started, "the others took it with them"
    faces[0].close()
    assert asking._shared is None


@pytest.mark.timeout(60, method="thread")
def test_a_face_that_is_collected_in_the_middle_of_a_question_holds_nothing_up(tmp_path: Path) -> None:
    """The collector may come at any allocation, also in the thread that holds the lock which closing takes."""
    users = asking._users
    closed, lost = Preview(Draft.new("demo")), Preview(Draft.new("demo"))
    closed.close()
    gone = weakref.ref(closed)
    with asking._lock:
        del closed
        gc.collect()
        lost.__del__()
    assert gone() is None
    other = Preview(Draft.new("demo"))
    assert asking._users == users + 2
    ask(other, "rows_news", ticket="none")
    assert asking._users == users + 1
    other.close()
    assert asking._users == users


def test_without_widgets_a_notebook_shows_readable_text(workbench: Workbench) -> None:
    workbench.draft.set(fields.optim.learning_rate.path, -1)
    bundle = workbench._repr_mimebundle_()
    assert bundle is not None
    text = bundle[0]["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in bundle[0]
    assert "effective batch: 64" in text
    assert "error: optim.learning_rate" in text
    assert len(text.splitlines()) < 25


def test_a_config_with_errors_is_not_launched(workbench: Workbench, tmp_path: Path) -> None:
    workbench.draft.set(fields.optim.learning_rate.path, -1)
    answer = ask(workbench, "launch")
    assert answer["ok"] is False
    assert "learning_rate" in answer["error"]
    assert not (tmp_path / "runs").exists()


def test_runs_that_cannot_be_written_are_said_and_not_raised(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    face = Workbench(runs=tmp_path / "file")
    assert ask(face, "launch")["ok"]
    told = wait_for(face, "launched")
    assert "cannot" in told["error"]
    assert ask(face, "launched") | {"id": ""} == {"id": "", "ok": True, "done": True, "run": ""}, "it is said once"
    face.close()


def test_preview_shows_raw_rows_at_once_and_then_the_tokens_of_the_collator(workbench: Workbench) -> None:
    first = ask(workbench, "rows", kind="index", count=2)
    assert first["ok"]
    give_up = time.monotonic() + 5
    news = first
    while "raw" not in news and not news["done"] and time.monotonic() < give_up:
        time.sleep(0.02)
        news = ask(workbench, "rows_news", ticket=first["ticket"])
    raw = news.get("raw")
    found = wait_for(workbench, "rows_news", ticket=first["ticket"])
    tokens = found["rows"][0]["parts"][0]["tokens"]
    text = "".join(token[1] for token in tokens)
    assert raw is None or all(word in raw[0]["text"] for word in text.split("user\n")[1].split("<|im_end|>")[0].split())
    trained = "".join(token[1] for token in tokens if token[2])
    assert trained.endswith("<|im_end|>")
    assert [words for _, words, _ in found["rows"][0]["marks"]] == ["user", "assistant"]
    assert "trained" in found["rows"][0]["words"]


def test_a_newer_question_cancels_the_older_one(tmp_path: Path) -> None:
    preview = Preview(Draft.new("demo"))
    first = ask(preview, "rows", kind="worst")
    second = ask(preview, "rows", kind="index", row=5, count=1)
    assert ask(preview, "rows_news", ticket=first["ticket"])["done"]
    assert wait_for(preview, "rows_news", ticket=second["ticket"])["rows"][0]["index"] == 5
    preview.close()


def test_a_preview_without_data_says_what_to_do() -> None:
    preview = Preview(Draft())
    told = ask(preview, "rows", kind="index")
    assert told["ok"] is False
    assert "Data" in told["hint"]
    preview.close()


def test_a_kernel_that_ends_takes_its_inspector_and_threads_with_it_and_a_new_one_begins_anew(tmp_path: Path) -> None:
    """In a kernel as Jupyter starts one: asked for rows, then restarted without a word to the widgets."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(cwd=str(tmp_path), env={**os.environ, "IPYTHONDIR": str(tmp_path / ".ipython")})
    try:
        begin = (
            "from widgets import Workbench, asking\nwb = Workbench(runs='runs')\n"
            "wb.answer({'id': '1', 'do': 'rows', 'kind': 'index'})\nprint('inspector', asking._shared.pid)"
        )
        first = _printed(client, begin, "inspector")
        assert Path(f"/proc/{first}").exists()
        manager.restart_kernel()
        client.wait_for_ready(timeout=60)
        assert _gone(first)
        second = _printed(client, begin, "inspector")
        assert second != first
        closed = "wb.close()\nimport threading\nprint('threads', sum(t.name.startswith('workbench') for t in threading.enumerate()))"
        assert _printed(client, closed, "threads") == "0"
        assert _gone(second)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _printed(client: Any, code: str, word: str) -> str:
    """What a cell prints behind a word."""
    said: list[str] = []
    client.execute_interactive(
        code,
        timeout=60,
        output_hook=lambda message: said.append(str(message["content"].get("text", message["content"]))),
    )
    found = re.search(rf"{word} (\d+)", "".join(said))
    assert found is not None, said
    return found[1]


def _gone(pid: str, seconds: float = 15) -> bool:
    give_up = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists() and time.monotonic() < give_up:
        time.sleep(0.05)
    return not Path(f"/proc/{pid}").exists()


def test_a_pair_in_the_preview_says_how_long_its_longest_side_is() -> None:
    from widgets.preview import _row

    parts = {name: [{"id": 1, "text": name, "trained": False}] for name in ("prompt", "chosen", "rejected")}
    told = _row({"index": 0, "parts": parts, "length": 2}, 1)
    assert told["words"].startswith("3 tokens (longest side 2), 0 trained")
    assert _row({"index": 0, "parts": {"input": parts["prompt"]}, "length": 1}, 1)["words"].startswith("1 tokens, ")


def test_the_list_of_runs_says_why_one_is_lost_failed_or_silent(workbench: Workbench, written: Any) -> None:
    """Numbers of a run folder as its worker leaves it, and the clock of one put back."""
    lost, failed, quiet, done = (written(name=name) for name in ("Lost", "Failed", "Quiet", "Done"))
    for each in (lost, failed, quiet, done):
        each.steps(3)
    lost.folder.update_json(state="lost", cause="lost", message="The worker ended while nothing watched it.")
    failed.pen.write("failed", cause="diverged", message="The training diverged at step 3.\x1b[31m", lines=[], step=3)
    failed.folder.update_json(state="failed")
    done.finish()
    for path in (quiet.folder.events, quiet.folder.json):
        os.utime(path, (time.time() - 300,) * 2)
    told = {run["id"].split("-")[0].lower(): run for run in ask(workbench, "runs")["runs"]}
    assert told["lost"]["why"] == "The worker ended while nothing watched it."
    assert told["failed"]["why"].startswith("The training diverged at step 3.")
    assert "\x1b" not in told["failed"]["why"]
    assert told["quiet"]["silent"] == "silent for 5:00"
    assert "its worker may hang" in told["quiet"]["why"]
    assert f"`workbench stack {told['quiet']['id']}`" in told["quiet"]["why"]
    assert told["done"]["why"] == ""
    assert told["done"]["reward"] is None
    done.pen.write("metrics", step=4, loss=0.0, reward=0.25)
    assert next(run for run in ask(workbench, "runs")["runs"] if run["id"] == told["done"]["id"])["reward"] == 0.25


def test_the_run_that_wrote_last_stands_first(workbench: Workbench, written: Any) -> None:
    for number, name in enumerate(("Old", "Asked", "New")):
        run = written(name=name)
        for path, at in ((run.folder.events, number), (run.folder.json, 9 if name == "Asked" else number)):
            os.utime(path, (1e9 + at,) * 2)
    assert [run["id"].split("-")[0] for run in ask(workbench, "runs")["runs"]] == ["asked", "new", "old"]


def test_columns_are_picked_and_kept_and_three_rows_follow(workbench: Workbench, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"q": "{n}?", "a": "<b>{n}"}}\n' for n in range(5)))
    workbench.draft.set("data.train", [{"path": str(tmp_path / "rows.jsonl")}])
    ask(workbench, "columns_open")
    assert wait_for(workbench, "columns_news")["problem"].startswith("columns q, a fit no known format")
    ask(workbench, "columns_format", format="prompt_completion")
    wait_for(workbench, "columns_news")
    ask(workbench, "columns_choose", part="prompt", column="q")
    assert ask(workbench, "columns_choose", part="completion", column="a")["parts"][1]["column"] == "a"
    told = wait_for(workbench, "columns_news")
    assert [row["says"] for row in told["rows"]] == [[["prompt", f"{n}?"], ["completion", f"<b>{n}"]] for n in range(3)]
    assert told["changed"]
    assert not ask(workbench, "columns_keep")["changed"]
    assert workbench.draft.config.data.train[0].columns == {"prompt": "q", "completion": "a"}
    ask(workbench, "undo")
    assert workbench.draft.config.data.train[0].columns == {}


def test_packs_have_bands_with_their_position_ids() -> None:
    from widgets.preview import _bars, _cut, _marks

    row = {"documents": [3, 2], "source_rows": [7, 1200], "positions": [0, 1, 2, 0, 1]}
    assert _marks(row) == [
        [0, "row 7: 3 tokens at 0, position ids from 0", True],
        [3, "row 1,200: 2 tokens at 3, position ids from 0", True],
    ]
    lengths = (10, 20, 30, 40)
    assert _cut(lengths, 40) is None
    assert sum(_bars(lengths)[: _cut(lengths, 25)]) == 2, "rows of up to 25 tokens stand before the line"


def test_a_template_is_tried_and_saved_beside_the_row_that_it_writes(workbench: Workbench, tmp_path: Path) -> None:
    ask(workbench, "template_open", row=2)
    first = wait_for(workbench, "template_news")
    assert (first["problem"], first["flaws"], first["turns"][-1]["role"]) == ("", [], "assistant")
    without = first["text"].replace("<|im_end|>", "")
    ask(workbench, "template_type", text=without)
    told = wait_for(workbench, "template_news")
    assert told["changed"]
    assert told["flaws"][0].startswith("This row learns no end token")
    ask(workbench, "template_type", text="{% for %}")
    assert "is not a valid template" in wait_for(workbench, "template_news")["problem"]
    ask(workbench, "template_type", text=without)
    wait_for(workbench, "template_news")
    saved = ask(workbench, "template_save", path=str(tmp_path / "mine.jinja"))
    assert not saved["changed"]
    assert (tmp_path / "mine.jinja").read_text() == without
    assert workbench.draft.config.model.chat_template == str(tmp_path / "mine.jinja")
