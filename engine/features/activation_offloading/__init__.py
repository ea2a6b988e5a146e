"""`memory.activation_offloading`: saved activations wait in host memory or in a file until the backward pass."""

from __future__ import annotations

from dataclasses import replace

from engine.config.facts import Facts
from engine.config.rule import Refused, leave_out, one_of, refused, take
from engine.config.tree import RunConfig, fields
from engine.facts.counts import mlp_width
from engine.features.feature import Layers

SETTING = fields.memory.activation_offloading
AFTER = ("auto_compose",)
"""Kernels are timed without the copies."""
IN_FLIGHT = 5
"""Tensors that wait until their copy is done (TRL: max_fwd_stash_size)."""


def memory(config: RunConfig, facts: Facts, layers: Layers) -> Layers:
    """Of what is kept no more is here than is on its way."""
    if not config.memory.activation_offloading:
        return layers
    widest = max(layers.model.hidden_size or 0, mlp_width(layers.model))
    return replace(layers, in_flight=IN_FLIGHT * layers.tokens * widest * layers.size)


refused(
    __name__,
    Refused(
        "offloading-to-the-host-needs-a-gpu",
        SETTING,
        one_of("cpu"),
        "disk or empty without a GPU",
        "Without a GPU the activations are in the host's memory already; disk moves them out of it.",
        leave_out(SETTING),
        gpu=False,
    ),
    # The tiers hold their results themselves, where no hook can move them.
    Refused(
        "offloading-moves-what-autograd-saves",
        fields.memory.gradient_checkpointing,
        one_of("selective", "medium"),
        "full or false with activation_offloading",
        "What this tier keeps cannot be moved; with full only the inputs of layers are kept, and they can.",
        take(fields.memory.gradient_checkpointing, "full"),
        beside={SETTING: bool},
    ),
)
