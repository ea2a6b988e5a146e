"""Folders that other programs open: the whole model, or the adapter alone, with tokenizer, template and generation config."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from engine import model_files
from engine.config.kinds import LABELS
from engine.config.tree import RunConfig
from engine.errors import WorkbenchError, first_line, redact, visible
from engine.export import parity, to_packed
from engine.export import per_expert as single
from engine.export.card import card
from engine.export.merge import DTYPES, merge
from engine.export.places import TOKENIZER, Source
from engine.export.shards import compare, take_weights
from engine.export.stored import dequantized_weights
from engine.facts.stored import NOTE_FILES
from engine.hub import COMMITS, commit_of, reaching_hub
from engine.models.load import UNREADABLE, load_processing_class, model_folder, wanted_revision
from engine.run import inside

Report = Callable[[str, int, int], None]
COMMITS_FILE = "commits.json"
ONE_BY_ONE = (
    "those that take an adapter for each expert under the names of the base's files, such as vLLM; PEFT takes the adapter "
    "that `--to adapter` writes without `--per-expert`"
)
AS_ONE_WEIGHT = (
    "those that take an adapter for each expert; the base's files hold the experts as one weight, and vLLM takes adapters "
    "expert by expert where they are held one by one; PEFT takes the adapter that `--to adapter` writes without "
    "`--per-expert`"
)
"""Who reads an adapter that was written expert by expert."""


@dataclass
class Model:
    """The trained model of one checkpoint, read once for all forms."""

    source: Source
    config: RunConfig
    merged: Path | None = None
    """The folder of the whole model that this export has made, once it has its name."""
    report: Report = lambda what, done, total: None

    @cached_property
    def base(self) -> Path:
        """The folder of the base as the run loaded it. Raises ModelError where it is not to be had any more."""
        run, config = self.source.run, self.config
        kept = inside.read(run, run.path / COMMITS_FILE) if inside.exists(run, run.path / COMMITS_FILE) else None
        COMMITS.keep(kept, lambda text: None)
        name = model_folder(config)
        try:
            with reaching_hub(name):
                revision = commit_of(name, wanted_revision(config))
                return model_files.complete(name, revision)
        except UNREADABLE as problem:
            first = visible(redact(first_line(problem)))[:200]
            raise WorkbenchError(
                f"model.name: the base {visible(redact(name))} of this run cannot be read: {first}",
                "Put it back, or give the network.",
            ) from problem

    @property
    def whole(self) -> Path:
        """The folder whose config.json describes the model: the base's, or the checkpoint with all weights."""
        return self.base if self.source.adapted else self.source.checkpoint

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer as the checkpoint holds it, with the template of the training.

        Raises WorkbenchError where it is another than the config's.
        """
        from transformers import AutoTokenizer

        at = self.source.checkpoint
        model_files.refuse_what_it_names(at) if not self.source.adapted else None
        model_files.refuse_without_tokens(at)
        kept = AutoTokenizer.from_pretrained(at, trust_remote_code=False)
        trained = load_processing_class(self.config)
        trained = getattr(trained, "tokenizer", trained)
        same = kept.get_vocab() == trained.get_vocab()
        if not same or any(kept(text)["input_ids"] != trained(text)["input_ids"] for text in parity.texts(trained)):
            named = visible(redact(self.config.model.tokenizer or self.config.model.name))
            what = f"({len(kept)} tokens) is another than that of {named} ({len(trained)} tokens)"
            raise WorkbenchError(
                f"{at.name}: its tokenizer {what if not same else f'cuts texts otherwise than that of {named}'}, so its ids "
                "would mean other words.",
                "Put the tokenizer back that the run was trained with.",
            )
        return kept

    @cached_property
    def stops(self) -> list[int]:
        """Ids that end an answer."""
        return parity.stop_tokens(self._base_stops, self.tokenizer, dict(self.config.model.chat_template_kwargs))

    @property
    def _base_stops(self) -> list[int]:
        path = self.whole / "generation_config.json"
        content = model_files.read_json(path) if path.is_file() else {}
        found = content.get("eos_token_id") if isinstance(content, dict) else None
        return [found] if isinstance(found, int) else list(found or [])

    @cached_property
    def inputs(self) -> list[list[int]]:
        """Ids on which outputs are compared."""
        rows = self.rows
        for each in parity.inputs(self.tokenizer):
            if max(each) >= rows:
                raise WorkbenchError(
                    f"{self.source.checkpoint.name}: its tokenizer knows token {max(each)}, and the model has weights for "
                    f"{rows}.",
                    "Put the tokenizer back that the run was trained with.",
                )
        return parity.inputs(self.tokenizer)

    @cached_property
    def rows(self) -> int:
        """Tokens that the model has weights for."""
        from transformers import AutoConfig

        return int(AutoConfig.from_pretrained(self.whole).get_text_config().vocab_size)

    @cached_property
    def reference(self) -> parity.Reference:
        """Outputs of the trained model on `inputs`, of its base, and of a mixture rounded to the format of the files."""
        adapter = self.source.checkpoint if self.source.adapted else None
        rounds = any(each.dtype != "F32" for each in self.stored.values())
        shares = self.source.shares
        return parity.reference(
            self.config,
            self.whole,
            adapter,
            self.inputs,
            self.format_of if rounds else None,
            self.computing("The trained model's answers"),
            None if shares is None else lambda model: take_weights(model, shares),
        )

    @cached_property
    def stored(self) -> dict[str, model_files.Tensor]:
        """The weights by the headers of the files, those in FP8 and MXFP4 as the bfloat16 that they stand for."""
        return dequantized_weights(self.whole)

    def computing(self, what: str) -> parity.Layers:
        """Tells how far a comparison is."""
        return lambda done, total: self.report(what, done, total)

    def refuse_little_memory(self) -> None:
        """Raises WorkbenchError where the comparison would not fit this machine."""
        made = parity.in_layers(self.config, self.whole, adapted=self.source.adapted)
        parity.refuse_little_memory(parity.memory_of(made, self.numbers, self.inputs, self.rows))

    @property
    def numbers(self) -> int:
        """How many numbers the model has."""
        return sum(torch.Size(each.shape).numel() for each in self.stored.values())

    def format_of(self, name: str) -> torch.dtype:
        """The number format of a weight by its name in the model: as the files hold it, or most of their weights."""
        return DTYPES.get(self.stored[name].dtype if name in self.stored else self._usual, torch.bfloat16)

    @cached_property
    def _usual(self) -> str:
        return Counter(each.dtype for each in self.stored.values()).most_common(1)[0][0]

    @property
    def bound(self) -> float:
        """How far outputs may be from the reference's, by the coarsest number format of the files."""
        found = {DTYPES.get(each.dtype, torch.bfloat16) for each in self.stored.values()}
        return max(parity.BOUNDS.get(each, 6e-2) for each in found)

    @cached_property
    def license(self) -> str:
        """The licence that the base's own card names, if it has one."""
        path = self.whole / "README.md"
        if not self.source.adapted or not path.is_file():
            return ""
        head = path.read_text("utf-8", errors="replace")[:4000].partition("\n---")[0]
        return next((line[8:].strip(" \"'")[:60] for line in head.splitlines() if line.startswith("license:")), "")


def bytes_of(model: Model, form: str) -> int:
    """What a folder of this form takes on the disk, with a little room beside it."""
    if form == "adapter":
        return sum(file.stat().st_size for file in model.source.checkpoint.iterdir() if _of_adapter(file)) + (1 << 20)
    files = sum(file.stat().st_size for file in model_files.weight_files(model.whole))
    if form == "packed":
        trained = (model.source.checkpoint / model_files.ADAPTER_WEIGHTS).stat().st_size  # with a head of its own
        return int(1.01 * files) + trained + (32 << 20)
    known = [(each.shape, DTYPES[each.dtype].itemsize) for each in model.stored.values() if each.dtype in DTYPES]
    wide = sum(torch.Size(shape).numel() * size for shape, size in known)  # more where weights are in few bits
    return int(1.01 * max(files, wide)) + (32 << 20)


def write_model(model: Model, into: Path, report: Report) -> parity.Parity:
    """The whole model as safetensors; compared with the trained one. Raises ParityError where it differs."""
    model.refuse_little_memory()
    into.mkdir()
    tokenizer = model.tokenizer
    if model.source.adapted:
        merge(model.config, model.base, model.source.checkpoint, into, report)
        _write_config(model, into)
    else:
        _copy(model.source.checkpoint, into, [path.name for path in model_files.weight_files(model.source.checkpoint)])
        _copy(model.source.checkpoint, into, [model_files.INDEX, "config.json"])
    _copy(model.source.checkpoint, into, TOKENIZER)
    _write_generation(model, into)
    report("Opening it again", 0, 1)
    found = _same_tokens(model, into, tokenizer)
    if model.source.shares is not None:
        found = replace(found, weights=compare(into, model.source.shares))
    theirs = parity.open_folder(model.config, into, model.inputs, model.computing("Its answers"))
    found = parity.check_logits(found, model.reference, theirs, model.bound)
    _write_card(model, into, "safetensors", found)
    return found


def write_packed(model: Model, into: Path, report: Report) -> parity.Parity:
    """The whole model in its base's own packed format. What rounding did is told; raises ParityError where weights are read back
    as others than were written, WorkbenchError for a base that is not packed in a format that serves."""
    held = to_packed.refuse_unserved(model.config, model.base)
    model.refuse_little_memory()
    into.mkdir()
    made = to_packed.write(model.config, model.base, model.source.checkpoint, into, report)
    _write_config(model, into, packed=True)
    _copy(model.base, into, NOTE_FILES)
    _copy(model.source.checkpoint, into, TOKENIZER)
    _write_generation(model, into)
    report("Opening it again", 0, 1)
    weights = made.compare(into)
    kinds = [each.as_json() for _, each in sorted(made.kinds.items())]
    found = replace(
        _same_tokens(model, into, model.tokenizer),
        reader=f"the workbench as {held}",
        weights=weights,
        requantized=kinds,
    )
    theirs = parity.open_packed(model.config, into, model.inputs, model.computing("Its answers"))
    found = parity.measured(found, model.reference, theirs)
    _write_card(model, into, "packed", found)
    return found


def write_adapter(model: Model, into: Path, report: Report, *, per_expert: bool = False) -> parity.Parity:
    """The adapter alone, naming its base; opened again by PEFT, or in plain torch where each expert has its own.

    Raises ParityError where it differs, WorkbenchError for an adapter that cannot be written `per_expert`.
    """
    at = model.source.checkpoint
    if per_expert:
        single.refuse_without_experts(at)
    model.refuse_little_memory()
    into.mkdir()
    _copy(at, into, TOKENIZER)
    if per_expert:
        report("Writing an adapter for each expert", 0, 1)
        cut = single.PerExpert.of(model.config, model.base, at)
        cut.write(into)
    else:
        _copy(at, into, (model_files.ADAPTER_WEIGHTS, model_files.ADAPTER))
    content = model_files.read_json(into / model_files.ADAPTER)
    if not Path(model.config.model.name).is_absolute() and not model.config.model.name.startswith((".", "builtin/")):
        content |= {"base_model_name_or_path": model.config.model.name, "revision": model.config.model.revision}
    (into / model_files.ADAPTER).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    _write_generation(model, into)
    report("Opening it again", 0, 1)
    found = _same_tokens(model, into, model.tokenizer)
    exact, readers = model.reference._replace(rounded=None), ""
    if per_expert:
        found = replace(found, reader=single.READER, weights=cut.compare(into))
        theirs = parity.outputs(single.open_again(model.config, model.base, into), model.inputs)
        found = parity.check_logits(found, exact, theirs, parity.SAME_WEIGHTS)
        readers = ONE_BY_ONE if cut.one_by_one else AS_ONE_WEIGHT
    else:
        theirs = parity.reference(
            model.config, model.base, into, model.inputs, report=model.computing("Its answers")
        ).trained
        found = parity.check_logits(found, exact, theirs, parity.BOUNDS[torch.float32])
    _write_card(model, into, "adapter", found, readers)
    return found


def _same_tokens(model: Model, folder: Path, tokenizer: Any) -> parity.Parity:
    from transformers import AutoTokenizer, GenerationConfig

    opened = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    named = GenerationConfig.from_pretrained(folder).eos_token_id
    ends = [named] if isinstance(named, int) else list(named or [])
    reader = "PEFT" if (folder / model_files.ADAPTER).is_file() else "transformers"
    return parity.compare_tokens(reader, tokenizer, opened, model.stops, ends)


def _write_config(model: Model, into: Path, *, packed: bool = False) -> None:
    """The base's config.json, with what merging changed: weights that are no longer tied, a head that is new; and, unless they
    are still `packed`, without the note on quantization."""
    content = model_files.read_json(model.base / "config.json")
    stored, before = model_files.stored_weights(into), model.stored
    if any(name.endswith("lm_head.weight") for name in stored):
        _untie(content)  # also where the base held one and the same weight twice: readers that tie would drop the other
    if labels := LABELS.get(model.config.method.head):
        from transformers import AutoConfig

        shape = AutoConfig.from_pretrained(model.base)
        shape.update(labels)
        with torch.device("meta"):
            name = type(parity.loader_of(model.config, model.base).from_config(shape)).__name__
        content |= {"architectures": [name], **labels} | {
            key: value for key, value in shape.to_dict().items() if key in ("id2label", "label2id")
        }
        content["pad_token_id"] = model.tokenizer.pad_token_id
    if (
        not packed and model_files.stored_weights(model.base).keys() - before.keys()
    ):  # weights that were in FP8 or MXFP4
        content.pop("quantization_config", None)  # it may have been in a file of its own
    (into / "config.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _untie(content: dict[str, Any]) -> None:
    content["tie_word_embeddings"] = False
    if isinstance(inner := content.get("text_config"), dict):
        inner["tie_word_embeddings"] = False


def _write_generation(model: Model, into: Path) -> None:
    path = model.whole / "generation_config.json"
    content = model_files.read_json(path) if path.is_file() else {}
    stops = model.stops
    content["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    if content.get("pad_token_id") is None and model.tokenizer.pad_token_id is not None:
        content["pad_token_id"] = model.tokenizer.pad_token_id
    (into / "generation_config.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _write_card(model: Model, into: Path, form: str, found: parity.Parity, readers: str = "") -> None:
    run, at = model.source.run, model.source.checkpoint
    text = card(run, model.config, at, form, found.as_json(), model.license, readers)
    (into / "README.md").write_text(text, "utf-8")


def _copy(at: Path, into: Path, names: Any) -> None:
    for name in names:
        if (at / name).is_file():
            shutil.copyfile(at / name, into / name)


def _of_adapter(file: Path) -> bool:
    return file.is_file() and file.name in (model_files.ADAPTER, model_files.ADAPTER_WEIGHTS, *TOKENIZER)
