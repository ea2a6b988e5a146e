"""accelerate's FSDP2 where it has none: on a CPU it makes DDP of it and says nothing. The one way past that.

On GPUs nothing is done here: accelerate takes the plugin of the arguments itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def without_mesh_on_cpu(arguments: dict[str, Any]) -> dict[str, Any]:
    """An accelerator's own arguments: on a CPU without sizes of a mesh, which it refuses there; `take_on_cpu` takes them."""
    if not torch.cuda.is_available():
        arguments.pop("parallelism_config", None)
    return arguments


def take_on_cpu(accelerator: Accelerator, arguments: Mapping[str, Any], sizes: ParallelismConfig | None) -> bool:
    """Has this accelerator shard as it would on GPUs, by the arguments of accelerate's plugin and the sizes of the mesh;
    whether that was needed. Its state is that of all accelerators of the process."""
    state = accelerator.state
    if state.distributed_type != DistributedType.MULTI_CPU:
        return False
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**arguments)
    state.parallelism_config = sizes
    state.device_mesh = None if sizes is None else sizes.get_device_mesh("cpu")
    state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return True
