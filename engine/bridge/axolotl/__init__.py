"""Axolotl's keys and what they mean here, by its config reference (read 2026): one row a key, facts alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.bridge.keys import (
    INTERNAL,
    NO_DEFAULT,
    OFF,
    SAME_HERE,
    Answer,
    File,
    Key,
    Part,
    changed,
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
from engine.bridge.sources import READERS, SPLIT_OF_FILE, named_split
from engine.bridge.trainer_keys import BEST, desirable_weight, lora_dropout, tracker
from engine.config.data import IN_MESSAGES
from engine.config.renames import TEMPLATES, is_off, sentence_for

PAIRS = ("dpo", "ipo", "simpo", "orpo", "reward")
_KINDS = ("dpo", "ipo", "simpo", "orpo", "kto", "grpo", "gdpo")
_OWN_TEMPLATE = "Axolotl's templates have names of their own: the tokenizer's own template stands here."
_PROMPT = (
    "Axolotl writes such rows with a prompt text of its own; here they become turns in the model's chat template, which "
    "model.chat_template can replace."
)


def method_of(file: File) -> str:
    """The method that the file asks for."""
    if file.get("rl") in _KINDS:
        return str(file.get("rl"))
    if file.on("reward_model"):
        return "reward"
    if file.on("process_reward_model"):
        return "prm"
    entries = file.get("datasets", file.get("pretraining_dataset"))
    first = entries[0] if isinstance(entries, list) and entries and isinstance(entries[0], Mapping) else {}
    return "pretrain" if file.get("pretraining_dataset") or first.get("type") in ("completion", "pretrain") else "sft"


# Sources


def _sources(setting: str) -> Any:
    def means(value: Any, file: File) -> Answer | list[Part]:
        if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
            return unsupported(sentence_for("datasets"))
        return [part for number, entry in enumerate(value) for part in _entry(setting, number, entry, file)]

    return means


def _entry(setting: str, number: int, entry: Mapping[str, Any], file: File) -> list[Part]:
    at, method = f"{setting}.{number}", method_of(file)
    path, files = str(entry.get("path") or ""), entry.get("data_files")
    generic = path in READERS and isinstance(files, (str, list))
    parts: list[Part] = []
    for key, value in entry.items():
        answer: Answer | list[Part]
        if value is None:
            answer = needless(OFF)
        elif key == "path":
            answer = needless("data_files names the rows.") if generic else mapped({f"{at}.path": file.place(path)})
        elif key == "data_files":
            answer = _data_files(at, value, file) if generic else unsupported(_PARTS)
        elif key == "split":
            local = generic or file.is_local(path)
            answer = needless(SPLIT_OF_FILE) if local else named_split(f"{at}.split", f"{at}.rows", value)
        elif key == "type":
            answer = _type(at, value, method)
        elif key in _COLUMNS:
            answer = mapped({f"{at}.columns": {_column(key, method): value}})
        elif key in ("message_property_mappings", "roles") and isinstance(value, Mapping):
            answer = _properties(at, value) if key != "roles" else _roles(at, value)
        elif key in ("message_field_role", "message_field_content"):
            answer = mapped({f"{at}.properties": {key.rpartition("_")[2]: value}})
        else:
            answer = _IN_ENTRY[key].means(value, file) if key in _IN_ENTRY else unsupported(_NO_SUCH)
        inner = answer if isinstance(answer, list) else [("", value, answer)]
        parts += [(".".join(filter(None, (str(number), str(key), name))), item, part) for name, item, part in inner]
    if entry.get("type") == "chat_template.default" and method in PAIRS and not entry.get("field_messages"):
        name, item, part = next(each for each in parts if each[0] == f"{number}.type")
        settings = {**part.settings, f"{at}.columns": {"prompt": "messages"}}
        parts[parts.index((name, item, part))] = (name, item, Answer(part.outcome, settings, part.reason))
    if setting == "data.train" and method == "pretrain" and parts:
        name, item, part = parts[0]
        parts[0] = (name, item, Answer(part.outcome, {"method.kind": "pretrain", **part.settings}, part.reason))
    return parts


_PARTS = "The files of a data set have no setting here: each file is a source with a path of its own below data.train."
_NO_SUCH = "It is no key of a source that is known of Axolotl, so nothing was taken from it."


def _data_files(at: str, value: Any, file: File) -> Answer:
    names = value if isinstance(value, list) else [value]
    if len(names) != 1 or not isinstance(names[0], str):
        return unsupported(_PARTS)
    return mapped({f"{at}.path": file.place(names[0])})


def _type(at: str, value: Any, method: str) -> Answer | list[Part]:
    if isinstance(value, Mapping):
        return _written_type(at, value, method)
    word = str(value)
    base, _, _variant = word.partition(".")
    form = {"kto": "unpaired_preference", "grpo": "prompts", "gdpo": "prompts", "prm": "stepwise_supervision"}.get(
        method, "preference" if method in PAIRS else ""
    )
    if form:
        written = {f"{at}.format": form}
        if base in TEMPLATES:
            return changed({**written, "model.chat_template": base}, f"{_PROMPT} {base} is that template here.")
        own = base in ("chat_template", "bradley_terry", "stepwise_supervised") and "." not in word.removeprefix(
            "bradley_terry.chat_template"
        ).removeprefix("chat_template.default")
        return mapped(written) if own else changed(written, "Which columns hold what is seen in the rows here.")
    simple = {"chat_template": "messages", "completion": "text", "pretrain": "text"}
    if word in simple:
        return mapped({f"{at}.format": simple[word]})
    if word == "sharegpt":
        return changed({f"{at}.format": "sharegpt"}, _PROMPT)
    if base == "alpaca":
        return changed({f"{at}.format": "alpaca"}, _PROMPT)
    return changed({}, f"Its format is detected. {_PROMPT}")


_WRITTEN = {
    "sft": ("alpaca", {"instruction": "instruction", "input": "input", "output": "output", "system": "system"}),
    "pairs": ("preference", {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "system": "system"}),
    "kto": ("unpaired_preference", {"prompt": "prompt", "completion": "completion", "label": "label"}),
}


def _written_type(at: str, value: Mapping[str, Any], method: str) -> list[Part]:
    """A format that the file itself writes out: its columns are ours, its prompt texts are not."""
    form, columns = _WRITTEN["kto" if method == "kto" else "pairs" if method in PAIRS else "sft"]
    parts: list[Part] = []
    for key, item in value.items():
        column = columns.get(str(key).removeprefix("field_"))
        if item is None:
            parts.append((str(key), item, needless(OFF)))
        elif str(key).startswith("field_") and column:
            parts.append((str(key), item, mapped({f"{at}.format": form, f"{at}.columns": {column: item}})))
        else:
            parts.append((str(key), item, unsupported(_PROMPT)))
    return parts


_COLUMNS = {
    "field_messages": "messages",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_tools": "tools",
    "field_system": "system",
    "field": "text",
    "text_column": "text",
}


def _column(key: str, method: str) -> str:
    return "prompt" if key == "field_messages" and method in PAIRS else _COLUMNS[key]


def _properties(at: str, value: Mapping[str, Any]) -> list[Part]:
    why = f"A message is made of {', '.join(IN_MESSAGES)} here."
    return [
        (str(key), item, mapped({f"{at}.properties": {key: item}}) if key in IN_MESSAGES else unsupported(why))
        for key, item in value.items()
    ]


def _roles(at: str, value: Mapping[str, Any]) -> list[Part]:
    """There a role has its names, here a name has its role."""
    parts: list[Part] = []
    for role, names in value.items():
        written = {str(name): role for name in (names if isinstance(names, list) else [names]) if name != role}
        answer = mapped({f"{at}.roles": written}) if written else needless("The role has that name here too.")
        parts.append((str(role), names, answer))
    return parts


def _trained_roles(value: Any, file: File) -> Answer:
    names = value if isinstance(value, list) else [value]
    if names and all(name in ("assistant", "gpt") for name in names):
        return mapped({"data.trained_turns": "assistant"})
    if "all" in names:
        return mapped({"data.trained_turns": "all"})
    return unsupported(
        "data.trained_turns takes every assistant turn, all turns, the last, or those with `train: true`."
    )


def _train_mark(value: Any, file: File) -> Answer:
    if value == "train":
        return mapped({"data.trained_turns": "flag"})
    return unsupported(
        "Such a mark is called `train` here: data.trained_turns flag learns the turns with `train: true`."
    )


_SHARDS = "A source takes its first rows with `rows`; other shares have no setting here: bring them as a file."
_IN_ENTRY: dict[str, Key] = {
    "name": unless_off("A data set's parts have no setting here: bring the rows of this one as a file."),
    "ds_type": nothing("The file's ending says it."),
    "trust_remote_code": unless_off(),
    "revision": unless_off("A data set is read at its main branch here: bring the rows of another as a file."),
    "shards": unless_off(_SHARDS),
    "shards_idx": unless_off(_SHARDS),
    "skip": unless_off(_SHARDS),
    "preprocess_shards": nothing("Rows are prepared in blocks by themselves."),
    "input_transform": unless_off("Rows are taken as they stand: change them in a file of your own."),
    "input_format": unless_off(_PROMPT),
    "conversation": nothing("The preview says what was seen in the rows; format and columns say it otherwise."),
    "chat_template": Key(lambda value, file: _template(value, file)),
    "chat_template_jinja": Key(lambda value, file: _jinja(value, file)),
    "field_human": unless_off("columns names the columns of a source by their parts."),
    "field_model": unless_off("columns names the columns of a source by their parts."),
    "field_thinking": unless_off("properties names the key inside a message, as `thinking: reasoning`."),
    "template_thinking_key": unless_off("The template gets a message's reasoning as it stands."),
    "message_field_training": Key(_train_mark),
    "message_field_training_detail": unless_off("A turn is learned as a whole here: data.trained_turns flag."),
    "split_thinking": unless_off("The template gets a message's reasoning as it stands."),
    "logprobs_field": unless_off("Rows of method distill name a teacher's log-probabilities under columns."),
    "temperature": unless_off("method.kd_temperature says it of method distill."),
    "roles_to_train": Key(_trained_roles),
    "train_on_eos": unless("turn", "The end of each learned turn is learned, of others none.", SAME_HERE),
    "drop_system_message": unless_off("A row's system turn is read: leave it out of the rows."),
    "step_separator": unless_off("A step ends with a line break here."),
    "max_completion_length": unless_off("data.max_length bounds a row, its prompt and its steps together."),
    "train_on_last_step_only": flag({"method.train_on_last_step_only": True}),
}


# Single keys


def _template(value: Any, file: File) -> Answer:
    word = str(value)
    if word in ("tokenizer_default",) or word.startswith("tokenizer_default_fallback_"):
        return needless("The tokenizer's own template is taken here too.")
    if word == "jinja":
        return needless("chat_template_jinja names it.")
    if word in TEMPLATES:
        return mapped({"model.chat_template": word})
    return changed({"model.chat_template": None}, _OWN_TEMPLATE)


def _jinja(value: Any, file: File) -> Answer:
    if isinstance(value, str) and value.lower().endswith((".jinja", ".j2")):
        return mapped({"model.chat_template": file.place(value)})
    return unsupported("Write the template into a file of its own; model.chat_template takes a Jinja file.")


def _adapter(value: Any, file: File) -> Answer:
    if value in ("lora", "qlora"):
        return mapped({"adapter.kind": "lora"})
    return needless(OFF) if is_off(value) else unsupported("Adapters here are LoRA.")


def _four_bits(value: Any, file: File) -> Answer:
    if is_off(value):
        return needless(OFF)
    kwargs = file.get("bnb_config_kwargs")
    kind = kwargs.get("bnb_4bit_quant_type", "nf4") if isinstance(kwargs, Mapping) else "nf4"
    return mapped({"model.quantization": kind})


def _bnb(value: Any, file: File) -> Answer | list[Part]:
    if not isinstance(value, Mapping):
        return unsupported("model.quantization names how the base weights are held.")
    own = {"bnb_4bit_quant_type": needless("model.quantization says it, as load_in_4bit does.")}
    same_here = {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}
    return [
        (
            str(key),
            item,
            own.get(str(key)) or (needless(SAME_HERE) if same_here.get(str(key)) == item else unsupported(_QUANTIZED)),
        )
        for key, item in value.items()
    ]


_QUANTIZED = "model.quantization takes nf4, fp4, int8 or fp8, each as the QLoRA paper and bitsandbytes have it."


def _bf16(value: Any, file: File) -> Answer:
    if value in (True, "auto", "full", "true"):
        return mapped({"model.dtype": "bfloat16"})
    return needless(OFF) if is_off(value) else unsupported("model.dtype says in which numbers a run computes.")


def _targets(value: Any, file: File) -> Answer:
    if file.on("lora_target_linear"):
        more = [name for name in value if name == "lm_head"] if isinstance(value, list) else []
        if not more:
            return needless("lora_target_linear names all linear layers, these among them.")
    if isinstance(value, str) and value.strip().replace("_", "").isalnum():
        return mapped({"adapter.target_modules": [value]})
    return mapped({"adapter.target_modules": value})


def _packing(value: Any, file: File) -> Answer:
    if is_off(value):
        return mapped({"data.packing": False}) if value is False else needless(OFF)
    apart = file.get("pretrain_multipack_attn", True) if file.get("pretraining_dataset") else True
    return mapped({"data.packing": True, "data.packing_cross_doc_attn_mask": bool(apart)})


def _eval_packing(value: Any, file: File) -> Answer:
    if value == file.get("sample_packing", False):
        return needless("Held-out rows are packed as the others are, here too.")
    return unsupported("Held-out rows are packed as data.packing says of all rows.")


def _checkpointing(value: Any, file: File) -> Answer:
    if value in ("offload", "offload_disk"):
        where = "disk" if value == "offload_disk" else "cpu"
        return mapped({"memory.gradient_checkpointing": True, "memory.activation_offloading": where})
    return mapped({"memory.gradient_checkpointing": value})


def _offloading(value: Any, file: File) -> Answer:
    if is_off(value):
        return needless(OFF)
    return mapped({"memory.activation_offloading": "disk" if value == "disk" else "cpu"})


def _warmup(value: Any, file: File) -> Answer:
    if file.mapping.get("warmup_steps"):
        return needless("warmup_steps says it, and counts before it.")
    if isinstance(value, (int, float)) and 0 < value <= NO_WARMUP:
        return mapped({"optim.warmup_steps": 0.0}, "So small a share is no step.")
    return mapped({"optim.warmup_steps": value}) if value else needless("A share of 0 counts as none given there.")


NO_WARMUP = 1e-9
"""A share that is no step: none at all stands for Axolotl's own 3 %."""
_OWN_WARMUP = "3 %"


def _warmup_default(file: File) -> Any:
    return NO_DEFAULT if file.get("warmup_ratio") or file.mapping.get("warmup_steps") == 0 else _OWN_WARMUP


def _warmup_steps(value: Any, file: File) -> Answer:
    if value == _OWN_WARMUP or (value == 0 and not file.get("warmup_ratio")):
        return changed(
            {"optim.warmup_steps": 0.03}, "Without a warm-up of the file it is 3 % of all steps there, at most 100."
        )
    return mapped({"optim.warmup_steps": value}) if value else needless("warmup_ratio says it.")


def _too_long(value: Any, file: File) -> Answer:
    words = {"drop": "drop", "truncate": "truncate", "raise": "error"}
    if method_of(file) == "pretrain":
        return changed(
            {"data.excess_length": "split"}, "Plain text that is too long is split, so that nothing of it is lost."
        )
    return mapped({"data.excess_length": words[value]}) if value in words else unsupported("")


def _every(setting: str, by_epoch: str, what: str) -> Any:
    def means(value: Any, file: File) -> Answer:
        if isinstance(value, float) and 0 < value < 1:
            return unsupported(f"{setting} counts steps; a share of all steps is not known before the run.")
        return mapped({setting: value}, what)

    return means


def _evals_per_epoch(value: Any, file: File) -> Answer:
    if is_off(value) or (is_off(file.get("val_set_size")) and not file.get("test_datasets")):
        return needless("No rows are held out.")
    return mapped({"run.evals_per_epoch": value})


def _save_strategy(value: Any, file: File) -> Answer:
    if value == "steps":
        return needless("run.save_steps counts steps.")
    if value in ("no", False):
        return changed({}, "The end of a run is always kept, and a checkpoint every run.save_steps steps.")
    return unsupported(sentence_for("save_strategy"))


def _save_default(file: File) -> Any:
    asked = [key for key in ("save_steps", "saves_per_epoch") if file.get(key) is not None]
    return NO_DEFAULT if asked else "epoch"


def _eval_strategy(value: Any, file: File) -> Answer:
    return (
        needless(sentence_for("eval_strategy"))
        if value in ("steps", "no", False)
        else unsupported(sentence_for("eval_strategy"))
    )


def _of_pairs(setting: str) -> Any:
    """A setting of DPO's alone, though other methods here have one of that name."""

    def means(value: Any, file: File) -> Answer:
        return mapped({setting: value}) if method_of(file) == "dpo" else needless("It counts with rl dpo.")

    return means


def _loss_types(value: Any, file: File) -> Answer:
    if isinstance(value, list) and len(value) == 1:
        return mapped({"method.loss_type": value[0]})
    return unsupported("method.loss_type takes one loss; method.rpo_alpha adds the likelihood of the chosen answer.")


def _beta_default(file: File) -> Any:
    """TRL's own, which Axolotl trains with; other keys may say it."""
    said = file.get("dpo_beta") is not None or file.get("orpo_alpha") is not None
    return 0.1 if not said and method_of(file) in ("dpo", "ipo", "simpo", "orpo", "kto") else NO_DEFAULT


def _reference(value: Any, file: File) -> Answer:
    return mapped({"method.reference": "precompute"}) if value is True else needless(OFF)


def _tf32(value: Any, file: File) -> Answer:
    return mapped({"optim.tf32": value})


def _attention(words: str) -> Key:
    return flag({"model.attention": words})


def _attn_implementation(value: Any, file: File) -> Answer:
    return mapped({"model.attention": value})


def _compiled(value: Any, file: File) -> Answer:
    return mapped({"kernels.torch_compile": value})


def _learns_inputs(value: Any, file: File) -> Answer:
    return needless("Answers alone are learned, here too.") if is_off(value) else mapped({"data.trained_turns": "all"})


def _scheduler(value: Any, file: File) -> Answer:
    return mapped({"optim.lr_scheduler_type": value})


def _lr_kwargs(value: Any, file: File) -> Answer | list[Part]:
    if not isinstance(value, Mapping) or not value:
        return needless(OFF)
    return [(str(key), item, mapped({"optim.lr_scheduler_kwargs": {key: item}})) for key, item in value.items()]


def _optim_args(value: Any, file: File) -> Answer | list[Part]:
    if isinstance(value, Mapping):
        return [(str(key), item, mapped({"optim.optim_args": {key: item}})) for key, item in value.items()]
    return unsupported("optim.optim_args takes settings as `key: value`.")


def _batch(value: Any, file: File) -> Answer:
    micro, devices = file.get("micro_batch_size"), 1
    if isinstance(value, int) and isinstance(micro, int) and micro > 0 and value % micro == 0:
        words = "It counts a whole step on one GPU; the accumulation follows from it."
        return changed({"optim.gradient_accumulation_steps": value // micro // devices}, words)
    return unsupported(sentence_for("batch_size"))


def _trl(value: Any, file: File) -> Answer | list[Part]:
    if not isinstance(value, Mapping):
        return needless(OFF)
    parts: list[Part] = []
    for key, item in value.items():
        known = _IN_TRL.get(str(key))
        if item is None:
            answer: Answer | list[Part] = needless(OFF)
        elif known is not None:
            answer = known.means(item, file)
        elif str(key).startswith("vllm_"):
            answer = needless("It counts with vLLM alone.") if not value.get("use_vllm") else _VLLM
        else:
            answer = needless(OFF) if is_off(item) else unsupported("Answers are sampled and compared without it here.")
        parts += (
            [(str(key), item, part) for _, _, part in answer]
            if isinstance(answer, list)
            else [(str(key), item, answer)]
        )
    return parts


_VLLM = unsupported("Answers are sampled by the model that is trained; vLLM and SGLang are not here yet.")
_REWARD = "A reward function of a module is written as `file.py:function` in method.reward_funcs."


def _rewards(value: Any, file: File) -> Answer:
    names = value if isinstance(value, list) else [value]
    found = [_reward(str(name), file) for name in names]
    if not all(found):
        return unsupported(_REWARD)
    trl = file.get("trl")
    weights = trl.get("reward_weights") if isinstance(trl, Mapping) else None
    if isinstance(weights, list) and len(weights) == len(found):
        found = [f"{weight} * {name}" for weight, name in zip(weights, found, strict=True)]
    return changed({"method.reward_funcs": found}, "The function is taken from the file of that module.")


def _reward(name: str, file: File) -> str:
    """`file.py:function` for `module.function`, where that file is there."""
    module, _, function = name.rpartition(".")
    there = file.found(module.replace(".", "/") + ".py") if module else None
    return f"{file.from_out(there)}:{function}" if there is not None else ""


def _scaled(value: Any, file: File) -> Answer:
    return mapped({"method.scale_rewards": "group" if value is True else "none" if value is False else value})


_IN_TRL: dict[str, Key] = {
    "beta": same("method.beta"),
    "max_completion_length": same("method.max_completion_length"),
    "use_vllm": unless_off("Answers are sampled by the model that is trained; vLLM and SGLang are not here yet."),
    "reward_funcs": Key(_rewards),
    "reward_weights": nothing("The weights stand before the rewards in method.reward_funcs."),
    "num_generations": same("method.num_generations"),
    "log_completions": nothing("Groups with their answers are kept in the run folder: method.rollout_groups."),
    "num_completions_to_print": nothing("Groups with their answers are kept in the run folder: method.rollout_groups."),
    "sync_ref_model": unless_off("The reference stays where training began."),
    "ref_model_mixup_alpha": nothing("It counts where the reference follows the model."),
    "ref_model_sync_steps": nothing("It counts where the reference follows the model."),
    "scale_rewards": Key(_scaled),
    "temperature": same("method.temperature"),
    "top_p": same("method.top_p"),
    "top_k": same("method.top_k"),
    "repetition_penalty": same("method.repetition_penalty"),
    "num_iterations": same("method.num_iterations"),
    "epsilon": same("method.epsilon"),
    "epsilon_high": same("method.epsilon_high"),
    "loss_type": same("method.loss_type"),
    "mask_truncated_completions": same("method.mask_truncated_completions"),
    "importance_sampling_level": same("method.importance_sampling_level"),
}


_FUSED = "It is a faster form of the same mathematics; the section kernels has the workbench's own."
_LORA_KERNEL = (
    "kernels.fused_lora is the workbench's own form of it; `auto` leaves it off unless timing finds it faster."
)
_RARE = "There is nothing like it here."
_POSE = "Positions are taken as they are; model.name may be a model with a longer context."
_TOKENIZER = "A tokenizer is taken as its folder has it; model.tokenizer names another."
_GENERATED = "run.prompts are answered while a run trains; run.max_new_tokens bounds an answer."
_METRICS = "The loss on data.eval is measured; other metrics are not."
_DEVICES = "run.devices says on which GPUs of this machine a run works."
_DDP = "It concerns how processes exchange gradients, which is set by itself here."
_LOADER = "Rows are prepared before the run and read from memory."
_LAYERS = "Every layer gets an adapter that adapter.target_modules names, as a pattern of whole names too."
_EVALS = "Rows of data.eval are measured every run.eval_steps steps, ten times a run by itself."
_SAVED = "Every checkpoint holds what a run needs to go on, as safetensors."

KEYS: dict[str, Key] = {
    # The model
    "base_model": placed("model.name"),
    "base_model_config": unless_off("The model's own config.json is read."),
    "cls_model_config": nothing("The class follows from the model's own config.json."),
    "tokenizer_config": placed("model.tokenizer"),
    "tokenizer_use_fast": unless_off(_TOKENIZER, "Fast tokenizers are taken where there are any."),
    "tokenizer_legacy": unless_off(_TOKENIZER),
    "tokenizer_use_mistral_common": unless_off(_TOKENIZER),
    "tokenizer_type": nothing("The class follows from the tokenizer's own files."),
    "tokenizer_save_jinja_files": nothing("Checkpoints hold the tokenizer as transformers saves it."),
    "processor_type": unless_off(),
    "trust_remote_code": unless_off(),
    "experimental_skip_move_to_device": nothing("It concerns how a model is loaded, not what is learned."),
    "use_kernels": unless_off(_FUSED),
    "model_quantization_config": unless_off(_QUANTIZED),
    "model_quantization_config_kwargs": unless_off(_QUANTIZED),
    "model_type": nothing("The class follows from the model's own config.json and from the method."),
    "type_of_model": nothing("The class follows from the model's own config.json and from the method."),
    "model_revision": same("model.revision"),
    "revision_of_model": same("model.revision"),
    "model_config": unless_off("A model is taken as its config.json has it: change that in a folder of your own."),
    "overrides_of_model_config": unless_off("A model is taken as its config.json has it: change that in a folder of your own."),
    "model_kwargs": unless_off("A model is loaded with what model.dtype, quantization and attention say."),
    "overrides_of_model_kwargs": unless_off("A model is loaded with what model.dtype, quantization and attention say."),
    "rope_scaling": unless_off("A model is taken as its config.json has it: change that in a folder of your own."),
    "reinit_weights": unless_off("Weights are loaded; builtin/tiny alone begins untrained."),
    "num_labels": unless(1, "A reward model has one score, a process reward model a verdict on each step."),
    "is_falcon_derived_model": nothing(INTERNAL),
    "is_llama_derived_model": nothing(INTERNAL),
    "is_mistral_derived_model": nothing(INTERNAL),
    "is_qwen_derived_model": nothing(INTERNAL),
    "special_tokens": unless_off("They are the tokenizer's: model.tokenizer names one that has them."),
    "tokens": unless_off(),
    "added_tokens_overrides": unless_off(),
    "resize_token_embeddings_to_32x": unless_off(),
    "mean_resizing_embeddings": unless_off("No token is added here, so no embedding is made."),
    "shrink_embeddings": unless_off("Embeddings stay as the model has them."),
    "embeddings_skip_upcast": nothing("Embeddings stay in model.dtype here."),
    "fix_untrained_tokens": unless_off(),
    "chat_template": Key(_template),
    "chat_template_jinja": Key(_jinja),
    "chat_template_kwargs": same("model.chat_template_kwargs"),
    "eot_tokens": unless_off("What ends a turn is read off the template."),
    "default_system_message": unless_off("A system turn stands in the rows or in the template."),
    "bf16": Key(_bf16),
    "fp16": flag({"model.dtype": "float16"}),
    "fp8": flag({"kernels.quantization_aware": "fp8"}),
    "fp8_enable_fsdp_float8_all_gather": unless_off("It counts with FSDP, which is not here yet."),
    "bfloat16": flag({"model.dtype": "bfloat16"}),
    "float16": flag({"model.dtype": "float16"}),
    "float32": flag({"model.dtype": "float32"}),
    "tf32": Key(_tf32),
    "attn_implementation": Key(_attn_implementation),
    "flash_attention": _attention("flash_attention_2"),
    "sdp_attention": _attention("sdpa"),
    "eager_attention": _attention("eager"),
    "flex_attention": _attention("flex_attention"),
    "flex_attn_compile_kwargs": nothing("Flexible attention is compiled as torch does it by itself."),
    "xformers_attention": unless_off("model.attention names what there is."),
    "s2_attention": unless_off("model.attention names what there is."),
    "sage_attention": unless_off("model.attention names what there is."),
    "gemma4_hybrid_attn_impl": unless_off("model.attention is one for all layers; what a layer cannot take is replaced and said."),
    "experts_implementation": nothing("Experts are computed as transformers does it."),
    "scaling_softmax": unless_off(_RARE),
    "scaling_softmax_factor": nothing("It counts with scaling_softmax."),
    "scaling_softmax_bias": nothing("It counts with scaling_softmax."),
    "flash_attn_cross_entropy": unless_off("kernels.use_cut_ce is the workbench's own form of it."),
    "flash_attn_rms_norm": unless_off(_FUSED),
    "flash_attn_fuse_qkv": unless_off(_FUSED),
    "flash_attn_fuse_mlp": unless_off(_FUSED),
    "flash_optimum": unless_off(_FUSED),
    "max_memory": unless_off("Each GPU holds the whole model; memory.layer_offloading makes that smaller."),
    "gpu_memory_limit": unless_off("`workbench estimate` says beforehand what a run needs."),
    "low_cpu_mem_usage": nothing("Weights are loaded piece by piece."),
    "device": nothing(_DEVICES),
    "device_map": unless_off(_DEVICES),
    "quantize_moe_experts": unless_off(),
    "llama4_linearized_experts": unless_off("adapter.target_parameters names experts' weights."),
    # The adapter
    "adapter": Key(_adapter),
    "load_in_8bit": flag({"model.quantization": "int8"}),
    "load_in_4bit": Key(_four_bits),
    "bnb_config_kwargs": Key(_bnb),
    "gptq": unless_off(_QUANTIZED),
    "lora_model_dir": unless_off(),
    "lora_r": same("adapter.r"),
    "lora_alpha": same("adapter.lora_alpha"),
    "lora_dropout": lora_dropout(method_of),
    "lora_fan_in_fan_out": nothing("PEFT sees by itself how a layer holds its weight."),
    "lora_target_modules": Key(_targets),
    "lora_target_linear": flag({"adapter.target_modules": "all-linear"}),
    "lora_target_parameters": same("adapter.target_parameters"),
    "lora_modules_to_save": same("adapter.modules_to_save"),
    "lora_on_cpu": nothing("It concerns where an adapter is loaded, not what is learned."),
    "peft": unless_off("model.quantization names how the base weights are held; LoftQ is not here yet."),
    "peft_layers_to_transform": unless_off(_LAYERS),
    "peft_layers_pattern": unless_off(_LAYERS),
    "peft_use_dora": same("adapter.use_dora"),
    "peft_use_rslora": same("adapter.use_rslora"),
    "peft_layer_replication": unless_off(_RARE),
    "peft_init_lora_weights": unless(True, "Other starts of an adapter are not here yet."),
    "peft_trainable_token_indices": unless_off("adapter.modules_to_save trains a whole embedding."),
    "peft_ensure_weight_tying": unless_off("What a model ties stays tied in its base alone."),
    "peft_autocast_adapter_dtype": same(
        "adapter.autocast_adapter_dtype", default=True, why="PEFT holds an adapter in float32 by itself, and Axolotl leaves that on."
    ),
    "qlora_sharded_model_loading": unless_off("It counts with FSDP, which is not here yet."),
    "loraplus_lr_ratio": unless_off(),
    "loraplus_lr_embedding": nothing("It counts with LoRA+."),
    "merge_lora": unless_off("A run leaves an adapter; merging it is another command's."),
    "merge_method": nothing("It counts where an adapter is merged."),
    "relora": unless_off(),
    "relora_prune_ratio": nothing("It counts with ReLoRA."),
    "relora_prune_method": nothing("It counts with ReLoRA."),
    "relora_cpu_offload": nothing("It counts with ReLoRA."),
    "relora_steps": nothing("It counts with ReLoRA."),
    "relora_warmup_steps": nothing("It counts with ReLoRA."),
    "relora_anneal_steps": nothing("It counts with ReLoRA."),
    "unfrozen_parameters": same("adapter.unfrozen_parameters"),
    "freeze_mm_modules": flag({"model.train_vision": "none"}),
    # The method
    "rl": Key(lambda value, file: mapped({"method.kind": value}) if value in _KINDS else unsupported(
        "method.kind names the methods there are.")),
    "reward_model": flag({"method.kind": "reward"}),
    "process_reward_model": flag({"method.kind": "prm"}),
    "rl_beta": same("method.beta", default=_beta_default),
    "dpo_beta": same("method.beta"),
    "orpo_alpha": same("method.beta"),
    "simpo_gamma": same("method.simpo_gamma", default=lambda file: 0.5 if method_of(file) == "simpo" else NO_DEFAULT),
    "cpo_alpha": same("method.cpo_alpha", default=lambda file: 1.0 if method_of(file) == "simpo" else NO_DEFAULT),
    "rpo_alpha": same("method.rpo_alpha"),
    "dpo_label_smoothing": Key(_of_pairs("method.label_smoothing")),
    "dpo_loss_type": Key(_loss_types),
    "dpo_loss_weights": unless_off("method.loss_type takes one loss."),
    "dpo_use_weighting": unless_off("Pairs are weighed alike here."),
    "dpo_use_logits_to_keep": nothing("Logits are computed where they are learned from, and nowhere else."),
    "dpo_use_liger_kernel": unless_off(_FUSED),
    "dpo_padding_free": nothing("A batch is padded to its longest row."),
    "dpo_norm_loss": where_known("method.dpo_norm_loss", unless_off("method.loss_type names the losses there are.")),
    "dpo_generate_during_eval": unless_off(_GENERATED),
    "precompute_ref_log_probs": Key(_reference),
    "kto_desirable_weight": desirable_weight(method_of),
    "kto_undesirable_weight": same("method.undesirable_weight"),
    "center_rewards_coefficient": same("method.center_rewards_coefficient"),
    "trl": Key(_trl),
    "vllm": unless_off("Answers are sampled by the model that is trained; vLLM and SGLang are not here yet."),
    "ebft": unless_off("Energy-based fine-tuning is not here."),
    "trainer_cls": unless_off("A run's trainer follows from method.kind."),
    "qat": unless_off("kernels.quantization_aware learns around int8."),
    "quantization": unless_off("It counts after training; model.quantization names how the base weights are held meanwhile."),
    "neftune_noise_alpha": unless_off(),
    "noisy_embedding_alpha": unless_off(),
    "use_eaft": unless_off(_RARE),
    "eaft_alpha": nothing("It counts with use_eaft."),
    "eaft_k": nothing("It counts with use_eaft."),
    "use_pose": unless_off(_POSE),
    "pose_split_on_token_ids": nothing("It counts with use_pose."),
    "pose_max_context_len": nothing("It counts with use_pose."),
    "pose_num_chunks": nothing("It counts with use_pose."),
    # The rows
    "datasets": Key(_sources("data.train")),
    "pretraining_dataset": Key(_sources("data.train")),
    "test_datasets": Key(_sources("data.eval")),
    "val_set_size": where_known("data.val_set_size", unless_off()),
    "dataset_prepared_path": nothing("Prepared rows are kept in the cache of this machine by themselves."),
    "dataset_shard_num": unless_off(_SHARDS),
    "dataset_shard_idx": unless_off(_SHARDS),
    "num_dataset_shards_to_save": nothing("Prepared rows are kept in the cache of this machine by themselves."),
    "skip_prepare_dataset": unless_off("Rows are always prepared before training."),
    "shuffle_merged_datasets": same("data.shuffle", reason="data.shuffle mixes the rows of all sources anew in each epoch."),
    "shuffle_before_merging_datasets": unless_off("data.shuffle mixes the rows of all sources."),
    "dataset_processes": nothing(_LOADER),
    "dataset_num_proc": nothing(_LOADER),
    "dataset_exact_deduplication": flag({"data.deduplicate": "exact"}),
    "dataset_keep_in_memory": nothing(_LOADER),
    "dataloader_pin_memory": nothing(_LOADER),
    "dataloader_num_workers": nothing(_LOADER),
    "dataloader_prefetch_factor": nothing(_LOADER),
    "dataloader_drop_last": unless_off("The last batch of an epoch is learned from too."),
    "remove_unused_columns": nothing("A row gives what its method learns from, whatever columns stand beside."),
    "push_dataset_to_hub": unless_off(),
    "hf_use_auth_token": nothing("A token for the hub is read from the environment."),
    "sequence_len": same("data.max_length", default=512),
    "eval_sequence_len": unless_off("Held-out rows have the same longest row as the others."),
    "excess_length_strategy": Key(_too_long, default="drop"),
    "min_sample_len": unless_off("Short rows are learned from too; those with nothing to learn are named."),
    "max_prompt_len": unless_off(sentence_for("max_prompt_length")),
    "max_packed_sequence_len": unless_off("data.packing packs rows up to data.max_length."),
    "sample_packing": Key(_packing),
    "eval_sample_packing": Key(_eval_packing),
    "sample_packing_group_size": nothing("How packs are found is no setting here."),
    "sample_packing_bin_size": nothing("How packs are found is no setting here."),
    "sample_packing_sequentially": unless_off("How packs are found is no setting here."),
    "sample_packing_mp_start_method": nothing("How packs are found is no setting here."),
    "sample_packing_eff_est": nothing(INTERNAL),
    "total_num_tokens": nothing(INTERNAL),
    "total_supervised_tokens": nothing(INTERNAL),
    "pad_to_sequence_len": nothing("A batch is padded to its longest row, and packs need no padding."),
    "pad_to_multiple_of": nothing("A batch is padded to its longest row."),
    "curriculum_sampling": Key(lambda value, file: needless(OFF) if is_off(value) else mapped({"data.shuffle": False})),
    "multipack_real_batches": nothing("How packs are found is no setting here."),
    "batch_flattening": nothing("It concerns how a batch is computed, not what is learned; data.packing saves the padding."),
    "pretrain_multipack_buffer_size": nothing("It counts with streaming."),
    "pretrain_multipack_attn": nothing("data.packing_cross_doc_attn_mask says it, as sample_packing does."),
    "pretraining_sample_concatenation": unless_off("data.packing packs texts; data.excess_length splits long ones."),
    "streaming": unless_off(),
    "streaming_multipack_buffer_size": nothing("It counts with streaming."),
    "train_on_inputs": Key(_learns_inputs),
    "group_by_length": unless_off(sentence_for("group_by_length")),
    # The optimizer
    "gradient_accumulation_steps": same("optim.gradient_accumulation_steps", default=lambda file: NO_DEFAULT if file.get("batch_size") else 1),
    "micro_batch_size": same("optim.per_device_train_batch_size", default=1),
    "batch_size": Key(_batch),
    "eval_batch_size": same("optim.per_device_eval_batch_size"),
    "auto_find_batch_size": unless_off("`workbench estimate` says beforehand what fits."),
    "learning_rate": same("optim.learning_rate"),
    "embedding_lr": unless_off("All that is trained has one learning rate."),
    "embedding_lr_scale": unless_off("All that is trained has one learning rate."),
    "lr_groups": unless_off("All that is trained has one learning rate."),
    "weight_decay": same("optim.weight_decay"),
    "optimizer": same("optim.optim"),
    "optim_args": Key(_optim_args),
    "optim_target_modules": Key(lambda value, file: mapped({"optim.optim_target_modules": "all-linear" if value == "all_linear" else value})),
    "torchdistx_path": nothing("It counts with adamw_anyprecision, which is not here."),
    "lr_scheduler": Key(_scheduler, default="cosine"),
    "lr_scheduler_kwargs": Key(_lr_kwargs),
    "lr_quadratic_warmup": unless_off("The learning rate rises on a line."),
    "cosine_min_lr_ratio": unless_off("cosine falls to 0; polynomial has `lr_end` among optim.lr_scheduler_kwargs."),
    "cosine_constant_lr_ratio": unless_off("cosine falls to 0; polynomial has `lr_end` among optim.lr_scheduler_kwargs."),
    "lr_div_factor": unless_off("The learning rate rises from 0."),
    "jagged_restart_steps": unless_off(),
    "jagged_restart_warmup_steps": nothing("It counts with jagged_restart_steps."),
    "jagged_restart_anneal_steps": nothing("It counts with jagged_restart_steps."),
    "adam_epsilon": same("optim.adam_epsilon"),
    "adam_epsilon2": unless_off("CAME's second epsilon is its own default here."),
    "adam_beta1": same("optim.adam_beta1"),
    "adam_beta2": same("optim.adam_beta2"),
    "adam_beta3": Key(lambda value, file: mapped({"optim.optim_args": {"beta3": value}})),
    "max_grad_norm": same("optim.max_grad_norm"),
    "num_epochs": same("optim.num_train_epochs"),
    "max_steps": same("optim.max_steps"),
    "warmup_steps": Key(_warmup_steps, default=_warmup_default),
    "warmup_ratio": Key(_warmup),
    "dion_lr": unless_off("All that is trained has one learning rate."),
    "dion_momentum": unless_off("optim.optim_args takes `momentum` for dion."),
    "dion_rank_fraction": unless_off("optim.optim_args takes `rank_fraction` for dion."),
    "dion_rank_multiple_of": nothing("It concerns how a rank is rounded."),
    "lisa_n_layers": unless_off(),
    "lisa_step_interval": nothing("It counts with LISA."),
    "lisa_layers_attribute": nothing("It counts with LISA."),
    # Memory and speed
    "gradient_checkpointing": Key(_checkpointing),
    "gradient_checkpointing_kwargs": nothing(sentence_for("gradient_checkpointing_kwargs")),
    "activation_offloading": Key(_offloading),
    "layer_offloading": same("memory.layer_offloading"),
    "tiled_mlp": same("memory.tiled_mlp"),
    "tiled_mlp_num_shards": unless_off("memory.tiled_mlp_tokens says how many tokens a tile has."),
    "tiled_mlp_use_original_mlp": nothing("The model's own block is computed in tiles."),
    "chunked_cross_entropy": unless_off("kernels.use_cut_ce is the workbench's own form of it."),
    "chunked_cross_entropy_num_chunks": nothing("It counts with chunked_cross_entropy."),
    "cut_cross_entropy": same("kernels.use_cut_ce"),
    "lora_mlp_kernel": unless_off(_LORA_KERNEL),
    "lora_qkv_kernel": unless_off(_LORA_KERNEL),
    "lora_o_kernel": unless_off(_LORA_KERNEL),
    "lora_embedding_kernel": unless_off(_LORA_KERNEL),
    "unsloth_cross_entropy_loss": unless_off(),
    "unsloth_lora_mlp": unless_off(),
    "unsloth_lora_qkv": unless_off(),
    "unsloth_lora_o": unless_off(),
    "unsloth_rms_norm": unless_off(),
    "unsloth_rope": unless_off(),
    "liger_rope": unless_off(),
    "liger_rms_norm": unless_off(),
    "liger_glu_activation": unless_off(),
    "liger_layer_norm": unless_off(),
    "liger_fused_linear_cross_entropy": unless_off(),
    "plugins": unless_off(),
    "torch_compile": Key(_compiled),
    "torch_compile_backend": unless("inductor", "Layers are compiled by torch's inductor."),
    "torch_compile_mode": where_known("kernels.torch_compile_mode", unless("default", "kernels.torch_compile_options takes single options of the compiler.")),
    "gc_steps": nothing("Memory is collected by itself."),
    # Several devices
    "deepspeed": unless_off(),
    "deepcompile": unless_off("It counts with DeepSpeed, which is not here yet."),
    "fsdp": unless_off(),
    "fsdp_config": unless_off(),
    "fsdp_version": unless_off(),
    "fsdp_final_state_dict_type": unless_off(),
    "dp_shard_size": unless_off(),
    "dp_replicate_size": unless_off(),
    "sequence_parallel_degree": unless_off(),
    "context_parallel_size": unless_off(),
    "tensor_parallel_size": unless_off(),
    "expert_parallel_size": unless_off(),
    "heads_k_stride": nothing("It counts where rows are split over GPUs."),
    "ring_attn_func": nothing("It counts where rows are split over GPUs."),
    "accelerator_config": unless_off("How batches reach the devices is set by itself."),
    "world_size": nothing(_DEVICES),
    "local_rank": nothing(INTERNAL),
    "ddp": nothing(_DEVICES),
    "ddp_timeout": nothing(_DDP),
    "ddp_bucket_cap_mb": nothing(_DDP),
    "ddp_broadcast_buffers": nothing(_DDP),
    "ddp_find_unused_parameters": nothing(_DDP),
    "use_ray": unless_off(_DEVICES),
    "ray_run_name": nothing("It counts with Ray."),
    "ray_num_workers": nothing("It counts with Ray."),
    "resources_per_worker": nothing("It counts with Ray."),
    # The run
    "output_dir": same("run.output_dir", reason="Each run gets a folder of its own in it."),
    "seed": same("run.seed"),
    "strict": nothing("Unknown keys are always an error here."),
    "resume_from_checkpoint": unless_off(sentence_for("resume_from_checkpoint")),
    "auto_resume_from_checkpoints": unless_off(sentence_for("resume_from_checkpoint")),
    "logging_steps": same("run.logging_steps"),
    "save_steps": Key(_every("run.save_steps", "saves_per_epoch", "")),
    "saves_per_epoch": where_known("run.saves_per_epoch", unless_off()),
    "save_strategy": Key(_save_strategy, default=_save_default),
    "save_total_limit": same("run.save_total_limit", default=4),
    "save_first_step": nothing("`workbench estimate --rehearse` shows before a run whether it would work."),
    "save_only_model": unless_off(_SAVED),
    "save_safetensors": unless(True, _SAVED, _SAVED),
    "dynamic_checkpoint": unless_off("`workbench checkpoint RUN` asks a run for one at any time."),
    "eval_steps": Key(_every("run.eval_steps", "evals_per_epoch", "")),
    "evals_per_epoch": Key(_evals_per_epoch),
    "eval_strategy": Key(_eval_strategy),
    "evaluation_strategy": Key(_eval_strategy),
    "eval_table_size": nothing(_GENERATED),
    "eval_max_new_tokens": nothing(_GENERATED),
    "early_stopping_patience": where_known("optim.early_stopping_patience", unless_off()),
    "load_best_model_at_end": BEST,
    "metric_for_best_model": same("run.metric_for_best_model"),
    "greater_is_better": same("run.greater_is_better"),
    "loss_watchdog_threshold": unless_off(sentence_for("loss_watchdog_threshold")),
    "loss_watchdog_patience": unless_off(sentence_for("loss_watchdog_patience")),
    "do_causal_lm_eval": unless_off(_METRICS),
    "eval_causal_lm_metrics": nothing("It counts with do_causal_lm_eval."),
    "do_bench_eval": unless_off(_METRICS),
    "bench_dataset": nothing("It counts with do_bench_eval."),
    "bench_split": nothing("It counts with do_bench_eval."),
    "generate_samples": unless_off(_GENERATED),
    "num_generation_samples": nothing("It counts with generate_samples."),
    "generation_max_new_tokens": nothing("It counts with generate_samples."),
    "generation_temperature": nothing("It counts with generate_samples."),
    "generation_top_p": nothing("It counts with generate_samples."),
    "generation_top_k": nothing("It counts with generate_samples."),
    "generation_prompt_ratio": nothing("It counts with generate_samples."),
    "generation_do_sample": nothing("It counts with generate_samples."),
    "profiler_steps": unless_off("`workbench stack RUN` shows where a run is."),
    "profiler_steps_start": nothing("It counts with profiler_steps."),
    "include_tokens_per_second": nothing("Tokens a second are always a curve."),
    "include_tkps": nothing("Tokens a second are always a curve."),
    "hub_model_id": unless_off(),
    "hub_strategy": unless_off(),
    "hub_revision": unless_off(),
    "use_tensorboard": tracker("tensorboard"),
    "use_wandb": tracker("wandb"),
    "wandb_name": same("run.name"),
    "wandb_run_id": unless_off(),
    "wandb_mode": unless_off(),
    "wandb_project": unless_off(),
    "wandb_entity": unless_off(),
    "wandb_watch": unless_off(),
    "wandb_log_model": unless_off(),
    "use_mlflow": unless_off(),
    "mlflow_tracking_uri": unless_off(),
    "mlflow_experiment_name": unless_off(),
    "mlflow_run_name": unless_off(),
    "hf_mlflow_log_artifacts": unless_off("A run keeps its curves in its own folder."),
    "use_comet": unless_off(),
    "comet_api_key": unless_off(),
    "comet_workspace": unless_off(),
    "comet_project_name": unless_off(),
    "comet_experiment_key": unless_off(),
    "comet_mode": unless_off(),
    "comet_online": unless_off(),
    "comet_experiment_config": unless_off(),
    "use_trackio": unless_off("A run keeps its curves in its own folder."),
    "trackio_project_name": unless_off(),
    "trackio_run_name": unless_off(),
    "trackio_space_id": unless_off(),
    "use_otel_metrics": unless_off("A run keeps its curves in its own folder."),
    "otel_metrics_host": nothing("It counts with use_otel_metrics."),
    "otel_metrics_port": nothing("It counts with use_otel_metrics."),
    "gradio_title": nothing("It is a page to try a model on."),
    "gradio_share": nothing("It is a page to try a model on."),
    "gradio_server_name": nothing("It is a page to try a model on."),
    "gradio_server_port": nothing("It is a page to try a model on."),
    "gradio_max_new_tokens": nothing("It is a page to try a model on."),
    "gradio_temperature": nothing("It is a page to try a model on."),
    "image_size": unless_off(),
    "image_resize_algorithm": unless_off(),
    "is_preprocess": nothing(INTERNAL),
    "preprocess_iterable": nothing(INTERNAL),
    "axolotl_config_path": nothing(INTERNAL),
}  # fmt: skip
