"""The scores of a trained head, slice by slice of the vocabulary, and which slices' logits wait for the gradient.

The scores need the logits of all words before the first gradient can be formed. Logits are kept from one to the other
where memory is free in between: inside the weight gradient that will be there in the end anyway, and in the workspace.
What does not fit is computed again. Names: N rows, H hidden, V vocabulary, S words of a slice.
"""

from __future__ import annotations

import torch

from engine.kernels.device import kernel_serves
from engine.kernels.linear_logp.tiles import CROWDED_ROW_TILES, CROWDING, ROW_TILES, Scaling, Scores, block, on_scratch
from engine.kernels.requirements import Layout
from engine.kernels.tuner import TUNER, Key, Tile, bucket


class Slices:
    """The logits of one pass, N rows of a vocabulary, and the memory that they are formed and wait in."""

    def __init__(self, rows_NH: torch.Tensor, vocabulary: int, d_weight: torch.Tensor | None, chosen: Layout) -> None:
        count, words = rows_NH.shape[0], chosen.words
        self.d_weight = d_weight
        self.parts = chosen.parts(vocabulary)
        self.waiting = chosen.waiting
        self.first_kept = len(self.parts) - chosen.kept
        self._shelf = rows_NH.new_empty(0)
        if d_weight is not None and chosen.waiting:
            size = chosen.waiting * count * words * rows_NH.element_size()
            flat = d_weight.view(-1).view(torch.uint8)[:size]
            self._shelf = flat.view(rows_NH.dtype).view(chosen.waiting, count, words)
        self._kept = [rows_NH.new_empty(count, part.stop - part.start) for part in self.parts[self.first_kept :]]
        self._work = rows_NH.new_empty(count, words if chosen.kept < len(self.parts) else 0)

    def fresh(self, number: int) -> torch.Tensor:
        """Where the logits of this slice are first formed."""
        if number < self.waiting:
            return self._shelf[number]
        return self._kept[number - self.first_kept] if number >= self.first_kept else self._spare(number)

    def held(self, number: int) -> torch.Tensor | None:
        """The logits that have waited, or None where they must be formed again."""
        return self.fresh(number) if number < self.waiting or number >= self.first_kept else None

    def turned(self, number: int) -> torch.Tensor:
        """Where the gradient by this slice of logits is formed: never on the shelf, which its weight gradient overwrites."""
        return self._kept[number - self.first_kept] if number >= self.first_kept else self._spare(number)

    def _spare(self, number: int) -> torch.Tensor:
        part = self.parts[number]
        return self._work[:, : part.stop - part.start]


class RunningScores:
    """What the slices so far say about each row: [7, N], as `slice_scores_kernel` has it."""

    def __init__(self, scores: Scores, targets_N: torch.Tensor, scaling: Scaling) -> None:
        self.scores, self.targets, self.scaling = scores, targets_N, scaling
        self.state = torch.zeros(7, targets_N.shape[0], dtype=scores.lse.dtype, device=targets_N.device)
        self.state[0::6] = float("-inf")

    def fold(self, logits_NS: torch.Tensor, first: int, bias_S: torch.Tensor | None) -> None:
        """Adds the slice that begins at word `first`."""
        run = self._triton if kernel_serves(logits_NS) and logits_NS.dtype != torch.float64 else self._torch
        run(logits_NS, first, bias_S)

    def _triton(self, logits_NS: torch.Tensor, first: int, bias_S: torch.Tensor | None) -> None:
        from engine.kernels.linear_logp.kernels import slice_scores_kernel

        rows, words = logits_NS.shape
        scores, scaling = self.scores, self.scaling
        flags: dict[str, bool] = {
            "HAS_BIAS": bias_S is not None, "HAS_CAP": scaling.soft_cap is not None,
            "WITH_ENTROPY": scores.entropy is not None, "WITH_SQUARE": scores.square is not None,
            "WITH_SUM": scores.sums(scaling), "WITH_TOP": scores.top is not None,
        }  # fmt: skip

        def launch(tile: Tile, state: torch.Tensor) -> None:
            lanes, run, warps = tile
            slice_scores_kernel[(rows,)](
                logits_NS, self.targets, logits_NS if bias_S is None else bias_S, state,
                logits_NS.stride(0), first, words, rows, *scaling.numbers[:3],
                **flags, LANES=block(-(-words // run), lanes), RUN=run, num_warps=warps,
            )  # fmt: skip

        key: Key = (bucket(rows), bucket(words), str(logits_NS.dtype), *(int(flag) for flag in flags.values()))
        crowded = any(flags[name] for name in CROWDING)
        tiles = CROWDED_ROW_TILES if crowded else ROW_TILES
        launch(TUNER.pick(tiles, key, logits_NS.device, on_scratch(launch, self.state)), self.state)

    def _torch(self, logits_NS: torch.Tensor, first: int, bias_S: torch.Tensor | None) -> None:
        x = logits_NS.to(self.state.dtype)
        z, _ = self.scaling.apply(x if bias_S is None else x + bias_S)
        high, total, weighted, squared, summed, hit, before = self.state
        newer = torch.maximum(high, z.amax(-1))
        shift = newer.masked_fill(newer.isneginf(), 0.0)
        old = (high - shift).exp()
        e = (z - shift.unsqueeze(-1)).exp_()
        local = self.targets - first
        here = (local >= 0) & (local < z.shape[1])
        found = z.gather(-1, local.masked_fill(~here, 0).unsqueeze(-1)).squeeze(-1)
        hit.add_(found.masked_fill(~here, 0.0))
        total.mul_(old).add_(e.sum(-1))
        scores = self.scores
        if scores.sums(self.scaling):
            summed.add_(z.sum(-1))
        if scores.entropy is not None:
            weighted.mul_(old).add_(torch.linalg.vecdot(e, z.masked_fill(z.isneginf(), 0.0)))
        if scores.square is not None:
            squared.mul_(old * old).add_(e.square().sum(-1))
        if scores.top is not None:
            words = torch.arange(z.shape[1], device=z.device)
            earlier = z.masked_fill(words >= local.unsqueeze(-1), float("-inf")).amax(-1)
            torch.maximum(before, earlier, out=before)
        high.copy_(newer)

    def finish(self, vocabulary: int) -> None:
        """Writes the scores of all rows, once every slice has been added.

        A target outside the vocabulary raises IndexError on a CPU; on a card, which is not waited for, its row becomes NaN.
        """
        scores = self.scores
        high, total, weighted, squared, summed, hit, before = self.state
        inside = (self.targets >= 0) & (self.targets < vocabulary)
        if not kernel_serves(self.state) and not inside.all():
            raise IndexError(f"a target lies outside of the vocabulary of {vocabulary} words")
        torch.add(high, total.log(), out=scores.lse).masked_fill_(~inside, float("nan"))
        torch.sub(hit, scores.lse, out=scores.logp)
        mean = summed / vocabulary
        if scores.entropy is not None:
            torch.sub(scores.lse, weighted / total, out=scores.entropy)
        if scores.square is not None:
            torch.sub(squared.log(), 2 * total.log(), out=scores.square)
        if scores.mean is not None:
            scores.mean.copy_(mean)
        if scores.top is not None:
            # A tie goes to the first word, as argmax has it.
            torch.logical_and(hit >= high, hit > before, out=scores.top)
        if scores.loss is not None:
            scores.loss.copy_(self.scaling.cross_entropy(scores.lse, hit, mean))
