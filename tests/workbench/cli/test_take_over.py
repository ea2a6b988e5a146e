"""`workbench import`, `export-config` and `check --fix`: the ledger as it is read, and files that are never written over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from engine.config.files import load
from engine.errors import UsageError, WorkbenchError
from tests import warm
from workbench.cli import check, estimate, export_config, preview, submit, sweep, take_over, train

FOREIGN = """\
base_model: Qwen/Qwen3-8B
adapter: qlora
load_in_4bit: true
lora_r: 8
datasets:
  - path: rows.jsonl
    type: chat_template
sequence_len: 1024
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 2e-4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
warmup_ratio: 0.1
relora: true
wandb_project:
"""
ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


def run(command: click.Command, *arguments: Any) -> Result:
    return CliRunner().invoke(command, [str(each) for each in arguments], standalone_mode=False)


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(ROW)
    place = tmp_path / "theirs.yml"
    place.write_text(FOREIGN)
    return place


def test_a_config_is_taken_over_into_a_new_file_and_the_ledger_is_told(foreign: Path, tmp_path: Path) -> None:
    new = tmp_path / "my.yaml"
    done = run(take_over.command, foreign, "--from", "axolotl", "-o", new)
    assert done.return_value == 0, done.exception
    assert done.stdout == ""
    assert "x relora: true\n    Not here yet: BAdam, APOLLO, LISA, ReLoRA" in done.stderr
    assert "= sequence_len: 1024 -> data.max_length: 1024" in done.stderr
    assert "excess_length_strategy: drop -> data.excess_length: drop" in done.stderr
    assert "1 not supported" in done.stderr
    assert "workbench check" in done.stderr
    assert "# Not supported, and not in this config:\n#   relora: true." in new.read_text()
    assert load(new).mapping["optim"]["optim"] == "adamw_8bit"
    assert run(check.command, new).return_value == 0
    assert foreign.read_text() == FOREIGN


def test_without_a_file_the_config_is_printed_and_nothing_is_written(foreign: Path, tmp_path: Path) -> None:
    done = run(take_over.command, foreign)
    assert "max_length: 1024" in done.stdout
    assert "Axolotl: " in done.stderr
    assert list(tmp_path.glob("*.y*ml")) == [foreign]


def test_no_file_is_ever_written_over(foreign: Path, tmp_path: Path) -> None:
    for command, more in ((take_over.command, ()), (export_config.command, ("--to", "trl"))):
        done = run(command, foreign, *more, "-o", foreign)
        assert isinstance(done.exception, UsageError)
        assert "exists and is kept" in done.exception.message
        assert isinstance(run(command, foreign, *more, "-o", tmp_path).exception, UsageError)
    assert foreign.read_text() == FOREIGN


def test_the_ledger_is_json_with_a_row_for_every_key(foreign: Path) -> None:
    done = run(take_over.command, foreign, "--json")
    told = json.loads(done.stdout)
    assert set(told) == {"tool", "path", "text", "counts", "rows"}
    assert (told["tool"], told["path"]) == ("axolotl", None)
    assert sum(row["origin"] == "file" for row in told["rows"]) == len(load(foreign).mapping) + 1
    assert sum(told["counts"][name] for name in ("mapped", "changed", "needless", "unsupported")) == 17
    row = next(row for row in told["rows"] if row["key"] == "optimizer")
    assert row == {
        "key": "optimizer", "value": "adamw_bnb_8bit", "outcome": "mapped", "settings": {"optim.optim": "adamw_8bit"},
        "reason": "", "origin": "file",
    }  # fmt: skip


def test_wrong_calls_are_one_sentence(foreign: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours.yaml"
    ours.write_text("version: 1\nmodel:\n  name: builtin/tiny\n")
    for arguments, words in (
        ([foreign, "--from", "axolotel"], "must be axolotl, llamafactory or trl"),
        ([ours], "the workbench's own"),
        ([foreign, "--data-dir", tmp_path / "none"], "must be a folder with dataset_info.json; got nothing there"),
        ([foreign, "--from", "trl", "--method", "dpoo"], "must be a method"),
    ):
        problem = run(take_over.command, *arguments).exception
        assert isinstance(problem, UsageError)
        assert words in problem.message


def test_a_config_goes_there_and_names_what_it_cannot_take_along(foreign: Path, tmp_path: Path) -> None:
    ours, there = tmp_path / "my.yaml", tmp_path / "back.yml"
    run(take_over.command, foreign, "-o", ours)
    done = run(export_config.command, ours, "--to", "axolotl", "-o", there)
    assert done.return_value == 0, done.exception
    back = load(there).mapping
    assert (back["adapter"], back["lora_r"], back["sequence_len"]) == ("qlora", 8, 1024)
    assert back["datasets"] == [{"path": "rows.jsonl", "ds_type": "json", "type": "chat_template"}]
    ours.write_text(ours.read_text().replace("optim: adamw_8bit", "optim: dion"))
    refused = run(export_config.command, ours, "--to", "axolotl", "-o", tmp_path / "no.yml")
    assert isinstance(refused.exception, WorkbenchError)
    assert "optim.optim cannot be said in a config of Axolotl" in refused.exception.message
    assert not (tmp_path / "no.yml").exists()
    assert isinstance(run(export_config.command, ours).exception, UsageError)


def test_the_format_of_local_rows_need_not_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(ROW * 3)
    (tmp_path / "my.yaml").write_text("model: {name: a/b}\ndata: {train: [{path: rows.jsonl}]}\n")
    done = run(export_config.command, "my.yaml", "--to", "trl")
    assert done.return_value == 0, done.exception
    assert "assistant_only_loss: true" in done.stdout


def test_check_names_the_way_for_a_config_of_another_tool_and_changes_none(foreign: Path) -> None:
    assert "It is a config of Axolotl. `workbench import" in run(check.command, foreign).output
    problem = run(check.command, foreign, "--fix").exception
    assert isinstance(problem, UsageError)
    assert "workbench import" in problem.hint
    assert foreign.read_text() == FOREIGN


BROKEN = """\
model:
  name: builtin/tiny  # the small one
  dtype: float32
sequence_len: 64
data:
  train: builtin/dates
lr: 1e-4
optim:
  max_stepz: 9
adapter:
  kind: qlora
"""


def test_what_uses_a_config_names_the_way_instead_of_an_error_for_each_key(foreign: Path) -> None:
    way = "`workbench import ./theirs.yml --from axolotl -o my.yaml` takes it over"
    for command, more in (
        (train.command, ["--detach"]),
        (preview.command, []),
        (estimate.command, []),
        (sweep.command, ["run.seed=1,2"]),
        (submit.command, ["--dry-run"]),
    ):
        done = run(command, foreign, *more)
        assert isinstance(done.exception, UsageError), done
        assert "theirs.yml: must be a config of the workbench; it is one of Axolotl. " in done.exception.full_message
        assert way in done.exception.full_message
        assert "error  " not in done.output
    assert not Path("runs").exists()


def test_a_file_read_as_another_tools_is_told_of_its_own(foreign: Path) -> None:
    done = run(take_over.command, foreign, "--from", "trl", "--method", "sft")
    assert "theirs.yml looks like a config of Axolotl: with --from axolotl it is read as one." in done.stderr
    assert "looks like" not in run(take_over.command, foreign, "--from", "axolotl").stderr


def test_check_fix_applies_what_keeps_the_meaning_and_shows_the_diff(tmp_path: Path) -> None:
    place = tmp_path / "my.yaml"
    place.write_text(BROKEN)
    done = run(check.command, place, "--fix")
    mapping = load(place).mapping
    assert mapping["data"]["max_length"] == 64
    assert mapping["optim"]["learning_rate"] == 1e-4
    assert (mapping["adapter"]["kind"], mapping["model"]["quantization"]) == ("lora", "nf4")
    assert "# the small one" in place.read_text()
    assert "-sequence_len: 64" in done.output
    assert "+  max_length: 64" in done.output
    assert "3 fixes applied" in done.output
    assert mapping["optim"]["max_stepz"] == 9, "likeness is no meaning"
    assert "optim.max_stepz" in done.output
    assert done.return_value == 1
    kept = place.read_text()
    again = json.loads(run(check.command, place, "--fix", "--json").output)
    assert (again["fixed"], again["diff"]) == ([], "")
    assert place.read_text() == kept


def test_check_fix_leaves_choices_to_the_person(tmp_path: Path) -> None:
    place = tmp_path / "my.yaml"
    text = "model: {name: builtin/tiny, dtype: float32}\nmethod: {kind: dpo}\nadapter: {kind: lora, lora_dropout: 0.1}\ndata: {train: [{path: rows.jsonl}]}\n"
    place.write_text(text)
    done = run(check.command, place, "--fix")
    assert "no fix applied: those below change what the file says" in done.output
    assert "fix: leave dropout out" in done.output
    assert place.read_text() == text
    assert isinstance(run(check.command, place, "optim.max_steps=3", "--fix").exception, UsageError)


def test_a_file_that_is_not_there_is_no_config_to_write_anew(tmp_path: Path) -> None:
    ended = warm.command("import", str(tmp_path / "qlora.yml"))
    assert ended.returncode == 2
    assert "must be a config of Axolotl, LLaMA-Factory or TRL; got nothing there" in ended.stderr
    assert "workbench new" not in ended.stderr
