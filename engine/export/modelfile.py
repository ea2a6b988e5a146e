"""An Ollama Modelfile: where the weights lie, the turns of the chat template in Ollama's language, the stop tokens.

Ollama does not read Jinja. The text before and after each role's turn is read off what the template renders; a template that
is no sequence of such turns is refused, since what Ollama would send is then another prompt than the one that was trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import ModelError
from engine.export.parity import CONVERSATIONS

MARK = "\ue000\ue001"
ROLES = ("system", "user", "assistant")
Turns = dict[str, tuple[str, str]]


def turns_of(tokenizer: Any, kwargs: Mapping[str, Any]) -> tuple[Turns, str]:
    """(text before and after the content of each role, what opens the answer). Raises ModelError for other templates."""

    def render(messages: Sequence[Mapping[str, str]], prompt: bool = False) -> str:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **kwargs)
        return str(text)

    if not getattr(tokenizer, "chat_template", None):
        raise ModelError("modelfile: the model has no chat template.", "Ollama then continues a text as it is.")
    user = {"role": "user", "content": f"{MARK}u"}
    answer = {"role": "assistant", "content": f"{MARK}a"}
    first = tokenizer("a")["input_ids"][0]
    # Ollama puts it before the prompt where the tokenizer does.
    bos = str(tokenizer.bos_token) if first == tokenizer.bos_token_id else ""
    try:
        alone, pair = render([user]), render([user, answer])
        before, after = alone.split(f"{MARK}u")
        opened, closed = pair[len(alone) :].split(f"{MARK}a")
        turns = {"user": (before.removeprefix(bos), after), "assistant": (opened, closed)}
        start = render([user], True)[len(alone) :]
    except Exception as problem:
        raise _no_turns() from problem
    try:
        told = render([{"role": "system", "content": f"{MARK}s"}, user])
        opening, rest = told.split(f"{MARK}s")
        if rest.endswith(turns["user"][0] + f"{MARK}u" + after):
            turns["system"] = (opening.removeprefix(bos), rest.removesuffix(turns["user"][0] + f"{MARK}u" + after))
    except Exception:  # noqa: BLE001 - a template that takes no system prompt has none in Ollama
        turns.pop("system", None)
    for messages in [*CONVERSATIONS, *_with_system(turns)]:
        if render(messages, True).removeprefix(bos) != as_ollama(turns, start, messages):
            raise _no_turns()
    return turns, start


def _with_system(turns: Turns) -> list[list[dict[str, str]]]:
    return [[{"role": "system", "content": "Be brief."}, *CONVERSATIONS[1]]] if "system" in turns else []


def as_ollama(turns: Turns, start: str, messages: Sequence[Mapping[str, str]]) -> str:
    """What Ollama renders by the template that `text` writes."""
    return "".join(turns[each["role"]][0] + each["content"] + turns[each["role"]][1] for each in messages) + start


def _no_turns() -> ModelError:
    return ModelError(
        "modelfile: the chat template is no plain sequence of turns, so Ollama's language cannot render the same prompt.",
        "Export --to gguf: llama.cpp reads the template itself (`llama-server --jinja`).",
    )


def text(turns: Turns, start: str, weights: str, stops: Sequence[str]) -> str:
    """The Modelfile. Raises ModelError for texts that it cannot hold."""
    parts = [each for pair in turns.values() for each in pair] + [start]
    if any('"""' in each or "{{" in each for each in parts) or start.endswith('"'):
        raise _no_turns()
    cases = "".join(
        f'{{{{ {"if" if number == 0 else "else if"} eq .Role "{role}" }}}}{turns[role][0]}{{{{ .Content }}}}{turns[role][1]}'
        for number, role in enumerate(role for role in ROLES if role in turns)
    )
    template = f"{{{{ range .Messages }}}}{cases}{{{{ end }}}}{{{{ end }}}}{start}"
    lines = [f"FROM ./{weights}", f'TEMPLATE """{template}"""', *(f"PARAMETER stop {_quoted(each)}" for each in stops)]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    """As Ollama reads a value: one line between single quotation marks, anything else between three."""
    if '"' not in value and "\n" not in value:
        return f'"{value}"'
    if '"""' in value or value.endswith('"'):
        raise ModelError(
            "modelfile: a stop token has quotation marks, which Ollama cannot read.", "Export --to gguf alone."
        )
    return f'"""{value}"""'
