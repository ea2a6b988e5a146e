"""Configs of other tools: every fix that is offered may be taken, in any order, and nothing that a file says becomes untrue."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.absent import ABSENT
from engine.config.files import as_yaml
from engine.config.renames import CHANGES, INSTEAD, NAMES, NEEDLESS, TEMPLATES
from engine.config.tree import SECTIONS, fields
from engine.session.draft import Draft
from workbench.cli.check import command

ROOT = Path(__file__).resolve().parents[3]
QWEN = "Qwen/Qwen3-4B-Instruct-2507"
# file -> what it says of itself: model, method, adapter, quantization; the places of its rows where they are known
SHARED: dict[str, tuple[str, str, str, str, list[str]]] = {
    "axolotl/llama-3__instruct-dpo-lora-8b.yml": (
        "meta-llama/Meta-Llama-3-8B-Instruct", "dpo", "lora", "int8", ["fozziethebeat/alpaca_messages_2k_dpo_test"]),
    "axolotl/llama-3__lora-1b.yml": (
        "NousResearch/Llama-3.2-1B", "sft", "lora", "none", ["teknium/GPT4-LLM-Cleaned"]),
    "axolotl/llama-3__qlora-1b-kto.yaml": (
        "meta-llama/Llama-3.2-1B", "kto", "lora", "nf4", ["argilla/ultrafeedback-binarized-preferences-cleaned-kto"]),
    "axolotl/llama-3__qlora-1b.yml": (
        "NousResearch/Llama-3.2-1B", "sft", "lora", "nf4", ["teknium/GPT4-LLM-Cleaned"]),
    "axolotl/mistral__orpo__mistral-qlora-orpo.yml": (
        "mistralai/Mistral-7B-v0.1", "orpo", "lora", "nf4", ["argilla/ultrafeedback-binarized-preferences-cleaned"]),
    "axolotl/qwen2_5-vl__lora-7b.yaml": (
        "Qwen/Qwen2.5-VL-7B-Instruct", "sft", "lora", "none", ["HuggingFaceH4/llava-instruct-mix-vsft"]),
    "axolotl/qwen2__dpo.yaml": (
        "Qwen/Qwen2.5-0.5B", "dpo", "none", "none", ["fozziethebeat/alpaca_messages_2k_dpo_test"]),
    "axolotl/qwen2__reward-model.yaml": (
        "Qwen/Qwen2.5-0.5B", "reward", "none", "none", ["argilla/distilabel-intel-orca-dpo-pairs"]),
    "axolotl/qwen3__qlora-fsdp.yaml": ("Qwen/Qwen3-8B", "sft", "lora", "nf4", ["tatsu-lab/alpaca"]),
    "axolotl/streaming__pretrain.yaml": ("HuggingFaceTB/SmolLM2-135M", "sft", "none", "none", []),
    "llama-factory/train_full__qwen3_full_sft.yaml": (QWEN, "sft", "none", "none", []),
    "llama-factory/train_lora__qwen3_lora_dpo.yaml": (QWEN, "dpo", "lora", "none", []),
    "llama-factory/train_lora__qwen3_lora_kto.yaml": (QWEN, "kto", "lora", "none", []),
    "llama-factory/train_lora__qwen3_lora_pretrain.yaml": (QWEN, "pretrain", "lora", "none", []),
    "llama-factory/train_lora__qwen3_lora_reward.yaml": (QWEN, "reward", "lora", "none", []),
    "llama-factory/train_lora__qwen3_lora_sft.yaml": (QWEN, "sft", "lora", "none", []),
}  # fmt: skip
# More of what files in the wild hold: the file, and settings that must stand there afterwards (None: nothing written).
WRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the class of a model is no model": (
        {"base_model": "a/b", "model_type": "LlamaForCausalLM", "tokenizer_type": "LlamaTokenizer"},
        {"model.name": "a/b", "model.tokenizer": None},
    ),
    "an upload and an adapter are no model": (
        {"hub_model_id": "me/mine", "adapter_name_or_path": "saves/lora", "badam_mode": "layer"}, {"model.name": None}),
    "labels and processes are no epochs": (
        {"num_labels": 3, "num_processes": 8, "model_name_or_path": "a/b", "learning_rate": 1e-4},
        {"optim.num_train_epochs": None, "optim.learning_rate": 1e-4},
    ),
    "rows are no steps": ({"max_samples": 1000, "num_train_epochs": 3}, {"optim.max_steps": None}),
    "packs of held-out rows are not all packs": (
        {"sample_packing": True, "eval_sample_packing": False},
        {"data.packing": True, "data.packing_cross_doc_attn_mask": True},
    ),
    "a source keeps all that it says": (
        {"datasets": [{"path": "a/b", "name": "main", "type": {"field_instruction": "q"}, "field_messages": "talk"}]},
        {"data.train": [{"path": "a/b", "name": "main", "type": {"field_instruction": "q"}, "field_messages": "talk"}]},
    ),
    "two names are not one path": ({"dataset": "a,b"}, {"data.train": None}),
    "another loss than DPO's": (
        {"stage": "dpo", "pref_loss": "orpo", "pref_beta": 0.2}, {"method.kind": "orpo", "method.beta": 0.2}),
    "a method that is not here": ({"rl": "bco", "rl_beta": 0.1}, {"method.kind": None, "method.beta": None}),
    "a loss without its method": ({"loss_type": "apo_zero", "beta": 0.1}, {"method.kind": None, "method": None}),
    "apo is not ppo": ({"method": "apo"}, {"method": "apo"}),
    "a dpo file of TRL with its rows": (
        {"method": {"kind": "dpo"}, "dataset_name": "trl-lib/ultrafeedback_binarized", "beta": 0.2},
        {"method.kind": "dpo", "method.beta": 0.2, "data.train": [{"path": "trl-lib/ultrafeedback_binarized"}]},
    ),
    "plain text to read and settings of PEFT stay": (
        {"pretraining_dataset": "a/b", "peft_config": {"r": 8}},
        {"pretraining_dataset": "a/b", "peft_config": {"r": 8}, "data.train": None},
    ),
    "two keys that disagree": (
        {"load_in_4bit": True, "load_in_8bit": True}, {"model.quantization": None, "load_in_4bit": True}),
    "what stands is never written over": (
        {"model": {"name": "mine"}, "base_model": "theirs"}, {"model.name": "mine", "base_model": "theirs"}),
    "a section of one value is not written over": (
        {"optim": "adamw_torch", "lr": 1e-5}, {"optim.optim": "adamw_torch", "optim.learning_rate": 1e-5}),
    "batches of which nobody knows what they count": (
        {"batch_size": 64, "train_batch_size": 64}, {"optim.per_device_train_batch_size": None}),
    "four bits of another kind": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "adapter": "lora"}, {"model.quantization": "fp4"}),
    "words that no setting knows": (
        {"optim": {"optim": "adamw_anyprecision"}, "model": {"quantization": "gptq"}},
        {"optim.optim": "adamw_anyprecision", "model.quantization": "gptq"},
    ),
}  # fmt: skip
OTHER_FILES: dict[str, dict[str, Any]] = {
    "inference": {"model_name_or_path": "a/b", "template": "qwen3", "infer_backend": "huggingface"},
    "merge": {"model_name_or_path": "a/b", "adapter_name_or_path": "saves/lora", "export_dir": "out"},
    "mergekit": {"merge_method": "slerp", "slices": [], "dtype": "bfloat16", "base_model": "a/b"},
    "accelerate": {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {}},
    "deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}},
    "adapter": {"peft_type": "LORA", "base_model_name_or_path": "a/b", "r": 8, "lora_alpha": 16},
    "model": {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 100, "model_type": "llama"},
}  # fmt: skip


def after_every_fix(text: str, order: str) -> Draft:
    """The draft when no fix is left to take; in the order of the findings, from their end, or any."""
    draft, dice = Draft(text), random.Random(order)
    for _ in range(120):
        offered = [finding.fix for finding in draft.findings if finding.fix is not None]
        if not offered:
            return draft
        before = draft.mapping
        fix = {"first": offered[0], "last": offered[-1]}.get(order) or dice.choice(offered)
        draft.apply(fix)
        assert draft.mapping != before, fix
    raise AssertionError("fixes without end")


@pytest.mark.parametrize("order", ["first", "last", "any", "other"])
@pytest.mark.parametrize("name", SHARED)
def test_all_fixes_of_a_foreign_file_leave_it_saying_the_same(shared_data: Path, name: str, order: str) -> None:
    model, method, adapter, quantization, places = SHARED[name]
    draft = after_every_fix((shared_data / "configs" / name).read_text(), order)
    assert draft.value("model.name") == model
    assert draft.value("model.tokenizer") is None
    assert draft.value("model.chat_template") in (None, *TEMPLATES)
    assert draft.config.method.kind == method
    assert draft.config.adapter.kind == adapter
    assert draft.config.model.quantization == quantization
    assert [entry["path"] for entry in draft.value("data.train") or []] == places
    assert draft.value("optim.max_steps") == (1000 if "streaming" in name else None)
    assert draft.config.optim.num_train_epochs in (1, 3, 4)
    # What is not known here is still in the file and says so: none of these goes without a person's word.
    assert any(finding.severity == "error" for finding in draft.findings)


@pytest.mark.parametrize("order", ["first", "last", "any", "other"])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_only_alike_is_never_written(name: str, order: str) -> None:
    mapping, wanted = WRITTEN[name]
    draft = after_every_fix(as_yaml(mapping), order)
    for path, value in wanted.items():
        assert draft.value(path) == value, path


@pytest.mark.parametrize("name", OTHER_FILES)
def test_a_file_that_is_no_training_is_told_so_and_offered_nothing(tmp_path: Path, name: str) -> None:
    place = tmp_path / "other.yaml"
    place.write_text(as_yaml(OTHER_FILES[name]))
    done = CliRunner().invoke(command, [str(place), "--json"], standalone_mode=False)
    findings = json.loads(done.output)["findings"]
    assert done.return_value == 1
    assert [(each["rule"], each["fix"]) for each in findings] == [("no-training", None)]
    assert "must be the config of a training" in findings[0]["message"]
    assert "workbench new" in findings[0]["message"]


@pytest.mark.parametrize(("what", "key"), [(each.what, key) for each in ABSENT for key in each.keys])
def test_what_is_not_here_yet_is_refused_by_its_name(what: str, key: str) -> None:
    draft = Draft(as_yaml({"model": {"name": "builtin/tiny"}, key: True}))
    finding = next(each for each in draft.findings if each.path == key)
    assert finding.severity == "error"
    assert f"Not here yet: {what}." in finding.message
    assert finding.fix is None


@pytest.mark.parametrize(
    "key",
    [
        "vllm_mode",
        "fsdp_version",
        "deepspeed_config",
        "streaming_foo",
        "wandb_project",
        "push_to_hub_token",
        "pissa_convert",
    ],
)
def test_settings_of_what_is_not_here_are_refused_with_it_and_removed_where_they_are_off(key: str) -> None:
    finding = next(each for each in Draft(as_yaml({key: "x"})).findings if each.path == key)
    assert "Not here yet: " in finding.message
    assert finding.fix is None
    off = next(each for each in Draft(as_yaml({key: None})).findings if each.path == key)
    assert off.fix is not None
    assert (off.fix.set, off.fix.unset) == ({}, (key,))


def test_the_readme_lists_all_that_is_not_here_yet_and_nothing_else() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    listed = text.partition("Not yet here: ")[2].partition(". Other tools' keys")[0]
    assert listed.split("; ") == [each.what for each in ABSENT]


@pytest.mark.parametrize("kind", ["bco", "cpo", "rloo", "online_dpo"])
def test_a_method_that_is_not_here_is_named_and_not_replaced(kind: str) -> None:
    finding = next(each for each in Draft(as_yaml({"method": {"kind": kind}})).findings if each.path == "method.kind")
    assert f"{kind} is not here yet" in finding.message
    assert finding.fix is None


def test_the_templates_that_other_tools_call_alike_are_here() -> None:
    assert all((ROOT / "engine" / "data" / "templates" / f"{name}.jinja").is_file() for name in TEMPLATES)


KEYS = sorted({*NAMES, *CHANGES, *INSTEAD, *NEEDLESS, *SECTIONS, *(spec.name for spec in fields)})
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-2, 9), st.floats(0, 2), st.sampled_from(["a/b", "lora", "dpo", "x"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(["path", "type", "kind", "r"]), inner, max_size=3)
    ),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_no_fix_of_any_mixture_writes_over_a_setting_that_stands(mapping: dict[str, Any]) -> None:
    draft = Draft(as_yaml(mapping))
    for finding in [each for each in draft.findings if each.fix is not None and "." not in each.path]:
        assert finding.fix is not None
        changed = Draft(as_yaml(mapping))
        changed.apply(finding.fix)
        for path in draft.reading.given - {finding.path, *finding.fix.unset}:
            assert changed.value(path) == draft.value(path), (finding.path, path)


@pytest.mark.parametrize("section", ["model", "data", "optim", "memory", "kernels", "run"])
def test_a_kind_in_a_section_that_has_none_is_a_finding_beside_settings_of_other_tools(section: str) -> None:
    mapping = {section: {"kind": "lora"}, "num_train_epochs": 2, "tiled_mlp_tokens": 3, "quantization": 1, "devices": 1}
    assert f"{section}.kind" in {finding.path for finding in Draft(as_yaml(mapping)).findings}
