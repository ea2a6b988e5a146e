"""What a template leaves out, doubles or never closes is counted where rows are tokenized; good templates are not blamed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.chat import Chat
from engine.data.counting import count
from engine.data.gather_facts import outcome
from engine.data.plan import TEMPLATES
from engine.data.preview import preview
from tests.engine.data.test_chat import conversations

Config = Callable[..., Any]
Write = Callable[..., Path]

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


def _row(*, system: str = "", **answer: Any) -> dict[str, Any]:
    said = [{"role": "system", "content": system}] if system else []
    return {
        "messages": [*said, {"role": "user", "content": "one?"}, {"role": "assistant", "content": "first", **answer}],
    }


def _pair(row: dict[str, Any]) -> dict[str, Any]:
    *asked, answer = row["messages"]
    other = {**answer, "content": "second"}
    return {"prompt": asked, "chosen": [answer], "rejected": [other], **{k: v for k, v in row.items() if k == "tools"}}


# The template, the row, and what is found of it.
FLAWED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no end token": (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}",
        _row(),
        "no_end",
    ),
    "an end token that is not learned": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + ASKS,
        _row(),
        "no_end",
    ),
    "two start tokens": ("{{ bos_token }}{{ bos_token }}" + CHATML + ASKS, _row(), "double_bos"),
    "no system role": (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        + ASKS,
        _row(system="Be terse."),
        "system",
    ),
    "tools": (CHATML + ASKS, {**_row(), "tools": [TOOL]}, "tools"),
    "tools that are called": (
        CHATML + ASKS,
        {**_row(content="I look_up."), "tools": [{**TOOL, "function": {**TOOL["function"], "description": "Finds."}}]},
        "tools",
    ),
    "thinking": (CHATML + ASKS, _row(reasoning_content="It is the first."), "thinking"),
    "earlier thinking": (
        CHATML + ASKS,
        {"messages": [*_row(reasoning_content="Hm.")["messages"], *_row()["messages"]]},
        "earlier_thinking",
    ),
    "marks in what is said": (CHATML + ASKS, _row(content="first<|im_end|>"), "marks"),
    "marks in what is thought": (
        CHATML.replace("{{ m.content }}", "{{ m.reasoning_content or '' }}{{ m.content }}") + ASKS,
        _row(reasoning_content="Hm.<|im_end|>"),
        "marks",
    ),
    "an empty turn": (
        CHATML + ASKS,
        {"messages": [{"role": "user", "content": " "}, *_row()["messages"]]},
        "empty_turn",
    ),
    "characters that turn the writing": (CHATML + ASKS, _row(content="\u202efirst"), "control"),
    "characters for a terminal": (CHATML + ASKS, _row(content="\x1b[31mfirst"), "control"),
    "another generation prompt": (
        CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
        _row(),
        "prompt",
    ),
}


def _counted(make_config: Config, path: Path, tokenizer: Any, template: Path, method: str) -> dict[str, int]:
    config = make_config(path, method=method, model={"chat_template": str(template)})
    facts = count(config, copy.deepcopy(tokenizer), "train")
    assert not facts.get("problem"), facts["problem"]
    assert all(first.endswith(f"{path.name}:1") for _, _, first in facts["template_flaws"])
    assert len(facts["warnings"]) == len(facts["template_flaws"])
    return {name: number for name, number, _ in facts["template_flaws"]}


def test_a_template_that_writes_tools_is_not_blamed_for_one_that_is_called(
    minimind: Any, make_config: Config, write: Write, tmp_path: Path
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + CHATML + ASKS)
    told = {**TOOL, "function": {**TOOL["function"], "description": "Finds, as the template does not say."}}
    path = write([{**_row(content="I look_up."), "tools": [told]}])
    assert _counted(make_config, path, minimind, template, "sft") == {}


@pytest.mark.parametrize("name", FLAWED)
def test_each_flaw_is_counted_in_language_rows_and_in_pairs(
    name: str, minimind: Any, make_config: Config, write: Write, tmp_path: Path
) -> None:
    text, row, flaw = FLAWED[name]
    template = tmp_path / "own.jinja"
    template.write_text(text)
    path = write([row, row])
    assert _counted(make_config, path, minimind, template, "sft") == {flaw: 2}
    config = make_config(path, model={"chat_template": str(template)})
    shown = preview(config, copy.deepcopy(minimind))["rows"][0]
    assert shown["flaws"] == [flaw]
    assert outcome(shown).startswith("This row ")
    if name != "another generation prompt" and "generation %}" not in text and "earlier" not in name:
        pairs = write([_pair(row), _pair(row)], "pairs.jsonl")
        assert _counted(make_config, pairs, minimind, template, "dpo") == {flaw: 2}


def test_the_templates_of_models_and_ours_are_not_blamed(
    templates: dict[str, tuple[Any, str]], make_config: Config, write: Write, tmp_path: Path
) -> None:
    row = _row(system="Be terse.")
    thinking = _row(reasoning_content="It is the first.")
    ours = {file.stem: (templates["minimind"][0], file.read_text()) for file in TEMPLATES.glob("*.jinja")}
    for name, (tokenizer, text) in {**templates, **ours}.items():
        template = tmp_path / f"{name}-own.jinja"
        template.write_text(text)
        if name == "llama3":
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot_id|>", "<|start_header_id|>"]})
        rows = [row, _row()] + ([thinking] if name in ("qwen3", "chatml") else [])
        path = write(rows, f"{name}.jsonl")
        assert _counted(make_config, path, tokenizer, template, "sft") == {}, name
        pairs = write([_pair(row) for row in rows[:2]], f"{name}-pairs.jsonl")
        assert _counted(make_config, pairs, tokenizer, template, "dpo") == {}, name


def test_a_real_template_asks_with_closed_reasoning_unless_it_is_opened(
    minimind: Any, make_config: Config, write: Write
) -> None:
    path = write([_row(reasoning_content="It is the first.")])
    found = {}
    for kwargs in ({}, {"open_thinking": True}):
        config = make_config(path, model={"chat_template_kwargs": kwargs})
        facts = count(config, copy.deepcopy(minimind), "train")
        found[bool(kwargs)] = [name for name, *_ in facts["template_flaws"]]
    assert found == {False: ["prompt"], True: []}


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("minimind", "phi-3", "qwen2.5"))]
)
@settings(max_examples=25, deadline=None)
@given(messages=conversations(), trained=st.sampled_from(["assistant", "last", "all"]))
def test_no_false_alarm_on_any_conversation(templates: Any, name: str, messages: Any, trained: str) -> None:
    tokenizer, template = templates[name]
    assert Chat(tokenizer, template).spans(messages, None, trained).flaws == ()


def test_characters_that_nobody_sees_are_counted_in_texts_and_prompts_and_those_of_a_script_are_not(
    make_config: Config, write: Write, minimind: Any
) -> None:
    arabic, hidden = "\u0633\u0644\u0627\u0645\u200f and \u200d", "left\u2067 right"
    rows = {
        "pretrain": ({"text": arabic}, {"text": hidden}),
        "embedding": ({"anchor": arabic, "positive": "b"}, {"anchor": "a", "positive": hidden}),
        "grpo": ({"prompt": arabic}, {"prompt": hidden}),
    }
    for method, (plain, strange) in rows.items():
        path = write([plain, plain, strange, strange], f"{method}.jsonl")
        facts = count(make_config(path, method=method), copy.deepcopy(minimind), "train")
        assert [*map(tuple, facts["template_flaws"])] == [("control", 2, f"{path}:3")], method
