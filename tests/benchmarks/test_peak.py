"""What the allocator recorded is told by the lines that asked for it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _peak import in_pools, segments, summary

MIB = 2**20


def event(action, addr, size, line=1, file="/work/engine/a.py"):
    frames = [{"filename": "/torch/_ops.py", "line": 3, "name": "op"}, {"filename": file, "line": line, "name": "room"}]
    return {"action": action, "addr": addr, "size": size * MIB, "frames": frames}


def test_what_is_live_at_the_peak_is_told_and_nothing_else():
    trace = [
        event("alloc", 1, 100, line=7),
        event("alloc", 2, 50, line=8),
        event("alloc", 3, 50, line=8),
        event("free_completed", 1, 100),
        event("alloc", 4, 60, line=9),
        event("free_completed", 99, 10),  # was there before
        event("free_completed", 2, 50),
    ]
    told = summary("arm", trace, 1024 * MIB)
    assert told[0] == f"arm: {1224 / 1024:.2f} GiB at the peak, 1.00 of them before"
    assert [line.split() for line in told[1:3]] == [
        ["100.0", "MiB", "=", "1", "x", "100.00", "MiB", "a.py:7", "room"],
        ["100.0", "MiB", "=", "2", "x", "50.00", "MiB", "a.py:8", "room"],
    ]
    assert told[3].split() == ["0.0", "MiB", "in", "0", "other", "places"]


def test_a_peak_at_the_end_is_told_by_libraries_lines_where_there_are_no_others():
    told = summary("arm", [event("alloc", 1, 5, file="/torch/nn/linear.py")], 0)
    assert told[1].split() == [
        "5.0",
        "MiB",
        "=",
        "1",
        "x",
        "5.00",
        "MiB",
        "_ops.py:3",
        "op",
        "<",
        "linear.py:1",
        "room",
    ]


def test_what_is_held_with_nothing_in_it_is_told_by_the_size_of_its_segments():
    snapshot = [
        {"total_size": 48 * MIB, "active_size": 0},
        {"total_size": 48 * MIB, "active_size": 47 * MIB},
        {"total_size": 20 * MIB, "active_size": 15 * MIB},
    ]
    assert [line.split() for line in segments(snapshot)] == [
        ["54.0", "MiB", "held", "with", "nothing", "in", "them"],
        ["49.0", "MiB", "of", "2", "x", "48.00", "MiB"],
        ["5.0", "MiB", "of", "1", "x", "20.00", "MiB"],
    ]


def test_what_recorded_graphs_hold_is_counted_also_where_nothing_is_in_it():
    snapshot = [
        {"total_size": 48 * MIB, "active_size": 48 * MIB, "segment_pool_id": (0, 0)},
        {"total_size": 20 * MIB, "active_size": 0, "segment_pool_id": (0, 1)},
        {"total_size": 2 * MIB, "active_size": MIB, "segment_pool_id": [0, 2]},
    ]
    assert in_pools(snapshot) == 22 * MIB
