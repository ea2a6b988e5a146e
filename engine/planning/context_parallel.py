"""`distributed.context_parallel_size`: what several GPUs that divide the tokens of a row serve, and what not.

Whatever computes each token by itself is as it was: norms, products, adapters, quantized weights, the vocabulary head. What
looks at other tokens is attention, which torch's ring serves in one form, causal and without a mask. What is left out here
either needs another form or was not shown to equal one GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.rule import Refused, Test, leave_out, must_divide, one_of, other_than, refused, rule, several
from engine.config.tree import FieldSpec, RunConfig, fields
from engine.facts.counts import device_count, known_model

SPEC = fields.distributed.context_parallel_size
METHODS = ("sft", "pretrain")
_LEFT_OUT = leave_out(SPEC, "each row on one GPU")


_NOT: tuple[tuple[str, FieldSpec, Test, str, str], ...] = (
    ("other-methods", fields.method.kind, other_than(*METHODS), "with {config.method.kind}",
     f"Its loss looks at whole rows; {' and '.join(METHODS)} add up single tokens."),
    ("packing", fields.data.packing, one_of(True), "with data.packing",
     "Ring attention has no mask, so documents of a pack would see each other. Turn packing off."),
    ("other-attention", fields.model.attention, other_than("auto", "sdpa"),
     "with model.attention {config.model.attention}", "The ring is made of torch's own attention: take sdpa."),
    ("other-numbers", fields.model.dtype, other_than("bfloat16"), "with {config.model.dtype}",
     "The ring takes flash attention, which was tried in bfloat16."),
    ("compiled-layers", fields.kernels.torch_compile, one_of(True), "with kernels.torch_compile",
     "The ring sends messages in the middle of a layer, which no compiled graph holds."),
    ("compile-options", fields.kernels.torch_compile_options, bool, "with kernels.torch_compile_options",
     "The ring sends messages in the middle of a layer, which no compiled graph holds."),
    ("timed-kernels", fields.kernels.kernel_auto_compose, one_of(True), "with kernels.kernel_auto_compose",
     "Kernels are timed on whole rows by one GPU."),
    ("offloaded-activations", fields.memory.activation_offloading, other_than(None),
     "with memory.activation_offloading", "What the ring keeps is known to its GPU alone."),
    ("determinism", fields.run.full_determinism, one_of(True), "with run.full_determinism",
     "Whether the kernels of the ring repeat themselves to the bit was not tried."),
)  # fmt: skip

refused(
    __name__,
    *(
        Refused(
            f"context-parallel-without-{name}", SPEC, several, f"1 {words}", because, _LEFT_OUT, beside={spec: test}
        )
        for name, spec, test, words, because in _NOT
    ),
    Refused(
        "context-parallel-needs-gpus",
        SPEC,
        several,
        "1 without a GPU",
        "gloo, by which processes on a CPU talk, has no ring attention; NCCL has.",
        _LEFT_OUT,
        gpu=False,
    ),
)


@rule(reads=(SPEC, fields.run.devices, fields.distributed.nodes))
def rows_are_divided_over_the_processes(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    todo = "Groups of so many GPUs each take a batch, and no GPU may be left over."
    yield from must_divide(SPEC, SPEC.value(config), device_count(config), todo)


@rule(reads=(SPEC, fields.data.max_length))
def rows_are_divided_into_equal_pieces(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    size, length, spec = SPEC.value(config), config.data.max_length, fields.data.max_length
    pieces = 2 * size
    if size == 1 or length % pieces == 0:
        return
    nearest = max(pieces, length // pieces * pieces)
    todo = "Each GPU takes two pieces of a row, one from the front and one from the back, and all pieces are equal."
    fix = Fix(f"take {nearest:,}", {spec.path: nearest})
    yield must(
        spec.path, f"a multiple of {pieces} with distributed.context_parallel_size {size}", length, todo, fix=fix
    )


@rule(reads=(SPEC, fields.model.name))
def context_parallel_without_experts_or_images(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model = known_model(config, facts)
    if model is None or SPEC.value(config) == 1:
        return
    if model.experts:
        todo = "How tokens spread over the experts is counted over whole rows."
        yield must(SPEC.path, "1 with a mixture of experts", SPEC.value(config), todo, fix=_LEFT_OUT)
    elif model.processor:
        todo = "Where the tokens of an image are cut is not told to the parts that see."
        yield must(SPEC.path, "1 with a model that sees images", SPEC.value(config), todo, fix=_LEFT_OUT)
