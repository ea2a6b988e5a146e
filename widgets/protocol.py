"""What a notebook widget may be asked and how it answers: checked messages in, plain data and buffers out.

A message is `{"id", "do", ...}`; the answer carries the same id, so several views of one widget share one comm and the
front end alone decides when to ask (a hosted notebook shows nothing that a background thread sends). A verb is a method
marked `@verb`: its annotations are the schema of its message, checked strictly, and an unknown or malformed message
gets a sentence back and changes nothing. Nothing that arrives is ever evaluated.

A part answers the verbs of one concern and needs no widget, so tests call it directly; a widget holds
several parts, and ends their threads when it is closed, taken over by a newer cell, or the kernel leaves.
"""

from __future__ import annotations

import atexit
import json
import queue
import re
import threading
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import anywidget
import traitlets
from pydantic import ConfigDict, ValidationError, validate_call

from engine.errors import WorkbenchError, redact, visible

_STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r"^import [^;]*? from \"\./([a-z]+)\.js\";\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=function|class|const|async)", re.MULTILINE)


def bundle(name: str, entry: str) -> str:
    """A module with all that it imports as one ES module, `entry` being its face: a widget's module can import no sibling."""
    texts: dict[str, str] = {}
    _gather(name, texts)
    body = "\n".join(texts.values())
    return f"{body}\nexport default {{ render({{ model, el }}) {{ return face(model, el, {entry}); }} }};\n"


def _gather(name: str, texts: dict[str, str]) -> None:
    """Adds a module behind the ones that it imports, each once."""
    text = (_STATIC / f"{name}.js").read_text(encoding="utf-8")
    for needed in _IMPORT.findall(text):
        if needed not in texts:
            _gather(needed, texts)
    texts[name] = _EXPORT.sub("", _IMPORT.sub("", text))


def style() -> str:
    return (_STATIC / "face.css").read_text(encoding="utf-8")


@dataclass
class Answer:
    """What goes back: JSON data, and numbers as little-endian arrays."""

    data: dict[str, Any] = field(default_factory=dict)
    buffers: list[bytes] = field(default_factory=list)


Method = TypeVar("Method", bound=Callable[..., Any])


def verb(method: Method) -> Method:
    """Marks a method as answering messages of its name; its keyword arguments are the message's schema."""
    method.is_verb = True  # type: ignore[attr-defined]
    return method


class Part:
    """Answers the verbs of one concern. Used under the lock of its widget, never from two threads at once."""

    def verbs(self) -> dict[str, Callable[..., Any]]:
        methods = {}
        for name in dir(type(self)):
            if getattr(getattr(type(self), name), "is_verb", False):
                methods[name] = validate_call(config=ConfigDict(strict=True))(getattr(self, name))
        return methods

    def summary(self) -> str:
        """Readable lines for a notebook that cannot show widgets."""
        return ""

    def close(self) -> None:
        """Ends threads and readers. May be called twice."""


class Dispatcher:
    """Routes one message to the part that knows its verb, and turns every trouble into a sentence."""

    def __init__(self, *parts: Part, ends: tuple[Callable[[], None], ...] = ()) -> None:
        self.parts = parts
        self._ends = ends
        self.retired = ""
        self.closed = False
        self._lock = threading.RLock()
        self._verbs: dict[str, Callable[..., Any]] = {}
        for part in parts:
            for name, act in part.verbs().items():
                if name in self._verbs:
                    raise ValueError(f"two parts answer {name!r}")
                self._verbs[name] = act

    def answer(self, message: Any) -> Answer:
        """The answer to any JSON value at all; never raises."""
        close_abandoned()
        asked = message if isinstance(message, dict) else {}
        name = asked.get("id")
        name = name[:64] if isinstance(name, str) else None
        if self.retired:
            return _refusal(name, self.retired, retired=True)
        do = asked.get("do")
        act = self._verbs.get(do) if isinstance(do, str) else None
        if name is None or act is None:
            return _refusal(name, f"This message is not known here: {str(do)[:40]!r}.")
        params = {key: value for key, value in asked.items() if key not in ("id", "do")}
        try:
            with self._lock:
                result = act(**params)
        except ValidationError as trouble:
            first = trouble.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            return _refusal(name, f"The message {do!r} is malformed at {place}: {first['msg']}.")
        except WorkbenchError as trouble:
            return _refusal(name, trouble.message, hint=trouble.hint)
        except Exception as trouble:  # noqa: BLE001 - the widget's boundary: the person sees it, the kernel lives on
            return _refusal(name, f"{type(trouble).__name__}: {trouble}")
        reply = result if isinstance(result, Answer) else Answer(result or {})
        return Answer({**reply.data, "id": name, "ok": True}, reply.buffers)

    def retire(self, reason: str) -> None:
        """From now on every question gets this sentence; the parts end their threads."""
        self.retired = reason
        self.close()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for part in self.parts:
            part.close()
        for end in self._ends:
            end()


_ABANDONED: queue.SimpleQueue[Dispatcher] = queue.SimpleQueue()


def close_abandoned() -> None:
    """Close what the garbage collector found; called where no lock is held."""
    while True:
        try:
            _ABANDONED.get_nowait().close()
        except queue.Empty:
            return


def _refusal(name: str | None, error: str, *, hint: str = "", retired: bool = False) -> Answer:
    message = {"id": name, "ok": False, "error": shown(error), "hint": shown(hint)}
    return Answer({**message, "retired": True} if retired else message)


def shown(text: str, limit: int = 2000) -> str:
    """Text from outside as a view may show it: no secrets, hidden characters visible, not endless."""
    clean = visible(redact(str(text)), lines=True)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def mark_of(content: Any) -> int:
    """By which a view knows again what it holds already."""
    return zlib.crc32(json.dumps(content, sort_keys=True, default=str).encode())


def news(content: dict[str, Any], mark: int) -> dict[str, Any]:
    """The content with its mark; the mark alone where the asker has it already."""
    now = mark_of(content)
    return {"mark": now} if now == mark else {"mark": now, **content}


class NotebookWidget(anywidget.AnyWidget):
    """The widget around a dispatcher: messages in and out, a text for places without widgets, one clean end."""

    _esm = ""
    height = traitlets.Int(480).tag(sync=True)

    def __init__(self, *parts: Part, height: int = 480, ends: tuple[Callable[[], None], ...] = ()) -> None:
        super().__init__(height=max(320, min(int(height), 2000)))
        self.dispatcher = Dispatcher(*parts, ends=ends)
        self.on_msg(self._receive)
        _OPEN.add(self)
        if self.comm is not None and hasattr(self.comm, "on_close"):
            self.comm.on_close(lambda _message: self.close())

    def answer(self, message: Any) -> Answer:
        return self.dispatcher.answer(message)

    def _receive(self, _widget: Any, content: Any, _buffers: Any) -> None:
        answer = self.answer(content)
        self.send(answer.data, answer.buffers)

    def retire(self, reason: str) -> None:
        """Taken over by a newer cell: what is on screen says so, threads end."""
        self.dispatcher.retire(reason)

    def close(self) -> None:
        """Ends threads and the view; also called for a widget whose making failed half way."""
        close_abandoned()
        if "dispatcher" in vars(self):
            self.dispatcher.close()
            _OPEN.discard(self)
        super().close()

    def __del__(self) -> None:
        """The collector may come while this very thread holds one of our locks: what needs them is closed later."""
        dispatcher = vars(self).get("dispatcher")
        if dispatcher is not None and not dispatcher.closed:
            _ABANDONED.put(dispatcher)
        super().close()

    def __repr__(self) -> str:
        texts = [part.summary() for part in self.dispatcher.parts]
        return "\n".join(text for text in texts if text) or type(self).__name__

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict, dict] | None:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/plain": repr(self)}, metadata


_OPEN: weakref.WeakSet[NotebookWidget] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for widget in list(_OPEN):
        widget.dispatcher.close()
