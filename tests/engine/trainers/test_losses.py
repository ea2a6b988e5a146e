"""Each method's loss and gradients equal a rewrite in plain torch, one row at a time, on full logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from engine.config.preference import DpoLoss
from engine.rules import read
from tests.caches import own_cache
from tests.engine.features.families import made
from tests.engine.trainers.building import Built, apart
from tests.engine.trainers.conftest import CONVERSATIONS, PAIRS, RATED, STEPS, TAUGHT, TEXTS

LORA = {"adapter.kind": "lora", "adapter.r": 4}
TALKS = [{"messages": messages} for messages in CONVERSATIONS]
LINES = [{"text": f"{number} is followed by {number + 1}, and that by {number + 2}."} for number in range(24)]
SCORED = [{**row, "score": number % 3} for number, row in enumerate(TEXTS) if "negative" not in row]
ADDED = {"method.label_smoothing": 0.1, "method.z_loss": 0.01}
ROBUST = {"method.loss_type": "robust", "method.label_smoothing": 0.1}
MEANS = {"method.kind": "dpo", "method.dpo_norm_loss": True}
APART = {"data.packing": True, "data.packing_cross_doc_attn_mask": True}


def language(built: Built, rows: list[dict[str, Any]]) -> torch.Tensor:
    """The mean cross-entropy of the learned tokens, each document of a pack by itself: a share of a token's weight spread
    over the vocabulary (arXiv:1512.00567, section 7), and the squared logarithm of the normaliser (arXiv:2204.02311, section
    5)."""
    found, method = [], built.config.method
    for row in rows:
        start = 0
        for length in row.get("seq_lengths") or [len(row["input_ids"])]:
            ids, labels = (row[part][start : start + length] for part in ("input_ids", "labels"))
            logits = built.model(input_ids=torch.tensor([ids])).logits[0]
            spread, normaliser = logits.log_softmax(-1), logits.exp().sum(-1).log()
            for place in range(1, length):
                if labels[place] != -100:
                    own, every = -spread[place - 1, ids[place]], -spread[place - 1].mean()
                    smooth = (1 - method.label_smoothing) * own + method.label_smoothing * every
                    found.append(smooth + method.z_loss * normaliser[place - 1] ** 2)
            start += length
    return torch.stack(found).mean()


def dpo(built: Built, rows: list[dict[str, Any]]) -> torch.Tensor:
    """arXiv:2305.18290, equation 7; `robust` as in arXiv:2403.00409, equation 11; the likelihood as in arXiv:2404.19733;
    an answer's log-probability is the sum over its tokens, or their mean."""
    method, losses, chosen = built.config.method, [], []
    whole = torch.mean if method.dpo_norm_loss else torch.sum
    for row in rows:
        ours, theirs = both(built, row), both(built, row, reference=True)
        margin = method.beta * (whole(ours[0] - theirs[0]) - whole(ours[1] - theirs[1]))
        right, wrong, swapped = torch.sigmoid(margin).log(), torch.sigmoid(-margin).log(), method.label_smoothing
        losses.append(((1 - swapped) * -right - swapped * -wrong) / (1 - 2 * swapped))
        chosen.append(ours[0])
    return torch.stack(losses).mean() - method.rpo_alpha * torch.cat(chosen).mean()


def kto(built: Built, rows: list[dict[str, Any]]) -> torch.Tensor:
    """arXiv:2402.01306, equation 7 and its estimate of the divergence by mismatched rows."""
    method = built.config.method
    answers = [row["completion_ids"] for row in rows]
    moved = []
    for row, other in zip(rows, [answers[-1], *answers[:-1]], strict=True):
        with torch.no_grad():
            ours = built.logps(row["prompt_ids"], other).sum()
        moved.append(ours - built.logps(row["prompt_ids"], other, reference=True).sum())
    divergence = torch.stack(moved).mean().clamp(min=0)
    good = sum(bool(row["label"]) for row in built.prepared.dataset)
    bad = len(built.prepared.dataset) - good
    losses = []
    for row in rows:
        both = [built.logps(row["prompt_ids"], row["completion_ids"], reference=each).sum() for each in (False, True)]
        reward = method.beta * (both[0] - both[1] - divergence)
        weight = max(1.0, bad / good) if row["label"] else max(1.0, good / bad)
        losses.append(weight * (1 - torch.sigmoid(reward if row["label"] else -reward)))
    return torch.stack(losses).mean()


def both(built: Built, row: dict[str, Any], *, reference: bool = False) -> list[torch.Tensor]:
    """Log-probabilities of the tokens of the chosen and of the rejected answer."""
    return [built.logps(row["prompt_ids"], row[part], reference=reference) for part in ("chosen_ids", "rejected_ids")]


def ipo(built: Built, rows: list[dict[str, Any]]) -> torch.Tensor:
    """arXiv:2310.12036, equation 17, on means over tokens."""
    losses = []
    for row in rows:
        ours, theirs = both(built, row), both(built, row, reference=True)
        margin = (ours[0] - theirs[0]).mean() - (ours[1] - theirs[1]).mean()
        losses.append((margin - 1 / (2 * built.config.method.beta)) ** 2)
    return torch.stack(losses).mean()


def simpo(built: Built, rows: list[dict[str, Any]]) -> torch.Tensor:
    """arXiv:2405.14734, equation 6."""
    method = built.config.method
    losses = []
    for row in rows:
        chosen, rejected = (each.mean() for each in both(built, row))
        wanted = torch.sigmoid(method.beta * chosen - method.beta * rejected - method.simpo_gamma)
        losses.append(-wanted.log() - method.cpo_alpha * chosen)
    return torch.stack(losses).mean()


def orpo(built: Built, rows: list[dict[str, Any]]) -> torch.Tensor:
    """arXiv:2403.07691, equations 2 to 7."""
    losses = []
    for row in rows:
        chosen, rejected = (each.mean().exp() for each in both(built, row))
        ratio = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
        losses.append(-chosen.log() - built.config.method.beta * torch.sigmoid(ratio.log()).log())
    return torch.stack(losses).mean()


def reward(built: Built, rows: list[dict[str, Any]]) -> torch.Tensor:
    """arXiv:2203.02155, equation 1, with the scores drawn to zero as in arXiv:2312.09244."""
    losses = []
    for row in rows:
        ids = [torch.tensor([[*row["prompt_ids"], *row[part]]]) for part in ("chosen_ids", "rejected_ids")]
        chosen, rejected = (built.model(input_ids=each).logits[0, 0] for each in ids)
        centre = built.config.method.center_rewards_coefficient * (chosen + rejected) ** 2
        losses.append(centre - torch.sigmoid(chosen - rejected).log())
    return torch.stack(losses).mean()


def distill(built: Built, rows: list[dict[str, Any]]) -> torch.Tensor:
    """arXiv:1503.02531, section 2, a teacher's k probabilities scaled to a sum of one."""
    method, total, count = built.config.method, torch.zeros(()).double(), 0
    for row in rows:
        logits = built.model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        for place in range(1, len(row["input_ids"])):
            if row["labels"][place] == -100:
                continue
            each = slice(place * row["top_k"], (place + 1) * row["top_k"])
            tokens = torch.tensor(row["teacher_tokens"][each])
            teacher = (torch.tensor(row["teacher_logps"][each]).double() / method.kd_temperature).softmax(-1)
            soft = (logits[place - 1] / method.kd_temperature).log_softmax(-1)[tokens]
            kl = (torch.special.xlogy(teacher, teacher) - teacher * soft).sum()
            hard = logits[place - 1].log_softmax(-1)[row["labels"][place]]
            total = total + method.kd_alpha * method.kd_temperature**2 * kl - method.kd_ce_alpha * hard
            count += 1
    return total / count


def embedding(built: Built, rows: list[dict[str, Any]]) -> torch.Tensor:
    """arXiv:1705.00652, section 4.4, with negatives of the rows' own, on cosines of what tokens come to, text by text."""
    pool = {"mean": lambda states: states.mean(0), "last": lambda states: states[-1], "first": lambda states: states[0]}

    def vector(ids: list[int]) -> torch.Tensor:
        states = built.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        found = pool[built.config.method.pooling](states)
        return found / found.norm()

    texts = [vector(row[part]) for part in ("positive_ids", "negative_ids") for row in rows if row[part]]
    losses = []
    for place, row in enumerate(rows):
        anchor = vector(row["anchor_ids"])
        scores = torch.stack([anchor @ text for text in texts]) * built.config.method.scale
        losses.append(scores.logsumexp(0) - scores[place])
    assert len(texts) > len(rows)
    return torch.stack(losses).mean()


def scored(built: Built, rows: list[dict[str, Any]]) -> torch.Tensor:
    """CoSENT, equation 9 of doi:10.1109/TASLP.2024.3402087, pair by pair."""
    alike = []
    for row in rows:
        vectors = [
            built.model(input_ids=torch.tensor([row[part]])).last_hidden_state[0].mean(0)
            for part in ("anchor_ids", "positive_ids")
        ]
        alike.append(torch.cosine_similarity(*vectors, dim=0) * built.config.method.scale)
    terms = [
        (worse - better).exp()
        for better, high in zip(alike, rows, strict=True)
        for worse, low in zip(alike, rows, strict=True)
        if high["score"] > low["score"]
    ]
    assert 0 < len(terms) < len(rows) * (len(rows) - 1) / 2  # some scores are equal
    return torch.stack(terms).sum().log1p()


def prm(built: Built, rows: list[dict[str, Any]]) -> torch.Tensor:
    """The negative log-probability of each step's verdict, mean over the steps."""
    losses = []
    for row in rows:
        spread = built.model(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        losses += [-spread[place, label] for place, label in enumerate(row["labels"]) if label != -100]
    assert len(losses) == 2 * len(rows)
    return torch.stack(losses).mean()


CASES: list[tuple[str, dict[str, Any], list[Any], Callable[..., torch.Tensor]]] = [
    ("sft", {}, TALKS, language),
    ("pretrain", {"method.kind": "pretrain"}, LINES, language),
    ("pretrain, packs kept apart", {"method.kind": "pretrain", **APART}, LINES, language),
    ("sft, smoothed, with z-loss", ADDED, TALKS, language),
    ("pretrain, smoothed", {"method.kind": "pretrain", "method.label_smoothing": 0.3}, LINES, language),
    (
        "pretrain, with z-loss, packs kept apart",
        {"method.kind": "pretrain", "method.z_loss": 0.01, **APART},
        LINES,
        language,
    ),
    ("dpo", {"method.kind": "dpo"}, PAIRS, dpo),
    ("dpo, robust", {"method.kind": "dpo", **ROBUST}, PAIRS, dpo),
    ("dpo, with likelihood", {"method.kind": "dpo", "method.rpo_alpha": 0.5}, PAIRS, dpo),
    ("dpo, by means", {**MEANS, "method.beta": 2.0}, PAIRS, dpo),
    ("dpo, robust, by means, with likelihood", {**MEANS, **ROBUST, "method.rpo_alpha": 0.5}, PAIRS, dpo),
    ("kto", {"method.kind": "kto"}, RATED, kto),
    ("ipo", {"method.kind": "ipo"}, PAIRS, ipo),
    ("simpo", {"method.kind": "simpo", "method.cpo_alpha": 0.3}, PAIRS, simpo),
    ("distill", {"method.kind": "distill"}, TAUGHT, distill),
    ("distill, softened", {"method.kind": "distill", "method.kd_temperature": 2.0}, TAUGHT, distill),
    ("embedding", {"method.kind": "embedding"}, TEXTS, embedding),
    ("embedding, last token", {"method.kind": "embedding", "method.pooling": "last"}, TEXTS, embedding),
    ("embedding, scored", {"method.kind": "embedding"}, SCORED, scored),
    ("prm", {"method.kind": "prm"}, STEPS, prm),
    ("reward", {"method.kind": "reward", "method.center_rewards_coefficient": 0.1}, PAIRS, reward),
    ("orpo", {"method.kind": "orpo", "method.beta": 0.5}, PAIRS, orpo),
]


FULL, ADAPTED = ({}, False, 1e-6), (LORA, True, 1e-10)


@pytest.mark.parametrize(
    ("settings", "rows", "plain", "adapter", "exact_head", "near"),
    [
        # Each loss with one of the two every time, with the other in `make test-all`.
        pytest.param(*case[1:], *way, id=f"{case[0]}-{name}", marks=pytest.mark.slow if number % 2 != place else ())
        for number, case in enumerate(CASES)
        for place, (name, way) in enumerate({"full": FULL, "lora": ADAPTED}.items())
    ],
)
def test_gradients_equal_plain_torch(tmp_path, monkeypatch, settings, rows, plain, adapter, exact_head, near):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    built = Built({**settings, **adapter}, rows, tmp_path, exact_head=exact_head)
    (loss, ours), (expected, theirs) = built.gradients(), built.of(plain)
    assert loss == pytest.approx(expected, rel=near)
    assert apart(ours, theirs) <= near


def test_means_over_tokens_are_refused_with_just_those_losses_of_dpo_that_take_them_already_or_compare_nothing():
    for name in get_args(DpoLoss):
        reading = read({"method": {"kind": "dpo", "loss_type": name, "label_smoothing": 0.1, "dpo_norm_loss": True}})
        refused = [finding.path for finding in reading.findings if finding.rule.startswith("means-over")]
        assert refused == (["method.dpo_norm_loss"] if name in ("ipo", "sigmoid_norm", "sft") else []), name


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere"])
def test_a_teacher_is_followed_through_a_models_own_cap_and_scale_of_its_logits(tmp_path, monkeypatch, family):
    from transformers import AutoTokenizer

    from engine.builtin import tiny

    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder())
    model = made(family, vocab_size=len(tokenizer), max_position_embeddings=256)
    model.get_output_embeddings().weight.data.mul_(20)  # so that a cap of 5 bends them
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "model")
    softened = {"method.kind": "distill", "method.kd_temperature": 2.0, "model.name": str(tmp_path / "model")}
    built = Built(softened, TAUGHT, tmp_path)
    (loss, ours), (expected, theirs) = built.gradients(), built.of(distill)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert apart(ours, theirs) <= 1e-6


def test_smoothed_labels_are_refused_with_just_those_losses_of_dpo_that_they_would_not_change(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    built = Built({"method.kind": "dpo"}, PAIRS, tmp_path)
    trainer, batch = built.trainer, built.collate(built.rows)
    for name in get_args(DpoLoss):
        trainer.loss_types, found = [name], []
        for trainer.label_smoothing in (0.1, 0.3):
            with torch.no_grad():
                found.append(trainer.compute_loss(built.model, dict(batch)).item())
        reading = read({"method": {"kind": "dpo", "loss_type": name, "label_smoothing": 0.3}})
        refused = [finding.path for finding in reading.findings if finding.rule.startswith("label-smoothing")]
        assert refused == (["method.label_smoothing"] if found[0] == found[1] else []), name


def test_the_odds_of_a_certain_answer_stay_finite():
    from engine.trainers.orpo import log_odds

    logp = torch.tensor([-1e-9, 0.0, -30.0, -0.7], requires_grad=True)
    odds = log_odds(logp)
    odds.sum().backward()
    assert odds.isfinite().all()
    assert logp.grad is not None
    assert logp.grad.isfinite().all()
    assert odds[2].item() == pytest.approx(-30)
