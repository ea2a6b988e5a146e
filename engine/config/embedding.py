"""Embedding: a text becomes one vector, near those of texts that mean the same."""

from typing import Annotated, ClassVar, Literal

from engine.config.kinds import Head, Kind, MethodSection, Rows
from engine.config.method_names import CALLED
from engine.config.section import Advanced, Gt, Le, Source, Title, Words


class Embedding(MethodSection):
    """Embedding model: the model learns to turn a text into a vector, such that a question lies near its answer and far
    from the others. It writes nothing any more. Needs rows with an anchor and a positive text, such as a question and the
    passage that answers it, and where you have them a negative one; the other rows of a batch serve as further negatives,
    so batches should be large. Rows of two texts and a score, how alike they are, serve as well: then pairs learn to
    rank as their scores do. Its checkpoints open with `SentenceTransformer(folder)`."""

    kind: Annotated[Literal["embedding"], Kind] = "embedding"
    called: ClassVar[str] = CALLED["embedding"]
    description: ClassVar[str] = "embedding: turn texts into vectors for search"
    formats: ClassVar[tuple[str, ...]] = ("embedding",)
    rows: ClassVar[Rows] = "texts"
    head: ClassVar[Head] = "none"
    # the anchor, the positive and perhaps a negative
    sequences: ClassVar[int] = 3
    lora_rate: ClassVar[float] = 2e-4
    full_rate: ClassVar[float] = 2e-5

    pooling: Annotated[
        Literal["mean", "last", "first"],
        Title("Vector of a text"),
        Words(mean="mean over its tokens", last="its last token", first="its first token"),
    ] = "mean"
    """Which of the model's outputs become the vector. `mean` serves any model; `last` is usual for models that read from
    left to right, `first` for those with a token of their own for it, such as BERT."""

    scale: Annotated[float, Gt(0), Le(1000), Title("Scale of the similarity"), Advanced, Source("arXiv:1705.00652")] = (
        20.0
    )
    """By how much cosine similarities are multiplied before they compete. Higher values look at the hardest negatives
    alone."""
