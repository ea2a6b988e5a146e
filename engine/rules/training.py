"""Rules about adapter and rate: no setting without an effect, nothing out of proportion."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from engine.config.facts import Facts, ModelFacts
from engine.config.findings import Finding, Fix, must
from engine.config.kinds import BUILTIN_MODELS
from engine.config.rule import Refused, leave_out, one_of, other_than, refused, rule, several
from engine.config.tree import RunConfig, fields
from engine.errors import nearest
from engine.facts.counts import known_model
from engine.facts.unfrozen import trained_by_name
from engine.features.packed_experts import EXPERTS_ALONE

_FLOAT32_ADAPTER, _STABILISED = fields.adapter.autocast_adapter_dtype, fields.adapter.use_rslora
_NOISE = fields.optim.neftune_noise_alpha
_LORA = one_of("lora")

refused(
    __name__,
    Refused(
        "float32-adapters-stand-beside-bfloat16",
        _FLOAT32_ADAPTER,
        bool,
        "left out with dtype {config.model.dtype}",
        "Beside {config.model.dtype} the adapter is float32 in any case.",
        leave_out(_FLOAT32_ADAPTER),
        beside={fields.adapter.kind: _LORA, fields.model.dtype: other_than("bfloat16")},
    ),
    Refused(
        "rank-stabilised-needs-a-rank",
        _STABILISED,
        bool,
        "false while adapter.r is 1",
        "The root of 1 is 1, so the adapter is scaled as it is without. Take a higher rank, or remove it.",
        leave_out(_STABILISED),
        beside={fields.adapter.kind: _LORA, fields.adapter.r: one_of(1)},
    ),
    Refused(
        "noise-is-for-answers-that-are-not-compared",
        _NOISE,
        bool,
        "left out for {config.method.kind}",
        "What is compared or scored would be its noise too: that of the reference, of the other answer, of a verdict.",
        leave_out(_NOISE, "leave the noise out"),
        beside={fields.method.kind: other_than("sft", "pretrain", "distill")},
    ),
    Refused(
        "noise-knows-the-length-of-rows",
        _NOISE,
        bool,
        "left out with distributed.context_parallel_size {config.distributed.context_parallel_size}",
        "A process has a part of each row, by whose length its noise would be too large.",
        leave_out(_NOISE, "leave the noise out"),
        beside={fields.distributed.context_parallel_size: several},
    ),
)


@rule(reads=(fields.adapter.kind, fields.adapter.target_modules, fields.adapter.target_parameters))
def target_modules_name_layers(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    adapter, path = config.adapter, fields.adapter.target_modules.path
    if adapter.kind != "lora":
        return
    targets = adapter.target_modules
    if targets == [] and adapter.target_parameters:
        return
    if not targets or (isinstance(targets, str) and not targets.strip()):
        yield must(
            path,
            "all-linear, module names or a regular expression",
            None,
            "Name the layers.",
            fix=Fix("all linear layers", unset=(path,)),
        )
    elif isinstance(targets, str) and targets != "all-linear":
        try:
            re.compile(targets)
        except (re.error, RecursionError, OverflowError):
            yield must(
                path,
                "a regular expression",
                targets,
                "Its brackets or stars do not add up.",
                fix=Fix("all linear layers", unset=(path,)),
            )
        else:
            yield from _one_word(targets.strip(), path)


def _one_word(word: str, path: str) -> Iterator[Finding]:
    """An expression must match whole dotted names, which one word never does: a name was meant, or all-linear."""
    if not re.fullmatch(r"[\w-]+", word):
        return
    everything = word.lower() == "all" or nearest(word, ["all-linear"]) is not None
    todo = (
        "Did you mean all-linear?"
        if everything
        else "An expression must match the whole dotted name; a list names layers."
    )
    fix = Fix("all linear layers", unset=(path,)) if everything else Fix("name it in a list", {path: [word]})
    yield must(path, "all-linear, a list of module names or a regular expression", word, todo, fix=fix)


@rule(reads=(fields.model.name, fields.adapter.kind, fields.adapter.target_modules))
def target_modules_exist_in_the_model(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    adapter, model = config.adapter, known_model(config, facts)
    if adapter.kind != "lora" or model is None or not model.linears:
        return
    if not isinstance(adapter.target_modules, list):
        return
    names = [name.rpartition(".")[2] for name, *_ in model.linears]
    known = {*names, "lm_head", "embed_tokens", "wte", "gate"}
    for index, target in enumerate(adapter.target_modules):
        leaf = target.rpartition(".")[2]
        if leaf in known or not leaf:
            continue
        close = nearest(leaf, names)
        path = f"{fields.adapter.target_modules.path}.{index}"
        todo = f"Did you mean {close}?" if close else f"It has {', '.join(dict.fromkeys(names))}."
        yield must(path, f"a linear layer of {model.model_type}", target, todo)


@rule(reads=(fields.method.kind, fields.adapter.kind, fields.adapter.target_modules))
def the_head_has_no_adapter(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    adapter, spec = config.adapter, fields.adapter.target_modules
    if adapter.kind != "lora" or config.method.head != "vocabulary":
        return
    if not isinstance(adapter.target_modules, list):
        return
    heads = [target for target in adapter.target_modules if target.rpartition(".")[2] == "lm_head"]
    if heads:
        saved = fields.adapter.modules_to_save.path
        rest = [target for target in adapter.target_modules if target not in heads]
        todo = "Losses read the head's weight as it is: leave it out, or train it whole with adapter.modules_to_save."
        whole = {spec.path: rest, saved: [*adapter.modules_to_save, "lm_head"]}
        yield must(spec.path, "layers other than the head", heads, todo, fix=Fix("train the head whole", whole))


_OF_ONE_EXPERT = re.compile(r"experts\.(\d+\.|(gate_proj|up_proj|w[123])$)")


def _meant(model: ModelFacts | None, targets: Sequence[str]) -> dict[str, str]:
    """Those that nearly name a weight of the model's experts, and the name; families have others too, which only a model tells."""
    names = [name for name, *_ in model.expert_weights] if model is not None else []
    found = {}
    for target in targets:
        module, _, leaf = target.rpartition(".")
        if leaf not in names and not leaf.endswith("_bias") and (near := nearest(leaf, names, cutoff=0.85)):
            found[target] = f"{module}.{near}"
    return found


@rule(
    reads=(
        fields.adapter.kind,
        fields.adapter.target_parameters,
        fields.adapter.use_dora,
        fields.adapter.lora_dropout,
        fields.model.quantization,
        fields.model.name,
    )
)
def target_parameters_are_plain_lora(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """PEFT adds B x A to the weight itself, where there is no input to drop and no length to split off."""
    adapter, path = config.adapter, fields.adapter.target_parameters.path
    if adapter.kind != "lora" or not adapter.target_parameters:
        return
    for spec, value in (
        (fields.adapter.use_dora, adapter.use_dora),
        (fields.adapter.lora_dropout, adapter.lora_dropout),
    ):
        if value:
            todo = f"Such an adapter is added to the weight itself and cannot have it: leave out {spec.name}."
            fix = Fix(f"leave out {spec.name}", unset=(spec.path,))
            yield must(path, f"empty with {spec.name}", adapter.target_parameters, todo, fix=fix)
    model = known_model(config, facts)
    mixture = model is None or not model.model_type or bool(model.experts)
    of_experts = [target for target in adapter.target_parameters if "experts." in target]
    split = [target for target in of_experts if _OF_ONE_EXPERT.search(target)]
    if of_experts and not mixture:
        todo = "Its config.json tells of no experts: leave them out; target_modules reaches its linear layers."
        fix = Fix("leave them out", unset=(path,))
        yield must(path, "empty for a model without experts", of_experts, todo, fix=fix)
    elif split:
        todo = (
            "transformers holds all experts of a layer in one weight, and gate and up in one: name "
            "mlp.experts.gate_up_proj and mlp.experts.down_proj."
        )
        yield must(path, "names of weights that hold all experts", split, todo)
    elif meant := _meant(model, of_experts):
        todo = f"Did you mean {' and '.join(meant.values())}?"
        fix = Fix("take these", {path: [meant.get(target, target) for target in adapter.target_parameters]})
        yield must(path, "names of weights of its experts", list(meant), todo, fix=fix)
    if config.model.quantization == "fp8" or (config.model.quantization != "none" and not mixture and not of_experts):
        todo = "Quantized weights cannot be added to: set model.quantization to none, or take target_modules."
        fix = Fix("leave them out", unset=(path,))
        yield must(path, f"empty with {config.model.quantization} weights", adapter.target_parameters, todo, fix=fix)


@rule(reads=(fields.adapter.kind, fields.adapter.unfrozen_parameters))
def unfrozen_parameters_are_expressions(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    adapter = config.adapter
    for index, pattern in enumerate(adapter.unfrozen_parameters if adapter.kind == "none" else ()):
        path = f"{fields.adapter.unfrozen_parameters.path}.{index}"
        if not pattern.strip():
            yield must(path, "a regular expression", pattern, "An empty one would match every weight.")
            continue
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError):
            yield must(path, "a regular expression", pattern, "Its brackets or stars do not add up.")


@rule(reads=(fields.adapter.kind, fields.adapter.unfrozen_parameters, fields.model.name))
def unfrozen_parameters_match_weights(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """Where the model's shape is known, expressions that none of its weights begins with."""
    adapter, model = config.adapter, known_model(config, facts)
    if adapter.kind != "none" or not adapter.unfrozen_parameters or model is None:
        return
    if trained_by_name(model, adapter.unfrozen_parameters) == 0:
        path = fields.adapter.unfrozen_parameters.path
        todo = "Weights are named such as model.layers.0.self_attn.q_proj.weight."
        rule_text = f"expressions that some weight of {model.model_type} begins with"
        yield must(path, rule_text, adapter.unfrozen_parameters, todo, fix=Fix("train every weight", unset=(path,)))


@rule(reads=(fields.adapter.kind, fields.adapter.bias, fields.adapter.use_dora))
def biases_change_the_base(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    adapter, path = config.adapter, fields.adapter.bias.path
    if adapter.kind == "lora" and adapter.bias != "none" and fields.method.reference.applies(config):
        todo = "The reference is the model with its adapter off, and trained biases would change it."
        yield must(
            path, f"none for {config.method.kind}", adapter.bias, todo, fix=Fix("leave biases alone", unset=(path,))
        )


@rule(reads=(fields.model.name, fields.adapter.kind, fields.adapter.bias))
def biases_are_there(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    adapter, model, path = config.adapter, known_model(config, facts), fields.adapter.bias.path
    if adapter.kind != "lora" or adapter.bias == "none" or model is None:
        return
    if model.biases is False:
        todo = "Its files hold no bias vectors, as those of most decoders of today."
        yield must(path, f"none for {model.name}", adapter.bias, todo, fix=Fix("leave it out", unset=(path,)))


_HEADS = {"vocabulary": ("lm_head",), "score": ("score", "classifier"), "steps": ("score", "classifier"), "none": ()}


@rule(reads=(fields.model.name, fields.method.kind, fields.adapter.kind, fields.adapter.modules_to_save))
def saved_modules_exist_in_the_model(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """Names are matched from their end, as PEFT does, which says nothing of one that matches none."""
    adapter, model = config.adapter, known_model(config, facts)
    if adapter.kind != "lora" or model is None or model.modules is None:
        return
    known = model.modules | set(_HEADS[config.method.head])
    leaves = sorted({leaf for path in known if not (leaf := path.rpartition(".")[2]).isdigit()})
    for index, name in enumerate(adapter.modules_to_save):
        if name and not any(path.endswith(name) for path in known):
            path, close = f"{fields.adapter.modules_to_save.path}.{index}", nearest(name, leaves)
            todo = f"Did you mean {close}?" if close else f"It has {', '.join(leaves[:12])}."
            fix = Fix(f"take {close}", {path: close}) if close else None
            yield must(path, f"a module of {model.name}", name, todo, fix=fix)


@rule(reads=(fields.adapter.kind, fields.adapter.modules_to_save, fields.model.quantization))
def saved_modules_are_not_quantized(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    adapter, path = config.adapter, fields.adapter.modules_to_save.path
    if adapter.kind != "lora" or config.model.quantization in ("none", *EXPERTS_ALONE) or facts.model is None:
        return
    linear = {name for name, *_ in facts.model.linears}
    bad = [name for name in adapter.modules_to_save if name in linear]
    if bad:
        todo = "Quantized layers cannot be trained whole; give them an adapter through target_modules."
        rest = [name for name in adapter.modules_to_save if name not in linear]
        yield must(path, "modules that are not quantized", bad, todo, fix=Fix("take them out", {path: rest}))


@rule(reads=(fields.optim.max_steps, fields.optim.num_train_epochs))
def epochs_or_steps(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, epochs = fields.optim.num_train_epochs.path, config.optim.num_train_epochs
    if config.optim.max_steps is not None and epochs != fields.optim.num_train_epochs.default:
        rule_text = f"left out while max_steps is {config.optim.max_steps}, which alone decides the length"
        yield must(path, rule_text, epochs, "Remove one of the two.", fix=Fix("remove the epochs", unset=(path,)))


SMALL_MODELS_RATE = 0.1
"""More than any optimizer but SGD takes, for models of any size."""


@rule(reads=(fields.optim.learning_rate, fields.optim.optim, fields.method.kind, fields.adapter.kind))
def learning_rate_is_in_proportion(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """A rate far above the usual one for a pretrained model breaks it; a tiny built-in model wants more. The steps of plain SGD
    are as long as its gradients, so that its rates are other ones."""
    from engine.config.method import LEARNING_RATES

    rate, path = config.optim.learning_rate, fields.optim.learning_rate.path
    usual = LEARNING_RATES[config.method.kind, config.adapter.kind]
    small = facts.model is not None and facts.model.parameters is not None and facts.model.parameters < 50_000_000
    if rate == "auto" or config.optim.optim == "sgd":
        return
    if config.model.name in BUILTIN_MODELS or small:
        if rate > SMALL_MODELS_RATE:
            todo = "Even a tiny model only unlearns with so much."
            fix = Fix("take 0.001", {path: 0.001})
            yield must(path, f"at most about {SMALL_MODELS_RATE:g}", rate, todo, severity="warning", fix=fix)
        return
    if rate > 20 * usual:
        todo = f"Usual here is about {usual:g}; so much more breaks most models."
        yield must(
            path,
            f"at most about {20 * usual:g}",
            rate,
            todo,
            severity="warning",
            fix=Fix("take the usual rate", {path: "auto"}),
        )


@rule(reads=(fields.data.eval, fields.data.val_set_size, fields.optim.per_device_eval_batch_size))
def eval_batch_needs_held_out_data(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, size = fields.optim.per_device_eval_batch_size.path, config.optim.per_device_eval_batch_size
    if size is not None and not config.data.evaluates and size != config.optim.per_device_train_batch_size:
        yield must(
            path,
            "left out without held-out data",
            size,
            "Name data.eval, give data.val_set_size, or remove it.",
            fix=Fix("remove it", unset=(path,)),
        )


@rule(reads=(fields.optim.tf32,))
def tf32_needs_a_card_that_has_it(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path = fields.optim.tf32.path
    if (
        config.optim.tf32 is True
        and facts.machine is not None
        and not all(gpu.capability >= (8, 0) for gpu in facts.machine.gpus or ())
    ):
        name = facts.machine.gpus[0].name
        yield must(
            path,
            f"false or auto on {name}",
            True,
            "Only cards since 2020 have it.",
            fix=Fix("let it be chosen", unset=(path,)),
        )
    elif config.optim.tf32 is True and facts.machine is not None and not facts.machine.gpus:
        yield must(
            path, "false or auto without a GPU", True, "A CPU has no TF32.", fix=Fix("let it be chosen", unset=(path,))
        )


@rule(reads=(fields.optim.tf32, fields.model.dtype, fields.adapter.kind, fields.adapter.autocast_adapter_dtype))
def tf32_needs_products_of_float32(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, adapter = fields.optim.tf32.path, config.adapter
    in_float32 = adapter.kind == "lora" and adapter.autocast_adapter_dtype
    cpu = facts.machine is not None and not facts.machine.gpus  # which another rule says
    if config.optim.tf32 is True and config.model.dtype == "bfloat16" and not in_float32 and not cpu:
        todo = "It is for products of float32 numbers, and all weights are bfloat16."
        fix = Fix("let it be chosen", unset=(path,))
        yield must(path, "left out with dtype bfloat16", True, todo, severity="warning", fix=fix)
