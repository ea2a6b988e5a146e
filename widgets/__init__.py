"""The notebook's widgets: `Workbench()`, and its parts alone:
`ConfigForm(draft)`, `Preview(draft)`, `Monitor(run)`, `Compare(run, run)`, `Chat(run)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from widgets.chat import Chat
    from widgets.compare import Compare
    from widgets.form import ConfigForm
    from widgets.monitor import Monitor
    from widgets.preview import Preview
    from widgets.workbench import Workbench

__all__ = ["Chat", "Compare", "ConfigForm", "Monitor", "Preview", "Workbench"]
_HOMES = {
    "Workbench": "workbench",
    "ConfigForm": "form",
    "Preview": "preview",
    "Monitor": "monitor",
    "Compare": "compare",
    "Chat": "chat",
}


def __getattr__(name: str) -> Any:
    """Imports a widget when it is asked for: one that is not used costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"widgets.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
