"""torch's flight recorder: which collective this process began last, and whether it is over.

NCCL's process groups are recorded by themselves, gloo's from torch 2.13 on and where `TORCH_FR_BUFFER_SIZE` is set.
"""

from __future__ import annotations

import json
import sys

from engine.run.beat import Collective

SIZE = "TORCH_FR_BUFFER_SIZE"
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def last_collective() -> Collective | None:
    """Of all groups the collective that began last; None where nothing is recorded. May be asked from any thread."""
    library = sys.modules.get("torch._C._distributed_c10d")
    dump = next((found for name in _DUMPS if (found := getattr(library, name, None)) is not None), None)
    entries = json.loads(dump()).get("entries") if dump is not None else None
    if not entries:
        return None
    last = max(entries, key=lambda entry: int(entry["record_id"]))
    operation = str(last["profiling_name"]).rpartition(":")[2]
    group = ":".join(map(str, last["process_group"]))
    return Collective(operation, int(last["collective_seq_id"]), not last["retired"], group)
