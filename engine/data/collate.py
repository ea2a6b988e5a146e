"""Rows to the batch that the model sees: the one object that both the trainers and the preview call.

Padding is on the right and never trained. A packed row that keeps its documents apart carries `seq_lengths`: its
positions restart at each document and there is no attention mask, which is how transformers' attention (eager, SDPA,
FlashAttention) tells documents apart; the first token of a document is not predicted from the one before. The keys of
a preference batch are those TRL's DPO reads. Torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.config.method import learns_from_images
from engine.config.tree import RunConfig, fields
from engine.data.pretokenized import IGNORED
from engine.data.teacher_logprobs import NOTHING

if TYPE_CHECKING:
    from engine.data.vision import ImageBatch

Rows = Sequence[dict[str, Any]]


@dataclass
class LanguageCollator:
    """`input_ids`, `labels` and `attention_mask`, or `position_ids` in its place for packs of separate documents."""

    pad_token_id: int
    images: ImageBatch | None = None

    def __call__(self, rows: Rows) -> dict[str, torch.Tensor]:
        ids = [list(row["input_ids"]) for row in rows]
        labels = [list(row["labels"]) for row in rows]
        width = max(map(len, ids))
        batch: dict[str, Any] = {"input_ids": _padded(ids, self.pad_token_id, width)}
        if any(row.get("seq_lengths") for row in rows):
            lengths = [_documents(row, width) for row in rows]
            batch["labels"] = _padded(
                [_without_starts(*each) for each in zip(labels, lengths, strict=True)], IGNORED, width
            )
            batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in lengths])
        else:
            batch["labels"] = _padded(labels, IGNORED, width)
            batch["attention_mask"] = _padded([[1] * len(row) for row in ids], 0, width)
        if self.images is not None:
            batch |= self.images([row.get("images") or [] for row in rows], batch["input_ids"])
        return batch


@dataclass
class PreferenceCollator:
    """Chosen rows above, rejected rows below, each with its prompt; `completion_mask` is 1 on the answers."""

    pad_token_id: int
    images: ImageBatch | None = None

    def __call__(self, rows: Rows) -> dict[str, torch.Tensor]:
        answers = [row[part] for part in ("chosen_ids", "rejected_ids") for row in rows]
        batch = answered([row["prompt_ids"] for row in rows] * 2, answers, self.pad_token_id)
        if self.images is not None:
            batch |= self.images([row.get("images") or [] for row in rows] * 2, batch["input_ids"])
        for name in ("ref_chosen_logps", "ref_rejected_logps"):
            if name in rows[0]:
                batch[name] = torch.tensor([row[name] for row in rows])
        return batch


@dataclass
class RatedCollator:
    """Each prompt with its answer, and its verdict in `label`; with `mismatched` also each prompt with the answer of the
    row before it in the batch, under `KL_...`, from which KTO estimates how far the model has moved. The pairing is made
    here, of the batch as it is, so any order of rows serves."""

    pad_token_id: int
    mismatched: bool = True
    images: ImageBatch | None = None

    def __call__(self, rows: Rows) -> dict[str, torch.Tensor]:
        prompts, answers = [row["prompt_ids"] for row in rows], [row["completion_ids"] for row in rows]
        batch = answered(prompts, answers, self.pad_token_id)
        if self.images is not None:
            batch |= self.images([row.get("images") or [] for row in rows], batch["input_ids"])
        if self.mismatched:
            others = answered(prompts, [answers[-1], *answers[:-1]], self.pad_token_id)
            if self.images is not None:
                others |= self.images.kinds(others["input_ids"])
            batch |= {f"KL_{name}": values for name, values in others.items()}
        return batch | {"label": torch.tensor([bool(row["label"]) for row in rows])}


def answered(prompts: list[list[int]], answers: list[list[int]], pad: int) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask` and `completion_mask` of prompts with answers, padded on the right."""
    ids = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    masks = [[0] * len(prompt) + [1] * len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    width = max(map(len, ids))
    return {
        "input_ids": _padded(ids, pad, width),
        "attention_mask": _padded([[1] * len(row) for row in ids], 0, width),
        "completion_mask": _padded(masks, 0, width),
    }


@dataclass
class TeacherCollator(LanguageCollator):
    """A language batch with `teacher_tokens` and `teacher_logps`, [rows, width, k]; places without a teacher hold nothing."""

    def __call__(self, rows: Rows) -> dict[str, torch.Tensor]:
        batch = super().__call__(rows)
        shape = (*batch["input_ids"].shape, max(row["top_k"] for row in rows))
        tokens, logps = torch.zeros(shape, dtype=torch.long), torch.full(shape, NOTHING)
        for place, row in enumerate(rows):
            length, top_k = len(row["input_ids"]), row["top_k"]
            tokens[place, :length, :top_k] = torch.tensor(row["teacher_tokens"]).view(length, top_k)
            logps[place, :length, :top_k] = torch.tensor(row["teacher_logps"]).view(length, top_k)
        return batch | {"teacher_tokens": tokens, "teacher_logps": logps}


@dataclass
class StepsCollator(LanguageCollator):
    """A language batch whose labels are verdicts; with `last_only` that of the last step alone."""

    last_only: bool = False

    def __call__(self, rows: Rows) -> dict[str, torch.Tensor]:
        if self.last_only:
            rows = [{**row, "labels": _last_label(row["labels"])} for row in rows]
        return super().__call__(rows)


@dataclass
class TextsCollator:
    """Anchors above, then positives, then the negatives of the rows that have one. `own_text` is where each anchor's own
    text stands among the texts below the anchors; every token is learned from. `score` is there where rows have one."""

    pad_token_id: int

    def __call__(self, rows: Rows) -> dict[str, torch.Tensor]:
        ids = [list(row[part]) for part in ("anchor_ids", "positive_ids", "negative_ids") for row in rows if row[part]]
        width = max(map(len, ids))
        mask = _padded([[1] * len(each) for each in ids], 0, width)
        batch = {
            "input_ids": _padded(ids, self.pad_token_id, width),
            "attention_mask": mask,
            "completion_mask": mask,
            "own_text": torch.arange(len(rows)),
        }
        scores = torch.tensor([row["score"] for row in rows])
        return batch if scores.isnan().any() else {**batch, "score": scores}


class PromptCollator:
    """The rows as they are: answers are sampled first, and the trainer pads them with their prompts."""

    def __call__(self, rows: Rows) -> Rows:
        return list(rows)


def collator_for(config: RunConfig, processing_class: Any) -> Callable[[Rows], Any]:
    """The collator of this config's method; hand it to the trainer as `data_collator`."""
    from engine.data.vision import ImageBatch, images_of

    rows = config.method.rows
    if rows == "prompts":
        return PromptCollator()
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    pad = tokenizer.pad_token_id
    if pad is None:
        # Padding is masked everywhere, so any id serves.
        pad = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0
    processor = images_of(processing_class) if learns_from_images(config.method.kind) else None
    images = ImageBatch(processor, config.data.image_cache_size << 20) if processor is not None else None
    if rows == "pairs":
        return PreferenceCollator(pad, images=images)
    if rows == "steps":
        return StepsCollator(pad, last_only=fields.method.train_on_last_step_only.value(config))
    if rows == "texts":
        return TextsCollator(pad)
    if rows == "distill":
        return TeacherCollator(pad)
    if rows == "rated":
        return RatedCollator(pad, mismatched=fields.method.loss_type.value(config) == "kto", images=images)
    return LanguageCollator(pad, images=images)


def _last_label(labels: list[int]) -> list[int]:
    last = max(place for place, label in enumerate(labels) if label != IGNORED)
    return [label if place == last else IGNORED for place, label in enumerate(labels)]


def _padded(rows: list[list[int]], value: int, width: int) -> torch.Tensor:
    return torch.tensor([row + [value] * (width - len(row)) for row in rows], dtype=torch.long)


def _documents(row: dict[str, Any], width: int) -> list[int]:
    """Document lengths of a row; the padding is a document of its own that nothing looks at."""
    lengths = list(row.get("seq_lengths") or [len(row["input_ids"])])
    rest = width - sum(lengths)
    return lengths + [rest] * (rest > 0)


def _without_starts(labels: list[int], lengths: list[int]) -> list[int]:
    start = 0
    for length in lengths:
        if start < len(labels):
            labels[start] = IGNORED
        start += length
    return labels
