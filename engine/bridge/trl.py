"""TRL's keys and what they mean here: the configs that `trl sft|dpo|kto|reward|grpo --config FILE` read, by TRL 1.16.

Such a file does not say which command it is for: the caller may, else keys that one command alone has, else the file's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.bridge import trainer_keys
from engine.bridge.keys import (
    EXPERTS_STAY,
    NO_DEFAULT,
    OFF,
    SAME_HERE,
    Answer,
    File,
    Key,
    Part,
    anything,
    changed,
    choice,
    flag,
    mapped,
    needless,
    nothing,
    placed,
    same,
    unless,
    unless_off,
    unsupported,
    where_known,
)
from engine.bridge.sources import READERS, SPLIT_OF_FILE, named_split, reward_function
from engine.config.renames import is_off, sentence_for

COMMANDS = ("sft", "dpo", "kto", "reward", "grpo", "rloo")
RATES = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "reward": 1e-4, "grpo": 1e-6, "rloo": 1e-6}
_ALONE: dict[str, tuple[str, ...]] = {
    "rloo": ("normalize_advantages", "reward_clip_range"),
    "grpo": ("num_generations", "scale_rewards", "mask_truncated_completions", "multi_objective_aggregation", "epsilon_high", "max_completion_length", "reward_funcs", "reward_weights"),
    "reward": ("center_rewards_coefficient",),
    "kto": ("desirable_weight", "undesirable_weight"),
    "dpo": ("loss_weights", "ld_alpha", "label_smoothing", "precompute_ref_log_probs", "f_divergence_type", "use_weighting", "beta", "reference_free"),
    "sft": ("packing", "packing_strategy", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "padding_free", "eval_packing"),
}  # fmt: skip


def command_of(file: File) -> tuple[str, str]:
    """The command that the file is for, and how that is known: from the caller, its keys, its name, or not at all."""
    if file.method:
        kinds = {"pretrain": "sft", "ipo": "dpo", "gdpo": "grpo"}
        return kinds.get(file.method, file.method), "caller"
    for command, keys in _ALONE.items():
        if any(file.get(key) is not None for key in keys):
            return command, "keys"
    if file.get("lora_task_type") == "SEQ_CLS":
        return "reward", "keys"
    name = file.name.lower()
    command_name = next((command for command in COMMANDS if command in name), None)
    return (command_name, "name") if command_name else ("sft", "")


def method_of(file: File) -> str:
    """The method here."""
    command, _ = command_of(file)
    if command == "sft" and (file.get("dataset_text_field") or file.method == "pretrain"):
        return "pretrain"
    if command == "dpo" and file.get("loss_type") in ("ipo", ["ipo"]):
        return "ipo"
    if command == "grpo" and file.get("multi_objective_aggregation") == "normalize_then_sum":
        return "gdpo"
    return command


def _command(value: Any, file: File) -> Answer:
    command, known = command_of(file)
    if command not in COMMANDS or command == "rloo":
        return unsupported(f"{command} is not here yet; method.kind names the methods there are.")
    settings = {"method.kind": method_of(file)}
    if known:
        return mapped(settings, {"keys": "Its keys say so.", "name": "The file's name says so."}.get(known, ""))
    return changed(settings, "The file does not say which of TRL's commands it is for; --method names another.")


def _command_name(file: File) -> str:
    return f"trl {command_of(file)[0]}"


# Rows


def _dataset(value: Any, file: File) -> Answer:
    if file.get("datasets"):
        return needless("datasets counts before it.")
    return mapped({"data.train.0.path": file.place(str(value))})


def _train_split(value: Any, file: File) -> Answer:
    name = file.get("dataset_name")
    if not isinstance(name, str) or file.get("datasets"):
        return needless("Each of datasets has a split of its own.") if value == "train" else unsupported(_SPLITS)
    return (
        needless(SPLIT_OF_FILE)
        if file.is_local(name)
        else named_split("data.train.0.split", "data.train.0.rows", value)
    )


def _dataset_config(value: Any, file: File) -> Answer:
    name = file.get("dataset_name")
    if value is None:
        return needless(OFF)
    if not isinstance(name, str) or file.get("datasets") or file.is_local(name):
        return unsupported(sentence_for("dataset_config"))
    held_out = {} if file.get("eval_strategy", "no") in ("no", False) else {"data.eval.0.subset": value}
    return mapped({"data.train.0.subset": value, **held_out})


_SPLITS = "Each source has a split of its own."


def _test_split(value: Any, file: File) -> Answer:
    name = file.get("dataset_name")
    if file.get("eval_strategy", "no") in ("no", False):
        return needless("It counts where rows are measured, which eval_strategy does not ask for.")
    if not isinstance(name, str) or file.get("datasets"):
        return unsupported("Held-out rows are named below data.eval.")
    if file.is_local(name):
        return unsupported("A file has no splits: name the held-out rows below data.eval.")
    return mapped({"data.eval.0.path": name, "data.eval.0.split": value})


def _test_default(file: File) -> Any:
    return "test" if file.get("eval_strategy", "no") not in ("no", False) else NO_DEFAULT


def _datasets(value: Any, file: File) -> Answer | list[Part]:
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        return unsupported(sentence_for("datasets"))
    parts: list[Part] = []
    for number, entry in enumerate(value):
        at = f"data.train.{number}"
        path, files = str(entry.get("path") or ""), entry.get("data_files")
        generic = path in READERS and isinstance(files, (str, list))
        one = files if isinstance(files, str) else files[0] if isinstance(files, list) and len(files) == 1 else None
        for key, item in entry.items():
            if item is None:
                answer = needless(OFF)
            elif key == "path":
                answer = needless("data_files names the rows.") if generic else mapped({f"{at}.path": file.place(path)})
            elif key == "data_files" and generic and isinstance(one, str):
                answer = mapped({f"{at}.path": file.place(one)})
            elif key == "split":
                plain = generic or file.is_local(path)
                answer = _split_of(plain, at, item)
            elif key == "name" and not generic and not file.is_local(path):
                answer = mapped({f"{at}.subset": item})
            else:
                answer = _IN_ENTRY.get(str(key), unsupported("It is no key of a source that is known of TRL."))
            parts.append((f"{number}.{key}", item, answer))
    return parts


def _split_of(plain: bool, at: str, value: Any) -> Answer:
    answer = named_split(f"{at}.split", f"{at}.rows", value)
    if not plain:
        return answer
    settings = {path: item for path, item in answer.settings.items() if path.endswith(".rows")}
    return mapped(settings, SPLIT_OF_FILE) if settings else needless(SPLIT_OF_FILE)


_IN_ENTRY = {
    "name": unsupported("A data set's parts have no setting here: bring the rows of this one as a file."),
    "data_dir": unsupported("A data set's parts have no setting here: bring the rows of this one as a file."),
    "data_files": unsupported("The files of a data set have no setting here: each file is a source with a path of its own."),
    "columns": needless("A row gives what its method learns from, whatever columns stand beside."),
    "fraction": unsupported("weight below a source says how often its rows are used in an epoch, rows takes its first ones."),
}  # fmt: skip


def _text_field(value: Any, file: File) -> Answer:
    at = "data.train.0"
    columns = {} if value == "text" else {f"{at}.columns": {"text": value}}
    return mapped({f"{at}.format": "text", **columns}, "Rows of plain text are learned whole: method.kind pretrain.")


def _length(value: Any, file: File) -> Answer:
    long = "split" if method_of(file) == "pretrain" and file.get("packing_strategy") == "bfd_split" else "truncate"
    side = {"data.truncation_side": "left"} if file.get("truncation_mode") == "keep_end" else {}
    words = "Longer rows are cut, as there." if long == "truncate" else "Longer texts are split, as there."
    return mapped({"data.max_length": value, "data.excess_length": long, **side}, words)


def _length_default(file: File) -> Any:
    return NO_DEFAULT if command_of(file)[0] in ("grpo", "rloo") else 1024


def _packing(value: Any, file: File) -> Answer:
    if is_off(value):
        return mapped({"data.packing": False})
    apart = file.get("packing_strategy", "bfd") != "wrapped"
    return mapped({"data.packing": True, "data.packing_cross_doc_attn_mask": apart})


def _strategy(value: Any, file: File) -> Answer:
    if not file.on("packing"):
        return needless("It counts with packing.")
    if value == "bfd":
        return needless("packing says it: packs keep their rows apart.")
    if value in ("bfd_split", "bfd-requeue") and method_of(file) == "pretrain":
        return needless("data.excess_length split says it.")
    return unsupported("Packs are filled with whole rows; data.excess_length says what happens to longer ones.")


def _turns(value: Any, file: File) -> Answer:
    """What is learned of a row: two keys say it together."""
    if method_of(file) != "sft":
        return needless("Plain text is learned whole.")
    completion, assistant = file.mapping.get("completion_only_loss"), file.on("assistant_only_loss")
    if assistant or completion is True:
        return mapped({"data.trained_turns": "assistant"})
    if completion is False:
        return mapped({"data.trained_turns": "all"})
    words = "TRL learns all turns of a conversation; of prompts with completions it learns the completion: `assistant` for those."
    return changed({"data.trained_turns": "all"}, words)


def _turns_default(file: File) -> Any:
    asked = file.mapping.get("completion_only_loss") is not None
    return NO_DEFAULT if asked or command_of(file)[0] != "sft" else False


# The model and its precision


_MIXED = (
    "There weights are held in float32 beside products in {}; here both are in model.dtype, which takes half the memory. "
    "float32 computes all in float32."
)


def _dtype(value: Any, file: File) -> Answer:
    half = "float16" if file.on("fp16") else "" if file.mapping.get("bf16") is False else "bfloat16"
    if value == "auto":
        return changed(
            {"model.dtype": half or "bfloat16"}, "A precision is named here; most models are stored in bfloat16."
        )
    if value == "float32" and half:
        return changed({"model.dtype": half}, _MIXED.format(half))
    return mapped({"model.dtype": value})


def _init(value: Any, file: File) -> Answer | list[Part]:
    if not isinstance(value, Mapping):
        return unsupported("A model is loaded with what model.dtype, quantization and attention say.")
    known = {"attn_implementation": "model.attention", "revision": "model.revision"}
    parts: list[Part] = []
    for key, item in value.items():
        if key in known:
            answer = mapped({known[key]: item})
        elif key in ("dtype", "torch_dtype"):
            answer = _dtype(item, file)
        else:
            answer = (
                needless(OFF) if is_off(item) else unsupported("A model is loaded with what the section model says.")
            )
        parts.append((str(key), item, answer))
    return parts


def _dtype_default(file: File) -> Any:
    inner = file.get("model_init_kwargs")
    named = isinstance(inner, Mapping) and (inner.get("dtype") or inner.get("torch_dtype"))
    return NO_DEFAULT if named or file.get("torch_dtype") else "float32"


def _peft(value: Any, file: File) -> Answer:
    if is_off(value):
        return needless(OFF)
    wide = not (file.on("load_in_4bit") or file.on("load_in_8bit"))
    words = (
        "PEFT holds an adapter in float32." if wide else "TRL holds an adapter beside quantized weights in bfloat16."
    )
    return mapped({"adapter.kind": "lora", "adapter.autocast_adapter_dtype": wide}, words)


def _with_peft(value: Any) -> Any:
    return lambda file: value if file.on("use_peft") else NO_DEFAULT


def _targets(value: Any, file: File) -> Answer:
    if value == "PEFT's own":
        words = "PEFT then takes the layers that it lists for the model, often q_proj and v_proj; here all linear layers are."
        return changed({"adapter.target_modules": "all-linear"}, words)
    single = isinstance(value, list) and value == ["all-linear"]
    if isinstance(value, str) and value != "all-linear" and value.replace("_", "").isalnum():
        return mapped({"adapter.target_modules": [value]})
    return mapped({"adapter.target_modules": "all-linear" if single else value})


def _four_bits(value: Any, file: File) -> Answer:
    return (
        needless(OFF)
        if is_off(value)
        else mapped({"model.quantization": file.get("bnb_4bit_quant_type", "nf4"), **EXPERTS_STAY})
    )


def _nested(value: Any, file: File) -> Answer:
    if not file.on("load_in_4bit") or value is True:
        return needless("Weights of 4 bits are quantized twice here.")
    return changed({}, "The scales of 4-bit weights are quantized too here, which takes 0.4 bits less a weight.")


def _template(value: Any, file: File) -> Answer:
    if str(value).lower().endswith((".jinja", ".j2")):
        return mapped({"model.chat_template": file.place(str(value))})
    return unsupported(
        "model.chat_template takes chatml, llama3, plain or a Jinja file: write that tokenizer's template into one."
    )


# Methods


def _loss(value: Any, file: File) -> Answer:
    method = method_of(file)
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    if method in ("sft", "pretrain"):
        ours = one in ("nll", "chunked_nll")
        return (
            needless("It is SFT's loss here.")
            if ours
            else unsupported("SFT's loss is the cross-entropy of the learned tokens.")
        )
    if method == "ipo":
        return needless("method.kind says it.")
    if one == ["sigmoid", "sft"] or (isinstance(one, list) and sorted(map(str, one)) == ["sft", "sigmoid"]):
        weights = file.get("loss_weights")
        if isinstance(weights, list) and len(weights) == 2 and one == ["sigmoid", "sft"] and weights[0] == 1:
            return mapped({"method.loss_type": "sigmoid", "method.rpo_alpha": weights[1]})
    if isinstance(one, list):
        return unsupported(
            "method.loss_type takes one loss; method.rpo_alpha adds the likelihood of the chosen answer."
        )
    return mapped({"method.loss_type": one})


def _weights(value: Any, file: File) -> Answer:
    taken = file.get("loss_type") == ["sigmoid", "sft"] and isinstance(value, list) and value[:1] in ([1], [1.0])
    return needless("method.rpo_alpha says it.") if taken else unsupported("method.loss_type takes one loss.")


def _scaled(value: Any, file: File) -> Answer:
    words = {True: "group", False: "none", "true": "group", "false": "none"}
    return mapped({"method.scale_rewards": words.get(value, value)})


def _rewards(value: Any, file: File) -> Answer:
    names = value if isinstance(value, list) else [value]
    rewards = [reward_function(str(name), file) for name in names]
    if not all(rewards):
        return unsupported("A reward function of a module is written as `file.py:function` in method.reward_funcs.")
    weights = file.get("reward_weights")
    more = (
        [f"model:{file.place(str(file.get('reward_model_name_or_path')))}"]
        if file.get("reward_model_name_or_path")
        else []
    )
    rewards = [*more, *rewards]
    if isinstance(weights, list) and len(weights) == len(rewards):
        rewards = [f"{weight} * {name}" for weight, name in zip(weights, rewards, strict=True)]
    return changed({"method.reward_funcs": rewards}, "Functions are taken from the files of their modules.")


def _reward_model(value: Any, file: File) -> Answer:
    if file.get("reward_funcs"):
        return needless("reward_funcs takes it along.")
    weights = file.get("reward_weights")
    weight = f"{weights[0]} * " if isinstance(weights, list) and len(weights) == 1 else ""
    return mapped({"method.reward_funcs": [f"{weight}model:{file.place(str(value))}"]})


def _by_command(values: Mapping[str, Any]) -> Any:
    return lambda file: values.get(command_of(file)[0], NO_DEFAULT)


_SAMPLED = "Answers are sampled and compared without it here."
_VLLM = nothing("It counts with vLLM.")
_SYNC = "The reference stays where training began."
_ENTROPY = "The policy's loss has no such part here."

KEYS: dict[str, Key] = {
    **trainer_keys.KEYS,
    "(command)": Key(_command, default=_command_name),
    "env": unless_off("Set such variables where the workbench is started."),
    # The model
    "model_name_or_path": placed("model.name"),
    "model_revision": Key(lambda value, file: needless("The main branch is taken here too.") if value == "main" else mapped({"model.revision": value})),
    "dtype": Key(_dtype, default=_dtype_default),
    "torch_dtype": Key(_dtype),
    "bf16": nothing("model.dtype says it, as dtype and bf16 do together."),
    "fp16": nothing("model.dtype says it, as dtype and fp16 do together."),
    "attn_implementation": same("model.attention"),
    "model_init_kwargs": Key(_init),
    "trust_remote_code": unless_off(),
    "router_aux_loss_coef": unless_off("The router's loss counts as the model's config.json says."),
    "chat_template_path": Key(_template),
    "chat_template_kwargs": same("model.chat_template_kwargs"),
    "eos_token": unless_off("What ends an answer is the tokenizer's, which model.tokenizer names."),
    "pad_token": nothing("Padding is never learned from; any token serves."),
    "cast_lm_head_to_fp32": unless_off("Log-probabilities are computed in float32 from the head's own numbers."),
    "disable_dropout": nothing("Dropout is off in models of today; method and adapter say where some is used."),
    # The adapter
    "use_peft": Key(_peft),
    "lora_r": same("adapter.r", default=16),
    "lora_alpha": same("adapter.lora_alpha", default=32),
    "lora_dropout": trainer_keys.lora_dropout(method_of, _with_peft(0.05)),
    "lora_target_modules": Key(_targets, default=_with_peft("PEFT's own")),
    "lora_target_parameters": Key(lambda value, file: mapped({"adapter.target_parameters": value if isinstance(value, list) else [value]})),
    "lora_modules_to_save": same("adapter.modules_to_save"),
    "lora_task_type": nothing("It follows from the method."),
    "use_rslora": same("adapter.use_rslora"),
    "use_dora": same("adapter.use_dora"),
    "load_in_8bit": flag({"model.quantization": "int8", **EXPERTS_STAY}),
    "load_in_4bit": Key(_four_bits),
    "bnb_4bit_quant_type": nothing("model.quantization says it, as load_in_4bit does."),
    "use_bnb_nested_quant": Key(_nested, default=lambda file: False if file.on("load_in_4bit") else NO_DEFAULT),
    "bnb_4bit_quant_storage": nothing("It counts where weights are split over GPUs."),
    # The rows
    "dataset_name": Key(_dataset),
    "dataset_config": Key(_dataset_config),
    "dataset_train_split": Key(_train_split),
    "dataset_test_split": Key(_test_split, default=_test_default),
    "dataset_streaming": flag({"data.streaming": True}),
    "datasets": Key(_datasets),
    "streaming": flag({"data.streaming": True}),
    "test_split_size": where_known("data.val_set_size", unless_off()),
    "ignore_bias_buffers": nothing("It works around a fault of older models on several GPUs."),
    "dataset_text_field": Key(_text_field),
    "dataset_kwargs": unless_off("Rows are always prepared before training."),
    "dataset_num_proc": nothing("Rows are prepared before the run and read from memory."),
    "dataset_batch_size": nothing("Rows are prepared before the run and read from memory."),
    "max_length": Key(_length, default=_length_default, empty=changed({}, "Rows are never cut there; here one longer than data.max_length is named, and none is cut.")),
    "max_seq_length": Key(_length),
    "max_prompt_length": unless_off(sentence_for("max_prompt_length")),
    "truncation_mode": nothing("data.truncation_side says it, as max_length does."),
    "shuffle_dataset": nothing("data.shuffle mixes the rows anew in each epoch."),
    "packing": Key(_packing),
    "packing_strategy": Key(_strategy),
    "padding_free": nothing("It concerns how a batch is computed, not what is learned; data.packing saves the padding."),
    "pad_to_multiple_of": nothing("A batch is padded to its longest row."),
    "eval_packing": Key(lambda value, file: needless("Held-out rows are packed as the others are, here too.") if value == file.get("packing", False) else unsupported("Held-out rows are packed as data.packing says of all rows.")),
    "completion_only_loss": Key(_turns),
    "assistant_only_loss": Key(_turns, default=_turns_default),
    "train_sampling_strategy": trainer_keys.sampling(default=_by_command({"kto": "sequential"})),
    "activation_offloading": flag({"memory.activation_offloading": "cpu"}),
    # The method
    "loss_type": Key(_loss),
    "loss_weights": Key(_weights),
    "beta": same("method.beta", default=_by_command({"dpo": 0.1, "kto": 0.1, "grpo": 0.0})),
    "label_smoothing": Key(lambda value, file: mapped({"method.label_smoothing": value}) if method_of(file) == "dpo" else needless("It counts with dpo.")),
    "rpo_alpha": same("method.rpo_alpha"),
    "ld_alpha": unless_off("Tokens of an answer are weighed alike."),
    "f_divergence_type": unless("reverse_kl", "The divergence is that of the paper.", SAME_HERE),
    "f_alpha_divergence_coef": nothing("It counts with f_divergence_type alpha_divergence."),
    "use_weighting": unless_off("Pairs are weighed alike here."),
    "discopop_tau": unless(0.05, "It is 0.05 here.", SAME_HERE),
    "reference_free": unless_off("method.kind simpo and orpo need no reference."),
    "precompute_ref_log_probs": anything({"method.reference": "precompute"}),
    "precompute_ref_batch_size": nothing("It concerns how they are computed."),
    "sync_ref_model": unless_off(_SYNC),
    "ref_model_mixup_alpha": nothing("It counts with sync_ref_model."),
    "ref_model_sync_steps": nothing("It counts with sync_ref_model."),
    "generate_during_eval": unless_off("run.prompts are answered while a run trains."),
    "desirable_weight": trainer_keys.desirable_weight(method_of),
    "undesirable_weight": same("method.undesirable_weight"),
    "center_rewards_coefficient": same("method.center_rewards_coefficient"),
    "reward_model_name_or_path": Key(_reward_model),
    "reward_funcs": Key(_rewards),
    "reward_weights": nothing("The weights stand before the rewards in method.reward_funcs."),
    "num_generations": same("method.num_generations", default=_by_command({"grpo": 8})),
    "num_generations_eval": unless_off("Held-out prompts are answered as often as the others."),
    "max_completion_length": same("method.max_completion_length", default=_by_command({"grpo": 512})),
    "generation_batch_size": unless_off("method.steps_per_generation says how many batches are sampled together."),
    "steps_per_generation": same("method.steps_per_generation"),
    "temperature": same("method.temperature"),
    "top_p": same("method.top_p"),
    "top_k": same("method.top_k"),
    "min_p": unless_off("method.top_p and top_k say among which tokens answers are sampled."),
    "repetition_penalty": same("method.repetition_penalty"),
    "generation_kwargs": unless_off(_SAMPLED),
    "cache_implementation": choice(
        {
            None: needless("Where keys and values lie is chosen by the machine."),
            **{each: mapped({"method.cache_implementation": each}) for each in ("static", "dynamic")},
        },
        "Keys and values of answers lie in a static or a dynamic cache here.",
    ),
    "num_iterations": same("method.num_iterations"),
    "epsilon": same("method.epsilon"),
    "epsilon_high": same("method.epsilon_high"),
    "delta": unless_off("Ratios are clipped by method.epsilon on both sides."),
    "sapo_temperature_neg": unless(1.05, "It is 1.05 here.", SAME_HERE),
    "sapo_temperature_pos": unless(1.0, "It is 1.0 here.", SAME_HERE),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), nothing("It counts with a loss that is not here.")),
    "importance_sampling_level": same("method.importance_sampling_level"),
    "multi_objective_aggregation": nothing("method.kind says it: gdpo compares each reward by itself, grpo their sum."),
    "scale_rewards": Key(_scaled),
    "mask_truncated_completions": same("method.mask_truncated_completions"),
    "top_entropy_quantile": unless(1.0, _ENTROPY, "All tokens are learned from here too."),
    "entropy_coef": unless_off(_ENTROPY),
    "use_adaptive_entropy": unless_off(_ENTROPY),
    **dict.fromkeys(("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"), nothing("It counts with use_adaptive_entropy.")),
    "max_tool_calling_iterations": unless_off("Tools are written in prompts and not called while answers are sampled."),
    "off_policy_mask_threshold": same("method.off_policy_mask_threshold"),
    "use_bias_correction_kl": unless(True, "The divergence is weighed as in arXiv:2512.02556.", SAME_HERE),
    "normalize_advantages": unless_off("It counts with RLOO, which is not here yet."),
    "reward_clip_range": unless_off("It counts with RLOO, which is not here yet."),
    "log_completions": nothing("Groups with their answers are kept in the run folder: method.rollout_groups."),
    "log_multimodal": nothing("Groups with their answers are kept in the run folder: method.rollout_groups."),
    "num_completions_to_print": nothing("Groups with their answers are kept in the run folder: method.rollout_groups."),
    "log_unique_prompts": nothing("Groups with their answers are kept in the run folder: method.rollout_groups."),
    "log_completions_hub_repo": unless_off("Groups with their answers are kept in the run folder: method.rollout_groups."),
    "ds3_gather_for_generation": nothing("It counts with DeepSpeed."),
    "use_transformers_continuous_batching": nothing("It concerns how answers are computed."),
    "transformers_continuous_batching_config": nothing("It concerns how answers are computed."),
    "use_transformers_paged": nothing("It concerns how answers are computed."),
    "use_vllm": unless_off(),
    **dict.fromkeys(("vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex", "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port", "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_cap"), _VLLM),
    # The run
    "learning_rate": same("optim.learning_rate", default=_by_command(RATES)),
    "label_smoothing_factor": trainer_keys.label_smoothing(method_of),
    "save_total_limit": trainer_keys.KEEPS_ALL,
}  # fmt: skip
