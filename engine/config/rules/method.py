"""Rules about the method and what it can use."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.kinds import example_row, reference_of
from engine.config.method import METHODS
from engine.config.rules.registry import rule
from engine.config.tree import RunConfig, fields

_LEARNS = {
    "language": "every token of the text",
    "pairs": "the chosen and the rejected answer",
    "rated": "the judged answer",
    "steps": "the verdict of each step",
    "texts": "whole texts",
    "distill": "every token that the teacher judged",
    "prompts": "answers of its own",
}
_SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")


@rule(reads=(fields.method.kind, fields.method.label_smoothing, fields.method.loss_type))
def label_smoothing_needs_a_loss_that_uses_it(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    method = config.method
    if method.kind != "dpo":
        return
    path = fields.method.label_smoothing.path
    if method.label_smoothing and method.loss_type not in _SMOOTHED:
        todo = f"Remove it, or take the loss {', '.join(_SMOOTHED[:-1])} or {_SMOOTHED[-1]}."
        rule_text = f"left out with the loss {method.loss_type}, which does not use it"
        yield must(path, rule_text, method.label_smoothing, todo, fix=Fix("remove it", unset=(path,)))
    if method.loss_type in ("exo_pair", "robust") and not method.label_smoothing:
        fix = Fix("set it to 0.1", {path: 0.1})
        yield must(
            path,
            f"above 0 with the loss {method.loss_type}",
            0,
            "Set it to the share of pairs you think are swapped.",
            fix=fix,
        )


@rule(reads=(fields.method.kind, fields.method.rpo_alpha, fields.method.loss_type))
def likelihood_is_weighed_beside_a_preference(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    method, path = config.method, fields.method.rpo_alpha.path
    if method.kind == "dpo" and method.loss_type == "sft" and method.rpo_alpha:
        rule_text = "0 with the loss sft, which is that likelihood"
        todo = "Remove it, or take another loss."
        yield must(path, rule_text, method.rpo_alpha, todo, fix=Fix("remove it", unset=(path,)))


@rule(reads=(fields.method.kind, fields.method.beta, fields.method.loss_type))
def beta_needs_a_loss_that_uses_it(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    method, path = config.method, fields.method.beta.path
    if (
        method.kind == "dpo"
        and method.loss_type == "sft"
        and path in facts.given
        and method.beta != fields.method.beta.default
    ):
        rule_text = "left out with the loss sft, which has no reference to hold on to"
        yield must(
            path, rule_text, method.beta, "Remove it, or take another loss.", fix=Fix("remove it", unset=(path,))
        )


@rule(reads=(fields.method.kind, fields.method.reference, fields.adapter.kind))
def adapter_off_needs_an_adapter(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    method, path = config.method, fields.method.reference.path
    spec = fields.method.reference.of(config)
    if reference_of(method) == "adapter_off" and config.adapter.kind == "none":
        others = " or ".join(choice for choice in spec.choices if choice != "adapter_off")
        todo = "With full weights another model must keep what this one was."
        yield must(
            path,
            f"{others} while adapter.kind is none",
            "adapter_off",
            todo,
            fix=Fix("keep a copy", {path: "copy"}),
        )


@rule(reads=(fields.method.kind, fields.method.reference, fields.adapter.kind))
def a_copy_beside_an_adapter_wastes_memory(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    method, path = config.method, fields.method.reference.path
    if reference_of(method) == "copy" and config.adapter.kind == "lora":
        todo = "It gives the same numbers without a second model in memory."
        fix = Fix("switch the adapter off instead", {path: "adapter_off"})
        yield must(path, "adapter_off to save memory", "copy", todo, severity="hint", fix=fix)


@rule(reads=(fields.method.kind, fields.adapter.kind, fields.adapter.lora_dropout))
def dropout_is_off_where_answers_are_compared(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """TRL switches dropout off in these methods: its noise would count as a difference."""
    adapter, path = config.adapter, fields.adapter.lora_dropout.path
    if config.method.kind in ("dpo", "ipo", "kto", "reward") and adapter.kind == "lora" and adapter.lora_dropout:
        todo = "Answers are compared without dropout here, since its noise would count as a difference."
        fix = Fix("leave dropout out", unset=(path,))
        yield must(path, f"0 for {config.method.kind}", adapter.lora_dropout, todo, fix=fix)


@rule(reads=(fields.method.kind, fields.data.packing))
def packing_needs_single_texts(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path = fields.data.packing.path
    if METHODS[config.method.kind].rows != "language" and config.data.packing:
        todo = "Its rows are looked at one by one, so they cannot share a sequence."
        yield must(path, f"false for {config.method.kind}", True, todo, fix=Fix("switch packing off", unset=(path,)))


@rule(reads=(fields.method.kind, fields.data.trained_turns))
def trained_turns_need_sft(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, turns = fields.data.trained_turns.path, config.data.trained_turns
    if config.method.kind != "sft" and turns != fields.data.trained_turns.default:
        what = _LEARNS[METHODS[config.method.kind].rows]
        rule_text = f"left out for {config.method.kind}, which learns from {what}"
        yield must(path, rule_text, turns, "Remove it, or set method.kind to sft.", fix=Fix("remove it", unset=(path,)))


@rule(reads=(fields.method.kind, fields.model.chat_template, fields.model.chat_template_kwargs))
def chat_template_needs_messages(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.method.kind not in ("pretrain", "embedding"):
        return
    for spec in (fields.model.chat_template, fields.model.chat_template_kwargs):
        value = spec.value(config)
        if value:
            rule_text = f"left out for {config.method.kind}, which reads plain text without any template"
            yield must(spec.path, rule_text, value, "Remove it.", fix=Fix("remove it", unset=(spec.path,)))


@rule(reads=(fields.method.kind, fields.data.train, fields.data.eval))
def formats_fit_the_method(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """Each source's format, as written or as detected, is one that the method learns from."""
    fits = METHODS[config.method.kind].formats
    for spec in (fields.data.train, fields.data.eval):
        for index, entry in enumerate(spec.value(config)):
            source = (facts.sources or {}).get(entry.path)
            found = entry.format or (source.format if source else None)
            if found is None or found in fits:
                continue
            kind = next(kind for kind, section in METHODS.items() if found in section.formats)
            example = example_row(METHODS[config.method.kind])
            such = f", or bring rows such as {example}" if example else ", or name the format and its columns"
            todo = f"Rows of this kind are for {kind}: set method.kind{such}."
            fix = Fix(f"set method.kind to {kind}", {fields.method.kind.path: kind})
            yield must(
                f"{spec.path}.{index}.format", f"{' or '.join(fits)} for {config.method.kind}", found, todo, fix=fix
            )


@rule(reads=(fields.method.kind, fields.method.loss_type, fields.optim.per_device_train_batch_size))
def mismatched_rows_need_a_batch(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """KTO measures its divergence on prompts with the answers of other rows of the batch."""
    size, path = config.optim.per_device_train_batch_size, fields.optim.per_device_train_batch_size.path
    if config.method.kind == "kto" and config.method.loss_type == "kto" and size < 2:
        todo = "Take more, or the loss apo_zero_unpaired, which needs no other rows."
        yield must(path, "2 or more for kto", size, todo, fix=Fix("set it to 2", {path: 2}))


@rule(reads=(fields.method.kind, fields.method.balance_weights, fields.method.desirable_weight))
def weights_stand_on_top_of_the_balance(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    method = config.method
    if method.kind != "kto" or not method.balance_weights:
        return
    for spec in (fields.method.desirable_weight, fields.method.undesirable_weight):
        value = spec.value(config)
        if value != spec.default:
            todo = "The rarer sort is weighed up already; switch balance_weights off if this weight was meant for that."
            fix = Fix("switch the balance off", {fields.method.balance_weights.path: False})
            yield must(
                spec.path, "left out while method.balance_weights is true", value, todo, severity="warning", fix=fix
            )


@rule(reads=(fields.method.kind, fields.run.prompts))
def samples_need_a_model_that_writes(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path = fields.run.prompts.path
    if METHODS[config.method.kind].head != "vocabulary" and config.run.prompts:
        rule_text = f"left out for {config.method.kind}, whose model writes no words"
        yield must(path, rule_text, config.run.prompts, "Remove them.", fix=Fix("remove them", unset=(path,)))


@rule(reads=(fields.method.kind, fields.optim.per_device_train_batch_size))
def negatives_come_from_the_batch(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """An embedding learns by telling its own text from the others of the batch."""
    size, path = config.optim.per_device_train_batch_size, fields.optim.per_device_train_batch_size.path
    if config.method.kind == "embedding" and size < 2:
        todo = "The other rows of a batch are what an anchor is told from; 32 and more are usual."
        yield must(path, "2 or more for embedding", size, todo, fix=Fix("set it to 32", {path: 32}))
