"""Masks are exact: what is trained is what the assistant writes, for every template, character by character."""

from __future__ import annotations

import copy
import functools
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.data.chat import Chat
from engine.data.chat_masks import COMPARED, Masking, token_mask
from engine.data.chat_template import GENERATION, MaskError, in_parts, takes_parts

Message = dict[str, Any]

# Rows that hold what borders are found with are refused, which has a test of its own.
words = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\ufdd0\ufdd1\ufdd2\ufdd3"), min_size=1, max_size=20
)
snippets = st.lists(
    words | st.sampled_from(["\n", "  ", "<|", "def f():\n\treturn 1", "日本語", "🙂👩‍👩‍👧", "</div>"]),
    min_size=1,
    max_size=4,
)
said = snippets.map("".join).filter(str.strip)


@functools.lru_cache(4)
def chat_of(tokenizer: Any, template: str) -> Chat:
    """The same for all conversations of a test, as for the rows of a file: a process of its own renders each."""
    return Chat(tokenizer, template)


@st.composite
def conversations(draw: Any) -> list[Message]:
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(said)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(said)})
        messages.append({"role": "assistant", "content": draw(said)})
    return messages


def _expected(name: str, messages: list[Message]) -> list[str]:
    """The answer as each template writes it, with its end mark, worked out by hand from the template."""
    answers = [(place, message["content"]) for place, message in enumerate(messages) if message["role"] == "assistant"]
    if name == "phi-3":
        return [content + "<|end|>" for _, content in answers]
    if name == "qwen2.5":
        return [content + "<|im_end|>" for _, content in answers]
    if name == "minimind":
        return [content.lstrip("\n") + "<|im_end|>" for _, content in answers]
    last = len(messages) - 1
    return [
        ("<think>\n\n</think>\n\n" + content.lstrip("\n") if place == last else content) + "<|im_end|>"
        for place, content in answers
    ]


@pytest.mark.parametrize("name", ["minimind", "phi-3", "qwen2.5", "qwen3"])
@settings(max_examples=40, deadline=None)
@given(messages=conversations())
def test_trained_text_is_the_answers_and_their_end_marks(templates: Any, name: str, messages: list[Message]) -> None:
    assume(not any("think>" in message["content"] for message in messages))
    tokenizer, template = templates[name]
    rendered = chat_of(tokenizer, template).spans(messages)
    assert rendered.text == tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert [rendered.text[start:end] for start, end in rendered.spans] == _expected(name, messages)


@settings(max_examples=40, deadline=None)
@given(messages=conversations())
def test_trained_tokens_decode_to_the_trained_text(templates: Any, messages: list[Message]) -> None:
    assume(all(message["content"] == message["content"].strip() for message in messages))
    assume(not any("think>" in message["content"] for message in messages))
    tokenizer, template = templates["qwen2.5"]
    rendered = chat_of(tokenizer, template).spans(messages)
    encoded = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True)
    ids = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=True)["input_ids"]
    assert encoded["input_ids"] == ids
    mask = token_mask(encoded["offset_mapping"], rendered.spans)
    trained = [token for token, learned in zip(ids, mask, strict=True) if learned]
    assert tokenizer.decode(trained) == "".join(_expected("qwen2.5", messages))


@pytest.mark.parametrize("name", ["minimind", "phi-3", "qwen2.5", "qwen3"])
@settings(max_examples=20, deadline=None)
@given(messages=conversations(), other=said)
def test_what_others_say_changes_nothing_trained(
    templates: Any, name: str, messages: list[Message], other: str
) -> None:
    assume(not any("think>" in message["content"] for message in messages) and "think>" not in other)
    tokenizer, template = templates[name]
    chat = chat_of(tokenizer, template)
    changed = [message if message["role"] == "assistant" else {**message, "content": other} for message in messages]
    one, two = chat.spans(messages), chat.spans(changed)
    assert [one.text[a:b] for a, b in one.spans] == [two.text[a:b] for a, b in two.spans]


CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": {"type": "object"}}}
]
TOOL_CHAT: list[Message] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "12 degrees"},
    {"role": "tool", "content": "and rain"},
    {"role": "assistant", "content": "It rains."},
]
CALLED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize(
    ("name", "answer"),
    [("minimind", "It rains."), ("qwen2.5", "It rains."), ("qwen3", "<think>\n\n</think>\n\nIt rains.")],
)
def test_tool_calls_are_trained_and_tool_answers_are_not(templates: Any, name: str, answer: str) -> None:
    tokenizer, template = templates[name]
    rendered = Chat(tokenizer, template).spans(TOOL_CHAT, TOOLS)
    assert [rendered.text[a:b] for a, b in rendered.spans] == [CALLED, answer + "<|im_end|>"]


def test_a_template_that_drops_tool_calls_is_an_error(templates: Any) -> None:
    tokenizer, template = templates["phi-3"]
    with pytest.raises(MaskError, match="leaves out the tool call get_weather of message 2"):
        Chat(tokenizer, template).spans(TOOL_CHAT, TOOLS)


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("minimind", ["one\n</think>\n\nA<|im_end|>", "two\n</think>\n\nB<|im_end|>"]),
        ("qwen3", ["A<|im_end|>", "<think>\ntwo\n</think>\n\nB<|im_end|>"]),
        ("phi-3", ["<think>\none\n</think>\n\nA<|end|>", "<think>\ntwo\n</think>\n\nB<|end|>"]),
    ],
)
def test_reasoning_is_trained_where_the_template_writes_it(templates: Any, name: str, trained: list[str]) -> None:
    tokenizer, template = templates[name]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\none\n</think>\n\nA"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "<think>\ntwo\n</think>\n\nB"},
    ]
    rendered = Chat(tokenizer, template).spans(messages)
    assert [rendered.text[a:b] for a, b in rendered.spans] == trained


@pytest.mark.parametrize(
    "name", ["minimind", "qwen3", "phi-3", "gptoss", "glm4moe", "qwen3_5_think", "nemotron_3_nano"]
)
def test_without_thinking_the_answer_alone_is_trained(templates: Any, name: str) -> None:
    tokenizer, template = (
        templates[name] if name in templates else (templates["qwen3"][0], dict(_pairs())[f"{name}.jinja"])
    )
    chat = Chat(tokenizer, template, thinking=False)
    key = {"gptoss": "thinking"}.get(name, "reasoning_content")
    thinks = [{"content": "<think>\ntwo\n</think>\n\nB"}] if name in ("minimind", "qwen3", "phi-3") else []
    thinks += [{"content": "B", key: "two"}] if name != "phi-3" else []
    for said in (*thinks, {"content": "B"}):
        messages = [{"role": "user", "content": "r"}, {"role": "assistant", **said}]
        rendered = chat.spans(messages)
        (learned,) = [rendered.text[a:b] for a, b in rendered.spans]
        assert re.fullmatch(r"B(<[^<>]*>)?", learned)
        assert ("two" in rendered.text) == (len(said) > 1 or "two" in said["content"])
        ((start, end),) = Chat(tokenizer, template).spans(messages).spans
        assert (rendered.spans[0][0] >= start, rendered.spans[0][1]) == (True, end)
    nothing = [{"role": "user", "content": "r"}, {"role": "assistant", "content": "", "reasoning_content": "two"}]
    assert chat.spans(nothing).spans == ()


def test_without_thinking_a_call_is_trained_whole(templates: Any) -> None:
    tokenizer, template = templates["qwen3"]
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "I call.", "tool_calls": [CALL]},
    ]
    rendered = Chat(tokenizer, template, thinking=False).spans(messages, TOOLS)
    assert "I call." in rendered.text
    assert [rendered.text[a:b] for a, b in rendered.spans] == [CALLED]


def test_reasoning_behind_the_answer_is_refused(templates: Any) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.reasoning_content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    messages = [
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "B", "reasoning_content": "two"},
    ]
    with pytest.raises(MaskError, match="with its reasoning before its answer"):
        Chat(templates["qwen3"][0], template, thinking=False).spans(messages)


TURNS: list[Message] = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "A", "train": True},
    {"role": "user", "content": "r"},
    {"role": "assistant", "content": "B"},
]


@pytest.mark.parametrize(
    ("trained", "expected"),
    [("assistant", ["A<|im_end|>", "B<|im_end|>"]), ("last", ["B<|im_end|>"]), ("flag", ["A<|im_end|>"])],
)
def test_which_turns_are_trained(templates: Any, trained: str, expected: list[str]) -> None:
    tokenizer, template = templates["qwen2.5"]
    rendered = Chat(tokenizer, template).spans(TURNS, trained=trained)
    assert [rendered.text[a:b] for a, b in rendered.spans] == expected
    everything = Chat(tokenizer, template).spans(TURNS, trained="all")
    assert everything.spans == ((0, len(everything.text)),)


def test_a_flag_on_a_user_turn_is_refused(templates: Any) -> None:
    tokenizer, template = templates["qwen2.5"]
    with pytest.raises(MaskError, match="message 1 is flagged as trained"):
        Chat(tokenizer, template).spans([{**TURNS[0], "train": True}, *TURNS[1:]], trained="flag")


# Pairs of the same template with and without marks, from a library that ships both.
def _pairs() -> list[tuple[str, str]]:
    import importlib.util

    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return [(path.name, path.read_text("utf-8")) for path in sorted(folder.glob("*.jinja"))]


PLAIN_CHAT: list[Message] = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello, you."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Now we stop."},
]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_marked_templates_give_the_same_mask_as_transformers(minimind: Any, every: int) -> None:
    conversations = (PLAIN_CHAT, PLAIN_CHAT[:2], [{"role": "system", "content": "Be brief."}, *PLAIN_CHAT], TOOL_CHAT)
    compared = [0] * len(conversations)
    marked = [each for each in _pairs() if GENERATION.search(each[1])]
    for name, template in marked[::every]:
        chat = Chat(minimind, template, name)
        for place, messages in enumerate(conversations):
            try:
                rendered = chat.spans(messages)
            except MaskError:
                continue  # this conversation is not for this template; each refusal has its own test
            parts = takes_parts(minimind, template, {})
            theirs = minimind.apply_chat_template(
                [in_parts(message) for message in messages] if parts else messages,
                chat_template=template,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            ours = minimind(rendered.text, add_special_tokens=False, return_offsets_mapping=True)
            assert ours["input_ids"] == theirs["input_ids"], name
            mask = token_mask(ours["offset_mapping"], rendered.spans)
            assert mask == [bool(m) for m in theirs["assistant_masks"]], name
            compared[place] += 1
    assert min(compared) >= 15 // every


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_marks_and_computed_masks_agree_but_for_space_after_the_end(minimind: Any, every: int) -> None:
    compared = []
    marked = [each for each in dict(_pairs()).items() if GENERATION.search(each[1])]
    for name, template in marked[::every]:
        unmarked = template.replace("endgeneration", "endif").replace("{%- generation", "{%- if true")
        unmarked = unmarked.replace("{% generation", "{% if true")
        try:
            told = Chat(minimind, template, name).spans(PLAIN_CHAT)
            computed = Chat(minimind, unmarked, name).spans(PLAIN_CHAT)
        except MaskError:
            continue
        assert told.text == computed.text
        by_mark = [turn for turn in told.turns if turn.role == "assistant"]
        by_us = [turn for turn in computed.turns if turn.role == "assistant"]
        for one, two in zip(by_mark, by_us, strict=True):
            marked_text = "".join(told.text[a:b] for a, b in one.trained).rstrip()
            computed_text = "".join(told.text[a:b] for a, b in two.trained)
            # Marks may begin at the header (some include it) and prompts may supply an opening <think>.
            assert computed_text in marked_text, name
            assert "Hello, you." in computed_text or "Now we stop." in computed_text
        compared.append(name)
    assert len(compared) >= 15 // every


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_every_template_is_exact_or_refused_with_a_reason(minimind: Any, every: int) -> None:
    exact, refused = 0, []
    for name, template in list(_pairs())[::every]:
        chat = Chat(minimind, template, name)
        for messages in (PLAIN_CHAT, TOOL_CHAT):
            try:
                rendered = chat.spans(messages)
            except MaskError as problem:
                refused.append((name, problem.message))
                continue
            trained = "".join(rendered.text[a:b] for a, b in rendered.spans)
            asked = [message["content"] for message in messages if message["role"] in ("user", "tool")]
            assert not any(text in trained for text in asked), name
            answers = [message["content"] for message in messages if message["role"] == "assistant"]
            assert all(text in trained for text in answers), name
            exact += 1
    assert exact >= 80 // every
    assert all(message.startswith(f"{name} ") for name, message in refused)


REFUSED = [
    ("{{ messages[0].content }}", "leaves out message 2"),
    ("{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[1].content }}", "begins message 2 otherwise"),
    ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "begins message 2 otherwise"),
    ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "leaves out message 2"),
    ("{{ raise_exception('roles must alternate') }}", "does not accept this conversation .roles must alternate"),
    ("{% for m in messages %", "is not a valid template"),
    ("{{ ''.__class__.__mro__ }}{{ lipsum.__globals__['os'].popen('id') }}", "may not do|does not accept"),
    ("{{ 'a' * 10 ** 13 }}", "needs too much memory|does not accept"),
]


@pytest.mark.parametrize(("template", "sentence"), REFUSED)
def test_a_template_without_an_exact_mask_is_an_error_with_its_name(
    minimind: Any, template: str, sentence: str
) -> None:
    with pytest.raises(MaskError, match=sentence) as caught:
        Chat(minimind, template, "the chat template odd").spans(PLAIN_CHAT)
    assert caught.value.message.startswith("the chat template odd ")


def test_an_answer_that_begins_as_the_generation_prompt_goes_on_is_trained_whole(minimind: Any) -> None:
    template = (
        "{% for message in messages %}{{ message.role + ': ' + message.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: Well, ' }}{% endif %}"
    )
    rendered = Chat(minimind, template).spans(
        [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "We hope so"}]
    )
    assert [rendered.text[start:end] for start, end in rendered.spans] == ["We hope so<|im_end|>"]


def test_a_template_that_loops_is_stopped_within_three_seconds(minimind: Any) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    before = time.monotonic()
    with pytest.raises(MaskError, match="runs longer than 2 seconds"):
        Chat(minimind, loop).spans(PLAIN_CHAT)
    assert time.monotonic() - before < 20  # two seconds, on a busy machine


def test_a_token_is_trained_when_any_of_its_characters_is() -> None:
    assert token_mask([(0, 3), (3, 5), (5, 5), (5, 9)], [(4, 6)]) == [False, True, False, True]
    assert token_mask([(0, 1), (1, 2), (2, 3)], []) == [False, False, False]
    # Bytes of one character share its place.
    assert token_mask([(0, 1), (1, 2), (1, 2), (2, 3)], [(1, 2)]) == [False, True, True, False]


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{{ 7 ** (messages | length * 10 ** 9) }}",
            "runs longer than 2 seconds",
        ),
        ("{{ ('x' * 2000000000) | length }}", "needs too much memory"),
        pytest.param("{{ 'x' | center(4000000000) }}", "needs too much memory", marks=pytest.mark.slow),
        # Worked out while it is compiled.
        pytest.param("{{ 7 ** (10 ** 9) }}", "runs longer than 2 seconds", marks=pytest.mark.slow),
    ],
)
def test_one_long_call_of_c_is_ended_in_any_thread_and_the_next_conversation_goes_on(
    minimind: Any, template: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr("engine.data.rendering.SECONDS", 0.3)  # the two that it is are waited for by the loop above

    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(MaskError, match=sentence), ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: Chat(minimind, template).spans(messages)).result(20)
    bad = (
        "{% if messages[0].content == 'bad' %}{{ 7 ** (messages | length * 10 ** 9) }}{% endif %}"
        + minimind.chat_template
    )
    chat = Chat(minimind, bad)
    with pytest.raises(MaskError):
        chat.spans([{"role": "user", "content": "bad"}, messages[1]])
    assert chat.spans(messages).text == chat.render(messages)


TYPED = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: "
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)


def test_a_template_of_typed_parts_alone_is_given_them_and_its_mask_is_exact(minimind: Any) -> None:
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]
    rendered = Chat(minimind, TYPED).spans(messages)
    assert rendered.text == "User: 2 + 2?<|im_end|>\nAssistant: four<|im_end|>\n"
    assert [rendered.text[start:end] for start, end in rendered.spans] == ["four<|im_end|>"]


@pytest.mark.parametrize(("trained", "learned"), [("assistant", ["b"]), ("last", []), ("flag", []), ("all", None)])
def test_a_turn_flagged_as_not_trained_is_not_learned(minimind: Any, trained: str, learned: list[str] | None) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "dropped", "train": False},
    ]
    rendered = Chat(minimind, minimind.chat_template).spans(messages, None, trained)
    texts = [rendered.text[start:end] for start, end in rendered.spans]
    if learned is not None:
        assert [text.removesuffix("<|im_end|>") for text in texts] == learned
    assert "dropped" not in "".join(texts)


@pytest.mark.parametrize("trained", ["assistant", "last"])
def test_an_empty_answer_does_not_teach_the_end_mark_alone(minimind: Any, trained: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " \n"}]
    assert Chat(minimind, minimind.chat_template).spans(messages, None, trained).spans == ()
    asked = [messages[0], {**messages[1], "train": True}]
    assert Chat(minimind, minimind.chat_template).spans(asked, None, trained).spans != ()


def test_no_template_is_rendered_but_in_the_child() -> None:
    """Everywhere else a template could take any time and memory: what renders one goes through `Chat`.

    An export asks the other reader for its own rendering, of a template that was rendered so before, in a process of its own.
    """
    calls = re.compile(r"\.apply_chat_template\(|render_jinja_template\(")
    engine = Path(__file__).parents[3] / "engine"
    found = {str(path.relative_to(engine)) for path in engine.rglob("*.py") if calls.search(path.read_text("utf-8"))}
    assert found == {"data/chat_template.py", "export/modelfile.py", "export/parity.py"}


_LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "certain"),
    [
        (_LOOP + _ASKED, True),
        ("{% macro say(t) %}{% for c in t %}{{ c }}{% endfor %}{% endmacro %}" + _LOOP + _ASKED, True),
        ("{% set all %}" + _LOOP + "{% endset %}{{ all }}" + _ASKED, False),
        ("{% filter upper %}" + _LOOP + "{% endfilter %}" + _ASKED, False),
        ("{% macro say() %}" + _LOOP + "{% endmacro %}{{ say() }}" + _ASKED, False),
    ],
)
def test_one_rendering_is_believed_only_where_markers_cannot_change_it(template: str, certain: bool) -> None:
    from engine.data.markers import render_marked

    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    found = render_marked(template, messages, {"add_generation_prompt": False})
    assert found.certain is certain


def test_a_template_that_reads_what_it_has_written_is_never_believed(minimind: Any) -> None:
    # What it writes of a conversation of 89 characters hangs on the markers in it.
    template = "{% set all %}" + _LOOP + "{% endset %}{{ all if all | length < 90 else 'x' }}" + _ASKED
    masking = Masking(minimind, template)
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for _ in range(COMPARED + 2):
        masking.spans(short)
    longer = [{"role": "user", "content": "a" * 20}, {"role": "assistant", "content": "b" * 8}]
    assert "x" not in masking.template.render(longer)
    with pytest.raises(MaskError, match="does not write its messages in one loop"):
        masking.spans(longer)


def test_a_rendering_that_is_believed_gives_what_a_comparison_gives(templates: dict[str, tuple[Any, str]]) -> None:
    chats = [
        [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}. " * (1 + n % 3)}]
        for n in range(COMPARED + 20)
    ]
    chats += [[{"role": "system", "content": "Be brief."}, *chat, *chats[0]] for chat in chats[:20]]
    for tokenizer, template in templates.values():
        believing = Masking(tokenizer, template)
        found = [believing.spans(chat) for chat in chats]
        for chat, one in zip(chats, found, strict=True):
            assert one == Masking(tokenizer, template).spans(chat)
        renderings = 0

        def counted(*args: Any, tokenizer: Any = tokenizer, **kwargs: Any) -> Any:
            nonlocal renderings
            renderings += 1
            return type(tokenizer).apply_chat_template(tokenizer, *args, **kwargs)

        believing.template.tokenizer = SimpleNamespace(
            apply_chat_template=counted,
            eos_token=tokenizer.eos_token,
            special_tokens_map=tokenizer.special_tokens_map,
        )
        believing.spans(chats[-1])
        assert renderings == 0


def test_a_row_that_holds_a_marker_of_its_own_moves_no_border(minimind: Any) -> None:
    """Also where one rendering is believed: a marker in what the user says would hand that to the assistant."""
    masking = Masking(minimind, _LOOP + _ASKED)
    for n in range(COMPARED + 2):
        masking.spans([{"role": "user", "content": f"a {n}"}, {"role": "assistant", "content": "b"}])
    for said in ("a\ufdd01\ufdd1learned", "a\ufdd0\ufdd1", "\ufdd2\ufdd3\ufdd2"):
        for chat in (
            [{"role": "user", "content": said}, {"role": "assistant", "content": "b"}],
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}],
        ):
            with pytest.raises(MaskError, match=r"noncharacters U\+FDD0 to U\+FDD3"):
                masking.spans(chat)


def test_a_template_that_puts_its_text_together_anew_is_refused(minimind: Any) -> None:
    """The text is the same with markers and without, but a part of the answer stands outside of its turn."""
    loop = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    template = "{% set all %}" + loop + "{% endset %}{{ all.split('|') | reverse | join('|') }}" + _ASKED
    chat = [{"role": "user", "content": "a|b"}, {"role": "assistant", "content": "c|d"}]
    with pytest.raises(MaskError, match="does not write its messages in one loop"):
        Masking(minimind, template).spans(chat)


def test_a_tokenizer_with_its_own_way_to_write_a_conversation_is_compared_for_each(minimind: Any) -> None:
    class Own(type(minimind)):  # type: ignore[misc]
        def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
            text = super().apply_chat_template(conversation, *args, **kwargs)
            return text + "!" if "name" in conversation[0] else text

    own = copy.copy(minimind)
    own.__class__ = Own
    masking = Masking(own, _LOOP + _ASKED)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for _ in range(COMPARED + 2):
        masking.spans(chat)
    with pytest.raises(MaskError, match="does not write its messages in one loop"):
        masking.spans([{**chat[0], "name": "eva"}, chat[1]])


@pytest.mark.parametrize(
    ("template", "where"),
    [
        (
            "{{ messages[0].content }}\n{% for m in messages[1:] %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
            "outside",
        ),
        (_LOOP + _LOOP, "in more places than one"),
    ],
)
def test_a_turn_flagged_as_not_trained_is_not_learned_from_another_place(
    minimind: Any, template: str, where: str
) -> None:
    """Where all turns are learned but some, what is left out must be known whole."""
    chat = [{"role": "system", "content": "secret", "train": False}, {"role": "user", "content": "a"}]
    with pytest.raises(MaskError, match=f"message 1, which is flagged as not trained, {where}"):
        Masking(minimind, template).spans(chat, None, "all")
    once = Masking(minimind, _LOOP).spans(chat, None, "all")
    assert "secret" not in "".join(once.text[start:end] for start, end in once.spans)


_SAID = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_AHEAD = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    + _SAID
    + "{% if not loop.last %}<|im_start|>user\n{{ messages[loop.index0 + 1].content }}<|im_end|>\n{% endif %}"
    + "{% elif loop.first %}"
    + _SAID
    + "{% endif %}{% endfor %}"
    + _ASKED
)
_LATE = (
    "{% set ns = namespace(said='') %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ ns.said }}<|im_end|>\n"
    "{% set ns.said = m.content %}{% endfor %}" + _ASKED
)


@pytest.mark.parametrize("after", [0, COMPARED])
@pytest.mark.parametrize("template", [_AHEAD, _LATE])
def test_what_the_user_says_is_never_learned_as_the_answer(minimind: Any, template: str, after: int) -> None:
    """A template that writes the next question in the round of an answer, and one that is a round late."""
    masking = Masking(minimind, template)
    masking._tried = after
    chat = [{"role": "user", "content": "yes or no?"}, {"role": "assistant", "content": "no"}]
    with pytest.raises(MaskError, match=r"writes what another says inside the turn of the assistant \(message 2\)"):
        masking.spans([*chat, *chat])
