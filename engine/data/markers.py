"""A chat template that notes where each message begins and ends in the text it writes.

The template is parsed by transformers' sandboxed environment, and a marker is written at the start of each round of each
loop and one after the loop. Where no marker stood in a text that the template takes up again (a block that is set, a macro,
a filter), the markers cannot have changed anything but the output, since a template does not read what it has written:
`Marked.certain` says so. Else it is for the caller to compare the text with the one that `apply_chat_template` writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

Region = tuple[int, int, int]  # index of a message, start and end of its characters

# Noncharacters: valid in a Python string, absent from text, untouched by strip() and split().
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
MARKER = re.compile(f"{_OPEN}([0-9]*){_CLOSE}")


class Marked(NamedTuple):
    """A text as a template writes it, with where its messages stand."""

    text: str
    regions: list[Region]
    """Of each message that the loop over them writes; none where markers are not found again in the order they were written."""
    tail: str
    """What follows the last region."""
    certain: bool
    """Whether markers cannot have changed the text."""


def render_marked(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Marked:
    """The text with the region of each message. Raises whatever the template raises."""
    known = {id(message): index for index, message in enumerate(messages)}
    outer: list[int] = []  # the loop over messages that is under way; loops inside it only look around
    certain = True
    written: list[str] = []

    def turn(loop: int, captured: bool, *values: Any) -> str:
        nonlocal certain
        for value in values:
            if id(value) in known and (not outer or outer == [loop]):
                outer[:] = [loop]
                certain = certain and not captured
                written.append(str(known[id(value)]))
                return f"{_OPEN}{written[-1]}{_CLOSE}"
        return ""

    def end(loop: int) -> str:
        if outer != [loop]:
            return ""
        outer.clear()
        written.append("")
        return f"{_OPEN}{_CLOSE}"

    raw = marked_template(source).render(**variables, messages=messages, _turn_begins=turn, _loop_ends=end)
    if MARKER.findall(raw) != written:
        # The row itself holds what looks like one, or the template took a text apart and put it together otherwise.
        return Marked(raw, [], "", False)
    return Marked(*_split(raw), certain)


def _split(raw: str) -> tuple[str, list[Region], str]:
    """Marked text to plain text, the non-empty regions of each message, and the text after the last region."""
    pieces = MARKER.split(raw)
    text, regions, tail_from = [pieces[0]], [], 0
    position = len(pieces[0])
    for marker, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        if marker and piece:
            regions.append((int(marker), position, position + len(piece)))
        if not marker:
            tail_from = position
        text.append(piece)
        position += len(piece)
    whole = "".join(text)
    return whole, regions, whole[tail_from:] if tail_from else ""


@lru_cache(maxsize=64)
def marked_template(source: str) -> jinja2.Template:
    """The template with a marker at each round of each loop and one after the loop, in the same sandbox.

    Raises `jinja2.TemplateError` where the source is no template.
    """
    environment = _compile_jinja_template(source).environment
    tree = environment.parse(source)
    _insert_markers(tree, iter(range(1 << 30)))
    tree.set_environment(environment)
    return environment.from_string(tree)


_CAPTURING = (nodes.Macro, nodes.CallBlock, nodes.AssignBlock, nodes.FilterBlock, nodes.Block)
"""What takes up the text that is written inside of it."""


def _insert_markers(node: nodes.Node, numbers: Any, captured: bool = False) -> None:
    captured = captured or isinstance(node, _CAPTURING) or (isinstance(node, nodes.For) and node.recursive)
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _insert_markers(value, numbers, captured)
        if not isinstance(value, list):
            continue
        children: list[Any] = []
        for child in value:
            children.append(child)
            if isinstance(child, nodes.Node):
                _insert_markers(child, numbers, captured)
            if isinstance(child, nodes.For):
                number = next(numbers)
                targets = child.target.items if isinstance(child.target, nodes.Tuple) else [child.target]
                names = [nodes.Name(target.name, "load") for target in targets if isinstance(target, nodes.Name)]
                inside = nodes.Const(captured or child.recursive)
                child.body.insert(0, _call("_turn_begins", [nodes.Const(number), inside, *names], child.lineno))
                children.append(_call("_loop_ends", [nodes.Const(number)], child.lineno))
        setattr(node, name, children)


def _call(function: str, arguments: list[nodes.Expr], line: int) -> nodes.Output:
    call = nodes.Call(nodes.Name(function, "load"), arguments, [], None, None)
    output = nodes.Output([call])
    output.set_lineno(line)
    return output
