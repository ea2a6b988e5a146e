"""A tokenizer as a GGUF holds it: tokens, scores or merges, and the name of the rules by which llama.cpp cuts a text first.

That name is found by comparing the tokenizer's own rules with llama.cpp's; one that has no equal there is refused, since
llama.cpp would give other ids and say nothing. For SentencePiece vocabularies llama.cpp's way of joining is followed here and
must give the tokenizer's own ids.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError, visible
from engine.model_files import read_json

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _ENDINGS + r"?|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _ENDINGS
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARKS = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
RULES: dict[tuple[str, ...], tuple[tuple[str, bool], ...]] = {
    ("bytes+words",): (("gpt-2", False),),
    ("digits", "bytes+words"): (("smollm", False),),
    (f"split {_WORDS}|\\p{{N}}{{1,3}}{_REST}", "bytes"): (("llama-bpe", True), ("dbrx", False)),
    (f"split {_WORDS}|\\p{{N}}{_REST}", "bytes"): (("qwen2", False),),
    (f"split {_MARKS}", "bytes"): (("qwen35", False),),
    (f"split {_TEKKEN}", "bytes"): (("tekken", True),),
    (f"split {_CASES}", "bytes"): (("gpt-4o", False),),
}
"""What a tokenizer does before it joins, and llama.cpp's names of the same with whether it takes a whole word that is a token
without joining (`ignore_merges`)."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MARK = "\u2581"


@dataclass(frozen=True)
class Vocabulary:
    """The tokens in order of their ids, as llama.cpp reads them."""

    model: str
    """`gpt2` for byte-level BPE, `llama` for SentencePiece."""
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    space_prefix: bool = False


def vocabulary(folder: Path, tokenizer: Any, rows: int) -> Vocabulary:
    """The vocabulary of a model folder with `rows` embeddings. Raises ModelError for rules that llama.cpp does not have."""
    path = folder / "tokenizer.json"
    content = read_json(path) if path.is_file() else {}
    model = content.get("model") or {}
    if model.get("type") != "BPE":
        raise _unknown(f"a tokenizer of type {visible(str(model.get('type') or 'unknown'))}")
    texts = {int(number): text for text, number in model["vocab"].items()}
    added = {int(each["id"]): each for each in content.get("added_tokens") or []}
    merges = [each if isinstance(each, str) else " ".join(each) for each in model.get("merges") or []]
    tokens, types = [], []
    for number in range(rows):
        text = added[number]["content"] if number in added else texts.get(number)
        kind = NORMAL
        if text is None:
            text, kind = f"[PAD{number}]", UNUSED
        elif number in added:
            kind = CONTROL if added[number]["special"] else USER_DEFINED
        tokens.append(text)
        types.append(kind)
    if model.get("byte_fallback"):
        return _sentencepiece(content, tokens, types, merges)
    return Vocabulary("gpt2", _pre_tokenizer(content), tokens, types, [], merges)


def _pre_tokenizer(content: dict[str, Any]) -> str:
    steps = content.get("pre_tokenizer") or {}
    parts = steps.get("pretokenizers") if steps.get("type") == "Sequence" else [steps]
    normalizer, whole_words = content.get("normalizer"), bool(content["model"].get("ignore_merges"))
    names = RULES.get(tuple(_step(part) for part in parts or []), ())
    if not names or (normalizer and normalizer.get("type") != "NFC"):
        raise _unknown("a tokenizer that cuts texts by rules which llama.cpp does not have")
    alike = [name for name, words in names if words == whole_words]
    if not alike and not _joins_every_token(content):
        raise _unknown("a tokenizer with tokens that joining does not make")
    return alike[0] if alike else names[0][0]


def _joins_every_token(content: dict[str, Any]) -> bool:
    """Whether joining makes each token of its own text, so that it is one whether or not whole words are looked up first."""
    from tokenizers import Tokenizer

    bare = {**content, "model": {**content["model"], "ignore_merges": False}, "added_tokens": []}
    bare |= dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"))
    special = {each["content"] for each in content.get("added_tokens") or []}
    words = {text: number for text, number in content["model"]["vocab"].items() if text not in special}
    made = Tokenizer.from_str(json.dumps(bare)).encode_batch(list(words), add_special_tokens=False)
    return all(each.ids == [number] for each, number in zip(made, words.values(), strict=True))


def _step(part: dict[str, Any]) -> str:
    kind = part.get("type")
    if kind == "ByteLevel" and not part.get("add_prefix_space"):
        return "bytes+words" if part.get("use_regex", True) else "bytes"
    if kind == "Digits" and part.get("individual_digits"):
        return "digits"
    if kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        return f"split {(part.get('pattern') or {}).get('Regex')}"
    return f"{kind}?"


def _unknown(what: str) -> ModelError:
    return ModelError(
        f"tokenizer.json: is {what}, so it would give other ids there.",
        "Take the model along as safetensors (--to safetensors), which vLLM and transformers read.",
    )


def _sentencepiece(content: dict[str, Any], tokens: list[str], types: list[int], merges: list[str]) -> Vocabulary:
    """Scores out of the order of the merges: what is joined first has the highest."""
    prefix = _prefixes(content)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    scores = [-float(ranks[text]) if text in ranks else -1e6 for text in tokens]
    unknown = content["model"].get("unk_token")
    for number, text in enumerate(tokens):
        if text == unknown:
            types[number] = UNKNOWN
        elif types[number] == NORMAL and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            types[number] = BYTE
        elif types[number] == USER_DEFINED:
            tokens[number] = text.replace(MARK, " ")
    return Vocabulary("llama", "default", tokens, types, scores, [], prefix)


def _prefixes(content: dict[str, Any]) -> bool:
    """Whether a space is put before a text. Raises ModelError for anything else that is done to it."""
    steps, pre = content.get("normalizer") or {}, content.get("pre_tokenizer") or {}
    parts = steps.get("normalizers") if steps.get("type") == "Sequence" else [steps] if steps else []
    kinds = [part.get("type") for part in parts or []]
    if pre.get("type") == "Metaspace" and not kinds:
        return pre.get("prepend_scheme") != "never"
    split = pre.get("type") == "Split" and pre.get("pattern") == {"String": " "}
    if kinds in (["Prepend", "Replace"], ["Replace"]) and (not pre or split):
        return kinds[0] == "Prepend"
    raise _unknown("a SentencePiece tokenizer with rules which llama.cpp does not have")


def joined(vocab: Vocabulary, text: str) -> list[int]:
    """The ids of a plain text by llama.cpp's way of joining a SentencePiece vocabulary: the pair with the highest score
    first, the leftmost of equals."""
    known = {token: number for number, token in enumerate(vocab.tokens) if vocab.types[number] == NORMAL}
    text = (MARK if vocab.space_prefix and text else "") + text.replace(" ", MARK)
    symbols: list[str] = list(text)
    before, after = list(range(-1, len(symbols) - 1)), [*range(1, len(symbols)), -1]
    heap: list[tuple[float, int, int, str]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right >= 0 and (number := known.get(symbols[left] + symbols[right])) is not None:
            heapq.heappush(heap, (-vocab.scores[number], left, right, symbols[left] + symbols[right]))

    for left in range(len(symbols) - 1):
        offer(left, left + 1)
    while heap:
        _, left, right, made = heapq.heappop(heap)
        if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != made:
            continue
        symbols[left], symbols[right] = made, ""
        after[left] = after[right]
        if after[right] >= 0:
            before[after[right]] = left
        offer(before[left], left)
        offer(left, after[left])
    return _numbered(vocab, [each for each in symbols if each], known)


def _numbered(vocab: Vocabulary, symbols: Sequence[str], known: dict[str, int]) -> list[int]:
    bytes_of = {token: number for number, token in enumerate(vocab.tokens) if vocab.types[number] == BYTE}
    ids: list[int] = []
    for each in symbols:
        if each in known:
            ids.append(known[each])
        else:
            ids += [bytes_of.get(f"<0x{byte:02X}>", 0) for byte in each.encode()]
    return ids
