"""Odds ratio preference optimization (arXiv:2403.07691): SFT on the chosen answer and an odds ratio, no reference."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from engine.config import preference
from engine.trainers import pairs
from engine.trainers.pairs import Judged, Pair, ReferenceFree
from engine.trainers.sft import arguments

__all__ = ["Orpo", "arguments", "build", "log_odds"]

# The odds of an answer that is certain are infinite: beyond this log-probability they stay where they are.
_CERTAIN = -1e-6


class Orpo(ReferenceFree):
    """Equations 6 and 7 of the paper, an answer's probability being the geometric mean over its tokens."""

    method: preference.Orpo

    def judge(self, pair: Pair) -> Judged:
        beta = self.method.beta
        odds = log_odds(pair.chosen_mean) - log_odds(pair.rejected_mean)
        ratio = F.logsigmoid(odds)
        nll = -pair.chosen_mean.mean()
        curves = {
            "nll_loss": nll.detach(),
            "log_odds_ratio": ratio.detach().mean(),
            "log_odds_chosen": odds.detach().mean(),
        }
        rewards = beta * pair.chosen_mean.detach(), beta * pair.rejected_mean.detach()
        return Judged(nll - beta * ratio.mean(), *rewards, curves)


def log_odds(logp: torch.Tensor) -> torch.Tensor:
    """`log(p / (1 - p))` from log-probabilities below 0, finite up to certainty."""
    bounded = logp.clamp(max=_CERTAIN)
    return bounded - torch.log(-torch.expm1(bounded))


build = partial(pairs.build, Orpo)
