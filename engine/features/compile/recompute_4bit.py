"""Of compiled layers with bitsandbytes' 4-bit weights: what the weights stand for is made again in backward, never held.

bitsandbytes' own backward unpacks the weight a second time. The compiler sees that both passes unpack the same bytes, takes the
two for one, and as it knows nothing of another library's operations holds the result from forward to backward: four times the
bytes of the packed weight, in every layer at once. So each operation that unpacks is marked as one to compute again. Where
layers are checkpointed whole, the products with 4-bit weights are marked too: they stand in an `autograd.Function`, into which
torch 2.11 does not carry the checkpoint's own mark, and so it keeps what every one of them gives (5.25 GiB of Qwen3-30B-A3B's
attention at 4 x 2,048 tokens). The tiers `medium` and `selective` mark those that they keep, for the same reason: without it
both held attention alone, and computed 32B's products in NF4 a third time. Layers that are left out of checkpointing (`memory.recompute_num_layers`) are compiled with the
same options: a graph without a checkpoint keeps what its products give.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from engine.features.gradient_checkpointing.tiers import is_4bit_product, keeps_product

_CHECKPOINTED = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE


class Recompute4bit(CustomGraphPass):
    """A pass over a layer's joint graph, forward and backward, before it is parted; `products` are computed again as well
    where the graph has a checkpoint, or those are held that are at most `widest` times as wide as their inner size."""

    def __init__(self, *, products: bool, widest: float | None = None) -> None:
        self.products, self.widest = products, widest

    def __call__(self, graph: torch.fx.Graph) -> None:
        # What is called outside an autograd.Function has the checkpoint's mark: torch parts the graph by it.
        checkpointed = any(node.meta.get("recompute") in _CHECKPOINTED for node in graph.nodes)
        products = self.products and checkpointed
        for node in graph.nodes:
            op = node.target
            if not isinstance(op, torch._ops.OpOverload) or op.namespace != "bitsandbytes":
                continue
            if products or "dequantize" in op._opname:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            elif checkpointed and self.widest is not None and is_4bit_product(op):
                kept = keeps_product(node.args[2], self.widest)
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,), f"{self.products} {self.widest}")
