"""The list that a window opens on: what is cut where it is narrow."""

from __future__ import annotations

import time

import pytest

from engine.session.start import Entry
from workbench.panels.start_table import _line, _rooms


@pytest.mark.parametrize("width", [80, 100])
def test_a_number_is_never_cut_and_a_cause_may_be(width: int) -> None:
    kept = {"when": time.time() - 600, "bytes": 3 << 20, "method": "GRPO", "word": "finished"}
    told = "held-out reward -0.0151"
    entries = [
        Entry("run", "1", "a-run-of-mine-0001", "finished", detail=told, **kept),
        Entry("run", "2", "another-0002", "failed", detail="optim.learning_rate: far too high, " * 4, **kept),
    ]
    rooms = _rooms(entries, width)
    first, second = ("".join(text for text, _ in _line(entry, rooms, width, False)) for entry in entries)
    assert told in first
    assert "…" in second
    assert max(len(first), len(second)) <= width
