"""What a person gains: every problem at once, with the nearest name and a fix, and always a config to go on with."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config.findings import Finding
from engine.config.tree import RunConfig, fields
from engine.rules import read
from engine.session.draft import Draft

GOOD: dict[str, Any] = {"model": {"name": "builtin/tiny"}, "data": {"train": [{"path": "builtin/dates"}]}}


def one(mapping: dict[str, Any], path: str) -> Finding:
    """The single finding at this path."""
    found = [finding for finding in read({**GOOD, **mapping}).findings if finding.path == path]
    assert len(found) == 1, found
    return found[0]


def mended(mapping: dict[str, Any], finding: Finding) -> Draft:
    """The mapping after the finding's fix, as both forms apply it."""
    from engine.config.files import as_yaml

    draft = Draft(as_yaml({**GOOD, **mapping}))
    assert finding.fix is not None
    draft.apply(finding.fix)
    return draft


def test_a_good_config_has_no_findings() -> None:
    reading = read(GOOD)
    assert reading.ok
    assert reading.findings == ()
    assert reading.config.method.kind == "sft"


@pytest.mark.parametrize(
    "nonsense", [None, {}, [], "text", 3, {"model": []}, {3: 4}, {"model": {3: 4}}, {"data": {"train": [3]}}]
)
def test_read_always_gives_a_whole_config(nonsense: Any) -> None:
    reading = read(nonsense)
    assert isinstance(reading.config, RunConfig)
    for spec in fields:
        spec.value(reading.config)


def test_all_problems_are_found_at_once() -> None:
    reading = read(
        {
            "model": {"nmae": "x"},
            "adapter": {"kind": "lora", "r": 0},
            "optim": {"learning_rate": "fast", "num_train_epochs": -1},
            "data": {"train": [{"path": "a.jsonl", "formt": "messages"}, {"format": "text"}]},
            "sequence_len": 512,
        }
    )
    assert {finding.path for finding in reading.findings} >= {
        "model.nmae",
        "model.name",
        "adapter.r",
        "optim.learning_rate",
        "optim.num_train_epochs",
        "data.train.0.formt",
        "data.train.1.path",
        "sequence_len",
    }


def test_a_bad_value_is_replaced_by_its_default_and_marked() -> None:
    reading = read({**GOOD, "optim": {"weight_decay": "heavy", "max_grad_norm": 0.5}})
    assert reading.config.optim.weight_decay == 0.0
    assert reading.config.optim.max_grad_norm == 0.5
    assert reading.invalid == {"optim.weight_decay"}
    assert "optim.weight_decay" in reading.given


def test_a_rule_is_silent_about_an_invalid_setting() -> None:
    both = read({**GOOD, "data": {**GOOD["data"], "packing": "perhaps", "packing_cross_doc_attn_mask": True}})
    assert [finding.rule for finding in both.findings] == ["bad-value"]


@pytest.mark.parametrize(
    ("key", "section", "value", "target"),
    [
        ("lora_alhpa", "adapter", 7, "adapter.lora_alpha"),
        ("max_lenght", "data", 512, "data.max_length"),
        ("learnign_rate", "optim", 0.5, "optim.learning_rate"),
        ("gradient_checkpoining", "memory", True, "memory.gradient_checkpointing"),
        ("learning-rate", "optim", 0.5, "optim.learning_rate"),
    ],
)
def test_a_slip_of_the_finger_is_answered_with_its_key_and_a_rename(
    key: str, section: str, value: Any, target: str
) -> None:
    mapping: dict[str, Any] = {section: {**GOOD.get(section, {}), key: value}}
    if section == "adapter":
        mapping[section]["kind"] = "lora"
    finding = one(mapping, f"{section}.{key}")
    assert finding.rule in ("unknown-key", "wrong-section")
    assert finding.fix is not None
    assert list(finding.fix.set) == [target]
    assert mended(mapping, finding).value(target) == value


@pytest.mark.parametrize(
    ("key", "section", "value", "said"),
    [
        ("gradient_checkpoint", "memory", True, "memory.gradient_checkpointing"),  # alike, but no slip
        ("adam_beta3", "optim", 0.9, "optim.adam_beta"),  # another number is another thing
        ("max_lenght", "data", "short", "data.max_length"),  # nothing that can stand there
        ("lora_rnk", "adapter", 7, "adapter.r"),  # the slip of a name that is not ours
        ("max_lengths", None, 512, "data.max_length"),
    ],
)
def test_what_is_only_alike_gives_a_word_and_no_fix(key: str, section: str | None, value: Any, said: str) -> None:
    kind = {"kind": "lora"} if section == "adapter" else {}
    mapping = {section: {**GOOD.get(section, {}), **kind, key: value}} if section else {key: value}
    finding = one(mapping, f"{section}.{key}" if section else key)
    assert f"Did you mean {said}" in finding.message
    assert finding.fix is None


@pytest.mark.parametrize(
    ("key", "value", "path", "wanted"),
    [
        ("sequence_len", 512, "data.max_length", 512),
        ("sample_packing", True, "data.packing", True),
        ("num_epochs", 3, "optim.num_train_epochs", 3),
        ("micro_batch_size", 2, "optim.per_device_train_batch_size", 2),
        ("lora_r", 32, "adapter.r", 32),
        ("base_model", "some/model", "model.name", "some/model"),
        ("datasets", [{"path": "a.jsonl", "type": "alpaca"}], "data.train", [{"path": "a.jsonl", "type": "alpaca"}]),
        ("load_in_4bit", True, "model.quantization", "nf4"),
        ("warmup_ratio", 0.1, "optim.warmup_steps", 0.1),
        ("cutoff_len", 99, "data.max_length", 99),
        ("stage", "pt", "method.kind", "pretrain"),
        ("stage", "rm", "method.kind", "reward"),
        ("process_reward_model", True, "method.kind", "prm"),
        ("finetuning_type", "full", "adapter.kind", "none"),
        ("bf16", True, "model.dtype", "bfloat16"),
        ("fp16", False, "model.dtype", None),
    ],
)
def test_another_tools_name_is_an_error_whose_fix_is_the_rename(key: str, value: Any, path: str, wanted: Any) -> None:
    section = path.partition(".")[0]
    # Nothing stands where it goes yet, and LoRA's settings have an adapter to go to.
    rest = {name: {"kind": "lora"} if name == "adapter" else None for name in (section,) if path != "adapter.kind"}
    finding = one({**rest, key: value}, key)
    assert finding.severity == "error"
    assert finding.rule == "name-of-another-tool"
    draft = mended({**rest, key: value}, finding)
    assert draft.value(path) == wanted
    assert draft.value(key) is None


@pytest.mark.parametrize("where", [None, "run", "model"])
def test_a_key_in_the_wrong_place_is_moved_by_its_fix(where: str | None) -> None:
    mapping: dict[str, Any] = (
        {where: {**GOOD.get(where, {}), "learning_rate": 1e-3}} if where else {"learning_rate": 1e-3}
    )
    path = f"{where}.learning_rate" if where else "learning_rate"
    finding = one(mapping, path)
    assert finding.rule == "wrong-section"
    draft = mended(mapping, finding)
    assert draft.config.optim.learning_rate == 1e-3
    assert not draft.findings


def test_a_section_written_as_one_value_is_mended_by_its_fix() -> None:
    finding = one({"method": "dpo"}, "method")
    assert mended({"method": "dpo"}, finding).config.method.kind == "dpo"
    qlora = one({"adapter": "qlora"}, "adapter")
    draft = mended({"adapter": "qlora"}, qlora)
    assert (draft.config.adapter.kind, draft.config.model.quantization) == ("lora", "nf4")


def test_an_unknown_method_has_its_own_message_and_keys_are_still_checked() -> None:
    reading = read({**GOOD, "method": {"kind": "dpoo", "beta": 0.2, "betta": 0.2}})
    rules = {finding.path: finding for finding in reading.findings}
    assert rules["method.kind"].rule == "unknown-method"
    assert "Did you mean dpo?" in rules["method.kind"].message
    assert rules["method.betta"].rule == "unknown-key"
    assert "method.beta" not in rules


def test_a_setting_of_another_kind_is_an_error_with_a_fix() -> None:
    finding = one({"method": {"kind": "sft", "beta": 0.2}}, "method.beta")
    assert finding.rule == "setting-of-another-kind"
    assert mended({"method": {"kind": "sft", "beta": 0.2}}, finding).reading.ok
    assert one({"adapter": {"kind": "none", "r": 8}}, "adapter.r").rule == "setting-of-another-kind"


def test_a_newer_file_says_to_update() -> None:
    assert "update the workbench" in one({"version": 2}, "version").message
    assert read({**GOOD, "version": "1"}).ok
    assert not read({**GOOD, "version": "one"}).ok


def test_messages_show_no_control_characters_and_stay_short() -> None:
    reading = read(
        {**GOOD, "\x1b[31mred": {}, "optim": {"learning_rate": "\x1b]0;x\x07" * 500}, "run": {"se\u202eed": 1}}
    )
    for finding in reading.findings:
        assert "\x1b" not in finding.message
        assert "\u202e" not in finding.message
        assert len(finding.message) < 500


def test_findings_are_sorted_by_severity() -> None:
    reading = read({"model": {"name": "x"}, "data": {"packing": True}, "optim": {"num_train_epochs": "x"}})
    order = [("error", "warning", "hint").index(finding.severity) for finding in reading.findings]
    assert order == sorted(order)
    assert len(set(order)) > 1


@pytest.mark.parametrize(
    ("key", "value", "todo", "changes"),
    [
        ("val_set_size", 0.05, "It belongs in data", {"data.val_set_size": 0.05}),
        ("val_set_size", 0.0, "It belongs in data", {"data.val_set_size": 0.0}),
        ("val_size", 100, "Here it is data.val_set_size", {"data.val_set_size": 100}),
        ("special_tokens", {"pad_token": "<|end|>"}, "model.tokenizer names another", None),
        ("evals_per_epoch", 4, "It belongs in run", {"run.evals_per_epoch": 4}),
        ("pad_to_sequence_len", True, "packs need no padding", {}),
        ("bf16", "auto", "Here it is model.dtype", {"model.dtype": "bfloat16"}),
        ("lora_target", "all", "Here it is adapter.target_modules", {"adapter.target_modules": "all-linear"}),
        ("lora_target", "q_proj", "Here it is adapter.target_modules", {"adapter.target_modules": ["q_proj"]}),
        ("lora_target", "q,v", "Here it is adapter.target_modules", {"adapter.target_modules": ["q", "v"]}),
        ("lora_target_linear", True, "Here it is adapter.target_modules", {"adapter.target_modules": "all-linear"}),
        ("max_samplings", True, "No setting has such a name", None),
        ("chat_template", "qwen_25", "Names of templates differ between tools", None),
        ("chat_template", "chatml", "It belongs in model", {"model.chat_template": "chatml"}),
    ],
)
def test_a_key_of_another_tool_is_never_carried_to_where_its_value_makes_no_sense(
    key: str, value: Any, todo: str, changes: dict[str, Any] | None
) -> None:
    finding = next(each for each in read({"adapter": {"kind": "lora"}, key: value}).findings if each.path == key)
    assert todo in finding.message
    if changes is None:
        assert finding.fix is None
    else:
        assert finding.fix is not None
        assert (finding.fix.set, finding.fix.unset) == (changes, (key,))
