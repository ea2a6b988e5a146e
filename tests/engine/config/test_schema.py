"""One definition of a setting serves the form, the page, the JSON schema, recipes, steps and explanations."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

from engine.config.coercion import expectation
from engine.config.facts import DataFacts, Facts
from engine.config.findings import shown
from engine.config.glossary import TERMS
from engine.config.kernels import COMPILE_OPTIONS
from engine.config.method import LEARNING_RATES
from engine.config.optimizers import BUILT_HERE, KINDS
from engine.config.recipes import recipe_mapping, recipes
from engine.config.renames import CHANGES, NAMES
from engine.config.steps import GOALS, STEPS, step_fields, step_of_path
from engine.config.tree import SECTIONS, display_name, fields, fields_of
from engine.errors import UsageError
from engine.facts.model_shape import model_facts
from engine.hardware import parse_machine
from engine.planning.auto import AUTO, FIT, effective, resolved
from engine.rules import read
from engine.session import reference
from engine.session.explain import Explanation, explain, names

CONTROLS = {"bool", "int", "float", "text", "choice", "list", "mapping", "path", "sources", "prompts"}


@pytest.mark.parametrize("spec", list(fields), ids=lambda spec: spec.path)
def test_every_setting_explains_itself(spec: Any) -> None:
    assert spec.control in CONTROLS
    assert spec.help.endswith((".", "`.")), spec.help
    assert len(spec.help) > 25
    assert spec.title[0].isupper()
    assert spec.level in ("basic", "advanced", "expert")
    assert expectation(spec)
    for choice in spec.choices:
        assert spec.label(choice)
    explained = explain(spec.path)
    assert isinstance(explained, Explanation)
    assert spec.help in explained.text
    assert explained.as_text().startswith(spec.path)


def test_names_that_people_write_with_capitals_are_written_so() -> None:
    assert fields.adapter.lora_dropout.title == "LoRA dropout"
    assert display_name("kl_coef") == "KL coef"
    assert display_name("max_length") == "Max length"


@pytest.mark.parametrize("spec", list(fields), ids=lambda spec: spec.path)
def test_every_default_is_a_value_that_the_setting_takes(spec: Any) -> None:
    kind = {spec.section: {"kind": spec.kinds[0]}} if spec.kinds and spec.name != "kind" else {}
    default = spec.kinds[0] if spec.name == "kind" else spec.default
    mapping = {**kind, spec.section: {**kind.get(spec.section, {}), spec.name: default}}
    reading = read(mapping)
    assert spec.path not in reading.invalid
    assert spec.path in reading.given
    assert spec.value(reading.config) == default


def test_the_tree_is_typed_and_refuses_typos() -> None:
    assert fields.method.beta.path == "method.beta"
    assert fields["optim.learning_rate"] is fields.optim.learning_rate
    assert fields.get("data.train.3.format").name == "format"  # type: ignore[union-attr]
    assert fields.get("data.train.3.nothing") is None
    with pytest.raises(AttributeError, match="no setting bata"):
        _ = fields.method.bata


def test_only_settings_of_the_kind_apply() -> None:
    sft, dpo = read({}).config, read({"method": {"kind": "dpo"}, "adapter": {"kind": "lora"}}).config
    assert fields.method.beta not in fields_of(sft)
    assert fields.adapter.r not in fields_of(sft)
    assert {fields.method.beta, fields.adapter.r} <= set(fields_of(dpo))
    assert fields.method.beta.value(sft) == 0.1


def test_the_page_and_the_json_schema_are_those_that_are_committed() -> None:
    hint = "run `make docs`"
    assert (reference.DOCS / "settings.md").read_text(encoding="utf-8") == reference.page(), hint
    assert (reference.DOCS / "schema.json").read_text(encoding="utf-8") == reference.json_schema(), hint


def test_the_json_schema_describes_every_setting() -> None:
    schema = json.loads(reference.json_schema())
    assert set(schema["properties"]) == {"version", *SECTIONS}
    for spec in fields:
        owner = schema["$defs"][spec.owner.__name__]
        assert owner["additionalProperties"] is False
        assert owner["properties"][spec.name]["description"] == spec.help


@pytest.mark.parametrize("recipe", recipes(), ids=lambda each: each.name)
def test_a_recipe_reads_without_findings_and_holds_only_what_differs(recipe: Any) -> None:
    machine = parse_machine("1xRTX4090-24GB")
    mapping = recipe_mapping(recipe.name)
    name = mapping["model"]["name"]
    facts = Facts(machine=machine, model=model_facts(name), data=DataFacts(rows=20_000, tokens=4_000_000, longest=1000))
    found = read(mapping, facts).findings
    assert [f.message for f in found if f.severity != "hint" and f.rule != "model-exists"] == []
    assert recipe.title
    assert "#" in recipe.text.partition("\n")[2], "its comments teach"
    same = [
        path
        for path in read(mapping).given
        if (spec := fields.get(path)) and path in fields and spec.value(read(mapping).config) == spec.default
    ]
    allowed = {
        "adapter.kind",
        "method.beta",
        "method.simpo_gamma",
        "adapter.r",
        "adapter.lora_alpha",
        "optim.learning_rate",
        "data.max_length",
        "model.train_vision",
    }
    assert set(same) <= allowed, "only what differs, or what the recipe is about"


def test_recipes_cover_the_first_wishes() -> None:
    assert {each.name for each in recipes()} >= {"demo", "sft-lora", "qlora-24gb", "full", "pretrain-text", "dpo"}
    for goal in GOALS:
        assert (goal.recipe is None) == ("later version" in goal.note)
        if goal.recipe:
            assert recipe_mapping(goal.recipe)
    for each in recipes():
        assert any(goal.id == each.goal for goal in GOALS)
    with pytest.raises(UsageError, match="Did you mean dpo"):
        recipe_mapping("dop")


def test_a_recipes_mapping_is_a_copy() -> None:
    recipe_mapping("demo")["model"]["name"] = "spoiled"
    assert recipe_mapping("demo")["model"]["name"] == "builtin/tiny"


def test_every_setting_belongs_to_one_step() -> None:
    assert [step.id for step in STEPS] == ["goal", "model", "data", "method", "memory", "review", "launch"]
    for mapping in ({}, {"method": {"kind": "dpo"}, "adapter": {"kind": "lora"}}):
        config = read(mapping).config
        asked = [spec for step in STEPS for spec in step_fields(step, config)]
        assert len(asked) == len(set(asked))
        assert set(asked) == set(fields_of(config))
    for path, step in {
        "data.train.0.format": "data",
        "run.prompts.1": "data",
        "optim.tf32": "memory",
        "nonsense": "review",
        "adapter.x": "method",
    }.items():
        assert step_of_path(path) == step


def test_auto_is_resolved_everywhere_and_says_why() -> None:
    assert {spec for spec in fields if spec.auto} == set(AUTO)
    for method in ("sft", "pretrain", "dpo"):
        for adapter in ("none", "lora"):
            config = read({"method": {"kind": method}, "adapter": {"kind": adapter}}).config
            for facts in (Facts(), Facts(machine=parse_machine("H100"), model=model_facts("builtin/tiny"))):
                for entry in effective(config, facts):
                    assert entry.reason
                whole = resolved(config, facts)
                assert not any(spec.value(whole) == "auto" for spec in fields_of(whole))
            assert resolved(config).optim.learning_rate == LEARNING_RATES[method, adapter]


def test_checkpointing_turns_on_when_it_would_not_fit() -> None:
    mapping = {"model": {"name": "Qwen/Qwen3-0.6B"}, "data": {"max_length": 2048}}
    model = model_facts("Qwen/Qwen3-0.6B")
    roomy = resolved(read(mapping).config, Facts(machine=parse_machine("B200"), model=model))
    tight = resolved(read(mapping).config, Facts(machine=parse_machine("1xRTX4090-24GB"), model=model))
    assert [config.memory.gradient_checkpointing for config in (roomy, tight)] == [False, True]
    assert 0.5 < FIT < 1


def test_tf32_follows_the_card() -> None:
    config = read({}).config
    wanted = {"H100": True, "T4": False, "cpu": False}
    assert {name: resolved(config, Facts(machine=parse_machine(name))).optim.tf32 for name in wanted} == wanted


def test_terms_are_found_in_any_spelling_and_typos_suggest() -> None:
    assert len(TERMS) >= 40
    for word in ("lora", "LORA", "epochs", "gradient-accumulation", "oom"):
        assert isinstance(explain(word), Explanation), word
    assert explain("epocs") == ("epoch",)
    assert explain("lora_r").name == "adapter.r"  # type: ignore[union-attr]
    assert explain("kind") == ("method.kind", "adapter.kind")
    assert explain("qqqqqqq") == ()
    assert explain("data").name == "data"  # type: ignore[union-attr]
    for text in TERMS.values():
        assert text.endswith(".")
        assert "!" not in text
    assert set(names()) == {*SECTIONS, "terms"}


def test_other_tools_names_lead_to_real_settings_and_hide_none_of_ours() -> None:
    assert all(path in fields for path in NAMES.values())
    own = {spec.name for spec in fields}
    assert not own & set(NAMES)
    assert not own & set(CHANGES)


@pytest.mark.parametrize(
    ("optim", "fits"),
    [
        ({"optim": "muon", "optim_args": {"momentum": 0.9, "adjust_lr_fn": "original"}}, True),
        ({"optim": "muon", "optim_args": {"momentum": 2}}, False),
        ({"optim": "muon", "optim_args": {"rank": 8}}, False),
        ({"optim": "q_galore_adamw_8bit", "optim_args": {"rank": 8, "proj_bits": 4}}, True),
        ({"optim": "q_galore_adamw_8bit", "optim_args": {"proj_bits": 5}}, False),
        ({"optim_args": {"alpha": 5}}, False),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-6}}, True),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"num_cycles": 2}}, False),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, False),
        ({}, True),
    ],
    ids=str,
)
def test_an_editor_knows_the_optimizers_own_settings(optim: dict[str, Any], fits: bool) -> None:
    from jsonschema import Draft202012Validator  # slow where JupyterLab is

    validator = Draft202012Validator(json.loads(reference.json_schema()))
    assert validator.is_valid({"version": 1, "model": {"name": "builtin/tiny"}, "optim": optim}) == fits


def test_an_optimizers_own_settings_are_explained() -> None:
    told = explain("optim.optim_args")
    assert isinstance(told, Explanation)
    assert (
        "muon ns_steps",
        "a whole number from 1 to 20, default 5: Newton-Schulz steps that make the update orthogonal",
    ) in told.facts


def test_names_are_those_of_the_libraries() -> None:
    """A setting that transformers, PEFT or TRL has under a name has that name here."""
    import torch._inductor.config as inductor
    from peft import LoraConfig
    from transformers import EarlyStoppingCallback, TrainingArguments
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames
    from trl import DPOConfig

    known = (TrainingArguments, LoraConfig, DPOConfig)
    arguments, lora, dpo = ([field.name for field in dataclasses.fields(each)] for each in known)
    schedules, optimizers = ([each.value for each in kinds] for kinds in (SchedulerType, OptimizerNames))
    places = ((inductor.triton if key.startswith("triton.") else inductor, key) for key in COMPILE_OPTIONS)
    missing = [key for place, key in places if not hasattr(place, key.rsplit(".", 1)[-1])]
    assert missing == []
    assert set(fields.optim.lr_scheduler_type.choices) <= set(schedules)
    assert set(fields.optim.optim.choices) - BUILT_HERE <= set(optimizers)
    assert tuple(KINDS) == fields.optim.optim.choices
    stopping = inspect.signature(EarlyStoppingCallback).parameters
    assert {spec.name for spec in fields.optim} <= {*arguments, *stopping}
    # PEFT takes the one beside its config; the other is the name that partial fine-tuning has elsewhere.
    elsewhere = {"kind", "autocast_adapter_dtype", "unfrozen_parameters", "path"}
    loraplus = {"loraplus_lr_ratio", "loraplus_lr_embedding"}  # which PEFT takes where it makes an optimizer
    assert {spec.name for spec in fields.adapter} - elsewhere - loraplus <= set(lora)
    assert {"beta", "loss_type", "label_smoothing"} <= set(dpo)
    shared = {"logging_steps", "save_steps", "save_total_limit", "eval_steps", "seed", "output_dir"}
    assert shared <= set(arguments) & {spec.name for spec in fields.run}


def test_shown_values_are_short_and_plain() -> None:
    assert shown(None) == "nothing"
    assert shown(True) == "true"
    assert shown(2e-5) == "2e-05"
    assert shown(10**3000).startswith("a number of about")
    assert len(shown("x" * 10_000)) <= 60
    assert shown(["a"] * 9) == "a list of 9"
    assert "\x1b" not in shown("\x1b[0m")


LIGHT = """engine.errors engine.hardware engine.config.steps engine.rules engine.features.table engine.session.draft
engine.session.reference engine.session.explain engine.session.build engine.session.collector engine.session.first_rows
engine.session.pages engine.planning.estimate engine.data.gather_facts"""


def test_nothing_heavy_is_imported() -> None:
    """Neither by importing nor by using it."""
    code = (
        "import importlib, sys\n"
        "def look(after):\n"
        "    names = {'torch', 'transformers', 'datasets', 'trl', 'pandas', 'numpy', 'peft', 'accelerate'}\n"
        "    heavy = names & set(sys.modules)\n"
        "    assert not heavy, f'{after}: {heavy}'\n"
        f"for module in {LIGHT.split()}:\n"
        "    importlib.import_module(module)\n"
        "    look(module)\n"
        "from engine.session.draft import Draft\n"
        "from engine.data.gather_facts import gather_facts\n"
        "from engine.planning.estimate import estimate\n"
        "draft = Draft.new('demo')\n"
        "draft.learn(gather_facts(draft.config))\n"
        "draft.findings, draft.text(), estimate(draft.config, draft.facts)\n"
        "look('a draft')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_parts_of_rows_that_columns_may_name_are_those_that_are_read() -> None:
    from engine.config.data import PARTS
    from engine.data.formats import FORMATS

    assert {name: {part.removesuffix("?") for part in each.parts} for name, each in FORMATS.items()} == {
        name: set(parts) for name, parts in PARTS.items()
    }
