"""The plain trainer of each method: what a person would use without the workbench, on the same rows and settings.

TRL's own where TRL 1.16 has one (ORPO's and SimPO's are among its experimental ones and hold full logits), for process
rewards transformers' Trainer with the loss of its classifier of tokens, for embeddings sentence-transformers'. No library
trains PPO or learns from a teacher's stored probabilities: there our own trainer without features is what features are
measured against.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from _method_rows import GENERATES, REWARDS
from datasets import Dataset

from engine.data.collate import collator_for
from engine.trainers.arguments import shared_arguments
from engine.trainers.table import method as module_of

WITHOUT = "ppo", "distill"


class NoPeer(Exception):
    """There is no library to compare with, in a sentence."""


def expect_peer(method: str) -> None:
    """Raises NoPeer for a method that no library trains."""
    if method in WITHOUT:
        raise NoPeer(f"no library trains {method}: features are measured against ours without them")


def plain_trainer(config: Any, arguments: Any, model: Any, tokenizer: Any, rows: Dataset) -> Any:
    """The library's trainer of this config's method; `arguments` are ours, as the library's config. Raises NoPeer."""
    method, given = config.method.kind, {"model": model, "args": arguments, "processing_class": tokenizer}
    if method == "embedding":
        return _sentence_transformers(config, arguments, model, rows, tokenizer)
    if method in ("simpo", "orpo"):
        return _experimental(config, arguments, model, rows, tokenizer)
    if method == "prm":
        return transformers.Trainer(**given, train_dataset=rows, data_collator=_without_rows(config, tokenizer))
    library = _library_of(method)
    if method in GENERATES:
        asked = Dataset.from_list([{"prompt": json.loads(row["prompt"])} for row in rows])
        return library(**given, train_dataset=asked, reward_funcs=REWARDS[method])
    kind = type(library.__name__, (library,), {"_prepare_dataset": lambda self, dataset, *_, **__: dataset})
    return kind(**given, train_dataset=rows, data_collator=collator_for(config, tokenizer))


def _library_of(method: str) -> type:
    """TRL's trainer under ours."""
    module = module_of("dpo" if method == "ipo" else method)  # IPO is one of DPO's losses
    kinds = (kind for kind in vars(module).values() if isinstance(kind, type))
    ours = next(kind for kind in kinds if issubclass(kind, transformers.Trainer))
    return next(kind for kind in ours.__mro__ if kind.__module__.startswith("trl.trainer"))


def _without_rows(config: Any, tokenizer: Any) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """Our collator's batch, which transformers' Trainer hands to the model as it is."""
    collate = collator_for(config, tokenizer)
    return lambda rows: {name: value for name, value in collate(rows).items() if name != "completion_mask"}


def _arguments_of(kind: type, config: Any, arguments: Any, **own: Any) -> Any:
    """The same settings as another class of arguments."""
    shared = shared_arguments(config, arguments.output_dir)
    return kind(**{**shared, "save_strategy": "no", "bf16": arguments.bf16, **own})


# -- pairs without a reference -----------------------------------------------------------------------------------------
def _experimental(config: Any, arguments: Any, model: Any, rows: Dataset, tokenizer: Any) -> Any:
    """TRL's ORPOTrainer, and its CPOTrainer with the loss of SimPO. Their rows are tokens already, as ours are."""
    own: dict[str, Any] = {"beta": config.method.beta, "max_length": config.data.max_length}
    if config.method.kind == "orpo":
        from trl.experimental.orpo import ORPOConfig as Config
        from trl.experimental.orpo import ORPOTrainer as Library
    else:
        from trl.experimental.cpo import CPOConfig as Config
        from trl.experimental.cpo import CPOTrainer as Library

        gamma, alpha = config.method.simpo_gamma, config.method.cpo_alpha
        own |= {"loss_type": "simpo", "simpo_gamma": gamma, "cpo_alpha": alpha}
    text = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    settings = _arguments_of(Config, config, arguments, **own)
    trainer = Library(model=model, args=settings, processing_class=tokenizer, train_dataset=text)
    trainer.train_dataset = Dataset.from_list([_pair(row) for row in rows])
    return trainer


def _pair(row: dict[str, Any]) -> dict[str, Any]:
    """A pair under the names that TRL's collator reads."""
    prompt, found = row["prompt_ids"], {"prompt_input_ids": row["prompt_ids"]}
    for side in ("chosen", "rejected"):
        ids = [*prompt, *row[f"{side}_ids"]]
        found |= {f"{side}_input_ids": ids, f"{side}_attention_mask": [1] * len(ids)}
        found[f"{side}_labels"] = [-100] * len(prompt) + row[f"{side}_ids"]
    return found


# -- embeddings --------------------------------------------------------------------------------------------------------
class _Reads(torch.nn.Module):
    """Our model as the first module of a sentence-transformers model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        ids = {name: features[name] for name in ("input_ids", "attention_mask")}
        return {**features, "token_embeddings": self.model(**ids).last_hidden_state}


def _sentence_transformers(config: Any, arguments: Any, model: Any, rows: Dataset, tokenizer: Any) -> Any:
    try:
        import sentence_transformers as library
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
        from sentence_transformers.sentence_transformer.modules import Pooling
    except ImportError as missing:
        raise NoPeer(
            f"sentence-transformers is not installed ({missing}): embedding has nothing to compare with"
        ) from None
    whole = library.SentenceTransformer(
        modules=[_Reads(model), Pooling(model.config.hidden_size, config.method.pooling)], device=str(model.device)
    )

    class Library(library.SentenceTransformerTrainer):  # type: ignore[misc, name-defined]
        get_train_dataloader = transformers.Trainer.get_train_dataloader  # the same rows in the same order as ours

    return Library(
        model=whole,
        args=_arguments_of(library.SentenceTransformerTrainingArguments, config, arguments),
        train_dataset=rows,
        loss=MultipleNegativesRankingLoss(whole, scale=config.method.scale),
        data_collator=_columns(tokenizer.pad_token_id),
        processing_class=tokenizer,
    )


def _columns(pad: int) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """Anchors and positives under the names that sentence-transformers' trainer reads."""

    def collate(rows: Sequence[Any]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for name in ("anchor", "positive"):
            ids = [row[f"{name}_ids"] for row in rows]
            width = max(map(len, ids))
            batch[f"{name}_input_ids"] = torch.tensor([each + [pad] * (width - len(each)) for each in ids])
            batch[f"{name}_attention_mask"] = torch.tensor([[1] * len(e) + [0] * (width - len(e)) for e in ids])
        return batch

    return collate
