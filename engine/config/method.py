"""The method section: how the model learns. Each kind is a section of its own, told apart by `kind`.

A new kind is a class (see `engine.config.kinds`) and one line in each of the two tables below.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from engine.config.distill import Distill
from engine.config.embedding import Embedding
from engine.config.kinds import LANGUAGE_FORMATS, Kind, MethodSection, Rows
from engine.config.preference import Dpo, Ipo, Kto, Orpo, Simpo
from engine.config.process_reward import Prm
from engine.config.reward_model import Reward
from engine.config.rollouts import Gdpo, Grpo, Ppo


class Sft(MethodSection):
    """Supervised fine-tuning: the model learns to give the answers in the examples. Needs conversations, or prompts
    with their answers. Which turns are learned is `data.trained_turns`."""

    kind: Annotated[Literal["sft"], Kind] = "sft"
    called: ClassVar[str] = "SFT"
    words: ClassVar[str] = "SFT: learn to answer like the examples"
    formats: ClassVar[tuple[str, ...]] = LANGUAGE_FORMATS
    rows: ClassVar[Rows] = "language"
    lora_rate: ClassVar[float] = 2e-4
    full_rate: ClassVar[float] = 2e-5


class Pretrain(MethodSection):
    """(Continued) pretraining: the model learns every token of plain text. Needs rows of text, with no answers in
    them."""

    kind: Annotated[Literal["pretrain"], Kind] = "pretrain"
    called: ClassVar[str] = "pretraining"
    words: ClassVar[str] = "pretraining: read plain text"
    formats: ClassVar[tuple[str, ...]] = ("text", "tokens")
    rows: ClassVar[Rows] = "language"
    lora_rate: ClassVar[float] = 1e-4
    full_rate: ClassVar[float] = 5e-5


Method = Annotated[
    Sft
    | Pretrain
    | Dpo
    | Ipo
    | Simpo
    | Orpo
    | Kto
    | Reward
    | Prm
    | Embedding
    | Distill
    | Grpo
    | Gdpo
    | Ppo,
    Field(discriminator="kind"),
]  # fmt: skip
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
