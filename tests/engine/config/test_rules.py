"""Every rule speaks when it should, keeps quiet when it should, and its fix mends what it says."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from engine.config.draft import Draft
from engine.config.facts import DataFacts, Facts, ModelFacts, SourceFacts, model_facts
from engine.config.files import as_yaml, put
from engine.config.findings import RANK
from engine.config.rules import RULES
from engine.config.schema import fields, read
from engine.config.shapes import TINY
from engine.hardware import GiB, Gpu, Machine, parse_machine

GOOD: dict[str, Any] = {"model": {"name": "builtin/tiny"}, "data": {"train": [{"path": "rows.jsonl"}]}}
CPU = Machine(cpu_count=4, memory_bytes=16 * GiB, disk_free_bytes=100 * GiB, name="cpu")
H100, OLD = parse_machine("1xH100-80GB"), parse_machine("1xT4-16GB")
LARGE = model_facts("Qwen/Qwen3-8B")
NOTHING: dict[str, str | None] = dict.fromkeys(
    ("bitsandbytes", "flash-attn", "flash-attn-3", "flash-attn-4", "torchao", "pytorch-optimizer", "schedulefree")
)


def rows(**known: Any) -> Facts:
    return Facts(data=DataFacts(**known))


def source(**known: Any) -> Facts:
    return Facts(sources={"rows.jsonl": SourceFacts("rows.jsonl", **{"exists": True, **known})})


def model(**known: Any) -> Facts:
    return Facts(model=ModelFacts("builtin/tiny", **known))


TINY_FACTS = model_facts("builtin/tiny")
LORA = {"adapter.kind": "lora"}
STREAMED = {**LORA, "memory.layer_offloading": True}
DPO = {"method.kind": "dpo"}
KTO = {"method.kind": "kto"}
FP8, INT8 = {"kernels.quantization_aware": "fp8"}, {"kernels.quantization_aware": True}
FP8_BASE = {**LORA, "model.quantization": "fp8"}
APART = {"data.packing": True, "data.packing_cross_doc_attn_mask": True}
POLYNOMIAL = {"optim.lr_scheduler_type": "polynomial", "optim.lr_scheduler_kwargs": {"power": 2.0}}
GRPO = {"method.kind": "grpo", "method.reward_funcs": ["exact_match"], "optim.per_device_train_batch_size": 8}
# rule -> cases of (settings on top of GOOD, facts, where the finding stands, its severity)
Case = tuple[dict[str, Any], Facts, str, str]
CASES: dict[str, list[Case]] = {
    "label-smoothing-needs-a-loss-that-uses-it": [
        (
            {**DPO, "method.loss_type": "hinge", "method.label_smoothing": 0.1},
            Facts(),
            "method.label_smoothing",
            "error",
        ),
        ({**DPO, "method.loss_type": "robust"}, Facts(), "method.label_smoothing", "error"),
        ({**DPO, "method.label_smoothing": 0.1}, Facts(), "method.label_smoothing", "error"),
    ],
    "beta-needs-a-loss-that-uses-it": [
        ({**DPO, "method.loss_type": "sft", "method.beta": 0.5}, Facts(), "method.beta", "error")
    ],
    "likelihood-is-weighed-beside-a-preference": [
        ({**DPO, "method.loss_type": "sft", "method.rpo_alpha": 0.5}, Facts(), "method.rpo_alpha", "error")
    ],
    "mismatched-rows-need-a-batch": [
        ({**KTO, "optim.per_device_train_batch_size": 1}, Facts(), "optim.per_device_train_batch_size", "error")
    ],
    "weights-stand-on-top-of-the-balance": [
        ({**KTO, "method.desirable_weight": 2.0}, Facts(), "method.desirable_weight", "warning")
    ],
    "adapter-off-needs-an-adapter": [
        ({**KTO, "method.reference": "adapter_off"}, Facts(), "method.reference", "error"),
        ({**DPO, "method.reference": "adapter_off"}, Facts(), "method.reference", "error"),
    ],
    "a-copy-beside-an-adapter-wastes-memory": [
        ({**DPO, **LORA, "method.reference": "copy"}, Facts(), "method.reference", "hint")
    ],
    "dropout-is-off-where-answers-are-compared": [
        ({"method.kind": kind, **LORA, "adapter.lora_dropout": 0.1}, Facts(), "adapter.lora_dropout", "error")
        for kind in ("dpo", "ipo", "kto", "reward")
    ],
    "negatives-come-from-the-batch": [
        (
            {"method.kind": "embedding", "optim.per_device_train_batch_size": 1},
            Facts(),
            "optim.per_device_train_batch_size",
            "error",
        )
    ],
    "samples-need-a-model-that-writes": [
        ({"method.kind": "reward", "run.prompts": ["Who are you?"]}, Facts(), "run.prompts", "error")
    ],
    "packing-needs-single-texts": [
        ({**DPO, "data.packing": True, "data.packing_cross_doc_attn_mask": True}, Facts(), "data.packing", "error")
    ],
    "trained-turns-need-sft": [
        ({**DPO, "data.trained_turns": "last"}, Facts(), "data.trained_turns", "error"),
        ({"method.kind": "pretrain", "data.trained_turns": "all"}, Facts(), "data.trained_turns", "error"),
    ],
    "chat-template-needs-messages": [
        ({"method.kind": "pretrain", "model.chat_template": "chatml"}, Facts(), "model.chat_template", "error"),
        (
            {"method.kind": "pretrain", "model.chat_template_kwargs": {"a": 1}},
            Facts(),
            "model.chat_template_kwargs",
            "error",
        ),
    ],
    "formats-fit-the-method": [
        ({**DPO}, source(format="messages"), "data.train.0.format", "error"),
        ({"data.train.0.format": "preference"}, Facts(), "data.train.0.format", "error"),
        ({"method.kind": "pretrain"}, source(format="alpaca"), "data.train.0.format", "error"),
    ],
    "rewards-are-named": [({"method.kind": "grpo"}, Facts(), "method.reward_funcs", "error")],
    "rewards-are-known": [
        ({**GRPO, "method.reward_funcs": ["gsm8k", text]}, Facts(), "method.reward_funcs.1", "error")
        for text in ("exakt_match", "0 * gsm8k", "regex:(", "length", "mine.py:")
    ],
    "reward-files-exist": [
        (
            {**GRPO, "method.reward_funcs": ["gsm8k", text]},
            Facts(files={"mine.py": False, "shape.json": False, "./judge": False}),
            "method.reward_funcs.1",
            "error",
        )
        for text in ("0.5 * mine.py:score", "json_schema:shape.json", "model:./judge")
    ],
    "groups-need-more-than-one-answer": [
        ({**GRPO, "method.num_generations": 1}, Facts(), "method.num_generations", "error")
    ],
    "batches-hold-whole-groups": [
        ({**GRPO, "optim.per_device_train_batch_size": 3}, Facts(), "optim.per_device_train_batch_size", "error"),
        (
            {**GRPO, "optim.per_device_train_batch_size": 5, "method.steps_per_generation": 4},
            Facts(),
            "optim.per_device_train_batch_size",
            "error",
        ),
    ],
    "several-rewards-for-gdpo": [({**GRPO, "method.kind": "gdpo"}, Facts(), "method.reward_funcs", "warning")],
    "advantages-need-more-than-one-answer": [
        (
            {
                **GRPO,
                "method.kind": "ppo",
                "optim.per_device_train_batch_size": 1,
                "optim.gradient_accumulation_steps": 1,
            },
            Facts(),
            "optim.per_device_train_batch_size",
            "error",
        )
    ],
    "held-out-batches-hold-whole-groups": [
        (
            {**GRPO, "data.eval": [{"path": "b.jsonl"}], "optim.per_device_eval_batch_size": 12},
            Facts(),
            "optim.per_device_eval_batch_size",
            "error",
        )
    ],
    "there-are-prompts-for-one-sampling": [
        ({**GRPO, "optim.gradient_accumulation_steps": 16}, source(rows=9), "data.train", "error")
    ],
    "clipping-needs-a-loss-that-clips": [
        ({**GRPO, "method.loss_type": "sapo", "method.epsilon": 0.3}, Facts(), "method.epsilon", "error"),
        ({**GRPO, "method.loss_type": "sapo", "method.epsilon_high": 0.3}, Facts(), "method.epsilon_high", "error"),
        ({**GRPO, "method.loss_type": "cispo"}, Facts(), "method.epsilon_high", "error"),
    ],
    "bounds-need-answers-that-grow-old": [
        ({**GRPO, "method.epsilon": 0.3}, Facts(), "method.epsilon", "error"),
        ({**GRPO, "method.epsilon_high": 0.28}, Facts(), "method.epsilon_high", "error"),
        (
            {**GRPO, "method.importance_sampling_level": "sequence", "method.loss_type": "grpo"},
            Facts(),
            "method.importance_sampling_level",
            "error",
        ),
        (
            {**GRPO, "method.kind": "ppo", "method.num_iterations": 1, "method.cliprange_value": 0.4},
            Facts(),
            "method.cliprange_value",
            "error",
        ),
    ],
    "ratios-of-whole-answers-need-equal-answers": [
        ({**GRPO, "method.importance_sampling_level": "sequence"}, Facts(), "method.loss_type", "warning")
    ],
    "a-reference-needs-weight": [({**GRPO, "method.reference": "copy"}, Facts(), "method.reference", "hint")],
    "sampled-and-trained-with-the-same-weights": [
        ({**GRPO, **LORA, "adapter.lora_dropout": 0.1}, Facts(), "adapter.lora_dropout", "warning")
    ],
    "model-is-named": [({"model.name": ""}, Facts(), "model.name", "error")],
    "model-exists": [
        ({}, model(missing="there is no such folder"), "model.name", "error"),
        ({}, model(remote=True), "model.name", "warning"),
    ],
    "builtin-names-are-known": [({"model.name": "builtin/huge"}, Facts(), "model.name", "error")],
    "revision-needs-a-hub-model": [({"model.revision": "main"}, Facts(), "model.revision", "error")],
    "quantized-weights-need-an-adapter": [({"model.quantization": "nf4"}, Facts(), "model.quantization", "error")],
    "quantized-weights-need-bitsandbytes": [
        ({**LORA, "model.quantization": "nf4"}, Facts(packages=NOTHING), "model.quantization", "error")
    ],
    "quantized-weights-need-a-gpu": [
        ({**LORA, "model.quantization": "int8"}, Facts(machine=CPU), "model.quantization", "warning")
    ],
    "float16-needs-a-gpu": [({**LORA, "model.dtype": "float16"}, Facts(machine=CPU), "model.dtype", "error")],
    "bfloat16-is-slow-on-old-processors": [
        ({"model.dtype": "bfloat16"}, Facts(machine=replace(CPU, slow_bfloat16=True)), "model.dtype", "warning")
    ],
    "bfloat16-needs-a-card-that-has-it": [({}, Facts(machine=OLD), "model.dtype", "error")],
    "float16-weights-cannot-be-trained-whole": [({"model.dtype": "float16"}, Facts(), "model.dtype", "error")],
    "flash-attention-needs-its-package": [
        ({"model.attention": name}, Facts(packages=NOTHING), "model.attention", "error")
        for name in ("flash_attention_2", "flash_attention_4")
    ],
    "flash-attention-needs-its-card": [
        ({"model.attention": "flash_attention_2"}, Facts(machine=CPU), "model.attention", "error"),
        (
            {"model.attention": "flash_attention_3"},
            Facts(machine=parse_machine("A100")),
            "model.attention",
            "error",
        ),
        (
            {"model.attention": "flash_attention_3"},
            Facts(machine=parse_machine("B200-192GB")),
            "model.attention",
            "error",
        ),
    ],
    "flash-attention-serves-heads-up-to-a-width": [
        ({"model.attention": name}, model(head_dim=width), "model.attention", "error")
        for name, width in (("flash_attention_2", 512), ("flash_attention_4", 192))
    ],
    "flex-attention-needs-a-gpu": [
        ({"model.attention": "flex_attention"}, Facts(machine=CPU), "model.attention", "error")
    ],
    "packs-kept-apart-want-no-mask-of-all-pairs": [
        ({**APART, **changes}, Facts(machine=H100, packages=NOTHING), "model.attention", "warning")
        for changes in ({"model.attention": "sdpa"}, {"model.attention": "eager"})
    ],
    "varlen-needs-a-card-16-bits-and-heads-of-its-width": [
        ({**APART, "model.attention": "varlen", **changes}, facts, "model.attention", "error")
        for changes, facts in (
            ({}, Facts(machine=CPU)),
            ({}, Facts(machine=parse_machine("T4-16GB"))),
            ({"model.dtype": "float32"}, Facts(machine=H100)),
            ({}, model(head_dim=512)),
        )
    ],
    "cudnn-adds-in-another-order-each-time": [
        (
            {**APART, "model.attention": "cudnn", "run.full_determinism": True},
            Facts(machine=H100),
            "model.attention",
            "error",
        )
    ],
    "attention-over-documents-is-for-packs-kept-apart": [
        ({"model.attention": name}, Facts(machine=H100), "model.attention", "hint") for name in ("varlen", "cudnn")
    ],
    "flash-attention-needs-half-precision": [
        ({"model.attention": "flash_attention_2", "model.dtype": "float32"}, Facts(), "model.attention", "error")
    ],
    "messages-need-a-chat-template": [
        (
            {},
            replace(source(format="messages"), model=ModelFacts("builtin/tiny", chat_template=False)),
            "model.chat_template",
            "error",
        )
    ],
    "training-data-is-named": [({"data.train": []}, Facts(), "data.train", "error")],
    "sources-exist": [
        ({}, source(exists=False), "data.train.0.path", "error"),
        ({}, source(problem="line 3: must be JSON."), "data.train.0.path", "error"),
        ({}, source(rows=0), "data.train.0.path", "error"),
    ],
    "builtin-data-are-known": [({"data.train.0.path": "builtin/times"}, Facts(), "data.train.0.path", "error")],
    "held-out-rows-are-not-trained-on": [
        ({"data.eval": [{"path": "rows.jsonl"}]}, Facts(), "data.eval.0.path", "warning")
    ],
    "truncation-side-needs-truncation": [({"data.truncation_side": "left"}, Facts(), "data.truncation_side", "error")],
    "split-needs-plain-text": [({"data.excess_length": "split"}, Facts(), "data.excess_length", "error")],
    "packing-cross-doc-attn-mask-needs-packing": [
        ({"data.packing_cross_doc_attn_mask": True}, Facts(), "data.packing_cross_doc_attn_mask", "error")
    ],
    "packed-rows-see-each-other": [({"data.packing": True}, Facts(), "data.packing_cross_doc_attn_mask", "warning")],
    "max-length-is-within-the-model": [
        ({"data.max_length": 5000}, Facts(model=TINY_FACTS), "data.max_length", "error"),
        (
            {"data.max_length": 5000},
            Facts(model=TINY_FACTS, data=DataFacts(rows=9, longest=80)),
            "data.max_length",
            "hint",
        ),
    ],
    "rows-that-are-too-long-are-decided": [
        ({}, rows(rows=100, truncated=3, longest=9000), "data.excess_length", "error"),
        ({"data.excess_length": "truncate"}, rows(rows=100, truncated=50), "data.excess_length", "warning"),
        ({"data.excess_length": "drop"}, rows(rows=100, truncated=1), "data.excess_length", "hint"),
    ],
    "rows-have-something-to-learn": [
        ({}, rows(rows=100, masked=100), "data.train", "error"),
        ({}, rows(rows=100, masked=2), "data.train", "warning"),
    ],
    "a-batch-has-enough-rows": [({}, rows(rows=3), "optim.gradient_accumulation_steps", "warning")],
    "target-modules-name-layers": [
        ({**LORA, "adapter.target_modules": "(q_proj"}, Facts(), "adapter.target_modules", "error"),
        ({**LORA, "adapter.target_modules": []}, Facts(), "adapter.target_modules", "error"),
        ({**LORA, "adapter.target_modules": "q_proj"}, Facts(), "adapter.target_modules", "error"),
        ({**LORA, "adapter.target_modules": "all-liner"}, Facts(), "adapter.target_modules", "error"),
    ],
    "target-modules-exist-in-the-model": [
        (
            {**LORA, "adapter.target_modules": ["q_proj", "v_porj"]},
            Facts(model=TINY_FACTS),
            "adapter.target_modules.1",
            "error",
        )
    ],
    "biases-change-the-base": [({**DPO, **LORA, "adapter.bias": "all"}, Facts(), "adapter.bias", "error")],
    "saved-modules-are-not-quantized": [
        (
            {**LORA, "model.quantization": "nf4", "adapter.modules_to_save": ["q_proj"]},
            Facts(model=TINY_FACTS),
            "adapter.modules_to_save",
            "error",
        )
    ],
    "target-parameters-are-plain-lora": [
        (
            {**LORA, "adapter.target_parameters": ["mlp.experts.down_proj"], name: value},
            Facts(),
            "adapter.target_parameters",
            "error",
        )
        for name, value in (("adapter.use_dora", True), ("adapter.lora_dropout", 0.1), ("model.quantization", "nf4"))
    ],
    "float32-adapters-stand-beside-bfloat16": [
        (
            {**LORA, "adapter.autocast_adapter_dtype": True, "model.dtype": "float32"},
            Facts(),
            "adapter.autocast_adapter_dtype",
            "error",
        )
    ],
    "unfrozen-parameters-are-expressions": [
        ({"adapter.unfrozen_parameters": ["lm_head", "layers.(1"]}, Facts(), "adapter.unfrozen_parameters.1", "error"),
        ({"adapter.unfrozen_parameters": [" "]}, Facts(), "adapter.unfrozen_parameters.0", "error"),
    ],
    "unfrozen-parameters-match-weights": [
        ({"adapter.unfrozen_parameters": ["layers"]}, Facts(model=TINY_FACTS), "adapter.unfrozen_parameters", "error")
    ],
    "epochs-or-steps": [
        ({"optim.max_steps": 5, "optim.num_train_epochs": 3}, Facts(), "optim.num_train_epochs", "error")
    ],
    "warmup-needs-a-schedule-that-has-it": [
        ({"optim.lr_scheduler_type": "constant", "optim.warmup_steps": 5}, Facts(), "optim.warmup_steps", "error"),
        ({"optim.lr_scheduler_type": "constant_with_warmup"}, Facts(), "optim.warmup_steps", "error"),
    ],
    "warmup-is-steps-or-a-share": [({"optim.warmup_steps": 2.5}, Facts(), "optim.warmup_steps", "error")],
    "warmup-ends-before-the-run": [
        ({"optim.warmup_steps": 50, "optim.max_steps": 50}, Facts(), "optim.warmup_steps", "error")
    ],
    "adam-settings-need-adam": [
        ({"optim.optim": "sgd", "optim.adam_beta2": 0.95}, Facts(), "optim.adam_beta2", "error"),
        ({"optim.optim": "lion_8bit", "optim.adam_epsilon": 1e-6}, Facts(), "optim.adam_epsilon", "error"),
        ({"optim.optim": "muon", "optim.adam_beta2": 0.95, **LORA}, Facts(), "optim.adam_beta2", "error"),
    ],
    "lr-scheduler-kwargs-are-the-schedules-own": [
        ({"optim.lr_scheduler_kwargs": {"num_cycles": 2}}, Facts(), "optim.lr_scheduler_kwargs.num_cycles", "error"),
        ({**POLYNOMIAL, "optim.lr_scheduler_kwargs.powr": 2}, Facts(), "optim.lr_scheduler_kwargs.powr", "error"),
        ({**POLYNOMIAL, "optim.lr_scheduler_kwargs.power": 20}, Facts(), "optim.lr_scheduler_kwargs.power", "error"),
    ],
    "a-schedule-is-no-other-by-a-second-name": [
        (
            {"optim.lr_scheduler_type": "cosine_with_restarts"},
            Facts(),
            "optim.lr_scheduler_kwargs.num_cycles",
            "error",
        ),
        ({"optim.lr_scheduler_type": "polynomial"}, Facts(), "optim.lr_scheduler_kwargs.power", "error"),
    ],
    "a-falling-rate-ends-below-its-start": [
        (
            {**POLYNOMIAL, "optim.lr_scheduler_kwargs.lr_end": 1e-3, "optim.learning_rate": 1e-3},
            Facts(),
            "optim.lr_scheduler_kwargs.lr_end",
            "error",
        ),
    ],
    "optimizers-of-packages-need-them": [
        ({"optim.optim": name}, Facts(packages=NOTHING), "optim.optim", "error")
        for name in ("adamw_8bit", "adopt", "schedule_free_adamw")
    ],
    "schedule-free-has-no-schedule": [
        ({"optim.optim": "schedule_free_adamw", **more}, Facts(), "optim.lr_scheduler_type", "error")
        for more in ({}, {"optim.lr_scheduler_type": "cosine", "optim.warmup_steps": 0.1})
    ],
    "galore-trains-full-weights": [
        ({"optim.optim": name, **LORA}, Facts(), "optim.optim", "error")
        for name in ("galore_adamw", "q_galore_adamw_8bit")
    ],
    "projected-layers-need-galore": [
        ({"optim.optim_target_modules": ["mlp"]}, Facts(), "optim.optim_target_modules", "error")
    ],
    "projected-layers-are-named": [
        (
            {"optim.optim": "galore_adamw", "optim.optim_target_modules": named},
            Facts(),
            "optim.optim_target_modules",
            "error",
        )
        for named in ([], "mlp.(", ["mlp", "(q"])
    ],
    "galore-has-a-low-rank": [
        ({"optim.optim": "galore_adamw"}, Facts(model=TINY_FACTS), "optim.optim_args.rank", "error"),
    ],
    "schedule-free-averages-with-beta1": [
        (
            {"optim.optim": "schedule_free_adamw", "optim.lr_scheduler_type": "constant", "optim.adam_beta1": 0},
            Facts(),
            "optim.adam_beta1",
            "error",
        )
    ],
    "paging-needs-a-gpu": [({"optim.optim": "paged_adamw_8bit"}, Facts(machine=CPU), "optim.optim", "error")],
    "bf16-eval-needs-float32-and-held-out-rows": [
        ({"optim.bf16_full_eval": True, **more}, Facts(machine=machine), "optim.bf16_full_eval", "error")
        for more, machine in (
            ({}, None),
            ({"model.dtype": "float32"}, None),
            ({"model.dtype": "float32", "data.eval": [{"path": "b.jsonl"}]}, OLD),
        )
    ],
    "optim-args-are-the-optimizers-own": [
        ({"optim.optim_args": {"alpha": 5.0}}, Facts(), "optim.optim_args.alpha", "error"),
        ({"optim.optim": "ademamix", "optim.optim_args": {"aplha": 5}}, Facts(), "optim.optim_args.aplha", "error"),
        ({"optim.optim": "ademamix", "optim.optim_args": {"beta3": 1.5}}, Facts(), "optim.optim_args.beta3", "error"),
        (
            {"optim.optim": "ademamix", "optim.optim_args": {"t_alpha": 0.5}},
            Facts(),
            "optim.optim_args.t_alpha",
            "error",
        ),
        ({"optim.optim": "muon", "optim.optim_args": {"ns_steps": 0}}, Facts(), "optim.optim_args.ns_steps", "error"),
        (
            {"optim.optim": "q_galore_adamw_8bit", "optim.optim_args": {"proj_bits": 5}},
            Facts(),
            "optim.optim_args.proj_bits",
            "error",
        ),
        (
            {"optim.optim": "muon", "optim.optim_args": {"adjust_lr_fn": "fast"}},
            Facts(),
            "optim.optim_args.adjust_lr_fn",
            "error",
        ),
    ],
    "learning-rate-is-in-proportion": [
        ({"model.name": "Qwen/Qwen3-8B", "optim.learning_rate": 0.1}, Facts(), "optim.learning_rate", "warning")
    ],
    "eval-batch-needs-held-out-data": [
        ({"optim.per_device_eval_batch_size": 9}, Facts(), "optim.per_device_eval_batch_size", "error")
    ],
    "tf32-needs-a-card-that-has-it": [
        ({"optim.tf32": True}, Facts(machine=CPU), "optim.tf32", "error"),
        ({"optim.tf32": True, "model.dtype": "float32"}, Facts(machine=OLD), "optim.tf32", "error"),
    ],
    "offloading-to-the-host-needs-a-gpu": [
        ({"memory.activation_offloading": "cpu"}, Facts(machine=CPU), "memory.activation_offloading", "error")
    ],
    "offloading-moves-what-autograd-saves": [
        (
            {"memory.activation_offloading": "cpu", "memory.gradient_checkpointing": tier},
            Facts(machine=H100),
            "memory.gradient_checkpointing",
            "error",
        )
        for tier in ("selective", "medium")
    ],
    "offloading-to-disk-takes-time": [
        (
            {"model.name": "Qwen/Qwen3-8B", **LORA, "memory.activation_offloading": "disk"},
            Facts(machine=H100, model=LARGE),
            "memory.activation_offloading",
            "warning",
        )
    ],
    "layer-offloading-needs-a-gpu": [
        ({**LORA, "memory.layer_offloading": True}, Facts(machine=CPU), "memory.layer_offloading", "error")
    ],
    "layer-offloading-needs-frozen-weights": [
        ({"memory.layer_offloading": True}, Facts(machine=H100), "memory.layer_offloading", "error")
    ],
    "layer-offloading-cannot-move-int8": [
        ({**STREAMED, "model.quantization": "int8"}, Facts(machine=H100), "model.quantization", "error")
    ],
    "layer-offloading-needs-one-device": [
        ({**STREAMED, "run.devices": 2}, Facts(machine=parse_machine("2xH100-80GB")), "run.devices", "error")
    ],
    "layer-offloading-leaves-nothing-to-convert": [
        (
            {**STREAMED, "model.dtype": "float32", "optim.bf16_full_eval": True, "data.eval": [{"path": "e.jsonl"}]},
            Facts(machine=H100),
            "optim.bf16_full_eval",
            "error",
        )
    ],
    "layer-offloading-and-rounding-do-not-meet": [
        ({**STREAMED, **INT8}, Facts(machine=H100), "kernels.quantization_aware", "error")
    ],
    "offloading-both-needs-checkpoints": [
        (
            {**STREAMED, "memory.activation_offloading": "cpu", "memory.gradient_checkpointing": False},
            Facts(machine=H100),
            "memory.gradient_checkpointing",
            "error",
        )
    ],
    "layer-offloading-has-no-fixed-addresses": [
        (
            {**STREAMED, "kernels.torch_compile_options": {"triton.cudagraphs": True}},
            Facts(machine=H100),
            "kernels.torch_compile_options.triton.cudagraphs",
            "error",
        )
    ],
    "layers-fit-into-the-hosts-memory": [
        (
            {**STREAMED, "model.name": "Qwen/Qwen3-8B"},
            Facts(machine=replace(H100, memory_bytes=16 * GiB), model=LARGE),
            "memory.layer_offloading",
            "error",
        )
    ],
    "layer-offloading-has-its-price": [
        (
            {**STREAMED, "model.name": "Qwen/Qwen3-8B", "optim.per_device_train_batch_size": size},
            Facts(machine=H100, model=LARGE),
            "memory.layer_offloading",
            severity,
        )
        for size, severity in ((2, "warning"), (4, "hint"))
    ],
    "layers-come-in-for-every-token-sampled": [
        ({**GRPO, **STREAMED}, Facts(machine=H100), "memory.layer_offloading", "warning")
    ],
    "tiles-need-tiled-mlp": [
        ({"memory.tiled_mlp_tokens": 512}, Facts(), "memory.tiled_mlp_tokens", "error"),
        ({"memory.tiled_mlp_fp32_sums": True}, Facts(), "memory.tiled_mlp_fp32_sums", "error"),
    ],
    "tiled-mlp-has-its-price": [
        (
            {
                **LORA,
                "model.name": "Qwen/Qwen3-8B",
                "memory.tiled_mlp": True,
                "data.max_length": length,
                "memory.gradient_checkpointing": tier,
            },
            Facts(machine=H100, model=LARGE),
            "memory.tiled_mlp",
            severity,
        )
        for length, tier, severity in ((65_536, True, "hint"), (65_536, False, "hint"), (256, True, "warning"))
    ],
    "a-tile-is-smaller-than-a-batch": [
        (
            {"memory.tiled_mlp": True, "memory.tiled_mlp_tokens": 16384, "optim.per_device_train_batch_size": 8},
            Facts(),
            "memory.tiled_mlp_tokens",
            "error",
        )
    ],
    "tiles-are-not-compiled": [
        ({"memory.tiled_mlp": True, "kernels.torch_compile": True}, Facts(), "kernels.torch_compile", "error"),
        (
            {"memory.tiled_mlp": True, "kernels.torch_compile_options": {"shape_padding": True}},
            Facts(),
            "kernels.torch_compile",
            "error",
        ),
    ],
    "tiles-need-a-block-of-tokens-by-themselves": [
        ({"memory.tiled_mlp": True}, model(model_type="gpt_oss", parameters=1000), "memory.tiled_mlp", "error")
    ],
    "fp32-norms-stand-between-fewer-bits": [
        ({"memory.fp32_norms": True, "model.dtype": "float32"}, Facts(), "memory.fp32_norms", "error")
    ],
    "fused-attention-needs-a-gpu": [
        ({"kernels.fused_attn_kernel": True}, Facts(machine=CPU), "kernels.fused_attn_kernel", "error")
    ],
    "fused-attention-needs-a-card-of-today": [
        ({"kernels.fused_attn_kernel": True}, Facts(machine=OLD), "kernels.fused_attn_kernel", "error")
    ],
    "fused-attention-knows-the-model": [
        (
            {"kernels.fused_attn_kernel": True},
            model(model_type="phi3", parameters=1000),
            "kernels.fused_attn_kernel",
            "error",
        )
    ],
    "rotation-alone-is-left-to-compiled-layers": [
        (
            {"kernels.fused_attn_kernel": True, "kernels.torch_compile": True},
            model(model_type="llama", parameters=1000),
            "kernels.fused_attn_kernel",
            "hint",
        )
    ],
    "fused-lora-needs-an-adapter": [
        ({"kernels.fused_lora": True, "adapter.kind": "none"}, Facts(), "kernels.fused_lora", "error")
    ],
    "fused-lora-is-plain-lora": [
        (
            {"kernels.fused_lora": True, "adapter.kind": "lora", "adapter.use_dora": True},
            Facts(),
            "kernels.fused_lora",
            "error",
        )
    ],
    "fused-lora-has-no-mixed-precision": [
        (
            {"kernels.fused_lora": True, "adapter.kind": "lora", "model.dtype": "float16"},
            Facts(machine=H100),
            "kernels.fused_lora",
            "error",
        )
    ],
    "fused-lora-reads-the-weights": [
        (
            {"kernels.fused_lora": True, "adapter.kind": "lora", **int8},
            Facts(machine=H100),
            "kernels.fused_lora",
            "error",
        )
        for int8 in ({"kernels.quantization_aware": True}, {"model.quantization": "int8"})
    ],
    "fused-lora-is-not-compiled": [
        ({"kernels.fused_lora": True, "adapter.kind": "lora", **compiled}, Facts(), "kernels.fused_lora", "error")
        for compiled in (
            {"kernels.torch_compile": True},
            {"kernels.torch_compile_options": {"shape_padding": True}},
        )
    ],
    "kernel-auto-compose-has-a-choice": [
        (
            {"kernels.kernel_auto_compose": True, "kernels.fused_attn_kernel": False, **given},
            facts,
            "kernels.kernel_auto_compose",
            "error",
        )
        for given, facts in (
            ({"kernels.use_cut_ce": False, "kernels.torch_compile": False}, Facts()),
            ({"kernels.use_cut_ce": False, "kernels.torch_compile_options": {"shape_padding": True}}, Facts()),
            ({"kernels.use_cut_ce": True, "kernels.torch_compile": False}, Facts(machine=CPU)),
            (
                {**LORA, "kernels.use_cut_ce": False, "kernels.torch_compile": False, "kernels.fused_lora": False},
                Facts(),
            ),
        )
    ],
    "kernel-auto-compose-needs-the-layers-on-the-card": [
        (
            {"kernels.kernel_auto_compose": True, "memory.layer_offloading": True, **LORA},
            Facts(),
            "kernels.kernel_auto_compose",
            "error",
        )
    ],
    "fp8-base-needs-a-gpu": [(FP8_BASE, Facts(machine=CPU), "model.quantization", "error")],
    "fp8-base-needs-a-card-that-has-it": [
        (FP8_BASE, Facts(machine=parse_machine("1xA100-80GB")), "model.quantization", "error")
    ],
    "fp8-base-needs-bfloat16": [({**FP8_BASE, "model.dtype": "float32"}, Facts(), "model.dtype", "error")],
    "fp8-base-takes-plain-lora": [({**FP8_BASE, "adapter.use_dora": True}, Facts(), "adapter.use_dora", "error")],
    "fp8-base-needs-layers-that-gain": [(FP8_BASE, Facts(model=TINY_FACTS), "model.quantization", "error")],
    "fp8-base-wants-compiled-layers": [
        ({**FP8_BASE, "kernels.torch_compile": False}, Facts(), "kernels.torch_compile", "warning")
    ],
    "fp8-needs-a-gpu": [(FP8, Facts(machine=CPU), "kernels.quantization_aware", "error")],
    "fp8-needs-a-card-that-has-it": [
        (FP8, Facts(machine=parse_machine(name)), "kernels.quantization_aware", "error")
        for name in ("1xA100-80GB", "1xRTX4090")
    ],
    "quantization-aware-needs-torchao": [
        (changes, Facts(packages=NOTHING), "kernels.quantization_aware", "error") for changes in (FP8, INT8)
    ],
    "fp8-needs-bfloat16": [({**FP8, "model.dtype": "float32"}, Facts(), "model.dtype", "error")],
    "int8-rounding-needs-plain-weights": [
        ({**INT8, **LORA, "model.quantization": "nf4"}, Facts(), "kernels.quantization_aware", "error")
    ],
    "fp8-needs-plain-weights": [
        ({**FP8, **LORA, "model.quantization": held}, Facts(), "kernels.quantization_aware", "error")
        for held in ("int8", "fp8")
    ],
    "weights-stored-in-fp8-are-not-rounded-again": [
        ({**changes, **LORA}, model(stored="fp8"), "kernels.quantization_aware", "error") for changes in (FP8, INT8)
    ],
    "weights-stored-in-fp8-take-no-second-format": [
        ({**LORA, "model.quantization": "nf4"}, model(stored="fp8"), "model.quantization", "error")
    ],
    "weights-stored-in-fp8-take-plain-lora": [
        ({**LORA, "adapter.use_dora": True}, model(stored="fp8"), "adapter.use_dora", "error")
    ],
    "fp8-wants-compiled-layers": [
        ({**FP8, **changes}, Facts(machine=H100), "kernels.torch_compile", "warning")
        for changes in ({}, {"kernels.torch_compile": False})
    ],
    "fp8-scales-need-fp8": [
        ({**changes, "kernels.fp8_recipe_name": "rowwise"}, Facts(), "kernels.fp8_recipe_name", "error")
        for changes in ({}, INT8)
    ],
    "torch-compile-options-are-known": [
        (
            {"kernels.torch_compile_options": {"shape_paddding": True}},
            Facts(),
            "kernels.torch_compile_options.shape_paddding",
            "error",
        )
    ],
    "torch-compile-options-are-switches": [
        (
            {"kernels.torch_compile_options": {"shape_padding": "yes please"}},
            Facts(),
            "kernels.torch_compile_options.shape_padding",
            "error",
        )
    ],
    "torch-compile-options-need-torch-compile": [
        (
            {"kernels.torch_compile": False, "kernels.torch_compile_options": {"shape_padding": True}},
            Facts(),
            "kernels.torch_compile_options",
            "error",
        )
    ],
    "dora-breaks-compiled-layers": [
        ({**LORA, "adapter.use_dora": True, **compiled}, Facts(), "kernels.torch_compile", "hint")
        for compiled in (
            {"kernels.torch_compile": True},
            {"kernels.torch_compile_options": {"shape_padding": True}},
        )
    ],
    "cuda-graphs-need-one-shape": [
        (
            {
                "kernels.torch_compile": True,
                "kernels.torch_compile_options": {"triton.cudagraphs": True},
                "data.packing": packing,
            },
            Facts(),
            "kernels.torch_compile_options.triton.cudagraphs",
            "warning",
        )
        for packing in (False, True)
    ],
    "streaming-comes-later": [({"data.streaming": True}, Facts(), "data.streaming", "error")],
    "mlx-is-not-a-backend-here": [({"run.backend": "mlx"}, Facts(), "run.backend", "error")],
    "unsloth-is-not-a-backend-here": [({"run.backend": "unsloth"}, Facts(), "run.backend", "error")],
    "prompts-steps-need-prompts": [({"run.prompts_steps": 5}, Facts(), "run.prompts_steps", "error")],
    "max-new-tokens-need-prompts": [({"run.max_new_tokens": 5}, Facts(), "run.max_new_tokens", "error")],
    "prompts-are-not-empty": [({"run.prompts": ["a", " "]}, Facts(), "run.prompts.1", "error")],
    "eval-steps-need-held-out-data": [({"run.eval_steps": 5}, Facts(), "run.eval_steps", "error")],
    "a-checkpoint-falls-in-the-run": [
        ({"optim.max_steps": 150}, Facts(), "run.save_steps", "warning"),
        ({"optim.max_steps": 5}, Facts(), "run.save_steps", "hint"),
    ],
    "an-evaluation-falls-in-the-run": [
        (
            {"optim.max_steps": 500, "run.eval_steps": 501, "data.eval": [{"path": "b.jsonl"}]},
            Facts(),
            "run.eval_steps",
            "error",
        )
    ],
    "full-determinism-takes-no-times": [
        (
            {"run.full_determinism": True, "kernels.kernel_auto_compose": True},
            Facts(),
            "kernels.kernel_auto_compose",
            "error",
        )
    ],
    "full-determinism-tunes-nothing": [
        (
            {"run.full_determinism": True, "kernels.torch_compile_options": {"max_autotune_gemm": True}},
            Facts(),
            "kernels.torch_compile_options.max_autotune_gemm",
            "error",
        )
    ],
    "devices-exist": [
        ({"run.devices": [0, 0]}, Facts(), "run.devices", "error"),
        ({"run.devices": []}, Facts(), "run.devices", "error"),
        ({"run.devices": [0]}, Facts(machine=CPU), "run.devices", "error"),
        ({"run.devices": [1]}, Facts(machine=H100), "run.devices", "error"),
        ({"run.devices": 2}, Facts(machine=H100), "run.devices", "error"),
        ({"run.devices": 5}, Facts(machine=CPU), "run.devices", "error"),
    ],
    "the-name-fits-a-folder": [({"run.name": "a/b"}, Facts(), "run.name", "error")],
    "checkpoints-fit-the-disk": [
        (
            {"run.save_total_limit": 5},
            Facts(machine=replace(CPU, disk_free_bytes=8 * 1024**2), model=TINY_FACTS),
            "run.save_total_limit",
            "error",
        )
    ],
    "it-fits-into-memory": [
        (
            {"model.name": "Qwen/Qwen3-8B"},
            Facts(machine=parse_machine("1xRTX4090-24GB"), model=LARGE),
            "optim.per_device_train_batch_size",
            "error",
        )
    ],
}
ALL = [(name, number) for name, cases in CASES.items() for number in range(len(cases))]


def mapping_of(changes: dict[str, Any]) -> dict[str, Any]:
    mapping = copy.deepcopy(GOOD)
    for path, value in changes.items():
        put(mapping, path, copy.deepcopy(value))
    return mapping


def test_every_rule_has_a_case() -> None:
    assert {rule.name for rule in RULES} == set(CASES)
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(("name", "number"), ALL)
def test_a_rule_speaks_where_it_should_and_its_fix_mends_it(name: str, number: int) -> None:
    changes, facts, path, severity = CASES[name][number]
    draft = Draft(as_yaml(mapping_of(changes)))
    draft.learn(facts)
    found = [finding for finding in draft.findings if finding.rule == name]
    assert [(finding.path, finding.severity) for finding in found] == [(path, severity)]
    finding = found[0]
    assert finding.message.startswith(f"{path}: ")
    assert finding.message.endswith((".", "?"))
    if finding.fix and name != "it-fits-into-memory":
        draft.apply(finding.fix)
        left = [each.severity for each in draft.findings if each.rule == name and each.path == path]
        assert all(RANK[after] > RANK[severity] for after in left)
        assert draft.reading.invalid == frozenset()


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_quiet_on_a_plain_config_and_without_facts(name: str) -> None:
    plain = Facts(machine=replace(H100, disk_free_bytes=100 * GiB), model=TINY_FACTS, packages={})
    for facts in (Facts(), plain, source(rows=100_000, format="messages")):
        assert [finding for finding in read(GOOD, facts).findings if finding.rule == name] == []


@pytest.mark.parametrize("spec", [spec for spec in fields if spec.later], ids=lambda spec: spec.path)
def test_a_value_of_a_later_version_is_never_accepted_in_silence(spec: Any) -> None:
    for value in spec.later:
        reading = read(mapping_of({spec.path: value}))
        found = [finding for finding in reading.findings if finding.path == spec.path and finding.severity == "error"]
        assert len(found) == 1
        assert spec.path not in reading.invalid
        assert "later version" in found[0].message or spec.section == "run"


def test_rules_read_the_settings_they_name() -> None:
    """A rule that read an undeclared setting would run on a replaced value; every finding's setting is declared."""
    by_name = {rule.name: rule for rule in RULES}
    for name, cases in CASES.items():
        declared = {spec.path for spec in by_name[name].reads}
        for _, _, path, _ in cases:
            assert any(path == known or path.startswith(f"{known}.") for known in declared) or name in (
                "messages-need-a-chat-template",
            )


def test_texts_of_all_rules(snapshot: Any) -> None:
    """Pinned so that a change of words is read by somebody."""
    texts = []
    for name, cases in CASES.items():
        for changes, facts, _, _ in cases:
            texts += [
                f"{finding.severity}: {finding.message}" + (f" [{finding.fix.label}]" if finding.fix else "")
                for finding in read(mapping_of(changes), facts).findings
                if finding.rule == name
            ]
    assert "\n".join(texts) == snapshot


def test_texts_of_reading(snapshot: Any) -> None:
    mappings: list[dict[str, Any]] = [
        {"model": {"nmae": "x"}},
        {"method": "dpo"},
        {"method": {"kind": "grpo"}},
        {"method": {"kind": "dpoo"}},
        {"method": {"kind": "sft", "beta": 1}},
        {"adapter": "qlora"},
        {"adapter": {"kind": "qlora"}},
        {"sequence_len": 3},
        {"fp16": False},
        {"learning_rate": 3},
        {"zzzzzzz": 3},
        {"optim": {"learning_rate": "fast", "max_steps": 0, "optim": "adamw_9bit", "tf32": "maybe"}},
        {"model": {"dtype": "bfloat61", "quantization": 3, "chat_template_kwargs": "x"}},
        {"data": {"train": [{"path": "a", "fromat": "text", "format": "kto"}, 3, {}]}},
        {"data": {"train": 3, "max_length": 3}},
        {"run": {"devices": True, "prompts": 3.5, "output_dir": []}},
        {"version": 9},
        {3: 4},
    ]
    texts = []
    for mapping in mappings:
        for finding in read({**GOOD, **mapping}).findings:
            texts.append(f"{finding.rule}: {finding.message}" + (f" [{finding.fix.label}]" if finding.fix else ""))
    assert "\n".join(texts) == snapshot


def test_an_old_card_is_named_in_the_sentence() -> None:
    old = Machine(gpus=(Gpu("Tesla V100", 32 * GiB, (7, 0)),))
    assert "Tesla V100" in next(f.message for f in read(GOOD, Facts(machine=old)).findings if f.path == "model.dtype")


def test_what_will_not_fit_comes_with_ways_that_help() -> None:
    facts = Facts(machine=parse_machine("1xRTX4090-24GB"), model=LARGE)
    draft = Draft(as_yaml(mapping_of({"model.name": "Qwen/Qwen3-8B", "adapter.kind": "lora", "data.max_length": 4096})))
    draft.learn(facts)
    finding = next(f for f in draft.findings if f.rule == "it-fits-into-memory")
    assert finding.message.startswith("optim.per_device_train_batch_size: this will not fit: needs ")
    assert "4-bit weights (-" in finding.message
    for _ in range(6):
        finding = next((f for f in draft.findings if f.rule == "it-fits-into-memory" and f.severity == "error"), None)
        if finding is None:
            break
        assert finding.fix is not None
        draft.apply(finding.fix)
    assert finding is None


@pytest.mark.parametrize(
    ("card", "settings", "offered"),
    [
        ("1xRTX4090-24GB", {}, True),
        ("1xA100-40GB", {"optim.per_device_train_batch_size": 64}, False),  # too old for products in FP8
        ("1xRTX4090-24GB", {"model.dtype": "float32"}, False),  # FP8's products come out as bfloat16
        ("1xRTX4090-24GB", {"adapter.use_dora": True}, False),
        ("1xRTX4090-24GB", {"kernels.torch_compile": False}, False),  # it would be slower than what it replaces
    ],
)
def test_fp8_weights_are_a_way_to_fit_where_their_own_rules_allow_them(
    card: str, settings: dict[str, Any], offered: bool
) -> None:
    facts = Facts(machine=parse_machine(card), model=LARGE)
    long = {"model.name": "Qwen/Qwen3-8B", **LORA, "data.max_length": 16384, "kernels.torch_compile": True}
    mapping = mapping_of({**long, "model.dtype": "bfloat16", **settings})
    finding = next(f for f in read(mapping, facts).findings if f.rule == "it-fits-into-memory")
    assert ("FP8 weights (-" in finding.message) is offered
    assert "4-bit weights (-" in finding.message
    if offered:
        assert finding.message.index("FP8 weights") < finding.message.index("4-bit weights"), "quicker, and closer"


def test_what_is_not_installed_is_no_way_to_fit() -> None:
    long = mapping_of({"model.name": "Qwen/Qwen3-8B", **LORA, "data.max_length": 4096})
    facts = Facts(machine=parse_machine("1xRTX4090-24GB"), model=LARGE, packages=NOTHING)
    finding = next(f for f in read(long, facts).findings if f.rule == "it-fits-into-memory")
    assert "4-bit weights" not in finding.message


def test_the_built_in_shape_is_the_one_that_is_built() -> None:
    from engine.builtin import tiny

    for name, value in tiny.SHAPE.items():
        if name in TINY:
            assert TINY[name] == value, name
    assert TINY["vocab_size"] == tiny.VOCABULARY
