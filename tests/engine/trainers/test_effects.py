"""What a run leaves behind is what was asked for: adapters alone trained, receipts true, requests heard, failures named."""

from __future__ import annotations

import contextlib
import json
import time
from array import array
from itertools import pairwise

import pytest
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

from engine.run.control import request
from engine.trainers.clock import StepClock
from engine.trainers.run_trainer import RunTrainer
from engine.trainers.watching import Watching
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, heard_by, lines


def entries(run):
    return {entry["feature"]: entry for entry in lines(run, "receipt")[0]["entries"]}


def test_lora_trains_only_its_adapters_and_the_receipt_counts_them(train, source):
    settings = {"adapter.kind": "lora", "adapter.r": 4, "optim.max_steps": 2}
    run = train({**settings, "data.train": [{"path": source(CONVERSATIONS)}]})
    saved = load_file(run.checkpoints / "checkpoint-2/adapter_model.safetensors")
    assert all("lora_" in name for name in saved)
    assert any(value.abs().max() > 0 for name, value in saved.items() if "lora_B" in name)
    said = entries(run)
    assert said["adapter"]["count"] == len(saved) // 2
    assert said["trainable parameters"]["effective"] == sum(value.numel() for value in saved.values())
    assert said["attention"]["effective"] == "sdpa"


def test_the_receipt_is_stored_before_the_first_step(train, source):
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 1})
    kinds = [json.loads(line)["kind"] for line in run.events.read_text("utf-8").splitlines()]
    assert kinds.index("receipt") < kinds.index("started") < kinds.index("metrics")
    assert all(
        entry.keys() == {"feature", "requested", "effective", "count", "detail"} for entry in entries(run).values()
    )


def test_the_loss_falls_and_eval_rows_are_measured(train, source):
    rows = [{"path": source(CONVERSATIONS)}]
    settings = {"run.eval_steps": 5, "optim.max_steps": 20, "optim.gradient_accumulation_steps": 1}
    run = train({**settings, "data.train": rows, "data.eval": rows})
    losses = [event["loss"] for event in lines(run, "metrics") if "loss" in event]
    assert losses[-1] < 0.8 * losses[0]
    measured = [event["eval_loss"] for event in lines(run, "metrics") if "eval_loss" in event]
    assert len(measured) == 4
    assert measured[-1] < measured[0]


def test_the_rate_of_a_line_is_of_the_tokens_and_the_time_since_the_one_before(train, source):
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "run.logging_steps": 2})
    found = [entry for entry in lines(run, "metrics") if "tokens_per_second" in entry]
    assert len(found) > 4
    for before, line in pairwise(found):
        took = line["t"] - before["t"]
        assert line["tokens_per_second"] * took == pytest.approx(line["tokens"] - before["tokens"], rel=0.2)


def test_the_end_of_a_run_is_a_point_of_its_curves_also_between_logged_steps(train, source):
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 5, "run.save_steps": 50}
    each = [event["loss"] for event in lines(train(settings), "metrics")]
    some = lines(train(settings | {"run.logging_steps": 3}), "metrics")
    assert [event["step"] for event in some] == [3, 5]
    assert some[-1]["loss"] == pytest.approx((each[3] + each[4]) / 2, rel=1e-5)
    assert [event["step"] for event in lines(train(settings | {"run.logging_steps": 100}), "metrics")] == [5]


def test_dpo_learns_to_prefer_the_chosen_answers(train, source):
    settings = {"method.kind": "dpo", "optim.max_steps": 20, "optim.gradient_accumulation_steps": 1}
    run = train({**settings, "data.train": [{"path": source(PAIRS)}]})
    margins = [event["rewards/margins"] for event in lines(run, "metrics")]
    assert margins[0] == pytest.approx(0, abs=1e-6)
    assert margins[-1] > 0.1


def test_a_separate_reference_copy_gives_what_the_switched_off_adapter_gives(train, source):
    settings = {"method.kind": "dpo", "adapter.kind": "lora", "adapter.r": 4, "optim.max_steps": 4}
    settings["data.train"] = [{"path": source(PAIRS)}]
    off = train({**settings, "method.reference": "adapter_off"})
    ahead = train({**settings, "method.reference": "precompute"})
    losses = [[event["loss"] for event in lines(run, "metrics")] for run in (off, ahead)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_checkpointing_is_counted_and_changes_no_gradient(train, source):
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 4}
    plain = train(settings)
    again = train({**settings, "memory.gradient_checkpointing": True})
    assert entries(plain)["gradient checkpointing"]["count"] == 0
    assert entries(again)["gradient checkpointing"]["count"] == 4  # the built-in model's layers
    losses = [[event["loss"] for event in lines(run, "metrics")] for run in (plain, again)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_batches_name_the_rows_that_made_them(train, source):
    run = train({"data.train": [{"path": source(CONVERSATIONS)}], "optim.max_steps": 6})
    ids = array("q", run.batches.read_bytes())
    seen = [ids[event["offset"] : event["offset"] + event["count"]] for event in lines(run, "batch")]
    assert [len(batch) for batch in seen] == [8] * 6
    assert sorted(number for batch in seen for number in batch) == list(range(48))


@pytest.mark.parametrize(
    ("do", "saved", "steps"),
    [("save_stop", {"checkpoint-1"}, 1), ("stop", set(), 1), ("end_of_epoch", {"checkpoint-4", "checkpoint-6"}, 6)],
)
def test_a_request_is_answered_and_keeps_what_it_promises(train, source, monkeypatch, do, saved, steps):
    asked, begins, hear = [], Watching.on_step_begin, heard_by(monkeypatch)

    def asked_in_the_first_step(self, *args, **kwargs):
        if not asked:
            asked.append(request(self.run, do, "a test"))
            hear()
        return begins(self, *args, **kwargs)

    monkeypatch.setattr(Watching, "on_step_begin", asked_in_the_first_step)
    run = train({"data.train": [{"path": source(CONVERSATIONS)}]})
    answers = [(event["id"], event["status"]) for event in lines(run, "control")]
    assert answers == [(asked[0], "accepted"), (asked[0], "done")]
    assert lines(run, "stopped")[0]["step"] == steps
    assert {path.name for path in run.checkpoints.glob("checkpoint-*")} == saved


def test_a_request_is_answered_while_an_evaluation_goes_on_and_served_after_it(train, source, monkeypatch):
    asked, real, hear = [], RunTrainer.prediction_step, heard_by(monkeypatch)

    def asked_in_the_first_batch(self, *args, **kwargs):
        if not asked:
            asked.append(request(self.run, "save_stop", "a test"))
            hear()
        return real(self, *args, **kwargs)

    monkeypatch.setattr(RunTrainer, "prediction_step", asked_in_the_first_batch)
    run = train(
        {
            "data.train": [{"path": source(CONVERSATIONS)}],
            "data.val_set_size": 8,
            "optim.per_device_eval_batch_size": 2,
            "run.eval_steps": 2,
        }
    )
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    accepted, measured, done, stopped = (
        next(place for place, event in enumerate(events) if wanted(event))
        for wanted in (
            lambda event: event["kind"] == "control" and event["status"] == "accepted",
            lambda event: event["kind"] == "metrics" and "eval_loss" in event,
            lambda event: event["kind"] == "control" and event["status"] == "done",
            lambda event: event["kind"] == "stopped",
        )
    )
    assert accepted < measured < done < stopped
    assert len(lines(run, "control")) == 2
    assert (events[stopped]["step"], (run.checkpoints / "checkpoint-3").is_dir()) == (3, True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model.name": "/no/such/folder"}, "there is no folder"),
        ({"adapter.kind": "lora", "adapter.target_modules": ["q_porj"]}, "Did you mean 'q_proj'"),
    ],
)
def test_what_cannot_work_fails_with_one_sentence(train, source, settings, words):
    run = train({**settings, "data.train": [{"path": source(CONVERSATIONS)}]}, code=1)
    failed = lines(run, "failed")[0]
    assert words in failed["message"]
    assert not lines(run, "started")


def test_a_save_that_breaks_off_leaves_no_checkpoint(train, source, monkeypatch):
    from engine.trainers.saving import CheckpointWriter

    def broken(self, tmp):
        (tmp / "model.safetensors").write_bytes(b"half")
        raise OSError("the disk went away")

    monkeypatch.setattr(CheckpointWriter, "_write_parts", broken)
    run = train({"data.train": [{"path": source(CONVERSATIONS)}]}, code=1)
    assert not [path for path in run.checkpoints.glob("checkpoint-*") if path.suffix != ".tmp"]
    assert "the disk went away" in lines(run, "failed")[0]["message"]


def test_foreign_code_in_a_model_folder_is_refused(train, source, tmp_path):
    import shutil

    from engine.builtin import tiny

    folder = tmp_path / "model"
    shutil.copytree(tiny.folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    config["text"] = {"auto_map": {"AutoConfig": "evil.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    run = train({"model.name": str(folder), "data.train": [{"path": source(CONVERSATIONS)}]}, code=1)
    assert "would run code" in lines(run, "failed")[0]["message"]


def test_pickled_weights_are_not_read(train, source, tmp_path):
    import shutil

    import torch

    from engine.builtin import tiny

    folder = tmp_path / "model"
    shutil.copytree(tiny.folder(), folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    run = train({"model.name": str(folder), "data.train": [{"path": source(CONVERSATIONS)}]}, code=1)
    assert "no safetensors" in lines(run, "failed")[0]["message"]


@contextlib.contextmanager
def outside_clock(monkeypatch):
    """Inside, torch itself says when an optimizer has stepped, and saving is timed from around it. Gives a function: the seconds
    from the end of one step to that of another, without what was saved in between."""
    stepped, saved = [], []
    save = RunTrainer._save_checkpoint

    def timed(*args):
        begun = time.perf_counter()
        save(*args)
        saved.append((begun, time.perf_counter()))

    monkeypatch.setattr(RunTrainer, "_save_checkpoint", timed)
    hook = register_optimizer_step_post_hook(lambda *_: stepped.append(time.perf_counter()))
    try:
        yield (
            lambda first, last: (
                stepped[last - 1]
                - stepped[first - 1]
                - sum(end - begun for begun, end in saved if stepped[first - 1] < begun < stepped[last - 1])
            )
        )
    finally:
        hook.remove()


def test_a_step_takes_what_the_clock_shows_and_waiting_is_reading_alone(train, source, monkeypatch):
    """Between the callbacks of a step lies the reading of rows; what is slow there is the step's, and counted as waiting."""
    from engine.data.collate import LanguageCollator

    collate, took = LanguageCollator.__call__, []

    def slowly(self, rows):
        begun = time.perf_counter()
        time.sleep(0.05)
        batch = collate(self, rows)
        took.append(time.perf_counter() - begun)
        return batch

    monkeypatch.setattr(LanguageCollator, "__call__", slowly)
    with outside_clock(monkeypatch) as seconds:
        run = train({"data.train": [{"path": source(CONVERSATIONS)}], "run.save_steps": 5, "optim.max_steps": 16,
                     "run.logging_steps": 2})  # fmt: skip
    found = lines(run, "metrics")
    told = sum(line["step_seconds"] * (line["step"] - before["step"]) for before, line in pairwise(found))
    assert told == pytest.approx(seconds(found[0]["step"], found[-1]["step"]), rel=0.01)
    assert all(line["data_seconds"] <= line["step_seconds"] for line in found)
    # A batch is read ahead, so the reading of an epoch's first lies before it.
    assert sum(line["data_seconds"] for line in found) / len(found) == pytest.approx(2 * sum(took) / len(took), rel=0.3)


def test_what_a_device_still_computes_of_a_step_is_no_part_of_the_pause_behind_it():
    """A device works behind the host: what it was given before a checkpoint is the steps', and is waited for first."""
    clock, done = StepClock(), []

    def settle():
        done.append(time.sleep(0.2))

    clock.settle = settle
    clock.start(0)
    with clock.pause():
        time.sleep(0.1)
        with clock.pause():
            time.sleep(0.1)
    seconds, _ = clock.lap(2)
    assert len(done) == 1
    assert 0.1 <= seconds < 0.15
    assert 0.2 <= clock.out < 0.3


def test_a_step_that_is_logged_late_keeps_its_end_and_the_reading_behind_it_is_the_next_ones():
    clock = StepClock()
    clock.start(0)
    time.sleep(0.02)
    end = clock.moment()
    clock.reads(time.sleep)(0.1)
    clock.ended = end
    seconds, read = clock.lap(1)
    clock.ended = None
    assert 0.02 <= seconds < 0.1
    assert read == 0
    seconds, read = clock.lap(2)
    assert seconds >= read >= 0.1


def test_saving_and_evaluating_are_no_part_of_a_step(train, source, monkeypatch):
    from engine.run import checkpoint

    commit = checkpoint.commit
    monkeypatch.setattr(checkpoint, "commit", lambda *args: (time.sleep(0.7), commit(*args))[1])
    settings = {"run.save_steps": 2, "optim.max_steps": 6, "run.logging_steps": 1}
    first, *later = lines(train({"data.train": [{"path": source(CONVERSATIONS)}], **settings}), "metrics")
    # Two checkpoints lie between the first step and the last, and no step counts them.
    assert sum(line["step_seconds"] for line in later) <= later[-1]["t"] - first["t"] - 2 * 0.7
