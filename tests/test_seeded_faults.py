"""Each seeded fault still finds the text that it would break: the code moves on, and a list that nobody runs goes stale."""

from __future__ import annotations

from pathlib import Path

from tests.seeded_faults import FAULTS

ROOT = Path(__file__).parent.parent


def test_each_fault_finds_its_text_and_its_tests() -> None:
    stale = [fault for fault in FAULTS if (ROOT / fault.file).read_text("utf-8").count(fault.is_) != 1]
    lost = [path for fault in FAULTS for path in fault.tests.split() if not (ROOT / "tests" / path).exists()]
    assert (stale, lost) == ([], [])
