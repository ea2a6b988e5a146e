"""Which of torch's two recorders is asked; that torch records at all is `tests/engine/features/test_upstream.py`'s."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from engine.compat.flight_recorder import last_collective
from engine.run.beat import Collective


def entry(number: int, name: str, retired: bool, group: str) -> dict[str, object]:
    return {
        "record_id": number, "profiling_name": name, "collective_seq_id": number + 1, "retired": retired,
        "process_group": ["0", group],
    }  # fmt: skip


NCCL = [entry(0, "nccl:all_gather", True, "cards"), entry(1, "nccl:all_reduce", False, "cards")]
OVER = [NCCL[0]]
GLOO = [entry(7, "gloo:barrier", False, "hosts")]
GLOO_OVER = [entry(7, "gloo:barrier", True, "hosts")]
REDUCES = Collective("all_reduce", 2, True, "0:cards")
GATHERED = Collective("all_gather", 1, False, "0:cards")
BARRIER = Collective("barrier", 8, True, "0:hosts")


@pytest.mark.parametrize(
    ("nccl", "gloo", "found"),
    [
        (NCCL, [], REDUCES),
        (NCCL, GLOO_OVER, REDUCES),
        (OVER, GLOO, BARRIER),
        (OVER, [], GATHERED),
        ([], GLOO, BARRIER),
        ([], [], None),
    ],
)
def test_a_torch_for_cards_keeps_collectives_of_cards_apart(monkeypatch, nccl, gloo, found):
    """Its recorder of gloo is there as well, and empty in a run that talks by NCCL."""
    library = SimpleNamespace(
        _dump_nccl_trace_json=lambda: json.dumps({"entries": nccl} if nccl else {}).encode(),
        _dump_fr_trace_json=lambda: json.dumps({"entries": gloo}).encode(),
    )
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", library)
    assert last_collective() == found
