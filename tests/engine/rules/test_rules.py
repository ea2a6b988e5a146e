"""Every rule speaks when it should, keeps quiet when it should, and its fix mends what it says."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from engine.config.facts import Facts, ModelFacts, TokenizerFacts
from engine.config.files import as_mapping, as_yaml, put
from engine.config.findings import RANK
from engine.config.tree import fields
from engine.facts.model_shape import TINY, model_facts
from engine.hardware import GiB, Gpu, Machine, parse_machine
from engine.planning.auto import resolved
from engine.planning.memory_model import checkpoint_bytes
from engine.rules import RULES, read
from engine.rules.run import BESIDE_CHECKPOINTS
from engine.session.draft import Draft
from tests.engine.rules.rule_cases.shared import CPU, GOOD, GRPO, H100, LARGE, LORA, NOTHING, TINY_FACTS, Case, source

CHECKPOINT = checkpoint_bytes(read(GOOD).config, Facts(model=TINY_FACTS)) or 0
BY_GROUP = {
    name: import_module(f"tests.engine.rules.rule_cases.{name}").CASES
    for name in dict.fromkeys(rule.group for rule in RULES)
}
CASES: dict[str, list[Case]] = {name: cases for found in BY_GROUP.values() for name, cases in found.items()}


def mapping_of(changes: dict[str, Any]) -> dict[str, Any]:
    mapping = copy.deepcopy(GOOD)
    for path, value in changes.items():
        put(mapping, path, copy.deepcopy(value))
    return mapping


def test_every_rule_has_a_case_in_the_file_of_its_own_files_name() -> None:
    for group, cases in BY_GROUP.items():
        assert {rule.name for rule in RULES if rule.group == group} == set(cases)
    assert len({rule.name for rule in RULES}) == len({(rule.module, rule.name) for rule in RULES})


def cases_of(group: str) -> Iterator[tuple[str, Case]]:
    """Each case of a group with its rule's name and its number, which a failure shows."""
    for name, cases in BY_GROUP[group].items():
        for number, case in enumerate(cases):
            yield f"{name} {number}", case


@pytest.mark.parametrize("group", BY_GROUP)
def test_a_rule_speaks_where_it_should_and_its_fix_mends_it(group: str) -> None:
    for which, (changes, facts, path, severity) in cases_of(group):
        name = which.partition(" ")[0]
        draft = Draft(as_yaml(mapping_of(changes)))
        draft.learn(facts)
        found = [finding for finding in draft.findings if finding.rule == name]
        assert (which, [(finding.path, finding.severity) for finding in found]) == (which, [(path, severity)])
        finding = found[0]
        assert finding.message.startswith(f"{path}: "), which
        assert finding.message.endswith((".", "?")), which
        if finding.fix and name != "it-fits-into-memory":
            draft.apply(finding.fix)
            left = [each.severity for each in draft.findings if each.rule == name and each.path == path]
            assert all(RANK[after] > RANK[severity] for after in left), which
            assert (which, draft.reading.invalid) == (which, frozenset())


@pytest.mark.parametrize("group", BY_GROUP)
def test_what_is_launched_is_refused_by_no_worker_that_check_let_through(group: str) -> None:
    for which, (changes, facts, _, _) in cases_of(group):
        asked = read(mapping_of(changes), facts)
        before = {found.path for found in asked.findings if found.severity == "error"}
        if not asked.invalid:
            stored = read(as_mapping(resolved(asked.config, facts)))
            assert {found.path for found in stored.findings if found.severity == "error"} <= before, which


def test_rules_are_quiet_on_a_plain_config_and_without_facts() -> None:
    plain = Facts(machine=replace(H100, disk_free_bytes=100 * GiB), model=TINY_FACTS, packages={})
    for facts in (Facts(), plain, source(rows=100_000, format="messages")):
        assert [finding for finding in read(GOOD, facts).findings if finding.rule in CASES] == []


TWO_CARDS, QWEN = Facts(machine=parse_machine("2xH100-80GB")), {"model.name": LARGE.name}
FIFTY = {"optim.max_steps": 50}
POLYNOMIAL = {"optim.lr_scheduler_type": "polynomial", "optim.learning_rate": 1e-4}
BOUNDS: dict[str, list[tuple[dict[str, Any], Facts]]] = {
    "an-evaluation-falls-in-the-run": [
        ({**FIFTY, "run.eval_steps": steps, "data.val_set_size": 5}, Facts()) for steps in (50, 51)
    ],
    "a-checkpoint-falls-in-the-run": [({**FIFTY, "run.save_steps": steps}, Facts()) for steps in (49, 50)],
    "a-sample-falls-in-the-run": [
        ({**FIFTY, "run.prompts": ["a"], "run.prompts_steps": steps}, Facts()) for steps in (49, 50)
    ],
    "warmup-ends-before-the-run": [({**FIFTY, "optim.warmup_steps": steps}, Facts()) for steps in (49, 50)],
    "warmup-is-steps-or-a-share": [({"optim.warmup_steps": steps}, Facts()) for steps in (0.5, 1.5)],
    "learning-rate-is-in-proportion": [
        ({**QWEN, "optim.learning_rate": rate}, Facts(model=LARGE)) for rate in (3e-4, 5e-4)
    ],
    "the-name-fits-a-folder": [({"run.name": letters * "a"}, Facts()) for letters in (100, 101)],
    "devices-exist": [({"run.devices": devices}, TWO_CARDS) for devices in (2, 3)],
    "rows-are-divided-into-equal-pieces": [
        ({"distributed.context_parallel_size": 2, "run.devices": 2, "data.max_length": length}, Facts())
        for length in (4100, 4102)
    ],
    "mismatched-rows-need-a-batch": [
        ({"method.kind": "kto", "optim.per_device_train_batch_size": size}, Facts()) for size in (2, 1)
    ],
    "negatives-come-from-the-batch": [
        ({"method.kind": "embedding", "optim.per_device_train_batch_size": size}, Facts()) for size in (2, 1)
    ],
    "a-falling-rate-ends-below-its-start": [
        ({**POLYNOMIAL, "optim.lr_scheduler_kwargs": {"lr_end": end}}, Facts()) for end in (9e-5, 1e-4)
    ],
    "tokenizer-files-can-be-loaded": [
        (QWEN, Facts(model=LARGE, tokenizer=TokenizerFacts(LARGE.name, tokens=tokens, base=100)))
        for tokens in (LARGE.vocab_size, LARGE.vocab_size + 1)
    ],
    "only-old-answers-are-far-off": [
        ({"method.kind": "grpo", "method.off_policy_mask_threshold": 0.5, "method.replay_buffer_size": size}, Facts())
        for size in (4, 0)
    ],
    "checkpoints-fit-the-disk": [
        ({"run.save_total_limit": 3}, Facts(machine=replace(H100, disk_free_bytes=free), model=TINY_FACTS))
        for free in (4 * CHECKPOINT + BESIDE_CHECKPOINTS, 4 * CHECKPOINT + BESIDE_CHECKPOINTS - 1)
    ],
}
"""Of a rule, what is just within its bound and what is just beyond."""


def test_a_rule_is_quiet_up_to_its_bound() -> None:
    for name, cases in BOUNDS.items():
        within, beyond = (
            [finding.severity for finding in read(mapping_of(changes), facts).findings if finding.rule == name]
            for changes, facts in cases
        )
        assert (name, within, len(beyond)) == (name, [], 1)


@pytest.mark.parametrize("spec", [spec for spec in fields if spec.unsupported], ids=lambda spec: spec.path)
def test_a_value_of_a_later_version_is_never_accepted_in_silence(spec: Any) -> None:
    for value in spec.unsupported:
        reading = read(mapping_of({spec.path: value}))
        found = [finding for finding in reading.findings if finding.path == spec.path and finding.severity == "error"]
        assert len(found) == 1
        assert spec.path not in reading.invalid
        assert "later version" in found[0].message or spec.section == "run"


def test_rules_read_the_settings_they_name() -> None:
    """A rule that read an undeclared setting would run on a replaced value; every finding's setting is declared."""
    for name, cases in CASES.items():
        declared = {spec.path for rule in RULES if rule.name == name for spec in rule.reads}
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


def test_answers_of_a_batch_are_not_taken_for_rows() -> None:
    """64 answers to 16 prompts are no epoch of 40 rows."""
    grouped = {**GRPO, "method.num_generations": 4, "optim.gradient_accumulation_steps": 8}
    found = [finding.rule for finding in read(mapping_of(grouped), source(rows=40)).findings]
    assert not {"a-batch-has-enough-rows", "there-are-prompts-for-one-sampling"} & set(found)


def test_rates_of_plain_sgd_are_not_judged_by_those_of_adam() -> None:
    """The built-in model's loss falls from 6.5 to 1.9 in 60 steps of SGD at 0.5, and not at all at 0.001."""
    for optimizer, found in (("sgd", 0), ("adamw_torch", 1)):
        told = read(mapping_of({"optim.optim": optimizer, "optim.learning_rate": 0.5})).findings
        assert sum(finding.rule == "learning-rate-is-in-proportion" for finding in told) == found


def test_an_old_card_is_named_in_the_sentence() -> None:
    old = Machine(gpus=(Gpu("Tesla V100", 32 * GiB, (7, 0)),))
    assert "Tesla V100" in next(f.message for f in read(GOOD, Facts(machine=old)).findings if f.path == "model.dtype")


@pytest.mark.parametrize(
    ("path", "value", "model", "machine", "beside"),
    [
        ("memory.recompute_num_layers", 4, "Qwen/Qwen3-8B", "1xRTX4090-24GB", LORA),
        ("kernels.cut_ce_workspace", 16384, "Qwen/Qwen3-0.6B", "1xRTX4070-10GB", {"kernels.use_cut_ce": True}),
    ],
)
def test_memory_that_was_taken_for_speed_is_the_first_to_be_given_back(
    path: str, value: int, model: str, machine: str, beside: dict[str, Any]
) -> None:
    rows = {"data.max_length": 2048, "optim.per_device_train_batch_size": 1 if beside is LORA else 8}
    given = {"model.name": model, "memory.gradient_checkpointing": "full", path: value, **rows, **beside}
    found = read(mapping_of(given), Facts(machine=parse_machine(machine), model=model_facts(model))).findings
    fix = next(each.fix for each in found if each.rule == "it-fits-into-memory")
    assert fix is not None
    assert fix.set == {path: None}
    left = read(mapping_of({**given, **fix.set}), Facts(machine=parse_machine(machine), model=model_facts(model)))
    assert not [each for each in left.findings if "will not fit" in each.message]


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


def test_batches_that_fit_are_accumulated_to_the_same_step_and_what_is_near_the_limit_is_told() -> None:
    def said(batch: int, length: int) -> list[Any]:
        optim = {"optim.per_device_train_batch_size": batch, "optim.gradient_accumulation_steps": 3}
        plain = {**QWEN, **LORA, "memory.gradient_checkpointing": False, "data.max_length": length}
        found = read(mapping_of({**plain, **optim}), Facts(machine=H100, model=LARGE)).findings
        return [finding for finding in found if finding.rule == "it-fits-into-memory"]

    (much,) = said(4, 4096)
    assert (much.severity, much.fix.set) == (
        "error",
        {"optim.per_device_train_batch_size": 2, "optim.gradient_accumulation_steps": 6},
    )
    (odd,) = said(5, 2800)
    assert odd.fix.set == {"optim.per_device_train_batch_size": 3, "optim.gradient_accumulation_steps": 5}
    (near,) = said(2, 4500)
    assert (near.severity, near.fix) == ("warning", None)
    assert "this may not fit: needs about" in near.message
    assert said(2, 4096) == []


@pytest.mark.parametrize(
    ("card", "settings", "offered"),
    [
        ("1xRTX4090-24GB", {}, True),
        ("1xA100-40GB", {"optim.per_device_train_batch_size": 4}, False),  # too old for products in FP8
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


@pytest.mark.parametrize(
    ("kind", "here", "advised"),
    [
        ("qwen3_5_moe", {"triton": "3.7.1"}, "`pip install flash-linear-attention`"),
        ("qwen3_5_moe", {"triton": "3.6.0"}, "`pip install flash-linear-attention 'tilelang[nvcc]'`"),
        ("qwen3_5_moe", {"triton": "3.6.0", "flash-linear-attention": "0.6.0"}, "`pip install 'tilelang[nvcc]'`"),
        ("qwen3_5_moe", {"triton": "3.6.0", "flash-linear-attention": "0.6.0", "tilelang": "0.1.15"}, ""),
        ("qwen3_5_text", {"triton": "3.7.1", "flash-linear-attention": "0.6.0"}, ""),
        ("kimi_linear", {"triton": "3.6.0", "fla-core": "0.6.0"}, ""),
        ("mamba2", {"mamba-ssm": "2.3.0", "causal-conv1d": "1.6.0"}, ""),
        ("lfm2", {}, ""),
    ],
)
def test_kernels_for_layers_with_a_state_are_advised_once_and_only_where_they_lack(
    kind: str, here: dict[str, str], advised: str
) -> None:
    facts = Facts(machine=H100, model=ModelFacts("builtin/tiny", model_type=kind), packages=here)
    found = [each for each in read(GOOD, facts).findings if each.rule == "layers-with-a-state-have-kernels"]
    assert len(found) == bool(advised)
    assert all(advised in each.message for each in found)
    for unknown in (replace(facts, machine=None), replace(facts, packages=None), replace(facts, machine=CPU)):
        assert not [each for each in read(GOOD, unknown).findings if each.rule == "layers-with-a-state-have-kernels"]
