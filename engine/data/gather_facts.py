"""One quick look at everything a config names: machine, model files, packages, sources. Torch-free, for both frontends.

Gives the facts that rules and estimate need before anything is prepared: whether a source is there, how large, what its
first rows hold, how many rows it has if that is known within a moment. Nothing is downloaded.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config.adapter_folder import adapter_of, taken_over
from engine.config.facts import Facts, ModelFacts, SourceFacts, TokenizerFacts
from engine.config.files import COMPRESSIONS, DATA_SUFFIXES, place_of, scheme_of
from engine.config.findings import Finding
from engine.config.kinds import BUILTIN_ROWS
from engine.config.reward_specs import BadReward, files_of, reward_spec
from engine.config.tree import FieldSpec, RunConfig, fields
from engine.data.adapter_source import named_adapter
from engine.data.image_folder import is_image_folder, metadata_of
from engine.data.image_limits import BOMB, FORMATS, UNREADABLE, why_refused
from engine.data.image_references import DATA, ImageFolder, content_of, folder_of, short
from engine.data.parts import FormatError, columns_of
from engine.data.stored_counts import load_counts
from engine.errors import WorkbenchError, nearest, visible
from engine.facts import attention_times, compiler_waits, step_times
from engine.facts.model_shape import model_facts, tokenizer_facts
from engine.facts.reward_files import function_flaw
from engine.facts.template_flaws import TEMPLATE_FLAWS
from engine.hardware import Machine, installed, this_machine
from engine.model_files import read_json
from engine.planning.auto import effective, resolved
from engine.rules import read
from engine.rules.data import FROM_COUNTS
from engine.run.store import is_run, runs_dir

if TYPE_CHECKING:
    from engine.data.detect import Detection
    from engine.data.mapped import Rows

FIRST_ROWS = 1000
LOOKED_AROUND = 1000
"""Names in a folder among which the one that was meant is looked for."""
JSON_FILES = 16
"""Files of JSON in one folder that are looked into for being lists."""
SCRATCH = "WORKBENCH_SCRATCH"
TEMPLATES = Path(__file__).parent / "templates"
PATIENCE = 0.25
"""Seconds to wait for a row count; an index that takes longer is counted by the inspector."""
WHOLE_IMAGES, WHOLE_PIXELS = 16, 16_000_000
"""So many images are read to their end, each up to so many pixels; of the others the headers are."""
LONGEST_PATH = 4096
LEAST_PARQUET = 12
"""Bytes of the shortest Parquet file: its mark twice, and the length of what describes it."""
NAMED = 12
"""Bad rows behind the first whose lines are told."""


class Installed(Mapping[str, str | None]):
    """The versions of packages here, each looked up when a rule asks for it; a package that is missing is `None`."""

    def __getitem__(self, package: str) -> str | None:
        return installed(package)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Installed)

    def __hash__(self) -> int:
        return hash(Installed)


def resolved_config(
    mapping: Mapping[str, Any], base: str | Path, launched: Mapping[str, Any] | None = None
) -> RunConfig:
    """The config that `mapping` describes, no `auto` left. Raises WorkbenchError with the first error in it.

    `launched` is what run.json keeps of the choices of a launch, by path: `mapping` is then what that launch stored.
    """
    config = read(mapping if launched is None else as_launched(mapping, launched)).accepted()
    asked = any(entry.requested == "auto" for entry in effective(config))
    return resolved(config, gather_facts(config, base)) if asked else resolved(config)


def as_launched(mapping: Mapping[str, Any], launched: Mapping[str, Any]) -> dict[str, Any]:
    """A config as its launch meant it: a launch stores every setting, so one that is missing, and of which it chose nothing,
    came later. What is on, or sized, by `auto` today was then off, or of the usual size."""
    whole = dict(mapping)
    for spec in fields:
        section = whole.get(spec.section)
        if not isinstance(section, Mapping) or spec.name in section or spec.path in launched:
            continue
        if spec.default == "auto" and not spec.kinds and (spec.nullable or spec.control == "bool"):
            whole[spec.section] = {**section, spec.name: None if spec.nullable else False}
        elif spec in _BEFORE and section.get("kind") in spec.kinds:
            whole[spec.section] = {**section, spec.name: _BEFORE[spec]}
    return whole


_BEFORE: dict[FieldSpec, Any] = {
    fields.method.cache_implementation: "dynamic",
    fields.method.skip_zero_advantage: False,
}
"""What methods did before they had a setting, where that is neither off nor the usual size."""


def _place_of_runs(config: RunConfig, folder: Path, runs: str | os.PathLike[str] | None) -> Path:
    """Where a run of this config would lie; of a run's own config, where that lies."""
    if runs is None and is_run(folder):
        return folder
    named = config.run.output_dir
    return runs_dir(runs, folder / named if named != fields.run.output_dir.default else None)


def gather_facts(
    config: RunConfig,
    base: str | Path = ".",
    machine: Machine | None = None,
    *,
    sources: bool = True,
    runs: str | os.PathLike[str] | None = None,
) -> Facts:
    """What can be known of this config at once. With `machine` the packages here say nothing about it; the free disk is that of
    the folder of runs, which `runs` names before all else."""
    folder = Path(base)
    name = config.model.name
    model = model_facts(place_of(name, folder), config.model.revision)
    here = machine is None
    model = replace(model, name=name) if model else None
    machine = this_machine(_place_of_runs(config, folder, runs)) if machine is None else machine
    adapter = named_adapter(config, folder)
    config = taken_over(config, Facts(adapter=adapter, given=frozenset()))
    data = load_counts(config, folder, model)
    card = machine.gpus[0].name if here and machine.gpus else None
    return Facts(
        machine=machine,
        model=model,
        data=data,
        packages=Installed() if here else None,
        sources=inspect_sources([*config.data.train, *config.data.eval], folder, config.data.image_base_dir)
        if sources
        else None,
        files=_files_there(config, model, folder),
        reward_flaws=_reward_flaws(getattr(config.method, "reward_funcs", ()), folder),
        tokenizer=_tokenizer(config, folder),
        adapter=adapter,
        scratch=_scratch() if here else "",
        compiler=compiler_waits.known(config, model, card) if card else None,
        attention_times=attention_times.known(attention_times.key(config, model, data, card)) if card else None,
        step_times=step_times.of_card(machine.gpus[0]) if machine.gpus else (),
        shipped_times=step_times.shipped(machine.gpus[0]) if machine.gpus else (),
    )


def _files_there(config: RunConfig, model: ModelFacts | None, folder: Path) -> dict[str, bool]:
    """Of the files of rewards and the chat templates that a config names: whether each is there."""
    entries = (*config.data.train, *config.data.eval)
    found = {path: _there(path, folder) for path in files_of(getattr(config.method, "reward_funcs", ()))}
    for wanted in (config.model.chat_template, *(entry.chat_template for entry in entries)):
        found |= _template_there(wanted, model, folder)
    return found


def _tokenizer(config: RunConfig, folder: Path) -> TokenizerFacts | None:
    """The files of the tokenizer that the config takes: the model's own, or another's."""
    name = config.model.tokenizer or config.model.name
    revision = None if config.model.tokenizer else config.model.revision
    found = tokenizer_facts(place_of(name, folder), revision)
    return replace(found, name=name) if found else None


def _template_there(wanted: str | None, model: ModelFacts | None, folder: Path) -> dict[str, bool]:
    """Whether a chat template of this name or file is there; nothing where only the model's own files could tell."""
    if not wanted or wanted == "none" or (TEMPLATES / f"{Path(wanted).name}.jinja").is_file():
        return {}
    if "/" in wanted or wanted.lower().endswith((".jinja", ".j2")):
        return {wanted: _is_file(Path(place_of(wanted, folder))) or _is_file(folder / wanted)}
    if _is_file(folder / wanted) or model is None or not model.folder:
        return {}
    return {} if _own_templates(Path(model.folder)) else {wanted: False}


def _own_templates(folder: Path) -> bool:
    """Whether a tokenizer brings several templates with names of their own."""
    if (folder / "additional_chat_templates").is_dir():
        return True
    try:
        return isinstance(read_json(folder / "tokenizer_config.json").get("chat_template"), (list, dict))
    except (WorkbenchError, AttributeError):
        return False


def _is_file(place: Path) -> bool:
    try:
        return place.is_file()
    except (OSError, ValueError):
        return False


def _scratch() -> str:
    """Why nothing can be written into $WORKBENCH_SCRATCH; empty where that is unset or of use."""
    named = os.environ.get(SCRATCH)
    if not named:
        return ""
    place = Path(named).expanduser()
    if not place.is_dir():
        return "there is no such folder" if not place.exists() else "it is no folder"
    return "" if os.access(place, os.W_OK | os.X_OK) else "it cannot be written to"


def completed(facts: Facts, config: RunConfig, base: str | Path = ".") -> Facts:
    """These facts, and what a look would still add: for a launch that comes before the look after the last edit."""
    model = facts.model if facts.model is not None and facts.model.name == config.model.name else None
    paths = {entry.path for entry in (*config.data.train, *config.data.eval) if entry.path}
    sources = facts.sources if facts.sources is not None and paths <= facts.sources.keys() else None
    adapter = adapter_of(config, facts) is not None or not getattr(config.adapter, "path", None)
    if facts.machine is not None and model is not None and sources is not None and adapter:
        folder, rewards = Path(base), getattr(config.method, "reward_funcs", ())
        # A person may have mended these files a moment ago.
        return replace(facts, files=_files_there(config, model, folder), reward_flaws=_reward_flaws(rewards, folder))
    found = gather_facts(config, base, sources=sources is None)
    return replace(
        facts,
        machine=facts.machine or found.machine,
        data=facts.data or found.data,
        model=model or found.model,
        packages=found.packages if facts.packages is None else facts.packages,
        sources=found.sources if sources is None else sources,
        files=found.files,
        reward_flaws=found.reward_flaws,
        tokenizer=found.tokenizer,
        adapter=found.adapter,
        scratch=found.scratch,
        compiler=found.compiler,
        attention_times=found.attention_times,
        step_times=found.step_times,
        shipped_times=found.shipped_times,
    )


def counted_over(config: RunConfig) -> list[Any]:
    """Whose tokens a count is of: model and tokenizer, sources, method. Counts made over others say nothing of this one."""
    model, data = config.model, config.data
    rows = [entry.model_dump() for entry in (*data.train, *data.eval)]
    held_out = [data.val_set_size, config.run.seed] if data.val_set_size else None
    return [model.name, model.revision, model.tokenizer, rows, len(data.train), held_out, config.method.kind]


def countable(findings: Iterable[Finding]) -> bool:
    """Whether rows can be counted: nothing else is wrong with model and data than what counts have told."""
    owners = ("data", "model")
    return not any(
        finding.severity == "error" and finding.rule not in FROM_COUNTS and finding.path.partition(".")[0] in owners
        for finding in findings
    )


def outcome(row: Mapping[str, Any]) -> str:
    """What training does with a row of the preview that it does not use, and what the chat template does wrong with it, in
    sentences; empty where all is well."""
    if row.get("refused"):
        return f"Training refuses this row: {visible(row['refused'])}"
    if row.get("left_out"):
        return f"Training leaves this row out: {visible(row['left_out'])}"
    return " ".join(f"This row {TEMPLATE_FLAWS[name].one}." for name in row.get("flaws") or ())


def _reward_flaws(texts: Iterable[str], folder: Path) -> dict[str, str]:
    """Why the functions of rewards cannot be taken from their files, by the reward's text."""
    found: dict[str, str] = {}
    for text in texts:
        try:
            spec = reward_spec(text)
        except BadReward:
            continue
        if spec.kind == "function" and (flaw := function_flaw(Path(place_of(spec.argument, folder)), spec.function)):
            found[text] = flaw
    return found


def _there(path: str, folder: Path) -> bool:
    """Whether a reward's file is there, or the folder of a model."""
    try:
        places = Path(place_of(path, folder)), folder / path
        return any(
            place.is_file() or (place / "config.json").is_file() or (place / "adapter_config.json").is_file()
            for place in places
        )
    except (OSError, ValueError):
        return False


def inspect_sources(entries: Iterable[Any], folder: Path, image_base_dir: str | None = None) -> dict[str, SourceFacts]:
    """One look at each source, by its path as the config writes it."""
    found: dict[str, SourceFacts] = {}
    for entry in entries:
        if entry.path and entry.path not in found:
            found[entry.path] = inspect_source(entry, folder, image_base_dir)
    return found


def inspect_source(entry: Any, folder: Path, image_base_dir: str | None = None) -> SourceFacts:
    """There or not, size, first rows, format. Never raises for bad data: a problem is part of the answer."""
    if entry.path in BUILTIN_ROWS:
        return _builtin(entry)
    if entry.path.startswith("builtin/") or scheme_of(entry.path):
        return SourceFacts(entry.path)
    written = place_of(entry.path, folder)
    place = Path(written)
    try:
        if not place.exists():
            if (folder / entry.path).is_symlink():
                return SourceFacts(entry.path, exists=True, problem="is a link that leads nowhere, or in a circle.")
            local = written.startswith("/") or written.lower().endswith(DATA_SUFFIXES)
            return SourceFacts(entry.path, exists=False if local else None, near=_near(entry.path, folder))
        captioned = is_image_folder(place) and (metadata_of(place) or place).suffix != ".parquet"
        if (place.is_dir() and not captioned) or ".parquet" in place.suffixes or ".arrow" in place.suffixes:
            # columns of these need pyarrow, which the inspector has loaded
            if place.is_dir():
                return _folder(entry.path, place)
            return SourceFacts(
                entry.path, exists=True, bytes=place.stat().st_size, in_order=_in_order(place), problem=_cut_off(place)
            )
        images_at = image_base_dir and place_of(image_base_dir, folder)
        return replace(_file(entry, place, images_at), in_order=_in_order(place))
    except OSError as problem:
        return SourceFacts(
            entry.path, exists=True, problem=f"cannot be read: {problem.strerror or 'input/output error'}."
        )


def _near(path: str, folder: Path) -> str:
    """The file of rows in the folder of `path` that was probably meant by it: it has another ending, or nearly this name."""
    path = path.rstrip("/")
    place = folder / os.path.expanduser(path)
    try:
        with os.scandir(place.parent) as entries:
            seen = [entry.name for entry in islice(entries, LOOKED_AROUND)]
    except OSError:
        return ""
    names = sorted(name for name in seen if name.lower().endswith(DATA_SUFFIXES))
    # A file without its ending, or with one that is none, is less alike than a misspelled one.
    meant = next((name for name in names if name.partition(".")[0] == place.name.partition(".")[0]), None)
    found = meant or nearest(place.name, names, cutoff=0.75)
    return path[: len(path) - len(place.name)] + found if found else ""


def _folder(path: str, place: Path) -> SourceFacts:
    """A folder of files of rows, or a data set that was saved."""
    from engine.data.streaming.folders import paths_of

    try:
        several = paths_of(str(place)) != [str(place)]
    except WorkbenchError as problem:
        # Images in a file of Parquet beside them are read by the inspector alone.
        problem_of = "" if is_image_folder(place) else problem.message.removeprefix(f"{visible(str(place))}: ") + "."
        return SourceFacts(path, exists=True, problem=problem_of)
    return SourceFacts(path, exists=True, in_order=_in_order(place), several=several)


def _cut_off(place: Path) -> str:
    """Why a Parquet file is none, as far as its first and last bytes tell: a mark of four bytes stands in both places."""
    from engine.data.rows import refuse_special

    try:
        refuse_special(place)
    except WorkbenchError as problem:
        return problem.full_message.removeprefix(f"{visible(str(place))}: ")
    if place.suffix.lower() != ".parquet":
        return ""
    with place.open("rb") as file:
        if not (size := file.seek(0, os.SEEK_END)):
            return "the file is empty."
        file.seek(0)
        first = file.read(4)
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 4))
        last = file.read(4)
    if size >= LEAST_PARQUET and (first == last == b"PAR1" or (first, last) == (b"PARE", b"PARE")):
        return ""
    return f"not a whole Parquet file ({'its end is missing' if first == b'PAR1' else 'it does not begin as one'})."


def _in_order(place: Path) -> str:
    """`SourceFacts.in_order` of a file, or of a folder of files."""
    from engine.data.streaming.folders import paths_of

    opened = 0
    try:
        for path in paths_of(str(place)):
            suffix = Path(path).suffix.lower()
            if suffix in (*COMPRESSIONS, ".csv", ".tsv"):
                return path
            if suffix == ".json" and opened < JSON_FILES:
                from engine.data.streaming.cuts import cut_file  # what reads a stream, the hub's too

                opened += 1
                cut = cut_file(path)
                cut.rows.close()
                if cut.count is None:
                    return path
    except WorkbenchError:
        pass  # what is wrong with it is told by whoever reads its rows
    return ""


def _in_turns(seen: Detection) -> bool | None:
    """Whether the first row that was read holds messages; None where none could be."""
    from engine.data.formats import read_example

    if seen.format is None or seen.example is None:
        return None
    try:
        example = read_example(seen.example, seen.format, seen.columns)
    except WorkbenchError:
        return None
    return bool(example.messages) or isinstance(example.prompt, list)


def _builtin(entry: Any) -> SourceFacts:
    from engine.builtin import GENERATED

    made = GENERATED[entry.path]
    return SourceFacts(
        entry.path,
        exists=True,
        rows=made.total(entry.split or "train", entry.rows),
        columns=made.columns,
        format=made.format,
        turns="messages" in made.columns,
        images="row 0" if "images" in made.columns else "",
    )


def _file(entry: Any, place: Path, image_base_dir: str | None) -> SourceFacts:
    from engine.data.detect import detect
    from engine.data.rows import open_rows

    size = place.stat().st_size
    try:
        rows = open_rows(place)
    except WorkbenchError as problem:
        sentence = problem.message.removeprefix(f"{visible(str(place))}: ")
        return SourceFacts(entry.path, exists=True, bytes=size, problem=f"{sentence}. {problem.hint}".strip())
    try:
        seen = detect(rows, columns_of(entry.columns, entry.properties, entry.roles), entry.format, look=FIRST_ROWS)
        trouble = ""
        if seen.problems:
            trouble = seen.problems[0].removeprefix(f"{visible(str(place))}").removeprefix(": ").lstrip("/:")
            trouble = f"line {trouble}" if trouble[:1].isdigit() else trouble
            trouble += "" if trouble.endswith(".") else "."
        folder = folder_of(str(place), image_base_dir)
        unseen = dict(_unreadable_images({n: each for n, each in seen.images.items() if n not in seen.bad_at}, folder))
        if unseen and (not trouble or min(unseen) < min(seen.bad_at, default=0)):
            trouble = f"{_named(rows, min(unseen))}: {unseen[min(unseen)]}"
        bad = seen.bad + len(unseen)
        trouble += _others(rows, sorted({*unseen, *seen.bad_at})[1:])
        fatal = seen.format is None or bad >= seen.looked
        columns = tuple(visible(str(column)) for column in (seen.example or {}))
        try:
            count = rows.wait(PATIENCE)
        except WorkbenchError:
            count = None
        return SourceFacts(
            entry.path,
            True,
            size,
            count,
            columns,
            seen.format,
            problem=trouble if fatal else "",
            bad=bad,
            looked=seen.looked,
            bad_row="" if fatal else trouble,
            turns=_in_turns(seen),
            images=_named(rows, min(seen.images)) if seen.images else "",
        )
    finally:
        rows.close()


def _others(rows: Rows, bad: list[int]) -> str:
    """Where the bad rows behind the first stand, as a sentence."""
    if not bad:
        return ""
    named = ", ".join(_named(rows, index).removeprefix("line ") for index in bad[:NAMED])
    more = f" and {len(bad) - NAMED:,} more" if len(bad) > NAMED else ""
    kind = "" if rows.place(bad[0])[1] is None else "line " if len(bad) == 1 else "lines "
    return f" The other{'s' if len(bad) > 1 else ''}: {kind}{named}{more}."


def _named(rows: Rows, index: int) -> str:
    line = rows.place(index)[1]
    return rows.named(index) if line is None else f"line {line}"


def _unreadable_images(rows: Mapping[int, tuple[Any, ...]], folder: ImageFolder) -> Iterator[tuple[int, str]]:
    """The rows that name an image which cannot be read, each with the reason for its first, as a sentence."""
    judged: dict[str, str] = {}
    wholes = 0
    for index, images in rows.items():
        for image in images:
            name = image.get("url") if isinstance(image, Mapping) else image
            held = not isinstance(name, str) or name.startswith(DATA) or len(name) > LONGEST_PATH
            given, key = (image, "") if held else (name, str(name))
            flaw = judged.get(key) if key else None
            if flaw is None:
                flaw = _reference_flaw(given, folder)
                if flaw and held and isinstance(image, Mapping) and image.get("path"):
                    continue
                if not flaw:
                    wholes += 1
                    reference = folder.reference(given)
                    if flaw := _file_flaw(reference, whole=wholes <= WHOLE_IMAGES):
                        flaw = f"{short(reference) if held else visible(key)}: {flaw}"
            if key:
                judged[key] = flaw
            if flaw:
                yield index, flaw
                break


def _reference_flaw(image: Any, folder: ImageFolder) -> str:
    """Why what a row gives as an image is none, or leads to none that may be read, as preparing the row would say it."""
    try:
        folder.reference(image)
    except FormatError as problem:
        return f"{problem.message}. {problem.hint or 'Bring the image, or take the row out.'}"
    return ""


def _file_flaw(place: str, *, whole: bool) -> str:
    """Why an image cannot be read, by its path or as it stands in its row, or nothing. Its header is read; all of it where
    `whole`."""
    from PIL import Image

    content = content_of(place)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(place if content is None else io.BytesIO(content), formats=FORMATS)
        with opened as image:
            if reason := why_refused(image):
                return f"the image {reason}. Bring another, or take the row out."
            if whole and image.width * image.height <= WHOLE_PIXELS:
                image.load()
    except Image.UnidentifiedImageError:
        return f"{'this file holds' if content is None else 'these bytes hold'} no image. Bring a PNG, JPEG or WebP file, or take the row out."
    except Image.DecompressionBombError:
        return f"the image {BOMB}. Bring another, or take the row out."
    except (*UNREADABLE, WorkbenchError) as problem:
        told = getattr(problem, "strerror", None) or str(problem)
        # Of other errors the words are of Pillow's inside: an index, a missing key.
        reason = told if isinstance(problem, OSError | WorkbenchError) else "it is cut or broken"
        return f"the image cannot be read ({visible(reason)}). Bring it whole, or take the row out."
    return ""
