"""The monitor over its messages: only what is new travels, and it adds up to the whole run."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import RunNotFound, WorkbenchError
from engine.export.places import COMMON_K_QUANTS, FORMS, QUANTS
from engine.export.process import Export
from engine.run import checkpoint, control, store
from engine.run.ending import facts, ways
from engine.run.evaluations import Evaluation
from engine.run.events import EventWriter
from engine.run.index import open_view
from engine.run.lock import RunLock
from tests import hung
from tests.checkpointed import run_of_four, steps
from widgets import Monitor
from widgets.protocol import Answer
from widgets.reader import Reader


class View:
    """Holds a run as the browser does."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor, self.run = monitor, monitor.run.id
        self.seq, self.epoch = -1, 0
        self.parts: dict[str, Any] = {}
        self.marks: dict[str, int] = {}
        self.curves: dict[str, list[tuple[float, float, float]]] = {}
        self.latest: list[float] = []
        self.bytes = 0

    @property
    def names(self) -> list[str]:
        return [entry["name"] for entry in self.parts.get("names", [])]

    def look(self, page: str = "curves") -> Answer:
        ends = {name: (self.curves.get(name) or [(None,)])[-1][0] for name in self.names}
        held = {"seq": self.seq, "epoch": self.epoch, "marks": self.marks, "series": ends}
        answer = self.monitor.answer({"id": "1", "do": "watch", "run": self.run, "page": page, **held})
        data, buffers = answer.data, list(answer.buffers)
        assert data["ok"], data
        self.parts |= data.get("parts", {})
        self.marks |= data.get("marks", {})
        if "epoch" in data:
            self.epoch, self.curves = data["epoch"], {}
        self.seq = data.get("seq", self.seq)
        if data.get("latest"):
            self.latest = np.frombuffer(buffers.pop(0), "<f8").tolist()
        for (number, count), buffer in zip(data.get("series", []), buffers, strict=True):
            steps = np.frombuffer(buffer, "<f8", count)
            low, high = np.frombuffer(buffer, "<f4", count, 8 * count), np.frombuffer(buffer, "<f4", count, 12 * count)
            self.curves.setdefault(self.names[number], []).extend(zip(steps, low, high, strict=True))
        self.bytes = sum(map(len, answer.buffers))
        return answer


def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not true():
        assert time.monotonic() < give_up, "it never came"
        time.sleep(0.02)


@pytest.fixture
def watched(written: Callable[..., Any]) -> Any:
    run = written()
    monitor = Monitor(run.folder)
    yield run, monitor, View(monitor)
    monitor.close()


def test_points_arrive_once_and_in_order_and_are_the_runs_own(watched: Any) -> None:
    run, _, view = watched
    for _ in range(10):
        run.steps(20)
        view.look()
    curve = view.curves["loss"]
    assert [step for step, _, _ in curve] == list(range(1, 201))
    assert all(low == high for _, low, high in curve)
    assert curve[99][1] == pytest.approx(2 * math.exp(-1 / 3) + 0.05 * math.sin(100), rel=1e-6)
    assert view.latest[view.names.index("learning_rate")] == 1e-3


def test_nothing_new_costs_next_to_nothing(watched: Any) -> None:
    run, _, view = watched
    run.steps(300)
    view.look()
    view.look()
    answer = view.look()
    assert answer.buffers == []
    assert set(answer.data) <= {"id", "ok", "loading", "series"}


def test_a_long_run_comes_thinned_but_keeps_its_spikes(watched: Any) -> None:
    run, _, view = watched
    run.steps(3000)
    run.step += 1
    run.pen.write("metrics", step=run.step, loss=77.0)
    run.steps(3000)
    answer = view.look()
    assert view.bytes < 40_000
    assert 300 < len(view.curves["loss"]) <= 500
    assert max(high for _, _, high in view.curves["loss"]) == 77.0
    assert answer.data["loading"] == 1.0


def test_whole_curves_come_a_few_in_each_answer_until_all_are_there(watched: Any) -> None:
    run, _, view = watched
    run.steps(600, **{f"part_{number}": float(number) for number in range(12)})
    sent = []
    for _ in range(6):
        view.look()
        sent.append(view.bytes)
    assert max(sent) < 40_000
    assert sent[-1] == 0
    assert all(view.curves[name][-1][0] == 600 for name in view.names)
    assert len(view.names) == 16


def test_a_burst_of_steps_cannot_fill_the_comm(watched: Any) -> None:
    run, _, view = watched
    run.steps(100)
    view.look()
    run.steps(5000, **{f"rewards/{name}": 1.0 for name in "abcdefgh"})
    view.look()
    run.steps(5000, **{f"rewards/{name}": 1.0 for name in "abcdefgh"})
    view.look()
    assert view.bytes < 4_000


def test_a_zoom_brings_the_points_themselves(watched: Any) -> None:
    run, monitor, view = watched
    run.steps(6000)
    view.look()
    answer = monitor.answer({"id": "1", "do": "zoom", "run": view.run, "start": 1000, "stop": 1100})
    number, count = answer.data["series"][0]
    assert view.names[number] == "loss"
    assert np.frombuffer(answer.buffers[0], "<f8", count).tolist() == list(range(1000, 1101))


def test_a_resumed_run_replaces_the_points_it_took_back(watched: Any) -> None:
    run, _, view = watched
    run.steps(100)
    view.look()
    pen = type(run.pen)(run.folder)
    pen.write("started", method="sft", model="m", max_steps=1000, epochs=1, resumed_from_step=60)
    pen.write("metrics", step=61, loss=9.0)
    view.look()
    view.look()
    steps = [step for step, _, _ in view.curves["loss"]]
    assert steps == list(range(1, 62))
    assert view.curves["loss"][-1][1] == 9.0


def test_state_controls_and_cause_follow_the_run(watched: Any) -> None:
    run, monitor, view = watched
    run.steps(3)
    view.look()
    assert view.parts["head"]["state"] == "running"
    assert [each["verb"] for each in view.parts["head"]["controls"]] == [
        "save_stop",
        "checkpoint",
        "end_of_epoch",
        "stop",
    ]
    assert monitor.answer({"id": "1", "do": "control", "run": view.run, "verb": "save_stop"}).data["ok"]
    asked = [control.parse(path) for path in run.folder.control.iterdir() if not path.name.startswith(".")]
    assert [each.do for each in asked] == ["save_stop"]
    view.look()
    assert "asked" in view.parts["now"][3]
    run.pen.write("control", id=asked[0].id, do="save_stop", status="accepted", message="after this step")
    view.look()
    assert "accepted" in view.parts["now"][3]
    run.pen.write("failed", cause="oom", message="The card ran out of memory.", lines=["CUDA out of memory"], step=3)
    view.look()
    head = view.parts["head"]
    assert (head["state"], head["cause"], head["resumable"]) == ("failed", "The card ran out of memory.", True)
    assert head["lines"] == ["CUDA out of memory"]


def test_the_way_to_the_first_step_is_told_until_there_is_one(watched: Any) -> None:
    run, _, view = watched
    view.look()
    way = view.parts["way"]
    assert way["title"] == "before the first step"
    assert way["phases"][0] == ["process", "now", ""]
    run.pen.write("phase", name="Loading the libraries")
    run.pen.write("phase", name="Loading the tokenizer")
    view.look()
    libraries, tokenizer, rows, *_, last = view.parts["way"]["phases"]
    assert libraries[:2] == ["libraries", "done"]
    assert libraries[2].endswith("s")
    assert tokenizer[:2] == ["tokenizer", "now"]
    assert (rows, last) == (["rows", "later", ""], ["first step", "later", ""])
    run.pen.write("phase", name="evil\u202ephase: and more")
    view.look()
    assert "\u202e" not in str(view.parts["way"])
    run.pen.write("phase", name="Compiling layers: 900 batches earn the wait")
    run.pen.write("progress", what="compiling layers", done=6, total=0, unit="seconds")
    view.look()
    assert view.parts["now"][2] == "compiling layers: 0:06; 900 batches earn the wait"
    run.pen.write("metrics", step=1, loss=2.0)
    view.look()
    assert view.parts["way"] is None


def test_samples_receipt_log_and_config_travel_when_their_page_is_open(watched: Any) -> None:
    run, _, view = watched
    run.pen.write("sample", step=0, index=0, prompt="When?", completion="no idea")
    run.pen.write("sample", step=50, index=0, prompt="When?", completion="2021-03-03")
    run.pen.write(
        "receipt", entries=[{"feature": "precision", "requested": "auto", "effective": "float32", "count": 3}]
    )
    run.folder.log.write_text("\x1b[31mred\x1b[0m line\n")
    view.look()
    assert "samples" not in view.parts
    view.look("samples")
    assert view.parts["samples"] == [{"prompt": "When?", "answers": [["step 50", "2021-03-03"], ["before", "no idea"]]}]
    view.look("receipt")
    assert view.parts["receipt"] == [["precision", "auto", "float32", "3", ""]]
    view.look("log")
    assert "\x1b" not in view.parts["log"]
    assert "red" in view.parts["log"]
    run.folder.log.write_text("".join(f"{number:0100d}\n" for number in range(200)))
    view.look("log")
    assert len(view.parts["log"]) <= 5_000
    assert view.parts["log"].endswith(f"{199:0100d}"), "of a long one its end"
    view.look("config")
    assert "builtin/tiny" in view.parts["config"]


def test_two_monitors_of_one_run_share_one_reader_and_leave_none(watched: Any) -> None:
    run, monitor, view = watched
    other = Monitor(run.folder)
    second = View(other)
    run.steps(10)
    view.look()
    second.look()
    assert second.curves == view.curves
    assert Reader.of(run.folder).users == 3
    assert len([reader for path, reader in Reader._open.items() if path == run.folder.path]) == 1
    other.close()
    monitor.close()
    Reader.of(run.folder).leave()
    Reader._open[run.folder.path].leave()
    assert run.folder.path not in Reader._open


@pytest.mark.parametrize("name", ["../runs/dates-0001", "/etc", "..", ".", "", "dates-0001/../dates-0001", "a" * 300])
def test_no_path_comes_in_by_message(watched: Any, name: str) -> None:
    _, monitor, _ = watched
    answer = monitor.answer({"id": "1", "do": "watch", "run": name})
    assert answer.data["ok"] is False


def test_a_run_is_found_by_name_folder_or_path(written: Callable[..., Any], tmp_path: Any) -> None:
    run = written()
    for name in (run.folder.id, run.folder.path, str(run.folder.path), run.folder):
        monitor = Monitor(name, runs=tmp_path / "runs")
        assert monitor.run.path == run.folder.path
        monitor.close()
    with pytest.raises(RunNotFound, match="dates-9999"):
        Monitor("dates-9999", runs=tmp_path / "runs")


def test_hostile_names_are_made_visible(written: Callable[..., Any]) -> None:
    run = written(model="evil\u202emodel\x1b]0;x\x07")
    run.pen.write("metrics", step=1, **{"loss": 1.0, "a\u202eb": 2.0})
    monitor = Monitor(run.folder)
    view = View(monitor)
    view.look()
    text = str(view.parts)
    assert "\x1b" not in text
    assert "evil\\u202emodel" in view.parts["head"]["model"]
    assert [entry["title"] for entry in view.parts["names"]][-1] == "a\\u202eb"
    monitor.close()


async def test_while_a_cell_awaits_the_end_the_view_is_answered(written: Callable[..., Any]) -> None:
    run = written()
    run.steps(3)
    monitor = Monitor(run.folder)
    view = View(monitor)
    waiting = asyncio.create_task(monitor.ended())
    await asyncio.sleep(0)
    run.steps(4)
    view.look()
    assert view.curves["loss"][-1][0] == 7
    assert not waiting.done()
    run.finish()
    assert await asyncio.wait_for(waiting, 20) == "finished"
    assert await monitor.ended() == monitor.wait() == "finished"
    monitor.close()


async def test_waiting_for_a_while_says_how_far_the_run_is(written: Callable[..., Any]) -> None:
    run = written()
    run.steps(3)
    monitor = Monitor(run.folder)
    assert await monitor.ended(0.1) == monitor.wait(0.1) == "running"
    monitor.close()


def test_a_resume_whose_rows_differ_names_them_and_waits_for_a_word(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, monitor, view = watched
    run.steps(3)
    run.pen.write("stopped", step=3, seconds=1.0, by="someone")
    resumed: list[dict[str, Any]] = []
    monkeypatch.setattr("engine.run.launch.settle", lambda folder: None)
    monkeypatch.setattr("engine.run.launch.resume", lambda folder, **how: resumed.append(how))
    said = ["data.train: row 3 of 40 differs from what the run was trained on"]
    monkeypatch.setattr("engine.session.resume.data_changes", lambda folder, on_progress=None: said)
    run.folder.update_json(state="stopped")

    def after(wanted: Callable[[list[Any]], bool]) -> list[Any]:
        for _ in range(200):
            view.look()
            if wanted(view.parts["now"]):
                return view.parts["now"]
            time.sleep(0.02)
        raise AssertionError(view.parts["now"])

    assert monitor.answer({"id": "1", "do": "resume", "run": view.run}).data["ok"]
    assert "row 3 of 40 differs" in after(lambda now: now[4] is True)[3]
    assert resumed == []
    assert monitor.answer({"id": "2", "do": "resume", "run": view.run, "accept_data": True}).data["ok"]
    assert "row 3" not in after(lambda now: now[4] is False and now[3] != "resuming")[3]
    assert resumed == [{"accept_data": True}]


def test_a_run_that_hangs_is_named_and_its_stack_is_shown_on_request(tmp_path: Path) -> None:
    run = store.create(tmp_path / "runs", "version: 1\n", {"name": "Dates", "method": "sft", "model": "builtin/tiny"})
    hung.steps_taken(run)
    with hung.in_c(run) as worker:
        hung.put_back(run, 45)
        monitor = Monitor(run)
        view = View(monitor)
        view.look()
        _, eta, phase, _, _, silent, _ = view.parts["now"]
        assert (eta, phase, silent) == (None, "silent for 45 s", True)
        told = monitor.answer({"id": "1", "do": "stack", "run": run.id}).data
        assert told["ok"], told
        assert told["stack"].startswith(f"process {worker.pid}:\n")
        assert "in deep_inside" in told["stack"]
        assert worker.poll() is None
        with EventWriter(run, segment=0) as pen:
            pen.write("metrics", step=8, loss=0.5)
        view.look()
        assert view.parts["now"][5] is False
        run.update_json(state="stopped")
        refused = monitor.answer({"id": "2", "do": "stack", "run": run.id}).data
        assert refused["ok"] is False
        assert "no worker at work" in str(refused)
        monitor.close()


def test_counts_and_readings_of_a_device_are_no_curves(watched: Any) -> None:
    run, _, view = watched
    run.steps(3, eval_loss=1.0, num_tokens=4096.0, eval_runtime=2.0)
    run.pen.write("gpu", devices=[{"index": 0, "load": 91.0, "power": 300.0}])
    view.look()
    assert set(view.names) == {"loss", "eval_loss", "grad_norm", "learning_rate", "tokens_per_second"}
    assert view.parts["gpu"] == [["GPU 0", "91 %  ·  300 W"]]
    run.pen.write("metrics", step=4, step_seconds=0.5)
    figures = {"tokens_per_second": [900, 901], "data_seconds": [0.2, 0.001], "memory": [1 << 30, 2 << 30]}
    run.pen.write("ranks", step=4, step_seconds=0.5, communication_seconds=[0.05, 0.25], **figures)
    view.look()
    assert view.parts["gpu"][1:] == [
        ["rank 0, slowest", "900 tokens/s  ·  data 200 ms  ·  1.0 GiB  ·  comm wait 10.0 %"],
        ["rank 1", "901 tokens/s  ·  data 1.0 ms  ·  2.0 GiB  ·  comm wait 50.0 %"],
    ]


def test_a_finished_run_shows_the_card_of_the_commands_and_its_buttons_do_what_they_say(
    watched: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, monitor, view = watched
    run.steps(20, eval_loss=2.0)
    checkpoint.commit(checkpoint.begin(run.folder, 20), {})
    run.pen.write("checkpoint", step=20, path="checkpoints/checkpoint-20", state="committed", bytes=1)
    view.look()
    assert view.parts["end"]["facts"] == []
    run.finish()
    view.look()
    name, end = run.folder.id, view.parts["end"]
    with open_view(run.folder) as watch:
        assert [tuple(fact) for fact in end["facts"]] == facts(watch.view, run.folder)
        assert [(way["do"], way["command"]) for way in end["ways"]] == [
            (way.do, way.command) for way in ways(watch.view, run.folder, name)
        ]
    assert [way["do"] for way in end["ways"]] == ["chat", "evaluate", "export", "longer"]
    assert f"workbench resume {name} --set optim.num_train_epochs=2" in repr(monitor)
    resumed: list[Any] = []
    monkeypatch.setattr("widgets.run_jobs.resume", lambda folder, **how: resumed.append((folder.path, how)))
    assert monitor.answer({"id": "1", "do": "longer", "run": name}).data["ok"]
    until(lambda: bool(resumed))
    assert resumed == [(run.folder.path, {"settings": {"optim.num_train_epochs": 2}, "accept_data": False})]
    found = {"checkpoint": "checkpoint-20", "method": "sft", "rows": 3, "data": "data.eval"}
    done = {**found, "metrics": {"eval_loss": 2.0}, "base": {"eval_loss": 7.0}}
    monkeypatch.setattr(Evaluation, "run", lambda task, report: done)
    monkeypatch.setattr("widgets.run_jobs.step_of", lambda run, wanted: 20)
    until(lambda: monitor.answer({"id": "2", "do": "evaluate", "run": name}).data["ok"])

    def measured() -> bool:
        view.look()
        return ["measured", "checkpoint-20, 3 rows of data.eval: loss 2 (7 before training)"] in view.parts["end"][
            "facts"
        ]

    until(measured)
    refused = monitor.answer({"id": "2b", "do": "score", "run": name, "task": "dates.yaml"})
    assert "task: must be a task's YAML file" in refused.data["error"]
    refused = monitor.answer({"id": "2c", "do": "score", "run": name, "task": " "})
    assert "No task is named." in refused.data["error"]
    harness = tmp_path / "packages" / "lm_eval"
    harness.mkdir(parents=True)
    (harness / "__init__.py").touch()
    monkeypatch.syspath_prepend(harness.parent)
    (tmp_path / "dates.yaml").write_text("task: dates\n")
    scored: list[Any] = []
    monkeypatch.setattr(Evaluation, "run", lambda task, report: scored.append(task.request["tasks"]) or done)
    file = str(tmp_path / "dates.yaml")
    until(lambda: monitor.answer({"id": "2d", "do": "score", "run": name, "task": file}).data["ok"])
    until(lambda: scored == [[file]])
    places: list[Any] = []

    def take_along(task: Export, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        places.append((task.request["places"], task.request["quant"]))
        raise WorkbenchError("the disk is full", "Free some space.")

    monkeypatch.setattr(Export, "run", take_along)
    monkeypatch.chdir(run.folder.path.parent)
    until(
        lambda: monitor.answer({"id": "3", "do": "export", "run": name}).data["ok"]
    )  # what was begun before has ended
    until(lambda: (view.look(), "the disk is full" in view.parts["now"][3])[1])
    folder = Path.cwd() / f"{name}-export"
    assert places == [({"safetensors": str(folder / "safetensors")}, "F16")]

    # The forms and number formats of the command and the app; K-quants where something here makes them.
    def offered() -> dict[str, Any]:
        view.look()
        return next(way for way in view.parts["end"]["ways"] if way["do"] == "export")

    monkeypatch.setattr("engine.export.llama_cpp.installed", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    without = offered()
    assert dict(without["forms"]) == {
        form: FORMS[form] for form in FORMS if form not in ("adapter", "packed")
    }  # all weights were trained
    assert (list(without["quants"]), "pip install llama-cpp-python" in without["needs"]) == ([*QUANTS], True)
    (tmp_path / "llama-quantize").touch(0o755)
    assert (list(offered()["quants"]), offered()["needs"]) == ([*QUANTS, *COMMON_K_QUANTS], "")
    asked = {"do": "export", "run": name, "forms": ["gguf", "modelfile"], "quant": "Q4_K_M"}
    until(lambda: monitor.answer({"id": "4", **asked}).data["ok"])
    until(lambda: len(places) == 2)
    wanted = {"gguf": folder / f"{name}-Q4_K_M.gguf", "modelfile": folder / "Modelfile"}
    assert places[1] == ({form: str(place) for form, place in wanted.items()}, "Q4_K_M")
    for bad, why in (
        ({"forms": []}, "Nothing is ticked"),
        ({"forms": ["onnx"]}, "must be one of safetensors"),
        ({"forms": ["gguf"], "quant": "Q9"}, "quant: must be one of F16, BF16, Q8_0, F32, MXFP4, Q2_K"),
    ):
        refused = monitor.answer({"id": "5", **asked, **bad}).data
        assert not refused["ok"]
        assert why in refused["error"]


def test_checkpoints_are_removed_only_when_asked_and_never_the_newest_or_the_best(
    tmp_path: Path,
) -> None:
    folder = run_of_four(tmp_path)
    monitor = Monitor(folder)
    view = View(monitor)
    try:
        view.look()
        assert view.parts["head"]["checkpoints"] == 4
        assert view.parts["end"]["ways"][-1]["do"] == "prune"
        shown = monitor.answer({"id": "1", "do": "pruning", "run": folder.id}).data
        assert [(row[0], row[2]) for row in (*shown["stay"], *shown["go"])] == [
            (4, "held-out loss 2, the newest whole one"),
            (2, "held-out loss 1, the best"),
            (3, "held-out loss 1.50, older, not the best"),
            (1, "held-out loss 3, older, not the best"),
        ]
        assert shown["go"][1][3] == [["When?", "␛day 1"]]
        assert shown["act"] == "Remove 2 checkpoints, which frees 4.2 KiB"
        assert steps(folder) == [1, 2, 3, 4]
        # Whatever a page asks for, the newest whole one and the best stay.
        asked = {"do": "prune", "run": folder.id, "keep": 1, "steps": [4, 2, 1]}
        assert monitor.answer({"id": "2", **asked}).data["ok"]
        until(lambda: steps(folder) == [2, 3, 4])
        until(lambda: (view.look(), view.parts["now"][3] == "1 checkpoint removed, 1.1 KiB free.")[1])
        refused = monitor.answer({"id": "3", "do": "pruning", "run": folder.id, "keep": 0}).data
        assert not refused["ok"]
        folder.update_json(state="running")
        with RunLock(folder):
            refused = monitor.answer({"id": "4", "do": "pruning", "run": folder.id}).data
            assert "removes older checkpoints itself" in refused["error"]
    finally:
        monitor.close()
