"""What a window opens on: how much of it is runs and how much is configs, and which times stand beside them."""

from __future__ import annotations

from pathlib import Path

from engine.run.events import EventWriter
from engine.run.store import create
from engine.session.recent import Recent
from engine.session.start import BEGIN, StartList


def test_runs_have_two_thirds_of_the_room_and_what_goes_on_no_time(tmp_path: Path) -> None:
    root, recent = tmp_path / "runs", Recent(tmp_path / "state")
    root.mkdir()
    for number in range(12):
        run = create(root, "version: 1\n", {"name": "old", "method": "sft", "host": "another-machine"})
        run.update_json(state="finished", created=float(number), ended=100.0 + number)
    create(root, "version: 1\n", {"name": "now", "method": "sft", "host": "another-machine"}).update_json(
        state="running"
    )
    for number in range(6):
        config = tmp_path / f"{number}.yaml"
        config.write_text("version: 1\n")
        recent.note(config)
    known = StartList(root, recent)
    going, last, begin = known.sections(20)
    assert known.runs == 13
    assert [(entry.title, entry.when) for entry in going.entries] == [("now-0001", None)]
    runs, configs = ([entry for entry in last.entries if entry.kind == kind] for kind in ("run", "config"))
    room = 20 - len(BEGIN) - 1 - 6
    assert (len(runs), len(configs)) == (room - room // 3, room // 3)
    assert [entry.when for entry in runs] == sorted((entry.when or 0 for entry in runs), reverse=True)
    assert runs[0].when == 111.0
    assert [entry.title for entry in configs] == ["5.yaml", "4.yaml", "3.yaml"][: room // 3]
    assert begin.entries == BEGIN


def test_a_run_that_samples_answers_is_told_by_its_reward(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for method, numbers in (("grpo", {"reward": 0.75, "eval_reward": 0.5}), ("sft", {"eval_loss": 2.25})):
        run = create(root, "version: 1\n", {"name": method, "method": method, "host": "another-machine"})
        with EventWriter(run) as pen:
            pen.write("started", method=method, model="builtin/tiny", max_steps=2, epochs=1)
            pen.write("metrics", step=2, loss=-0.0151, **numbers)
            pen.write("finished", step=2, seconds=1.0)
        run.update_json(state="finished")
    known = StartList(root, Recent(tmp_path / "state"))
    told = {entry.title: entry.detail for entry in known.sections(20)[0].entries}
    assert told == {"grpo-0001": "held-out reward 0.500", "sft-0001": "held-out loss 2.25"}
