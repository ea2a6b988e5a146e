"""What a chat template does to rows, and rows to it, that training should not pass over in silence, and the way out of each.

Rows are looked at where they are tokenized (`engine.data.tokens`), so a flaw is one of this template with these very rows.
Rules, preview and the run's warnings take their sentences from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TemplateFlaw:
    """What is said of one row, of several rows behind their number, and what to do about it."""

    one: str
    many: str
    todo: str
    severity: Literal["warning", "hint"] = "warning"
    of_rows: bool = False
    """Whether the rows are to be mended, not the template."""


TEMPLATE_FLAWS: dict[str, TemplateFlaw] = {
    "no_end": TemplateFlaw(
        "learns no end token behind an answer, so the model does not learn to stop",
        "learn no end token behind an answer, so the model does not learn to stop",
        "Take a template under model.chat_template whose learned part ends with a special token, such as chatml.",
    ),
    "double_bos": TemplateFlaw(
        "begins with two start tokens",
        "begin with two start tokens",
        "Take the start token out of the rows or of the template: the other one is written already.",
    ),
    "system": TemplateFlaw(
        "has a system message that the chat template leaves out",
        "have a system message that the chat template leaves out",
        "Put it into the user's first turn, or take a template with a system role under model.chat_template.",
    ),
    "tools": TemplateFlaw(
        "has tools that the chat template leaves out",
        "have tools that the chat template leaves out",
        "Take a template that writes tools under model.chat_template, or put them into the system message.",
    ),
    "thinking": TemplateFlaw(
        "has reasoning behind its last question that the chat template leaves out",
        "have reasoning behind their last question that the chat template leaves out",
        "Take a template that writes reasoning_content under model.chat_template, or leave it out of the rows.",
    ),
    "earlier_thinking": TemplateFlaw(
        "has reasoning in earlier turns that the chat template leaves out",
        "have reasoning in earlier turns that the chat template leaves out",
        "Templates that keep the last answer's alone are asked like that too; to learn all of it, make a row of each answer.",
        "hint",
    ),
    "prompt": TemplateFlaw(
        "goes on otherwise than the generation prompt before its last answer, which the model is asked with later",
        "go on otherwise than the generation prompt before their last answer, which the model is asked with later",
        "Look at model.chat_template_kwargs, such as enable_thinking: false, or take another model.chat_template.",
    ),
    "marks": TemplateFlaw(
        "holds special tokens of the tokenizer in what is said, which are read as ends and beginnings of turns",
        "hold special tokens of the tokenizer in what is said, which are read as ends and beginnings of turns",
        "Take marks such as <|im_end|> out of the texts: the template writes them itself.",
        of_rows=True,
    ),
    "empty_turn": TemplateFlaw(
        "has a turn that says nothing",
        "have a turn that says nothing",
        "Take such turns out, or the rows: of a pair an empty answer is learned like any other.",
        "hint",
        of_rows=True,
    ),
    "control": TemplateFlaw(
        "holds characters that nobody sees, which control a terminal or turn the direction of writing",
        "hold characters that nobody sees, which control a terminal or turn the direction of writing",
        "The preview writes them out, as \\u202e or ␛. Take them out, unless the model is to read and write them.",
        "hint",
        of_rows=True,
    ),
}  # fmt: skip
