"""`builtin/tiny`: a small language model made from a config, with its own tokenizer and chat template.

Owns the shape, the vocabulary and the first weights, and writes them once as an ordinary model folder into the cache:
trainers reload models by name, and everything that opens a folder can open this one. The folder's name carries a hash
of all that decides its content, it is written aside and renamed into place, so processes that come at the same time
need no lock and never see half a model. With another tokenizer the same shape gets that vocabulary, untrained.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import model_files
from engine.builtin import dates
from engine.caches import user_cache
from engine.errors import ModelError, first_line, redact, visible
from engine.hub import commit_of, reaching_hub

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME = "builtin/tiny"
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    # Narrow layers need larger first weights than the customary 0.02. Rotary periods of 6 to 190 tokens let attention
    # tell the first number of a date from the second with few steps: with the customary base of 10,000 it takes twice
    # as many until held-out days are right. Longer texts still train; places far apart look alike to it.
    "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 30.0},
}
SEED = 0
VOCABULARY = 512
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- elif message['content'] %}
{%- for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}
{%- endif %}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n<tool_call>\\n' + (call['function'] if call['function'] else call) | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def folder(tokenizer: str | os.PathLike[str] | None = None) -> Path:
    """The model's folder in the cache, made on first use; with `tokenizer` (folder or hub id) the same shape around it.

    Raises `ModelError` where the tokenizer cannot be read or the cache cannot be written.
    """
    if tokenizer is None:
        return cached_folder("tiny", _recipe(), lambda place: _write(_own_tokenizer(), place))
    loaded = _other_tokenizer(os.fspath(tokenizer))
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as saved:
        loaded.save_pretrained(saved)
        files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in Path(saved).iterdir()}
    return cached_folder("tiny", {**_recipe(), "tokenizer": files}, lambda place: _write(loaded, place))


def cached_folder(stem: str, recipe: dict[str, Any], write: Callable[[Path], None], name: str = NAME) -> Path:
    """The folder in the cache that `write` fills, made where none is there that this recipe decided.

    Raises `ModelError`, naming the model `name`, where the cache cannot be written.
    """
    target = _base() / f"{stem}-{_digest(recipe)}"
    if not _is_complete(target):
        with _aside(target, name) as place:
            write(place)
    return target


def shape(vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """The keys of `config.json` that tell a model's size, known without building it."""
    return {"model_type": "qwen3", "vocab_size": vocabulary, **SHAPE}


def _write(tokenizer: PreTrainedTokenizerBase, target: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(SEED)
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), dtype="float32", **SHAPE, **ids)).float()
    save_model(model, target, ids)
    tokenizer.save_pretrained(target)


def save_model(model: PreTrainedModel, target: Path, ids: Mapping[str, Any]) -> None:
    """Writes weights and configs; `ids` are the special tokens that end and pad what it generates."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    # By hand, not `save_pretrained`: that draws a progress bar on whatever terminal this process has.
    weights = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(target)
    GenerationConfig(do_sample=False, **ids).save_pretrained(target)


def _own_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE, so that every text comes back unchanged; merges learned from generated dates.

    Digits go in pairs from the left, as dates are written: a year is two tokens, a day or a month one.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_learned(),
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="right",
        model_max_length=SHAPE["max_position_embeddings"],
    )


def _learned() -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("[0-9]{1,2}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True, normalized=False) for text in (PAD, START, END)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def _texts() -> Iterator[str]:
    for row in dates.rows("train", seed=SEED, count=4_000):
        yield row["messages"][0]["content"]
    for number in range(100):
        yield from [f"{number:02}"] * 100
    for role in ("system", "user", "assistant", "tool"):
        yield from [f"{role}\n"] * 400


def _other_tokenizer(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        with reaching_hub(name):
            revision = commit_of(name)
            model_files.refuse_without_tokens(model_files.checked(name, revision))
            return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (ModelError, *model_files.UNREADABLE) as problem:
        first = visible(redact(first_line(problem)))
        raise ModelError(
            f"model.tokenizer: no tokenizer can be read from {visible(name)}: {first}",
            "Give a folder with tokenizer.json, or a hub id.",
        ) from problem


def _recipe() -> dict[str, Any]:
    """All that decides what the folder holds; transformers, since its version decides how it is written."""
    written_by = importlib.metadata.version("transformers")
    return {
        "shape": shape(),
        "seed": SEED,
        "template": CHAT_TEMPLATE,
        "texts": _texts_digest(),
        "transformers": written_by,
    }


@functools.cache
def _texts_digest() -> str:
    return hashlib.sha256("\0".join(_texts()).encode()).hexdigest()


def _digest(recipe: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def _base() -> Path:
    return user_cache() / "builtin"


def _is_complete(target: Path) -> bool:
    return all((target / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


@contextlib.contextmanager
def _aside(target: Path, name: str = NAME) -> Iterator[Path]:
    """A folder to write into that becomes `target` in one step, unless another process was first."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            yield place
            for file in place.iterdir():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            place.chmod(0o755)
            _into_place(place, target)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    except OSError as problem:
        raise ModelError(
            f"{redact(str(target))}: {name} cannot be written into the cache: {problem.strerror or problem}.",
            "Free some space, or name another folder in WORKBENCH_CACHE.",
        ) from problem


def _into_place(place: Path, target: Path) -> None:
    try:
        place.rename(target)
    except OSError:
        if _is_complete(target):
            return  # another process was first, with the same content
        broken = place.with_name(place.name + "-broken")
        with contextlib.suppress(FileNotFoundError):
            target.rename(broken)
        try:
            place.rename(target)
        except OSError:
            if not _is_complete(target):
                raise
        finally:
            shutil.rmtree(broken, ignore_errors=True)
