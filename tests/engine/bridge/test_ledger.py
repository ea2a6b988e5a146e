"""Configs of other tools: every key of a file stands in the ledger once, with what became of it, and nothing is silent."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.bridge import axolotl, llamafactory, trl
from engine.bridge.ledger import OUTCOMES, Ledger, Row
from engine.bridge.tools import TOOLS, export, take_over, tool_named, tool_of
from engine.config.files import as_yaml, load, parse
from engine.config.tree import fields
from engine.errors import UsageError
from engine.rules import read
from tests.docs.test_bridge_page import SHARED, read_shared

OURS = "version: 1\nmodel:\n  name: builtin/tiny\ndata:\n  train: builtin/dates\n"
# Written after TRL's documentation of its commands: the file, and settings that must stand in the config.
TRL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sft of full weights": (
        {"model_name_or_path": "Qwen/Qwen2-0.5B", "dataset_name": "trl-lib/Capybara", "learning_rate": 2e-5,
         "num_train_epochs": 1, "packing": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8,
         "eos_token": "<|im_end|>", "eval_strategy": "steps", "eval_steps": 100, "output_dir": "Qwen2-0.5B-SFT", "push_to_hub": True},
        {"method.kind": "sft", "data.train.0.path": "trl-lib/Capybara", "data.eval.0.split": "test", "data.max_length": 1024,
         "data.excess_length": "truncate", "data.packing_cross_doc_attn_mask": True, "data.trained_turns": "all",
         "run.eval_steps": 100, "optim.num_train_epochs": 1},
    ),
    "sft with an adapter": (
        {"model_name_or_path": "Qwen/Qwen2-0.5B", "dataset_name": "trl-lib/Capybara", "assistant_only_loss": True,
         "use_peft": True, "lora_r": 32, "lora_alpha": 16, "load_in_4bit": True, "dtype": "bfloat16"},
        {"adapter.kind": "lora", "adapter.r": 32, "adapter.lora_dropout": 0.05, "adapter.autocast_adapter_dtype": False,
         "model.quantization": "nf4", "model.dtype": "bfloat16", "data.trained_turns": "assistant",
         "optim.learning_rate": 2e-5, "optim.num_train_epochs": 3.0, "optim.per_device_train_batch_size": 8,
         "optim.gradient_accumulation_steps": 1},
    ),
    "dpo": (
        {"dataset_name": "trl-lib/ultrafeedback_binarized", "dataset_streaming": False, "model_name_or_path": "Qwen/Qwen2-0.5B-Instruct",
         "learning_rate": 5.0e-6, "num_train_epochs": 1, "max_steps": 1000, "gradient_checkpointing": True, "beta": 0.3,
         "output_dir": "Qwen2-0.5B-DPO", "no_remove_unused_columns": True, "use_peft": True, "lora_r": 32, "lora_alpha": 16},
        {"method.kind": "dpo", "method.beta": 0.3, "optim.max_steps": 1000, "adapter.lora_dropout": 0.0,
         "adapter.autocast_adapter_dtype": True},
    ),
    "ipo is a loss there and a method here": (
        {"model_name_or_path": "a/b", "loss_type": ["ipo"], "beta": 0.2, "dataset_name": "a/c", "precompute_ref_log_probs": True},
        {"method.kind": "ipo", "method.beta": 0.2, "method.reference": "precompute"},
    ),
    "kto": (
        {"model_name_or_path": "a/b", "dataset_name": "trl-lib/kto-mix-14k", "desirable_weight": 0.8, "undesirable_weight": 1.2},
        {"method.kind": "kto", "method.balance_weights": False, "method.desirable_weight": 0.8, "data.shuffle": False,
         "optim.learning_rate": 1e-6},
    ),
    "reward": (
        {"model_name_or_path": "a/b", "dataset_name": "a/c", "lora_task_type": "SEQ_CLS", "use_peft": True,
         "center_rewards_coefficient": 0.01, "eval_strategy": "no"},
        {"method.kind": "reward", "method.center_rewards_coefficient": 0.01, "optim.learning_rate": 1e-4},
    ),
    "grpo": (
        {"model_name_or_path": "a/b", "dataset_name": "a/c", "reward_model_name_or_path": "a/judge", "num_generations": 4,
         "use_vllm": True, "vllm_mode": "colocate", "scale_rewards": False, "loss_type": "dr_grpo", "log_completions": True},
        {"method.kind": "grpo", "method.reward_funcs": ["model:a/judge"], "method.num_generations": 4,
         "method.scale_rewards": "none", "method.loss_type": "dr_grpo", "method.max_completion_length": 512},
    ),
    "gdpo": (
        {"model_name_or_path": "a/b", "multi_objective_aggregation": "normalize_then_sum", "dataset_name": "a/c"},
        {"method.kind": "gdpo"},
    ),
    "plain text": (
        {"model_name_or_path": "a/b", "datasets": [{"path": "json", "data_files": "text.jsonl", "split": "train[:50]"}],
         "dataset_text_field": "body", "packing": True, "packing_strategy": "bfd_split", "max_length": 512},
        {"method.kind": "pretrain", "data.train.0.path": "text.jsonl", "data.train.0.columns": {"text": "body"},
         "data.train.0.rows": 50, "data.excess_length": "split", "data.max_length": 512},
    ),
    "two losses": (
        {"model_name_or_path": "a/b", "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "dataset_name": "a/c"},
        {"method.kind": "dpo", "method.loss_type": "sigmoid", "method.rpo_alpha": 0.5},
    ),
}  # fmt: skip


def leaves(value: Any, key: str = "") -> Iterator[str]:
    """Every place of a file where a value stands; a list of plain values is one."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for number, item in enumerate(value):
            yield from leaves(item, f"{key}.{number}")
    else:
        yield key


def of_file(ledger: Ledger) -> list[str]:
    return [row.key for row in ledger.rows if row.origin == "file"]


def test_a_source_that_says_nothing_is_told() -> None:
    ledger = take_over(parse("datasets: [{}, {path: rows.jsonl}]\n"), TOOLS["axolotl"])
    assert of_file(ledger) == ["datasets.0", "datasets.1.path"]


def at(mapping: Any, path: str) -> Any:
    for part in path.split("."):
        mapping = mapping[int(part)] if isinstance(mapping, list) else mapping.get(part)
        if mapping is None:
            return None
    return mapping


def taken(mapping: dict[str, Any], tool: str, tmp_path: Path, **more: Any) -> Ledger:
    place = tmp_path / more.pop("name", "other.yaml")
    place.write_text(as_yaml(mapping))
    return take_over(load(place), tool_named(tool), **more)


@pytest.mark.parametrize("name", SHARED)
def test_every_key_of_the_shared_configs_is_accounted_for_once(name: str, shared_data: Path, tmp_path: Path) -> None:
    ledger = read_shared(name, shared_data, tmp_path)
    written = load(shared_data / "configs" / name).mapping
    assert sorted(of_file(ledger)) == sorted(leaves(written))
    assert all(row.outcome in OUTCOMES for row in ledger.rows)
    assert [
        row.key for row in ledger.rows if row.outcome in ("changed", "unsupported", "needless") and not row.reason
    ] == []
    assert not [row for row in ledger.rows if "is no key" in row.reason], "a key that the tool's documentation names"


@pytest.mark.parametrize("name", SHARED)
def test_what_the_shared_configs_become_is_a_config_without_unknown_keys(
    name: str, shared_data: Path, tmp_path: Path
) -> None:
    ledger = read_shared(name, shared_data, tmp_path)
    reading = read(parse(ledger.text()).mapping)
    errors = [finding.rule for finding in reading.findings if finding.severity == "error"]
    assert errors == (["mismatched-rows-need-a-batch"] if "lora_kto" in name else [])
    assert parse(ledger.text()).mapping == ledger.mapping
    for row in ledger.of("unsupported"):
        assert row.key.partition(".")[0] in ledger.text()


@pytest.mark.parametrize("name", TRL)
def test_files_of_trl_are_read_as_its_documentation_says(name: str, tmp_path: Path) -> None:
    mapping, wanted = TRL[name]
    ledger = taken(mapping, "trl", tmp_path)
    assert sorted(of_file(ledger)) == sorted(leaves(mapping))
    for path, value in wanted.items():
        assert at(ledger.mapping, path) == value, path
    reading = read(ledger.mapping)
    errors = {finding.path for finding in reading.findings if finding.severity == "error"}
    assert errors == ({"method.reward_funcs"} if name == "gdpo" else set())


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-2, 40), st.floats(0, 2),
        st.sampled_from(["a/b", "lora", "dpo", "x", "rows.jsonl", "auto", "all", "none", "train[:5]", "a.b"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["path", "type", "split", "roles", "data_files", "beta", "reward_funcs", "0"]), inner, max_size=3),
    ),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(TOOLS)), st.data())
def test_whatever_stands_in_a_file_it_is_told_and_the_config_can_be_read(tool: str, data: st.DataObject) -> None:
    known = [key for key in TOOLS[tool].keys if key != "(command)"]
    names = st.one_of(st.sampled_from(known), st.sampled_from(["nonsense", "vllm_other", "lr"]))
    mapping = data.draw(st.dictionaries(names, VALUES, max_size=8))
    ledger = take_over(parse(as_yaml(mapping)), TOOLS[tool]) if not tool_refuses(mapping) else None
    if ledger is None:
        return
    assert sorted(of_file(ledger)) == sorted(leaves(mapping) if mapping else [])
    assert [row.key for row in ledger.rows if row.outcome != "mapped" and not row.reason] == []
    reading = read(parse(ledger.text()).mapping)
    unknown = [finding for finding in reading.findings if finding.rule in ("unknown-key", "bad-value", "wrong-section")]
    assert [finding.message for finding in unknown] == []


def tool_refuses(mapping: dict[str, Any]) -> bool:
    try:
        take_over(parse(as_yaml(mapping)), TOOLS["axolotl"])
    except UsageError:
        return True
    return False


@pytest.mark.parametrize(
    ("tool", "mapping", "key", "path", "value"),
    [
        ("axolotl", {"base_model": "a/b", "learning_rate": 1e-4}, "sequence_len", "data.max_length", 512),
        (
            "axolotl",
            {"base_model": "a/b", "learning_rate": 1e-4},
            "micro_batch_size",
            "optim.per_device_train_batch_size",
            1,
        ),
        ("axolotl", {"base_model": "a/b", "learning_rate": 1e-4}, "lr_scheduler", "optim.lr_scheduler_type", "cosine"),
        (
            "axolotl",
            {"base_model": "a/b", "adapter": "lora"},
            "peft_autocast_adapter_dtype",
            "adapter.autocast_adapter_dtype",
            True,
        ),
        ("axolotl", {"base_model": "a/b", "rl": "simpo"}, "cpo_alpha", "method.cpo_alpha", 1.0),
        ("axolotl", {"base_model": "a/b", "rl": "kto"}, "kto_desirable_weight", "method.balance_weights", False),
        ("llamafactory", {"model_name_or_path": "a/b", "stage": "sft"}, "finetuning_type", "adapter.kind", "lora"),
        ("llamafactory", {"model_name_or_path": "a/b", "stage": "sft"}, "lora_rank", "adapter.r", 8),
        (
            "llamafactory",
            {"model_name_or_path": "a/b", "stage": "sft", "lora_rank": 12},
            "lora_alpha",
            "adapter.lora_alpha",
            24,
        ),
        ("llamafactory", {"model_name_or_path": "a/b", "stage": "sft"}, "cutoff_len", "data.excess_length", "truncate"),
        ("llamafactory", {"model_name_or_path": "a/b", "stage": "sft"}, "learning_rate", "optim.learning_rate", 5e-5),
        ("trl", {"model_name_or_path": "a/b", "packing": False}, "max_length", "data.max_length", 1024),
        ("trl", {"model_name_or_path": "a/b", "packing": False}, "num_train_epochs", "optim.num_train_epochs", 3.0),
    ],
)
def test_a_default_that_differs_is_told_and_written(
    tool: str, mapping: dict[str, Any], key: str, path: str, value: Any, tmp_path: Path
) -> None:
    ledger = taken(mapping, tool, tmp_path)
    told = [row for row in ledger.rows if row.key == key and row.origin == "default"]
    assert [row.settings.get(path) for row in told] == [value]
    assert at(ledger.mapping, path) == value
    assert f"{key}: " in ledger.text()
    said = taken({**mapping, key: told[0].value}, tool, tmp_path)
    assert [row.origin for row in said.rows if row.key == key] == ["file"]


def test_every_key_that_the_installed_trl_takes_is_known() -> None:
    """The classes that `trl sft|dpo|kto|reward|grpo|rloo` read, off their source: what TRL adds is seen here by name."""
    home = Path(find_spec("trl").origin).parent  # type: ignore[union-attr, arg-type]
    arguments = Path(find_spec("transformers").origin).parent / "training_args.py"  # type: ignore[union-attr, arg-type]
    files = {
        **{home / "trainer" / f"{command}_config.py": None for command in trl.COMMANDS},
        home / "trainer" / "model_config.py": None,
        home / "scripts" / "utils.py": ("ScriptArguments", "DatasetMixtureConfig"),
        home / "scripts" / "grpo.py": ("GRPOScriptArguments",),
        arguments: ("TrainingArguments",),
    }
    named = {name for path, classes in files.items() for name in annotated(path, classes)}
    assert len(named) > 200
    assert sorted(named - set(trl.KEYS)) == []


def annotated(path: Path, classes: tuple[str, ...] | None) -> Iterator[str]:
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and (classes is None or node.name in classes):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id[0] != "_":
                    yield line.target.id


def test_defaults_of_trl_are_those_of_the_installed_one() -> None:
    home = Path(find_spec("trl").origin).parent / "trainer"  # type: ignore[union-attr, arg-type]
    for command, rate in trl.RATES.items():
        text = (home / f"{command}_config.py").read_text("utf-8")
        found = re.search(r"learning_rate: float = field\(\s*default=([\d.e-]+)", text)
        assert found is not None, command
        assert float(found[1]) == rate, command


def test_tables_are_about_settings_that_there_are() -> None:
    """Each setting that a table names by itself stands in the schema: a renamed one would be refused in every file."""
    source = "".join(Path(module.__file__).read_text("utf-8") for module in (axolotl, llamafactory, trl))
    named = set(re.findall(r'same\(\s*"([a-z_.0-9]+)"', source)) | set(re.findall(r'\{"([a-z]+\.[a-z_]+)"', source))
    assert len(named) > 60
    assert sorted(path for path in named if path not in fields) == []


@pytest.mark.parametrize("name", SHARED)
def test_the_tool_is_told_by_the_file_itself(name: str, shared_data: Path) -> None:
    found = tool_of(load(shared_data / "configs" / name).mapping)
    assert found is not None
    assert found.name == ("axolotl" if name.startswith("axolotl") else "llamafactory")


@pytest.mark.parametrize("name", TRL)
def test_files_of_trl_are_told_by_themselves(name: str) -> None:
    found = tool_of(TRL[name][0])
    assert found is not None
    assert found.name == "trl"


def test_a_config_of_ours_and_what_is_no_training_are_no_tools(tmp_path: Path) -> None:
    assert tool_of(parse(OURS).mapping) is None
    assert tool_of({"peft_type": "LORA", "base_model_name_or_path": "a", "r": 8}) is None
    assert tool_of({"learning_rate": 1}) is None
    with pytest.raises(UsageError, match="the workbench's own"):
        take_over(parse(OURS))
    with pytest.raises(UsageError, match="how DeepSpeed works"):
        take_over(parse("zero_optimization: {stage: 3}\n"))
    with pytest.raises(UsageError, match="not clear which tool"):
        take_over(parse("learning_rate: 1e-4\n"))
    with pytest.raises(UsageError, match="must be axolotl, llamafactory or trl"):
        tool_named("axolotel")


def test_a_method_that_no_key_names_is_the_callers_or_the_names_or_said_to_be_a_guess(tmp_path: Path) -> None:
    plain = {"model_name_or_path": "a/b", "dataset_name": "a/c", "learning_rate": 1e-5}
    guessed = taken(plain, "trl", tmp_path)
    row = next(row for row in guessed.rows if row.key == "(command)")
    assert (row.outcome, row.settings) == ("changed", {"method.kind": "sft"})
    assert "--method" in row.reason
    assert at(taken(plain, "trl", tmp_path, name="my_dpo.yaml").mapping, "method.kind") == "dpo"
    assert at(taken(plain, "trl", tmp_path, method="kto").mapping, "method.kind") == "kto"
    refused = taken({**plain, "normalize_advantages": True}, "trl", tmp_path)
    assert next(row for row in refused.rows if row.key == "(command)").outcome == "unsupported"


def test_data_sets_by_name_are_read_off_the_list_beside_the_file(shared_data: Path, tmp_path: Path) -> None:
    shutil.copytree(shared_data / "llama-factory", tmp_path / "data")
    glaive = {
        "model_name_or_path": "a/b",
        "stage": "sft",
        "dataset": "glaive_toolcall_en_demo, alpaca_en",
        "max_samples": 7,
    }
    ledger = taken(glaive, "llamafactory", tmp_path)
    assert ledger.mapping["data"]["train"] == [
        {"path": "data/glaive_toolcall_en_demo.json", "format": "sharegpt", "rows": 7},
        {"path": "llamafactory/alpaca_en", "format": "alpaca", "rows": 7},
    ]
    listed = json.loads((tmp_path / "data" / "dataset_info.json").read_text())
    rows = [row.key for row in ledger.rows if row.origin == "list"]
    keys = [
        f"dataset_info.json: {name}.{key}"
        for name in ("glaive_toolcall_en_demo", "alpaca_en")
        for key in leaves(listed[name])
    ]
    assert sorted(rows) == sorted(keys)
    lost = taken({**glaive, "dataset": "nowhere,rows.jsonl"}, "llamafactory", tmp_path)
    row = next(row for row in lost.rows if row.key == "dataset")
    assert (row.outcome, "does not name nowhere" in row.reason) == ("changed", True)
    (tmp_path / "data" / "dataset_info.json").unlink()
    gone = taken(glaive, "llamafactory", tmp_path)
    lacking = next(row for row in gone.rows if row.key == "dataset")
    assert (lacking.outcome, "--data-dir" in lacking.reason) == ("unsupported", True)


SINGLE: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("trl", {"packing": True, "packing_strategy": "wrapped"}, {"data.packing": True, "data.packing_cross_doc_attn_mask": False}),
    ("trl", {"packing": True}, {"data.packing": True, "data.packing_cross_doc_attn_mask": True}),
    ("trl", {"packing": False, "truncation_mode": "keep_end"}, {"data.truncation_side": "left", "data.excess_length": "truncate"}),
    ("trl", {"packing": False, "truncation_mode": "keep_start"}, {"data.truncation_side": None}),
    ("trl", {"packing": False, "max_steps": -1}, {"optim.max_steps": None, "optim.num_train_epochs": 3.0}),
    ("trl", {"packing": False, "max_steps": 7}, {"optim.max_steps": 7}),
    ("trl", {"packing": False, "use_peft": True}, {"adapter.autocast_adapter_dtype": True}),
    ("trl", {"packing": False, "use_peft": True, "load_in_8bit": True}, {"adapter.autocast_adapter_dtype": False}),
    ("trl", {"dataset_name": "a/c", "dataset_train_split": "train[:50]"}, {"data.train.0.split": "train", "data.train.0.rows": 50}),
    ("trl", {"dataset_name": "a/c", "dataset_train_split": "train[:5%]"}, {"data.train.0.split": "train", "data.train.0.rows": None}),
    ("trl", {"dataset_name": "a/c", "eval_strategy": "steps"}, {"data.eval.0.path": "a/c", "data.eval.0.split": "test"}),
    ("trl", {"dataset_name": "a/c", "eval_strategy": "no"}, {"data.eval": None}),
    ("axolotl", {"reward_model": True}, {"method.kind": "reward"}),
    ("axolotl", {"process_reward_model": True}, {"method.kind": "prm"}),
    ("axolotl", {"rl": "gdpo"}, {"method.kind": "gdpo"}),
    ("axolotl", {"rl": "grpo", "trl": {"reroll_max_groups": 2}}, {"method.reroll_max_groups": None}),
    ("axolotl", {"rl": "grpo", "trl": {"reroll_start_fraction": 0.5, "reroll_max_groups": 2}},
     {"method.reroll_start_fraction": 0.5, "method.reroll_max_groups": 2}),
    ("axolotl", {"rl": "grpo", "trl": {"replay_buffer_size": 64, "replay_recompute_logps": False}},
     {"method.replay_buffer_size": 64, "method.replay_recompute_logps": False}),
    ("axolotl", {"rl": "grpo", "trl": {"replay_buffer_size": 64, "replay_recompute_logps": True}},
     {"method.replay_buffer_size": 64, "method.replay_recompute_logps": None}),
    ("axolotl", {"rl": "grpo", "trl": {"replay_buffer_size": 0}}, {"method.replay_buffer_size": None}),
    ("axolotl", {"rl": "grpo", "trl": {"async_prefetch": True, "replay_buffer_size": 64}},
     {"method.async_prefetch": "answers", "method.replay_buffer_size": None, "method.importance_sampling_mode": "token_truncate"}),
    ("axolotl", {"rl": "grpo", "trl": {"async_prefetch": True, "vllm_importance_sampling_mode": "token_mask"}},
     {"method.importance_sampling_mode": "token_mask"}),
    ("axolotl", {"rl": "grpo", "trl": {"vllm_importance_sampling_mode": "token_mask"}}, {"method.importance_sampling_mode": None}),
    ("axolotl", {"micro_batch_size": 4, "batch_size": 32}, {"optim.gradient_accumulation_steps": 8}),
    ("axolotl", {"micro_batch_size": 4, "batch_size": 30}, {"optim.gradient_accumulation_steps": None}),
    ("axolotl", {"deepspeed": {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5}}, {"optim.max_grad_norm": 0.5}),
    ("axolotl", {"adapter": "lora", "loraplus_lr_ratio": 16, "loraplus_lr_embedding": 1e-5},
     {"adapter.loraplus_lr_ratio": 16, "adapter.loraplus_lr_embedding": 1e-5}),
    ("llamafactory", {"loraplus_lr_ratio": 16.0, "stage": "sft"}, {"adapter.loraplus_lr_ratio": 16.0}),
    ("axolotl", {"noisy_embedding_alpha": 5}, {"optim.neftune_noise_alpha": 5}),
    ("llamafactory", {"neftune_noise_alpha": 5, "stage": "sft"}, {"optim.neftune_noise_alpha": 5}),
    ("axolotl", {"neftune_noise_alpha": 0}, {"optim.neftune_noise_alpha": None}),
    ("axolotl", {"adapter": "lora", "lora_model_dir": "./sft", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True},
     {"adapter.path": "./sft", "adapter.r": None, "adapter.lora_alpha": None, "adapter.target_modules": None}),
    ("llamafactory", {"adapter_name_or_path": "saves/sft", "stage": "sft", "lora_rank": 4, "lora_target": "all"},
     {"adapter.path": "saves/sft", "adapter.r": None, "adapter.target_modules": None}),
    ("llamafactory", {"adapter_name_or_path": "saves/sft", "stage": "sft"},
     {"adapter.path": "saves/sft", "adapter.kind": "lora", "adapter.r": None, "adapter.lora_alpha": None, "method.reference": None}),
    ("llamafactory", {"adapter_name_or_path": "saves/sft", "stage": "dpo"}, {"method.reference": "adapter_off"}),
    ("llamafactory", {"adapter_name_or_path": "saves/a,saves/b", "stage": "sft"}, {"adapter.path": None}),
)  # fmt: skip
"""Keys of a tool beside a model, and what must stand in the config."""


def test_single_keys_mean_what_the_tools_make_of_them(tmp_path: Path) -> None:
    for tool, keys, wanted in SINGLE:
        model = {"base_model" if tool == "axolotl" else "model_name_or_path": "a/b"}
        mapping = taken({**model, **keys}, tool, tmp_path).mapping
        assert {path: at(mapping, path) for path in wanted} == wanted, keys


def test_stages_of_deepspeed_say_whether_weights_stay_whole_between_the_passes(tmp_path: Path) -> None:
    for stage, words in ((0, "holds the whole model"), (1, "false keeps"), (2, "false keeps"), (3, "to rounding.")):
        mapping = {"base_model": "a/b", "deepspeed": {"zero_optimization": {"stage": stage}}}
        (row,) = (each for each in taken(mapping, "axolotl", tmp_path).rows if each.key.endswith("stage"))
        assert words in row.reason
        assert ("reshard_after_forward" in row.reason) is (stage in (1, 2))


def test_of_a_data_set_no_more_rows_are_taken_than_its_entry_and_the_file_name(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    listed = {name: {"hf_hub_url": f"a/{name}", "num_samples": rows} for name, rows in (("few", 3), ("many", 30))}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(listed))
    asked = {"model_name_or_path": "a/b", "stage": "sft", "dataset": "few,many", "max_samples": 7}
    assert [each["rows"] for each in taken(asked, "llamafactory", tmp_path).mapping["data"]["train"]] == [3, 7]


def test_one_key_that_several_tools_could_have_tells_of_none() -> None:
    for key in ("dataset", "template", "beta", "rl"):
        assert tool_of({key: "x", "learning_rate": 1}) is None
    found = tool_of({"dataset": "x", "template": "y"})
    assert found is not None
    assert found.name == "llamafactory"


def test_paths_are_written_as_the_new_file_needs_them(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    new = tmp_path / "deep" / "er"
    mapping = {
        "base_model": "a/b",
        "datasets": [{"path": "rows.jsonl", "type": "chat_template"}, {"path": "a/c", "type": "alpaca"}],
    }
    ledger = taken(mapping, "axolotl", tmp_path, out=new)
    assert [entry["path"] for entry in ledger.mapping["data"]["train"]] == ["../../rows.jsonl", "a/c"]


def test_the_template_of_one_of_several_sources_is_its_own(tmp_path: Path) -> None:
    talks = {"path": "a/b", "type": "chat_template"}
    alone = taken({"base_model": "a/b", "datasets": [{**talks, "chat_template": "chatml"}]}, "axolotl", tmp_path)
    assert alone.mapping["model"]["chat_template"] == "chatml"
    both = [{**talks, "chat_template": "chatml"}, {**talks, "chat_template": "llama3"}, talks]
    ledger = taken({"base_model": "a/b", "datasets": both}, "axolotl", tmp_path)
    assert [each.get("chat_template") for each in ledger.mapping["data"]["train"]] == ["chatml", "llama3", None]
    assert "chat_template" not in ledger.mapping["model"]


def test_uploads_and_comet_are_settings_where_they_mean_the_same(tmp_path: Path) -> None:
    axolotl = {
        "base_model": "a/b",
        "hub_model_id": "me/mine",
        "hub_strategy": "checkpoint",
        "use_comet": True,
        "use_wandb": True,
    }
    found = taken(axolotl, "axolotl", tmp_path).mapping["run"]
    assert (found["push_to_hub"], found["hub_model_id"], found["hub_strategy"]) == (True, "me/mine", "checkpoint")
    assert found["report_to"] == ["wandb", "comet"]
    assert "hub_private_repo" not in found, "private in both"
    pushed = {"push_to_hub": True, "hub_model_id": "me/mine", "hub_strategy": "end", "hub_private_repo": False}
    for tool in ("trl", "llamafactory"):
        model = {"model_name_or_path": "a/b", "report_to": ["comet_ml"]}
        found = taken({**model, **pushed}, tool, tmp_path).mapping["run"]
        assert {key: found[key] for key in pushed} == pushed
        ours = read({"version": 1, "model": {"name": "a/b"}, "data": {"train": "r.jsonl"}, "run": found}).config
        back = export(ours, "trl", source="my.yaml", folder=tmp_path).mapping
        assert {key: back[key] for key in (*pushed, "report_to")} == {**pushed, "report_to": ["comet_ml"]}
        assert found["report_to"] == ["comet"]
        row = rows_of(taken({**model, "push_to_hub": True, "hub_model_id": "me/mine"}, tool, tmp_path))["push_to_hub"]
        assert (row.outcome, "private here" in row.reason) == ("changed", True)
        unnamed = taken({**model, "push_to_hub": True, "hub_model_id": "mine"}, tool, tmp_path)
        assert {rows_of(unnamed)[key].outcome for key in ("push_to_hub", "hub_model_id")} == {"unsupported"}
        off = taken({**model, "push_to_hub": False, "hub_model_id": "me/mine"}, tool, tmp_path)
        assert "push_to_hub" not in off.mapping.get("run", {})


def rows_of(ledger: Ledger) -> dict[str, Row]:
    return {row.key: row for row in ledger.rows}


def test_no_secret_of_a_file_is_shown_or_written(tmp_path: Path) -> None:
    secret = "k" * 40
    for tool, key in (
        ("axolotl", "comet_api_key"),
        ("trl", "hub_token"),
        ("llamafactory", "swanlab_api_key"),
        ("llamafactory", "hf_hub_token"),
    ):
        mapping = {"model_name_or_path": "a/b", "base_model": "a/b", key: secret}
        ledger = taken(mapping, tool, tmp_path)
        assert secret not in ledger.text() + json.dumps(ledger.as_json())
        assert next(row for row in ledger.rows if row.key == key).there == "(a secret)"


def test_keys_that_disagree_and_settings_of_other_methods_are_told(tmp_path: Path) -> None:
    both = taken(
        {"base_model": "a/b", "adapter": "lora", "load_in_4bit": True, "load_in_8bit": True}, "axolotl", tmp_path
    )
    row = next(row for row in both.rows if row.key == "load_in_8bit")
    assert (row.outcome, "load_in_4bit says it otherwise" in row.reason) == ("unsupported", True)
    full = taken({"base_model": "a/b", "lora_r": 8, "rl": "orpo", "kto_desirable_weight": 2.0}, "axolotl", tmp_path)
    words = {row.key: (row.outcome, row.reason) for row in full.rows}
    assert words["lora_r"] == ("needless", "It counts with adapter.kind lora alone; here it is none.")
    assert words["kto_desirable_weight"][0] == "needless"


def test_a_key_nobody_knows_is_said_to_be_unknown(tmp_path: Path) -> None:
    ledger = taken({"base_model": "a/b", "speed": 9}, "axolotl", tmp_path)
    row = next(row for row in ledger.rows if row.key == "speed")
    assert row.outcome == "unsupported"
    assert "no key that is known of Axolotl" in row.reason


def test_what_axolotl_says_of_gpt_oss_in_its_own_format(tmp_path: Path) -> None:
    told = {"base_model": "openai/gpt-oss-20b", "adapter": "lora", "model_quantization_config": "Mxfp4Config"}
    for kwargs, wide in (({"dequantize": True}, True), ({"dequantize": False}, False), (None, False)):
        ledger = taken({**told, "model_quantization_config_kwargs": kwargs}, "axolotl", tmp_path)
        assert read(ledger.mapping).config.model.quantize_moe_experts is not wide
        rows = {row.key: row.outcome for row in ledger.rows if row.key.startswith("model_quantization_config")}
        assert rows["model_quantization_config"] == ("mapped" if wide else "needless")
        assert "unsupported" not in rows.values()
    ledger = taken({**told, "model_quantization_config": "FineGrainedFP8Config"}, "axolotl", tmp_path)
    assert next(row for row in ledger.rows if row.key == "model_quantization_config").outcome == "unsupported"


def test_nothing_of_it_imports_torch() -> None:
    import subprocess

    script = "import sys, engine.bridge.tools; print(sorted({'torch', 'transformers', 'trl', 'datasets', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_shares_a_model_out_is_answered_by_what_does_it_here(tmp_path: Path) -> None:
    """Every key of FSDP's and DeepSpeed's settings has a row; what no setting here does is said to be missing."""
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
                "bf16": {"enabled": True},
                "gradient_clipping": 0.5,
                "train_micro_batch_size_per_gpu": "auto",
                "optimizer": {"type": "AdamW"},
                "odd": 1,
            }
        )
    )
    (tmp_path / "pipe.json").mkdir()

    def outcomes(text: str) -> dict[str, tuple[str, str]]:
        (tmp_path / "theirs.yml").write_text(f"base_model: Qwen/Qwen3-8B\n{text}")
        ledger = take_over(load(tmp_path / "theirs.yml"), TOOLS["axolotl"])
        return {row.key: (row.outcome, row.reason) for row in ledger.rows if row.key.startswith(("fsdp", "deepspeed"))}

    found = outcomes("deepspeed: ds.json")
    assert {key.removeprefix("deepspeed."): outcome for key, (outcome, _) in found.items()} == {
        "deepspeed": "needless",
        "zero_optimization.stage": "changed",
        "zero_optimization.offload_optimizer.device": "changed",
        "zero_optimization.overlap_comm": "needless",
        "bf16.enabled": "mapped",
        "gradient_clipping": "mapped",
        "train_micro_batch_size_per_gpu": "needless",
        "optimizer.type": "unsupported",
        "odd": "unsupported",
    }
    assert "reshard_after_forward: false" in found["deepspeed.zero_optimization.stage"][1]
    assert outcomes("deepspeed: configs/zero3_bf16.json")["deepspeed"][0] == "changed"
    assert outcomes("deepspeed: configs/zero3_offload.json")["deepspeed"][0] == "unsupported"
    assert "distributed.cpu_offload: true" in found["deepspeed.zero_optimization.offload_optimizer.device"][1]
    assert "no JSON file" in outcomes("deepspeed: pipe.json")["deepspeed"][1]
    found = outcomes(
        "fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_offload_params: true, fsdp_state_dict_type: FULL_STATE_DICT, "
        "fsdp_transformer_layer_cls_to_wrap: Qwen3DecoderLayer, fsdp_odd: 1, activation_checkpointing: true}"
    )
    assert [outcome for outcome, _ in found.values()] == [
        "changed", "changed", "changed", "needless", "unsupported", "mapped"
    ]  # fmt: skip
    assert (
        "a share lacks its scales"
        in outcomes("load_in_8bit: true\nadapter: lora\nfsdp: full_shard auto_wrap")["fsdp"][1]
    )
    in_four = outcomes("load_in_4bit: true\nadapter: qlora\nfsdp: full_shard auto_wrap")["fsdp"][1]
    assert "distributed.strategy" in in_four
    assert "distributed.dp_replicate_size" in outcomes("fsdp: [hybrid_shard]")["fsdp"][1]
    sizes = {"dp_shard_size": 4, "dp_replicate_size": 2}
    written = take_over(parse(as_yaml({"base_model": "a/b", **sizes})), TOOLS["axolotl"]).mapping
    assert (written["distributed"], written["run"]["devices"]) == (sizes, 8)
    ring = {
        "context_parallel_size": 2,
        "flash_attention": True,
        "sample_packing": True,
        "ring_attn_func": "varlen_llama3",
    }
    taken = take_over(parse(as_yaml({"base_model": "a/b", **ring})), TOOLS["axolotl"])
    assert (taken.mapping["distributed"], taken.mapping["run"]["devices"]) == ({"context_parallel_size": 2}, 2)
    assert "attention" not in taken.mapping["model"]
    assert "packing" not in taken.mapping.get("data", {})
    assert {row.key: row.outcome for row in taken.rows if row.key in ring} == dict.fromkeys(ring, "changed") | {
        "ring_attn_func": "needless"
    }
    both = take_over(parse(as_yaml({"base_model": "a/b", **sizes, **ring})), TOOLS["axolotl"]).mapping
    assert both["distributed"] == {"dp_shard_size": 8, "dp_replicate_size": 2, "context_parallel_size": 2}
    assert both["run"]["devices"] == 16
    mesh = {"parallelism_config": {"dp_shard_size": 2, "cp_size": 2, "tp_size": 2}}
    taken = take_over(parse(as_yaml({"model_name_or_path": "a/b", **mesh})), TOOLS["trl"])
    assert taken.mapping["distributed"] == {"dp_replicate_size": 1, "dp_shard_size": 4, "context_parallel_size": 2}
    assert next(row for row in taken.rows if row.key == "parallelism_config.tp_size").outcome == "unsupported"


def test_synthetic_rows_of_axolotl_are_as_many_and_as_long_here():
    rows = {
        "path": "synthetic",
        "type": "_synthetic",
        "length": 70,
        "sequence_length": 96,
        "min_input_id": 100,
        "seed": 3,
    }
    file = {"base_model": "a/b", "sequence_len": 128, "datasets": [rows]}
    ledger = take_over(parse(as_yaml(file)), TOOLS["axolotl"])
    assert ledger.mapping["data"]["train"] == [
        {"format": "synthetic", "path": "builtin/synthetic", "rows": 70, "tokens": 96}
    ]
    del rows["sequence_length"]
    ledger = take_over(parse(as_yaml(file)), TOOLS["axolotl"])
    assert ledger.mapping["data"]["train"][0]["tokens"] == 128


LIGER_HERE = {"rms_norm": True, "rope": False, "swiglu": True, "geglu": True}


@pytest.mark.parametrize(
    ("tool", "mapping", "kernels"),
    [
        ("trl", {"use_liger_kernel": True}, {"use_liger_kernel": True}),
        (
            "trl",
            {"use_liger_kernel": True, "liger_kernel_config": {"rope": False, "fused_linear_cross_entropy": True, "cross_entropy": False}},
            {"use_liger_kernel": True, "liger_kernel_config": {"rope": False}, "use_cut_ce": True},
        ),
        ("llamafactory", {"enable_liger_kernel": True, "stage": "sft"}, {"use_liger_kernel": True}),
        (
            "axolotl",
            {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_rms_norm": True, "liger_glu_activation": True,
             "liger_fused_linear_cross_entropy": True},
            {"use_liger_kernel": True, "liger_kernel_config": LIGER_HERE, "use_cut_ce": True},
        ),
        ("axolotl", {"liger_rope": False, "liger_layer_norm": True}, {}),
    ],
)  # fmt: skip
def test_ligers_kernels_are_taken_over_in_the_parts_that_a_tool_names(tmp_path, tool, mapping, kernels):
    name = {"axolotl": "base_model"}.get(tool, "model_name_or_path")
    written = take_over(parse(as_yaml({name: "a/b", **mapping})), TOOLS[tool]).mapping.get("kernels", {})
    assert {key: value for key, value in written.items() if key != "torch_compile"} == kernels
    if "use_liger_kernel" in kernels and tool != "llamafactory":
        ours = read({"model": {"name": "a/b"}, "data": {"train": "a/b"}, "kernels": written}).config
        back = export(ours, tool, source="my.yaml", folder=tmp_path).mapping
        again = take_over(parse(as_yaml(back)), TOOLS[tool]).mapping["kernels"]
        assert {name: again.get(name) for name in written if "liger" in name} == {
            name: value for name, value in written.items() if "liger" in name
        }
