"""Methods that learn from preferences: what people or rules said about answers, without a reward model."""

from typing import Annotated, ClassVar, Literal

from engine.config.kinds import REFERENCES, Kind, MethodSection, Rows
from engine.config.method_names import CALLED
from engine.config.section import Advanced, Auto, Ge, Gt, Le, Lt, Source, Title, Words

DpoLoss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip

_ReferenceTitle = Title("Reference")
_ReferenceWords = Words(
    adapter_off="the same model, adapter switched off",
    adapter_copy="the adapter as it began, frozen",
    copy="a frozen copy of the model",
    precompute="its log-probabilities, computed once before training",
)


class Dpo(MethodSection):
    """Direct preference optimization: the model learns to prefer the chosen answer over the rejected one. Needs rows
    with a prompt, a chosen and a rejected answer; start from a model that already answers in the wanted form."""

    kind: Annotated[Literal["dpo"], Kind] = "dpo"
    called: ClassVar[str] = CALLED["dpo"]
    description: ClassVar[str] = "DPO: prefer one answer over another"
    formats: ClassVar[tuple[str, ...]] = ("preference", "ranking", "synthetic")
    rows: ClassVar[Rows] = "pairs"
    sequences: ClassVar[int] = 2
    lora_rate: ClassVar[float] = 1e-5
    full_rate: ClassVar[float] = 1e-6

    beta: Annotated[float, Gt(0), Le(100), Source("arXiv:2305.18290")] = 0.1
    """How strongly the model is held to the reference model. Small values let it move far, large ones keep it close."""

    loss_type: Annotated[DpoLoss, Title("Loss"), Advanced, Source("TRL: DPOConfig.loss_type")] = "sigmoid"
    """Which preference loss. `sigmoid` is the loss of the paper; `hinge`, `robust` and the others are its variants."""

    label_smoothing: Annotated[float, Ge(0), Lt(0.5), Advanced, Source("TRL: DPOConfig.label_smoothing")] = 0.0
    """How often the labels of a pair are assumed to be swapped. Above 0 the loss trusts noisy preferences less; used by
    the losses `exo_pair`, `robust`, `aot` and `aot_unpaired`."""

    rpo_alpha: Annotated[float, Title("Weight of likelihood"), Ge(0), Le(100), Advanced, Source("arXiv:2404.19733")] = (
        0.0
    )
    """Weight of the negative log-likelihood of a chosen token, added to the preference loss. Above 0 the model keeps
    learning to write the chosen answers, which the preference alone can make less likely together with the rejected."""

    dpo_norm_loss: Annotated[bool, Title("Means over tokens"), Advanced, Source("Axolotl: dpo_norm_loss")] = False
    """Compare answers by their mean log-probability a token, of model and reference alike, and not by its sum, which takes
    out the pull to long answers. Margins come out smaller by an answer's length: `beta` wants to be larger, about 2."""

    reference: Annotated[
        Literal["adapter_off", "adapter_copy", "copy", "precompute"] | Auto, _ReferenceTitle, _ReferenceWords
    ] = "auto"
    """Where the reference log-probabilities come from. `auto` switches the adapter off when there is one, which costs
    no memory, or keeps it as it began where training goes on from it, and otherwise keeps a frozen copy of the model."""


class Kto(MethodSection):
    """Kahneman-Tversky optimization: the model learns from single answers that were judged good or bad, such as thumbs up
    and down. Needs rows with a prompt, an answer and a label of true or false, some of each; a preference pair becomes
    one row of each. Take it where nobody compared answers side by side."""

    kind: Annotated[Literal["kto"], Kind] = "kto"
    called: ClassVar[str] = CALLED["kto"]
    description: ClassVar[str] = "KTO: more of the good answers, less of the bad ones"
    formats: ClassVar[tuple[str, ...]] = ("unpaired_preference", "preference", "ranking", "synthetic")
    rows: ClassVar[Rows] = "rated"
    # each prompt with its answer, and with the answer of another row for the estimate of the divergence
    sequences: ClassVar[int] = 2
    lora_rate: ClassVar[float] = 1e-5
    full_rate: ClassVar[float] = 1e-6

    beta: Annotated[float, Gt(0), Le(100), Source("arXiv:2402.01306")] = 0.1
    """How strongly the model is held to the reference model. Small values let it move far, large ones keep it close."""

    loss_type: Annotated[
        Literal["kto", "apo_zero_unpaired"], Title("Loss"), Advanced, Source("TRL: KTOConfig.loss_type")
    ] = "kto"
    """Which loss. `kto` is that of the paper and measures how far the model has moved on mismatched rows of each batch;
    `apo_zero_unpaired` (arXiv:2408.06266) does without that and also serves batches of one row."""

    balance_weights: Annotated[bool, Title("Balance good and bad"), Source("arXiv:2402.01306, section 4.1")] = True
    """Weigh the rarer sort of rows up, so that good and bad answers count the same in all. The weights taken stand in the
    receipt."""

    desirable_weight: Annotated[float, Gt(0), Le(1000), Advanced, Source("TRL: KTOConfig.desirable_weight")] = 1.0
    """A further weight of the good answers."""

    undesirable_weight: Annotated[float, Gt(0), Le(1000), Advanced, Source("TRL: KTOConfig.undesirable_weight")] = 1.0
    """A further weight of the bad answers."""

    reference: Annotated[
        Literal["adapter_off", "adapter_copy", "copy"] | Auto,
        _ReferenceTitle,
        REFERENCES,
    ] = "auto"
    """Where the reference log-probabilities come from. `auto` switches the adapter off when there is one, which costs
    no memory, or keeps it as it began where training goes on from it, and otherwise keeps a frozen copy of the model. They
    cannot be computed ahead: they depend on which rows meet in a batch."""


class Ipo(MethodSection):
    """Identity preference optimization: like DPO, but the margin between the two answers is led to a fixed size instead of
    growing without end. Needs rows with a prompt, a chosen and a rejected answer. Take it where DPO overfits: few pairs,
    or the same answer always preferred."""

    kind: Annotated[Literal["ipo"], Kind] = "ipo"
    called: ClassVar[str] = CALLED["ipo"]
    description: ClassVar[str] = "IPO: prefer one answer over another, by a fixed margin"
    formats: ClassVar[tuple[str, ...]] = ("preference", "ranking", "synthetic")
    rows: ClassVar[Rows] = "pairs"
    sequences: ClassVar[int] = 2
    lora_rate: ClassVar[float] = 1e-5
    full_rate: ClassVar[float] = 1e-6

    beta: Annotated[float, Gt(0), Le(100), Source("arXiv:2310.12036, tau")] = 0.1
    """How strongly the model is held to the reference model: the margin a token is led to 1 / (2 * beta)."""

    reference: Annotated[
        Literal["adapter_off", "adapter_copy", "copy", "precompute"] | Auto, _ReferenceTitle, _ReferenceWords
    ] = "auto"
    """Where the reference log-probabilities come from. `auto` switches the adapter off when there is one, which costs
    no memory, or keeps it as it began where training goes on from it, and otherwise keeps a frozen copy of the model."""


class Simpo(MethodSection):
    """Simple preference optimization: like DPO without any reference model, so it needs less memory and time; answers are
    compared by their mean log-probability, which takes out the pull to long answers. Needs rows with a prompt, a chosen
    and a rejected answer, and a model that was fine-tuned before: nothing holds it to where it started."""

    kind: Annotated[Literal["simpo"], Kind] = "simpo"
    called: ClassVar[str] = CALLED["simpo"]
    description: ClassVar[str] = "SimPO: prefer one answer over another, without a reference"
    formats: ClassVar[tuple[str, ...]] = ("preference", "ranking", "synthetic")
    rows: ClassVar[Rows] = "pairs"
    sequences: ClassVar[int] = 2
    lora_rate: ClassVar[float] = 1e-5
    full_rate: ClassVar[float] = 1e-6

    beta: Annotated[float, Gt(0), Le(100), Title("Scale of the reward"), Source("arXiv:2405.14734")] = 2.0
    """By how much the mean log-probability a token is multiplied to give an answer's reward. The paper takes 2 to 10."""

    simpo_gamma: Annotated[
        float, Ge(0), Le(100), Title("Margin"), Source("arXiv:2405.14734; TRL: CPOConfig.simpo_gamma")
    ] = 1.0
    """By how much the chosen answer's reward shall exceed the rejected one's. The paper takes 0.1 to 0.8 times `beta`."""

    cpo_alpha: Annotated[
        float, Ge(0), Le(100), Title("Weight of the chosen answer"), Advanced, Source("TRL: CPOConfig.cpo_alpha")
    ] = 0.0
    """Above 0 the chosen answer is also learned as in SFT, with this weight. That keeps its log-probability from falling
    with the rejected one's."""


class Orpo(MethodSection):
    """Odds ratio preference optimization: learns the chosen answers as SFT does and in the same step pushes the rejected
    ones away, without any reference model. Needs rows with a prompt, a chosen and a rejected answer; serves a base model
    that was not fine-tuned before."""

    kind: Annotated[Literal["orpo"], Kind] = "orpo"
    called: ClassVar[str] = CALLED["orpo"]
    description: ClassVar[str] = "ORPO: learn answers and preferences in one go"
    formats: ClassVar[tuple[str, ...]] = ("preference", "ranking", "synthetic")
    rows: ClassVar[Rows] = "pairs"
    sequences: ClassVar[int] = 2
    lora_rate: ClassVar[float] = 5e-5
    full_rate: ClassVar[float] = 8e-6

    beta: Annotated[float, Gt(0), Le(100), Title("Weight of the preference"), Source("arXiv:2403.07691, lambda")] = 0.1
    """How much the preference counts beside learning the chosen answer, which counts 1."""
