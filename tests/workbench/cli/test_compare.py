"""`workbench compare`: what differs between runs, as a table and for machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from engine.errors import RunNotFound, UsageError
from engine.run.store import create
from workbench.cli.compare import command, lines

BEGIN = {"v": 1, "rank": 0, "segment": 0, "t": 1.0}


def run_of(root: Path, name: str, rate: float, losses: list[float], answer: str) -> None:
    text = f"version: 1\nmodel: {{name: builtin/tiny}}\noptim: {{learning_rate: {rate}}}\nrun: {{name: {name}}}\n"
    run = create(root, text, {"name": name, "method": "sft"})
    events: list[dict[str, Any]] = [{"kind": "started", "method": "sft", "model": "m", "max_steps": len(losses)}]
    events += [{"kind": "metrics", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    events.append({"kind": "sample", "step": len(losses), "index": 0, "prompt": "2 + 2?", "completion": answer})
    run.events.write_text("".join(json.dumps(BEGIN | {"seq": seq} | event) + "\n" for seq, event in enumerate(events)))
    run.update_json(state="finished")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run_of(tmp_path / "runs", "slow", 1e-4, [3.0, 2.5, 2.75], "five\x1b[31m")
    run_of(tmp_path / "runs", "quick", 3e-4, [3.0, 0.5], "4")
    return tmp_path / "runs"


def said(*words: str) -> str:
    return CliRunner().invoke(command, list(words), standalone_mode=False, catch_exceptions=False).output


def test_curves_settings_and_answers_stand_beside_each_other(root: Path) -> None:
    text = said("slow-0001", "quick-0001", "--runs", str(root))
    told = [" ".join(line.split()) for line in text.splitlines()]
    assert "slow-0001 quick-0001" in told
    assert "loss 2.75 (2.50 to 3) 0.500 (0.500 to 3)" in told
    assert "optim.learning_rate 0.0001 0.0003" in told
    assert not any(line.startswith(("run.name", "model.name")) for line in told)
    assert "quick-0001 step 2: 4" in told
    assert "\x1b" not in text


def test_json_has_every_value(root: Path) -> None:
    found = json.loads(said("slow-0001", "quick-0001", "--runs", str(root), "--json"))
    assert [run["id"] for run in found["runs"]] == ["slow-0001", "quick-0001"]
    assert found["curves"]["loss"][1] == {"last": 0.5, "lowest": 0.5, "highest": 3.0}
    assert found["settings"] == [{"path": "optim.learning_rate", "values": [1e-4, 3e-4]}]
    assert found["answers"][0]["answers"][1] == {"step": 2, "text": "4"}


@pytest.mark.parametrize("names", [(), ("slow-0001",), ("slow-0001", "slow-0001"), ("slow-0001", "")])
def test_too_few_too_many_or_twice_the_same_is_refused(root: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="must be 2 to 8 different runs"):
        said(*names, "--runs", str(root))


def test_one_run_by_its_name_and_by_its_folder_is_one_run(root: Path) -> None:
    with pytest.raises(UsageError, match="must be 2 to 8 different runs"):
        said("slow-0001", str(root / "slow-0001"), "--runs", str(root))


def test_more_runs_than_a_chart_can_tell_apart_are_refused(root: Path) -> None:
    more = ("third", "fourth", "fifth", "sixth", "seventh", "eighth")
    for name in more:
        run_of(root, name, 1e-4, [3.0], "4")
    eight = ["slow-0001", "quick-0001", *(f"{name}-0001" for name in more)]
    told = said(*eight, "--runs", str(root))
    assert all(name in told for name in eight)
    run_of(root, "ninth", 1e-4, [3.0], "4")
    with pytest.raises(UsageError, match="must be 2 to 8 different runs"):
        said(*eight, "ninth-0001", "--runs", str(root))


def test_runs_of_other_methods_are_said_to_be(root: Path) -> None:
    assert "method" not in said("slow-0001", "quick-0001", "--runs", str(root))
    run = create(root, "version: 1\nmethod: {kind: dpo}\n", {"name": "pairs", "method": "dpo"})
    run.events.write_text(json.dumps(BEGIN | {"seq": 0, "kind": "started", "method": "dpo", "model": "m"}) + "\n")
    text = said("slow-0001", "pairs-0001", "--runs", str(root))
    assert "method sft dpo" in [" ".join(line.split()) for line in text.splitlines()]


def test_too_many_runs_are_told_before_one_that_is_not_there(root: Path) -> None:
    with pytest.raises(UsageError, match="must be 2 to 8 different runs"):
        said("slow-0001", "absent-0001", *"bcdefgh", "--runs", str(root))
    with pytest.raises(UsageError, match="must be 2 to 8 different runs"):
        said("absent-0001", "--runs", str(root))


def test_two_runs_of_one_name_are_told_apart_by_their_folders(root: Path) -> None:
    run_of(root.parent / "other", "slow", 3e-4, [3.0, 1.0], "4")
    paths = [str(root / "slow-0001"), str(root.parent / "other" / "slow-0001")]
    text = said(*paths, "--runs", str(root))
    assert all(text.count(path) >= 2 for path in paths)  # over the table, and before each answer


def test_bytes_shares_and_times_have_their_units(root: Path) -> None:
    for name, scale in (("small", 1), ("big", 2)):
        run = create(root, "version: 1\n", {"name": name, "method": "sft"})
        figures = {"memory_peak": scale * 2.0**30, "mean_token_accuracy": 0.25 * scale, "step_seconds": 0.2 * scale}
        events = [{"kind": "started", "method": "sft", "model": "m"}, {"kind": "metrics", "step": 1} | figures]
        run.events.write_text("".join(json.dumps(BEGIN | {"seq": at} | one) + "\n" for at, one in enumerate(events)))
    told = " ".join(said("small-0001", "big-0001", "--runs", str(root)).split())
    assert "peak memory 1.0 GiB (1.0 GiB to 1.0 GiB) 2.0 GiB" in told
    assert "token accuracy 25 % (25 % to 25 %) 50 %" in told
    assert "one step 200 ms (200 ms to 200 ms) 400 ms" in told


def test_the_middle_of_a_long_run_counts_too(root: Path) -> None:
    for name in ("long", "longer"):
        losses = [1.0] * 30_000
        losses[15_000] = 9.5
        run_of(root, name, 1e-4, losses, "4")
    found = json.loads(said("long-0001", "longer-0001", "--runs", str(root), "--json"))
    assert [each["highest"] for each in found["curves"]["loss"]] == [9.5, 9.5]


FOUR = ["dates-0001", "a-rather-long-name-0001", "pairs-0001", "short-0001"]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_four_runs_in_a_narrow_terminal_break_no_cell(width: int) -> None:
    models = ["builtin/tiny", "builtin/tiny", "/runs/dates-0001/checkpoints/c-60", "builtin/tiny"]
    found = {
        "runs": [{"id": id, "state": "finished", "method": "sft", "step": 60, "max_steps": 60} for id in FOUR],
        "curves": {"memory_peak": [{"last": 2.0**30, "lowest": 1.0, "highest": 2.0**31}] * 4},
        "settings": [
            {"path": "model.name", "values": models},
            {"path": "optim.weight_decay", "values": [0.0, 0.5, 1, 2]},
        ],
        "answers": [],
        "identical": [],
    }
    told = lines(found, width)
    assert all(len(line) <= width for line in told if "✓" not in line)
    words = {word for line in told for word in line.split()}
    assert {*FOUR, *models} <= words
    assert [
        line for line in told if line.split() == ["0", "0.5", "1", "2"] or line.split()[1:] == ["0", "0.5", "1", "2"]
    ]
    assert any(line.split() == ["1", "2", "3", "4"] for line in told)  # what the columns are of


def test_a_wide_terminal_has_a_column_a_run(root: Path) -> None:
    told = said("slow-0001", "quick-0001", "--runs", str(root)).splitlines()
    assert told[0].split() == ["slow-0001", "quick-0001"]
    starts = {line.index("0.0003") for line in told if "0.0003" in line}
    assert starts == {told[0].index("quick-0001")}


def test_a_run_that_is_not_there_is_named(root: Path) -> None:
    with pytest.raises(RunNotFound):
        said("slow-0001", "absent-0001", "--runs", str(root))
