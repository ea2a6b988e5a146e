"""What is known so far of machine, model, data and packages. Unknown is `None`, and rules are silent about it.

Model facts come from a `config.json` read as JSON and from safetensors headers; nothing here loads a model or asks a
network. Only models that lie on this machine are known: a folder, or a snapshot in the hub cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.hardware import Machine


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The shape of a model; numbers that its `config.json` does not give are `None`."""

    name: str
    model_type: str = ""
    parameters: int | None = None
    hidden_size: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    max_length: int | None = None
    """The most positions the model knows (`max_position_embeddings`)."""
    experts: int | None = None
    linears: tuple[tuple[str, int, int, int], ...] = ()
    """Linear layers as `(name, in, out, how many)`, the head left out."""
    expert_weights: tuple[tuple[str, int, int, int], ...] = ()
    """Weights that hold all experts of a layer, as `(name, in, out, how many)` for one expert."""
    chat_template: bool | None = None
    """Whether the tokenizer brings one; `None` when its files are not here."""
    folder: str = ""
    """Where the files are; empty when they are not on this machine."""
    missing: str = ""
    """Why the model cannot be here: set for a local path that does not exist or holds no model."""
    remote: bool = False
    """A hub name whose files are not on this machine."""
    stored: str = ""
    """How its files hold quantized weights (`quant_method` of its config.json, such as fp8); empty for plain numbers."""


@dataclass(frozen=True, slots=True)
class DataFacts:
    """Counts over the prepared data; `exact` once every row was seen."""

    rows: int | None = None
    """What an epoch is made of: rows that are left out do not count, a pack counts as one."""
    eval_rows: int | None = None
    tokens: int | None = None
    trained_tokens: int | None = None
    longest: int | None = None
    truncated: int | None = None
    masked: int | None = None
    lengths: tuple[int, ...] | None = None
    exact: bool = False
    read: int | None = None
    """Rows of the sources, those that are left out too."""

    @property
    def source_rows(self) -> int | None:
        """What `truncated` and `masked` are shares of."""
        return self.read or self.rows

    @classmethod
    def counted(cls, answer: Mapping[str, Any]) -> DataFacts:
        """From what the inspector answers to `data`, which says more than the facts."""
        known = {name: answer[name] for name in cls.__dataclass_fields__ if answer.get(name) is not None}
        return cls(**{**known, "lengths": tuple(known["lengths"])} if "lengths" in known else known)


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """One look at a source: there or not, how large, what its first rows hold."""

    path: str
    exists: bool | None = None
    bytes: int | None = None
    rows: int | None = None
    columns: tuple[str, ...] = ()
    format: str | None = None
    problem: str = ""
    """Why its rows cannot be used, as a sentence."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything known when a config is read. `given` is filled by `read`: the paths that the person wrote."""

    machine: Machine | None = None
    model: ModelFacts | None = None
    data: DataFacts | None = None
    packages: Mapping[str, str | None] | None = None
    sources: Mapping[str, SourceFacts] | None = None
    files: Mapping[str, bool] | None = None
    """Of the files that rewards name, by the path as it is written: whether one is there."""
    given: frozenset[str] = frozenset()


def model_facts(name: str, revision: str | None = None) -> ModelFacts | None:
    """What the files on this machine say about a model: its shape, or that it is missing or remote."""
    from engine.config.shapes import look

    return look(name, revision)
