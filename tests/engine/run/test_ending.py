"""The lines below the end of a run say what lies in its folder and what its events told."""

from __future__ import annotations

import shutil
from array import array

from engine.model_files import ADAPTER
from engine.run import checkpoint, store
from engine.run.batches import rows_of
from engine.run.ending import end_of, facts, ways
from engine.run.evaluations import keep
from engine.run.events import EventWriter
from engine.run.in_flight import InFlight, in_flight
from engine.run.index import open_view


def card(view, folder, name):
    return [*facts(view, folder), *((way.title, way.command) for way in ways(view, folder, name))]


def finished(root, *, best=None, end="finished"):
    run = store.create(root, "version: 1\n", {"name": "my", "host": "another-machine"})
    with EventWriter(run) as pen:
        pen.write("started", method="sft", model="builtin/tiny", max_steps=20, epochs=1)
        pen.write("sample", step=0, index=0, prompt="2 + 2?", completion="\x1b[31mred")
        for step, loss in ((10, 2.5), (20, 2.75)):
            pen.write("metrics", step=step, loss=2.0, eval_loss=loss)
            if step == best:
                pen.write("best", step=step, metric="eval_loss", value=loss)
            tmp = checkpoint.begin(run, step)
            (tmp / "model.safetensors").write_bytes(b"1")
            checkpoint.commit(tmp, {})
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
        ("held out", "loss 2.500 at step 10, 2.750 at step 20"),
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


def test_what_has_not_arrived_at_a_hub_is_sent_by_a_command_that_sends_the_same(tmp_path):
    """An adapter stays one: without `--form` its model would be sent, merged."""
    run, _ = finished(tmp_path)
    with EventWriter(run) as pen:
        pen.write("upload", state="retry", repository="me/x", step=20, message="the hub answers with error 500")
    for form in ("", " --form adapter"):
        if form:
            (run.checkpoints / "checkpoint-20/adapter_config.json").write_text("{}")
        with open_view(run) as watch:
            told = dict(facts(watch.view, run))["hub"]
        assert told.endswith(f" --checkpoint 20{form} --to me/x` sends it")


def test_a_checkpoint_that_somebody_removed_is_offered_no_more(tmp_path):
    run, _ = finished(tmp_path, best=10)
    with open_view(run) as watch:
        shutil.rmtree(run.checkpoints / "checkpoint-10")
        assert card(watch.view, run, "my-0001")[0] == ("model", str(run.checkpoints / "checkpoint-20"))
        (run.checkpoints / "checkpoint-20/model.safetensors").unlink()
        lines = card(watch.view, run, "my-0001")
        assert lines[0] == ("model", f"none: no checkpoint is whole any more in {run.checkpoints}")
        assert not [words for _, words in lines if words.startswith("workbench ")]
    run, _ = finished(tmp_path / "other", best=10)
    with open_view(run) as watch:
        shutil.rmtree(run.checkpoints / "checkpoint-20")
        assert watch.view.best["step"] == 10
        assert "checkpoint-10, the best; the end is checkpoint-20" in card(watch.view, run, "my-0001")[0][1]
        assert ways(watch.view, run, "my-0001")[-1].means.split("from ")[1].startswith("checkpoint-10 on")


def test_training_longer_doubles_what_ends_the_run_and_a_measurement_is_told_beside_its_base(tmp_path):
    run, _ = finished(tmp_path)
    run.config.write_text("version: 1\noptim: {max_steps: 20, num_train_epochs: 3}\n")
    found = {"checkpoint": "checkpoint-20", "method": "sft", "rows": 32, "data": "data.eval"}
    keep(run, {**found, "metrics": {"eval_loss": 0.5}, "base": {"eval_loss": 6.25}})
    with open_view(run) as watch:
        *_, longer, older = ways(watch.view, run, "my-0001")
        lines = card(watch.view, run, "my-0001")
    assert longer.command == "workbench resume my-0001 --set optim.max_steps=40"
    assert older.command == "workbench prune my-0001"
    assert (
        older.means
        == f"1 checkpoint is neither the newest nor the best: {checkpoint.size_of(run.checkpoints / 'checkpoint-10')} B"
    )
    assert longer.means.startswith("optim.max_steps 20 -> 40, from checkpoint-20 on")
    assert ("measured", "checkpoint-20, 32 rows of data.eval: loss 0.500 (6.25 before training)") in lines
    many = {f"eval_number{place}": 1.0 for place in range(5)}
    keep(run, {**found, "metrics": {"eval_loss": 0.5, **many}, "base": None})
    with open_view(run) as watch:
        told = dict(card(watch.view, run, "my-0001"))["measured"]
    assert told.endswith("loss 0.500, number0 1, number1 1, number2 1, 2 more in evaluations.jsonl")
    # One that ended early would end again at the same evaluation, however many steps it had.
    run.config.write_text("version: 1\noptim: {max_steps: 40, early_stopping_patience: 3}\n")
    run.update_json(cause="early_stopping")
    with open_view(run) as watch:
        *_, longer, _ = ways(watch.view, run, "my-0001")
    assert longer.command == "workbench resume my-0001 --set optim.early_stopping_patience=6"
    assert longer.means.startswith("optim.early_stopping_patience 3 -> 6, from checkpoint-20 on")


def test_a_finished_run_whose_loss_only_rose_says_so_beside_its_model(tmp_path):
    for name, losses in (("worse", (6.5, 5077, 900, 800, 950, 1000, 809)), ("better", (6.5, 5, 4, 3, 2, 1, 0.5))):
        run = store.create(tmp_path / name, "version: 1\n", {"name": "my", "host": "another-machine"})
        with EventWriter(run) as pen:
            pen.write("started", method="sft", model="builtin/tiny", max_steps=7, epochs=1)
            for step, loss in enumerate(losses, 1):
                pen.write("metrics", step=step, loss=loss)
            tmp = checkpoint.begin(run, 7)
            (tmp / "model.safetensors").write_bytes(b"1")
            checkpoint.commit(tmp, {})
            pen.write("checkpoint", step=7, path="checkpoints/checkpoint-7", state="committed", bytes=1)
            pen.write("finished", step=7, seconds=1.0)
        run.update_json(state="finished")
        with open_view(run) as watch:
            said = dict(card(watch.view, run, "my-0001")).get("got worse")
        told = "the loss ended at 809, far above its 6.500 at first: lower optim.learning_rate"
        assert said == (told if name == "worse" else None)


def test_a_finished_run_whose_answers_never_earned_a_reward_says_that_nothing_was_learned(tmp_path):
    for name, last in (("never", 0.0), ("once", 0.25)):
        run = store.create(tmp_path / name, "version: 1\n", {"name": "my", "host": "another-machine"})
        with EventWriter(run) as pen:
            pen.write("started", method="grpo", model="builtin/tiny", max_steps=2, epochs=1)
            pen.write("metrics", step=1, loss=0.0, reward=0.0, reward_std=0.0, frac_reward_zero_std=1.0)
            pen.write("metrics", step=2, loss=0.0, reward=last, reward_std=last, frac_reward_zero_std=1.0 - last)
            tmp = checkpoint.begin(run, 2)
            (tmp / "model.safetensors").write_bytes(b"1")
            checkpoint.commit(tmp, {})
            pen.write("checkpoint", step=2, path="checkpoints/checkpoint-2", state="committed", bytes=1)
            pen.write("finished", step=2, seconds=1.0)
        run.update_json(state="finished")
        with open_view(run) as watch:
            told = dict(card(watch.view, run, "my-0001")).get("no signal", "")
        assert told.startswith("no answer ever earned a reward, so nothing was learned: add") == (name == "never")


def test_a_run_that_failed_says_how_its_memory_went_and_which_rows_it_was_on(tmp_path):
    run = store.create(tmp_path, "version: 1\n", {"name": "my", "host": "another-machine"})
    note = InFlight(run).note
    with EventWriter(run) as pen:
        pen.write("started", method="sft", model="builtin/tiny", max_steps=20, epochs=1)
        for step, used in ((1, 2 << 30), (2, 9 << 30), (3, 4 << 30)):
            pen.write("metrics", step=step, loss=2.0, memory_allocated=used)
        pen.write("gpu", devices=[{"index": 0, "memory_total": 10 << 30}])
        note(4, [1_234])
        note(4, [1_234, *range(8)])
        pen.write("failed", cause="cuda_oom", message="The GPU ran out of memory.", lines=[])
    with open_view(run) as watch:
        facts = dict(end_of(watch.view, run, "my-0001").facts)
        assert facts["memory"] == "2.0 GiB at step 1, 9.0 GiB at step 2, 4.0 GiB at step 3, of 10.0 GiB"
        assert facts["in flight"] == "step 4: rows 1,234, 0, 1, 2, 3, 4, … (9 rows)"
        assert rows_of(run, 4) == [1_234, *range(8)]
        note(3, [7])  # a step that was finished is none that it died in
        assert "in flight" not in dict(end_of(watch.view, run, "my-0001").facts)


def test_what_arrived_last_is_named_of_a_run_that_went_back_and_the_rest_is_sent_in_the_same_form(tmp_path):
    run = store.create(tmp_path, "version: 1\n", {"name": "my", "host": "another-machine"})
    tmp = checkpoint.begin(run, 40)
    (tmp / ADAPTER).write_text("{}")
    checkpoint.commit(tmp, {})
    told = [(20, "arrived"), (40, "arrived"), (20, "arrived"), (30, "arrived"), (40, "begun"), (40, "retry")]
    with EventWriter(run) as pen:
        pen.write("started", method="sft", model="builtin/tiny", max_steps=40, epochs=1)
        for step, state in told:
            pen.write("upload", step=step, state=state, repository="me/model", url=f"https://hub/{step}")
        pen.write("stopped", step=40)
    run.update_json(state="stopped")
    with open_view(run) as watch:
        assert dict(card(watch.view, run, "my-0001"))["hub"] == (
            "checkpoint-30 is at https://hub/30; checkpoint-40 has not arrived: "
            f"`workbench push {store.called(run)} --checkpoint 40 --form adapter --to me/model` sends it"
        )
    with EventWriter(run) as pen:
        pen.write("upload", step=40, state="arrived", repository="me/model", url="https://hub/new")
    with open_view(run) as watch:
        assert dict(card(watch.view, run, "my-0001"))["hub"] == "checkpoint-40 is at https://hub/new"


def test_the_rows_of_the_step_that_diverged_are_named(tmp_path):
    run = store.create(tmp_path, "version: 1\n", {"name": "my", "host": "another-machine"})
    note = InFlight(run).note
    with EventWriter(run) as pen:
        pen.write("started", method="sft", model="builtin/tiny", max_steps=20, epochs=1)
        pen.write("diverged", step=3, message="NaN")
        note(3, [5])
        pen.write("failed", step=3, cause="diverged", message="The loss is NaN.", lines=[])
    with open_view(run) as watch:
        assert dict(end_of(watch.view, run, "my-0001").facts)["in flight"] == "step 3: row 5"


def test_a_file_of_rows_that_is_damaged_or_from_outside_says_nothing(tmp_path):
    run = store.create(tmp_path, "version: 1\n", {"name": "my", "host": "another-machine"})
    assert in_flight(run) is None
    for words in (
        b"",
        b"abc",
        array("q", [4]),
        array("q", [4, 3, 1]),
        array("q", [-1, 1, 1]),
        array("q", [4, 1 << 40, 1]),
    ):
        run.in_flight.write_bytes(bytes(words))
        assert in_flight(run) is None
    run.in_flight.unlink()
    run.in_flight.symlink_to("/etc/hostname")
    assert in_flight(run) is None
