"""Rules about the data: named, there, long enough, and no setting without an effect."""

from __future__ import annotations

from collections.abc import Iterator
from operator import not_

from engine.config.facts import DataFacts, Facts, SourceFacts
from engine.config.files import DATA_SUFFIXES, REMOTE, scheme_of
from engine.config.findings import Finding, Fix, Severity, must, notice
from engine.config.kinds import BUILTIN_ROWS, BUILTIN_SPLITS, example_row
from engine.config.rule import Check, Refused, leave_out, one_of, other_than, refused, rule, take
from engine.config.tree import FieldSpec, RunConfig, fields
from engine.errors import nearest, visible
from engine.facts.counts import effective_batch, held_out_of, known_model, train_rows
from engine.facts.template_flaws import TEMPLATE_FLAWS
from engine.rules.sources import sources

_CUT, _LONG = fields.data.truncation_side, fields.data.excess_length
_AHEAD = fields.data.dataloader_prefetch_factor
_HELD_OUT = fields.data.val_set_size
_PACKING, _APART = fields.data.packing, fields.data.packing_cross_doc_attn_mask

refused(
    __name__,
    Refused(
        "truncation-side-needs-truncation",
        _CUT,
        other_than(_CUT.default),
        "left out while excess_length is {config.data.excess_length}, which cuts nothing",
        "Remove it, or set excess_length to truncate.",
        take(_LONG, "truncate", "cut rows that are too long"),
        beside={_LONG: other_than("truncate")},
    ),
    Refused(
        "split-needs-plain-text",
        _LONG,
        one_of("split"),
        "error, drop or truncate for {config.method.kind}",
        "Only plain text can be split into several rows.",
        take(_LONG, "drop", "leave long rows out"),
        beside={fields.method.kind: other_than("pretrain")},
    ),
    Refused(
        "batches-ahead-need-loader-processes",
        _AHEAD,
        other_than(_AHEAD.default),
        "left out while data.dataloader_num_workers is 0",
        "Without loader processes nothing is made ahead.",
        leave_out(_AHEAD, "leave it out"),
        beside={fields.data.dataloader_num_workers: one_of(0)},
    ),
    Refused(
        "packing-cross-doc-attn-mask-needs-packing",
        _APART,
        bool,
        "false while packing is off",
        "Rows that are not packed cannot see each other. Switch packing on or remove it.",
        take(_PACKING, True, "switch packing on"),
        beside={_PACKING: not_},
    ),
    Refused(
        "packed-rows-see-each-other",
        _APART,
        not_,
        "true to keep packed rows apart",
        "Without it a row can attend to the rows before it in its pack.",
        take(_APART, True, "keep packed rows apart"),
        beside={_PACKING: bool},
        severity="warning",
    ),
    Refused(
        "held-out-rows-are-named-once",
        _HELD_OUT,
        bool,
        "left out beside data.eval",
        "data.eval names the held-out rows already. Remove one of them.",
        leave_out(_HELD_OUT, "hold nothing out of the training data"),
        beside={fields.data.eval: bool},
    ),
    Refused(
        "a-stream-is-not-deduplicated",
        fields.data.deduplicate,
        bool,
        "left out while rows are streamed",
        "Which rows are equal is known once all are read. Stream none, or deduplicate the files before.",
        leave_out(fields.data.deduplicate, "take all rows"),
        beside={fields.data.streaming: bool},
    ),
    Refused(
        "nothing-is-held-out-of-a-stream",
        _HELD_OUT,
        bool,
        "left out while rows are streamed",
        "Which rows are held out is known once all are read. Name held-out rows under data.eval, or stream none.",
        leave_out(_HELD_OUT, "hold nothing out"),
        beside={fields.data.streaming: bool},
    ),
)


@rule(reads=(_HELD_OUT, fields.data.train))
def some_rows_are_held_out_and_some_trained_on(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    size, path = config.data.val_set_size, _HELD_OUT.path
    if not size:
        return
    if size > 1 and not float(size).is_integer():
        fix = Fix(f"hold {round(size):,} rows out", {path: float(round(size))})
        yield must(path, "a share below 1, or a whole number of rows", size, "A row is held out or not.", fix=fix)
        return
    known = [(entry, (facts.sources or {}).get(entry.path)) for entry in config.data.train]
    counts = [min(entry.rows or seen.rows, seen.rows) for entry, seen in known if seen is not None and seen.rows]
    rows = sum(counts) if counts and len(counts) == len(known) else None
    if rows is not None and held_out_of(size, rows) >= rows:
        fewer = Fix("hold a tenth out", {path: 0.1}) if held_out_of(0.1, rows) < rows else None
        yield must(
            path, f"fewer than the {rows:,} rows of the training data", size, "None is left to train on.", fix=fewer
        )


@rule(reads=(fields.data.train, fields.method.kind))
def training_data_is_named(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if not config.data.train:
        path = fields.data.train.path
        todo, fix = "Name a file, or take builtin/dates to try things out.", None
        if "messages" in config.method.formats:
            fix = Fix("use builtin/dates", {path: [{"path": "builtin/dates"}]})
        else:
            todo = f"Name a file of rows such as {example_row(type(config.method))}."
        yield must(path, "at least one source of rows", None, todo, fix=fix)


@rule(reads=(fields.data.train, fields.data.eval))
def sources_exist(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for place, entry, source in sources(config, facts):
        path = f"{place}.path"
        if source is None:
            continue
        meant, use = f"Did you mean {source.near}?", Fix(f"use {source.near}", {path: source.near})
        if source.exists is False:
            todo = source.problem or "Put your rows there, or give the path from this config's folder."
            fix = use if source.near and not source.problem else None
            yield must(path, "a file, folder or data set that exists", entry.path, meant if fix else todo, fix=fix)
        elif source.problem:
            yield notice(path, source.problem, severity="error")
        elif source.rows == 0:
            yield must(path, "a source with at least one row", entry.path, "The file is empty.")
        elif source.exists is None and not scheme_of(entry.path) and (source.near or "/" not in entry.path):
            # Most data sets of the hub have an owner; a name alone is mostly a file's, without its ending or misspelled.
            taken = (
                f"{entry.path} is no file or folder here, so it is taken for a data set on the hub and loaded at launch"
            )
            todo = meant if source.near else "A file's name has an ending such as .jsonl."
            yield notice(
                path, f"{taken}; whether the hub has it is seen then. {todo}", fix=use if source.near else None
            )


@rule(reads=(fields.data.train, fields.data.eval))
def sources_elsewhere_can_be_fetched(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for place, entry, _ in sources(config, facts):
        path, scheme = f"{place}.path", scheme_of(entry.path)
        if scheme == "file":
            local = entry.path.partition("://")[2]
            fix = Fix("take the path alone", {path: local}) if local.startswith("/") else None
            yield must(path, "a path of this machine as it is", entry.path, "It needs no file:// before it.", fix=fix)
        elif scheme and scheme not in REMOTE:
            known = ", ".join(f"{each}://" for each in REMOTE)
            yield must(path, f"a path, a name on the hub or an address of {known}", entry.path, "Name one of them.")
        elif scheme and facts.packages is not None and facts.packages.get(package := REMOTE[scheme], "") is None:
            todo = f"Install it: pip install {package}."
            yield must(path, f"rows that can be fetched, for which the package {package} is missing", entry.path, todo)


@rule(reads=(fields.data.train, fields.data.eval, fields.data.on_bad_row))
def bad_rows_are_decided(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """By a first look; once all rows are counted, `rows_can_be_read` knows how many there are."""
    if facts.data is not None and facts.data.bad is not None:
        return
    for place, _, source in sources(config, facts):
        if source is not None and source.bad and not source.problem:
            yield _bad_rows(config, f"{place}.path", source)


def _bad_rows(config: RunConfig, path: str, source: SourceFacts) -> Finding:
    """Rows that cannot be read among those looked at: an error unless they are left out by choice."""
    setting, share = fields.data.on_bad_row.path, f"{source.bad:,} of the first {source.looked:,} rows"
    if config.data.on_bad_row == "skip":
        verb = "is" if source.bad == 1 else "are"
        return notice(path, f"{share} cannot be read and {verb} left out. The first: {source.bad_row}")
    others = f" {share} cannot be read." if source.bad > 1 else ""
    return notice(path, f"{source.bad_row}{others}", severity="error", fix=Fix("leave bad rows out", {setting: "skip"}))


@rule(reads=(fields.data.train, fields.data.trained_turns, fields.method.kind))
def turns_are_chosen_among_turns(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """Prompts and completions that are plain texts hold one answer: `last` and `flag` choose nothing in them."""
    path, chosen = fields.data.trained_turns.path, config.data.trained_turns
    if chosen not in ("last", "flag") or config.method.rows != "language" or not facts.sources:
        return
    known = [facts.sources.get(entry.path) for entry in config.data.train]
    if known and all(seen is not None and seen.turns is False and seen.format in _PAIRS for seen in known):
        yield must(
            path,
            "assistant or all for rows of a prompt and a completion",
            chosen,
            "Each row has one answer, which is learned whole; no turn of it can be chosen.",
            fix=Fix("learn the completions", unset=(path,)),
        )


_PAIRS = ("prompt_completion",)


@rule(reads=(fields.data.train, fields.data.eval))
def roles_are_known(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for place, entry, _ in sources(config, facts):
        for name, role in entry.roles.items():
            if role not in _ROLES:
                path = f"{place}.roles.{visible(name)}"
                yield must(path, "system, user, assistant or tool", role, "Say which of them this name means.")


_ROLES = ("system", "user", "assistant", "tool")


@rule(reads=(fields.data.train, fields.data.eval))
def builtin_data_are_known(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for place, entry, _ in sources(config, facts):
        if entry.path.startswith("builtin/") and entry.path not in BUILTIN_ROWS:
            path = f"{place}.path"
            close = nearest(entry.path, BUILTIN_ROWS)
            fix = Fix(f"use {close or BUILTIN_ROWS[0]}", {path: close or BUILTIN_ROWS[0]})
            todo = f"Did you mean {close}?" if close else "There are no other built-in data sets."
            yield must(path, f"{', '.join(BUILTIN_ROWS[:-1])} or {BUILTIN_ROWS[-1]}", entry.path, todo, fix=fix)
        elif entry.path in BUILTIN_ROWS and entry.split not in (None, *BUILTIN_SPLITS):
            path = f"{place}.split"
            other = BUILTIN_SPLITS[place.startswith(fields.data.eval.path)]
            todo = "The built-in rows have no other split."
            yield must(path, " or ".join(BUILTIN_SPLITS), entry.split, todo, fix=Fix(f"use {other}", {path: other}))


@rule(reads=(fields.data.train, fields.data.eval))
def held_out_rows_are_not_trained_on(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    trained = {(entry.path, entry.split or "train"): index for index, entry in enumerate(config.data.train)}
    for index, entry in enumerate(config.data.eval):
        default = "train" if entry.path.lower().endswith(DATA_SUFFIXES) else "eval"
        if (entry.path, entry.split or default) in trained:
            path = f"{fields.data.eval.path}.{index}.path"
            todo = "The loss on rows that are trained on says nothing about new ones. Hold some rows back in a file of their own."
            yield must(path, "another source than the training data", entry.path, todo, severity="warning")


@rule(reads=(fields.model.name, fields.data.max_length))
def max_length_is_within_the_model(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model, path, length = known_model(config, facts), fields.data.max_length.path, config.data.max_length
    if model is None or not model.max_length or length <= model.max_length:
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


FROM_COUNTS: set[str] = {"bad-rows-are-decided"}
"""The rules that speak of counted rows: their findings are no reason not to count again."""
_SOME = 0.01
"""The share of rows from which on their loss is a warning."""


def _from_counts(check: Check) -> Check:
    FROM_COUNTS.add(check.__name__.replace("_", "-"))
    return check


def _counts(config: RunConfig, facts: Facts) -> Iterator[tuple[FieldSpec, DataFacts, str]]:
    """What is counted of each split: its setting, the counts, and how its rows are called."""
    if facts.data is not None:
        yield fields.data.train, facts.data, "rows"
        if facts.data.held_out is not None:
            own = not config.data.val_set_size or config.data.eval
            yield fields.data.eval if own else fields.data.val_set_size, facts.data.held_out, "held-out rows"


def _share(number: int, data: DataFacts, rows: str) -> str:
    looked = " looked at" if data.counted == "sample" else ""
    return f"{number:,} of {data.source_rows:,} {rows}{looked}"


def _weight(number: int, data: DataFacts) -> Severity:
    return "warning" if number > _SOME * (data.source_rows or 1) else "hint"


def _first(data: DataFacts, what: str) -> str:
    """Where the first row stands that this became of, as a sentence; empty where nobody noted it."""
    place = dict(data.first_at).get(what)
    return f" The first: {place}." if place else ""


def _longer(config: RunConfig, facts: Facts, longest: int | None) -> Fix | None:
    """A limit that lets every row in, or as many as the positions that the model knows."""
    model = known_model(config, facts)
    if not longest or longest <= config.data.max_length or model is None or not model.max_length:
        return None
    path, most = fields.data.max_length.path, model.max_length
    if most <= config.data.max_length:
        return None
    if longest <= most:
        return Fix(f"raise it to {longest:,}", {path: longest})
    return Fix(f"raise it to {most:,} and cut the rest", {path: most, fields.data.excess_length.path: "truncate"})


@rule(reads=(fields.data.excess_length, fields.data.max_length, fields.method.kind))
@_from_counts
def rows_that_are_too_long_are_decided(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, limit, policy = fields.data.excess_length.path, config.data.max_length, config.data.excess_length
    for _, data, rows in _counts(config, facts):
        number = data.truncated if data.holds_for(config) else data.longer_than(limit)
        if not number or not data.source_rows:
            continue
        sentence = f"{_share(number, data, rows)} {'is' if number == 1 else 'are'} longer than max_length {limit:,}"
        longer = _longer(config, facts, data.longest)
        if policy == "error":
            longest = f", the longest has {data.longest:,} tokens" if data.longest else ""
            split = Fix("split them", {path: "split"}) if config.method.kind == "pretrain" else None
            fix = longer or split or Fix("cut them", {path: "truncate"})
            at = f" The first stands at {data.too_long_at}." if data.too_long_at else ""
            todo = f"training would refuse them.{at} Cut them, drop them, or raise max_length."
            yield notice(path, f"{sentence}{longest}: {todo}", severity="error", fix=fix)
        elif policy in ("truncate", "drop"):
            held = data.holds_for(config)
            # Under `truncate` those are left out of which a part of an image would be cut off.
            left = number if policy == "drop" else (data.dropped or 0) if held else 0
            severity = "error" if left >= data.source_rows else _weight(number, data)
            first = _first(data, "dropped" if left >= number else "truncated") if held else ""
            yield notice(path, f"{sentence} and {_cut(number, left, policy)}.{first}", severity=severity, fix=longer)


def _cut(number: int, left: int, policy: str) -> str:
    """What becomes of rows that are too long, of which so many are left out."""
    if policy == "drop":
        return "will be left out"
    if not left:
        return "will be cut"
    some = "" if left >= number else f"cut, {left:,} of them "
    return f"will be {some}left out, since an image is never cut"


@rule(
    reads=(
        fields.data.train,
        fields.data.eval,
        fields.data.trained_turns,
        fields.data.max_length,
        fields.data.excess_length,
    )
)
@_from_counts
def rows_have_something_to_learn(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for spec, data, rows in _counts(config, facts):
        if not data.masked or not data.source_rows or not data.holds_for(config):
            continue
        fix = _longer(config, facts, data.longest) if config.data.excess_length == "truncate" else None
        turns = fields.data.trained_turns
        if fix is None and config.data.trained_turns != turns.default:
            fix = Fix("learn every assistant turn", unset=(turns.path,))
        if data.masked >= data.source_rows:
            todo = "every one is masked. Look at the preview and at data.trained_turns."
            named = "no row" if rows == "rows" else "no held-out row"
            yield notice(spec.path, f"{named} has a token to learn: {todo}", severity="error", fix=fix)
        else:
            once = "it is" if data.masked == 1 else "they are"
            cut = f" once {once} cut" if fix is not None and fields.data.max_length.path in fix.set else ""
            verb = "has" if data.masked == 1 else "have"
            sentence = f"{_share(data.masked, data, rows)} {verb} no token to learn{cut} and will be left out."
            sentence += _first(data, "masked")
            yield notice(spec.path, sentence, severity=_weight(data.masked, data), fix=fix)


@rule(reads=(fields.data.train, fields.data.eval))
@_from_counts
def pairs_differ(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for spec, data, rows in _counts(config, facts):
        if data.identical and data.holds_for(config):
            have = "has" if data.identical == 1 else "have"
            share = f"{_share(data.identical, data, rows)} {have} the same chosen and rejected answer"
            sentence = f"{share} and will be left out.{_first(data, 'identical')}"
            yield notice(spec.path, sentence, severity=_weight(data.identical, data))


@rule(reads=(fields.data.train, fields.data.eval, fields.data.deduplicate))
@_from_counts
def equal_rows_are_left_out(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for _, data, rows in _counts(config, facts):
        if data.duplicates and data.holds_for(config):
            equal = f"1 {rows.removesuffix('s')} says" if data.duplicates == 1 else f"{data.duplicates:,} {rows} say"
            sentence = f"{equal} exactly what an earlier one says and will be left out."
            yield notice(fields.data.deduplicate.path, sentence, severity="hint")


@rule(reads=(fields.data.train, fields.data.eval, fields.data.on_bad_row))
@_from_counts
def rows_can_be_read(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path = fields.data.on_bad_row.path
    for spec, data, rows in _counts(config, facts):
        if not data.bad or not data.source_rows:
            continue
        share = f"{_share(data.bad, data, rows)} cannot be read"
        if config.data.on_bad_row == "skip":
            sentence = f"{share} and will be left out. The first: {data.bad_row}"
            yield notice(spec.path, sentence, severity=_weight(data.bad, data))
        else:
            sentence = f"{share}, so training would refuse them. The first: {data.bad_row}"
            yield notice(spec.path, sentence, severity="error", fix=Fix("leave bad rows out", {path: "skip"}))


@rule(reads=(fields.data.train, fields.data.eval, fields.model.name))
@_from_counts
def data_can_be_prepared(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    reported = set()
    for spec, data, _ in _counts(config, facts):
        if data.problem and data.problem not in reported and data.holds_for(config):
            reported.add(data.problem)
            problem = data.problem if data.problem.endswith((".", "?")) else f"{data.problem}."
            place, _, rest = problem.partition(": ")
            # A sentence that begins with a setting stands at it.
            known = place in fields
            yield notice(place if known else spec.path, rest if known else problem, severity="error")


@rule(reads=(fields.model.chat_template, fields.model.chat_template_kwargs, fields.data.train, fields.data.eval))
@_from_counts
def the_template_writes_what_rows_say(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    path, rows_path = fields.model.chat_template.path, fields.data.train.path
    for _, data, rows in _counts(config, facts):
        for name, number, first in data.template_flaws if data.holds_for(config) and data.source_rows else ():
            flaw = TEMPLATE_FLAWS[name]
            what = flaw.one if number == 1 else flaw.many
            sentence = f"{_share(number, data, rows)} {what}. The first: {first}. {flaw.todo}"
            severity = "hint" if flaw.severity == "hint" else _weight(number, data)
            yield notice(rows_path if flaw.of_rows else path, sentence, severity=severity)


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
    rows, batch = train_rows(config, facts), effective_batch(config)
    # Batches of methods with rewards are answers, several a row; `there_are_prompts_for_one_sampling` is theirs.
    by_row = config.method.rows != "prompts" and not config.data.packing
    if rows and rows < batch and by_row:
        path = fields.optim.gradient_accumulation_steps.path
        todo = "Each epoch is a single step: take a smaller batch or more rows."
        most = f"{rows} row{'s' if rows != 1 else ''}"
        yield must(path, f"small enough for an effective batch of at most {most}", batch, todo, severity="warning")
