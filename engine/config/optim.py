"""The optim section: how fast and how long the weights move. Names are those of transformers' TrainingArguments."""

from typing import Annotated, Any, Literal

from engine.config.section import Advanced, Auto, Control, Expert, Ge, Gt, Le, Lt, Section, Source, Title, Unit, Words

Optimizer = Literal[
    "adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop", "adamw_8bit", "paged_adamw_8bit",
    "lion_32bit", "lion_8bit", "ademamix", "ademamix_8bit", "muon", "adopt", "came", "flash_adamw",
    "schedule_free_adamw", "dion", "galore_adamw", "q_galore_adamw_8bit",
]  # fmt: skip
Scheduler = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "constant", "constant_with_warmup"
]


class Optim(Section):
    """Learning rate, batch and length of the training."""

    learning_rate: Annotated[Annotated[float, Gt(0), Le(10)] | Auto, Title("Learning rate")] = "auto"
    """How far the weights move in each step. Too high and training breaks, too low and nothing is learned. `auto` takes
    the usual rate for the method and the adapter."""

    per_device_train_batch_size: Annotated[int, Ge(1), Le(65_536), Title("Batch size"), Unit("rows")] = 4
    """How many rows one device handles at once. The main lever on memory besides the length of rows."""

    per_device_eval_batch_size: Annotated[
        int | None, Ge(1), Le(65_536), Title("Eval batch size"), Unit("rows"), Expert
    ] = None
    """The same for held-out rows. Empty means the training batch size."""

    gradient_accumulation_steps: Annotated[int, Ge(1), Le(65_536), Title("Gradient accumulation"), Unit("batches")] = 2
    """How many batches are summed before the weights move. It makes the effective batch larger without more memory."""

    num_train_epochs: Annotated[float, Gt(0), Le(10_000), Title("Epochs")] = 1.0
    """How many times the data is read. One to three is usual for fine-tuning."""

    max_steps: Annotated[int | None, Ge(1), Le(1_000_000_000), Title("Stop after"), Unit("steps"), Advanced] = None
    """Stop after so many optimizer steps, whatever the epochs. Empty means that the epochs decide."""

    optim: Annotated[
        Optimizer,
        Title("Optimizer"),
        Words(
            adamw_8bit="adamw_8bit, AdamW with states of 8 bits",
            paged_adamw_8bit="paged_adamw_8bit, the same, and states move to the host when the card is full",
            lion_32bit="lion_32bit, one state a weight; wants a smaller rate",
            lion_8bit="lion_8bit, the least memory of these",
            ademamix="ademamix, AdamW with a second, slow memory of gradients",
            ademamix_8bit="ademamix_8bit, the same with states of 8 bits",
            muon="muon, orthogonal steps for the matrices of the layers, AdamW for the rest; one state a matrix",
            adopt="adopt, AdamW that converges with any beta 2",
            came="came, about half of AdamW's states; holds back updates that are not sure",
            flash_adamw="flash_adamw, AdamW with states of 8 bits, and weights of 16 bits that move as if they had 24",
            schedule_free_adamw="schedule_free_adamw, AdamW that averages its weights in place of a falling rate",
            dion="dion, orthogonal steps of low rank for the matrices of the layers, AdamW for the rest",
            galore_adamw="galore_adamw, every weight is trained with states of a low rank",
            q_galore_adamw_8bit="q_galore_adamw_8bit, the same with states of 8 bits and projections of 4",
        ),
        Advanced,
        Source("transformers: optim"),
    ] = "adamw_torch_fused"
    """Which optimizer moves the weights. AdamW is the usual one; Adafactor needs less memory. Those of 8 bits and 32 bits,
    Lion (arXiv:2302.06675) and AdEMAMix (arXiv:2409.03137) come from the package bitsandbytes, ADOPT (arXiv:2411.02853),
    CAME (arXiv:2307.02047) and FlashAdamW (arXiv:2602.23349, in plain torch) from pytorch-optimizer, schedule-free AdamW
    (arXiv:2405.15682) from schedulefree. Muon (arXiv:2502.16982) is torch's; with LoRA it takes each of the two factors as
    a matrix. Dion (arXiv:2504.05295) and Q-GaLore (arXiv:2407.08296, on bitsandbytes) are our own, GaLore
    (arXiv:2403.03507) is pytorch-optimizer's."""

    optim_args: Annotated[dict[str, Any], Title("Optimizer's own"), Control("mapping"), Expert] = {}
    """Settings that only the chosen optimizer has, each with its bounds. What is left out has its default."""

    optim_target_modules: Annotated[
        str | list[str],
        Control("list"),
        Title("Projected layers"),
        Expert,
        Source("transformers: optim_target_modules"),
    ] = "all-linear"
    """Layers whose gradients GaLore and Q-GaLore project: `all-linear` for every linear layer but the head, a list of
    names or parts of names such as `mlp`, or one regular expression that the whole name must match."""

    lr_scheduler_type: Annotated[Scheduler, Title("Schedule"), Advanced, Source("transformers: lr_scheduler_type")] = (
        "linear"
    )
    """How the learning rate changes over the run. `linear` and `cosine` fall to 0 at the end; `constant` stays."""

    lr_scheduler_kwargs: Annotated[
        dict[str, Any],
        Title("Schedule's own"),
        Control("mapping"),
        Expert,
        Source("transformers: lr_scheduler_kwargs"),
    ] = {}
    """Settings that only the chosen schedule has, each with its bounds: how often `cosine_with_restarts` begins anew, where
    and how `polynomial` falls. What is left out has its default."""

    warmup_steps: Annotated[
        float, Ge(0), Le(1_000_000_000), Title("Warm-up"), Advanced, Source("transformers: warmup_steps")
    ] = 0.0
    """Steps over which the learning rate rises from 0. A value below 1 is a share of all steps: 0.03 means 3 %."""

    weight_decay: Annotated[float, Ge(0), Le(10), Advanced, Source("arXiv:1711.05101")] = 0.0
    """How strongly weights are pulled towards 0. 0 is usual for fine-tuning, 0.1 for pretraining."""

    adam_beta1: Annotated[float, Ge(0), Lt(1), Title("Adam beta 1"), Expert, Source("arXiv:1412.6980")] = 0.9
    """How long AdamW remembers the direction of past gradients."""

    adam_beta2: Annotated[float, Ge(0), Lt(1), Title("Adam beta 2"), Expert, Source("arXiv:1412.6980")] = 0.999
    """How long AdamW remembers the size of past gradients. 0.95 is usual for pretraining."""

    adam_epsilon: Annotated[float, Gt(0), Le(1), Expert, Source("arXiv:1412.6980")] = 1e-8
    """A small number that keeps AdamW from dividing by 0."""

    max_grad_norm: Annotated[float, Ge(0), Le(1_000_000), Title("Clip gradients at"), Advanced] = 1.0
    """Longer gradients are shortened to this length, which keeps one odd batch from breaking the run. 0 means never."""

    neftune_noise_alpha: Annotated[
        float | None, Gt(0), Le(1000), Title("Noise on embeddings"), Advanced, Source("arXiv:2310.05914")
    ] = None
    """Add noise to the embeddings in training (NEFTune), against learning answers by heart: uniform within alpha / sqrt(L d)
    for rows of L tokens, padding or a whole pack counted, and d numbers a token. 5 is usual. Held-out rows and samples have
    none. Empty means none."""

    early_stopping_patience: Annotated[
        int | None,
        Ge(1),
        Le(1_000_000),
        Title("Stop when no better for"),
        Unit("evaluations"),
        Advanced,
    ] = None
    """End the run once so many evaluations in a row were no better than the best one before them. Empty means never.
    `run.metric_for_best_model` says what is compared."""

    early_stopping_threshold: Annotated[
        float,
        Ge(0),
        Le(1_000_000),
        Title("Better by more than"),
        Advanced,
        Source("transformers: EarlyStoppingCallback"),
    ] = 0.0
    """How much better than the best one before it an evaluation must be to count as better for `early_stopping_patience`. The
    best checkpoint is the best one in any case."""

    tf32: Annotated[bool | Auto, Title("TF32"), Expert, Source("transformers: tf32")] = "auto"
    """Let the GPU multiply float32 numbers faster with slightly fewer digits. `auto` turns it on where the card has it."""

    bf16_full_eval: Annotated[bool, Title("Evaluate in bfloat16"), Expert, Source("transformers: bf16_full_eval")] = (
        False
    )
    """Compute held-out rows with bfloat16 weights while training in float32: faster on a GPU, about as exact, and beside the
    weights a copy of half their size is held meanwhile."""
