"""The monitor: what a person sees of a run's folder, and what their keys do to it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input, OptionList

from engine.config.files import parse
from engine.errors import WorkbenchError
from engine.run import checkpoint, launch, stack
from engine.run.ending import facts, ways
from engine.run.evaluations import Evaluation
from engine.run.in_flight import InFlight
from engine.run.stopping import ways as ways_to_stop
from workbench.app import WorkbenchApp
from workbench.panels.chart import Chart
from workbench.panels.end_card import EndCard
from workbench.panels.glyphs import STATES
from workbench.panels.watching import Lines, Numbers, Receipt, Samples, StatusLine
from workbench.screens.batch import BatchScreen
from workbench.screens.build import BuildScreen
from workbench.screens.compare import CompareScreen
from workbench.screens.dialog import Pick, Show
from workbench.screens.monitor import MonitorScreen

Shown = Callable[[Any], str]


def app_of(run: Any) -> WorkbenchApp:
    return WorkbenchApp(run=run, runs_dir=run.path.parent)


async def until(pilot: Any, test: Callable[[], bool]) -> None:
    """Wait for something to become true, half a minute at most."""
    for _ in range(600):
        if test():
            return
        await pilot.pause(0.05)
    raise AssertionError("it never came")


def asked(run: Any) -> list[str]:
    return [json.loads(path.read_text())["do"] for path in sorted(run.control.iterdir())]


async def test_a_running_run_shows_step_pace_curves_numbers_and_answers(make_run: Any, shown: Shown) -> None:
    app = app_of(make_run())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        text = shown(app)
    for words in (
        "dates-0001   SFT LoRA   step 60 of 100   60 %   0:08 left",
        "▶ running",
        "tokens/s           9,872",
        "memory       20.0/79 GiB",
        "97 % 61 C 640 W",
        "MFU               34.1 %",
        "step 60: 2021-03-03",
        "before: 2031-30-03",
        "step 40: 2021-03-02",
        "gradient norm",
        "s stop",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    "state", ["starting", "running", "stopping", "finished", "stopped", "failed", "lost", "queued"]
)
async def test_each_state_has_its_own_sign_and_word(make_run: Any, shown: Shown, state: str) -> None:
    app = app_of(make_run(state))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        assert f"{STATES[state].glyph} {STATES[state].word}" in shown(app)
    assert len({look.word for look in STATES.values()}) == len({look.glyph for look in STATES.values()}) == 8


async def test_a_starting_run_shows_what_it_does_and_how_far_it_is(make_run: Any, shown: Shown) -> None:
    app = app_of(make_run("starting"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        assert "reading weights: 2.0 GiB of 4.0 GiB" in shown(app)
        assert "━" * 40 + "─" * 40 in shown(app)


async def test_new_events_are_drawn_and_quiet_ones_are_not(make_run: Any, shown: Shown, writer: Any) -> None:
    run = make_run()
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.3)
        chart = app.screen.query_one("#main", Chart)
        before = chart.draws
        await pilot.pause(1.3)
        assert chart.draws == before
        writer(run).write("metrics", 13.2, step=61, epoch=1.22, loss=0.777, tokens_per_second=4321.0)
        await until(pilot, lambda: "step 61 of 100" in shown(app))
        assert "0.777" in shown(app)
        assert "4,321" in shown(app)
        assert chart.draws == before + 1


async def test_the_cursor_names_the_step_and_enter_shows_the_rows_it_was_trained_on(
    make_run: Any, shown: Shown, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row text {number}"}) + "\n" for number in range(300)))
    run = make_run(config=f"version: 1\ndata:\n  train:\n    - path: {rows}\n")
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("left", "left", "left")
        chart = app.screen.query_one("#main", Chart)
        assert chart.cursor == 58
        await pilot.pause(0.1)
        value = chart.values_at_cursor()[2][0][1]
        assert f"step 58  loss {value:.3g}"[:18] in shown(app)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, BatchScreen) and "row text 231" in shown(app))
        text = shown(app)
        assert "step 58   the 4 rows" in text
        assert all(f"row text {number}" in text for number in (228, 229, 230, 231))
        assert "row text 232" not in text
        await pilot.press("escape")
        assert isinstance(app.screen, MonitorScreen)


async def test_a_step_without_a_noted_batch_says_why(make_run: Any, shown: Shown) -> None:
    run = make_run()
    run.batches.unlink()
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("enter")
        await until(pilot, lambda: "No batch was noted for step 60" in shown(app))


@pytest.mark.parametrize(("key", "do"), [("s", "save_stop"), ("c", "checkpoint"), ("e", "end_of_epoch"), ("n", "stop")])
async def test_each_way_to_stop_leaves_exactly_one_request(make_run: Any, key: str, do: str) -> None:
    run = make_run()
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("s")
        await pilot.pause(0.1)
        assert asked(run) == []
        await pilot.press(key)
        await pilot.pause(0.1)
        assert asked(run) == [do]
        await pilot.press("escape")
    assert asked(run) == [do]


async def test_the_stop_menu_says_what_is_kept_how_long_it_takes_and_what_can_be_done_later(
    make_run: Any, shown: Shown
) -> None:
    run = make_run(steps=67)
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("s")
        await pilot.pause(0.2)
        assert "Keeps all 67 steps (about 1.2 s, 40.0 MiB)." in shown(app)
        text = "\n".join(way.keeps for way in ways_to_stop(app.screen_stack[-2].view))
        assert text.splitlines() == [
            "Keeps all 67 steps (about 1.2 s, 40.0 MiB). It can be resumed.",
            "Keeps all steps so far (about 1.2 s, 40.0 MiB). The run continues.",
            "Trains on, saves and stops about 6.6 s from now. It can be resumed.",
            "Keeps checkpoint-60; the 7 steps since then (1.4 s) are lost. It can be resumed.",
        ]
        await pilot.press("escape")
        await pilot.pause(0.1)
    assert asked(run) == []


async def test_the_stop_menu_counts_on_while_it_is_open(make_run: Any, shown: Shown, writer: Any) -> None:
    run = make_run(steps=67)
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("s", "down", "down")
        await until(pilot, lambda: "Keeps all 67 steps" in shown(app))
        writer(run).write("metrics", 15.0, step=71, epoch=1.4, loss=0.5)
        await until(pilot, lambda: "Keeps all 71 steps" in shown(app))
        assert "the 11 steps since then" in shown(app)
        assert app.screen.query_one(OptionList).highlighted == 2


async def test_a_run_without_a_checkpoint_says_that_stopping_now_keeps_nothing(make_run: Any) -> None:
    app = app_of(make_run(steps=7))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        now = ways_to_stop(app.screen.view)[-1]
    assert now.keeps == "Keeps nothing: there is no checkpoint yet. 7 steps are lost."


async def test_a_request_and_its_answer_are_shown(make_run: Any, shown: Shown, writer: Any) -> None:
    run = make_run()
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("c")
        await until(pilot, lambda: "checkpoint: asked" in shown(app))
        (request,) = run.control.iterdir()
        writer(run).write("control", 14, id=request.stem, do="checkpoint", status="accepted", message="saving step 60")
        await until(pilot, lambda: "checkpoint: accepted. saving step 60" in shown(app))


async def test_a_run_that_ended_is_not_asked(make_run: Any, shown: Shown) -> None:
    run = make_run("finished")
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("s")
        await pilot.pause(0.1)
        assert "This run is finished; there is nothing to stop." in shown(app)
        await pilot.press("c")
        await pilot.pause(0.1)
        assert "there is nothing to ask of it" in shown(app)
    assert asked(run) == []


BATCH = """\
version: 1
model: {name: builtin/tiny}
data: {train: [{path: builtin/dates}]}
optim: {per_device_train_batch_size: 8, gradient_accumulation_steps: 1}
"""


async def test_a_failed_run_opens_on_its_card_and_enter_makes_the_change_and_resumes_it(
    make_run: Any, shown: Shown, writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("failed", config=BATCH)
    kept = run.checkpoints / "checkpoint-60"
    resumed: list[Any] = []

    def resume(folder: Any) -> Any:
        resumed.append(folder.path)
        return kept, [(run.checkpoints / "checkpoint-61", "it was never finished")]

    monkeypatch.setattr(launch, "resume", resume)
    monkeypatch.setattr("engine.run.checkpoint.newest_valid", lambda folder, hashes=True: (kept, []))
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "apply it and go on from checkpoint-60" in shown(app))
        text = shown(app)
        assert "- optim.per_device_train_batch_size: 8" in text
        assert "+ optim.gradient_accumulation_steps: 2" in text
        assert "The GPU ran out of memory at 79.2 GiB" in text
        assert "OutOfMemoryError: tried 2.10 GiB" in text
        assert "checkpoint-60; nothing is lost" in text
        assert "step 60 of 100" in text
        await pilot.press("enter")
        await until(pilot, lambda: bool(resumed))
        assert resumed == [run.path]
        optim = parse(run.config.read_text()).mapping["optim"]
        assert optim == {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        await until(pilot, lambda: "goes on from checkpoint-60; checkpoint-61 was passed over" in shown(app))
        again = writer(run)
        again.segment = 1
        again.write("started", 30, method="sft", model="m", max_steps=100, epochs=2, resumed_from_step=60)
        for step in range(61, 75):
            again.write("metrics", 30 + step, step=step, loss=0.1, tokens_per_second=900.0)
        run.update_json(state="running")
        await until(pilot, lambda: "▶ running" in shown(app))
        await pilot.pause(0.1)
        assert "tokens/s" in shown(app)
        assert "↻" in shown(app)


async def test_the_key_that_resumes_offers_the_change_before_what_has_just_failed(
    make_run: Any, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("failed", config=BATCH)
    before, kept, resumed = run.config.read_bytes(), run.checkpoints / "checkpoint-60", []
    monkeypatch.setattr(launch, "resume", lambda folder: (resumed.append(folder.config.read_bytes()), (kept, []))[1])
    monkeypatch.setattr("engine.run.checkpoint.newest_valid", lambda folder, hashes=True: (kept, []))
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        for choice in (("escape",), ("down", "enter")):
            await pilot.press("R")
            await until(pilot, lambda: "Nothing is put right, so it may end the same way." in shown(app))
            assert "Change optim.per_device_train_batch_size 8 -> 4" in shown(app)
            assert resumed == []
            await pilot.press(*choice)
        await until(pilot, lambda: bool(resumed))
        assert resumed == [before]
        await pilot.press("R")
        await until(pilot, lambda: "Nothing is put right" in shown(app))
        await pilot.press("enter")
        await until(pilot, lambda: len(resumed) == 2)
    assert b"per_device_train_batch_size: 4" in resumed[1]


async def test_a_run_that_failed_before_its_first_checkpoint_begins_again_without_talk_of_broken_ones(
    make_run: Any, shown: Shown
) -> None:
    app = app_of(make_run("failed", steps=3))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "start a new run from the beginning" in shown(app))
        assert "no checkpoint is whole" not in shown(app)
        assert "start again" not in shown(app)


async def test_the_card_of_a_failed_run_shows_its_memory_over_time_and_the_rows_it_was_on(
    make_run: Any, shown: Shown, writer: Any
) -> None:
    run = make_run()
    pen = writer(run)
    for step in range(70, 90):
        pen.write("metrics", step, step=step, memory_allocated=step << 30)
    pen.write("failed", 90, cause="cuda_oom", message="The GPU ran out of memory.", lines=["one", "two"] * 4)
    InFlight(run).note(90, [17, 4])
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "in flight" in shown(app))
        text = shown(app)
        assert "step 90: rows 17, 4" in text
        assert "89.0 GiB at step 89" in text
        memory = next(line for line in text.splitlines() if line.strip().startswith("memory"))
        assert "▁" in memory
        assert memory.index("▁") < memory.index("█")
        assert text.index("enter") < text.index("in flight")  # the way on comes first


async def test_a_run_that_fails_while_it_is_watched_turns_to_its_card(make_run: Any, shown: Shown, writer: Any) -> None:
    run = make_run()
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        assert app.screen.pages.page == "curves"
        writer(run).write("failed", 14, cause="nan", message="The loss is not a number.", lines=[])
        await until(pilot, lambda: app.screen.pages.page == "end")
        await pilot.pause(0.1)
        assert "The loss is not a number." in shown(app)
        assert isinstance(app.focused, EndCard)


async def test_a_resume_that_is_refused_says_why(make_run: Any, shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Any) -> Any:
        raise WorkbenchError("the disk is full", "Free some space.")

    monkeypatch.setattr(launch, "resume", refuse)
    app = app_of(make_run("stopped"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("R")
        await until(pilot, lambda: "the disk is full. Free some space." in shown(app))


async def test_rows_that_differ_are_named_and_nothing_goes_on_before_a_person_accepts_them(
    make_run: Any, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("stopped")
    resumed: list[dict[str, Any]] = []

    def resume(folder: Any, **how: Any) -> Any:
        resumed.append(how)
        return run.checkpoints / "checkpoint-60", []

    monkeypatch.setattr(launch, "resume", resume)
    said = ["data.train: row 3 of 40 differs from what the run was trained on"]
    monkeypatch.setattr("engine.session.resume.data_changes", lambda folder, on_progress=None: said)
    app = app_of(run)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("R")
        await until(pilot, lambda: "row 3 of 40 differs" in shown(app))
        assert "--against" in shown(app)
        await pilot.press("enter")
        await pilot.pause(0.2)
        assert resumed == []
        await pilot.press("R")
        await until(pilot, lambda: "Go on with the rows as they are now" in shown(app))
        await pilot.press("down", "enter")
        await until(pilot, lambda: "goes on from checkpoint-60" in shown(app))
    assert resumed == [{"accept_data": True}]


async def test_every_page_shows_its_part_and_hostile_text_stays_text(make_run: Any, shown: Shown, hostile: str) -> None:
    app = app_of(make_run(hostile=hostile, config=f"version: 1\nname: '{'[/b]'}'\n"))
    async with app.run_test(size=(100, 30)) as pilot:
        for key, words in (
            ("2", "2021-03-03"),
            ("3", "step 60 went well"),
            ("4", "lora r=16"),
            ("5", "name: '[/b]'"),
            ("1", "tokens/s"),
        ):
            await pilot.press(key)
            await pilot.pause(0.15)
            text = shown(app)
            assert words in text
            assert "\x1b" not in text
            assert "\u202e" not in text
        await pilot.press("2")
        await pilot.pause(0.15)
        assert "␛]0;owned␇" in shown(app)


async def test_equal_answers_in_a_row_are_one_line(make_run: Any, writer: Any) -> None:
    run = make_run()
    more = writer(run)
    for step in (80, 100):
        more.write("sample", 20 + step, step=step, index=0, prompt="p", completion="2021-03-03")
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("2")
        await pilot.pause(0.2)
        lines = ["".join(text for text, _ in line).strip() for line in app.screen.query_one(Samples).rendered_lines]
    assert lines[1:] == [
        "step 60 to 100  2021-03-03",
        "step 40  2021-03-02",
        "step 20  2021-03-01",
        "before  2031-30-03",
    ]


async def test_an_answer_of_blanks_alone_is_told_and_a_held_out_curve_is_named_whole(
    make_run: Any, shown: Shown, writer: Any
) -> None:
    run = make_run(method="dpo", steps=20)
    more = writer(run)
    more.write("sample", 30, step=21, index=0, prompt="What is it?", completion=" \n" * 32)
    more.write("metrics", 30, step=21, epoch=0.5, loss=0.5, eval_loss=0.75)
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "step 21: no words" in shown(app))
        await until(pilot, lambda: "── loss  ╌╌ held-out " in shown(app))
        await pilot.press("2")
        await until(pilot, lambda: "no words" in shown(app))


async def test_a_curve_whose_held_out_twin_is_not_on_its_chart_keeps_its_value(
    make_run: Any, shown: Shown, writer: Any
) -> None:
    run = make_run(steps=20)
    writer(run).write("metrics", 30, step=21, loss=0.5, mean_token_accuracy=0.75, entropy=2.5, eval_entropy=2.25)
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: " entropy 2.50 " in shown(app))


async def test_the_load_of_each_expert_is_a_picture_one_key_away(make_run: Any, shown: Shown, writer: Any) -> None:
    run = make_run()
    writer(run).write("experts", 13, load=["5" * 127 + "0", "09" * 64], layers=[1, 2])
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: " 9 experts" in shown(app))
        for rollouts, word in ((False, " 8 ranks"), (True, " 7 groups")):
            app.screen.view.ranks.append({"step": 13})
            app.screen.view.rollouts += [{"step": 13, "groups": []}] * rollouts
            app.screen._draw()
            await until(pilot, lambda word=word: word in shown(app))
            assert " 9 experts" in shown(app)
            app.screen.view.rollouts.clear()
        app.screen.view.ranks.clear()
        await pilot.press("9")
        await until(pilot, lambda: "█" * 64 in shown(app))
        assert f"1 {'▄' * 64}  1" in shown(app)
        assert "A column holds 2 experts" in " ".join(shown(app).split())


async def test_pages_that_a_run_has_no_figures_for_say_so_whole(make_run: Any, shown: Shown, writer: Any) -> None:
    run = make_run()
    entry = {"feature": "loss", "requested": None, "effective": "SFTTrainer", "count": None, "detail": ""}
    writer(run).write("receipt", 13, entries=[entry])
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("8")
        await until(pilot, lambda: "One process trains this model" in shown(app))
        assert "the numbers beside the curves are its own." in " ".join(shown(app).split())
        await pilot.press("9")
        await until(pilot, lambda: "has no line `expert load`" in shown(app))
        assert "whose routers are heard." in " ".join(shown(app).split())


async def test_each_rank_is_shown_and_its_log_is_one_key_away(make_run: Any, shown: Shown, writer: Any) -> None:
    run = make_run()
    for rank in (1, 2, 3):
        run.log_of(rank).write_text(f"rank {rank}: process {100 + rank}, local rank {rank} on here\n")
    more = writer(run)
    more.write("started", 13, method="sft", model="builtin/tiny", max_steps=100, world_size=4)
    figures = {"tokens_per_second": [2400, 2410.4, 2395, 2401], "data_seconds": [0.001, 0.001, 0.081, 0.001]}
    figures |= {"forward_seconds": [0.05, 0.05, 0.05, 0.05], "memory": [1 << 30, 1 << 30, 2 << 30, 1 << 30]}
    figures |= {"communication_seconds": [0.1, 0.1, 0.02, 0.1], "step_seconds": 0.4}
    more.write("ranks", 13, step=60, **figures)
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "slowest    rank 2 +80 ms" in shown(app) and ": 8 shows all" in shown(app))
        await pilot.press("8")
        await until(pilot, lambda: "data wait" in shown(app) and "others. Ranks wait" in shown(app))
        text = shown(app)
        rows = [line.split() for line in text.splitlines()]
        assert ["2", "2,395", "81", "ms", "50", "ms", "2.0", "GiB", "5.0", "%", "slowest"] in rows
        assert ["0", "2,400", "1.0", "ms", "50", "ms", "1.0", "GiB", "25.0", "%"] in rows
        assert "rank 2 takes 80 ms a step longer for its data" in text
        for key, words in (("]", "rank 1: process 101"), ("]", "rank 2: process 102"), ("[", "rank 1: process 101")):
            await pilot.press(key)
            await until(pilot, lambda words=words: words in shown(app))
        app.screen.query_one(StatusLine).show_message("read long enough", 0)
        await until(pilot, lambda: "rank-1.log: rank 1 of 4  ! rank 2 takes" in shown(app))
        await pilot.press("[")
        await until(pilot, lambda: "step 60 went well" in shown(app))
        assert "worker.log: all 4 ranks together" in shown(app)
        await pilot.press("[")
        await until(pilot, lambda: "rank 3: process 103" in shown(app))
        await pilot.press("]")
        await until(pilot, lambda: "step 60 went well" in shown(app))


async def test_words_are_found_in_the_log(make_run: Any, shown: Shown) -> None:
    app = app_of(make_run())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("3")
        await pilot.pause(0.2)
        assert "step 60 went well" in shown(app)
        assert "step 7 went" not in shown(app)
        await pilot.press("slash", *"step 7 ", "enter")
        await pilot.pause(0.2)
        assert "step 7 went well" in shown(app)
        await pilot.press("slash", *"nowhere", "enter")
        await pilot.pause(0.2)
        assert "No line here holds step 7 nowhere" in shown(app)
        await pilot.press("5")
        assert "No line here" not in shown(app)  # it was about the page before


async def test_a_long_line_of_the_log_is_shown_to_its_end_and_found_below(make_run: Any, shown: Shown) -> None:
    run = make_run()
    run.log.write_text("x" * 200 + " the end of a long line\n" + "".join(f"step {step}\n" for step in range(40)))
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("3")
        await pilot.pause(0.2)
        await pilot.press("g")
        assert "the end of a long line" in shown(app)
        await pilot.press("slash", *"step 30", "enter")
        await pilot.pause(0.2)
        log = app.screen.query_one("#log", Lines)
        assert [log.rendered_lines[row][0][0] for row in range(len(log.rendered_lines)) if log.ground(row)] == [
            "step 30"
        ]


async def test_the_keys_are_those_of_the_runs_state(make_run: Any, shown: Shown) -> None:
    cases = ("running", "s stop", "R resume"), ("stopped", "R resume", "s stop"), ("finished", "1 curves", "R resume")
    for state, offered, not_offered in cases:
        app = app_of(make_run(state))
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause(0.2)
            assert offered in shown(app)
            assert not_offered not in shown(app)


async def test_the_key_line_names_every_page_at_80_columns_and_the_one_in_view_stands_out(
    make_run: Any, shown: Shown, writer: Any
) -> None:
    app = app_of(make_run())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        line = shown(app).splitlines()[-1]
        assert " ".join(line.split()) == "s stop 1 curves 2 samples 3 log 4 receipt 5 config ? help ^p all"
        await pilot.press("4")
        await pilot.pause()
        strip = app.screen._compositor.render_strips(app.size)[-1]
        assert [part.text for part in strip if part.style is not None and part.style.underline] == ["receipt"]
    run = make_run("failed", name="other")
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "6 end" in shown(app))
        assert "R resume" in shown(app)


async def test_a_narrow_window_keeps_the_time_left_and_the_way_to_stop(make_run: Any, shown: Shown) -> None:
    app = app_of(make_run())
    async with app.run_test(size=(60, 20)) as pilot:
        await until(pilot, lambda: "step 60 of 100   0:08 left" in shown(app))
        assert "60 %" not in shown(app)
        assert "s stop" in shown(app)


async def test_a_finished_run_says_where_its_model_is_beside_what_was_found(
    make_run: Any, shown: Shown, writer: Any
) -> None:
    run = make_run("finished")
    writer(run).write(
        "finding", 14.0, path="data.train", severity="warning", rule="same", message="6 rows are left out"
    )
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "checkpoint-60. ! 6 rows are left out" in shown(app))
    writer(run).write("best", 12.0, step=60, metric="eval_loss", value=0.5)
    app = app_of(run)
    async with app.run_test(size=(120, 24)) as pilot:
        await until(
            pilot, lambda: "Done: checkpoint-60, the last one, is the best: held-out loss 0.5000." in shown(app)
        )


async def test_a_stopped_run_says_what_is_kept_and_how_to_go_on(make_run: Any, shown: Shown) -> None:
    run = make_run("stopped")
    for made, words in ((run, "stopped by anna: checkpoint-60 is kept, R goes on from it"),
                        (make_run("stopped", steps=5), "stopped by anna: no checkpoint is kept")):  # fmt: skip
        app = app_of(made)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda app=app, words=words: words in shown(app))  # type: ignore[misc]


async def test_a_run_whose_groups_teach_nothing_says_so_while_it_goes_on(
    make_run: Any, shown: Shown, writer: Any
) -> None:
    run = make_run(method="grpo")
    more = writer(run)
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "A good run: the reward rises" in shown(app))
        for step in range(61, 66):
            more.write("metrics", step * 0.2, step=step, epoch=1.2, loss=0.0, frac_reward_zero_std=1.0)
        await until(
            pilot, lambda: "! Nothing is learned now: all answers to a prompt get the same reward." in shown(app)
        )


async def test_a_run_that_max_steps_ends_within_an_epoch_shows_how_many_epochs_it_really_takes(
    make_run: Any, shown: Shown, writer: Any
) -> None:
    run = make_run(steps=20)
    writer(run).write("started", 30, method="sft", model="m", max_steps=64, epochs=2)  # 1.28, which the trainer rounds
    app = app_of(run)
    async with app.run_test(size=(80, 34)) as pilot:
        await pilot.pause(0.2)
        assert "0.40 of 1.28" in shown(app)


async def test_a_count_that_says_nothing_new_is_not_in_the_receipt(make_run: Any, writer: Any) -> None:
    run = make_run()
    entry = {"requested": None, "detail": ""}
    found = (("adapter", "none", 0), ("trained", 197312, 197312), ("compiled layers", "yes", 28))
    entries = [{**entry, "feature": feature, "effective": done, "count": count} for feature, done, count in found]
    writer(run).write("receipt", 2, entries=entries)
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("4")
        await pilot.pause(0.2)
        lines = [
            "".join(text for text, _ in line).split()
            for line in app.screen.query_one("#receipt", Receipt).rendered_lines
        ]
    assert ["adapter", "none"] in lines
    assert ["trained", "197,312"] in lines
    assert ["compiled", "layers", "yes", "(28)"] in lines


async def test_other_curves_come_into_the_large_chart_and_keys_act_on_it_from_anywhere(
    make_run: Any, shown: Shown
) -> None:
    app = app_of(make_run(method="dpo"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        chart = app.screen.query_one("#main", Chart)
        assert chart.title.startswith("reward margin")
        assert "loss" in shown(app)
        assert "pairs judged right 80 %" in shown(app)
        await pilot.press("v")
        assert chart.title.startswith("reward margin 0.870   rewards/margins")
        await pilot.press("V", "V")
        assert chart.title.startswith("tokens")
        app.set_focus(None)
        await pilot.press("L", "m", "left")
        assert (chart.log_scale, chart.curves.smoothing, chart.cursor) == (True, "mean", 60)
        await pilot.press("escape")
        assert chart.cursor is None


async def test_a_tall_window_shows_more_curves_and_a_small_one_stays_whole(make_run: Any, shown: Shown) -> None:
    app = app_of(make_run())
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause(0.2)
        assert "memory 19.0 GiB" in shown(app)
        assert "G┤" not in shown(app)  # the axis counts in the unit of the title
        await pilot.resize_terminal(80, 24)
        await pilot.pause(0.3)
        assert "memory 19.0 GiB" not in shown(app)
        assert "tokens/s" in shown(app)


async def test_a_number_that_is_not_finite_is_marked_and_said(make_run: Any, shown: Shown, writer: Any) -> None:
    run = make_run()
    writer(run).write("diverged", 14, step=30, what="grad_norm")
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        assert "! not finite at step 30: grad_norm" in shown(app)
        axis = next(line for line in shown(app).splitlines() if line.split("│")[0].strip().startswith("1 "))
        assert "!" in axis


async def test_leaving_a_run_outside_the_known_folder_says_how_to_come_back(make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    app = WorkbenchApp(run=run, runs_dir=tmp_path / "elsewhere")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("q")
    assert app.goodbye == [f"dates-0001 goes on without this window. `workbench {run.path}` shows it again."]


async def test_a_run_that_had_finished_before_is_no_news_when_one_leaves(make_run: Any) -> None:
    app = app_of(make_run("finished"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("q")
    assert app.goodbye == []


async def test_a_run_that_finishes_in_sight_says_where_its_model_is(make_run: Any, shown: Shown, writer: Any) -> None:
    run = make_run()
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        (checkpoint.begin(run, 60) / "model.safetensors").touch()
        checkpoint.commit(run.checkpoints / "checkpoint-60.tmp", {})
        writer(run).write("finished", 14.0, step=60, seconds=13.0)
        run.update_json(state="finished")
        await until(pilot, lambda: "Done: the trained model is checkpoint-60." in shown(app))
        await pilot.press("q")
    assert app.goodbye == [f"dates-0001 is finished; its model is in {run.checkpoints / 'checkpoint-60'}."]


async def test_every_number_is_named_in_full_at_80_columns(make_run: Any, shown: Shown, writer: Any) -> None:
    run = make_run(steps=20)
    found = {"loss": 1.0, "eval_loss": 1.2, "mean_token_accuracy": 0.6, "eval_mean_token_accuracy": 0.5}
    writer(run).write("metrics", 30, step=21, epoch=0.42, **found)
    app = app_of(run)
    async with app.run_test(size=(80, 30)) as pilot:
        await pilot.pause(0.2)
        numbers = ["".join(text for text, _ in line).split() for line in app.screen.query_one(Numbers).rendered_lines]
    at = numbers.index(["loss", "1"])
    assert numbers[at : at + 4] == [
        ["loss", "1"],
        ["held-out", "1.20"],
        ["token", "accuracy", "60", "%"],
        ["held-out", "50", "%"],
    ]


async def test_the_stack_of_the_worker_is_shown_in_a_dialog_that_can_be_left(
    make_run: Any, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f'  File "train.py", line {number} in step_{number}' for number in range(60)]
    monkeypatch.setattr(stack, "ask", lambda run: "\n".join(["Thread 0x1 (most recent call first):", *lines]))
    app = app_of(make_run())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("K")
        await until(pilot, lambda: isinstance(app.screen, Show))
        await pilot.pause(0.1)
        text = shown(app)
        assert "Where the worker of dates-0001 is" in text
        assert "most recent call first" in text
        assert "line 3 in step_3" in text
        assert "esc back" in text
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, MonitorScreen))


async def test_a_worker_that_is_not_there_to_ask_is_told_in_a_sentence(make_run: Any, shown: Shown) -> None:
    app = app_of(make_run("finished"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("K")
        await until(pilot, lambda: "asking the worker" not in shown(app))
        await pilot.pause(0.2)
        assert isinstance(app.screen, MonitorScreen)
        assert "no worker" in shown(app)


async def test_a_finished_run_opens_on_its_card_with_the_words_of_the_commands_and_keys_that_work(
    make_run: Any, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("finished", config="version: 1\noptim: {num_train_epochs: 2}\n")
    other = make_run("running", name="other")
    gone_on: list[Any] = []

    def resume(folder: Any, *, settings: Any = None, accept_data: bool = False) -> Any:
        gone_on.append((folder.path, settings))
        return folder.checkpoints / "checkpoint-60", []

    monkeypatch.setattr("engine.session.resume.resume", resume)
    app = app_of(run)
    async with app.run_test(size=(200, 50)) as pilot:
        await until(pilot, lambda: "talk to it" in shown(app))
        assert app.screen.pages.page == "end"
        text = " ".join(shown(app).split())
        view = app.screen.view
        for _, words in facts(view, run):
            assert words in text
        for way in ways(view, run, run.id):
            assert f"{way.title} {way.means}" in text
        await pilot.press("B")
        await until(pilot, lambda: isinstance(app.screen, Pick) and other.id in shown(app))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, CompareScreen))
        await pilot.press("q", "T")
        await until(pilot, lambda: "optim.num_train_epochs 2 -> 4" in shown(app) and isinstance(app.screen, Pick))
        await pilot.press("enter")
        await until(pilot, lambda: bool(gone_on))
        assert gone_on == [(run.path, {"optim.num_train_epochs": 4})]
        await until(pilot, lambda: f"{run.id} goes on from checkpoint-60" in shown(app))
        await pilot.press("T", "down", "enter")
        await until(pilot, lambda: isinstance(app.screen, BuildScreen))
        assert app.draft.value("optim.num_train_epochs") == 2


async def test_a_run_is_measured_beside_its_base_from_the_monitor_and_what_was_found_stays_on_its_card(
    make_run: Any, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("finished")
    asked: list[dict[str, Any]] = []
    go_on = threading.Event()

    def measured(task: Evaluation, on_message: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        asked.append(task.request)
        on_message({"progress": {"what": "Measuring checkpoint-60", "done": 3, "total": 12, "unit": ""}})
        assert go_on.wait(30)
        found = {"checkpoint": "checkpoint-60", "method": "sft", "rows": 12, "data": "data.eval"}
        return {**found, "metrics": {"eval_loss": 0.5}, "base": {"eval_loss": 6.0}}

    monkeypatch.setattr(Evaluation, "run", measured)
    monkeypatch.setattr("workbench.screens.run_actions.step_of", lambda run, wanted: 60)
    app = app_of(run)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "talk to it" in shown(app))
        await pilot.press("E")
        await until(pilot, lambda: "Measuring checkpoint-60 3 of 12 rows" in shown(app))
        go_on.set()
        words = "checkpoint-60, 12 rows of data.eval: loss 0.500 (6 before training)"
        await until(pilot, lambda: shown(app).count(words) == 2)  # on the card, and in answer to the key
    assert [(each["step"], each["base"]) for each in asked] == [(60, True)]


async def test_a_run_is_scored_by_a_task_that_is_named_where_the_harness_is(
    make_run: Any, shown: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = make_run("finished")
    asked: list[dict[str, Any]] = []

    def measured(task: Evaluation, on_message: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        asked.append(task.request)
        found = {"checkpoint": "checkpoint-60", "method": "sft", "rows": 5, "data": "dates.yaml"}
        return {**found, "metrics": {"dates/acc": 0.5}, "base": {"dates/acc": 0.25}}

    monkeypatch.setattr(Evaluation, "run", measured)
    monkeypatch.setattr("workbench.screens.run_actions.step_of", lambda run, wanted: 60)
    app = app_of(run)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "talk to it" in shown(app))
        assert "score it" not in shown(app)
        await pilot.press("M")
        await until(pilot, lambda: "lm-evaluation-harness, which is not installed" in shown(app))
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "dates.yaml").write_text("task: dates\n")
    app = app_of(run)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "score it" in shown(app))
        for path, words in (
            ("none.yaml", "task: must be a task's YAML file"),
            ("dates.yaml", "dates/acc 0.500 (0.250"),
        ):
            await pilot.press("M")
            await until(pilot, lambda: "by which task" in shown(app))
            app.screen.query_one(Input).value = str(tmp_path / path)
            await pilot.press("enter")
            await until(pilot, lambda words=words: words in shown(app))
    assert [(each["base"], each["tasks"]) for each in asked] == [(True, [str(tmp_path / "dates.yaml")])]
