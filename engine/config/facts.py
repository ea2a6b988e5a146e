"""What is known so far of machine, model, data and packages. Unknown is `None`, and rules are silent about it.

Model facts come from a `config.json` read as JSON and from safetensors headers; nothing here loads a model or asks a
network. Only models that lie on this machine are known: a folder, or a snapshot in the hub cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engine.hardware import Machine

if TYPE_CHECKING:
    from engine.config.tree import RunConfig


@dataclass(frozen=True, slots=True)
class VisionFacts:
    """The shape of a model's vision tower."""

    hidden_size: int
    layers: int
    intermediate_size: int
    gated: bool
    """Whether its MLPs multiply by a gate."""
    rotary: bool
    """Whether its attention rotates queries and keys, which keeps more of them."""
    patches: int
    """How many patches of an image become one token."""


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
    experts_per_token: int | None = None
    """How many of a layer's experts compute each token; `None` where it has none, or its config.json does not say."""
    with_experts: tuple[int, ...] | None = None
    """The numbers of the layers that have experts, the first is 0; `None` of a model without."""
    linears: tuple[tuple[str, int, int, int], ...] = ()
    """Linear layers as `(name, in, out, how many)`, the head left out."""
    tower: tuple[tuple[str, int, int, int], ...] = ()
    """Linear layers of its vision tower, where its files are here; `linears` has those of the language model."""
    projector: tuple[tuple[str, int, int, int], ...] = ()
    """Linear layers from its vision tower to the language model, where its files are here."""
    expert_weights: tuple[tuple[str, int, int, int], ...] = ()
    """Weights that hold all experts of a layer, as `(name, in, out, how many)` for one expert."""
    chat_template: bool | None = None
    """Whether the tokenizer brings one; `None` when its files are not here."""
    processor: bool | None = None
    """Whether it brings a processor for images; `None` when its files are not here."""
    by_torchvision: bool | None = None
    """Whether its images are read by torchvision alone; `None` where its files and transformers do not say."""
    vision: VisionFacts | None = None
    """Its vision tower; `None` where it has none, or one of an unknown shape."""
    keeps_shape: bool | None = None
    """Whether its processor keeps the shape of an image between a fewest and a most of pixels."""
    folder: str = ""
    """Where the files are; empty when they are not on this machine."""
    missing: str = ""
    """Why the model cannot be here: set for a local path that does not exist or holds no model."""
    checkpoint: str = ""
    """The newest checkpoint of the run that was named in a model's place, as it would be written there."""
    base: str | None = None
    """Of an adapter that was named in a model's place: the model below it, empty where it does not say."""
    remote: bool = False
    """A hub name whose files are not on this machine."""
    stored: str = ""
    """How its files hold quantized weights (`quant_method` of its config.json, such as fp8); empty for plain numbers."""
    stored_size: float = 0.0
    """Bytes of a number of its layers where these are stored in packed integers, their scales with them; 0 for others."""
    flaw: str = ""
    """Why its files would not be loaded, as a sentence with the way out: what they name, what is cut or lacking."""
    headless: bool = False
    """Its files hold no head that writes, and none is tied to the embeddings."""
    modules: frozenset[str] | None = None
    """Paths of the modules that hold weights by its files; `None` where the model has them under other names."""
    biases: bool | None = None
    """Whether its files hold bias vectors."""
    loaders: frozenset[str] | None = None
    """The transformers classes that serve its architecture; empty where the installed version does not know it."""


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """The tokenizer's files, where they are on this machine."""

    name: str
    flaw: str = ""
    """Why they would not be loaded, as a sentence with the way out."""
    tokens: int | None = None
    """One more than its largest token, those that were added included."""
    base: int | None = None
    """The same without those that were added."""


@dataclass(frozen=True, slots=True)
class DataFacts:
    """Counts over the prepared data; `exact` once every row was seen."""

    rows: int | None = None
    """What an epoch is made of: rows that are left out do not count, a pack counts as one."""
    eval_rows: int | None = None
    tokens: int | None = None
    trained_tokens: int | None = None
    longest: int | None = None
    image_tokens: int | None = None
    """Tokens of images in the row that has the most of them."""
    images: int | None = None
    """Images of all rows, each as often as it is trained on in an epoch."""
    all_image_tokens: int | None = None
    """Their tokens."""
    image_pixels: int | None = None
    """Their pixels, as the files have them."""
    truncated: int | None = None
    masked: int | None = None
    lengths: tuple[int, ...] | None = None
    exact: bool = False
    read: int | None = None
    """Rows of the sources that were looked at, those that are left out too."""
    total: int | None = None
    """Rows of the sources in all, where only some were looked at."""
    too_long_at: str = ""
    """File and line of the first row that is too long, where training would refuse it."""
    dropped: int | None = None
    """Rows left out because they are too long."""
    identical: int | None = None
    """Pairs left out because both answers are the same."""
    duplicates: int | None = None
    """Rows left out because an earlier one says the same; they are not among `read`."""
    bad: int | None = None
    """Rows that cannot be read."""
    bad_row: str = ""
    """The first of them and what is wrong with it."""
    template_flaws: tuple[tuple[str, int, str], ...] = ()
    """Of each flaw that the chat template has with some rows (`engine.facts.template_flaws`): its name, the number of
    rows, and where the first of them stands."""
    first_at: tuple[tuple[str, str], ...] = ()
    """Where the first row stands that is dropped, truncated, masked or identical."""
    packing_efficiency: float | None = None
    """Share of the packs that is tokens of rows."""
    problem: str = ""
    """Why training would refuse these rows, beside what the counts say; empty when it would not."""
    limits: tuple[str, ...] = ()
    """The settings that these counts hold for, as `counting_limits` gives them; empty for any."""
    held_out: DataFacts | None = None
    """The same of the held-out rows."""

    @property
    def source_rows(self) -> int | None:
        """What `truncated`, `masked`, `dropped`, `identical` and `bad` are shares of."""
        return self.read or self.rows

    @property
    def counted(self) -> Literal["all", "sample"] | None:
        """Whether every row was counted, or some of them; None for none."""
        return None if not self.source_rows else "all" if self.exact or not self.limits else "sample"

    def holds_for(self, config: RunConfig) -> bool:
        """Whether the counts were made under the limits of this config: other limits cut and leave out other rows."""
        return not self.limits or self.limits == counting_limits(config)

    def longer_than(self, length: int) -> int | None:
        """Rows of more tokens than this: told by the lengths where the counts were made for another limit."""
        if not self.lengths or not self.source_rows:
            return None
        if self.longest is not None and self.longest <= length:
            return 0
        return round(self.source_rows * sum(tokens > length for tokens in self.lengths) / len(self.lengths))

    @classmethod
    def counted_from(cls, answer: Mapping[str, Any]) -> DataFacts:
        """From what the inspector answers to `data`, which says more than the facts."""
        known = {name: answer[name] for name in cls.__dataclass_fields__ if answer.get(name) is not None}
        known |= {name: tuple(known[name]) for name in ("lengths", "limits") if name in known}
        if "template_flaws" in known:
            known["template_flaws"] = tuple((name, rows, first) for name, rows, first in known["template_flaws"])
        if "first_at" in known:
            known["first_at"] = tuple((name, place) for name, place in known["first_at"])
        if "held_out" in known:
            known["held_out"] = cls.counted_from(known["held_out"])
        return cls(**known)


def counting_limits(config: RunConfig) -> tuple[str, ...]:
    """The settings that decide what becomes of a row once it is tokenized, as texts that can be compared."""
    model, data = config.model, config.data
    # A template is named by its file wherever that lies.
    named = [source.chat_template for source in (*data.train, *data.eval)]
    template = ", ".join(Path(str(source)).name for source in (model.chat_template, *(named if any(named) else ())))
    length = (data.max_length, data.excess_length, data.truncation_side)
    packs = (data.packing, data.packing_cross_doc_attn_mask)
    images = (data.min_pixels, data.max_pixels)
    rows = (data.trained_turns, data.trained_thinking, *packs, data.on_bad_row, data.deduplicate)
    decide = (template, dict(model.chat_template_kwargs), *length, *rows, *images)
    return tuple(map(str, decide))


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
    bad: int = 0
    """Rows that cannot be read, of those looked at."""
    looked: int = 0
    bad_row: str = ""
    """The first of them and what is wrong with it, as a sentence."""
    turns: bool | None = None
    """Whether its first row is written in turns of a conversation; `False` for texts alone."""
    images: str = ""
    """The first of the rows looked at that has images, by its place such as `line 4`; empty where none has."""
    in_order: str = ""
    """The first of its files whose rows are found from the beginning alone, so that a stream does not know how many they
    are; empty where there is none."""
    several: bool = False
    """Whether it is a folder of files of rows, which a stream alone reads as one source."""
    near: str = ""
    """Where nothing is at `path`: a file of rows beside that place which was probably meant, written as `path` is."""


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """The adapter that a run goes on from, by its files."""

    path: str
    """As the config writes it."""
    folder: str = ""
    """Where its files lie: of a run, its newest checkpoint."""
    problem: str = ""
    """Why it cannot be trained further, as a sentence."""
    todo: str = ""
    """The way out of it."""
    note: str = ""
    """Of a run: why the folder is not the newest one, or may be gone when it is wanted, in sentences."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What it is, by the names of settings of `adapter`: rank, alpha, targets."""
    base: str = ""
    """The model that it was trained beside (`base_model_name_or_path`); empty where it does not say."""
    weights: int = 0
    """Tensors in its file."""
    linears: tuple[tuple[str, int, int], ...] = ()
    """The layers that it acts on as `(name, in, out)`: the last part of their names, each shape once."""


@dataclass(frozen=True, slots=True)
class CompilerWait:
    """What compiled layers of one shape took on this machine, in seconds; `None` what was not measured."""

    first: float | None = None
    """The wait of the first batch when they were compiled for the first time."""
    again: float | None = None
    """The newest wait of a later run, which finds what the compiler made before."""
    plain: float | None = None
    """From batch to batch with plain layers."""
    step: float | None = None
    """From batch to batch with compiled ones."""
    times: int = 0
    """Runs that compiled them."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One batch that was measured on a card."""

    card: str
    weights: str
    """`full` or `lora`: what is trained."""
    held: str
    """The number format of the weights, or what they are quantized to."""
    compiled: bool
    again: str
    """The value of `memory.gradient_checkpointing`."""
    layers: int
    parameters: int
    """Of the base, which each token is multiplied with."""
    width: int
    """Of all heads together."""
    tokens: int
    length: int
    """Tokens of a row."""
    seconds: float
    peak_mib: float = 0.0
    reference: float = 0.0
    """Operations a parameter and token of passes without gradients beside, 2 where there is a reference."""
    numbers: int = 0
    """What a compiled layer keeps for each token, in numbers; 0 where a table does not say."""
    vocabulary: int = 0
    """Scores of the head for each token; 0 where a table does not say."""
    held_numbers: int = 0
    """Weights of the base, where a token meets some of them alone; 0 for those that it meets."""
    of_experts: int = 0
    """What experts keep beside for each token of a layer, in numbers."""
    put_together: int = 0
    """Weights that adapters on experts are added to anew in each batch, where no kernels of theirs do without."""
    scores: int = 0
    """Heads of which attention holds all scores."""
    seeing: int = 0
    """Layers of a vision tower that look at the batch's images."""
    seen: int = 0
    """Its weights times the patches that they are multiplied with."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything known when a config is read. `given` is filled by `read`: the paths that the person wrote."""

    machine: Machine | None = None
    model: ModelFacts | None = None
    data: DataFacts | None = None
    packages: Mapping[str, str | None] | None = None
    sources: Mapping[str, SourceFacts] | None = None
    files: Mapping[str, bool] | None = None
    """Of the files that rewards name, and of the chat template, by the path as it is written: whether one is there."""
    reward_flaws: Mapping[str, str] | None = None
    """Of rewards by their text, why a function cannot be taken from its file, as a sentence with the way out."""
    tokenizer: TokenizerFacts | None = None
    adapter: AdapterFacts | None = None
    """The adapter that `adapter.path` names; `None` where that names none, or was not looked at."""
    scratch: str = ""
    """Why the folder of $WORKBENCH_SCRATCH cannot be used; empty where it is not named or of use."""
    compiler: CompilerWait | None = None
    """What layers like the model's took to compile on this machine; `None` where they never were."""
    attention_times: Mapping[str, float] | None = None
    """Milliseconds, both ways, of attention over documents like the run's on this machine, by its implementation's name."""
    step_times: tuple[StepTime, ...] = ()
    """Batches that were measured on a card like the machine's."""
    shipped_times: tuple[StepTime, ...] = ()
    """Those that come with the package: of the card with the most, from which published speeds tell any other's, then of that
    card where it is another."""
    given: frozenset[str] = frozenset()
