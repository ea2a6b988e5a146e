"""By which network interface a node talks to the others."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from engine.run import nodes


@pytest.mark.parametrize(
    ("named", "elsewhere", "expected"),
    [
        ("127.0.1.1", False, "lo"),
        ("127.0.1.1", True, "net0"),
        ("198.51.100.7", True, "net0"),
        ("203.0.113.9", True, ""),
    ],
)
def test_a_machine_that_calls_itself_the_loopback_talks_to_others_by_the_way_out(
    monkeypatch: pytest.MonkeyPatch, named: str, elsewhere: bool, expected: str
) -> None:
    here = {"lo": "127.0.1.1", "net0": "198.51.100.7"}
    known = {name: [SimpleNamespace(address=address, family=socket.AF_INET)] for name, address in here.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    monkeypatch.setattr(nodes, "_source", lambda name, _: named if name == "first" else "198.51.100.7")
    assert nodes.interface("first:29500", elsewhere=elsewhere) == expected


def test_the_way_to_the_loopback_is_the_loopback() -> None:
    assert nodes.interface("127.0.0.1:29500") == "lo"
