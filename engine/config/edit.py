"""Single changes written into a YAML text, everything else kept to the byte: comments, order, quotes, line ends.

The place of a change is found by ruamel's node marks and spliced. Each result is read back; where splicing did not give
the mapping that was wanted (anchors, odd layouts), ruamel's round trip writes it, which still keeps comments and order.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from engine.config.files import as_yaml, parse
from engine.errors import WorkbenchError

MISSING: Any = object()
Path = tuple[str | int, ...]


def rewrite(text: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """`text`, which says `before`, changed as little as possible so that it says `after`."""
    if before == after and _same_types(before, after):
        return text
    mark, flat, ends = _flat(text)
    for way in (_spliced, _round_trip):
        try:
            changed = way(flat, before, after)
            if _reads_back_as(changed, after):
                return mark + changed.replace("\n", ends)
        except (YAMLError, WorkbenchError, KeyError, IndexError, ValueError, TypeError, AttributeError):
            continue  # this layout is beyond the way tried; the next one is plainer
    return mark + as_yaml(after).replace("\n", ends)


def _flat(text: str) -> tuple[str, str, str]:
    """Its byte order mark, if any; itself with line ends of one sign; and its own line end."""
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    body = text.removeprefix("\ufeff")
    return mark, body.replace("\r\n", "\n"), "\r\n" if "\r\n" in body else "\n"


def key_renamed(text: str, path: Sequence[str], name: str, wanted: Mapping[str, Any]) -> str | None:
    """`text` with the key at `path` called `name` and nothing else changed; None where it would not say `wanted` then."""
    mark, flat, ends = _flat(text)
    try:
        node: Any = YAML(typ="rt", pure=True).compose(io.StringIO(flat))
        key = node
        for part in path:
            key, node = _pair(node, int(part) if isinstance(node, SequenceNode) else part)
        changed = flat[: key.start_mark.index] + name + flat[key.end_mark.index :]
        return mark + changed.replace("\n", ends) if _reads_back_as(changed, wanted) else None
    except (YAMLError, WorkbenchError, KeyError, IndexError, ValueError, TypeError, AttributeError):
        return None  # the layout is odd: the setting is taken out and written anew


def _reads_back_as(text: str, wanted: Mapping[str, Any]) -> bool:
    got = parse(text).mapping
    return got == wanted and _same_types(got, wanted)


def _same_types(one: Any, other: Any) -> bool:
    """`True == 1` and `1 == 1.0` in Python, but not in a config."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(key in other and _same_types(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same_types, one, other))
    return isinstance(one, bool) == isinstance(other, bool)


def changes(before: Any, after: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """What differs, as `(path, new value)`; MISSING for what is gone. Lists differ as a whole unless only grown."""
    if isinstance(before, Mapping) and isinstance(after, Mapping) and before and after:
        for key in before:
            if key not in after:
                yield (*path, key), MISSING
        for key, value in after.items():
            yield from changes(before.get(key, MISSING), value, (*path, key))
    elif isinstance(before, list) and isinstance(after, list) and before and len(before) <= len(after):
        if any(not isinstance(item, Mapping) for item in before) and before != after[: len(before)]:
            yield path, after
            return
        for index, value in enumerate(after):
            yield from changes(before[index] if index < len(before) else MISSING, value, (*path, index))
    elif before != after or isinstance(before, bool) != isinstance(after, bool):
        yield path, after


def _spliced(text: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    for path, value in changes(before, after):
        try:
            text = _splice(text, path, value)
        except _InBrackets:
            whole: Any = after
            for part in path[:-1]:
                whole = whole[part]
            text = _splice(text, path[:-1], whole)
    return text


class _InBrackets(ValueError):
    """The change lies inside `{...}` or `[...]`, which is written again as a whole."""


def _splice(text: str, path: Path, value: Any) -> str:
    if text and not text.endswith("\n"):
        text += "\n"
    root = YAML(typ="rt", pure=True).compose(io.StringIO(text))
    if root is None or not isinstance(root, MappingNode) or not root.value:
        return text + as_yaml({str(path[0]): value})
    parent: Any = root
    for part in path[:-1]:
        parent = _pair(parent, part)[1]
    place = _find(parent, path[-1])
    if parent.flow_style and (place is None or value is MISSING):
        raise _InBrackets
    if place is None:
        return _insert(text, parent, path[-1], value)
    key, node = place
    if value is MISSING:
        return _cut(text, key, node)
    # `key:` without a value carries a mark somewhere behind; it is written again as a block
    tight = isinstance(node, ScalarNode) or node.flow_style
    simple = not isinstance(value, (dict, list)) or not value or (tight and not isinstance(node, ScalarNode))
    if simple and tight and node.start_mark.line == _last(node).end_mark.line and _has_text(node):
        return text[: node.start_mark.index] + _inline(value) + text[node.end_mark.index :]
    if isinstance(parent, SequenceNode) or parent.flow_style:
        raise _InBrackets
    start, end = _region(text, key, node)
    return text[:start] + _block(path[-1], value, key.start_mark.column) + text[end:]


def _has_text(node: Node) -> bool:
    return bool(node.end_mark.index > node.start_mark.index)


def _pair(parent: Node, part: str | int) -> tuple[Any, Any]:
    place = _find(parent, part)
    if place is None:
        raise KeyError(part)
    return place


def _find(parent: Node, part: str | int) -> tuple[Any, Any] | None:
    if isinstance(parent, MappingNode):
        return next(((key, node) for key, node in parent.value if key.value == part), None)
    if isinstance(parent, SequenceNode) and isinstance(part, int):
        return (parent.value[part], parent.value[part]) if part < len(parent.value) else None
    raise KeyError(part)


def _last(node: Any) -> Any:
    """The node that ends last inside `node`; the end mark of a block lies behind the comments that follow it."""
    while not isinstance(node, ScalarNode) and not node.flow_style and node.value:
        tail = node.value[-1]
        node = (
            (tail[1] if _has_text(tail[1]) or not isinstance(tail[1], ScalarNode) else tail[0])
            if isinstance(tail, tuple)
            else tail
        )
    return node


def _end(text: str, node: Node) -> int:
    """Index behind the last character of `node`."""
    end = _last(node).end_mark.index
    while end > 0 and text[end - 1] in "\n \t":
        end -= 1
    return int(end)


def _line_end(text: str, index: int) -> int:
    newline = text.find("\n", index)
    return len(text) if newline < 0 else newline + 1


def _region(text: str, key: Node, node: Node) -> tuple[int, int]:
    """The whole lines that `key: value` takes."""
    start = text.rfind("\n", 0, key.start_mark.index) + 1
    if text[start : key.start_mark.index].strip():
        raise ValueError("not at the start of its line")
    behind = _end(text, node) if _has_text(node) or not isinstance(node, ScalarNode) else key.end_mark.index
    return start, _line_end(text, behind)


def _cut(text: str, key: Node, node: Node) -> str:
    start, end = _region(text, key, node)
    return text[:start] + text[end:]


def _insert(text: str, parent: Node, part: str | int, value: Any) -> str:
    if not parent.value:
        raise ValueError("nothing to stand below")
    tail = parent.value[-1]
    last = tail[1] if isinstance(tail, tuple) else tail
    key = tail[0] if isinstance(tail, tuple) else tail
    behind = _end(text, last) if _has_text(last) or not isinstance(last, ScalarNode) else key.end_mark.index
    at = _line_end(text, behind)
    if isinstance(parent, MappingNode):
        return text[:at] + _block(part, value, parent.value[0][0].start_mark.column) + text[at:]
    line = text.rfind("\n", 0, parent.value[0].start_mark.index) + 1
    column = text.index("-", line) - line
    block = as_yaml([value])
    indent = len(block) - len(block.lstrip(" "))
    lines = [" " * column + row[indent:] if row.strip() else row for row in block.splitlines(keepends=True)]
    return text[:at] + "".join(lines) + text[at:]


def _block(key: str | int, value: Any, column: int) -> str:
    """`key: value` as block lines at this column."""
    lines = as_yaml({str(key): value}).splitlines(keepends=True)
    return "".join(" " * column + line if line.strip() else line for line in lines)


def _inline(value: Any) -> str:
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = True
    writer.allow_unicode = True
    writer.width = 1_000_000
    writer.brace_single_entry_mapping_in_flow_sequence = True
    out = io.StringIO()
    writer.dump([value], out)
    return out.getvalue().strip()[1:-1]


def _round_trip(text: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The same through ruamel's own round trip: comments and order stay, layout may shift a little."""
    yaml = YAML(typ="rt", pure=True)
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.brace_single_entry_mapping_in_flow_sequence = True
    document = yaml.load(text)
    for path, value in changes(before, after):
        place = document
        for part in path[:-1]:
            place = place[part]
        if value is MISSING:
            del place[path[-1]]
        elif isinstance(place, list) and path[-1] == len(place):
            place.append(value)
        else:
            place[path[-1]] = value
    out = io.StringIO()
    yaml.dump(document, out)
    return out.getvalue()
