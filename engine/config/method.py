"""The method section: how the model learns. Each kind is a section of its own, told apart by `kind`.

A new kind is a class (see `engine.config.kinds`), one line in each of the two tables below and what it is called in
`engine.config.method_names`.
"""

from typing import Annotated, ClassVar, Literal

from engine.config.distill import Distill
from engine.config.embedding import Embedding
from engine.config.kinds import LANGUAGE_FORMATS, Kind, MethodSection, Rows
from engine.config.method_names import CALLED
from engine.config.preference import Dpo, Ipo, Kto, Orpo, Simpo
from engine.config.reward_model import Prm, Reward
from engine.config.rollouts import Gdpo, Grpo, Ppo
from engine.config.section import Advanced, Ge, Le, Lt, Source, Title


class CrossEntropy(MethodSection):
    """The base of methods that learn tokens by their cross-entropy and nothing else."""

    label_smoothing: Annotated[float, Ge(0), Lt(1), Advanced, Source("arXiv:1512.00567")] = 0.0
    """A share of each token's weight that goes to all tokens of the vocabulary alike, so that the model grows less sure. 0.1
    is usual, 0 is the plain loss. Losses of held-out rows have it too. It is computed by `kernels.use_cut_ce`."""

    z_loss: Annotated[float, Ge(0), Le(1), Title("Z-loss"), Advanced, Source("arXiv:2204.02311")] = 0.0
    """Weight of the squared logarithm of the sum that a token's scores are normalised by, added to its loss. It keeps scores
    from drifting far from 0 in long training; PaLM takes 1e-4. It is computed by `kernels.use_cut_ce`."""


class Sft(CrossEntropy):
    """Supervised fine-tuning: the model learns to give the answers in the examples. Needs conversations, or prompts
    with their answers. Which turns are learned is `data.trained_turns`."""

    kind: Annotated[Literal["sft"], Kind] = "sft"
    called: ClassVar[str] = CALLED["sft"]
    description: ClassVar[str] = "SFT: learn to answer like the examples"
    formats: ClassVar[tuple[str, ...]] = LANGUAGE_FORMATS
    rows: ClassVar[Rows] = "language"
    lora_rate: ClassVar[float] = 2e-4
    full_rate: ClassVar[float] = 2e-5


class Pretrain(CrossEntropy):
    """(Continued) pretraining: the model learns every token of plain text, also of text with images, whose own tokens are
    read and not learned. Needs rows of text, with no answers in them."""

    kind: Annotated[Literal["pretrain"], Kind] = "pretrain"
    called: ClassVar[str] = CALLED["pretrain"]
    description: ClassVar[str] = "pretraining: read plain text"
    formats: ClassVar[tuple[str, ...]] = ("text", "tokens", "synthetic", "multimodal_pretrain")
    rows: ClassVar[Rows] = "language"
    lora_rate: ClassVar[float] = 1e-4
    full_rate: ClassVar[float] = 5e-5


Method = Sft | Pretrain | Dpo | Ipo | Simpo | Orpo | Kto | Reward | Prm | Embedding | Distill | Grpo | Gdpo | Ppo
METHODS: dict[str, type[MethodSection]] = {
    "sft": Sft,
    "pretrain": Pretrain,
    "dpo": Dpo,
    "ipo": Ipo,
    "simpo": Simpo,
    "orpo": Orpo,
    "kto": Kto,
    "reward": Reward,
    "prm": Prm,
    "embedding": Embedding,
    "distill": Distill,
    "grpo": Grpo,
    "gdpo": Gdpo,
    "ppo": Ppo,
}

# (method, adapter) -> learning rate, from each kind's own class. LoRA takes about ten times the rate of full weights
# (arXiv:2106.09685 and the PEFT examples); preference losses move a trained model and want far less (arXiv:2305.18290
# uses 1e-6).
LEARNING_RATES: dict[tuple[str, str], float] = {
    (kind, adapter): rate
    for kind, section in METHODS.items()
    for adapter, rate in (("lora", section.lora_rate), ("none", section.full_rate))
}


SEEING = ("dpo", "ipo", "simpo", "orpo", "kto", "grpo", "gdpo")
"""Methods that learn from rows with images, beside those of plain language."""


def learns_from_images(method: str) -> bool:
    """Whether this method learns from rows with images."""
    return METHODS[method].rows == "language" or method in SEEING


def seeing_methods(method: str) -> str:
    """What to take in the place of a method that does not, in words: methods that learn from such rows."""
    return "grpo or gdpo" if METHODS[method].rows == "prompts" else "sft, dpo or kto"
