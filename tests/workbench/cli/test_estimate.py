"""`workbench estimate`: the consequences before launch, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from engine.client import Inspector
from engine.errors import UsageError, WorkbenchError
from engine.figures import size
from engine.hardware import this_machine
from tests import warm
from tests.caches import own_cache
from workbench.cli.estimate import command


@pytest.fixture(autouse=True, scope="module")
def _one_inspector() -> Iterator[None]:
    with Inspector() as shared, warm.sharing(shared):
        yield


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments), standalone_mode=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    place = tmp_path / "my.yaml"
    place.write_text("model:\n  name: Qwen/Qwen3-0.6B\nadapter:\n  kind: lora\ndata:\n  train: builtin/dates\n")
    return place


def test_the_table_has_numbers_with_units(config: Path) -> None:
    output = run(str(config), "--for", "1xH100-80GB").output
    for words in ("effective batch", "8 rows", "trained parameters", "10,092,544", "of the card", "78.8 GiB", "3,000"):
        assert words in output


def test_the_table_says_for_which_rows_and_what_lies_beside_the_model(config: Path) -> None:
    config.write_text(config.read_text() + "  max_length: 512\n")
    card, cpu = run(str(config), "--for", "1xH100-80GB").output, run(str(config), "--for", "cpu").output
    assert "512 tokens" in card
    assert "driver and fragments" in card
    assert "driver" not in cpu
    assert "the process and fragments" in cpu


def test_json_holds_every_number(config: Path) -> None:
    found = json.loads(run(str(config), "--for", "1xH100-80GB", "--json").output)
    assert found["machine"] == "1xH100-80GB"
    assert found["steps"] == 3000
    assert found["memory_total"] == sum(found["memory"].values())


def test_what_is_not_known_says_so(config: Path) -> None:
    config.write_text(config.read_text().replace("Qwen/Qwen3-0.6B", "org/unknown"))
    output = run(str(config)).output
    assert "unknown until the model is here" in output


def test_errors_are_shown_beside_it(config: Path) -> None:
    config.write_text(config.read_text() + "sequence_len: 3\n")
    assert "sequence_len" in run(str(config)).stderr


def test_a_rehearsal_is_of_this_machine_alone(config: Path) -> None:
    problem = run(str(config), "--rehearse", "--for", "1xH100-80GB").exception
    assert isinstance(problem, UsageError)
    assert "not on 1xH100-80GB" in problem.message


def test_a_scratch_folder_of_no_use_is_named_where_a_step_is_rehearsed(config: Path, monkeypatch: Any) -> None:
    config.write_text("model:\n  name: builtin/tiny\ndata:\n  train: builtin/dates\n")
    monkeypatch.setenv("WORKBENCH_SCRATCH", "/nowhere/at/all")
    problem = run(str(config), "--rehearse").exception
    assert isinstance(problem, WorkbenchError)
    assert problem.message.startswith("/nowhere/at/all: a rehearsal cannot be written here: No such file")
    assert "WORKBENCH_SCRATCH" in problem.hint


def test_a_config_with_errors_is_not_rehearsed(config: Path) -> None:
    config.write_text(config.read_text() + "sequence_len: 3\n")
    found = run(str(config), "--rehearse")
    assert isinstance(found.exception, WorkbenchError)
    assert "nothing was measured" in found.exception.message
    assert "sequence_len" in found.stderr


def test_a_rehearsal_measures_shows_its_error_and_is_remembered(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    monkeypatch.setenv("WORKBENCH_SCRATCH", str(tmp_path))
    config.write_text("model:\n  name: builtin/tiny\nadapter:\n  kind: none\ndata:\n  train: few.jsonl\n")
    rows = [{"prompt": "a" * size, "completion": "b"} for size in (3, 90, 5)]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = json.loads(run(str(config), "--rehearse", "--json").output)
    found = told["rehearsal"]
    # On a CPU the process itself counts, with torch in it; on a card the tiny model alone.
    assert found["memory_peak"] > (1 if this_machine().gpus else 300) * 1024**2
    assert found["longest"] > 90
    assert found["error"] == round(found["estimated"] / found["memory_peak"] - 1, 4)
    assert found["seconds_per_step"] > 0
    assert not list(tmp_path.glob("rehearsal-*"))
    later = run(str(config)).output
    assert f"{found['longest']} tokens" in later
    assert size(found["memory_peak"]) in later
    config.write_text(config.read_text() + "optim:\n  per_device_train_batch_size: 2\n")
    assert "rehearsed" not in run(str(config)).output, "another batch size is another step"


def test_settings_beside_the_file_change_the_estimate(config: Path) -> None:
    found = json.loads(run(str(config), "optim.max_steps=7", "adapter.r=32", "--for", "cpu", "--json").output)
    assert (found["steps"], found["trainable_parameters"]) == (7, 2 * 10_092_544)
    assert (found["changes"]["steps"], found["changes"]["trainable_parameters"]) == (7 - 3000, 10_092_544)
    table = run(str(config), "optim.max_steps=7", "adapter.r=32", "--for", "cpu").output
    (steps,) = [line for line in table.splitlines() if line.startswith("optimizer steps")]
    assert steps.split() == ["optimizer", "steps", "7", "(−2,993)"]
    assert "(" not in run(str(config), "--for", "cpu").output, "nothing was edited"
    with pytest.raises(UsageError, match=r"section\.setting=value"):
        CliRunner().invoke(command, [str(config), "max_steps"], standalone_mode=False, catch_exceptions=False)


@pytest.mark.parametrize(
    ("held", "given", "steps"),
    [("num_train_epochs: 2", "max_steps=7", 7), ("max_steps: 9", "num_train_epochs=2", 6000)],
)
def test_a_length_beside_the_file_takes_the_place_of_the_files(config: Path, held: str, given: str, steps: int) -> None:
    config.write_text(config.read_text() + f"optim:\n  {held}\n")
    result = run(str(config), f"optim.{given}", "--for", "cpu", "--json")
    assert json.loads(result.output)["steps"] == steps
    assert "must be left out" not in run(str(config), f"optim.{given}", "--for", "cpu").output
    both = run(str(config), f"optim.{given}", f"optim.{held.replace(': ', '=')}", "--for", "cpu")
    assert "must be left out" in both.output, "both beside the file still contradict each other"


def test_pictures_and_what_is_left_out_of_an_epoch_are_counted_with_their_change(tmp_path: Path) -> None:
    place = tmp_path / "seeing.yaml"
    place.write_text("model:\n  name: builtin/tiny-vl\ndata:\n  train:\n    - path: builtin/shapes\n      rows: 64\n")
    found = json.loads(run(str(place), "--json").output)
    assert found["images"] == 64
    assert found["image_tokens"] % 64 == 0 < found["image_tokens"]
    fewer = json.loads(run(str(place), "data.train.0.rows=16", "--json").output)
    assert fewer["images"] == 16
    short = found["tokens_per_epoch"] // 64 - 2
    dropped = run(str(place), f"data.max_length={short}", "data.excess_length=drop").output
    assert "rows left out" in dropped
