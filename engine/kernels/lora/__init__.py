"""Linear layers with LoRA adapters, forward and backward in closed form: `base(x) + s B(A(x))` without ever forming B·A.

`projected` takes the layers of one input together, `gated_block` a whole SwiGLU or GeGLU block. What a backward pass needs is
kept once: the input, and of a block the results of gate and up; the activation and its product are computed again. Base
weights may be of any kind that can say its product and its wide form, which is made for a product and let go. The wide
products are torch's own; the gated activation is a kernel on a card.
Source: arXiv:2106.09685 (LoRA).
"""

from engine.kernels.lora.block import GatedBlock, gated_block
from engine.kernels.lora.projections import Projection, Weights, projected

__all__ = ["GatedBlock", "Projection", "Weights", "gated_block", "projected"]
