"""The processes in which torch's compiler makes its kernels, started ahead of the first graph.

They import torch before they serve, some seconds on a slow host. The compiler starts them when it is handed its first graph,
and makes kernels one after the other in this process until they are there. Started before the weights are read they are
ready by then.
"""

from __future__ import annotations

import torch

from engine.config.tree import RunConfig


def start_ahead(config: RunConfig) -> None:
    """Starts them where layers will be compiled for a card; torch does nothing where they run, or where TORCH_WARM_POOL is 0."""
    if config.kernels.torch_compile is not True or not torch.cuda.is_available():
        return
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()
