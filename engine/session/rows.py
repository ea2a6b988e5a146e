"""Rows of a draft as training sees them: the question to the inspector, and what is said of a row, the same everywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from engine.config.files import absolute
from engine.config.tree import fields
from engine.errors import WorkbenchError
from engine.figures import count, doing, percent
from engine.session.collector import Ask, NewestQuestion
from engine.session.draft import Draft

WORST = {"longest": "the longest row", "masked": "a row with nothing trained", "truncated": "the row cut the most"}


ASK_SECONDS = 0.25
"""Between two questions to the inspector: a held key asks 30 times a second, each time for a row that nobody will read,
and each answer takes a process of its own beside the run that trains."""


class RowQuestion:
    """One question at a time about the rows of a draft: a newer one cancels the older. `wake` may come from any thread."""

    def __init__(self, draft: Draft, ask: Ask, wake: Callable[[], object] = lambda: None) -> None:
        self.draft = draft
        self.wanted: dict[str, Any] = {"kind": "index", "index": 0}
        self.packs = True
        """Packs as training makes them, or their rows one by one."""
        self.progress = ""
        self._question, self._wake = NewestQuestion(ask, wake), wake
        self._waits = False
        self._asked = 0.0

    @property
    def packing(self) -> bool:
        """Whether what is asked for are packs."""
        return bool(self.draft.config.data.packing) and self.packs

    def put(self, wanted: dict[str, Any], words: str) -> float:
        """Want this from now on; the seconds until it is its turn to be sent."""
        self.cancel()
        self.wanted, self.progress, self._waits = wanted, f"{words} …", True
        return max(0.0, self._asked + ASK_SECONDS - time.monotonic())

    def send(self, *, count: int = 1, split: str = "train") -> None:
        """Ask for what is wanted, unless that is done or was cancelled."""
        if not self._waits:
            return
        self._waits, self._asked = False, time.monotonic()
        words = self.progress.removesuffix(" …")

        def on_progress(state: dict[str, Any]) -> None:
            self.progress = doing(state, words)
            self._wake()

        base, asked = self.draft.base, {"rows": self.wanted, "count": count, "split": split}
        self._question.send("preview", on_progress=on_progress, config=self._mapping(), base=str(base), **asked)

    def _mapping(self) -> dict[str, Any]:
        mapping, packing = absolute(self.draft.mapping, self.draft.base), fields.data.packing
        if self.packs or not self.draft.config.data.packing:
            return mapping
        apart = {packing.name: False, fields.data.packing_cross_doc_attn_mask.name: False}
        return {**mapping, packing.section: {**mapping[packing.section], **apart}}

    @property
    def put_forward(self) -> bool:
        """Whether something was asked that nobody has cancelled or taken the answer of."""
        return self._waits or self._question.put_forward

    @property
    def open(self) -> bool:
        """Whether an answer is still to come."""
        return self._waits or self._question.open

    def take(self) -> dict[str, Any] | WorkbenchError | None:
        """The answer, or what went wrong, once; nothing while there is none."""
        return self._question.take()

    def cancel(self) -> bool:
        """Give up the question; False where none was open."""
        was, self._waits = self.open, False
        self._question.cancel()
        return was


def tokens_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Its tokens, each once: the parts of a pair share those of their prompt."""
    return list({id(token): token for part in (row.get("parts") or {}).values() for token in part}.values())


def length_text(row: Mapping[str, Any]) -> str:
    """`83 tokens`, and how long the longest side of a pair is: what is held against the limit."""
    tokens = len(tokens_of(row))
    side = row.get("length") or tokens
    return f"{count(tokens)} tokens" + (f" (longest side {count(side)})" if side < tokens else "")


def trained_text(row: Mapping[str, Any]) -> str:
    """`83 tokens, 21 trained (25 %)`."""
    tokens = tokens_of(row)
    trained = sum(bool(token["trained"]) for token in tokens)
    share = f" ({percent(trained / len(tokens))})" if tokens else ""
    return f"{length_text(row)}, {count(trained)} trained{share}"


def of_prompts(draft: Draft) -> bool:
    """The rows are prompts: nothing in them is trained."""
    return draft.config.method.rows == "prompts"


def head_text(draft: Draft, answer: Mapping[str, Any], row: Mapping[str, Any] | None, at: int) -> list[str]:
    """What stands above row `at` of an answer `answer`: its place, the method, its tokens, the cut, the template."""
    total = answer.get("total")
    kind = "Pack" if row and row.get("documents") else "Row"
    parts = [f"{kind} {count(at)}" + (f" of {count(total)}" if total else ""), draft.config.method.kind.upper()]
    if row:
        prompt = f"{count(len(tokens_of(row)))} tokens of prompt, the model answers itself"
        parts.append(prompt if of_prompts(draft) else trained_text(row))
        if row.get("truncated"):
            parts.append(f"cut at {count(draft.config.data.max_length)}")
        if template := row.get("template") or answer.get("template"):
            parts.append("its own template" if "tokenizer" in template else f"template {template}")
    return parts


def image_text(image: Mapping[str, Any]) -> str:
    """`cat.png: 640 x 480 pixels, seen as 616 x 476, 374 tokens from token 5 on`."""
    size = f"{count(image['width'])} x {count(image['height'])} pixels"
    if seen := image.get("resized"):
        tiles = image.get("tiles", 1)
        size += f", seen as {f'{count(tiles)} tiles of ' if tiles > 1 else ''}{count(seen[0])} x {count(seen[1])}"
    return f"{image['name']}: {size}, {count(image['tokens'])} tokens from token {count(image['start'])} on"


def reward_text(row: Mapping[str, Any]) -> list[str]:
    """`answer: 4`, a line for each column that rewards are given beside an answer to a prompt."""
    return [f"{name}: {value}" for name, value in (row.get("rewards") or {}).items()]


def pack_text(row: Mapping[str, Any]) -> str:
    """`a pack of 3 rows, kept apart`; nothing for a row alone."""
    if not row.get("documents"):
        return ""
    return f"a pack of {len(row['documents'])} rows, {'kept apart' if row.get('separate') else 'one stream'}"


def documents_of(row: Mapping[str, Any]) -> dict[int, str]:
    """The rows of a pack in words, each by the place of its first token."""
    documents, at = {}, 0
    rows, positions = row.get("source_rows") or [], row.get("positions") or []
    for number, length in enumerate(row.get("documents") or []):
        words = f"row {rows[number]:,}" if number < len(rows) else f"document {number + 1}"
        where = f", position ids from {positions[at]:,}" if at < len(positions) else ""
        documents[at] = f"{words}: {length:,} tokens at {at:,}{where}"
        at += length
    return documents


def why_none(wanted: Mapping[str, Any]) -> str:
    """Why no row is shown, though there may be rows."""
    if wanted["kind"] == "search":
        return (
            f"No further row holds {wanted['text'][:80]!r}."
            if wanted.get("start")
            else f"No row holds {wanted['text'][:80]!r}."
        )
    lacking = {"masked": "Every row has something to learn.", "truncated": "No row is cut."}
    return lacking.get(wanted.get("by", ""), "There is no such row.")
