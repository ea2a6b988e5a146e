"""No setting is without effect: away from its default the run ends with other weights, or a test elsewhere shows what it does.

The first test is the guard: a new setting of method, adapter, optim, memory or kernels must stand in one of the tables.
The runs themselves are marked slow, half a minute a method; what a rule refuses on a CPU has its proof on a card.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.config.adapter import ADAPTERS
from engine.config.facts import Facts
from engine.config.files import put
from engine.config.kernels import Kernels
from engine.config.memory import Memory
from engine.config.method import METHODS
from engine.config.optim import Optim
from engine.config.optimizers import KINDS
from engine.config.schedules import SCHEDULES
from engine.config.schema import read
from tests.engine.trainers.conftest import BASE, CONVERSATIONS
from tests.engine.trainers.test_matrix import CPU, LORA, settings

ROOT = Path(__file__).resolve().parents[3]
T = "tests/engine/trainers"
REWARD = (
    "def letters(completions):\n    return [sum(map(ord, each[-1]['content'])) % 17 / 17 for each in completions]\n"
)
OLD = {"method.num_iterations": 3}  # answers are used again after the weights have moved, so that bounds act
SAMPLING = {
    "reward_funcs": ["length:4"], "max_completion_length": 6, "temperature": 0.5, "top_p": 0.5, "top_k": 3,
    "repetition_penalty": 1.5, "num_iterations": 2, "steps_per_generation": 2, "epsilon": 0.01, "epsilon_high": 0.9,
    "beta": 0.3, "num_generations": 2,
}  # fmt: skip
GROUPS = {
    **SAMPLING,
    "loss_type": "sapo",
    "importance_sampling_level": "sequence",
    "mask_truncated_completions": True,
}
# method -> setting -> another value than its default
METHOD = {
    "dpo": {"beta": 0.5, "loss_type": "hinge", "label_smoothing": 0.2, "rpo_alpha": 0.5},
    "ipo": {"beta": 0.5},
    "simpo": {"beta": 5.0, "simpo_gamma": 0.2, "cpo_alpha": 0.5},
    "orpo": {"beta": 0.5},
    "kto": {
        "beta": 0.5, "loss_type": "apo_zero_unpaired", "balance_weights": False, "desirable_weight": 2.0,
        "undesirable_weight": 2.0,
    },
    "reward": {"center_rewards_coefficient": 0.5},
    "prm": {"train_on_last_step_only": True},
    "embedding": {"pooling": "last", "scale": 5.0},
    "distill": {"kd_alpha": 0.5, "kd_ce_alpha": 0.5, "kd_temperature": 2.0},
    "grpo": {**GROUPS, "scale_rewards": "none"},
    "gdpo": GROUPS,
    "ppo": {
        **SAMPLING, "gamma": 0.5, "lam": 0.5, "vf_coef": 1.0, "cliprange_value": 0.001, "value_learning_rate": 0.1
    },
}  # fmt: skip
# what must stand beside a setting, in both runs
BESIDE = {
    "method.label_smoothing": {"method.loss_type": "robust", "method.label_smoothing": 0.1},
    **dict.fromkeys(
        ("method.epsilon", "method.epsilon_high", "method.importance_sampling_level", "method.cliprange_value"), OLD
    ),
    "adapter.autocast_adapter_dtype": {"model.dtype": "bfloat16"},
    "optim.lr_scheduler_kwargs": {"optim.lr_scheduler_type": "polynomial", "optim.lr_scheduler_kwargs": {"power": 2.0}},
    "optim.optim_args": {"optim.optim": "muon"},
    "optim.optim_target_modules": {"optim.optim": "galore_adamw", "optim.optim_args": {"rank": 8}},
    "memory.tiled_mlp_fp32_sums": {"model.dtype": "bfloat16", "memory.tiled_mlp": True, "memory.tiled_mlp_tokens": 16},
    "memory.fp32_norms": {"model.dtype": "bfloat16"},
}
# adapter -> setting -> another value
OTHERS = {
    "lora": {
        "adapter.r": 8, "adapter.lora_alpha": 8, "adapter.lora_dropout": 0.3, "adapter.target_modules": ["q_proj"],
        "adapter.modules_to_save": ["embed_tokens"], "adapter.use_rslora": True, "adapter.use_dora": True,
        "adapter.autocast_adapter_dtype": True,
    },
    "none": {
        "adapter.unfrozen_parameters": [r"model\.layers\.3\."],
        "optim.learning_rate": 5e-4, "optim.per_device_train_batch_size": 8, "optim.gradient_accumulation_steps": 2,
        "optim.max_steps": 3, "optim.optim": "sgd", "optim.optim_args": {"momentum": 0.5},
        "optim.optim_target_modules": ["down_proj"], "optim.lr_scheduler_type": "cosine",
        "optim.lr_scheduler_kwargs": {"power": 3.0}, "optim.warmup_steps": 2, "optim.weight_decay": 0.5,
        "optim.adam_beta1": 0.5, "optim.adam_beta2": 0.5, "optim.adam_epsilon": 0.1, "optim.max_grad_norm": 0.01,
        "kernels.quantization_aware": True, "memory.tiled_mlp_fp32_sums": True, "memory.fp32_norms": True,
    },
}  # fmt: skip
# What changes no number of the training: the test that shows what it does.
ELSEWHERE = {
    "method.reference": f"{T}/test_losses.py::test_gradients_equal_plain_torch",
    "method.reward_timeout": "tests/engine/rewards/test_functions.py::test_one_that_hangs_is_ended_within_its_time",
    "method.rollout_groups": f"{T}/test_grpo.py::test_the_reward_rises_and_every_group_is_kept_whole",
    "adapter.target_parameters": (
        "tests/engine/models/test_adapters.py::test_experts_of_three_dimensions_get_an_adapter_by_their_names"
    ),
    "adapter.bias": "tests/engine/models/test_adapters.py::test_biases_are_trained_as_asked",
    "optim.per_device_eval_batch_size": f"{T}/test_each_setting.py::test_held_out_rows_and_epochs_are_counted_as_asked",
    "optim.num_train_epochs": f"{T}/test_each_setting.py::test_held_out_rows_and_epochs_are_counted_as_asked",
    "optim.tf32": f"{T}/test_matrix.py::test_what_a_card_alone_has_acts_in_each_method",
    "optim.bf16_full_eval": f"{T}/test_matrix.py::test_held_out_rows_in_bfloat16_change_no_training_in_any_method",
    "memory.gradient_checkpointing": "tests/engine/memory/test_tiers.py::test_each_tier_keeps_less_and_the_gradients_stay",
    "memory.activation_offloading": (
        "tests/engine/memory/test_scratch.py::test_what_is_saved_leaves_memory_and_the_gradients_stay_to_the_bit"
    ),
    "memory.layer_offloading": f"{T}/test_matrix.py::test_layers_stream_in_each_method",
    "memory.tiled_mlp": f"{T}/test_matrix.py::test_each_feature_with_each_adapter_in_each_method",
    "memory.tiled_mlp_tokens": f"{T}/test_matrix.py::test_each_feature_with_each_adapter_in_each_method",
    "kernels.use_cut_ce": f"{T}/test_matrix.py::test_each_feature_with_each_adapter_in_each_method",
    "kernels.fused_attn_kernel": f"{T}/test_matrix.py::test_what_a_card_alone_has_acts_in_each_method",
    "kernels.fused_lora": f"{T}/test_matrix.py::test_each_feature_with_each_adapter_in_each_method",
    "kernels.kernel_auto_compose": f"{T}/test_matrix.py::test_each_feature_with_each_adapter_in_each_method",
    "kernels.fp8_recipe_name": "tests/engine/patches/test_rounding_on_gpu.py::test_the_cards_products_are_those_of_the_emulation",
    "kernels.torch_compile": f"{T}/test_compiled_methods.py::test_compiled_layers_learn_the_same",
    "kernels.torch_compile_options": (
        "tests/engine/patches/test_compiled.py::"
        "test_the_options_are_in_force_while_layers_are_compiled_and_at_no_other_time"
    ),
}


def declared():
    """Every setting of these sections as (kind of method or of adapter, path)."""
    for section, kinds in (("method", METHODS), ("adapter", ADAPTERS)):
        for kind, model in kinds.items():
            yield from ((kind, f"{section}.{name}") for name in model.model_fields if name != "kind")
    for section, model in (("optim", Optim), ("memory", Memory), ("kernels", Kernels)):
        yield from (("none", f"{section}.{name}") for name in model.model_fields)


def cells():
    """(method, adapter, path, value) of every setting that is tried by a run."""
    for method, own in METHOD.items():
        yield from ((method, "none", f"method.{name}", value) for name, value in own.items())
    for adapter, own in OTHERS.items():
        yield from (("sft", adapter, path, value) for path, value in own.items())


def test_every_setting_is_tried_here_or_names_the_test_that_shows_what_it_does():
    tried = {(adapter if path.split(".")[0] != "method" else method, path) for method, adapter, path, _ in cells()}
    missing = [each for each in declared() if each not in tried and each[1] not in ELSEWHERE]
    assert not missing
    for place in ELSEWHERE.values():
        file, name = place.split("::")
        functions = {
            node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, place


def weights_after(train, mapping):
    """The weights of the run's last checkpoint; no rule has anything against its config."""
    nested: dict = {"version": 1}
    for path, value in (BASE | mapping).items():
        put(nested, path, value)
    errors = [found.message for found in read(nested, Facts(machine=CPU)).findings if found.severity == "error"]
    assert not errors, errors
    run = train(mapping)
    last = max(run.checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return load_file(next(last.glob("*model.safetensors")))


def differ(one, other):
    return one.keys() != other.keys() or any(
        one[name].shape != other[name].shape or not torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "adapter"), [*((method, "none") for method in METHOD), ("sft", "lora"), ("sft", "none")]
)
def test_away_from_its_default_each_setting_gives_other_weights(train, source, tmp_path, method, adapter):
    base = {**settings(source, method, "none"), "optim.max_steps": 4, "run.save_steps": 4}
    if method in ("grpo", "gdpo", "ppo"):
        (tmp_path / "letters.py").write_text(REWARD)
        base |= {"method.reward_funcs": [f"{tmp_path}/letters.py:letters", "length:6"], "optim.max_steps": 6}
    base |= LORA if adapter == "lora" else {}
    found, without = {}, []
    for kind, beneath, path, value in cells():
        if (kind, beneath) != (method, adapter):
            continue
        beside = OLD if path == "method.loss_type" and method in ("grpo", "gdpo") else BESIDE.get(path, {})
        key = str(sorted(beside.items()))
        if key not in found:
            found[key] = weights_after(train, {**base, **beside})
        if not differ(found[key], weights_after(train, {**base, **beside, path: value})):
            without.append(path)
    assert found
    assert not without


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KINDS if not name.startswith("paged")])
def test_each_optimizer_listens_to_every_setting_that_no_rule_refuses_with_it(train, source, name):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("pytorch_optimizer")
    pytest.importorskip("schedulefree")
    base = {**settings(source, "sft", "none"), "optim.max_steps": 4, "optim.optim": name, "optim.max_grad_norm": 1e6}
    base |= {"optim.optim_args": {"rank": 8}} if "galore" in name else {}
    base |= {"optim.lr_scheduler_type": "constant"} if name == "schedule_free_adamw" else {}
    plain = weights_after(train, base)
    away = {"learning_rate": 5e-4, "weight_decay": 0.5, "max_grad_norm": 0.5}
    away |= {key: 0.1 if key == "adam_epsilon" else 0.5 for key in KINDS[name].adam}
    without = [
        key for key, value in away.items() if not differ(plain, weights_after(train, {**base, f"optim.{key}": value}))
    ]
    assert not without


@pytest.mark.slow
def test_each_schedule_is_none_of_the_others_and_listens_to_its_own_settings(train, source):
    base = {**settings(source, "sft", "none"), "optim.max_steps": 6, "run.save_steps": 6}
    own = {
        "cosine_with_restarts": [{"num_cycles": 2}, {"num_cycles": 3}],
        "polynomial": [{"power": 2.0}, {"power": 3.0}, {"power": 2.0, "lr_end": 1e-4}],
        "inverse_sqrt": [{}, {"timescale": 5}],
    }
    found = []
    for name in SCHEDULES:
        for kwargs in own.get(name, [{}]):
            warm = {"optim.warmup_steps": 2} if name == "constant_with_warmup" else {}
            given = {"optim.lr_scheduler_type": name, "optim.lr_scheduler_kwargs": kwargs, **warm}
            found.append(((name, kwargs), weights_after(train, {**base, **given})))
    same = [(one, other) for place, (one, a) in enumerate(found) for other, b in found[:place] if not differ(a, b)]
    assert len(found) == 11
    assert not same


def test_held_out_rows_and_epochs_are_counted_as_asked(train, source, monkeypatch):
    from transformers import Trainer

    seen, loader_of = [], Trainer.get_eval_dataloader

    def noted(self, *args, **kwargs):
        loader = loader_of(self, *args, **kwargs)
        seen.extend(len(batch["input_ids"]) for batch in loader)
        return loader

    monkeypatch.setattr(Trainer, "get_eval_dataloader", noted)
    base = {**settings(source, "sft", "none"), "data.train": [{"path": source(CONVERSATIONS[:8])}]}
    base |= {"data.eval": [{"path": source(CONVERSATIONS[:6])}], "optim.max_steps": None, "run.eval_steps": 3}
    run = train({**base, "optim.num_train_epochs": 1.5, "optim.per_device_eval_batch_size": 3})
    assert seen == [3, 3]
    assert sorted(int(path.name.rpartition("-")[2]) for path in run.checkpoints.glob("checkpoint-*"))[-1] == 3
