"""`memory.layer_offloading`: frozen weights of decoder layers wait in host memory and stream to the card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import not_

from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.rule import Refused, leave_out, one_of, other_than, refused, rule, take
from engine.config.tree import RunConfig, fields
from engine.facts import counts
from engine.facts.stored import PACKED
from engine.features.feature import Layers

SETTING = fields.memory.layer_offloading
AFTER = ("compile", "fp8_base", "fused_lora", "fused_norm_rope", "tiled_mlp")
"""Its wrapper goes around everything else that changed how a layer is called."""

refused(
    __name__,
    Refused(
        "layer-offloading-needs-a-gpu",
        SETTING,
        bool,
        "false without a GPU",
        "Without a GPU the layers are in the host's memory already.",
        leave_out(SETTING),
        gpu=False,
    ),
    Refused(
        "layer-offloading-needs-frozen-weights",
        SETTING,
        bool,
        "false while all weights are trained",
        "Weights that are trained stay on the card, and here all are; with an adapter the layers are frozen.",
        take(fields.adapter.kind, "lora", "train an adapter"),
        beside={fields.adapter.kind: one_of("none"), fields.adapter.unfrozen_parameters: not_},
        gpu=True,
    ),
    Refused(
        "layer-offloading-cannot-move-int8",
        fields.model.quantization,
        one_of("int8"),
        "none, nf4 or fp4 with layer_offloading",
        "bitsandbytes takes 8-bit weights out of their layers at the first call, where they cannot be followed.",
        take(fields.model.quantization, "nf4"),
        beside={SETTING: bool},
        gpu=True,
    ),
    Refused(
        "layer-offloading-leaves-nothing-to-convert",
        fields.optim.bf16_full_eval,
        bool,
        "false with layer_offloading",
        "A copy of all weights would have to lie on the card, where only two layers are.",
        leave_out(fields.optim.bf16_full_eval),
        beside={SETTING: bool, fields.model.dtype: one_of("float32")},
        gpu=True,
    ),
    Refused(
        "layer-offloading-and-rounding-do-not-meet",
        fields.kernels.quantization_aware,
        other_than(False),
        "false with layer_offloading",
        "Layers that round rebuild their weights, which only the layer that computes has on the card.",
        leave_out(fields.kernels.quantization_aware),
        beside={SETTING: bool},
        gpu=True,
    ),
)


def memory(config: RunConfig, facts: Facts, layers: Layers) -> Layers:
    """All layers but two wait on the host."""
    if not config.memory.layer_offloading or not (count := layers.model.layers):
        return layers
    return replace(layers, on_the_host=max(0, count - 2) / count)


def streams(config: RunConfig, facts: Facts) -> bool:
    """Whether layers would stream: what else they need is not asked where there is no GPU."""
    return config.memory.layer_offloading and (facts.machine is None or bool(facts.machine.gpus))


@rule(reads=(SETTING, fields.run.devices))
def layer_offloading_needs_one_device(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, count = fields.run.devices.path, counts.device_count(config)
    if streams(config, facts) and count > 1:
        todo = "Each process would lock a copy of all layers in the host's memory, and all would share its bus."
        yield must(path, "1 with layer_offloading", count, todo, fix=Fix("take one", {path: 1}))


@rule(reads=(SETTING, fields.model.name, fields.adapter.kind))
def layer_offloading_leaves_packed_integers_on_the_card(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model = counts.known_model(config, facts)
    if model is None or model.stored not in PACKED or config.adapter.kind != "lora" or not streams(config, facts):
        return
    todo = "Their scales and zero points are no weights that it moves, and few bits mostly fit: leave it out."
    yield must(
        SETTING.path, f"false for {model.name}, stored as {model.stored} packs it", True, todo, fix=leave_out(SETTING)
    )


@rule(reads=(SETTING, fields.kernels.torch_compile_options))
def layer_offloading_has_no_fixed_addresses(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path = f"{fields.kernels.torch_compile_options.path}.triton.cudagraphs"
    if streams(config, facts) and config.kernels.torch_compile_options.get("triton.cudagraphs") is True:
        todo = "A recorded graph reads weights where they were, and streamed ones lie elsewhere each time."
        yield must(path, "false with layer_offloading", True, todo, fix=leave_out(SETTING))


@rule(reads=(SETTING, fields.method.kind))
def layers_come_in_for_every_token_sampled(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if streams(config, facts) and config.method.rows == "prompts":
        todo = "Answers are sampled token by token, and each brings every layer in; 4-bit weights stay on the card."
        rule_text = f"false to be quick with {config.method.called}"
        yield must(SETTING.path, rule_text, True, todo, severity="warning")
