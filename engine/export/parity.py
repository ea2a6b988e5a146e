"""Whether an artefact answers as the trained model does: opened by another reader, the same prompt, ids, stop tokens, logits.

The reference is the run's own: its tokenizer and template, and the base with the adapter beside it, as PEFT computes it. Both
sides compute in float32 on the CPU, so that what differs is what the artefact's number format rounds. Both have the weights of
one layer in memory at a time where the files allow it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engine import figures, model_files
from engine.config.architectures import loaders_of
from engine.config.kinds import LABELS
from engine.config.kinds import loader_of as choose_loader
from engine.config.tree import RunConfig
from engine.data.chat import Chat
from engine.data.plan import own_template
from engine.errors import WorkbenchError, first_line, visible
from engine.export import streamed
from engine.export.streamed import Numbers, Streamed
from engine.generate import end_of_turn
from engine.models.capped_scores import keep_capped_scores

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

PROBES = (
    "In 1999 it cost 3.50, in 2026 1234567890 times 42.",
    "  two spaces,   three\n\n\tand a tab  ",
    "I'm sure they're here, we'll see; it's John's, don't you think?",
    "我想在2026年学习机器学习。日本語も、한국어도.",
    "naïve café — “quoted” … € 🚀",
    "def f(x):\n    return x ** 2  # squared\n",
)
"""Texts on which tokenizers part: digits, spaces, contractions, other scripts, symbols, code."""
CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is 12 times 3?"}],
    [
        {"role": "user", "content": "Hello there"},
        {"role": "assistant", "content": "Hi. It's 10:30."},
        {"role": "user", "content": "你好 2026"},
    ],
)
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""How far logits may be from the reference's, as a share of their size, by the number format of the artefact."""
JUDGED = {"F16": (4e-3, None), "BF16": (6e-2, 1e-2), "Q8_0": (None, 1e-2)}
"""How far llama.cpp's logits may be as it computes with a GGUF, by the file's format, where they cannot be compared in float32: as a
share of their size, and in nats. It rounds activations to the format too: small models of nine dense families differ by 0.0007 to
0.0027 in F16, by 0.012 to 0.028 in BF16, in Q8_0 by up to 0.0062 nats. What K-quants lose is told."""
SAME_NUMBERS, GELU_TABLE = 1e-3, 5e-3
"""How far llama.cpp's logits may be from transformers' as a share of their size, where both have the numbers of the file and
compute in float32: small models of eleven families differ by up to 2.4e-6. Those of Gemma read a table of GELU in 16 bits: 0.0002
to 0.0004 with two layers, 0.0005 and 0.0014 with 18."""
LONGEST = 256
Layers = Callable[[int, int], None]
"""Called with bytes of the layers that were computed, of how many."""
FELT = 1e-5
"""What training moves logits by at the least, as a share of their size, if it moves them."""
SAME_WEIGHTS = 1e-2
"""How far a mixture's logits may be from those of the same weights, added up in another order: a token whose router hesitates
between two experts may get the other one."""


class Reference(NamedTuple):
    """What the run's own model gives for some texts."""

    trained: Any
    base: Any = None
    """Its base; None where there is no adapter, or its head is new."""
    rounded: Any = None
    """The adapter merged by PEFT and rounded to the format of the files, where that may send tokens to other experts."""


@dataclass(frozen=True)
class Parity:
    """What was compared and how near it was."""

    reader: str
    prompts: int
    """Conversations that both sides rendered alike."""
    probes: int
    """Texts that became the same ids."""
    stop_tokens: list[str]
    logits_error: float | None = None
    """Distance of the logits as a share of their size; None where no other reader computes them."""
    bound: float | None = None
    trained_effect: float | None = None
    """How far training moved the logits from the base's, as the same share."""

    weights: int | None = None
    """Weights that were read back and compared with their source one by one."""
    rounding_effect: float | None = None
    """Of a mixture of experts in 16 bits, how far rounding to the format moves the logits: `logits_error` is measured from
    there."""
    formats: dict[str, int] | None = None
    """Of a GGUF, how many weights have each number format."""
    divergence: float | None = None
    """Kullback-Leibler divergence of the next token by llama.cpp from the model's, in nats: the mean of all positions, or of a
    mixture, as its `logits_error` is, that of the middle one."""
    middle: bool = False
    """Whether the middle one of all positions was judged."""
    file_error: float | None = None
    """Of a GGUF, how far llama.cpp's logits are from transformers' with the numbers of the file, both computed in float32; None
    where that was not compared."""
    not_in_float32: str | None = None
    """Why that was left out, where llama.cpp was asked."""

    requantized: list[dict[str, Any]] | None = None
    """Of a base in few bits, what rounding to them did to each kind of merged weights (`engine.export.to_packed.Rounded`)."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class ParityError(WorkbenchError):
    """An artefact differs from the trained model."""


def differs(reader: str, what: str) -> ParityError:
    """The error for an artefact that `reader` reads as something else."""
    return ParityError(
        f"the artefact is not the trained model: opened by {reader}, {what}.",
        "It was removed; the checkpoint is as it was.",
    )


def texts(tokenizer: Any) -> list[str]:
    """The probes, with the tokenizer's special tokens within a text."""
    special = [str(each) for each in tokenizer.all_special_tokens][:4]
    return [*PROBES, *(f"before {each}after" for each in special)]


def rendered(tokenizer: Any, kwargs: dict[str, Any] | None = None) -> list[str]:
    """The conversations by the tokenizer's template; nothing where it has none or refuses them all."""
    found = []
    for messages in CONVERSATIONS if own_template(tokenizer)[0] else ():
        try:
            found.append(
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **(kwargs or {}))
            )
        except Exception:  # noqa: BLE001 - templates raise what they like; what one refuses, both refuse
            found.append("")
    return found


def stop_tokens(base_ids: Sequence[int], tokenizer: Any, kwargs: dict[str, Any]) -> list[int]:
    """Ids that end an answer: the base's generation config's, the tokenizer's, and the template's end of turn."""
    template, name = own_template(tokenizer)
    ends = end_of_turn(tokenizer, Chat(tokenizer, template, name, kwargs) if template else None)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return sorted({*base_ids, *own, *ends})


def compare_tokens(reader: str, trained: Any, opened: Any, stops: Sequence[int], found: Sequence[int]) -> Parity:
    """Raises ParityError where prompts, ids or stop tokens of two tokenizers differ."""
    ours, theirs = rendered(trained), rendered(opened)
    if ours != theirs:
        place = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
        raise differs(reader, f"the chat template renders conversation {place + 1} otherwise")
    for text in [*texts(trained), *ours]:
        a, b = trained(text)["input_ids"], opened(text)["input_ids"]
        if a != b:
            raise differs(reader, f"{visible(text)[:60]!r} becomes other ids ({b[:8]} instead of {a[:8]})")
    if sorted(stops) != sorted(found):
        raise differs(reader, f"the stop tokens are {sorted(found)} instead of {sorted(stops)}")
    names = [str(each) for each in trained.convert_ids_to_tokens(sorted(stops))]
    return Parity(reader, len(ours), len(texts(trained)), names)


def inputs(tokenizer: Any) -> list[list[int]]:
    """What logits are compared on: the probes and the rendered conversations, as ids."""
    found = [tokenizer(text)["input_ids"][:LONGEST] for text in texts(tokenizer)]
    found += [tokenizer(text, add_special_tokens=False)["input_ids"][:LONGEST] for text in rendered(tokenizer) if text]
    return [each for each in found if each]


def outputs(model: PreTrainedModel | PeftModel, ids: Sequence[list[int]]) -> list[torch.Tensor]:
    """What the model's head gives for each text, in float32: logits, or the last hidden state where it has no head."""
    model.eval()
    with torch.no_grad():
        found = [model(input_ids=torch.tensor([each]), use_cache=False) for each in ids]
    return [(each.logits if "logits" in each else each.last_hidden_state).float().cpu() for each in found]


def distance(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """The largest distance of a text's outputs as a share of their size; infinite where one of either is not finite. A judge
    answers a text with one row of numbers, which may be near nothing: it is held against the size of all its answers."""
    worst, sizes = 0.0, [each.norm() for each in ours]
    if sizes and all(each.dim() == 2 and len(each) == 1 for each in ours):
        sizes = [torch.stack(sizes).square().mean().sqrt()] * len(sizes)
    for a, b, size in zip(ours, theirs, sizes, strict=True):
        if a.shape != b.shape or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
            return float(
                "inf"
            )  # also what is compared with: a distance from it would be no number, which no bound refuses
        worst = max(worst, float((a - b).norm() / size.clamp_min(1e-12)))
    return worst


def loader_of(config: RunConfig, folder: Path) -> Any:
    """transformers' class for the model whose files are in `folder`, with the method's head."""
    import transformers

    known = loaders_of(str(model_files.read_json(folder / "config.json").get("model_type", "")))
    return getattr(transformers, choose_loader(config.method.head, known))


def reference(
    config: RunConfig,
    base: Path,
    adapter: Path | None,
    ids: Sequence[list[int]],
    format_of: Callable[[str], torch.dtype] | None = None,
    report: Layers | None = None,
    restore: Callable[[PreTrainedModel], None] | None = None,
) -> Reference:
    """Outputs of the trained model, the adapter beside its base, and of the base. With `format_of` a weight's name, a mixture
    of experts is merged and rounded too. `restore` gives a model that is opened whole the weights that training wrote, where
    the files of `base` were made of them."""
    made = in_layers(config, base, adapted=adapter is not None, report=report)
    if made is not None and _serves(made, adapter, format_of, restore):
        return _reference_in_layers(config, made, adapter, ids, format_of)
    model = trained_base(config, base, adapted=adapter is not None)
    if adapter is None:
        if restore is not None:
            restore(model)
        return Reference(outputs(model, ids))
    plain = None if config.method.head in LABELS else outputs(model, ids)
    from peft import PeftModel

    mixture = any(weight.ndim == 3 for weight in model.parameters())
    adapted = PeftModel.from_pretrained(model, str(adapter))
    trained = outputs(adapted, ids)
    if format_of is None or not mixture:
        return Reference(trained, plain)
    merged = adapted.merge_and_unload()
    for name, weight in merged.named_parameters():
        weight.data = weight.data.to(format_of(name)).float()
    return Reference(trained, plain, outputs(merged, ids))


def in_layers(
    config: RunConfig, folder: Path, *, adapted: bool, report: Layers | None = None, numbers: Numbers | None = None
) -> Streamed | None:
    """The model in `folder` without its weights, `adapted` as training held it beside an adapter, or with other `numbers` for
    them; None where its files do not hold each weight as the model has it, so that it must be opened whole."""
    import transformers

    shape = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    new_head = LABELS.get(config.method.head, {}) if adapted else {}
    shape.update(new_head)
    made = streamed.opened(folder, loader_of(config, folder), shape, config if adapted else None, numbers)
    if made is None:
        return None
    _fit_padding(made.model)
    made.report = report or made.report
    return made if streamed.complete(made, new_head=bool(new_head)) else None


def _serves(
    made: Streamed,
    adapter: Path | None,
    format_of: Callable[[str], torch.dtype] | None,
    restore: Callable[[PreTrainedModel], None] | None,
) -> bool:
    """Whether a layer at a time gives what the whole model would."""
    if adapter is None:
        # Files that were put together of shares say nothing of themselves.
        return restore is None or not made.together
    return format_of is None or not made.numbers_of_experts or not streamed.adapts_tied(made, adapter)


def _reference_in_layers(
    config: RunConfig,
    made: Streamed,
    adapter: Path | None,
    ids: Sequence[list[int]],
    format_of: Callable[[str], torch.dtype] | None,
) -> Reference:
    together = config.method.head != "score"
    if adapter is None:
        return Reference(streamed.outputs(made, ids, together=together))
    plain = None if config.method.head in LABELS else streamed.outputs(made, ids, together=together)
    try:
        whole = streamed.adapted(made, adapter)
    except ValueError as problem:
        raise differs("PEFT", f"{visible(str(problem))[:200]}") from problem
    trained = streamed.outputs(whole, ids, together=together)
    if format_of is None or not made.numbers_of_experts:
        return Reference(trained, plain)
    return Reference(trained, plain, streamed.outputs(streamed.merging(whole, format_of), ids, together=together))


def trained_base(config: RunConfig, base: Path, *, adapted: bool) -> Any:
    """The model in `base` as training held it beside an adapter, in float32; else as its files hold it."""
    from engine.models.load import weight_settings
    from engine.models.packed_experts import packed_experts
    from engine.models.stored_fp8 import load_fp8, stored_fp8
    from engine.models.stored_packed.loading import load_packed, stored_packed

    new_head = LABELS.get(config.method.head, {}) if adapted else {}
    dtype = getattr(torch, config.model.dtype) if adapted else torch.float32
    if (packs := stored_packed(str(base), None)) is not None:
        packs.config.update(new_head)
        loader, head = loader_of(config, base), config.method.head
        made: Any = load_packed(loader, packs, {"dtype": dtype}, head, keep=False)[0].float()
        _fit_padding(made)
        return made
    if (stored := stored_fp8(str(base), None)) is not None:
        stored.config.update(new_head)
        scaled: Any = load_fp8(loader_of(config, base), stored, {"dtype": dtype}, keep=False)[0].float()
        _fit_padding(scaled)
        return scaled
    settings: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
    quantized = weight_settings(config, str(base), None) if adapted else {}
    if quantized:
        settings |= {"dtype": dtype, **quantized}
    if "config" in settings:
        settings["config"].update(new_head)
    else:
        settings |= new_head
    model = loader_of(config, base).from_pretrained(base, **settings)
    if quantized:
        for name, packed in list(packed_experts(model)):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(packed.all_unpacked(), requires_grad=False))
    if hasattr(model, "hf_quantizer"):  # for training, or by bitsandbytes before
        model = model.dequantize()
    model = model.float()
    _as_trained(model)
    return model


def _as_trained(model: PreTrainedModel) -> None:
    """Has a model compute as training did, one text at a time."""
    keep_capped_scores(model)
    _fit_padding(model)


def _fit_padding(model: PreTrainedModel | PeftModel) -> None:
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = 0  # one text at a time: nothing is padded, and a head of scores asks for it


def open_folder(
    config: RunConfig, folder: Path, ids: Sequence[list[int]], report: Layers | None = None
) -> list[torch.Tensor]:
    """Outputs of a model folder, as plain transformers opens it. Raises ParityError for one that it cannot open whole."""
    loader = loader_of(config, folder)
    try:
        made = in_layers(config, folder, adapted=False, report=report)
        # On this device transformers looks for each weight and reads none.
        where: dict[str, Any] = {} if made is None else {"device_map": "meta"}
        model, notes = loader.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False, **where
        )
    except model_files.UNREADABLE as problem:
        first = visible(first_line(problem))[:200]
        raise differs("transformers", f"it cannot be loaded ({first})") from problem
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if notes.get(what):
            raise differs("transformers", f"it has {what.replace('_', ' ')}, such as {min(map(str, notes[what]))}")
    if made is not None:
        return streamed.outputs(made, ids, together=config.method.head != "score")
    _as_trained(model)
    return outputs(model, ids)


def measured(found: Parity, ours: Reference, theirs: Sequence[torch.Tensor]) -> Parity:
    """The comparison with logits of few bits, whose distance is told and bound by nothing. Raises ParityError where they are not
    finite."""
    error = distance(ours.trained, theirs)
    if not math.isfinite(error):
        raise differs(found.reader, "its logits are not finite")
    effect = None if ours.base is None else distance(ours.trained, ours.base)
    return replace(found, logits_error=error, trained_effect=effect)


def open_packed(
    config: RunConfig, folder: Path, ids: Sequence[list[int]], report: Layers | None = None
) -> list[torch.Tensor]:
    """Outputs of a folder in a packed format, as training opens such a base. Raises ParityError for one that it cannot open."""
    try:
        made = in_layers(config, folder, adapted=True, report=report)
        if made is not None:
            return streamed.outputs(made, ids, together=config.method.head != "score")
        return outputs(trained_base(config, folder, adapted=True), ids)
    except model_files.UNREADABLE as problem:
        first = visible(first_line(problem))[:200]
        raise differs("the workbench", f"it cannot be loaded ({first})") from problem


def outputs_with(
    config: RunConfig, folder: Path, ids: Sequence[list[int]], numbers: Numbers
) -> list[torch.Tensor] | None:
    """Outputs of a model folder with other `numbers` for its weights, which are read one layer at a time; None where its files
    do not hold each weight as the model has it."""
    made = in_layers(config, folder, adapted=False, numbers=numbers)
    return None if made is None else streamed.outputs(made, ids, together=config.method.head != "score")


def check_logits(found: Parity, ours: Reference, theirs: Sequence[torch.Tensor], bound: float) -> Parity:
    """The comparison with its logits. Raises ParityError where they are further apart than `bound`.

    Rounding a mixture's weights sends some tokens to other experts, which says nothing of the artefact: its logits are held
    against those of the weights rounded alike.
    """
    wanted = ours.trained if ours.rounded is None else ours.rounded
    if not all(bool(torch.isfinite(each).all()) for each in wanted):
        raise WorkbenchError(
            "the trained model's own logits are not finite: its weights broke in training, and nothing can be compared.",
            "Take an earlier checkpoint.",
        )
    if ours.rounded is not None:
        bound = min(bound, SAME_WEIGHTS)
    error = distance(wanted, theirs)
    if not error <= bound:
        raise differs(
            found.reader, f"its logits are {error:.2g} of their size away, where at most {bound:g} is rounding"
        )
    if ours.base is not None and _lost(wanted, ours.base, theirs, error):
        raise differs(found.reader, "it answers as its base does, without what was trained")
    effect = None if ours.base is None else distance(ours.trained, ours.base)
    rounding = None if ours.rounded is None else distance(ours.trained, ours.rounded)
    return replace(found, logits_error=error, bound=bound, trained_effect=effect, rounding_effect=rounding)


def _lost(
    wanted: Sequence[torch.Tensor], base: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], error: float
) -> bool:
    """Whether outputs that are no further away than rounding moves them are still the base's. Training of a few steps moves
    them less than rounding does, so the distance alone does not say; where it is twice what training moved, nothing does."""
    effect = distance(base, wanted)
    if effect < FELT or error > 2 * effect:
        return False
    along = sum(float(((a - b) * (c - b)).sum()) for a, b, c in zip(wanted, base, theirs, strict=True))
    return along < 0.1 * sum(float((a - b).square().sum()) for a, b in zip(wanted, base, strict=True))


def check_llama_cpp_logits(
    found: Parity,
    ours: Sequence[torch.Tensor],
    theirs: Sequence[torch.Tensor],
    quant: str,
    prompts: int,
    probes: int,
    *,
    mixture: bool = False,
    bounded: bool = True,
) -> Parity:
    """The comparison with llama.cpp's logits. Raises ParityError where they are not finite, or where `bounded` further apart than
    the format explains.

    Rounding sends some tokens of a `mixture` to other experts, so that the middle one of all positions is judged: of small
    mixtures it is as near as of dense models, where one position in a hundred is up to half of its size away.
    """
    error, apart = distance(ours, theirs), divergence(ours, theirs)
    if mixture and math.isfinite(error):
        error, apart = middle(ours, theirs)
    bound, most = JUDGED.get(quant, (None, None)) if bounded else (None, None)
    if not math.isfinite(error):
        raise differs("llama.cpp", "its logits are not finite")
    if bound is not None and error > bound:
        raise differs(
            "llama.cpp", f"its logits are {error:.2g} of their size away, where at most {bound:g} is rounding"
        )
    if most is not None and apart > most:
        raise differs("llama.cpp", f"its next tokens diverge by {apart:.2g} nats, where at most {most:g} is rounding")
    return replace(
        found,
        reader="gguf and llama.cpp",
        prompts=prompts,
        probes=probes,
        logits_error=error,
        bound=bound,
        divergence=apart,
        middle=mixture,
    )


def check_float32_logits(
    found: Parity, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], bound: float, *, mixture: bool
) -> Parity:
    """The comparison with llama.cpp's logits, both sides computed in float32 with the numbers of the file: what is left tells
    of the file alone. Raises ParityError where they are further apart than `bound`."""
    error = middle(ours, theirs)[0] if mixture else distance(ours, theirs)
    if not error <= bound:
        raise differs(
            "llama.cpp",
            f"its logits in float32 are {error:.2g} of their size away from those of the same numbers, where at most "
            f"{bound:g} is rounding",
        )
    return replace(found, file_error=error)


def divergence(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Mean Kullback-Leibler divergence of the next token over all positions, in nats."""
    return float(_divergences(ours, theirs).mean())


def _divergences(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> torch.Tensor:
    sums = [
        torch.nn.functional.kl_div(b.log_softmax(-1), a.log_softmax(-1), log_target=True, reduction="none").sum(-1)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return torch.cat([each.flatten() for each in sums])


def middle(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Distance of the logits as a share of their size, and divergence in nats, each of the middle one of all positions."""
    apart = [
        ((a - b).norm(dim=-1) / a.norm(dim=-1).clamp_min(1e-12)).flatten() for a, b in zip(ours, theirs, strict=True)
    ]
    return float(torch.cat(apart).median()), float(_divergences(ours, theirs).median())


def memory_of(made: Streamed | None, numbers: int, ids: Sequence[list[int]], vocabulary: int) -> int:
    """Bytes that a comparison takes: the model once in float32, or a layer of it and what all heads give."""
    if made is None:
        return int(4.4 * numbers)
    padded = len(ids) * max(map(len, ids), default=1)
    # PEFT adds up what an adapter on experts says of all of them, beside their weight.
    return (
        made.largest + 8 * made.numbers_of_experts + 4 * vocabulary * (2 * padded + 3 * sum(map(len, ids))) + (64 << 20)
    )


def refuse_little_memory(needed: int) -> None:
    """Raises WorkbenchError where the comparison would not fit this machine."""
    import psutil

    free = psutil.virtual_memory().available
    if needed > free:
        raise WorkbenchError(
            f"comparing the result with the trained model takes {figures.size(needed)} of memory, and {figures.size(free)} "
            "are free.",
            "Close other programs, or do it on a machine with more memory.",
        )
