"""Who watches sees that layers are being compiled, for how long already and why; what was waited counts in the next run."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest
import torch

from engine.config.facts import CompilerWait
from engine.facts import compiler_waits
from engine.facts.compiler_waits import Measured
from engine.facts.model_shape import model_facts
from engine.features.compile import EARNS, progress
from engine.features.compile.progress import CompileProgress, Paces
from engine.rules import read
from engine.run.view import RunView, fold
from tests.engine.features.compile.test_choice import GOOD, QWEN
from tests.engine.features.compile.test_fallback import Told
from workbench.cli.following import status_line
from workbench.panels.watching import _way, doing

QWEN_CONFIG = read(GOOD).config


def slowly(seconds):
    """A backend of torch's compiler that takes so long, and compiles nothing."""

    def backend(graph, inputs):
        time.sleep(seconds)
        return graph.forward

    return backend


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(progress, "TICK", 0.02)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def viewed(events):
    view = RunView("run")
    for number, (kind, payload) in enumerate(events):
        view = fold(view, [{"v": 1, "seq": number, "t": float(number), "segment": 0, "kind": kind, **payload}])
    return view


def test_the_phase_says_why_and_the_seconds_go_on_until_the_batch_is_over(quick):
    told = Told()
    speaker = CompileProgress(told, "500 steps earn the wait")
    undo = speaker.watch()
    with speaker.batch():
        torch.compile(lambda x: x * 2, backend=slowly(0.2))(torch.ones(3))
        assert told[-1][0] == "progress"
        seen = viewed(told)
    undo()
    assert told[0] == ("phase", {"name": "Compiling layers: 500 steps earn the wait"})
    assert told[-1] == ("phase", {"name": "Training"})
    assert sum(kind == "progress" for kind, _ in told) >= 3
    assert seen.progress is not None
    after = viewed(told)
    assert (after.phase, after.progress) == ("Training", None)
    torch._dynamo.reset()
    torch.compile(lambda x: x * 3, backend="eager")(torch.ones(3))
    assert told[-1] == ("phase", {"name": "Training"})  # nothing is told once it is taken back


def test_both_frontends_and_the_command_show_the_seconds_so_far():
    begun = [("phase", {"name": "Compiling layers: it pays"})]
    going = {"what": progress.WHAT, "done": 75, "total": 0, "unit": "seconds"}
    view = viewed([*begun, ("progress", going)])
    assert status_line(view) == doing(view) == "compiling layers: 1:15"
    shown = "\n".join("".join(text for text, _ in line) for line in _way(view, 24))
    assert "compiling layers: 1:15\n  it pays\n" in shown
    view = viewed([*begun, ("progress", {**going, "total": 103})])
    assert status_line(view) == doing(view) == "compiling layers: 1:15 of 1:43"


def test_what_is_compiled_between_two_batches_is_told_too_and_only_while_it_is(quick):
    told = Told()
    speaker = CompileProgress(told, "it pays")
    undo = speaker.watch()
    torch.compile(lambda x: x * 2, backend=slowly(0.1))(torch.ones(3))
    undo()
    assert [payload["name"] for kind, payload in told if kind == "phase"] == ["Compiling layers: it pays", "Training"]


def test_a_process_without_events_tells_nothing(quick):
    speaker = CompileProgress(None, "it pays")
    undo = speaker.watch()
    torch.compile(lambda x: x * 2, backend="eager")(torch.ones(3))
    undo()


def test_the_wait_is_what_the_first_batch_took_beyond_those_after_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def run(first):
        paces = Paces("layers")
        for batch in range(12):
            paces.batch(True)
            if batch == 0:
                now[0] += first
                paces.waited(first)
            else:
                now[0] += 0.5

    run(100.5)
    entry = json.loads((tmp_path / compiler_waits.FILE).read_text())["layers"]
    assert entry == {"first": 100.0, "again": None, "plain": None, "step": 0.5, "times": 1}
    run(8.5)
    run(6.5)
    entry = json.loads((tmp_path / compiler_waits.FILE).read_text())["layers"]
    assert entry == {"first": 100.0, "again": 6.0, "plain": None, "step": 0.5, "times": 3}


def test_plain_batches_are_measured_as_well(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    paces = Paces("layers")
    for _ in range(10):
        paces.batch(False)
        now[0] += 2.0
    assert json.loads((tmp_path / compiler_waits.FILE).read_text())["layers"]["plain"] == 2.0


def test_the_record_is_of_this_shape_on_this_card(tmp_path):
    file, config = tmp_path / "waits.json", QWEN_CONFIG
    name = compiler_waits.key(config, QWEN, "NVIDIA H100")
    compiler_waits.keep(name, Measured(wait=19.0, step=0.4), file)
    assert compiler_waits.known(config, QWEN, "NVIDIA H100", file) == CompilerWait(19.0, None, None, 0.4, 1)
    assert compiler_waits.known(config, QWEN, "NVIDIA H200", file) is None
    assert compiler_waits.known(config, replace(QWEN, hidden_size=1024), "NVIDIA H100", file) is None
    other = config.model_copy(update={"data": config.data.model_copy(update={"packing": False})})
    assert compiler_waits.known(other, QWEN, "NVIDIA H100", file) is None
    assert compiler_waits.key(config, model_facts("nobody/of-no-shape"), "NVIDIA H100") is None


def test_each_tier_waits_for_graphs_of_its_own(tmp_path):
    """What was compiled with layers computed again is not there for layers that keep everything, and takes another time."""
    file = tmp_path / "waits.json"

    def asked(tier, layers=None, attention="sdpa"):
        values = {"gradient_checkpointing": tier, "recompute_num_layers": layers}
        model = {**GOOD["model"], "attention": attention}
        return read(
            {**GOOD, "model": model, "memory": {key: value for key, value in values.items() if value is not None}}
        ).config

    def keep(config, **seconds):
        compiler_waits.keep(compiler_waits.key(config, QWEN, "card"), Measured(**seconds), file)

    def known(config):
        return compiler_waits.known(config, QWEN, "card", file)

    keep(asked("full"), wait=19.0, step=0.4)
    assert known(asked("full")).first == 19.0
    for other in (asked("selective"), asked(False), asked("full", 12), asked("full", attention="eager")):
        assert known(other) is None
    # Left to `auto` it is what such a run took last, its plain layers those of the last run without a compiler.
    keep(asked(True), plain=0.6)
    keep(asked("selective"), wait=30.0, step=0.3)
    assert known(asked("auto", attention="auto")) == CompilerWait(30.0, None, 0.6, 0.3, 1)
    keep(asked(True), plain=0.7)
    assert known(asked("auto")) == CompilerWait(19.0, None, 0.7, 0.4, 1)
    assert known(asked("selective")) == CompilerWait(30.0, None, None, 0.3, 1)


HOSTILE = [
    {"first": 1.0, "again": 10**400, "plain": None, "step": 1.0, "times": 2},
    {"first": 1.0, "again": 1e5, "plain": None, "step": 1e-310, "times": 2},
    {"first": 1.0, "again": -1.0, "plain": None, "step": 1.0, "times": 2},
    {"first": 1.0, "again": 1.0, "plain": None, "step": 1.0, "times": -2},
    {"first": 1.0, "again": 1.0, "plain": None, "step": 1.0, "times": 10**400},
    {"first": 1.0, "again": float("nan"), "plain": None, "step": 1.0, "times": 2},
    {"first": 1.0, "again": float("inf"), "plain": None, "step": 1.0, "times": 2},
]


@pytest.mark.parametrize("entry", HOSTILE)
def test_numbers_that_no_run_measured_count_as_none(tmp_path, entry):
    file = tmp_path / "waits.json"
    name = compiler_waits.key(QWEN_CONFIG, QWEN, "card")
    file.write_text(json.dumps({name: entry}))
    assert compiler_waits.known(QWEN_CONFIG, QWEN, "card", file) is None


def test_batches_of_another_size_are_not_compared(tmp_path):
    file = tmp_path / "waits.json"
    larger = read({**GOOD, "optim": {"per_device_train_batch_size": 8}}).config
    longer = read({**GOOD, "data": {**GOOD["data"], "max_length": 16384}}).config
    compiler_waits.keep(compiler_waits.key(QWEN_CONFIG, QWEN, "card"), Measured(plain=0.1), file)
    pairs = read({**GOOD, "method": {"kind": "dpo"}}).config
    for other in (larger, longer, pairs):
        assert compiler_waits.known(other, QWEN, "card", file) is None
    assert compiler_waits.known(QWEN_CONFIG, replace(QWEN, layers=2), "card", file) is None
    assert compiler_waits.known(QWEN_CONFIG, QWEN, "card", file).plain == 0.1


def test_what_is_no_file_or_too_large_is_not_read(tmp_path, monkeypatch):
    name = compiler_waits.key(QWEN_CONFIG, QWEN, "card")
    os.mkfifo(tmp_path / "pipe")
    assert compiler_waits.known(QWEN_CONFIG, QWEN, "card", tmp_path / "pipe") is None
    compiler_waits.keep(name, Measured(wait=2.0), tmp_path / "waits.json")
    monkeypatch.setattr(compiler_waits, "LARGEST", 10)
    assert compiler_waits.known(QWEN_CONFIG, QWEN, "card", tmp_path / "waits.json") is None


def test_a_folder_that_is_a_file_stops_no_run(tmp_path):
    (tmp_path / "folder").write_text("")
    compiler_waits.keep("layers", Measured(wait=2.0), tmp_path / "folder" / "waits.json")


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", '{"%s": {"first": 1}}', '{"%s": {"first": "x", "again": null}}', "[" * 9999]
)
def test_a_damaged_record_is_none_and_is_written_anew(tmp_path, text):
    file = tmp_path / "waits.json"
    name = compiler_waits.key(QWEN_CONFIG, QWEN, "card")
    file.write_text(text.replace("%s", name))
    assert compiler_waits.known(QWEN_CONFIG, QWEN, "card", file) is None
    compiler_waits.keep(name, Measured(wait=2.0), file)
    assert compiler_waits.known(QWEN_CONFIG, QWEN, "card", file).first == 2.0


def test_a_record_that_cannot_be_written_stops_no_run(tmp_path):
    compiler_waits.keep("layers", Measured(wait=2.0), tmp_path / "nowhere" / "waits.json")
    assert not (tmp_path / "nowhere").exists()


def test_what_was_measured_here_moves_the_threshold():
    from tests.engine.features.compile.test_choice import compiled

    padded = {"data.packing": False, "optim.gradient_accumulation_steps": 1}

    def chosen(batches, known):
        return compiled({**padded, "optim.max_steps": batches}, known=known)

    assert chosen(100, None)[0] is False
    # Compiled before, its new wait not seen yet: as measured with the caches of a run before.
    once = CompilerWait(first=100.0, step=0.5, times=1)
    assert chosen(EARNS, once)[0] is True
    assert chosen(EARNS - 1, once)[0] is False
    # 8 s of waiting over 0.25 s a batch.
    both = CompilerWait(first=100.0, again=8.0, plain=0.75, step=0.5, times=2)
    assert chosen(31, both)[0] is False
    on, why = chosen(32, both)
    assert (on, "8.0 s that was measured here" in why) == (True, True)
    slower = CompilerWait(first=100.0, again=8.0, plain=0.5, step=0.5, times=2)
    off, why = chosen(100_000, slower)
    assert (off, "no faster" in why) == (False, True)
