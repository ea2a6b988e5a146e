"""From what a model is taken and where it goes: the checkpoint, the names of the parts, room on the disk. No torch."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from engine import figures
from engine.errors import UsageError, WorkbenchError, redact, visible
from engine.hardware import existing_folder
from engine.model_files import ADAPTER, read_json
from engine.run import checkpoint, disk, inside
from engine.run.store import RunFolder

FORMS = {
    "safetensors": "a folder that transformers, vLLM and others open: the model, adapter merged in",
    "adapter": "the adapter alone, for PEFT and servers that load adapters",
    "gguf": "one file for llama.cpp, Ollama and LM Studio",
    "modelfile": "a Modelfile for `ollama create`, beside the GGUF or the folder",
    "packed": "a folder in the packed format of a base that others quantized: adapter merged in, rounded anew, the error told",
}
"""What a run can be exported to, and what each is for."""
QUANTS = ("F16", "BF16", "Q8_0", "F32")
"""Number formats of a GGUF that need no other program."""
MXFP4 = "MXFP4"
"""One for bases that hold their experts in it: those stay as they are, to the bit, beside the rest in BF16."""
K_QUANTS = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ4_XS", "Q4_0")
"""Those that llama.cpp makes, by its program `llama-quantize` or the package `llama-cpp-python`."""

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "processor_config.json",
    "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
"""Files of a checkpoint by which texts become tokens, and images numbers."""
COMMON_K_QUANTS = ("Q4_K_M", "Q5_K_M", "Q6_K")


@dataclass(frozen=True)
class Source:
    """The checkpoint that is taken along."""

    run: RunFolder
    checkpoint: Path
    adapted: bool
    """Whether it holds an adapter; else all weights."""
    shares: Path | None = None
    """The shares of its weights as training wrote them, where `checkpoint` is a folder that was put together of them."""


def source(run: RunFolder, step: int | None = None, *, hashes: bool = True) -> Source:
    """The newest complete checkpoint, or that of a step. Raises WorkbenchError where there is none or it was changed."""
    name = visible(run.id)
    run.refuse_flaws()
    if step is None:
        found, skipped = checkpoint.newest_valid(run, hashes=hashes)
        if found is None:
            why = f"none of its checkpoints is whole ({skipped[0][0].name}: {skipped[0][1]})" if skipped else (
                "it has no checkpoint, so there is no model to take along"
            )  # fmt: skip
            raise WorkbenchError(f"run {name}: {why}.", checkpoint.way_to_one(run))
    else:
        found = run.checkpoints / f"checkpoint-{step}"
        reason = checkpoint.problem_with(found, hashes=hashes)
        if reason:
            known = ", ".join(str(each) for each in steps(run)) or "none"
            raise WorkbenchError(
                f"run {name}: checkpoint-{step} cannot be taken along: it {reason}.", f"Checkpoints here: {known}."
            )
    return Source(run, found, inside.exists(run, found / ADAPTER))


def adapts_experts(run: RunFolder) -> bool:
    """Whether the run's adapter is on experts that are one weight, as far as its config can be read."""
    from engine.config.files import parse  # a screen that lists forms is light without it

    try:
        adapter = parse(run.read_config(), path=run.config).mapping.get("adapter")
    except WorkbenchError:
        return False
    return isinstance(adapter, dict) and bool(adapter.get("target_parameters"))


def forms_of(run: RunFolder) -> dict[str, str]:
    """The forms that the run's newest checkpoint can be taken along in: one with all weights holds no adapter, and a base that is
    not packed, or not to be seen from here, has no packed format."""
    newest = max(steps(run), default=None)
    adapted = newest is None or inside.exists(run, run.checkpoints / f"checkpoint-{newest}" / ADAPTER)
    lacking = set() if adapted else {"adapter", "packed"}
    if adapted and not _on_packed(run):
        lacking.add("packed")
    return {form: words for form, words in FORMS.items() if form not in lacking}


def _on_packed(run: RunFolder) -> bool:
    """Whether the run's base lies in a folder whose files say that it is packed, and was trained on as it is."""
    from engine.facts.stored import ROUNDED_TO

    return _format_of_base(run) in ROUNDED_TO


def keeps_mxfp4(run: RunFolder) -> bool:
    """Whether a GGUF may keep the experts of the run's base in MXFP4, as far as can be told from here."""
    return _format_of_base(run) == "mxfp4" and not adapts_experts(run)


def _format_of_base(run: RunFolder) -> str | None:
    """The packed format of a base that was trained on as it is, where its folder is to be seen from here."""
    from engine.config.files import parse, place_of
    from engine.facts.stored import stored_as, with_note

    try:
        model = parse(run.read_config(), path=run.config).mapping.get("model")
        name = model.get("name") if isinstance(model, dict) and model.get("quantization", "none") == "none" else None
        if not isinstance(name, str):
            return None
        folder = Path(place_of(name, run.path))
        there = (folder / "config.json").is_file()
        note = with_note(folder, read_json(folder / "config.json")).get("quantization_config") if there else None
    except (WorkbenchError, OSError, AttributeError):
        return None
    return stored_as(note)


def steps(run: RunFolder) -> list[int]:
    """The steps of the checkpoints that are there, in order."""
    try:
        names = inside.names(run, run.checkpoints)
    except OSError:
        return []
    return sorted(step for each in names if (step := checkpoint.step_of(run.checkpoints / each)) is not None)


def places(run: RunFolder, forms: Sequence[str], folder: Path, quant: str = "F16") -> dict[str, Path]:
    """Where each form goes within the export's folder."""
    names = {
        "safetensors": "safetensors",
        "adapter": "adapter",
        "gguf": f"{run.id}-{quant}.gguf",
        "modelfile": "Modelfile",
        "packed": "packed",
    }
    return {form: folder / names[form] for form in FORMS if form in forms}


@contextlib.contextmanager
def placed(final: Path, needed: int) -> Iterator[Path]:
    """A name beside `final` to write to, which becomes `final` when the block ends well and is gone when it does not.

    Raises WorkbenchError where `final` exists, another process writes it, or the disk has less than `needed` bytes.
    """
    shown = visible(redact(str(final)))
    refuse_existing(final)
    try:
        with parents(final):
            need_room(final, needed)
            lock = FileLock(final.parent / f".{final.name}.lock", timeout=0)
            with lock:
                for left in final.parent.glob(f".{final.name}.part-*"):  # of an export that was killed
                    _remove(left)
                part = final.parent / f".{final.name}.part-{secrets.token_hex(4)}"
                try:
                    yield part
                    _make_durable(part)
                    refuse_existing(final)
                    os.rename(part, final)
                finally:
                    _remove(part)
                    Path(lock.lock_file).unlink(missing_ok=True)
    except Timeout:
        raise WorkbenchError(
            f"{shown}: another export is writing there now.", "Wait for it, or name another place with -o."
        ) from None
    except OSError as problem:
        raise not_written(final, needed, problem) from problem


@contextlib.contextmanager
def parents(final: Path) -> Iterator[None]:
    """Makes the folders above `final`; those that are still empty when the block fails go again."""
    made = [each for each in final.parents if not each.exists()]
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # one that something else lies in stays, and those above it
            for each in made:
                each.rmdir()
        raise


def not_written(final: Path, needed: int, problem: OSError) -> WorkbenchError:
    """The sentence for an export that could not be written: the disk took no more, or the place takes nothing."""
    shown = redact(str(final))
    if problem.errno in disk.CAUSES:
        told = f"about {figures.size(needed)} are needed, and nothing was kept"
        return disk.storage_error(shown, told, problem, then="then export again, or name another place with -o.")
    if (wrong := _below_a_file(final)) is not None:
        return wrong
    why = problem.strerror or problem
    return WorkbenchError(f"{visible(shown)}: cannot be written: {why}.", "Name another place with -o.")


def _below_a_file(final: Path) -> UsageError | None:
    """The sentence for a place in a folder that is a file."""
    file = next((each for each in final.parents if os.path.lexists(each) and not each.is_dir()), None)
    if file is None:
        return None
    return UsageError(
        f"{visible(redact(str(file)))}: is a file, and results go into a folder.", "Name another place with -o."
    )


def refuse_existing(final: Path) -> None:
    """Raises UsageError where something has this name already, or a file stands where its folder would."""
    if os.path.lexists(final):
        raise UsageError(
            f"{visible(redact(str(final)))}: exists already, and an export replaces nothing.",
            "Remove it, or name another place with -o.",
        )
    if (wrong := _below_a_file(final)) is not None:
        raise wrong


def need_room(final: Path, needed: int) -> None:
    """Raises WorkbenchError where the disk of `final` has less than `needed` bytes."""
    free = shutil.disk_usage(existing_folder(final.parent)).free
    if free < needed:
        raise WorkbenchError(
            f"{visible(redact(str(final)))}: needs {figures.size(needed)}, and the disk has {figures.size(free)} free.",
            "Free some space, or name another place with -o.",
        )


def _make_durable(part: Path) -> None:
    for path in [*part.rglob("*"), part] if part.is_dir() else [part]:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove(part: Path) -> None:
    if part.is_dir() and not part.is_symlink():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)
