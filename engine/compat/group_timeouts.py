"""For how long the processes of each group wait for each other in a collective: as long in all groups.

Groups that torch makes itself (a mesh's: replicas of FSDP2, rings of context parallelism) take its defaults, ten minutes for
NCCL and thirty for gloo, and not what the first group was made with.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import distributed_c10d


def wait_as_long(seconds: float) -> int:
    """Has each group that this process is in wait so many seconds from now on; how many groups there are."""
    groups = list(distributed_c10d._world.pg_map)
    for group in groups:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
    return len(groups)
