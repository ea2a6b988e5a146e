"""Rules about the method and what it can use."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.facts import Facts
from engine.config.findings import Finding, Fix, must
from engine.config.kinds import example_row, reference_of
from engine.config.method import METHODS
from engine.config.rule import Refused, leave_out, one_of, other_than, refused, rule, take
from engine.config.tree import RunConfig, fields
from engine.rules.sources import formats

_LEARNS = {
    "language": "every token of the text",
    "pairs": "the chosen and the rejected answer",
    "rated": "the judged answer",
    "steps": "the verdict of each step",
    "texts": "whole texts",
    "distill": "every token that the teacher judged",
    "prompts": "answers of its own",
}
_WITHOUT_TEMPLATE = ("pretrain", "embedding")
_SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")
_KIND, _LOSS, _MEANS = fields.method.kind, fields.method.loss_type, fields.method.dpo_norm_loss

refused(
    __name__,
    Refused(
        "likelihood-is-weighed-beside-a-preference",
        fields.method.rpo_alpha,
        bool,
        "0 with the loss sft, which is that likelihood",
        "Remove it, or take another loss.",
        leave_out(fields.method.rpo_alpha, "remove it"),
        beside={_KIND: one_of("dpo"), _LOSS: one_of("sft")},
    ),
    *(
        Refused(
            "means-over-tokens-need-a-loss-of-sums",
            _MEANS,
            bool,
            "false with the loss {config.method.loss_type}",
            because,
            leave_out(_MEANS, "remove it"),
            beside={_KIND: one_of("dpo"), _LOSS: one_of(*losses)},
        )
        for losses, because in (
            (("ipo", "sigmoid_norm"), "It compares means over tokens already."),
            (("sft",), "It compares no answers."),
        )
    ),
    Refused(
        "a-copy-beside-an-adapter-wastes-memory",
        fields.method.reference,
        one_of("copy"),
        "adapter_off to save memory",
        "It gives the same numbers without a second model in memory.",
        take(fields.method.reference, "adapter_off", "switch the adapter off instead"),
        beside={fields.adapter.kind: one_of("lora"), fields.method.beta: bool},
        severity="hint",
    ),
    # TRL switches dropout off in these methods.
    Refused(
        "dropout-is-off-where-answers-are-compared",
        fields.adapter.lora_dropout,
        bool,
        "0 for {config.method.kind}",
        "Answers are compared without dropout here, since its noise would count as a difference.",
        leave_out(fields.adapter.lora_dropout, "leave dropout out"),
        beside={_KIND: one_of("dpo", "ipo", "kto", "reward"), fields.adapter.kind: one_of("lora")},
    ),
    Refused(
        "packing-needs-single-texts",
        fields.data.packing,
        bool,
        "false for {config.method.kind}",
        "Its rows are looked at one by one, so they cannot share a sequence.",
        leave_out(fields.data.packing, "switch packing off"),
        beside={_KIND: one_of(*(kind for kind, method in METHODS.items() if method.rows != "language"))},
    ),
    Refused(
        "samples-need-a-model-that-writes",
        fields.run.prompts,
        bool,
        "left out for {config.method.kind}, whose model writes no words",
        "Remove them.",
        leave_out(fields.run.prompts, "remove them"),
        beside={_KIND: one_of(*(kind for kind, method in METHODS.items() if method.head != "vocabulary"))},
    ),
    *(
        Refused(
            "chat-template-needs-messages",
            spec,
            bool,
            "left out for {config.method.kind}, which reads plain text without any template",
            "Remove it.",
            leave_out(spec, "remove it"),
            beside={_KIND: one_of("pretrain", "embedding")},
        )
        for spec in (fields.model.chat_template, fields.model.chat_template_kwargs)
    ),
    *(
        Refused(
            "weights-stand-on-top-of-the-balance",
            spec,
            other_than(spec.default),
            "left out while method.balance_weights is true",
            "The rarer sort is weighed up already; switch balance_weights off if this weight was meant for that.",
            take(fields.method.balance_weights, False, "switch the balance off"),
            beside={_KIND: one_of("kto"), fields.method.balance_weights: bool},
            severity="warning",
        )
        for spec in (fields.method.desirable_weight, fields.method.undesirable_weight)
    ),
)


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
        others = " or ".join(choice for choice in spec.choices if choice not in ("adapter_off", "adapter_copy"))
        todo = "With full weights another model must keep what this one was."
        yield must(
            path,
            f"{others} while adapter.kind is none",
            "adapter_off",
            todo,
            fix=Fix("keep a copy", {path: "copy"}),
        )


@rule(reads=(fields.method.kind, fields.data.trained_turns))
def trained_turns_need_sft(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, turns = fields.data.trained_turns.path, config.data.trained_turns
    if config.method.kind != "sft" and turns != fields.data.trained_turns.default:
        what = _LEARNS[config.method.rows]
        rule_text = f"left out for {config.method.kind}, which learns from {what}"
        yield must(path, rule_text, turns, "Remove it, or set method.kind to sft.", fix=Fix("remove it", unset=(path,)))


@rule(reads=(fields.method.kind, fields.data.trained_turns, fields.data.trained_thinking))
def trained_thinking_needs_answers(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path = fields.data.trained_thinking.path
    if config.data.trained_thinking:
        return
    fix = Fix("learn the thinking too", unset=(path,))
    if config.method.kind != "sft":
        what = _LEARNS[config.method.rows]
        rule_text = f"left out for {config.method.kind}, which learns from {what}"
        yield must(path, rule_text, False, "Remove it, or set method.kind to sft.", fix=fix)
    elif config.data.trained_turns == "all":
        yield must(path, "true while all turns are learned", False, "Learn the assistant's turns alone.", fix=fix)


@rule(
    reads=(
        fields.method.kind,
        fields.model.chat_template_kwargs,
        fields.data.train,
        fields.data.eval,
        fields.run.prompts,
    )
)
def values_of_the_template_need_messages(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """Rows of text or tokens go through no template; sample prompts do."""
    path, values = fields.model.chat_template_kwargs.path, config.model.chat_template_kwargs
    if not values or config.run.prompts or config.method.kind in _WITHOUT_TEMPLATE:
        return
    fits = config.method.formats
    known_formats = set(fits) if len(fits) == 1 else {form for _, _, form in formats(config, facts)}
    if known_formats and known_formats <= {"text", "tokens", "synthetic", "distill"}:
        rule_text = "left out where rows are text or tokens and there are no sample prompts"
        todo = "Remove it: no template is filled in."
        yield must(path, rule_text, values, todo, fix=Fix("remove it", unset=(path,)))


@rule(reads=(fields.method.kind, fields.data.train, fields.data.eval))
def formats_fit_the_method(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """Each source's format, as written or as detected, is one that the method learns from."""
    fits = config.method.formats
    for place, _, form in formats(config, facts):
        if form is None or form in fits:
            continue
        kind = next(kind for kind, section in METHODS.items() if form in section.formats)
        example = example_row(type(config.method))
        such = f", or bring rows such as {example}" if example else ", or name the format and its columns"
        todo = f"Rows of this kind are for {kind}: set method.kind{such}."
        # A method that a person wrote is theirs: the rows may be the mistake.
        written = fields.method.kind.path in facts.given
        fix = None if written else Fix(f"set method.kind to {kind}", {fields.method.kind.path: kind})
        read = " or ".join(fit for fit in fits if fit != "synthetic")
        yield must(f"{place}.format", f"{read} for {config.method.kind}", form, todo, fix=fix)


@rule(reads=(fields.method.kind, fields.method.loss_type, fields.optim.per_device_train_batch_size))
def mismatched_rows_need_a_batch(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """KTO measures its divergence on prompts with the answers of other rows of the batch."""
    size, path = config.optim.per_device_train_batch_size, fields.optim.per_device_train_batch_size.path
    if config.method.kind == "kto" and config.method.loss_type == "kto" and size < 2:
        todo = "Take more, or the loss apo_zero_unpaired, which needs no other rows."
        yield must(path, "2 or more for kto", size, todo, fix=Fix("set it to 2", {path: 2}))


@rule(reads=(fields.method.kind, fields.optim.per_device_train_batch_size))
def negatives_come_from_the_batch(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """An embedding learns by telling its own text from the others of the batch."""
    size, path = config.optim.per_device_train_batch_size, fields.optim.per_device_train_batch_size.path
    if config.method.kind == "embedding" and size < 2:
        todo = "The other rows of a batch are what an anchor is told from; 32 and more are usual."
        yield must(path, "2 or more for embedding", size, todo, fix=Fix("set it to 32", {path: 32}))


@rule(reads=(fields.method.kind, fields.data.val_set_size))
def negatives_come_from_the_held_out_rows(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """Held-out rows are told from each other as well."""
    size, path = config.data.val_set_size, fields.data.val_set_size.path
    if config.method.kind == "embedding" and size == 1:
        todo = "A held-out text is told from those of the other held-out rows."
        yield must(path, "2 or more for embedding", size, todo, fix=Fix("set it to 100", {path: 100}))
