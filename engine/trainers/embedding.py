"""An embedding model: cosine similarities of pooled outputs that rank as the rows say.

Rows without scores: each anchor must find its own positive among all positives and negatives of the batch (multiple
negatives ranking, arXiv:1705.00652). Rows with scores: of two pairs the one with the higher score must be more alike
(CoSENT, doi:10.1109/TASLP.2024.3402087). Recall or rank correlation is measured over all held-out rows together, since a
batch is too easy a search.

transformers' Trainer with the losses of sentence-transformers, whose own trainer wants the model inside a module of its own,
where the features that act on decoder layers would not find them. What is saved is a folder of sentence-transformers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine.config import embedding
from engine.config.kinds import MethodSection
from engine.errors import DataError
from engine.trainers import plain
from engine.trainers.job import Job
from engine.trainers.plain import Plain, arguments

__all__ = ["Embedding", "arguments", "build", "cosent", "pooled", "recall", "spearman"]

DEPTHS = (1, 5, 10)
"""How deep in the found texts recall is measured."""


class Embedding(Plain):
    """The trainer of vectors."""

    method: embedding.Embedding
    max_length: int

    def start(self, method: MethodSection) -> None:
        super().start(method)
        self._held_out: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._judged: list[tuple[torch.Tensor, torch.Tensor]] = []

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        own = inputs["own_text"]
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        vectors = F.normalize(pooled(outputs.last_hidden_state, inputs["attention_mask"], self.method.pooling), dim=-1)
        anchors, texts = vectors[: len(own)], vectors[len(own) :]
        if "score" in inputs:
            return self._ranked(model, (anchors * texts).sum(1), inputs["score"])
        similarity = anchors @ texts.T
        self._note(model, similarity.detach(), own)
        if not model.training:
            self._keep(self._held_out, anchors.detach().float(), texts[: len(own)].detach().float())
        return F.cross_entropy(self.method.scale * similarity, own)

    def _ranked(self, model: torch.nn.Module, similarity_B: torch.Tensor, score_B: torch.Tensor) -> torch.Tensor:
        if not model.training:
            self._keep(self._judged, similarity_B.detach().float(), score_B)
        return cosent(self.method.scale * similarity_B, score_B)

    def _keep(self, parts: list[tuple[torch.Tensor, torch.Tensor]], *found: torch.Tensor) -> None:
        """Notes what was found for the held-out rows of a batch; nothing of one that only fills in."""
        first, second = found if not self.batch_part.fills_in else (each[:0] for each in found)
        parts.append((first, second))

    @torch.no_grad()
    def _note(self, model: torch.nn.Module, similarity: torch.Tensor, own: torch.Tensor) -> None:
        """The share of anchors that find their own text first in the batch, and by how much it is nearer; of one text alone
        there is neither."""
        mine = similarity.gather(1, own[:, None])[:, 0]
        others = similarity.scatter(1, own[:, None], -2.0).amax(1)
        curves = {"accuracy": (mine > others).float().mean(), "margin": (mine - others).mean()}
        if similarity.shape[1] == 1:  # another rank's batch may hold more: all of them ask together
            curves = {name: torch.full_like(value, math.nan) for name, value in curves.items()}
        self.note(model, curves)

    def at_evaluation(self) -> dict[str, float]:
        """Recall or rank correlation over all held-out rows."""
        if self._judged:
            return {"spearman_cosine": spearman(*self._gathered(self._judged))}
        if self._held_out:
            found = recall(*self._gathered(self._held_out))
            return {f"recall@{depth}": share for depth, share in found.items()}
        return {}

    def _gathered(self, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        joined = [self._of_all(torch.cat(each)) for each in zip(*parts, strict=True)]
        parts.clear()
        return joined

    def _of_all(self, own: torch.Tensor) -> torch.Tensor:
        """Those of all ranks, which may have more or fewer."""
        counts = self.accelerator.gather(torch.tensor([len(own)], device=own.device)).tolist()
        padded = own.new_zeros(max(counts), *own.shape[1:])
        padded[: len(own)] = own
        parts = self.accelerator.gather(padded).split(max(counts))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def receipt_note(self) -> str:
        """What the receipt tells of the loss."""
        how = (
            "pairs must rank by their scores"
            if _scored(self.train_dataset)
            else "each anchor must find its own text in the batch"
        )
        return f"{how}; no vocabulary head, so no logits of words"

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Beside the weights what `SentenceTransformer(folder)` reads, so that it gives the vectors that were trained."""
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or str(self.args.output_dir))
        embeddings: Any = self.model.get_input_embeddings()
        width = embeddings.weight.shape[1]
        for name, content in layout(width, self.method.pooling, self.max_length).items():
            file = folder / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(content, indent=2), "utf-8")


def pooled(hidden_BLH: torch.Tensor, mask_BL: torch.Tensor, how: str) -> torch.Tensor:
    """One vector a text, [B, H], of outputs that are padded on the right.

    In float32 at least: rounded to bfloat16, similarities near 1 are steps of 0.004 apart, and hard negatives are equal.
    """
    wide = torch.promote_types(hidden_BLH.dtype, torch.float32)
    if how == "first":
        return hidden_BLH[:, 0].to(wide)
    if how == "last":
        last_B = mask_BL.sum(1) - 1
        return hidden_BLH[torch.arange(len(last_B), device=last_B.device), last_B].to(wide)
    weight = mask_BL[..., None].to(hidden_BLH.dtype)
    return (hidden_BLH * weight).sum(1, dtype=wide) / weight.sum(1, dtype=wide)


def recall(anchors_NH: torch.Tensor, texts_NH: torch.Tensor) -> dict[int, float]:
    """The share of anchors whose own text is among the nearest so many of all N, by depth; only depths below N.

    Equal texts are told apart by their rank alone, so a text that stands in the set twice counts as missed half the time.
    """
    ranks = []
    for part in torch.arange(len(anchors_NH), device=anchors_NH.device).split(1024):
        similarity = anchors_NH[part] @ texts_NH.T
        own = similarity.gather(1, part[:, None])
        ranks.append((similarity > own).sum(1))
    rank_N = torch.cat(ranks)
    return {depth: (rank_N < depth).float().mean().item() for depth in DEPTHS if depth < len(rank_N)}


def _scored(rows: Any) -> bool:
    """Whether prepared rows have scores; all of a split have one or none has."""
    return not math.isnan(rows[0]["score"])


def cosent(similarity_B: torch.Tensor, score_B: torch.Tensor) -> torch.Tensor:
    """`log(1 + sum exp(s_j - s_i))` over all pairs i, j of the batch where i has the higher score; zero where none has."""
    higher_BB = score_B[:, None] > score_B[None, :]
    similarity_B = similarity_B.to(torch.promote_types(similarity_B.dtype, torch.float32))
    wrong_BB = (similarity_B[None, :] - similarity_B[:, None])[higher_BB]
    return torch.cat([wrong_BB.new_zeros(1), wrong_BB]).logsumexp(0)


def spearman(first_N: torch.Tensor, second_N: torch.Tensor) -> float:
    """The rank correlation of two lists of numbers, equal numbers sharing the mean of their ranks; NaN where one is flat."""
    ranks = torch.stack([_ranks(first_N), _ranks(second_N)])
    return torch.corrcoef(ranks)[0, 1].item()


def _ranks(values_N: torch.Tensor) -> torch.Tensor:
    _, place_N, counts = values_N.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    return (last.double() - (counts.double() - 1) / 2)[place_N]


def layout(width: int, pooling: str, max_length: int) -> dict[str, dict[str, Any] | list[dict[str, Any]]]:
    """The files, by name, that make a folder of weights one of sentence-transformers."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modes = {"mean": "mean_tokens", "last": "lasttoken", "first": "cls_token"}
    pooled_by = {f"pooling_mode_{name}": how == pooling for how, name in modes.items()}
    return {
        "modules.json": [
            {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for place, (path, kind) in enumerate(kinds.items())
        ],
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        "config_sentence_transformers.json": {"similarity_fn_name": "cosine", "prompts": {}},
        "1_Pooling/config.json": {"word_embedding_dimension": width, **pooled_by},
        "2_Normalize/config.json": {},
    }


def build(job: Job) -> Embedding:
    """The trainer of this job. Raises DataError for held-out rows that would be measured in another way."""
    if job.eval is not None and _scored(job.eval) != _scored(job.train):
        having, lacking = ("data.train", "data.eval") if _scored(job.train) else ("data.eval", "data.train")
        message = (
            f"data.eval: the rows of {having} have a score and those of {lacking} have none, so losses do not compare"
        )
        raise DataError(message, "Hold out rows of the same sort.", path="")
    trainer = plain.build(Embedding, job)
    trainer.max_length = job.config.data.max_length
    return trainer
