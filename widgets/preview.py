"""`Preview(draft)`: the batch as training will see it, asked of the inspector; raw rows stand there until it answers.

A question is a ticket; the view asks for news. A newer question cancels the older one, so a slow search never blocks
the next row.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from engine.config.files import place_of
from engine.config.kinds import BUILTIN_ROWS
from engine.config.tree import fields
from engine.data.gather_facts import outcome
from engine.errors import WorkbenchError, visible
from engine.session.draft import Draft
from engine.session.rows import RowQuestion, documents_of, image_text, pack_text, reward_text, trained_text, why_none
from widgets.asking import Asker
from widgets.columns import ColumnsPart
from widgets.protocol import NotebookWidget, Part, bundle, shown, style, verb
from widgets.template import TemplatePart

MOST_TOKENS = 1500
"""Tokens of one part that travel; the rest is told as a number."""

Asked = Literal["index", "random", "worst", "search"]


class PreviewPart(Part):
    """Answers what a preview asks of one draft."""

    def __init__(self, draft: Draft, asker: Asker) -> None:
        self.draft = draft
        self._question = RowQuestion(draft, asker.ask)
        self._number = 0
        self._raw: Future[list[dict[str, Any]]] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._answer: dict[str, Any] | WorkbenchError | None = None

    @verb
    def rows_ready(self) -> dict[str, Any]:
        return {}

    @verb
    def rows(
        self,
        *,
        kind: Asked,
        row: Annotated[int, Field(ge=0)] = 0,
        text: Annotated[str, Field(max_length=500)] = "",
        by: Literal["longest", "masked", "truncated"] = "longest",
        split: Literal["train", "eval"] = "train",
        count: Annotated[int, Field(ge=1, le=20)] = 3,
    ) -> dict[str, Any]:
        """Ask for rows; the answer of this verb already tells how far it is."""
        self._give_up()
        config = self.draft.config
        own = split == "train" or config.data.val_set_size > 0
        sources = config.data.train if own else config.data.eval
        if not sources or not sources[0].path:
            spec = fields.data.train if split == "train" else fields.data.eval
            raise WorkbenchError(f"{spec.title}: there is none yet.", "Name a source in the step Data.")
        base = self.draft.base
        more: dict[str, dict[str, Any]] = {
            "index": {"index": row},
            "random": {"seed": random.randrange(1 << 30)},
            "worst": {"by": by},
            "search": {"text": text, "start": row},
        }
        self._number += 1
        if kind == "index":
            self._read_raw(sources[0], split, base, row, count)
        self._question.put({"kind": kind, **more[kind]}, "tokenizing")
        self._question.send(count=count, split=split)
        return self._news()

    @verb
    def rows_news(self, *, ticket: int) -> dict[str, Any]:
        if ticket != self._number or (self._answer is None and not self._question.put_forward):
            return {"ticket": ticket, "done": True, "words": "", "rows": []}
        return self._news()

    @verb
    def rows_cancel(self) -> dict[str, Any]:
        self._give_up()
        return {}

    def _read_raw(self, source: Any, split: str, base: Path, row: int, count: int) -> None:
        """Begin to read rows as they stand in the first source, without waiting for torch."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="workbench-rows")
        seed = self.draft.config.run.seed
        entry = source.model_dump() | {"path": place_of(source.path, base), "split": source.split or split}
        self._raw = self._pool.submit(raw_rows, entry, seed, row, count)

    def _give_up(self) -> None:
        self._question.cancel()
        if self._raw is not None:
            self._raw.cancel()
        self._answer = self._raw = None

    def _news(self) -> dict[str, Any]:
        self._answer = answer = self._answer or self._question.take()
        news: dict[str, Any] = {"ticket": self._number, "done": answer is not None, "words": self._question.progress}
        if self._raw is not None and self._raw.done() and answer is None:
            news["raw"] = [] if self._raw.exception() is not None else self._raw.result()
            self._raw = None
        if answer is None:
            return news
        if isinstance(answer, WorkbenchError):
            return {**news, "words": "", "rows": [], "error": shown(answer.full_message)}
        if not answer["rows"]:
            return {**news, "words": "", "rows": [], "error": why_none(self._question.wanted)}
        return {
            **news,
            "words": _about(answer),
            "rows": [_row(row, answer.get("total")) for row in answer["rows"]],
            "facts": self._facts(),
        }

    def _facts(self) -> dict[str, Any]:
        data = self.draft.facts.data
        if data is None:
            return {}
        facts = {
            "lengths": _bars(data.lengths or ()),
            "longest": data.longest,
            "truncated": data.truncated,
            "masked": data.masked,
            "cut": _cut(data.lengths or (), self.draft.config.data.max_length),
        }
        return {name: value for name, value in facts.items() if value is not None}

    def close(self) -> None:
        self._give_up()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def _bars(quantiles: Sequence[int]) -> list[int]:
    """How many quantiles of the lengths fall into each of up to 24 equal spans, from the shortest row to the longest."""
    if not quantiles:
        return []
    low, high = min(quantiles), max(quantiles)
    count = min(24, high - low + 1)
    bars = [0] * count
    for length in quantiles:
        bars[min(count - 1, (length - low) * count // (high - low + 1))] += 1
    return bars


def _cut(quantiles: Sequence[int], limit: int) -> int | None:
    """Before which of the bars rows are cut; None where none is so long."""
    if not quantiles or limit >= max(quantiles):
        return None
    low, high = min(quantiles), max(quantiles)
    return max(0, (limit - low) * len(_bars(quantiles)) // (high - low + 1))


def _about(answer: dict[str, Any]) -> str:
    total = f"{answer['total']:,} rows" if answer.get("total") is not None else "rows still being counted"
    template = f"template: {answer['template']}" if answer.get("template") else "no chat template"
    return visible(f"{total}, {answer['method']}, {template}")


def raw_rows(source: Mapping[str, Any], seed: int, start: int, count: int) -> list[dict[str, Any]]:
    """Rows as they stand in a text file or the built-in data; nothing for what only the inspector can read."""
    path, split = source["path"], source["split"]
    if path in BUILTIN_ROWS:
        from engine.builtin import GENERATED

        generated = GENERATED[path].of(source, "train" if split == "train" else "eval", seed, start + count)[start:]
        return [_raw(start + at, json.dumps(row, ensure_ascii=False)) for at, row in enumerate(generated)]
    place = Path(path)
    if not place.is_file() or {".parquet", ".arrow"} & set(place.suffixes):
        return []
    from engine.data.rows import open_rows

    rows = open_rows(place)
    sources = []
    try:
        for index in range(start, start + count):
            sources.append(_raw(index, rows.text(index, 4096)))
    except IndexError:
        pass  # the file ends here
    finally:
        rows.close()
    return sources


def _raw(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": shown(text, 1500)}


def _row(row: dict[str, Any], total: int | None) -> dict[str, Any]:
    parts = [_part(name, tokens) for name, tokens in row["parts"].items()]
    words = ", ".join(filter(None, (trained_text(row), pack_text(row))))
    trouble = row.get("error") or outcome(row)
    return {
        "index": row["index"],
        "words": words if row["parts"] else "",
        "truncated": bool(row.get("truncated")),
        "trouble": shown(trouble),
        "clipped": shown(row.get("clipped") or "", 2000),
        "parts": parts,
        "marks": _marks(row),
        "rewards": [shown(words, 300) for words in reward_text(row)],
        "images": [
            {"words": shown(image_text(image), 300), "src": image["thumbnail"]} for image in row.get("images") or []
        ],
        "of": total,
    }


def _part(name: str, tokens: list[dict[str, Any]]) -> dict[str, Any]:
    sent = [[token["id"], visible(token["text"], lines=True), bool(token["trained"])] for token in tokens[:MOST_TOKENS]]
    return {"name": visible(name), "tokens": sent, "left": max(0, len(tokens) - MOST_TOKENS)}


def _marks(row: dict[str, Any]) -> list[list[Any]]:
    """`[place, words, band]` where a turn or a packed document begins, a document with a band."""
    turns = [[turn["start"], visible(str(turn["role"])), False] for turn in row.get("turns") or []]
    return turns + [[place, words, True] for place, words in documents_of(row).items()]


class Preview(NotebookWidget):
    """The token preview alone, of a draft or a config file."""

    _esm = bundle("tokens", entry="previewFace")
    _css = style()

    def __init__(self, draft: Draft | str | Path, *, height: int = 480) -> None:
        self.draft = draft if isinstance(draft, Draft) else Draft.open(draft)
        asker = Asker()
        parts = PreviewPart(self.draft, asker), ColumnsPart(self.draft, asker), TemplatePart(self.draft, asker)
        super().__init__(*parts, height=height, ends=(asker.close,))

    def __repr__(self) -> str:
        return f"Preview of {self.draft.path or self.draft.recipe or 'a new config'}; `workbench preview FILE` shows it in a terminal."
