"""Rules about the model: named, there, held in a precision that the machine has, with packages that are installed."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.attention import CUDNN, FLASH, NOT_DETERMINISTIC, VARLEN, kept_apart, unfit_varlen, without_mask
from engine.config.defaults import resolved
from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must, say
from engine.config.rules.registry import rule
from engine.config.tree import RunConfig, fields

_ATTENTION = fields.model.attention
_TAKE_SDPA = Fix("take sdpa", {_ATTENTION.path: "sdpa"})


@rule(reads=(fields.model.name,))
def model_is_named(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if not config.model.name.strip():
        todo = "Name one, or start with builtin/tiny, which needs no download."
        fix = Fix("use builtin/tiny", {fields.model.name.path: "builtin/tiny"})
        yield must(fields.model.name.path, "a hub id, a folder or builtin/tiny", None, todo, fix=fix)


@rule(reads=(fields.model.name,))
def model_exists(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, path = facts.model, fields.model.name.path
    if model is None or model.name != config.model.name:
        return
    if model.missing:
        rule_text = "a hub id, a folder with config.json, or builtin/tiny"
        yield must(
            path,
            rule_text,
            model.name,
            f"{model.missing[:1].upper()}{model.missing[1:]}. Check the spelling and the path.",
        )
    elif model.remote:
        yield say(
            path,
            f"{model.name} is not on this machine, so it is downloaded at launch; whether the hub has it is seen then.",
        )


@rule(reads=(fields.model.name,))
def builtin_names_are_known(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    name, path = config.model.name, fields.model.name.path
    if name.startswith("builtin/") and name != "builtin/tiny":
        yield must(
            path,
            "builtin/tiny",
            name,
            "It is the only built-in model.",
            fix=Fix("use builtin/tiny", {path: "builtin/tiny"}),
        )


@rule(reads=(fields.model.name, fields.model.revision))
def revision_needs_a_hub_model(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, revision = fields.model.revision.path, config.model.revision
    local = config.model.name.startswith(("builtin/", "/", ".", "~")) or bool(
        facts.model and facts.model.folder == config.model.name
    )
    if revision is not None and local:
        rule_text = "left out for a model that does not come from the hub"
        yield must(path, rule_text, revision, "Remove it.", fix=Fix("remove it", unset=(path,)))


@rule(reads=(fields.model.quantization, fields.adapter.kind))
def quantized_weights_need_an_adapter(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    quantization, path = config.model.quantization, fields.model.quantization.path
    if quantization != "none" and config.adapter.kind == "none":
        todo = "Numbers of so few bits cannot be trained themselves: set adapter.kind to lora, or quantization to none."
        fix = Fix("train a LoRA adapter", {fields.adapter.kind.path: "lora"})
        yield must(path, "none while adapter.kind is none", quantization, todo, fix=fix)


@rule(reads=(fields.model.quantization,))
def quantized_weights_need_bitsandbytes(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.model.quantization in ("none", "fp8") or facts.packages is None:
        return
    if facts.packages.get("bitsandbytes", "") is None:
        todo = "Install it with `pip install bitsandbytes`, or set quantization to none."
        yield must(
            fields.model.quantization.path,
            "none without the package bitsandbytes",
            config.model.quantization,
            todo,
            fix=Fix("keep full precision", unset=(fields.model.quantization.path,)),
        )


@rule(reads=(fields.model.quantization,))
def quantized_weights_need_a_gpu(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.model.quantization in ("none", "fp8") or facts.machine is None or facts.machine.gpus:
        return
    todo = "On a CPU it saves memory and costs much time; take it off unless the model does not fit."
    path = fields.model.quantization.path
    got = config.model.quantization
    yield must(
        path,
        "none without a GPU to be quick",
        got,
        todo,
        severity="warning",
        fix=Fix("keep full precision", unset=(path,)),
    )


@rule(reads=(fields.model.dtype,))
def float16_needs_a_gpu(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.model.dtype == "float16" and facts.machine is not None and not facts.machine.gpus:
        path = fields.model.dtype.path
        yield must(
            path,
            "bfloat16 or float32 on a CPU",
            "float16",
            "Take float32, which is exact.",
            fix=Fix("take float32", {path: "float32"}),
        )


@rule(reads=(fields.model.dtype,))
def bfloat16_is_slow_on_old_processors(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    machine, path = facts.machine, fields.model.dtype.path
    if config.model.dtype == "bfloat16" and machine is not None and not machine.gpus and machine.slow_bfloat16:
        todo = "It has no instructions for bfloat16, whose products take about forty times as long as float32's."
        fix = Fix("take float32", {path: "float32"})
        yield must(path, "float32 on this processor to be quick", "bfloat16", todo, severity="warning", fix=fix)


@rule(reads=(fields.model.dtype,))
def bfloat16_needs_a_card_that_has_it(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.model.dtype != "bfloat16" or facts.machine is None:
        return
    old = next((gpu for gpu in facts.machine.gpus if gpu.capability < (8, 0)), None)
    if old:
        path = fields.model.dtype.path
        todo = "Take float16, which this card computes, or float32."
        yield must(
            path, f"float16 or float32 on {old.name}", "bfloat16", todo, fix=Fix("take float16", {path: "float16"})
        )


@rule(reads=(fields.model.dtype, fields.adapter.kind))
def float16_weights_cannot_be_trained_whole(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.model.dtype == "float16" and config.adapter.kind == "none":
        path = fields.model.dtype.path
        todo = "Small updates vanish in float16: train a LoRA adapter, or take float32."
        yield must(
            path,
            "bfloat16 or float32 while all weights are trained",
            "float16",
            todo,
            fix=Fix("take float32", {path: "float32"}),
        )


@rule(reads=(fields.model.attention,))
def flash_attention_needs_its_package(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    attention = config.model.attention
    if attention not in FLASH or facts.packages is None:
        return
    flash = FLASH[attention]
    if facts.packages.get(flash.package, "") is None:
        todo = f"Install it with `{flash.install}`, or take sdpa."
        yield must(_ATTENTION.path, f"sdpa without the package {flash.package}", attention, todo, fix=_TAKE_SDPA)


@rule(reads=(fields.model.attention,))
def flash_attention_needs_its_card(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    attention, path = config.model.attention, _ATTENTION.path
    if attention not in FLASH or facts.machine is None:
        return
    flash = FLASH[attention]
    if not facts.machine.gpus:
        yield must(path, "sdpa or eager on a CPU", attention, "Take sdpa.", fix=_TAKE_SDPA)
    elif any(gpu.capability < flash.least for gpu in facts.machine.gpus):
        need, name = f"{flash.least[0]}.{flash.least[1]}", facts.machine.gpus[0].name
        todo = f"It needs compute capability {need}. Take sdpa."
        yield must(path, f"sdpa on {name}", attention, todo, fix=_TAKE_SDPA)
    elif flash.below is not None and any(gpu.capability >= flash.below for gpu in facts.machine.gpus):
        name = facts.machine.gpus[0].name
        todo = "It is built for cards of compute capability 9.0: take flash_attention_4 or sdpa."
        yield must(path, f"flash_attention_4 or sdpa on {name}", attention, todo, fix=_TAKE_SDPA)


@rule(reads=(fields.model.attention, fields.model.name))
def flash_attention_serves_heads_up_to_a_width(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    attention, model = config.model.attention, facts.model
    if attention not in FLASH or model is None or model.name != config.model.name or model.head_dim is None:
        return
    widest = FLASH[attention].widest
    if model.head_dim > widest:
        rule_text = f"sdpa or flex_attention for heads of {model.head_dim} numbers"
        yield must(_ATTENTION.path, rule_text, attention, f"It serves at most {widest}.", fix=_TAKE_SDPA)


@rule(reads=(fields.model.attention, fields.model.dtype))
def flash_attention_needs_half_precision(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.model.attention in FLASH and config.model.dtype == "float32":
        todo = "Flash attention computes in 16 bits only: take sdpa, or dtype bfloat16."
        yield must(_ATTENTION.path, "sdpa with float32", config.model.attention, todo, fix=_TAKE_SDPA)


@rule(reads=(fields.model.attention,))
def flex_attention_needs_a_gpu(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.model.attention == "flex_attention" and facts.machine is not None and not facts.machine.gpus:
        todo = "On a CPU torch has no gradients for it. Take sdpa."
        yield must(_ATTENTION.path, "sdpa or eager on a CPU", "flex_attention", todo, fix=_TAKE_SDPA)


@rule(reads=(fields.model.attention, fields.model.dtype, fields.model.name))
def varlen_needs_a_card_16_bits_and_heads_of_its_width(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.model.attention != VARLEN:
        return
    if facts.machine is not None and not facts.machine.gpus:
        yield must(_ATTENTION.path, "sdpa or eager on a CPU", VARLEN, "Take sdpa.", fix=_TAKE_SDPA)
    elif (reason := unfit_varlen(config, facts)) is not None:
        todo = f"{reason[0].upper()}{reason[1:]}: take flex_attention or sdpa."
        yield must(_ATTENTION.path, "flex_attention or sdpa here", VARLEN, todo, fix=_TAKE_SDPA)


@rule(reads=(fields.model.attention, fields.data.packing, fields.data.packing_cross_doc_attn_mask))
def attention_over_documents_is_for_packs_kept_apart(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.model.attention in (VARLEN, CUDNN) and not kept_apart(config):
        todo = "Rows that are whole are computed by torch's fused attention under this name too."
        yield must(
            _ATTENTION.path,
            "auto, or packed rows kept apart",
            config.model.attention,
            todo,
            severity="hint",
            fix=Fix("take auto", {_ATTENTION.path: "auto"}),
        )


@rule(reads=(fields.model.attention, fields.run.full_determinism))
def cudnn_adds_in_another_order_each_time(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.model.attention == CUDNN and config.run.full_determinism:
        rule_text = f"varlen or sdpa with {fields.run.full_determinism.path}"
        fix = Fix(f"take {VARLEN}", {_ATTENTION.path: VARLEN})
        yield must(_ATTENTION.path, rule_text, CUDNN, f"{NOT_DETERMINISTIC}: take varlen.", fix=fix)


@rule(reads=(fields.model.attention, fields.data.packing, fields.data.packing_cross_doc_attn_mask))
def packs_kept_apart_want_no_mask_of_all_pairs(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    machine, path = facts.machine, _ATTENTION.path
    if not kept_apart(config) or machine is None or not machine.gpus:
        return
    if (taken := resolved(config, facts).model.attention) in ("sdpa", "eager"):
        better, _ = without_mask(config, facts)
        better = "flex_attention" if better == taken else better
        todo = f"{taken} keeps packed rows apart by a mask of all pairs of tokens, in every layer; {better} has none."
        yield must(
            path,
            f"{better} or an installed flash attention to be quick",
            config.model.attention,
            todo,
            severity="warning",
            fix=Fix(f"take {better}", {path: better}),
        )


@rule(
    reads=(fields.model.name, fields.model.tokenizer, fields.model.chat_template, fields.method.kind, fields.data.train)
)
def messages_need_a_chat_template(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """A tokenizer without a template cannot write messages; text and ready tokens need none."""
    model, path = facts.model, fields.model.chat_template.path
    if model is None or model.chat_template is not False or config.model.chat_template or config.model.tokenizer:
        return
    if config.method.kind == "pretrain" or model.name != config.model.name:
        return
    detected = facts.sources or {}
    formats = {
        entry.format or (detected[entry.path].format if entry.path in detected else None) for entry in config.data.train
    }
    if formats & {"messages", "sharegpt"}:
        todo = "Its tokenizer brings none: name one such as chatml, or give a Jinja file."
        yield must(path, f"a template for {model.name}", None, todo, fix=Fix("use chatml", {path: "chatml"}))
