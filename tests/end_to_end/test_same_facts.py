"""What a face shows is what the run gets: every `auto`, by the same facts, in terminal, notebook, commands and worker."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from engine.client import Inspector
from engine.config.facts import Facts, ModelFacts, SourceFacts
from engine.config.files import absolute, as_yaml, dump, load, parse
from engine.config.recipes import recipe_mapping, recipes
from engine.data.gather_facts import gather_facts
from engine.errors import WorkbenchError
from engine.planning.auto import effective, resolved
from engine.rules import read
from engine.run.store import create
from engine.session.draft import Draft

CONFIG = {
    "version": 1,
    "model": {"name": "./model"},
    "method": {"kind": "pretrain"},
    "data": {"train": [{"path": "rows.jsonl"}], "max_length": 64, "excess_length": "truncate"},
    "optim": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
}
ROWS = 400  # 50 steps, so that what happens ten times a run happens every 5


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config, its rows and its model, all named by relative paths; somebody stands elsewhere."""
    from engine.builtin import tiny

    home = tmp_path / "home"
    home.mkdir(parents=True)
    shutil.copytree(tiny.folder(), home / "model")
    (home / "rows.jsonl").write_text('{"text": "a line of text"}\n' * ROWS)
    (home / "my.yaml").write_text(as_yaml(CONFIG))
    for name in ("STATE", "CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    return home


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The configs that would have been started, as a run folder keeps them."""
    import engine.run.from_config as from_config

    kept: list[dict[str, Any]] = []

    def launch(text: str, **rest: Any) -> Any:
        kept.append({"config": parse(text).mapping, **rest})
        raise WorkbenchError("nothing is started in this test")

    monkeypatch.setattr(from_config, "launch", launch)
    return kept


def shown(draft: Draft) -> dict[str, Any]:
    """`auto -> value` as the form has it."""
    return {entry.path: entry.effective for entry in effective(draft.config, draft.facts) if entry.requested == "auto"}


def stored(config: dict[str, Any], paths: Any) -> dict[str, Any]:
    return {path: config[path.split(".")[0]][path.split(".")[1]] for path in paths}


def wait(ready: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.05)


def agree(draft: Draft, kept: dict[str, Any], home: Path) -> None:
    before = shown(draft)
    assert before["run.eval_steps"] == 5
    assert {"optim.learning_rate", "memory.gradient_checkpointing", "optim.tf32"} <= before.keys()
    assert stored(kept["config"], before) == before
    assert kept["config"]["data"]["train"][0]["path"] == str(home / "rows.jsonl")
    assert kept["config"]["model"]["name"] == str(home / "model")
    # The room for checkpoints is held against the disk, so the model must have been recognised.
    assert kept["info"]["forecast_bytes"] > 100_000


async def test_the_terminal_starts_what_its_form_shows(place: Path, started: list[dict[str, Any]]) -> None:
    from workbench.app import WorkbenchApp

    draft = Draft.open(place / "my.yaml")
    app = WorkbenchApp(draft)
    async with app.run_test(size=(80, 24)) as pilot:
        for _ in range(400):
            if draft.facts.sources and draft.facts.model and draft.facts.machine:
                break
            await pilot.pause(0.05)
        await pilot.press("7", "enter")
        for _ in range(400):
            if started:
                break
            await pilot.pause(0.05)
        agree(draft, started[0], place)


def test_the_notebook_starts_what_its_form_shows(place: Path, started: list[dict[str, Any]]) -> None:
    from widgets import Workbench

    draft = Draft.open(place / "my.yaml")
    face = Workbench(draft)
    try:

        def known() -> bool:
            face.form.session.facts.refresh()
            return bool(draft.facts.sources and draft.facts.model and draft.facts.machine)

        wait(known)
        with pytest.raises(WorkbenchError, match="nothing is started"):
            face.start()
    finally:
        face.close()
    agree(draft, started[0], place)


OTHERS = Facts(model=ModelFacts("./another"), sources={"others.jsonl": SourceFacts("others.jsonl")})


@pytest.mark.parametrize("known", [Facts(), OTHERS], ids=["nothing is known", "another model and rows were looked at"])
def test_a_launch_that_comes_before_the_look_waits_for_it(
    place: Path, started: list[dict[str, Any]], known: Facts
) -> None:
    from widgets import Workbench

    draft = Draft.open(place / "my.yaml")
    draft.learn(known)
    face = Workbench(draft, fresh=True)
    try:
        with pytest.raises(WorkbenchError, match="nothing is started"):
            face.start()
    finally:
        face.close()
    assert draft.facts == known
    draft.learn(gather_facts(draft.config, place))
    agree(draft, started[0], place)


def test_the_command_starts_what_check_and_estimate_judge(place: Path, started: list[dict[str, Any]]) -> None:
    from workbench.cli.estimate import command as estimate
    from workbench.cli.train import command as train

    told = CliRunner().invoke(estimate, [str(place / "my.yaml"), "--json"], standalone_mode=False)
    steps = json.loads(told.stdout)["steps"]
    assert steps == 50
    refused = CliRunner().invoke(train, [str(place / "my.yaml")], standalone_mode=False)
    assert isinstance(refused.exception, WorkbenchError)
    draft = Draft.open(place / "my.yaml")
    draft.learn(gather_facts(draft.config, place))
    agree(draft, started[0], place)


def test_the_inspector_estimates_by_the_facts_of_the_faces(place: Path) -> None:
    from engine.planning.estimate import estimate

    config = read(load(place / "my.yaml").mapping).config
    wanted = estimate(config, gather_facts(config, place)).as_json()
    assert wanted["steps"] == 50
    assert wanted["trainable_parameters"] > 100_000
    with Inspector() as inspector:
        answer = inspector.ask("estimate", config=CONFIG, base=str(place)).result(120)
    assert answer == json.loads(json.dumps(wanted))


@pytest.mark.parametrize("name", [recipe.name for recipe in recipes()])
def test_the_worker_changes_nothing_of_what_was_stored(name: str, tmp_path: Path) -> None:
    from engine.worker import _config

    mapping = absolute(recipe_mapping(name), tmp_path)
    config = read(mapping).config
    facts = gather_facts(config, tmp_path, sources=False)
    complete = resolved(config, facts)
    run = create(tmp_path / "runs", dump(complete), {"name": name})
    errors = [finding for finding in read(parse(dump(complete)).mapping).findings if finding.severity == "error"]
    if errors:  # a recipe waits for its rows
        with pytest.raises(WorkbenchError, match=errors[0].path):
            _config(run)
        mapping["data"]["train"] = [{"path": "builtin/dates"}]
        complete = resolved(read(mapping).config, facts)
        run.config.write_text(dump(complete))
    assert _config(run).model_dump() == complete.model_dump()


def test_an_auto_written_into_a_run_by_hand_is_resolved_by_all_facts(place: Path, tmp_path: Path) -> None:
    from engine.worker import _config

    config = read(absolute(CONFIG, place)).config
    run = create(tmp_path / "runs", as_yaml(absolute(CONFIG, place)), {"name": "by hand"})
    wanted = resolved(config, gather_facts(config, place))
    assert wanted.run.eval_steps == 5
    assert _config(run).model_dump() == wanted.model_dump()
    assert resolved(config, Facts()).run.eval_steps != 5  # so the facts made the difference
