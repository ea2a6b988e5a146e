"""Which implementation of attention serves a model on a machine: packages, cards, widths of a head. Pure and quick.

SDPA, torch's own, is the rule: it needs no package and takes the card's flash kernel itself wherever rows are whole. It has
no form for packed rows that are kept apart but a mask of all pairs of tokens. There `auto` takes the flash attention that is
installed and fits, cuDNN's among them, else `varlen`, the one over documents that torch carries, else flex attention, which
serves every format and width but is compiled at the first batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.config.facts import Facts, ModelFacts
from engine.config.findings import Finding, Fix, must
from engine.config.rule import Refused, one_of, refused, rule, take
from engine.config.tree import RunConfig, fields
from engine.facts import counts
from engine.facts.counts import known_model

SETTING = fields.model.attention
EARNS = 1.03
"""So many times as fast as the first of the order must another be, where they were measured here, to be taken in its place."""
AFTER = ()
_TAKE_SDPA = Fix("take sdpa", {SETTING.path: "sdpa"})


@dataclass(frozen=True, slots=True)
class Flash:
    """A release of flash attention: its package, how to install it, the cards and the widest head it serves."""

    package: str
    install: str
    least: tuple[int, int]
    below: tuple[int, int] | None
    widest: int


CUDNN = "cudnn"
"""cuDNN's attention over documents, `engine.features.attention_backend.cudnn_documents`."""
XFORMERS = "xformers"
"""xFormers' memory-efficient attention over documents, `engine.features.attention_backend.xformers_documents`."""
NOT_DETERMINISTIC = "Its deterministic form would take gigabytes of workspace"
_FLASH_3 = "pip install --no-build-isolation git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"
"""Built from its source: PyPI has an empty release alone, which it does not give. Of version 4 it has betas, which it gives where one
is asked for."""
FLASH = {
    "flash_attention_2": Flash("flash-attn", "pip install flash-attn --no-build-isolation", (8, 0), None, 256),
    "flash_attention_3": Flash("flash-attn-3", _FLASH_3, (9, 0), (10, 0), 256),
    "flash_attention_4": Flash("flash-attn-4", "pip install 'flash-attn-4>=4.0.0b1'", (9, 0), None, 128),
    CUDNN: Flash("nvidia-cudnn-frontend", "pip install nvidia-cudnn-frontend==1.18.0", (9, 0), (10, 0), 128),
    XFORMERS: Flash("xformers", "pip install xformers", (7, 0), None, 256),
}
"""By the name under which transformers knows it. Version 3 is built for Hopper; both ways through version 4 go up to 128.
cuDNN's was tried on Hopper alone: 1.07 ms on an H200 where torch's over documents takes 1.57 (8 documents in 8,192)."""
VARLEN, VARLEN_LEAST, VARLEN_WIDEST = "varlen", (8, 0), 256
"""Torch's flash attention over documents: 16 bits, Ampere cards and newer, heads of up to 256 numbers."""
SINKS = "sinks"
"""Torch's flash attention with sinks, `engine.features.attention_backend.sinks`: 16 bits and Ampere cards as for `VARLEN`,
or a CPU."""
WITH_SINKS = frozenset({"gpt_oss"})
"""Types of models whose heads share their sum with a sink in the way that `sinks` computes."""
EAGER_ALONE = frozenset({"deepseek_v4", "gemma2", "gpt_oss", "granite_swa", "hy_v4", "mimo_v2_flash", "vaultgemma"})
"""Types of models whose scores are capped or share their sum with a sink, which torch's fused attention has no form for."""
STATES_SERVED = frozenset({
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2", "nemotron_h",
    "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "zamba2",
})  # fmt: skip
"""Types of models with layers that carry a state, which `apart` has begin anew at each document of a pack."""
MASKED_HERE = frozenset({"afmoe", "gpt_oss", "granitemoehybrid"})
"""Types whose own mask forgets the documents, so that `apart` makes it."""
NOT_APART = frozenset({
    # A state is carried on by layers in which nobody has shown where it could begin anew.
    "bailing_hybrid", "deepseek_v4", "inkling2", "inkling2_loop_text", "inkling2_text", "inkling_text", "lara_mini", "lfm3",
    "minimax", "qwen4_exp_text", "rwkv", "xlstm", "zamba", "zaya",
    # Their mask is made without positions.
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "bloom",
    "camembert", "cohere_compass_text", "cpmant", "data2vec-text", "electra", "ernie", "falcon", "marian", "mbart",
    "megatron-bert", "mpt", "mvp", "openai-gpt", "opt", "pegasus", "plbart", "prophetnet", "rembert", "roberta",
    "roberta-prelayernorm", "roc_bert", "roformer", "trocr", "xglm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod",
})  # fmt: skip
"""Types whose rows see each other in a pack, whatever is asked for."""
SDPA = "torch's own fused attention, which needs no package"


def kept_apart(config: RunConfig) -> bool:
    """Whether rows are packed and must not see each other."""
    return config.data.packing and config.data.packing_cross_doc_attn_mask


def carries_state(model: ModelFacts) -> bool:
    """Whether layers of the model carry a state from token to token, beside attention; a model with other parts has the type
    of its text model but for the ending."""
    return not STATES_SERVED.isdisjoint((model.model_type, f"{model.model_type}_text"))


def unfit(name: str, config: RunConfig, facts: Facts) -> str | None:
    """Why this release of flash attention does not serve here, or None."""
    flash, model = FLASH[name], known_model(config, facts)
    if facts.packages is None or not facts.packages.get(flash.package):
        return f"the package {flash.package} is not installed"
    for gpu in facts.machine.gpus if facts.machine else ():
        if gpu.capability < flash.least or (flash.below is not None and gpu.capability >= flash.below):
            return f"{gpu.name} is not a card of {name}"
    if config.model.dtype == "float32":
        return "flash attention computes in 16 bits only"
    old = next(
        (gpu.name for gpu in (facts.machine.gpus if facts.machine else ()) if gpu.capability < VARLEN_LEAST), None
    )
    if name == XFORMERS and old is not None and config.model.dtype == "bfloat16":
        return f"{name} takes float16 on {old}, not bfloat16"
    if name == CUDNN and config.run.full_determinism:
        return f"{name}: {NOT_DETERMINISTIC[0].lower()}{NOT_DETERMINISTIC[1:]}"
    if model is not None and (model.head_dim or 0) > flash.widest:
        return f"heads of {model.head_dim} numbers are wider than the {flash.widest} of {name}"
    return None


def unfit_varlen(config: RunConfig, facts: Facts) -> str | None:
    """Why torch's own attention over documents does not serve here, or None."""
    model = known_model(config, facts)
    for gpu in facts.machine.gpus if facts.machine else ():
        if gpu.capability < VARLEN_LEAST:
            return f"{gpu.name} is older than the cards of {VARLEN}"
    if config.model.dtype == "float32":
        return f"{VARLEN} computes in 16 bits only"
    if model is not None and (model.head_dim or 0) > VARLEN_WIDEST:
        return f"heads of {model.head_dim} numbers are wider than the {VARLEN_WIDEST} of {VARLEN}"
    return None


def has_sinks(config: RunConfig, facts: Facts) -> bool:
    """Whether the model's heads have sinks that are computed here."""
    model = known_model(config, facts)
    return model is not None and model.model_type in WITH_SINKS


def unfit_sinks(config: RunConfig, facts: Facts) -> str:
    """Why attention with sinks does not serve here; empty where it does, as on a CPU in any format."""
    for gpu in facts.machine.gpus if facts.machine else ():
        if gpu.capability < VARLEN_LEAST:
            return f"{gpu.name} is older than the cards of {SINKS}"
        if config.model.dtype == "float32":
            return f"{SINKS} computes in 16 bits on a card"
    return ""


def in_force(config: RunConfig, facts: Facts) -> str:
    """The attention that the run computes with."""
    asked = config.model.attention
    return chosen(config, facts)[0] if asked == "auto" else asked


def keeps_scores(config: RunConfig, facts: Facts) -> bool:
    """Whether scores of all pairs of tokens are held for the backward pass: by `eager`, and with sinks where prompts are
    padded on the left, before answers of the run's own."""
    taken = in_force(config, facts)
    return taken == "eager" or (taken == SINKS and config.method.rows == "prompts")


def chosen(config: RunConfig, facts: Facts) -> tuple[str, str]:
    """What `auto` takes, and why."""
    if has_sinks(config, facts) and facts.machine is not None and facts.machine.gpus:
        reason = unfit_sinks(config, facts)
        return ("eager", reason) if reason else (SINKS, "torch's flash attention with the model's sinks in its sums")
    if facts.machine is None or not facts.machine.gpus or not kept_apart(config):
        model = known_model(config, facts)
        if model is not None and model.model_type in EAGER_ALONE:
            return "eager", f"torch's fused attention has no form for {model.model_type}"
        return "sdpa", SDPA
    order, reasons = _order(config, facts)
    # Where numbers must repeat, what is taken hangs on no time: a later launch may know others.
    times = {} if config.run.full_determinism else facts.attention_times or {}
    if (measured := fastest(order, times)) is not None:
        return measured
    fit = next((name for name in order if name != VARLEN), None)
    if fit is not None:
        why = f"{FLASH[fit].package} is installed and keeps packed rows apart without a mask of all pairs"
        rivals = [name for name in order if name != fit]
        measured_then = rivals and counts.device_count(config) == 1 and not config.run.full_determinism
        return fit, f"{why}; the start measures it against {', '.join(rivals)}" if measured_then else why
    name, why = without_mask(config, facts)
    other = (
        reasons["flash_attention_2"] if facts.packages is not None else "which others are installed is seen at launch"
    )
    return name, f"{why}; {other}" if name == VARLEN else why


def candidates(config: RunConfig, facts: Facts) -> tuple[str, ...]:
    """Those between which times decide, in the order in which they are taken without: what serves packed rows kept apart
    here, none of them where rows are others or the model has an attention of its own."""
    gpus = facts.machine.gpus if facts.machine is not None else ()
    if not gpus or not kept_apart(config) or has_sinks(config, facts) or config.run.full_determinism:
        return ()
    return _order(config, facts)[0]


def _order(config: RunConfig, facts: Facts) -> tuple[tuple[str, ...], dict[str, str | None]]:
    """What fits, and why the others do not. From the newest made for the card: 4 for Blackwell, 3 for Hopper; 4 serves Hopper
    too. cuDNN's is the fastest of the rest. Layers that may be compiled are left those that compiled layers serve."""
    blackwell = all(gpu.capability >= (10, 0) for gpu in facts.machine.gpus) if facts.machine is not None else False
    newest = ("flash_attention_4",) if blackwell else ("flash_attention_3", "flash_attention_4")
    reasons = {name: unfit(name, config, facts) for name in (*newest, CUDNN, "flash_attention_2")}
    if config.kernels.torch_compile is not False:
        words = "flash attention of a package is taken where kernels.torch_compile is false"
        reasons |= {name: words for name, reason in reasons.items() if reason is None and name != CUDNN}
    reasons[VARLEN] = unfit_varlen(config, facts)
    return tuple(name for name, reason in reasons.items() if reason is None), reasons


def fastest(order: Sequence[str], times: Mapping[str, float]) -> tuple[str, str] | None:
    """Of those that were measured the first of the order, or another that is more than 3 % faster, and why; None where less
    than two were."""
    known = [name for name in order if name in times]
    if len(known) < 2:
        return None
    quick = min(known, key=lambda name: times[name])
    taken = quick if times[known[0]] > EARNS * times[quick] else known[0]
    told = ", ".join(f"{name} {times[name]:,.2f} ms" for name in known)
    return taken, f"attention over documents like these was measured here: {told}, both ways"


def without_mask(config: RunConfig, facts: Facts) -> tuple[str, str]:
    """What keeps packed rows apart on these cards with no package, and why."""
    unfit_here = unfit_varlen(config, facts)
    if unfit_here is None:
        return VARLEN, "torch's own attention over documents needs no mask of all pairs"
    if any(gpu.capability < VARLEN_LEAST for gpu in (facts.machine.gpus if facts.machine else ())):
        # Unasked, its backward pass is not one that is known to sum in the same order each time.
        if not config.run.full_determinism and unfit(XFORMERS, config, facts) is None:
            return (
                XFORMERS,
                f"xformers is installed and keeps packed rows apart without a mask of all pairs; {unfit_here}",
            )
        return "sdpa", f"{SDPA}; {unfit_here}"
    return "flex_attention", f"it keeps packed rows apart without a mask of all pairs; {unfit_here}"


refused(
    __name__,
    Refused(
        "flash-attention-needs-half-precision",
        SETTING,
        one_of(*FLASH),
        "sdpa with float32",
        "Flash attention computes in 16 bits only: take sdpa, or dtype bfloat16.",
        _TAKE_SDPA,
        beside={fields.model.dtype: one_of("float32")},
    ),
    Refused(
        "flex-attention-needs-a-gpu",
        SETTING,
        one_of("flex_attention"),
        "sdpa or eager on a CPU",
        "On a CPU torch has no gradients for it. Take sdpa.",
        _TAKE_SDPA,
        gpu=False,
    ),
    Refused(
        "cudnn-adds-in-another-order-each-time",
        SETTING,
        one_of(CUDNN),
        "varlen or sdpa with run.full_determinism",
        f"{NOT_DETERMINISTIC}: take varlen.",
        take(SETTING, VARLEN),
        beside={fields.run.full_determinism: bool},
    ),
)


@rule(reads=(SETTING,))
def flash_attention_needs_its_package(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    attention = config.model.attention
    if attention not in FLASH or facts.packages is None:
        return
    flash = FLASH[attention]
    if facts.packages.get(flash.package, "") is None:
        todo = f"Install it with `{flash.install}`, or take sdpa."
        yield must(SETTING.path, f"sdpa without the package {flash.package}", attention, todo, fix=_TAKE_SDPA)


@rule(reads=(SETTING,))
def flash_attention_needs_its_card(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    attention, path = config.model.attention, SETTING.path
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


@rule(reads=(SETTING, fields.model.name))
def flash_attention_serves_heads_up_to_a_width(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    attention, model = config.model.attention, known_model(config, facts)
    if attention not in FLASH or model is None or model.head_dim is None:
        return
    widest = FLASH[attention].widest
    if model.head_dim > widest:
        rule_text = f"sdpa or flex_attention for heads of {model.head_dim} numbers"
        yield must(SETTING.path, rule_text, attention, f"It serves at most {widest}.", fix=_TAKE_SDPA)


@rule(reads=(SETTING, fields.model.dtype, fields.model.name))
def varlen_needs_a_card_16_bits_and_heads_of_its_width(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.model.attention != VARLEN:
        return
    if facts.machine is not None and not facts.machine.gpus:
        yield must(SETTING.path, "sdpa or eager on a CPU", VARLEN, "Take sdpa.", fix=_TAKE_SDPA)
    elif (reason := unfit_varlen(config, facts)) is not None:
        todo = f"{reason[0].upper()}{reason[1:]}: take flex_attention or sdpa."
        yield must(SETTING.path, "flex_attention or sdpa here", VARLEN, todo, fix=_TAKE_SDPA)


@rule(reads=(SETTING, fields.model.dtype, fields.model.name))
def sinks_need_a_model_that_has_them(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.model.attention != SINKS:
        return
    model, fix = known_model(config, facts), Fix("take auto", {SETTING.path: "auto"})
    if model is not None and model.model_type not in ("", *WITH_SINKS):
        todo = f"It computes the sinks of {', '.join(sorted(WITH_SINKS))}: take auto."
        yield must(SETTING.path, f"another for models of type {model.model_type}", SINKS, todo, fix=fix)
    elif reason := unfit_sinks(config, facts):
        todo = f"{reason[0].upper()}{reason[1:]}: take auto."
        yield must(SETTING.path, "eager here", SINKS, todo, fix=fix)


@rule(reads=(SETTING, fields.data.packing, fields.data.packing_cross_doc_attn_mask))
def attention_over_documents_is_for_packs_kept_apart(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.model.attention in (VARLEN, CUDNN, XFORMERS) and not kept_apart(config):
        todo = "Rows that are whole are computed by torch's fused attention under this name too."
        yield must(
            SETTING.path,
            "auto, or packed rows kept apart",
            config.model.attention,
            todo,
            severity="hint",
            fix=Fix("take auto", {SETTING.path: "auto"}),
        )


@rule(reads=(SETTING, fields.data.packing, fields.data.packing_cross_doc_attn_mask))
def packs_kept_apart_want_no_mask_of_all_pairs(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    machine, path = facts.machine, SETTING.path
    if not kept_apart(config) or machine is None or not machine.gpus:
        return
    if (taken := in_force(config, facts)) in ("sdpa", "eager"):
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


@rule(reads=(fields.model.name, fields.data.packing, fields.data.packing_cross_doc_attn_mask))
def packs_kept_apart_need_a_model_that_can(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, path = known_model(config, facts), fields.data.packing_cross_doc_attn_mask.path
    if kept_apart(config) and model is not None and model.model_type in NOT_APART:
        off = Fix("do not pack", {path: False, fields.data.packing.path: False})
        todo = "Its layers do not tell the rows of a pack apart. Switch packing off."
        yield must(path, f"false for models of type {model.model_type}", True, todo, fix=off)
