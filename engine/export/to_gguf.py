"""A model folder as one GGUF file, and that file read back: every weight against its source, tokens, template, stop tokens.

Where llama.cpp's Python package is installed, llama.cpp opens the file too and is the judge: its ids and its logits.

Weights are mapped by the `gguf` package's own names; what llama.cpp computes otherwise than transformers stands in
`families_of_gguf`.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open

from engine import model_files
from engine.errors import ModelError, WorkbenchError, visible
from engine.export import llama_cpp, mxfp4_of_gguf, parity
from engine.export.families_of_gguf import (
    GEMMAS,
    FloatArray,
    Part,
    architecture,
    as_llama_cpp,
    as_transformers,
    experts,
    is_stack,
    llama3_factors,
    stays_float32,
    tensors,
    write_sizes,
)
from engine.export.folder import Model
from engine.export.places import K_QUANTS, MXFP4, QUANTS
from engine.export.streamed import Numbers
from engine.export.tokens_of_gguf import Vocabulary, joined, vocabulary
from engine.figures import size

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
    from transformers import PreTrainedConfig

Report = Callable[[str, int, int], None]
LARGEST_F16 = 65504.0
SPARE_BYTES = 512 << 20
"""What a copy that is made to compare leaves free on the disk."""
ROUNDING = {
    "Q2_K": 0.6, "Q3_K": 0.32, "Q4_0": 0.2, "Q4_K": 0.16, "IQ4_XS": 0.16, "IQ4_NL": 0.16, "Q5_0": 0.1, "Q5_1": 0.1,
    "Q5_K": 0.08, "Q6_K": 0.04,
}  # fmt: skip
"""How far a weight may be from its source, as a share of its size (root mean square): two to three times what llama.cpp loses of
normal numbers, 0.30 in Q2_K, 0.15 in Q3_K, 0.07 in Q4_K, 0.036 in Q5_K, 0.018 in Q6_K."""


def refuse_early(quant: str) -> None:
    """Raises WorkbenchError for a format that is not made here, and where the `gguf` package is missing."""
    if quant in K_QUANTS:
        llama_cpp.refuse_without_quantizer(quant)
    elif quant not in (*QUANTS, MXFP4):
        known = ", ".join((*QUANTS, MXFP4, *K_QUANTS))
        raise WorkbenchError(f"gguf: {visible(quant)} is no number format of a GGUF.", f"Take one of {known}.")
    if importlib.util.find_spec("gguf") is None:
        raise WorkbenchError("gguf: the package that writes GGUF files is not installed.", "Run `pip install gguf`.")


def write(model: Model, folder: Path, file: Path, quant: str, report: Report) -> parity.Parity:
    """Writes the GGUF of a model folder and compares it. Raises ModelError, and ParityError where it differs."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).get_text_config()
    name = architecture(config)
    vocab = vocabulary(folder, model.tokenizer, config.vocab_size)
    _same_ids(vocab, model.tokenizer)
    if quant in K_QUANTS:
        with tempfile.TemporaryDirectory(prefix=f"{file.name}-", dir=file.parent) as room:
            plain = Path(room) / "plain.gguf"
            stored = {each.dtype for each in model_files.stored_weights(folder).values()}
            _write(model, folder, plain, "BF16" if stored == {"BF16"} else "F16", config, name, vocab, report)
            report(f"llama.cpp writes {quant}", 0, 1)
            llama_cpp.quantize(plain, file, quant)
    else:
        _write(model, folder, file, quant, config, name, vocab, report)
    report("Opening it again", 0, 1)
    found = _read_back(model, folder, file, config, name, vocab)
    return _check_parity(found, model, folder, file, quant, report) if llama_cpp.installed() else found


def _check_parity(
    found: parity.Parity, model: Model, folder: Path, file: Path, quant: str, report: Report
) -> parity.Parity:
    """The comparison with llama.cpp's own ids and logits. Raises ParityError where they are not the model's."""
    from transformers import AutoConfig

    report("llama.cpp opens it", 0, 1)
    prompts = [text for text in parity.rendered(model.tokenizer) if text]
    texts = [*parity.texts(model.tokenizer), *prompts]
    try:
        ids, theirs = llama_cpp.answers(file, texts, model.inputs)
    except WorkbenchError as problem:
        raise parity.differs("llama.cpp", f"it cannot be used ({problem.message})") from problem
    for text, made in zip(texts, ids, strict=True):
        wanted = model.tokenizer(text)["input_ids"]
        if made != wanted:
            raise parity.differs(
                "llama.cpp", f"{visible(text)[:60]!r} becomes other ids ({made[:8]} instead of {wanted[:8]})"
            )
    ours = [each[0] for each in parity.open_folder(model.config, folder, model.inputs)]
    config = AutoConfig.from_pretrained(folder).get_text_config()
    mixture = experts(config) > 0
    same = (ours, theirs) if quant == "F32" else _in_float32(model, folder, file, config, report)
    found = parity.check_llama_cpp_logits(
        found,
        ours,
        theirs,
        quant,
        len(prompts),
        len(texts) - len(prompts),
        mixture=mixture,
        bounded=isinstance(same, str),
    )
    if isinstance(same, str):
        return replace(found, not_in_float32=same)
    bound = parity.GELU_TABLE if architecture(config) in GEMMAS else parity.SAME_NUMBERS
    return parity.check_float32_logits(found, *same, bound, mixture=mixture)


def _in_float32(
    model: Model, folder: Path, file: Path, config: PreTrainedConfig, report: Report
) -> tuple[list[torch.Tensor], list[torch.Tensor]] | str:
    """Logits of transformers and of llama.cpp, both computed in float32 with the numbers of the file.

    In words why not where the disk has no room for a copy in float32, or transformers' model cannot hold these numbers.
    """
    from engine.compat.gguf_reading import QuickReader

    reader = QuickReader(file)
    needed = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors) + SPARE_BYTES
    numbers = _numbers_of(reader, folder, config)
    if numbers is None:
        return "the file holds one weight in two formats"
    if shutil.disk_usage(file.parent).free < needed:
        return f"a copy in float32 wants {size(needed)} on the disk"
    report("Computing with its numbers in float32", 0, 1)
    ours = parity.outputs_with(model.config, folder, model.inputs, numbers)
    if ours is None:
        return "the files hold weights otherwise than the model has them"
    with tempfile.TemporaryDirectory(prefix=f"{file.name}-", dir=file.parent) as room:
        wide = Path(room) / "wide.gguf"
        try:
            llama_cpp.widen(file, wide)
            _, theirs = llama_cpp.answers(wide, [], model.inputs)
        except WorkbenchError as problem:
            if shutil.disk_usage(file.parent).free < SPARE_BYTES // 2:
                return "the disk was filled meanwhile"
            raise parity.differs("llama.cpp", f"its numbers cannot be read ({problem.message})") from problem
    return [each[0] for each in ours], theirs


def _numbers_of(reader: GGUFReader, folder: Path, config: PreTrainedConfig) -> Numbers | None:
    """Gives the folder's weights as the file holds them; None where it holds one in two formats, as llama.cpp may have a head
    and the embeddings that are one weight here."""
    import gguf

    arch, stored = architecture(config), model_files.stored_weights(folder)
    written = {tensor.name: tensor for tensor in reader.tensors}
    places: dict[str, list[tuple[str, int, Part]]] = {}
    for theirs, parts in tensors(config, arch, stored).items():
        for number, part in enumerate(parts):
            places.setdefault(part.name, []).append((theirs, number, part))
    formats = (
        {written[theirs].tensor_type for theirs, _, part in each if part == Part(name)} for name, each in places.items()
    )
    if any(len(each) > 1 for each in formats):
        return None

    def read(name: str) -> torch.Tensor:
        whole = torch.empty(stored[name].shape, dtype=torch.float32)
        for theirs, number, part in places[name]:
            tensor = written[theirs]
            data = tensor.data[number] if is_stack(theirs) else tensor.data
            made = gguf.quants.dequantize(data, tensor.tensor_type).reshape(part.shape(stored[name].shape))
            value = torch.from_numpy(np.ascontiguousarray(as_transformers(config, arch, name, made), np.float32))
            mine = whole if part.expert is None else whole[part.expert]
            mine[..., part.outputs] = value.mT if part.turned else value
        return whole

    return read


def _write(
    model: Model,
    folder: Path,
    file: Path,
    quant: str,
    config: PreTrainedConfig,
    name: str,
    vocab: Vocabulary,
    report: Report,
) -> None:
    """Writes the file in a format of `QUANTS`, or with the base's experts in MXFP4."""
    import gguf

    arch = getattr(gguf.MODEL_ARCH, name)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_name(model.source.run.id)
    named = {"F32": "ALL_F32", MXFP4: "MOSTLY_MXFP4_MOE"}.get(quant, f"MOSTLY_{quant}")
    writer.add_file_type(getattr(gguf.LlamaFileType, named))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    write_sizes(writer, config, name)
    _tokens(writer, vocab, model)
    stored = model_files.stored_weights(folder)
    held = tensors(config, name, stored)
    factors = llama3_factors(config)
    shapes = {theirs: _shape(theirs, ours, stored) for theirs, ours in held.items()}
    kinds = {theirs: _kind(theirs, shape, quant) for theirs, shape in shapes.items()}
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for theirs, shape in shapes.items():
        size = gguf.quants.quant_shape_to_byte_shape(shape, kinds[theirs])
        writer.add_tensor_info(theirs, size, np.dtype(np.uint8), math.prod(size), raw_dtype=kinds[theirs])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for done, (theirs, ours) in enumerate(held.items()):
        kind = kinds[theirs]
        size = gguf.quants.quant_shape_to_byte_shape(ours[0].shape(stored[ours[0].name].shape), kind)
        made = np.empty((len(ours), *size), np.uint8)
        if kind.name == MXFP4:
            for number, each in enumerate(ours):
                made[number] = mxfp4_of_gguf.blocks(model.base, each)
        for number, (each, value) in enumerate(_weights(folder, ours) if kind.name != MXFP4 else ()):
            changed = as_llama_cpp(config, name, each.name, value)
            if kind.name == "F16" and float(np.abs(changed).max(initial=0)) > LARGEST_F16:
                raise ModelError(
                    f"gguf: {visible(each.name)} has numbers beyond those of F16.", "Export with --quant BF16."
                )
            made[number] = np.ascontiguousarray(gguf.quants.quantize(changed, kind)).view(np.uint8).reshape(size)
        writer.write_tensor_data(made if is_stack(theirs) else made[0])
        report("Writing the GGUF", done + 1, len(held))
    writer.close()


def _same_ids(vocab: Vocabulary, tokenizer: Any) -> None:
    for text in parity.PROBES if vocab.model == "llama" else ():
        wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
        if joined(vocab, text) != wanted:
            raise ModelError(
                f"tokenizer.json: llama.cpp would join {visible(text)[:40]!r} to other ids.",
                "Take the model along as safetensors (--to safetensors).",
            )


def _tokens(writer: GGUFWriter, vocab: Vocabulary, model: Model) -> None:
    tokenizer, stops = model.tokenizer, list(model.stops)
    writer.add_tokenizer_model(vocab.model)
    writer.add_tokenizer_pre(vocab.pre)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    if vocab.scores:
        writer.add_token_scores(vocab.scores)
        writer.add_add_space_prefix(vocab.space_prefix)
    if vocab.merges:
        writer.add_token_merges(vocab.merges)
    own = tokenizer.eos_token_id if tokenizer.eos_token_id in stops else stops[0] if stops else None
    others = [each for each in stops if each != own]
    if len(others) > 2:
        raise ModelError(f"gguf: a file names three stop tokens at most, and this model has {len(stops)}.")
    slots = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, number in zip(slots, [*([] if own is None else [own]), *others], strict=False):
        add(number)
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id), (writer.add_pad_token_id, tokenizer.pad_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
    ):  # fmt: skip
        if number is not None:
            add(number)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id)
    template = parity.own_template(tokenizer)[0]
    if template:
        writer.add_chat_template(template)


def _shape(theirs: str, ours: list[Part], stored: dict[str, model_files.Tensor]) -> tuple[int, ...]:
    one = ours[0].shape(stored[ours[0].name].shape)
    return (len(ours), *one) if is_stack(theirs) else one


def _kind(theirs: str, shape: tuple[int, ...], quant: str) -> GGMLQuantizationType:
    from gguf import GGMLQuantizationType as kinds

    if stays_float32(theirs, shape):
        return kinds.F32
    if quant == MXFP4:
        return kinds.MXFP4 if is_stack(theirs) else kinds.BF16
    return kinds.F16 if quant == "Q8_0" and shape[-1] % 32 else kinds[quant]


def _weights(folder: Path, parts: list[Part]) -> Iterator[tuple[Part, FloatArray]]:
    """What each part is in float32, in the order of `parts`."""
    places = {name: file for file in model_files.weight_files(folder) for name in model_files.header(file)}
    for file, together in itertools.groupby(parts, lambda part: places[part.name]):
        with safe_open(file, "pt") as weights:
            for part in together:
                whole = weights.get_slice(part.name)
                value = (whole[:] if part.expert is None else whole[part.expert])[..., part.outputs]
                straight = value.mT if part.turned else value
                yield part, straight.to(torch.float32).numpy()


def _read_back(
    model: Model, folder: Path, file: Path, config: PreTrainedConfig, arch: str, vocab: Vocabulary
) -> parity.Parity:
    """Every weight against its source, then what the file says of tokens, template and stop tokens."""
    import gguf

    from engine.compat.gguf_reading import QuickReader

    reader = QuickReader(file)
    written = {tensor.name: tensor for tensor in reader.tensors}
    held = tensors(config, arch, model_files.stored_weights(folder))
    if lost := held.keys() - written.keys():
        raise parity.differs("gguf", f"it lacks {min(lost)}")
    for theirs, ours in held.items():
        tensor, kind = written[theirs], written[theirs].tensor_type.name
        for number, (each, value) in enumerate(_weights(folder, ours)):
            data = tensor.data[number] if is_stack(theirs) else tensor.data
            read = gguf.quants.dequantize(data, tensor.tensor_type).reshape(value.shape)
            if not _is_rounding(kind, value, np.abs(as_transformers(config, arch, each.name, read) - value)):
                raise parity.differs(
                    "gguf", f"the weight {visible(each.name)} is further from its source than rounding"
                )

    def field_of(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    tokenizer = model.tokenizer
    wanted = tokenizer.convert_ids_to_tokens(list(range(min(len(tokenizer), len(vocab.tokens)))))
    for number, (token, found) in enumerate(zip(wanted, field_of("tokenizer.ggml.tokens"), strict=False)):
        if token is not None and str(token) != found and str(token).replace("\u2581", " ") != found:
            raise parity.differs("gguf", f"token {number} is {found!r} instead of {token!r}")
    if (field_of("tokenizer.chat_template") or None) != (parity.own_template(tokenizer)[0] or None):
        raise parity.differs("gguf", "it has another chat template")
    ends = [field_of(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    found = [each for each in ends if each is not None]
    if sorted(found) != sorted(model.stops):
        raise parity.differs("gguf", f"its stop tokens are {found} instead of {model.stops}")
    stops = [str(each) for each in tokenizer.convert_ids_to_tokens(sorted(model.stops))]
    probes = len(parity.PROBES) if vocab.model == "llama" else 0
    formats = Counter(written[theirs].tensor_type.name for theirs in held)
    weights = len({each.name for ours in held.values() for each in ours})
    return parity.Parity("gguf", 0, probes, stops, weights=weights, formats=dict(formats))


def _is_rounding(kind: str, value: FloatArray, error: FloatArray) -> bool:
    """Whether a weight is no further from its source than its number format rounds."""
    if kind in ROUNDING:
        return bool(np.square(error).mean() <= ROUNDING[kind] ** 2 * np.square(value).mean() + 1e-12)
    return bool((error - _allowed(kind, value)).max(initial=0) <= 0)


def _allowed(kind: str, value: FloatArray) -> FloatArray:
    """How far a number may be from its source: half a step of its format."""
    size = np.abs(value)
    if kind == "Q8_0":
        blocks = size.reshape(-1, 32).max(axis=1, keepdims=True)
        step = blocks * (0.5 / 127 * 1.01 + 2.0**-11) + 2.0**-18
        return np.broadcast_to(step, (blocks.shape[0], 32)).reshape(value.shape)
    if kind == "F32":
        return (size + 1) * 2.0**-22
    if kind == MXFP4:
        return np.zeros_like(size)
    return size * (2.0**-11 if kind == "F16" else 2.0**-8) + (2.0**-25 if kind == "F16" else 0)
