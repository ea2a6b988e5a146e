"""Simple preference optimization (arXiv:2405.14734): mean log-probabilities compared, a margin, no reference."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F

from engine.config import preference
from engine.trainers import pairs
from engine.trainers.pairs import Judged, Pair, ReferenceFree
from engine.trainers.sft import arguments

__all__ = ["Simpo", "arguments", "build"]


class Simpo(ReferenceFree):
    """Equation 6 of the paper; with `cpo_alpha` the mean negative log-probability of the chosen answer on top."""

    method: preference.Simpo

    def judge(self, pair: Pair) -> Judged:
        beta, gamma, alpha = self.method.beta, self.method.simpo_gamma, self.method.cpo_alpha
        loss = -F.logsigmoid(beta * (pair.chosen_mean - pair.rejected_mean) - gamma).mean()
        nll = -pair.chosen_mean.mean()
        if alpha:
            loss = loss + alpha * nll
        return Judged(
            loss, beta * pair.chosen_mean.detach(), beta * pair.rejected_mean.detach(), {"nll_loss": nll.detach()}
        )


build = partial(pairs.build, Simpo)
