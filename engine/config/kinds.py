"""What every kind of method says about itself: one class a kind, and nothing about it anywhere else.

A kind's class docstring says when to use it and what data it needs; its class variables say in words what it is, which
data formats it learns from, what a prepared row holds and which learning rates `auto` takes. Tables elsewhere (rules,
rates, forms, the reference page) are made from these, so a new kind is a class and its line in `engine.config.method`.
"""

from typing import Annotated, ClassVar, Literal

from engine.config.section import Section, Title, Words

BUILTIN_MODELS = ("builtin/tiny", "builtin/tiny-vl")
SYNTHETIC = "builtin/synthetic"
TOKENS = 512
"""The length of a synthetic row where its source names none."""
BUILTIN_ROWS = ("builtin/dates", "builtin/shapes", SYNTHETIC)
"""Models and rows that come with the product: each pair is a demo, the first of text and the second of images. The last rows
are tokens drawn by chance, as many as one likes (`format: synthetic`)."""
BUILTIN_SPLITS = ("train", "eval")

Rows = Literal["language", "pairs", "rated", "steps", "texts", "distill", "prompts"]
"""What a prepared row holds: ids and labels; a prompt with two answers; a prompt with an answer and a verdict; an answer
in judged steps; texts to embed; ids with a teacher's log-probabilities; a prompt alone."""

NEEDS: dict[Rows, str] = {
    "language": "conversations, prompts with answers, or text",
    "pairs": "preference pairs (chosen and rejected)",
    "rated": "answers with a verdict (label is true or false)",
    "steps": "answers in steps with a verdict for each (completions and labels)",
    "texts": "texts that belong together (anchor and positive), or two texts with a score",
    "distill": "tokens with a teacher's log-probabilities",
    "prompts": "prompts, or conversations to take them from",
}
"""What the rows of a method must be, in words."""

EXAMPLES: dict[str, str] = {
    "messages": '{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}',
    "text": '{"text": "A page of what it shall read."}',
    "preference": '{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}',
    "ranking": '{"prompt": "2 + 2?", "output": ["4", "5"]}',
    "unpaired_preference": '{"prompt": "2 + 2?", "completion": "4", "label": true}',
    "prompts": '{"prompt": "2 + 2?", "answer": "4"}',
    "stepwise_supervision": '{"prompt": "2 + 2 + 2?", "completions": ["2 + 2 = 4.", "4 + 2 = 7."], "labels": [true, false]}',
    "embedding": '{"anchor": "2 + 2?", "positive": "two and two make four", "negative": "five is odd"}',
    "distill": '{"input_ids": [5, 6], "target_token_ids": [[], [6, 9]], "target_logprobs": [[], [-0.1, -2.4]]}',
}
"""One row of each format as it may stand in a JSONL file, for whoever has none yet."""

Head = Literal["vocabulary", "score", "steps", "none"]
"""What stands on top of the model: its vocabulary; one number; a verdict for each token; nothing."""

LOADERS: dict[Head, str] = {
    "vocabulary": "AutoModelForCausalLM",
    "score": "AutoModelForSequenceClassification",
    "steps": "AutoModelForTokenClassification",
    "none": "AutoModel",
}
"""The transformers class for what a method puts on top of the model."""

SEEING = "AutoModelForImageTextToText"
"""The class of models that write and see, of which some are not among those that write alone."""


LABELS: dict[Head, dict[str, int]] = {"score": {"num_labels": 1}, "steps": {"num_labels": 2}}
"""What transformers' config of a model says of a head that is put in the place of its own."""


def loader_of(head: Head, served: frozenset[str] | None) -> str:
    """The transformers class that loads a model of an architecture that these serve; `None` where that is not known. One that
    sees is loaded whole: of Qwen3.5 and Llama 4 the class for text takes the language model alone, and images reach no one."""
    return SEEING if head == "vocabulary" and served and SEEING in served else LOADERS[head]


LANGUAGE_FORMATS = ("messages", "sharegpt", "alpaca", "prompt_completion", "tokens", "synthetic")
Kind = Title("Method")
REFERENCES = Words(
    adapter_off="the same model, adapter switched off",
    adapter_copy="the adapter as it began, frozen",
    copy="a frozen copy of the model",
)
"""Where a reference comes from, in words."""


class MethodSection(Section):
    """The base of every kind of method."""

    kind: Annotated[str, Kind]
    """How the model learns. Each kind needs its own sort of rows; the words beside it say which."""

    called: ClassVar[str]
    """Its name in a sentence: `DPO`."""
    description: ClassVar[str]
    """What it does, for a list of choices: `DPO: prefer one answer over another`."""
    formats: ClassVar[tuple[str, ...]]
    """The data formats it learns from."""
    rows: ClassVar[Rows]
    """What one of its prepared rows holds."""
    head: ClassVar[Head] = "vocabulary"
    """What it puts on top of the model. Without a vocabulary the model writes nothing, so nothing can be sampled."""
    sequences: ClassVar[int] = 1
    """Sequences that one row becomes in a batch."""
    lora_rate: ClassVar[float]
    """The learning rate that `auto` takes with an adapter."""
    full_rate: ClassVar[float]
    """The learning rate that `auto` takes when every weight is trained."""


def example_row(method: type[MethodSection]) -> str:
    """A row that the method learns from, as it stands in a file; empty where no format of it has an example."""
    return next((EXAMPLES[name] for name in method.formats if name in EXAMPLES), "")


def needs_of(method: type[MethodSection]) -> str:
    """What data the method needs: the sentence of its docstring that says so."""
    sentences = " ".join((method.__doc__ or "").split()).split(". ")
    sentence_of_needs = next((sentence for sentence in sentences if sentence.startswith("Needs ")), "")
    return f"{sentence_of_needs.rstrip('.')}." if sentence_of_needs else ""


def reference_of(method: MethodSection) -> str | None:
    """Where a method's reference comes from; None for one that has none, or gives it no weight."""
    reference: str | None = getattr(method, "reference", None)
    return reference if getattr(method, "beta", 0.0) > 0 else None
