"""Rules about the model: named, there, held in a precision that the machine has, with packages that are installed."""

from __future__ import annotations

import os
from collections.abc import Iterator

from engine import figures
from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, Severity, must, notice
from engine.config.kinds import BUILTIN_MODELS, loader_of
from engine.config.rule import Refused, leave_out, one_of, other_than, refused, rule, take
from engine.config.tree import RunConfig, fields
from engine.errors import visible
from engine.facts import counts as counted
from engine.facts import state_kernels
from engine.facts.counts import known_model
from engine.facts.model_shape import ELSEWHERE
from engine.facts.stored import PACKED, SERVED
from engine.features import packed_experts
from engine.planning import memory_model
from engine.planning.auto import resolved

_DTYPE, _QUANTIZATION = fields.model.dtype, fields.model.quantization
_WIDENED = other_than("none", "fp8")
_BY_BITSANDBYTES = other_than("none", "fp8", *packed_experts.EXPERTS_ALONE)
_STORED = {
    "fp8": ("weights are stored in FP8", "eight", ("none",)),
    "mxfp4": ("experts are stored in MXFP4", "four", ("none", "mxfp4")),
    "gptq": ("weights are stored as GPTQ packs them", "few", ("none",)),
    "awq": ("weights are stored as AWQ packs them", "few", ("none",)),
    "compressed-tensors": ("weights are stored as compressed-tensors packs them", "few", ("none",)),
    "modelopt": ("weights are stored in NVFP4", "four", ("none",)),
}
"""What files hold in few bits, and what model.quantization may be beside it."""
_FULL_PRECISION = leave_out(_QUANTIZATION, "keep full precision")
_READS_ITS_WEIGHTS = ("gemma3n", "gemma3n_text")
"""Model types whose blocks read a layer's weight instead of calling the layer (Gemma 3n's AltUp), which finds packed bytes there."""
_SHARES_ITS_BLOCKS = {"zamba2": "in_proj"}
"""Model types whose layers share blocks of attention, and the layers that each has for itself."""

refused(
    __name__,
    Refused(
        "quantized-weights-need-an-adapter",
        _QUANTIZATION,
        other_than("none"),
        "none while adapter.kind is none",
        "Numbers of so few bits cannot be trained themselves: set adapter.kind to lora, or quantization to none.",
        take(fields.adapter.kind, "lora", "train a LoRA adapter"),
        beside={fields.adapter.kind: one_of("none")},
    ),
    Refused(
        "quantized-weights-need-bitsandbytes",
        _QUANTIZATION,
        _BY_BITSANDBYTES,
        "none without the package bitsandbytes",
        "Install it with `pip install bitsandbytes`, or set quantization to none.",
        _FULL_PRECISION,
        without="bitsandbytes",
    ),
    Refused(
        "quantized-weights-need-a-gpu",
        _QUANTIZATION,
        _WIDENED,
        "none without a GPU to be quick",
        "On a CPU it saves memory and costs much time; take it off unless the model does not fit.",
        _FULL_PRECISION,
        gpu=False,
        severity="warning",
    ),
    Refused(
        "float16-needs-a-gpu",
        _DTYPE,
        one_of("float16"),
        "bfloat16 or float32 on a CPU",
        "Take float32, which is exact.",
        take(_DTYPE, "float32"),
        gpu=False,
    ),
    Refused(
        "bfloat16-needs-a-card-that-has-it",
        _DTYPE,
        one_of("bfloat16"),
        "float16 or float32 on {gpu.name}",
        "Take float16, which this card computes, or float32.",
        take(_DTYPE, "float16"),
        below=(8, 0),
    ),
    Refused(
        "float16-weights-cannot-be-trained-whole",
        _DTYPE,
        one_of("float16"),
        "bfloat16 or float32 while all weights are trained",
        "Small updates vanish in float16: train a LoRA adapter, or take float32.",
        take(_DTYPE, "float32"),
        beside={fields.adapter.kind: one_of("none")},
    ),
    Refused(
        "builtin-names-are-known",
        fields.model.name,
        lambda name: name.startswith("builtin/") and name not in BUILTIN_MODELS,
        " or ".join(BUILTIN_MODELS),
        "There are no other built-in models.",
        take(fields.model.name, "builtin/tiny", "use builtin/tiny"),
    ),
    Refused(
        "builtin-tiny-vl-has-its-own-tokenizer",
        fields.model.tokenizer,
        other_than(None),
        "left out for builtin/tiny-vl",
        "Its tokenizer has the tokens of its images.",
        leave_out(fields.model.tokenizer),
        beside={fields.model.name: one_of("builtin/tiny-vl")},
    ),
)


@rule(reads=(fields.model.name,))
def model_is_named(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if not config.model.name.strip():
        todo = "Name one, or start with builtin/tiny, which needs no download."
        fix = Fix("use builtin/tiny", {fields.model.name.path: "builtin/tiny"})
        yield must(fields.model.name.path, "a hub id, a folder or builtin/tiny", None, todo, fix=fix)


_FOLDERS = frozenset(
    [
        "adapters",
        "checkpoint",
        "checkpoints",
        "ckpt",
        "ckpts",
        "data",
        "model",
        "models",
        "out",
        "output",
        "outputs",
        "result",
        "results",
        "run",
        "runs",
        "saved",
        "saves",
        "weights",
    ]
)
"""First parts of a name with which people mean a folder of theirs, and not somebody on the hub."""


@rule(reads=(fields.model.name, fields.adapter.kind, fields.adapter.path))
def model_exists(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, path = known_model(config, facts), fields.model.name.path
    if model is None:
        return
    if model.missing:
        rule_text = "a hub id, a folder with config.json, or builtin/tiny"
        way = "Copy or download it again" if model.missing.startswith("its ") else "Check the spelling and the path"
        fix = None
        if model.missing == ELSEWHERE:
            way, fix = "Write its whole path", Fix("write its whole path", {path: os.path.abspath(model.name)})
        elif model.checkpoint:
            way, fix = "Name one of them", Fix("take its newest checkpoint", {path: model.checkpoint})
        elif model.base is not None:
            way, fix = _of_an_adapter(config, model.name, model.base)
        todo = f"{model.missing[:1].upper()}{model.missing[1:]}. {way}."
        if model.name.lower().endswith("gguf"):
            todo = (
                "A GGUF holds rounded numbers for llama.cpp: name the model that it was made from; model.quantization: nf4 "
                "holds that in as few bits."
            )
        yield must(path, rule_text, model.name, todo, fix=fix)
    elif model.remote:
        words = (
            f"{model.name} is not on this machine, so it is downloaded at launch; whether the hub has it is seen then."
        )
        if model.name.lower().partition("/")[0] in _FOLDERS:
            words += f" A folder beside the config is written ./{model.name}."
        yield notice(path, words)


def _of_an_adapter(config: RunConfig, name: str, base: str) -> tuple[str, Fix | None]:
    """What to do about an adapter that was named as the model, and the fix where it says which model it is of."""
    below = visible(base) or "the model that it is of"
    way = f"To train it further name {below} here and this folder as adapter.path, or merge the two first (PEFT: merge_and_unload)"
    kind = {} if config.adapter.kind == "lora" else {fields.adapter.kind.path: "lora"}
    fix = Fix("train that adapter further", {fields.model.name.path: base, **kind, fields.adapter.path.path: name})
    return way, fix if base else None


@rule(reads=(fields.model.name, fields.method.kind))
def model_files_can_be_loaded(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """What its JSON files and the headers of its weights tell without a library."""
    model, path = known_model(config, facts), fields.model.name.path
    if model is None or model.missing:
        return
    loader = loader_of(config.method.head, model.loaders)
    if model.flaw:
        yield notice(path, model.flaw.removeprefix(f"{path}: "), severity="error")
    elif model.loaders is not None and loader not in model.loaders:
        what = f"the installed transformers has no {loader} for models of type {visible(model.model_type)}"
        yield notice(path, f"{what}, as {config.method.kind} needs. Choose another model or method.", severity="error")
    elif model.headless and config.method.head == "vocabulary":
        sentence = (
            "its files hold no lm_head.weight, so it would start from random numbers. Take a folder with its head."
        )
        yield notice(path, sentence, severity="error")


@rule(reads=(fields.model.name, fields.model.train_vision))
def vision_parts_need_a_model_that_sees(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, spec = known_model(config, facts), fields.model.train_vision
    if config.model.train_vision == "all" or model is None:
        return
    if model.processor is False:
        fix = Fix("leave it out", unset=(spec.path,))
        todo = "It has no vision tower, so there is nothing to freeze."
        yield must(spec.path, f"left out for {model.name}", config.model.train_vision, todo, fix=fix)


@rule(reads=(fields.model.name, fields.model.tokenizer))
def tokenizer_files_can_be_loaded(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec = fields.model.tokenizer if config.model.tokenizer else fields.model.name
    tokenizer, model = facts.tokenizer, facts.model
    if tokenizer is None or tokenizer.name != (config.model.tokenizer or config.model.name):
        return
    if tokenizer.flaw:
        # A folder that is none of a model is told of once.
        told = model is not None and (model.flaw == tokenizer.flaw or (model.missing and not config.model.tokenizer))
        if not told:
            yield notice(spec.path, tokenizer.flaw.removeprefix(f"{fields.model.tokenizer.path}: "), severity="error")
        return
    weights = model.vocab_size if model is not None and model.name == config.model.name else None
    if (
        weights is None
        or tokenizer.tokens is None
        or tokenizer.base is None
        or config.model.name.startswith("builtin/")
    ):
        return
    if tokenizer.tokens > weights:
        # Many add tokens that no row uses; words of the language itself are used by any row.
        severity: Severity = "error" if tokenizer.base > weights else "warning"
        yield notice(
            spec.path,
            f"the tokenizer knows {tokenizer.tokens:,} tokens and the model has weights for {weights:,}; a row with one "
            "beyond them ends the run. Take the tokenizer that belongs to the model.",
            severity=severity,
        )


@rule(reads=(fields.model.chat_template,))
def chat_template_is_there(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    wanted, path = config.model.chat_template, fields.model.chat_template.path
    if wanted and facts.files is not None and facts.files.get(wanted) is False:
        todo = "Known names are chatml, llama3, plain and none; a path starts at the config's folder."
        yield must(path, "a template's name or a Jinja file that is there", wanted, todo)


@rule(reads=(fields.model.name, fields.model.revision))
def revision_needs_a_hub_model(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, revision = fields.model.revision.path, config.model.revision
    local = config.model.name.startswith(("builtin/", "/", ".", "~")) or bool(
        facts.model and facts.model.folder == config.model.name
    )
    if revision is not None and local:
        rule_text = "left out for a model that does not come from the hub"
        yield must(path, rule_text, revision, "Remove it.", fix=Fix("remove it", unset=(path,)))


@rule(
    reads=(
        fields.model.name,
        fields.model.dtype,
        fields.model.quantization,
        fields.model.quantize_moe_experts,
        fields.adapter.kind,
    )
)
def experts_are_not_quantized(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """All experts of a layer are one weight of three dimensions, which is no linear layer and may stay as it is."""
    model, path = counted.known_model(config, facts), fields.model.quantization.path
    counts = counted.parameters(config, facts)
    if config.model.quantization == "none" or model is None or counts is None or not model.experts:
        return
    if packed_experts.packs(config, model):
        return
    numbers = packed_experts.numbers(model)
    kept = numbers * memory_model.BYTES[config.model.dtype]
    peak = memory_model.memory(resolved(config, facts), facts, "full")
    if numbers and peak:
        bits = 8 * int(memory_model.BYTES[config.model.dtype])
        held = f"{figures.size(kept)} of the weights' {figures.size(peak['weights'])}"
        fp8 = config.model.quantization == "fp8"
        todo = (
            "nf4, fp4, int8, mxfp4 and nvfp4 pack them too."
            if fp8
            else f"{packed_experts.SETTING.path} packs them too."
        )
        yield notice(path, f"the experts stay in {bits} bits: {held}. {todo}")


@rule(reads=(fields.model.dtype,))
def bfloat16_is_slow_on_old_processors(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    machine, path = facts.machine, fields.model.dtype.path
    if config.model.dtype == "bfloat16" and machine is not None and not machine.gpus and machine.slow_bfloat16:
        todo = "It has no instructions for bfloat16, whose products take about forty times as long as float32's."
        fix = Fix("take float32", {path: "float32"})
        yield must(path, "float32 on this processor to be quick", "bfloat16", todo, severity="warning", fix=fix)


@rule(
    reads=(fields.model.name, fields.model.tokenizer, fields.model.chat_template, fields.method.kind, fields.data.train)
)
def messages_need_a_chat_template(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """A tokenizer without a template cannot write messages; text and ready tokens need none."""
    model, path = known_model(config, facts), fields.model.chat_template.path
    if model is None or model.chat_template is not False or config.model.chat_template or config.model.tokenizer:
        return
    if config.method.kind == "pretrain":
        return
    detected = facts.sources or {}
    bare = [entry for entry in config.data.train if not entry.chat_template]
    formats = {entry.format or (detected[entry.path].format if entry.path in detected else None) for entry in bare}
    turns = any(detected[entry.path].turns for entry in bare if entry.path in detected)
    if turns or formats & {"messages", "sharegpt", "alpaca"}:
        todo = "Its tokenizer brings none: name one such as chatml, or give a Jinja file."
        yield must(path, f"a template for {model.name}", None, todo, fix=Fix("use chatml", {path: "chatml"}))


@rule(reads=(fields.model.name,))
def tokens_go_to_as_many_experts_as_there_are(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, path = counted.known_model(config, facts), fields.model.name.path
    # Of one expert configs tell where layers are dense (Jamba).
    if model is not None and (model.experts_per_token or 0) > (model.experts or 0) > 1:
        wrong = f"one whose config.json sends each token to {model.experts_per_token:,} of {model.experts:,}"
        todo = "Its router cannot choose more than there are: mend its config.json, or take another model."
        yield must(path, "a mixture that has as many experts as a token goes to", wrong, todo)


@rule(reads=(fields.model.name,))
def stored_weights_are_of_a_known_format(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, path = counted.known_model(config, facts), fields.model.name.path
    if model is not None and model.stored not in SERVED:
        todo = (
            "Nothing here has gradients through such weights: take the model that they were made from, and model.quantization: "
            "nf4 or int8 holds it in as few bits."
        )
        yield must(
            path,
            "a model in plain numbers, FP8, MXFP4, GPTQ, AWQ (gemm), packed compressed-tensors, Model Optimizer's NVFP4 or bitsandbytes' formats",
            f"one in {visible(model.stored)}",
            todo,
        )


@rule(reads=(fields.adapter.kind, fields.adapter.target_modules, fields.model.name))
def blocks_that_layers_share_take_no_adapter(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, spec = counted.known_model(config, facts), fields.adapter.target_modules
    if model is None or model.model_type not in _SHARES_ITS_BLOCKS or config.adapter.kind != "lora":
        return
    asked, own = config.adapter.target_modules, _SHARES_ITS_BLOCKS[model.model_type]
    if isinstance(asked, str) or not set(asked) <= {own}:
        todo = (
            "Its layers share blocks of attention, beside which some weights of an adapter are read by nothing and none can be "
            "merged: adapt its Mamba layers, or train all weights."
        )
        fix = Fix(f"adapt {own}", {spec.path: [own]})
        yield must(spec.path, f"{own} alone for the model type {model.model_type}", asked, todo, fix=fix)


@rule(reads=(_QUANTIZATION, fields.model.name))
def weights_that_blocks_read_stay_numbers(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, kind = counted.known_model(config, facts), config.model.quantization
    if model is not None and model.model_type in _READS_ITS_WEIGHTS and _BY_BITSANDBYTES(kind):
        todo = "Its blocks compute with weights of layers themselves, which would be packed bytes."
        yield must(_QUANTIZATION.path, f"none for the model type {model.model_type}", kind, todo, fix=_FULL_PRECISION)


@rule(reads=(fields.model.quantization, fields.model.name))
def stored_weights_take_no_second_format(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, spec = counted.known_model(config, facts), fields.model.quantization
    if model is None or model.stored not in _STORED:
        return
    kept, bits, taken = _STORED[model.stored]
    if config.model.quantization not in taken:
        todo = f"They have {bits} bits already: leave it out, and an adapter is trained beside them."
        fix = Fix("leave it out", unset=(spec.path,))
        yield must(spec.path, f"none for {model.name}, whose {kept}", config.model.quantization, todo, fix=fix)


@rule(reads=(fields.adapter.kind, fields.adapter.use_dora, fields.model.name))
def weights_stored_in_fp8_take_plain_lora(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model = counted.known_model(config, facts)
    if model is None or model.stored not in ("fp8", *PACKED):
        return
    if config.adapter.kind == "lora" and config.adapter.use_dora:
        spec = fields.adapter.use_dora
        todo = "DoRA measures plain weights: take plain LoRA, or the model in bfloat16."
        rule_text = f"false for {config.model.name}, whose {_STORED[model.stored][0]}"
        yield must(spec.path, rule_text, True, todo, fix=Fix("take plain LoRA", unset=(spec.path,)))


@rule(reads=(fields.model.name,))
def layers_with_a_state_have_kernels(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, machine, packages = facts.model, facts.machine, facts.packages
    if model is None or model.name != config.model.name or machine is None or not machine.gpus or packages is None:
        return
    kind, path = state_kernels.family(model.model_type), fields.model.name.path
    if kind in state_kernels.LINEAR:
        reason = state_kernels.unfit(kind, packages, [gpu.capability for gpu in machine.gpus])
        here = packages.get(state_kernels.FLA) or packages.get("fla-core")
        if here and reason:
            sentence = f"its linear attention is computed by a loop in torch, and {state_kernels.FLA} {here} left out: {reason}"
            yield notice(
                path, f"{sentence}. `{state_kernels.TILELANG_INSTALL}`, or take a torch that brings the newer Triton."
            )
        elif not here:
            install = state_kernels.FLA_INSTALL + (
                " " + state_kernels.TILELANG_INSTALL.removeprefix("pip install ") if reason else ""
            )
            yield notice(
                path,
                f"its linear attention is computed by a loop in torch, much slower than by kernels: `{install}`.",
            )
    elif kind in state_kernels.STATE_SPACE and not (packages.get("mamba-ssm") and packages.get("causal-conv1d")):
        sentence = "its layers of state space are computed by torch; mamba-ssm and causal-conv1d have kernels for them"
        yield notice(path, f"{sentence}: `{state_kernels.MAMBA_INSTALL}`.", severity="hint")
