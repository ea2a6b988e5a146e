"""A rehearsal from outside: the child is gone, its folder is gone, and a failure is told in the child's own words."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import engine.config.recipes
from engine.config.facts import Facts
from engine.config.files import absolute, overrides, parse
from engine.config.recipes import recipe_mapping
from engine.errors import WorkbenchError
from engine.rules import read
from engine.run import rehearsal, spawn
from engine.run.rehearsal import rehearse
from engine.run.rehearsed import kept, last
from tests.caches import own_cache

RECIPES = [path.stem for path in (Path(engine.config.recipes.__file__).parent).glob("*.yaml")]
CONFIG = read({"model": {"name": "builtin/tiny"}, "data": {"train": [{"path": "builtin/dates"}]}}).config
WORKER = """
import json, os, sys, time
open(os.path.join(sys.argv[1], "pid.txt"), "w").write(str(os.getpid()))
open({mark!r}, "w").write(str(os.getpid()))
for event in {events!r}:
    with open(os.path.join(sys.argv[1], "events.jsonl"), "a") as file:
        file.write(json.dumps(event) + "\\n")
{rest}
"""
DONE = {"kind": "rehearsed", "memory_peak": 2_000, "memory_before": 1_000, "seconds": 0.5, "rows": 8, "tokens": 80}


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts another program in the worker's place; returns the file that tells its process id."""
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    monkeypatch.setenv("WORKBENCH_SCRATCH", str(tmp_path))

    def write(events: list[dict[str, Any]], rest: str = "") -> Path:
        mark = tmp_path / "mark"
        program = tmp_path / "worker.py"
        program.write_text(WORKER.format(events=events, rest=rest, mark=str(mark)))
        monkeypatch.setattr(spawn, "worker_argv", lambda run, choice: [sys.executable, str(program), str(run.path)])
        return mark

    return write


def nothing_left(tmp_path: Path, mark: Path) -> bool:
    return not list(tmp_path.glob("rehearsal-*")) and not psutil.pid_exists(int(mark.read_text()))


def test_the_result_is_scaled_to_the_whole_step_and_kept(worker: Any, tmp_path: Path) -> None:
    mark = worker([{"kind": "phase", "name": "Training"}, {**DONE, "longest": 10}])
    config = CONFIG.model_copy(update={"optim": CONFIG.optim.model_copy(update={"gradient_accumulation_steps": 8})})
    phases: list[str] = []
    found = rehearse(config, Facts(), phases.append)
    assert (found.memory_peak, found.seconds_per_step, found.rows, found.tokens) == (2_000, 2.0, 32, 320)
    assert phases == ["Training"]
    assert nothing_left(tmp_path, mark)
    assert last(config, Facts()) == found
    assert last(CONFIG, Facts()) is None
    assert json.loads(kept().read_text())["error"] is None, "no estimate without the model's shape"


def test_the_newest_of_several_counts_and_damaged_lines_do_not(worker: Any) -> None:
    worker([{**DONE, "longest": 10}])
    rehearse(CONFIG, Facts())
    worker([{**DONE, "longest": 10, "memory_peak": 3_000}])
    rehearse(CONFIG, Facts())
    with kept().open("a") as file:
        file.write('{"key": "torn\nnull\n[1]\n')
    found = last(CONFIG, Facts())
    assert found is not None
    assert found.memory_peak == 3_000


@pytest.mark.parametrize(
    ("events", "rest", "words"),
    [
        ([{"kind": "failed", "message": "The GPU ran out of memory."}], "sys.exit(1)", "The GPU ran out of memory."),
        ([], "os.kill(os.getpid(), 9)", "SIGKILL"),
        ([], "raise ValueError('rows \\x1b[31m')", "ValueError"),
    ],
)
def test_a_failure_is_told_in_its_own_words(
    worker: Any, tmp_path: Path, events: list[dict[str, Any]], rest: str, words: str
) -> None:
    mark = worker(events, rest)
    with pytest.raises(WorkbenchError) as problem:
        rehearse(CONFIG, Facts())
    assert words in problem.value.message
    assert "\x1b" not in problem.value.message
    assert nothing_left(tmp_path, mark)
    assert not kept().exists()


def test_an_interrupt_ends_the_child_and_leaves_nothing(worker: Any, tmp_path: Path) -> None:
    mark = worker([], "time.sleep(60)")

    def interrupt() -> None:
        while not mark.exists() or not mark.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            rehearse(CONFIG, Facts())
    finally:
        signal.signal(signal.SIGINT, before)
    assert nothing_left(tmp_path, mark)
    assert kept().exists() is False


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        ({"kind": "sft"}, 2),
        ({"kind": "grpo", "reward_funcs": ["length:4"]}, 2),
        ({"kind": "ppo", "reward_funcs": ["length:4"]}, 5),
        ({"kind": "ppo", "reward_funcs": ["length:4"], "num_iterations": 4, "steps_per_generation": 6}, 9),
    ],
)
def test_the_child_makes_the_first_step_and_those_that_a_sampling_serves_but_not_many(
    method: dict[str, Any], steps: int
) -> None:
    config = read({"method": method, "data": {"train": [{"path": "builtin/dates"}]}}).config
    assert rehearsal._shortened(config).optim.max_steps == steps


SETTINGS = (
    "run.eval_steps=20", "run.prompts_steps=25", "run.prompts=[a]", "run.save_total_limit=3",
    "optim.warmup_steps=500", "optim.bf16_full_eval=true", "optim.per_device_eval_batch_size=3",
    "optim.max_steps=2000", "data.eval=[{path: builtin/dates, split: eval}]", "data.shuffle=false",
)  # fmt: skip


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_config_that_can_be_launched_can_be_rehearsed(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config that the rehearsal's worker gets is judged by the rules as any other; those of its length must hold too."""
    monkeypatch.setenv("WORKBENCH_SCRATCH", str(tmp_path))
    found: list[str] = []

    def follow(run: Any, *_: Any) -> Any:
        judged = read(parse(run.read_config()).mapping)
        found.extend(finding.message for finding in judged.findings if finding.severity == "error")
        raise WorkbenchError("seen")

    monkeypatch.setattr(rehearsal, "_follow", follow)
    taken = 0
    for more in ((), *((setting,) for setting in SETTINGS)):
        reading = read(overrides(absolute(recipe_mapping(recipe), tmp_path), list(more)), Facts())
        if reading.ok:
            taken += 1
            with pytest.raises(WorkbenchError, match="seen"):
                rehearse(reading.config, Facts())
            assert found == [], more
    assert taken > 2 or not read(absolute(recipe_mapping(recipe), tmp_path), Facts()).ok
