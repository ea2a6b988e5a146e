"""Our embedding models equal those of the trainer of sentence-transformers, and its `SentenceTransformer` loads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.trainers.conftest import lines

PAIRS = [{"anchor": f"What comes after {number}?", "positive": f"{number + 1}"} for number in range(8)]
SCORED = [{"sentence1": row["anchor"], "sentence2": row["positive"], "score": n / 7} for n, row in enumerate(PAIRS)]
ONE_BATCH = {
    "method.kind": "embedding",
    "optim.max_steps": 4,
    "optim.per_device_train_batch_size": 8,
    "optim.gradient_accumulation_steps": 1,
}
LORA = {"adapter.kind": "lora", "adapter.r": 4}


def theirs(folder: Path, rows: list[dict[str, Any]], loss_name: str, where: Path) -> list[tuple[int, float, float]]:
    """Steps, losses and gradient norms of their trainer from the model in this folder."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses

    from engine.trainers.embedding import layout

    # In our layout, since from a bare folder it would put each text into the chat template of the tokenizer.
    shutil.copytree(folder, where / "model")
    for name, content in layout(128, "mean", 128).items():
        (where / "model" / name).parent.mkdir(exist_ok=True)
        (where / "model" / name).write_text(json.dumps(content))
    model = SentenceTransformer(str(where / "model"), device="cpu", model_kwargs={"dtype": torch.float32})
    trainer = SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(
            str(where), per_device_train_batch_size=8, max_steps=4, learning_rate=1e-3, logging_steps=1, use_cpu=True,
            save_strategy="no", report_to="none", disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        loss=getattr(losses, loss_name)(model),
    )  # fmt: skip
    trainer.train()
    return [
        (entry["step"], entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry
    ]


@pytest.mark.parametrize(
    ("rows", "loss"), [(PAIRS, "MultipleNegativesRankingLoss"), (SCORED, "CoSENTLoss")], ids=["pairs", "scored"]
)
def test_losses_and_gradients_are_those_of_their_trainer(train, source, tmp_path, rows, loss):
    from engine.builtin import tiny

    run = train({**ONE_BATCH, "data.train": [{"path": source(rows)}]})
    ours = [(event["step"], event["loss"], event["grad_norm"]) for event in lines(run, "metrics") if "loss" in event]
    expected = theirs(tiny.folder(), rows, loss, tmp_path / "theirs")
    assert len(ours) == 4
    assert ours[0][1:] == pytest.approx(expected[0][1:], rel=1e-5)
    assert [each[1] for each in ours] == pytest.approx([each[1] for each in expected], rel=1e-4)


def encoder(folder: Path) -> Path:
    """A small BERT with the built-in tokenizer: a model whose first token has seen the text."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    from engine.builtin import tiny

    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder())
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("pooling", ["mean", "last", "first"])
def test_an_adapters_folder_gives_the_vectors_that_were_trained(train, source, tmp_path, pooling):
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel, AutoTokenizer

    from engine.builtin import tiny
    from engine.trainers.embedding import pooled

    base = encoder(tmp_path / "bert") if pooling == "first" else Path(tiny.folder())
    named = {"model.name": str(base)} if pooling == "first" else {}
    run = train({**ONE_BATCH, **LORA, **named, "method.pooling": pooling, "data.train": [{"path": source(PAIRS)}]})
    folder = run.checkpoints / "checkpoint-4"
    vectors = SentenceTransformer(str(folder), device="cpu").encode([row["anchor"] for row in PAIRS])
    from peft import PeftModel

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = PeftModel.from_pretrained(AutoModel.from_pretrained(base, dtype=torch.float32), str(folder))
    for row, vector in zip(PAIRS, vectors, strict=True):
        batch = tokenizer([row["anchor"]], return_tensors="pt")
        with torch.no_grad():
            hidden = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        plain = torch.nn.functional.normalize(pooled(hidden, batch["attention_mask"], pooling))[0]
        assert torch.allclose(plain, torch.tensor(vector), atol=1e-5)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
