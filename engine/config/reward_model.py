"""Models that judge: a score for a whole answer, or a verdict on each of its steps."""

from typing import Annotated, ClassVar, Literal

from engine.config.kinds import Head, Kind, MethodSection, Rows
from engine.config.method_names import CALLED
from engine.config.section import Advanced, Ge, Le, Source, Title


class Reward(MethodSection):
    """Reward model: the model learns to give an answer a score, higher for the chosen answer than for the rejected one. It
    writes nothing any more: a head of one number takes the place of the vocabulary. Needs rows with a prompt, a chosen and
    a rejected answer. Take it to judge answers, or as a reward for GRPO where no rule can tell good from bad."""

    kind: Annotated[Literal["reward"], Kind] = "reward"
    called: ClassVar[str] = CALLED["reward"]
    description: ClassVar[str] = "reward model: give answers a score"
    formats: ClassVar[tuple[str, ...]] = ("preference", "ranking", "synthetic")
    rows: ClassVar[Rows] = "pairs"
    head: ClassVar[Head] = "score"
    sequences: ClassVar[int] = 2
    lora_rate: ClassVar[float] = 1e-4
    full_rate: ClassVar[float] = 1e-5

    center_rewards_coefficient: Annotated[
        float | None, Ge(0), Le(100), Title("Centre the scores"), Advanced, Source("arXiv:2312.09244")
    ] = None
    """Pulls the scores of each pair to a mean of zero, with this weight; 0.01 is usual. Empty leaves them where they fall:
    only their differences are learned."""


class Prm(MethodSection):
    """Process reward model: the model learns to say of each step of an answer whether it is right, which finds where a
    solution goes wrong and not only that it does. It writes nothing any more. Needs rows with a prompt, the steps of an
    answer and a verdict of true or false for each, some of both."""

    kind: Annotated[Literal["prm"], Kind] = "prm"
    called: ClassVar[str] = CALLED["prm"]
    description: ClassVar[str] = "process reward: judge each step of an answer"
    formats: ClassVar[tuple[str, ...]] = ("stepwise_supervision",)
    rows: ClassVar[Rows] = "steps"
    head: ClassVar[Head] = "steps"
    lora_rate: ClassVar[float] = 1e-4
    full_rate: ClassVar[float] = 1e-5

    train_on_last_step_only: Annotated[
        bool, Title("Judge the last step alone"), Advanced, Source("TRL: PRMConfig.train_on_last_step_only")
    ] = False
    """Learn from the verdict of the last step only, as a model of outcomes would. The steps before it are read."""
