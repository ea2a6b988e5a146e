"""Models that judge each step of an answer."""

from typing import Annotated, ClassVar, Literal

from engine.config.kinds import Head, Kind, MethodSection, Rows
from engine.config.section import Advanced, Source, Title


class Prm(MethodSection):
    """Process reward model: the model learns to say of each step of an answer whether it is right, which finds where a
    solution goes wrong and not only that it does. It writes nothing any more. Needs rows with a prompt, the steps of an
    answer and a verdict of true or false for each, some of both."""

    kind: Annotated[Literal["prm"], Kind] = "prm"
    called: ClassVar[str] = "a process reward model"
    words: ClassVar[str] = "process reward: judge each step of an answer"
    formats: ClassVar[tuple[str, ...]] = ("stepwise_supervision",)
    rows: ClassVar[Rows] = "steps"
    head: ClassVar[Head] = "steps"
    lora_rate: ClassVar[float] = 1e-4
    full_rate: ClassVar[float] = 1e-5

    train_on_last_step_only: Annotated[
        bool, Title("Judge the last step alone"), Advanced, Source("TRL: PRMConfig.train_on_last_step_only")
    ] = False
    """Learn from the verdict of the last step only, as a model of outcomes would. The steps before it are read."""
