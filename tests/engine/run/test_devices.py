"""Which GPUs a run gets."""

from __future__ import annotations

import pytest

from engine.errors import WorkbenchError
from engine.run import devices
from engine.run.devices import Card, Choice, _allowed, choose

GiB = 1 << 30
FOUR = [Card(str(n), free, 80 * GiB - free) for n, free in enumerate([10 * GiB, 79 * GiB, 79 * GiB, 60 * GiB])]


@pytest.mark.parametrize(
    ("wanted", "taken", "found", "expected"),
    [
        ("auto", (), [], Choice((), 1)),
        ("auto", (), FOUR, Choice(("1",), 1)),
        ("auto", ("1",), FOUR, Choice(("2",), 1)),
        ("auto", ("1", "2"), FOUR, Choice(("1",), 1)),
        (None, (), FOUR[:1], Choice(("0",), 1)),
        ([0, 3], (), FOUR, Choice(("0", "3"), 2)),
        ([3, 0], (), FOUR, Choice(("3", "0"), 2)),
        (2, (), FOUR, Choice(("1", "2"), 2)),
        (3, ("1",), FOUR, Choice(("0", "2", "3"), 3)),
        ([0], (), [Card("GPU-abc", GiB, 0)], Choice(("GPU-abc",), 1)),
    ],
)
def test_choice(wanted, taken, found, expected):
    assert choose(wanted, taken, found) == expected


@pytest.mark.parametrize(
    ("wanted", "words"),
    [([7], "no GPU 7 here; there are 4 GPUs"), (5, "5 GPUs were asked for"), (0, "must be 1 or more"), ([0, 0], "twice"), (True, "must be auto"), (["x"], "numbers of GPUs"), ("gpu", "must be auto"), ([-1], "no GPU -1")],
)  # fmt: skip
def test_what_is_not_here_is_said_with_what_is(wanted, words):
    with pytest.raises(WorkbenchError, match=words):
        choose(wanted, (), FOUR)


@pytest.mark.parametrize(("cores", "words"), [(2, "has no GPU and 2 CPU cores"), (1, "has no GPU and 1 CPU core[.]")])
def test_without_a_gpu_a_number_is_so_many_processes_each_on_a_core_of_its_own(monkeypatch, cores, words):
    monkeypatch.setattr(devices, "cores", lambda: cores)
    assert choose(cores, (), []) == Choice((), cores)
    with pytest.raises(WorkbenchError, match=words):
        choose(cores + 1, (), [])


def test_a_machine_without_gpu_refuses_a_numbered_one():
    with pytest.raises(WorkbenchError, match="this machine shows none"):
        choose([0], (), [])


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        (None, ["0", "1"]),
        ("", []),
        ("1", ["1"]),
        ("1,0", ["1", "0"]),
        ("GPU-bb", ["GPU-bb"]),
        ("0,7,1", ["0"]),
        ("-1", []),
        ("MIG-cc", ["MIG-cc"]),
    ],
)
def test_a_schedulers_choice_is_kept_to(allowed, names):
    found = [("GPU-aa11", Card("0", GiB, 0)), ("GPU-bb22", Card("1", GiB, 0))]
    assert [card.name for card in _allowed(found, allowed)] == names
