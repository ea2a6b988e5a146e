"""Rules about the data: named, there, long enough, and no setting without an effect."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.facts import Facts
from engine.config.files import DATA_SUFFIXES
from engine.config.findings import Finding, Fix, must, say
from engine.config.method import METHODS
from engine.config.rules.registry import rule
from engine.config.tree import RunConfig, fields


@rule(reads=(fields.data.train,))
def training_data_is_named(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if not config.data.train:
        path = fields.data.train.path
        todo = "Name a file, or take builtin/dates to try things out."
        yield must(
            path,
            "at least one source of rows",
            None,
            todo,
            fix=Fix("use builtin/dates", {path: [{"path": "builtin/dates"}]}),
        )


@rule(reads=(fields.data.train, fields.data.eval))
def sources_exist(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if facts.sources is None:
        return
    for spec in (fields.data.train, fields.data.eval):
        for index, entry in enumerate(spec.value(config)):
            source = facts.sources.get(entry.path)
            if source is None:
                continue
            path = f"{spec.path}.{index}.path"
            if source.exists is False:
                todo = source.problem or "Put your rows there, or give the path from this config's folder."
                yield must(path, "a file, folder or data set that exists", entry.path, todo)
            elif source.problem:
                yield say(path, source.problem, severity="error")
            elif source.rows == 0:
                yield must(path, "a source with at least one row", entry.path, "The file is empty.")


@rule(reads=(fields.data.train, fields.data.eval))
def builtin_data_are_known(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for spec in (fields.data.train, fields.data.eval):
        for index, entry in enumerate(spec.value(config)):
            if entry.path.startswith("builtin/") and entry.path != "builtin/dates":
                path = f"{spec.path}.{index}.path"
                fix = Fix("use builtin/dates", {path: "builtin/dates"})
                yield must(path, "builtin/dates", entry.path, "It is the only built-in data set.", fix=fix)


@rule(reads=(fields.data.train, fields.data.eval))
def held_out_rows_are_not_trained_on(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    trained = {
        (entry.path, _split(entry.path, entry.split, "train")): index for index, entry in enumerate(config.data.train)
    }
    for index, entry in enumerate(config.data.eval):
        default = "train" if entry.path.lower().endswith(DATA_SUFFIXES) else "eval"
        if (entry.path, _split(entry.path, entry.split, default)) in trained:
            path = f"{fields.data.eval.path}.{index}.path"
            todo = "The loss on rows that are trained on says nothing about new ones. Hold some rows back in a file of their own."
            yield must(path, "another source than the training data", entry.path, todo, severity="warning")


def _split(path: str, split: str | None, default: str) -> str:
    return split or default


@rule(reads=(fields.data.excess_length, fields.data.truncation_side))
def truncation_side_needs_truncation(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, side = fields.data.truncation_side.path, config.data.truncation_side
    if side != fields.data.truncation_side.default and config.data.excess_length != "truncate":
        rule_text = f"left out while excess_length is {config.data.excess_length}, which cuts nothing"
        fix = Fix("cut rows that are too long", {fields.data.excess_length.path: "truncate"})
        yield must(path, rule_text, side, "Remove it, or set excess_length to truncate.", fix=fix)


@rule(reads=(fields.data.excess_length, fields.method.kind))
def split_needs_plain_text(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path = fields.data.excess_length.path
    if config.data.excess_length == "split" and config.method.kind != "pretrain":
        rule_text = f"error, drop or truncate for {config.method.kind}"
        yield must(
            path,
            rule_text,
            "split",
            "Only plain text can be split into several rows.",
            fix=Fix("leave long rows out", {path: "drop"}),
        )


@rule(reads=(fields.data.packing, fields.data.packing_cross_doc_attn_mask))
def packing_cross_doc_attn_mask_needs_packing(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path = fields.data.packing_cross_doc_attn_mask.path
    if config.data.packing_cross_doc_attn_mask and not config.data.packing:
        fix = Fix("switch packing on", {fields.data.packing.path: True})
        yield must(
            path,
            "false while packing is off",
            True,
            "Rows that are not packed cannot see each other. Switch packing on or remove it.",
            fix=fix,
        )


@rule(reads=(fields.data.packing, fields.data.packing_cross_doc_attn_mask))
def packed_rows_see_each_other(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path = fields.data.packing_cross_doc_attn_mask.path
    if config.data.packing and not config.data.packing_cross_doc_attn_mask:
        fix = Fix("keep packed rows apart", {path: True})
        yield must(
            path,
            "true to keep packed rows apart",
            False,
            "Without it a row can attend to the rows before it in its pack.",
            severity="warning",
            fix=fix,
        )


@rule(reads=(fields.model.name, fields.data.max_length))
def max_length_is_within_the_model(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, path, length = facts.model, fields.data.max_length.path, config.data.max_length
    if model is None or model.name != config.model.name or not model.max_length or length <= model.max_length:
        return
    todo = f"{model.name} knows no more positions. Rows beyond that would be read as noise."
    # A default that is too long for a small model harms only when rows are that long.
    longest = facts.data.longest if facts.data else None
    harmless = (
        longest is not None
        and longest <= model.max_length
        and config.method.kind != "pretrain"
        and not config.data.packing
    )
    yield must(
        path,
        f"at most {model.max_length}",
        length,
        todo,
        severity="hint" if harmless else "error",
        fix=Fix(f"set it to {model.max_length}", {path: model.max_length}),
    )


@rule(reads=(fields.data.excess_length, fields.data.max_length))
def rows_that_are_too_long_are_decided(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    data = facts.data
    if data is None or not data.truncated or not data.source_rows:
        return
    path, share = fields.data.excess_length.path, f"{data.truncated:,} of {data.source_rows:,} rows"
    if config.data.excess_length == "error":
        longest = f", the longest has {data.longest:,} tokens" if data.longest else ""
        fix = Fix("cut them", {path: "truncate"})
        yield say(
            path,
            f"{share} are longer than max_length {config.data.max_length:,}{longest}. Cut them, drop them, or raise max_length.",
            severity="error",
            fix=fix,
        )
    elif config.data.excess_length in ("truncate", "drop"):
        what = "cut" if config.data.excess_length == "truncate" else "left out"
        severity = "warning" if data.truncated > 0.05 * data.source_rows else "hint"
        yield say(
            path,
            f"{share} are longer than max_length {config.data.max_length:,} and will be {what}.",
            severity="warning" if severity == "warning" else "hint",
        )


@rule(reads=(fields.data.train, fields.data.trained_turns))
def rows_have_something_to_learn(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    data = facts.data
    if data is None or not data.masked or not data.source_rows:
        return
    path = fields.data.train.path
    if data.masked >= data.source_rows:
        yield say(
            path,
            "no row has a token to learn: every one is masked. Look at the preview and at data.trained_turns.",
            severity="error",
        )
    else:
        yield say(path, f"{data.masked:,} of {data.source_rows:,} rows have no token to learn and will be left out.")


@rule(
    reads=(
        fields.method.kind,
        fields.data.train,
        fields.optim.per_device_train_batch_size,
        fields.optim.gradient_accumulation_steps,
        fields.run.devices,
    )
)
def a_batch_has_enough_rows(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    from engine.config.counted import effective_batch, train_rows

    rows, batch = train_rows(config, facts), effective_batch(config, facts)
    # Batches of methods with rewards are answers, several a row; `there_are_prompts_for_one_sampling` is theirs.
    by_row = METHODS[config.method.kind].rows != "prompts" and not config.data.packing
    if rows and rows < batch and by_row:
        path = fields.optim.gradient_accumulation_steps.path
        todo = "Each epoch is a single step: take a smaller batch or more rows."
        yield must(path, f"small enough for an effective batch of at most {rows} rows", batch, todo, severity="warning")
