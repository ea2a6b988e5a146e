"""What this version does not do yet, by the names that other tools give it: each is refused with its own sentence.

One table, from which follow the sentences of the reader and the README's list. And files that are no trainings at all:
`other_file` says what such a file is for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Absent:
    """One thing that is not here yet: its name in the README, the keys that ask for it, and what there is instead."""

    what: str
    keys: tuple[str, ...]
    prefixes: tuple[str, ...]
    instead: str

    @property
    def sentence(self) -> str:
        """The answer to a key that asks for it."""
        return f"Not here yet: {self.what}. {self.instead}"


ABSENT = (
    Absent(
        "sizes of images other than pixel limits",
        ("processor_type", "images", "image_size", "image_resize_algorithm", "image_processor", "is_multimodal"),
        ("image_",),
        "data.min_pixels and data.max_pixels limit the size; columns of a source says which column holds images.",
    ),
    Absent(
        "sound and video",
        ("freeze_language_model",),
        ("video_", "audio_", "vision_"),
        "Train on text and images; model.train_vision says which parts that see learn.",
    ),
    Absent(
        "a buffer that mixes a stream",
        ("buffer_size", "streaming_multipack_buffer_size", "mix_strategy", "interleave_probs"),
        ("streaming_",),
        "data.streaming mixes shards and the rows in each; a source's weight says how often its rows come.",
    ),
    Absent(
        "FSDP1 and settings of FSDP by other names",
        ("fsdp", "fsdp_config"),
        ("fsdp_",),
        "distributed.strategy: fsdp2 shares the model out over run.devices, layer by layer.",
    ),
    Absent(
        "DeepSpeed",
        ("deepspeed", "ds_config"),
        ("deepspeed_", "zero_", "zero3_"),
        "distributed.strategy: fsdp2 shares weights, gradients and optimizer states out over run.devices, as its stage 3 does.",
    ),
    Absent(
        "tensor and pipeline parallelism",
        ("tp_size", "pp_size"),
        ("tensor_parallel", "pipeline_parallel", "pipeline_model_parallel", "tensor_model_parallel"),
        "With run.devices above 1 each GPU takes batches of its own; distributed.context_parallel_size divides rows over them, "
        "and distributed.expert_parallel_size the experts of a mixture.",
    ),
    Absent(
        "vLLM and SGLang for sampled answers",
        ("use_vllm", "vllm", "use_sglang", "sglang"),
        ("vllm_", "sglang_"),
        "Answers are sampled by the model that is trained.",
    ),
    Absent(
        "PiSSA, LoftQ and other starts of an adapter",
        ("init_lora_weights", "peft_init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern",
         "alpha_pattern", "create_new_adapter"),
        ("pissa_", "loftq", "eva_", "corda_"),
        "adapter.use_dora and adapter.use_rslora are.",
    ),
    Absent(
        "BAdam, APOLLO, LISA, ReLoRA, OFT and block expansion",
        ("use_badam", "use_apollo", "relora", "use_llama_pro", "spectrum", "jagged_restart_steps"),
        ("badam_", "apollo_", "lisa_", "relora_", "oft_"),
        "optim.optim has GaLore and Q-GaLore, adapter.unfrozen_parameters trains some weights alone.",
    ),
    Absent(
        "Unsloth and plugins",
        ("plugins", "use_unsloth", "use_unsloth_gc", "unsloth"),
        ("unsloth_",),
        "The section kernels has the workbench's own.",
    ),
    Absent(
        "losses and layer norms of Liger",
        ("use_liger_loss", "dpo_use_liger_kernel", "liger_layer_norm", "liger_fused_linear_cross_entropy", "liger_cross_entropy"),
        (),
        "kernels.use_cut_ce computes losses without the scores of a whole batch; kernels.use_liger_kernel takes norms, rotations "
        "and gates.",
    ),
    Absent(
        "new tokens and changed special tokens",
        ("added_tokens_overrides", "new_special_tokens", "add_special_tokens", "add_tokens", "resize_vocab", "tokens",
         "resize_token_embeddings_to_32x", "fix_untrained_tokens"),
        (),
        "model.tokenizer names a tokenizer that has them already.",
    ),
    Absent(
        "uploads of data sets, to a branch, or with a token in the config",
        ("push_dataset_to_hub", "export_hub_model_id", "hub_token", "hub_revision", "hub_always_push"),
        ("push_to_hub_",),
        "run.push_to_hub sends checkpoints to run.hub_model_id with the token of `hf auth login` or HF_TOKEN, and "
        "`workbench push RUN` sends a model when it is done.",
    ),
    Absent(
        "trackers other than TensorBoard, Weights & Biases, MLflow, trackio and Comet",
        ("use_swanlab",),
        ("swanlab_",),
        "A run keeps its curves in its own folder, and `workbench compare` lays runs beside each other.",
    ),
    Absent(
        "own settings for trackers",
        (),
        ("wandb_", "tensorboard_", "mlflow_", "trackio_", "comet_"),
        "run.report_to asks for them, and their own variables (WANDB_PROJECT, TENSORBOARD_LOGGING_DIR, MLFLOW_TRACKING_URI, "
        "MLFLOW_EXPERIMENT_NAME, TRACKIO_DIR, COMET_PROJECT_NAME) count.",
    ),
    Absent(
        "code that a model brings",
        ("trust_remote_code",),
        (),
        "Models are those of the installed transformers.",
    ),
)  # fmt: skip

METHODS = ("bco", "cpo", "gkd", "minillm", "nash_md", "online_dpo", "papo", "rloo", "xpo")
"""Methods of TRL that this version does not have."""


def absent(key: str) -> Absent | None:
    """What is not here yet and this key asks for."""
    low = key.strip().lower().replace("-", "_")
    exact = next((entry for entry in ABSENT if low in entry.keys), None)
    return exact or next((entry for entry in ABSENT if low.startswith(entry.prefixes)), None)


ABSENT_VALUES: dict[str, tuple[tuple[re.Pattern[str], str], ...]] = {
    "model.attention": (
        (
            re.compile(r"sage"),
            "SageAttention computes no gradients, so nothing can be trained through it. `pip install flash-attn "
            "--no-build-isolation` brings flash_attention_2.",
        ),
        (
            re.compile(r".*/"),
            "Kernels of the hub are code that is fetched when a model is loaded, and such code is not run. "
            "`pip install flash-attn --no-build-isolation` brings flash_attention_2; `check` names the packages of 3 and 4.",
        ),
    ),
}
"""By setting, values of other tools and versions that it does not take, by how they begin, and what to do instead."""


def absent_value(path: str, value: object) -> str | None:
    """Why this setting does not take that value, where people have reason to expect it, and what to do instead."""
    low = str(value).strip().lower()
    return next((words for pattern, words in ABSENT_VALUES.get(path, ()) if pattern.match(low)), None)


# What a file is for, the keys of which so many must be there, and keys with which it is a training after all.
_OTHER_FILES: tuple[tuple[str, frozenset[str], int], ...] = (
    ("how Accelerate launches processes", frozenset({"compute_environment", "distributed_type", "machine_rank", "main_training_function", "num_machines", "num_processes"}), 2),
    ("how DeepSpeed works", frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"}), 1),
    ("a merge of models", frozenset({"merge_method", "slices", "export_dir", "export_size", "export_device", "export_legacy_format", "merge_lora"}), 1),
    ("answering prompts (inference)", frozenset({"infer_backend", "infer_dtype", "do_sample", "max_new_tokens", "num_beams", "vllm_maxlen", "api_host", "api_port", "api_model_name"}), 1),
    ("an evaluation", frozenset({"task_dir", "n_shot", "num_fewshot"}), 1),
    ("a model (its config.json)", frozenset({"architectures", "hidden_size", "num_hidden_layers", "vocab_size", "transformers_version"}), 2),
    ("an adapter (its adapter_config.json)", frozenset({"base_model_name_or_path", "peft_type", "inference_mode"}), 2),
)  # fmt: skip
_OF_TRAININGS = (
    "dataset", "datasets", "dataset_name", "dataset_mixture", "pretraining_dataset", "train_file", "train_files", "stage",
    "rl", "data", "method", "optim", "learning_rate", "num_train_epochs", "num_epochs", "max_steps", "sequence_len", "cutoff_len",
)  # fmt: skip


def other_file(mapping: Mapping[str, Any]) -> tuple[str, str] | None:
    """What a file that describes no training is for, and the key that shows it; nothing where it may be one."""
    keys = {key for key in mapping if isinstance(key, str)}
    ours = any(isinstance(mapping.get(name), Mapping) for name in ("model", "adapter", "run"))
    if ours or keys & set(_OF_TRAININGS):
        return None
    for what, known, least in _OTHER_FILES:
        shown = sorted(keys & known)
        if len(shown) >= least:
            return what, next(key for key in mapping if key in shown)
    return None
