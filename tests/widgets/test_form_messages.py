"""The form over its messages: what a browser sends changes the draft, and nothing else does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config.kinds import example_row, needs_of
from engine.config.method import METHODS
from engine.config.steps import GOALS, STEPS, step_fields
from engine.config.tree import fields, fields_of
from engine.planning.auto import resolved
from engine.run.rehearsed import Rehearsal, keep
from engine.session.draft import Draft
from tests.caches import own_cache
from widgets import ConfigForm, asking
from widgets.form import FormPart
from widgets.wire import options

LEARNING_RATE = fields.optim.learning_rate.path
TRAIN = fields.data.train.path


class Asker:
    """A view: sends messages, keeps the specs that it was told."""

    def __init__(self, form: ConfigForm) -> None:
        self.form = form
        self.specs: dict[int, dict] = {}

    def __call__(self, do: str, **params: object) -> dict:
        data = self.form.answer({"id": "v.1", "do": do, **params}).data
        json.dumps(data)
        for number, spec in data.get("specs", ()):
            self.specs[number] = spec
        return data

    def edit(self, do: str, **params: object) -> dict:
        return self(do, specs=len(self.specs), **params)


@pytest.fixture
def draft() -> Draft:
    return Draft.new("demo")


@pytest.fixture
def ask(draft: Draft) -> Iterator[Asker]:
    form = ConfigForm(draft)
    yield Asker(form)
    form.close()


def test_every_step_shows_the_settings_that_the_engine_names_for_it(ask: Asker, draft: Draft) -> None:
    for step in STEPS:
        state = ask.edit("step", step=step.id)
        shown = [ask.specs[field["spec"]]["path"] for field in state["fields"]]
        assert shown == [spec.path for spec in step_fields(step, draft.config)]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["pairs", "every pair"])
def test_every_setting_of_every_method_can_be_shown_and_sent_back_unchanged(
    ask: Asker, draft: Draft, every: bool
) -> None:
    for number, method in enumerate(METHODS):
        for adapter in ("lora", "none") if every else (("lora", "none")[number % 2],):
            ask.edit("set", path=fields.method.kind.path, value=method)
            ask.edit("set", path=fields.adapter.kind.path, value=adapter)
            before = draft.config
            for step in STEPS:
                for field in ask.edit("step", step=step.id)["fields"]:
                    spec = ask.specs[field["spec"]]
                    answer = ask.edit("set", path=spec["path"], value=field["value"])
                    assert answer["ok"], answer
            assert draft.config == before
    assert len(ask.specs) >= len(fields_of(draft.config))


def test_specs_travel_once(ask: Asker) -> None:
    assert ask.edit("step", step="method")["specs"]
    assert ask.edit("step", step="method")["specs"] == []


def test_a_bad_value_is_a_finding_with_a_fix_that_one_message_applies(ask: Asker, draft: Draft) -> None:
    state = ask.edit("set", path=LEARNING_RATE, value="-3")
    finding = next(each for each in state["findings"] if each["path"] == LEARNING_RATE)
    assert (finding["severity"], finding["step"]) == ("error", "method")
    assert next(step for step in state["steps"] if step["id"] == "method")["mark"] == "✗"
    assert not finding["fix"]  # nobody knows what was meant
    draft.set(LEARNING_RATE, 1e-4)
    state = ask.edit("set", path="optim.warmup_steps", value="2.4")
    finding = next(each for each in state["findings"] if each["path"] == "optim.warmup_steps")
    assert finding["severity"] == "error"
    state = ask.edit("fix", finding=finding["key"])
    assert not [each for each in state["findings"] if each["path"] == "optim.warmup_steps"]
    assert draft.value("optim.warmup_steps") == 2


def test_a_finding_inside_a_source_stands_at_the_sources_and_says_which(ask: Asker, draft: Draft) -> None:
    draft.set(TRAIN, [{"path": "a.jsonl"}, {"path": "b.jsonl", "rows": -1}])
    state = ask.edit("step", step="data")
    (finding,) = [each for each in state["findings"] if each["severity"] == "error" and "-1" in each["message"]]
    assert (finding["path"], finding["title"], finding["step"]) == (TRAIN, "Training data, rows", "data")


def test_what_is_typed_stays_visible_while_it_is_wrong(ask: Asker) -> None:
    ask.edit("step", step="method")
    state = ask.edit("set", path=LEARNING_RATE, value="fast")
    field = next(each for each in state["fields"] if ask.specs[each["spec"]]["path"] == LEARNING_RATE)
    assert field["value"] == "fast"


def test_typing_one_value_is_one_step_of_undo(ask: Asker, draft: Draft) -> None:
    before = draft.text()
    for typed in ("0", "0.", "0.0", "0.00", "0.001"):
        ask.edit("set", path=LEARNING_RATE, value=typed, typing=True)
    assert draft.value(LEARNING_RATE) == 0.001
    ask.edit("undo")
    assert draft.text() == before
    ask.edit("redo")
    assert draft.value(LEARNING_RATE) == 0.001


def test_typing_again_after_undo_does_not_eat_the_step_before(ask: Asker, draft: Draft) -> None:
    ask.edit("set", path=fields.run.name.path, value="first")
    ask.edit("set", path=LEARNING_RATE, value="0.1", typing=True)
    ask.edit("undo")
    ask.edit("set", path=LEARNING_RATE, value="0.2", typing=True)
    assert draft.value(fields.run.name.path) == "first"


def test_the_way_back_is_offered_where_a_value_differs_from_the_recipe_and_says_where_it_leads(
    ask: Asker, draft: Draft
) -> None:
    def back(state: dict) -> str:
        return next(each["back"] for each in state["fields"] if ask.specs[each["spec"]]["path"] == LEARNING_RATE)

    recipes_own = draft.value(LEARNING_RATE)
    assert back(ask.edit("step", step="method")) == ""
    assert back(ask.edit("set", path=LEARNING_RATE, value="0.5")) == f"back to the recipe: {recipes_own:g}"
    assert back(ask.edit("unset", path=LEARNING_RATE)) == ""
    assert draft.value(LEARNING_RATE) == recipes_own
    assert back(ask.edit("set", path=LEARNING_RATE, value="fast")) == f"back to the recipe: {recipes_own:g}"


def test_without_a_recipe_the_way_back_leads_to_the_default() -> None:
    form = ConfigForm(Draft())
    asked = Asker(form)
    state = [asked.edit("step", step="model"), asked.edit("set", path=fields.model.name.path, value="here/model")][1]
    (told,) = [each["back"] for each in state["fields"] if each["given"]]
    default = fields.model.name.default
    assert told == f"back to the default: {default or 'none'}"
    form.close()


def test_a_choice_is_not_named_twice() -> None:
    for spec in fields:
        for value, words in options(spec):
            assert not words.startswith(f"{value}: {value}"), spec.path


def test_no_choice_is_offered_that_this_version_refuses() -> None:
    later = [(spec, value) for spec in fields for value in spec.unsupported]
    assert later
    for spec, value in later:
        assert value not in [offered for offered, _ in options(spec)], spec.path


def test_an_emptied_field_goes_back_to_auto(ask: Asker, draft: Draft) -> None:
    ask.edit("set", path=LEARNING_RATE, value="")
    assert LEARNING_RATE not in draft.reading.given


def test_the_change_of_the_last_edit_is_told_beside_the_number(ask: Asker, draft: Draft) -> None:
    batch = fields.optim.per_device_train_batch_size
    state = ask.edit("set", path=batch.path, value=str(batch.value(draft.config) * 2))
    told = next(each for each in state["consequences"] if each["label"] == "effective batch")
    assert told["delta"] == "+64"


def test_sources_keep_what_the_form_does_not_show(ask: Asker, draft: Draft) -> None:
    draft.set(TRAIN, [{"path": "a.jsonl", "columns": {"prompt": "question"}, "rows": 5}])
    ask.edit("step", step="data")
    ask.edit("set", path=TRAIN, value=[{"path": "b.jsonl", "columns": "prompt: question", "rows": "7"}])
    assert draft.value(TRAIN) == [{"path": "b.jsonl", "columns": {"prompt": "question"}, "rows": 7}]


def test_edits_made_in_python_are_seen_by_the_next_question(ask: Asker, draft: Draft) -> None:
    version = ask.edit("state")["version"]
    assert ask.edit("state", version=version).get("same") or ask.edit("state", version=version)["working"]
    draft.set(LEARNING_RATE, 0.5)
    assert not ask.edit("state", version=version).get("same")


def test_a_recipe_replaces_the_config_and_undo_brings_it_back(ask: Asker, draft: Draft) -> None:
    before = draft.text()
    ask.edit("recipe", name="dpo")
    assert draft.config.method.kind == "dpo"
    ask.edit("undo")
    assert draft.text() == before


def test_a_goal_and_a_method_say_what_they_are_for_what_rows_they_need_and_show_one(ask: Asker, draft: Draft) -> None:
    listed = ask.edit("step", step="goal")["goals"]
    goals = {goal["recipe"]: " ".join(goal["about"]) for goal in listed}
    assert [goal["recipe"] for goal in listed if not goal["ready"]] == [goal.recipe for goal in GOALS]
    assert [goal["ready"] for goal in listed] == sorted(goal["ready"] for goal in listed)
    for name, kind in (("dpo", "dpo"), ("ppo", "ppo"), ("prm", "prm")):
        assert needs_of(METHODS[kind]) in goals[name]
        assert example_row(METHODS[kind]) in goals[name]
    assert "Nothing is downloaded" in goals["demo"]
    draft.set(fields.method.kind.path, "kto")
    kinds = ask.edit("step", step="method")["kinds"]
    assert example_row(METHODS["kto"]) in kinds[fields.method.kind.path]["about"]
    assert kinds[fields.adapter.kind.path]["about"][0]
    assert "`" not in str(kinds) + str(goals)
    assert ask.edit("step", step="data")["kinds"] == {}


def test_counting_is_told_stopped_and_begun_again(draft: Draft) -> None:
    told: list[Callable[[dict[str, object]], None]] = []
    cancelled: list[bool] = []

    class Silent(asking.Asker):
        """Of an inspector that never answers."""

        def ask(self, do: str, **params: Any) -> Any:
            if do == "data":
                told.append(params["on_progress"])
            return SimpleNamespace(done=False, cancel=lambda: cancelled.append(True), add_done_callback=lambda do: None)

    silent = Silent()
    form = FormPart(draft, silent)
    try:
        end = time.monotonic() + 60
        while not form.state()["counting"]:
            assert time.monotonic() < end
            time.sleep(0.02)
        told[-1]({"stage": "tokenize", "done": 12_000, "total": 24_000})
        state = form.state()
        assert "12,000 of 24,000" in state["words"]
        assert not state["stopped"]
        state = form.count()
        assert (state["counting"], state["stopped"], cancelled) == (False, True, [True])
        state = form.count()
        assert (state["counting"], state["stopped"], len(told)) == (True, False, 2)
    finally:
        form.session.close()
        silent.close()


def test_yaml_that_cannot_be_read_changes_nothing_and_says_where(ask: Asker, draft: Draft) -> None:
    before = draft.text()
    answer = ask.edit("replace", text="model:\n\tname: x\n")
    assert not answer["ok"]
    assert "2" in answer["error"]
    assert draft.text() == before


def test_saving_writes_the_file_that_the_person_named(ask: Asker, draft: Draft, tmp_path: Path) -> None:
    assert not ask.edit("save")["ok"]
    assert ask.edit("save", path=str(tmp_path / "mine.yaml"))["ok"]
    assert (tmp_path / "mine.yaml").read_text() == draft.text()


def test_saving_replaces_what_another_wrote_only_when_asked_to(ask: Asker, draft: Draft, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.yaml", tmp_path / "other.yaml"
    ask.edit("save", path=str(mine))
    for place, asked in ((mine, {}), (other, {"path": str(other)})):
        place.write_text("version: 1\n")
        told = ask.edit("save", **asked)
        assert str(place) in told["lost"]
        assert place.read_text() == "version: 1\n"
        assert "lost" not in ask.edit("save", **asked, replace=True)
        assert place.read_text() == draft.text()


def test_a_saved_config_is_news_to_a_view_that_knew_it_unsaved(ask: Asker, draft: Draft, tmp_path: Path) -> None:
    ask.edit("set", path=LEARNING_RATE, value="0.5")
    before = ask("state")["version"]
    while "same" not in (now := ask("state", version=before)):  # what is found out about rows and model is news too
        before = now["version"]
    draft.save(tmp_path / "mine.yaml")
    news = ask("state", version=before)
    assert (news.get("same"), news["dirty"], news["name"]) == (None, False, "mine.yaml")


def test_an_emptied_text_is_left_out_of_the_file(ask: Asker, draft: Draft) -> None:
    path = fields.run.name.path
    ask.edit("set", path=path, value="mine")
    assert draft.value(path) == "mine"
    ask.edit("set", path=path, value="")
    assert draft.value(path) is None
    assert "name:" not in draft.text().partition("run:")[2]


def test_settings_are_found_by_words_of_their_help(ask: Asker) -> None:
    found = ask("find", text="learning rate")["found"]
    assert found[0]["path"] == LEARNING_RATE
    assert found[0]["about"] == []


def test_a_setting_of_another_adapter_and_a_term_are_found_and_say_what_they_are(ask: Asker, draft: Draft) -> None:
    rank = next(hit for hit in ask("find", text="rank")["found"] if hit["path"] == fields.adapter.r.path)
    assert rank["whose"].startswith("only with adapter lora")
    assert fields.adapter.r.help in rank["about"]
    epoch = next(hit for hit in ask("find", text="epoch")["found"] if hit["whose"] == "a term")
    assert epoch["about"]
    ask.edit("set", path=fields.adapter.kind.path, value="lora")
    found = ask("find", text="rank")["found"]
    rank = next(hit for hit in found if hit["path"] == fields.adapter.r.path)
    assert (rank["about"], rank["step"]) == ([], "method")
    assert len(ask("find", text="e")["found"]) == 12
    assert ask("find", text="  ")["found"] == []


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        "set",
        {"do": "set"},
        {"id": "1"},
        {"id": 7, "do": "state"},
        {"id": "1", "do": "__init__"},
        {"id": "1", "do": "close"},
        {"id": "1", "do": ["set"]},
        {"id": "1", "do": "set"},
        {"id": "1", "do": "set", "path": "optim.learning_rate"},
        {"id": "1", "do": "set", "path": 3, "value": 1},
        {"id": "1", "do": "set", "path": "optim.nonsense", "value": 1},
        {"id": "1", "do": "set", "path": "optim.learning_rate", "value": {"a": 1}},
        {"id": "1", "do": "set", "path": "optim.learning_rate", "value": 0.1, "and": "more"},
        {"id": "1", "do": "set", "path": "data.train", "value": ["a.jsonl"]},
        {"id": "1", "do": "set", "path": "run.prompts", "value": [1, 2]},
        {"id": "1", "do": "state", "specs": "0"},
        {"id": "1", "do": "state", "specs": -1},
        {"id": "1", "do": "step", "step": "nowhere"},
        {"id": "1", "do": "recipe", "name": "../../etc/passwd"},
        {"id": "1", "do": "replace", "text": "x" * 2_000_000},
    ],
)
def test_a_message_that_is_not_known_or_malformed_gets_a_sentence_and_changes_nothing(
    ask: Asker, draft: Draft, message: object
) -> None:
    before = draft.text()
    answer = ask.form.answer(message).data
    assert answer["ok"] is False
    assert len(answer["error"]) > 10
    assert draft.text() == before


def test_the_review_tells_what_a_rehearsal_of_this_very_config_measured(
    ask: Asker, draft: Draft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path))
    measured = Rehearsal(0.0, "", "builtin/tiny", "sft", 800 << 20, 0.25, 8, 300, 46, 600 << 20)
    keep(resolved(draft.config, draft.facts), draft.facts, measured)
    assert measured.summary() in str(ask.edit("step", step="review")["blocks"])
    assert measured.summary() not in str(ask.edit("step", step="memory")["blocks"])
    draft.set(fields.optim.per_device_train_batch_size.path, 3)
    assert "Rehearsed" not in str(ask.edit("step", step="review")["blocks"])
