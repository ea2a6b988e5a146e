"""Events: whole lines, numbered, safe against every kind of damage to the file."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import time

import pytest

from engine.errors import WorkbenchError
from engine.run import events
from engine.run.events import EventWriter, Thinning, last_numbers
from engine.run.store import RunFolder
from engine.run.tail import Tail


def lines(run: RunFolder) -> list[dict]:
    return [json.loads(line) for line in run.events.read_bytes().splitlines()]


def test_numbers_that_are_not_finite_become_null_and_are_said_once(run):
    with EventWriter(run) as writer:
        for step, loss in enumerate([1.0, math.nan, math.inf, 0.5, math.nan], start=1):
            writer.write("metrics", step=step, loss=loss, grad_norm=1.0)
    found = lines(run)
    assert [event["loss"] for event in found if event["kind"] == "metrics"] == [1.0, None, None, 0.5, None]
    assert [(e["step"], e["what"]) for e in found if e["kind"] == "diverged"] == [(2, "loss"), (5, "loss")]
    assert [event["seq"] for event in found] == list(range(len(found)))


def test_resume_counts_seq_and_segment_on(run):
    with EventWriter(run) as writer:
        assert writer.segment == 0
        writer.write("phase", name="a")
    with EventWriter(run) as writer:
        assert (writer.segment, writer.write("phase", name="b")) == (1, 1)
    with EventWriter(run, segment=1) as writer:
        assert (writer.segment, writer.write("phase", name="c")) == (1, 2)


@pytest.mark.parametrize(
    "junk", [b"", b"\0" * 5000, b'{"seq":"x"}\n', b"[1,2]\nnull\n", b"\xff\xfe\n" * 50, b"x" * 300_000 + b"\n"]
)
def test_a_torn_tail_is_cut_and_junk_before_it_passed_over(run, junk):
    with EventWriter(run) as writer:
        writer.write("phase", name="a")
    whole = run.events.read_bytes() + (junk if junk.endswith(b"\n") else b"")
    for cut in range(1, 40):
        run.events.write_bytes(
            whole
            + junk * (not junk.endswith(b"\n"))
            + b'{"v":1,"seq":1,"t":1.5,"rank":0,"segment":0,"kind":"phase"'[:cut]
        )
        with EventWriter(run, segment=0) as writer:
            assert writer.write("failed", cause="x") == 1
        found = Tail(run.events).read()
        assert [event["kind"] for event in found] == ["phase", "failed"]
        assert last_numbers(run.events) == (1, 0, run.events.stat().st_size, True)


def test_a_torn_tail_is_read_at_no_byte_and_whole_at_the_last(run):
    line = b'{"v":1,"seq":0,"t":1.5,"rank":0,"segment":0,"kind":"phase","name":"\xc3\xa4"}\n'
    tail = Tail(run.events)
    for cut in range(len(line)):
        run.events.write_bytes(line[:cut])
        assert tail.read() == []
    run.events.write_bytes(line)
    assert [event["name"] for event in tail.read()] == ["ä"]
    assert tail.read() == []
    assert tail.bad_lines == 0


def test_nul_blocks_garbage_unknown_kinds_and_lines_of_50_mb_are_passed_over_in_bounded_memory(run):
    good = b'{"kind":"phase","name":"%d"}\n'
    with open(run.events, "wb") as file:
        file.write(good % 1 + b"\0" * 70_000 + good % 2 + b"not json\n\n" + b'{"kind":7}\n{"no":"kind"}\n')
        for _ in range(50):
            file.write(b"y" * (1 << 20))
        file.write(b"\n" + good % 3 + b'{"kind":"from the future","x":1}\n' + b'{"kind":"phase"} trailing\n')
    script = (
        "import sys,re;from engine.run.tail import Tail;t=Tail(sys.argv[1]);"
        "print([e.get('name',e['kind']) for e in t.read()], t.bad_lines, t.behind());"
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])//1024)"
    )
    said = subprocess.run([sys.executable, "-c", script, str(run.events)], capture_output=True, text=True, check=True)
    first, memory = said.stdout.splitlines()
    assert first == "['1', '2', '3', 'from the future'] 5 0"
    assert int(memory) < 45


def test_a_file_that_is_cut_or_replaced_is_read_again(run):
    with EventWriter(run) as writer:
        for number in range(5):
            writer.write("phase", name=str(number))
    tail = Tail(run.events)
    assert len(tail.read()) == 5
    run.events.write_bytes(b'{"kind":"phase","name":"new"}\n')
    assert [event["name"] for event in tail.read()] == ["new"]
    assert tail.restarts == 1


def test_limit_is_kept_and_nothing_is_lost_between_reads(run):
    with EventWriter(run) as writer:
        for number in range(1000):
            writer.write("metrics", step=number, loss=1.0)
    tail, seen = Tail(run.events), []
    while got := tail.read(7):
        assert len(got) <= 7
        seen += [event["step"] for event in got]
    assert seen == list(range(1000))


def test_every_step_is_logged_up_to_ten_thousand_then_thinned_as_started_says():
    short = Thinning(max_steps=5000)
    assert all(short.wants(step) for step in range(1, 5001))
    long = Thinning(max_steps=2_000_000)
    policy = long.started()
    kept = [step for step in range(1, 2_000_001) if long.wants(step)]
    expected = [
        s for s in range(1, 2_000_001) if s <= policy["thin_after"] or s % policy["keep_every"] == 0 or s == 2_000_000
    ]
    assert kept == expected
    assert len(kept) < 101_000
    assert Thinning(logging_steps=7, max_steps=1_000_000).keep_every % 7 == 0


def test_a_long_text_is_cut_and_says_so(run):
    with EventWriter(run) as writer:
        writer.write("sample", step=1, index=0, prompt="p", completion="x" * 1_000_000)
        writer.write("receipt", entries=[{"feature": f"f{n}", "detail": "y" * 5000} for n in range(200)])
    sizes = [len(line) for line in run.events.read_bytes().splitlines()]
    assert max(sizes) <= events.MAX_LINE
    assert all(event["cut"] for event in lines(run))


def test_numbers_of_other_libraries_are_plain(run):
    class Scalar:
        def item(self):
            return 2.5

    with EventWriter(run) as writer:
        writer.write("metrics", step=1, loss=Scalar(), path=run.path)
    assert lines(run)[0]["loss"] == 2.5


def test_time_does_not_go_back_with_the_wall_clock(run, monkeypatch):
    with EventWriter(run) as writer:
        writer.write("phase", name="a")
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() - 3600)
        writer.write("phase", name="b")
    first, second = lines(run)
    assert 0 <= second["t"] - first["t"] < 5


FULL = """
import resource, sys
from engine.errors import WorkbenchError
from engine.run.events import EventWriter
from engine.run.store import RunFolder
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run = RunFolder(sys.argv[1])
writer = EventWriter(run)
writer.write("phase", name="a" * 500)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    for step in range(100):
        writer.write("metrics", step=step, loss=1.0)
except (WorkbenchError, OSError) as problem:
    print(problem)
"""


def test_a_write_that_finds_no_room_leaves_only_whole_lines(run):
    said = subprocess.run([sys.executable, "-c", FULL, str(run.path)], capture_output=True, text=True, check=True)
    assert said.stdout.strip()
    data = run.events.read_bytes()
    assert data.endswith(b"\n")
    assert len(data) <= 2000
    assert len(lines(run)) > 5
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_full_disk_gives_back_the_ballast_for_the_last_word(run, monkeypatch):
    real, full = os.write, [True]

    def write(handle, data):
        if full and run.ballast.exists():
            raise OSError(28, "No space left on device")
        return real(handle, data)

    with EventWriter(run) as writer:
        monkeypatch.setattr(os, "write", write)
        writer.write("failed", cause="disk full")
        assert not run.ballast.exists()
        monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(WorkbenchError, match=r"the disk is full: .* needed, .* free"):
            writer.write("phase", name="x")
        monkeypatch.setattr(os, "write", real)
    assert [event["kind"] for event in lines(run)] == ["failed"]


def test_the_events_file_is_private_and_no_link_is_followed(run, tmp_path):
    with EventWriter(run) as writer:
        writer.write("phase", name="a")
    assert run.events.stat().st_mode & 0o077 == 0
    run.events.unlink()
    target = tmp_path / "elsewhere"
    run.events.symlink_to(target)
    with pytest.raises(WorkbenchError, match="symbolic link"):
        EventWriter(run)
    assert not target.exists()


def test_a_metrics_event_costs_at_most_a_few_tens_of_microseconds(run):
    numbers = {f"metric_{n}": 1.234567 * n for n in range(12)}
    with EventWriter(run) as writer:
        best = math.inf
        for _ in range(5):
            begun = time.process_time()
            for step in range(500):
                writer.write("metrics", step=step, **numbers)
            best = min(best, (time.process_time() - begun) / 500)
    assert best < 60e-6  # 22 us measured; the bound leaves room for a busy machine
