"""Processes that make the next batches: the same rows in the same order, a bounded number ahead, errors in their own words."""

from __future__ import annotations

import os
import time

import pytest
import torch

from engine.data import vision
from engine.data.vision import ImageBatch
from engine.errors import DataError
from engine.trainers.stream_loader import Dealt, StreamLoader
from tests.engine.seeing import FAMILIES
from tests.engine.trainers.conftest import lines
from tests.engine.trainers.test_against_trl import images_with_answers


@pytest.fixture
def seeing(source, tmp_path, shared_data, request):
    """Settings of a short run on images."""
    family = getattr(request, "param", "gemma3")
    folder = FAMILIES[family](shared_data / "tokenizers/minimind", tmp_path / family)
    rows = source(images_with_answers(tmp_path, 8))
    given = {"model.name": str(folder), "data.train": [{"path": rows}], "data.max_length": 512, "optim.max_steps": 3}
    return {**given, "optim.gradient_accumulation_steps": 1, "optim.per_device_train_batch_size": 2}


@pytest.fixture
def made_by(tmp_path, monkeypatch):
    """Which processes read the images of batches."""
    note, read = tmp_path / "pids", ImageBatch.__call__

    def reading(self, rows, ids):
        with note.open("a") as out:
            out.write(f"{os.getpid()}\n")
        return read(self, rows, ids)

    monkeypatch.setattr(ImageBatch, "__call__", reading)

    def pids():
        found = {int(line) for line in note.read_text().split()}
        note.unlink()
        return found

    return pids


@pytest.mark.parametrize(
    ("seeing", "streaming"),
    [("gemma3", False), pytest.param("qwen2_5_vl", False, marks=pytest.mark.slow), ("qwen2_5_vl", True)],
    indirect=["seeing"],
)
def test_other_processes_make_the_batches_and_nothing_else_changes(train, seeing, made_by, streaming):
    # Five steps are in two epochs, and dropout tells where numbers are drawn that a run without such processes does not draw.
    dropout = {"adapter.kind": "lora", "adapter.r": 4, "adapter.lora_dropout": 0.3, "optim.max_steps": 5}

    def losses(**more):
        run = train({**seeing, **dropout, "data.streaming": streaming, **more})
        found = [event for event in lines(run, "metrics") if "loss" in event]
        # Waiting for a batch is waiting for data, whoever makes it; an epoch's last is there with the one before.
        assert all(event["data_seconds"] > 0 for event in found if event["step"] != 4)
        return [event["loss"] for event in found]

    alone = losses()
    assert made_by() == {os.getpid()}
    together = losses(**{"data.dataloader_num_workers": 2})
    pids = made_by()
    assert os.getpid() not in pids
    assert len(pids) == (2 if streaming else 4)  # two in each epoch
    assert together == alone
    assert len(alone) == 5


@pytest.mark.parametrize("streaming", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_batch_that_waits_for_the_step_before_on_its_way_to_the_device_does_not_wait_for_data(
    train, seeing, monkeypatch, streaming
):
    import accelerate.data_loader

    from engine.trainers import reading, stream_loader
    from engine.trainers.run_trainer import RunTrainer

    step, send, busy = RunTrainer.training_step, accelerate.data_loader.send_to_device, [0.0]

    def stepping(*args, **kwargs):
        found = step(*args, **kwargs)
        busy[0] = time.monotonic() + 0.7  # a device that goes on computing when the host is done
        return found

    def waiting(*given):
        time.sleep(max(0.0, busy[0] - time.monotonic()))

    def sending(*args, **kwargs):
        waiting()
        return send(*args, **kwargs)

    monkeypatch.setattr(RunTrainer, "training_step", stepping)
    monkeypatch.setattr(reading, "wait_for_steps", waiting)
    monkeypatch.setattr(accelerate.data_loader, "send_to_device", sending)
    monkeypatch.setattr(stream_loader, "send_to_device", sending)
    run = train({**seeing, "data.streaming": streaming, "data.dataloader_num_workers": 2})
    waits = {event["step"]: event["data_seconds"] for event in lines(run, "metrics") if "data_seconds" in event}
    assert waits[2] < 0.5
    assert waits[3] < 0.5


def test_a_second_epoch_decodes_nothing_while_images_are_kept(train, seeing, monkeypatch):
    given, decoded, asked = {**seeing, "optim.max_steps": 8}, [], []
    plain, decode = ImageBatch.__call__, vision.open_image

    def decoding(reference):
        decoded.append(reference)
        return decode(reference)

    def asking(self, rows, ids):
        count = len(decoded)
        made = plain(self, rows, ids)
        asked.append(len(decoded) - count)
        return made

    monkeypatch.setattr(vision, "open_image", decoding)
    monkeypatch.setattr(ImageBatch, "__call__", asking)
    found = {}
    for size in (0, 64):
        asked.clear()
        run = train({**given, "data.image_cache_size": size})
        found[size] = [event["loss"] for event in lines(run, "metrics") if "loss" in event], list(asked)
    assert found[0][0] == found[64][0]
    without, kept = found[0][1], found[64][1]
    assert all(without)
    assert sum(kept) < sum(without)
    assert not any(kept[4:])  # four batches are an epoch


def test_an_image_that_cannot_be_read_there_ends_the_run_in_its_own_words(train, seeing, monkeypatch):
    def broken(self, rows, ids):
        raise DataError("cat.png: the image cannot be read (it is cut or broken)", "Take it out.")

    monkeypatch.setattr(ImageBatch, "__call__", broken)
    run = train({**seeing, "data.dataloader_num_workers": 1}, code=1)
    told = run.events.read_text()
    assert "cat.png: the image cannot be read" in told
    assert "worker process" not in told


class Rows:
    """A stream of numbers in three epochs."""

    def __init__(self, count=10, epochs=3):
        self.count, self.epochs, self.place, self.batch, self.keep = count, epochs, 0, 0, 0

    def next_row(self):
        if self.over:
            return None
        self.place += 1
        return self.place % self.count

    def state(self):
        return {"row": self.place}

    def go_to(self, state):
        self.place = state["row"]

    @property
    def epoch(self):
        return self.place / self.count

    @property
    def epochs_over(self):
        return self.place // self.count

    @property
    def over(self):
        return self.epochs_over >= self.epochs


def collate(rows):
    return {"ids": torch.tensor(rows)}


@pytest.mark.parametrize("dealt", [Dealt(4), Dealt(2, ranks=2, rank=1), Dealt(4, copies=2, times=2)])
def test_a_stream_goes_on_behind_the_batch_that_was_given_last_however_many_are_ahead(dealt):
    def read(workers, given=None, most=100):
        loader = StreamLoader(Rows(), dealt, collate, torch.device("cpu"), workers, 3)
        if given is not None:
            loader.load_state_dict(given)
        found = []
        while len(found) < most and (batch := loader.next_batch()) is not None:
            ids = batch["ids"].tolist() if isinstance(batch, dict) else batch
            found.append((ids, loader.epoch, loader.epoch_over(), loader.state_dict(), loader.over))
        return found

    alone = read(0)
    assert len(alone) > 5
    assert alone[-1][-1] or dealt.copies > 1
    assert read(2) == alone
    for place in (1, 2, 4):
        assert read(2, alone[place - 1][3]) == alone[place:]


@pytest.mark.parametrize("place", [3, 5, 10])
def test_an_epoch_that_was_over_before_a_resume_is_not_told_again(place):
    """Ten rows an epoch, two a batch: in the middle of the first epoch, at its end, at that of the second."""

    def told(loader, most):
        found = []
        while len(found) < most and loader.next_batch() is not None:
            found.append(loader.epoch_over())
        return found

    loader = StreamLoader(Rows(), Dealt(2), collate, torch.device("cpu"))
    before = told(loader, place)
    again = StreamLoader(Rows(), Dealt(2), collate, torch.device("cpu"))
    again.load_state_dict(loader.state_dict())
    assert [*before, *told(again, 100)] == [number % 5 == 0 for number in range(1, 16)]


@pytest.mark.parametrize("factor", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_so_many_batches_are_made_ahead_and_no_more(train, seeing, tmp_path, monkeypatch, factor):
    from engine.trainers.run_trainer import RunTrainer

    note, step, read = tmp_path / "made", RunTrainer.training_step, ImageBatch.__call__
    ahead = []
    most = min(8, 2 + 2 * factor)  # accelerate takes one batch more than the one it gives

    def reading(self, rows, ids):
        with note.open("a") as out:
            out.write("x")
        return read(self, rows, ids)

    def stepping(self, model, inputs, *args, **kwargs):
        if self.state.global_step == 0:
            end = time.monotonic() + 60
            while not (note.exists() and len(note.read_text()) >= most) and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(0.3)  # another would be there by then: each takes some milliseconds
            ahead.append(len(note.read_text()))
        return step(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(ImageBatch, "__call__", reading)
    monkeypatch.setattr(RunTrainer, "training_step", stepping)
    workers = {"data.dataloader_num_workers": 2, "data.dataloader_prefetch_factor": factor}
    train({**seeing, "optim.per_device_train_batch_size": 1, "optim.max_steps": 2, **workers})
    assert ahead == [most]


def test_the_receipt_says_how_many_processes_read_images_and_why(train, seeing, made_by, tmp_path):
    from engine.config.files import as_yaml, parse
    from engine.run.store import create

    def entry(run):
        (found,) = (each for each in lines(run, "receipt")[0]["entries"] if each["feature"] == "loader processes")
        return found["requested"], found["effective"], found["detail"]

    given = {**seeing, "optim.max_steps": 1, "data.image_cache_size": 8}
    asked = train({**given, "data.dataloader_num_workers": 2})
    assert len(made_by()) == 2
    kept = "8.0 MiB of decoded images kept"
    assert entry(asked) == (2, 2, f"{kept} and 2 batches ahead in each")
    # As a launch keeps it where `auto` has become a number: with its reason beside the config.
    reason = "the images of a batch take a core 1.0 s, and it is computed in 1.5 s"
    auto = {"data.dataloader_num_workers": {"value": 2, "reason": reason}}
    settings = as_yaml(parse(asked.config.read_text()).mapping)
    chosen = train(folder=create(tmp_path / "chosen", settings, {"method": "sft", "model": "tiny", "auto": auto}))
    assert len(made_by()) == 2
    assert entry(chosen) == ("auto", 2, f"{kept} and 2 batches ahead in each; {reason}")
    alone = train(given)
    assert made_by() == {os.getpid()}
    assert entry(alone)[1:] == (0, f"the training process reads them between steps; {kept}")
