"""The build screen by keys alone: what a person does, and what they then see and have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from textual import events
from textual.widgets import Input, OptionList, Static

from engine.config.facts import DataFacts, Facts
from engine.config.findings import RANK
from engine.config.glossary import TERMS
from engine.config.kinds import example_row, needs_of
from engine.config.method import METHODS
from engine.config.recipes import recipes
from engine.config.steps import GOALS, STEPS
from engine.config.tree import fields
from engine.hardware import this_machine
from engine.planning.auto import resolved
from engine.run.rehearsed import Rehearsal, keep
from engine.session.draft import Draft
from tests.caches import own_cache
from workbench.actions import ACTIONS
from workbench.app import WorkbenchApp
from workbench.messages import FactsArrived
from workbench.panels.form import FormPane
from workbench.screens.build import BuildScreen
from workbench.screens.findings import FindingsScreen
from workbench.screens.help import HelpScreen
from workbench.screens.leave import LeaveScreen
from workbench.screens.pages import TWO_LINES, brief_title


def app_of(draft: Draft | None = None) -> WorkbenchApp:
    return WorkbenchApp(draft, runs_dir="runs")


def build(app: WorkbenchApp) -> BuildScreen:
    assert isinstance(app.screen, BuildScreen)
    return app.screen


def shown(app: WorkbenchApp) -> str:
    """The text of the whole screen."""
    return "\n".join("".join(part.text for part in strip) for strip in app.screen._compositor.render_strips())


def message(app: WorkbenchApp) -> str:
    """What the app says in passing."""
    return build(app).finding_line.message


async def until(pilot: Any, true: Callable[[], bool], seconds: float = 60.0) -> None:
    for _ in range(int(seconds / 0.05)):
        if true():
            return
        await pilot.pause(0.05)
    raise AssertionError(f"it never came about:\n{shown(pilot.app)}")


def told_at_right(app: WorkbenchApp) -> str:
    """All that the right column explains, also what is out of sight."""
    return "\n".join("".join(text for text, _ in line) for line in build(app).steps.side.explain.rendered_lines)


def words_at_right(app: WorkbenchApp) -> str:
    """The same in one line."""
    return " ".join(told_at_right(app).split())


async def go_to(pilot: Any, path: str) -> None:
    """Put the cursor on a setting."""
    build(pilot.app).steps.jump(path)
    await pilot.pause()


async def test_the_first_screen_offers_the_demo_and_shows_the_config_so_far() -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        screen = shown(app)
        assert "See it work here and now" in screen
        assert "builtin/tiny" in screen
        assert "builtin/dates" in screen
        for step in STEPS:
            assert step.title in screen
        for goal in GOALS:
            assert goal.description in screen, "each wish takes one line"
        assert "Learning rate" in screen, "so that what is tuned first is seen without a key"
        assert app.screen.focused is build(app).pane.form


async def test_a_whole_config_is_built_and_saved_by_keys_alone() -> None:
    Path("pairs.jsonl").write_text(
        "".join(json.dumps({"prompt": f"q{n}", "completion": f"a{n}"}) + "\n" for n in range(40))
    )
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("j", "enter")  # answer like my examples
        await until(pilot, lambda: app.draft.recipe == "sft-lora")
        assert build(app).steps.step == "model"
        await pilot.press("enter")
        await pilot.pause()
        app.screen.query_one("#line", Input).value = ""
        await pilot.press(*"builtin", "slash", *"tiny", "enter")
        await pilot.pause()
        assert app.draft.config.model.name == "builtin/tiny"
        await pilot.press("right_square_bracket", "enter")
        await pilot.pause()
        await pilot.press("ctrl+d", *"pairs.jsonl", "enter", "escape")
        await pilot.pause()
        assert [entry.path for entry in app.draft.config.data.train] == ["pairs.jsonl"]
        await until(pilot, lambda: "prompt_completion" in shown(app))
        await go_to(pilot, fields.optim.learning_rate.path)
        await pilot.press("enter")
        app.screen.query_one("#editor", Input).value = ""
        await pilot.press(*"3e", "minus", *"4", "ctrl+s")
        await until(pilot, lambda: "Enter keeps what is being typed" in shown(app))
        await pilot.press("enter")
        assert app.draft.config.optim.learning_rate == 3e-4
        await pilot.press("6")
        await pilot.pause()
        review = [text for row in build(app).pane.form.rows for text, _, _ in row.lines]
        assert any(text.startswith("optim.learning_rate: ") and text.endswith(" -> 0.0003") for text in review), review
        assert "builtin/tiny (197 k parameters) is trained with SFT" in " ".join(review)
        await pilot.press("ctrl+s")
        await until(pilot, lambda: isinstance(app.screen.focused, Input))
        await pilot.press("enter")
        await until(pilot, lambda: not app.draft.dirty)
    saved = Draft.open("sft-lora.yaml")
    assert saved.config.optim.learning_rate == 3e-4
    assert saved.config.model.name == "builtin/tiny"
    assert not [finding for finding in saved.findings if finding.severity == "error"]


async def test_typing_or_pasting_a_path_in_the_list_of_sources_adds_it_and_removes_none() -> None:
    names = ["dn/qJKjk.jsonl", "new?.jsonl"]
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await go_to(pilot, fields.data.train.path)
        await pilot.press("enter")
        await pilot.pause()
        await pilot.press("backspace")
        for letter in names[0]:  # faster than the line gets the focus
            app.post_message(events.Key(letter, letter))
        await pilot.press("enter")
        await pilot.press(*names[1], "enter")
        app.screen.focused.post_message(events.Paste("pasted/d.jsonl\n"))  # type: ignore[union-attr]
        await pilot.pause()
        await pilot.press("enter", "escape")
        await pilot.pause()
        paths = [source.path for source in app.draft.config.data.train]
        assert paths == ["builtin/dates", *names, "pasted/d.jsonl"]
        await pilot.press("enter")
        await pilot.pause()
        await pilot.press("shift+down", "up", "ctrl+d", "escape")
        await pilot.pause()
        assert [source.path for source in app.draft.config.data.train] == ["builtin/dates", *paths[2:]]


@pytest.mark.parametrize("answer", ["keep", "replace", "stay", None])
async def test_a_goal_never_replaces_the_model_and_data_of_a_file_unasked(answer: str | None) -> None:
    text = "version: 1\nmodel: {name: ./mine}\ndata: {train: [{path: my.jsonl}]}\n"
    Path("my.yaml").write_text(text)
    app = app_of(Draft.open("my.yaml"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        build(app).pane.form.go_to("recipe:dpo")
        await pilot.press("enter")
        await pilot.pause()
        assert "my.yaml" in shown(app)
        assert app.draft.text() == text, "nothing is done before the answer"
        if answer is None:
            await pilot.press("escape")
        else:
            await pilot.press(*["down"] * ["keep", "replace", "stay"].index(answer), "enter")
        await pilot.pause()
        config = app.draft.config
        mine = (config.model.name, [source.path for source in config.data.train]) == ("./mine", ["my.jsonl"])
        assert mine == (answer != "replace")
        assert (config.method.kind == "dpo") == (answer in ("keep", "replace"))
        assert Path("my.yaml").read_text() == text
        if answer in ("keep", "replace"):
            await pilot.press("u")
        assert app.draft.text() == text


async def test_a_goal_is_taken_without_a_question_while_there_is_nothing_of_ones_own() -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        for name in ("dpo", "kto"):
            build(app).action_steps("goal")
            build(app).pane.form.go_to(f"recipe:{name}")
            await pilot.press("enter")
            await pilot.pause()
            assert app.draft.recipe == name
            assert build(app).steps.step == "model"
        app.draft.set(fields.model.name.path, "./mine")
        build(app).action_steps("goal")
        build(app).pane.form.go_to("recipe:dpo")
        await pilot.press("enter")
        await pilot.pause()
        assert app.draft.config.model.name == "./mine", "a model of one's own is asked about, also before it has a file"


async def test_while_a_field_is_edited_the_whole_screen_tells_the_same_findings() -> None:
    Path("my.yaml").write_text(
        "version: 1\nmodel: {name: builtin/tiny, dtype: float32}\ndata: {train: [{path: builtin/dates}]}\n"
        "optim: {max_stesp: 3}\n"
    )
    app = app_of(Draft.open("my.yaml"))
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await go_to(pilot, fields.optim.learning_rate.path)
        await pilot.press("enter")
        editor = app.screen.query_one("#editor", Input)
        foot = build(app).finding_line
        editor.value = "1e-4"
        await pilot.pause()
        assert "✗ 1 error" in shown(app)
        assert foot.finding is not None
        assert foot.finding.path == "optim.max_stesp", "the foot does not say that all is well"
        assert foot.finding.fix is None, "f is a letter now"
        editor.value = "minus"
        await pilot.pause()
        assert "✗ 2 errors" in shown(app)
        assert foot.finding is not None
        assert foot.finding.path == fields.optim.learning_rate.path
        build(app).post_message(FactsArrived("running", "idle"))  # something arrives meanwhile
        await pilot.pause()
        assert "✗ 2 errors" in shown(app)
        assert foot.finding.path == fields.optim.learning_rate.path
        assert build(app).pane.form.row is not None
        assert foot.finding.text in " ".join(text for text, _ in build(app).pane.form.row.notes)
        editor.value = ""
        await pilot.pause()
        assert "✗ 1 error" in shown(app)
        await pilot.press("escape")
        await pilot.pause()
        assert "✗ 1 error" in shown(app)
        assert foot.finding.fix is not None


async def test_every_key_press_while_editing_says_whether_the_value_will_do() -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await go_to(pilot, fields.optim.num_train_epochs.path)
        await pilot.press("enter")
        app.screen.query_one("#editor", Input).value = "-3"
        await pilot.pause()
        assert "must be a number above 0" in " ".join(shown(app).split())
        assert app.draft.config.optim.num_train_epochs != -3
        app.screen.query_one("#editor", Input).value = "2"
        await pilot.pause()
        assert "must be a number" not in " ".join(shown(app).split())
        await pilot.press("enter")
        assert app.draft.config.optim.num_train_epochs == 2


async def test_esc_leaves_a_value_as_it_was() -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await go_to(pilot, fields.run.name.path)
        before = app.draft.config.run.name
        await pilot.press("enter", "x", "y", "escape")
        await pilot.pause()
        assert app.draft.config.run.name == before
        await until(pilot, lambda: not app.screen.query("#editor"))
        assert not app.draft.dirty


async def test_letters_do_nothing_but_write_while_editing() -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await go_to(pilot, fields.run.name.path)
        await pilot.press("enter", "q", "u", "z", "question_mark", "enter")
        assert app.draft.config.run.name == "datesquz?"
        assert isinstance(app.screen, BuildScreen)


async def test_a_choice_opens_as_a_list_and_changes_the_fields_that_apply() -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await go_to(pilot, fields.method.kind.path)
        await pilot.press("enter")
        await pilot.pause()
        assert "DPO: prefer one answer" in shown(app)
        await pilot.press("j", "j", "enter")
        await pilot.pause()
        assert app.draft.config.method.kind == "dpo"
        assert "Beta" in shown(app)


async def test_each_method_of_the_list_is_explained_before_it_is_taken_with_a_row_of_its_data() -> None:
    app = app_of(Draft.new("demo"))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await go_to(pilot, "method.kind")
        assert "the model learns to give the answers in the examples" in words_at_right(app)  # what is set now
        await pilot.press("enter")
        for kind, section in METHODS.items():
            await until(pilot, lambda title=section.description: title in words_at_right(app))  # type: ignore[misc]
            said = words_at_right(app)
            assert needs_of(section).replace("`", "") in said
            assert example_row(section) in said, kind
            await pilot.press("down")
        await pilot.press("escape")
        await until(pilot, lambda: METHODS["sft"].description in words_at_right(app))
        assert app.draft.config.method.kind == "sft"


async def test_rows_that_do_not_fit_the_method_say_what_is_missing_and_show_a_row(tmp_path: Path) -> None:
    rows = tmp_path / "chat.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    app = app_of(Draft.new("dpo"))
    app.draft.set("data.train", [{"path": str(rows)}])
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: any(each.rule == "formats-fit-the-method" for each in app.draft.findings))
        found = next(each for each in app.draft.findings if each.rule == "formats-fit-the-method")
        assert "must be preference or ranking for dpo; got messages" in found.message
        assert example_row(METHODS["dpo"]) in found.message
        build(app).steps.jump(found.path)
        await until(pilot, lambda: '"chosen": "4", "rejected": "5"' in shown(app))
        await pilot.press("f")
        await pilot.pause()
        # Whether the rows or the method are the mistake is the person's to say.
        assert app.draft.config.method.kind == "dpo"


async def test_a_goal_says_what_rows_it_needs_and_shows_one() -> None:
    app = app_of(Draft.new("demo"))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        build(app).pane.form.go_to("recipe:dpo")
        await until(pilot, lambda: "Needs rows with a prompt, a chosen and a rejected answer" in words_at_right(app))
        assert example_row(METHODS["dpo"]) in words_at_right(app)
        build(app).pane.form.go_to("recipe:kto")
        await until(pilot, lambda: "an answer and a label of true or false" in words_at_right(app))


async def test_a_ready_config_takes_two_lines_at_most_and_is_told_whole_at_the_right() -> None:
    app = app_of(Draft.new("demo"))
    first = {goal.recipe for goal in GOALS}
    others = [recipe for recipe in recipes() if recipe.name not in first]
    async with app.run_test(size=(80, 60)) as pilot:
        await pilot.pause()
        for recipe in others:
            assert len(brief_title(recipe.title)) <= TWO_LINES
            build(app).pane.form.go_to(f"recipe:{recipe.name}")
            await until(pilot, lambda recipe=recipe: recipe.title in words_at_right(app))  # type: ignore[misc]
        rows = shown(app).splitlines()
        begin = next(place for place, row in enumerate(rows) if "Other ready configs" in row)
        begins = [place for place, row in enumerate(rows) if "○" in row and place > begin]
        assert len(begins) == len(others)
        assert begins[-1] - begins[0] <= 2 * (len(others) - 1)


async def test_what_arrives_while_a_key_moves_the_cursor_does_not_take_the_key_back() -> None:
    app = app_of(Draft.new("demo"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        form = build(app).pane.form
        form.go_to("recipe:dpo")
        build(app).draw()  # as a fact does that came before the word of the cursor
        assert form.row is not None
        assert form.row.key == "recipe:dpo"
        await pilot.press("4", "j", "j")
        await pilot.pause()
        there = form.row.key
        await pilot.press("1", "4")
        await pilot.pause()
        assert form.row.key == there, "and each step keeps its place"


async def test_undo_and_redo_walk_through_every_change() -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await go_to(pilot, fields.data.packing.path)
        states = [app.draft.text()]
        await pilot.press("enter")
        states.append(app.draft.text())
        await go_to(pilot, fields.optim.learning_rate.path)
        await pilot.press("backspace")
        states.append(app.draft.text())
        assert len(set(states)) == 3
        await pilot.press("u", "u")
        assert app.draft.text() == states[0]
        await pilot.press("u")
        assert app.draft.text() == states[0]
        await pilot.press("U", "U")
        assert app.draft.text() == states[2]


async def test_f_applies_the_fix_in_view() -> None:
    draft = Draft(
        "version: 1\nmodel: {name: builtin/tiny}\ndata: {train: [{path: builtin/dates}]}\noptim: {learnign_rate: 1e-4}\n"
    )
    app = app_of(draft)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert "Did you mean optim.learning_rate" in " ".join(shown(app).split())
        assert "✗" in shown(app)
        await pilot.press("f")
        assert draft.config.optim.learning_rate == 1e-4
        assert not [finding for finding in draft.findings if finding.severity == "error"]
        await pilot.press("u")
        assert [finding for finding in draft.findings if finding.severity == "error"]


GOOD_ROWS = "version: 1\nmodel: {name: builtin/tiny}\ndata: {train: [{path: builtin/dates}]}\n"


async def test_the_list_of_findings_jumps_to_the_setting() -> None:
    draft = Draft(
        "version: 1\nmodel: {name: builtin/tiny}\ndata: {train: [{path: builtin/dates}]}\noptim: {adam_beta2: 7}\n"
    )
    app = app_of(draft)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("exclamation_mark")
        await pilot.pause()
        assert isinstance(app.screen, FindingsScreen)
        assert str(app.screen.query_one(".note", Static).render()) == "enter go there   esc back", "it has no fix"
        await pilot.press("enter")
        await pilot.pause()
        row = build(app).pane.form.row
        assert row is not None
        assert row.key == fields.optim.adam_beta2.path


async def test_find_leads_to_a_setting_by_the_words_of_its_help() -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("slash")
        await pilot.pause()
        await pilot.press(*"noisy")  # no word of its name; DPO's, so it explains and does not jump
        await pilot.pause()
        assert "label_smoothing" in shown(app)
        await pilot.press("escape")
        await pilot.press("slash")
        await pilot.pause()
        await pilot.press(*"summed")
        await pilot.pause()
        await pilot.press("enter")
        await pilot.pause()
        row = build(app).pane.form.row
        assert row is not None
        assert row.key == fields.optim.gradient_accumulation_steps.path


async def test_find_explains_a_term() -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("slash")
        await pilot.pause()
        term, text = next(iter(TERMS.items()))
        app.screen.query_one(Input).value = f"{term} a term"[: len(term)]
        await pilot.pause()
        view = app.screen.query_one(OptionList)
        view.highlighted = view.get_option_index(f"term:{term}")
        await pilot.press("enter")
        await pilot.pause()
        assert " ".join(text.split()[:4]) in " ".join(build(app).steps.side.explain._text[1])


async def test_levels_show_more_and_lose_nothing() -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("4")
        counts = []
        for _ in range(3):
            counts.append(len(build(app).pane.form.rows))
            await pilot.press("a")
        assert counts[0] < counts[1] < counts[2]
        assert len(build(app).pane.form.rows) == counts[0]


async def test_an_edit_shows_its_own_consequence_and_a_fact_does_not() -> None:
    app = app_of()
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause(0.5)
        screen = build(app)
        await go_to(pilot, fields.optim.per_device_train_batch_size.path)
        await pilot.press("enter")
        app.screen.query_one("#editor", Input).value = "128"
        await pilot.press("enter")
        await pilot.pause()
        assert "+64" in shown(app)
        app.draft.learn(replace(app.draft.facts, data=DataFacts(rows=6_000, tokens=70_000, exact=True)))
        screen.draw()
        await pilot.pause()
        assert "+64" in shown(app), "it stays until the next edit"
        assert "70 k" in shown(app)
        assert "+70 k" not in shown(app)


async def test_steps_in_any_order_lose_nothing() -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await go_to(pilot, fields.run.name.path)
        await pilot.press("enter", "2", "enter")
        for key in ("7", "3", "1", "5", "2", "right_square_bracket", "left_square_bracket"):
            await pilot.press(key)
        assert build(app).steps.step == "model"
        assert app.draft.config.run.name == "dates2"
        await pilot.press("h", "j", "j", "l")
        assert build(app).steps.step == "method"
        assert app.screen.focused is build(app).pane.form


async def test_backspace_puts_a_setting_back_to_its_default() -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await go_to(pilot, fields.optim.learning_rate.path)
        await pilot.press("backspace")
        assert app.draft.config.optim.learning_rate == "auto"
        await pilot.pause()
        assert "auto -> " in shown(app)


async def test_backspace_takes_out_what_could_not_be_read() -> None:
    app = app_of(Draft(f"{GOOD_ROWS}optim: {{adam_beta2: 7}}\n"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("exclamation_mark", "enter", "backspace")
        await pilot.pause()
        assert app.draft.value(fields.optim.adam_beta2.path) is None


async def test_the_fix_of_the_finding_under_the_cursor_is_applied_the_gravest_first() -> None:
    app = app_of(Draft(f"{GOOD_ROWS}optim: {{learning_rate: 5.0, warmup_steps: 2.5}}\n"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("exclamation_mark")
        await pilot.pause()
        screen = app.screen
        assert isinstance(screen, FindingsScreen)
        assert "f apply its fix" in str(screen.query_one(".note", Static).render())
        ranks = [RANK[finding.severity] for finding in screen._findings]
        assert ranks == sorted(ranks)
        assert [finding.path for finding in screen._findings][:2] == ["optim.warmup_steps", "optim.learning_rate"]
        await pilot.press("j", "f")
        await pilot.pause()
        assert app.draft.value("optim.learning_rate") == 0.001
        assert app.draft.value("optim.warmup_steps") == 2.5


async def test_yaml_goes_through_the_editor_and_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    editor = tmp_path / "editor.sh"
    editor.write_text('#!/bin/sh\nsed -i "s/name: dates/name: mine/" "$1"\n')
    editor.chmod(0o755)
    monkeypatch.setenv("EDITOR", str(editor))
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        from contextlib import nullcontext

        monkeypatch.setattr(app, "suspend", nullcontext)  # the headless driver cannot be suspended
        await pilot.press("y")
        await pilot.pause()
        assert app.draft.config.run.name == "mine"
        assert "# " in app.draft.text()  # comments stay
        await pilot.press("u")
        assert app.draft.config.run.name == "dates"


async def test_broken_yaml_from_the_editor_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    editor = tmp_path / "editor.sh"
    editor.write_text('#!/bin/sh\ncp "$1" "${0%/*}/seen.yaml"\nprintf "a: [1\\n b" > "$1"\n')
    editor.chmod(0o755)
    monkeypatch.setenv("EDITOR", str(editor))
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        from contextlib import nullcontext

        monkeypatch.setattr(app, "suspend", nullcontext)
        before = app.draft.text()
        await pilot.press("y")
        await pilot.pause()
        assert app.draft.text() == before
        assert "y opens it again as you left it" in message(app)
        await pilot.press("y")  # and so it does: what was written is not lost with the bracket that was missing
        await pilot.pause()
        assert (tmp_path / "seen.yaml").read_text() == "a: [1\n b"
        app.draft.set(fields.run.name.path, "later")
        await pilot.press("y")  # a newer edit counts more
        await pilot.pause()
        assert "later" in (tmp_path / "seen.yaml").read_text()


async def test_quitting_with_changes_asks_and_saving_there_leaves() -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await go_to(pilot, fields.data.packing.path)
        await pilot.press("enter", "q")
        await pilot.pause()
        assert isinstance(app.screen, LeaveScreen)
        await pilot.press("escape")
        assert isinstance(app.screen, BuildScreen)
        await pilot.press("q")
        await pilot.pause()
        await pilot.press("enter")
        await pilot.pause()
        await pilot.press("enter")
        await pilot.pause()
        assert app.left
    assert Draft.open("demo.yaml").config.data.packing is True
    assert any("demo.yaml" in line for line in app.goodbye)


async def test_quitting_without_changes_does_not_ask() -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("q")
        await pilot.pause()
        assert app.left


async def test_quitting_says_which_runs_go_on() -> None:
    from engine.run.store import create

    run = create("runs", "version: 1\n", {"name": "dates"})
    run.update_json(state="running")
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "1 run going on" in shown(app))
        await pilot.press("q")
        await pilot.pause()
    assert app.goodbye == [f"{run.id} goes on without this window. `workbench {run.id}` shows it again."]


async def test_back_from_a_run_that_has_ended_the_head_counts_it_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.run.store import create
    from workbench.screens import background
    from workbench.screens.dialog import Show

    monkeypatch.setattr(background, "RUNS_EVERY", 1000)
    run = create("runs", "version: 1\n", {"name": "dates"})
    run.update_json(state="running")
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "1 run going on" in shown(app))
        app.push_screen(Show("A run", "its curves"))
        await pilot.pause()
        run.update_json(state="stopped")
        await pilot.press("escape")
        await until(pilot, lambda: "1 run going on" not in shown(app))


async def test_a_file_that_another_changed_is_replaced_only_when_that_is_chosen() -> None:
    place = Path("mine.yaml")
    place.write_text("version: 1\nrun: {seed: 1}\n")
    app = app_of(Draft.open(place))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        app.draft.set("run.seed", 2)
        place.write_text("version: 1\nrun: {seed: 3}\n")
        for keys, seed in (((), "3"), (("enter", "escape"), "3"), (("down", "enter"), "2")):
            await pilot.press("ctrl+s")
            await until(pilot, lambda: isinstance(app.screen.focused, Input))
            await pilot.press("enter")
            await until(pilot, lambda: "was changed by someone else" in " ".join(shown(app).split()))
            await pilot.press(*(keys or ("escape",)))
            await until(pilot, lambda: isinstance(app.screen, BuildScreen))
            assert f"seed: {seed}" in place.read_text()
        assert not app.draft.dirty
        Path("other.yaml").write_text("version: 1\n")
        await pilot.press("ctrl+s")
        await until(pilot, lambda: isinstance(app.screen.focused, Input))
        app.screen.focused.value = "other.yaml"
        await pilot.press("enter")
        await until(pilot, lambda: "is there already" in " ".join(shown(app).split()))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen.focused, Input))
        assert app.screen.focused.value == "other-2.yaml", "and another name is asked for at once"
        await pilot.press("enter")
        await until(pilot, lambda: "Saved in" in shown(app))
    assert Path("other.yaml").read_text() == "version: 1\n"
    assert "seed: 2" in Path("other-2.yaml").read_text()


async def test_leaving_replaces_no_file_unasked() -> None:
    Path("mine.yaml").write_text("version: 1\n")
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await go_to(pilot, fields.data.packing.path)
        await pilot.press("enter", "q", "enter")
        await until(pilot, lambda: isinstance(app.screen.focused, Input))
        app.screen.focused.value = "mine.yaml"
        await pilot.press("enter")
        await until(pilot, lambda: "is there already" in " ".join(shown(app).split()))
        assert Path("mine.yaml").read_text() == "version: 1\n"
        await pilot.press("down", "enter")
        await until(pilot, lambda: app.left)
    assert Draft.open("mine.yaml").config.data.packing is True


async def test_saving_where_nobody_may_write_says_so_and_keeps_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await go_to(pilot, fields.data.packing.path)
        await pilot.press("enter", "w")
        await pilot.pause()
        app.screen.query_one(Input).value = "no/such/folder/x.yaml"
        await pilot.press("enter")
        await pilot.pause()
        assert "cannot be written" in message(app)
        assert app.draft.dirty


async def test_a_narrow_window_shows_values_and_z_brings_the_explanation() -> None:
    app = app_of()
    async with app.run_test(size=(60, 20)) as pilot:
        await pilot.press("4")
        await pilot.pause()
        assert "0.004" in shown(app)
        assert not app.screen.query_one("#side").display
        await pilot.press("z")
        await pilot.pause()
        assert "effective batch" in shown(app)
        await pilot.press("z")
        await pilot.pause()
        assert "effective batch" not in shown(app)


async def test_help_and_palette_come_from_the_table_of_actions() -> None:
    app = app_of()
    async with app.run_test(size=(80, 50)) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        assert isinstance(app.screen, HelpScreen)
        screen = shown(app)
        for action in ACTIONS:
            if action.help and action.keys and {"build", "everywhere"} & set(action.screens):
                assert action.help[:40] in screen
        await pilot.press("q", "ctrl+p")
        await pilot.pause()
        await pilot.press(*"fold")
        await until(pilot, lambda: "Fold" in shown(app))
        await pilot.press("down", "enter")
        await pilot.pause(0.5)
        assert app.screen.has_class("folded")


def test_every_action_has_a_method_and_no_key_has_two_meanings() -> None:
    seen: dict[tuple[str, str], str] = {}
    for action in ACTIONS:
        name = (action.call or action.id).partition("(")[0]
        owners: dict[str, type] = {"everywhere": WorkbenchApp, "build": BuildScreen}
        for screen in action.screens:
            if screen in owners:
                assert hasattr(owners[screen], f"action_{name}"), action.id
            for key in filter(None, action.keys.split(",")):
                assert seen.setdefault((screen, key), action.id) == action.id, key


async def test_launching_with_an_error_lists_the_findings_instead() -> None:
    app = app_of(Draft("version: 1\noptim: {num_train_epochs: -1}\n"))
    async with app.run_test(size=(80, 24)) as pilot:
        build(app).action_launch()
        await pilot.pause()
        assert isinstance(app.screen, FindingsScreen)
        assert not Path("runs").exists() or not list(Path("runs").iterdir())


async def test_enter_on_launch_starts_the_run_of_this_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher gets the resolved config with absolute paths; what it cannot do is said."""
    import engine.run.from_config as from_config
    from engine.errors import WorkbenchError

    got: dict[str, Any] = {}

    def launch_config(config: Any, facts: Any, **rest: Any) -> Any:
        got.update(config=config, **rest)
        raise WorkbenchError("there is no room on the disk")

    monkeypatch.setattr(from_config, "launch_config", launch_config)
    Path("rows.jsonl").write_text('{"text": "a line"}\n' * 5)
    draft = Draft(
        "version: 1\nmodel: {name: builtin/tiny}\nmethod: {kind: pretrain}\ndata: {train: [{path: rows.jsonl}]}\n"
    )
    app = app_of(draft)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("7", "enter")
        await until(pilot, lambda: "there is no room on the disk" in shown(app))
        assert got["config"].data.train[0].path == str(Path.cwd() / "rows.jsonl")
        assert got["runs_dir"] == Path.cwd() / "runs"
        assert isinstance(app.screen, BuildScreen)
        await pilot.press("1")  # the app goes on


async def test_a_huge_value_and_a_thousand_findings_do_not_stop_the_app() -> None:
    draft = Draft(
        "version: 1\nrun: {name: "
        + "x" * 300_000
        + "}\noptim: {"
        + ", ".join(f"nonsense{n}: 1" for n in range(1000))
        + "}\n"
    )
    app = app_of(draft)
    async with app.run_test(size=(80, 24)) as pilot:
        await asyncio.wait_for(pilot.press("7", "6", "exclamation_mark"), 30)
        await pilot.pause()
        assert app.screen.query_one(OptionList).option_count >= 1000


async def test_below_60x16_a_sentence_stands_instead() -> None:
    app = app_of()
    async with app.run_test(size=(50, 12)) as pilot:
        await pilot.pause()
        assert "60" in shown(app)
        assert "16" in shown(app)
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert "Goal" in shown(app)
        assert isinstance(app.screen, BuildScreen)


async def test_the_editor_stays_on_its_row_when_the_window_changes() -> None:
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await go_to(pilot, fields.optim.num_train_epochs.path)
        await pilot.press("enter")
        await pilot.resize_terminal(120, 40)
        await pilot.pause()
        pane = app.screen.query_one(FormPane)
        editor = app.screen.query_one("#editor", Input)
        assert editor.region.y == pane.form.region.y + pane.form.line_of(pane.form.at) - pane.form.top


async def test_a_person_can_have_keys_of_their_own(tmp_path: Path) -> None:
    place = tmp_path / "config" / "workbench" / "keys.json"
    place.parent.mkdir(parents=True)
    place.write_text('{"undo": "ctrl+y", "fly": "x"}')
    app = app_of()
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "knows no action fly" in " ".join(note.message for note in app._notifications))
        await go_to(pilot, fields.data.packing.path)
        await pilot.press("enter")
        assert app.draft.config.data.packing is True
        await pilot.press("u")
        assert app.draft.config.data.packing is True
        await pilot.press("ctrl+y")
        assert app.draft.config.data.packing is False


async def test_columns_are_offered_where_no_format_is_seen() -> None:
    Path("odd.jsonl").write_text('{"frage": "q", "antwort": "a"}\n' * 5)
    draft = Draft("version: 1\nmodel: {name: builtin/tiny}\ndata: {train: [{path: odd.jsonl}]}\n")
    app = app_of(draft)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("3")
        await until(pilot, lambda: "Columns that can be mapped: frage, antwort" in shown(app))
        assert build(app).pane.form.go_to("data.train.0.columns")
        await pilot.press("enter")
        app.screen.query_one("#editor", Input).value = "prompt: frage, completion: antwort"
        await pilot.press("enter")
        assert draft.config.data.train[0].columns == {"prompt": "frage", "completion": "antwort"}
        await until(pilot, lambda: "prompt from frage" in shown(app))


async def test_a_model_that_is_not_here_is_not_asked_about_and_what_was_asked_of_another_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str]] = []

    class Silent:
        """An inspector that never answers."""

        def ask(self, do: str, **params: Any) -> Any:
            asked.append((do, params["config"]["model"]["name"]))
            return SimpleNamespace(done=False, cancel=lambda: None, add_done_callback=lambda done: None)

    monkeypatch.setattr(WorkbenchApp, "inspector", property(lambda app: Silent()))
    app = app_of(Draft("version: 1\nmodel: {name: builtin/tiny}\ndata: {train: [{path: builtin/dates}]}\n"))
    async with app.run_test(size=(80, 40)) as pilot:
        await pilot.press("3")
        await until(pilot, lambda: "counting tokens" in shown(app))
        app.draft.set(fields.model.name.path, "someone/something")
        build(app).draw()
        build(app).reload()
        await until(pilot, lambda: "counting tokens" not in shown(app))
        assert {name for _, name in asked} == {"builtin/tiny"}


async def test_a_key_stops_the_counting_which_says_how_far_it_is_and_begins_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Callable[[dict[str, Any]], None]] = []
    cancelled: list[bool] = []

    class Silent:
        """An inspector that never answers."""

        def ask(self, do: str, **params: Any) -> Any:
            if do == "data":
                told.append(params["on_progress"])
            cancel = lambda: cancelled.append(True)  # noqa: E731
            return SimpleNamespace(done=False, cancel=cancel, add_done_callback=lambda done: None)

    monkeypatch.setattr(WorkbenchApp, "inspector", property(lambda app: Silent()))
    app = app_of()
    async with app.run_test(size=(80, 40)) as pilot:
        await pilot.press("3")
        await until(pilot, lambda: "counting tokens" in shown(app))
        told[-1]({"stage": "tokenize", "done": 12_000, "total": 24_000})
        await until(pilot, lambda: "12,000 of 24,000" in shown(app))
        await pilot.press("c")
        await until(pilot, lambda: "12,000 of 24,000" not in shown(app))
        assert message(app) == "The rows are not counted; c counts them."
        assert (len(told), cancelled) == (1, [True])
        await pilot.press("c")
        await until(pilot, lambda: "counting tokens" in shown(app))
        assert len(told) == 2


async def test_what_was_counted_of_other_rows_is_not_shown_for_a_recipe_taken_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Silent:
        """An inspector that never answers."""

        def ask(self, do: str, **params: Any) -> Any:
            return SimpleNamespace(done=False, cancel=lambda: None, add_done_callback=lambda done: None)

    monkeypatch.setattr(WorkbenchApp, "inspector", property(lambda app: Silent()))
    app = app_of()
    async with app.run_test(size=(80, 40)) as pilot:
        await pilot.press("3")
        await until(pilot, lambda: "counting tokens" in shown(app))
        build(app).session.facts.tokenizer = {"tokenizer": {"size": 512}}
        app.draft.learn(replace(app.draft.facts, data=DataFacts(rows=24_000, tokens=700_000, exact=True)))
        build(app).draw()
        await until(pilot, lambda: "Counted over all rows" in shown(app) and "tokens/epoch" in shown(app))
        app.draft.set(fields.data.max_length.path, 64)
        build(app).draw()
        build(app).reload()
        await until(pilot, lambda: build(app).session.facts.asking.startswith("counting"))
        assert app.draft.facts.data is not None, "the same rows: their old counts stand until the new ones are there"
        await pilot.press("1", "j", "j", "enter")  # prefer some answers over others
        await until(pilot, lambda: app.draft.recipe == "dpo" and app.draft.facts.data is None)
        await pilot.press("3")
        await until(pilot, lambda: "no such file" in shown(app))
        assert "Counted" not in shown(app)
        assert "tokens/epoch" not in shown(app)
        await pilot.press("2")
        await pilot.pause()
        assert "512 tokens" not in shown(app)


@pytest.mark.slow
async def test_the_inspector_counts_tokens_while_the_form_goes_on() -> None:
    app = app_of(Draft("version: 1\nmodel: {name: builtin/tiny}\ndata: {train: [{path: builtin/dates}]}\n"))
    async with app.run_test(size=(80, 40)) as pilot:
        await pilot.press("3")
        await until(pilot, lambda: "Counted over all rows" in shown(app), 120)
        facts = app.draft.facts.data
        assert facts is not None
        assert facts.exact
        assert facts.trained_tokens
        await pilot.press("2")
        await until(pilot, lambda: "<|im_end|>" in shown(app), 60)


async def test_the_review_tells_what_a_rehearsal_of_this_very_config_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path))
    draft = Draft.new("demo")
    draft.learn(Facts(machine=this_machine()))
    measured = Rehearsal(0.0, "", "builtin/tiny", "sft", 800 << 20, 0.25, 8, 300, 46, 600 << 20)
    keep(resolved(draft.config, draft.facts), draft.facts, measured)
    app = app_of(draft)
    async with app.run_test(size=(120, 60)) as pilot:
        await until(pilot, lambda: isinstance(app.screen, BuildScreen))
        build(app).action_steps("review")
        await until(pilot, lambda: "800 MiB at the peak" in shown(app))
        assert "The formula gave 600 MiB, 25% too low." in " ".join(shown(app).split())


async def test_a_wide_window_shows_form_first_row_and_what_follows_side_by_side() -> None:
    app = WorkbenchApp()
    async with app.run_test(size=(200, 50)) as pilot:
        app.navigation.build(Draft.new("demo"), "data")
        await pilot.pause(0.5)
        screen = app.screen
        form, row, side = (screen.query_one(name) for name in ("#form", "FirstRow", "#side"))
        assert [part.region.width >= least for part, least in ((form, 60), (row, 60), (side, 40))] == [True] * 3
        assert form.region.right <= row.region.x
        assert row.region.right <= side.region.x
        assert side.region.right <= 200
