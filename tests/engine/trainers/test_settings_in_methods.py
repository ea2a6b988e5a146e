"""The search for settings without effect: each setting that a method has, changed in that method, on the CPU.

A run of the changed config must differ from one without the change (same seed, two steps of the built-in model) in weights,
curves, samples, events, files or the memory it takes, or the config must have a finding at that setting. All of it is one
process, and runs that cells share are made once. Full weights carry every setting but those of LoRA; with LoRA the
settings of the sections are tried again that act on what is built: model, adapter, memory, kernels, and the reference.

`test_every_setting_is_in_a_table` is the guard: what stands in no table fails by its name. `ON_A_CARD` and `ELSEWHERE` name
the one test that shows what such a run cannot.
"""

from __future__ import annotations

import ast
import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedTokenizerFast

from engine.builtin import tiny
from engine.config.adapter import ADAPTERS
from engine.config.facts import Facts
from engine.config.files import put
from engine.config.method import METHODS
from engine.config.tree import SECTIONS, fields
from engine.rules import read
from tests.engine.features.conftest import Meter
from tests.engine.trainers.conftest import BASE, PAIRS
from tests.engine.trainers.test_matrix import CPU, LORA, ROWS, SAMPLED, settings

ROOT = Path(__file__).resolve().parents[3]
T = "tests/engine/trainers"
F = "tests/engine/features"
U = "tests/engine/export/test_uploads.py"
REWARDS = ["regex:[aeiou]", "regex:[0-9 ]"]


class Trial(NamedTuple):
    """Another value of a setting, and what stands beside it in both runs."""

    value: Any
    beside: dict[str, Any] = {}


class Files(NamedTuple):
    """What values of settings name."""

    model: str = ""
    tokenizer: str = ""
    template: str = ""
    rows: str = ""
    """Fewer of the method's rows, in another order."""
    held_out: str = ""
    long: str = ""
    """The method's rows, half of them longer than `SHORT` tokens."""
    bad: str = ""
    """The method's rows with one that is none."""


SHORT = 96
BF16 = {"model.dtype": "bfloat16"}
TILES = {"memory.tiled_mlp": True, "memory.tiled_mlp_tokens": 16}
LARGE = {"optim.per_device_train_batch_size": 16}
SMALL = {"kernels.use_cut_ce": True}  # what is kept of layers and weights is most of the memory
OLD = {"method.num_iterations": 3, "optim.max_steps": 4}  # answers are used again after the weights have moved
SHOWN = {"run.prompts": ["What comes after 7?"], "run.max_new_tokens": 4}


def of_all(method: str, files: Files) -> dict[str, Trial]:
    """Those that every method has."""
    eval_ = {"data.eval": [{"path": files.held_out}], "run.eval_steps": 1}
    # GDPO's loss of held-out rows is nought but for rounding.
    judged = {"run.metric_for_best_model": "reward" if method == "gdpo" else "loss"}
    by_epoch = {"data.eval": [{"path": files.held_out}]}
    long = {"data.train": [{"path": files.long}], "data.max_length": SHORT}
    cut = {**long, "data.excess_length": "truncate", "data.truncation_side": "left"}
    bad = {"data.train": [{"path": files.bad}], "data.on_bad_row": "skip"}
    return {
        "model.name": Trial(files.model),
        "model.revision": Trial("main"),
        "model.tokenizer": Trial(files.tokenizer),
        "model.chat_template": Trial("llama3"),
        "model.chat_template_kwargs": Trial({"mark": "!"}, {"model.chat_template": files.template}),
        "model.dtype": Trial("bfloat16"),
        "model.attention": Trial("eager"),
        "data.train": Trial([{"path": files.rows}]),
        "data.eval": Trial([{"path": files.held_out}]),
        "data.val_set_size": Trial(4, {"run.eval_steps": 1, "data.val_set_size": 2}),
        "data.max_length": Trial(SHORT - 8, cut),
        "data.excess_length": Trial("truncate", {**long, "data.excess_length": "drop"}),
        "data.truncation_side": Trial("right", cut),
        "data.trained_turns": Trial("all"),
        "data.packing": Trial(True),
        "data.packing_cross_doc_attn_mask": Trial(True, {"data.packing": True}),
        "data.streaming": Trial(True),
        "data.on_bad_row": Trial("error", bad),
        "data.shuffle": Trial(False),
        "optim.learning_rate": Trial(5e-4),
        "optim.per_device_train_batch_size": Trial(12),
        "optim.per_device_eval_batch_size": Trial(2, {**eval_, "optim.per_device_eval_batch_size": 8}),
        "optim.gradient_accumulation_steps": Trial(2),
        "optim.num_train_epochs": Trial(2.0, {"data.train": [{"path": files.rows}], "optim.max_steps": None}),
        "optim.max_steps": Trial(3),
        "optim.optim": Trial("sgd"),
        "optim.optim_args": Trial({"momentum": 0.5}, {"optim.optim": "muon"}),
        "optim.optim_target_modules": Trial(
            ["down_proj"], {"optim.optim": "galore_adamw", "optim.optim_args": {"rank": 8}}
        ),
        "optim.lr_scheduler_type": Trial("constant"),
        "optim.lr_scheduler_kwargs": Trial(
            {"power": 3.0}, {"optim.lr_scheduler_type": "polynomial", "optim.lr_scheduler_kwargs": {"power": 2.0}}
        ),
        "optim.warmup_steps": Trial(1),
        "optim.weight_decay": Trial(0.5),
        "optim.adam_beta1": Trial(0.5),
        "optim.adam_beta2": Trial(0.5),
        "optim.adam_epsilon": Trial(0.1),
        "optim.max_grad_norm": Trial(0.01),
        "optim.bf16_full_eval": Trial(True, eval_),
        "optim.neftune_noise_alpha": Trial(5.0),
        "run.backend": Trial("mlx"),
        "run.seed": Trial(7),
        "run.logging_steps": Trial(2),
        "run.save_steps": Trial(1),
        "run.save_total_limit": Trial(2, {"run.save_steps": 1, "optim.max_steps": 3}),
        "run.eval_steps": Trial(2, eval_),
        "optim.early_stopping_patience": Trial(
            1, {**eval_, "run.greater_is_better": method not in SAMPLED, "optim.max_steps": 3}
        ),
        "optim.early_stopping_threshold": Trial(0.5, eval_),
        "run.metric_for_best_model": Trial("nothing", eval_),
        "run.greater_is_better": Trial(True, {**eval_, **judged, "run.greater_is_better": False}),
        "run.save_best": Trial(False, {**eval_, "run.save_steps": 9}),
        "run.evals_per_epoch": Trial(1, {**by_epoch, "run.evals_per_epoch": 100}),
        "run.saves_per_epoch": Trial(1),
        "run.prompts": Trial(["Who?"], SHOWN),
        "run.prompts_steps": Trial(1, {**SHOWN, "run.prompts_steps": 2}),
        "run.max_new_tokens": Trial(2, SHOWN),
    }


# Those that act on what is built: tried with full weights and with LoRA.
OF_BUILT = {
    "memory.gradient_checkpointing": Trial("full", {"memory.gradient_checkpointing": False, **SMALL}),
    "memory.activation_offloading": Trial("disk", LARGE),
    "memory.tiled_mlp": Trial(True, {**SMALL, **LARGE}),
    "memory.tiled_mlp_tokens": Trial(16, {"memory.tiled_mlp": True, "memory.tiled_mlp_tokens": 64}),
    "memory.tiled_mlp_fp32_sums": Trial(True, {**BF16, **TILES}),
    "kernels.use_cut_ce": Trial(True, {"kernels.use_cut_ce": False}),
    "kernels.quantization_aware": Trial(True),
}
OF_ADAPTER = {
    "none": {"adapter.unfrozen_parameters": Trial([r"(.*\.)?layers\.3\.|score"])},
    "lora": {
        "adapter.r": Trial(8),
        "adapter.lora_alpha": Trial(8),
        "adapter.lora_dropout": Trial(0.3),
        "adapter.target_modules": Trial(["q_proj"]),
        "adapter.modules_to_save": Trial(["embed_tokens"]),
        "adapter.use_rslora": Trial(True),
        "adapter.loraplus_lr_ratio": Trial(16.0),
        "adapter.use_dora": Trial(True),
        "adapter.autocast_adapter_dtype": Trial(True, BF16),
        "kernels.fused_lora": Trial(True),
    },
}
_PRECOMPUTED = {"method.reference": Trial("precompute", {"method.reference": "copy", **SMALL})}
_SAMPLING = {
    "method.reward_funcs": Trial(["length:4", "regex:[a-m]"]),
    "method.max_completion_length": Trial(6),
    "method.temperature": Trial(0.5),
    "method.top_p": Trial(0.5),
    "method.top_k": Trial(3),
    "method.repetition_penalty": Trial(1.5),
    "method.num_iterations": Trial(2),
    "method.steps_per_generation": Trial(2),
    "method.epsilon": Trial(0.01, OLD),
    "method.epsilon_high": Trial(0.9, OLD),
    "method.beta": Trial(0.3),
    "method.reference": Trial("adapter_off", {"method.beta": 0.3}),
    "method.num_generations": Trial(2),
    "method.rollout_groups": Trial(1),
}
AHEAD = {"method.async_prefetch": "rewards"}
FAILING = {"method.reward_funcs": ["exact_match", "regex:zzzz"]}
# Seldom so that most groups are told apart by neither, and some are.
REPLAYING = {"method.replay_buffer_size": 8, "optim.max_steps": 4, "method.reward_funcs": ["regex:z", "regex:q"]}
_GROUPS = {
    **_SAMPLING,
    "method.loss_type": Trial("sapo", OLD),
    "method.importance_sampling_level": Trial("sequence", OLD),
    "method.mask_truncated_completions": Trial(True),
    "method.skip_zero_advantage": Trial(False),
    "method.reroll_start_fraction": Trial(0.0, FAILING),
    "method.reroll_max_groups": Trial(2, {**FAILING, "method.reroll_start_fraction": 0.0}),
    "method.reroll_max_tries": Trial(1, {**FAILING, "method.reroll_start_fraction": 0.0}),
    "method.replay_buffer_size": Trial(2),
    "method.replay_recompute_logps": Trial(False, REPLAYING),
    "method.replay_max_weight": Trial(1.0, REPLAYING),
    "method.replay_max_age": Trial(1, {"method.replay_buffer_size": 8, "optim.max_steps": 4}),
    "method.off_policy_mask_threshold": Trial(1e-4, OLD),
    "method.async_prefetch": Trial("rewards"),
    "method.prefetch_depth": Trial(2, {**AHEAD, "optim.max_steps": 4}),
    "method.importance_sampling_mode": Trial("token_truncate", {**AHEAD, "optim.max_steps": 4}),
    "method.importance_sampling_cap": Trial(1e-3, {**AHEAD, "optim.max_steps": 4}),
}
OF_METHOD = {
    "sft": {"method.label_smoothing": Trial(0.2), "method.z_loss": Trial(0.1)},
    "pretrain": {"method.label_smoothing": Trial(0.2), "method.z_loss": Trial(0.1)},
    "dpo": {
        "method.beta": Trial(0.5),
        "method.loss_type": Trial("hinge"),
        "method.label_smoothing": Trial(0.2, {"method.loss_type": "robust", "method.label_smoothing": 0.1}),
        "method.rpo_alpha": Trial(0.5),
        "method.dpo_norm_loss": Trial(True),
        **_PRECOMPUTED,
    },
    "ipo": {"method.beta": Trial(0.5), **_PRECOMPUTED},
    "simpo": {"method.beta": Trial(5.0), "method.simpo_gamma": Trial(0.2), "method.cpo_alpha": Trial(0.5)},
    "orpo": {"method.beta": Trial(0.5)},
    "kto": {
        "method.beta": Trial(0.5),
        "method.loss_type": Trial("apo_zero_unpaired"),
        "method.balance_weights": Trial(False),
        "method.desirable_weight": Trial(2.0, {"method.balance_weights": False}),
        "method.undesirable_weight": Trial(2.0, {"method.balance_weights": False}),
        "method.reference": Trial("adapter_off"),
    },
    "reward": {"method.center_rewards_coefficient": Trial(0.5)},
    "prm": {"method.train_on_last_step_only": Trial(True)},
    "embedding": {"method.pooling": Trial("last"), "method.scale": Trial(5.0)},
    "distill": {
        "method.kd_alpha": Trial(0.5),
        "method.kd_ce_alpha": Trial(0.5),
        "method.kd_temperature": Trial(2.0),
    },
    "grpo": {**_GROUPS, "method.scale_rewards": Trial("none")},
    "gdpo": _GROUPS,
    "ppo": {
        **_SAMPLING,
        "method.beta": Trial(0.3, {"method.num_iterations": 1}),  # the policy has to have moved when it answers
        "method.gamma": Trial(0.5),
        "method.lam": Trial(0.5),
        "method.vf_coef": Trial(1.0),
        "method.cliprange_value": Trial(0.001, OLD),
        "method.value_learning_rate": Trial(0.1),
    },
}
# With LoRA the reference is the model with its adapter off, in place of a copy.
REFERENCE_OF_LORA = {
    **dict.fromkeys(("dpo", "ipo", "kto"), Trial("copy", {"method.reference": "adapter_off", **SMALL})),
    **dict.fromkeys(SAMPLED, Trial("copy", {"method.reference": "adapter_off", "method.beta": 0.3, **SMALL})),
}
# Answered by a finding without a card: a value, and the test that shows what it does.
ON_A_CARD = {
    "model.quantization": (
        "nf4",
        f"{T}/test_matrix.py::test_weights_of_four_bits_learn_in_each_method_and_looks_at_held_out_rows_change_nothing",
    ),
    "optim.tf32": (True, f"{T}/test_matrix.py::test_what_a_card_alone_has_acts_in_each_method"),
    "memory.layer_offloading": (True, f"{T}/test_matrix.py::test_layers_stream_in_each_method"),
    "kernels.fused_attn_kernel": (True, f"{T}/test_matrix.py::test_what_a_card_alone_has_acts_in_each_method"),
    "kernels.fused_experts": (
        True,
        f"{F}/fused_experts/test_apply.py::test_the_kernels_themselves_train_adapters_of_experts",
    ),
    "kernels.use_liger_kernel": (
        True,
        f"{F}/liger_kernel/test_on_gpu.py::test_a_run_learns_the_same_and_its_receipt_tells_parts",
    ),
    "kernels.fp8_recipe_name": (
        "rowwise",
        f"{F}/quantization_aware/test_on_gpu.py::test_the_cards_products_are_those_of_the_emulation",
    ),
}
# What such a run cannot show, and the test that does.
ELSEWHERE = {
    "method.weight_sync_steps": f"{T}/test_generating_process.py::test_the_adapter_is_sent_as_a_file_each_time_it_is_due",
    "method.generation_device": f"{T}/test_generating_process.py::test_it_works_on_the_gpu_of_that_number_where_the_run_was_launched",
    "method.generation_timeout": f"{T}/test_generating_process.py::test_one_that_hangs_is_replaced_and_asked_again",
    "method.cache_implementation": "tests/engine/trainers/test_recorded_tokens.py::test_the_same_answers_are_sampled_in_room_for_the_longest",
    # where the run goes and who looks after it
    "run.devices": f"{T}/test_ranks.py::test_a_step_of_two_processes_is_that_of_one",
    "distributed.nodes": "tests/end_to_end/test_nodes.py::test_two_nodes_train_as_one_process",
    "distributed.strategy": f"{T}/test_fsdp2.py::test_full_weights_learn_what_one_process_would",
    "distributed.dp_replicate_size": f"{T}/test_hsdp.py::test_two_replicas_of_two_shares_learn_what_one_process_would",
    "distributed.dp_shard_size": f"{T}/test_hsdp.py::test_checkpoints_go_on_in_other_shapes",
    "distributed.context_parallel_size": f"{T}/test_context_parallel.py::test_two_processes_divide_rows_and_learn_what_one_would",
    "distributed.expert_parallel_size": f"{T}/test_expert_parallel.py::test_each_process_holds_half_of_the_experts",
    "distributed.cpu_offload": f"{T}/test_fsdp2.py::test_shares_in_main_memory_are_asked_of_accelerate",
    "distributed.ddp_timeout": "tests/fault/test_real_worker.py::test_a_stopped_rank_is_named_and_the_run_goes_on",
    "distributed.reshard_after_forward": f"{T}/test_fsdp2.py::test_full_weights_learn_what_one_process_would",
    "run.output_dir": "tests/engine/run/test_store.py::test_where_runs_lie",
    "run.name": (
        "tests/workbench/cli/test_run_commands.py::"
        "test_train_json_and_overrides_and_runs_are_relative_to_where_one_stands"
    ),
    "run.max_restarts": (
        "tests/fault/test_restarts.py::"
        "test_a_killed_worker_is_started_anew_and_the_run_is_the_one_that_was_never_killed"
    ),
    "run.grace_seconds": (
        "tests/fault/test_runs_outlive.py::test_a_worker_that_does_not_answer_is_ended_after_the_grace_and_that_is_said"
    ),
    "run.report_to": f"{T}/test_trackers.py::test_trackers_get_the_curves_of_the_run_and_change_nothing",
    "run.push_to_hub": f"{U}::test_a_model_arrives_complete_private_and_without_what_was_not_asked_for",
    "run.hub_model_id": f"{U}::test_a_model_arrives_complete_private_and_without_what_was_not_asked_for",
    "run.hub_strategy": f"{U}::test_a_checkpoint_can_be_gone_on_with_from_the_hub_and_is_not_sent_twice",
    "run.hub_private_repo": f"{U}::test_nothing_is_sent_where_everybody_reads_unless_that_is_asked_for",
    "run.hub_wait_seconds": f"{U}::test_the_end_waits_a_bounded_time_and_says_what_is_missing",
    "run.notify": "tests/fault/test_notify.py::test_a_run_that_ends_is_told_once_and_its_address_stays_in_the_config",
    "data.streaming_disk": "tests/engine/data/test_streaming.py::test_the_disk_that_shards_take_is_bounded",
    "data.ignore_data_skip": f"{T}/test_streaming.py::test_a_resume_may_begin_its_epoch_anew",
    "model.train_vision": "tests/engine/models/test_vision_parts.py::test_the_parts_that_are_named_learn_and_no_other",
    "data.trained_thinking": "tests/engine/data/test_prepare.py::test_without_thinking_answers_alone_are_learned",
    "data.deduplicate": "tests/engine/data/test_duplicates.py::test_equal_rows_are_left_out_counted_and_shown",
    "data.image_base_dir": "tests/engine/data/test_vision.py::test_paths_stay_below_the_folder_that_the_config_names",
    "data.min_pixels": "tests/engine/data/test_vision.py::test_pixel_limits_decide_the_tokens_of_an_image",
    "data.max_pixels": "tests/engine/data/test_vision.py::test_pixel_limits_decide_the_tokens_of_an_image",
    # the same losses with any number, by their purpose
    "memory.recompute_num_layers": f"{F}/gradient_checkpointing/test_tiers.py::test_layers_behind_the_first_few_are_not_computed_again_and_no_gradient_changes",
    "kernels.cut_ce_workspace": f"{F}/cut_cross_entropy/test_apply.py::test_scores_that_fit_into_the_given_memory_are_not_computed_again",
    "data.dataloader_num_workers": f"{T}/test_loader_processes.py::test_other_processes_make_the_batches_and_nothing_else_changes",
    "data.dataloader_prefetch_factor": f"{T}/test_loader_processes.py::test_so_many_batches_are_made_ahead_and_no_more",
    "data.image_cache_size": "tests/engine/data/test_decoded_images.py::test_what_comes_again_is_decoded_once_within_the_bound",
    "data.image_backend": "tests/engine/data/test_vision.py::test_images_are_read_by_one_library_and_the_choice_is_kept",
    "data.dataset_prepared_path": "tests/engine/data/test_cache.py::test_nothing_changed_hits_and_any_change_misses",
    # what a run that goes well never needs
    "run.on_nan": f"{T}/test_diverged.py::test_skip_leaves_the_step_out_and_changes_nothing_by_it",
    "run.max_skipped_steps": f"{T}/test_diverged.py::test_too_many_skipped_in_a_row_end_the_run",
    "method.reward_timeout": "tests/engine/rewards/test_functions.py::test_one_that_hangs_is_ended_within_its_time",
    # one thread of a CPU gives the same numbers always
    "run.full_determinism": (
        f"{T}/test_determinism.py::test_two_runs_with_one_seed_have_one_curve_under_deterministic_operations"
    ),
    # another model is needed
    "model.quantize_moe_experts": (
        "tests/engine/features/packed_experts/test_apply.py::test_experts_stay_wide_where_that_is_asked_for"
    ),
    "adapter.target_parameters": (
        "tests/engine/models/test_adapters.py::test_experts_of_three_dimensions_get_an_adapter_by_their_names"
    ),
    "adapter.loraplus_lr_embedding": (f"{T}/optimizers/test_loraplus.py::test_the_groups_are_those_of_peft"),
    "adapter.path": (
        f"{T}/test_adapter_folder.py::test_a_run_goes_on_from_the_newest_checkpoint_of_another_with_its_rank_and_alpha"
    ),
    "adapter.bias": "tests/engine/models/test_adapters.py::test_biases_are_trained_as_asked",
    # it says more of use_liger_kernel, which needs a card
    "kernels.liger_kernel_config": (
        f"{F}/liger_kernel/test_apply.py::test_the_receipt_tells_parts_and_version_and_one_that_is_off_is_not_there"
    ),
    # timing and compiling take a minute
    "kernels.kernel_auto_compose": f"{T}/test_matrix.py::test_each_feature_with_each_adapter_in_each_method",
    "kernels.torch_compile": f"{T}/test_compiled_methods.py::test_compiled_layers_learn_the_same",
    "kernels.torch_compile_options": (
        f"{F}/compile/test_apply.py::test_the_options_are_in_force_while_layers_are_compiled_and_at_no_other_time"
    ),
}


def of_norms(files: Files) -> dict[str, Trial]:
    """The built-in model's norms are all 1, with which nothing is rounded; the other model's are not."""
    return {"memory.fp32_norms": Trial(True, {**BF16, "model.name": files.model})}


def trials(method: str, adapter: str, files: Files) -> dict[str, Trial]:
    """What is tried of a method: everything with full weights, with LoRA what acts on what is built."""
    if adapter == "none":
        return {**of_all(method, files), **OF_BUILT, **of_norms(files), **OF_ADAPTER["none"], **OF_METHOD[method]}
    own = {"method.reference": REFERENCE_OF_LORA[method]} if method in REFERENCE_OF_LORA else {}
    model = {path: trial for path, trial in of_all(method, files).items() if path.startswith("model.")}
    return {**model, **OF_BUILT, **of_norms(files), **OF_ADAPTER["lora"], **own}


def in_no_table(specs: Any) -> list[str]:
    """The settings that nothing is known of, as `method: path`."""
    tried = {
        (method, adapter): trials(method, adapter, Files()).keys() | ON_A_CARD.keys() | ELSEWHERE.keys()
        for method in METHODS
        for adapter in ADAPTERS
    }
    missing = []
    for spec in specs:
        if spec.name == "kind":
            continue  # each is a column of the search
        for method in spec.kinds if spec.section == "method" else METHODS:
            adapters = spec.kinds if spec.section == "adapter" else ADAPTERS
            if not any(spec.path in tried[method, adapter] for adapter in adapters):
                missing.append(f"{method}: {spec.path}")
    return missing


def test_every_setting_is_in_a_table() -> None:
    assert not in_no_table(fields)


def test_a_new_setting_fails_by_its_name() -> None:
    new = [replace(spec, name="new", path=f"{spec.section}.new") for spec in fields if spec.name != "kind"]
    found = in_no_table({spec.path: spec for spec in new}.values())
    assert {name.split(": ")[1] for name in found} == {f"{section}.new" for section in SECTIONS}
    own = replace(fields.method.gamma, name="delta", path="method.delta")
    assert in_no_table([own]) == ["ppo: method.delta"]
    # A method that gets a setting of another has to try it too.
    assert in_no_table([replace(fields.method.gamma, kinds=("ppo", "grpo"))]) == ["grpo: method.gamma"]


def test_what_shows_an_effect_elsewhere_is_one_test_that_exists() -> None:
    for place in [*ELSEWHERE.values(), *(place for _, place in ON_A_CARD.values())]:
        file, name = place.split("::")
        found = ast.parse((ROOT / file).read_text("utf-8")).body
        assert name in {node.name for node in found if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}, place


def test_no_setting_stands_in_two_tables() -> None:
    tried = {path for method in METHODS for adapter in ADAPTERS for path in trials(method, adapter, Files())}
    assert not tried & ON_A_CARD.keys()
    assert not tried & ELSEWHERE.keys()
    assert not ON_A_CARD.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("path", ON_A_CARD)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_for_a_card_is_answered_by_a_finding_without_one(method: str, path: str) -> None:
    mapping: dict[str, Any] = {"version": 1}
    beside = {"kernels.quantization_aware": "fp8"} if path == "kernels.fp8_recipe_name" else {}
    for place, value in (BASE | LORA | beside | {"method.kind": method, path: ON_A_CARD[path][0]}).items():
        put(mapping, place, value)
    findings = read(mapping, Facts(machine=CPU)).findings
    assert {"error", "warning"} & {found.severity for found in findings if found.path in (path, *beside)}


def findings_at(paths, mapping, severities=("error", "warning")):
    """What the config says about these settings before anything is started, but for hints."""
    nested: dict = {"version": 1}
    for place, value in (BASE | mapping).items():
        put(nested, place, value)
    found = read(nested, Facts(machine=CPU)).findings
    return {(each.path, each.rule) for each in found if each.path in paths and each.severity in severities}


def answered(base: dict[str, Any], path: str, trial: Trial) -> set[tuple[str, str]]:
    """The findings that the change brings, or that refuse what it needs beside it."""
    paths, plain = (path, *trial.beside), {**base, **trial.beside}
    refused = findings_at(paths, plain, ("error",)) - findings_at(paths, base)
    return refused or findings_at(paths, {**plain, path: trial.value}) - findings_at(paths, plain)


TIMES = ("runtime", "per_second", "seconds", "time", "memory")


def left_behind(run) -> tuple[dict[str, torch.Tensor], Any]:
    """What a run left: weights of its checkpoints; curves, samples, kinds of events and names of files."""
    weights = {}
    for checkpoint in sorted(run.checkpoints.glob("checkpoint-*")):
        for file in checkpoint.glob("*model.safetensors"):
            weights |= {f"{checkpoint.name}/{name}": value for name, value in load_file(file).items()}
    events = [json.loads(line) for line in run.events.read_text("utf-8").splitlines()]
    told = []
    for event in events:
        if event["kind"] == "metrics":
            told.append({name: value for name, value in event.items() if not any(word in name for word in TIMES)})
        elif event["kind"] in ("sample", "rollout"):
            told.append(event)
    told = [{name: value for name, value in event.items() if name not in ("t", "seq")} for event in told]
    kinds = sorted(event["kind"] for event in events if event["kind"] not in ("gpu", "alive", "phase", "progress"))
    files = sorted(str(file.relative_to(run.path)) for file in run.path.rglob("*") if file.is_file())
    templates = [file.read_text("utf-8") for file in sorted(run.checkpoints.rglob("*.jinja"))]
    return weights, (told, kinds, files, templates)


def differ(one, other):
    if one[1] != other[1] or one[0].keys() != other[0].keys():
        return True
    return any(
        one[0][name].shape != other[0][name].shape or not torch.equal(one[0][name], other[0][name]) for name in one[0]
    )


class Taken(Meter):
    """Also counts what came in and was not made inside, such as weights that are read from files."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._add(value.untyped_storage())
        return super().__torch_dispatch__(func, types, args, kwargs)


def of_less_or_more_memory(one: int, other: int) -> bool:
    return abs(one - other) > 0.05 * max(one, other)


def longer(value: Any) -> Any:
    """The row with each of its texts and lists of tokens over and over, but for a prompt that stands before them."""
    if isinstance(value, str):
        return " ".join([value] * (400 // len(value) + 1))
    if isinstance(value, dict):
        return {
            name: each if name in ("role", "labels", "label", "prompt", "anchor") else longer(each)
            for name, each in value.items()
        }
    if isinstance(value, list) and value and not isinstance(value[0], (str, dict)):
        return value * 12
    return [longer(each) for each in value] if isinstance(value, list) else value


def files_of(method: str, source: Any, folder: Path) -> Files:
    """Another model, template and rows for this method."""
    rows = ROWS.get(method, PAIRS)
    model = folder / "model"
    shutil.copytree(tiny.folder(), model)
    weights = {name: value * 0.99 for name, value in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.add_tokens(["comes after"])
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "marked.jinja").write_text("{{- mark }}" + tiny.CHAT_TEMPLATE)
    long = [row if number % 2 else longer(row) for number, row in enumerate(rows)]
    return Files(
        model=str(model),
        tokenizer=str(folder / "tokenizer"),
        template=str(folder / "marked.jinja"),
        rows=source(rows[7::-1]),
        held_out=source(rows[40:]),
        long=source(long),
        bad=source([*rows[:9], {"nothing": 1}, *rows[9:]]),
    )


def search(train: Any, source: Any, folder: Path, method: str, adapter: str) -> tuple[list[str], list[str]]:
    """The settings without any difference; those that a finding answers for."""
    base = {**settings(source, method, "none"), **(LORA if adapter == "lora" else {})}
    if method in SAMPLED:
        base["method.reward_funcs"] = REWARDS
    runs: dict[str, Any] = {}
    peaks: dict[str, int] = {}

    def outcome(mapping: dict[str, Any]) -> Any:
        key = json.dumps(mapping, sort_keys=True)
        if key not in runs:
            runs[key] = left_behind(train(mapping, code=None))
        return runs[key]

    def peak(mapping: dict[str, Any]) -> int:
        mapping = {**mapping, "optim.max_steps": 1}
        key = json.dumps(mapping, sort_keys=True)
        if key not in peaks:
            gc.collect()
            with Taken() as meter:
                train(mapping)
            peaks[key] = meter.peak
        return peaks[key]

    assert not differ(outcome(base), left_behind(train(base))), "two runs of one config differ"
    without, told = [], []
    for path, trial in trials(method, adapter, files_of(method, source, folder)).items():
        plain, changed = {**base, **trial.beside}, {**base, **trial.beside, path: trial.value}
        if found := answered(base, path, trial):
            assert "bad-value" not in {rule for _, rule in found}, f"{path} has no such value in {method}"
            told.append(path)
            continue
        assert "finished" in outcome(plain)[1][1], f"{path}: nothing to compare with, as {plain} does not run"
        if not differ(outcome(plain), outcome(changed)) and not of_less_or_more_memory(peak(plain), peak(changed)):
            without.append(path)
    return without, told


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("method", METHODS)
def test_no_setting_is_accepted_without_effect(train, source, tmp_path, method, adapter):
    gc.collect()
    gc.freeze()  # what is loaded once is not looked through again after each of the runs
    try:
        without, _ = search(train, source, tmp_path, method, adapter)
    finally:
        gc.unfreeze()
    assert not without
