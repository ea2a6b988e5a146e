"""The adapter section: train all weights, or small matrices beside frozen ones."""

from typing import Annotated, Literal

from engine.config.section import Advanced, Control, Expert, Ge, Gt, Le, Lt, Section, Source, Title, Words

_Kind = Title("Adapter")
_KindWords = Words(none="none: train all weights", lora="LoRA: train small matrices beside frozen weights")


class NoAdapter(Section):
    """Full fine-tuning: every weight is trained."""

    kind: Annotated[Literal["none"], _Kind, _KindWords] = "none"
    """What is trained: `none` trains every weight, `lora` keeps the model frozen and trains small matrices beside it,
    which needs far less memory and gives checkpoints of a few MiB."""

    unfrozen_parameters: Annotated[list[str], Expert, Source("Axolotl: unfrozen_parameters")] = []
    """Train these weights alone and freeze the others: regular expressions that a weight's name must begin with, such as
    `model\\.layers\\.2[0-7]\\.` for the last 8 layers of 28. Empty trains every weight."""


class Lora(Section):
    """LoRA: the base stays frozen and small matrices beside it are trained."""

    kind: Annotated[Literal["lora"], _Kind, _KindWords] = "lora"
    """What is trained: `none` trains every weight, `lora` keeps the model frozen and trains small matrices beside it,
    which needs far less memory and gives checkpoints of a few MiB."""

    path: Annotated[
        str | None, Title("Go on from"), Control("path"), Advanced, Source("PEFT: PeftModel.from_pretrained")
    ] = None
    """Train an adapter further: its folder (`adapter_config.json` and `adapter_model.safetensors`), a checkpoint with one, or
    a run, whose newest checkpoint is taken. Rank, alpha, targets and all else that says what an adapter is come from there;
    its dropout and its number format are this run's. Empty starts a new one."""

    r: Annotated[int, Ge(1), Le(1024), Title("LoRA rank"), Source("arXiv:2106.09685")] = 16
    """The size of the small matrices. A higher rank learns more and costs more memory; 8 to 64 is usual."""

    lora_alpha: Annotated[int, Ge(1), Le(10_000), Title("LoRA alpha"), Source("arXiv:2106.09685")] = 32
    """How strongly the adapter acts: its output is scaled by alpha / rank. Twice the rank is a usual choice."""

    lora_dropout: Annotated[float, Ge(0), Lt(1), Advanced, Source("PEFT: lora_dropout")] = 0.0
    """Share of the adapter's inputs dropped at random in training, against overfitting on few rows."""

    target_modules: Annotated[str | list[str], Control("list"), Title("Targets"), Source("PEFT: target_modules")] = (
        "all-linear"
    )
    """Which layers get an adapter: `all-linear` for every linear layer but the head, a list of module names, or one
    regular expression that the whole module name must match. An empty list leaves it to `target_parameters`."""

    target_parameters: Annotated[list[str], Expert, Source("PEFT: target_parameters")] = []
    """Weights that are no linear layer and get an adapter by their names, such as `mlp.experts.gate_up_proj`: in
    mixture-of-experts models all experts of a layer are one weight of three dimensions."""

    modules_to_save: Annotated[list[str], Expert, Source("PEFT: modules_to_save")] = []
    """Modules trained whole and saved with the adapter, such as `embed_tokens` and `lm_head` for new tokens."""

    use_rslora: Annotated[bool, Title("Rank-stabilised"), Advanced, Source("arXiv:2312.03732")] = False
    """Scale the adapter by alpha / sqrt(rank) instead of alpha / rank, which keeps high ranks from going quiet."""

    use_dora: Annotated[bool, Title("DoRA"), Advanced, Source("arXiv:2402.09353")] = False
    """Train the length and the direction of the weights apart. Often a little better at low ranks, and slower."""

    loraplus_lr_ratio: Annotated[
        float | None, Ge(1), Le(1000), Title("Faster second matrices"), Advanced, Source("arXiv:2402.12354")
    ] = None
    """How many times the learning rate the second matrices learn at (LoRA+): they begin at 0, and move little at the rate that
    is right for the first. 16 is usual, with a rate half as high. Empty gives all the same rate."""

    loraplus_lr_embedding: Annotated[
        float, Gt(0), Le(1), Title("LoRA+ rate of embeddings"), Expert, Source("PEFT: create_loraplus_optimizer")
    ] = 1e-6
    """The learning rate of an adapter on embeddings beside `loraplus_lr_ratio`."""

    autocast_adapter_dtype: Annotated[
        bool, Title("Adapter in float32"), Expert, Source("PEFT: autocast_adapter_dtype")
    ] = False
    """Hold and train the adapter in float32 beside a bfloat16 model. It costs time and memory, and keeps updates that are
    too small for bfloat16. Beside float16 the adapter is always float32, as its gradients need it."""

    bias: Annotated[Literal["none", "all", "lora_only"], Expert, Source("PEFT: bias")] = "none"
    """Which bias vectors are trained as well. With `all` or `lora_only` the model without its adapter is no longer the
    base model."""


Adapter = NoAdapter | Lora
ADAPTERS: dict[str, type[NoAdapter] | type[Lora]] = {"none": NoAdapter, "lora": Lora}
