"""The method section: how the model learns. Each kind is a section of its own, told apart by `kind`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.config.section import Advanced, Auto, Ge, Gt, Le, Lt, Section, Source, Title, Words

KINDS_LATER = (
    "ipo", "simpo", "orpo", "kto", "grpo", "gdpo", "ppo", "reward", "prm", "embedding", "distill",
)  # fmt: skip
"""Kinds that the schema reserves and this version does not train yet."""

_Kind = Title("Method")
_KindWords = Words(
    sft="SFT: learn to answer like the examples",
    pretrain="pretraining: read plain text",
    dpo="DPO: prefer one answer over another",
)


class Sft(Section):
    """Supervised fine-tuning: the model learns to give the answers in the examples. Which turns are learned is
    `data.trained_turns`."""

    kind: Annotated[Literal["sft"], _Kind, _KindWords] = "sft"
    """How the model learns: `sft` from example answers, `pretrain` from plain text, `dpo` from pairs of a better and a
    worse answer."""


class Pretrain(Section):
    """(Continued) pretraining: the model learns every token of plain text."""

    kind: Annotated[Literal["pretrain"], _Kind, _KindWords] = "pretrain"
    """How the model learns: `sft` from example answers, `pretrain` from plain text, `dpo` from pairs of a better and a
    worse answer."""


DpoLoss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip


class Dpo(Section):
    """Direct preference optimization: the model learns to prefer the chosen answer over the rejected one."""

    kind: Annotated[Literal["dpo"], _Kind, _KindWords] = "dpo"
    """How the model learns: `sft` from example answers, `pretrain` from plain text, `dpo` from pairs of a better and a
    worse answer."""

    beta: Annotated[float, Gt(0), Le(100), Source("arXiv:2305.18290")] = 0.1
    """How strongly the model is held to the reference model. Small values let it move far, large ones keep it close."""

    loss_type: Annotated[DpoLoss, Title("Loss"), Advanced, Source("TRL: DPOConfig.loss_type")] = "sigmoid"
    """Which preference loss. `sigmoid` is the loss of the paper; `hinge`, `robust` and the others are its variants."""

    label_smoothing: Annotated[float, Ge(0), Lt(0.5), Advanced, Source("TRL: DPOConfig.label_smoothing")] = 0.0
    """How often the labels of a pair are assumed to be swapped. Above 0 the loss trusts noisy preferences less; used by
    the losses `sigmoid`, `exo_pair` and `robust`."""

    reference: Annotated[
        Literal["adapter_off", "copy", "precompute"] | Auto,
        Words(
            adapter_off="the same model, adapter switched off",
            copy="a frozen copy of the model",
            precompute="its log-probabilities, computed once before training",
        ),
    ] = "auto"
    """Where the reference log-probabilities come from. `auto` switches the adapter off when there is one, which costs
    no memory, and otherwise keeps a frozen copy of the model."""


Method = Annotated[Sft | Pretrain | Dpo, Field(discriminator="kind")]
METHODS: dict[str, type[Sft] | type[Pretrain] | type[Dpo]] = {"sft": Sft, "pretrain": Pretrain, "dpo": Dpo}
