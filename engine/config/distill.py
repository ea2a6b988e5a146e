"""Distillation: a small model learns from the probabilities that a larger one gave to each next token."""

from typing import Annotated, ClassVar, Literal

from engine.config.kinds import Kind, MethodSection, Rows
from engine.config.method_names import CALLED
from engine.config.section import Advanced, Ge, Gt, Le, Source, Title


class Distill(MethodSection):
    """Knowledge distillation: the model learns which tokens a teacher held for likely and how likely, which tells more of
    each token than the text alone. Needs rows of tokens with the teacher's most likely tokens and their log-probabilities
    at each place, stored before training; teacher and model must share their vocabulary. No teacher is loaded."""

    kind: Annotated[Literal["distill"], Kind] = "distill"
    called: ClassVar[str] = CALLED["distill"]
    description: ClassVar[str] = "distillation: learn from a teacher's probabilities"
    formats: ClassVar[tuple[str, ...]] = ("distill",)
    rows: ClassVar[Rows] = "distill"
    lora_rate: ClassVar[float] = 2e-4
    full_rate: ClassVar[float] = 2e-5

    kd_alpha: Annotated[float, Gt(0), Le(100), Title("Weight of the teacher"), Source("arXiv:1503.02531")] = 0.9
    """How much the divergence from the teacher's probabilities counts (KL, teacher to model)."""

    kd_ce_alpha: Annotated[float, Ge(0), Le(100), Title("Weight of the text"), Source("arXiv:1503.02531")] = 0.1
    """How much the text itself counts: the cross-entropy of the tokens in the row, as in SFT."""

    kd_temperature: Annotated[float, Gt(0), Le(100), Title("Temperature"), Advanced, Source("arXiv:1503.02531")] = 1.0
    """Above 1 the teacher's less likely tokens count for more; both distributions are softened alike. 1 takes them as they
    were stored, and is the fastest."""
