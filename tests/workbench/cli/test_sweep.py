"""`workbench sweep`: refused whole or queued whole, one table with the best, the spread over seeds."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from engine.errors import UsageError
from engine.run import checkpoint, data_record, launch, store
from engine.run.sweep import axes, results, split
from tests.warm import command
from workbench.cli.sweep import _hold, lines, picture, start
from workbench.cli.sweep import command as sweep_command
from workbench.panels.run_table import SPARK

CONFIG = """\
version: 1
model: {name: builtin/tiny, dtype: float32}
data: {train: [{path: builtin/dates}], max_length: 128}
optim: {max_steps: 6}
run: {devices: 1}
"""
STEP_SECONDS = 0.001


def sweep(place: Path, *words: str) -> tuple[int, Any]:
    ended = command("sweep", *words, "--json", cwd=place, timeout=170)
    return ended.returncode, json.loads(ended.stdout)


def test_each_combination_is_a_run_and_the_best_is_told(place: Path) -> None:
    code, found = sweep(place, "my.yaml", "optim.max_steps=4,6", "run.seed=1,2")
    assert code == 0
    assert [row["values"] for row in found["runs"]] == [
        {"optim.max_steps": steps, "run.seed": seed} for steps in ("4", "6") for seed in ("1", "2")
    ]
    assert [(row["state"], row["step"]) for row in found["runs"]] == [("finished", 4)] * 2 + [("finished", 6)] * 2
    for row in found["runs"]:
        config = store.find(row["id"], place / "runs").read_config()
        assert f"max_steps: {row['values']['optim.max_steps']}" in config
        assert f"seed: {row['values']['run.seed']}" in config
    assert (found["metric"], found["greater_is_better"]) == ("loss", False)
    values = [row["value"] for row in found["runs"]]
    assert found["best"] == found["runs"][2]["id"]
    assert values[2] < values[0]
    assert [(group["mean"], group["spread"], len(group["runs"])) for group in found["groups"]] == [
        (pytest.approx(values[0]), 0.0, 2),
        (pytest.approx(values[2]), 0.0, 2),
    ]
    # The same table again, by the sweep's name.
    again = command("sweep", found["sweep"], cwd=place).stdout.splitlines()
    assert again[0].split() == ["RUN", "optim.max_steps", "run.seed", "STATE", "STEP", "loss"]
    assert again[3].endswith(", the best")
    assert again[-1].startswith("`workbench compare my-000")
    # The curves on one scale: the longer ones reach further to the right, and none begins below where it ends.
    at = next(number for number, line in enumerate(again) if line.startswith("loss, step 1 to 6, "))
    drawn = [line.split("  ")[1].rstrip() for line in again[at + 1 : at + 5]]
    assert len(drawn[0]) < len(drawn[2]), drawn
    assert all(SPARK.index(each[0]) > SPARK.index(each[-1]) for each in drawn), drawn
    assert again[at + 3].rstrip().endswith("optim.max_steps=6 run.seed=1")
    # One that reached the very same is as good.
    assert values[2] == values[3]
    assert again[4].endswith(", the same")
    assert not any(line.endswith("the same") for line in again[1:3])
    # One that failed is shown, is not the best, and is the exit code.
    store.find(found["best"], place / "runs").events.write_text("")
    store.find(found["best"], place / "runs").update_json(state="failed")
    code, after = sweep(place, found["sweep"])
    assert (code, after["ok"]) == (1, False)
    assert after["best"] == found["runs"][3]["id"]
    members = [store.find(row["id"], place / "runs") for row in found["runs"][:2]]
    # Noise in training makes its loss another number, not that of held-out rows.
    for metric, differs in (("loss", ["optim.neftune_noise_alpha"]), ("eval_loss", [])):
        for run, alpha in zip(members, ("1", "50"), strict=True):
            values = {"optim.neftune_noise_alpha": alpha}
            run.update_json(sweep={"id": "noise", "values": values, "metric": metric}, state="finished")
        noisy = results(members)
        assert (noisy["differs_by"], noisy["other_rows"]) == (differs, []), metric
        if differs:
            assert "Sweep with data.val_set_size=0.05 or data.eval" in lines(noisy)[-1]
    # Of losses that are different numbers none is the best; what all runs measure alike is named instead.
    for run, kind in zip(members, ("dpo", "ipo"), strict=True):
        run.update_json(sweep={"id": "apart", "values": {"method.kind": kind}, "metric": "loss"})
        with run.events.open("a") as file:
            logged = {
                "v": 1,
                "seq": 99,
                "t": 9,
                "rank": 0,
                "segment": 0,
                "kind": "metrics",
                "step": 4,
                "eval_rewards/accuracies": 0.5,
            }
            file.write(json.dumps(logged) + "\n")
    apart = results(members)
    assert (apart["best"], apart["differs_by"], apart["instead"]) == (None, ["method.kind"], "eval_rewards/accuracies")
    told = "\n".join(lines(apart))
    assert "the best by it. Sweep with run.metric_for_best_model=rewards/accuracies" in told
    assert ", the best" not in told
    assert not picture(apart)
    # Of rows cut at other places the loss is another number too, where one is cut; the seed may draw others.
    for run, longest in zip(members, ("24", "128"), strict=True):
        run.update_json(sweep={"id": "cut", "values": {"data.max_length": longest}, "metric": "loss"})
    assert results(members)["differs_by"] == []
    for key, differs in (("data.max_length", ["data.max_length"]), ("run.seed", [])):
        for run, longest in zip(members, ("24", "128"), strict=True):
            run.update_json(sweep={"id": "cut", "values": {key: longest}, "metric": "loss"})
            hashes = data_record.RowHashes()
            hashes.add(0, {"input_ids": [1] * int(longest)})
            data_record.write(run, {"train": data_record.SplitRecord("", "", hashes, [], [], [])})
        cut = results(members)
        assert (cut["differs_by"], cut["other_rows"], cut["best"] is None) == (differs, differs, bool(differs))
        assert any("the loss is of other rows or tokens" in line for line in lines(cut)) == bool(differs)


def test_nothing_starts_where_one_cell_is_wrong_or_there_are_too_many(place: Path) -> None:
    many = "run.seed=" + ",".join(map(str, range(17)))
    for words, code, sentence in (
        (
            ["my.yaml", "optim.max_steps=4,-6"],
            1,
            "with optim.max_steps=-6: the config has 1 error; no run was started.",
        ),
        (
            ["my.yaml", many],
            2,
            "the sweep would be 17 runs (17 of run.seed); more than 16 are started with --yes alone.",
        ),
        (["my.yaml", "optim.learning_rate=1e-4,0.0001"], 2, "are one and the same config."),
        (["my.yaml", "run.seed=1"], 2, "a sweep needs a setting with several values."),
        (["my.yaml", "run.seed=1,2", "run.seed=3"], 2, "run.seed: is given twice."),
        (["my.yaml", "run.seed=1,,2"], 2, "run.seed: has an empty value"),
        (["my.yaml", "run.seed"], 2, "must be KEY=VALUE"),
        (["my-abcdef"], 2, "no sweep is called my-abcdef"),
    ):
        got, found = sweep(place, *words)
        assert (got, sentence in found["error"]["message"]) == (code, True), found
    assert list(store.runs_in(place / "runs")) == []


def test_a_launch_that_fails_takes_the_queued_ones_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    real, calls = launch.launch, []

    def second_fails(*args: Any, **more: Any) -> Any:
        calls.append(more["name"])
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(*args, **more)

    monkeypatch.setattr("engine.run.from_config.launch", second_fails)
    monkeypatch.setenv("SMALL_WORKER", '{"step_seconds": 5}')
    with pytest.raises(OSError, match="No space"):
        start(Path("my.yaml"), axes(["run.seed=1,2,3"]), None)
    (first,) = store.runs_in(place / "runs")
    give_up = time.monotonic() + 30
    while first.state not in store.ENDED and time.monotonic() < give_up:
        time.sleep(0.1)
    assert first.state == "stopped"


def test_a_containers_first_process_saves_and_stops_all_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("SMALL_WORKER", '{"step_seconds": 0.02, "steps": 5000, "save_steps": 5000}')
    _, started = start(Path("my.yaml"), axes(["run.seed=1,2"]), None)
    give_up = time.monotonic() + 60
    while started[0].state != "running" and time.monotonic() < give_up:
        time.sleep(0.05)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGTERM)).start()
    try:
        assert _hold(started) == 143
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert [run.state for run in started] == ["stopped", "stopped"]
    assert checkpoint.newest_valid(started[0])[0] is not None
    assert started[1].read_json()["message"] == "Taken out of the queue by SIGTERM before it began."


def test_a_sweep_that_holds_a_container_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    try:
        with pytest.raises(UsageError, match="--detach: must be left out in a command that is a container's first"):
            sweep_command.main(["my.yaml", "run.seed=1,2", "--detach"], standalone_mode=False)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_commas_in_brackets_and_quotes_belong_to_a_value(tmp_path: Path) -> None:
    assert split("[a,b],[c]") == ["[a,b]", "[c]"]
    assert split("'x,y',z") == ["'x,y'", "z"]
    with pytest.raises(UsageError, match="has the value 1 twice"):
        axes(["run.seed=1,1"])
    nothing = {"metric": None, "greater_is_better": None, "runs": [], "groups": [], "best": None}
    assert results([]) == {**nothing, "differs_by": [], "other_rows": [], "instead": None}
