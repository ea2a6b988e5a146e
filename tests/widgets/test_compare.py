"""Runs laid beside each other in a notebook: the same facts as the command, told once, safe to show, also while they go."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from engine.errors import UsageError
from engine.session.draft import Draft
from widgets import Compare, Workbench
from widgets.reader import Reader
from workbench.cli.compare import command

HOSTILE = "\x1b]0;owned\x07\u202e<b>x</b>"
CONFIG = "version: 1\nmodel:\n  name: builtin/tiny\noptim:\n  learning_rate: {rate}\nrun:\n  name: {name}\n"


def of(written: Callable[..., Any], name: str, rate: float, steps: int) -> Any:
    run = written(name=name)
    run.folder.config.write_text(CONFIG.format(rate=rate, name=name))
    run.steps(steps)
    run.pen.write("sample", step=steps, index=0, prompt="2 + 2?", completion=f"{rate:g} {HOSTILE}")
    return run


@pytest.fixture
def runs(written: Callable[..., Any]) -> list[Any]:
    return [of(written, "slow", 1e-4, 20), of(written, "quick", 3e-4, 9)]


@pytest.fixture
def beside(runs: list[Any]) -> Iterator[Compare]:
    made = Compare(*(run.folder for run in runs))
    yield made
    made.close()


def ask(face: Any, do: str, **params: Any) -> dict[str, Any]:
    return face.answer({"id": "1", "do": do, **params}).data


def test_what_differs_is_what_the_command_tells(beside: Compare, runs: list[Any]) -> None:
    folders = [str(run.folder.path) for run in runs]
    printed = CliRunner().invoke(command, [*folders, "--json"], standalone_mode=False, catch_exceptions=False).output
    assert beside.found == json.loads(printed)
    assert beside.found["settings"] == [{"path": "optim.learning_rate", "values": [1e-4, 3e-4]}]
    names = ask(beside, "compared")["runs"]
    told = ask(beside, "compare", runs=names)
    assert names == ["slow-0001", "quick-0001"]
    assert told["settings"] == [{"path": "optim.learning_rate", "values": ["0.0001", "0.0003"]}]
    loss = told["curves"][0]
    assert (loss["name"], loss["ends"][1]) == ("loss", beside.found["curves"]["loss"][1])
    assert [answer[0] for answer in told["answers"][0]["answers"]] == [20, 9]
    assert "\x1b" not in str(told) + repr(beside)
    assert "\u202e" not in str(told) + repr(beside)
    assert "optim.learning_rate: 0.0001, 0.0003" in repr(beside)
    assert "workbench compare slow-0001 quick-0001" in repr(beside)


def test_it_travels_anew_only_when_a_run_has_gone_on_or_a_config_has_changed(beside: Compare, runs: list[Any]) -> None:
    names = ask(beside, "compared")["runs"]
    mark = ask(beside, "compare", runs=names)["mark"]
    assert set(ask(beside, "compare", runs=names, mark=mark)) == {"id", "ok", "mark"}
    runs[1].steps(1, kl=0.5)
    more = ask(beside, "compare", runs=names, mark=mark)
    assert more["curves"][0]["ends"][1]["last"] == beside.found["curves"]["loss"][1]["last"]
    assert "kl" not in [curve["name"] for curve in more["curves"]]  # that one run alone has
    runs[1].folder.config.write_text(CONFIG.format(rate=1e-4, name="quick"))
    assert ask(beside, "compare", runs=names, mark=more["mark"])["settings"] == []


def test_the_middle_of_a_long_run_counts_too(beside: Compare, runs: list[Any]) -> None:
    line = '{{"v":1,"rank":0,"segment":0,"seq":{0},"t":1.0,"kind":"metrics","step":{0},"loss":{1}}}\n'
    with open(runs[0].folder.events, "a") as file:
        file.writelines(line.format(step, 9.5 if step == 15_000 else 1.0) for step in range(100, 30_000))
    later = Compare(*(run.folder for run in runs))
    beside.close()
    assert later.found["curves"]["loss"][0]["highest"] == 9.5
    later.close()


def test_a_config_that_cannot_be_read_is_told_and_the_curves_stand(beside: Compare, runs: list[Any]) -> None:
    runs[0].folder.config.write_text("a: [\n")
    told = ask(beside, "compare", runs=ask(beside, "compared")["runs"])
    assert "config.yaml" in told["problem"]
    assert told["settings"] == []
    assert told["curves"][0]["name"] == "loss"
    assert "config.yaml" in repr(beside)


@pytest.mark.parametrize("names", [["slow-0001"], ["slow-0001"] * 2, ["slow-0001"] * 9, ["slow-0001", "../quick-0001"]])
def test_a_message_compares_two_to_eight_different_runs_of_the_folder_alone(beside: Compare, names: list[str]) -> None:
    answer = ask(beside, "compare", runs=names)
    assert answer["ok"] is False
    assert answer["error"]


def test_runs_of_one_name_are_told_apart_and_the_same_one_twice_is_refused(runs: list[Any], tmp_path: Path) -> None:
    from tests.widgets.conftest import Written

    other = Written(tmp_path / "elsewhere", name="slow")
    other.steps(3)
    folders = [runs[0].folder, other.folder]
    beside = Compare(*folders)
    names = ask(beside, "compared")["runs"]
    assert names == [str(folder.path.resolve()) for folder in folders]
    assert [ask(beside, "watch", run=name)["parts"]["now"][0] for name in names] == [20, 3]
    beside.close()
    with pytest.raises(UsageError, match="twice"):
        Compare(runs[0].folder, runs[0].folder.path)
    with pytest.raises(UsageError, match="2 to 8"):
        Compare("slow-0001")


def test_a_workbench_compares_runs_of_its_folder_and_readers_end_with_their_views(runs: list[Any]) -> None:
    root = runs[0].folder.path.parent
    face = Workbench(Draft.new("demo"), runs=root, fresh=True)
    told = ask(face, "compare", runs=["quick-0001", "slow-0001"])
    assert told["settings"][0]["values"] == ["0.0003", "0.0001"]
    beside = Compare("quick-0001", "slow-0001", runs=root)
    assert len(beside.found["runs"]) == 2
    face.close()
    assert {run.folder.path for run in runs} <= set(Reader._open)
    beside.close()
    assert not {run.folder.path for run in runs} & set(Reader._open)
