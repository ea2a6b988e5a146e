"""torch's flight recorders: which collective this process began last, and whether it is over.

There are two, and none knows what the other keeps: NCCL's groups record by themselves, gloo's from torch 2.13 on and where
`TORCH_FR_BUFFER_SIZE` is set. A torch without CUDA has the second alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from engine.run.beat import Collective

SIZE = "TORCH_FR_BUFFER_SIZE"
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def last_collective() -> Collective | None:
    """Of all groups the collective that began last, one still under way first; None where nothing is recorded. May be asked
    from any thread."""
    library = sys.modules.get("torch._C._distributed_c10d")
    dumps = (getattr(library, name, None) for name in _DUMPS)
    found = [last for dump in dumps if dump is not None and (last := _last(dump)) is not None]
    return next((last for last in found if last.active), found[0] if found else None)


def _last(dump: Callable[[], bytes | str]) -> Collective | None:
    entries = json.loads(dump()).get("entries")
    if not entries:
        return None
    last = max(entries, key=lambda entry: int(entry["record_id"]))
    operation = str(last["profiling_name"]).rpartition(":")[2]
    group = ":".join(map(str, last["process_group"]))
    return Collective(operation, int(last["collective_seq_id"]), not last["retired"], group)
