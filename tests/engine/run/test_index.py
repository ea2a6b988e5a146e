"""Opening a run: newest first, the whole soon, at once the next time, and never a wrong index."""

from __future__ import annotations

import json
import os
import struct
import time
import zlib

import pytest

from engine.run import snapshot
from engine.run.events import EventWriter
from engine.run.index import HEAD_BYTES, Watch, open_view, peek
from engine.run.tail import Tail
from engine.run.view import RunView, fold

LONG = 12_000


def write(run, count, *, first=1, segment=None, final="finished"):
    with EventWriter(run, segment=segment) as writer:
        if first == 1:
            writer.write("started", method="sft", model="tiny", max_steps=count)
            writer.write("receipt", entries=[{"feature": "attention", "effective": "sdpa"}])
        lines = []
        for step in range(first, first + count):
            event = {
                "v": 1,
                "seq": writer.seq + 1,
                "t": 1e9 + step,
                "rank": 0,
                "segment": writer.segment,
                "kind": "metrics",
            }
            lines.append(json.dumps(event | {"step": step, "loss": 1.0 / step, "grad_norm": float(step % 7)}))
            writer.seq += 1
        with open(run.events, "a") as file:
            file.write("\n".join(lines) + "\n")
        if final:
            writer.write(final, step=first + count - 1)
    run.update_json(state=final or "running", segment=0)


def whole(run) -> RunView:
    view, tail = RunView(), Tail(run.events)
    while events := tail.read(1000):
        fold(view, events)
    view.id, view.bad_lines = run.id, tail.bad_lines
    return view


def loaded(watch: Watch) -> Watch:
    give_up = time.monotonic() + 60
    while watch.loading < 1.0:
        assert time.monotonic() < give_up
        watch.poll()
        time.sleep(0.02)
    return watch


def test_a_long_run_shows_its_newest_points_first_and_all_of_it_soon(run):
    write(run, LONG)
    with open_view(run) as watch:
        assert watch.loading < 1.0
        assert (watch.view.state, watch.view.step, watch.view.method) == ("finished", LONG, "sft")
        assert list(watch.view.series["loss"].points(start=LONG - 9_999)[0]) == list(range(LONG - 9_999, LONG + 1))
        assert watch.view.receipt[0]["effective"] == "sdpa"
        loaded(watch)
        assert watch.view.as_json() == whole(run).as_json()
        assert watch.view.series == whole(run).series
        assert len(watch.view.series["loss"]) == LONG
    with open_view(run) as again:
        assert again.loading == 1.0
        assert again.view.series == whole(run).series
        assert again.view.as_json() == whole(run).as_json()


def test_what_comes_after_the_index_is_read_from_the_file(run):
    write(run, LONG, final=None)
    run.update_json(state="running")
    view = whole(run)
    assert snapshot.save(run, view, run.events.stat().st_size)
    write(run, 100, first=LONG + 1, segment=0)
    with open_view(run) as watch:
        assert watch.loading == 1.0
        assert watch.view.series == whole(run).series
        assert watch.view.state == "finished"


@pytest.mark.parametrize(
    "damages",
    [("deleted", "truncated", "flipped", "empty", "garbage", "other run", "events rewritten"), ("a folder",)],
    ids=["a file", "a folder"],
)
def test_an_index_that_cannot_be_believed_is_built_again(run, damages):
    write(run, LONG)
    with open_view(run) as watch:
        loaded(watch)
    path = run.index / snapshot.NAME
    for damage in damages:
        assert snapshot.load(run) is not None, f"before {damage}"
        data = path.read_bytes()
        if damage == "deleted":
            path.unlink()
        elif damage == "truncated":
            path.write_bytes(data[:-100])
        elif damage == "flipped":
            path.write_bytes(data[:-50] + bytes([data[-50] ^ 1]) + data[-49:])
        elif damage == "empty":
            path.write_bytes(b"")
        elif damage == "garbage":
            path.write_bytes(b"\xff" * len(data))
        elif damage == "other run":
            text = run.events.read_text().replace('"model":"tiny"', '"model":"tony"')
            run.events.write_text(text)
        elif damage == "events rewritten":
            lines = run.events.read_text().splitlines()
            run.events.write_text("\n".join(lines[: LONG // 2]) + "\n")
        else:
            path.unlink()
            path.mkdir()
        assert snapshot.load(run) is None, damage
        good = whole(run)
        with open_view(run) as watch:
            loaded(watch)
            assert watch.view.series == good.series, damage
            assert watch.view.model == good.model, damage


def test_poll_tells_whether_something_changed_and_follows_a_live_run(run):
    with EventWriter(run) as writer, open_view(run) as watch:
        run.update_json(state="running", supervisor_pid=os.getpid())
        writer.write("started", method="dpo", model="m", max_steps=10)
        assert watch.poll()
        assert not watch.poll()
        writer.write("metrics", step=1, loss=0.5)
        assert watch.poll()
        assert watch.view.latest == {"loss": 0.5}


def test_a_file_that_is_replaced_under_the_watch_is_read_anew(run):
    write(run, 50)
    with open_view(run) as watch:
        run.events.unlink()
        write(run, 5)
        watch.poll()
        watch.poll()
        assert watch.view.step == 5
        assert len(watch.view.series["loss"]) == 5


@pytest.mark.parametrize(
    ("values", "segment", "events", "expected"),
    [
        ({"state": "queued"}, None, None, "queued"),
        ({"state": "lost", "message": "Gone."}, 0, None, "lost"),
        ({"state": "failed", "message": "Gone."}, 0, None, "failed"),
        ({"state": "starting"}, 1, "stopped", "starting"),
        ({"state": "stopping"}, 0, None, "stopping"),
        ({"state": "running"}, 0, "finished", "finished"),
    ],
)
def test_the_state_is_what_events_and_folder_say_together(run, values, segment, events, expected):
    if segment is not None:
        write(run, 3, final=events)
    run.update_json(**values, segment=segment)
    with open_view(run) as watch:
        assert watch.view.state == expected
        watch.poll()
        assert watch.view.state == expected


def test_peek_reads_only_the_ends(run):
    write(run, LONG)
    view = peek(run).view
    assert (view.state, view.step, view.method, view.model) == ("finished", LONG, "sft", "tiny")
    assert len(view.series["loss"]) < 5_000


def test_peek_knows_what_a_resume_between_the_ends_changed(run):
    write(run, LONG, final="stopped")
    with EventWriter(run, segment=1) as writer:
        writer.write("phase", name="load")
        writer.write("started", method="sft", model="tiny", max_steps=3 * LONG, resumed_from_step=LONG)
        writer.write("receipt", entries=[{"feature": "attention", "effective": "flex_attention"}])
        writer.write("best", step=9_000, metric="eval_loss", value=0.5)
    write(run, LONG // 2, first=LONG + 1, segment=1, final=None)
    with EventWriter(run, segment=1) as writer:
        writer.write("best", step=LONG + 7, metric="eval_loss", value=0.25)
    write(run, LONG // 2, first=LONG * 3 // 2 + 1, segment=1, final="stopped")
    view, known = peek(run).view, whole(run)
    assert run.events.stat().st_size - (1 << 20) > 2 * HEAD_BYTES  # the resume lies blocks before the end
    assert (view.step, view.max_steps, view.segment) == (2 * LONG, 3 * LONG, 1)
    assert view.best == known.best == {"step": LONG + 7, "metric": "eval_loss", "value": 0.25}
    assert view.receipt == known.receipt
    assert view.receipt[0]["effective"] == "flex_attention"
    assert len(view.series["loss"]) < 5_000


def test_the_log_is_redacted_and_safe(run):
    home = os.path.expanduser("~")
    run.log.write_bytes(
        b"10%\r50%\r100%\n\x1b]0;title\x07 hf_abcdefghijklmnopqrstuvwxyz\n" + f"{home}/secret\n".encode()
    )
    with open_view(run) as watch:
        assert watch.log() == ["100%", "␛]0;title␇ [hidden]", "~/secret"]
        assert watch.log(1) == ["~/secret"]


def test_a_folder_that_cannot_be_written_is_watched_all_the_same(run, monkeypatch):
    write(run, LONG)
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: False if mode == os.W_OK else real(path, mode))
    with open_view(run) as watch:
        loaded(watch)
        assert watch.view.series == whole(run).series
    assert list(run.index.iterdir()) == []


def forged(run, change):
    """The run's own snapshot with its header changed and all sums put right, as a stranger who knows the format can."""
    path = run.index / snapshot.NAME
    data = path.read_bytes()
    start = len(b"workbench view 1\n") + 8
    size = int.from_bytes(data[start - 8 : start], "little")
    header, body = json.loads(data[start : start + size]), data[start + size :]
    body = change(header, body) or body
    header["crc"] = zlib.crc32(body)
    text = json.dumps(header).encode()
    path.write_bytes(data[: start - 8] + len(text).to_bytes(8, "little") + text + body)


def set_in(*path):
    *place, value = path

    def change(header, body):
        at = header
        for key in place[:-1]:
            at = at[key]
        at[place[-1]] = value

    return change


def not_finite(header, body):
    return body[:-8] + struct.pack("<d", float("nan"))


FORGED = {
    "series no mapping": set_in("series", [1, 2]),
    "view no mapping": set_in("view", [1]),
    "a state unknown": set_in("view", "state", "\x1b]0;x"),
    "a field of another type": set_in("view", "max_steps", "many"),
    "a field too many": set_in("view", "more", 1),
    "samples no mappings": set_in("view", "samples", [7]),
    "samples without keys": set_in("view", "samples", [{"step": 1}]),
    "a checkpoint's step a text": set_in(
        "view", "checkpoints", [{"step": "x", "path": "", "bytes": 1, "seconds": 1.0, "state": "committed"}]
    ),
    "controls a list": set_in("view", "controls", [1]),
    "progress of texts": set_in("view", "progress", {"what": 1, "done": "x", "total": "y", "unit": 2}),
    "latest texts": set_in("view", "latest", {"loss": "low"}),
    "time not a number": set_in("view", "eta_seconds", float("nan")),
    "a number past all": set_in("view", "step", 10**400),
    "the last step short": set_in("view", "_last_step", [1]),
    "the place negative": set_in("offset", -1),
    "the place a text": set_in("offset", "1"),
    "columns of another type": set_in("series", "loss", 0, 1, 0, 0, "b"),
    "a column longer than the file": set_in("series", "loss", 0, 1, 0, 1, 1 << 40),
    "a level too many": lambda header, body: header["series"].update(loss=header["series"]["loss"] * 20),
    "no level": set_in("series", "loss", []),
    "deep": lambda header, body: header.update(view=json.loads("[" * 900 + "]" * 900)),
    "a value not finite": not_finite,
}


@pytest.mark.parametrize("opened", [["deep"], pytest.param(list(FORGED), marks=pytest.mark.slow)], ids=["one", "all"])
def test_a_forged_index_is_built_again_and_never_shown(run, opened):
    """None is taken for an index; that a window builds it again then is looked at for those of `opened`."""
    write(run, LONG)
    with open_view(run) as watch:
        loaded(watch)
    good, index = whole(run), (run.index / snapshot.NAME).read_bytes()
    for name, change in FORGED.items():
        assert snapshot.load(run) is not None, f"before {name}"
        forged(run, change)
        assert snapshot.load(run) is None, name
        if name not in opened:
            (run.index / snapshot.NAME).write_bytes(index)
            continue
        with open_view(run) as watch:
            loaded(watch)
            assert watch.view.series == good.series, name
            shown = watch.view.state, watch.view.step, watch.view.samples
            assert shown == (good.state, good.step, good.samples), name


def test_an_index_that_is_a_pipe_holds_nobody_up(run):
    write(run, 10)
    os.mkfifo(run.index / snapshot.NAME)
    begun = time.monotonic()
    assert snapshot.load(run) is None
    assert time.monotonic() - begun < 20  # a pipe that nobody writes to is silent for ever
