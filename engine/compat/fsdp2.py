"""accelerate's FSDP2 where it has none: on a CPU it makes DDP of it and says nothing. The one way past that.

On GPUs nothing is done here: accelerate takes the plugin of the arguments itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def take_on_cpu(accelerator: Accelerator, arguments: Mapping[str, Any]) -> bool:
    """Has this accelerator shard as it would on GPUs, by the arguments of accelerate's plugin; whether that was needed. Its
    state is that of all accelerators of the process."""
    state = accelerator.state
    if state.distributed_type != DistributedType.MULTI_CPU:
        return False
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**arguments)
    state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return True
