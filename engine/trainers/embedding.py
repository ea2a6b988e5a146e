"""An embedding model: multiple negatives ranking (arXiv:1705.00652) on cosine similarities of pooled outputs.

Each anchor must find its own positive among all positives and negatives of the batch. transformers' Trainer with our loss;
recall is measured over all held-out rows together, since a batch is too easy a search.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from engine.trainers import plain
from engine.trainers.plain import Plain, arguments

__all__ = ["Embedding", "arguments", "build", "pooled", "recall"]

DEPTHS = (1, 5, 10)
"""How deep in the found texts recall is measured."""


class Embedding(Plain):
    """The trainer of vectors."""

    def start(self, method: Any) -> None:
        super().start(method)
        self._held_out: list[tuple[torch.Tensor, torch.Tensor]] = []

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        own = inputs["own_text"]
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        vectors = F.normalize(pooled(outputs.last_hidden_state, inputs["attention_mask"], self.method.pooling), dim=-1)
        anchors, texts = vectors[: len(own)], vectors[len(own) :]
        similarity = anchors @ texts.T
        self._note(model, similarity.detach(), own)
        if not model.training:
            self._held_out.append((anchors.detach().float(), texts[: len(own)].detach().float()))
        return F.cross_entropy(self.method.scale * similarity, own)

    @torch.no_grad()
    def _note(self, model: Any, similarity: torch.Tensor, own: torch.Tensor) -> None:
        """The share of anchors that find their own text first in the batch, and by how much it is nearer."""
        if similarity.shape[1] > 1:
            mine = similarity.gather(1, own[:, None])[:, 0]
            others = similarity.scatter(1, own[:, None], -2.0).amax(1)
            self.note(model, {"accuracy": (mine > others).float().mean(), "margin": (mine - others).mean()})

    def at_evaluation(self) -> dict[str, float]:
        """Recall over all held-out rows."""
        if not self._held_out:
            return {}
        anchors, texts = (torch.cat(each) for each in zip(*self._held_out, strict=True))
        self._held_out.clear()
        found = recall(self.accelerator.gather(anchors), self.accelerator.gather(texts))
        return {f"recall@{depth}": share for depth, share in found.items()}

    def told(self) -> str:
        """What the receipt tells of the loss."""
        return "each anchor must find its own text in the batch; no vocabulary head, so no logits of words"


def pooled(hidden_BLH: torch.Tensor, mask_BL: torch.Tensor, how: str) -> torch.Tensor:
    """One vector a text, [B, H], of outputs that are padded on the right."""
    if how == "first":
        return hidden_BLH[:, 0]
    if how == "last":
        last_B = mask_BL.sum(1) - 1
        return hidden_BLH[torch.arange(len(last_B), device=last_B.device), last_B]
    weight = mask_BL[..., None].to(hidden_BLH.dtype)
    return (hidden_BLH * weight).sum(1) / weight.sum(1)


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


build = partial(plain.build, Embedding)
