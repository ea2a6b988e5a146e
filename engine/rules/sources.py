"""Rules about what a source says of its rows: every name there is one that something listens to."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.data import IN_MESSAGES, PARTS, WITHOUT_MESSAGES, DataSource
from engine.config.facts import Facts, SourceFacts
from engine.config.files import DATA_SUFFIXES
from engine.config.findings import Finding, Fix, must, notice
from engine.config.kinds import SYNTHETIC, TOKENS
from engine.config.method import learns_from_images, seeing_methods
from engine.config.reward_specs import SEES_NOT, BadReward, reward_spec
from engine.config.rule import rule
from engine.config.tree import RunConfig, fields
from engine.errors import nearest
from engine.facts.counts import known_model

_PLACES = (fields.data.train, fields.data.eval)
WITHOUT_TEMPLATE = ("text", "tokens", "distill", "embedding", "multimodal_pretrain", "synthetic")
SEEN = "multimodal_pretrain"
"""Text with images, or its tokens: a processor must read the images as it read those of the tokens."""


def sources(config: RunConfig, facts: Facts) -> Iterator[tuple[str, DataSource, SourceFacts | None]]:
    """Each source with its place in the config, and what was seen of it."""
    for spec in _PLACES:
        for index, entry in enumerate(spec.value(config)):
            yield f"{spec.path}.{index}", entry, (facts.sources or {}).get(entry.path)


def formats(config: RunConfig, facts: Facts) -> Iterator[tuple[str, DataSource, str | None]]:
    """Each source with its place and its format, as written or as detected."""
    for path, entry, seen in sources(config, facts):
        yield path, entry, entry.format or (seen.format if seen else None)


@rule(reads=_PLACES)
def columns_name_parts_of_a_row(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for path, entry, form in formats(config, facts):
        known = (
            PARTS[form] if form in PARTS else tuple(dict.fromkeys(part for parts in PARTS.values() for part in parts))
        )
        # Keys inside messages may be named here too.
        inside = () if form in WITHOUT_MESSAGES else IN_MESSAGES
        for part in entry.columns:
            if part not in known and part not in inside:
                rows = f"a row of the format {form}" if form in PARTS else "a row"
                close = nearest(part, known, cutoff=0.7)
                todo = f"Did you mean {close}?" if close else f"Parts are {', '.join(known)}."
                if known:
                    todo += f" It is written as `part: column`, as in `{known[0]}: name_of_the_column`."
                else:
                    todo = "They have no columns."
                yield must(f"{path}.columns.{part}", f"a part of {rows}", part, todo)


@rule(reads=(*_PLACES, fields.model.name))
def templates_of_sources_are_there_and_used(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for path, entry, form in formats(config, facts):
        place, wanted = f"{path}.chat_template", entry.chat_template
        if wanted and facts.files is not None and facts.files.get(wanted) is False:
            todo = "Known names are chatml, llama3, plain and none; a path starts at the config's folder."
            yield must(place, "a template's name or a Jinja file that is there", wanted, todo)
        elif wanted and form in WITHOUT_TEMPLATE:
            remove = Fix("remove it", unset=(place,))
            yield must(place, f"left out for {form}", wanted, "These rows go through no chat template.", fix=remove)


def _with_images(config: RunConfig, facts: Facts) -> Iterator[tuple[str, str]]:
    """Each source in which a row with images was seen: its path in the config, and what was seen."""
    for path, entry, seen in sources(config, facts):
        if entry.format == SEEN:
            yield f"{path}.format", f"rows with images (format: {SEEN})"
        elif seen is not None and seen.images:
            yield f"{path}.path", f"rows with images ({seen.images})"


@rule(reads=(*_PLACES, fields.method.kind))
def rows_with_images_need_a_method_that_reads_them(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if not learns_from_images(config.method.kind):
        for path, seen in _with_images(config, facts):
            others = seeing_methods(config.method.kind)
            todo = f"{config.method.kind} does not learn from images: take {others}, or rows of text."
            yield must(path, "rows without images", seen, todo)


@rule(reads=(*_PLACES, fields.method.kind, fields.method.reward_funcs))
def rows_with_images_are_not_scored_by_models(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec = fields.method.reward_funcs
    named = spec.value(config) if spec.applies(config) else []
    for place, text in enumerate(named):
        if _is_model(text) and (seen := next(_with_images(config, facts), None)) is not None:
            yield must(f"{spec.path}.{place}", f"a function or a built-in reward beside {seen[1]}", text, SEES_NOT)


def _is_model(reward: str) -> bool:
    try:
        return reward_spec(reward).kind == "model"
    except BadReward:
        return False  # which a rule of its own says


@rule(reads=_PLACES)
def text_with_images_is_one_source(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for spec in _PLACES:
        places = [index for index, entry in enumerate(spec.value(config)) if entry.format == SEEN]
        for index in places[1:]:
            todo = "Put the rows into one file or folder."
            yield must(f"{spec.path}.{index}.format", f"at most one source of {SEEN}", SEEN, todo)


@rule(reads=(*_PLACES, fields.model.tokenizer))
def text_with_images_is_read_by_the_processors_own_tokenizer(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec = fields.model.tokenizer
    if config.model.tokenizer and any(form == SEEN for _, _, form in formats(config, facts)):
        fix = Fix("take the model's own", unset=(spec.path,))
        todo = "The processor counts an image's tokens by its own tokenizer."
        yield must(spec.path, f"left out beside format: {SEEN}", config.model.tokenizer, todo, fix=fix)


@rule(reads=(*_PLACES, fields.method.kind, fields.method.reference))
def rows_with_images_need_their_reference_at_hand(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec = fields.method.reference
    if learns_from_images(config.method.kind) and spec.applies(config) and spec.value(config) == "precompute":
        for _, seen in _with_images(config, facts):
            fix = Fix("keep the reference beside it", {spec.path: "auto"})
            yield must(
                spec.path, f"copy or adapter_off with {seen}", "precompute", "TRL precomputes none for images.", fix=fix
            )


@rule(reads=(*_PLACES, fields.method.kind, fields.data.packing))
def rows_with_images_are_not_packed(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    if config.data.packing and learns_from_images(config.method.kind):
        fix = Fix("switch packing off", {fields.data.packing.path: False})
        for path, seen in _with_images(config, facts):
            yield must(path, "rows without images while data.packing is true", seen, "Images are not packed.", fix=fix)


@rule(reads=(*_PLACES, fields.model.name, fields.model.tokenizer, fields.method.kind))
def rows_with_images_need_a_processor(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model = known_model(config, facts)
    if model is None or model.processor is not False or config.model.tokenizer:
        return
    if learns_from_images(config.method.kind):
        for path, seen in _with_images(config, facts):
            todo = f"{model.name} has no processor for images: take a model that has one, or rows of text."
            yield must(path, "rows that the model can read", seen, todo)


@rule(reads=(fields.model.name, fields.model.tokenizer, fields.data.image_backend))
def images_need_what_reads_them(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    spec, model = fields.data.image_backend, known_model(config, facts)
    here = None if facts.packages is None else facts.packages.get("torchvision") is not None
    fix = Fix("leave it to what is installed", unset=(spec.path,))
    if config.data.image_backend == "torchvision" and here is False:
        yield must(spec.path, "pil or auto without torchvision", "torchvision", "Or pip install torchvision.", fix=fix)
    if model is None or not model.by_torchvision or config.model.tokenizer:
        return
    if config.data.image_backend == "pil":
        yield must(
            spec.path, f"torchvision for {model.name}", "pil", "Its processor reads images by nothing else.", fix=fix
        )
    elif here is False:
        todo = "is read by torchvision alone, which is not installed: pip install torchvision, or take another model."
        yield notice(fields.model.name.path, f"the processor of {model.name} {todo}", severity="error")


@rule(reads=(fields.model.name, fields.data.min_pixels, fields.data.max_pixels))
def pixel_limits_need_a_processor_that_keeps_shapes(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    model = known_model(config, facts)
    if model is None or (model.keeps_shape is not False and model.processor is not False):
        return
    why = "Its processor makes images of sizes of its own." if model.processor else "It has no processor for images."
    for spec in (fields.data.min_pixels, fields.data.max_pixels):
        if (value := spec.value(config)) is not None:
            fix = Fix("leave it out", unset=(spec.path,))
            yield must(spec.path, f"left out for {model.name}", value, why, fix=fix)


@rule(reads=(fields.data.min_pixels, fields.data.max_pixels))
def pixel_limits_leave_room(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    least, most = config.data.min_pixels, config.data.max_pixels
    if least is not None and most is not None and least > most:
        path = fields.data.min_pixels.path
        fix = Fix("leave it to the processor", unset=(path,))
        yield must(path, f"at most {most:,}, which is data.max_pixels", least, "No image lies between them.", fix=fix)


@rule(reads=(*_PLACES, fields.data.max_length, fields.data.excess_length))
def synthetic_rows_are_drawn_in_the_size_that_is_said(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """`tokens` and `min_tokens` belong to synthetic rows, which come from nowhere else, and fit into `max_length`."""
    for path, entry, _ in sources(config, facts):
        yield from _drawn(config, path, entry) if entry.path == SYNTHETIC else _not_drawn(path, entry)


def _not_drawn(path: str, entry: DataSource) -> Iterator[Finding]:
    if entry.format == "synthetic":
        fix = Fix("detect the format", unset=(f"{path}.format",))
        todo = f"Synthetic rows are drawn: take the path {SYNTHETIC}."
        yield must(f"{path}.path", f"{SYNTHETIC} with format: synthetic", entry.path, todo, fix=fix)
        return
    for name in ("tokens", "min_tokens"):
        if (value := getattr(entry, name)) is not None:
            fix = Fix("leave it out", unset=(f"{path}.{name}",))
            todo = "Other rows have the tokens that they have; data.max_length bounds them."
            yield must(f"{path}.{name}", f"left out for rows other than {SYNTHETIC}", value, todo, fix=fix)


def _drawn(config: RunConfig, path: str, entry: DataSource) -> Iterator[Finding]:
    if entry.format not in (None, "synthetic"):
        fix = Fix("leave it out", unset=(f"{path}.format",))
        yield must(f"{path}.format", f"synthetic for {SYNTHETIC}", entry.format, "Its rows are tokens alone.", fix=fix)
    most, least = entry.tokens or TOKENS, entry.min_tokens
    if least is not None and least > most:
        fix = Fix("all rows of one length", unset=(f"{path}.min_tokens",))
        limit = f"at most {most:,}, which is tokens"
        yield must(f"{path}.min_tokens", limit, least, "No length lies between.", fix=fix)
    if most > config.data.max_length and config.data.excess_length == "error":
        fix = Fix("rows as long as they may be", {f"{path}.tokens": config.data.max_length})
        todo = "Longer rows are refused, as data.excess_length says."
        size = most if entry.tokens else f"{most:,}, which an empty one means"
        limit = f"at most {config.data.max_length:,}, which is data.max_length"
        yield must(f"{path}.tokens", limit, size, todo, fix=fix)


@rule(reads=(*_PLACES, fields.method.kind))
def pairs_are_chosen_of_rankings(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    pairs = config.method.rows == "pairs"
    for path, entry, form in formats(config, facts):
        place, usual = f"{path}.ranking_pairs", "best_worst"
        if entry.ranking_pairs == usual or (pairs and form in ("ranking", None)):
            continue
        why = f"The rows of {form} are no rankings."
        if not pairs:
            why = f"{config.method.kind} makes no pairs of a ranking but of its best and its worst answer."
        yield must(place, usual, entry.ranking_pairs, why, fix=Fix("remove it", unset=(place,)))


@rule(reads=_PLACES)
def properties_name_parts_of_a_message(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for path, entry, form in formats(config, facts):
        if entry.properties and form in WITHOUT_MESSAGES:
            todo = "Its rows hold no messages; columns names what they hold."
            fix = Fix("remove it", unset=(f"{path}.properties",))
            yield must(f"{path}.properties", f"left out with the format {form}", entry.properties, todo, fix=fix)
            continue
        for part in entry.properties:
            if part not in IN_MESSAGES:
                close = nearest(part, IN_MESSAGES)
                todo = f"Did you mean {close}?" if close else f"Parts are {', '.join(IN_MESSAGES)}."
                todo += " It is written as `part: key`, as in `role: speaker`."
                yield must(f"{path}.properties.{part}", "a part of a message", part, todo)


@rule(reads=_PLACES)
def files_have_no_splits(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    for path, entry, _ in formats(config, facts):
        is_file = entry.path.lower().endswith(DATA_SUFFIXES)
        if entry.split is not None and is_file:
            todo = (
                "A file holds its rows and no more: name another file for others, or take the first so many with rows."
            )
            fix = Fix("remove it", unset=(f"{path}.split",))
            yield must(f"{path}.split", "left out for a file", entry.split, todo, fix=fix)
        for name, value in (("subset", entry.subset), ("revision", entry.revision)):
            if value is not None and (is_file or entry.path.startswith("builtin/")):
                fix = Fix("remove it", unset=(f"{path}.{name}",))
                todo = f"Only a data set on the hub has a {name}."
                yield must(f"{path}.{name}", "left out for rows that lie here", value, todo, fix=fix)
