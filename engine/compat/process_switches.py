"""What a run switches in torch for its whole process, and how it is as before afterwards.

transformers sets how float32 is multiplied and whether operations are deterministic for the process and leaves it so; it sets
the first at most once each way (its `enable_tf32` is cached). torch's compiler reads the products' precision, which inherits
from the one that is set, and writes it back as their own: after one compiled function TF32 stays on though it is turned off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.utils.import_utils import enable_tf32


@contextmanager
def restored() -> Iterator[None]:
    """The precision of float32 products and whether operations are deterministic are as before once this is left, however."""
    enable_tf32.cache_clear()
    cudnn = torch.backends.cudnn
    own, every = own_precision(), torch.backends.set_flags(None)
    deterministic, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    flags = cudnn.deterministic, cudnn.benchmark
    try:
        yield
    finally:
        torch.backends.set_flags(*every)
        torch.backends.cuda.matmul.fp32_precision = own
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        cudnn.deterministic, cudnn.benchmark = flags
        enable_tf32.cache_clear()


def own_precision() -> str:
    """What is set for a card's products alone, "none" where they inherit it."""
    with torch.backends.flags("none"):
        return str(torch.backends.cuda.matmul.fp32_precision)
