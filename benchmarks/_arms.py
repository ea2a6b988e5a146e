"""The arms that benchmarks of whole steps compare, by name, and what builds them around one frozen base.

An arm is a library's trainer or ours with some settings on top of the common ones. Ours runs as a worker runs it, with
events, receipt and telemetry. Arms named `fp8 base` round the base's layers to a copy of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from _method_rows import GENERATES, method_rows, reward_names, rows_a_step
from _peers import NoPeer, expect_peer, plain_trainer
from _random_base import random_base
from _turns import CARD, Arm, Patched
from peft import get_peft_model
from transformers import GptOssConfig, Qwen3Config, Qwen3MoeConfig

from engine.config.facts import DataFacts
from engine.config.files import as_yaml
from engine.config.kinds import LOADERS
from engine.config.method import METHODS
from engine.data.collate import collator_for
from engine.data.gather_facts import gather_facts
from engine.features.attention_backend.backend import settle
from engine.features.auto_compose.apply import FEATURE as TIMED
from engine.features.built import Built, Notes, decoder_layers
from engine.features.compile.product_sums import ProductSums
from engine.features.fp8_base.layers import compute_in_fp8
from engine.features.sequence import Features
from engine.hardware import Machine
from engine.models.adapters import add_adapter, lora_config
from engine.planning.auto import resolved
from engine.rules import read
from engine.run.async_writer import AsyncWriter
from engine.run.control import Controls
from engine.run.store import create
from engine.trainers.job import Job
from engine.trainers.receipt import receipt
from engine.trainers.table import method as module_of
from engine.trainers.watching import Watching

MIXTURE = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "num_attention_heads": 32, "num_key_value_heads": 4,
}  # fmt: skip
"""Qwen3-30B-A3B, but for its number of layers."""
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "14b": {"hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 40, "num_attention_heads": 40},
    "32b": {"hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "8b": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "30b-a3b": {**MIXTURE, "num_hidden_layers": 48},
    "30b-a3b of 8 layers": {**MIXTURE, "num_hidden_layers": 8},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gptoss-20b": {
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "head_dim": 64,
        "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201_088,
    },
    "tiny mixture": {
        "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 2,
    },
    "tiny gptoss": {
        "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16,
    },
}  # fmt: skip
UNTIED = "8b", "14b", "32b", "30b-a3b", "30b-a3b of 8 layers", "gptoss-20b"
IN_MXFP4 = "gptoss-20b", "tiny gptoss"
"""Shapes whose files hold experts in MXFP4: ours trains on them as they are, a library's trainer on 16 bits."""
KERNELS = "kernels.use_cut_ce", "kernels.torch_compile"
ON = dict.fromkeys(KERNELS, True)
IN_NF4 = {"model.quantization": "nf4", "optim.optim": "adamw_8bit", "kernels.fused_experts": True}
ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "default": {},
    "liger": {},
    "compiled by torch, liger": {},
    "ours": {},
    "ours by default": {
        "kernels.use_cut_ce": "auto",
        "kernels.torch_compile": "auto",
        "kernels.fused_experts": "auto",
        "memory.gradient_checkpointing": "auto",
    },
    "cut": {"kernels.use_cut_ce": True},
    "cut, dynamic cache": {"kernels.use_cut_ce": True, "method.cache_implementation": "dynamic"},
    "ours by default, dynamic cache": {
        "kernels.use_cut_ce": "auto",
        "kernels.torch_compile": "auto",
        "memory.gradient_checkpointing": "auto",
        "method.cache_implementation": "dynamic",
    },
    "fused": {"kernels.fused_attn_kernel": True},
    "compiled": {"kernels.torch_compile": True},
    "lora": {"kernels.fused_lora": True},
    "cut, lora": {"kernels.fused_lora": True, "kernels.use_cut_ce": True},
    "cut, fused, lora": {"kernels.fused_lora": True, "kernels.use_cut_ce": True, "kernels.fused_attn_kernel": True},
    "cut, fused, lora, auto": {
        "kernels.fused_lora": True,
        "kernels.use_cut_ce": True,
        "kernels.fused_attn_kernel": True,
        "memory.gradient_checkpointing": "auto",
    },
    "cut, fused": {"kernels.use_cut_ce": True, "kernels.fused_attn_kernel": True},
    "cut, liger kernels": {"kernels.use_cut_ce": True, "kernels.use_liger_kernel": True},
    "cut, fused, liger kernels": {
        "kernels.use_cut_ce": True,
        "kernels.fused_attn_kernel": True,
        "kernels.use_liger_kernel": True,
    },
    "cut, none": {"kernels.use_cut_ce": True, "memory.gradient_checkpointing": False},
    "cut, liger kernels, none": {
        "kernels.use_cut_ce": True,
        "kernels.use_liger_kernel": True,
        "memory.gradient_checkpointing": False,
    },
    "composed": {"kernels.use_cut_ce": True, "kernels.kernel_auto_compose": True},
    "cut, compiled": ON,
    "all three": {**ON, "kernels.fused_attn_kernel": True},
    "cut, compiled, medium": {**ON, "memory.gradient_checkpointing": "medium"},
    "cut, compiled, selective": {**ON, "memory.gradient_checkpointing": "selective"},
    "cut, compiled, auto": {**ON, "memory.gradient_checkpointing": "auto"},
    "cut, compiled, none": {**ON, "memory.gradient_checkpointing": False},
    "cut, compiled, none, usual head": {
        **ON,
        "memory.gradient_checkpointing": False,
        "kernels.cut_ce_workspace": None,
    },
    "cut, compiled, 35 again": {**ON, "memory.recompute_num_layers": 35},
    "cut, compiled, streamed": {**ON, "memory.layer_offloading": True},
    "cut, compiled, graphs": {**ON, "kernels.torch_compile_options": {"triton.cudagraphs": True}},
    "cut, compiled, none, graphs": {
        **ON,
        "memory.gradient_checkpointing": False,
        "kernels.torch_compile_options": {"triton.cudagraphs": True},
    },
    "cut, compiled, stack": {**ON, "kernels.torch_compile_options": {"stack_cudagraph": True}},
    "cut, compiled, none, stack": {
        **ON,
        "memory.gradient_checkpointing": False,
        "kernels.torch_compile_options": {"stack_cudagraph": True},
    },
    "cut, all auto": {
        "kernels.use_cut_ce": True,
        "kernels.torch_compile": "auto",
        "kernels.fused_experts": "auto",
        "memory.gradient_checkpointing": "auto",
    },
    "all three, none": {**ON, "kernels.fused_attn_kernel": True, "memory.gradient_checkpointing": False},
    "all three, 35 again": {**ON, "kernels.fused_attn_kernel": True, "memory.recompute_num_layers": 35},
    "none": {"memory.gradient_checkpointing": False},
    "nf4 by default": {
        "model.quantization": "nf4",
        "kernels.use_cut_ce": "auto",
        "kernels.torch_compile": "auto",
        "memory.gradient_checkpointing": "auto",
    },
    "plain layers by default": {
        "kernels.use_cut_ce": "auto",
        "kernels.fused_experts": "auto",
        "memory.gradient_checkpointing": "auto",
    },
    "fp8 by default": {
        "model.quantization": "fp8",
        "kernels.use_cut_ce": "auto",
        "kernels.torch_compile": "auto",
        "memory.gradient_checkpointing": "auto",
    },
    "fp8 base": {**ON, "model.quantization": "fp8"},
    "fp8 base, none": {**ON, "model.quantization": "fp8", "memory.gradient_checkpointing": False},
    "fp8 base, 28 again": {**ON, "model.quantization": "fp8", "memory.recompute_num_layers": 28},
    "fp8 base, medium": {**ON, "model.quantization": "fp8", "memory.gradient_checkpointing": "medium"},
    "fp8 base, eager": {"kernels.use_cut_ce": True, "model.quantization": "fp8"},
    "experts": {"kernels.fused_experts": True},
    "experts, none": {"kernels.fused_experts": True, "memory.gradient_checkpointing": False},
    "cut, experts": {"kernels.use_cut_ce": True, "kernels.fused_experts": True},
    "cut, fused, experts": {
        "kernels.use_cut_ce": True,
        "kernels.fused_attn_kernel": True,
        "kernels.fused_experts": True,
    },
    "cut, fused, lora, experts": {
        "kernels.use_cut_ce": True,
        "kernels.fused_attn_kernel": True,
        "kernels.fused_lora": True,
        "kernels.fused_experts": True,
    },
    "cut, compiled, experts": {**ON, "kernels.fused_experts": True},
    "cut, compiled, experts, medium": {
        **ON,
        "kernels.fused_experts": True,
        "memory.gradient_checkpointing": "medium",
    },
    "cut, compiled, experts, none": {
        **ON,
        "kernels.fused_experts": True,
        "memory.gradient_checkpointing": False,
    },
    "nf4, compiled, experts": {**ON, **IN_NF4},
    "nf4, compiled, experts, graphs": {
        **ON,
        **IN_NF4,
        "kernels.torch_compile_options": {"triton.cudagraphs": True},
    },
    "nf4, fused, lora, experts": {
        **IN_NF4,
        "kernels.use_cut_ce": True,
        "kernels.fused_attn_kernel": True,
        "kernels.fused_lora": True,
    },
    "nf4, compiled, experts, offloaded": {**ON, **IN_NF4, "memory.activation_offloading": "cpu"},
    "nf4, fused, lora, experts, offloaded": {
        **IN_NF4,
        "kernels.use_cut_ce": True,
        "kernels.fused_attn_kernel": True,
        "kernels.fused_lora": True,
        "memory.activation_offloading": "cpu",
    },
    "nf4, fused, lora, experts, streamed": {
        **IN_NF4,
        "kernels.use_cut_ce": True,
        "kernels.fused_attn_kernel": True,
        "kernels.fused_lora": True,
        "memory.layer_offloading": True,
    },
    "cut, lora, experts": {"kernels.use_cut_ce": True, "kernels.fused_lora": True, "kernels.fused_experts": True},
    "cut, compiled, experts, flex": {**ON, "kernels.fused_experts": True, "model.attention": "flex_attention"},
    "cut, experts, flex": {
        "kernels.use_cut_ce": True,
        "kernels.fused_experts": True,
        "model.attention": "flex_attention",
    },
    "cut, compiled, experts, sinks": {**ON, "kernels.fused_experts": True, "model.attention": "sinks"},
    "cut, experts, sinks": {"kernels.use_cut_ce": True, "kernels.fused_experts": True, "model.attention": "sinks"},
    "sinks": {"model.attention": "sinks"},
    "cut, experts, streamed": {
        "kernels.use_cut_ce": True,
        "kernels.fused_experts": True,
        "memory.layer_offloading": True,
    },
    "cut, compiled, experts, streamed": {**ON, "kernels.fused_experts": True, "memory.layer_offloading": True},
    "cut, fused, lora, experts, streamed": {
        "kernels.use_cut_ce": True,
        "kernels.fused_attn_kernel": True,
        "kernels.fused_lora": True,
        "kernels.fused_experts": True,
        "memory.layer_offloading": True,
    },
    "packed rows, compiled": {"data.packing": True, "kernels.torch_compile": True, "kernels.fused_experts": True},
    "offloaded": {"memory.activation_offloading": "cpu"},
    "on disk": {"memory.activation_offloading": "disk"},
    "selective": {"memory.gradient_checkpointing": "selective"},
    "medium": {"memory.gradient_checkpointing": "medium"},
    "tiled": {"memory.tiled_mlp": True},
    "streamed": {"memory.layer_offloading": True},
    "nf4": {"model.quantization": "nf4"},
    "fp8": {"model.quantization": "fp8"},
}
"""Settings on top of the common ones. `plain` is TRL with the same settings, `default` TRL as it comes (autocast, float32
adapters), `liger` plain TRL with Liger's kernels, which a library's layers compiled one by one may be added to; `ours` the
same settings with no feature on, `ours by default` with all that is chosen where nobody asks."""
AS_BEFORE = ", sums apart"
"""Behind an arm's name: the same with every product a result of its own, added where the sum is read."""
for _name in (
    "cut, compiled",
    "cut, compiled, none",
    "cut, compiled, 35 again",
    "all three, none",
    "all three, 35 again",
    "fp8 base, none",
):
    ARMS[_name + AS_BEFORE] = ARMS[_name]
PEERS = "plain", "default", "liger", "compiled by torch, liger"
"""The arms that are not ours."""


def settings(
    options: argparse.Namespace,
    method: str,
    arm: dict[str, Any],
    folder: Path,
    machine: Machine | None = None,
    longest: int | None = None,
) -> Any:
    """The run's config, with `auto` resolved for this shape and card, or that of `machine`; `longest` are the tokens of the longest
    row, as a worker knows them once its rows are prepared."""
    kind: dict[str, Any] = {"kind": method}
    if method in GENERATES:
        length = min(options.answer, options.tokens)
        kind |= {"reward_funcs": reward_names(method), "max_completion_length": length, "beta": 0.0}
        kind |= {} if method == "ppo" else {"num_generations": 8}
    mapping: dict[str, Any] = {
        "version": 1,
        "model": {"name": str(folder), "dtype": precision(options)},
        "method": kind,
        "adapter": {"kind": "none"} if options.full else {"kind": "lora", "r": 16, "lora_alpha": 32, **of_experts(options)},
        "data": {"train": [{"path": "builtin/dates"}], "max_length": options.tokens,
                 "packing": method == "sft" and not options.ragged,
                 "shuffle": method != "kto"},  # TRL's KTO takes rows as they come
        "optim": {
            "per_device_train_batch_size": rows_a_step(method, options.rows),
            "gradient_accumulation_steps": getattr(options, "accumulation", 1),
            "max_steps": 100_000, "learning_rate": 1e-4,
        },
        "memory": {"gradient_checkpointing": True},
        "kernels": {"use_cut_ce": False, "torch_compile": False, "fused_experts": False},
        "run": {"save_steps": 1_000_000},
    }  # fmt: skip
    for path, value in arm.items():
        section, name = path.split(".")
        mapping[section][name] = value
    reading = read(mapping)
    wrong = [found.message for found in reading.findings if found.severity == "error"]
    if wrong:
        raise SystemExit(f"{method}: {wrong}")
    facts = gather_facts(reading.config, machine=machine, sources=False)
    if longest is not None:
        facts = dataclasses.replace(facts, data=DataFacts(longest=longest, exact=True))
    return resolved(reading.config, facts)


def of_experts(options: argparse.Namespace) -> dict[str, Any]:
    """Adapters of a mixture: on attention, and on the weights that hold all experts."""
    if not has_experts(options.shape):
        return {}
    return {
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }


def has_experts(shape: str) -> bool:
    return not SHAPES.get(shape, {}).keys().isdisjoint({"num_experts", "num_local_experts"})


def precision(options: argparse.Namespace) -> str:
    """Of the base and of what is trained."""
    return "float32" if options.shape.startswith("tiny") and not any(map(in_fp8, options.arms)) else "bfloat16"


def in_fp8(arm: str) -> bool:
    """Whether the arm rounds its own copy of the frozen layers to FP8."""
    return ARMS[arm].get("model.quantization") == "fp8"


def in_nf4(arm: str) -> bool:
    """Whether the arm's base is held in four bits, its experts too."""
    return ARMS[arm].get("model.quantization") == "nf4"


def packed_in(shape: str, arm: str) -> str:
    """What the arm's base is packed in; empty for 16 bits."""
    if in_nf4(arm):
        return "nf4"
    return "mxfp4" if shape in IN_MXFP4 and arm not in PEERS else ""


class Apart(ProductSums):
    """Changes nothing."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        pass

    def uuid(self) -> Any:
        return "sums apart"


class Builder:
    """Makes the arms of one method around one frozen base."""

    def __init__(self, options: argparse.Namespace, method: str, folder: Path, tokenizer: Any) -> None:
        self.options, self.method, self.folder, self.tokenizer = options, method, folder, tokenizer
        self.shape = self.model_config()
        self.shape.save_pretrained(folder)
        if options.shape in IN_MXFP4:
            note = folder / "config.json"
            stored = {"quantization_config": {"quant_method": "mxfp4"}}
            note.write_text(json.dumps(json.loads(note.read_text("utf-8")) | stored), "utf-8")
        self.shape._name_or_path = str(folder)  # where a copied reference is loaded from, ours and the library's
        self.device = "cuda" if CARD else "cpu"
        self.weights: dict[str, torch.Tensor] | None = None
        self.rows = self.prepared_rows()

    def model_config(self) -> Any:
        """What the base is made from."""
        size = SHAPES[self.options.shape]
        large = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
        small = {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}
        kind, name = Qwen3Config, "Qwen3ForCausalLM"
        if "num_experts" in size:
            kind, name = Qwen3MoeConfig, "Qwen3MoeForCausalLM"
        elif "num_local_experts" in size:
            kind, name = GptOssConfig, "GptOssForCausalLM"
        shape = kind(
            **{**(small if self.options.shape.startswith("tiny") else large), **size},
            tie_word_embeddings=self.options.shape not in UNTIED, pad_token_id=0,
            num_labels=2 if self.method == "prm" else 1, classifier_dropout=0.0,
        )  # fmt: skip
        shape.architectures = [name]
        return shape

    def loader(self) -> Any:
        """The class of transformers that makes the base."""
        return getattr(transformers, LOADERS[METHODS[self.method].head])

    def prepared_rows(self) -> Any:
        """What our arms train on."""
        options, lengths = self.options, getattr(self.options, "lengths_of", "")
        more = {"ragged": options.ragged, "lengths_of": lengths}
        return method_rows(self.method, options.tokens, self.shape.vocab_size, self.tokenizer, **more)

    def model_class(self) -> type:
        """transformers' class of the shape."""
        kind: type = getattr(transformers, self.shape.architectures[0])
        return kind

    def base(self, packed: str = "", *, on_host: bool = False) -> Any:
        """The frozen base that all arms share; one of its own where it is packed or lies on the host."""
        if packed or on_host:
            dtype = getattr(torch, precision(self.options))
            return random_base(self.loader(), self.shape, dtype, self.device, packed, on_host=on_host)
        if self.weights is not None and not self.options.full and METHODS[self.method].head == "vocabulary":
            # Not drawn again only to be put away, which takes a slow host half a minute.
            dtype = getattr(torch, precision(self.options))
            model = random_base(self.loader(), self.shape, dtype, self.device, known=self.weights)
            torch.manual_seed(0)  # adapters are drawn next, alike for each arm
            return model
        torch.manual_seed(0)
        with torch.device(self.device):
            model = self.loader().from_config(copy.deepcopy(self.shape), dtype=getattr(torch, precision(self.options)))
        if self.weights is None:
            self.weights = model.state_dict()
            if self.options.full:
                self.weights = {name: weight.clone() for name, weight in self.weights.items()}
                model.save_pretrained(self.folder)
        else:
            own = {name: weight.clone() if self.options.full else weight for name, weight in self.weights.items()}
            model.load_state_dict(own, assign=True)
            model.tie_weights()
        torch.manual_seed(0)
        return model

    def config(self, name: str) -> Any:
        """The arm's settings."""
        prompts = max(map(len, self.rows["prompt_ids"])) if self.method in GENERATES else None
        return settings(self.options, self.method, ARMS[name], self.folder, longest=prompts)

    def packed(self, name: str) -> str:
        """What the arm's base is packed in; empty for 16 bits."""
        return packed_in(self.options.shape, name)

    def arm(self, name: str) -> Arm:
        config = self.config(name)
        place = Path(tempfile.mkdtemp(dir=self.folder.parent))
        if name in PEERS:
            # Liger's kernels replace names in transformers' module of the model, as late as training begins; the arms after
            # it would find them.
            patched = Patched(sys.modules[self.model_class().__module__])
            with patched:
                trainer = self.theirs(config, place, name)
                told = (
                    f"experts by {trainer.model.config._experts_implementation},"
                    if has_experts(self.options.shape)
                    else ""
                )
                return Arm(name, trainer, lambda: None, told, self.options.window, patched)
        packed = self.packed(name)
        model = self.base(packed, on_host=bool(ARMS[name].get("memory.layer_offloading")))
        if in_fp8(name):
            compute_in_fp8(model, least=0 if self.options.shape == "tiny" else None)
        lacking = ""
        if (attention := ARMS[name].get("model.attention")) is not None:
            lacking = settle(model, attention, torch.device(self.device))
        model = add_adapter(model, config)
        features = Features(config)
        notes = Notes(place, dict.fromkeys((path for path, value in ARMS[name].items() if value == "auto"), "auto"))
        features.prepare(Built(model, notes=notes))
        run = create(place, as_yaml({"version": 1}), {})
        stack = contextlib.ExitStack()
        writer = stack.enter_context(AsyncWriter(run))
        stack.callback(features.undo)
        opening = {"method": self.method, "model": "bench", "devices": []}
        watching = Watching(run, writer, Controls(run, writer), opening, 1, [], 1, list)
        collator = collator_for(config, self.tokenizer)
        job = Job(config, run.path, model, self.tokenizer, collator, self.rows, callbacks=[watching])
        trainer = module_of(self.method).build(job)
        trainer.args.save_strategy = "no"
        watching.trainer = trainer
        trainer.attach(run, writer, 2, {})
        apart = mock.patch("engine.features.compile.product_sums.ProductSums", Apart)
        with apart if name.endswith(AS_BEFORE) else contextlib.nullcontext():
            features.apply(trainer.built(notes))
        prepared = argparse.Namespace(
            counts={"kept": len(self.rows), "packs": 0}, warnings=(), fingerprint="", stream=None
        )
        prepared.dataset = self.rows
        writer.write("receipt", entries=receipt(config, trainer, prepared) + features.entries())
        kernels = config.kernels
        told = f"checkpointing {config.memory.gradient_checkpointing}, compiled {kernels.torch_compile},"
        told += f" cut {kernels.use_cut_ce}," if name == "ours by default" else ""
        timed = [entry for entry in features.entries() if entry["feature"] == TIMED]
        told += "".join(f" {entry['effective']} of {entry['detail']}," for entry in timed)
        told += f" fused experts {kernels.fused_experts}," if kernels.fused_experts is not False else ""
        told += f" base in {packed}," if packed else ""
        told += f" attention {model.config._attn_implementation}{f' ({lacking})' if lacking else ''},"
        arm = Arm(name, trainer, stack.close, told, self.options.window)
        arm.config = config
        return arm

    def theirs(self, config: Any, place: Path, name: str) -> Any:
        """The library's trainer on the same rows; `default` with the precision that TRL comes with. Raises NoPeer."""
        expect_peer(self.method)
        if "liger" in name and find_spec("liger_kernel") is None:
            raise NoPeer("liger-kernel is not installed (pip install liger-kernel)")
        if "liger" in name and not CARD:
            raise NoPeer("Liger's kernels run on a GPU")
        arguments = module_of(self.method).arguments(config, place)
        arguments.save_strategy = "no"
        changes: dict[str, Any] = {}
        if hasattr(arguments, "generation_batch_size"):
            # It follows from the others, and is refused beside them.
            changes["generation_batch_size"] = None
        if name == "default":
            changes["bf16"] = CARD
            model = (
                self.base() if self.options.full else get_peft_model(self.base(), lora_config(config, config.adapter))
            )
        else:
            model = add_adapter(self.base(), config)
        if "liger" in name:
            changes["use_liger_kernel"] = True
        arguments = dataclasses.replace(arguments, **changes)  # once: it derives the rest anew
        trainer = self.plain(config, arguments, model)
        if name.startswith("compiled by torch"):
            for layer in decoder_layers(model):
                layer.compile(dynamic=self.options.ragged or None)
        return trainer

    def plain(self, config: Any, arguments: Any, model: Any) -> Any:
        """The library's trainer. Raises NoPeer."""
        return plain_trainer(config, arguments, model, self.tokenizer, self.rows)
