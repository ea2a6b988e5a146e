"""Whether the model has weights for every token that a run will show it: those of its rows, its prompts and the padding.

Many tokenizers know a token more than their model has weights for, which is no harm while it is not used; so what is used
decides, and rows are read only where the tokenizer's numbers go beyond the model's. On a GPU the first such token would
end the run with an assertion of the device that names nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.config.tree import RunConfig
from engine.errors import ModelError, visible

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

BATCH = 1000
Rows = Sequence[Mapping[str, Any]]


def refuse_tokens_without_weights(
    config: RunConfig, model: PreTrainedModel, processing_class: Any, datasets: Mapping[str, Any | None]
) -> None:
    """Raises ModelError naming the first token beyond the model's embeddings and where it stands.

    `datasets` are prepared rows (None where there are none) by the setting that they come from.
    """
    tokenizer, weights, more = _tokenizer_and_weights(model, processing_class)
    if not more:
        return
    pad = tokenizer.pad_token_id
    if pad is not None and pad >= weights:
        raise _beyond(config, tokenizer, pad, "which pads every batch,", weights)
    for name, dataset in datasets.items():
        if dataset is not None and (beyond := _first(dataset, weights)) is not None:
            token, row = beyond
            raise _beyond(config, tokenizer, token, f"in row {row} of {name}", weights)
    for number, text in enumerate(config.run.prompts):
        if (token := max(tokenizer(text)["input_ids"], default=0)) >= weights:
            raise _beyond(config, tokenizer, token, f"in run.prompts.{number}", weights)


def check_of_rows(
    config: RunConfig, model: PreTrainedModel | PeftModel, processing_class: Any
) -> Callable[[Rows], None] | None:
    """What refuses rows of a stream that hold a token beyond the model's embeddings, by a ModelError; None where the
    tokenizer knows no such token."""
    tokenizer, weights, more = _tokenizer_and_weights(model, processing_class)
    if not more:
        return None

    def check(rows: Rows) -> None:
        for row in rows:
            for name in row:
                if name == "labels" or name.endswith(("_ids", "_tokens")):
                    token = max(row[name], default=0)
                    if token >= weights:
                        raise _beyond(config, tokenizer, token, "in a row of data.train", weights)

    return check


def _tokenizer_and_weights(model: PreTrainedModel | PeftModel, processing_class: Any) -> tuple[Any, int, bool]:
    """The tokenizer, for how many tokens the model has weights, and whether the tokenizer knows more."""
    embeddings: Any = model.get_input_embeddings()
    weights = int(embeddings.weight.shape[0])
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    return tokenizer, weights, max(tokenizer.get_vocab().values(), default=0) >= weights


def _beyond(config: RunConfig, tokenizer: Any, token: int, where: str, weights: int) -> ModelError:
    place = "model.name" if config.model.tokenizer is None else "model.tokenizer"
    name = visible(str(tokenizer.convert_ids_to_tokens(token)))
    return ModelError(
        f"{place}: token {token} ({name}) {where} has no weights: the model knows the tokens 0 to {weights - 1:,}.",
        "Take the tokenizer that belongs to the model, or a model whose embeddings were resized for this tokenizer.",
    )


def _first(dataset: Any, weights: int) -> tuple[int, int] | None:
    """The first token from `weights` on and the number of its row in the source; None where there is none."""
    import pyarrow.compute as arrow

    columns = [name for name in dataset.column_names if name.endswith(("_ids", "_tokens")) or name == "labels"]
    begun = 0
    for part in dataset.with_format("arrow").iter(batch_size=BATCH):
        largest = (arrow.max(arrow.list_flatten(part[name])).as_py() for name in columns)
        if any(each is not None and each >= weights for each in largest):
            for place, row in enumerate(part.to_pylist()):
                token = next((each for name in columns for each in row[name] if each >= weights), None)
                if token is not None:
                    return token, _number(row, begun + place)
        begun += len(part)
    return None


def _number(row: dict[str, Any], place: int) -> int:
    """A row's number in its source; of a pack that of its first document."""
    return int(row["rows"][0] if row.get("rows") else row.get("row", place))
