"""Where the rules of `engine.rules.sources` speak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.config.facts import Facts
from tests.engine.rules.rule_cases.shared import DPO, TINY_FACTS, Case, source

PIXTRAL = replace(TINY_FACTS, processor=True, by_torchvision=True, keeps_shape=False)


def entry(**said: Any) -> dict[str, Any]:
    return {"data.train": [{"path": "rows.jsonl", **said}]}


SEEN = {"path": "rows.jsonl", "format": "multimodal_pretrain"}
CASES: dict[str, list[Case]] = {
    "columns-name-parts-of-a-row": [
        (entry(columns={"qestion": "q"}), Facts(), "data.train.0.columns.qestion", "error"),
        (entry(columns={"prompt": "q"}, format="messages"), Facts(), "data.train.0.columns.prompt", "error"),
        (entry(columns={"prompt": "q"}), source(format="messages"), "data.train.0.columns.prompt", "error"),
        ({**DPO, **entry(columns={"choosen": "good"}, format="preference")}, Facts(), "data.train.0.columns.choosen", "error"),
        (entry(path="builtin/synthetic", format="synthetic", columns={"text": "t"}), Facts(), "data.train.0.columns.text", "error"),
        ({"data.eval": [{"path": "held.jsonl", "columns": {"mesages": "m"}}]}, Facts(), "data.eval.0.columns.mesages", "error"),
    ],
    "templates-of-sources-are-there-and-used": [
        (entry(chat_template="lost.jinja"), Facts(files={"lost.jinja": False}), "data.train.0.chat_template", "error"),
        (entry(chat_template="chatml", format="text"), Facts(), "data.train.0.chat_template", "error"),
    ],
    "pairs-are-chosen-of-rankings": [
        (entry(ranking_pairs="all", format="ranking"), Facts(), "data.train.0.ranking_pairs", "error"),
        ({**DPO, **entry(ranking_pairs="all", format="preference")}, Facts(), "data.train.0.ranking_pairs", "error"),
        ({**DPO, **entry(ranking_pairs="adjacent")}, source(format="preference"), "data.train.0.ranking_pairs", "error"),
    ],
    "synthetic-rows-are-drawn-in-the-size-that-is-said": [
        (entry(format="synthetic"), Facts(), "data.train.0.path", "error"),
        (entry(path="builtin/synthetic", format="text"), Facts(), "data.train.0.format", "error"),
        (entry(tokens=64), Facts(), "data.train.0.tokens", "error"),
        (entry(path="builtin/synthetic", tokens=64, min_tokens=65), Facts(), "data.train.0.min_tokens", "error"),
        ({"data.max_length": 100, **entry(path="builtin/synthetic")}, Facts(), "data.train.0.tokens", "error"),
    ],
    "images-need-what-reads-them": [
        ({"data.image_backend": "torchvision"}, Facts(packages={"torchvision": None}), "data.image_backend", "error"),
        ({"data.image_backend": "pil"}, Facts(model=PIXTRAL), "data.image_backend", "error"),
        ({}, Facts(model=PIXTRAL, packages={"torchvision": None}), "model.name", "error"),
    ],
    "pixel-limits-need-a-processor-that-keeps-shapes": [
        ({"data.max_pixels": 50_000}, Facts(model=TINY_FACTS), "data.max_pixels", "error"),
        ({"data.min_pixels": 50_000}, Facts(model=PIXTRAL), "data.min_pixels", "error"),
    ],
    "pixel-limits-leave-room": [({"data.min_pixels": 9, "data.max_pixels": 8}, Facts(), "data.min_pixels", "error")],
    "rows-with-images-need-a-processor": [
        (entry(), Facts(model=TINY_FACTS, sources=source(images="line 4").sources), "data.train.0.path", "error"),
    ],
    "rows-with-images-need-a-method-that-reads-them": [
        ({"method.kind": "reward", **entry()}, source(images="line 4"), "data.train.0.path", "error"),
        ({"method.kind": "ppo", **entry()}, source(images="line 4"), "data.train.0.path", "error"),
    ],
    "rows-with-images-are-not-scored-by-models": [
        (
            {"method.kind": "grpo", "method.reward_funcs": ["length:4", "0.5 * model:org/judge"], **entry()},
            source(images="line 4"),
            "method.reward_funcs.1",
            "error",
        ),
    ],
    "rows-with-images-need-their-reference-at-hand": [
        (
            {**DPO, "method.reference": "precompute", **entry()},
            source(images="line 4"),
            "method.reference",
            "error",
        ),
    ],
    "text-with-images-is-one-source": [
        ({"method.kind": "pretrain", "data.train": [SEEN, SEEN]}, Facts(), "data.train.1.format", "error"),
    ],
    "text-with-images-is-read-by-the-processors-own-tokenizer": [
        ({"method.kind": "pretrain", "model.tokenizer": "org/some", "data.train": [SEEN]}, Facts(), "model.tokenizer", "error"),
    ],
    "rows-with-images-are-not-packed": [
        ({"method.kind": "pretrain", "data.packing": True, "data.train": [SEEN]}, Facts(), "data.train.0.format", "error"),
        ({"data.packing": True, **entry()}, source(images="line 4"), "data.train.0.path", "error"),
    ],
    "properties-name-parts-of-a-message": [
        (entry(properties={"speaker": "role"}), Facts(), "data.train.0.properties.speaker", "error"),
        ({"method.kind": "pretrain", **entry(properties={"role": "who"}, format="text")}, Facts(), "data.train.0.properties", "error"),
    ],
    "files-have-no-splits": [
        (entry(split="train"), Facts(), "data.train.0.split", "error"),
        ({"data.eval": [{"path": "held.csv.gz", "split": "test"}]}, Facts(), "data.eval.0.split", "error"),
        (entry(subset="main"), Facts(), "data.train.0.subset", "error"),
        (entry(path="builtin/dates", revision="v1"), Facts(), "data.train.0.revision", "error"),
    ],
}  # fmt: skip
