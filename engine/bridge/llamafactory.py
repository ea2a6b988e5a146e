"""LLaMA-Factory's keys and what they mean here, by its arguments (read 2026).

Data sets stand by name in a list of its own (`engine.bridge.dataset_info`).
"""

from __future__ import annotations

from typing import Any

from engine.bridge import trainer_keys
from engine.bridge.dataset_info import LIST, datasets, sources_of
from engine.bridge.keys import (
    EXPERTS_STAY,
    NO_DEFAULT,
    OFF,
    Answer,
    File,
    Key,
    anything,
    changed,
    choice,
    flag,
    mapped,
    needless,
    nothing,
    of_new_adapter,
    placed,
    same,
    unless,
    unless_off,
    unsupported,
    where_known,
)
from engine.config.files import DATA_SUFFIXES
from engine.config.method import METHODS
from engine.config.renames import TEMPLATES, is_off, sentence_for

_STAGES = {"sft": "sft", "pt": "pretrain", "kto": "kto", "rm": "reward", "ppo": "ppo"}
_PREFERENCES = {"sigmoid": "dpo", "hinge": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}


def method_of(file: File) -> str:
    """The method that `stage` and, for preferences, `pref_loss` name."""
    stage = file.get("stage", "sft")
    if stage == "dpo":
        return _PREFERENCES.get(str(file.get("pref_loss", "sigmoid")), "dpo")
    return _STAGES.get(str(stage), "sft")


def _is_lora(file: File) -> bool:
    return bool(file.get("finetuning_type", "lora") == "lora")


def _is_new_lora(file: File) -> bool:
    """Whether an adapter is begun, so that the file says what it is."""
    return _is_lora(file) and not file.get("adapter_name_or_path")


# Single keys


def _stage(value: Any, file: File) -> Answer:
    kind = _PREFERENCES.get(file.get("pref_loss", "sigmoid")) if value == "dpo" else _STAGES.get(value)
    return mapped({"method.kind": kind}) if kind else unsupported("method.kind names the methods there are.")


def _pref_loss(value: Any, file: File) -> Answer:
    if value == "hinge" and method_of(file) == "dpo":
        return mapped({"method.loss_type": "hinge"})
    return (
        needless("method.kind says it.")
        if value in _PREFERENCES
        else unsupported("method.loss_type names the losses there are.")
    )


def _beta_default(file: File) -> Any:
    return 0.1 if method_of(file) in ("dpo", "ipo", "orpo", "simpo", "kto") else NO_DEFAULT


def _alpha_default(file: File) -> Any:
    rank = file.get("lora_rank", 8)
    return rank * 2 if _is_new_lora(file) and isinstance(rank, int) else NO_DEFAULT


def _trained_before(value: Any, file: File) -> Answer:
    """The adapter that is trained further; several are merged into the model there, but for the last one."""
    names = _names(value)
    if len(names) != 1:
        return unsupported("Merge those before the last one into the model first, and name that one in adapter.path.")
    settings = {"adapter.path": file.place(str(names[0]))}
    if getattr(METHODS[method_of(file)], "model_fields", {}).get("reference") is None:
        return mapped(settings)
    return mapped(
        settings | {"method.reference": "adapter_off"},
        "What is learned is held to the model without any adapter there.",
    )


def _targets(value: Any, file: File) -> Answer:
    names = _names(value)
    return mapped({"adapter.target_modules": "all-linear" if names == ["all"] else names})


def _names(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [name.strip() for name in str(value).split(",") if name.strip()]


def _bits(value: Any, file: File) -> Answer:
    kinds = {4: file.get("quantization_type", "nf4"), 8: "int8"}
    if file.get("quantization_method", "bnb") not in ("bnb", "bitsandbytes"):
        return unsupported(_QUANTIZED)
    return mapped({"model.quantization": kinds[value], **EXPERTS_STAY}) if value in (4, 8) else unsupported(_QUANTIZED)


_QUANTIZED = "model.quantization takes nf4, fp4, int8, fp8, mxfp4 or nvfp4."


def _length(value: Any, file: File) -> Answer:
    if method_of(file) == "pretrain":
        return mapped({"data.max_length": value, "data.excess_length": "split"}, "Longer texts are split, as there.")
    return mapped({"data.max_length": value, "data.excess_length": "truncate"}, "Longer rows are cut, as there.")


def _template(value: Any, file: File) -> Answer:
    if value in TEMPLATES:
        return mapped({"model.chat_template": value})
    if is_off(value):
        return needless("Rows of plain text need no template." if method_of(file) == "pretrain" else OFF)
    return changed(
        {"model.chat_template": None},
        "LLaMA-Factory's templates have names of their own: the tokenizer's own template stands here.",
    )


def _packing_default(file: File) -> Any:
    return True if method_of(file) == "pretrain" and not file.on("neat_packing") else NO_DEFAULT


def _packing(value: Any, file: File) -> Answer:
    if is_off(value):
        return needless("neat_packing packs them.") if file.on("neat_packing") else mapped({"data.packing": False})
    return mapped({"data.packing": True, "data.packing_cross_doc_attn_mask": file.on("neat_packing")})


def _max_samples(value: Any, file: File) -> Answer:
    _, listed = sources_of(file)
    names = str(file.get("dataset", ""))
    known = listed or any(name.strip().lower().endswith(DATA_SUFFIXES) or "/" in name for name in names.split(","))
    return (
        needless("Each source takes its first rows with `rows`, as dataset says.")
        if known
        else unsupported(sentence_for("max_samples"))
    )


def _pure(value: Any, file: File) -> Answer:
    """Without it the weights that are trained are held in float32."""
    if not is_off(value):
        return mapped({"model.dtype": "bfloat16"})
    if _is_lora(file):
        return mapped({"adapter.autocast_adapter_dtype": True}, "An adapter is trained in float32 there.")
    return changed(
        {},
        "Weights that are trained are held in float32 there, beside products in bfloat16; here all is in model.dtype.",
    )


def _rewards(value: Any, file: File) -> Answer:
    kind = file.get("reward_model_type", "lora")
    if method_of(file) != "ppo":
        return needless("It counts with stage ppo.")
    if kind == "full":
        return mapped({"method.reward_funcs": [f"model:{file.place(str(value))}"]})
    return unsupported("A reward model stands in method.reward_funcs as `model:NAME`, merged with its adapter.")


def _of_galore(key: str) -> Any:
    def means(value: Any, file: File) -> Answer:
        if not file.on("use_galore"):
            return needless("It counts with use_galore.")
        if key == "target":
            names = [name.strip() for name in str(value).split(",")]
            return mapped({"optim.optim_target_modules": "all-linear" if names == ["all"] else names})
        return mapped({"optim.optim_args": {key: value}})

    return means


def _galore_default(value: Any) -> Any:
    return lambda file: value if file.on("use_galore") else NO_DEFAULT


_BADAM = nothing("It counts with use_badam.")
_APOLLO = nothing("It counts with use_apollo.")
_OFT = nothing("It counts with finetuning_type oft.")
_FREEZE = unless_off(sentence_for("freeze_trainable_layers"))
_SWAN = unless_off()
_ANSWERS = nothing("It concerns answers after training.")
_EXPORTED = nothing("It concerns the export of a model.")
_PPO = "PPO's own settings stand below method: num_iterations, beta, gamma, lam."

KEYS: dict[str, Key] = {
    **trainer_keys.KEYS,
    # The model
    "model_name_or_path": placed("model.name"),
    "adapter_name_or_path": Key(_trained_before),
    "adapter_folder": unless_off("Merge it into its model first and name the merged model."),
    "cache_dir": nothing("Models are kept where the hub's own client keeps them."),
    "use_fast_tokenizer": unless(True, "Fast tokenizers are taken where there are any."),
    "resize_vocab": unless_off(),
    "split_special_tokens": unless_off("Special tokens stay whole."),
    "add_tokens": unless_off(),
    "add_special_tokens": unless_off(),
    "new_special_tokens_config": unless_off("model.tokenizer names a tokenizer that has them already."),
    "init_special_tokens": nothing("It counts where tokens are added."),
    "model_revision": same("model.revision"),
    "low_cpu_mem_usage": nothing("Weights are loaded piece by piece."),
    "rope_scaling": unless_off("A model is taken as its config.json has it: change that in a folder of your own."),
    "flash_attn": choice(
        {
            "auto": mapped({"model.attention": "auto"}),
            "disabled": mapped({"model.attention": "eager"}),
            "sdpa": mapped({"model.attention": "sdpa"}),
            "fa2": mapped({"model.attention": "flash_attention_2"}),
            "fa3": mapped({"model.attention": "flash_attention_3"}),
        },
        otherwise="model.attention names what there is.",
    ),
    "shift_attn": unless_off("model.attention names what there is."),
    "mixture_of_depths": unless_off("A model is taken as its config.json has it."),
    "use_unsloth": unless_off(),
    "use_unsloth_gc": unless_off(),
    "enable_liger_kernel": same("kernels.use_liger_kernel", reason=trainer_keys.LIGER),
    "moe_aux_loss_coef": unless_off("The router's loss counts as the model's config.json says."),
    "disable_gradient_checkpointing": Key(lambda value, file: mapped({"memory.gradient_checkpointing": is_off(value)})),
    "use_reentrant_gc": nothing(sentence_for("gradient_checkpointing_kwargs")),
    "upcast_layernorm": same("memory.fp32_norms"),
    "upcast_lmhead_output": unless_off("Log-probabilities are computed in float32 from the head's own numbers."),
    "train_from_scratch": unless_off("Weights are loaded; builtin/tiny alone begins untrained."),
    "infer_backend": _ANSWERS,
    "infer_dtype": _ANSWERS,
    "offload_folder": nothing("memory.activation_offloading and layer_offloading have places of their own."),
    "use_kv_cache": nothing("Keys and values are kept where answers are sampled."),
    "use_v1_kernels": unless_off("The section kernels has the workbench's own."),
    "hf_hub_token": nothing("A token for the hub is read from the environment."),
    "ms_hub_token": nothing("A token for the hub is read from the environment."),
    "om_hub_token": nothing("A token for the hub is read from the environment."),
    "print_param_status": nothing("The receipt says what is trained and in which precision."),
    "trust_remote_code": unless_off(),
    "quantization_method": nothing("quantization_bit says how many bits."),
    "quantization_bit": Key(_bits),
    "quantization_type": nothing("model.quantization says it, as quantization_bit does."),
    "double_quantization": nothing("Weights of 4 bits are quantized twice here too."),
    "quantization_device_map": unless_off("run.devices says on which GPUs a run works."),
    "fp8": flag({"kernels.quantization_aware": "fp8"}),
    "fp8_backend": nothing("FP8 products are torchao's."),
    "fp8_enable_fsdp_float8_all_gather": unless_off("FSDP2 puts weights together in model.dtype here."),
    "image_max_pixels": same("data.max_pixels"),
    "image_min_pixels": same("data.min_pixels"),
    "image_do_pan_and_scan": unless_off(),
    "crop_to_patches": unless_off("Train on text alone."),
    "video_max_pixels": unless_off(),
    "video_min_pixels": unless_off(),
    "video_fps": unless_off(),
    "video_maxlen": unless_off(),
    "use_audio_in_video": unless_off("Train on text alone."),
    "audio_sampling_rate": unless_off(),
    "media_dir": same("data.image_base_dir"),
    "freeze_vision_tower": nothing("model.train_vision says which parts that see learn; a model of text has none."),
    "freeze_multi_modal_projector": nothing("model.train_vision says it."),
    "freeze_language_model": unless_off(),
    "bf16": anything({"model.dtype": "bfloat16"}),
    "fp16": flag({"model.dtype": "float16"}),
    "pure_bf16": Key(_pure, default=False),
    # The adapter
    "finetuning_type": choice(
        {"full": mapped({"adapter.kind": "none"}), "lora": mapped({"adapter.kind": "lora"})},
        otherwise="adapter.kind is lora or none; adapter.unfrozen_parameters trains some weights alone.",
        default="lora",
    ),
    "lora_rank": of_new_adapter("adapter_name_or_path", same("adapter.r", default=lambda file: 8 if _is_new_lora(file) else NO_DEFAULT)),
    "lora_alpha": of_new_adapter("adapter_name_or_path", same("adapter.lora_alpha", default=_alpha_default, why="It is twice lora_rank there.")),
    "lora_dropout": trainer_keys.lora_dropout(method_of),
    "lora_target": of_new_adapter("adapter_name_or_path", Key(_targets)),
    "additional_target": of_new_adapter("adapter_name_or_path", Key(lambda value, file: mapped({"adapter.modules_to_save": _names(value)}))),
    "loraplus_lr_ratio": where_known("adapter.loraplus_lr_ratio", unless_off()),
    "loraplus_lr_embedding": Key(
        lambda value, file: mapped({"adapter.loraplus_lr_embedding": value})
        if file.get("loraplus_lr_ratio")
        else needless("It counts with LoRA+.")
    ),
    "use_rslora": of_new_adapter("adapter_name_or_path", same("adapter.use_rslora")),
    "use_dora": of_new_adapter("adapter_name_or_path", same("adapter.use_dora")),
    "pissa_init": unless_off(),
    "pissa_iter": nothing("It counts with PiSSA."),
    "pissa_convert": unless_off(),
    "create_new_adapter": unless_off(),
    "module_dropout": _OFT,
    "oft_rank": _OFT,
    "oft_block_size": _OFT,
    "oft_target": _OFT,
    "freeze_trainable_layers": _FREEZE,
    "freeze_trainable_modules": _FREEZE,
    "freeze_extra_modules": _FREEZE,
    # The method
    "stage": Key(_stage),
    "pref_beta": same("method.beta", default=_beta_default),
    "pref_loss": Key(_pref_loss),
    "pref_ftx": same("method.rpo_alpha"),
    "pref_bco_weight": unless_off("method.loss_type bco_pair is that loss alone."),
    "dpo_label_smoothing": Key(lambda value, file: mapped({"method.label_smoothing": value}) if method_of(file) == "dpo" else needless("It counts with stage dpo.")),
    "kto_chosen_weight": trainer_keys.desirable_weight(method_of),
    "kto_rejected_weight": same("method.undesirable_weight"),
    "simpo_gamma": same("method.simpo_gamma", default=lambda file: 0.5 if method_of(file) == "simpo" else NO_DEFAULT),
    "ld_alpha": unless_off("Tokens of an answer are weighed alike."),
    "ref_model": unless_off("The reference is the model that training began with: method.reference."),
    "ref_model_adapters": unless_off("The reference is the model that training began with: method.reference."),
    "ref_model_quantization_bit": unless_off("The reference is the model that training began with: method.reference."),
    "reward_model": Key(_rewards),
    "reward_model_type": nothing("It counts with reward_model."),
    "reward_model_adapters": unless_off("Merge them first; method.reward_funcs takes `model:NAME`."),
    "reward_model_quantization_bit": unless_off("Reward models are held in model.dtype."),
    "ppo_buffer_size": unless_off(_PPO),
    "ppo_epochs": same("method.num_iterations"),
    "ppo_score_norm": unless_off(_PPO),
    "ppo_target": unless_off(_PPO),
    "ppo_whiten_rewards": unless_off(_PPO),
    "use_dft_loss": unless_off("SFT's loss is the cross-entropy of the learned tokens."),
    # The rows
    "dataset": Key(datasets("data.train", method_of)),
    "eval_dataset": Key(datasets("data.eval", method_of)),
    "dataset_dir": nothing(f"Its {LIST} is read, and each source has a path of its own."),
    "template": Key(_template),
    "cutoff_len": Key(_length, default=2048),
    "train_on_prompt": anything({"data.trained_turns": "all"}),
    "mask_history": anything({"data.trained_turns": "last"}),
    "streaming": flag({"data.streaming": True}),
    "buffer_size": nothing("It counts with streaming."),
    "mix_strategy": unless("concat", "weight below a source says how often its rows are used in an epoch.", "Sources are laid together, here too."),
    "interleave_probs": unless_off("weight below a source says how often its rows are used in an epoch."),
    "overwrite_cache": nothing("Prepared rows are made anew by themselves when their source changes."),
    "preprocessing_batch_size": nothing("Rows are prepared in blocks by themselves."),
    "preprocessing_num_workers": nothing("Rows are prepared before the run and read from memory."),
    "max_samples": Key(_max_samples),
    "eval_num_beams": nothing("It concerns answers after training."),
    "ignore_pad_token_for_loss": unless(True, "Padding is never learned from.", "Padding is never learned from."),
    "val_size": where_known("data.val_set_size", unless_off()),
    "eval_on_each_dataset": unless_off("All rows of data.eval are measured together."),
    "packing": Key(_packing, default=_packing_default),
    "neat_packing": anything({"data.packing": True, "data.packing_cross_doc_attn_mask": True}),
    "tool_format": unless_off("The chat template says how tools are written."),
    "default_system": unless_off("A system turn stands in the rows or in the template."),
    "enable_thinking": Key(lambda value, file: mapped({"model.chat_template_kwargs": {"enable_thinking": value}})),
    "tokenized_path": unless_off("data.dataset_prepared_path is a folder for rows that were prepared here."),
    "data_shared_file_system": nothing("A run works on one machine."),
    "disable_shuffling": Key(lambda value, file: mapped({"data.shuffle": is_off(value)})),
    # The optimizer
    "label_smoothing_factor": trainer_keys.label_smoothing(method_of),
    "save_total_limit": trainer_keys.KEEPS_ALL,
    "use_galore": anything({"optim.optim": "galore_adamw"}),
    "galore_target": Key(_of_galore("target")),
    "galore_rank": Key(_of_galore("rank"), default=_galore_default(16)),
    "galore_update_interval": Key(_of_galore("update_proj_gap"), default=_galore_default(200)),
    "galore_scale": Key(_of_galore("scale"), default=_galore_default(2.0)),
    "galore_proj_type": Key(_of_galore("proj_type")),
    "galore_layerwise": unless_off("GaLore moves all layers in one step."),
    "use_apollo": unless_off(),
    **dict.fromkeys(("apollo_target", "apollo_rank", "apollo_update_interval", "apollo_scale", "apollo_proj", "apollo_proj_type", "apollo_scale_type", "apollo_layerwise", "apollo_scale_front"), _APOLLO),
    "use_badam": unless_off(),
    **dict.fromkeys(("badam_mode", "badam_start_block", "badam_switch_mode", "badam_switch_interval", "badam_update_ratio", "badam_mask_mode", "badam_verbose"), _BADAM),
    "use_adam_mini": unless_off("optim.optim names the optimizers there are."),
    "use_muon": flag({"optim.optim": "muon"}),
    "use_llama_pro": unless_off(),
    "use_mca": unless_off("Megatron is not here."),
    "use_hyper_parallel": unless_off("Each GPU holds the whole model here."),
    "use_asft_loss": unless_off("SFT's loss is the cross-entropy of the learned tokens."),
    "asft_alpha": nothing("It counts with use_asft_loss."),
    "use_eaft_loss": unless_off("SFT's loss is the cross-entropy of the learned tokens."),
    "eaft_alpha": nothing("It counts with use_eaft_loss."),
    # The run
    "compute_accuracy": unless_off("The loss on data.eval is measured; for pairs how many are told right is a curve."),
    "early_stopping_steps": where_known("optim.early_stopping_patience", unless_off()),
    "plot_loss": nothing("The loss is plotted while a run trains and afterwards."),
    "include_effective_tokens_per_second": nothing("Tokens a second are always a curve."),
    "use_swanlab": _SWAN,
    **dict.fromkeys(("swanlab_project", "swanlab_workspace", "swanlab_run_name", "swanlab_mode", "swanlab_api_key", "swanlab_logdir", "swanlab_lark_webhook_url", "swanlab_lark_secret"), _SWAN),
    **dict.fromkeys(("ray_run_name", "ray_storage_path", "ray_storage_filesystem", "ray_num_workers", "resources_per_worker", "placement_strategy", "ray_init_kwargs", "master_addr", "master_port"), nothing("It counts with Ray.")),
    **dict.fromkeys(("do_sample", "temperature", "top_p", "top_k", "num_beams", "max_length", "max_new_tokens", "repetition_penalty", "length_penalty", "skip_special_tokens", "system_message"), _ANSWERS),
    **dict.fromkeys(("export_dir", "export_size", "export_device", "export_quantization_bit", "export_quantization_dataset", "export_quantization_nsamples", "export_quantization_maxlen", "export_legacy_format", "export_hub_model_id"), _EXPORTED),
    **dict.fromkeys(("vllm_maxlen", "vllm_gpu_util", "vllm_enforce_eager", "vllm_max_lora_rank", "vllm_config", "sglang_maxlen", "sglang_mem_fraction", "sglang_tp_size", "sglang_config", "sglang_lora_backend"), _ANSWERS),
    "use_kt": unless_off("KTransformers is not here."),
    **dict.fromkeys(("kt_optimize_rule", "cpu_infer", "chunk_size", "mode", "kt_maxlen", "kt_use_cuda_graph", "kt_mode", "kt_force_think"), nothing("It counts with use_kt.")),
}  # fmt: skip
