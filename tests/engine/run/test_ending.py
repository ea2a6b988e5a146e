"""The lines below the end of a run say what lies in its folder and what its events told."""

from __future__ import annotations

from engine.run import store
from engine.run.ending import card, ways
from engine.run.evaluations import keep
from engine.run.events import EventWriter
from engine.run.index import open_view


def finished(root, *, best=None, end="finished"):
    run = store.create(root, "version: 1\n", {"name": "my", "host": "another-machine"})
    with EventWriter(run) as pen:
        pen.write("started", method="sft", model="builtin/tiny", max_steps=20, epochs=1)
        pen.write("sample", step=0, index=0, prompt="2 + 2?", completion="\x1b[31mred")
        for step, loss in ((10, 2.5), (20, 2.75)):
            pen.write("metrics", step=step, loss=2.0, eval_loss=loss)
            if step == best:
                pen.write("best", step=step, metric="eval_loss", value=loss)
            pen.write("checkpoint", step=step, path=f"checkpoints/checkpoint-{step}", state="committed", bytes=1)
        pen.write("sample", step=20, index=0, prompt="2 + 2?", completion="4 " * 200)
        pen.write(end, step=20, seconds=1.0, by="someone")
    run.update_json(state=end)
    with open_view(run) as watch:
        return run, card(watch.view, run, "my-0001")


def test_the_best_checkpoint_comes_first_and_what_was_said_before_training_stands_beside_the_end(tmp_path):
    run, lines = finished(tmp_path, best=10)
    assert lines[:4] == [
        ("model", f"{run.checkpoints / 'checkpoint-10'}, the best; the end is checkpoint-20"),
        ("held out", "loss 2.750 at step 20, 2.500 at step 10"),
        ("asked", "2 + 2?"),
        ("", "before training: ␛[31mred"),
    ]
    after = lines[4][1]
    assert after.startswith("after step 20: 4 4 4")
    assert after.endswith("…")
    assert [words for _, words in lines[5:]] == [
        "workbench chat my-0001",
        "workbench evaluate my-0001 --base",
        "workbench export my-0001 --to safetensors",
        "workbench resume my-0001 --set optim.num_train_epochs=2",
    ]


def test_without_a_best_one_the_end_is_the_model_and_a_stopped_run_has_no_card(tmp_path):
    run, lines = finished(tmp_path / "plain")
    assert lines[0] == ("model", str(run.checkpoints / "checkpoint-20"))
    assert finished(tmp_path / "stopped", end="stopped")[1] == []


def test_training_longer_doubles_what_ends_the_run_and_a_measurement_is_told_beside_its_base(tmp_path):
    run, _ = finished(tmp_path)
    run.config.write_text("version: 1\noptim: {max_steps: 20, num_train_epochs: 3}\n")
    found = {"checkpoint": "checkpoint-20", "method": "sft", "rows": 32, "data": "data.eval"}
    keep(run, {**found, "metrics": {"eval_loss": 0.5}, "base": {"eval_loss": 6.25}})
    with open_view(run) as watch:
        longer = ways(watch.view, run, "my-0001")[-1]
        lines = card(watch.view, run, "my-0001")
    assert longer.command == "workbench resume my-0001 --set optim.max_steps=40"
    assert longer.means.startswith("optim.max_steps 20 -> 40, from checkpoint-20 on")
    assert ("measured", "checkpoint-20, 32 rows of data.eval: loss 0.500 (6.25 before training)") in lines
