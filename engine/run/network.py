"""How NCCL and gloo are told to reach other ranks: variables of the environment, and whether what they name is there."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from engine.errors import WorkbenchError, redact, visible
from engine.run.process import host

_MOST = 12


def settings(base: Mapping[str, str]) -> str:
    """The variables that say how ranks talk, as `NAME=value`, one after the other; empty where none is set."""
    found = sorted(name for name in base if name.startswith("NCCL_") or name == "GLOO_SOCKET_IFNAME")
    words = [f"{name}={visible(redact(base[name]))[:60]}" for name in found[:_MOST]]
    return ", ".join([*words, *(["…"] if len(found) > _MOST else [])])


def interfaces() -> list[str]:
    """The names of this machine's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def refuse_absent(base: Mapping[str, str]) -> None:
    """Raises WorkbenchError where GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names an interface that is not here."""
    if absent := absent_interface(base, interfaces()):
        raise WorkbenchError(absent)


def absent_interface(base: Mapping[str, str], here: Sequence[str]) -> str:
    """The sentence for the first interface that a variable names and that is not among these; empty where all are there.

    NCCL takes beginnings of names, whole ones after `=`, and after `^` those that it is to leave out.
    """
    for name in filter(None, base.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in here:
            return _absent("GLOO_SOCKET_IFNAME", name, here)
    asked = base.get("NCCL_SOCKET_IFNAME", "")
    if asked.startswith("^") or not asked:
        return ""
    whole, names = asked.startswith("="), [name for name in asked.removeprefix("=").split(",") if name]
    served = any(each == name if whole else each.startswith(name) for name in names for each in here)
    return "" if served else _absent("NCCL_SOCKET_IFNAME", asked, here)


def _absent(variable: str, name: str, here: Sequence[str]) -> str:
    return f"{variable}: {host()} has no network interface {visible(name)!r}; it has {', '.join(here)}."
