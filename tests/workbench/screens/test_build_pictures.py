"""How the build screen looks, one picture a state; the machine and the files are always the same ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from engine.hardware import Gpu, Machine
from engine.planning.estimate import Estimate
from engine.session.collector import FactsCollector
from engine.session.draft import Draft
from workbench.app import WorkbenchApp

Compare = Callable[..., bool]
SOUND = """version: 1
model: {name: builtin/tiny, dtype: float32}
data:
  train: [{path: builtin/dates}]
  eval: [{path: builtin/dates, split: eval}]
  max_length: 128
optim: {learning_rate: 0.001, per_device_train_batch_size: 64, gradient_accumulation_steps: 1}
run: {name: dates, save_steps: 100}
"""
BROKEN = """version: 1
model: {name: builtin/tiny}
method: {kind: dpo, beta: -3}
adapter: {kind: lora, r: 16}
data:
  train: [{path: nothing.jsonl}]
optim: {learnign_rate: 1e-4, num_train_epochs: lots}
"""


@pytest.fixture(autouse=True)
def _one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import engine.data.gather_facts as look

    card = Gpu("NVIDIA H100 80GB HBM3", 79 * (1 << 30), (9, 0))
    machine = Machine((card,), 16, 128 << 30, 512 << 30, "box")
    monkeypatch.setattr(look, "this_machine", lambda folder=".": machine)
    monkeypatch.setattr("engine.session.build.estimate", guess)
    monkeypatch.setattr(FactsCollector, "_ask_due", lambda self: None)  # no inspector: its answers come when they come
    monkeypatch.setattr(
        "workbench.screens.background._logout", lambda: (False, "This machine does not end your processes at logout.")
    )
    monkeypatch.setattr(Input, "cursor_blink", False)


def guess(config: Any, facts: Any) -> Estimate:
    """Numbers that follow the batch size and nothing else: the pictures are about the screen."""
    batch = config.optim.per_device_train_batch_size * config.optim.gradient_accumulation_steps
    return Estimate(
        effective_batch=batch,
        steps=24_000 // batch,
        trainable_parameters=200_000,
        checkpoint_bytes=4 << 20,
        checkpoints_bytes=12 << 20,
        memory_total=batch << 24,
        device_bytes=79 << 30,
    )


def steps(*keys: str) -> Callable[[Any], Any]:
    """Wait for what is found out on the side, press the keys, wait until nothing moves."""

    async def run(pilot: Any) -> None:
        for _ in range(200):
            facts = pilot.app.draft.facts
            if facts.machine is not None and facts.sources is not None:
                break
            await pilot.pause(0.05)
        for key in keys:
            await pilot.press(key)
            await pilot.pause()
        await pilot.app.workers.wait_for_complete()
        await pilot.pause(0.2)

    return run


def app_of(draft: Draft | None = None) -> WorkbenchApp:
    return WorkbenchApp(draft or Draft(SOUND, recipe="demo"), runs_dir="runs")


def test_goal(snap_compare: Compare) -> None:
    assert snap_compare(app_of(), terminal_size=(80, 24), run_before=steps())


def test_goal_light(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_THEME", "light")
    assert snap_compare(app_of(), terminal_size=(120, 40), run_before=steps())


def test_data_with_rows_of_a_file(snap_compare: Compare) -> None:
    rows = [{"instruction": f"Name a colour, {n}.", "input": "", "output": "Blue."} for n in range(12)]
    Path("colours.json").write_text(json.dumps(rows))
    draft = Draft("version: 1\nmodel: {name: builtin/tiny}\ndata: {train: [{path: colours.json}]}\n")
    assert snap_compare(app_of(draft), terminal_size=(80, 24), run_before=steps("3"))


def test_method_with_every_level(snap_compare: Compare) -> None:
    draft = Draft(
        "version: 1\nmodel: {name: builtin/tiny}\nmethod: {kind: dpo}\nadapter: {kind: lora}\ndata: {train: [{path: builtin/dates}]}\n"
    )
    assert snap_compare(app_of(draft), terminal_size=(120, 40), run_before=steps("4", "a", "a", "j", "j"))


def test_a_value_that_will_not_do(snap_compare: Compare) -> None:
    keys = ("4", "j", "j", "enter", "x")
    assert snap_compare(app_of(), terminal_size=(80, 24), run_before=steps(*keys))


def test_a_choice(snap_compare: Compare) -> None:
    assert snap_compare(app_of(), terminal_size=(80, 24), run_before=steps("4", "enter"))


def test_an_edit_and_its_consequences(snap_compare: Compare) -> None:
    keys = ("5", "j", "j", "enter", "2", "enter")
    assert snap_compare(app_of(), terminal_size=(80, 24), run_before=steps(*keys))


def test_findings(snap_compare: Compare) -> None:
    assert snap_compare(app_of(Draft(BROKEN)), terminal_size=(80, 24), run_before=steps("exclamation_mark"))


def test_review_of_a_broken_config(snap_compare: Compare) -> None:
    assert snap_compare(app_of(Draft(BROKEN)), terminal_size=(80, 24), run_before=steps("6"))


def test_launch(snap_compare: Compare) -> None:
    assert snap_compare(app_of(), terminal_size=(80, 24), run_before=steps("7"))


def test_help(snap_compare: Compare) -> None:
    assert snap_compare(app_of(), terminal_size=(80, 24), run_before=steps("question_mark"))


def test_leaving_with_changes(snap_compare: Compare) -> None:
    assert snap_compare(app_of(), terminal_size=(80, 24), run_before=steps("4", "j", "j", "delete", "q"))
