"""One child that renders for many chats of a test process: each would fork one of its own, which costs a fifth of a run.

A `Chat` asks a `Child` (`engine.data.rendering`) that is forked for it alone. Here chats whose tokenizers were read from the
same files, wherever a copy of them lies, and say the same of themselves share one; each still has a `Masking` of its own in
it, made anew where the child was ended. `tests/engine/data/test_rendering.py` looks at children as they are.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.data import rendering

Alone = rendering.Child
MOST = 4
READ = re.compile("tokenizer|special_tokens|added_tokens|vocab|merges|spiece|chat_template|processor|preprocessor")
"""How names of files begin that a tokenizer is read from."""
_SHARED: OrderedDict[Any, tuple[Any, rendering.Child]] = OrderedDict()
_NUMBERS = itertools.count()


class Every:
    """In the child: one `Masking` for each chat."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.made = tokenizer, dict[int, Any]()

    def answer(self, name: str, number: int, make: Callable[..., Any], given: Any, *arguments: Any) -> Any:
        if number not in self.made:
            self.made[number] = make(self.tokenizer, *given)
        return self.made[number].answer(name, *arguments)


class Share:
    """What a chat takes for its own child."""

    def __init__(self, make: functools.partial[Any], child: rendering.Child) -> None:
        self._child, self._own = child, (next(_NUMBERS), make.func, make.args[1:])

    def ask(self, name: str, *arguments: Any) -> Any:
        return self._child.ask(name, *self._own, *arguments)

    def send(self, name: str, *arguments: Any) -> rendering.Sent:
        return self._child.send(name, *self._own, *arguments)

    def take(self, sent: rendering.Sent) -> Any:
        return self._child.take(sent)


def child(make: Any) -> Any:
    """In the place of `engine.data.rendering.Child`."""
    if not isinstance(make, functools.partial):
        return Alone(make)
    tokenizer = getattr(make.args[0], "tokenizer", make.args[0])
    said = (str(tokenizer.special_tokens_map), str(sorted(tokenizer.get_added_vocab().items())))
    folder = Path(tokenizer.name_or_path)
    # One that is from no folder is known by itself; so it is kept, or another might get its number.
    one = _digest(folder) if folder.is_dir() else id(tokenizer)
    key = (os.getpid(), one, type(tokenizer), said, rendering.SECONDS, rendering.MEMORY)
    if key not in _SHARED:
        _SHARED[key] = tokenizer, Alone(functools.partial(Every, tokenizer))
        while len(_SHARED) > MOST:
            _SHARED.popitem(last=False)
    _SHARED.move_to_end(key)
    return Share(make, _SHARED[key][1])


def _digest(folder: Path) -> str:
    """Of all that a tokenizer is read from."""
    read = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        if READ.match(name) and (folder / name).is_file():
            read.update(f"{name}\n".encode() + (folder / name).read_bytes())
    return read.hexdigest()


def install() -> None:
    rendering.Child = child  # type: ignore[misc]
