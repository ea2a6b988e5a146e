"""The curves that our own losses log are what their names say, each against plain torch on the same batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.caches import own_cache
from tests.engine.trainers.building import Built
from tests.engine.trainers.conftest import PAIRS, STEPS, TAUGHT, TEXTS
from tests.engine.trainers.test_losses import both


def logged(built: Built) -> dict[str, float]:
    """What the trainer notes of its batch, by name."""
    built.gradients()
    trainer = built.trainer
    noted = trainer.curves["train"] if hasattr(trainer, "curves") else trainer._metrics["train"]
    return {name: values[-1] for name, values in noted.items()}


def mean(values: list[Any]) -> float:
    """Of numbers, tensors among them."""
    return sum(map(float, values)) / len(values)


def spreads(built: Built, ids: list[int], places: list[int]) -> torch.Tensor:
    """Log-probabilities [N, V] of what stands at these places, from plain logits."""
    return built.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)[[place - 1 for place in places]]


def entropy(spread: torch.Tensor) -> list[float]:
    """Of each row of log-probabilities [N, V]."""
    return (-(spread.exp() * spread).sum(-1)).tolist()


def likeliest(built: Built, ids: list[int]) -> int:
    """The token that the model would write next."""
    return int(built.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())


@pytest.mark.parametrize("kind", ["simpo", "orpo"])
@torch.no_grad()
def test_pairs_without_a_reference(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    built = Built({"method.kind": kind, "method.beta": 0.5}, PAIRS, tmp_path)
    first = built.rows[0]
    hit = likeliest(built, first["prompt_ids"])
    built.rows[0] = {**first, "chosen_ids": [hit, *first["chosen_ids"]]}
    with torch.enable_grad():
        found = logged(built)
    rewards, entropies, hits, odds = [], [], [], []
    for row in built.rows:
        means = [each.mean() for each in both(built, row)]
        rewards.append([0.5 * each.item() for each in means])
        chances = [each.exp() for each in means]
        odds.append((chances[0] / (1 - chances[0])).log() - (chances[1] / (1 - chances[1])).log())
        for part in ("chosen_ids", "rejected_ids"):
            ids = [*row["prompt_ids"], *row[part]]
            spread = spreads(built, ids, list(range(len(row["prompt_ids"]), len(ids))))
            entropies += entropy(spread)
            if part == "chosen_ids":
                hits += (spread.argmax(-1) == torch.tensor(row[part])).tolist()
    wanted = {
        "rewards/chosen": mean([chosen for chosen, _ in rewards]),
        "rewards/rejected": mean([rejected for _, rejected in rewards]),
        "rewards/margins": mean([chosen - rejected for chosen, rejected in rewards]),
        "rewards/accuracies": mean([chosen > rejected for chosen, rejected in rewards]),
        "entropy": mean(entropies),
        "mean_token_accuracy": mean(hits),
        "nll_loss": -mean([chosen / 0.5 for chosen, _ in rewards]),
    }
    if kind == "orpo":
        wanted |= {"log_odds_chosen": mean(odds), "log_odds_ratio": mean([each.sigmoid().log() for each in odds])}
    assert 0 < wanted["mean_token_accuracy"] < 1
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
    assert found["num_tokens"] == sum(
        len(row["prompt_ids"]) * 2 + len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in built.rows
    )


@torch.no_grad()
def test_a_teachers_probabilities(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    built = Built({"method.kind": "distill"}, TAUGHT, tmp_path)
    first = built.rows[0]
    learned = next(place for place, label in enumerate(first["labels"]) if place and label != -100)
    for part in ("input_ids", "labels"):
        first[part] = [
            *first[part][:learned],
            likeliest(built, first["input_ids"][:learned]),
            *first[part][learned + 1 :],
        ]
    with torch.enable_grad():
        found = logged(built)
    divergences, losses, entropies, hits = [], [], [], []
    for row in built.rows:
        places = [place for place, label in enumerate(row["labels"]) if place and label != -100]
        spread, top_k = spreads(built, row["input_ids"], places), row["top_k"]
        entropies += entropy(spread)
        for place, each in zip(places, spread, strict=True):
            taught = slice(place * top_k, (place + 1) * top_k)
            teacher = torch.tensor(row["teacher_logps"][taught]).double().softmax(-1)
            known = each[torch.tensor(row["teacher_tokens"][taught])]
            divergences.append((torch.special.xlogy(teacher, teacher) - teacher * known).sum())
            losses.append(-each[row["labels"][place]])
            hits.append(int(each.argmax()) == row["labels"][place])
    wanted = {"kl": mean(divergences), "nll_loss": mean(losses), "entropy": mean(entropies)}
    wanted["mean_token_accuracy"] = mean(hits)
    assert 0 < wanted["mean_token_accuracy"] < 1
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)


@torch.no_grad()
def test_verdicts_on_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    built = Built({"method.kind": "prm"}, STEPS, tmp_path)
    with torch.enable_grad():
        found = logged(built)
    chances: dict[int, list[float]] = {0: [], 1: []}
    for row in built.rows:
        right = built.model(input_ids=torch.tensor([row["input_ids"]])).logits[0].softmax(-1)[:, 1]
        for place, verdict in enumerate(row["labels"]):
            if verdict != -100:
                chances[verdict].append(right[place].item())
    assert min(map(len, chances.values())) > 0
    said = [chance > 0.5 for chance in chances[1]] + [chance <= 0.5 for chance in chances[0]]
    assert found["accuracy"] == pytest.approx(mean(said))
    assert found["margin"] == pytest.approx(mean(chances[1]) - mean(chances[0]), rel=1e-5)


@torch.no_grad()
def test_texts_that_belong_together(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", own_cache(tmp_path / "cache"))
    built = Built({"method.kind": "embedding"}, TEXTS, tmp_path)
    with torch.enable_grad():
        found = logged(built)

    def vector(ids: list[int]) -> torch.Tensor:
        states = built.model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
        return states / states.norm()

    texts = [vector(row[part]) for part in ("positive_ids", "negative_ids") for row in built.rows if row[part]]
    margins = []
    for place, row in enumerate(built.rows):
        alike = [float(vector(row["anchor_ids"]) @ text) for text in texts]
        margins.append(alike.pop(place) - max(alike))
    assert found["margin"] == pytest.approx(mean(margins), rel=1e-5)
    assert found["accuracy"] == pytest.approx(mean([margin > 0 for margin in margins]))
