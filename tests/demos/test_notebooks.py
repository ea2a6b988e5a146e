"""Every demo notebook runs from top to bottom in a folder of its own and shows what its words say."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest

from engine.run.store import RunFolder

DEMOS = Path(__file__).parents[2] / "demos"
NOTEBOOKS = sorted(DEMOS.glob("*.ipynb"))
STEPS = 4
"""The demo looks at its held-out rows ten times a run, or after every step of so short a one, and each look takes as long as
two steps."""
WIDGET = "application/vnd.jupyter.widget-view+json"


def play(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int = STEPS) -> list[list[dict]]:
    """The outputs of each code cell; its runs have so many steps."""
    if importlib.util.find_spec("ipykernel") is None:
        pytest.skip("ipykernel is not installed")
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("STEPS", str(steps))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    monkeypatch.setenv("IPYTHONDIR", str(folder / ".ipython"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    book = nbformat.read(DEMOS / name, as_version=4)
    NotebookClient(book, timeout=200, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell.outputs for cell in book.cells if cell.cell_type == "code"]


def text(outputs: list[list[dict]]) -> str:
    """All that is printed or shown as plain text."""
    shown = [output.get("text") or output.get("data", {}).get("text/plain", "") for cell in outputs for output in cell]
    return "\n".join(shown)


def learned(said: str) -> str:
    """What the preview underlines."""
    return "".join(re.findall(r"\x1b\[32m\x1b\[4m(.*?)\x1b\[0m", said, re.DOTALL))


def faces(outputs: list[list[dict]]) -> int:
    return sum(WIDGET in output.get("data", {}) for cell in outputs for output in cell)


def events(run: Path, kind: str) -> list[dict]:
    lines = RunFolder(run).events.read_text("utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_stored_without_outputs_and_name_a_kernel(path: Path) -> None:
    import nbformat

    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert book.metadata.kernelspec.name == "python3"
    assert [cell.source for cell in book.cells if cell.get("outputs") or cell.get("execution_count")] == []
    assert book.cells[0].cell_type == "markdown"
    assert book.cells[0].source.startswith("# ")


def test_workbench_goes_from_the_form_to_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = play("workbench.ipynb", tmp_path, monkeypatch)
    said = text(outputs)
    assert faces(outputs) == 2
    assert "error: optim.learning_rate" in said
    assert "'ready'" in said
    assert "'finished'" in said
    run = tmp_path / "runs" / "dates-0001"
    assert events(run, "finished")[0]["step"] == STEPS
    answers = [event["completion"] for event in events(run, "sample") if event["index"] == 0]
    assert len(answers) > 1
    assert all(answer in said for answer in answers)


def test_form_builds_a_config_that_the_terminal_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = play("form.ipynb", tmp_path, monkeypatch)
    assert faces(outputs) == 1
    assert "adapter.r: 16 -> 8" in text(outputs)
    assert "r: 8" in (tmp_path / "planets.yaml").read_text("utf-8")
    assert "error" not in text(outputs[-1:]).lower()


def test_preview_marks_the_answers_and_shows_what_a_limit_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = play("preview.ipynb", tmp_path, monkeypatch)
    assert faces(outputs) == 1
    whole, cut = (text([cell]) for cell in (outputs[2], outputs[3]))
    assert learned(whole).startswith("Yes.<|im_end|>Rarely.<|im_end|>1 2 3")
    assert learned(whole).endswith("19 20<|im_end|>")
    assert "cut to data.max_length" in cut
    assert learned(cut).startswith("1 2 3")
    assert "20" not in learned(cut)


def test_monitor_follows_and_stops_a_run_of_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = play("monitor.ipynb", tmp_path, monkeypatch, steps=5000)
    assert faces(outputs) == 1
    assert "'stopped'" in text(outputs)
    run = tmp_path / "runs" / "dates-0001"
    (stopped,) = events(run, "stopped")
    assert stopped["step"] < 5000
    assert f"({stopped['step']}, 'committed')" in text(outputs)


def test_compare_names_the_one_setting_that_differs_and_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = play("compare.ipynb", tmp_path, monkeypatch)
    assert faces(outputs) == 1
    told = text(outputs[2:3]).splitlines()
    assert told[0] == "optim.learning_rate [0.004, 0.0004]"
    assert [line.split()[0] for line in told] == ["optim.learning_rate", "loss", "eval_loss"]
    quick, slow = json.loads(told[1].removeprefix("loss "))
    assert quick < slow
    run = tmp_path / "runs" / "quick-0001"
    assert round([e["loss"] for e in events(run, "metrics") if "loss" in e][-1], 3) == quick
