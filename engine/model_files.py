"""What the files of a model folder hold and name, read before any library sees them: JSON, weights by their headers, tokens.

Nothing that a folder names is followed out of it, and nothing in it may ask for code: no module, no kernel from the hub, no
pickle. `check` and the training read folders here alike, so that what one refuses the other does. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError, redact, visible
from engine.hub import snapshot

LARGEST_JSON = 64 * 1024 * 1024
PIECE = 1 << 17
"""Bytes that are asked for at once where files are read ahead: Linux leaves out what is beyond a disk's own read-ahead, 128 KiB."""
DEEPEST = 32
"""Levels of JSON within JSON; configs have four or five."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARES = "weights"
"""The folder of a checkpoint whose full weights were written in shares, by the processes that held them."""
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
READ_BY_LIBRARIES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json",
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", ADAPTER,
)  # fmt: skip
VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
    "*.tiktoken", "*.model", "vocab*.*",
)  # fmt: skip
"""Files that hold the tokens of a tokenizer."""
WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
_CODE = ("auto_map", "trust_remote_code")
_WIDTHS = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "additional_chat_templates/*")
"""What of a hub model is fetched before its weights: all that names something."""
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
"""Files of a model with a processor for images."""
KEEP_SHAPE = {
    "CohereCompassImageProcessor": 1, "Cosmos3EdgeImageProcessor": 1, "Ernie4_5_VLMoeImageProcessor": 1,
    "Glm46VImageProcessor": 2, "Glm4vImageProcessor": 2, "GlmgaImageProcessor": 2, "HunYuanVLImageProcessor": 1,
    "PaddleOCRVLImageProcessor": 1, "Qwen2VLImageProcessor": 1, "VideoLlama3ImageProcessor": 1,
}  # fmt: skip
"""Image processors that keep the shape of an image between a fewest and a most of pixels, and how often their own limits
count a pixel: GLM's take an image for two frames."""
NO_FOLDER = "there is no such folder"
UNREADABLE = (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError, RecursionError)
"""What libraries raise about files that they cannot make a model of."""
_TO_SAFETENSORS = (
    "Pickled weights (.bin, .pt) are not read, since they can run code. Convert them to safetensors first."
)


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]


def read_json(path: Path) -> Any:
    """What a JSON file of a model folder holds. Raises ModelError for one that is no plain file, too large or too deep."""
    shown = place(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{shown}: is not a plain file.", "Copy the model's files into the folder.")
        if status.st_size > LARGEST_JSON:
            raise ModelError(f"{shown}: is larger than any real one.")
        content = json.loads(path.read_text("utf-8"))
    except RecursionError:
        raise _too_deep(shown) from None
    except OSError as problem:
        raise ModelError(f"{shown}: cannot be read: {problem.strerror or problem}.") from problem
    except ValueError as problem:
        raise ModelError(f"{shown}: is not JSON ({visible(str(problem))}).", _AGAIN) from problem
    if max((depth for _, _, depth in entries(content)), default=0) > DEEPEST:
        raise _too_deep(shown)
    return content


def image_processor(folder: Path) -> str:
    """The name of a model's image processor by its files, without what its backend adds; empty where they name none."""
    for name in PROCESSORS:
        settings = read_json(folder / name) if (folder / name).is_file() else {}
        for part in (settings.get("image_processor"), settings) if isinstance(settings, dict) else ():
            if isinstance(part, dict) and isinstance(kind := part.get("image_processor_type"), str):
                return kind.removesuffix("Fast").removesuffix("Pil")[:80]
    return ""


def processor_class(folder: Path) -> str:
    """The name of a model's processor by its files; empty where they name none."""
    for name in (*PROCESSORS, "tokenizer_config.json"):
        settings = read_json(folder / name) if (folder / name).is_file() else {}
        if isinstance(settings, dict) and isinstance(kind := settings.get("processor_class"), str):
            return kind[:80]
    return ""


def _too_deep(shown: str) -> ModelError:
    return ModelError(f"{shown}: nests more than {DEEPEST} levels deep, as no real one does.", "Take another model.")


def entries(content: Any) -> Iterator[tuple[str, Any, int]]:
    """Every `(key, value, depth)` within JSON, however deep; items of lists have the key of their list."""
    waiting: list[tuple[str, Any, int]] = [("", content, 0)]
    while waiting:
        key, value, depth = waiting.pop()
        if key:
            yield key, value, depth
        if isinstance(value, dict):
            waiting += [(str(name), each, depth + 1) for name, each in value.items()]
        elif isinstance(value, list):
            waiting += [(key or "[]", each, depth + 1) for each in value]


def refuse_what_it_names(folder: Path) -> None:
    """Raises ModelError for a file of the folder that asks for code, for a kernel, or for a file elsewhere."""
    for name in READ_BY_LIBRARIES:
        path = folder / name
        if not path.exists():
            continue
        content = read_json(path)
        for key, value, _ in entries(content):
            if (problem := _refused(key, value)) is not None:
                raise ModelError(f"{place(path)}: holds {problem[0]}", problem[1])
        if name == ADAPTER and isinstance(content, dict):
            _refuse_imports(path, content)
    for path in sorted(folder.glob("*.index.json")):
        indexed(path)
    if (folder / "config.json").is_file() and (folder / ADAPTER).exists():
        raise ModelError(
            f"{place(folder)}: holds a model and an adapter ({ADAPTER}), so which of them is meant cannot be told.",
            f"Merge the two first (PEFT: merge_and_unload), or take {ADAPTER} away.",
        )


def _refused(key: str, value: Any) -> tuple[str, str] | None:
    """Why an entry of a model's JSON is refused and what to do, or None."""
    code = "Such models are not loaded. Use a model that transformers itself supports."
    if (key in _CODE and value) or (key.startswith("_") and key.endswith("_internal")):
        return f"`{visible(key)}`, which would run code that comes with the model.", code
    texts = [text for text in (value.values() if isinstance(value, dict) else [value]) if isinstance(text, str)]
    if key.endswith("_implementation"):
        refused = next((text for text in texts if not re.fullmatch(r"(paged\|)?\w*", text)), None)
        if refused is not None:
            return (
                f"`{visible(key)}: {visible(refused)[:80]}`, which would fetch a kernel from the hub and run it.",
                "Take the line out; model.attention chooses how attention is computed.",
            )
    if key == "use_pretrained_backbone" and value is True:
        return f"`{visible(key)}`, which would load another model beside it.", code
    if key in ("transformers_weights", "fast_tokenizer_files"):
        refused = next((text for text in texts if not _plain(text)), None)
        if refused is not None:
            return (
                f"`{visible(key)}: {visible(refused)[:80]}`, which leads out of the folder.",
                "Files of a model lie in its folder.",
            )
    return None


def _refuse_imports(path: Path, adapter: Mapping[str, Any]) -> None:
    """Modules that PEFT would import because an adapter's config names them."""
    classes = adapter.get("auto_mapping")
    library = str(classes.get("parent_library") or "") if isinstance(classes, dict) else ""
    megatron = str(adapter.get("megatron_core") or "")
    if (library and library.split(".")[0] != "transformers") or megatron not in ("", "megatron.core"):
        named = library if library and library.split(".")[0] != "transformers" else megatron
        raise ModelError(
            f"{place(path)}: names the module `{visible(named)[:80]}`, which would be imported and run.",
            "Such adapters are not loaded.",
        )


def _plain(name: str) -> bool:
    return bool(name) and "/" not in name and "\\" not in name and "\0" not in name and name not in (".", "..")


def indexed(path: Path) -> dict[str, str]:
    """The file of each weight by an index. Raises ModelError for a name that is no safetensors file beside it."""
    content = read_json(path)
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(each, str) for each in weights.values()) or not weights:
        raise ModelError(f"{place(path)}: has no weight_map that says which file holds which weight.")
    if path.name.endswith(".bin.index.json"):
        return weights  # of pickles, which are not read
    for file in sorted(set(weights.values())):
        named = f"{place(path)}: names {visible(file)[:120]}"
        if not _plain(file):
            raise ModelError(f"{named}, which leads out of the folder.", "Files of a model lie in its folder.")
        if not file.endswith(".safetensors"):
            raise ModelError(f"{named}, which is no safetensors file.", _TO_SAFETENSORS)
    return weights


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers reads the model from. Raises ModelError where one is not there."""
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    explicit = config.get("transformers_weights") if isinstance(config, dict) else None
    first = folder / (explicit if isinstance(explicit, str) and _plain(explicit) else WEIGHTS)
    index = first if first.name.endswith(".index.json") else folder / INDEX
    if first != index and first.is_file():
        return [first]
    if not index.is_file():
        if (folder / SHARES).is_dir():
            raise ModelError(
                f"{place(folder)}: holds its weights in shares, as the processes of a run wrote them.",
                "`workbench merge RUN` makes one model folder of them.",
            )
        pickled = sorted(file.name for kind in PICKLES for file in folder.glob(kind))
        beside = f", only pickles such as {visible(pickled[0])}" if pickled else ""
        raise ModelError(
            f"model.name: the folder {place(folder)} holds no safetensors weights{beside}.",
            _TO_SAFETENSORS if pickled else f"They are {WEIGHTS}, or several files and {INDEX}.",
        )
    files = sorted({folder / file for file in indexed(index).values()})
    for file in files:
        if not file.is_file():
            raise ModelError(
                f"{place(index)}: names {visible(file.name)}, which is not there.", "Copy or download the model again."
            )
    return files


def stored_weights(folder: Path) -> dict[str, Tensor]:
    """Every weight of a model folder by the headers of its files. Raises ModelError for files that are cut or missing."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        tensors |= header(file)
    index = folder / INDEX
    if index.is_file() and not (folder / WEIGHTS).is_file():
        lost = sorted(name for name in indexed(index) if name not in tensors)
        if lost:
            raise ModelError(
                f"{place(index)}: names the weight {visible(lost[0])}, which none of its files holds.",
                "Copy or download the model again.",
            )
    return tensors


_AGAIN = "Copy or download it again."
_POINTER = b"version https://git-lfs"


def _refuse_pointer(file: Path, start: bytes) -> None:
    """Raises ModelError for what a clone without Git LFS leaves in a file's place."""
    if start.startswith(_POINTER[: len(start)]) and len(start) >= 8:
        raise ModelError(
            f"{place(file)}: is a pointer of Git LFS, not the file itself.", "Run `git lfs pull` there, or download it."
        )


def header(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file. Raises ModelError unless its header fits the bytes that follow it."""
    again = _AGAIN
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{place(file)}: is not a plain file.", again)
        with file.open("rb") as stream:
            start = stream.read(8)
            _refuse_pointer(file, start)
            size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if len(start) < 8 or size > status.st_size - 8:
                raise ModelError(
                    f"{place(file)}: is cut, or no safetensors file: it ends after {status.st_size:,} bytes, within its "
                    "header.",
                    again,
                )
            if size > LARGEST_JSON:
                raise ModelError(f"{place(file)}: has a header that is larger than any real one.", again)
            content = json.loads(stream.read(size))
        tensors, end = _tensors(content)
    except OSError as problem:
        raise ModelError(f"{place(file)}: cannot be read: {problem.strerror or problem}.") from problem
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{place(file)}: has a damaged header.", again) from None
    if (there := status.st_size - 8 - size) != end:
        what = "is cut" if there < end else "is longer than its header says"
        raise ModelError(f"{place(file)}: {what}: {there:,} bytes of weights, and its header names {end:,}.", again)
    return tensors


def _tensors(content: Mapping[str, Any]) -> tuple[dict[str, Tensor], int]:
    """The tensors of a header and where the last of them ends. Raises ValueError for places that do not fit."""
    tensors, end = {}, 0
    for name, entry in content.items():
        if name == "__metadata__":
            continue
        shape, (begin, stop) = tuple(int(length) for length in entry["shape"]), entry["data_offsets"]
        numbers = 1
        for length in shape:
            numbers *= length
        width = _WIDTHS.get(entry["dtype"])
        if begin < 0 or stop < begin or (width is not None and numbers * width != stop - begin):
            raise ValueError(name)
        tensors[name], end = Tensor(str(entry["dtype"]), shape), max(end, stop)
    return tensors, end


def refuse_pickled_adapter(folder: Path) -> None:
    """Raises ModelError for an adapter without safetensors weights: PEFT would read a pickle in their place."""
    if (folder / ADAPTER).is_file() and not (folder / ADAPTER_WEIGHTS).is_file():
        raise ModelError(f"{place(folder)}: holds no {ADAPTER_WEIGHTS}.", _TO_SAFETENSORS)


def names_attention(folder: Path) -> bool:
    """Whether its config.json chooses how attention is computed, which is for `model.attention` to say."""
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return any(key.endswith("attn_implementation") and value for key, value, _ in entries(config))


def _refuse_cut(file: Path) -> None:
    """Raises ModelError for a JSON object that does not end as one; all of a tokenizer's takes too long to read at each look."""
    try:
        if not file.is_file():
            return
        with file.open("rb") as stream:
            _refuse_pointer(file, stream.read(len(_POINTER)))
            stream.seek(max(0, file.stat().st_size - 64))
            end = stream.read().rstrip()
    except OSError as problem:
        raise ModelError(f"{place(file)}: cannot be read: {problem.strerror or problem}.") from problem
    if not end.endswith(b"}"):
        raise ModelError(f"{place(file)}: is cut, or no JSON: it does not end with a closing brace.", _AGAIN)


def refuse_without_tokens(folder: Path) -> None:
    """Raises ModelError for a folder without any tokenizer, of which transformers would make an empty one, or with a cut one."""
    _refuse_cut(folder / "tokenizer.json")
    if any(file.is_file() for kind in VOCABULARIES for file in folder.glob(kind)):
        return
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    kind = str(config.get("tokenizer_class", "")).removesuffix("Fast") if isinstance(config, dict) else ""
    if kind not in WITHOUT_VOCABULARY:
        raise ModelError(
            f"model.tokenizer: the folder {place(folder)} holds no tokenizer (tokenizer.json, tokenizer.model, vocab.json or vocab.txt).",
            "Copy the tokenizer's files into it, or name another one in model.tokenizer.",
        )


def largest_tokens(folder: Path) -> tuple[int, int] | None:
    """How many tokens tokenizer.json counts, without and with those that were added; None where it is not there or unusual."""
    path = folder / "tokenizer.json"
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_JSON:
            return None
        content = json.loads(path.read_text("utf-8"))
        vocabulary, added = content["model"]["vocab"], content.get("added_tokens") or []
        numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        extra = {int(token["id"]) for token in added}
        base = max((number for number in numbers if number not in extra), default=-1) + 1
        return base, max(base, max(extra, default=-1) + 1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def checked(source: str, revision: str | None) -> Path:
    """The folder of a model or tokenizer once nothing in its files is refused; of a hub model all but its weights is fetched
    for that. Raises ModelError, and what the hub's client raises."""
    folder = Path(source)
    if not folder.is_dir():
        folder = snapshot(source, revision, SMALL_FILES)
    refuse_what_it_names(folder)
    return folder


def complete(source: str, revision: str | None) -> Path:
    """The folder of a model whose files may be loaded, its weights by their headers too. Raises as `checked` does."""
    folder = checked(source, revision)
    if not Path(source).is_dir():
        try:
            names = [file.name for file in weight_files(folder)]
        except ModelError:  # it has no index, or its files are not here yet
            index = folder / INDEX
            names = sorted(set(indexed(index).values())) if index.is_file() else [WEIGHTS]
        folder = snapshot(source, revision, (*SMALL_FILES, *names))
    stored_weights(folder)
    return folder


def place(path: Path) -> str:
    """A path as messages show it."""
    return visible(redact(str(path)))


def read_ahead(folder: Path, free: int | None = None) -> threading.Thread | None:
    """Has the system fetch the weights' files into its memory while this process does something else; None where they are
    not to have so much of it, or the system takes no such hint. `free` are the bytes that may be taken."""
    advise = getattr(os, "posix_fadvise", None)
    try:
        files = [file for file in weight_files(folder) if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        room = _available() if free is None else free
    except (OSError, ModelError):
        return None
    if advise is None or not files or room is None or 2 * size > room:
        return None
    thread = threading.Thread(target=_fetch, args=(files,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _fetch(files: list[Path]) -> None:
    with contextlib.suppress(OSError):  # whoever loads the model says what is wrong with its files
        for file in files:
            handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for start in range(0, os.fstat(handle).st_size, PIECE):
                    os.posix_fadvise(handle, start, PIECE, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(handle)


def _available() -> int | None:
    """Bytes of memory that are free, or would be where they are asked for; None where the system does not say."""
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
