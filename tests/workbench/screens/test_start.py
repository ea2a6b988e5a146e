"""What `workbench` opens on: what goes on, what was done last, ways to begin; and what Enter does with each."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.run.listing import Listing
from engine.run.store import RunFolder
from engine.session.draft import Draft
from engine.session.opening import goal_of, open_step
from engine.session.recent import Recent
from workbench.app import WorkbenchApp
from workbench.crash import state_folder
from workbench.screens.build import BuildScreen
from workbench.screens.guide import GuideScreen
from workbench.screens.leave import LeaveScreen
from workbench.screens.monitor import MonitorScreen
from workbench.screens.runs import RunsScreen
from workbench.screens.start import StartScreen

Shown = Callable[[Any], str]
SOUND = "version: 1\nmodel: {name: builtin/tiny}\ndata: {train: [{path: builtin/dates}]}\nmethod: {kind: ipo}\n"
USABLE_SECONDS = 0.3


def app_of(root: Path) -> WorkbenchApp:
    return WorkbenchApp(runs_dir=root, start=True)


async def listed(pilot: Any, runs: int) -> StartScreen:
    """The screen once it has read so many runs."""
    for _ in range(200):
        screen = pilot.app.screen
        read = isinstance(screen, StartScreen) and not any(
            entry.kind == "config" and not entry.detail for entry in screen.table.entries
        )
        if read and screen._lines.runs == runs:
            await pilot.pause(0.05)
            return screen
        await pilot.pause(0.05)
    raise AssertionError("the runs were not listed")


async def at(pilot: Any, key: str) -> None:
    """Move the cursor to the line of this key."""
    table = pilot.app.screen.table
    await pilot.press("g")
    for _ in table.entries:
        if table.chosen.key == key:
            return
        await pilot.press("j")
    raise AssertionError(f"{key} is not there: {[entry.key for entry in table.entries]}")


async def until(pilot: Any, kind: type[Any]) -> Any:
    for _ in range(600):
        if isinstance(pilot.app.screen, kind):
            return pilot.app.screen
        await pilot.pause(0.05)
    raise AssertionError(f"{kind.__name__} did not open; {pilot.app.screen} did")


async def test_what_goes_on_stands_first_then_what_was_last_then_the_ways_to_begin(make_run: Any, shown: Shown) -> None:
    make_run("finished", name="old")
    make_run("failed", name="broken", method="dpo")
    going = make_run("running", name="now")
    Path("mine.yaml").write_text(SOUND)
    Recent(state_folder()).note("mine.yaml")
    app = app_of(going.path.parent)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await listed(pilot, 3)
        text = shown(app)
        assert screen.table.chosen is not None
        assert screen.table.chosen.key == "now-0001", "the cursor stands on the first line, wherever that comes from"
    lines = text.splitlines()
    order = [next(i for i, line in enumerate(lines) if word in line) for word in ("Going on", "Recent", "Begin")]
    assert order == sorted(order)
    mine = next(line for line in lines if "now-0001" in line)
    assert "▶" in mine
    assert "running" in mine
    assert "step 60 of 100" in mine
    assert "loss 0.2" in mine
    assert "failed" in next(line for line in lines if "broken-0001" in line)
    config = next(line for line in lines if "mine.yaml" in line)
    assert "IPO" in config
    assert "this folder" in config


async def test_the_first_start_offers_ways_to_begin_and_nothing_that_is_not_there(tmp_path: Path, shown: Shown) -> None:
    app = app_of(tmp_path / "none")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.3)
        text = shown(app)
        assert "Recent" not in text
        assert "Going on" not in text
        assert [entry.key for entry in app.screen.table.entries] == ["guide", "demo", "new", "file"]
        await pilot.press("enter")
        await until(pilot, GuideScreen)
        await pilot.press("q")
        await until(pilot, StartScreen)
        await at(pilot, "demo")
        await pilot.press("enter")
        form = await until(pilot, BuildScreen)
        assert form.steps.step == "launch"
        assert app.draft.config.model.name == "builtin/tiny"
        await pilot.press("q")
        await until(pilot, StartScreen)


async def test_a_run_opens_and_one_comes_back_to_find_a_new_one_there(make_run: Any) -> None:
    run = make_run("finished")
    app = app_of(run.path.parent)
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot, 1)
        await pilot.press("enter")
        monitor = await until(pilot, MonitorScreen)
        assert app.watched is None or app.watched.id == run.id
        make_run("finished", name="later")
        await pilot.press("q")
        assert monitor is not app.screen
        screen = await listed(pilot, 2)
        assert "later-0001" in [entry.key for entry in screen.table.entries]


async def test_a_config_opens_at_its_first_open_question_with_its_goal_marked(tmp_path: Path, shown: Shown) -> None:
    sound, open_ = Path("sound.yaml").absolute(), Path("open.yaml").absolute()
    sound.write_text(SOUND)
    open_.write_text("version: 1\nmodel: {name: builtin/tiny}\nmethod: {kind: kto}\n")
    for path in (sound, open_):
        Recent(state_folder()).note(path)
    app = app_of(tmp_path / "none")
    async with app.run_test(size=(80, 24)) as pilot:
        for _ in range(100):
            if len(app.screen.table.entries) == 6:
                break
            await pilot.pause(0.05)
        await at(pilot, str(open_))
        await pilot.press("enter")
        form = await until(pilot, BuildScreen)
        assert form.steps.step == "data", "no rows are named"
        await pilot.press("1")
        marked = [row.label for row in form.pane.form.rows if row.chosen]
        assert marked == ["Prefer some answers over others"]
        before = app.draft.text()
        await pilot.press("g", "enter")
        await pilot.pause(0.1)
        assert app.draft.text() == before, "another goal asks before it replaces anything"
        assert not isinstance(app.screen, BuildScreen)
        await pilot.press("escape", "q")
        await until(pilot, StartScreen)
        await at(pilot, str(sound))
        await pilot.press("enter")
        again = await until(pilot, BuildScreen)
        assert again.steps.step == "review"
        assert again.session.draft is app.draft
        assert app.draft.path == sound


async def test_a_config_with_changes_is_offered_and_never_lost_to_another(tmp_path: Path) -> None:
    other = Path("other.yaml").absolute()
    other.write_text(SOUND)
    Recent(state_folder()).note(other)
    app = app_of(tmp_path / "none")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("n")
        form = await until(pilot, BuildScreen)
        form.pane.change("optim.max_steps", 7)
        await pilot.press("q")
        start = await until(pilot, StartScreen)
        await pilot.pause(0.3)
        assert start.table.entries[0].kind == "unsaved"
        await at(pilot, str(other))
        await pilot.press("enter")
        await until(pilot, LeaveScreen)
        await pilot.press("escape")
        assert app.draft.value("optim.max_steps") == 7
        await at(pilot, "open")
        await pilot.press("enter")
        back = await until(pilot, BuildScreen)
        assert back.draft.value("optim.max_steps") == 7


async def test_a_file_that_is_no_config_is_refused_in_one_sentence(tmp_path: Path, shown: Shown) -> None:
    Path("odd.yaml").write_text("a: [1\n")
    app = app_of(tmp_path / "none")
    async with app.run_test(size=(80, 24)) as pilot:
        for name in ("odd.yaml", "nothing.yaml"):
            app.screen.open_file(Path(name))
            await pilot.pause()
            assert name in shown(app)
            assert isinstance(app.screen, StartScreen)


@pytest.mark.parametrize("key", ["r", "f2"])
async def test_runs_have_a_key_on_every_screen(make_run: Any, key: str) -> None:
    run = make_run("finished")
    for app in (app_of(run.path.parent), WorkbenchApp(runs_dir=run.path.parent), WorkbenchApp(run=run)):
        app.explicit_runs_dir = app._runs_dir = run.path.parent
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause(0.2)
            await pilot.press(key)
            await until(pilot, RunsScreen)


def test_the_goal_of_a_file_is_read_off_its_method() -> None:
    def goal(text: str) -> str | None:
        draft = Draft("version: 1\n" + text, path=Path("x.yaml"))
        found = goal_of(draft)
        return found.id if found else None

    assert goal("") == "answer"
    assert goal("method: {kind: kto}") == "prefer"
    assert goal("method: {kind: ppo}") == "score"
    assert goal("method: {kind: reward}") == "judge"
    assert goal("method: {kind: embedding}") == "vectors"
    assert goal("method: {kind: pretrain}") == "read"
    assert goal_of(Draft.new("demo")).id == "try"  # type: ignore[union-attr]
    assert open_step(Draft("version: 1\n")) == "model"


def thousand(root: Path) -> None:
    for number in range(1000):
        path = root / f"dates-{number + 1:04d}"
        path.mkdir(parents=True)
        (path / "config.yaml").write_text("version: 1\n")
        (path / "events.jsonl").write_text("")
        values = {
            "id": path.name, "state": "finished", "created": 1.79e9 + number, "ended": 1.79e9 + number + 60,
            "method": "sft", "model": "builtin/tiny", "config": "#" * 3000,
        }  # fmt: skip
        (path / "run.json").write_text(json.dumps(values, indent=1))


async def test_a_thousand_runs_are_listed_in_time(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    thousand(root)
    cache = tmp_path / "kept"
    first = Listing(root, cache)
    assert [each.id for each in first.read()][:2] == ["dates-1000", "dates-0999"]
    first.keep()
    took = []
    for _ in range(3):
        again = Listing(root, cache)
        began = time.thread_time()  # a processor's seconds: other tests beside it take none of them
        rows = again.read()
        shown = [again.refresh(each) for each in rows[:12]]
        took.append(time.thread_time() - began)
        assert len(rows) == 1000
        assert all(each.looked for each in shown)
    assert statistics.median(took) < USABLE_SECONDS


def test_what_was_kept_is_read_again_only_where_the_run_changed(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make_run("finished", name="one"), make_run("finished", name="other")
    root, cache = one.path.parent, tmp_path / "kept"
    listing = Listing(root, cache)
    for each in listing.read():
        listing.refresh(each)
    listing.keep()
    other.update_json(state="failed", message="it broke")
    read: list[str] = []
    usual = RunFolder.read_json
    monkeypatch.setattr(RunFolder, "read_json", lambda run: (read.append(run.id), usual(run))[1])
    again = {each.id: each for each in Listing(root, cache).read()}
    assert read == [other.id]
    assert again[one.id].looked
    assert again[one.id].step == 60
    assert again[other.id].state == "failed"
    assert again[other.id].cause == "it broke"
    for file in cache.iterdir():
        file.write_text('{"version": 1, "runs": {"one-0001": 3}}')
    assert len(Listing(root, cache).read()) == 2, "a kept file of another kind is not believed"


async def test_launch_offers_the_queue_and_says_so_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, make_run: Any
) -> None:
    run = make_run("queued")
    asked: list[bool] = []
    monkeypatch.setattr("engine.run.from_config.launch_config", lambda *_, queue, **__: (asked.append(queue), run)[1])
    app = WorkbenchApp(Draft(SOUND.replace("ipo", "sft")), runs_dir=run.path.parent, step="launch")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.3)
        form = app.screen
        assert isinstance(form, BuildScreen)
        assert form.pane.form.go_to("queue!")
        await pilot.press("enter")
        await until(pilot, MonitorScreen)
    assert asked == [True]


async def test_another_config_takes_the_place_of_the_one_the_window_began_with(tmp_path: Path) -> None:
    other = Path("other.yaml").absolute()
    other.write_text(SOUND)
    Recent(state_folder()).note(other)
    app = WorkbenchApp(Draft.new("dpo"), runs_dir=tmp_path / "none")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("f3")
        await until(pilot, StartScreen)
        await pilot.pause(0.5)
        await at(pilot, str(other))
        await pilot.press("enter")
        form = await until(pilot, BuildScreen)
        assert form.session.draft is app.draft
        assert app.draft.path == other
        await pilot.press("r")
        await until(pilot, RunsScreen)
        app.action_build()
        await pilot.pause()
        assert app.screen is form
        await pilot.press("q")
        await pilot.pause(0.2)
        assert app.left, "the form of the config before is not shown again"


async def test_an_answer_to_a_key_is_shown_to_its_end_and_gone_with_the_next(make_run: Any, shown: Shown) -> None:
    run = make_run("finished", name="a-run-whose-name-is-rather-long")
    shutil.rmtree(run.checkpoints)
    app = app_of(run.path.parent)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await listed(pilot, 1)
        await at(pilot, run.id)
        await pilot.press("c")
        await pilot.pause()
        told = " ".join(shown(app).split())
        assert f"{run.id} has no whole checkpoint to talk to." in told
        assert "trains it again, as a new run. --base talks to its base model." in told
        assert screen.line.size.height > 1
        await pilot.press("up")
        await pilot.pause()
        assert screen.line.size.height == 1
        assert "no whole checkpoint" not in shown(app)
