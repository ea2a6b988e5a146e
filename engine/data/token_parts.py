"""A batch of one row as parts of tokens with their texts, for the preview: read back from the collator's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.data.pretokenized import IGNORED
from engine.data.tokens import Piece

Row = dict[str, Any]
Parts = dict[str, list[dict[str, Any]]]


def parts_of(tokenizer: Any, batch: Any, row: Row) -> Parts:
    """The parts of a batch of one row: each a list of tokens with id, text and whether it is learned."""
    if isinstance(batch, list):
        ids = batch[0]["prompt_ids"]
        texts = token_texts(tokenizer, ids)
        return {"prompt": tokens_of(ids, texts, [False] * len(ids))}
    if "own_text" in batch:
        return _whole_texts(tokenizer, batch)
    if "completion_mask" in batch:
        if "label" in batch:
            return _answered_parts(tokenizer, batch, ["good answer" if batch["label"][0] else "bad answer"])
        return _answered_parts(tokenizer, batch, ["chosen", "rejected"])
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    real = len(row["input_ids"])
    ids, labels = ids[:real], labels[:real]
    piece, offsets = row.get("piece"), row.get("offsets")
    if isinstance(piece, Piece) and offsets is not None and len(offsets) == row["length"]:
        texts = slices(piece.text, offsets)
        start = window_start(row, plan_length=len(offsets))
        texts = texts[start : start + real]
    else:
        texts = token_texts(tokenizer, ids)
    return {"input": tokens_of(ids, texts, learned(labels))}


def tokens_of(ids: Iterable[int], texts: Iterable[str], trained: Iterable[bool]) -> list[dict[str, Any]]:
    """Tokens as the preview has them: id, text and whether it is learned."""
    return [
        {"id": each, "text": text, "trained": learned} for each, text, learned in zip(ids, texts, trained, strict=True)
    ]


def learned(labels: Sequence[int]) -> list[bool]:
    """Which tokens of a row are learned: the first has nothing before it that could foretell it."""
    return [label != IGNORED and place > 0 for place, label in enumerate(labels)]


def _whole_texts(tokenizer: Any, batch: Any) -> Parts:
    """Each text for itself, every token of it learned."""
    parts: Parts = {}
    names = ("text", f"score {batch['score'][0]:g}") if "score" in batch else ("anchor", "positive", "negative")
    for name, ids, mask in zip(names, batch["input_ids"], batch["attention_mask"], strict=False):
        real = ids[: int(mask.sum())].tolist()
        parts[name] = tokens_of(real, token_texts(tokenizer, real), [True] * len(real))
    return parts


def _answered_parts(tokenizer: Any, batch: Any, names: Sequence[str]) -> Parts:
    """The prompt and each answer, told apart by the mask of the batch."""
    parts: Parts = {}
    for place, name in enumerate(names):
        real = int(batch["attention_mask"][place].sum())
        ids = batch["input_ids"][place][:real].tolist()
        mask = batch["completion_mask"][place][:real].tolist()
        items = tokens_of(ids, token_texts(tokenizer, ids), map(bool, mask))
        parts.setdefault("prompt", [item for item in items if not item["trained"]])
        parts[name] = [item for item in items if item["trained"]]
    return parts


def window_start(row: Row, plan_length: int) -> int:
    """The first token that is kept of a row that was cut on its left."""
    return plan_length - len(row["input_ids"]) if row.get("side") == "left" else 0


def slices(text: str, offsets: Sequence[tuple[int, int]]) -> list[str]:
    """The text each token stands for; pieces of one character share it, the first one shows it. They join to the text."""
    texts, reached = [], 0
    for _, end in offsets:
        texts.append(text[reached : max(end, reached)])
        reached = max(end, reached)
    if texts and reached < len(text):
        texts[-1] += text[reached:]
    return texts


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the decoded text. They join to it; half characters are held until they are whole."""
    texts: list[str] = []
    begin = read = 0
    for place in range(len(ids)):
        before = _decode(tokenizer, ids[begin:read])
        now = _decode(tokenizer, ids[begin : place + 1])
        last = place == len(ids) - 1
        if len(now) > len(before) and (last or not now.endswith("\ufffd")):
            texts.append(now[len(before) :])
            begin, read = read, place + 1
        else:
            texts.append("")
    return texts


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""
