"""A draft can be edited, undone and saved without losing a comment, whatever is done to it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.config.data import DataSource
from engine.config.edit import rewrite
from engine.config.facts import Facts
from engine.config.files import parse
from engine.config.findings import Fix
from engine.config.recipes import recipes
from engine.config.tree import fields
from engine.errors import ConfigUnreadable, UsageError, WorkbenchError
from engine.hardware import parse_machine
from engine.session.draft import Draft, FileChanged, mend, save_as

TEXT = """\
# My config
version: 1

model:
  name: builtin/tiny   # the small one
  dtype: 'float32'

# how it learns
adapter: {kind: lora, r: 8}   # small

data:
  train:
    # first the dates
    - path: builtin/dates
      weight:   2.0
    - path: more.jsonl # my own
  # held out
  eval:
  - path: held.jsonl
  max_length: 128

run:
  prompts: ["What, now?", 'b']
  seed: 1

# the end
"""


def edited(path: str, value: Any, text: str = TEXT) -> list[str]:
    """Lines that an edit removes (-) and adds (+)."""
    import difflib

    draft = Draft(text)
    draft.set(path, value)
    new = draft.text()
    assert parse(new).mapping == draft.mapping
    lines = difflib.unified_diff(text.splitlines(), new.splitlines(), n=0, lineterm="")
    return [line for line in lines if line[0] in "+-" and line[:3] not in ("---", "+++")]


def test_nothing_changed_is_the_same_to_the_byte() -> None:
    for text in (TEXT, TEXT.replace("\n", "\r\n"), "\ufeff" + TEXT, "# only this", ""):
        assert Draft(text).text() == text


@pytest.mark.parametrize(
    ("path", "value", "changed"),
    [
        ("model.name", "x/y", ["-  name: builtin/tiny   # the small one", "+  name: x/y   # the small one"]),
        ("model.dtype", "bfloat16", ["-  dtype: 'float32'", "+  dtype: bfloat16"]),
        ("model.revision", "main", ["+  revision: main"]),
        ("adapter.r", 16, ["-adapter: {kind: lora, r: 8}   # small", "+adapter: {kind: lora, r: 16}   # small"]),
        ("data.train.0.weight", 3, ["-      weight:   2.0", "+      weight:   3"]),
        ("data.train.1.format", "text", ["+      format: text"]),
        ("data.eval.1.path", "second.jsonl", ["+  - path: second.jsonl"]),
        ("data.max_length", "256", ["-  max_length: 128", "+  max_length: 256"]),
        ("run.prompts", ["x: y"], ["-  prompts: [\"What, now?\", 'b']", "+  prompts: ['x: y']"]),
        ("run.seed", 2, ["-  seed: 1", "+  seed: 2"]),
        ("run.name", "no: really", ["+  name: 'no: really'"]),
        ("optim.learning_rate", "3e-4", ["+optim:", "+  learning_rate: 0.0003"]),
        ("run.save_steps", 10, ["+  save_steps: 10"]),
    ],
)
def test_an_edit_touches_only_its_lines(path: str, value: Any, changed: list[str]) -> None:
    assert edited(path, value) == changed


def test_windows_line_ends_stay() -> None:
    draft = Draft(TEXT.replace("\n", "\r\n"))
    draft.set("run.seed", 2)
    draft.set("optim.learning_rate", 1e-3)
    assert draft.text().count("\n") == draft.text().count("\r\n")
    assert "  seed: 2\r\n" in draft.text()


def test_unset_takes_the_line_and_leaves_the_comments() -> None:
    draft = Draft(TEXT)
    draft.unset("data.eval")
    draft.unset("data.train.0")
    draft.unset("run.seed")
    text = draft.text()
    assert parse(text).mapping == draft.mapping
    assert draft.value("data.train") == [{"path": "more.jsonl"}]
    for comment in ("# My config", "# how it learns", "# held out", "# the end", "# the small one"):
        assert comment in text


def test_a_section_left_empty_goes_too() -> None:
    draft = Draft("model:\n  name: x\nrun:\n  seed: 3\n")
    draft.unset("run.seed")
    assert draft.text() == "model:\n  name: x\n"


def test_a_script_may_give_paths_and_numbers_of_numpy() -> None:
    draft = Draft.new("sft-lora")
    draft.set("optim.learning_rate", np.float64(1e-4))
    draft.set("optim.max_steps", np.int64(20))
    draft.set("optim.tf32", np.bool_(True))
    draft.set("adapter.target_modules", np.array(["q_proj", "v_proj"]))
    draft.set("data.train", [{"path": Path("rows.jsonl")}, DataSource(path="more.jsonl", weight=np.float64(2))])
    mapping = parse(draft.text()).mapping
    assert mapping["optim"]["learning_rate"] == 1e-4
    assert (mapping["optim"]["max_steps"], mapping["optim"]["tf32"]) == (20, True)
    assert mapping["adapter"]["target_modules"] == ["q_proj", "v_proj"]
    assert mapping["data"]["train"] == [{"path": "rows.jsonl"}, {"path": "more.jsonl", "weight": 2.0}]
    before = draft.text()
    with pytest.raises(UsageError, match=r"run\.seed: must be text, a number, .* got a value of type object\."):
        draft.set("run.seed", object())
    assert draft.text() == before


def test_a_fix_is_one_change_and_one_undo() -> None:
    draft = Draft("learning_rate: 1e-3\nmodel:\n  name: builtin/tiny\ndata:\n  train:\n    - path: builtin/dates\n")
    before = draft.text()
    fix = next(finding.fix for finding in draft.findings if finding.fix)
    draft.apply(fix)
    assert draft.findings == ()
    assert draft.config.optim.learning_rate == 1e-3
    assert draft.undo()
    assert draft.text() == before
    assert not draft.history.can_undo


def test_a_key_under_its_right_name_keeps_its_line_and_its_comments() -> None:
    text = (
        "# mine\r\nmodel: {name: builtin/tiny, dtpye: float32}   # small\r\ndata:\r\n  train:\r\n    - path: builtin/dates   # rows\r\n"
        "      colums: {prompt: q}   # theirs\r\n  # the longest row\r\n  max_lenght: 128   # tokens\r\n  val_set_size: 0.1\r\n"
    )
    draft = Draft(text)
    draft.set("data.val_set_size", 0.2)
    assert len(mend(draft)) == 3
    right = (
        text.replace("dtpye", "dtype").replace("colums", "columns").replace("lenght", "length").replace("0.1", "0.2")
    )
    assert draft.text() == right
    assert parse(right).mapping == draft.mapping
    while draft.undo():
        pass
    assert draft.text() == text


def test_a_fix_removes_several_entries_of_one_list() -> None:
    draft = Draft("run:\n  prompts: [a, b, c, d]\n")
    draft.apply(Fix("take out", unset=("run.prompts.1", "run.prompts.3")))
    assert draft.value("run.prompts") == ["a", "c"]


def test_replace_text_keeps_history_and_refuses_nonsense() -> None:
    draft = Draft(TEXT)
    draft.set("run.seed", 5)
    draft.replace_text("model:\n  name: y # new\n")
    assert draft.text() == "model:\n  name: y # new\n"
    with pytest.raises(ConfigUnreadable):
        draft.replace_text("a: [")
    assert draft.text() == "model:\n  name: y # new\n"
    draft.set("model.name", "z")
    assert draft.text() == "model:\n  name: z # new\n"
    draft.undo()
    draft.undo()
    assert draft.value("run.seed") == 5
    draft.undo()
    assert draft.text() == TEXT


def test_version_grows_with_content_and_facts_alone() -> None:
    draft = Draft(TEXT)
    versions = [draft.version]
    draft.set("run.seed", 1)
    versions.append(draft.version)
    draft.set("run.seed", 2)
    versions.append(draft.version)
    draft.learn(Facts(machine=parse_machine("H100")))
    versions.append(draft.version)
    draft.learn(Facts(machine=parse_machine("H100")))
    versions.append(draft.version)
    draft.undo()
    versions.append(draft.version)
    assert versions == [0, 0, 1, 2, 2, 3]


def test_learn_brings_findings_without_touching_the_file() -> None:
    draft = Draft.new("demo")
    text = draft.text()
    draft.learn(Facts(machine=parse_machine("T4")))
    assert draft.findings == ()
    draft.set("model.dtype", "bfloat16")
    assert any(finding.rule == "bfloat16-needs-a-card-that-has-it" for finding in draft.findings)
    draft.undo()
    assert draft.text() == text


def test_diff_names_what_differs_from_the_recipe() -> None:
    draft = Draft.new("sft-lora")
    assert draft.diff() == []
    draft.set("adapter.r", 8)
    draft.set("optim.lr_scheduler_type", "linear")
    draft.unset("optim.warmup_steps")
    assert draft.diff() == [
        ("adapter.r", 16, 8),
        ("optim.lr_scheduler_type", "cosine", "linear"),
        ("optim.warmup_steps", 0.03, 0.0),
    ]
    assert ("data.train", [], [{"path": "builtin/dates"}]) in Draft("data:\n  train: builtin/dates\n").diff()


def test_save_writes_whole_keeps_mode_and_knows_when_dirty(tmp_path: Path) -> None:
    place = tmp_path / "my.yaml"
    draft = Draft.new("demo")
    with pytest.raises(UsageError):
        draft.save()
    draft.save(place)
    assert not draft.dirty
    place.chmod(0o640)
    draft.set("run.seed", 7)
    assert draft.dirty
    draft.undo()
    assert not draft.dirty
    draft.redo()
    draft.save()
    assert "seed: 7" in place.read_text()
    assert stat.S_IMODE(place.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["my.yaml"]
    again = Draft.open(place)
    assert again.text() == draft.text()
    assert not again.dirty


def test_what_another_wrote_into_the_file_is_not_lost(tmp_path: Path) -> None:
    place = tmp_path / "my.yaml"
    place.write_text("version: 1\nrun: {seed: 1}\n")
    draft = Draft.open(place)
    draft.set("run.seed", 2)
    draft.save()
    place.write_text("version: 1\nrun: {seed: 3}\n")
    with pytest.raises(FileChanged, match=r"was changed by someone else since it was opened here"):
        draft.save(place)
    assert "seed: 3" in place.read_text()
    draft.save(place, replace=True)
    assert "seed: 2" in place.read_text()
    place.unlink()
    draft.save()
    assert "seed: 2" in place.read_text()


def test_a_name_that_another_file_has_is_taken_only_to_replace_it(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.yaml", tmp_path / "other.yaml"
    mine.write_text("version: 1\n")
    other.write_text("version: 1\nrun: {seed: 3}\n")
    draft = Draft.open(mine)
    draft.set("run.seed", 2)
    with pytest.raises(FileChanged, match=r"other\.yaml: is there already"):
        save_as(draft, other)
    mine.write_text("version: 1\nrun: {seed: 4}\n")
    (tmp_path / "link.yaml").symlink_to(mine)
    with pytest.raises(FileChanged, match="was changed by someone else"):
        save_as(draft, tmp_path / "link.yaml")
    assert "seed: 4" in mine.read_text()
    assert save_as(draft, other, replace=True) == other
    assert "seed: 2" in other.read_text()


def test_save_follows_a_link_to_the_real_file(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    real.write_text("version: 1\n")
    link.symlink_to(real)
    draft = Draft.open(link)
    draft.set("run.seed", 3)
    draft.save()
    assert link.is_symlink()
    assert "seed: 3" in real.read_text()


def test_a_failed_save_leaves_the_old_file_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "my.yaml"
    draft = Draft.new("demo")
    draft.save(place)
    before = place.read_bytes()
    draft.set("run.seed", 9)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WorkbenchError, match="No space left"):
        draft.save()
    assert place.read_bytes() == before
    assert os.listdir(tmp_path) == ["my.yaml"]
    assert draft.dirty
    with pytest.raises(WorkbenchError, match="cannot be written"):
        draft.save(tmp_path / "missing" / "x.yaml")


def test_anchors_and_odd_layouts_fall_back_and_still_say_the_same() -> None:
    text = "# kept\nmodel: &m\n  name: a\n  chat_template_kwargs: {a: 1}\nrun:\n  prompts:\n  - |\n    long\n    text\n  - b\n"
    draft = Draft(text)
    draft.set("run.prompts.0", "short")
    draft.set("model.chat_template_kwargs", {"b": [1, {"c": 2}]})
    draft.set("run.prompts.2", "third")
    assert parse(draft.text()).mapping == draft.mapping
    assert "# kept" in draft.text()


SETTABLE = [spec.path for spec in fields if spec.control != "sources"] + [
    "data.train.0.path",
    "data.eval.0.format",
    "x.y",
    "zz",
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**6),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.text(
        alphabet=st.characters(
            codec="utf-8", exclude_characters="\r\x85\u2028\u2029\ufeff", exclude_categories=("Cs", "Cc")
        ),
        max_size=12,
    ),
)
PLAIN = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.sampled_from(["a", "b c", "d:e"]), SCALARS, max_size=2)
)


class Editing(RuleBasedStateMachine):
    """Any sequence of edits: what the text says is what the draft says, and undo goes all the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.draft = Draft(TEXT)
        self.history: list[dict[str, Any]] = [self.draft.mapping]
        self.at = 0

    def changed(self) -> None:
        if self.draft.mapping != self.history[self.at] or (
            self.draft.history.can_undo and not self.draft.history.can_redo
        ):
            self.history[self.at + 1 :] = [self.draft.mapping]
            self.at += 1

    @rule(path=st.sampled_from(SETTABLE), value=PLAIN)
    def set(self, path: str, value: Any) -> None:
        before = self.draft.version
        self.draft.set(path, value)
        if self.draft.version > before:
            self.changed()

    @rule(path=st.sampled_from([*SETTABLE, "data.train.1", "data.train", "run", "model", "adapter"]))
    def unset(self, path: str) -> None:
        before = self.draft.version
        self.draft.unset(path)
        if self.draft.version > before:
            self.changed()

    @rule()
    def undo(self) -> None:
        assert self.draft.undo() is (self.at > 0)
        self.at = max(0, self.at - 1)

    @rule()
    def redo(self) -> None:
        assert self.draft.redo() is (self.at + 1 < len(self.history))
        self.at = min(len(self.history) - 1, self.at + 1)

    @invariant()
    def the_mapping_is_the_one_of_this_point_in_history(self) -> None:
        assert self.draft.mapping == self.history[self.at]

    @invariant()
    def it_always_reads(self) -> None:
        assert self.draft.config.version == 1

    def teardown(self) -> None:
        text = self.draft.text()
        assert parse(text).mapping == self.draft.mapping
        while self.draft.undo():
            pass
        assert self.draft.text() == TEXT


TestEditing = Editing.TestCase
TestEditing.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)

NAMES = st.sampled_from(["a", "b", "model", "x y", "k"])
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(NAMES, TREES, max_size=4)


@settings(max_examples=120, deadline=None)
@given(DOCUMENTS, DOCUMENTS)
def test_any_mapping_can_be_rewritten_into_any_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    from engine.config.files import as_yaml

    text = "# top\n" + as_yaml(before) if before else "# top\n"
    changed = rewrite(text, before, after)
    assert parse(changed).mapping == after


@pytest.mark.parametrize("name", [each.name for each in recipes()])
def test_recipes_keep_every_comment_through_edits(name: str) -> None:
    draft = Draft.new(name)
    comments = [line.partition("#")[2] for line in draft.text().splitlines() if "#" in line]
    draft.set("run.seed", 7)
    draft.set("optim.per_device_train_batch_size", 3)
    draft.set("optim.learning_rate", 1e-3)
    text = draft.text()
    for comment in comments:
        assert comment in text


def test_an_edit_is_judged_within_3_ms() -> None:
    """Reading, all rules, effective values and estimate; `benchmarks/read_edit.py` takes the percentiles in quiet."""
    import time

    from engine.facts.model_shape import model_facts
    from engine.planning.auto import effective
    from engine.planning.estimate import estimate

    draft = Draft.new("dpo")
    facts = Facts(machine=parse_machine("RTX4090"), model=model_facts("Qwen/Qwen3-0.6B"), packages={})
    draft.learn(facts)
    times, known = [], []
    for number in range(300):
        started = time.process_time()
        draft.set("method.beta", 0.01 * (number % 100 + 1))
        config = draft.config
        effective(config, facts)
        estimate(config, facts)
        ended = time.process_time()
        sum(each * each for each in range(20_000))  # 0.9 ms where nothing else runs; a busy machine halves a core
        times.append(ended - started)
        known.append(time.process_time() - ended)
    assert sorted(times)[150] < 0.003 * max(1.0, sorted(known)[150] / 0.0009)


def test_a_fix_leaves_rows_in_brackets_as_they_were_written() -> None:
    text = "version: 1\ndata: {train: [{path: a.jsonl}]}  # mine\noptim: {learning_rte: 0.1}\n"
    draft = Draft(text)
    (fix,) = (finding.fix for finding in draft.findings if finding.path == "optim.learning_rte")
    assert fix is not None
    draft.apply(fix)
    assert draft.text() == text.replace("rte", "rate")
    draft.set("data.train", [{"path": "b.jsonl"}])
    assert draft.text() == text.replace("rte", "rate").replace("a.jsonl", "b.jsonl")
